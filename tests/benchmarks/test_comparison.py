"""A comparison that was stopped runs what it lacks, and keeps runs of other settings apart."""

from __future__ import annotations

import sys
from functools import partial

import comparison
import pytest


def arguments(folder, monkeypatch, *given):
    results = ["--results", str(folder / "results" / "runs.jsonl"), "--seeds", "0", "1"]
    monkeypatch.setattr(sys, "argv", ["comparison", *given, *results])
    chosen = {"only": ["a", "b", "a"], "results": folder / "r", "page": folder / "page.md"}
    return comparison.parse("About.", steps=7, **chosen)


def test_a_stopped_comparison_resumes(tmp_path, monkeypatch):
    done = []

    def run(label, seed, stop=False):
        if stop and len(done) == 3:
            raise KeyboardInterrupt
        done.append((label, seed))
        return {"value": len(done)}

    asked = arguments(tmp_path, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        comparison.complete({x: partial(run, x, stop=True) for x in "ab"}, asked)
    runs = {x: partial(run, x) for x in "ab"}
    rows = comparison.complete(runs, asked)
    assert done == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [rows[each]["value"] for each in done] == [1, 2, 3, 4]
    for other in (["--steps", "8"], ["seed=3"]):
        assert comparison.read(arguments(tmp_path, monkeypatch, *other)) == {}
    assert comparison.complete(runs, asked) == rows


def test_what_is_not_there_cannot_be_chosen(tmp_path, monkeypatch, capsys):
    assert arguments(tmp_path, monkeypatch, "--only", "b").only == ["b"]
    with pytest.raises(SystemExit):
        arguments(tmp_path, monkeypatch, "--only", "c")
    assert "choose from" in capsys.readouterr().err
