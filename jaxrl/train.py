"""Train a policy: distil a teacher on the student's own samples, or fine-tune on data.

Without --config the built-in quickstart runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl import cli
from jaxrl.algorithms import ALGORITHMS
from jaxrl.callable_module import make_callable
from jaxrl.checkpoint.writer import free_gb
from jaxrl.compile_cache import enable_compile_cache
from jaxrl.config import Config
from jaxrl.data.tokenizer import decode
from jaxrl.errors import RunError, UserError
from jaxrl.inputs import held_out_notes
from jaxrl.interrupt import Interrupt, Interrupted
from jaxrl.launch import Job, Roles, make_job, start_roles
from jaxrl.loop import Loop
from jaxrl.model import FINAL
from jaxrl.models.hf import save_hf
from jaxrl.plan import Plan, make_plan
from jaxrl.records import Records
from jaxrl.run_dir import CONFIG_FILE, PLAN_FILE, RunDir, open_run_dir
from jaxrl.runtime.local import done_future
from jaxrl.sharding.mesh import carve, ensure_devices
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.telemetry.trackers import check_trackers

AGAIN = "nothing to do. A larger steps goes on; --resume never begins anew"


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
    """Runs `config` to its end, or goes on with what its run directory holds.

    Raises:
        UserError: bad input; nothing has been written then, or what was trained is in the run
            directory.
        Interrupted: Ctrl-C or SIGTERM; what was trained is saved.
    """
    started = time.monotonic()
    interrupt = Interrupt(config.deadlines.interrupt)
    with interrupt.listening():
        job, plan = prepare_run(config)
        with (
            open_run_dir(config, job.train.fingerprint) as run,
            Console(config.logging, steps=config.steps, start=run.step) as console,
        ):
            for note in run.notes:
                console.message(note)
            if run.finished(config.steps):
                console.message(f"{run.path} has all of its {config.steps} steps: {AGAIN}")
                return Result(run.path, read_metrics(run.path))
            for text in (plan.text(), f"run directory: {run.path}", *data_notes(job)):
                console.message(text)
            return run_job(job, plan, run, console, interrupt, started)


def prepare_run(config: Config) -> tuple[Job, Plan]:
    """All that can be checked before a weight is read."""
    check_trackers(config.logging)
    enable_compile_cache(config.compile_cache)
    plan = make_plan(config, ALGORITHMS[config.algorithm].roles, ensure_devices)
    if plan.hopeless:
        told = (*plan.verdict[:1], *plan.advice[:3], "--dry-run shows the plan")
        raise UserError("\n".join(told))
    return make_job(config), plan


def run_job(
    job: Job, plan: Plan, run: RunDir, console: Console, interrupt: Interrupt, started: float
) -> Result:
    """From the plan to the exported model."""
    config = job.config
    meshes = carve(plan.devices, plan.placement, plan.axes)
    restore = None if run.checkpoint is None else run.checkpoint.path
    roles = start_roles(job, plan.placement, meshes, run.path, console.message, restore)
    try:
        run.write(CONFIG_FILE, config.dump())
        run.write(PLAN_FILE, plan.text())
        run.remove_final()
        with Records(job, plan, run, console, meshes, interrupt.asked) as records:
            packing = job.packing(roles.row_multiple)
            loop = Loop(
                config,
                records.watch(roles.handles),
                job.train,
                job.held_out_prompts,
                records.reporter,
                packing | {"decode": partial(decode, job.tokenizer)},
                value=done_future,
                checkpoints=records.checkpoints,
                asked_to_stop=interrupt.asked,
            )
            with interrupt.patient():
                trained = loop.run(records.resumed(packing))
                records.finish_checkpoints()
            if interrupt.asked():
                raise Interrupted(interrupted_at(trained, records.checkpoints.newest, run.path))
            export(job, roles, run.path / FINAL, records.checkpoints.newest)
    finally:
        roles.stop()
    for line in summary(records.rows, run, started, records.reporter.first_step_at):
        console.message(line)
    return Result(run.path, records.rows)


def data_notes(job: Job) -> list[str]:
    """What a reader should know of the data: sizes, and prompts that were left out or cut."""
    limit = job.config.max_prompt_tokens
    notes = [f"data.train: {job.train.epoch_prompts} prompts"]
    if job.train.dropped:
        notes[0] += f"; {job.train.dropped} are longer than max_prompt_tokens={limit}: left out"
    if job.train.cut:
        notes[0] += f"; {job.train.cut} are longer than max_prompt_tokens={limit}: cut"
    return notes + held_out_notes(job.config, job.held_out, job.judge)


def export(job: Job, roles: Roles, path: Path, saved: int | None) -> None:
    """The trained policy as a Hugging Face folder with its tokenizer.

    Args:
        saved: step of the newest checkpoint, for the error of a disk that refuses.
    """
    params = roles.handles["actor"].call("parameters", deadline=job.config.deadlines.startup)
    try:
        save_hf(
            path,
            job.student.config,
            params.result(),
            dtype=job.config.actor.param_dtype,
            tokenizer_from=job.student.tokenizer_path,
        )
    except OSError as error:
        kept = "no checkpoint could be written" if saved is None else f"checkpoint {saved} is whole"
        raise RunError(
            f"the trained model could not be written to {path}: {error.strerror or error}"
            f" ({free_gb(path.parent):.1f} GB are free there); {kept}"
        ) from error


def interrupted_at(trained: int, saved: int | None, run_dir: Path) -> str:
    """The last words of a run that was asked to stop."""
    if saved == trained:
        return f"interrupted; saved at step {trained} in {run_dir}: --resume auto goes on there"
    kept = "nothing is saved" if saved is None else f"the newest checkpoint is of step {saved}"
    return f"interrupted at step {trained}; {kept} in {run_dir}"


def summary(
    rows: Sequence[dict[str, Any]], run: RunDir, started: float, first_step: float | None
) -> list[str]:
    """The last words of a run."""
    took = time.monotonic() - started
    lines = [f"done: {rows[-1]['step'] - run.step} steps in {took:.0f} s"]
    if first_step is not None:
        lines[0] += f", the first after {first_step - started:.0f} s"
    if run.step:
        lines[0] += f"; {rows[-1]['step']} steps in all"
    first, last = rows[0].get("eval/accuracy"), rows[-1].get("eval/accuracy")
    if first is not None and last is not None:
        line = f"accuracy on held-out prompts: {first:.1%} before, {last:.1%} after"
        teacher = rows[0].get("teacher/accuracy")
        lines.append(line if teacher is None else f"{line}; the teacher has {teacher:.1%}")
    lines.append(f"model: {run.path / FINAL}")
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
    cli.leave(cli.run(main))
