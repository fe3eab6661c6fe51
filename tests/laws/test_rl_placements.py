"""Learning from rewards, role by role on the devices that it was asked for: processes compute the
bits of threads, one device computes the same numbers, and a killed run goes on bit for bit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import needs_ray
from runs import (
    CONSTANT,
    FUNCTIONS,
    HERE,
    SHORT,
    environment,
    numbers,
    save_model,
    save_reward_model,
    wait_for,
    weights,
)

from jaxrl import Config, load_model
from jaxrl.checkpoint import store
from jaxrl.telemetry.lines import LOG_FILE
from jaxrl.train import train

pytestmark = pytest.mark.slow

LAUNCHERS = ["local", pytest.param("ray", marks=pytest.mark.ray)]
STEPS = 4
PLAIN = [
    *("teacher.model=null", f"reward.functions=[{FUNCTIONS}:length]", "reward.weights=[0.1]"),
    *("reward.workers=1", "reward.dtype=float32", "reference.dtype=float32", "group_size=4"),
    *(f"steps={STEPS}", "checkpoint.every=1", "data.eval=arithmetic", "eval.every=2"),
    # Adam would make a whole step of a gradient that is 0 but for rounding.
    *("optimizer.name=sgd", "optimizer.learning_rate=0.1", *CONSTANT),
]
KL = ["policy.kl_coef=0.1"]
SIMILAR = ["policy.advantages=similarity", f"grouper.model={HERE / 'references' / 'tiny_bge'}"]
SIMILAR += ["grouper.dtype=float32", "grouper.use=blend"]
FROZEN_BESIDE = ["mesh=actor+rollout=2,reference+reward=1"]
FROZEN_ON_THE_SECOND = ["mesh=actor+rollout+reference+reward=2"]
FROZEN_ON_THE_SECOND += ["reference.devices=1:2", "reward.devices=1:2"]
ALL_ON_EIGHT = ["mesh=actor+rollout+reward+grouper=8"]
CASES = {
    "gspo-beside": (["algorithm=gspo", *KL], FROZEN_BESIDE),
    "grpo-beside": (["algorithm=grpo", *KL], FROZEN_BESIDE),
    "gspo-second": (["algorithm=gspo", *KL], FROZEN_ON_THE_SECOND),
    "grpo-second": (["algorithm=grpo", *KL], FROZEN_ON_THE_SECOND),
    "gspo-similar": (["algorithm=gspo", *SIMILAR], ALL_ON_EIGHT),
    "grpo-similar": (["algorithm=grpo", *KL, *SIMILAR], ALL_ON_EIGHT),
}
"""What is learned, and where; a reference that is not placed joins the actor."""
KILLED = ["gspo-beside", "grpo-second", "grpo-similar"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    student = save_model(folder / "student", 32, 1, seed=0)
    return [f"student.model={student}", f"reward.model={save_reward_model(folder)}"]


@pytest.fixture(scope="module")
def launcher(request):
    """`local`, or `ray` with a cluster for all tests of the module."""
    if request.param == "local":
        yield "local"
        return
    needs_ray()
    from jaxrl.runtime.ray.connect import join
    from jaxrl.runtime.ray.local_cluster import leave

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        leave()
        join(None, 8)
        yield "ray"
        leave()


def arguments(models, run_dir, case, *overrides):
    asked, mesh = CASES[case]
    return [*models, *SHORT, *PLAIN, *asked, *mesh, f"run_dir={run_dir}", *overrides]


def run(models, run_dir, case, *overrides):
    return train(Config.load("builtin:quickstart", arguments(models, run_dir, case, *overrides)))


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    """The run with threads."""
    folder, done = tmp_path_factory.mktemp("undisturbed"), {}

    def get(case):
        if case not in done:
            done[case] = run(models, folder / case, case, "launcher=local")
        return done[case]

    return get


def said(result):
    return (result.run_dir / LOG_FILE).read_text()


@pytest.mark.parametrize("case", CASES)
def test_one_device_computes_the_same_numbers(models, tmp_path, undisturbed, case):
    """Sums in another order: the same completions, and weights to rounding."""
    roles = "actor+rollout+reward"
    roles += "+grouper" if "similar" in case else "+reference"
    alone = ["launcher=local", f"mesh={roles}=1", "reference.devices=null", "reward.devices=null"]
    one, many = run(models, tmp_path / "run", case, *alone), undisturbed(case)
    assert len(one.metrics) == STEPS + 1
    for ours, theirs in zip(one.metrics[1:], many.metrics[1:], strict=True):
        for name in ("reward/mean", "reward/model/mean", "policy/entropy", "loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
        assert ours["tokens/generated"] == theirs["tokens/generated"]
    pairs = zip(
        *(jax.tree.leaves(load_model(result.run_dir).params) for result in (one, many)), strict=True
    )
    for ours, theirs in pairs:
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=2e-5)
    assert one.metrics[-1]["eval/accuracy"] == many.metrics[-1]["eval/accuracy"]


@pytest.mark.parametrize("launcher", LAUNCHERS[1:], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_processes_compute_the_bits_of_threads(models, tmp_path, undisturbed, launcher, case):
    processes, threads = run(models, tmp_path / "run", case, "launcher=ray"), undisturbed(case)
    assert numbers(processes) == numbers(threads)
    assert weights(processes.run_dir) == weights(threads.run_dir)
    assert "restarting" not in said(processes)
    if "similar" in case:
        for result in (processes, threads):
            assert said(result).count("grouper: made on its first use") == 1


@pytest.mark.parametrize("launcher", LAUNCHERS, indirect=True)
@pytest.mark.parametrize("case", KILLED)
def test_a_killed_run_goes_on_bit_for_bit(models, tmp_path, undisturbed, launcher, case):
    asked = [f"launcher={launcher}"]
    command = [sys.executable, "-m", "jaxrl.train", "--config", "builtin:quickstart"]
    command += arguments(models, tmp_path / "run", case)
    victim = subprocess.Popen(
        [*command, *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment(),
    )
    wait_for(tmp_path / "run" / "checkpoints" / "1" / store.MANIFEST, victim)
    victim.kill()
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    saved = store.newest(tmp_path / "run", print)
    assert 1 <= saved.step < STEPS
    result, whole = run(models, tmp_path / "run", case, *asked), undisturbed(case)
    assert numbers(result) == numbers(whole)
    assert weights(result.run_dir) == weights(whole.run_dir)
