"""The walk over a program's equations: what is alive at once, on one device."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import CPU, Target
from jaxrl.plan.accounts import role_accounts
from jaxrl.plan.declarations import PROGRAMS, RunPrograms, largest_arrays
from jaxrl.plan.live_arrays import Live, live_arrays
from jaxrl.plan.plan_inputs import PlanInputs, Setting
from jaxrl.roles.declared import Program, local_bytes
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.sharding.placement import place

N = 64
SQUARE = 4 * N * N
MODEL = DecoderConfig("qwen2", 512, 64, 3, 4, 2, 16, 128)
ROLES = ("actor", "rollout", "teacher")


def walked(function: Any, *args: Any, **options: Any) -> Live:
    return live_arrays(Program("actor", "made", jax.jit(function, **options), args, "actor.update"))


def square(spec: PartitionSpec | None = None, data: int = 2) -> jax.ShapeDtypeStruct:
    """[N, N] float32, divided over two devices or more where a spec is given."""
    mesh = role_mesh(jax.devices()[:data], Axes(data, 1, 1))
    sharding = None if spec is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=sharding)


def loop(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, length=5)[0]


def gated(x: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ x) * (x.T @ x)) @ x


def halves(x: jax.Array) -> list[jax.Array]:
    return jnp.split(jnp.tanh(x), 2)


@pytest.mark.parametrize(
    ("function", "squares"),
    [
        (lambda x: jnp.tanh(x) + 1, 1),  # the result
        (lambda x: (jnp.tanh(x) + 1).sum(), 0),  # all of it in one fusion
        (lambda x: (x @ x) @ x, 2),  # the first product until the second is done
        (lambda x: ((x @ x) @ x) @ x, 2),
        (lambda x: jnp.tanh(x @ x) @ x, 2),  # what the second reads is written out
        (gated, 2),  # the second product is written as what is computed from it alone
        (halves, 1),  # no more than the two results
        (lambda x: jax.lax.optimization_barrier(jnp.tanh(x)).sum(), 1),  # which needs it whole
        (loop, 2),  # once, whatever its length: the carry and a product
    ],
)
def test_what_is_alive_at_once(function: Any, squares: int) -> None:
    assert walked(function, square()).bytes // SQUARE == squares


def test_a_result_takes_the_place_of_a_donated_argument() -> None:
    def add(x: jax.Array) -> jax.Array:
        return x + 1

    assert walked(add, square()).bytes == SQUARE
    assert walked(add, square(), donate_argnums=0).bytes == 0


def test_arrays_are_divided_as_what_they_are_computed_from() -> None:
    rows, data = square(PartitionSpec("data")), 2
    assert walked(lambda x: jnp.tanh(x) + 1, rows).bytes == SQUARE // data
    # What is summed over the devices is whole on each; as a result, as the program says.
    assert walked(lambda x: x.T @ x, rows).bytes == SQUARE
    made = walked(lambda x: jnp.zeros((N, N)) + x[:1], rows, out_shardings=rows.sharding)
    assert made.bytes == SQUARE // data


def setting(**keys: Any) -> Setting:
    raw = {
        "mesh": "actor=2,rollout=1,teacher=1",
        "batch_size": 8,
        "group_size": 2,
        "max_prompt_tokens": 64,
        "max_new_tokens": 128,
        "student": {"model": "student"},
        "teacher": {"model": "teacher"},
        "data": {"train": "arithmetic"},
    }
    config = Config.parse(raw | keys).with_dtypes("float32")
    placement = place(config.mesh, ROLES)
    limits = (None,) * len(placement.pools)
    inputs = PlanInputs(placement, ROLES, MODEL, MODEL, CPU, limits=limits)
    return Setting(config, inputs)


def test_each_program_of_a_run_has_a_figure_and_the_lines_that_make_its_arrays() -> None:
    made = setting()
    accounts = role_accounts(made.inputs, made.config)
    lines = set()
    for program in RunPrograms(made):  # on described devices
        assert accounts[program.role].planned(program) >= local_bytes(program.args)
        live = live_arrays(program)
        lines |= {array.line.partition(":")[0] for array in live.arrays}
        assert sum(array.bytes for array in live.arrays) <= live.bytes
    assert {"models/layers.py", "roles/update.py", "sampling/decode.py"} <= lines


def test_a_program_is_walked_alike_on_described_devices_and_on_those_that_are_here() -> None:
    made = setting()
    described, here = ({p.name: p for p in RunPrograms(made, on)} for on in (None, jax.devices()))
    assert described.keys() == here.keys()
    for name in ("insert", "score"):
        assert live_arrays(described[name]) == live_arrays(here[name])
        assert local_bytes(described[name].args) == local_bytes(here[name].args)


def test_the_largest_arrays_of_a_gpu_that_is_not_here_have_a_line() -> None:
    inputs = replace(setting().inputs, target=Target("gpu", (9, 0)))
    made = Setting(setting().config, inputs)
    rollout = role_accounts(inputs, made.config)["rollout"]
    (line,) = largest_arrays(made, {"rollout": rollout})
    assert re.match(r"rollout (prefill|decode): its largest arrays are \d.* MB float32\[", line)
    assert re.search(r"\((models|sampling)/\w+\.py:\d+\)", line)


def test_a_new_program_of_a_role_is_planned_without_a_formula(monkeypatch: Any) -> None:
    def more(run: Any) -> Any:
        *others, last = PROGRAMS_OF_TEACHER(run)
        yield from (*others, last)
        jitted = jax.jit(lambda x: (x @ x) @ x)
        whole = run.array("teacher", jnp.float32, N, N)
        yield replace(last, name="new", jitted=jitted, args=(whole,), kwargs={}, phases=None)

    PROGRAMS_OF_TEACHER = PROGRAMS["teacher"]
    monkeypatch.setitem(PROGRAMS, "teacher", more)
    made = setting()
    account = role_accounts(made.inputs, made.config)["teacher"]
    (new,) = (x for x in RunPrograms(made, jax.devices()) if x.name == "new")
    assert account.planned(new) == new.beside + 3 * SQUARE
