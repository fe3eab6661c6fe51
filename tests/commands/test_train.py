"""Whole runs of tiny models through the command line, and what they leave behind."""

import json

import numpy as np
import pytest
from cases import and_slow
from runs import (
    ALONE,
    AS_TRAINED,
    CONSTANT,
    MESH,
    QUICK,
    SHORT,
    losses,
    save_model,
    save_pair,
    unlisted_files,
)
from tiny_tokenizer import tiny_tokenizer

from jaxrl import Config, load_model
from jaxrl.config import cli
from jaxrl.run.launch import MAKERS
from jaxrl.telemetry.metrics import find_metric, read_metrics
from jaxrl.train import main, train

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"), layers=1)


def run(tmp_path, models, *overrides, name="run"):
    """With programs that runs of other lengths share."""
    given = [*models, *SHORT, *CONSTANT, *AS_TRAINED, ALONE, f"run_dir={tmp_path / name}"]
    return train(Config.load("builtin:quickstart", [*given, *overrides]))


@pytest.fixture(scope="module")
def reference(models, tmp_path_factory):
    return run(tmp_path_factory.mktemp("reference"), models, "eval.teacher=true")


def test_what_a_run_leaves_behind(reference):
    folder = reference.run_dir
    rows = read_metrics(folder)
    assert rows == reference.metrics and [row["step"] for row in rows] == [0, 1, 2]
    assert all(find_metric(name) is not None for row in rows for name in row)
    assert all("eval/accuracy" in row for row in rows) and "teacher/accuracy" in rows[0]
    assert [row["policy_version"] for row in rows[1:]] == [0, 1]
    assert rows[1]["weights/sync_bytes"] > 0 and rows[1]["rollout/decode_steps"] > 0
    stages = ("rollout", "score", "update", "weight_sync", "step", "wall")
    assert all(row[f"time/{stage}_s"] > 0 for row in rows[1:] for stage in stages)
    written = Config.load(folder / "config.yaml")
    assert written.steps == 2
    assert written.reference.dtype == "float32"  # null in the config, and these are CPUs
    assert not (folder / "profile").exists()  # as no step was asked for
    assert "actor" in (folder / "plan.txt").read_text()
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 2}
    assert reference.final_eval == rows[-1]["eval/accuracy"]


def test_the_final_model_loads_and_has_moved(reference, models):
    trained = load_model(reference.run_dir)
    start = load_model(models[0].partition("=")[2])
    tokens = np.array([[5, 6, 7, 8]], np.int32)
    mask = np.ones_like(tokens, bool)
    difference = np.abs(trained.logits(tokens, mask) - start.logits(tokens, mask)).max()
    assert 0 < difference < 10
    assert trained.tokenizer.decode(trained.tokenizer("12+3")["input_ids"]) == "12+3"


def test_the_same_seed_gives_the_same_run_bit_for_bit(reference, models, tmp_path):
    """Evaluations, which the reference has, take no part."""
    again = run(tmp_path, models, "data.eval=null")
    assert losses(again) == losses(reference)
    other = run(tmp_path, models, "data.eval=null", "seed=1", name="other")
    assert losses(other) != losses(reference)


MORE_MESHES = [
    "actor=2,rollout=2,teacher=4",
    "actor=1,rollout=3,teacher=4",
    "actor+rollout=6,teacher=2 actor.parallel.tensor=2 rollout.parallel.tensor=2",
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MORE_MESHES)
def test_the_mesh_changes_no_loss(reference, models, tmp_path, mesh):
    spec, *axes = mesh.split(" ")
    result = run(tmp_path, models, f"mesh={spec}", "data.eval=null", *axes)
    assert losses(result) == pytest.approx(losses(reference), rel=2e-4)


@pytest.mark.parametrize("schedule", ["one_step_off", "two_step_off"])
def test_off_policy_schedules_lag_by_their_bound(reference, models, tmp_path, schedule):
    result = run(tmp_path, models, f"schedule={schedule}", "steps=4", "data.eval=null")
    bound = 1 + (schedule == "two_step_off")
    expected = [max(0, i - bound) for i in range(4)]
    assert [row["policy_version"] for row in result.metrics[1:]] == expected
    assert result.metrics[1]["distill/divergence"] == losses(reference)[0]


@pytest.mark.parametrize("signal", and_slow(["student_topk"], ["topk", "sampled"]))
def test_every_signal_trains(models, tmp_path, signal):
    extra = ["distill.jsd_beta=1"] if signal == "sampled" else ["distill.top_k=16"]
    extra += ["distill.entropy_aware=true", "distill.entropy_top_k=16", "data.eval=null"]
    result = run(tmp_path, models, f"distill.signal={signal}", *extra, "teacher.num_microbatches=3")
    row = result.metrics[-1]
    assert row["actor/grad_norm"] > 0 and row["distill/entropy_aware"] > 0
    assert row["actor/skipped_updates"] == 0


def test_a_bound_holds_between_signals(reference, models, tmp_path):
    """Top-k with a tail bucket is a coarser view of the same pair: a lower bound."""
    asked = ["distill.signal=topk", "distill.top_k=8", "steps=1", "data.eval=null"]
    topk = run(tmp_path, models, *asked, "optimizer.learning_rate=0.01")  # as other files' runs
    assert 0 < losses(topk)[0] < losses(reference)[0]


def test_sft_and_seq_kd_learn_without_student_samples(models, tmp_path):
    """And of SFT, the data's completions are shown, as the data's: nobody scored them."""
    student = [models[0], "teacher.model=null", "algorithm=sft", "mesh=actor+rollout=1"]
    shown = ["steps=6", "eval.every=3", "logging.samples=3"]
    result = run(tmp_path, student, *shown)
    assert result.metrics[-1]["sft/loss"] < result.metrics[1]["sft/loss"]
    lines = (result.run_dir / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 18 and {sample["split"] for sample in samples} == {"data"}
    assert all(sample["score"] is None for sample in samples)
    mixed = ["distill.on_policy_fraction=0.0", "distill.seq_kd=true", "data.eval=null"]
    result = run(tmp_path, models, *mixed, name="seq_kd")
    assert [row["policy_version"] for row in result.metrics[1:]] == [-1, -1]
    lines = (result.run_dir / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["split"] for line in lines} == {"train"}  # the teacher sampled them
    assert result.metrics[1]["distill/divergence"] > 0


def test_through_the_command_line(reference, models, tmp_path, capsys):
    """On other devices than the reference, which changes no loss."""
    arguments = [*models, *SHORT, *CONSTANT, *AS_TRAINED, f"run_dir={tmp_path / 'run'}"]
    mesh = ["--mesh", MESH.removeprefix("mesh=")]
    assert cli.run(main, [*QUICK, *mesh, *arguments]) == 0
    told = capsys.readouterr().out
    assert "actor: ready" in told and "accuracy on held-out prompts" in told and "step 2/2" in told
    rows = read_metrics(tmp_path / "run")[1:]
    assert [row["distill/divergence"] for row in rows] == pytest.approx(losses(reference), rel=2e-4)
    assert cli.run(main, [*QUICK, *mesh, *arguments]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_dry_run_prints_the_plan_and_writes_nothing(models, tmp_path, capsys):
    arguments = [*models, *SHORT, f"run_dir={tmp_path / 'run'}", "--dry-run"]
    assert cli.run(main, [*QUICK, "--mesh", "actor=2,rollout=2,teacher=4", *arguments]) == 0
    assert "teacher" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_dry_run_counts_answers_that_no_verifier_can_read(models, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "1+1=", "answer": "{x}"}}\n' for x in ("2", "3x", "x+1")))
    keys = [models[0], "teacher.model=null", "algorithm=grpo", "group_size=2", "batch_size=3"]
    keys += [f"data.{name}={rows}" for name in ("train", "eval")]
    keys += ["data.verifier=number", "reward.functions=[number]", "mesh=actor=1,rollout=1"]
    assert cli.run(main, [*QUICK, *SHORT, *keys, f"run_dir={tmp_path / 'run'}", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "2 of 3 prompts cannot be judged with data.verifier=number: it cannot read" in told
    assert "number cannot judge 2 of the 3 prompts checked: it cannot read answers such as" in told


def test_dry_run_refuses_what_the_run_would_refuse(models, tmp_path, capsys):
    """Each with the run's own words and in place of the plan; the run itself is never started."""
    functions = tmp_path / "functions.py"
    functions.write_text("def blind(prompts, **columns):\n    return [0.0] * len(prompts)\n")
    rewarded = [models[0], "teacher.model=null", "algorithm=grpo"]
    cases = {
        "/nowhere.jsonl": [*models, "data.train=/nowhere.jsonl"],
        "data.eval: /nowhere.jsonl": [*models, "data.eval=/nowhere.jsonl"],
        "exact": [*models, "data.verifier=exakt"],
        "no function missing": [*rewarded, f"reward.functions={functions}:missing"],
        "no parameter `completions`": [*rewarded, f"reward.functions={functions}:blind"],
        "holds no run to resume": [*models, "resume=must"],
    }
    for told, arguments in cases.items():
        asked = [*QUICK, *SHORT, *arguments, f"run_dir={tmp_path / 'run'}"]
        assert cli.run(main, [*asked, "--dry-run"]) == 2, told
        planned = capsys.readouterr()
        assert not planned.out and told in planned.err
        assert cli.run(main, asked) == 2, told
        refused = capsys.readouterr().err.removeprefix("error: ")
        assert refused.splitlines()[0] in planned.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("mesh=actor=2,rolout=2,teacher=4", "rollout"),
        ("mesh=actor=9,rollout=2,teacher=4", "15 devices"),
        ("mesh=actor=2,rollout=2,teacher=4 actor.parallel.tensor=3", "actor.parallel.tensor=3"),
        ("student.model=/nowhere", "/nowhere"),
        ("data.train=/nowhere.jsonl", "/nowhere.jsonl"),
        ("data.train=arithmetik", "arithmetic"),
        ("data.verifier=exakt", "exact"),
        ("optimizer.learning_rat=1", "optimizer.learning_rate"),
        ("steps=0", "steps"),
        ("max_new_tokens=3000", "2048"),
        ("distill.signal=topk distill.top_k=300", "distill.top_k=300"),
        ("teacher.model=null", "teacher"),
    ],
)
def test_bad_input_is_told_in_a_line_with_exit_code_2(models, tmp_path, capsys, override, told):
    arguments = [*models, *SHORT, f"run_dir={tmp_path / 'run'}", *override.split(" ")]
    assert cli.run(main, [*QUICK, *arguments]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and "Traceback" not in captured.err
    assert len(captured.err.splitlines()) <= 5
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_shared_vocabulary_that_tensor_does_not_divide(models, tmp_path):
    """The student's 263 words, cut from the teacher's 272, stay whole on every device."""
    student = save_model(tmp_path / "odd", 32, 1, seed=3, rows=263)
    pair = [f"student.model={student}", models[1], "steps=1", "eval.every=0"]
    one = run(tmp_path, pair, "mesh=actor+rollout+teacher=1")
    mesh = ["mesh=actor=4,rollout=2,teacher=2", "actor.parallel.tensor=2"]
    assert losses(run(tmp_path, pair, *mesh, name="two")) == pytest.approx(losses(one), rel=2e-4)


def test_a_run_that_diverges_ends_with_exit_code_1_and_keeps_the_batch(models, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = [*models, *SHORT, f"run_dir={folder}", "steps=9", "data.eval=null", ALONE]
    wild = ["optimizer.name=sgd", "optimizer.learning_rate=1e30", "optimizer.clip_norm=null"]
    assert cli.run(main, [*QUICK, *arguments, *wild, "actor.max_nonfinite=2"]) == 1
    told = capsys.readouterr().err
    assert "not finite 2 updates in a row" in told and "Traceback" not in told
    assert list((folder / "nonfinite").glob("step_*.npz"))
    assert unlisted_files(folder) == set()


def test_a_run_directory_that_cannot_be_is_refused(models, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    arguments = [*models, *SHORT]
    assert cli.run(main, [*QUICK, *arguments, f"run_dir={tmp_path / 'file'}"]) == 2
    monkeypatch.setattr("os.access", lambda *_: False)
    assert cli.run(main, [*QUICK, *arguments, f"run_dir={tmp_path / 'closed'}"]) == 2
    told = capsys.readouterr().err
    assert "cannot be made" in told and "cannot be written to" in told


def test_a_failed_start_leaves_the_run_directory_usable(models, tmp_path, capsys, monkeypatch):
    def broken(*_):
        raise OSError("disk on fire")

    with monkeypatch.context() as patch:
        patch.setitem(MAKERS, "rollout", broken)
        assert cli.run(main, [*QUICK, *models, *SHORT, ALONE, f"run_dir={tmp_path / 'run'}"]) == 1
    told = capsys.readouterr().err
    assert "rollout.start failed in worker actor+rollout+teacher" in told and "disk on fire" in told
    assert run(tmp_path, models, "steps=1", "data.eval=null").metrics[-1]["step"] == 1


def test_teacher_of_another_vocabulary_is_refused(models, tmp_path, capsys):
    other = save_model(tmp_path / "other", 32, 1, seed=2)
    tiny_tokenizer(template=None, merges=(("1", "2"),)).save_pretrained(other)
    arguments = [models[0], f"teacher.model={other}", *SHORT, f"run_dir={tmp_path / 'run'}"]
    assert cli.run(main, [*QUICK, *arguments]) == 2
    assert "ids differ" in capsys.readouterr().err
