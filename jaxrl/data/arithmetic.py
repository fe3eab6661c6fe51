"""Procedural arithmetic: several digits and operators, solved one operation at a time.

``37+48-56=`` is completed by ``85-56=29``: each part rewrites the expression with its next
operation carried out (products first, then from left to right) and the last part is the answer. No
result on the way is negative or longer than the numbers may be. Everything is a pure function of
(seed, split, index).
"""

from __future__ import annotations

import hashlib
import operator
import re
from dataclasses import dataclass

from jaxrl.data.example import Example, Split
from jaxrl.errors import UserError

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
HELD_OUT = 16
"""One expression in HELD_OUT, chosen by its hash, is for evaluation and never met in training."""
_ATTEMPTS = 10_000


@dataclass(frozen=True)
class Arithmetic:
    """Expressions of `terms` numbers of at most `digits` digits, in a seeded order without end."""

    digits: int = 2
    """Digits of the largest number and result; the factor after ``*`` has one digit."""
    terms: int = 3
    """Numbers in an expression."""
    operators: str = "+-"
    """Which of + - * occur."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("digits", 1, 9), ("terms", 2, 8)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UserError(f"arithmetic: {name}={value} is not within {low} to {high}")
        unknown = sorted(set(self.operators) - set(OPERATORS))
        if unknown or not self.operators or len(set(self.operators)) < len(self.operators):
            raise UserError(
                f"arithmetic: operators={self.operators!r} must be one or more of "
                f"{''.join(OPERATORS)!r}, each at most once"
            )

    def example(self, index: int, split: Split = "train") -> Example:
        """Returns example `index` of `split`; the two splits have no expression in common.

        Its completion is the remaining expressions joined by ``=``, the answer last.
        """
        for attempt in range(_ATTEMPTS):
            numbers, operators = self._draw(f"{self.seed}/{split}/{index}/{attempt}")
            steps = solve(numbers, operators, 10**self.digits - 1)
            if steps is not None and split_of(steps[0]) == split:
                task = {"task": "arithmetic"}
                solution = "=".join(steps[1:])
                return Example(f"{steps[0]}=", solution, steps[-1], task, document=True)
        raise UserError(
            f"arithmetic: no expression for split {split!r} in {_ATTEMPTS} draws with "
            f"digits={self.digits}, terms={self.terms}, operators={self.operators!r}; "
            "change one of them"
        )

    def _draw(self, key: str) -> tuple[list[int], str]:
        """Numbers and operators from a hash of `key`: 512 bits, of which a draw needs under 256."""
        bits = int.from_bytes(hashlib.blake2b(key.encode()).digest(), "little")
        operators = []
        for _ in range(self.terms - 1):
            bits, choice = divmod(bits, len(self.operators))
            operators.append(self.operators[choice])
        numbers = []
        for before in ["+", *operators]:
            bits, number = divmod(bits, 10 if before == "*" else 10**self.digits)
            numbers.append(number)
        return numbers, "".join(operators)


def solve(numbers: list[int], operators: str, largest: int) -> list[str] | None:
    """Returns the expression, what remains of it after each step, and the answer; None if a result
    is not in 0 to `largest`."""
    numbers, pending = list(numbers), list(operators)
    steps = [_render(numbers, pending)]
    while pending:
        at = pending.index("*") if "*" in pending else 0
        apply = OPERATORS[pending.pop(at)]
        numbers[at] = apply(numbers[at], numbers.pop(at + 1))
        if not 0 <= numbers[at] <= largest:
            return None
        steps.append(_render(numbers, pending))
    return steps


def split_of(expression: str) -> Split:
    """Returns which split owns an expression: a property of its text, whatever the seed."""
    digest = hashlib.blake2b(expression.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "little") % HELD_OUT == 0 else "train"


def score(completion: str, answer: str) -> float:
    """Returns 1.0 if what follows the last ``=`` of a completion (all of it without one) is the
    answer."""
    last = completion.rsplit("=", 1)[-1].strip()
    return float(re.fullmatch(r"-?\d+", last) is not None and int(last) == int(answer))


def correction(prompt: str, completion: str) -> str:
    """Returns what is wrong with a worked solution: its first wrong step and what that should have
    been, as in `37+48-56=85-56`; "" where every step is right, and for what is not a sum."""
    expression = re.fullmatch(r"(\d+(?:[-+*]\d+)+)=", prompt)
    if expression is None:
        return ""
    numbers = [int(number) for number in re.findall(r"\d+", prompt)]
    steps = solve(numbers, "".join(re.findall(r"[-+*]", prompt)), 10 ** len(prompt))
    if steps is None:
        return ""
    given = completion.strip().split("=")
    for at, right in enumerate(steps[1:]):
        if at >= len(given) or given[at] != right:
            return f"{steps[at]}={right}"
    return ""


def _render(numbers: list[int], operators: list[str]) -> str:
    return str(numbers[0]) + "".join(
        f"{sign}{number}" for sign, number in zip(operators, numbers[1:], strict=True)
    )
