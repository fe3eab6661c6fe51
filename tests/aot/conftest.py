"""What the compilers of machines that are not here make is not cached: jax could store it, but not
load it again."""

import math
from collections.abc import Iterator

import jax
import pytest

LEAST = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture(autouse=True, scope="module")
def no_compile_cache() -> Iterator[None]:
    before = getattr(jax.config, LEAST)
    jax.config.update(LEAST, math.inf)
    yield
    jax.config.update(LEAST, before)
