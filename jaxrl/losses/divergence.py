"""Divergences between a teacher P and a student Q whose logits are at hand: the plain formulas.

`losses/distill.py` computes the same from hidden states without ever holding [B, T, V]; it takes
its formulas from here. Every function works in float32 nats, divides both logit sets by
`temperature` (no T^2 factor), and clamps no divergence at 0: a clamp would kill the gradient of the
tokens that rounding puts just below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Shaped

from jaxrl.process.plugin import BoundFunction
from jaxrl.types import Array, Sums

LossSums = tuple[Float[Array, ""], Float[Array, ""], Sums]
"""(sum to minimise, count, metrics)."""

MIN = -1e30
"""Log-prob or logit of the impossible: finite, so that 0 * MIN is 0 and no NaN arises."""
MAX_GAP = 20.0
"""Nats: most that a difference of two log-probs of a sampled token, or of a span of tokens,
counts in a loss, an advantage or a penalty. It keeps a single one, impossible for the teacher, from
being the whole gradient of a batch."""


@dataclass(frozen=True)
class EntropyAware:
    """coef * 1[H(P) >= threshold] * KL(P || Q) over the teacher's top_k (arXiv 2603.07079).

    The top_k tokens keep the teacher's own probabilities (no renormalisation) and everything else
    is one more outcome, the tail, on both sides: so the term is 0, and stationary, at Q = P.
    """

    coef: float = 1.0
    threshold: float = 0.8
    """Nats."""
    top_k: int = 16


def masked_sum(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Sums `x` where `mask`, float32."""
    return jnp.where(mask, x, 0).astype(jnp.float32).sum()


def _logs_over_mixture(student: Array, teacher: Array, beta: float) -> tuple[Array, Array]:
    """Returns (log Q - log M, log P - log M).

    log M = logaddexp(log1p(-beta) + log Q, log(beta) + log P), taken out of both differences by
    hand: log Q and log P are near -12 for most tokens, where their own rounding is 1e-6.
    """
    gap = teacher - student + (math.log(beta) - math.log1p(-beta))
    # softplus has its own derivative; max(gap, 0) + log1p(exp(-|gap|)) differentiates wrongly where
    # gap rounds to 0.
    over_student = -math.log1p(-beta) - jax.nn.softplus(gap)
    return over_student, -math.log(beta) - jax.nn.softplus(-gap)


def generalised_jsd(
    student: Float[Array, "*rows V"],
    teacher: Float[Array, "*rows V"],
    beta: float,
    total: Callable[[Array], Array] = lambda x: x.sum(-1),
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Computes D = beta KL(P||M) + (1-beta) KL(Q||M) with M = beta P + (1-beta) Q.

    Generalised JSD, arXiv 2306.13649 (GKD), Eq. 1.
    beta = 0 is *defined* as KL(P||Q) and beta = 1 as KL(Q||P). The formula itself goes to 0 at both
    ends (only D / beta -> KL(P||Q)), so the scale of the loss jumps there.

    Args:
        student, teacher: log-probs, nats, not below `MIN`.
        beta: weight of the teacher in the mixture; static.
        total: sums over the last dim (and over the devices that share it).

    Returns:
        D, nats, and the `centre` that `logits_gradient` needs.

    Raises:
        ValueError: beta outside [0, 1].
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(
            f"beta is {beta}; it must lie in [0, 1]: 0 is KL(teacher || student), "
            "1 is KL(student || teacher)"
        )
    p, q = jnp.exp(teacher), jnp.exp(student)
    # An outcome of probability 0 adds 0, whatever the logarithm there.
    if beta == 0:
        return total(jnp.where(p > 0, p * (teacher - student), 0)), total(p)
    if beta == 1:
        reverse = total(jnp.where(q > 0, q * (student - teacher), 0))
        return reverse, reverse
    q_over_m, p_over_m = _logs_over_mixture(student, teacher, beta)
    centre = total(jnp.where(q > 0, q * q_over_m, 0))
    return beta * total(jnp.where(p > 0, p * p_over_m, 0)) + (1 - beta) * centre, centre


def logits_gradient(
    student: Float[Array, "*rows V"],
    teacher: Float[Array, "*rows V"],
    centre: Float[Array, "*rows"],
    beta: float,
) -> Float[Array, "*rows V"]:
    """Computes dD / dz of `generalised_jsd`, where the student's log-probs are the log-softmax of
    z.

    (1-beta) Q (log(Q/M) - KL(Q||M)); Q sum(P) - P at beta = 0; Q (log(Q/P) - KL(Q||P)) at beta = 1.
    """
    q, centre = jnp.exp(student), centre[..., None]
    if beta == 0:
        return q * centre - jnp.exp(teacher)
    if beta == 1:
        return q * (student - teacher - centre)
    q_over_m, _ = _logs_over_mixture(student, teacher, beta)
    return (1 - beta) * q * (q_over_m - centre)


@runtime_checkable
class Divergence(Protocol):
    """A divergence of a student from a teacher, of log-probs in nats, not below `MIN`. Hashable.

    The outcomes may be spread over devices, and the gradient may be asked for some of them at a
    time: what is known of all of them is computed by `total`, and passed on.
    """

    def value(
        self, student: Array, teacher: Array, total: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        """Computes D, nats, and what `gradient` needs of it, each [*rows].

        Args:
            student, teacher: [*rows, V].
            total: sums over V.
        """
        ...

    def gradient(self, student: Array, teacher: Array, centre: Array) -> Array:
        """Computes dD / dz [*rows, V], where the student's log-probs are the log-softmax of z."""
        ...


@dataclass(frozen=True)
class GeneralisedJsd:
    """`generalised_jsd` as a `Divergence`."""

    beta: float

    def value(
        self, student: Array, teacher: Array, total: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        return generalised_jsd(student, teacher, self.beta, total)

    def gradient(self, student: Array, teacher: Array, centre: Array) -> Array:
        return logits_gradient(student, teacher, centre, self.beta)


@dataclass(frozen=True)
class SummedDivergence:
    """D = sum over outcomes of f(log Q, log P), of a function f that is differentiated.

    Where both are impossible an outcome adds 0.
    """

    summands: BoundFunction
    """(student, teacher), each [*rows, V] -> [*rows, V]; an outcome's depends on itself alone."""

    def value(
        self, student: Array, teacher: Array, total: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        summands, slope = self._differentiated(student, teacher)
        return total(summands), total(slope)

    def gradient(self, student: Array, teacher: Array, centre: Array) -> Array:
        """Computes f' - Q sum f', f' being the derivative in log Q."""
        _, slope = self._differentiated(student, teacher)
        return slope - jnp.exp(student) * centre[..., None]

    def _differentiated(self, student: Array, teacher: Array) -> tuple[Array, Array]:
        def summands(student: Array) -> Array:
            return self.summands(student=student, teacher=teacher)

        values, pull = jax.vjp(summands, student)
        if values.shape != student.shape:
            raise self.summands.wrong(
                f"returns an array of shape {values.shape} for log-probs of shape {student.shape}:"
                " it must return what each token of the vocabulary adds, which jaxrl sums up"
            )
        possible = (jnp.exp(student) > 0) | (jnp.exp(teacher) > 0)
        slope = pull(jnp.ones_like(values))[0]
        return jnp.where(possible, values, 0), jnp.where(possible, slope, 0)


def make_divergence(own: BoundFunction) -> Divergence:
    """Returns the divergence of a user's function or class (`AlgorithmSpec.divergence`).

    Raises:
        UserError: a class makes what is no `Divergence`.
    """
    if not isinstance(own.call, type):
        return SummedDivergence(own)
    made = own()
    if not isinstance(made, Divergence):
        raise own.wrong(
            "must have the methods value(student, teacher, total) and gradient(student, teacher,"
            " centre), as losses.divergence.Divergence has them"
        )
    return made


def clamped_gap(
    logprobs: Float[Array, "B T"], teacher_logprobs: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Returns clamp(log Q - log P, +-20), nats, and where it is clamped; 0 and False where masked.
    No gradient. A token beyond the teacher's vocabulary, or one that a served teacher reports as
    impossible, has a gap of thousands of nats or more."""
    gap = jax.lax.stop_gradient(jnp.where(mask, logprobs - teacher_logprobs, 0))
    return jnp.clip(gap, -MAX_GAP, MAX_GAP), jnp.abs(gap) > MAX_GAP


def sampled_reverse_kl(
    student_logprobs: Float[Array, "B T"],
    teacher_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    sampler_logprobs: Float[Array, "B T"] | None = None,
    ratio_cap: float = 2.0,
    baseline: Float[Array, "B T"] | float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""], Sums]:
    """Estimates KL(student || teacher) from the sampled tokens: the teacher's log-prob as an
    advantage.

    The gradient of a token is w (log Q - log P) grad log Q with w = sg(min(Q / mu, ratio_cap)), mu
    being the sampler, and the difference within +-20 nats (`clamped_gap`). On-policy w = 1, and its
    expectation is the gradient of the reverse KL of that position. The value is w (log Q - log P),
    an estimate of the same KL (k1, importance-weighted). Unbiased only when the tokens were sampled
    without truncation and at temperature 1, while no difference is clamped, and while no ratio
    reaches the cap, which trades bias for variance (truncated importance sampling).

    Args:
        student_logprobs: nats, of the sampled tokens; the gradient flows here.
        teacher_logprobs: nats, of the same tokens.
        sampler_logprobs: nats, under the policy that sampled; None: on-policy.
        ratio_cap: above 0.
        baseline: nats, taken from the difference in the gradient, not in the value.

    Returns:
        The sum, the number of tokens, and the metrics reverse_kl_k1, whose sum and count are [B,
        T], ratio_capped and gap_clamped.
    """
    if ratio_cap <= 0:
        raise ValueError(f"ratio_cap is {ratio_cap}; it must be above 0 (2 is usual)")
    fixed = jax.lax.stop_gradient(student_logprobs)
    sampler = fixed if sampler_logprobs is None else jax.lax.stop_gradient(sampler_logprobs)
    ratio = jnp.exp(jnp.where(mask, fixed - sampler, 0))
    weight = jnp.minimum(ratio, ratio_cap)
    gap, clamped = clamped_gap(student_logprobs, teacher_logprobs, mask)
    # log Q - sg(log Q) is 0 with the gradient of log Q: the value stays the estimate itself.
    surrogate = weight * (gap + (gap - baseline) * (student_logprobs - fixed))
    count = mask.astype(jnp.float32).sum()
    metrics = {
        "reverse_kl_k1": (gap, mask.astype(count.dtype)),
        "ratio_capped": (masked_sum((ratio > ratio_cap).astype(jnp.float32), mask), count),
        "gap_clamped": (clamped.astype(jnp.float32).sum(), count),
    }
    return masked_sum(surrogate, mask), count, metrics
