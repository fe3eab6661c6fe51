"""Cases of a law: those of the default suite, and more of the same that are slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def and_slow(default: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """What `parametrize` takes.

    Args:
        more: a tuple has a value for each name of a parametrization.
    """
    each = (case if isinstance(case, tuple) else (case,) for case in more)
    return [*default, *(pytest.param(*case, marks=pytest.mark.slow) for case in each)]
