"""The programs that a dry run compiles are those that a run calls.

Both are asked of the same config, on emulated devices: no compiler of another machine is needed.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest
from byte_tokenizers import BYTES, WORDS
from cases import and_slow
from jax import monitoring
from runs import GSPO, SHORT, save_model

import jaxrl
from jaxrl import Config, train
from jaxrl.algorithms.methods import needed_roles
from jaxrl.plan import make_plan
from jaxrl.plan.declarations import RunPrograms
from jaxrl.sharding import reshard
from jaxrl.sharding.ledger import Ledger
from jaxrl.sharding.mesh import Visible

COMPILED = "/jax/core/compile/backend_compile_duration"
Form = tuple[str, frozenset[str]]
"""Name of a program, and the paths of the arrays among its arguments."""


@cache
def own_functions() -> frozenset[str]:
    """Names of jaxrl's functions, as jax names the programs that are made of them; without one that
    jax.numpy has too, and one whose programs make a checksum: a few numbers."""
    found = {"<lambda>"}
    for path in Path(jaxrl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                found |= {
                    x.name for x in ast.iter_child_nodes(node) if isinstance(x, ast.FunctionDef)
                }
    return frozenset(found - {"_where", "_checksum"})


def form(program: Any, args: object, kwargs: object) -> Form:
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
    arrays = (jax.tree_util.keystr(path) for path, leaf in leaves if hasattr(leaf, "shape"))
    return inspect.unwrap(program).__name__, frozenset(arrays)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[set[str], set[Form]]]:
    """The programs that are compiled meanwhile, and how those are called whose memory roles
    record."""
    names: set[str] = set()
    forms: set[Form] = set()
    running = Ledger.running

    def listen(event: str, seconds: float, **more: Any) -> None:
        if event == COMPILED:
            names.add(more["fun_name"].removeprefix("jit(").removesuffix(")"))

    def record(self: Ledger, program: Any, *args: object, **kwargs: object) -> Any:
        forms.add(form(program, args, kwargs))
        return running(self, program, *args, **kwargs)

    def in_pieces(xs: Any, targets: Any) -> list[jax.Array]:
        return reshard.put_pieces(xs, targets)

    monkeypatch.setattr(Ledger, "running", record)
    monkeypatch.setattr(reshard, "_move_together", in_pieces)  # as on accelerators
    jax.clear_caches()
    monitoring.register_event_duration_secs_listener(listen)
    yield names, forms
    monitoring.unregister_event_duration_listener(listen)


def listed(config: Config) -> tuple[set[str], set[Form]]:
    devices = jax.devices()
    plan = make_plan(config, needed_roles(config), lambda n: Visible(tuple(devices), None))
    programs = list(RunPrograms(plan.setting, devices))
    forms = {form(program.jitted, program.args, program.kwargs) for program in programs}
    return {name for name, _ in forms}, forms


TEACHERS = {"sums": {"model": "TEACHER"}, "rest": {"model": "TEACHER"}}
CASES = {
    "distilled": ["mesh=actor=2,rollout=1,teacher=1", "teacher.num_microbatches=3"],
    "rewarded": [
        *GSPO,
        "mesh=actor+rollout+reference=1",
        "policy.kl_coef=0.1",
        "actor.minibatches=2",
    ],
    "policy's tokens": ["mesh=actor+rollout+teacher=2", "distill.signal=student_topk"],
    "mixture": [
        "sampling.top_p=0.9",
        f"teachers={json.dumps(TEACHERS)}",
        "teacher.model=null",
        "distill.signal=topk",
    ],
    "average": [
        "mesh=actor=1,rollout+teacher=1",
        "teacher.model=policy",
        "teacher.ema=0.9",
        "teacher.prompt={answer}{prompt}",
    ],
    "aligned": ["mesh=actor+rollout+teacher=1", "teacher.tokenizer=own"],
    "teacher's samples": ["distill.seq_kd=true", "distill.on_policy_fraction=0", "eval.every=0"],
}
BY_DEFAULT = ("distilled", "rewarded")


@pytest.mark.parametrize("case", and_slow(BY_DEFAULT, [x for x in CASES if x not in BY_DEFAULT]))
def test_every_program_that_a_run_calls_is_in_its_dry_run(case, tmp_path, monkeypatch):
    """By name; and those whose memory roles record with the arrays that they are given: greedy
    evaluations draw by another program than training."""
    student, teacher = (
        save_model(tmp_path / name, 32, 1, seed, rows)
        for name, seed, rows in (("student", 0, 280), ("teacher", 1, 288))
    )
    if case == "aligned":
        WORDS.save_pretrained(student)
        BYTES.save_pretrained(teacher)
    words = [f"student.model={student}", f"teacher.model={teacher}", *SHORT, "steps=1"]
    words += [word.replace("TEACHER", teacher) for word in CASES[case]]
    words.append(f"run_dir={tmp_path / 'run'}")
    config = Config.load("builtin:quickstart", words)
    names, forms = listed(config)
    with watched(monkeypatch) as (called, recorded):
        train(config)
    own = called & own_functions()
    assert own - names == set()
    assert recorded - forms == set()
    assert {"update", "launch", "new_cache"} <= own
