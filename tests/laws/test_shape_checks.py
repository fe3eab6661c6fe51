"""The shape annotations of public array functions are checked while the tests run."""

import jax.numpy as jnp
import numpy as np
import pytest
import shape_checks
from jaxtyping import TypeCheckError
from tiny_models import make_mesh, tiny_model

from jaxrl.algorithms.advantages import opd_advantages, standardise_groups
from jaxrl.algorithms.signals import Projection, teacher_signal
from jaxrl.config.settings import DistillConfig
from jaxrl.losses.algorithm_table import ALGORITHMS
from jaxrl.losses.chunked import FrozenInputs, ShardedTerm, Term, VocabShard, loss_values
from jaxrl.losses.correction import correct
from jaxrl.losses.distill import topk_divergence_from_hidden
from jaxrl.losses.divergence import masked_sum, sampled_reverse_kl
from jaxrl.losses.head import logprobs_from_hidden
from jaxrl.losses.policy import kl_in_reward, make_objective, policy_loss, token_mean
from jaxrl.models.decoder import SlotTokens, extend, forward
from jaxrl.types import Sequences

WIDE, MASK, NARROW = jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.zeros(2)
HIDDEN, HEAD = jnp.zeros((2, 3, 4)), jnp.zeros((8, 4))
IDS, OF_IDS, ID = jnp.zeros((2, 3, 5), int), jnp.zeros((2, 3, 5)), jnp.zeros(2, int)
GRPO = ALGORITHMS["grpo"].loss
MODEL, PARAMS = tiny_model("qwen3")


def signal_of_one_state_per_sequence():
    projection = Projection(DistillConfig(), make_mesh(1, 1, 1), vocab_size=8)
    return teacher_signal(projection, WIDE, HEAD, Sequences(IDS[..., 0], MASK, MASK), None)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("mask", lambda: masked_sum(WIDE, MASK[:, 0])),
        ("mask", lambda: token_mean(WIDE, MASK[:, 0])),
        ("ref_logprobs", lambda: kl_in_reward(WIDE, NARROW, MASK)),
        ("sampler_logprobs", lambda: correct(None, WIDE, NARROW, MASK)),
        ("old_logprobs", lambda: policy_loss(make_objective(GRPO), WIDE, NARROW, NARROW, MASK)),
        ("teacher_logprobs", lambda: sampled_reverse_kl(WIDE, NARROW, MASK)),
        (
            "teacher_tail",
            lambda: topk_divergence_from_hidden(HIDDEN, HEAD, IDS, OF_IDS, NARROW, MASK, beta=0),
        ),
        (
            "hidden",
            lambda: loss_values(
                ShardedTerm(Term(), 8, 4), WIDE, HEAD, FrozenInputs(MASK, NARROW, {})
            ),
        ),
        ("ids", lambda: VocabShard(0, 3, 3, False).values_at(WIDE, ID)),
        ("tokens", lambda: logprobs_from_hidden(HIDDEN, HEAD, ID)),
        ("teacher_logprobs", lambda: opd_advantages(NARROW, WIDE, NARROW, MASK)),
        ("ids", lambda: standardise_groups(np.zeros(2), np.zeros((2, 3), int), None)),
        ("hidden", signal_of_one_state_per_sequence),
        ("mask", lambda: forward(MODEL, PARAMS, IDS[..., 0], MASK[:, 0])),
        (
            "starts",
            lambda: extend(MODEL, PARAMS, [], [], SlotTokens(IDS[..., 0], ID, ID), IDS[..., 0]),
        ),
    ],
)
def test_one_value_per_sequence_for_one_per_token_is_refused_by_name(argument, call):
    with pytest.raises(TypeCheckError, match=f"parameter '{argument}'"):
        call()


def test_without_beartype_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "beartype", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[dev\]'"):
        shape_checks.install()
