"""The programs of the sampling engine, with abstract arguments; they mirror how `jaxrl.sampling`
builds and calls them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.aot.abstract import AbstractRun, Program, local_bytes, shaped
from jaxrl.models.cached import Cache, keys_of
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Recurrent
from jaxrl.models.pages import PAGE, Pages
from jaxrl.models.parameters import Layout, Params
from jaxrl.models.shared_prompts import Seats
from jaxrl.plan.sampling import EVALUATIONS, asked, prefill_rows
from jaxrl.roles.rollout import evaluation_sampling, training_sampling
from jaxrl.sampling import decode
from jaxrl.sampling.engine import ANSWER_ROWS, ANSWER_TOKENS, Engine
from jaxrl.sampling.page_pool import pages_of
from jaxrl.sampling.prompt_rows import rows_at_most
from jaxrl.sampling.sampler import sampling_arrays
from jaxrl.sharding.axes import ROWS


def sampling(
    run: AbstractRun,
    role: str,
    model: DecoderConfig,
    dtype: Any,
    layout: Layout,
    share: float,
    evaluates: bool,
) -> Iterator[Program]:
    """The programs of the sampling engine: prefill of a batch of prompts, the copy of their keys
    and values into slots, launches of decode steps, and changes of the cache's size.

    Args:
        share: fraction of the training batches that this role samples.
        evaluates: whether it samples for evaluations.
    """
    c, m, mesh, at = run.config, run.setting, run.meshes[role], run.everywhere(role)
    most = c.teacher_new_tokens if role == "teacher" else c.max_new_tokens
    longest = max(most, c.eval.max_new_tokens or 0)
    engine = Engine(
        model,
        mesh,
        slots=c.rollout.slots or m.sequences,
        max_prompt_tokens=c.teacher_prompt_tokens if role == "teacher" else c.max_prompt_tokens,
        max_new_tokens=longest,
        launch_tokens=c.rollout.launch_tokens,
        cache_tokens=c.rollout.cache_tokens if role == "rollout" else None,
        episodes=role == "rollout" and c.environment.name is not None,
    )
    params, width = run.params(role, model, dtype, layout), m.prompts(role)
    prompts = prefill_rows(c, role, width, m.axes[role])

    def caches_of(count: int, samples: int) -> tuple[Cache, Cache]:
        return _slots_and_rows(engine, dtype, layout, count, samples, width)

    held = _cache(engine, dtype, layout, prompts, width, None)
    first, *_ = each_asked = asked(c, role)
    slots, rows = caches = caches_of(*first)
    yield from _resized(
        run, role, engine, params, layout, slots, local_bytes((params, held, rows)), share
    )
    tokens = shaped((prompts, width), jnp.int32, at)
    lengths = shaped((prompts,), jnp.int32, at)
    fills = math.ceil(share * c.batch_size / prompts)
    yield Program(
        role,
        "prefill",
        decode.prefill,
        (model, mesh, params, tokens, lengths),
        ("prefill",),
        beside=local_bytes(caches),
        calls=fills,
    )
    filled, unfilled = (rows, slots) if rows else (slots, rows)
    where = shaped((keys_of(filled).shape[decode.BATCH],), jnp.int32, at)
    number = shaped((), jnp.int32, at)
    yield Program(
        role,
        "insert",
        decode.insert,
        (model, mesh, filled, held, where),
        (),
        beside=local_bytes((params, unfilled)),
        calls=fills,
    )
    if engine.pages is not None:
        yield from _read_again(run, role, engine, params, slots, rows, local_bytes(held))
    if engine.episodes:
        answers = ANSWER_ROWS * engine.row_shards
        tokens = shaped((answers, ANSWER_TOKENS[1]), jnp.int32, at)
        of_each = shaped((answers,), jnp.int32, at)
        yield Program(
            role,
            "answers of environments",
            decode.extend,
            (model, mesh, params, slots, tokens, of_each, of_each, of_each),
            ("answers",),
            beside=local_bytes(held),
            calls=math.ceil(share * m.sequences / ANSWER_ROWS) * (c.environment.max_turns - 1),
        )
    ways = [(training_sampling(c, most), first)] * (share > 0)
    ways += [(evaluation_sampling(c, most), each) for each in each_asked[len(ways) :] if evaluates]
    found: dict[Any, Any] = {}
    for way, (count, samples) in ways:
        knobs = jax.tree.map(lambda x: shaped(x.shape, x.dtype, at), sampling_arrays(way, 0, 0))
        own, shared = caches_of(count, samples)
        kind = jax.tree.structure(knobs), bool(shared)
        given = _shared_by(engine, shared, samples), _pages(engine, longest)
        found.setdefault(kind, (own, knobs, *given))
    table = shaped((engine.slots, 6), jnp.int32, at)
    sizes = {"n_tokens": engine.launch_tokens, "check_every": engine.check_every}
    launches = -(-m.sequences // engine.slots) * -(-c.max_new_tokens // engine.launch_tokens)
    for i, (own, knobs, *given) in enumerate(found.values()):
        name = "decode" + EVALUATIONS * bool(i)
        yield Program(
            role,
            name,
            decode.launch,
            (model, mesh, params, own, table, number, knobs, *given),
            (name,),
            sizes | {"record": c.policy.router_replay and not i and role != "teacher"},
            beside=local_bytes(held),
            calls=0 if i else math.ceil(share * launches),
        )


def _cache(
    engine: Engine, dtype: Any, layout: Layout, rows: int, length: int, split: Any = ROWS
) -> Cache:
    """Abstract arrays of a cache, its rows over the axes `split`."""
    model, mesh = engine.config, engine.mesh
    assert mesh is not None
    whole = jax.eval_shape(
        lambda: decode.new_cache(model, None, rows, length, jnp.dtype(dtype), layout)
    )
    specs = decode.cache_specs(model, mesh, split, whole)
    return jax.tree.map(lambda x, s: shaped(x.shape, x.dtype, NamedSharding(mesh, s)), whole, specs)


def _slots_and_rows(
    engine: Engine, dtype: Any, layout: Layout, prompts: int, samples: int, width: int
) -> tuple[Cache, Cache]:
    """The largest cache of all slots, and that of the prompts that they share, if any: of `samples`
    of each of so many prompts."""
    if engine.why_not_shared(samples, dtype, layout) is not None:
        return _cache(engine, dtype, layout, engine.slots, engine.length), []
    shards = engine.row_shards
    rows = shards * rows_at_most(engine.slots // shards, shards, samples, prompts)
    own = engine.slots, engine.own_length
    if engine.pages is not None:
        own = engine.pages * shards, PAGE
    return _cache(engine, dtype, layout, *own), _cache(engine, dtype, layout, rows, width)


def _shared_by(engine: Engine, rows: Cache, samples: int) -> tuple[Cache, Seats] | None:
    """What a launch reads of shared prompts, if there are any."""
    if not rows:
        return None
    assert engine.mesh is not None
    count, each = keys_of(rows).shape[decode.BATCH], NamedSharding(engine.mesh, PartitionSpec(ROWS))
    sizes = (count, min(samples, engine.slots // engine.row_shards)), (count,), (engine.slots,)
    return rows, Seats(*(shaped(size, jnp.int32, each) for size in sizes))


def _pages(engine: Engine, longest: int) -> Pages | None:
    """What a launch reads of the pages of slots with completions as long as they may be."""
    if engine.pages is None:
        return None
    assert engine.mesh is not None
    each, count = NamedSharding(engine.mesh, PartitionSpec(ROWS)), engine.pages * engine.row_shards
    width = pages_of(engine.cache_length(longest, engine.slots, own=True))
    sizes = (count,), (count,), (engine.slots, width)
    return Pages(*(shaped(size, jnp.int32, each) for size in sizes))


def _read_again(
    run: AbstractRun,
    role: str,
    engine: Engine,
    params: Params,
    pool: Cache,
    prompts: Cache,
    beside: int,
) -> Iterator[Program]:
    """The programs by which samples that had to wait for pages are read again; what a run needs
    none of where its pages suffice.

    Args:
        beside: bytes of the prompts that were prefilled last.
    """
    model, mesh, at, shards = engine.config, engine.mesh, run.everywhere(role), engine.row_shards
    assert mesh is not None
    width = engine.read_again_width(engine.max_prompt_tokens + engine.max_new_tokens)
    tokens, each = shaped((shards, width), jnp.int32, at), shaped((shards,), jnp.int32, at)
    yield Program(
        role,
        "read again",
        decode.prefill,
        (model, mesh, params, tokens, each),
        ("read again",),
        {"apart": True},
        beside=beside + local_bytes((pool, prompts)),
        calls=0,
        otherwise="waits",
    )
    read = _cache(engine, params["norm"]["scale"].dtype, "unstacked", shards, width)
    pages = shaped((shards, pages_of(width)), jnp.int32, at)
    yield Program(
        role,
        "insert again",
        decode.insert_again,
        (model, mesh, pool, prompts, read, each, each, pages),
        (),
        beside=beside + local_bytes(params),
        calls=0,
        otherwise="waits",
    )


def _resized(
    run: AbstractRun,
    role: str,
    engine: Engine,
    params: Params,
    layout: Layout,
    cache: Cache,
    beside: int,
    share: float,
) -> Iterator[Program]:
    """The cache at its start, as it grows, and as slots are given up.

    Args:
        cache: at its largest.
        beside: bytes of weights and prompts.
    """
    model, mesh, dtype = engine.config, engine.mesh, params["norm"]["scale"].dtype
    assert mesh is not None
    batches = math.ceil(share)
    with_keys = [entry for entry in cache if entry and not isinstance(entry, Recurrent)]
    k = max((entry[0] for entry in with_keys), key=lambda x: x.size)  # the largest of all layers
    longest = k.shape[decode.POSITIONS]
    own = longest == engine.own_length  # behind prompts that slots share
    shape = (model, mesh, k.shape[decode.BATCH], longest, dtype, layout)
    yield Program(role, "new cache", decode.new_cache, shape, (), beside=beside, calls=batches)
    lengths = sorted({engine.cache_length(n, engine.slots, own) for n in range(1, longest + 1)})
    if engine.pages is not None:
        lengths = [PAGE]
    rows = NamedSharding(mesh, PartitionSpec(ROWS))

    def layer(length: int) -> Cache:
        one = shaped((*k.shape[:-2], length, k.shape[-1]), k.dtype, k.sharding)
        return [(one, one)]

    others = beside + local_bytes(cache) - local_bytes((k, k))
    if len(lengths) > 1:
        given: tuple[Any, ...] = (model, mesh, layer(lengths[-2]), longest, None)
        calls = batches * len(with_keys) * (len(lengths) - 1)
        yield Program(
            role,
            "longer cache",
            decode.resize,
            given,
            ("longer cache",),
            beside=others,
            calls=calls,
        )
    held = engine.slots // engine.row_shards
    kept = [left for n in range(1, held) if (left := engine.fewer_slots(n, held)) is not None]
    if engine.pages is not None:
        kept = [n for n in map(engine.pages_of, kept) if n < engine.pages]
    if kept and not engine.episodes:
        chosen = shaped((max(kept) * engine.row_shards,), jnp.int32, rows)
        given = (model, mesh, layer(longest), longest, chosen)
        calls = batches * sum(map(bool, cache)) * len(set(kept))
        name = "fewer slots" if engine.pages is None else "fewer pages"
        yield Program(role, name, decode.resize, given, (), beside=others, calls=calls)
