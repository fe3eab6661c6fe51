"""A run from its config to the exported model. If workers are lost, it starts another attempt from
the newest checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from jaxrl.algorithms.methods import holds_samples, method_of, needed_roles
from jaxrl.algorithms.protocols import ActorRole, Sources
from jaxrl.algorithms.schedule import staleness_of
from jaxrl.checkpoint import store
from jaxrl.checkpoint.fingerprint import changes
from jaxrl.checkpoint.model_source import FINAL, resolve_model
from jaxrl.checkpoint.writer import free_gb, load_rollout
from jaxrl.config.schema import Config
from jaxrl.data.example import Split
from jaxrl.data.tokenizer import decode_text
from jaxrl.errors import RunError, UserError, counted
from jaxrl.formats.opened import has_changed
from jaxrl.models.kernels import GPU
from jaxrl.plan import make_plan, target_plan
from jaxrl.plan.table import Plan
from jaxrl.process import xla_flags
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.interrupt import Interrupt, Interrupted
from jaxrl.process.streams import raise_file_limit, terminal_width
from jaxrl.process.waiting import to_say
from jaxrl.profile.waits import run_advice
from jaxrl.roles.reward import open_reward
from jaxrl.run.diagnosis import HEADING, diagnose
from jaxrl.run.job import Job, check_job, dependencies, make_job
from jaxrl.run.launch import devices_for, start_roles
from jaxrl.run.loop import Calls, Loop, evaluates
from jaxrl.run.names import fetch_models, with_commits
from jaxrl.run.python_objects import NOTHING, PythonObjects
from jaxrl.run.reporting import Notifier, OnStep, Run
from jaxrl.run.run_dir import (
    changes_of,
    check_run_dir,
    find_run,
    meshes,
    open_run_dir,
    sessions,
    stop_of,
    stop_text,
    with_date,
)
from jaxrl.runtime.worker import OutOfMemory, RunLost
from jaxrl.sharding.mesh import accelerators_here
from jaxrl.sharding.targets import TargetMachine
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.metrics import held_out_reward
from jaxrl.telemetry.totals import describe_totals
from jaxrl.telemetry.trackers import check_trackers
from jaxrl.types import Prompt, Rollout, Row


def plan_run(config: Config, target: TargetMachine | None = None, *, room: bool = False) -> Plan:
    """Plans a run from the models' `config.json` and the devices.

    Args:
        config: with the commits of what is on a hub (`with_commits`).
        target: the machine to plan for; None: this one, or the cluster of `launcher`.
        room: says further what else would fit (`make_plan`).
    """
    dated, roles = with_date(config), needed_roles(config)
    xla_flags.check_jax_settings()
    if target is not None:
        return target_plan(dated, roles, target, room=room)
    plan = make_plan(dated, roles, devices_for(config), room=room)
    notes = xla_flags.user_flag_notes() if plan.inputs.target.platform in GPU else ()
    return replace(plan, notes=(*notes, *plan.notes))


def checks(
    config: Config, given: PythonObjects, elsewhere: bool = False
) -> tuple[Config, list[str], tuple[str, ...], Job | None]:
    """Returns the config with the commits of what is on a hub, notes on these and on the run's
    data, the errors that would stop the run before it reads a weight (in data, tokenizers, rewards,
    trackers or the run directory; each check reports only its first error), and what is known of
    the run, as `check_job` returns it.

    Args:
        elsewhere: the run is for another machine, which may have data files that are not here.
    """
    config, on_hub = with_commits(config, dry=True)
    notes, found = list(on_hub), []
    job: Job | None = None

    def check_data() -> None:
        nonlocal job
        said, job = check_job(config, given, elsewhere)
        notes.extend(said)

    first = partial(check_trackers, config.logging), partial(check_run_dir, config)
    for check in (*first, check_data):
        try:
            check()
        except (UserError, RunError) as error:
            found.append(str(error))
    return config, notes, tuple(found), job


def prepare_run(config: Config, given: PythonObjects = NOTHING) -> tuple[Job, Plan]:
    """Checks everything that can be checked before a weight is read, the cheapest first."""
    raise_file_limit()
    check_trackers(config.logging)
    run_dir, kept = check_run_dir(config), None
    if config.deterministic:
        xla_flags.exclude_nondeterministic()
    enable_compile_cache(config.compile_cache)
    config, on_hub = with_commits(config)
    config = with_date(config)
    job = make_job(config, given)
    if config.deterministic and accelerators_here():  # it makes files, and jax starts below
        kept = xla_flags.keep_autotuning(run_dir / xla_flags.TUNED_DIR, "driver")
    plan = plan_run(config)
    if plan.hopeless:
        lines = (*plan.verdict[:1], *plan.advice[:3], "--dry-run shows the plan")
        raise UserError("\n".join(lines))
    job = replace(job, config=plan.config, teacher=job.teacher.with_config(plan.config))
    if fetch_models(plan.config):  # last, because downloads take longest
        models = job.student, *job.teacher.models.values()
        for source in models:  # their tensors may not fit their configs
            resolve_model(source.name)
        if job.config.learns_from_rewards and job.config.reward.model is not None:
            open_reward(job.config.reward.model)
        if any(source.with_weights().config != source.config for source in models):
            job, plan = make_job(plan.config, given), plan_run(plan.config)
    notes = (*on_hub, *plan.notes, *filter(None, [kept]))
    return job, replace(plan, notes=notes, lengths=job.lengths)


def run_config(
    config: Config, given: PythonObjects, on_step: OnStep | None = None, notes: Sequence[str] = ()
) -> Path:
    """Does the work of `jaxrl.train`. Returns the run directory."""
    interrupt = interrupt_of(config)
    with interrupt.listening(), open_run(config, given, interrupt, on_step, notes) as run:
        if not run.folder.finished(run.job.config.steps):
            _run(run)
        return run.folder.path


def interrupt_of(config: Config) -> Interrupt:
    """Returns what hears that the run is asked to end, with the seconds that it may take then."""
    d = config.deadlines
    patience = d.interrupt
    if patience is None:
        running = d.generate + d.evaluate if staleness_of(config) else 0.0
        patience = max(d.update, running) + d.checkpoint
    return Interrupt(patience)


@contextmanager
def open_run(
    config: Config,
    given: PythonObjects,
    interrupt: Interrupt,
    on_step: OnStep | None = None,
    notes: Sequence[str] = (),
) -> Iterator[Run]:
    """Opens a run, of which no role has started: its models, data, plan and folder, which no other
    process may use meanwhile. Tells `notes` and what is known of it."""
    started = time.monotonic()
    job, plan = prepare_run(config, given)
    config = plan.config
    with (
        open_run_dir(config, dependencies(job)) as folder,
        Console(config.logging, steps=config.steps, start=folder.step) as console,
        ExitStack() as stack,
    ):
        notify = Notifier(console)
        stack.enter_context(to_say(notify))
        for note in (*notes, *folder.notes):
            notify(note)
        if folder.finished(config.steps):
            notify(
                f"{folder.path} has all of its {config.steps} steps: nothing to do. A larger"
                " `steps` trains further; another `run_dir` starts a new run"
            )
        else:
            shown = plan.console_text(terminal_width()).rstrip()
            for text in (shown, f"run directory: {folder.path}", *job.data_notes()):
                notify(text)
        job.train.notify = notify
        yield Run(job, plan, folder, console, notify, interrupt, on_step, started)


def _run(run: Run) -> None:
    """Trains and exports the model. If workers are lost that cannot be restarted alone, another
    attempt starts from the newest checkpoint."""
    config, lost, reached = run.job.config, 0, run.folder.step
    while True:
        try:
            return _attempt(run)
        except OutOfMemory as error:
            role, peaks = str(error).partition(".")[0], run.plan.peaks
            planned = f"planned for {role}: {peaks.get(role, 0) / 1e9:.2f} GB on its fullest device"
            lines = [str(error), *[planned][: role in peaks], *run.plan.relief(role)]
            raise RunError("\n".join(lines)) from error
        except RunLost as error:
            if run.interrupt.asked:
                raise
            now = dependencies(run.job)
            if names := changes(dict(run.folder.depends), now):
                raise has_changed(f"what {' and '.join(names)} names") from error
            newest = find_run(run.folder.path, config, now)
            run.folder = replace(newest, lock=run.folder.lock)
            lost = 1 if newest.step > reached else lost + 1
            reached, most = max(reached, newest.step), config.ray.max_restarts
            if lost > most:
                raise RunError(
                    f"{error}\nthe run went back to its newest checkpoint {most} times without a"
                    " newer one (ray.max_restarts): it gives up"
                ) from error
            back = f"{error}\nthe run goes back to its newest checkpoint ({lost} of {most})"
            for text in (back, *newest.notes):
                run.notify(text)


def _attempt(run: Run) -> None:
    """Starts the roles, trains, exports the model, and says how it went."""
    with start_loop(run) as (loop, generated):
        with run.interrupt.patient():
            trained = loop.run(run.folder.step, generated, row_is_whole(run))
            run.close()
        _raise_ending(run, trained)
        end_run(run, trained)


def end_run(run: Run, trained: int) -> None:
    """Exports the model of a run that has all of its steps, or was ended early by code of the
    user's, and says how it went."""
    if run.stopped is not None and trained < run.job.config.steps:
        run.folder.note_stop(trained, run.stopped.by, str(run.stopped))
    if (trained or run.stopped is None) and not run.amid_batch:
        export(run)
    run.console.close()  # the result stands below the live display, and last
    advice = run_advice(run.folder.path, run.job.config)
    if wrong := diagnose(run.folder.path, run.job.config):
        advice |= {HEADING: wrong}
    for heading, lines in reversed(advice.items()):
        run.notify("\n  ".join((f"{heading}:", *lines)))
    for line in _summary(run):
        run.notify(line)


@contextmanager
def start_loop(run: Run, by_hand: bool = False) -> Iterator[tuple[Loop, dict[int, Rollout]]]:
    """Starts the roles. Gives the loop, which has not begun, and the batches that the checkpoint
    has of those to train next; ends the roles.

    Args:
        by_hand: as in `Calls`; then nothing asks the loop to end either.
    """
    job, plan, config, folder = run.job, run.plan, run.job.config, run.folder
    restore = None if folder.checkpoint is None else folder.checkpoint.path
    first = first_prompts(job, folder.step)
    setup = job.for_workers(plan.axes, folder.path, restore, first, folder.depends)
    packing = setup.packing(plan.inputs.target)
    generated = _generated_ahead(run, packing)  # before anything of the folder is replaced
    workers = start_roles(setup, plan, run.notify)
    with ExitStack() as stack:
        stack.callback(workers.stop)
        stack.enter_context(run.attempt(workers))
        # Calls are drawn in the timeline, and counted where they are profiled.
        profiled = bool(run.profile.steps)
        profile = [run.profile.record] if profiled else []
        recorders = (run.timeline.record, run.record, *profile)
        roles = {role: workers.handle(role) for role in workers.roles}
        asked = (lambda: False) if by_hand else run.asked_to_stop
        calls = Calls(config, roles, asked, recorders, by_hand)
        sources = Sources(
            config,
            job.train.batch,
            packing,
            calls.call,
            calls.wait,
            job.held_out_prompts,
            partial(decode_text, job.tokenizer),
            job.teacher.stored_samples(job.tokenizer),
            beside_actor=run.plan.placement.pool_of("actor").roles,
            evaluated=("teacher",) if job.evaluates_teacher else (),
        )
        around = run.profile.around if profiled else None
        yield Loop(sources, calls, run, run.checkpoints, around), generated


def _raise_ending(run: Run, trained: int) -> None:
    """Raises what ended the run after so many batches, if anything but its config did."""
    path, saved = run.folder.path, run.checkpoints.newest
    kept = "nothing is saved" if saved is None else f"the newest checkpoint is of step {saved}"
    at = f"interrupted at step {trained}; {kept} in {path}"
    if saved == trained:
        at = f"interrupted; saved at step {trained} in {path}: resume=auto continues there"
    if run.interrupt.asked:
        raise Interrupted(at)
    if (error := run.step_error) is not None:
        raised = f"on_step raised {type(error).__name__}: {error}; {kept} in {path}"
        if isinstance(error, Exception):
            raise RunError(raised) from error
        run.notify(raised)
        raise error
    if (ending := run.worker_group.ending) is not None:
        raise RunError(f"{ending}\n{at}")


def export(run: Run) -> None:
    """Writes the policy into the folder of the run. Raises RunError."""
    final, saved = run.folder.path / FINAL, run.checkpoints.newest
    calls = Calls(run.job.config, {"actor": run.worker_group.handle("actor")})
    exported = calls.call("actor", ActorRole.export, final, run.job.tokenizer_files)
    if (problem := exported.result()) is not None:
        whole = f"checkpoint {saved} is whole"
        raise RunError(
            f"the trained model could not be written to {final}: {problem}"
            f" ({free_gb(run.folder.path):.1f} GB are free there);"
            f" {'no checkpoint could be written' if saved is None else whole}"
        )


def first_prompts(job: Job, step: int) -> dict[Split, Sequence[Prompt]]:
    """Returns the prompts that the rollout samples first in a run that begins at `step`."""
    first: dict[Split, Sequence[Prompt]] = {}
    if step == 0 and job.held_out:
        first["eval"] = job.held_out_prompts
    samples = method_of(job.config).samples_policy(job.config)
    if samples and step < job.config.steps and holds_samples(job.config, step):
        first["train"] = job.train.batch(step)
    return first


def _generated_ahead(run: Run, packing: Mapping[str, int]) -> dict[int, Rollout]:
    """Returns the batches that the checkpoint has, of those to train next."""
    checkpoint, job = run.folder.checkpoint, run.job
    if checkpoint is None:
        return {}
    in_flight = [index for index in checkpoint.manifest.in_flight if index < job.config.steps]
    made_of = [change.text for change in run.folder.changed if change.remakes]
    if in_flight and made_of:  # completions that are stored without their prompts
        run.notify(
            f"what the checkpoint had generated ahead (batches {', '.join(map(str, in_flight))}) is"
            f" generated again: it was made before these changed: {'; '.join(made_of)}"
        )
        return {}
    rollouts = {}
    for index in in_flight:
        prompts = job.train.batch(index)
        if holds_samples(job.config, index):
            prompts = [prompt.to_sample for prompt in prompts]
        path = checkpoint.path / store.rollout_file(index)
        rollouts[index] = load_rollout(path, prompts, packing)
    return rollouts


def row_is_whole(run: Run) -> bool:
    """Returns whether the row that a run resumes from has its evaluation, if one was due. A disk
    that took the checkpoint and not the row has left nothing to complete."""
    step, row = run.folder.step, run.metrics.last or {}
    due = bool(run.job.held_out) and evaluates(run.job.config, step)
    return not due or row.get("step") != step or "eval/unjudged" in row


def _summary(run: Run) -> list[str]:
    folder = run.folder
    first_row: Row = run.metrics.first or {"step": folder.step}
    last_row: Row = run.metrics.last or {"step": folder.step}
    first_step, took = run.first_step_at, time.monotonic() - run.started
    stopped = stop_of(sessions(folder.path))
    lines = [f"done: {counted(last_row['step'] - run.start, 'step')} in {took:.0f} s"]
    if first_step is not None:
        lines[0] += f", the first after {first_step - run.started:.0f} s"
    if run.start:
        lines[0] += f"; {counted(last_row['step'], 'step')} in all"
    first, last = first_row.get("eval/accuracy"), last_row.get("eval/accuracy")
    if first is not None and last is not None:
        line = f"accuracy on held-out prompts: {first:.1%} before, {last:.1%} after"
        teacher = first_row.get("teacher/accuracy")
        lines.append(line if teacher is None else f"{line}; the teacher has {teacher:.1%}")
    ends = [row for row in (first_row, last_row) if "eval/environment_reward" in row]
    if any(held_out_reward(row) is not None for row in ends) and len(ends) == 2:
        before, after = (f"{row['eval/environment_reward']:.3f}" for row in ends)
        lines.append(f"environment's reward on held-out prompts: {before} before, {after} after")
    lines += (f"{heading}: {text}" for heading, text in describe_totals(last_row).items())
    used = meshes(sessions(folder.path)) if run.start else ""
    if "then" in used:
        lines.append(f"mesh: {used}")
    for step, texts in changes_of(sessions(folder.path)).items():
        lines.append(f"changed after step {step}: {'; '.join(texts)}")
    if stopped is not None:
        lines.append(
            f"stopped at step {stopped['step']} of {run.job.config.steps} {stop_text(stopped)};"
            " the same command goes on"
        )
        if stopped["step"] == 0:
            return [*lines, "nothing was trained: no checkpoint and no model are written"]
        if run.amid_batch:
            amid = f"amid the minibatches of step {stopped['step'] + 1}, of which nothing is saved:"
            newest = "goes on from the newest checkpoint, whose model `jaxrl export` writes"
            return [*lines, f"it ended {amid} the run {newest}"]
    return [*lines, f"model: {folder.path / FINAL}"]
