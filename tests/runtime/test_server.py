"""A process of a pool beside those that it is joined with, without Ray."""

import os
import socket
import subprocess
import sys

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
