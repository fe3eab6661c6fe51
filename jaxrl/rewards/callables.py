"""Reward functions that a Python program gives to `train`: named in the config, and pickled.

The config's record of one is `python:NAME@DIGEST`. The digest is of its source, or of its qualified
name where Python has no source; values from around it are not part of it. So a run resumes only
with the function that it began with.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import cloudpickle

from jaxrl.config.schema import Config
from jaxrl.errors import UserError

PREFIX = "python:"
DIGITS = 12
"""Hex digits of a digest."""

AnyConfig = TypeVar("AnyConfig", bound=Config)


def bind(
    config: AnyConfig, rewards: Sequence[Callable[..., object]]
) -> tuple[AnyConfig, dict[str, bytes]]:
    """Returns the config with an entry of `reward.functions` for each function, and by these
    entries the pickled functions.

    A function NAME takes the place of `python:NAME`; where there is none it comes last.

    Raises:
        UserError: one is no function, cannot be pickled, or has the name of another; or the config
            does not allow them.
    """
    if not rewards:
        return config, {}
    if callable(rewards):
        raise UserError("rewards is a list of functions: write rewards=[f]")
    entries = list(config.reward.functions)
    given: dict[str, bytes] = {}
    for function in rewards:
        name = name_of(function)
        text = f"{PREFIX}{name}@{digest(function)}"
        if any(other.partition("@")[0] == f"{PREFIX}{name}" for other in given):
            raise UserError(f"rewards: two functions are called {name!r}: rename one")
        named = [entry.partition("@")[0] for entry in entries]
        if PREFIX + name in named:
            entries[named.index(PREFIX + name)] = text
        else:
            entries.append(text)
        try:
            given[text] = cloudpickle.dumps(function)
        except Exception as error:
            raise UserError(
                f"rewards: {name} cannot be sent to another process: {type(error).__name__}:"
                f" {error}; remove what cannot be pickled from it, or write it in a file and name"
                " it in reward.functions as path.py:function"
            ) from error
    reward = config.reward.model_dump() | {"functions": entries}
    return type(config).parse(dict(config) | {"reward": reward}), given


def name_of(function: Callable[..., object]) -> str:
    """Returns what the metrics call it: `reward/NAME/...`."""
    if not callable(function) or inspect.isclass(function):
        raise UserError(f"rewards: {function!r} is no function f(prompts, completions, **columns)")
    own = getattr(_inner(function), "__name__", type(function).__name__)
    return re.sub(r"\W+", "_", own).strip("_")


def digest(function: Callable[..., object]) -> str:
    """Computes the digest of its source, or else of its qualified name."""
    inner = _inner(function)
    code = inner if hasattr(inner, "__name__") else type(inner)
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError):  # typed at a prompt, or built in
        text = f"{code.__module__}.{code.__qualname__}"
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _inner(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
