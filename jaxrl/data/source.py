"""Where prompts come from: `data.train` and `data.eval` as one indexable collection, and which of
the files in a folder, or in a repository on a hub, are a split."""

from __future__ import annotations

import bisect
import errno
import glob
import hashlib
import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePath, PurePosixPath
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from jaxrl.config.builtin_configs import how_to_make
from jaxrl.data import tables
from jaxrl.data.endless import EndlessRows, RowsInOrder, call_rows, file_rows, read_ahead
from jaxrl.data.example import Example, JsonObject, Part, Split
from jaxrl.data.jsonl import JsonlFile, RowList, open_csv, open_json
from jaxrl.data.rows import KEYS, OPTIONAL, Keys, check_column_names, kind, listed
from jaxrl.data.tasks import TASKS, open_task, parse_options
from jaxrl.errors import UserError, about, near, user_path
from jaxrl.formats import hub
from jaxrl.formats.hub import HubName, data_name
from jaxrl.process.plugin import PYTHON

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
FORMATS = ".jsonl, .parquet, .json or .csv"
NO_DATA = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json")
"""Files beside data that are something else."""
SPLITS: Mapping[Split, tuple[str, ...]] = {
    "train": ("train",),
    "eval": ("eval", "validation", "valid", "val", "dev", "test"),
}
"""Names of the split that each use takes where none is asked for, the first that is there."""
_SPELT = {"training": "train", "evaluation": "eval", "testing": "test"}
"""Words in file names that mean a split of another name."""
_WORD = (
    rf"(?<![^-._ 0-9/])(?:{'|'.join((*_SPELT, *(name for s in SPLITS.values() for name in s)))})"
    r"(?![^-._ 0-9/])"
)
"""A word in the name of a file or a folder that says which split is in it, as `datasets` has it."""
_OF_SHARDS = r"-\d{5}-of-\d{5}[^/]*"
SPLIT_RULES = (
    (rf"(.*/)?(?P<shard>[^/]*{_WORD}[^/]*?){_OF_SHARDS}", "train_sft-00000-of-00002", "train_sft"),
    (r".+/(?!data/)(?P<folder>[^/]+)/\d{4,5}", "main/train_sft/0000", "train_sft"),
    (rf".*(?P<words>{_WORD}).*", "sums-testing/part-00000-of-00001", "test"),
    (rf"(.*/)?(?P<shard>[^/]+?){_OF_SHARDS}", "data/part-00000-of-00002", "part"),
)
"""Patterns of paths without suffix, of which the first that fits tells what names the split, and an
example of each: what stands before the number of a shard; the folder of a numbered file of the
hub's own conversion; or words in the path, as `datasets` reads them, those of several splits
together."""
CONVERTED = "refs/convert/parquet"
"""Branch that has the hub's own conversion of a data set."""
_WILD = re.compile(r"[*?\[]")

P = TypeVar("P", bound=PurePath)
Layout = dict[str, dict[str, list[str]]]
"""Configuration of a data set -> split -> files."""
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
        number = self.part_number(index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)

    def part_number(self, index: int) -> int:
        """Finds the place in `parts` of the part that holds row `index`."""
        if not 0 <= index < self._ends[-1]:
            raise IndexError(f"{self.name}: row {index} of {len(self)}")
        return bisect.bisect_right(self._ends, index)

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
    if label == "data.train":
        for of, key in OPTIONAL.items():
            if (name := getattr(keys, of)) not in (getattr(KEYS, of), None):
                _check_known(source, name, key, label)
    return source


def source_of(
    rows: Rows, keys: Keys = KEYS, label: str = "data.train", name: str | None = None
) -> Source:
    """Makes a source of the rows of a Python program, as `listed_rows` takes them: they mean what
    they would in a file. Error messages name `label` and `name`, or else the type of the rows."""
    name, rows = name or type(rows).__name__, listed_rows(rows, label, name)
    if isinstance(rows, RowsInOrder):
        return Source([EndlessRows(rows, keys, label)], name)
    if isinstance(rows, list):
        return Source([RowList(name, rows, keys, label)])
    return Source([tables.TablePart(name, lambda: tables.TableReader(rows), keys, label)])


def listed_rows(rows: Rows, label: str, name: str | None = None) -> Rows:
    """Returns the rows of a Python program in a form that can be read again: a table as it is, all
    others as a list of what should be mappings of field names to values, or, of more than can be
    listed, as `RowsInOrder`.

    Args:
        rows: a `datasets.Dataset` (its transform, if it has one, is applied once), a
            `pyarrow.Table`, a `DataFrame` of pandas or polars, any sequence or iterable, such as a
            list or a generator, or a function that returns one of these (`data.endless`).
        name: of the rows, for messages.

    Raises:
        UserError: these are no rows.
    """
    hint, named = "", f"{label}: {name}" if name else label
    if isinstance(rows, RowsInOrder):
        return rows
    if inspect.isroutine(rows) or isinstance(rows, partial):
        return listed_rows(call_rows(rows, named), label, name)
    if isinstance(rows, Mapping):
        hint = f": take one of {listed(map(str, rows))}"
        if all(isinstance(one, list) for one in rows.values()):
            hint = ": make rows of its columns, as datasets.Dataset.from_dict does"
    elif isinstance(rows, type):
        hint = ": give an instance of the class"
    elif hasattr(rows, "to_dicts"):  # a frame of polars
        return rows.to_dicts()
    elif hasattr(rows, "column_names") and hasattr(rows, "__len__"):
        form = getattr(rows, "format", None) or {"type": None, "output_all_columns": True}
        if form["type"] == "custom":
            return list(rows)
        return rows if form["output_all_columns"] else rows.select_columns(form["columns"])
    elif hasattr(rows, "columns") and hasattr(rows, "iloc"):
        check_column_names(rows.columns, f"{label}: {type(rows).__name__}")
        return rows.to_dict("records")
    elif isinstance(rows, str | bytes):
        pass
    elif hasattr(rows, "__len__") and hasattr(rows, "__iter__"):
        return list(rows)
    elif hasattr(rows, "__iter__"):
        return read_ahead(rows, named)
    elif hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        return [rows[index] for index in range(len(rows))]
    raise UserError(
        f"{label}: a list or another iterable of rows, a datasets.Dataset, a pyarrow.Table or a"
        f" pandas DataFrame is needed, this is {kind(rows)}{hint}"
    )


def is_code(spec: str) -> bool:
    """Returns whether a source is `path/to/file.py:NAME`."""
    place, _, name = spec.rpartition(":")
    return place.endswith(".py") and name.isidentifier()


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
    cache: tables.GroupCache = field(default_factory=tables.GroupCache)

    def part(self, spec: str) -> Part:
        label, on_hub = self.label, data_name(spec)
        if is_code(spec):
            with about(label):
                rows = file_rows(spec)
            return self.rows(spec, rows)
        if spec.startswith(PYTHON):
            if spec in self.given:
                return self.rows(spec, self.given[spec])
            raise UserError(
                f"{label}: {spec} are rows of a Python program: give them from there, as"
                f" {spec.removeprefix(PYTHON).partition('.')[0]}=rows, or name a file with"
                f" {label}=FILE"
            )
        if on_hub is not None:
            with about(label):
                name = hub.pin(on_hub)
                files = split_files(name, self.split)
                place = hub.snapshot(name, hub.CARD)
                hub.complete(name, place, files)
            return Source([self.file(place / file) for file in files], str(on_hub.asked))
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

    def rows(self, spec: str, rows: Rows) -> Part:
        source = source_of(rows, self.keys, self.label, spec)
        first = source.parts[0]
        return first if isinstance(first, EndlessRows) else source

    def file(self, path: Path) -> Part:
        name = str(path)
        if path.exists() and not path.is_file():
            raise UserError(
                f"{self.label}: {name}: this is a pipe or a device; rows are read again during the"
                " run, so write them into a file"
            )
        if name.endswith(".parquet"):
            return tables.TablePart(
                name, lambda: tables.ParquetReader(name, self.cache), self.keys, self.label
            )
        opened = {".jsonl": JsonlFile, ".json": open_json, ".csv": open_csv}
        of_kind = next(opened[suffix] for suffix in opened if name.endswith(suffix))
        return of_kind(path, self.keys, self.label)

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
        for key in sorted(given.keys() - {"split"}):
            hint = near(key, ["split"])
            raise UserError(f"{place}: no option {key!r}{hint}; a folder has split")
        asked = str(given["split"]) if given else None
        saved = tables.dataset_splits(str(folder), self.label)
        files = _files_by_split(folder, place) if saved is None else {name: [] for name in saved}
        whole = asked is None and len(files) < 2 and not any(map(_words, files))
        first = next(iter(files), "")
        chosen = first if whole else choose(files, asked, self.split, place, ":split=NAME")
        if saved is None:
            return self.files(spec, files[chosen])
        return tables.open_dataset(spec, str(folder / chosen), self.keys, self.label)


def _files_by_split(folder: Path, place: str) -> dict[str, list[Path]]:
    """Finds the data files directly in a folder, by split; "" has those whose name says none."""
    try:
        files = data_files(sorted(path for path in folder.iterdir() if path.is_file()))
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}") from error
    kinds = sorted({path.suffix for path in files})
    wrong = ""
    if not files:
        wrong = f"no {FORMATS} file, nor what datasets.Dataset.save_to_disk writes"
    elif len(kinds) > 1:
        wrong = f"both {kinds[0]} and {kinds[1]} files; name one kind, as in {folder}/*{kinds[1]}"
    if wrong:
        raise UserError(f"{place}: the folder holds {wrong}")
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(split_in_path(PurePath(path.name)), []).append(path)
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


def is_split_here(name: HubName, split: Split) -> bool:
    """Returns whether the files of a split are in the hub's cache. Raises as `split_files`."""
    name = hub.pin(name)
    return hub.is_here(name, split_files(name, split))


def split_files(name: HubName, split: Split) -> list[str]:
    """Finds the files of a split in the repository of a pinned name: their paths. The use (`split`)
    chooses where the name does not.

    The block of YAML at the top of the repository's README.md says which they are (`configs`, as
    the `datasets` package reads it); without one the paths do, as in
    `main/train-00000-of-00001.parquet`, `data/test.jsonl` or `main/train/0000.parquet`.

    Raises:
        UserError: there is no such configuration or split.
    """
    there, configs = list(hub.files(name)), _configs(name)
    if not hub.has_list(name):  # what the README names is there too, though not in the cache
        named = {path for one in configs for paths in _patterns(one).values() for path in paths}
        there += sorted(path for path in named - {*there} if not _WILD.search(path))
    with hub.about_list(name):
        return _split_files(name, split, _described(there, configs) or _layout_of_paths(there))


def _split_files(name: HubName, split: Split, layout: Layout) -> list[str]:
    config, asked = (*name.rest.split(":")[1:], "", "")[:2]
    if not layout:
        raise UserError(f"{name.asked}: the repository has no {FORMATS} files{_try(name)}")
    splits = layout[_config(name, layout, config)]
    chosen = choose(splits, asked or None, split, str(name.asked), "hf:ORG/NAME:CONFIG:SPLIT")
    files = sorted(splits[chosen])
    other = [file for file in files if not file.endswith(SUFFIXES)]
    if other or not files:
        what = f"has {other[0]}, which is no {FORMATS} file" if other else "has no file"
        raise UserError(f"{name.asked}: the split {chosen} {what}{_try(name)}")
    return files


def choose(
    splits: Mapping[str, Sequence[object]], asked: str | None, split: Split, place: str, how: str
) -> str:
    """Returns the split that is asked for, or else the one named like the use.

    Args:
        splits: to files; "" has those that cannot be placed, so that a split must be asked for.
    """
    names = ", ".join(name for name in splits if name)
    if asked is None and "" in splits:
        others = ", ".join(PurePath(str(file)).name for file in splits[""][:3])
        raise UserError(
            f"{place}: files of the splits {names} and others ({others}); choose one with {how}"
        )
    if asked is None:
        for name in SPLITS[split]:
            if name in splits:
                return name
        raise UserError(
            f"{place}: no split {' or '.join(SPLITS[split])} among {names}; choose one with {how}"
        )
    if asked not in splits:
        hint = near(asked, splits)
        raise UserError(f"{place}: no split {asked!r}{hint}; there is {names or 'none'}")
    return asked


def data_files(there: Sequence[P]) -> list[P]:
    """Returns those of the paths that are data; `.json` and `.csv` only where there is nothing
    else, for beside other data they are lists of something."""
    files = [path for path in there if path.suffix in SUFFIXES and not path.name.startswith(".")]
    files = [path for path in files if path.name not in NO_DATA]
    return [path for path in files if path.suffix in SUFFIXES[:2]] or files


def _config(name: HubName, layout: Layout, asked: str) -> str:
    if asked in layout:
        return asked
    names = ", ".join(layout)
    if asked:
        is_split = any(asked in splits for splits in layout.values())
        hint = f"; a split alone is hf:{name.repo}::{asked}" if is_split else near(asked, layout)
        raise UserError(f"{name.asked}: no configuration {asked!r}; there is {names}{hint}")
    if "default" in layout or len(layout) == 1:
        return "default" if "default" in layout else next(iter(layout))
    raise UserError(
        f"{name.asked}: choose one of the configurations {names}, as in"
        f" hf:{name.repo}:{next(iter(layout))}"
    )


def _configs(name: HubName) -> list[JsonObject]:
    """Reads `configs` of the README, [] where there is none that can be read."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    card, described = hub.snapshot(name, hub.CARD) / hub.README, None
    with suppress(Exception):  # YAML raises anything at explicit tags and dates that are none
        block = REGEX_YAML_BLOCK.search(card.read_text(encoding="utf-8-sig", errors="replace"))
        described = yaml.safe_load(block[2]) if block else None
    configs = described.get("configs") if isinstance(described, dict) else None
    return [one for one in configs if isinstance(one, dict)] if isinstance(configs, list) else []


def _described(there: Sequence[str], configs: Sequence[JsonObject]) -> Layout:
    layout: Layout = {}
    for config in configs:
        splits = {
            split: [file for file in there if any(_fits(file, one) for one in patterns)]
            for split, patterns in _patterns(config).items()
        }
        if not splits:  # a folder alone
            folder = _word(config.get("data_dir")).strip("/")
            inside = [file for file in there if not folder or file.startswith(f"{folder}/")]
            splits = _layout_of_paths(inside, folder).get("default", {})
        if splits:
            layout[_word(config.get("config_name")) or "default"] = splits
            if config.get("default"):
                layout.setdefault("default", splits)
    return layout


def _patterns(config: JsonObject) -> dict[str, list[str]]:
    """Returns split -> patterns of its files, in any of the forms of `data_files`."""
    folder, files = _word(config.get("data_dir")).strip("/"), config.get("data_files")
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    files = files if isinstance(files, list) else [files]
    plain = [one for one in files if isinstance(one, str)]
    found: dict[str, list[str]] = {}
    for one in (*([{"path": plain}] if plain else []), *files):
        if isinstance(one, dict):
            paths = one["path"] if isinstance(one.get("path"), list) else [one.get("path")]
            words = [str(PurePosixPath(folder, _word(path))) for path in paths if _word(path)]
            found[_word(one.get("split", "train"))] = words
    return found


def _word(value: object) -> str:
    # Text of a list could be of any length: aliases repeat.
    return str(value) if isinstance(value, str | int | float) else ""


def _fits(file: str, pattern: str) -> bool:
    """Says whether a path fits a pattern, in which only `**` stands for several folders."""
    names, reached = file.split("/"), {0}  # so many folders fit the pattern so far
    for part in pattern.split("/"):
        if part == "**":
            reached = {*range(min(reached, default=len(names)), len(names))}
        else:
            reached = {n + 1 for n in reached if n < len(names) and fnmatchcase(names[n], part)}
    return len(names) in reached or (pattern.endswith("**") and bool(reached))


def _layout_of_paths(there: Sequence[str], folder: str | None = None) -> Layout:
    """Infers a layout from paths alone. Files of a configuration that name no split are `train`, if
    none names one; else they have the split "".

    Args:
        folder: holds all of the paths, which are then one configuration, `default`.
    """
    named: Layout = {}
    paths = data_files([PurePosixPath(file) for file in there])
    suffix = next((suffix for suffix in SUFFIXES for path in paths if path.suffix == suffix), None)
    for path in (path for path in paths if path.suffix == suffix):
        below = path.relative_to(folder or "")
        split = split_in_path(below)
        folders = [name for name in below.parts[:-1] if split not in (name, *_words(name))]
        config = next((name for name in reversed(folders) if name != "data"), "default")
        config = config if folder is None else "default"
        named.setdefault(config, {}).setdefault(split, []).append(str(path))
    unnamed = {name: {"train": splits[""]} for name, splits in named.items() if not any(splits)}
    return {name: splits for name, splits in named.items() if any(splits)} or unnamed


def split_in_path(path: PurePath) -> str:
    """Returns the split that a path names, by SPLIT_RULES; "" where it names none."""
    name = str(path.with_suffix(""))
    fits = (re.fullmatch(pattern, name, re.IGNORECASE) for pattern, *_ in SPLIT_RULES)
    match = next(filter(None, fits), None)
    if match is None or match.lastgroup == "words":
        return "+".join(sorted(_words(name)))
    found = match[str(match.lastgroup)]
    return _SPELT.get(found.lower(), found) if match.lastgroup == "shard" else found


def _words(name: str) -> set[str]:
    """Returns the splits that a name has words of."""
    found = (word.lower() for word in re.findall(_WORD, name, re.IGNORECASE))
    return {_SPELT.get(word, word) for word in found}


def _try(name: HubName) -> str:
    if name.revision == CONVERTED:
        return ""
    return f"; the hub's own conversion may be at hf:{name.repo}@{CONVERTED}{name.rest}"
