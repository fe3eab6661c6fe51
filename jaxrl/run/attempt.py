"""A run from its config to the exported model. If workers are lost, it starts another attempt from
the newest checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from jaxrl.algorithms.methods import needed_roles
from jaxrl.algorithms.protocols import ActorRole
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.algorithms.sources import Sources
from jaxrl.checkpoint.model_source import FINAL
from jaxrl.checkpoint.writer import free_gb
from jaxrl.config.schema import CONFIG_FILE, Config
from jaxrl.data.tokenizer import decode
from jaxrl.errors import RunError, UserError
from jaxrl.plan import Plan, make_plan
from jaxrl.plan.record import PLAN_DATA_FILE, PLAN_FILE, plan_json
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.interrupt import Interrupt, Interrupted
from jaxrl.process.xla_flags import exclude_nondeterministic
from jaxrl.profile.splits import run_advice
from jaxrl.run.context import Notifier, OnStep, RunContext
from jaxrl.run.fingerprint import dependencies
from jaxrl.run.job import Job, check_job, check_weights, make_job
from jaxrl.run.launch import devices_for, start_roles
from jaxrl.run.loop import Loop
from jaxrl.run.names import fetch_models, with_commits
from jaxrl.run.records import Records
from jaxrl.run.role_calls import Calls
from jaxrl.run.run_dir import (
    SESSIONS_FILE,
    RunDir,
    check_run_dir,
    find_run,
    meshes,
    open_run_dir,
    sessions,
    with_date,
)
from jaxrl.runtime.worker import OutOfMemory, RunLost, WorkerGroup
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.lines import LOG_FILE, RunLog
from jaxrl.telemetry.trackers import check_trackers

AGAIN = "nothing to do. A larger `steps` trains further; another `run_dir` starts a new run"


def plan_run(config: Config, dry: bool = False) -> Plan:
    """Plans a run from the models' `config.json` and the devices. The config of the plan names the
    commits of what is on a hub.

    Args:
        dry: make the plan even if the run's data cannot be found.
    """
    config, notes = with_commits(config, dry)
    visible = devices_for(config)
    plan = make_plan(with_date(config), needed_roles(config), visible)
    return replace(plan, notes=(*notes, *plan.notes))


def checks(config: Config, given: Mapping[str, bytes]) -> tuple[list[str], tuple[str, ...]]:
    """Returns the notes on the run's data, and the errors that would stop the run before it reads a
    weight: in data, tokenizers, rewards, trackers or the run directory. Each check reports only its
    first error.

    Args:
        given: as in `run_config`.
    """
    notes: list[str] = []
    found = []
    for check in (
        partial(check_trackers, config.logging),
        partial(check_run_dir, config),
        lambda: notes.extend(check_job(config, given)),
    ):
        try:
            check()
        except (UserError, RunError) as error:
            found.append(f"the run would be refused: {error}")
    return notes, tuple(found)


def prepare_run(config: Config, given: Mapping[str, bytes] | None = None) -> tuple[Job, Plan]:
    """Checks everything that can be checked before a weight is read."""
    check_trackers(config.logging)
    if config.deterministic:
        exclude_nondeterministic()
    enable_compile_cache(config.compile_cache)
    plan = plan_run(config)
    if plan.hopeless:
        lines = (*plan.verdict[:1], *plan.advice[:3], "--dry-run shows the plan")
        raise UserError("\n".join(lines))
    job = make_job(plan.config, given)
    check_run_dir(plan.config)
    if fetch_models(plan.config):  # last, because downloads take longest
        check_weights(job)
        if any(one.with_weights().config != one.config for one in job.models):
            job, plan = make_job(plan.config, given), plan_run(plan.config)
    return job, plan


def run_config(
    config: Config, given: Mapping[str, bytes], on_step: OnStep, notes: Sequence[str] = ()
) -> Path:
    """Does the work of `jaxrl.train`. Returns the run directory.

    Args:
        given: pickled reward functions by their entries in `reward.functions`.
        notes: lines for the reader, printed first.
    """
    started = time.monotonic()
    interrupt = Interrupt(_interrupt_s(config))
    with interrupt.listening():
        job, plan = prepare_run(config, given)
        config = plan.config
        with (
            open_run_dir(config, dependencies(job)) as run,
            Console(config.logging, steps=config.steps, start=run.step) as console,
        ):
            notify = Notifier(console)
            for note in (*notes, *run.notes):
                notify(note)
            if run.finished(config.steps):
                notify(f"{run.path} has all of its {config.steps} steps: {AGAIN}")
                return run.path
            for text in (plan.text(), f"run directory: {run.path}", *job.data_notes()):
                notify(text)
            job.train.notify = notify
            _run_job(RunContext(job, plan, console, notify, interrupt, on_step, started), run)
            return run.path


def _interrupt_s(config: Config) -> float:
    """Seconds that a run may take to end once it was asked to: the calls that run then, and the
    save.
    """
    d = config.deadlines
    if d.interrupt is not None:
        return d.interrupt
    running = d.generate + d.evaluate if SCHEDULES[config.schedule] else 0.0
    return max(d.update, running) + d.checkpoint


def _run_job(context: RunContext, run: RunDir) -> None:
    """Runs the job from the plan to the exported model. If workers are lost that cannot be
    restarted alone, another attempt starts from the newest checkpoint."""
    config, lost, reached = context.job.config, 0, run.step
    while True:
        try:
            return _attempt(context, run)
        except OutOfMemory as error:
            raise RunError(_out_of_memory(context.plan, error)) from error
        except RunLost as error:
            if context.interrupt.asked():
                raise
            found = find_run(run.path, config, dependencies(context.job))
            run = replace(found, lock=run.lock)
            lost = 1 if run.step > reached else lost + 1
            reached, most = max(reached, run.step), config.ray.max_restarts
            if lost > most:
                raise RunError(
                    f"{error}\nthe run went back to its newest checkpoint {most} times without a"
                    " newer one (ray.max_restarts): it gives up"
                ) from error
            back = f"{error}\nthe run goes back to its newest checkpoint ({lost} of {most})"
            for text in (back, *run.notes):
                context.notify(text)


def _attempt(context: RunContext, run: RunDir) -> None:
    """Starts the workers, trains, exports the model, and stops the workers."""
    job, plan, config = context.job, context.plan, context.job.config
    notify, interrupt, on_step = context.notify, context.interrupt, context.on_step
    restore = None if run.checkpoint is None else run.checkpoint.path
    setup = job.for_workers(plan.axes, run.path, restore)
    packing = setup.packing(plan.inputs.target)
    worker_group = start_roles(setup, plan, notify)

    def asked_to_stop() -> bool:
        return interrupt.asked() or on_step.error is not None or worker_group.ending() is not None

    try:
        description = {
            CONFIG_FILE: config.dump(),
            PLAN_FILE: plan.text(),
            PLAN_DATA_FILE: plan_json(plan),
            SESSIONS_FILE: run.sessions_with(config.mesh),
        }
        for name, text in description.items():
            run.write(name, text)
        run.remove_final()
        context.console.attach(worker_group.states)
        with (
            notify.into(RunLog(run.path / LOG_FILE)) as log,
            Records(context, run, worker_group, log, description) as records,
        ):
            calls = Calls(config, records.watch(worker_group), asked_to_stop)
            sources = Sources(
                config,
                job.train.batch,
                packing,
                calls.call,
                calls.wait,
                job.held_out_prompts,
                partial(decode, job.tokenizer),
                job.stored_samples,
                evaluated=("teacher",) if job.evaluates_teacher else (),
            )
            saves, profile = records.checkpoints, records.profile
            loop = Loop(sources, calls, records.reporter, saves, profile.around)
            with interrupt.patient():
                trained = loop.run(records.resumed(packing))
                profile.close()
                records.finish_checkpoints()
            if interrupt.asked():
                raise Interrupted(_interrupted_at(trained, saves.newest, run.path))
            if (error := on_step.error) is not None:
                raise RunError(
                    f"on_step raised {type(error).__name__}: {error};"
                    f" {_kept(saves.newest)} in {run.path}"
                ) from error
            if worker_group.ending() is not None:
                at = _interrupted_at(trained, saves.newest, run.path)
                raise RunError(f"{worker_group.ending()}\n{at}")
            _export(job, worker_group, run.path / FINAL, saves.newest)
            for line in (*_summary(context, run, records), *run_advice(run.path)):
                notify(line)
    finally:
        worker_group.stop()


def _out_of_memory(plan: Plan, error: OutOfMemory) -> str:
    """Explains what ran out, next to what was planned, and what would help."""
    role = str(error).partition(".")[0]
    lines = [str(error)]
    if role in plan.peaks:
        lines.append(f"planned for {role}: {plan.peaks[role] / 1e9:.2f} GB on its fullest device")
    return "\n".join((*lines, *plan.relief(role)))


def _export(job: Job, worker_group: WorkerGroup, path: Path, saved: int | None) -> None:
    """Exports the trained policy as a Hugging Face folder with its tokenizer.

    Args:
        saved: step of the newest checkpoint, for the error of a disk that refuses.
    """
    calls = Calls(job.config, {"actor": worker_group.handle("actor")})
    exported = calls.call("actor", ActorRole.export, path, job.student.tokenizer_path)
    problem = exported.result()
    if problem is not None:
        kept = "no checkpoint could be written" if saved is None else f"checkpoint {saved} is whole"
        raise RunError(
            f"the trained model could not be written to {path}: {problem}"
            f" ({free_gb(path.parent):.1f} GB are free there); {kept}"
        )


def _kept(saved: int | None) -> str:
    return "nothing is saved" if saved is None else f"the newest checkpoint is of step {saved}"


def _interrupted_at(trained: int, saved: int | None, run_dir: Path) -> str:
    """Returns the last words of a run that was asked to stop."""
    if saved == trained:
        return f"interrupted; saved at step {trained} in {run_dir}: resume=auto continues there"
    return f"interrupted at step {trained}; {_kept(saved)} in {run_dir}"


def _summary(context: RunContext, run: RunDir, records: Records) -> list[str]:
    """Returns the last words of a run that has ended."""
    first_row, last_row = records.first_and_last()
    first_step, took = records.reporter.first_step_at, time.monotonic() - context.started
    lines = [f"done: {last_row['step'] - run.step} steps in {took:.0f} s"]
    if first_step is not None:
        lines[0] += f", the first after {first_step - context.started:.0f} s"
    if run.step:
        lines[0] += f"; {last_row['step']} steps in all"
    first, last = first_row.get("eval/accuracy"), last_row.get("eval/accuracy")
    if first is not None and last is not None:
        line = f"accuracy on held-out prompts: {first:.1%} before, {last:.1%} after"
        teacher = first_row.get("teacher/accuracy")
        lines.append(line if teacher is None else f"{line}; the teacher has {teacher:.1%}")
    used = meshes(sessions(run.path))
    if "then" in used:
        lines.append(f"mesh: {used}")
    return [*lines, f"model: {run.path / FINAL}"]
