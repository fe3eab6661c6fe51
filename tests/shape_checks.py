"""Checks the shape annotations of the modules that compute losses while the tests run.

`types` is left out: jaxtyping's hook would also check dataclasses that JAX fills with other things
than arrays while it transforms a pytree.
"""

from __future__ import annotations

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

MODULES = ("jaxrl.losses.kl", "jaxrl.losses.policy", "jaxrl.losses.correction")

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""An int is a float, as everywhere in Python's typing."""


def install() -> None:
    """To be called before any of the modules is imported."""
    install_import_hook(MODULES, "shape_checks.checked")
