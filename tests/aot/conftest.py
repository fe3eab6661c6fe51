"""What the compilers of machines that are not here make is not cached: jax could store it, but not
load it again."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def no_compile_cache() -> Iterator[None]:
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
