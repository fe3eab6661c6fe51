"""One token from logits: temperature, top-k, top-p, min-p, greedy. Their values are traced; which
of them there are is not, so that a program holds nothing that its draws do not ask for.

A token is drawn by inverting the cumulative distribution with two uniform numbers of its own (seed,
step, prompt, sample, position): one picks a block of `BLOCK` token ids by its mass, the other a
token inside the block. That takes one hash and two reductions where the Gumbel-max trick would hash
once for each of V logits, and two levels keep the relative precision of float32 within a block.
Truncation sorts nothing: the smallest weight kept is found by bisection over float32 bit patterns,
among the few blocks that hold the most probable tokens where these are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

from jaxrl.errors import UserError
from jaxrl.losses.normaliser import Normaliser, peaks_and_sums

BLOCK = 128
"""Token ids in a block of the two-level draw; it divides the vocabularies of the usual models."""
CANDIDATES = 64
"""Blocks in which truncation looks first: those that hold the most probable tokens."""
EOS_SLOTS = 8
"""EOS ids are padded to a multiple of this with -1, so that another set of ids compiles nothing."""
ATTEMPT = 2**32 - 1
"""Folded in where prompt ids, which are below 2^31, are otherwise: no prompt's key begins a further
attempt's."""
ONE_BITS = 0x3F800000
"""Bit pattern of float32 1.0, the largest weight; patterns of non-negative floats order as
integers."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn."""

    max_new_tokens: int
    """Most tokens in a completion, EOS included."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Of those, keep the fewest most probable tokens that hold this share of the mass; 1 keeps
    all."""
    min_p: float = 0.0
    """Of those, keep tokens with at least this fraction of the highest probability; 0 keeps all."""
    eos_ids: tuple[int, ...] = ()
    """A completion ends with any of these."""
    stop: tuple[str, ...] = ()
    """A completion ends where its text holds any of these."""

    def __post_init__(self) -> None:
        finite = self.temperature >= 0 and math.isfinite(self.temperature)
        texts = not isinstance(self.stop, str) and all(isinstance(x, str) and x for x in self.stop)
        for name, holds, limit in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", finite, "finite and not below 0 (0 is greedy)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all)"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1] (0 keeps all tokens)"),
            ("stop", texts, "a tuple of strings that are not empty"),
        ):
            if not holds:
                raise UserError(f"{name}={getattr(self, name)!r}: must be {limit}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """`SamplingParams` as arrays, so that another value compiles nothing. What is None is not done,
    in a program of its own."""

    temperature: Array | None
    """None is greedy; the next three are None then too."""
    top_p: Array | None
    min_p: Array | None
    top_k: Array | None
    eos_ids: Array
    """[E] int32, padded with -1."""


class Draw(NamedTuple):
    """A token for each row."""

    tokens: Array
    """[B] int32."""
    logprobs: Array
    """[B] float32, nats: full softmax at the sampling temperature (at 1 when greedy)."""
    sampler_logprobs: Array
    """[B] float32, nats: under the truncated distribution (a point mass, so 0, when greedy)."""


def sampling_arrays(sampling: SamplingParams) -> SamplingArrays:
    """Makes the traced form of `sampling`."""
    width = EOS_SLOTS * max(1, -(-len(sampling.eos_ids) // EOS_SLOTS))
    eos_ids = (*sampling.eos_ids, *[-1] * (width - len(sampling.eos_ids)))
    s, draws = sampling, sampling.temperature > 0
    arrays: dict[str, Any] = {
        "temperature": np.float32(s.temperature) if draws else None,
        "top_p": np.float32(s.top_p) if draws and s.top_p < 1 else None,
        "min_p": np.float32(s.min_p) if draws and s.min_p > 0 else None,
        "top_k": np.int32(min(s.top_k, 2**31 - 1)) if draws and s.top_k > 0 else None,
        "eos_ids": np.array(eos_ids, np.int32),
    }
    return SamplingArrays(**jax.device_put(arrays))  # `jnp.float32` would compile a program


@lru_cache(maxsize=64)
def first_key(seed: int, step: int, attempt: int = 0) -> np.ndarray:
    """Returns the threefry key with which the key of every token of an attempt at a step begins,
    [2] uint32. It is computed here, as on a device it would wait for what another role runs
    there."""
    key = 0, seed % 2**32
    for part in ((seed >> 32) % 2**32, step, *((ATTEMPT, attempt) if attempt else ())):
        key = _fold_in(key, part)
    return np.array(key, np.uint32)


def _fold_in(key: tuple[int, int], data: int) -> tuple[int, int]:
    """Computes `jax.random.fold_in` of a threefry key: 20 rounds of Threefry-2x32 (Salmon et al.
    2011) on (0, data)."""
    keys, low = (*key, key[0] ^ key[1] ^ 0x1BD11BDA), 2**32 - 1
    x, y = key[0], (data + key[1]) & low
    for group in range(1, 6):
        for turn in (13, 15, 26, 6) if group % 2 else (17, 29, 16, 24):
            x = (x + y) & low
            y = ((y << turn | y >> (32 - turn)) & low) ^ x
        x, y = (x + keys[group % 3]) & low, (y + keys[(group + 1) % 3] + group) & low
    return x, y


def sample_keys(
    first: UInt32[Array, "B 2"], prompts: Int32[Array, " B"], samples: Int32[Array, " B"]
) -> UInt32[Array, "B 2"]:
    """Computes keys of (seed, step, attempt, prompt id, sample id) from `first_key` of the first
    three."""
    keys = jax.random.wrap_key_data(first, impl="threefry2x32")
    for ids in (prompts, samples):
        keys = jax.vmap(jax.random.fold_in)(keys, ids)
    return jax.random.key_data(keys)


def uniforms(keys: UInt32[Array, "B 2"], positions: Int32[Array, " B"]) -> Float[Array, "B 2"]:
    """Draws two numbers in [0, 1) for each row: a function of its key and of the position in its
    completion alone."""
    rows = jax.random.wrap_key_data(keys, impl="threefry2x32")
    folded = jax.vmap(jax.random.fold_in)(rows, positions)
    return jax.vmap(partial(jax.random.uniform, shape=(2,)))(folded)


def draw_tokens(
    logits: Float[Array, "B V"], random: Float[Array, "B 2"], knobs: SamplingArrays
) -> Draw:
    """Draws one token for each row, by numbers from `uniforms` and knobs from `sampling_arrays`."""
    scale = 1.0 if knobs.temperature is None else 1 / knobs.temperature  # as in the losses
    blocks = _blocks(logits, -jnp.inf)
    # Without the barrier XLA would fuse what follows with reads of all logits.
    highest, sums = jax.lax.optimization_barrier(peaks_and_sums(blocks, scale))
    top = highest.max(-1, keepdims=True)

    def weigh(z: Array, top: Array = top) -> Array:
        return jnp.exp(scale * (z - top))

    def inside(block: Array) -> Array:  # the largest is 1, however improbable the block
        z = _take_block(blocks, block)
        return weigh(z, z.max(-1, keepdims=True))

    sums = sums * weigh(highest)
    total = kept_total = sums.sum(-1)
    if knobs.temperature is None:
        block = jnp.argmax(highest, -1)
        tokens = block * BLOCK + jnp.argmax(_take_block(blocks, block), -1)
    elif knobs.top_k is knobs.top_p is knobs.min_p is None:
        tokens = pick(sums, inside, random)
    else:
        # A CPU stores the weights for the truncation: to add these up is quicker.
        total = jax.lax.platform_dependent(
            total, cpu=lambda _: _block_sums(weigh(logits)).sum(-1), default=lambda x: x
        )
        kept = truncate(lambda: weigh(logits), weigh(highest), total, knobs)
        sums = _block_sums(kept)
        kept_total = sums.sum(-1)
        tokens = pick(sums, lambda block: _take_block(_blocks(kept), block), random)
    tokens = tokens.astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], -1)
    logprobs, sampled = (
        Normaliser(top[:, 0], jnp.log(mass)).logprobs(chosen, scale)[:, 0]
        for mass in (total, kept_total)
    )
    greedy = knobs.temperature is None
    return Draw(tokens, logprobs, jnp.zeros_like(logprobs) if greedy else sampled)


def truncate(
    weigh: Callable[[], Float[Array, "B V"]],
    highest: Float[Array, "B blocks"],
    total: Float[Array, " B"],
    knobs: SamplingArrays,
) -> Float[Array, "B V"]:
    """Returns weights with 0 where top-k, then top-p of what is left, then min-p drop the token.
    Tokens as probable as the last one kept are kept.

    Args:
        weigh: computes unnormalised probabilities whose largest is 1 in each row. It is called
            wherever they are read: computed again from the logits they cost no memory; stored, they
            would be written once and read several times.
        highest: the largest weight of each block of token ids.
        total: the sum of all weights.
    """
    weights = weigh()
    held, beyond = _candidates(weights, highest)
    least = jnp.zeros(len(weights), jnp.int32)

    def search(goal: Array, counted: bool = False) -> Array:
        inside = _bisect(_zero_below(least, held), goal, counted)
        if beyond is None:
            return inside
        # What is more probable than the last candidate block's best is in a candidate block. Each
        # row says for itself whether that is enough: its tokens do not depend on other rows.
        sure = inside > beyond
        return jax.lax.cond(
            sure.all(),
            lambda: inside,
            lambda: jnp.where(sure, inside, _bisect(_zero_below(least, weigh()), goal, counted)),
        )

    if knobs.top_k is not None:
        goal = jnp.minimum(knobs.top_k.astype(jnp.float32), jnp.float32(weights.shape[-1]))
        least = search(jnp.broadcast_to(goal, least.shape), counted=True)
        total = _block_sums(_zero_below(least, weights)).sum(-1)
    if knobs.top_p is not None:
        least = jnp.maximum(least, search(knobs.top_p * total))
    weights = _zero_below(least, weights)
    return weights if knobs.min_p is None else jnp.where(weights >= knobs.min_p, weights, 0.0)


def pick(
    sums: Float[Array, "B blocks"],
    inside: Callable[[Int[Array, " B"]], Float[Array, "B BLOCK"]],
    random: Float[Array, "B 2"],
) -> Int[Array, " B"]:
    """Draws a token id in proportion to weights by two-level inversion; never one of weight 0.

    Args:
        sums: of the weights of each block of token ids.
        inside: returns the weights of the ids in one block of each row.
    """
    block = _invert(sums, random[:, 0])
    return block * BLOCK + _invert(inside(block), random[:, 1])


def _invert(weights: Array, random: Array) -> Array:
    """Returns the first index whose cumulative weight exceeds random * total, for weights [B, n]
    and random [B].

    A parallel cumulative sum may fall by a rounding, hence the total is the largest sum at a
    positive weight, and an index of weight 0 is never taken.
    """
    cumulative = jnp.where(weights > 0, jnp.cumsum(weights, -1), 0.0)
    target = random[:, None] * cumulative.max(-1, keepdims=True)
    return jnp.argmax(cumulative > target, -1)


def _blocks(x: Array, beyond: float = 0.0) -> Array:
    """Cuts x [B, V] into blocks [B, blocks, BLOCK], with `beyond` behind the last."""
    rows, vocab = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -vocab % BLOCK)), constant_values=beyond)
    return padded.reshape(rows, -1, BLOCK)


def _take_block(blocks: Array, block: Array) -> Array:
    """Returns one block [B, BLOCK] of each row of blocks [B, blocks, BLOCK]."""
    return jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]


def _block_sums(weights: Array) -> Array:
    """Sums each block of weights [B, V]. Behind the barrier, XLA adds up the sums of blocks; it
    would read all weights again for their total."""
    return jax.lax.optimization_barrier(_blocks(weights).sum(-1))


def _zero_below(least: Array, weights: Array) -> Array:
    """Returns the weights [B, V] with 0 where they are below that of the bit pattern [B]."""
    return jnp.where(_bits(weights) >= least[:, None], weights, 0.0)


def _candidates(weights: Array, highest: Array) -> tuple[Array, Array | None]:
    """Returns the weights in the blocks that hold the most probable tokens, and the bit pattern [B]
    of the largest weight in the last of these, above which no other block has any; None where
    these are all blocks."""
    if highest.shape[1] <= CANDIDATES:
        return weights, None
    best, chosen = jax.lax.top_k(highest, CANDIDATES)
    held = jnp.take_along_axis(_blocks(weights), chosen[:, :, None], 1)
    return held.reshape(len(weights), -1), _bits(best[:, -1])


def _bisect(weights: Array, goal: Array, counted: bool) -> Array:
    """Returns the bit pattern [B] int32 of the smallest of the fewest largest weights [B, n] that
    reach goal [B] together.

    Args:
        counted: the goal is a number of tokens, not a sum of their weights.
    """
    bits, amount = _bits(weights), jnp.ones_like(weights) if counted else weights

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        enough = jnp.where(bits >= middle[:, None], amount, 0.0).sum(-1) >= goal
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros_like(goal, jnp.int32)
    bounds = low, jnp.full_like(low, ONE_BITS + 1)
    search = partial(jax.lax.fori_loop, 0, 31, halve)
    # The host launches each kernel in a loop of a GPU program; without the loop they are part of
    # one CUDA graph. Elsewhere it would only take longer to compile.
    unrolled = partial(search, unroll=True)
    return jax.lax.platform_dependent(bounds, cuda=unrolled, default=search)[0]


def _bits(weights: Array) -> Array:
    return jax.lax.bitcast_convert_type(weights, jnp.int32)
