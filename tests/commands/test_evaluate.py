"""`evaluate` in Python and on the command line, on what runs leave behind and on other models."""

import json
import runpy
import shutil
import sys

import pytest
from tiny_models import random_params
from tiny_tokenizer import tiny_tokenizer

import jaxrl
from jaxrl import Config
from jaxrl.config import cli
from jaxrl.errors import UserError
from jaxrl.evaluate import evaluate, main
from jaxrl.formats.hf import save_hf
from jaxrl.models.config import DecoderConfig
from jaxrl.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")

SUMS = [
    "data.eval=arithmetic",
    "max_prompt_tokens=9",
    "max_new_tokens=10",
    "rollout.dtype=float32",
    "compile_cache=null",
]
RUN = [
    *SUMS,
    "student.model=builtin:teacher",
    "teacher.model=null",
    "algorithm=sft",
    "mesh=actor+rollout=1",
    "steps=2",
    "batch_size=8",
    "group_size=1",
    "optimizer.learning_rate=2e-3",
    "optimizer.warmup_steps=0",
    "eval.every=0",
    "eval.prompts=24",
    "eval.samples=4",
    "eval.temperature=1.0",
    "eval.top_p=0.9",
    "seed=3",
    "logging.console=quiet",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that unlearns some of what its model knew."""
    folder = tmp_path_factory.mktemp("run") / "sums"
    return train(Config.load("builtin:quickstart", [*RUN, f"run_dir={folder}"]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a random model of bytes."""
    path = tmp_path_factory.mktemp("tiny")
    config = DecoderConfig(
        "llama", 264, 32, 1, 4, 2, 8, 64, tie_embeddings=True, eos_ids=(258,), max_positions=128
    )
    save_hf(path, config, random_params(config), dtype="float32")
    tiny_tokenizer(template=None).save_pretrained(path)
    return path


def eval_metrics(row):
    """What an evaluation measures of a row, its duration aside."""
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def test_a_run_s_last_evaluation_is_reproduced_from_its_final_model(run, capsys):
    expected = eval_metrics(run.metrics[-1])
    assert 0 < expected["eval/accuracy"] < 1 and run.metrics[0]["eval/accuracy"] > 0.5
    found = evaluate(run.run_dir)
    assert {name: found["metrics"][name] for name in expected} == expected
    assert found["metrics"]["eval/pass@4"] >= found["metrics"]["eval/accuracy"]
    assert (found["step"], found["settings"]["mesh"]) == (2, "rollout=1")
    assert found["settings"]["eval.top_p"] == 0.9 and found["settings"]["rollout.slots"] is None
    assert evaluate(run.run_dir / "final")["metrics"] == found["metrics"]
    assert capsys.readouterr().out == ""


def test_a_loaded_model_is_evaluated_by_the_config_of_its_run(run):
    models = jaxrl.load_model(run.run_dir), run.run_dir
    found, expected = (evaluate(model, overrides=["eval.prompts=8"]) for model in models)
    assert found | {"sets": None} == expected | {"sets": None}  # which have their speeds


def test_a_checkpoint_is_evaluated_as_its_run_evaluates(run):
    found = evaluate(run.run_dir / "checkpoints" / "2", overrides=["eval.prompts=8"])
    assert (found["step"], found["settings"]["eval.samples"]) == (2, 4)
    assert found["metrics"] == evaluate(run.run_dir, overrides=["eval.prompts=8"])["metrics"]


def test_the_final_model_of_a_run_that_was_to_go_on_tells_no_step(run, tmp_path):
    shutil.copytree(run.run_dir, tmp_path / "longer")
    config = tmp_path / "longer" / "config.yaml"
    config.write_text(config.read_text().replace("steps: 2\n", "steps: 5\n", 1))
    assert evaluate(tmp_path / "longer", overrides=["eval.prompts=8"])["step"] is None


def test_the_start_of_a_run_is_reproduced_from_its_config(run):
    """The model before training, with the run's config as a file and as an object."""
    expected = eval_metrics(run.metrics[0])
    config = Config.load(run.run_dir / "config.yaml")
    for found in (evaluate("builtin:teacher", run.run_dir / "config.yaml"), evaluate(config)):
        assert {name: found["metrics"][name] for name in expected} == expected
        assert found["step"] is None


def test_the_mesh_changes_no_number(tiny, tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"prompt": "ab", "answer": "c"}\n{"prompt": "b"}\n')
    keys = [f"data.eval={tmp_path}/eval.jsonl", "max_prompt_tokens=8", "max_new_tokens=8"]
    texts = []
    for mesh, more in (("rollout=1", []), ("rollout=4", ["rollout.parallel.tensor=2"])):
        samples = tmp_path / f"{mesh}.jsonl"
        found = evaluate(tiny, overrides=[*keys, *more], mesh=mesh, samples=samples)
        assert found["settings"]["mesh"] == mesh
        texts.append([json.loads(line)["completion"] for line in samples.open()])
    assert texts[0] == texts[1] and len(set(texts[0])) == 2


def test_the_command_tells_and_writes_its_numbers(run, tmp_path, capsys):
    out, samples = tmp_path / "out.json", tmp_path / "samples.jsonl"
    argv = ["eval.prompts=8", "--samples", str(samples), "--out", str(out)]
    assert cli.run(main, [str(run.run_dir), *argv]) == 0
    told = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found == {**found, "model": str(run.run_dir), "step": 2}
    (only,) = found["sets"]
    assert (only["name"], only["prompts"], only["samples"]) == ("", 8, 4)
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == 32 and {(line["split"], line["step"]) for line in lines} == {("eval", 2)}
    scores = [line["score"] for line in lines]
    assert found["metrics"]["eval/accuracy"] == pytest.approx(sum(scores) / 32)
    passed = [max(scores[i : i + 4]) for i in range(0, 32, 4)]
    assert found["metrics"]["eval/pass@4"] == only["pass@4"] == pytest.approx(sum(passed) / 8)
    assert only["tokens"] == sum(line["tokens"] for line in lines)
    assert all(line["completion"].endswith(f"={line['answer']}") == line["score"] for line in lines)
    accuracy, low, high = (only[f"accuracy{end}"] for end in ("", "_low", "_high"))
    assert f"{accuracy:.1%} [{100 * low:.1f}, {100 * high:.1f}]" in told
    assert "mean@4" in told and "data.eval: 8 prompts" in told and f"wrote {out}" in told


def test_neither_teacher_nor_training_data_need_be_there(tiny, tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"prompt": "ab", "answer": "c"}\n{"prompt": "b"}\n')
    (tmp_path / "run.yaml").write_text(
        "mesh: actor=64,rollout=32,teacher=64\nalgorithm: gkd\nsteps: 7\n"
        "student: {model: /nowhere}\nteacher: {model: /nowhere/either}\n"
        f"data: {{train: /nowhere.jsonl, eval: {tmp_path}/eval.jsonl}}\n"
        "sampling: {temperature: 0.5, stop: [z]}\nrollout: {parallel: {tensor: 32}}\n"
        "max_prompt_tokens: 8\nmax_new_tokens: 8\ncompile_cache: null\n"
    )
    told = []
    found = evaluate(tiny, tmp_path / "run.yaml", tell=told.append)
    assert found["settings"]["sampling.stop"] == ["z"]
    assert found["settings"]["max_new_tokens"] == 8
    assert found["metrics"]["eval/unjudged"] == 1 and found["sets"][0]["prompts"] == 2
    assert any("1 of 2 prompts cannot be judged" in line for line in told)


def test_where_nothing_can_be_judged_the_table_says_so(tiny, tmp_path, capsys):
    (tmp_path / "eval.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "b"}\n')
    argv = [f"data.eval={tmp_path}/eval.jsonl", "max_prompt_tokens=8", "max_new_tokens=8"]
    assert cli.run(main, [str(tiny), *argv, "--out", str(tmp_path / "o"), "seed=1"]) == 0
    assert "not judged" in capsys.readouterr().out
    assert "eval/accuracy" not in json.loads((tmp_path / "o").read_text())["metrics"]


def test_named_sets_are_told_one_by_one_and_together(tiny, tmp_path, capsys):
    for name, answers in (("easy", "xx"), ("hard", "yyy")):
        rows = [json.dumps({"prompt": f"{name}{i}", "answer": a}) for i, a in enumerate(answers)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    argv = [f"data.eval={{easy: {tmp_path}/easy.jsonl, hard: [{tmp_path}/hard.jsonl]}}"]
    argv += ["max_prompt_tokens=8", "max_new_tokens=8", "eval.samples=2", "eval.temperature=2.0"]
    argv += ["--out", str(tmp_path / "out.json"), "--samples", str(tmp_path / "s.jsonl")]
    assert cli.run(main, [str(tiny), *argv]) == 0
    told = capsys.readouterr().out
    assert "easy: 2 prompts" in told and "hard: 3 prompts" in told
    rows = [line for line in told.splitlines() if "mean@2" in line]
    assert [line.split()[:2] for line in rows] == [["easy", "2"], ["hard", "3"], ["mean", "5"]]
    assert all(len(line.rstrip()) <= 80 for line in rows)
    found = json.loads((tmp_path / "out.json").read_text())
    easy, hard = found["sets"]
    assert [(row["name"], row["prompts"]) for row in (easy, hard)] == [("easy", 2), ("hard", 3)]
    row = found["metrics"]
    for name, only in (("easy", easy), ("hard", hard)):
        own = {key for key in only if f"eval/{name}/{key}" in row}
        assert {"accuracy", "pass@2_high", "unjudged", "truncated_fraction"} <= own
        assert all(row[f"eval/{name}/{key}"] == only[key] for key in own)
    assert row["eval/accuracy"] == (easy["accuracy"] + hard["accuracy"]) / 2
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [line["answer"] for line in lines] == list("xxxxyyyyyy")
    expected = (
        2 * 2 * easy["mean_completion_tokens"] + 3 * 2 * hard["mean_completion_tokens"]
    ) / 10
    assert row["eval/mean_completion_tokens"] == pytest.approx(expected)


def test_eval_max_new_tokens_is_the_limit_whatever_the_run_s_was(tiny, tmp_path):
    """512 new tokens would exceed the model's 128 positions; the evaluation asks for 8."""
    (tmp_path / "eval.jsonl").write_text('{"prompt": "ab", "answer": "c"}\n{"prompt": "b"}\n')
    keys = [f"data.eval={tmp_path}/eval.jsonl", "max_prompt_tokens=8", "eval.max_new_tokens=8"]
    found = evaluate(tiny, overrides=[*keys, "compile_cache=null"])
    assert found["metrics"]["eval/mean_completion_tokens"] <= 8


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to evaluate on: give data.eval=SOURCE"),
        ([*SUMS, "data.eval=/nowhere.jsonl"], "/nowhere.jsonl"),
        ([*SUMS, "data.eval=arithmetik"], "arithmetic"),
        ([*SUMS, "data.verifier=exakt"], "exact"),
        ([*SUMS, "sampling.temperature=0.5"], "did you mean eval.temperature?"),
        ([*SUMS, "teacher.model=x"], "teacher.model has no part in an evaluation"),
        ([*SUMS, "data.train=x"], "data.train has no part in an evaluation"),
        ([*SUMS, "eval.sample=2"], "eval.samples"),
        ([*SUMS, "eval.samples=2"], "eval: samples=2 temperature=0: greedy completions"),
        ([*SUMS, "eval.top_p=0.5"], "have no effect on greedy completions"),
        ([*SUMS, "max_new_tokens=300"], "309 positions"),
        ([*SUMS, "--mesh", "teacher=2"], "add rollout=DEVICES"),
        ([*SUMS, "--mesh", "rollout=99"], "99 devices"),
        ([*SUMS, "--mesh", "rollout=3", "rollout.parallel.tensor=3"], "tensor=3"),
        ([*SUMS, "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        ([*SUMS, "--out", "/nowhere/at/all.json"], "--out /nowhere/at/all.json"),
        ([*SUMS, "--samples", "/tmp"], "--samples /tmp is a folder"),
        ([*SUMS, "--sample", "x"], "--samples"),
    ],
)
def test_bad_input_is_told_in_a_line_with_exit_code_2(arguments, told, capsys, monkeypatch):
    monkeypatch.setattr("jaxrl.run.evaluation._sample", lambda job: pytest.fail("it sampled"))
    assert cli.run(main, ["builtin:student", *arguments]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and "Traceback" not in captured.err
    assert len(captured.err.splitlines()) <= 5


def test_a_config_with_an_unknown_key_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("evall: {samples: 2}\n")
    with pytest.raises(UserError, match="evall"):
        evaluate("builtin:student", tmp_path / "run.yaml", overrides=SUMS)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    config = DecoderConfig("llama", 40, 32, 1, 4, 2, 8, 64, tie_embeddings=True, eos_ids=(3,))
    save_hf(tmp_path, config, random_params(config), dtype="float32")
    tiny_tokenizer(template=None).save_pretrained(tmp_path)
    (tmp_path / "eval.jsonl").write_text('{"prompt": "zzz", "answer": "c"}\n')
    keys = [f"data.eval={tmp_path}/eval.jsonl", "compile_cache=null"]
    with pytest.raises(UserError, match=r"model, which has 40 \(vocab_size\): 258 '<\|im_end\|>'"):
        evaluate(tmp_path, overrides=keys)


def test_the_module_is_the_function():
    assert callable(jaxrl.evaluate) and jaxrl.evaluate.main is main


def test_module_runs_as_a_command(tmp_path, monkeypatch, capsys):
    """In this process: tests/laws/test_bad_input.py has one that a shell starts."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(tmp_path / "nothing")])
    monkeypatch.setattr(cli, "exit_process", sys.exit)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(jaxrl.evaluate.__file__, run_name="__main__")
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == ""
    assert told.err.startswith("error: model") and "Traceback" not in told.err
