"""One question to a teacher over HTTP, asked again until it is answered or its deadline passes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from jaxrl.errors import RunError, UserError

TOKEN = "JAXRL_TEACHER_TOKEN"
"""Environment variable; its value is never logged or shown."""
CONNECT_S = 10.0
"""Longest wait for a connection, before it is tried again."""
MOST_WRONG = 3
"""Tries after which an answer that is wrong in itself (500, not whole, unreadable) is believed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
PIECE = 1 << 22
"""Bytes between two looks at the clock."""

Answer = TypeVar("Answer")


def token_from_environment() -> str | None:
    """The secret that a teacher and its runs share; None where none is set."""
    token = os.environ.get(TOKEN) or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError(f"{TOKEN} may have printable ASCII characters only, and no blank")
    return token


class TeacherError(RunError):
    """A teacher that does not answer, or refuses; the message names its address."""


class _Unreachable(Exception):
    """Nothing that can be called an answer came: the server may be starting, or be gone."""


class _Wrong(Exception):
    """An answer came, and it is no good."""


@dataclass(frozen=True)
class Endpoint:
    """A server, and how long to insist. Holds no connection: calls may run side by side."""

    url: str
    """http(s)://host:port, perhaps with a path."""
    token: str | None = field(repr=False)
    timeout: float
    """Seconds for each question, all tries together."""

    def ask(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], Answer],
        body: bytes | None = None,
        kind: str = "application/json",
    ) -> Answer:
        """What `read` makes of the answer.

        Connection errors and 502 to 504 are tried again until the deadline; 500, and an answer
        that `read` cannot (ValueError, KeyError, TypeError, IndexError), a few times; a refusal
        (4xx) never.

        Raises:
            TeacherError: with the address, the question, and what came of it.
        """
        start, pause, tries, wrong = time.monotonic(), FIRST_PAUSE_S, 0, 0
        while True:
            tries += 1
            left = self.timeout - (time.monotonic() - start)
            try:
                return self._read(read, self._once(method, path, body, kind, left))
            except _Unreachable as error:
                problem = str(error)
            except _Wrong as error:
                problem, wrong = str(error), wrong + 1
            elapsed = time.monotonic() - start
            if wrong >= MOST_WRONG or elapsed + pause >= self.timeout:
                raise TeacherError(
                    f"teacher at {self.url}: {method} {path}: {problem}; given up after"
                    f" {elapsed:.1f} s and {tries} tries (deadline {self.timeout:g} s)"
                )
            time.sleep(pause * random.uniform(0.5, 1.0))  # runs that share it do not knock at once
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _read(self, read: Callable[[bytes], Answer], body: bytes) -> Answer:
        try:
            return read(body)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise _Wrong(f"its answer cannot be used: {type(error).__name__}: {error}") from error

    def _once(self, method: str, path: str, body: bytes | None, kind: str, left: float) -> bytes:
        end = time.monotonic() + left
        place = urlsplit(self.url)
        secure = place.scheme == "https"
        make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert place.hostname is not None
        connection = make(place.hostname, place.port, timeout=max(min(left, CONNECT_S), 0.01))
        headers = {"Connection": "close"}
        if body is not None:
            headers["Content-Type"] = kind
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            connection.connect()
            wire: socket.socket = connection.sock
            wire.settimeout(max(end - time.monotonic(), 0.01))
            response = self._send(connection, method, place.path.rstrip("/") + path, body, headers)
            answer = _whole(wire, response, end)
        except TimeoutError as error:
            raise _Unreachable("no answer in time") from error
        except http.client.HTTPException as error:
            raise _Unreachable(f"half an answer: {type(error).__name__}: {error}") from error
        except OSError as error:
            raise _Unreachable(error.strerror or f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status == 200:
            return answer
        told = f"status {response.status}: {_message(answer)}"
        if response.status in (502, 503, 504):
            raise _Unreachable(told)
        if response.status >= 500:
            raise _Wrong(told)
        hint = f"; set {TOKEN} to its token" if response.status in (401, 403) else ""
        raise TeacherError(f"teacher at {self.url}: {method} {path}: {told}{hint}")

    @staticmethod
    def _send(
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        # A refusal may come before the whole body went.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, body=body, headers=headers)
        return connection.getresponse()


def _whole(wire: socket.socket, response: http.client.HTTPResponse, end: float) -> bytes:
    """The body; an `IncompleteRead` where the connection ends before it does."""
    announced, pieces = response.length, list[bytes]()
    while not response.isclosed():
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        wire.settimeout(left)
        piece = response.read(PIECE)
        if not piece:
            break
        pieces.append(piece)
    missing = 0 if announced is None else announced - sum(map(len, pieces))
    if missing:
        raise http.client.IncompleteRead(b"", missing)
    return b"".join(pieces)


def _message(body: bytes) -> str:
    """What an error's JSON says; completions servers nest it, or do not."""
    text = body.decode(errors="replace").strip()
    try:
        told = json.loads(text)
    except ValueError:
        return text[:300] or "(no message)"
    told = told.get("error", told) if isinstance(told, dict) else told
    told = told.get("message", told) if isinstance(told, dict) else told
    return (told if isinstance(told, str) else json.dumps(told))[:600]
