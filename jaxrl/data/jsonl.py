"""Rows of prompts or chats as text: of JSONL, JSON and CSV files, and objects of a Python program.

Every row is read and checked once, when the file is opened, so that a bad row is reported before a
model is loaded. Of JSONL only line numbers, byte offsets and checksums stay in memory, and a row is
read again when it is needed; all others are held.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.data.example import Example, JsonObject, Part
from jaxrl.data.rows import KEYS, Keys, as_json, kind, names_in, parse_row_json, to_example
from jaxrl.errors import UserError
from jaxrl.formats.opened import has_changed
from jaxrl.process.waiting import count_rows

BOM = b"\xef\xbb\xbf"


class JsonlFile(Part):
    """The rows of one JSONL file, blank lines skipped: a UTF-8 file, with or without a byte order
    mark, with either line ending."""

    def __init__(self, path: str | Path, keys: Keys = KEYS, label: str = "data.train"):
        self.name, self._keys, self._label = str(path), keys, label
        lines, offsets, sums, offset = [], [], [], 0  # lines from 1; bytes
        fields: dict[str, None] = {}
        names: dict[str, None] = {}
        digest = hashlib.sha256()
        with _found(path, label), open(self.name, "rb") as file:
            for line, raw in enumerate(count_rows(file, self.name), start=1):
                digest.update(raw)
                if raw.removeprefix(BOM).strip():
                    row = self._parse(raw, line)
                    to_example(row, self._keys, self._place(line))
                    fields |= dict.fromkeys(row)
                    names |= dict.fromkeys(names_in(row, self._keys))
                    lines.append(line)
                    offsets.append(offset)
                    sums.append(zlib.crc32(raw))
                offset += len(raw)
        if not lines:
            raise UserError(f"{self._label}: {self.name}: no rows; each line is one JSON object")
        self._lines, self._offsets = np.array(lines, np.int64), np.array(offsets, np.int64)
        self._sums = np.array(sums, np.uint32)
        self.columns, self._fields = tuple(names), tuple(fields)
        self._digest = digest.hexdigest()

    def where(self, index: int) -> str:
        return f"{self.name}:{self._lines[index]}"

    def digest(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Example:
        line = int(self._lines[index])
        raw = None
        with suppress(OSError), open(self.name, "rb") as file:
            file.seek(self._offsets[index])
            raw = file.readline()
        if raw is None or zlib.crc32(raw) != self._sums[index]:
            raise has_changed(f"{self._place(line)}")
        row = dict.fromkeys(self._fields) | self._parse(raw, line)
        return to_example(row, self._keys, self._place(line))

    def _parse(self, raw: bytes, line: int) -> JsonObject:
        where = self._place(line)
        try:
            row = parse_row_json(raw.removeprefix(BOM).decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
        except (RecursionError, ValueError) as error:  # too deep, or a number too long
            raise UserError(f"{where}: cannot be read: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a JSON object is needed, this is {kind(row)}")
        return row

    def _place(self, line: int) -> str:
        return f"{self._label}: {self.name}:{line}"


FIELD_CHARACTERS = 2**31 - 1
"""The longest field of a CSV file; Python's own limit is 131072."""


class RowList(Part):
    """Rows in memory, each checked once."""

    def __init__(
        self,
        name: str,
        rows: Iterable[object],
        keys: Keys,
        label: str,
        lines: Sequence[int] | None = None,
        digest: str | None = None,
    ):
        """
        Args:
            lines: of a file, where each row ends, from 1; None: rows are numbered from 0.
            digest: hash of the file; None: of the rows.
        """
        self.name, self._keys, self._label, self._lines = name, keys, label, lines
        self._rows: list[JsonObject] = []
        for index, row in enumerate(count_rows(rows, name)):
            place = f"{label}: {self.where(index)}"
            if not isinstance(row, Mapping):
                raise UserError(f"{place}: a JSON object is needed, this is {kind(row)}")
            if not all(isinstance(field, str) for field in row):
                raise UserError(f"{place}: fields are named by text, this row has {list(row)[:4]}")
            self._rows.append(as_json(row))
            to_example(self._rows[-1], keys, place)
        if not self._rows:
            raise UserError(f"{label}: {name}: no rows")
        self._fields = tuple(dict.fromkeys(name for row in self._rows for name in row))
        self.columns = tuple(
            dict.fromkeys(name for row in self._rows for name in names_in(row, keys))
        )
        self._digest = digest

    def where(self, index: int) -> str:
        return super().where(index) if self._lines is None else f"{self.name}:{self._lines[index]}"

    def digest(self) -> str:
        if self._digest is None:
            whole = hashlib.sha256()
            for index, row in enumerate(self._rows):
                try:
                    whole.update(json.dumps(row, default=_steady).encode())
                except Exception as error:  # whatever the user's objects raise
                    raise UserError(
                        f"{self._label}: {self.where(index)}: it has a value that cannot be"
                        f" pickled, {type(error).__name__}: {error}: leave that field out"
                    ) from error
            self._digest = whole.hexdigest()
        return self._digest

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row = dict.fromkeys(self._fields) | self._rows[index]
        return to_example(row, self._keys, f"{self._label}: {self.where(index)}")


def _steady(value: Any) -> object:
    # For a hash: the same in every process, which a `repr` with an address is not.
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return hashlib.sha256(pickle.dumps(value)).hexdigest()


def open_json(path: Path, keys: Keys, label: str) -> RowList | JsonlFile:
    """Opens the rows of a `.json` file: an array of objects, one object per line, or a single one
    over several lines."""
    with _found(path, label):
        data = path.read_bytes()
    text = data.removeprefix(BOM)
    is_array = text.lstrip()[:1] == b"["
    rows = None
    try:
        if is_array or b"\n" in data.strip():
            rows = parse_row_json(text.decode())
    except (RecursionError, ValueError) as error:  # too deep, a number too long, or not UTF-8
        if is_array and isinstance(error, json.JSONDecodeError):
            raise UserError(
                f"{label}: {path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}"
            ) from error
        if is_array:
            raise UserError(f"{label}: {path}: cannot be read: {error}") from error
    if rows is None:
        return JsonlFile(path, keys, label)
    digest = hashlib.sha256(data).hexdigest()
    return RowList(str(path), rows if is_array else [rows], keys, label, digest=digest)


def open_csv(path: Path, keys: Keys, label: str) -> RowList:
    """Opens the rows of a `.csv` file, whose first line names the fields. Every value is text, and
    an empty one is null."""
    with _found(path, label):
        data = path.read_bytes()
    rows: list[Any] = []
    lines: list[int] = []
    limit = csv.field_size_limit(FIELD_CHARACTERS)
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        names = next(reader, [])
        if len(set(names)) < len(names):
            raise UserError(f"{label}: {path}:1: two fields have one name: {', '.join(names)}")
        other = [mark for mark in ";\t|" if len(names) == 1 and mark in names[0]]
        if other and names[0] not in keys.named:
            raise UserError(
                f"{label}: {path}:1: the row has `{names[0]}`, a single field: the separator must"
                f" be a comma, not {other[0]!r}"
            )
        for values in reader:
            if values and len(values) != len(names):
                raise UserError(
                    f"{label}: {path}:{reader.line_num}: {len(values)} values for the"
                    f" {len(names)} fields that line 1 names (a value with commas or line breaks"
                    " stands in double quotes)"
                )
            if values:
                rows.append({k: v or None for k, v in zip(names, values, strict=True)})
                lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{label}: {path}: not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    except csv.Error as error:
        raise UserError(f"{label}: {path}:{reader.line_num}: not CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)
    return RowList(str(path), rows, keys, label, lines, hashlib.sha256(data).hexdigest())


@contextmanager
def _found(path: str | Path, label: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{label}: {path}: {error.strerror}") from error
