"""The environments that come with jaxrl: `calculator`, `guess_number` and `text_world`. They read a
turn without its thoughts."""

from __future__ import annotations

import ast
import hashlib
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from jaxrl.data.example import Columns, Message
from jaxrl.environments.environment import Answer, Environment
from jaxrl.rewards.answers import score_sum
from jaxrl.rewards.rules import pattern
from jaxrl.rewards.verifiers import after_thoughts

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST_EXPRESSION = 200
"""Characters of an expression."""
MOST_NUMBER = 99
"""The largest number to guess."""
DOORS = {
    "hall": {"north": "library", "east": "kitchen"},
    "library": {"south": "hall", "east": "garden"},
    "kitchen": {"west": "hall", "north": "garden"},
    "garden": {"west": "library", "south": "kitchen"},
}
"""Room -> direction -> room."""
TASK = (
    "You are in a house with four rooms. Find the key, take it, and open the chest with it."
    " Commands: go north, go east, go south, go west, take key, open chest. Give one in a turn."
)


class Calculator(Environment):
    """For rows with a number as their answer, such as those of `arithmetic`.

    A turn that ends with an expression, which `=` or `?` may follow, asks for its value: the answer
    to `12+34=` is `46`, and to what is no expression `?`. A turn that ends with a number, such as
    -3, 3.5 or 1/2, answers the row: 1 where it is the row's answer, else 0. What stands before the
    last `=` does not count.
    """

    def step(self, text: str, messages: Sequence[Message]) -> Answer:
        turn = after_thoughts(text) or ""
        expression = turn.rstrip("=? ").rsplit("=", 1)[-1]
        number, value = expression.strip(), compute_value(expression)
        is_number = pattern("number").fullmatch(number) and value in (number, "?")
        if is_number and turn.endswith(expression):
            return Answer(reward=score_sum(turn, str(self.row["answer"])), done=True)
        return Answer(value)


def compute_value(expression: str) -> str:
    """Returns the value as a whole number or a fraction of two; `?` where there is none."""
    if len(expression) > LONGEST_EXPRESSION or not re.fullmatch(r"[-+*/()\d\s]+", expression):
        return "?"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return "?"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(node)


class GuessNumber(Environment):
    """For rows of any kind, whose prompt only chooses the number.

    The prompt is `1-99?`. A turn is a number; `+?` says that the number to find is larger, `-?`
    that it is smaller, and `?` that the turn was no number. The right number has reward 1 and ends
    the episode; `environment.discount` below 1 makes fewer guesses better.
    """

    def reset(self, row: Columns) -> str:
        digest = hashlib.sha256(row["prompt"].encode()).digest()  # the same in every process
        self.number = 1 + int.from_bytes(digest[:8], "little") % MOST_NUMBER
        return f"1-{MOST_NUMBER}?"

    def step(self, text: str, messages: Sequence[Message]) -> Answer:
        guess = after_thoughts(text) or ""
        if not (guess.isascii() and guess.isdigit()) or len(guess) > 9:
            return Answer("?")
        if int(guess) == self.number:
            return Answer("=", reward=1.0, done=True)
        return Answer("+?" if int(guess) < self.number else "-?")


class TextWorld(Environment):
    """For rows of any kind, whose prompt only chooses where key and chest are.

    The last line of a turn is the command. Opening the chest with the key has reward 1 and ends the
    episode; nothing else has a reward.
    """

    def reset(self, row: Columns) -> str:
        places = hashlib.sha256(row["prompt"].encode()).digest()
        others = [room for room in DOORS if room != "hall"]
        self.room, self.has_key = "hall", False
        self.key, self.chest = others[places[0] % 3], others[places[1] % 3]
        return f"{TASK}\n{self._view()}"

    def step(self, text: str, messages: Sequence[Message]) -> Answer:
        lines = (after_thoughts(text) or "").lower().splitlines() or [""]
        verb, _, thing = lines[-1].strip(" .!").partition(" ")
        if verb == "go" and thing in DOORS[self.room]:
            self.room = DOORS[self.room][thing]
            return Answer(self._view())
        if (verb, thing) == ("take", "key") and self._sees_key():
            self.has_key = True
            return Answer("You have the key.")
        if (verb, thing) == ("open", "chest") and self.room == self.chest:
            if self.has_key:
                return Answer("The chest is open.", reward=1.0, done=True)
            return Answer("It is locked.")
        return Answer(f"You cannot do that here. {self._view()}")

    def _sees_key(self) -> bool:
        return self.room == self.key and not self.has_key

    def _view(self) -> str:
        things = ["a key"] * self._sees_key() + ["a chest"] * (self.room == self.chest)
        seen = f" You see {' and '.join(things)}." if things else ""
        return f"You are in the {self.room}.{seen} Doors: {', '.join(DOORS[self.room])}."
