"""The reference: a frozen copy of the policy before training, which scores completions with their
log-probs."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxrl.algorithms.signals import completion_logprobs
from jaxrl.config.schema import Config
from jaxrl.formats.finite import broken_rows, not_finite
from jaxrl.models.config import DecoderConfig
from jaxrl.models.packing import row_devices
from jaxrl.models.parameters import Params
from jaxrl.process.json_types import Keywords
from jaxrl.roles.actor import shared_base
from jaxrl.roles.declared import Program, Resident
from jaxrl.roles.microbatch import scored_part
from jaxrl.roles.run_shapes import RunArrays
from jaxrl.runtime.worker import phase
from jaxrl.sharding.axes import ROWS
from jaxrl.sharding.ledger import current
from jaxrl.sharding.reshard import put, to_host
from jaxrl.types import Array, Rollout, Sequences


class Reference:
    """A frozen copy of the policy."""

    def __init__(self, config: Config, model: DecoderConfig, params: Params, mesh: Mesh):
        """Takes parameters in the compute dtype, stacked, on `mesh`; with `offload.frozen` they go
        to the host while the reference is not asked."""
        self.params, self._devices = params, row_devices(mesh)
        self._model, self._mesh = model, mesh
        for resident in reference_residents(config):
            resident.keep(self)
        self._rows = NamedSharding(mesh, PartitionSpec(ROWS))
        temperature, chunk = config.sampling.temperature, config.distill.loss_chunk
        self._score = reference_program(model, mesh, temperature, chunk)

    def score(self, rollout: Rollout, part: int = 0, parts: int = 1) -> np.ndarray | None:
        """Computes the log-probs [rows, C], float32 nats, of the completion tokens of some rows;
        returns None if there are none.

        Args:
            part, parts: which of how many slices of rows.
        """
        scored = scored_part(rollout, part, parts, self._devices)
        if scored is None:
            return None
        with phase(f"rows {scored.rows.start}-{scored.rows.stop} of {len(rollout.group_ids)}"):
            sequences = put(scored.sequences, self._rows)
            with current().running(self._score, self.params, sequences):
                logprobs = to_host(self._score(self.params, sequences))
            if (wrong := broken_rows(logprobs[: scored.live])).any():
                row = int(np.argmax(wrong))
                what = f"the reference's log-probs of row {scored.rows.start + row}"
                tokens = scored.tokens_of(row)
                raise not_finite(what, self.params, self._model, tokens, self._mesh)
            current().prefetch_next()
            return logprobs[: scored.live]


def reference_program(model: DecoderConfig, mesh: Mesh, temperature: float, chunk: int) -> Wrapped:
    """Returns the jitted program (parameters, sequences) -> [B, C] float32 log-probs, whole on
    every device."""
    options: Keywords = {"temperature": temperature, "chunk": chunk}
    everywhere = NamedSharding(mesh, PartitionSpec())

    def reference_logprobs(params: Params, sequences: Sequences) -> Array:
        return completion_logprobs(model, params, sequences, mesh, **options)

    return jax.jit(reference_logprobs, out_shardings=everywhere)


def reference_residents(config: Config) -> tuple[Resident, ...]:
    """Returns the arrays that the reference keeps: below adapters that begin at zero, the base."""

    def weights(run: RunArrays) -> Params:
        params = run.params("reference", run.shapes.reference, layout="stacked")
        return {"merged": params} if run.shapes.inputs.adapted else params

    shares = shared_base(config, config.reference.compute_dtype) if config.trains_adapters else ""
    options: Keywords = {"offload": config.offload.frozen, "shares": shares}
    stages = ("reference.score",)
    return (Resident("reference.params", "parameters", weights, stages, "params", **options),)


def reference_programs(run: RunArrays) -> Iterator[Program]:
    """Yields the log-probs of a part of the batch."""
    c, model, role = run.config, run.shapes.reference, "reference"
    temperature, chunk = c.sampling.temperature, c.distill.loss_chunk
    jitted = reference_program(model, run.meshes[role], temperature, chunk)
    parts = c.slices(role)
    rows = run.scored(role, parts)
    given = (run.params(role, model), run.sequences(role, *rows))
    yield Program(role, "score", jitted, given, "reference.score", calls=parts)
