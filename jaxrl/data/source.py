"""Where prompts come from: `data.train` and `data.eval` as one indexable collection."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

from jaxrl.data.example import Example, Message, Part, Split
from jaxrl.data.jsonl import KEYS, JsonlFile, Keys
from jaxrl.data.tasks import TASKS, open_task
from jaxrl.errors import UserError, near

__all__ = ["Example", "Keys", "Message", "Part", "Source", "Split", "open_source"]


class Source:
    """Parts one after the other; the prompt stream mixes them by shuffling over all rows."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = tuple(parts)
        self._ends = list(accumulate(len(part) for part in self.parts))

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)

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


def open_source(
    spec: str | Sequence[str], seed: int = 0, split: Split = "train", keys: Keys = KEYS
) -> Source:
    """Open what `data.train` or `data.eval` names.

    Args:
        spec: a `*.jsonl` path, a procedural task such as `arithmetic:digits=2,terms=3` or
            `reasoning_gym/basic_arithmetic:max_terms=3,size=5000`, or a list of these.
        seed: of the procedural tasks.
        split: procedural tasks have no prompt in both splits, whatever their seeds and options.
        keys: field names of JSONL rows.

    Raises:
        UserError: for an unknown name, a missing file or a bad row, naming the file and line.
    """
    specs = [spec] if isinstance(spec, str) else list(spec)
    if not specs:
        raise UserError(f"data.{split}: nothing is named; give a .jsonl file or a task")
    return Source([_open_part(one, seed, split, keys) for one in specs])


def _open_part(spec: str, seed: int, split: Split, keys: Keys) -> Part:
    label = f"data.{split}"
    if spec.endswith(".jsonl"):
        return JsonlFile(spec, keys, label)
    family = spec.split(":")[0].split("/")[0]
    if family in TASKS:
        return open_task(spec, seed, split, label)
    raise UserError(
        f"{label}: {spec!r} is neither a .jsonl file nor a task of {', '.join(TASKS)}"
        f"{near(family, TASKS)}"
    )
