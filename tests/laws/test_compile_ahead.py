"""What is compiled ahead of the first calls of a run is what they call: nothing is traced or
compiled twice, results are the same bits, and a compiler that fails costs time alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import QUICK, SHORT, save_pair
from tiny_models import SAMPLED

from jaxrl import Config, train
from jaxrl.models import parameters
from jaxrl.models.param_sharding import param_shardings
from jaxrl.process.compilations import EVENT
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sharding import ledger
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.ledger import Ledger
from jaxrl.sharding.mesh import role_mesh
from jaxrl.sharding.reshard import placed

TRACED = "/jax/core/compile/jaxpr_trace_duration"
DECODED = ("prefill", "insert", "new_cache", "resize", "launch")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[str, str]]]:
    """(event, program) -> how often it was traced, or compiled."""
    found: Counter[tuple[str, str]] = Counter()

    def count(event: str, duration_secs: float, **more: str | int) -> None:
        if event in (EVENT, TRACED):
            name = str(more.get("fun_name", ""))
            found[event, name.removeprefix("jit(").removesuffix(")")] += 1

    monkeypatch.setattr(ledger, "compiles_ahead", lambda: True)  # the tests' devices are emulated
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(count)
    yield found
    jax.monitoring.unregister_event_duration_listener(count)


def wait_for(compiling: Ledger) -> None:
    """Waits until all that was asked for ahead is traced and compiled."""
    for thread in compiling.ahead:  # which grows meanwhile
        thread.join()


@pytest.mark.parametrize(
    ("shape", "options", "prompts", "n"),
    [
        ((1, 1, 1), {"slots": 8}, 1, 2),  # most slots stay free, and are given up
        ((2, 1, 2), {}, 3, 4),
        ((1, 2, 1), {"cache_tokens": 64}, 2, 1),
    ],
    ids=["few samples", "data and tensor", "pages"],
)
def test_generate_calls_what_was_compiled_ahead(
    shape: tuple[int, int, int],
    options: dict[str, int],
    prompts: int,
    n: int,
    made: Counter[tuple[str, str]],
) -> None:
    """Of a call with one launch."""
    mesh = role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))
    tree = parameters.init_params(SAMPLED, jax.random.key(0), layout="unstacked")
    shardings = param_shardings(SAMPLED, mesh, "unstacked")
    params = jax.device_put(tree, shardings)
    sizes: dict[str, Any] = {"slots": prompts * n, "max_prompt_tokens": 8, "max_new_tokens": 4}
    asked = [[1 + i] * (2 + i) for i in range(prompts)]
    sampling, lengths = SamplingParams(max_new_tokens=4), list(map(len, asked))

    def engine() -> Engine:
        return Engine(SAMPLED, mesh, launch_tokens=4, **(sizes | options))

    ahead = engine()
    abstract = placed(tree, shardings)
    ahead.ledger.trace_ahead(lambda: ahead.compile_ahead(abstract, lengths, n=n, sampling=sampling))
    wait_for(ahead.ledger)
    before = made.copy()
    assert before[EVENT, "launch"] == before[TRACED, "launch"] == 1
    completions = ahead.generate(params, asked, n=n, sampling=sampling, seed=0)
    assert [made[event, name] for event in (EVENT, TRACED) for name in DECODED] == [
        before[event, name] for event in (EVENT, TRACED) for name in DECODED
    ]
    again = engine().generate(params, asked, n=n, sampling=sampling, seed=0)
    assert repr(completions) == repr(again)


def test_a_run_compiles_once_what_it_compiles_ahead_and_learns_the_same_without(
    tmp_path: Path,
    made: Counter[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    names: Counter[str] = Counter()
    compile_ahead = Ledger.compile_ahead

    def spied(self: Ledger, program: Any, *args: Any, **kwargs: Any) -> None:
        known = len(self._programs.get(program, ()))
        compile_ahead(self, program, *args, **kwargs)
        names[program.__name__] += len(self._programs[program]) - known

    def failing(self: Ledger, program: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"no compiler for {program.__name__}")

    models = save_pair(tmp_path, layers=1)

    def learned(name: str) -> list[dict[str, Any]]:
        keys = [f"run_dir={tmp_path / name}", "steps=1", "mesh=actor+rollout=1,teacher=1"]
        own = [*SHORT, *models, *keys, "data.train=arithmetic:size=64", "rollout.launch_tokens=8"]
        rows = train(Config.load(QUICK[1], own)).metrics
        return [{k: v for k, v in row.items() if k.startswith(LEARNED)} for row in rows]

    monkeypatch.setattr(Ledger, "compile_ahead", spied)
    rows = learned("ahead")
    assert names["launch"] == 3  # two of the rollout: evaluations draw otherwise
    assert {*names} >= {"optimizer_state", "convert", "prefill", "insert", "new_cache"}
    for name in ("optimizer_state", "convert", "prefill", "insert", "launch"):
        assert made[EVENT, name] == names[name], name
    assert "ahead failed" not in capfd.readouterr().err
    monkeypatch.setattr(Ledger, "compile_ahead", failing)
    assert learned("failed") == rows
    assert len(rows) == 2 and all(np.isfinite(row["eval/accuracy"]) for row in rows)
    assert "compiling ahead failed" in capfd.readouterr().err


LEARNED = ("actor/", "distill/", "eval/", "teacher/", "rollout/", "loss", "tokens/generated")
"""Beginnings of the metrics that are no times."""
