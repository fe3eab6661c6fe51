"""The token that a Ray cluster asks for, of Rays that have one (2.52 and later)."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


@contextmanager
def private_token() -> Iterator[None]:
    """A cluster that is started in this block asks for a token that only its own processes know.

    They inherit the token; it is in no file, and processes that this one starts later do not get
    it. An explicit RAY_AUTH_MODE is kept as it is.
    """
    if MODE in os.environ:
        yield
        return
    before = os.environ.get(TOKEN)
    os.environ[MODE], os.environ[TOKEN] = "token", secrets.token_hex(32)
    try:
        _read_again()
        yield
    finally:
        del os.environ[MODE], os.environ[TOKEN]
        if before is not None:
            os.environ[TOKEN] = before


def show_token() -> None:
    """`ray start --head` asks for the token in ~/.ray/auth_token where there is one; who joins
    shows it only when told to.
    """
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    with suppress(ImportError):  # before Ray had tokens
        from ray._private.authentication import authentication_token_setup as setup

        _read_again()  # this process may have had a cluster of its own before
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _read_again() -> None:
    """Ray reads mode and token once in the life of a process, unless it is asked again."""
    raylet = import_module("ray._raylet")
    with suppress(AttributeError):  # before Ray had tokens
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")
