"""How much of the ideal throughput each schedule reaches on completions of different lengths: a
run of the real loop, workers and engine whose computations last given seconds.

    python benchmarks/overlap.py [--slots 64] [--step-ms 10] [--batches 12]

A tiny model samples, and sleeps for what is left of the time that a launch is given; an update only
sleeps. So no accelerator is needed, and the two cores of a small machine do not matter. Lengths
are log-normal, with a mean of 0.3 of the longest (`LENGTHS`); an update takes 0.8 of the time in
which full slots sample a batch; a token that is read again takes a tenth of the time of a sampled
one. Ideal is the longer of sampling at full slots and training, and one update.
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
from jaxrl.roles.actor import Actor
from jaxrl.roles.rollout import Sampler
from jaxrl.sampling import engine
from jaxrl.types import Rollout, Trained

PROMPTS, GROUP, LONGEST = 16, 8, 112
AFTER = 6
"""Batches after those that are measured."""
SCHEDULES = (
    "schedule=serial",
    "schedule=one_step_off",
    "schedule=two_step_off",
    *(f"schedule=streaming staleness={k}" for k in (1, 2, 4)),
    *(f"schedule=streaming staleness={k} actor.minibatches=4" for k in (1, 2, 4)),
)


def lengths(batch: int) -> np.ndarray:
    """Returns the lengths of a batch's completions, [PROMPTS * GROUP] int."""
    drawn = np.random.default_rng(batch).lognormal(0, 1, PROMPTS * GROUP) * LONGEST * 0.2
    return drawn.clip(4, LONGEST).astype(int)


def lasting(seconds: Callable[..., float], work: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that does the work and then sleeps until so many seconds have passed; they
    are a function of what the work returns and of its arguments."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = work(*args, **kwargs)
        time.sleep(max(0.0, began + seconds(result, *args) - time.monotonic()))
        return result

    return slow


def measure(schedule: str, slots: int, step: float, batches: int) -> dict[str, float]:
    """Returns percent of ideal and what the rows say, of `batches` batches. The two before them
    compile; those after them keep the sampler at work, as in the middle of a long run."""
    tokens = [int(lengths(i).sum()) for i in range(2, 2 + batches)]
    update = 0.8 * step * float(np.mean(tokens)) / slots
    parts = 4 if "minibatches=4" in schedule else 1
    requests, steps = Sampler._requests, [0]

    def of_lengths(self: Sampler, prompts: Any, split: str, at: int = 0, *rest: Any) -> Any:
        prompts, asked = requests(self, prompts, split, at, *rest)
        return prompts, [
            replace(x, max_tokens=int(n), sampling=replace(x.sampling, eos_ids=()))
            for x, n in zip(asked, lengths(at), strict=True)
        ]

    def launch_seconds(_: int, decoding: Any) -> float:
        before, steps[0] = steps[0], decoding.engine.stats.decode_steps
        return step * (steps[0] - before if steps[0] > before else steps[0])

    def updated(
        self: Actor, rollout: Rollout, _: Any, step: int, part: int = 0, whole: Any = None
    ) -> Trained | None:
        time.sleep(update / parts)
        if part < parts - 1:
            return None
        self.version += 1
        learned = np.asarray((whole or rollout).sequences.loss_mask).sum(-1)
        return Trained({"loss": 0.0, "actor/tokens": float(learned.sum())}, {}, learned)

    def read_seconds(_: None, __: Any, samples: Any) -> float:
        return 0.1 * step / slots * sum(len(x.tokens) + len(x.request.prompt) for x, _ in samples)

    real = engine._Decoding._launch, engine._Decoding._extend, Actor.update
    Sampler._requests = of_lengths  # type: ignore[method-assign]
    engine._Decoding._launch = lasting(launch_seconds, real[0])  # type: ignore[method-assign]
    engine._Decoding._extend = lasting(read_seconds, real[1])  # type: ignore[method-assign]
    Actor.update = updated  # type: ignore[method-assign]
    rows: list[dict[str, float]] = []
    ends: list[float] = []

    def on_step(row: dict[str, float]) -> None:
        rows.append(row)
        ends.append(time.monotonic())

    try:
        with tempfile.TemporaryDirectory() as folder:
            keys = [
                *("student.model=builtin:student", "teacher.model=null", "algorithm=grpo"),
                *("reward.functions=[auto]", "mesh=actor=1,rollout=1", "data.eval=null"),
                *(f"batch_size={PROMPTS}", f"group_size={GROUP}", f"max_new_tokens={LONGEST}"),
                *(
                    f"rollout.slots={slots}",
                    "rollout.launch_tokens=4",
                    f"steps={2 + batches + AFTER}",
                ),
                *("checkpoint.every=0", "logging.console=quiet", "logging.tensorboard=false"),
                *(f"run_dir={folder}/run", "actor.micro_batch_tokens=4096", *schedule.split()),
            ]
            train(Config.load("builtin:quickstart", keys), on_step=on_step)
    finally:
        Sampler._requests = requests  # type: ignore[method-assign]
        engine._Decoding._launch, engine._Decoding._extend, Actor.update = real  # type: ignore[method-assign]
    took, rows = ends[2 + batches] - ends[2], rows[3 : 3 + batches]
    ideal = max(step * sum(tokens) / slots, update * batches)
    return {
        "ideal": 100 * ideal / took,
        "age": float(np.mean([row.get("stream/age", row.get("staleness", 0)) for row in rows])),
        "again": sum(row.get("stream/read_again", 0) for row in rows) / sum(tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--slots", type=int, default=PROMPTS * GROUP // 2)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--only", default="", help="measure schedules whose text has this")
    args = parser.parse_args()
    print(f"{'schedule':52}{'% of ideal':>11}{'mean age':>10}{'read again':>12}")
    schedules = [text for text in SCHEDULES if args.only in text]
    for schedule in schedules:
        measure(schedule, args.slots, 0.0, args.batches)  # compiles
    for schedule in schedules:
        found = measure(schedule, args.slots, args.step_ms / 1e3, args.batches)
        again = f"{found['again']:.2f}" if "streaming" in schedule else "-"
        print(f"{schedule:52}{found['ideal']:11.0f}{found['age']:10.2f}{again:>12}", flush=True)


if __name__ == "__main__":
    main()
