"""A run over two hosts with addresses of their own: the bits of one host, and what happens where
the link between them, or one of them, is lost.
"""

from __future__ import annotations

import re
import subprocess
import time

import numpy as np
import pytest
from cases import and_slow, needs_ray

needs_ray()

import jax  # noqa: E402
from runs import ALONE, CONSTANT, QUICK, SHORT, environment, save_pair, weights  # noqa: E402
from two_hosts import FIRST, SECOND, refusal, two_hosts  # noqa: E402

from jaxrl import Config, load_model  # noqa: E402
from jaxrl.train import train  # noqa: E402

pytestmark = pytest.mark.ray

MESH = "mesh=actor=1,rollout+teacher=1"
"""The actor fills the first host; rollout and teacher are on the second. The programs of each are
those of its first device."""
END = 600
"""Seconds within which any run here has ended; none takes a fifth of it on quiet cores."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory):
    """The run on one host, with threads."""
    folder = tmp_path_factory.mktemp("expected")
    options = arguments(models, folder / "run", "launcher=local", ALONE)
    return train(Config.load("builtin:quickstart", options)).run_dir


@pytest.fixture
def hosts(request):
    why = refusal()
    if why is not None:
        pytest.skip(why)
    with two_hosts(environment(), getattr(request, "param", 1)) as found:
        found.head()
        found.join()
        yield found


def arguments(models, run_dir, *overrides):
    plain = ["steps=20", "checkpoint.every=1", "data.eval=null", f"run_dir={run_dir}", MESH]
    return [*models, *SHORT, *CONSTANT, *plain, *overrides]


def until_step(process, run_dir, step):
    """Waits for the row of a step."""
    rows, end = run_dir / "metrics.jsonl", time.monotonic() + END
    while not (rows.is_file() and len(rows.read_text().splitlines()) > step):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"step {step} did not come"
        time.sleep(0.05)


def end_of(process):
    """Exit code and output of a run that must end."""
    try:
        output, _ = process.communicate(timeout=END)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"the run did not end: {process.communicate()[0]}")
    assert "Traceback" not in output
    return process.returncode, output


@pytest.mark.parametrize("lost", and_slow(["host"], ["link"]))
def test_two_hosts_compute_the_bits_of_one_though_the_link_is_cut_and_a_host_is_lost(
    models, hosts, tmp_path, expected, lost
):
    """The run outlives a link that is cut for 5 s. A host that is lost ends it by name, because
    rollout and teacher have no room on the one that is left, and a resume completes it.
    """
    run_dir = tmp_path / "run"
    process = hosts.train(*QUICK, *arguments(models, run_dir))
    until_step(process, run_dir, 1)
    plan = (run_dir / "plan.txt").read_text()
    assert re.search(r"actor .*\(first\)", plan) and re.search(r"rollout .*\(second\)", plan), plan
    hosts.cut()
    if lost == "host":
        time.sleep(5)
        hosts.mend()
        before = len((run_dir / "metrics.jsonl").read_text().splitlines())
        until_step(process, run_dir, before + 1)  # it works on
        hosts.kill(1)
    code, output = end_of(process)
    assert code == 2, output
    assert f"the node second ({SECOND})" in output and "the cluster is too small" in output, output
    assert f"has: first ({FIRST})" in output and "has: second" not in output, output
    assert list((run_dir / "checkpoints").glob("*/manifest.json"))
    if lost == "link":
        hosts.kill(1)  # a node that was cut off does not come back by itself
        hosts.mend()
    hosts.join()
    code, output = end_of(hosts.train(*QUICK, *arguments(models, run_dir)))
    assert code == 0, output
    assert weights(run_dir) == weights(expected)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_a_pool_over_two_hosts(models, hosts, tmp_path, expected):
    """One jax.distributed world over both. Each process sums with threads of its own, so that the
    weights are close, not equal."""
    wide = "mesh=actor=6,rollout=1,teacher=1"
    code, output = end_of(hosts.train(*QUICK, *arguments(models, tmp_path / "run", wide)))
    assert code == 0, output
    plan = (tmp_path / "run" / "plan.txt").read_text()
    assert re.search(r"\(first\)", plan) and re.search(r"\(second\)", plan), plan
    ours, theirs = (load_model(path / "final").params for path in (tmp_path / "run", expected))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
