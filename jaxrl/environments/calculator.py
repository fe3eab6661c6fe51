"""Sums with a calculator: the built-in environment `calculator`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from jaxrl.data.arithmetic import score
from jaxrl.data.example import Message
from jaxrl.environments.environment import Answer, Environment

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST = 200
"""Characters of an expression."""


class Calculator(Environment):
    """For rows with a number as their answer, such as those of `arithmetic`.

    A turn that ends with an expression, which `=` or `?` may follow, asks for its value: the answer
    to `12+34=` is `46`, and to what is no expression `?`. A turn that ends with a number answers
    the row: 1 where it is the row's answer, else 0. What stands before the last `=` does not count.
    """

    def step(self, text: str, messages: Sequence[Message]) -> Answer:
        turn = text.strip()
        expression = turn.rstrip("=? ").rsplit("=", 1)[-1]
        if turn.endswith(expression) and re.fullmatch(r"\s*-?\d{1,99}", expression):
            return Answer(reward=score(turn, str(self.row["answer"])), done=True)
        return Answer(value_of(expression))


def value_of(expression: str) -> str:
    """Returns the value as a whole number or a fraction of two; `?` where there is none."""
    if len(expression) > LONGEST or not re.fullmatch(r"[-+*/()\d\s]+", expression):
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
