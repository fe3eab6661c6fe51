"""The pages for who comes from another library: their keys, as the errors about them say."""

import json
import re
from pathlib import Path

import pytest
from cases import and_slow
from references.make_trl_fields import CLASSES, FIELDS, HEADING, fields, section

from jaxrl.config.keys import keys, other_libraries
from jaxrl.config.schema import Config
from jaxrl.errors import UserError

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = sorted(DOCS.glob("coming-from-*.md"))
KNOWN = {key.path for key in keys(Config)}
MISSING = "–"


def rows():
    """(page, their key, our cell) of every table row."""
    found = []
    for page in PAGES:
        lines = re.findall(r"^\| `([^`|]+)` \| ([^|]+) \| [^|]*\|$", page.read_text(), re.MULTILINE)
        found += [(page.stem, theirs, ours.strip()) for theirs, ours in lines]
    return found


def test_the_tables_are_read() -> None:
    for page in PAGES:
        lines = re.findall(r"^\| `", page.read_text(), re.MULTILINE)
        assert len(lines) == len([row for row in rows() if row[0] == page.stem]) > 30
    assert len(PAGES) == 4


@pytest.mark.parametrize(
    ("page", "theirs", "ours"), and_slow(rows()[::4], [r for i, r in enumerate(rows()) if i % 4])
)
def test_the_error_about_their_key_names_ours(page: str, theirs: str, ours: str) -> None:
    own = ours.strip("`")
    assert own in KNOWN or own == MISSING, own
    if theirs in KNOWN:
        assert theirs == own or page == "coming-from-trl"
        return
    with pytest.raises(UserError) as error:
        Config.load(None, [f"{theirs}=1"])
    if own != MISSING:
        assert re.search(rf"(?<![\w.]){re.escape(own)}(?![\w.])", str(error.value)), error.value
    else:
        assert any(reason in str(error.value) for reason in other_libraries()[1].values()), error
        assert "did you mean" not in str(error.value), error.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_in_the_text_exist(page: Path) -> None:
    """Those of every table's last column, and of the text, that are written as `key=value`."""
    text = page.read_text()
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)*)=[^`]*`", text))
    assert named - {"key"} - {theirs for _, theirs, _ in rows()} <= KNOWN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_worked_config_is_one(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        (tmp_path / "run.yaml").write_text(block)
        assert Config.load(tmp_path / "run.yaml").learns_from_rewards


def test_hints_without_a_key_of_ours_name_what_exists() -> None:
    """The reasons and the pages of the table of other libraries' keys."""
    _, absent, trees = other_libraries()
    for text in {*absent.values(), *trees.values()}:
        for page in re.findall(r"docs/[\w-]+\.md", text):
            assert (DOCS.parent / page).exists(), text
        for key in re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+)(?![\w*-]|\.\*)", text):
            assert key in KNOWN or key.endswith(".jsonl"), text


@pytest.mark.parametrize(
    "key",
    [
        "tokenizer.pad_token",
        "policy.scheduler.milestones",
        "policy.megatron_cfg.moe_per_layer_logging",
        "policy.draft.enabled",
        "grpo.reward_scaling.target_max",
        "loss_fn.positive_example_nll_weight",
        "on_policy_distillation.enabled",
        "data.num_workers",
        "data_plane.storage_capacity",
        "log.vf_level",
        "orchestrator.tasks_per_minute",
        "trainer.gc.interval",
        "env_vars.NCCL_DEBUG",
        "slurm.job_name",
    ],
)
def test_a_key_without_a_counterpart_gets_no_far_fetched_guess(key: str) -> None:
    with pytest.raises(UserError) as error:
        Config.load(None, [f"{key}=1"])
    assert "did you mean" not in str(error.value), error.value


TRL = json.loads(FIELDS.read_text(encoding="utf-8"))["fields"]
TRL_NAMES = [name for each in TRL.values() for name in each]
INSTEAD = "|".join(map(re.escape, other_libraries()[1].values()))


def test_the_fields_of_trl_are_read_from_the_source() -> None:
    source = "class A:\n a: int = 1\n K: ClassVar[int] = 2\n b: str\n _c = 3\nclass B:\n d: int\n"
    assert fields(source, "A") == ["a", "b"]
    assert TRL.keys() == CLASSES.keys() and min(map(len, TRL.values())) > 5
    assert {"num_generations", "lmbda", "packing", "eval_on_start"} <= set(TRL_NAMES)


def test_every_field_of_trl_is_answered() -> None:
    """By a key of ours that does the same or has the same name, or by what there is instead."""
    aliases, absent, _ = other_libraries()
    same_word = {key.rpartition(".")[2] for key in KNOWN}
    assert {*TRL_NAMES} - aliases.keys() - absent.keys() - same_word == set()
    for name in {*TRL_NAMES} - KNOWN:
        with pytest.raises(
            UserError, match=f"unknown key {name} .*(here it is|did you mean|{INSTEAD})"
        ):
            Config.load(None, [f"{name}=1"])


def test_the_page_on_trl_lists_every_field() -> None:
    above, heading, end = (DOCS / "coming-from-trl.md").read_text("utf-8").partition(HEADING)
    again = "python tests/references/make_trl_fields.py"
    assert heading + end == section(TRL_NAMES, above), f"make it again: {again}"
