"""A frozen model that scores completions: the teacher without sampling."""

from __future__ import annotations

from functools import lru_cache

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxrl.algorithms.signals import Projection, score
from jaxrl.data.batch import as_the_teacher_reads
from jaxrl.data.token_alignment import Aligner
from jaxrl.losses.token_spans import Outcomes
from jaxrl.models.config import DecoderConfig
from jaxrl.models.packing import row_devices
from jaxrl.models.parameters import Params
from jaxrl.roles.microbatch import ScoredPart, scored_part
from jaxrl.runtime.worker import phase
from jaxrl.sharding.axes import ROWS
from jaxrl.sharding.ledger import current
from jaxrl.sharding.reshard import put
from jaxrl.types import Array, Rollout, Sequences, TeacherSignal, TokenAlignment


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
        """The teacher's signal for each completion position of a slice of the rows, on its own
        mesh.

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
        """The signal of the rows of a part, without its padding."""
        live = given.live
        placed = put((given.sequences, given.ids, given.alignment), self._rows)
        placed = (*placed, self._outcomes)
        with current().running(self._score, self.params, *placed, live=live):
            return jax.block_until_ready(self._score(self.params, *placed, live=live))


@lru_cache(maxsize=8)  # one program for all scorers of one shape, and for the runs of a process
def score_program(model: DecoderConfig, projection: Projection) -> Wrapped:
    """Jitted: (parameters, sequences, the student's top-k ids or None) -> the teacher's signal, of
    the first `live` rows. Of a teacher with another tokenizer further: the alignment of its
    sequences; the outcomes of the student's and of its own tokens (`losses.token_spans`).
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
