"""JSONL files of prompts or chats.

Every line is read and checked once, when the file is opened, so that a bad row is reported before
a model is loaded. Only line numbers and byte offsets stay in memory; a row is read again when it is
needed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from jaxrl.data.example import Example, JsonObject
from jaxrl.data.rows import KEYS, Keys, kind, names_in, parse_row_json, to_example
from jaxrl.errors import UserError

BOM = b"\xef\xbb\xbf"


class JsonlFile:
    """The rows of one JSONL file, blank lines skipped."""

    procedural = False

    def __init__(self, path: str | Path, keys: Keys = KEYS, label: str = "data.train"):
        """
        Args:
            path: a UTF-8 file, with or without a byte order mark, with either line ending.
            label: the config key, for error messages.
        """
        self.name = str(path)
        self._keys = keys
        self._label = label
        self._check()

    def where(self, index: int) -> str:
        return f"{self.name}:{self._lines[index]}"

    def digest(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: row {index} of {len(self)}")
        line = int(self._lines[index])
        try:
            with open(self.name, "rb") as file:
                file.seek(self._offsets[index])
                raw = file.readline()
        except OSError as error:
            raise UserError(f"{self._label}: {self.name}: {error.strerror}") from error
        row = dict.fromkeys(self._fields) | self._parse(raw, line)
        return to_example(row, self._keys, self._place(line))

    def _check(self) -> None:
        """Parses each row once; keeps line numbers (from 1), byte offsets, names and the hash."""
        lines, offsets, offset = [], [], 0
        fields: dict[str, None] = {}
        names: dict[str, None] = {}
        digest = hashlib.sha256()
        try:
            with open(self.name, "rb") as file:
                for line, raw in enumerate(file, start=1):
                    digest.update(raw)
                    if raw.removeprefix(BOM).strip():
                        row = self._parse(raw, line)
                        to_example(row, self._keys, self._place(line))
                        fields |= dict.fromkeys(row)
                        names |= dict.fromkeys(names_in(row, self._keys))
                        lines.append(line)
                        offsets.append(offset)
                    offset += len(raw)
        except OSError as error:
            raise UserError(f"{self._label}: {self.name}: {error.strerror}") from error
        if not lines:
            raise UserError(f"{self._label}: {self.name}: no rows; each line is one JSON object")
        self._lines, self._offsets = np.array(lines, np.int64), np.array(offsets, np.int64)
        self.columns, self._fields = tuple(names), tuple(fields)
        self._digest = digest.hexdigest()

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
