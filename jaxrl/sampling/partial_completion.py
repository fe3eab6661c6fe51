"""One completion while it is generated, of one turn or, in an episode, of several."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from jaxrl.sampling.environment_protocol import Reply
from jaxrl.types import Completion, FinishReason, Turn


@dataclass
class PartialCompletion:
    """A completion with its place in the batch."""

    prompt: int
    prompt_id: int
    sample_id: int
    limit: int
    """Most tokens of the completion."""
    turn_limit: int
    """Most tokens of one turn."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    """[k, 2] float32 for each launch and each observation: log-probs of the full and of the
    truncated distribution."""
    finish_reason: FinishReason | None = None
    text: str = ""
    slot: int | None = None
    """The slot that holds its keys and values; None before and after that."""
    turns: list[Turn] = field(default_factory=list)
    """Of an episode: those that have ended."""
    was_cut: bool = False
    """Its slot has read tokens that are no longer there, since its last answer."""
    reply: Future[Reply] | None = None
    """The environment's answer to the last turn, while it is awaited."""
    failure: str | None = None
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
        return min(self.limit, self.turn_start + self.turn_limit)

    def cut(self, length: int) -> None:
        """Drops all tokens but the first ones."""
        self.was_cut |= len(self.tokens) > length
        del self.tokens[length:]
        self.logprobs = [np.concatenate(self.logprobs)[:length]]
        if self.experts:
            self.experts[1:] = [np.concatenate(self.experts[1:])[:length]]

    def end_turn(self) -> None:
        """Makes what was sampled since the last turn a turn of the assistant, which says `text`."""
        self.turns.append(Turn("assistant", len(self.tokens) - self.turn_start, self.text))

    def receive(self, reply: Reply) -> bool:
        """Takes the answer to the last turn, and returns whether the episode goes on."""
        self.reply = None
        self.turns[-1] = replace(self.turns[-1], reward=reply.reward)
        self.failure = reply.failure
        if reply.failure is not None or not reply.tokens:
            self.finish_reason = "length" if reply.cut else "stop"
        elif len(self.tokens) + len(reply.tokens) >= self.limit:
            self.finish_reason = "length"
        else:
            self.tokens += reply.tokens
            self.logprobs.append(np.zeros((len(reply.tokens), 2), np.float32))
            self.turns.append(Turn("environment", len(reply.tokens), reply.text))
            if self.experts:  # the router chooses again for what was not decoded
                shape = len(reply.tokens), *self.experts[0].shape[1:]
                self.experts.append(np.full(shape, -1, self.experts[0].dtype))
        return self.finish_reason is None

    def completion(self) -> Completion:
        """Returns the completion, which has ended."""
        assert self.finish_reason is not None
        logprobs = np.concatenate(self.logprobs)[: len(self.tokens)]
        experts = None
        if self.experts:
            experts = np.concatenate(self.experts)[: len(self.experts[0]) + len(self.tokens)]
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=np.ascontiguousarray(logprobs[:, 0]),
            sampler_logprobs=np.ascontiguousarray(logprobs[:, 1]),
            finish_reason=self.finish_reason,
            text=self.text,
            experts=experts,
            turns=tuple(self.turns),
            failure=self.failure,
        )
