"""The pages for who comes from another library: their keys, as the errors about them say."""

import re
from pathlib import Path

import pytest
from cases import and_slow

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
            assert key in KNOWN, text


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
