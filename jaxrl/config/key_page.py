"""The page of all config keys.

python -m jaxrl.config.key_page > docs/config.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.config import cli
from jaxrl.config import keys as config_keys
from jaxrl.config.schema import Config

HEAD = Path(__file__).parent.parent / "assets" / "config_page.md"
"""What stands before the keys."""
TABLE = ["| key | type | default | meaning |", "|---|---|---|---|"]


def markdown() -> str:
    """Returns the page docs/config.md."""
    lines = [HEAD.read_text(encoding="utf-8").rstrip()]
    for group in config_keys.groups(Config):
        title = [f"## {group.path}", "", group.doc] if group.path else ["## A run"]
        lines += ["", *title, "", *TABLE]
        allowed = config_keys.allowed(group)
        for key in group.keys:
            default = "required" if key.required else f"`{key.default_text}`"
            cells = (f"`{key.path}`", allowed[key.path], default, key.doc)
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    cli.Parser("jaxrl.config.key_page", "Prints the page docs/config.md.").parse(argv)
    print(markdown(), end="")


if __name__ == "__main__":
    sys.exit(cli.run(main))
