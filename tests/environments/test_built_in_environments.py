"""The environments that come with jaxrl, played by hand; and that each can be found and loaded."""

from __future__ import annotations

import pytest

from jaxrl.environments import Answer, Environment
from jaxrl.environments.built_in import Calculator, GuessNumber, TextWorld, compute_value
from jaxrl.environments.environment_process import BUILT_IN, PACKAGES, facts_of, find, load_class


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - PACKAGES.keys()))
def test_each_is_there(name: str) -> None:
    source = find(name)
    facts = facts_of(source, load_class(source), describe=True)
    assert facts.resets == (name != "calculator") and not facts.tools


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12+34=", Answer("46")),
        ("12+34?", Answer("46")),
        ("37+48-56=85-56", Answer("29")),
        ("(1+2)*-3 = ?", Answer("-9")),
        ("2/4=", Answer("1/2")),
        ("1/0=", Answer("?")),
        ("46=", Answer("46")),
        ("012+1=", Answer("?")),
        ("++=", Answer("?")),
        ("", Answer("?")),
        ("9**9=", Answer("?")),
        ("46", Answer(reward=1.0, done=True)),
        ("12+34=46 ", Answer(reward=1.0, done=True)),
        ("45", Answer(reward=0.0, done=True)),
    ],
)
def test_the_calculator(text: str, answer: Answer) -> None:
    calculator = Calculator()
    calculator.row = {"prompt": "12+34=", "answer": "46"}
    assert calculator.step(text, []) == answer


@pytest.mark.parametrize(
    ("answer", "turn"), [("3.5", "7/2=3.5"), ("1,234", "1234"), ("72.0", "72"), ("1/2", "1/2")]
)
def test_the_calculator_takes_every_number_as_an_answer(answer: str, turn: str) -> None:
    calculator = Calculator()
    calculator.row = {"prompt": "?", "answer": answer}
    assert calculator.step(turn, []) == Answer(reward=1.0, done=True)
    assert calculator.step("9.25", []) == Answer(reward=0.0, done=True)
    assert calculator.step("2/4", []) == Answer("1/2")


def test_the_calculator_has_limits() -> None:
    assert compute_value("1+" * 99 + "1") == "100"
    assert (
        compute_value("1+" * 100 + "1") == compute_value("(" * 99 + "1" + ")" * 99 + "+1+1") == "?"
    )


@pytest.mark.parametrize("prompt", ["one", "two", "three"])
def test_the_number_is_found_by_halves(prompt: str) -> None:
    game = GuessNumber()
    assert game.reset({"prompt": prompt}) == "1-99?"
    low, high = 1, 99
    for _ in range(7):
        guess = (low + high) // 2
        answer = game.step(str(guess), [])
        if answer.done:
            break
        assert answer.messages in ("+?", "-?") and answer.reward is None
        low, high = (guess + 1, high) if answer.messages == "+?" else (low, guess - 1)
    assert answer == Answer("=", 1.0, True)
    assert game.step("x", []) == game.step("1" * 10, []) == Answer("?")


@pytest.mark.parametrize(
    ("kind", "turn"),
    [(Calculator, "46"), (Calculator, "1+2="), (GuessNumber, "50"), (TextWorld, "go north")],
)
def test_thoughts_are_no_part_of_a_turn(kind: type[Environment], turn: str) -> None:
    def step(text: str) -> object:
        environment = kind()
        environment.row = {"prompt": "12+34=", "answer": "46"}
        environment.reset(environment.row)
        return environment.step(text, [])

    assert step(f"<think>\n7 or {turn}?\n</think>\n\n{turn}") == step(turn) != step("")
    assert step(f"<think>\n{turn}") == step(""), "they never ended"


@pytest.mark.parametrize("prompt", ["one", "two", "three", "four"])
def test_the_chest_opens_with_the_key_alone(prompt: str) -> None:
    world = TextWorld()
    first = world.reset({"prompt": prompt})
    assert "You are in the hall. Doors: north, east." in first
    tour = ["go north", "Go east.", "I think:\ngo south", "go west"]
    seen = [world.step(text, []) for text in tour]
    assert sum("a chest" in str(answer.messages) for answer in seen) == 1
    assert "cannot" in str(world.step("take key", []).messages)
    for text in tour[:-1] * 2:
        world.step(text, [])
        world.step("take key", [])
        world.step("go nowhere", [])
    results = []
    for text in ["go west", *tour[:-1]]:
        results += [world.step(text, []), world.step("open chest", [])]
    assert sum(answer.reward or 0 for answer in results) == 1
    assert [a.messages for a in results if a.done] == ["The chest is open."]
