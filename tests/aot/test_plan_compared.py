"""The plan's bytes against the compilers', of the programs in `benchmarks/plan_compared.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_runs import LEAST, MOST, NEEDS_COMPILERS
from plan_compared import CASES

pytestmark = NEEDS_COMPILERS
BY_DEFAULT = {
    "H200: score, topk, 32 x 1280",  # which sorts a chunk's logits
    "H200: update, GSPO, 32 x 1280, full, 4 devices",  # the vocabulary outweighs the layers
    "v6e: score, 192 x 4096, 28 layers",
    "v5e: update, GSPO, 32 x 1280, full, 4 devices",  # 224 columns, no whole lanes
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow][: name not in BY_DEFAULT])
        for name in sorted(CASES)
    ],
)
def test_the_plan_of_a_program_is_within_the_stated_share(name: str, tmp_path: Path) -> None:
    planned, compiled = CASES[name].compared(tmp_path)
    assert LEAST <= planned / compiled <= MOST
