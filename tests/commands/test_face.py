"""The Python face: public names, whatever was imported before them; functions given to `train`."""

import functools
import inspect
import pickle
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import reward_functions
from cases import and_slow
from runs import CONSTANT, SHORT, numbers, save_model

import jaxrl
from jaxrl import Config
from jaxrl.config import cli
from jaxrl.config.roles import RewardConfig
from jaxrl.errors import RunError, UserError
from jaxrl.rewards.batch_rewards import RewardFunctions
from jaxrl.rewards.functions import find
from jaxrl.rewards.reward_pool import Item
from jaxrl.run.python_objects import NOTHING, bind
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.train import main, train
from jaxrl.types import Prompt

pytestmark = pytest.mark.usefixtures("shared_programs")

HOMES = """
from jaxrl.advantages import group_advantages
import jaxrl.similarity
import jaxrl.models.encoder, jaxrl.models.reward
from jaxrl.algorithms import advantages, similarity
assert group_advantages is advantages.group_advantages
assert jaxrl.similarity is similarity and similarity.cluster
assert callable(jaxrl.models.encoder.embed) and callable(jaxrl.models.reward.score)
"""
"""Public modules are found wherever they live."""


@pytest.mark.parametrize(
    "before",
    and_slow(
        [f"{HOMES}from jaxrl.train import main"],
        # The second is as the wheel's test and a page's Python begin.
        ["import jaxrl.train, jaxrl.generate", ""],
    ),
    ids=["public homes, a name", "modules", "nothing"],
)
def test_public_names_are_callable_in_any_order(before):
    code = f"{before}\nfrom jaxrl import Config, dry_run, train, load_model, generate\n"
    code += "import jaxrl.train\n"
    code += "assert all(map(callable, (Config.load, dry_run, train, load_model, generate)))\n"
    code += "assert callable(jaxrl.train.main) and callable(jaxrl.train) and jaxrl.generate.main\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        getattr(jaxrl, "tain")  # noqa: B009


def test_the_public_names_are_listed_before_anything_is_imported():
    code = "import sys, jaxrl; print(*dir(jaxrl)); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert set(jaxrl.__all__) <= set(done.stdout.split())
    assert all(hasattr(jaxrl, name) for name in jaxrl.__all__)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "student", 32, 1, seed=0)


def rewarded(student, run_dir, *overrides):
    keys = ["algorithm=gspo", "teacher.model=null", "data.eval=null", "group_size=4", "steps=3"]
    keys += ["reward.workers=1", "mesh=actor+rollout=1", f"run_dir={run_dir}"]
    config = [f"student.model={student}", *SHORT, *keys, *CONSTANT, *overrides]
    return Config.load("builtin:quickstart", config)


def length(completions, finish_reason):
    return [len(text) / 10 for text in completions]


def vowels(completions, **columns):
    return [float(sum(text.count(c) for c in "aeiou")) for text in completions]


def test_rows_go_to_on_step_and_functions_of_python_are_rewards(student, tmp_path, capsys):
    """In their places among `reward.functions`; the run resumes with the same ones only."""
    scale = 2.0

    def scaled(completions):  # of no module: sent by value, with what it closes over
        return [scale * len(text) for text in completions]

    names = ["reward.functions=['regex:a', 'python:scaled']", "reward.weights=[0, 1]"]
    config = rewarded(student, tmp_path / "run", *names)
    rows = []
    result = train(config, on_step=rows.append, rewards=[scaled])
    assert rows == result.metrics == read_metrics(tmp_path / "run") and len(rows) == 4
    for row in rows[1:]:
        assert row["reward/mean"] == pytest.approx(row["reward/scaled/mean"])
        assert "reward/regex/mean" in row
    recorded = Config.load(tmp_path / "run" / "config.yaml")
    regex, entry = recorded.reward.functions
    assert regex == "regex:a" and entry.startswith("python:scaled@")

    longer = rewarded(student, tmp_path / "run", *names, "steps=4")
    again = train(longer, rewards=[scaled])
    assert numbers(again)[:3] == numbers(result)[:3] and again.metrics[-1]["step"] == 4

    def other(completions):
        return [0.0 for _ in completions]

    other.__name__ = "scaled"
    with pytest.raises(UserError, match="(?s)another config.*reward.functions"):
        train(longer, rewards=[other])
    assert cli.run(main, ["--config", str(tmp_path / "run" / "config.yaml")]) == 2
    told = capsys.readouterr().err
    assert entry in told and "train(config, rewards=[scaled])" in told


@pytest.mark.parametrize("raised", and_slow([LookupError, SystemExit], [KeyboardInterrupt]))
def test_an_on_step_that_fails_ends_the_run_after_saving(student, tmp_path, raised):
    """The function is one of a module that its processes import in no time, as this one is not."""
    seen = []

    def on_step(row):
        seen.append(row["step"])
        row.clear()  # a copy: nothing of the run is lost
        if seen[-1] == 1:
            raise raised("enough")

    config = rewarded(student, tmp_path / "run", "steps=9", "reward.functions=[python:length]")
    with pytest.raises(RunError if raised is LookupError else raised) as error:
        train(config, on_step=on_step, rewards=[reward_functions.length])
    log = tmp_path / "run" / "log.txt"
    told = str(error.value) if raised is LookupError else log.read_text()
    assert f"on_step raised {raised.__name__}: enough" in told
    assert raised in (type(error.value), type(error.value.__cause__)) and seen == [0, 1]
    rows = read_metrics(tmp_path / "run")
    saved = rows[-1]["step"]
    assert f"checkpoint is of step {saved}" in told and 1 <= saved < 9
    assert rows[1]["reward/length/mean"] > 0
    if raised is not LookupError:
        return
    steps = []
    train(
        config,
        on_step=lambda row: steps.append(row["step"]),
        rewards=[reward_functions.length],
    )
    assert steps[-(9 - saved) :] == list(range(saved + 1, 10))
    assert steps[: -(9 - saved)] in ([], [saved])  # a row that lacked something comes again


@pytest.mark.slow
@pytest.mark.ray
def test_functions_of_python_reach_the_processes_of_a_cluster(student, tmp_path):
    def scaled(completions):
        return [float(len(text)) for text in completions]

    names = ["reward.functions=[python:scaled]"]
    here = train(rewarded(student, tmp_path / "here", *names), rewards=[scaled])
    asked = rewarded(student, tmp_path / "there", *names, "launcher=ray")
    assert numbers(train(asked, rewards=[scaled])) == numbers(here)


def gspo(*overrides):
    keys = ["algorithm=gspo", "teacher.model=null", "group_size=2"]
    return Config.load(None, [*keys, "reward.functions=[math]", *overrides])


def test_bound_functions_have_a_name_a_digest_and_a_place():
    config, given = bind(gspo(), rewards=[length, functools.partial(vowels, a=1)])
    math, *texts = config.reward.functions
    assert math == "math" and list(given.code) == texts
    assert [text.partition("@")[0] for text in texts] == ["python:length", "python:vowels"]
    # What is bound is bound again in its place.
    assert bind(config, rewards=[vowels, length])[0] == config
    (first,) = bind(gspo(), rewards=[lambda completions: 1])[1].code
    (second,) = bind(gspo(), rewards=[lambda prompts, completions: 1])[1].code
    assert first.startswith("python:lambda@") and first != second
    assert bind(gspo()) == (gspo(), NOTHING)


@pytest.mark.parametrize(
    ("rewards", "overrides", "told"),
    [
        ([length, length], [], "two functions are called 'length'"),
        ([3], [], "3 is no function"),
        ([int], [], "is no function"),
        (length, [], r"rewards=\[f\]"),
        ([length], ["reward.weights=[1]"], "weights has 1 numbers for the 2 functions"),
        ([length], ["algorithm=gkd", "teacher.model=x", "reward.functions=[]"], "no reward"),
    ],
)
def test_functions_that_do_not_fit_are_refused(rewards, overrides, told):
    with pytest.raises(UserError, match=told):
        bind(gspo(*overrides), rewards=rewards)


def test_what_cannot_be_sent_to_a_process_is_refused():
    lock = threading.Lock()

    def locked(completions):
        with lock:
            return [0.0 for _ in completions]

    with pytest.raises(UserError, match="locked cannot be sent to another.*path.py:function"):
        bind(gspo(), rewards=[locked])
    with pytest.raises(UserError, match=r"train\(config, rewards=\[length\]\)"):
        find("python:length")


def test_their_signature_is_that_of_a_function_in_a_file():
    """Columns by their names; one that the data lacks is named before anything is sampled."""

    def judge(completions, answer, hint=None):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    async def later(prompts, completions):
        return [float(len(prompts))]

    def wants(completions, no_such_column):
        return [0.0 for _ in completions]

    config, given = bind(gspo("reward.functions=[python:judge]"), rewards=[judge, later])
    given = pickle.loads(pickle.dumps(given.code))  # as they travel to another host
    with closing(RewardFunctions(config.reward, 8, 60.0, given)) as functions:
        items = [Item("p", "1", "1", {}), Item("p", "2", "3", {})]
        assert functions.pool.judge(0, items).result().values == [1.0, 0.0]
        assert functions.pool.judge(1, items).result().values == [1.0, 1.0]
    config, objects = bind(gspo(), rewards=[wants])
    reward = RewardConfig(functions=config.reward.functions[1:])
    asks = pytest.raises(UserError, match="asks for the column `no_such_column`")
    with closing(RewardFunctions(reward, 8, 60.0, objects.code)) as functions, asks:
        functions.check([Prompt(0, (1,), "p", answer="1")])


@pytest.mark.parametrize("name", ["train", "evaluate", "generate", "export"])
def test_a_public_function_shows_its_own_signature_and_docstring(name):
    """`jaxrl.train?` in a notebook, and `inspect.signature`."""
    module = getattr(jaxrl, name)
    function = getattr(module, name)
    assert inspect.signature(module) == inspect.signature(function)
    assert module.__doc__ == function.__doc__ and "Args:" in function.__doc__
    assert module.DESCRIPTION and function.__doc__ != module.DESCRIPTION


def test_a_run_may_be_given_as_a_file_or_as_its_keys(tmp_path):
    (tmp_path / "run.yaml").write_text(Config.load(overrides=["steps=3"]).dump())
    for given in (
        str(tmp_path / "run.yaml"),
        tmp_path / "run.yaml",
        {"steps": 3},
        Config.load(overrides={"steps": 3}),
    ):
        assert jaxrl.dry_run(given).config.steps == 3
    nested = Config.of({"steps": 3, "optimizer": {"learning_rate": 0.5}, "actor.remat": "full"})
    assert (nested.optimizer.learning_rate, nested.actor.remat) == (0.5, "full")
    for given in (3, ["steps=3"]):
        with pytest.raises(UserError, match="a Config, a YAML file or a mapping of keys, not"):
            train(given)
