"""Frequencies of rotary positions against transformers' functions, and what depends on a length."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_requests import sample_groups
from tiny_models import REFERENCES, model_of_layers, tiny_config

from jaxrl.errors import UserError
from jaxrl.models import decoder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers import rope_angles
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.sampler import SamplingParams

ROPES: list[dict[str, Any]] = json.loads((REFERENCES / "ropes.json").read_text())


@pytest.mark.parametrize("case", ROPES, ids=lambda c: f"{c['name']} {c['length']}")
def test_frequencies_are_those_of_transformers(case: dict[str, Any]) -> None:
    """Whether the length is known beforehand or found in the program; and after our writing."""
    config = DecoderConfig.from_hf(case["config"])
    assert DecoderConfig.from_hf(json.loads(json.dumps(config.to_hf("float32")))) == config
    rope, half = config.rope_scaling, len(case["frequencies"])
    assert rope is not None
    np.testing.assert_allclose(rope.attention_factor, case["attention_factor"], rtol=1e-6)
    for length in (case["length"], jnp.array(case["length"])):
        powers = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        found = rope.scaled(powers, config.rope_theta, length)
        np.testing.assert_allclose(found, case["frequencies"], rtol=2e-6)

    positions = jnp.array([[0, 5, case["length"] - 1]])
    angle = np.array([[0, 5, case["length"] - 1]])[..., None] * np.array(case["frequencies"])
    for one in (config, config.for_length(case["length"])):
        cos, sin = rope_angles(one, positions, *one.kinds)
        np.testing.assert_allclose(
            cos[:, :, 0], np.cos(angle) * case["attention_factor"], atol=1e-4
        )
        np.testing.assert_allclose(
            sin[:, :, 0], np.sin(angle) * case["attention_factor"], atol=1e-4
        )


def test_lengths_of_extended_models_are_those_that_they_were_extended_to() -> None:
    positions = {c["name"]: DecoderConfig.from_hf(c["config"]).max_positions for c in ROPES}
    assert positions == {
        "linear": 256,
        "llama3": 256,
        "dynamic": 512,  # twice what it states
        "yarn": 256,
        "yarn_mscale": 256,
        "yarn_factor": 256,
        "longrope": 256,
        "longrope_factor": 256,
    }


def test_only_what_depends_on_a_length_keeps_one() -> None:
    for case in ROPES:
        config = DecoderConfig.from_hf(case["config"])
        depends = case["name"] in ("dynamic", "longrope", "longrope_factor")
        assert (config.for_length(99) != config) == config.depends_on_length == depends


def test_lengths_are_the_same_where_all_frequencies_are() -> None:
    for case in ROPES:
        config = DecoderConfig.from_hf(case["config"])
        rope, powers = config.rope_scaling, jnp.linspace(1.0, 0.1, len(case["frequencies"]))
        assert rope is not None
        lengths = [1, *(64 * i + more for i in (1, 2, 4, 8) for more in (-1, 0, 1))]
        found = {n: np.asarray(rope.scaled(powers, config.rope_theta, n)) for n in lengths}
        for one, other in itertools.product(lengths, lengths):
            same = np.array_equal(found[one], found[other])
            assert config.same_for_length(one, other) == same, (case["name"], one, other)


def test_a_model_of_one_length_samples_what_it_scores() -> None:
    """Prompts shorter than the original context, completions that reach beyond it: the engine's
    log-probs are those of a whole pass, and without a length in common they are not."""
    config, params = model_of_layers("phi3_longrope", (0,), layout="unstacked")
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    engine = Engine(config, None, slots=2, max_prompt_tokens=4, max_new_tokens=20)
    assert engine.config == config.for_length(24)
    sampling = SamplingParams(max_new_tokens=20)
    found = sample_groups(engine, params, prompts, sampling=sampling)

    @partial(jax.jit, static_argnums=0)
    def whole_pass(config: DecoderConfig, params: Any, tokens: Any) -> jax.Array:
        hidden = decoder.forward(config, params, tokens, jnp.ones_like(tokens, bool))
        return jax.nn.log_softmax(decoder.token_logits(config, params, hidden), -1)

    for prompt, (completion,) in zip(prompts, found, strict=True):
        tokens = np.array([[*prompt, *completion.tokens]], np.int32)
        for one, same in ((engine.config, True), (config.for_length(16), False)):
            logprobs = np.asarray(whole_pass(one, params, tokens))[0, :-1]
            scored = logprobs[np.arange(tokens.shape[1] - 1), tokens[0, 1:]][len(prompt) - 1 :]
            assert np.allclose(scored, completion.logprobs, atol=1e-4) == same


def test_factors_must_fit_the_rotated_dims() -> None:
    config = tiny_config("phi3_longrope")
    assert config.rope_scaling is not None
    with pytest.raises(UserError, match="5 factors of longrope for 6 pairs of rotated dims"):
        replace(config, rope_scaling=replace(config.rope_scaling, long_factors=(1.0,) * 5))
