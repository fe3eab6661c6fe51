"""n steps, kill -9, n steps are 2n steps, bit for bit; and what else a stopped run may count on."""

import json
import os
import resource
import shutil
import signal
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from cases import and_slow
from runs import (
    CONSTANT,
    QUICK,
    SHORT,
    STEPS,
    arguments,
    check_totals,
    losses,
    numbers,
    save_model,
    save_pair,
    start,
    unlisted_files,
    wait_for,
    weights,
)
from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl import Config, load_model
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.checkpoint import store
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.config import cli
from jaxrl.data.chat_template import render_text
from jaxrl.errors import RunError, UserError
from jaxrl.process.interrupt import Interrupted
from jaxrl.report.html_page import facts
from jaxrl.report.read import read_run
from jaxrl.report.timeline_lanes import understand
from jaxrl.run.evaluation import prepare_evaluation
from jaxrl.run.run_dir import SESSIONS_FILE, RunDir, meshes, sessions
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.train import main, train

pytestmark = pytest.mark.usefixtures("shared_programs")


FOUR = ["steps=4"]
"""A short run, of the programs of longer ones."""
TALKS = ["algorithm=sft", "max_prompt_tokens=60", "group_size=1", *CONSTANT]
"""Of runs without a teacher, whose programs are the same."""


def by_default(schedule):
    """All schedules, of which the default suite has one."""
    return and_slow([schedule], [name for name in SCHEDULES if name != schedule])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"), layers=1)


def run(models, run_dir, *overrides):
    return train(Config.load("builtin:quickstart", arguments(models, run_dir, *overrides)))


def trained_by(argv):
    """Exit code of the command line."""
    return cli.run(main, [*QUICK, *argv])


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = {}

    def get(schedule):
        if schedule not in done:
            done[schedule] = run(models, folder / schedule, f"schedule={schedule}")
        return done[schedule]

    return get


@pytest.mark.parametrize("schedule", by_default("two_step_off"))
def test_a_killed_run_goes_on_as_if_nothing_had_been(models, tmp_path, undisturbed, schedule):
    whole = undisturbed(schedule)
    victim = start(models, tmp_path / "run", f"schedule={schedule}")
    wait_for(tmp_path / "run" / "checkpoints" / "2" / store.MANIFEST, victim)
    victim.kill()
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL and not (tmp_path / "run" / "final").exists()
    in_flight = store.newest(tmp_path / "run", print).manifest.in_flight
    assert len(in_flight) == SCHEDULES[schedule]
    result = run(models, tmp_path / "run", f"schedule={schedule}")
    assert numbers(result) == numbers(whole) == numbers(read_metrics(result.run_dir))
    assert weights(result.run_dir) == weights(whole.run_dir)
    check_totals(result.metrics)
    samples = [(folder / "samples.jsonl").read_text() for folder in (result.run_dir, whole.run_dir)]
    assert samples[0] == samples[1]


def test_a_signal_saves_and_ends_with_130(models, tmp_path, undisturbed, monkeypatch, capfd):
    from jaxrl.roles.actor import Actor

    whole, real = undisturbed("two_step_off"), Actor.update
    asked = ["schedule=two_step_off", "checkpoint.every=0"]

    def signalled(self, *args, step, **kwargs):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args, step=step, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Actor, "update", signalled)
        assert trained_by(arguments(models, tmp_path / "run", *asked)) == 130
    told = "".join(capfd.readouterr())
    assert "finishing the current update" in told and "Traceback" not in told
    step = store.newest(tmp_path / "run", print).step
    assert f"saved at step {step}" in told and 0 < step < STEPS
    result = run(models, tmp_path / "run", *asked)
    assert numbers(result) == numbers(whole) and weights(result.run_dir) == weights(whole.run_dir)


def test_other_meshes_go_on_with_it(models, tmp_path, capsys):
    """From three devices to one and back; without sampling, which turns rounding into tokens. The
    run reports all of them.
    """
    data = ["teacher.model=null", "data.eval=null", *TALKS]

    def to(steps, mesh, name="run"):
        return run(models[:1], tmp_path / name, f"mesh={mesh}", *data, f"steps={steps}")

    whole = to(6, "actor=2,rollout=1", "whole")
    to(2, "actor=2,rollout=1")
    to(4, "actor+rollout=1")
    parts = to(6, "actor=2,rollout=1")
    told = [[row["sft/loss"] for row in result.metrics[1:]] for result in (whole, parts)]
    assert told[1] == pytest.approx(told[0], rel=1e-5)
    used = "actor=2,rollout=1 to step 2, then actor+rollout=1 to step 4, then actor=2,rollout=1"
    assert f"mesh: {used}" in capsys.readouterr().out
    files = read_run(tmp_path / "run")
    assert facts(files, understand(files.events))["mesh"] == used
    alone = read_run(tmp_path / "whole")
    assert facts(alone, understand(alone.events))["mesh"] == "actor=2,rollout=1"


@pytest.mark.parametrize("schedule", by_default("one_step_off"))
def test_more_steps_continue_a_finished_run(models, tmp_path, undisturbed, schedule, capsys):
    """Also where the old end left no batch in flight, and an epoch ended."""
    asked = [f"schedule={schedule}", "data.train=arithmetic:size=24", *FOUR]
    run(models, tmp_path / "run", *asked)
    again = run(models, tmp_path / "run", *asked)
    assert "has all of its 4 steps: nothing to do" in capsys.readouterr().out
    assert [row["step"] for row in again.metrics] == list(range(5))
    longer = run(models, tmp_path / "run", *asked, "steps=7")
    assert [row["step"] for row in longer.metrics] == list(range(8))
    assert "steps: 4 there, 7 now" in capsys.readouterr().out
    assert longer.metrics[7]["data/epoch"] == 7 * 6 / 24
    assert [row["policy_version"] for row in longer.metrics[5:]] == [
        max(4, i - SCHEDULES[schedule]) for i in range(4, 7)
    ]


def test_a_template_shows_the_date_on_which_the_run_began(tmp_path, monkeypatch):
    """A run that resumes on another day has the rows and weights of one that was not stopped, and
    its models are evaluated and sampled with the date of their run."""
    student = save_model(tmp_path / "student", 32, 1, seed=0)
    tokenizer = tiny_tokenizer("{{ strftime_now('%d%m%y') }}" + CHATML)
    tokenizer.save_pretrained(tmp_path / "student")
    data = tmp_path / "rows.jsonl"
    row = '{{"prompt": "{n}+1", "completion": "{m}", "answer": "{m}"}}\n'
    data.write_text("".join(row.format(n=n, m=n + 1) for n in range(8)))
    asked = [f"student.model={student}", "mesh=actor+rollout=1", *SHORT, *TALKS]
    asked += [
        f"data.train={data}",
        f"data.eval={data}",
        "data.verifier=exact",
        "checkpoint.every=1",
    ]

    def trained(name, steps, day):
        monkeypatch.setattr("jaxrl.run.run_dir.today", lambda: day)
        monkeypatch.setattr("jaxrl.data.chat_template.today", lambda: day)
        words = [*asked, f"run_dir={tmp_path / name}", f"steps={steps}"]
        return train(Config.load(None, words))

    once = trained("once", 2, "2026-11-25")
    trained("stopped", 1, "2026-11-25")
    resumed = trained("stopped", 2, "2026-11-26")
    assert numbers(resumed) == numbers(once)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "once")
    assert Config.load(tmp_path / "stopped" / "config.yaml").data.chat_date == "2026-11-25"
    final = load_model(str(tmp_path / "stopped"))
    prompt = render_text(final.tokenizer, [{"role": "user", "content": "1+1"}])
    assert prompt.startswith("251126<|im_start|>")
    job = prepare_evaluation(
        resolve_model(str(tmp_path / "stopped")), None, [f"data.eval={data}"], None
    )
    shown = [job.tokenizer.decode(one.tokens) for held_out in job.sets for one in held_out.prompts]
    assert all("251126" in text for text in shown)


def killed_after_8(undisturbed, folder):
    """A run of ten steps that was killed after its checkpoint of step 8."""
    shutil.copytree(undisturbed("serial").run_dir, folder)
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoints" / "10")
    return folder


@pytest.mark.slow
def test_from_float32_to_bfloat16(models, tmp_path, undisturbed, capsys):
    """In the default suite tests/checkpoint restores into bfloat16."""
    whole = undisturbed("serial")
    folder = killed_after_8(undisturbed, tmp_path / "run")
    half = ["actor.param_dtype=bfloat16", "actor.moment_dtype=bfloat16", "rollout.dtype=bfloat16"]
    result = run(models, folder, *half)
    assert (
        "changed since: actor.param_dtype: float32 there, bfloat16 now" in capsys.readouterr().out
    )
    assert losses(result)[:8] == losses(whole)[:8]
    assert losses(result)[8] != losses(whole)[8]
    assert losses(result)[8] == pytest.approx(losses(whole)[8], rel=0.1)


def test_an_interruption_before_the_evaluation_makes_up_for_it(models, tmp_path, undisturbed):
    """The row of the step is written without it, and completed when the run goes on."""
    metrics = killed_after_8(undisturbed, tmp_path / "run") / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][:9]
    assert "eval/accuracy" in rows[8]
    rows[8] = {k: v for k, v in rows[8].items() if not k.startswith(("eval/", "time/evaluate"))}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert numbers(run(models, tmp_path / "run")) == numbers(undisturbed("serial"))


def test_an_interrupted_evaluation_costs_no_checkpoint(models, tmp_path, undisturbed, monkeypatch):
    """Its row is written without it, the checkpoint is kept, and who goes on evaluates."""
    from jaxrl.roles.rollout import Sampler

    real, calls = Sampler.sample, []

    def slow(self, prompts):
        if self.version >= 0:  # not the teacher's
            calls.append(self.version)
        if calls == [0, 4]:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)
        return real(self, prompts)

    monkeypatch.setattr(Sampler, "sample", slow)
    with pytest.raises(Interrupted, match="saved at step 4"):
        run(models, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["step"] == 4 and "eval/accuracy" not in rows[-1]
    assert store.read(store.folders(tmp_path / "run")[0]).manifest.accuracy is None
    result = run(models, tmp_path / "run")
    assert calls == [0, 4, 4, 8, 10]
    assert numbers(result) == numbers(undisturbed("serial"))
    assert store.newest(result.run_dir, print).manifest.accuracy is not None


def test_a_checkpoint_evaluated_late_is_judged(models, tmp_path, undisturbed):
    folder = killed_after_8(undisturbed, tmp_path / "run")
    store.judge(folder / "checkpoints" / "8", None)
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][:9]
    rows[8] = {k: v for k, v in rows[8].items() if not k.startswith("eval/")}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(models, folder)
    judged = store.read(folder / "checkpoints" / "8").manifest.accuracy
    assert judged == undisturbed("serial").metrics[8]["eval/accuracy"]


@pytest.mark.parametrize("lost", ["rows", "config", "garbage", "files"])
def test_damage_beside_the_checkpoint_stops_nothing(models, tmp_path, undisturbed, lost):
    """A disk that took the checkpoint but not the row; a config cut short; NULs of a power loss."""
    folder = killed_after_8(undisturbed, tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    if lost == "rows":
        metrics.write_text("".join(lines[:5]))
    elif lost == "config":
        (folder / "config.yaml").write_text("")
    elif lost == "files":
        metrics.write_bytes(bytes(metrics.stat().st_size))
        for name in ("samples.jsonl", "timeline.json", "log.txt"):
            (folder / name).unlink()
            (folder / name).mkdir()
    else:
        metrics.write_text("".join(lines[:9]) + "\0\0\n{\n")
    result = run(models, folder)
    assert weights(folder) == weights(undisturbed("serial").run_dir)
    rows, whole = numbers(result)[-2:], numbers(undisturbed("serial"))[-2:]
    if lost in ("rows", "files"):  # totals go on from the rows that are left
        rows, whole = (
            [{k: v for k, v in row.items() if not k.startswith("total/")} for row in x]
            for x in (rows, whole)
        )
    assert rows == whole
    files = ("log.txt", "metrics.jsonl", "samples.jsonl", "timeline.json")
    asides = [f"{name}.damaged" for name in files] if lost == "files" else []
    assert sorted(path.name for path in folder.glob("*.damaged")) == asides


def test_a_trained_model_without_checkpoints_is_not_trained_over(models, tmp_path, undisturbed):
    folder = killed_after_8(undisturbed, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(undisturbed("serial").run_dir / "final", folder / "final")
    with pytest.raises(UserError, match="holds a trained model"):
        run(models, folder)
    assert weights(folder) == weights(undisturbed("serial").run_dir)


def test_the_meshes_of_a_run_are_those_of_the_steps_that_are_kept(tmp_path):
    def begin(step, mesh):
        checkpoint = SimpleNamespace(step=step) if step else None
        run_dir = RunDir(tmp_path, checkpoint, ())
        run_dir.write(SESSIONS_FILE, run_dir.sessions_with(mesh))

    assert sessions(tmp_path) == [] and meshes([]) == ""
    begin(0, "a=1")
    begin(0, "a=2")  # nothing was saved before
    begin(3, "a=2")
    begin(5, "b=1")
    assert meshes(sessions(tmp_path)) == "a=2 to step 5, then b=1"
    begin(4, "c=1")  # the checkpoint of step 5 is gone
    assert meshes(sessions(tmp_path)) == "a=2 to step 4, then c=1"
    (tmp_path / SESSIONS_FILE).write_text("no JSON")
    assert sessions(tmp_path) == []


def test_rows_after_the_checkpoint_and_a_torn_line_are_cut(models, tmp_path, undisturbed):
    metrics = killed_after_8(undisturbed, tmp_path / "run") / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 11, "loss": 99}\n{"step": 12, "lo')
    assert numbers(run(models, tmp_path / "run")) == numbers(undisturbed("serial"))
    assert weights(tmp_path / "run") == weights(undisturbed("serial").run_dir)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate: "),
        ("seed=3", "seed: 0 there, 3 now"),
        ("schedule=one_step_off", "schedule: serial there, one_step_off now"),
        ("steps=3", "steps: 4 there, 3 now"),
        ("data.train=arithmetic:terms=4", "data.train: "),
    ],
)
def test_another_config_is_refused_with_its_keys(finished, capsys, override, told):
    before = sorted(path.name for path in finished.run_dir.iterdir())
    command = [*arguments(finished.models, finished.run_dir, *FOUR), override]
    assert trained_by(command) == 2
    error = capsys.readouterr().err
    assert told in error and "holds a run with another config" in error
    assert before == sorted(path.name for path in finished.run_dir.iterdir())


class Finished:
    def __init__(self, models, run_dir):
        self.models, self.run_dir = models, run_dir


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(models, folder, *FOUR)
    return Finished(models, folder)


def test_resume_never_and_must(finished, tmp_path, capsys, monkeypatch):
    plain = arguments(finished.models, finished.run_dir, *FOUR)
    assert trained_by([*plain, "--resume", "never"]) == 2
    assert "holds a run already" in capsys.readouterr().err
    empty = arguments(finished.models, tmp_path / "none", *FOUR)
    assert trained_by([*empty, "--resume", "must"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    named = [*arguments(finished.models, "x", *FOUR), "run_dir=null", "name=n"]
    assert trained_by(named) == trained_by([*named, "--resume", "never"]) == 0
    assert (tmp_path / "runs" / "n-2" / "final").is_dir()
    assert unlisted_files(finished.run_dir) == unlisted_files(tmp_path / "runs" / "n-2") == set()


def test_other_training_data_of_the_same_name_are_refused(models, tmp_path, capsys):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+10-10="}) + "\n" for i in range(20)))
    asked = [f"data.train={data}", "data.eval=null", *FOUR]
    run(models, tmp_path / "run", *asked)
    data.write_text(data.read_text().replace("7+10", "7+20"))
    assert trained_by(arguments(models, tmp_path / "run", *asked, "steps=5")) == 2
    assert "what data.train names has changed since step 4" in capsys.readouterr().err


def test_a_directory_in_use_is_refused(finished, capsys):
    from jaxrl.run.run_dir import Lock

    with closing(Lock(finished.run_dir)):
        assert trained_by(arguments(finished.models, finished.run_dir, *FOUR)) == 2
    assert f"is in use by pid {os.getpid()}" in capsys.readouterr().err


def test_a_run_whose_directory_is_removed_ends(models, tmp_path, monkeypatch, capsys):
    """With an error at its next checkpoint; nothing is made in its place."""
    from jaxrl.roles.actor import Actor

    real = Actor.update

    def removing(self, *args, step, **kwargs):
        if step == 5:
            while not (tmp_path / "run" / "checkpoints" / "4" / store.MANIFEST).exists():
                time.sleep(0.01)
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        return real(self, *args, step=step, **kwargs)

    monkeypatch.setattr(Actor, "update", removing)
    assert trained_by(arguments(models, tmp_path / "run")) == 1
    assert "were removed or replaced during the run: metrics.jsonl" in capsys.readouterr().err
    assert not store.folders(tmp_path / "run")
    assert [c.name for c in store.folders(tmp_path / "elsewhere")] == ["4", "2"]


def test_a_checkpoint_is_a_model(finished):
    """Of the same logits as the export of the same step."""
    folder = finished.run_dir / "checkpoints" / "4"
    tokens, mask = [[5, 6, 7]], [[True] * 3]
    ours = load_model(folder).logits(tokens, mask)
    assert (ours == load_model(finished.run_dir / "final").logits(tokens, mask)).all()
    assert load_model(folder).tokenizer is not None
    assert json.loads((folder / store.MANIFEST).read_text())["data"]["next_batch"] == 4


def test_a_disk_that_is_full_stops_saving_not_training(models, tmp_path, undisturbed, capsys):
    """The limit on the size of a file is the kernel's, as a full disk is."""
    undisturbed("serial")  # its programs are compiled: none has to be kept on the full disk
    capsys.readouterr()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        code = trained_by(arguments(models, tmp_path / "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told, error = capsys.readouterr()
    assert told.count("Training continues, and so does saving") >= 3, told
    assert f"step {STEPS}/{STEPS}" in told and not store.folders(tmp_path / "run")
    # The weights do not fit either, and that is the end of it.
    assert code == 1 and "the trained model could not be written" in error
    assert "no checkpoint could be written" in error and "jaxrl/train.py" not in told + error


def test_an_interruption_that_cannot_save_in_time_says_so(models, tmp_path, monkeypatch):
    from jaxrl.roles.actor import Actor

    over, waited = threading.Event(), []

    def slow(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        waited.append(over.wait(30))

    monkeypatch.setattr(Actor, "update", slow)
    monkeypatch.setattr("jaxrl.run.launch.STOP_S", 0.5)
    asked = ["eval.every=0", "deadlines.interrupt=0.5"]
    with pytest.raises(Interrupted, match=r"could not be saved within 0.5 s"):
        run(models, tmp_path / "run", *asked)
    assert not waited, "the run waited for the update"
    over.set()


def test_a_checkpoint_folder_that_cannot_be_stops_saving_not_training(models, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    result = run(models, tmp_path / "run", *FOUR)
    assert result.metrics[-1]["step"] == 4 and (tmp_path / "run" / "final").is_dir()
    told = capsys.readouterr().out
    assert "checkpoint 2 could not be written" in told and "there is none yet" in told


def test_the_best_checkpoint_follows_the_evaluation(models, tmp_path, monkeypatch):
    """More accurate weights outlive newer ones; of equals the newer stays."""
    told = iter([0.0, 0.2, 0.9, 0.9, 0.3, 0.1])  # steps 0 to 5
    row = {"eval/mean_completion_tokens": 1.0}
    evaluation = "jaxrl.run.reporting.evaluation_row"
    monkeypatch.setattr(evaluation, lambda *_: row | {"eval/accuracy": next(told)})
    asked = [*FOUR, "checkpoint.every=1", "eval.every=1", "steps=5", "checkpoint.keep_last=1"]
    result = run(models, tmp_path / "run", *asked)
    found = {c.step: c.manifest.accuracy for c in map(store.read, store.folders(result.run_dir))}
    assert found == {5: 0.1, 3: 0.9}


def test_trackers_get_less_time_after_a_failure(models, tmp_path, monkeypatch):
    """So that the end of a run that was interrupted, or failed, is not the tracker's to decide."""
    from jaxrl.roles.actor import Actor
    from jaxrl.run.reporting import CLOSE_S, HURRY_S

    closed = []
    still = SimpleNamespace(write=lambda *_: None, samples=lambda _: None, close=closed.append)
    monkeypatch.setattr("jaxrl.run.reporting.open_trackers", lambda *_: still)
    run(models, tmp_path / "run", *FOUR)

    def broken(*given: object, **named: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Actor, "update", broken)
    with pytest.raises(RunError):
        run(models, tmp_path / "failing", *FOUR)
    assert closed == [CLOSE_S, HURRY_S] and HURRY_S < CLOSE_S
