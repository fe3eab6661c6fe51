"""Models and data sets on a hub, by name: of each one commit, fetched once into the hub's cache.

| name | is |
|---|---|
| `ORG/NAME` | a model, of the branch `main` |
| `ORG/NAME@REVISION` | the same of a branch, a tag or a commit |
| `ORG/NAME/FILE.gguf` | one GGUF file of a repository |
| `hf:ORG/NAME:CONFIG:SPLIT` | a data set; a revision stands after its name |

`pin` adds the commit that a revision is at the moment, as in `ORG/NAME@main@0123...`: whoever has
that name, in another process or after the branch has moved, gets the same files.

All goes through `huggingface_hub` and its cache, so that HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and
HF_HOME mean what they mean elsewhere. Only what jaxrl reads is fetched: json, tokenizers,
safetensors. A file is there whole or not at all, and of several processes on a host that want it
one fetches it.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from jaxrl.errors import UserError, near
from jaxrl.formats import hf, weights
from jaxrl.models.encoder_config import read_json
from jaxrl.process.interrupt import left_behind

T = TypeVar("T")

COMMIT = re.compile("[0-9a-f]{40}")
SNAPSHOTS = "snapshots"
"""Folder in the hub's cache whose folders are the commits of a repository."""
DESCRIPTION = (
    *("config.json", "generation_config.json", hf.INDEX, *hf.TOKENIZER_FILES),
    *("vocab.txt", "sentencepiece.bpe.model"),
    *("modules.json", "sentence_bert_config.json", "[0-9]_*/config.json"),
)
"""Patterns of the files that a plan and a tokenizer are made of."""
README = "README.md"
KEPT = "whole files stay in the hub's cache, and the same command fetches the others"
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_AT = r"(?:@(?P<revision>[^@:\s]+))?(?:@(?P<commit>[0-9a-f]{40}))?"
_MODEL = re.compile(rf"(?P<repo>{_PART}/{_PART})(?P<rest>(?:/{_PART})+\.gguf)?{_AT}")
_DATA = re.compile(rf"hf:(?P<repo>(?:{_PART}/)?{_PART}){_AT}(?P<rest>(?::[^:]*){{0,2}})")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


@dataclass(frozen=True)
class HubName:
    """A model or a data set on a hub."""

    kind: Literal["model", "dataset"]
    repo: str
    revision: str | None = None
    """A branch, a tag or a commit; None: the branch `main`."""
    commit: str | None = None
    """What the revision is, where `pin` has found out."""
    rest: str = ""
    """`/FILE.gguf` of a model, `:CONFIG:SPLIT` of a data set."""

    def __str__(self) -> str:
        at = "".join(f"@{part}" for part in (self.revision, self.commit) if part is not None)
        return (
            f"hf:{self.repo}{at}{self.rest}"
            if self.kind == "dataset"
            else f"{self.repo}{self.rest}{at}"
        )

    @property
    def asked(self) -> HubName:
        """As the user gives it: without what `pin` adds."""
        if self.commit is not None and self.revision == "main":
            return replace(self, revision=None, commit=None)
        return replace(self, commit=None)

    @property
    def sha(self) -> str | None:
        """The commit, where the name says it."""
        if self.commit is None and self.revision and COMMIT.fullmatch(self.revision):
            return self.revision
        return self.commit


def model_name(text: str) -> HubName | None:
    """The model on a hub that a text names; None where it has another form, or is a path here."""
    match = _MODEL.fullmatch(text)
    if match is None or match["repo"].endswith(".gguf") or Path(text).expanduser().exists():
        return None
    return HubName("model", match["repo"], match["revision"], match["commit"], match["rest"] or "")


def data_name(text: str) -> HubName | None:
    """The data set on a hub that a text names; None where it has another form."""
    match = _DATA.fullmatch(text)
    if match is None:
        return None
    return HubName("dataset", match["repo"], match["revision"], match["commit"], match["rest"])


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
    with _explained(name):
        found = HfApi().resolve_revision(
            name.repo, repo_type=name.kind, revision=revision, local_files_only=_offline()
        )
    return replace(name, revision=revision, commit=found.resolved)


def pinned(text: str) -> str:
    """`pin` of a model's name; any text that names none on a hub as it is."""
    name = model_name(text)
    return text if name is None else str(pin(name))


def folder(name: HubName) -> Path:
    """What describes a model: its config and tokenizer files in the cache, fetched where they are
    not there. Of a name with a GGUF file: that file, which is all in one.

    Raises:
        UserError: it cannot be fetched, or the repository holds no model.
    """
    name = pin(name)
    if name.rest:
        return _file(name)
    place = snapshot(name, DESCRIPTION)
    if not any((place / file).is_file() for file in ("config.json", "modules.json")):
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
    if not _lacking(name, place, wanted):
        return place
    if wanted == [hf.SINGLE] and hf.SINGLE not in files(name):
        raise UserError(
            f"{name.asked}: the repository on the hub has no {hf.SINGLE}; only safetensors are"
            " fetched (pytorch_model.bin is a pickle): name a repository that has them, or a GGUF"
            " file as ORG/NAME/FILE.gguf"
        )
    return with_files(name, wanted)


def with_files(name: HubName, wanted: Sequence[str]) -> Path:
    """The folder in the cache that has all of these files of a pinned name.

    Raises:
        UserError: they cannot be fetched, or the repository has not got them.
    """
    place = snapshot(name, (README,))
    missing = _lacking(name, place, wanted)
    if missing and not _offline():
        for file in missing:
            if (place / file).is_file():  # half-written, as by a copy of the cache that broke off
                (place / file).resolve().unlink()
        _fetch(name, tuple(wanted))
        missing = _lacking(name, place, wanted)
    if missing:
        raise UserError(
            _not_cached(name, missing[0])
            if _offline()
            else f"{name.asked}: the repository on the hub has no {missing[0]}"
        )
    return place


def is_here(name: HubName, wanted: Sequence[str]) -> bool:
    """Whether all of these files of a pinned name are in the cache."""
    return not _lacking(name, snapshot(name, (README,)), wanted)


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


def open_tensors(
    name: str,
    place: Path,
    read: Callable[[Path], weights.Tensors],
    shapes: dict[str, tuple[int, ...]],
) -> weights.Tensors:
    """The tensors in a model's folder, after a check of their names and shapes. Those of a model on
    a hub whose weights are not here are fetched, and checked, once one of them is needed.

    Args:
        name: the model's, as it was given.
        read: opens the folder.
    """
    on_hub = model_name(name)
    if on_hub is not None and not is_whole(pin(on_hub), place):
        return Unfetched(on_hub, read, shapes)
    tensors = read(place)
    weights.check(tensors, shapes)
    return tensors


@dataclass(frozen=True)
class Unfetched:
    """The tensors of a model on a hub: the first that is asked for has all of them fetched."""

    name: HubName
    open: Callable[[Path], weights.Tensors]
    shapes: dict[str, tuple[int, ...]]

    @cached_property
    def tensors(self) -> weights.Tensors:
        found = self.open(with_weights(self.name))
        weights.check(found, self.shapes)
        return found

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.tensors.shape(name)

    def read(self, name: str, index: weights.Index) -> np.ndarray:
        return self.tensors.read(name, index)

    def file(self, name: str) -> Path:
        return self.tensors.file(name)


def files(name: HubName) -> dict[str, int]:
    """Path -> bytes of all files of a pinned name.

    Raises:
        UserError: the hub does not answer, and the cache has no list of them.
    """
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return _cached_list(name)
    except CachedRepoTreeNotFoundError:
        _fetch(name, (README,))  # the list comes with whatever is fetched
    with _explained(name):
        return _cached_list(name)


def _cached_list(name: HubName) -> dict[str, int]:
    from huggingface_hub import get_cached_repo_tree

    tree = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.sha)
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
    return sum(sizes.get(file, 0) for file in ([path] if path else _weight_files(folder(name))))


def _weight_files(place: Path) -> list[str]:
    index = place / hf.INDEX
    if not index.is_file():
        return [hf.SINGLE]
    weight_map = read_json(index).get("weight_map")
    return sorted({str(file) for file in weight_map.values()}) if weight_map else [hf.SINGLE]


@cache
def _snapshot(name: HubName, patterns: tuple[str, ...], place: str) -> Path:
    return _fetch(name, patterns)


def _fetch(name: HubName, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    large = not set(patterns) <= {*DESCRIPTION, README}

    class Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        """A progress bar for what takes long, on a terminal."""

        def __init__(self, *given: object, **options: object) -> None:
            options["disable"] = not (large and sys.stderr.isatty())
            super().__init__(*given, **options)

    def fetch() -> str:
        return snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.sha,
            allow_patterns=list(patterns),
            tqdm_class=Bar,
        )

    with _explained(name):
        return Path(_interruptible(fetch))


def _file(name: HubName) -> Path:
    from huggingface_hub import hf_hub_download

    def fetch() -> str:
        return hf_hub_download(name.repo, name.rest.removeprefix("/"), revision=name.sha)

    with _explained(name):
        return Path(_interruptible(fetch))


def _interruptible(fetch: Callable[[], T]) -> T:
    """The result of a function in a thread: the library's own wait for its threads ends with the
    files that they are about, and a signal would be heard after minutes."""
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(fetch())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        done.wait()  # not join: Python 3.11 takes a thread for dead whose join a signal interrupts
    except BaseException:  # a signal
        left_behind.append(thread)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turns what the library raises into one line: what is wrong, and what to do."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted while {name.asked} was fetched; {KEPT}") from None
    except Exception as error:  # those of the library and of what it sends requests with
        raise UserError(_why(name, error)) from error


def _why(name: HubName, error: BaseException) -> str:
    from huggingface_hub import constants, errors

    hub, what = constants.ENDPOINT, "data set" if name.kind == "dataset" else "model"
    causes = list(_causes(error))

    def first(*kinds: type[BaseException]) -> BaseException | None:
        return next((cause for cause in causes if isinstance(cause, kinds)), None)

    if first(errors.GatedRepoError):
        page = f"{hub}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}"
        return (
            f"{name.asked} is gated: accept its terms at {page}, and set HF_TOKEN to a token that"
            " may read it"
        )
    if first(errors.RevisionNotFoundError):
        return f"{name.asked}: the {what} on {hub} has no revision {name.revision!r}"
    if first(errors.RepositoryNotFoundError):
        here = "neither a file or folder here nor" if name.kind == "model" else "not"
        return (
            f"{name.asked} is {here} a {what} on {hub}{_near(name)}; if it is private, set HF_TOKEN"
            " to a token that may read it"
        )
    if first(errors.RemoteEntryNotFoundError):
        return f"{name.asked}: the repository on {hub} has no file {name.rest.removeprefix('/')}"
    if constants.HF_HUB_OFFLINE:
        return _not_cached(name)
    status = first(errors.HfHubHTTPError)
    if isinstance(status, errors.HfHubHTTPError):
        code = status.response.status_code
        advice = "check HF_TOKEN" if code in (401, 403) else "try again later"
        return f"{name.asked}: {hub} answers with status {code}; {advice}"
    disk = first(OSError)
    if isinstance(disk, OSError) and disk.errno in _FULL_DISK:
        return (
            f"{name.asked}: the hub's cache {constants.HF_HUB_CACHE} cannot be written:"
            f" {os.strerror(disk.errno or 0)}; free some space, or set HF_HOME to another folder"
        )
    if first(errors.LocalEntryNotFoundError, errors.RevisionResolutionError):
        here = "no file or folder here, and " if name.kind == "model" else ""
        reason = " ".join(str(causes[-1]).split())[:120]
        return (
            f"{name.asked}: {here}{hub} cannot be reached ({reason}); check the network and"
            f" HF_ENDPOINT; {KEPT}"
        )
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return f"{name.asked}: the download from {hub} broke off ({reason}); {KEPT}"


def _not_cached(name: HubName, file: str | None = None) -> str:
    from huggingface_hub import constants

    what = f"its {file}" if file else "it"
    here = "no file or folder here, and " if name.kind == "model" and file is None else ""
    return (
        f"{name.asked}: {here}HF_HUB_OFFLINE is set while {what} is not in the hub's cache"
        f" {constants.HF_HUB_CACHE}; unset HF_HUB_OFFLINE, or fetch it before"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _near(name: HubName) -> str:
    """The repository of that organisation with the most similar name, if the hub says one."""
    from huggingface_hub import HfApi

    author, _, _ = name.repo.partition("/")
    found: Sequence[str] = ()
    with suppress(Exception):  # it only adds to an error
        api = HfApi()
        listed = api.list_models if name.kind == "model" else api.list_datasets
        found = [one.id for one in listed(author=author, limit=500)]
    return near(name.repo, found)
