"""Off-policy correction: the learner's policy at the start of a batch against the one that sampled.

mu is the policy that sampled (older weights, or the same weights in another program), pi_old the
learner's at the start of the batch, pi_theta the one in training; rho = pi_old / mu, r = pi_theta /
pi_old. Two ways to train on mu's samples:

- decoupled: `policy_loss(..., old_logprobs, ..., weights)`, rho * min(r A, clip(r) A), with the
  weights of a `Correction`: fixed, and applied after the clip.
- bypass: `policy_loss(..., sampler_logprobs, ...)`, pi_old := mu, **without** weights: the ratio
  holds rho already.

Where mu was truncated (top-p, top-k, min-p) it is 0 on a part of pi_old's support, and no weight
repairs that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxrl.errors import unknown
from jaxrl.losses import policy
from jaxrl.types import Array, Sums

Correction = Callable[[Array, Array], Array]
"""(log rho [B, T] in nats, 0 where masked; mask [B, T]) -> weights [B, T]."""
CAP = 2.0
"""Where `policy.correction_cap` is not set."""


def tis_token(log_rho: Array, mask: Array, cap: float = CAP) -> Array:
    """Returns min(rho_t, cap): truncated importance sampling of each token."""
    return jnp.minimum(policy.finite_exp(log_rho), cap)


def tis_sequence(log_rho: Array, mask: Array, cap: float = CAP) -> Array:
    """Returns min(prod_t rho_t, cap) at every token of a sequence.

    The ratio of the sequences' probabilities, exact up to the cap. Its spread grows with length:
    for thousands of tokens, `tis_token` or `sequence_geo_mask` keep more of the batch.
    """
    whole = jnp.where(mask, log_rho, 0).sum(-1)
    return jnp.broadcast_to(jnp.minimum(policy.finite_exp(whole), cap)[:, None], log_rho.shape)


def icepop(log_rho: Array, mask: Array, low: float = 0.5, high: float = 5.0) -> Array:
    """Returns rho_t where low <= rho_t <= high, else 0: tokens that disagree do not train."""
    rho = policy.finite_exp(log_rho)
    return jnp.where((rho >= low) & (rho <= high), rho, 0)


def sequence_mask(log_rho: Array, mask: Array, cap: float = CAP) -> Array:
    """Returns prod_t rho_t at every token of a sequence where that is <= cap, else 0.

    `tis_sequence` that leaves out what it would truncate. A product over a long sequence is rarely
    near 1: `sequence_geo_mask` judges sequences of any length alike.
    """
    whole = jnp.where(mask, log_rho, 0).sum(-1)
    weight = jnp.where(whole <= jnp.log(cap), policy.finite_exp(whole), 0)
    return jnp.broadcast_to(weight[:, None], log_rho.shape)


def sequence_geo_mask(log_rho: Array, mask: Array, threshold: float = 0.1) -> Array:
    """Returns 1 where |mean_t log rho_t| <= threshold (nats a token), else 0, for whole sequences.

    The *mean* log-ratio decides: a sum grows with length and would drop the long sequences.
    """
    agrees = jnp.abs(policy.mean_over_tokens(log_rho, mask)) <= threshold
    return jnp.broadcast_to(agrees[:, None].astype(log_rho.dtype), log_rho.shape)


CORRECTIONS: Mapping[str, Callable[..., Array] | None] = {
    "none": None,
    "tis_token": tis_token,
    "tis_sequence": tis_sequence,
    "icepop": icepop,
    "sequence_mask": sequence_mask,
    "sequence_geo_mask": sequence_geo_mask,
}
MASKS = ("sequence_geo_mask",)
"""Those whose weight is 1 or 0: they may stand beside one of the others."""
POSITIVE = math.ulp(0.0), math.inf, "above 0"
ONE_TRAINS = "so that rho = 1 trains"
LIMITS: Mapping[str, Mapping[str, tuple[float, float, str]]] = {
    "none": {},
    "tis_token": {"cap": POSITIVE},
    "tis_sequence": {"cap": POSITIVE},
    "icepop": {
        "low": (0, 1, f"0 to 1, {ONE_TRAINS}"),
        "high": (1, math.inf, f"1 or above, {ONE_TRAINS}"),
    },
    "sequence_mask": {"cap": (1, math.inf, f"1 or above, {ONE_TRAINS}")},
    "sequence_geo_mask": {"threshold": (0, math.inf, "0 or above, nats a token")},
}
"""The settings of each: least, most, and both in words."""


def make_correction(names: str | Sequence[str], **settings: float | None) -> Correction | None:
    """Returns a correction by its name, or the product of one with a mask by their names; None for
    the name none.

    A setting of None keeps its default; one that none of them has is refused.
    """
    chosen = (names,) if isinstance(names, str) else tuple(names)
    for name in chosen:
        if name not in CORRECTIONS:
            raise unknown("off-policy correction", name, CORRECTIONS)
    if not chosen:
        raise ValueError("no off-policy correction is named: none is the name of leaving it out")
    if len([name for name in chosen if name not in MASKS]) > 1 or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"the off-policy corrections {' and '.join(chosen)} would correct twice: use one of"
            f" them, and optionally {' or '.join(MASKS)}"
        )
    stated = {key: value for key, value in settings.items() if value is not None}
    every = [key for name in chosen for key in LIMITS[name]]
    for key in stated:
        if key not in every:
            has = f"it has {' and '.join(every)}" if every else "it has none"
            raise ValueError(
                f"{key} is no setting of off-policy correction {' and '.join(chosen)}: {has}"
            )
    parts: list[Correction] = []
    for name in chosen:
        options = {key: stated[key] for key in LIMITS[name] if key in stated}
        for key, value in options.items():
            least, most, words = LIMITS[name][key]
            if not least <= value <= most:
                raise ValueError(
                    f"{key} of the off-policy correction is {value}; it must be {words}"
                )
        weights = CORRECTIONS[name]
        if weights is not None:
            parts.append(partial(weights, **options))
    if not parts:
        return None

    def product(log_rho: Array, mask: Array) -> Array:
        return math.prod(part(log_rho, mask) for part in parts)

    return product


class Corrected(NamedTuple):
    """Weights of a batch or micro-batch, and what to know about its mismatch."""

    weights: Float[Array, "B T"]
    """For `policy_loss`; no gradient; 0 where masked."""
    sums: Sums
    """Add them up over micro-batches."""
    maxima: dict[str, Float[Array, ""]]
    """Take the larger one over micro-batches."""


def correct(
    correction: Correction | None,
    old_logprobs: Float[Array, "B T"],
    sampler_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Corrected:
    """Computes the weights of tokens that mu sampled, and the mismatch between pi_old and mu.

    A token or sequence of weight 0 still counts in the loss's count: what is left is not scaled up.

    Args:
        correction: None: all weights are 1.
        old_logprobs, sampler_logprobs: nats, of the sampled tokens under pi_old and mu.

    Returns:
        Sums, all over tokens: mismatch_k3 (nats, estimate of KL(mu || pi_old)), mismatch_rho and
        mismatch_rho_squared (for chi2 and ESS), correction_weight, correction_dropped (weight 0).
        Maxima: mismatch_max_log_ratio (nats). `diagnostics` makes the figures of a batch of them.
    """
    mask = jnp.asarray(mask).astype(bool)
    old, sampler = (
        jax.lax.stop_gradient(policy.masked_values(x, mask))
        for x in (old_logprobs, sampler_logprobs)
    )
    gap = old - sampler
    log_rho = jnp.clip(gap, -policy.MAX_LOG_RATIO, policy.MAX_LOG_RATIO)
    rho = policy.finite_exp(log_rho)
    weights = jnp.ones_like(log_rho) if correction is None else correction(log_rho, mask)
    weights = jnp.where(mask, weights, 0)
    sums = {
        "mismatch_k3": policy.token_metric(
            policy.kl_estimates(jnp.zeros_like(log_rho), log_rho)["k3"], mask
        ),
        "mismatch_rho": policy.token_metric(rho, mask),
        "mismatch_rho_squared": policy.token_metric(jnp.square(rho), mask),
        "correction_weight": policy.token_metric(weights, mask),
        "correction_dropped": policy.token_metric(weights == 0, mask),
    }
    return Corrected(weights, sums, {"mismatch_max_log_ratio": jnp.abs(gap).max(initial=0)})


def diagnostics(sums: Sums, maxima: Mapping[str, Array]) -> dict[str, float]:
    """Returns the figures of a batch, from the added `sums` and the larger `maxima` of its parts.

    chi2 = E_mu[rho^2] - 1; ess = (sum rho)^2 / (n sum rho^2), the fraction of the n tokens that
    the batch is worth: 1 on-policy.
    """
    means = {name: float(total) / max(float(count), 1.0) for name, (total, count) in sums.items()}
    rho, squared = means.pop("mismatch_rho"), means.pop("mismatch_rho_squared")
    return {
        **means,
        "mismatch_chi2": squared - 1 if squared else 0.0,
        "mismatch_ess": rho**2 / squared if squared else 1.0,
        **{name: float(np.asarray(value)) for name, value in maxima.items()},
    }
