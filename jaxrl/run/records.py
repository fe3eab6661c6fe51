"""Everything that a run writes while it trains: rows, samples, trackers, timeline, checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from jaxrl.checkpoint import store
from jaxrl.checkpoint.rollouts import load_rollout
from jaxrl.checkpoint.writer import CheckpointWriter
from jaxrl.errors import UserError
from jaxrl.formats.hf import write_description
from jaxrl.plan import Plan
from jaxrl.profile.traces import PROFILE_DIR, Profile, steps_to_profile
from jaxrl.run.launch import Job
from jaxrl.run.loop import Resumed, evaluates
from jaxrl.run.reporting import Reporter
from jaxrl.run.run_dir import RunDir
from jaxrl.runtime.worker import Crew, Handle
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.log import RunLog
from jaxrl.telemetry.metrics import (
    METRICS_FILE,
    SAMPLES_FILE,
    MetricsWriter,
    SamplesWriter,
)
from jaxrl.telemetry.timeline import TIMELINE_FILE, Timeline
from jaxrl.telemetry.trackers import CLOSE_S, open_trackers

HURRY_S = 3.0
"""Longest wait for the trackers at the end of a run that was interrupted, or failed."""


class Records:
    """The files and trackers of one run in this process, and the reporter that fills them."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        run: RunDir,
        console: Console,
        crew: Crew,
        log: RunLog,
        tell: Callable[[str], None],
        on_row: Callable[[Mapping[str, Any]], None],
        describe: Mapping[str, str],
    ):
        """
        Args:
            log: takes what only the file is told.
            tell: takes what the user should know.
            on_row: called with each row once it is written.
            describe: name -> text of the files that describe the run.
        """
        self._log, self._tell, self._described = log, tell, describe
        self._job, self._run = job, run
        self._checking = threading.Lock()
        self._removed = 0
        self._stack = ExitStack()
        config, step = job.config, run.step
        resumed = run.checkpoint is not None
        profiled = steps_to_profile(config, step, tell)
        after = step if resumed else None
        metrics = MetricsWriter(run.path / METRICS_FILE, after, tell)
        samples = SamplesWriter(run.path / SAMPLES_FILE, after, tell)
        self._metrics, self._samples = metrics, samples
        self._stack.enter_context(metrics)
        self._stack.enter_context(samples)
        timeline = run.path / TIMELINE_FILE if config.logging.timeline else None
        self._timeline = Timeline(timeline, resumed, tell)
        self._stack.enter_context(self._timeline)
        self._timeline.watch_states(crew.states)
        folder = run.path / PROFILE_DIR
        self.profile = Profile(job, plan, crew, folder, profiled, tell)

        def written(row: Mapping[str, Any]) -> None:
            self.profile.row(row)
            on_row(row)

        trackers = open_trackers(
            config.logging,
            config.name,
            run.path,
            config.model_dump(mode="json"),
            after,
            tell,
        )
        self._stack.push(lambda failed, *_: trackers.close(HURRY_S if failed else CLOSE_S))
        self.checkpoints = CheckpointWriter(
            run.path,
            config,
            job.train.fingerprint,
            partial(describe_policy, job),
            tell,
            run.depends,
            self.check_folder,
        )
        self.checkpoints.newest = step or None
        self._stack.callback(self.checkpoints.stop)
        batch, prompts = config.batch_size, job.train.epoch_prompts
        self.reporter = Reporter(
            config,
            console,
            metrics,
            samples,
            trackers,
            self._timeline,
            self.checkpoints,
            sets=job.held_out,
            judge=job.judge,
            epoch=lambda trained: trained * batch / prompts,
            peaks=crew.peaks,
            planned=plan.peaks,
            log=log.write,
            on_row=written,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failed: Any) -> None:
        self._stack.__exit__(*failed)

    def check_folder(self) -> int:
        """Before a checkpoint begins, before it is completed, and at the end: writes again what
        somebody removed. Raises RunError where another process has the folder.

        Returns how often files of this run were found removed.
        """
        with self._checking:
            lock_removed = self._run.lock is not None and self._run.lock.check()
            files = (self._metrics, self._samples, self._timeline, self._log)
            restored = [file.restore() for file in files]  # each of them, so no `any` here
            with suppress(UserError):  # a disk that refuses: the save says so
                self._run.write_missing(self._described)
            if any(restored):
                self._removed += 1
                self.checkpoints.forget_removed()
                self._tell(
                    f"files of {self._run.path} were removed while the run worked. metrics.jsonl,"
                    " samples.jsonl, timeline.json, log.txt and the config are restored; what else"
                    " was removed, such as checkpoints and TensorBoard's files, is lost"
                )
            elif lock_removed:
                self._tell(f"the lock of {self._run.path} was removed: it is taken again")
            return self._removed

    def first_and_last(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The first and the last row of the run."""
        none = {"step": self._run.step}
        return self._metrics.first or none, self._metrics.last or none

    def watch(self, crew: Crew) -> dict[str, Handle]:
        """The roles, their calls drawn in the timeline, and counted where they are profiled."""
        handles = {role: self._timeline.watch(role, crew.handle(role)) for role in crew.roles}
        return {role: self.profile.watch(role, handle) for role, handle in handles.items()}

    def finish_checkpoints(self) -> None:
        """Waits for what is still being written."""
        self.checkpoints.close(self._job.config.deadlines.checkpoint)
        self.reporter.checkpoint()
        self.check_folder()

    def resumed(self, packing: Mapping[str, Any]) -> Resumed | None:
        """Where the loop goes on; None at the beginning of a run.

        Args:
            packing: arguments of `make_rollout`, for the meshes of this run.
        """
        checkpoint = self._run.checkpoint
        if checkpoint is None:
            return None
        rollouts = {
            index: load_rollout(
                checkpoint.path / store.rollout_file(index), self._job.train.batch(index), packing
            )
            for index in checkpoint.manifest.in_flight
            if index < self._job.config.steps
        }
        return Resumed(self._run.step, rollouts, self._evaluated())

    def _evaluated(self) -> bool:
        """Whether the row of the step to go on from has its evaluation, or needs none."""
        step = self._run.step
        due = bool(self._job.held_out) and evaluates(self._job.config, step)
        row = self._metrics.last
        # A disk that took the checkpoint and not the row has left nothing to complete.
        return not due or row is None or row["step"] != step or "eval/unjudged" in row


def describe_policy(job: Job, folder: Path) -> None:
    """The config and the tokenizer of the policy: what its weights are read with."""
    dtype, tokenizer = job.config.actor.param_dtype, job.student.tokenizer_path
    write_description(folder, job.student.config, dtype, tokenizer)
