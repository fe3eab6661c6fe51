"""Makes the row of metrics of each step: waits for the step's futures, judges completions, and
hands the row to everything that stores or shows it.

A *row* here is a line of `metrics.jsonl`, except in `RowDevices` and `Trained.by_row`, where it is
a sequence of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from jaxrl.checkpoint.writer import CheckpointWriter
from jaxrl.process.compilations import Compilations
from jaxrl.profile.traces import Profile
from jaxrl.run.context import RunContext
from jaxrl.run.evaluation import evaluation_row
from jaxrl.runtime.worker import Future, Stopped, Wait, WorkerGroup
from jaxrl.telemetry.metrics import MetricsWriter, Sample, SamplesWriter
from jaxrl.telemetry.timeline import Timeline
from jaxrl.telemetry.trackers import Trackers
from jaxrl.types import Completion, Rollout, Row, Trained

SCORED = {"teacher": "score", "reference": "reference", "reward": "reward", "grouper": "embed"}
"""Role -> the name of its time in a row."""
Futures = Mapping[str, Future[Any]]
"""Those of one row, by what they are: `rollout`, `update`, `score.ROLE` ..."""
AGREEMENT = "distill/top1_agreement"
"""Metric that the actor also reports per sequence of the batch; printed with the samples."""


ScorerMetrics = Callable[[Rollout, int, Sequence[str]], dict[str, float]]
"""(rollout, parts in which a role scored it, messages of its rewards) -> the role's metrics."""


@dataclass
class Reporter:
    """Makes the row of each step, and hands it to everything that shows or keeps rows."""

    context: RunContext
    """Its `on_step` is called with each row once it is written, and again with a row that is
    amended after an interruption."""
    worker_group: WorkerGroup
    metrics: MetricsWriter
    samples: SamplesWriter
    trackers: Trackers
    timeline: Timeline
    checkpoints: CheckpointWriter
    profile: Profile
    scorers: Mapping[str, ScorerMetrics]
    """Roles that score with a model on devices of the run."""
    wait: Wait = lambda future: future.result()
    """Raises Stopped for a call that the run, asked to end, does not need."""
    first_step_at: float | None = None
    """End of the first update, in `time.monotonic` seconds."""
    _compiled: Compilations = field(default_factory=Compilations)
    """What was compiled until the previous row was written."""
    _last: float | None = None
    """End of the latest update, in `time.monotonic` seconds."""

    def __post_init__(self) -> None:
        self.job, self._notify = self.context.job, self.context.notify

    def row(self, step: int, futures: Futures) -> None:
        """Waits for the futures of a step, then writes and shows its row."""
        if step == 0:
            self._before_training(futures)
        else:
            self._step(step, futures)

    def amend(self, step: int, futures: Futures) -> None:
        """Adds to the last row, written before an interruption, the metrics of these futures."""
        row = self._syncs(step, futures) | self._evaluation(futures)
        last = self.metrics.last or {}
        lacking = {name: value for name, value in row.items() if name not in last}
        if lacking and last.get("step") == step:
            self._written(self.metrics.amend(step, lacking))

    def _written(self, row: Row) -> None:
        """Passes on a row that is now in `metrics.jsonl`."""
        self.checkpoints.row(row)
        self.trackers.write(row["step"], row)
        self.context.console.step(row)
        self.timeline.flush()
        self.profile.row(row)
        self.context.on_step(row)

    def _before_training(self, futures: Futures) -> None:
        """Writes row 0: the first weight sync, and the accuracy of the student and of other roles
        that are evaluated."""
        row = self._syncs(0, futures) | self._evaluation(futures)
        for role in {key.removeprefix("eval.") for key in futures if key.startswith("eval.")}:
            if role != "rollout":
                samples = self.wait(futures[f"eval.{role}"])
                other = evaluation_row(self.job.held_out, samples, self.job.judge)
                row[f"{role}/accuracy"] = other.get("eval/accuracy", float("nan"))
        self._written(self.metrics.write(0, row | self._work(futures)))

    def _step(self, step: int, futures: Futures) -> None:
        rollout: Rollout = self.wait(futures["rollout"])
        trained: Trained = self.wait(futures["update"])  # so everything of the batch has ended
        row = self._batch(rollout, futures) | trained.metrics
        row |= self._syncs(step, futures) | self._evaluation(futures) | self._work(futures)
        row |= self._memory() | self._compilation() | self.checkpoint()
        row["data/epoch"] = step * self.job.config.batch_size / self.job.train.epoch_prompts
        if rollout.policy_version >= 0:
            row["staleness"] = step - 1 - rollout.policy_version
        begin, end = self._last, futures["update"].times.finished
        if begin is None:
            begin = futures["rollout"].times.started
        assert begin is not None and end is not None, "both calls have ended"
        row["time/step_s"], self._last = end - begin, end
        self.first_step_at = self.first_step_at or end
        row["tokens/per_second"] = row["actor/tokens"] / row["time/step_s"]
        self._written(self.metrics.write(step, row))
        rewards = futures["score.reward"].result().rewards if "score.reward" in futures else None
        self._show(step, rollout, rewards, trained.by_row.get(AGREEMENT))

    def _batch(self, rollout: Rollout, futures: Futures) -> dict[str, float]:
        """Computes the metrics of sampling and scoring, with the times of the calls."""
        lengths = [len(completion.tokens) for completion in rollout.completions]
        cut = [completion.finish_reason == "length" for completion in rollout.completions]
        sampled = rollout.policy_version >= 0 or rollout.decode_steps > 0  # by policy or teacher
        row = {
            "policy_version": float(rollout.policy_version),
            "rollout/completion_tokens_mean": float(np.mean(lengths)),
            "rollout/truncated_fraction": float(np.mean(cut)),
            "tokens/generated": float(sum(c.sampled.sum() for c in rollout.completions if sampled)),
            "rollout/decode_steps": float(rollout.decode_steps),
            "time/rollout_s": futures["rollout"].times.seconds,
            "time/update_s": futures["update"].times.seconds,
        }
        if self.job.config.rollout.cache_tokens is not None and sampled:
            row["rollout/sent_back"] = float(rollout.sent_back)
        if self.job.config.environment.name is not None and sampled:
            row |= _episode_metrics(rollout)
            for note in rollout.notes:
                self._notify(note)
            for failure in _failures(rollout.completions)[:1]:
                self._notify(
                    f"environment: {row['environment/failures'] + row['environment/timeouts']:.0f}"
                    f" of {len(rollout.completions)} episodes failed and have no reward; the first,"
                    f" {failure}"
                )
        for role, name in SCORED.items():
            parts = [future for key, future in futures.items() if _scored_by(key) == role]
            if parts:
                row[f"time/{name}_s"] = sum(part.times.seconds for part in parts)
            if parts and role in self.scorers:
                rewards = futures.get("score.reward")
                messages = rewards.result().messages if rewards is not None else ()
                row |= self.scorers[role](rollout, len(parts), messages)
        for key in ("score.reward", "score.grouper"):
            if key not in futures:
                continue
            report = futures[key].result()
            for note in report.notes:
                self._notify(note)
            row |= getattr(report, "metrics", {})
        return row

    def _work(self, futures: Futures) -> dict[str, float]:
        """Computes the overhead of the calls of a row: seconds to build roles, bytes moved by
        offloading."""
        for key, future in futures.items():
            if future.times.made_s is not None:
                role = _scored_by(key) or key.rpartition(".")[2]
                self._notify(f"{role}: made on its first use, in {future.times.made_s:.1f} s")
        moves = [move for future in futures.values() for move in future.times.moves]
        if not moves:
            return {}
        return {
            "offload/to_host_bytes": float(sum(m.nbytes for m in moves if m.to == "host")),
            "offload/to_device_bytes": float(sum(m.nbytes for m in moves if m.to == "device")),
            "time/offload_s": sum(move.waited for move in moves),
        }

    def _syncs(self, version: int, futures: Futures) -> dict[str, float]:
        """Returns the metrics of the weight syncs to the rollout and to a teacher that follows the
        policy."""
        row: dict[str, float] = {}
        for role in [key.removeprefix("load.") for key in futures if key.startswith("load.")]:
            taken = self._value(futures, f"load.{role}")
            if taken is None:
                continue
            sent, loaded = futures[f"publish.{role}"].times, futures[f"load.{role}"].times
            seconds, size = sent.seconds + loaded.seconds, taken["weights/sync_bytes"]
            if role != "rollout":
                row[f"time/{role}_sync_s"] = seconds
                row[f"weights/{role}_sync_bytes"] = size
                continue
            speed = size / max(seconds, 1e-9) / 1e9
            row |= taken | {"time/weight_sync_s": seconds, "weights/sync_gbps": speed}
            if sent.started is not None and loaded.finished is not None:
                self._notify.to_log(f"weight sync {version}: start at {_clock(sent.started)}")
                self._notify.to_log(
                    f"weight sync {version}: end at {_clock(loaded.finished)}, {seconds:.3f} s,"
                    f" {size / 1e6:.1f} MB, {speed:.2f} GB/s"
                )
        return row

    def _evaluation(self, futures: Futures) -> dict[str, float]:
        samples = self._value(futures, "eval.rollout")
        if samples is None:
            return {}
        row = evaluation_row(self.job.held_out, samples, self.job.judge)
        return row | {"time/evaluate_s": futures["eval.rollout"].times.seconds}

    def _value(self, futures: Futures, key: str) -> Any:
        """Waits for the value of a call. None if there was no such call, or if the run is ending
        and does not need it; a resumed run adds what is missing to the row (`amend`)."""
        if key not in futures:
            return None
        try:
            return self.wait(futures[key])
        except Stopped:
            return None

    def checkpoint(self) -> dict[str, float]:
        """Returns the metrics of the newest checkpoint finished since the last call, or {} if there
        is none. Draws all finished ones in the timeline."""
        row: dict[str, float] = {}
        for written in self.checkpoints.written():
            row["checkpoint/step"] = float(written.step)
            row["checkpoint/bytes"] = float(written.nbytes)
            row["time/checkpoint_s"] = written.finished - written.started
            span = (f"write {written.step}", written.started, written.finished)
            self.timeline.span("checkpoints", *span, bytes=written.nbytes)
        return row

    def _compilation(self) -> dict[str, float]:
        before, self._compiled = self._compiled, self.worker_group.compiled()
        new = self._compiled.since(before)
        return {"compile/programs": float(new.programs), "time/compile_s": new.seconds}

    def _memory(self) -> dict[str, float]:
        """Returns the peak bytes of each role's fullest device: measured, or as planned if
        measuring is impossible."""
        row, peaks = {}, self.worker_group.peaks()
        for role, planned in self.context.plan.peaks.items():
            row[f"memory/{role}/peak_bytes"] = float(peaks.get(role, planned))
            row[f"memory/{role}/planned"] = float(role not in peaks)
        return row

    def _show(
        self, step: int, rollout: Rollout, rewards: np.ndarray | None, agreement: np.ndarray | None
    ) -> None:
        """Shows some samples; rewards and agreement with the teacher are [B], or None."""
        count = min(self.job.config.logging.samples, len(rollout.completions))
        stride = max(1, len(rollout.completions) // max(count, 1))
        rows = range(0, len(rollout.completions), stride)[:count]
        samples = [
            Sample.of(
                rollout.prompts[i],
                rollout.completions[i],
                step=step,
                split="train",
                policy_version=rollout.policy_version,
                score=self.job.judge(rollout.completions[i].text, rollout.prompts[i]),
                reward=_value_at(rewards, i),
                agreement=_value_at(agreement, i),
            )
            for i in rows
        ]
        if samples:
            self.samples.write(samples)
            self.trackers.samples(samples)
            self.context.console.samples(samples)


def _scored_by(key: str) -> str | None:
    """Returns the role of a future whose key is `score.ROLE` or `score.ROLE.PART`."""
    kind, _, rest = key.partition(".")
    return rest.partition(".")[0] if kind == "score" else None


def _value_at(values: np.ndarray | None, i: int) -> float | None:
    """Returns entry i of [B], or None if there are no values, or none for it."""
    return None if values is None or np.isnan(values[i]) else float(values[i])


def _clock(at: float) -> str:
    """Returns the local time of day at `time.monotonic` seconds `at`."""
    when = datetime.fromtimestamp(time.time() - (time.monotonic() - at))
    return when.strftime("%H:%M:%S.%f")[:-3]


def _episode_metrics(rollout: Rollout) -> dict[str, float]:
    episodes = rollout.completions
    late = sum(failure.startswith("timeout") for failure in _failures(episodes))
    turns = [sum(turn.role == "assistant" for turn in episode.turns) for episode in episodes]
    answers = [float((~episode.sampled).sum()) for episode in episodes]
    return {
        "environment/turns_mean": float(np.mean(turns)),
        "environment/answer_tokens_mean": float(np.mean(answers)),
        "environment/failures": float(len(_failures(episodes)) - late),
        "environment/timeouts": float(late),
        "time/environment_s": rollout.waited_s,
    }


def _failures(episodes: Sequence[Completion]) -> list[str]:
    return [episode.failure for episode in episodes if episode.failure is not None]
