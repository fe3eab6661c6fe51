"""Models and data sets on a hub, by name: of each one commit, fetched once into the hub's cache.

All goes through `huggingface_hub` and its cache, so that HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and
HF_HOME mean what they mean elsewhere. Only what jaxrl reads is fetched: json, tokenizers,
safetensors. A file is there whole or not at all, and of several processes on a host that want it
one fetches it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from jaxrl.errors import UserError
from jaxrl.formats import hf
from jaxrl.formats.hub_errors import explained, is_offline, limit_silence, not_cached
from jaxrl.formats.hub_names import COMMIT, HubName, gguf_parts, model_name
from jaxrl.models.encoder_config import read_json
from jaxrl.process.interrupt import left_behind

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
ANSWER_S = 5.0
"""Longest wait for an answer that a run can do without."""
RENEWED_S = 0.5
"""The library opens another client at least a second after one could not connect: within this time
it has its limit of silence too."""
README = "README.md"
CARD = (README, ".gitattributes")
"""What is fetched of a repository to have its list of files; it may lack the first."""


def pin(name: HubName) -> HubName:
    """The name with the commit that its revision is now. Where the hub does not answer, the commit
    that the cache has of that revision counts.

    Raises:
        UserError: there is no such repository or revision, or no access to it.
    """
    if name.sha is not None:
        return name
    from huggingface_hub import HfApi  # half a second

    revision = name.revision or "main"
    with explained(name):
        found = HfApi().resolve_revision(
            name.repo, repo_type=name.kind, revision=revision, local_files_only=is_offline()
        )
    return replace(name, revision=revision, commit=found.resolved)


def newest(name: HubName) -> str | None:
    """The commit that a name's revision is now; None where the hub does not say so soon."""
    from huggingface_hub import HfApi

    revision = name.revision or "main"
    with suppress(Exception):  # whatever keeps it from saying so
        info = HfApi().repo_info(
            name.repo, repo_type=name.kind, revision=revision, timeout=ANSWER_S
        )
        return info.sha
    return None


def pinned(text: str) -> str:
    """`pin` of a model's name; any text that names none on a hub as it is."""
    name = model_name(text)
    return text if name is None else str(pin(name))


def folder(name: HubName) -> Path:
    """What describes a model: its config and tokenizer files in the cache, fetched where they are
    not there. Of a name with a GGUF file: that file, which is all in one; of one in several files
    all of them are fetched.

    Raises:
        UserError: it cannot be fetched, or the repository holds no model.
    """
    name = pin(name)
    if name.rest:
        return _file(name)
    place = snapshot(name, DESCRIPTION)
    if not any((place / file).is_file() for file in ("config.json", "modules.json", ADAPTER)):
        raise UserError(
            f"{name.asked}: the repository on the hub has no config.json, so it is no model folder;"
            " a GGUF file is named as ORG/NAME/FILE.gguf, a data set as hf:ORG/NAME"
        )
    return place


def with_weights(name: HubName) -> Path:
    """`folder`, with the safetensors.

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
        raise UserError(
            not_cached(name, missing[0])
            if is_offline()
            else f"{name.asked}: the repository on the hub has no {missing[0]}"
        )


def _remove(place: Path, file: str) -> None:
    """Removes what a file in the cache links to, unless that is outside of the repository there."""
    target = (place / file).resolve()
    if target.is_relative_to(place.parents[1].resolve()):
        target.unlink()


def is_here(name: HubName, wanted: Sequence[str]) -> bool:
    """Whether all of these files of a pinned name are in the cache."""
    return not _lacking(name, snapshot(name, CARD), wanted)


def is_commit(place: Path) -> bool:
    """Whether a folder is a commit of a repository in the cache, named after it."""
    if place.parent.name != SNAPSHOTS or not COMMIT.fullmatch(place.name):
        return False
    from huggingface_hub import constants

    return place.resolve().is_relative_to(Path(constants.HF_HUB_CACHE).expanduser().resolve())


def is_whole(name: HubName, place: Path) -> bool:
    """Whether all safetensors of a pinned model are in its folder."""
    return not _lacking(name, place, _weight_files(place))


def snapshot(name: HubName, patterns: tuple[str, ...]) -> Path:
    """The folder in the cache that has the files of a pinned name which fit any of the patterns.

    Raises:
        UserError: they cannot be fetched.
    """
    from huggingface_hub import constants

    return _snapshot(name, patterns, constants.HF_HUB_CACHE)


def files(name: HubName) -> dict[str, int]:
    """Path -> bytes of all files of a pinned name.

    Raises:
        UserError: the hub does not answer, and the cache has no list of them.
    """
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return _cached_list(name)
    except CachedRepoTreeNotFoundError:
        _fetch(name, CARD)  # the list comes with whatever is fetched
    with explained(name):
        return _cached_list(name)


def _cached_list(name: HubName) -> dict[str, int]:
    from huggingface_hub import get_cached_repo_tree

    tree = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.sha)
    hf.check_inside(str(name.asked), [file.path for file in tree])
    return {file.path: file.size for file in sorted(tree, key=lambda file: file.path)}


def _lacking(name: HubName, place: Path, wanted: Sequence[str]) -> list[str]:
    """Those of the files that are not in the cache, or not in the size that the hub says."""
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    sizes: dict[str, int] = {}
    with suppress(CachedRepoTreeNotFoundError):
        sizes = _cached_list(name)

    def is_there(file: str) -> bool:
        path = place / file
        return path.is_file() and path.stat().st_size == sizes.get(file, path.stat().st_size)

    return [file for file in wanted if not is_there(file)]


def environment() -> dict[str, str]:
    """Variables with which another host asks the same hub. Each has a cache and a token of its
    own."""
    return {
        name: os.environ[name] for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE") if name in os.environ
    }


def weight_bytes(name: HubName) -> int:
    """Bytes of the weights of a pinned model, of which only the description has been fetched."""
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

    return _interruptible(
        name, snapshot_download, repo_type=name.kind, allow_patterns=list(patterns), tqdm_class=Bar
    )


def _file(name: HubName) -> Path:
    from huggingface_hub import hf_hub_download

    asked = name.rest.removeprefix("/")
    places = {
        file: _interruptible(name, hf_hub_download, filename=file) for file in gguf_parts(asked)
    }
    return places[asked]


def _interruptible(name: HubName, fetch: Callable[..., str], **options: object) -> Path:
    """The place that `fetch` returns of a pinned name. It runs in a thread: the library's own wait
    for its threads ends with the files that they are about, and a signal would be heard after
    minutes."""
    done: Future[str] = Future()

    def run() -> None:
        try:
            done.set_result(fetch(name.repo, revision=name.sha, **options))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    with explained(name):
        thread.start()
        try:
            # not join: Python 3.11 takes a thread for dead whose join a signal interrupts
            while not wait([done], RENEWED_S).done:
                limit_silence()
        except BaseException:  # a signal
            left_behind.append(thread)
            raise
        return Path(done.result())
