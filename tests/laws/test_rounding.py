"""The tolerance of numeric tests holds for any order of additions, and is no looser than that."""

import jax.numpy as jnp
import numpy as np
import pytest
from rounding import tolerance


@pytest.mark.parametrize("terms", [16, 256, 4096])
def test_sums_in_any_order_are_within_the_tolerance_and_not_far_below_it(terms: int) -> None:
    random = np.random.default_rng(terms)
    values = random.uniform(0.5, 1.0, terms).astype(np.float32)
    orders = np.stack([random.permutation(values) for _ in range(500)])
    sums = np.cumsum(orders, axis=1, dtype=np.float32)[:, -1]  # one after the other
    limit = tolerance(jnp.float32, terms, float(values.sum(dtype=np.float64)))
    farthest = float(sums.max() - sums.min())
    assert 0 < farthest < limit < 20 * farthest


def test_a_tolerance_follows_dtype_length_and_size() -> None:
    one = tolerance(jnp.float32, 100)
    assert tolerance(jnp.bfloat16, 100) == pytest.approx(one * 2**16)
    assert tolerance(jnp.float32, 400) == pytest.approx(2 * one)
    np.testing.assert_allclose(tolerance(jnp.float32, 100, np.array([1.0, 3.0])), [one, 3 * one])
