"""scripts/ray.sbatch with stand-ins for SLURM, Ray and Python: who starts where, how it ends."""

import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "ray.sbatch"
STANDINS = {
    "scontrol": 'printf "one\\ntwo\\n"',
    # Runs the command, which begins after the options, as on that host.
    "srun": """
for word; do case $word in --nodelist=*) HOST=${word#*=};; esac; done
while [[ $1 == --* ]]; do shift; done
export HOST; exec "$@" """,
    "hostname": "case $HOST in one) echo 127.0.0.1;; two) echo 127.0.0.2;; esac",
    "ray": """
echo "$HOST: ray $*" >> log
[[ $2 != --head ]] || exec REAL -c "
import socket, time
server = socket.create_server(('127.0.0.1', $RAY_PORT))
time.sleep(60)"
exec sleep 60""",
    "python": """
if [[ $1 == - ]]; then
    cat > /dev/null
    until [[ $(grep -c "ray start" log) == "$3" ]]; do sleep 0.05; done
    echo "joined $2: $3" >> log
    exit
fi
[[ $2 != jaxrl.devices ]] || exit 0
echo "train: $*; token of ${#RAY_AUTH_TOKEN}" >> log
trap 'echo saved >> log; exit 130' TERM
[[ -v ENDS_WITH ]] && exit "$ENDS_WITH"
echo started >> log
while true; do sleep 0.1; done""",
}


@pytest.fixture
def job(tmp_path):
    """Starts the script in a folder of its own."""
    for name, text in STANDINS.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/bash\n{text.replace('REAL', shlex.quote(sys.executable))}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "RAY_PORT": str(port)}
    env |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "64"}
    started = []

    def start(**more):
        command = ["bash", str(SCRIPT), "--config", "run.yaml", "steps=5"]
        process = subprocess.Popen(command, cwd=tmp_path, env=env | more, start_new_session=True)
        started.append(process)
        return process, port

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def still_there(process):
    """Processes that an ended script has left."""
    found = []
    for other in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(other.pid) == process.pid and other.pid != process.pid:
                found.append(other)
    return found


def test_ray_runs_on_every_host_for_as_long_as_the_run(job, tmp_path):
    process, port = job(ENDS_WITH="7")
    assert process.wait(60) == 7
    log = (tmp_path / "log").read_text().splitlines()
    head, second = sorted(line for line in log if ": ray start" in line)
    common = "--block --min-worker-port=10002 --max-worker-port=19999"
    at = f"127.0.0.1:{port}"
    only_head = f"--head --port={port} --include-dashboard=false"
    assert head == f"one: ray start {only_head} --node-ip-address=127.0.0.1 {common}"
    assert second == f"two: ray start --address={at} --node-ip-address=127.0.0.2 {common}"
    assert f"joined {at}: 2" in log
    asked = f"-m jaxrl.train ray.address={at} --config run.yaml steps=5"
    assert f"train: {asked}; token of 64" in log
    end = time.monotonic() + 10
    while still_there(process) and time.monotonic() < end:
        time.sleep(0.1)
    assert not still_there(process)


def test_the_signal_before_the_end_of_the_job_lets_the_run_save(job, tmp_path):
    process, _ = job()
    end = time.monotonic() + 60
    log = tmp_path / "log"
    while not log.exists() or "started" not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert log.read_text().splitlines()[-1] == "saved"
