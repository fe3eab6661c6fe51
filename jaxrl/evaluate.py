"""Evaluates any checkpoint on held-out prompts: mean@k and pass@k with 95% intervals.

Without --config, a model in a run directory is evaluated as its run evaluates it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxrl.checkpoint import store
from jaxrl.checkpoint.source import FINAL, ModelSource, resolve_model
from jaxrl.config import base as config_base
from jaxrl.config import cli, yaml_text
from jaxrl.config import keys as config_keys
from jaxrl.config.base import Overrides
from jaxrl.config.schema import Config
from jaxrl.data.stream import EvalSet
from jaxrl.errors import UserError
from jaxrl.models.kernels import CPU
from jaxrl.plan.inputs import PlanInputs
from jaxrl.process.callable_module import make_callable
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.rewards.verifiers import verifier
from jaxrl.roles.rollout import Sampler
from jaxrl.run import inputs
from jaxrl.run.evaluation import Judge, Scores, judged, pass_ks, row_of_scores
from jaxrl.runtime.worker import Phase, enter
from jaxrl.sampling.engine import EngineStats
from jaxrl.sharding.mesh import carve, ensure_devices, verify_arrays
from jaxrl.sharding.placement import check_visible, place
from jaxrl.telemetry.metrics import Sample
from jaxrl.types import Completion

MESH = "rollout=1"
"""Placement where none is asked for."""
READ = (
    "seed",
    "mesh",
    "max_prompt_tokens",
    "max_new_tokens",
    "compile_cache",
    "data",
    "sampling.stop",
    "rollout",
    "eval",
)
"""Keys, and sections, that an evaluation reads."""
UNREAD = ("data.train", "data.weights", "data.shuffle", "eval.every", "eval.teacher")
"""Keys of those sections that only training reads."""
WIDTH = 132
"""Columns of the table where there is no terminal."""

Tell = Callable[[str], None]
PathLike = str | os.PathLike[str]
Groups = Sequence[Sequence[Completion]]
"""The samples of each prompt."""


@dataclass(frozen=True)
class Job:
    """What is evaluated; everything in it fits together, and no weight has been read."""

    config: Config
    source: ModelSource
    mesh: Mesh
    tokenizer: Any
    end_ids: tuple[int, ...]
    sets: tuple[EvalSet, ...]
    judge: Judge
    notes: tuple[str, ...]
    """What a reader should know."""


def evaluate(
    model: PathLike | Config,
    config: PathLike | Config | None = None,
    *,
    overrides: Overrides = (),
    mesh: str | None = None,
    out: PathLike | None = None,
    samples: PathLike | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """The accuracy of a checkpoint on `data.eval`, as `eval.*` says: what a run with the same keys
    reports of the same weights.

    Of a config only the keys about evaluation count, and never its placement.

    Args:
        model: any name that `load_model` takes; or a config, for its `student.model`.
        config: a config or a YAML file; None for that of the run that `model` came from.
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
    if isinstance(model, Config):
        model, config = model.student.model, model if config is None else config
    for option, path in (("--out", out), ("--samples", samples)):
        cli.check_writable(option, path)
    source = resolve_model(model)
    base = _base(source, config)
    job = _prepare(source, _config(source, base, overrides, mesh))
    if tell is not None:
        for note in job.notes:
            tell(note)
    groups, speeds = _sample(job)
    scores = judged(job.sets, groups, job.judge)
    step = _step(source, base)
    result = {
        "model": source.name,
        "path": str(source.path),
        "step": step,
        "metrics": row_of_scores(job.sets, groups, scores),
        "sets": _by_set(job.sets, groups, scores, speeds),
        "settings": _settings(job.config),
    }
    if samples is not None:
        _write("--samples", samples, _lines(job.sets, groups, scores, step or 0))
    if out is not None:
        _write("--out", out, [json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)])
    return result


def _base(source: ModelSource, config: PathLike | Config | None) -> dict[str, Any]:
    """The keys that the overrides go on top of."""
    if isinstance(config, Config):
        return config.model_dump(mode="json")
    path = _run_config(source) if config is None else Path(config).expanduser()
    if path is None:
        return {}
    mapping = config_base.read(path)
    config_keys.refuse_unknown(Config, mapping)
    return mapping


def _run_config(source: ModelSource) -> Path | None:
    """The config of the run that wrote this model; None where no run did."""
    place = source.path.resolve()
    folder = place.parent if place.name == FINAL else place
    if folder == place and not (place / store.MANIFEST).is_file():
        return None
    return folder / store.CONFIG if (folder / store.CONFIG).is_file() else None


def _step(source: ModelSource, base: Mapping[str, Any]) -> int | None:
    """Batches trained into the weights; None where no run tells."""
    place = source.path.resolve()
    if place.parent.name == store.FOLDER and place.name.isdigit():
        return int(place.name)
    saved = store.folders(place.parent) if place.name == FINAL else []
    # A run that was given more steps, and did not reach them, still has its earlier final model.
    ended = bool(saved) and int(saved[0].name) == base.get("steps")
    return int(saved[0].name) if ended else None


def _config(
    source: ModelSource, base: Mapping[str, Any], overrides: Overrides, mesh: str | None
) -> Config:
    """The config of an evaluation: what only training reads keeps its defaults."""
    if isinstance(overrides, str):
        raise UserError(f"overrides is a list of key=value strings, got {overrides!r}")
    given = dict(yaml_text.assignments(overrides, config_keys.mappings(Config)))
    for key in given:
        _check_read(key)
    mapping = yaml_text.assign(_kept(base), given)
    if mesh is not None:
        mapping["mesh"] = mesh
    config = Config.parse(mapping | {"student": {"model": source.name}, "algorithm": "sft"})
    if config.data.eval is None:
        raise UserError(
            f"nothing to evaluate on: give data.eval=SOURCE, or --config FILE.yaml; model"
            f" {source.name!r} is of no run that names a data.eval"
        )
    longest = config.eval.max_new_tokens or config.max_new_tokens
    return config.model_copy(update={"max_new_tokens": longest})


def _kept(base: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation reads of a run's keys. Placement belongs to the machine, not to the run;
    the sizes of its batches stand for the slots where `rollout.slots` is null."""
    names = ("seed", "max_prompt_tokens", "max_new_tokens", "compile_cache", "eval")
    kept = {name: base[name] for name in (*names, "batch_size", "group_size") if name in base}
    kept["mesh"] = MESH
    kept["rollout"] = _without(base.get("rollout"), lambda key: key in ("parallel", "devices"))
    kept["sampling"] = _without(base.get("sampling"), lambda key: key != "stop")
    kept["data"] = {"train": "arithmetic"}  # a required key, which nothing here opens
    kept["data"] |= _without(base.get("data"), lambda key: f"data.{key}" in UNREAD)
    return kept


def _without(section: Any, dropped: Callable[[str], bool]) -> dict[str, Any]:
    """The section's other keys; none where it is left out."""
    if section is not None and not isinstance(section, Mapping):
        raise UserError(f"the config has {section!r} where a section of keys belongs")
    return {key: value for key, value in (section or {}).items() if not dropped(key)}


def _check_read(key: str) -> None:
    """Refuses an override that would change nothing; unknown keys are refused by the config."""
    known = [k.path for k in config_keys.keys(Config)]
    read = any(key == name or key.startswith(f"{name}.") for name in READ) and key not in UNREAD
    if read or key not in known:
        return
    meant = f"eval.{key.rpartition('.')[2]}"
    hint = f" (did you mean {meant}?)" if meant in known and meant not in UNREAD else ""
    raise UserError(f"{key} has no part in an evaluation{hint}; keys that have: {', '.join(READ)}")


def _prepare(source: ModelSource, config: Config) -> Job:
    """All that can be checked before a weight is read."""
    tokenizer = inputs.tokenizer_of(source)
    ends = inputs.end_ids(source, tokenizer)
    width = config.max_prompt_tokens + config.max_new_tokens
    if width > source.config.max_positions:
        raise UserError(
            f"max_prompt_tokens={config.max_prompt_tokens} and"
            f" max_new_tokens={config.max_new_tokens} make {width} positions; model"
            f" {source.name!r} has {source.config.max_positions}: lower one of them"
        )
    judge = verifier(config.data.verifier)
    sets = inputs.held_out_sets(config, inputs.encoder(config, tokenizer, ends))
    notes = inputs.held_out_notes(config, sets, judge)
    prompts = [prompt for held_out in sets for prompt in held_out.prompts]
    beyond = max(max(prompt.tokens) for prompt in prompts)
    if beyond >= source.config.vocab_size:
        raise UserError(
            f"model {source.name!r} has {source.config.vocab_size} tokens, but its tokenizer gives"
            f" id {beyond}: is it the right tokenizer?"
        )
    enable_compile_cache(config.compile_cache)
    mesh, placed = _mesh(source, config)
    config = config.with_dtypes(mesh.devices.flat[0].platform)
    return Job(config, source, mesh, tokenizer, ends, sets, judge, (*placed, *notes))


def _mesh(source: ModelSource, config: Config) -> tuple[Mesh, list[str]]:
    """The mesh of the role that samples, and what to say of it."""
    placement = place(config.mesh, ("rollout",), {"rollout": config.rollout.devices})
    seen = ensure_devices(placement.n_devices)
    placement = check_visible(placement, len(seen.devices))
    limits = (None,) * len(placement.pools)
    axes = PlanInputs(placement, ("rollout",), source.config, None, limits, CPU).axes(config)
    model, dtype = source.config, config.with_dtypes(seen.devices[0].platform).rollout.dtype
    told = (
        f"{source.name}: {model.family}, {model.n_params:,} parameters, {dtype},"
        f" on {axes['rollout']}"
    )
    mesh = carve(seen.devices, placement, axes)["rollout"]
    return mesh, [told, *filter(None, [seen.note]), *placement.notes]


def _sample(job: Job) -> tuple[list[list[Completion]], list[EngineStats]]:
    """The samples of all prompts, set by set, and what each set took."""
    sampler = _sampler(job)
    working = Phase()
    enter(working, lambda: False)
    groups, speeds = [], []
    # A notebook says that it shows colours, which is no terminal.
    terminal = Console(stderr=True, force_jupyter=False, force_terminal=sys.stderr.isatty())
    with terminal.status(_Progress(working)):
        for held_out in job.sets:
            working.name = held_out.name or "data.eval"
            groups += sampler.sample(held_out.prompts)
            speeds.append(sampler.engine.stats)
    return groups, speeds


def _sampler(job: Job) -> Sampler:
    """The rollout role with the checkpoint's weights."""
    config, mesh = job.config, job.mesh
    params = job.source.load(mesh, jnp.dtype(config.rollout.dtype), "unstacked")
    verify_arrays("rollout", params, mesh)
    wanted = max(len(held_out.prompts) for held_out in job.sets) * config.eval.samples
    return Sampler(
        config,
        job.source.config,
        mesh,
        slots=config.rollout.slots or min(config.batch_size * config.group_size, wanted),
        tokenizer=job.tokenizer,
        pad_id=inputs.pad_id(job.source, job.end_ids),
        eos_ids=job.end_ids,
        row_multiple=mesh.shape["data"] * mesh.shape["fsdp"],
        vocab_size=job.source.config.vocab_size,
        params=params,
    )


@dataclass(frozen=True)
class _Progress:
    """How far the sampling is, at each look; shown on a terminal alone."""

    phase: Phase

    def __rich__(self) -> str:
        return f"{self.phase.name.partition(', version')[0]}: {self.phase.detail}"


def _by_set(
    sets: Sequence[EvalSet], groups: Groups, scores: Scores, speeds: Sequence[EngineStats]
) -> list[dict[str, Any]]:
    """Of each set its metrics, without `eval/`, and what is told beside them."""
    found, start = [], 0
    for held_out, stats in zip(sets, speeds, strict=True):
        mine = slice(start, start + len(held_out.prompts))
        row = row_of_scores([replace(held_out, name="")], groups[mine], scores[mine])
        about = {
            "name": held_out.name,
            "prompts": len(held_out.prompts),
            "dropped": held_out.dropped,
            "samples": len(groups[start]),
        }
        speed = {
            "tokens": stats.generated_tokens,
            "seconds": stats.seconds,
            "tokens_per_second": stats.tokens_per_second,
        }
        found.append(about | {k.removeprefix("eval/"): v for k, v in row.items()} | speed)
        start = mine.stop
    return found


def _settings(config: Config) -> dict[str, Any]:
    """Dotted key -> value of every key that was read."""
    found = {}
    whole = config.model_dump(mode="json")
    for key in (k.path for k in config_keys.keys(Config)):
        if key in UNREAD or not any(key == name or key.startswith(f"{name}.") for name in READ):
            continue
        value: Any = whole
        for part in key.split("."):
            value = value[part]
        found[key] = value
    return found


def _lines(sets: Sequence[EvalSet], groups: Groups, scores: Scores, step: int) -> list[str]:
    """Every completion, as `samples.jsonl` has it."""
    prompts = [prompt for held_out in sets for prompt in held_out.prompts]
    return [
        json.dumps(
            asdict(
                Sample.of(
                    prompt, completion, step=step, split="eval", policy_version=step, score=score
                )
            ),
            ensure_ascii=False,
        )
        for prompt, group, marks in zip(prompts, groups, scores, strict=True)
        for completion, score in zip(group, marks, strict=True)
    ]


def _write(option: str, path: PathLike, lines: Sequence[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}") from error


def table(result: Mapping[str, Any]) -> Table:
    """mean@k and each pass@k of every set and, where there are several, of all; 80 columns wide."""
    shown = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, collapse_padding=True)
    shown.add_column("set", min_width=9, overflow="fold")
    for heading in ("prompts", "", "95% interval", "tokens", "cut", "unjudged", "tokens/s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    sets = result["sets"]
    for row in sets:
        _add_rows(shown, row["name"] or "data.eval", row)
    if len(sets) > 1:
        whole = {name.removeprefix("eval/"): value for name, value in result["metrics"].items()}
        whole |= {name: sum(row[name] for row in sets) for name in ("prompts", "tokens")}
        whole["tokens_per_second"] = whole["tokens"] / sum(row["seconds"] for row in sets)
        _add_rows(shown, "mean", whole | {"samples": sets[0]["samples"]})
    return shown


def _add_rows(shown: Table, name: str, row: Mapping[str, Any]) -> None:
    """One line for each value; what is the same for all stands in the first."""
    k = row["samples"]
    about = (
        f"{row['mean_completion_tokens']:.1f}",
        f"{row['truncated_fraction']:.1%}",
        f"{row['unjudged']:.0f}",
        f"{row['tokens_per_second']:,.0f}",
    )
    shown.add_row(name, str(row["prompts"]), f"mean@{k}", _cell(row, "accuracy"), *about)
    for n in pass_ks(k):
        shown.add_row("", "", f"pass@{n}", _cell(row, f"pass@{n}"))


def _cell(row: Mapping[str, Any], name: str) -> str:
    """Per cent, with the interval."""
    if name not in row:
        return "not judged"
    return f"{row[name]:.1%} [{100 * row[f'{name}_low']:.1f}, {100 * row[f'{name}_high']:.1f}]"


def _parser() -> cli.Parser:
    parser = cli.Parser("jaxrl.evaluate", __doc__ or "")
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="HF folder, .gguf file, run directory, RUN/checkpoints/STEP, package:NAME or"
        " builtin:student",
    )
    add(
        "--config",
        metavar="FILE.yaml",
        help="keys about evaluation are read from it (default: the config of MODEL's run)",
    )
    add("--mesh", metavar="SPEC", help=f"devices, as in rollout=4 (default {MESH})")
    add("--out", metavar="FILE.json", help="write the numbers and the settings there")
    add("--samples", metavar="FILE.jsonl", help="write every completion with its score there")
    add("overrides", nargs="*", metavar="key=value", help=f"set a key of: {', '.join(READ)}")
    parser.epilog = f"{cli.called_as('jaxrl.train')} --help tells what each key means."
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
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(table(result))
    for path in filter(None, (arguments.samples, arguments.out)):
        print(f"wrote {path}")


make_callable(__name__, evaluate)

if __name__ == "__main__":
    sys.exit(cli.run(main))
