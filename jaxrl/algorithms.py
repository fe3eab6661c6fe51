"""The algorithms: where each one's completions come from, who scores them, what its loss is.

A new algorithm is a new entry of `ALGORITHMS` and a loss; the loop does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.config import Config
from jaxrl.losses.head import logprobs_from_hidden
from jaxrl.masked import masked_count, masked_sum
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Params, cast, head
from jaxrl.roles.actor import Loss
from jaxrl.runtime.worker import Future
from jaxrl.signals import Projection, completion_hidden, completion_tokens, distill_loss
from jaxrl.types import Rollout, TeacherSignal, TrainBatch


class Sources(Protocol):
    """Where an algorithm gets what it learns from; each call returns at once, with a future."""

    config: Config

    def student_samples(self, index: int) -> Future: ...

    def teacher_samples(self, index: int) -> Future: ...

    def data_completions(self, index: int) -> Future: ...

    def teacher_scores(self, rollout: Future) -> Future: ...


@dataclass(frozen=True)
class Algorithm:
    """One way to learn, as the loop needs it."""

    roles: tuple[str, ...]
    """Roles that it cannot do without."""
    samples_policy: Callable[[Config], bool]
    """Whether the rollout role needs every version of the weights."""
    completions: Callable[[Sources, int], Future]
    """(sources, batch index) -> future Rollout."""
    score: Callable[[Sources, Future], Future | None]
    """(sources, future Rollout) -> future TeacherSignal; None where nothing is scored."""
    make_loss: Callable[[Config, DecoderConfig, Mesh, int], Loss]
    """(config, student, actor's mesh, shared vocabulary) -> the loss of a micro-batch."""


def prepare(rollout: Rollout, signal: TeacherSignal | None) -> TrainBatch:
    """What the actor trains on."""
    return TrainBatch(rollout.sequences, signal, rollout.sampler_logprobs)


def on_policy(config: Config, index: int) -> bool:
    """GKD's seeded coin (lambda = `distill.on_policy_fraction`): whether batch `index` is the
    student's.
    """
    coin = np.random.default_rng((config.seed, 0xC017, index)).random()
    return bool(coin < config.distill.on_policy_fraction)


def learns_from_data(config: Config) -> bool:
    """Whether some batch may hold the data's own completions."""
    if config.algorithm == "sft":
        return True
    return config.distill.on_policy_fraction < 1 and not config.distill.seq_kd


def gkd_completions(sources: Sources, index: int) -> Future:
    """Student samples or, by the coin, the teacher's (seq_kd) or the data's completions."""
    if on_policy(sources.config, index):
        return sources.student_samples(index)
    if sources.config.distill.seq_kd:
        return sources.teacher_samples(index)
    return sources.data_completions(index)


def gkd_loss(config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int) -> Loss:
    """Divergence between teacher and student at the completion tokens (GKD, arXiv 2306.13649)."""
    projection = Projection(config.distill, mesh, vocab_size)

    def loss(params: Params, frozen: Mapping[str, Any], batch: TrainBatch) -> Any:
        params, hidden = _hidden(config, model, mesh, params, batch)
        total, count, metrics = distill_loss(projection, hidden, head(params), batch, frozen)
        told = {f"distill/{name}": pair for name, pair in metrics.items()}
        return (total, count), told

    return loss


def sft_loss(config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int) -> Loss:
    """Negative log-likelihood of the completion tokens."""
    chunk = config.distill.chunk_tokens

    def loss(params: Params, frozen: Mapping[str, Any], batch: TrainBatch) -> Any:
        params, hidden = _hidden(config, model, mesh, params, batch)
        tokens, mask = completion_tokens(batch.sequences), batch.sequences.loss_mask
        logprobs = logprobs_from_hidden(hidden, head(params), tokens, chunk=chunk, mesh=mesh)
        total = (-masked_sum(logprobs, mask), masked_count(mask))
        return total, {"sft/loss": total}

    return loss


def _hidden(
    config: Config, model: DecoderConfig, mesh: Mesh, params: Params, batch: TrainBatch
) -> tuple[Params, jax.Array]:
    """The parameters in the compute dtype, and the hidden states [B, C, D] of the completions."""
    params = cast(params, jnp.dtype(config.actor.dtype))
    remat = config.actor.remat
    return params, completion_hidden(model, params, batch.sequences, mesh, remat=remat)


ALGORITHMS: dict[str, Algorithm] = {
    "gkd": Algorithm(
        roles=("actor", "rollout", "teacher"),
        samples_policy=lambda config: config.distill.on_policy_fraction > 0,
        completions=gkd_completions,
        score=lambda sources, rollout: sources.teacher_scores(rollout),
        make_loss=gkd_loss,
    ),
    "sft": Algorithm(
        roles=("actor", "rollout"),
        samples_policy=lambda config: False,
        completions=lambda sources, index: sources.data_completions(index),
        score=lambda sources, rollout: None,
        make_loss=sft_loss,
    ),
}
