"""Evaluation on held-out prompts: mean@k and pass@k with intervals, in a run and of a checkpoint by
itself.

A set's value is the mean over its prompts of a per-prompt value in [0, 1]; the value of several
sets is the mean over the sets. Prompts are the independent units: the samples of one prompt are
alike, so more of them narrow nothing by themselves. All intervals are two-sided, of 95%. A
checkpoint by itself is sampled by the rollout role: a run with the same keys reports the same of
the same weights.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxrl.checkpoint import store
from jaxrl.checkpoint.model_source import (
    FINAL,
    ModelSource,
    check_positions,
    completion_ends,
    longest_sequence,
)
from jaxrl.config import keys as config_keys
from jaxrl.config import yaml_text
from jaxrl.config.builtin_configs import config_file
from jaxrl.config.schema import Config, Overrides, read_keys
from jaxrl.config.settings import EVALUATED, EVALUATED_MESH, PLACEMENT, SLOTS
from jaxrl.data.source import Rows
from jaxrl.data.stream import EvalSet
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.models.kernels import CPU, default_dtype, target_of, try_kernels
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.json_types import JsonObject
from jaxrl.rewards.batch_rewards import episode_rewards
from jaxrl.rewards.verifiers import Verifier, verifier
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.run_shapes import RunInputs
from jaxrl.run.job import encoder, episodes, held_out_notes, held_out_sets, token_notes
from jaxrl.run.python_objects import GivenEnvironment, entries
from jaxrl.runtime.worker import Phase, here
from jaxrl.sampling.engine import EngineStats
from jaxrl.sharding.mesh import ensure_devices, role_meshes, verify_arrays
from jaxrl.sharding.placement import check_visible, place
from jaxrl.telemetry.metrics import Sample, held_out_reward
from jaxrl.types import Completion, Row, SampleCounts

Scores = Sequence[Sequence[float | None]]
"""For each prompt, the scores of its samples."""
T = TypeVar("T")

Z = 1.959963984540054
"""The normal distribution's 97.5% point."""


@dataclass(frozen=True)
class Estimate:
    """A value in [0, 1] with its interval, which holds it and is never of zero width."""

    value: float
    low: float
    high: float


def judged(
    sets: Sequence[EvalSet], groups: Sequence[Sequence[Completion]], judge: Verifier
) -> list[list[float | None]]:
    """Judges each prompt's samples; returns their scores in the order of `groups`."""
    prompts = [prompt for held_out in sets for prompt in held_out.prompts]
    return [
        [None if one.failure else judge(one.whole_text, prompt) for one in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def evaluation_row(
    sets: Sequence[EvalSet], groups: Sequence[Sequence[Completion]], scores: Scores
) -> dict[str, float]:
    """Computes the metrics `eval/...` of one evaluation; those of each named set as
    `eval/NAME/...`.

    What cannot be judged is left out of every mean and counted in `eval/unjudged`; where nothing
    can be, there is no accuracy.

    Args:
        groups: the samples of each prompt, the prompts of all sets one after the other.
        scores: of these samples (`judged`).
    """
    by_set = [estimates(part) for part in split_by_set(sets, scores)]
    names = dict.fromkeys(name for values in by_set for name in values)
    means = {name: mean_of([v[name] for v in by_set if name in v]) for name in names}
    described = [
        _description(*of)
        for of in zip(split_by_set(sets, groups), split_by_set(sets, scores), strict=True)
    ]
    whole = {}
    for name in dict.fromkeys(name for own in described for name in own):
        of_sets = [own[name] for own in described if name in own]
        whole[name] = float(sum(of_sets) if name in COUNTS else np.mean(of_sets))
    named = [
        (f"eval/{one.name}", values, own)
        for one, values, own in zip(sets, by_set, described, strict=True)
        if one.name
    ]
    row = {}
    for prefix, values, own in [("eval", means, whole), *named]:
        for name, estimate in values.items():
            row[f"{prefix}/{name}"] = estimate.value
            row[f"{prefix}/{name}_low"] = estimate.low
            row[f"{prefix}/{name}_high"] = estimate.high
        row |= {f"{prefix}/{name}": value for name, value in own.items()}
    return row


COUNTS = ("unjudged", "environment_failures")
"""Of several sets the sum is told of these, of all else the mean over the sets."""


def _description(
    groups: Sequence[Sequence[Completion]], scores: Sequence[Sequence[float | None]]
) -> dict[str, float]:
    """Returns the metrics of one set's completions, beside how well they were judged."""
    counts = SampleCounts.count(len(groups), [one for group in groups for one in group])
    n = counts.completions
    row = {
        "unjudged": float(sum(score is None for marked in scores for score in marked)),
        "mean_completion_tokens": counts.tokens / n,
        "truncated_fraction": counts.truncated / n,
    }
    if counts.turns:
        rewards = episode_rewards([one for group in groups for one in group], 1.0)
        if not np.isnan(rewards).all():
            row["environment_reward"] = float(np.nanmean(rewards))
        row["environment_failures"] = float(counts.failures + counts.timeouts)
    return row


def estimates(scores: Scores) -> dict[str, Estimate]:
    """Computes `accuracy` (mean@k) of one set and, if k > 1, `pass@2`, `pass@4`, ..., `pass@k`.

    pass@K is over the prompts whose samples are all judged, the same for each K, so that it never
    falls with K; a value that no prompt is left for is absent.
    """
    known = [[score for score in row if score is not None] for row in scores]
    assert all(0 <= score <= 1 for row in known for score in row), "scores lie in [0, 1]"
    values = {"accuracy": [float(np.mean(row)) for row in known if row]}
    samples = max(map(len, scores), default=0)
    whole = [row for row in known if len(row) == samples]
    for k in pass_ks(samples):
        values[f"pass@{k}"] = [
            pass_at_k(samples, sum(score >= 1 for score in row), k) for row in whole
        ]
    return {name: wilson(float(np.mean(v)), len(v)) for name, v in values.items() if v}


def pass_ks(n: int) -> tuple[int, ...]:
    """Returns the powers of two from 2 up to n samples, and n itself; none for a single sample."""
    powers = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    return (*powers, n) if n > 1 else ()


def pass_at_k(n: int, c: int, k: int) -> float:
    """Computes the probability that at least one of k samples passes, unbiased, from n samples of
    which c do.

    1 - C(n - c, k) / C(n, k), as a product of factors in [0, 1] (Chen et al. 2021, arXiv
    2107.03374, eq. 1).
    """
    assert 0 <= c <= n and 1 <= k <= n
    if c > n - k:
        return 1.0
    return float(1 - np.prod(1 - k / np.arange(n - c + 1, n + 1)))


def wilson(mean: float, n: int) -> Estimate:
    """Computes Wilson's score interval of the mean of n independent values in [0, 1].

    Exact in form for values 0 and 1; for others conservative, since no values in [0, 1] of this
    mean vary more (Wilson 1927).
    """
    assert 0 <= mean <= 1 and n >= 1
    shrink = 1 + Z**2 / n
    centre = (mean + Z**2 / (2 * n)) / shrink
    half = Z / shrink * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    return Estimate(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def mean_of(parts: Sequence[Estimate]) -> Estimate:
    """Computes the mean of independent estimates, and its interval from theirs.

    low = mean - sqrt(sum (value_s - low_s)^2) / S, high alike: each side's distances stand for
    standard errors (Newcombe 1998; MOVER of Zou and Donner 2008). One part is itself.
    """
    value = float(np.mean([part.value for part in parts]))
    below = math.hypot(*(part.value - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.value for part in parts)) / len(parts)
    return Estimate(value, max(0.0, value - below), min(1.0, value + above))


def split_by_set(sets: Sequence[EvalSet], flat: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yields the items of each set's prompts."""
    start = 0
    for held_out in sets:
        yield flat[start : start + len(held_out.prompts)]
        start += len(held_out.prompts)
    assert start == len(flat), "one item for each prompt of all sets"


PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated; everything in it fits together, and no weight has been read."""

    config: Config
    source: ModelSource
    step: int | None
    """Batches trained into the weights; None where no run says so."""
    mesh: Mesh
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    sets: tuple[EvalSet, ...]
    judge: Verifier
    notes: tuple[str, ...]
    """What a reader should know."""
    given: Mapping[str, bytes]
    """The environment of a Python program, as in `Setup`."""

    def run(self) -> tuple[JsonObject, list[str]]:
        """Runs the evaluation; returns the result of `jaxrl.evaluate`, and every completion as a
        line of `samples.jsonl`."""
        known = [key.path for key in config_keys.keys(Config)]
        values = dict(_flat(self.config.model_dump(mode="json")))
        groups, speeds = _sample(replace(self, source=self.source.with_weights()))
        scores = judged(self.sets, groups, self.judge)
        result = {
            "model": self.source.name,
            "path": str(self.source.path),
            "step": self.step,
            "metrics": evaluation_row(self.sets, groups, scores),
            "sets": list(_by_set(self.sets, groups, scores, speeds)),
            "settings": {key: values[key] for key in known if config_keys.read_by_evaluations(key)},
        }
        prompts = [prompt for held_out in self.sets for prompt in held_out.prompts]
        step = self.step or 0
        lines = [
            Sample.of(prompt, one, step=step, split="eval", policy_version=step, score=score)
            for prompt, group, marks in zip(prompts, groups, scores, strict=True)
            for one, score in zip(group, marks, strict=True)
        ]
        return result, [json.dumps(asdict(line), ensure_ascii=False) for line in lines]


def prepare_evaluation(
    source: ModelSource,
    given: PathLike | Config | Mapping[str, object] | None,
    overrides: Overrides,
    mesh: str | None,
    eval_data: Rows = None,
    environment: GivenEnvironment = None,
) -> Evaluation:
    """Prepares an evaluation, with every check that is possible before a weight is read.

    Args:
        given: the config whose keys about evaluation count; None for that of the model's run.

    Raises:
        UserError: a key is wrong, or model, tokenizer and data do not fit together.
    """
    base: JsonObject = {}  # the keys that the overrides are applied on top of
    if isinstance(given, Config):
        base = given.model_dump(mode="json")
    elif isinstance(given, Mapping):
        base = yaml_text.assign({}, dict(_flat(given)))
        config_keys.refuse_unknown(Config, base)
    elif (path := source.run_config if given is None else config_file(given)) is not None:
        base = read_keys(path)
        config_keys.refuse_unknown(Config, base)
        if given is None and isinstance(student := base.get("student"), dict):
            student.pop("chat_template", None)  # the folder of the run's model has it
    keys, objects = entries(None, eval_data, environment)
    config = _config(source, base, overrides, mesh, keys)
    source = source.with_chat_template(config.student.chat_template, "student.chat_template")
    tokenizer = source.tokenizer(config.data.chat_date)
    ends = completion_ends(source, tokenizer)
    check_positions(config, config.max_new_tokens, source.config, f"model {source.name!r}")
    source = source.for_length(longest_sequence(config))
    encode = encoder(config, tokenizer, ends, source.config.vocab_size)
    sets = held_out_sets(config, encode, objects.rows)
    judge = verifier(config.data.verifier)
    enable_compile_cache(config.compile_cache)

    placement = place(config.mesh, ("rollout",), {"rollout": config.rollout.devices})
    seen = ensure_devices(placement.n_devices)
    placement = check_visible(placement, len(seen.devices))
    axes = RunInputs(placement, ("rollout",), source.config, None, CPU).axes(config)
    config = config.with_dtypes(default_dtype(target_of(seen.devices)))
    role_mesh = role_meshes(seen.devices, placement, axes)["rollout"]
    model = source.config
    dtype = config.rollout.compute_dtype
    failed = try_kernels(role_mesh.devices.flat, [(dim, dtype, True) for dim in model.head_dims])
    notes = (
        f"{source.name}: {model.family}, {model.n_params:,} parameters, {config.rollout.dtype},"
        f" on {axes['rollout']}",
        *filter(None, [seen.note]),
        *failed,
        *placement.notes,
        *token_notes(config, source, tokenizer),
        *held_out_notes(config, sets, judge),
    )
    folder, step, saved = source.path.resolve(), None, list[Path]()
    if folder.parent.name == store.FOLDER and folder.name.isdigit():
        step = int(folder.name)
    elif folder.name == FINAL:
        with suppress(UserError):  # the disk of the checkpoints is not needed
            saved = store.folders(folder.parent)
        # A run that was given more steps, and did not reach them, still has its earlier model.
        newest = int(saved[0].name) if saved else None
        step = newest if newest == base.get("steps") else None
    code = objects.code
    return Evaluation(config, source, step, role_mesh, tokenizer, ends, sets, judge, notes, code)


def _flat(overrides: Overrides) -> Iterator[tuple[str, object]]:
    return yaml_text.assignments(overrides, config_keys.mappings(Config))


def _config(
    source: ModelSource,
    base: JsonObject,
    overrides: Overrides,
    mesh: str | None,
    objects: Mapping[str, object],
) -> Config:
    """Returns the config of an evaluation: what only training reads keeps its defaults."""
    if isinstance(overrides, str):
        raise UserError(f"overrides is a list of key=value strings, got {overrides!r}")
    given = dict(_flat(overrides))
    known = [key.path for key in config_keys.keys(Config)]
    read = [key for key in known if config_keys.read_by_evaluations(key)]
    for key in given:
        if key in known and key not in read:  # the config refuses unknown ones
            meant = f"eval.{key.rpartition('.')[2]}"
            hint = f" (did you mean {meant}?)" if meant in read else ""
            keys = ", ".join(EVALUATED)
            raise UserError(f"{key} has no part in an evaluation{hint}; keys that have: {keys}")
    values = {
        key: value
        for key, value in _flat(base)
        if (config_keys.read_by_evaluations(key) or key in SLOTS)
        and not config_keys.under(key, PLACEMENT)
        and (key in known or value is not None)  # a section without keys
    }
    # `data.train` is a required key, which nothing here opens.
    values |= {"mesh": EVALUATED_MESH, "data.train": "arithmetic"}
    mapping = yaml_text.assign({}, values | given | dict(objects))
    if mesh is not None:
        mapping["mesh"] = mesh
    student = mapping.get("student", {}) | {"model": source.name}
    config = Config.parse(mapping | {"student": student, "algorithm": "sft"})
    if config.data.eval is None:
        raise UserError(
            "nothing to evaluate on: give data.eval=SOURCE, or --config FILE.yaml; model"
            f" {source.name!r} is of no run that names a data.eval"
        )
    longest = config.eval.max_new_tokens or config.max_new_tokens
    return config.model_copy(update={"max_new_tokens": longest})


def _sample(job: Evaluation) -> tuple[list[list[Completion]], list[EngineStats]]:
    config, mesh = job.config, job.mesh
    params = job.source.load(mesh, jnp.dtype(config.rollout.dtype), "unstacked")
    verify_arrays("rollout", params, mesh)
    wanted = max(len(held_out.prompts) for held_out in job.sets) * config.eval.samples
    sampler = Sampler(
        config,
        job.source.config,
        mesh,
        slots=config.rollout.slots or min(config.batch_size * config.group_size, wanted),
        tokenizer=job.tokenizer,
        eos_ids=job.end_ids,
        vocab_size=job.source.config.vocab_size,
        params=params,
        episodes=partial(episodes, config, job.tokenizer, given=job.given),
    )
    working = Phase()
    here.phase = working
    groups, speeds = [], []
    # A notebook says that it shows colours, which is no terminal.
    terminal = Console(stderr=True, force_jupyter=False, force_terminal=sys.stderr.isatty())
    with closing(sampler), terminal.status(_Progress(working)):
        for held_out in job.sets:
            working.name = held_out.name or "data.eval"
            groups += sampler.sample(held_out.prompts)
            speeds.append(sampler.engine.stats)
        for note in sampler.notes:
            terminal.print(note, markup=False)
    return groups, speeds


@dataclass(frozen=True)
class _Progress:
    """How far the sampling is, at each look; shown on a terminal alone."""

    phase: Phase

    def __rich__(self) -> str:
        return f"{self.phase.name.partition(', version')[0]}: {self.phase.detail}"


def _by_set(
    sets: Sequence[EvalSet],
    groups: Sequence[Sequence[Completion]],
    scores: Scores,
    speeds: Sequence[EngineStats],
) -> Iterator[JsonObject]:
    parts = zip(sets, speeds, split_by_set(sets, groups), split_by_set(sets, scores), strict=True)
    for held_out, stats, completions, marks in parts:
        row = evaluation_row([replace(held_out, name="")], completions, marks)
        yield {
            "name": held_out.name,
            "prompts": len(held_out.prompts),
            "dropped": held_out.dropped,
            "samples": len(completions[0]),
            **{name.removeprefix("eval/"): value for name, value in row.items()},
            "tokens": stats.generated_tokens,
            "seconds": stats.seconds,
            "tokens_per_second": stats.tokens_per_second,
        }


def results_table(result: JsonObject) -> Table:
    """Renders mean@k and each pass@k of every set and, if there are several, of all; 80 columns
    wide."""
    shown = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, collapse_padding=True)
    shown.add_column("set", min_width=9, overflow="fold")
    for heading in ("prompts", "measure", "95% interval", "tokens", "cut", "unjudged", "tokens/s"):
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


def _add_rows(shown: Table, name: str, row: Row) -> None:
    def cell(metric: str) -> str:
        """Formats a value as per cent, with its interval."""
        if metric not in row:
            return "not judged"
        low, high = row[f"{metric}_low"], row[f"{metric}_high"]
        return f"{row[metric]:.1%} [{100 * low:.1f}, {100 * high:.1f}]"

    k = row["samples"]
    about = (
        f"{row['mean_completion_tokens']:.1f}",
        f"{row['truncated_fraction']:.1%}",
        f"{row['unjudged']:.0f}",
        f"{row['tokens_per_second']:,.0f}",
    )
    shown.add_row(name, str(row["prompts"]), f"mean@{k}", cell("accuracy"), *about)
    for n in pass_ks(k):
        shown.add_row("", "", f"pass@{n}", cell(f"pass@{n}"))
    if (reward := held_out_reward(row, "")) is not None:
        shown.add_row("", "", "reward", f"{reward:.3f}")
