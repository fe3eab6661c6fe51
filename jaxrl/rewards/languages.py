"""Writes a text of any script as the rules for answers read it: ASCII digits and punctuation, and
English for the words that say where an answer stands or change it.

Characters are told by what Unicode says of them; the words are rows of assets/answer_words.yaml.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache, lru_cache
from pathlib import Path

import regex
import yaml

WORDS = Path(__file__).parent.parent / "assets" / "answer_words.yaml"
SOLID = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{LB=SA}]"
"""Letters of scripts that put no space between words, or none before particles."""
_LETTER = r"[^\W\d_²³]"
"""Exponents are digits to Unicode, but to `re` they are letters."""
_WORD = re.compile(rf"{_LETTER}+")
_NO_LETTER = regex.compile(
    r"(?![\p{L}\p{M}])[^\x00-\x7f]|[\p{dt=wide}\p{dt=narrow}\p{dt=font}\p{dt=square}\p{dt=small}]"
)
"""What may be written otherwise in ASCII; letters only where they are forms of others."""
_PREFIXES = r"(?:[وف]??(?:ال)??|[וש]??ה??)"
"""Conjunctions and articles that are written as one with the word behind them."""
_NUMBER = r"-?\d(?:[\d.,]*\d)?"
_PLACES = {
    "before its number": rf"(?<![\d)}}$])(?<![\d)}}$] )(?:%s)[^\S\n]?(?P<number>{_NUMBER})",
    "behind its number": rf"(?<![\d.,-])(?P<number>{_NUMBER}\s?[^\s\d.,;:]{{0,8}}?)\s?(?:%s)",
    "before an option": r"(?:%s)(?=[\s:*$(]*[a-j](?![a-z0-9]))",
    "behind an option": r"(?<=(?<![a-z0-9])[a-j]) ?(?:%s)",
    "behind a number": r"(?<=[\d$}])[^\S\n]?(?:%s)",
    "anywhere": "%s",
    "answer": r"(?:%s)(?:(?P<between>[^\n.:=\d]{0,60}?)(?:%s)"
    r"|(?P<direct>(?=[ *_]+[-$]?\d(?!\d*[).]?:(?:\D|$)))))?",
    "at the end": r"(?:%s)(?=[\s*\"')\]}]*(?:[.,;!?]|$))",
}
"""Parts of the table -> where its words count; of an answer, with the words of the part `is`, or
directly before a number."""
_COMMA = re.compile(r"(?<![\d.,({\[])(\d{1,3}(?:\.\d{3})+|\d+),(\d\d?|\d{4,})(?![\d,)}\]]|\.\d)")
"""A decimal with a comma in prose: in brackets and braces it may be a point, or a list."""
_CHOICE = re.compile(r"(?<![^\W_])[A-J]、(?!\s*[A-J](?![^\W_]))")
"""`B、北京` is a choice, `A、B` are two."""
_SHAPES = ("<wide>", "<narrow>", "<small>", "<font>", "<square>", "<circle>")
"""Of compatibility characters that are other characters in another shape."""
_FORMS = {"<circle>": "(%s)", "<square>": " %s", "<compat>": " %s"}
"""`②` is (2); `18㎡` and `18℃` are a number and a unit."""
_NAMED = {"SEMICOLON": "; ", "COLON": ": ", "COMMA": ", ", "PERCENT SIGN": "%"}
_NAMED |= {"DECIMAL SEPARATOR": ".", "THOUSANDS SEPARATOR": ",", "WAVE DASH": "~"}
_NAMED |= {"DOUBLE": '"', "CORNER BRACKET": '"', "LENTICULAR BRACKET": " ", "HYPHEN": "-"}
"""Parts of the names of punctuation -> how it is written in ASCII."""


def same_characters(text: str) -> str:
    """Returns a text in the one form in which texts are compared: composed accents (NFC), none of
    the invisible marks that order the writing."""
    text = unicodedata.normalize("NFC", text)
    return text if text.isascii() else regex.sub(r"(?![\u200c\u200d])\p{Cf}", "", text)


def in_ascii(text: str) -> str:
    """Returns a text with ASCII digits and punctuation: `１８．５` and `١٨٫٥` are 18.5."""
    text = same_characters(text)
    return text if text.isascii() else _NO_LETTER.sub(_replaced, text)


def in_english(text: str) -> str:
    """Returns a text `in_ascii` with the words of the table in English: `答案是18` is
    ` answer is 18`."""
    text, (whole, stems) = in_ascii(text), _telling_words()
    said = set(_WORD.findall(text.lower()))
    # no words between spaces, or what is no word
    other = regex.search(
        rf"{SOLID}|\p{{Arabic}}|\p{{Hebrew}}|\p{{Cyrillic}}|\p{{Greek}}{{3}}|%\d", text
    )
    if not other and whole.isdisjoint(said) and not any(word.startswith(stems) for word in said):
        return text
    text = regex.sub(r"(?<!\p{L})(\p{Hebrew})-(?=\d)", r"\1 ", text)
    before, writes_comma = text, not regex.search(SOLID, text)
    for pattern, meanings in _passes():
        lower = text.lower()
        if len(lower) != len(text):  # of some letters it is two
            lower = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
        parts, at = [], 0
        for m in pattern.finditer(lower):
            word, (start, end) = m["solid"] or m["spaced"], m.span()
            a, b = m.span("spaced")
            if m["spaced"] and (_is_mark(lower, a - 1) or _is_mark(lower, b)):
                continue  # a part of a word
            stem = next(word[:n] for n in range(len(word), 0, -1) if word[:n] in meanings)
            groups = m.groupdict()
            space = "" if text[end : end + 1] in ("²", "³") else " "
            number = text[slice(*m.span("number"))] if "number" in groups else ""
            parts += [text[at:start], " ", meanings[stem].format(number), space]
            if m.lastgroup == "direct":
                parts.append("is ")
            elif (between := groups.get("between")) is not None:
                changes = any(f" {row[0]} " in between for row in word_table()["anywhere"])
                parts += [between, " " if changes else " is "]
            at = end
        text = re.sub(" {2,}", " ", "".join((*parts, text[at:]))) if parts else text
    if writes_comma and (text != before or regex.search(r"\p{Cyrillic}|\p{Greek}{3}", text)):
        text = _COMMA.sub(lambda m: f"{m[1].replace('.', '')}.{m[2]}", text)
    return text


@cache
def word_table() -> dict[str, list[tuple[str, str, str]]]:
    """Returns the rows of each part of the table: (meaning, words, example)."""
    parts = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    return {
        part: [(str(a), in_ascii(b), str(c)) for a, b, c in rows] for part, rows in parts.items()
    }


def words_of(part: str) -> list[str]:
    """Returns the words, or patterns, of all rows of a part of the table."""
    return [word for row in word_table()[part] for word in row[1].split("|")]


def _replaced(m: re.Match[str]) -> str:
    text, (start, end) = m.string, m.span()
    inside = text[max(0, start - 1) : start].isdecimal() and text[end : end + 1].isdecimal()
    wide = unicodedata.normalize("NFKC", m[0])
    if inside and wide in ",.:":
        return wide
    if m[0] == "、" and _CHOICE.match(text, max(0, start - 1)):
        return ". "
    written = _written(m[0])
    return "-" if inside and written == "~" else written


@lru_cache(maxsize=4096)
def _written(character: str) -> str:
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    shape, _, codes = unicodedata.decomposition(character).partition(" ")
    if shape in _SHAPES or shape == "<compat>" and unicodedata.category(character) == "So":
        wide = "".join(chr(int(code, 16)) for code in codes.split())
        wide = _FORMS.get(shape, "%s") % wide
        return ". " if wide in ".!?。" else wide + " " * (wide in ",;:")
    if regex.match(r"\p{STerm}", character):
        return ". "
    if not unicodedata.category(character).startswith("P"):
        return character
    name = unicodedata.name(character, "")
    return next((text for part, text in _NAMED.items() if part in name), character)


def _is_mark(text: str, at: int) -> bool:
    """Returns whether a part of a letter stands there, as a vowel of Devanagari."""
    return 0 <= at < len(text) and unicodedata.category(text[at]).startswith("M")


@cache
def _telling_words() -> tuple[frozenset[str], tuple[str, ...]]:
    """Lists words of which a text has one if it has a phrase of the table, and their stems."""
    phrases = [phrase.lower() for part in _PLACES for phrase in words_of(part)]
    words = {max(_WORD.findall(p)[::-1], key=len, default=p): p for p in phrases}
    stems = (word for word, phrase in words.items() if phrase.endswith("*"))
    return frozenset(words), tuple(stems)


@cache
def _passes() -> list[tuple[re.Pattern[str], dict[str, str]]]:
    """Lists the patterns to look for, in order, each with the meanings of its words."""
    rows, passes = word_table(), []
    for part, place in _PLACES.items():
        meanings = {
            word.strip("*").lower(): row[0] for row in rows[part] for word in row[1].split("|")
        }
        forms = [_any(rows[name], name) for name in (part, "is")]
        passes.append((re.compile(place % tuple(forms[: place.count("%s")]), re.M), meanings))
    return passes


def _any(rows: list[tuple[str, str, str]], part: str) -> str:
    """Returns the pattern of all words of some rows, longer ones first: whole words, but where a
    script puts no space between them."""
    words = sorted((w.lower() for row in rows for w in row[1].split("|")), key=len, reverse=True)
    forms = {word: re.escape(word).replace(r"\*", r"[^\W\d_]*") for word in words}
    solid = "|".join(form for word, form in forms.items() if regex.search(SOLID, word))
    spaced = "|".join(form for word, form in forms.items() if not regex.search(SOLID, word))
    solid, spaced = solid or "(?!)", spaced or "(?!)"
    whole = rf"(?<!{_LETTER})(?<!\\){_PREFIXES}(?P<spaced>{spaced})(?!{_LETTER})|(?P<solid>{solid})"
    starts = re.escape("".join({word[0] for word in words} | set("وفשהא")))  # read faster
    whole = f"(?=[{starts}])(?:{whole})"
    return f"(?:{whole})" if part != "is" else re.sub(r"\?P<\w+>", "?:", f"(?:{whole})")
