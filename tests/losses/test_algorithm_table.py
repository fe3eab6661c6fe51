"""What is known of an algorithm stands in one table; an entry of one's own is as good as its."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from objectives import config

from jaxrl import Config
from jaxrl.algorithms.methods import METHODS, Method, method_of, objective_notes, objective_of
from jaxrl.checkpoint.fingerprint import compare
from jaxrl.errors import UserError
from jaxrl.losses.algorithm_table import ALGORITHMS, AlgorithmSpec, find_algorithm
from jaxrl.run.job import make_job

ROOT = Path(__file__).parent.parent.parent
REWARDED = [name for name, spec in ALGORITHMS.items() if spec.learns_from == "rewards"]
OWN = """
from dataclasses import replace
from jaxrl.losses.algorithm_table import ALGORITHMS
gspo = ALGORITHMS["gspo"]
loss = replace(gspo.loss, settings={"clip_low": 0.1, "clip_high": 1.0})
mine = replace(gspo, minibatches=2, loss=loss)
number = 3
bad_method = replace(gspo, method=3)
"""


def test_the_config_and_the_losses_repeat_no_algorithm() -> None:
    names = "|".join(ALGORITHMS)
    files = {*ROOT.glob("jaxrl/config/*.py"), *ROOT.glob("jaxrl/losses/*.py")}
    assert len(files) > 15
    for file in files - {ROOT / "jaxrl" / "losses" / "algorithm_table.py"}:
        assert not re.findall(rf'"({names})"', file.read_text(encoding="utf-8")), file
    assert all(ALGORITHMS[name].loss is not None for name in REWARDED)


@pytest.mark.parametrize("name", REWARDED)
def test_the_defaults_are_those_of_the_table(name: str) -> None:
    spec, made = ALGORITHMS[name], config(name, "batch_size=240")  # 240 = 2^4 x 3 x 5
    assert made.minibatches == made.updates_per_batch == spec.minibatches
    assert made.dynamic_sampling == ("refill" if spec.dynamic_sampling else "off")
    assert made.rewards.overlong_buffer == int(spec.overlong_share * made.max_new_tokens)
    assert config(name, "batch_size=240", "actor.minibatches=3").minibatches == 3
    assert spec.loss is not None
    chosen = objective_of(made)
    assert vars(chosen.term).items() >= spec.loss.settings.items()
    assert chosen.ratio == spec.loss.ratio


def test_as_many_updates_as_papers_make() -> None:
    expected = {"grpo": 1, "dr_grpo": 8, "dapo": 16, "gspo": 4, "gspo_token": 4}
    expected |= {"cispo": 16, "sapo": 4, "gmpo": 8, "luspo": 4}
    assert {name: ALGORITHMS[name].minibatches for name in REWARDED} == expected


@pytest.mark.parametrize("batch_size", [1, 5, 6, 12, 20, 64])
def test_updates_per_batch_are_bounded_by_equal_minibatches_of_whole_prompts(
    batch_size: int,
) -> None:
    for name in REWARDED:
        made = config(name, f"batch_size={batch_size}")
        own = ALGORITHMS[name].minibatches
        allowed = [n for n in range(1, batch_size + 1) if batch_size % n == 0 and n <= own]
        assert made.minibatches == allowed[-1]
        bounded = [note for note in objective_notes(made) if "its paper makes" in note]
        assert bool(bounded) == (made.minibatches < own)
        never = [note for note in objective_notes(made) if "is 1" in note]
        assert bool(never) == (made.minibatches == 1)


def test_an_algorithm_of_ones_own_is_found_from_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text(OWN)
    quickstart = (ROOT / "configs" / "quickstart_gspo.yaml").read_text()
    file = tmp_path / "here" / "run.yaml"
    file.write_text(quickstart.replace("algorithm: gspo", "algorithm: mine.py:mine"))
    monkeypatch.chdir(ROOT)
    made = Config.load(file, ["policy.clip_low=null", "policy.clip_high=null"])
    assert made.algorithm == f"{tmp_path / 'here' / 'mine.py'}:mine"
    assert made.learns_from_rewards and made.minibatches == 2
    assert vars(objective_of(made).term)["clip_high"] == 1.0
    assert method_of(made) is METHODS["rewards"]
    monkeypatch.chdir(tmp_path)
    on_the_command_line = [*made_overrides(), "algorithm=here/mine.py:mine"]
    assert Config.load(None, on_the_command_line).algorithm == made.algorithm
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    assert Config.load(None, [*made_overrides(), "algorithm=mine:mine"]).minibatches == 2
    # A run that is resumed: the same entry is the same, whoever names it, and another is refused.
    (tmp_path / "config.yaml").write_text(made.dump())
    assert Config.load(tmp_path / "config.yaml") == made
    assert compare(made.model_dump(mode="json"), made, tmp_path) == []
    with pytest.raises(UserError, match=r"algorithm: .* there, gspo now"):
        compare(made.model_dump(mode="json"), made.model_copy(update={"algorithm": "gspo"}), "run")


def made_overrides() -> list[str]:
    return ["reward.functions=[exact]", "teacher.model=null", "group_size=2", "batch_size=4"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nothing.py:mine", r"algorithm: there is no file .*nothing\.py"),
        ("mine.py:mime", r"mine\.py has no mime \(did you mean mine\?\)"),
        ("mine.py:number", r"mine\.py:number is of type int; it must be a .*AlgorithmSpec"),
        ("broken.py:mine", r"broken\.py:mine cannot be imported: ZeroDivisionError.*line 2"),
        ("no_such_module:mine", "no_such_module:mine cannot be imported: ModuleNotFoundError"),
        ("mine.py:", r"must be path/to/file\.py:NAME or package\.module:NAME"),
        ("mine.py", r"unknown algorithm '.*mine\.py'"),
    ],
)
def test_what_is_no_algorithm_is_refused_in_a_line(
    text: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=found) as error:
        Config.load(None, [*made_overrides(), f"algorithm={text}"])
    assert "\n" not in str(error.value)


def test_a_method_of_another_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    made = Config.load(None, [*made_overrides(), "algorithm=mine.py:bad_method"])
    with pytest.raises(UserError, match="method is of type int; it must be a .*Method"):
        method_of(made)
    assert isinstance(METHODS["rewards"], Method)


def test_an_entry_that_makes_no_sense_is_refused() -> None:
    for asked, found in (
        ({"learns_from": "reward"}, "did you mean rewards"),
        ({"learns_from": "rewards"}, "needs a loss or a method"),
        ({"learns_from": "data", "minibatches": 0}, "minibatches=0"),
        ({"learns_from": "data", "overlong_share": 2.0}, "overlong_share=2"),
    ):
        with pytest.raises(UserError, match=found):
            AlgorithmSpec(**asked)
    assert find_algorithm("gkd") is ALGORITHMS["gkd"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *[(name, "DPO family") for name in ("dpo", "DPO", "kto", "orpo", "simpo", "online-dpo")],
        *[(name, "needs a critic") for name in ("ppo", "PPO", "gae")],
        *[(name, "dr_grpo is the closest") for name in ("rloo", "REINFORCE", "reinforce++")],
        *[(name, "dr_grpo is the closest") for name in ("remax", "reinforce_plus_plus", "OPO")],
        *[(name, "dr_grpo is the") for name in ("REINFORCE++-baseline", "reinforce_baseline")],
        *[(name.upper(), f"write {name}") for name in ALGORITHMS],
        ("Dr. GRPO", "write dr_grpo"),
        ("DR-GRPO", "write dr_grpo"),
        ("gdpo", "normalize_then_sum"),
        ("opd", "is gkd here"),
        ("opsd", "teacher.model=policy"),
        ("gropo", "did you mean grpo"),
        ("q_learning", "one of cispo"),
    ],
)
def test_an_algorithm_of_another_name_is_answered_in_one_line(name: str, answer: str) -> None:
    with pytest.raises(UserError) as error:
        Config.load(None, [f"algorithm={name}"])
    assert answer in str(error.value) and len(str(error.value).splitlines()) == 1


def test_the_notes_of_a_run_say_what_the_ratio_cannot_do() -> None:
    quickstart = ROOT / "configs" / "quickstart_gspo.yaml"
    job = make_job(Config.load(quickstart, ["algorithm=grpo", "data.eval=null"]))
    assert any("every ratio pi_theta / pi_old is 1" in note for note in job.notes)
