"""A served teacher as its clients see it: `Endpoint` asks a question over HTTP until it is answered
or its deadline passes; `TeacherClient` knows what to ask."""

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
from jaxrl.teacher import protocol
from jaxrl.teacher.check_answer import check_answer, check_head
from jaxrl.teacher.protocol import JSON, PROTOCOL, TOKEN, Info, Options
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
TEMPORARY = (408, 502, 503, 504)
"""Statuses that say nothing about the request: the network stalled, or the server is busy."""
MOST_WRONG = 3
"""Tries after which an answer that is wrong in itself (500, unreadable) is believed."""
OTHER_HOST = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0

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
        """Returns what `read` makes of the answer.

        Connection errors and `TEMPORARY` statuses are tried again until the deadline; 500, and an
        answer that `read` cannot read (`UNREADABLE`), a few times; any other refusal (4xx), and a
        certificate that is not trusted, never.

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
                status, answer = self._once(method, path, body, kind, start + self.timeout, most)
                if status == 200:
                    return read(answer)
                problem, again = f"status {status}: {_message(answer)}", status in TEMPORARY
                if status >= 500 and not again:
                    again, wrong = True, wrong + 1
                elif status in (401, 403):
                    problem += f"; set {TOKEN} to its token"
            except UserError:
                raise
            except (OSError, http.client.HTTPException) as error:
                problem, again = self._explain(error)
            except UNREADABLE as error:
                why = short(" ".join(str(error).split()), 400)
                problem = f"its answer cannot be used: {type(error).__name__}: {why}"
                again, wrong = True, wrong + 1
            if not again:
                raise TeacherError(f"{asked}: {problem}")
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

    def _explain(self, error: OSError | http.client.HTTPException) -> tuple[str, bool]:
        """Says what is wrong with a connection, and whether it may be right the next time."""
        match error:
            case ssl.SSLCertVerificationError():
                hint = "set teacher.ca_file to its issuer's"
                if error.verify_code in OTHER_HOST:
                    hint = "write the address with a host that the certificate names"
                return f"its certificate is not trusted: {error.verify_message}; {hint}", False
            case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
                return "it speaks no TLS: write http://", False
            case ssl.SSLError():
                return f"TLS: {error.reason or error}", True
            case TimeoutError():
                return "no answer in time", True
            case http.client.RemoteDisconnected():
                hint = " (if it speaks TLS, write https://)" * self.url.startswith("http:")
                return f"{error}{hint}", True
            case http.client.HTTPException():
                return f"half an answer: {type(error).__name__}: {error}", True
        return error.strerror or f"{type(error).__name__}: {error}", True

    def _once(
        self, method: str, path: str, body: bytes | None, kind: str, end: float, most: int
    ) -> tuple[int, bytes]:
        """Returns status and body of one answer; raises an OSError at `end`, a time of the
        monotonic clock."""
        url = urlsplit(self.url)
        make: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if url.scheme == "https":
            make = partial(http.client.HTTPSConnection, context=self._tls)
        assert url.hostname is not None
        headers = {"Connection": "close"} | ({} if body is None else {"Content-Type": kind})
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        connection = make(url.hostname, url.port, timeout=min(left, CONNECT_S))
        with contextlib.closing(connection):
            connection.connect()
            wire, left = connection.sock, end - time.monotonic()
            wire.settimeout(max(left, 0.001))
            # A socket's timeout is for each read: a server may send one byte after the other.
            late = threading.Timer(left, socket.socket.shutdown, (wire, socket.SHUT_RDWR))
            late.daemon = True
            late.start()
            try:
                # A refusal may come before the whole body went.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, url.path.rstrip("/") + path, body, headers)
                response = connection.getresponse()
                answer = response.read(most + 1)
            finally:
                late.cancel()
        if len(answer) > most:
            raise ValueError(f"it is longer than the {most:,} bytes that were asked for")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return response.status, answer


def _message(body: bytes) -> str:
    """Returns what an error's JSON says; completions servers nest it, or do not."""
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
        """Returns the handshake; every request is meant for the teacher that it was made with."""

        def read(body: bytes) -> Info:
            version = json.loads(body)["protocol"]
            if type(version) is not int:
                raise ValueError(f"protocol is {shown(version)}, not the number of a version")
            if version != PROTOCOL:
                raise UserError(
                    f"{self.endpoint} speaks version {short(str(version))} of the protocol,"
                    f" this jaxrl version {PROTOCOL}: install the same jaxrl on both sides"
                )
            try:
                return Info.model_validate_json(body)
            except ValidationError as error:
                raise ValueError(protocol.first_mistake(error)) from error

        return self.endpoint.ask("GET", "/v1/info", read)

    def head(self) -> np.ndarray:
        """Returns the LM head [V, D] in the server's dtype."""
        info = self.info

        def read(body: bytes) -> np.ndarray:
            head = protocol.decode(body)[0][protocol.HEAD]
            check_head(head, info.dtype, (info.vocab_size, info.d_model))
            return head

        most = info.vocab_size * info.d_model * np.dtype(info.dtype).itemsize + OVERHEAD
        path = f"/v1/head?{urlencode({protocol.FINGERPRINT: info.fingerprint})}"
        return self.endpoint.ask("GET", path, read, most=most)

    def score(
        self, sequences: Sequences, ids: np.ndarray | None, distill: DistillConfig, vocab_size: int
    ) -> TeacherSignal:
        """Returns what `distill.signal` asks of each completion position, as numpy arrays.

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
        signals = [
            self._score(options, *jax.tree.map(lambda x, i=i: x[i : i + size], (sequences, ids)))
            for i in range(0, b, size)
        ]
        return jax.tree.map(lambda *xs: np.concatenate(xs) if len(xs) > 1 else xs[0], *signals)

    def _score(
        self, options: Options, sequences: Sequences, ids: np.ndarray | None
    ) -> TeacherSignal:
        def read(body: bytes) -> TeacherSignal:
            tensors, mask = protocol.decode(body)[0], np.asarray(sequences.loss_mask)
            shapes = options.tensors(self.info.dtype, self.info.d_model)
            check_answer(tensors, shapes, mask, options.vocab_size)
            if ids is not None and not np.array_equal(tensors["topk_ids"], ids):
                raise ValueError("topk_ids are others than the student's, which were asked for")
            return signal_of(tensors)

        body = protocol.write_request(options, self.info.fingerprint, sequences, ids)
        b, c = sequences.loss_mask.shape
        most = b * options.answer_row_bytes(c, self.info) + OVERHEAD
        return self.endpoint.ask("POST", "/v1/score", read, body, protocol.SAFETENSORS, most)


def rows_at_once(info: Info, options: Options, t: int, c: int) -> int:
    """Returns how many sequences of T tokens, C of them in the completion, one request may hold;
    0: not one."""
    asked = (info.max_request_bytes - OVERHEAD) // options.request_row_bytes(t, c)
    answered = info.max_answer_bytes // options.answer_row_bytes(c, info)
    return max(min(asked, answered), 0)
