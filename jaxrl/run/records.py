"""Everything that a run writes while it trains: rows, samples, trackers, timeline, checkpoints."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from jaxrl.algorithms.methods import holds_samples
from jaxrl.checkpoint import store
from jaxrl.checkpoint.rollouts import load_rollout
from jaxrl.checkpoint.writer import CheckpointWriter
from jaxrl.errors import UserError
from jaxrl.formats import peft
from jaxrl.formats.hf import write_description
from jaxrl.models.packing import RowDevices
from jaxrl.profile.stages import RunModels
from jaxrl.profile.traces import PROFILE_DIR, Profile, steps_to_profile
from jaxrl.roles.microbatch import scored_padding
from jaxrl.run.context import RunContext
from jaxrl.run.job import Job
from jaxrl.run.loop import Resumed, evaluates
from jaxrl.run.reporting import Reporter, ScorerMetrics
from jaxrl.run.run_dir import RunDir
from jaxrl.runtime.worker import Handle, WorkerGroup
from jaxrl.teacher.local_teacher import teacher_metrics
from jaxrl.telemetry.lines import RunLog
from jaxrl.telemetry.metrics import METRICS_FILE, SAMPLES_FILE, MetricsWriter, SamplesWriter
from jaxrl.telemetry.timeline import TIMELINE_FILE, Timeline
from jaxrl.telemetry.trackers import CLOSE_S, RunFacts, open_trackers
from jaxrl.types import Rollout, Row

HURRY_S = 3.0
"""Longest wait for the trackers at the end of a run that was interrupted, or failed."""


class Records:
    """The files and trackers of one attempt in this process, and the reporter that fills them."""

    def __init__(
        self,
        context: RunContext,
        run: RunDir,
        worker_group: WorkerGroup,
        log: RunLog,
        description: dict[str, str],
    ):
        """
        Args:
            description: name -> text of the files that describe the run.
        """
        self._job, self._notify, self._run = context.job, context.notify, run
        self._log, self._description = log, description
        self._checking = threading.Lock()
        self._removed = 0
        self._stack = ExitStack()
        job, config, notify = context.job, context.job.config, context.notify
        after = None if run.checkpoint is None else run.step
        profiled = steps_to_profile(config, run.step, notify)
        self._metrics = MetricsWriter(run.path / METRICS_FILE, after, notify)
        self._samples = SamplesWriter(run.path / SAMPLES_FILE, after, notify)
        timeline = run.path / TIMELINE_FILE if config.logging.timeline else None
        self._timeline = Timeline(timeline, after is not None, notify)
        for file in (self._metrics, self._samples, self._timeline):
            self._stack.callback(file.close)
        self._timeline.watch_states(worker_group.states)
        folder = run.path / PROFILE_DIR
        teachers = [source.config for source in job.teachers.values()]
        models = RunModels(config, job.student.config, teachers, job.vocab_size)
        self.profile = Profile(
            models, job.train, context.plan, worker_group, folder, profiled, notify
        )
        facts = RunFacts(config.name, run.path, config.model_dump(mode="json"), after, notify)
        trackers = open_trackers(config.logging, facts)
        self._stack.push(lambda failed, *_: trackers.close(HURRY_S if failed else CLOSE_S))
        self.checkpoints = CheckpointWriter(
            run.path,
            config,
            job.train.fingerprint,
            partial(_describe_policy, job),
            notify,
            run.depends,
            self._check_folder,
        )
        self.checkpoints.newest = run.step or None
        self._stack.callback(self.checkpoints.stop)
        self.reporter = Reporter(
            context,
            worker_group,
            self._metrics,
            self._samples,
            trackers,
            self._timeline,
            self.checkpoints,
            self.profile,
            _scorer_metrics(context),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failed: Any) -> None:
        self._stack.__exit__(*failed)

    def first_and_last(self) -> tuple[Row, Row]:
        """Returns the first and the last row of the run."""
        none = {"step": self._run.step}
        return self._metrics.first or none, self._metrics.last or none

    def watch(self, worker_group: WorkerGroup) -> dict[str, Handle]:
        """Returns the roles, whose calls are drawn in the timeline, and counted where they are
        profiled."""
        return {
            role: self.profile.watch(role, self._timeline.watch(role, worker_group.handle(role)))
            for role in worker_group.roles
        }

    def finish_checkpoints(self) -> None:
        """Waits for what is still being written."""
        self.checkpoints.close(self._job.config.deadlines.checkpoint)
        self.reporter.checkpoint()
        self._check_folder()

    def resumed(self, packing: Mapping[str, int]) -> Resumed | None:
        """Returns where the loop resumes, or None at the beginning of a run.

        Args:
            packing: arguments of `make_rollout`, for the meshes of this run.
        """
        checkpoint, config, step = self._run.checkpoint, self._job.config, self._run.step
        if checkpoint is None:
            return None
        rollouts = {}
        for index in checkpoint.manifest.in_flight:
            if index < config.steps:
                prompts = self._job.train.batch(index)
                if holds_samples(config, index):
                    prompts = [prompt.to_sample for prompt in prompts]
                path = checkpoint.path / store.rollout_file(index)
                rollouts[index] = load_rollout(path, prompts, packing)
        due, row = bool(self._job.held_out) and evaluates(config, step), self._metrics.last
        # A disk that took the checkpoint and not the row has left nothing to complete.
        incomplete = row is not None and row["step"] == step and "eval/unjudged" not in row
        return Resumed(step, rollouts, evaluated=not (due and incomplete))

    def _check_folder(self) -> int:
        """Checks the folder before a checkpoint begins, before it is completed, and at the end:
        writes again what somebody removed. Raises RunError if another process has the folder.

        Returns how often files of this run were found removed.
        """
        with self._checking:
            lock_removed = self._run.lock is not None and self._run.lock.check()
            files = (self._metrics, self._samples, self._timeline, self._log)
            restored = [file.restore() for file in files]  # each of them, so no `any` here
            with suppress(UserError):  # a disk that refuses: the save says so
                self._run.write_missing(self._description)
            if any(restored):
                self._removed += 1
                self.checkpoints.forget_removed()
                self._notify(
                    f"files of {self._run.path} were removed while the run worked. metrics.jsonl,"
                    " samples.jsonl, timeline.json, log.txt and the config are restored; what else"
                    " was removed, such as checkpoints and TensorBoard's files, is lost"
                )
            elif lock_removed:
                self._notify(f"the lock of {self._run.path} was removed: it is taken again")
            return self._removed


def _describe_policy(job: Job, folder: Path) -> None:
    """Writes the config and the tokenizer of the policy: what its weights are read with."""
    dtype, tokenizer = job.config.actor.param_dtype, job.student.tokenizer_path
    write_description(folder, job.student.config, dtype, tokenizer)
    if job.student.config.lora is not None:
        peft.describe(folder, job.student.config, job.student.base_name)


def _scorer_metrics(context: RunContext) -> dict[str, ScorerMetrics]:
    """Returns `Reporter.scorers`."""
    job, plan = context.job, context.plan
    multiple = plan.inputs.target.width_multiple
    metrics: dict[str, ScorerMetrics] = {}
    for role, sizes in plan.axes.items():
        devices = RowDevices(sizes.rows, math.lcm(multiple, sizes.context))
        if role == "teacher":
            batch = job.config, devices, job.tokenizer, job.aligner
            metrics[role] = partial(teacher_metrics, *batch)
        elif role == "reference":
            metrics[role] = partial(_reference_metrics, devices)
    return metrics


def _reference_metrics(
    devices: RowDevices, rollout: Rollout, parts: int, messages: Sequence[str]
) -> dict[str, float]:
    return {"reference/padding": scored_padding(rollout, parts, devices)}
