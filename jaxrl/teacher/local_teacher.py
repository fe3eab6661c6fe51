"""A teacher on devices of the run: a model that scores completions and, for `distill.seq_kd` and
for its own accuracy, samples. Its weights are frozen, or follow the policy's: self-distillation
with the current ones, or with their moving average.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxrl.algorithms.signals import Projection, score
from jaxrl.data.batch import as_the_teacher_reads
from jaxrl.data.token_alignment import Aligner
from jaxrl.losses.token_spans import Outcomes
from jaxrl.models.config import DecoderConfig
from jaxrl.models.packing import row_devices
from jaxrl.models.param_sharding import param_shardings
from jaxrl.models.parameters import Layout, Params, abstract_params
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.roles.actor import SENT_TO_TEACHER
from jaxrl.roles.load_weights import check_fit, described, received
from jaxrl.roles.microbatch import ScoredPart, scored_part
from jaxrl.roles.rollout import Sampler
from jaxrl.runtime.worker import phase
from jaxrl.sharding.axes import ROWS
from jaxrl.sharding.ledger import current
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.sharding.reshard import put
from jaxrl.types import (
    Array,
    Completion,
    Prompt,
    Rollout,
    Sequences,
    TeacherSignal,
    TokenAlignment,
    Weights,
)

AddFeedback = Callable[[Rollout, Sequence[str]], tuple[Rollout, int]]
"""`data.feedback.with_feedback` of a tokenizer and a limit."""


class Scorer:
    """Runs a frozen model over finished sequences and returns the signal `distill.signal`."""

    def __init__(
        self,
        model: DecoderConfig,
        params: Params | None,
        projection: Projection,
        max_prompt_tokens: int = 0,
        aligner: Aligner | None = None,
        max_new_tokens: int = 0,
    ):
        """
        Args:
            params: in the compute dtype, either layout, on the projection's mesh; None where they
                are set later.
            max_prompt_tokens: longest of the prompts that it reads in place of the student's, where
                there are such prompts (`Prompt.teacher_tokens`).
            aligner: of a model with another tokenizer than the student's.
            max_new_tokens: longest completion in its tokens.
        """
        self.model, self.params, self.mesh = model, params, projection.mesh
        self._longest, self._aligner, self._longest_new = max_prompt_tokens, aligner, max_new_tokens
        self._rows = NamedSharding(self.mesh, PartitionSpec(ROWS))
        self._outcomes: Outcomes | None = None
        if aligner is not None:
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            self._outcomes = put(aligner.outcomes, everywhere)
        self._score = score_program(model, projection)

    def score(self, rollout: Rollout, part: int = 0, parts: int = 1) -> TeacherSignal | None:
        """Returns the teacher's signal for each completion position of a slice of the rows, on its
        own mesh.

        Args:
            part, parts: index and number of slices. All slices but the last have the same size,
                which the mesh divides, into whole groups if these share a prompt. If there are few
                rows, the last slices are empty, and the result is None.
        """
        devices = row_devices(self.mesh)
        if self._aligner is None:
            rollout = as_the_teacher_reads(rollout, self._longest, devices.multiple)
        else:
            with phase("aligning tokens"):
                limits = self._longest, self._longest_new
                rollout = self._aligner.read(rollout, *limits, devices.multiple)
        given = scored_part(rollout, part, parts, devices)
        if given is None:
            return None
        with phase(f"rows {given.rows.start}-{given.rows.stop} of {len(rollout.group_ids)}"):
            signal = self.run(given)
            current().nearly_done()
            return signal

    def run(self, given: ScoredPart) -> TeacherSignal:
        """Returns the signal of the rows of a part, without its padding."""
        live = given.live
        placed = put((given.sequences, given.ids, given.alignment), self._rows)
        placed = (*placed, self._outcomes)
        with current().running(self._score, self.params, *placed, live=live):
            return jax.block_until_ready(self._score(self.params, *placed, live=live))


class LocalTeacher:
    """One model with two uses of the same weights: it scores, and samples."""

    def __init__(
        self,
        scorer: Scorer,
        sampler: Sampler | None,
        offload: bool = False,
        *,
        follows: tuple[Layout, str] | None = None,
        add_feedback: AddFeedback | None = None,
        respell: Callable[..., Completion] | None = None,
    ):
        """
        Args:
            offload: the weights go to the host while the teacher is not asked.
            follows: layout and dtype of the weights that the actor sends before each batch that is
                scored, so that batch i is scored with the weights after i batches. The old ones
                are freed at an update, since new ones come before they are read again. None: the
                weights are frozen.
            add_feedback: makes the teacher's prompts where they are about the completion that is
                scored.
            respell: brings what the teacher samples into the student's tokens.
        """
        self._scorer, self._sampler, self._add_feedback = scorer, sampler, add_feedback
        self._respell = respell
        stages = ("teacher.score", "teacher.generate", "teacher.sample")
        stale_at = () if follows is None else ("actor.update",)
        self._write = keep_weights("teacher", scorer, sampler, stages, offload, stale_at)
        if follows is not None:
            layout, dtype = follows
            self._shardings = param_shardings(scorer.model, scorer.mesh, layout)
            self._expected = described(abstract_params(scorer.model, jnp.dtype(dtype), layout))

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """Scores as `Scorer.score` does; `rewards` are for a teacher that gets feedback."""
        return self._scorer.score(informed(rollout, rewards, self._add_feedback), part, parts)

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        """Samples completions of each prompt, to train on."""
        sampler, respell = self._samples(), self._respell
        groups = sampler.completions(prompts, step)
        if respell is not None:
            groups = [[respell(completion) for completion in group] for group in groups]
        return sampler.make_batch(prompts, groups)

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """Samples completions of each prompt, to evaluate."""
        return self._samples().sample(prompts)

    def load(self, weights: Weights) -> dict[str, float]:
        """Takes the next version of weights that follow the policy, once the old one is freed."""
        check_fit(weights, self._expected, "the teacher")
        self._write(None)
        params, taken = received(weights, self._shardings, SENT_TO_TEACHER)
        self._write(params)
        verify_arrays("teacher", params, self._scorer.mesh)
        return taken

    def _samples(self) -> Sampler:
        assert self._sampler is not None, "the plan makes a sampler where the teacher samples"
        return self._sampler


def informed(
    rollout: Rollout, rewards: RewardReport | None, add_feedback: AddFeedback | None
) -> Rollout:
    """Returns the rollout with the messages of its rewards in the teacher's prompts, where it gets
    any."""
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


@lru_cache(maxsize=8)  # one program for all scorers of one shape, and for the runs of a process
def score_program(model: DecoderConfig, projection: Projection) -> Wrapped:
    """Returns the jitted (parameters, sequences, the student's top-k ids or None) -> the teacher's
    signal, of the first `live` rows. Of a teacher with another tokenizer further: the alignment of
    its sequences; the outcomes of the student's and of its own tokens (`losses.token_spans`).
    """

    def score_rows(
        params: Params,
        sequences: Sequences,
        ids: Array,
        alignment: TokenAlignment | None = None,
        outcomes: Outcomes | None = None,
        live: int | None = None,
    ) -> TeacherSignal:
        signal = score(projection, model, params, sequences, ids, alignment, outcomes)
        return jax.tree.map(lambda x: x[:live], signal)

    rows = NamedSharding(projection.mesh, PartitionSpec(ROWS))
    return jax.jit(score_rows, static_argnames="live", out_shardings=rows)
