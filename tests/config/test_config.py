"""The config: what it accepts, what it refuses in which words, and the way to YAML and back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from pydantic import ValidationError

from jaxrl.checkpoint.fingerprint import compare
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.config import keys as config_keys
from jaxrl.config import paths, yaml_text
from jaxrl.config.schema import QUICKSTART, Config
from jaxrl.config.section import Section
from jaxrl.config.settings import EnvironmentConfig
from jaxrl.errors import UserError, user_path
from jaxrl.process.json_types import JsonObject

MINIMAL = """
student: {model: a}
teacher: {model: b}
data: {train: c.jsonl}
"""
REPO_CONFIGS = sorted((Path(__file__).parent.parent.parent / "configs").glob("**/*.yaml"))


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return Config.load(path, list(overrides))


def message(*overrides: str, path: str | None = None) -> str:
    with pytest.raises(UserError) as error:
        Config.load(path, list(overrides))
    return str(error.value)


def test_without_a_path_it_is_the_quickstart() -> None:
    config = Config.load()
    assert (config.student.model, config.teacher.model) == ("builtin:student", "builtin:teacher")
    assert config.data.train == ("arithmetic:size=1000000",)
    assert config == Config.load(QUICKSTART)


def test_a_model_or_data_of_ones_own_is_on_top_of_the_defaults(tmp_path: Path) -> None:
    own = ["student.model=a", "teacher.model=b", "data.train=c"]
    assert Config.load(None, own) == load(tmp_path, MINIMAL.replace("c.jsonl", "c"))
    kept = Config.load("builtin:quickstart", own)
    assert (kept.student.model, kept.batch_size) == ("a", Config.load().batch_size)
    for word in own[::2]:
        text = message(word)
        assert "is required and not set" in text and word.partition("=")[0] in text
        assert "--config builtin:quickstart" in text


def test_errors_say_which_values_are_the_quickstarts(tmp_path: Path) -> None:
    rewarded = ["algorithm=gspo", "teacher.model=null", "reward.functions=[math]"]
    error, origin = message(*rewarded).splitlines()
    assert "group_size=1" in error
    assert origin == "from the built-in quickstart, because there is no --config: group_size=1"
    assert "quickstart" not in message(*rewarded, "group_size=1")  # whoever sets it knows
    with pytest.raises(UserError) as refused:
        load(tmp_path, MINIMAL, "actor.minibatches=999")
    assert "quickstart" not in str(refused.value)


def test_overrides_may_be_a_mapping() -> None:
    lines = ["steps=2", "optimizer.b1=0.5", "optimizer.b2=0.75", "data.eval={a: x, b: [y, z]}"]
    nested = {
        "steps": 2,
        "optimizer": {"b1": 0.5},
        "optimizer.b2": 0.75,
        "data": {"eval": {"a": "x", "b": ["y", "z"]}},
        "run_dir": Path("here"),
    }
    assert Config.load(None, nested) == Config.load(None, [*lines, "run_dir=here"])
    for wrong in ({"setps": 2}, {"optimizer.lr": 1}, {1: 2}, {"optimizer": 5}, ["steps", 3], [3]):
        with pytest.raises(UserError):
            Config.load(None, wrong)  # type: ignore[arg-type]


def test_a_config_made_in_python_says_what_is_wrong() -> None:
    config = Config.load()
    assert Config(**config.model_dump()) == config == Config(**dict(config))
    with pytest.raises(UserError) as error:
        Config(steps=2)
    text = str(error.value)
    assert "student.model is required" in text and "data.train is required" in text
    assert 'Config.load(FILE, overrides={"steps": 2})' in text and "pydantic" not in text
    with pytest.raises(UserError, match="steps: .* got 0"):
        Config(**(config.model_dump() | {"steps": 0}))


@pytest.mark.parametrize(
    ("load", "told"),
    [
        (lambda: Config.load({"steps": 3}), r"not {'steps': 3} .dict.; Config.of\("),  # type: ignore[arg-type]
        (lambda: Config.load(None, 3), "overrides is a list"),  # type: ignore[arg-type]
        (lambda: resolve_model(object()), "a text or a path, not as object"),  # type: ignore[arg-type]
        (lambda: user_path(None), "a path is a text or a pathlib.Path, not None"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_kind_are_the_users_error(
    load: Callable[[], object], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        load()
    assert Config.of(None, ["steps=3"]) == Config.of({"steps": 3})


def test_every_alias_names_a_key_that_there_is() -> None:
    known = {key.path for key in config_keys.keys(Config)}
    aliases, absent, _ = config_keys.other_libraries()
    assert aliases and absent
    assert not {key for found in aliases.values() for key in found} - known
    assert not set(aliases) & set(absent)
    assert not (set(aliases) | set(absent)) & known


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("sampling.max_tokens", "max_new_tokens"),
        ("max_completion_length", "max_new_tokens"),
        ("num_generations", "group_size"),
        ("rollout.n", "group_size"),
        ("actor_rollout_ref.rollout.n", "group_size"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.learning_rate"),
        ("actor_rollout_ref.actor.kl_loss_coef", "policy.kl_coef"),
        ("actor_rollout_ref.hybrid_engine", "docs/coming-from-verl.md"),
        ("beta", "policy.kl_coef or distill.jsd_beta"),
        ("kl_coef", "policy.kl_coef or policy.reward_kl_coef"),
        ("lmbda", "distill.on_policy_fraction"),
        ("per_device_train_batch_size", "batch_size or actor.micro_batch_tokens"),
        ("gradient_accumulation_steps", "actor.micro_batch_tokens"),
        ("trainer.total_epochs", "steps"),
        ("lora.rank", "did you mean student.lora.rank?"),
        ("peft_config.r", "here it is student.lora.rank"),
        ("critic.optim.weird", "there is no critic here"),
    ],
)
def test_keys_of_other_libraries_are_refused_with_the_key_here(theirs: str, ours: str) -> None:
    (line,) = message(f"{theirs}=1").splitlines()
    assert line.startswith(f"unknown key {theirs} (") and ours in line


@pytest.mark.parametrize("key", ["reward.weights", "data.weights"])
def test_a_key_of_numbers_asks_for_numbers(key: str) -> None:
    for value in ("x", "1"):
        assert message(f"{key}={value}").startswith(f"{key}: it should be a list of numbers")


def test_a_key_below_a_value_is_refused_with_the_key_here(tmp_path: Path) -> None:
    assert "here it is algorithm" in message("algorithm.adv_estimator=grpo")
    with pytest.raises(UserError, match="algorithm.adv_estimator .here it is algorithm"):
        load(tmp_path, MINIMAL + "algorithm: {adv_estimator: grpo}")


def test_class_defaults_run_with_only_the_three_required_keys(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    assert config.student.model == "a"
    assert [key.path for key in config_keys.keys(Config) if key.required] == [
        "student.model",
        "data.train",
    ]


@pytest.mark.parametrize("path", REPO_CONFIGS, ids=lambda path: path.name)
def test_ready_made_configs_load(path: Path) -> None:
    assert Config.load(path).steps > 0


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("sampling.stop=['1e-4', '\\n', 'null', '1:2', ': ', ' ']", "name=1.5", "run_dir='007'"),
        ("data.eval=null", "data.system_prompt=Answer: yes # or 'no'", "data.verifier='true'"),
        ("optimizer.learning_rate=3.7e-06", "optimizer.eps=1e-30", "optimizer.clip_norm=null"),
        ("actor.devices=1:2", "actor.parallel.fsdp=-1", "data.train=[a.jsonl, 'b:x=1,y=2']"),
    ],
)
def test_dump_reads_back_equal(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = Config.load("builtin:quickstart", list(overrides))
    assert load(tmp_path, config.dump()) == config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["steps=7"],
        ["optimizer.learning_rate=1e-5", "student.model=a", "data.eval={b: c.jsonl}"],
    ],
)
def test_the_repr_names_what_differs_from_the_defaults(overrides: list[str]) -> None:
    config, texts = Config.load("builtin:quickstart", overrides), list[str]()
    for key in config_keys.keys(Config):
        value: object = config
        for part in key.path.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part)
        if key.required or value != key.default:
            texts.append(f"{key.path.rpartition('.')[2]}={value!r}")
    assert all(text in repr(config) for text in texts) and len(texts) < 40
    assert len(repr(config)) < 1200
    assert "reward=" not in repr(config) and repr(config.sampling) == "SamplingConfig()"


def test_dump_holds_every_key() -> None:
    mapping = yaml_text._parse(Config.load().dump())
    for key in config_keys.keys(Config):
        value = mapping
        for part in key.path.split("."):
            value = value[part]


def test_the_last_override_wins_over_file_and_earlier_ones(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL + "steps: 5", "steps=6", "optimizer.b1=0.5", "steps=7")
    assert (config.steps, config.optimizer.b1, config.optimizer.b2) == (7, 0.5, 0.95)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1", -1),
        ("1e-4", 1e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("true", True),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("1:2", "1:2"),
        ("007", "007"),
        ("'1'", "1"),
        ('"\\n"', "\n"),
        ("[a, 1, 1:2]", ["a", 1, "1:2"]),
        ("a: b # c", "a: b # c"),
        ("actor=2,rollout=2", "actor=2,rollout=2"),
        ("2024-01-01", "2024-01-01"),
    ],
)
def test_override_values(text: str, value: object) -> None:
    parsed = yaml_text.parse_value(text)
    assert parsed == value
    assert isinstance(parsed, type(value))


WRITTEN = ["1.10", "7e0", ".5", "+5", "-0", "5.", "1E5", ".inf", ".nan", "20261126.123456789012"]
WRITTEN += ["1_000", "0x10", "0o7", "007", "1:30", "2026-11-26", "yes", "on", "True", "1.2.3"]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_key_for_text_holds_what_was_written(tmp_path: Path, text: str) -> None:
    """Not the number that it is: run `1.10` would be run `1.1`."""
    base = MINIMAL.replace("teacher: {model: b}", "teachers: {a: x, b: y}")
    pairs = [f"run_dir={text}", f"sampling.stop=[{text}, a]", f"teachers.a={text}"]
    pairs += [f"name={text}"] if text[0].isalnum() and ":" not in text else []
    lines = f"run_dir: {text}\nsampling: {{stop: [{text}, a]}}\nteachers: {{a: {text}, b: y}}"
    by_file = load(tmp_path, MINIMAL.replace("teacher: {model: b}", lines), *pairs[3:])
    for config in (by_file, load(tmp_path, base, *pairs)):
        assert config.run_dir == config.teachers["a"].model == text
        assert config.sampling.stop == (text, "a") and config.name in (text, "run")
        assert load(tmp_path, config.dump()) == config
    assert load(tmp_path, base, f"sampling.stop={text}").sampling.stop == (text,)


def test_a_key_for_numbers_or_anything_holds_plain_numbers() -> None:
    environment = EnvironmentConfig(
        name="calls", max_turns=yaml_text.parse_value("+5"), arguments=yaml_text._parse("x: [1.10]")
    )
    values = [environment.max_turns, *environment.arguments["x"]]
    assert values == [5, 1.1] and list(map(type, values)) == [int, float]


@pytest.mark.parametrize("text", ["true", "false", "null", "~", ""])
def test_a_word_of_yaml_is_no_text_without_quotes(text: str) -> None:
    assert "written in quotes: '" in message(f"name={text}")


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("distill.jsd_bet=1", "distill.jsd_beta"),
        ("step=1", "steps"),
        ("learning_rate=1", "optimizer.learning_rate"),
        ("temperature=1", "sampling.temperature or eval.temperature"),
        ("optimiser.learning_rate=1", "optimizer.learning_rate"),
        ("techer.model=x", "teacher.model"),
        ("actor.parallel.tensr=2", "actor.parallel.tensor"),
        ("distill.temperature=2", "distill.distill_temperature"),
    ],
)
def test_unknown_keys_are_refused_with_the_near_one(override: str, near: str) -> None:
    key = override.split("=")[0]
    text = message(override)
    assert text.startswith(f"unknown key {key} ")
    assert near in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["steps=0"], ["steps", "1", "got 0"]),
        (["steps=true"], ["steps", "got True"]),
        (["steps='5'"], ["steps", "got '5'"]),
        (["steps=1.5"], ["steps", "got 1.5"]),
        (["steps=null"], ["steps", "got None"]),
        (["sampling.temperature=nan"], ["sampling.temperature"]),
        (["sampling.temperature=.inf"], ["sampling.temperature", "inf"]),
        (["sampling.top_p=0"], ["sampling.top_p", "greater than 0"]),
        (["distill.signal=foo"], ["distill.signal", "student_topk", "got 'foo'"]),
        (["distill.jsd_beta=1.1"], ["distill.jsd_beta", "1", "got 1.1"]),
        (["distill.on_policy_fraction=-0.1"], ["distill.on_policy_fraction", "0"]),
        (["distill.top_k=2000"], ["distill.top_k", "1024", "2000"]),
        (["data.train=[]"], ["data.train", "empty"]),
        (["data.train=null"], ["data.train", "string"]),
        (["optimizer=5"], ["optimizer is a section", "5"]),
        (["steps.x=5"], ["steps.x", "not a section"]),
        (["steps"], ["'steps'", "key=value"]),
        (["=1"], ["'=1'", "key=value"]),
        (["optimizer={b1: 0.5}"], ["one by one"]),
        (["peft_config={r: 8}"], ["here it is student.lora.rank"]),
        (["sampling.stop=["], ["sampling.stop", "not YAML"]),
        (["name=../x"], ["name", "../x"]),
        (["student=null"], ["student.model is required"]),
        (["actor.devices=2"], ["actor.devices", "'2'", "1:2"]),
        (["actor.devices=2:1"], ["actor.devices", "empty"]),
        (["actor.parallel.data=0"], ["actor.parallel", "data=0"]),
        (["actor.parallel.data=-1", "actor.parallel.tensor=-1"], ["data and tensor are both -1"]),
        (["eval.samples=2"], ["eval", "samples=2", "temperature"]),
        (
            ["rollout.cache_tokens=63", "max_new_tokens=64"],
            ["rollout.cache_tokens=63", "64 at least"],
        ),
        (["optimizer.name=sgd", "optimizer.weight_decay=0.1"], ["weight_decay=0.1", "name=sgd"]),
        (
            ["distill.signal=student_topk", "distill.on_policy_fraction=0.5"],
            ["student_topk", "on_policy_fraction=1"],
        ),
        (["actor.minibatches=9", "batch_size=4", "group_size=2"], ["9", "8 sequences"]),
    ],
)
def test_bad_values_name_the_key_the_value_and_the_limit(
    overrides: list[str], words: list[str]
) -> None:
    text = message(*overrides, path="builtin:quickstart")
    for word in words:
        assert word in text
    assert "\n" not in text
    assert "pydantic" not in text


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (["teacher.model=null"], ["teacher.model=null", "algorithm=sft"]),
        (["algorithm=sft"], ["teacher.model=null", "algorithm=sft"]),
        (["distill.seq_kd=true"], ["distill.seq_kd=true", "distill.on_policy_fraction=0.5"]),
        (["distill.signal=sampled"], ["distill.signal=sampled", "distill.jsd_beta=1"]),
        *(
            (["distill.signal=sampled", "distill.jsd_beta=1", key], [key])
            for key in (
                "sampling.temperature=0.7",
                "sampling.temperature=0",
                "sampling.top_k=5",
                "sampling.top_p=0.9",
                "sampling.min_p=0.1",
                "distill.distill_temperature=2",
                "distill.on_policy_fraction=0.5",
            )
        ),
        (
            ["distill.signal=sampled", "distill.jsd_beta=1", "distill.on_policy_fraction=0.5"],
            [
                *("distill.signal=sampled", "distill.jsd_beta=1", "distill.seq_kd=true"),
                "distill.on_policy_fraction=0.5",
            ],
        ),
        (
            ["distill.signal=topk", "distill.top_k=8", "distill.entropy_aware=true"],
            ["distill.signal=topk", "distill.top_k=16", "distill.entropy_aware=true"],
        ),
        (
            ["data.prompt_key=null", "data.messages_key=null"],
            ["data.prompt_key=null", "data.completion_key=null", "data.answer_key=null"],
        ),
        (
            ["sampling.temperature=0", "group_size=2"],
            ["sampling.temperature=0", "group_size=1"],
        ),
    ],
)
def test_cross_field_rules(bad: list[str], good: list[str]) -> None:
    base = ["group_size=1"]
    message(*base, *bad)
    Config.load(None, base + good)


@pytest.mark.parametrize(
    "given",
    [
        *("mesh={actor: 2, rollout: 1}", "mesh={actor:2,rollout:1}", "mesh=actor=2,rollout=1"),
        {"mesh": {"actor": 2, "rollout": 1}},
    ],
)
def test_a_mesh_is_text_or_a_mapping(given: str | dict[str, object], tmp_path: Path) -> None:
    overrides = [given] if isinstance(given, str) else given
    assert Config.load(None, overrides).mesh == "actor=2,rollout=1"
    assert load(tmp_path, MINIMAL + "mesh: {actor+rollout: 4}").mesh == "actor+rollout=4"


def test_a_run_with_another_config_names_every_way_out() -> None:
    """`resume=never` makes another folder only where none is named."""
    for folder, ways in ((None, True), ("runs/x", False)):
        old = Config.load(None, ["steps=9", *([] if folder is None else [f"run_dir={folder}"])])
        new = old.model_copy(update={"seed": 3})
        with pytest.raises(UserError, match="name another run_dir .*set these back") as error:
            compare(old.model_dump(mode="json"), new, "runs/x")
        assert ("--resume never" in str(error.value)) == ways


BROKEN = {
    "teacher.model=m": "has no teacher: set teacher.model=null",
    "group_size=1": "group_size=1",
    "reward.functions=[]": "set reward.functions",
    "sampling.top_p=0.9": "top_p=1",
    "distill.on_policy_fraction=0.5": "distill.on_policy_fraction=1",
    "reward.overlong_buffer=9999": "reward.overlong_buffer=9999 ",
    "policy.advantages=similarity": "set grouper.model",
    "teacher.ca_file=x.pem": "teacher.ca_file=x.pem",
}
"""Of a run that learns from rewards: a key that breaks a rule -> what is said of it."""


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_all_broken_rules_are_told_at_once(count: int) -> None:
    """A line for each, in any company; a rule that needs what another one checks does not fail."""
    right = {"group_size": "2", "reward.functions": "[math]"}
    for chosen in combinations(BROKEN, count):
        keys = right | dict(text.split("=", 1) for text in chosen)
        base = ["student.model=a", "data.train=b", "algorithm=grpo"]
        text = message(*base, *(f"{key}={value}" for key, value in keys.items()))
        assert len(text.splitlines()) == count
        assert all(BROKEN[one] in text for one in chosen)


def test_many_errors_stay_a_few_lines() -> None:
    keys = ["steps", "seed", "batch_size", "group_size", "max_new_tokens", "max_prompt_tokens"]
    assert len(message(*(f"{key}=x" for key in keys)).splitlines()) == 5
    assert len(message(*(f"x{i}=1" for i in range(9))).splitlines()) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "steps: 1\nsteps: 2", ["line 6", "'steps' is given twice"]),
        (MINIMAL + "optimizer:\n  b1: 0.1\n  b1: 0.2", ["'b1' is given twice"]),
        (MINIMAL + "steps: [", ["not YAML", "line"]),
        (MINIMAL + "1: 2", ["line 5", "'1'"]),
        (MINIMAL + "optimizer.b1: 0.5", ["optimizer.b1", "nest it"]),
        ("- a\n- b", ["list"]),
        ("", ["student.model is required", "data.train is required"]),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load(tmp_path, text)
    for word in words:
        assert word in str(error.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent.yaml: No such file"):
        Config.load(tmp_path / "absent.yaml")


def test_an_empty_section_holds_its_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL + "optimizer:\n") == load(tmp_path, MINIMAL)


def test_frozen_and_strict_in_python_too() -> None:
    config = Config.load()
    with pytest.raises(ValidationError):
        config.steps = 3  # type: ignore[misc]
    with pytest.raises(UserError, match="unknown key no_such_key"):
        Config(**(config.model_dump() | {"no_such_key": 1}))


def test_a_relative_path_is_of_its_config_file_then_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, names in ((there, ("r.py", "a.jsonl", "b-1.jsonl", "m")), (here, ("r.py", "s.py"))):
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
    path = there / "run.yaml"
    path.write_text(
        "algorithm: gspo\nstudent: {model: ./m}\n"
        "reward: {functions: [r.py:f, s.py:g, 'regex:a/b:c']}\n"
        "environment: {name: r.py:E, arguments: {server: [python, r.py], most: 3}}\n"
        "data: {train: ['./a.jsonl:split=x', b-*.jsonl, other.jsonl], eval: {easy: a.jsonl}}\n"
    )
    monkeypatch.chdir(here)
    config = Config.load(path)
    assert config.student.model == f"{there}/m"
    assert config.reward.functions == (f"{there}/r.py:f", f"{here}/s.py:g", "regex:a/b:c")
    assert config.environment.name == f"{there}/r.py:E"
    assert config.environment.arguments == {"server": ["python", f"{there}/r.py"], "most": 3}
    assert config.data.train == (f"{there}/a.jsonl:split=x", f"{there}/b-*.jsonl", "other.jsonl")
    assert config.data.eval == {"easy": (f"{there}/a.jsonl",)}
    assert Config.load(path, ["reward.functions=r.py:f"]).reward.functions == (f"{here}/r.py:f",)

    (tmp_path / "config.yaml").write_text(config.dump())
    monkeypatch.chdir(tmp_path)
    assert Config.load(tmp_path / "config.yaml") == config
    assert compare(config.model_dump(mode="json"), Config.load(path, []), "run") == []
    another = Config.load(path, ["environment.arguments.most=4"])
    with pytest.raises(UserError, match=r"environment\.arguments: {'most': 3} there, {'most': 4}"):
        compare(config.model_dump(mode="json"), another, "run")
    moved = config.model_dump(mode="json")
    moved["reward"]["functions"][0] = "elsewhere/r.py:f"
    moved["environment"]["name"] = "elsewhere/r.py:E"
    moved["environment"]["arguments"]["server"][1] = "elsewhere/r.py"
    assert compare(moved, config, "run") == []
    moved["reward"]["functions"][0] = "elsewhere/r.py:g"
    with pytest.raises(UserError, match="reward.functions"):
        compare(moved, config, "run")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["environment.arguments={id: x}"], "set arguments={}, or environment.name too"),
        (["environment.name=a:B", "environment.arguments={a-b: 1}"], "of an argument in Python"),
        (["environment.name=a:B", "environment.arguments=3"], "valid dictionary"),
    ],
)
def test_arguments_are_those_of_an_environment(given: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        Config.load(None, given)


def test_of_several_teachers_only_the_models_are_paths(tmp_path: Path) -> None:
    for name in ("org/m", "org/cert.pem", "host:1/m"):
        (tmp_path / name).mkdir(parents=True)
    served = {"address": "host:1/m", "api_model": "org/m"}
    teachers = {"x": "org/m", "y": served, "z": {"model": "org/m"}}
    teacher = {"ca_file": "org/cert.pem"}
    found = paths.beside({"teachers": teachers, "teacher": teacher}, tmp_path)
    assert found["teachers"] == {
        "x": f"{tmp_path}/org/m",
        "y": served,
        "z": {"model": f"{tmp_path}/org/m"},
    }
    assert found["teacher"]["ca_file"] == f"{tmp_path}/org/cert.pem"


@pytest.mark.parametrize("one", [{"model": "b", "new_key": 1}, {"weight": -1}, "b"])
def test_recorded_teachers_that_cannot_be_read_are_named(one: JsonObject | str) -> None:
    config = Config.load(None, ["student.model=a", "data.train=c.jsonl", "teachers={x: b}"])
    recorded = config.model_dump(mode="json") | {"teachers": {"x": one}}
    with pytest.raises(UserError, match="run_dir=run: teachers in the config .*cannot be read"):
        compare(recorded, config, "run")


def test_run_path() -> None:
    assert Config.load(None, ["name=x"]).run_path == Path("runs/x")
    assert Config.load(None, ["name=x", "run_dir=y/z"]).run_path == Path("y/z")


def sections(model: type[Section]) -> list[type[Section]]:
    below = [
        field.annotation
        for field in model.model_fields.values()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    ]
    return [model, *(found for section in below for found in sections(section))]


def test_every_key_and_section_is_documented() -> None:
    for key in config_keys.keys(Config):
        assert key.doc, key.path
    for section in sections(Config):
        assert section.__doc__, section


@pytest.mark.parametrize("key", ["name", "data.teacher_key", "student.model"])
def test_half_of_a_character_is_refused_wherever_it_stands(key: str) -> None:
    with pytest.raises(UserError, match="surrogate|\\\\ud83d"):
        Config.load(overrides={key: "a\ud83d"})
