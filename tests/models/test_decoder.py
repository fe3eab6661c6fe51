"""The decoder against transformers (committed arrays), and its laws."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from prompt_of_a_slot import behind
from references.tiny import batch
from rounding import tolerance
from tiny_models import (
    NAMES,
    REFERENCES,
    loss_and_logits,
    make_mesh,
    model_of_its_kinds,
    on_one_device,
    tiny_config,
    tiny_model,
)

from jaxrl.formats import weights
from jaxrl.models import decoder, parameters
from jaxrl.models.family import LayerKind
from jaxrl.models.packing import pack_streams
from jaxrl.models.parameters import param_shardings
from jaxrl.types import Sequences


@partial(jax.jit, static_argnames=("config", "dtype", "mesh"))
def computed(config: Any, params: Any, tokens: Any, mask: Any, **options: Any) -> jax.Array:
    hidden = decoder.forward(config, params, tokens, mask, **options)
    return decoder.token_logits(config, params, hidden)


def logits(config: Any, params: Any, tokens: Any, mask: Any, **options: Any) -> np.ndarray:
    return np.asarray(computed(config, params, tokens, mask, **options))


def shared_logits(name: str, tokens: Any, mask: Any) -> np.ndarray:
    """Of tokens [3,20], as `batch` has them, by a program that the tests of a family share: where
    one with gradients is needed anyway, by that."""
    config, params = tiny_model(name)
    if name in GRADED:
        (_, found), _ = on_one_device(config, params, tokens, mask)
        return np.asarray(found)
    return logits(config, params, tokens, mask)


def loss_and_grad(config: Any, params: Any, tokens: Any, mask: Any, **options: Any) -> Any:
    loss = partial(loss_and_logits, config, **options)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True)) if options else None
    (value, _), grad = (run or partial(on_one_device, config))(params, tokens, mask)
    return value, grad


def additions(config: Any, mask: np.ndarray) -> int:
    """On the longest way to a gradient: products, norms and softmax of each layer and of the head,
    forward and back, and the sum over the tokens."""
    layer = 4 * config.d_model + config.d_ff + (config.n_heads + 1) * config.head_dim
    one_way = config.n_layers * (layer + 2 * mask.shape[1]) + config.d_model + config.vocab_size
    return 2 * one_way + mask.size


def assert_trees_close(config: Any, mask: np.ndarray, a: Any, b: Any) -> None:
    """Each leaf within what rounding explains, of the largest magnitude in it."""
    terms = additions(config, mask)

    def check(path: Any, x: Any, y: Any) -> None:
        x, y = np.asarray(x), np.asarray(y)
        limit = tolerance(jnp.float32, terms, max(np.abs(y).max(), 1e-6))
        assert np.abs(x - y).max() <= limit, (
            jax.tree_util.keystr(path),
            np.abs(x - y).max(),
            limit,
        )

    jax.tree_util.tree_map_with_path(check, a, b)


GRADED = ("llama", "gpt_oss", "qwen3_5_moe", "gemma4_shared", "gemma4_unified")
"""Families whose gradients the default suite holds against transformers."""
BLOCKS = ("llama", "olmo2", "gpt_oss", "qwen3_5_moe", "gemma4_shared")
"""Families that have between them each kind of block: the gradients of others go the same ways."""


def but(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in NAMES if name not in names)


ROPES = ("llama3_rope", "llama_linear_rope")
"""Cases that differ from others in their frequencies alone, which are in test_rotary.py too."""


@pytest.mark.parametrize("name", and_slow([x for x in NAMES if x not in ROPES], ROPES))
def test_logits_are_those_of_transformers(name: str) -> None:
    reference = np.load(REFERENCES / "decoders" / f"{name}.npz")
    tokens, mask = batch(tiny_config(name).vocab_size)
    ours = shared_logits(name, tokens, mask)
    np.testing.assert_allclose(ours[mask], reference["logits"][mask], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", and_slow(GRADED, but(GRADED)))
def test_gradients_are_those_of_transformers(name: str) -> None:
    config, params = tiny_model(name)
    reference = np.load(REFERENCES / "decoders" / f"{name}.npz")
    tokens, mask = batch(config.vocab_size)
    (loss, _), grad = on_one_device(config, params, tokens, mask)
    grad = jax.device_get(grad)
    np.testing.assert_allclose(loss, reference["loss"], rtol=1e-5)
    scales = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(grad)
        if "block_scale" in str(path)
    ]
    assert len(scales) == config.block.scalar * config.cycle and not any(map(np.any, scales))
    read = weights.hf_tensors(config, grad)
    stored = [key for key in reference if key.startswith("grad/")]
    assert len(stored) >= 8
    for key in stored:
        theirs = reference[key]
        error = np.abs(read(key.removeprefix("grad/")) - theirs).max()
        assert error <= 1e-4 * np.abs(theirs).max(), (key, error)


OF_TWO_KINDS = ("qwen3_5", "gemma4", "gemma4_moe")
"""Of layers, beside those whose layouts the default suite compares."""


@pytest.mark.parametrize("name", and_slow(["qwen3", "qwen3_5_moe", "gemma4_shared"], OF_TWO_KINDS))
def test_layouts_have_the_same_arrays(name: str) -> None:
    _, params = tiny_model(name)
    _, unstacked = tiny_model(name, layout="unstacked")
    cut = parameters.unstack(jax.device_get(params))
    jax.tree.map(np.testing.assert_array_equal, cut, unstacked)


@pytest.mark.parametrize(
    # The layers of another layout compute the same where a prefill is held against it (below).
    "name",
    and_slow(["qwen3"], ["qwen3_5_moe", "gemma4_shared", *OF_TWO_KINDS]),
)
def test_layouts_agree(name: str) -> None:
    config, unstacked = tiny_model(name, layout="unstacked")
    tokens, mask = batch(config.vocab_size)
    a, b = shared_logits(name, tokens, mask), logits(config, unstacked, tokens, mask)
    np.testing.assert_allclose(a[mask], b[mask], atol=1e-5)


def test_abstract_params_and_count_are_those_of_the_real_ones() -> None:
    for name in NAMES:
        config, params = tiny_model(name)
        abstract = parameters.abstract_params(config)
        jax.tree.map(
            lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or 1 / 0, abstract, params
        )
        assert config.n_params == sum(x.size for x in jax.tree.leaves(params)), name


@pytest.mark.parametrize(
    "name",
    and_slow(
        ["gpt_oss", "qwen3_5", "gemma4_shared"],
        ["qwen2", "phi3", "gemma4", "qwen3", "smollm3", "qwen3_moe", "gemma3", "qwen3_5_moe"]
        + ["gemma4_moe", "olmo2"],
    ),
)
def test_prefill_then_decode_is_forward(name: str) -> None:
    """Slots that share prompts of different lengths, teacher-forced until the sequence is longer
    than the windows; of layers each by itself, and of stacked ones."""
    config, params = tiny_model(name, layout="unstacked")
    lengths, prompt_of, width = np.array([7, 4, 1]), np.array([0, 2, 1, 1, 0, 2]), 7
    random = np.random.RandomState(0)
    tokens, more = random.randint(3, config.vocab_size, (2, 3, 20)).astype(np.int32)
    more = np.where(np.arange(20)[None] < lengths[:, None], tokens, more)  # the same prompts
    found = (shared_logits(name, x, np.ones_like(x, bool)) for x in (tokens, more))
    expected = np.stack(list(found), 1).reshape(6, 20, -1)  # two rows of each prompt
    row_of = 2 * prompt_of + np.array([0, 0, 0, 1, 1, 1])
    slots = np.stack([tokens, more], 1).reshape(6, 20)[row_of]

    @jax.jit
    def prefill(params: Any, tokens: Any, mask: Any) -> Any:
        hidden, cache = decoder.prefill(config, params, tokens, mask)
        return decoder.token_logits(config, params, hidden), cache

    @jax.jit
    def step(params: Any, *rest: Any) -> Any:
        hidden, cache = decoder.decode_step(config, params, *rest)
        return decoder.token_logits(config, params, hidden), cache

    mask = np.arange(width)[None] < lengths[:, None]
    first, prompts = prefill(params, tokens[:, :width], mask)
    cache, shared = behind(prompts, lengths, positions=8, prompt_of=prompt_of)
    np.testing.assert_allclose(np.asarray(first)[mask], expected[::2, :width][mask], atol=1e-5)
    positions, rows = lengths[prompt_of], np.arange(6)
    for _ in range(5):
        step_tokens = decoder.SlotTokens(slots[rows, positions], positions)
        got, cache = step(params, cache, step_tokens, shared)
        np.testing.assert_allclose(got, expected[row_of, positions], atol=2e-5)
        positions += 1


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_padding_may_be_on_either_side_and_holds_anything(name: str) -> None:
    random, vocab = np.random.RandomState(0), tiny_config(name).vocab_size
    row, out = random.randint(3, vocab, 9), []
    for starts in ((0, 11, 2), (2, 5, 7)):
        tokens = random.randint(0, vocab, (3, 20)).astype(np.int32)
        mask = np.zeros((3, 20), bool)
        for i, start in enumerate(starts):
            tokens[i, start : start + 9] = row
            mask[i, start : start + 9] = True
        out.append(shared_logits(name, tokens, mask)[mask].reshape(3, 9, -1))
    out = np.concatenate(out)
    np.testing.assert_allclose(out, np.broadcast_to(out[:1], out.shape), atol=1e-5)


def test_a_token_changes_nothing_before_itself() -> None:
    config, params = tiny_model("llama")
    tokens, mask = batch(config.vocab_size)
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab_size
    (_, a), (_, b) = (on_one_device(config, params, t, mask)[0] for t in (tokens, changed))
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_array_equal(a[:, :9][mask[:, :9]], b[:, :9][mask[:, :9]])
    assert np.abs(a[:, 9:] - b[:, 9:]).max(axis=(1, 2)).min() > 1e-2


def test_a_row_without_a_valid_token_is_finite_and_adds_no_gradient() -> None:
    """Two rows beside an empty one, and the third beside two, add up to the three: what empty rows
    added would be there three times."""
    config, params = tiny_model("gpt_oss")  # with biases, which padding has too
    tokens, mask = batch(config.vocab_size)
    parts = []
    for rows in (np.arange(3) < 2, np.arange(3) == 2):
        (loss, found), grad = on_one_device(config, params, tokens, mask & rows[:, None])
        assert np.isfinite(found).all()
        parts.append(jax.device_get((loss, grad)))
    both = jax.tree.map(np.add, *parts)
    assert_trees_close(config, mask, both, loss_and_grad(config, params, tokens, mask))


def test_a_window_as_long_as_the_sequence_is_full_attention_bit_for_bit() -> None:
    """Of rows and of streams whose prompts are shared; a token less changes the last token of the
    longest row alone."""
    config, params = tiny_model("llama")
    tokens, mask = batch(config.vocab_size)
    tokens, mask = (np.repeat(x[:, :16], 2, 0) for x in (tokens, mask))
    given = Sequences(tokens, mask, mask[:, 9:], group=2)

    @partial(jax.jit, static_argnums=(0, 1))
    def run(packed: bool, config: Any, params: Any) -> list[jax.Array]:
        rows = decoder.forward(config, params, tokens, mask)
        return [rows, *[decoder.forward_packed(config, params, pack_streams(given))] * packed]

    def of_window(window: int | None, packed: bool = True) -> list[np.ndarray]:
        kinds = (LayerKind(window), LayerKind())
        return [np.asarray(x) for x in run(packed, replace(config, kinds=kinds), params)]

    expected = of_window(None)
    for a, b in zip(of_window(16), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    changed = (np.abs(of_window(15, packed=False)[0] - expected[0]).max(-1) > 0) & mask
    assert changed[0, -1] and not changed[:, :-1].any() and not changed[2:].any()


def test_layers_that_are_kept_keep_their_kinds() -> None:
    config, _ = tiny_model("smollm3")
    assert [kind.rotates for kind in config.kinds] == [True, False, True, False, True]
    kept = config.with_layers((0, 3, 4))
    assert [kind.rotates for kind in kept.kinds] == [True, False, True]
    assert config.with_layers((1, 3)).kinds == (LayerKind(rotates=False),)


@pytest.mark.parametrize(
    # In the default suite updates with either are held against others without where a mesh divides
    # them: below, and in test_shared_prompts.py.
    ("name", "remat"),
    and_slow([], [("llama", "dots"), ("llama", "full"), ("gemma4_shared", "full")]),
)
def test_rematerialisation_changes_no_value(name: str, remat: str) -> None:
    config, params = tiny_model(name)
    tokens, mask = batch(config.vocab_size)
    plain = loss_and_grad(config, params, tokens, mask)
    got = loss_and_grad(config, params, tokens, mask, remat=remat)
    assert_trees_close(config, mask, got, plain)


@pytest.mark.parametrize("name", and_slow(["gpt_oss"], ["llama", "olmo2", "qwen3", "qwen3_moe"]))
def test_bfloat16_compute_is_near_float32(name: str) -> None:
    """bfloat16 rounds by up to 2^-9; these two layers amplify it, to a few percent of the logits'
    spread."""
    config, params = tiny_model(name)
    tokens, mask = batch(config.vocab_size)
    (_, exact), _ = on_one_device(config, params, tokens, mask)
    exact = np.asarray(exact)[mask]
    low = logits(config, params, tokens, mask, dtype=jnp.bfloat16)[mask]
    error = np.sqrt(np.mean((low - exact) ** 2) / np.var(exact))
    assert 0 < error < 0.05, error


@pytest.mark.parametrize(
    ("name", "axes"),
    and_slow(
        [
            ("gpt_oss", (1, 2, 1, 1, 4)),  # of others the logits: below
            ("qwen3_5_moe", (1, 1, 4, 1, 2)),  # tensor exceeds the key heads of a state
        ],
        [
            ("smollm", (2, 2, 2)),  # divides neither of 3 heads and 1 KV head
            ("olmo2", (1, 2, 4)),  # divides what the norms of q and k sum over
            ("qwen3", (1, 1, 8)),  # tensor exceeds the query heads
            # windows, two ropes, keys and values of other layers: also in test_shared_prompts.py
            ("gemma4_shared", (1, 2, 2)),
            # tensor exceeds the KV heads of either kind of layers; experts beside an MLP, divided
            ("gemma4_moe", (1, 1, 4, 1, 2)),
            ("llama", (2, 2, 2)),
            ("smollm", (2, 1, 2)),
            ("qwen3_5", (1, 2, 4)),
            ("qwen3_moe", (2, 1, 2, 1, 2)),
            ("gemma3", (2, 2, 2)),
            ("gemma4", (1, 2, 4)),
            ("gemma4_moe", (1, 2, 2, 1, 2)),
            ("qwen2", (1, 2, 4)),  # tensor exceeds the KV heads
            ("phi3", (1, 2, 2)),
            ("qwen3_moe", (1, 2, 2)),
            ("qwen3_moe", (1, 1, 1, 1, 2)),  # experts divided, three on each
            ("gpt_oss", (2, 1, 2, 1, 2)),
            ("gemma4", (2, 1, 2, 2)),  # tensor divides the KV heads of one kind
            ("gemma4_shared", (1, 2, 1, 4)),
        ],
    ),
)
def test_sharding_changes_no_value(name: str, axes: tuple[int, ...]) -> None:
    """Eight rows: three twice and two empty ones, so twice the loss of the three."""
    config, params = tiny_model(name)
    three = batch(config.vocab_size)
    once = jax.device_get(loss_and_grad(config, params, *three))
    expected = jax.tree.map(lambda x: 2 * x, once)
    mesh = make_mesh(*axes)
    _, sharded = tiny_model(name, mesh)
    eight = (np.concatenate([x, x, np.zeros_like(x[:2])]) for x in three)
    got = loss_and_grad(config, sharded, *eight, mesh=mesh, remat="full")
    assert_trees_close(config, three[1], got, expected)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("olmo2", (1, 2, 4)),  # divides what the norms of q and k sum over
        ("qwen3_5_moe", (1, 1, 8)),  # tensor exceeds all heads, those of states too
    ],
)
def test_sharding_changes_no_logit(name: str, axes: tuple[int, ...]) -> None:
    """In the default suite the gradients on meshes are those above, of kernels in
    test_attention.py, and of streams."""
    tokens, mask = batch(tiny_config(name).vocab_size)
    config, sharded = tiny_model(name, mesh := make_mesh(*axes))
    four = (np.concatenate([x, x[:1]]) for x in (tokens, mask))
    found = logits(config, sharded, *four, mesh=mesh)[:3]
    expected = shared_logits(name, tokens, mask)
    np.testing.assert_allclose(found[mask], expected[mask], atol=2e-5)


ROWS, WIDTH = 7, 31
TOKENS = ROWS * WIDTH
"""No width, nor positions times heads, and more than a layer is wide."""


@cache
def gradient_program(name: str, reduce_in_float32: bool) -> Any:
    """Of the logits' sum, in bfloat16."""
    config, params = model_of_its_kinds(name)
    config = replace(config, reduce_in_float32=reduce_in_float32)
    assert max(config.vocab_size, config.d_model, config.d_ff) < TOKENS
    tokens, mask = np.ones((ROWS, WIDTH), np.int32), np.ones((ROWS, WIDTH), bool)

    def loss(params: Any) -> jax.Array:
        hidden = decoder.forward(config, params, tokens, mask, dtype=jnp.bfloat16)
        return decoder.token_logits(config, params, hidden).astype(jnp.float32).sum()

    return jax.make_jaxpr(jax.grad(loss))(params).jaxpr


def sums_over(jaxpr: Any) -> list[tuple[str, int]]:
    """Lists dtype and number of terms of every sum in a program and those inside it."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "reduce_sum":
            array = equation.invars[0].aval
            terms = math.prod(array.shape[axis] for axis in equation.params["axes"])
            found.append((str(array.dtype), terms))
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            found += sums_over(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("name", and_slow(BLOCKS, but(BLOCKS)))
def test_gradients_of_bfloat16_compute_are_summed_over_tokens_in_float32(name: str) -> None:
    """CPUs sum bfloat16 in float32 whatever the program says, GPUs do as it says: so the program is
    read."""
    sums = sums_over(gradient_program(name, False))
    assert any(terms >= TOKENS for dtype, terms in sums if dtype == "float32")
    assert [terms for dtype, terms in sums if dtype == "bfloat16" and terms >= TOKENS] == []


def products_over(jaxpr: Any, terms: int) -> list[str]:
    """Lists the dtype of every product of so many terms in a program and those inside it."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            if math.prod(shape[axis] for axis in contracted) == terms:
                found.append(str(equation.outvars[0].aval.dtype))
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            found += products_over(inner, terms) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("name", and_slow(BLOCKS, but(BLOCKS)))
def test_a_kernels_gradient_is_reduced_in_float32_on_request(name: str) -> None:
    """A product over all tokens is what devices hold parts of, and add in its dtype."""
    found, on_request = (
        set(products_over(gradient_program(name, reduce), TOKENS)) for reduce in (False, True)
    )
    assert "bfloat16" in found
    assert on_request == {"float32"}


@pytest.mark.parametrize(
    "axes", [(2, 4, 1), (2, 2, 2), (2, 2, 1, 2), (2, 2, 1, 1, 2), (1, 2, 2, 1, 2)]
)
def test_the_gradient_of_the_embedding_is_scattered_and_never_whole_on_a_device(
    axes: tuple[int, ...],
) -> None:
    """Each device gets the sum of its own columns, whatever axes divide the tokens; several of a
    micro-batch are the same token, and one is of each end of the vocabulary."""
    config, params = tiny_model("llama")
    mesh, split = make_mesh(*axes), ("context",) if axes[3:] == (2,) else ()
    tokens = np.resize([0, 3, config.vocab_size - 1, 3], (8, 4)).astype(np.int32)
    weights = np.random.default_rng(0).standard_normal((8, 4, config.d_model)).astype(np.float32)

    def gradient(table: Any, mesh: Any = None) -> Any:
        def loss(table: Any) -> jax.Array:
            x, _ = decoder.embed_tokens(
                config, params | {"embed": table}, tokens, mesh, None, *split
            )
            return (x * weights).sum()

        return jax.grad(loss)(table)

    table = params["embed"]
    shardings = param_shardings(config, mesh)["embed"]
    on_mesh = jax.jit(partial(gradient, mesh=mesh), in_shardings=(shardings,))
    compiled = on_mesh.lower(table).compile()
    sums = re.findall(r"f32\[(\d+),(\d+)\]\S* all-reduce\(", compiled.as_text())
    of_a_device = (
        config.vocab_size // axes[2] * config.d_model // (axes[1] * (axes[3:4] or (1,))[0])
    )
    assert all(int(rows) * int(width) <= of_a_device for rows, width in sums), sums
    found = compiled(jax.device_put(table, shardings))["embedding"]
    expected = jax.jit(gradient)(table)["embedding"]
    np.testing.assert_allclose(found, expected, 1e-6, 1e-6)
    plain = np.zeros(expected.shape, np.float32)
    np.add.at(plain, tokens, weights)
    np.testing.assert_allclose(expected, plain, 1e-6, 1e-6)


@pytest.mark.parametrize("axes", [None, (2, 2, 1), (2, 1, 1, 1, 2)])
def test_the_gradient_of_a_frequent_token_is_summed_in_float32(
    axes: tuple[int, ...] | None,
) -> None:
    """Of rows that are read in bfloat16, in which sums of ones would end at 256."""
    config, params = tiny_model("llama")
    mesh, tokens = None if axes is None else make_mesh(*axes), np.full((4, 512), 5, np.int32)

    def total(table: Any) -> jax.Array:
        x, _ = decoder.embed_tokens(config, params | {"embed": table}, tokens, mesh, jnp.bfloat16)
        return x.astype(jnp.float32).sum()

    found = np.asarray(jax.jit(jax.grad(total))(params["embed"])["embedding"])
    np.testing.assert_array_equal(found[5], tokens.size)
    assert np.count_nonzero(found) == config.d_model
