"""A teacher with another tokenizer: the student's completions in its tokens, and which of them
belong together.

Both tokenizers cut the same bytes. Two neighbouring borders that both have enclose a *stretch*: one
or more tokens of each, which spell the same. At its beginning both models predict the text that
follows from the same text before, and their distributions can be compared, over cells
(`losses.cells`). A stretch of one token each, which stand for the same bytes, is *exact*: there is
nothing more in it. Of any other the sampled rest is compared: the tokens after the first, and the
first given its cell. Not every border that both have is one at which the models know the same
(`data.borders`); a stretch goes on over those where they do not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from jaxrl.data.batch import DATA, pack, right_padded, width_for
from jaxrl.data.borders import Joining, Path, words
from jaxrl.data.spelling import Spelling
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.losses.cells import LEFT_OUT, LONGER, NEVER, OTHERS, Cells, Side
from jaxrl.types import Aligned, Completion, Rollout, TokenAlignment


class Speaker(NamedTuple):
    """One of the two models, as far as its tokens matter."""

    tokenizer: Tokenizer
    rows: int
    """Of its embedding: ids from there on do not exist."""
    ends: tuple[int, ...]
    """Tokens that end its completions; the tokenizer's own, where it is one of them, else the
    first."""

    @property
    def end(self) -> int:
        own = self.tokenizer.eos_token_id
        return own if own in self.ends else self.ends[0]


@dataclass(frozen=True)
class Row(TokenAlignment):
    """The alignment of one completion, [C] and [C']."""

    tokens: list[int]
    """The completion in the teacher's tokens."""


class Aligner:
    """Two tokenizers. Raises UserError where the tokens of one do not tell what they stand for."""

    def __init__(self, student: Speaker, teacher: Speaker):
        self.student, self.teacher = student, teacher
        self._ours = Spelling(student.tokenizer, student.rows, "student")
        self._theirs = Spelling(teacher.tokenizer, teacher.rows, "teacher")
        self.to_teacher = self._common()
        """[V] int32: the teacher's id of each of the student's tokens, -1 where it has none."""
        self.cells = self._cells()
        mine, its = self.cells.student.cells, self.cells.teacher.cells
        self._bits: list[int] = self.cells.bits.tolist()
        self._joining = (
            Joining(self._ours, mine, student.ends),
            Joining(self._theirs, its, teacher.ends),
        )

    def _common(self) -> np.ndarray:
        ours, theirs, student, teacher = self._ours, self._theirs, self.student, self.teacher
        pairs = [(i, theirs.ids.get(token, -1)) for token, i in ours.ids.items()]
        pairs += [(i, theirs.special.get(name, -1)) for name, i in ours.special.items()]
        to_teacher = np.full(student.rows, -1, np.int32)
        for mine, its in pairs:
            if mine < student.rows and its < teacher.rows:
                to_teacher[mine] = its
        # How each of them ends a completion is the same, whatever the names.
        to_teacher[to_teacher == teacher.end] = -1
        to_teacher[student.end] = teacher.end
        return to_teacher

    def _cells(self) -> Cells:
        v = self.student.rows
        common = np.flatnonzero(self.to_teacher >= 0)
        known = {self._ours.bytes[i]: int(i) for i in common if i not in self._ours.special_ids}
        ours = self._ours.cells(known, v)
        theirs = self._theirs.cells(known, v)[: self.teacher.rows]
        ours[common], theirs[self.to_teacher[common]] = common, common
        # A student without tokens of the last cell learns how the teacher chooses among the others.
        theirs[theirs == v] = v if (ours[:v] == v).any() else v + 1
        bits = [
            NEVER if i in self._ours.special_ids or i in self.student.ends or not name else name[0]
            for i, name in enumerate(self._ours.bytes[:v])
        ]
        return Cells(
            Side(ours[:v], *self._ours.spans(v), (self.to_teacher >= 0).astype(np.int32)),
            Side(
                theirs,
                *self._theirs.spans(self.teacher.rows),
                np.isin(np.arange(len(theirs)), self.to_teacher[common]).astype(np.int32),
            ),
            np.array([*bits, OTHERS, NEVER], np.int32),
        )

    def read(
        self, rollout: Rollout, max_prompt_tokens: int, max_tokens: int, width_multiple: int = 2
    ) -> Rollout:
        """The rollout with prompts and completions in the teacher's tokens, and its `alignment`.

        Of completions that no policy sampled nothing within stretches is compared: they are no
        estimate of a divergence.

        Args:
            max_prompt_tokens: limit of the teacher's prompts.
            max_tokens: limit of completions in the teacher's tokens; the rest of a longer one is
                not aligned.
            width_multiple: of both widths.
        """
        sampled = rollout.policy_version != DATA
        rows = self.rows([one.tokens for one in rollout.completions], max_tokens, sampled)
        prompts = [prompt.teacher_tokens or () for prompt in rollout.prompts]
        count, width = rollout.sequences.loss_mask.shape
        tokens = [row.tokens for row in rows]
        theirs = width_for(tokens, max_tokens, width_multiple)
        sequences = pack(
            prompts,
            tokens,
            prompt_width=width_for(prompts, max_prompt_tokens, width_multiple),
            completion_width=theirs,
            pad_id=0,  # the mask leaves padding out
            row_multiple=count,
        )

        def padded(name: str) -> np.ndarray:
            wide = theirs if name.startswith(("starts", "their")) else width
            dtype = bool if name == "starts" else np.int32
            fill = -1 if name.endswith("cells") else 0
            return right_padded([getattr(row, name) for row in rows], (count, wide), dtype, fill)

        alignment = {one.name: padded(one.name) for one in fields(TokenAlignment)}
        return replace(rollout, sequences=sequences, alignment=TokenAlignment(**alignment))

    def rows(
        self, completions: Sequence[Sequence[int]], max_tokens: int, sampled: bool = True
    ) -> list[Row]:
        """The alignment of each completion, given in the student's tokens.

        Args:
            max_tokens, sampled: as of `read`.
        """
        ended = [len(c) > 0 and c[-1] in self.student.ends for c in completions]
        bare = [c[: len(c) - end] for c, end in zip(completions, ended, strict=True)]
        theirs = self._theirs.encode([_text(self._ours.spelt(tokens)) for tokens in bare])
        known = self.teacher.rows  # a tokenizer may have tokens that its model has not
        return [
            self._row(
                list(completion),
                end,
                list(itertools.takewhile(lambda token: token < known, its)),
                max_tokens,
                sampled,
            )
            for completion, end, its in zip(completions, ended, theirs, strict=True)
        ]

    def _row(
        self, ours: list[int], ended: bool, theirs: list[int], max_tokens: int, sampled: bool
    ) -> Row:
        bare = ours[: len(ours) - ended]
        spelt, text = self._ours.spelt(bare), self._theirs.spelt(theirs)
        our_sizes, their_sizes = self._ours.lengths[bare], self._theirs.lengths[theirs]
        if _begins_with_a_space_of_its_own(text, spelt):
            text, their_sizes = text[1:], np.append(their_sizes[0] - 1, their_sizes[1:])
        agreed = _agreed(spelt, text)
        sizes = np.append(our_sizes, np.zeros(int(ended), int))
        if ended:  # as if the end were one more byte
            agreed += agreed == len(spelt) == len(text)
            theirs = [*theirs, self._end(ours[-1])]
            our_sizes, their_sizes = np.append(our_sizes, 1), np.append(their_sizes, 1)
        theirs, their_sizes = theirs[:max_tokens], their_sizes[:max_tokens]
        our_borders, their_borders = our_sizes.cumsum(), their_sizes.cumsum()
        shared = np.intersect1d(our_borders, their_borders)
        shared = shared[shared <= agreed]
        borders = our_borders, their_borders
        before = (np.searchsorted(each, shared, "right").tolist() for each in borders)
        paths = _Paths(self, ours, theirs)
        kept = [paths.ends(*both) for both in zip(*before, strict=True)]
        shared = shared[np.array(kept, bool)]
        # The stretch of each token; that which follows the last one is not aligned.
        mine, its = np.searchsorted(shared, our_borders), np.searchsorted(shared, their_borders)
        stretches = np.arange(len(shared) + 1)
        index = np.searchsorted(its, stretches)[mine]
        alone = np.bincount(np.append(mine, its), minlength=len(stretches)) == 2
        first = np.array([*theirs, 0])[index]
        starts, inside = _begins(mine), mine < len(shared)
        cells = np.where(inside & (starts | sampled), paths.student.cells, -1)
        same = (self.to_teacher[ours] == first) & (cells >= 0)
        kinds = np.where(starts, Aligned.START, Aligned.INSIDE)
        kinds = np.where(alone[mine] & same, Aligned.EXACT, kinds if sampled else Aligned.NOT)
        kinds, index = np.where(inside, kinds, Aligned.NOT), np.where(inside, index, 0)
        return Row(
            tokens=theirs,
            kinds=kinds,
            sizes=sizes,
            index=index,
            cells=cells,
            ends=paths.student.ends,
            left_out=paths.student.left_out,
            starts=_begins(its),
            their_cells=np.where(its < len(shared), paths.teacher.cells, -1),
            their_ends=paths.teacher.ends,
            their_left_out=paths.teacher.left_out,
        )

    def _end(self, end: int) -> int:
        """The teacher's end of a completion that the student ended with this token."""
        its = int(self.to_teacher[end])
        return its if its in self.teacher.ends else self.teacher.end

    def student_tokens(self, text: str) -> list[int]:
        """A text in the student's tokens, without an end."""
        return self._ours.encode([text])[0]

    def in_the_students_tokens(self, completion: Completion, max_new_tokens: int) -> Completion:
        """A completion that the teacher sampled, for the student to learn from. Its log-probs are
        0 and mean nothing."""
        tokens = self.student_tokens(completion.text)
        if completion.tokens and completion.tokens[-1] in self.teacher.ends:
            tokens = [*tokens, self.student.end]
        kept = tuple(tokens[:max_new_tokens])
        unknown = np.zeros(len(kept), np.float32)
        reason = completion.finish_reason if len(kept) == len(tokens) else "length"
        return Completion(kept, unknown, unknown, reason, completion.text)


class _Paths:
    """What is known of a completion at the borders of its stretches, for both models."""

    def __init__(self, aligner: Aligner, ours: list[int], theirs: list[int]):
        each = zip(aligner._joining, (ours, theirs), strict=True)
        self.student, self.teacher = (Path(*one) for one in each)
        self._bits, self._to_teacher = aligner._bits, aligner.to_teacher
        self._begin(0, 0, 0)

    def ends(self, ours: int, theirs: int) -> bool:
        """Whether a stretch ends after so many tokens of each."""
        known = self.student.read(ours), self.teacher.read(theirs)
        if not all(known):
            return False
        self._begin(ours, theirs, self.student.end() | self.teacher.end())
        return True

    def _begin(self, ours: int, theirs: int, left_out: int) -> None:
        both = (self.student, ours), (self.teacher, theirs)
        if any(place >= len(path.tokens) for path, place in both):
            return
        first = [path.joining.cells[path.tokens[place]] for path, place in both]
        out = [left_out >> self._bits[cell] & 1 for cell in first]
        cell = first[0] if first[0] == first[1] < len(self._bits) - 2 else -1
        cell = LEFT_OUT if all(out) else -1 if any(out) else cell
        for path, place in both:
            path.begin(place, cell, left_out)
        if cell >= 0:
            self._choose(cell, ours, theirs)

    def _choose(self, cell: int, ours: int, theirs: int) -> None:
        """What a sample tells of a cell is which of the longer tokens follow, in one token or in
        several. Whether one does is in the divergence at the border after the token of the cell, if
        the student never says this token before what a longer one begins with."""
        mine, its = self.student, self.teacher
        names = cell, int(self._to_teacher[cell])
        if mine.tokens[ours] != names[0]:
            if mine.joining.always_joins(names[0]):
                mine.cells[ours] = LONGER - cell
        elif its.tokens[theirs] != names[1] and ours + 1 < len(mine.tokens):
            bits = mine.joining.after(names[0], True) | its.joining.after(names[1], True)
            mine.cells[ours + 1] = LEFT_OUT
            mine.left_out[ours + 1] = words(bits)


def _begins(numbers: np.ndarray) -> np.ndarray:
    """Whether a token is the first of its stretch."""
    return np.diff(numbers, prepend=-1) > 0


def _agreed(ours: bytes, theirs: bytes) -> int:
    """Bytes that both begin with."""
    return len(os.path.commonprefix([ours, theirs]))


def _begins_with_a_space_of_its_own(text: bytes, spelt: bytes) -> bool:
    """Whether a tokenizer put a space before a text, as SentencePiece does."""
    if not text.startswith(b" "):
        return False
    return text[1:] == spelt or _agreed(text[1:], spelt) > _agreed(text, spelt)


def _text(spelt: bytes) -> str:
    """What can be decoded; a completion may end within a character."""
    try:
        return spelt.decode()
    except UnicodeDecodeError as error:
        return spelt[: error.start].decode()
