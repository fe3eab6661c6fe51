"""A run compiles a program once for each size that occurs, however often the sizes change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import pytest
from runs import QUICK, save_model

from jaxrl import Config, train
from jaxrl.process.compilations import EVENT
from jaxrl.sampling.engine import Engine

PROFILES = ([2, 2, 3, 40], [9, 10, 12, 11])
"""Tokens of the completions of a batch, one after another and then again: their streams have sizes
of their own, and the second one's rows are narrower."""
ROUNDS = 2


@pytest.fixture
def compiled_programs():
    """Name -> how many programs were compiled of it."""
    found = Counter()

    def count(event, _, fun_name="", **more):
        if event == EVENT:
            found[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    yield found
    jax.monitoring.unregister_event_duration_listener(count)


@pytest.fixture
def lengths(monkeypatch):
    """Completions have the lengths of `PROFILES`."""
    generate = Engine.generate

    def limited(self, params, requests, **more):
        lengths = PROFILES[requests[0].key.step % len(PROFILES)] * (len(requests) // 4)
        limited = [
            replace(request, sampling=replace(request.sampling, eos_ids=()), max_tokens=n)
            for request, n in zip(requests, lengths, strict=True)
        ]
        return generate(self, params, limited, **more)

    monkeypatch.setattr(Engine, "generate", limited)


def test_a_run_of_varied_lengths_compiles_once_for_each_size(tmp_path, lengths, compiled_programs):
    student, teacher = (save_model(tmp_path / name, 32, 1, i) for i, name in enumerate("st"))
    overrides = [
        f"student.model={student}",
        f"teacher.model={teacher}",
        f"steps={ROUNDS * len(PROFILES)}",
        "batch_size=16",
        "data.train=arithmetic:size=16",
        "group_size=1",
        "max_prompt_tokens=16",
        "max_new_tokens=40",
        "mesh=actor+rollout+teacher=1",
        "data.eval=null",
        "checkpoint.every=0",
        "optimizer.name=sgd",
        "compile_cache=null",
        "logging.console=quiet",
        f"run_dir={tmp_path / 'run'}",
    ]
    result = train(Config.load(QUICK[1], overrides))
    programs = [row["compile/programs"] for row in result.metrics[1:]]
    assert all(n > 0 for n in programs[: len(PROFILES)])
    assert programs[len(PROFILES) :] == [0] * len(PROFILES) * (ROUNDS - 1)
    assert result.metrics[1]["time/compile_s"] > 0
    for name in ("update", "score_rows"):
        assert compiled_programs[f"jit({name})"] == len(PROFILES)
