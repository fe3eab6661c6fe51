"""The page of the comparison of distillations keeps the sections that were not run again."""

from __future__ import annotations

import argparse

import distillation


def test_a_section_that_was_not_run_stays_as_it_is(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\nIntroduction.\n\n## Which divergence\n\nOld.\n\n## Other\n\nGone.\n"
    )
    asked = argparse.Namespace(steps=7, seeds=[0], only=["flat"], overrides=[], out=page)
    figures = {"top1_agreement": 0.5, "student_entropy": 0.25, "teacher_entropy": 0.125}
    rows = [{"label": "flat/without", "seed": 0, **figures}]
    parts = distillation.page(rows, asked)
    assert parts.count("## Which divergence\n\nOld.") == 1
    text = "\n\n".join(parts)
    assert (
        "| without | 50.0% | 0.250 | 0.125 |" in text and "--steps 7 --seeds 0 --only flat" in text
    )
    assert "Gone." not in text and "AsyncOPD" not in text
