"""The programs of one `Engine.generate` with abstract arguments, for whoever lowers them before
there is a weight or a device: each is called as the engine calls it, at its largest."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxrl.models.cached import Cache, keys_of
from jaxrl.models.delta import Recurrent
from jaxrl.models.pages import PAGE, Pages
from jaxrl.models.parameters import Params
from jaxrl.models.shared_prompts import Seats
from jaxrl.sampling import decode
from jaxrl.sampling.engine import ANSWER_ROWS, ANSWER_TOKENS, Engine, prefill_batch
from jaxrl.sampling.page_pool import pages_of
from jaxrl.sampling.prompt_rows import rows_at_most
from jaxrl.sampling.sampler import SamplingParams, sampling_arrays
from jaxrl.sharding.axes import ROWS


class AbstractProgram(NamedTuple):
    """`jitted.lower(*arguments, **static)` is the program that runs."""

    name: str
    jitted: Wrapped
    arguments: tuple[Any, ...]
    static: dict[str, Any] = {}


class AbstractPrograms:
    """What the engine runs for `samples` completions of each of `prompts` prompts."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        *,
        prompts: int,
        samples: int,
        prefilled: int | None = None,
        width: int | None = None,
    ):
        """Makes the abstract caches.

        Args:
            params: abstract, unstacked, with their shardings.
            prefilled: prompts in one prefill; None: those of this `generate`.
            width: of the arrays of prompts; None: for prompts of `max_prompt_tokens`.
        """
        self.engine, self.params, self.samples = engine, params, samples
        self.width = width or engine.prompt_width(engine.max_prompt_tokens)
        shards = engine.row_shards
        slots = engine.slots, engine.length
        if engine.pages is not None:
            slots = engine.pages * shards, PAGE
        rows = shards * rows_at_most(engine.slots // shards, shards, samples, prompts)
        batch = prefilled or prefill_batch(engine.slots, prompts, samples, self.width, shards)
        self.slots = self.cache(*slots)
        """Of all slots, or pages."""
        self.largest = max(
            (entry for entry in self.slots if entry and not isinstance(entry, Recurrent)),
            key=lambda pair: pair[0].size,
        )
        """The keys and values of their largest layer."""
        self.rows = self.cache(rows, self.width)
        """Of the prompts that slots share."""
        self.prefilled = self.cache(batch, self.width, split=None)
        """Of the prompts that were prefilled last."""

    def cache(self, rows: int, length: int, split: Any = ROWS) -> Cache:
        """Makes the abstract arrays of a cache, its rows over the axes `split`."""
        model, mesh = self.engine.config, self.engine.mesh
        dtype = self.params["norm"]["scale"].dtype
        whole = jax.eval_shape(lambda: decode.new_cache(model, None, rows, length, dtype))
        if mesh is None:
            return whole
        specs = decode.cache_specs(model, mesh, split, whole)
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            whole,
            specs,
        )

    def prefill(self, record: bool = False) -> AbstractProgram:
        """Returns the prefill of a batch of prompts."""
        rows = keys_of(self.prefilled).shape[decode.BATCH]
        arrays = self.params, self._ints(rows, self.width), self._ints(rows)
        return self._program("prefill", decode.prefill, *arrays, record=record)

    def insert(self) -> AbstractProgram:
        """Returns the copy of prefilled prompts into rows that slots share."""
        source = self._ints(keys_of(self.rows).shape[decode.BATCH])
        return self._program("insert", decode.insert, self.rows, self.prefilled, source)

    def decode(self, sampling: SamplingParams, record: bool = False) -> AbstractProgram:
        """Returns a launch of decode steps."""
        engine, ints = self.engine, self._ints
        knobs = jax.tree.map(
            lambda x: self._array(x.shape, x.dtype), sampling_arrays(sampling, 0, 0)
        )
        rows = keys_of(self.rows).shape[decode.BATCH]
        seats = ints(rows, min(self.samples, engine.slots // engine.row_shards), split=ROWS)
        prompts = self.rows, Seats(seats, ints(rows, split=ROWS), ints(engine.slots, split=ROWS))
        pages = None
        if engine.pages is not None:
            owners = ints(engine.pages * engine.row_shards, split=ROWS)
            most = pages_of(engine.cache_length(engine.max_new_tokens, engine.slots))
            pages = Pages(owners, owners, ints(engine.slots, most, split=ROWS))
        return self._program(
            "decode",
            decode.launch,
            *(self.params, self.slots, ints(engine.slots, 6), ints(), knobs, prompts, pages),
            n_tokens=engine.launch_tokens,
            check_every=engine.check_every,
            record=record,
        )

    def extend(self) -> AbstractProgram:
        """Returns the prefill of environments' answers into slots."""
        answers = ANSWER_ROWS * self.engine.row_shards
        arrays = self._ints(answers, ANSWER_TOKENS[1]), *[self._ints(answers)] * 5
        caches = self.params, self.slots, self.rows
        return self._program("answers of environments", decode.extend, *caches, *arrays)

    def read_again(self) -> list[AbstractProgram]:
        """Returns the programs by which preempted samples are read again, of an engine with pages;
        a run whose pages suffice has none of them."""
        engine, shards = self.engine, self.engine.row_shards
        width = engine.read_again_width(engine.max_prompt_tokens + engine.max_new_tokens)
        arrays = self.params, self._ints(shards, width), self._ints(shards)
        read, each = self.cache(shards, width), self._ints(shards)
        caches, pages = (self.slots, self.rows, read), self._ints(shards, pages_of(width))
        return [
            self._program("read again", decode.prefill, *arrays, apart=True),
            self._program("insert again", decode.insert_again, *caches, each, each, pages),
        ]

    def lengths(self) -> list[int]:
        """Returns the positions that slots, or pages, have one after the other, all slots in
        use."""
        engine, longest = self.engine, keys_of(self.slots).shape[decode.POSITIONS]
        if engine.pages is not None:
            return [longest]
        return sorted({engine.cache_length(n, engine.slots) for n in range(1, longest + 1)})

    def fewer(self) -> list[int]:
        """Returns to how many slots, or pages, of a data shard the cache may shrink."""
        engine = self.engine
        if engine.episodes:
            return []
        held = engine.slots // engine.row_shards
        fewer = [n for i in range(1, held) if (n := engine.fewer_slots(i, held)) is not None]
        if engine.pages is not None:
            fewer = [n for n in map(engine.pages_for_slots, fewer) if n < engine.pages]
        return sorted(set(fewer))

    def resize(self) -> list[AbstractProgram]:
        """Returns the start of the cache, and its largest layer as it grows and as slots are given
        up."""
        keys = self.largest[0]
        rows, _, longest, _ = keys.shape
        lengths, fewer = self.lengths(), self.fewer()
        programs = [self._program("new cache", decode.new_cache, rows, longest, keys.dtype)]

        def layer(length: int) -> Cache:
            shape = (*keys.shape[:-2], length, keys.shape[-1])
            return [(jax.ShapeDtypeStruct(shape, keys.dtype, sharding=keys.sharding),) * 2]

        if len(lengths) > 1:
            arrays = layer(lengths[-2]), longest, None
            programs.append(self._program("longer cache", decode.resize, *arrays))
        if fewer:
            kept = self._ints(fewer[-1] * self.engine.row_shards, split=ROWS)
            name = "fewer slots" if self.engine.pages is None else "fewer pages"
            programs.append(self._program(name, decode.resize, layer(longest), longest, kept))
        return programs

    def _program(self, name: str, jitted: Any, *arrays: Any, **static: Any) -> AbstractProgram:
        return AbstractProgram(
            name, jitted, (self.engine.config, self.engine.mesh, *arrays), static
        )

    def _array(self, shape: tuple[int, ...], dtype: Any, split: Any = None) -> Any:
        mesh = self.engine.mesh
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(split))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def _ints(self, *shape: int, split: Any = None) -> Any:
        return self._array(shape, jnp.int32, split)
