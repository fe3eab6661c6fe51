"""The order of the prompts: every batch is a pure function of (source, seed, batch number).

So a resumed run, or one that generates ahead, sees what an uninterrupted one sees, and there is no
cursor to keep beyond the number of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from jaxrl.data.example import Example, Message, Part
from jaxrl.data.source import Source
from jaxrl.data.tokenizer import (
    Tokenizer,
    as_messages,
    encode_completion,
    encode_prompt,
    has_template,
)
from jaxrl.errors import UserError
from jaxrl.types import Prompt

Chat = Literal["auto", "raw"]
NEEDS_COMPLETIONS = (
    "add completions to data.train, or learn from samples "
    "(distill.on_policy_fraction=1 or distill.seq_kd=true)"
)
_TRIES = 100
"""Rows in a row of a procedural task that may be too long before this is an error."""


@dataclass(frozen=True)
class PromptEncoder:
    """How an example becomes tokens."""

    tokenizer: Tokenizer
    max_prompt_tokens: int
    """Longer prompts are left out, never cut."""
    max_new_tokens: int
    """Longer completions are cut, and then have no EOS."""
    eos_ids: tuple[int, ...] = ()
    """What ends a completion; () for the tokenizer's own."""
    system_prompt: str | None = None
    """System message before every chat that has none."""
    chat: Chat = "auto"
    """auto: a text prompt becomes a user message where the tokenizer has a chat template, unless it
    is a document to continue (`arithmetic`). raw: text prompts stay text."""

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise UserError("data: prompts need a tokenizer, and the student's folder has none")
        for name in ("max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.system_prompt is not None and not has_template(self.tokenizer):
            raise UserError(
                "data.system_prompt is set, but the student's tokenizer has no chat template to "
                "put it in; unset it"
            )

    def prompt_of(self, example: Example) -> str | tuple[Message, ...]:
        """What is tokenised: text, or messages with the system prompt."""
        prompt = example.prompt
        if isinstance(prompt, str):
            if self.chat == "raw" or example.document or not has_template(self.tokenizer):
                return prompt
            prompt = ({"role": "user", "content": prompt},)
        if self.system_prompt is None or prompt[0]["role"] == "system":
            return prompt
        return ({"role": "system", "content": self.system_prompt}, *prompt)

    def fits(self, example: Example) -> bool:
        """Whether the prompt is short enough."""
        return len(encode_prompt(self.tokenizer, self.prompt_of(example))) <= self.max_prompt_tokens

    def encode(self, example: Example, prompt_id: int) -> Prompt | None:
        """The prompt with its completion; None where the prompt is too long."""
        prompt = self.prompt_of(example)
        tokens = encode_prompt(self.tokenizer, prompt)
        if len(tokens) > self.max_prompt_tokens:
            return None
        messages = as_messages(prompt)
        columns = {**example.columns, "messages": messages} if messages else example.columns
        text = messages[-1]["content"] if messages else str(prompt)
        completion = self._completion(example, prompt)
        return Prompt(prompt_id, tokens, text, completion, example.answer, columns)

    def _completion(
        self, example: Example, prompt: str | tuple[Message, ...]
    ) -> tuple[int, ...] | None:
        if example.completion is None:
            return None
        own = self.tokenizer.eos_token_id
        eos_ids = self.eos_ids or (() if own is None else (own,))
        tokens = encode_completion(self.tokenizer, prompt, example.completion, eos_ids)
        return tokens[: self.max_new_tokens]


class PromptStream:
    """Prompts in batches without end, every usable row once in each epoch.

    Rows of files are all tokenised at the start, and those too long are left out and counted in
    `dropped`. Rows of procedural tasks are only looked at when their turn comes; one that is too
    long gives way to the next that is not.
    """

    def __init__(
        self,
        source: Source,
        encoder: PromptEncoder,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        label: str = "data.train",
    ):
        """
        Args:
            batch_size: prompts in a batch; an epoch's ragged end is filled from the next epoch.
            seed: of the order; each epoch has its own.
            shuffle: False takes the rows as they stand.
            label: the config key, for error messages.
        """
        if batch_size < 1:
            raise UserError(f"batch_size={batch_size} must be at least 1")
        self._source, self._encoder, self._label = source, encoder, label
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._rows = _usable_rows(source, encoder, label)
        self.dropped = len(source) - len(self._rows)
        """Rows of files whose prompt is longer than `max_prompt_tokens`."""
        if not len(self._rows):
            raise UserError(
                f"{label}: all {len(source)} prompts of {source.name} are longer than "
                f"max_prompt_tokens={encoder.max_prompt_tokens}; raise it"
            )
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    @property
    def epoch_prompts(self) -> int:
        """Prompts in an epoch."""
        return len(self._rows)

    def batch(self, index: int) -> list[Prompt]:
        """The prompts of batch `index`; their ids are their positions in the whole order."""
        start = index * self._batch_size
        return [self._prompt(position) for position in range(start, start + self._batch_size)]

    def check_completions(self) -> None:
        """Refuses a source with rows that have no completion: for what learns from the data's own.

        Of a procedural task the first row speaks for all.
        """
        for part in self._source.parts:
            rows = 1 if part.procedural else len(part)
            without = sum(part[row].completion is None for row in range(rows))
            if without:
                told = "the task's rows" if part.procedural else f"{without} of {rows} rows"
                raise UserError(
                    f"{self._label}: {part.name}: {told} have no completion; {NEEDS_COMPLETIONS}"
                )

    def epoch(self, index: int) -> int:
        """The epoch in which batch `index` begins."""
        return index * self._batch_size // len(self._rows)

    def _prompt(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._rows))
        row = int(self._rows[self._order(epoch)[place]])
        return _encode_row(self._source, row, self._encoder, position, self._label)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._rows))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))


@dataclass(frozen=True)
class EvalSet:
    """Held-out prompts: the same ones each time, whatever the seed of the run's order."""

    prompts: tuple[Prompt, ...]
    """Ids 0, 1, ..."""
    dropped: int
    """Rows passed over: their prompt is too long or, in a procedural task, was there before."""


def eval_set(
    source: Source, encoder: PromptEncoder, count: int, label: str = "data.eval"
) -> EvalSet:
    """The first `count` usable prompts, the parts of `source` taking turns; or all there are."""
    if count < 1:
        raise UserError(f"eval.prompts={count} must be at least 1")
    prompts: list[Prompt] = []
    seen: set[tuple[int, ...]] = set()
    dropped = 0
    for part, row in _in_turn(source.parts):
        with _told_where(part, row, label):
            prompt = encoder.encode(part[row], len(prompts))
        if prompt is None or (part.procedural and prompt.tokens in seen):
            dropped += 1
            continue
        prompts.append(prompt)
        seen.add(prompt.tokens)
        if len(prompts) == count:
            break
    if not prompts:
        raise UserError(
            f"{label}: no prompt of {source.name} has at most max_prompt_tokens="
            f"{encoder.max_prompt_tokens} tokens; raise it"
        )
    return EvalSet(tuple(prompts), dropped)


def _in_turn(parts: Sequence[Part]) -> Iterator[tuple[Part, int]]:
    """Row 0 of every part, row 1 of every part, ..."""
    for row in range(max(len(part) for part in parts)):
        for part in parts:
            if row < len(part):
                yield part, row


def _usable_rows(source: Source, encoder: PromptEncoder, label: str) -> np.ndarray:
    """Rows whose prompt fits; those of procedural tasks unseen."""
    usable = np.ones(len(source), bool)
    start = 0
    for part in source.parts:
        if not part.procedural:
            for row in range(len(part)):
                with _told_where(part, row, label):
                    usable[start + row] = encoder.fits(part[row])
        start += len(part)
    return np.flatnonzero(usable)


def _encode_row(
    source: Source, index: int, encoder: PromptEncoder, prompt_id: int, label: str
) -> Prompt:
    """Row `index`, or where it is too long the next one of its part that is not."""
    part, row = source.locate(index)
    for step in range(min(_TRIES, len(part))):
        at = (row + step) % len(part)
        with _told_where(part, at, label):
            prompt = encoder.encode(part[at], prompt_id)
        if prompt is not None:
            return prompt
    raise UserError(
        f"{label}: {_TRIES} prompts of {part.name} one after the other are longer than "
        f"max_prompt_tokens={encoder.max_prompt_tokens}; raise it, or make the task easier"
    )


@contextmanager
def _told_where(part: Part, row: int, label: str) -> Iterator[None]:
    """What is wrong with a row is told with its place."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{label}: {part.where(row)}: {error}") from error
