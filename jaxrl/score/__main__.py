"""Stores a teacher's scores of data on disk, for runs that read them as teacher.cache=DIR.

The keys of a run go with it: with the run's own --config its batches are scored as it would.
"""

from __future__ import annotations

import signal
from argparse import Namespace
from collections.abc import Sequence

from jaxrl.config import cli
from jaxrl.config import keys as config_keys
from jaxrl.config.schema import Config
from jaxrl.config.yaml_text import assign, assignments
from jaxrl.errors import UserError
from jaxrl.process.interrupt import ASKING
from jaxrl.process.json_types import JsonObject
from jaxrl.teacher.key_rules import POLICY

SIGNALS = ("hidden", "topk", "sampled")
DTYPES = ("float32", "bfloat16", "int8")
READ = (
    *("seed", "mesh", "algorithm", "steps", "batch_size", "group_size", "max_prompt_tokens"),
    *("max_new_tokens", "compile_cache", "student", "teacher", "teachers", "data", "sampling"),
    *("distill", "rollout", "environment", "eval.max_new_tokens"),
)
"""Keys, and sections, that scores, the work on them, or their use by a run depend on."""


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse(argv)
    config = config_of(arguments)
    if arguments.dtype is not None and config.distill.signal != "hidden":
        raise UserError(
            f"--dtype {arguments.dtype} is of hidden states: leave it out with the signal"
            f" {config.distill.signal}, whose log-probs are float32"
        )
    from jaxrl.score.score_data import store_scores

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as `nohup` asks for
    for number in ASKING[:-1] if ignored else ASKING:
        signal.signal(number, signal.default_int_handler)
    store_scores(config, arguments.out, arguments.dtype)


def config_of(arguments: Namespace) -> Config:
    """Returns the config of the run whose off-policy batches are scored.

    Raises:
        UserError: a wrong key, or an option and a key that differ.
    """
    options: JsonObject = {
        "teacher.model": arguments.teacher,
        "data.train": arguments.data or None,
        "distill.signal": arguments.signal,
        "mesh": arguments.mesh,
        "group_size": arguments.samples,
    }
    given = cli.keys_and_options(arguments.overrides, options)
    teacher = given.get("teacher.model")
    if arguments.config is None and teacher is not None:
        given.setdefault("student.model", teacher)
    if arguments.samples is not None:
        given["distill.seq_kd"] = True
    # Scores depend neither on the loss nor on what else a run does.
    given |= {"algorithm": "gkd", "distill.on_policy_fraction": 0.0, "distill.jsd_beta": 1.0}
    given |= {"teacher.address": None, "teacher.cache": None, "teacher.lazy": False}
    config, _ = Config.load_base(arguments.config, given | {"data.eval": None}, only_scored)
    if config.teachers:
        raise UserError(
            f"teachers={', '.join(config.teachers)}: scores are stored of one teacher at a time:"
            " set teachers={} and name it by --teacher"
        )
    if config.teacher.model == POLICY or config.teacher.prompt is not None:
        key = "model" if config.teacher.model == POLICY else "prompt"
        raise UserError(
            f"teacher.{key}={getattr(config.teacher, key)}: scores are stored of a model that stays"
            " the same and reads the student's prompts: set teacher.model to it, and"
            " teacher.prompt=null"
        )
    return config


def only_scored(mapping: JsonObject) -> JsonObject:
    """Returns the keys of a config that scoring reads; unknown ones stay, to be refused."""
    others = {key.path for key in config_keys.keys(Config) if not config_keys.under(key.path, READ)}
    flat = dict(assignments(mapping, config_keys.mappings(Config)))
    return assign({}, {key: value for key, value in flat.items() if key not in others})


def _parser() -> cli.Parser:
    parser = cli.Parser("jaxrl.score", __doc__ or "", keys=None)
    add = parser.add_argument
    add("--teacher", metavar="MODEL", help="HF folder, .gguf file, run directory (teacher.model)")
    add(
        "--data",
        metavar="SOURCE",
        action="append",
        help="data with completions, or prompts for --samples (data.train); may be repeated",
    )
    add("--out", metavar="DIR", required=True, help="folder to write, or to continue")
    add("--config", metavar="FILE.yaml", help="the run that will read the scores, or builtin:NAME")
    add("--signal", choices=SIGNALS, help="what is stored of each token (default hidden)")
    add("--dtype", choices=DTYPES, help="of hidden states (default: the dtype of the teacher)")
    add(
        "--samples",
        type=int,
        metavar="N",
        help="the teacher samples N completions of each prompt, and scores these (distill.seq_kd)",
    )
    add("--mesh", metavar="SPEC", help="devices, as in teacher=4 (default: all)")
    add("overrides", nargs="*", metavar=cli.KEY_VALUE, help="set a key, as in max_new_tokens=1024")
    return parser


if __name__ == "__main__":
    cli.exit_process(cli.run(main))
