"""Laws of the ladder of sizes."""

from __future__ import annotations

import pytest

from jaxrl.models.batching import bucket


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("smallest", [1, 4, 64])
def test_a_size_is_the_least_that_holds_and_wastes_little(smallest: int, steps: int) -> None:
    sizes = {n: bucket(n, smallest=smallest, steps=steps) for n in range(1, 1500)}
    ladder = sorted(set(sizes.values()))
    for n, size in sizes.items():
        assert size == min(x for x in ladder if x >= n)
        assert n <= smallest or (size - n) < size / (steps + 1)
    per_doubling = [sum(x < y <= 2 * x for y in ladder) for x in ladder if 4 <= x < 512]
    assert max(per_doubling) <= steps


def test_sizes_and_the_largest_are_rounded_up() -> None:
    rounded = {bucket(n, smallest=64, steps=4, multiple=64, most=500) for n in range(1, 501)}
    assert sorted(rounded) == [64, 128, 192, 256, 320, 384, 448, 512]
    assert bucket(500, smallest=64, most=500) == 500
