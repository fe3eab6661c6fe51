"""Mixtures of experts (Shazeer et al. 2017, arXiv 1701.06538): each token passes the k experts that
a router chooses, and no token is dropped, whatever they choose.

Tokens are sorted by expert, and the rows of each expert are cut into blocks of a fixed size, of
which the last one is padded. A loop then computes a number of blocks at a time, with a gather of
their experts' kernels and batched products; it ends with the last block that holds a token, so that
the work follows the tokens although every shape is static. `jax.lax.ragged_dot` says the same, but
XLA replaces it, on GPUs and CPUs, by the product of all rows with all experts: of 128 experts and
65,536 rows that is 128 times the work and 34 GB of temporaries, by the compiler's account for an
H200.

On a mesh with the axis `expert` a device holds some of the experts. The tokens of its group of
devices are gathered, each device computes what its own experts add, and the sums are scattered back
(all-gather, reduce-scatter). An all-to-all that sends a token only where its experts are needs a
capacity, and would drop tokens, or sizes that are known on the device only
(`jax.lax.ragged_all_to_all`: no CPU has it, and its buffers are as large as what is gathered here).
With k experts a token on n devices it would send 1 - (1 - 1/n)^k of the bytes: on eight devices 66%
for Qwen3's 8 experts and 41% for gpt-oss's 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl.errors import UserError
from jaxrl.models.family import DecoderLike, Raw, size
from jaxrl.models.layers import (
    ACTIVATIONS,
    Arrays,
    Parameter,
    Parameters,
    gated_mlp,
    kernel,
    linear,
    mlp_parameters,
    multiply_vector,
    norm_scale,
    rms_norm,
)
from jaxrl.models.lora import SCALE, dequantise
from jaxrl.sharding.axes import EXPERTS, ROWS, AxisName, SplitOver, dim_spec
from jaxrl.types import Array, Tree

LEAST_BLOCK, MOST_BLOCK = 8, 256
"""Rows of a block: about as many as an expert has on average, within these."""
AT_ONCE = 8192
"""Rows that the loop computes at a time: enough to fill a GPU."""
MOVES = 3
"""How often a gathered kernel is read or written: by the gather twice, and by the product."""
Carry = TypeVar("Carry")
Activate = Callable[[jax.Array, jax.Array], jax.Array]
"""(gate(x), up(x)) -> what down gets."""


@dataclass(frozen=True)
class Clamp:
    """The gates of gpt-oss (arXiv 2508.10925): (up + 1) gate sigmoid(alpha gate), with
    gates of at most `limit`, and `up` within +- `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


def read_counts(raw: Raw, count_key: str, chosen_key: str) -> tuple[int, int]:
    """Reads from a `config.json` how many experts there are, and how many a token passes."""
    count, chosen = size(raw, count_key), size(raw, chosen_key)
    if chosen > count:
        raise UserError(f"{chosen_key}={chosen} exceeds {count_key}={count}")
    return count, chosen


@dataclass(frozen=True)
class Experts:
    """The experts of a block, which take the place of its MLP or add to it."""

    count: int
    """E."""
    chosen: int
    """k: how many of them a token passes."""
    normalised: bool
    """Whether the weights of a token's experts sum to 1, or are its probabilities as they are."""
    dense_width: int
    """`intermediate_size` of `config.json`: of the MLP that experts add to, or of layers without
    experts, of which there are none."""
    clamp: Clamp | None = None
    beside: Literal["norms", "gate"] | None = None
    """How they add to an MLP, if they do: both by norms (Gemma 4), or the MLP, which is an expert
    that all tokens share, times the sigmoid of a gate (Qwen3.5)."""

    @property
    def id_dtype(self) -> np.dtype:
        """Returns the dtype of the expert numbers that are recorded."""
        return np.dtype(np.int8 if self.count <= 128 else np.int16)


class ExpertKernel(NamedTuple):
    """One projection of all experts, of some blocks' experts (M in place of E), or its
    gradients."""

    kernel: Array
    """[E, in, out]; quantised, its codes."""
    scale: Array | None = None
    """[E, in / block, out], where the kernel is quantised (`models.lora`)."""
    bias: Array | None = None
    """[E, out]."""
    lora_a: Array | None = None
    """[E, in, r], of an adapter (`models.lora`), scaled."""
    lora_b: Array | None = None
    """[E, r, out]."""


class ExpertKernels(NamedTuple):
    """The parameters of a mixture."""

    router: Array
    """[D, E]."""
    gate: ExpertKernel
    """From D to I."""
    up: ExpertKernel
    """From D to I."""
    down: ExpertKernel
    """From I to D."""
    router_bias: Array | None = None
    """[E]."""
    scale: Array | None = None
    """[E]: what the weight of each expert is multiplied by."""


class Routed(NamedTuple):
    """What the router did with tokens [B, T]."""

    ids: Array
    """[B, T, k] int32: the experts of each token."""
    entropy: Array
    """[B, T] float32, nats: of the router's probabilities."""
    mass: Array | None = None
    """[E] float32: the sum of each expert's probability over the tokens, each times its `copies`,
    where `mix` was given these."""


class Routing(NamedTuple):
    """What is asked of the routers of one call."""

    recorded: Array | None = None
    """[B, T, k] integers: the experts of each token, in place of the router's choice; -1 where the
    router chooses. Their weights are the router's own."""
    copies: Array | None = None
    """[B, T] float32: how often each token counts in `Routed.mass`, 0 at padding."""
    ridge: float | None = None
    """FLOPs of the device for each byte that its memory moves, in a decode step: its tokens are so
    few that all kernels are read anyway, and every expert computes every token, or as many rows as
    `step_rows` says."""
    split: tuple[AxisName, ...] = ()
    """The axis of a stream's tokens."""


NO_ROUTING = Routing()
PROJECTIONS = ("gate", "up", "down")


def expert_parameters(c: DecoderLike) -> Parameters:
    """Returns the parameters of a router and its experts, and of the MLP that these add to."""
    experts, d, f, b = c.experts, c.d_model, c.d_ff, c.block
    table = mlp_parameters(c, experts.dense_width) if experts.beside else {}
    router = kernel(d, experts.count, ("embed", None), "mlp.gate.weight")
    table["mlp/router/kernel"] = replace(router, fixed=True)
    if b.expert_bias:
        table["mlp/router/bias"] = Parameter((experts.count,), (None,), "mlp.router.bias", 0.0)

    def first(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape) / math.sqrt(shape[-2])

    for name, (n_in, n_out), axes in (
        ("gate", (d, f), ("embed", "mlp")),
        ("up", (d, f), ("embed", "mlp")),
        ("down", (f, d), ("mlp", "embed")),
    ):
        shape, tensor = (experts.count, n_in, n_out), f"mlp.experts.{{expert}}.{name}_proj.weight"
        path = f"mlp/experts/{name}"
        table[f"{path}/kernel"] = Parameter(shape, ("expert", *axes), tensor, first)
        if b.expert_bias:
            both = ("expert", None if name == "down" else "mlp")
            table[f"{path}/bias"] = Parameter(
                (experts.count, n_out), both, f"mlp.experts.{name}_proj_bias", 0.0
            )
    if experts.beside == "gate":
        gate = kernel(d, 1, ("embed", None), "mlp.shared_expert_gate.weight")
        table["mlp/shared_gate/kernel"] = replace(gate, fixed=True)
    if experts.beside == "norms":
        table["mlp/router_scale"] = Parameter((d,), (None,), "router.scale")
        table["mlp/expert_scale"] = Parameter((experts.count,), (None,), "router.per_expert_scale")
        for name, tensor in (
            ("out_norm", "post_feedforward_layernorm_1.weight"),
            ("experts_norm", "pre_feedforward_layernorm_2.weight"),
            ("experts_out_norm", "post_feedforward_layernorm_2.weight"),
        ):
            table[f"mlp/{name}/scale"] = norm_scale(c, d, tensor)
    return table


def mixture_block(
    c: DecoderLike,
    p: Arrays,
    x: jax.Array,
    residual: jax.Array,
    mesh: Mesh | None,
    routing: Routing,
) -> tuple[jax.Array, Routed]:
    """Computes what takes the place of the MLP: `mix` of x [B, T, D]; or that + sigmoid(gate(x)) *
    mlp(x); or, of Gemma 4, norm(mlp(x)) + norm(experts(norm(r))), of the residual r that x was made
    of, where the router reads r / rms(r) times a scale of each dim."""

    def held(p: Arrays) -> ExpertKernel:
        a = p.get("lora_a")
        a = None if a is None else c.lora.scale * a
        return ExpertKernel(p["kernel"], p.get(SCALE), p.get("bias"), a, p.get("lora_b"))

    router, (gate, up, down) = p["router"], (held(p["experts"][i]) for i in PROJECTIONS)
    bias, scale = router.get("bias"), p.get("expert_scale")
    kernels = ExpertKernels(router["kernel"], gate, up, down, bias, scale)
    activation = ACTIVATIONS[c.block.activation]
    activate = c.experts.clamp or (lambda gate, up: activation(gate) * up)
    run: Callable[..., Any] = partial(
        mix, c.experts, activate, mesh, routing=routing, frozen=c.lora is not None
    )
    if c.experts.beside != "norms":
        out, routed = run(x, kernels)
        if c.experts.beside == "gate":
            out = out + jax.nn.sigmoid(linear(c, p["shared_gate"], x)) * gated_mlp(c, p, x)
        return out, routed
    asked = multiply_vector(rms_norm(c, {}, residual), p["router_scale"].astype(x.dtype))
    asked = asked * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    out, routed = run(rms_norm(c, p["experts_norm"], residual), kernels, asked)
    dense = rms_norm(c, p["out_norm"], gated_mlp(c, p, x))
    return dense + rms_norm(c, p["experts_out_norm"], out), routed


def mix(
    experts: Experts,
    activate: Activate,
    mesh: Mesh | None,
    x: jax.Array,
    kernels: ExpertKernels,
    asked: jax.Array | None = None,
    *,
    routing: Routing,
    frozen: bool = False,
) -> tuple[jax.Array, Routed]:
    """Computes the sum over a token's experts of weight * down(activate(gate(x), up(x))).

    The router's logits are summed in float32, and all that follows is computed in it: probabilities
    by a softmax over all experts, of which the k largest are chosen.

    Args:
        x: [B, T, D], on a mesh its rows over the axes `ROWS`.
        asked: as x, what the router reads in its place.
        frozen: of the experts only adapters have gradients.
    """
    recorded, copies, ridge, split = routing
    over: SplitOver = None  # the axis that divides the experts, whose devices' tokens meet
    width: SplitOver = None  # the axis that divides the width of each expert
    tokens = PartitionSpec(ROWS, *split or (None,))
    alone = mesh is None or mesh.size == 1

    def on_device(
        x: jax.Array,
        kernels: ExpertKernels,
        asked: jax.Array | None,
        recorded: jax.Array | None,
        copies: jax.Array | None,
    ) -> tuple[jax.Array, Routed]:
        rows = x.reshape(-1, x.shape[-1])
        replayed = None if recorded is None else recorded.reshape(-1, experts.chosen)
        read = rows if asked is None else asked.reshape(rows.shape)
        ids, weights, logprobs = route(experts, read, kernels.router, replayed, kernels.router_bias)
        if kernels.scale is not None:
            weights = weights * kernels.scale.astype(jnp.float32)[ids]
        probs = jnp.exp(logprobs)
        entropy = -(probs * logprobs).sum(-1)
        mass = None if copies is None else (copies.reshape(-1, 1) * probs).sum(0)
        if mass is not None and not alone:
            mass = jax.lax.psum(mass, (*ROWS, *split))
        routed = Routed(ids.reshape(*x.shape[:2], -1), entropy.reshape(x.shape[:2]), mass)
        bias, shift = kernels.down.bias, None
        if bias is not None:  # [E, D], of each token's experts, weighted: [n, D] float32
            part = _by_expert(ids, weights, len(bias))
            shift = jnp.matmul(part, bias.astype(jnp.float32), precision="highest")
        if over is not None:
            parts = rows, ids, weights
            rows, ids, weights = (jax.lax.all_gather(part, over, tiled=True) for part in parts)
            ids = ids - jax.lax.axis_index(over) * len(kernels.gate.kernel)
        down = kernels.down._replace(bias=None)
        products = (_cast(part, x.dtype) for part in (kernels.gate, kernels.up, down))
        if ridge is None:
            size = block_rows(ids.size, experts.count)
            out = chosen_experts(activate, size, frozen, rows, ids, weights, *products)
        else:
            (n, k), (count, *_, wide) = ids.shape, kernels.gate.kernel.shape
            size = step_rows(n, k, count, rows.shape[1], wide, ridge)
            if size == len(rows):
                out = every_expert(activate, rows, ids, weights, *products)
            else:
                out = step_experts(activate, size, rows, ids, weights, *products)
        if over is not None:
            out = jax.lax.psum_scatter(out, over, tiled=True)
        if width is not None:
            out = jax.lax.psum(out, width)
        if shift is not None:
            out = (out.astype(jnp.float32) + shift).astype(x.dtype)
        return out.reshape(x.shape), routed

    arguments = x, kernels, asked, recorded, copies
    if mesh is None or mesh.size == 1:
        return on_device(*arguments)
    by_expert = dim_spec(experts.count, (EXPERTS,), mesh.shape)
    down = kernels.down
    wide = down.kernel.shape[1] if down.scale is None else down.scale.shape[1]
    by_width = dim_spec(wide, ("tensor",), mesh.shape)  # of a quantised kernel, its blocks
    over = by_expert if mesh.shape[EXPERTS] > 1 else None
    width = by_width if mesh.shape["tensor"] > 1 else None
    whole = PartitionSpec()
    into = PartitionSpec(by_expert, None, by_width)
    out_of = PartitionSpec(by_expert, by_width, None)
    both, outs = PartitionSpec(by_expert), PartitionSpec(by_expert, by_width)
    first = ExpertKernel(into, into, outs, both, into)
    last = ExpertKernel(out_of, out_of, whole, out_of, both)
    parts = ExpertKernels(whole, first, first, last, whole, whole)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(tokens, parts, tokens, tokens, tokens),
        out_specs=(tokens, Routed(tokens, tokens, whole)),
        check_vma=False,
    )(*arguments)


def route(
    experts: Experts,
    x: jax.Array,
    router: jax.Array,
    recorded: jax.Array | None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Routes tokens x [n, D]: returns their experts [n, k] int32, the weights of these [n, k]
    float32, and the log-probabilities [n, E] of the router [D, E], which may have a bias [E].
    `recorded` [n, k] is as in `Routing`."""
    logits = jnp.matmul(x, router.astype(x.dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)[None]
    logprobs = jax.nn.log_softmax(logits, -1)
    probs = jnp.exp(logprobs)
    _, ids = jax.lax.top_k(jax.lax.stop_gradient(logits), experts.chosen)
    if recorded is not None:
        replayed = recorded.astype(jnp.int32)
        ids = jnp.where(replayed < 0, ids, replayed)
    weights = jnp.take_along_axis(probs, ids, -1)
    if experts.normalised:  # over the chosen ones, which may be improbable where they are replayed
        weights = jax.nn.softmax(jnp.take_along_axis(logits, ids, -1), -1)
    return ids, weights, logprobs


def _by_expert(ids: jax.Array, weights: jax.Array, count: int) -> jax.Array:
    """Returns the weight of each expert, [n, E], 0 where a token does not pass it."""
    passes = ids[:, :, None] == jnp.arange(count)[None, None]
    return jnp.where(passes, weights[:, :, None], 0.0).sum(1)


def _cast(projection: ExpertKernel, dtype: np.dtype) -> ExpertKernel:
    """Casts what is multiplied to the dtype of the products; biases are added as they are."""
    kernel = projection.kernel if projection.scale is not None else projection.kernel.astype(dtype)
    a, b = (x if x is None else x.astype(dtype) for x in (projection.lora_a, projection.lora_b))
    return projection._replace(kernel=kernel, lora_a=a, lora_b=b)


def more_blocks(rows: int, chosen: int, count: int, size: int) -> int:
    """Returns how many blocks of `size` rows `count` experts can need beside one for each, where
    each of `rows` tokens passes `chosen` experts, here or elsewhere."""
    return min(rows * min(chosen, count) // size, count * (-(-rows // size) - 1))


def step_rows(rows: int, chosen: int, count: int, d: int, f: int, ridge: float) -> int:
    """Returns the size of the blocks in which a decode step computes its experts, `rows` where
    every expert computes every token.

    Above the ridge it takes the power of two whose products, or reads and writes, take the least
    time. One block for each expert is always computed, with the kernel where it is; the kernels of
    `more_blocks` are gathered.

    Args:
        rows: tokens that meet on a device.
        count: experts of the device.
        d: width of the model; f: of an expert.
        ridge: FLOPs of the device for each byte that its memory moves (`targets.ridge`).
    """

    def cost(size: int) -> float:
        """Counts reads of a kernel, over three projections: six times a row goes in or out of one
        at the width of an expert. At that of the model four times, unless `every_expert` is
        computed, which reads the tokens as they are and sums in its last product."""
        more = more_blocks(rows, chosen, count, size)
        moved = (count + more) * size * (6 * f + (4 * d if more else 0)) / (3 * d * f)
        return max(count + MOVES * more + moved, (count + more) * size / ridge)

    if rows <= ridge:
        return rows
    smaller = (1 << i for i in range(LEAST_BLOCK.bit_length() - 1, (rows - 1).bit_length()))
    return min((rows, *smaller), key=cost)


def step_experts(
    activate: Activate,
    size: int,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *projections: ExpertKernel,
) -> jax.Array:
    """Computes `chosen_experts` without a loop, which would end the CUDA graph of a decode step.

    Each expert has a block of `size` rows. The rows that an expert has beyond it are in further
    blocks, of which there are always as many as the worst choice of experts needs.
    """
    count, (n, k) = len(projections[0].kernel), ids.shape
    matches = ids[:, :, None] == jnp.arange(count)[None, None]  # [n, k, E]
    passes = matches.any(1).astype(jnp.int32)
    before = jnp.cumsum(passes, 0) - passes  # of an expert's rows, those of earlier tokens
    rank = jnp.where(matches, before[:, None], 0).sum(-1)
    more = jnp.maximum(-(-passes.sum(0) // size) - 1, 0)
    ends = jnp.cumsum(more)
    further = jnp.where(matches, (ends - more)[None, None], 0).sum(-1) + rank // size - 1 + count
    total = count + more_blocks(n, k, count, size)
    place = jnp.where(rank < size, ids, further) * size + rank % size
    place = jnp.where(matches.any(-1), place, total * size)
    source = jnp.full(total * size, n * k, jnp.int32)
    numbers = jnp.arange(n * k, dtype=jnp.int32)
    source = source.at[place.reshape(-1)].set(numbers, mode="drop")
    of = (ends[None] <= jnp.arange(total - count)[:, None]).sum(1)  # `searchsorted` is a loop
    of = jnp.minimum(of, count - 1)

    def run(source: jax.Array, projections: Sequence[ExpertKernel]) -> jax.Array:
        taken = _take(x, source // k).reshape(-1, size, x.shape[1])
        row_weights = _take(weights.reshape(-1), source).reshape(-1, size, 1)
        return _run_experts(activate, projections, taken, row_weights).reshape(len(source), -1)

    first, rest = jnp.split(source, [count * size])
    out = [run(first, projections), run(rest, [_pick_experts(one, of) for one in projections])]
    return _sum_rows(jnp.concatenate(out), place).astype(x.dtype)


def every_expert(
    activate: Activate,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: ExpertKernel,
    up: ExpertKernel,
    down: ExpertKernel,
) -> jax.Array:
    """Computes `chosen_experts` for few tokens."""
    count = len(gate.kernel)
    expert_weights = _by_expert(ids, weights, count).T[..., None]  # [E, n, 1]
    rows = jnp.broadcast_to(x[None], (count, *x.shape))
    wide = _activate(activate, _project(gate, rows), _project(up, rows), expert_weights)
    if down.lora_a is None and down.scale is None:
        return jnp.einsum("eni,eid->nd", wide, down.kernel)
    return _project(down, wide).sum(0)


def _run_experts(
    activate: Activate, projections: Sequence[ExpertKernel], x: jax.Array, weights: jax.Array
) -> jax.Array:
    """Passes x [M, n, D] through M experts; weights [M, n, 1]."""
    gate, up, down = projections
    return _project(down, _activate(activate, _project(gate, x), _project(up, x), weights))


def _project(by: ExpertKernel, x: jax.Array) -> jax.Array:
    """Passes x [M, n, in] through the projection of each of M experts."""
    if by.scale is not None:
        # That depends on x: else XLA dequantises all kernels before a loop that reads them.
        x, *held = jax.lax.optimization_barrier((x, by.kernel, by.scale))
        by = by._replace(kernel=held[0], scale=held[1])
    y = x @ _kernel(by, x.dtype)
    if by.lora_a is not None and by.lora_b is not None:
        y = y + _low_rank_product(x, by.lora_a, by.lora_b)
    return y if by.bias is None else y + by.bias.astype(x.dtype)[:, None]


def _kernel(of: ExpertKernel, dtype: np.dtype) -> jax.Array:
    return of.kernel if of.scale is None else dequantise(of.kernel, of.scale, dtype)


def _low_rank_product(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return (x @ a) @ b


def block_rows(rows: int, count: int) -> int:
    """Returns the number of rows in a block, where `rows` rows pass `count` experts."""
    mean = max(rows // count, 1)
    return min(max(1 << (mean.bit_length() - 1), LEAST_BLOCK), MOST_BLOCK)


class _Sorted(NamedTuple):
    """Rows of tokens by expert, in blocks."""

    place: jax.Array
    """[n, k] int32: the row of each of a token's experts; past the end where it is not here."""
    source: jax.Array
    """[R] int32: which token's which expert a row is, t * k + j; n * k at padding."""
    expert: jax.Array
    """[M] int32: of each block."""
    blocks: jax.Array
    """Scalar int32: how many blocks hold a token; they are the first ones."""
    size: int
    """Rows of a block."""
    at_once: int
    """Blocks that are computed at a time; M is a multiple of it."""

    @property
    def step(self) -> int:
        """Returns how many rows are computed at a time."""
        return self.at_once * self.size

    def chunk(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the sources of the i-th rows that are computed at once, and their blocks'
        experts."""
        sources = jax.lax.dynamic_slice_in_dim(self.source, i * self.step, self.step)
        return sources, jax.lax.dynamic_slice_in_dim(self.expert, i * self.at_once, self.at_once)

    def take(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Returns x[index] of rows that are computed at once, by block."""
        return _take(x, index).reshape(self.at_once, self.size, -1)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """Makes zeros that depend on the rows: XLA fills constants of all layers of an unstacked
        model before the first layer runs."""
        return jnp.full(shape, jnp.minimum(self.blocks, 0).astype(dtype))

    def loop(self, body: Callable[..., Carry], start: Carry) -> Carry:
        """Loops as far as there are tokens."""
        return jax.lax.fori_loop(0, -(-self.blocks // self.at_once), body, start)


def _sort(ids: jax.Array, experts: int, size: int) -> _Sorted:
    """Sorts rows for `ids` [n, k], of which only 0 to experts - 1 are here, into blocks of `size`
    rows."""
    flat, total = ids.reshape(-1), ids.size
    at_once = min(max(AT_ONCE // size, 1), total // size + experts)
    flat = jnp.where((flat < 0) | (flat >= experts), experts, flat)
    count = -(-(total // size + experts) // at_once) * at_once
    sizes = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)
    ends = jnp.cumsum(-(-sizes[:experts] // size))
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1] * size, jnp.full(1, count * size)])
    order = jnp.argsort(flat, stable=True)
    ordered = flat[order]
    rank = jnp.arange(total) - (jnp.cumsum(sizes) - sizes)[ordered]
    place = jnp.zeros(total, jnp.int32).at[order].set((first[ordered] + rank).astype(jnp.int32))
    source = jnp.full(count * size, total, jnp.int32)
    source = source.at[place].set(jnp.arange(total, dtype=jnp.int32), mode="drop")
    expert = jnp.searchsorted(ends, jnp.arange(count), side="right").astype(jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    return _Sorted(place.reshape(ids.shape), source, expert, ends[-1], size, at_once)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def chosen_experts(
    activate: Activate,
    size: int,
    frozen: bool,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *projections: ExpertKernel,
) -> jax.Array:
    """Computes [n, D]: for each token x [n, D] the sum of weight * down(activate(gate(x), up(x)))
    over those of its experts `ids` [n, k] that are among the E of `projections`: gate, up, and
    down, which has no bias.

    The backward pass keeps the arguments alone, and computes gate and up again.

    Args:
        size: rows of a block.
        frozen: only adapters have gradients, of all parameters.
        weights: [n, k] float32.
    """
    rows, k = _sort(ids, len(projections[0].kernel), size), ids.shape[1]

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        sources, of = rows.chunk(i)
        taken, row_weights = rows.take(x, sources // k), rows.take(weights.reshape(-1), sources)
        result = _run_experts(
            activate, [_pick_experts(part, of) for part in projections], taken, row_weights
        )
        result = result.reshape(rows.step, -1)
        return jax.lax.dynamic_update_slice_in_dim(out, result, i * rows.step, 0)

    out = rows.zeros((len(rows.source), x.shape[1]), x.dtype)
    return _sum_rows(rows.loop(body, out), rows.place).astype(x.dtype)


def _pick_experts(of: ExpertKernel, experts: jax.Array) -> ExpertKernel:
    """Picks for each block the kernel of its expert [M]."""
    return jax.tree.map(lambda leaf: leaf[experts], of)


def _backward(
    activate: Activate, size: int, frozen: bool, kept: Tree, d_out: jax.Array
) -> tuple[Tree, ...]:
    x, ids, weights, *projections = kept
    rows, k = _sort(ids, len(projections[0].kernel), size), ids.shape[1]

    def body(i: jax.Array, carry: Tree) -> Tree:
        d_rows, d_weights, sums = carry
        sources, of = rows.chunk(i)
        taken, d_taken = (rows.take(part, sources // k) for part in (x, d_out))
        row_weights = rows.take(weights.reshape(-1), sources)
        gate, up, down = (_pick_experts(part, of) for part in projections)
        both = _project(gate, taken), _project(up, taken)
        wide, back = jax.vjp(partial(_activate, activate), *both, row_weights)
        of_wide, of_down = _gradients(down, wide, d_taken, frozen)
        of_gate, of_up, of_weights = back(of_wide)
        more, of_gate = _gradients(gate, taken, of_gate, frozen)
        of_rows, of_up = _gradients(up, taken, of_up, frozen)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * rows.step, axis=0)
        sums = jax.tree.map(
            lambda d, part: d.at[of].add(part.astype(d.dtype), indices_are_sorted=True),
            sums,
            (of_gate, of_up, of_down),
        )
        return (
            put(d_rows, (more + of_rows).reshape(rows.step, -1)),
            put(d_weights, of_weights.reshape(rows.step)),
            sums,
        )

    n = len(rows.source)
    trained = tuple(  # the leaves that have gradients
        part._replace(kernel=None, scale=None, bias=None) if frozen else part._replace(scale=None)
        for part in projections
    )
    zeros = (
        rows.zeros((n, x.shape[1]), x.dtype),
        rows.zeros((n,), weights.dtype),
        jax.tree.map(lambda like: rows.zeros(like.shape, jnp.dtype("float32")), trained),
    )
    d_rows, d_weights, sums = rows.loop(body, zeros)
    d_projections = jax.tree.map(lambda d, like: d.astype(like.dtype), sums, trained)
    return (
        _sum_rows(d_rows, rows.place).astype(x.dtype),
        None,
        _take(d_weights, rows.place),
        *d_projections,
    )


def _gradients(
    of: ExpertKernel, x: jax.Array, d_y: jax.Array, frozen: bool
) -> tuple[jax.Array, ExpertKernel]:
    """Computes the gradients of x [M, n, in] and of what is trained, in float32 where that is a
    kernel or a bias."""
    d_x = jnp.einsum("mbo,mio->mbi", d_y, _kernel(of, x.dtype))
    gradients = ExpertKernel(None)
    if not frozen:
        bias = None if of.bias is None else d_y.astype(jnp.float32).sum(1)
        kernel = jnp.einsum("mbi,mbo->mio", x, d_y, preferred_element_type=jnp.float32)
        gradients = gradients._replace(kernel=kernel, bias=bias)
    if of.lora_a is None or of.lora_b is None:
        return d_x, gradients
    _, back = jax.vjp(_low_rank_product, x, of.lora_a, of.lora_b)
    more, d_a, d_b = back(d_y)
    return d_x + more, gradients._replace(lora_a=d_a, lora_b=d_b)


chosen_experts.defvjp(
    lambda activate, size, frozen, *arrays: (
        chosen_experts(activate, size, frozen, *arrays),
        arrays,
    ),
    _backward,
)


def _activate(activate: Activate, gate: jax.Array, up: jax.Array, weights: jax.Array) -> jax.Array:
    """Computes what `down` gets. It is weighted here: one more product, but of rows that are
    thinner than D."""
    return (activate(gate, up).astype(weights.dtype) * weights).astype(gate.dtype)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index], 0 past the end."""
    return jnp.take(x, index, 0, mode="fill", fill_value=0)


def _sum_rows(rows: jax.Array, place: jax.Array) -> jax.Array:
    """Sums the rows of each token, [n, D] float32."""
    return _take(rows, place).astype(jnp.float32).sum(1)


def expert_load(experts: Experts, ids: jax.Array, real: jax.Array) -> jax.Array:
    """Computes for each layer, [L] float32, the tokens at the expert that gets most of them,
    divided by the number that each would get if all got equally many; at least 1, at most E / k.

    Args:
        ids: [L, X, n, k] (`Routed`).
        real: [X, n] bool, True at tokens.
    """
    uniform = jnp.maximum(real.sum() * experts.chosen / experts.count, 1e-9)
    return _tokens_of(experts, ids, real).max(-1) / uniform


def _tokens_of(experts: Experts, ids: jax.Array, real: jax.Array) -> jax.Array:
    """Counts the tokens at each expert, [L, E] float32; arguments as in `expert_load`."""
    layers = jnp.broadcast_to(jnp.arange(len(ids))[:, None, None, None], ids.shape)
    counted = jnp.broadcast_to(real[None, :, :, None], ids.shape).astype(jnp.float32)
    return jnp.zeros((len(ids), experts.count), jnp.float32).at[layers, ids].add(counted)


def tokens_of_experts(experts: Experts, routed: Routed, copies: jax.Array) -> jax.Array:
    """Returns how many tokens pass each expert, over all layers, and after them how many there are:
    [E + 1] float32.

    Args:
        routed: of all layers, each leaf [L, ...].
        copies: [X, n] float32: how often each token counts.
    """
    tokens = copies.sum(keepdims=True).reshape(1) * len(routed.ids)
    return jnp.concatenate([_tokens_of(experts, routed.ids, copies).sum(0), tokens])


def balance_loss(experts: Experts, routed: Routed, tokens: jax.Array) -> jax.Array:
    """Computes E sum_e f_e P_e (Switch Transformer, arXiv 2101.03961, eq. 4-6; as in transformers,
    of all layers at once): f_e is the share of tokens that pass expert e, of which each passes k,
    and P_e its mean probability, both over tokens and layers. Scalar float32; k where both are
    uniform. The gradient is that of the probabilities.

    Args:
        routed: of all layers, each leaf [L, ...], with `mass`.
        tokens: [E + 1] `tokens_of_experts`: of these tokens, or of all tokens that they are a part
            of. The losses of the parts then add up to that of the whole, because f is a constant.
    """
    assert routed.mass is not None
    share, mean = (x / jnp.maximum(tokens[-1], 1) for x in (tokens[:-1], routed.mass.sum(0)))
    return experts.count * (share * mean).sum()
