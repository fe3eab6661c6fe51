"""Slots that share a prompt's keys and values read what slots with copies of them read."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from prompt_of_a_slot import behind, interpret_step_kernels, seats_of
from tiny_models import NAMES, make_mesh, model_of_its_kinds

from jaxrl.models import attention, decoder, flash_decode
from jaxrl.models.config import DecoderConfig
from jaxrl.models.family import LayerKind
from jaxrl.models.kernels import CPU, Target
from jaxrl.models.shared_prompts import Pages, Seats, shared_attender, why_not_paged

H200, TPU = Target("gpu", (9, 0)), Target("tpu")
LENGTHS = np.array([70, 0, 128], np.int32)
"""Keys of three prompts: the second has none, as one of a single token."""
PROMPT_OF = np.array([2, 0, 0, 1, 2, 0, 2, 1])
OWN = np.array([0, 3, 63, 5, 1, 9, 64, 127], np.int32)
"""Where the tokens of the slots are, behind their prompts."""


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def paged(own: np.ndarray, at: np.ndarray, shards: int, size: int) -> tuple[np.ndarray, Pages]:
    """The keys of slots [B,KV,S,H] in a pool of pages in random order, some of which are free, and
    what free pages and the ends of others hold is anything."""
    each, width = len(own) // shards, own.shape[2] // size
    pages = each * width + 3
    rng = np.random.default_rng(0)
    pool = 9 + np.zeros((shards, pages, own.shape[1], size, own.shape[3]), np.float32)
    owners, firsts = np.full((shards, pages), -1, np.int32), np.zeros((shards, pages), np.int32)
    table = np.full((len(own), width + 1), -1, np.int32)
    for shard in range(shards):
        free = rng.permutation(pages).tolist()
        for slot in range(shard * each, (shard + 1) * each):
            for number in range(at[slot] // size + 1):
                page, first = free.pop(), number * size
                pool[shard, page] = own[slot, :, first : first + size]
                owners[shard, page], firsts[shard, page] = slot % each, first
                table[slot, number] = page
    return pool.reshape(-1, *pool.shape[2:]), Pages(owners.reshape(-1), firsts.reshape(-1), table)


def given(with_sinks: bool) -> tuple[Any, ...]:
    """Queries, the keys and values of slots, those of prompts, and sinks."""
    slots, heads, kv, width, h = 8, 4, 2, 128, 16
    own = random(slots, kv, width, h), random(8, kv, 128, h) + 1
    prompts = random(3, kv, width, h) - 1, random(3, kv, width, h) + 2
    sinks = (np.array([0.5, -1.0, 3.0, -20.0], np.float32),) * with_sinks
    return random(slots, 1, heads, h), own, prompts, sinks


@cache
def of_copies(window: int | None, with_sinks: bool) -> np.ndarray:
    """What slots read that have copies of their prompts."""
    q, owns, prompts, sinks = given(with_sinks)
    whole = []
    for own, shared in zip(owns, prompts, strict=True):
        slots, kv, width, h = own.shape
        both = np.zeros((slots, kv, 2 * width, h), np.float32)
        for slot, prompt in enumerate(PROMPT_OF):
            n, m = LENGTHS[prompt], OWN[slot] + 1
            both[slot, :, :n] = shared[prompt, :, :n]
            both[slot, :, n : n + m] = own[slot, :, :m]
        whole.append(both)
    k, v = (np.swapaxes(x, 1, 2) for x in whole)
    positions = (LENGTHS[PROMPT_OF] + OWN)[:, None, None]
    seen = attention.reach_mask(np.arange(256)[None, None], positions, window)
    return np.asarray(jax.jit(attention.attention)(q, k, v, np.asarray(seen), *sinks))


TERMS = [
    (None, 80, (2, 1, 2), True, True),
    *((kernel, 80, (1, 1, 1), False, False) for kernel in ("split-k", "flash-decode")),
    *((kernel, None, (2, 1, 4), True, True) for kernel in ("split-k", "flash-decode")),
]
MORE_TERMS = [
    (kernel, window, axes, with_sinks, in_pages)
    for kernel, window, axes in [
        *((None, window, (1, 1, 1)) for window in (None, 2, 80)),
        *((None, window, (2, 1, 2)) for window in (None, 2, 80)),
        (None, None, (2, 1, 4)),
        *((kernel, None, (1, 1, 1)) for kernel in ("split-k", "flash-decode")),
        *((kernel, 80, (1, 1, 1)) for kernel in ("split-k", "flash-decode")),
        *((kernel, None, (2, 1, 4)) for kernel in ("split-k", "flash-decode")),
    ]
    for with_sinks, in_pages in ((False, False), (True, True), (False, True), (True, False))
    if not (in_pages and kernel is not None and window is not None)  # refused: `why_not_paged`
]


@pytest.mark.parametrize(
    ("kernel", "window", "axes", "with_sinks", "in_pages"),
    and_slow(TERMS, [case for case in MORE_TERMS if case not in TERMS]),
    ids=str,
)
def test_attention_in_two_terms_is_attention_to_copies(
    kernel: Any,
    window: int | None,
    axes: tuple[int, int, int],
    with_sinks: bool,
    in_pages: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever stands behind a prompt or a token; prompts without keys, seats that are free, heads
    and slots divided by a mesh, and sinks, which count once."""
    monkeypatch.setattr(flash_decode, "BLOCK_BYTES", 1 << (16 if in_pages else 14))  # four pages
    interpret_step_kernels(monkeypatch)
    q, (k, v), (prompt_k, prompt_v), sinks = given(with_sinks)
    expected = of_copies(window, with_sinks)
    positions = LENGTHS[PROMPT_OF] + OWN
    mesh = None if axes == (1, 1, 1) else make_mesh(*axes)
    shards, pages = axes[0], None
    if in_pages:
        (k, pages), (v, _) = (paged(x, OWN, shards, 64) for x in (k, v))
        pages = Pages(*map(jnp.asarray, pages))
    attend = shared_attender(
        kernel,
        jnp.asarray(positions),
        jnp.asarray(OWN),
        Seats(*map(jnp.asarray, seats_of(PROMPT_OF, LENGTHS, shards))),
        mesh,
        window,
        pages,
    )
    pairs = [(own, np.tile(of, (shards, 1, 1, 1))) for own, of in ((k, prompt_k), (v, prompt_v))]
    found = jax.jit(attend)(q, *pairs, *sinks)
    np.testing.assert_allclose(found, expected, 2e-6, 2e-6)


FEW = ["gemma4_unified"]
"""With layers of two shapes, and keys that are values. In test_decoder.py slots that share prompts
decode what whole sequences have, with windows, sinks, experts, layers that borrow, and layers with
a state: others are made of the same parts."""


@pytest.mark.parametrize("name", and_slow(FEW, [name for name in NAMES if name not in FEW]))
def test_every_family_decodes_with_prompts_that_slots_share(name: str) -> None:
    """Two prompts of three samples each, three tokens behind them: hidden states are those of slots
    with a row each. Families with windows, sinks, experts, states, and layers that borrow among
    them."""
    config, params = model_of_its_kinds(name, layout="unstacked")
    lengths, prompt_of = np.array([9, 4], np.int32), np.array([0, 1, 1, 0, 0, 1])
    rng = np.random.default_rng(0)
    prompts, tokens = (
        rng.integers(0, config.vocab_size, shape).astype(np.int32) for shape in ((2, 10), (3, 6))
    )
    mask = np.arange(10)[None] < lengths[:, None]
    held = jax.device_get(jax.jit(partial(decoder.prefill, config))(params, prompts, mask)[1])
    starts = lengths[prompt_of]
    copied, alone = behind(jax.tree.map(lambda x: x[prompt_of], held), starts, positions=8)
    own = copied
    shared = decoder.Shared(held, seats_of(prompt_of, lengths, 1), starts)
    step = jax.jit(partial(decoder.decode_step, config))
    for i, row in enumerate(tokens):
        tokens_at = decoder.SlotTokens(row, starts + i)
        expected, copied = step(params, copied, tokens_at, alone)
        found, own = step(params, own, tokens_at, shared)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, 2e-5, 2e-5 * float(np.abs(expected).max()))


WINDOWS = (LayerKind(window=6), LayerKind())
PLAIN = DecoderConfig("qwen2", 32, 64, 2, 4, 2, 128, 128)


@pytest.mark.parametrize(
    ("config", "target", "options", "why"),
    [
        (PLAIN, CPU, {}, None),
        (PLAIN, H200, {}, None),
        (PLAIN, TPU, {}, None),
        (PLAIN, H200, {"episodes": True}, "environments"),
        ("windows", CPU, {}, None),
        ("windows", H200, {}, "window"),
        ("windows", TPU, {}, "window"),
    ],
    ids=str,
)
def test_what_cannot_be_in_pages_says_why(
    config: Any, target: Target, options: dict[str, Any], why: str | None
) -> None:
    if config == "windows":
        config = DecoderConfig("qwen2", 32, 64, 2, 4, 2, 128, 128, kinds=WINDOWS)
    found = why_not_paged(config, target, "bfloat16", **options)
    assert found is None if why is None else why in found
