"""From devices to meshes: emulation, carving, and the check of what each role got."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import and_slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl.errors import UserError
from jaxrl.sharding.axes import Axes, resolve_axes
from jaxrl.sharding.mesh import (
    CROWD,
    bytes_limit,
    emulation_note,
    ensure_devices,
    host_available,
    role_mesh,
    role_meshes,
    tpu_chips_here,
    verify_arrays,
)
from jaxrl.sharding.placement import parse, place


@pytest.mark.parametrize(
    "spec",
    ["actor=2,rollout=2,teacher=4", "actor=1,rollout=3,teacher=4", "actor+rollout=6,teacher=2"],
)
def test_every_role_gets_its_devices_and_computes_on_them(spec: str) -> None:
    placement = parse(spec)
    axes = {role: resolve_axes(role, len(r.devices)) for role, r in placement.roles.items()}
    meshes = role_meshes(jax.devices(), placement, axes)
    for role, mesh in meshes.items():
        assert [d.id for d in mesh.devices.flat] == list(placement.roles[role].devices)
        assert mesh.axis_names == ("data", "fsdp", "tensor", "context", "expert")
        assert set(mesh.axis_types) == {AxisType.Auto}
        rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "tensor")))
        x = jax.device_put(np.arange(mesh.size, dtype=np.int32), rows)
        total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
        assert int(total) == mesh.size * (mesh.size - 1) // 2
        assert total.sharding.device_set == set(mesh.devices.flat)


@pytest.mark.parametrize(
    ("platforms", "driver", "chips"),
    [("", True, 4), ("tpu,cpu", True, 4), ("cpu", True, 0), ("cuda,cpu", True, 0), ("", False, 0)],
)
def test_tpu_chips_are_those_that_jax_would_use(
    platforms: str, driver: bool, chips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = "jaxrl.sharding.mesh.hardware_utils.num_available_tpu_chips_and_device_id"
    monkeypatch.setattr(counted, lambda: (4, None))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if driver else None)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert tpu_chips_here() == chips


def test_a_slice_has_only_its_devices() -> None:
    placement = place("actor+rollout+reward=2", (), {"reward": "1:2"})
    axes = {role: resolve_axes(role, len(r.devices)) for role, r in placement.roles.items()}
    meshes = role_meshes(jax.devices(), placement, axes)
    assert [d.id for d in meshes["reward"].devices.flat] == [1]
    assert [d.id for d in meshes["actor"].devices.flat] == [0, 1]


def test_neighbours_share_the_tensor_axis() -> None:
    mesh = role_mesh(jax.devices()[:8], Axes(2, 2, 2))
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2, 1, 1))


def test_arrays_on_other_devices_than_the_mesh_are_told() -> None:
    mesh = role_mesh(jax.devices()[2:4], Axes(1, 2, 1))
    there = NamedSharding(mesh, PartitionSpec())
    verify_arrays("actor", jax.device_put(np.zeros(2), there), mesh)
    with pytest.raises(RuntimeError, match="given devices 2-3, but its arrays lie on 0"):
        verify_arrays("actor", jax.device_put(np.zeros(2), jax.devices()[0]), mesh)


def test_more_devices_than_jax_was_started_with_are_refused() -> None:
    with pytest.raises(UserError) as error:
        ensure_devices(9)
    for word in ("needs 9 devices", "sees 8", "JAX_NUM_CPU_DEVICES=9"):
        assert word in str(error.value)


PROBE = """
import sys
sys.path.insert(0, {root!r})
from jaxrl.sharding.mesh import ensure_devices
if {late}:
    import jax
    jax.devices()
for needed in {needed}:
    try:
        seen = ensure_devices(needed)
        print(len(seen.devices), seen.note)
    except ValueError as error:
        print(error)
"""


def probe(*needed: int, late: bool = False, **env: str) -> str:
    """What `ensure_devices` says in a fresh process, a line for each number."""
    root = str(Path(__file__).parent.parent.parent)
    code = PROBE.format(root=root, late=late, needed=needed)
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("needed", "words"), and_slow([(3, "3 CPU devices")], [(1, "1 CPU device")])
)
def test_a_host_without_an_accelerator_emulates_what_is_needed(needed: int, words: str) -> None:
    assert probe(needed) == f"{needed} no accelerator: emulating {words}"


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_emulated_devices_are_counted_in_words_and_called_slow_where_they_crowd(cores: int) -> None:
    assert emulation_note(1, cores) == "emulating 1 CPU device"
    for n in range(2, 200):
        note = emulation_note(n, cores)
        assert note.startswith(f"emulating {n} CPU devices")
        assert ("slow" in note) == (n >= CROWD * cores)
        assert f"{cores} core:" not in note or cores == 1


@pytest.mark.parametrize(
    "env",
    [
        {"JAX_NUM_CPU_DEVICES": "4"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    ],
)
def test_a_number_that_was_set_is_kept(env: dict[str, str]) -> None:
    ((name, value),) = env.items()
    seen, refused = probe(3, 5, **env).splitlines()
    assert seen == "4 no accelerator: emulating 4 CPU devices"
    for word in ("needs 5 devices", "sees 4", name, value):
        assert word in refused


def test_gpus_that_jax_does_not_see_are_a_loud_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr("jaxrl.sharding.mesh.DEV", tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    note = ensure_devices(1).note or ""
    for word in (
        "WARNING",
        "2 NVIDIA GPUs",
        "pip install 'jaxrl[cuda]'",
        "driver",
        "jaxrl devices",
    ):
        assert word in note
    for name, value in (("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", "")):  # as was asked for
        with monkeypatch.context() as asked:
            asked.setenv(name, value)
            assert "WARNING" not in (ensure_devices(1).note or "")


def test_asking_too_late_is_told() -> None:
    told = probe(3, late=True)
    for word in ("needs 3 devices", "sees 1", "before the mesh was known", "JAX_NUM_CPU_DEVICES=3"):
        assert word in told


def test_emulated_devices_share_the_host_memory() -> None:
    available = host_available()
    assert available > 0
    of_all = bytes_limit(jax.devices()[0])
    assert of_all == pytest.approx(available, rel=0.5)  # the machine is not idle
