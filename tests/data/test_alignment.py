"""Completions in the tokens of another tokenizer: every byte is in one stretch of both, whatever
the text and the tokenizers."""

import itertools

import numpy as np
import pytest
from byte_tokenizers import BYTES, END, LLAMA, OTHER, WORDS, byte_level, made, sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxrl.data.alignment import Aligner, Speaker
from jaxrl.data.batch import DATA, make_rollout
from jaxrl.errors import UserError
from jaxrl.losses.cells import LEFT_OUT, LONGER
from jaxrl.types import Aligned, Completion, Continues, Prompt

NONE = Aligned.NOT


def speaker(tokenizer, more=0):
    return Speaker(tokenizer, len(tokenizer) + more, (tokenizer.eos_token_id,))


PAIRS = {
    "bytes, words": (BYTES, WORDS),
    "words, other": (WORDS, OTHER),
    "other, words": (OTHER, WORDS),
    "words, llama": (WORDS, LLAMA),
    "llama, words": (LLAMA, WORDS),
    "words, words": (WORDS, WORDS),
}
TEXTS = [
    "the year 1987, the other",
    "   ",
    " the  the   the\n\n\tthe",
    "naïve 日本語 🤗 the",
    "<think>the</think> </s> the",
    "x",
    "",
]


def check(aligner, tokens, row):
    """Every stretch spells the same bytes in both."""
    ours, theirs = aligner._ours.bytes, aligner._theirs.bytes
    borders = [*np.flatnonzero(row.starts), len(row.tokens)]
    spelt = {
        int(start): b"".join(theirs[t] for t in row.tokens[start:end])
        for start, end in itertools.pairwise(borders)
    }
    at = 0
    while at < len(tokens):
        if row.kinds[at] == NONE:
            at += 1
            continue
        end = at + 1
        while end < len(tokens) and row.kinds[end] == Aligned.INSIDE:
            end += 1
        same = {int(i) for i in row.index[at:end]}
        assert len(same) == 1 and row.kinds[at] != Aligned.INSIDE
        first = same.pop()
        assert b"".join(ours[t] for t in tokens[at:end]).strip() == spelt[first].strip()
        if row.kinds[at] == Aligned.EXACT:
            assert end == at + 1 and row.tokens[first] == aligner.to_teacher[tokens[at]]
        at = end


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ended", [True, False])
def test_every_byte_is_in_one_stretch_of_both(pair, text, ended):
    student, teacher = map(speaker, PAIRS[pair])
    aligner = Aligner(student, teacher)
    tokens = aligner.student_tokens(text)
    tokens = [*tokens, student.end] if ended else tokens
    (row,) = aligner.rows([tokens], 100)
    check(aligner, tokens, row)
    assert (row.kinds != NONE).all()
    if student.tokenizer is teacher.tokenizer:
        assert row.tokens == tokens and (row.kinds == Aligned.EXACT).all()
    if ended:
        assert row.tokens[-1] == teacher.end and row.kinds[-1] == Aligned.EXACT


def kinds(student, teacher, tokens, **how):
    aligner = Aligner(speaker(student), speaker(teacher))
    (row,) = aligner.rows([tokens], how.pop("max_tokens", 100), **how)
    check(aligner, tokens, row)
    return row.kinds.tolist(), row.tokens


def spelt(tokenizer, *texts):
    return [tokenizer.convert_tokens_to_ids(text) for text in texts]


def test_what_the_tokenizers_cut_differently_is_a_stretch():
    """1987 is 19|8|7 in one and 1|98|7 in the other."""
    found, theirs = kinds(WORDS, OTHER, spelt(WORDS, "the", "19", "8", "7"))
    assert found == [Aligned.START, Aligned.START, Aligned.INSIDE, Aligned.EXACT]
    assert theirs == spelt(OTHER, "t", "he", "1", "98", "7")


def test_tokens_that_are_not_as_the_tokenizer_would_cut_are_one_stretch():
    found, theirs = kinds(WORDS, WORDS, spelt(WORDS, "t", "h", "e", "x"))
    assert found == [Aligned.START, Aligned.INSIDE, Aligned.INSIDE, Aligned.EXACT]
    assert theirs == spelt(WORDS, "the", "x")


def test_a_space_that_a_tokenizer_puts_before_a_text_is_not_another():
    """ " the" is one token of SentencePiece, whose first space stands for that of the text."""
    for student in (WORDS, LLAMA):
        aligner = Aligner(speaker(student), speaker(LLAMA))
        tokens = aligner.student_tokens(" the 19")
        (row,) = aligner.rows([tokens], 9)
        assert row.tokens[:1] == spelt(LLAMA, "▁the") and row.cells[0] >= 0


def test_pieces_that_a_user_defined_are_spelt_as_the_others():
    """Gemma has two spaces, and the end of a line, as added tokens that are not special."""
    gemma = sentencepiece("▁▁", "the", "th", added=("▁▁", "\n"))
    aligner = Aligner(speaker(BYTES), speaker(gemma))
    tokens = aligner.student_tokens("x  the\nx")
    (row,) = aligner.rows([tokens], 20)
    check(aligner, tokens, row)
    assert (row.kinds != NONE).all()
    assert aligner.to_teacher[BYTES.convert_tokens_to_ids("Ċ")] == gemma.convert_tokens_to_ids("\n")


def test_a_token_that_the_teacher_s_model_has_not_ends_what_is_read():
    short = Speaker(WORDS, len(WORDS) - 1, (WORDS.eos_token_id,))
    last = WORDS.convert_ids_to_tokens(len(WORDS) - 1)  # ï
    aligner = Aligner(speaker(BYTES), short)
    tokens = aligner.student_tokens("xï")
    assert last == "Ã¯" and aligner.rows([tokens], 9)[0].kinds.tolist() == [1, 0, 0]


def test_half_a_character_at_the_end_is_not_aligned():
    (tokens,) = [[*spelt(BYTES, "t"), *BYTES("日")["input_ids"][:2]]]
    assert kinds(BYTES, WORDS, tokens)[0] == [Aligned.EXACT, NONE, NONE]
    ended = [*tokens, BYTES.eos_token_id]
    assert kinds(BYTES, WORDS, ended)[0] == [Aligned.EXACT, NONE, NONE, NONE]


def test_what_a_limit_cuts_is_not_aligned():
    tokens = spelt(WORDS, "the", "the", "x", END)
    found, theirs = kinds(WORDS, BYTES, tokens, max_tokens=4)
    assert found == [Aligned.START, NONE, NONE, NONE] and len(theirs) == 4
    whole, _ = kinds(WORDS, BYTES, tokens, max_tokens=8)
    assert whole == [Aligned.START, Aligned.START, Aligned.EXACT, Aligned.EXACT]


def test_completions_that_no_policy_sampled_have_exact_tokens_only():
    found, _ = kinds(WORDS, BYTES, spelt(WORDS, "the", "x", END), sampled=False)
    assert found == [NONE, Aligned.EXACT, Aligned.EXACT]


def test_a_special_token_of_the_student_is_text_to_the_teacher():
    """Its name is no special token of the teacher, even where the teacher has one of this name."""
    student = byte_level(special=("<a>",))
    for teacher in (byte_level(), byte_level(special=("<a>",))):
        tokens = spelt(student, "<a>", "x", END)
        found, theirs = kinds(student, teacher, tokens)
        assert found == [Aligned.START, Aligned.EXACT, Aligned.EXACT]
        assert theirs == spelt(teacher, "<", "a", ">", "x", END)


def test_a_text_normalised_away_is_not_aligned_from_there():
    inner = Tokenizer(models.WordLevel({END: 0, "a": 1, "b": 2}, unk_token=END))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    found, _ = kinds(BYTES, made(inner), spelt(BYTES, "a", "b", "B", "a"))
    assert found == [Aligned.EXACT, Aligned.EXACT, NONE, NONE]


def test_the_ends_of_two_models_are_one_token():
    """Whatever their names, and although each has another token of the other's name."""
    student = Speaker(BYTES, len(BYTES), (BYTES.eos_token_id,))
    other = byte_level(special=("<end>",))
    (end,) = spelt(other, "<end>")
    aligner = Aligner(student, Speaker(other, len(other), (end,)))
    assert aligner.to_teacher[student.end] == end
    assert aligner.cells.teacher.cells[end] == student.end
    assert other.eos_token_id not in aligner.to_teacher
    assert (aligner.to_teacher >= 0).all()  # the 256 bytes and the end


def test_a_token_that_only_one_has_is_in_the_cell_of_its_beginning():
    aligner = Aligner(speaker(WORDS), speaker(OTHER))

    def cell(text, of=WORDS, cells=aligner.cells.student.cells):
        name = WORDS.convert_ids_to_tokens(int(cells[of.convert_tokens_to_ids(text)]))
        return name

    assert cell("t") == "t" and cell("th") == "t" and cell("19") == "1" and cell("ĠĠ") == "Ġ"
    theirs = {"of": OTHER, "cells": aligner.cells.teacher.cells}
    assert cell("he", **theirs) == "h" and cell("Ġthe", **theirs) == "Ġthe"  # both have this one
    assert cell("98", **theirs) == "9" and cell("<think>", **theirs) == "<"
    assert aligner.cells.size == len(WORDS) + 1
    number = np.arange(len(WORDS))
    common = aligner.to_teacher >= 0
    mine, its, bits = aligner.cells
    np.testing.assert_array_equal(mine.cells[common], number[common])
    np.testing.assert_array_equal(its.cells[aligner.to_teacher[common]], number[common])
    assert mine.common.tolist() == common.tolist() and its.common.sum() == common.sum()
    assert bits[WORDS.convert_tokens_to_ids("t")] == ord("t")


def test_rows_without_a_token_are_in_the_last_cell():
    """And the teacher's in none where the student has no such row."""
    aligner = Aligner(speaker(BYTES, 7), speaker(WORDS, 5))
    last = aligner.cells.size - 1
    assert (aligner.to_teacher[-7:] == -1).all() and (
        aligner.cells.student.cells[-7:] == last
    ).all()
    assert (aligner.cells.teacher.cells[-5:] == last).all()
    without = Aligner(speaker(BYTES), speaker(WORDS, 5)).cells
    assert (without.teacher.cells[-5:] == without.size).all()


def test_a_token_that_is_no_text_is_in_the_stretch_of_the_one_before():
    """The student may sample a row of its head for which its tokenizer has no token."""
    aligner = Aligner(speaker(WORDS, 7), speaker(WORDS))
    (row,) = aligner.rows([[*spelt(WORDS, "the"), len(WORDS) + 3, *spelt(WORDS, "x", END)]], 9)
    assert row.kinds.tolist() == [Aligned.START, Aligned.INSIDE, Aligned.EXACT, Aligned.EXACT]


def test_a_rollout_is_read_in_the_teacher_s_tokens():
    aligner = Aligner(speaker(WORDS), speaker(BYTES))
    answers = [spelt(WORDS, "the", END), spelt(WORDS, "x", "19", "19")]
    prompts = [Prompt(i, (1,), "p", teacher_tokens=(4, 5)) for i in range(2)]
    groups = [[Completion(tuple(a), np.zeros(len(a)), np.zeros(len(a)), "stop")] for a in answers]
    limits = {"pad_id": 0, "max_prompt_tokens": 8, "max_new_tokens": 8, "row_multiple": 4}
    rollout = make_rollout(prompts, groups, policy_version=3, **limits)
    read = aligner.read(rollout, 8, 12)
    count, width = rollout.sequences.loss_mask.shape
    theirs = read.sequences.loss_mask
    assert theirs.shape[0] == count == 4 and theirs.sum(-1).tolist() == [4, 5, 0, 0]
    tokens = read.sequences.tokens[:2, -theirs.shape[1] :][theirs[:2]]
    assert tokens.tolist() == spelt(BYTES, "t", "h", "e", END, "x", "1", "9", "1", "9")
    given = read.alignment
    assert given.kinds.shape == given.sizes.shape == given.index.shape == (count, width)
    assert given.sizes[:2].sum(-1).tolist() == [3, 5] and not given.kinds[2:].any()
    assert given.starts.shape == given.their_cells.shape == theirs.shape
    # "the" begins in the cell "t", "19" in the cell "1". Where the
    # student has said no longer one, no longer one follows, so that a sample tells which one does.
    named = {t: WORDS.convert_ids_to_tokens(t) for t in range(len(WORDS))}
    first = [named.get(int(c), int(c)) for c in given.cells.ravel() if c != -1]
    t, one = (LONGER - WORDS.convert_tokens_to_ids(name) for name in ("t", "1"))
    assert first == [t, END, "x", one, one]
    its = [named[c] for row in given.their_cells[:2] for c in row[row >= 0].tolist()]
    assert its == ["t", END, "x", "1", "1"]
    data = make_rollout(prompts, groups, policy_version=DATA, **limits)
    assert set(aligner.read(data, 8, 12).alignment.kinds[0].tolist()) == {NONE, Aligned.EXACT}


def test_what_a_teacher_samples_is_respelt():
    """With an end where the teacher's has one; it has none at a stop string."""
    aligner = Aligner(speaker(WORDS), speaker(BYTES))

    def respelt(*tokens, most=8):
        given = Completion(tokens, np.zeros(2), np.zeros(2), "stop", "the 19")
        return aligner.in_the_students_tokens(given, most)

    found = respelt(7, BYTES.eos_token_id)
    assert found.tokens == tuple(spelt(WORDS, "the", "Ġ", "19", END)) and found.text == "the 19"
    cut = respelt(7, BYTES.eos_token_id, most=2)
    assert cut.tokens == found.tokens[:2] and cut.finish_reason == "length"
    assert respelt(7, 8).tokens == found.tokens[:-1]


def test_tokens_are_sorted_by_what_begins_with_them():
    spelling = Aligner(speaker(WORDS), speaker(OTHER))._ours
    rank, last = spelling.spans(len(WORDS))
    for token in ("t", "th", "the", "1", "\u0120", "x"):
        (i,) = spelt(WORDS, token)
        own = spelling.bytes[i]
        begin = {k for k, b in enumerate(spelling.bytes[: len(WORDS)]) if b.startswith(own)}
        begin -= spelling.special_ids
        assert set(np.flatnonzero((rank >= rank[i]) & (rank <= last[i]))) == begin
        assert set(spelling.begin_with(own)) == begin


def test_a_border_that_a_token_from_further_back_would_have_crossed_is_none():
    """After t and h the teacher's tokenizer would have said "the": that no e follows is known to it
    and not to a student of bytes. So h and what follows it are one stretch."""
    aligner = Aligner(speaker(BYTES), speaker(byte_level(("h", "e"), ("t", "he"))))
    (row,) = aligner.rows([spelt(BYTES, "t", "h", "x", "t", END)], 20)
    assert row.kinds.tolist() == [
        Aligned.EXACT,
        Aligned.START,
        Aligned.INSIDE,
        Aligned.EXACT,
        Aligned.EXACT,
    ]
    assert row.cells[1] == row.their_cells[1] == LEFT_OUT
    # What follows the first t is known to be no token "the", and so is what follows the second.
    bits = [int.from_bytes(words.tobytes(), "little") for words in row.left_out]
    h = 1 << ord("h") | 1 << 256
    assert bits == [0, h, 0, 0, h]
    assert (
        row.their_ends.tolist() == [Continues.OF_A_CELL, 0, 0, Continues.OF_A_CELL, 0]
        and not row.ends.any()
    )


def test_a_tokenizer_that_does_not_spell_is_refused():
    inner = Tokenizer(models.WordPiece({"[UNK]": 0, END: 1}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"teacher's\s+tokenizer .*WordPiece.*teacher.tokenizer=st"):
        Aligner(speaker(BYTES), speaker(made(inner)))
