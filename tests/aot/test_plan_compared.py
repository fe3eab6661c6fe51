"""Bytes of the plan and of the walk against the compilers', of the programs in
`benchmarks/plan_compared.py`."""

from __future__ import annotations

import statistics
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases import and_slow
from compiled_runs import LEAST, MOST, NEEDS_COMPILERS, config, planned_and_reported
from plan_compared import CASES, TARGETS, measured, recorded, walked_as_measured

LOGITS_AT_ONCE = "4 x 1280"
BY_DEFAULT = [
    "H200: decode, 32 x 1280, 2 layers",
    "H200: update, GSPO, 32 x 1280, full, 4 devices",  # the vocabulary outweighs the layers
    "v5e: score, reference, 4 x 1280",  # the logits outweigh the layers
    "v5e: update, GSPO, 32 x 1280, full, 4 devices",  # 224 columns, no whole lanes
    "v6e: score, 192 x 4096, 28 layers",
]


def needs_compilers(test: Any) -> Any:
    for mark in NEEDS_COMPILERS:
        test = mark(test)
    return test


@cache
def ratios(name: str) -> tuple[float, float]:
    """What the walk says of a program, and the plan, which adds a margin, in parts of the bytes by
    the compiler."""
    with tempfile.TemporaryDirectory() as folder:
        walked, planned = CASES[name].estimates(Path(folder))
    return walked / recorded()[name], planned / recorded()[name]


@pytest.mark.parametrize("name", and_slow(BY_DEFAULT, sorted(CASES.keys() - {*BY_DEFAULT})))
def test_plan_and_walk_are_near_what_the_compilers_said(name: str) -> None:
    """The walk counts the logits of scores that exist at once as they are written, where a compiler
    may never write them."""
    walked, planned = ratios(name)
    assert 0.92 <= walked <= (2 if LOGITS_AT_ONCE in name else 1.15)
    assert LEAST <= planned <= (2.2 if LOGITS_AT_ONCE in name else MOST)


@pytest.mark.slow
@pytest.mark.parametrize("platform", TARGETS)
def test_half_of_the_walks_are_within_8_percent(platform: str) -> None:
    sizes = [ratios(name)[0] for name in CASES if name.startswith(f"{platform}:")]
    assert sizes and statistics.median(abs(size - 1) for size in sizes) <= 0.08


HELD = ["score by Qwen2.5-7B", "update of Qwen2.5-1.5B, remat full"]


@pytest.mark.parametrize("name", and_slow(HELD, sorted(measured().keys() - {*HELD})))
def test_the_walk_is_near_what_a_device_held(name: str) -> None:
    first, row = measured()[name]
    assert row["device"] == pytest.approx(row["compiled"], rel=0.01)
    assert 0.92 <= walked_as_measured(first, row) / row["device"] <= 1.05


COMPILED = "H200: score, topk, 32 x 1280"


@needs_compilers
@pytest.mark.parametrize("name", and_slow([COMPILED], sorted(CASES.keys() - {COMPILED})))
def test_the_record_is_what_the_compilers_say(name: str, tmp_path: Path) -> None:
    assert CASES[name].compiled(tmp_path) == pytest.approx(recorded()[name], rel=0.01)


@needs_compilers
@pytest.mark.parametrize(
    ("target", "tensor", "signal"),
    and_slow(
        [("tpu-v5e:2x2", 2, "topk")],
        [
            *(("tpu-v5e:2x2", n, s) for n in (1, 2) for s in ("student_topk", "sampled")),
            *(("h200x8", 1, s) for s in ("topk", "student_topk", "sampled")),
        ],
    ),
)
def test_the_plan_of_a_mixture_of_teachers_is_too(
    target: str, tensor: int, signal: str, tmp_path: Path
) -> None:
    """Of what makes one signal of the hidden states of two, 2048 tokens of logits at once."""
    teacher = {"model": str(tmp_path / "teacher")}
    distill = {"signal": signal, "mixture": "arithmetic", "chunk_tokens": 2048}
    run = config(
        tmp_path,
        {"num_hidden_layers": 2},
        mesh=f"actor=1,rollout=1,teacher={tensor}",
        teacher={"model": None, "parallel": {"tensor": tensor}},
        teachers={"a": teacher, "b": teacher},
        distill=distill | ({"jsd_beta": 1.0} if signal == "sampled" else {}),
    )
    planned, compiled = planned_and_reported(run, target, "teacher", "mixture")
    assert LEAST <= planned / compiled <= MOST
