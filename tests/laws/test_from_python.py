"""The page on Python: its code runs from top to bottom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from one_layer import cut_models, take_cut_models
from pages import DOCS, blocks

import jaxrl

PAGE = DOCS / "from-python.md"


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    take_cut_models(cut_models(tmp_path / "cut"), monkeypatch)
    place: dict[str, Any] = {"__name__": "example"}
    for block in blocks(PAGE):
        exec(compile(block, str(PAGE), "exec"), place)
    assert (tmp_path / "runs" / "from-python" / "final" / "config.json").is_file()


def test_the_page_names_every_public_function() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [name for name in jaxrl.__all__ if name not in text]
