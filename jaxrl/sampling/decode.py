"""The device side of sampling: prompts into keys and values, these into rows, launches of decode
steps, and what environments say into the slots of their episodes.

Every function is jitted once for the whole process, with the model's config and the mesh as static
arguments, so that engines of equal shapes share programs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxrl.models import decoder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Cache, Shared, SlotTokens
from jaxrl.models.delta import Recurrent, initial_state
from jaxrl.models.experts import Routed
from jaxrl.models.kernels import GPU, OLDEST, Target
from jaxrl.models.layers import by_rows
from jaxrl.models.parameters import Params
from jaxrl.models.shared_prompts import Pages, Seats
from jaxrl.process import xla_flags
from jaxrl.sampling.sampler import SamplingArrays, draw_tokens, sample_keys, uniforms
from jaxrl.sharding.axes import EXPERTS, ROWS
from jaxrl.types import Array, Tree

TOKEN, POSITION, COUNT, LIMIT, PROMPT, SAMPLE, KEY = range(7)
COLUMNS = KEY + 2
"""Columns of the slot table [B, 8] int32: the token to feed next and its position, how many tokens
the completion has and may have (a slot where they are equal is free), and what seeds its
randomness: two ids, and the bits of `sampler.first_key`."""
IDLE, NOT_RUN = -1, -2
"""In place of a token: the slot was free at that step; the step was not run."""


BATCH, HEADS_DIM, POSITIONS = range(3)
"""Dims of keys and values [B, KV, S, H]; states too have their slots at the first."""


def cache_specs(mesh: Mesh, cache: Cache) -> list[Tree]:
    """Returns a spec for each array of a cache: of keys or values [rows, KV, S, H], KV heads over
    tensor where it divides them; of a state (`delta.Recurrent`), its heads likewise."""

    specs = []
    for entry in cache:
        whole = entry.q if isinstance(entry, Recurrent) else entry[0] if entry else None
        divides = whole is not None and whole.shape[HEADS_DIM] % mesh.shape["tensor"] == 0
        spec = PartitionSpec(ROWS, "tensor" if divides else None, None, None)
        specs.append(jax.tree.map(lambda _, spec=spec: spec, entry))
    return specs


@partial(jax.jit, static_argnames=("config", "mesh", "slots", "length", "dtype"))
def new_cache(
    config: DecoderConfig, mesh: Mesh | None, slots: int, length: int, dtype: jnp.dtype
) -> Cache:
    """Makes a cache of zeros: per layer (k, v), each [slots, KV, length, H], or its state, or
    nothing where it borrows."""

    cache: Cache = []
    for i in range(config.n_layers):
        kind = config.kinds[i % config.cycle]
        layer = config.layer_of(kind)
        shape = (slots, layer.n_kv_heads, length, layer.head_dim)
        if kind.recurs:
            cache.append(initial_state(config.delta, slots, dtype))
        else:
            cache.append(() if kind.borrows else (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))
    return _constrain(mesh, cache)


@partial(jax.jit, static_argnames=("config", "mesh", "length"))
def resize(
    config: DecoderConfig,
    mesh: Mesh | None,
    layer: Cache,
    length: int,
    kept: jax.Array | None = None,
) -> Cache:
    """Gives some layers of a cache `length` positions: the first ones, or zeros behind all. States
    have no positions. The rows are prompts, slots or pages.

    Args:
        kept: [rows left] int32: the rows that each device keeps, counted among its own; None: all
            of them.
    """

    if kept is not None:
        layer = _select(mesh, layer, kept)
    for i, entry in enumerate(layer):
        if entry and not isinstance(entry, Recurrent):
            more = max(0, length - entry[0].shape[POSITIONS])
            pad = (0, 0), (0, 0), (0, more), (0, 0)
            layer[i] = jax.tree.map(lambda x, pad=pad: jnp.pad(x, pad)[..., :length, :], entry)
    return _constrain(mesh, layer)


def _select(mesh: Mesh | None, cache: Cache, slots: jax.Array) -> Cache:
    """Selects slots [X*b] int32 of the cache: each device's counted among its own."""

    return _on_each_device(
        lambda cache, slots: jax.tree.map(lambda x: jnp.take(x, slots, BATCH, mode="clip"), cache),
        *(mesh, [cache], slots),
    )


def _on_each_device(
    local: Callable[..., Tree],
    mesh: Mesh | None,
    caches: Sequence[Cache],
    *arrays: jax.Array,
    results: int = 1,
) -> Tree:
    """Runs `local` on each device's rows of caches, and on arrays [X*b, ...]. It returns the first
    cache or, as a tuple, the first ones."""
    if mesh is None:
        return local(*caches, *arrays)
    parts = [cache_specs(mesh, cache) for cache in caches]
    specs = (*parts, *[PartitionSpec(ROWS)] * len(arrays))
    out = parts[0] if results == 1 else tuple(parts[:results])
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out)(*caches, *arrays)


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("cache",))
def extend_slots(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: Params,
    cache: Cache,
    prompts: Cache,
    tokens: SlotTokens,
    starts: jax.Array,
    slots: jax.Array,
    rows: jax.Array,
) -> Cache:
    """Computes the keys and values of further tokens of some slots, as `prefill_prompts` does those
    of prompts.

    Args:
        cache: of at least position - start + W positions for each of these slots, donated.
        prompts: those that slots share.
        tokens: [X*b, W]; the keys and values of what a shorter row has beyond its tokens are
            overwritten when its slot gets there, and read by none before that.
        starts: [X*b] int32, as in `decoder.extend`.
        slots: [X*b] int32: each device's b slots, counted among its own; a row that is none has a
            number beyond the last.
        rows: [X*b] int32: the row of each slot's prompt, counted likewise.
    """
    chosen = _select(mesh, cache, slots)
    shared = _select(mesh, prompts, rows)
    tokens, starts = jax.tree.map(lambda x: by_rows(x, mesh), (tokens, starts))
    chosen = decoder.extend(config, params, chosen, shared, tokens, starts, mesh=mesh)
    chosen = _constrain(mesh, chosen)

    def put(cache: Cache, chosen: Cache, slots: jax.Array) -> Cache:
        return jax.tree.map(lambda x, new: x.at[slots].set(new, mode="drop"), cache, chosen)

    cache = _on_each_device(put, mesh, [cache, chosen], slots)
    return _constrain(mesh, cache)


@partial(jax.jit, static_argnames=("config", "mesh", "record"))
def prefill_prompts(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    record: bool = False,
) -> tuple[Cache, jax.Array | None]:
    """Computes the keys and values of right-padded prompts [X*b, P] of `lengths` [X*b], of which
    each data shard computes and keeps its own b; and, to `record`, the experts [X*b, P, L, k] that
    each token passes.

    The hidden states are not needed: a slot starts by feeding the last prompt token again, so that
    the first token of a completion is sampled by the same program as the others. States are those
    before that token, which they would else read twice.
    """
    tokens, lengths = by_rows(tokens, mesh), by_rows(lengths, mesh)
    read = lengths if config.n_recurrent == 0 else lengths - 1
    mask = jnp.arange(tokens.shape[1])[None] < read[:, None]
    routed: list[Routed] = []
    _, cache = decoder.prefill(config, params, tokens, mask, mesh=mesh, routed=routed)
    chosen = _recorded_experts(config, routed) if record else None
    return _constrain(mesh, cache), _replicate_for_host(chosen, mesh)


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("cache",))
def insert(
    config: DecoderConfig, mesh: Mesh | None, cache: Cache, prompts: Cache, source: jax.Array
) -> Cache:
    """Copies row source[i] of a device's `prompts` into row i of its `cache`, where that is not -1.

    Args:
        cache: of B rows, which slots share, and S positions; donated.
        prompts: of `prefill_prompts`, of X*b rows and P positions; those from S on are left out.
        source: [B] int32: rows of `prompts`, counted among the device's own.
    """

    def copy(source: jax.Array, cached: jax.Array, prefilled: jax.Array) -> jax.Array:
        width = min(cached.shape[POSITIONS], prefilled.shape[POSITIONS])
        new = jnp.take(prefilled[..., :width, :], jnp.maximum(source, 0), BATCH)
        filled = (source >= 0)[:, None, None, None]
        new = jnp.where(filled, new.astype(cached.dtype), cached[..., :width, :])
        return cached.at[..., :width, :].set(new)

    return _on_each_device(
        lambda cache, prompts, source: jax.tree.map(partial(copy, source), cache, prompts),
        *(mesh, [cache, prompts], source),
    )


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("cache", "prompts"))
def insert_recomputed(
    config: DecoderConfig,
    mesh: Mesh | None,
    cache: Cache,
    prompts: Cache,
    read: Cache,
    rows: jax.Array,
    starts: jax.Array,
    pages: jax.Array,
) -> tuple[Cache, Cache]:
    """Copies one sequence of each data shard, which begins with its prompt, to where its slot
    reads it.

    Args:
        cache: a pool of pages of P positions, donated.
        prompts: those that slots share, donated.
        read: of `prefill_prompts`, X rows.
        rows: [X] int32: the row of `prompts`, counted among the shard's own; -1: it is there.
        starts: [X] int32: the position that is the first one of the pages.
        pages: [X, n] int32: the pages, counted likewise; -1: none.

    Returns:
        The pool and the prompts.
    """

    def local(cache: Cache, prompts: Cache, read: Cache, *arrays: jax.Array) -> tuple[Cache, Cache]:
        rows, starts, pages = arrays

        def place(at: jax.Array, count: int) -> jax.Array:
            return jnp.where(at >= 0, at, count)  # beyond the last: dropped

        def to_row(cached: jax.Array, prefilled: jax.Array) -> jax.Array:
            width = min(cached.shape[POSITIONS], prefilled.shape[POSITIONS])
            at = place(rows, len(cached))
            return cached.at[at, :, :width].set(prefilled[:, :, :width], mode="drop")

        def to_pages(cached: jax.Array, prefilled: jax.Array) -> jax.Array:
            _, heads, size, dim = cached.shape
            span = pages.shape[1] * size
            prefilled = jnp.pad(prefilled[0], [(0, 0), (0, span), (0, 0)])
            new = jax.lax.dynamic_slice_in_dim(prefilled, starts[0], span, 1)
            new = jnp.swapaxes(new.reshape(heads, -1, size, dim), 0, 1)
            return cached.at[place(pages[0], len(cached))].set(new, mode="drop")

        return jax.tree.map(to_pages, cache, read), jax.tree.map(to_row, prompts, read)

    caches, arrays = [cache, prompts, read], (rows, starts, pages)
    return _on_each_device(local, mesh, caches, *arrays, results=2)


LAUNCH_STATIC = ("config", "mesh", "n_tokens", "check_every", "record")


@partial(jax.jit, static_argnames=LAUNCH_STATIC, donate_argnames=("cache",))
def launch(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: Params,
    cache: Cache,
    slots: jax.Array,
    exit_free: jax.Array,
    knobs: SamplingArrays,
    prompts: tuple[Cache, Seats],
    pages: Pages | None = None,
    *,
    n_tokens: int,
    check_every: int,
    record: bool = False,
) -> tuple[Cache, jax.Array, jax.Array | None]:
    """Runs up to n_tokens decode steps; ends early once at least `exit_free` slots are free.

    Args:
        params: unstacked.
        cache: of S positions behind the prompts, donated: the first is that of the key of each
            prompt's last token. S is above every position that is reached, and all of it is read.
        slots: [B, 8] int32, see the columns above.
        prompts: those that slots share, and their seats.
        pages: those of `cache`, where it is a pool of them.
        check_every: static divisor of n_tokens: steps between two looks at the number of free
            slots. On several devices a look is a collective, on a GPU also a wait of the host;
            equal to n_tokens, the launch has a fixed length.
        record: also return the experts of a mixture.

    Returns:
        The cache; [n_tokens, B, 3] int32: token (or IDLE, NOT_RUN) and the bits of its two float32
        log-probs; and the experts [n_tokens, B, L, k] that the token before it passed, or None.
    """
    slots = by_rows(slots, mesh)
    first = jax.lax.bitcast_convert_type(slots[:, KEY:COLUMNS], jnp.uint32)
    keys = by_rows(sample_keys(first, slots[:, PROMPT], slots[:, SAMPLE]), mesh)
    state = tuple(slots[:, column] for column in (TOKEN, POSITION, COUNT, LIMIT))
    held, seats = prompts
    starts = by_rows(slots[:, POSITION] - slots[:, COUNT], mesh)
    seats = Seats(*(by_rows(x, mesh) for x in seats))
    pages = None if pages is None else Pages(*(by_rows(x, mesh) for x in pages))
    shared = Shared(held, seats, starts, pages)
    if config.n_recurrent:
        cache = _begin_states(mesh, cache, shared, fresh=slots[:, COUNT] == 0)
    out = {"drawn": by_rows(jnp.full((slots.shape[0], n_tokens, 3), NOT_RUN, jnp.int32), mesh)}
    if record:
        assert config.experts is not None
        shape = (slots.shape[0], n_tokens, config.n_layers, config.experts.chosen)
        out["experts"] = by_rows(jnp.zeros(shape, config.experts.id_dtype), mesh)

    def step(carry: Tree, _: None) -> tuple[Tree, dict[str, jax.Array]]:
        cache, (tokens, positions, counts, limits) = carry
        routed: list[Routed] = []
        active = by_rows(counts < limits, mesh)
        arguments = config, params, cache, SlotTokens(tokens, positions, active), shared
        hidden, cache = decoder.decode_step(*arguments, mesh=mesh, routed=routed)
        logits = decoder.token_logits(config, params, hidden)
        if mesh is not None:
            # Rows over all axes, and V whole: each row is sampled by one device, in one order of
            # adding. First as the matmul leaves them; else XLA gathers the head's weights instead.
            vocab = "tensor" if logits.shape[1] % mesh.shape["tensor"] == 0 else None
            for spec in (PartitionSpec(ROWS, vocab), PartitionSpec((*ROWS, "tensor"), None)):
                logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, spec))
        draw = draw_tokens(logits, by_rows(uniforms(keys, counts), mesh), knobs)
        logprobs = jnp.stack([draw.logprobs, draw.sampler_logprobs], -1)
        bits = jax.lax.bitcast_convert_type(logprobs.astype(jnp.float32), jnp.int32)
        drawn = by_rows(jnp.concatenate([draw.tokens[:, None], bits], -1), mesh)
        tokens = jnp.where(active, drawn[:, 0], tokens)
        counts = counts + active
        ends = (tokens[:, None] == knobs.eos_ids[None, :]).any(-1)
        ended = by_rows(active & ends, mesh)
        limits = jnp.where(ended, counts, limits)
        state = tuple(by_rows(x, mesh) for x in (tokens, positions + active, counts, limits))
        row = {"drawn": jnp.where(active[:, None], drawn, IDLE)}
        if record:
            row["experts"] = by_rows(_recorded_experts(config, routed)[:, 0], mesh)
        return (cache, state), row

    def unfinished(carry: Tree) -> jax.Array:
        done, _, (_, _, counts, limits), _ = carry
        return (done < n_tokens) & (jnp.sum(counts >= limits) < exit_free)

    def steps(carry: Tree) -> Tree:
        done, cache, state, out = carry
        (cache, state), rows = jax.lax.scan(step, (cache, state), length=check_every)
        for name, new in rows.items():
            new = jnp.swapaxes(new, 0, 1)
            out = out | {name: jax.lax.dynamic_update_slice_in_dim(out[name], new, done, 1)}
        return done + check_every, cache, state, out

    start = (jnp.int32(0), cache, state, out)
    _, cache, _, out = jax.lax.while_loop(unfinished, steps, start)
    out = {name: _replicate_for_host(jnp.swapaxes(x, 0, 1), mesh) for name, x in out.items()}
    return _constrain(mesh, cache), out["drawn"], out.get("experts")


NO_MERGING: dict[str, str | int] = {"xla_gpu_dot_merger_threshold_mb": 0}
"""Without it, XLA makes one product of those that read the same rows, and concatenates their
weights in each step: only Triton's products read these where they are."""
GRAPHED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"
"""What XLA may put into a CUDA graph: by default all of these but collectives."""


def launch_on(target: Target, mesh: Mesh | None) -> Wrapped:
    """Returns `launch` with `launch_options` of a mesh of such devices."""
    options = launch_options(target, {} if mesh is None else mesh.shape)
    return launch_with(tuple(options.items())) if options else launch


def launch_options(target: Target, axes: Mapping[str, int]) -> dict[str, str | int]:
    """Returns the compiler options of a launch on a mesh of such devices and axes; none for what
    the user's own `XLA_FLAGS` decide."""
    if target.platform not in GPU or target.capability is None:
        return {}
    options: dict[str, str | int] = {}
    triton = xla_flags.value_of("--xla_gpu_enable_triton_gemm")
    if target.capability < OLDEST or (triton or "").lower() in xla_flags.OFF:
        options |= NO_MERGING
    if axes.get("tensor", 1) * axes.get(EXPERTS, 1) > 1:
        # A collective would end a graph, several times in each layer.
        options["xla_gpu_enable_command_buffer"] = GRAPHED
    return {name: x for name, x in options.items() if xla_flags.value_of(f"--{name}") is None}


@lru_cache
def launch_with(options: tuple[tuple[str, str | int], ...]) -> Wrapped:
    """Returns one function for the same options: programs are compiled once a function."""
    return jax.jit(
        inspect.unwrap(launch),
        static_argnames=LAUNCH_STATIC,
        donate_argnames=("cache",),
        compiler_options=dict(options),
    )


def _begin_states(mesh: Mesh | None, cache: Cache, shared: Shared, fresh: jax.Array) -> Cache:
    """Returns the cache with the states of slots [B] that are fresh replaced by those of their
    prompts. Once a launch: in each step, that would read all states twice."""
    seats = shared.seats.slots.shape[1]

    def local(cache: Cache, prompts: Cache, places: jax.Array, fresh: jax.Array) -> Cache:
        def begin(entry: Tree, prompt: Tree) -> Tree:
            if not isinstance(entry, Recurrent):
                return entry
            start = jax.tree.map(lambda x: jnp.take(x, places // seats, BATCH, mode="clip"), prompt)
            return jax.tree.map(partial(jnp.where, fresh[:, None, None, None]), start, entry)

        return [begin(entry, prompt) for entry, prompt in zip(cache, prompts, strict=True)]

    caches = [cache, shared.cache]
    return _on_each_device(local, mesh, caches, shared.seats.places, fresh)


def _recorded_experts(config: DecoderConfig, routed: list[Routed]) -> jax.Array:
    """Returns the experts [B, T, L, k] of tokens [B, T]."""
    assert config.experts is not None
    return jnp.moveaxis(routed[0].ids, 0, 2).astype(config.experts.id_dtype)


def _replicate_for_host(x: Array, mesh: Mesh | None) -> Array:
    """Returns an array that the host of each process can read, or None: whole on every device where
    there are several processes. Within one, a collective behind a launch's loop would only keep the
    program out of the compile cache (`process.compile_cache`)."""
    if mesh is None or x is None or len({d.process_index for d in mesh.devices.flat}) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def _constrain(mesh: Mesh | None, cache: Cache) -> Cache:
    """Divides the rows of a cache over (data, fsdp)."""
    if mesh is None:
        return cache

    return jax.tree.map(
        lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)),
        *(cache, cache_specs(mesh, cache)),
    )
