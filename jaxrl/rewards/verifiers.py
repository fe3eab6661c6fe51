"""How right a completion is: pure functions of its text and what its prompt carries.

A verifier takes (completion text, prompt) and returns a score in [0, 1], or None where the prompt
has no answer to compare with: such a completion is left out of every mean, it does not count as
wrong. Some evaluate an expression in the completion, which may take for ever: `verifier` runs those
in a process that can be killed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache, lru_cache, wraps
from typing import Any, Protocol

from jaxrl.data import arithmetic
from jaxrl.data.tasks import make_dataset
from jaxrl.errors import UserError, unknown
from jaxrl.rewards.items import Item, ItemSource
from jaxrl.rewards.pool import RewardPool

TOLERANCE = 1e-6
"""Relative difference at which two numbers are equal where one of them is not whole."""
TIMEOUT_S, STARTUP_S = 10.0, 120.0
"""Seconds for one completion in a process, and for its imports before."""
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?"  # a sign, unless it is an operator after an operand
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?"
    r"(?:\s?/\s?\d+(?!\d|\.\d))?"
    r"|(?:(?<![\w.)\]}])[-+])?\.\d+"
)
_LONGEST_NUMBER = 1000
"""Characters; Python refuses to read numbers of more than 4300 digits."""
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Judged(Protocol):
    """What a verifier reads of a prompt (`Prompt` and `Example` have it)."""

    @property
    def answer(self) -> str | None: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...


Verifier = Callable[[str, Judged], float | None]


def _with_answer(judge: Callable[[str, str], float | bool]) -> Verifier:
    """The verifier that compares a completion with its prompt's answer; None where it has none."""

    @wraps(judge)
    def judged(completion: str, prompt: Judged) -> float | None:
        return None if prompt.answer is None else float(judge(completion, prompt.answer))

    return judged


@_with_answer
def exact(completion: str, answer: str) -> bool:
    """1 where completion and answer are the same text, white space at the ends aside."""
    return completion.strip() == answer.strip()


@_with_answer
def contains(completion: str, answer: str) -> bool:
    """1 where the answer stands in the completion as whole words, upper and lower case aside."""
    words = re.escape(answer.strip())
    found = re.search(rf"(?<!\w){words}(?!\w)", completion, re.IGNORECASE)
    return bool(words) and found is not None


@_with_answer
def number(completion: str, answer: str) -> bool:
    """1 where the completion's last number equals the answer: 1,234.50 is 1234.5, 3/4 is 0.75."""
    wanted = last_number(answer)
    if wanted is None:
        raise UserError(
            f"verifier number: the answer {answer!r} has no number; choose exact, contains or math"
        )
    got = last_number(completion)
    return got is not None and same_number(got, wanted)


@_with_answer
def boxed(completion: str, answer: str) -> bool:
    r"""1 where the completion's last \boxed{} is the answer, as a number or as the same text."""
    got, wanted = last_boxed(completion), last_boxed(answer)
    if got is None:
        return False
    wanted = answer if wanted is None else wanted
    values = whole_number(got), whole_number(wanted)
    if values[0] is not None and values[1] is not None:
        return same_number(values[0], values[1])
    return "".join(got.split()) == "".join(wanted.split())


@_with_answer
def math(completion: str, answer: str) -> bool:
    """1 where math-verify (extra `tasks`) finds the completion's expression equal to the answer."""
    try:
        from math_verify import parse, verify  # an optional package
    except ImportError as error:
        raise UserError(
            "verifier math needs the extra `tasks`: pip install 'jaxrl[tasks]'"
        ) from error
    # Its time limits are signals, which only a main thread may set: None switches them off.
    expression = f"${answer}$" if "\\" in answer and "$" not in answer else answer
    gold = parse(expression, parsing_timeout=None)
    if not gold:
        raise UserError(f"verifier math: the answer {answer!r} is no expression; choose exact")
    return bool(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(completion: str, prompt: Judged) -> float | None:
    r"""The data set's own score of the completion's final answer.

    The final answer is what the last <answer></answer> or \boxed{} holds, else the whole
    completion. Where the answer is a number, the completion's last number may be it too: the better
    score counts.
    """
    task = str(prompt.columns.get("task", ""))
    entry = prompt.columns.get("entry")
    if not task.startswith("reasoning_gym/") or entry is None:
        return None
    options = prompt.columns.get("options", {})
    dataset = _dataset(task.removeprefix("reasoning_gym/"), json.dumps(options, sort_keys=True))
    candidates = [final_answer(completion)]
    numbers = _NUMBER.findall(_plain(completion))
    if numbers and whole_number(str(entry["answer"])) is not None:
        candidates.append(numbers[-1].replace(",", ""))
    return max(_own_score(dataset, candidate, entry) for candidate in candidates)


def auto(completion: str, prompt: Judged) -> float | None:
    """The verifier of the prompt's task; else `number` where the answer is one, or `exact`."""
    task = str(prompt.columns.get("task", ""))
    if task.startswith("reasoning_gym/") and "entry" in prompt.columns:
        return reasoning_gym(completion, prompt)
    if task == "arithmetic":
        return VERIFIERS["arithmetic"](completion, prompt)
    if prompt.answer is not None and whole_number(prompt.answer) is not None:
        return number(completion, prompt)
    return exact(completion, prompt)


VERIFIERS: dict[str, Verifier] = {
    "auto": auto,
    "exact": exact,
    "contains": contains,
    "number": number,
    "boxed": boxed,
    "math": math,
    "arithmetic": _with_answer(arithmetic.score),
    "reasoning_gym": reasoning_gym,
}


def verifier(name: str) -> Verifier:
    """One of VERIFIERS by its name; None where it does not answer within TIMEOUT_S."""
    if name not in VERIFIERS:
        raise unknown("data.verifier", name, VERIFIERS)

    def judge(completion: str, prompt: Judged) -> float | None:
        if not may_hang(name, prompt):
            return VERIFIERS[name](completion, prompt)
        item = Item("", completion, prompt.answer, prompt.columns)
        scores = _pool(name).judge(0, [item]).result()
        if scores.failures and scores.failures[0].kind == "user":
            raise UserError(scores.failures[0].text)
        return scores.values[0]

    return judge


def may_hang(name: str, prompt: Judged) -> bool:
    """Whether the verifier evaluates what the completion contains: `9**9**9` is enough."""
    if name == "math":
        return prompt.answer is not None
    task = str(prompt.columns.get("task", ""))
    return name in ("auto", "reasoning_gym") and task.startswith("reasoning_gym/")


@cache
def _pool(name: str) -> RewardPool:
    """One process for each such verifier; it ends with this one."""
    source = ItemSource(name, name, "verifier")
    return RewardPool([source], workers=1, timeout=TIMEOUT_S, startup=STARTUP_S)


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None without one.

    Signs, thousands commas, decimals, exponents and fractions such as 3/4 are understood.
    """
    found = _NUMBER.findall(_plain(text))
    return _to_fraction(found[-1]) if found else None


def whole_number(text: str) -> Fraction | None:
    """The number that the whole text is, a currency or percent sign aside; else None."""
    plain = _plain(text).strip().strip("$%€£ ")
    return _to_fraction(plain) if _NUMBER.fullmatch(plain) else None


def same_number(a: Fraction, b: Fraction) -> bool:
    """Whole numbers exactly; others to a relative TOLERANCE."""
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b))


def last_boxed(text: str) -> str | None:
    r"""What the last closed \boxed{} holds, nested braces and all."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        begin, depth = start + len("\\boxed{"), 1
        for at in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[begin:at]
        start = text.rfind("\\boxed{", 0, start)
    return None


def final_answer(completion: str) -> str:
    r"""What the last <answer></answer>, else the last \boxed{} holds, else all of it; stripped."""
    tagged = _ANSWER_TAG.findall(completion)
    answer = tagged[-1] if tagged else last_boxed(completion)
    return (completion if answer is None else answer).strip()


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    return make_dataset(name, json.loads(options), "verifier reasoning_gym")


def _own_score(dataset: Any, answer: str, entry: Mapping[str, object]) -> float:
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception:
        # Its scorers raise what their parsers raise on text that is no answer: a wrong answer.
        return 0.0
    return min(max(score, 0.0), 1.0)


def _plain(text: str) -> str:
    """A typographic minus as a hyphen, and LaTeX fractions of whole numbers as a/b."""
    return _LATEX_FRACTION.sub(r"\1/\2", text.replace("\u2212", "-"))


def _to_fraction(text: str) -> Fraction | None:
    if len(text) > _LONGEST_NUMBER:
        return None
    over, _, under = text.replace(",", "").replace(" ", "").partition("/")
    if under and int(under) == 0:
        return None
    return Fraction(over) / int(under or 1)
