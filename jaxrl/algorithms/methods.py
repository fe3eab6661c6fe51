"""How the loop runs an algorithm: where completions come from, which roles score them, and what the
actor's loss is.

Algorithms that learn from the same source (a teacher, data or rewards) share a `Method`. Their
differences are in `losses.algorithm_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms.objective import by_row, mean_metrics, policy_metrics, policy_objective
from jaxrl.algorithms.refill import refilled
from jaxrl.algorithms.sampled_batch import prepare_rewarded
from jaxrl.algorithms.signals import (
    Projection,
    completion_hidden,
    distill_loss,
    packed,
    packed_completions,
)
from jaxrl.algorithms.sources import Sources
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.losses.algorithm_table import LearnsFrom
from jaxrl.losses.divergence import masked_sum
from jaxrl.losses.head import logprobs_from_hidden
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import Routed, balance_loss, expert_load, tokens_of_experts
from jaxrl.models.packing import Packing, pack
from jaxrl.models.parameters import Params, head
from jaxrl.process.json_types import Keywords
from jaxrl.runtime.worker import Future
from jaxrl.sharding.split_rows import join_parts
from jaxrl.types import (
    Finish,
    Frozen,
    Loss,
    LossParts,
    Prepare,
    RoleScores,
    Rollout,
    SumCount,
    Sums,
    Totals,
    TrainBatch,
)


@dataclass(frozen=True)
class Method:
    """The functions by which the loop runs an algorithm."""

    samples_policy: Callable[[Config], bool]
    """Whether the rollout samples training batches, so that every version must be published."""
    completions: Callable[[Sources, int], Future[Rollout]]
    """(sources, batch index) -> future Rollout."""
    scorers: Callable[[Config], tuple[str, ...]]
    """Names of the roles that score every rollout."""
    prepare: Callable[[Config], Prepare]
    """config -> the function that makes the actor's training batch from a rollout and its
    scores."""
    make_loss: Callable[[Config, DecoderConfig, Mesh, int], Loss]
    """(config, student, actor's mesh, shared vocabulary) -> the loss of a micro-batch."""
    finish: Finish = mean_metrics
    """Turns the sums and maxima that the loss returned into metrics."""
    reads_completions: Callable[[Config], bool] = lambda config: False
    """Whether a batch may hold completions from the data."""


def method_of(config: Config) -> Method:
    """Returns the `Method` of the configured algorithm. Raises UserError if its type is wrong."""
    own = config.spec.method
    if own is None:
        return METHODS[config.spec.learns_from]
    if not isinstance(own, Method):
        raise UserError(
            f"algorithm={config.algorithm}: method is of type {type(own).__name__}; it must be a"
            " jaxrl.algorithms.methods.Method, or None"
        )
    return own


def sampled_share(config: Config) -> float:
    """Returns the share of the training batches that the rollout is expected to sample."""
    if not method_of(config).samples_policy(config):
        return 0.0
    return 1.0 if config.learns_from_rewards else config.distill.on_policy_fraction


def needed_roles(config: Config) -> tuple[str, ...]:
    """Returns the names of the roles that the run needs."""
    return ("actor", "rollout", *method_of(config).scorers(config))


def _no_scores(config: Config) -> Prepare:
    def prepare(rollout: Rollout, scores: RoleScores) -> tuple[TrainBatch, dict[str, float]]:
        return TrainBatch(rollout.sequences), {}

    return prepare


def _teacher_scores(config: Config) -> Prepare:
    def prepare(rollout: Rollout, scores: RoleScores) -> tuple[TrainBatch, dict[str, float]]:
        signal = join_parts(scores["teacher"])
        sequences = replace(rollout.sequences, experts=rollout.experts)
        return TrainBatch(sequences, signal, rollout.sampler_logprobs), {}

    return prepare


def rewarded_scorers(config: Config) -> tuple[str, ...]:
    """Returns the scoring roles of an algorithm that learns from rewards."""
    asked = {
        "teacher": config.learns_from_teacher,
        "reference": config.needs_reference,
        "reward": True,
        "grouper": config.policy.advantages == "similarity",
    }
    return tuple(role for role, needed in asked.items() if needed)


def on_policy(config: Config, index: int) -> bool:
    """Flips GKD's seeded coin (lambda = `distill.on_policy_fraction`): returns whether batch
    `index` holds the student's samples."""
    coin = np.random.default_rng((config.seed, 0xC017, index)).random()
    return bool(coin < config.distill.on_policy_fraction)


def holds_samples(config: Config, index: int) -> bool:
    """Returns whether batch `index` holds samples, from the policy or the teacher, rather than
    completions of the data."""
    method = method_of(config)
    if not method.reads_completions(config):
        return True
    return method.samples_policy(config) and on_policy(config, index)


def gkd_completions(sources: Sources, index: int) -> Future[Rollout]:
    """Returns the student's samples or, depending on the coin flip, the teacher's samples (seq_kd)
    or the completions of the data."""
    if on_policy(sources.config, index):
        return sources.student_samples(index)
    if sources.config.distill.seq_kd:
        return sources.teacher_samples(index)
    return sources.data_completions(index)


def gkd_loss(config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int) -> Loss:
    """Returns the loss function: the divergence between teacher and student at the completion
    tokens (GKD, arXiv 2306.13649)."""
    projection = Projection.of(config, mesh, vocab_size, model)

    def loss(params: Params, frozen: Frozen, batch: TrainBatch, totals: Totals) -> LossParts:
        packing, hidden, kernel, of_experts = _hidden(config, model, mesh, params, batch, totals)
        flat = packed(packing, batch)
        total, count, metrics = distill_loss(projection, hidden, kernel, flat, frozen)
        sums = {f"distill/{name}": pair for name, pair in by_row(packing, metrics).items()}
        return _balanced(config, (total, count), of_experts, totals), sums | of_experts, {}

    return loss


def sft_loss(config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int) -> Loss:
    """Returns the loss function: the negative log-likelihood of the completion tokens."""
    options: Keywords = {"chunk": config.distill.loss_chunk, "mesh": mesh}
    options["softcap"] = model.final_softcap

    def loss(params: Params, frozen: Frozen, batch: TrainBatch, totals: Totals) -> LossParts:
        packing, hidden, kernel, of_experts = _hidden(config, model, mesh, params, batch, totals)
        completions = packed_completions(packing, batch.sequences)
        tokens, mask = completions.tokens, completions.loss_mask
        logprobs = logprobs_from_hidden(hidden, kernel, tokens, mask=mask, **options)
        total = (-masked_sum(logprobs, mask), mask.astype(jnp.float32).sum())
        return _balanced(config, total, of_experts, totals), {"sft/loss": total} | of_experts, {}

    return loss


def _hidden(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    params: Params,
    batch: TrainBatch,
    totals: Totals,
) -> tuple[Packing, jax.Array, jax.Array, Sums]:
    """Returns the packing, the hidden states [X, m, D] of the completions in it (X streams of m
    scored tokens) and the LM head [V, D], both in the compute dtype; and the metrics of the
    experts, if there are any."""
    packing, hidden, routed = _forward(config, model, mesh, params, batch)
    kernel = head(params).astype(config.actor.dtype)
    if routed is None:
        return packing, hidden, kernel, {}
    # Entropy and load of the routers, as means over tokens and layers; and the loss that balances
    # the experts, the only one of these with a gradient.
    experts, real = model.experts, packing.real
    assert experts is not None
    load = expert_load(experts, routed.ids, real)
    measured = jnp.where(real[None], routed.entropy, 0.0).sum((1, 2)), load * real.sum()
    count = real.sum(dtype=jnp.float32) * len(load)
    names = "policy/experts_entropy", "policy/experts_load"
    kept: Sums = {name: (x.sum(), count) for name, x in zip(names, measured, strict=True)}
    own = tokens_of_experts(experts, routed, packing.copies)
    whole = own if totals.of_experts is None else totals.of_experts
    balance = {BALANCE: (balance_loss(experts, routed, whole) * whole[-1], own[-1])}
    return packing, hidden, kernel, jax.lax.stop_gradient(kept) | balance


def _forward(
    config: Config, model: DecoderConfig, mesh: Mesh, params: Params, batch: TrainBatch
) -> tuple[Packing, jax.Array, Routed | None]:
    """Returns the packing, the hidden states of its completions, and what the routers did."""
    packing = pack(batch.sequences, mesh)
    model = replace(model, reduce_in_float32=config.actor.reduce_dtype == "float32")
    routed: list[Routed] = []
    options: Keywords = {"remat": config.actor.remat, "dtype": jnp.dtype(config.actor.dtype)}
    hidden = completion_hidden(model, params, packing, mesh, routed=routed, **options)
    return packing, hidden, None if model.experts is None else routed[0]


BALANCE = "policy/experts_balance"


def tokens_to_balance(
    config: Config, model: DecoderConfig, mesh: Mesh, params: Params, batch: TrainBatch
) -> jax.Array:
    """Computes `Totals.of_experts` of a micro-batch: a forward pass without the LM head."""
    packing, _, routed = _forward(config, model, mesh, params, batch)
    assert model.experts is not None and routed is not None
    return tokens_of_experts(model.experts, routed, packing.copies)


def _balanced(config: Config, pair: SumCount, of_experts: Sums, totals: Totals) -> SumCount:
    """Adds to the loss of a micro-batch its part of the term that balances experts.

    The actor divides by the tokens of all micro-batches, and the parts add up to the term itself
    (`balance_loss`), because f is that of the whole minibatch: how it is cut changes nothing.
    """
    coef, (total, count) = config.student.router_aux_loss_coef, pair
    if coef == 0:
        return pair
    part, own = of_experts[BALANCE]
    whole = own if totals.of_experts is None else totals.of_experts[-1]
    return total + coef * part / jnp.maximum(whole, 1) * totals.tokens, count


def rewarded_loss(config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int) -> Loss:
    """Returns the loss function: the policy loss, plus the terms to which the config gives a weight
    (KL, entropy, divergence)."""
    objective = policy_objective(config, model, mesh, vocab_size)

    def loss(params: Params, frozen: Frozen, batch: TrainBatch, totals: Totals) -> LossParts:
        packing, hidden, kernel, of_experts = _hidden(config, model, mesh, params, batch, totals)
        pair, sums, maxima = objective(packing, hidden, kernel, batch, frozen, totals)
        return _balanced(config, pair, of_experts, totals), sums | of_experts, maxima

    return loss


def rewarded_completions(sources: Sources, index: int) -> Future[Rollout]:
    """Returns the student's samples. With dynamic_sampling=refill, other prompts replace those
    whose completions all have the same reward; the rewards of the batch are then known early."""
    if sources.config.dynamic_sampling != "refill":
        return sources.student_samples(index)
    rollout, rewards = refilled(sources, index)
    sources.early_scores[index] = {"reward": [rewards]}
    return rollout


METHODS: dict[LearnsFrom, Method] = {
    "teacher": Method(
        samples_policy=lambda config: config.distill.on_policy_fraction > 0,
        completions=gkd_completions,
        scorers=lambda config: ("teacher",),
        prepare=_teacher_scores,
        make_loss=gkd_loss,
        reads_completions=lambda config: (
            config.distill.on_policy_fraction < 1 and not config.distill.seq_kd
        ),
    ),
    "data": Method(
        samples_policy=lambda config: False,
        completions=lambda sources, index: sources.data_completions(index),
        scorers=lambda config: (),
        prepare=_no_scores,
        make_loss=sft_loss,
        reads_completions=lambda config: True,
    ),
    "rewards": Method(
        samples_policy=lambda config: True,
        completions=rewarded_completions,
        scorers=rewarded_scorers,
        prepare=prepare_rewarded,
        make_loss=rewarded_loss,
        finish=policy_metrics,
    ),
}
