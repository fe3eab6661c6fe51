"""What a text answers: the part after its thoughts, the final answer in that, the number it spells.

Everything here reads spellings, of prose and of LaTeX, and computes no expression. What is not
understood is None, never a part of it: `2x+3` is no 3.
"""

from __future__ import annotations

import itertools
import unicodedata
from dataclasses import dataclass, field
from fractions import Fraction

import regex as re

from jaxrl.rewards.languages import SOLID, table, words_of

TOLERANCE = Fraction(1, 10**6)
"""Relative difference at which two numbers are equal where a decimal is the other one rounded."""
LONGEST_NUMBER = 1000
"""Characters; Python refuses to read numbers of more than 4300 digits."""
LONGEST_EXPRESSION = 1000
"""Characters of a text without any mark that may be an answer as a whole."""

_BRACES = re.compile(r"\\f?box(?:ed)?\s{0,9}\{|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$.\\()\[\]]|,|\band\b|\bor\b|\\text\s*\{\s*(?:and|or)\s*\}|[A-Za-z]\s*=)*"
)
_HASHES = re.compile(r"^[ \t]*#{4}[ \t]*(\S.*)$", re.MULTILINE)
_STATED = re.compile(
    r"\b(?:answers?|(?:correct|right) (?:option|choice))\b"
    r"(?:[^\n.\d:=—]{0,60}?\b(?:is|are)\b|[^\n.]{0,60}?(?:\b(?:is|are)\b(?! not\b)|[:=—]| – )"
    r"|(?=[ *_]+(?:(?:(?:negative|minus) )?[-+−√\p{Sc}]*\.?\d"
    r"|(?:(?:option|choice) )?(?-i:\(?[A-J]\)?|\([^\x00-\x7f]\))(?:[ .*]|\Z)"
    r"|(?:[^\x00-\x7f]+ ?){1,3}(?:[.\n]|\Z))))"
    r"[\s:*},]*(.*?)(?=(?<!\bRs)(?<!\bi\.e)(?<!\be\.g)(?<!\bapprox)\.(?:\s|\Z)|\n|\Z)",
    re.IGNORECASE,
)
_ORNAMENTS = re.compile("[\u2600-\u27bf\U0001f300-\U0001faff\ufe0f]")
_AMOUNT = re.compile(
    r"(?:(?:about|approximately|approx\.?|around|roughly|exactly|only|just|nearly|almost) )?"
    r"[*_~≈ ]*[-+−]?(?:\p{Sc}|Rs\.?)? ?[-+−]?\.?\d",
    re.IGNORECASE,
)
"""What a stated answer begins with if that is a number in prose."""
_MORE = r"(?:[-−\p{Sc}\\]*\d|\$)"
_CLAUSE = re.compile(
    rf"\s*(?:[(\[;—]|: | [-–] |, (?!(?:(?:and|or|otherwise) )?{_MORE})"
    rf"|, (?={_MORE}\S* is not\b)|,? is not (?={_MORE})|\band (?!(?:an?|one) |{_MORE})"
    r"|\b(?<!times )(?:because|since|as|for|which|where|when|so|but|while"
    r"|with|that|if|after|given|i\.e|e\.g|rather than|instead of)\b)"
)
"""Where the answer of a sentence ends."""
_JOINED = re.compile(r"\b(?:and|or|of|times|plus|minus) (?:[$\d(]|\\[(a-z])")
"""A second quantity behind a formula."""
_FORMULA = re.compile(
    r"\$\$(.{1,2000}?)\$\$|\\\((.{1,500}?)\\\)|\\\[(.{1,2000}?)\\\]"
    r"|(?<![\\\d])\$(?=\S)([^\n]{0,500}?\S)(?<!\\)\$(?!\d)"
    r"|(?<![\\\d])\$ {1,4}([^\n$]{1,500}?) {1,4}\$(?! ?\d)",
    re.DOTALL,
)
"""A dollar before an amount of money begins none: as in pandoc, no digit is behind the second, and
space is inside of both or of neither."""
_FOREIGN = re.compile(r"(?:(?!\p{Greek})[^\W\d_A-Za-zµ])[\p{L}\p{M}]*|\p{Greek}{3,}")
_PROSE = re.compile(
    r"(?<![A-Za-z\\])(?:[a-z]{3,}|is|so|we|it|to|of|if|as|at|be|by|in|on|he|no|an|my|us|do|up)"
    rf"(?![a-z])|{_FOREIGN.pattern}",
    re.IGNORECASE,
)
"""Words that no expression has: of Latin letters by their length, all of other letters but those of
Greek that stand alone."""
_SYMBOL = re.compile(r"(?<!\p{Greek})(?!μ)\p{Greek}{1,2}(?!\p{Greek})")
_NAMES = frozenset(words_of("part of an expression"))
"""Words that are part of an expression, not of prose."""

_SIGNED = r"[-+]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_FRACTION = re.compile(
    rf"\\[dtc]?frac\s*(?:\{{\s*({_SIGNED})\s*\}}|(\d))\s*(?:\{{\s*({_SIGNED})\s*\}}|(\d))"
)
_REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar|overbar)\s*\{\s*(\d+)\s*\}")
_TIMES_TEN = re.compile(
    r"(?P<times>(?<=[\d.])\s*(?:\\times|\\cdot|\*|x)\s*|(?<![\w.]))10\s*\^\s*"
    r"(?:\{\s*(?P<braced>[-+]?\d{1,3})\s*\}|(?P<bare>[-+]?\d{1,3})(?!\d))"
)
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|bm|boldsymbol|operatorname)"
    r"\s*\{([^{}]*)\}"
)
_LETTER = re.compile(
    r"\\(?:text|textrm|mathrm|rm|operatorname)\s*\{\s*([ie]|d(?=\s*\}\s*\\?[a-z]))\s*\}"
)
"""The upright i, e and d of formulas: no units."""
_UNSIGNED = (
    r"(?:(?:(?:\d{1,3}(?:,\d{3})+|\d\d?(?:,\d\d)+,\d{3})(?!\d)|\d+)(?:\.\d+)?"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?(?:\s?/\s?\d+(?!\d|\.\d))?|(?<![\w.])\.\d+)"
)
NUMBER = re.compile(
    # a sign, unless it is an operator after an operand
    rf"(?:(?:(?<![\w.)\]}}])|(?<={SOLID}))[-+])?"
    rf"(?:\d+ \d+\s?/\s?\d+(?!\d|\.\d)|{_UNSIGNED})"
)
"""In a text that `plain` returned. A sign, commas of thousands or lakhs, decimals,
exponents, a/b, `1 1/2`."""
_SCALES = {word: row[0] for row in table()["scales"] for word in row[1].split("|")}
_SCALE = "|".join(_SCALES)
_WHOLE = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<money>\p{Sc}|[Rr]s\.?|)\s*(?P<sign2>[-+]?)\s*"
    r"(?P<number>\d{1,3}(?: \d{3})+(?![\d/])(?:\.\d+)?|\d+ \d+\s?/\s?\d+"
    rf"|{_UNSIGNED}|\d+\.(?=\Z))"
    rf"(?:\s*(?P<scale>{_SCALE})s?\b)?"
    r"(?P<rest>.*)",
    re.DOTALL,
)
_NAME = re.compile(
    r"([\p{L}\p{M}]+(?: [\p{L}\p{M}]+)*|\\(?!pi)[a-z]+|[A-Za-z]_\{?\w+\}?|[A-Za-z]\(\w+\))"
    r"\s*(?:=|\\approx|≈)\s*"
)
_POWER = r"(?:\s*\^\s*\{?\s*-?[123](?!\d)\s*\}?)?"
_UNIT = re.compile(
    r"\s*(?:°|degrees?\b|deg\b)\s*(?P<degree>[CF]\b|celsius|fahrenheit|)"
    r"|(?P<ordinal>\s*\^?\s*\{?\s*(?:th|st|nd|rd)\s*\}?)(?: [A-Za-z]+){0,3}"
    rf"|(?P<space>\s*)(?P<words>[\p{{L}}\p{{M}}\p{{Sc}}¢]+\.?{_POWER}"
    rf"(?:(?:\s*\\cdot(?![a-z])\s*|[ /-]+)[\p{{L}}\p{{M}}.'\u200c]+{_POWER}){{0,4}})",
    re.IGNORECASE,
)
_WORD = re.compile(rf"([\p{{L}}\p{{M}}]+|[\p{{Sc}}¢])({_POWER})")
_AREA = re.compile(
    r"(?<=[\d ](?:mm|cm|km|ft|in))\s*\^\s*\{?\s*[23](?!\d)\s*\}?|(?<=\d m)\^\{?[23](?!\d)\}?"
)
_SMALL = {"p": "pico", "n": "nano", "m": "milli", "c": "centi", "d": "deci", "k": "kilo"}
_SMALL |= dict.fromkeys(("u", "mc", "µ", "μ"), "micro")
_ALL = _SMALL | {"M": "mega", "G": "giga", "T": "tera"}
_KINDS = {"metric units": _SMALL, "metric units with capital prefixes": _ALL, "units": {}}
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
_UPRIGHT = {"N": "newton", "J": "joule", "W": "watt", "V": "volt", "A": "ampere", "B": "byte"}
_UPRIGHT |= {"K": "kelvin", "C": "coulomb", "F": "farad", "T": "tesla"}
_UPRIGHT_UNIT = re.compile(
    r"(?<=\d)\s*\\(?:text|mathrm|rm)\s*\{\s*([NJWVABKCFT])\s*\}(?=[\s.,$)]*\Z)"
)
_OTHER_VALUE = words_of("makes another value of the number before it")
_NO_UNITS = _NAMES | {*_OTHER_VALUE, *_SCALES, *words_of("no unit")}
"""Words after a number that make another value of it, or no value."""
_WORDS_AFTER = re.compile(
    rf"\s{{0,9}}(?:-?(?:and\s(?:an?|one)\s)?(?:{'|'.join(_OTHER_VALUE)})s?\b"
    rf"|(?:{'|'.join(words_of('is no answer with, behind it'))})\b)",
    re.IGNORECASE,
)
_WORDS_BEFORE = re.compile(
    rf"(?:\d ?(?:{_SCALE})s?|{'|'.join(words_of('is no answer with, before it'))})"
    r"(?: (?:of|be|equal|to|the|number|value|base|[-*]+)){0,4}[\s*$(]{0,9}\Z",
    re.IGNORECASE,
)
"""Words before and behind a number or a formula in prose with which it is not the answer."""
_NEGATIVE = re.compile(
    r"\A(?:\\text\s*\{\s*)?(?:negative|minus)\b\s*\}?\s*(?=[\d.$\\(])", re.IGNORECASE
)
_AFTER = re.compile(
    r"[A-Za-z]|\s*(?:[\^_!√π]|pi\b|sqrt\b|[*/+]\s*[A-Za-z\\(]|-\s*(?:[\\(]|[A-Za-z]\b)|[xyznkpqrtuvw]\b"
    r"|\\(?:pi|sqrt|times|cdot|div|pm|mp|[dt]?frac|log|ln|sin|cos|tan|alpha|beta|theta|cup|infty))"
)
"""What makes a number part of an expression, behind it."""
_BEFORE = re.compile(
    r"(?:[A-Za-z_^/√π:]|\d "
    rf"|(?:(?<!\p{{L}})(?!{SOLID})\p{{L}}|[A-Za-z][^()]*[)\]}}])\s*[-+*]\s*"
    r"|[)\]}\d]\s*[-+*]\s*|\\[a-z]+\s*[-+*]\s*"
    r"|\\(?:times|cdot|div|pm|mp|sqrt|log|ln|sin|cos|tan|pi|theta)\s*"
    r"|\\[A-Za-z]+\s*(?:\[[^\]]*\]\s*)?\{[^{}]*|\^\s*\{[^{}]*|_\s*\{[^{}]*"
    r"|(?<!\w)[(\[{][^()\[\]{}]*,\s*)\Z"
)
"""The same in front of it; a tuple and what is in the braces of a command, too."""


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
    scale: str = ""
    """The word of one that is not converted, as in `5 lakh`."""
    step: Fraction = field(default=Fraction(0), compare=False)
    """The unit of a decimal's last digit, 1/100 of `1.25`; 0 of what is spelled exactly."""

    def same(self, other: Number) -> bool:
        """Returns whether both are equal: 50% is 50 and 0.5; 5 cm is 5, not 5 m; x = 5 no y = 5."""
        names = {self.name, other.name} - {""}
        if len(names) > 1 or self.scale != other.scale or not units_agree(self.unit, other.unit):
            return False
        if self.percent == other.percent:
            return same_number(self.value, other.value, max(self.step, other.step))
        a, b = (self, other) if self.percent else (other, self)
        if b.unit:  # as in $36, which is no 36%
            return False
        return same_number(a.value, b.value, max(a.step, b.step)) or same_number(
            a.value / 100, b.value, max(a.step / 100, b.step)
        )


def same_number(a: Fraction, b: Fraction, step: Fraction) -> bool:
    """Returns whether two values are equal: exactly, or where the last digit of the coarser decimal
    is worth `step`, one is the other rounded to that; to a relative TOLERANCE at least."""
    difference = abs(a - b)
    return difference <= min(step / 2, TOLERANCE * max(abs(a), abs(b)))


def step_of(number: str, value: Fraction) -> Fraction:
    """Returns the unit of the last digit of a decimal of `NUMBER`; 0 where its value is whole."""
    digits = re.search(r"\.(\d*)(?:[eE]([-+]?\d+))?\Z", number)
    if digits is None or value.denominator == 1:
        return Fraction(0)
    return Fraction(10) ** (int(digits[2] or 0) - len(digits[1]))


def last_boxed(text: str) -> str | None:
    r"""Returns what the last closed \boxed{} holds, nested braces included."""
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def marked(text: str) -> str | None:
    r"""Returns the final answer that is marked as such: what the last <answer></answer>, \boxed{}
    or `#### ` holds; None without any.

    Boxes with nothing but `,`, `and`, `or`, `x =` between them are one answer of several parts. A
    line that begins with #### and is no number is a heading, unless it is the text's last.
    """
    before, closed, _ = text.rpartition("</answer>")
    _, opened, inner = before.rpartition("<answer>")
    if closed and opened:
        return (_last_boxes(inner) or (0, inner))[1].strip()
    found = [boxed] if (boxed := _last_boxes(text)) else []
    for m in _HASHES.finditer(text):
        if text[m.end() :].strip() == "" or read_number(m[1]) is not None:
            found.append((m.end(), (_last_boxes(m[1]) or (0, m[1]))[1]))
    return max(found)[1].strip() if found else None


def final_answer(text: str) -> str:
    """Returns what is marked as the final answer, or else the whole text, stripped."""
    answer = marked(text)
    return text.strip() if answer is None else answer


def stated(text: str) -> str | None:
    """Returns the rest of the last sentence that contains `answer is` or `answer:`, or None."""
    found = [_ORNAMENTS.sub("", m[1]).strip(" *_") for m in _STATED.finditer(text)]
    return found[-1] if found and found[-1] else None


def read_number(text: str) -> Number | None:
    """Returns the number, with its unit, currency or per cent, that is the whole text, or None.

    `x = 5` and `2 + 3 = 5` are 5. A unit is any words behind the number that cannot change it.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    spelled = _bare(plain(text))
    if spelled.startswith("$") and spelled.endswith("$"):
        spelled = _bare(spelled[1:-1])
    spelled = re.sub(r"\A\$([^$]+)\$", r"\1", _bare(spelled.removesuffix("$")))
    if inner := re.fullmatch(r"[(\[{]([^()\[\]{},$]*)[)\]}]", spelled):
        spelled = inner[1].strip()
    spelled = re.sub(r"\A(?:\\approx|\\sim|[≈~])\s*", "", spelled)
    named = _NAME.match(spelled)
    spelled = spelled[named.end() if named else 0 :]
    before, _, last = spelled.rpartition("=")
    if named and re.search(r"(?:\A|=)\s*[A-Za-z]\s*\Z", before):  # a = b = 1 is of two values
        return None
    steps = re.sub(r"\\(?:times|cdot|div|sqrt|[dt]?frac)(?![a-z])", "", before)
    if not re.search(r",(?!\d{3})|[;<>]|\b(?:or|and)\b" if named else r"[\p{L}\\<>,;]", steps):
        spelled = last.strip()
    m = _WHOLE.fullmatch(spelled)
    if m is None or (m["sign"] and m["sign2"]):
        return None
    value = _to_fraction(m["number"])
    rest, percent = m["rest"], False
    if is_percent := re.match(r"\s*\\?%|\s*per\s?cent(?:age)?\b|\s*pct\b", rest):
        rest, percent = rest[is_percent.end() :], True
    unit = unit_of(rest)
    if value is None or unit is None:
        return None
    things = "" if unit else rest.strip(" .,;:")
    unit = unit or _known(m["money"].strip("."))
    scale, kept = _scale(m["scale"])
    step = step_of(m["number"], value * scale) * scale
    value = -value * scale if "-" in (m["sign"], m["sign2"]) else value * scale
    name = named[1] if named is not None and len(named[1]) == 1 else ""
    return Number(value, percent, unit, things, name, kept, step)


def _scale(word: str | None) -> tuple[int, str]:
    """Returns what a word of scale stands for, and the word itself where nothing is converted."""
    meaning = _SCALES[word] if word else "1"
    return (int(meaning), "") if meaning.isdecimal() else (1, str(word))


def whole_number(text: str) -> Number | None:
    """Returns the number that makes up the whole text, as `read_number` does, but not with words
    that are no unit: `10 apples` and `3 kings` are texts."""
    number = read_number(text)
    return None if number is None or number.things else number


def is_whole(text: str, start: int, end: int) -> bool:
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
    """Returns the last number in a text, with its lines apart, as `plain` writes it; None without
    one, or where it is a piece of one that is not understood, as 345 of `12 345`."""
    spelled = _AREA.sub("", plain(text.replace("\n", " ¶ ")))
    found = next(reversed(list(NUMBER.finditer(spelled))), None)
    return found if found and is_whole(spelled, *found.span()) else None


def last_number(text: str) -> Number | None:
    """Returns the last number in a text; None without one, or where it is part of an expression."""
    found = last_spelled(text)
    if found is None:
        return None
    before, after = found.string[: found.start()], found.string[found.end() :]
    value = _to_fraction(found[0])
    percent = re.match(r"\s?\\?%|\s?per\s?cent", after)
    if value is None or _BEFORE.search(before[-200:]) or _changed(before, after):
        return None
    scaled = re.match(rf"(?:\s{{0,2}}({_SCALE})s?\b)?", after)
    scale, kept = _scale(scaled[1])
    value, after = value * scale, after[scaled.end() :]
    if percent is None and _AFTER.match(after):
        unit = _UNIT.match(after)
        if unit is None or unit_of(unit[0]) is None:
            return None
    return Number(value, percent is not None, scale=kept, step=step_of(found[0], value))


def given_number(text: str) -> Number | None:
    """Returns the number that a completion gives: what is marked, or stated, or else its last
    number. If an expression or a formula stands in its place, that must be a number as a whole."""
    answer = given_expression(text)
    return read_number(answer) if isinstance(answer, str) else answer


def given_expression(text: str) -> str | Number | None:
    """Returns what a completion gives: what is marked, or stated, or else its last formula, or the
    number behind that."""
    answer = marked(text)
    if answer is not None:
        return _NEGATIVE.sub("-", answer)
    answer = stated(text)
    if answer is not None:
        answer = _NEGATIVE.sub("-", answer)
        for whole in (answer, answer.replace("$", "")):
            if _is_expression(whole):
                return whole
        formula = _FORMULA.search(answer)
        if _AMOUNT.match(answer) and not (formula and formula.start() == 0):
            return _front(answer)
        if formula:
            joined = _JOINED.search(_CLAUSE.split(answer[formula.end() :], maxsplit=1)[0])
            return None if joined else _unchanged(formula)
        if re.search(r"\d", answer):
            outside = re.sub(r"\([^()]*\)", "", answer)
            return last_number(outside if re.search(r"\d", outside) else answer)
    if _is_expression(text):
        return text
    formulas = list(_FORMULA.finditer(text))
    tail = text[formulas[-1].end() :] if formulas else text
    if formulas and not re.search(r"\d", tail):
        return _unchanged(formulas[-1]) and ", ".join(_list_of(formulas))
    return last_number(tail)


def score_sum(completion: str, answer: str) -> float | None:
    """Returns 1 if the number behind the last `=` of a completion (all of it without one) equals
    the answer, else 0; None where the answer is not one number."""
    last, wanted = completion.rsplit("=", 1)[-1].strip(), read_number(answer)
    got = read_number(last) if NUMBER.fullmatch(last) else None
    return None if wanted is None else float(got is not None and got.same(wanted))


def _front(answer: str) -> Number | None:
    """Returns the number that an answer in prose begins with; None where another belongs to it, as
    in `2 hours and 30 minutes`, unless it goes on with what that is: `5 times 3, which is 15`."""
    for part in re.split(r",? (?:which (?:is|equals)|that is|i\.e\.),? ", answer):
        value = _CLAUSE.split(part, maxsplit=1)[0].rpartition("=")[2]
        alone = len(NUMBER.findall(plain(value))) == 1 and not _FORMULA.search(value)
        if alone and _AMOUNT.match(part):
            return last_number(value)
    return None


def given_texts(text: str) -> list[str]:
    """Returns the texts that may be the answer of a completion when that answer is words."""
    for answer in (marked(text), stated(text)):
        if answer is not None:
            return [answer]
    chosen = _choice(text)
    text = "" if chosen and _GOES_ON.search(chosen[1]) else text
    return [text, *(m[m.lastindex or 0] for m in list(_FORMULA.finditer(text))[-1:])]


def plain(text: str) -> str:
    """Returns a text whose LaTeX for numbers and words is written as it is outside LaTeX: `1{,}234`
    is 1,234, `\\frac{-1}{2}` -1/2, `3.2\\times 10^5` 3.2e5, `\\text{cm}` cm, `0.\\overline{3}` 1/3.
    """
    text = tidy(text)
    text = _REPEATING.sub(_repeating, text)
    text = _FRACTION.sub(_fraction, text)
    text = _TIMES_TEN.sub(lambda m: f"{'' if m['times'] else '1'}e{m['braced'] or m['bare']}", text)
    text = _UPRIGHT_UNIT.sub(lambda m: f" {_UPRIGHT[m[1]]} ", text)
    for _ in range(3):  # one in another
        text = _WRAPPER.sub(r" \1 ", text)
    text = re.sub(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree", "°", text)
    text = re.sub(r"\\[()\[\]]|\\(?:left|right)(?![A-Za-z])|\*\*|\{\}", "", text)
    return re.sub(r"\s+", " ", text.replace("\\$", "$").replace("\\%", "%"))


def tidy(text: str) -> str:
    """Returns a text in ASCII where it is typographic, without LaTeX's spaces and separators."""
    text = re.sub(_GROUPS, ",", text)
    for old, new in _CHARACTERS.items():
        text = text.replace(old, new)
    text = re.sub(r"[¼-¾⅐-⅞]", lambda m: " " + _ascii(m[0]), text)
    text = re.sub(r"[⁰¹²³⁴-⁹⁻]+", lambda m: "^{" + _ascii(m[0]) + "}", text)
    text = _LETTER.sub(r"\1 ", text)
    text = re.sub(r"\\!|\\(?:displaystyle|textstyle|limits|bigl?|bigr)(?![A-Za-z])", "", text)
    return re.sub(r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])", " ", text)


_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,?\\!|\\[,;: ]|[~\u00a0\u202f\u2009])(?=\d{3}(?!\d))")
_CHARACTERS = {"\u2212": "-", "\u2013": "-", "\u00d7": "\\times ", "\u00b7": "\\cdot "}
_CHARACTERS |= {"\u00f7": "\\div ", "\u2044": "/", "\\colon": ":"}
_CHARACTERS |= dict.fromkeys(("\u00a0", "\u202f", "\u2009"), " ")


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2044", "/").replace("\u2212", "-")


def _bare(text: str) -> str:
    """Strips what surrounds an answer in a sentence."""
    return text.lstrip(' ,;:*`"').rstrip(' .,;:*`"')


def _changed(before: str, after: str) -> bool:
    """Returns whether the words around a number or a formula change its value."""
    return bool(_WORDS_BEFORE.search(before[-80:]) or _WORDS_AFTER.match(after))


def _unchanged(formula: re.Match[str]) -> str | None:
    before, after = formula.string[: formula.start()], formula.string[formula.end() :]
    changed = _changed(before, after) or re.match(rf"\s?(?:{_SCALE})s?\b", after)
    return None if changed else str(formula[formula.lastindex or 0])


def _list_of(formulas: list[re.Match[str]]) -> list[str]:
    """Returns the last formula and those that `and` or `or` joins to it: `$x=3$ and $x=5$`."""
    text, at = formulas[0].string, len(formulas) - 1
    texts = [str(formula[formula.lastindex or 0]) for formula in formulas]
    names = [one.rpartition("=")[0].strip() for one in texts]
    between = [text[a.end() : b.start()].strip() for a, b in itertools.pairwise(formulas)]
    while (
        at and names[at - 1] == names[-1] and between[at - 1] in ("and", "or", ", and", ", or", ",")
    ):
        at -= 1
    return texts[at:] if between and between[-1] != "," else texts[-1:]


def _is_expression(text: str) -> bool:
    """Returns whether the whole text may be an expression: one line without words of prose."""
    if len(text) > LONGEST_EXPRESSION or "\n" in text.strip() or not re.search(r"\w", text):
        return False
    if read_number(text) is not None:
        return True
    words = _PROSE.findall(_WRAPPER.sub(" ", re.sub(r"\\(?:begin|end)\{\w+\}", " ", text)))
    return all(word.lower() in _NAMES for word in words) and text.count("$") in (0, 2)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Returns (start, end, content) of every closed box, including those nested in another one."""
    boxes, opened = [], list[tuple[int, int] | None]()
    for m in _BRACES.finditer(text):
        if m[0] == "}":
            if opened and (box := opened.pop()):
                boxes.append((box[0], m.end(), text[box[1] : m.start()]))
        elif m[0][-1] == "{" and m[0] != "\\{":
            opened.append((m.start(), m.end()) if len(m[0]) > 1 else None)
    return sorted(boxes)


def _last_boxes(text: str) -> tuple[int, str] | None:
    """Returns where the last box ends, and what it and the boxes that belong to it hold."""
    boxes = _boxes(text)
    if not boxes:
        return None
    start, end, content = boxes[-1]
    parts = [content]
    for before in reversed(boxes[:-1]):
        between = text[before[1] : start]
        joined = re.search(r",|\band\b|\bor\b", between) and _BETWEEN_BOXES.fullmatch(between)
        if before[1] > start or not joined:
            break
        start = before[0]
        parts.insert(0, before[2])
    behind = re.match(rf"\$?\s?((?:{_SCALE})\b|\\?%)", text[end:])
    return end, ", ".join(dict.fromkeys(parts)) + (f" {behind[1]}" if behind else "")


def unit_of(rest: str) -> str | None:
    """Returns the unit that the text behind a number is, as `m·s^-2`; "" if none, None if it is no
    unit. Of a price that is its currency: `5 dollars per hour` is `$`."""
    rest = re.sub(r"\\[dt]?frac\s*\{ ([^{}]*)\}\s*\{ ([^{}]*)\}", r" \1/\2", rest).rstrip(" .,;:")
    m = _UNIT.fullmatch(rest)
    if rest == "" or m is None:
        return "" if rest == "" else None
    if m["words"] is None:
        return "" if m["degree"] is None else f"°{m['degree'][:1].upper()}"
    spelled = re.sub(r"[.']", "", m["words"].replace("\\cdot", " "))
    words = [word for word, _ in _WORD.findall(spelled)]
    if any({word.lower(), word.lower().removesuffix("s")} & _NO_UNITS for word in words):
        return None
    if _SYMBOL.search(rest):
        return None
    if words[0].isascii() and not _known(words[0]) and (not m["space"] or len(words[0]) < 2):
        return None
    if not m["space"] and re.fullmatch("[A-Za-z]", words[0]):
        return None  # a variable, as in 5m
    powers: dict[str, int] = {}
    parts = re.split(r"/|\b(?:per|an?|each|every)\b", spelled, flags=re.IGNORECASE)
    for at, part in enumerate(parts):
        found = [(_known(word), word.lower(), power) for word, power in _WORD.findall(part)]
        area = next((_AREAS[word] for _, word, _ in found if word in _AREAS), 1)
        units = [(unit, power) for unit, word, power in found if unit]
        whole = len(units) == sum(word not in _AREAS for _, word, _ in found)
        if not whole and len(found) > 1 and any(power for *_, power in found):
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
    """Returns whether two answers with these units may be equal: one may leave its unit out, and
    of degrees their scale."""
    return "" in (a, b) or a == b or ("°" in (a, b) and a[0] == b[0])


def _repeating(m: re.Match[str]) -> str:
    whole, fixed, again = m[1] or "0", m[2], m[3]
    if len(m[0]) > LONGEST_NUMBER:
        return m[0]
    under = (10 ** len(again) - 1) * 10 ** len(fixed)
    return f"{int(whole + fixed + again) - int(whole + fixed)}/{under}"


def _fraction(m: re.Match[str]) -> str:
    """Returns `a/b` with one sign in front; before it a space if it is part of a mixed number."""
    over, under = (re.sub(r"[\s,]", "", m[i] or m[i + 1]) for i in (1, 3))
    negative = (over[0] == "-") != (under[0] == "-")
    before = m.string[: m.start()].rstrip()[-1:]
    text = f"{over.lstrip('-+')}/{under.lstrip('-+')}"
    if negative:
        return f"*-{text}" if before.isalnum() else f"-{text}"
    return f" {text}" if before.isdigit() else text


def _to_fraction(text: str) -> Fraction | None:
    """Returns the value of what `NUMBER` found, or None for a division by 0."""
    if len(text) > LONGEST_NUMBER:
        return None
    sign = -1 if text[0] == "-" else 1
    text = text.lstrip("-+").rstrip(".").replace(",", "")
    text, _, under = text.partition("/")
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
    text = re.sub(r"\\[()\[\]]|\\(?:left|right)(?![A-Za-z])|\*\*|[\"`]", "", tidy(text))
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    for _ in range(3):
        text = _WRAPPER.sub(r"\1", text)
    text = re.sub(r"_\s*\{\s*(\w+)\s*\}", r"_\1", text)
    money = "$" if re.match(r"\s*\\?\$", text) and text.count("$") == 1 else ""
    text = text.replace("\\$", "").replace("$", "").strip(" '").rstrip(".,;:")
    return money + re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", re.sub(r"\s+", " ", text))


def literal(text: str) -> str | None:
    """Returns an answer that is compared as a text: words, a choice such as `(B)`, a date, a time,
    a ratio, a number in a base; returns None for an expression."""
    bare = re.sub(r"\s*([,:])\s*", r"\1 ", plain(text.replace("$", ""))).strip(" .,;:\"'`")
    if m := re.fullmatch(rf"\(([a-j]|{_OPTION})\)|({_OPTION})", bare):
        return (m[1] or m[2]).lower()
    if m := re.fullmatch(rf"(?:\(({_OPTION})\)|({_OPTION})[.)]) ([\w$\\-].*)", bare):
        return f"{m[1] or m[2]}. {m[3]}".lower()
    if _NO_EXPRESSION.search(bare):
        return spelled(text).lower()
    if _ORDER.fullmatch(bare):
        return _words(text)
    if re.search(r"[\\=^_+*/<>|{}≤≥]", bare) or read_number(text) is not None:
        return None
    words = [word.lower() for word in re.findall(r"\p{L}+", bare)]
    wrapped = [word for m in _WRAPPER.finditer(tidy(text)) for word in re.findall(r"\p{L}+", m[1])]
    short = re.fullmatch(r"[A-Z][a-z]{1,2}|yes|no|odd", bare)  # and not a product, as `xy` is
    long = any(len(word) > 3 or _FOREIGN.match(word) for word in words if word not in _NAMES)
    if short or long or set(wrapped) - {"or", "and"}:
        return _words(text)
    return None


def _words(text: str) -> str:
    bare = re.sub(r"\s*([,:])\s*", r"\1 ", plain(text.replace("$", "")))
    return " ".join(bare.strip(" .,;:\"'`").lower().split())


def same_literal(wanted: str, text: str) -> bool:
    """Returns whether a text is a literal answer. For a choice its letter is enough, optionally
    followed by what it stands for; for a number in a base its digits are enough."""
    if m := re.fullmatch(rf"({_OPTION})(?:\. (.+))?", wanted, re.IGNORECASE):
        letter, behind = _choice(text) or ("", "")
        return letter == m[1] and (not m[2] or _words(behind) in ("", m[2]))
    digits, base, _ = wanted.partition("_")
    same = wanted in (literal(text), _words(text))
    return same or (bool(base) and spelled(text).lower() == digits)


def _choice(text: str) -> tuple[str, str] | None:
    """Returns the small letter of the choice that a text begins with, and what is behind it."""
    m = _CHOICE.match(plain(text.replace("$", "")).strip(' *`"'))
    return ((m[1] or m[2]).lower(), "" if m[3] else m[4]) if m else None


def same_answer(a: str, b: str) -> bool:
    """Returns whether both are the same number or the same text."""
    x, y = read_number(a), read_number(b)
    return spelled(a) == spelled(b) if x is None or y is None else x.same(y)


_OPTION = r"(?:[A-JΑ-Κ]|(?![a-zA-Z\p{Greek}])\p{L})"
"""A small letter of Greek is a symbol."""
_CHOICE = re.compile(
    rf"(?:(?:option|choice) )?(?:\( ?({_OPTION}) ?\)|({_OPTION})"
    r"(?=[.:)]|,? (?:because|since|as|for)\b|\Z))"
    rf"(?! ?(?:,|/|&|or\b|and\b) ?\(?{_OPTION}\b)[.:)*]* ?(,? ?(?:because|since|as|for)\b)?(.*)",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"[.!?;] \S|, (?:so|but|and)\b"
    r"|\A(?:is|are|was|has|does|can|cannot|holds)\b(?! (?:the )?(?:correct|right|answer))"
)
"""Behind a choice: its text is none of one option, but comes to a conclusion."""
_NO_EXPRESSION = re.compile(
    r"\d\s?:\s?\d|\b\d{4}-\d{1,2}-\d{1,2}\b|\b\d{1,2}/\d{1,2}/\d{2,4}\b"
    r"|\A(?:[A-F]{2,}|[A-Fa-f]*\d[0-9A-Fa-f]*)\s*_"
)
"""Times and ratios, dates, numbers in a base."""
_ORDER = re.compile(r"[A-Z]{2,}|[A-Z](?:, [A-Z])+")
"""Capitals such as ACB or C, A, B: names in an order, not a product or a set."""
