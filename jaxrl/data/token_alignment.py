"""A teacher with another tokenizer: completions in its tokens, aligned with the student's by bytes.

Both tokenizers cut the same bytes. Between two neighbouring borders that both have lies a *span*:
one or more tokens of each that stand for the same bytes, the shortest such pieces of the text (GOLD
of TRL merges tokens likewise). At the beginning of a span both models predict what follows the same
text; what the student learns there and from whole spans is in `losses.token_spans`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, takewhile
from typing import NamedTuple

import numpy as np

from jaxrl.data.batch import DATA, pack_sequences, padded_width, right_padded
from jaxrl.data.chat_template import turn_tokens
from jaxrl.data.spelled_tokens import encode_marked, mark_tokens
from jaxrl.data.thoughts import between_openings, opening_of
from jaxrl.data.tokenizer import Tokenizer, adds_space, decode_text, encode_after
from jaxrl.errors import UserError
from jaxrl.losses.token_spans import Outcomes
from jaxrl.types import Aligned, Completion, Prompt, Rollout, TokenAlignment

BYTE = re.compile("<0x([0-9A-F]{2})>")


class ModelTokenizer(NamedTuple):
    """The tokenizer of one of the two models."""

    tokenizer: Tokenizer
    vocab_size: int
    """Rows of the model's embedding: ids from there on do not exist."""
    end_ids: tuple[int, ...]
    """Tokens that end its completions."""

    @property
    def end_id(self) -> int:
        """Returns the tokenizer's own end token, where it is one of them, else the first."""
        eos = self.tokenizer.eos_token_id
        return eos if eos in self.end_ids else self.end_ids[0]


@dataclass(frozen=True)
class AlignedCompletion(TokenAlignment):
    """The alignment of one completion: arrays [C] and [C']."""

    tokens: list[int]
    """The completion in the teacher's tokens."""


class TokenBytes:
    """The bytes that the tokens of a tokenizer stand for: of byte-level BPE, of SentencePiece with
    a fallback to bytes, or of tokens that are their own text."""

    def __init__(self, model: ModelTokenizer, role: str):
        """Raises UserError for a tokenizer whose tokens do not tell which bytes they stand for;
        `role` is whose it is."""
        self.tokenizer = tokenizer = model.tokenizer
        to_bytes = _bytes_of_token(tokenizer, role)
        added = tokenizer.added_tokens_decoder
        turns = turn_tokens(tokenizer)
        self.special = {
            token.content: i
            for i, token in added.items()
            if token.special or token.content in turns
        }
        """Content -> id of the tokens that text never becomes."""
        self.unflagged = [name for name, i in self.special.items() if not added[i].special]
        """Those that the tokenizer by itself reads in a text."""
        self.special_ids = frozenset(self.special.values())
        names = {i: name for name, i in tokenizer.get_vocab().items()}
        # Added tokens are written as text; those of SentencePiece, unless special, as its pieces.
        plain = self.special_ids | (set() if to_bytes is _sentencepiece else set(added))
        self.bytes = tuple(
            (str.encode if i in plain else to_bytes)(names.get(i, ""))
            for i in range(max(model.vocab_size, 1 + max(names)))
        )
        """By id; empty where there is no such token."""
        self.sizes = np.array([len(token) for token in self.bytes], np.int32)
        """[V] number of bytes of each token."""
        self.ids: dict[bytes, int] = {}
        """Bytes -> the token that stands for exactly these, special tokens left out."""
        for i, token in enumerate(self.bytes):
            # SentencePiece has each ASCII character twice: `<0x41>` is for what has no other.
            spare = token in self.ids and BYTE.fullmatch(names.get(i, ""))
            if token and i not in self.special_ids and not spare:
                self.ids[token] = i

    def join(self, tokens: Sequence[int]) -> bytes:
        """Returns the bytes of a row of tokens."""
        return b"".join(self.bytes[token] for token in tokens)

    def outcomes(self, shared: Mapping[bytes, int], others: int) -> np.ndarray:
        """Returns [V] int32: for each token the number of the longest of the `shared` byte strings
        that it begins with; `others` for special tokens and where there is none."""

        def longest(token: bytes) -> int:
            starts = (token[:end] for end in range(len(token), 0, -1))
            return next((shared[start] for start in starts if start in shared), others)

        tokens = enumerate(self.bytes)
        return np.array(
            [others if i in self.special_ids else longest(token) for i, token in tokens], np.int32
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of texts that continue a sequence; special tokens' names are text."""
        if not texts:
            return []
        if not adds_space(self.tokenizer):
            return self._encode(texts)
        # The space that is put before each text takes the place of the text's own, where it begins
        # with one; else the text is tokenised behind a line break, which is a token by itself.
        (line_break,) = self._encode(["\n"])
        prefixed = [text[1:] if text.startswith(" ") else "\n" + text for text in texts]
        rows = []
        for text, ids in zip(texts, self._encode(prefixed), strict=True):
            skipped = 0 if text.startswith(" ") else len(line_break)
            if ids[:skipped] != line_break[:skipped]:  # a token of several line breaks
                (ids,) = self._encode([text])
                skipped = 0
            rows.append(ids[skipped:])
        return rows

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        rows = [list(ids) for ids in self.tokenizer(list(texts), **options)["input_ids"]]
        for at, text in enumerate(texts):
            if any(name in text for name in self.unflagged):
                names = frozenset(self.special)
                rows[at] = [*encode_marked(self.tokenizer, mark_tokens(text, names), names)]
        return rows


class Aligner:
    """Aligns completions in the tokens of a student with those of a teacher.

    Raises:
        UserError: a tokenizer whose tokens do not tell which bytes they stand for.
    """

    def __init__(self, student: ModelTokenizer, teacher: ModelTokenizer):
        self.student, self.teacher = student, teacher
        self.student_bytes = TokenBytes(student, "student")
        self.teacher_bytes = TokenBytes(teacher, "teacher")
        ours, theirs = self.student_bytes, self.teacher_bytes
        pairs = [(i, theirs.ids.get(token, -1)) for token, i in ours.ids.items()]
        pairs += [(i, theirs.special.get(name, -1)) for name, i in ours.special.items()]
        to_teacher = np.full(student.vocab_size, -1, np.int32)
        for our_id, their_id in pairs:
            if our_id < student.vocab_size and their_id < teacher.vocab_size:
                to_teacher[our_id] = their_id
        # How each of them ends a completion is the same, whatever the names.
        to_teacher[to_teacher == teacher.end_id] = -1
        to_teacher[student.end_id] = teacher.end_id
        self.to_teacher = to_teacher
        """[V] int32: the teacher's id of each of the student's tokens, -1 where it has none."""
        v, common = student.vocab_size, np.flatnonzero(to_teacher >= 0)
        shared = {ours.bytes[i]: int(i) for i in common if i not in ours.special_ids}
        our_outcomes = ours.outcomes(shared, others=v)[:v]
        their_outcomes = theirs.outcomes(shared, others=v)[: teacher.vocab_size]
        our_outcomes[common], their_outcomes[to_teacher[common]] = common, common
        if not (our_outcomes == v).any():
            # A student without other tokens learns how the teacher chooses among the shared ones.
            their_outcomes[their_outcomes == v] = v + 1
        self.outcomes = Outcomes(our_outcomes, their_outcomes)
        """numpy arrays."""

    def read(
        self, rollout: Rollout, max_prompt_tokens: int, max_tokens: int, width_multiple: int = 2
    ) -> Rollout:
        """Returns the rollout with prompts and completions in the teacher's tokens, and its
        `alignment`.

        Of completions that no policy sampled only the beginnings of spans are compared: such texts
        are no estimate of a divergence.

        Args:
            max_prompt_tokens: limit of the teacher's prompts.
            max_tokens: limit of completions in the teacher's tokens; the rest of a longer one is
                not aligned.
            width_multiple: of both widths.
        """
        sampled = rollout.policy_version != DATA
        rows = self.align([row.tokens for row in rollout.completions], max_tokens, sampled)
        prompts = [prompt.teacher_tokens or () for prompt in rollout.prompts]
        count, width = rollout.sequences.loss_mask.shape
        tokens = [row.tokens for row in rows]
        longest = max(map(len, prompts), default=0)
        teacher_width = padded_width(max(map(len, tokens), default=0), max_tokens, width_multiple)
        sequences = pack_sequences(
            prompts,
            tokens,
            prompt_width=padded_width(longest, max_prompt_tokens, width_multiple),
            completion_width=teacher_width,
            pad_id=0,  # the mask leaves padding out
            row_multiple=count,
        )

        def padded(name: str) -> np.ndarray:
            values = [getattr(row, name) for row in rows]
            if name == "starts":
                return right_padded(values, (count, teacher_width), bool, 0)
            return right_padded(values, (count, width), np.int32, 0)

        alignment = TokenAlignment(*(padded(field.name) for field in fields(TokenAlignment)))
        return replace(rollout, sequences=sequences, alignment=alignment)

    def align(
        self, completions: Sequence[Sequence[int]], max_tokens: int, sampled: bool = True
    ) -> list[AlignedCompletion]:
        """Returns the alignment of each completion, given in the student's tokens."""
        ended = [len(c) > 0 and c[-1] in self.student.end_ids for c in completions]
        bare = [c[: len(c) - end] for c, end in zip(completions, ended, strict=True)]
        encoded = self.teacher_bytes.encode(
            [_decodable(self.student_bytes.join(tokens)) for tokens in bare]
        )
        known = self.teacher.vocab_size  # a tokenizer may have tokens that its model has not
        teacher_rows = (list(takewhile(lambda i: i < known, row)) for row in encoded)
        rows = zip(completions, ended, teacher_rows, strict=True)
        return [self._align(list(c), end, theirs, max_tokens, sampled) for c, end, theirs in rows]

    def _align(
        self, ours: list[int], ended: bool, theirs: list[int], max_tokens: int, sampled: bool
    ) -> AlignedCompletion:
        bare = ours[: len(ours) - ended]
        our_text, their_text = self.student_bytes.join(bare), self.teacher_bytes.join(theirs)
        our_sizes, their_sizes = self.student_bytes.sizes[bare], self.teacher_bytes.sizes[theirs]
        bare_text = their_text.removeprefix(b" ")  # SentencePiece puts a space before a text
        if bare_text != their_text and (
            bare_text == our_text
            or _common_bytes(bare_text, our_text) > _common_bytes(their_text, our_text)
        ):
            their_text, their_sizes = their_text[1:], np.append(their_sizes[0] - 1, their_sizes[1:])
        agreed = _common_bytes(our_text, their_text)
        sizes = np.append(our_sizes, np.zeros(int(ended), int))
        if ended:  # as if the end were one more byte
            agreed += agreed == len(our_text) == len(their_text)
            end = int(self.to_teacher[ours[-1]])
            theirs = [*theirs, end if end in self.teacher.end_ids else self.teacher.end_id]
            our_sizes, their_sizes = np.append(our_sizes, 1), np.append(their_sizes, 1)
        theirs, their_sizes = theirs[:max_tokens], their_sizes[:max_tokens]
        our_borders, their_borders = our_sizes.cumsum(), their_sizes.cumsum()
        shared = np.intersect1d(our_borders, their_borders)
        shared = shared[shared <= agreed]
        # The number of each token's span; the last number is of all that is not aligned.
        our_span, their_span = (np.searchsorted(shared, x) for x in (our_borders, their_borders))
        spans = np.arange(len(shared) + 1)
        index = np.searchsorted(their_span, spans)[our_span]
        single = np.bincount(np.append(our_span, their_span), minlength=len(spans)) == 2
        exact = single[our_span] & (self.to_teacher[ours] == np.array([*theirs, 0])[index])
        start, rest = Aligned.START, Aligned.INSIDE
        if not sampled:
            start, rest = Aligned.START_ONLY, Aligned.NOT
        kinds = np.where(_first_of_span(our_span), start, rest)
        aligned = our_span < len(shared)
        return AlignedCompletion(
            tokens=theirs,
            kinds=np.where(aligned, np.where(exact, Aligned.EXACT, kinds), Aligned.NOT),
            sizes=sizes,
            index=np.where(aligned, index, 0),
            starts=_first_of_span(their_span),
        )

    def student_tokens(self, text: str) -> list[int]:
        """Returns a text in the student's tokens, without an end."""
        return self.student_bytes.encode([text])[0]

    def retokenize(self, tokens: Sequence[int]) -> tuple[list[int], str | None]:
        """Returns a completion in the student's tokens, and what of it they cannot spell: the
        completion ends there. That is a special token which the student has not, or "" for bytes
        that are no text; None: they spell all of it.

        Args:
            tokens: the teacher's.
        """
        ours, theirs = self.student_bytes, self.teacher_bytes
        ended = len(tokens) > 0 and tokens[-1] in self.teacher.end_ids
        found = list[int]()
        for special, run in groupby(tokens[: len(tokens) - ended], theirs.special_ids.__contains__):
            if special:
                for name in map(theirs.bytes.__getitem__, run):
                    our_id = ours.special.get(name.decode(), ours.ids.get(name))
                    if our_id is None:
                        return found, name.decode()
                    found.append(our_id)
                continue
            written = theirs.join(list(run))
            if not found and adds_space(theirs.tokenizer):
                written = written.removeprefix(b" ")
            text = _decodable(written)
            found += self.student_tokens(text)
            if text.encode() != written:
                return found, ""
        return [*found, self.student.end_id] if ended else found, None


class TeacherSamples:
    """Brings what a teacher samples to a student with other tokens or another chat template."""

    def __init__(self, student: Tokenizer, aligner: Aligner | None, max_new_tokens: int):
        """
        Args:
            aligner: of a teacher with other tokens.
            max_new_tokens: longest completion in the student's tokens.
        """
        self._student, self._aligner, self._most = student, aligner, max_new_tokens
        self._teacher = student if aligner is None else aligner.teacher.tokenizer
        self._named = set[str]()

    def learned(
        self, prompt: Prompt, samples: Sequence[Completion], notify: Callable[[str], object]
    ) -> list[Completion]:
        """Returns completions that the teacher sampled of a prompt as the student learns them:
        after its own prompt, in its tokens. Log-probs of changed ones are 0 and mean nothing.

        Args:
            notify: gets a message about each kind of token that the student cannot spell, once.
        """
        ours = theirs = opening_of(self._student, prompt.tokens)
        if prompt.teacher_generation_tokens is not None:
            theirs = opening_of(self._teacher, prompt.teacher_generation_tokens)
        elif self._aligner is None:
            return list(samples)
        found = []
        for sample in samples:
            before, tokens = between_openings(self._teacher, sample.tokens, theirs, ours)
            lost = None
            if self._aligner is not None:
                tokens, lost = self._aligner.retokenize(tokens)
            if lost and lost not in self._named:
                self._named.add(lost)
                notify(
                    f"distill.seq_kd: the teacher writes {lost!r}, a special token that the student"
                    " has not: such samples are learned up to it"
                )
            tokens = (*encode_after(self._student, before), *tokens)
            kept = tokens[: self._most]
            unknown = np.zeros(len(kept), np.float32)
            whole = lost is None and len(kept) == len(tokens)
            reason = sample.finish_reason if whole else "length"
            text = decode_text(self._student, kept)
            found.append(Completion(kept, unknown, unknown, reason, text, opening=ours))
        return found


def _first_of_span(numbers: np.ndarray) -> np.ndarray:
    return np.diff(numbers, prepend=-1) > 0


def _common_bytes(first: bytes, second: bytes) -> int:
    return len(os.path.commonprefix([first, second]))


def _decodable(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()


def _bytes_of_token(tokenizer: Tokenizer, role: str) -> Callable[[str], bytes]:
    """Returns token -> bytes, by how the tokenizer decodes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str())["decoder"]
    steps = [decoder] if decoder is None or "decoders" not in decoder else decoder["decoders"]
    kinds = {None if step is None else step["type"] for step in steps}
    if backend is not None and kinds <= {"ByteLevel"}:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        return lambda token: bytes(alphabet[c] for c in token if c in alphabet)
    if backend is not None and (kinds == {None} or kinds <= {"Fuse"}):
        return str.encode
    if backend is not None and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece
    raise UserError(
        f"teacher.tokenizer=own compares tokens by their bytes, which the {role}'s tokenizer"
        f" ({type(tokenizer).__name__}, decoder"
        f" {', '.join(sorted(str(kind) for kind in kinds))}) does not define: byte-level BPE,"
        " SentencePiece and character tokenizers do; choose another model, or"
        " teacher.tokenizer=student"
    )


def _sentencepiece(token: str) -> bytes:
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
