"""The programs of the sampling engine, with abstract arguments; they mirror how `jaxrl.sampling`
builds and calls them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl.aot.abstract import AbstractRun, Program, local_bytes, shaped
from jaxrl.models.cached import Cache, keys_of
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Recurrent
from jaxrl.models.pages import PAGE, Pages
from jaxrl.models.shared_prompts import Seats
from jaxrl.plan.setting import asked, evaluated
from jaxrl.process.json_types import Keywords
from jaxrl.roles.rollout import evaluation_sampling, training_sampling
from jaxrl.sampling import decode
from jaxrl.sampling.engine import ANSWER_ROWS, ANSWER_TOKENS, Engine
from jaxrl.sampling.page_pool import pages_of
from jaxrl.sampling.prompt_rows import rows_at_most
from jaxrl.sampling.sampler import sampling_arrays
from jaxrl.sharding.axes import ROWS


class Sampling:
    """The sampling engine of a role, and its programs: prefill of a batch of prompts, the copy of
    their keys and values into slots, launches of decode steps, and changes of the cache's size."""

    def __init__(self, run: AbstractRun, role: str, model: DecoderConfig):
        c = run.config
        self.run, self.role = run, role
        self.most = c.teacher_new_tokens if role == "teacher" else c.max_new_tokens
        self.longest = max(self.most, c.eval.max_new_tokens or 0)
        self.engine = Engine(
            model,
            run.meshes[role],
            slots=c.rollout.slots or run.setting.sequences,
            max_prompt_tokens=c.teacher_prompt_tokens if role == "teacher" else c.max_prompt_tokens,
            max_new_tokens=self.longest,
            launch_tokens=c.rollout.launch_tokens,
            cache_tokens=c.rollout.cache_tokens if role == "rollout" else None,
            episodes=role == "rollout" and c.environment.name is not None,
        )
        self.dtype = jnp.dtype(c.roles[role].compute_dtype)
        self.params = run.params(role, model)
        self.width = run.setting.prompts(role)

    def programs(self, share: float) -> Iterator[Program]:
        """All programs.

        Args:
            share: fraction of the training batches that this role samples.
        """
        c, engine, params = self.run.config, self.engine, self.params
        prompts = self.run.setting.prefill_rows(self.role)
        held = self._cache(prompts, self.width, None)
        slots, rows = caches = self._caches(*asked(c, self.role)[0])
        yield from self._resized(slots, local_bytes((params, held, rows)), share)
        fills = math.ceil(share * c.batch_size / prompts)
        given: tuple[Any, ...] = params, self._ints(prompts, self.width), self._ints(prompts)
        beside = local_bytes(caches)
        yield self._program(
            "prefill", decode.prefill, *given, phase="prefill", beside=beside, calls=fills
        )
        filled, unfilled = (rows, slots) if rows else (slots, rows)
        where = self._ints(keys_of(filled).shape[decode.BATCH])
        beside = local_bytes((params, unfilled))
        yield self._program(
            "insert", decode.insert, filled, held, where, beside=beside, calls=fills
        )
        beside = local_bytes(held)
        if engine.pages is not None:
            yield from self._read_again(slots, rows, beside)
        if engine.episodes:
            answers = ANSWER_ROWS * engine.row_shards
            each = self._ints(answers)
            given = params, slots, self._ints(answers, ANSWER_TOKENS[1]), each, each, each
            calls = math.ceil(share * self.run.setting.sequences / ANSWER_ROWS)
            calls *= c.environment.max_turns - 1
            name = "answers of environments"
            yield self._program(
                name, decode.extend, *given, phase="answers", beside=beside, calls=calls
            )
        yield from self._launches(share, beside)

    def _launches(self, share: float, beside: int) -> Iterator[Program]:
        """Launches of decode steps: of training and, where these differ, of evaluations."""
        c, engine, each_asked = self.run.config, self.engine, asked(self.run.config, self.role)
        ways = [(training_sampling(c, self.most), each_asked[0])] if share > 0 else []
        if evaluated(c, self.role):
            ways.append((evaluation_sampling(c, self.most), each_asked[-1]))
        found: dict[Any, Any] = {}
        at = self.run.everywhere(self.role)
        for way, (prompts, samples) in ways:
            arrays = sampling_arrays(way, 0, 0)
            knobs = jax.tree.map(lambda x: shaped(x.shape, x.dtype, at), arrays)
            own, rows = self._caches(prompts, samples)
            kind = jax.tree.structure(knobs), bool(rows)
            found.setdefault(kind, (own, knobs, self._shared_by(rows, samples), self._pages()))
        sizes = {"n_tokens": engine.launch_tokens, "check_every": engine.check_every}
        launches = -(-self.run.setting.sequences // engine.slots)
        launches *= -(-c.max_new_tokens // engine.launch_tokens)
        for i, (own, *given) in enumerate(found.values()):
            name = "decode for evaluations" if i else "decode"
            records = c.policy.router_replay and not i and self.role != "teacher"
            yield self._program(
                name,
                decode.launch,
                *(self.params, own, self._ints(engine.slots, 6), self._ints(), *given),
                phase="decode",
                kwargs=sizes | {"record": records},
                beside=beside,
                calls=0 if i else math.ceil(share * launches),
            )

    def _program(
        self, name: str, jitted: Any, *given: Any, phase: str = "", **facts: Any
    ) -> Program:
        args = self.engine.config, self.engine.mesh, *given
        return Program(self.role, name, jitted, args, (phase,) if phase else (), **facts)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Whole numbers that each device has."""
        return shaped(shape, jnp.int32, self.run.everywhere(self.role))

    def _int_rows(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Whole numbers that devices share by rows."""
        return shaped(shape, jnp.int32, self.run.rows(self.role))

    def _cache(self, rows: int, length: int, split: Any = ROWS) -> Cache:
        """Abstract arrays of a cache, its rows over the axes `split`."""
        model, mesh = self.engine.config, self.run.meshes[self.role]
        whole = jax.eval_shape(lambda: decode.new_cache(model, None, rows, length, self.dtype))
        specs = decode.cache_specs(model, mesh, split, whole)
        return jax.tree.map(
            lambda x, s: shaped(x.shape, x.dtype, NamedSharding(mesh, s)), whole, specs
        )

    def _caches(self, prompts: int, samples: int) -> tuple[Cache, Cache]:
        """The largest cache of all slots, and that of the prompts that they share, if any: of
        `samples` of each of so many prompts."""
        engine = self.engine
        if engine.why_not_shared(samples, self.dtype) is not None:
            return self._cache(engine.slots, engine.length), []
        shards = engine.row_shards
        rows = shards * rows_at_most(engine.slots // shards, shards, samples, prompts)
        own = engine.slots, engine.own_length
        if engine.pages is not None:
            own = engine.pages * shards, PAGE
        return self._cache(*own), self._cache(rows, self.width)

    def _shared_by(self, rows: Cache, samples: int) -> tuple[Cache, Seats] | None:
        """What a launch reads of shared prompts, if there are any."""
        if not rows:
            return None
        count, slots = keys_of(rows).shape[decode.BATCH], self.engine.slots
        seats = self._int_rows(count, min(samples, slots // self.engine.row_shards))
        return rows, Seats(seats, self._int_rows(count), self._int_rows(slots))

    def _pages(self) -> Pages | None:
        """What a launch reads of the pages of slots with completions as long as they may be."""
        engine = self.engine
        if engine.pages is None:
            return None
        owners = self._int_rows(engine.pages * engine.row_shards)
        width = pages_of(engine.cache_length(self.longest, engine.slots, own=True))
        return Pages(owners, owners, self._int_rows(engine.slots, width))

    def _read_again(self, pool: Cache, prompts: Cache, beside: int) -> Iterator[Program]:
        """The programs by which samples that had to wait for pages are read again; what a run needs
        none of where its pages suffice.

        Args:
            beside: bytes of the prompts that were prefilled last.
        """
        engine, shards = self.engine, self.engine.row_shards
        width = engine.read_again_width(engine.max_prompt_tokens + engine.max_new_tokens)
        each, waits = self._ints(shards), Keywords(calls=0, otherwise="waits")
        yield self._program(
            "read again",
            decode.prefill,
            *(self.params, self._ints(shards, width), each),
            phase="read again",
            kwargs={"apart": True},
            beside=beside + local_bytes((pool, prompts)),
            **waits,
        )
        read, pages = self._cache(shards, width), self._ints(shards, pages_of(width))
        given = pool, prompts, read, each, each, pages
        beside += local_bytes(self.params)
        yield self._program("insert again", decode.insert_again, *given, beside=beside, **waits)

    def _resized(self, cache: Cache, beside: int, share: float) -> Iterator[Program]:
        """The cache at its start, as it grows, and as slots are given up.

        Args:
            cache: at its largest.
            beside: bytes of weights and prompts.
        """
        engine, batches = self.engine, math.ceil(share)
        with_keys = [entry for entry in cache if entry and not isinstance(entry, Recurrent)]
        k = max(
            (entry[0] for entry in with_keys), key=lambda x: x.size
        )  # the largest of all layers
        longest = k.shape[decode.POSITIONS]
        own = longest == engine.own_length  # behind prompts that slots share
        given: tuple[Any, ...] = k.shape[decode.BATCH], longest, self.dtype
        yield self._program("new cache", decode.new_cache, *given, beside=beside, calls=batches)
        lengths = sorted({engine.cache_length(n, engine.slots, own) for n in range(1, longest + 1)})
        if engine.pages is not None:
            lengths = [PAGE]

        def layer(length: int) -> Cache:
            one = shaped((*k.shape[:-2], length, k.shape[-1]), k.dtype, k.sharding)
            return [(one, one)]

        others = beside + local_bytes(cache) - local_bytes((k, k))
        name = "longer cache"
        if len(lengths) > 1:
            given = layer(lengths[-2]), longest, None
            calls = batches * len(with_keys) * (len(lengths) - 1)
            yield self._program(name, decode.resize, *given, phase=name, beside=others, calls=calls)
        held = engine.slots // engine.row_shards
        kept = [left for n in range(1, held) if (left := engine.fewer_slots(n, held)) is not None]
        if engine.pages is not None:
            kept = [n for n in map(engine.pages_for_slots, kept) if n < engine.pages]
        if kept and not engine.episodes:
            given = layer(longest), longest, self._int_rows(max(kept) * engine.row_shards)
            calls = batches * sum(map(bool, cache)) * len(set(kept))
            name = "fewer slots" if engine.pages is None else "fewer pages"
            yield self._program(name, decode.resize, *given, beside=others, calls=calls)
