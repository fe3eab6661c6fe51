"""Freed memory is used again without a page fault; in a process of its own, for it stays so."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from jaxrl.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = np.empty(200_000_000, np.uint8)
    block[::4096] = 1
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    assert keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize("how", ["keep", "leave"])
def test_freed_memory_is_used_again(how):
    program = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    told = int(done.stdout)
    assert told < 10 if how == "keep" else told >= 95  # huge pages: 95 of them hold the block
