"""Each row of the rules for answers has an example of what it finds, or of what it writes."""

from __future__ import annotations

import pytest

from jaxrl.rewards.rules import RULES, pattern, rewriters, rules


@pytest.mark.parametrize("name", rules()["patterns"])
def test_a_pattern_finds_its_example(name: str) -> None:
    _, _, example, expected = rules()["patterns"][name]
    found = pattern(name).search(example)
    assert found is not None and found[0] == expected


@pytest.mark.parametrize("part", sorted(rules().keys() - {"patterns"}))
def test_a_rule_writes_its_example_as_it_says(part: str) -> None:
    for (rule, written), (*_, example, expected) in zip(
        rewriters(part), rules()[part], strict=True
    ):
        assert rule.sub(written, example) == expected != example, rule.pattern


def test_no_pattern_is_without_a_reader() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in RULES.parents[1].rglob("*.py"))
    text = RULES.read_text(encoding="utf-8")
    for name in rules()["patterns"]:
        assert f'pattern("{name}")' in code or f"⟨{name}⟩" in text, name
    for part in rules().keys() - {"patterns"}:
        assert f'"{part}")' in code, part
