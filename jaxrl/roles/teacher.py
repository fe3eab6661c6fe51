"""The teacher: scores completions and, for seq_kd and for its own accuracy, samples. Its weights
are frozen, or follow the policy's: self-distillation with the current ones, or with their moving
average.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import jax.numpy as jnp

from jaxrl.models.parameters import Layout, Params, abstract_params
from jaxrl.models.rules import param_shardings
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.roles.actor import SENT_TO_TEACHER
from jaxrl.roles.arrival import check_fit, described, received
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.scorer import Scorer
from jaxrl.sharding.ledger import current
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.types import Completion, Prompt, Rollout, TeacherSignal, Weights

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
        return sampler.make_batch(prompts, groups)

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        return self._samples().sample(prompts)

    def _samples(self) -> Sampler:
        assert self._sampler is not None, "the plan makes a sampler where the teacher samples"
        return self._sampler


class FollowingTeacher(Teacher):
    """A teacher without weights of its own: the actor publishes a version before each batch that it
    scores, so that batch i is scored with the weights after i batches."""

    def __init__(
        self,
        scorer: Scorer,
        sampler: Sampler | None,
        layout: Layout,
        dtype: str,
        offload: bool,
        add_feedback: AddFeedback | None = None,
    ):
        """
        Args:
            layout, dtype: of the weights that arrive.
        """
        super().__init__(scorer, sampler, offload, ("actor.update",), add_feedback)
        self._shardings = param_shardings(scorer.model, scorer.mesh, layout)
        self._expected = described(abstract_params(scorer.model, jnp.dtype(dtype), layout))

    def load(self, weights: Weights) -> dict[str, float]:
        """Takes the next version, once the old one is freed."""
        check_fit(weights, self._expected, "the teacher")
        self._write(None)
        params, taken = received(weights, self._shardings, SENT_TO_TEACHER)
        self._write(params)
        verify_arrays("teacher", params, self._scorer.mesh)
        return taken


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
