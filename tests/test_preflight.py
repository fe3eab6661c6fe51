"""Two models may be distilled into each other only where their tokens mean the same."""

from __future__ import annotations

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl.data.tokenizer import check_same_vocabulary
from jaxrl.errors import UserError

ROWS = 320
FIRST_EXTRA = 259
"""256 bytes and 3 special tokens come before."""


def refusal(student, teacher, student_rows=ROWS, teacher_rows=ROWS, **eos) -> str:
    with pytest.raises(UserError) as error:
        check_same_vocabulary(student, teacher, student_rows, teacher_rows, **eos)
    return str(error.value)


def test_same_vocabulary_with_different_padding_rows():
    assert check_same_vocabulary(tiny_tokenizer(), tiny_tokenizer(), 272, 320) == 272
    assert check_same_vocabulary(tiny_tokenizer(), tiny_tokenizer(), 320, 259) == 259


def test_differing_ids_are_named_and_counted():
    ours = tiny_tokenizer(extra=("<a>", "<b>"))
    swapped = tiny_tokenizer(extra=("<b>", "<a>"))
    told = refusal(ours, swapped)
    assert "2 ids differ" in told
    assert f"{FIRST_EXTRA} is '<a>' for the student, '<b>' for the teacher" in told


def test_many_differing_ids_are_cut_short():
    told = refusal(tiny_tokenizer(extra=tuple(f"<{i}>" for i in range(9))), tiny_tokenizer())
    assert "9 ids differ" in told and "for the teacher; and 4 more" in told
    assert f"{FIRST_EXTRA} is '<0>' for the student, no token for the teacher" in told
    assert f"{FIRST_EXTRA + 4} is" in told and f"{FIRST_EXTRA + 5} is" not in told


def test_a_token_beyond_the_shared_rows_is_refused():
    told = refusal(tiny_tokenizer(), tiny_tokenizer(), student_rows=258, teacher_rows=320)
    assert "the student has 258 embedding rows" in told and "1 tokens" in told
    assert "258 '<|im_end|>'" in told


def test_eos_ids_must_agree():
    told = refusal(tiny_tokenizer(), tiny_tokenizer(eos="<|endoftext|>"))
    assert "EOS ids: student 258, teacher 256" in told
    one = tiny_tokenizer()
    told = refusal(one, one, student_eos=(258,), teacher_eos=(258, 256))
    assert "student [258], teacher [256, 258]" in told
    check_same_vocabulary(one, one, ROWS, ROWS, student_eos=(256, 258), teacher_eos=(258, 256))


def test_chat_templates_must_agree():
    told = refusal(tiny_tokenizer(), tiny_tokenizer(CHATML.replace("im_start", "im_begin")))
    at = CHATML.index("im_start") + len("im_")
    assert "chat templates" in told and f"from character {at} on" in told
    assert "the teacher has none" in refusal(tiny_tokenizer(), tiny_tokenizer(None))


def test_without_a_tokenizer_nothing_can_be_compared():
    assert "teacher.model has no tokenizer" in refusal(tiny_tokenizer(), None)
    assert "student.model has no tokenizer" in refusal(None, tiny_tokenizer())
