r"""Answers as MATH, GSM8K, AIME and others spell them: right ones accepted, wrong ones refused.

The tables are judged by the verifier `math`; rows whose answer is one number by `number` too. What
stands in no sentence is put into \boxed{}.
"""

from __future__ import annotations

import itertools
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

Spellings = dict[str, tuple[list[str], list[str]]]
"""Answer -> right and wrong spellings."""


def read(section: str) -> Spellings:
    """A section of answers.txt."""
    text = (Path(__file__).parent / "answers.txt").read_text(encoding="utf-8")
    table: Spellings = {}
    for line in text.partition(f"[{section}]\n")[2].partition("\n[")[0].splitlines():
        mark, rest = line[:1], line[2:]
        if mark == "=":
            right, wrong = table[rest] = [], []
        elif mark:
            {"+": right, "-": wrong}[mark].extend(rest.split("    "))
    return table


NUMBERS, EXPRESSIONS = read("numbers"), read("expressions")
SENTENCES = (
    # the last box, nested braces, the thoughts
    (r"\boxed{1} and then, after I had looked again, \boxed{42}", "42", 1),
    (r"\boxed{42} and then, after I had looked again, \boxed{1}", "42", 0),
    (r"So \boxed{3}. No: \boxed{42}", "42", 1),
    (r"\boxed{42}. Check: 6 * 7 = 42, and 100 > 42, see page 7", "42", 1),
    (r"\boxed{7}. It is not 42", "42", 0),
    (r"\boxed{\boxed{42}}", "42", 1),
    (r"\fbox{42}", "42", 1),
    (r"$\boxed{1}$ and $\boxed{2}$", "1,2", 1),
    (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1,2", 1),
    (r"$\boxed{1}$ and $\boxed{2}$", "2", 0),
    (r"\boxed{", "42", 0),
    (r"\boxed{42", "42", 0),
    (r"\boxed{}", "42", 0),
    (r"\boxed{\text{I do not know}} 42", "42", 0),
    (r"\boxed{???} so it is 42", "42", 0),
    (r"<think>\boxed{1}</think> \boxed{42}", "42", 1),
    (r"<think>\boxed{42}</think> I cannot tell.", "42", 0),
    (r"<think>\boxed{42}</think> \boxed{1}", "42", 0),
    (r"<think>so it is \boxed{42}", "42", 0),
    (r"so it is 7</think>The answer is 42.", "42", 1),
    (r"<think>a</think>\boxed{42}<think>or", "42", 0),
    ("<answer>42</answer>", "42", 1),
    (r"<answer>\boxed{42}</answer> of 50", "42", 1),
    ("<answer>41</answer> 42", "42", 0),
    # GSM8K
    ("6*7=42\n#### 42", "42", 1),
    ("#### 42\nThat is my answer to question 7.", "42", 1),
    ("#### 42 dollars", "42", 1),
    ("#### $1,234", "1234", 1),
    ("#### 41\nNot 42", "42", 0),
    ("#### Step 1\n6*7 is 42\n#### Result\nIt is 42.", "42", 1),
    # sentences
    ("The answer is 42.", "42", 1),
    ("The answer is **42**.", "42", 1),
    ("**Answer:** 42", "42", 1),
    ("Answer: $42$", "42", 1),
    ("Final answer:\n\n42", "42", 1),
    ("The answer is 42. I checked it 3 times.", "42", 1),
    ("The answer is $42$, for 42 is 6 times 7.", "42", 1),
    ("The answer is 41. It is not 42", "42", 0),
    ("The answer is 2x+42.", "42", 0),
    ("The answer is 42x.", "42", 0),
    (r"The answer is $\frac{42}{x}$.", "42", 0),
    (r"The answer is $\sqrt{42}$.", "42", 0),
    ("so 42", "42", 1),
    ("It is 42 km^2.", "42", 1),
    ("It costs $42.", "42", 1),
    (r"It costs \$42.00.", "42", 1),
    ("It is 42%", "0.42", 1),
    ("x = 42", "42", 1),
    ("so x^42", "42", 0),
    (r"so $\sqrt{42}$", "42", 0),
    (r"so $42\pi$", "42", 0),
    ("so (1, 42)", "42", 0),
    ("so x + 42", "42", 0),
    ("so we have 1 1/2.", "1/2", 0),
    ("so we have 1 1/2.", "3/2", 1),
    (r"so it is $1\frac{1}{2}$.", "1/2", 0),
    ("no idea", "42", 0),
    ("", "42", 0),
)
MATHS_ONLY = (
    (r"\boxed{\frac{\sqrt{16}}{\frac{2}{1}}}", "2", 1),
    ("The answer is 2x+3.", "2x+3", 1),
    ("The answer is $2x+2$", "2(x+1)", 1),
    ("The answer is 2x+3.", "3", 0),
    (r"We get \[x = 3\pi\]", "3pi", 1),
    (r"We get $3$, so the length is $3\pi$.", r"3\pi", 1),
    (r"We get $3\pi$, so the length is 3.", r"3\pi", 0),
    ("It is even.\nThe answer is even.", r"\text{even}", 1),
    ("The answer is (B).", "B", 1),
    ("The answer is (B) 42.", r"\text{(B)}", 1),
    ("The answer is (C).", "B", 0),
    (r"Hence $x \in [2,5)$", "[2,5)", 1),
    (r"\boxed{x^2+1}", r"We find \boxed{1+x^2}.", 1),
    (r"\boxed{\sqrt{4}}", "so 2+0=2\n#### 2", 1),
)
UNREAD = (
    "",
    "  ",
    r"\frac{",
    "???",
    r"\boxed{}",
    r"\sqrt{2",
    "$$",
    "{",
    "x^",
    "|",
    r"\begin{pmatrix}1",
)
"""Answers that are none."""
NO_NUMBERS = (
    *(
        "2x+3",
        "3pi",
        r"3\pi",
        "(1,2)",
        "1,2",
        "[2,5)",
        "east",
        r"\text{(A)}",
        "A",
        "x^2+1",
        "5 or 6",
    ),
    *(
        r"\sqrt{2}",
        "3:2",
        "2024-11-03",
        "1011_2",
        "x>2",
        "6-5i",
        "5!",
        r"\frac{x}{2}",
        "5t",
        "three",
    ),
    *(
        "3x+4y+14=0",
        "June 20",
        r"\{1,2\}",
        r"\pm 3",
        r"1\pm 2",
        "12-5",
        "2^{10}",
        "one of 3",
        "3 halves",
    ),
    *(
        "Room 5",
        "x+y=2",
        r"2\frac{x}{3}",
        "1/0",
        "5 to 6",
        "nan",
        "11:30",
        "1 2",
        "..",
        "7 squared",
    ),
    *(
        "1,5",
        "forty",
        "1-2",
        "($5)",
        "5 - 2",
        "A5",
        "v1.5",
        "10:30",
        "10-12",
        "#5",
        "5/0",
        "1/2/3",
        "--5",
        "1,23",
        "12,34,56",
        r"\frac{3}{0}",
        r"\frac{a}{2}",
        "1.2.3",
        "5 and 6",
        "5, 6",
        "x = 5 or x = 6",
        "at least 5",
        "5+",
        "<5",
        "5 < x",
        "18 dollars and 50 cents",
        "2 hours 30 minutes",
        "2 hours and 30 minutes",
        "5'10\"",
        "5 ft 10 in",
    ),
)
"""Answers that the verifier `number` cannot judge by, though most have digits."""
REFUSED_HERE = {
    "an equation is no value of its right side": [
        *(("42", "x+y=42"), ("0", "3x+4y+14=0"), ("0", "x^2-1=0")),
    ],
    "words that change the number are no unit": [("42", r"42\text{ million}")],
    "a base, a ratio, a time and a date are no quotient and no difference": [
        *(("42", "42_5"), ("1011_2", "1011_3"), ("1011_2", "1011_{10}"), ("42", "42:1")),
        *((r"\frac{1}{2}", "1:2"), ("3/4", "3:4"), ("3:2", "1.5"), ("3:2", "3/2")),
        *(("11:30", "11/30"), ("2024-11-03", "2010"), (r"12:30\text{ pm}", r"12:30 \text{ am}")),
        *((r"12:30\text{ pm}", "12:30"), (r"12:30\text{ pm}", "12/30")),
    ],
    "units of one kind that differ": [
        *((r"5\text{ cm}", "5 m"), (r"5\text{ cm}", r"5\text{ km}"), (r"4\text{ m}^2", "4 m")),
        *((r"5\text{ cm}", r"5\text{ cm}^2"), (r"1.25 \text{ feet}", "1.25 inches")),
        (r"6 \text{ hours}", "6 minutes"),
    ],
    "small numbers are compared by their ratio, not after six digits": [
        *(("0.0000001", "0.0000002"), ("2^{-100}", "3^{-100}")),
    ],
    "t, c, d, h, m are variables, not units that may be left out": [("5t", "5")],
    "R and r are two lengths": [
        *(("3R^2", "3r^2"), (r"\pi(R^2-r^2)", "0"), (r"\pi(R^2-r^2)", r"\pi(r^2-R^2)")),
    ],
    "a tuple is no set": [("(1,2)", r"\{1,2\}"), (r"\{-1, 0, 1\}", "(-1,0,1)")],
    "an interval is not its two ends": [
        *(("-3 < x < 3", r"\pm 3"), ("-3 < x < 3", "-3, 3"), ("-3 < x < 3", r"\{-3,3\}")),
    ],
    "a word is no product of its letters": [("east", "seat")],
    "decimals differ in their last digit, powers and factorials in all of theirs": [
        *(("0.9999999", "0.9999998"), ("1-(0.9)^{2023}", "1-(0.9)^{2022}")),
        (r"1-\frac{1}{2024!}", r"1+\frac{1}{2024!}"),
    ],
    "money is no share, and of one currency": [("\\$45", "45\\%"), ("\\$45", r"45\text{ euros}")],
    "capitals are names in an order": [
        *(("ACB", "ABC"), ("ACB", "CBA"), ("ACB", r"A\cdot C\cdot B"), ("AAB", "ABA")),
        ("C, B, A", "A, B, C"),
    ],
    "a tuple is a list in its order only, and an interval is none": [
        *(("7,3,5", "(7,5,3)"), ("7,3,5", "[7,5,3]"), ("7,3,5", "(3,5,7)")),
        *(("1,8", "(8,1)"), ("1,8", "[8,1]")),
    ],
    "units behind an expression": [
        (r"10\sqrt{3}\text{ m}", rf"10\sqrt{{3}}\text{{ {unit}")
        for unit in ("cm}", "m}^2", "feet}")
    ],
    "a = b is not c": [("a=b=c=1", "a=b=1")],
    "dy/dx is not dx/dy, nor 0": [(r"\frac{dy}{dx}=2x", r"\frac{dx}{dy}=2x")],
}
"""Where math-verify accepts a wrong (answer, spelling), and why it is wrong."""


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
    table = read(f"completions by {name}").items()
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
    """Every wrong spelling that math-verify accepts is in REFUSED_HERE. (What it refuses and is
    right are spellings that it does not read: `3pi`, `1 1/2`, `18 dollars`, 5 > x > 2.)"""
    math_verify = pytest.importorskip("math_verify")
    known = {pair for pairs in REFUSED_HERE.values() for pair in pairs}
    options: dict[str, Any] = {"parsing_timeout": None}
    for completion, answer, verdict in [*rows(NUMBERS), *rows(EXPRESSIONS)][part::8]:
        gold = math_verify.parse(answer if answer[0] == "$" else f"${answer}$", **options)
        found = math_verify.parse(completion, **options)
        if math_verify.verify(gold, found, timeout_seconds=None) and not verdict:
            assert (answer, completion[len(r"so \boxed{") : -1]) in known


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


@pytest.mark.parametrize(
    "units",
    [
        r"m/s|meters per second|m s^{-1}|\frac{\text{m}}{\text{s}}|metres / second",
        "km/h|km per hour|kph|kilometers an hour",
        *("m|metre", "mph|miles per hour", "m/s^2|m/s²|meters per second^2"),
        *("°C|degrees Celsius", "°F|degrees Fahrenheit"),
        *("MB|megabytes", "GB|gigabyte", "kW|kilowatts|KW", "MW|megawatt", "mW", "kWh|KWH"),
        *(r"\text{N}|newtons", r"\text{J}", "μm|um|micrometers", "nm", "ms", "ft^2|square feet"),
        *("gallons", "tons", "hours per day", "minutes per day", "cubic cm|cm^3", "am", "pm"),
    ],
)
def test_units_are_compared_as_a_whole(units: str) -> None:
    """Prefixes, what they are per, powers, and scales of degrees; without a unit it is right."""
    others = ["km/h", "m/s", "m", "°C", "°F", "GB", "kW", "MW", "kg", "s", "joule m"]
    first, *same = units.split("|")
    for unit in (first, *same):
        for free in ("5", rf"5 {first}", "5 apples"):
            assert both("number", rf"5 {unit}", free) == {1.0}, (unit, free)
        different = [other for other in others if other not in units.split("|")]
        for other in different:
            assert both("number", rf"5 {unit}", rf"5 {other}") == {0.0}, (unit, other)
    assert (
        both("number", "25 °C", "25 degrees") == {1.0} == both("number", "$5", "5 dollars per hour")
    )


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        # the upright i, e and d are letters
        ("5", r"2+3\mathrm{i}", 0),
        (r"\sqrt{3}", r"\sqrt{3}\,\mathrm{i}", 0),
        ("x+2", r"x+2\mathrm{e}^2", 0),
        ("2+3i", r"2+3\text{i}", 1),
        ("-i", r"-\mathrm{i}", 1),
        ("1+e", r"1+\mathrm{e}", 1),
        (r"\frac{dy}{dx}=2x", r"\frac{\mathrm{d}y}{\mathrm{d}x}=2x", 1),
        # what is no unit stays
        (r"\sqrt{3}", r"\sqrt{3}\text{ million}", 0),
        (r"\sqrt{3}", r"\sqrt{3}\mathrm{x}", 0),
        (r"\sqrt{3}", r"\sqrt{3}\text{ m/s}", 1),
        (r"\sqrt{3}\text{ km/h}", r"\sqrt{3}\text{ m/s}", 0),
        (r"\sqrt{3}", r"\sqrt{3}\text{ apples}", 1),
        # capitals are other symbols, also with an index and in a list
        *[
            (a, a.lower(), 0)
            for a in ("R_1", r"\Omega", r"\Delta", r"\Gamma", "T_{max}", "(R_1,2)", "x=V_0")
        ],
        (r"\{M_1, M_2\}", r"\{m_1, m_2\}", 0),
        ("R_1", "R_{1}", 1),
        # of symbols nothing is computed
        ("1", r"\gcd(a,b)", 0),
        (r"\gcd(a,b)", r"\gcd(a,c)", 0),
        (r"\operatorname{lcm}(a,b)", "ab", 0),
        ("6", r"\gcd(12,18)", 1),
        ("12", r"\operatorname{lcm}(3,5)", 0),
    ],
)
def test_what_the_reader_of_latex_takes_for_another(a: str, b: str, verdict: float) -> None:
    pytest.importorskip("math_verify")
    assert both("math", a, b) == {verdict}


@pytest.mark.parametrize(
    ("rest", "answer", "others"),
    [
        ("$18 (9 eggs at $2 each).", "18", "9 2"),
        ("72 clips (48 in April and 24 in May).", "72", "24 48"),
        ("a total of 72 clips (48 in April and 24 in May).", "72", "24"),
        ("72, which is 60% of 120.", "72", "120 60"),
        ("5, since 8 - 3 = 5 and 2 are left.", "5", "2"),
        ("5 because there are 3 red and 2 blue ones.", "5", "2"),
        ("72 and it took 5 steps.", "72", "5"),
        ("48 + 24 = 72 clips in total over all of both months.", "72", "48 24"),
        ("half of 144, or 72.", "72", "144"),
        ("5 times 3, which is 15.", "15", "5 3"),
        ("1 hour and 12 minutes, i.e. 72 minutes.", "72", "1 12"),
        ("about 10,000 dollars - 5,000 for each.", "10000", "5000"),
        ("between 4 and 6, i.e. 5.", "5", "4 6"),
        ("72 ✅", "72", ""),
        ("Rs. 500", "500", "0.5"),
        ("__72__", "72", ""),
        ("seventy-two (72).", "72", ""),
        # several quantities are no answer
        ("2 hours and 30 minutes.", "", "2 30"),
        ("5 feet 3 inches.", "", "5 3"),
        ("5 to 6 apples.", "", "5 6"),
        ("3-4 days.", "", "3 4"),
        ("3 times as many.", "", "3"),
        ("12 and 15.", "", "12 15"),
        ("$2$ hours and $30$ minutes.", "", "2 30"),
        (r"$5$ times $\sqrt{2}$.", "", "5 2"),
    ],
)
def test_a_stated_answer_begins_with_its_value(rest: str, answer: str, others: str) -> None:
    for opening in (
        "The answer is ",
        "Answer: ",
        "The answer is: **",
        "It rains.\nSo the answer is ",
    ):
        assert not answer or judge("number", opening + rest, answer) == 1, rest
        for other in others.split():
            assert judge("number", opening + rest, other) == 0, (rest, other)


def test_formulas_that_are_joined_are_one_answer() -> None:
    pytest.importorskip("math_verify")
    for said in ("The solutions are $x=3$ and $x=5$.", "We get $3$, $4$ or $5$."):
        wanted = "3,5" if "x" in said else "3,4,5"
        assert judge("math", said, wanted) == 1 and judge("math", said, "5") == 0
    assert judge("math", "With $n=5$ and $m=7$.", "7") == 1


@pytest.mark.parametrize(
    ("said", "choice"),
    [
        ("A: Let me think. It takes 3 hours, so the correct option is (C).", "C"),
        ("(A) is ruled out, so the correct option is (B).", "B"),
        ("The answer is B, because it rains.", "B"),
        ("The answer is (B) since A is wrong.", "B"),
        ("The correct answer is option B.", "B"),
        (r"\boxed{\text{Option B}}", "B"),
        (r"\boxed{(\text{B})}", "B"),
        ("(A) is correct.", "A"),
        ("B. Paris", "B"),
        ("A. Paris is French.\nB. Rome is not.\nC. Berlin is German.", None),
        ("A) is wrong since 3 < 4. B) holds. Therefore, B.", None),
        ("The answer is (A) or (B).", None),
        (r"\boxed{A, B}", None),
    ],
)
def test_a_choice_is_what_a_completion_concludes(said: str, choice: str | None) -> None:
    pytest.importorskip("math_verify")
    for letter in "ABC":
        assert judge("math", said, letter) == (letter == choice), letter


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
