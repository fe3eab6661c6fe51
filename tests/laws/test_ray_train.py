"""Whole runs with workers as processes: the same bits as with threads, also where a process dies,
freezes or fails in any stage.

Two runs of the default suite are struck again and again, each time in another way. Every role,
stage and fault by itself is slow, and makes the table in docs/cluster.md:

    FAULTS_TABLE=FILE python -m pytest tests/laws/test_ray_train.py \\
        -m "slow or not slow" -n 0 -k struck
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from cases import and_slow, needs_ray

needs_ray()

import ray_faults  # noqa: E402
from runs import (  # noqa: E402
    CONSTANT,
    FUNCTIONS,
    HERE,
    PENALISED,
    SHORT,
    environment,
    numbers,
    save_pair,
    save_reward_model,
    weights,
)

from jaxrl import Config, load_model  # noqa: E402
from jaxrl.errors import RunError  # noqa: E402
from jaxrl.runtime.ray.connect import join  # noqa: E402
from jaxrl.runtime.ray.local_cluster import leave  # noqa: E402
from jaxrl.train import train  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_programs")]

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
    "reference": {"startup": "score", "score": "score"},  # lazy, as the grouper
    "reward": {"startup": "startup", "score": "score"},
    "grouper": {"score": "score"},  # starts in its first call, which the deadline bounds
}
"""Role -> stage -> the deadline that bounds it."""
FROZEN = ("reference", "reward", "grouper")
"""Roles of a run that learns from rewards: one pool, two of them lazy, all offloaded."""
LAZY = ("reference", "grouper")
"""Those that start in their first call, in the middle of a run: only that call is repeated."""
REWARDED = [
    *("algorithm=gspo", "teacher.model=null", "group_size=4"),
    *("policy.advantages=similarity", f"grouper.model={HERE / 'references' / 'tiny_bge'}"),
    *("grouper.use=blend", "grouper.dtype=float32", "reference.dtype=float32"),
    *(f"reward.functions=[{FUNCTIONS}:length]", "reward.weights=[0.1]", "reward.workers=1"),
    *("reward.dtype=float32", "reference.lazy=true", "optimizer.learning_rate=1e-3", *PENALISED),
    *("offload.params=true", "offload.optimizer=true", "offload.frozen=true"),
    *("eval.prompts=6", "eval.samples=4", "eval.temperature=1"),  # of the programs of training
    "mesh=actor+rollout=2,reference+reward+grouper=1",
]
STRUCK = [
    *(
        (role, stage, fault, 0 if stage == "startup" else 1 if stage in ("export", "sample") else 2)
        + ("serial",)
        for role, stages in STAGES.items()
        for stage in stages
        for fault in ("kill", "stop", "raise")
    ),
    *((role, "score", "memory", 2, "serial") for role in ("teacher", *FROZEN)),
    *(
        ("teacher", "score", f"{daemon}-{fault}", 2, "serial")
        for daemon in ("raylet", "gcs_server")
        for fault in ("kill", "stop")
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
    return save_pair(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory):
    return [*REWARDED, f"reward.model={save_reward_model(tmp_path_factory.mktemp('reward'))}"]


@pytest.fixture(scope="module")
def cluster():
    """Its workers import the faults, and share the tests' compile cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setattr("jaxrl.run.launch.pool_makers", ray_faults.pool_makers)
        leave()
        join(None, 8)
        yield
        leave()


def arguments(models, run_dir, *overrides):
    plain = ["steps=3", "checkpoint.every=1", "eval.every=0", f"run_dir={run_dir}"]
    return [*models, *SHORT, *CONSTANT, MESH, *plain, *overrides]


def run(models, run_dir, *overrides):
    return train(Config.load("builtin:quickstart", arguments(models, run_dir, *overrides)))


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    """The run with threads."""
    folder, done = tmp_path_factory.mktemp("undisturbed"), {}

    def get(schedule, *options):
        name = "-".join([schedule, *(option.replace("/", "_") for option in options)])[:100]
        if name not in done:
            options = ["launcher=local", f"schedule={schedule}", *options]
            done[name] = run(models, folder / str(len(done)), *options)
        return done[name]

    return get


def ask_for(tmp_path, *what):
    folder = tmp_path / ray_faults.FOLDER
    folder.mkdir(exist_ok=True)
    (folder / ".".join(map(str, what))).touch()


def unstruck(tmp_path):
    return ray_faults.asked(tmp_path / ray_faults.FOLDER)


PARTS = ("steps=4", "teacher.num_microbatches=3", "data.eval=null", "eval.teacher=false")
"""So many calls of `teacher.score` a batch; the first strike comes between two of them. It is the
run that learns from rewards that evaluates.
"""
ADAPTERS = ["student.lora.rank=4", "optimizer.learning_rate=0.02"]  # as other files' runs
DIED_IN_ROLLOUT_OR_TEACHER = (
    r"worker rollout\+teacher .* died in (teacher\.score|rollout\.(load|generate))"
)
"""Both roles may have a call under way, and what was reported of the call before may die too."""
DISTILLED_STRIKES = {
    "teacher.score.kill.2": DIED_IN_ROLLOUT_OR_TEACHER,
    "teacher.score.stop.8": r"teacher\.score has run for .*; its deadline is 10 s",
    "teacher.score.gcs_server-kill.11": r"the gcs_server .* of the run's own Ray cluster has ended",
}
"""What strikes a run, and what it says of it. The process of the teacher is that of the rollout;
how each daemon's loss is found is in tests/runtime/test_cluster.py."""
REWARDED_STRIKES = {
    "reference.score.kill.1": r"died in reference\.score",
    "actor.update.kill.2": r"worker actor\+rollout .* died in (actor|rollout)\.",
}
LAST = "grouper.score.raise.4"
"""Ends the run."""
ENDS = {"raise": "struck in {}", "memory": "{} ran out of memory on cpu:0"}
"""What ends a run, and how the error says it."""
LIMITS = ["deadlines.score=10", "ray.max_restarts=2"]
"""Fewer restarts than strikes: only what a run achieves between them lets it reach its end."""
FEW = "mesh=actor=1,rollout+teacher=1"
FEW_REWARDED = "mesh=actor+rollout=1,reference+reward+grouper=1"
"""Few processes, which take seconds to start; and programs of one device are compiled once, not
again by each process that is restarted."""


def is_undisturbed(result, expected, strikes, told, tmp_path):
    assert not unstruck(tmp_path)
    for strike, line in strikes.items():
        assert re.search(line, told), f"nothing is said of {strike}:\n{told}"
    has_the_same_bits(result, expected)


def has_the_same_bits(result, expected):
    """Weights and rows, but for the bytes that were offloaded: a restarted process holds less."""
    assert weights(result.run_dir) == weights(expected.run_dir)
    for ours, theirs in zip(numbers(result), numbers(expected), strict=True):
        differ = {key for key, _ in ours.items() ^ theirs.items()}
        assert not {key for key in differ if not key.startswith("offload/")}


@pytest.mark.parametrize("base", and_slow(["float32"], ["nf4"]))
def test_a_distillation_survives_its_workers_and_its_cluster(
    models, cluster, tmp_path, undisturbed, capsys, base
):
    """One run, struck three times: the teacher killed amid the parts of a batch, the teacher
    stopped, and the cluster's GCS killed. It trains adapters, which come again to a new rollout,
    and this loads the weights under them, and quantises them where that is asked for, itself.
    """
    own = [FEW, *PARTS, *ADAPTERS, f"student.base_dtype={base}"]
    expected = undisturbed("one_step_off", *own)
    for strike in DISTILLED_STRIKES:
        ask_for(tmp_path, strike)
    asked = ["launcher=ray", "schedule=one_step_off", *own, *LIMITS]
    result = run(models, tmp_path / "run", *asked)
    told = capsys.readouterr().out
    is_undisturbed(result, expected, DISTILLED_STRIKES, told, tmp_path)


def test_frozen_lazy_and_offloaded_roles_are_struck(
    models, rewarded, cluster, tmp_path, undisturbed, capsys
):
    """One run that learns from rewards, struck twice, once in the update of the policy; an
    exception ends it, and it resumes, with threads."""
    learned = [*rewarded, FEW_REWARDED]
    expected = undisturbed("serial", *learned)
    for strike in (*REWARDED_STRIKES, LAST):
        ask_for(tmp_path, strike)
    asked = ["launcher=ray", *learned, *LIMITS]
    with pytest.raises(RunError, match=r"struck in grouper\.score"):
        run(models, tmp_path / "run", *asked)
    result = run(models, tmp_path / "run", "launcher=local", *learned, *LIMITS)
    is_undisturbed(result, expected, REWARDED_STRIKES, capsys.readouterr().out, tmp_path)


@pytest.mark.parametrize(
    ("role", "stage", "fault", "nth", "schedule"),
    [pytest.param(*what, id="-".join(map(str, what))) for what in STRUCK],
)
@pytest.mark.slow
def test_a_struck_worker(
    models, rewarded, cluster, tmp_path, undisturbed, role, stage, fault, nth, schedule, capsys
):
    """A kill or a hang changes no bit of the rows and the weights; an exception ends the run."""
    ask_for(tmp_path, role, stage, fault, nth)
    learned = rewarded if role in FROZEN else []
    options = ["launcher=ray", f"schedule={schedule}", *learned]
    if fault in ("stop", "slow"):
        options.append(f"deadlines.{STAGES[role][stage]}={DEADLINE * (3 if nth == 0 else 1)}")
    began, ended, error = time.monotonic(), "same weights", ""
    if fault in ENDS:
        with pytest.raises(RunError, match=ENDS[fault].format(f"{role}.{stage}")) as raised:
            run(models, tmp_path / "run", *options)
        error = str(raised.value)
        ended = "exit 1"
    if fault == "raise":
        assert "Traceback" in error and "ray_faults.py" in error and "restarting" not in error
    if fault not in ENDS:
        result = run(models, tmp_path / "run", *options)
        expected = undisturbed(schedule, *learned)
        has_the_same_bits(result, expected)
    out = capsys.readouterr()
    told = out.out + out.err
    assert not unstruck(tmp_path), "it was not struck"
    if fault not in ENDS:
        at_start = stage == "startup" and role not in LAZY
        back = role == "actor" or at_start or "-" in fault
        assert ("goes back to its newest checkpoint" if back else "restarting") in told
        if fault in ("stop", "slow") and stage != "startup":
            # Rewards are judged beside the other calls of their process: both are late with it.
            assert re.search(rf"({role}|reward)\.{stage} has run for", told), told
            assert "deadline is" in told
            sign = "process stopped (state T" if fault == "stop" else "time.sleep(3600)"
            assert sign in told
    table(role, stage, fault, nth, schedule, told + error, ended, time.monotonic() - began)


def table(role, stage, fault, nth, schedule, told, ended, seconds):
    """One row, where somebody asks for the table."""
    file = os.environ.get("FAULTS_TABLE")
    if file is None:
        return
    found = re.search(r"^.*(restarting |goes back to|struck in|ran out).*$", told, re.MULTILINE)
    line = found[0].strip() if found else ""
    with open(file, "a", encoding="utf-8") as out:
        out.write(
            f"| {role} | {stage} {nth or ''} | {fault} | {schedule} | {ended} | {seconds:.0f} s |\n"
        )
        out.write(f"    {line}\n")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["actor=1,rollout+teacher=1", "actor+rollout+teacher=1"])
def test_a_teacher_that_is_the_policy(models, cluster, tmp_path, undisturbed, mesh, capsys):
    """The same bits as with threads. A pool without the actor is struck, and gets both versions
    again: the rollout's and the teacher's."""
    own = [f"mesh={mesh}", "teacher.model=policy", "teacher.ema=0.9", "actor.minibatches=2"]
    own += ["teacher.prompt={answer};{prompt}", "data.eval=null"]
    expected = undisturbed("one_step_off", *own)
    strikes = [] if mesh.startswith("actor+") else ["teacher.score.kill.2"]
    for strike in strikes:
        ask_for(tmp_path, strike)
    asked = ["launcher=ray", "schedule=one_step_off", *own]
    result = run(models, tmp_path / "run", *asked)
    told = capsys.readouterr().out
    is_undisturbed(
        result, expected, dict.fromkeys(strikes, DIED_IN_ROLLOUT_OR_TEACHER), told, tmp_path
    )
    shared = result.metrics[2]["weights/teacher_sync_bytes"] == 0  # the average, in one pool
    assert shared == mesh.startswith("actor+")


def parameters(run_dir):
    return load_model(run_dir / "final").params


@pytest.mark.slow
def test_a_pool_of_two_processes_of_which_one_is_killed(models, cluster, tmp_path, undisturbed):
    """Other sums, since each process has its own threads: close, not equal."""
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


@pytest.mark.parametrize(
    "asked",
    and_slow(
        ["SIGTERM to all"],
        [
            *("ctrl-c", "SIGTERM", "SIGKILL", "SIGHUP to all", "SIGTERM to all, twice"),
            *("ctrl-c at the start", "SIGTERM to all at the start"),
        ],
    ),
)
def test_nothing_is_left_of_a_run_that_is_ended(models, tmp_path, asked):
    """Also where its processes are signalled together, as by scancel, systemctl stop or a container
    engine: Ray's daemons are needed to save, and are not waited for without end."""
    mark = uuid.uuid4().hex
    process = start(models, tmp_path / "run", mark, FEW)
    rows = tmp_path / "run" / "metrics.jsonl"
    if asked.endswith("start"):
        wait_until(lambda: any(title.startswith("ray::jaxrl:") for title in marked(mark)), 60)
    else:
        wait_until(lambda: rows.is_file() and len(rows.read_text().splitlines()) > 2, 120, process)
    assert len(marked(mark)) > 4
    number = getattr(signal, asked.split()[0].replace("ctrl-c", "SIGINT"))
    for again in range(2 if asked.endswith("twice") else 1):
        time.sleep(0.3 * again)  # two that come together count as one
        if asked.startswith("ctrl-c") or "to all" in asked:  # a terminal signals all of a group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    told, _ = process.communicate(timeout=60)
    if asked == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, told
    wait_until(lambda: not any("ray::jaxrl" in title for title in marked(mark)), 20)
    # Two helpers of Ray notice only after a while that the process that began them was killed.
    wait_until(lambda: not marked(mark), 90 if asked == "SIGKILL" else 20)
    checkpoints = list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))
    if not asked.endswith("twice"):  # it may have saved before the second
        assert len(checkpoints) == (asked != "SIGKILL" and not asked.endswith("start")), told
    assert len(checkpoints) == ("saved at step" in told)
    assert "Traceback" not in told


HEAD = """
import sys, time
from jaxrl.runtime.ray import local_cluster
from jaxrl.runtime.ray.connect import join
join(None, 8)
pids = [local_cluster.daemons()[name].pid for name in local_cluster.DAEMONS]
import ray
print(ray.get_runtime_context().gcs_address, *pids, flush=True)
sys.stdin.read()
"""
JOINED = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""A cluster on 127.0.0.1 that another process may join."""


@pytest.fixture
def other_cluster():
    """(address, pid of its GCS, pid of its raylet) of a cluster of another process."""
    command = [sys.executable, "-c", HEAD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    head = subprocess.Popen(command, env=os.environ | environment() | JOINED, **pipes)
    address, *pids = head.stdout.readline().split()
    yield address, *map(int, pids)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    head.kill()
    head.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("struck", ["its head is killed", "its raylet is stopped"])
def test_a_run_ends_with_a_cluster_that_is_not_its_own(models, other_cluster, tmp_path, struck):
    """It saves before Ray gives up on a head that is gone."""
    address, gcs, raylet = other_cluster
    with pytest.MonkeyPatch.context() as patch:
        for name, value in JOINED.items():
            patch.setenv(name, value)
        process = start(models, tmp_path / "run", uuid.uuid4().hex, f"ray.address={address}")
    rows = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: rows.is_file() and len(rows.read_text().splitlines()) > 2, 240, process)
    if struck == "its raylet is stopped":
        os.kill(raylet, signal.SIGSTOP)
        told, _ = process.communicate(timeout=300)
        assert process.returncode in (1, 2), told
        return
    os.kill(gcs, signal.SIGKILL)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 1, told
    assert f"the head of the Ray cluster at {address} has ended" in told and "saved at step" in told
    assert len(list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))) == 1
