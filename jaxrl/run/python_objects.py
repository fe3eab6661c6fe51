"""What a Python program gives beside a config: rows, reward functions, an environment, a model.

The config of the run records where they came from. Rows are `python:data` and `python:eval_data`:
they stay in this process, and the fingerprint of the data says whether a run resumes with the same
ones. A function or a class is `python:NAME@DIGEST` and goes to processes of its own by cloudpickle;
the digest is of its source, or of its qualified name where Python has no source, and values from
around it are not part of it. A model is written into the run directory, in a folder named by a
digest of its weights.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import numpy as np

from jaxrl.checkpoint import store
from jaxrl.checkpoint.fingerprint import GIVEN_MODEL, digest_model
from jaxrl.checkpoint.model_source import Model
from jaxrl.config.schema import Config
from jaxrl.data.source import Rows, listed_rows
from jaxrl.environments.environment import Environment
from jaxrl.errors import UserError, shown
from jaxrl.formats import hf, weights
from jaxrl.losses.algorithm_table import AlgorithmSpec
from jaxrl.process.json_types import JsonObject
from jaxrl.process.plugin import PYTHON, give_objects
from jaxrl.run.run_dir import check_run_dir

GivenConfig = Config | str | Path | Mapping[str, object] | None
"""A run as `train` takes it."""
GivenModel = Any
"""A name, a `Model`, or a pair of `transformers.PreTrainedModel` and tokenizer."""
GivenEnvironment = Callable[..., Environment] | str | None
"""A class, another function that returns an environment, or a name."""
GivenAlgorithm = AlgorithmSpec | str | Mapping[str, Any] | None
"""An algorithm, its name, or a mapping of `name` and `arguments`."""
DATA, EVAL_DATA = f"{PYTHON}data", f"{PYTHON}eval_data"
DIGITS = 12
"""Hex digits of a digest."""


@dataclass(frozen=True)
class PythonObjects:
    """The objects that the config names, by what it names them."""

    code: Mapping[str, bytes] = field(default_factory=dict)
    """Pickled reward functions and environment; workers get these."""
    rows: Mapping[str, Rows] = field(default_factory=dict)
    answers: Path | None = None
    """The folder of the run that is replayed, whose environments' answers are given again; None:
    environments are asked."""


NOTHING = PythonObjects()


@contextmanager
def bound(
    config: GivenConfig, model: GivenModel = None, *, dry: bool = False, **objects: Any
) -> Iterator[tuple[Config, PythonObjects]]:
    """Gives the config of a run with the objects that it names (`bind`).

    Args:
        model: takes the place of `student.model`. One that is no name is written into the run
            directory, and removed where bad input ends what happens inside.
        dry: write only the model's config and tokenizer, and remove them.
    """
    if model is None or isinstance(model, str | Path):
        yield bind(config, model=model, **objects)
        return
    made, given = bind(config, model=f"{PYTHON}model", **objects)
    with ExitStack() as stack:
        folder = stack.enter_context(_written(model, check_run_dir(made), dry))
        student = made.student.model_copy(update={"model": str(folder)})
        yield made.model_copy(update={"student": student}), given


def bind(
    config: GivenConfig,
    *,
    model: str | Path | None = None,
    data: Rows = None,
    eval_data: Rows = None,
    environment: GivenEnvironment = None,
    algorithm: GivenAlgorithm = None,
    rewards: Sequence[Callable[..., object]] = (),
) -> tuple[Config, PythonObjects]:
    """Returns the config with the objects in their places, and the objects.

    A reward function NAME takes the place of `python:NAME` in `reward.functions`; where there is
    none it comes last. All others take the places of the keys that they stand for.

    Raises:
        UserError: one is not what it should be, cannot be pickled, or has the name of another; or
            the config does not allow them.
    """
    keys, given = entries(data, eval_data, environment, algorithm)
    if model is not None:
        keys["student.model"] = str(model)
    functions = pickled_rewards(rewards)
    made = Config.of(config, keys, partial(_place_rewards, functions))
    return made, PythonObjects({**given.code, **functions}, given.rows)


def replace_rewards(
    config: Config, given: PythonObjects, rewards: Sequence[Callable[..., object]]
) -> tuple[Config, PythonObjects]:
    """Returns the config and the objects of a run with other reward functions of Python. One that
    has the name of a former one takes its place and its weight; other former ones are left out, and
    other new ones come last.

    Raises:
        UserError: as `bind`.
    """
    functions = pickled_rewards(rewards)
    names = {_name(text) for text in functions}
    section = config.reward
    pairs = zip(section.functions, section.weights_of_functions, strict=True)
    kept = [(t, w) for t, w in pairs if not t.startswith(PYTHON) or _name(t) in names]

    def place(mapping: JsonObject) -> JsonObject:
        own: JsonObject = {"functions": [text for text, _ in kept]}
        if section.weights is not None:
            own["weights"] = [weight for _, weight in kept]
        return _place_rewards(functions, mapping | {"reward": mapping["reward"] | own})

    code = {text: c for text, c in given.code.items() if text not in section.functions}
    return Config.of(config, change=place), PythonObjects({**code, **functions}, given.rows)


def _name(entry: object) -> str:
    """Returns an entry of `reward.functions` without its digest."""
    return str(entry).partition("@")[0]


def pickled_rewards(rewards: Sequence[Callable[..., object]]) -> dict[str, bytes]:
    """Maps their entries in `reward.functions` to the functions, pickled."""
    if callable(rewards) or isinstance(rewards, str) or not isinstance(rewards, Iterable):
        raise UserError(
            "rewards is a list of functions: write rewards=[f]; reward.functions takes names"
        )
    functions: dict[str, bytes] = {}
    for function in rewards:
        if not callable(function) or inspect.isclass(function):
            hint = ": reward.functions takes names" if isinstance(function, str) else ""
            raise UserError(
                f"rewards: {function!r} is no function f(prompts, completions, **columns){hint}"
            )
        text, packed = _pickled(function, "rewards", "reward.functions as path.py:function")
        if (name := _name(text)) in map(_name, functions):
            raise UserError(
                f"rewards: two functions are called {name.removeprefix(PYTHON)!r}: rename one"
            )
        functions[text] = packed
    return functions


def _place_rewards(functions: Mapping[str, bytes], mapping: JsonObject) -> JsonObject:
    """Puts reward functions in their places among the keys of a config."""
    section = mapping.get("reward") or {}
    if not functions or not isinstance(section, dict):
        return mapping
    named = section.get("functions") or []
    placed = [named] if isinstance(named, str) else list(named)
    for text in functions:
        at = [_name(one) for one in placed]
        if _name(text) in at:
            placed[at.index(_name(text))] = text
        else:
            placed.append(text)
    return mapping | {"reward": section | {"functions": placed}}


def entries(
    data: Rows, eval_data: Rows, environment: GivenEnvironment, algorithm: GivenAlgorithm = None
) -> tuple[dict[str, object], PythonObjects]:
    """Returns the keys of a config that rows and an environment stand for, and these objects. A
    text in place of rows is the name of a source."""
    keys: dict[str, object] = {}
    rows: dict[str, Rows] = {}
    code: dict[str, bytes] = {}

    def take(entry: str, given: Rows, label: str) -> str:
        if isinstance(given, str | Path):
            return str(given)
        rows[entry] = listed_rows(given, label)
        return entry

    if data is not None:
        keys["data.train"] = [take(DATA, data, "data")]
    if isinstance(eval_data, Mapping):
        keys["data.eval"] = {
            str(name): [take(f"{EVAL_DATA}.{name}", one, f"eval_data[{name!r}]")]
            for name, one in eval_data.items()
        }
    elif eval_data is not None:
        keys["data.eval"] = [take(EVAL_DATA, eval_data, "eval_data")]
    if isinstance(environment, str):
        keys["environment.name"] = environment
    elif environment is not None:
        if isinstance(environment, Environment) or not callable(environment):
            raise UserError(
                f"environment: {shown(environment)} is neither a class nor a function that makes an"
                " environment: each episode has a separate instance"
            )
        if inspect.isclass(environment) and not issubclass(environment, Environment):
            raise UserError(
                f"environment: {environment.__name__} must be a subclass of"
                " jaxrl.environments.Environment"
            )
        place = "environment.name as path.py:Class"
        text, code[text] = _pickled(environment, "environment", place)
        keys["environment.name"] = text
    if isinstance(algorithm, AlgorithmSpec):
        text = f"{PYTHON}algorithm@{_digest_spec(algorithm)}"
        keys["algorithm"], code[text] = (
            text,
            _packed(algorithm, "algorithm", "algorithm=path.py:NAME"),
        )
        give_objects({text: code[text]})
    elif algorithm is not None:
        keys["algorithm"] = algorithm
    return keys, PythonObjects(code, rows)


def name_of(function: Callable[..., object]) -> str:
    """Returns the name of a function in metrics and messages, as in `reward/NAME/...`."""
    own = getattr(_inner(function), "__name__", type(function).__name__)
    return re.sub(r"\W+", "_", own).strip("_")


def digest(function: Callable[..., object]) -> str:
    """Computes the digest of the source of a function or class, or else of its qualified name."""
    inner = _inner(function)
    code = inner if hasattr(inner, "__name__") else type(inner)
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError):  # typed at a prompt, built in, or a class of a notebook
        text = f"{code.__module__}.{code.__qualname__}"
        for method in vars(code).values() if inspect.isclass(code) else ():
            with suppress(OSError, TypeError):
                text += inspect.getsource(method)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _digest_spec(spec: AlgorithmSpec) -> str:
    """Computes the digest of the functions of an algorithm, by their source, and of its numbers."""

    def described(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return [(one.name, described(getattr(value, one.name))) for one in fields(value)]
        if isinstance(value, Mapping):
            return [(name, described(one)) for name, one in value.items()]
        return digest(value) if callable(value) else repr(value)

    return hashlib.sha256(repr(described(spec)).encode()).hexdigest()[:DIGITS]


def _inner(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _pickled(function: Callable[..., object], what: str, place: str) -> tuple[str, bytes]:
    name = name_of(function)
    return f"{PYTHON}{name}@{digest(function)}", _packed(function, f"{what}: {name}", place)


def _packed(given: object, what: str, place: str) -> bytes:
    try:
        return cloudpickle.dumps(given)
    except Exception as error:
        raise UserError(
            f"{what} cannot be sent to another process: {type(error).__name__}:"
            f" {error}; remove what cannot be pickled from it, or write it in a file and name it in"
            f" {place}"
        ) from error


@contextmanager
def _written(model: GivenModel, run_dir: Path, dry: bool) -> Iterator[Path]:
    """Gives the folder of a model in the run directory, which is written unless it is there. It is
    removed after a dry run, and where bad input ends a run before that has saved anything."""
    missing = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    checkpoints, partial, fresh = store.folders(run_dir), run_dir / f".{GIVEN_MODEL}.partial", False

    def remove(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the folders that hold something else stay
            for path in missing:
                path.rmdir()

    try:
        write_model(model, partial, weights_too=False)
        found = hashlib.sha256(digest_model(partial, weights=False).encode())
        for piece in () if dry else _pieces(model):
            found.update(piece)
        folder = run_dir / f"{GIVEN_MODEL}-{found.hexdigest()[:DIGITS]}"
        if not folder.exists():
            if not dry:
                write_model(model, partial)
            partial.rename(folder)
            fresh = True
    except OSError as error:
        raise UserError(f"the model cannot be written to {run_dir}: {error.strerror}") from error
    finally:
        remove(partial)
    unused = dry
    try:
        yield folder.resolve()
    except UserError:
        with suppress(UserError):  # where that cannot be told, the model stays
            unused = unused or store.folders(run_dir) == checkpoints
        raise
    finally:
        if fresh and unused:
            remove(folder)


@contextmanager
def named(model: GivenModel) -> Iterator[str | Path]:
    """Gives the name of a model; of one without a name that of a temporary folder with it."""
    if isinstance(model, str | os.PathLike):
        yield os.fspath(model)
        return
    with TemporaryDirectory(prefix="jaxrl-model-") as folder:
        write_model(model, place := Path(folder, "model"))
        yield place


def write_model(model: GivenModel, folder: Path, weights_too: bool = True) -> None:
    """Writes a model that a program holds as a Hugging Face folder.

    Args:
        model: as in `train`.
        weights_too: False leaves only the config and the tokenizer there.
    """
    if isinstance(model, Model):
        config, tokenizer = model.config, model.source.tokenizer_path
        dtype = str(model.params["norm"]["scale"].dtype)
        if weights_too:
            read = weights.hf_tensors(config, model.params)
            hf.write_folder(folder, config, read, dtype=dtype, tokenizer_from=tokenizer)
        else:
            hf.write_description(folder, config, dtype, tokenizer)
        return
    pretrained, tokenizer = _pair(model)
    if weights_too:
        pretrained.save_pretrained(folder)
    else:
        pretrained.config.save_pretrained(folder)
        if pretrained.can_generate():
            pretrained.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _pair(model: GivenModel) -> tuple[Any, Any]:
    """Returns a model and a tokenizer of transformers; which must have been imported for a program
    to hold them."""
    transformers: Any = sys.modules.get("transformers")
    parts = model if isinstance(model, tuple | list) else (model,)
    if transformers is None or not isinstance(parts[0], transformers.PreTrainedModel):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UserError(
            "model: a name as of student.model, a pair (transformers.PreTrainedModel, tokenizer) or"
            f" what jaxrl.load_model returns is needed, this is {kinds}"
        )
    if len(parts) != 2 or not hasattr(parts[1], "save_pretrained"):
        raise UserError(
            f"model: {type(parts[0]).__name__} comes without its tokenizer: give both, as in"
            " model=(model, tokenizer)"
        )
    return parts[0], parts[1]


def _pieces(model: GivenModel) -> Iterator[bytes]:
    if isinstance(model, Model):
        read = weights.hf_tensors(model.config, model.params)
        for name in weights.tensor_shapes(model.config):
            yield name.encode()
            yield np.ascontiguousarray(read(name)).view(np.uint8).tobytes()
        return
    as_bytes = sys.modules["torch"].uint8
    for name, tensor in _pair(model)[0].state_dict().items():
        yield f"{name} {tensor.dtype}".encode()
        yield tensor.detach().cpu().contiguous().reshape(-1).view(as_bytes).numpy().tobytes()
