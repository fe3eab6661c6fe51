"""Verifiers: right, wrong, and not to be judged."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from jaxrl.data.example import Example
from jaxrl.data.source import open_source
from jaxrl.data.thoughts import CHANNELS, THOUGHTS
from jaxrl.data.tokenizer import decode_text
from jaxrl.errors import UserError
from jaxrl.rewards.answers import Number, last_boxed, last_number, marked_answer, whole_number
from jaxrl.rewards.functions import FORMAT, find
from jaxrl.rewards.reward_pool import Item, ItemSource, RewardPool
from jaxrl.rewards.verifiers import VERIFIERS, verifier
from jaxrl.sampling.partial_completion import until_stop
from jaxrl.types import Completion


def score(name: str, completion: str, answer: str | None, **columns) -> float | None:
    return verifier(name)(completion, Example("p", answer=answer, columns=columns))


@pytest.mark.parametrize("name", sorted(set(VERIFIERS)))
def test_no_answer_is_not_a_wrong_answer(name):
    if name == "math":
        pytest.importorskip("math_verify")
    assert score(name, "42", None) is None


def two(completion, prompt):
    return 2.0


def text(completion, prompt):
    return "1"


def nan(completion, prompt):
    return float("nan")


def fails(completion, prompt):
    return 1 / 0


@pytest.mark.parametrize("own", [two, text, nan, fails])
def test_what_a_verifier_of_one_s_own_does_wrong_is_told(own, monkeypatch):
    monkeypatch.setitem(VERIFIERS, "own", own)
    said = "ZeroDivisionError" if own is fails else "from 0 to 1"
    with pytest.raises(UserError, match=f"data.verifier=own, .*'42'.*{said}"):
        score("own", "42", "42")


def test_a_verifier_of_one_s_own_is_a_reward_function_too(monkeypatch):
    """In a process of its own, which knows only what comes with jaxrl."""
    monkeypatch.setitem(VERIFIERS, "half", lambda completion, prompt: len(completion) / 2)
    items = [Item("", said, None, {}) for said in ("a", "bc")]
    with RewardPool([find("half")], workers=1, timeout=30, startup=60) as pool:
        assert pool.judge(0, items).result().values == [0.5, 1.0]


def test_unknown_verifier_names_the_near_one():
    with pytest.raises(UserError, match="did you mean number"):
        verifier("numbers")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12+3=15", "15"),
        ("x=-3", "-3"),
        ("it is \u22127.", "-7"),
        ("about $1,234,567.50 today", "1234567.5"),
        ("1, 2", "2"),
        ("so 3/4.", "3/4"),
        ("60/3 = 20", "20"),
        ("\\frac{3}{4}", "3/4"),
        ("2.5e-3", "0.0025"),
        ("-.5", "-1/2"),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == Number(Fraction(value))


@pytest.mark.parametrize("text", ["", "no number", "3/0", "1" * 5000, "5-3", "(4)-3", "5 + 3"])
def test_no_last_number(text):
    assert last_number(text) is None


PIECES = ("12 345", "₹1,23,456", "3,14", "0,5", "1.234,56", "1'234", "1’234", "3-4 days", "1.2.3")


@pytest.mark.parametrize("text", PIECES)
def test_no_piece_of_a_number_is_taken_for_it(text):
    """Neither by the verifiers of numbers nor as a word; a thin space groups thousands."""
    for piece in re.findall(r"\d+", text):
        for said in (text, f"It is {text}.", f"The answer is {text} in all."):
            assert score("number", said, piece) == 0, said
        assert score("contains", f"It is {text}.", piece) == ("-" in text)
    assert score("number", "It is 12\u202f345 euros.", "12345") == 1
    assert score("number", "In all\n48 + 24 = 72\n345", "345") == 1


def test_a_huge_exponent_is_not_computed():
    assert last_number("1e999999999") is None


def test_whole_number():
    assert whole_number(" $1,000 ") == Number(Fraction(1000), unit="$")
    assert whole_number("10%") == Number(Fraction(10), percent=True)
    assert whole_number("10 apples") is None
    assert whole_number("2024-11-03") is None


def test_number():
    assert score("number", "The sum is 1,234.50", "1234.5") == 1
    assert score("number", "= 0.75", "3/4") == 1
    assert score("number", "0.3333333", "1/3") == 1
    assert score("number", "0.333", "1/3") == 0
    assert score("number", "10000001", "10000002") == 0
    assert score("number", "none", "3") == 0
    assert score("number", "42 or 43", "42") == 0
    assert score("number", "3", "three") is None


def test_exact_and_contains():
    assert score("exact", " blue\n", "blue") == 1
    assert score("exact", "It is blue", "blue") == 0
    assert score("contains", "It is Blue.", "blue") == 1
    assert score("contains", "bluebell", "blue") == 0
    assert score("contains", "costs 3.5 (net)", "3.5 (net)") == 1
    assert score("contains", "anything", " ") == 0
    for said in ("It is 12.5", "It is -12", "It is 3,120", "0.12"):
        assert score("contains", said, "12") == score("contains", said, "120") == 0
    for said in ("12.", "on 2024-12-03", "(12)", "1 12 5", "12, 5", "a 12-year-old"):
        assert score("contains", said, "12") == 1


def test_boxed():
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} then \boxed{2") == "1"
    assert score("boxed", r"\boxed{0.5}", r"\boxed{\frac{1}{2}}") == 1
    assert score("boxed", r"\boxed{x + 1}", "x+1") == 1
    assert score("boxed", "x+1", "x+1") == 0


def test_math():
    pytest.importorskip("math_verify")
    assert score("math", r"so \boxed{\frac{1}{2}}", "0.5") == 1
    assert score("math", "The answer is $2x + 2$", r"$2(x+1)$") == 1
    assert score("math", "The answer is 3", "4") == 0


def test_arithmetic_judges_its_own_completions():
    source = open_source("arithmetic")
    for i in range(20):
        example = source[i]
        assert verifier("auto")(example.completion, example) == 1
        assert verifier("auto")(example.completion + "1", example) == 0


@pytest.mark.parametrize(
    ("answer", "right"), [("12", r"\boxed{12}"), ("3.5", "3.5"), ("Paris",) * 2]
)
def test_a_column_of_one_s_own_chooses_no_task(answer, right):
    """A `task` is a common name of a column, and `arithmetic` a common value."""
    for said, verdict in ((right, 1), ("=3", 0)):
        assert score("auto", said, answer, task="arithmetic") == verdict


def test_reasoning_gym_judges_its_own_answers():
    pytest.importorskip("reasoning_gym")
    source = open_source("reasoning_gym/chain_sum:max_terms=2", split="eval")
    example = source[0]
    right = example.answer
    auto = verifier("auto")
    assert auto(right, example) == 1
    assert auto(f"I think <answer> {right} </answer>, not 5.", example) == 1
    assert auto(f"The sum is {int(right):,}.", example) == 1
    assert auto(f"{right}, no: {int(right) + 1}", example) < 0.5
    assert auto("", example) == 0
    positive = next(row for row in map(source.__getitem__, range(20)) if int(row.answer) > 0)
    assert auto(f"It is {positive.answer}.", positive) == 1
    assert auto(f"It is 1.5,{positive.answer}.", positive) < 0.5


def test_reasoning_gym_tasks_with_many_right_answers():
    pytest.importorskip("reasoning_gym")
    example = open_source("reasoning_gym/graph_color:size=20")[0]
    assert example.answer is None
    # A text that its scorer cannot read is a wrong answer, not an error.
    assert verifier("auto")("no idea {", example) == 0


def test_auto_for_plain_rows():
    assert score("auto", "It is 42", "42") == 1
    assert score("auto", "blue", "blue") == 1
    assert score("auto", "It is blue", "blue") == 0


@pytest.mark.parametrize("name", ["auto", "boxed", "contains", "exact", "math", "number"])
def test_a_completion_that_begins_in_thoughts_answers_behind_them(name):
    """The prompt's template has opened `<think>`: one that was cut off before `</think>` is no
    answer, whatever it says."""
    if name == "math":
        pytest.importorskip("math_verify")
    answer = Example("p", answer="42")
    right = r"\boxed{42}" if name == "boxed" else "42"
    judge, nothing = verifier(name), np.zeros(0)

    def inside(text):
        completion = Completion((), nothing, nothing, "stop", text, opening="<think>\n")
        return judge(completion.whole_text, answer)

    assert inside(right) == 0 and judge(right, answer) == 1
    assert inside(rf"so \boxed{{42}}, or 41?</think>{right}") == 1
    assert inside(r"so 42, \boxed{42}</think>41 \boxed{41}") == 0


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("opens", "closes"),
    [
        *THOUGHTS.items(),
        CHANNELS,
        ("<|channel|>analysis<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
    ],
)
def test_thoughts_are_cut_where_their_tags_are_special_tokens_too(opens, closes, special):
    """All other special tokens are left out."""
    tags = re.findall(r"<\|?/?[a-z:_]+\|?>|\[.+\]|<\|[A-Z_]+\|>", opens + closes)
    tokenizer = tiny_tokenizer(extra=tuple(tags) if special else ())
    judge, answer = verifier("exact"), Example("p", answer="41")
    for text, score in (
        (f"{opens}Is it 42?{closes}<|im_start|>41", 1),
        (f"{closes}41", 1),
        (f"{opens}41", 0),
        ("41<|im_start|>", 1),
    ):
        assert judge(decode_text(tokenizer, tokenizer(text)["input_ids"]), answer) == score, text


def test_the_closing_tag_that_a_stop_string_took_is_judged():
    said = "<think>hm</think>\n<answer>x+1</answer>"
    text = until_stop(f"{said} or so", ("</answer>",))
    assert re.search(FORMAT, text) and marked_answer(text) == "x+1"


def test_a_completion_that_is_not_judged_in_time_is_wrong() -> None:
    """It cannot escape its 0; the failure is counted all the same."""
    pytest.importorskip("math_verify")
    source = ItemSource("math", "math", option="verifier")
    with RewardPool([source], workers=1, timeout=2, startup=120) as pool:
        items = [
            Item("", r"\boxed{\prod_{k=1}^{10^7} k}", "5", {}),
            Item("", "5", "5", {}),
        ]
        scores = pool.judge(0, items).result()
    assert scores.values == [0.0, 1.0]
    assert [failure.kind for failure in scores.failures.values()] == ["timeout"]
