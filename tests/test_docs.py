"""What the pages say is there: links resolve, nothing is left to fill in, commands exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve_and_no_placeholder_is_left(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links and not [link for link in links if not (page.parent / link).exists()]
    assert "@@" not in text and "TODO" not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_modules_that_exist(page):
    for module in set(re.findall(r"python -m (jaxrl[\w.]*)", page.read_text())):
        assert importlib.util.find_spec(module) is not None, module
