"""Whole runs with workers as processes: the same bits as with threads, also where a process dies,
freezes or fails in any stage.

Every role, stage and fault, as the table in docs/cluster.md:

    FAULTS_TABLE=FILE python -m pytest tests/test_ray_train.py -m "slow or not slow" -n 0 -k struck
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

ray = pytest.importorskip("ray")

import ray_faults  # noqa: E402
from test_resume import CONSTANT, numbers, weights  # noqa: E402
from test_train import SHORT, save_model  # noqa: E402

from jaxrl import Config, load_model  # noqa: E402
from jaxrl.errors import RunError  # noqa: E402
from jaxrl.telemetry.log import LOG_FILE  # noqa: E402
from jaxrl.train import train  # noqa: E402

pytestmark = pytest.mark.ray

MESH = "mesh=actor=2,rollout=2,teacher=4"
DEADLINE = 20
"""Seconds, where a frozen worker is to be found; more than anything takes here."""
STAGES = {
    "actor": {
        "startup": "startup",
        "update": "update",
        "publish": "weight_sync",
        "save": "checkpoint",
        "export": "export",
    },
    "rollout": {
        "startup": "startup",
        "load": "weight_sync",
        "generate": "generate",
        "sample": "evaluate",
    },
    "teacher": {"startup": "startup", "score": "score", "sample": "evaluate"},
}
"""Role -> stage -> the deadline that bounds it."""
DEFAULT = [("rollout", "generate", "kill", 2, "serial")]
STRUCK = [
    *(
        (role, stage, fault, 0 if stage == "startup" else 1 if stage in ("export", "sample") else 2)
        + ("serial",)
        for role, stages in STAGES.items()
        for stage in stages
        for fault in ("kill", "stop", "raise")
    ),
    ("actor", "update", "kill", 1, "serial"),
    ("rollout", "generate", "slow", 2, "serial"),
    ("actor", "update", "kill", 3, "one_step_off"),
    ("rollout", "load", "kill", 2, "one_step_off"),
    ("rollout", "generate", "stop", 3, "one_step_off"),
    ("teacher", "score", "kill", 2, "two_step_off"),
]
"""Role, stage, fault, in which call of that kind (from 1), schedule."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    student = save_model(folder / "student", 32, 2, seed=0)
    teacher = save_model(folder / "teacher", 48, 1, seed=1, rows=272)
    return [f"student.model={student}", f"teacher.model={teacher}"]


@pytest.fixture(scope="module")
def cluster():
    """Its workers import the faults, and share the tests' compile cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setattr("jaxrl.launch.pool_makers", ray_faults.pool_makers)
        ray.shutdown()
        ray.init(num_cpus=8, namespace="jaxrl", include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def environment():
    import jax

    folder = str(Path(__file__).parent)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def arguments(models, run_dir, *overrides):
    plain = ["steps=3", "checkpoint.every=1", "eval.every=0", f"run_dir={run_dir}"]
    return [*models, *SHORT, *CONSTANT, MESH, *plain, *overrides]


def run(models, run_dir, *overrides):
    return train(Config.load("builtin:quickstart", arguments(models, run_dir, *overrides)))


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    """The run with threads."""
    folder, done = tmp_path_factory.mktemp("undisturbed"), {}

    def get(schedule):
        if schedule not in done:
            options = ["launcher=local", f"schedule={schedule}"]
            done[schedule] = run(models, folder / schedule, *options)
        return done[schedule]

    return get


def ask_for(tmp_path, *what):
    folder = tmp_path / ray_faults.FOLDER
    folder.mkdir(exist_ok=True)
    (folder / ".".join(map(str, what))).touch()


def said(run_dir):
    return (run_dir / LOG_FILE).read_text()


@pytest.mark.parametrize(
    ("role", "stage", "fault", "nth", "schedule"),
    [
        *(pytest.param(*what, id="-".join(map(str, what))) for what in DEFAULT),
        *(
            pytest.param(*what, id="-".join(map(str, what)), marks=pytest.mark.slow)
            for what in STRUCK
            if what not in DEFAULT
        ),
    ],
)
def test_a_struck_worker(
    models, cluster, tmp_path, undisturbed, role, stage, fault, nth, schedule, capsys
):
    """A kill or a hang changes no bit of the rows and the weights; an exception ends the run."""
    ask_for(tmp_path, role, stage, fault, nth)
    options = ["launcher=ray", f"schedule={schedule}"]
    if fault in ("stop", "slow"):
        options.append(f"deadlines.{STAGES[role][stage]}={DEADLINE * (3 if nth == 0 else 1)}")
    began, ended, error = time.monotonic(), "same weights", ""
    if fault == "raise":
        with pytest.raises(RunError, match=f"struck in {role}.{stage}") as raised:
            run(models, tmp_path / "run", *options)
        error = str(raised.value)
        assert "Traceback" in error and "ray_faults.py" in error and "anew" not in error
        ended = "exit 1 with the traceback"
    else:
        result = run(models, tmp_path / "run", *options)
        expected = undisturbed(schedule)
        assert weights(result.run_dir) == weights(expected.run_dir)
        assert numbers(result) == numbers(expected)
    out = capsys.readouterr()
    told = out.out + out.err
    assert not list((tmp_path / ray_faults.FOLDER).iterdir()), "it was not struck"
    if fault != "raise":
        back = role == "actor" or stage == "startup"
        assert (
            "goes back to its newest checkpoint" if back else f"making {role} anew (1 of"
        ) in told
        if fault != "kill" and stage != "startup":
            assert f"{role}.{stage} has run for" in told and "deadline is" in told
            sign = "process stopped (state T" if fault == "stop" else "time.sleep(3600)"
            assert sign in told
    table(role, stage, fault, nth, schedule, told + error, ended, time.monotonic() - began)


def table(role, stage, fault, nth, schedule, told, ended, seconds):
    """One row, where somebody asks for the table."""
    file = os.environ.get("FAULTS_TABLE")
    if file is None:
        return
    found = re.search(r"^.*(anew \(|goes back to|struck in).*$", told, re.MULTILINE)
    line = found[0].strip() if found else ""
    with open(file, "a", encoding="utf-8") as out:
        out.write(
            f"| {role} | {stage} {nth or ''} | {fault} | {schedule} | {ended} | {seconds:.0f} s |\n"
        )
        out.write(f"    {line}\n")


@pytest.mark.slow
def test_processes_compute_the_bits_of_threads(models, cluster, tmp_path, undisturbed):
    for schedule in ("serial", "one_step_off", "two_step_off"):
        options = ["launcher=ray", f"schedule={schedule}"]
        result = run(models, tmp_path / schedule, *options)
        assert weights(result.run_dir) == weights(undisturbed(schedule).run_dir)
        assert numbers(result) == numbers(undisturbed(schedule))
        assert "anew" not in said(result.run_dir)


def parameters(run_dir):
    return load_model(run_dir / "final").params


@pytest.mark.slow
@pytest.mark.parametrize("struck", [False, True])
def test_a_pool_of_two_processes(models, cluster, tmp_path, undisturbed, struck):
    """Other sums, since each process has its own threads: close, not equal; and a killed one of two
    changes nothing of that."""
    if struck:
        ask_for(tmp_path, "actor", "update", "kill", 2)
    options = ["launcher=ray", "ray.devices_per_worker=1", "mesh=actor=2,rollout=2,teacher=2"]
    result = run(models, tmp_path / "run", *options)
    ours, theirs = parameters(result.run_dir), parameters(undisturbed("serial").run_dir)
    import jax

    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


def start(models, run_dir, mark, *overrides):
    """A run in a process group of its own, as a terminal starts it; its cluster is its own."""
    command = [sys.executable, "-m", "jaxrl.train", "--launcher", "ray"]
    command += ["--config", "builtin:quickstart"]
    return subprocess.Popen(
        [*command, *arguments(models, run_dir, "steps=200", "checkpoint.every=0", *overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment() | {MARK: mark},
        start_new_session=True,
    )


MARK = "JAXRL_TEST_MARK"


def marked(mark):
    """Every process that the run began: Ray's daemons and all workers have its environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().decode(errors="replace")[:60])
        except OSError:
            continue
    return found


def wait_until(true, seconds, process=None):
    end = time.monotonic() + seconds
    while not true():
        assert process is None or process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["ctrl-c", "SIGTERM", "SIGKILL", "ctrl-c at the start"])
def test_nothing_is_left_of_a_run_that_is_ended(models, tmp_path, asked):
    mark = uuid.uuid4().hex
    process = start(models, tmp_path / "run", mark)
    rows = tmp_path / "run" / "metrics.jsonl"
    if asked.endswith("start"):
        wait_until(lambda: any(title.startswith("ray::jaxrl:") for title in marked(mark)), 60)
    else:
        wait_until(lambda: rows.is_file() and len(rows.read_text().splitlines()) > 2, 120, process)
    assert len(marked(mark)) > 4
    if asked.startswith("ctrl-c"):  # the terminal signals all that is in the foreground
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(getattr(signal, asked))
    told, _ = process.communicate(timeout=60)
    if asked == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, told
    wait_until(lambda: not any("ray::jaxrl" in title for title in marked(mark)), 20)
    # Two helpers of Ray notice only after a while that the process that began them was killed.
    wait_until(lambda: not marked(mark), 90 if asked == "SIGKILL" else 20)
    checkpoints = list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))
    assert len(checkpoints) == (1 if asked in ("ctrl-c", "SIGTERM") else 0), told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_teacher_that_answers_half_a_batch(models, cluster, tmp_path):
    """Killed after the second of three parts of the second batch."""
    parts = "teacher.num_microbatches=3"
    ask_for(tmp_path, "teacher", "score", "kill", 5)
    result = run(models, tmp_path / "run", "launcher=ray", parts)
    expected = run(models, tmp_path / "expected", "launcher=local", parts)
    assert "died in teacher.score" in said(result.run_dir)
    assert weights(result.run_dir) == weights(expected.run_dir)
    assert numbers(result) == numbers(expected)
