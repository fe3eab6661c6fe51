"""A completions server as teacher: any that speaks OpenAI's `/completions`, takes token ids and
returns the log-probs of a prompt, in one of two styles.

- `prompt_logprobs: k` (vLLM): for each prompt token a map {id: {logprob, rank, decoded_token}} of
  the k most probable tokens and the token itself.
- `echo: true, logprobs: k`: `tokens`, `token_logprobs` and `top_logprobs` of prompt and
  completion, tokens named `token_id:N` (`return_tokens_as_token_ids`).

Each sequence is one request, since servers batch by themselves. `Endpoint.ask` repeats it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from jaxrl.config.settings import DistillConfig
from jaxrl.errors import UserError, short, shown
from jaxrl.process.json_types import JsonObject
from jaxrl.teacher.check_answer import ROUNDING, check_ids, check_logprobs, check_sum
from jaxrl.teacher.client import Endpoint, TeacherError
from jaxrl.teacher.protocol import Signal
from jaxrl.types import SampledSignal, Sequences, TeacherSignal, TopKSignal

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
    """Asks one server; `score` is thread-safe."""

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
        models = self.endpoint.ask("GET", "/models", _read_models)
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
            f"the server at {url} does not tell the log-probs of a prompt of token ids:\n  "
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

        def read(answer: bytes) -> list[Position]:
            positions = read_positions(_choice(answer, tokens), tokens)
            self._check(positions, k, vocab_size)
            return positions

        return self.endpoint.ask("POST", "/completions", read, json.dumps(body).encode())

    def _check(self, positions: Sequence[Position], k: int, vocab_size: int | None) -> None:
        """Raises an error for values that no teacher can give. The arrays have an entry for the
        first token too, so that an error names the position in the sequence."""
        token = np.array([0.0, *(position.token for position in positions)])
        mask = np.arange(len(token)) > 0
        check_logprobs("the log-prob of the token sent", token, mask)
        fewest = min((len(position.best) for position in positions), default=k)
        if fewest < k:
            raise TeacherError(
                f"{self.endpoint}: it tells {fewest} log-probs a position,"
                f" distill.top_k={k} asks for more: set distill.top_k={fewest}, or raise"
                " the server's limit (vLLM: --max-logprobs)"
            )
        if not k:
            return
        best = [((0, 0.0),) * k, *(position.best[:k] for position in positions)]
        logprobs = np.array([[value for _, value in row] for row in best])
        if vocab_size is not None:
            ids = np.array([[i for i, _ in row] for row in best])
            check_ids("the id of one of the best tokens", ids, vocab_size)
        check_logprobs("the log-prob of one of the best tokens", logprobs, mask)
        tail = np.array([0.0, *(tail_logprob(row) for row in logprobs[1:])])
        check_sum("the best tokens' probabilities", logprobs, tail, mask)


def tail_logprob(logprobs: Sequence[float] | np.ndarray) -> float:
    """Computes log(1 - sum of exp(logprobs)), nats, at least `TAIL_FLOOR`."""
    rest = -float(np.sum(np.exp(np.asarray(logprobs, np.float64))))
    return max(float(np.log1p(rest)), TAIL_FLOOR) if rest > -1 else TAIL_FLOOR


def _read_models(body: bytes) -> dict[str, int | None]:
    """Reads the names of a server's models, with the longest sequence if the server gives it."""
    models: dict[str, int | None] = {}
    for model in json.loads(body)["data"]:
        name, longest = model["id"], model.get("max_model_len")
        if not isinstance(name, str):
            raise ValueError(f"the id of a model is {shown(name)}: a text is expected")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise ValueError(f"max_model_len of {short(name)} is {shown(longest)}")
        models[name] = longest
    return models


def _choice(body: bytes, tokens: Sequence[int]) -> JsonObject:
    """Returns the first choice of an answer. Raises ValueError if it is about other tokens than
    were sent."""
    answer = json.loads(body)
    choice = answer["choices"][0]
    echoed = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    if echoed is not None and echoed != list(tokens):
        raise ValueError(f"it read the tokens {_some(echoed)}, {_some(tokens)} were sent")
    count = (answer.get("usage") or {}).get("prompt_tokens")
    if count is not None and count != len(tokens):
        raise ValueError(f"it read {count} tokens, {len(tokens)} were sent: it adds or drops some")
    return choice


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
