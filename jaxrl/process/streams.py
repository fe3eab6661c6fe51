"""Standard output and standard error, which may go away while a run works: the terminal is closed,
the reader of a pipe ends, the disk under a log is full. That never ends a run.
"""

from __future__ import annotations

import io
import os
import resource
import select
import shutil
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from jaxrl.errors import UserError, counted

LEAST_FILES, MOST_FILES = 128, 65536
"""Files that a run may have open at once: a checkpoint of the quickstart takes about 40."""
LOST = (OSError, ValueError)
"""What a stream raises that is gone: a ValueError is of a closed file."""


class Output:
    """A text stream that drops what it cannot write. The next text is tried again."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream  # `sys.stdout` is None where the process began without one
        self.lost: Callable[[str], None] | None = None
        """Takes one message, the first time that something could not be written."""
        self._reported = False

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        with suppress(*LOST):
            return self._stream is not None and self._stream.isatty()
        return False

    def write(self, text: str) -> int:
        known = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._attempt(lambda stream: stream.write(known))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def line(self, text: str) -> None:
        """Writes a line, at once."""
        self.write(text + "\n")
        self.flush()

    def _attempt(self, action: Callable[[IO[str]], object]) -> None:
        try:
            if self._stream is not None:
                action(self._stream)
        except LOST as error:
            if self._reported or self.lost is None:
                return
            self._reported = True
            why = getattr(error, "strerror", None) or str(error)
            name = {"<stdout>": "standard output", "<stderr>": "standard error"}
            stream = str(getattr(self._stream, "name", "the output"))
            self.lost(
                f"{name.get(stream, stream)} cannot be written to: {why}. Training continues;"
                " output that cannot be written is lost there, but not here"
            )


def to_stderr(text: str) -> None:
    """Writes a line on standard error, where there is one."""
    Output(sys.stderr).line(text)


def fill_missing() -> None:
    """Opens /dev/null in place of standard streams that the process began without: else the next
    file that is opened gets the number of one, and takes what is meant for it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


def raise_file_limit() -> None:
    """Lets this process, and those that it starts, open as many files as the host allows.

    Raises:
        UserError: these are fewer than a run needs, which could not write its checkpoints.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if allowed < LEAST_FILES:
        raise UserError(
            f"this process may open {counted(allowed, 'file')} at once (ulimit -Hn); a run needs at"
            f" least {LEAST_FILES}: raise the limit of the shell or container that starts it"
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def has_reader(stream: IO[str]) -> bool:
    """Returns whether anybody reads a stream: nobody does a pipe whose reader has ended."""
    try:
        asked = select.poll()
        asked.register(stream, 0)
        return not any(event & select.POLLERR for _, event in asked.poll(0))
    except LOST:
        return False


def flush_streams() -> None:
    """Flushes both streams before the end of the process: Python turns the exit code into 120 where
    standard output cannot be flushed. What is left of such a stream is dropped."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is None:
            continue
        try:
            stream.flush()
        except LOST:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)
            os.close(nothing)
            with suppress(*LOST):
                stream.flush()


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Drops what is written to stderr, from C++ too."""
    try:
        kept = os.dup(2)
    except OSError:  # the process was started without one
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    hole = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(hole, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(hole)


def readable(text: str) -> str:
    """Returns a text on one line, as a person reads it: `↵` for line breaks, and codes (`\\x1b`)
    for what no terminal shows, or would obey."""

    def shown(letter: str) -> str:
        if letter.isprintable() or unicodedata.category(letter) == "Zs":
            return letter
        return "↵" if letter == "\n" else repr(letter)[1:-1]

    return text if text.isprintable() else "".join(map(shown, text))


WIDTH = 132
"""Columns of a table where there is no terminal."""


def terminal_width() -> int:
    """Returns the columns of the terminal that standard output is, or `WIDTH`."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def table_lines(
    title: str | None,
    columns: Sequence[str],
    figures: Collection[str],
    rows: Iterable[Sequence[str]],
    width: int = WIDTH,
    wrap: bool = False,
    **options: Any,
) -> list[str]:
    """Returns the lines of a table, without empty ones.

    Args:
        figures: of the columns, those that are aligned to the right.
        rows: a cell for each column.
        wrap: whether a cell that is too long goes on in the next line, where others are cut.
        options: of `rich.table.Table`.
    """
    from rich import box  # a tenth of a second, in every process of a user's code
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title, title_justify="left", **options)
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in figures else "left",
            no_wrap=not wrap,
            overflow="fold" if wrap else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    # In a notebook, rich would show the table instead of writing it.
    console = Console(
        file=out, width=width, color_system=None, highlight=False, markup=False, force_jupyter=False
    )
    console.print(table)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
