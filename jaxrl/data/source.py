"""Where prompts come from: `data.train` and `data.eval` as one indexable collection."""

from __future__ import annotations

import bisect
import errno
import glob
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxrl.config.builtin_configs import how_to_make
from jaxrl.data import hub_sets
from jaxrl.data.example import Example, Part, Split
from jaxrl.data.hub_sets import FORMATS, SPLIT_FILE, SUFFIXES, choose, data_files
from jaxrl.data.jsonl import JsonlFile, RowList, open_csv, open_json
from jaxrl.data.rows import KEYS, Keys, check_names, kind, listed
from jaxrl.data.tables import (
    GroupCache,
    ParquetReader,
    TablePart,
    TableReader,
    dataset_splits,
    open_dataset,
)
from jaxrl.data.tasks import TASKS, open_task, parse_options
from jaxrl.errors import UserError, near, user_path
from jaxrl.formats.hub import data_name
from jaxrl.process.plugin import PYTHON

Rows = Any
"""Rows of a Python program, as `listed_rows` takes them."""


class Source(Part):
    """Parts one after the other; the prompt stream mixes them. Files that have one name together
    are a source that is itself a `Part` of another."""

    def __init__(self, parts: Sequence[Part], name: str | None = None):
        self.parts = tuple(parts)
        self.name = " + ".join(part.name for part in parts) if name is None else name
        self.columns = tuple(dict.fromkeys(name for part in parts for name in part.columns))
        self._ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Example:
        part, row = self.locate(index)
        return part[row]

    def locate(self, index: int) -> tuple[Part, int]:
        """Finds the part that holds row `index`, and the row's number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: row {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)

    def where(self, index: int) -> str:
        part, row = self.locate(index)
        return part.where(row)

    def digest(self) -> str:
        return hashlib.sha256(" ".join(p.digest() for p in self.parts).encode()).hexdigest()


def open_source(
    spec: str | Sequence[str],
    seed: int = 0,
    split: Split = "train",
    keys: Keys = KEYS,
    label: str | None = None,
    given: Mapping[str, Rows] = MappingProxyType({}),
) -> Source:
    """Opens what `data.train` or `data.eval` names; each item of a list becomes one part.

    Args:
        spec: one or a list of: a `.jsonl`, `.parquet`, `.json` or `.csv` file; a pattern such as
            `data/*.parquet`, or a folder, whose files become one part; a folder that
            `datasets` saved; a procedural task such as `arithmetic:digits=2,terms=3` or
            `reasoning_gym/basic_arithmetic:max_terms=3,size=5000`; a data set on a hub, as in
            `hf:openai/gsm8k:main:train`. Of a folder with several splits `:split=NAME` takes one,
            by default the one that is named like the use (SPLITS).
        seed: of the procedural tasks.
        split: the use. Procedural tasks have no prompt in both splits, whatever their seeds and
            options.
        keys: names of the fields or columns of files.
        label: the config key, for error messages; None for `data.` and the split.
        given: rows of a Python program by their names, as in `python:data`.

    Raises:
        UserError: for an unknown name, a missing file or a bad row, naming the file and line.
    """
    label = f"data.{split}" if label is None else label
    specs = [spec] if isinstance(spec, str) else list(spec)
    if not specs:
        raise UserError(f"{label}: nothing is named; give a .jsonl file or a task")
    open_one = _Opener(seed, split, keys, label, given)
    source = Source([open_one.part(one) for one in specs])
    if split == "eval" and keys.answer not in (KEYS.answer, None):
        _check_known(source, keys.answer, "data.answer_key", label)
    if label == "data.train" and keys.tools is not None:
        _check_known(source, keys.tools, "data.tools_key", label)
    return source


def source_of(
    rows: Rows, keys: Keys = KEYS, label: str = "data.train", name: str | None = None
) -> Source:
    """Makes a source of the rows of a Python program, as `listed_rows` takes them: they mean what
    they would in a file. Error messages name `label` and `name`, or else the type of the rows."""
    name, rows = name or type(rows).__name__, listed_rows(rows, label)
    if isinstance(rows, list):
        return Source([RowList(name, rows, keys, label)])
    return Source([TablePart(name, lambda: TableReader(rows), keys, label)])


def listed_rows(rows: Rows, label: str) -> Rows:
    """Returns the rows of a Python program in a form that can be read again: a table as it is, all
    others as a list of what should be mappings of field names to values.

    Args:
        rows: a `datasets.Dataset`, a `pyarrow.Table`, a `DataFrame` of pandas or polars, or any
            sequence or iterable, such as a list or a generator, which is read to its end.

    Raises:
        UserError: these are no rows.
    """
    hint = ""
    if isinstance(rows, Mapping):
        hint = f": take one of {listed(map(str, rows))}"
        if all(isinstance(one, list) for one in rows.values()):
            hint = ": make rows of its columns, as datasets.Dataset.from_dict does"
    elif isinstance(rows, type):
        hint = ": give an instance of the class"
    elif hasattr(rows, "to_dicts"):  # a frame of polars
        return rows.to_dicts()
    elif hasattr(rows, "column_names") and hasattr(rows, "__len__"):
        return rows
    elif hasattr(rows, "columns") and hasattr(rows, "iloc"):
        check_names(rows.columns, f"{label}: {type(rows).__name__}")
        return rows.to_dict("records")
    elif hasattr(rows, "__iter__") and not isinstance(rows, str | bytes):
        return list(rows)
    elif hasattr(rows, "__getitem__") and not isinstance(rows, str | bytes):
        return [rows[index] for index in range(len(rows))]
    raise UserError(
        f"{label}: a list or another iterable of rows, a datasets.Dataset, a pyarrow.Table or a"
        f" pandas DataFrame is needed, this is {kind(rows)}{hint}"
    )


def is_missing(spec: str) -> bool:
    """Returns whether a source of `open_source` names data files by a path where there are none."""
    if spec.startswith(PYTHON) or data_name(spec) is not None or not spec.endswith(SUFFIXES):
        return False
    path = user_path(spec)
    return not path.exists() and not glob.glob(str(path), recursive=True)


@dataclass(frozen=True)
class _Opener:
    """Opens one source after the other, as `open_source` was asked."""

    seed: int
    split: Split
    keys: Keys
    label: str
    given: Mapping[str, Rows]
    cache: GroupCache = field(default_factory=GroupCache)

    def part(self, spec: str) -> Part:
        label, on_hub = self.label, data_name(spec)
        if spec.startswith(PYTHON):
            if spec in self.given:
                return source_of(self.given[spec], self.keys, label, spec)
            raise UserError(
                f"{label}: {spec} are rows of a Python program: give them from there, as"
                f" {spec.removeprefix(PYTHON).partition('.')[0]}=rows, or name a file with"
                f" {label}=FILE"
            )
        if on_hub is not None:
            paths = hub_sets.fetch(on_hub, self.split, label)
            return Source([self.file(path) for path in paths], str(on_hub.asked))
        path, colon, options = spec.rpartition(":")  # PATH:key=value,...
        if not colon or user_path(spec).exists():
            path, options = spec, ""
        family = path.split(":")[0].split("/")[0]
        if spec.startswith("hf:"):
            raise UserError(
                f"{label}: {spec!r} is not the name of a data set: write hf:ORG/NAME:CONFIG:SPLIT,"
                " or hf:ORG/NAME@REVISION:CONFIG:SPLIT"
            )
        if family in TASKS and not path.endswith(SUFFIXES):
            return open_task(spec, self.seed, self.split, label)
        place = user_path(path)
        if place.is_dir():
            return self.folder(spec, place, options)
        bare = spec.count("/") == 1 and "=" not in spec and data_name(f"hf:{spec}") is not None
        if options and not (bare and not place.exists()):
            raise UserError(
                f"{label}: {path} takes no options (:{options}); a folder takes split=NAME, a task "
                "its own"
            )
        if any(letter in path for letter in "*?[") and not place.exists():
            return self.pattern(spec, place)
        if path.endswith(SUFFIXES):
            if not os.path.lexists(place):
                raise UserError(f"{label}: {path}: {os.strerror(errno.ENOENT)}{how_to_make(path)}")
            return self.file(place)
        if place.exists():
            raise UserError(f"{label}: {path}: no {FORMATS} file, by its name")
        hint = f" (did you mean hf:{spec}?)" if bare else near(family, TASKS)
        raise UserError(
            f"{label}: {spec!r} is neither a {FORMATS} file, a folder or pattern of such files, a"
            " data set on the hub (hf:ORG/NAME:CONFIG:SPLIT), nor a task of"
            f" {', '.join(TASKS)}{hint}"
        )

    def file(self, path: Path) -> Part:
        if path.suffix == ".parquet":
            name = str(path)
            return TablePart(name, lambda: ParquetReader(name, self.cache), self.keys, self.label)
        opened = {".jsonl": JsonlFile, ".json": open_json, ".csv": open_csv}[path.suffix]
        return opened(path, self.keys, self.label)

    def files(self, spec: str, paths: Iterable[Path]) -> Part:
        parts = [self.file(path) for path in paths]
        return parts[0] if len(parts) == 1 else Source(parts, spec)

    def pattern(self, spec: str, pattern: Path) -> Part:
        found = sorted(filter(os.path.isfile, glob.glob(str(pattern), recursive=True)))
        if not found:
            raise UserError(f"{self.label}: {spec}: no file matches")
        for path in found:
            if not path.endswith(SUFFIXES):
                raise UserError(f"{self.label}: {spec} matches {path}, which is no {FORMATS} file")
        return self.files(spec, map(Path, found))

    def folder(self, spec: str, folder: Path, options: str) -> Part:
        place = f"{self.label}: {spec}"
        given = parse_options(options, place)
        for key in given.keys() - {"split"}:
            hint = near(key, ["split"])
            raise UserError(f"{place}: no option {key!r}{hint}; a folder has split")
        asked = str(given["split"]) if given else None
        saved = dataset_splits(str(folder), self.label)
        files = _files_by_split(folder, place) if saved is None else {}
        splits = list(files) if saved is None else saved
        whole = asked is None and splits in ([], [""])
        chosen = "" if whole else choose(splits, asked, self.split, place, ":split=NAME")
        if saved is None:
            return self.files(spec, files[chosen])
        return open_dataset(spec, str(folder / chosen), self.keys, self.label)


def _files_by_split(folder: Path, place: str) -> dict[str, list[Path]]:
    """Finds the data files directly in a folder, by split, or all of them under "" where no name
    gives a split."""
    try:
        files = data_files(sorted(path for path in folder.iterdir() if path.is_file()))
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}") from error
    kinds = sorted({path.suffix for path in files})
    by_split: dict[str, list[Path]] = {}
    for path in files:
        match = SPLIT_FILE.fullmatch(path.stem)
        by_split.setdefault(match[1] if match else "", []).append(path)
    wrong = ""
    if not files:
        wrong = f"no {FORMATS} file, nor what datasets.Dataset.save_to_disk writes"
    elif len(kinds) > 1:
        wrong = f"both {kinds[0]} and {kinds[1]} files; name one kind, as in {folder}/*{kinds[1]}"
    elif "" in by_split and len(by_split) > 1:
        others = ", ".join(path.name for path in by_split.pop("")[:3])
        wrong = (
            f"files of the splits {', '.join(by_split)} and others ({others}); name those you want,"
            f" as in {folder}/{next(iter(by_split))}*"
        )
    if wrong:
        raise UserError(f"{place}: the folder holds {wrong}")
    return by_split


def _check_known(source: Source, name: str, key: str, label: str) -> None:
    """Refuses the name of a field that no file knows, which would leave all rows without."""
    files = [part for part in source.parts if not part.procedural]
    there = list(dict.fromkeys(name for part in files for name in part.columns))
    if files and name not in there:
        raise UserError(
            f"{label}: {' + '.join(part.name for part in files)}: no `{name}` among "
            f"{listed(there)}{near(name, there)} ({key})"
        )
