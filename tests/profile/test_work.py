"""FLOPs and bytes against what the model has and XLA counts; ceilings of devices."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_params

from jaxrl.formats.weights import leaves_by_path
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta
from jaxrl.models.family import LayerKind
from jaxrl.profile.work import (
    adamw_work,
    block_params,
    decode_work,
    divergence_work,
    forward_work,
    head_work,
)
from jaxrl.sharding.targets import PUBLISHED, ceilings_of

MODEL = DecoderConfig("llama", 264, 32, 2, 4, 2, 8, 64, tie_embeddings=True, eos_ids=(258,))


def counted(function, *shapes):
    """FLOPs that XLA counts of a function."""
    lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    return lowered.compile().cost_analysis()["flops"]


def test_block_params_are_the_kernels_of_the_blocks():
    leaves = leaves_by_path(random_params(MODEL))
    kernels = [leaf.size for path, leaf in leaves.items() if path.endswith("kernel")]
    assert block_params(MODEL) == sum(kernels)


def test_the_head_costs_what_its_product_costs():
    flops = counted(lambda hidden, head: hidden @ head.T, (5, 32), (264, 32))
    assert head_work(264, 32, 5, itemsize=4).flops == flops
    assert head_work(264, 32, 5, itemsize=4, copies=3).bytes == 3 * 264 * 32 * 4


def test_attention_counts_the_pairs_of_a_causal_mask():
    """Beyond the weights, a token's products with the keys and values up to its own."""
    one, two = (forward_work(MODEL, lengths, 4).flops for lengths in ([3.0], [3.0, 3.0]))
    assert two == 2 * one
    weights = 2 * block_params(MODEL) * 3
    pairs = np.tril(np.ones((3, 3))).sum()
    heads = MODEL.n_heads * MODEL.head_dim
    assert one - weights == 2 * (2 * heads * pairs) * MODEL.n_layers


def test_a_state_costs_the_same_at_each_token_and_only_other_layers_count_pairs():
    delta = Delta(k_heads=2, v_heads=4, k_dim=8, v_dim=12)
    kinds = (LayerKind(recurs=True), LayerKind())
    mixed = replace(MODEL, family="qwen3_5_text", kinds=kinds, delta=delta)
    rest = forward_work(mixed, [3.0], 4).flops - 2 * block_params(mixed) * 3
    pairs = 2 * (2 * MODEL.n_heads * MODEL.head_dim * np.tril(np.ones((3, 3))).sum())
    state = 4 * 8 * 12
    assert rest - pairs == 3 * 3 * 2 * state
    near, far = (decode_work(mixed, context, 1, 1, 4) for context in (1.0, 9.0))
    assert far.bytes - near.bytes == 4 * 2 * MODEL.n_kv_heads * MODEL.head_dim * 8
    plain = decode_work(replace(mixed, delta=replace(delta, v_dim=1)), 1.0, 1, 1, 4)
    kernels = block_params(mixed) - block_params(replace(mixed, delta=replace(delta, v_dim=1)))
    assert near.bytes - plain.bytes == 4 * kernels + 2 * 4 * (state - 4 * 8)


def test_a_window_counts_its_pairs_alone():
    """One layer of two, over sequences that are shorter than it, as long, and longer."""
    mixed = replace(MODEL, kinds=(LayerKind(window=4), LayerKind()))
    each = 4 * MODEL.n_heads * MODEL.head_dim
    for length in (3, 4, 9):
        band = np.tril(np.ones((length, length)))
        saved = band.sum() - np.triu(band, -3).sum()
        whole, less = (forward_work(model, [length], 4).flops for model in (MODEL, mixed))
        assert whole - less == each * saved
    shared = forward_work(mixed, [3, 5], samples=1, mean=5, itemsize=4)
    assert shared == forward_work(mixed, [8.0, 10.0], 4)
    full, seen = (decode_work(m, context=10, tokens=6, steps=3, itemsize=2) for m in (MODEL, mixed))
    assert full.flops - seen.flops == 6 * each * (10 - 4)
    assert full.bytes - seen.bytes == 2 * 6 * 2 * MODEL.n_kv_heads * MODEL.head_dim * (10 - 4)


def test_layers_of_other_shapes_count_their_own_heads():
    """One layer of two has heads twice as wide, and half as many keys."""
    own = LayerKind(head_dim=2 * MODEL.head_dim, n_kv_heads=MODEL.n_kv_heads // 2)
    mixed = replace(MODEL, kinds=(LayerKind(), own))
    each = 4 * MODEL.n_heads * MODEL.head_dim
    rest = forward_work(mixed, [3.0], 4).flops - 2 * block_params(mixed) * 3
    assert rest == (1 + 2) * each * 6
    near, far = (decode_work(mixed, context, 1, 1, 4) for context in (1.0, 9.0))
    assert far.flops - near.flops == (1 + 2) * each * 8
    assert far.bytes - near.bytes == 4 * 2 * 2 * MODEL.n_kv_heads * MODEL.head_dim * 8
    q, kv = MODEL.n_heads * MODEL.head_dim, MODEL.n_kv_heads * MODEL.head_dim
    assert mixed.n_params - MODEL.n_params == MODEL.d_model * 2 * q
    assert mixed.kept_by_token == MODEL.kept_by_token == 2 * 2 * kv


def test_a_prompt_counts_once_however_many_completions_follow_it():
    whole = forward_work(MODEL, [8.0, 10.0], 4)
    assert forward_work(MODEL, [3, 5], samples=1, mean=5, itemsize=4) == whole
    twice = forward_work(MODEL, [8.0, 8.0, 10.0, 10.0], 4).flops
    shared = forward_work(MODEL, [3.0, 5.0], 4).flops
    assert forward_work(MODEL, [3, 5], samples=2, mean=5, itemsize=4).flops == twice - shared


def test_decoding_reads_the_weights_at_each_step_and_the_keys_of_each_token():
    work = decode_work(MODEL, context=10, tokens=6, steps=3, itemsize=2)
    held = block_params(MODEL) + 264 * 32
    keys = 2 * MODEL.n_layers * MODEL.n_kv_heads * MODEL.head_dim * 10
    assert work.bytes == (3 * held + 6 * keys) * 2
    alone = decode_work(MODEL, context=0, tokens=6, steps=3, itemsize=2)
    assert alone.flops == 6 * 2 * held
    twice = decode_work(MODEL, context=10, tokens=6, steps=3, itemsize=2, copies=2)
    assert twice.bytes - work.bytes == 3 * held * 2 and twice.flops == work.flops


def test_tokens_that_share_a_prompt_read_its_keys_once():
    """Of four samples each with a prompt of 8 tokens before it, and 2 of its own on average."""
    given = {"context": 10, "tokens": 6, "steps": 3, "itemsize": 2}
    copied, shared = decode_work(MODEL, **given), decode_work(MODEL, **given, read=8 / 4 + 2)
    keys = 2 * MODEL.n_layers * MODEL.n_kv_heads * MODEL.head_dim * 6
    assert copied.bytes - shared.bytes == keys * 6 * 2 and copied.flops == shared.flops


def test_a_divergence_has_two_heads_forward_and_the_students_backward():
    forward = head_work(264, 32, 7, 4).flops + head_work(264, 48, 7, 4).flops
    backward = 2 * head_work(264, 32, 7, 4).flops
    assert divergence_work(264, 32, 48, 7, 4).flops == forward + backward


def test_adamw_reads_a_gradient_and_moves_weights_and_moments_both_ways():
    assert adamw_work(10).bytes == 10 * 4 * (1 + 2 * 3)


def test_a_known_device_has_its_published_figures_and_is_not_measured():
    device = SimpleNamespace(device_kind="NVIDIA H200", platform="gpu")
    told = ceilings_of(device, "bfloat16")
    assert (told.flops, told.bandwidth) == (989e12, 4800e9)
    assert told.published and not told.shared


@pytest.mark.parametrize(("kind", "figures"), PUBLISHED.items())
def test_published_figures_are_tera_and_giga(kind, figures):
    tflops, gbytes = figures
    assert 50 < tflops < 2500 and 250 < gbytes < 10_000
    assert 50 < tflops * 1e3 / gbytes < 700, "FLOPs a byte"


def test_an_unknown_device_is_measured():
    told = ceilings_of(jax.devices("cpu")[0], "float32")
    assert not told.published and told.shared
    assert 1e8 < told.flops < 1e14 and 1e8 < told.bandwidth < 1e13
