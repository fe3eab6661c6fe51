"""Checks the shape annotations of the array functions while the tests run.

`types` is left out: jaxtyping's hook would also check dataclasses that JAX fills with other things
than arrays while it transforms a pytree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import install_import_hook

MODULES = (
    *(f"jaxrl.losses.{name}" for name in ("chunked", "correction", "distill")),
    *(f"jaxrl.losses.{name}" for name in ("divergence", "head", "policy")),
    "jaxrl.algorithms.advantages",
    "jaxrl.algorithms.signals",
    "jaxrl.models.decoder",
)


def install() -> None:
    """To be called before any of the modules is imported."""
    try:
        import beartype  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the tests check shape annotations with beartype, which is not installed:"
            " pip install -e '.[dev]'"
        ) from error
    install_import_hook(MODULES, "shape_checks.checked")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its annotations checked; an int is a float, as everywhere in Python.

    jaxtyping asks for a function that checks the arguments alone and, after the call, for one that
    checks all: there only the result is left to check.
    """
    from beartype import BeartypeConf, beartype

    result = function.__annotations__.get("return", Any)
    if result is not Any:
        function.__annotations__ = {"return": result}
    return beartype(function, conf=BeartypeConf(is_pep484_tower=True))
