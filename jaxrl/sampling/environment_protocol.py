"""What the engine asks of the other side of an episode (`jaxrl.environments`)."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reply:
    """What follows a turn of the model."""

    tokens: tuple[int, ...] = ()
    """What the model reads next, up to where its next turn begins: the environment's words with the
    chat template's tokens around them. Empty: the episode is over."""
    text: str = ""
    """The environment's words."""
    reward: float | None = None
    """Of the turn that is answered."""
    cut: bool = False
    """The episode ends because it may have no further turn, not because it is over."""
    failure: str | None = None
    """Why there is no answer, as in `types.Completion`: the episode ends without a reward."""


class Partner(Protocol):
    """The environments of one batch of prompts with n samples each."""

    def answer(
        self, prompt: int, sample: int, text: str, *, eos: int | None, length: int
    ) -> Future[Reply]:
        """Submits a turn of an episode; returns at once. Its future raises only what ends the run
        (`UserError`, `RunError`): an environment that fails gives a `Reply.failure`.

        Args:
            prompt: index in the batch.
            text: of the turn, with special tokens, without EOS and stop string.
            eos: its last token, where that is an EOS; None where a stop string ended it.
            length: tokens of the episode so far, this turn included.
        """

    def end(self, prompt: int, sample: int) -> None:
        """Ends an episode, maybe without an answer to its last turn. Called once for each, also
        where generation is aborted."""
