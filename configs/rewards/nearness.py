"""A graded reward, for models that are hardly ever right: how near the result is."""

import re


def nearness(completions: list[str], answer: list[str]) -> list[float]:
    """Returns 1 / (1 + error) of the number after the last `=`, or of all text; 0 for none."""
    return [score(text, float(right)) for text, right in zip(completions, answer, strict=True)]


def score(text: str, right: float) -> float:
    result = text.rsplit("=", 1)[-1].strip()
    return 1 / (1 + abs(int(result) - right)) if re.fullmatch(r"-?\d+", result) else 0.0
