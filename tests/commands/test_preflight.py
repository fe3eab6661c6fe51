"""Two models may be distilled into each other only where their tokens mean the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl.data.tokenizer import check_same_prompts, check_same_vocabulary, encode_prompt
from jaxrl.errors import UserError
from jaxrl.types import Prompt

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


def chat_prompt(tokenizer, *contents):
    chat = tuple({"role": "user", "content": content} for content in contents)
    return Prompt(0, encode_prompt(tokenizer, chat), contents[-1], None, None, {"messages": chat})


def test_chat_templates_must_render_the_prompts_alike():
    ours, other = tiny_tokenizer(), tiny_tokenizer(CHATML.replace("assistant", "model"))
    prompt = chat_prompt(ours, "a")
    with pytest.raises(UserError) as error:
        check_same_prompts(ours, other, [prompt])
    at = len("<|im_start|>user\na<|im_end|>\n<|im_start|>")
    told = f"from character {at} on, student 'assistant\\n', teacher 'model\\n'"
    assert told in str(error.value) and "data.system_prompt" in str(error.value)
    with pytest.raises(UserError, match="teacher's tokenizer has no chat template"):
        check_same_prompts(ours, tiny_tokenizer(None), [prompt])


def test_chat_templates_may_differ_in_what_no_prompt_uses():
    tail = "{% if messages|length > 1 %}!{% endif %}"
    ours, other = tiny_tokenizer(), tiny_tokenizer(CHATML + tail)
    check_same_prompts(ours, other, [chat_prompt(ours, "a"), chat_prompt(ours, "b")])
    with pytest.raises(UserError, match="make different prompts"):
        check_same_prompts(ours, other, [chat_prompt(ours, "a"), chat_prompt(ours, "a", "b")])
    text = replace(chat_prompt(ours, "a", "b"), tokens=encode_prompt(ours, "a text"))
    check_same_prompts(ours, other, [text, replace(text, columns={"messages": 3})])


def test_without_a_tokenizer_nothing_can_be_compared():
    assert "teacher.model has no tokenizer" in refusal(tiny_tokenizer(), None)
    assert "student.model has no tokenizer" in refusal(None, tiny_tokenizer())
