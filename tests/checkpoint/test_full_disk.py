"""A disk that refuses a save: its error is raised once, and nothing else is printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cases import and_slow

SAVE = """
import resource, sys, threading, time
from pathlib import Path
import jax.numpy as jnp
from jaxrl.checkpoint.writer import save_arrays
from orbax.checkpoint import v1

def tree(start):
    return {f"w{i}": jnp.full((64, 64), start + i) for i in range(40)}

most = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
saving = save_arrays(Path(sys.argv[1]) / "actor", {"a": tree(0), "b": tree(50), "c": {"d": 1}})
try:
    saving.wait()
    raise SystemExit("nothing was refused")
except (ValueError, OSError) as error:
    assert str(error), error
end = time.monotonic() + 2
while time.monotonic() < end:
    time.sleep(0.05)
class Bad:
    def __del__(self):
        raise RuntimeError("another error")
Bad()
"""


@pytest.mark.parametrize("most", and_slow([2000], [100]))
def test_a_save_that_the_disk_refuses_prints_nothing_of_its_own(tmp_path: Path, most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path), str(most)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Event loop is closed" not in done.stderr
    assert done.stderr.count("Traceback") == 1 and "another error" in done.stderr
