"""How far two results may be apart that were rounded in another order."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

DEVIATIONS = 6.0
"""Standard deviations of a random walk whose steps are half a unit in the last place, one for each
addition: 3 of 10^8 values are farther away (Higham and Mary, A new approach to probabilistic
rounding error analysis, 2019)."""


def tolerance(dtype: DTypeLike, terms: int, scale: float | np.ndarray = 1.0) -> float | np.ndarray:
    """Returns the largest difference between two computations of one value, each of which rounds.

    What a compiler or a processor changes is the order of additions, and which products are not
    rounded before they are added. The bound follows from that, and not from what one of them gave.

    Args:
        dtype: of the arithmetic.
        terms: how many additions follow on each other on the longest way to the value.
        scale: the size of the partial sums, where what is added does not cancel that of the result.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    return 2 * DEVIATIONS * math.sqrt(terms) * unit * scale
