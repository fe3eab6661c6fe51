"""The registry of runs and `python -m jaxrl.devices`: true owners, no leftovers, no GPU touched."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrl import devices
from jaxrl.config import cli
from jaxrl.devices import GpuProcess, LocalDevice, LocalHost
from jaxrl.runtime import registry
from jaxrl.runtime.cluster import Cluster, Resource
from jaxrl.runtime.cluster import Host as Node
from jaxrl.runtime.registry import Member, Run, registered, running
from jaxrl.runtime.worker import WorkerState

HERE = socket.gethostname()
GIB = 1 << 30
GPUS = tuple(
    LocalDevice(f"gpu:{i}", "NVIDIA H200", f"GPU-{i}{i}aa", 4 * GIB * (i == 3), 140 * GIB)
    for i in range(4)
)
SMI = """\
#!/bin/sh
case "$1" in
--query-gpu=index,uuid,name,memory.used,memory.total)
    echo "0, GPU-00aa, NVIDIA H200, 61440, 143771"
    echo "1, GPU-11aa, NVIDIA H200, 4, 143771"
    echo "2, GPU-22aa, NVIDIA H200, [N/A], [N/A]";;
--query-compute-apps=pid,gpu_uuid,used_memory)
    echo "{pid}, GPU-00aa, 61000";;
*) exit 9;;
esac
"""


def state(name: str, *gpus: str, pid: int | None = None, host: str = HERE) -> WorkerState:
    pid = os.getpid() if pid is None else pid
    return WorkerState(name, host, pid, tuple(name.split("+")), gpus, "idle", "", 0.0, 0.0, 0)


def run_of(*workers: WorkerState, pid: int = 1000, visible: str | None = None) -> Run:
    members = tuple(Member(w.name, w.host, w.pid, w.roles, w.devices) for w in workers)
    return Run("/runs/a", "python -m jaxrl.train", HERE, pid, "", "2025-01-01", visible, members)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where runs are written and looked for."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(registry, "_homes", lambda: [tmp_path])
    for name in ("RAY_ADDRESS", *devices.SETTINGS):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def folder(home: Path) -> Path:
    return home / f"jaxrl-{os.getuid()}"


# The registry.


def test_a_run_is_listed_while_it_works_and_follows_its_workers(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with registered("runs/a", [state("actor+rollout", "gpu:0")]) as registration:
        (run,) = running()
        assert (run.pid, run.host, run.visible) == (os.getpid(), HERE, "2,3")
        assert run.run_dir == str(Path("runs/a").absolute()) and "python" in run.command
        member = Member("actor+rollout", HERE, os.getpid(), ("actor", "rollout"), ("gpu:0",))
        assert run.workers == (member,)
        registration.update([state("actor", pid=7, host="other"), state("teacher", pid=8)])
        assert [(w.name, w.host, w.pid) for w in running()[0].workers] == [
            ("actor", "other", 7),
            ("teacher", HERE, 8),
        ]
        assert [path.name for path in folder(home).iterdir()] == [f"{os.getpid()}.json"]
    assert running() == [] and list(folder(home).iterdir()) == []


def test_the_folder_is_nobody_else_s_to_read(home: Path) -> None:
    folder(home).mkdir(mode=0o777)
    folder(home).chmod(0o777)
    with registered("runs/a", []):
        assert stat.S_IMODE(folder(home).stat().st_mode) == 0o700


def test_a_folder_of_another_is_not_used_and_the_run_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    folder(home).mkdir()
    told: list[str] = []
    with registered("runs/a", [], told.append) as registration:
        registration.update([state("actor")])
    assert len(told) == 1 and str(folder(home)) in told[0] and "XDG_RUNTIME_DIR" in told[0]
    assert list(folder(home).iterdir()) == []
    told.clear()
    assert running(told.append) == [] and len(told) == 1 and str(folder(home)) in told[0]


@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_in_the_folder_s_place_is_not_followed(home: Path, dangling: bool) -> None:
    elsewhere = home / "elsewhere"
    if not dangling:
        elsewhere.mkdir()
    folder(home).symlink_to(elsewhere)
    told: list[str] = []
    with registered("runs/a", [], told.append):
        assert len(told) == 1
    assert dangling or list(elsewhere.iterdir()) == []


def test_a_killed_run_is_dropped_and_its_file_removed(home: Path) -> None:
    program = """
        import time
        from jaxrl.runtime.registry import registered
        with registered("runs/killed", []):
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    end = time.monotonic() + 30
    path = folder(home) / f"{process.pid}.json"
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert [run.pid for run in running()] == [process.pid]
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
    assert running() == [] and not path.exists()
    process.wait()


def test_a_pid_that_another_process_has_now_is_no_run(home: Path) -> None:
    with registered("runs/a", []):
        path = folder(home) / f"{os.getpid()}.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | {"born": str(int(fields["born"]) - 1)}))
        assert running() == [] and not path.exists()


def test_runs_of_other_hosts_and_other_versions_are_left_alone(home: Path) -> None:
    with registered("runs/a", []):
        path = folder(home) / f"{os.getpid()}.json"
        fields = json.loads(path.read_text())
        other = folder(home) / "1.json"
        other.write_text(json.dumps(fields | {"host": HERE + "x", "born": "1"}))
        strange = folder(home) / "2.json"
        strange.write_text('{"run": 1}')
        assert [run.pid for run in running()] == [os.getpid()]
        assert other.exists() and strange.exists()


def test_the_name_of_a_program_does_not_confuse_its_birth() -> None:
    """/proc/PID/stat has it in parentheses, between the pid and the state."""
    program = "import time; open('/proc/self/comm', 'w').write('a) Z 1 (b'); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        while "a) Z" not in Path(f"/proc/{process.pid}/comm").read_text():
            time.sleep(0.02)
        ticks = os.sysconf("SC_CLK_TCK")
        up = float(Path("/proc/uptime").read_text().split()[0])
        born = registry._born(process.pid)
        assert born is not None and 0 <= up - int(born) / ticks < 60
    finally:
        process.kill()
        process.wait()


def test_a_run_without_xdg_runtime_dir_is_found_by_a_shell_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, temporary = tmp_path / "session", tmp_path / "temporary"
    session.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(registry.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with registered("runs/cron", []):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
        assert str(Path("runs/cron").absolute()) in [run.run_dir for run in running()]


# Devices and their owners.


def test_what_nvidia_smi_says_is_read() -> None:
    (first, second) = devices.parse_gpus(
        "0, GPU-00aa, NVIDIA H200, 61440, 143771\n1, GPU-11aa, NVIDIA H200 MIG, [N/A], [N/A]\n"
    )
    assert first == LocalDevice("gpu:0", "NVIDIA H200", "GPU-00aa", 60 * GIB, 143771 << 20)
    assert second == LocalDevice("gpu:1", "NVIDIA H200 MIG", "GPU-11aa", None, None)
    assert devices.parse_processes("17, GPU-00aa, 1024\n18, GPU-00aa, [N/A]\n") == (
        GpuProcess(17, "GPU-00aa", GIB),
        GpuProcess(18, "GPU-00aa", None),
    )
    assert devices.parse_processes("") == ()


@pytest.mark.parametrize(
    ("name", "visible", "found"),
    [
        ("gpu:1", None, "gpu:1"),
        ("gpu:1", "2,3", "gpu:3"),
        ("gpu:0", " 2 , 3", "gpu:2"),
        ("gpu:0", "GPU-33", "gpu:3"),
        ("gpu:1", "GPU-33aa,GPU-00aa", "gpu:0"),
        ("gpu:0", "GPU-99", "gpu:0"),
        ("gpu:5", "2,3", "gpu:5"),
        ("cpu:1", "2,3", "cpu:1"),
    ],
)
def test_a_device_is_named_as_its_host_counts_it(
    name: str, visible: str | None, found: str
) -> None:
    assert devices.physical(name, visible, GPUS) == found


def test_every_gpu_has_its_owner_and_the_rest_is_free() -> None:
    """The run counts from CUDA_VISIBLE_DEVICES; its worker in another process tells its own."""
    run = run_of(
        state("actor", "gpu:0", pid=1000), state("teacher", "gpu:0", pid=1001), visible="1"
    )
    uses = (GpuProcess(1000, "GPU-11aa", GIB), GpuProcess(os.getpid(), "GPU-22aa", 3 * GIB))
    host = LocalHost(
        (*GPUS, LocalDevice("gpu:4", "NVIDIA H200", "GPU-44aa", 90 * GIB, 140 * GIB)), uses, ()
    )
    told = [devices.users(device, host, [run]) for device in host.devices]
    assert told[0] == ["a: teacher (pid 1001)"]
    assert told[1] == ["a: actor (pid 1000)"]
    assert len(told[2]) == 1 and told[2][0].startswith(f"pid {os.getpid()}: ")
    assert "python" in told[2][0] and told[2][0].endswith("(3.2 GB)")
    assert told[3] == []  # 4 of 140 GiB: what a driver keeps
    assert told[4] == ["a process that cannot be seen from here"]
    page = devices.host_page(host, [run])
    assert page[-1] == "free: 1 of 5: gpu:3"


def test_workers_on_another_host_have_no_device_of_this_one() -> None:
    run = run_of(state("teacher", "gpu:0", pid=9, host=HERE + "x"))
    assert devices.users(GPUS[0], LocalHost(GPUS, (), ()), [run]) == []


def test_settings_that_matter_are_said_and_others_are_not() -> None:
    told = devices.settings(
        [
            ("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=8 --b"),
            ("CUDA_VISIBLE_DEVICES", ""),
            ("HOME", "/root"),
        ]
    )
    assert [line.split(": ")[0] for line in told] == [
        "CUDA_VISIBLE_DEVICES=",
        "XLA_FLAGS=--xla_force_host_platform_device_count=8",
    ]
    assert devices.settings([("XLA_FLAGS", "--a=1")]) == []


# The command.


def fake_smi(home: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program = home / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_the_command_tells_devices_runs_and_what_is_free(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_jax(notify: object) -> None:
        raise AssertionError("a GPU backend was started")

    monkeypatch.setattr(devices, "jax_devices", no_jax)
    fake_smi(home, monkeypatch, SMI.format(pid=os.getpid()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with registered("runs/qwen", [state("actor+rollout", "gpu:0")]):
        assert cli.run(devices.main, []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"host {HERE}: ")
    assert any(line.startswith("CUDA_VISIBLE_DEVICES=0,1: ") for line in lines)
    (owned,) = [line for line in lines if "NVIDIA" in line and "gpu:0" in line]
    assert "64.4 of 150.8 GB" in owned and f"qwen: actor+rollout (pid {os.getpid()})" in owned
    (unsure,) = [line for line in lines if "NVIDIA" in line and "gpu:2" in line]
    assert "not told" in unsure
    assert "free: 2 of 3: gpu:1, gpu:2" in lines
    (head,) = [line for line in lines if line.startswith("run ")]
    assert head.startswith(f"run {Path('runs/qwen').absolute()}: pid {os.getpid()} since ")
    words = ["actor+rollout", "actor,", "rollout", f"{HERE}:{os.getpid()}", "gpu:0"]
    assert words in [line.split() for line in lines]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho no driver here\nexit 9\n", "nvidia-smi failed: no driver here"),
        ("#!/bin/sh\nexec sleep 60\n", "nvidia-smi has not answered for 0.2 s"),
    ],
)
def test_nvidia_smi_that_fails_or_hangs_is_said(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: str,
) -> None:
    monkeypatch.setattr(devices, "SMI_S", 0.2)
    monkeypatch.setattr(devices, "jax_devices", lambda notify: ())
    fake_smi(home, monkeypatch, text)
    assert cli.run(devices.main, []) == 0
    out = capsys.readouterr().out
    assert words in out and "no run of this user works here" in out


def test_without_an_accelerator_cpu_devices_are_made_by_each_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert cli.run(devices.main, []) == 0
    assert "each run emulates the CPU devices that its mesh needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--address", "nonsense"], {}, "'nonsense' is no address"),
        (["--address=a b:1"], {}, "HOST:PORT"),
        ([], {"RAY_ADDRESS": "head"}, "RAY_ADDRESS"),
        (["--adress", "a:1"], {}, "did you mean --address?"),
        (["runs/a"], {}, "runs/a"),
    ],
)
def test_bad_input_is_a_few_lines_and_exit_code_2(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: Sequence[str],
    environ: dict[str, str],
    words: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.run(devices.main, argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and words in err and len(err.splitlines()) <= 3


def test_without_ray_an_address_is_refused_with_the_way_out(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert cli.run(devices.main, ["--address", "head:6379"]) == 2
    assert "pip install 'jaxrl[ray]'" in capsys.readouterr().err


def test_the_page_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    has: dict[Resource, int] = {"CPU": 16, "GPU": 8, "TPU": 0, "memory": 64 * 10**9}
    free: dict[Resource, int] = {"CPU": 4, "GPU": 2, "TPU": 0, "memory": 32 * 10**9}
    nodes = [Node("id", "head", "10.0.0.1", has, free)]
    worker = state("teacher", "gpu:4", "gpu:5", pid=77, host="head")
    devices.show(devices.cluster_page(Cluster("10.0.0.1:6379", nodes, [worker])))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["cluster", "10.0.0.1:6379"] in lines
    memory = ["32.0", "of", "64.0", "GB"]
    assert ["head", "10.0.0.1", "4", "of", "16", "2", "of", "8", *memory] in lines
    assert ["teacher", "teacher", "head:77", "gpu:4,", "gpu:5", "idle"] in lines
    devices.show(devices.cluster_page(Cluster("10.0.0.1:6379", nodes, [])))
    printed = capsys.readouterr().out
    assert "no worker of jaxrl on it" in printed and "TPU" not in printed
    nodes = [replace(nodes[0], has={**has, "TPU": 8}, free={**free, "TPU": 4})]
    devices.show(devices.cluster_page(Cluster("h:1", nodes, [])))
    printed = capsys.readouterr().out
    assert "GPUs free   TPUs free   memory free" in printed and "4 of 8      32.0 of" in printed
