"""jaxrl: post-training of language models in JAX, on a device set carved into role sub-meshes."""

from __future__ import annotations

import os
import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # `python -m jaxrl.COMMAND` looks for libraries in the working directory first, where a file
    # json.py would be run in place of the library; `jaxrl COMMAND` does not look there.
    here, ours = sys.path.pop(0), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if here == ours and here not in sys.path:  # a source tree that is not installed
        sys.path.append(here)

from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.checkpoint.model_source import load_model as load_model
    from jaxrl.config.schema import Config as Config
    from jaxrl.errors import RunError as RunError
    from jaxrl.errors import StopTraining as StopTraining
    from jaxrl.errors import UserError as UserError
    from jaxrl.evaluate import evaluate as evaluate
    from jaxrl.export import export as export
    from jaxrl.generate import generate as generate
    from jaxrl.run.replay import replay as replay
    from jaxrl.run.session import session as session
    from jaxrl.train import Result as Result
    from jaxrl.train import dry_run as dry_run
    from jaxrl.train import train as train

__version__ = "0.1.0"

_MODULES = {
    "evaluate": "jaxrl.run.evaluation",
    "export": "jaxrl.checkpoint.model_source",
    "generate": "jaxrl.run.generation",
    "train": "jaxrl.run.attempt",
}
"""Commands whose module is callable, and is itself the public name (`config.cli.make_callable`) ->
what the function needs: `from jaxrl import train` takes the time of its imports, not the call."""
_NAMES = {
    "Config": "jaxrl.config",
    "Result": "jaxrl.train",
    "RunError": "jaxrl.errors",
    "StopTraining": "jaxrl.errors",
    "UserError": "jaxrl.errors",
    "dry_run": "jaxrl.train",
    "load_model": "jaxrl.checkpoint.model_source",
    "replay": "jaxrl.run.replay",
    "session": "jaxrl.run.session",
}
_HOMES = {
    "jaxrl.advantages": "jaxrl.algorithms.advantages",
    "jaxrl.models.encoder": "jaxrl.roles.grouper",
    "jaxrl.models.reward": "jaxrl.roles.reward",
    "jaxrl.similarity": "jaxrl.algorithms.similarity",
}
"""Public name of a module -> where it is."""
__all__ = sorted((*_MODULES, *_NAMES))


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Returns the public names, imported when first asked for: `--help` need not load jax."""
    if name in _MODULES:
        import_module(_MODULES[name])
        return import_module(f"jaxrl.{name}")
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'jaxrl' has no attribute {name!r}")


class _Homes(MetaPathFinder, Loader):
    """Imports the modules of `_HOMES` by their public names."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in _HOMES else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(_HOMES[module.__name__])


sys.meta_path.append(_Homes())
