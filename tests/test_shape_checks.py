"""The shape annotations of public array functions are checked while the tests run."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jaxrl.losses.correction import NoCorrection, correct
from jaxrl.losses.kl import kl_in_reward
from jaxrl.losses.policy import make_objective, policy_loss

WIDE, MASK, NARROW = jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.zeros(2)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("ref_logprobs", lambda: kl_in_reward(WIDE, NARROW, MASK)),
        ("sampler_logprobs", lambda: correct(NoCorrection(), WIDE, NARROW, MASK)),
        ("old_logprobs", lambda: policy_loss(make_objective("grpo"), WIDE, NARROW, NARROW, MASK)),
    ],
)
def test_one_value_per_sequence_for_one_per_token_is_refused_by_name(argument, call):
    with pytest.raises(TypeCheckError, match=argument):
        call()
