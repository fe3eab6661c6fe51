"""Does a run, or one of its steps, again from what its folder has, and compares.

A replay is a run in a folder of its own that resumes from a checkpoint of the other one. It takes
the rewards and the answers of environments that were recorded, calls the sampler as it was called
(`run.record`), and writes no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxrl.algorithms.protocols import ActorRole
from jaxrl.algorithms.schedule import Action
from jaxrl.checkpoint import store
from jaxrl.checkpoint.fingerprint import changes, compare, digest_file
from jaxrl.checkpoint.model_source import FINAL
from jaxrl.config.keys import mappings
from jaxrl.config.schema import CONFIG_FILE, Config, Overrides
from jaxrl.config.yaml_text import assignments
from jaxrl.data.tokenizer import Tokenizer, decode_text
from jaxrl.environments.episode_batches import copy_records
from jaxrl.errors import RunError, UserError, counted
from jaxrl.process.interrupt import Interrupted
from jaxrl.process.json_types import JsonObject
from jaxrl.roles.actor import join_scores, join_values
from jaxrl.run.attempt import export, interrupt_of, open_run, row_is_whole, start_loop
from jaxrl.run.batch_by_hand import BatchByHand, Table
from jaxrl.run.job import dependencies
from jaxrl.run.loop import Loop
from jaxrl.run.python_objects import NOTHING, PythonObjects
from jaxrl.run.record import (
    BATCHES_FILE,
    RESTART,
    STREAM_FILE,
    TOKENS_FILE,
    BatchLines,
    checksums_of,
    following,
    read_record,
    recorded_rewards,
)
from jaxrl.run.reporting import Run
from jaxrl.run.run_dir import SESSIONS_FILE, changes_of, sessions
from jaxrl.runtime.worker import Future, done_future
from jaxrl.telemetry.metrics import METRICS_FILE, find_metric, read_metrics
from jaxrl.types import StreamEvent, TokenValues

MEASURED = ("s", "device-s", "bytes", "GB/s", "tokens/s", "programs", "flag", "changes")
"""Units of metrics that depend on the machine or on when a run was started."""
OF_THE_ATTEMPT = ("checkpoint/step", "rollout/decode_steps", "stream/read_again")
"""Further ones."""
QUIET = {
    "resume": "auto",
    "checkpoint.every": 0,
    "logging.console": "quiet",
    "logging.tensorboard": False,
    "logging.wandb": None,
    "logging.mlflow": None,
    "profile.steps": None,
}
"""Keys of a replay that are not those of its run."""
SUMS = "tokens", "logprobs"
"""Of what was sampled: checksums in `BATCHES_FILE`."""
ANSWER = "answer of "
"""Begins the name of what differs where a served teacher has answered otherwise."""
SAME, CHANGED = "same", "changed"
"""Folders of a step's replays, as it was and with other keys."""
SHOWN = 12
"""Metrics that a message lists."""


@dataclass(frozen=True)
class StepReplay:
    """A step that was done again. `print(step.batch)` and `print(step.batch.row(I))` show it."""

    batch: BatchByHand
    """Before its update, with the values of its tokens."""
    row: JsonObject = field(repr=False)
    """Its row of metrics."""


@dataclass(frozen=True)
class Replay:
    """What a replay has found. `print(replay)` says it."""

    run_dir: Path
    start: int
    """The step of the checkpoint that it began with; 0: the beginning."""
    last: int
    """The last step that it did."""
    differences: Mapping[str, tuple[object, object]]
    """What differs first, by name: as recorded, and as it is now."""
    differs_at: int | None
    """The step where that is; None: nothing differs."""
    step: StepReplay | None = None
    """The step that was asked for."""
    changed: StepReplay | None = None
    """The same with other keys."""
    keys: Mapping[str, object] = field(default_factory=dict)
    """These, and their values."""
    has_weights: bool = False
    """Whether the weights at the end of the run were compared too."""

    @property
    def same(self) -> bool:
        """Returns whether everything that was recorded came out again, bit for bit."""
        return self.differs_at is None

    def __str__(self) -> str:
        begun = f"from checkpoint {self.start}" if self.start else "from the beginning"
        if self.differs_at is None:
            done = counted(self.last - self.start, "step")
            weights = f", and the weights of {self.run_dir / FINAL}" if self.has_weights else ""
            lines = [f"same bits: {done} of {self.run_dir} {begun}{weights}"]
        else:
            lines = [f"step {self.differs_at} of {self.run_dir} differs, replayed {begun}"]
            for name in self.differences:
                if name.startswith(ANSWER):
                    who = f"{name.removeprefix(ANSWER)} at step {self.differs_at}"
                    lines += [f"not repeatable: {who}, which was asked the same as in the run"]
            lines += _listed(self.differences, "recorded", "replayed")
        if self.step is not None and self.changed is not None:
            lines += ["", *self._compared(self.step, self.changed)]
        return "\n".join(lines)

    __repr__ = __str__

    def write_tokens(self, place: Path, row: int) -> None:
        """Writes the tables of one completion's tokens into the folder of the replay, for a report
        of the runs in it."""
        for name, done in ((SAME, self.step), (CHANGED, self.changed)):
            if done is not None:
                table = done.batch.row(row)
                content = json.dumps({"title": table.heading, "columns": table.columns})
                (place / name / TOKENS_FILE).write_text(content, encoding="utf-8")

    def _compared(self, before: StepReplay, after: StepReplay) -> list[str]:
        both = before.row.keys() & after.row.keys()
        rows = {k: v for k, v in _differences(before.row, after.row).items() if k in both}
        keys = " ".join(f"{key}={value}" for key, value in self.keys.items())
        lines = [f"step {self.last} with {keys}:"]
        lines += _listed(rows, "as it was", "changed") or ["  nothing changes"]
        if checksums_of(before.batch.rollout) != checksums_of(after.batch.rollout):
            scored = ", and their rewards computed anew" if after.batch.rewards else ""
            return [*lines, f"  other completions are sampled{scored}"]
        was, now = before.batch.advantages, after.batch.advantages
        if was is None or now is None:
            return lines
        turned = [i for i, (a, b) in enumerate(zip(was, now, strict=True)) if (a * b < 0).any()]
        of = f"{len(turned)} of {counted(len(was), 'completion')}"
        where = f": rows {', '.join(map(str, turned[:SHOWN]))}" if turned else ""
        return [*lines, f"  the advantage changes its sign in {of}{where}"]


def _listed(found: Mapping[str, tuple[object, object]], *heads: str) -> list[str]:
    if not found:
        return []
    first = list(found.items())[:SHOWN]
    columns: dict[str, Sequence[object]] = {"": [name for name, _ in first]}
    for head, values in zip(heads, zip(*(pair for _, pair in first), strict=True), strict=True):
        columns[head] = [_shown(value) for value in values]
    more = len(found) - len(first)
    return [*str(Table.of("", columns)).splitlines()[1:], *[f"  and {more} more"][: more > 0]]


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)


def replay(
    run_dir: Path,
    given: PythonObjects = NOTHING,
    *,
    step: int | None = None,
    keys: Overrides = (),
    place: Path,
    tell: Callable[[str], None] = lambda text: None,
) -> Replay:
    """Does the work of `jaxrl.replay`, in the folder `place`."""
    source = _Source.of(run_dir)
    last = source.last if step is None else step
    if not 1 <= last <= source.last:
        raise UserError(f"step {last}: {run_dir} has the steps 1 to {source.last}")
    start = 0 if step is None else source.checkpoint_before(last)
    source.check(start, last)
    same, changed = place / SAME, place / CHANGED
    source.copy_to(same, start)
    recorded = replace(given, answers=source.path.absolute())
    again = _Again(source, recorded, last, looks=step is not None, saves=bool(keys), tell=tell)
    values = dict(assignments(keys, mappings(Config)))
    other_keys = replace(again, given=given, keys=values, saves=False)
    if keys:
        _check_keys(other_keys.keys, source, other_keys.config(changed))
    found = again.run(same, start)
    if keys and found.same:
        begin = last - 1  # with the weights before the step and, if the keys allow it, its batch
        replace(source, path=same).copy_to(changed, begin)
        copy_records(source.path, changed, begin)
        other = other_keys.run(changed, begin)
        found = replace(found, changed=other.step, keys=other_keys.keys)
    return found


@dataclass(frozen=True)
class _Source:
    """The run that is repeated, as its folder has it."""

    path: Path
    config: Config
    rows: Mapping[int, JsonObject]
    batches: Mapping[int, JsonObject]
    events: Sequence[StreamEvent]

    @classmethod
    def of(cls, path: Path) -> _Source:
        if not (path / CONFIG_FILE).is_file():
            raise UserError(f"{path} is no folder of a run: it has no {CONFIG_FILE}")
        rows = {int(row["step"]): row for row in read_metrics(path)}
        config, batches = Config.load(path / CONFIG_FILE), BatchLines(path)
        if not rows or max(rows) == 0:
            raise UserError(f"{path} has no step to replay: nothing was trained")
        if not batches:
            raise UserError(
                f"{path} has no {BATCHES_FILE}: a run is replayed from what it records there, and"
                " an older jaxrl wrote none"
            )
        return cls(path, config, rows, batches, read_record(path) if config.streams else ())

    @property
    def last(self) -> int:
        return max(self.rows)

    def checkpoint_before(self, step: int) -> int:
        """Returns the step of the newest checkpoint before a step; 0: there is none."""
        for folder in store.folders(self.path):
            if int(folder.name) < step:
                with suppress(store.Damaged):
                    store.verify(store.read(folder))
                    return int(folder.name)
        return 0

    def check(self, start: int, last: int) -> None:
        """Raises UserError where these steps cannot be repeated."""
        steps = f"steps {start + 1} to {last} of {self.path} cannot be replayed"
        for step, texts in changes_of(sessions(self.path)).items():
            if start < step or last <= step:
                raise UserError(
                    f"{steps}: after step {step} the run went on with a change"
                    f" ({'; '.join(texts)}). --step N replays one after {step}, from the"
                    " checkpoints since"
                )
        for step in range(start + (start > 0), last + 1):  # the row of step 0 is an evaluation
            for name, known in ((METRICS_FILE, self.rows), (BATCHES_FILE, self.batches)):
                if step not in known and (step or name == METRICS_FILE):
                    raise UserError(f"{steps}: {self.path / name} has no line for step {step}")
        if not self.config.streams:
            return
        if len(self.events) < self.batches[last].get("events", 0):
            raise UserError(f"{steps}: {self.path / STREAM_FILE} was cut or damaged since")
        happened = [event[:2] for event in self.events]
        if (("save", start) if start else ("load", 0)) not in happened:
            raise UserError(f"{steps}: {self.path / STREAM_FILE} has nothing of them")
        lost = (RESTART, 0) in happened and ("load", last) not in [
            event[:2] for event in following(self.events, start)
        ]
        if lost and (RESTART, 0) in happened[happened.index(("save", start)) if start else 0 :]:
            raise UserError(
                f"{steps}: the rollout was lost meanwhile, with what it had sampled. --step N"
                " replays one after a later checkpoint"
            )

    def tokens(self, step: int) -> int | None:
        """Returns the checksum of the tokens of a step's batch; None where none is recorded."""
        found: int | None = self.batches.get(step, {}).get("tokens")
        return found

    @property
    def finished(self) -> bool:
        """Returns whether the folder has the weights after the last step."""
        return self.last == self.config.steps and (self.path / FINAL).is_dir()

    def copy_to(self, place: Path, start: int) -> None:
        """Makes the folder of a run that resumes from a checkpoint of this one."""
        place.mkdir(parents=True)
        if not start:
            return
        for name in (METRICS_FILE, SESSIONS_FILE, CONFIG_FILE):
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, place / name)
        (place / store.FOLDER).mkdir()
        folder = store.FOLDER, str(start)
        place.joinpath(*folder).symlink_to(self.path.joinpath(*folder).resolve())


class RecordedRewards(dict[int, dict[str, Sequence[Future[Any]]]]):
    """Batch -> role -> its scores, as a run recorded them."""

    def __init__(self, batches: Mapping[int, JsonObject], of: range):
        super().__init__()
        self._batches, self._of = batches, of

    def pop(self, index: int, *default: Any) -> Any:
        line = self._batches.get(index + 1) if index in self._of else None
        report = None if line is None else recorded_rewards(line)
        if report is None:
            return super().pop(index, *default)
        return {"reward": [done_future(report)]}


def _check_keys(keys: Mapping[str, object], source: _Source, config: Config) -> None:
    """Raises UserError for keys that no single step can have otherwise."""
    for key in keys:
        if key in QUIET or key in ("run_dir", "name", "resume_changed", "steps"):
            raise UserError(
                f"{key} belongs to the whole run: a step cannot be replayed with another"
            )
    try:
        compare(source.config.model_dump(mode="json"), config, source.path)
    except UserError as error:
        refused = "\n".join(line for line in str(error).splitlines() if line.startswith("  "))
        raise UserError(
            f"a step cannot be replayed with another value of this:\n{refused}"
        ) from error


@dataclass
class _Again:
    """A run that does steps of another one again."""

    source: _Source
    given: PythonObjects
    last: int
    """The last step that it does."""
    looks: bool
    """Whether the batch of that step is wanted."""
    saves: bool
    """Whether it writes a checkpoint before that step, with its batch."""
    tell: Callable[[str], None]
    keys: Mapping[str, object] = field(default_factory=dict)
    """Those that are set otherwise than in the source: rows are not compared then."""

    def config(self, place: Path) -> Config:
        # What has changed beside the config is found by `_check_inputs`, which can say of what.
        own = {**self.keys, **QUIET, "run_dir": str(place), "resume_changed": True}
        return Config.of(self.source.config, own)

    def run(self, place: Path, start: int) -> Replay:
        """Does the steps after `start` in the folder `place`, which has their checkpoint."""
        source, last, config = self.source, self.last, self.config(place)
        found: dict[str, tuple[object, object]] = {}
        rows: list[JsonObject] = []
        looked: list[BatchByHand] = []

        def on_step(row: JsonObject) -> None:
            if found or self.keys or row["step"] < start or row["step"] == start > 0:
                rows[:] = rows if found else [row]
                return
            rows[:] = [row]
            found.update(self._differences(row, run.recorded))
            if found:
                loop.until = row["step"]
            elif row["step"] and (row["step"] - start) % max(1, (last - start) // 10) == 0:
                self.tell(f"step {row['step']} of {last}: same bits")

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            if self.looks and action.kind == "train" and action.index + 1 == last:
                looked.append(_look(loop, action.index))
                if self.saves and action.index:
                    _save(loop, action.index)
            yield

        interrupt = interrupt_of(config)
        with ExitStack() as stack:
            stack.enter_context(interrupt.listening())
            run = stack.enter_context(open_run(config, self.given, interrupt, on_step))
            _check_inputs(source, run, self.keys)
            loop, ahead = stack.enter_context(start_loop(run))
            loop.around, loop.until = around, last
            loop.replayed = () if self.keys else source.events
            given = any(key.partition(".")[0] == "reward" for key in self.keys)
            kept = [i for i in ahead if checksums_of(ahead[i])["tokens"] == source.tokens(i + 1)]
            if not self.keys or (last - 1 in kept and not given):
                loop.sources.early_scores = RecordedRewards(source.batches, range(start, last))
            reached = loop.run(start, ahead, row_is_whole(run))
            if interrupt.asked:
                raise Interrupted("the replay was interrupted")
            if run.step_error is not None:
                raise run.step_error
            if reached < loop.until:
                stop = "" if run.stopped is None else f" {run.stopped.by} raised StopTraining"
                raise RunError(f"the replay ended after step {reached} of {last}:{stop}")
            if self.saves and looked:
                run.close()
                if run.checkpoints.newest != last - 1 > 0:
                    raise RunError(f"{place} has no checkpoint {last - 1}: it could not be written")
            ends = not (found or self.looks) and source.finished
            if ends:
                export(run)
                digests = [_digest(one / FINAL) for one in (source.path, place)]
                if digests[0] != digests[1]:
                    found["digest of the weights"] = digests[0][:16], digests[1][:16]
        at = rows[-1]["step"] if found else None
        step = StepReplay(looked[0], rows[-1]) if looked and not found else None
        return Replay(source.path, start, last, found, at, step, has_weights=ends)

    def _differences(self, row: JsonObject, recorded: JsonObject) -> dict[str, tuple[Any, Any]]:
        """Maps what differs from the source to its values there and here."""
        there = self.source.batches.get(row["step"], {})
        sums = {name: (there.get(name), recorded[name]) for name in SUMS if row["step"]}
        found = {f"checksum of {name}": both for name, both in sums.items() if both[0] != both[1]}
        if not found:  # else they were asked something else
            now = recorded.get("answers", {})
            for who, digests in there.get("answers", {}).items():
                if digests != now.get(who):
                    found[ANSWER + who] = digests, now.get(who)
        return found | _differences(self.source.rows[row["step"]], row)


def _digest(final: Path) -> str:
    """Returns the digest of the weights in a folder, of a model or of adapters."""
    digests = (digest_file(path) for path in sorted(final.glob("*.safetensors")))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _look(loop: Loop, index: int) -> BatchByHand:
    """Returns the batch that is about to be trained on, with the values of its tokens."""
    calls, made = loop.calls, loop.rows[index + 1]
    assert made.rollout is not None
    calls.kind = "score"
    values, said = list[TokenValues](), list[dict[str, list[object]]]()
    for part, scores in made.in_parts():  # before the first one is trained
        asked = {role: list(parts) for role, parts in scores.items()}
        values.append(calls.wait(calls.call("actor", ActorRole.inspect, part, asked)))
        own = {role: parts for role, parts in asked.items() if role != "teacher"}
        said.append({role: [*map(calls.wait, parts)] for role, parts in own.items()})
    scores, found = made.scores, values[0]
    if made.parts:
        whole, n = calls.wait(made.rollout), loop.config.batch_rows // len(made.parts)
        found = join_values(values, n, whole)
        if "reward" in scores:
            joined = join_scores(said, n, whole)
            scores = {role: [done_future(x) for x in parts] for role, parts in joined.items()}
    calls.kind = "train"
    owner = _Owner(index, loop.config, loop.reporter.job.tokenizer)
    batch = BatchByHand(index + 1, owner, made.rollout, {}, (), scores, _values={index: found})
    _ = batch.rollout, batch.advantages  # while the workers that made them are there
    return batch


def _save(loop: Loop, index: int) -> None:
    """Writes a checkpoint of the actor as it is, with the batch that it is about to train on."""
    calls, made = loop.calls, loop.rows[index + 1].rollout
    assert made is not None
    folder = loop.checkpoints.folder(index)
    if folder.is_symlink():  # the checkpoint that the replay began with, which has been read
        folder.unlink()
    calls.kind, row = "save", calls.row
    saved = calls.call("actor", ActorRole.save, folder, step=index)
    written = calls.call("actor", ActorRole.saved, saved)
    loop.checkpoints.begin(index, written, {index: made}, {"name": loop.config.schedule})
    if (last := loop.reporter.metrics.last or {}).get("step") == index:
        loop.checkpoints.row(last)  # written before the replay began
    calls.kind, calls.row = "train", row


@dataclass(frozen=True)
class _Owner:
    """What a batch asks in place of a session."""

    step: int
    config: Config
    tokenizer: Tokenizer

    def decode(self, token: int) -> str:
        return decode_text(self.tokenizer, [token], special=True)

    def inspect(self, batch: BatchByHand) -> TokenValues:
        raise UserError("a replayed step has the values of the policy before its update alone")


def _differences(there: JsonObject, here: JsonObject) -> dict[str, tuple[object, object]]:
    """Maps the metrics that two rows of a step differ in to both values."""
    found = {}
    for name in [*there, *(name for name in here if name not in there)]:
        metric = find_metric(name)
        measured = metric is None or metric.unit in MEASURED or name in OF_THE_ATTEMPT
        if not measured and there.get(name) != here.get(name):
            found[name] = there.get(name), here.get(name)
    return found


def _check_inputs(source: _Source, run: Run, keys: Mapping[str, object]) -> None:
    """Raises UserError where models or data are not those of the run, but for those that changed
    keys name."""
    for folder in store.folders(source.path):
        names = changes(store.read(folder).manifest.digests, dependencies(run.job))
        if names := [name for name in names if not any(name.startswith(key) for key in keys)]:
            raise UserError(
                f"what {' and '.join(names)} names has changed since {source.path} was trained: put"
                " it back to replay the run"
            )
        return
