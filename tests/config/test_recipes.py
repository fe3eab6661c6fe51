"""docs/recipes.md: every command is a config, and its plan is what the page says."""

import re
import shlex
from pathlib import Path

import pytest
from large_models import NAMED

from jaxrl.algorithms.methods import needed_roles
from jaxrl.config.cli import parse_run
from jaxrl.models.config import DecoderConfig
from jaxrl.plan import build
from jaxrl.plan.plan_inputs import GB
from jaxrl.process.gpu_memory import gpu_share
from jaxrl.sharding.mesh import Visible
from jaxrl.sharding.placement import place

PAGE = Path(__file__).parent.parent.parent / "docs" / "recipes.md"
NEARLY = 0.2
"""How far the page's gigabytes may be from the plan's, which becomes more exact with time."""


def recipes() -> list[tuple[str, str, int, int, float]]:
    """Title, command, GPUs, GB of one, and GB needed, of every recipe."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\(#.*\) \| (\d+) x (\d+) GB \| (\d+) GB \|$", text, re.M)
    commands = dict(re.findall(r"^## (.+)\n\n    jaxrl train (.+)$", text, re.MULTILINE))
    assert [row[0] for row in rows] == list(commands)
    return [(t, commands[t], int(n), int(size), float(need)) for t, n, size, need in rows]


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe[0])
def test_a_recipe_is_planned_as_the_page_says(recipe: tuple[str, str, int, int, float]) -> None:
    _, command, gpus, size, stated = recipe
    run = parse_run(shlex.split(command), module="jaxrl.train", description="")
    config, names = run.config, needed_roles(run.config)
    placement = place(config.mesh, names)
    assert run.dry_run and run.base.own and placement.n_devices == gpus
    student, teacher = (
        None if model is None else DecoderConfig.from_hf(NAMED[model])
        for model in (config.student.model, config.teacher_model)
    )
    assert student is not None
    plan = build(config, names, placement, student, teacher, Visible((), None), size * gpu_share())
    assert plan.fits
    assert stated == pytest.approx(max(plan.peaks.values()) / GB, rel=NEARLY)
