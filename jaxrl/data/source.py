"""Where prompts come from: `data.train` and `data.eval` as one indexable collection."""

from __future__ import annotations

import bisect
import glob
import hashlib
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from jaxrl.data import hub_sets
from jaxrl.data.example import Example, Message, Part, Split
from jaxrl.data.hub_sets import SPLIT_FILE, SUFFIXES, choose
from jaxrl.data.jsonl import JsonlFile
from jaxrl.data.rows import KEYS, Keys, listed
from jaxrl.data.tables import GroupCache, dataset_splits, open_dataset, open_parquet
from jaxrl.data.tasks import TASKS, open_task, parse_options
from jaxrl.errors import UserError, near
from jaxrl.formats.hub_names import data_name

__all__ = ["Example", "Keys", "Message", "Part", "Source", "Split", "open_source"]


class Source:
    """Parts one after the other; the prompt stream mixes them. Files that have one name together
    are a source that is itself a `Part` of another."""

    procedural = False

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
        """The part that holds row `index`, and the row's number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: row {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)

    def where(self, index: int) -> str:
        """The file of row `index`, and its place there, for error messages."""
        part, row = self.locate(index)
        return part.where(row)

    def digest(self) -> str:
        """Hex hash of what decides the rows."""
        return hashlib.sha256(" ".join(p.digest() for p in self.parts).encode()).hexdigest()


def open_source(
    spec: str | Sequence[str],
    seed: int = 0,
    split: Split = "train",
    keys: Keys = KEYS,
    label: str | None = None,
) -> Source:
    """Open what `data.train` or `data.eval` names; each of the list becomes one part.

    Args:
        spec: one or a list of: a `.jsonl` or `.parquet` file; a pattern such as
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

    Raises:
        UserError: for an unknown name, a missing file or a bad row, naming the file and line.
    """
    label = f"data.{split}" if label is None else label
    specs = [spec] if isinstance(spec, str) else list(spec)
    if not specs:
        raise UserError(f"{label}: nothing is named; give a .jsonl file or a task")
    cache = GroupCache()
    source = Source([_open_part(one, seed, split, keys, label, cache) for one in specs])
    if split == "eval" and keys.answer != KEYS.answer:
        _check_known(source, keys.answer, "data.answer_key", label)
    if label == "data.train" and keys.tools is not None:
        _check_known(source, keys.tools, "data.tools_key", label)
    return source


def _open_part(
    spec: str, seed: int, split: Split, keys: Keys, label: str, cache: GroupCache
) -> Part:
    on_hub = data_name(spec)
    if on_hub is not None:
        paths = hub_sets.fetch(on_hub, split, label)
        return Source([_open_file(path, keys, label, cache) for path in paths], str(on_hub.asked))
    path, options = _split_options(spec)
    family = path.split(":")[0].split("/")[0]
    if spec.startswith("hf:"):
        raise UserError(
            f"{label}: {spec!r} is not the name of a data set: write hf:ORG/NAME:CONFIG:SPLIT, or"
            " hf:ORG/NAME@REVISION:CONFIG:SPLIT"
        )
    if family in TASKS and not path.endswith(SUFFIXES):
        return open_task(spec, seed, split, label)
    place = Path(path).expanduser()
    if place.is_dir():
        return _open_folder(spec, place, options, split, keys, label, cache)
    if options:
        raise UserError(
            f"{label}: {path} takes no options (:{options}); a folder takes split=NAME, a task its "
            "own"
        )
    if any(letter in path for letter in "*?[") and not place.exists():
        return _open_pattern(spec, place, keys, label, cache)
    if path.endswith(SUFFIXES):
        return _open_file(place, keys, label, cache)
    if place.exists():
        raise UserError(f"{label}: {path}: neither a .jsonl nor a .parquet file, by its name")
    raise UserError(
        f"{label}: {spec!r} is neither a .jsonl or .parquet file, a folder or pattern of such "
        f"files, a data set on the hub (hf:ORG/NAME:CONFIG:SPLIT), nor a task of"
        f" {', '.join(TASKS)}{near(family, TASKS)}"
    )


def _split_options(spec: str) -> tuple[str, str]:
    """`PATH:key=value,...` taken apart, unless there is a file of the whole name."""
    path, colon, options = spec.rpartition(":")
    if not colon or Path(spec).expanduser().exists():
        return spec, ""
    return path, options


def _open_file(path: Path, keys: Keys, label: str, cache: GroupCache) -> Part:
    if path.suffix == ".parquet":
        return open_parquet(str(path), keys, label, cache)
    return JsonlFile(path, keys, label)


def _open_pattern(spec: str, pattern: Path, keys: Keys, label: str, cache: GroupCache) -> Part:
    found = sorted(path for path in glob.glob(str(pattern), recursive=True) if os.path.isfile(path))
    if not found:
        raise UserError(f"{label}: {spec}: no file matches")
    for path in found:
        if not path.endswith(SUFFIXES):
            raise UserError(f"{label}: {spec} matches {path}, neither a .jsonl nor a .parquet file")
    return _join(spec, [_open_file(Path(path), keys, label, cache) for path in found])


def _open_folder(
    spec: str,
    folder: Path,
    options: str,
    split: Split,
    keys: Keys,
    label: str,
    cache: GroupCache,
) -> Part:
    place = f"{label}: {spec}"
    asked = _asked_split(options, place)
    saved = dataset_splits(str(folder), label)
    if saved is not None:
        chosen = choose(saved, asked, split, place, ":split=NAME") if saved or asked else ""
        return open_dataset(spec, str(folder / chosen), keys, label)
    files = _files_by_split(folder, place)
    chosen = (
        choose(list(files), asked, split, place, ":split=NAME")
        if list(files) != [""] or asked
        else ""
    )
    return _join(spec, [_open_file(path, keys, label, cache) for path in files[chosen]])


def _files_by_split(folder: Path, place: str) -> dict[str, list[Path]]:
    """The data files right in a folder by split, or all of them as "" where no name says one."""
    try:
        there = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}") from error
    files = [path for path in there if path.suffix in SUFFIXES and not path.name.startswith(".")]
    if not files:
        raise UserError(
            f"{place}: the folder holds no .jsonl or .parquet file, nor what "
            "datasets.Dataset.save_to_disk writes"
        )
    if len({path.suffix for path in files}) > 1:
        raise UserError(
            f"{place}: the folder holds both .jsonl and .parquet files; name one kind, as in "
            f"{folder}/*.parquet"
        )
    by_split: dict[str, list[Path]] = {}
    for path in files:
        match = SPLIT_FILE.fullmatch(path.stem)
        by_split.setdefault(match[1] if match else "", []).append(path)
    if "" in by_split and len(by_split) > 1:
        others = ", ".join(path.name for path in by_split.pop("")[:3])
        raise UserError(
            f"{place}: the folder holds files of the splits {', '.join(by_split)} and others "
            f"({others}); name those you want, as in {folder}/{next(iter(by_split))}*"
        )
    return by_split


def _asked_split(options: str, place: str) -> str | None:
    given = parse_options(options, place)
    for key in given:
        if key != "split":
            raise UserError(f"{place}: no option {key!r}{near(key, ['split'])}; a folder has split")
    return str(given["split"]) if given else None


def _join(name: str, parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else Source(parts, name)


def _check_known(source: Source, name: str, key: str, label: str) -> None:
    """Refuses the name of a field that no file knows, which would leave all rows without."""
    files = [part for part in source.parts if not part.procedural]
    there = list(dict.fromkeys(name for part in files for name in part.columns))
    if files and name not in there:
        raise UserError(
            f"{label}: {' + '.join(part.name for part in files)}: no `{name}` among "
            f"{listed(there)}{near(name, there)} ({key})"
        )
