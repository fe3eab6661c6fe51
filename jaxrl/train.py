"""Train a policy: distil a teacher on the student's own samples, learn from rewards, or fine-tune.

Without --config the built-in quickstart runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl.config import cli
from jaxrl.errors import UserError
from jaxrl.process.interrupt import Interrupt
from jaxrl.process.streams import terminal_width, to_stderr
from jaxrl.sharding.targets import target_machine
from jaxrl.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxrl.data.source import Rows
    from jaxrl.plan.table import Plan
    from jaxrl.process.json_types import JsonObject
    from jaxrl.run.python_objects import GivenAlgorithm, GivenConfig, GivenEnvironment, GivenModel

DESCRIPTION = __doc__ or ""
"""Of the command; the module's own docstring becomes the function's."""


@dataclass(frozen=True)
class Result:
    """What a run ends with."""

    run_dir: Path

    @cached_property
    def metrics(self) -> list[JsonObject]:
        """Returns the rows of `metrics.jsonl`, read on first access."""
        return read_metrics(self.run_dir)

    @property
    def final_eval(self) -> float | None:
        """Returns the accuracy of the last weights on the held-out prompts, or None without an
        evaluation."""
        return self.metrics[-1].get("eval/accuracy") if self.metrics else None

    @cached_property
    def stopped(self) -> JsonObject | None:
        """Returns how code of the user's ended the run early (StopTraining): `step`, `by` (as in
        `reward.functions: judge.py:score`), `message` and `at`, the time. None where it did not.
        Read on first access."""
        from jaxrl.run.run_dir import sessions, stop_of

        return stop_of(sessions(self.run_dir))

    def curves(self) -> Figure:
        """Draws the run's metrics as `python -m jaxrl.telemetry.plot` draws them (extra `plot`)."""
        from jaxrl.telemetry.plot import draw

        return draw({self.run_dir.name: self.metrics})


def dry_run(
    config: GivenConfig = None,
    rewards: Sequence[Callable[..., object]] = (),
    *,
    model: GivenModel = None,
    data: Rows = None,
    eval_data: Rows = None,
    environment: GivenEnvironment = None,
    algorithm: GivenAlgorithm = None,
) -> Plan:
    """Plans a run: devices, mesh axes and bytes of each role, and the errors that would stop the
    run at its start.

    Its `text()` is what `--dry-run` prints, its `lengths` are those of the data. No weight is read,
    nothing is left written.

    Args:
        config, rewards, model, data, eval_data, environment, algorithm: as in `train`.

    Raises:
        UserError: the roles cannot be placed on the devices.
    """
    from jaxrl.run.attempt import checks, plan_run
    from jaxrl.run.python_objects import bound

    objects = {"data": data, "eval_data": eval_data, "environment": environment}
    objects["algorithm"] = algorithm
    with bound(config, model, dry=True, rewards=rewards, **objects) as (made, given):
        made, notes, refusals, job = checks(made, given)
        plan, lengths = plan_run(made, room=True), () if job is None else job.lengths
        return replace(plan, notes=(*plan.notes, *notes), refusals=refusals, lengths=lengths)


def train(
    config: GivenConfig = None,
    on_step: Callable[[JsonObject], object] | None = None,
    rewards: Sequence[Callable[..., object]] = (),
    *,
    model: GivenModel = None,
    data: Rows = None,
    eval_data: Rows = None,
    environment: GivenEnvironment = None,
    algorithm: GivenAlgorithm = None,
) -> Result:
    """Runs `config` to its end, or resumes what its run directory holds.

        train("run.yaml")
        train({"algorithm": "grpo", "steps": 100}, model="Qwen/Qwen3-0.6B", data=rows, rewards=[f])

    Args:
        config: a `Config`, a YAML file, or a mapping of keys (dotted or nested) as on the command
            line. None: the quickstart or, where `model` or `data` is given, the defaults.
        on_step: called in this thread with a copy of each row of `metrics.jsonl` once the row is
            written; the loop waits for it. Where it raises `StopTraining`, the run saves and
            exports after the update that is running, and returns. Where it raises anything else,
            the run saves and ends with RunError, or with what it raised where that is no Exception
            (`sys.exit()`). In both cases it is not called again, also not with the row of the batch
            that was being trained.
        rewards: reward functions `f(prompts, completions, **columns)`, as in a file that
            `reward.functions` names. One that `reward.functions` names as `python:NAME` takes that
            place (and its weight), any other is added to them. They run in processes of their own,
            so they must be picklable by cloudpickle.
        model: in place of `student.model`: a name as there (a folder, a file, a hub id), a pair
            `(model, tokenizer)` of a `transformers.PreTrainedModel` and its tokenizer, or what
            `jaxrl.load_model` returns. A model that is no name is written into the run directory.
        data: in place of `data.train`: a `datasets.Dataset`, a `pyarrow.Table`, a pandas
            `DataFrame`, any sequence or iterable of mappings, or a function that returns or yields
            them, perhaps without an end (docs/data.md), which mean what the same rows would in a
            file; or the name of one source. `data.prompt_key` and the
            other keys of columns count for them.
        eval_data: in place of `data.eval`: the same, or a mapping of names to such rows for
            several held-out sets.
        environment: in place of `environment.name`: a subclass of `jaxrl.environments.Environment`
            or a function that makes an instance, called for each episode with
            `environment.arguments`, picklable as `rewards` are; or a name as there.
        algorithm: in place of `algorithm`: an `AlgorithmSpec` of your own, picklable as `rewards`
            are; or a name, or a mapping of `name` and `arguments`, as there.

    A run resumes with the same objects only: its directory has the fingerprint of the rows, and
    digests of the source of functions and classes and of the weights of `model`.

    Raises:
        UserError: bad input; nothing is left written then, or what was trained is in the run
            directory.
        RunError: the run cannot continue; the newest checkpoint is in the run directory.
        Interrupted: Ctrl-C or SIGTERM; what was trained is saved.
    """
    from jaxrl.run.attempt import run_config
    from jaxrl.run.python_objects import bound

    if on_step is not None and not callable(on_step):
        raise UserError(f"on_step={on_step!r}: a function that gets each row of metrics is needed")
    objects = {"data": data, "eval_data": eval_data, "environment": environment}
    objects["algorithm"] = algorithm
    with bound(config, model, rewards=rewards, **objects) as (made, given):
        return Result(run_config(made, given, on_step))


def _leave(misfit: Sequence[str], said: bool = False) -> int | None:
    if not misfit:
        return None
    if not said:
        to_stderr("\n".join(misfit))
    return cli.EXIT_DOES_NOT_FIT


def main(argv: Sequence[str]) -> int | None:
    arguments = cli.parse_run(argv, module="jaxrl.train", description=DESCRIPTION)
    with arguments.base.explained():
        if arguments.compile is not None:
            # Its import prepares jax for the compilers of other machines.
            from jaxrl.aot.compile_report import check

            with Interrupt(0).listening():  # SIGTERM and SIGHUP end the compilers' processes too
                report = check(arguments.config, arguments.compile, arguments.suggest, to_stderr)
            print(report.json() if arguments.json else report.text(), end="", flush=True)
            if any(program.error for program in report.programs):
                raise UserError("\n".join(report.failures))
            return _leave(report.failures)
        from jaxrl.plan.table import plan_json
        from jaxrl.run.attempt import checks, plan_run, run_config
        from jaxrl.run.python_objects import NOTHING
        from jaxrl.run.show_data import print_rows, rows_json

        if not arguments.dry_run:
            run_config(arguments.config, NOTHING, notes=[arguments.base.note])
            return None
        asked = arguments.target
        target = None if asked is None else target_machine(asked, "--target")
        elsewhere = target is not None
        config, notes, refusals, job = checks(arguments.config, NOTHING, elsewhere)
        if refusals:
            raise UserError("\n".join(refusals))
        rows = []
        if arguments.show is not None:
            if job is None:
                raise UserError(
                    f"--show {arguments.show}: no row can be read, as a model has only its"
                    " config.json here, or data are not here: fetch them first"
                )
            rows = job.first_rows(arguments.show)
        plan = plan_run(config, target, room=True)
        lengths = () if job is None else job.lengths
        plan = replace(plan, notes=(arguments.base.note, *plan.notes, *notes), lengths=lengths)
        if arguments.json:
            answer = {"target": asked, "fits": not plan.misfit}
            answer |= rows_json(config, rows) if rows else {}
            print(json.dumps(answer | json.loads(plan_json(plan)), indent=1), flush=True)
        else:
            print(plan.text(terminal_width()), end="", flush=True)
            if rows:
                print()
                print_rows(config, rows)
        # A terminal has just shown it.
        return _leave(plan.misfit, said=not arguments.json and sys.stdout.isatty())


cli.make_callable(__name__, train)

if __name__ == "__main__":
    cli.exit_process(cli.run(main))
