"""How right a completion is: pure functions of its text and what its prompt carries.

A verifier takes (completion text, prompt) and returns a score in [0, 1], or None where the prompt
has no answer to compare with, or none that the verifier can read: such a completion is left out of
every mean, it does not count as wrong. Some evaluate an expression in the completion, which may
take for ever: `verifier` runs those in a process that can be killed.
"""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial, wraps
from typing import Any, Protocol

import regex

from jaxrl.data.tasks import ARITHMETIC, make_dataset
from jaxrl.data.thoughts import CLOSES, OPENS
from jaxrl.errors import UserError, short, unknown
from jaxrl.rewards import answers
from jaxrl.rewards.languages import SOLID, in_ascii, in_english, same_characters
from jaxrl.rewards.reward_pool import Item, ItemSource, RewardPool

TIMEOUT_S, STARTUP_S = 10.0, 120.0
"""Seconds for one completion in a process, and for its imports before."""


class Judged(Protocol):
    """What a verifier reads of a prompt (`Prompt` and `Example` have it)."""

    @property
    def answer(self) -> str | None: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...


Verifier = Callable[[str, Judged], float | None]
_CLOSES = re.compile(CLOSES.pattern + r"|<\|channel\|>final.*?<\|message\|>")
_OPENS = re.compile(OPENS.pattern + r"|<\|channel\|>analysis")
"""Also of gpt-oss (`chat_template.CHANNELS`)."""


def after_thoughts(turn: str) -> str | None:
    """Returns the text behind the last thoughts of a turn, or all of it without any; stripped.

    None where the thoughts are not closed: there is no answer.

    Args:
        turn: from where its thoughts were opened on (`types.Completion.whole_text`).
    """
    closes = next(reversed(list(_CLOSES.finditer(turn))), None)
    answer = turn if closes is None else turn[closes.end() :]
    return None if _OPENS.search(answer) else answer.strip()


def answer_of(prompt: Judged) -> str | None:
    """Returns the reference answer; None if the row has none, or NaN, as tables write that."""
    answer = prompt.answer
    return None if answer is None or answer != answer else answer


def _with_answer(
    judge: Callable[[str, str], float | None], read: Callable[[str], str] = in_english
) -> Verifier:
    """Makes a verifier of what compares a completion, without its thoughts, with its prompt's
    answer, both as `read` writes them: None without an answer, 0 where the thoughts never ended."""

    @wraps(judge)
    def verify(completion: str, prompt: Judged) -> float | None:
        answer, text = answer_of(prompt), after_thoughts(completion)
        if answer is None:
            return None
        score = judge(read(text or ""), read(answer))
        return 0.0 if score is not None and text is None else score

    return verify


@partial(_with_answer, read=same_characters)
def judge_text(completion: str, answer: str) -> float:
    """Returns 1 if completion and answer are the same text, apart from white space at the ends."""
    return float(completion.strip() == answer.strip())


@partial(_with_answer, read=in_ascii)
def judge_words(completion: str, answer: str) -> float:
    """Returns 1 if the answer occurs in the completion as whole words, in any case of letters. In a
    script without spaces between words, any part of a text is one."""
    words = regex.escape(answer.strip(), special_only=True)
    begins = rf"(?:(?<!\w)|(?<={SOLID})|(?={SOLID}))"
    ends = rf"(?:(?!\w)|(?={SOLID})|(?<={SOLID}))"
    places = regex.finditer(f"{begins}{words}{ends}", completion, regex.IGNORECASE)
    return float(bool(words) and any(answers.stands_alone(completion, *m.span()) for m in places))


@_with_answer
def judge_number(completion: str, answer: str) -> float | None:
    r"""Returns 1 if the completion's number equals the answer: 1,234.50 is 1234.5, 3/4 is 0.75.

    It is what the last \boxed{}, `#### ` or <answer></answer> holds, else what `the answer is`
    says, else the last number. None where the answer is not one number.
    """
    wanted = answers.read_number(answers.final_answer(answer))
    got = wanted and answers.given_number(completion)
    return None if wanted is None else float(got is not None and got.same(wanted))


@_with_answer
def judge_box(completion: str, answer: str) -> float:
    r"""Returns 1 if the completion's last \boxed{} is the answer, as a number or as a text."""
    got, wanted = answers.last_boxed(completion), answers.final_answer(answer)
    return float(got is not None and answers.same_answer(got, wanted))


@_with_answer
def judge_marked(completion: str, answer: str) -> float:
    """Returns 1 if the final answers of both are the same number or text."""
    return float(answers.same_answer(*map(answers.final_answer, (completion, answer))))


@_with_answer
def judge_math(completion: str, answer: str) -> float | None:
    """Returns 1 if the completion's expression equals the answer, as computed by math-verify (extra
    `tasks`), or None if the answer is not understood."""
    try:
        from jaxrl.rewards import expressions  # needs an optional package
    except ImportError as error:
        raise UserError(
            "verifier math needs the extra `tasks`: pip install 'jaxrl[tasks]'"
        ) from error
    return expressions.judge_expression(completion, answers.final_answer(answer))


def reasoning_gym(completion: str, prompt: Judged) -> float | None:
    r"""Returns the data set's own score of the completion's final answer.

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
    text = after_thoughts(completion)
    if text is None:
        return 0.0
    candidates = [answers.final_answer(text)]
    last = answers.last_spelled(text)
    if last and answers.whole_number(str(entry["answer"])) is not None:
        candidates.append(last[0].replace(",", ""))
    scores = [0.0]
    for candidate in candidates:
        # Its scorers raise what their parsers raise on text that is no answer: a wrong answer.
        with suppress(Exception):
            scores.append(min(float(dataset.score_answer(candidate, entry)), 1.0))
    return max(scores)


def auto(completion: str, prompt: Judged) -> float | None:
    r"""Applies the verifier of the prompt's task; else `number` if the answer, or what its `#### `
    or \boxed{} holds, is one; else compares the texts: whole ones, or what these hold."""
    task = str(prompt.columns.get("task", ""))
    if task.startswith("reasoning_gym/") and "entry" in prompt.columns:
        return reasoning_gym(completion, prompt)
    if task == ARITHMETIC:
        return VERIFIERS["arithmetic"](completion, prompt)
    answer = in_english(answer_of(prompt) or "")
    if answers.whole_number(answers.final_answer(answer)) is not None:
        return judge_number(completion, prompt)
    judge = judge_text if answers.marked_answer(answer) is None else judge_marked
    return judge(completion, prompt)


VERIFIERS: dict[str, Verifier] = {
    "auto": auto,
    "exact": judge_text,
    "contains": judge_words,
    "number": judge_number,
    "boxed": judge_box,
    "math": judge_math,
    "arithmetic": _with_answer(answers.score_sum),
    "reasoning_gym": reasoning_gym,
}
BUILT_IN = frozenset(VERIFIERS)
"""Those that come with jaxrl."""


def verifier(name: str) -> Verifier:
    """Returns one of VERIFIERS by its name. A completion that it does not judge within TIMEOUT_S is
    wrong: it gives 0, or None where the prompt's answer cannot be read either."""
    if name not in VERIFIERS:
        raise unknown("data.verifier", name, VERIFIERS)

    def judge(completion: str, prompt: Judged) -> float | None:
        if not may_hang(name, prompt):
            return _checked(name, completion, prompt)
        item = Item("", completion, prompt.answer, prompt.columns)
        scores = _pool(name).judge(0, [item]).result()
        if scores.failures and scores.failures[0].kind == "user":
            raise UserError(scores.failures[0].text)
        return scores.values[0]

    return judge


def _checked(name: str, completion: str, prompt: Judged) -> float | None:
    """Returns the score of a verifier, which may be the user's.

    Raises:
        UserError: it raised, or what it returned is no score.
    """
    try:
        score = VERIFIERS[name](completion, prompt)
        if score is None or isinstance(score, numbers.Real) and 0 <= score <= 1:
            return None if score is None else float(score)
        wrong, cause = f"returned {score!r}; a score is a number from 0 to 1, or None", None
    except UserError:
        raise
    except Exception as error:
        wrong, cause = f"raised {type(error).__name__}: {error}", error
    where = f"data.verifier={name}, for the completion {short(repr(completion))}"
    raise UserError(f"{where}: it {wrong}") from cause


def why_unjudged(prompts: Sequence[Judged]) -> str:
    """Explains why a verifier judges none of some prompts, for a message that has already named
    it."""
    known = [answer for prompt in prompts if (answer := answer_of(prompt)) is not None]
    if not known:
        return "they have no answer to compare with (data.answer_key names its column)"
    missing = len(prompts) - len(known)
    none = f"{missing} have no answer, and " if missing else ""
    return f"{none}it cannot read answers such as {short(repr(known[0]))}; choose another verifier"


def may_hang(name: str, prompt: Judged) -> bool:
    """Returns whether the verifier evaluates what the completion contains: `9**9**9` is enough."""
    if name == "math":
        return prompt.answer is not None
    task = str(prompt.columns.get("task", ""))
    return name in ("auto", "reasoning_gym") and task.startswith("reasoning_gym/")


@cache
def _pool(name: str) -> RewardPool:
    """Starts one process for each such verifier; it ends with this one."""
    source = ItemSource(name, name, option="verifier")
    return RewardPool([source], workers=1, timeout=TIMEOUT_S, startup=STARTUP_S)


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    return make_dataset(name, json.loads(options), "verifier reasoning_gym")
