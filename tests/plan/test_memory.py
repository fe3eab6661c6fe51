"""The memory plan: exact where it says so, near the compiler's own account elsewhere."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import and_slow

from jaxrl.checkpoint.model_source import lora_of
from jaxrl.config import yaml_text
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models import parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta
from jaxrl.models.family import LayerKind
from jaxrl.models.parameters import param_shardings
from jaxrl.plan import PROCESS_BYTES, build, make_plan, peaks, plan_inputs
from jaxrl.plan.live_arrays import Live
from jaxrl.plan.plan_inputs import Account, Entry
from jaxrl.plan.search import set_key
from jaxrl.plan.table import Plan
from jaxrl.roles.actor import checkpoint_bytes, moment_bytes
from jaxrl.roles.declared import local_bytes
from jaxrl.roles.optimizer import make_optimizer, state_shardings
from jaxrl.roles.run_shapes import fractions, placed_params
from jaxrl.roles.sampling_programs import abstract_cache
from jaxrl.runtime.cluster import ClusterDevice
from jaxrl.sampling import decode
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import Visible, abstract_mesh, ensure_devices, role_mesh
from jaxrl.sharding.placement import check_visible, place

ROLES = ("actor", "rollout", "teacher")
AXES = [
    Axes(*sizes)
    for sizes in itertools.product((1, 2), (1, 2, 3), (1, 2, 4))
    if math.prod(sizes) <= 8
]
AXES += [Axes(1, 2, 2, 2), Axes(1, 1, 1, 4)]
TINY = DecoderConfig("qwen2", 96, 48, 3, 4, 2, 16, 64)
TIED = DecoderConfig("qwen3", 90, 32, 2, 4, 1, 8, 60, tie_embeddings=True)
STATES = DecoderConfig(
    *("qwen3_5_text", 96, 48, 4, 4, 2, 16, 64),
    kinds=(LayerKind(recurs=True), LayerKind()) * 2,
    delta=Delta(k_heads=2, v_heads=4, k_dim=8, v_dim=12),
)
WINDOW, WHOLE = LayerKind(window=5), LayerKind(head_dim=32, n_kv_heads=1, keys_as_values=True)
SHAPES = DecoderConfig(  # of layers, of which the last two borrow
    *("gemma4_text", 96, 48, 4, 4, 2, 16, 64),
    kinds=(WINDOW, WHOLE, *(replace(kind, borrows=True, d_ff=96) for kind in (WINDOW, WHOLE))),
    layer_inputs=8,
)
SMALL = DecoderConfig("qwen2", 2000, 256, 8, 8, 2, 32, 1024)
TEACHER = DecoderConfig("qwen2", 2000, 512, 8, 8, 2, 32, 1024)
QWEN_1_5B = DecoderConfig("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, tie_embeddings=True)
QWEN_7B = DecoderConfig("qwen2", 152064, 3584, 28, 28, 4, 128, 18944)
QWEN_1_5B, QWEN_7B = (replace(model, max_positions=32768) for model in (QWEN_1_5B, QWEN_7B))
TWO_LAYERS = replace(QWEN_1_5B, n_layers=2), replace(QWEN_7B, n_layers=2)
BASE: dict[str, Any] = {
    "student": {"model": "student"},
    "teacher": {"model": "teacher"},
    "data": {"train": "arithmetic", "eval": "arithmetic"},
}


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program makes is a multiple of its rows here, in place of a walk over the programs of
    28 layers: most laws of the plan hold for any figure. Those with the fixture `walked` walk."""
    if "walked" in request.fixturenames:
        return

    def made(jitted: Any, structure: Any, leaves: tuple[Any, ...], target: Any) -> Live:
        rows = [x for x in leaves if getattr(getattr(x, "dtype", None), "kind", "") in ("i", "b")]
        return Live(256 * local_bytes(rows), ())

    monkeypatch.setattr(peaks, "_walk", made)


@pytest.fixture
def walked() -> None:
    """Has the programs walked."""


@pytest.mark.parametrize(
    "model",
    [TINY, TIED, QWEN_1_5B, STATES, SHAPES],
    ids=["tiny", "tied", "qwen", "states", "shapes"],
)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_the_shards_of_every_leaf_add_up(model: DecoderConfig, axes: Axes) -> None:
    mesh: Any = abstract_mesh(axes)

    def pieces(layout: parameters.Layout) -> list[tuple[int, int]]:
        """Numbers of each leaf, and those on a device."""
        arrays = placed_params(model, mesh, jnp.dtype("float32"), layout)
        return [
            (x.size, math.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(arrays)
        ]

    stacked, unstacked = pieces("stacked"), pieces("unstacked")
    assert sum(size for size, _ in stacked) == model.n_params
    for size, local in stacked:
        assert size % local == 0  # what is not split is on several devices
        assert axes.size % (size // local) == 0
    assert sum(local for _, local in stacked) == sum(local for _, local in unstacked)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "adafactor", "muon"])
@pytest.mark.parametrize("axes", [Axes(), Axes(1, 2, 2, 2), Axes(2, 1, 4)], ids=str)
def test_weights_and_moments_are_what_the_arrays_take(axes: Axes, name: Any) -> None:
    mesh = role_mesh(jax.devices()[: axes.size], axes)
    shardings = param_shardings(TINY, mesh)
    shapes = parameters.abstract_params(TINY)
    whole = placed_params(TINY, mesh, jnp.dtype("float32"))
    assert bytes_of_shards(shapes, shardings) == local_bytes(whole)
    config = set_key(Config.parse(BASE), "optimizer.name", name)
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(config.optimizer, 1, jnp.dtype(dtype))
        placed = state_shardings(optimizer, shapes, shardings, mesh)
        state = jax.eval_shape(optimizer.init, shapes)
        expected = moment_bytes(set_key(config, "actor.moment_dtype", dtype), TINY, axes)
        assert bytes_of_shards(state, placed) == expected


def bytes_of_shards(shapes: Any, shardings: Any) -> int:
    """Bytes on a device of arrays that are placed so."""
    return sum(
        math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    )


def on_first_device(tree: Any, mesh: jax.sharding.Mesh) -> int:
    device = mesh.devices.flat[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize("model", [TINY, STATES, SHAPES], ids=["tiny", "states", "shapes"])
@pytest.mark.parametrize("axes", [Axes(2, 1, 1), Axes(1, 1, 2), Axes(1, 2, 4)], ids=str)
def test_the_cache_is_what_the_engine_allocates(axes: Axes, model: DecoderConfig) -> None:
    mesh = role_mesh(jax.devices()[: axes.size], axes)
    for dtype in ("float32", "bfloat16"):
        cache = decode.new_cache(model, mesh, 8, 24, jnp.dtype(dtype))
        assert on_first_device(cache, mesh) == local_bytes(
            abstract_cache(model, mesh, 8, 24, jnp.dtype(dtype))
        )


def test_a_peak_is_what_is_resident_and_the_largest_phase_of_any_role() -> None:
    a = Account(
        "a", (Entry("weights", "w", 5), Entry("cache", "k", 7, "x"), Entry("cache", "l", 2, "y"))
    )
    b = Account(
        "b",
        (Entry("weights", "w", 1), Entry("activations", "t", 3, "z"), Entry("cache", "c", 6, "z")),
    )
    assert (a.peak, b.peak) == (12, 10)
    assert plan_inputs.peak([a, b]) == (15, "b: z")
    assert (a.column("cache"), a.column("weights"), a.column("optimizer")) == (7, 5, 0)
    assert plan_inputs.peak([]) == (0, "")


# The plan.


def plan(
    mesh: str,
    *,
    limit_gb: float | None = None,
    here: bool = False,
    room: bool = False,
    models: tuple[DecoderConfig, DecoderConfig] = (QWEN_1_5B, QWEN_7B),
    **changes: Any,
) -> Plan:
    """A Qwen plan (7B teaches 1.5B), for GPUs elsewhere unless `here`."""
    config = Config.parse({**BASE, "mesh": mesh})
    for key, value in changes.items():
        config = set_key(config, key.replace("__", "."), value)
    placement = place(mesh, ROLES)
    seen = Visible((), None)
    if here:
        seen = ensure_devices(placement.n_devices)
        placement = check_visible(placement, len(seen.devices))
    student, teacher = models
    student = replace(student, lora=lora_of(config), quantised=config.quantised)
    return build(config, ROLES, placement, student, teacher, seen, limit_gb, room=room)


@pytest.mark.parametrize(
    ("mesh", "rows"),
    and_slow(
        [
            ("actor=2,rollout=2,teacher=4", ["actor", "rollout", "teacher"]),
            ("actor+rollout=4", ["actor", "rollout", "teacher", "together"]),
        ],
        [
            ("actor=1,rollout=3,teacher=4", ["actor", "rollout", "teacher"]),
            ("actor+rollout=6,teacher=2", ["actor", "rollout", "together", "teacher"]),
        ],
    ),
)
def test_the_table_has_a_row_for_each_role_and_one_for_each_shared_pool(
    mesh: str, rows: list[str]
) -> None:
    text = plan(mesh, here=True, room=True).text()
    lines = text.splitlines()
    assert "GB on each device" in lines[0]
    for title in ("worker", "devices", "process", "mesh", "weights", "optim", "peak", "limit"):
        assert title in lines[1]
    body = [line for line in lines[3:] if line[-1] in "-?0123456789"][
        : len(rows)
    ]  # no rest of a name
    for line, role in zip(body, rows, strict=True):
        assert f" {role} " in line
    assert "cpu 0" in body[0]
    assert "emulating 8 CPU devices" in text
    for size in (24, 40, 80, 141):
        assert f"on GPUs of {size} GB" in text
    assert max(map(len, [*lines[:3], *body])) <= 110


def test_a_role_that_joined_is_told_and_adds_up() -> None:
    found = plan("actor+rollout=4")
    assert any("teacher is not in the mesh" in note for note in found.notes)
    accounts = found.accounts.values()
    (pool,) = found.pools
    assert pool.bytes == plan_inputs.peak(accounts)[0]
    assert pool.bytes > sum(a.resident for a in accounts)
    assert pool.bytes < sum(a.peak for a in accounts)


def test_roles_on_slices_meet_only_where_the_slices_do() -> None:
    mesh = "actor+rollout+teacher=4"
    config = Config.parse({**BASE, "mesh": mesh})
    placement = place(mesh, ROLES, {"actor": "0:2", "rollout": "0:2", "teacher": "2:4"})
    apart = build(config, ROLES, placement, QWEN_1_5B, QWEN_7B, Visible((), None))
    accounts = apart.accounts
    policy, _ = plan_inputs.peak([accounts["actor"], accounts["rollout"]])
    assert apart.pools[0].bytes == max(policy, accounts["teacher"].peak)


def test_emulated_devices_are_held_against_the_sum_of_what_their_host_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No share of it: an actor may take more than half. A byte less, and it does not fit."""

    def on(free: int, mesh: str = "actor=1,rollout=2,teacher=1") -> Plan:
        monkeypatch.setattr("jaxrl.sharding.mesh.host_available", lambda: free)
        return plan(mesh, here=True)

    roomy = on(10**13)
    actor, rollout, teacher = (pool.bytes for pool in roomy.pools)
    (host,) = roomy.inputs.hosts
    needed = actor + 2 * rollout + teacher + host.beside
    assert host.devices == (1, 2, 1) and host.beside >= PROCESS_BYTES
    assert max(actor, teacher) > needed / 4  # which an eighth for each device, or a quarter, is not
    assert "(the 4 devices are emulated and share" in roomy.verdict[0]
    assert on(needed).fits and not on(needed).hopeless
    small = on(needed - 1)
    assert not small.fits and not small.hopeless
    assert f"this host needs {needed / 1e9:.1f} GB of" in small.verdict[0]
    assert f"2 x {rollout / 1e9:.1f} rollout" in small.verdict[0]
    assert on(int(needed / 1.3)).hopeless
    assert any("teacher" in line for line in on(needed // 2).advice)


def test_a_cluster_s_emulated_devices_share_the_memory_of_their_own_host() -> None:
    placement = place("actor=2,teacher=1,rollout=1", ROLES)
    config = Config.parse({**BASE, "mesh": placement.spec})

    def on(*free: int) -> Plan:
        where = [("a", free[0])] * 2 + [("b", free[1])] * 2
        devices = [ClusterDevice(i, "cpu", i // 2, *host) for i, host in enumerate(where)]
        seen = Visible(tuple(devices), "emulated", "ray")
        return build(config, ROLES, placement, QWEN_1_5B, QWEN_7B, seen)

    a, b = on(10**13, 10**13).inputs.hosts
    assert (a.name, a.devices, b.name, b.devices) == ("a", (2, 0, 0), "b", (0, 1, 1))
    sizes = [pool.bytes for pool in on(10**13, 10**13).pools]
    need_a, need_b = (host.needed(sizes) for host in (a, b))
    assert on(need_a, need_b).fits
    assert not on(need_a - 1, 10**13).fits and not on(10**13, need_b - 1).fits


def test_what_jax_takes_of_a_gpu_is_told_and_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place("actor+rollout+teacher=1", ROLES)
    config = Config.parse({**BASE, "mesh": placement.spec})

    def on(share: float) -> Plan:
        device = ClusterDevice(0, "gpu", 0, "a", round(share * 141e9), "9.0", share)
        return build(config, ROLES, placement, QWEN_1_5B, QWEN_7B, Visible((device,), None, "ray"))

    (note,) = (note for note in on(0.92).notes if "jax takes" in note)
    assert note == "of each GPU's 141 GB jax takes 92%: XLA_CLIENT_MEM_FRACTION changes that"
    assert on(0.92).pools[0].limit == round(0.92 * 141e9)
    assert any("141 GB jax takes 50%" in note for note in on(0.5).notes)

    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    elsewhere = plan(placement.spec, here=True, room=True).text()
    assert "on GPUs of 141 GB, of which jax takes 92%" in elsewhere
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    assert "of which jax takes 60%" in plan(placement.spec, here=True, room=True).text()


def test_roles_compute_in_what_their_devices_do_unless_they_are_told() -> None:
    def dtypes(found: Plan) -> set[str | None]:
        return {section.dtype for section in found.config.roles.values()}

    here = plan("actor+rollout+teacher=1", here=True)
    assert dtypes(here) == {"float32"}
    assert any("dtype=float32 of actor, rollout, teacher" in note for note in here.notes)
    assert dtypes(plan("actor+rollout+teacher=1")) == {"bfloat16"}
    config = Config.parse({**BASE, "mesh": "actor+rollout+teacher=1"})
    device = ClusterDevice(0, "cpu", 0, "a", 10**13)
    placement = place(config.mesh, ROLES)
    seen = Visible((device,), "emulated", "ray")
    assert dtypes(build(config, ROLES, placement, QWEN_1_5B, QWEN_7B, seen)) == {"float32"}
    asked = plan("actor+rollout+teacher=1", here=True, teacher__dtype="bfloat16")
    assert asked.config.teacher.dtype == "bfloat16" and asked.config.actor.dtype == "float32"
    assert any("dtype=bfloat16 of teacher: a CPU computes it in float32" in n for n in asked.notes)


def named(found: Plan) -> list[str]:
    """The keys that the advice names."""
    return [line.split("=")[0].split(": ")[1] for line in found.advice if "takes" in line]


def test_what_does_not_fit_names_keys_that_help(walked: None) -> None:
    def on(limit: float, **changes: Any) -> Plan:
        """A plan for devices of so many bytes."""
        mesh, sizes = "actor=2,rollout=2,teacher=4", {"group_size": 4, "max_new_tokens": 1024}
        return plan(mesh, limit_gb=limit / 1e9, models=TWO_LAYERS, **sizes | changes)

    roomy = on(2e11)
    assert roomy.fits and roomy.advice == ()
    needed = max(pool.bytes for pool in roomy.pools)
    large = on(needed / 1.5)
    assert not large.fits
    assert f"does not fit: {large.pools[0].pool.name} needs" in large.verdict[0]
    assert f"of {needed / 1.5e9:.1f}" in large.verdict[0]
    near = on(max(pool.bytes for pool in large.pools) / 1.05)
    assert "--compile" in near.verdict[0] and "--compile" not in on(needed / 3).verdict[0]
    assert "actor.micro_batch_tokens" in named(large)
    # The plan splits a teacher by itself, where that fits.
    copied = on(roomy.pools[2].bytes)
    assert copied.axes["teacher"] == Axes(4, 1, 1)
    assert on(roomy.pools[2].bytes - 1).axes["teacher"] == Axes(2, 1, 2)


def test_named_keys_keep_their_promise() -> None:
    mesh = "actor=2,rollout=2,teacher=4"
    limit = 0.8e-9 * plan(mesh, limit_gb=200).pools[0].bytes
    large = plan(mesh, limit_gb=limit)
    assert named(large)
    for line in large.advice:
        if "takes" not in line:
            continue
        pool, change, _, size, *_ = line.replace(":", "").split()
        key, value = change.split("=")
        typed: Any = int(value) if value.isdigit() else {"true": True}.get(value, value)
        after = plan(mesh, limit_gb=limit, **{key: typed})
        index = [p.name for p in after.placement.pools].index(pool)
        assert after.pools[index].bytes / 1e9 == pytest.approx(float(size), abs=0.051)


KEYS_TO_RUN_FASTER = {
    "rollout.slots": [48, 192],
    "actor.remat": ["full", "none"],
    "actor.micro_batch_tokens": [12288, None],
    "teacher.num_microbatches": [8, 1],
}
"""Key -> values, the slowest first."""


def test_adapters_beside_the_weights_are_advised_to_be_merged_where_a_copy_fits() -> None:
    mesh, line = "actor+rollout=2,teacher=2", "faster: rollout.merge=true (now false) fits: "
    lora: dict[str, Any] = {"student__lora__rank": 16, "distill__chunk_tokens": 512}
    beside = plan(mesh, limit_gb=80, room=True, **lora)
    (advice,) = [each for each in beside.verdict if each.startswith(line)]
    merged = plan(mesh, limit_gb=80, **lora, rollout__merge=True)
    assert advice.endswith(f"takes {merged.pools[0].bytes / 1e9:.1f} of 80.0 GB")
    for others in (
        plan(mesh, limit_gb=80, room=True),
        plan(mesh, limit_gb=80, room=True, **lora, rollout__merge=True),
        plan(mesh, limit_gb=beside.pools[0].bytes / 1e9 + 0.1, room=True, **lora),
        plan(mesh, limit_gb=80, room=True, **lora, student__base_dtype="int8"),
    ):
        assert not any("rollout.merge" in each for each in others.verdict)


@pytest.mark.slow  # a few dozen plans; test_declared.py has one such key
@pytest.mark.parametrize("limit_gb", [12, 24, 80])
def test_what_would_be_faster_is_named_with_what_it_takes_and_fits(
    limit_gb: float, walked: None
) -> None:
    mesh = "actor=2,rollout=2,teacher=4"
    sizes: dict[str, Any] = {"batch_size": 48, "group_size": 4, "max_new_tokens": 2048}
    sizes |= {key: values[0] for key, values in KEYS_TO_RUN_FASTER.items()}

    def on(**changes: Any) -> Plan:
        given: dict[str, Any] = {"limit_gb": limit_gb, "models": TWO_LAYERS}
        return plan(mesh, **(given | sizes | changes))

    now, found = on(room=True), {}
    assert now.fits
    for line in now.verdict:
        if not line.startswith("faster: "):
            continue
        key, value = line.split()[1].split("=")
        typed: Any = int(value) if value.isdigit() else {"null": None}.get(value, value)
        pool, size = line.split(" fits: ")[1].split(" then takes ")
        after = on(**{key: typed})
        assert after.fits
        index = [p.name for p in after.placement.pools].index(pool)
        assert after.pools[index].bytes / 1e9 == pytest.approx(float(size.split()[0]), abs=0.051)
        assert line.endswith(f"of {limit_gb:.1f} GB")
        found[key] = typed
    for key, values in KEYS_TO_RUN_FASTER.items():
        fitting = [value for value in values[1:] if on(**{key: value}).fits]
        assert (key in found) >= bool(fitting)  # none is missed
    remats = [r for r in KEYS_TO_RUN_FASTER["actor.remat"] if on(**{"actor.remat": r}).fits]
    assert found.get("actor.remat", "full") == remats[-1]
    # Once all are set, nothing more is named; one that does not fit names nothing.
    fastest = {key: values[-1] for key, values in KEYS_TO_RUN_FASTER.items()}
    most = on(limit_gb=1000, room=True, **fastest)
    assert not any(line.startswith("faster: ") for line in most.verdict)
    tight = on(limit_gb=2, room=True)
    assert not tight.fits and not any(
        line.startswith(("faster", "largest")) for line in tight.verdict
    )


def test_the_rollout_splits_its_weights_only_where_a_copy_does_not_fit() -> None:
    roomy = plan("actor=2,rollout=2,teacher=4", limit_gb=60)
    assert roomy.axes["rollout"] == Axes(2, 1, 1)
    tight = plan("actor=2,rollout=2,teacher=4", limit_gb=5)
    assert tight.axes["rollout"] == Axes(1, 1, 2)
    assert any("rollout.parallel.tensor=2" in note for note in tight.notes)
    asked = plan("actor=2,rollout=2,teacher=4", limit_gb=5, rollout__parallel__data=2)
    assert asked.axes["rollout"] == Axes(2, 1, 1)


def test_a_frozen_role_has_whole_copies_where_they_fit_and_is_split_where_not() -> None:
    mesh = "actor=2,rollout=2,teacher=4"
    roomy = plan(mesh, limit_gb=60)
    assert roomy.axes["teacher"] == Axes(4, 1, 1)
    (note,) = (note for note in roomy.notes if note.startswith("teacher.parallel"))
    size = roomy.pools[2].bytes
    assert note.startswith("teacher.parallel.data=4: a copy of the weights fits")
    assert note.endswith(f"its pool takes {size / 1e9:.1f} GB")
    # Exactly as much as it takes is enough; a byte less, and it is split over two.
    at_limit = plan(mesh, limit_gb=size / 1e9)
    assert at_limit.axes["teacher"] == Axes(4, 1, 1)
    below = plan(mesh, limit_gb=(size - 1) / 1e9)
    assert below.axes["teacher"] == Axes(2, 1, 2) and below.pools[2].fits
    assert any(f"its pool would take {size / 1e9:.1f} GB" in note for note in below.notes)
    # The config's own keys win, and where nothing fits the advice names what would help.
    asked = plan(mesh, limit_gb=60, teacher__parallel__fsdp=4)
    assert asked.axes["teacher"] == Axes(1, 4, 1)
    assert plan(mesh, limit_gb=5).axes["teacher"] == Axes(1, 4, 1)
    # Nothing is known of the device, or a CPU emulates it: the usual axes.
    assert plan(mesh).axes["teacher"] == Axes(1, 4, 1)
    assert plan(mesh, here=True).axes["teacher"] == Axes(1, 4, 1)


def test_the_rollout_has_as_many_slots_as_fit_and_null_where_all_do() -> None:
    mesh = "actor=2,rollout=2,teacher=4"
    sizes: dict[str, Any] = {"batch_size": 48, "group_size": 4, "max_new_tokens": 4096}
    sizes["data.eval"] = None  # for which the teacher samples too

    def on(limit_gb: float, **changes: Any) -> Plan:
        split = {"rollout__parallel__data": 2}  # else it splits its weights to have room for more
        return plan(mesh, limit_gb=limit_gb, **(sizes | split | changes))

    whole = on(200)
    size = whole.pools[1].bytes
    assert whole.config.rollout.slots is None
    assert on(size / 1e9).config.rollout.slots is None  # exactly as much as it takes is enough
    below = on((size - 1) / 1e9)
    assert below.config.rollout.slots == 192 * 7 // 8 and below.pools[1].fits
    (note,) = (note for note in below.notes if note.startswith("rollout.slots=168: with all 192"))
    assert f"would take {size / 1e9:.1f} GB" in note
    for limit in (8, 12, 15):
        found = on(limit)
        slots = found.config.rollout.slots
        assert slots is not None and found.pools[1].fits
        larger = min(n for n in [192, *fractions(192)] if n > slots)
        assert not on(limit, rollout__slots=larger).pools[1].fits
        asked = on(limit, rollout__slots=slots)  # counts as what is asked does
        assert asked.pools == found.pools and asked.accounts == found.accounts
    assert on(8, rollout__slots=192).config.rollout.slots == 192
    # Where no number helps, nothing is known of the device, or a CPU emulates it: null.
    assert on(1).config.rollout.slots is None
    assert plan(mesh, **sizes).config.rollout.slots is None
    assert plan(mesh, here=True, limit_gb=8, **sizes).config.rollout.slots is None


@pytest.mark.parametrize("sequences", [1, 2, 3, 7, 8, 20, 192])
def test_fewer_slots_are_tried_from_the_most_to_one(sequences: int) -> None:
    tried = fractions(sequences)
    assert tried == sorted(set(tried), reverse=True)
    assert set(tried) <= set(range(1, sequences))
    assert tried[-1:] == [1][: sequences - 1]


def test_frozen_roles_that_share_a_pool_have_copies_only_where_all_of_them_fit() -> None:
    roles, mesh = ("actor", "rollout", "reference", "reward"), "actor+rollout=4,reference+reward=2"
    placement = place(mesh, roles)
    changes: dict[str, Any] = {
        "algorithm": "gspo",
        "policy": {"kl_coef": 0.1},
        "reward": {"model": "judge"},
        "distill": {"chunk_tokens": 512},  # else that of the plan gives way first
    }
    changes |= {"teacher": {"model": None}, "mesh": mesh, "batch_size": 8}
    config = Config.parse(BASE | changes)

    def on(limit_gb: float) -> Plan:
        seen, frozen = Visible((), None), {"reward": QWEN_7B}
        return build(config, roles, placement, QWEN_1_5B, None, seen, limit_gb, frozen)

    both = on(100)
    assert {both.axes[role] for role in ("reference", "reward")} == {Axes(2, 1, 1)}
    needed = both.pools[1].bytes
    one = on((needed - 1) / 1e9)
    assert one.pools[1].fits
    assert (one.axes["reference"], one.axes["reward"]) == (Axes(2, 1, 1), Axes(1, 1, 2))


def test_heads_that_tensor_does_not_divide_are_refused() -> None:
    with pytest.raises(UserError) as error:
        plan("actor=8,rollout=1,teacher=1", actor__parallel__tensor=8)
    for word in ("actor.parallel.tensor=8", "n_heads=12", "8 devices", "1 or 2 or 4"):
        assert word in str(error.value)

    with pytest.raises(UserError) as error:
        plan("actor=8,rollout=1,teacher=1", actor__parallel__tensor=2, actor__parallel__context=4)
    for word in ("tensor=2 times actor.parallel.context=4, 8, does not", "1 or 2 or 4"):
        assert word in str(error.value)


def test_long_sequences_fit_where_context_divides_them_and_the_plan_names_it(walked: None) -> None:
    """A model with the widths of 7B learns from sequences of 32k tokens on eight GPUs, and keeps
    all matrix products for the backward pass."""
    long = {"max_prompt_tokens": 1024, "max_new_tokens": 31744, "batch_size": 8, "group_size": 1}
    mesh, model = "actor=8,rollout=1,teacher=4", replace(TWO_LAYERS[1], n_layers=4)

    def found(limit_gb: float, **keys: Any) -> Plan:
        given: dict[str, Any] = long | {"actor.remat": "dots", "data.eval": None} | keys
        return plan(mesh, limit_gb=limit_gb, models=(model, model), **given)

    divided = found(1000, actor__parallel__context=2)
    assert divided.axes["actor"] == Axes(fsdp=4, context=2)
    whole = found(1000)
    needed = [each.pools[0].bytes for each in (whole, divided)]
    whole = found(1e-9 * (needed[0] + needed[1]) / 2)
    assert whole.axes["actor"] == Axes(fsdp=8) and not whole.pools[0].fits
    assert any("actor.parallel.context=2 takes" in line and "fits" in line for line in whole.advice)
    resident = [plan.accounts["actor"].column("weights") for plan in (whole, divided)]
    assert resident[0] == resident[1]  # weights are divided by all eight either way


def test_fewer_kv_heads_than_tensor_are_told() -> None:
    found = plan("actor=4,rollout=1,teacher=1", actor__parallel__tensor=4)
    assert any("tensor=4 does not divide the 2 KV heads" in note for note in found.notes)


@pytest.mark.parametrize(
    ("key", "value", "role"),
    [
        ("actor.remat", "none", "actor"),
        ("distill.chunk_tokens", 4096, "actor"),
        ("actor.micro_batch_tokens", 24576, "actor"),  # null, one of all, needs no accumulator
        ("rollout.slots", 512, "rollout"),
        ("max_new_tokens", 4096, "teacher"),
    ],
)
def test_what_asks_for_more_takes_more(key: str, value: Any, role: str, walked: None) -> None:
    def peak(**changes: Any) -> int:
        given = {"data.eval": None, "models": TWO_LAYERS} | changes
        return plan("actor=2,rollout=2,teacher=4", **given).accounts[role].peak

    assert peak(**{key: value}) > peak()


def test_what_a_device_samples_with_does_not_grow_with_their_number(walked: None) -> None:
    """With as many completions for each; but for the numbers of all slots, which each has."""

    def sampling(n: int, group: int) -> dict[str, int]:
        mesh, prompts = f"actor=2,rollout={n},teacher=2", 64 * n // group
        given: dict[str, Any] = {"data.eval": None, "models": TWO_LAYERS}
        found = plan(mesh, batch_size=prompts, group_size=group, **given)
        return found.accounts["rollout"].phases()

    for group in (1, 8):
        few = sampling(2, group)
        assert {"prefill", "decode"} <= few.keys()
        assert sampling(8, group) == pytest.approx(few, rel=0.001)
        assert sampling(512, group) == pytest.approx(few, rel=0.04)


PAGED = {"rollout.cache_tokens": 2048, "data.eval": None, "rollout.dtype": "bfloat16"}


@pytest.mark.parametrize("group", [1, 4])
def test_a_pool_of_pages_is_counted_and_explained(group: int) -> None:
    """Two data shards with 16 slots each: 32 pages of 64 tokens in place of 16 x 512 tokens, 28
    layers with 2 KV heads of 128."""
    mesh, changes = "actor=2,rollout=2,teacher=4", {"group_size": group, "batch_size": 32 // group}
    found, whole = (
        plan(mesh, max_new_tokens=512, **changes | more) for more in (PAGED, {"data.eval": None})
    )
    token = 28 * 2 * 2 * 128 * 2

    def cached(of: Plan, phase: str) -> int:
        entries = of.accounts["rollout"].entries
        return sum(e.bytes for e in entries if (e.phase, e.column) == (phase, "cache"))

    apart = cached(whole, "decode") - 16 * 512 * token  # the prompts that slots share
    for phase in ("prefill", "decode", "read again"):
        assert cached(found, phase) == 2048 * token + apart
    [note] = [note for note in found.notes if "rollout.cache_tokens=2048" in note]
    assert "32 pages of 64 tokens take 0.06 GB" in note and "16 slots" in note
    assert "would take 0.23 GB" in note and "room for 128 tokens" in note
    few = plan(mesh, max_new_tokens=512, **changes, **PAGED | {"rollout.cache_tokens": 513})
    [note] = [note for note in few.notes if "rollout.cache_tokens=513" in note]
    assert "no more than 9 slots are used at once" in note
    more = plan(mesh, max_new_tokens=512, **changes, **PAGED | {"rollout.cache_tokens": 10**6})
    assert cached(more, "decode") == cached(whole, "decode")  # all that can be


def test_a_pool_of_pages_is_refused_where_environments_answer() -> None:
    change = {"environment.name": "e"}
    with pytest.raises(UserError, match="rollout.cache_tokens=2048 needs .*answers"):
        plan("actor=2,rollout=2,teacher=4", max_new_tokens=512, **PAGED | change)


RECURRENT = replace(
    STATES,
    **{"n_layers": 32, "kinds": STATES.kinds * 8, "n_heads": 16, "n_kv_heads": 16},
    **{"head_dim": 256, "max_positions": 8192},
)


@pytest.mark.parametrize("model", [QWEN_1_5B, RECURRENT], ids=["qwen", "recurrent"])
@pytest.mark.parametrize("name", [None, "guess_number"])
def test_no_key_that_is_advised_is_refused(model: DecoderConfig, name: str | None) -> None:
    """Of a rollout whose cache does not fit: its answers, or its states, are in no pages."""
    mesh, changes = "actor=4,rollout=1,teacher=3", {"batch_size": 512, "max_new_tokens": 4096}
    config = Config.parse({**BASE, "mesh": mesh, **changes, "environment": {"name": name}})

    def planned(config: Config) -> Plan:
        return build(config, ROLES, place(mesh, ROLES), model, model, Visible((), None), 0.5)

    advised = [line.split()[1].split("=") for line in planned(config).advice if " takes " in line]
    keys = [key for key, *value in advised if value]
    assert "rollout.slots" in keys
    assert ("rollout.cache_tokens" in keys) == (name is None and model is QWEN_1_5B)
    for key, *value in advised:
        if value:
            planned(set_key(config, key, yaml_text.parse_value(value[0])))


def test_a_plan_needs_only_config_json(tmp_path: Path) -> None:
    raw = QWEN_1_5B.to_hf("bfloat16")
    for name in ("student", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
    models = {name: {"model": str(tmp_path / name)} for name in ("student", "teacher")}
    config = Config.parse({**BASE, **models, "mesh": "actor=2,rollout=2,teacher=4"})
    found = make_plan(config, ROLES, ensure_devices)
    assert len(found.devices) == 8
    assert found.axes["teacher"] == Axes(1, 4, 1)
    with pytest.raises(UserError, match="needs 9 devices"):
        make_plan(set_key(config, "mesh", "actor=9"), ROLES, ensure_devices)


def test_a_role_peaks_where_its_device_does() -> None:
    """A device's own statistics know no roles: what shares it counts."""
    found = plan("actor+teacher=6,rollout=2")
    shared, rollout = found.pools
    assert found.peaks == {"actor": shared.bytes, "teacher": shared.bytes, "rollout": rollout.bytes}
    assert shared.bytes > max(found.accounts[role].peak for role in ("actor", "teacher"))


def weight_bytes(model: DecoderConfig, axes: Axes) -> int:
    """Bytes of a model's bfloat16 weights on one device."""
    return local_bytes(placed_params(model, abstract_mesh(axes), jnp.dtype("bfloat16")))


def test_new_weights_at_a_sync_are_held_beside_the_old_ones() -> None:
    apart = plan("actor=1,rollout=1,teacher=1", rollout__slots=1, group_size=1, batch_size=1)
    rollout = apart.accounts["rollout"]
    weights = rollout.column("weights")
    assert weights == weight_bytes(QWEN_1_5B, Axes())
    assert rollout.resident + rollout.phases()["weight sync"] == 2 * weights


def test_a_sampling_role_on_fsdp_gathers_weights_to_decode(walked: None) -> None:
    """The table, and of layers a transposed copy besides; with whole copies nothing."""
    pools, given = "actor=2,rollout=2,teacher=4", {"models": TWO_LAYERS}
    split, whole = (
        plan(pools, rollout__parallel__fsdp=n, rollout__parallel__data=2 // n, **given).accounts[
            "rollout"
        ]
        for n in (2, 1)
    )
    weights, table = weight_bytes(TWO_LAYERS[0], Axes()), 2 * 151936 * 1536
    gathered = split.phases()["decode"] - whole.phases()["decode"]
    assert table < gathered < 1.1 * weights
    assert split.column("weights") == pytest.approx(weights / 2, rel=1e-3)  # norms are not split


def test_a_role_has_the_caches_of_what_it_samples() -> None:
    """Slots share the prompts of a batch, with four samples of each, and not those of evaluations,
    with one: the larger cache counts. The teacher samples only for these."""

    def caches(role: str, **changes: Any) -> dict[str, int]:
        given = {"group_size": 4, "data__eval": "arithmetic", "eval__teacher": True} | changes
        found = plan("actor=2,rollout=2,teacher=4", **given).accounts[role].entries
        cached = [x for x in found if x.column == "cache" and x.phase and "decode" in x.phase]
        return {x.phase or "": x.bytes for x in cached}

    rollout, alone = caches("rollout"), caches("rollout", data__eval=None)
    assert rollout.keys() == {"decode", "decode for evaluations"} > alone.keys()
    assert list(caches("teacher")) == ["decode"]
    assert max(rollout.values()) >= alone["decode"]
    assert caches("teacher") == caches("teacher", distill__seq_kd=True)


@pytest.mark.parametrize(
    "keys", [{"algorithm": "sft"}, {"distill__on_policy_fraction": 0.0}], ids=["sft", "off policy"]
)
def test_a_batch_of_the_data_s_completions_has_one_for_each_prompt(keys: dict[str, Any]) -> None:
    """Whatever `group_size` says; and a rollout that is never asked has no cache."""
    keys, mesh = {"data__eval": None, **keys}, "actor=2,rollout=2,teacher=4"
    one, many = (plan(mesh, group_size=n, **keys) for n in (1, 16))
    assert one.accounts == many.accounts and "decode" not in one.accounts["rollout"].phases()
    assert not any("samples of a prompt share" in note for note in many.notes)
    sampled = plan(mesh, group_size=16, data__eval=None, distill__on_policy_fraction=0.5)
    assert sampled.accounts["actor"] != one.accounts["actor"]


def test_the_disk_that_checkpoints_take_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    n = QWEN_1_5B.n_params  # float32 parameters and two float32 moments
    config = Config.parse(BASE)
    assert checkpoint_bytes(config, QWEN_1_5B) == pytest.approx(12 * n, rel=1e-6)
    each, all_of_them = f"{12 * n / 1e9:.2f} GB each", f"{4 * 12 * n / 1e9:.2f} GB"
    for free, warned in ((10**15, False), (10**9, True)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        notes = [n for n in plan("actor=1,rollout=1,teacher=1").notes if "checkpoint" in n]
        assert each in notes[0]
        assert all_of_them in notes[0]
        assert (len(notes) == 2) == warned
    for word in ("1.00 GB free", all_of_them, "checkpoint.keep_last", "checkpoint.keep_best"):
        assert word in notes[1]
    elsewhere = plan("actor=1,rollout=1,teacher=1", limit_gb=141).notes
    assert each in " ".join(elsewhere) and "disk" not in " ".join(elsewhere)  # that of this machine
