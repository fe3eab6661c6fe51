"""Access of an algorithm to prompts, samples, completions from the data, and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxrl.algorithms.protocols import (
    Ask,
    RewardRole,
    RolloutRole,
    SamplingRole,
    SamplingTeacherRole,
    role_calls,
)
from jaxrl.config.schema import Config
from jaxrl.data.batch import DATA, data_rollout, make_rollout
from jaxrl.data.stream import REFILL_OFFSET
from jaxrl.process.json_types import Keywords
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.runtime.local import done_future
from jaxrl.runtime.worker import Future, Wait
from jaxrl.types import Completion, Prompt, Rollout


@dataclass(frozen=True)
class Sources:
    """The roles and the data, as an algorithm sees them. Every call returns a future at once."""

    config: Config
    prompts: Callable[[int], Sequence[Prompt]]
    """Batch index -> its prompts; a pure function. As of `PromptStream.batch`, refills included."""
    packing: Mapping[str, int]
    """Arguments of `make_rollout`: widths, pad id, row multiple."""
    call: Ask
    """(role, method, *args, **kwargs) -> the future of the call."""
    wait: Wait
    """future -> its value. Raises `Stopped` if the run was asked to end and does not need the
    call."""
    held_out: Sequence[Prompt] = ()
    """Prompts of the evaluations."""
    decode: Callable[[Sequence[int]], str] = str
    """The text of tokens, for the data's own completions."""
    stored: Callable[[Sequence[Prompt]], list[list[Completion]]] | None = None
    """The teacher's samples of prompts, where `teacher.cache` holds them."""
    early_scores: dict[int, dict[str, Sequence[Future[object]]]] = field(default_factory=dict)
    """Batch index -> role -> scores that were computed while the batch was being sampled (dynamic
    sampling)."""
    evaluated: Sequence[str] = ()
    """Roles beside the rollout whose accuracy is measured, before the first step."""

    def student_samples(self, index: int, attempt: int = 0) -> Future[Rollout]:
        """Samples the completions of batch `index` from the policy; a further attempt samples other
        prompts, with random numbers of its own."""
        prompts = self.prompts(index + attempt * REFILL_OFFSET)
        return self.call("rollout", RolloutRole.generate, prompts, step=index, attempt=attempt)

    def teacher_samples(self, index: int) -> Future[Rollout]:
        prompts = self.prompts(index)
        if self.stored is None:
            return self.call("teacher", SamplingTeacherRole.generate, prompts, step=index)
        prompts = [prompt.to_sample for prompt in prompts]
        return done_future(
            make_rollout(prompts, self.stored(prompts), policy_version=DATA, **self.packing)
        )

    def data_completions(self, index: int) -> Future[Rollout]:
        packed = data_rollout(self.prompts(index), decode=self.decode, **self.packing)
        return done_future(packed)

    def held_out_samples(self, role: str) -> Future[list[list[Completion]]]:
        """Samples completions of the held-out prompts, from the policy (`rollout`) or the
        teacher."""
        return self.call(role, SamplingRole.sample, self.held_out)

    def rewards(self, rollout: Future[Rollout]) -> Future[RewardReport]:
        return self.call("reward", RewardRole.score, rollout)

    def scores(
        self,
        role: str,
        rollout: Future[Rollout],
        others: Mapping[str, Sequence[Future[object]]],
    ) -> Sequence[Future[object]]:
        """Asks a role for its scores of a rollout. Returns a future for each of its parts.

        Args:
            others: scores of the rollout by other roles; those that the role needs are among them.
        """
        calls = role_calls(self.config)[role]
        score: Callable[..., object] = calls.protocol.score
        needed: Keywords = {name: others[of][0] for name, of in calls.needs.items()}
        if calls.parts is None:
            return [self.call(role, score, rollout, **needed)]
        parts = range(calls.parts)
        return [
            self.call(role, score, rollout, part=part, parts=calls.parts, **needed)
            for part in parts
        ]
