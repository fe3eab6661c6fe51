"""One ladder of sizes for arrays whose lengths vary: few programs, little padding."""

from __future__ import annotations


def round_up(n: int, multiple: int) -> int:
    """Returns the least multiple that is not below n."""
    return -(-n // multiple) * multiple


def bucket(
    n: int, *, smallest: int = 1, steps: int = 1, multiple: int = 1, most: int | None = None
) -> int:
    """Returns the least size of a ladder that holds n.

    Args:
        smallest: the first size; from there on sizes double.
        steps: into so many equal steps is each doubling divided; a power of two. Above `smallest`,
            at most 1 / (steps + 1) of a size is padding: half, a third (2), a fifth (4).
        multiple: sizes are rounded up to a multiple of it.
        most: no size is above this, rounded up as well.
    """
    low = smallest
    while 2 * low < n:
        low *= 2
    size = low if n <= low else low + round_up((n - low) * steps, low) // steps
    return round_up(size if most is None else min(size, most), multiple)
