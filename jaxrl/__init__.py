"""jaxrl: post-training of language models in JAX, on a device set carved into role sub-meshes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.config import Config as Config
    from jaxrl.evaluate import evaluate as evaluate
    from jaxrl.generate import generate as generate
    from jaxrl.model import load_model as load_model
    from jaxrl.train import Result as Result
    from jaxrl.train import dry_run as dry_run
    from jaxrl.train import train as train

_MODULES = ("evaluate", "generate", "train")
"""Commands whose module is callable, and is itself the public name (`callable_module.py`)."""
_NAMES = {
    "Config": "jaxrl.config",
    "Result": "jaxrl.train",
    "dry_run": "jaxrl.train",
    "load_model": "jaxrl.model",
}
__all__ = ["Config", "Result", "dry_run", "evaluate", "generate", "load_model", "train"]


def __dir__() -> list[str]:
    """The public names, whether or not they are imported yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: `--help` need not load jax."""
    if name in _MODULES:
        return import_module(f"jaxrl.{name}")
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'jaxrl' has no attribute {name!r}")
