"""A graded reward, for models that are hardly ever right: how near the result is."""

import re


def nearness(completions, answer):
    """1 / (1 + error) of the number after the last `=`, else of all text; 0 for no number."""
    return [score(text, float(right)) for text, right in zip(completions, answer, strict=True)]


def score(text, right):
    result = text.rsplit("=", 1)[-1].strip()
    return 1 / (1 + abs(int(result) - right)) if re.fullmatch(r"-?\d+", result) else 0.0
