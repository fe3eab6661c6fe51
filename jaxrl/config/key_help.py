"""What `--help` says of config keys: the common ones, those of a word, or all."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from functools import partial

from jaxrl.config import keys as config_keys
from jaxrl.config.keys import Group
from jaxrl.config.schema import Config
from jaxrl.errors import UserError, closest

COMMON = {
    "algorithm": "gkd, sft, grpo, gspo, dapo, ... (--help algorithm)",
    "student.model": "folder, hub name or GGUF file to start from",
    "teacher.model": "the same of the teacher",
    "reward.functions": "as in [math] or [rewards.py:f]",
    "data.train": "JSONL, JSON, CSV, parquet, hf:ORG/NAME",
    "data.eval": "held-out data, likewise",
    "steps": "batches to train on",
    "batch_size": "prompts per batch",
    "group_size": "completions per prompt",
    "max_prompt_tokens": "longest prompt",
    "max_new_tokens": "longest completion",
    "optimizer.learning_rate": "the peak",
    "sampling.temperature": "0 is greedy",
    "student.lora.rank": "of adapters; null: all weights",
    "eval.samples": "completions of each held-out prompt",
    "run_dir": "null: runs/NAME",
}
"""Keys that a first run or evaluation needs, with a few words for each."""
NARROWEST, WIDEST = 60, 120
"""Columns of a help text, whatever the terminal has."""
SAME_WORD = 8
"""Keys at most that are shown for a last word that they share."""


def common(prefixes: Sequence[str] | None = None) -> str:
    """Returns a line for each of `COMMON`: its default, and a few words about it.

    Args:
        prefixes: sections and keys that the command reads; None: all.
    """
    known = {key.path: key for group in taken(prefixes) for key in group.keys}
    settings = {}
    for path, words in COMMON.items():
        if path in known:
            key = known[path]
            settings[path if key.required else f"{path}={key.default_text}"] = words
    left = max(map(len, settings))
    lines = (f"  {setting:{left}}  {words}" for setting, words in settings.items())
    return "\n".join(["common keys, with their defaults:", *lines])


def describe_keys(word: str, width: int, prefixes: Sequence[str] | None = None) -> str:
    """Returns the keys that a word names, each with type, range, default and meaning: a section, a
    key, or the last word of keys.

    Raises:
        UserError: no key has that name; the nearest is named.
    """
    groups = list(taken(prefixes))
    if word == "all":
        return _text(groups, width)
    keys = [key.path for group in groups for key in group.keys]
    inside = [g for g in groups if g.path and (g.path == word or g.path.startswith(f"{word}."))]
    if inside:
        return _text(inside, width)
    named = [path for path in keys if path == word]
    named = named or [path for path in keys if path.rpartition(".")[2] == word][:SAME_WORD]
    if named:
        chosen = (g._replace(keys=tuple(k for k in g.keys if k.path in named)) for g in groups)
        return _text([group for group in chosen if group.keys], width, headings=False)
    sections = list(dict.fromkeys(g.path.partition(".")[0] for g in groups if g.path))
    section = closest(word, sections)
    near = config_keys.near_key(word, keys)
    hint = f" (did you mean {section}?)" if section else near.removesuffix(config_keys.ALL)
    raise UserError(
        f"--help {word}: no such key or section{hint}; sections are {', '.join(sections)}, and"
        " --help all lists every key"
    )


def taken(prefixes: Sequence[str] | None) -> Iterator[Group]:
    """Yields the groups with the keys that a command reads, those without any left out."""
    for group in config_keys.groups(Config):
        keys = tuple(
            key for key in group.keys if prefixes is None or config_keys.under(key.path, prefixes)
        )
        if keys:
            yield group._replace(keys=keys)


def _text(groups: Sequence[Group], width: int, headings: bool = True) -> str:
    width, indent = max(NARROWEST, min(width, WIDEST)), " " * 6
    wrap = partial(textwrap.wrap, width=width, subsequent_indent=indent, break_on_hyphens=False)
    lines = ["config keys (in the file, or as key=value):"]
    for group in groups:
        if headings and group.path:
            lines += ["", *wrap(f"{group.path}: {group.doc}", initial_indent="  ")]
        allowed = config_keys.allowed(group)
        for key in group.keys:
            default = "" if key.required else "default "
            lines.append(f"  {key.path}  {allowed[key.path]}  [{default}{key.default_text}]")
            lines += wrap(key.doc, initial_indent=indent)
    return "\n".join(lines)
