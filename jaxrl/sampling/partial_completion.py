"""What an engine is asked for, a completion of one turn or an episode of several; the completion
while it is generated; and its text, which a stop string may end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from jaxrl.data.thoughts import opening_of
from jaxrl.data.tokenizer import Tokenizer, decode_text
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.types import Completion, FinishReason, TokenIds, Turn


@dataclass(frozen=True)
class Reply:
    """What follows a turn of the model."""

    tokens: tuple[int, ...] = ()
    """What the model reads next, up to where its next turn begins: the environment's words with the
    chat template's tokens around them. Empty: the episode is over."""
    text: str = ""
    """The environment's words."""
    reward: float | None = None
    """Reward of the turn that is answered."""
    cut: bool = False
    """The episode ends because it may have no further turn, not because it is over."""
    roles: tuple[str, ...] = ()
    """Of the messages of that, each once."""
    failure: str | None = None
    """Why there is no answer, as in `types.Completion`: the episode ends without a reward."""

    @property
    def called(self) -> bool:
        """Returns whether the turn called tools, which makes it no answer to the prompt."""
        return "tool" in self.roles


class EnvironmentClient(Protocol):
    """The other side of one episode (`jaxrl.environments`)."""

    def answer(self, text: str, *, eos: int | None, length: int) -> Future[Reply]:
        """Submits a turn of the model; returns at once. The future raises only what ends the run
        (`UserError`, `RunError`): an environment that fails gives a `Reply.failure`.

        Args:
            text: of the turn, from where its thoughts were opened on, with special tokens; else as
                `types.Completion.text`.
            eos: its last token, where that is an EOS; None where a stop string ended it.
            length: tokens of the episode so far, this turn included.
        """

    def end(self) -> None:
        """Ends the episode, maybe without an answer to its last turn. Called once for each that
        had a slot, also where generation is aborted."""

    def again(self) -> EnvironmentClient:
        """Ends the episode, and returns the other side of the same one from its beginning."""


class RandomKey(NamedTuple):
    """What the random bits of a completion depend on, besides the position of each token."""

    seed: int
    step: int = 0
    attempt: int = 0
    prompt: int = 0
    """Id of the prompt, modulo 2^31."""
    sample: int = 0


@dataclass(frozen=True)
class SampleRequest:
    """A completion that an engine is asked for."""

    prompt: Sequence[int]
    """Token ids. Consecutive requests with the same object and the same `key.prompt` share its keys
    and values."""
    sampling: SamplingParams
    key: RandomKey
    max_tokens: int
    """Most tokens of the completion, at most `sampling.max_new_tokens`."""
    turn_tokens: int | None = None
    """Most tokens of one turn of an episode; None: those of the completion."""
    environment: EnvironmentClient | None = None
    """Answers the turns of the model: the completion is an episode."""
    record_experts: bool = False
    """Of a mixture, set `Completion.experts`."""

    @property
    def way(self) -> tuple[SamplingParams, bool]:
        """Returns what all slots of a launch share."""
        return self.sampling, self.record_experts


@dataclass
class PartialCompletion:
    """A completion while it is generated."""

    index: int
    """Number of its request: the lower, the older."""
    prompt: int
    """Number of its prompt."""
    request: SampleRequest
    future: Future[Completion] = field(default_factory=Future)
    """Gets the completion once it has ended."""
    drawn: list[np.ndarray] = field(default_factory=list)
    """[k, 3] int32 of each launch and each observation, as `decode.launch` returns them: tokens,
    and the bits of their log-probs under the full and the truncated distribution. They are views,
    joined only when they are read: each launch adds to all samples."""
    finish_reason: FinishReason | None = None
    text: str = ""
    opening: str = ""
    """As in `types.Completion`."""
    slot: int | None = None
    """The slot that holds its keys and values; None before and after that."""
    turns: list[Turn] = field(default_factory=list)
    """Turns of an episode that have ended."""
    was_cut: bool = False
    """Its slot has read tokens that are no longer there, since its last answer."""
    reply: Future[Reply] | None = None
    """The environment's answer to the last turn, while it is awaited."""
    failure: str | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    """As in `types.Completion`."""
    experts: list[np.ndarray] = field(default_factory=list)
    """[., L, k] of the prompt without its last token, then of each launch and of each answer; where
    they are recorded."""

    @property
    def turn_start(self) -> int:
        """Returns the index of the first token of the turn that is being sampled."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def turn_end(self) -> int:
        """Returns the number of tokens at which that turn is cut."""
        most, turn_tokens = self.request.max_tokens, self.request.turn_tokens
        return most if turn_tokens is None else min(most, self.turn_start + turn_tokens)

    @property
    def tokens(self) -> np.ndarray:
        """Returns the tokens so far, [n] int32, and joins what was drawn."""
        if len(self.drawn) != 1:
            self.drawn = [np.concatenate([np.empty((0, 3), np.int32), *self.drawn])]
        return self.drawn[0][:, 0]

    def begin_with(self, begun: Completion) -> None:
        """Goes on from an unfinished completion."""
        logprobs = np.array([begun.logprobs, begun.sampler_logprobs], np.float32)
        self.drawn = [np.stack([np.array(begun.tokens, np.int32), *logprobs.view(np.int32)], 1)]
        self.versions, self.turns = list(begun.versions), list(begun.turns)
        self.text, self.opening = begun.text, begun.opening
        if begun.experts is not None:
            read = len(self.request.prompt) - 1
            self.experts = [begun.experts[:read], begun.experts[read:]]

    def continue_with(self, version: int) -> None:
        """Notes the version of the weights that the next token is sampled with."""
        count = len(self.tokens)
        self.versions = [x for x in self.versions if x[0] < count]
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((count, version))

    def cut(self, length: int) -> None:
        """Drops all tokens but the first ones."""
        self.was_cut |= len(self.tokens) > length
        self.drawn = [self.drawn[0][:length]]
        if self.experts:
            self.experts[1:] = [np.concatenate(self.experts[1:])[:length]]

    def ask(self, tokenizer: Tokenizer | None, number: int) -> Future[Reply]:
        """Has the environment answer one of `turns`, of the model, which has ended."""
        environment, sampling = self.request.environment, self.request.sampling
        assert environment is not None
        end = sum(turn.tokens for turn in self.turns[: number + 1])
        start = end - self.turns[number].tokens
        last = int(self.tokens[end - 1])
        eos = last if last in sampling.eos_ids else None
        kept = self.tokens[start : end if eos is None else end - 1]
        # With special tokens: marks of calls and thoughts may be some.
        written = until_stop(decode_text(tokenizer, kept, special=True), sampling.stop)
        read = self.tokens[:start] if start else self.request.prompt
        return environment.answer(opening_of(tokenizer, read) + written, eos=eos, length=end)

    def receive(self, reply: Reply) -> bool:
        """Takes the answer to the last turn, and returns whether the episode goes on."""
        self.reply = None
        self.turns[-1] = replace(self.turns[-1], reward=reply.reward)
        self.failure = reply.failure
        if reply.called:
            self.text = ""
        if reply.failure is not None or not reply.tokens:
            self.finish_reason = "length" if reply.cut else "stop"
        elif len(self.tokens) + len(reply.tokens) >= self.request.max_tokens:
            self.finish_reason = "length"
        else:
            observed = np.zeros((len(reply.tokens), 3), np.int32)
            observed[:, 0] = reply.tokens
            self.drawn.append(observed)
            turn = Turn("environment", len(reply.tokens), reply.text, roles=reply.roles)
            self.turns.append(turn)
            if self.experts:  # the router chooses again for what was not decoded
                shape = len(reply.tokens), *self.experts[0].shape[1:]
                self.experts.append(np.full(shape, -1, self.experts[0].dtype))
        return self.finish_reason is None

    def completion(self) -> Completion:
        """Returns the completion, or what there is of it."""
        tokens = TokenIds(self.tokens)
        logprobs = self.drawn[0][:, 1:].view(np.float32)
        experts = None
        if self.experts:
            experts = np.concatenate(self.experts)[: len(self.experts[0]) + len(tokens)]
        return Completion(
            tokens=tokens,
            logprobs=np.ascontiguousarray(logprobs[:, 0]),
            sampler_logprobs=np.ascontiguousarray(logprobs[:, 1]),
            finish_reason=self.finish_reason or "unfinished",
            text=self.text,
            opening=self.opening,
            experts=experts,
            turns=tuple(self.turns),
            failure=self.failure,
            versions=tuple(x for x in self.versions if not x[0] or x[0] < len(tokens)),
        )


def tell_again(
    begun: Sequence[tuple[SampleRequest, Completion]], tokenizer: Tokenizer | None
) -> list[bool]:
    """Tells environments the turns of unfinished episodes that they have answered, each in turn
    and all episodes at once. Returns which of them answer again as they did; the others are told
    no further turn."""
    samples = [PartialCompletion(0, 0, request) for request, _ in begun]
    for sample, (_, completion) in zip(samples, begun, strict=True):
        sample.begin_with(completion)
    same = [True] * len(samples)
    for number in range(1, max((len(sample.turns) for sample in samples), default=0), 2):
        asked = {
            i: sample.ask(tokenizer, number - 1)
            for i, sample in enumerate(samples)
            if same[i] and number < len(sample.turns)
        }
        for i, reply in asked.items():
            turns, answer = samples[i].turns, reply.result()
            start = sum(turn.tokens for turn in turns[:number])
            said = tuple(samples[i].tokens[start : start + turns[number].tokens].tolist())
            same[i] = (answer.tokens, answer.reward) == (said, turns[number - 1].reward)
    return same


def find_stop(
    tokenizer: Tokenizer | None,
    tokens: Sequence[int] | np.ndarray,
    before: int,
    stop: Sequence[str],
) -> tuple[int, str] | None:
    """Finds where one of the tokens from `before` on completes a stop string.

    A stop string counts in the text with special tokens and in the text without them.

    Args:
        tokens: of the completion, without EOS.
        before: tokens that were searched already.

    Returns:
        How many tokens the completion keeps, the last of which completes the stop string, and its
        text (`until_stop`); None where there is none.
    """
    if not stop:
        return None
    # What was searched matters as far as a stop string reaches back, and four characters more:
    # up to three at the left edge may be the halves of one that was split.
    width = length = max(map(len, stop)) + 4
    while width < before and len(decode_text(tokenizer, tokens[before - width : before])) < length:
        width *= 2
    start = max(before - width, 0)

    def holds(end: int) -> bool:
        tails = (decode_text(tokenizer, tokens[start:end], special) for special in (False, True))
        return any(s in tail for tail in tails for s in stop)

    if not holds(len(tokens)):
        return None
    end = next(end for end in range(before + 1, len(tokens) + 1) if holds(end))
    return end, until_stop(decode_text(tokenizer, tokens[:end]), stop)


def until_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string, with that where it closes a tag (`</answer>`
    after `<answer>`); all of it where it has none."""
    first = min(((text.find(s), s) for s in stop if s in text), default=None)
    if first is None:
        return text
    start, end = first
    tag = end.startswith("</") and end.endswith(">") and f"<{end[2:]}" in text[:start]
    return text[: start + len(end)] if tag else text[:start]
