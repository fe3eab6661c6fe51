"""The answers of environments on disk, so that a run that was killed gets the same ones again.

A resumed run samples a batch again with the same bits, and so writes the same turns, as long as the
environments answer as they did: also those that draw random numbers, or look at the world. Each
batch has a file, with a line of JSON for each answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from jaxrl.checkpoint import store
from jaxrl.data.example import JsonObject, Split

FOLDER = "episodes"
_NAME = re.compile(r"(train|eval)-(\d+)\.jsonl")

Place = tuple[int, int, int, int]
"""Of an answer in the batches of a step: attempt, id of the prompt, sample, turn."""


class Journal:
    """The answers in the batches of one step."""

    def __init__(self, run_dir: Path, split: Split, step: int, notify: Callable[[str], None]):
        """Reads what an earlier process recorded, to which it adds."""
        self.path, self._notify = run_dir / FOLDER / f"{split}-{step}.jsonl", notify
        self.read: dict[Place, JsonObject] = {}
        """What it recorded; of two records of one place, the later."""
        self._waiting: list[str] = []
        self._writing = asyncio.Lock()
        self._forgets = self._refused = False
        for record in self._records():
            self.read[tuple(record.pop("place"))] = record

    async def add(self, place: Place, record: JsonObject) -> None:
        """Writes an answer; in the file when this returns. A disk that refuses it is reported, and
        stops no run."""
        if self._forgets and "failure" in record:
            return
        self._waiting.append(json.dumps({"place": place, **record}) + "\n")
        async with self._writing:  # what comes while another is written is written at once
            lines, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._write, "".join(lines))
            except OSError as error:
                if not self._refused:
                    self._notify(
                        f"{self.path} cannot be written: {error.strerror}; a run that is killed now"
                        " asks its environments again"
                    )
                self._refused = True

    def forget_failures(self) -> None:
        """Leaves none of the batch's failures, so that a run that ended because of them asks its
        environments again once it is resumed."""
        self._forgets = True
        kept = [record for record in self._records() if "failure" not in record]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        with suppress(OSError):
            store.put_file(self.path, lambda file: file.write_text(text))

    def _write(self, lines: str) -> None:
        self.path.parent.mkdir(exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(lines)

    def _records(self) -> list[JsonObject]:
        """Returns the whole lines of the file, if there is one; ends a line that a killed process
        did not end."""
        records = []
        with suppress(OSError):
            text = self.path.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                with suppress(ValueError):
                    records.append(json.loads(line))
            if text and not text.endswith("\n"):
                self._write("\n")
        return records


def forget(run_dir: Path) -> None:
    """Removes the files of batches that no resumed run samples again: those before the newest
    checkpoint."""
    newest = next(iter(store.folders(run_dir)), None)
    for path in (run_dir / FOLDER).glob("*.jsonl"):
        name = _NAME.fullmatch(path.name)
        if newest is not None and name and int(name[2]) < int(newest.name):
            with suppress(OSError):
                path.unlink()
