"""From the futures of a step to its row: waits, judges completions, counts, writes, shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxrl.config import Config
from jaxrl.runtime.worker import Future
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.metrics import MetricsWriter, Sample, SamplesWriter
from jaxrl.types import Completion, Prompt, Rollout

Judge = Callable[[str, Prompt], float | None]
"""(completion text, its prompt) -> score in [0, 1]; None where it cannot be judged."""


class Reporter:
    """Everything that a run tells, one row a step."""

    def __init__(
        self,
        config: Config,
        console: Console,
        metrics: MetricsWriter,
        samples: SamplesWriter,
        held_out: Sequence[Prompt],
        judge: Judge,
        epoch: Callable[[int], float],
        devices: Mapping[str, Sequence[jax.Device]],
    ):
        """
        Args:
            epoch: batches trained -> passes over the data.
            devices: role -> its devices, for their peak memory where the platform tells it.
        """
        self.config, self.console, self.metrics, self.samples = config, console, metrics, samples
        self._held_out, self._judge, self._epoch, self._devices = held_out, judge, epoch, devices
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
        row = self._sync(futures) | self._evaluation(futures)
        if "teacher" in futures:
            row["teacher/accuracy"] = self._accuracy(futures["teacher"].result())
        self.console.step(self.metrics.write(step, row))

    def _step(self, step: int, futures: Mapping[str, Future]) -> None:
        rollout: Rollout = futures["rollout"].result()
        report = futures["update"].result()  # so that everything of the batch has ended
        row = self._batch(rollout, futures) | report
        row |= self._sync(futures) | self._evaluation(futures) | self._memory()
        row["data/epoch"] = self._epoch(step)
        row["staleness"] = step - 1 - max(rollout.policy_version, 0)
        if rollout.policy_version < 0:
            del row["staleness"]
        begin, end = self._last, futures["update"].finished
        if begin is None:
            begin = futures["rollout"].started
        assert begin is not None and end is not None, "both calls have ended"
        row["time/step_s"], self._last = end - begin, end
        self.first_step_at = self.first_step_at or end
        row["tokens/per_second"] = row["actor/tokens"] / row["time/step_s"]
        self.console.step(self.metrics.write(step, row))
        self._show(step, rollout)

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
            "time/rollout_s": futures["rollout"].seconds,
            "time/update_s": futures["update"].seconds,
        }
        if "score" in futures:
            row["time/score_s"] = futures["score"].seconds
        return row

    def _sync(self, futures: Mapping[str, Future]) -> dict[str, float]:
        if "sync" not in futures:
            return {}
        told: dict[str, float] = futures["sync"].result()
        return told

    def _evaluation(self, futures: Mapping[str, Future]) -> dict[str, float]:
        if "eval" not in futures:
            return {}
        groups: list[list[Completion]] = futures["eval"].result()
        completions = [completion for group in groups for completion in group]
        return {
            "eval/accuracy": self._accuracy(groups),
            "eval/mean_completion_tokens": float(np.mean([len(c.tokens) for c in completions])),
            "eval/truncated_fraction": float(
                np.mean([c.finish_reason == "length" for c in completions])
            ),
            "time/evaluate_s": futures["eval"].seconds,
        }

    def _accuracy(self, groups: Sequence[Sequence[Completion]]) -> float:
        """Mean score over prompts and samples (mean@k); what cannot be judged does not count."""
        scores = [
            self._judge(completion.text, prompt)
            for prompt, group in zip(self._held_out, groups, strict=True)
            for completion in group
        ]
        judged = [score for score in scores if score is not None]
        return float(np.mean(judged)) if judged else float("nan")

    def _memory(self) -> dict[str, float]:
        row = {}
        for role, devices in self._devices.items():
            stats = [device.memory_stats() for device in devices]
            peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
            if peaks:
                row[f"memory/{role}/peak_bytes"] = float(max(peaks))
        return row

    def _show(self, step: int, rollout: Rollout) -> None:
        count = min(self.config.logging.samples, len(rollout.completions))
        stride = max(1, len(rollout.completions) // max(count, 1))
        rows = range(0, len(rollout.completions), stride)[:count]
        samples = [self._sample(step, rollout, i) for i in rows]
        if samples:
            self.samples.write(samples)
            self.console.samples(samples)

    def _sample(self, step: int, rollout: Rollout, i: int) -> Sample:
        prompt, completion = rollout.prompts[i], rollout.completions[i]
        return Sample(
            step=step,
            split="train",
            prompt=prompt.text,
            completion=completion.text,
            finish_reason=completion.finish_reason,
            tokens=len(completion.tokens),
            policy_version=rollout.policy_version,
            answer=prompt.answer,
            score=self._judge(completion.text, prompt),
        )
