"""Who decides how much of a GPU jax takes: the user, under either name, and else jaxrl."""

import os
import subprocess
import sys

import pytest
from cases import and_slow
from jax._src import xla_bridge

from jaxrl.errors import UserError
from jaxrl.process.gpu_memory import (
    JAX_SHARE,
    OLD_NAME,
    SHARE,
    VARIABLE,
    given_share,
    gpu_share,
    take_share,
    taken_share,
    worker_share,
)

PROGRAM = """
from jaxlib import xla_client
from jaxrl.sharding.mesh import ensure_devices
ensure_devices(1)
print(xla_client.generate_pjrt_gpu_plugin_options().get("memory_fraction"))
"""


@pytest.fixture(autouse=True)
def before_jax(monkeypatch):
    """As in a process that has not asked jax for anything."""
    for name in (VARIABLE, OLD_NAME):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)


@pytest.mark.parametrize(
    ("given", "share"),
    and_slow(
        [
            ({}, SHARE),
            ({VARIABLE: "0.5", OLD_NAME: "0.4"}, 0.5),  # jax itself refuses both
        ],
        [({VARIABLE: "0.5"}, 0.5), ({OLD_NAME: ".4"}, 0.4)],
    ),
)
def test_jax_takes_what_the_user_set_and_else_what_the_plan_counts_with(given, share):
    env = {k: v for k, v in os.environ.items() if k not in (VARIABLE, OLD_NAME)}
    env |= given | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [str(share)], done.stderr


def test_what_is_set_is_what_is_planned(monkeypatch):
    assert given_share() is None and worker_share() == {}
    assert gpu_share() == SHARE
    take_share()
    assert os.environ[VARIABLE] == str(SHARE)
    assert taken_share() == gpu_share() == SHARE
    monkeypatch.setenv(VARIABLE, "")  # as a worker gets the name that the user did not take
    monkeypatch.setenv(OLD_NAME, "0.6")
    take_share()
    assert os.environ[VARIABLE] == "" and taken_share() == gpu_share() == 0.6
    assert worker_share() == {VARIABLE: "0.6", OLD_NAME: ""}


def test_once_jax_runs_it_has_what_it_took(monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    take_share()
    assert VARIABLE not in os.environ
    assert taken_share() == JAX_SHARE


@pytest.mark.parametrize("text", ["most", "0", "-0.5", "nan", "inf"])
@pytest.mark.parametrize("name", [VARIABLE, OLD_NAME])
def test_what_is_no_share_is_refused(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=f"{name}='{text}' must be a share"):
        take_share()
