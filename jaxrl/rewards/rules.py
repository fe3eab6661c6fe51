"""The rules of assets/answer_rules.yaml, by which answers are read and written otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import regex
import yaml

from jaxrl.rewards.languages import SOLID, word_table

RULES = Path(__file__).parent.parent / "assets" / "answer_rules.yaml"


@cache
def rules() -> dict[str, Any]:
    """Reads the file: its patterns by name, and the rows of each other part."""
    parts: dict[str, Any] = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return parts


@cache
def _texts() -> dict[str, str]:
    """Writes every pattern out; ⟨scales⟩ and other parts of the table of words are patterns too."""
    texts = {"solid": SOLID} | {
        part: "|".join(word for row in rows for word in row[1].split("|"))
        for part, rows in word_table().items()
    }
    for name, (_, pattern, *_) in rules()["patterns"].items():
        texts[name] = _written(pattern, texts)
    return texts


def _written(pattern: str | list[str], texts: dict[str, str]) -> str:
    text = pattern if isinstance(pattern, str) else "|".join(pattern)
    return regex.sub("⟨(.+?)⟩", lambda m: texts[m[1]], text)


@cache
def pattern(name: str) -> regex.Pattern[str]:
    """Returns one of the patterns, compiled."""
    return regex.compile(_texts()[name])


def rewrite(text: str, part: str) -> str:
    """Applies the rules of a part of the table to a text, one after the other."""
    for rule, written in rewriters(part):
        text = rule.sub(written, text)
    return text


def _by_key(written: dict[str, str], m: regex.Match[str]) -> str:
    return written[m[m.lastindex or 0]]


@cache
def rewriters(part: str) -> list[tuple[regex.Pattern[str], str | Callable[[Any], str]]]:
    """Returns the rules of a part of the table: what `sub` finds, and what it writes for that."""
    pairs: list[tuple[regex.Pattern[str], str | Callable[[Any], str]]] = []
    for _, text, written, *_ in rules()[part]:
        if isinstance(written, dict):
            keys = "|".join(map(regex.escape, sorted(written, key=len, reverse=True)))
            text = _written(text or "⟨keys⟩", {"keys": keys})
            pairs.append((regex.compile(text), partial(_by_key, written)))
        else:
            pairs.append((regex.compile(_written(text, _texts())), written))
    return pairs
