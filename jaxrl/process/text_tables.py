"""Tables as plain text, for files, logs and pipes."""

from __future__ import annotations

import io
import shutil
import sys

from rich.console import Console
from rich.table import Table

WIDTH = 132
"""Columns of a table where there is no terminal."""


def terminal_width() -> int:
    """Returns the columns of the terminal that standard output is, or `WIDTH`."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def table_lines(table: Table) -> list[str]:
    """Returns the lines of a table, without empty ones."""
    out = io.StringIO()
    # In a notebook, rich would show the table instead of writing it.
    console = Console(
        file=out, width=WIDTH, color_system=None, highlight=False, force_jupyter=False
    )
    console.print(table)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
