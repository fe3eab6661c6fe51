"""The bytes that the tokens of a tokenizer stand for, so that tokenizers can be compared."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError

BYTE = re.compile("<0x([0-9A-F]{2})>")


class Spelling:
    """A tokenizer whose tokens spell text byte by byte: byte-level BPE, SentencePiece with
    fallback to bytes, or tokens that are their own text."""

    def __init__(self, tokenizer: Tokenizer, rows: int, who: str):
        """
        Args:
            rows: number of tokens of its model.
            who: whose tokenizer it is, for the error.

        Raises:
            UserError: a tokenizer whose tokens do not tell which bytes they stand for.
        """
        self.tokenizer = tokenizer
        spell = _speller(tokenizer, who)
        added = tokenizer.added_tokens_decoder
        self.special = {token.content: i for i, token in added.items() if token.special}
        """Content -> id of the tokens that text never becomes."""
        self.special_ids = frozenset(self.special.values())
        self._names = {i: token for token, i in tokenizer.get_vocab().items()}
        # Added tokens are written as text; those of SentencePiece, unless special, as its pieces.
        plain = self.special_ids if spell is _sentencepiece else self.special_ids | set(added)

        def spelt(i: int) -> bytes:
            name = self._names.get(i, "")
            return name.encode() if i in plain else spell(name)

        self.bytes = tuple(map(spelt, range(max(rows, 1 + max(self._names)))))
        """By id; empty where there is no such token."""
        self.lengths = np.array([len(token) for token in self.bytes], np.int32)
        """[V] bytes of each token."""
        self.ids = self._ids()
        """Bytes -> the token that stands for exactly these, special tokens left out."""

    @cached_property
    def _adds_space(self) -> bool:
        """Whether a space is put before each text, as SentencePiece does."""
        return self.spelt(self.tokenizer("x", add_special_tokens=False)["input_ids"]) == b" x"

    def _ids(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for i, token in enumerate(self.bytes):
            if token and i not in self.special_ids:
                # SentencePiece has each ASCII character twice: `<0x41>` is for what has no other.
                spare = BYTE.fullmatch(self._names.get(i, "")) is not None
                if token not in found or not spare:
                    found[token] = i
        return found

    @cached_property
    def sorted(self) -> tuple[list[bytes], np.ndarray]:
        """All tokens that are text in the order of their bytes, and their ids."""
        text = [i for i, token in enumerate(self.bytes) if token and i not in self.special_ids]
        ids = np.array(sorted(text, key=self.bytes.__getitem__), np.int32)
        return [self.bytes[i] for i in ids], ids

    def spans(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """[rows] int32 twice: the place of each token in that order, and of the last one that
        begins with it. Tokens that are no text come after all others."""
        names, ids = self.sorted
        rank, last = np.full(len(self.bytes), -1, np.int32), np.full(len(self.bytes), -1, np.int32)
        open_: list[int] = []  # places of the tokens that the one at hand begins with
        for place, name in enumerate([*names, b""]):
            while open_ and not (name and name.startswith(names[open_[-1]])):
                last[ids[open_.pop()]] = place - 1
            open_.append(place)
        rank[ids] = np.arange(len(ids))
        others = np.flatnonzero(rank < 0)
        rank[others] = last[others] = len(ids) + np.arange(len(others))
        return rank[:rows], last[:rows]

    def begin_with(self, start: bytes) -> Iterator[int]:
        """Ids of all tokens that begin with these bytes, these themselves first."""
        names, ids = self.sorted
        for place in range(bisect.bisect_left(names, start), len(names)):
            if not names[place].startswith(start):
                return
            yield int(ids[place])

    def cells(self, known: Mapping[bytes, int], none: int) -> np.ndarray:
        """[V] int32: for each token the number of the longest of `known` that it begins with, and
        `none` for special tokens and where there is no such."""

        def longest(token: bytes) -> int:
            starts = (token[:end] for end in range(len(token), 0, -1))
            return next((known[start] for start in starts if start in known), none)

        every = enumerate(self.bytes)
        found = [none if i in self.special_ids else longest(token) for i, token in every]
        return np.array(found, np.int32)

    def spelt(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.bytes[token] for token in tokens)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts that continue a sequence. What reads like a special token is text."""
        if not texts:
            return []
        if not self._adds_space:
            return self._encode(texts)
        # The space that is put before each text is its own, where it begins with one; else the
        # text is tokenised behind a line break, which is a token by itself.
        (border,) = self._encode(["\n"])
        given = [text[1:] if text.startswith(" ") else "\n" + text for text in texts]
        found = []
        for text, ids in zip(texts, self._encode(given), strict=True):
            behind = not text.startswith(" ")
            if behind and ids[: len(border)] != border:  # a token of several line breaks
                (ids,) = self._encode([text])
                behind = False
            found.append(ids[len(border) :] if behind else ids)
        return found

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]


def _speller(tokenizer: Tokenizer, who: str) -> Callable[[str], bytes]:
    """token -> bytes, by how the tokenizer decodes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
    steps = [decoder] if decoder is None or "decoders" not in decoder else decoder["decoders"]
    kinds = {None if step is None else step["type"] for step in steps}
    if backend is not None and kinds <= {"ByteLevel"}:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        return lambda token: bytes(alphabet[c] for c in token if c in alphabet)
    if backend is not None and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _fuse if kinds <= {"Fuse"} else _sentencepiece
    if backend is not None and kinds == {None}:
        return _fuse
    raise UserError(
        f"teacher.tokenizer=own compares tokens by the bytes that they stand for, which the {who}'s"
        f" tokenizer ({type(tokenizer).__name__}, decoder"
        f" {', '.join(sorted(str(kind) for kind in kinds))}) does not tell: byte-level BPE,"
        " SentencePiece and character tokenizers do; choose another model, or"
        " teacher.tokenizer=student"
    )


def _fuse(token: str) -> bytes:
    return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = BYTE.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()
