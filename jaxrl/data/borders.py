"""Which borders between tokens tell the same of a text in two vocabularies.

A tokenizer that has a token "the" cuts "th" into two tokens only where no "e" follows. A model that
read "t" and "h" so has been told what does not follow, and a model without that token has not. Two
models can be compared at a border if this is known of the last token before it alone: then the
probability of the text so far is that of its path, with all tokens that begin with the last one
(`losses.cells`). A border that a token from further back would have crossed is passed over.

Taken for granted is that a text is cut as its beginning is, but for a token which crosses the
border. A tokenizer that cuts "ab" and "a|bc" breaks this where no token begins with "ab" and is
longer; such texts are then credited to other paths than theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from jaxrl.data.spelling import Spelling
from jaxrl.losses.cells import OTHERS, WORDS
from jaxrl.types import Continues


class Joining:
    """The tokens of one vocabulary that begin with others."""

    def __init__(self, spelling: Spelling, cells: np.ndarray, ends: Sequence[int]):
        """
        Args:
            cells: [V] of each token (`losses.cells`).
            ends: tokens that end a completion.
        """
        self.bytes = spelling.bytes
        self._begin_with = spelling.begin_with
        self.cells: list[int] = cells.tolist()
        no_text = spelling.special_ids | set(ends)
        self.is_text = [bool(b) and i not in no_text for i, b in enumerate(self.bytes)]
        """Of each token."""
        self._after: dict[tuple[int, bool], int] = {}
        self._joins: dict[int, bool] = {}

    def goes_on(self, text: bytes) -> bool:
        """Whether a token begins with this."""
        return next(self._begin_with(text), None) is not None

    def longer(self, text: bytes, cell: int | None) -> set[int]:
        """The tokens that begin with a text and are longer; of a cell, where one is given."""
        known, cells = len(self.cells), self.cells
        found = (i for i in self._begin_with(text) if i < known and len(self.bytes[i]) > len(text))
        return {i for i in found if cell is None or cells[i] == cell}

    def after(self, token: int, of_its_cell: bool) -> int:
        """Bits of the bytes that follow a token in longer ones, and of the cells that no byte
        tells; 0 where there are none."""
        key = token, of_its_cell
        if key not in self._after:
            own = self.bytes[token]
            longer = self.longer(own, self.cells[token] if of_its_cell else None)
            bits = sum(1 << byte for byte in {self.bytes[i][len(own)] for i in longer})
            self._after[key] = bits | (1 << OTHERS if bits else 0)
        return self._after[key]

    def always_joins(self, token: int) -> bool:
        """Whether it never says a token where one of its cell that is longer could follow: each
        byte that follows it in a longer one makes a token with it."""
        if token not in self._joins:
            own = self.bytes[token]
            longer = {self.bytes[i] for i in self.longer(own, self.cells[token])}
            self._joins[token] = {text[: len(own) + 1] for text in longer} <= longer
        return self._joins[token]


class Path:
    """The tokens of one text, read from the left, and what is known of them at the borders of
    stretches. The arrays are fields of a `TokenAlignment`."""

    def __init__(self, joining: Joining, tokens: Sequence[int]):
        self.joining, self.tokens = joining, tokens
        self.cells = np.full(len(tokens), -1)
        self.ends = np.full(len(tokens), Continues.NONE, np.int32)
        self.left_out = np.zeros((len(tokens), WORDS), np.int32)
        self._first: dict[int, int] = {}  # the cells that tokens are known to be of, by place
        self._read = 0
        self._open: list[tuple[int, bytes]] = []  # places, and the text since then

    def read(self, count: int) -> bool:
        """Reads so many tokens in all. Whether no token would have joined what follows with more
        than the last of them."""
        for place in range(self._read, count):
            token, joining = self.tokens[place], self.joining
            if not joining.is_text[token]:
                self._open = []
                continue
            own = joining.bytes[token]
            longer = ((start, text + own) for start, text in self._open)
            self._open = [one for one in longer if joining.goes_on(one[1])]
            self._open.append((place, own))
        self._read = count
        return len(self._open) < 2 or not any(
            self.joining.longer(text, self._first.get(start))
            for start, text in self._open
            if start < count - 1
        )

    def begin(self, place: int, cell: int, left_out: int) -> None:
        """A stretch begins at this token, with a cell (or -1, or `losses.cells.LEFT_OUT`) and the
        bits of the cells that are left out."""
        self.cells[place] = cell
        if left_out:
            self.left_out[place] = words(left_out)
        if cell >= 0:
            self._first[place] = cell

    def end(self) -> int:
        """A stretch ends with the last token that was read; the bits of what would follow it in a
        longer one."""
        place = self._read - 1
        if not self.joining.is_text[self.tokens[place]]:
            return 0
        of_its_cell = place in self._first
        bits = self.joining.after(self.tokens[place], of_its_cell)
        if bits:
            self.ends[place] = Continues.OF_A_CELL if of_its_cell else Continues.ANY
        return bits


@lru_cache(maxsize=4096)
def words(bits: int) -> np.ndarray:
    """[W] int32; not to be written to."""
    return np.frombuffer(bits.to_bytes(4 * WORDS, "little"), "<i4")
