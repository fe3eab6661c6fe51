"""Rows that code of the user's makes one after the other, perhaps without an end.

What ends within `READ_WHOLE` rows is data like any other. The rest is read as it is needed, in its
order: row i of it is always the i-th that the code makes, so that a run that resumes reads on where
it stopped, as long as the code makes the same rows again.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from jaxrl.data.example import Example, Part
from jaxrl.data.rows import Keys, as_json, kind, to_example
from jaxrl.errors import UserError
from jaxrl.process.plugin import code_files, load_object, user_code

READ_WHOLE = 100_000
"""Rows up to which data are read whole, unless their function takes `start`."""
KEPT = 10_000
"""Rows of which the latest stay in memory."""
NOMINAL = 2**40
"""Length of rows whose number is not known."""
START = "start"
"""Parameter of a function of rows: the number of the first that is wanted."""
_END = object()


class RowsInOrder:
    """The rows of a function that returns an iterable, or of an iterator, by their number."""

    def __init__(
        self,
        make: Callable[[int], Iterator[Any]],
        name: str,
        digest: str = "",
        passes_over: bool = True,
    ):
        """
        Args:
            make: (number of the first row) -> the rows from there on.
            digest: of the code.
            passes_over: `make` makes the rows before as well.
        """
        self._make, self.name, self._code, self._passes_over = make, name, digest, passes_over
        self._next, self._rows = 0, self._from(0)
        self._whole = True  # they were read from row 0 on
        self._latest: deque[Any] = deque(maxlen=KEPT)
        self._length: int | None = None

    def __getitem__(self, index: int) -> Any:
        if self._length is not None:
            index %= self._length
        first = self._next - len(self._latest)
        if index < first or (index > self._next + KEPT and not self._passes_over):
            self._rows, self._next, self._whole = self._from(index), index, index == 0
            self._latest.clear()
            first = index
        while self._next <= index:
            if (row := next(self._rows, _END)) is _END:
                self._length = self._next if self._whole else sum(1 for _ in self._from(0))
                if not self._length:
                    raise UserError(f"{self.name}: no rows")
                return self[index]
            self._latest.append(row)
            self._next += 1
        return self._latest[index - self._next]

    def _from(self, start: int) -> Iterator[Any]:
        return _named(self._make(start), self.name, start)

    def digest(self) -> str:
        """Computes a digest of the code and of the first row."""
        content = self._code, json.dumps(as_json(self[0]), default=str, sort_keys=True)
        return hashlib.sha256(repr(content).encode()).hexdigest()


class EndlessRows(Part):
    """A part of data with a row for each of `RowsInOrder`, which are taken in their order; their
    number is nominal."""

    procedural = True

    def __init__(self, rows: RowsInOrder, keys: Keys, label: str):
        self.name, self._rows, self._keys, self._label = rows.name, rows, keys, label
        self.columns = tuple(map(str, self._fields(0)))
        _ = self[0]

    def __len__(self) -> int:
        return NOMINAL

    def digest(self) -> str:
        return self._rows.digest()

    def __getitem__(self, index: int) -> Example:
        return to_example(as_json(self._fields(index)), self._keys, self._place(index))

    def _fields(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            what = kind(row) if not isinstance(row, Mapping) else f"with fields {list(row)[:4]}"
            raise UserError(f"{self._place(index)}: a mapping of field names is needed: {what}")
        return row

    def _place(self, index: int) -> str:
        return f"{self._label}: {self.where(index)}"


def read_ahead(
    rows: Iterable[Any], name: str, digest: str = "", again: Callable[[], Any] | None = None
) -> list[Any] | RowsInOrder:
    """Returns all rows of an iterable, or, where there are more than `READ_WHOLE`, what reads them
    in their order.

    Args:
        digest: of the code that makes them.
        again: returns them once more; None: an iterator is read once.
    """
    found = iter(rows)
    once, anew = again is None and found is rows, again or partial(iter, rows)
    first = list(itertools.islice(_named(found, name), READ_WHOLE + 1))
    if len(first) <= READ_WHOLE:
        return first
    begun = [itertools.chain(first, found)]

    def make(start: int) -> Iterator[Any]:
        if once and not begun:
            raise UserError(
                f"{name}: row {start} is needed again, or the rows have ended, and an iterator can"
                " be read once: give a function that returns a new one"
            )
        return itertools.islice(begun.pop() if begun else anew(), start, None)

    return RowsInOrder(make, name, digest)


def call_rows(function: Callable[..., Any], name: str, digest: str = "") -> Any:
    """Returns the rows that a function returns or yields; `RowsInOrder` where it takes `start`, or
    yields more than `READ_WHOLE`.

    Raises:
        UserError: it raised, it needs other arguments, or returned what is no collection.
    """
    parameters: Mapping[str, inspect.Parameter]
    try:
        parameters = inspect.signature(function).parameters
        needed = [k for k, p in parameters.items() if p.default is p.empty and k != START]
        needed = [k for k in needed if parameters[k].kind not in (2, 4)]  # *args, **kwargs
    except (TypeError, ValueError):
        parameters, needed = {}, []
    if needed:
        raise UserError(
            f"{name} takes ({', '.join(parameters)}): a function of rows has no arguments, but for"
            f" {START}, the number of the row to begin at"
        )

    def call(**arguments: int) -> Any:
        with user_code(name):
            return function(**arguments)

    if START in parameters:
        return RowsInOrder(lambda start: iter(call(start=start)), name, digest, passes_over=False)
    rows = call()
    return read_ahead(rows, name, digest, call) if hasattr(rows, "__next__") else rows


def file_rows(spec: str) -> Any:
    """Returns what `path/to/file.py:NAME` has: rows, or what a function of that name returns."""
    found = load_object(spec)
    if not callable(found) or isinstance(found, type) or hasattr(found, "__iter__"):
        return found
    files = " ".join(digest for _, digest in code_files(spec.rpartition(":")[0]))
    return call_rows(found, spec, files)


def _named(rows: Iterator[Any], name: str, number: int = 0) -> Iterator[Any]:
    """Yields rows; the error of the code that makes them names the row."""
    for at in itertools.count(number):
        with user_code(f"{name}: row {at}"):
            row = next(rows, _END)
        if row is _END:
            return
        yield row
