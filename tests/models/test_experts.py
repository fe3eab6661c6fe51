"""Mixtures of experts: nothing is dropped, and blocks change no value."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from references.tiny import batch
from tiny_models import RAW_CONFIGS, REFERENCES, make_mesh, tiny_config, tiny_model

from jaxrl.errors import UserError
from jaxrl.models import decoder, experts, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import ExpertKernel
from jaxrl.models.lora import Lora, dequantise, quantise
from jaxrl.models.packing import pack_streams
from jaxrl.models.rope import YarnRope
from jaxrl.types import Sequences

N, D, F, E, K = 37, 8, 12, 5, 2
"""Tokens, width, width of an expert, experts, experts of a token."""


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def given(seed: int = 0) -> tuple[Any, ...]:
    random = np.random.RandomState(seed)
    ids = np.argsort(random.rand(N, E), -1)[:, :K].astype(np.int32)
    shapes = (N, D), (N, K), (E, D, F), (E, D, F), (E, F, D)
    x, weights, *kernels = (random.standard_normal(s).astype(np.float32) for s in shapes)
    return x, ids, np.abs(weights), *kernels


def by_hand(x: Any, ids: Any, weights: Any, *kernels: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """In numpy and float64: a token after the other and an expert after the other, with the
    gradient of all but `ids` where that of the result is `DIRECTION` for each token."""
    x, weights, gate, up, down = (np.asarray(a, np.float64) for a in (x, weights, *kernels))
    out, d = np.zeros_like(x), [np.zeros_like(a) for a in (x, weights, gate, up, down)]
    for t, chosen in enumerate(ids):
        for k, e in enumerate(chosen):
            g, u, w = x[t] @ gate[e], x[t] @ up[e], weights[t, k]
            share = 1 / (1 + np.exp(-g))
            wide = g * share * u
            out[t] += w * (wide @ down[e])
            d_wide = w * (down[e] @ DIRECTION)
            d_g, d_u = d_wide * u * share * (1 + g * (1 - share)), d_wide * g * share
            d[0][t] += gate[e] @ d_g + up[e] @ d_u
            d[1][t, k] = wide @ down[e] @ DIRECTION
            d[2][e] += np.outer(x[t], d_g)
            d[3][e] += np.outer(x[t], d_u)
            d[4][e] += w * np.outer(wide, DIRECTION)
    return out, d


def by_blocks(x: Any, ids: Any, weights: Any, *kernels: Any) -> jax.Array:
    each = map(ExpertKernel, kernels)
    return experts.chosen_experts(swiglu, 8, False, x, ids, weights, *each)


def by_all(x: Any, ids: Any, weights: Any, *kernels: Any) -> jax.Array:
    return experts.every_expert(swiglu, x, ids, weights, *map(ExpertKernel, kernels))


def by_step(x: Any, ids: Any, weights: Any, *kernels: Any) -> jax.Array:
    return experts.step_experts(swiglu, 8, x, ids, weights, *map(ExpertKernel, kernels))


DIRECTION = np.cos(np.arange(D, dtype=np.float32))
EVERYONE = np.tile(np.array([[3, 1]], np.int32), (N, 1))
"""Experts of tokens that all choose the same ones."""


def test_sorted_blocks_are_ragged_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, over several turns of the loop; and those of a decode step; where
    tokens are spread, and where one expert gets every token."""
    monkeypatch.setattr(experts, "AT_ONCE", 16)
    x, spread, *rest = given()

    def value_and_grad(run: Any) -> list[Any]:
        def loss(x: Any, *rest: Any, ids: Any) -> tuple[jax.Array, jax.Array]:
            out = run(x, ids, *rest)
            return (out * DIRECTION[None]).sum(), out

        compiled = jax.jit(jax.grad(loss, tuple(range(5)), has_aux=True))
        found = [compiled(x, *rest, ids=ids) for ids in (spread, EVERYONE)]
        return [(out, list(gradients)) for gradients, out in found]

    expected = [by_hand(x, ids, *rest) for ids in (spread, EVERYONE)]
    for run in (by_blocks, by_all, by_step):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
            value_and_grad(run),
            expected,
        )


def test_experts_that_are_elsewhere_add_nothing() -> None:
    """The sums over two halves of the experts add up to that over all."""
    x, ids, weights, *kernels = given(1)
    whole, _ = by_hand(x, ids, weights, *kernels)
    kernels = [np.concatenate([kernel, kernel[:1]]) for kernel in kernels]  # one that none chooses
    for run in map(jax.jit, (by_blocks, by_step)):
        halves = [
            run(x, ids - first, weights, *(kernel[first : first + 3] for kernel in kernels))
            for first in (0, 3)
        ]
        np.testing.assert_allclose(halves[0] + halves[1], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 200, 300, 512, 1024, 2048, 8192])
@pytest.mark.parametrize(("count", "chosen"), [(128, 8), (32, 4), (8, 2), (16, 8)])
def test_a_step_computes_every_expert_below_the_ridge_and_has_room_for_any_choice_above(
    rows: int, count: int, chosen: int
) -> None:
    """Blocks for tokens that all choose the same experts, which need most, and never more rows
    than every expert times every token."""
    for ridge in (206.0, 295.0, math.inf):
        size = experts.step_rows(rows, chosen, count, 2048, 768, ridge)
        more = experts.more_blocks(rows, chosen, count, size)
        worst = min(chosen, count) * (-(-rows // size) - 1)
        assert worst <= more and (count + more) * size <= max(count * rows, 8 * count)
        assert size == rows or rows > ridge
    if (count, chosen) == (128, 8) and rows >= 1024:  # Qwen3-30B-A3B on an H200
        size = experts.step_rows(rows, chosen, count, 2048, 768, 206.0)
        assert (count + experts.more_blocks(rows, chosen, count, size)) * size < count * rows / 2


in_codes = jax.jit(quantise, static_argnums=(0, 2))
in_floats = jax.jit(dequantise, static_argnums=2)
route = jax.jit(experts.route, static_argnums=0)
DIVIDED = (2, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("kind", "axes"),
    and_slow(
        [("biases", DIVIDED), ("nf4", DIVIDED), ("int8", None)],
        [
            *((kind, None) for kind in ("floats", "biases", "nf4")),
            *((kind, DIVIDED) for kind in ("floats", "int8")),
            *((kind, (1, 1, 1, 1, 4)) for kind in ("floats", "biases", "int8", "nf4")),
        ],
    ),
    ids=str,
)
def test_a_decode_step_in_blocks_computes_what_the_learner_computes(
    kind: Any, axes: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its kernels are, and where the axis `expert` divides them; the learner computes with
    the floats that they stand for, on one device."""
    random, (d, wide, count) = np.random.RandomState(0), (16, 64, 8)
    mixture = experts.Experts(count, K, True, wide)
    sizes = (count, d, wide), (count, d, wide), (count, wide, d)
    x, router, *kernels = (
        jnp.asarray(random.standard_normal(size).astype("f4"))
        for size in ((4, 16, d), (d, count), *sizes)
    )
    each = [ExpertKernel(kernel) for kernel in kernels]
    if kind == "biases":
        at = np.arange(count * wide, dtype="f4")
        each = [
            ExpertKernel(x, bias=jnp.asarray(np.sin(at[: count * x.shape[2]]).reshape(count, -1)))
            for x in kernels
        ]
    floats = each
    if kind in ("int8", "nf4"):
        each = [ExpertKernel(*in_codes(kind, x, 16)) for x in kernels]
        floats = [ExpertKernel(in_floats(x.kernel, x.scale, "float32")) for x in each]

    def run(mesh: Any, each: list[ExpertKernel], ridge: float | None) -> Any:
        held = experts.ExpertKernels(router, *each)
        return jax.jit(
            partial(experts.mix, mixture, swiglu, mesh, routing=experts.Routing(ridge=ridge))
        )(x, held)

    expected, routed = run(None, floats, None)
    used, step = list[Any](), experts.step_experts

    def counted(*args: Any) -> jax.Array:
        used.append(args)
        return step(*args)

    monkeypatch.setattr(experts, "step_rows", lambda *_: 4)
    monkeypatch.setattr(experts, "step_experts", counted)
    found, ours = run(axes and make_mesh(*axes), each, 1.0)
    assert used and len(used[0][5].kernel) == count // (axes[4] if axes else 1)
    np.testing.assert_array_equal(ours.ids, routed.ids)
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4 * np.abs(expected).max())


def test_adapters_of_experts_are_terms_of_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert's own A B beside its kernel: values, and gradients of tokens, weights and
    adapters, are those of the sums; the kernels have no gradient. Where tokens are spread, and
    where one expert gets every token."""
    monkeypatch.setattr(experts, "AT_ONCE", 16)
    x, spread, weights, *kernels = given()
    random = np.random.RandomState(2)
    sizes = [((E, k.shape[1], 3), (E, 3, k.shape[2])) for k in kernels]
    pairs = [tuple(random.standard_normal(s).astype("f4") for s in pair) for pair in sizes]

    def beside(run: Any, ids: Any, x: Any, weights: Any, pairs: Any, kernels: Any) -> jax.Array:
        each = [
            ExpertKernel(kernel, lora_a=a, lora_b=b)
            for kernel, (a, b) in zip(kernels, pairs, strict=True)
        ]
        return run(x, ids, weights, *each)

    def summed(ids: Any) -> Any:
        each = [kernel + a @ b for kernel, (a, b) in zip(kernels, pairs, strict=True)]
        out, (d_x, d_weights, *d_kernels) = by_hand(x, ids, weights, *each)
        d_pairs = [
            (d @ b.swapaxes(1, 2), a.swapaxes(1, 2) @ d)
            for d, (a, b) in zip(d_kernels, pairs, strict=True)
        ]
        return (d_x, d_weights, d_pairs), out

    def graded(run: Any, *more: int) -> list[Any]:
        def loss(*args: Any) -> tuple[jax.Array, jax.Array]:
            out = beside(run, *args)
            return (out * DIRECTION[None]).sum(), out

        compiled = jax.jit(jax.grad(loss, (1, 2, 3, *more), has_aux=True))
        return [compiled(ids, x, weights, pairs, kernels) for ids in (spread, EVERYONE)]

    expected = [summed(ids) for ids in (spread, EVERYONE)]
    learner = partial(experts.chosen_experts, swiglu, 8, True)
    for run in (
        learner,
        partial(experts.every_expert, swiglu),
        partial(experts.step_experts, swiglu, 8),
    ):
        # Those of the kernels of the learner, which computes none.
        got = graded(run, *[4] * (run is learner))
        if run is learner:
            assert not any(np.any(d) for (*_, d_kernels), _ in got for d in d_kernels)
            got = [(tuple(d), out) for (*d, _), out in got]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max()),
            got,
            expected,
        )


def test_recorded_experts_take_the_place_of_the_routers_choice() -> None:
    config = tiny_config("qwen3_moe").experts
    assert config is not None
    x, router = (
        np.random.RandomState(i).standard_normal(s) for i, s in enumerate(((9, 4), (4, 6)))
    )
    x, router = np.float32(x), np.float32(router)
    own, weights, logprobs = map(np.asarray, route(config, x, router, None))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(np.exp(logprobs).sum(-1), 1, rtol=1e-6)
    given = own[:, ::-1].astype(np.int8)
    given[0] = -1
    again, swapped, _ = map(np.asarray, route(config, x, router, given))
    np.testing.assert_array_equal(again[1:], own[1:, ::-1])
    np.testing.assert_array_equal(again[0], own[0])
    np.testing.assert_allclose(swapped[1:], weights[1:, ::-1], rtol=1e-6)


def test_routers_sum_in_float32() -> None:
    """Of tokens and kernels in bfloat16, whose products are exact: in bfloat16 sums would be wrong
    by 1e-2, and nearly equal experts take each other's place."""
    mixture = experts.Experts(count=16, chosen=2, normalised=True, dense_width=8)
    x, router = (
        np.random.RandomState(i).standard_normal(s).astype(jnp.bfloat16)
        for i, s in enumerate(((64, 256), (256, 16)))
    )
    _, weights, logprobs = route(mixture, x, router, None)
    logits = np.float64(x) @ np.float64(router)
    logits -= logits.max(-1, keepdims=True)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert logprobs.dtype == weights.dtype == np.float32
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("name", and_slow(["gpt_oss"], ["qwen3_moe", "qwen3_5_moe", "gemma4_moe"]))
def test_streams_route_as_rows_do_on_any_mesh(name: str) -> None:
    """Of prompts that are shared: hidden states, and the experts that the routers say they
    chose; with the axes expert and context too."""
    config, params = tiny_model(name)
    tokens, mask = batch(config.vocab_size)
    tokens, mask = (np.repeat(x[[0, 2]], 4, 0) for x in (tokens, mask))
    sequences = Sequences(tokens, mask, mask[:, 9:], group=2)

    def run(params: Any, sequences: Sequences, mesh: Any) -> Any:
        packing, routed = pack_streams(sequences, mesh), list[Any]()
        hidden = decoder.forward_packed(config, params, packing, mesh=mesh, routed=routed)
        rows = packing.completions.unpack(packing.select_predictors(hidden, mesh).sum(-1))
        return rows, routed[0].ids

    rows = np.asarray(jax.jit(partial(decoder.forward, config))(params, tokens, mask)).sum(-1)
    expected = np.where(mask[:, 9:], rows[:, 8:-1], 0)
    mesh = make_mesh(1, 1, 1, 2, 2)
    _, sharded = tiny_model(name, mesh)
    found, ids = jax.jit(run, static_argnums=2)(sharded, sequences, mesh)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert ids.shape == (config.n_layers, 2, ids.shape[2], 2)
    if config.cycle > 1:  # of stacks too in the order of the layers, and on one device
        _, unstacked = tiny_model(name, layout="unstacked")
        found, ids = jax.jit(run, static_argnums=2)(params, sequences, None)
        _, others = jax.jit(run, static_argnums=2)(unstacked, sequences, None)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        np.testing.assert_array_equal(ids, others)


@pytest.mark.parametrize(
    # Gradients of mixtures on meshes are in test_decoder.py too.
    ("name", "graded"),
    and_slow([("qwen3_moe", False)], [("qwen3_moe", True), ("qwen3_5_moe", True)]),
)
def test_the_balance_of_experts_is_that_of_transformers(name: str, graded: bool) -> None:
    """Of padded rows, as streams; a value, and where `graded` gradients, that no mesh changes."""
    config, params = tiny_model(name)
    mixture = config.experts
    assert mixture is not None
    tokens, mask = batch(config.vocab_size)

    def balance(params: Any, mask: Any, mesh: Any) -> jax.Array:
        packing, routed = pack_streams(Sequences(tokens, mask, mask[:, 9:]), mesh), list[Any]()
        decoder.forward_packed(config, params, packing, mesh=mesh, routed=routed, remat="full")
        passed = experts.tokens_of_experts(mixture, routed[0], packing.copies)
        return experts.balance_loss(mixture, routed[0], passed)

    run = jax.jit(jax.value_and_grad(balance), static_argnums=2)
    value, gradient = run(params, mask, None)
    expected = np.load(REFERENCES / "decoders" / f"{name}.npz")["aux_loss"]
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for block in parameters.blocks_of(gradient):
        assert np.abs(block["mlp"]["router"]["kernel"]).max() > 1e-4

    mesh = make_mesh(1, 1, 1, 2, 2)
    tokens, mask = (np.concatenate([x, np.zeros_like(x[:1])]) for x in (tokens, mask))
    _, sharded = tiny_model(name, mesh)
    if graded:
        again, expected = run(sharded, mask, mesh), (value, gradient)
    else:
        again, expected = jax.jit(balance, static_argnums=2)(sharded, mask, mesh), value
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), again, expected)


def test_balanced_routers_have_the_least_loss() -> None:
    """k where all experts have the same share and probability; E where one has all."""
    mixture = experts.Experts(count=4, chosen=1, normalised=True, dense_width=8)
    ids = np.arange(8, dtype=np.int32).reshape(2, 1, 4, 1) % 4
    copies = jnp.asarray(np.ones((1, 4), np.float32))

    @jax.jit
    def loss(routed: Any) -> jax.Array:
        tokens = experts.tokens_of_experts(mixture, routed, copies)
        return experts.balance_loss(mixture, routed, tokens)

    for given, mass, expected in (
        (ids, np.full((2, 4), 1.0), 1),
        (0 * ids, [[4.0, 0, 0, 0]] * 2, 4),
    ):
        routed = experts.Routed(given, np.zeros((2, 1, 4), np.float32), np.float32(mass))
        assert float(loss(routed)) == expected


def test_a_key_that_a_family_has_not_is_not_read() -> None:
    """Qwen3.5's mixtures have experts in each layer, whatever an older family's key says."""
    raw = RAW_CONFIGS["qwen3_5_moe"]
    assert DecoderConfig.from_hf(raw | {"decoder_sparse_step": 2}) == DecoderConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds num_experts=6"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
        ({"num_local_experts": 0}, "num_experts=0 must be a whole number"),
    ],
)
def test_what_a_mixture_does_not_support_is_refused(change: Any, message: str) -> None:
    raw = tiny_config("qwen3_moe").to_hf("float32")
    del raw["num_experts"]
    with pytest.raises(UserError, match=message):
        DecoderConfig.from_hf({"num_local_experts": 6} | raw | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds num_local_experts=4"),
        ({"attention_bias": False}, "attention_bias=false is not supported"),
        ({"swiglu_limit": 0}, "swiglu_limit=0 must be a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ],
)
def test_what_gpt_oss_does_not_support_is_refused(change: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DecoderConfig.from_hf(tiny_config("gpt_oss").to_hf("float32") | change)


def test_what_a_config_of_gpt_oss_leaves_out() -> None:
    """As that of transformers has it; the released ones do not state alpha."""
    short = {"model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    short |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = DecoderConfig.from_hf(short)
    assert config.experts == experts.Experts(128, 4, True, 32, experts.Clamp(1.702, 7.0))
    assert config.windows == {128: 2, None: 1} and config.kinds[1].window is None
    rope = config.rope_scaling
    assert isinstance(rope, YarnRope) and not rope.truncate
    assert (rope.factor, rope.original_max_positions, rope.beta_fast) == (32.0, 4096, 32.0)
    assert (config.head_dim, config.rope_theta, config.max_positions) == (64, 150000.0, 131072)


def test_experts_have_adapters_where_each_has_tensors_of_its_own() -> None:
    """As in PEFT; where all of them are one tensor, adapters are those of attention, and the
    weights under them are not quantised."""
    lora = Lora(rank=2, alpha=4)
    qwen, gpt = (replace(tiny_config(name), lora=lora) for name in ("qwen3_moe", "gpt_oss"))
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert qwen.lora is not None and qwen.experts is not None
    assert qwen.lora.targets == (*attention, "gate_proj", "up_proj", "down_proj")
    assert gpt.lora is not None and gpt.lora.targets == attention
    whole = replace(qwen, lora=replace(lora, targets=attention))
    more = qwen.n_layers * qwen.experts.count * 3 * 2 * (qwen.d_model + qwen.d_ff)
    assert qwen.n_trained - whole.n_trained == more
    with pytest.raises(UserError, match="gpt_oss has no up_proj that adapters could be for"):
        replace(gpt, lora=Lora(rank=2, alpha=4, targets=("q_proj", "up_proj")))
    with pytest.raises(UserError, match="the experts of gpt_oss, which are all in one tensor"):
        replace(gpt, quantised="nf4")


def test_clamped_gates_are_gpt_osss() -> None:
    """(min(g, 7) sigmoid(1.702 min(g, 7))) (clip(u, -7, 7) + 1), by hand."""
    gate, up = (np.float32(x) for x in ([0.0, 1.0, 9.0, -9.0], [3.0, -9.0, 9.0, 0.5]))
    seven = 7 / (1 + np.exp(-1.702 * 7))
    expected = [0.0, -6 / (1 + np.exp(-1.702)), 8 * seven, -9 * 1.5 / (1 + np.exp(1.702 * 9))]
    clamp = jax.jit(experts.Clamp(1.702, 7.0))
    np.testing.assert_allclose(clamp(gate, up), expected, rtol=1e-5)


@pytest.mark.parametrize(("name", "biases"), [("qwen3_moe", 0), ("gpt_oss", 1), ("gemma4_moe", 0)])
def test_active_parameters_are_those_of_a_tokens_experts(name: str, biases: int) -> None:
    config = tiny_config(name)
    assert config.experts is not None
    one = 3 * config.d_model * config.d_ff + biases * (2 * config.d_ff + config.d_model)
    count = config.experts.count
    assert config.n_params - config.n_active == config.n_layers * (count - 2) * one
    whole = replace(config, experts=replace(config.experts, chosen=count))
    assert whole.n_active == config.n_params


def test_weights_of_replayed_experts_are_numbers_however_improbable_they_are() -> None:
    mixture = experts.Experts(count=4, chosen=1, normalised=True, dense_width=8)
    x, router = np.eye(4, dtype=np.float32)[:1], np.zeros((4, 4), np.float32)
    router[0, 0] = 200.0
    ids, weights, _ = route(mixture, x, router, np.array([[1]], np.int8))
    assert ids.tolist() == [[1]] and weights.tolist() == [[1.0]]


def test_the_number_of_experts_under_either_name() -> None:
    raw = tiny_config("qwen3_moe").to_hf("float32")
    count = raw.pop("num_experts")
    config = DecoderConfig.from_hf({**raw, "num_experts": None, "num_local_experts": count})
    assert config.experts is not None and config.experts.count == count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mlp_only_layers": [0]},
            r"mlp_only_layers=\[0\]: models that mix layers",
        ),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds num_experts=6"),
        ({"num_local_experts": 5}, "num_experts=6 and num_local_experts=5"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0 must be a"),
        ({"attn_output_gate": False}, "attn_output_gate=false is not supported"),
    ],
)
def test_what_a_mixture_with_states_does_not_support_is_refused(change: Any, message: str) -> None:
    raw = tiny_config("qwen3_5_moe").to_hf("float32")
    assert "intermediate_size" not in raw
    with pytest.raises(UserError, match=message):
        DecoderConfig.from_hf(raw | change)


def test_a_mixture_with_states_counts_the_expert_that_all_tokens_share() -> None:
    """As the sizes of Qwen3.5-35B-A3B, which transformers leaves out, have them."""
    sizes = {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40}
    sizes |= {"num_attention_heads": 16, "tie_word_embeddings": False}
    config = DecoderConfig.from_hf({"model_type": "qwen3_5_moe_text", **sizes})
    assert config.experts == experts.Experts(256, 8, True, dense_width=512, beside="gate")
    assert (config.n_kv_heads, config.head_dim, config.rotary_dims) == (2, 256, 64)
    assert 34e9 < config.n_params < 35.5e9 and 2.9e9 < config.n_active < 3.6e9
    one = 3 * 2048 * 512
    assert config.n_params - config.n_active == 40 * (256 - 8) * one
    assert config.parameters["mlp/up/kernel"].size == one // 3
