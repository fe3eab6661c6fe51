"""The loss of algorithms that learn from rewards: a policy loss plus optional terms.

    policy_weight * policy loss + distill_weight * divergence
        + policy.kl_coef * KL(policy || reference) - policy.entropy_coef * entropy

Each term is divided by its own count over the whole update, of tokens or of sequences depending on
its aggregation. The divergence includes every token that trains; the other terms include the tokens
of `TrainBatch.policy_mask`. All log-probs are at the sampling temperature. `policy.opd_coef` adds
the gap to the teacher to the advantages, and `policy.correction` weights each token's policy loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh

from jaxrl.algorithms.advantages import opd_advantages
from jaxrl.algorithms.signals import Projection, distill_loss, entropy_aware_loss, packed
from jaxrl.config.schema import Config
from jaxrl.losses.correction import (
    Correction,
    NoCorrection,
    TokenTIS,
    correct,
    diagnostics,
    make_correction,
)
from jaxrl.losses.divergence import clamped_gap
from jaxrl.losses.head import logprobs_and_entropy_from_hidden
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
from jaxrl.models.packing import Packing
from jaxrl.process.json_types import Keywords
from jaxrl.types import Frozen, LossParts, SampledSignal, Sums, Totals, TrainBatch


def configured(config: Config) -> Objective:
    """Returns the algorithm's own objective, with the changes that `policy.*` makes to it. Raises
    ValueError."""
    p, loss = config.policy, config.spec.loss
    if loss is None:
        raise ValueError(f"algorithm={config.algorithm} has no policy loss")
    constant = p.constant
    own = p.aggregation is None and loss.aggregation == "sum_over_constant"
    if constant is None and own and loss.constant is None:
        constant = float(config.max_new_tokens)
    objective = make_objective(
        loss,
        ratio=p.ratio,
        aggregation=p.aggregation,
        constant=constant,
        clip_low=p.clip_low,
        clip_high=p.clip_high,
        clip_dual=p.clip_dual,
        ratio_cap=p.ratio_cap,
        tau_positive=p.tau_positive,
        tau_negative=p.tau_negative,
        clip_log=p.clip_log,
    )
    by_turn = config.environment.name is not None and config.environment.credit == "turn"
    for used, what in (
        (p.opd_coef > 0, f"opd_coef={p.opd_coef:g} weighs single tokens"),
        (by_turn, "environment.credit=turn weighs single turns"),
    ):
        if used and objective.ratio == "sequence":
            raise ValueError(
                f"{what}, and the ratio of algorithm={config.algorithm} is one of whole sequences:"
                " take algorithm=gspo_token, or policy.ratio=sequence_token"
            )
    return objective


def configured_correction(config: Config) -> Correction:
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
    """Returns what a reader of the config should know."""
    notes = ratio_notes(configured(config), config.updates_per_batch, config.policy.bypass)
    own = config.spec.minibatches
    if config.actor.minibatches is None and config.minibatches < own:
        notes.insert(
            0,
            f"its paper makes {own} updates of a batch; batch_size={config.batch_size} divides into"
            f" minibatches of whole prompts for {config.minibatches}",
        )
    stated = [f"algorithm={config.algorithm}: {note}" for note in notes]
    if config.policy.correction is None and config.correction != ("none",):
        cap = config.policy.correction_cap or TokenTIS().cap
        stated.append(
            f"schedule={config.schedule}: completions are of older weights, so each token's term is"
            f" multiplied by min(pi_old / mu, {cap:g}) (policy.correction=tis_token;"
            " policy.correction=none leaves it out)"
        )
    return stated


def policy_objective(
    config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int
) -> Callable[..., LossParts]:
    """Returns the function (streams of a micro-batch, hidden [X, m, D], head [V, D], micro-batch,
    frozen arrays, totals) -> as `types.Loss`."""
    objective, correction, p = configured(config), configured_correction(config), config.policy
    projection = Projection.of(config, mesh, vocab_size, model)
    options: Keywords = {
        "softcap": model.final_softcap,
        "temperature": config.sampling.temperature,
        "chunk": config.distill.loss_chunk,
        "mesh": mesh,
    }

    def evaluate(
        packing: Packing,
        hidden: jax.Array,
        kernel: jax.Array,
        batch: TrainBatch,
        frozen: Frozen,
        totals: Totals,
    ) -> LossParts:
        mask, flat = batch.policy_mask, packed(packing, batch)
        values = logprobs_and_entropy_from_hidden(
            hidden, kernel, flat.sequences.tokens, mask=packing.pack(mask), **options
        )
        logprobs, entropy = map(packing.unpack, values)
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
        old, weights = start, None if isinstance(correction, NoCorrection) else corrected.weights
        if p.bypass:
            old = batch.sampler_logprobs
        total, _, metrics = policy_loss(objective, logprobs, old, advantages, mask, weights)
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
        sums = {f"policy/{name}": pair for name, pair in metrics.items()}
        if config.distill_weight > 0:
            total, _, more = distill_loss(projection, hidden, kernel, flat, frozen)
            loss += config.distill_weight * total / totals.tokens
            sums |= {f"distill/{name}": pair for name, pair in by_row(packing, more).items()}
        elif p.opd_coef > 0 and config.distill.entropy_aware:
            total, _, more = entropy_aware_loss(projection, hidden, kernel, flat)
            loss += config.policy_weight * p.opd_coef * total / totals.tokens
            sums |= {f"distill/{name}": pair for name, pair in by_row(packing, more).items()}
        # The actor divides by the sum of the counts, which is totals.tokens.
        pair = (loss * totals.tokens, batch.sequences.loss_mask.sum(dtype=loss.dtype))
        maxima = {f"policy/{name}": value for name, value in corrected.maxima.items()}
        return pair, sums, maxima

    return evaluate


def by_row(packing: Packing, metrics: Sums) -> Sums:
    """Returns the metrics, with those of each token [X, m] summed into those of each row [B]."""

    def added(x: jax.Array) -> jax.Array:
        return packing.unpack(x).sum(-1) if x.ndim else x

    return {name: (added(total), added(count)) for name, (total, count) in metrics.items()}


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


def mean_metrics(
    sums: Mapping[str, tuple[float, float]], maxima: Mapping[str, float]
) -> dict[str, float]:
    """Divides each metric's sum by its count; 0 where the count is 0. The usual `Finish`."""
    metrics = {name: total / count if count else 0.0 for name, (total, count) in sums.items()}
    return metrics | dict(maxima)
