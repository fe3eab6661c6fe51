"""What may change when a run resumes: each key says so, and a change is noted wherever it is looked
for."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from runs import ALONE, CONSTANT, QUICK, SHORT, numbers, save_model, weights

from jaxrl import Config, StopTraining, train
from jaxrl.checkpoint.fingerprint import compare
from jaxrl.config import cli, keys
from jaxrl.config.section import Section
from jaxrl.errors import UserError
from jaxrl.report.html_page import facts
from jaxrl.report.read import read_run
from jaxrl.report.timeline_lanes import understand
from jaxrl.roles import optimizer
from jaxrl.run.run_dir import sessions
from jaxrl.train import main

KEYS = list(keys.keys(Config))
CONFIG = Config.load("builtin:quickstart", ["optimizer.clip_norm=2", "distill_weight=0"])


def other(value):
    """Another value than that of a key; of a number a smaller one."""
    if isinstance(value, bool) or value is None:
        return value is not True
    return type(value)(value / 2) if value else type(value)(1)


def changed(path):
    """The config of a run before this one changed one key, and the two values."""
    mapping = CONFIG.model_dump(mode="json")
    *above, last = path.split(".")
    owner = mapping
    for name in above:
        owner = owner[name]
    now = owner[last]
    owner[last] = other(now) if isinstance(now, int | float | None) else ["x"]
    if path == "teachers":
        owner[last] = {"x": {"model": "a"}}
    return mapping, owner[last], now


def test_every_key_says_what_its_change_does():
    assert len(KEYS) > 200
    for key in KEYS:
        assert key.on_resume != Section.on_resume, key.path
        assert (key.on_resume.how == "refused") == bool(key.on_resume.why), key.path
    decided = {key.on_resume.decides for key in KEYS} - {""}
    assert all(any(name.startswith(key.path) for key in KEYS) for name in decided)


def test_a_change_is_free_reported_asked_for_or_refused():
    """Whichever key it is, by the same rule."""
    for key in KEYS:
        check(key)


def check(key):
    old, before, now = changed(key.path)
    rule, told = key.on_resume, rf"(?m)^  {key.path}: "
    plain, listed, all_allowed = (
        CONFIG.model_copy(update={"resume_changed": value}) for value in (False, (key.path,), True)
    )
    if key.path == "resume_changed":
        plain = listed = all_allowed = CONFIG
    why = rule.why or rule.unless(before, now, CONFIG.model_dump(mode="json"))
    if why and rule.how != "free":
        for config in (plain, listed, all_allowed):
            with pytest.raises(UserError, match=told) as error:
                compare(old, config, "run")
            assert f"({why})" in str(error.value)
            assert "resume_changed=" not in str(error.value)
        return
    if rule.how == "asked":
        for config in (plain, plain.model_copy(update={"resume_changed": ("seed",)})):
            with pytest.raises(UserError, match=told) as error:
                compare(old, config, "run")
            assert f"resume_changed=[{key.path}] allows" in str(error.value)
        plain = listed
    for config in (plain, listed, all_allowed):
        found = [change for change in compare(old, config, "run") if change.what == key.path]
        assert len(found) == (rule.how != "free")
        for change in found:
            assert change.asked == (rule.how == "asked")
            assert change.remakes == rule.remakes and change.text.startswith(f"{key.path}: ")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optimizer.lr", "did you mean"),
        ("sead", "did you mean seed"),
        ("samplng", "did you mean sampling\\?"),
        ("student.lroa", "did you mean student.lora\\?"),
    ],
)
def test_words_that_name_no_key_are_refused(word, told):
    with pytest.raises(UserError, match=rf"resume_changed names '{word}'.*{told}.* is no key"):
        Config.load("builtin:quickstart", [f"resume_changed=[{word}]"])
    for right in ("optimizer", "data.eval.easy", "reward.functions"):
        Config.load("builtin:quickstart", [f"resume_changed=[{right}]"])


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "student", 32, 1, seed=0)


def words(student, run_dir, *overrides):
    plain = ["teacher.model=null", "data.eval=null", "algorithm=sft", "max_prompt_tokens=60"]
    plain += ["group_size=1", "steps=5", "checkpoint.every=0", *CONSTANT]
    plain += [f"student.model={student}", f"run_dir={run_dir}"]
    return [*SHORT, ALONE, *plain, *overrides]


def test_a_changed_learning_rate_counts_from_the_step_of_the_change(
    student, tmp_path, monkeypatch, capsys
):
    """A run that resumes with another peak and another schedule has the weights of one whose
    schedule changed at that step; the change is in the record, the rows, the log and the page."""
    first = ["optimizer.learning_rate=0.01"]
    then = ["optimizer.learning_rate=0.003", "optimizer.lr_schedule=cosine"]

    def on_step(row):
        if row["step"] == 2:
            raise StopTraining

    result = train(
        Config.load("builtin:quickstart", words(student, tmp_path / "run", *first)), on_step
    )
    step = result.stopped["step"]
    capsys.readouterr()
    changed = words(student, tmp_path / "run", *then)
    assert cli.run(main, [*QUICK, *changed]) == 2
    told = capsys.readouterr().err
    allowed = "resume_changed=[optimizer.learning_rate,optimizer.lr_schedule]"
    assert f"{allowed} allows these changes" in told
    resumed = train(Config.load("builtin:quickstart", [*changed, allowed]))

    real = optimizer.learning_rate

    def switched(config, updates):
        at = step * (updates // 5)
        before = real(config, updates)
        changes = {"learning_rate": 0.003, "lr_schedule": "cosine"}
        after = real(config.model_copy(update=changes), updates)
        return lambda n: jnp.where(n < at, before(n), after(n))

    monkeypatch.setattr(optimizer, "learning_rate", switched)
    once = train(Config.load("builtin:quickstart", words(student, tmp_path / "once", *first)))
    assert weights(resumed.run_dir) == weights(once.run_dir)

    def plain(result):
        names = ("run/changed", "actor/learning_rate")
        return [{k: v for k, v in row.items() if k not in names} for row in numbers(result)]

    assert plain(resumed) == plain(once)
    marked = {row["step"]: row["run/changed"] for row in resumed.metrics if "run/changed" in row}
    assert marked == {step + 1: 2}
    lines = ["optimizer.learning_rate: 0.01 there, 0.003 now"]
    lines.append("optimizer.lr_schedule: constant there, cosine now")
    assert [one.get("changed") for one in sessions(resumed.run_dir)] == [None, lines]
    log = (resumed.run_dir / "log.txt").read_text()
    assert f"changed after step {step}: {'; '.join(lines)}" in log
    files = read_run(resumed.run_dir)
    assert (
        facts(files, understand(files.events))["changed"]
        == f"after step {step}: {', '.join(lines)}"
    )
