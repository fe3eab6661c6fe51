"""Lengths that vary in arrays of few shapes: one ladder of sizes, with few programs and little
padding, and sequences of many lengths through a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.sharding.axes import ROWS, row_shards
from jaxrl.sharding.ledger import current
from jaxrl.sharding.reshard import put
from jaxrl.types import Tree

NARROWEST = 4
"""Smallest width of a batch, tokens."""
BATCH_TOKENS = 4096
"""Usual number of tokens of a batch on one device, padding included."""
Run = jax.stages.Wrapped
"""Jitted: (..., tokens [R, W] int32, mask [R, W] bool) -> [R, ...], whole on every device."""
Progress = Callable[[str], None]


def round_up(n: int, multiple: int) -> int:
    """Returns the least multiple that is not below n."""
    return -(-n // multiple) * multiple


def bucket(
    n: int, *, smallest: int = 1, steps: int = 1, multiple: int = 1, most: int | None = None
) -> int:
    """Returns the least size of a ladder that holds n.

    Args:
        smallest: the first size; from there on sizes double.
        steps: number of equal steps of each doubling; a power of two. Above `smallest`, at most
            1 / (steps + 1) of a size is padding: half, a third (2), a fifth (4).
        multiple: sizes are rounded up to a multiple of it.
        most: no size is above this, rounded up as well.
    """
    low = smallest
    while 2 * low < n:
        low *= 2
    size = low if n <= low else low + round_up((n - low) * steps, low) // steps
    return round_up(size if most is None else min(size, most), multiple)


@dataclass(frozen=True)
class Batch:
    """Some of the sequences, right-padded."""

    rows: tuple[int, ...]
    """Which they are; the array may have more rows, which are padding."""
    tokens: np.ndarray
    """[R, W] int32."""
    mask: np.ndarray
    """[R, W] bool."""


def ladder_width(n: int, longest: int) -> int:
    """Returns the width that a sequence of n tokens is padded to: the next of 4, 6, 8, 12, 16, 24,
    ..., at most `longest`, and even: some attention kernels take no other."""
    return bucket(n, smallest=NARROWEST, steps=2, multiple=2, most=longest)


def rows_of(width: int, batch_tokens: int) -> int:
    """Returns the number of rows of a full batch on each device that holds rows, at least 1."""
    return max(1, batch_tokens // width)


def batches(
    sequences: Sequence[Sequence[int]], *, shards: int, batch_tokens: int, longest: int
) -> Iterator[Batch]:
    """Yields the sequences in batches from long to short, each batch full but the last.

    The last is as high as the next power of two asks for, so that the shapes are few.

    Args:
        shards: devices that the rows of a batch are divided among.
        batch_tokens: as in `run_batches`.
        longest: no sequence is longer.
    """
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
    start = 0
    while start < len(order):
        width = ladder_width(len(sequences[order[start]]), longest)
        full = rows_of(width, batch_tokens)
        rows = order[start : start + full * shards]
        height = bucket(-(-len(rows) // shards), most=full) * shards
        tokens, mask = np.zeros((height, width), np.int32), np.zeros((height, width), bool)
        for at, row in enumerate(rows):
            n = len(sequences[row])
            tokens[at, :n], mask[at, :n] = sequences[row], True
        yield Batch(tuple(rows), tokens, mask)
        start += len(rows)


def run_batches(
    sequences: Sequence[Sequence[int]],
    run: Run,
    *leading: Tree,
    mesh: Mesh | None,
    batch_tokens: int,
    longest: int,
    progress: Progress | None = None,
) -> np.ndarray:
    """Runs `run` on sequences, equal ones only once; returns its results in their order.

    Args:
        leading: arguments of `run` before the tokens.
        batch_tokens: of a batch on one device, padding included; a longer sequence is alone.
        progress: called with how far it is, before each batch.
    """
    distinct = list(dict.fromkeys(map(tuple, sequences)))
    shards = 1 if mesh is None else row_shards(mesh.shape)
    results: dict[int, np.ndarray] = {}
    for batch in batches(distinct, shards=shards, batch_tokens=batch_tokens, longest=longest):
        if progress is not None:
            progress(f"{len(results)} of {len(distinct)} texts")
        arguments = (*leading, _put(batch.tokens, mesh), _put(batch.mask, mesh))
        with current().running(run, *arguments):
            values = np.asarray(run(*arguments))
        results.update(zip(batch.rows, values, strict=False))  # further rows are padding
    at = {sequence: i for i, sequence in enumerate(distinct)}
    return np.stack([results[at[tuple(sequence)]] for sequence in sequences])


def _put(x: np.ndarray, mesh: Mesh | None) -> jax.Array:
    if mesh is None:
        return jnp.asarray(x)
    return put(x, NamedSharding(mesh, PartitionSpec(ROWS, None)))
