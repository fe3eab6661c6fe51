"""Pieces of HTML, and numbers as a reader says them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def text(words: str) -> str:
    """Of a run, for HTML: in an element or in an attribute."""
    return html.escape(words)


def table(heads: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already; the first column heads its rows."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def definitions(rows: Iterable[Sequence[str]]) -> str:
    """Headings with what they say beside them; HTML already."""
    body = "".join(f'<tr><th scope="row">{name}</th><td>{told}</td></tr>' for name, told in rows)
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def bytes_text(n: float) -> str:
    """Three digits, in the largest unit that the number fills."""
    for unit, size in UNITS:
        if n >= size:
            return f"{n / size:.3g} {unit}" if n < 100 * size else f"{n / size:.0f} {unit}"
    return f"{n:.0f} bytes"


def missing(why: str) -> str:
    """In place of a section whose file holds nothing."""
    return f'<p class="missing muted">{text(why)}.</p>'
