"""A template: text in which names in braces stand for values, as in `{prompt} Hint: {answer}`.
Doubled braces are braces of the text."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter


def names(text: str) -> tuple[str, ...]:
    """Returns the names in braces, each once. Raises ValueError where the braces do not fit."""
    return tuple(dict.fromkeys(name for _, name in _parts(text) if name is not None))


def fill(text: str, values: Mapping[str, str]) -> str:
    """Returns the text with the value of each name in its place."""
    return "".join(
        literal + ("" if name is None else values[name]) for literal, name in _parts(text)
    )


def _parts(text: str) -> list[tuple[str, str | None]]:
    """Returns pieces of text, each with the name that follows it."""
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; write {{{{ or }}}} for a brace of the text") from None
    for _, name, spec, conversion in parsed:
        if name is not None and (not name or spec or conversion):
            shown = f"{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}"
            raise ValueError(
                f"{text!r}: {{{shown}}} names no field: write {{NAME}}, or {{{{ and }}}} for braces"
                " of the text"
            )
    return [(literal, name) for literal, name, _, _ in parsed]
