"""Algorithms of a user's own, right and wrong ones."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxrl.losses import divergence
from jaxrl.losses.algorithm_table import ALGORITHMS, AlgorithmSpec, PolicyLoss, SignalSpec
from jaxrl.losses.policy import TermOutput

GRPO = ALGORITHMS["grpo"].loss


@dataclass(frozen=True)
class Jsd:
    """The generalised JSD, written once more."""

    beta: float

    def value(self, student, teacher, total):
        return divergence.generalised_jsd(student, teacher, self.beta, total)

    def gradient(self, student, teacher, centre):
        return divergence.logits_gradient(student, teacher, centre, self.beta)


class Wrong(Jsd):
    def gradient(self, student, teacher, centre):
        return -super().gradient(student, teacher, centre)


def skew_kl(student, teacher, alpha=0.1):
    mixture = jnp.logaddexp(jnp.log(alpha) + teacher, jnp.log1p(-alpha) + student)
    return jnp.exp(teacher) * (teacher - mixture)


def reverse_kl(student, teacher):
    q = jnp.exp(student)
    return jnp.where(q > 0, q * (student - teacher), 0)


def one_parameter(student):
    return student


def summed_kl(student, teacher):
    return reverse_kl(student, teacher).sum(-1)


def mixing_kl(student, teacher):
    return reverse_kl(student - student.max(-1, keepdims=True), teacher)


def on_host(student, teacher):
    return np.asarray(student) - np.asarray(teacher)


def divides(student, teacher):
    return jnp.exp(teacher) / (student - student)


def asks_alpha(student, teacher, alpha):
    return alpha * reverse_kl(student, teacher)


asks_alpha.__name__ = "needs_alpha"
summed_kl.__name__ = "summed"

jsd = AlgorithmSpec("teacher", divergence=Jsd)
skewed = AlgorithmSpec("teacher", divergence=skew_kl, metrics={"reverse": reverse_kl})
reverse = AlgorithmSpec("teacher", divergence=reverse_kl)
one_parameter = AlgorithmSpec("teacher", divergence=one_parameter)
summed = AlgorithmSpec("teacher", divergence=summed_kl)
mixing = AlgorithmSpec("teacher", divergence=mixing_kl)
not_jax = AlgorithmSpec("teacher", divergence=on_host)
not_finite = AlgorithmSpec("teacher", divergence=divides)
needs_alpha = AlgorithmSpec("teacher", divergence=asks_alpha)


class HalfWrong(Wrong):
    def __init__(self):
        super().__init__(0.5)


wrong_gradient = AlgorithmSpec("teacher", divergence=HalfWrong)


def maxrl(rewards, group_ids):
    """(R - mean) / mean in each group; 0 in one without success."""
    _, group = np.unique(group_ids, return_inverse=True)
    mean = (np.bincount(group, rewards) / np.bincount(group))[group]
    return np.where(mean > 0, (rewards - mean) / np.maximum(mean, 1e-9), 0)


def nothing_to_compare(rewards, group_ids):
    _, group = np.unique(group_ids, return_inverse=True)
    with np.errstate(invalid="ignore"):
        return rewards / (np.bincount(group, rewards))[group]


def too_few(rewards, group_ids):
    return rewards[:1]


def raising(rewards, group_ids):
    return {}["length"]


def on_first_token(rewards, group_ids, lengths):
    values = np.zeros((len(rewards), lengths.max()))
    values[:, 0] = rewards
    return values


maximum_likelihood = AlgorithmSpec("rewards", GRPO, advantages=maxrl)
no_advantage = AlgorithmSpec("rewards", GRPO, advantages=nothing_to_compare)
short = AlgorithmSpec("rewards", GRPO, advantages=too_few)
raises = AlgorithmSpec("rewards", GRPO, advantages=raising)
first_tokens = AlgorithmSpec("rewards", GRPO, advantages=on_first_token, token_advantages=True)


def watch(tokens, level, entropy_coef, pull=0.0):
    """r A + entropy_coef H - pull log(pi / reference)."""
    ratio, nowhere = jnp.exp(level(tokens.log_ratio, tokens)), jnp.zeros_like(tokens.mask)
    value = ratio * tokens.advantages + entropy_coef * tokens.entropy
    value -= pull * (tokens.logprobs - tokens.ref_logprobs)
    return TermOutput(value, ratio, nowhere, nowhere)


def surprise(tokens):
    return -tokens.logprobs


def bare(tokens, level):
    return tokens.advantages


watchful = AlgorithmSpec(
    "rewards",
    PolicyLoss("r A + c H - p log(pi / reference)", watch),
    reads_reference=True,
    metrics={"surprise": surprise},
)
bare_term = AlgorithmSpec("rewards", PolicyLoss("A", bare))


def best_token(logprobs, tokens):
    """Its most probable token, and how sure the teacher is."""
    return {"best": jnp.argmax(logprobs, -1).astype(jnp.int32), "sure": jnp.exp(logprobs.max(-1))}


def imitate(logprobs, tokens, sent, floor=0.0):
    chosen = jnp.take_along_axis(logprobs, sent["best"][:, None], -1)[:, 0]
    return -jnp.maximum(sent["sure"], floor) * chosen


BEST = SignalSpec({"best": ("int32", ()), "sure": ("float32", ())}, best_token, imitate)
imitation = AlgorithmSpec("teacher", signal=BEST)
other_shape = AlgorithmSpec(
    "teacher", signal=SignalSpec({"best": ("int32", (2,))}, best_token, imitate)
)
