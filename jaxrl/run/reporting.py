"""Makes the row of metrics of each step: waits for the step's futures, judges completions, and
hands the row to everything that stores or shows it.

A *row* here is a line of `metrics.jsonl`, except in `RowDevices` and `Trained.by_row`, where it is
a sequence of the batch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Literal

import numpy as np

from jaxrl.algorithms.protocols import ActorRole
from jaxrl.checkpoint.writer import CheckpointWriter
from jaxrl.config.schema import CONFIG_FILE
from jaxrl.data.tokenizer import decode_text
from jaxrl.errors import Stopped, StopTraining
from jaxrl.models.families import kept_files
from jaxrl.models.packing import RowDevices
from jaxrl.plan.plan_inputs import MB
from jaxrl.plan.table import PLAN_DATA_FILE, PLAN_FILE, Plan, plan_json
from jaxrl.process.compilations import Compilations
from jaxrl.process.interrupt import Interrupt, Interrupted
from jaxrl.process.json_types import JsonObject
from jaxrl.profile.traces import PROFILE_DIR, Profile, steps_to_profile
from jaxrl.profile.waits import union
from jaxrl.rewards.batch_rewards import RewardReport, join_reports
from jaxrl.roles.microbatch import scored_padding
from jaxrl.run.evaluation import evaluation_row, judged
from jaxrl.run.job import Job
from jaxrl.run.record import BATCHES_FILE, STREAM_FILE, StreamRecord, batch_record
from jaxrl.run.run_dir import SESSIONS_FILE, RunDir, check_folder
from jaxrl.runtime.worker import Future, Times, Wait, WorkerGroup
from jaxrl.teacher.local_teacher import teacher_metrics
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.lines import LOG_FILE, LineFile, RunLog
from jaxrl.telemetry.metrics import (
    METRICS_FILE,
    SAMPLES_FILE,
    SCORED,
    JsonLines,
    MetricsWriter,
    Sample,
    Training,
    write_samples,
)
from jaxrl.telemetry.timeline import TIMELINE_FILE, Timeline
from jaxrl.telemetry.totals import add_totals
from jaxrl.telemetry.trackers import CLOSE_S, RunFacts, Trackers, open_trackers
from jaxrl.types import Rollout, Row, SampleCounts, Trained

HURRY_S = 3.0
"""Longest wait for the trackers at the end of a run that was interrupted, or failed."""
Futures = Mapping[str, Future[Any]]
"""Those of one row, by what they are: `rollout`, `update`, `score.ROLE` ..."""
AGREEMENT = "distill/top1_agreement"
"""Metric that the actor also reports per sequence of the batch; printed with the samples."""
VERIFIER = "data.verifier"
OnStep = Callable[[JsonObject], object]
"""Takes a copy of a row."""
ScorerMetrics = Callable[[Rollout, int, Sequence[str]], dict[str, float]]
"""(rollout, parts in which a role scored it, messages of its rewards) -> the role's metrics."""


class Notifier:
    """Prints to the console and to `log.txt`. Text printed before the log is open is written
    later."""

    def __init__(self, console: Console):
        self._console = console
        self._log: RunLog | None = None
        self._kept: list[str] = []
        console.out.lost = self.to_log

    def __call__(self, text: str) -> None:
        self._console.message(text)
        self.to_log(text)

    def to_log(self, text: str) -> None:
        """Writes a message to the log alone."""
        if self._log is None:
            self._kept.append(text)
        else:
            self._log.write(text)

    @contextmanager
    def into(self, log: RunLog) -> Iterator[RunLog]:
        """Opens the log for this block, and closes it at the end."""
        with log:
            for text in self._kept:
                log.write(text)
            self._kept, self._log = [], log
            try:
                yield log
            finally:
                self._log = None


@dataclass
class Run:
    """A run in this process, through all of its attempts, with everything that it writes and shows.
    Makes the row of each step, and hands it to everything that shows or keeps rows."""

    job: Job
    plan: Plan
    folder: RunDir
    """With the checkpoint that the present attempt starts from."""
    console: Console
    notify: Notifier
    interrupt: Interrupt
    on_step: OnStep | None
    """Called with each row once it is written, and again with a row that is amended after an
    interruption."""
    started: float
    """`time.monotonic` seconds."""
    first_step_at: float | None = None
    """End of the first update in this process, in `time.monotonic` seconds."""
    step_error: BaseException | None = None
    """What `on_step` raised: it is not called again, and the run ends."""
    stopped: StopTraining | None = None
    """What code of the user's raised to end the run early."""
    amid_batch: bool = False
    """Whether that was when some minibatches of a batch were trained and others were not."""
    wait: Wait = lambda future: future.result()
    """Raises Stopped for a call that the run, asked to end, does not need."""
    worker_group: WorkerGroup = field(init=False)
    """Of the present attempt, as are those below."""
    metrics: MetricsWriter = field(init=False)
    samples: JsonLines = field(init=False)
    batches: JsonLines = field(init=False)
    recorded: JsonObject = field(default_factory=dict)
    """The newest line of these."""
    trackers: Trackers | None = field(init=False)
    timeline: Timeline = field(init=False)
    checkpoints: CheckpointWriter = field(init=False)
    stream: StreamRecord | None = field(init=False)
    """Where batches are streamed."""
    profile: Profile = field(init=False)
    scorers: Mapping[str, ScorerMetrics] = field(init=False)
    """Roles that score with a model on devices of the run."""
    _compiled: Compilations = field(default_factory=Compilations)
    """What was compiled until the previous row was written."""
    _last: float | None = None
    """End of the latest update, in `time.monotonic` seconds."""
    _calls: list[Times] = field(default_factory=list)
    """Of the calls that may have run since then."""
    _unpaid: list[tuple[str, Times]] = field(default_factory=list)
    """Role and times of the calls that no row's device-seconds have yet."""

    def __post_init__(self) -> None:
        self._written_at = self.started
        """When the newest row was written, or else the start, in `time.monotonic` seconds."""
        self.start = self.folder.step
        """Step that its first attempt starts from."""

    @contextmanager
    def attempt(self, worker_group: WorkerGroup) -> Iterator[None]:
        """Opens all that an attempt with these workers writes: description, log, metrics, samples,
        timeline, trackers, profile and checkpoints."""
        job, folder, notify, config = self.job, self.folder, self.notify, self.job.config
        path, after = folder.path, None if folder.checkpoint is None else folder.step
        description = {
            CONFIG_FILE: config.dump(),
            PLAN_FILE: self.plan.text(),
            PLAN_DATA_FILE: plan_json(self.plan),
            SESSIONS_FILE: folder.sessions_with(config.mesh),
        }
        description |= kept_files(job.student.config.family)
        for note in folder.set_aside():
            notify(note)
        for name, text in description.items():
            folder.write(name, text)
        folder.clear_final(notify)
        self.console.attach(worker_group.states)
        self.worker_group, self.scorers = worker_group, scorer_metrics(job, self.plan)
        self._planned = self.plan.peaks
        self._pools = {pool.pool.name: pool for pool in self.plan.pools}
        on_cpu = self.plan.inputs.on_cpu
        self._peaks_from = "arrays and compiled programs" if on_cpu else "as the device reports it"
        self._compiled, self._last = Compilations(), None
        self._calls, self._unpaid = [], []
        places = self.plan.placement.roles
        self._devices = {role: len(where.devices) for role, where in places.items()}
        self._held = sum(len(pool.pool.devices) for pool in self.plan.pools)
        with ExitStack() as stack:
            log = stack.enter_context(notify.into(RunLog(path / LOG_FILE)))
            self.metrics = MetricsWriter(path / METRICS_FILE, after, notify)
            stack.callback(self.metrics.close)
            self.samples = JsonLines(path / SAMPLES_FILE, after, notify)
            stack.callback(self.samples.close)
            self.batches = JsonLines(path / BATCHES_FILE, after, notify)
            stack.callback(self.batches.close)
            timeline = path / TIMELINE_FILE if config.logging.timeline else None
            self.timeline = Timeline(timeline, after is not None, notify)
            stack.callback(self.timeline.close)
            self.timeline.watch_states(worker_group.states)
            steps, profiles = steps_to_profile(config, folder.step, notify), path / PROFILE_DIR
            self.profile = Profile(job.train, self.plan, worker_group, profiles, steps, notify)
            facts = RunFacts(config.name, path, config.model_dump(mode="json"), after, notify)
            self.trackers = open_trackers(config.logging, facts)
            if self.trackers is not None:
                close = self.trackers.close
                stack.push(lambda failed, *_: close(HURRY_S if failed else CLOSE_S))
            growing: dict[str, LineFile] = {
                METRICS_FILE: self.metrics,
                SAMPLES_FILE: self.samples,
                BATCHES_FILE: self.batches,
                LOG_FILE: log,
            }
            if self.timeline.file is not None:
                growing[TIMELINE_FILE] = self.timeline.file
            self.stream = None
            if config.streams:
                self.stream = StreamRecord(path, after, notify)
                growing[STREAM_FILE] = self.stream.file
                stack.callback(self.stream.file.close)
            self.check_folder = partial(check_folder, folder, growing)
            self.checkpoints = CheckpointWriter(
                path,
                config,
                job.train.fingerprint,
                job.describe_policy,
                notify,
                folder.depends,
                self.check_folder,
            )
            self.checkpoints.newest = folder.step or None
            stack.callback(self.checkpoints.abandon)
            yield

    def close(self) -> None:
        """Waits for what the attempt still writes, once its last batch is trained."""
        self.profile.close()
        self.checkpoints.close(self.job.config.deadlines.checkpoint)
        self.checkpoint()
        self.check_folder()

    def asked_to_stop(self) -> bool:
        """Returns whether the run has to save and end."""
        self.stopped = self.stopped or self.worker_group.stop_asked
        why = self.step_error or self.stopped or self.worker_group.ending
        asked = self.interrupt.asked or why is not None
        if asked:
            self.worker_group.settle()
        return asked

    def record(self, role: str, method: str, times: Times, given: Mapping[str, object]) -> None:
        """Takes each call of a role, as the timeline does."""
        if method != ActorRole.saved.__name__:  # a wait for a disk
            self._calls.append(times)
            self._unpaid.append((role, times))

    def row(self, step: int, futures: Futures) -> None:
        """Waits for the futures of a step, then writes and shows its row. Row 0 has the first
        weight sync, and the accuracy of the student and of other roles that are evaluated."""
        row: dict[str, float] = {}
        if step > 0:
            rollout: Rollout = self.wait(futures["rollout"])
            trained: Trained = self.wait(futures["update"])  # so everything of the batch has ended
            if self.stream is not None and rollout.events is not None:
                self.stream.add(rollout.events)
            sampled = rollout.policy_version >= 0 or rollout.decode_steps > 0  # else they are data
            report = rewards_of(rollout, futures)
            row = self._batch(rollout, sampled, report, futures) | trained.metrics
        row |= self._version(step, futures)
        for future in futures.values():
            if future.times.made_s is not None:
                made = f"made on its first use, in {future.times.made_s:.1f} s"
                self.notify(f"{future.role}: {made}")
        if moves := [move for future in futures.values() for move in future.times.moves]:
            row["offload/to_host_bytes"] = float(sum(m.nbytes for m in moves if m.to == "host"))
            row["offload/to_device_bytes"] = float(sum(m.nbytes for m in moves if m.to == "device"))
            row["time/offload_s"] = sum(move.waited for move in moves)
        if step == 0:
            self._write(0, row)
            return
        peaks = self.worker_group.peaks()
        for role, size in self._planned.items():  # as planned where nothing is measured
            row[f"memory/{role}/peak_bytes"] = float(peaks.get(role, size))
            row[f"memory/{role}/planned"] = float(role not in peaks)
        if self.first_step_at is None and peaks:
            sizes = []
            for name, pool in self._pools.items():
                if found := max((peaks.get(role, 0) for role in pool.pool.roles), default=0):
                    sizes.append(f"{name} {found / MB:,.1f} MB, planned {pool.bytes / MB:,.1f}")
            self.notify(f"peak memory of the first step ({self._peaks_from}): {'; '.join(sizes)}")
        before, self._compiled = self._compiled, self.worker_group.compiled()
        new = self._compiled.since(before)
        row |= {"compile/programs": float(new.programs), "time/compile_s": new.seconds}
        row |= self.checkpoint()
        changed = sum(change.asked for change in self.folder.changed)
        if changed and step == self.folder.step + 1:
            row["run/changed"] = float(changed)
        row["data/epoch"] = step * self.job.config.batch_size / self.job.train.epoch_prompts
        if rollout.policy_version >= 0:
            row["staleness"] = step - 1 - rollout.policy_version
            if self.job.config.streams:
                versions = np.concatenate([one.token_versions for one in rollout.completions])
                row["stream/age"] = step - 1 - float(versions.mean())
                row["stream/read_again"] = float(rollout.read_again)
                row["time/reread_s"] = rollout.read_again_s
        begin, end = self._last, futures["update"].times.finished
        if begin is None:
            begin = _all(futures, "rollout")[0].times.started
        assert begin is not None and end is not None, "both calls have ended"
        row["time/step_s"], self._last = end - begin, end
        row["time/waiting_s"] = end - begin - self._worked(begin, end)
        self.first_step_at = self.first_step_at or end
        row["tokens/per_second"] = row["actor/tokens"] / row["time/step_s"]
        events = None if self.stream is None else self.stream.lines
        scored = [future for key, future in futures.items() if key.startswith("score.teacher")]
        digests = [future.times.noted for future in scored]
        self.recorded = batch_record(step, rollout, report, events, digests)
        self.batches.append([json.dumps(self.recorded)])
        self._write(step, row)

        count = min(self.job.config.logging.samples, len(rollout.completions))
        stride = max(1, len(rollout.completions) // max(count, 1))
        split: Literal["train", "data"] = "train" if sampled else "data"
        samples = []
        for i in range(0, len(rollout.completions), stride)[:count]:
            prompt, completion = rollout.prompts[i], rollout.completions[i]
            judges = split == "train" and completion.failure is None
            score = None
            try:
                score = self.job.judge(completion.whole_text, prompt) if judges else None
            except StopTraining as stop:
                self._stop(stop, VERIFIER)
            sample = Sample.of(
                prompt,
                completion,
                step=step,
                split=split,
                policy_version=rollout.policy_version,
                score=score,
                training=_training(trained, report, i),
                decode=partial(decode_text, self.job.tokenizer),
            )
            samples.append(sample)
        if samples:
            write_samples(self.samples, samples)
            if self.trackers is not None:
                self.trackers.samples(samples)
            self.console.samples(samples)

    def amend(self, step: int, futures: Futures) -> None:
        """Adds to the last row, written before an interruption, the metrics of these futures."""
        row = self._version(step, futures)
        last = self.metrics.last or {}
        lacking = {name: value for name, value in row.items() if name not in last}
        if lacking and last.get("step") == step:
            lacking |= add_totals(last, lacking)
            self._written(self.metrics.amend(step, lacking))

    def _worked(self, begin: float, end: float) -> float:
        """Returns the seconds between these times in which a call of any role ran; forgets the
        calls that ended by then."""
        spans = [
            (max(times.started, begin), min(times.finished or end, end))
            for times in self._calls
            if times.started is not None and times.started < end
        ]
        self._calls = [t for t in self._calls if t.finished is None or t.finished > end]
        return sum(stop - start for start, stop in union(s for s in spans if s[0] < s[1]))

    def _write(self, step: int, row: dict[str, float]) -> None:
        now = time.monotonic()
        row["time/wall_s"], self._written_at = now - self._written_at, now
        row["total/device_s"] = self._held * row["time/wall_s"]
        for role, times in self._unpaid:
            if times.finished is not None:
                name = f"total/{role}/device_s"
                row[name] = row.get(name, 0.0) + self._devices[role] * times.seconds
        self._unpaid = [call for call in self._unpaid if call[1].finished is None]
        totals = add_totals(self.metrics.last or {}, row)
        self._written(self.metrics.write(step, row | totals))

    def _written(self, row: Row) -> None:
        self.checkpoints.row(row)
        if self.trackers is not None:
            self.trackers.write(row["step"], row)
        self.console.step(row)
        self.timeline.flush()
        if row["step"] in self.profile.steps:
            self.profile.row(row)
        if self.on_step is not None and self.step_error is None and self.stopped is None:
            try:
                self.on_step(dict(row))
            except Interrupted:  # a signal, and no deed of the function's
                raise
            except StopTraining as stop:
                self._stop(stop, "on_step")
            except BaseException as error:  # such as SystemExit: raised again once the run is saved
                self.step_error = error

    def _stop(self, stop: StopTraining, by: str) -> None:
        self.stopped = self.stopped or stop.from_code(by)

    def _batch(
        self, rollout: Rollout, sampled: bool, report: RewardReport | None, futures: Futures
    ) -> dict[str, float]:
        """Computes the metrics of sampling, also of what is not in the batch, and of scoring, with
        the times of the calls; where nothing is sampled, the data has the completions."""
        prompts = len(np.unique(rollout.group_ids[rollout.group_ids >= 0]))
        counts = SampleCounts.count(prompts, rollout.completions) + rollout.replaced
        n, lengths = counts.completions, [len(one.tokens) for one in rollout.completions]
        asked = {prompt.id: len(prompt.tokens) for prompt in rollout.prompts}
        row = {
            "policy_version": float(rollout.policy_version),
            "completions/sampled": float(n * sampled),
            "completions/trained": float(len(rollout.completions)),  # unless rewards leave some out
            "rollout/completion_tokens_mean": counts.tokens / n,
            "rollout/completion_tokens_p90": float(np.percentile(lengths, 90)),
            "rollout/truncated_fraction": counts.truncated / n,
            "tokens/prompts": float(sum(asked.values()) + counts.prompt_tokens),
            "tokens/generated": float(counts.generated * sampled),
            "rollout/decode_steps": float(rollout.decode_steps),
            "time/rollout_s": sum(part.times.seconds for part in _all(futures, "rollout")),
            "time/update_s": sum(part.times.seconds for part in _all(futures, "update")),
        }
        by_source: dict[str, list[tuple[int, bool]]] = {}
        for prompt, completion in zip(rollout.prompts, rollout.completions, strict=False):
            if source := self.job.train.source_name(prompt.id):
                of = len(completion.tokens), completion.finish_reason == "length"
                by_source.setdefault(source, []).append(of)
        for source, of_each in by_source.items():
            tokens, cut = np.array(of_each).T
            row[f"rollout/{source}/completion_tokens_mean"] = float(tokens.mean())
            row[f"rollout/{source}/completion_tokens_p90"] = float(np.percentile(tokens, 90))
            row[f"rollout/{source}/truncated_fraction"] = float(cut.mean())
        if self.job.config.rollout.cache_tokens is not None and sampled:
            row["rollout/sent_back"] = float(rollout.sent_back)
        for note in rollout.notes:
            self.notify(note)
        if self.job.config.environment.name is not None and sampled:
            row |= {
                "environment/turns_mean": counts.turns / n,
                "environment/answer_tokens_mean": (counts.tokens - counts.generated) / n,
                "environment/failures": float(counts.failures),
                "environment/timeouts": float(counts.timeouts),
                "time/environment_s": rollout.waited_s,
            }
            if counts.failure is not None:
                self.notify(
                    f"environment: {counts.failures + counts.timeouts} of {n} episodes failed and"
                    f" have no reward; the first, {counts.failure}"
                )
        for role, name in SCORED.items():
            parts = _all(futures, f"score.{role}")
            if parts:
                row[f"time/{name}_s"] = sum(part.times.seconds for part in parts)
            if parts and role in self.scorers:
                messages = () if report is None else report.messages
                row |= self.scorers[role](rollout, len(parts), messages)
        embedded = [part.result() for part in _all(futures, "score.grouper")]
        for note in (note for one in (report, *embedded) if one is not None for note in one.notes):
            self.notify(note)
        return row | dict({} if report is None else report.metrics)

    def _version(self, version: int, futures: Futures) -> dict[str, float]:
        """Returns the metrics of what followed on a version: the weight syncs to the rollout and to
        a teacher that follows the policy, and evaluations. What the run, asked to end, does not
        need is left out; a resumed run adds the policy's to the row (`amend`)."""
        row: dict[str, float] = {}
        for key in futures:
            kind, _, role = key.partition(".")
            if kind not in ("load", "eval"):
                continue
            try:
                taken: Any = self.wait(futures[key])
            except Stopped:
                continue
            if kind == "eval":
                try:
                    scores = judged(self.job.held_out, taken, self.job.judge)
                except StopTraining as stop:  # the run that resumes evaluates again
                    self._stop(stop, VERIFIER)
                    continue
                evaluation = evaluation_row(self.job.held_out, taken, scores)
                if role == "rollout":
                    row |= evaluation | {"time/evaluate_s": futures["eval.rollout"].times.seconds}
                else:
                    row[f"{role}/accuracy"] = evaluation.get("eval/accuracy", float("nan"))
                continue
            sent, loaded = futures[f"publish.{role}"].times, futures[f"load.{role}"].times
            seconds, size = sent.seconds + loaded.seconds, taken["weights/sync_bytes"]
            damaged = row.get("weights/damaged_arrays", 0.0) + taken["weights/damaged_arrays"]
            row["weights/damaged_arrays"] = damaged
            if role != "rollout":
                row[f"time/{role}_sync_s"] = seconds
                row[f"weights/{role}_sync_bytes"] = size
                continue
            speed = size / max(seconds, 1e-9) / 1e9
            row |= {"weights/sync_bytes": size, "weights/sync_gbps": speed}
            row["time/weight_sync_s"] = seconds
            if sent.started is not None and loaded.finished is not None:
                zero = time.time() - time.monotonic()
                start, end = (
                    datetime.fromtimestamp(zero + at).strftime("%H:%M:%S.%f")[:-3]
                    for at in (sent.started, loaded.finished)
                )
                self.notify.to_log(
                    f"weight sync {version}: {start} to {end}, {seconds:.3f} s,"
                    f" {size / 1e6:.1f} MB, {speed:.2f} GB/s"
                )
        return row

    def checkpoint(self) -> dict[str, float]:
        """Returns the metrics of the newest checkpoint finished since the last call, or {} if there
        is none. Draws all finished ones in the timeline."""
        row: dict[str, float] = {}
        while self.checkpoints.written:
            written = self.checkpoints.written.pop(0)
            row["checkpoint/step"] = float(written.step)
            row["checkpoint/bytes"] = float(written.nbytes)
            row["time/checkpoint_s"] = written.finished - written.started
            span = (f"write {written.step}", written.started, written.finished)
            self.timeline.span("checkpoints", *span, bytes=written.nbytes)
        return row


def _all(futures: Futures, name: str) -> list[Future[Any]]:
    """Returns the parts of what has a name, in their order."""
    return [x for key, x in futures.items() if name in (key, key.rpartition(".")[0])]


def rewards_of(rollout: Rollout, futures: Futures) -> RewardReport | None:
    """Returns the rewards of a batch, which its parts may have got one after the other."""
    reports = [part.result() for part in _all(futures, "score.reward")]
    if len(reports) < 2:
        return reports[0] if reports else None
    counts = [len(rollout.completions) // len(reports)] * len(reports)
    return join_reports(reports, counts, len(rollout.group_ids))


def _training(trained: Trained, report: RewardReport | None, row: int) -> Training:
    """Collects what a row was trained with."""

    def known(values: np.ndarray | None) -> float | None:
        return None if values is None or np.isnan(values[row]) else float(values[row])

    advantages = trained.advantages
    each = {} if report is None else report.per_reward
    return Training(
        learned=int(trained.learned[row]),
        reward=None if report is None else known(report.rewards),
        rewards={name: known(values) for name, values in each.items()} or None,
        advantage=known(advantages)
        if advantages is None or advantages.ndim == 1
        else advantages[row],
        agreement=known(trained.by_row.get(AGREEMENT)),
    )


def scorer_metrics(job: Job, plan: Plan) -> dict[str, ScorerMetrics]:
    """Maps roles that score with a model on devices of the run to their metrics of a batch."""
    multiple = plan.inputs.target.width_multiple
    devices = {
        role: RowDevices(sizes.rows, math.lcm(multiple, sizes.context))
        for role, sizes in plan.axes.items()
    }
    metrics: dict[str, ScorerMetrics] = {}
    if "teacher" in devices:
        given = job.config, devices["teacher"], job.tokenizer, job.teacher.open_aligner()
        metrics["teacher"] = partial(teacher_metrics, *given)
    if "reference" in devices:
        metrics["reference"] = lambda rollout, parts, _: {
            "reference/padding": scored_padding(rollout, parts, devices["reference"])
        }
    return metrics
