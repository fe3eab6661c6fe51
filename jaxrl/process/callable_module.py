"""Modules that can be called, for public functions that share their name with the command's module.

`from jaxrl import train` gives a function or the module `jaxrl.train`, depending on what was
imported before; with the module callable both are right, and `jaxrl.train.main` stays reachable.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(name: str, function: Callable[..., object]) -> None:
    """Makes the imported module `name` call `function`, and show its signature and docstring."""

    class CallableModule(ModuleType):
        def __call__(self, *args: object, **kwargs: object) -> object:
            return function(*args, **kwargs)

    if name in sys.modules:
        module: Any = sys.modules[name]
        module.__class__ = CallableModule
        module.__signature__ = inspect.signature(function)
        module.__doc__ = function.__doc__
