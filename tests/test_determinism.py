"""`deterministic`: the flag reaches XLA before jax starts, or the run says that it cannot."""

import os
import subprocess
import sys

import jax
import pytest
from test_train import SHORT

from jaxrl import Config
from jaxrl.determinism import FLAG, exclude_nondeterministic, worker_environment
from jaxrl.errors import UserError

PROGRAM = """
import os, sys
from jax._src import xla_bridge
from jaxrl import Config
from jaxrl.train import prepare_run
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
    expected = env["XLA_FLAGS"] + (f" {FLAG}" if asked else "")
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr


def test_after_jax_has_started_it_is_refused(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(UserError, match=f"XLA_FLAGS={FLAG}"):
        exclude_nondeterministic()
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    exclude_nondeterministic()  # there already
    assert os.environ["XLA_FLAGS"] == FLAG


def test_the_flags_of_a_worker_are_beside_those_of_its_host():
    assert worker_environment(True) == {"XLA_FLAGS": "${XLA_FLAGS} " + FLAG}
    assert worker_environment(Config.load().deterministic) == {}
