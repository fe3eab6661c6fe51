"""Completions in the tokens of another tokenizer: every byte is in one span of both, whatever
the text and the tokenizers."""

import itertools

import numpy as np
import pytest
from byte_tokenizers import BYTES, END, LLAMA, OTHER, WORDS, byte_level, made, sentencepiece
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxrl.data.batch import DATA, make_rollout
from jaxrl.data.token_alignment import Aligner, ModelTokenizer, TeacherSamples
from jaxrl.errors import UserError
from jaxrl.types import Aligned, Completion, Prompt

NONE = Aligned.NOT


def model_tokenizer(tokenizer, more=0):
    return ModelTokenizer(tokenizer, len(tokenizer) + more, (tokenizer.eos_token_id,))


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
    """Every span spells the same bytes in both."""
    ours, theirs = aligner.student_bytes.bytes, aligner.teacher_bytes.bytes
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
def test_every_byte_is_in_one_span_of_both(pair, text, ended):
    student, teacher = map(model_tokenizer, PAIRS[pair])
    aligner = Aligner(student, teacher)
    tokens = aligner.student_tokens(text)
    tokens = [*tokens, student.end_id] if ended else tokens
    (row,) = aligner.align([tokens], 100)
    check(aligner, tokens, row)
    assert (row.kinds != NONE).all()
    if student.tokenizer is teacher.tokenizer:
        assert row.tokens == tokens and (row.kinds == Aligned.EXACT).all()
    if ended:
        assert row.tokens[-1] == teacher.end_id and row.kinds[-1] == Aligned.EXACT


def kinds(student, teacher, tokens, **how):
    aligner = Aligner(model_tokenizer(student), model_tokenizer(teacher))
    (row,) = aligner.align([tokens], how.pop("max_tokens", 100), **how)
    check(aligner, tokens, row)
    return row.kinds.tolist(), row.tokens


def spelt(tokenizer, *texts):
    return [tokenizer.convert_tokens_to_ids(text) for text in texts]


def test_what_the_tokenizers_cut_differently_is_a_span():
    """1987 is 19|8|7 in one and 1|98|7 in the other."""
    found, theirs = kinds(WORDS, OTHER, spelt(WORDS, "the", "19", "8", "7"))
    assert found == [Aligned.START, Aligned.START, Aligned.INSIDE, Aligned.EXACT]
    assert theirs == spelt(OTHER, "t", "he", "1", "98", "7")


def test_tokens_that_are_not_as_the_tokenizer_would_cut_are_one_span():
    found, theirs = kinds(WORDS, WORDS, spelt(WORDS, "t", "h", "e", "x"))
    assert found == [Aligned.START, Aligned.INSIDE, Aligned.INSIDE, Aligned.EXACT]
    assert theirs == spelt(WORDS, "the", "x")


def test_a_space_that_a_tokenizer_puts_before_a_text_is_not_another():
    """ " the" is one token of SentencePiece, whose first space stands for that of the text."""
    for student in (WORDS, LLAMA):
        aligner = Aligner(model_tokenizer(student), model_tokenizer(LLAMA))
        tokens = aligner.student_tokens(" the 19")
        (row,) = aligner.align([tokens], 9)
        assert row.tokens[:1] == spelt(LLAMA, "▁the")


def test_pieces_that_a_user_defined_are_spelt_as_the_others():
    """Gemma has two spaces, and the end of a line, as added tokens that are not special."""
    gemma = sentencepiece("▁▁", "the", "th", added=("▁▁", "\n"))
    aligner = Aligner(model_tokenizer(BYTES), model_tokenizer(gemma))
    tokens = aligner.student_tokens("x  the\nx")
    (row,) = aligner.align([tokens], 20)
    check(aligner, tokens, row)
    assert (row.kinds != NONE).all()
    assert aligner.to_teacher[BYTES.convert_tokens_to_ids("Ċ")] == gemma.convert_tokens_to_ids("\n")


def test_a_token_that_the_teacher_s_model_has_not_ends_what_is_read():
    short = ModelTokenizer(WORDS, len(WORDS) - 1, (WORDS.eos_token_id,))
    last = WORDS.convert_ids_to_tokens(len(WORDS) - 1)  # ï
    aligner = Aligner(model_tokenizer(BYTES), short)
    tokens = aligner.student_tokens("xï")
    assert last == "Ã¯" and aligner.align([tokens], 9)[0].kinds.tolist() == [1, 0, 0]


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


def test_of_completions_that_no_policy_sampled_the_beginnings_of_spans_are_compared():
    aligner = Aligner(model_tokenizer(WORDS), model_tokenizer(OTHER))
    tokens = spelt(WORDS, "the", "19", "8", "7", END)
    (row,) = aligner.align([tokens], 100, sampled=False)
    only = Aligned.START_ONLY
    assert row.kinds.tolist() == [only, only, NONE, Aligned.EXACT, Aligned.EXACT]


def test_a_special_token_of_the_student_is_text_to_the_teacher():
    """Its name is no special token of the teacher, even where the teacher has one of this name."""
    student = byte_level(special=("<a>",))
    for teacher in (byte_level(), byte_level(special=("<a>",))):
        tokens = spelt(student, "<a>", "x", END)
        found, theirs = kinds(student, teacher, tokens)
        assert found == [Aligned.START, Aligned.EXACT, Aligned.EXACT]
        assert theirs == spelt(teacher, "<", "a", ">", "x", END)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_turn_token_that_is_not_flagged_special_is_text_to_the_teacher(make):
    teacher = make(("<", "u") if make is byte_level else "<u", added=("<user>", "<tag>"))
    teacher.chat_template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
    aligner = Aligner(model_tokenizer(BYTES), model_tokenizer(teacher))
    turn, tag = teacher.convert_tokens_to_ids(["<user>", "<tag>"])
    for text in ("the <user>", "<user> <user> <tag>", " <user>\n", "</s><user> <tag>"):
        tokens = BYTES(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        (row,) = aligner.align([tokens], 99)
        assert turn not in row.tokens and row.tokens.count(tag) == text.count("<tag>")
        assert teacher.decode(row.tokens).strip() == text.strip()
        assert "<tag>" in text or (row.kinds != NONE).all()
        found, rest = Aligner(model_tokenizer(teacher), model_tokenizer(BYTES)).retokenize(tokens)
        assert rest is None and turn not in found


def test_a_text_normalised_away_is_not_aligned_from_there():
    inner = Tokenizer(models.WordLevel({END: 0, "a": 1, "b": 2}, unk_token=END))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    found, _ = kinds(BYTES, made(inner), spelt(BYTES, "a", "b", "B", "a"))
    assert found == [Aligned.EXACT, Aligned.EXACT, NONE, NONE]


def test_the_ends_of_two_models_are_one_token():
    """Whatever their names, and although each has another token of the other's name."""
    student = ModelTokenizer(BYTES, len(BYTES), (BYTES.eos_token_id,))
    other = byte_level(special=("<end>",))
    (end,) = spelt(other, "<end>")
    aligner = Aligner(student, ModelTokenizer(other, len(other), (end,)))
    assert aligner.to_teacher[student.end_id] == end
    assert aligner.outcomes.teacher[end] == student.end_id
    assert other.eos_token_id not in aligner.to_teacher
    assert (aligner.to_teacher >= 0).all()  # the 256 bytes and the end


def test_a_token_that_only_one_has_is_in_the_outcome_of_its_beginning():
    aligner = Aligner(model_tokenizer(WORDS), model_tokenizer(OTHER))
    student, teacher = aligner.outcomes

    def outcome(token, tokenizer=WORDS, outcomes=student):
        return WORDS.convert_ids_to_tokens(int(outcomes[tokenizer.convert_tokens_to_ids(token)]))

    assert outcome("t") == "t" and outcome("th") == "t"
    assert outcome("19") == "1" and outcome("ĠĠ") == "Ġ"
    of_teacher = {"tokenizer": OTHER, "outcomes": teacher}
    assert outcome("he", **of_teacher) == "h" and outcome("98", **of_teacher) == "9"
    assert outcome("Ġthe", **of_teacher) == "Ġthe"  # both have this one
    assert outcome("<think>", **of_teacher) == "<"
    assert aligner.outcomes.size == len(WORDS) + 1
    number = np.arange(len(WORDS))
    common = aligner.to_teacher >= 0
    np.testing.assert_array_equal(student[common], number[common])
    np.testing.assert_array_equal(teacher[aligner.to_teacher[common]], number[common])


def test_rows_without_a_token_are_in_the_last_outcome():
    """And the teacher's in none where the student has no such row."""
    aligner = Aligner(model_tokenizer(BYTES, 7), model_tokenizer(WORDS, 5))
    last = aligner.outcomes.size - 1
    assert (aligner.to_teacher[-7:] == -1).all()
    assert (aligner.outcomes.student[-7:] == last).all()
    assert (aligner.outcomes.teacher[-5:] == last).all()
    without = Aligner(model_tokenizer(BYTES), model_tokenizer(WORDS, 5)).outcomes
    assert (without.teacher[-5:] == without.size).all()


def test_a_token_that_is_no_text_is_in_the_span_of_the_one_before():
    """The student may sample a row of its head for which its tokenizer has no token."""
    aligner = Aligner(model_tokenizer(WORDS, 7), model_tokenizer(WORDS))
    (row,) = aligner.align([[*spelt(WORDS, "the"), len(WORDS) + 3, *spelt(WORDS, "x", END)]], 9)
    assert row.kinds.tolist() == [Aligned.START, Aligned.INSIDE, Aligned.EXACT, Aligned.EXACT]


def test_a_rollout_is_read_in_the_teacher_s_tokens():
    aligner = Aligner(model_tokenizer(WORDS), model_tokenizer(BYTES))
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
    assert given.starts.shape == theirs.shape
    assert given.index[:2, :2].tolist() == [[0, 3], [0, 1]] and given.index[1, 2] == 3
    assert given.starts[:2].sum(-1).tolist() == [2, 3]
    data = make_rollout(prompts, groups, policy_version=DATA, **limits)
    read = aligner.read(data, 8, 12).alignment
    assert read.kinds[0, :3].tolist() == [Aligned.START_ONLY, Aligned.EXACT, NONE]


def learned(student, teacher, tokens, most=99, reason="stop"):
    """What the student learns of a sample, and what is told of it twice."""
    aligner, notes = Aligner(model_tokenizer(student), model_tokenizer(teacher)), []
    samples = TeacherSamples(student, aligner, most)
    none = np.zeros(len(tokens), np.float32)
    given = [Completion(tuple(tokens), none, none, reason)] * 2
    found, again = samples.learned(Prompt(0, (1,), ""), given, notes.append)
    assert found.tokens == again.tokens and len(found.logprobs) == len(found.tokens)
    return found, notes


def test_what_a_teacher_samples_is_retokenized():
    """With an end where the teacher's has one; it has none at a stop string."""
    text = spelt(BYTES, *"theĠ19")
    found, _ = learned(WORDS, BYTES, [*text, BYTES.eos_token_id])
    assert found.tokens == tuple(spelt(WORDS, "the", "Ġ", "19", END)) and found.text == "the 19"
    cut, _ = learned(WORDS, BYTES, [*text, BYTES.eos_token_id], most=2)
    assert cut.tokens == found.tokens[:2] and cut.finish_reason == "length"
    bare, _ = learned(WORDS, BYTES, text)
    assert bare.tokens == found.tokens[:-1] and bare.finish_reason == "stop"


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "words, words" not in pair])
def test_a_student_learns_the_bytes_of_the_teacher_and_no_part_of_a_character(pair):
    student, teacher = PAIRS[pair]
    text = "the naïve 日本 🤗"
    tokens = Aligner(*map(model_tokenizer, (teacher, student))).student_tokens(text)
    aligner = Aligner(*map(model_tokenizer, (student, teacher)))
    for end in range(len(tokens) + 1):
        found, notes = learned(student, teacher, tokens[:end], reason="length")
        written = aligner.teacher_bytes.join(tokens[:end])
        kept = aligner.student_bytes.join(found.tokens)
        assert kept.decode().lstrip() == written.decode(errors="ignore").lstrip() and not notes


def test_special_tokens_are_learned_as_themselves_or_end_what_is_learned():
    teacher = byte_level(special=("<think>", "<|channel|>", "[CALL]"))
    student = byte_level(("t", "h"), special=("[CALL]",), added=("<think>",))
    tokens = spelt(teacher, "<think>", "a", "[CALL]", "b", END)
    found, notes = learned(student, teacher, tokens)
    assert not notes and found.tokens == tuple(spelt(student, "<think>", "a", "[CALL]", "b", END))
    tokens = spelt(teacher, "a", "[CALL]", "<|channel|>", "b", END)
    found, (note,) = learned(student, teacher, tokens)
    assert found.tokens == tuple(spelt(student, "a", "[CALL]")) and "'<|channel|>'" in note
    assert found.finish_reason == "length"


OPENINGS = ("", "<think>\n", "<think>", "[THINK]")
SAMPLES = ("<think>\nhm\n</think>\n\n4", "hm\n</think>\n\n4", "4", "")


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("theirs", OPENINGS)
@pytest.mark.parametrize("ours", OPENINGS)
def test_a_sample_stands_behind_the_students_prompt_as_behind_the_teachers(ours, theirs, same):
    """No thoughts are opened twice, or never closed."""
    merges = () if same else (("t", "h"), ("Ċ", "Ċ"))
    more = {"template": None, "extra": ("<think>", "[THINK]")}
    student, teacher = tiny_tokenizer(**more), tiny_tokenizer(merges=merges, **more)
    aligner = None if same else Aligner(model_tokenizer(student), model_tokenizer(teacher))
    samples, none = TeacherSamples(student, aligner, 99), np.zeros(0, np.float32)
    generation = None if ours == theirs else teacher(f"a{theirs}")["input_ids"]
    prompt = Prompt(0, student(f"a{ours}")["input_ids"], "", teacher_generation_tokens=generation)
    for text in SAMPLES:
        given = Completion(teacher(text)["input_ids"], none, none, "length", text)
        (found,) = samples.learned(prompt, [given], print)
        whole, learned = theirs + text, ours + student.decode(list(found.tokens))
        if ours and not whole.startswith(ours.strip()):  # empty thoughts, as templates write them
            close, space = (
                ours.strip().replace("<", "</").replace("[", "[/"),
                ours[len(ours.strip()) :],
            )
            whole = f"{ours}{space}{close}{2 * space}{whole}"
        tag = ours.strip()
        assert learned.startswith(ours)
        assert learned.removeprefix(tag).lstrip() == whole.removeprefix(tag).lstrip()
        if whole.startswith(ours):
            assert learned == whole


def test_a_tokenizer_that_does_not_spell_is_refused():
    inner = Tokenizer(models.WordPiece({"[UNK]": 0, END: 1}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"teacher's\s+tokenizer .*WordPiece.*teacher.tokenizer=st"):
        Aligner(model_tokenizer(BYTES), model_tokenizer(made(inner)))
