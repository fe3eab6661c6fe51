r"""Answers as MATH, GSM8K, AIME and others spell them: right ones accepted, wrong ones refused.

The tables are judged by the verifier `math`; rows whose answer is one number by `number` too. What
stands in no sentence is put into \boxed{}.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from cases import and_slow

from jaxrl.data.chat_template import THOUGHTS as THOUGHTS_OF_FAMILIES
from jaxrl.data.example import Example
from jaxrl.rewards.answers import marked_answer, read_number
from jaxrl.rewards.verifiers import VERIFIERS, after_thoughts

CASES = Path(__file__).parents[1] / "cases" / "answers.jsonl"
Spellings = dict[str, tuple[list[str], list[str]]]
"""Answer -> right and wrong spellings, or completions."""


def cases_of(part: str) -> list[dict[str, Any]]:
    """The cases of a part of answers.jsonl."""
    every = map(json.loads, CASES.read_text(encoding="utf-8").splitlines())
    return [case for case in every if case["part"] == part]


def spellings(part: str) -> Spellings:
    return {case["answer"]: (case["right"], case["wrong"]) for case in cases_of(part)}


def judged(part: str) -> list[tuple[str, str, int]]:
    return [(case["completion"], case["answer"], case["verdict"]) for case in cases_of(part)]


NUMBERS, EXPRESSIONS = spellings("numbers"), spellings("expressions")
SENTENCES, MATHS_ONLY = judged("sentences"), judged("sentences for math")
UNREAD = [case["answer"] for case in cases_of("unread")]
"""Answers that are none."""
NO_NUMBERS = [case["answer"] for case in cases_of("no number")]
"""Answers that the verifier `number` cannot judge by, though most have digits."""
REFUSED = {
    tuple(pair)
    for case in cases_of("refused, though math-verify accepts it")
    for pair in case["pairs"]
}
"""Wrong (answer, spelling)."""
FORMS = (
    r"\boxed{%s}",
    "#### %s",
    "%s",
    "The answer is %s.",
    "$%s$",
    r"\boxed{$%s$}",
    "It is $%s$.",
)
THOUGHTS = "<think>\nIt may be \\boxed{7} or #### 8.\nThe answer is 9.</think>\n\n"
EQUAL = (
    {r"\frac{1}{2}", "0.5", r"50\%"},
    {".125", r"12.5\%"},
    {r"5\text{ cm}", "x=5"},
    {"2x+3", "y=2x+3"},
    {"x>2", r"(2,\infty)"},
    {"1,2", "(1,2)", "x=1, x=2"},  # as math-verify has it: without brackets it may be either
)
"""Keys of the tables that are right answers for one another."""


def judge(name: str, completion: str, answer: str | float | None) -> float | None:
    return VERIFIERS[name](completion, Example("p", answer=answer))  # type: ignore[arg-type]


def rows(table: Spellings) -> Iterator[tuple[str, str, int]]:
    """(completion, answer, verdict)."""
    for answer, verdicts in table.items():
        for spellings, verdict in zip(verdicts, (1, 0), strict=True):
            for spelling in spellings:
                yield rf"so \boxed{{{spelling}}}", answer, verdict


def wrong(
    name: str, table: Iterable[tuple[str, str, int]]
) -> list[tuple[str, str, int, float | None]]:
    """The rows with another verdict than theirs, and that."""
    judged = [(*row, judge(name, row[0], row[1])) for row in table]
    return [row for row in judged if row[2] != row[3]]


def test_there_are_many_rows() -> None:
    assert len([*rows(NUMBERS), *rows(EXPRESSIONS), *SENTENCES, *MATHS_ONLY]) > 800


def test_numbers_by_number() -> None:
    assert not wrong("number", rows(NUMBERS))
    assert not wrong("number", [row for row in SENTENCES if row[1] != "1,2"])


def test_numbers_by_math() -> None:
    pytest.importorskip("math_verify")
    assert not wrong("math", rows(NUMBERS))
    assert not wrong("math", SENTENCES)


@pytest.mark.parametrize("part", and_slow([0], [1, 2]))
def test_expressions_by_math(part: int) -> None:
    """Every third row, so that each answer has some in the default suite."""
    pytest.importorskip("math_verify")
    assert not wrong("math", [*rows(EXPRESSIONS), *MATHS_ONLY][part::3])


@pytest.mark.parametrize("name", ["math", "number"])
def test_completions(name: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    table = spellings(f"completions by {name}").items()
    assert len(table) > 50
    for verdict in (1, 0):
        for answer, completions in table:
            texts = completions[1 - verdict]
            assert not [text for text in texts if judge(name, text, answer) != verdict], answer


def test_boxed_accepts_no_wrong_one() -> None:
    """It knows numbers and texts alone, so that it may refuse right expressions."""
    every = [*rows(NUMBERS), *rows(EXPRESSIONS)]
    assert not [row for row in wrong("boxed", every) if row[2] == 0]
    assert not wrong("boxed", [row for row in rows(NUMBERS) if row[2] == 1])


@pytest.mark.parametrize("part", and_slow([0], range(1, 8)))
def test_math_accepts_no_more_than_math_verify_but_what_that_cannot_read(part: int) -> None:
    """Every wrong spelling that math-verify accepts is in REFUSED. (What it refuses and is
    right are spellings that it does not read: `3pi`, `1 1/2`, `18 dollars`, 5 > x > 2.)"""
    math_verify = pytest.importorskip("math_verify")
    options: dict[str, Any] = {"parsing_timeout": None}
    for completion, answer, verdict in [*rows(NUMBERS), *rows(EXPRESSIONS)][part::8]:
        gold = math_verify.parse(answer if answer[0] == "$" else f"${answer}$", **options)
        found = math_verify.parse(completion, **options)
        if math_verify.verify(gold, found, timeout_seconds=None) and not verdict:
            assert (answer, completion[len(r"so \boxed{") : -1]) in REFUSED


def equal(a: str, b: str) -> bool:
    return a == b or any({a, b} <= one for one in EQUAL)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whole", and_slow([False], [True]), ids=["a form each", "all forms"])
def test_an_answer_is_right_for_itself_and_no_other_is_by_number(whole: bool, form: str) -> None:
    """The default suite has each pair of two answers in one of the forms, in turn."""
    pairs = itertools.product(enumerate(NUMBERS), enumerate((*NUMBERS, *EXPRESSIONS)))
    for (i, answer), (j, other) in pairs:
        if other == r"\text{June 20}":  # a sentence whose last number is 20
            continue
        its_turn = (i + j) % len(FORMS) == FORMS.index(form)
        if not (whole or its_turn or equal(answer, other)):
            continue
        for text in (form % other, f"  {THOUGHTS}{form % other}\n"):
            assert judge("number", text, answer) == equal(answer, other), (answer, text)
    for answer in NUMBERS:
        for spelled in (
            f" {answer}\n",
            f"{answer}.",
            f"${answer.strip('$')}$",
            f"6*7\n#### {answer}",
        ):
            assert judge("number", form % answer, spelled) == 1, spelled


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_right_for_itself_by_math(form: str) -> None:
    pytest.importorskip("math_verify")
    for answer in (*NUMBERS, *EXPRESSIONS):
        for text in (form % answer, f"  {THOUGHTS}{form % answer}\n"):
            assert judge("math", text, answer) == 1, (answer, text)
        for spelled in (
            f" {answer}\n",
            f"{answer}.",
            f"${answer.strip('$')}$",
            rf"so \boxed{{{answer}}}",
        ):
            assert judge("math", rf"\boxed{{{answer}}}", spelled) == 1, spelled


def off_diagonal(step: int) -> None:
    pytest.importorskip("math_verify")
    answers = (*NUMBERS, *EXPRESSIONS)
    for i, answer in enumerate(answers):
        for other in (*answers, *answers)[i + 1 : i + len(answers) : step]:
            found = judge("math", rf"\boxed{{{other}}}", answer)
            assert found == equal(answer, other), (answer, other)


def test_no_other_answer_is_right_by_math() -> None:
    off_diagonal(61)


@pytest.mark.slow
def test_no_other_answer_is_right_by_math_for_all_pairs() -> None:
    off_diagonal(1)


@pytest.mark.parametrize("answer", UNREAD)
def test_what_math_cannot_read_is_not_judged(answer: str) -> None:
    pytest.importorskip("math_verify")
    for completion in (r"\boxed{42}", rf"\boxed{{{answer}}}", "", answer):
        assert judge("math", completion, answer) is None


@pytest.mark.parametrize("answer", NO_NUMBERS)
def test_an_answer_that_is_no_number_is_not_judged_by_number(answer: str) -> None:
    for completion in ("42", rf"\boxed{{{answer}}}", answer, "5", ""):
        assert judge("number", completion, answer) is None


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_laws_of_all_verifiers(name: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    for completion in ("42", r"\boxed{42}", "<think>42", ""):
        for missing in (None, math.nan):
            assert judge(name, completion, missing) is None
    if name == "reasoning_gym":
        return
    right = r"\boxed{42}" if name == "boxed" else "42"
    assert judge(name, right, "42") == judge(name, f" \n{right}\n ", "42") == 1
    assert judge(name, THOUGHTS + right, "42") == 1
    assert judge(name, f"<think>{right}</think>", "42") == 0
    assert judge(name, f"<think>{right}", "42") == 0
    assert judge(name, f"{right}<think>or {right}", "42") == 0
    assert judge(name, "", "42") == 0


@pytest.mark.parametrize("name", ["exact", "contains", "number", "boxed", "math", "auto"])
def test_no_text_raises(name: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    draw = random.Random(7)
    pieces = r"\boxed{ } { \frac \sqrt $ $$ ( ) [ ] , . = < 1 2 1.5 x pi \pi ^ _ % \text{a}"
    pieces += r" #### is answer or and \pm : / - + ! \n \\ & é ½ ² \begin{pmatrix} \cup \infty"
    parts = [*pieces.split(" "), "\n", " ", "\x00", "\ud800"]
    for _ in range(150 if name == "math" else 1500):
        answer, completion = ("".join(draw.choices(parts, k=draw.randint(0, 9))) for _ in "ab")
        assert judge(name, completion, answer) in (None, 0.0, 1.0)


@pytest.mark.parametrize("name", ["contains", "number", "boxed", "auto"])
@pytest.mark.parametrize(("size", "most"), and_slow([(20_000, 10)], [(40_000, 30)]))
def test_long_texts_take_no_long(size: int, most: int, name: str) -> None:
    """A model that repeats itself must not stop the process that judges it."""
    pieces = [r"\boxed{", "<answer>", r"\[", r"\(", "$1 ", "$ 1", "$$", "1", " ", "####", "{", "}"]
    pieces += [
        r"\text{",
        r"\frac{1}",
        "answer is ",
        "1,",
        "1 ",
        "0.",
        "x=",
        "**",
        "*",
        "(",
        "#### 1\n",
    ]
    began = time.monotonic()
    for piece in pieces:
        assert judge(name, piece * (size // len(piece)), "42") == 0
    assert time.monotonic() - began < most  # 2 s of 40,000 here; a quadratic one takes minutes


def test_auto_takes_the_final_answer_of_whole_solutions() -> None:
    solution = "Natalia sold 48/2 = 24 clips in May.\nAltogether 48+24 = 72.\n#### 72"
    assert judge("auto", "She sold 72.", solution) == 1
    assert judge("auto", "48+24=72\n#### 72", solution) == 1
    assert judge("auto", "She sold 24 and 48.", solution) == 0
    assert judge("auto", solution.replace("72", "73"), solution) == 0
    worked = r"As $2\cdot 3=6$, the answer is $\boxed{2x+6}$."
    assert judge("auto", r"\boxed{2x + 6}", worked) == 1
    assert judge("auto", r"\boxed{2x+3}", worked) == 0
    assert judge("auto", "#### east", "He turns.\n#### east") == 1
    assert judge("auto", "3 queens", "3 kings") == 0  # texts, not the number 3
    assert judge("auto", "10 apples", "10 apples") == 1


def test_words_after_the_thoughts() -> None:
    assert judge("contains", "<think>Paris or Rome</think>It is Rome.", "Paris") == 0
    assert judge("contains", "<think>Paris or Rome</think>It is Rome.", "Rome") == 1
    assert judge("exact", "<think>Paris or Rome</think>\n\nRome\n", "Rome") == 1


def both(verifier: str, a: str, b: str) -> set[float | None]:
    return {judge(verifier, rf"\boxed{{{x}}}", y) for x, y in ((a, b), (b, a))}


@pytest.mark.parametrize("units", [case["same"] for case in cases_of("units")])
def test_units_are_compared_as_a_whole(units: list[str]) -> None:
    """Prefixes, what they are per, powers, and scales of degrees; without a unit it is right."""
    others = ["km/h", "m/s", "m", "°C", "°F", "GB", "kW", "MW", "kg", "s", "joule m"]
    first, *same = units
    for unit in (first, *same):
        for free in ("5", rf"5 {first}", "5 apples"):
            assert both("number", rf"5 {unit}", free) == {1.0}, (unit, free)
        different = [other for other in others if other not in units]
        for other in different:
            assert both("number", rf"5 {unit}", rf"5 {other}") == {0.0}, (unit, other)
    assert (
        both("number", "25 °C", "25 degrees") == {1.0} == both("number", "$5", "5 dollars per hour")
    )


@pytest.mark.parametrize("case", cases_of("read otherwise by math-verify"))
def test_what_the_reader_of_latex_takes_for_another(case: dict[str, Any]) -> None:
    pytest.importorskip("math_verify")
    assert both("math", case["a"], case["b"]) == {case["verdict"]}


@pytest.mark.parametrize("case", cases_of("stated"))
def test_a_stated_answer_begins_with_its_value(case: dict[str, Any]) -> None:
    rest, answer = case["rest"], case["answer"]
    for opening in (
        "The answer is ",
        "Answer: ",
        "The answer is: **",
        "It rains.\nSo the answer is ",
    ):
        assert not answer or judge("number", opening + rest, answer) == 1, rest
        for other in case["others"]:
            assert judge("number", opening + rest, other) == 0, (rest, other)


def test_formulas_that_are_joined_are_one_answer() -> None:
    pytest.importorskip("math_verify")
    for said in ("The solutions are $x=3$ and $x=5$.", "We get $3$, $4$ or $5$."):
        wanted = "3,5" if "x" in said else "3,4,5"
        assert judge("math", said, wanted) == 1 and judge("math", said, "5") == 0
    assert judge("math", "With $n=5$ and $m=7$.", "7") == 1


@pytest.mark.parametrize("case", cases_of("choices"))
def test_a_choice_is_what_a_completion_concludes(case: dict[str, Any]) -> None:
    pytest.importorskip("math_verify")
    for letter in "ABC":
        assert judge("math", case["completion"], letter) == (letter == case["answer"]), letter


@pytest.mark.parametrize(
    "label", ["(D) %s", "D. %s", "D) %s", r"\textbf{(D)}\ %s", r"\text{(D) } %s"]
)
def test_a_reference_answer_may_have_the_text_of_its_choice(label: str) -> None:
    pytest.importorskip("math_verify")
    for answer in (label % "15", label % "Paris"):
        for right in ("D", "(D)", r"\textbf{(D)}", "Option D", answer):
            assert judge("math", rf"\boxed{{{right}}}", answer) == 1, right
        for wrong in ("C", r"\text{(C)}", label % "16", answer.replace("D", "C")):
            assert judge("math", rf"\boxed{{{wrong}}}", answer) == 0, wrong


def test_a_double_factorial_is_no_factorial_of_a_factorial() -> None:
    pytest.importorskip("math_verify")
    assert both("math", "720", "3!!") == {0.0, None}


def test_the_marks() -> None:
    assert marked_answer(r"\boxed{1} \boxed{\{2\}}") == r"\{2\}"
    assert marked_answer(r"$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$") == "1, 2, 3"
    assert marked_answer("#### Step 1\ntext\n#### 42\nmore") == "42"
    assert marked_answer("#### Step 1\ntext") is None
    assert marked_answer(r"\boxed{1} {\boxed{2}} \boxed{3 \boxed{4}") == "4"
    assert marked_answer(r"\boxed{a\}b} {") == r"a\}b"
    assert after_thoughts("a</think> b") == "b"
    assert after_thoughts("<think>a") is None
    for opens, closes in THOUGHTS_OF_FAMILIES.items():
        assert after_thoughts(f"{opens}a{closes} b") == "b"
        assert after_thoughts(f"{opens}a") is after_thoughts(f"b{closes}c{opens}a") is None


def test_numbers_are_read_as_a_whole() -> None:
    for answer, value in (
        ("1{,}234.5", "2469/2"),
        (r"-1\frac{1}{4}", "-5/4"),
        ("2 million", "2e6"),
    ):
        number = read_number(answer)
        assert number is not None and number.value == Fraction(value)
    assert read_number("1" * 5000) is None
    assert read_number("1e9999") is None


@pytest.mark.parametrize(
    "opening", ["So", "It is", "We get", "Is it", "By adding,", "In total", "He has"]
)
def test_words_before_a_formula_change_nothing(opening: str) -> None:
    for formula, answer in ((r"\frac{-1}{2}", "-1/2"), (r"1{,}234", "1234"), ("2x+3", "2x+3")):
        verifiers = ("number", "math") if answer != "2x+3" else ("math",)
        for verifier in verifiers:
            for said in (f"{opening} ${formula}$", f"{opening} ${formula}$."):
                assert VERIFIERS[verifier](said, Example("", answer=answer)) == 1.0, (
                    verifier,
                    said,
                )
                assert VERIFIERS[verifier](said, Example("", answer="2")) == 0.0, (verifier, said)


@pytest.mark.parametrize("name", ["math", "number"])
def test_words_around_a_number_in_prose_make_another_of_it(name: str) -> None:
    """Wherever no box marks the answer, with and without a formula."""
    if name == "math":
        pytest.importorskip("math_verify")
    before = "not|negative|minus|half of|double|triple|twice|square root of|the cube root of|log of"
    before += "|log base|one less than|at least|more than|cannot be|never|the reciprocal of"
    after = "squared|cubed|halves|tenths|thirds|factorial|more than x|and a half|plus one|gross"
    after += "|score|bn|lakh|million|minus one|less than x|choose 2|mod 5"
    phrases = [f"{words} %s" for words in before.split("|")]
    phrases += [f"%s {words}" for words in after.split("|")]
    forms = ("The answer is %s.", "So the answer is **%s**.", "Answer: %s", "#### %s", "It is %s.")
    for phrase, form, number in itertools.product(phrases, forms, ("3", "$3$")):
        text = form % (phrase % number)
        assert judge(name, text, "3") == 0, text
    for text in ("The answer is negative 3.", "Answer: minus 3", r"\boxed{\text{negative }3}"):
        assert judge(name, text, "-3") == 1
    for text in ("It is not 4 but 3.", "It is 3 more.", "There are 3 of them.", "So 3 is it."):
        assert judge(name, text, "3") == 1, text
    assert judge(name, "There are 3 million people.", "3000000") == 1
    assert judge(name, r"The answer cannot be $\frac34$.", r"\frac{3}{4}") == 0
    assert judge(name, "It is not 42", "42") == 0
