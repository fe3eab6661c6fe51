"""`schedule=streaming`: batches have their own prompts in order, no token is older than allowed,
and what is being sampled when a run ends goes on when it resumes."""

from __future__ import annotations

import os
import shutil
import signal
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from cases import and_slow, needs_ray
from delays import at_random
from runs import (
    CONSTANT,
    EPISODES,
    GSPO,
    QUICK,
    SHORT,
    environment,
    numbers,
    save_model,
    save_pair,
    start,
    wait_for,
    weights,
)

import jaxrl
from jaxrl import Config, UserError, train
from jaxrl.checkpoint.writer import load_rollout
from jaxrl.models.experts import Experts
from jaxrl.roles.rollout import Sampler
from jaxrl.run.record import read_record
from jaxrl.sampling.engine import CACHE
from jaxrl.sampling.partial_completion import RandomKey, Reply, SampleRequest
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.types import Completion, Prompt, Rollout, Turn

pytestmark = pytest.mark.usefixtures("shared_programs")

SLOW = ["rollout.slots=4", "rollout.launch_tokens=1", "max_new_tokens=12"]
"""Many launches a batch, so that new weights come in the midst of some."""
STREAMS = ["schedule=streaming", "staleness=2", *SLOW]
PLAIN = ["steps=5", "eval.every=2", "eval.prompts=6", "checkpoint.every=2"]
CASES = {
    "gspo": [*GSPO, "mesh=actor=1,rollout=1"],
    "gkd": ["mesh=actor=1,rollout=1,teacher=1", "offload.params=true"],
    "pages": [*GSPO, "mesh=actor=1,rollout=1", "rollout.cache_tokens=64"],
    "mixed": ["mesh=actor=1,rollout=1,teacher=1", "distill.on_policy_fraction=0.5"],
    "adapters": [*GSPO, "mesh=actor=1,rollout=1", "student.lora.rank=4"],
    "several": ["mesh=actor=2,rollout=2,teacher=2", "actor.minibatches=2"],
    "mixture": [
        *(*GSPO, "mesh=actor=1,rollout=1", "student.model=FOLDER/mixture"),
        "policy.router_replay=true",
    ],
    "episodes": [*EPISODES, "max_new_tokens=32"],
    "followed": ["mesh=actor=1,rollout=1,teacher=1", "teacher.model=policy"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "mixture", 32, 1, seed=0, experts=Experts(4, 2, True, dense_width=16))
    return save_pair(folder, layers=1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, Rollout]:
    """Step -> the batch that the rollout finished for it."""
    batches: dict[int, Rollout] = {}
    real = Sampler._finished

    def finished(self: Sampler, step: int) -> Rollout | None:
        batch = real(self, step)
        if batch is not None:
            batches[step] = batch
        return batch

    monkeypatch.setattr(Sampler, "_finished", finished)
    return batches


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every launch what there is of each completion can be told. As weights have arrived, the
    devices hold neither the former ones nor caches."""
    work_on, take = Sampler._work_on, Sampler._take
    former: list[Any] = []

    def look(self: Sampler) -> None:
        time.sleep(0.005)  # an update takes less than a batch: weights come amid some
        work_on(self)
        for _, futures, _ in self._begun.values():
            assert len(self._stream.so_far(futures)) == len(futures)

    def arrive(self: Sampler, params: Any) -> None:
        assert not self._streams or not any(old() is not None for old in former)
        assert CACHE not in self._stream.ledger._held
        take(self, params)
        former[:] = map(weakref.ref, jax.tree.leaves(self.params))

    monkeypatch.setattr(Sampler, "_work_on", look)
    monkeypatch.setattr(Sampler, "_take", arrive)


def config(models: list[str], run_dir: Path, case: str, *overrides: str) -> Config:
    folder = models[0].partition("=")[2].removesuffix("/student")
    own = [key.replace("FOLDER", folder) for key in CASES[case]]
    keys = [*models, *SHORT, *CONSTANT, *PLAIN, *own, f"run_dir={run_dir}", *overrides]
    return Config.load(QUICK[1], keys)


def assert_bounded(batches: dict[int, Rollout], staleness: int) -> None:
    """Each token is of a version that the batch may have, and they only get newer."""
    for step, batch in batches.items():
        for one in batch.completions:
            ages = step - one.token_versions
            assert len(ages) == len(one.tokens)
            assert (ages >= 0).all() and (ages <= staleness).all() and (np.diff(ages) <= 0).all()
        assert batch.policy_version == min(one.versions[0][1] for one in batch.completions)


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("case", and_slow(["gspo", "gkd"], [*CASES][2:]))
def test_batches_have_their_prompts_and_no_token_is_too_old(
    models: list[str],
    tmp_path: Path,
    made: dict[int, Rollout],
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = train(config(models, tmp_path / "run", case, *STREAMS))
    rows = result.metrics
    assert [row["step"] for row in rows] == list(range(6))
    assert_bounded(made, 2)
    for row in rows[1:]:
        batch = made.get(row["step"] - 1)
        if batch is None:
            continue  # of the data
        ages = [row["step"] - 1 - one.token_versions for one in batch.completions]
        assert row["stream/age"] == pytest.approx(np.concatenate(ages).mean())
        assert row["staleness"] == max(map(np.max, ages)) <= 2
    assert 1 <= max(row.get("staleness", 0) for row in rows) <= 2  # as fast as the rollout is
    last = rows[-1]
    assert last["total/rollout/device_s"] <= last["total/device_s"] / 2
    assert case == "mixed" or sum(row.get("stream/read_again", 0) for row in rows) > 0
    assert len([row for row in rows if "eval/accuracy" in row]) == 4
    whole: list[Rollout] = []
    make_batch = Sampler.make_batch
    monkeypatch.setattr(
        Sampler, "make_batch", lambda *args: whole.append(made := make_batch(*args)) or made
    )
    serial = train(config(models, tmp_path / "serial", case, *SLOW))
    for step, batch in zip(sorted(made), whole, strict=True):
        assert [prompt.id for prompt in made[step].prompts] == [x.id for x in batch.prompts]
    first = "distill/divergence" if case == "gkd" else "loss"
    if config(models, tmp_path, case, *STREAMS).parts > 1:  # other minibatches
        first = "rollout/completion_tokens_mean"
    assert rows[1][first] == pytest.approx(serial.metrics[1][first], rel=1e-4)  # of version 0


def assert_goes_on(begun: dict[int, list[Completion]], made: dict[int, Rollout]) -> None:
    for step, completions in begun.items():
        for before, after in zip(completions, made[step].completions, strict=True):
            n = len(before.tokens)
            assert tuple(before.tokens) == tuple(after.tokens[:n])
            np.testing.assert_array_equal(before.logprobs, after.logprobs[:n])
            assert after.token_versions[:n].tolist() == before.token_versions.tolist()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Completion]]:
    """Step -> what a batch was begun with."""
    found: dict[int, list[Completion]] = {}
    real = Sampler.generate

    def generate(self: Sampler, *args: Any, begun: Any = None, **kwargs: Any) -> Any:
        if begun is not None:
            found[kwargs["step"]] = list(begun.completions)
        return real(self, *args, begun=begun, **kwargs)

    monkeypatch.setattr(Sampler, "generate", generate)
    return found


def test_what_is_unfinished_as_a_run_stops_goes_on(
    models: list[str],
    tmp_path: Path,
    made: dict[int, Rollout],
    begun: dict[int, list[Completion]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that was sampled is lost: the tokens, their log-probs and versions are kept."""
    work_on = Sampler._work_on

    def slowly(self: Sampler) -> None:
        time.sleep(0.01)
        work_on(self)

    monkeypatch.setattr(Sampler, "_work_on", slowly)

    def stop(row: dict[str, float]) -> None:
        if row["step"] == 2:
            raise jaxrl.StopTraining("enough")

    asked = config(models, tmp_path / "run", "gspo", *STREAMS, "max_new_tokens=24")
    stopped = train(asked, on_step=stop)
    assert stopped.stopped is not None and not begun
    trained = stopped.metrics[-1]["step"]
    result = train(asked)
    assert [row["step"] for row in result.metrics] == list(range(6))
    assert begun and min(begun) >= trained and max(begun) <= trained + 2
    reasons = {one.finish_reason for batch in begun.values() for one in batch}
    assert "unfinished" in reasons
    assert sum(len(one.tokens) for batch in begun.values() for one in batch) > 0
    assert_goes_on(begun, made)
    assert_bounded(made, 2)


class Answering:
    """An environment that answers every turn with one token."""

    def __init__(self, token: int):
        self.token, self.ends = token, 0

    def answer(self, text: str, *, eos: int | None, length: int) -> Future[Reply]:
        reply: Future[Reply] = Future()
        reply.set_result(Reply((self.token,), reward=0.5))
        return reply

    def end(self) -> None:
        self.ends += 1

    def again(self) -> Answering:
        self.end()
        return Answering(self.token)


def test_an_episode_goes_on_where_its_environment_answers_as_it_did() -> None:
    """The others begin again from their prompts, of a prompt that has changed also those that had
    ended; which is said once."""
    turns = Turn("assistant", 2, "", 0.5), Turn("environment", 1, "")
    log = np.zeros(4, np.float32)
    half = Completion((5, 9, 7, 6), log, log, "unfinished", turns=turns)
    ended, waits = (
        replace(half, finish_reason="stop"),
        Completion((), log[:0], log[:0], "unfinished"),
    )
    cases = [  # the prompt now, what there is, the answer now, and whether it counts
        *[((1, 2), half, 7, True), ((1, 2), half, 8, False), ((1, 3), half, 7, False)],
        *[((1, 2), ended, 8, True), ((1, 3), ended, 7, False), ((1, 2), waits, 8, True)],
    ]
    sampling = SamplingParams(max_new_tokens=8, eos_ids=(9,))
    requests = [
        SampleRequest(prompt, sampling, RandomKey(0), 8, environment=Answering(token))
        for prompt, _, token, _ in cases
    ]
    environment = SimpleNamespace(name="a.py:A")
    sampler: Any = SimpleNamespace(
        **{"_episodes": True, "_said_so": False, "notes": [], "_stream": SimpleNamespace()},
        config=SimpleNamespace(environment=environment),
    )
    sampler._stream.tokenizer = None
    begun: Any = SimpleNamespace(
        completions=[case[1] for case in cases],
        prompts=[Prompt(i, (1, 2), "") for i in range(len(cases))],
    )
    for _ in range(2):
        asked, so_far = Sampler._go_on(sampler, [*requests], begun)
        assert so_far == [completion if counts else None for _, completion, _, counts in cases]
    assert len(sampler.notes) == 1 and "a.py:A does not answer as it did" in sampler.notes[0]
    others = [i for i, (x, y) in enumerate(zip(asked, requests, strict=True)) if x is not y]
    assert others == [1] and isinstance(requests[1].environment, Answering)
    assert requests[1].environment.ends == 2  # once each time
    assert asked[1].environment is not requests[1].environment


@pytest.mark.slow
def test_episodes_that_draw_begin_again(
    models: list[str],
    tmp_path: Path,
    made: dict[int, Rollout],
    begun: dict[int, list[Completion]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a run resumes without what they said."""
    at_random(monkeypatch, 1)

    def stop(row: dict[str, float]) -> None:
        if row["step"] == 2:
            raise jaxrl.StopTraining("enough")

    keys = [*STREAMS, "max_new_tokens=32", "environment.arguments.draws=true"]
    asked = config(models, tmp_path / "run", "episodes", *keys)
    assert train(asked, on_step=stop).stopped is not None
    shutil.rmtree(tmp_path / "run" / "episodes")
    result = train(asked)
    assert [row["step"] for row in result.metrics] == list(range(6))
    assert any(one.turns for batch in begun.values() for one in batch)
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert log.count("does not answer as it did before the run resumed") == 1
    assert_bounded(made, 2)


def of_the_steps(rows: list[Any]) -> list[dict[str, float]]:
    """What depends neither on the clock nor on what was sampled again since a checkpoint."""
    changing = "rollout/decode_steps", "stream/read_again"
    return [{k: v for k, v in row.items() if k not in changing} for row in numbers(rows)]


@pytest.mark.parametrize(
    "case", and_slow(["episodes"], ["gspo", "gkd", "pages", "adapters", "several", "mixture"])
)
def test_a_killed_run_comes_to_the_same_by_its_record(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Up to the last event that it has recorded, whatever took how long, and also where what it had
    recorded is cut anywhere."""
    keys = [*STREAMS, "max_new_tokens=20", "steps=6", "checkpoint.keep_last=9"]
    if case == "episodes":
        keys.append("max_new_tokens=32")
    with monkeypatch.context() as patch:
        at_random(patch, 1)
        whole = train(config(models, tmp_path / "run", case, *keys))
    lines = (tmp_path / "run" / "stream.jsonl").read_bytes().splitlines(keepends=True)
    events = read_record(tmp_path / "run")
    assert len(events) == len(lines) and [e for e in events if e.call == "save"]
    assert sum(event.launches for event in events) > 20
    saved = [event[:2] for event in events].index(("save", 2)) + 1
    for seed, end in ((2, len(lines)), (3, (saved + len(lines)) // 2)):
        run = tmp_path / f"killed_{seed}"
        shutil.copytree(tmp_path / "run", run)
        shutil.rmtree(run / "final")
        for step in (4, 6):
            shutil.rmtree(run / "checkpoints" / str(step))
        (run / "stream.jsonl").write_bytes(b"".join(lines[:end]) + lines[0][:5])
        with monkeypatch.context() as patch:
            at_random(patch, seed)
            resumed = train(config(models, run, case, *keys))
        assert read_record(run)[:end] == events[:end]
        if end == len(lines):
            assert of_the_steps(resumed.metrics) == of_the_steps(whole.metrics)
            assert weights(run) == weights(tmp_path / "run")
        assert [row["step"] for row in resumed.metrics] == list(range(7))


STOPS = """
import time
from pathlib import Path
import jaxrl

def stops(completions):
    here = Path(__file__).parent
    with (here / "judged").open("a") as file:
        file.write("x" * len(completions))
    if len((here / "judged").read_text()) > MOST and not (here / "go_on").exists():
        time.sleep(1)  # meanwhile what was judged before is trained
        raise jaxrl.StopTraining("enough")
    return [float(len(c)) + i for i, c in enumerate(completions)]
"""


def test_a_run_that_code_ends_amid_the_minibatches_of_a_batch_goes_on(
    models: list[str], tmp_path: Path
) -> None:
    """From the checkpoint before, and no row is of a batch that is half trained."""
    asked = config(models, tmp_path / "run", "gspo", *STREAMS)
    rows = asked.batch_rows
    assert asked.parts > 1
    (tmp_path / "stops.py").write_text(STOPS.replace("MOST", str(2 * rows + rows // asked.parts)))
    keys = [*STREAMS, f"reward.functions=[{tmp_path}/stops.py:stops]", "checkpoint.every=9"]
    asked = config(models, tmp_path / "run", "gspo", *keys)
    result = train(asked)
    assert result.stopped is not None and [row["step"] for row in result.metrics] == [0, 1, 2]
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "amid the minibatches of step 3" in log
    assert not (tmp_path / "run" / "final").exists()
    (tmp_path / "go_on").touch()
    again = train(asked)
    assert [row["step"] for row in again.metrics] == list(range(6))
    assert again.metrics[-1]["optimizer_step"] == 5 * asked.minibatches


@pytest.mark.slow
def test_a_killed_run_goes_on(models: list[str], tmp_path: Path) -> None:
    keys = [*CASES["gspo"], *STREAMS, "checkpoint.every=1", "steps=8"]
    run = tmp_path / "run"
    for step in (2, 4):
        process = start(models, run, *keys)
        wait_for(run / "checkpoints" / str(step) / "manifest.json", process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    process = start(models, run, *keys)
    assert process.wait(300) == 0
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(9))
    assert max(row.get("staleness", 0) for row in rows) <= 2


@pytest.mark.slow
@pytest.mark.ray
def test_processes_stream(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_ray()
    from jaxrl.runtime.ray.connect import join
    from jaxrl.runtime.ray.local_cluster import leave

    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    leave()
    join(None, 8)
    try:
        asked = config(models, tmp_path / "run", "gkd", *STREAMS, "launcher=ray", "steps=8")

        def disturb(row: dict[str, float]) -> None:
            if row["step"] == 2:  # amid batches that go on between the loads of weights
                here = psutil.Process().children(recursive=True)
                (rollout,) = [x for x in here if x.name().startswith("ray::jaxrl:roll")]
                rollout.kill()
            if row["step"] == 4:
                raise jaxrl.StopTraining("enough")

        assert train(asked, on_step=disturb).stopped is not None
        log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
        assert "restarting rollout (1 of 3)" in log and "rollout is back" in log
        result = train(asked)
    finally:
        leave()
    assert [row["step"] for row in result.metrics] == list(range(9))
    assert 1 <= max(row.get("staleness", 0) for row in result.metrics) <= 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["mesh=actor+rollout=1"], "shares its devices with actor"),
        (["mesh=actor=1,rollout+teacher=1"], "shares its devices with teacher"),
        (["staleness=9"], "staleness"),
        (["schedule=serial"], "staleness=2"),
        (["policy.dynamic_sampling=refill", *GSPO], "dynamic_sampling=refill"),
    ],
)
def test_what_does_not_go_together_is_refused(
    models: list[str], tmp_path: Path, keys: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words) as error:
        jaxrl.dry_run(config(models, tmp_path / "run", "gkd", *STREAMS, *keys))
    assert "schedule" in str(error.value) or "staleness" in str(error.value)


def test_a_file_keeps_what_is_unfinished(models: list[str], tmp_path: Path) -> None:
    """Through the file of a checkpoint, with the versions of each token."""
    from jaxrl.checkpoint.writer import save_rollout
    from jaxrl.data.batch import make_rollout

    prompts = [Prompt(i, (5, 6 + i), f"{i}") for i in range(2)]
    log = np.linspace(-1, 0, 3, dtype=np.float32)
    experts = np.arange(4 * 2, dtype=np.int8).reshape(4, 1, 2)
    versions = (0, 3), (2, 4)
    half = Completion((7, 8, 9), log, log, "unfinished", versions=versions, experts=experts)
    none = Completion((), log[:0], log[:0], "unfinished")
    packing = {"pad_id": 0, "max_prompt_tokens": 4, "max_new_tokens": 8}
    rollout = make_rollout(prompts, [[half], [none]], policy_version=3, **packing)
    save_rollout(tmp_path / "batch.npz", rollout)
    again = load_rollout(tmp_path / "batch.npz", prompts, packing)
    for one, two in zip(rollout.completions, again.completions, strict=True):
        assert (one.tokens, one.versions, one.finish_reason) == (
            two.tokens,
            two.versions,
            two.finish_reason,
        )
        np.testing.assert_array_equal(one.logprobs, two.logprobs)
    np.testing.assert_array_equal(again.completions[0].experts, experts)
    assert (again.completions[1].experts == -1).all()
