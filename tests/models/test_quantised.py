"""Laws of kernels in 8 and 4 bits."""

from dataclasses import replace
from functools import partial
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from prompt_of_a_slot import behind
from references.tiny import batch
from tiny_models import (
    Memory,
    loss_and_logits,
    make_mesh,
    random_adapters,
    tiny_config,
    tiny_tensors,
)

from jaxrl.errors import UserError
from jaxrl.formats import weights
from jaxrl.models import decoder, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import Experts
from jaxrl.models.lora import (
    NF4,
    Lora,
    dequantise,
    frozen_and_trained,
    join_adapters,
    merge_adapters,
    quantisation_block,
    quantise,
)
from jaxrl.models.parameters import param_shardings

KINDS = ("int8", "nf4")
LORA = Lora(2, 4.0)
merge = jax.jit(merge_adapters)
in_codes = jax.jit(quantise, static_argnums=(0, 2))
in_floats = jax.jit(dequantise, static_argnums=2)
LEVELS = {"int8": np.arange(-127, 128) / 127, "nf4": np.array(NF4)}


def some_kernel(shape=(2, 192, 24)):
    drawn = np.random.default_rng(0).standard_t(4, shape).astype(np.float32)
    drawn[0, 64:128, 5] = 0
    return drawn * 0.02


class Drawn(Memory):
    """Tensors of a model, drawn when they are asked for."""

    def __init__(self, config):
        shapes = weights.tensor_shapes(config)
        draw = np.random.default_rng(1)
        super().__init__({name: 0.1 * draw.normal(size=shape) for name, shape in shapes.items()})


WIDE = DecoderConfig("llama", 64, 256, 3, 4, 2, 64, 384, lora=LORA)
MIXTURE = DecoderConfig(
    *("qwen3_moe", 64, 256, 3, 4, 2, 64, 128), lora=LORA, experts=Experts(4, 2, True, 384)
)


def drawn(model):
    """A model with adapters, and its tensors."""
    if isinstance(model, DecoderConfig):
        return model, Drawn(model)
    return replace(tiny_config(model), lora=LORA), Memory(tiny_tensors(model))


@partial(jax.jit, static_argnums=(0, 1))
def step(config, mesh, base, adapters):
    """Loss and logits of four rows, and the gradients of the adapters: of a mixture on one device
    two tests ask for them."""
    tokens, mask = (np.concatenate([x, x[:1]]) for x in batch(64))

    def loss(trained):
        params = join_adapters(base, trained)
        return loss_and_logits(config, params, tokens, mask, mesh=mesh, remat="dots")

    return jax.value_and_grad(loss, has_aux=True)(adapters)


def test_the_levels_are_quantiles_of_a_normal_distribution():
    """As in the code of the paper's authors: 8 quantiles of the one half, 7 of the other, and 0."""
    last, inverse = 0.9677083, NormalDist().inv_cdf
    upper = [inverse(p) for p in np.linspace(last, 0.5, 9)[:-1]]
    lower = [-inverse(p) for p in np.linspace(last, 0.5, 8)[:-1]]
    both = np.array(sorted([*upper, 0.0, *lower]))
    np.testing.assert_allclose(NF4, both / both.max(), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_each_number_becomes_the_nearest_level_of_its_block(kind):
    kernel = some_kernel()
    codes, scale = in_codes(kind, kernel, 64)
    assert codes.nbytes == kernel.size // (2 if kind == "nf4" else 1)
    assert scale.shape == (2, 3, 24) and scale.dtype == jnp.bfloat16
    found = np.asarray(in_floats(codes, scale, "float32"))
    blocks = kernel.reshape(2, 3, 64, 24)
    largest = np.abs(blocks).max(-2, keepdims=True)
    wide = np.float32(np.asarray(scale))[:, :, None] * (127 if kind == "int8" else 1)
    np.testing.assert_allclose(wide, largest, rtol=2**-8)
    levels = LEVELS[kind] * wide[..., None]
    nearest = np.abs(levels - blocks[..., None]).min(-1)
    error = np.abs(found.reshape(blocks.shape) - blocks)
    np.testing.assert_allclose(error, nearest, rtol=1e-3, atol=1e-8)
    assert (found[0, 64:128, 5] == 0).all()
    again = in_codes(kind, found, 64)
    assert (again[0] == codes).all()  # what a kernel stands for stands for itself


@pytest.mark.parametrize("kind", KINDS)
def test_whole_blocks_of_a_kernel_are_quantised_alone(kind):
    kernel = some_kernel()
    codes, scale = in_codes(kind, kernel, 64)
    part = in_codes(kind, kernel[1, 64:, 3:9], 64)
    rows = codes.shape[1] // 3
    assert (part[0] == codes[1, rows:, 3:9]).all() and (part[1] == scale[1, 1:, 3:9]).all()
    assert [quantisation_block(n) for n in (4096, 576, 48, 90)] == [64, 64, 16, 2]


@pytest.mark.parametrize(
    ("model", "kind"),
    # Codes of 8 bits: of devices, below.
    and_slow([(MIXTURE, "nf4")], [("qwen3", "int8"), ("qwen3", "nf4"), ("qwen3_moe", "nf4")]),
    ids=lambda x: "mixture" if x is MIXTURE else x,
)
def test_it_computes_what_floats_of_the_same_values_compute(model, kind):
    """The loss, the logits, and the gradients of the adapters, bit for bit; the base has none. Of a
    mixture the experts too are quantised, and the router is not."""
    float_config, tensors = drawn(model)
    config = replace(float_config, quantised=kind)
    base, adapters = weights.load_params(tensors, config.base), random_adapters(config)
    floats = merge(join_adapters(base, adapters), 0.0)
    if config.experts is not None:
        mlp = base["layers"]["mlp"]
        assert mlp["experts"]["up"]["kernel"].dtype == np.uint8
        assert mlp["router"]["kernel"].dtype == np.float32
    _, mask = batch(64)
    on_floats = partial(step, float_config, None)
    ours, theirs = step(config, None, base, adapters), on_floats(floats, adapters)
    ours, theirs = jax.device_get((ours, theirs))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a == b).all()
    whole = merge(join_adapters(base, adapters), LORA.scale)
    assert jax.tree.structure(whole) == jax.tree.structure(floats)
    (_, logits), _ = ours
    none = jax.tree.map(np.zeros_like, jax.device_get(adapters))  # that program again, without any
    (_, same), _ = jax.device_get(on_floats(whole, none))
    np.testing.assert_allclose(logits[:3][mask], same[:3][mask], atol=1e-4)
    (_, plain), _ = jax.device_get(on_floats(weights.load_params(tensors, config.plain), none))
    assert np.abs(plain - same)[:3][mask].max() > 1e-2


@pytest.mark.parametrize("name", and_slow(["qwen3_moe"], ["qwen3"]))
def test_prefill_and_decode_equal_the_forward_pass_over_them(name):
    plain = tiny_config(name).with_layers((0,))
    config = replace(plain, lora=LORA, quantised="nf4")
    tensors = Memory(tiny_tensors(name, config=plain))
    base = weights.load_params(tensors, config.base, layout="unstacked")
    adapters = parameters.unstack(jax.device_get(random_adapters(config)))
    params = join_adapters(base, adapters)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, (2, 6)).astype(np.int32)
    mask = np.ones_like(tokens, bool)
    expected = jax.jit(decoder.forward, static_argnums=0)(config, params, tokens, mask)
    prefill = jax.jit(decoder.prefill, static_argnums=0)
    hidden, prompts = prefill(config, params, tokens[:, :5], mask[:, :5])
    np.testing.assert_allclose(hidden, expected[:, :5], atol=1e-5)
    cache, shared = behind(prompts, [5, 5], positions=8)
    decode = jax.jit(decoder.decode_step, static_argnums=0)
    at = decoder.SlotTokens(tokens[:, 5], np.full(2, 5, np.int32))
    hidden, _ = decode(config, params, cache, at, shared)
    np.testing.assert_allclose(hidden, expected[:, 5], atol=1e-5)


PARTS = [(MIXTURE, "int8", (1, 2, 2, 1, 2))]
MORE_PARTS = [
    (MIXTURE, "nf4", (1, 2, 2, 1, 2)),
    (WIDE, "nf4", (1, 2, 2)),
    (WIDE, "int8", (1, 2, 2)),
    (WIDE, "int8", (2, 2, 2)),
    (WIDE, "nf4", (2, 2, 2)),
    (MIXTURE, "int8", (1, 1, 4, 1, 2)),  # two blocks of an expert's width on four devices: each of
    # them has it whole
]


@pytest.mark.parametrize(("model", "kind", "axes"), and_slow(PARTS, MORE_PARTS))
def test_devices_hold_parts_and_compute_the_same(model, kind, axes):
    """Each device quantises what it holds of the float weights, in whole blocks; floats of the same
    values on one device compute the same."""
    config, mesh = replace(model, quantised=kind), make_mesh(*axes)
    tensors = Drawn(config)
    one = weights.load_params(tensors, config.base)
    many = weights.load_params(tensors, config.base, mesh)
    assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(many)))
    mlp, heads = many["layers"]["mlp"], many["layers"]["attn"]["o"]["kernel_scale"]
    parts = (256 // 64 // axes[2], 256 // axes[1])
    assert heads.sharding.shard_shape(heads.shape) == (3, *parts)
    if model is WIDE:
        for leaf in (mlp["up"]["kernel"], mlp["up"]["kernel_scale"]):  # both dims are divided
            assert leaf.sharding.shard_shape(leaf.shape)[1:] == (leaf.shape[1] // 2, 192)
    else:
        up = mlp["experts"]["up"]["kernel"]
        assert up.sharding.shard_shape(up.shape)[1] == 2  # of four experts
    adapters = random_adapters(config)
    placed = jax.device_put(adapters, frozen_and_trained(param_shardings(config, mesh))[1])
    floats = merge(join_adapters(one, adapters), 0.0)
    ours, theirs = step(config, mesh, many, placed), step(model, None, floats, adapters)
    (loss, _), of_ours = ours
    (same, _), of_theirs = theirs
    for a, b in zip(
        jax.tree.leaves((loss, of_ours)), jax.tree.leaves((same, of_theirs)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_a_dim_whose_blocks_the_devices_do_not_divide_is_whole():
    config = replace(WIDE, d_model=192, quantised="nf4")  # 3 blocks of 64, and fsdp=2
    shardings = param_shardings(config, make_mesh(1, 2, 1))
    assert shardings["layers"]["mlp"]["up"]["kernel"].spec[1] is None
    assert shardings["layers"]["mlp"]["down"]["kernel"].spec[2] == "fsdp"
    assert shardings["layers"]["mlp"]["up"]["lora_a"].spec[1] == "fsdp"


def test_no_more_than_a_layer_is_dequantised_at_a_time():
    """Of the compiled gradient of 14 layers: what it holds beside its arguments is less than the
    kernels of two as floats. One of each layer, the smallest, would be a whole layer's more."""
    tokens, mask = np.ones((1, 4), np.int32), np.ones((1, 4), bool)
    config = replace(WIDE, n_layers=14, quantised="nf4")
    frozen, trained = frozen_and_trained(parameters.abstract_params(config))

    def loss(trained, base):
        return loss_and_logits(config, join_adapters(base, trained), tokens, mask)[0]

    compiled = jax.jit(jax.grad(loss)).lower(trained, frozen).compile()
    layer = 4 * WIDE.dense_weights // WIDE.n_layers
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * layer


def test_the_bytes_of_the_base():
    """Of bfloat16's: half and a quarter, and 1/64 of a scale each."""
    for kind, size in (("int8", 1), ("nf4", 1 / 2)):
        layers = parameters.abstract_params(replace(WIDE, lora=None, quantised=kind))["layers"]
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers["mlp"]))
        assert held == WIDE.n_layers * 3 * 256 * 384 * (size + 2 / 64)


def test_an_odd_number_of_inputs_is_refused():
    with pytest.raises(UserError, match="nf4 has two numbers in a byte, and mlp/down has 333"):
        replace(WIDE, d_ff=333, quantised="nf4")
    replace(WIDE, d_ff=333, quantised="int8")
