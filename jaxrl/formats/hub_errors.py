"""What `huggingface_hub` raises, as one line that says what is wrong and what to do.

What no hub may answer is refused before the library acts on it.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from jaxrl.errors import UserError, near, short
from jaxrl.formats.hub_names import COMMIT, HubName
from jaxrl.process.streams import to_stderr

KEPT = "whole files stay in the hub's cache, and the same command fetches the others"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


PLAIN = re.compile("[0-9A-Za-z_=+:-]{1,200}")
"""An ETag that may become the name of a file."""
SLOW_S, SLOWEST = 60.0, 10_000
"""An answer may take so many seconds, and a second more for each so many of its bytes."""
MOST_ANSWERS = 1000
"""Pages of the longest list of files: the public hub puts 1000 files on each."""
MOST_RESTARTS = 5
"""How often a file may break off and begin anew, as from a hub that takes no ranges."""
LONGEST_WAIT_S = 310.0
"""How long a hub may ask to be left alone. The public one counts in windows of 300 s."""


def check_variables() -> None:
    """Raises UserError where the library takes offence at its own variables."""
    try:
        import huggingface_hub.constants  # noqa: F401
    except ValueError as error:
        raise UserError(
            f"huggingface_hub refuses one of its variables (HF_ENDPOINT, HF_HUB_ETAG_TIMEOUT,"
            f" HF_HUB_DOWNLOAD_TIMEOUT, ...): {error}"
        ) from error


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Turns what the library raises into one line: what is wrong, and what to do. A hub that takes
    a connection and says nothing counts as one that cannot be reached."""
    guard_client()
    watch.begin()
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted while {name.asked} was fetched; {KEPT}") from None
    except BadAnswer as error:
        raise UserError(f"{name.asked}: {error}") from None
    except UserError:
        raise
    except Exception as error:  # those of the library and of what it sends requests with
        raise UserError(_why(name, error)) from error


class BadAnswer(Exception):
    """An answer of a hub that is not used; the text says what the hub does. No kind of error that
    the library catches to try again."""


@dataclass
class _Transfer:
    """What has come of a file, or of the hub's lists, in all answers together."""

    began: float = field(default_factory=time.monotonic)
    answers: int = 0
    received: int = 0
    """Bytes."""


class Answers:
    """What the answers of a hub add up to since a fetch began."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.transfers: dict[str, _Transfer] = {}
        self.limited_since: float | None = None
        """When the hub began to answer that it is asked too often."""
        self.waiting: dict[int, float] = {}
        """Thread -> since when it waits for the beginning of an answer."""

    def check(self) -> None:
        """Raises BadAnswer while a hub sends the beginning of an answer without ever ending it."""
        if any(time.monotonic() - began > SLOW_S for began in list(self.waiting.values())):
            raise BadAnswer(f"{_hub()} sends an answer too slowly (none in {SLOW_S:g} s)")


watch = Answers()


def guard_client() -> None:
    """Has every HTTP client that the library opens refuse what no hub may answer
    (`_check_answer`), and wait for each part of an answer no longer than HF_HUB_ETAG_TIMEOUT where
    the library sets no limit, which is for most of what it asks."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    if not isinstance(_http._GLOBAL_CLIENT_FACTORY, _Guarded):
        set_client_factory(_Guarded(_http._GLOBAL_CLIENT_FACTORY))


@dataclass(frozen=True)
class _Guarded:
    """Opens clients with our hooks, on top of whatever the process opens them with."""

    open: Callable[[], Any]

    def __call__(self) -> Any:
        client = self.open()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], _limited],
            "response": [*hooks["response"], _check_answer],
        }
        return client


def _limited(request: Any) -> None:
    """
    Args:
        request: of the library's HTTP client, about to be sent.
    """
    from huggingface_hub import constants

    limits = request.extensions.get("timeout", {})
    for kind in [kind for kind, seconds in limits.items() if seconds is None]:
        limits[kind] = constants.HF_HUB_ETAG_TIMEOUT
    request.extensions["trace"] = _trace


def _trace(event: str, _: object) -> None:
    """Notes since when a thread waits for the head of an answer, which has no other limit than that
    on each of its parts."""
    if event.endswith("receive_response_headers.started"):
        watch.waiting[threading.get_ident()] = time.monotonic()
    elif "receive_response_headers." in event:
        watch.waiting.pop(threading.get_ident(), None)


def _check_answer(response: Any) -> None:
    """Raises BadAnswer for an answer that names a file of its choice, that wants to be waited for
    too long, or that is one of too many; limits the time of what follows it.

    The library makes names of files of the ETag of a HEAD request and of the commit of any.

    Args:
        response: of the library's HTTP client, of which the body has not been read.
    """
    headers, request = response.headers, response.request
    commit = headers.get("X-Repo-Commit")
    if commit is not None and not COMMIT.fullmatch(commit):
        raise BadAnswer(f"{_hub()} names a commit that is none: {short(commit)!r}")
    for key in ("X-Linked-Etag", "ETag") if request.method == "HEAD" else ():
        etag = headers.get(key, "-")
        if not PLAIN.fullmatch(etag.removeprefix("W/").strip('"')):
            raise BadAnswer(f"{_hub()} sends an {key} that is no plain name: {short(etag)!r}")
    _check_wait(response.status_code, headers)
    if request.method != "GET" or response.is_redirect:
        return
    is_list = "/api/" in request.url.path
    transfer = watch.transfers.setdefault("lists" if is_list else str(request.url), _Transfer())
    begins = response.status_code == 200
    transfer.answers += begins
    if transfer.answers > (MOST_ANSWERS if is_list else 1 + MOST_RESTARTS):
        what = "has a list of files without end" if is_list else "breaks off each time"
        raise BadAnswer(f"{_hub()} {what} ({transfer.answers - 1} answers)")
    if begins and not is_list:
        transfer.received = 0
    response.stream = _bounded(response.stream, transfer)


def _check_wait(status: int, headers: Any) -> None:
    now = time.monotonic()
    seconds = retry_after(status, headers)
    if seconds is None:
        watch.limited_since = watch.limited_since if status >= 400 else None
        return
    since = watch.limited_since = watch.limited_since or now
    if now + seconds > since + LONGEST_WAIT_S:
        raise BadAnswer(
            f"{_hub()} answers with status {status} and asks to be left alone for {seconds:.0f} s;"
            " try again then"
        )


def retry_after(status: int, headers: Any) -> float | None:
    """Seconds after which a hub that is asked too often, or is busy, wants to be asked again; None
    where it does not say so."""
    if status not in (429, 503):
        return None
    asked = headers.get("Retry-After", "").strip()
    limit = re.search(r";\s*r=0\s*;\s*t=(\d{1,9})\b", headers.get("RateLimit", ""))
    if limit and status == 429:
        return float(limit[1])
    if re.fullmatch("[0-9]{1,9}", asked):
        return float(asked)
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    return None


def wait_asked_for(error: BaseException) -> float | None:
    """`retry_after` of the answer that an error of the library is about, which is put on stderr."""
    from huggingface_hub.errors import HfHubHTTPError

    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError):
            status, headers = cause.response.status_code, cause.response.headers
            seconds = retry_after(status, headers)
            if seconds is not None:
                to_stderr(f"{_hub()} answers with status {status}: asking again in {seconds:.0f} s")
            return seconds
    return None


def _bounded(stream: Any, transfer: _Transfer) -> Any:
    from huggingface_hub.utils import _http

    class Bounded(_http.httpx2.SyncByteStream):  # type: ignore
        """The same bytes, as long as they do not come too slowly."""

        def __iter__(self) -> Iterator[bytes]:
            for chunk in stream:
                transfer.received += len(chunk)
                limit = SLOW_S + transfer.received / SLOWEST
                if time.monotonic() - transfer.began > limit:
                    raise BadAnswer(
                        f"{_hub()} sends too slowly ({transfer.received} bytes in {limit:.0f} s)"
                    )
                yield chunk

        def close(self) -> None:
            stream.close()

    return Bounded()


def _hub() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


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
        file = name.rest.removeprefix("/") if name.kind == "model" else "that its list has"
        return f"{name.asked}: the repository on {hub} has no file {file}"
    if constants.HF_HUB_OFFLINE:
        return not_cached(name)
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
    silent = first(TimeoutError)
    if silent or first(errors.LocalEntryNotFoundError, errors.RevisionResolutionError):
        here = "no file or folder here, and " if name.kind == "model" else ""
        reason = " ".join(str(causes[-1]).split())[:120]
        return (
            f"{name.asked}: {here}{hub} cannot be reached ({reason}); check the network and"
            " HF_ENDPOINT"
        )
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return f"{name.asked}: the download from {hub} broke off ({reason}); {KEPT}"


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def is_unreachable(error: BaseException) -> bool:
    """Whether an error says that no hub answers."""
    from huggingface_hub.utils import _http

    unreachable = _http.httpx2.TransportError  # type: ignore[attr-defined, unused-ignore]
    return is_offline() or any(isinstance(cause, unreachable) for cause in _causes(error))


def not_cached(name: HubName, file: str | None = None) -> str:
    """The message where a name, or one of its files, would have to be fetched, offline."""
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
