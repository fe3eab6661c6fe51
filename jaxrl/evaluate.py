"""Evaluates any checkpoint on held-out prompts: mean@k and pass@k with 95% intervals.

Without --config, a model in a run directory is evaluated as its run evaluates it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrl.config import cli
from jaxrl.config import keys as config_keys
from jaxrl.config.schema import Config, Overrides
from jaxrl.config.settings import EVALUATED_MESH
from jaxrl.errors import user_path

if TYPE_CHECKING:
    from jaxrl.data.source import Rows
    from jaxrl.process.json_types import JsonObject
    from jaxrl.run.evaluation import PathLike
    from jaxrl.run.python_objects import GivenEnvironment, GivenModel

_KEYS = [key.path for key in config_keys.keys(Config) if config_keys.read_by_evaluations(key.path)]
DESCRIPTION = __doc__ or ""
"""Of the command; the module's own docstring becomes the function's."""


def evaluate(
    model: PathLike | Config | GivenModel,
    config: PathLike | Config | Mapping[str, object] | None = None,
    *,
    eval_data: Rows = None,
    environment: GivenEnvironment = None,
    overrides: Overrides = (),
    mesh: str | None = None,
    out: PathLike | None = None,
    samples: PathLike | None = None,
    tell: Callable[[str], None] | None = None,
) -> JsonObject:
    """Measures the accuracy of a checkpoint on `data.eval`, as `eval.*` says: what a run with the
    same keys reports for the same weights.

    Of a config only the keys about evaluation count, and never its placement.

    Args:
        model: any name that `load_model` takes; what it returns, or a pair `(model, tokenizer)` of
            transformers, as in `jaxrl.train`; or a config, for its `student.model`.
        config: a config, a YAML file or a mapping of keys; None for that of the run that `model`
            came from.
        eval_data, environment: in place of `data.eval` and `environment.name`, as in `jaxrl.train`.
        overrides: `key=value` words, or a mapping of keys to values, above the config.
        mesh: devices of the role that samples, as in `rollout=4`; None: one.
        out: file that gets the result as JSON.
        samples: file that gets every completion, one JSON object (`Sample`) a line.
        tell: gets what a reader should know meanwhile.

    Returns:
        `model`, `path` and `step` of the weights (None where no run tells it); `metrics`, the row
        `eval/...` as in `metrics.jsonl`; `sets`, the same of each set with its prompts and speed;
        `settings`, the keys that were read.

    Raises:
        UserError: bad input; nothing has been sampled then.
    """
    from jaxrl.checkpoint.model_source import Model, resolve_model
    from jaxrl.run.evaluation import prepare_evaluation
    from jaxrl.run.generation import write_lines
    from jaxrl.run.python_objects import named

    if isinstance(model, Config):
        model, config = model.student.model, model if config is None else config
    out = None if out is None else cli.check_writable("--out", out)
    samples = None if samples is None else cli.check_writable("--samples", samples)
    with named(model) as name:
        source = resolve_model(name)
        if isinstance(model, Model):  # which has the config of the run that it came from
            source = replace(source, name=model.source.name, path=model.source.path)
        job = prepare_evaluation(source, config, overrides, mesh, eval_data, environment)
        if tell is not None:
            for note in job.notes:
                tell(note)
        result, lines = job.run()
    if samples is not None:
        write_lines("--samples", samples, lines)
    if out is not None:
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        write_lines("--out", out, [text])
    return result


def _parser() -> cli.Parser:
    examples = (
        "runs/quickstart eval.samples=8 eval.temperature=0.7",
        "Qwen/Qwen3-0.6B data.eval=hf:openai/gsm8k:main",
    )
    parser = cli.Parser("jaxrl.evaluate", DESCRIPTION, _KEYS, examples)
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="HF folder, hub id, .gguf file, run directory, RUN/checkpoints/STEP, package:NAME or"
        " builtin:student",
    )
    add(
        "--config",
        metavar="FILE.yaml",
        help="keys about evaluation are read from it, or from builtin:NAME (default: the config of"
        " MODEL's run)",
    )
    parser.add_family()
    add("--mesh", metavar="SPEC", help=f"devices, as in rollout=4 (default {EVALUATED_MESH})")
    add("--out", metavar="FILE.json", help="write the numbers and the settings there")
    add("--samples", metavar="FILE.jsonl", help="write every completion with its score there")
    add("overrides", nargs="*", metavar=cli.KEY_VALUE, help="set a key, as in eval.samples=8")
    return parser


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse(argv)
    result = evaluate(
        arguments.model,
        arguments.config,
        overrides=arguments.overrides,
        mesh=arguments.mesh,
        out=arguments.out,
        samples=arguments.samples,
        tell=print,
    )
    from rich.console import Console

    from jaxrl.process.streams import WIDTH
    from jaxrl.run.evaluation import results_table

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(results_table(result))
    for path in filter(None, (arguments.samples, arguments.out)):
        print(f"wrote {user_path(path)}")


cli.make_callable(__name__, evaluate)

if __name__ == "__main__":
    cli.exit_process(cli.run(main))
