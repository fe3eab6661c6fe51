"""Train a policy: distil a teacher on the student's own samples, or fine-tune on data.

Without --config the built-in quickstart runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl.algorithms.methods import needed_roles
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.checkpoint.source import FINAL
from jaxrl.checkpoint.writer import free_gb
from jaxrl.config import cli
from jaxrl.config.schema import CONFIG_FILE, Config
from jaxrl.data.tokenizer import decode
from jaxrl.errors import RunError, UserError
from jaxrl.plan import Plan, make_plan
from jaxrl.plan.record import PLAN_DATA_FILE, PLAN_FILE, plan_json
from jaxrl.process.callable_module import make_callable
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.interrupt import Interrupt, Interrupted
from jaxrl.process.xla_flags import exclude_nondeterministic
from jaxrl.profile.splits import run_advice
from jaxrl.rewards.callables import bind
from jaxrl.run.depends import dependencies
from jaxrl.run.inputs import held_out_notes
from jaxrl.run.launch import Job, check_job, devices_for, make_job, make_setup, start_roles
from jaxrl.run.loop import Loop
from jaxrl.run.records import Records
from jaxrl.run.run_dir import (
    SESSIONS_FILE,
    RunDir,
    check_run_dir,
    find_run,
    meshes,
    open_run_dir,
    sessions,
)
from jaxrl.runtime.registry import Registration, registered
from jaxrl.runtime.worker import Crew, OutOfMemory, RunLost
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.log import LOG_FILE, RunLog
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.telemetry.plot import draw
from jaxrl.telemetry.trackers import check_trackers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGAIN = "nothing to do. A larger steps goes on; --resume never begins anew"


@dataclass(frozen=True)
class Result:
    """What a run ends with."""

    run_dir: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, which is read when they are first asked for."""
        return read_metrics(self.run_dir)

    @property
    def final_eval(self) -> float | None:
        """Accuracy of the last weights on the held-out prompts; None without an evaluation."""
        return self.metrics[-1].get("eval/accuracy")

    def curves(self) -> Figure:
        """Its metrics as `python -m jaxrl.telemetry.plot` draws them (extra `plot`)."""
        return draw({self.run_dir.name: self.metrics})


def dry_run(config: Config, rewards: Sequence[Callable[..., Any]] = ()) -> Plan:
    """The plan of a run: the devices of each role, its mesh axes and its bytes; and what the run
    would refuse.

    Its `text()` is what `--dry-run` prints. No weight is read, nothing is written.

    Args:
        rewards: as of `train`.

    Raises:
        UserError: what cannot be placed.
    """
    config, given = bind(config, rewards)
    return replace(plan_run(config), refusals=refusals(config, given))


def plan_run(config: Config) -> Plan:
    """The plan alone, from the models' `config.json` and the devices."""
    return make_plan(config, needed_roles(config), devices_for(config))


def refusals(config: Config, given: Mapping[str, bytes]) -> tuple[str, ...]:
    """What the run would refuse before it reads a weight: data, tokenizers, rewards, trackers, run
    directory. Each check ends at its first error.

    Args:
        given: as of `run_config`.
    """
    found = []
    for check in (
        partial(check_trackers, config.logging),
        partial(check_run_dir, config),
        partial(check_job, config, given),
    ):
        try:
            check()
        except (UserError, RunError) as error:
            found.append(f"the run would be refused: {error}")
    return tuple(found)


def train(
    config: Config,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    rewards: Sequence[Callable[..., Any]] = (),
) -> Result:
    """Runs `config` to its end, or resumes what its run directory holds.

    Args:
        on_step: called in this thread with a copy of each row of `metrics.jsonl` once the row is
            written; the loop waits for it. Where it raises, the run saves and ends with RunError.
        rewards: reward functions `f(prompts, completions, **columns)`, as in a file that
            `reward.functions` names. One that `reward.functions` names as `python:NAME` takes that
            place (and its weight), any other is added to them. They run in processes of their own,
            so they must be picklable by cloudpickle.

    Raises:
        UserError: bad input; nothing has been written then, or what was trained is in the run
            directory.
        RunError: the run cannot continue; the newest checkpoint is in the run directory.
        Interrupted: Ctrl-C or SIGTERM; what was trained is saved.
    """
    config, given = bind(config, rewards)
    return run_config(config, given, OnStep(on_step))


def run_config(
    config: Config, given: Mapping[str, bytes], on_step: OnStep, notes: Sequence[str] = ()
) -> Result:
    """`train`, once what Python gave is bound to the config.

    Args:
        given: pickled reward functions by their entries in `reward.functions`.
        notes: lines for the reader, said first.
    """
    started = time.monotonic()
    interrupt = Interrupt(interrupt_s(config))
    with interrupt.listening():
        job, plan = prepare_run(config, given)
        config = plan.config
        with (
            open_run_dir(config, dependencies(job)) as run,
            Console(config.logging, steps=config.steps, start=run.step) as console,
        ):
            say = Say(console)
            for note in (*notes, *run.notes):
                say(note)
            if run.finished(config.steps):
                say(f"{run.path} has all of its {config.steps} steps: {AGAIN}")
                return Result(run.path)
            for text in (plan.text(), f"run directory: {run.path}", *data_notes(job)):
                say(text)
            with registered(run.path, ()) as registration:
                return run_job(
                    Errand(job, plan, console, say, registration, interrupt, on_step, started), run
                )


class OnStep:
    """The caller's function of each row. What it raises is kept, and asks the run to end."""

    def __init__(self, function: Callable[[dict[str, Any]], object] | None = None):
        self._function = function
        self.error: Exception | None = None

    def __call__(self, row: Mapping[str, Any]) -> None:
        if self._function is None or self.error is not None:
            return
        try:
            self._function(dict(row))
        except Exception as error:
            self.error = error


def interrupt_s(config: Config) -> float:
    """Seconds that a run may take to end once it was asked to: the calls that run then, and the
    save.
    """
    d = config.deadlines
    if d.interrupt is not None:
        return d.interrupt
    running = d.generate + d.evaluate if SCHEDULES[config.schedule] else 0.0
    return max(d.update, running) + d.checkpoint


class Say:
    """Tells the user; also the log, once there is one."""

    def __init__(self, console: Console):
        self._console = console
        self._log: RunLog | None = None
        self._kept: list[str] = []
        console.on_lost(self._note)

    def __call__(self, text: str) -> None:
        self._console.message(text)
        self._note(text)

    def _note(self, text: str) -> None:
        """For the log alone."""
        if self._log is None:
            self._kept.append(text)
        else:
            self._log.write(text)

    @contextmanager
    def into(self, log: RunLog) -> Iterator[RunLog]:
        """What was said before too."""
        with log:
            for text in self._kept:
                log.write(text)
            self._kept, self._log = [], log
            try:
                yield log
            finally:
                self._log = None


@dataclass(frozen=True)
class Errand:
    """What stays the same however often workers are lost."""

    job: Job
    plan: Plan
    console: Console
    say: Say
    registration: Registration
    interrupt: Interrupt
    on_step: OnStep
    started: float
    """`time.monotonic` seconds."""

    def asked_to_stop(self) -> bool:
        """Whether to save and end: a signal came, or the caller's `on_step` failed."""
        return self.interrupt.asked() or self.on_step.error is not None


def prepare_run(config: Config, given: Mapping[str, bytes] | None = None) -> tuple[Job, Plan]:
    """All that can be checked before a weight is read."""
    check_trackers(config.logging)
    if config.deterministic:
        exclude_nondeterministic()
    enable_compile_cache(config.compile_cache)
    plan = plan_run(config)
    if plan.hopeless:
        told = (*plan.verdict[:1], *plan.advice[:3], "--dry-run shows the plan")
        raise UserError("\n".join(told))
    return make_job(plan.config, given), plan


def run_job(errand: Errand, run: RunDir) -> Result:
    """From the plan to the exported model; anew from the newest checkpoint where workers are lost
    that cannot be made anew by themselves.
    """
    config, lost, reached = errand.job.config, 0, run.step
    while True:
        try:
            return attempt(errand, run)
        except OutOfMemory as error:
            raise RunError(out_of_memory(errand.plan, error)) from error
        except RunLost as error:
            if errand.interrupt.asked():
                raise
            found = find_run(run.path, config, dependencies(errand.job))
            run = replace(found, lock=run.lock)
            lost = 1 if run.step > reached else lost + 1
            reached, most = max(reached, run.step), config.ray.max_restarts
            if lost > most:
                raise RunError(
                    f"{error}\nthe run went back to its newest checkpoint {most} times without a"
                    " newer one (ray.max_restarts): it gives up"
                ) from error
            errand.say(f"{error}\nthe run goes back to its newest checkpoint ({lost} of {most})")
            for note in run.notes:
                errand.say(note)


def attempt(errand: Errand, run: RunDir) -> Result:
    """One life of the workers."""
    job, plan, say, interrupt = errand.job, errand.plan, errand.say, errand.interrupt
    config = job.config
    restore = None if run.checkpoint is None else run.checkpoint.path
    setup = make_setup(job, plan.axes, run.path, restore)
    workers: list[Crew] = []

    def told(text: str) -> None:
        """What the workers say: after a start, or when one was made anew."""
        say(text)
        for crew in workers:
            errand.registration.update(crew.states())

    crew = start_roles(setup, plan, told)
    workers.append(crew)

    def asked_to_stop() -> bool:
        return errand.asked_to_stop() or crew.ending() is not None

    try:
        describe = {
            CONFIG_FILE: config.dump(),
            PLAN_FILE: plan.text(),
            PLAN_DATA_FILE: plan_json(plan),
            SESSIONS_FILE: run.sessions_with(config.mesh),
        }
        for name, text in describe.items():
            run.write(name, text)
        run.remove_final()
        errand.console.attach(crew.states)
        errand.registration.update(crew.states())
        with (
            say.into(RunLog(run.path / LOG_FILE)) as log,
            Records(
                job, plan, run, errand.console, crew, log, say, errand.on_step, describe
            ) as records,
        ):
            packing = job.packing(setup.row_multiple, plan.target)
            loop = Loop(
                config,
                records.watch(crew),
                job.train,
                job.held_out_prompts,
                records.reporter,
                packing,
                value=crew.value,
                decode=partial(decode, job.tokenizer),
                checkpoints=records.checkpoints,
                asked_to_stop=asked_to_stop,
                around=records.profile.around,
            )
            with interrupt.patient():
                trained = loop.run(records.resumed(packing))
                records.profile.close()
                records.finish_checkpoints()
            if interrupt.asked():
                raise Interrupted(interrupted_at(trained, records.checkpoints.newest, run.path))
            if errand.on_step.error is not None:
                raise on_step_failed(errand.on_step.error, records.checkpoints.newest, run.path)
            if crew.ending() is not None:
                at = interrupted_at(trained, records.checkpoints.newest, run.path)
                raise RunError(f"{crew.ending()}\n{at}")
            export(job, crew, run.path / FINAL, records.checkpoints.newest)
            ends = records.first_and_last()
            for line in summary(*ends, run, errand.started, records.reporter.first_step_at):
                say(line)
            for line in run_advice(run.path):
                say(line)
    finally:
        crew.stop()
    return Result(run.path)


def out_of_memory(plan: Plan, error: OutOfMemory) -> str:
    """What ran out, beside what was planned, and what would help."""
    role = str(error).partition(".")[0]
    lines = [str(error)]
    if role in plan.peaks:
        lines.append(f"planned for {role}: {plan.peaks[role] / 1e9:.2f} GB on its fullest device")
    return "\n".join((*lines, *plan.relief(role)))


def data_notes(job: Job) -> list[str]:
    """What a reader should know of the data: sizes, and prompts that were left out or cut."""
    limit = job.config.max_prompt_tokens
    notes = [f"data.train: {job.train.epoch_prompts} prompts"]
    if job.train.dropped:
        notes[0] += f"; {job.train.dropped} are longer than max_prompt_tokens={limit}: left out"
    if job.train.cut:
        notes[0] += f"; {job.train.cut} are longer than max_prompt_tokens={limit}: cut"
    return [*notes, *held_out_notes(job.config, job.held_out, job.judge), *job.notes]


def export(job: Job, crew: Crew, path: Path, saved: int | None) -> None:
    """The trained policy as a Hugging Face folder with its tokenizer.

    Args:
        saved: step of the newest checkpoint, for the error of a disk that refuses.
    """
    deadline = job.config.deadlines.export
    exported = crew.handle("actor").call(
        "export", path, job.student.tokenizer_path, deadline=deadline
    )
    problem: str | None = exported.result()
    if problem is not None:
        kept = "no checkpoint could be written" if saved is None else f"checkpoint {saved} is whole"
        raise RunError(
            f"the trained model could not be written to {path}: {problem}"
            f" ({free_gb(path.parent):.1f} GB are free there); {kept}"
        )


def interrupted_at(trained: int, saved: int | None, run_dir: Path) -> str:
    """The last words of a run that was asked to stop."""
    if saved == trained:
        return f"interrupted; saved at step {trained} in {run_dir}: --resume auto goes on there"
    kept = "nothing is saved" if saved is None else f"the newest checkpoint is of step {saved}"
    return f"interrupted at step {trained}; {kept} in {run_dir}"


def on_step_failed(error: Exception, saved: int | None, run_dir: Path) -> RunError:
    """The last words of a run that the caller's function ended; with the function's traceback."""
    kept = "nothing is saved" if saved is None else f"the newest checkpoint is of step {saved}"
    failed = RunError(f"on_step raised {type(error).__name__}: {error}; {kept} in {run_dir}")
    failed.__cause__ = error
    return failed


def summary(
    first_row: Mapping[str, Any],
    last_row: Mapping[str, Any],
    run: RunDir,
    started: float,
    first_step: float | None,
) -> list[str]:
    """The last words of a run."""
    took = time.monotonic() - started
    lines = [f"done: {last_row['step'] - run.step} steps in {took:.0f} s"]
    if first_step is not None:
        lines[0] += f", the first after {first_step - started:.0f} s"
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
    lines.append(f"model: {run.path / FINAL}")
    return lines


def print_plan(config: Config) -> None:
    """Prints the plan at once, and then looks for what the run would refuse.

    Raises:
        UserError: the plan does not fit, or the run would be refused.
    """
    plan = plan_run(config)
    print(plan.text(), flush=True)
    found = [*plan.misfit, *refusals(config, {})]
    if found:
        raise UserError("\n".join(found))


def main(argv: Sequence[str]) -> None:
    arguments = cli.parse_run(argv, module="jaxrl.train", description=__doc__ or "")
    with arguments.base.explained():
        if arguments.dry_run:
            print(arguments.base.note)
            print_plan(arguments.config)
        else:
            run_config(arguments.config, {}, OnStep(), [arguments.base.note])


make_callable(__name__, train)

if __name__ == "__main__":
    cli.leave(cli.run(main))
