"""Train a policy: distil a teacher on the student's own samples, or fine-tune on data.

Without --config the built-in quickstart runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl import cli
from jaxrl.algorithms import ALGORITHMS
from jaxrl.callable_module import make_callable
from jaxrl.compile_cache import enable_compile_cache
from jaxrl.config import Config
from jaxrl.data.tokenizer import decode
from jaxrl.errors import UserError
from jaxrl.launch import Job, Roles, make_job, start_roles
from jaxrl.loop import Loop
from jaxrl.model import FINAL
from jaxrl.models.hf import save_hf
from jaxrl.plan import Plan, make_plan
from jaxrl.reporting import Reporter
from jaxrl.runtime.local import done_future
from jaxrl.sharding.mesh import carve, ensure_devices
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.metrics import METRICS_FILE, SAMPLES_FILE, MetricsWriter, SamplesWriter


@dataclass(frozen=True)
class Result:
    """What a run ends with."""

    run_dir: Path
    metrics: list[dict[str, Any]]
    """The rows of `metrics.jsonl`."""

    @property
    def final_eval(self) -> float | None:
        """Accuracy of the last weights on the held-out prompts; None without an evaluation."""
        return self.metrics[-1].get("eval/accuracy")


def train(config: Config) -> Result:
    """Runs `config` to its end.

    Raises:
        UserError: bad input; nothing has been written then, or what was trained is in the run
            directory.
    """
    started = time.monotonic()
    job, plan = prepare_run(config)
    run_dir = make_run_dir(config)
    with Console(config.logging, steps=config.steps) as console:
        for text in (plan.text(), f"run directory: {run_dir}", *data_notes(job)):
            console.message(text)
        meshes = carve(plan.devices, plan.placement, plan.axes)
        roles = start_roles(job, plan.placement, meshes, run_dir, console.message)
        try:
            (run_dir / "config.yaml").write_text(config.dump())
            (run_dir / "plan.txt").write_text(plan.text())
            with (
                MetricsWriter(run_dir / METRICS_FILE) as metrics,
                SamplesWriter(run_dir / SAMPLES_FILE) as samples,
            ):
                reporter = make_reporter(job, console, metrics, samples, meshes)
                make_loop(job, roles, reporter).run()
                export(job, roles, run_dir / FINAL)
        finally:
            roles.stop()
        for line in summary(metrics.rows, run_dir, started, reporter.first_step_at):
            console.message(line)
        return Result(run_dir, metrics.rows)


def prepare_run(config: Config) -> tuple[Job, Plan]:
    """All that can be checked before a weight is read."""
    enable_compile_cache(config.compile_cache)
    plan = make_plan(config, ALGORITHMS[config.algorithm].roles, ensure_devices)
    return make_job(config), plan


def make_run_dir(config: Config) -> Path:
    """The folder of the run. A given one must not hold a run; a default one gets a number where it
    does.
    """
    path = config.run_path
    if (path / METRICS_FILE).exists() and config.run_dir is not None:
        raise UserError(f"run_dir={path} holds a run already: name another, or move it away")
    number = 1
    while (path / METRICS_FILE).exists():
        number += 1
        path = config.run_path.with_name(f"{config.run_path.name}-{number}")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir={path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"run_dir={path} cannot be written to: name another")
    return path


def data_notes(job: Job) -> list[str]:
    """What a reader should know of the data: sizes, and prompts that were left out."""
    limit = job.config.max_prompt_tokens
    notes = [f"data.train: {job.train.epoch_prompts} prompts"]
    if job.train.dropped:
        notes[0] += f"; {job.train.dropped} are longer than max_prompt_tokens={limit}: left out"
    if job.held_out is not None:
        notes.append(f"data.eval: {len(job.held_out.prompts)} prompts")
        if job.held_out.dropped:
            notes[1] += f"; {job.held_out.dropped} too long or repeated: left out"
    return notes


def make_reporter(
    job: Job, console: Console, metrics: MetricsWriter, samples: SamplesWriter, meshes: Any
) -> Reporter:
    batch, rows = job.config.batch_size, job.train.epoch_prompts
    return Reporter(
        job.config,
        console,
        metrics,
        samples,
        held_out=job.held_out.prompts if job.held_out else (),
        judge=job.judge,
        epoch=lambda step: step * batch / rows,
        devices={role: tuple(mesh.devices.flat) for role, mesh in meshes.items()},
    )


def make_loop(job: Job, roles: Roles, reporter: Reporter) -> Loop:
    config = job.config
    return Loop(
        config,
        roles.handles,
        job.train,
        job.held_out.prompts if job.held_out else (),
        reporter,
        packing={
            "pad_id": job.pad_id,
            "max_prompt_tokens": config.max_prompt_tokens,
            "max_new_tokens": config.max_new_tokens,
            "row_multiple": roles.row_multiple,
            "decode": partial(decode, job.tokenizer),
        },
        value=done_future,
    )


def export(job: Job, roles: Roles, path: Path) -> None:
    """The trained policy as a Hugging Face folder with its tokenizer."""
    params = roles.handles["actor"].call("parameters", deadline=job.config.deadlines.startup)
    save_hf(
        path,
        job.student.config,
        params.result(),
        dtype=job.config.actor.param_dtype,
        tokenizer_from=job.student.tokenizer_path,
    )


def summary(
    rows: Sequence[dict[str, Any]], run_dir: Path, started: float, first_step: float | None
) -> list[str]:
    """The last words of a run."""
    took = time.monotonic() - started
    lines = [f"done: {rows[-1]['step']} steps in {took:.0f} s"]
    if first_step is not None:
        lines[0] += f", the first after {first_step - started:.0f} s"
    first, last = rows[0].get("eval/accuracy"), rows[-1].get("eval/accuracy")
    if first is not None and last is not None:
        line = f"accuracy on held-out prompts: {first:.1%} before, {last:.1%} after"
        teacher = rows[0].get("teacher/accuracy")
        lines.append(line if teacher is None else f"{line}; the teacher has {teacher:.1%}")
    lines.append(f"model: {run_dir / FINAL}")
    return lines


def main(argv: Sequence[str]) -> None:
    arguments = cli.parse_run(argv, prog="python -m jaxrl.train", description=__doc__ or "")
    if arguments.dry_run:
        config = arguments.config
        print(make_plan(config, ALGORITHMS[config.algorithm].roles, ensure_devices).text())
        return
    train(arguments.config)


make_callable(__name__, train)

if __name__ == "__main__":
    sys.exit(cli.run(main))
