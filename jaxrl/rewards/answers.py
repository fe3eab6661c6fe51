"""The answer in a text: what stands behind its thoughts, the final answer in that, its number.

Everything here reads spellings, of prose and of LaTeX, and computes no expression. What is not
understood is None, never a part of it: `2x+3` is no 3. The spellings are rows of
assets/answer_rules.yaml (`rules.pattern`, `rules.rewrite`), the words of assets/answer_words.yaml.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import regex as re

from jaxrl.rewards.languages import word_table, words_of
from jaxrl.rewards.rules import pattern, rewrite

TOLERANCE = Fraction(1, 10**6)
"""Relative difference at which two numbers are equal where a decimal is the other one rounded."""
LONGEST_NUMBER = 1000
"""Characters; Python refuses to read numbers of more than 4300 digits."""
LONGEST_EXPRESSION = 1000
"""Characters of a text without any mark that may be an answer as a whole."""
_OF_EXPRESSIONS = frozenset(words_of("part of an expression"))
"""Words that prose does not have."""
_SCALES = {word: int(row[0]) for row in word_table()["scales"] for word in row[1].split("|")}
"""What a number before such a word is multiplied by; 0: no value is read."""
_MILLI = {"p": "pico", "n": "nano", "m": "milli", "c": "centi", "d": "deci", "k": "kilo"}
_MILLI |= dict.fromkeys(("u", "mc", "µ", "μ"), "micro")
_MEGA = _MILLI | {"M": "mega", "G": "giga", "T": "tera"}
_KINDS = {"metric units": _MILLI, "metric units with capital prefixes": _MEGA, "units": {}}
_UNITS = {
    prefix[len(word) > 3] + word: prefix[1] + words.split()[0]
    for part, prefixes in _KINDS.items()
    for words in words_of(part)
    for word in words.split()
    for prefix in (("", ""), *prefixes.items())
    if word not in "NJWVAB" or prefix[0]  # 5 N is five times N, unless the N is upright
}
_LOWER = {word.lower(): unit for word, unit in _UNITS.items()}
_LOWER |= {word.lower(): "" for word, unit in _UNITS.items() if _LOWER[word.lower()] != unit}
_MONEY, _AREAS = ("$", "cent", "€", "₹", "¥"), {"square": 2, "sq": 2, "cubic": 3}
_NO_UNITS = _OF_EXPRESSIONS.union(
    *map(words_of, ("makes another value of the number before it", "scales", "no unit"))
)
"""Words after a number that make another value of it, or no value."""


@dataclass(frozen=True)
class Number:
    """A number as a text spells it."""

    value: Fraction
    """Without its percent sign: 50 of `50%`."""
    percent: bool = False
    unit: str = ""
    """One spelling of the unit behind it where that is known, as in `m·s^-2`; else empty."""
    things: str = ""
    """The words behind it that are no such unit, as in `10 apples`."""
    name: str = ""
    """`x` of `x = 5`."""
    step: Fraction = field(default=Fraction(0), compare=False)
    """The unit of a decimal's last digit, 1/100 of `1.25`; 0 of what is spelled exactly."""

    def same(self, other: Number) -> bool:
        """Compares both: 50% is 50 and 0.5; 5 cm is 5, but not 5 m; x = 5 is not y = 5."""
        names = {self.name, other.name} - {""}
        if len(names) > 1 or not units_agree(self.unit, other.unit):
            return False
        a, b = (self, other) if self.percent else (other, self)
        if a.percent == b.percent:
            return _same_value(a, b)
        # $36 is no 36%
        return not b.unit and any(_same_value(a, b, share) for share in (1, 100))


def _same_value(a: Number, b: Number, share: int = 1) -> bool:
    """Compares a / share with b: exactly, or where the last digit of the coarser decimal is worth a
    step, one is the other rounded to that; to a relative TOLERANCE at least."""
    value, step = a.value / share, max(a.step / share, b.step)
    return abs(value - b.value) <= min(step / 2, TOLERANCE * max(abs(value), abs(b.value)))


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last closed \boxed{}, nested braces included, or None."""
    boxes = _boxes(text)
    return boxes[-1].content if boxes else None


def marked_answer(text: str) -> str | None:
    r"""Returns the content of the last <answer></answer>, \boxed{} or `#### `; None without any.

    Boxes with nothing but `,`, `and`, `or`, `x =` between them are one answer of several parts. A
    line that begins with #### and is no number is a heading, unless it is the text's last.
    """
    before, closed, _ = text.rpartition("</answer>")
    _, opened, inner = before.rpartition("<answer>")
    if closed and opened:
        return _in_boxes(inner).strip()
    answers = [boxed] if (boxed := _last_boxes(text)) else []
    for m in pattern("hashes").finditer(text):
        if text[m.end() :].strip() == "" or read_number(m[1]) is not None:
            answers.append((m.end(), _in_boxes(m[1])))
    return max(answers)[1].strip() if answers else None


def final_answer(text: str) -> str:
    """Returns the marked answer, or else the whole text, stripped."""
    answer = marked_answer(text)
    return text.strip() if answer is None else answer


def stated_answer(text: str) -> str | None:
    """Returns the rest of the last sentence that contains `answer is` or `answer:`, or None."""
    last = next(reversed(list(pattern("stated").finditer(text))), None)
    return last and (pattern("ornament").sub("", last[1]).strip(" *_") or None)


def read_number(text: str) -> Number | None:
    """Returns the number, with its unit, currency or per cent, that is the whole text, or None.

    `x = 5` and `2 + 3 = 5` are 5. A unit is any words behind the number that cannot change it.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    number = rewrite(plain_text(text), "number")
    named = pattern("name").match(number)
    number = number[named.end() if named else 0 :]
    before, _, last = number.rpartition("=")
    if named and pattern("last name").search(before):  # a = b = 1 is of two values
        return None
    steps = re.sub(r"\\(?:times|cdot|div|sqrt|[dt]?frac)(?![a-z])", "", before)
    if not re.search(r",(?!\d{3})|[;<>]|\b(?:or|and)\b" if named else r"[\p{L}\\<>,;]", steps):
        number = last.strip()
    m = pattern("whole").fullmatch(number)
    if m is None or (m["sign"] and m["sign2"]):
        return None
    value, rest, factor = _to_fraction(m["number"]), m["rest"], _SCALES.get(m["scale"], 1)
    percent = pattern("percent").match(rest)
    rest = rest[percent.end() if percent else 0 :]
    unit = unit_of(rest)
    if value is None or unit is None or not factor:
        return None
    return Number(
        -value * factor if "-" in (m["sign"], m["sign2"]) else value * factor,
        percent is not None,
        unit or _known(m["money"].strip(".")),
        things="" if unit else rest.strip(" .,;:"),
        name=named[1] if named is not None and len(named[1]) == 1 else "",
        step=_step(m["number"], value * factor) * factor,
    )


def _step(number: str, value: Fraction) -> Fraction:
    digits = re.search(r"\.(\d*)(?:[eE]([-+]?\d+))?\Z", number)
    if digits is None or value.denominator == 1:
        return Fraction(0)
    return Fraction(10) ** (int(digits[2] or 0) - len(digits[1]))


def whole_number(text: str) -> Number | None:
    """Returns the number that makes up the whole text, as `read_number` does, but not with words
    that are no unit: `10 apples` and `3 kings` are texts."""
    number = read_number(text)
    return None if number is None or number.things else number


def stands_alone(text: str, start: int, end: int) -> bool:
    """Returns whether a part of a text is no piece of a longer number: a digit at its edges has no
    sign, and touches no other through a comma, a point, an apostrophe or the space of thousands."""
    part, before, after = text[start:end], text[max(0, start - 9) : start], text[end : end + 9]
    left = r"\d[,.'’]\Z|(?<![\w.)\]}])[-−]\Z"
    right = r"[,.'’]\d"
    if re.match(r"\d{3}(?!\d)", part):
        left += r"|(?<!\d)\d{1,3} \Z"
    if re.search(r"(?<!\d)\d{1,3}\Z", part):
        right += r"| \d{3}(?!\d)"
    return not (
        (part[:1].isdigit() and re.search(left, before))
        or (part[-1:].isdigit() and re.match(right, after))
    )


def last_spelled(text: str) -> re.Match[str] | None:
    """Returns the last number in a text, with its lines apart, in plain text; None without one, or
    where it is a piece of one that is not understood, as 345 of `12 345`."""
    plain = pattern("area").sub("", plain_text(text.replace("\n", " ¶ ")))
    last = next(reversed(list(pattern("number").finditer(plain))), None)
    return last if last and stands_alone(plain, *last.span()) else None


def last_number(text: str) -> Number | None:
    """Returns the last number in a text; None without one, or where it is part of an expression."""
    last = last_spelled(text)
    if last is None:
        return None
    before, after = last.string[: last.start()], last.string[last.end() :]
    value = _to_fraction(last[0])
    if value is None or pattern("part before").search(before[-200:]) or _changed(before, after):
        return None
    percent = re.match(r"\s?\\?%|\s?per\s?cent", after)
    if scaled := pattern("scale").match(after):
        factor, after = _SCALES[scaled[1]], after[scaled.end() :]
        if not factor:
            return None
        value *= factor
    if percent is None and pattern("part behind").match(after):
        unit = pattern("unit").match(after)
        if unit is None or unit_of(unit[0]) is None:
            return None
    return Number(value, percent is not None, step=_step(last[0], value))


def given_number(text: str) -> Number | None:
    """Returns the number that a completion gives: what is marked, or stated, or else its last
    number. If an expression or a formula stands in its place, that must be a number as a whole."""
    answer = given_expression(text)
    return read_number(answer) if isinstance(answer, str) else answer


def given_expression(text: str) -> str | Number | None:
    """Returns the answer of a completion: what is marked, or stated, or else its last formula, or
    the number behind that."""
    answer = marked_answer(text)
    if answer is not None:
        return rewrite(answer, "given")
    answer = stated_answer(text)
    if answer is not None:
        answer = rewrite(answer, "given")
        for whole in (answer, answer.replace("$", "")):
            if _is_expression(whole):
                return whole
        formula = pattern("formula").search(answer)
        if pattern("amount").match(answer) and not (formula and formula.start() == 0):
            return _front(answer)
        if formula:
            clause = pattern("clause").split(answer[formula.end() :], maxsplit=1)[0]
            return None if pattern("joined").search(clause) else _unchanged(formula)
        if re.search(r"\d", answer):
            outside = re.sub(r"\([^()]*\)", "", answer)
            return last_number(outside if re.search(r"\d", outside) else answer)
    if _is_expression(text):
        return text
    formulas = list(pattern("formula").finditer(text))
    tail = text[formulas[-1].end() :] if formulas else text
    if formulas and not re.search(r"\d", tail):
        return _unchanged(formulas[-1]) and ", ".join(_joined(formulas))
    return last_number(tail)


def score_sum(completion: str, answer: str) -> float | None:
    """Returns 1 if the number behind the last `=` of a completion (all of it without one) equals
    the answer, else 0; None where the answer is not one number."""
    last, wanted = completion.rsplit("=", 1)[-1].strip(), read_number(answer)
    got = read_number(last) if pattern("number").fullmatch(last) else None
    return None if wanted is None else float(got is not None and got.same(wanted))


def _front(answer: str) -> Number | None:
    """Returns the number that an answer in prose begins with; None where another belongs to it, as
    in `2 hours and 30 minutes`, unless it goes on with what that is: `5 times 3, which is 15`."""
    for part in pattern("which").split(answer):
        value = pattern("clause").split(part, maxsplit=1)[0].rpartition("=")[2]
        alone = len(pattern("number").findall(plain_text(value))) == 1
        if alone and not pattern("formula").search(value) and pattern("amount").match(part):
            return last_number(value)
    return None


def given_texts(text: str) -> list[str]:
    """Lists the texts that may be the answer of a completion when that answer is words."""
    for answer in (marked_answer(text), stated_answer(text)):
        if answer is not None:
            return [answer]
    chosen = _choice(text)
    text = "" if chosen and pattern("goes on").search(chosen[1]) else text
    return [text, *map(_content, list(pattern("formula").finditer(text))[-1:])]


def plain_text(text: str) -> str:
    """Writes LaTeX for numbers and words as outside LaTeX: `1{,}234` as 1,234, `\\text{cm}` as
    cm, `\\frac{-1}{2}` as -1/2, `3.2\\times 10^5` as 3.2e5, `0.\\overline{3}` as 1/3."""
    text = pattern("repeating").sub(_repeating, rewrite(text, "tidy"))
    return rewrite(pattern("fraction").sub(_fraction, text), "plain")


def _changed(before: str, after: str) -> bool:
    """Returns whether the words around a number or a formula change its value."""
    words_before = pattern("changed before").search(before[-80:])
    return bool(words_before or pattern("changed behind").match(after))


def _content(formula: re.Match[str]) -> str:
    return str(formula[formula.lastindex or 0])


def _unchanged(formula: re.Match[str]) -> str | None:
    before, after = formula.string[: formula.start()], formula.string[formula.end() :]
    changed = _changed(before, after) or pattern("scale").match(after)
    return None if changed else _content(formula)


def _joined(formulas: list[re.Match[str]]) -> list[str]:
    """Returns the last formula and those that `and` or `or` joins to it: `$x=3$ and $x=5$`."""
    text, at = formulas[0].string, len(formulas) - 1
    texts = [_content(formula) for formula in formulas]
    names = [text.rpartition("=")[0].strip() for text in texts]
    between = [text[a.end() : b.start()].strip() for a, b in itertools.pairwise(formulas)]
    joins = ("and", "or", ", and", ", or", ",")
    while at and names[at - 1] == names[-1] and between[at - 1] in joins:
        at -= 1
    return texts[at:] if between and between[-1] != "," else texts[-1:]


def _is_expression(text: str) -> bool:
    """Returns whether the whole text may be an expression: one line without words of prose."""
    if len(text) > LONGEST_EXPRESSION or "\n" in text.strip() or not re.search(r"\w", text):
        return False
    if read_number(text) is not None:
        return True
    unwrapped = pattern("wrapper").sub(" ", re.sub(r"\\(?:begin|end)\{\w+\}", " ", text))
    words = {word.lower() for word in pattern("prose").findall(unwrapped)}
    return words <= _OF_EXPRESSIONS and text.count("$") in (0, 2)


class _Box(NamedTuple):
    start: int
    end: int
    content: str


def _boxes(text: str) -> list[_Box]:
    """Lists every closed box, including those nested in another one."""
    boxes, opened = [], list[re.Match[str] | None]()
    for m in pattern("brace").finditer(text):
        if m[0] == "}":
            if opened and (box := opened.pop()):
                boxes.append(_Box(box.start(), m.end(), text[box.end() : m.start()]))
        elif m[0][-1] == "{" and m[0] != "\\{":
            opened.append(m if len(m[0]) > 1 else None)
    return sorted(boxes)


def _in_boxes(text: str) -> str:
    return (_last_boxes(text) or (0, text))[1]


def _last_boxes(text: str) -> tuple[int, str] | None:
    """Returns where the last box ends, and the content of it and of the boxes joined to it."""
    boxes = _boxes(text)
    if not boxes:
        return None
    last = boxes[-1]
    start, parts = last.start, [last.content]
    for box in reversed(boxes[:-1]):
        between = text[box.end : start]
        joins = re.search(r",|\band\b|\bor\b", between)
        if box.end > start or not (joins and pattern("between boxes").fullmatch(between)):
            break
        start = box.start
        parts.insert(0, box.content)
    behind = pattern("behind a box").match(text[last.end :])
    return last.end, ", ".join(dict.fromkeys(parts)) + (f" {behind[1]}" if behind else "")


def unit_of(rest: str) -> str | None:
    """Reads the unit in the text behind a number, as `m·s^-2`; "" if none, None if it is no unit.
    Of a price it is the currency: `5 dollars per hour` is `$`."""
    rest = re.sub(r"\\[dt]?frac\s*\{ ([^{}]*)\}\s*\{ ([^{}]*)\}", r" \1/\2", rest).rstrip(" .,;:")
    m = pattern("unit").fullmatch(rest)
    if rest == "" or m is None:
        return "" if rest == "" else None
    if m["words"] is None:
        return "" if m["degree"] is None else f"°{m['degree'][:1].upper()}"
    plain = re.sub(r"[.']", "", m["words"].replace("\\cdot", " "))
    words = [word for word, _ in pattern("word of unit").findall(plain)]
    if any({word.lower(), word.lower().removesuffix("s")} & _NO_UNITS for word in words):
        return None
    if pattern("symbol").search(rest):
        return None
    if words[0].isascii() and not _known(words[0]) and (not m["space"] or len(words[0]) < 2):
        return None
    if not m["space"] and re.fullmatch("[A-Za-z]", words[0]):
        return None  # a variable, as in 5m
    powers: dict[str, int] = {}
    parts = re.split(r"/|\b(?:per|an?|each|every)\b", plain, flags=re.IGNORECASE)
    for at, part in enumerate(parts):
        read = [(_known(w), w.lower(), power) for w, power in pattern("word of unit").findall(part)]
        area = next((_AREAS[word] for _, word, _ in read if word in _AREAS), 1)
        units = [(unit, power) for unit, word, power in read if unit]
        whole = len(units) == sum(word not in _AREAS for _, word, _ in read)
        if not whole and len(read) > 1 and any(power for *_, power in read):
            return None
        for unit, power in units if whole else units[:1]:
            if unit in _MONEY:
                return unit
            digits = re.search(r"-?\d", power)
            powers.setdefault(unit, 0)
            powers[unit] += (int(digits[0]) if digits else area) * (-1 if at else 1)
        if not powers:
            return ""
    return "·".join(unit + f"^{n}" * (n != 1) for unit, n in sorted(powers.items()))


def _known(word: str) -> str:
    """Returns one spelling of a unit, or ""; capitals count where there are two, as mW and MW."""
    singular = word.removesuffix("s")
    lower = _LOWER.get(word.lower()) or _LOWER.get(singular.lower()) or ""
    return _UNITS.get(word) or _UNITS.get(singular) or lower


def units_agree(a: str, b: str) -> bool:
    """Returns whether answers with these units may be equal: one may leave its unit out, and of
    degrees their scale."""
    return "" in (a, b) or a == b or ("°" in (a, b) and a[0] == b[0])


def _repeating(m: re.Match[str]) -> str:
    whole, fixed, again = m[1] or "0", m[2], m[3]
    if len(m[0]) > LONGEST_NUMBER:
        return m[0]
    under = (10 ** len(again) - 1) * 10 ** len(fixed)
    return f"{int(whole + fixed + again) - int(whole + fixed)}/{under}"


def _fraction(m: re.Match[str]) -> str:
    """Writes `a/b` with one sign in front; before it a space if it is part of a mixed number."""
    over, under = (re.sub(r"[\s,]", "", m[i] or m[i + 1]) for i in (1, 3))
    before = m.string[: m.start()].rstrip()[-1:]
    text = f"{over.lstrip('-+')}/{under.lstrip('-+')}"
    if (over[0] == "-") != (under[0] == "-"):
        return f"*-{text}" if before.isalnum() else f"-{text}"
    return f" {text}" if before.isdigit() else text


def _to_fraction(text: str) -> Fraction | None:
    """Computes the value of a number in plain text; None for a division by 0."""
    if len(text) > LONGEST_NUMBER:
        return None
    sign = -1 if text[0] == "-" else 1
    text, _, under = text.lstrip("-+").rstrip(".").replace(",", "").partition("/")
    whole, _, over = text.strip().rpartition(" ")
    if not under:
        return sign * Fraction(text.replace(" ", ""))
    over, under = over or text.strip(), under.strip()
    if int(under) == 0 or (whole and Fraction(over) >= int(under)):
        return None
    return sign * (int(whole or 0) + Fraction(over) / int(under))


def spelled(text: str) -> str:
    """Strips from a text what does not change it: delimiters of formulas, spaces, the final full
    stop, quotes; writes `\\dfrac` as `\\frac`, and `1011_{2}` as 1011_2."""
    text = rewrite(rewrite(text, "tidy"), "spelled")
    money = "$" if re.match(r"\s*\\?\$", text) and text.count("$") == 1 else ""
    text = text.replace("\\$", "").replace("$", "").strip(" '").rstrip(".,;:")
    return money + re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", re.sub(r"\s+", " ", text))


def literal(text: str) -> str | None:
    """Writes an answer that is compared as a text, as such: words, a choice such as `(B)`, a date,
    a time, a ratio, a number in a base; returns None for an expression."""
    bare = _bare(text)
    if m := pattern("chosen").fullmatch(bare):
        return (m["a"] or m["b"]).lower()
    if m := pattern("labelled").fullmatch(bare):
        return f"{m['a'] or m['b']}. {m['text']}".lower()
    if pattern("no expression").search(bare):
        return spelled(text).lower()
    if pattern("order").fullmatch(bare):
        return _words(text)
    if re.search(r"[\\=^_+*/<>|{}≤≥]", bare) or read_number(text) is not None:
        return None
    words = {word.lower() for word in re.findall(r"\p{L}+", bare)} - _OF_EXPRESSIONS
    wrapped = " ".join(pattern("wrapper").findall(rewrite(text, "tidy")))
    long = any(len(word) > 3 or pattern("foreign").match(word) for word in words)
    short = pattern("short word").fullmatch(bare)
    if short or long or set(re.findall(r"\p{L}+", wrapped)) - {"or", "and"}:
        return _words(text)
    return None


def _bare(text: str) -> str:
    return re.sub(r"\s*([,:])\s*", r"\1 ", plain_text(text.replace("$", ""))).strip(" .,;:\"'`")


def _words(text: str) -> str:
    return " ".join(_bare(text).lower().split())


def same_literal(wanted: str, text: str) -> bool:
    """Returns whether a text is a literal answer. For a choice its letter is enough, optionally
    followed by what it stands for; for a number in a base its digits are enough."""
    option = rf"({pattern('option').pattern})(?:\. (.+))?"
    if m := re.fullmatch(option, wanted, re.IGNORECASE):
        letter, behind = _choice(text) or ("", "")
        return letter == m[1] and (not m[2] or _words(behind) in ("", m[2]))
    digits, base, _ = wanted.partition("_")
    same = wanted in (literal(text), _words(text))
    return same or (bool(base) and spelled(text).lower() == digits)


def _choice(text: str) -> tuple[str, str] | None:
    """Returns the small letter of the choice that a text begins with, and the text behind it."""
    m = pattern("choice").match(plain_text(text.replace("$", "")).strip(' *`"'))
    return ((m[1] or m[2]).lower(), "" if m[3] else m[4]) if m else None


def same_answer(a: str, b: str) -> bool:
    """Returns whether both are the same number or the same text."""
    x, y = read_number(a), read_number(b)
    return spelled(a) == spelled(b) if x is None or y is None else x.same(y)
