"""From the futures of a step to its row: waits, judges completions, counts, writes, shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from jaxrl.checkpoint.writer import CheckpointWriter
from jaxrl.config.schema import Config
from jaxrl.data.stream import EvalSet
from jaxrl.roles.actor import Trained
from jaxrl.run.evaluation import Judge, evaluation_row
from jaxrl.runtime.worker import Future, Stopped
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.metrics import MetricsWriter, Sample, SamplesWriter
from jaxrl.telemetry.timeline import Timeline
from jaxrl.telemetry.trackers import Trackers
from jaxrl.types import Rollout

SCORED = {"teacher": "score", "reference": "reference", "reward": "reward", "grouper": "embed"}
"""Role -> the name of its time in a row."""
AGREEMENT = "distill/top1_agreement"
"""What the actor tells of each row, for the samples."""


class Reporter:
    """Everything that a run tells, one row a step."""

    def __init__(
        self,
        config: Config,
        console: Console,
        metrics: MetricsWriter,
        samples: SamplesWriter,
        trackers: Trackers,
        timeline: Timeline,
        checkpoints: CheckpointWriter,
        *,
        sets: Sequence[EvalSet],
        judge: Judge,
        epoch: Callable[[int], float],
        peaks: Callable[[], Mapping[str, int]],
        planned: Mapping[str, int],
        log: Callable[[str], None],
        on_row: Callable[[Mapping[str, Any]], None] = lambda row: None,
    ):
        """
        Args:
            sets: held-out prompts; an evaluation samples those of all sets, one after the other.
            epoch: batches trained -> passes over the data.
            peaks: role -> peak bytes of its fullest device, where the platform tells it.
            planned: role -> the plan's peak bytes on a device of it, where it does not.
            log: takes what only `log.txt` is told.
            on_row: called with each row once it is written; with one that was completed after an
                interruption once more.
        """
        self.config, self.console, self.metrics, self.samples = config, console, metrics, samples
        self._trackers, self._timeline, self._checkpoints = trackers, timeline, checkpoints
        self._sets, self._judge, self._epoch = sets, judge, epoch
        self._peaks, self._planned, self._log = peaks, planned, log
        self._on_row = on_row
        self.wait: Callable[[Future], Any] = lambda future: future.result()
        """The value of a call. Raises Stopped for one that the run, asked to end, does not need."""
        self._last: float | None = None
        """`time.monotonic` seconds at the end of the latest update."""
        self.first_step_at: float | None = None
        """The same, of the first update."""

    def row(self, step: int, futures: Mapping[str, Future]) -> None:
        """Waits for the futures of a step, then writes and shows its row."""
        write = self._start if step == 0 else self._step
        write(step, futures)

    def _start(self, step: int, futures: Mapping[str, Future]) -> None:
        """Before training: weights in place, accuracy of the student and of the teacher."""
        row = self._sync(step, futures) | self._evaluation(futures)
        if "teacher" in futures:
            teacher = evaluation_row(self._sets, self.wait(futures["teacher"]), self._judge)
            row["teacher/accuracy"] = teacher.get("eval/accuracy", float("nan"))
        self._write(step, row | self._work(futures))

    def _step(self, step: int, futures: Mapping[str, Future]) -> None:
        rollout: Rollout = self.wait(futures["rollout"])
        trained: Trained = self.wait(futures["update"])  # so everything of the batch has ended
        row = self._batch(rollout, futures) | trained.metrics
        row |= self._sync(step, futures) | self._evaluation(futures) | self._work(futures)
        row |= self._memory() | self.checkpoint()
        row["data/epoch"] = self._epoch(step)
        row["staleness"] = step - 1 - max(rollout.policy_version, 0)
        if rollout.policy_version < 0:
            del row["staleness"]
        begin, end = self._last, futures["update"].times.finished
        if begin is None:
            begin = futures["rollout"].times.started
        assert begin is not None and end is not None, "both calls have ended"
        row["time/step_s"], self._last = end - begin, end
        self.first_step_at = self.first_step_at or end
        row["tokens/per_second"] = row["actor/tokens"] / row["time/step_s"]
        self._write(step, row)
        told = futures.get("score.reward")
        rewards = None if told is None else told.result().rewards
        self._show(step, rollout, rewards, trained.by_row.get(AGREEMENT))

    def amend(self, step: int, futures: Mapping[str, Future]) -> None:
        """What the last row, written before an interruption, lacks of these."""
        row = self._sync(step, futures) | self._evaluation(futures)
        last = self.metrics.last or {}
        lacking = {name: value for name, value in row.items() if name not in last}
        if lacking and last.get("step") == step:
            self._told(self.metrics.amend(step, lacking))

    def _write(self, step: int, row: Mapping[str, float]) -> None:
        self._told(self.metrics.write(step, row))

    def _told(self, row: Mapping[str, Any]) -> None:
        """A row is in `metrics.jsonl`."""
        self._checkpoints.row(row)
        self._trackers.write(row["step"], row)
        self.console.step(row)
        self._timeline.flush()
        self._on_row(row)

    def _batch(self, rollout: Rollout, futures: Mapping[str, Future]) -> dict[str, float]:
        lengths = [len(completion.tokens) for completion in rollout.completions]
        cut = [completion.finish_reason == "length" for completion in rollout.completions]
        sampled = rollout.policy_version >= 0 or self.config.distill.seq_kd
        row = {
            "policy_version": float(rollout.policy_version),
            "rollout/completion_tokens_mean": float(np.mean(lengths)),
            "rollout/truncated_fraction": float(np.mean(cut)),
            "tokens/generated": float(sum(lengths)) if sampled else 0.0,
            "rollout/decode_steps": float(rollout.decode_steps),
            "time/rollout_s": futures["rollout"].times.seconds,
            "time/update_s": futures["update"].times.seconds,
        }
        for role, name in SCORED.items():
            parts = [future for key, future in futures.items() if _scored_by(key) == role]
            if parts:
                row[f"time/{name}_s"] = sum(part.times.seconds for part in parts)
        for told in self._told_by_scorers(futures):
            for note in told.notes:
                self._say(note)
            row |= getattr(told, "metrics", {})
        return row

    def _work(self, futures: Mapping[str, Future]) -> dict[str, float]:
        """What the calls of a row cost beside their own work: roles made, memory moved."""
        for key, future in futures.items():
            if future.times.made_s is not None:
                role = _scored_by(key) or key
                self._say(f"{role}: made on its first use, in {future.times.made_s:.1f} s")
        moves = [move for future in futures.values() for move in future.times.moves]
        if not moves:
            return {}
        return {
            "offload/to_host_bytes": float(sum(m.nbytes for m in moves if m.to == "host")),
            "offload/to_device_bytes": float(sum(m.nbytes for m in moves if m.to == "device")),
            "time/offload_s": sum(move.waited for move in moves),
        }

    def _say(self, note: str) -> None:
        self.console.message(note)
        self._log(note)

    def _told_by_scorers(self, futures: Mapping[str, Future]) -> list[Any]:
        """What the roles that also speak to the user said of a batch."""
        spoken = [futures[key] for key in ("score.reward", "score.grouper") if key in futures]
        return [future.result() for future in spoken]

    def _sync(self, version: int, futures: Mapping[str, Future]) -> dict[str, float]:
        """Both halves of a weight sync: what the actor sent, and what the rollout took."""
        if "sync" not in futures:
            return {}
        try:
            told: dict[str, float] = self.wait(futures["sync"])
        except Stopped:  # the last row: the run makes up for it when it resumes
            return {}
        sent, taken = futures["publish"].times, futures["sync"].times
        seconds, size = sent.seconds + taken.seconds, told["weights/sync_bytes"]
        speed = size / max(seconds, 1e-9) / 1e9
        if sent.started is not None and taken.finished is not None:
            self._log(f"weight sync {version}: start at {_clock(sent.started)}")
            self._log(
                f"weight sync {version}: end at {_clock(taken.finished)}, {seconds:.3f} s,"
                f" {size / 1e6:.1f} MB, {speed:.2f} GB/s"
            )
        return told | {"time/weight_sync_s": seconds, "weights/sync_gbps": speed}

    def _evaluation(self, futures: Mapping[str, Future]) -> dict[str, float]:
        if "eval" not in futures:
            return {}
        try:
            samples = self.wait(futures["eval"])
        except Stopped:
            return {}
        row = evaluation_row(self._sets, samples, self._judge)
        return row | {"time/evaluate_s": futures["eval"].times.seconds}

    def checkpoint(self) -> dict[str, float]:
        """The newest of the checkpoints that were finished since this was last asked; all of them
        are drawn in the timeline.
        """
        row: dict[str, float] = {}
        for written in self._checkpoints.written():
            row["checkpoint/step"] = float(written.step)
            row["checkpoint/bytes"] = float(written.nbytes)
            row["time/checkpoint_s"] = written.finished - written.started
            span = (f"write {written.step}", written.started, written.finished)
            self._timeline.span("checkpoints", *span, bytes=written.nbytes)
        return row

    def _memory(self) -> dict[str, float]:
        row, peaks = {}, self._peaks()
        for role, planned in self._planned.items():
            row[f"memory/{role}/peak_bytes"] = float(peaks.get(role, planned))
            row[f"memory/{role}/planned"] = float(role not in peaks)
        return row

    def _show(self, step: int, rollout: Rollout, rewards: Any, agreement: Any) -> None:
        """Some samples; rewards and agreement with the teacher are [B], or None."""
        count = min(self.config.logging.samples, len(rollout.completions))
        stride = max(1, len(rollout.completions) // max(count, 1))
        rows = range(0, len(rollout.completions), stride)[:count]
        samples = [self._sample(step, rollout, i, rewards, agreement) for i in rows]
        if samples:
            self.samples.write(samples)
            self._trackers.samples(samples)
            self.console.samples(samples)

    def _sample(self, step: int, rollout: Rollout, i: int, rewards: Any, agreement: Any) -> Sample:
        prompt, completion = rollout.prompts[i], rollout.completions[i]
        return Sample.of(
            prompt,
            completion,
            step=step,
            split="train",
            policy_version=rollout.policy_version,
            score=self._judge(completion.text, prompt),
            reward=_of_row(rewards, i),
            agreement=_of_row(agreement, i),
        )


def _scored_by(key: str) -> str | None:
    """The role of a future whose key is `score.ROLE` or `score.ROLE.PART`."""
    kind, _, rest = key.partition(".")
    return rest.partition(".")[0] if kind == "score" else None


def _of_row(values: Any, i: int) -> float | None:
    """Entry i of [B]; None where there are no values, or none for it."""
    return None if values is None or np.isnan(values[i]) else float(values[i])


def _clock(at: float) -> str:
    """Local time of day at `time.monotonic` seconds `at`."""
    when = datetime.fromtimestamp(time.time() - (time.monotonic() - at))
    return when.strftime("%H:%M:%S.%f")[:-3]
