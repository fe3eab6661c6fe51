"""Where the live display is drawn: over itself on a terminal, or in the output of a cell.

A cell has no cursor that could go back: its display is a piece of HTML, which rich makes, that is
exchanged.
"""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxrl.process.streams import Output

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

CELL_EVERY_S = 0.2
"""Shortest time between two drawings: each is sent to the browser whole."""


class Terminal:
    """Messages scroll by above the display."""

    def __init__(self, out: Output) -> None:
        file = cast(IO[str], out)
        self._console = Console(
            file=file, force_terminal=True, force_jupyter=False, highlight=False
        )
        # Drawn when something changed: no refresh thread of rich's.
        self._live = Live(console=self._console, auto_refresh=False)

    def message(self, text: str) -> None:
        self._console.print(Text(text))

    def show(self, display: Table) -> None:
        """In place of what it showed last."""
        self._live.start()
        self._live.update(display, refresh=True)

    def close(self) -> None:
        """What is shown last stays."""
        self._live.stop()


class Cell:
    """Messages are printed; the display stays where it was first shown."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._handle: DisplayHandle | None = None
        self._undrawn: Table | None = None
        self._drawn_at = -CELL_EVERY_S

    def message(self, text: str) -> None:
        self._out.line(text)

    def show(self, display: Table) -> None:
        """In place of what it showed last."""
        self._undrawn = display
        if time.monotonic() - self._drawn_at >= CELL_EVERY_S:
            self._draw()

    def close(self) -> None:
        """What is shown last stays."""
        self._draw()

    def _draw(self) -> None:
        import IPython.display

        if self._undrawn is None:
            return
        if self._handle is None:
            self._handle = IPython.display.display(self._undrawn, display_id=True)
        else:
            self._handle.update(self._undrawn)
        self._undrawn, self._drawn_at = None, time.monotonic()


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook (Jupyter, Colab)."""
    return Console().is_jupyter
