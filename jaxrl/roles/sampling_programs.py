"""The programs of a role that samples, the rollout or a teacher: those of its sampling engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms.schedule import staleness_of
from jaxrl.config.schema import Config
from jaxrl.data.example import Split
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Cache, SlotTokens
from jaxrl.models.delta import Recurrent
from jaxrl.models.parameters import Params
from jaxrl.models.shared_prompts import PAGE, Pages, Seats
from jaxrl.roles.declared import Program, local_bytes, placed
from jaxrl.roles.run_shapes import RunArrays, asked, evaluated
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Engine, SamplingParams, extension_parts
from jaxrl.sampling.sampler import sampling_arrays
from jaxrl.sampling.slots import pages_of, rows_at_most, seats_of_row
from jaxrl.sharding.axes import ROWS


def sampling_params(
    config: Config, split: Split, most: int, eos_ids: tuple[int, ...] = ()
) -> SamplingParams:
    """Returns the sampling parameters of training or of evaluations.

    Args:
        most: longest completion, in tokens; of evaluations if `eval.max_new_tokens` is not set.
    """
    s, e = config.sampling, config.eval
    if split == "train":
        return SamplingParams(most, s.temperature, s.top_k, s.top_p, s.min_p, eos_ids, s.stop)
    return SamplingParams(
        e.max_new_tokens or most,
        temperature=e.temperature,
        top_k=e.top_k,
        top_p=e.top_p,
        eos_ids=eos_ids,
        stop=s.stop,
    )


def in_flight(config: Config) -> tuple[int, int] | None:
    """Returns the most prompts that the rollout samples at once where batches are streamed, and the
    samples of each; None where they are not."""
    if not config.streams:
        return None
    return config.batch_size * (1 + staleness_of(config)), config.group_size


def sampling_programs(
    run: RunArrays, role: str, model: DecoderConfig, share: float
) -> Iterator[Program]:
    """Yields the programs of a role's sampling engine: those of training or, of a role that samples
    for evaluations alone, of these; and the decode steps of evaluations, where these are another
    program.

    Args:
        share: fraction of the training batches that this role samples.
    """
    c, m, teaches = run.config, run.shapes, role == "teacher"
    most = c.teacher_new_tokens if teaches else c.max_new_tokens
    streams = c.streams and not teaches
    if not teaches:
        m.paged_cache()  # raises where it cannot be
    engine = Engine(
        model,
        run.meshes[role],
        slots=c.rollout.slots or m.sequences,
        max_prompt_tokens=c.teacher_prompt_tokens if teaches else c.max_prompt_tokens,
        max_new_tokens=max(most, c.eval.max_new_tokens or 0),
        launch_tokens=c.rollout.launch_tokens,
        cache_tokens=None if teaches else c.rollout.cache_tokens,
        episodes=not teaches and c.environment.name is not None,
        swaps=in_flight(c) if streams else None,
    )
    asks, params = asked(c, role), run.params(role, model)
    ways = [(sampling_params(c, "train", most), asks[0])] if share > 0 else []
    if evaluated(c, role):
        ways.append((sampling_params(c, "eval", most), asks[-1]))
    kinds = set()
    for i, (sampling, (prompts, samples)) in enumerate(ways):
        if engine.swaps is not None and not i:  # those of several batches
            prompts, samples = engine.swaps
        for program in engine_programs(
            *(role, engine, params, sampling, prompts, samples),
            prefilled=m.prefill_rows(role),
            width=m.prompts(role),
            record=c.policy.router_replay and not i and not teaches,
        ):
            name, calls = program.name, program.calls
            if name == "decode":
                if (kind := jax.tree.structure(program.args[6])) in kinds:
                    continue
                kinds.add(kind)
                name += " for evaluations" * bool(i)
            elif i:
                continue
            elif name == "answers of environments":
                calls *= c.environment.max_turns - 1
            yield replace(program, name=name, calls=0 if i else math.ceil(share * calls))


def abstract_cache(
    config: DecoderConfig, mesh: Mesh | None, n: int, length: int, dtype: Any
) -> Cache:
    """Returns the keys and values of n sequences of a length as `jax.ShapeDtypeStruct`s, placed on
    a mesh if there is one."""
    made = jax.eval_shape(lambda: decode.new_cache(config, None, n, length, jnp.dtype(dtype)))
    if mesh is None:
        return made
    return placed(made, jax.tree.map(partial(NamedSharding, mesh), decode.cache_specs(mesh, made)))


def engine_programs(
    role: str,
    engine: Engine,
    params: Params,
    sampling: SamplingParams,
    prompts: int,
    samples: int,
    *,
    prefilled: int,
    width: int,
    record: bool = False,
) -> Iterator[Program]:
    """Yields the programs of one `Engine.generate` that samples `samples` completions of each of
    `prompts` prompts: prefill, the copy of keys and values into rows, launches of decode steps, and
    changes of the cache's size. Their `calls` are about as many as one `generate` makes: of
    `extend_slots`, in each turn.

    Args:
        params: abstract, unstacked, with their shardings.
        prefilled: prompts of each data shard in one prefill.
        width: of the arrays of prompts.
    """
    config, mesh, shards = engine.config, engine.mesh, engine.row_shards
    dtype = params["norm"]["scale"].dtype

    def array(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def whole(*shape: int) -> jax.ShapeDtypeStruct:
        return array(shape, jnp.int32, PartitionSpec())

    def rows(*shape: int) -> jax.ShapeDtypeStruct:
        return array(shape, jnp.int32, PartitionSpec(ROWS))

    def cache(n: int, length: int) -> Cache:
        return abstract_cache(config, mesh, n, length, dtype)

    def program(
        name: str,
        jitted: Any,
        *arrays: Any,
        calls: int,
        beside: Any = (),
        within: Any = (),
        **static: Any,
    ) -> Program:
        """Takes the caches that exist `beside` the arguments, and those `within` them."""
        otherwise = "waits" if name.endswith("again") else "eval"
        given, stage = (config, mesh, *arrays), f"{role}.generate"
        how: Any = {"kwargs": static, "calls": calls, "otherwise": otherwise}
        how |= {"beside": local_bytes(beside), "cache": (beside, within)}
        return Program(role, name, jitted, given, stage, **how)

    # The caches of prefilled prompts, of rows that slots share, and of slots or pages.
    paged, each = engine.pages is not None, engine.slots // shards
    count = shards * rows_at_most(each, shards, samples, prompts)
    size = (engine.pages * shards, PAGE) if engine.pages else (engine.slots, engine.length)
    shared, slots = cache(count, width), cache(*size)

    # The first filling, and a refill each time that so many slots are free.
    refills = -(-max(prompts * samples - engine.slots, 0) // engine.min_free)
    fills = max(-(-prompts // (prefilled * shards)), 1 + refills)
    prompt = params, whole(prefilled * shards, width), whole(prefilled * shards)
    held: Any = shared, slots
    yield program(
        "prefill", decode.prefill_prompts, *prompt, beside=held, calls=fills, record=record
    )
    new = cache(prefilled * shards, width)
    copies: Any = shared, new, whole(count)
    yield program("insert", decode.insert, *copies, beside=slots, within=(shared, new), calls=fills)

    # The start of the cache, and its largest layer as it grows and as slots are given up.
    layers = [entry for entry in slots if entry]
    pairs = [entry for entry in layers if not isinstance(entry, Recurrent)]
    keys, values = largest = max(pairs, key=lambda pair: pair[0].size)
    yield program("new cache", decode.new_cache, *size, dtype, beside=shared, calls=1)
    held = shared, [layer for layer in slots if layer is not largest]
    lengths, reach = list[int](), 0
    while reach < engine.length:
        lengths.append(reach := engine.cache_length(reach + 1, engine.slots))
    if not paged and len(lengths) > 1:
        shape = (*keys.shape[:-2], lengths[-2], keys.shape[-1])
        shorter = (jax.ShapeDtypeStruct(shape, dtype, sharding=keys.sharding),) * 2
        calls, given = len(pairs) * (len(lengths) - 1), ([shorter], size[1], None)
        how: Any = {"beside": held, "within": shorter, "calls": calls}
        yield program("longer cache", decode.resize, *given, **how)
    fewer, taken = set[int](), 1
    while taken < each and (left := engine.fewer_slots(taken, each)) is not None:
        fewer.add(left)
        taken = left + 1
    if engine.pages is not None:
        fewer = {n for n in map(engine.pages_for_slots, fewer) if n < engine.pages}
    if fewer and not engine.episodes and not engine.swaps:
        name = "fewer pages" if paged else "fewer slots"
        layer: Any = [(keys, values)], size[1], rows(max(fewer) * shards)
        how = {"beside": held, "within": largest, "calls": len(layers) * len(fewer)}
        yield program(name, decode.resize, *layer, **how)

    if engine.episodes or (engine.swaps and not paged):
        answers = engine.extended_rows * shards
        calls = -(-prompts * samples // engine.extended_rows)
        number = whole(answers)
        widest = max(end - start for start, end in extension_parts(engine.length))
        texts = SlotTokens(whole(answers, widest), number, number)
        arrays: Any = params, slots, shared, texts, number, number, number
        how = {"within": (slots, shared), "calls": calls}
        name = "answers of environments" if engine.episodes else "read again"
        yield program(name, decode.extend_slots, *arrays, **how)
    if paged:
        most = engine.max_new_tokens
        longest = engine.prompt_width(engine.max_prompt_tokens + most, beyond=most)
        arrays, held = (params, whole(shards, longest), whole(shards)), (shared, slots)
        how = {"beside": held, "calls": 0, "record": record}
        yield program("read again", decode.prefill_prompts, *arrays, **how)
        copies = slots, shared, cache(shards, longest)
        targets = whole(shards), whole(shards), whole(shards, pages_of(longest))
        arrays = *copies, *targets
        how = {"within": copies, "calls": 0}
        yield program("insert again", decode.insert_recomputed, *arrays, **how)

    knobs = sampling_arrays(sampling)
    knobs = jax.tree.map(lambda x: array(x.shape, x.dtype, PartitionSpec()), knobs)
    seats = Seats(rows(count, seats_of_row(each, samples)), rows(count), rows(engine.slots))
    pages = None
    if engine.pages is not None:
        owners = rows(engine.pages * shards)
        most = pages_of(engine.cache_length(engine.max_new_tokens, engine.slots))
        pages = Pages(owners, owners, rows(engine.slots, most))
    launches = -(-sampling.max_new_tokens // engine.launch_tokens)
    table = whole(engine.slots, decode.COLUMNS)
    yield program(
        "decode",
        decode.launch_on(engine.target, mesh),
        *(params, slots, table, whole(), knobs, (shared, seats), pages),
        calls=launches * -(-prompts * samples // engine.slots),
        n_tokens=engine.launch_tokens,
        check_every=engine.check_every,
        record=record,
        within=(slots, shared),
    )
