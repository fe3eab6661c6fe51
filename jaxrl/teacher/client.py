"""A served teacher as its clients see it: `Endpoint` asks a question over HTTP until it is answered
or its deadline passes; `TeacherClient` and `CompletionsClient` know what to ask.

A completions server is any that speaks OpenAI's `/completions`, takes token ids and returns the
log-probs of a prompt, in one of two styles.

- `prompt_logprobs: k` (vLLM): for each prompt token a map {id: {logprob, rank, decoded_token}} of
  the k most probable tokens and the token itself.
- `echo: true, logprobs: k`: `tokens`, `token_logprobs` and `top_logprobs` of prompt and
  completion, tokens named `token_id:N` (`return_tokens_as_token_ids`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import jax
import numpy as np
from pydantic import ValidationError

from jaxrl.config.settings import DistillConfig
from jaxrl.errors import RunError, UserError, short, shown
from jaxrl.process.json_types import JsonObject
from jaxrl.teacher import protocol
from jaxrl.teacher.protocol import JSON, PROTOCOL, ROUNDING, TOKEN, Info, Options, Signal
from jaxrl.types import SampledSignal, Sequences, TeacherSignal, TopKSignal, signal_of

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
LEAST_LOGPROB = -1e4
"""Stands for a log-prob of minus infinity."""
TAIL_FLOOR = float(np.log(2.0**-24))
"""Least log-prob of the tail, -16.6 nats: the k log-probs arrive in float32, so what they leave
over is not known better than that."""
NAMED = "token_id:"

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
            protocol.check_head(head, info.dtype, (info.vocab_size, info.d_model))
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
            protocol.check_answer(tensors, shapes, mask, options.vocab_size)
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


@dataclass(frozen=True)
class Position:
    """What a server says about one token of a prompt."""

    token: float
    """Log-prob of the token that stands there, nats."""
    best: tuple[tuple[int, float], ...]
    """(id, log-prob) of the most probable tokens, the most probable first."""
    decoded: str | None
    """The token's text, where the server gives it."""


@dataclass(frozen=True)
class CompletionsInfo:
    """The handshake with a completions server."""

    model: str
    max_tokens: int | None
    """Longest sequence; None where the server does not say."""
    style: str
    """One of `_STYLES`."""
    signals: tuple[Signal, ...] = ("topk", "sampled")


class CompletionsClient:
    """Asks one server, which batches by itself: each sequence is one request. `score` is
    thread-safe."""

    def __init__(self, endpoint: Endpoint, model: str | None, at_once: int):
        """
        Args:
            endpoint: `/completions` comes after its URL, as in `http://host:8000/v1`.
            model: name of the model there; None: the only one that it has.
            at_once: requests in hand at once, over all calls of `score`.
        """
        self.endpoint, self._model = endpoint, model
        self._at_once, self._free = at_once, threading.Semaphore(at_once)

    @cached_property
    def info(self) -> CompletionsInfo:
        """Finds the model, and the style that the server speaks."""
        url = self.endpoint.url

        def read(body: bytes) -> dict[str, int | None]:
            models: dict[str, int | None] = {}
            for model in json.loads(body)["data"]:
                name, longest = model["id"], model.get("max_model_len")
                if not isinstance(name, str):
                    raise ValueError(f"the id of a model is {shown(name)}: a text is expected")
                if longest is not None and (type(longest) is not int or longest < 1):
                    raise ValueError(f"max_model_len of {short(name)} is {shown(longest)}")
                models[name] = longest
            return models

        models = self.endpoint.ask("GET", "/models", read)
        has = short(", ".join(models), 400) or "(none)"
        if self._model is None and len(models) != 1:
            raise UserError(f"{self.endpoint} has the models {has}: name one in teacher.api_model")
        model = next(iter(models)) if self._model is None else self._model
        if models and model not in models:
            raise UserError(f"teacher.api_model={model}: the server at {url} has {has}")
        longest = models.get(model)
        most = None if longest is None else longest - 1  # it must generate one more
        problems = []
        for style in _STYLES:
            try:
                self._ask(model, style, (1, 2), 1, None)  # tokens that every vocabulary has
                return CompletionsInfo(model, most, style)
            except TeacherError as error:
                problems.append(f"{style}: {error}")
        raise UserError(
            f"the server at {url} does not return the log-probs of a prompt of token ids:\n  "
            + "\n  ".join(problems)
        )

    def score(
        self, sequences: Sequences, ids: np.ndarray | None, distill: DistillConfig, vocab_size: int
    ) -> TeacherSignal:
        """Returns the signal `topk` or `sampled` of every position where `loss_mask` is True.

        Probabilities are of the server's whole vocabulary, at temperature 1. Elsewhere the log-prob
        is 0, and the K + 1 outcomes are equally probable.
        """
        assert distill.signal in ("topk", "sampled") and not distill.entropy_aware
        k = distill.top_k if distill.signal == "topk" else 0
        tokens, mask = np.asarray(sequences.tokens), np.asarray(sequences.mask)
        loss_mask = np.asarray(sequences.loss_mask)
        (b, t), c = tokens.shape, loss_mask.shape[1]
        rows = np.flatnonzero(loss_mask.any(1))
        asked = [tokens[row][mask[row]].tolist() for row in rows]
        with ThreadPoolExecutor(self._at_once) as pool:
            answers = list(pool.map(partial(self.positions, k=k, vocab_size=vocab_size), asked))
        token_logprobs = np.zeros((b, c), np.float32)
        best_ids = np.broadcast_to(np.arange(k, dtype=np.int32), (b, c, k)).copy()
        best = np.full((b, c, k), -np.log(k + 1.0), np.float32)
        tail = np.full((b, c), -np.log(k + 1.0), np.float32)
        for row, positions in zip(rows, answers, strict=True):
            index = np.cumsum(mask[row])[t - c :] - 1  # in the sequence without padding
            for j in np.flatnonzero(loss_mask[row]):
                assert index[j] > 0, "a completion token stands after a prompt"
                position = positions[index[j] - 1]
                token_logprobs[row, j] = position.token
                if k:
                    best_ids[row, j], best[row, j] = zip(*position.best[:k], strict=True)
                    tail[row, j] = tail_logprob([value for _, value in position.best[:k]])
        if not k:
            return SampledSignal(token_logprobs)
        return TopKSignal(best_ids, best, tail)

    def positions(self, tokens: Sequence[int], k: int, vocab_size: int) -> list[Position]:
        """Asks about each token of a sequence but the first, which nothing predicts.

        Args:
            k: most probable tokens to name for each, at least; 0: none.
            vocab_size: the student's tokens.
        """
        info = self.info
        with self._free:
            return self._ask(info.model, info.style, tokens, k, vocab_size)

    def _ask(
        self, model: str, style: str, tokens: Sequence[int], k: int, vocab_size: int | None
    ) -> list[Position]:
        keys, read_positions = _STYLES[style]
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,  # some servers refuse 0
            "temperature": 0,
            "return_tokens_as_token_ids": True,
            **keys(max(k, 1)),  # some servers take 0 for "none at all"
        }

        def read(text: bytes) -> list[Position]:
            answer = json.loads(text)
            choice = answer["choices"][0]
            echoed = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            if echoed is not None and echoed != list(tokens):
                raise ValueError(f"it read the tokens {_some(echoed)}, {_some(tokens)} were sent")
            count = (answer.get("usage") or {}).get("prompt_tokens")
            if count is not None and count != len(tokens):
                sent = f"{len(tokens)} were sent: it adds or drops some"
                raise ValueError(f"it read {count} tokens, {sent}")
            positions = read_positions(choice, tokens)
            self._check(positions, k, vocab_size)
            return positions

        return self.endpoint.ask("POST", "/completions", read, json.dumps(body).encode())

    def _check(self, positions: Sequence[Position], k: int, vocab_size: int | None) -> None:
        """Raises an error for values that no teacher can give. The arrays have an entry for the
        first token too, so that an error names the position in the sequence."""
        token = np.array([0.0, *(position.token for position in positions)])
        mask = np.arange(len(token)) > 0
        protocol.check_logprobs("the log-prob of the token sent", token, mask)
        fewest = min((len(position.best) for position in positions), default=k)
        if fewest < k:
            raise TeacherError(
                f"{self.endpoint}: it returns {fewest} log-probs per position, but"
                f" distill.top_k={k}"
                f" needs more: set distill.top_k={fewest}, or raise"
                " the server's limit (vLLM: --max-logprobs)"
            )
        if not k:
            return
        best = [((0, 0.0),) * k, *(position.best[:k] for position in positions)]
        logprobs = np.array([[value for _, value in row] for row in best])
        if vocab_size is not None:
            ids = np.array([[i for i, _ in row] for row in best])
            protocol.check_ids("the id of one of the best tokens", ids, vocab_size)
        protocol.check_logprobs("the log-prob of one of the best tokens", logprobs, mask)
        tail = np.array([0.0, *(tail_logprob(row) for row in logprobs[1:])])
        protocol.check_sum("the best tokens' probabilities", logprobs, tail, mask)


def tail_logprob(logprobs: Sequence[float] | np.ndarray) -> float:
    """Computes log(1 - sum of exp(logprobs)), nats, at least `TAIL_FLOOR`."""
    rest = -float(np.sum(np.exp(np.asarray(logprobs, np.float64))))
    return max(float(np.log1p(rest)), TAIL_FLOOR) if rest > -1 else TAIL_FLOOR


def _read_prompt_logprobs(choice: JsonObject, tokens: Sequence[int]) -> list[Position]:
    entries = choice["prompt_logprobs"]
    if entries is None or len(entries) != len(tokens):
        n = len(entries or ())
        raise ValueError(f"prompt_logprobs of {n} tokens, {len(tokens)} were asked")
    positions = []
    for at, token in enumerate(tokens[1:], 1):
        by_id = entries[at] or {}
        values = {int(i): _number(entry["logprob"]) for i, entry in by_id.items()}
        if token not in values:
            raise ValueError(
                f"prompt_logprobs at position {at} are of the tokens {_some([*values])}, not of"
                f" {token}, which was sent there: they belong to another position or vocabulary"
            )
        # The token itself is there besides the best; its rank says whether it is one of them.
        entry = by_id[str(token)]
        count = len(values) - ((entry.get("rank") or 0) > len(values))
        decoded = entry.get("decoded_token")
        if not isinstance(decoded, str | None):
            raise ValueError(f"decoded_token at position {at} is {shown(decoded)}")
        positions.append(Position(values[token], _sorted(values)[:count], decoded))
    return positions


def _read_echo(choice: JsonObject, tokens: Sequence[int]) -> list[Position]:
    answer = choice["logprobs"]
    echoed = [_token_id(name) for name in answer["tokens"][: len(tokens)]]
    if echoed != list(tokens):
        raise ValueError(f"it echoes the tokens {_some(echoed)}, {_some(tokens)} were sent")
    positions = []
    for at, token in enumerate(tokens[1:], 1):
        top = answer["top_logprobs"][at].items()
        best = {_token_id(name): _number(value) for name, value in top}
        logprob = _number(answer["token_logprobs"][at])
        if abs(best.get(token, logprob) - logprob) > ROUNDING:
            raise ValueError(
                f"token_logprobs at position {at} say {logprob:.7g} of token {token}, top_logprobs"
                f" {best[token]:.7g}: they belong to different positions"
            )
        positions.append(Position(logprob, _sorted(best), None))
    return positions


_STYLES: dict[str, tuple[Callable[[int], JsonObject], Callable[..., list[Position]]]] = {
    "prompt_logprobs": (lambda k: {"prompt_logprobs": k}, _read_prompt_logprobs),
    "echo": (lambda k: {"echo": True, "logprobs": k}, _read_echo),
}
"""Style -> the keys that ask for k log-probs a position, and the function that reads them."""


def _some(tokens: Sequence[int]) -> str:
    return f"{list(tokens[:8])}{'...' if len(tokens) > 8 else ''} ({len(tokens)})"


def _token_id(name: str) -> int:
    if not name.startswith(NAMED):
        raise ValueError(f"token {name!r} is not named {NAMED}N: return_tokens_as_token_ids")
    return int(name.removeprefix(NAMED))


def _sorted(values: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """Sorts tokens, the most probable first; before them NaN, which `_check` refuses."""
    return tuple(sorted(values.items(), key=lambda item: (item[1] == item[1], -item[1], item[0])))


def _number(value: object) -> float:
    """Reads a log-prob; null is an error, minus infinity is not."""
    if not isinstance(value, int | float):
        raise ValueError(f"a log-prob is {short(json.dumps(value), 40)}: a number is expected")
    return max(float(value), LEAST_LOGPROB)
