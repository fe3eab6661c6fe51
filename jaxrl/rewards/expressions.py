"""Whether the expression in a completion equals a reference answer; math-verify computes it.

Numbers and words are compared here without it. Of math-verify this uses the reader of LaTeX and the
comparison, and not the search for an expression in a text: where the right place cannot be read,
it takes another.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import grader, parser, verify

from jaxrl.rewards import answers
from jaxrl.rewards.rules import pattern, rewrite

# At every call it would warn that nobody limits its time: a process of ours does.
logging.getLogger("math_verify").setLevel(logging.ERROR)
sympy = parser.sympy
DIGITS = 30
"""Of constants that are compared by their values, beside those that exact ones have more."""
EXACT_BITS, IRRATIONAL_BITS = 1_000_000, 60_000
"""Sizes of constants beyond which only equal spellings are equal."""
_NORMAL = parser.NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
"""Its `units` would read 5 from `5t`."""
_CASES = replace(
    inspect.signature(parser.latex2sympy).parameters["conversion_config"].default,
    lowercase_symbols=False,
)
"""R and r are two symbols."""


def judge_expression(completion: str, answer: str) -> float | None:
    """Returns 1 if the completion gives the answer, else 0; None if it is not understood."""
    wanted = answers.literal(answer)
    if wanted is not None:
        texts = answers.given_texts(completion)
        return float(any(answers.same_literal(wanted, text) for text in texts))
    gold = _read(answer)
    if gold is None:
        return None
    found = answers.given_expression(completion)
    texts = [answers.given_texts(completion)[0], *([found] if isinstance(found, str) else [])]
    if any(answers.spelled(text) == answers.spelled(answer) for text in texts):
        return 1.0
    if isinstance(found, str):
        if answers.literal(found) is not None or not _may_be_one(answer, found):
            return 0.0
        found = _read(found)
    return float(found is not None and _equal(gold, found))


def _may_be_one(gold: str, found: str) -> bool:
    """Returns whether the brackets and units of two answers allow them to be equal: a set in braces
    is no tuple, an interval without its ends is not one with them, a tuple is a list only in the
    same order, and \\text{ cm} behind an expression is not \\text{ m}."""
    if not answers.units_agree(*(_split_unit(text)[1] for text in (gold, found))):
        return False
    (a, these), (b, those) = _parts(gold), _parts(found)
    if "" in (a, b) or a == b or {a, b} == {"{}", ","}:
        return True
    numbers = any(map(answers.read_number, (gold, found)))
    if "," not in (a, b) or "=" in gold + found or numbers:
        return "," in (a, b)
    pairs = zip(map(_read, these), map(_read, those), strict=False)
    same = [None not in pair and _equal(*pair) for pair in pairs]
    return len(these) == len(those) and all(same)


def _read(text: str) -> Any:
    """Reads an answer as a number or else an expression; None where it is neither."""
    return answers.read_number(text) or _expression(_latex(text))


def _equal(gold: Any, found: Any) -> bool:
    """Returns whether two numbers or expressions are equal; an equation `x = 5` equals 5."""
    gold, found = (_decimal(x) if isinstance(x, sympy.Float) else x for x in (gold, found))
    if isinstance(gold, answers.Number) and isinstance(found, answers.Number):
        return gold.same(found)
    if isinstance(found, answers.Number):
        gold, found = found, gold
    if isinstance(gold, answers.Number):
        if _is_constant(found):
            return _is_value(found, gold)
        return any(_equal_expressions(value, found) for value in _values(gold))
    return _equal_expressions(gold, found)


def _equal_expressions(gold: Any, found: Any) -> bool:
    # math-verify would read the ends of an interval from an inequality, and compare these.
    if {_is_inequality(gold), _is_inequality(found)} == {True, False} and any(
        isinstance(one, sympy.FiniteSet) for one in (gold, found)
    ):
        return False
    if _is_relation(found) and isinstance(gold, sympy.Set):
        return bool(verify([gold], [found], timeout_seconds=None, allow_set_relation_comp=True))
    for relation, other in ((found, gold), (gold, found)):
        if _is_relation(relation) and not (_is_relation(other) or isinstance(other, sympy.Set)):
            value = _assigned(relation)
            return value is not None and _equal(other, value)
    if _is_inequality(gold) and _is_inequality(found):
        same = bool(verify([gold], [found], timeout_seconds=None))
        with suppress(Exception):  # not every inequality is solved
            same |= gold.free_symbols == found.free_symbols and gold.as_set() == found.as_set()
        return same
    if _is_constant(gold) and _is_constant(found):
        return _same_value(gold, found)
    if any(_is_constant(x) and _bits(x) > EXACT_BITS for x in (gold, found)):
        return False
    for kind in (sympy.Tuple, sympy.FiniteSet):
        if isinstance(gold, kind) and isinstance(found, kind):
            if not all(_is_constant(x) for x in (*gold.args, *found.args)):
                continue
            if kind is sympy.Tuple:
                return len(gold) == len(found) and all(map(_equal, gold, found))
            return all(
                any(_equal(x, y) for y in those.args)
                for these, those in ((gold, found), (found, gold))
                for x in these.args
            )
    if _is_relation(gold) and _is_relation(found):
        chains = [len(getattr(x, "_unsorted_args", None) or [x]) > 1 for x in (gold, found)]
        if all(chains) and gold.free_symbols != found.free_symbols:
            return False
        # math-verify would compute derivatives such as dy/dx to be 0.
        derivatives = [
            {x for x in one.atoms(sympy.Derivative) if x.expr.is_Symbol} for one in (gold, found)
        ]
        if derivatives[0] != derivatives[1]:
            return False
    # To math-verify, names of several letters such as R_1 and Omega are the same in small letters.
    names = [{symbol.name for symbol in one.free_symbols} for one in (gold, found)]
    if names[0] != names[1] and len({frozenset(map(str.lower, one)) for one in names}) == 1:
        return False
    return bool(verify([gold], [found], timeout_seconds=None))


def _same_value(a: Any, b: Any) -> bool:
    """Returns whether two constants are equal, to as many digits as they have; if they are too
    large for that, whether they are the same power or the same expression."""
    bits = _bits(a) + _bits(b)
    if bits > EXACT_BITS:
        powers = isinstance(a, sympy.Pow) and isinstance(b, sympy.Pow) and a.base == b.base
        return bool(a == b or (powers and _same_value(a.exp, b.exp)))
    a, b = (
        x.xreplace({f: sympy.Rational(str(f)) for f in x.atoms(sympy.Float)}).doit() for x in (a, b)
    )
    difference = a - b
    if difference.is_Rational:
        return bool(difference == 0)
    digits = DIGITS
    for _ in range(2):  # most differ in their first digits
        values = [sympy.N(x, digits) for x in (a, b)]
        if not all(value.is_finite for value in values):
            return bool(values[0] == values[1])
        close = sympy.Float(10, digits) ** (10 - digits) * max(abs(value) for value in values)
        if bits > IRRATIONAL_BITS or abs(values[0] - values[1]) > close:
            return False
        digits += math.ceil(bits / 3)
    return True


def _bits(x: Any) -> float:
    """Estimates how many bits the exact value of a constant takes."""
    if x.is_Rational:
        return float(int(x.p).bit_length() + int(x.q).bit_length())
    if x.is_Float:
        return 120.0
    args = [_bits(one) for one in x.args]
    if isinstance(x, sympy.Pow | sympy.factorial | sympy.binomial | sympy.exp):
        last = x.args[0] if isinstance(x, sympy.factorial | sympy.binomial) else x.args[-1]
        if max(args) > EXACT_BITS or _bits(last) > 130:
            return math.inf
        size = max(1.0, float(abs(sympy.N(last))))
        return size * (args[0] if isinstance(x, sympy.Pow) else 2 + math.log2(size + 1))
    return sum(args) + 2


def _decimal(decimal: Any) -> answers.Number:
    """Converts a decimal of sympy as it was spelled, with at most 15 digits."""
    value, digits = sympy.Rational(str(decimal)), str(decimal).partition("e")[0].rstrip("0")
    exponent = int(str(decimal).partition("e")[2] or 0) - len(digits.partition(".")[2])
    step = Fraction(10) ** exponent if value.q > 1 else Fraction(0)
    return answers.Number(Fraction(int(value.p), int(value.q)), step=step)


def _is_value(constant: Any, number: answers.Number) -> bool:
    """Returns whether a number equals a constant: exactly or, if a decimal, after rounding."""
    for value in {number.value, number.value / 100} if number.percent else {number.value}:
        if _same_value(constant, sympy.Rational(value.numerator, value.denominator)):
            return True
        step = number.step if value == number.value else number.step / 100
        if step and _bits(constant) <= EXACT_BITS:
            exact = sympy.N(constant, DIGITS)
            close = min(step / 2, answers.TOLERANCE * abs(value))
            off = abs(exact - sympy.Float(str(value.numerator), 60) / value.denominator)
            if exact.is_finite and off <= sympy.Float(close.numerator, 60) / close.denominator:
                return True
    return False


def _is_constant(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr) and not expression.free_symbols


def _is_relation(expression: Any) -> bool:
    return bool(grader.is_relation(expression))


def _is_inequality(expression: Any) -> bool:
    return _is_relation(expression) and not grader.is_equation(expression)


def _assigned(relation: Any) -> Any:
    """Returns the value of `x = 5`, `f(x) = x + 5` or `2 + 3 = 5`; None for other relations."""
    parts = list(getattr(relation, "_unsorted_args", ())) or [relation]
    left = parts[0].args[0] if parts[0].args else parts[0]
    named = isinstance(left, sympy.Symbol | sympy.core.function.AppliedUndef)
    if not all(isinstance(part, sympy.Eq) for part in parts):
        return None
    return parts[-1].args[1] if named or not getattr(left, "free_symbols", True) else None


def _values(number: answers.Number) -> list[Any]:
    """Converts the number for sympy; one per cent counts both as 1 and as 0.01."""
    value = sympy.Rational(number.value.numerator, number.value.denominator)
    rounded = {2, 5}.issuperset(sympy.primefactors(value.q)) and value.q > 1
    values = [value, value / 100] if number.percent else [value]
    return [sympy.Float(one, DIGITS) for one in values] if rounded else values


def _parts(text: str) -> tuple[str, list[str]]:
    """Splits a list: returns the brackets around a whole list or tuple (`,` for a list without any,
    "" if it is no list), and what is between the commas that stand in no other brackets."""
    text = answers.spelled(rewrite(text, "characters")).replace("\\{", "⟨").replace("\\}", "⟩")
    parts, depth, closed = [""], 0, len(text)
    outer = text[:1] in ("(", "[", "⟨")
    for i, character in enumerate(text):
        depth += (character in "([{⟨") - (character in ")]}⟩")
        if depth == 0 and outer:
            closed = min(closed, i)
        parts.append("") if character == "," and depth == 0 else None
        parts[-1] += character if character != "," or depth else ""
    if outer and closed == len(text) - 1:
        kind = (text[0] + text[-1]).replace("⟨", "{").replace("⟩", "}")
        inner = _parts(text[1:-1].replace("⟨", "\\{").replace("⟩", "\\}"))
        return (kind, inner[1]) if inner[0] == "," else ("", [])
    return ("," if len(parts) > 1 else "", parts)


def _split_unit(text: str) -> tuple[str, str]:
    r"""Splits an expression and the unit behind it, as in `10\sqrt3\text{ cm}`."""
    text = rewrite(text, "tidy").replace("$", "").rstrip(" .,;:*`")
    m = pattern("unit in LaTeX").search(text) or pattern("bare unit").search(text)
    unit = answers.unit_of(answers.plain_text(f"1{m[0]}")[1:]) if m else None
    return (text, "") if m is None or unit is None else (text[: m.start()], unit)


def _latex(text: str) -> str:
    """Writes an answer as LaTeX: no delimiters, units and prose; its characters as commands."""
    text = rewrite(rewrite(rewrite(text, "characters"), "tidy"), "expression")
    text = rewrite(_split_unit(text)[0], "latex")
    exact, _, rounded = text.partition(r"\approx")
    text = rounded if rounded and re.fullmatch(r"\s*[A-Za-z]\s*", exact) else exact
    if r"\pm" in text:
        text = f"{text.replace(chr(92) + 'pm', '+')}, {text.replace(chr(92) + 'pm', '-')}"
        text = re.sub(r"(\A|[,=(]\s*)\+", r"\1", text)
    return text.strip()


@lru_cache(maxsize=1024)
def _expression(latex: str) -> Any:
    """Parses LaTeX into a sympy object, or None. Constants may have the imaginary unit."""
    if not 0 < len(latex) <= answers.LONGEST_EXPRESSION or pattern("unreadable").search(latex):
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
        # Solutions of inequalities in one symbol that are joined by `or`.
        parts = list(found.args)
        solvable = all(_is_inequality(x) and len(x.free_symbols) == 1 for x in parts)
        if parts and solvable and len({symbol for x in parts for symbol in x.free_symbols}) == 1:
            found = sympy.Union(*(x.as_set() for x in parts))
    imaginary = sympy.Symbol("i", real=True)
    if isinstance(found, sympy.Expr) and found.free_symbols == {imaginary}:
        return found.subs(imaginary, sympy.I)
    return found
