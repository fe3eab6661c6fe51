"""The interface of a loss on logits (`Term`), and its layout on a mesh (`ShardedTerm`).

Rows are split over the axes `ROWS` and their tokens over "context", the vocabulary over "tensor",
and a head's width over ("fsdp", "context") where these divide it, as in
models/parameters.py. Sizes that a mesh does not divide are padded: rows and tokens with masked
tokens, the vocabulary with columns of `MIN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int, Shaped

from jaxrl.losses.vocabulary import VocabShard
from jaxrl.sharding.axes import COPIES, ROWS, TOKENS, WEIGHTS
from jaxrl.types import Array, Tree

CHUNK = 256
"""Tokens a device projects on the vocabulary at once: 156 MB for a float32 array at V = 152k."""

Softcap = float | Float[Array, ""] | None
"""c > 0 of logits c tanh(z / c), z being hidden @ head.T; None: the logits are z."""

PerToken = dict[str, Array]
"""Arrays by name, each [B, C, ...] or, for the n tokens of a chunk, [n, ...]."""
OneOrMore = Array | Sequence[Array]
"""Of one model, or one of each of several models."""


class ShardOptions(TypedDict, total=False):
    """How a term runs (`shard_term`)."""

    chunk: int
    """Tokens that a device projects on the vocabulary at once; `CHUNK` by default."""
    mesh: Mesh | None
    """Axes data, fsdp, tensor and context; None: one device."""
    v: int | None
    """Narrows the vocabulary to its first v rows; probabilities are normalised over these."""


class LogitOptions(ShardOptions, total=False):
    """Options of all that takes hidden states and heads."""

    temperature: float | Array
    """Divides the logits; may be traced. 1 by default."""
    softcap: Softcap | Sequence[Softcap]
    """Of several models, one for each. May be traced."""


class FrozenInputs(NamedTuple):
    """Inputs without a gradient."""

    mask: Bool[Array, "B C"]
    scale: Float[Array, ""]
    """1 / temperature."""
    tokens: PerToken
    softcaps: tuple[Float[Array, ""] | None, ...] = ()
    """Of the student's logits and of each teacher's (`VocabShard.logits`); () where all are None.
    """
    teacher_hidden: tuple[Float[Array, "B C Dt"], ...] = ()
    """Of each teacher."""
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

    `z` [n, size] are the logits of n tokens, divided by the temperature; `columns` are their token
    ids. `tokens` are `FrozenInputs.tokens` of the same tokens and, if there are teachers' heads,
    the tuple of these teachers' logits, "teacher_z"; with `FrozenInputs.outcomes`, these as
    "outcomes".
    """

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        raise NotImplementedError

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        """Computes d loss / d z, [n, size]. No collectives: `columns` may be a tile of a device's
        slice."""
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
        return tuple(a for a in names if self.size(a) > 1)

    def size(self, *names: str) -> int:
        return 1 if self.mesh is None else math.prod(self.mesh.shape.get(a, 1) for a in names)

    def head_spec(self, head: Array) -> PartitionSpec:
        split = head.shape[1] % self.size(*WEIGHTS) == 0
        return PartitionSpec(self.axes("tensor") or None, (split and self.axes(*WEIGHTS)) or None)

    def token_spec(self) -> PartitionSpec:
        return PartitionSpec(self.axes(*ROWS) or None, self.axes(TOKENS) or None)

    def given_spec(self, given: FrozenInputs) -> FrozenInputs:
        """Returns `FrozenInputs` with a spec for each array."""
        spec: FrozenInputs = jax.tree.map(lambda _: self.token_spec(), given)
        heads = tuple(map(self.head_spec, given.teacher_head))
        columns = PartitionSpec(self.axes("tensor") or None)
        outcomes = jax.tree.map(lambda _: columns, given.outcomes)
        softcaps = jax.tree.map(lambda _: PartitionSpec(), given.softcaps)
        return spec._replace(
            scale=PartitionSpec(), softcaps=softcaps, teacher_head=heads, outcomes=outcomes
        )

    def on_mesh(
        self, body: Callable[..., Tree], in_specs: Tree, out_specs: Tree
    ) -> Callable[..., Tree]:
        """Returns `body` run on each device's shards; unchanged where there is one device."""
        if self.mesh is None or self.mesh.size == 1:
            return body
        # Gradients are written out by hand: nothing is differentiated through the collectives.
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def columns(self, rows: int) -> VocabShard:
        """Returns the slice of the vocabulary of a device that holds `rows` rows of the head."""
        axes = self.axes("tensor")
        start = jax.lax.axis_index(axes) * rows if axes else 0
        return VocabShard(start, rows, self.vocab, rows * self.size("tensor") > self.vocab, axes)


def shard_term(
    term: Term,
    *models: tuple[Array, Array],
    chunk: int = CHUNK,
    mesh: Mesh | None = None,
    v: int | None = None,
    lean: bool = False,
) -> ShardedTerm:
    """Makes a `ShardedTerm` over the first V = min(rows of the heads, `v`) ids. `models` are
    (hidden, head) pairs of student and teacher."""
    rows = min(head.shape[0] for _, head in models)
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
    return ShardedTerm(term, v or rows, chunk, mesh, lean)


def models_of(hidden: OneOrMore, head: OneOrMore) -> tuple[tuple[Array, Array], ...]:
    """Returns (hidden states, head) of each model."""
    if isinstance(hidden, Sequence):
        return tuple(zip(hidden, head, strict=True))
    return ((hidden, head),)


def frozen_inputs(
    sharded: ShardedTerm,
    mask: Bool[Array, "B C"],
    tokens: PerToken,
    temperature: float | Array,
    softcaps: Sequence[Softcap],
    teachers: Sequence[tuple[Array, Array]] = (),
    outcomes: tuple[Array | None, ...] | None = None,
) -> FrozenInputs:
    """Builds what `chunked` takes. No gradient flows to it.

    Args:
        softcaps: of the student and each teacher.
        teachers: (hidden states, head) of each; over outcomes, the whole head is kept.
    """
    mask, tokens = fit_rows(sharded, (mask, tokens))
    found = FrozenInputs(
        mask=mask,
        scale=inverse(temperature),
        tokens=tokens,
        softcaps=softcaps_of(*softcaps),
        teacher_hidden=tuple(fit_rows(sharded, hidden) for hidden, _ in teachers),
        teacher_head=tuple(head if outcomes else fit_head(sharded, head) for _, head in teachers),
        outcomes=outcomes,
    )
    return jax.lax.stop_gradient(found)


def inverse(temperature: float | Array) -> Float[Array, ""]:
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(
            f"temperature is {temperature}; it must be above 0 (1 leaves logits as they are)"
        )
    return jax.lax.stop_gradient(1 / jnp.asarray(temperature, jnp.float32))


def softcaps_of(*each: Softcap) -> tuple[Float[Array, ""] | None, ...]:
    """Returns `FrozenInputs.softcaps` of the student and each teacher."""
    if all(cap is None for cap in each):
        return ()
    caps = (None if cap is None else jnp.asarray(cap, jnp.float32) for cap in each)
    return tuple(jax.lax.stop_gradient(cap) for cap in caps)


def fit_rows(sharded: ShardedTerm, tree: Tree) -> Tree:
    """Pads leaves [B, C, ...] with zeros to a B and a C that the mesh divides."""
    rows, tokens = sharded.size(*ROWS), sharded.size(TOKENS)
    return jax.tree.map(
        lambda x: jnp.pad(
            x,
            [(0, -x.shape[0] % rows), (0, -x.shape[1] % tokens)] + [(0, 0)] * (x.ndim - 2),
        ),
        tree,
    )


def fit_head(sharded: ShardedTerm, head: Shaped[Array, "rows ..."]) -> Shaped[Array, "V ..."]:
    """Returns the first V rows, padded with zeros to a number that `tensor` divides."""
    more = -sharded.vocab % sharded.size("tensor")
    return jnp.pad(head[: sharded.vocab], [(0, more)] + [(0, 0)] * (head.ndim - 1))


def reduce_head(sharded: ShardedTerm, d_rows: Float[Array, "rows D"], width: int) -> Array:
    """Sums over the devices with other tokens; each keeps its `width` columns."""
    if d_rows.shape[1] == width:
        return jax.lax.psum(d_rows, sharded.axes(*ROWS, TOKENS))
    axes = sharded.axes(*WEIGHTS)
    d_rows = jax.lax.psum_scatter(d_rows, axes, scatter_dimension=1, tiled=True)
    return jax.lax.psum(d_rows, sharded.axes(*COPIES))
