"""Cheap digests of files that a run depends on, whose change would change what it computes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from jaxrl.checkpoint import store
from jaxrl.errors import UserError
from jaxrl.formats import hub
from jaxrl.formats.hub_names import gguf_parts

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
        digests = [(name, digest_file(place.with_name(name))) for name in parts]
        return hashlib.sha256(repr(digests).encode()).hexdigest()
    if hub.is_commit(place):
        return place.name  # other programs may add files of that commit
    try:
        if (place / store.MANIFEST).exists():  # it has the checksum of every file
            files = json.loads((place / store.MANIFEST).read_text(encoding="utf-8"))["files"]
            return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        wanted = (*DESCRIPTIONS, *WEIGHTS) if weights else DESCRIPTIONS
        found = [path for path in sorted(place.iterdir()) if path.suffix in wanted]
        found += sorted(place.glob(NAMED_TEMPLATES))
        digests = [(path.name, digest_file(path)) for path in found if path.is_file()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place} cannot be read: {error}") from error
    return hashlib.sha256(repr(digests).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """Returns the sha256, in hex, of the size and the contents; of a large file of some blocks, and
    of all of the header that a safetensors file begins with.
    """
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
