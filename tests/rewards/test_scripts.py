"""The same verdict for the same sentence in every script. The cases are in tests/cases."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import regex

from jaxrl.data.example import Example
from jaxrl.rewards.languages import SOLID, word_table
from jaxrl.rewards.verifiers import VERIFIERS

CASES = Path(__file__).parents[1] / "cases" / "answers_in_scripts.jsonl"
TEN = "Latin Cyrillic Greek Arabic Hebrew Devanagari Thai Chinese Japanese Korean"
NUMBERS = ("number", "auto", "boxed")
"""Verifiers that compare numbers, without math-verify."""


def judge(name: str, text: str, answer: str) -> float | None:
    said = rf"so \boxed{{{text}}}" if name == "boxed" else text
    return VERIFIERS[name](said, Example("p", answer=answer))


def cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


def test_there_are_right_and_wrong_sentences_of_ten_scripts() -> None:
    for script in TEN.split():
        verdicts = [case["verdict"] for case in cases() if case["script"] == script]
        assert min(verdicts.count(0), verdicts.count(1)) >= 7, script


@pytest.mark.parametrize("name", ["number", "auto", "math", "contains", "exact"])
def test_cases(name: str) -> None:
    """A sentence of which 18 is the answer has no other."""
    if name == "math":
        pytest.importorskip("math_verify")
    for case in cases():
        if name in case["verifier"].split():
            text, answer, verdict = case["sentence"], case["answer"], case["verdict"]
            assert judge(name, text, answer) == verdict, (text, answer)
            if verdict and answer == "18" and name != "contains":
                assert judge(name, text, "17") == judge(name, text, "8") == 0, text


@pytest.mark.parametrize("part", word_table())
def test_rows_of_the_table_of_words(part: str) -> None:
    """Each has an example; behind a `!`, 18 is not its answer, and neither is any other number."""
    for meaning, words, example in word_table()[part]:
        right = not example.startswith("!")
        assert judge("number", example.lstrip("!"), "18") == right, (meaning, words, example)


def digits() -> Iterator[str]:
    """The ten digits of each script, and in each other style."""
    for code in range(0x80, sys.maxunicode):
        if unicodedata.decimal(chr(code), None) == 0:
            yield "".join(map(chr, range(code, code + 10)))


def test_digits_of_every_script() -> None:
    every = list(digits())
    assert len(every) > 60
    for ten in every:
        eighteen, eighty = f"{ten[1]}{ten[8]}", f"{ten[8]}{ten[0]}"
        for name in (*NUMBERS, "contains"):
            said = eighteen if name == "boxed" else f"9 + 9 = {eighteen}."
            assert judge(name, said, "18") == judge(name, "18", eighteen) == 1, eighteen
            assert judge(name, said, eighty) == judge(name, said, "8") == 0, eighteen


def letters() -> Iterator[str]:
    """A word of each script, but of those whose letters may be symbols."""
    scripts: dict[str, list[str]] = {}
    for code in range(0x80, 0x20000):
        if unicodedata.category(chr(code)) in ("Lo", "Ll"):
            script = unicodedata.name(chr(code), "LATIN").split()[0]
            scripts.setdefault(script, []).append(chr(code))
    other = {"LATIN", "GREEK", "COPTIC", "MATHEMATICAL", "DOUBLE-STRUCK", "FEMININE", "MASCULINE"}
    other |= {"FULLWIDTH"}  # forms of Latin letters
    for script, found in scripts.items():
        if script not in other and len(found) > 20:
            yield "".join(found[i] for i in (7, 12, 9, 14))


def test_a_number_with_a_word_of_any_script_is_the_number() -> None:
    every = list(letters())
    assert len(every) > 100
    for word in every:
        for text in (f"{word} 18 {word}", f"18 {word}", f"18{word}", f"{word}: 18"):
            for name in ("number", "auto"):
                assert judge(name, text, "18") == 1, text
                assert judge(name, text, "1") == judge(name, f"x{text[-2:]}", "18") == 0, text


def test_a_word_is_found_where_no_spaces_are_and_no_part_of_one_is_elsewhere() -> None:
    for word in letters():
        solid = regex.search(SOLID, word) is not None
        assert judge("contains", f"{word} 18", word) == judge("contains", f"({word})", word) == 1
        assert judge("contains", word * 2, word) == solid, word
        assert judge("contains", f"18{word}", "18") == solid, word


@pytest.mark.parametrize("name", ["number", "auto", "boxed", "exact", "contains"])
def test_marks_of_direction_and_forms_of_accents_are_no_difference(name: str) -> None:
    for mark in "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff":
        assert judge(name, f"{mark}1{mark}8{mark}", "18") == judge(name, "18", f"18{mark}") == 1
    if name != "number":
        for text in ("café", "한국", "Å", "Đáp án", "が"):
            forms = [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]
            for a, b in (forms, forms[::-1]):
                assert judge(name, a, b) == 1, text
        assert judge(name, "cafe", "café") == judge(name, "café", "cafe") == 0
