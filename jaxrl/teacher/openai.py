"""A completions server as teacher: any that speaks OpenAI's `/completions`, takes token ids and
tells the log-probs of a prompt, in one of two styles.

- `prompt_logprobs: k` (vLLM): per prompt token a map {id: {logprob, rank, decoded_token}} of the k
  best and the token itself.
- `echo: true, logprobs: k`: `tokens`, `token_logprobs` and `top_logprobs` of prompt and
  completion, tokens named `token_id:N` (`return_tokens_as_token_ids`).

One request a sequence, since servers batch by themselves.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from jaxrl.config.schema import DistillConfig
from jaxrl.errors import UserError
from jaxrl.teacher.check import ROUNDING, check_ids, check_logprobs, check_sum
from jaxrl.teacher.http import Endpoint, TeacherError
from jaxrl.teacher.protocol import PROTOCOL, Info
from jaxrl.types import Sequences, TeacherSignal

Style = Literal["prompt_logprobs", "echo"]
LEAST_LOGPROB = -1e4
"""Stands for a log-prob of minus infinity."""
TAIL_FLOOR = float(np.log(2.0**-24))
"""Least log-prob of the tail, -16.6 nats: the k log-probs arrive in float32, so what they leave
over is not known better than that."""
NAMED = "token_id:"


@dataclass(frozen=True)
class Position:
    """What a server says about one token of a prompt."""

    token: float
    """Log-prob of the token that stands there, nats."""
    best: tuple[tuple[int, float], ...]
    """(id, log-prob) of the most probable tokens, the most probable first."""
    decoded: str | None
    """The token's text, where the server tells it."""


class CompletionsClient:
    """Asks one server; `score` is thread-safe."""

    def __init__(
        self, url: str, model: str | None, token: str | None, timeout: float, at_once: int
    ):
        """
        Args:
            url: what `/completions` is put after, as in `http://host:8000/v1`.
            model: name of the model there; None: the only one that it has.
            timeout: seconds for each sequence, tries after a failure included.
            at_once: requests in hand at once, over all calls of `score`.
        """
        self.endpoint = Endpoint(url.rstrip("/"), token, timeout)
        self._model = model
        self._max_tokens: int | None = None
        self._style: Style | None = None
        self._lock = threading.Lock()
        self._at_once, self._free = at_once, threading.Semaphore(at_once)

    def info(self) -> Info:
        """The handshake: what a completions server tells, and what it can be asked."""
        self._meet()
        assert self._model is not None
        return Info(
            protocol=PROTOCOL,
            model=self._model,
            family=None,
            n_params=None,
            d_model=None,
            vocab_size=None,
            vocab_hash=None,
            tokenizer_eos=None,
            model_eos=(),
            chat_template=None,
            dtype=None,
            max_tokens=self._max_tokens,
            max_request_bytes=None,
            max_answer_bytes=None,
            signals=("topk", "sampled"),
            fingerprint=self._model,
        )

    def score(
        self, sequences: Sequences, ids: np.ndarray | None, distill: DistillConfig, vocab_size: int
    ) -> TeacherSignal:
        """The signal `topk` or `sampled` of every position where `loss_mask` is True.

        Probabilities are of the server's whole vocabulary, at temperature 1. Elsewhere the log-prob
        is 0, and the K + 1 outcomes are equally probable.
        """
        assert distill.signal in ("topk", "sampled") and not distill.entropy_aware
        k = distill.top_k if distill.signal == "topk" else 0
        tokens, mask = np.asarray(sequences.tokens), np.asarray(sequences.mask)
        loss_mask = np.asarray(sequences.loss_mask)
        (b, t), c = tokens.shape, loss_mask.shape[1]
        rows = [row for row in range(b) if loss_mask[row].any()]
        asked = [tokens[row][mask[row]].tolist() for row in rows]
        with ThreadPoolExecutor(self._at_once) as pool:
            answers = list(pool.map(partial(self.positions, k=k, vocab_size=vocab_size), asked))
        token = np.zeros((b, c), np.float32)
        best_ids = np.broadcast_to(np.arange(k, dtype=np.int32), (b, c, k)).copy()
        best = np.full((b, c, k), -np.log(k + 1.0), np.float32)
        tail = np.full((b, c), -np.log(k + 1.0), np.float32)
        for row, positions in zip(rows, answers, strict=True):
            place = np.cumsum(mask[row])[t - c :] - 1
            for j in np.flatnonzero(loss_mask[row]):
                told = positions[place[j]]
                assert told is not None, "a completion token stands after a prompt"
                token[row, j] = told.token
                if k:
                    best_ids[row, j], logprobs = (list(x) for x in zip(*told.best, strict=True))
                    best[row, j], tail[row, j] = logprobs, tail_logprob(logprobs)
        if not k:
            return TeacherSignal(token_logprobs=token)
        return TeacherSignal(topk_ids=best_ids, topk_logprobs=best, tail_logprob=tail)

    def positions(
        self, tokens: Sequence[int], k: int, vocab_size: int | None = None
    ) -> list[Position | None]:
        """What the server says about each token of a sequence; None for the first, which nothing
        predicts.

        Args:
            k: most probable tokens to tell for each; 0: none.
            vocab_size: the student's tokens; None: unknown.
        """
        self._meet()
        assert self._style is not None
        with self._free:
            return self._ask(self._style, tokens, k, vocab_size)

    def _ask(
        self, style: Style, tokens: Sequence[int], k: int, vocab_size: int | None = None
    ) -> list[Position | None]:
        n = max(k, 1)  # some servers take 0 for "none at all"
        how = (
            {"prompt_logprobs": n} if style == "prompt_logprobs" else {"echo": True, "logprobs": n}
        )
        body = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": 1,  # 0 is refused by some
            "temperature": 0,
            "return_tokens_as_token_ids": True,
            **how,
        }
        read = partial(_read, style=style, tokens=tokens, k=k, vocab_size=vocab_size)
        found = self.endpoint.ask("POST", "/completions", read, json.dumps(body).encode())
        return [None if told is None else self._cut(told, k) for told in found]

    def _cut(self, told: Position, k: int) -> Position:
        if len(told.best) < k:
            raise TeacherError(
                f"teacher at {self.endpoint.url}: it tells {len(told.best)} log-probs a position,"
                f" distill.top_k={k} asks for more: set distill.top_k={len(told.best)}, or raise"
                " the server's limit (vLLM: --max-logprobs)"
            )
        return Position(told.token, told.best[:k], told.decoded)

    def _meet(self) -> None:
        """Finds the name of the model and the style that the server speaks; once."""
        with self._lock:
            if self._style is not None:
                return
            models = self.endpoint.ask("GET", "/models", _models)
            self._model, self._max_tokens = self._chosen(models)
            self._style = self._find_style()

    def _chosen(self, models: dict[str, int | None]) -> tuple[str, int | None]:
        if self._model is None and len(models) != 1:
            raise UserError(
                f"teacher at {self.endpoint.url} has the models {', '.join(models) or '(none)'}:"
                " name one in teacher.api_model"
            )
        name = next(iter(models)) if self._model is None else self._model
        if models and name not in models:
            raise UserError(
                f"teacher.api_model={name}: the server at {self.endpoint.url} has"
                f" {', '.join(models)}"
            )
        longest = models.get(name)
        return name, None if longest is None else longest - 1  # it must generate one more

    def _find_style(self) -> Style:
        """Tries both on two tokens that every vocabulary has."""
        problems = []
        for style in _READERS:
            try:
                self._ask(style, (1, 2), 1)
                return style
            except TeacherError as error:
                problems.append(f"{style}: {error}")
        raise UserError(
            f"the server at {self.endpoint.url} does not tell the log-probs of a prompt of token"
            " ids:\n  " + "\n  ".join(problems)
        )


def tail_logprob(logprobs: Sequence[float]) -> float:
    """log(1 - sum of exp(logprobs)), nats, at least `TAIL_FLOOR`."""
    rest = -float(np.sum(np.exp(np.asarray(logprobs, np.float64))))
    return max(float(np.log1p(rest)), TAIL_FLOOR) if rest > -1 else TAIL_FLOOR


def _models(body: bytes) -> dict[str, int | None]:
    """Names of a server's models, with the longest sequence where it is told."""
    return {each["id"]: each.get("max_model_len") for each in json.loads(body)["data"]}


def _read(
    body: bytes, style: Style, tokens: Sequence[int], k: int, vocab_size: int | None
) -> list[Position | None]:
    """The positions in an answer. Raises ValueError where it is about other tokens than were sent,
    or says what no teacher can say."""
    answer = json.loads(body)
    choice = answer["choices"][0]
    echoed = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    if echoed is not None and echoed != list(tokens):
        raise ValueError(f"it read the tokens {_some(echoed)}, {_some(tokens)} were sent")
    count = (answer.get("usage") or {}).get("prompt_tokens")
    if count is not None and count != len(tokens):
        raise ValueError(f"it read {count} tokens, {len(tokens)} were sent: it adds or drops some")
    positions: list[Position | None] = _READERS[style](choice, tokens)
    _check(positions, k, vocab_size)
    return positions


def _check(positions: Sequence[Position | None], k: int, vocab_size: int | None) -> None:
    mask = np.array([position is not None for position in positions])
    there = [position for position in positions if position is not None]
    own = np.zeros(len(mask), np.float32)
    own[mask] = [position.token for position in there]
    check_logprobs("the log-prob of the token sent", own, mask)
    if not k or min(len(position.best) for position in there) < k:
        return  # too few: `_cut` says so
    ids, best = np.zeros((len(mask), k), np.int64), np.zeros((len(mask), k), np.float32)
    tail = np.zeros(len(mask))
    ids[mask] = [[i for i, _ in position.best[:k]] for position in there]
    best[mask] = [[value for _, value in position.best[:k]] for position in there]
    if vocab_size is not None:
        check_ids("the id of one of the best tokens", ids, vocab_size)
    check_logprobs("the log-prob of one of the best tokens", best, mask)
    tail[mask] = [tail_logprob(row.tolist()) for row in best[mask]]
    check_sum("the best tokens' probabilities", best, tail, mask)


def _read_prompt_logprobs(choice: Any, tokens: Sequence[int]) -> list[Position | None]:
    told = choice["prompt_logprobs"]
    if told is None or len(told) != len(tokens):
        raise ValueError(f"prompt_logprobs of {len(told or ())} tokens, {len(tokens)} were asked")
    positions: list[Position | None] = [None]
    for at, token in enumerate(tokens[1:], 1):
        each = told[at] or {}
        values = {int(i): _number(entry["logprob"]) for i, entry in each.items()}
        if token not in values:
            raise ValueError(
                f"prompt_logprobs at position {at} are of the tokens {_some([*values])}, not of"
                f" {token}, which was sent there: they belong to another position or vocabulary"
            )
        # The token itself is there besides the best; its rank says whether it is one of them.
        own = each[str(token)]
        count = len(values) - ((own.get("rank") or 0) > len(values))
        decoded = own.get("decoded_token")
        positions.append(Position(values[token], _sorted(values, count), decoded))
    return positions


def _read_echo(choice: Any, tokens: Sequence[int]) -> list[Position | None]:
    told = choice["logprobs"]
    names, values = told["tokens"][: len(tokens)], told["token_logprobs"]
    echoed = [_named(name) for name in names]
    if echoed != list(tokens):
        raise ValueError(f"it echoes the tokens {_some(echoed)}, {_some(tokens)} were sent")
    positions: list[Position | None] = [None]
    for at in range(1, len(tokens)):
        best = {_named(name): _number(value) for name, value in told["top_logprobs"][at].items()}
        own = _number(values[at])
        if abs(best.get(tokens[at], own) - own) > ROUNDING:
            raise ValueError(
                f"token_logprobs at position {at} say {own:.7g} of token {tokens[at]}, top_logprobs"
                f" {best[tokens[at]]:.7g}: they belong to different positions"
            )
        positions.append(Position(own, _sorted(best, len(best)), None))
    return positions


def _some(tokens: Sequence[int]) -> str:
    return f"{list(tokens[:8])}{'...' if len(tokens) > 8 else ''} ({len(tokens)})"


_READERS: dict[Style, Any] = {"prompt_logprobs": _read_prompt_logprobs, "echo": _read_echo}


def _named(name: str) -> int:
    if not name.startswith(NAMED):
        raise ValueError(f"token {name!r} is not named {NAMED}N: return_tokens_as_token_ids")
    return int(name.removeprefix(NAMED))


def _sorted(values: dict[int, float], count: int) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(values.items(), key=lambda item: (-item[1], item[0]))[:count])


def _number(value: Any) -> float:
    """A log-prob; null is an error, minus infinity is not."""
    if not isinstance(value, int | float):
        raise ValueError(f"a log-prob is {json.dumps(value)[:40]}: a number is expected")
    return max(float(value), LEAST_LOGPROB)
