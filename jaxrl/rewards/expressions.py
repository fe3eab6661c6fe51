"""Whether the expression in a completion equals a reference answer; math-verify computes it.

Numbers and words are compared here without it. Of math-verify this uses the reader of LaTeX and the
comparison, and not the search for an expression in a text: where the right place cannot be read,
it takes another.
"""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from math_verify import grader, parser, verify

from jaxrl.rewards.answers import (
    LONGEST_EXPRESSION,
    TOLERANCE,
    Number,
    given_expression,
    given_texts,
    literal,
    read_number,
    same_literal,
    spelled,
    tidy,
)

# At every call it would warn that nobody limits its time: a process of ours does.
logging.getLogger("math_verify").setLevel(logging.ERROR)
sympy = parser.sympy
DIGITS = 30
"""Of exact constants that are compared by their values."""
_NORMAL = parser.NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
"""Its `units` would read 5 from `5t`."""
_CASES = replace(
    inspect.signature(parser.latex2sympy).parameters["conversion_config"].default,
    lowercase_symbols=False,
)
"""R and r are two symbols."""
_FUNCTIONS = re.compile(
    r"(?<![A-Za-z\\])(pi|infty|sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan)(?![A-Za-z])"
)
_CHARACTERS = {"π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge "}
_CHARACTERS |= {"≠": r"\ne ", "∪": r"\cup ", "±": r"\pm ", "°": r"^\circ ", "**": "^"}
_CHARACTERS |= {r"\langle": "(", r"\rangle": ")", r"\mathbb R": r"\mathbb{R}"}
_CHARACTERS |= {r"\varnothing": r"\emptyset "}
_UNIT = re.compile(
    r"(?<=\S)\s*\\(?:text|mbox|mathrm|textrm|rm)"
    r"\s*\{\s*(?!\s*(?:or|and|if|when|for)\b)[A-Za-z. ]+\}"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?\s*\Z"
)
_BARE_UNIT = re.compile(
    r"(?<=[\d}\w)])\s+(?:(?:square|sq|cubic)\s+)?(?:mm|cm|km|ft|feet|inch(?:es)?|units?|meters?|miles?)"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?\s*\Z"
)
_OPENS = {"(": ")", "[": ")]", "{": "}"}


def judge(completion: str, answer: str) -> float | None:
    """1 where the completion gives the answer, else 0; None where the answer is not understood."""
    wanted = literal(answer)
    if wanted is not None:
        return float(any(same_literal(wanted, text) for text in given_texts(completion)))
    gold = read_number(answer) or _expression(_latex(answer))
    if gold is None:
        return None
    found = given_expression(completion)
    texts = [given_texts(completion)[0], *([found] if isinstance(found, str) else [])]
    if any(spelled(text) == spelled(answer) for text in texts):
        return 1.0
    if isinstance(found, str):
        if literal(found) is not None or _brackets(found) * _brackets(answer) < 0:
            return 0.0
        found = read_number(found) or _expression(_latex(found))
    return float(found is not None and _equal(gold, found))


def _equal(gold: Any, found: Any) -> bool:
    """Whether two numbers or expressions are equal; an equation `x = 5` equals 5."""
    if isinstance(gold, Number) and isinstance(found, Number):
        return gold.same(found)
    if isinstance(found, Number):
        return any(_equal(gold, value) for value in _values(found))
    if isinstance(gold, Number):
        return any(_equal(value, found) for value in _values(gold))
    # math-verify would read the ends of an interval from an inequality, and compare these.
    if {_is_inequality(gold), _is_inequality(found)} == {True, False} and any(
        isinstance(one, sympy.FiniteSet) for one in (gold, found)
    ):
        return False
    if _is_relation(found) and not _is_relation(gold):
        if isinstance(gold, sympy.Set):
            return bool(verify([gold], [found], timeout_seconds=None, allow_set_relation_comp=True))
        value = _assigned(found)
        return value is not None and _equal(gold, value)
    if _is_relation(gold) and not _is_relation(found) and not isinstance(found, sympy.Set):
        value = _assigned(gold)
        return value is not None and _equal(value, found)
    if _is_inequality(gold) and _is_inequality(found):
        return _same_solutions(gold, found)
    if _is_constant(gold) and _is_constant(found):
        return _same_value(gold, found)
    return bool(verify([gold], [found], timeout_seconds=None))


def _same_solutions(gold: Any, found: Any) -> bool:
    """Whether two inequalities are equal, or have the same solutions in their only symbol."""
    if verify([gold], [found], timeout_seconds=None):
        return True
    if len(gold.free_symbols) != 1 or gold.free_symbols != found.free_symbols:
        return False
    try:
        return bool(gold.as_set() == found.as_set())
    except Exception:  # not every inequality is solved
        return False


def _same_value(a: Any, b: Any) -> bool:
    """Whether two constants are equal: exactly, or to TOLERANCE where one has decimals."""
    rounded = a.has(sympy.Float) or b.has(sympy.Float)
    values = [sympy.N(x, DIGITS) for x in (a, b)]
    if not all(value.is_finite for value in values):
        return bool(values[0] == values[1])
    if not rounded and max(abs(value) for value in values) < 10**DIGITS * 10**DIGITS:
        difference = a.doit() - b.doit()
        if difference.is_Rational:
            return bool(difference == 0)
    close = float(TOLERANCE) if rounded else sympy.Float(10) ** (10 - DIGITS)
    return bool(abs(values[0] - values[1]) <= close * max(abs(value) for value in values))


def _is_constant(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr) and not expression.free_symbols


def _is_relation(expression: Any) -> bool:
    return bool(grader.is_relation(expression))


def _is_inequality(expression: Any) -> bool:
    return _is_relation(expression) and not grader.is_equation(expression)


def _assigned(relation: Any) -> Any:
    """The value of `x = 5`, `f(x) = x + 5` or `2 + 3 = 5`; None of any other relation."""
    parts = list(getattr(relation, "_unsorted_args", ())) or [relation]
    left = parts[0].args[0] if parts[0].args else parts[0]
    named = isinstance(left, sympy.Symbol | sympy.core.function.AppliedUndef)
    if not all(isinstance(part, sympy.Eq) for part in parts):
        return None
    return parts[-1].args[1] if named or not getattr(left, "free_symbols", True) else None


def _values(number: Number) -> list[Any]:
    """The number for sympy; one per cent is 1 and is 0.01."""
    value = sympy.Rational(number.value.numerator, number.value.denominator)
    rounded = {2, 5}.issuperset(sympy.primefactors(value.q)) and value.q > 1
    values = [value, value / 100] if number.percent else [value]
    return [sympy.Float(one, DIGITS) for one in values] if rounded else values


def _brackets(text: str) -> int:
    """1 of a tuple or interval, -1 of a set in braces, 0 of anything else."""
    text = spelled(text).replace("\\", "")
    if "," not in text or text[0] not in _OPENS or text[-1] not in _OPENS[text[0]]:
        return 0
    return -1 if text[0] == "{" else 1


def _latex(text: str) -> str:
    """An answer as LaTeX: no delimiters, units and prose, and its characters as commands."""
    for old, new in _CHARACTERS.items():
        text = text.replace(old, new)
    text = re.sub(r"\\[()]|\\\[|\\\](?!\])|\\[dtc]?frac(?=\s*[{\d])", _kept, tidy(text))
    text = re.sub(r"\s+", " ", text.replace("$", "")).lstrip(" ,;:*`").rstrip(" .,;:*`")
    text = _BARE_UNIT.sub("", _UNIT.sub("", text))
    text = re.sub(r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup ", _FUNCTIONS.sub(r"\\\1 ", text))
    text = re.sub(r"\A[A-Za-z] ?\\in(?![A-Za-z])", "", text)
    exact, _, rounded = text.partition(r"\approx")
    text = rounded if rounded and re.fullmatch(r"\s*[A-Za-z]\s*", exact) else exact
    if r"\pm" in text:
        text = f"{text.replace(chr(92) + 'pm', '+')}, {text.replace(chr(92) + 'pm', '-')}"
        text = re.sub(r"(\A|[,=(]\s*)\+", r"\1", text)
    return text.strip()


def _kept(m: re.Match[str]) -> str:
    return r"\frac" if "frac" in m[0] else " "


@lru_cache(maxsize=1024)
def _expression(latex: str) -> Any:
    """The sympy object that LaTeX is; None where it is none. Constants may have the imaginary
    unit."""
    # It would read 42 from `4 2`, and f(x) from `f'(x)`.
    if (
        not 0 < len(latex) <= LONGEST_EXPRESSION
        or "'" in latex
        or re.search(r"(?<![_^\w.])(?<!frac )\d+ \d", latex)
    ):
        return None
    try:
        normal = parser.normalize_latex(latex, _NORMAL)
        found = parser.latex2sympy(
            normal,
            is_real=True,
            convert_degrees=re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", normal) is not None,
            normalization_config=None,
            conversion_config=_CASES,
        )
    except Exception:  # its reader raises what it likes of what is no LaTeX
        return None
    if re.search(r"\bor\b", latex) and isinstance(found, sympy.Set):
        found = _union(found)
    imaginary = sympy.Symbol("i", real=True)
    if isinstance(found, sympy.Expr) and found.free_symbols == {imaginary}:
        return found.subs(imaginary, sympy.I)
    return found


def _union(found: Any) -> Any:
    """The solutions of inequalities with `or` between them; anything else as it is."""
    parts = list(found.args)
    if not parts or not all(_is_inequality(x) and len(x.free_symbols) == 1 for x in parts):
        return found
    if len({symbol for x in parts for symbol in x.free_symbols}) > 1:
        return found
    return sympy.Union(*(x.as_set() for x in parts))
