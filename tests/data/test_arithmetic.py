"""Laws of the procedural arithmetic task."""

from __future__ import annotations

import re

import pytest

from jaxrl.data.tasks import EXPRESSIONS_HELD_OUT, Arithmetic, correction, solve, split_of
from jaxrl.errors import UserError
from jaxrl.rewards.answers import score_sum

TASKS = [
    Arithmetic(),
    Arithmetic(digits=3, terms=5, operators="+-*"),
    Arithmetic(digits=1, terms=2, operators="-", seed=7),
]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_step_has_the_value_of_the_expression(task, split):
    for example in (task.example(index, split) for index in range(200)):
        value = eval(example.prompt.rstrip("="))
        steps = example.completion.split("=")
        assert example.prompt.endswith("=")
        assert [eval(step) for step in steps] == [value] * (task.terms - 1)
        assert example.answer == steps[-1] == str(value)
        assert all(
            0 <= int(number) < 10**task.digits for number in re.findall(r"\d+", example.prompt)
        )
        assert all(
            int(number) < 10**task.digits for number in re.findall(r"\d+", example.completion)
        )
        assert score_sum(example.completion, example.answer) == 1.0


def test_solution_by_hand():
    assert solve([37, 48, 56], "+-", 99) == ["37+48-56", "85-56", "29"]
    assert solve([90, 12, 3, 4], "-*+", 99) == ["90-12*3+4", "90-36+4", "54+4", "58"]
    assert solve([1, 2, 9], "-+", 99) is None
    assert solve([60, 40, 9], "+-", 99) is None


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        ("85-56=29", ""),
        ("85-56=28", "85-56=29"),
        ("85-56", "85-56=29"),
        ("84-56=28", "37+48-56=85-56"),
        ("", "37+48-56=85-56"),
    ],
)
def test_the_first_wrong_step_is_corrected(completion, said):
    assert correction("37+48-56=", completion) == said


def test_what_is_no_sum_is_not_corrected():
    assert correction("how much is 1+1?", "2") == correction("", "") == ""
    assert correction("1-2=", "9") == ""  # no solution of the task is negative


def test_the_splits_share_no_expression():
    small = Arithmetic(digits=1, terms=2)
    train = {small.example(index).prompt for index in range(2000)}
    other_seed = Arithmetic(digits=1, terms=2, seed=99)
    held_out = {other_seed.example(index, "eval").prompt for index in range(500)}
    assert train and held_out and not train & held_out
    assert all(split_of(prompt.rstrip("="), EXPRESSIONS_HELD_OUT) == "eval" for prompt in held_out)


def test_an_example_depends_on_seed_split_and_index_only():
    task = Arithmetic(seed=3)
    later = [task.example(index) for index in range(40, 45)]
    assert later == [Arithmetic(seed=3).example(index) for index in range(40, 45)]
    assert task.example(40) != Arithmetic(seed=4).example(40)
    assert task.example(40) != task.example(41)


def test_every_number_and_operator_occurs():
    task = Arithmetic(digits=2, terms=3, operators="+-*")
    text = [task.example(index).prompt for index in range(600)]
    assert {char for prompt in text for char in prompt} == set("0123456789+-*=")
    firsts = {prompt.split("+")[0] for prompt in text}
    assert {"7", "10", "99"} & firsts and max(map(len, text)) == len("00+00-00=")
    assert all(len(prompt.split("*")[1].rstrip("=+-*")) for prompt in text if "*" in prompt)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("122-46=76", 1.0),
        ("999=76", 1.0),
        (" 76\n", 1.0),
        ("122-46=67", 0.0),
        ("122-46=", 0.0),
        ("76=", 0.0),
        ("76 apples", 0.0),
        ("", 0.0),
        ("122-46=" + "7" * 4400, 0.0),
    ],
)
def test_score_reads_the_number_after_the_last_equals_sign(completion, expected):
    assert score_sum(completion, "76") == score_sum(completion, "76.0") == expected
    assert score_sum(completion, "Paris") is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"digits": 0}, "digits=0"),
        ({"terms": 1}, "terms=1"),
        ({"operators": "+/"}, "operators='+/'"),
        ({"operators": ""}, "operators=''"),
        ({"operators": "++"}, "operators"),
    ],
)
def test_bad_options_are_named(options, named):
    with pytest.raises(UserError, match=f"(?s).*{named.replace('+', '[+]')}"):
        Arithmetic(**options)


def test_a_split_without_expressions_is_an_error():
    # A number is at least the sum of seven others once in 8! draws; 1 in 16 of those is held out.
    lonely = Arithmetic(digits=9, terms=8, operators="-")
    with pytest.raises(UserError, match="no expression"):
        lonely.example(0, "eval")
