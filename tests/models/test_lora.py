"""Laws of adapters of low rank in the decoder."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from cases import and_slow
from large_models import SMOLLM2
from prompt_of_a_slot import behind
from references.tiny import batch
from tiny_models import (
    loss_and_logits,
    make_mesh,
    model_of_layers,
    on_one_device,
    random_adapters,
    tiny_config,
    tiny_model,
)

from jaxrl.config.roles import ALL_LINEAR
from jaxrl.models import decoder, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import TARGETS, Lora, frozen_and_trained, join_adapters, merge_adapters
from jaxrl.models.parameters import param_shardings

computed = jax.jit(loss_and_logits, static_argnums=0)
merge = jax.jit(merge_adapters)
SOME = Lora(3, 12.0, ("q_proj", "v_proj", "o_proj", "down_proj"))
EVERY = Lora(2, 3.0)


def adapted(name, lora, layers=None):
    """A tiny model, or one of these of its layers, with random adapters, of which B is not 0."""
    config, base = tiny_model(name) if layers is None else model_of_layers(name, layers)
    config = replace(config, lora=lora)
    return config, base, random_adapters(config)


def four_rows(tokens, mask):
    """The three, and the first again, of which no token is valid: for devices to divide."""
    return np.concatenate([tokens, tokens[:1]]), np.concatenate([mask, np.zeros_like(mask[:1])])


@partial(jax.jit, static_argnums=(0, 1))
def step(config, mesh, base, adapters, tokens, mask):
    """The loss of four rows, and the gradients of the adapters."""

    def loss(trained):
        return loss_and_logits(config, join_adapters(base, trained), tokens, mask, mesh=mesh)[0]

    return jax.value_and_grad(loss)(adapters)


def test_at_the_start_the_outputs_are_those_of_the_base_bit_for_bit():
    config, base = tiny_model("qwen2")
    tokens, mask = batch(config.vocab_size)
    with_lora = replace(config, lora=SOME)  # a case of the merged weights: the same programs
    draw = jax.jit(lambda key: frozen_and_trained(parameters.init_params(with_lora, key))[1])
    first = draw(jax.random.key(0))
    _, plain = computed(config, base, tokens, mask)
    _, same = computed(with_lora, join_adapters(base, first), tokens, mask)
    np.testing.assert_array_equal(plain, same)
    every = replace(tiny_config("qwen3"), lora=EVERY)
    assert {(path,) for path in every.quantisable} == set(every.targets.values())
    assert tuple(TARGETS) == ALL_LINEAR  # of the config, which imports no models


@pytest.mark.parametrize(
    ("name", "lora", "layout"),
    and_slow(
        [
            ("qwen2", SOME, "stacked"),
            ("phi3", Lora(3, 12.0, ("gate_up_proj", "o_proj")), "unstacked"),
            ("qwen3_5_moe", EVERY, "stacked"),
        ],
        [
            ("qwen2", EVERY, "unstacked"),
            ("phi3", EVERY, "stacked"),
            ("qwen3_5", EVERY, "unstacked"),
            ("qwen3_moe", Lora(2, 3.0, ("o_proj", "up_proj", "down_proj")), "stacked"),
        ],
    ),
)
def test_merged_weights_compute_the_same(name, lora, layout):
    # Of attention, adapters are those of others.
    config, base, adapters = adapted(name, lora, (1,) if name == "qwen3_5_moe" else None)
    params = join_adapters(base, adapters)
    if layout == "unstacked":
        params = parameters.unstack(jax.device_get(params))
    tokens, mask = batch(config.vocab_size)
    _, ours = computed(config, params, tokens, mask)
    _, theirs = computed(config.base, merge(params, lora.scale), tokens, mask)
    ours, theirs = np.asarray(ours)[mask], np.asarray(theirs)[mask]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    _, plain = computed(config.base, merge(params, 0.0), tokens, mask)
    assert np.abs(ours - np.asarray(plain)[mask]).max() > 0.1


@pytest.mark.parametrize("layout", ["stacked", "unstacked"])
def test_a_tree_is_its_two_parts(layout):
    config, base, adapters = adapted("llama", SOME)
    whole = join_adapters(base, adapters)
    if layout == "unstacked":
        whole = parameters.unstack(jax.device_get(whole))
    frozen, trained = frozen_and_trained(whole)
    assert jax.tree.structure(join_adapters(frozen, trained)) == jax.tree.structure(whole)
    both = jax.tree.leaves(frozen) + jax.tree.leaves(trained)
    assert {id(x) for x in both} == {id(x) for x in jax.tree.leaves(whole)}
    assert sum(x.size for x in jax.tree.leaves(trained)) == config.n_trained
    assert sum(x.size for x in jax.tree.leaves(frozen)) == config.n_params
    assert frozen_and_trained(base)[0] == {} and frozen_and_trained(base)[1] is base


def test_gradients_follow_from_those_of_the_merged_kernels():
    """dL/dA = s dL/dW B' and dL/dB = s A' dL/dW, and the rest of the tree has none."""
    config, base, adapters = adapted("llama", SOME)
    tokens, mask = batch(config.vocab_size)
    _, ours = jax.device_get(step(config, None, base, adapters, *four_rows(tokens, mask)))
    adapters = jax.device_get(adapters)
    whole = merge(join_adapters(base, adapters), SOME.scale)
    _, dense = jax.device_get(on_one_device(config.base, whole, tokens, mask))
    dense = dense["layers"]
    for name in SOME.targets:
        group, projection = TARGETS[name].split("/")
        d_w = dense[group][projection]["kernel"]
        pair = adapters["layers"][group][projection]
        got = ours["layers"][group][projection]
        wanted = {
            "lora_a": SOME.scale * np.einsum("lio,lro->lir", d_w, pair["lora_b"]),
            "lora_b": SOME.scale * np.einsum("lir,lio->lro", pair["lora_a"], d_w),
        }
        for key, value in wanted.items():
            np.testing.assert_allclose(got[key], value, atol=1e-5 * np.abs(value).max())


@pytest.mark.parametrize(
    # In the default suite: in test_quantised.py, over codes, and of experts too.
    ("name", "lora", "axes"),
    and_slow(
        [],
        [
            ("llama", SOME, (1, 2, 2)),
            ("qwen2", EVERY, (1, 2, 2)),
            ("qwen2", EVERY, (2, 2, 2)),
            ("qwen3_moe", EVERY, (1, 2, 2, 1, 2)),
        ],
    ),
)
def test_devices_change_nothing(name, lora, axes):
    config, base, adapters = adapted(name, lora)
    rows = four_rows(*batch(config.vocab_size))
    rows[1][3] = rows[1][0]
    params = jax.device_get(join_adapters(base, adapters))
    mesh = make_mesh(*axes)
    placed = jax.device_put(params, param_shardings(config, mesh))
    rank = placed["layers"]["attn"]["q"]["lora_a"]
    assert rank.sharding.shard_shape(rank.shape)[-1] == lora.rank  # the rank is never split
    one, grads = step(config, None, base, adapters, *rows)
    many, shared = step(config, mesh, *frozen_and_trained(placed), *rows)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(shared), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max())


@pytest.mark.parametrize("name", and_slow(["qwen3"], ["qwen3_moe"]))  # as test_quantised.py has it
def test_prefill_and_decode_equal_the_forward_pass(name):
    config, base, adapters = adapted(name, EVERY, (0,))
    params = parameters.unstack(jax.device_get(join_adapters(base, adapters)))
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (2, 9)).astype(np.int32)
    mask = np.ones_like(tokens, bool)
    forward, prefill = (jax.jit(f, static_argnums=0) for f in (decoder.forward, decoder.prefill))
    decode = jax.jit(decoder.decode_step, static_argnums=0)
    whole = forward(config, params, tokens, mask)
    hidden, prompts = prefill(config, params, tokens[:, :5], mask[:, :5])
    np.testing.assert_allclose(hidden, whole[:, :5], atol=1e-5)
    cache, shared = behind(prompts, [5, 5], positions=8)
    for t in range(5, 9):
        at = decoder.SlotTokens(tokens[:, t], np.full(2, t, np.int32))
        hidden, cache = decode(config, params, cache, at, shared)
        np.testing.assert_allclose(hidden, whole[:, t], atol=1e-5)


def test_what_is_sent_of_a_model_is_a_small_part_of_it():
    raw = SMOLLM2 | {"head_dim": 64}
    config = replace(DecoderConfig.from_hf(raw), lora=Lora(8, 16.0))
    assert config.n_params > 50 * config.n_trained > 100e6


def test_an_update_computes_no_gradient_of_frozen_weights():
    """Products with kernels take two thirds of the FLOPs: forward, and backward by the inputs.
    (Attention, and the adapters' own products, are the rest.)"""
    config, base, adapters = adapted("llama", Lora(1, 1.0))
    tokens, mask = batch(config.vocab_size)

    def of_adapters(trained, base):
        return loss_and_logits(config, join_adapters(base, trained), tokens, mask)[0]

    def of_all(params):
        return loss_and_logits(config.base, params, tokens, mask)[0]

    ours = jax.jit(jax.grad(of_adapters)).lower(adapters, base).cost_analysis()
    theirs = jax.jit(jax.grad(of_all)).lower(base).cost_analysis()
    assert ours["flops"] < 0.85 * theirs["flops"]
