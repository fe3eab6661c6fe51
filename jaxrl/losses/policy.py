"""Policy losses from the log-probs of sampled tokens: the clipped, capped and soft families; and
the KL and entropy terms that go with them.

An `Objective` is three choices that do not depend on each other:

- the ratio pi_theta / pi_old: of each token, of the sequence, or GSPO-token's (`RATIOS`),
- the term that is maximised: `Clipped`, `Capped` (CISPO), `Soft` (SAPO), `LogClipped` (GMPO),
- the aggregation of tokens and sequences (`AGGREGATIONS`): how the terms of single tokens become a
  sum and a count, to be divided once. Micro-batches add up sums and counts; the caller divides by
  the global count. A row with no trained token adds 0 to both. The KL and entropy terms use the
  aggregation of their policy loss.

`algorithm_table.ALGORITHMS` has those of the papers by the names of their parts. r is the ratio, A
the advantage, d = logprobs - old_logprobs the log-ratio; log-probs are of the sampled tokens, in
nats. Masked positions may hold anything, NaN and -inf included. Gradients flow to `logprobs` only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrl.errors import unknown
from jaxrl.losses.algorithm_table import OWN, TERM, PolicyLoss, parameters_of
from jaxrl.losses.divergence import MAX_GAP, MIN, LossSums
from jaxrl.process.plugin import BoundFunction, bind_arguments
from jaxrl.types import Array, Sums

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within +-20 nats before they are exponentiated: e^20 is 5e8, and float32
overflows at e^88."""

RARE_CLIP = 0.05
"""A sequence ratio moves by about 1e-3 in an update: a clip range of this or more never acts."""


SumCount = tuple[Float[Array, ""], Float[Array, ""]]
Aggregation = Callable[[Array, Array], SumCount]
"""(values [B, T], mask [B, T]) -> (sum, count)."""


def masked_values(x: Array, mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns `x` where the mask holds, else 0, in float32 or wider.

    Finite also where x is -inf. Selecting before any arithmetic is what keeps gradients finite: 0
    times the derivative of something infinite would be NaN.
    """
    x = jnp.asarray(x)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.maximum(jnp.where(mask, x, 0), MIN)


def token_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> SumCount:
    """Sums over all tokens; counts tokens. Long sequences weigh more."""
    return jnp.where(mask, values, 0).sum(), mask.astype(values.dtype).sum()


def sequence_mean_token_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> SumCount:
    """Sums over sequences the mean over their tokens; counts sequences."""
    return mean_over_tokens(values, mask).sum(), mask.any(-1).astype(values.dtype).sum()


@dataclass(frozen=True)
class SumOverConstant:
    """Sum over all tokens / constant; counts sequences: sum over tokens / (constant * sequences).

    The constant is the same for all sequences, whatever their lengths, so that a token weighs the
    same in a short one and in a long one. It divides the sum, not the count: so micro-batches add
    up. With 1 it is the mean over sequences of the sum over tokens.
    """

    constant: float = 1.0
    """Tokens; usually the longest completion allowed."""

    def __post_init__(self) -> None:
        if not self.constant > 0:
            raise ValueError(
                f"constant is {self.constant}; it divides a sum over tokens and must be above 0 "
                "(usually max_new_tokens)"
            )

    def __call__(self, values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> SumCount:
        total, _ = token_mean(values, mask)
        return total / self.constant, mask.any(-1).astype(values.dtype).sum()


AGGREGATIONS: Mapping[str, Aggregation] = {
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "token_mean": token_mean,
    "sum_over_constant": SumOverConstant(),
}


def mean_over_tokens(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Returns the mean of each row over its kept tokens; 0 for a row that has none."""
    return jnp.where(mask, x, 0).sum(-1) / jnp.maximum(mask.sum(-1), 1)


def token_metric(x: Array, mask: Bool[Array, "B T"]) -> SumCount:
    """Returns (sum, tokens) of a value that carries no gradient."""
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    return jnp.where(mask, x, 0).sum(), mask.astype(x.dtype).sum()


class Tokens(NamedTuple):
    """What a term sees; masked positions hold 0."""

    logprobs: Float[Array, "B T"]
    log_ratio: Float[Array, "B T"]
    """d, nats."""
    advantages: Float[Array, "B T"]
    mask: Bool[Array, "B T"]
    entropy: Float[Array, "B T"] | None = None
    """Of the policy in training at each position, nats, at the sampling temperature; its gradient
    flows. None: the caller of `policy_loss` has none."""
    ref_logprobs: Float[Array, "B T"] | None = None
    """Under the reference, nats, no gradient. None unless the algorithm reads it
    (`AlgorithmSpec.reads_reference`) or `policy.kl_coef` is above 0."""


class TermOutput(NamedTuple):
    """The value of a term at every token, and what became of the ratio there."""

    value: Float[Array, "B T"]
    """To be maximised."""
    ratio: Float[Array, "B T"]
    below: Bool[Array, "B T"]
    """True where the lower bound replaced the ratio (A < 0), so that it has no gradient."""
    above: Bool[Array, "B T"]
    """True where the upper bound replaced the ratio: in `Clipped` and `LogClipped` where A > 0 (or,
    by `clip_dual`, A < 0), without a gradient; in `Capped` for any A, whose gradient is that of
    log pi."""


Level = Callable[[Float[Array, "B T"], Tokens], Float[Array, "B T"]]
"""(log-ratio of each token, tokens) -> log-ratio at some level, at every token."""
PolicyTerm = Callable[[Tokens, Level], TermOutput]
"""What is maximised at each token: `Clipped`, `Capped`, `Soft`, `LogClipped` or the user's own."""


def _token_level(log_ratio: Array, tokens: Tokens) -> Array:
    """Returns log r_t = d_t, where r_t = pi(y_t) / pi_old(y_t)."""
    return log_ratio


def _sequence_level(log_ratio: Array, tokens: Tokens) -> Array:
    """Returns log s = mean_t d_t, the same at every token (GSPO, arXiv 2507.18071)."""
    mean = mean_over_tokens(log_ratio, tokens.mask)
    return jnp.broadcast_to(mean[:, None], log_ratio.shape)


def _sequence_token_level(log_ratio: Array, tokens: Tokens) -> Array:
    """Returns log s_t, where s_t = sg(s) pi_t / sg(pi_t): the value of log s with the gradient of
    the token's log-prob (GSPO-token)."""
    fixed = jax.lax.stop_gradient(_sequence_level(log_ratio, tokens))
    return fixed + tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs)


RATIOS: Mapping[str, Level] = {
    "token": _token_level,
    "sequence": _sequence_level,
    "sequence_token": _sequence_token_level,
}


def finite_exp(log_ratio: Array) -> Array:
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


@dataclass(frozen=True)
class Clipped:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO's, GRPO's, GSPO's.

    With `clip_dual` c, where A < 0 it is max(of that, c A) (dual clip, arXiv 1912.09729): without
    it a token that has become much likelier, r = 400, has a term of 400 A.
    """

    clip_low: float
    clip_high: float
    clip_dual: float | None = None
    """Where A < 0, r counts as no more than this."""

    def __post_init__(self) -> None:
        low, high, dual = self.clip_low, self.clip_high, self.clip_dual
        _check(0 <= low <= 1, "clip_low", low, "0 to 1: ratios are kept above 1 - clip_low")
        _check(high >= 0, "clip_high", high, "at least 0: ratios are kept below 1 + clip_high")
        if dual is not None:
            _check(dual > 1, "clip_dual", dual, "above 1: it bounds the ratio itself; 3 is usual")

    def __call__(self, tokens: Tokens, level: Level) -> TermOutput:
        ratio = finite_exp(level(tokens.log_ratio, tokens))
        below = (tokens.advantages < 0) & (ratio < 1 - self.clip_low)
        above = (tokens.advantages > 0) & (ratio > 1 + self.clip_high)
        clipped = jnp.where(below, 1 - self.clip_low, jnp.where(above, 1 + self.clip_high, ratio))
        if self.clip_dual is not None:
            far = (tokens.advantages < 0) & (ratio > self.clip_dual)
            clipped, above = jnp.where(far, self.clip_dual, clipped), above | far
        return TermOutput(clipped * tokens.advantages, ratio, below, above)


@dataclass(frozen=True)
class Capped:
    """sg(min(r, ratio_cap)) A log pi: no token loses its gradient (CISPO, arXiv 2506.13585)."""

    ratio_cap: float
    """Absolute: a bound of r itself, not of r - 1."""

    def __post_init__(self) -> None:
        cap = self.ratio_cap
        _check(cap > 0, "ratio_cap", cap, "above 0: it bounds the ratio itself; 5 is usual")

    def __call__(self, tokens: Tokens, level: Level) -> TermOutput:
        ratio = finite_exp(level(tokens.log_ratio, tokens))
        above = ratio > self.ratio_cap
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, self.ratio_cap))
        value = weight * tokens.advantages * tokens.logprobs
        return TermOutput(value, ratio, jnp.zeros_like(above), above)


@dataclass(frozen=True)
class Soft:
    """sigmoid(tau (r - 1)) (4 / tau) A: the gradient fades on both sides (SAPO, 2511.20347).

    At r = 1 its gradient is A grad log pi, whatever tau; its value there is 2 A / tau.
    """

    tau_positive: float
    """Where A > 0."""
    tau_negative: float
    """Elsewhere."""

    def __post_init__(self) -> None:
        _check(self.tau_positive > 0, "tau_positive", self.tau_positive, "above 0: 1 is usual")
        _check(self.tau_negative > 0, "tau_negative", self.tau_negative, "above 0: 1.05 is usual")

    def __call__(self, tokens: Tokens, level: Level) -> TermOutput:
        ratio = finite_exp(level(tokens.log_ratio, tokens))
        tau = jnp.where(tokens.advantages > 0, self.tau_positive, self.tau_negative)
        value = jax.nn.sigmoid(tau * (ratio - 1)) * (4 / tau) * tokens.advantages
        nowhere = jnp.zeros_like(tokens.mask)
        return TermOutput(value, ratio, nowhere, nowhere)


@dataclass(frozen=True)
class LogClipped:
    """A exp(level(d')), with d' = min(d, clip_log) where A > 0, max(d, -clip_log) where A < 0.

    Every token's log-ratio is clipped on the one side that its advantage pushes it to, *before* the
    level averages: at level "sequence" this is GMPO (arXiv 2507.20673), a geometric mean.
    """

    clip_log: float
    """Nats."""

    def __post_init__(self) -> None:
        _check(self.clip_log >= 0, "clip_log", self.clip_log, "at least 0: nats; 0.4 is usual")

    def __call__(self, tokens: Tokens, level: Level) -> TermOutput:
        below = (tokens.advantages < 0) & (tokens.log_ratio < -self.clip_log)
        above = (tokens.advantages > 0) & (tokens.log_ratio > self.clip_log)
        clipped = jnp.where(above, self.clip_log, tokens.log_ratio)
        ratio = finite_exp(level(jnp.where(below, -self.clip_log, clipped), tokens))
        return TermOutput(ratio * tokens.advantages, ratio, below, above)


def _check(allowed: bool, name: str, value: float, limit: str) -> None:
    if not allowed:
        raise ValueError(f"{name} is {value}; it must be {limit}")


@dataclass(frozen=True)
class Objective:
    """What a policy update maximises."""

    term: PolicyTerm
    ratio: str
    """A name of `RATIOS`."""
    aggregation: Aggregation

    def __post_init__(self) -> None:
        if self.ratio not in RATIOS:
            raise unknown("ratio level", self.ratio, RATIOS)


TERMS: Mapping[str, Callable[..., PolicyTerm]] = {
    "clipped": Clipped,
    "capped": Capped,
    "soft": Soft,
    "log_clipped": LogClipped,
}


def make_objective(
    loss: PolicyLoss,
    *,
    ratio: str | None = None,
    aggregation: str | None = None,
    constant: float | None = None,
    **settings: float | None,
) -> Objective:
    """Returns the objective of a policy loss, with some of its choices changed; None keeps the
    loss's own choice.

    Args:
        ratio: a name of `RATIOS`.
        aggregation: a name of `AGGREGATIONS`.
        constant: of the aggregation `sum_over_constant`, tokens; usually the longest completion
            allowed. None: that of the loss, or 1 where it has none either.
        settings: settings of the loss's term: clip_low, clip_high and clip_dual, or ratio_cap, or
            tau_positive and tau_negative, or clip_log.
    """
    if isinstance(loss.term, str) and loss.term not in TERMS:
        raise unknown("term of a policy loss", loss.term, TERMS)
    changes = {key: value for key, value in settings.items() if value is not None}
    make = TERMS[loss.term] if isinstance(loss.term, str) else loss.term
    known = [name for name in inspect.signature(make).parameters if name not in TERM]
    for key in changes:
        if key not in known:
            raise ValueError(
                f"{key} is no setting of this policy loss: it has {' and '.join(known) or 'none'}"
            )
    name = loss.aggregation if aggregation is None else aggregation
    if name not in AGGREGATIONS:
        raise unknown("aggregation", name, AGGREGATIONS)
    chosen = AGGREGATIONS[name]
    if constant is not None and not isinstance(chosen, SumOverConstant):
        raise ValueError(
            f"constant={constant:g} divides the sum of aggregation sum_over_constant only: "
            "set aggregation=sum_over_constant, or leave constant out"
        )
    if isinstance(chosen, SumOverConstant):
        divisor = constant if constant is not None else loss.constant
        chosen = SumOverConstant(1.0 if divisor is None else divisor)
    level = loss.ratio if ratio is None else ratio
    settings = dict(loss.settings) | changes
    if isinstance(loss.term, str):
        return Objective(make(**settings), level, chosen)
    is_term = not inspect.isclass(make) and {*TERM} <= parameters_of(make)
    own = bind_arguments(make, "term", TERM if is_term else (), TERM, settings, set())
    if not is_term:
        own = BoundFunction(own(), "term")
    return Objective(own.run, level, chosen)


def ratio_notes(
    objective: Objective, updates_per_batch: int, bypass: bool, parts: int = 1
) -> list[str]:
    """Returns the reasons why the ratio, or a clip of it, would have no effect in a run.

    Args:
        parts: how many parts of a batch are trained with so many updates of their own.
        bypass: the ratio is to the policy that sampled, and not to the one before the batch.
    """
    if bypass:
        return []
    if updates_per_batch == 1:
        note = (
            "one update per batch: every ratio pi_theta / pi_old is 1, no clip or cap acts on it,"
            " and losses that differ in these alone have the same gradient, unless a correction"
            " weighs tokens; "
        )
        if parts > 1:
            note = note.replace("batch", "minibatch, which is trained as soon as it is sampled", 1)
            return [f"{note}policy.bypass=true has the ratio to the policy that sampled"]
        more = "actor.minibatches or actor.epochs_per_batch above 1 make more updates of a batch"
        return [note + more]
    term = objective.term
    if objective.ratio == "token" or not isinstance(term, Clipped):
        return []
    if max(term.clip_low, term.clip_high) < RARE_CLIP:
        return []
    return [
        f"clip_low={term.clip_low:g} clip_high={term.clip_high:g}: a ratio of whole sequences is a"
        " geometric mean and stays within about 1e-3 of 1, so the clip never acts; 3e-4 and 4e-4"
        " are usual"
    ]


def policy_loss(
    objective: Objective,
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B"] | Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    weights: Float[Array, " B"] | Float[Array, "B T"] | None = None,
    *,
    entropy: Float[Array, "B T"] | None = None,
    ref_logprobs: Float[Array, "B T"] | None = None,
    own_metrics: Mapping[str, BoundFunction] = MappingProxyType({}),
) -> LossSums:
    """Computes -(term of the objective), aggregated: (sum, count, metrics); the caller divides
    once.

    Args:
        logprobs: under the policy in training.
        old_logprobs: under pi_old: the policy at the start of the batch, or with `policy.bypass`
            the policy that sampled them.
        advantages: one for each sequence; one for each token only where the ratio is not the
            sequence's (GSPO-token is GSPO for that).
        mask: True at the tokens that train.
        weights: of an off-policy correction (`correction`); multiply the term after its clip.
        entropy, ref_logprobs: for terms that read them (`Tokens`).
        own_metrics: name -> function of `tokens`, whose mean over the tokens is one more metric.

    Returns:
        (sum, count, metrics). Each metric is a pair (sum, count), whose quotient is: ratio, the
        mean ratio at the objective's level; clip_fraction, the fraction of clipped tokens (also
        clip_low_fraction and clip_high_fraction); clip_fraction_sequences, that of sequences with a
        clipped token; old_kl_k3, the estimate of KL(pi_old || pi_theta) in nats per token.
    """
    mask = jnp.asarray(mask).astype(bool)
    if objective.ratio == "sequence" and jnp.ndim(advantages) == 2:
        raise ValueError(
            "advantages have one value per token, and the ratio is one of whole sequences: use "
            "gspo_token (ratio level sequence_token), or one advantage per sequence"
        )
    logprobs = masked_values(logprobs, mask)
    old_logprobs = jax.lax.stop_gradient(masked_values(old_logprobs, mask))
    advantages = jnp.asarray(advantages)
    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
    advantages = jax.lax.stop_gradient(masked_values(advantages, mask))
    more = [None if x is None else masked_values(x, mask) for x in (entropy, ref_logprobs)]
    entropy, ref_logprobs = more[0], jax.lax.stop_gradient(more[1])
    log_ratio = logprobs - old_logprobs
    tokens = Tokens(logprobs, log_ratio, advantages, mask, entropy, ref_logprobs)
    terms = objective.term(tokens, RATIOS[objective.ratio])
    value = terms.value
    if weights is not None:
        weights = jnp.asarray(weights)
        if weights.ndim == 1:
            weights = jnp.broadcast_to(weights[:, None], mask.shape)
        value = value * jax.lax.stop_gradient(masked_values(weights, mask))
    total, count = objective.aggregation(-value, mask)
    clipped = (terms.below | terms.above) & mask
    sequences = (clipped.any(-1).astype(jnp.float32).sum(), mask.any(-1).astype(jnp.float32).sum())
    # r - 1 - log r, whose expectation under pi_old is KL(pi_old || pi_theta).
    d = jnp.clip(tokens.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics: Sums = {
        "ratio": token_metric(terms.ratio, mask),
        "clip_fraction": token_metric(clipped, mask),
        "clip_low_fraction": token_metric(terms.below, mask),
        "clip_high_fraction": token_metric(terms.above, mask),
        "clip_fraction_sequences": sequences,
        "old_kl_k3": token_metric(jnp.expm1(d) - d, mask),
    }
    fixed = jax.lax.stop_gradient(tokens)
    for name, function in own_metrics.items():
        found = function(tokens=fixed)
        if jnp.shape(found) != mask.shape:
            raise function.wrong(
                f"returns an array of shape {jnp.shape(found)}: it must return a value of each"
                f" token, {mask.shape}"
            )
        metrics[f"{OWN}/{name}"] = token_metric(found, mask)
    return total, count, metrics


def entropy_term(
    entropy: Float[Array, "B T"], mask: Bool[Array, "B T"], *, aggregation: Aggregation
) -> SumCount:
    """Computes -H, aggregated as in the policy loss, of the policy's entropy at each position, in
    nats: times a coefficient above 0, a bonus for entropy."""
    mask = jnp.asarray(mask).astype(bool)
    return aggregation(-masked_values(entropy, mask), mask)


def kl_estimates(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> dict[str, Float[Array, "*shape"]]:
    """Returns the estimates of KL(policy || reference) from sampled tokens (Schulman 2020).

    With d = logprobs - ref_logprobs: k1 = d, unbiased, signed; k2 = d^2 / 2, biased, never
    negative; k3 = exp(-d) + d - 1, unbiased, never negative. Their gradients differ from their
    values: on-policy, the expected gradient of k1 is zero (use it in a reward, never as a loss),
    that of k2 is the gradient of KL(policy || reference), that of k3 the gradient of
    KL(reference || policy).
    """
    d = logprobs - ref_logprobs
    return {"k1": d, "k2": jnp.square(d) / 2, "k3": jnp.expm1(-d) + d}


def kl_term(
    logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    estimator: str,
    aggregation: Aggregation,
) -> LossSums:
    """Computes a KL to the reference, to be minimised alongside a policy loss, with d kept within
    +-20 nats.

    Args:
        logprobs: beyond +-20 nats there is no gradient.
        estimator: k2 or k3.
        aggregation: the policy loss's own.

    Returns:
        (sum, count, metrics kl_k1, kl_k2, kl_k3: nats a token).
    """
    if estimator == "k1":
        raise ValueError(
            "k1 as a loss has no expected gradient on-policy: use k2 or k3, or k1 in the reward"
        )
    if estimator not in ("k2", "k3"):
        raise unknown("KL estimator", estimator, ("k2", "k3"))
    mask = jnp.asarray(mask).astype(bool)
    d = masked_values(logprobs, mask) - jax.lax.stop_gradient(masked_values(ref_logprobs, mask))
    d = jnp.clip(d, -MAX_GAP, MAX_GAP)  # so that exp(-d) stays finite
    values = kl_estimates(d, jnp.zeros_like(d))
    total, count = aggregation(values[estimator], mask)
    return total, count, {f"kl_{name}": token_metric(x, mask) for name, x in values.items()}


def kl_in_reward(
    logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    estimator: str = "k1",
) -> Float[Array, "B T"]:
    """Computes the KL penalty of each token, before its coefficient; 0 where masked.

    Its sum over a row is the penalty of a sequence, to be taken off the reward before the group
    statistics; times a coefficient and taken off an advantage it acts token by token. No gradient.

    Args:
        logprobs: under the policy that sampled or the one at the start of the batch.
    """
    mask = jnp.asarray(mask).astype(bool)
    d = jnp.clip(
        masked_values(logprobs, mask) - masked_values(ref_logprobs, mask), -MAX_GAP, MAX_GAP
    )
    estimates = kl_estimates(d, jnp.zeros_like(d))
    if estimator not in estimates:
        raise unknown("KL estimator", estimator, estimates)
    return jax.lax.stop_gradient(estimates[estimator])
