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

The engine is open: requests come and go, and weights change, between two launches. What is in
flight then keeps its tokens, and its keys and values are computed again with the new weights.

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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress

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
)
from jaxrl.sampling.sampler import SamplingArrays, SamplingParams, sampling_arrays
from jaxrl.sampling.slots import PagePool, PromptRows, Slots, pages_of, pool_pages
from jaxrl.sharding.axes import row_shards
from jaxrl.sharding.ledger import Ledger
from jaxrl.sharding.reshard import put
from jaxrl.types import Completion, FinishReason, Turn

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
AGAIN_ROWS = 16
"""The same of completions that new weights read again: all that are in flight."""
CACHE = "KV cache"
"""Name of the caches in the ledger, the account of device memory (`sharding.ledger`)."""
LOOK_S = 0.2
"""Seconds between two checks of `abort` while all slots wait for environments."""


ChooseAnswers = Callable[[Sequence[bool], bool], Sequence[bool] | None]
"""(which answers are there, of those that slots wait for, in the order of their requests; whether
other slots decode) -> which of them are taken. None: nothing is done yet, since one that is to be
taken is not there."""


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
    recompute_seconds: float = 0.0
    """Time for that, but for prompts that are prefilled with those of new samples."""
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
        swaps: tuple[int, int] | None = None,
        answers: ChooseAnswers = lambda there, working: there,
        cache_tokens: int | None = None,
        tokenizer: Tokenizer | None = None,
        ledger: Ledger | None = None,
    ):
        """Fixes the shapes. `step` allocates all device memory, `idle` frees it.

        Args:
            mesh: with the axes of a role, or None for one device.
            slots: completions decoded at once; rounded up to a multiple of the devices.
            max_prompt_tokens, max_new_tokens: their sum limits the length of the KV cache, which
                grows as far as the sequences need.
            launch_tokens: most decode steps in one launch.
            episodes: completions may be episodes (`SampleRequest.environment`).
            swaps: `swap` may come while completions are in flight, of so many prompts with so many
                samples each, whichever are left: shapes are those of all. None: it may not.
            answers: chooses those of environments that a step takes.
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
        self.extended_rows = (
            min(AGAIN_ROWS, self.slots // self.row_shards) if swaps else ANSWER_ROWS
        )
        """Slots of each data shard that `decode.extend_slots` extends at once."""
        self.min_free = max(1, self.slots // 8)
        """Number of free slots at which a launch ends early while samples wait."""
        target = target_on(mesh)
        self.target, self.width_multiple = target, target.width_multiple
        self.episodes, self.swaps, self.answers = episodes, swaps, answers
        # The padding of a part that `decode.extend_slots` reads lies there: an answer's, which may
        # begin anywhere, or that of a completion which is read again from its beginning.
        beyond = ANSWER_TOKENS[1] if episodes else 0
        longest = max(
            [max_new_tokens, *(end for _, end in extension_parts(max_new_tokens) if swaps)]
        )
        self.length = round_up(longest + beyond, target.width_multiple)
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
        self.params: Params | None = None
        self.version = 0
        self.waited = False
        """Whether the last step did nothing but wait for environments."""
        self._decoding: _Decoding | None = None
        self._waiting: deque[PartialCompletion] = deque()
        """Requests that are not in `_decoding` yet."""
        self._requests, self._prompts = 0, -1
        """How many requests there were, and the number of the last one's prompt."""
        self._last: SampleRequest | None = None

    @property
    def in_flight(self) -> int:
        """Returns how many requests have no completion yet."""
        return len(self._waiting) + (0 if self._decoding is None else self._decoding.in_flight)

    def submit(self, request: SampleRequest, begun: Completion | None = None) -> Future[Completion]:
        """Takes a request; returns at once. Requests get slots in the order in which they come, but
        those of another `SampleRequest.way` only when all before them have ended.

        Args:
            begun: of `so_far`, from which it goes on. The environment of an episode was told its
                turns again (`partial_completion.tell_again`), but for one that it has not answered.

        Raises:
            UserError: the prompt or its sampling does not fit the engine.
        """
        last, self._last = self._last, request
        shared = last is not None and last.key.prompt == request.key.prompt
        if last is None or not (shared and last.prompt is request.prompt):
            self._prompts += 1
        self._check(request)
        sample = PartialCompletion(self._requests, self._prompts, request)
        self._requests += 1
        if begun is not None and begun.finish_reason != "unfinished":
            sample.future.set_result(begun)
            if request.environment is not None:
                request.environment.end()
            return sample.future
        if begun is not None:
            sample.begin_with(begun)
            if sample.turns and sample.turns[-1].role == "assistant":
                sample.reply = sample.ask(self.tokenizer, len(sample.turns) - 1)
        self._waiting.append(sample)
        return sample.future

    def step(self) -> int:
        """Runs one launch, or waits a moment for environments where all completions do. Returns the
        number of tokens decoded.

        Raises:
            NotFinite: of logits.
            UserError, RunError: of an environment. The requests in flight are lost: call `idle`.
        """
        if self._decoding is None:
            if not self._waiting:
                return 0
            self._decoding = _Decoding(self, self._next_waiting())
        elif self._waiting and self._decoding.accepts(self._waiting[0]):
            self._decoding.admit(self._next_waiting())
        tokens = self._decoding.step()
        if not self._decoding.in_flight:
            self._decoding = None
            self.ledger.drop(CACHE)
        return tokens

    def swap(self, params: Params, version: int = 0) -> None:
        """Samples with other weights from the next launch on; `params` are on the mesh, unstacked.

        What is in flight keeps its tokens, and its keys and values are computed again with these
        weights: of each token, its log-prob and the keys and values before it are of one version,
        that of `Completion.versions`.

        Raises:
            UserError: the engine has pages, which the model cannot be sampled with.
        """
        if self.pages is not None:
            dtype = np.dtype(params["norm"]["scale"].dtype).name
            why = why_not_paged(self.config, self.target, dtype, episodes=self.episodes)
            if why is not None:
                raise UserError(
                    f"rollout.cache_tokens needs completions in pages, and here {why}; set it to"
                    " null"
                )
        self.params, self.version = params, version
        if self._decoding is not None:
            self._decoding.read_again()

    def park(self) -> None:
        """Gives back the memory of the caches. What is in flight is read again when it goes on, as
        if it were submitted then: what is sampled next depends on nothing from before."""
        if self._decoding is not None:
            self._decoding.read_again()
            self._decoding.paused.close()
            self._waiting.extendleft(reversed(self._decoding.slots.queue))
            self._decoding = None
        self.ledger.drop(CACHE)

    def so_far(self, futures: Sequence[Future[Completion]]) -> list[Completion]:
        """Returns the completions of requests; of those in flight, what there is of them, whose
        `finish_reason` is `unfinished`."""
        known = list(self._waiting)
        if self._decoding is not None:
            self._decoding.find_ends()
            known += [*self._decoding.slots.queue, *self._decoding.slots.seated.values()]
        left = {id(sample.future): sample for sample in known}
        return [
            left[id(future)].completion() if id(future) in left else future.result(timeout=0)
            for future in futures
        ]

    def cancel(self, future: Future[Completion]) -> None:
        """Drops the request that the future is of: its slot is free from the next launch on, and
        its episode ends. Nothing happens where it has a completion already."""
        for sample in [x for x in self._waiting if x.future is future]:
            self._waiting.remove(sample)
        if self._decoding is not None:
            self._decoding.drop(future)
        future.cancel()

    def idle(self) -> None:
        """Gives back the memory of the device, and drops what is in flight: its episodes end, and
        its futures are cancelled."""
        decoding, self._decoding = self._decoding, None
        dropped = list(self._waiting)
        self._waiting.clear()
        if decoding is not None:
            dropped += decoding.end()
        for sample in dropped:
            sample.future.cancel()
        self.params = self._last = None
        self.ledger.drop(CACHE)

    def generate(
        self,
        params: Params,
        requests: Sequence[SampleRequest],
        *,
        version: int = 0,
        abort: Callable[[], bool] | None = None,
        on_tokens: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Samples the completion of each request; the first requests get slots first.

        Args:
            params: on the mesh, unstacked.
            version: of these, for `Completion.versions`.
            abort: called between launches; if it returns True, `Aborted` is raised.
            on_tokens: called after each launch with the number of tokens decoded and of completions
                finished so far.

        Raises:
            UserError: a prompt or its sampling does not fit the engine.
            Aborted: `abort` returned True.
        """
        started = time.perf_counter()
        self.stats = EngineStats(slots=self.slots)
        tokens, total = 0, len(requests)
        try:
            self.swap(params, version)
            futures = [self.submit(request) for request in requests]
            while left := self.in_flight:
                if abort is not None and abort():
                    raise Aborted(
                        f"generation aborted: {total - left} of {total} completions were done"
                    )
                tokens += self.step()
                if on_tokens is not None:
                    on_tokens(tokens, total - self.in_flight)
        finally:
            self.idle()
        self.ledger.prefetch_next()
        self.stats.seconds = time.perf_counter() - started
        return [future.result() for future in futures]

    def _next_waiting(self) -> list[PartialCompletion]:
        """Takes the requests that wait, up to the first one of another way than the first."""
        way, taken = self._waiting[0].request.way, list[PartialCompletion]()
        while self._waiting and self._waiting[0].request.way == way:
            taken.append(self._waiting.popleft())
        return taken

    def _check(self, request: SampleRequest) -> None:
        """Raises UserError where a request does not fit the engine."""
        sampling, prompt = request.sampling, request.prompt
        assert 0 < request.max_tokens <= sampling.max_new_tokens <= self.max_new_tokens
        assert request.environment is None or self.episodes
        if sampling.stop and self.tokenizer is None:
            raise UserError(f"stop={sampling.stop!r} needs a tokenizer; end on eos_ids instead")
        if not 0 < len(prompt) <= self.max_prompt_tokens:
            raise UserError(
                f"prompt {request.key.prompt} has {len(prompt)} tokens; allowed: 1 to "
                f"max_prompt_tokens={self.max_prompt_tokens}; shorten it or raise the limit"
            )
        if min(prompt) < 0 or max(prompt) >= self.config.vocab_size:
            raise UserError(
                f"prompt {request.key.prompt} has tokens from {min(prompt)} to {max(prompt)}; "
                f"the model's are 0 to {self.config.vocab_size - 1}: is it the right tokenizer?"
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


class _Decoding:
    """What there is while requests of one `SampleRequest.way` are in flight: their queue, the
    slots, and the caches."""

    def __init__(self, engine: Engine, samples: list[PartialCompletion]):
        """Makes room for these samples, from which the sizes of arrays follow."""
        self.engine, self.ledger = engine, engine.ledger
        mesh, shards = engine.mesh, engine.row_shards
        self.way = samples[0].request.way
        self.sampling, self.record = self.way
        self.knobs: SamplingArrays = sampling_arrays(self.sampling)
        if mesh is not None:
            self.knobs = put(self.knobs, NamedSharding(mesh, PartitionSpec()))
        self.on = engine.config, mesh
        self.prompt_cache: Cache = []
        """The cache of the prompts, in rows that slots share. It has the keys of each prompt but
        that of its last token, which slots read first, so that the next one is drawn by the same
        program as all others."""
        self.cache: Cache = []
        """The cache of what follows prompts: a row for each slot, or for each page of a pool."""
        self.pool = None if engine.pages is None else PagePool(shards, engine.pages)
        self.slots = Slots(engine.slots, shards, engine.launch_tokens, self.pool)
        n, prompts = self._group_sizes(samples)
        # What comes at any time finds its rows there, and so the shapes of programs.
        per_shard, fixed = self.slots.per_shard, engine.episodes or engine.swaps is not None
        self.rows = PromptRows(shards, per_shard, n, prompts, fixed=fixed)
        self.width = self.prefill_batch = 0
        self.episodes = False
        self.prompt_experts: dict[int, np.ndarray] = {}
        """[len(prompt) - 1, L, k] of the prompts in rows, as they were read, where experts are
        recorded."""
        self.unsearched: list[tuple[PartialCompletion, int]] = []
        """Samples with tokens not yet searched for stop strings, each with its number of tokens
        before these."""
        self.paused = ExitStack()
        """Open while all slots wait for environments."""
        self.pauses = False
        self.admit(samples)

    @property
    def params(self) -> Params:
        """Returns those of the engine. Nothing else holds them: dropped there, they are freed."""
        assert self.engine.params is not None, "`swap` comes first"
        return self.engine.params

    @property
    def in_flight(self) -> int:
        return len(self.slots.queue) + len(self.slots.seated)

    @property
    def _decodes(self) -> bool:
        """Returns whether any slot has tokens to decode."""
        return bool((self.slots.table[:, decode.COUNT] < self.slots.table[:, decode.LIMIT]).any())

    def accepts(self, sample: PartialCompletion) -> bool:
        """Returns whether a request may join those in flight: none of the slots were given up."""
        return sample.request.way == self.way and len(self.slots.table) == self.engine.slots

    def _group_sizes(self, samples: Sequence[PartialCompletion]) -> tuple[int, int]:
        """Returns the most samples that a prompt has, and the number of prompts."""
        counts = Counter(sample.prompt for sample in samples)
        prompts, most = self.engine.swaps or (0, 0)
        return max(most, *counts.values()), max(prompts, len(counts))

    def admit(self, samples: list[PartialCompletion]) -> None:
        """Queues further samples, and makes room for larger ones."""
        self.slots.queue.extend(samples)
        n, prompts = self._group_sizes([*self.slots.seated.values(), *self.slots.queue])
        self.rows.expect(n, prompts)
        longest = max(len(sample.request.prompt) for sample in samples)
        self.width = max(self.width, self.engine.prompt_width(longest))
        batch = prefill_batch(self.slots.per_shard, prompts, n, self.width)
        self.prefill_batch = max(self.prefill_batch, batch)
        self.episodes |= any(sample.request.environment for sample in samples)

    def read_again(self) -> None:
        """Has the weights of the engine compute all keys and values again."""
        self.find_ends()  # what has ended has its version
        for sample in list(self.slots.seated.values()):
            self.slots.send_back(sample)
        self.rows.forget()

    def drop(self, future: Future[Completion]) -> None:
        """Drops a sample, as `Engine.cancel`."""
        queue, seated = self.slots.queue, self.slots.seated
        for sample in [x for x in (*queue, *seated.values()) if x.future is future]:
            if sample.slot is None:
                queue.remove(sample)
            self._close(sample)
        self.unsearched = [x for x in self.unsearched if x[0].future is not future]

    def end(self) -> list[PartialCompletion]:
        """Ends the episodes in flight, and returns the samples that have no completion."""
        self.paused.close()
        dropped = [*self.slots.queue, *self.slots.seated.values()]
        for sample in dropped:
            self._close(sample)
        return dropped

    def step(self) -> int:
        """As `Engine.step`."""
        slots, tokens = self.slots, 0
        if self.pool is not None:
            if slots.is_short_of_pages():
                # A stop string may have ended a sample, whose pages are then free.
                self.find_ends()
            self.engine.stats.preemptions += slots.allocate_pages()
        self._refill()
        taken = self._resume() if self.episodes else 0
        if not slots.queue:
            self.ledger.prefetch_next()
        works = taken is not None and self._decodes
        self.engine.waited = not (works or taken)
        if works:
            self.paused.close()
            self.pauses = False
            tokens = self._launch()
        elif not taken:  # until an environment has answered, or it is time to look for other work
            started = time.perf_counter()
            replies = [x.reply for x in slots.seated.values() if x.reply is not None]
            if replies and not self.pauses:
                what = f"the environment's answers to {len(replies)} episodes"
                self.paused.enter_context(waiting(what))
                self.pauses = True
            if missing := [reply for reply in replies if not reply.done()]:
                wait(missing, LOOK_S, FIRST_COMPLETED)
            self.engine.stats.waiting_seconds += time.perf_counter() - started
        if not self.in_flight:
            self.find_ends()
            self.paused.close()
        return tokens

    def _refill(self) -> None:
        """Puts waiting samples into free slots, and their prompts into rows of the same shards."""
        started = time.perf_counter()
        slots, shards = self.slots, self.engine.row_shards
        fresh: list[PartialCompletion] = []
        preempted: list[PartialCompletion] = []
        while (slot := slots.vacant_slot()) is not None:
            sample = slots.seat_next(slot)
            sample.continue_with(self.engine.version)
            (preempted if len(sample.tokens) else fresh).append(sample)
        if not fresh and not preempted:
            return
        texts = {sample.prompt: sample.request.prompt for sample in (*fresh, *preempted)}
        unfilled = self.rows.admit(slots.prompts)
        count = self.rows.count
        self._resize(self.prompt_cache, count * shards, self.width)
        again: set[tuple[int, int]] = set()
        if self.pool is not None:  # what a preempted sample reads again begins with its prompt
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
            longest = max(len(texts[prompt]) for part in chosen for _, prompt in part)
            width = self.engine.prompt_width(longest)
            tokens = np.zeros((shards, batch, width), np.int32)
            lengths = np.ones((shards, batch), np.int32)
            source = np.full((shards, count), -1, np.int32)
            for shard, part in enumerate(chosen):
                for i, (row, prompt) in enumerate(part):
                    read = texts[prompt]
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
                        self.prompt_experts[prompt] = by_prompt[shard, i, : len(texts[prompt]) - 1]
            self.engine.stats.prefill_rows += sum(map(len, chosen))
        again_from = time.perf_counter()
        if preempted and self.pool is not None:
            self._recompute(preempted, rows)
        elif preempted:
            self._extend([(sample, 0) for sample in preempted])
            known = {sample.prompt for sample in preempted} & set(unfilled.values())
            self.engine.stats.recomputed += sum(len(texts[prompt]) for prompt in known)
            self.engine.stats.recomputed += sum(len(sample.tokens) for sample in preempted)
        if preempted:
            jax.block_until_ready(self.cache)
            self.engine.stats.recompute_seconds += time.perf_counter() - again_from
        if self.record:
            for sample in fresh:
                sample.experts = [self.prompt_experts[sample.prompt]]
            # Those of the prompts whose keys and values a sample may find in their rows.
            kept = set(slots.prompts.tolist())
            self.prompt_experts = {n: x for n, x in self.prompt_experts.items() if n in kept}
        jax.block_until_ready(self.prompt_cache)
        self.engine.stats.prefill_seconds += time.perf_counter() - started

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
            placed, others = dict[int, PartialCompletion](), list[PartialCompletion]()
            for sample in preempted:
                assert sample.slot is not None
                shard, prompt = sample.slot // self.slots.per_shard, sample.request.prompt
                if shard in placed:
                    others.append(sample)
                    continue
                placed[shard] = sample
                read = np.concatenate([prompt, sample.tokens[:-1]])
                tokens[shard, : len(read)], lengths[shard] = read, len(read)
                starts[shard] = len(prompt) - 1
                filled = self.pool.pages_of(sample)[: pages_of(len(sample.tokens))]
                pages[shard, : len(filled)] = filled
                where[shard] = rows.pop((shard, sample.prompt), -1)
            arguments = (*self.on, self.params, tokens, lengths)
            with self.ledger.running(decode.prefill_prompts, *arguments, record=self.record):
                again, experts = decode.prefill_prompts(*arguments, record=self.record)
            self.ledger.put(CACHE, (self.cache, self.prompt_cache, again))
            caches = self.cache, self.prompt_cache, again
            self.cache, self.prompt_cache = decode.insert_recomputed(
                *self.on, *caches, where, starts, pages
            )
            self.ledger.put(CACHE, (self.cache, self.prompt_cache))
            if experts is not None:
                of_rows = np.asarray(experts)
                for shard, sample in placed.items():
                    of_prompt = of_rows[shard, : len(sample.request.prompt) - 1].copy()
                    self.prompt_experts[sample.prompt] = of_prompt
            self.engine.stats.recomputed += int(lengths[list(placed)].sum())
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
        ending = not slots.queue and not self.episodes and not engine.swaps
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
        seats = rows.table(slots.prompts, slots.starts)

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
        self.find_ends()  # searches the tokens of the launch before while this one runs
        out = np.asarray(drawn)
        self._check_finite(out)
        experts = None if routed is None else np.asarray(routed)
        self.engine.stats.launches += 1
        self.engine.stats.decode_steps += int((out[:, 0, 0] != decode.NOT_RUN).sum())
        seconds = time.perf_counter() - started
        self.engine.stats.decode_seconds += seconds
        if compilations().programs == programs:
            self.engine.stats.steady_tokens += int((out[:, :, 0] >= 0).sum())
            self.engine.stats.steady_seconds += seconds
        # An EOS or the limit ends a completion, which frees its slot, or the turn of an episode,
        # whose slot then decodes nothing.
        for sample, before, count, over in slots.append(out, self.sampling.eos_ids):
            if experts is not None:
                sample.experts.append(experts[:count, sample.slot])
            if over or self.sampling.stop:
                self.unsearched.append((sample, before))
            if over and sample.request.environment is None:
                slots.free(sample)
        if self.episodes or (self.sampling.stop and not engine.search_beside):
            self.find_ends()
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
        what = f"the logits of token {after} behind prompt {sample.request.key.prompt}"
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

    def find_ends(self) -> None:
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
                sample.turns.append(Turn("assistant", len(sample.tokens) - start, words))
                self.engine.stats.turns += 1
                if stopped is None and eos is None:  # a turn that is cut ends the episode
                    self._finish(sample, "length")
                    continue
                row = self.slots.table[sample.slot]
                row[decode.LIMIT] = row[decode.COUNT]
                sample.reply = sample.ask(tokenizer, len(sample.turns) - 1)
            elif stopped is not None:
                self._finish(sample, "stop")
            else:
                self._finish(sample, "length" if eos is None else "stop")
        self.unsearched = []

    def _resume(self) -> int | None:
        """Continues the episodes whose environments have answered. Returns how many answers were
        taken; None: one that is to be taken is not there yet."""
        started = time.perf_counter()
        asked = [(x, x.reply) for x in self.slots.seated.values() if x.reply is not None]
        asked.sort(key=lambda pair: pair[0].index)
        chosen = self.engine.answers([reply.done() for _, reply in asked], self._decodes)
        if chosen is None:
            return None
        answered: list[tuple[PartialCompletion, int]] = []  # and the number of tokens before
        for sample, reply in compress(asked, chosen):
            before = len(sample.tokens)
            if sample.receive(reply.result()):
                answered.append((sample, before))
            else:
                self._finish(sample)
        if not answered:
            return sum(chosen)
        self._extend(answered)
        # Decoding continues after the last token, or stops if the turn is over.
        for sample, _ in answered:
            count, start = len(sample.tokens), len(sample.request.prompt) - 1
            end = count if self._is_over(sample) else sample.turn_end
            self.slots.table[sample.slot, :4] = sample.tokens[-1], start + count, count, end
        jax.block_until_ready(self.cache)
        self.engine.stats.prefill_seconds += time.perf_counter() - started
        return sum(chosen)

    def _extend(self, samples: list[tuple[PartialCompletion, int]]) -> None:
        """Prefills tokens of samples into their slots, in parts.

        Args:
            samples: each with the number of tokens before these. The last one of them was sampled
                and not yet read; the last one of all is left to the next launch.
        """
        parts: dict[tuple[int, int], list[tuple[PartialCompletion, int, list[int]]]] = {}
        reach = 0
        for sample, before in samples:
            if sample.was_cut and self.engine.config.n_recurrent:
                before = 0  # a state has no way back but to the end of the prompt
            sample.was_cut = False
            read = [sample.request.prompt[-1], *sample.tokens][before:-1]
            for number, (start, end) in enumerate(extension_parts(len(read))):
                part = sample, before + start, read[start:end]
                parts.setdefault((number, end - start), []).append(part)
                reach = max(reach, before + end)
        if self.pool is None:
            slots = len(self.slots.table)
            held = keys_of(self.cache).shape[decode.POSITIONS] if self.cache else 0
            if held < reach:
                self._resize(self.cache, slots, self.engine.cache_length(reach, slots))
        # A sample's parts follow one another.
        for (_, width), unread in sorted(parts.items(), key=lambda item: item[0]):
            while unread:
                unread = self._extend_by(width, unread)

    def _extend_by(
        self, width: int, parts: list[tuple[PartialCompletion, int, list[int]]]
    ) -> list[tuple[PartialCompletion, int, list[int]]]:
        """Prefills parts of at most `width` tokens, as many as fit; returns the others.

        Args:
            parts: each with the position of its first token in the slot, and its tokens.
        """
        shards, per_shard = self.engine.row_shards, self.slots.per_shard
        most = self.engine.extended_rows
        tokens = np.zeros((shards, most, width), np.int32)
        positions, starts, lengths, rows = np.zeros((4, shards, most), np.int32)
        slots = np.full((shards, most), per_shard, np.int32)
        used, left = [0] * shards, []
        for part in parts:
            sample, position, ids = part
            assert sample.slot is not None
            shard, slot = divmod(sample.slot, per_shard)
            if used[shard] == most:
                left.append(part)
                continue
            at = shard, used[shard]
            tokens[at][: len(ids)], lengths[at] = ids, len(ids)
            starts[at] = len(sample.request.prompt) - 1
            positions[at] = starts[at] + position
            slots[at], rows[at] = slot, self.rows.row(sample.slot, sample.prompt)
            used[shard] += 1
        first, read, *arrays = (x.reshape(-1) for x in (positions, lengths, starts, slots, rows))
        further = SlotTokens(tokens.reshape(-1, width), first, read)
        arguments = (*self.on, self.params, self.cache, self.prompt_cache, further, *arrays)
        with self.ledger.running(decode.extend_slots, *arguments):
            self.cache = decode.extend_slots(*arguments)
        return left

    def _finish(self, sample: PartialCompletion, reason: FinishReason | None = None) -> None:
        """Completes a sample; None: for the reason that it has."""
        sample.finish_reason = reason or sample.finish_reason
        self._close(sample)
        done = sample.completion()
        self.engine.stats.generated_tokens += int(done.sampled.sum())
        sample.future.set_result(done)

    def _close(self, sample: PartialCompletion) -> None:
        """Frees its slot, and ends its episode where that has begun."""
        if sample.slot is not None:
            self.slots.free(sample)
        if sample.versions and sample.request.environment is not None:
            sample.request.environment.end()


def extension_parts(tokens: int) -> list[tuple[int, int]]:
    """Returns where the parts begin and end, with their padding, in which so many tokens are
    prefilled into slots."""
    least, most = ANSWER_TOKENS
    starts = range(0, tokens, most)
    return [(x, x + bucket(min(tokens - x, most), smallest=least, most=most)) for x in starts]


def prefill_batch(slots: int, prompts: int, n: int, width: int) -> int:
    """Returns how many prompts of `width` tokens each data shard has in one prefill, at most:
    enough to fill its slots with the n samples of each, within `PREFILL_TOKENS`."""
    wanted = min(-(-slots // n), prompts)
    return min(bucket(wanted), bucket(max(1, PREFILL_TOKENS[1] // width)))
