"""The teacher: scores completions and, for seq_kd and for its own accuracy, samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jaxrl.models.parameters import Params
from jaxrl.rewards.scoring import RewardReport
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.scorer import Scorer
from jaxrl.sharding.ledger import current
from jaxrl.types import Completion, Prompt, Rollout, TeacherSignal

AddFeedback = Callable[[Rollout, Sequence[str]], tuple[Rollout, int]]
"""`data.feedback.with_feedback` of a tokenizer and a limit."""


class Teacher:
    """One frozen model with two uses of the same weights."""

    def __init__(
        self,
        scorer: Scorer,
        sampler: Sampler | None,
        offload: bool = False,
        stale_at: Collection[str] = (),
        add_feedback: AddFeedback | None = None,
        respell: Callable[..., Completion] | None = None,
    ):
        """
        Args:
            offload: the weights go to the host while the teacher is not asked.
            stale_at: calls at whose start the weights are freed, since new ones come before they
                are read again.
            add_feedback: makes the teacher's prompts where they are about the completion that is
                scored.
            respell: brings what the teacher samples into the student's tokens.
        """
        self._scorer, self._sampler, self._add_feedback = scorer, sampler, add_feedback
        self._respell = respell
        stages = ("teacher.score", "teacher.generate", "teacher.sample")
        self._write = keep_weights("teacher", scorer, sampler, stages, offload, stale_at)

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        return self._scorer.score(informed(rollout, rewards, self._add_feedback), part, parts)

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        sampler, respell = self._samples(), self._respell
        groups = sampler.completions(prompts, step)
        if respell is not None:
            groups = [[respell(completion) for completion in group] for group in groups]
        return sampler.packed(prompts, groups)

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        return self._samples().sample(prompts)

    def _samples(self) -> Sampler:
        assert self._sampler is not None, "the plan makes a sampler where the teacher samples"
        return self._sampler


def informed(
    rollout: Rollout, rewards: RewardReport | None, add_feedback: AddFeedback | None
) -> Rollout:
    """The rollout with the messages of its rewards in the teacher's prompts, where it gets any."""
    if add_feedback is None:
        return rollout
    assert rewards is not None, "the loop gives them to a teacher that gets feedback"
    return add_feedback(rollout, rewards.messages)[0]


def keep_weights(
    name: str,
    scorer: Scorer,
    sampler: Sampler | None,
    stages: Collection[str],
    offload: bool,
    stale_at: Collection[str] = (),
) -> Callable[[Params | None], None]:
    """Registers the weights of a teacher, which score and sample, in the ledger. Returns what sets
    both to other ones.

    Args:
        stages, offload, stale_at: as of `Ledger.resident`.
    """

    def write(params: Params | None) -> None:
        scorer.params = params
        if sampler is not None:
            sampler.params = params

    current().resident(
        f"{name}.params",
        lambda: scorer.params,
        write,
        stages=stages,
        offload=offload,
        stale_at=stale_at,
    )
    return write
