"""Losses on logits = hidden @ head.T, computed with their gradients for one chunk of tokens at a
time, so that no array [B, C, V] ever exists.

A `Term` computes a loss on the logits of some tokens, and the gradient of that loss with respect to
these logits. This file runs a term over all tokens, on one device or a mesh:

- `token_stats` runs forward only. On a mesh the head is gathered once, before the loop.
- `fused_gradients` computes values and gradients in one scan over chunks of tokens, with four
  products with a head, and sums the head's gradient in a float32 array of the head's size.
- `tiled_gradients` computes gradients from what `token_stats` saved, in one loop over tiles of the
  *vocabulary*, each with all tokens. It computes the logits a second time, but each tile of the
  head's gradient is complete when it is written, so that it needs no float32 accumulator.

`loss_values` is differentiable: by `fused_gradients` or, where the `ShardedTerm` is `lean`, by
`token_stats` and `tiled_gradients`.

Rows are split over the axes `ROWS` and their tokens over "context", the vocabulary over "tensor",
and a head's width over ("fsdp", "context") where these divide it, as in
models/parameters.py. Sizes that a mesh does not divide are padded: rows and tokens with masked
tokens, the vocabulary with columns of `MIN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int

from jaxrl.losses.divergence import MIN
from jaxrl.losses.normaliser import Normaliser, Scale, peaks_and_sums
from jaxrl.sharding.axes import COPIES, ROWS, TOKENS, WEIGHTS
from jaxrl.types import Array, Tree

CHUNK = 256
"""Tokens a device projects on the vocabulary at once: 156 MB for a float32 array at V = 152k."""

Softcap = float | Float[Array, ""] | None
"""c > 0 of logits c tanh(z / c), z being hidden @ head.T; None: the logits are z."""

PerToken = dict[str, Array]
"""Arrays by name, or trees of them: each [B, C, ...] or, for the n tokens of a chunk, [n, ...]."""


class ShardOptions(TypedDict, total=False):
    """How a term runs (`shard_inputs`)."""

    chunk: int
    """Tokens that a device projects on the vocabulary at once; `CHUNK` by default."""
    mesh: Mesh | None
    """Axes data, fsdp, tensor and context; None: one device."""
    v: int | None
    """Narrows the vocabulary to its first v rows; probabilities are normalised over these."""
    lean: bool
    """For losses. False, the default, computes the gradients in the forward pass (4 products with a
    head), which needs a float32 accumulator of the head's size; True keeps nothing between forward
    and backward and computes the logits again, by tiles of the vocabulary (6 products)."""


class LogitOptions(ShardOptions, total=False):
    """Options of all that takes hidden states and heads."""

    temperature: float | Array
    """Divides the logits; may be traced. 1 by default."""
    softcap: Softcap | Sequence[Softcap]
    """One for each model where there are several. May be traced."""


@dataclass(frozen=True)
class VocabShard:
    """Logits of a slice of the vocabulary: what one device, or one tile of one device, sees. They
    are not divided by the temperature: it divides the differences that matter (`logprobs`).

    Columns of a logits array stand for the token ids `start` ... `start + size - 1`. The rest of
    the vocabulary may lie on other devices (mesh axis `tensor`): sums, maxima and look-ups by id
    then reduce over that axis. An id of another slice is never looked up on, or added to, a row of
    this one.
    """

    start: Array | int
    size: int
    vocab: int
    """V: columns of ids from V on are padding and hold `MIN`."""
    padded: bool
    """Whether there may be such columns."""
    axes: tuple[str, ...] = ()
    """Mesh axes over which the other slices are spread."""
    scale: Scale = 1.0

    def logits(
        self,
        hidden: Float[Array, "n D"],
        rows: Float[Array, "size D"],
        softcap: Float[Array, ""] | None = None,
    ) -> Float[Array, "n size"]:
        """Computes hidden @ rows.T, accumulated in float32 whatever the dtype of the operands.

        Args:
            softcap: c > 0: the product z is replaced by c tanh(z / c) (Gemma 2, arXiv 2408.00118,
                section 2).
        """
        z = jax.lax.dot_general(
            hidden, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        if softcap is not None:
            z = softcap * jnp.tanh(z / softcap)
        if not self.padded:
            return z
        return jnp.where((self.start + jnp.arange(self.size) < self.vocab)[None, :], z, MIN)

    def total(self, x: Float[Array, "n size"]) -> Float[Array, " n"]:
        return jax.lax.psum(x.sum(-1), self.axes)

    def peak(self, x: Float[Array, "n size"]) -> Float[Array, " n"]:
        return jax.lax.pmax(x.max(-1), self.axes)

    def normaliser(self, z: Float[Array, "n size"]) -> Normaliser:
        """Computes the normaliser of the whole vocabulary."""
        local_peak, total = peaks_and_sums(z, self.scale)
        if not self.axes:
            return Normaliser(local_peak, jnp.log(total))
        peak = jax.lax.pmax(local_peak, self.axes)
        total = jax.lax.psum(total * jnp.exp(self.scale * (local_peak - peak)), self.axes)
        return Normaliser(peak, jnp.log(total))

    def logprobs(self, z: Float[Array, "n size"], normaliser: Normaliser) -> Array:
        """Computes the log-probs [n, size], nats, at the temperature."""
        return normaliser.logprobs(z, self.scale)

    def logprobs_at(
        self, z: Float[Array, "n size"], normaliser: Normaliser, ids: Int[Array, "n K"]
    ) -> Float[Array, "n K"]:
        """Returns the log-probs of token ids; `MIN` for an id that no slice has."""
        return self.logprobs_of(self.values_at(z, ids), normaliser)

    def logprobs_of(self, logits: Float[Array, "n K"], normaliser: Normaliser) -> Array:
        """Computes the log-probs [n, K] of some logits; `MIN` where they are."""
        return jnp.where(logits > MIN, self.logprobs(logits, normaliser), MIN)

    def entropy(self, z: Float[Array, "n size"], normaliser: Normaliser) -> Float[Array, " n"]:
        """Computes the entropy, nats, at the temperature."""
        logprobs = self.logprobs(z, normaliser)
        return -self.total(jnp.exp(logprobs) * logprobs)

    def values_at(self, z: Float[Array, "n size"], ids: Int[Array, "n K"]) -> Float[Array, "n K"]:
        """Returns the values at token ids; `MIN` for an id that no slice has."""
        local = self._local(ids)
        values = jnp.take_along_axis(z, jnp.minimum(local, self.size - 1), -1)
        return jax.lax.pmax(jnp.where(local < self.size, values, MIN), self.axes)

    def mask_ids(self, z: Float[Array, "n size"], ids: Int[Array, "n K"]) -> Float[Array, "n size"]:
        """Returns `z` with `MIN` at the token ids."""
        return z.at[jnp.arange(z.shape[0])[:, None], self._local(ids)].set(MIN, mode="drop")

    def add(
        self, z: Float[Array, "n size"], ids: Int[Array, "n K"], values: Float[Array, "n K"]
    ) -> Float[Array, "n size"]:
        """Returns `z` with `values` added at the token ids."""
        return z.at[jnp.arange(z.shape[0])[:, None], self._local(ids)].add(values, mode="drop")

    def topk(self, z: Float[Array, "n size"], k: int) -> tuple[Array, Array]:
        """Finds the k largest values and their token ids, largest first, and the smaller id first
        among equals."""
        values, ids = jax.lax.top_k(z, min(k, self.size))
        ids = ids + self.start
        if not self.axes:
            return values, ids
        values = jax.lax.all_gather(values, self.axes, axis=1, tiled=True)
        ids = jax.lax.all_gather(ids, self.axes, axis=1, tiled=True)
        values, winners = jax.lax.top_k(values, k)
        return values, jnp.take_along_axis(ids, winners, -1)

    def _local(self, ids: Int[Array, "n K"]) -> Int[Array, "n K"]:
        """Returns the column of each id; `size`, which is out of bounds, for the ids of other
        slices."""
        local = ids - self.start
        return jnp.where((local >= 0) & (local < self.size), local, self.size)


def add_tail(
    z: Float[Array, "n size"], normaliser: Normaliser, ids: Int[Array, "n K"], columns: VocabShard
) -> tuple[Float[Array, "n K+1"], Normaliser]:
    """Computes the log-probs of the K ids and, last, of all others together; and the normaliser of
    the others."""
    others = columns.normaliser(columns.mask_ids(z, ids))
    tail = columns.logprobs_of(others.peak[:, None], normaliser) + others.log_sum[:, None]
    listed = columns.logprobs_at(z, normaliser, ids)
    return jnp.concatenate([listed, jnp.maximum(tail, MIN)], -1), others


def spread_tail(
    z: Float[Array, "n size"],
    ids: Int[Array, "n K"],
    gradient: Float[Array, "n K+1"],
    others: Normaliser,
    columns: VocabShard,
) -> Float[Array, "n size"]:
    """Computes the gradient with respect to the logits from `gradient`, the one with respect to the
    logits of `add_tail`'s outcomes.

    A listed token takes its own; the others share the tail's by their probability within the tail.
    """
    share = jnp.exp(columns.logprobs(columns.mask_ids(z, ids), others))
    return columns.add(share * gradient[:, -1:], ids, gradient[:, :-1])


class FrozenInputs(NamedTuple):
    """Inputs without a gradient."""

    mask: Bool[Array, "B C"]
    scale: Float[Array, ""]
    """1 / temperature."""
    tokens: PerToken
    softcaps: tuple[Float[Array, ""] | None, ...] = ()
    """Softcaps of the student's logits and of each teacher's (`VocabShard.logits`); () where all
    are None."""
    teacher_hidden: tuple[Float[Array, "B C Dt"], ...] = ()
    """One array for each teacher."""
    teacher_head: tuple[Float[Array, "V Dt"], ...] = ()
    """As many."""
    outcomes: tuple[Int[Array, " size"] | None, ...] | None = None
    """The outcome of each token of the model's vocabulary and of the teacher's
    (`losses.token_spans`)."""


class TokenStats(NamedTuple):
    """The results of `Term.measure` on some tokens."""

    values: PerToken
    """For the caller; the key "loss" holds the loss."""
    saved: PerToken
    """For `Term.gradient`."""


class Term:
    """A loss on the logits of each token. Hashable, since it is part of a compiled function's key.

    `z` [n, size] are the logits of n tokens; `columns` are their token ids, and know the
    temperature. `tokens` are `FrozenInputs.tokens` of the same tokens and, if there are teachers'
    heads, the tuple of these teachers' logits, "teacher_z"; with `FrozenInputs.outcomes`, these as
    "outcomes".
    """

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        raise NotImplementedError

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        """Computes temperature * d loss / d z, [n, size]. No collectives: `columns` may be a tile
        of a device's slice."""
        raise NotImplementedError


@dataclass(frozen=True)
class ShardedTerm:
    """A term, and how to run it. Hashable."""

    term: Term
    vocab: int
    """V: rows of the heads that take part (there may be more, for padding)."""
    chunk: int
    mesh: Mesh | None = None
    lean: bool = False

    def axes(self, *names: str) -> tuple[str, ...]:
        """Returns the axes of the mesh that hold more than one device."""
        sizes = {} if self.mesh is None else self.mesh.shape
        return tuple(a for a in names if sizes.get(a, 1) > 1)

    def on_mesh(
        self,
        body: Callable[..., Tree],
        results: Tree,
        hidden: Float[Array, "B C D"],
        head: Float[Array, "V D"],
        frozen: FrozenInputs,
        *saved: PerToken,
    ) -> Tree:
        """Runs `body` on each device's shards of its arguments.

        Args:
            results: of each result "token", for what is [B, C, ...], or "head", for [V, D].
            saved: of a term, [B, C, ...].
        """
        if self.mesh is None or self.mesh.size == 1:
            return body(hidden, head, frozen, *saved)
        token = PartitionSpec(self.axes(*ROWS) or None, self.axes(TOKENS) or None)
        tensor = self.axes("tensor") or None
        width = math.prod(self.mesh.shape.get(axis, 1) for axis in WEIGHTS)
        heads = [
            PartitionSpec(tensor, (x.shape[1] % width == 0 and self.axes(*WEIGHTS)) or None)
            for x in (head, *frozen.teacher_head)
        ]
        specs = jax.tree.map(lambda _: token, frozen)._replace(
            scale=PartitionSpec(),
            softcaps=jax.tree.map(lambda _: PartitionSpec(), frozen.softcaps),
            teacher_head=tuple(heads[1:]),
            outcomes=jax.tree.map(lambda _: PartitionSpec(tensor), frozen.outcomes),
        )
        kinds = {"token": token, "head": heads[0]}
        # Gradients are written out by hand: nothing is differentiated through the collectives.
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(token, heads[0], specs, *[token for _ in saved]),
            out_specs=jax.tree.map(lambda kind: kinds[kind], results),
            check_vma=False,
        )(hidden, head, frozen, *saved)

    def reduce_head(self, d_rows: Float[Array, "rows D"], width: int) -> Array:
        """Sums over the devices with other tokens; each keeps its `width` columns."""
        if d_rows.shape[1] == width:
            return jax.lax.psum(d_rows, self.axes(*ROWS, TOKENS))
        axes = self.axes(*WEIGHTS)
        d_rows = jax.lax.psum_scatter(d_rows, axes, scatter_dimension=1, tiled=True)
        return jax.lax.psum(d_rows, self.axes(*COPIES))


def shard_inputs(
    term: Term,
    models: Sequence[tuple[Array, Array]],
    mask: Bool[Array, "B C"] | None,
    tokens: PerToken,
    outcomes: tuple[Array | None, ...] | None = None,
    **options: Unpack[LogitOptions],
) -> tuple[ShardedTerm, Array, Array, FrozenInputs]:
    """Returns the arguments of `loss_values` and `token_stats`: the term over the first
    V = min(rows of the heads, `v`) ids, and its inputs with sizes that the mesh divides.

    Args:
        models: (hidden states [B, C, D], head [V, D]) of the model that the term is about, to which
            a gradient may flow, and of each teacher; over outcomes, a teacher's head is kept whole.
        mask: where False, hidden states may hold anything, NaN included; None: True everywhere.
        tokens: what the term knows of each token, [B, C, ...] by name.
        outcomes: as in `FrozenInputs`.
    """
    mesh, v, chunk = options.get("mesh"), options.get("v"), options.get("chunk", CHUNK)
    temperature, softcap = options.get("temperature", 1.0), options.get("softcap")
    cut = models if outcomes is None else models[:1]
    rows = min(head.shape[0] for _, head in cut)
    if v is not None and not 0 < v <= rows:
        raise ValueError(f"v is {v}; the heads have {rows} rows in common: give 1 to {rows}")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk} tokens; it must be at least 1 ({CHUNK} is the default)")
    for hidden, head in models:
        if hidden.shape[-1] != head.shape[1]:
            raise ValueError(
                f"hidden states are {hidden.shape[-1]} wide and their head {head.shape[1]}: "
                "both must come from one model"
            )
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(
            f"temperature is {temperature}; it must be above 0 (1 leaves logits as they are)"
        )
    sharded = ShardedTerm(term, v or rows, chunk, mesh, options.get("lean", False))
    (hidden, head), *teachers = models
    if mask is None:
        mask = jnp.ones(hidden.shape[:2], bool)
    else:
        # 0 * NaN is NaN: what stands where masked must not reach the head's gradient.
        hidden = jnp.where(mask[..., None], hidden, 0)
    sizes = {} if mesh is None else mesh.shape
    row_parts, token_parts = math.prod(sizes.get(a, 1) for a in ROWS), sizes.get(TOKENS, 1)
    hidden, mask, tokens, teacher_hidden = jax.tree.map(
        lambda x: jnp.pad(
            x,
            [(0, -x.shape[0] % row_parts), (0, -x.shape[1] % token_parts)]
            + [(0, 0)] * (x.ndim - 2),
        ),
        (hidden, mask, tokens, tuple(states for states, _ in teachers)),
    )
    more = -sharded.vocab % sizes.get("tensor", 1)

    def pad_rows(x: Array) -> Array:
        """Returns the first V rows, and zeros up to a number that `tensor` divides."""
        return jnp.pad(x[: sharded.vocab], [(0, more)] + [(0, 0)] * (x.ndim - 1))

    head, teacher_head = pad_rows(head), tuple(kernel for _, kernel in teachers)
    if outcomes is None:
        teacher_head = tuple(map(pad_rows, teacher_head))
    else:
        outcomes = (pad_rows(jnp.asarray(outcomes[0])), *outcomes[1:])
    softcaps = softcap if isinstance(softcap, Sequence) else [softcap]
    caps = tuple(None if cap is None else jnp.asarray(cap, jnp.float32) for cap in softcaps)
    frozen = FrozenInputs(
        mask=mask,
        scale=1 / jnp.asarray(temperature, jnp.float32),
        tokens=tokens,
        softcaps=() if all(cap is None for cap in caps) else caps,
        teacher_hidden=teacher_hidden,
        teacher_head=teacher_head,
        outcomes=outcomes,
    )
    return sharded, hidden, head, jax.lax.stop_gradient(frozen)


def token_stats(
    sharded: ShardedTerm,
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    frozen: FrozenInputs,
) -> TokenStats:
    """Computes the term's values, and what its gradient needs; leaves are [B, C, ...]."""

    def body(hidden: Array, head: Array, frozen: FrozenInputs) -> TokenStats:
        heads, columns = _gather(sharded, hidden, head, frozen)

        def step(_: None, chunk: tuple[Array, FrozenInputs]) -> tuple[None, TokenStats]:
            hidden, frozen = chunk
            z, tokens = _logits(hidden, heads, frozen, columns)
            return None, sharded.term.measure(z, tokens, columns)

        return _scan(sharded, step, None, hidden, frozen)[1]

    return sharded.on_mesh(body, "token", hidden, head, frozen)


def fused_gradients(
    sharded: ShardedTerm,
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    frozen: FrozenInputs,
) -> tuple[PerToken, Float[Array, "B C D"], Float[Array, "V D"]]:
    """Computes the term's values, and the gradients of the loss's masked sum with respect to hidden
    and head."""

    def body(hidden: Array, head: Array, frozen: FrozenInputs) -> tuple[PerToken, Array, Array]:
        heads, columns = _gather(sharded, hidden, head, frozen)
        rows = heads[0]

        def step(
            d_rows: Array, chunk: tuple[Array, FrozenInputs]
        ) -> tuple[Array, tuple[PerToken, Array]]:
            hidden, frozen = chunk
            z, tokens = _logits(hidden, heads, frozen, columns)
            values, saved = sharded.term.measure(z, tokens, columns)
            # Else a GPU writes out what both compute of each logit: 4 more passes over them.
            z, tokens = jax.lax.optimization_barrier((z, tokens))
            dz = _product_gradient(sharded.term.gradient(z, tokens, saved, columns), z, frozen)
            dz = dz.astype(hidden.dtype)
            d_rows = d_rows + _product(dz, hidden, OVER_TOKENS)
            return d_rows, (values, _product(dz, rows, OVER_VOCABULARY))

        start = jnp.zeros(rows.shape, jnp.float32)
        d_rows, (values, d_hidden) = _scan(sharded, step, start, hidden, frozen)
        d_hidden = jax.lax.psum(d_hidden, sharded.axes("tensor"))
        d_head = sharded.reduce_head(d_rows, head.shape[1])
        return values, d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)

    return sharded.on_mesh(body, ("token", "token", "head"), hidden, head, frozen)


def tiled_gradients(
    sharded: ShardedTerm,
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    frozen: FrozenInputs,
    saved: PerToken,
) -> tuple[Float[Array, "B C D"], Float[Array, "V D"]]:
    """Computes the gradients of the loss's masked sum with respect to hidden and head, from what
    `token_stats` saved ([B, C, ...])."""

    def body(
        hidden: Array, head: Array, frozen: FrozenInputs, saved: PerToken
    ) -> tuple[Array, Array]:
        heads, columns = _gather(sharded, hidden, head, frozen)
        scale, softcaps = frozen.scale, frozen.softcaps
        frozen = frozen._replace(scale=None, softcaps=(), teacher_head=(), outcomes=None)
        flat, frozen, saved = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]), (hidden, frozen, saved)
        )
        frozen = frozen._replace(scale=scale, softcaps=softcaps)
        tiles = -(-flat.shape[0] // sharded.chunk)
        size = -(-columns.size // tiles)
        # The gradient of a bfloat16 head is kept as integers: to update a slice of a bfloat16
        # array, XLA on CPU would convert the whole array to float32.
        bits = jnp.uint16 if head.dtype == jnp.bfloat16 else head.dtype

        def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            d_hidden, d_head = carry
            # Without the barrier XLA on CPU makes a float32 copy of bfloat16 heads before the loop.
            whole, i = jax.lax.optimization_barrier((heads, i))
            # The last tile starts early if the tiles do not divide the vocabulary; the columns that
            # it repeats get gradient 0.
            first = jnp.minimum(i * size, columns.size - size)
            rows: _Heads = jax.tree.map(
                partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size), whole
            )
            tile = replace(columns, start=columns.start + first, size=size, axes=())
            z, tokens = _logits(flat, rows, frozen, tile)
            dz = _product_gradient(sharded.term.gradient(z, tokens, saved, tile), z, frozen)
            dz = jnp.where((first + jnp.arange(size) >= i * size)[None, :], dz, 0)
            dz = dz.astype(flat.dtype)
            d_tile = sharded.reduce_head(_product(dz, flat, OVER_TOKENS), head.shape[1])
            d_tile = d_tile.astype(head.dtype) + jax.lax.bitcast_convert_type(
                jax.lax.dynamic_slice_in_dim(d_head, first, size), head.dtype
            )
            d_tile = jax.lax.bitcast_convert_type(d_tile, bits)
            d_head = jax.lax.dynamic_update_slice_in_dim(d_head, d_tile, first, 0)
            return d_hidden + _product(dz, rows[0], OVER_VOCABULARY), d_head

        start = jnp.zeros(flat.shape, jnp.float32), jnp.zeros(head.shape, bits)
        d_hidden, d_head = jax.lax.fori_loop(0, tiles, step, start)
        d_hidden = jax.lax.psum(d_hidden, sharded.axes("tensor")).reshape(hidden.shape)
        return d_hidden.astype(hidden.dtype), jax.lax.bitcast_convert_type(d_head, head.dtype)

    return sharded.on_mesh(body, ("token", "head"), hidden, head, frozen, saved)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss_values(
    sharded: ShardedTerm,
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    frozen: FrozenInputs,
) -> tuple[Float[Array, ""], PerToken]:
    """Returns (masked sum of the loss, values per token [B, C, ...]). Only the sum is
    differentiable."""
    values = token_stats(sharded, hidden, head, frozen).values
    return jnp.where(frozen.mask, values["loss"], 0).sum(), values


def _loss_forward(
    sharded: ShardedTerm, hidden: Array, head: Array, frozen: FrozenInputs
) -> tuple[tuple[Array, PerToken], Tree]:
    kept: Tree
    if sharded.lean:
        values, saved = token_stats(sharded, hidden, head, frozen)
        kept = hidden, head, frozen, saved
    else:
        values, *kept = fused_gradients(sharded, hidden, head, frozen)
    return (jnp.where(frozen.mask, values["loss"], 0).sum(), values), kept


def _loss_backward(
    sharded: ShardedTerm, kept: Tree, cotangents: tuple[Array, PerToken]
) -> tuple[Array, Array, None]:
    gradients = tiled_gradients(sharded, *kept) if sharded.lean else kept
    d_hidden, d_head = ((x.astype(jnp.float32) * cotangents[0]).astype(x.dtype) for x in gradients)
    return d_hidden, d_head, None


loss_values.defvjp(_loss_forward, _loss_backward)


_Heads = tuple[Array, tuple[Array, ...], tuple[Array | None, ...] | None]
"""The student's head, each teacher's, `FrozenInputs.outcomes`: a device's rows, at full width."""


def _gather(
    sharded: ShardedTerm, hidden: Array, head: Array, frozen: FrozenInputs
) -> tuple[_Heads, VocabShard]:
    """Gathers this device's rows at full width, in the dtype of the hidden states they meet; and
    returns which slice of the vocabulary they are."""
    whole = []
    states = (*frozen.teacher_hidden, hidden)
    for kernel, x in zip((*frozen.teacher_head, head), states, strict=True):
        kernel = kernel.astype(x.dtype)
        if kernel.shape[1] != x.shape[-1]:
            kernel = jax.lax.all_gather(kernel, sharded.axes(*WEIGHTS), axis=1, tiled=True)
        whole.append(kernel)
    rows, axes = head.shape[0], sharded.axes("tensor")
    start = jax.lax.axis_index(axes) * rows if axes else 0
    parts = 1 if sharded.mesh is None else sharded.mesh.shape.get("tensor", 1)
    padded = rows * parts > sharded.vocab
    columns = VocabShard(start, rows, sharded.vocab, padded, axes, frozen.scale)
    return (whole[-1], tuple(whole[:-1]), frozen.outcomes), columns


def _logits(
    hidden: Array, all_heads: _Heads, frozen: FrozenInputs, columns: VocabShard
) -> tuple[Array, PerToken]:
    student_head, heads, outcomes = all_heads
    cap, *caps = frozen.softcaps or (None,) * (1 + len(heads))
    z = columns.logits(hidden, student_head, cap)
    tokens = frozen.tokens if outcomes is None else frozen.tokens | {"outcomes": outcomes}
    if not heads:
        return z, tokens
    teacher_z = tuple(
        columns.logits(hidden, head, cap)
        for hidden, head, cap in zip(frozen.teacher_hidden, heads, caps, strict=True)
    )
    return z, tokens | {"teacher_z": teacher_z}


def _product_gradient(
    dz: Float[Array, "n size"], z: Float[Array, "n size"], frozen: FrozenInputs
) -> Float[Array, "n size"]:
    """Converts the gradient with respect to the logits `z` over the temperature to the one with
    respect to hidden @ head.T; 0 where masked, even if the gradient there is NaN."""
    dz = dz * frozen.scale
    if frozen.softcaps and frozen.softcaps[0] is not None:
        tanh = jnp.clip(z / frozen.softcaps[0], -1, 1)  # columns of MIN: -1
        dz = dz * (1 - tanh**2)
    return jnp.where(frozen.mask[:, None], dz, 0)


_product = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
OVER_TOKENS = (((0,), (0,)), ((), ()))
"""dz [n, size] and hidden [n, D] -> the gradient of the head [size, D]."""
OVER_VOCABULARY = (((1,), (0,)), ((), ()))
"""dz [n, size] and head [size, D] -> the gradient of hidden [n, D]."""


def _scan(
    sharded: ShardedTerm,
    step: Callable[..., Tree],
    start: Tree,
    hidden: Array,
    frozen: FrozenInputs,
) -> Tree:
    """Runs `step` over chunks of the tokens of hidden and frozen, the last one padded with masked
    tokens. Returns the last carry, and the results of all tokens, [b, C, ...]."""
    shape = hidden.shape[:2]
    tokens = math.prod(shape)
    chunk = min(sharded.chunk, tokens)
    count = -(-tokens // chunk)
    of_tokens = frozen._replace(scale=None, softcaps=(), teacher_head=(), outcomes=None)
    leaves, form = jax.tree.flatten((hidden, of_tokens))
    chunks = []
    for x in leaves:
        x = x.reshape(-1, *x.shape[2:])
        x = jnp.pad(x, [(0, count * chunk - tokens)] + [(0, 0)] * (x.ndim - 1))
        chunks.append(x.reshape(count, chunk, *x.shape[1:]))
    hidden, of_tokens = jax.tree.unflatten(form, chunks)
    scale, softcaps = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (count,)), (frozen.scale, frozen.softcaps)
    )
    inputs = hidden, of_tokens._replace(scale=scale, softcaps=softcaps)
    carry, results = jax.lax.scan(step, start, inputs)
    return carry, jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[:tokens].reshape(*shape, *x.shape[2:]), results
    )
