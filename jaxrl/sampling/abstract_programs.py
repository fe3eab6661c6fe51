"""The programs of one `Engine.generate` with abstract arguments, for whoever lowers them before
there is a weight or a device: each is called as the engine calls it, at its largest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxrl.models.decoder import Cache
from jaxrl.models.delta import Recurrent
from jaxrl.models.parameters import Params
from jaxrl.models.shared_prompts import PAGE, Pages, Seats
from jaxrl.sampling import decode
from jaxrl.sampling.engine import ANSWER_ROWS, ANSWER_TOKENS, Engine, prefill_batch
from jaxrl.sampling.sampler import SamplingParams, sampling_arrays
from jaxrl.sampling.slots import pages_of, rows_at_most, seats_of_row
from jaxrl.sharding.axes import ROWS


class AbstractProgram(NamedTuple):
    """`jitted.lower(*arguments, **static)` is the program that runs."""

    name: str
    jitted: Wrapped
    arguments: tuple[Any, ...]
    static: dict[str, Any]
    beside: Any
    """Abstract arrays that the engine holds meanwhile, apart from the arguments."""
    calls: int
    """About how often one `generate` calls it: of `extend`, for each turn; 0 of what is called only
    where pages run out."""


def abstract_programs(
    engine: Engine,
    params: Params,
    sampling: SamplingParams,
    *,
    prompts: int,
    samples: int,
    prefilled: int | None = None,
    width: int | None = None,
    record: bool = False,
) -> Iterator[AbstractProgram]:
    """Makes the programs that sample `samples` completions of each of `prompts` prompts.

    Args:
        params: abstract, unstacked, with their shardings.
        prefilled: prompts of each data shard in one prefill; None: those of this `generate`.
        width: of the arrays of prompts; None: for prompts of `max_prompt_tokens`.
    """
    config, mesh, shards, dtype = (
        *(engine.config, engine.mesh, engine.row_shards),
        params["norm"]["scale"].dtype,
    )

    def array(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def whole(*shape: int) -> jax.ShapeDtypeStruct:
        return array(shape, jnp.int32, PartitionSpec())

    def rows(*shape: int) -> jax.ShapeDtypeStruct:
        return array(shape, jnp.int32, PartitionSpec(ROWS))

    def cache(n: int, length: int) -> Cache:
        made = jax.eval_shape(lambda: decode.new_cache(config, None, n, length, dtype))
        if mesh is None:
            return made
        specs = decode.cache_specs(mesh, made)
        return jax.tree.map(lambda x, spec: array(x.shape, x.dtype, spec), made, specs)

    def program(
        name: str, jitted: Any, *arrays: Any, beside: Any, calls: int, **static: Any
    ) -> AbstractProgram:
        return AbstractProgram(name, jitted, (config, mesh, *arrays), static, beside, calls)

    # The caches of prefilled prompts, of rows that slots share, and of slots or pages.
    width = width or engine.prompt_width(engine.max_prompt_tokens)
    batch = prefilled or prefill_batch(engine.slots // shards, prompts, samples, width)
    count = shards * rows_at_most(engine.slots // shards, shards, samples, prompts)
    size = (engine.slots, engine.length) if engine.pages is None else (engine.pages * shards, PAGE)
    shared, slots = cache(count, width), cache(*size)

    # The first filling, and a refill each time that so many slots are free.
    refills = -(-max(prompts * samples - engine.slots, 0) // engine.min_free)
    fills = max(-(-prompts // (batch * shards)), 1 + refills)
    prompt = whole(batch * shards, width), whole(batch * shards)
    beside: Any = shared, slots
    yield program(
        "prefill", decode.prefill, params, *prompt, beside=beside, calls=fills, record=record
    )
    copies: Any = shared, cache(batch * shards, width), whole(count)
    yield program("insert", decode.insert, *copies, beside=(params, slots), calls=fills)

    # The start of the cache, and its largest layer as it grows and as slots are given up.
    layers = [entry for entry in slots if entry]
    pairs = [entry for entry in layers if not isinstance(entry, Recurrent)]
    keys, values = largest = max(pairs, key=lambda pair: pair[0].size)
    start, beside = (size[0], size[1], dtype), (params, shared)
    yield program("new cache", decode.new_cache, *start, beside=beside, calls=1)
    others = *beside, [layer for layer in slots if layer is not largest]
    lengths = sorted({engine.cache_length(n, engine.slots) for n in range(1, engine.length + 1)})
    if engine.pages is None and len(lengths) > 1:
        shape = (*keys.shape[:-2], lengths[-2], keys.shape[-1])
        shorter = [tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=keys.sharding) for _ in "kv")]
        calls = len(pairs) * (len(lengths) - 1)
        layer: Any = shorter, size[1], None
        yield program("longer cache", decode.resize, *layer, beside=others, calls=calls)
    each = engine.slots // shards
    fewer = {left for n in range(1, each) if (left := engine.fewer_slots(n, each)) is not None}
    if engine.pages is not None:
        fewer = {n for n in map(engine.pages_for_slots, fewer) if n < engine.pages}
    if fewer and not engine.episodes:
        name = "fewer slots" if engine.pages is None else "fewer pages"
        layer = [(keys, values)], size[1], rows(max(fewer) * shards)
        calls = len(layers) * len(fewer)
        yield program(name, decode.resize, *layer, beside=others, calls=calls)

    if engine.episodes:
        arrays: Any
        answers, calls = ANSWER_ROWS * shards, -(-prompts * samples // ANSWER_ROWS)
        arrays = whole(answers, ANSWER_TOKENS[1]), *[whole(answers)] * 5
        arrays = params, slots, shared, *arrays
        yield program("answers of environments", decode.extend, *arrays, beside=(), calls=calls)
    if engine.pages is not None:
        longest = engine.read_again_width(engine.max_prompt_tokens + engine.max_new_tokens)
        arrays, beside = (whole(shards, longest), whole(shards)), (shared, slots)
        yield program("read again", decode.prefill, params, *arrays, beside=beside, calls=0)
        copies, beside = (slots, shared, cache(shards, longest)), params
        targets = whole(shards), whole(shards), whole(shards, pages_of(longest))
        name = "insert again"
        yield program(name, decode.insert_again, *copies, *targets, beside=beside, calls=0)

    knobs = sampling_arrays(sampling, 0, 0)
    knobs = jax.tree.map(lambda x: array(x.shape, x.dtype, PartitionSpec()), knobs)
    seats = Seats(rows(count, seats_of_row(each, samples)), rows(count), rows(engine.slots))
    pages = None
    if engine.pages is not None:
        owners = rows(engine.pages * shards)
        most = pages_of(engine.cache_length(engine.max_new_tokens, engine.slots))
        pages = Pages(owners, owners, rows(engine.slots, most))
    launches = -(-sampling.max_new_tokens // engine.launch_tokens)
    yield program(
        "decode",
        decode.launch_on(engine.target, mesh),
        *(params, slots, whole(engine.slots, 6), whole(), knobs, (shared, seats), pages),
        beside=(),
        calls=launches * -(-prompts * samples // engine.slots),
        n_tokens=engine.launch_tokens,
        check_every=engine.check_every,
        record=record,
    )
