"""Draws the rooms of jaxrl (its folders) and their imports: docs/rooms.svg.

    python -m jaxrl.scripts.draw_rooms

A room stands above all that it imports. An arrow that follows from two others is left out, as are
the arrows to `types` and `errors`, which every room imports.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from xml.sax.saxutils import escape

from jaxrl.config import cli

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxrl"
PICTURE = ROOT / "docs" / "rooms.svg"
COMMANDS = "commands"
CONTRACTS = ("types", "errors")
BELOW = ("teacher.key_rules",)
"""Modules that stand below the room of their folder."""
WIDTH, BOX, HEIGHT, GAP, ROW = 1080, 190, 64, 24, 104

Graph = dict[str, set[str]]


def lower_room(module: str) -> str:
    """The room of a module by its name below `jaxrl`; its own where it stands below its folder."""
    return module if module in BELOW else module.partition(".")[0]


def room_of(path: Path) -> str:
    """The folder of a module; those at the top are commands and contracts."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if len(parts) > 1:
        return lower_room(".".join(parts))
    return "types, errors" if parts[0] in CONTRACTS else COMMANDS


def graph() -> Graph:
    """Room -> the rooms that it imports."""
    found: Graph = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = found.setdefault(room_of(path), set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxrl."):
                target = lower_room((node.module or "").removeprefix("jaxrl."))
                room.add("types, errors" if target in CONTRACTS else target)
            elif isinstance(node, ast.ImportFrom) and node.module == "jaxrl":
                room.update(alias.name for alias in node.names)
    return {room: {to for to in used if to in found and to != room} for room, used in found.items()}


def heights(rooms: Graph) -> dict[str, int]:
    """Room -> the longest way down from it."""
    known: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in known:
            known[room] = 1 + max((height(below) for below in rooms[room]), default=-1)
        return known[room]

    return {room: height(room) for room in rooms}


def needed(rooms: Graph) -> list[tuple[str, str]]:
    """The arrows that do not follow from others."""

    def below(room: str) -> set[str]:
        return rooms[room].union(*(below(to) for to in rooms[room]))

    return [
        (room, to)
        for room, used in sorted(rooms.items())
        for to in sorted(used)
        if not any(to in below(other) for other in used - {to})
    ]


def about(room: str) -> str:
    """The first line of the room's docstring."""
    if room == COMMANDS:
        return "train, evaluate, generate, export, devices, serve_teacher"
    if room == "types, errors":
        return "what travels between stages; mistakes of users and runs"
    path = f"{room.replace('.', '/')}.py" if room in BELOW else f"{room}/__init__.py"
    text = ast.get_docstring(ast.parse((PACKAGE / path).read_text("utf-8"))) or ""
    return text.partition("\n")[0].rstrip(".")


def picture() -> str:
    rooms = graph()
    level = heights(rooms)
    rows = [sorted(r for r in rooms if level[r] == at) for at in range(max(level.values()), -1, -1)]
    place = {}
    for down, row in enumerate(rows):
        left = (WIDTH - len(row) * BOX - (len(row) - 1) * GAP) / 2
        for at, room in enumerate(row):
            place[room] = (left + at * (BOX + GAP), 12 + down * ROW)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {len(rows) * ROW - 16}"'
        ' font-family="sans-serif">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M0 0 8 4 0 8z" fill="#7a8699"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{len(rows) * ROW - 16}" fill="#ffffff"/>',
    ]
    for start, end in needed(rooms):
        if end == "types, errors":
            continue
        (x, y), (u, v) = place[start], place[end]
        x, u, y = x + BOX / 2, u + BOX / 2, y + HEIGHT
        bend = (v - y) / 2
        parts.append(
            f'<path d="M{x:g} {y:g}C{x:g} {y + bend:g} {u:g} {v - bend:g} {u:g} {v:g}"'
            ' fill="none" stroke="#7a8699" stroke-width="1.2" marker-end="url(#a)"/>'
        )
    for room, (x, y) in place.items():
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" rx="7" fill="#eef3fb"'
            ' stroke="#4a6fa5"/>'
            f'<text x="{x + 10:g}" y="{y + 19:g}" font-size="14" font-weight="bold"'
            f' fill="#1d2b44">{escape(room)}</text>'
        )
        for line, text in enumerate(wrap(about(room), 34)[:3]):
            parts.append(
                f'<text x="{x + 10:g}" y="{y + 33 + 12 * line:g}" font-size="10"'
                f' fill="#3c4656">{escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: Sequence[str]) -> None:
    cli.Parser("jaxrl.scripts.draw_rooms", __doc__ or "").parse(argv)
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    cli.exit_process(cli.run(main))
