"""A served teacher as its clients see it: `TeacherClient`, and the `Endpoint` that asks a question
over HTTP until it is answered or its deadline passes."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import jax
import numpy as np
from pydantic import ValidationError

from jaxrl.config.settings import DistillConfig
from jaxrl.errors import RunError, UserError, short, shown
from jaxrl.teacher.check import check_answer, check_head
from jaxrl.teacher.protocol import (
    FINGERPRINT,
    HEAD,
    JSON,
    PROTOCOL,
    SAFETENSORS,
    TOKEN,
    Info,
    Options,
    decode,
    first_mistake,
    write_request,
)
from jaxrl.types import Sequences, TeacherSignal, signal_of

OVERHEAD = 1 << 14
"""Bytes of a request, or an answer, beside its tensors, at most."""
MOST_WORDS = 256 << 20
"""Bytes of an answer that is JSON, at most: log-probs of a long prompt, with the tokens' texts."""
CONNECT_S = 10.0
"""Longest wait for a connection, before it is tried again."""
UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError, AssertionError),
)
"""What reading an answer may raise that has other types, sizes or depths than it should."""
MOST_WRONG = 3
"""Tries after which an answer that is wrong in itself (500, unreadable) is believed."""
OTHER_HOST = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
PIECE = 1 << 18
"""Most bytes between two looks at the clock."""

Answer = TypeVar("Answer")


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
    name: str = ""
    """Of one of several teachers."""
    ca_file: str | None = None
    """PEM file of the certificates that https must end at; None: those of the system."""

    def __str__(self) -> str:
        return f"teacher {self.name} at {self.url}" if self.name else f"teacher at {self.url}"

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise UserError(f"teacher.ca_file={self.ca_file}: {error}") from error

    def ask(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], Answer],
        body: bytes | None = None,
        kind: str = JSON,
        most: int = MOST_WORDS,
    ) -> Answer:
        """What `read` makes of the answer.

        Connection errors, 408 (the network stalled) and 502 to 504 are tried again until the
        deadline; 500, and an answer that `read` cannot read (`UNREADABLE`), a few times; any other
        refusal (4xx), and a certificate that is not trusted, never.

        Args:
            most: bytes of an answer; a longer one is not read.

        Raises:
            TeacherError: with the address, the question, and what came of it.
            UserError: as `read` raises it.
        """
        start, pause, tries, wrong = time.monotonic(), FIRST_PAUSE_S, 0, 0
        asked = f"{self}: {method} {path.partition('?')[0]}"
        while True:
            tries += 1
            try:
                end = start + self.timeout
                status, answer = self._once(method, path, body, kind, end, most)
                if status == 200:
                    return read(answer)
                problem = f"status {status}: {_message(answer)}"
                if status < 500 and status != 408:
                    hint = f"; set {TOKEN} to its token" if status in (401, 403) else ""
                    raise TeacherError(f"{asked}: {problem}{hint}")
                wrong += status not in (408, 502, 503, 504)
            except UserError:
                raise
            except TimeoutError:
                problem = "no answer in time"
            except ssl.SSLCertVerificationError as error:
                why = f"its certificate is not trusted: {error.verify_message}"
                hint = "set teacher.ca_file to its issuer's"
                if error.verify_code in OTHER_HOST:
                    hint = "write the address with a host that the certificate names"
                raise TeacherError(f"{asked}: {why}; {hint}") from error
            except ssl.SSLError as error:
                if error.reason == "WRONG_VERSION_NUMBER":
                    raise TeacherError(f"{asked}: it speaks no TLS: write http://") from error
                problem = f"TLS: {error.reason or error}"
            except http.client.RemoteDisconnected as error:
                hint = " (if it speaks TLS, write https://)" * self.url.startswith("http:")
                problem = f"{error}{hint}"
            except http.client.HTTPException as error:
                problem = f"half an answer: {type(error).__name__}: {error}"
            except OSError as error:
                problem = error.strerror or f"{type(error).__name__}: {error}"
            except UNREADABLE as error:
                why = short(" ".join(str(error).split()), 400)
                problem = f"its answer cannot be used: {type(error).__name__}: {why}"
                wrong += 1
            elapsed = time.monotonic() - start
            if elapsed >= self.timeout:
                problem = "no answer in time"
            if wrong >= MOST_WRONG or elapsed + pause >= self.timeout:
                raise TeacherError(
                    f"{asked}: {problem}; given up after"
                    f" {elapsed:.1f} s and {tries} tries (deadline {self.timeout:g} s)"
                )
            time.sleep(pause * random.uniform(0.5, 1.0))  # runs that share it do not knock at once
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _once(
        self, method: str, path: str, body: bytes | None, kind: str, end: float, most: int
    ) -> tuple[int, bytes]:
        """Status and body of one answer; TimeoutError at `end`, a time of the monotonic clock."""
        place = urlsplit(self.url)
        make: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if place.scheme == "https":
            make = partial(http.client.HTTPSConnection, context=self._tls)
        assert place.hostname is not None
        headers = {"Connection": "close"}
        if body is not None:
            headers["Content-Type"] = kind
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        connection = make(place.hostname, place.port, timeout=min(_until(end), CONNECT_S))
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            connection.connect()
            wire = connection.sock
            wire.settimeout(_until(end))
            # The library reads the head of an answer without a limit on the whole.
            late = threading.Timer(_until(end), socket.socket.shutdown, (wire, socket.SHUT_RDWR))
            late.daemon = True
            late.start()
            stack.callback(late.cancel)
            # A refusal may come before the whole body went.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, place.path.rstrip("/") + path, body, headers)
            response, pieces = connection.getresponse(), bytearray()
            while not response.isclosed():
                wire.settimeout(_until(end))
                piece = response.read1(PIECE)
                if not piece:
                    break
                pieces += piece
                if len(pieces) > most:
                    raise ValueError(f"it is longer than the {most:,} bytes that were asked for")
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return response.status, bytes(pieces)


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
    except (ValueError, RecursionError):
        return short(" ".join(text.split()), 300) or "(no message)"
    for key in ("error", "message"):
        message = message.get(key, message) if isinstance(message, dict) else message
    words = message if isinstance(message, str) else json.dumps(message)
    return short(" ".join(words.split()), 600)


@dataclass
class TeacherClient:
    """Asks one server. Thread-safe: every question has a connection of its own."""

    endpoint: Endpoint

    @cached_property
    def info(self) -> Info:
        """The handshake; every request is meant for the teacher that it was made with."""
        return self.endpoint.ask("GET", "/v1/info", self._read_info)

    def head(self) -> np.ndarray:
        """The LM head [V, D] in the server's dtype."""
        info = self.info

        def read(body: bytes) -> np.ndarray:
            head = decode(body)[0][HEAD]
            check_head(head, info.dtype, (info.vocab_size, info.d_model))
            return head

        most = info.vocab_size * info.d_model * np.dtype(info.dtype).itemsize + OVERHEAD
        path = f"/v1/head?{urlencode({FINGERPRINT: info.fingerprint})}"
        return self.endpoint.ask("GET", path, read, most=most)

    def score(
        self, sequences: Sequences, ids: np.ndarray | None, distill: DistillConfig, vocab_size: int
    ) -> TeacherSignal:
        """What `distill.signal` asks of each completion position, as numpy arrays.

        Sent in as many requests, one after the other, as the server's limits ask for.

        Args:
            ids: [B, C, K] the student's most probable tokens; only for `student_topk`.
        """
        options = Options.of(distill, vocab_size)
        ids = ids if options.signal == "student_topk" else None
        b, t = sequences.tokens.shape
        size = min(b, rows_at_once(self.info, options, t, sequences.loss_mask.shape[1]))
        if size == 0:
            raise TeacherError(f"{self.endpoint}: one sequence of {t} tokens is over its limits")
        parts = []
        for start in range(0, b, size):
            rows = slice(start, start + size)
            some, theirs = jax.tree.map(lambda x, rows=rows: x[rows], (sequences, ids))
            parts.append(self._score(options, some, theirs))
        return jax.tree.map(lambda *xs: np.concatenate(xs) if len(xs) > 1 else xs[0], *parts)

    def _score(
        self, options: Options, sequences: Sequences, ids: np.ndarray | None
    ) -> TeacherSignal:
        def read(body: bytes) -> TeacherSignal:
            tensors, mask = decode(body)[0], np.asarray(sequences.loss_mask)
            shapes = options.tensors(self.info.dtype, self.info.d_model)
            check_answer(tensors, shapes, mask, options.vocab_size)
            if ids is not None and not np.array_equal(tensors["topk_ids"], ids):
                raise ValueError("topk_ids are others than the student's, which were asked for")
            return signal_of(tensors)

        body = write_request(options, self.info.fingerprint, sequences, ids)
        b, c = sequences.loss_mask.shape
        most = b * options.answer_row_bytes(c, self.info) + OVERHEAD
        return self.endpoint.ask("POST", "/v1/score", read, body, SAFETENSORS, most)

    def _read_info(self, body: bytes) -> Info:
        protocol = json.loads(body)["protocol"]
        if type(protocol) is not int:
            raise ValueError(f"protocol is {shown(protocol)}, not the number of a version")
        if protocol != PROTOCOL:
            raise UserError(
                f"{self.endpoint} speaks version {short(str(protocol))} of the protocol,"
                f" this jaxrl version {PROTOCOL}: install the same jaxrl on both sides"
            )
        try:
            return Info.model_validate_json(body)
        except ValidationError as error:
            raise ValueError(first_mistake(error)) from error


def rows_at_once(info: Info, options: Options, t: int, c: int) -> int:
    """Sequences that one request may hold, of T tokens, C of them in the completion; 0: not one."""
    asked = (info.max_request_bytes - OVERHEAD) // options.request_row_bytes(t, c)
    answered = info.max_answer_bytes // options.answer_row_bytes(c, info)
    return max(min(asked, answered), 0)
