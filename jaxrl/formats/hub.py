"""Models and data sets on a hub, by name: of each one commit, fetched once into the hub's cache.

All goes through `huggingface_hub` and its cache, so that HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and
HF_HOME mean what they mean elsewhere. Only what jaxrl reads is fetched: json, tokenizers,
safetensors. A file is there whole or not at all, and of several processes on a host that want it
one fetches it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from jaxrl.errors import UserError, short
from jaxrl.formats import hf
from jaxrl.formats.hub_errors import (
    PLAIN,
    BadAnswer,
    ask,
    check_variables,
    is_offline,
    is_unreachable,
    not_cached,
)
from jaxrl.formats.hub_names import COMMIT, HubName, gguf_parts, model_name
from jaxrl.models.encoder_config import read_json

SNAPSHOTS = "snapshots"
"""Folder in the hub's cache whose folders are the commits of a repository."""
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a repository of adapters (`formats.peft`)."""
DESCRIPTION = (
    *("config.json", "generation_config.json", ADAPTER, hf.INDEX, *hf.TOKENIZER_FILES),
    *("vocab.txt", "sentencepiece.bpe.model"),
    *("modules.json", "sentence_bert_config.json", "[0-9]_*/config.json"),
)
"""Patterns of the files that a plan and a tokenizer are made of."""
README = "README.md"
CARD = (README, ".gitattributes")
"""What is fetched of a repository to have its list of files; it may lack the first."""


def pin(name: HubName) -> HubName:
    """Returns the name with the commit that its revision is now. Where the hub does not answer, the
    commit that the cache has of that revision counts.

    Raises:
        UserError: there is no such repository or revision, or no access to it.
    """
    check_variables()
    if name.sha is not None:
        return name
    from huggingface_hub import HfApi  # half a second

    revision = name.revision or "main"

    def resolve() -> str:
        found = HfApi().resolve_revision(
            name.repo, repo_type=name.kind, revision=revision, local_files_only=is_offline()
        )
        return found.resolved

    commit = ask(name, resolve)
    if not COMMIT.fullmatch(commit):
        raise UserError(f"{name.asked}: {short(commit)!r} is named as its commit, and is none")
    return replace(name, revision=revision, commit=commit)


def pinned(text: str) -> str:
    """Returns `pin` of a model's name; any text that names none on a hub as it is."""
    name = model_name(text)
    return text if name is None else str(pin(name))


def folder(name: HubName) -> Path:
    """Returns what describes a model: its config and tokenizer files in the cache, fetched where
    they are not there. Of a name with a GGUF file: that file, which is all in one; of one in
    several files all of them are fetched.

    Raises:
        UserError: it cannot be fetched, or the repository holds no model.
    """
    name = pin(name)
    if name.rest:
        return _file(name)
    place = snapshot(name, DESCRIPTION)
    if not any((place / file).is_file() for file in ("config.json", "modules.json", ADAPTER)):
        _forget_list(name)
        raise UserError(
            f"{name.asked}: the repository on the hub has no config.json, so it is no model folder;"
            " a GGUF file is named as ORG/NAME/FILE.gguf, a data set as hf:ORG/NAME"
        )
    return place


def with_weights(name: HubName) -> Path:
    """Returns `folder`, with the safetensors.

    Raises:
        UserError: they cannot be fetched, or the repository has none.
    """
    name = pin(name)
    place = folder(name)
    if name.rest:
        return place
    wanted = _weight_files(place)
    lacking = _lacking(name, place, wanted)
    if wanted == lacking == [hf.SINGLE] and hf.SINGLE not in files(name):
        _forget_list(name)
        raise UserError(
            f"{name.asked}: the repository on the hub has no {hf.SINGLE}; only safetensors are"
            " fetched (pytorch_model.bin is a pickle): name a repository that has them, or a GGUF"
            " file as ORG/NAME/FILE.gguf"
        )
    complete(name, place, wanted)
    return place


def complete(name: HubName, place: Path, wanted: Sequence[str]) -> None:
    """Fetches those of the files of a pinned name that its folder in the cache lacks.

    Raises:
        UserError: they cannot be fetched, or the repository has not got them.
    """
    missing = _lacking(name, place, wanted)
    if missing and not is_offline():
        for file in missing:
            if (place / file).is_file():  # half-written, as by a copy of the cache that broke off
                _remove(place, file)
        _fetch(name, tuple(wanted))
        missing = _lacking(name, place, wanted)
    if missing:
        if not is_offline():
            _forget_list(name)
        raise UserError(
            not_cached(name, missing[0])
            if is_offline()
            else f"{name.asked}: the hub sends {missing[0]} in another size than its list says"
            if (place / missing[0]).is_file()
            else f"{name.asked}: the repository on the hub has no {missing[0]}"
        )


def _remove(place: Path, file: str) -> None:
    """Removes what a file in the cache links to, unless that is outside of the repository there."""
    target = (place / file).resolve()
    if target.is_relative_to(place.parents[1].resolve()):
        target.unlink()


def is_here(name: HubName, wanted: Sequence[str]) -> bool:
    """Returns whether all of these files of a pinned name are in the cache."""
    return not _lacking(name, snapshot(name, CARD), wanted)


def is_commit(place: Path) -> bool:
    """Returns whether a folder is a commit of a repository in the cache, named after it."""
    if place.parent.name != SNAPSHOTS or not COMMIT.fullmatch(place.name):
        return False
    from huggingface_hub import constants

    return place.resolve().is_relative_to(Path(constants.HF_HUB_CACHE).expanduser().resolve())


def is_whole(name: HubName, place: Path) -> bool:
    """Returns whether all safetensors of a pinned model are in its folder."""
    return not _lacking(name, place, _weight_files(place))


def snapshot(name: HubName, patterns: tuple[str, ...]) -> Path:
    """Returns the folder in the cache with the files of a pinned name that fit a pattern.

    Raises:
        UserError: they cannot be fetched.
    """
    from huggingface_hub import constants

    return _snapshot(name, patterns, constants.HF_HUB_CACHE)


def files(name: HubName) -> dict[str, int]:
    """Returns path -> bytes of all files of a pinned name.

    Raises:
        UserError: the hub does not answer, and the cache has no list of them.
    """
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return _cached_list(name)
    except CachedRepoTreeNotFoundError:
        _fetch(name, CARD)  # the list comes with whatever is fetched
    return ask(name, lambda: _cached_list(name))


def _cached_list(name: HubName) -> dict[str, int]:
    """Returns `files`, of the cache alone. A list that cannot be right does not stay there."""
    from huggingface_hub import get_cached_repo_tree

    tree = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.sha)
    try:
        hf.check_inside(str(name.asked), [str(file.path) for file in tree])
        wrong = [file for file in tree if type(file.size) is not int or file.size < 0]
        if wrong:
            size = short(repr(wrong[0].size))
            raise UserError(f"{name.asked}: its list of files has {wrong[0].path} in {size} bytes")
    except UserError:
        _forget_list(name)
        raise
    return {file.path: file.size for file in sorted(tree, key=lambda file: file.path)}


def _forget_list(name: HubName) -> None:
    """Has the list of a name's files asked for again when it is next needed."""
    file = _storage(name) / "trees" / f"{name.sha}.json"
    file.unlink(missing_ok=True)
    with suppress(ImportError, AttributeError):  # the library's own memory of this process
        from huggingface_hub._tree_cache import _IN_MEMORY_TREE_CACHE

        _IN_MEMORY_TREE_CACHE.pop(str(file), None)


def _is_sound(blob: Path) -> bool:
    """Returns whether a file of the cache has the contents that its name says: a large one is named
    by its SHA-256, a small one by git's hash of it (or by its SHA-1, as some mirrors do)."""
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return True
    hashes = [hashlib.sha256()]
    if len(blob.name) == 40:
        hashes = [hashlib.sha1(b"blob %d\0" % blob.stat().st_size), hashlib.sha1()]
    with blob.open("rb") as file:
        while part := file.read(1 << 20):
            for state in hashes:
                state.update(part)
    return blob.name in [state.hexdigest() for state in hashes]


def _lacking(name: HubName, place: Path, wanted: Sequence[str]) -> list[str]:
    """Returns the files that are not in the cache, or not in the size that the hub says."""
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    sizes: dict[str, int] = {}
    with suppress(CachedRepoTreeNotFoundError):
        sizes = _cached_list(name)

    def is_there(file: str) -> bool:
        path = place / file
        return path.is_file() and path.stat().st_size == sizes.get(file, path.stat().st_size)

    return [file for file in wanted if not is_there(file)]


def environment() -> dict[str, str]:
    """Returns the variables with which another host asks the same hub. Each has a cache and a token
    of its own."""
    return {
        name: os.environ[name] for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE") if name in os.environ
    }


def weight_bytes(name: HubName) -> int:
    """Returns the bytes of a pinned model's weights, which need not be here."""
    sizes, path = files(name), name.rest.removeprefix("/")
    wanted = gguf_parts(path) if path else _weight_files(folder(name))
    return sum(sizes.get(file, 0) for file in wanted)


def _weight_files(place: Path) -> list[str]:
    if (place / ADAPTER).is_file():
        return [ADAPTER_WEIGHTS]
    index = place / hf.INDEX
    if not index.is_file():
        return [hf.SINGLE]
    weight_map = read_json(index).get("weight_map") or {}
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: weight_map: an object is needed")
    named = sorted({str(file) for file in weight_map.values()})
    hf.check_inside(str(index), named)
    return named or [hf.SINGLE]


@cache
def _snapshot(name: HubName, patterns: tuple[str, ...], place: str) -> Path:
    return _fetch(name, patterns)


def _fetch(name: HubName, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    large = not set(patterns) <= {*DESCRIPTION, *CARD}

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        """A progress bar for what takes long, on a terminal."""

        def __init__(self, *given: object, **options: object) -> None:
            options["disable"] = not (large and sys.stderr.isatty())
            super().__init__(*given, **options)

    fetch = partial(snapshot_download, allow_patterns=list(patterns), tqdm_class=Bar)
    return _verified(name, fetch)


def _file(name: HubName) -> Path:
    from huggingface_hub import hf_hub_download

    asked = name.rest.removeprefix("/")
    parts = gguf_parts(asked)
    places = {file: _verified(name, partial(hf_hub_download, filename=file)) for file in parts}
    return places[asked]


def _verified(name: HubName, fetch: Callable[..., str]) -> Path:
    """Returns the place that `fetch` returns of a pinned name, once what has come has the hashes
    that the hub says; what has others is removed."""
    from huggingface_hub import constants

    blobs = _storage(name) / "blobs"

    def whole_blobs() -> set[Path]:
        """Returns the files of the cache that are not being written: those have a dot."""
        return {blob for blob in blobs.glob("*") if PLAIN.fullmatch(blob.name)}

    def fetch_and_check() -> Path:
        before = whole_blobs()
        try:
            fetched = fetch(name.repo, repo_type=name.kind, revision=name.sha)
        except Exception as error:
            if not is_unreachable(error):  # the list may be what is wrong
                _forget_list(name)
            raise
        damaged = [blob for blob in sorted(whole_blobs() - before) if not _is_sound(blob)]
        if not damaged:
            return Path(fetched)
        links = {link.resolve(): link.name for link in Path(fetched).parent.glob("**/*")}
        for blob in damaged:
            blob.unlink()
        _forget_list(name)
        names = ", ".join(sorted(links.get(blob, blob.name) for blob in damaged))
        raise BadAnswer(
            f"{constants.ENDPOINT} sends {names} with other contents than it says (by their"
            " hashes), and they were removed: start again, or set HF_ENDPOINT to another hub"
        )

    return ask(name, fetch_and_check)


def _storage(name: HubName) -> Path:
    """Returns the folder of a repository in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name.repo, repo_type=name.kind)
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / folder
