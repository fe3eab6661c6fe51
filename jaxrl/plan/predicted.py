"""What a schedule is predicted to come to, by the lengths and seconds of an earlier run or by
assumed ones (`plan.simulate`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl.algorithms.methods import sampled_share
from jaxrl.algorithms.schedule import Schedule, staleness_of
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.plan.plan_inputs import Setting
from jaxrl.plan.simulate import Prediction, Sampling, Stage, scores_ahead, simulate
from jaxrl.process.json_types import parse_json, read_file
from jaxrl.telemetry.metrics import SAMPLES_FILE, SCORED, read_metrics

BATCHES = 24
"""Batches that a prediction is the mean of."""
MEAN, UPDATE, READ = 0.3, 0.8, 0.1
"""Assumed: mean length over the longest, an update over sampling a batch with full slots, reading a
token again over sampling it."""
STALENESS = 1, 2, 4
"""Of the other schedules that are named."""
FEWEST = 32
"""Completions of an earlier run without which its lengths are not used."""
SECONDS = {
    ("actor", "update"): "time/update_s",
    ("rollout", "load"): "time/weight_sync_s",
    ("actor", "publish_to_teacher"): "time/teacher_sync_s",
} | {(role, "score"): f"time/{name}_s" for role, name in SCORED.items()}
"""Stage -> the metric that has its seconds."""


@dataclass(frozen=True)
class _Earlier:
    """What an earlier run has measured."""

    lengths: np.ndarray
    """[n] int: tokens of completions."""
    stages: dict[Stage, float]
    step: float
    """Seconds of a decode step."""


def _earlier(run_dir: Path) -> _Earlier | None:
    """Reads a run; None where it is none, or has too few steps."""
    lengths, found = list[int](), dict[str, float]()
    # A UserError is a ValueError; a file may be of something else.
    with suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError):
        for line in read_file(run_dir / SAMPLES_FILE).splitlines():
            sample = parse_json(line)
            if sample["split"] == "train":
                lengths.append(int(sample["tokens"]))
        rows = read_metrics(run_dir)[2:]  # the first ones compile
        for name in (*SECONDS.values(), "time/rollout_s", "rollout/decode_steps"):
            if values := [row[name] for row in rows if name in row]:
                found[name] = float(np.median(values))
        stages = {stage: found[name] for stage, name in SECONDS.items() if name in found}
        step = found["time/rollout_s"] / found["rollout/decode_steps"]
        whole = ("actor", "update") in stages and np.isfinite([*found.values()]).all()
        if whole and step > 0 and len(lengths) >= FEWEST:
            return _Earlier(np.array(lengths), stages, step)
    return None


def schedule_notes(m: Setting) -> Iterator[str]:
    """Yields what a schedule that samples ahead is predicted to come to."""
    config, where = m.config, m.inputs.placement
    ahead = staleness_of(config) > 0 and sampled_share(config) == 1
    if not ahead or config.dynamic_sampling == "refill" or config.environment.name is not None:
        return
    if where.pool_of("rollout").roles != ("rollout",):
        return
    earlier = _earlier(config.run_path)
    found = _predicted(m, config, earlier)
    yield (
        f"schedule: predicted {found.ideal:.0%} of ideal (sampling with full slots, or training,"
        f" whichever takes longer); tokens are {found.age:.1f} batches old in the mean,"
        f" {found.again:.2f} are read again for each sampled one, and the rollout does not decode"
        f" in {found.idle:.0%} of the time"
    )
    others = []
    for staleness in STALENESS:
        keys = {"schedule": "streaming", "staleness": staleness}
        with suppress(UserError):
            other = Config.parse(config.model_dump() | keys)
            if not config.streams or staleness != config.staleness:
                share = _predicted(m, other, earlier).ideal
                others.append(f"{share:.0%} with schedule=streaming staleness={staleness}")
    if others:
        yield f"schedule: predicted {', '.join(others)}"
    known = (
        f"assumed: lengths are log-normal, in the mean {MEAN} of max_new_tokens; an update takes"
        f" {UPDATE} of the time in which full slots sample a batch (those of"
        f" a run in run_dir={config.run_path} come first)"
    )
    if earlier is not None:
        known = (
            f"by the lengths of {len(earlier.lengths)} completions in {config.run_path} and the"
            " seconds of its steps, whatever its devices were; assumed"
        )
    yield (
        f"schedule: {known}; prompts have max_prompt_tokens, and reading a token again takes"
        f" {READ} of sampling it"
    )


def _predicted(m: Setting, config: Config, earlier: _Earlier | None) -> Prediction:
    ahead, rng = staleness_of(config), np.random.default_rng(0)
    first = 2 * (ahead + 1)  # batches until the pipeline is full
    shape = first + BATCHES + ahead + 1, config.batch_size * config.group_size
    if earlier is None:
        drawn = rng.lognormal(0, 1, shape) * config.max_new_tokens * MEAN / 1.5
    else:
        drawn = rng.choice(earlier.lengths, shape)
    lengths = drawn.clip(1, config.max_new_tokens).astype(int)
    slots = m.sampling_slots("rollout") * m.axes["rollout"].rows
    step = 1.0 if earlier is None else earlier.step
    sampling = Sampling(
        lengths,
        *(slots, m.launch_steps, step),
        streams=config.streams,
        read=READ * step / slots,
        group=config.group_size,
        prompt=config.max_prompt_tokens,
        parts=config.parts,
    )
    stages: dict[Stage, float] = {("rollout", "load"): 0.0}
    if earlier is None:
        stages["actor", "update"] = UPDATE * step * lengths.mean() * shape[1] / slots
    else:
        stages |= {s: x for s, x in earlier.stages.items() if s[0] in m.inputs.placement.roles}
    stages["actor", "publish"] = 0.0
    pools = {role: m.inputs.placement.pool_of(role).name for role in m.inputs.placement.roles}
    order = Schedule(shape[0], ahead, scores_ahead=scores_ahead(stages, pools))
    found = simulate(stages, pools, order, sampling)
    return found.between(first, first + BATCHES, sampling, stages["actor", "update"])
