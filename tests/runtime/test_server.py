"""A process of a pool beside those that it is joined with, without Ray."""

import os
import socket
import subprocess
import sys
import threading
import time

from jaxrl.runtime.role_server import CallRequest, WorkerServer
from jaxrl.runtime.worker import Later

PROGRAM = """
import sys
import jax
from jax._src.xla_bridge import CUDA_VISIBLE_DEVICES
from jaxrl.runtime.role_server import WorkerServer

rank, port = map(int, sys.argv[1:])
server = WorkerServer(f"actor.{rank}", rank, ".", (), lambda array: array)
server.join(f"127.0.0.1:{port}", 2, 2, 60.0)
info = server.info()
print(jax.process_index(), len(info.devices), jax.device_count(), CUDA_VISIBLE_DEVICES.value)
"""
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
"""What a worker inherits of a Ray that `srun` started; both have the task 0 of their node."""


def test_a_step_of_slurm_does_not_decide_who_has_which_devices() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_LOCAL_DEVICE_IDS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port)],
            env=os.environ | SLURM | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank, worker in enumerate(workers):
        output, errors = worker.communicate(timeout=120)
        # Of four devices two are its own, and all GPUs that it sees would be.
        assert output.split() == [str(rank), "2", "4", "0,1"], errors


class Streams:
    def __init__(self) -> None:
        self.over = False

    def generate(self) -> Later[str]:
        return Later(lambda: time.sleep(0.001), lambda: "made" if self.over else None)

    def sample(self) -> None:
        time.sleep(0.3)

    def end(self) -> None:
        self.over = True


def test_the_clock_of_a_call_that_goes_on_stands_while_another_one_runs() -> None:
    """What the driver hears of it, by which it finds calls that are late."""
    server, role, calls = WorkerServer("rollout", 0, ".", (), None), Streams(), []

    def call(*what: object) -> None:
        position = len(calls)
        request = CallRequest(position, position, "rollout", *what)
        calls.append(threading.Thread(target=server.run, args=(request,)))
        calls[-1].start()

    def ran(number: int) -> float:
        """Waits until a call has begun; returns for how long it has run."""
        while number not in (running := dict(server.answer().running)):
            time.sleep(0.001)
        return time.monotonic() - running[number]

    call("start", (lambda: role, False, None))
    call("generate", ())
    call("generate", ())
    ran(2)
    call("sample", ())
    while calls[3].is_alive():
        assert max(ran(1), ran(2)) < 0.3
        time.sleep(0.01)
    before = ran(1)
    time.sleep(0.05)
    assert ran(1) - before >= 0.05 and ran(2) < 0.05
    call("end", ())
    for thread in calls:
        thread.join(10)
    server.stop()
