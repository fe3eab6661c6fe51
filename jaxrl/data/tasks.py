"""Procedural, verifiable tasks: rows made on demand from (seed, split, index), stored nowhere.

Arithmetic is jaxrl's own: ``37+48-56=`` is completed by ``85-56=29``. Each part rewrites the
expression with its next operation carried out (products first, then from left to right), and the
last part is the answer. No result on the way is negative or longer than the numbers may be.

No prompt is in both splits, whatever the seeds and options of the two: the split that owns a prompt
is a hash of its text. The number of rows is nominal (option `size`, 10,000): it is the length of an
epoch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from jaxrl.data.example import Example, JsonObject, Part, Split
from jaxrl.errors import UserError, about, near

SIZE = 10_000
HELD_OUT = 4
"""One reasoning-gym prompt in HELD_OUT is for evaluation. Prompts are drawn until the split fits,
and a draw can cost milliseconds, so that an evaluation prompt should not take many."""
ATTEMPTS = 200
"""Draws for one row: at 1 in HELD_OUT, 200 draws fail once in 1e25."""
HASH_SEEDED = (
    *("intermediate_integration", "isomorphic_strings", "knight_swap", "list_functions"),
    *("polynomial_multiplication", "ransom_note", "word_ladder"),
)
"""Tasks of reasoning-gym whose rows change with PYTHONHASHSEED, among 25 rows of each."""

ARITHMETIC = "jaxrl/arithmetic"
"""The column `task` of rows of `arithmetic`; users' columns do not say this by accident."""
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSIONS_HELD_OUT = 16
"""One expression in so many, chosen by its hash, is for evaluation and never met in training."""
EXPRESSION_DRAWS = 10_000

Options = Mapping[str, Any]


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
        for attempt in range(EXPRESSION_DRAWS):
            # A hash has 512 bits, of which a draw needs under 256.
            key = f"{self.seed}/{split}/{index}/{attempt}"
            bits = int.from_bytes(hashlib.blake2b(key.encode()).digest(), "little")
            signs, numbers = "", list[int]()
            for _ in range(self.terms - 1):
                bits, choice = divmod(bits, len(self.operators))
                signs += self.operators[choice]
            for before in f"+{signs}":
                bits, number = divmod(bits, 10 if before == "*" else 10**self.digits)
                numbers.append(number)
            steps = solve(numbers, signs, 10**self.digits - 1)
            if steps is not None and split_of(steps[0], EXPRESSIONS_HELD_OUT) == split:
                columns = {"task": ARITHMETIC}
                solution = "=".join(steps[1:])
                return Example(f"{steps[0]}=", solution, steps[-1], columns, document=True)
        raise UserError(
            f"arithmetic: no expression for split {split!r} in {EXPRESSION_DRAWS} draws with "
            f"digits={self.digits}, terms={self.terms}, operators={self.operators!r}; "
            "change one of them"
        )


def solve(numbers: list[int], operators: str, largest: int) -> list[str] | None:
    """Returns the expression, what remains of it after each step, and the answer; None if a result
    is not in 0 to `largest`."""
    numbers, pending, steps = list(numbers), list(operators), list[str]()
    while True:
        signs = [*pending, ""]
        steps.append(
            "".join(f"{number}{sign}" for number, sign in zip(numbers, signs, strict=True))
        )
        if not pending:
            return steps
        at = pending.index("*") if "*" in pending else 0
        apply = OPERATORS[pending.pop(at)]
        numbers[at] = apply(numbers[at], numbers.pop(at + 1))
        if not 0 <= numbers[at] <= largest:
            return None


def correction(prompt: str, completion: str) -> str:
    """Names what is wrong with a worked solution: its first wrong step and what that should have
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


@dataclass(frozen=True)
class ProceduralPart(Part):
    """Rows made on demand."""

    name: str
    size: int
    settings: tuple[object, ...]
    """What decides the rows, beside the program that makes them."""
    make: Callable[[int], Example]
    procedural = True

    def where(self, index: int) -> str:
        return f"{self.name}, row {index}"

    def digest(self) -> str:
        """Returns a digest in which the first row stands for the program: another version may make
        other rows."""
        decisive = (self.name, self.size, self.settings, self[0].prompt)
        return hashlib.sha256(repr(decisive).encode()).hexdigest()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        return self.make(index)


def open_arithmetic(
    dataset: str, options: Options, seed: int, split: Split, label: str
) -> ProceduralPart:
    """Opens `arithmetic:digits=2,terms=3,operators=+-,size=10000`: `37+48-56=` is completed by
    `85-56=29`; the options are those of `Arithmetic`."""
    if dataset:
        raise UserError(
            f"{label}: arithmetic/{dataset}: `arithmetic` has no parts; write arithmetic"
        )
    given, size = _checked(options, Arithmetic, f"{label}: arithmetic", label)
    with about(label):
        for key, value in given.items():
            default = getattr(Arithmetic, key)
            if type(value) is not type(default):
                raise UserError(f"arithmetic: {key}={value!r} must be like {default!r}")
        task = Arithmetic(**given, seed=seed)
    make = partial(task.example, split=split)
    return ProceduralPart("arithmetic", size, (task, split), make)


def open_reasoning_gym(
    dataset: str, options: Options, seed: int, split: Split, label: str
) -> ProceduralPart:
    """Opens `reasoning_gym/NAME:option=value,size=10000` with the options of that data set's config
    (extra `tasks`); rows are scored by the data set's own `score_answer`."""
    where = f"{label}: reasoning_gym/{dataset}"
    try:
        # An optional package, and more than a second to import.
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"{label}: reasoning_gym needs the extra `tasks`: pip install 'jaxrl[tasks]'"
        ) from error
    known = {name: config for name, (_, config) in DATASETS.items() if name != "composite"}
    if dataset not in known:
        raise UserError(
            f"{where}: no such task among reasoning-gym's {len(known)}{near(dataset, known)}, "
            f"such as {', '.join(list(known)[:3])}"
        )
    if dataset in HASH_SEEDED and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        raise UserError(
            f"{where}: its rows depend on Python's hash seed, a resumed run would see others; "
            "set PYTHONHASHSEED=0 in the environment"
        )
    given, size = _checked(options, known[dataset], where, label)
    name = f"reasoning_gym/{dataset}"

    @cache
    def draw(attempt: int) -> Any:
        # Reasoning-gym seeds row i with seed + i, so that near seeds give the same rows: ours are
        # hashes.
        drawn = int.from_bytes(_digest(f"{seed}/{split}/{attempt}"), "little") % 2**31
        return make_dataset(dataset, {**given, "seed": drawn, "size": size}, label)

    def row(index: int) -> Example:
        for attempt in range(ATTEMPTS):
            entry = draw(attempt)[index]
            if split_of(entry["question"]) == split:
                columns = {"task": name, "options": given, "entry": entry}
                return Example(entry["question"], None, entry["answer"], columns)
        raise UserError(
            f"{label}: {name}: no prompt for split {split!r} in {ATTEMPTS} draws: "
            "with these options the task has too few different prompts to hold some out"
        )

    draw(0)  # refuses bad values now
    return ProceduralPart(name, size, (sorted(given.items()), seed, split), row)


TASKS: dict[str, Callable[[str, Options, int, Split, str], Part]] = {
    "arithmetic": open_arithmetic,
    "reasoning_gym": open_reasoning_gym,
}
"""Family -> (name within it, options, seed, split, config key) -> rows."""


def open_task(spec: str, seed: int, split: Split, label: str) -> Part:
    """Opens `FAMILY[/NAME][:key=value,...]`; the family is one of TASKS."""
    name, _, options = spec.partition(":")
    family, _, dataset = name.partition("/")
    return TASKS[family](dataset, parse_options(options, f"{label}: {name}"), seed, split, label)


def parse_options(text: str, label: str) -> JsonObject:
    """Parses `a=1,b=true,c=x,d=1|2` into {"a": 1, "b": True, "c": "x", "d": [1, 2]}."""
    options: JsonObject = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise UserError(f"{label}: {item!r} is not key=value")
        if key in options:
            raise UserError(f"{label}: {key} is given twice")
        values: list[object] = []
        for literal in value.split("|"):
            try:
                values.append(json.loads(literal))
            except json.JSONDecodeError:
                values.append(literal)
        options[key] = values if "|" in value else values[0]
    return options


def split_of(prompt: str, held_out: int = HELD_OUT) -> Split:
    """Returns which split owns a prompt, of which one in `held_out` is for evaluation: a property
    of its text, whatever the seed."""
    return "eval" if int.from_bytes(_digest(prompt), "little") % held_out == 0 else "train"


def make_dataset(name: str, settings: Options, label: str) -> Any:
    """Makes a reasoning-gym data set; its config checks the values."""
    from reasoning_gym import create_dataset

    try:
        return create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        given = {key: value for key, value in settings.items() if key != "seed"}
        raise UserError(f"{label}: reasoning_gym/{name}: {given} is refused: {error}") from error


def _checked(options: Options, config: Any, where: str, label: str) -> tuple[Options, int]:
    """Returns the options, if they are fields of a dataclass, without `size`, and this."""
    names = dict.fromkeys((*(field.name for field in dataclasses.fields(config)), "size"))
    allowed = [name for name in names if name != "seed"]
    for key in sorted(options.keys() - allowed):
        raise UserError(
            f"{where}: no option {key!r} among {', '.join(allowed)}{near(key, allowed)}"
        )
    size = options.get("size", SIZE)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"{label}: size={size!r} must be an integer of at least 1")
    return {key: value for key, value in options.items() if key != "size"}, size


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
