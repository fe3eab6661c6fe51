"""Continuous batching, the host side: assigns samples to slots, launches decode steps and collects
their tokens. `sampling.decode` has the device side.

A slot holds one sequence that is being decoded. A launch runs up to `launch_tokens` decode steps
over all slots, and returns early once enough slots are free. The host then reads the tokens,
searches for stop strings and fills the free slots with waiting samples. Once no sample is waiting,
it shrinks the cache to fewer slots. Each prompt is prefilled once, in batches just large enough to
fill the slots. Its keys and values are copied into a row that the slots of its n samples share
(`sampling.prompt_rows`) or, where that cannot be (`Engine.why_not_shared`), into these slots. The
sampled tokens depend on (seed, step, attempt, prompt id, sample id, position), never on slots,
launches or timing.

In an episode an environment answers each turn of the model (`sampling.episodes`). Its slot keeps
its keys and values and decodes nothing until the answer is there, whose tokens are then added to
them. Other slots continue meanwhile. The cache keeps its slots and has its full length from the
start, so that neither shapes nor results depend on when an answer comes.

On a mesh of several processes each process runs this code with the same arguments. The tokens of a
launch are replicated to all processes, so that all make the same decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.errors import UserError
from jaxrl.models.buckets import bucket, round_up
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import target_of
from jaxrl.models.pages import PAGE
from jaxrl.models.parameters import Params
from jaxrl.models.shared_prompts import why_not_shared
from jaxrl.sampling import decode, text
from jaxrl.sampling.caches import Caches
from jaxrl.sampling.episodes import Partner
from jaxrl.sampling.page_pool import PagePool, pages_of, pool_pages
from jaxrl.sampling.prompt_rows import PromptRows
from jaxrl.sampling.sampler import SamplingArrays, SamplingParams, sampling_arrays
from jaxrl.sampling.seating import Seating
from jaxrl.sampling.text import TextTokenizer
from jaxrl.sampling.unfinished import Unfinished
from jaxrl.sharding.axes import row_shards
from jaxrl.sharding.ledger import Ledger
from jaxrl.sharding.reshard import put
from jaxrl.types import Completion

__all__ = ["Aborted", "Engine", "EngineStats", "SamplingParams"]

NARROWEST = 64
"""Smallest width of prefilled prompts, and smallest length of the cache."""
CACHE_STEPS = 4
"""Number of cache lengths per doubling while all slots are in use. A decode step reads the whole
cache, so finer lengths save time. With fewer slots there is one length per doubling, which limits
the number of compiled programs."""
PREFILL_TOKENS = 4096
"""Most prompt tokens per data shard in one prefill; limits its activation memory."""
ANSWER_ROWS, ANSWER_TOKENS = 4, (16, 256)
"""Environments' answers that are prefilled at once in each data shard, and the smallest and largest
width of one: a longer answer is prefilled in parts."""
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
    """Prompts prefilled, without padding rows."""
    sent_back: int = 0
    """Preemptions: how often a sample lost its slot because the cache had no page left."""
    read_again: int = 0
    """Tokens of preempted samples, and of their prompts, that were prefilled a second time."""
    generated_tokens: int = 0
    """Sampled tokens, without those after a stop string."""
    slots: int = 0
    prefill_seconds: float = 0.0
    """Time for prefill and copies into slots, including the wait for the device."""
    decode_seconds: float = 0.0
    """Time for launches, until their tokens are on the host."""
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
        min_free: int | None = None,
        check_every: int | None = None,
        search_beside: bool | None = None,
        episodes: bool = False,
        share: bool | None = None,
        cache_tokens: int | None = None,
        tokenizer: TextTokenizer | None = None,
        ledger: Ledger | None = None,
    ):
        """Fixes the shapes. `generate` allocates all device memory and frees it at its end.

        Args:
            mesh: with the axes of a role, or None for one device.
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
            episodes: completions are episodes (`partner` of `generate`).
            share: the slots of a prompt's samples share its keys and values where they can. None:
                where that is faster.
            cache_tokens: positions of completions that a device of each data shard holds, in pages
                (`sampling.page_pool`), where prompts are shared. A sample for which there is none
                left goes back to the queue, the youngest one first, and its tokens are read again
                later. None: every slot has its own cache.
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
        self.config, self.mesh, self.tokenizer = config, mesh, tokenizer
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self.slots = round_up(slots, devices)
        self.min_free = max(1, self.slots // 8) if min_free is None else min_free
        target = target_of(jax.devices()[:1] if mesh is None else mesh.devices.flat)
        self.target, self.width_multiple = target, target.width_multiple
        self.episodes = episodes
        beyond = ANSWER_TOKENS[1] if episodes else 0  # a part's padding may lie there
        self.length = round_up(max_prompt_tokens + max_new_tokens + beyond, target.width_multiple)
        self.own_length = round_up(max_new_tokens, target.width_multiple)
        self.share = share
        self.pages: int | None = None
        """Pages in the pool of each data shard; None: every slot has its own cache."""
        if cache_tokens is not None:
            if cache_tokens < max_new_tokens:
                raise UserError(
                    f"cache_tokens={cache_tokens} does not hold one completion of"
                    f" max_new_tokens={max_new_tokens}; raise it to that at least"
                )
            self.pages = pool_pages(cache_tokens, self.slots // self.row_shards, max_new_tokens)
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
        partner: Partner | None = None,
        turn_tokens: int | None = None,
        abort: Callable[[], bool] | None = None,
        on_tokens: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Samples n completions of each prompt.

        Args:
            params: on the mesh, unstacked.
            prompts: token ids.
            seed, step, attempt: parts of the random key of every token.
            prompt_ids: part of that key too, modulo 2^31. None: the index in `prompts`.
            limits: [len(prompts)][n] most tokens of each completion. None: `max_new_tokens`.
            record_experts: of a mixture, set `Completion.experts`.
            partner: the environments of these prompts; each completion is then an episode. For an
                engine that was made for `episodes`.
            turn_tokens: most tokens of one turn of an episode. None: those of the completion.
            abort: called between launches; if it returns True, `Aborted` is raised.
            on_tokens: called after each launch with the number of tokens decoded and of completions
                finished so far.

        Returns:
            [len(prompts)][n] completions, in the order of `prompts` and samples.

        Raises:
            UserError: a prompt or `sampling` does not fit the engine.
            Aborted: `abort` returned True.
        """
        started = time.perf_counter()
        self._check(prompts, n, sampling, prompt_ids)
        why = self.why_not_shared(n, params["norm"]["scale"].dtype)
        if self.pages is not None and why is not None:
            raise UserError(
                "rollout.cache_tokens needs prompts apart from what follows them, and here both are"
                f" in one cache: {why}; set it to null"
            )
        self.stats = EngineStats(slots=self.slots)
        ids = range(len(prompts)) if prompt_ids is None else prompt_ids
        if limits is None:
            limits = [[sampling.max_new_tokens] * n] * len(prompts)
        assert all(0 < x <= sampling.max_new_tokens for row in limits for x in row)
        samples = [
            Unfinished(
                index,
                ids[index] % 2**31,
                sample,
                limits[index][sample],
                turn_tokens or limits[index][sample],
            )
            for index in range(len(prompts))
            for sample in range(n)
        ]
        if samples:
            knobs = sampling_arrays(sampling, seed, step, attempt)
            rows = None
            if why is None:
                slots = self.slots // self.row_shards
                rows = PromptRows(self.row_shards, slots, n, len(prompts))
            given = (sampling, knobs, samples, rows, partner, record_experts)
            _Run(self, params, prompts, n, *given).loop(abort, on_tokens)
        done = [sample.completion() for sample in samples]
        self.stats.generated_tokens = sum(int(c.sampled.sum()) for c in done)
        self.stats.seconds = time.perf_counter() - started
        return [done[i * n : (i + 1) * n] for i in range(len(prompts))]

    def why_not_shared(self, samples: int, dtype: Any) -> str | None:
        """Says why the slots of a prompt's samples do not share its keys and values; None where
        they do.

        Args:
            dtype: of the cache.
        """
        rule: dict[str, Any] = {"episodes": self.episodes, "paged": self.pages is not None}
        if self.share is None:
            rule |= {"prompt": self.max_prompt_tokens}
        elif not self.share:
            return "the engine was made so"
        name = np.dtype(dtype).name
        return why_not_shared(self.config, self.target, name, samples=samples, **rule)

    def cache_length(self, reach: int, slots: int, own: bool = False) -> int:
        """Length of the cache, in positions, when sequences reach `reach` positions in `slots`
        slots: rounded up to a bucket. With `own`, positions are counted after the prompts."""
        if self.episodes:
            return self.length
        steps = CACHE_STEPS if slots == self.slots else 1
        size = bucket(reach, smallest=NARROWEST, steps=steps, multiple=self.width_multiple)
        return min(size, self.own_length if own else self.length)

    def fewer_slots(self, taken: int, held: int) -> int | None:
        """Slots that each device keeps of `held` if its fullest uses `taken`; None if that would be
        more than half of them, so that shrinking does not pay."""
        left = round_up(bucket(taken), 1 if self.mesh is None else self.mesh.shape["tensor"])
        return left if 2 * left <= held else None

    def pages_for_slots(self, slots: int) -> int:
        """Pages of one data shard's pool when it has `slots` slots: no more than they can use."""
        assert self.pages is not None
        return min(self.pages, slots * pages_of(self.max_new_tokens))

    def read_again_width(self, tokens: int) -> int:
        """Width of the arrays in which preempted sequences are prefilled again."""
        most = self.max_prompt_tokens + self.max_new_tokens
        return bucket(tokens, smallest=NARROWEST, multiple=self.width_multiple, most=most)

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
        samples: list[Unfinished],
        rows: PromptRows | None,
        partner: Partner | None,
        record: bool,
    ):
        self.record, self.rows = record, rows
        self.held_experts: np.ndarray | None = None
        """Of the prompts that are held, [b, P, L, k], where they are recorded."""
        self.engine, self.params, self.prompts = engine, params, prompts
        self.partner = partner
        self.sampling, self.stats, self.ledger = sampling, engine.stats, engine.ledger
        mesh = engine.mesh
        self.knobs = knobs
        if mesh is not None:
            self.knobs = put(knobs, NamedSharding(mesh, PartitionSpec()))
        self.unsearched: list[tuple[Unfinished, int]] = []
        """Samples with tokens not yet searched for stop strings, each with its number of tokens
        before these."""
        shards = engine.row_shards
        self.pool = None if engine.pages is None else PagePool(shards, engine.pages)
        self.seating = Seating(samples, engine.slots, shards, engine.launch_tokens, self.pool)
        width = self._width(prompts)
        self.prefill_batch = prefill_batch(engine.slots, len(prompts), n, width, shards)
        self.held = range(0)
        """Indices of the prompts whose keys and values are held. Samples wait in the order of their
        prompts, so one prefilled batch is enough."""
        self.caches = Caches(engine.config, mesh, params, engine.ledger)

    def loop(
        self,
        abort: Callable[[], bool] | None,
        on_tokens: Callable[[int, int], None] | None,
    ) -> None:
        seating = self.seating
        total, tokens, finished = len(seating.queue), 0, 0
        try:
            while seating.queue or seating.seated:
                if abort is not None and abort():
                    raise Aborted(
                        f"generation aborted: {finished} of {total} completions were done"
                    )
                self._give_pages()
                self._refill()
                self._resume()
                if not seating.queue:
                    self.ledger.nearly_done()
                if seating.decoding().any():
                    tokens += self._launch()
                else:
                    self._wait()
                finished = total - len(seating.queue) - len(seating.seated)
                if on_tokens is not None:
                    on_tokens(tokens, finished)
            self._find_ends()
        finally:
            for sample in list(seating.seated.values()):
                self._free(sample)
            self.caches.drop()
        self.ledger.nearly_done()

    def _give_pages(self) -> None:
        """Gives seated samples the pages of their next launch; preempts the youngest if short."""
        if self.seating.is_short_of_pages():
            self._find_ends()  # a stop string may have ended a sample, whose pages are then free
        self.stats.sent_back += self.seating.give_pages()

    def _refill(self) -> None:
        """Puts waiting samples into free slots, and prefills their prompts first where needed."""
        started = time.perf_counter()
        seating, seated = self.seating, False
        while (slot := seating.vacant()) is not None:
            fresh: list[Unfinished] = []
            begun: list[Unfinished] = []
            if not seating.queue[0].tokens and seating.queue[0].prompt not in self.held:
                self._hold(seating.queue[0].prompt)
            while slot is not None:
                sample = seating.queue[0]
                if not sample.tokens and sample.prompt not in self.held:
                    break
                (begun if sample.tokens else fresh).append(sample)
                seating.sit_next(slot, self.prompts[sample.prompt])
                slot = seating.vacant()
            self._seat(fresh, begun)
            seated = True
        if not seating.queue and self.caches.held:
            self.held = range(0)
            self.caches.drop_held()
        if seated:
            jax.block_until_ready(self.caches.slots)
            self.stats.prefill_seconds += time.perf_counter() - started

    def _hold(self, first: int) -> None:
        """Prefills the batch of prompts that begins with prompt `first`."""
        self.held = range(first, min(first + self.prefill_batch, len(self.prompts)))
        chosen = [self.prompts[i] for i in self.held]
        width = self._width(chosen)
        tokens = np.zeros((self.prefill_batch, width), np.int32)
        lengths = np.ones(self.prefill_batch, np.int32)
        for row, prompt in enumerate(chosen):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        self.held_experts = self.caches.hold(tokens, lengths, self.record)
        self.stats.prefill_rows += len(chosen)

    def _seat(self, fresh: list[Unfinished], begun: list[Unfinished]) -> None:
        """Fills the caches of newly assigned slots.

        Args:
            fresh: samples without tokens, whose prompts are held.
            begun: preempted samples, whose keys and values are recomputed.
        """
        source = np.full(self.engine.slots, -1, np.int32)
        for sample in fresh:
            source[sample.slot] = sample.prompt - self.held.start
            if self.held_experts is not None and not sample.experts:
                length = len(self.prompts[sample.prompt])
                sample.experts.append(self.held_experts[source[sample.slot], : length - 1])
        self._fit(PAGE if self.pool else max(self._reach(), self.caches.positions))
        if self.rows is None:
            self.caches.insert(source)
            return
        new = self.rows.admit(self.seating.seated)
        self._fit_rows()
        count = self.rows.count
        source = np.full(count * self.engine.row_shards, -1, np.int32)
        held = [row for row, index in new.items() if index in self.held]
        for row in held:
            source[row] = new.pop(row) - self.held.start
        if held:
            self.caches.insert_prompts(source)
        rows = {(row // count, index): row % count for row, index in new.items()}
        while begun:
            longest = max(len(self.prompts[x.prompt]) + len(x.tokens) for x in begun)
            width = self.engine.read_again_width(longest)
            unread, begun = self.seating.unread(begun, self.prompts, width, rows)
            self.caches.read_again(unread)
            self.stats.read_again += int(unread.lengths[unread.pages[:, 0] >= 0].sum())

    def _reach(self) -> int:
        """Cache length that the next launch may need, rounded up to a bucket."""
        table = self.seating.table
        left = table[:, decode.LIMIT] - table[:, decode.COUNT]
        ahead = np.minimum(left, self.engine.launch_tokens)
        first = decode.POSITION if self.rows is None else decode.COUNT
        reach = int((table[:, first] + ahead).max())
        return self.engine.cache_length(reach, len(table), own=self.rows is not None)

    def _shrink(self) -> np.ndarray | None:
        """Chooses the slots to keep (`Seating.shrink`) once no sample is waiting, nor will be, and
        at least half of the slots are free, since a decode step computes free slots too."""
        if self.seating.queue or self.partner is not None:
            return None
        if self.pool is not None and self.seating.most_pages() > self.pool.pages:
            return None
        return self.seating.shrink(self.engine.fewer_slots)

    def _fit(self, length: int, kept: np.ndarray | None = None) -> None:
        rows = self.engine.slots
        if self.pool is not None:
            rows = self.pool.pages * self.engine.row_shards
        self.caches.fit(rows, length, kept)

    def _fit_pool(self) -> None:
        """Gives up the pages that the slots which are left cannot need."""
        assert self.pool is not None
        left = self.engine.pages_for_slots(self.seating.slots)
        if left < self.pool.pages:
            self._fit(PAGE, self.pool.shrink(left))

    def _fit_rows(self, kept: np.ndarray | None = None) -> None:
        """Makes the cache of shared prompts have all of its rows, or those to be `kept` alone."""
        assert self.rows is not None
        rows = self.rows.count * self.engine.row_shards
        self.caches.fit_prompts(rows, self._width(self.prompts), kept)

    def _launch(self) -> int:
        """Runs one launch, appends its tokens to their samples, and frees the slots of finished
        ones. Returns the number of tokens."""
        started = time.perf_counter()
        engine, seating = self.engine, self.seating
        kept = self._shrink()
        if self.pool is None:
            self._fit(self._reach(), kept)
        elif kept is not None:
            self._fit_pool()
        prompts = pages = None
        if self.rows is not None:
            if kept is not None:
                self._fit_rows(self.rows.shrink(seating.seated, seating.slots))
            lengths = {x.prompt: len(self.prompts[x.prompt]) - 1 for x in seating.seated.values()}
            prompts = self.caches.prompts, self.rows.table(seating.seated, lengths)
        if self.pool is not None:
            pages = self.pool.table(seating.seated, seating.slots, pages_of(self._reach()))
        slots, waiting = len(seating.table), len(seating.queue)
        exit_free = min(engine.min_free, waiting) if waiting else slots
        if self.partner is not None:  # also for slots whose turn ends
            exit_free = engine.min_free
        if self.partner is not None or self.pool is not None:  # some decode nothing from the start
            exit_free = min(int((~seating.decoding()).sum()) + exit_free, slots)
        given = (engine.config, engine.mesh, self.params, self.caches.slots, seating.table.copy())
        rest = (np.int32(exit_free), self.knobs, prompts, pages)
        length = {"n_tokens": engine.launch_tokens, "check_every": engine.check_every}
        options = {**length, "record": self.record}
        with self.ledger.running(decode.launch, *given, *rest, **options):
            self.caches.slots, launched, chosen = decode.launch(*given, *rest, **options)
            self._find_ends()  # searches the tokens of the launch before while this one runs
            out = np.asarray(launched)
        self.stats.launches += 1
        self.stats.decode_steps += int((out[:, 0, 0] != decode.NOT_RUN).sum())
        self.stats.decode_seconds += time.perf_counter() - started
        counts = (out[:, :, 0] >= 0).sum(0)
        experts = None if chosen is None else np.asarray(chosen)
        for slot, sample in list(self.seating.seated.items()):
            if not counts[slot]:
                continue
            if experts is not None:
                sample.experts.append(experts[: counts[slot], slot])
            self._collect(sample, out[: counts[slot], slot])
        if self.partner is not None or (self.sampling.stop and not engine.search_beside):
            self._find_ends()
        return int(counts.sum())

    def _collect(self, sample: Unfinished, rows: np.ndarray) -> None:
        """Appends a launch's rows [k, 3] to a sample: each token, and the bits of its log-probs in
        the full distribution and in the one sampled from. If they end it, its slot is free; if they
        end a turn of an episode, the slot decodes nothing."""
        self.unsearched.append((sample, len(sample.tokens)))
        sample.tokens += rows[:, 0].tolist()
        sample.logprobs.append(rows[:, 1:].copy().view(np.float32))
        if self.partner is None and self._is_over(sample):
            ended = sample.tokens[-1] in self.sampling.eos_ids
            sample.finish_reason = "stop" if ended else "length"
            self._free(sample)
        else:
            self._update_slot(sample)

    def _is_over(self, sample: Unfinished) -> bool:
        """Whether its last token ends its turn. An answer may end in an EOS, which ends none."""
        begun = len(sample.tokens) > sample.turn_start
        ended = begun and sample.tokens[-1] in self.sampling.eos_ids
        return ended or len(sample.tokens) == sample.turn_end

    def _update_slot(self, sample: Unfinished) -> None:
        """Updates the slot's entry in the table: decoding continues after the last token, or stops
        if the turn is over."""
        count = len(sample.tokens)
        at = len(self.prompts[sample.prompt]) + count - 1
        end = count if self._is_over(sample) else sample.turn_end
        self.seating.table[sample.slot, :4] = (sample.tokens[-1], at, count, end)

    def _find_ends(self) -> None:
        """Searches the collected tokens for stop strings, which end a turn, and decodes the text of
        turns that have ended. A launch that runs meanwhile still decodes the slots that this frees;
        those tokens are dropped."""
        tokenizer, stop = self.engine.tokenizer, self.sampling.stop
        for sample, before in self.unsearched:
            start = sample.turn_start
            eos = sample.tokens[-1] if sample.tokens[-1] in self.sampling.eos_ids else None
            turn = sample.tokens[start : None if eos is None else -1]
            stopped = text.find_stop(tokenizer, turn, before - start, stop)
            if stopped is not None:
                end, words = stopped
                sample.cut(start + end)
                eos = None
            elif self._is_over(sample):
                words = text.decode(tokenizer, turn)
            else:
                continue
            sample.text = words
            if self.partner is not None:
                kept = sample.tokens[start : None if eos is None else -1]
                written = text.before_stop(text.decode(tokenizer, kept, special=True), stop)
                self._end_turn(sample, written, eos, cut=stopped is None and eos is None)
            elif stopped is not None:
                sample.finish_reason = "stop"
                self._free(sample)
        self.unsearched = []

    def _end_turn(self, sample: Unfinished, written: str, eos: int | None, cut: bool) -> None:
        """Asks for the answer to a turn, unless it was cut, which ends the episode.

        Args:
            written: the turn's text with special tokens: marks of calls and thoughts may be some.
        """
        assert self.partner is not None
        sample.end_turn()
        self.stats.turns += 1
        if cut:
            sample.finish_reason = "length"
            self._free(sample)
            return
        row = self.seating.table[sample.slot]
        row[decode.LIMIT] = row[decode.COUNT]
        ids, length = (sample.prompt, sample.sample_id), len(sample.tokens)
        sample.reply = self.partner.answer(*ids, written, eos=eos, length=length)

    def _wait(self) -> None:
        """Waits until an environment has answered, or until it is time to look whether to abort."""
        started = time.perf_counter()
        replies = [x.reply for x in self.seating.seated.values() if x.reply is not None]
        if replies:
            wait(replies, LOOK_S, FIRST_COMPLETED)
        self.stats.waiting_seconds += time.perf_counter() - started

    def _resume(self) -> None:
        """Continues the episodes whose environments have answered."""
        started = time.perf_counter()
        answered: list[tuple[Unfinished, int]] = []
        for sample in list(self.seating.seated.values()):
            if sample.reply is None or not sample.reply.done():
                continue
            before = len(sample.tokens)
            if sample.hear(sample.reply.result()):
                answered.append((sample, before))
            else:
                self._free(sample)
        if answered:
            self._extend(answered)
            jax.block_until_ready(self.caches.slots)
            self.stats.prefill_seconds += time.perf_counter() - started

    def _extend(self, answered: list[tuple[Unfinished, int]]) -> None:
        """Prefills the answers into the slots of their samples.

        Args:
            answered: each with the number of its tokens before. The last of these was sampled and
                not yet read; the last one of the answer is left to the next launch.
        """
        least, most = ANSWER_TOKENS
        parts: dict[tuple[int, int], list[tuple[Unfinished, int, list[int]]]] = {}
        for sample, before in answered:
            missing = sample.tokens[before - 1 : -1]
            at = len(self.prompts[sample.prompt]) + before - 1
            if sample.was_cut and self.engine.config.n_recurrent:  # a state has no way back
                missing, at = [*self.prompts[sample.prompt], *sample.tokens[:-1]], 0
            sample.was_cut = False
            for number, start in enumerate(range(0, len(missing), most)):
                tokens = missing[start : start + most]
                width = bucket(len(tokens), smallest=least, most=most)
                parts.setdefault((number, width), []).append((sample, at + start, tokens))
        # A sample's parts follow one another.
        for (_, width), some in sorted(parts.items(), key=lambda item: item[0]):
            while some:
                some = self._extend_by(width, some)
        for sample, _ in answered:
            self._update_slot(sample)

    def _extend_by(
        self, width: int, parts: list[tuple[Unfinished, int, list[int]]]
    ) -> list[tuple[Unfinished, int, list[int]]]:
        """Prefills parts of at most `width` tokens, as many as fit; returns the others."""
        shards, held = self.engine.row_shards, self.seating.slots
        tokens = np.zeros((shards, ANSWER_ROWS, width), np.int32)
        positions = np.zeros((shards, ANSWER_ROWS), np.int32)
        lengths = np.zeros((shards, ANSWER_ROWS), np.int32)
        slots = np.full((shards, ANSWER_ROWS), held, np.int32)
        used, left, reach = [0] * shards, [], 0
        for part in parts:
            sample, position, ids = part
            assert sample.slot is not None
            shard, slot = divmod(sample.slot, held)
            if used[shard] == ANSWER_ROWS:
                left.append(part)
                continue
            row = shard, used[shard]
            tokens[row][: len(ids)], positions[row], slots[row] = ids, position, slot
            lengths[row] = len(ids)
            used[shard] += 1
            reach = max(reach, position + width)
        self._fit(
            max(self.caches.positions, self.engine.cache_length(reach, len(self.seating.table)))
        )
        given = (self.engine.config, self.engine.mesh, self.params, self.caches.slots)
        rows = (tokens.reshape(-1, width), *(x.reshape(-1) for x in (positions, lengths, slots)))
        with self.ledger.running(decode.extend, *given, *rows):
            self.caches.slots = decode.extend(*given, *rows)
        return left

    def _free(self, sample: Unfinished) -> None:
        if sample.slot is not None:
            self.seating.free(sample)
            if self.partner is not None:
                self.partner.end(sample.prompt, sample.sample_id)

    def _width(self, prompts: Sequence[Sequence[int]]) -> int:
        """Width of the arrays in which these prompts are prefilled: a bucket, which may exceed
        `max_prompt_tokens`."""
        longest, most = max(map(len, prompts)), self.engine.max_prompt_tokens
        multiple = self.engine.width_multiple
        return bucket(longest, smallest=NARROWEST, multiple=multiple, most=most)


def prefill_batch(slots: int, prompts: int, n: int, width: int, shards: int) -> int:
    """Number of prompts of `width` tokens in one prefill over `shards` parts of the rows: enough to
    fill the slots with the n samples of each, within `PREFILL_TOKENS`."""
    wanted = min(-(-slots // n), prompts)
    allowed = max(1, PREFILL_TOKENS * shards // width)
    return round_up(min(bucket(wanted), bucket(allowed)), shards)


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{name}={value}: must be at least 1")
