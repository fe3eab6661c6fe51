"""Rows, environments and models that a Python program gives a run in place of names."""

from __future__ import annotations

import functools
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from episode_environments import Doors, Echo
from reward_functions import length
from rich.console import Console
from runs import CONSTANT, SHORT, numbers, save_model, unlisted_files

from jaxrl import Config, dry_run, evaluate, generate, load_model, train
from jaxrl.config import cli
from jaxrl.config.schema import CONFIG_FILE
from jaxrl.data.jsonl import RowList
from jaxrl.data.rows import KEYS
from jaxrl.environments import Answer, Environment
from jaxrl.environments.episode_batches import pool_of
from jaxrl.errors import UserError
from jaxrl.evaluate import main as evaluate_main
from jaxrl.report.__main__ import main as report_main
from jaxrl.run.evaluation import results_table
from jaxrl.run.job import check_job, make_job
from jaxrl.run.python_objects import bind, bound
from jaxrl.telemetry.metrics import SAMPLES_FILE
from jaxrl.train import main

pytestmark = pytest.mark.usefixtures("shared_programs")

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "completion": str(2 * n)} for n in range(8)]
GSPO = {
    "algorithm": "gspo",
    "group_size": 2,
    "reward.workers": 1,
    "environment.workers": 1,
}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "student", 32, 1, seed=0)


def keys(**more: object) -> dict[str, object]:
    evaluated = ["eval.prompts=6", "eval.samples=2", "eval.temperature=1"]  # programs of training
    given = (*SHORT, *CONSTANT, *evaluated, "mesh=actor+rollout=1")
    short = dict(text.split("=", 1) for text in given)
    return {
        key: Config.load(overrides=SHORT) and _value(text) for key, text in short.items()
    } | more


def _value(text: str) -> object:
    return None if text == "null" else int(text) if text.isdigit() else text


LOCK = threading.Lock()


class Indexed:
    """Rows by their numbers, as a data set of torch has them."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return ROWS[index]


def forms() -> Iterator[tuple[str, Any]]:
    yield "a generator", (row for row in ROWS)
    yield "a tuple", tuple(ROWS)
    yield "an indexed object", Indexed()
    yield "arrays", [{name: np.array(value) for name, value in row.items()} for row in ROWS]
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    whole = datasets.Dataset.from_list(ROWS)
    yield "a data set", whole
    yield "a stream", whole.to_iterable_dataset()
    yield "a table", whole.with_format("arrow")[:]
    yield "a frame", whole.to_pandas()


def test_rows_of_every_form_are_those_of_a_list(student: str) -> None:
    def batches(rows: Any) -> list[Any]:
        # A job may be made twice, as once the weights of models are here: a generator too.
        config, given = bind(keys(algorithm="sft"), model=student, data=rows)
        assert config.data.train == ("python:data",) and config.student.model == student
        return [make_job(config, given).train.batch(index) for index in (0, 3)]

    expected = batches(ROWS)
    assert {prompt.answer for prompt in expected[0]} <= {row["answer"] for row in ROWS}
    assert [name for name, rows in forms() if batches(rows) != expected] == []


def test_a_run_of_objects_resumes_with_the_same_ones(
    student: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config says where they came from; the rows are known by their fingerprint, and the
    command line says how to give them."""
    run = keys(run_dir=str(tmp_path / "run"), **GSPO)
    sets = {"low": ROWS[:3], "high": ROWS[5:]}
    objects: dict[str, Any] = {"model": student, "environment": functools.partial(Doors, 4)}
    objects["rewards"] = [length]
    result = train(run, data=iter(ROWS), eval_data=sets, **objects)
    last = result.metrics[-1]
    assert last["step"] == 2 and {"reward/length/mean", "eval/high/accuracy"} <= last.keys()
    lines = (result.run_dir / SAMPLES_FILE).read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert samples and all(sample["prompt"].startswith("4 doors: ") for sample in samples)
    recorded = Config.load(result.run_dir / CONFIG_FILE)
    assert recorded.data.train == ("python:data",)
    assert recorded.data.eval == {name: (f"python:eval_data.{name}",) for name in sets}
    assert str(recorded.environment.name).startswith("python:Doors@")

    longer = {**run, "steps": 3}
    again = train(longer, data=ROWS, eval_data=sets, **objects)
    assert numbers(again)[:3] == numbers(result) and again.metrics[-1]["step"] == 3
    changed = [*ROWS[:-1], {**ROWS[-1], "answer": "no"}]
    other = sets | {"high": changed[5:]}
    with pytest.raises(UserError, match="what data.train and data.eval.high names has changed"):
        train({**run, "steps": 4}, data=changed, eval_data=other, **objects)
    with pytest.raises(UserError, match="(?s)another config.*environment.name"):
        train(longer, data=ROWS, eval_data=sets, **objects | {"environment": Echo})
    assert cli.run(main, ["--config", str(result.run_dir / CONFIG_FILE), "steps=4"]) == 2
    assert "python:data are rows of a Python program: give them" in capsys.readouterr().err
    assert cli.run(evaluate_main, [str(result.run_dir)]) == 2
    assert "python:eval_data.low are rows of a Python program" in capsys.readouterr().err

    there = evaluate(result.run_dir, eval_data=sets, environment=objects["environment"])
    expected = again.metrics[-1]
    assert {name: expected[name] for name in there["metrics"]} == there["metrics"]


def test_names_are_taken_where_objects_are(student: str, tmp_path: Path) -> None:
    """And what is given takes the place of the keys of a file, a config or a mapping."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    base = Config.load(None, {**keys(algorithm="sft"), "student.model": "x", "data.train": "y"})
    (tmp_path / "run.yaml").write_text(base.dump())
    asked: dict[str, Any] = {
        "model": Path(student),
        "data": tmp_path / "rows.jsonl",
        "environment": "calculator",
    }
    for config in (base, tmp_path / "run.yaml", {"algorithm": "sft"}):
        made, given = bind(config, **asked)
        assert made.student.model == student and not given.code and not given.rows
        assert made.data.train == (str(tmp_path / "rows.jsonl"),)
        assert made.environment.name == "calculator"
        assert made.algorithm == "sft"
    assert bind(None)[0] == Config.load()  # the quickstart
    grpo, _ = bind({"algorithm": "grpo"}, model=student, data=ROWS, rewards=[length])
    assert [text.partition("@")[0] for text in grpo.reward.functions] == ["python:length"]


@pytest.mark.parametrize(
    ("objects", "told"),
    [
        ({"data": 3}, "data: a list or another iterable of rows, .* this is a number"),
        ({"data": {"train": ROWS}}, "data: .* this is an object: make rows of its columns"),
        ({"data": [{"promt": "x"}]}, "data.train: python:data: row 0: neither `prompt` nor"),
        ({"data": []}, "data.train: python:data: no rows"),
        ({"data": dict}, "data: .*: give an instance of the class"),
        ({"data": [{**ROWS[0], "lock": LOCK}]}, "row 0: .* cannot be pickled"),
        ({"eval_data": {"a": "x.jsonl", "b": 3}}, r"eval_data\['b'\]: a list"),
        ({"eval_data": {"a/b": ROWS}}, "the name 'a/b' may have"),
        ({"environment": Doors()}, "environment: .* neither a class nor a function"),
        ({"environment": int}, "environment: int must be a subclass of"),
        (
            {"environment": lambda: 3},
            "environment.name: python:lambda@.* it makes 3 .int., which is no",
        ),
        (
            {"environment": functools.partial(Doors, **{"rooms": 3})},
            "cannot be made without arguments",
        ),
        ({"environment": functools.partial(Doors, LOCK)}, "Doors cannot be sent to"),
        ({"on_step": "print"}, "on_step='print': a function that gets each row"),
        ({"train_dataset": ROWS}, "no argument train_dataset .here it is data=.; it has"),
        ({"steps": 3}, "no argument steps .steps is a key of the config."),
        ({"rewards": ["math"]}, "'math' is no function .*reward.functions takes names"),
        ({"rewards": "math"}, r"write rewards=\[f\]; reward.functions takes names"),
        ({"model": 3}, "model: a name as of student.model, a pair .* this is int"),
        ({"model": (SimpleNamespace(), None)}, "this is SimpleNamespace, NoneType"),
    ],
)
def test_objects_that_do_not_fit_are_refused(
    objects: dict[str, Any], told: str, student: str, tmp_path: Path
) -> None:
    """Before the run starts; nothing is left of it."""
    run = keys(run_dir=str(tmp_path / "runs" / "run"), **GSPO)
    with pytest.raises(UserError, match=told):
        train(run, **{"data": ROWS, "model": student, "rewards": [length]} | objects)
    assert list(tmp_path.iterdir()) == []


def test_a_class_of_a_notebook_has_the_digest_of_its_methods(tmp_path: Path) -> None:
    """Some versions of Python find no source of the class itself there."""

    def entry(answer: int) -> str:
        source = "class Rooms(Environment):\n    def step(self, text, messages):\n        return "
        (tmp_path / f"{answer}.py").write_text(f"{source}{answer}\n")
        names: dict[str, Any] = {"Environment": Environment, "__name__": "no_module"}
        exec(compile(f"{source}{answer}\n", tmp_path / f"{answer}.py", "exec"), names)
        return bind(None, environment=names["Rooms"])[0].environment.name or ""

    assert entry(3) == entry(3) != entry(4)


def test_keys_of_an_environment_are_refused_where_nobody_gives_one() -> None:
    config = Config.load(overrides={"environment.max_turns": 3})
    with pytest.raises(UserError, match=r"no environment: set max_turns=8, or environment\.name"):
        make_job(config)
    assert bind(config, environment=Doors)[0].environment.max_turns == 3


def test_an_environment_may_be_a_class_or_what_makes_one() -> None:
    doors = 5

    class Here(Doors):  # of no module: sent by value
        def step(self, text: str, messages: Any) -> Answer:
            return Answer(f"{doors} doors", done=True)

    for made, resets in ((Here, True), (functools.partial(Doors, doors=2), True), (Echo, False)):
        config, given = bind(Config.load(overrides={"environment.max_turns": 2}), environment=made)
        with pool_of(config, 1, given.code) as pool:
            assert pool.facts().resets == resets
    arguments = {"environment.arguments": {"doors": 2}, "environment.name": "x"}
    config, given = bind(Config.load(overrides=arguments), environment=Doors)
    with pool_of(config, 1, given.code) as pool:
        assert config.environment.arguments == {"doors": 2} and not pool.facts().tools


def test_a_hash_of_rows_is_the_same_in_every_process() -> None:
    """Also of values that JSON does not have, whose text may have an address or an order."""

    def digest(**values: object) -> str:
        return RowList("rows", [{"prompt": "x", **values}], KEYS, "data").digest()

    one, other = SimpleNamespace(a=1), SimpleNamespace(a=1)
    assert digest(x=one, y={"b", "a"}) == digest(x=other, y={"a", "b"})
    assert len({digest(x=one), digest(x=SimpleNamespace(a=2)), digest(x=b"1"), digest(x=1)}) == 4


def test_a_loaded_model_is_trained_and_sampled_as_its_folder(student: str, tmp_path: Path) -> None:
    """Its copy in the run directory is named by its weights: another model is another run."""
    model = load_model(student)
    run = keys(run_dir=str(tmp_path / "run"), algorithm="sft", steps=1)
    expected = train({**run, "run_dir": str(tmp_path / "named")}, model=student, data=ROWS)
    plan = dry_run(run, model=model, data=ROWS)
    assert not plan.refusals and not (tmp_path / "run").exists()
    result = train(run, model=model, data=ROWS)
    assert numbers(result) == numbers(expected)
    (folder,) = result.run_dir.glob("given-model-*")
    assert not unlisted_files(result.run_dir)
    assert Config.load(result.run_dir / CONFIG_FILE).student.model == str(folder)
    moved = result.run_dir.rename(tmp_path / "moved")
    again = train({**run, "run_dir": str(moved), "steps": 2}, model=model, data=ROWS)
    assert again.metrics[-1]["step"] == 2 and len(list(moved.glob("given-model-*"))) == 1
    other = load_model(save_model(tmp_path / "other", 32, 1, seed=5))
    with pytest.raises(UserError, match="(?s)another config.*student.model"):
        train({**run, "run_dir": str(moved), "steps": 3}, model=other, data=ROWS)
    (kept,) = moved.glob("given-model-*")  # the run's own, and nothing of the other model
    assert kept.name == folder.name
    texts = [
        [completion.text for completion in group]
        for each in (model, student, Path(student))
        for group in generate(each, ["1+1="], n=2, max_new_tokens=4)
    ]
    assert texts[0] == texts[1] == texts[2]
    short = {"max_new_tokens": 4, "data.verifier": "exact"}
    here = evaluate(model, overrides=short, eval_data=ROWS)
    assert here["metrics"] == evaluate(student, short, eval_data=ROWS)["metrics"]


def test_a_model_of_transformers_is_trained(student: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch to hold a model of transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pair = (AutoModelForCausalLM.from_pretrained(student), AutoTokenizer.from_pretrained(student))
    run = keys(run_dir=str(tmp_path / "run"), algorithm="sft", steps=1)
    expected = train({**run, "run_dir": str(tmp_path / "named")}, model=student, data=ROWS)
    assert numbers(train(run, model=pair, data=ROWS)) == numbers(expected)
    with bound(run, pair, data=ROWS) as (config, given):
        assert check_job(config, given)[0]
    with pytest.raises(UserError, match=r"give both, as in model=\(model, tokenizer\)"):
        train(run, model=pair[0], data=ROWS)
    (mine,), (theirs,) = (generate(each, ["1+1="], max_new_tokens=4) for each in (student, pair))
    assert mine[0].text == theirs[0].text


@pytest.mark.parametrize("dry", [True, False])
def test_nothing_is_left_of_a_model_that_is_not_trained(
    dry: bool, student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run that fails in whatever way, and a disk without room."""
    run = keys(run_dir=str(tmp_path / "runs" / "a"), algorithm="sft")

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("stopped") if dry else OSError(28, "No space left on device")

    place = "jaxrl.run.attempt.plan_run" if dry else "jaxrl.run.python_objects.write_model"
    monkeypatch.setattr(place, fails)
    ends = pytest.raises(RuntimeError, match="stopped") if dry else pytest.raises(UserError)
    with ends:
        (dry_run if dry else train)(run, model=load_model(student), data=ROWS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
def test_objects_reach_the_processes_of_a_cluster(student: str, tmp_path: Path) -> None:
    """The rows stay where the program runs; an environment and a loaded model travel."""
    doors = 4

    class Here(Environment):  # of no module: sent by value
        def reset(self, row: Any) -> str:
            return f"{doors} doors: {row['prompt']}"

        def step(self, text: str, messages: Any) -> Answer:
            return Answer("bye", reward=float(len(text)), done=True)

    def digits(completions: list[str]) -> list[float]:
        return [float(sum(map(str.isdigit, text))) for text in completions]

    def run(name: str, **more: object) -> Any:
        asked = keys(**GSPO, **more, run_dir=str(tmp_path / name))
        objects: dict[str, Any] = {"environment": Here, "model": load_model(student)}
        return train(asked, data=ROWS, rewards=[digits], **objects)

    assert numbers(run("there", launcher="ray")) == numbers(run("here"))


def test_the_path_of_an_environment_is_whole_whatever_the_config_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the run can be resumed from any folder."""
    monkeypatch.chdir(tmp_path)
    Path("env.py").touch()
    run = keys(**GSPO, **{"teacher.model": None, "reward.functions": ["exact"]})
    for config in (run, Config.of(run)):
        made, _ = bind(config, environment="env.py:E")
        assert made.environment.name == f"{tmp_path / 'env.py'}:E"


def terse(student: str, path: Path) -> str:
    """A copy of the student that ends each turn at once: the first of its features is large in all
    tokens, and twice as large in the one that ends."""
    shutil.copytree(student, path)
    (file,) = path.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(file)
    table = tensors["model.embed_tokens.weight"]
    table[:, 0] = 100
    table[258, 0] = 200
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    return str(path)


def test_where_only_an_environment_judges_its_reward_is_shown(
    student: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the console, the end of the run, the samples, an evaluation's table and the report."""

    class Ends(Environment):
        def step(self, text: str, messages: Any) -> Answer:
            return Answer("", reward=1.0, done=True)

    rows = [{"prompt": f"{n}+{n}-{n}="} for n in range(10, 18)]
    given: Any = {"eval_data": rows[:6], "environment": Ends}
    run = keys(**GSPO, **{"teacher.model": None, "run_dir": str(tmp_path / "run")})
    result = train(run, data=rows, model=terse(student, tmp_path / "terse"), **given)
    out = capsys.readouterr().out
    assert "held-out reward 1.000" in out
    assert "environment's reward on held-out prompts: 1.000 before, 1.000 after" in out
    page = Console(width=100)
    with page.capture() as captured:
        page.print(results_table(evaluate(result.run_dir, samples=tmp_path / "samples", **given)))
    lines = (tmp_path / "samples").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [1.0] * 12
    assert re.search(r"not judged.*\n.* reward +1\.000", captured.get())
    assert cli.run(report_main, [str(result.run_dir)]) == 0
    html = (result.run_dir / "report.html").read_text()
    assert "environment's reward on held-out prompts" in html.replace("&#39;", "'")
