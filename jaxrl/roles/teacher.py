"""The teacher: scores completions and, for seq_kd and for its own accuracy, samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jaxrl.models.decoder import Params
from jaxrl.rewards.scoring import RewardReport
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.scorer import Scorer
from jaxrl.sharding.ledger import current
from jaxrl.types import Completion, Prompt, Rollout, TeacherSignal

Tell = Callable[[Rollout, Sequence[str]], tuple[Rollout, int]]
"""`data.feedback.with_feedback` of a tokenizer and a limit."""


class Teacher:
    """One frozen model with two uses of the same weights."""

    def __init__(
        self,
        scorer: Scorer,
        sampler: Sampler | None,
        offload: bool = False,
        stale_at: Collection[str] = (),
        tell: Tell | None = None,
    ):
        """
        Args:
            offload: the weights go to the host while the teacher is not asked.
            stale_at: calls at whose start the weights are freed, since new ones come before they
                are read again.
            tell: makes the teacher's prompts where they are about the completion that is scored.
        """
        self._scorer, self._sampler, self._tell = scorer, sampler, tell

        current().resident(
            "teacher.params",
            lambda: scorer.params,
            self._write,
            stages=("teacher.score", "teacher.generate", "teacher.sample"),
            offload=offload,
            stale_at=stale_at,
        )

    def _write(self, params: Params | None) -> None:
        self._scorer.params = params
        if self._sampler is not None:
            self._sampler.params = params

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        if self._tell is not None:
            assert rewards is not None, "the loop gives them to a teacher that gets feedback"
            rollout, _ = self._tell(rollout, rewards.messages)
        return self._scorer.score(rollout, part, parts)

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        return self._samples().generate(prompts, step)

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        return self._samples().sample(prompts)

    def _samples(self) -> Sampler:
        assert self._sampler is not None, "the plan makes a sampler where the teacher samples"
        return self._sampler
