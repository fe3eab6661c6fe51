"""A batch by hand: a session computes the bits of `train`, whatever happens in its cells."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import and_slow, needs_ray
from one_layer import cut_models, take_cut_models
from pages import DOCS, blocks
from runs import CONSTANT, GSPO, QUICK, SHORT, environment, numbers, save_pair, weights

import jaxrl
from jaxrl import Config, Result, RunError, UserError, train
from jaxrl.algorithms.advantages import group_advantages
from jaxrl.process.compilations import compilations
from jaxrl.run import session as module
from jaxrl.run.batch_by_hand import BatchByHand
from jaxrl.run.session import RunSession
from jaxrl.telemetry.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("shared_programs")

PLAIN = ["steps=3", "eval.every=2", "eval.prompts=6", "eval.temperature=1", "checkpoint.every=0"]
HERE = "mesh=actor+rollout=1"
CASES = {
    "gspo": [*GSPO, HERE],
    "gkd": ["mesh=actor=1,rollout=1,teacher=1", "distill.on_policy_fraction=0.5"],
    "gspo-8": [*GSPO, "policy.kl_coef=0.1", "mesh=actor=4,rollout=2,reference=2"],
    "gkd-8": ["mesh=actor=2,rollout=2,teacher=4", "teacher.num_microbatches=2"],
    "grpo-4-updates": [*GSPO, "algorithm=grpo", "actor.minibatches=3", "policy.kl_coef=0.1", HERE],
    "refill": [*GSPO, "algorithm=dapo", "policy.max_refills=1", HERE],
    "policy-as-teacher": ["teacher.model=policy", "mesh=actor+rollout+teacher=1"],
    "opd": [
        *(key for key in GSPO if key != "teacher.model=null"),
        "algorithm=gspo_token",
        "policy.opd_coef=0.5",
        "distill.signal=sampled",
        "distill.jsd_beta=1",
        "mesh=actor+rollout+teacher=1",
    ],
    "sft": ["algorithm=sft", "teacher.model=null", HERE],
    "seq-kd": [
        "distill.seq_kd=true",
        "distill.on_policy_fraction=0.5",
        "mesh=actor+rollout+teacher=1",
    ],
}
"""What is learned, and where."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_pair(tmp_path_factory.mktemp("models"), layers=1)


def config(models: list[str], run_dir: Path, case: str, *overrides: str) -> Config:
    keys = [*models, *SHORT, *CONSTANT, *PLAIN, *CASES[case], f"run_dir={run_dir}", *overrides]
    return Config.load(QUICK[1], keys)


@pytest.fixture(scope="module")
def whole(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a case, its run by `train`: once for all tests."""
    done: dict[str, Result] = {}

    def run(case: str) -> Result:
        if case not in done:
            done[case] = train(config(models, tmp_path_factory.mktemp(case) / "run", case))
        return done[case]

    return run


def assert_same(run_dir: Path, expected: Result) -> None:
    assert numbers(read_metrics(run_dir)) == numbers(expected)
    assert weights(run_dir) == weights(expected.run_dir)


def interrupted_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Ctrl-C comes while this function waits, the next time that it is called."""
    real = getattr(owner, name)

    def interrupted(*arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **more)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    "case", and_slow(["gspo", "gkd"], [name for name in CASES if name not in ("gspo", "gkd")])
)
def test_by_hand_are_the_bits_of_train(
    models: list[str], tmp_path: Path, whole: Any, case: str
) -> None:
    """Also where everything of a batch is looked at, and after a resume in each direction."""
    expected = whole(case)
    with jaxrl.session(config(models, tmp_path / "run", case)) as s:
        assert s.step == 0 and s.metrics[0]["step"] == 0
        for prompts in s.prompts(steps=2):
            batch = s.score(s.sample(prompts))
            look(s, batch)
            assert s.update(batch) == s.metrics[-1]
        held_out = s.evaluate()
        row = expected.metrics[2]
        assert {name: row[name] for name in held_out} == held_out  # `eval.every=2`
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    train(config(models, tmp_path / "run", case))
    assert_same(tmp_path / "run", expected)

    train(config(models, tmp_path / "other", case, "steps=2"))
    with jaxrl.session(config(models, tmp_path / "other", case)) as s:
        (prompts,) = s.prompts()
        assert prompts.step == 3
        s.update(s.score(s.sample(prompts)))
        assert list(s.prompts()) == []
    assert_same(tmp_path / "other", expected)


def look(s: RunSession, batch: BatchByHand) -> None:
    """Reads everything of a scored batch, and checks what of it is known otherwise."""
    rows, width = batch.tokens.shape
    mask = batch.loss_mask
    for name in ("mask", "loss_mask", "logprobs", "learner_logprobs", "entropy", "ratio"):
        array = getattr(batch, name)
        assert array is None or array.shape == (rows, width)
    assert len(batch.texts) == len(batch.prompts) == rows and (batch.mask | ~mask).all()
    if batch.ratio is not None:  # the same weights, in programs of two roles
        np.testing.assert_allclose(batch.ratio, 1, atol=1e-3)
        np.testing.assert_allclose(batch.learner_logprobs, batch.logprobs, atol=1e-3)
    assert (batch.entropy[mask] > 0).all() and (batch.entropy[~batch.mask] == 0).all()
    if batch.rewards:
        assert batch.rewards["length"].tolist() == [float(len(text)) for text in batch.texts]
        total = sum(batch.rewards.values())  # with dapo's penalty of what is too long
        assert batch.reward_total.tolist() == total.tolist()
        assert batch.advantages.shape == (rows,)
    assert f"step {s.step + 1}: {rows} completions" in repr(batch)
    assert repr(batch.row(-1)).count("\n") == 1 + len(batch.rollout.completions[-1].tokens)


def test_the_divergence_of_tokens_is_that_of_the_metrics(models: list[str], tmp_path: Path) -> None:
    with jaxrl.session(
        config(models, tmp_path / "run", "gkd", "distill.on_policy_fraction=1")
    ) as s:
        batch = s.score(s.sample(next(s.prompts())))
        divergence, before = batch.divergence, batch.learner_logprobs
        row = s.update(batch)
        mean = divergence.sum() / batch.loss_mask.sum()
        assert mean == pytest.approx(row["distill/divergence"], rel=1e-5)
        assert batch.divergence is not None and (batch.learner_logprobs != before).any()
        assert "divergence" in batch.row(0) and "trained" in repr(batch)
        late = s.score(s.sample(next(s.prompts())))
        s.update(late)
        with pytest.raises(UserError, match="divergence is that of the policy before the update"):
            _ = late.divergence
        assert "divergence" not in late.row(0) and "ratio" in late.row(0)
        assert batch.divergence.sum() == divergence.sum()


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def rewarded(models: list[str], run_dir: Path, *overrides: str) -> Config:
    names = ["reward.functions=[python:length]", "reward.workers=1"]
    return config(models, run_dir, "gspo", *names, *overrides)


def test_an_error_in_a_cell_leaves_the_session_as_it_was(
    models: list[str], tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls out of order, a reward that fails, Ctrl-C while it samples and trains: the bits are
    those of an undisturbed run, also of functions that are the same by another name."""
    expected = whole("gspo")
    asked = config(models, tmp_path / "run", "gspo")
    s = jaxrl.session(asked)
    prompts = next(s.prompts())
    with pytest.raises(UserError, match=r"s.sample\(\['2\+2='\] \(list\)\): give what s.prompts"):
        s.sample(["2+2="])
    with pytest.raises(UserError, match="steps=0: must be at least 1"):
        s.prompts(steps=0)
    with pytest.raises(
        UserError, match="s.sample: step 3 comes after step 1, which is not trained"
    ):
        s.sample(list(s.prompts())[2])
    with pytest.raises(UserError, match="nothing is trained yet"):
        s.save()
    interrupted_once(monkeypatch, s, "_join")
    with pytest.raises(KeyboardInterrupt):
        s.sample(prompts)
    sampled = s.sample(prompts)
    with pytest.raises(UserError, match=r"not scored yet: batch = s.score\(batch\)"):
        s.update(sampled)
    with pytest.raises(UserError, match="not scored yet"):
        _ = sampled.advantages

    def length(completions: list[str]) -> list[float]:
        raise OSError("no network")

    assert s.rewards == ()
    real = s.config.reward.functions
    with pytest.raises(UserError, match="rewards: 'length' is no function"):
        s.rewards = ["length"]
    s.rewards = [length]
    assert len(s.config.reward.functions) == 2
    with pytest.raises(RunError, match="(?s)length.*no network"):
        s.score(sampled)
    s.rewards = []
    assert s.config.reward.functions == real
    batch = s.score(sampled)
    with pytest.raises(UserError, match=r"reward 'lenght' \(did you mean length\?\)"):
        batch.rewards = {"lenght": [0.0] * len(batch.texts)}
    with pytest.raises(UserError, match=r"batch.advantages has the shape \[2\]; it must be \[24\]"):
        batch.advantages = [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        batch.advantages[0] = 1
    batch.advantages = batch.advantages  # what they are already
    interrupted_once(monkeypatch, module, "wait_for")
    with pytest.raises(KeyboardInterrupt):
        s.update(batch)
    with pytest.raises(UserError, match="s.update: step 1 is trained already"):
        s.update(batch)
    assert s.step == 1
    with pytest.raises(UserError, match="batch.rewards: step 1 is trained already"):
        batch.rewards = {}
    assert s.save() == tmp_path / "run" / "checkpoints" / "1" == s.save()
    with pytest.raises(
        UserError, match=r"in use by pid .* \(this process: `close\(\)` ends a session\)"
    ):
        jaxrl.session(asked)
    exported = s.export(tmp_path / "model")
    with pytest.raises(UserError, match="model is not empty: name a new folder"):
        s.export(exported)
    (first,), (again,) = s.generate(["2+2="])[0], s.generate(["2+2="])[0]
    assert first.tokens == again.tokens and jaxrl.load_model(exported).config.n_layers == 1
    with pytest.raises(UserError, match="give a list of prompts"):
        s.generate("2+2=")
    with pytest.raises(UserError, match="prompt 1 is longer than max_prompt_tokens=24"):
        s.generate(["2+2=", "2+2=" * 24])
    before = compilations()
    for prompts in s.prompts():
        s.update(s.score(s.sample(prompts)))
    assert compilations().since(before).programs == 0
    s.close()
    s.close()
    with pytest.raises(UserError, match="the session is closed"):
        s.prompts()
    assert_same(tmp_path / "run", expected)


def test_rewards_and_advantages_that_are_changed_are_learned(
    models: list[str], tmp_path: Path
) -> None:
    """Functions, numbers, advantages; the run resumes with the functions that it had at last."""

    def vowels(completions: list[str]) -> list[float]:
        return [float(sum(text.count(c) for c in "aeiou")) for text in completions]

    asked = rewarded(models, tmp_path / "run")
    with jaxrl.session(asked, rewards=[length]) as s:
        assert s.rewards == (length,)
        sampled = s.sample(next(s.prompts()))
        first = s.score(sampled)
        s.rewards = [length, vowels]
        batch = s.score(sampled)
        assert list(batch.rewards) == ["length", "vowels"]
        assert batch.rewards["length"].tolist() == first.rewards["length"].tolist()
        total = np.array(length(batch.texts)) + vowels(batch.texts)
        assert batch.reward_total.tolist() == total.tolist()

        given = np.arange(len(batch.texts), dtype=float) ** 2
        given[0] = np.nan
        batch.rewards = {"vowels": given}
        total = np.array(length(batch.texts)) + np.nan_to_num(given)  # `reward.missing=ignore`
        np.testing.assert_array_equal(batch.reward_total, total)
        expected = group_advantages(total, batch.group_ids)
        np.testing.assert_allclose(batch.advantages, expected, atol=1e-6)
        assert np.isnan(first.reward_total).sum() == 0

        batch.advantages = np.zeros(len(batch.texts))
        row = s.update(batch)
        assert row["reward/mean"] == pytest.approx(total.mean())
        assert row["reward/none"] == 0 and row["actor/empty_updates"] == 0
        np.testing.assert_allclose(batch.ratio, 1, atol=1e-3)  # nothing was learned
        batch = s.score(s.sample(next(s.prompts())))
        batch.advantages = np.where(np.arange(len(batch.texts)) == 0, 1.0, 0.0)
        s.update(batch)
        assert (batch.ratio[0] > 1).any()
    with pytest.raises(UserError, match="(?s)another config.*reward.functions"):
        train(asked, rewards=[length])
    again = train(asked, rewards=[length, vowels])
    assert again.metrics[-1]["step"] == 3 and "reward/vowels/mean" in again.metrics[-1]


@pytest.mark.parametrize("schedule", ["one_step_off", "two_step_off"])
def test_other_schedules_are_refused(models: list[str], tmp_path: Path, schedule: str) -> None:
    with pytest.raises(UserError, match=f"schedule={schedule}: a session works one batch after"):
        jaxrl.session(config(models, tmp_path / "run", "gspo", f"schedule={schedule}"))
    assert not (tmp_path / "run").exists()


def test_an_error_of_the_body_counts_and_what_was_trained_is_saved(
    models: list[str], tmp_path: Path, whole: Any
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        jaxrl.session(config(models, tmp_path / "run", "gspo")) as s,
    ):
        for prompts in s.prompts():
            s.update(s.score(s.sample(prompts)))
            1 / 0  # noqa: B018
    train(config(models, tmp_path / "run", "gspo"))
    assert_same(tmp_path / "run", whole("gspo"))


OPEN = """
from concurrent.futures import ThreadPoolExecutor
from jaxrl.run import session

class Broken:
    _run = type("Run", (), {"notify": print})
    def close(self):
        session._open.remove(self)
        raise OSError("no space")

class Open(Broken):
    def close(self):
        session._open.remove(self)
        print(ThreadPoolExecutor(1).submit(lambda: "saved").result())

session._open += [Open(), Broken()]
1 / 0
"""


def end_of(script: str) -> str:
    """Returns what a script that fails at its end prints until Python has ended."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )
    assert done.stderr.strip().endswith("ZeroDivisionError: division by zero"), done.stderr
    return done.stdout


def test_sessions_that_a_script_leaves_open_end_while_threads_can_begin() -> None:
    """Which writing a checkpoint needs. Pools of threads end before what `atexit` has."""
    broken, saved = end_of(OPEN).splitlines()
    assert broken.endswith("could not be ended: no space") and saved == "saved"


LEFT = """
import jaxrl

s = jaxrl.session({path!r})
s.update(s.score(s.sample(next(s.prompts()))))
1 / 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_a_session_left_open_says_whether_its_steps_are_saved(
    models: list[str], tmp_path: Path, kept: bool
) -> None:
    run = tmp_path / "run"
    (tmp_path / "keys.yaml").write_text(config(models, run, "gspo").dump())
    if not kept:  # nothing can be written there
        run.mkdir()
        (run / "checkpoints").write_text("")
    told = end_of(LEFT.format(path=str(tmp_path / "keys.yaml")))
    ended = f"saved in {run}" if kept else "nothing is saved"
    assert f"the session ended at step 1 of 3; {ended}" in told
    assert (run / "checkpoints" / "1" / "manifest.json").is_file() == kept


def stops(completions: list[str]) -> list[float]:
    raise jaxrl.StopTraining("the judge has no budget")


def test_stop_training_ends_the_block_as_it_ends_a_run(
    models: list[str], tmp_path: Path, whole: Any
) -> None:
    """Raised by a reward function, or in the block; `train` goes on from there."""
    for asked in (True, False):
        run = tmp_path / str(asked)
        with jaxrl.session(config(models, run, "gspo")) as s:
            for prompts in s.prompts():
                batch = s.score(s.sample(prompts))
                s.update(batch)
                sampled = s.sample(next(s.prompts()))
                if asked:
                    s.rewards = [stops]
                    with pytest.raises(jaxrl.StopTraining, match="no budget"):
                        s.score(sampled)
                    s.rewards = []
                    assert [p.step for p in s.prompts()] == [2, 3]  # the session is as it was
                raise jaxrl.StopTraining("enough")
        stopped = Result(run).stopped
        assert stopped is not None and stopped["step"] == 1 and stopped["message"] == "enough"
        assert (run / "final" / "config.json").is_file()
        train(config(models, run, "gspo"))
        assert_same(run, whole("gspo"))


@pytest.mark.slow
@pytest.mark.ray
def test_processes_compute_the_bits_of_threads(
    models: list[str], tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another teacher pool than the actor's, and a reward function that fails meanwhile."""
    needs_ray()
    from jaxrl.runtime.ray.connect import join
    from jaxrl.runtime.ray.local_cluster import leave

    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    leave()
    join(None, 8)
    try:
        for case in ("gspo-8", "gkd-8"):
            expected = whole(case)
            asked = config(models, tmp_path / case, case, "launcher=ray")
            with jaxrl.session(asked) as s:
                for prompts in s.prompts():
                    batch = s.sample(prompts)
                    if case == "gspo-8" and s.step == 1:
                        s.rewards = [fails]
                        with pytest.raises(RunError, match="(?s)fails.*no network"):
                            s.score(batch)
                        s.rewards = []
                    batch = s.score(batch)
                    look(s, batch)
                    s.update(batch)
            assert_same(tmp_path / case, expected)
    finally:
        leave()


def fails(completions: list[str]) -> list[float]:
    raise OSError("no network")


CELLS = [
    """
import jaxrl
from jaxrl import Config

def length(completions):
    return [float(len(text)) for text in completions]

s = jaxrl.session(Config.load({path!r}, {keys!r}), rewards=[length])
sampled = s.sample(next(s.prompts()))
sampled""",
    """
def length(completions):
    raise OSError("no network")

s.rewards = [length]
s.score(sampled)""",
    """
def length(completions):
    return [-float(len(text)) for text in completions]

s.rewards = [length]
batch = s.score(sampled)
batch.row(0)""",
    """
s.update(batch)
bool(batch.ratio[batch.loss_mask].std() > 0), s""",
    """
s.close()
def enough(row):
    if row["step"] == 2:
        raise jaxrl.StopTraining("seen enough")

run = lambda *more, **given: jaxrl.train(Config.load({path!r}, [*{keys!r}, *more]), **given)
stopped = run("steps=3", rewards=[length], on_step=enough).stopped
stopped["step"], stopped["message"]""",
    """
slower = ["optimizer.learning_rate=1e-4", "resume_changed=[optimizer.learning_rate]"]
rows = run("steps=3", *slower, rewards=[length]).metrics
[(row["step"], row.get("run/changed", 0)) for row in rows]""",
    """
import numpy as np
from dataclasses import replace
from jaxrl.losses.algorithm_table import ALGORITHMS

def halves(rewards, group_ids):
    return np.where(rewards > np.median(rewards), 1.0, -1.0)

mine = replace(ALGORITHMS["gspo"], advantages=halves)
run("steps=1", "run_dir={mine}", rewards=[length], algorithm=mine).metrics[-1]["optimizer_step"]""",
    """
!{{sys.executable}} -m jaxrl data show arithmetic --student builtin:student""",
]


def test_the_cells_of_a_notebook(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample, look, a reward that fails, a changed one, update; `train` goes on with it, is
    stopped, and resumed at another rate; an algorithm of one's own; rows as they are learned."""
    pytest.importorskip("nbclient", reason="notebooks need the extra dev")
    from nbclient import NotebookClient
    from nbformat import v4

    for name, value in (environment() | {"JAX_NUM_CPU_DEVICES": "8"}).items():
        monkeypatch.setenv(name, value)
    keys = [*models, *SHORT, *CONSTANT, *PLAIN, *CASES["gspo"], "data.eval=null", "steps=2"]
    keys += ["reward.functions=[python:length]", f"run_dir={tmp_path / 'run'}"]
    given = {"path": QUICK[1], "keys": keys, "mine": tmp_path / "mine"}
    cells = [v4.new_code_cell("import sys" + cell.format(**given)) for cell in CELLS]
    cells[1].metadata["tags"] = ["raises-exception"]
    notebook = v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *cells, shell = notebook.cells
    shown, failed, row, changed, *more = (cell.outputs[-1] for cell in cells)
    assert (
        "24 completions of 6 prompts, sampled after step 0, not scored" in shown.data["text/plain"]
    )
    assert "no network" in failed.evalue and failed.ename == "RunError"
    assert re.match(r"step 1, row 0: .*\n  token +logprob +learner", row.data["text/plain"])
    assert re.match(r"\(True,\s+session of gspo in .*: step 1 of 2", changed.data["text/plain"])
    stopped, slower, mine = (output.data["text/plain"] for output in more)
    assert stopped == "(2, 'seen enough')" and slower == "[(0, 0), (1, 0), (2, 0), (3, 1)]"
    assert int(mine) >= 1
    printed = "".join(output.text for output in shell.outputs)  # in as many pieces as were read
    assert "learned: 9 of 18 tokens" in printed


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    take_cut_models(cut_models(tmp_path / "cut"), monkeypatch)
    place: dict[str, Any] = {"__name__": "example"}
    page = DOCS / "session.md"
    try:
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), place)
    finally:
        place["s"].close()
    rows = read_metrics(tmp_path / "runs" / "by-hand")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert (tmp_path / "by-hand" / "config.json").is_file() and place["folder"].name == "2"
    names = set(re.findall(r"`(\w+)`", page.read_text().split("| of a batch")[1].split("\n\n")[0]))
    assert {name for name in names if not hasattr(BatchByHand, name)} == set()
