"""Workers of Ray that cannot start, and virtual environments at paths that a shell takes apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from cases import and_slow, needs_ray

needs_ray()

import ray  # noqa: E402
import ray_roles  # noqa: E402

from jaxrl.config.settings import RayConfig  # noqa: E402
from jaxrl.errors import RunError  # noqa: E402
from jaxrl.runtime.ray import local_cluster  # noqa: E402
from jaxrl.runtime.ray import worker_group as group_module  # noqa: E402
from jaxrl.runtime.ray.connect import join  # noqa: E402
from jaxrl.runtime.ray.worker_group import RayWorkerGroup  # noqa: E402
from jaxrl.runtime.worker import RunLost  # noqa: E402
from jaxrl.sharding.placement import parse  # noqa: E402

pytestmark = pytest.mark.ray

SUPPORT = str(Path(__file__).parent.parent / "support")
TREE = str(Path(__file__).parent.parent.parent)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    here = os.pathsep.join([SUPPORT, os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONPATH"] = here.rstrip(os.pathsep)  # the workers make these roles
    join(None, 8)
    yield
    local_cluster.leave()


CANNOT_RUN = {
    "a library that cannot be loaded": """
        raise ImportError("libcublas.so.12: cannot open shared object file")
    """,
    "no memory": """
        raise MemoryError("no room for the interpreter")
    """,
    "killed": """
        import os, signal, sys
        sys.stderr.write("the system ends me\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """,
}


@pytest.mark.parametrize("why", and_slow(["killed"], sorted({*CANNOT_RUN} - {"killed"})))
def test_a_process_that_ends_before_ray_knows_it_is_told_with_its_log(tmp_path, why):
    """Ray waits for it without end, a minute for each of its own tries."""
    ends = textwrap.dedent(CANNOT_RUN[why]).strip()
    code = "import os, sys, traceback\ntry:\n" + textwrap.indent(ends, "    ")
    code += "\nexcept BaseException:\n    traceback.print_exc()"
    code += "\n    sys.stderr.flush()\n    os._exit(1)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    worker_group = RayWorkerGroup(
        RayConfig(),
        parse("actor=1"),
        partial(ray_roles.make, str(tmp_path)),
        lambda text: None,
        startup_s=300,
        roles=("actor",),
        environment={"PYTHONPATH": str(tmp_path)},
    )
    begun = time.monotonic()
    try:
        with pytest.raises(RunError) as told:
            worker_group.start()
    finally:
        worker_group.stop()
    assert not isinstance(told.value, RunLost)  # which would be tried again
    words = {"killed": "the system ends me"}.get(why, ends.partition('"')[2].partition('"')[0])
    assert "ended before it registered with Ray" in str(told.value) and words in str(told.value)
    assert time.monotonic() - begun < 60


CALL = """
import sys, threading
from functools import partial
import ray_roles
from jaxrl.config.settings import RayConfig
from jaxrl.runtime.ray import local_cluster
from jaxrl.runtime.ray.connect import join

join(None, 1)
import ray
from jaxrl.runtime.ray.worker_group import RayWorkerGroup
from jaxrl.sharding.placement import parse

make = partial(ray_roles.make, sys.argv[1])
group = RayWorkerGroup(
    RayConfig(), parse("actor=1"), make, print, startup_s=100, roles=("actor",)
)
group.start()
[worker] = group.states()
print("started", worker.pid, flush=True)
sys.stdin.readline()
group.stop()
local_cluster.LEAVE_S, ray.shutdown = 0.5, threading.Event().wait  # Ray does not leave in time
local_cluster.leave()
sys.exit(7)
"""


@pytest.mark.parametrize("name", and_slow(["it's $HOME & more"], ["two words"]))
def test_workers_start_from_a_virtual_environment_at_any_path(tmp_path, name):
    """Ray takes the path of the interpreter apart as a shell does.

    And two laws more of a cluster of another process: it outlives the signals that ask a run to
    end, for whoever ends a run signals all of its processes, and the driver needs the others to
    save; and where Ray does not leave in time the driver ends with its code all the same."""
    home = tmp_path / name / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [packages] = home.glob("lib/python3*/site-packages")
    folders = [path for path in sys.path if path.endswith("-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in folders]
    (packages / "all.pth").write_text("\n".join([*lines, TREE]))
    script = tmp_path / name / "call.py"
    script.write_text(CALL)
    begun = time.monotonic()
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    log = tmp_path / "stderr.txt"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [home / "bin" / "python", script, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=tmp_path / name,
            env=os.environ | {"PYTHONPATH": SUPPORT},
        ) as driver,
    ):
        line = next((line for line in driver.stdout if line.startswith("started ")), "")
        assert line, log.read_text()[-3000:]
        assert time.monotonic() - begun < 60
        others = psutil.Process(driver.pid).children(recursive=True)
        assert {"gcs_server", "raylet"} <= {process.name() for process in others}
        for process in others:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                process.send_signal(number)
        _, alive = psutil.wait_procs(others, timeout=2)
        assert len(alive) == len(others)
        begun = time.monotonic()
        driver.communicate("\n", timeout=60)
        assert driver.returncode == 7 and time.monotonic() - begun < 30
        _, alive = psutil.wait_procs(others, timeout=10)
        assert not alive
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= mine


def test_the_end_of_a_run_waits_for_ray_no_longer_than_it_may(tmp_path, monkeypatch):
    """A daemon that is ended while the workers are stopped is still there when that begins."""
    make = partial(ray_roles.make, str(tmp_path))
    worker_group = RayWorkerGroup(
        RayConfig(), parse("actor=1"), make, lambda text: None, startup_s=60, roles=("actor",)
    )
    worker_group.start()
    daemons = [psutil.Process(process.pid) for process in local_cluster.daemons().values()]
    [worker] = [psutil.Process(state.pid) for state in worker_group.states()]
    over = threading.Event()
    monkeypatch.setattr(group_module, "kill", lambda pools: over.wait(120))
    monkeypatch.setattr(group_module, "END_S", 1.0)
    begun = time.monotonic()
    worker_group.stop()
    assert time.monotonic() - begun < 30 and not ray.is_initialized()
    over.set()
    for thread in threading.enumerate():
        if thread.name == "bounded:_end":
            thread.join(60)
    assert not ray.is_initialized()  # Ray starts a cluster for whoever calls it without one
    _, alive = psutil.wait_procs([worker, *daemons], timeout=10)
    assert not alive
