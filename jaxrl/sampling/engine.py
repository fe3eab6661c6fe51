"""Continuous batching, the host side: assigns samples to slots, launches decode steps and collects
their tokens. `sampling.decode` has the device side.

A slot is one row of the KV cache. A launch runs up to `launch_tokens` decode steps over all slots,
and returns early once enough slots are free. The host then reads the tokens, searches for stop
strings and fills the free slots with waiting samples. Once no sample is waiting, it shrinks the
cache to fewer slots. Each prompt is prefilled once, in batches just large enough to fill the slots,
and its keys and values are copied into the slots of its n samples. The sampled tokens depend on
(seed, step, attempt, prompt id, sample id, position), never on slots, launches or timing.

On a mesh of several processes each process runs this code with the same arguments. The tokens of a
launch are replicated to all processes, so that all make the same decisions.
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
from jaxrl.sharding.axes import row_shards
from jaxrl.sharding.ledger import Ledger
from jaxrl.sharding.reshard import put
from jaxrl.types import Completion, FinishReason

__all__ = ["Aborted", "Engine", "EngineStats", "SamplingParams"]

NARROWEST = 64
"""Smallest width of prefilled prompts, and smallest length of the cache."""
CACHE_STEPS = 4
"""Cache lengths per doubling, with all slots in use. A decode step reads the whole cache, so finer
lengths save time. With fewer slots there is one length per doubling, which limits the number of
compiled programs."""
PREFILL_TOKENS = 4096
"""Most prompt tokens per data shard in one prefill; limits its activation memory."""


CACHE = "KV cache"
"""Name of the cache in the ledger, the account of device memory (`sharding.ledger`)."""


class Aborted(RuntimeError):
    """`abort` returned True between two launches."""


@dataclass
class EngineStats:
    """What the last `generate` did."""

    decode_steps: int = 0
    launches: int = 0
    prefill_rows: int = 0
    """Prompts prefilled, without padding rows."""
    generated_tokens: int = 0
    """Tokens in the completions, without those after a stop string."""
    slots: int = 0
    prefill_seconds: float = 0.0
    """Time for prefill and copies into slots, including the wait for the device."""
    decode_seconds: float = 0.0
    """Time for launches, until their tokens are on the host."""
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
        """Fixes the shapes. `generate` allocates all device memory and frees it at its end.

        Args:
            mesh: axes (data, fsdp, tensor), or None for one device.
            slots: completions decoded at once; rounded up to a multiple of the devices.
            max_prompt_tokens, max_new_tokens: their sum limits the length of the KV cache, which
                grows as far as the sequences need.
            launch_tokens: most decode steps in one launch.
            min_free: number of free slots at which a launch ends early while samples wait. None:
                an eighth of the slots.
            check_every: decode steps after which the device counts the free slots again; a divisor
                of launch_tokens. None: 1 on one CPU device, where the check costs nothing, else 8.
                With check_every=launch_tokens, launches have a fixed length.
            search_beside: search for stop strings while the next launch already runs. A completion
                that a stop string ends then occupies its slot for one more launch. None: True,
                except on a CPU, where a launch takes much longer than the search.
            dtype: of the computation and the cache. None: the dtype of the parameters.
            tokenizer: decodes tokens to text, also to find stop strings.
            ledger: records the memory of cache and programs.
        """
        _at_least_one(slots=slots, max_prompt_tokens=max_prompt_tokens)
        _at_least_one(max_new_tokens=max_new_tokens, launch_tokens=launch_tokens)
        if max_prompt_tokens + max_new_tokens > config.max_positions:
            raise UserError(
                f"max_prompt_tokens={max_prompt_tokens} + max_new_tokens={max_new_tokens} exceeds "
                f"the model's {config.max_positions} positions; lower one of them"
            )
        if config.sequence_length is None:
            config = config.for_length(max_prompt_tokens + max_new_tokens)
        devices = 1 if mesh is None else mesh.size
        self.row_shards = 1 if mesh is None else row_shards(mesh.shape)
        self.config, self.mesh, self.tokenizer, self.dtype = config, mesh, tokenizer, dtype
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self.slots = round_up(slots, devices)
        self.min_free = max(1, self.slots // 8) if min_free is None else min_free
        target = target_of(jax.devices()[:1] if mesh is None else mesh.devices.flat)
        self.width_multiple = target.width_multiple
        self.length = round_up(max_prompt_tokens + max_new_tokens, target.width_multiple)
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
        record_experts: bool = False,
        abort: Callable[[], bool] | None = None,
        on_tokens: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Samples n completions of each prompt.

        Args:
            params: on the mesh, in either layout; unstacked is faster.
            prompts: token ids.
            seed, step, attempt: parts of the random key of every token.
            prompt_ids: part of that key too, modulo 2^31. None: the index in `prompts`.
            limits: [len(prompts)][n] most tokens of each completion. None: `max_new_tokens`.
            record_experts: of a mixture, set `Completion.experts`.
            abort: called between launches; if it returns True, `Aborted` is raised.
            on_tokens: called after each launch with the number of tokens decoded and of completions
                finished so far.
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
            run = _Run(self, params, prompts, n, sampling, knobs, samples, record_experts)
            run.loop(abort, on_tokens)
        done = [sample.completion() for sample in samples]
        self.stats.generated_tokens = sum(len(c.tokens) for c in done)
        self.stats.seconds = time.perf_counter() - started
        return [done[i * n : (i + 1) * n] for i in range(len(prompts))]

    def cache_length(self, reach: int, slots: int) -> int:
        """Positions of the cache of so many slots in which `reach` positions are used: a bucket."""
        steps = CACHE_STEPS if slots == self.slots else 1
        size = bucket(reach, smallest=NARROWEST, steps=steps, multiple=self.width_multiple)
        return min(size, self.length)

    def fewer_slots(self, taken: int, held: int) -> int | None:
        """Slots that each device keeps of `held`, where the fullest has `taken` in use; None where
        that is more than half of them."""
        left = round_up(bucket(taken), 1 if self.mesh is None else self.mesh.shape["tensor"])
        return left if 2 * left <= held else None

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
    """One completion while it is generated."""

    prompt: int
    prompt_id: int
    sample_id: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    """[k, 2] float32 for each launch: log-probs of the full and of the truncated distribution."""
    finish_reason: FinishReason | None = None
    text: str = ""
    slot: int | None = None
    """The slot that decodes it; None before and after that."""
    experts: list[np.ndarray] = field(default_factory=list)
    """[., L, k] of the prompt without its last token, then [k, L, k] of each launch; where they are
    recorded."""

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        experts = None
        if self.experts:
            experts = np.concatenate(self.experts)[: len(self.experts[0]) + len(self.tokens)]
        logprobs = np.concatenate(self.logprobs)[: len(self.tokens)]
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=np.ascontiguousarray(logprobs[:, 0]),
            sampler_logprobs=np.ascontiguousarray(logprobs[:, 1]),
            finish_reason=self.finish_reason,
            text=self.text,
            experts=experts,
        )


class _Run:
    """The state of one call of `generate`: the queue of samples, the slots, their KV cache, and the
    keys and values of the last prefilled batch of prompts."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingParams,
        knobs: SamplingArrays,
        samples: list[_Sample],
        record: bool,
    ):
        self.record = record
        self.held_experts: np.ndarray | None = None
        """Of the prompts in `held_cache`, [b, P, L, k], where they are recorded."""
        self.engine, self.params, self.prompts = engine, params, prompts
        self.sampling, self.stats, self.ledger = sampling, engine.stats, engine.ledger
        mesh = engine.mesh
        self.knobs = knobs
        if mesh is not None:
            self.knobs = put(knobs, NamedSharding(mesh, PartitionSpec()))
        self.queue = deque(samples)
        self.seated: dict[int, _Sample] = {}
        self.unread: list[tuple[_Sample, int]] = []
        """Samples with tokens that were not searched for stop strings, each with the number of its
        tokens before these."""
        self.table = np.zeros((engine.slots, 6), np.int32)
        self.prefill_batch = self._prefill_batch(n)
        self.held = range(0)
        """Indices of the prompts whose keys and values are in `held_cache`. Samples wait in the
        order of their prompts, so one prefilled batch is enough."""
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
        """Puts waiting samples into free slots, and prefills their prompts first where needed."""
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
        """Prefills the batch of prompts that begins with prompt `first`; replaces `held_cache`."""
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
        with self.ledger.running(decode.prefill, *given, record=self.record):
            self.held_cache, experts = decode.prefill(*given, record=self.record)
            jax.block_until_ready(self.held_cache)
        self.held_experts = None if experts is None else np.asarray(experts)
        self._record_cache()
        self.stats.prefill_rows += len(chosen)

    def _seat(self, moves: list[tuple[int, _Sample]]) -> None:
        source = np.full(self.engine.slots, -1, np.int32)
        for slot, sample in moves:
            prompt = self.prompts[sample.prompt]
            source[slot] = sample.prompt - self.held.start
            if self.held_experts is not None:
                read = self.held_experts[sample.prompt - self.held.start, : len(prompt) - 1]
                sample.experts.append(read)
            ids = sample.prompt_id, sample.sample_id
            self._sit(sample, slot, (prompt[-1], len(prompt) - 1, 0, sample.limit, *ids))
        self._fit(max(self._reach(), self._cached()))
        self.cache = decode.insert(
            self.engine.config, self.engine.mesh, self.cache, self.held_cache, source
        )

    def _reach(self) -> int:
        """Cache length that the next launch may need, rounded up to a bucket."""
        left = self.table[:, decode.LIMIT] - self.table[:, decode.COUNT]
        ahead = np.minimum(left, self.engine.launch_tokens)
        reach = int((self.table[:, decode.POSITION] + ahead).max())
        return self.engine.cache_length(reach, len(self.table))

    def _cached(self) -> int:
        return self.cache[0][0].shape[decode.POSITIONS] if self.cache else 0

    def _shrink(self) -> np.ndarray | None:
        """Chooses the slots to keep, and renumbers their samples, once no sample is waiting and at
        least half of the slots are free, since a decode step computes free slots too.

        Each device keeps some of its own slots, so that no slot moves between devices.

        Returns:
            [slots left] int32: for each device, the slots that it keeps, counted among its own.
            None if all slots stay.
        """
        if self.queue:
            return None
        shards = self.engine.row_shards
        held = len(self.table) // shards
        taken = [[s for s in sorted(self.seated) if s // held == k] for k in range(shards)]
        left = self.engine.fewer_slots(max(map(len, taken)), held)
        if left is None:
            return None
        kept, old = np.zeros((shards, left), np.int32), self.table
        self.table = np.zeros((shards * left, old.shape[1]), np.int32)
        for k, slots in enumerate(taken):
            for at, slot in enumerate(slots):
                kept[k, at] = slot - k * held
                self._sit(self.seated.pop(slot), k * left + at, old[slot])
        return kept.reshape(-1)

    def _fit(self, length: int, kept: np.ndarray | None = None) -> None:
        """Resizes the cache to `length` positions and the slots `kept`. A decode step reads the
        whole cache, since a slice of it would be a copy at each step. Layers are resized one at a
        time, so that only one exists twice."""
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
        """Runs one launch, appends its tokens to their samples, and frees the slots of finished
        ones. Returns the number of tokens."""
        started = time.perf_counter()
        engine = self.engine
        kept = self._shrink()
        self._fit(self._reach(), kept)
        waiting = len(self.queue)
        exit_free = min(engine.min_free, waiting) if waiting else len(self.table)
        given = (engine.config, engine.mesh, self.params, self.cache, self.table.copy())
        rest = (np.int32(exit_free), self.knobs)
        length = {"n_tokens": engine.launch_tokens, "check_every": engine.check_every}
        options = {**length, "record": self.record}
        with self.ledger.running(decode.launch, *given, *rest, **options):
            self.cache, launched, chosen = decode.launch(*given, *rest, **options)
            self._read()  # searches the tokens of the launch before while this one runs
            out = np.asarray(launched)
        self.stats.launches += 1
        self.stats.decode_steps += int((out[:, 0, 0] != decode.NOT_RUN).sum())
        self.stats.decode_seconds += time.perf_counter() - started
        counts = (out[:, :, 0] >= 0).sum(0)
        experts = None if chosen is None else np.asarray(chosen)
        for slot, sample in list(self.seated.items()):
            if experts is not None:
                sample.experts.append(experts[: counts[slot], slot])
            self._collect(sample, out[: counts[slot], slot])
        if self.sampling.stop and not engine.search_beside:
            self._read()
        return int(counts.sum())

    def _collect(self, sample: _Sample, rows: np.ndarray) -> None:
        """Appends a launch's rows [k, 3] (token, bits of two log-probs) to a sample; frees its slot
        if it ended."""
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
        """Searches the collected tokens for stop strings, which end a completion, and decodes the
        text of finished completions. A launch that runs meanwhile still decodes the slots that this
        frees; those tokens are dropped."""
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
        """Width of the arrays in which these prompts are prefilled: a bucket, which may exceed
        `max_prompt_tokens`."""
        longest, most = max(map(len, prompts)), self.engine.max_prompt_tokens
        multiple = self.engine.width_multiple
        return bucket(longest, smallest=NARROWEST, multiple=multiple, most=most)

    def _prefill_batch(self, n: int) -> int:
        """Number of prompts in one prefill: enough to fill the slots with their n samples, within
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
