"""The walk over a program's equations: what is alive at once, on one device."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import CPU, Target
from jaxrl.plan.declarations import PROGRAMS, RunPrograms
from jaxrl.plan.live_arrays import Live, live_arrays
from jaxrl.plan.peaks import largest_arrays, margin_of, planned_bytes, role_accounts
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


def loop(x: jax.Array, length: int = 5) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, length=length)[0]


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
        (partial(loop, length=1), 1),  # the product is written as the result
    ],
)
def test_what_is_alive_at_once(function: Any, squares: int) -> None:
    assert walked(function, square()).bytes // SQUARE == squares


def test_a_result_takes_the_place_of_a_donated_argument() -> None:
    def add(x: jax.Array) -> jax.Array:
        return x + 1

    assert walked(add, square()).bytes == SQUARE
    assert walked(add, square(), donate_argnums=0).bytes == 0


def test_what_each_device_passes_on_takes_the_place_of_a_donated_argument() -> None:
    def one_of_two(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        def local(x: jax.Array, y: jax.Array) -> list[jax.Array]:
            return [x, y + 1]

        rows = PartitionSpec("data")
        passed, added = jax.shard_map(
            local, mesh=x_rows.sharding.mesh, in_specs=(rows, rows), out_specs=[rows, rows]
        )(x, y)
        return [passed * 2, added * 2]

    x_rows, half = square(PartitionSpec("data")), SQUARE // 2
    kept = walked(one_of_two, x_rows, x_rows)
    given = walked(one_of_two, x_rows, x_rows, donate_argnums=(0, 1))
    assert kept.bytes - given.bytes >= 2 * half


def test_a_sum_that_ends_in_one_result_is_part_of_its_fusion() -> None:
    """However many of its terms read it again, as an update of bfloat16 weights does; where two
    results go on from it, such as the residual of layers, it is written out."""

    def total(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        return x + y + z

    def once(*xs: jax.Array) -> jax.Array:
        found = total(*xs)
        return jnp.where(found > 0, found * 2, found - 1)

    def twice(*xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = total(*xs)
        return found * 2, found - 1

    assert walked(once, *[square()] * 3).bytes == SQUARE
    assert walked(twice, *[square()] * 3).bytes == 3 * SQUARE


def test_a_result_that_is_an_argument_is_a_copy() -> None:
    def same(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, x.sum()

    assert walked(same, square()).bytes // SQUARE == 1
    assert walked(same, square(), donate_argnums=0).bytes // SQUARE == 0


def test_arrays_are_divided_as_what_they_are_computed_from() -> None:
    rows, data = square(PartitionSpec("data")), 2
    assert walked(lambda x: jnp.tanh(x) + 1, rows).bytes == SQUARE // data
    # What is summed over the devices is whole on each; as a result, as the program says.
    assert walked(lambda x: x.T @ x, rows).bytes == SQUARE
    made = walked(lambda x: jnp.zeros((N, N)) + x[:1], rows, out_shardings=rows.sharding)
    assert made.bytes == SQUARE // data


def rows_of_two(function: Any, columns: PartitionSpec, dtype: Any = jnp.float32) -> float:
    """Squares of 4 bytes that a product of divided rows with divided weights needs."""
    mesh = role_mesh(jax.devices()[:2], Axes(1, 2, 1))
    rows, weights = (
        jax.ShapeDtypeStruct((N, N), dtype, sharding=NamedSharding(mesh, spec))
        for spec in (PartitionSpec(("data", "fsdp")), columns)
    )
    return walked(function, rows, weights).bytes / SQUARE


def by_rows(x: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, x, (((0,), (0,)), ((), ())))


def reduced(product: jax.Array, sums: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (product / sums).sum(), (product * x).sum()


@pytest.mark.parametrize(
    ("function", "elsewhere", "on_a_cpu"),
    [
        # What is ready at the same time is computed together.
        (lambda x: sum(((x + i) @ x @ x).sum() for i in range(3)), 2, 4),
        (lambda x: jnp.tanh(x @ x), 1, 2),  # no result lies where its operand did
        (lambda x: ((x + 1).sum(), (x + 1).max()), 0, 0),
        (lambda x: (lambda y: (y.sum(), y.max()))(x + 1), 0, 1),  # reductions, fused apart
        (lambda x: (lambda y: ((y + 1).sum(), (y * 2).sum()))(jnp.exp(x) - 1), 0, 1),
        (lambda x: by_rows(x.astype(jnp.bfloat16)), 1, 2.5),  # copy and product in float32
        (lambda x: (lambda y: y @ y)(x.astype(jnp.bfloat16)), 1, 1),
        # A product that is reduced, and what divides it, in its shape.
        (lambda x: reduced(x @ x, x.sum(1, keepdims=True), x), 1, 2),
    ],
)
def test_a_cpu_has_rules_of_its_own(function: Any, elsewhere: float, on_a_cpu: float) -> None:
    there, here = walked(function, square()), walked(function, square(PartitionSpec(), 1))
    assert (round(there.bytes / SQUARE, 1), round(here.bytes / SQUARE, 1)) == (elsewhere, on_a_cpu)


def test_a_cpu_gathers_at_the_start_what_it_reads_at_each_turn_of_a_loop() -> None:
    def repeated(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c @ weights, None), x, length=5)[0]

    rows, columns = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")
    assert (rows_of_two(jnp.matmul, rows), rows_of_two(jnp.matmul, columns)) == (1.5, 2)
    # Gathered along the columns, it is transposed, and copied to have its rows in order.
    assert (rows_of_two(repeated, rows), rows_of_two(repeated, columns)) == (1.5, 2.5)


def test_a_program_without_arrays_is_divided_over_the_mesh_that_it_is_given() -> None:
    def made(mesh: Any) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return jax.lax.with_sharding_constraint(jnp.zeros((N, N)), sharding)

    mesh = role_mesh(jax.devices()[:2], Axes(2, 1, 1))
    assert walked(made, mesh, static_argnums=0).bytes == SQUARE // 2


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
    accounts = role_accounts(made)
    lines = set()
    for program in RunPrograms(made):  # on described devices
        assert planned_bytes(program, CPU) >= local_bytes(program.args)
        assert accounts[program.role].phases().get(program.name, 0) >= 0
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
    rollout = role_accounts(made)["rollout"]
    (line,) = largest_arrays(made, {"rollout": rollout})
    assert re.match(r"rollout (prefill|decode): its largest arrays are \d.* MB float32\[", line)
    assert re.search(r"\((models|sampling)/\w+\.py:\d+\)", line)


def test_a_new_program_of_a_role_is_planned_without_a_formula(monkeypatch: Any) -> None:
    def more(run: Any) -> Any:
        *others, last = PROGRAMS_OF_TEACHER(run)
        yield from (*others, last)
        jitted = jax.jit(lambda x: (x @ x) @ x)
        whole = run.array("teacher", jnp.float32, N, N)
        yield replace(last, name="new", jitted=jitted, args=(whole,), kwargs={})

    PROGRAMS_OF_TEACHER = PROGRAMS["teacher"]
    monkeypatch.setitem(PROGRAMS, "teacher", more)
    made = setting()
    (new,) = (x for x in RunPrograms(made, jax.devices()) if x.name == "new")
    assert planned_bytes(new, CPU) == round((1 + margin_of(CPU)) * (new.beside + 3 * SQUARE))
    assert "new" in role_accounts(made)["teacher"].phases()


def test_a_residual_of_many_layers_is_one_array() -> None:
    """And not the results of all of them, which each layer would add up for itself."""

    def layers(x: jax.Array, count: int) -> jax.Array:
        for _ in range(count):
            x = x + jnp.tanh(x) @ x[:, :N]
        return x

    few, many = (walked(partial(layers, count=n), square()).bytes for n in (4, 20))
    assert few == many <= 3 * SQUARE
