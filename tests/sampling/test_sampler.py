"""Laws of drawing one token: what is drawn, how often, from which set, with which log-probs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow

from jaxrl.errors import UserError
from jaxrl.sampling.sampler import (
    ATTEMPT,
    BLOCK,
    Draw,
    SamplingParams,
    draw_tokens,
    first_key,
    pick,
    sample_keys,
    sampling_arrays,
    truncate,
    uniforms,
)

BASE = SamplingParams(max_new_tokens=1)


DRAWS = 16_000
"""Of one row, whose random numbers are then one program."""


@jax.jit
def numbers_of(key: jax.Array, prompts: jax.Array, samples: jax.Array, at: jax.Array) -> jax.Array:
    keys = jnp.broadcast_to(key, (len(prompts), 2))
    return uniforms(sample_keys(keys, prompts, samples), at)


def draws(logits: np.ndarray, sampling: SamplingParams) -> Draw:
    """`DRAWS` independent draws from one row of logits [V]."""
    knobs = sampling_arrays(sampling)
    ids = np.arange(DRAWS, dtype=np.int32)
    random = numbers_of(first_key(0, 0), ids, np.zeros_like(ids), np.zeros_like(ids))
    rows = np.tile(logits, (DRAWS, 1))
    return jax.device_get(jax.jit(draw_tokens)(rows, random, knobs))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def truncated(weights: jax.Array, knobs: Any) -> jax.Array:
    """`truncate` of weights [B, V]."""
    blocks = [weights[:, at : at + BLOCK].max(-1) for at in range(0, weights.shape[1], BLOCK)]
    return truncate(lambda: weights, jnp.stack(blocks, -1), weights.sum(-1), knobs)


def chi_square(tokens: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom over the tokens that can be drawn."""
    support = p > 0
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[~support].sum() == 0
    expected = p[support] * len(tokens)
    return float(((counts[support] - expected) ** 2 / expected).sum()), int(support.sum()) - 1


def reference_support(logits: np.ndarray, s: SamplingParams) -> np.ndarray:
    """The same truncation by sorting, in float64: top-k, then top-p of what is left, then min-p."""
    p = softmax(logits / s.temperature)
    kept = np.zeros(len(p), bool)
    order = np.argsort(-p, kind="stable")[: s.top_k or len(p)]
    mass = np.cumsum(p[order]) / p[order].sum()
    kept[order[: int(np.searchsorted(mass, s.top_p) + 1) if s.top_p < 1 else None]] = True
    return kept & (p >= s.min_p * p.max())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "vocab", and_slow([7, 300], [128])
)  # temperatures of one vocabulary share a program
def test_frequencies_follow_the_softmax(vocab: int, temperature: float) -> None:
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32)
    tokens = draws(logits, replace(BASE, temperature=temperature)).tokens
    statistic, freedom = chi_square(tokens, softmax(logits / temperature))
    # Mean and variance of chi-square are k and 2k; five sigmas.
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_truncated_frequencies_follow_the_renormalised_softmax() -> None:
    logits = np.random.default_rng(5).normal(size=40).astype(np.float32)
    s = replace(BASE, temperature=0.8, top_k=20, top_p=0.9, min_p=0.05)
    p = softmax(logits / 0.8) * reference_support(logits, s)
    statistic, freedom = chi_square(draws(logits, s).tokens, p / p.sum())
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 10**6},
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.01},
        {"min_p": 1.0},
        {"top_k": 30, "top_p": 0.7},
        {"top_p": 0.9, "min_p": 0.2, "temperature": 1.7},
        {"top_k": 12, "top_p": 0.95, "min_p": 0.03, "temperature": 0.3},
    ],
)
def test_truncation_keeps_exactly_the_set_of_its_definition(change: dict[str, float]) -> None:
    s = replace(BASE, **change)
    logits = 2 * np.random.default_rng(1).normal(size=(20, 257)).astype(np.float32)
    scaled = logits / s.temperature
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    kept = np.asarray(jax.jit(truncated)(weights, sampling_arrays(s))) > 0
    expected = np.stack([reference_support(row, s) for row in logits])
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("change", [{"top_k": 20}, {"top_k": 9000}, {"top_p": 0.9}, {"top_p": 0.3}])
def test_what_a_large_vocabulary_keeps_of_a_row_depends_on_no_other_row(
    change: dict[str, float],
) -> None:
    """Peaked rows, whose tokens are in few blocks of ids, beside flat ones, and one of ties."""
    s = replace(BASE, **change)
    spread = np.array([[0.01], [0.5], [1.0], [4.0], [12.0], [0.0]], np.float32)
    logits = spread * np.random.default_rng(2).normal(size=(6, 96 * BLOCK + 3)).astype(np.float32)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    run = jax.jit(truncated)
    kept = np.asarray(run(weights, sampling_arrays(s)))
    expected = [reference_support(row, s) for row in logits[:-1]]
    np.testing.assert_array_equal(kept[:-1] > 0, expected)
    assert (kept[-1] > 0).all()  # equally probable tokens stay together
    for row, alone in enumerate(kept):  # among copies of itself: the same program
        found = run(np.tile(weights[row], (6, 1)), sampling_arrays(s))
        np.testing.assert_array_equal(found, np.tile(alone, (6, 1)))


def test_equally_probable_tokens_stay_or_go_together() -> None:
    weights = np.array([[1.0, 0.5, 0.5, 0.25]], np.float32)
    kept = jax.jit(truncated)(weights, sampling_arrays(replace(BASE, top_k=2)))
    np.testing.assert_array_equal(kept, [[1.0, 0.5, 0.5, 0.0]])


@pytest.mark.parametrize("change", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}])
def test_both_log_probs_are_those_of_their_distributions(change: dict[str, float]) -> None:
    logits = np.random.default_rng(2).uniform(0, 2, size=30).astype(np.float32)
    s = replace(BASE, temperature=0.7, **change)
    draw = draws(logits, s)
    full = softmax(logits / 0.7)
    kept = full * reference_support(logits, s)
    tokens = draw.tokens
    np.testing.assert_allclose(draw.logprobs, np.log(full[tokens]), atol=1e-5)
    np.testing.assert_allclose(draw.sampler_logprobs, np.log(kept[tokens] / kept.sum()), atol=1e-5)
    seen = np.unique(tokens, return_index=True)[1]
    assert len(seen) == (kept > 0).sum()  # every token that is left was drawn: they must add up
    assert np.exp(draw.sampler_logprobs[seen]).sum() == pytest.approx(1, abs=1e-5)


def test_greedy_takes_the_argmax_whatever_the_truncation() -> None:
    logits = np.random.default_rng(3).normal(size=50).astype(np.float32)
    draw = draws(logits, replace(BASE, temperature=0.0, top_p=0.3, top_k=2))
    assert set(draw.tokens) == {int(logits.argmax())}
    # Full softmax at temperature 1; the distribution sampled from is a point mass.
    np.testing.assert_allclose(draw.logprobs, np.log(softmax(logits).max()), atol=1e-6)
    np.testing.assert_array_equal(draw.sampler_logprobs, 0)


@pytest.mark.parametrize("vocab", [BLOCK, 3 * BLOCK, 3 * BLOCK + 5])
def test_greedy_takes_the_first_of_equal_logits(vocab: int) -> None:
    """In whatever blocks of ids these are."""
    logits = np.random.default_rng(vocab).integers(-9, 3, (200, vocab)).astype(np.float32)
    knobs = sampling_arrays(replace(BASE, temperature=0.0))
    draw = jax.jit(draw_tokens)(logits, np.zeros((200, 2), np.float32), knobs)
    np.testing.assert_array_equal(draw.tokens, logits.argmax(-1))


def test_a_temperature_without_truncation_is_not_greedy() -> None:
    logits = np.zeros(10, np.float32)
    assert len(set(draws(logits, replace(BASE, temperature=0.7)).tokens)) == 10


def test_pick_never_takes_a_weight_of_zero() -> None:
    # The largest uniform number, the smallest, and weights that a float32 sum of 1e5 terms rounds.
    rng = np.random.default_rng(4)
    weights = np.where(rng.random((64, 5000)) < 0.3, rng.random((64, 5000)) ** 20, 0.0)
    weights = weights.astype(np.float32)
    blocks = np.pad(weights, ((0, 0), (0, -5000 % BLOCK))).reshape(64, -1, BLOCK)
    rows = np.arange(64)

    @jax.jit
    def picked(random: jax.Array) -> jax.Array:
        return pick(blocks.sum(-1), lambda block: jnp.asarray(blocks)[rows, block], random)

    edges = np.array([0.0, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    for first in edges:
        for second in edges:
            random = np.tile(np.array([first, second]), (64, 1))
            index = np.asarray(picked(random))
            assert (np.take_along_axis(weights, index[:, None], 1) > 0).all()


def test_random_bits_are_a_function_of_seed_step_prompt_sample_and_position() -> None:
    def numbers(seed: int, step: int, prompt: list[int], sample: list[int], at: int) -> np.ndarray:
        key = first_key(seed, step)
        # Three rows, of which some are not asked for: one program.
        arrays = (np.resize(x, 3).astype(np.int32) for x in (prompt, sample, [at]))
        return np.asarray(numbers_of(key, *arrays))[: len(prompt)]

    base = numbers(1, 2, [3, 9], [4, 4], 5)
    np.testing.assert_array_equal(base[0], numbers(1, 2, [7, 7, 3], [0, 1, 4], 5)[2])
    others = [
        numbers(2, 2, [3], [4], 5),
        numbers(1 + 2**32, 2, [3], [4], 5),
        numbers(1, 3, [3], [4], 5),
        numbers(1, 2, [4], [4], 5),
        numbers(1, 2, [3], [5], 5),
        numbers(1, 2, [3], [4], 6),
        numbers(2, 1, [4], [3], 5),
    ]
    distinct = {tuple(x[0]) for x in [base, *others]}
    assert len(distinct) == 1 + len(others)


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1, 2**62 - 1])
def test_the_first_key_is_that_of_jax(seed: int) -> None:
    for step, attempt in ((0, 0), (1, 0), (2**31 - 1, 0), (3, 2)):
        key = jax.random.key(np.uint32(seed % 2**32), impl="threefry2x32")
        parts = [seed >> 32, step, *((ATTEMPT, attempt) if attempt else ())]
        for part in parts:
            key = jax.random.fold_in(key, np.uint32(part))
        np.testing.assert_array_equal(jax.random.key_data(key), first_key(seed, step, attempt))


def test_every_attempt_has_random_bits_of_its_own_for_every_prompt() -> None:
    """Whatever the prompts' ids; the first attempt's are those of a key without one."""
    prompts = np.arange(512, dtype=np.int32)
    run = jax.jit(sample_keys)

    def keys(*attempt: int) -> list[tuple[int, ...]]:
        key = np.tile(first_key(1, 2, *attempt), (512, 1))
        return list(map(tuple, np.asarray(run(key, prompts, prompts)).tolist()))

    assert keys(0) == keys()
    assert len({key for attempt in range(5) for key in keys(attempt)}) == 5 * 512


def test_a_program_for_each_kind_of_draw_and_none_for_other_values() -> None:
    """Greedy, none, one or several of the truncations: what does not truncate has no loop in it,
    and what is greedy draws nothing. Nothing that a program decides depends on its arrays."""
    step = jax.jit(lambda *args: draw_tokens(*args))
    logits, random = np.zeros((2, 10), np.float32), np.full((2, 2), 0.5, np.float32)
    kinds: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (0, {}, {"temperature": 0.3}),
        (0, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 3, "top_p": 0.5}),
        (1, {"top_p": 0.9}, {"top_p": 0.2, "temperature": 2.0}),
        (2, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"top_k": 1, "top_p": 0.1, "min_p": 0.2}),
    ]
    for count, (loops, *kind) in enumerate(kinds, 1):
        for eos_ids in (), (1, 2, 3):
            for change in kind:
                knobs = sampling_arrays(replace(BASE, eos_ids=eos_ids, **change))
                step(logits, random, knobs)
        assert step._cache_size() == count
        lowered = step.lower(logits, random, knobs)
        assert lowered.as_text().count("stablehlo.while") == loops
        assert ("cumsum" in lowered.as_text()) == ("temperature" not in kind[0])
        assert " conditional(" not in lowered.compile().as_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0.*0 is greedy"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0.*above 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"stop": ("",)}, "stop="),
        ({"stop": "abc"}, "stop='abc'"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(BASE, **change)
