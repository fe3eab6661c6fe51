"""The product of hidden states and LM head, a chunk of tokens at a time, and its gradients: no [B, C, V] array.

A `Term` says what to measure on the logits of some tokens and what the gradient of its loss with respect to
those logits is. This file runs it over all tokens, on one device or on a mesh:

- `measure`: forward only.
- `fused`: forward and gradients in one scan over chunks of tokens (2 products forward, 2 for the gradients); the
  gradient of the head is summed in a float32 accumulator of the head's size.
- `tiled`: gradients only, from what `measure` saved, in one loop over tiles of the *vocabulary* with all tokens in
  each. It computes the logits a second time, but a tile of the head's gradient is complete when it is written, so
  there is no accumulator.

On a mesh, rows of tokens are split over ("data", "fsdp"), vocabulary over "tensor", and the head's width over
"fsdp" where that divides it. The head is gathered over "fsdp" once, before the loop. `fused` reduces the head's
gradient once, after the loop; `tiled` reduces each tile once, which is as many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from jaxrl.losses.vocabulary import Columns

CHUNK = 256
"""Tokens a device projects on the vocabulary at once: 156 MB for a float32 array at V = 152k."""


class Given(NamedTuple):
    """What no gradient flows to. `tokens` holds arrays [B, C, ...] by name."""

    mask: Bool[Array, "B C"]
    scale: Float[Array, ""]
    """1 / temperature."""
    tokens: dict[str, Array]
    teacher_hidden: Float[Array, "B C Dt"] | None = None
    teacher_head: Float[Array, "V Dt"] | None = None


class Measured(NamedTuple):
    """What a term measures on n tokens; every leaf is [n, ...]."""

    values: dict[str, Array]
    """For the caller; a loss stands under "loss"."""
    saved: dict[str, Array]
    """For `Term.gradient`."""


class Term(Protocol):
    """A function of the logits of each token. Hashable: it is part of a compiled function's key."""

    def measure(
        self, z: Array, teacher_z: Array | None, tokens: dict[str, Array], columns: Columns
    ) -> Measured:
        """Args: student's and teacher's logits [n, size] at temperature; `Given.tokens` of these tokens [n, ...]."""
        ...

    def gradient(
        self,
        z: Array,
        teacher_z: Array | None,
        tokens: dict[str, Array],
        saved: dict[str, Array],
        columns: Columns,
    ) -> Array:
        """d loss / d z, [n, size]. Without collectives: `columns` may be a tile of the device's slice."""
        ...


@dataclass(frozen=True)
class Job:
    """A term, and how to run it. Hashable."""

    term: Term
    vocab: int
    """V: rows of the heads that take part (there may be more, for padding)."""
    chunk: int
    mesh: Mesh | None = None
    lean: bool = False

    def axes(self, *names: str) -> tuple[str, ...]:
        """Those of the mesh's axes that hold more than one device."""
        return tuple(a for a in names if self.mesh is not None and self.mesh.shape.get(a, 1) > 1)

    def size(self, *names: str) -> int:
        size = 1
        for axis in self.axes(*names):
            size *= self.mesh.shape[axis]
        return size

    def head_spec(self, width: int) -> PartitionSpec:
        """Of a head [V, width]: the rule that sharding/rules.py follows too."""
        split = self.axes("fsdp") and width % self.size("fsdp") == 0
        return PartitionSpec(self.axes("tensor") or None, "fsdp" if split else None)

    def token_spec(self) -> PartitionSpec:
        return PartitionSpec(self.axes("data", "fsdp") or None)

    def given_spec(self, given: Given) -> Given:
        token = self.token_spec()
        return Given(
            mask=token,
            scale=PartitionSpec(),
            tokens={name: token for name in given.tokens},
            teacher_hidden=None if given.teacher_hidden is None else token,
            teacher_head=(
                None
                if given.teacher_head is None
                else self.head_spec(given.teacher_head.shape[1])
            ),
        )

    def on_mesh(self, body: Any, in_specs: Any, out_specs: Any) -> Any:
        """`body` on each device's shards; as it is where there is one device."""
        if self.mesh is None or self.mesh.size == 1:
            return body
        # Gradients are written out by hand below, so nothing is differentiated through the collectives.
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def columns(self, rows: int) -> Columns:
        """The slice of the vocabulary of a device that holds `rows` rows of the head."""
        axes = self.axes("tensor")
        start = jax.lax.axis_index(axes) * rows if axes else 0
        return Columns(start, rows, self.vocab, rows * self.size("tensor") > self.vocab, axes)


def make_job(
    term: Term,
    hidden: Array,
    heads: tuple[Array, ...],
    *,
    chunk: int,
    mesh: Mesh | None,
    v: int | None = None,
    lean: bool = False,
) -> Job:
    """A job over the first V = min(rows of the heads, `v`) rows."""
    rows = min(head.shape[0] for head in heads)
    if v is not None and not 0 < v <= rows:
        raise ValueError(f"v is {v}; the heads have {rows} rows in common: give 1 to {rows}")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk} tokens; it must be at least 1 ({CHUNK} is the default)")
    if hidden.shape[-1] != heads[0].shape[1]:
        raise ValueError(
            f"hidden states are {hidden.shape[-1]} wide and the head {heads[0].shape[1]}: "
            "they must come from the same model"
        )
    return Job(term, v or rows, chunk, mesh, lean)


def inverse(temperature: float | Array) -> Float[Array, ""]:
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (1 leaves logits as they are)")
    return 1 / jnp.asarray(temperature, jnp.float32)


def fit_rows(job: Job, tree: Any) -> Any:
    """Leaves [B, ...] padded with zeros to a B that the mesh divides."""
    parts = job.size("data", "fsdp")

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, -x.shape[0] % parts)] + [(0, 0)] * (x.ndim - 1))

    return jax.tree.map(pad, tree)


def fit_head(job: Job, head: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """The first V rows, padded with zeros to a number that `tensor` divides."""
    return jnp.pad(head[: job.vocab], [(0, -job.vocab % job.size("tensor")), (0, 0)])


def measure(
    job: Job, hidden: Float[Array, "B C D"], head: Float[Array, "V D"], given: Given
) -> Measured:
    """The term's values and what its gradient needs, leaves [B, C, ...]."""

    def body(hidden: Array, head: Array, given: Given) -> Measured:
        (rows, teacher_rows), columns = _gather(job, hidden, head, given)

        def step(_: None, chunk: tuple[Array, Given]) -> tuple[None, Measured]:
            hidden, given = chunk
            z, teacher_z = _logits(hidden, rows, given, teacher_rows, columns)
            return None, job.term.measure(z, teacher_z, given.tokens, columns)

        _, measured = jax.lax.scan(step, None, _chunks(job, hidden, given))
        return _unchunk(measured, hidden.shape[:2])

    specs = job.token_spec(), job.head_spec(head.shape[1]), job.given_spec(given)
    return job.on_mesh(body, specs, job.token_spec())(hidden, head, given)


def fused(
    job: Job, hidden: Float[Array, "B C D"], head: Float[Array, "V D"], given: Given
) -> tuple[Measured, Float[Array, "B C D"], Float[Array, "V D"]]:
    """`measure`, and the gradients of the masked sum of the loss with respect to `hidden` and `head`."""

    def body(hidden: Array, head: Array, given: Given) -> tuple[Measured, Array, Array]:
        (rows, teacher_rows), columns = _gather(job, hidden, head, given)

        def step(
            d_rows: Array, chunk: tuple[Array, Given]
        ) -> tuple[Array, tuple[Measured, Array]]:
            hidden, given = chunk
            z, teacher_z = _logits(hidden, rows, given, teacher_rows, columns)
            measured = job.term.measure(z, teacher_z, given.tokens, columns)
            dz = job.term.gradient(z, teacher_z, given.tokens, measured.saved, columns)
            dz = (dz * _weight(given)).astype(hidden.dtype)
            return d_rows + _outer(dz, hidden), (measured._replace(saved={}), _back(dz, rows))

        start = jnp.zeros(rows.shape, jnp.float32)
        d_rows, (measured, d_hidden) = jax.lax.scan(step, start, _chunks(job, hidden, given))
        measured, d_hidden = _unchunk((measured, d_hidden), hidden.shape[:2])
        d_hidden = jax.lax.psum(d_hidden, job.axes("tensor"))
        d_head = _reduce(job, d_rows, head.shape[1])
        return measured, d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)

    head_spec = job.head_spec(head.shape[1])
    in_specs = job.token_spec(), head_spec, job.given_spec(given)
    out_specs = job.token_spec(), job.token_spec(), head_spec
    return job.on_mesh(body, in_specs, out_specs)(hidden, head, given)


def tiled(
    job: Job,
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    given: Given,
    saved: dict[str, Array],
) -> tuple[Float[Array, "B C D"], Float[Array, "V D"]]:
    """Gradients of the masked sum of the loss, from what `measure` saved ([B, C, ...])."""

    def body(hidden: Array, head: Array, given: Given, saved: dict[str, Array]) -> Any:
        (rows, teacher_rows), columns = _gather(job, hidden, head, given)
        flat, given_flat, saved_flat = _flat((hidden, given, saved))
        tiles = -(-flat.shape[0] // job.chunk)
        size = -(-columns.size // tiles)

        def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            d_hidden, d_head = carry
            # The last tile starts early where the tiles do not fit; what it repeats counts as 0.
            first = jnp.minimum(i * size, columns.size - size)
            tile = Columns(columns.start + first, size, job.vocab, columns.padded)
            # Without the barrier XLA on CPU makes a float32 copy of bfloat16 heads before the loop.
            (mine, theirs), i = jax.lax.optimization_barrier(((rows, teacher_rows), i))
            mine, theirs = jax.tree.map(partial(_tile, first=first, size=size), (mine, theirs))
            z, teacher_z = _logits(flat, mine, given_flat, theirs, tile)
            dz = job.term.gradient(z, teacher_z, given_flat.tokens, saved_flat, tile)
            dz = dz * _weight(given_flat)
            dz = jnp.where((first + jnp.arange(size) >= i * size)[None, :], dz, 0)
            dz = dz.astype(flat.dtype)
            d_tile = _reduce(job, _outer(dz, flat), head.shape[1]).astype(head.dtype)
            d_tile = d_tile + jax.lax.bitcast_convert_type(_tile(d_head, first, size), head.dtype)
            d_head = jax.lax.dynamic_update_slice_in_dim(d_head, _bits(d_tile), first, 0)
            return d_hidden + _back(dz, mine), d_head

        start = jnp.zeros(flat.shape, jnp.float32), _bits(jnp.zeros_like(head))
        d_hidden, d_head = jax.lax.fori_loop(0, tiles, step, start)
        d_hidden = jax.lax.psum(d_hidden, job.axes("tensor"))
        d_head = jax.lax.bitcast_convert_type(d_head, head.dtype)
        return d_hidden.reshape(hidden.shape).astype(hidden.dtype), d_head

    head_spec = job.head_spec(head.shape[1])
    token = job.token_spec()
    in_specs = token, head_spec, job.given_spec(given), {name: token for name in saved}
    return job.on_mesh(body, in_specs, (token, head_spec))(hidden, head, given, saved)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss_values(
    job: Job, hidden: Float[Array, "B C D"], head: Float[Array, "V D"], given: Given
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """(masked sum of the term's loss, its values per token [B, C, ...]). Only the sum carries a gradient."""
    values = measure(job, hidden, head, given).values
    return _masked_loss(values, given), values


def _loss_forward(job: Job, hidden: Array, head: Array, given: Given) -> tuple[Any, Any]:
    if job.lean:
        measured = measure(job, hidden, head, given)
        kept = hidden, head, given, measured.saved
    else:
        measured, d_hidden, d_head = fused(job, hidden, head, given)
        kept = d_hidden, d_head
    return (_masked_loss(measured.values, given), measured.values), kept


def _loss_backward(job: Job, kept: Any, cotangents: tuple[Array, Any]) -> tuple[Any, Any, None]:
    d_hidden, d_head = tiled(job, *kept) if job.lean else kept
    return *(_scaled(x, cotangents[0]) for x in (d_hidden, d_head)), None


loss_values.defvjp(_loss_forward, _loss_backward)


def _masked_loss(values: dict[str, Array], given: Given) -> Array:
    return jnp.where(given.mask, values["loss"], 0).sum()


def _scaled(x: Array, factor: Array) -> Array:
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _logits(
    hidden: Array, rows: Array, given: Given, teacher_rows: Array | None, columns: Columns
) -> tuple[Array, Array | None]:
    z = columns.logits(hidden, rows, given.scale)
    if teacher_rows is None:
        return z, None
    return z, columns.logits(given.teacher_hidden, teacher_rows, given.scale)


def _bits(x: Array) -> Array:
    """bfloat16 as integers: XLA on CPU updates a bfloat16 slice by converting the whole array, twice."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _tile(rows: Array, first: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(rows, first, size)


def _weight(given: Given) -> Float[Array, "n 1"]:
    return jnp.where(given.mask, given.scale, 0)[:, None]


def _outer(dz: Float[Array, "n size"], hidden: Float[Array, "n D"]) -> Float[Array, "size D"]:
    return jax.lax.dot_general(
        dz, hidden, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


def _back(dz: Float[Array, "n size"], rows: Float[Array, "size D"]) -> Float[Array, "n D"]:
    return jax.lax.dot_general(
        dz, rows, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


def _gather(
    job: Job, hidden: Array, head: Array, given: Given
) -> tuple[tuple[Array, Array | None], Columns]:
    """This device's rows of both heads at full width, in the dtype of the hidden states they meet."""

    def whole(head: Array, like: Array) -> Array:
        head = head.astype(like.dtype)
        if head.shape[1] == like.shape[-1]:
            return head
        return jax.lax.all_gather(head, "fsdp", axis=1, tiled=True)

    teacher = None
    if given.teacher_head is not None:
        teacher = whole(given.teacher_head, given.teacher_hidden)
    return (whole(head, hidden), teacher), job.columns(head.shape[0])


def _reduce(job: Job, d_rows: Float[Array, "rows D"], width: int) -> Array:
    """Sum over the devices with other tokens; each keeps its `width` columns."""
    if d_rows.shape[1] == width:
        return jax.lax.psum(d_rows, job.axes("data", "fsdp"))
    d_rows = jax.lax.psum_scatter(d_rows, "fsdp", scatter_dimension=1, tiled=True)
    return jax.lax.psum(d_rows, job.axes("data"))


def _token_leaves(given: Given) -> Given:
    """`Given` as something whose leaves are all per token."""
    return given._replace(scale=None, teacher_head=None)


def _flat(tree: Any) -> Any:
    """[b, C, ...] -> [b * C, ...] on every leaf but the scale and the teacher's head."""
    hidden, given, saved = tree
    merge = partial(jax.tree.map, lambda x: x.reshape(-1, *x.shape[2:]))
    flat = merge(_token_leaves(given))._replace(scale=given.scale)
    return merge(hidden), flat, merge(saved)


def _chunks(job: Job, hidden: Array, given: Given) -> tuple[Array, Given]:
    """[b, C, ...] -> [chunks, chunk, ...] on every leaf, with masked tokens at the end."""
    tokens = hidden.shape[0] * hidden.shape[1]
    chunk = min(job.chunk, tokens)
    count = -(-tokens // chunk)

    def split(x: Array) -> Array:
        x = x.reshape(-1, *x.shape[2:])
        x = jnp.pad(x, [(0, count * chunk - tokens)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, chunk, *x.shape[1:])

    given_chunks = jax.tree.map(split, _token_leaves(given))
    scale = jnp.broadcast_to(given.scale, (count,))
    return split(hidden), given_chunks._replace(scale=scale)


def _unchunk(tree: Any, rows: tuple[int, int]) -> Any:
    def join(x: Array) -> Array:
        x = x.reshape(-1, *x.shape[2:])
        return x[: rows[0] * rows[1]].reshape(*rows, *x.shape[1:])

    return jax.tree.map(join, tree)
