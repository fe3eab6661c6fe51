"""How much of the ideal throughput each schedule reaches on completions of different lengths: a
run of the real loop, workers and engine whose computations last given seconds, and beside it what
`jaxrl.plan.simulate` predicts of it.

    python benchmarks/overlap.py [--slots 64] [--step-ms 40] [--batches 6]

A tiny model samples, and sleeps for what is left of the time that a launch is given; updates only
sleep. So no accelerator is needed, and the two cores of a small machine hardly matter. Lengths are
log-normal, with a mean of 0.3 of the longest; an update takes 0.8 of the time in which full slots
sample a batch; a token that is read again takes a tenth of the time of a sampled one. Ideal is the
longer of sampling at full slots and training.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl import Config, train
from jaxrl.algorithms.schedule import Schedule, staleness_of
from jaxrl.plan.simulate import Sampling, Stage, simulate
from jaxrl.roles.actor import Actor
from jaxrl.roles.rollout import Sampler
from jaxrl.sampling import engine
from jaxrl.types import Trained

PROMPTS, GROUP, PROMPT, LONGEST = 16, 8, 9, 112
WARM_UP = 2
"""Batches that are not measured."""
LATE_S = 0.03
"""Seconds by which a call may begin too late without lasting longer: the work of the program, and
of others on the machine, is not measured."""
SCHEDULES = (
    "schedule=serial",
    "schedule=one_step_off",
    "schedule=two_step_off",
    *(f"schedule=streaming staleness={k}" for k in (1, 2, 4)),
    *(f"schedule=streaming staleness={k} actor.minibatches=4" for k in (1, 2)),
)


def lengths(batch: int) -> np.ndarray:
    """Returns the lengths of a batch's completions, [PROMPTS * GROUP] int."""
    drawn = np.random.default_rng(batch).lognormal(0, 1, PROMPTS * GROUP) * LONGEST * 0.2
    return drawn.clip(4, LONGEST).astype(int)


def update_seconds(slots: int, step: float, batches: int) -> float:
    """Returns the seconds of an update, for so many batches behind the first."""
    return 0.8 * step * float(np.mean([lengths(i).sum() for i in range(WARM_UP + batches)])) / slots


def lasting(seconds: Callable[[], float], work: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that does the work and then sleeps until it has taken `seconds()`. What a
    call, or what came between it and the next one, took longer is taken from the next one."""
    end = 0.0

    def slow(*args: Any, **kwargs: Any) -> Any:
        nonlocal end
        began = time.monotonic()
        result = work(*args, **kwargs)
        end = (end if began - end < LATE_S else began) + seconds()
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    return slow


def keys_of(schedule: str, slots: int, batches: int) -> list[str]:
    """Returns the keys of a run, but its folder."""
    return [
        *("student.model=builtin:student", "teacher.model=null", "algorithm=grpo"),
        *("reward.functions=[auto]", "mesh=actor=1,rollout=1", "data.eval=null"),
        *(f"batch_size={PROMPTS}", f"group_size={GROUP}", f"max_new_tokens={LONGEST}"),
        *(f"rollout.slots={slots}", "rollout.launch_tokens=8", f"steps={WARM_UP + batches}"),
        *("checkpoint.every=0", "logging.console=quiet", "logging.tensorboard=false"),
        *("actor.micro_batch_tokens=4096", *schedule.split()),
    ]


def predict(
    schedule: str, slots: int, step: float, batches: int, others: dict[Stage, float]
) -> dict[str, float]:
    """Returns what `measure` does, simulated.

    Args:
        others: seconds of the stages that are not given any.
    """
    config = Config.load("builtin:quickstart", keys_of(schedule, slots, batches))
    update = update_seconds(slots, step, batches)
    sampling = Sampling(
        np.stack([lengths(i) for i in range(config.steps)]),
        *(slots, config.rollout.launch_tokens, step),
        streams=config.streams,
        read=0.1 * step / slots,
        group=GROUP,
        prompt=PROMPT,
        parts=config.parts,
        check=1,
    )
    stages = others | {("actor", "update"): update}
    pools = {role: role for role, _ in stages} | {"rollout": "rollout"}
    order = Schedule(config.steps, staleness_of(config))
    made = simulate(stages, pools, order, sampling).between(
        WARM_UP - 1, config.steps - 1, sampling, update
    )
    return {"ideal": 100 * made.ideal, "age": made.age, "again": made.again}


def measure(
    schedule: str, slots: int, step: float, batches: int
) -> tuple[dict[str, float], dict[Stage, float]]:
    """Runs `batches` batches, and returns percent of ideal and what the rows say, and the seconds
    of the stages that are given none."""
    tokens = sum(int(lengths(i).sum()) for i in range(WARM_UP, WARM_UP + batches))
    update = update_seconds(slots, step, batches)
    requests, owed = Sampler._requests, list[float]()

    def of_lengths(self: Sampler, prompts: Any, split: str, at: int = 0, *rest: Any) -> Any:
        prompts, asked = requests(self, prompts, split, at, *rest)
        return prompts, [
            replace(x, max_tokens=int(n), sampling=replace(x.sampling, eos_ids=()))
            for x, n in zip(asked, lengths(at), strict=True)
        ]

    def launch(self: Any) -> int:
        before = self.engine.stats.decode_steps
        tokens: int = real[0](self)
        owed.append(step * (self.engine.stats.decode_steps - before))
        return tokens

    def extend(self: Any, samples: Any) -> None:
        prompts = {x.prompt: len(x.request.prompt) for x, _ in samples}
        read = sum(len(x.tokens) for x, _ in samples) + sum(prompts.values())
        owed.append(0.1 * step / slots * read)
        real[1](self, samples)

    def step_seconds() -> float:
        seconds = sum(owed)
        owed.clear()
        return seconds

    parts = Config.load("builtin:quickstart", keys_of(schedule, slots, batches)).parts

    def updated(
        self: Actor, rollout: Any, scores: Any, step: int, part: int = 0, whole: Any = None
    ) -> Trained | None:
        if part < parts - 1:
            return None
        self.version = step + 1
        learned = (rollout if whole is None else whole).sequences.loss_mask.sum(-1)
        return Trained({"loss": 0.0, "actor/tokens": float(learned.sum())}, {}, learned)

    decoding: Any = engine._Decoding
    real = decoding._launch, decoding._extend, Actor.update, decoding.step
    Sampler._requests = of_lengths  # type: ignore[method-assign]
    decoding._launch, decoding._extend = launch, extend
    decoding.step = lasting(step_seconds, real[3])
    Actor.update = lasting(lambda: update / parts, updated)  # type: ignore[method-assign]
    rows: list[dict[str, float]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            keys = [*keys_of(schedule, slots, batches), f"run_dir={folder}/run"]
            train(Config.load("builtin:quickstart", keys), on_step=rows.append)
    finally:
        Sampler._requests = requests  # type: ignore[method-assign]
        decoding._launch, decoding._extend, Actor.update, decoding.step = real  # type: ignore[method-assign]
    rows = rows[1 + WARM_UP :]
    took = sum(row["time/step_s"] for row in rows)
    ideal = max(step * tokens / slots, update * batches)
    means = {
        name: float(np.mean([row.get(name, 0.0) for row in rows]))
        for name in ("time/reward_s", "time/weight_sync_s")
    }
    others = {
        ("reward", "score"): means["time/reward_s"],
        ("actor", "publish"): means["time/weight_sync_s"],
        ("rollout", "load"): 0.0,
    }
    found = {
        "ideal": 100 * ideal / took,
        "age": float(np.mean([row.get("stream/age", row.get("staleness", 0)) for row in rows])),
        "again": sum(row.get("stream/read_again", 0) for row in rows) / tokens,
    }
    return found, others


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--slots", type=int, default=PROMPTS * GROUP // 2)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--batches", type=int, default=6)
    args = parser.parse_args()
    titles = ("% of ideal", "predicted", "mean age", "predicted", "read again", "predicted")
    print(f"{'schedule':52}" + "".join(f"{title:>11}" for title in titles))
    given = args.slots, args.step_ms / 1e3
    for schedule in SCHEDULES:  # compiles
        measure(schedule, args.slots, 1e-3, args.batches)
    for schedule in SCHEDULES:
        found, others = measure(schedule, *given, args.batches)
        predicted = predict(schedule, *given, args.batches, others)
        figures = [each[name] for name in found for each in (found, predicted)]
        shown = "".join(f"{x:11.{n}f}" for x, n in zip(figures, (0, 0, 2, 2, 2, 2), strict=True))
        print(f"{schedule:52}{shown}", flush=True)


if __name__ == "__main__":
    main()
