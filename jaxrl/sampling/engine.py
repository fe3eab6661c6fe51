"""Continuous batching, the host side: which sample sits in which slot, when to launch, what came
out.

A slot is one row of the KV cache. A launch runs up to `launch_tokens` decode steps over all slots
and comes back early once enough of them are free; the host then reads the tokens, looks for stop
strings, and refills, or gives slots up where nothing waits. Prompts are prefilled once, in batches
just large enough to fill the slots, and their keys and values are copied into the slots of their n
samples. What is drawn depends on (seed, step, attempt, prompt id, sample id, position), never on
slots, launches or timing.

On a mesh of several processes each runs this with the same arguments; what a launch sampled is
whole in all of them, so that they fill, refill and launch alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.errors import UserError
from jaxrl.models.buckets import bucket, round_up
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Cache, Params, cast, layout_of
from jaxrl.models.kernels import target_of
from jaxrl.sampling import decode, text
from jaxrl.sampling.sampler import SamplingArrays, SamplingParams, sampling_arrays
from jaxrl.sampling.text import TextTokenizer
from jaxrl.sharding.ledger import Ledger
from jaxrl.sharding.reshard import put
from jaxrl.types import Completion, FinishReason

__all__ = ["Aborted", "Engine", "EngineStats", "SamplingParams"]

NARROWEST = 64
"""Least width of prompts, and least positions of the cache."""
CACHE_STEPS = 4
"""Sizes of the cache in each doubling, at the full number of slots: a step reads all of it. With
fewer slots one is enough, so that the programs of both together stay few."""
PREFILL_TOKENS = 4096
"""Most prompt tokens per data shard in one prefill: bounds its activations."""


CACHE = "KV cache"
"""In the ledger."""


class Aborted(RuntimeError):
    """`abort` returned True between two launches."""


@dataclass
class EngineStats:
    """What the last `generate` did."""

    decode_steps: int = 0
    launches: int = 0
    prefill_rows: int = 0
    """Prompts prefilled, padding rows not counted."""
    generated_tokens: int = 0
    """Tokens in the completions; those after a stop string are not counted."""
    slots: int = 0
    prefill_seconds: float = 0.0
    """Prefill and copies into slots, waited for."""
    decode_seconds: float = 0.0
    """Launches, until their tokens are on the host."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / max(self.seconds, 1e-9)


class Engine:
    """Samples completions with one model on one mesh."""

    def __init__(
        self,
        config: DecoderConfig,
        mesh: Mesh | None,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        launch_tokens: int = 32,
        min_free: int | None = None,
        check_every: int | None = None,
        search_beside: bool | None = None,
        dtype: Any = None,
        tokenizer: TextTokenizer | None = None,
        ledger: Ledger | None = None,
    ):
        """Fixes the shapes. Nothing is allocated before `generate`, and everything is freed after
        it.

        Args:
            mesh: axes (data, fsdp, tensor), or None for one device.
            slots: completions decoded side by side; rounded up to a multiple of the devices.
            max_prompt_tokens, max_new_tokens: their sum is the most positions that the KV cache
                gets; it is as long as the sequences need.
            launch_tokens: decode steps between two looks of the host.
            min_free: free slots at which a launch ends early while prompts wait; an eighth of the
                slots where None.
            check_every: decode steps between two looks of the device at the free slots; a divisor
                of launch_tokens. Where None: 1 on one CPU device, where a look costs nothing, else
                8. At launch_tokens a launch has a fixed length.
            search_beside: whether stop strings are searched while the next launch runs, which
                decodes a completion that they end for one launch more. Where None: not on a CPU,
                where a launch takes much longer than a search.
            dtype: of the computation and the cache; that of the parameters where None.
            tokenizer: decodes `text` and stop strings.
            ledger: the account of the devices' memory that cache and programs are entered in.
        """
        _at_least_one(slots=slots, max_prompt_tokens=max_prompt_tokens)
        _at_least_one(max_new_tokens=max_new_tokens, launch_tokens=launch_tokens)
        self.length = max_prompt_tokens + max_new_tokens
        if self.length > config.max_positions:
            raise UserError(
                f"max_prompt_tokens={max_prompt_tokens} + max_new_tokens={max_new_tokens} exceeds "
                f"the model's {config.max_positions} positions; lower one of them"
            )
        devices = 1 if mesh is None else mesh.size
        self.row_shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
        self.config, self.mesh, self.tokenizer, self.dtype = config, mesh, tokenizer, dtype
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self.slots = round_up(slots, devices)
        self.min_free = max(1, self.slots // 8) if min_free is None else min_free
        target = target_of(jax.devices()[:1] if mesh is None else mesh.devices.flat)
        self.width_multiple = target.width_multiple
        on_cpu = target.platform == "cpu"
        self.search_beside = not on_cpu if search_beside is None else search_beside
        if check_every is None:
            check_every = 1 if devices == 1 and on_cpu else 8
        self.check_every = min(check_every, launch_tokens)
        self.launch_tokens = round_up(launch_tokens, self.check_every)
        self.ledger = ledger or Ledger()
        self.stats = EngineStats()

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        sampling: SamplingParams,
        seed: int,
        step: int = 0,
        attempt: int = 0,
        prompt_ids: Sequence[int] | None = None,
        limits: Sequence[Sequence[int]] | None = None,
        abort: Callable[[], bool] | None = None,
        on_tokens: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """n completions of each prompt.

        Args:
            params: either layout, on the mesh; unstacked is the faster one.
            prompts: token ids.
            seed, step, attempt: begin the key of every token.
            prompt_ids: continue it, modulo 2^31; the index in `prompts` where None.
            limits: [len(prompts)][n] most tokens of each completion, where they differ from
                `max_new_tokens`.
            abort: asked between launches; True raises `Aborted`.
            on_tokens: called after each launch with the tokens and the completions that are there
                so far.
        """
        started = time.perf_counter()
        self._check(prompts, n, sampling, prompt_ids)
        self.stats = EngineStats(slots=self.slots)
        if self.dtype is not None and params["norm"]["scale"].dtype != self.dtype:
            params = _cast(params, np.dtype(self.dtype))
        ids = range(len(prompts)) if prompt_ids is None else prompt_ids
        if limits is None:
            limits = [[sampling.max_new_tokens] * n] * len(prompts)
        assert all(0 < x <= sampling.max_new_tokens for row in limits for x in row)
        samples = [
            _Sample(index, ids[index] % 2**31, sample, limits[index][sample])
            for index in range(len(prompts))
            for sample in range(n)
        ]
        if samples:
            knobs = sampling_arrays(sampling, seed, step, attempt)
            run = _Run(self, params, prompts, n, sampling, knobs, samples)
            run.loop(abort, on_tokens)
        done = [sample.completion() for sample in samples]
        self.stats.generated_tokens = sum(len(c.tokens) for c in done)
        self.stats.seconds = time.perf_counter() - started
        return [done[i * n : (i + 1) * n] for i in range(len(prompts))]

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingParams,
        prompt_ids: Sequence[int] | None,
    ) -> None:
        _at_least_one(n=n)
        if prompt_ids is not None and len(prompt_ids) != len(prompts):
            raise UserError(f"{len(prompt_ids)} prompt_ids for {len(prompts)} prompts")
        if sampling.max_new_tokens > self.max_new_tokens:
            raise UserError(
                f"max_new_tokens={sampling.max_new_tokens} exceeds the {self.max_new_tokens} "
                "that the engine was made for"
            )
        if sampling.stop and self.tokenizer is None:
            raise UserError(f"stop={sampling.stop!r} needs a tokenizer; end on eos_ids instead")
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= self.max_prompt_tokens:
                raise UserError(
                    f"prompt {i} has {len(prompt)} tokens; allowed: 1 to "
                    f"max_prompt_tokens={self.max_prompt_tokens}; shorten it or raise the limit"
                )
            if min(prompt) < 0 or max(prompt) >= self.config.vocab_size:
                raise UserError(
                    f"prompt {i} has tokens from {min(prompt)} to {max(prompt)}; "
                    f"the model's are 0 to {self.config.vocab_size - 1}: is it the right tokenizer?"
                )


@dataclass
class _Sample:
    """One completion in the making."""

    prompt: int
    prompt_id: int
    sample_id: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    """[k, 2] float32 for each launch: full and truncated."""
    finish_reason: FinishReason | None = None
    text: str = ""
    slot: int | None = None
    """Where it is decoded; None before and after."""

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        logprobs = np.concatenate(self.logprobs)[: len(self.tokens)]
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=np.ascontiguousarray(logprobs[:, 0]),
            sampler_logprobs=np.ascontiguousarray(logprobs[:, 1]),
            finish_reason=self.finish_reason,
            text=self.text,
        )


class _Run:
    """The state of one `generate`: queue, slots, cache, and the one batch of prompts whose keys and
    values are held."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingParams,
        knobs: SamplingArrays,
        samples: list[_Sample],
    ):
        self.engine, self.params, self.prompts = engine, params, prompts
        self.sampling, self.stats, self.ledger = sampling, engine.stats, engine.ledger
        mesh = engine.mesh
        self.knobs = knobs
        if mesh is not None:
            self.knobs = put(knobs, NamedSharding(mesh, PartitionSpec()))
        self.queue = deque(samples)
        self.seated: dict[int, _Sample] = {}
        self.unread: list[tuple[_Sample, int]] = []
        """Samples with new tokens, and how many tokens each had before, whose text is to be read.
        """
        self.table = np.zeros((engine.slots, 6), np.int32)
        self.prefill_batch = self._prefill_batch(n)
        self.held = range(0)
        """Prompts whose keys and values are in `held_cache`; samples queue by prompt, so one batch
        is enough."""
        self.held_cache: Cache = []
        self.cache: Cache = []

    def loop(
        self,
        abort: Callable[[], bool] | None,
        on_tokens: Callable[[int, int], None] | None,
    ) -> None:
        total, tokens, finished = len(self.queue), 0, 0
        try:
            while self.queue or self.seated:
                if abort is not None and abort():
                    raise Aborted(
                        f"generation aborted: {finished} of {total} completions were done"
                    )
                self._refill()
                if not self.queue:
                    self.ledger.nearly_done()
                tokens += self._launch()
                finished = total - len(self.queue) - len(self.seated)
                if on_tokens is not None:
                    on_tokens(tokens, finished)
            self._read()
        finally:
            self.cache, self.held_cache = [], []
            self.ledger.drop(CACHE)
        self.ledger.nearly_done()

    def _record_cache(self) -> None:
        self.ledger.put(CACHE, (self.cache, self.held_cache))

    def _refill(self) -> None:
        """Puts waiting samples into free slots; prefills the prompts that they need."""
        started = time.perf_counter()
        free = [slot for slot in range(self.engine.slots) if slot not in self.seated]
        seated = False
        while free and self.queue:
            if self.queue[0].prompt not in self.held:
                self._hold(self.queue[0].prompt)
            moves = []
            while free and self.queue and self.queue[0].prompt in self.held:
                moves.append((free.pop(0), self.queue.popleft()))
            self._seat(moves)
            seated = True
        if not self.queue and self.held_cache:
            self.held, self.held_cache = range(0), []
            self._record_cache()
        if seated:
            jax.block_until_ready(self.cache)
            self.stats.prefill_seconds += time.perf_counter() - started

    def _hold(self, first: int) -> None:
        """Prefills the batch of prompts that begins with `first`, in place of the one held."""
        self.held = range(first, min(first + self.prefill_batch, len(self.prompts)))
        chosen = [self.prompts[i] for i in self.held]
        width = self._width(chosen)
        tokens = np.zeros((self.prefill_batch, width), np.int32)
        lengths = np.ones(self.prefill_batch, np.int32)
        for row, prompt in enumerate(chosen):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        self.held_cache = []
        given = (self.engine.config, self.engine.mesh, self.params, tokens, lengths)
        with self.ledger.running(decode.prefill, *given):
            self.held_cache = jax.block_until_ready(decode.prefill(*given))
        self._record_cache()
        self.stats.prefill_rows += len(chosen)

    def _seat(self, moves: list[tuple[int, _Sample]]) -> None:
        source = np.full(self.engine.slots, -1, np.int32)
        for slot, sample in moves:
            prompt = self.prompts[sample.prompt]
            source[slot] = sample.prompt - self.held.start
            ids = sample.prompt_id, sample.sample_id
            self._sit(sample, slot, (prompt[-1], len(prompt) - 1, 0, sample.limit, *ids))
        self._fit(max(self._reach(), self._cached()))
        self.cache = decode.insert(
            self.engine.config, self.engine.mesh, self.cache, self.held_cache, source
        )

    def _reach(self) -> int:
        """Cache positions that the next launch may use, as a bucket."""
        left = self.table[:, decode.LIMIT] - self.table[:, decode.COUNT]
        ahead = np.minimum(left, self.engine.launch_tokens)
        reach = int((self.table[:, decode.POSITION] + ahead).max())
        multiple = self.engine.width_multiple
        steps = CACHE_STEPS if len(self.table) == self.engine.slots else 1
        size = bucket(reach, smallest=NARROWEST, steps=steps, multiple=multiple)
        return min(size, self.engine.length)

    def _cached(self) -> int:
        return self.cache[0][0].shape[decode.POSITIONS] if self.cache else 0

    def _shrink(self) -> np.ndarray | None:
        """Fewer slots once nothing waits and half of them are free: a step computes a free one too.

        Each device keeps slots of its own, so that none is moved to another.

        Returns:
            [slots left] int32: which of its slots each device keeps; None where all stay.
        """
        if self.queue:
            return None
        mesh, shards = self.engine.mesh, self.engine.row_shards
        held = len(self.table) // shards
        taken = [[s for s in sorted(self.seated) if s // held == k] for k in range(shards)]
        left = round_up(bucket(max(map(len, taken))), 1 if mesh is None else mesh.shape["tensor"])
        if 2 * left > held:
            return None
        kept, old = np.zeros((shards, left), np.int32), self.table
        self.table = np.zeros((shards * left, old.shape[1]), np.int32)
        for k, slots in enumerate(taken):
            for at, slot in enumerate(slots):
                kept[k, at] = slot - k * held
                self._sit(self.seated.pop(slot), k * left + at, old[slot])
        return kept.reshape(-1)

    def _fit(self, length: int, kept: np.ndarray | None = None) -> None:
        """Makes the cache `length` positions long, with the slots `kept`: a step reads all of it,
        and cutting a part out at each step would cost a copy. One layer at a time, so that only one
        is there twice."""
        config, mesh = self.engine.config, self.engine.mesh
        if not self.cache:
            dtype, layout = self.params["norm"]["scale"].dtype, layout_of(self.params)
            self.cache = decode.new_cache(config, mesh, self.engine.slots, length, dtype, layout)
            self._record_cache()
        if self._cached() != length or kept is not None:
            for i, layer in enumerate(self.cache):
                given = (config, mesh, [layer], length, kept)
                with self.ledger.running(decode.resize, *given):
                    self.cache[i : i + 1] = decode.resize(*given)
            self._record_cache()

    def _launch(self) -> int:
        """Decodes, hands the tokens to their samples, frees the slots that are done; returns the
        number of tokens."""
        started = time.perf_counter()
        engine = self.engine
        kept = self._shrink()
        self._fit(self._reach(), kept)
        waiting = len(self.queue)
        exit_free = min(engine.min_free, waiting) if waiting else len(self.table)
        given = (engine.config, engine.mesh, self.params, self.cache, self.table.copy())
        rest = (np.int32(exit_free), self.knobs)
        length = {"n_tokens": engine.launch_tokens, "check_every": engine.check_every}
        with self.ledger.running(decode.launch, *given, *rest, **length):
            self.cache, launched = decode.launch(*given, *rest, **length)
            self._read()  # the tokens of the launch before, while this one runs
            out = np.asarray(launched)
        self.stats.launches += 1
        self.stats.decode_steps += int((out[:, 0, 0] != decode.NOT_RUN).sum())
        self.stats.decode_seconds += time.perf_counter() - started
        counts = (out[:, :, 0] >= 0).sum(0)
        for slot, sample in list(self.seated.items()):
            self._collect(sample, out[: counts[slot], slot])
        if self.sampling.stop and not engine.search_beside:
            self._read()
        return int(counts.sum())

    def _collect(self, sample: _Sample, rows: np.ndarray) -> None:
        """Appends the launch's rows [k, 3] to the sample; frees the slot of one that ended."""
        self.unread.append((sample, len(sample.tokens)))
        sample.tokens += rows[:, 0].tolist()
        sample.logprobs.append(rows[:, 1:].copy().view(np.float32))
        if sample.tokens[-1] in self.sampling.eos_ids:
            sample.finish_reason = "stop"
        elif len(sample.tokens) == sample.limit:
            sample.finish_reason = "length"
        if sample.finish_reason is not None:
            self._free(sample)
        else:
            last = sample.tokens[-1], len(self.prompts[sample.prompt]) + len(sample.tokens) - 1
            self.table[sample.slot, :3] = (*last, len(sample.tokens))

    def _read(self) -> None:
        """The text of what was collected: a stop string ends a completion, a finished one gets its
        text. A slot that is freed here was decoded once too often by a launch that runs beside."""
        for sample, before in self.unread:
            ended = sample.finish_reason == "stop"
            visible = sample.tokens[:-1] if ended else sample.tokens
            stopped = self._find_stop(visible, before)
            if stopped is not None:
                end, sample.text = stopped
                del sample.tokens[end:]
                sample.finish_reason = "stop"
                self._free(sample)
            elif sample.finish_reason is not None:
                sample.text = text.decode(self.engine.tokenizer, visible)
        self.unread = []

    def _sit(self, sample: _Sample, slot: int, row: Any) -> None:
        sample.slot, self.seated[slot], self.table[slot] = slot, sample, row

    def _free(self, sample: _Sample) -> None:
        if sample.slot is not None:
            self.table[sample.slot] = 0
            del self.seated[sample.slot]
            sample.slot = None

    def _find_stop(self, tokens: list[int], before: int) -> tuple[int, str] | None:
        tokenizer, stop = self.engine.tokenizer, self.sampling.stop
        if tokenizer is None or not stop:
            return None
        return text.find_stop(tokenizer, tokens, before, stop)

    def _width(self, prompts: Sequence[Sequence[int]]) -> int:
        """Of the arrays that these prompts are prefilled in; it may be above the engine's limit."""
        longest, most = max(map(len, prompts)), self.engine.max_prompt_tokens
        multiple = self.engine.width_multiple
        return bucket(longest, smallest=NARROWEST, multiple=multiple, most=most)

    def _prefill_batch(self, n: int) -> int:
        """Prompts in one prefill: as many as fill the slots with their n samples, within
        `PREFILL_TOKENS`."""
        shards = self.engine.row_shards
        width = self._width(self.prompts)
        wanted = min(-(-self.engine.slots // n), len(self.prompts))
        allowed = max(1, PREFILL_TOKENS * shards // width)
        return round_up(min(bucket(wanted), bucket(allowed)), shards)


_cast = jax.jit(cast, static_argnames="dtype")


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{name}={value}: must be at least 1")
