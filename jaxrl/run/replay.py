"""Does a finished or stopped run again from its folder, and says whether it comes to the same bits;
or one of its steps, also with other keys.

Takes the rewards and the answers of environments that the run recorded; asks served teachers again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl.config import cli
from jaxrl.config.schema import CONFIG_FILE, Config, Overrides
from jaxrl.errors import UserError, user_path

if TYPE_CHECKING:
    from jaxrl.data.source import Rows
    from jaxrl.run.evaluation import PathLike
    from jaxrl.run.python_objects import GivenAlgorithm, GivenEnvironment
    from jaxrl.run.replay_steps import Replay

DESCRIPTION = __doc__ or ""
"""Of the command."""


def replay(
    run: PathLike,
    step: int | None = None,
    overrides: Overrides = (),
    *,
    rewards: Sequence[Callable[..., object]] = (),
    data: Rows = None,
    eval_data: Rows = None,
    environment: GivenEnvironment = None,
    algorithm: GivenAlgorithm = None,
    folder: PathLike | None = None,
    tell: Callable[[str], None] | None = None,
) -> Replay:
    """Does a run again from its folder, which may be a copy, and compares every row of metrics, the
    checksums of what was sampled, and the weights at its end.

        print(jaxrl.replay("runs/a"))
        again = jaxrl.replay("runs/a", 137, ["policy.clip_high=0.3"])
        again.step.batch.row(41)

    Needs the same kind and number of devices, models and data. Nothing in the folder is changed.

    Args:
        run: the folder of a run.
        step: the step to do again, from the newest checkpoint before it; None: all of them.
        overrides: keys that are set otherwise, in a second replay of the step.
        rewards, data, eval_data, environment, algorithm: the objects of Python that the run was
            given, as in `jaxrl.train`.
        folder: a new folder for the files of the replay; None: they are removed.
        tell: gets a line now and then.

    Raises:
        UserError: bad input, or the folder lacks what a replay needs.
        RunError: the record of a streamed run does not fit, or a turn of an episode is another
            than the one whose answer is recorded.
    """
    from jaxrl.run.python_objects import PythonObjects, entries, pickled_rewards
    from jaxrl.run.replay_steps import replay as again

    place = user_path(run)
    if overrides and step is None:
        raise UserError("other keys need a step: replay(run, step, overrides), or --step N")
    _, given = entries(data, eval_data, environment, algorithm)
    given = PythonObjects({**given.code, **pickled_rewards(rewards)}, given.rows)
    with ExitStack() as stack:
        if folder is None:
            files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrl-replay-")))
        else:
            files = user_path(folder)
            if files.exists():
                raise UserError(f"{files} exists: name a new folder for the replay")
        return again(
            *(place, given),
            step=step,
            keys=overrides,
            place=files.absolute(),
            tell=tell or (lambda text: None),
        )


def _parser() -> cli.Parser:
    examples = ("runs/a", "runs/a --step 137 --completion 41", "runs/a --step 137 seed=1")
    parser = cli.Parser("jaxrl.run.replay", DESCRIPTION, None, examples)
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run, or a copy of it")
    add("--step", type=int, metavar="N", help="one step, from the newest checkpoint before it")
    add(
        "--completion",
        type=int,
        metavar="I",
        help="with --step: print each token of this row of its batch (0 is the first)",
    )
    add("--folder", metavar="FOLDER", help="keep the files of the replay in this new folder")
    add(
        "overrides",
        nargs="*",
        metavar=cli.KEY_VALUE,
        help="with --step: do it a second time with this key, and compare",
    )
    return parser


def main(argv: Sequence[str]) -> int | None:
    arguments = _parser().parse(argv)
    if arguments.completion is not None and arguments.step is None:
        raise UserError("--completion I needs --step N")
    if (row := arguments.completion) is not None:
        config = Config.load(user_path(arguments.run) / CONFIG_FILE)
        rows = config.batch_size * config.group_size
        if not 0 <= row < rows:
            raise UserError(f"--completion {row}: a batch of the run has the rows 0 to {rows - 1}")
    found = replay(
        arguments.run,
        arguments.step,
        arguments.overrides,
        folder=arguments.folder,
        tell=lambda text: print(text, flush=True),
    )
    print(found)
    row, changed = arguments.completion, found.changed
    for done in filter(None, (found.step, changed if row is not None else None)):
        of = f"with {' '.join(arguments.overrides)}:\n" if done is changed else ""
        print(f"\n{of}{done.batch!r}" if row is None else f"\n{of}{done.batch.row(row)}")
    if arguments.folder is not None and row is not None:
        found.write_tokens(user_path(arguments.folder), row)
    return None if found.same else cli.EXIT_FAILED


if __name__ == "__main__":
    cli.exit_process(cli.run(main))
