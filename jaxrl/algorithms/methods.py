"""How the loop runs an algorithm: where completions come from, which roles score them, and what the
actor's loss is.

Algorithms that learn from the same source (a teacher, data or rewards) share a `Method`. Their
differences are in `losses.algorithm_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms import signals
from jaxrl.algorithms.advantages import opd_advantages
from jaxrl.algorithms.protocols import Sources
from jaxrl.algorithms.sampled_batch import credits_turns, prepare_rewarded, refill_batch
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.losses.algorithm_table import OWN, TOKENS, LearnsFrom
from jaxrl.losses.chunked import LogitOptions
from jaxrl.losses.correction import CAP, Correction, correct, diagnostics, make_correction
from jaxrl.losses.divergence import clamped_gap, masked_sum
from jaxrl.losses.head import logprobs_and_entropy_from_hidden, logprobs_from_hidden
from jaxrl.losses.policy import (
    Objective,
    entropy_term,
    kl_term,
    make_objective,
    policy_loss,
    ratio_notes,
    token_mean,
    token_metric,
)
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import Routed, balance_loss, expert_load, tokens_of_experts
from jaxrl.models.packing import Packing, pack_streams
from jaxrl.models.parameters import Params, head
from jaxrl.process.json_types import Keywords
from jaxrl.runtime.worker import Future
from jaxrl.sharding.reshard import join_parts
from jaxrl.types import (
    Finish,
    Frozen,
    Loss,
    LossParts,
    Prepare,
    RoleScores,
    Rollout,
    SampledSignal,
    Sums,
    Totals,
    TrainBatch,
)


def mean_metrics(
    sums: Mapping[str, tuple[float, float]], maxima: Mapping[str, float]
) -> dict[str, float]:
    """Divides each metric's sum by its count; 0 where the count is 0. The usual `Finish`."""
    metrics = {name: total / count if count else 0.0 for name, (total, count) in sums.items()}
    return metrics | dict(maxima)


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
    method = config.spec.method
    if method is None:
        return METHODS[config.spec.learns_from]
    if not isinstance(method, Method):
        raise UserError(
            f"algorithm={config.algorithm}: method is of type {type(method).__name__}; it must be a"
            " jaxrl.algorithms.methods.Method, or None"
        )
    return method


def sampled_share(config: Config) -> float:
    """Returns the share of the training batches that the rollout is expected to sample."""
    if not method_of(config).samples_policy(config):
        return 0.0
    return 1.0 if config.learns_from_rewards else config.distill.on_policy_fraction


def needed_roles(config: Config) -> tuple[str, ...]:
    """Returns the names of the roles that the run needs."""
    return ("actor", "rollout", *method_of(config).scorers(config))


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


def is_on_policy(config: Config, index: int) -> bool:
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
    return method.samples_policy(config) and is_on_policy(config, index)


def gkd_completions(sources: Sources, index: int) -> Future[Rollout]:
    """Returns the student's samples or, depending on the coin flip, the teacher's samples (seq_kd)
    or the completions of the data."""
    if is_on_policy(sources.config, index):
        return sources.student_samples(index)
    if sources.config.distill.seq_kd:
        return sources.teacher_samples(index)
    return sources.data_completions(index)


class Policy(NamedTuple):
    """What the policy makes of the completions of a micro-batch, and what its loss may read."""

    packing: Packing
    """The streams of the micro-batch."""
    hidden: jax.Array
    """[X, m, D] in the compute dtype: hidden states of the m scored tokens of X streams."""
    kernel: jax.Array
    """[V, D]: the LM head in the compute dtype."""
    batch: TrainBatch
    flat: TrainBatch
    """What losses of single tokens read of it (`signals.pack_completions`)."""
    frozen: Frozen
    totals: Totals


DIVERGENCES = ("divergence", "reverse_kl_k1")
"""Metrics of single tokens of `signals.distill_loss`: it has one, or of a teacher with another
tokenizer both, of different tokens."""
Terms = Callable[[Policy], LossParts]
BALANCE = "policy/experts_balance"


def loss_of(config: Config, model: DecoderConfig, mesh: Mesh, terms: Terms) -> Loss:
    """Returns the loss of a micro-batch: its terms, on the policy's hidden states, and where the
    model has experts the term that balances them, with metrics of their routers."""
    coef, model = config.student.router_aux_loss_coef, _trained_model(config, model)

    def loss(params: Params, frozen: Frozen, batch: TrainBatch, totals: Totals) -> LossParts:
        packing, hidden, routed = _forward(config, model, mesh, params, batch)
        kernel = head(params).astype(config.actor.dtype)
        flat = signals.pack_completions(packing, batch)
        policy = Policy(packing, hidden, kernel, batch, flat, frozen, totals)
        (total, count), sums, maxima = terms(policy)
        if routed is None:
            return (total, count), sums, maxima
        # Entropy and load of the routers, as means over tokens and layers; and the loss that
        # balances the experts, the only one of these with a gradient.
        experts, real = model.experts, packing.real
        assert experts is not None
        load = expert_load(experts, routed.ids, real)
        measured = jnp.where(real[None], routed.entropy, 0.0).sum((1, 2)), load * real.sum()
        tokens = real.sum(dtype=jnp.float32) * len(load)
        names = "policy/experts_entropy", "policy/experts_load"
        kept: Sums = {name: (x.sum(), tokens) for name, x in zip(names, measured, strict=True)}
        here = tokens_of_experts(experts, routed, packing.copies)
        whole = here if totals.of_experts is None else totals.of_experts
        balance = balance_loss(experts, routed, whole) * whole[-1]
        sums |= jax.lax.stop_gradient(kept) | {BALANCE: (balance, here[-1])}
        if coef != 0:
            # This micro-batch's part of the term. The actor divides by the tokens of all
            # micro-batches, and the parts add up to the term itself (`balance_loss`), because f is
            # that of the whole minibatch: how it is cut changes nothing.
            total = total + coef * balance / jnp.maximum(whole[-1], 1) * totals.tokens
        return (total, count), sums, maxima

    return loss


def gkd_loss(config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int) -> Loss:
    """Returns the loss function: the divergence between teacher and student at the completion
    tokens (GKD, arXiv 2306.13649)."""
    projection = signals.Projection.from_config(config, mesh, vocab_size, model)

    def divergence(policy: Policy) -> LossParts:
        _, hidden, kernel, _, flat, frozen, _ = policy
        total, count, metrics = signals.distill_loss(projection, hidden, kernel, flat, frozen)
        return (total, count), run_names(sum_by_row(policy.packing, metrics), distil=True), {}

    return loss_of(config, model, mesh, divergence)


def sft_loss(config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int) -> Loss:
    """Returns the loss function: the negative log-likelihood of the completion tokens."""
    options: Keywords = {"chunk": config.distill.loss_chunk, "mesh": mesh}
    options["softcap"] = model.final_softcap

    def likelihood(policy: Policy) -> LossParts:
        tokens, mask = policy.flat.sequences.tokens, policy.flat.sequences.loss_mask
        logprobs = logprobs_from_hidden(policy.hidden, policy.kernel, tokens, mask=mask, **options)
        total = (-masked_sum(logprobs, mask), mask.astype(jnp.float32).sum())
        return total, {"sft/loss": total}, {}

    return loss_of(config, model, mesh, likelihood)


def _trained_model(config: Config, model: DecoderConfig) -> DecoderConfig:
    return replace(model, reduce_in_float32=config.actor.reduce_dtype == "float32")


def _forward(
    config: Config, model: DecoderConfig, mesh: Mesh, params: Params, batch: TrainBatch
) -> tuple[Packing, jax.Array, Routed | None]:
    """Returns the packing, the hidden states of its completions, and what the routers did."""
    packing = pack_streams(batch.sequences, mesh)
    routed: list[Routed] = []
    options: Keywords = {"remat": config.actor.remat, "dtype": jnp.dtype(config.actor.dtype)}
    hidden = signals.completion_hidden(model, params, packing, mesh, routed=routed, **options)
    return packing, hidden, None if model.experts is None else routed[0]


InspectTokens = Callable[[Params, Frozen, TrainBatch], dict[str, jax.Array]]


def _logit_options(config: Config, model: DecoderConfig, mesh: Mesh) -> LogitOptions:
    return {
        "softcap": model.final_softcap,
        "temperature": config.sampling.temperature,
        "chunk": config.distill.loss_chunk,
        "mesh": mesh,
    }


def inspect_tokens(
    config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int
) -> InspectTokens:
    """Returns the function that computes the arrays of `TokenValues`, [B, C], of a micro-batch by a
    forward pass. Arguments as in `Method.make_loss`."""
    projection = signals.Projection.from_config(config, mesh, vocab_size, model)
    options = _logit_options(config, model, mesh)

    def values(params: Params, frozen: Frozen, batch: TrainBatch) -> dict[str, jax.Array]:
        packing, hidden, _ = _forward(config, model, mesh, params, batch)
        kernel = head(params).astype(config.actor.dtype)
        flat = signals.pack_completions(packing, batch)
        mask = flat.sequences.loss_mask
        found = logprobs_and_entropy_from_hidden(
            hidden, kernel, flat.sequences.tokens, mask=mask, **options
        )
        values = dict(zip(("logprobs", "entropy"), found, strict=True))
        if batch.teacher is not None:
            _, _, metrics = signals.distill_loss(projection, hidden, kernel, flat, frozen)
            parts = [metrics[name][0] for name in DIVERGENCES if name in metrics]
            values["divergence"] = sum(parts[1:], parts[0])
        return {
            name: jnp.where(batch.sequences.loss_mask, packing.completions.unpack(x), 0)
            for name, x in values.items()
        }

    return values


def tokens_to_balance(
    config: Config, model: DecoderConfig, mesh: Mesh, params: Params, batch: TrainBatch
) -> jax.Array:
    """Computes `Totals.of_experts` of a micro-batch: a forward pass without the LM head."""
    model = _trained_model(config, model)
    packing, _, routed = _forward(config, model, mesh, params, batch)
    assert model.experts is not None and routed is not None
    return tokens_of_experts(model.experts, routed, packing.copies)


def objective_of(config: Config) -> Objective:
    """Returns the algorithm's own objective, with the changes that `policy.*` makes to it. Raises
    ValueError."""
    p, loss = config.policy, config.spec.loss
    if loss is None:
        raise ValueError(f"algorithm={config.algorithm} has no policy loss")
    if loss.constant is None:
        loss = replace(loss, constant=float(config.max_new_tokens))
    objective = make_objective(
        loss,
        ratio=p.ratio,
        aggregation=p.aggregation,
        constant=p.constant,
        clip_low=p.clip_low,
        clip_high=p.clip_high,
        clip_dual=p.clip_dual,
        ratio_cap=p.ratio_cap,
        tau_positive=p.tau_positive,
        tau_negative=p.tau_negative,
        clip_log=p.clip_log,
    )
    for used, what in (
        (p.opd_coef > 0, f"opd_coef={p.opd_coef:g} weighs single tokens"),
        (credits_turns(config), "environment.credit=turn weighs single turns"),
        (config.spec.token_advantages, "its token_advantages weigh single tokens"),
    ):
        if used and objective.ratio == "sequence":
            raise ValueError(
                f"{what}, and the ratio of algorithm={config.algorithm} is one of whole sequences:"
                " take algorithm=gspo_token, or policy.ratio=sequence_token"
            )
    return objective


def correction_of(config: Config) -> Correction | None:
    """Returns the off-policy correction that `policy.correction*` and the schedule describe. Raises
    ValueError."""
    p = config.policy
    return make_correction(
        config.correction,
        cap=p.correction_cap,
        low=p.correction_low,
        high=p.correction_high,
        threshold=p.correction_threshold,
    )


def objective_notes(config: Config) -> list[str]:
    """Lists notes on the objective for who reads the config."""
    parts = config.parts
    updates = config.updates_per_batch // parts
    notes = ratio_notes(objective_of(config), updates, config.policy.bypass, parts)
    usual = config.spec.minibatches
    if config.actor.minibatches is None and config.minibatches < usual:
        notes.insert(
            0,
            f"its paper makes {usual} updates of a batch; batch_size={config.batch_size} divides"
            f" into minibatches of whole prompts for {config.minibatches}",
        )
    stated = [f"algorithm={config.algorithm}: {note}" for note in notes]
    if config.policy.correction is None and config.correction != ("none",):
        cap = config.policy.correction_cap or CAP
        stated.append(
            f"schedule={config.schedule}: completions are of older weights, so each token's term is"
            f" multiplied by min(pi_old / mu, {cap:g}) (policy.correction=tis_token;"
            " policy.correction=none leaves it out)"
        )
    return stated


def policy_objective(config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int) -> Terms:
    """Returns the terms of algorithms that learn from rewards, for `loss_of`:

        policy_weight * policy loss + distill_weight * divergence
            + policy.kl_coef * KL(policy || reference) - policy.entropy_coef * entropy

    Each term is divided by its own count over the whole update, of tokens or of sequences depending
    on its aggregation. The divergence includes every token that trains; the other terms include
    the tokens of `TrainBatch.policy_mask`. All log-probs are at the sampling temperature.
    `policy.opd_coef` adds the gap to the teacher to the advantages, and `policy.correction` weights
    each token's policy loss.
    """
    objective, correction, p = objective_of(config), correction_of(config), config.policy
    own_metrics = config.spec.metrics_asking(TOKENS)
    projection = signals.Projection.from_config(config, mesh, vocab_size, model)
    options = _logit_options(config, model, mesh)

    def evaluate(policy: Policy) -> LossParts:
        packing, hidden, kernel, batch, flat, frozen, totals = policy
        mask = batch.policy_mask
        values = logprobs_and_entropy_from_hidden(
            hidden, kernel, flat.sequences.tokens, mask=packing.completions.pack(mask), **options
        )
        logprobs, entropy = map(packing.completions.unpack, values)
        start = jax.lax.stop_gradient(logprobs)
        if batch.old_logprobs is not None:
            start = batch.old_logprobs
        corrected = correct(correction, start, batch.sampler_logprobs, mask)
        advantages, opd = batch.advantages, Sums()
        if p.opd_coef > 0:
            assert isinstance(batch.teacher, SampledSignal)
            gap = (start, batch.teacher.token_logprobs, mask)
            advantages = opd_advantages(advantages, *gap, coef=p.opd_coef)
            opd = {"opd_clamped": token_metric(clamped_gap(*gap)[1], mask)}
        old, weights = start, None if correction is None else corrected.weights
        if p.bypass:
            old = batch.sampler_logprobs
        seen: Keywords = {"entropy": entropy, "ref_logprobs": batch.ref_logprobs}
        total, _, metrics = policy_loss(
            objective, logprobs, old, advantages, mask, weights, own_metrics=own_metrics, **seen
        )
        metrics |= corrected.sums | opd | {"entropy": token_metric(entropy, mask)}
        # A micro-batch's share of the mean that the aggregation stands for.
        by_token = objective.aggregation is token_mean
        terms = totals.policy_tokens if by_token else totals.policy_sequences
        loss = config.policy_weight * (total / terms)
        if p.kl_coef > 0:
            total, _, more = kl_term(
                logprobs,
                batch.ref_logprobs,
                mask,
                estimator=p.kl_estimator,
                aggregation=objective.aggregation,
            )
            loss += p.kl_coef * (total / terms)
            metrics |= more
        if p.entropy_coef > 0:
            total, _ = entropy_term(entropy, mask, aggregation=objective.aggregation)
            loss += p.entropy_coef * (total / terms)
        sums = run_names(metrics)
        if config.distill_weight > 0:
            total, _, more = signals.distill_loss(projection, hidden, kernel, flat, frozen)
            loss += config.distill_weight * total / totals.tokens
            sums |= run_names(sum_by_row(packing, more), distil=True)
        elif p.opd_coef > 0 and config.distill.entropy_aware:
            total, _, more = signals.entropy_aware_loss(projection, hidden, kernel, flat)
            loss += config.policy_weight * p.opd_coef * total / totals.tokens
            sums |= run_names(sum_by_row(packing, more), distil=True)
        # The actor divides by the sum of the counts, which is totals.tokens.
        pair = (loss * totals.tokens, batch.sequences.loss_mask.sum(dtype=loss.dtype))
        maxima = {f"policy/{name}": value for name, value in corrected.maxima.items()}
        return pair, sums, maxima

    return evaluate


def sum_by_row(packing: Packing, metrics: Sums) -> Sums:
    """Returns the metrics, with those of each token [X, m] summed into those of each row [B]."""
    rows: Sums = {}
    for name, (total, count) in metrics.items():
        if total.ndim:
            total, count = (packing.completions.unpack(x).sum(-1) for x in (total, count))
        rows[name] = total, count
    return rows


def run_names(metrics: Sums, *, distil: bool = False) -> Sums:
    """Returns metrics by their names in a run; those of an algorithm's own have them already."""
    own = f"{OWN}/"
    named = {k: f"distill/{k}" if distil else f"policy/{k}" for k in metrics}
    return {k if k.startswith(own) else named[k]: pair for k, pair in metrics.items()}


def policy_metrics(
    sums: Mapping[str, tuple[float, float]], maxima: Mapping[str, float]
) -> dict[str, float]:
    """Returns the metrics of a batch; computes the gap between learner and sampler from its
    sums."""
    plain = {name.removeprefix("policy/"): pair for name, pair in sums.items()}
    gap = {k: pair for k, pair in plain.items() if k.startswith(("mismatch_", "correction_"))}
    rest = {k: pair for k, pair in sums.items() if k.removeprefix("policy/") not in gap}
    largest = {name.removeprefix("policy/"): value for name, value in maxima.items()}
    reported = {f"policy/{name}": value for name, value in diagnostics(gap, largest).items()}
    return mean_metrics(rest, {}) | reported


def rewarded_completions(sources: Sources, index: int) -> Future[Rollout]:
    """Returns the student's samples. With dynamic_sampling=refill, other prompts replace those
    whose completions all have the same reward; the rewards of the batch are then known early."""
    if not sources.refills:
        return sources.student_samples(index)
    rollout, rewards = refill_batch(sources, index)
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
        prepare=lambda config: lambda rollout, scores: (TrainBatch(rollout.sequences), {}),
        make_loss=sft_loss,
        reads_completions=lambda config: True,
    ),
    "rewards": Method(
        samples_policy=lambda config: True,
        completions=rewarded_completions,
        scorers=rewarded_scorers,
        prepare=prepare_rewarded,
        make_loss=lambda config, model, mesh, vocab_size: loss_of(
            config, model, mesh, policy_objective(config, model, mesh, vocab_size)
        ),
        finish=policy_metrics,
    ),
}
