"""What a run may be resumed with: cheap digests of the files that it depends on, whose change would
change what it computes, and which keys of its config may change."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxrl.checkpoint import store
from jaxrl.config import keys as config_keys
from jaxrl.config.paths import CODE, without_folders
from jaxrl.config.roles import NamedTeacherConfig
from jaxrl.config.schema import Config
from jaxrl.config.section import FREE
from jaxrl.errors import UserError, short
from jaxrl.formats import hf, hub
from jaxrl.formats.weights import gguf_parts
from jaxrl.process.json_types import JsonObject

WHOLE_BYTES = 4 << 20
"""Up to this size all of a file is read."""
BLOCKS, BLOCK_BYTES = 1024, 4096
"""Of a larger one: as many blocks of this size, evenly spread from its first to its last byte."""
HEADER_BYTES = 64 << 20
"""Longest header of a safetensors file that is read."""
WEIGHTS = (".safetensors", ".gguf", ".bin")
DESCRIPTIONS = (".json", ".txt", ".model", ".jinja")
"""Endings of the other files of a model folder that are read with it: config, tokenizer, index."""

NAMED_TEMPLATES = "additional_chat_templates/*.jinja"


def digest_model(place: Path, weights: bool = True) -> str:
    """Returns the digest of a model folder, a checkpoint of a run, or a file.

    Args:
        weights: False: only of what describes the model, such as its tokenizer.
    """
    if place.is_file():
        parts = gguf_parts(place.name)
        if len(parts) == 1:
            return digest_file(place)
        return _digest_files(place.with_name(name) for name in parts)
    if hub.is_commit(place):
        return place.name  # other programs may add files of that commit
    try:
        if (place / store.MANIFEST).exists():  # it has the checksum of every file
            files = json.loads((place / store.MANIFEST).read_text(encoding="utf-8"))["files"]
            return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        wanted = (*DESCRIPTIONS, *WEIGHTS) if weights else DESCRIPTIONS
        found = [path for path in sorted(place.iterdir()) if path.suffix in wanted]
        found += sorted(place.glob(NAMED_TEMPLATES))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place} cannot be read: {error}") from error
    return _digest_files(path for path in found if path.is_file())


BASE_WEIGHTS = "student.model, weights under the adapters"
"""Name of what a run that trains adapters depends on: `digest_weights` of their base model."""


def digest_weights(place: Path) -> str:
    """Returns the digest of the weights of a model folder, a checkpoint of a run, or a GGUF file,
    wherever they are, and whatever tokenizer is with them."""
    if place.is_file() or (place / store.MANIFEST).exists():
        return digest_model(place)
    return _digest_files(hf.weight_files(place, hf.SINGLE, hf.INDEX)[0])


def _digest_files(files: Iterable[Path]) -> str:
    digests = [(file.name, digest_file(file)) for file in files]
    return hashlib.sha256(repr(digests).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """Returns the sha256, in hex, of the size and the contents; of a large file of some blocks, and
    of all of the header that a safetensors file begins with."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = hashlib.sha256(f"{size}:".encode())
            if size <= WHOLE_BYTES:
                found.update(file.read())
                return found.hexdigest()
            if path.suffix == ".safetensors":
                length = int.from_bytes(file.read(8), "little")
                found.update(file.read(min(length, HEADER_BYTES)))
            last = size - BLOCK_BYTES
            for i in range(BLOCKS):
                file.seek(last * i // (BLOCKS - 1))
                found.update(file.read(BLOCK_BYTES))
            return found.hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Returns the names of both whose digests differ; what only one of them knows cannot be
    compared."""
    return [name for name, digest in now.items() if before.get(name, digest) != digest]


GIVEN_MODEL = "given-model"
"""Begins the name of the folder in a run directory that holds a model which a Python program gave;
a digest of its weights ends it."""
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """Something that is not what it was at the checkpoint that a run resumes from."""

    what: str
    """A key of the config, or the name of what the run depends on."""
    text: str
    """For the reader."""
    asked: bool = False
    """Whether it had to be allowed by `resume_changed`: it changes what is learned."""
    remakes: bool = False
    """Whether what was generated ahead is generated again."""
    decides: str = ""
    """As of `OnResume`."""


def compare(old: JsonObject, new: Config, run_dir: Path | str) -> list[Change]:
    """Returns the changes of keys that matter. What each key allows is part of its declaration
    (`config.section.OnResume`).

    Args:
        old: the mapping in the run directory's `config.yaml`.

    Raises:
        UserError: the run is another one, or `resume_changed` does not allow a change; the keys
            that differ are named.
    """
    found: list[Change] = []
    refused: list[str] = []
    unasked: list[str] = []
    asked = new.model_dump(mode="json")
    for key in config_keys.keys(Config):
        now, rule = _at(asked, key.path), key.on_resume
        before = _at(old, key.path)
        if before is _ABSENT:  # a key that the jaxrl of that run did not have
            before = list(key.default) if isinstance(key.default, tuple) else key.default
        if key.path == "teachers":
            before, now = _teachers(before, run_dir), _teachers(now, run_dir)
        if before == now or rule.how == "free":
            continue
        if key.path in CODE and without_folders(before) == without_folders(now):
            continue
        if key.path == "student.model" and _given_model(before) == _given_model(now) is not None:
            continue
        line = f"{key.path}: {_shown(before, now)} there, {_shown(now, before)} now"
        if why := rule.why if rule.how == "refused" else rule.unless(before, now, asked):
            refused.append(f"{line} ({why})")
        elif rule.how == "asked" and not allows(new, key.path):
            unasked.append(key.path)
            refused.append(line)
        found.append(Change(key.path, line, rule.how == "asked", rule.remakes, rule.decides))
    if refused:
        anew = "start a new run with --resume never, " if new.run_dir is None else ""
        more = [f"and {len(refused) - 8} more"] if refused[8:] else []
        way = f"; resume_changed=[{','.join(unasked)}] allows these changes" if unasked else ""
        first = f"run_dir={run_dir} holds a run with another config:"
        raise UserError(
            "\n  ".join([first, *refused[:8], *more])
            + f"\nname another run_dir (or name), {anew}or set these back to resume that run{way}"
        )
    return found


def allows(config: Config, name: str) -> bool:
    """Returns whether `resume_changed` allows a change of a key, or of what it names.

    Args:
        name: the key, or a name of what the run depends on, which begins with a key.
    """
    allowed = config.resume_changed
    if not isinstance(allowed, tuple):
        return allowed
    return any(re.match(rf"{re.escape(word)}(?!\w)", name) for word in allowed)


def key_within(name: str) -> config_keys.Key | None:
    """Returns the key whose path a name of what the run depends on begins with, the longest one."""
    found = [key for key in config_keys.keys(Config) if name.startswith(key.path)]
    return max(found, key=lambda key: len(key.path), default=None)


def change_of(name: str) -> Change:
    """Returns the change of what a key names; `name` is of what the run depends on."""
    key = key_within(name)
    return Change(name, f"what {name} names", True, key is None or key.on_resume.remakes)


def _teachers(given: Any, run_dir: Path | str) -> JsonObject:
    """Returns the config of several teachers without the places where they are served."""
    try:
        each = {name: NamedTeacherConfig(**one) for name, one in given.items()}
    except (ValidationError, TypeError, AttributeError) as error:
        reason = "no mapping"
        if isinstance(error, ValidationError):
            reason = config_keys.explain(NamedTeacherConfig, error)
        raise UserError(
            f"run_dir={run_dir}: teachers in the config of the run there cannot be read ({reason});"
            " name another run_dir, or resume with the jaxrl that wrote it"
        ) from error
    fields = NamedTeacherConfig.model_fields.items()
    free = {name for name, field in fields if FREE in field.metadata}
    return {name: one.model_dump(exclude=free) for name, one in each.items()}


def _given_model(name: object) -> str | None:
    """Returns the folder of a model that a Python program gave, wherever the run directory is."""
    last = Path(str(name)).name
    return last if last.startswith(GIVEN_MODEL) else None


def _at(mapping: object, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(mapping, dict) or part not in mapping:
            return _ABSENT
        mapping = mapping[part]
    return mapping


def _shown(value: object, other: object) -> str:
    """Returns a value for a message; of a mapping what the other one has not."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {name: one for name, one in value.items() if other.get(name, _ABSENT) != one}
    return short("null" if value is None else str(value), 60)
