"""Data sets on a hub: which files of a repository are a split of one of its configurations.

The block of YAML at the top of its README.md says so (`configs`, as the `datasets` package reads
it); without one the paths do, as in `main/train-00000-of-00001.parquet`, `data/test.jsonl` or
`main/train/0000.parquet`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeVar

import yaml

from jaxrl.data.example import Split
from jaxrl.errors import UserError, about, near
from jaxrl.formats import hub
from jaxrl.formats.hub import HubName

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
FORMATS = ".jsonl, .parquet, .json or .csv"
NO_DATA = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json")
"""Files beside data that are something else."""
SPLITS: Mapping[Split, tuple[str, ...]] = {
    "train": ("train",),
    "eval": ("eval", "validation", "valid", "val", "dev", "test"),
}
"""Names of the split that each use takes where none is asked for, the first that is there."""
SPLIT_FILE = re.compile(rf"({'|'.join(name for s in SPLITS.values() for name in s)})([-_.].*)?")
"""Stem of a file that holds a split, such as `test` and `train-00000-of-00002`."""
CONVERTED = "refs/convert/parquet"
"""Branch that has the hub's own conversion of a data set."""
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
_WILD = re.compile(r"(\*\*/|\*\*|\*|\?)")
_NUMBER = re.compile(r"\d{4,5}")

P = TypeVar("P", bound=PurePath)
Layout = dict[str, dict[str, list[str]]]
"""Configuration -> split -> files."""


def fetch(name: HubName, split: Split, label: str) -> list[Path]:
    """Returns the files of a split, in the hub's cache.

    Args:
        split: the use, which chooses the split where the name does not.

    Raises:
        UserError: they cannot be fetched, or there is no such configuration or split.
    """
    with about(label):
        name = hub.pin(name)
        files = find(name, split)
        place = hub.snapshot(name, hub.CARD)
        hub.complete(name, place, files)
    return [place / file for file in files]


def is_here(name: HubName, split: Split) -> bool:
    """Returns whether the files of a split are in the hub's cache. Raises as `find`."""
    name = hub.pin(name)
    return hub.is_here(name, find(name, split))


def find(name: HubName, split: Split) -> list[str]:
    """Returns the paths in the repository of a pinned name of the files of a split."""
    there = list(hub.files(name))
    config, asked = (*name.rest.split(":")[1:], "", "")[:2]
    layout = _described(there, _front_matter(name)) or _inferred(there)
    if not layout:
        raise UserError(f"{name.asked}: the repository has no {FORMATS} files{_try(name)}")
    splits = layout[_config(name, layout, config)]
    chosen = choose(list(splits), asked or None, split, str(name.asked), "hf:ORG/NAME:CONFIG:SPLIT")
    files = sorted(splits[chosen])
    other = [file for file in files if not file.endswith(SUFFIXES)]
    if other or not files:
        what = f"has {other[0]}, which is no {FORMATS} file" if other else "has no file"
        raise UserError(f"{name.asked}: the split {chosen} {what}{_try(name)}")
    return files


def choose(splits: Sequence[str], asked: str | None, split: Split, place: str, how: str) -> str:
    """Returns the split that is asked for, or else the one named like the use."""
    if asked is None:
        for name in SPLITS[split]:
            if name in splits:
                return name
        raise UserError(
            f"{place}: no split {' or '.join(SPLITS[split])} among {', '.join(splits)}; choose one "
            f"with {how}"
        )
    if asked not in splits:
        there = ", ".join(name for name in splits if name) or "none"
        raise UserError(f"{place}: no split {asked!r}{near(asked, splits)}; there is {there}")
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


def _front_matter(name: HubName) -> list[object]:
    """Returns `configs` of the README, [] where there is none that can be read."""
    readme = hub.snapshot(name, hub.CARD) / hub.README
    if not readme.is_file():
        return []
    parts = readme.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip("\ufeff\n "):
        return []
    try:
        described = yaml.safe_load(parts[1])
    except Exception:  # the library raises anything at explicit tags and dates that are none
        return []
    configs = described.get("configs") if isinstance(described, dict) else None
    return configs if isinstance(configs, list) else []


def _described(there: Sequence[str], configs: Sequence[object]) -> Layout:
    layout: Layout = {}
    for config in configs:
        if not isinstance(config, dict):
            continue
        folder = _word(config.get("data_dir") or "").strip("/")
        inside = [file for file in there if not folder or file.startswith(f"{folder}/")]
        splits = {
            split: [file for file in inside if any(_fits(file, folder, one) for one in patterns)]
            for split, patterns in _patterns(config.get("data_files"))
        }
        if not splits:  # a folder alone
            found = _inferred([file.removeprefix(f"{folder}/") for file in inside])
            each = next(iter(found.values()), {})
            splits = {
                split: [f"{folder}/{file}" for file in files] for split, files in each.items()
            }
        name = _word(config.get("config_name") or "default")
        layout[name] = splits
        if config.get("default"):
            layout.setdefault("default", layout[name])
    return {name: splits for name, splits in layout.items() if splits}


def _word(value: object) -> str:
    """Returns a plain value of a README as text. Text of a list could be of any length: aliases
    repeat."""
    return str(value) if isinstance(value, str | int | float) else ""


def _patterns(data_files: object) -> Iterator[tuple[str, list[str]]]:
    """Yields split -> patterns of its files, in any of the forms of `data_files`."""
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    if isinstance(data_files, str):
        data_files = [data_files]
    if not isinstance(data_files, list):
        return
    plain = [one for one in data_files if isinstance(one, str)]
    if plain:
        yield "train", plain
    for one in data_files:
        if isinstance(one, dict):
            path = one.get("path")
            paths = path if isinstance(path, list) else [path]
            yield _word(one.get("split", "train")), [_word(each) for each in paths]


def _fits(file: str, folder: str, pattern: str) -> bool:
    """Returns whether a path fits a pattern, in which only `**` stands for several folders."""
    pattern = f"{folder}/{pattern}" if folder else pattern.removeprefix("./")
    reached = {0}  # lengths of the beginnings of the path that fit the pattern so far
    for part in filter(None, _WILD.split(pattern)):
        reached = {end for start in reached for end in _ends(part, file, start)}
    return len(file) in reached


def _ends(part: str, file: str, start: int) -> Iterable[int]:
    """Returns where a part of a pattern may end in a path, from a place in it on."""
    if part == "**":
        return range(start, len(file) + 1)
    if part == "**/":
        return [start, *(i + 1 for i in range(start, len(file)) if file[i] == "/")]
    slash = file.find("/", start)
    stop = len(file) if slash < 0 else slash
    if part == "*":
        return range(start, stop + 1)
    if part == "?":
        return [start + 1] if start < stop else []
    return [start + len(part)] if file.startswith(part, start) else []


def _inferred(there: Sequence[str]) -> Layout:
    """Returns what the paths say. Files that name no split are `train`, if none names one."""
    layout: Layout = {}
    unnamed: Layout = {}
    paths = data_files([PurePosixPath(file) for file in there])
    for suffix in SUFFIXES:
        for path in (path for path in paths if path.suffix == suffix):
            folders = list(path.parts[:-1])
            match = _SHARD.fullmatch(path.stem) or SPLIT_FILE.fullmatch(path.stem)
            split = None if match is None else match[1]
            if split is None and folders and _NUMBER.fullmatch(path.stem):
                split = folders.pop()
            config = next((name for name in reversed(folders) if name != "data"), "default")
            files = (unnamed if split is None else layout).setdefault(config, {})
            files.setdefault(split or "train", []).append(str(path))
        if layout or unnamed:
            return layout or unnamed
    return {}


def _try(name: HubName) -> str:
    if name.revision == CONVERTED:
        return ""
    return f"; the hub's own conversion may be at hf:{name.repo}@{CONVERTED}{name.rest}"
