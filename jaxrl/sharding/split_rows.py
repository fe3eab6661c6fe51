"""Scores that come in parts, some rows each, become those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxrl.sharding.reshard import Rows
from jaxrl.sharding.shards import Shards, concat_rows
from jaxrl.types import Tree


def part_rows(n: int, part: int, parts: int, unit: int) -> slice | None:
    """Returns the rows of the `part`-th of `parts` slices of n, of a size that is a multiple of
    `unit`; if there are few rows the last slices are empty: None."""
    assert 0 <= part < parts, (part, parts)
    size = -(-n // (parts * unit)) * unit
    start, stop = part * size, min((part + 1) * size, n)
    return None if start >= stop else slice(start, stop)


def join_parts(scores: Tree) -> Tree:
    """Joins a list or tuple of trees with the same leaves into one tree; anything else is returned
    as it is.

    What lies on devices or in another worker stays there, as `Rows` or `Shards`: `reshard` fetches
    it.

    Args:
        scores: None among them is a part without rows.
    """
    if not isinstance(scores, list | tuple):
        return scores
    filled = [part for part in scores if part is not None]
    assert filled, "no part has a row"
    kinds: Sequence[tuple[type, Callable[..., Rows | Shards | np.ndarray]]] = (
        (Shards, concat_rows),
        (jax.Array, Rows),
        (np.ndarray, np.concatenate),
    )

    def join(*leaves: object) -> Rows | Shards | np.ndarray:
        for kind, joined in kinds:
            if all(isinstance(leaf, kind) for leaf in leaves):
                return joined(leaves)
        raise TypeError(f"parts of several kinds: {[type(leaf).__name__ for leaf in leaves]}")

    return filled[0] if len(filled) == 1 else jax.tree.map(join, *filled)
