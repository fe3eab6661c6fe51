"""Shows rows of data as a run learns them: their text and tokens, and which of these are learned.

Without --config and algorithm=NAME, the completions of the data are learned (algorithm=sft).
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, cast

from jaxrl.config import cli
from jaxrl.config.schema import Config
from jaxrl.errors import UserError, counted
from jaxrl.process.json_types import JsonObject
from jaxrl.process.streams import Output, terminal_width

if TYPE_CHECKING:
    from jaxrl.data.shown_rows import ShownRow

READ = ("seed", "algorithm", "max_prompt_tokens", "max_new_tokens", "student", "teacher", "data")
"""Keys, and sections, that decide the tokens of a row."""
EXAMPLES = (
    "rows.jsonl --student Qwen/Qwen3-0.6B --row 7",
    "--config run.yaml --row 0 --row 1",
    "prompts.jsonl --student M algorithm=gspo 'reward.functions=[math]'",
)
WIDTH = 80
"""Columns where there is no terminal."""


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse(argv)
    config = reading_config(arguments)
    from jaxrl.data.shown_rows import show_row
    from jaxrl.run.job import train_rows
    from jaxrl.run.names import with_commits

    config, _ = with_commits(config)
    rows = train_rows(config)
    numbers = arguments.row or [0]
    for number in numbers:
        if not 0 <= number < len(rows.source):
            has = counted(len(rows.source), "row")
            raise UserError(f"--row {number}: {rows.source.name} has {has}, numbered from 0")
    shown = [show_row(rows.encode, *rows.source.locate(number)) for number in numbers]
    if arguments.json:
        print(json.dumps(rows_json(config, shown), ensure_ascii=False, indent=1), flush=True)
    else:
        print_rows(config, shown)


def reading_config(arguments: Namespace) -> Config:
    """Returns the config of the run that would read the rows.

    Raises:
        UserError: a wrong key, or an option and a key that differ.
    """
    is_key = re.compile(r"[a-z_]\w*(\.[\w-]+)*\s*=").match
    data = [word for word in arguments.words if not is_key(word)]
    overrides = [word for word in arguments.words if is_key(word)]
    options: JsonObject = {"data.train": data or None, "student.model": arguments.student}
    given = cli.keys_and_options(overrides, options)
    if arguments.config is None:
        for key, way in (("data.train", "name the data"), ("student.model", "--student MODEL")):
            if key not in given:
                raise UserError(
                    f"{way} ({key}), or give the --config of a run: the model's tokenizer and chat"
                    " template make tokens of the rows"
                )
        given.setdefault("algorithm", "sft")
    config, base = Config.load_base(arguments.config, given)
    with base.explained():
        return config


def what_is_learned(config: Config) -> str:
    """Says what a run learns of the data."""
    from jaxrl.algorithms.methods import method_of, sampled_share

    method, share = method_of(config), sampled_share(config)
    samples = "the teacher's samples" if config.distill.seq_kd else "samples"
    if not method.reads_completions(config):
        return f"prompts are sampled from, and {samples} are learned"
    if share == 0:
        return "completions of the data are learned"
    return (
        f"about {share:.0%} of the batches learn {samples} of the prompts, the others the"
        " completions of the data"
    )


def rows_json(config: Config, rows: Iterable[ShownRow]) -> JsonObject:
    """Returns rows as an object of JSON."""
    return {
        "student": config.student.model,
        "algorithm": config.algorithm,
        "rows": [row.json() for row in rows],
    }


def print_rows(config: Config, rows: Iterable[ShownRow]) -> None:
    """Prints rows on standard output, in colour where that is a terminal."""
    from rich.console import Console

    width = terminal_width() if sys.stdout.isatty() else WIDTH
    file = cast("IO[str]", Output(sys.stdout))
    console = Console(file=file, width=width, highlight=False, force_jupyter=False)
    console.print(f"algorithm={config.algorithm}: {what_is_learned(config)}", markup=False)
    for row in rows:
        console.print()
        for line in row.lines(width):
            console.print(line, no_wrap=True, crop=False, overflow="ignore")


def _parser() -> cli.Parser:
    parser = cli.Parser("jaxrl.run.show_data", __doc__ or "", READ, EXAMPLES)
    parser.usage = f"{parser.prog} [DATA ...] --student MODEL [OPTION ...] [key=value ...]"
    add = parser.add_argument
    words = "what data.train takes (a file, a task, hf:ORG/NAME), and keys, as in data.chat=raw"
    add("words", nargs="*", metavar="DATA", help=words)
    add("--student", metavar="MODEL", help="whose tokenizer reads the rows (student.model)")
    add("--config", metavar="FILE.yaml", help="the run that learns the rows, or builtin:NAME")
    words = "number of a row, from 0 (default 0); may be repeated"
    add("--row", type=int, metavar="N", action="append", help=words)
    add("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    cli.exit_process(cli.run(main))
