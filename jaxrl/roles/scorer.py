"""A frozen model that scores completions: the teacher's first use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Params, head
from jaxrl.runtime.worker import phase
from jaxrl.signals import Projection, completion_hidden, teacher_signal
from jaxrl.types import Rollout, Sequences, TeacherSignal


class Scorer:
    """Runs a frozen model over finished sequences and tells what `distill.signal` asks for."""

    def __init__(
        self, model: DecoderConfig, params: Params, projection: Projection, microbatches: int
    ):
        """
        Args:
            params: in the compute dtype, either layout, on the projection's mesh.
            microbatches: slices in which a batch is scored; the last may be smaller.
        """
        self.model, self.params, self.mesh = model, params, projection.mesh
        self._projection, self._microbatches = projection, microbatches
        self._rows = NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))
        self._score = jax.jit(self._signal, out_shardings=self._rows)

    def score(self, rollout: Rollout) -> TeacherSignal:
        """What the teacher says of each completion position, on its own mesh."""
        n = rollout.sequences.tokens.shape[0]
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        size = -(-n // (self._microbatches * shards)) * shards
        parts = []
        for start in range(0, n, size):
            rows = slice(start, start + size)
            with phase(f"rows {start}-{min(start + size, n)} of {n}"):
                inputs = (rollout.sequences, rollout.student_topk)
                part = jax.tree.map(lambda x, rows=rows: np.asarray(x[rows]), inputs)
                parts.append(self._score(self.params, *jax.device_put(part, self._rows)))
        signal = parts[0]
        if len(parts) > 1:
            signal = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
        return jax.block_until_ready(signal)

    def _signal(self, params: Params, sequences: Sequences, ids: Any) -> TeacherSignal:
        hidden = completion_hidden(self.model, params, sequences, self.mesh)
        return teacher_signal(self._projection, hidden, head(params), sequences, ids)
