"""The order of the prompts: every batch is a pure function of (source, seed, batch number).

So a resumed run, or one that generates ahead, sees what an uninterrupted one sees, and there is no
cursor to keep beyond the number of the batch.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm

import numpy as np

from jaxrl.data.endless import EndlessRows
from jaxrl.data.example import Example, Part, fields_of
from jaxrl.data.lengths import SAMPLE_ROWS, SAMPLE_S, Lengths, short_names
from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.rows import listed
from jaxrl.data.source import SUFFIXES, Source
from jaxrl.data.thoughts import CLOSES
from jaxrl.data.tokenizer import encode_text
from jaxrl.errors import UserError, about, counted
from jaxrl.process.waiting import count_rows
from jaxrl.types import Prompt

NEEDS_COMPLETIONS = (
    "add completions to data.train, or learn from samples "
    "(distill.on_policy_fraction=1 or distill.seq_kd=true)"
)
LABEL = "data.train"
TEMPLATE_BYTES = 100
"""At most so much does a chat template write round a turn, where completions are estimated."""
REFILL_OFFSET = 1 << 20
"""Batch index + k REFILL_OFFSET has the prompts that dynamic sampling samples for that batch in its
k-th refill."""
RowNumbers = np.ndarray | range
"""Numbers of usable rows; a range where they have no known end."""
_TEXT_KEYS = {"role", "content"}
_TRIES = 100
"""Rows in a row of a procedural task that may be too long before this is an error."""
_MEASURED = 200
"""Rows of which an error names the length of the shortest prompt."""


class PromptStream:
    """Prompts in batches without end, every usable row once in each epoch.

    Prompts of files are all tokenised at the start, and those too long are left out, or will be
    cut, and counted. Rows of procedural tasks are only looked at when their turn comes; one that is
    too long gives way to the next that is not.
    """

    def __init__(
        self,
        source: Source,
        encoder: PromptEncoder,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        weights: Sequence[float] | None = None,
    ):
        """
        Args:
            batch_size: prompts in a batch; an epoch's ragged end is filled from the next epoch.
            seed: of the order; each epoch has its own.
            shuffle: False takes the rows as they stand.
            weights: of each part of the source: its share of the prompts is its part of the sum,
                exact in every block of at most 1000 prompts, and its epochs are its own. None: the
                rows of all parts together, each once in an epoch.
        """
        self._source, self.encoder = source, encoder
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self.notify: Callable[[str], None] | None = None
        """Gets what is noted of rows from now on."""
        self.noted: Mapping[str, str] = encoder.noted
        """What the user should know about how the chat template treats rows, by kind; each note is
        about the first row of its kind that was encoded."""
        self.teacher_limit = encoder.teacher_limit
        """The other limit that a prompt that is left out may exceed."""
        self._limit = f"max_prompt_tokens={encoder.max_prompt_tokens}{self.teacher_limit}"
        self._weights = None if weights is None else tuple(weights)
        self.cut = 0
        """Rows of files whose prompt is longer than `max_prompt_tokens`, and cut."""
        self._lengths: list[np.ndarray] = []
        """Tokens of the prompts of each file's rows; empty for a procedural task."""
        parts: list[RowNumbers] = []
        start = 0
        # A row that cannot be encoded is refused here, not when its turn comes after hours: of rows
        # with the same fields the first one, which says what the chat template makes of these; and
        # every row where the tokenizer has tokens without a row in the embedding.
        checked: set[frozenset[tuple[object, ...]]] = set()
        for part in source.parts:
            if isinstance(part, EndlessRows):  # in their order; the first stands for all
                self._lengths.append(np.zeros(0, np.int32))
                parts.append(range(start, start + len(part)))
                start += len(part)
                continue
            usable = np.ones(len(part), bool)
            lengths = np.zeros(0 if part.procedural else len(part), np.int32)
            for row in count_rows(range(len(lengths)), part.name):
                with placed(part, row, LABEL, encoder):
                    example = part[row]
                    lengths[row] = encoder.length(example)
                    fit = encoder.fit(example, length=int(lengths[row]))
                    fields = fields_of(example)
                    if fit != "too long" and (encoder.lacks_rows or fields not in checked):
                        checked.add(fields)
                        encoder.encode(example, row)
                usable[row] = fit != "too long"
                self.cut += fit == "cut"
            self._lengths.append(lengths)
            parts.append(start + np.flatnonzero(usable))
            start += len(part)
        self._rows = np.concatenate([x[:1] if isinstance(x, range) else x for x in parts])
        self._usable = [len(rows) for rows in parts]
        self.epoch_prompts = sum(self._usable)
        self.dropped = len(source) - self.epoch_prompts
        """Rows of files that are left out: their prompt is longer than `max_prompt_tokens`, or
        that of the teacher too long."""
        if not len(self._rows):
            raise self._all_too_long(source)
        self.endless = any(isinstance(part, EndlessRows) for part in source.parts)
        """Whether rows of a part are taken in their order, and their number is not known."""
        if self.endless and self._weights is None and len(parts) > 1:
            raise UserError(
                f"{LABEL}: of several sources one has no end that is known: set data.weights, the"
                " share of each"
            )
        together = parts[0] if self.endless else self._rows
        self._row_at = order_in_passes(together, (seed,), shuffle)
        if self._weights is not None:
            if len(self._weights) != len(parts):
                raise UserError(
                    f"data.weights: {len(self._weights)} weights for the {len(parts)} sources of "
                    f"{LABEL}; give one for each"
                )
            if not all(0 < weight < float("inf") for weight in self._weights):
                raise UserError(f"data.weights: {list(self._weights)}: weights are numbers above 0")
            for part, rows in zip(source.parts, parts, strict=True):
                if not len(rows):
                    raise self._all_too_long(part)
            with about("data.weights"):
                self._row_at = mix_sources(parts, self._weights, seed, shuffle)

    @cached_property
    def fingerprint(self) -> str:
        """Returns the sha256, in hex, of what decides the prompts: the contents of the parts
        wherever they lie, the settings of order and encoding, the template, and which rows are
        usable. Two streams with the same fingerprint have the same batches, given the same
        tokenizer."""
        encoder = self.encoder
        settings: tuple[object, ...] = (
            [part.digest() for part in self._source.parts],
            (self._batch_size, self._seed, self._shuffle, self._weights),
            (encoder.max_prompt_tokens, encoder.max_new_tokens, encoder.eos_ids),
            (encoder.system_prompt, encoder.chat, encoder.few_shot, encoder.long_prompts),
            (encoder.tokenizer.chat_template, len(encoder.tokenizer)),
            (self.dropped, self.cut),
        )
        if encoder.arguments:
            settings += (sorted(encoder.arguments.items()),)
        if encoder.teacher is not None:
            settings += ((encoder.teacher.template, encoder.teacher.max_tokens),)
        digest = hashlib.sha256(repr(settings).encode())
        digest.update(self._rows.astype("<i8").tobytes())
        return digest.hexdigest()

    def batch(self, index: int) -> list[Prompt]:
        """Returns the prompts of batch `index`; their ids are their positions in the whole order.

        A refill (`REFILL_OFFSET`) has no row that its batch or an earlier refill of it has, as long
        as there are others: two groups of one prompt teach the same. Else some come again.
        """
        refills, number = divmod(index, REFILL_OFFSET)
        size = self._batch_size
        taken = list(range(number * size, (number + 1) * size))
        seen = {self._row_at(position) for position in taken} if refills else set[int]()
        for refill in range(1, refills + 1):
            start, times, fresh = (number + refill * REFILL_OFFSET) * size, Counter[int](), 0
            found: list[tuple[int, bool, int]] = []
            # In twice as many positions as there are rows, each row of a file comes once.
            for position in range(start, start + 2 * len(self._rows) + size):
                row = self._row_at(position)
                found.append((times[row], row in seen, position))
                fresh += not times[row] and row not in seen
                times[row] += 1
                if fresh == size:
                    break
            taken = [position for *_, position in sorted(found)[:size]]
            seen |= {self._row_at(position) for position in taken}
        return [self._prompt(position) for position in taken]

    def rows(self, batches: Iterable[int]) -> Iterator[tuple[int, Prompt]]:
        """Yields the batch and the prompt of every row that these batches hold, each row where it
        first appears; ends once all rows have appeared."""
        seen: set[int] = set()
        for index in batches:
            for position in range(index * self._batch_size, (index + 1) * self._batch_size):
                row = self._row_at(position)
                if row not in seen:
                    seen.add(row)
                    yield index, self._prompt(position)
            if len(seen) == self.epoch_prompts:
                return

    @property
    def procedural(self) -> bool:
        """Returns whether a part makes its rows on demand, so that their number is nominal."""
        return any(part.procedural for part in self._source.parts)

    def check_completions(self, remedy: str = NEEDS_COMPLETIONS) -> None:
        """Refuses a source with rows that have no completion: for what learns from the data's own.

        Of a procedural task the first row speaks for all.
        """
        for part in self._source.parts:
            rows = 1 if part.procedural else len(part)
            without = [row for row in range(rows) if part[row].completion is None]
            if without and part.procedural:
                raise UserError(
                    f"{LABEL}: {part.name}: the task's rows have no completion; {remedy}"
                )
            if without:
                prompt = part[without[0]].prompt
                role = "" if isinstance(prompt, str) else prompt[-1]["role"]
                raise UserError(
                    f"{LABEL}: {part.name}: {len(without)} of {rows} rows have no completion among"
                    f" {listed(part.columns)} (data.completion_key); the first is"
                    f" {part.where(without[0])}"
                    f"{f', whose last message has the role {role!r}' if role else ''}; {remedy}"
                )

    def long_completions(self) -> int:
        """Counts the usable rows of files whose completion, with what ends it, is longer than
        `max_new_tokens`: it is cut, and has no EOS.

        The text alone decides where it is far from the limit, in bytes (a token has at least one)
        or in tokens: rendering each row with its prompt would take several times as long.
        """
        limit = self.encoder.max_new_tokens
        encoder = replace(self.encoder, max_new_tokens=limit + 1)
        count = 0
        for number in count_rows(self._rows, f"{LABEL} whose completions are measured"):
            part, row = self._source.locate(int(number))
            example = None if part.procedural else part[row]
            if example is None or example.completion is None:
                continue
            text, turns = example.completion, example.turns
            written = text + "".join(map(str, turns))
            around = TEMPLATE_BYTES * (len(turns) + 1)
            if len(written.encode()) + around <= limit:
                continue
            is_text = len(turns) < 2 and all(turn.keys() <= _TEXT_KEYS for turn in turns)
            if is_text and not CLOSES.search(text):  # some templates leave thoughts out
                tokens = len(encode_text(encoder.tokenizer, text, eos=False))
                if not limit - around < tokens <= limit + around:
                    count += tokens > limit
                    continue
            with placed(part, row, LABEL, encoder):
                prompt = encoder.encode(example, row)
            count += prompt is not None and len(prompt.completion or ()) > limit
        return count

    def measure_lengths(self, prompts: int, completions: bool) -> list[Lengths]:
        """Measures each source: the prompts of files all, as they are tokenised anyhow; those of
        tasks, and completions, of a sample: the first rows in the run's order, `SAMPLE_ROWS` of a
        source or as many as `SAMPLE_S` seconds allow.

        Args:
            prompts: that the run trains on: no row after them is in the sample.
            completions: measures the data's completions too.
        """
        encoder = replace(self.encoder, max_new_tokens=np.iinfo(np.int32).max)
        parts, end = self._source.parts, time.monotonic() + SAMPLE_S
        sampled = [list[tuple[int, int]]() for _ in parts]
        seen = set[int]()
        for position in range(min(prompts, SAMPLE_ROWS * len(parts))):
            part, row = self._source.locate(index := self._row_at(position))
            lengths = sampled[self._source.part_number(index)]
            wanted = completions or part.procedural
            if index in seen or not wanted or len(lengths) == SAMPLE_ROWS:
                continue
            if time.monotonic() > end:
                break
            seen.add(index)
            with placed(part, row, LABEL, encoder):
                example = part[row]
                length = encoder.length(example) if part.procedural else 0
                prompt = encoder.encode(example, position) if completions else None
            learned = () if prompt is None else prompt.completion or ()
            lengths.append((length, len(learned)))
        found, drops = list[Lengths](), self.encoder.long_prompts == "drop"
        for number, part in enumerate(parts):
            name, rows = f"{LABEL}: {part.name}", None if part.procedural else len(part)
            of_sample = np.array(sampled[number], np.int32).reshape(-1, 2).T
            asked = of_sample[0] if part.procedural else self._lengths[number]
            if len(asked):
                limit, left_out = self.encoder.max_prompt_tokens, part.procedural or drops
                found.append(Lengths(name, "prompts", asked, limit, rows, left_out))
            if completions and of_sample.size:
                limit, rows = self.encoder.max_new_tokens, rows and self._usable[number]
                found.append(Lengths(name, "completions", of_sample[1], limit, rows))
        return found

    def source_name(self, position: int) -> str:
        """Returns the name, in metrics, of the source of the prompt with this id; "" where there is
        one source alone."""
        if len(self._source.parts) == 1:
            return ""
        return self._source_names[self._source.part_number(self._row_at(position))]

    @cached_property
    def _source_names(self) -> list[str]:
        return short_names([part.name for part in self._source.parts], SUFFIXES)

    def examples(self) -> Iterator[tuple[str, Example]]:
        """Yields every row with its place, for checks before a run. For a procedural task, the
        first row speaks for all."""
        for part in self._source.parts:
            for row in range(1 if part.procedural else len(part)):
                yield part.where(row), part[row]

    def _prompt(self, position: int) -> Prompt:
        return self._found(position)[2]

    def place(self, position: int) -> tuple[Part, int]:
        """Finds the part and the number there of the row whose prompt is at a position of the
        order: prompt n of batch b is at b * batch_size + n."""
        return self._found(position)[:2]

    def _found(self, position: int) -> tuple[Part, int, Prompt]:
        """Returns the row at this position with its prompt or, where that is too long, the next row
        of its part whose prompt is not."""
        part, row = self._source.locate(self._row_at(position))
        for step in range(min(_TRIES, len(part))):
            at = (row + step) % len(part)
            known = len(self.noted)
            with placed(part, at, LABEL, self.encoder):
                prompt = self.encoder.encode(part[at], position, not part.procedural)
            if self.notify is not None:
                for note in list(self.noted.values())[known:]:
                    self.notify(note)
            if prompt is not None:
                return part, at, prompt
        raise UserError(
            f"{LABEL}: {_TRIES} prompts of {part.name} one after the other are longer than "
            f"{self._limit}; raise it, or make the task easier"
        )

    def _all_too_long(self, rows: Source | Part) -> UserError:
        first = range(min(_MEASURED, len(rows)))
        shortest = min(self.encoder.length(rows[row]) for row in first)
        of = "" if len(first) == len(rows) else f" of {len(first)}"
        words = f": the shortest{of} has {counted(shortest, 'token')}"
        return UserError(
            f"{LABEL}: all {len(rows)} prompts of {rows.name} are longer than {self._limit}; raise"
            f" it{words if shortest > self.encoder.max_prompt_tokens else ''}"
        )


@dataclass(frozen=True)
class EvalSet:
    """Held-out prompts: the same ones each time, whatever the seed of the run's order."""

    prompts: tuple[Prompt, ...]
    """Ids in order, from 0 in the first set of a run and on from there in the next."""
    dropped: int
    """Rows passed over: their prompt is too long or, in a procedural task, was there before."""
    name: str = ""
    """As in `data.eval`; "" for the one set that has no name."""
    cut: int = 0
    """Prompts that were too long, and are cut."""
    lengths: Lengths | None = None
    """Of these prompts, and of those passed over as too long."""


def eval_sets(
    spec: Mapping[str, Sequence[str]] | Sequence[str],
    open: Callable[[Sequence[str], str], Source],
    encoder: PromptEncoder,
    count: int,
) -> tuple[EvalSet, ...]:
    """Makes the sets of `data.eval`: one without a name, or one for each name.

    Args:
        open: (sources of one set, config key) -> their rows.
        count: most prompts of one set.
    """
    named = spec if isinstance(spec, Mapping) else {"": spec}
    sets: list[EvalSet] = []
    first_id = 0
    for name, sources in named.items():
        label = f"data.eval.{name}" if name else "data.eval"
        sets.append(eval_set(open(sources, label), encoder, count, label, name, first_id))
        first_id += len(sets[-1].prompts)
    return tuple(sets)


def eval_set(
    source: Source,
    encoder: PromptEncoder,
    count: int,
    label: str = "data.eval",
    name: str = "",
    first_id: int = 0,
) -> EvalSet:
    """Makes the set of the first `count` usable prompts, or of all there are; the parts of `source`
    take turns. Completions of the data are not read."""
    encoder = replace(encoder, completions=False)
    prompts: list[Prompt] = []
    seen: set[Sequence[int]] = set()
    dropped = cut = 0
    lengths: list[int] = []
    longest = max(map(len, source.parts))
    for row, part in ((row, part) for row in range(longest) for part in source.parts):
        if row >= len(part):
            continue
        with placed(part, row, label, encoder):
            example = part[row]
            prompt = encoder.encode(example, first_id + len(prompts), not part.procedural)
            length = encoder.length(example)
        if prompt is None or not part.procedural or prompt.tokens not in seen:
            lengths.append(length)
        if prompt is None or (part.procedural and prompt.tokens in seen):
            dropped += 1
            continue
        prompts.append(prompt)
        seen.add(prompt.tokens)
        cut += length > encoder.max_prompt_tokens
        if len(prompts) == count:
            break
    if not prompts:
        raise UserError(
            f"{label}: no prompt of {source.name} has at most max_prompt_tokens="
            f"{encoder.max_prompt_tokens} tokens; raise it"
        )
    limit, drops = encoder.max_prompt_tokens, encoder.long_prompts == "drop"
    measured = Lengths(label, "prompts", np.array(lengths), limit, len(lengths), drops)
    return EvalSet(tuple(prompts), dropped, name, cut, measured)


@contextmanager
def placed(part: Part, row: int, label: str, encoder: PromptEncoder) -> Iterator[None]:
    """Puts the place of a row before the message of what is wrong with it, and before what the
    encoder notes of it."""
    known = set(encoder.noted)
    try:
        yield
        for kind in encoder.noted.keys() - known:
            encoder.noted[kind] = f"{label}: {part.where(row)}: {encoder.noted[kind]}"
    except UserError as error:
        if str(error).startswith(f"{label}: "):  # the reader of the file names it already
            raise
        raise UserError(f"{label}: {part.where(row)}: {error}") from error


LONGEST_BLOCK = 1000
"""Positions over which a mixture's shares hold exactly; finer shares are rounded to 1/1000."""
_BLOCKS, _SOURCES = 1, 2
"""First of the seeds' second words. Never 0: numpy takes trailing zeros of a seed for nothing."""


def order_in_passes(rows: RowNumbers, seed: tuple[int, ...], shuffle: bool) -> Callable[[int], int]:
    """Makes a function from position to row: all rows once in each pass, each pass in an order of
    its own; rows without a known end as they follow each other."""
    if isinstance(rows, range):
        return rows.__getitem__

    @lru_cache(maxsize=2)
    def order(number: int) -> np.ndarray:
        count = len(rows)
        if not shuffle:
            return np.arange(count)
        return np.random.default_rng((*seed, number)).permutation(count)

    def row(position: int) -> int:
        number, place = divmod(position, len(rows))
        return int(rows[order(number)[place]])

    return row


def mix_sources(
    rows: Sequence[RowNumbers], weights: Sequence[float], seed: int, shuffle: bool
) -> Callable[[int], int]:
    """Makes a function from position to row, of several sources in fixed shares, each with passes
    of its own.

    Positions come in blocks. Every block holds the same number of each source, so that the draws
    of a source before a position are counted, not remembered: draw d of a source that has c places
    in a block is place d % c of block d // c.

    Args:
        rows: of each source.
        weights: of each source: its share of the positions is its part of their sum.
        shuffle: False spreads the sources evenly within a block, rows as they stand.
    """
    counts = apportion(weights)
    passes = [order_in_passes(each, (seed, _SOURCES + n), shuffle) for n, each in enumerate(rows)]

    @lru_cache(maxsize=2)
    def sources_and_draws(block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each place of a block, and how many draws of that source come
        before."""
        sources = np.repeat(np.arange(len(counts)), counts)
        if shuffle:
            order = np.random.default_rng((seed, _BLOCKS, block)).permutation(len(sources))
        else:
            even = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
            order = np.argsort(even, kind="stable")
        sources = sources[order]
        draws = np.zeros(len(sources), np.int64)
        for source, count in enumerate(counts):
            draws[sources == source] = np.arange(count)
        return sources, draws

    def row(position: int) -> int:
        block, place = divmod(position, sum(counts))
        sources, draws = sources_and_draws(block)
        source = int(sources[place])
        return passes[source](block * counts[source] + int(draws[place]))

    return row


def apportion(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the number of places of each source in a block: exact in the shortest block, if 1000
    places are enough; else out of 1000, rounded by largest remainders."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    block = min(lcm(*(share.denominator for share in shares)), LONGEST_BLOCK)
    quotas = [share * block for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - quotas[i])
    for source in by_remainder[: block - sum(counts)]:
        counts[source] += 1
    for number, (count, weight) in enumerate(zip(counts, weights, strict=True), start=1):
        if not count:
            raise UserError(
                f"weight {weight:g} of source {number} is too small: its share of "
                f"{float(shares[number - 1]):.2g} is under one prompt in {LONGEST_BLOCK}; leave "
                "the source out or raise its weight"
            )
    return tuple(counts)
