"""One question to a teacher over HTTP, asked again until it is answered or its deadline passes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from jaxrl.errors import RunError, UserError
from jaxrl.teacher.protocol import JSON

TOKEN = "JAXRL_TEACHER_TOKEN"
"""Environment variable; its value is never logged or shown."""
CONNECT_S = 10.0
"""Longest wait for a connection, before it is tried again."""
MOST_WRONG = 3
"""Tries after which an answer that is wrong in itself (500, unreadable) is believed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
PIECE = 1 << 18
"""Most bytes between two looks at the clock."""

Answer = TypeVar("Answer")


def token_from_environment() -> str | None:
    """The secret that a teacher and its runs share; None where none is set."""
    token = os.environ.get(TOKEN) or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError(f"{TOKEN} may have printable ASCII characters only, and no blank")
    return token


class TeacherError(RunError):
    """A teacher that does not answer, or refuses; the message names its address."""


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
        kind: str = JSON,
    ) -> Answer:
        """What `read` makes of the answer.

        Connection errors and 502 to 504 are tried again until the deadline; 500, and an answer
        that `read` cannot read (ValueError, LookupError, TypeError, AttributeError), a few
        times; a refusal (4xx) never.

        Raises:
            TeacherError: with the address, the question, and what came of it.
            UserError: as `read` raises it.
        """
        start, pause, tries, wrong = time.monotonic(), FIRST_PAUSE_S, 0, 0
        asked = f"teacher at {self.url}: {method} {path}"
        while True:
            tries += 1
            try:
                status, answer = self._once(method, path, body, kind, start + self.timeout)
                if status == 200:
                    return read(answer)
                problem = f"status {status}: {_message(answer)}"
                if status < 500:
                    hint = f"; set {TOKEN} to its token" if status in (401, 403) else ""
                    raise TeacherError(f"{asked}: {problem}{hint}")
                wrong += status not in (502, 503, 504)
            except UserError:
                raise
            except TimeoutError:
                problem = "no answer in time"
            except http.client.HTTPException as error:
                problem = f"half an answer: {type(error).__name__}: {error}"
            except OSError as error:
                problem = error.strerror or f"{type(error).__name__}: {error}"
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                problem = f"its answer cannot be used: {type(error).__name__}: {error}"
                wrong += 1
            elapsed = time.monotonic() - start
            if wrong >= MOST_WRONG or elapsed + pause >= self.timeout:
                raise TeacherError(
                    f"{asked}: {problem}; given up after"
                    f" {elapsed:.1f} s and {tries} tries (deadline {self.timeout:g} s)"
                )
            time.sleep(pause * random.uniform(0.5, 1.0))  # runs that share it do not knock at once
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _once(
        self, method: str, path: str, body: bytes | None, kind: str, end: float
    ) -> tuple[int, bytes]:
        """Status and body of one answer; TimeoutError at `end`, a time of the monotonic clock."""
        place = urlsplit(self.url)
        secure = place.scheme == "https"
        make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert place.hostname is not None
        headers = {"Connection": "close"}
        if body is not None:
            headers["Content-Type"] = kind
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        connection = make(place.hostname, place.port, timeout=min(_until(end), CONNECT_S))
        with contextlib.closing(connection):
            connection.connect()
            wire = connection.sock
            wire.settimeout(_until(end))
            # A refusal may come before the whole body went.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, place.path.rstrip("/") + path, body, headers)
            response, pieces = connection.getresponse(), list[bytes]()
            while not response.isclosed():
                wire.settimeout(_until(end))
                piece = response.read1(PIECE)
                if not piece:
                    break
                pieces.append(piece)
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return response.status, b"".join(pieces)


def _until(end: float) -> float:
    """Seconds until then; TimeoutError where it has passed."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _message(body: bytes) -> str:
    """What an error's JSON says; completions servers nest it, or do not."""
    text = body.decode(errors="replace").strip()
    try:
        message = json.loads(text)
    except ValueError:
        return text[:300] or "(no message)"
    for key in ("error", "message"):
        message = message.get(key, message) if isinstance(message, dict) else message
    return (message if isinstance(message, str) else json.dumps(message))[:600]
