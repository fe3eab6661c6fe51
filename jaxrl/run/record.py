"""What a run records of itself to be repeated: all that is no function of its config, data, models
and seed.

`batches.jsonl` has the rewards of each batch, which code of the user's may have drawn or asked for,
checksums of what was sampled and digests of what served teachers answered (environments record
their answers in `episodes/`). `stream.jsonl` has what timing decided where batches are streamed
(`schedule=streaming`), a line for each event: `["load", 3, 17]`, as in `types.StreamEvent`. Lines
are written before the row or the checkpoint that depends on them. A run that resumes follows the
events after its checkpoint, and a replay all of them.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import IO

import numpy as np

from jaxrl.errors import UserError
from jaxrl.process.json_types import JsonObject, parse_json, read_file
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.roles.stream_log import BEGUN
from jaxrl.telemetry.lines import LineFile
from jaxrl.types import Rollout, StreamEvent, StreamEvents

BATCHES_FILE = "batches.jsonl"
STREAM_FILE = "stream.jsonl"
TOKENS_FILE = "tokens.json"
"""The table of one completion's tokens, in a folder that a replay keeps."""
RESTART = "restart"
"""The event of a sampler that was lost with all that it had in flight."""


def batch_record(
    step: int,
    rollout: Rollout,
    report: RewardReport | None,
    events: int | None = None,
    answers: Sequence[Mapping[str, int]] = (),
) -> JsonObject:
    """Returns the record of the batch that a step trained on. Arrays of rewards are [B] with the
    rows of padding, null where a completion has none.

    Args:
        events: lines of `STREAM_FILE` that are written.
        answers: for each part of the teachers' scores, who answered -> the digest of that.
    """
    found: JsonObject = {"step": step} | checksums_of(rollout)
    for part in answers:
        for name, digest in part.items():
            found.setdefault("answers", {}).setdefault(name, []).append(digest)
    if events is not None:
        found["events"] = events
    if report is not None:
        found["rewards"] = {"total": _numbers(report.rewards)}
        if not np.array_equal(report.rewards, report.task, equal_nan=True):
            found["rewards"]["task"] = _numbers(report.task)
        found["functions"] = {name: _numbers(values) for name, values in report.per_reward.items()}
        found["weights"], found["metrics"] = dict(report.weights), dict(report.metrics)
        if report.advantages is not None:
            by_hand = np.asarray(report.advantages, np.float32)
            data = base64.b64encode(by_hand.tobytes()).decode()
            found["advantages"] = {"shape": by_hand.shape, "float32": data}
    return found


def checksums_of(rollout: Rollout) -> dict[str, int]:
    """Returns the CRC-32 of a batch's completions: of their tokens, and of their log-probs."""
    tokens, logprobs = 0, 0
    for one in rollout.completions:
        tokens = zlib.crc32(np.array([*one.tokens, -1], np.int32).tobytes(), tokens)
        logprobs = zlib.crc32(np.asarray(one.logprobs, np.float32).tobytes(), logprobs)
    return {"tokens": tokens, "logprobs": logprobs}


def recorded_rewards(line: JsonObject) -> RewardReport | None:
    """Returns the rewards of a line of `BATCHES_FILE`; None where its batch had none."""
    if "rewards" not in line:
        return None
    total = np.array(line["rewards"]["total"], np.float64)
    task = np.array(line["rewards"].get("task", total), np.float64)
    each = {name: np.array(values, np.float64) for name, values in line["functions"].items()}
    advantages = None
    if (by_hand := line.get("advantages")) is not None:
        data = base64.b64decode(by_hand["float32"])
        advantages = np.frombuffer(data, np.float32).reshape(by_hand["shape"])
    return RewardReport(
        total, task, each, line["metrics"], (), weights=line["weights"], advantages=advantages
    )


class BatchLines(Mapping[int, JsonObject]):
    """The record of the batches of the run in a folder, by step. A line is parsed when it is asked
    for; one that is torn or damaged is not there."""

    def __init__(self, path: Path):
        lines: Sequence[bytes] = ()
        with suppress(OSError):
            lines = read_file(path / BATCHES_FILE).splitlines()
        begun = ((re.match(rb'\{"step": (\d+), .*\}$', line), line) for line in lines)
        self._lines = {int(match[1]): line for match, line in begun if match is not None}

    def __getitem__(self, step: int) -> JsonObject:
        with suppress(ValueError):
            return parse_json(self._lines[step])
        raise KeyError(step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


def _numbers(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(x) else x for x in np.asarray(values, np.float64).tolist()]


def read_record(path: Path) -> list[StreamEvent]:
    """Reads the record of the run in a folder. A line that was torn as the run was killed ends it.

    Raises:
        UserError: there is none.
    """
    try:
        text = read_file(path / STREAM_FILE)
    except OSError as error:
        raise UserError(f"{path / STREAM_FILE} cannot be read: {error.strerror}") from error
    return [event for event, _ in _lines(text)]


def _lines(content: bytes) -> list[tuple[StreamEvent, int]]:
    """Returns the events, and where the line of each one ends."""
    found, end = list[tuple[StreamEvent, int]](), 0
    for line in content.splitlines(keepends=True):
        end += len(line)
        event = None
        with suppress(ValueError, TypeError):
            event = StreamEvent(*json.loads(line))
        types = None if event is None else tuple(map(type, event))
        if event is None or types != (str, int, int) or not line.endswith(b"\n"):
            break
        found.append((event, end))
    return found


def following(events: Sequence[StreamEvent], step: int) -> list[StreamEvent]:
    """Returns what a run that begins after `step` batches follows of a record: from the load of
    these weights on, up to a restart of the sampler. Where the record has nothing of that, the load
    alone. A run that was stopped with these weights and went on has loaded them twice, which is
    once here."""
    saved = [i for i, event in enumerate(events) if (event.call, event.number) == ("save", step)]
    first = saved[-1] + 1 if saved else 0 if step == 0 else len(events)
    after = [*takewhile(lambda event: event.call != RESTART, events[first:])]
    load, found, loaded = StreamEvent("load", step, 0), list[StreamEvent](), -1
    for event in after if after[:1] == [load] else [load]:
        if event.call != "load" or event.number > loaded:
            found.append(event)
            loaded = max(loaded, event.number if event.call == "load" else -1)
    return found


class StreamRecord:
    """The record of a run, which any thread may add to."""

    def __init__(self, path: Path, step: int | None, notify: Callable[[str], None]):
        """
        Args:
            step: of the checkpoint that the run resumes from; None: it begins.
        """
        self.before: tuple[StreamEvent, ...] = ()
        """What the run that resumes had recorded, also of steps that were lost."""
        self.lines = 0
        """Those that are written."""
        self._lock = threading.Lock()
        self._sampler: str | None = None
        self._over: set[str] = set()
        """Samplers that were lost."""
        self._count = 0
        """Events of this sampler that are written."""
        self._known: dict[int, StreamEvent] = {}
        """Others, by their number."""

        def keep(file: IO[bytes]) -> int:
            lines = _lines(file.read())
            self.before = tuple(event for event, _ in lines)
            saves = [i for i, (e, _) in enumerate(lines) if (e.call, e.number) == ("save", step)]
            # Where nothing was in flight at the checkpoint, there was no event.
            self.lines = saves[-1] + 1 if saves else len(lines)
            return lines[self.lines - 1][1] if self.lines else 0

        self.file = LineFile(path / STREAM_FILE, notify, None if step is None else keep)

    def add(self, happened: StreamEvents) -> None:
        """Writes those of the events that are not written yet, in their order: one that comes
        before another that is not known yet waits for it."""
        with self._lock:
            new: list[StreamEvent] = []
            if happened.sampler in self._over:  # its last batch is reported late
                return
            if happened.sampler != self._sampler:
                if self._sampler is not None:
                    new.append(StreamEvent(RESTART, 0, 0))
                    self._over.add(self._sampler)
                self._sampler, self._count = happened.sampler, 0
                self._known.clear()
            numbered = enumerate(happened.events, happened.first)
            self._known |= {n: event for n, event in numbered if n >= self._count}
            while (event := self._known.pop(self._count, None)) is not None:
                self._count += 1
                new.append(event)
            new = [event for event in new if event.call != BEGUN]
            self.lines += len(new)
            self.file.append([json.dumps(event) for event in new])
