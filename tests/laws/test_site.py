"""The site that mkdocs makes of the pages: whole, offline, and the same as on a git host."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import browser as browsers
import pytest
from markdown_it import MarkdownIt
from pages import COMMAND_PAGES, DOCS, ROOT, name_of

import jaxrl

pytest.importorskip("mkdocstrings", reason="the site needs mkdocs (extra docs)")
pytest.importorskip("material")

EXTERNAL = re.compile(r"(?:https?:)?//")
PAGES = [*COMMAND_PAGES, ROOT / "CHANGELOG.md"]
CONTRACT = (
    *("jaxrl.session", "jaxrl.run.session.RunSession", "jaxrl.run.batch_by_hand.BatchByHand"),
    *(f"jaxrl.{name}" for name in jaxrl.__all__),
    "jaxrl.train.Result",
    "jaxrl.checkpoint.model_source.Model",
    "jaxrl.types.Completion",
    "jaxrl.losses.divergence.generalised_jsd",
    "jaxrl.losses.policy.make_objective",
    "jaxrl.losses.policy.policy_loss",
    "jaxrl.losses.policy.kl_estimates",
    "jaxrl.advantages.group_advantages",
    "jaxrl.similarity.cluster",
    "jaxrl.models.encoder.embed",
    "jaxrl.models.reward.score",
    "jaxrl.sharding.placement.parse",
    "jaxrl.sharding.placement.Placement",
    "jaxrl.environments.Environment",
)
"""What programs may call."""
ELEMENTS = ("h1", "h2", "h3", "p", "ul", "ol", "li", "table", "tr", "td", "pre", "a", "img", "em")
ELEMENTS += ("strong", "code")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `mkdocs build` builds it but for the colours of code, which take half of
    the time."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"HIGHLIGHT": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def file_of(page: Path) -> str:
    name = page.relative_to(DOCS if DOCS in page.parents else ROOT).with_suffix(".html")
    return name.as_posix().replace("README", "index")


def test_every_page_has_one_place_in_the_order_of_reading() -> None:
    from mkdocs.utils.yaml import yaml_load

    with (ROOT / "mkdocs.yml").open(encoding="utf-8") as file:
        nav = yaml_load(file)["nav"]
    entries = [entry for section in nav for listed in section.values() for entry in listed]
    found = Counter(e if isinstance(e, str) else next(iter(e.values())) for e in entries)
    named = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert not named - set(found), "write the page into nav of mkdocs.yml"
    assert set(found.values()) == {1}


def test_links_lead_to_what_is_there(site: Path) -> None:
    """Of pages, pictures, styles and scripts; also those to files outside of docs/."""
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    seen, broken = 0, set()
    for path, text in texts.items():
        if path.name == "404.html":  # which is shown at any depth
            continue
        for link in set(re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            name, _, anchor = unquote(link).partition("#")
            target = Path(os.path.normpath(path.parent / name)) if name else path
            if EXTERNAL.match(link) or link.startswith(("data:", "javascript:")):
                continue
            seen += 1
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and anchor not in anchors.get(target, {anchor})):
                broken.add((path.relative_to(site).as_posix(), link))
    assert seen > 5000 and broken == set()


def test_no_other_address_is_needed(site: Path) -> None:
    """By the text of pages and styles: no scripts, styles, fonts or pictures of other hosts."""
    loads = r"<(?:link|script|img|source|iframe|object|embed|video|audio)\b[^>]*"
    loads += r'\b(?:src|href|data|srcset)="?([^"> ]+)'
    found = []
    for page in site.rglob("*.html"):
        found += re.findall(loads, page.read_text(encoding="utf-8"))
    assert len(found) > 500
    for style in site.rglob("*.css"):
        found += re.findall(r"""(?:url\(|@import )["']?([^"')]+)""", style.read_text("utf-8"))
    assert [address for address in found if EXTERNAL.match(address)] == []


@pytest.mark.skipif(browsers.MISSING is not None, reason=browsers.MISSING or "")
def test_a_reader_searches_without_another_host(site: Path, tmp_path: Path) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server,
        browsers.browser(tmp_path) as window,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        window.open(f"{address}/index.html")
        window.run("document.querySelector('.md-search__input').focus()")
        window.type(".md-search__input", "teacher.cache")
        end, found = time.monotonic() + 60, []
        while not found and time.monotonic() < end:
            time.sleep(0.1)
            found = window.run(
                "return [...document.querySelectorAll('a.md-search-result__link')].map(a => a.href)"
            )
        assert any("/teacher-cache.html" in link for link in found)
        asked = [link for link in window.requests() if link.startswith("http")]
        assert len(asked) > 4 and {link[: len(address)] for link in asked} == {address}
        assert [error for error in window.errors() if "favicon" not in error] == []
        server.shutdown()


def elements(html: str) -> dict[str, int]:
    counts = Counter(re.findall(r"<(\w+)", html))
    return {name: counts[name] for name in ELEMENTS}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "api.md"], ids=name_of)
def test_a_page_is_read_as_on_a_git_host(page: Path, site: Path) -> None:
    """As many headings, paragraphs, entries, cells and links: an indent or an empty line that only
    one of the two readers of Markdown wants changes one of them."""
    hosted = MarkdownIt("commonmark").enable("table").render(page.read_text(encoding="utf-8"))
    text = (site / file_of(page)).read_text(encoding="utf-8")
    (shown,) = re.findall(r"<article[^>]*>(.*?)</article>", text, re.DOTALL)
    shown = re.sub(r'<a class="headerlink".*?</a>', "", shown)
    assert elements(shown) == elements(hosted)


def home_of(name: str) -> str:
    """Where what has a public name is defined."""
    place, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(place), last)
    if inspect.ismodule(found):  # a command, whose module is callable
        found = getattr(found, last)
    return f"{found.__module__}.{found.__qualname__}"


def test_the_reference_shows_the_docstrings_of_all_that_programs_may_call(site: Path) -> None:
    source = (DOCS / "api.md").read_text(encoding="utf-8")
    text = (site / "api.html").read_text(encoding="utf-8")
    assert "<!--" in source and ":::" not in text
    shown = set(re.findall(r'<h3 id="([\w.]+)"', text))
    assert {home_of(name) for name in CONTRACT} <= shown
    for name in CONTRACT:
        assert re.search(rf"^\| .*`([\w.]+\.)?{name.rpartition('.')[2]}`.* \|", source, re.M), name
    assert "Parameters:" in text and "Raises:" in text and "<p>Args:" not in text
