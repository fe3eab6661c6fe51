"""The simulated schedule: its laws, and the engine that it simulates."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sleeping_run import sleeping_run
from tiny_models import SAMPLED, random_params

from jaxrl import Config
from jaxrl.algorithms.methods import needed_roles
from jaxrl.algorithms.schedule import SCHEDULES, Schedule
from jaxrl.plan import make_plan
from jaxrl.plan.plan_inputs import Setting
from jaxrl.plan.predicted import schedule_notes
from jaxrl.plan.search import set_key
from jaxrl.plan.simulate import (
    Sampling,
    ScheduleTimes,
    Stage,
    _Call,
    _Rollout,
    predict,
    scores_ahead,
    simulate,
)
from jaxrl.runtime.worker import Later
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.partial_completion import RandomKey, SampleRequest
from jaxrl.sampling.sampler import SamplingParams

BATCHES, PROMPTS, GROUP = 12, 4, 2
SAMPLES = PROMPTS * GROUP
POOLS = {"actor": "actor", "rollout": "rollout", "teacher": "teacher"}


def made(seed: int, **options: object) -> Sampling:
    """Heavy-tailed lengths; every event at any step, and a step takes a second."""
    lengths = np.random.default_rng(seed).lognormal(0, 1, (BATCHES, SAMPLES)) * 20
    plain = Sampling(lengths.clip(1, 100).astype(int), 3, 1, 1.0, group=GROUP, check=1)
    return replace(plain, **options)  # type: ignore[arg-type]


def run(sampling: Sampling, ahead: int, update: float, **seconds: float) -> ScheduleTimes:
    stages: dict[Stage, float] = {
        ("actor", "update"): update,
        ("actor", "publish"): seconds.get("publish", 0.0),
        ("rollout", "load"): seconds.get("load", 0.0),
        ("teacher", "score"): seconds.get("score", 0.0),
    }
    return simulate(stages, POOLS, Schedule(BATCHES, ahead), sampling)


def updates_of(sampling: Sampling) -> list[float]:
    """Seconds of an update that are much shorter, as long, and longer than sampling a batch."""
    batch = sampling.lengths.sum() / BATCHES / sampling.seats
    return [0.1 * batch, 0.8 * batch, 3 * batch]


@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_sampled_once_and_none_is_too_old(seed: int) -> None:
    """One slot samples a token a step."""
    sampling = made(seed, seats=1, launch=8, read=0.2, prompt=5)
    tokens = sampling.lengths.sum(1)
    for update in updates_of(sampling):
        for ahead in SCHEDULES.values():
            told = run(sampling, ahead, update, load=3.0)
            assert told.launches is not None and told.ages is not None
            assert told.launches[:, 1].sum() == tokens.sum()
            assert told.launches[:, 2].sum() == 0, "no weights come within a batch"
            assert (told.ages == tokens * np.minimum(np.arange(BATCHES), ahead)).all()
        for ahead in (1, 2, 4, 8):
            told = run(replace(sampling, streams=True), ahead, update, load=3.0)
            assert told.launches is not None and told.ages is not None
            assert told.launches[:, 1].sum() == tokens.sum()
            assert (told.ages >= 0).all() and (told.ages <= ahead * tokens).all()
            assert list(told.updates) == sorted(told.updates)
            assert (np.array(told.sampled) + update <= np.array(told.updates) + 1e-6).all()


@pytest.mark.parametrize("seed", range(2))
def test_more_staleness_and_more_parts_are_never_slower(seed: int) -> None:
    """Where nothing is read again: completions get slots in their order, which may only come
    earlier. But while others are in flight, the end of a batch is noticed a step later."""
    sampling = made(seed)
    noticed = np.arange(1, BATCHES + 1) * sampling.step
    for update in updates_of(sampling):
        before = np.array(run(sampling, 1, update).updates)
        for ahead in (1, 2, 4, BATCHES):
            streamed = replace(sampling, streams=True)
            whole = np.array(run(streamed, ahead, update).updates)
            assert (whole <= before + noticed).all()
            for parts in (3, 4):
                cut = np.array(run(replace(streamed, parts=parts), ahead, update).updates)
                assert (cut <= whole + noticed).all()
            before = whole


@pytest.mark.parametrize("seed", range(4))
def test_bounds_and_closed_forms(seed: int) -> None:
    sampling = made(seed)
    longest = sampling.lengths.max()
    full = sampling.lengths.sum() / sampling.seats
    seconds = {"publish": 0.5, "load": 0.25, "score": 2.0}
    for update in updates_of(sampling):
        whole = replace(sampling, seats=SAMPLES)
        serial = whole.lengths.max(1).cumsum() + np.arange(1, BATCHES + 1) * (update + 2.0)
        serial += np.arange(BATCHES) * 0.75
        assert run(whole, 0, update, **seconds).updates == pytest.approx(serial)
        # Nothing waits for weights: slots are full to the end but for the last completions.
        streamed = replace(sampling, streams=True)
        free = run(streamed, BATCHES, update)
        assert max(full, BATCHES * update) <= free.updates[-1]
        assert full <= free.sampled[-1] <= full + longest
        assert free.updates[-1] <= full + longest + BATCHES * update
        told = run(streamed, BATCHES, 1e-6).between(0, BATCHES - 1, streamed, 1e-6)
        rest = sampling.lengths[1:].sum() / sampling.seats
        assert rest / (rest + longest) <= told.ideal <= rest / (rest - longest - 1)


def test_a_batch_of_one_completion_is_a_stage_of_its_length() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        pools = {role: "ab"[rng.integers(2)] for role in ("actor", "rollout", "teacher")}
        names = [("actor", "update"), ("actor", "publish"), ("rollout", "load")]
        names += [("teacher", "score")]
        stages = {name: float(x) for name, x in zip(names, rng.uniform(0, 9, 4), strict=True)}
        length, ahead = int(rng.integers(1, 20)), int(rng.integers(0, 4))
        sampling = Sampling(np.full((12, 1), length), 1, 5, 1.0, check=1)
        order = Schedule(12, ahead, scores_ahead=scores_ahead(stages, pools))
        updates = simulate(stages, pools, order, sampling).updates
        generate = {("rollout", "generate"): float(length)}
        step = predict(stages | generate, pools, ahead)
        assert (updates[-1] - updates[5]) / 6 == pytest.approx(step)


@pytest.mark.parametrize("check", [1, 2])
def test_launches_are_those_of_the_engine(check: int) -> None:
    """Batches and weights come at random launches: the engine decodes as many steps in each, reads
    as many tokens again and ends the same completions."""
    slots, launch, prompt, longest = 9, 4, 5, 24
    tree = random_params(replace(SAMPLED, n_layers=1), layout="unstacked")
    engine = Engine(
        replace(SAMPLED, n_layers=1),
        None,
        slots=slots,
        max_prompt_tokens=8,
        max_new_tokens=longest,
        launch_tokens=launch,
        swaps=(BATCHES * PROMPTS, GROUP),
    )
    engine.check_every = check
    rng = np.random.default_rng(check)
    lengths = (rng.lognormal(0, 1, (6, SAMPLES)) * 6).clip(1, longest).astype(int)
    simulated = _Rollout(
        Sampling(lengths, slots, launch, 1.0, streams=True, group=GROUP, prompt=prompt, check=check)
    )
    simulated.ends = [_Call() for _ in lengths]
    engine.swap(tree, 0)
    futures, steps, version = [], 0, 0
    while len(futures) < lengths.size or engine.in_flight:
        if len(futures) < lengths.size and rng.random() < 0.3:
            batch = len(futures) // SAMPLES
            simulated.take(_Call(batch=batch), 0.0)
            tokens = [rng.integers(1, 60, prompt).tolist() for _ in range(PROMPTS)]
            for i, length in enumerate(lengths[batch]):
                key = RandomKey(0, batch, 0, i // GROUP, i % GROUP)
                asked = SampleRequest(
                    tokens[i // GROUP], SamplingParams(max_new_tokens=longest), key, int(length)
                )
                futures.append(engine.submit(asked))
        if rng.random() < 0.2:
            version += 1
            engine.swap(tree, version)
            simulated.take(_Call(version=version), 0.0)
        assert simulated.in_flight == (engine.in_flight > 0)
        if not engine.in_flight:
            continue
        engine.step()
        simulated.launch()
        assert simulated.launches[-1][1] == engine.stats.decode_steps - steps
        steps = engine.stats.decode_steps
        assert [one.end is not None for one in simulated.ends[: len(futures) // SAMPLES]] == [
            all(x.done() for x in futures[i : i + SAMPLES]) for i in range(0, len(futures), SAMPLES)
        ]
    assert sum(again for _, _, again in simulated.launches) == engine.stats.recomputed > 0
    found = [future.result(timeout=0) for future in futures]
    ages = [sum(i // SAMPLES - one.token_versions) for i, one in enumerate(found)]
    assert np.reshape(ages, (-1, SAMPLES)).sum(1).tolist() == simulated.ages.tolist()


class Streamed:
    """A rollout whose launches are simulated, and last as long; one that begins a little late, as
    others use the machine, lasts shorter."""

    def __init__(self, sampling: Sampling):
        self._rollout = _Rollout(sampling)
        self._rollout.ends = [_Call() for _ in sampling.lengths]
        self._end = 0.0

    def load(self, weights: None) -> None:
        self._rollout.take(_Call(version=1), 0.0)

    def generate(self, prompts: Any, step: int, attempt: int = 0) -> Later[bool]:
        self._rollout.take(_Call(batch=step), 0.0)
        return Later(self._launch, lambda: self._rollout.ends[step].end is not None or None)

    def _launch(self) -> None:
        before, began = self._rollout.now, time.monotonic()
        self._rollout.launch()
        began = self._end if began - self._end < 0.03 else began
        self._end = began + self._rollout.now - before
        time.sleep(max(0.0, self._end - time.monotonic()))


@pytest.mark.slow
def test_calls_come_when_the_loop_makes_them(tmp_path: Path) -> None:
    """The real loop and workers, around roles that only sleep."""
    sampling = made(0, launch=4, step=0.01, read=0.0004, streams=True)
    update = 0.8 * sampling.step * float(sampling.lengths.mean()) * SAMPLES / sampling.seats
    stages = {("actor", "update"): update}

    def took(ahead: int) -> float:
        keys = ["mesh=actor=1,rollout=1,teacher=1", "schedule=streaming"]
        config = Config.load(None, [*keys, f"staleness={ahead}", f"steps={BATCHES}"])
        rollout = partial(Streamed, sampling)
        calls = sleeping_run(config, stages, tmp_path / f"{ahead}", rollout=rollout)
        ends = [call.end for call in calls if call.stage == ("actor", "update")]
        return ends[-1] - ends[0]

    with ThreadPoolExecutor(3) as threads:
        found = dict(zip((1, 2, 4), threads.map(took, (1, 2, 4)), strict=True))
    for ahead, seconds in found.items():
        updates = run(sampling, ahead, update).updates
        assert seconds == pytest.approx(updates[-1] - updates[0], rel=0.1)


KEYS = {"mesh": "actor=1,rollout=1", "data.eval": None, "rollout.slots": 32, "batch_size": 16}
KEYS |= {"group_size": 4, "max_new_tokens": 100, "rollout.launch_tokens": 4}


def test_a_dry_run_says_what_a_schedule_comes_to(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = {**KEYS, "run_dir": str(run_dir), "schedule": "streaming", "staleness": 2}
    config = Config.load("builtin:quickstart_gspo", keys)
    plan = make_plan(config, needed_roles(config), room=True)
    told, others, assumed = [line for line in plan.notes if line.startswith("schedule: ")]
    assert "% of ideal" in told and "are read again" in told and "does not decode" in told
    assert "streaming staleness=1" in others and "staleness=2" not in others
    assert "log-normal, in the mean 0.3 of max_new_tokens" in assumed and "0.8" in assumed
    told, others, _ = schedule_notes(
        Setting(set_key(config, "schedule", "one_step_off"), plan.inputs)
    )
    assert "1.0 batches old" in told and "0.00 are read again" in told and "staleness=2" in others
    assert not [*schedule_notes(Setting(set_key(config, "schedule", "serial"), plan.inputs))]

    # Completions of one length, and updates that take next to nothing: nothing waits.
    run_dir.mkdir()
    rows = [
        {"step": i, "time/update_s": 0.1, "time/rollout_s": 2.0, "rollout/decode_steps": 200}
        for i in range(20)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [{"step": i, "split": "train", "tokens": 100} for i in range(40)]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    told, _, measured = schedule_notes(Setting(config, plan.inputs))
    assert "predicted 99% of ideal" in told or "predicted 100% of ideal" in told
    assert f"lengths of 40 completions in {run_dir}" in measured
