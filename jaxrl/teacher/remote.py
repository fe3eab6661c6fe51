"""Served teachers, as a run sees them: `Endpoint` asks a question over HTTP until it is answered or
its deadline passes; `TeacherClient` and `CompletionsClient` know what to ask.

A run meets the servers before anything is written (`remote_info`, `check_remote`,
`check_remote_prompts`); for the signal `hidden` its actor fetches the heads (`remote_head`); then
`RemoteTeachers`, which has no devices, is the role `teacher`. A `name` is one of `Config.served`.

A completions server is any that speaks OpenAI's `/completions`, takes token ids and returns the
log-probs of a prompt, in one of two styles.

- `prompt_logprobs: k` (vLLM): for each prompt token a map {id: {logprob, rank, decoded_token}} of
  the k most probable tokens and the token itself.
- `echo: true, logprobs: k`: `tokens`, `token_logprobs` and `top_logprobs` of prompt and
  completion, tokens named `token_id:N` (`return_tokens_as_token_ids`).
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import ssl
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType, SimpleNamespace
from typing import TypeVar
from urllib.parse import urlencode

import httpx2
import jax
import numpy as np
from pydantic import ValidationError

from jaxrl.algorithms.signals import teacher_weights
from jaxrl.config.schema import Config
from jaxrl.config.settings import DistillConfig
from jaxrl.data.tokenizer import Tokenizer, check_same_prompts, check_same_vocabulary
from jaxrl.errors import RunError, UserError, short, shown, user_path
from jaxrl.losses.divergence import MIN
from jaxrl.losses.head import log_mixture
from jaxrl.models.config import DecoderConfig
from jaxrl.process.awake_clock import TEMPORARY, awake_clock, retry_after
from jaxrl.process.json_types import JsonObject
from jaxrl.process.waiting import waiting
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.roles.microbatch import part_rows
from jaxrl.runtime.worker import POLL_S, note, phase
from jaxrl.teacher import protocol
from jaxrl.teacher.protocol import JSON, ROUNDING, TOKEN, Info, Options, Signal, row_bytes
from jaxrl.types import Prompt, Rollout, Sequences, TeacherSignal, signal_of

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
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
LATE = "no answer in time"
LEAST_LOGPROB = -1e4
"""Stands for a log-prob of minus infinity."""
TAIL_FLOOR = float(np.log(2.0**-24))
"""Least log-prob of the tail, -16.6 nats: the k log-probs arrive in float32, so what they leave
over is not known better than that."""
Answer = TypeVar("Answer")
Given = TypeVar("Given")
Said = tuple[float, tuple[tuple[int, float], ...], str | None]
"""Of one token of a prompt: its log-prob, nats; (id, log-prob) of the most probable tokens, those
first; its text, where the server gives it."""
PromptScores = tuple[dict[str, np.ndarray], list[str | None]]
"""Of a prompt of n tokens: tensors [n, ...] by their names in a signal (nothing predicts the first,
of which they mean nothing); the texts [n - 1] of the others, where the server gives them."""
ONLY = "teacher"
"""Name in `Config.served` of a teacher that is the only one."""
MEET_S = 30.0
"""Longest wait for a server before the run starts."""
EARLIER = 0.9
"""The share of a call's deadline after which the client gives up: its error says more than the
worker's."""
PROBE_TOKENS = 32
"""Tokens of a prompt with which a completions server is tried."""


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
    turns: threading.Semaphore = field(default_factory=threading.Semaphore, repr=False)
    """One for each question that may be on the wire at once."""
    over: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set once nobody needs answers any more."""

    def __str__(self) -> str:
        return f"teacher {self.name} at {self.url}" if self.name else f"teacher at {self.url}"

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        try:
            file = None if self.ca_file is None else user_path(self.ca_file)
            return ssl.create_default_context(cafile=file)
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
        end: float | None = None,
    ) -> Answer:
        """Asks the server, and reads the answer with `read`.

        Connection errors and `TEMPORARY` statuses are tried again until the deadline, after the
        time that the server asks for; 500, and an answer that `read` cannot read (`UNREADABLE`), a
        few times; any other refusal (4xx), and a certificate that is not trusted, never.

        Args:
            most: bytes of an answer; a longer one is not read.
            end: the deadline, on the clock of `awake`; None: `timeout` from now.

        Raises:
            TeacherError: with the address, the question, and what came of it.
            UserError: as `read` raises it.
        """
        start, pause, tries, wrong, before = awake_clock().awake(), FIRST_PAUSE_S, 0, 0, ""
        end = start + self.timeout if end is None else end
        asked = f"{self}: {method} {path.partition('?')[0]}"
        with waiting(str(self), most=end - start) as known:
            while not self.over.is_set():
                tries, quiet = tries + 1, 0.0
                try:
                    with self._turn(end):
                        status, answer, headers = self._once(method, path, body, kind, end, most)
                    if status == 200:
                        return read(answer)
                    problem, again = f"status {status}: {_message(answer)}", status in TEMPORARY
                    quiet = retry_after(status, headers) or 0.0
                    if status >= 500 and not again:
                        again, wrong = True, wrong + 1
                    elif status in (401, 403):
                        problem += f"; set {TOKEN} to its token"
                except UserError:
                    raise
                except (OSError, httpx2.TransportError) as error:
                    problem, again = self._explain(error)
                except UNREADABLE as error:
                    why = short(" ".join(str(error).split()), 400)
                    problem = f"its answer cannot be used: {type(error).__name__}: {why}"
                    again, wrong = True, wrong + 1
                if not again:
                    raise TeacherError(f"{asked}: {problem}")
                if (now := awake_clock().awake()) >= end:
                    problem = LATE if before in ("", LATE) else f"{LATE} (before: {before})"
                if wrong >= MOST_WRONG or now + quiet + pause >= end:
                    later = f"; it wants to be asked again in {quiet:.0f} s" if quiet else ""
                    raise TeacherError(
                        f"{asked}: {problem}{later}; given up after"
                        f" {now - start:.1f} s and {tries} tries (deadline {self.timeout:g} s)"
                    )
                # Runs that share it do not knock at once.
                self.over.wait(quiet + pause * random.uniform(0.5, 1.0))
                pause, before = min(2 * pause, LONGEST_PAUSE_S), problem
                known.why = problem
            raise TeacherError(f"{asked}: the run is over")

    @contextlib.contextmanager
    def _turn(self, end: float) -> Iterator[None]:
        """Has one of the turns in this block. Raises TimeoutError where none is free until `end`,
        or nobody needs it any more."""
        awake = awake_clock().awake
        while not self.turns.acquire(timeout=min(max(end - awake(), 0.0), POLL_S)):
            if self.over.is_set() or awake() >= end:
                raise TimeoutError
        try:
            yield
        finally:
            self.turns.release()

    def _explain(self, error: Exception) -> tuple[str, bool]:
        """Says what is wrong with a connection, and whether it may be right the next time."""
        cause: BaseException = error
        while (before := cause.__cause__ or cause.__context__) is not None:
            cause = before
        match cause:
            case ssl.SSLCertVerificationError():
                hint = "set teacher.ca_file to its issuer's certificate"
                if cause.verify_code in (62, 64):  # another host, or another IP address
                    hint = "write the address with a host that the certificate names"
                return f"its certificate is not trusted: {cause.verify_message}; {hint}", False
            case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
                return "it speaks no TLS: write http://", False
            case TimeoutError():
                return LATE, True
        why = cause.strerror if isinstance(cause, OSError) else None
        met = isinstance(error, httpx2.ReadError | httpx2.RemoteProtocolError)
        hint = " (if it speaks TLS, write https://)" if met and self.url.startswith("http:") else ""
        return f"{why or error or type(error).__name__}{hint}", True

    def _once(
        self, method: str, path: str, body: bytes | None, kind: str, end: float, most: int
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Returns status, body and headers of one answer. Raises TimeoutError, or what `httpx2`
        does, where nothing comes until `end`, a moment on the clock of `awake`."""
        headers = {"Accept-Encoding": "identity"} | ({} if body is None else {"Content-Type": kind})
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        if (left := end - awake_clock().awake()) <= 0:
            raise TimeoutError
        limits = httpx2.Timeout(left, connect=min(left, CONNECT_S))
        url, answer = self.url.rstrip("/") + path, bytearray()
        verify = self._tls if url.startswith("https:") else False
        with (
            httpx2.Client(verify=verify, trust_env=False, timeout=limits) as client,
            client.stream(method, url, content=body, headers=headers) as response,
        ):
            for piece in response.iter_raw():
                answer += piece
                if len(answer) > most:
                    raise ValueError(f"it is longer than the {most:,} bytes that were asked for")
                if awake_clock().awake() >= end:
                    raise TimeoutError
        return response.status_code, bytes(answer), response.headers


def _message(body: bytes) -> str:
    """Returns the message in an error's JSON, which completions servers nest or do not; else its
    text."""
    text = body.decode(errors="replace")
    with contextlib.suppress(*UNREADABLE):
        error = json.loads(text)
        error = error.get("error", error)
        text = error if isinstance(error, str) else str(error["message"])
    return short(" ".join(text.split()), 600) or "(no message)"


@dataclass
class TeacherClient:
    """Asks one server. Thread-safe: every question has a connection of its own."""

    endpoint: Endpoint

    @cached_property
    def info(self) -> Info:
        """Returns the handshake; every request is meant for the teacher that it was made with."""

        def read(body: bytes) -> Info:
            version = json.loads(body)["protocol"]
            if version != protocol.PROTOCOL:
                raise UserError(
                    f"{self.endpoint} speaks version {shown(version)} of the protocol, this jaxrl"
                    f" version {protocol.PROTOCOL}: install the same jaxrl on both sides"
                )
            try:
                return Info.model_validate_json(body)
            except ValidationError as error:
                raise ValueError(protocol.first_mistake(error)) from None

        return self.endpoint.ask("GET", "/v1/info", read)

    def head(self) -> np.ndarray:
        """Returns the LM head [V, D] in the server's dtype."""
        info = self.info

        def read(body: bytes) -> np.ndarray:
            tensors, rows = protocol.decode(body)[0], np.ones(info.vocab_size, bool)
            shapes: protocol.Shapes = {protocol.HEAD: (info.dtype, (info.d_model,))}
            protocol.check_answer(tensors, shapes, rows, info.vocab_size)
            return tensors[protocol.HEAD]

        most = info.vocab_size * info.d_model * np.dtype(info.dtype).itemsize + OVERHEAD
        path = f"/v1/head?{urlencode({protocol.FINGERPRINT: info.fingerprint})}"
        return self.endpoint.ask("GET", path, read, most=most)

    def score(
        self, sequences: Sequences, ids: np.ndarray | None, distill: DistillConfig, vocab_size: int
    ) -> TeacherSignal:
        """Fetches the signal of `distill.signal` at each completion position, as numpy arrays.

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
        end = awake_clock().awake() + self.endpoint.timeout
        parts = (
            jax.tree.map(lambda x, i=i: x[i : i + size], (sequences, ids))
            for i in range(0, b, size)
        )
        signals = [self._score(options, end, *part) for part in parts]
        return jax.tree.map(lambda *xs: np.concatenate(xs) if len(xs) > 1 else xs[0], *signals)

    def _score(
        self, options: Options, end: float, sequences: Sequences, ids: np.ndarray | None
    ) -> TeacherSignal:
        mask = np.asarray(sequences.loss_mask)
        shapes = options.tensors(self.info.dtype, self.info.d_model)

        def read(body: bytes) -> TeacherSignal:
            tensors = protocol.decode(body)[0]
            protocol.check_answer(tensors, shapes, mask, options.vocab_size)
            if ids is not None and not np.array_equal(tensors["topk_ids"], ids):
                raise ValueError("topk_ids are others than the student's, which were asked for")
            return signal_of(tensors)

        body = protocol.write_request(options, self.info.fingerprint, sequences, ids)
        most = mask.size * row_bytes(shapes) + OVERHEAD
        return self.endpoint.ask("POST", "/v1/score", read, body, protocol.SAFETENSORS, most, end)


def rows_at_once(info: Info, options: Options, t: int, c: int) -> int:
    """Returns how many sequences of T tokens, C of them in the completion, one request may hold;
    0: not one."""
    asked = (info.max_request_bytes - OVERHEAD) // row_bytes(options.asked(t, c))
    answered = info.max_answer_bytes // (c * row_bytes(options.tensors(info.dtype, info.d_model)))
    return max(min(asked, answered), 0)


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
            at_once: requests in hand at once, of a call of `score`.
        """
        self.endpoint, self._model, self._at_once = endpoint, model, at_once

    @cached_property
    def info(self) -> CompletionsInfo:
        """Finds the model, and the style that the server speaks."""
        url = self.endpoint.url

        def read(body: bytes) -> dict[str, int | None]:
            models: dict[str, int | None] = {}
            for model in json.loads(body)["data"]:
                name, longest = model["id"], model.get("max_model_len")
                known = longest is None or (type(longest) is int and longest > 0)
                if not isinstance(name, str) or not known:
                    raise ValueError(f"a model is {shown(model)}: an id and a length are expected")
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
        most = longest and longest - 1  # it must generate one more
        problems = []
        for style in _STYLES:
            try:
                info = CompletionsInfo(model, most, style)
                self.scores((1, 2), 1, 2**31, info)  # tokens that every vocabulary has
                return info
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
        end = awake_clock().awake() + self.endpoint.timeout
        ask = partial(self.scores, k=k, vocab_size=vocab_size, end=end)
        answers = _side_by_side(ask, asked, self._at_once)
        out: dict[str, np.ndarray] = {"token_logprobs": np.zeros((b, c), np.float32)}
        if k:
            ids, even = np.arange(k, dtype=np.int32), np.float32(-np.log(k + 1.0))
            out = {"topk_ids": np.broadcast_to(ids, (b, c, k)).copy()}
            out["topk_logprobs"] = np.full((b, c, k), even)
            out["tail_logprob"] = np.full((b, c), even)
        for row, (tensors, _) in zip(rows, answers, strict=True):
            trained = loss_mask[row]
            # In the sequence without padding.
            index = (np.cumsum(mask[row])[t - c :] - 1)[trained]
            assert index.min() > 0, "a completion token stands after a prompt"
            for name, x in tensors.items():
                out[name][row, trained] = x[index]
        return signal_of(out)

    def scores(
        self,
        tokens: Sequence[int],
        k: int,
        vocab_size: int,
        info: CompletionsInfo | None = None,
        end: float | None = None,
    ) -> PromptScores:
        """Asks about each token of a sequence.

        Args:
            k: most probable tokens to name for each, at least; 0: none, but the token's log-prob.
            vocab_size: the student's tokens.
            info: of the handshake, while it is made.
            end: as of `Endpoint.ask`.
        """
        info = info or self.info
        keys, read_positions = _STYLES[info.style]
        body = {
            "model": info.model,
            "prompt": list(tokens),
            "max_tokens": 1,  # some servers refuse 0
            "temperature": 0,
            "return_tokens_as_token_ids": True,
            **keys(max(k, 1)),  # some servers take 0 for "none at all"
        }

        def read(text: bytes) -> PromptScores:
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

            fewest = min((len(named) for _, named, _ in positions), default=k)
            if fewest < k:
                raise TeacherError(
                    f"{self.endpoint}: it returns {fewest} log-probs per position, but"
                    f" distill.top_k={k} needs more: set distill.top_k={fewest}, or raise the"
                    " server's limit (vLLM: --max-logprobs)"
                )
            # The arrays have an entry for the first token too, so that an error names the position.
            logprobs = [0.0, *(logprob for logprob, _, _ in positions)]
            tensors = {"token_logprobs": np.array(logprobs, np.float32)}
            if k:
                pairs = [((0, 0.0),) * k, *(named[:k] for _, named, _ in positions)]
                best = np.array([[value for _, value in row] for row in pairs])
                tensors = {
                    "topk_ids": np.array([[i for i, _ in row] for row in pairs], np.int32),
                    "topk_logprobs": best.astype(np.float32),
                    "tail_logprob": tail_logprob(best),
                }
            shapes = {name: (x.dtype.name, x.shape[1:]) for name, x in tensors.items()}
            protocol.check_answer(tensors, shapes, np.arange(len(tokens)) > 0, vocab_size)
            return tensors, [decoded for *_, decoded in positions]

        text = json.dumps(body).encode()
        return self.endpoint.ask("POST", "/completions", read, text, end=end)


def _side_by_side(
    call: Callable[[Given], Answer], given: Iterable[Given], at_once: int
) -> list[Answer]:
    """Maps `call` over items in so many threads. With the first error, calls that have not begun
    are dropped; no process waits at its end for the others, as it would for an executor's."""
    asked = [(one, Future[Answer]()) for one in given]
    left, answers = iter(asked), [answer for _, answer in asked]

    def work() -> None:
        for one, answer in left:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(call(one))
                except BaseException as error:
                    answer.set_exception(error)

    for _ in answers[:at_once]:
        threading.Thread(target=work, name="teacher", daemon=True).start()
    wait(answers, return_when=FIRST_EXCEPTION)
    failed = [answer for answer in answers if answer.done() and answer.exception()]
    for answer in answers:
        answer.cancel()
    return [answer.result() for answer in failed or answers]


def tail_logprob(logprobs: np.ndarray) -> np.ndarray:
    """Computes log(1 - sum of exp(logprobs)) over the last dim, nats, at least `TAIL_FLOOR`."""
    with np.errstate(all="ignore"):  # of log-probs that are refused later
        rest = 1 - np.exp(np.asarray(logprobs, np.float64)).sum(-1)
    return np.log(np.maximum(rest, np.exp(TAIL_FLOOR))).astype(np.float32)


def _read_prompt_logprobs(choice: JsonObject, tokens: Sequence[int]) -> list[Said]:
    entries = choice["prompt_logprobs"]
    if entries is None or len(entries) != len(tokens):
        n = len(entries or ())
        raise ValueError(f"prompt_logprobs of {n} tokens, {len(tokens)} were asked")
    positions: list[Said] = []
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
        positions.append((values[token], _sorted(values)[:count], decoded))
    return positions


def _read_echo(choice: JsonObject, tokens: Sequence[int]) -> list[Said]:
    answer = choice["logprobs"]
    echoed = [_token_id(name) for name in answer["tokens"][: len(tokens)]]
    if echoed != list(tokens):
        raise ValueError(f"it echoes the tokens {_some(echoed)}, {_some(tokens)} were sent")
    positions: list[Said] = []
    for at, token in enumerate(tokens[1:], 1):
        top = answer["top_logprobs"][at].items()
        best = {_token_id(name): _number(value) for name, value in top}
        logprob = _number(answer["token_logprobs"][at])
        if abs(best.get(token, logprob) - logprob) > ROUNDING:
            raise ValueError(
                f"token_logprobs at position {at} say {logprob:.7g} of token {token}, top_logprobs"
                f" {best[token]:.7g}: they belong to different positions"
            )
        positions.append((logprob, _sorted(best), None))
    return positions


_STYLES: dict[str, tuple[Callable[[int], JsonObject], Callable[..., list[Said]]]] = {
    "prompt_logprobs": (lambda k: {"prompt_logprobs": k}, _read_prompt_logprobs),
    "echo": (lambda k: {"echo": True, "logprobs": k}, _read_echo),
}
"""Style -> the keys that ask for k log-probs a position, and the function that reads them."""


def _some(tokens: Sequence[int]) -> str:
    return f"{list(tokens[:8])}{'...' if len(tokens) > 8 else ''} ({len(tokens)})"


def _token_id(name: str) -> int:
    if not name.startswith("token_id:"):
        raise ValueError(f"token {name!r} is not named token_id:N: return_tokens_as_token_ids")
    return int(name.removeprefix("token_id:"))


def _sorted(values: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """Sorts tokens, the most probable first; before them NaN, which is refused later."""
    return tuple(sorted(values.items(), key=lambda item: (item[1] == item[1], -item[1], item[0])))


def _number(value: object) -> float:
    """Reads a log-prob; null is an error, minus infinity is not."""
    if not isinstance(value, int | float):
        raise ValueError(f"a log-prob is {short(json.dumps(value), 40)}: a number is expected")
    return max(float(value), LEAST_LOGPROB)


AnyInfo = Info | CompletionsInfo
AnyClient = TeacherClient | CompletionsClient
RowInputs = tuple[Sequences, np.ndarray | None]
"""Rows of a rollout: sequences, and the student's most probable tokens where there are any."""


class RemoteTeachers:
    """One teacher or several. Thread-safe: parts may be asked for side by side."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        infos: Mapping[str, AnyInfo] = MappingProxyType({}),
    ):
        """
        Args:
            infos: of the handshakes before the run, by name; without one, whichever teacher answers
                first is meant.
        """
        self._config, self._vocab_size = config, vocab_size
        timeout = EARLIER * config.deadlines.score
        self._clients = [_client(config, name, timeout, infos.get(name)) for name in config.served]

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """Returns the teacher's signal for each completion position of some rows, as numpy arrays.
        Of several teachers a row gets its own one's or, of a mixture, the mixture's; zeros where it
        has no teacher, as padding. Notes a digest of each teacher's answer, by its name.

        Args:
            part, parts: which of how many slices of rows; None where it is empty.
        """
        n = rollout.sequences.tokens.shape[0]
        rows = part_rows(n, part, parts, 1)
        if rows is None:
            return None
        weights = teacher_weights(self._config, rollout)
        inputs: RowInputs = rollout.sequences, rollout.student_topk
        inputs = jax.tree.map(lambda x: np.asarray(x)[rows], inputs)
        where = ", ".join(self._config.teachers) or self._config.teacher.address
        with phase(f"rows {rows.start}-{rows.stop} of {n}, at {where}"):
            if weights is None:
                (client,) = self._clients
                answer = client.score(*inputs, self._config.distill, self._vocab_size)
                _note(client, protocol.present(answer), inputs[0].loss_mask)
                return answer
            return self._combined(inputs, weights[rows])

    def close(self) -> None:
        """Ends the calls that still ask: they make no further request, and raise TeacherError."""
        for client in self._clients:
            client.endpoint.over.set()

    def _combined(self, inputs: RowInputs, weights: np.ndarray) -> TeacherSignal:
        """Asks several teachers about rows with these weights [n, K], side by side."""
        mixture, asked = self._config.mixture, weights > 0
        asked[:, 0] |= not asked.any()  # an answer for padding alone has its shapes too

        def ask(client: AnyClient, mine: np.ndarray) -> dict[str, np.ndarray]:
            if not mine.any():
                return {}
            sequences, ids = jax.tree.map(lambda x: x[mine], inputs)
            scores = client.score(sequences, ids, self._config.distill, self._vocab_size)
            return protocol.present(scores)

        pairs = list(zip(self._clients, asked.T, strict=True))
        answers = _side_by_side(lambda pair: ask(*pair), pairs, len(pairs))
        for (client, mine), answer in zip(pairs, answers, strict=True):
            _note(client, answer, inputs[0].loss_mask[mine])
        # Hidden states of a mixture stand one after the other, those of one of several at 0.
        infos = [client.info for client in self._clients]
        widths = np.array([info.d_model if isinstance(info, Info) else 0 for info in infos])
        ends = widths if mixture is None else np.cumsum(widths)
        out: dict[str, np.ndarray] = {}
        parts = zip(answers, asked.T, weights.T, ends - widths, strict=True)
        for answer, mine, share, start in parts:
            for name, x in answer.items():
                mixed = mixture is not None and name.endswith(("logprobs", "logprob"))
                width, at = (ends.max(), start) if name == "hidden" else (x.shape[-1], 0)
                empty = np.full((len(weights), *x.shape[1:-1], width), MIN if mixed else 0, x.dtype)
                so_far = out.setdefault(name, empty)
                if mixed:
                    weight = share[mine].reshape(-1, *[1] * (x.ndim - 1))
                    x = log_mixture([so_far[mine], x], [np.ones_like(weight), weight])
                so_far[mine, ..., at : at + x.shape[-1]] = x
        for x in out.values():
            x[~(weights > 0).any(1)] = 0
        if mixture is not None and "topk_ids" in out and inputs[1] is not None:
            out["topk_ids"] = inputs[1]  # the same tokens for all
        return signal_of(out)


def _note(client: AnyClient, answer: Mapping[str, np.ndarray], mask: np.ndarray) -> None:
    """Notes the CRC-32 of what a teacher says, in tensors [B, C, ...], where `mask` [B, C] is
    True."""
    found = 0
    for _, x in sorted(answer.items()):
        for row, trained in zip(x, np.asarray(mask), strict=True):
            found = zlib.crc32(row[trained].tobytes(), found)
    note({f"teacher {client.endpoint.name}".strip(): found})


def remote_info(config: Config, name: str = ONLY) -> AnyInfo:
    """Asks a served teacher for the handshake. Raises UserError where nobody answers."""
    try:
        return _client(config, name, MEET_S).info
    except TeacherError as error:
        raise UserError(f"{_key(config, name)}: {error}") from error


def remote_head(config: Config, rows: int, info: AnyInfo, name: str = ONLY) -> np.ndarray:
    """Fetches the teacher's LM head [rows, D], cut after `rows`, in the server's dtype.

    Args:
        info: of the handshake before the run; another teacher's head is refused.
    """
    client = _client(config, name, EARLIER * config.deadlines.startup, info)
    assert isinstance(client, TeacherClient)
    return client.head()[:rows]


def check_together(config: Config, infos: Mapping[str, AnyInfo]) -> None:
    """Raises UserError for served teachers whose hidden states do not fit into one array."""
    dtypes = {name: info.dtype for name, info in infos.items() if isinstance(info, Info)}
    if config.distill.signal == "hidden" and len(set(dtypes.values())) > 1:
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise UserError(
            f"teachers have hidden states of several dtypes ({given}): serve all with the same"
            " --dtype"
        )


def check_remote(
    config: Config,
    info: AnyInfo,
    tokenizer: Tokenizer,
    student: DecoderConfig,
    name: str = ONLY,
) -> int:
    """Refuses a teacher that the run cannot learn from, by a UserError that names what differs, or
    is not offered. Returns V, the tokens that student and teacher share: every loss uses the first
    V rows."""
    d, where = config.distill, remote_place(config, name)
    if d.signal not in info.signals:
        raise UserError(
            f"distill.signal={d.signal}: {where} offers {' and '.join(info.signals)} only"
        )
    if d.seq_kd:
        raise UserError(f"distill.seq_kd=true: {where} scores, it does not sample; set it to false")
    width = config.max_prompt_tokens + config.max_new_tokens
    if info.max_tokens is not None and width > info.max_tokens:
        raise UserError(
            f"max_prompt_tokens={config.max_prompt_tokens} and max_new_tokens="
            f"{config.max_new_tokens} make {width} positions; {where} takes {info.max_tokens}"
        )
    if isinstance(info, CompletionsInfo):
        if d.entropy_aware:
            raise UserError(
                "distill.entropy_aware=true needs the entropy of the whole vocabulary, which a"
                " completions server does not return: set it to false, or serve the teacher with"
                " python -m jaxrl.serve_teacher"
            )
        if d.distill_temperature != 1:
            raise UserError(
                f"distill.distill_temperature={d.distill_temperature:g}: the log-probs of a"
                " completions server are those at temperature 1; set it to 1"
            )
        return student.vocab_size
    if tokenizer is not None and (ours := protocol.vocab_hash(tokenizer)) != info.vocab_hash:
        raise UserError(
            f"student and teacher have different vocabularies: {where} serves {info.model} with"
            f" the vocabulary {info.vocab_hash[:12]}, the student has {ours[:12]};"
            " distillation needs a teacher with the student's tokenizer"
        )
    names = getattr(tokenizer, "get_vocab", None)
    theirs = names and SimpleNamespace(get_vocab=names, eos_token_id=info.tokenizer_eos)
    eos = student.eos_ids, info.model_eos
    v = check_same_vocabulary(tokenizer, theirs, student.vocab_size, info.vocab_size, *eos)
    options = Options.of(d, v)
    if rows_at_once(info, options, width, config.max_new_tokens) == 0:
        raise UserError(
            f"one sequence of {width} tokens does not fit the limits of {where}: its"
            " --max-request-mb or --max-answer-mb must be raised"
        )
    return v


def check_remote_prompts(
    config: Config,
    info: AnyInfo,
    tokenizer: Tokenizer,
    prompts: Iterable[Prompt],
    vocab_size: int,
    name: str = ONLY,
) -> str | None:
    """Refuses, by a UserError with the place where the two part, a teacher whose chat template, or
    whose tokens, make other prompts of the run's data. Returns what could not be checked, if any.

    Args:
        prompts: some of the run's; a completions server is tried with the first.
        vocab_size: what `check_remote` returned.
    """
    if isinstance(info, Info):
        theirs = copy.copy(tokenizer)
        theirs.chat_template = info.chat_template
        check_same_prompts(tokenizer, theirs, prompts)
        return None
    first = next(iter(prompts), None)
    if first is None:
        return None
    # Asks for what the run will ask for, and compares how the server spells the tokens.
    client, address = _client(config, name, MEET_S), config.served[name].address
    assert isinstance(client, CompletionsClient)
    tokens = first.tokens[:PROBE_TOKENS]
    k = config.distill.top_k if config.distill.signal == "topk" else 0
    try:
        _, words = client.scores(tokens, k, vocab_size)
    except TeacherError as error:
        raise UserError(f"{_key(config, name)}: {error}") from error
    if not words or None in words or tokenizer is None:
        return (
            f"{address} does not return the text of tokens: whether its vocabulary is"
            " the student's could not be checked"
        )
    for token, word in zip(tokens[1:], words, strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # Some servers give the piece of the vocabulary, others its text, with or without the blank
        # before it; a part of a character has no text.
        named = word, text, tokenizer.convert_ids_to_tokens(token)
        theirs, *ours = ("".join(str(spelling).split()) for spelling in named)
        if theirs not in ours and "\ufffd" not in text:
            raise UserError(
                f"student and teacher have different vocabularies: token {token} is {text!r} for"
                f" the student, {short(str(word), 40)!r} for {address};"
                " distillation needs a teacher with the student's tokenizer"
            )
    return None


def remote_place(config: Config, name: str) -> str:
    """Names a served teacher for messages."""
    return f"the teacher {name + ' ' if config.teachers else ''}at {config.served[name].address}"


def _key(config: Config, name: str) -> str:
    return f"{config.teacher_key(name, 'address')}={config.served[name].address}"


def _client(config: Config, name: str, timeout: float, info: AnyInfo | None = None) -> AnyClient:
    """Makes the client of a teacher, which waits `timeout` seconds for each answer, tries after a
    failure included. `info` is of the handshake, where there was one."""
    served = config.served[name]
    assert served.address is not None
    url = served.address if "://" in served.address else f"http://{served.address}"
    known_as, ca_file = name if config.teachers else "", config.teacher.ca_file
    at_once = config.teacher.service_threads
    shared = timeout, known_as, ca_file, threading.Semaphore(at_once)
    endpoint = Endpoint(url.rstrip("/"), protocol.find_token(), *shared)
    client: AnyClient = TeacherClient(endpoint)
    if served.api == "openai":
        client = CompletionsClient(endpoint, served.api_model, at_once)
    if info is not None:
        client.info = info
    return client
