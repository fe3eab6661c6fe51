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
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from jaxrl.errors import UserError, near, short
from jaxrl.formats.hub_names import COMMIT, HubName
from jaxrl.process.interrupt import left_behind
from jaxrl.process.streams import to_stderr

T = TypeVar("T")
KEPT = "whole files stay in the hub's cache, and the same command fetches the others"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
PLAIN = re.compile("[0-9A-Za-z_=+:-]{1,200}")
"""An ETag that may become the name of a file."""
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


class BadAnswer(Exception):
    """An answer of a hub that is not used; the text says what the hub does. No kind of error that
    the library catches to try again."""


def ask(name: HubName, call: Callable[[], T]) -> T:
    """Returns what `call` returns, which asks the library about a name.

    It runs in a thread: the library's own wait for its threads ends with the files that they are
    about, and a signal would be heard after minutes. While the hub asks to be left alone for a
    while, and not for too long, it is asked again then.

    Raises:
        UserError: in one line, what is wrong and what to do.
    """
    _guard_client()
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(_patient(call))
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        wait([answer])  # not join: Python 3.11 takes a thread for dead whose join is interrupted
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
        raise UserError(_why(name, error)) from error


def _patient(call: Callable[[], T]) -> T:
    end = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            return call()
        except Exception as error:
            status, seconds = _wait_asked_for(error)
            if seconds is None or time.monotonic() + seconds > end:
                raise
            to_stderr(f"{_hub()} answers with status {status}: asking again in {seconds:.0f} s")
            time.sleep(seconds)


def _wait_asked_for(error: BaseException) -> tuple[int, float | None]:
    """Returns the status of the answer that an error is about, and its `_retry_after`."""
    from huggingface_hub.errors import HfHubHTTPError

    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError):
            answer = cause.response
            return answer.status_code, _retry_after(answer.status_code, answer.headers)
    return 0, None


def _guard_client() -> None:
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
            "request": [*hooks["request"], _limit],
            "response": [*hooks["response"], _check_answer],
        }
        return client


def _limit(request: Any) -> None:
    from huggingface_hub import constants

    limits = request.extensions.get("timeout", {})
    for kind in [kind for kind, seconds in limits.items() if seconds is None]:
        limits[kind] = constants.HF_HUB_ETAG_TIMEOUT


def _check_answer(response: Any) -> None:
    """Raises BadAnswer for an answer that names a file, or wants a long wait.

    The library makes names of files of the ETag of a HEAD request and of the commit of any.
    """
    headers, status = response.headers, response.status_code
    commit = headers.get("X-Repo-Commit")
    if commit is not None and not COMMIT.fullmatch(commit):
        raise BadAnswer(f"{_hub()} names a commit that is none: {short(commit)!r}")
    for key in ("X-Linked-Etag", "ETag") if response.request.method == "HEAD" else ():
        etag = headers.get(key, "-")
        if not PLAIN.fullmatch(etag.removeprefix("W/").strip('"')):
            raise BadAnswer(f"{_hub()} sends an {key} that is no plain name: {short(etag)!r}")
    seconds = _retry_after(status, headers)
    if seconds is not None and seconds > LONGEST_WAIT_S:
        raise BadAnswer(
            f"{_hub()} answers with status {status} and asks to be left alone for {seconds:.0f} s;"
            " try again then"
        )


def _retry_after(status: int, headers: Any) -> float | None:
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
    """Returns whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def is_unreachable(error: BaseException) -> bool:
    """Returns whether an error says that no hub answers."""
    from huggingface_hub.utils import _http

    unreachable = _http.httpx2.TransportError  # type: ignore[attr-defined, unused-ignore]
    return is_offline() or any(isinstance(cause, unreachable) for cause in _causes(error))


def not_cached(name: HubName, file: str | None = None) -> str:
    """Returns the message where a name, or one of its files, would have to be fetched, offline."""
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
    """Returns the organisation's repository with the most similar name, if there is one."""
    from huggingface_hub import HfApi

    author, _, _ = name.repo.partition("/")
    found: Sequence[str] = ()
    with suppress(Exception):  # it only adds to an error
        api = HfApi()
        listed = api.list_models if name.kind == "model" else api.list_datasets
        found = [one.id for one in listed(author=author, limit=500)]
    return near(name.repo, found)
