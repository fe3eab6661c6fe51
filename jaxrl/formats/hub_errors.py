"""What `huggingface_hub` raises, as one line that says what is wrong and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from jaxrl.errors import UserError, near
from jaxrl.formats.hub_names import HubName

KEPT = "whole files stay in the hub's cache, and the same command fetches the others"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Turns what the library raises into one line: what is wrong, and what to do. A hub that takes
    a connection and says nothing counts as one that cannot be reached."""
    limit_silence()
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted while {name.asked} was fetched; {KEPT}") from None
    except UserError:
        raise
    except Exception as error:  # those of the library and of what it sends requests with
        raise UserError(_why(name, error)) from error


def limit_silence() -> None:
    """Has the library's client wait for each part of an answer no longer than HF_HUB_ETAG_TIMEOUT
    where the library sets no limit, which is for most of what it asks."""
    from huggingface_hub import get_session

    client = get_session()
    if _limited not in client.event_hooks["request"]:
        hooks = {"request": [*client.event_hooks["request"], _limited]}
        client.event_hooks = {**client.event_hooks, **hooks}


def _limited(request: Any) -> None:
    """
    Args:
        request: of the library's HTTP client, about to be sent.
    """
    from huggingface_hub import constants

    limits = request.extensions.get("timeout", {})
    for kind in [kind for kind, seconds in limits.items() if seconds is None]:
        limits[kind] = constants.HF_HUB_ETAG_TIMEOUT


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
