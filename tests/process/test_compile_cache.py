"""Programs whose collectives would lose their order on disk are compiled by each process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxrl.process.compile_cache import collectives_lose_order

PROGRAM = """
    import sys
    import jax, jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from jaxrl.sharding.mesh import role_mesh
    from jaxrl.sharding.axes import AXIS_NAMES, Axes

    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
    make = {"ours": lambda: role_mesh(jax.devices(), Axes(1, 2, 1)),
            "plain": lambda: jax.sharding.Mesh(
                np.asarray(jax.devices()).reshape(1, 2, 1, 1, 1), AXIS_NAMES)}
    mesh = make[sys.argv[1]]()

    def loop(x, w):
        def body(carry, layer):
            whole = jax.lax.all_gather(layer, "fsdp", tiled=True)
            return jnp.tanh(carry @ whole), None
        return jax.lax.scan(body, x, w)[0]

    def in_the_loop(x, w):
        return loop(x, w)

    def in_the_loop_and_outside(x, w):
        return loop(x, w) + jax.lax.all_gather(w[0], "fsdp", tiled=True).sum()

    x, w = jnp.ones((4, 8)), jnp.ones((3, 8, 8))
    for function in (in_the_loop, in_the_loop_and_outside):
        specs = dict(in_specs=(P("fsdp"), P(None, "fsdp")), out_specs=P("fsdp"))
        for name in (function.__name__, function.__name__ + "_again"):
            jitted = jax.jit(jax.shard_map(function, mesh=mesh, check_vma=False, **specs))
            before = len(hits)
            jitted.lower(x, w).compile()
            print(name, len(hits) - before)
"""


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("jit_in_the_loop*"))


def run(folder: Path, mesh: str) -> dict[str, str]:
    """Compiles the two programs twice in a process that keeps them in `folder`; name -> "1" where
    it was found.
    """
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), mesh]
    done = subprocess.run(command, env=env, check=True, timeout=300, stdout=subprocess.PIPE)
    return dict(line.split() for line in done.stdout.decode().splitlines())


def test_only_programs_that_keep_the_order_of_their_collectives_are_stored(tmp_path):
    assert run(tmp_path, "ours") == {
        "in_the_loop": "0",
        "in_the_loop_again": "1",
        "in_the_loop_and_outside": "0",
        "in_the_loop_and_outside_again": "1",  # from the memory of the process that compiled it
    }
    names = {name.split("-")[0] for name in stored(tmp_path)}
    assert names == {"jit_in_the_loop"}


def test_what_others_stored_is_not_read_either(tmp_path):
    run(tmp_path, "plain")
    names = {name.split("-")[0] for name in stored(tmp_path)}
    assert names == {"jit_in_the_loop", "jit_in_the_loop_and_outside"}  # jax itself keeps both
    found = run(tmp_path, "ours")
    assert (found["in_the_loop"], found["in_the_loop_and_outside"]) == ("1", "0")


@pytest.mark.parametrize(
    ("hlo", "loses"),
    [
        (
            "ENTRY %main (a: f32[2]) -> f32[4] {\n  %g = f32[4] all-gather(%a), channel_id=1\n}",
            False,
        ),
        (
            "%body (a: f32[2]) -> f32[4] {\n  %g = f32[4] all-gather(%a), channel_id=1\n}\n"
            "ENTRY %main (a: f32[2]) -> f32[4] {\n  %w = f32[4] while(%a), body=%body\n}",
            False,
        ),
        (
            "%body (a: f32[2]) -> f32[4] {\n  %g = f32[4] all-gather-start(%a), channel_id=1\n}\n"
            "ENTRY %main (a: f32[2]) -> f32[4] {\n  %r = f32[2] all-reduce(%a), to_apply=%add\n}",
            True,
        ),
    ],
    ids=["one computation", "in a loop only", "in a loop and outside"],
)
def test_order_is_lost_between_computations(hlo: str, loses: bool) -> None:
    assert collectives_lose_order(hlo) is loses
