"""The memory of a run does not depend on how many steps it has trained."""

from __future__ import annotations

import ctypes
import gc
import io
import json
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from runs import SHORT, save_model

from jaxrl import Config
from jaxrl.algorithms.protocols import Sources
from jaxrl.process.compilations import Compilations
from jaxrl.run.loop import Calls, Loop
from jaxrl.run.reporting import Run
from jaxrl.runtime.worker import LocalWorker
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.metrics import JsonLines, MetricsWriter, read_metrics
from jaxrl.telemetry.timeline import Timeline
from jaxrl.train import train
from jaxrl.types import Completion, Prompt, SampleCounts

PROMPTS = [Prompt(i, (1, 2), f"prompt {i}", answer="42") for i in range(4)]
ZEROS = np.zeros(2, np.float32)
TIMELINE = 60_000
"""Bytes that the timeline may have: those of about seventy steps."""


@pytest.fixture(scope="module", autouse=True)
def earlier_tests_set_aside():
    """What they left in this process, which each collection here would look through: a second."""
    gc.collect()
    gc.freeze()


class Pretender:
    """Every role in one. It computes nothing."""

    def publish(self, version):
        return version

    def load(self, version):
        self.version = version
        return {"weights/sync_bytes": 1e6, "weights/damaged_arrays": 0.0}

    def generate(self, prompts, step, attempt):
        text = f"completion {step}"
        completions = [Completion((step % 7, 5), ZEROS, ZEROS, "stop", text) for _ in prompts]
        return SimpleNamespace(
            prompts=prompts,
            completions=completions,
            group_ids=np.arange(len(prompts)),
            replaced=SampleCounts(),
            policy_version=self.version,
            decode_steps=2,
            notes=(),
        )

    def score(self, rollout, part, parts):
        return SimpleNamespace()

    def update(self, rollout, scores, step):
        row = {"loss": step / 7, "actor/grad_norm": 2.0 + step, "actor/tokens": 8.0 + step}
        learned = [2] * len(rollout.completions)
        return SimpleNamespace(metrics=row, by_row={}, advantages=None, learned=learned)

    def save(self, folder, step):
        return step

    def saved(self, step):
        return None


def test_a_loop_that_trains_keeps_nothing_of_a_step(tmp_path):
    """700 steps through everything that waits for, counts, writes and shows a step: after the first
    200 the objects of Python grow by less than a float in a list a step, where a row has twenty.
    Caches of Python's own, as of `strftime`, fill meanwhile.
    """
    used = {}

    def on_row(row):
        if row["step"] == 150:
            tracemalloc.start()
        if row["step"] in (200, 699):
            gc.collect()
            used[row["step"]] = tracemalloc.get_traced_memory()[0]

    loop, close = pretended_loop(tmp_path, on_row)
    try:
        assert loop.run() == 700
    finally:
        tracemalloc.stop()
        close()
    assert (used[699] - used[200]) / 499 < 32  # a float and its place in a list
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(701))
    assert (tmp_path / "timeline.json").stat().st_size < TIMELINE + 10_000
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert [e["args"]["step"] for e in events if e["name"] == "update"][-1] == 699


def pretended_loop(folder, on_row):
    """A loop over roles that compute nothing, and what closes its workers and files."""
    # TensorBoard has a bounded queue of its own, whose length depends on the load of the machine.
    given = "steps=700 batch_size=4 logging.every=10 logging.samples=2 logging.tensorboard=false"
    config = Config.load(None, given.split()).with_dtypes("cpu")
    workers = [LocalWorker(name) for name in ("actor", "rollout", "teacher")]
    for worker in workers:
        worker.start_role(worker.name, Pretender, deadline=5).result()
    timeline = Timeline(folder / "timeline.json", most_bytes=TIMELINE)
    files = [
        Console(config.logging, steps=700, out=Nowhere()),
        MetricsWriter(folder / "metrics.jsonl"),
        JsonLines(folder / "samples.jsonl"),
        JsonLines(folder / "batches.jsonl"),
        timeline,
    ]
    console, metrics, samples, batches, _ = files
    saves = SimpleNamespace(
        row=lambda row: None,
        written=[],
        due=lambda step: False,
        folder=lambda step: None,
        begin=lambda *_: None,
    )
    job = SimpleNamespace(
        config=config,
        held_out=(),
        judge=lambda text, prompt: 1.0,
        tokenizer=None,
        train=SimpleNamespace(epoch_prompts=40, source_name=lambda position: ""),
    )
    plan = SimpleNamespace(peaks={"actor": 20}, pools=(), inputs=SimpleNamespace(on_cpu=True))
    folder = SimpleNamespace(step=0, changed=())
    run = Run(job, plan, folder, console, Silent(), SimpleNamespace(asked=False), on_row, 0.0)
    run.worker_group = SimpleNamespace(
        peaks=lambda: {"actor": 10}, compiled=Compilations, ending=None, stop_asked=None
    )
    run.metrics, run.samples, run.timeline, run.trackers = metrics, samples, timeline, None
    run.checkpoints, run.profile, run.scorers = saves, SimpleNamespace(steps=()), {}
    run.batches, run.stream = batches, None
    run._planned, run._pools, run._peaks_from, run._held = plan.peaks, {}, "arrays", 3
    handles = {each.name: each.handle(each.name) for each in workers}
    calls = Calls(config, handles, recorders=(timeline.record,))
    sources = Sources(config, lambda index: PROMPTS, {}, calls.call, calls.wait)
    loop = Loop(sources, calls, run, saves)

    def close():
        for file in files:
            file.close()
        assert all(worker.stop(5) for worker in workers)

    return loop, close


class Silent:
    """A notifier that keeps nothing."""

    def __call__(self, text):
        pass

    to_log = __call__


class Nowhere(io.StringIO):
    """An output that keeps nothing."""

    def write(self, text):
        return len(text)


def test_resuming_reads_one_row_at_a_time(tmp_path):
    """The memory that it takes is less than a tenth of the file."""
    path = tmp_path / "metrics.jsonl"
    row = {f"reward/r{i}/mean": i / 7 for i in range(20)}
    lines = [json.dumps({"step": step} | row) + "\n" for step in range(3000)]
    path.write_text("".join(lines))
    assert path.stat().st_size > 1_500_000
    tracemalloc.start()
    with MetricsWriter(path, after=2500) as writer:
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 10
    assert (writer.first["step"], writer.last["step"]) == (0, 2500)
    assert path.read_text() == "".join(lines[:2501])


# With models: what XLA and JAX keep counts too.

ALONE = ("mesh=actor+rollout+teacher=1", "eval.every=0", "checkpoint.every=0")
WARM, SEEN = 60, 11
"""Steps in which caches fill, and those over whose least use each count is taken: what is in flight
differs from step to step.
"""


def test_a_run_keeps_nothing_of_a_step(tmp_path):
    """The process grows by less than 1000 bytes a step, where a row alone would take 3000.

    The prompts repeat, because the cache of tokenizers grows up to 10,000 texts a thread.
    """
    steps = 260
    first = WARM + SEEN
    ends = tuple(first + (steps - 1 - first) * part // 3 for part in range(4))
    used = {end: [] for end in ends}

    def on_step(row):
        for end in ends:
            if end - SEEN < row["step"] <= end:
                gc.collect()
                used[end].append(in_use())

    student = save_model(tmp_path / "student", 32, 1, seed=0)
    teacher = save_model(tmp_path / "teacher", 48, 1, seed=1, rows=272)
    models = [f"student.model={student}", f"teacher.model={teacher}"]
    models += ["data.train=arithmetic:size=24", "batch_size=2", "max_new_tokens=4"]
    plain = [*SHORT, *models, f"run_dir={tmp_path / 'run'}", f"steps={steps}", "logging.every=100"]
    train(Config.load("builtin:quickstart", [*plain, *ALONE]), on_step)
    assert [len(taken) for taken in used.values()] == [SEEN] * len(ends)
    least = [min(taken) for taken in used.values()]
    grown = [(b - a) / (ends[2] - ends[1]) for a, b in zip(least, least[1:], strict=False)]
    assert min(grown) < 1000  # what a step keeps, each window has; other tests' threads grow once


def in_use():
    """Bytes that the process has allocated: those of Python and of its libraries."""
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    fields = {"_fields_": [(name, ctypes.c_size_t) for name in names.split()]}
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = type("mallinfo2", (ctypes.Structure,), fields)
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd
