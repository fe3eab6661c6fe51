"""Flags reach XLA before jax starts, beside those that somebody else gave."""

import os
import subprocess
import sys

import jax
import pytest
from runs import SHORT

from jaxrl import Config
from jaxrl.errors import UserError
from jaxrl.process.xla_flags import (
    DETERMINISTIC,
    PATIENT,
    exclude_nondeterministic,
    wait_for_slow_devices,
    worker_environment,
)

PROGRAM = """
import os, sys
from jax._src import xla_bridge
from jaxrl import Config
from jaxrl.run.attempt import prepare_run
assert not xla_bridge.backends_are_initialized()
prepare_run(Config.load(None, sys.argv[1:]))
assert xla_bridge.backends_are_initialized()
print(os.environ["XLA_FLAGS"])
"""


@pytest.mark.parametrize("asked", [True, False])
def test_a_run_of_threads_sets_the_flag_before_jax_starts(asked, tmp_path):
    keys = [*SHORT, f"run_dir={tmp_path}", f"deterministic={str(asked).lower()}"]
    command = [sys.executable, "-c", PROGRAM, *keys]
    env = os.environ | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    flags = [env["XLA_FLAGS"], *([DETERMINISTIC] if asked else []), PATIENT]
    assert done.stdout.splitlines()[-1:] == [" ".join(flags)], done.stderr


def test_after_jax_has_started_it_is_refused(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(UserError, match=f"XLA_FLAGS={DETERMINISTIC}"):
        exclude_nondeterministic()
    monkeypatch.setenv("XLA_FLAGS", DETERMINISTIC)
    exclude_nondeterministic()  # there already
    assert os.environ["XLA_FLAGS"] == DETERMINISTIC


def test_a_limit_that_somebody_set_is_kept(monkeypatch):
    theirs = PATIENT.partition("=")[0] + "=50"
    monkeypatch.setenv("XLA_FLAGS", theirs)
    wait_for_slow_devices()
    assert os.environ["XLA_FLAGS"] == theirs


def test_the_flags_of_a_worker_are_beside_those_of_its_host():
    assert worker_environment(True) == {"XLA_FLAGS": f"${{XLA_FLAGS}} {PATIENT} {DETERMINISTIC}"}
    plain = worker_environment(Config.load().deterministic)
    assert plain == {"XLA_FLAGS": f"${{XLA_FLAGS}} {PATIENT}"}
