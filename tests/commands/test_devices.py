"""`python -m jaxrl.devices`: who uses which device, and no GPU touched."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from jaxrl import devices
from jaxrl.config import cli
from jaxrl.devices import LocalDevice
from jaxrl.runtime.cluster import Cluster, Host, Resource
from jaxrl.runtime.worker import WorkerState

HERE = socket.gethostname()
GIB = 1 << 30
SMI = """\
#!/bin/sh
case "$1" in
--query-gpu=index,uuid,name,memory.used,memory.total)
    echo "0, GPU-00aa, NVIDIA H200, 61440, 143771"
    echo "1, GPU-11aa, NVIDIA H200, 4096, 143771"
    echo "2, GPU-22aa, NVIDIA H200 MIG, [N/A], [N/A]"
    echo "3, GPU-33aa, NVIDIA H200, 92160, 143771";;
--query-compute-apps=pid,gpu_uuid,used_memory)
    echo "{pid}, GPU-00aa, 61440"
    echo "1, GPU-22aa, [N/A]";;
--query-gpu=driver_version) echo 570.86.15; echo 570.86.15;;
*) exit 9;;
esac
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", *devices.SETTINGS):
        monkeypatch.delenv(name, raising=False)


def fake_smi(home: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program = home / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_every_gpu_has_its_users_and_the_rest_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, monkeypatch, SMI.format(pid=os.getpid()))
    used, idle, unsure, hidden = devices.local_devices(lambda note: None)
    assert used.name == "gpu:0" and (used.used, used.limit) == (60 * GIB, 143771 << 20)
    assert len(used.users) == 1 and used.users[0].startswith(f"pid {os.getpid()}: ")
    assert "python" in used.users[0] and used.users[0].endswith("(64.4 GB)")
    assert idle == LocalDevice("gpu:1", "NVIDIA H200", 4 * GIB, 143771 << 20)  # a driver keeps some
    assert (unsure.kind, unsure.used, unsure.limit) == ("NVIDIA H200 MIG", None, None)
    assert len(unsure.users) == 1 and "pid 1: " in unsure.users[0]
    assert hidden.users == ("a process that cannot be seen from here",)
    assert devices.host_page([used, idle, unsure, hidden])[-1] == "free: 1 of 4: gpu:1"


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        ("ray::jaxrl:teacher.score", True),
        ("python -m jaxrl.train --mesh actor=1", True),
        ("python -m jaxrl train", True),
        ("python3 /venv/bin/jaxrl train", True),
        ("python -m jaxrl.devices", False),
        ("/venv/bin/python /venv/bin/jaxrl devices", False),
        ("python /home/me/jaxrl/run.py", False),
        ("vim jaxrl", False),
        ("", False),
    ],
)
def test_commands_of_jaxrl_are_told_from_others(command: str, listed: bool) -> None:
    assert devices.is_jaxrl(command.split()) == listed


def test_the_processes_of_jaxrl_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["ray::jaxrl:rollout", "60"], executable="sleep") as process:
        title = Path(f"/proc/{process.pid}/cmdline")
        while not title.read_bytes().startswith(b"ray::jaxrl:"):  # set a moment after it began
            time.sleep(0.01)
        print("\n".join(devices.process_page()))
        process.kill()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (line,) = [line for line in lines if line[:1] == [str(process.pid)]]
    assert line[-2:] == ["ray::jaxrl:rollout", "60"]


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


def test_the_command_tells_devices_processes_and_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_jax(notify: object) -> None:
        raise AssertionError("a GPU backend was started")

    monkeypatch.setattr(devices, "jax_devices", no_jax)
    fake_smi(tmp_path, monkeypatch, SMI.format(pid=os.getpid()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert cli.run(devices.main, []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"host {HERE}: ")
    assert lines[1].startswith(f"jax {version('jax')}, jaxlib {version('jaxlib')}")
    assert lines[1].endswith(", NVIDIA driver 570.86.15")
    assert any(line.startswith("CUDA_VISIBLE_DEVICES=0,1: ") for line in lines)
    (owned,) = [line for line in lines if "NVIDIA" in line and "gpu:0" in line]
    assert "64.4 of 150.8 GB" in owned and f"pid {os.getpid()}: " in owned
    (unsure,) = [line for line in lines if "NVIDIA" in line and "gpu:2" in line]
    assert "unknown" in unsure
    assert "free: 1 of 4: gpu:1" in lines
    assert any("jaxrl" in line or line.startswith("  process") for line in lines[lines.index("") :])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho no driver here\nexit 9\n", "nvidia-smi failed: no driver here"),
        ("#!/bin/sh\nexec sleep 60\n", "nvidia-smi has not answered for 0.2 s"),
    ],
)
def test_nvidia_smi_that_fails_or_hangs_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: str,
) -> None:
    monkeypatch.setattr(devices, "SMI_S", 0.2)
    monkeypatch.setattr(devices, "jax_devices", lambda notify: [])
    fake_smi(tmp_path, monkeypatch, text)
    assert cli.run(devices.main, []) == 0
    out = capsys.readouterr().out
    assert words in out


def test_without_an_accelerator_cpu_devices_are_made_by_each_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert cli.run(devices.main, []) == 0
    assert "each run emulates the CPU devices that its mesh needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--address", "nonsense"], {}, "'nonsense' is not the address"),
        (["--address=a b:1"], {}, "HOST:PORT"),
        ([], {"RAY_ADDRESS": "head"}, "RAY_ADDRESS"),
        (["--adress", "a:1"], {}, "did you mean --address?"),
        (["runs/a"], {}, "runs/a"),
    ],
)
def test_bad_input_is_a_few_lines_and_exit_code_2(
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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.startswith("jaxrl.runtime.ray")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.run(devices.main, ["--address", "head:6379"]) == 2
    assert "pip install 'jaxrl[ray]'" in capsys.readouterr().err


def test_the_page_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    has: dict[Resource, int] = {"CPU": 16, "GPU": 8, "TPU": 0, "memory": 64 * 10**9}
    free: dict[Resource, int] = {"CPU": 4, "GPU": 2, "TPU": 0, "memory": 32 * 10**9}
    nodes = [Host("id", "head", "10.0.0.1", has, free)]
    roles, chips = ("teacher",), ("gpu:4", "gpu:5")
    worker = WorkerState("teacher", "head", 77, roles, chips, "idle", "", 0.0, 0.0, 0)
    print("\n".join(devices.cluster_page(Cluster("10.0.0.1:6379", nodes, [worker]))))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["cluster", "10.0.0.1:6379"] in lines
    memory = ["32.0", "of", "64.0", "GB"]
    assert ["head", "10.0.0.1", "4", "of", "16", "2", "of", "8", *memory] in lines
    assert ["teacher", "teacher", "head:77", "gpu:4,", "gpu:5", "idle"] in lines
    print("\n".join(devices.cluster_page(Cluster("10.0.0.1:6379", nodes, []))))
    printed = capsys.readouterr().out
    assert "no jaxrl workers" in printed and "TPU" not in printed
    nodes = [replace(nodes[0], has={**has, "TPU": 8}, free={**free, "TPU": 4})]
    print("\n".join(devices.cluster_page(Cluster("h:1", nodes, []))))
    printed = capsys.readouterr().out
    assert "GPUs free   TPUs free   memory free" in printed and "4 of 8      32.0 of" in printed


def test_a_cluster_that_does_not_answer_hides_nothing_of_this_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli.run(devices.main, ["--address", address]) == 2
    out, err = capsys.readouterr()
    assert out.startswith(f"host {socket.gethostname()}: ") and "does not answer" in err
