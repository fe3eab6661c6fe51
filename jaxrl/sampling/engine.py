"""Continuous batching, the host side: assigns samples to slots, launches decode steps and collects
their tokens. `sampling.decode` has the device side.

A slot holds one sequence that is being decoded. A launch runs up to `launch_tokens` decode steps
over all slots, and returns early once enough slots are free. The host then reads the tokens,
searches for stop strings and fills the free slots with waiting samples. Once no sample is waiting,
it shrinks the cache to fewer slots. A prompt is prefilled in each data shard whose slots have some
of its n samples, and copied into a row that these share (`sampling.slots`): no shard holds
the prompts of others. What follows is in the slots, or in pages of a pool (`sampling.slots`). The
sampled tokens depend on (seed, step, attempt, prompt id, sample id, position), never on slots,
launches or timing.

In an episode an environment answers each turn of the model (`sampling.partial_completion`). Its
slot keeps its keys and values and decodes nothing until the answer is there, whose tokens are then
added to them. Other slots continue meanwhile. The cache keeps its slots and has its full length and
all rows of prompts from the start, so that neither shapes nor results depend on when an answer
comes.

On a mesh of several processes each process runs this code with the same arguments. The tokens of a
launch are replicated to all processes, so that all make the same decisions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.data.chat_template import turn_tokens
from jaxrl.data.thoughts import opening_of
from jaxrl.data.tokenizer import Tokenizer, decode_text
from jaxrl.errors import UserError
from jaxrl.formats.finite import not_finite
from jaxrl.models.batching import bucket, round_up
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Cache, SlotTokens, keys_of
from jaxrl.models.delta import Recurrent
from jaxrl.models.kernels import target_on
from jaxrl.models.parameters import Params
from jaxrl.models.shared_prompts import PAGE, why_not_paged
from jaxrl.process.compilations import compilations
from jaxrl.process.waiting import waiting
from jaxrl.sampling import decode
from jaxrl.sampling.partial_completion import (
    PartialCompletion,
    SampleRequest,
    find_stop,
    until_stop,
)
from jaxrl.sampling.sampler import SamplingArrays, SamplingParams, sampling_arrays
from jaxrl.sampling.slots import PagePool, PromptRows, Slots, pages_of, pool_pages
from jaxrl.sharding.axes import row_shards
from jaxrl.sharding.ledger import Ledger
from jaxrl.sharding.reshard import put
from jaxrl.types import Completion, Turn

__all__ = ["Aborted", "Engine", "EngineStats", "SamplingParams"]

NARROWEST = 64
"""Smallest width of prefilled prompts, and smallest length of the cache."""
CACHE_STEPS = 4
"""Number of cache lengths per doubling while all slots are in use. A decode step reads the whole
cache, so finer lengths save time. With fewer slots there is one length per doubling, which limits
the number of compiled programs."""
PREFILL_TOKENS = 256, 4096
"""About the fewest prompt tokens per data shard in one prefill, fewer of which take no less time,
and the most, which limits its activation memory."""
ANSWER_ROWS, ANSWER_TOKENS = 4, (16, 256)
"""Environments' answers that are prefilled at once in each data shard, and the smallest and largest
width of one: a longer answer is prefilled in parts."""
CACHE = "KV cache"
"""Name of the caches in the ledger, the account of device memory (`sharding.ledger`)."""
LOOK_S = 0.2
"""Seconds between two checks of `abort` while all slots wait for environments."""


class Aborted(RuntimeError):
    """`abort` returned True between two launches."""


@dataclass
class EngineStats:
    """What the last `generate` did."""

    decode_steps: int = 0
    launches: int = 0
    prefill_rows: int = 0
    """Prompts prefilled, without padding rows; counted in each data shard that has samples."""
    preemptions: int = 0
    """Preemptions: how often a sample lost its slot because the cache had no page left."""
    recomputed: int = 0
    """Tokens of preempted samples, and of their prompts, that were prefilled a second time."""
    generated_tokens: int = 0
    """Sampled tokens, without those after a stop string."""
    slots: int = 0
    prefill_seconds: float = 0.0
    """Time for prefill and copies into slots, including the wait for the device."""
    decode_seconds: float = 0.0
    """Time for launches, until their tokens are on the host."""
    steady_tokens: int = 0
    """Tokens of the launches during which nothing was compiled: the speed of decoding alone is
    theirs."""
    steady_seconds: float = 0.0
    """Time for those launches."""
    turns: int = 0
    """Turns of the model in episodes."""
    waiting_seconds: float = 0.0
    """Time in which all slots waited for environments."""
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
        episodes: bool = False,
        cache_tokens: int | None = None,
        tokenizer: Tokenizer | None = None,
        ledger: Ledger | None = None,
    ):
        """Fixes the shapes. `generate` allocates all device memory and frees it at its end.

        Args:
            mesh: with the axes of a role, or None for one device.
            slots: completions decoded at once; rounded up to a multiple of the devices.
            max_prompt_tokens, max_new_tokens: their sum limits the length of the KV cache, which
                grows as far as the sequences need.
            launch_tokens: most decode steps in one launch.
            episodes: completions may be episodes (`SampleRequest.environment`).
            cache_tokens: positions of completions that a device of each data shard holds, in pages
                (`sampling.slots`). None: every slot has as many as the longest completion.
            tokenizer: decodes tokens to text, also to find stop strings.
            ledger: records the memory of cache and programs.
        """
        assert min(slots, max_prompt_tokens, max_new_tokens, launch_tokens) > 0
        if max_prompt_tokens + max_new_tokens > config.max_positions:
            raise UserError(
                f"max_prompt_tokens={max_prompt_tokens} + max_new_tokens={max_new_tokens} exceeds "
                f"the model's {config.max_positions} positions; lower one of them"
            )
        if config.sequence_length is None:
            config = config.for_length(max_prompt_tokens + max_new_tokens)
        devices = 1 if mesh is None else mesh.size
        self.row_shards = 1 if mesh is None else row_shards(mesh.shape)
        self.config, self.mesh, self.tokenizer = config, mesh, tokenizer
        if tokenizer is not None:
            turn_tokens(tokenizer)  # renders chats, once: here, and not behind the first launch
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self.slots = round_up(slots, devices)
        self.min_free = max(1, self.slots // 8)
        """Number of free slots at which a launch ends early while samples wait."""
        target = target_on(mesh)
        self.target, self.width_multiple = target, target.width_multiple
        self.episodes = episodes
        beyond = ANSWER_TOKENS[1] if episodes else 0  # a part's padding may lie there
        self.length = round_up(max_new_tokens + beyond, target.width_multiple)
        """Most positions of a slot, behind its prompt."""
        self.pages: int | None = None
        """Pages in the pool of each data shard; None: there is none."""
        if cache_tokens is not None:
            assert cache_tokens >= max_new_tokens, "the oldest sample always goes on"
            self.pages = pool_pages(cache_tokens, self.slots // self.row_shards, max_new_tokens)
        on_cpu = target.platform == "cpu"  # where a launch takes much longer than the search
        self.search_beside = not on_cpu
        """Whether stop strings are searched for while the next launch already runs. A completion
        that one ends then occupies its slot for one more launch."""
        self.check_every = min(1 if devices == 1 and on_cpu else 8, launch_tokens)
        """Decode steps after which the device counts the free slots again: a divisor of
        `launch_tokens`. On one CPU device the check costs nothing."""
        self.launch_tokens = round_up(launch_tokens, self.check_every)
        self.launch = decode.launch_on(target, mesh)
        self.ledger = ledger or Ledger()
        self.stats = EngineStats()

    def generate(
        self,
        params: Params,
        requests: Sequence[SampleRequest],
        *,
        record_experts: bool = False,
        abort: Callable[[], bool] | None = None,
        on_tokens: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Samples the completion of each request; the first requests get slots first.

        Args:
            params: on the mesh, unstacked.
            requests: with the same sampling, seed, step and attempt, which all slots of a launch
                share.
            record_experts: of a mixture, set `Completion.experts`.
            abort: called between launches; if it returns True, `Aborted` is raised.
            on_tokens: called after each launch with the number of tokens decoded and of completions
                finished so far.

        Raises:
            UserError: a prompt or its sampling does not fit the engine.
            Aborted: `abort` returned True.
        """
        started = time.perf_counter()
        self.stats = EngineStats(slots=self.slots)
        if not requests:
            return []
        firsts: list[SampleRequest] = []  # of each prompt
        samples: list[PartialCompletion] = []
        for i, request in enumerate(requests):
            if (
                not firsts
                or firsts[-1].prompt is not request.prompt
                or firsts[-1].key.prompt != request.key.prompt
            ):
                firsts.append(request)
            samples.append(PartialCompletion(i, len(firsts) - 1, request))
        prompts = [request.prompt for request in firsts]
        self._check(params, requests, prompts)
        _Generation(self, params, prompts, samples, record_experts).run(abort, on_tokens)
        done = [sample.completion() for sample in samples]
        self.stats.generated_tokens = sum(int(c.sampled.sum()) for c in done)
        self.stats.seconds = time.perf_counter() - started
        return done

    def _check(
        self, params: Params, requests: Sequence[SampleRequest], prompts: Sequence[Sequence[int]]
    ) -> None:
        """Raises UserError where a request, or one of their prompts, does not fit the engine."""
        sampling, key = requests[0].sampling, requests[0].key
        for request in requests:
            assert (request.sampling, *request.key[:3]) == (sampling, *key[:3])
            assert 0 < request.max_tokens <= sampling.max_new_tokens
            assert request.environment is None or self.episodes
        assert sampling.max_new_tokens <= self.max_new_tokens
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
        if self.pages is not None:
            dtype = np.dtype(params["norm"]["scale"].dtype).name
            why = why_not_paged(self.config, self.target, dtype, episodes=self.episodes)
            if why is not None:
                raise UserError(
                    f"rollout.cache_tokens needs completions in pages, and here {why}; set it to"
                    " null"
                )

    def cache_length(self, reach: int, slots: int) -> int:
        """Returns the positions of each slot when completions reach `reach` positions in `slots`
        slots: rounded up to a bucket."""
        if self.episodes:
            return self.length
        steps = CACHE_STEPS if slots == self.slots else 1
        size = bucket(reach, smallest=NARROWEST, steps=steps, multiple=self.width_multiple)
        return min(size, self.length)

    def prompt_width(self, tokens: int, beyond: int = 0) -> int:
        """Returns the width of the arrays in which prompts of up to `tokens` tokens are prefilled,
        with up to `beyond` tokens of their completions: a bucket, which may exceed
        `max_prompt_tokens`."""
        most, multiple = self.max_prompt_tokens + beyond, self.width_multiple
        return bucket(tokens, smallest=NARROWEST, multiple=multiple, most=most)

    def fewer_slots(self, taken: int, held: int) -> int | None:
        """Returns the slots that each device keeps of `held` if its fullest uses `taken`; None if
        that would be more than half of them, so that shrinking does not pay."""
        left = round_up(bucket(taken), 1 if self.mesh is None else self.mesh.shape["tensor"])
        return left if 2 * left <= held else None

    def pages_for_slots(self, slots: int) -> int:
        """Counts the pages of a data shard's pool for `slots` slots: no more than they can use."""
        assert self.pages is not None
        return min(self.pages, slots * pages_of(self.max_new_tokens))


class _Generation:
    """One call of `generate`: the queue of samples, the slots, and the caches."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[PartialCompletion],
        record: bool,
    ):
        self.engine, self.prompts, self.record = engine, prompts, record
        self.stats, self.ledger = engine.stats, engine.ledger
        self.episodes = any(sample.request.environment for sample in samples)
        mesh, shards = engine.mesh, engine.row_shards
        request = samples[0].request
        self.sampling: SamplingParams = request.sampling
        self.knobs: SamplingArrays = sampling_arrays(self.sampling, *request.key[:3])
        if mesh is not None:
            self.knobs = put(self.knobs, NamedSharding(mesh, PartitionSpec()))
        self.on, self.params = (engine.config, mesh), params
        self.prompt_cache: Cache = []
        """The cache of the prompts, in rows that slots share."""
        self.cache: Cache = []
        """The cache of what follows prompts: a row for each slot, or for each page of a pool."""
        self.pool = None if engine.pages is None else PagePool(shards, engine.pages)
        self.slots = Slots(samples, engine.slots, shards, engine.launch_tokens, self.pool)
        # The rows of episodes' prompts are all there from the start: so are the shapes of programs.
        per_shard, n = engine.slots // shards, max(Counter(x.prompt for x in samples).values())
        self.rows = PromptRows(shards, per_shard, n, len(prompts), fixed=engine.episodes)
        self.prompt_keys = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
        """Number of keys of each prompt that its slots read: all but that of the last token, which
        they read first, so that the next one is drawn by the same program as all others."""
        self.width = engine.prompt_width(max(map(len, prompts)))
        self.prefill_batch = prefill_batch(per_shard, len(prompts), n, self.width)
        self.prompt_experts: dict[int, np.ndarray] = {}
        """[len(prompt) - 1, L, k] of the prompts whose samples are being seated, where experts are
        recorded."""
        self.unsearched: list[tuple[PartialCompletion, int]] = []
        """Samples with tokens not yet searched for stop strings, each with its number of tokens
        before these."""

    def run(
        self, abort: Callable[[], bool] | None, on_tokens: Callable[[int, int], None] | None
    ) -> None:
        """Decodes until no sample is left."""
        slots = self.slots
        total, tokens, finished = len(slots.queue), 0, 0
        idle, waits = ExitStack(), False  # while all slots wait for environments
        try:
            while slots.queue or slots.seated:
                if abort is not None and abort():
                    raise Aborted(
                        f"generation aborted: {finished} of {total} completions were done"
                    )
                if self.pool is not None:
                    if slots.is_short_of_pages():
                        # A stop string may have ended a sample, whose pages are then free.
                        self._find_ends()
                    self.stats.preemptions += slots.allocate_pages()
                self._refill()
                if self.episodes:
                    self._resume()
                if not slots.queue:
                    self.ledger.prefetch_next()
                if (slots.table[:, decode.COUNT] < slots.table[:, decode.LIMIT]).any():
                    idle.close()
                    waits = False
                    tokens += self._launch()
                else:  # until an environment has answered, or it is time to ask `abort`
                    started = time.perf_counter()
                    replies = [x.reply for x in slots.seated.values() if x.reply is not None]
                    if replies and not waits:
                        what = f"the environment's answers to {len(replies)} episodes"
                        idle.enter_context(waiting(what))
                        waits = True
                    if replies:
                        wait(replies, LOOK_S, FIRST_COMPLETED)
                    self.stats.waiting_seconds += time.perf_counter() - started
                finished = total - len(slots.queue) - len(slots.seated)
                if on_tokens is not None:
                    on_tokens(tokens, finished)
            self._find_ends()
        finally:
            idle.close()
            for sample in list(slots.seated.values()):
                self._free(sample)
            self.cache, self.prompt_cache = [], []
            self.ledger.drop(CACHE)
        self.ledger.prefetch_next()

    def _refill(self) -> None:
        """Puts waiting samples into free slots, and their prompts into rows of the same shards."""
        started = time.perf_counter()
        slots, shards = self.slots, self.engine.row_shards
        fresh: list[PartialCompletion] = []
        preempted: list[PartialCompletion] = []
        while (slot := slots.vacant_slot()) is not None:
            sample = slots.seat_next(slot)
            (preempted if len(sample.tokens) else fresh).append(sample)
        if not fresh and not preempted:
            return
        unfilled = self.rows.admit(slots.prompts)
        count = self.rows.count
        self._resize(self.prompt_cache, count * shards, self.width)
        # What a preempted sample reads again begins with its prompt.
        again = {(x.slot // slots.per_shard, x.prompt) for x in preempted if x.slot is not None}
        rows: dict[tuple[int, int], int] = {}
        # For each shard: rows, counted among its own, and their prompts.
        waiting: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
        for number, prompt in unfilled.items():
            shard, row = divmod(number, count)
            if (shard, prompt) in again:
                rows[shard, prompt] = row
            else:
                waiting[shard].append((row, prompt))
        # In each data shard as many of its own prompts at a time as one program takes.
        while any(waiting):
            least = max(1, PREFILL_TOKENS[0] // self.width)
            batch = min(max(least, bucket(max(map(len, waiting)))), self.prefill_batch)
            chosen = [part[:batch] for part in waiting]
            waiting = [part[batch:] for part in waiting]
            longest = max(len(self.prompts[prompt]) for part in chosen for _, prompt in part)
            width = self.engine.prompt_width(longest)
            tokens = np.zeros((shards, batch, width), np.int32)
            lengths = np.ones((shards, batch), np.int32)
            source = np.full((shards, count), -1, np.int32)
            for shard, part in enumerate(chosen):
                for i, (row, prompt) in enumerate(part):
                    read = self.prompts[prompt]
                    tokens[shard, i, : len(read)], lengths[shard, i] = read, len(read)
                    source[shard, row] = i
            arguments = (*self.on, self.params, tokens.reshape(-1, width), lengths.reshape(-1))
            with self.ledger.running(decode.prefill_prompts, *arguments, record=self.record):
                prefilled, experts = decode.prefill_prompts(*arguments, record=self.record)
                jax.block_until_ready(prefilled)
            self.ledger.put(CACHE, (self.cache, self.prompt_cache, prefilled))
            caches = self.prompt_cache, prefilled
            self.prompt_cache = decode.insert(*self.on, *caches, source.reshape(-1))
            self.ledger.put(CACHE, (self.cache, self.prompt_cache))
            if experts is not None:
                by_prompt = np.asarray(experts).reshape(shards, batch, *experts.shape[1:])
                for shard, part in enumerate(chosen):
                    for i, (_, prompt) in enumerate(part):
                        keys = self.prompt_keys[prompt]
                        self.prompt_experts[prompt] = by_prompt[shard, i, :keys]
            self.stats.prefill_rows += sum(map(len, chosen))
        if self.record:
            for sample in fresh:
                if not sample.experts:  # it may have lost its slot before it had a token
                    sample.experts.append(self.prompt_experts[sample.prompt])
            # Samples wait in the order of their prompts.
            first = slots.queue[0].prompt if slots.queue else len(self.prompts)
            old = self.prompt_experts
            self.prompt_experts = {prompt: old[prompt] for prompt in old if prompt >= first}
        if preempted:
            self._recompute(preempted, rows)
        jax.block_until_ready(self.prompt_cache)
        self.stats.prefill_seconds += time.perf_counter() - started

    def _recompute(
        self, preempted: list[PartialCompletion], rows: dict[tuple[int, int], int]
    ) -> None:
        """Computes the keys and values of preempted samples, which have slots and pages again, one
        of each data shard at a time.

        Args:
            rows: (shard, prompt) -> the row there that does not hold it yet. What will is taken
                out.
        """
        assert self.pool is not None
        shards = self.engine.row_shards
        self._resize(self.cache, self.pool.pages * shards, PAGE)
        while preempted:
            longest = max(len(x.request.prompt) + len(x.tokens) for x in preempted)
            width = self.engine.prompt_width(longest, self.engine.max_new_tokens)
            tokens, lengths = np.zeros((shards, width), np.int32), np.ones(shards, np.int32)
            where, starts = np.full(shards, -1, np.int32), np.zeros(shards, np.int32)
            pages = np.full((shards, pages_of(width)), -1, np.int32)
            others: list[PartialCompletion] = []
            for sample in preempted:
                assert sample.slot is not None
                shard, prompt = sample.slot // self.slots.per_shard, sample.request.prompt
                if pages[shard, 0] >= 0:
                    others.append(sample)
                    continue
                read = np.concatenate([prompt, sample.tokens[:-1]])
                tokens[shard, : len(read)], lengths[shard] = read, len(read)
                starts[shard] = len(prompt) - 1
                filled = self.pool.pages_of(sample)[: pages_of(len(sample.tokens))]
                pages[shard, : len(filled)] = filled
                where[shard] = rows.pop((shard, sample.prompt), -1)
            arguments = (*self.on, self.params, tokens, lengths)
            with self.ledger.running(decode.prefill_prompts, *arguments):
                again, _ = decode.prefill_prompts(*arguments)
            self.ledger.put(CACHE, (self.cache, self.prompt_cache, again))
            caches = self.cache, self.prompt_cache, again
            self.cache, self.prompt_cache = decode.insert_recomputed(
                *self.on, *caches, where, starts, pages
            )
            self.ledger.put(CACHE, (self.cache, self.prompt_cache))
            self.stats.recomputed += int(lengths[pages[:, 0] >= 0].sum())
            preempted = others

    def _launch(self) -> int:
        """Runs one launch, appends its tokens to their samples, and frees the slots of finished
        ones. Returns the number of tokens."""
        started, programs = time.perf_counter(), compilations().programs
        engine, slots, rows, pool = self.engine, self.slots, self.rows, self.pool
        # The caches get as large as this launch needs them. Once no sample is waiting, nor will be,
        # slots are given up, since a decode step computes free ones too; and with them rows of
        # prompts and pages.
        kept = None
        ending = not slots.queue and not self.episodes
        if ending and (pool is None or slots.most_pages() <= pool.pages):
            kept = slots.shrink(engine.fewer_slots)
        if kept is not None:
            kept_rows = rows.shrink(slots.prompts, slots.per_shard)
            self._resize(self.prompt_cache, len(kept_rows), self.width, kept_rows)
        left = slots.table[:, decode.LIMIT] - slots.table[:, decode.COUNT]
        ahead = np.minimum(left, engine.launch_tokens)
        reach = int((slots.table[:, decode.COUNT] + ahead).max())
        length, pages = engine.cache_length(reach, len(slots.table)), None
        if pool is None:
            self._resize(self.cache, len(slots.table), length, kept)
        else:
            fewer = engine.pages_for_slots(slots.per_shard)
            kept_pages = pool.shrink(fewer) if kept is not None and fewer < pool.pages else None
            self._resize(self.cache, pool.pages * engine.row_shards, PAGE, kept_pages)
            pages = pool.table(slots.seated, slots.per_shard, pages_of(length))
        seats = rows.table(slots.prompts, self.prompt_keys)

        # The launch ends early once so many slots are free that to fill them again pays.
        total, waiting = len(slots.table), len(slots.queue)
        exit_free = min(engine.min_free, waiting) if waiting else total
        if self.episodes:  # also for slots whose turn ends
            exit_free = engine.min_free
        if self.episodes or pool is not None:  # some decode nothing from the start
            exit_free = min(int((left <= 0).sum()) + exit_free, total)
        prompts, exits = (self.prompt_cache, seats), np.int32(exit_free)
        arguments = *self.on, self.params, self.cache, slots.table.copy(), exits
        static = {"n_tokens": engine.launch_tokens, "check_every": engine.check_every}
        static |= {"record": self.record}
        more = self.knobs, prompts, pages
        with self.ledger.running(engine.launch, *arguments, *more, **static):
            self.cache, drawn, routed = engine.launch(*arguments, *more, **static)
        self._find_ends()  # searches the tokens of the launch before while this one runs
        out = np.asarray(drawn)
        self._check_finite(out)
        experts = None if routed is None else np.asarray(routed)
        self.stats.launches += 1
        self.stats.decode_steps += int((out[:, 0, 0] != decode.NOT_RUN).sum())
        seconds = time.perf_counter() - started
        self.stats.decode_seconds += seconds
        if compilations().programs == programs:
            self.stats.steady_tokens += int((out[:, :, 0] >= 0).sum())
            self.stats.steady_seconds += seconds
        # An EOS or the limit ends a completion, which frees its slot, or the turn of an episode,
        # whose slot then decodes nothing.
        for sample, before, count, over in slots.append(out, self.sampling.eos_ids):
            if experts is not None:
                sample.experts.append(experts[:count, sample.slot])
            if over or self.sampling.stop:
                self.unsearched.append((sample, before))
            if over and sample.request.environment is None:
                ended = sample.tokens[-1] in self.sampling.eos_ids
                sample.finish_reason = "stop" if ended else "length"
                self._free(sample)
        if self.episodes or (self.sampling.stop and not engine.search_beside):
            self._find_ends()
        return int((out[:, :, 0] >= 0).sum())

    def _check_finite(self, drawn: np.ndarray) -> None:
        """Raises NotFinite where a token was drawn of logits that hold NaN or infinity, by which
        its log-prob is NaN."""
        wrong = np.isnan(drawn.view(np.float32)[:, :, 1]) & (drawn[:, :, 0] >= 0)
        wrong &= self.slots.prompts >= 0
        if not wrong.any():
            return
        step, slot = np.argwhere(wrong)[0]
        sample = self.slots.seated[slot]
        tokens = [*sample.request.prompt, *sample.tokens, *drawn[:step, slot, 0]]
        after = len(tokens) - len(sample.request.prompt)
        what = f"the logits of token {after} behind prompt {sample.prompt}"
        raise not_finite(what, self.params, self.engine.config, tokens, self.engine.mesh)

    def _resize(self, cache: Cache, rows: int, length: int, kept: np.ndarray | None = None) -> None:
        """Gives one of the caches, in place, this many rows and positions. A decode step reads all
        positions of a row, since a slice of them would be a copy at each step.

        Args:
            kept: the rows that stay, as in `decode.resize`; None: all, and new ones behind them.
        """
        if not cache:
            cache += decode.new_cache(*self.on, rows, length, self.params["norm"]["scale"].dtype)
            self.ledger.put(CACHE, (self.cache, self.prompt_cache))
        before, shards = keys_of(cache).shape, self.engine.row_shards
        if kept is None and before[decode.BATCH] < rows:
            kept = np.tile(np.arange(rows // shards, dtype=np.int32), shards)  # clipped: any row
        if before[decode.POSITIONS] != length or kept is not None:
            for i, layer in enumerate(cache):  # one at a time, so that only one exists twice
                if not layer or (isinstance(layer, Recurrent) and kept is None):
                    continue  # it has no positions
                arguments = (*self.on, [layer], length, kept)
                with self.ledger.running(decode.resize, *arguments):
                    cache[i : i + 1] = decode.resize(*arguments)
            self.ledger.put(CACHE, (self.cache, self.prompt_cache))

    def _is_over(self, sample: PartialCompletion) -> bool:
        """Returns whether its last token ends its turn. An answer may end in an EOS, which ends
        none."""
        begun = len(sample.tokens) > sample.turn_start
        ended = begun and sample.tokens[-1] in self.sampling.eos_ids
        return ended or len(sample.tokens) == sample.turn_end

    def _find_ends(self) -> None:
        """Searches the collected tokens for stop strings, which end a turn, and decodes the text of
        turns that have ended. A launch that runs meanwhile still decodes the slots that this frees;
        those tokens are dropped."""
        tokenizer, stop = self.engine.tokenizer, self.sampling.stop
        for sample, before in self.unsearched:
            start = sample.turn_start
            last = int(sample.tokens[-1])
            eos = last if last in self.sampling.eos_ids else None
            turn = sample.tokens[start : None if eos is None else -1]
            stopped = find_stop(tokenizer, turn, before - start, stop)
            if stopped is not None:
                end, words = stopped
                sample.cut(start + end)
                eos = None
            elif self._is_over(sample):
                words = decode_text(tokenizer, turn)
            else:
                continue
            read = sample.tokens[:start] if start else sample.request.prompt
            sample.text, sample.opening = words, opening_of(tokenizer, read)
            environment = sample.request.environment
            if environment is not None:
                kept = sample.tokens[start : None if eos is None else -1]
                sample.turns.append(Turn("assistant", len(sample.tokens) - start, words))
                self.stats.turns += 1
                if stopped is None and eos is None:  # a turn that is cut ends the episode
                    sample.finish_reason = "length"
                    self._free(sample)
                    continue
                row = self.slots.table[sample.slot]
                row[decode.LIMIT] = row[decode.COUNT]
                # With special tokens: marks of calls and thoughts may be some.
                written = until_stop(decode_text(tokenizer, kept, special=True), stop)
                sample.reply = environment.answer(
                    sample.opening + written, eos=eos, length=len(sample.tokens)
                )
            elif stopped is not None:
                sample.finish_reason = "stop"
                self._free(sample)
        self.unsearched = []

    def _resume(self) -> None:
        """Continues the episodes whose environments have answered."""
        started = time.perf_counter()
        answered: list[tuple[PartialCompletion, int]] = []  # and the number of tokens before
        for sample in list(self.slots.seated.values()):
            if sample.reply is None or not sample.reply.done():
                continue
            before = len(sample.tokens)
            if sample.receive(sample.reply.result()):
                answered.append((sample, before))
            else:
                self._free(sample)
        if not answered:
            return
        # Prefill the answers into the slots, in parts. The last token before an answer was sampled
        # and not yet read; the last one of the answer is left to the next launch.
        least, most = ANSWER_TOKENS
        parts: dict[tuple[int, int], list[tuple[PartialCompletion, int, list[int]]]] = {}
        for sample, before in answered:
            if sample.was_cut and self.engine.config.n_recurrent:
                before = 0  # a state has no way back but to the end of the prompt
            sample.was_cut = False
            read = [sample.request.prompt[-1], *sample.tokens][before:-1]
            for number, start in enumerate(range(0, len(read), most)):
                tokens = read[start : start + most]
                width = bucket(len(tokens), smallest=least, most=most)
                parts.setdefault((number, width), []).append((sample, before + start, tokens))
        # A sample's parts follow one another.
        for (_, width), unread in sorted(parts.items(), key=lambda item: item[0]):
            while unread:
                unread = self._extend_by(width, unread)
        # Decoding continues after the last token, or stops if the turn is over.
        for sample, _ in answered:
            count, start = len(sample.tokens), self.prompt_keys[sample.prompt]
            end = count if self._is_over(sample) else sample.turn_end
            self.slots.table[sample.slot, :4] = sample.tokens[-1], start + count, count, end
        jax.block_until_ready(self.cache)
        self.stats.prefill_seconds += time.perf_counter() - started

    def _extend_by(
        self, width: int, parts: list[tuple[PartialCompletion, int, list[int]]]
    ) -> list[tuple[PartialCompletion, int, list[int]]]:
        """Prefills parts of at most `width` tokens, as many as fit; returns the others.

        Args:
            parts: each with the position of its first token in the slot, and its tokens.
        """
        shards, per_shard = self.engine.row_shards, self.slots.per_shard
        tokens = np.zeros((shards, ANSWER_ROWS, width), np.int32)
        positions, starts, lengths, rows = np.zeros((4, shards, ANSWER_ROWS), np.int32)
        slots = np.full((shards, ANSWER_ROWS), per_shard, np.int32)
        used, left = [0] * shards, []
        for part in parts:
            sample, position, ids = part
            assert sample.slot is not None
            shard, slot = divmod(sample.slot, per_shard)
            if used[shard] == ANSWER_ROWS:
                left.append(part)
                continue
            at = shard, used[shard]
            tokens[at][: len(ids)], lengths[at] = ids, len(ids)
            starts[at] = self.prompt_keys[sample.prompt]
            positions[at] = starts[at] + position
            slots[at], rows[at] = slot, self.rows.row(sample.slot, sample.prompt)
            used[shard] += 1
        first, read, *arrays = (x.reshape(-1) for x in (positions, lengths, starts, slots, rows))
        further = SlotTokens(tokens.reshape(-1, width), first, read)
        arguments = (*self.on, self.params, self.cache, self.prompt_cache, further, *arrays)
        with self.ledger.running(decode.extend_slots, *arguments):
            self.cache = decode.extend_slots(*arguments)
        return left

    def _free(self, sample: PartialCompletion) -> None:
        if sample.slot is not None:
            self.slots.free(sample)
            if sample.request.environment is not None:
                sample.request.environment.end()


def prefill_batch(slots: int, prompts: int, n: int, width: int) -> int:
    """Returns how many prompts of `width` tokens each data shard has in one prefill, at most:
    enough to fill its slots with the n samples of each, within `PREFILL_TOKENS`."""
    wanted = min(-(-slots // n), prompts)
    return min(bucket(wanted), bucket(max(1, PREFILL_TOKENS[1] // width)))
