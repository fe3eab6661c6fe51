"""The keys of a run: their page is fresh, their defaults run, and something reads each of them."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from kept_programs import UNREAD
from runs import save_reward_model
from tiny_models import REFERENCES, make_mesh

import jaxrl
from jaxrl.algorithms.methods import needed_roles
from jaxrl.algorithms.signals import Projection, distill_loss, teacher_signal
from jaxrl.config import cli, roles, schema, section, settings
from jaxrl.config import key_page as config_page
from jaxrl.config import keys as config_keys
from jaxrl.config.roles import ActorConfig
from jaxrl.config.schema import Config
from jaxrl.config.section import Section
from jaxrl.errors import UserError
from jaxrl.plan import make_plan
from jaxrl.roles import update
from jaxrl.run import attempt
from jaxrl.teacher import key_rules
from jaxrl.train import train
from jaxrl.types import Sequences, TrainBatch

ROOT = Path(__file__).parent.parent.parent
PACKAGE = str(Path(jaxrl.__file__).parent)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
}


def test_the_page_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(config_page.main, []) == 0
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    again = "python -m jaxrl.config.key_page > docs/config.md"
    assert page == capsys.readouterr().out, f"make it again: {again}"


def test_the_page_has_every_key_with_type_bounds_and_default() -> None:
    lines = config_page.markdown().splitlines()
    for key in config_keys.keys(Config):
        (line,) = [line for line in lines if line.startswith(f"| `{key.path}` |")]
        assert key.doc and key.doc.replace("|", r"\|") in line
    assert "| `steps` | int, at least 1 | `200` | Batches to train on. |" in lines
    assert any(
        line.startswith("| `sampling.top_p` | float, above 0, at most 1 | `1` |") for line in lines
    )
    assert any(
        line.startswith("| `optimizer.clip_norm` | float or null, above 0 |") for line in lines
    )
    assert any(line.startswith("| `student.model` | str | required |") for line in lines)


def test_defaults_shown_are_read_back_as_they_are() -> None:
    keys = [key for key in config_keys.keys(Config) if not key.required]
    required = ["student.model=a", "teacher.model=b", "data.train=c.jsonl"]
    shown = [f"{key.path}={section.show_value(key.default)}" for key in keys]
    given = [word for word in shown if not word.startswith("teacher.model=")]
    assert Config.load(None, [*given, *required]) == minimal()


def minimal(**models: str) -> Config:
    student, teacher = models.get("student", "a"), models.get("teacher", "b")
    return Config.parse(
        {
            "student": {"model": student},
            "teacher": {"model": teacher},
            "data": {"train": "c.jsonl"},
        }
    )


def test_every_default_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = minimal(student=str(tmp_path), teacher=str(tmp_path))
    plan = make_plan(config, needed_roles(config))
    assert set(plan.axes) == set(plan.accounts) == {"actor", "rollout", "teacher"}
    assert plan.fits and all(account.peak > 0 for account in plan.accounts.values())


class Reads:
    """Notes which keys of the configs that it watches are read by code of the package.

    What a section's own checks read, when it is made, counts for nothing.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.by_programs: set[str] = set()
        """Of `UNREAD`, what is read where the programs of an actor are made or traced."""
        self._paths: dict[int, str] = {}
        self._alive: list[Config] = []

    def watch(self, config: Config) -> Config:
        config = config.parse(config.model_dump())  # no section is shared, as equal defaults are
        self._alive.append(config)
        for path, one in _sections(config, ""):
            self._paths[id(one)] = path
            for name in vars(one).keys() - type(one).model_fields.keys():
                del vars(one)[name]  # computed for the checks
        return config

    def spy(self, section: Section, name: str) -> Any:
        path = self._paths.get(id(section))
        if path is not None and not name.startswith("_") and _read_by_the_package():
            self.found.add(path + name)
            if _is_unread(path, name) and _in_programs():
                self.by_programs.add(path + name)
        return object.__getattribute__(section, name)


def _sections(section: Section, path: str) -> Iterator[tuple[str, Section]]:
    yield path, section
    for name, value in vars(section).items():
        if isinstance(value, Section):
            yield from _sections(value, f"{path}{name}.")


OF_THE_CONFIG = {
    __file__,
    functools.__file__,  # of `cached_property`
    *(str(part.__file__) for part in (roles, key_rules, schema, section, settings)),
}


def _read_by_the_package() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in OF_THE_CONFIG:
        if frame.f_code.co_name.startswith("_check"):
            return False
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def _is_unread(path: str, name: str) -> bool:
    section, _, rest = f"{path}{name}".partition(".")
    unread = UNREAD.get(section, ())
    return unread is True or rest.partition(".")[0] in unread


def _in_programs() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != update.__file__:
        frame = frame.f_back
    return frame is not None


class Planted(Section):
    """A section that nobody asks."""

    nested: int = 1


class PlantedActor(ActorConfig):
    """The actor with a key too many."""

    nested: int = 1


class PlantedConfig(Config):
    """The keys of a run, and three that nothing reads."""

    forgotten: int = 1
    actor: PlantedActor = PlantedActor()
    planted: Planted = Planted()


def trace_signal(config: Config) -> None:
    """Both sides of `distill.signal`, with shapes in place of numbers."""
    projection = Projection(config.distill, make_mesh(1, 1, 1), vocab_size=32)
    hidden, head = jnp.zeros((2, 3, 8)), jnp.zeros((32, 8))
    mask = jnp.ones((2, 3), bool)
    sequences = Sequences(jnp.zeros((2, 5), jnp.int32), jnp.ones((2, 5), bool), mask)

    def step(hidden: Any, head: Any, sequences: Sequences) -> Any:
        signal = teacher_signal(projection, hidden, head, sequences, None)
        batch = TrainBatch(sequences, signal, jnp.zeros((2, 3)))
        return distill_loss(projection, hidden, head, batch, {})

    jax.eval_shape(step, hidden, head, sequences)


SHOWN_BY = {
    "actor.max_nonfinite": (
        "test_train.py",
        "test_a_run_that_diverges_ends_with_exit_code_1_and_keeps_the_batch",
    ),
    "environment.max_failures": (
        "test_episode_batches.py",
        "test_failures_are_replies_up_to_a_share_of_the_batch",
    ),
    "grouper.alpha": ("test_similarity.py", "test_all_singletons"),
    "grouper.mmr_lambda": ("test_similarity.py", "test_mmr_by_hand_with_partial_similarity"),
    "policy.max_refills": (
        "test_rl.py",
        "test_prompts_that_teach_nothing_are_replaced_as_often_as_allowed",
    ),
    "ray.devices_per_worker": (
        "test_ray_train.py",
        "test_a_pool_of_two_processes_of_which_one_is_killed",
    ),
    "ray.max_restarts": ("test_ray.py", "test_the_budget_of_restarts_ends_the_run"),
    "teacher.api": (
        "test_serve_teacher.py",
        "test_a_completions_server_tells_what_the_scorer_tells",
    ),
    "teacher.api_model": (
        "test_serve_teacher.py",
        "test_a_completions_server_is_tried_before_the_run",
    ),
    "teacher.ca_file": (
        "test_served_teachers.py",
        "test_tls_is_verified_and_carries_the_token",
    ),
    "teacher.service_threads": (
        "test_serve_teacher.py",
        "test_a_completions_server_tells_what_the_scorer_tells",
    ),
    "resume_changed": (
        "test_depends.py",
        "test_what_has_changed_is_refused_by_name_and_versions_are_reported",
    ),
}
"""Keys that only other runs read (in trouble, in several processes, with other similarity groups)
-> the test that shows their effect."""

ONE_STEP = [
    "steps=1",
    "batch_size=4",
    "max_prompt_tokens=24",
    "max_new_tokens=8",
    "rollout.launch_tokens=8",
    "eval.prompts=4",
    "logging.console=quiet",
    "compile_cache=null",
]


def test_every_key_is_read_but_those_planted_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that nothing reads is named here: read it, or remove it."""
    reads = Reads()
    monkeypatch.setattr(
        Section, "__getattribute__", lambda section, name: reads.spy(section, name), raising=False
    )
    fill, date = Config.with_dtypes, attempt.with_date  # a run reads the copies that it makes
    monkeypatch.setattr(attempt, "with_date", lambda config: reads.watch(date(config)))
    monkeypatch.setattr(Config, "with_dtypes", lambda c, where: reads.watch(fill(c, where)))
    shots = tmp_path / "shots.jsonl"
    shots.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    asked = [
        "mesh=actor+rollout+teacher=1",
        f"run_dir={tmp_path / 'run'}",
        "distill.entropy_aware=true",
        f"data.few_shot={shots}",
        "data.few_shot_rows=1",
        "algorithm=gspo",
        "group_size=2",
        "distill_weight=1",
        "reward.functions=[auto]",
        f"reward.model={save_reward_model(tmp_path)}",
        "reward.overlong_buffer=2",
        "policy.reward_kl_coef=0.1",
        "policy.kl_coef=0.1",
        "policy.entropy_coef=0.1",
        "policy.advantages=similarity",
        f"grouper.model={REFERENCES / 'tiny_bge'}",
        "environment.name=guess_number",
        "environment.workers=1",
    ]
    train(reads.watch(PlantedConfig.load("builtin:quickstart", [*ONE_STEP, *asked])))
    for signal in ("distill.signal=topk", "distill.signal=sampled distill.jsd_beta=1"):
        overrides = [*signal.split(), "distill.top_k=4"]
        trace_signal(reads.watch(PlantedConfig.load(None, overrides)))
    for key, (file, name) in SHOWN_BY.items():
        (found,) = (ROOT / "tests").glob(f"*/{file}")
        tests = found.read_text(encoding="utf-8")
        (body,) = re.findall(rf"\ndef {name}\(.*?(?=\ndef |\Z)", tests, re.DOTALL)
        assert f"{key.rpartition('.')[2]}=" in body, key
    assert not reads.by_programs  # `kept_programs` tells no runs apart by them
    keys = {key.path for key in config_keys.keys(PlantedConfig)}
    assert keys - reads.found - set(SHOWN_BY) == {"forgotten", "actor.nested", "planted.nested"}
    assert not (reads.found & set(SHOWN_BY)), sorted(reads.found & set(SHOWN_BY))


def documented_words() -> Iterator[tuple[str, str]]:
    """Every key with each word that its type lists, or its text explains as in `word: meaning`."""
    for key in config_keys.keys(Config):
        kind = key.type.removesuffix(" or null").removeprefix("list of ")
        words = set(kind.split("|")) if "|" in kind else set()
        words |= {"null"} if key.type.endswith(" or null") else set()
        words |= {"true", "false"} if kind == "bool" else set()
        if kind not in ("bool", "int", "float"):
            words |= set(re.findall(r"(?:^|\. )`?([a-z][a-z0-9_-]*)`?(?: \([^)]*\))?: ", key.doc))
        yield from ((key.path, word) for word in sorted(words))


def test_every_documented_word_is_taken_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    """Other keys may forbid it by a rule, but nothing says that it is no value of the key."""
    words = list(documented_words())
    assert len(words) > 200
    for wanted in (("launcher", "ray"), ("policy.dynamic_sampling", "off"), ("data.chat", "auto")):
        assert wanted in words
    file, refused = tmp_path / "run.yaml", []
    needed = ["student.model=builtin:student", "data.train=arithmetic"]
    for key, word in words:
        nested = word
        for name in reversed(key.split(".")):
            nested = f"{{{name}: {nested}}}"
        file.write_text(f"{nested}\n")
        for path, overrides in ((str(file), needed), ("builtin:quickstart", [f"{key}={word}"])):
            try:
                Config.load(path, overrides)
            except UserError as error:
                refused += [str(error)] if "input should be" in str(error) else []
    assert not refused


@pytest.mark.parametrize(
    "text", ["all-linear", "[all-linear]", "[q_proj, all-linear]", '"all-linear"']
)
def test_all_linear_is_all_projections(text: str, tmp_path: Path) -> None:
    overrides = ["student.lora.rank=4", f"student.lora.targets={text}"]
    config = Config.load("builtin:quickstart", overrides)
    file = tmp_path / "run.yaml"
    file.write_text(f"student:\n  model: builtin:student\n  lora: {{rank: 4, targets: {text}}}\n")
    again = Config.load(str(file), ["data.train=arithmetic", "teacher.model=builtin:teacher"])
    for one in (config, again):
        assert sorted(one.student.lora.targets) == sorted(roles.ALL_LINEAR)
