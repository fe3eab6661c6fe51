"""Makes the site of what is linked: mkdocs reads `docs/` only, but its pages link to others.

The README is the first page. Each file or folder of the source tree that a page links to, and that
the pages so added link to, becomes a page too, with the same links: what a reader of the plain
Markdown reaches, a reader of the site reaches without leaving it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")
"""The file that a Markdown link names, without its anchor."""
HIDDEN = re.compile(r"<!-- (::: .*?) -->", re.DOTALL)
"""A comment that asks mkdocstrings for a docstring."""
FENCE = "`" * 4
DELIMITERS = '# "'
LEXERS = {".sbatch": "bash", ".jsonl": "json"}

_sources: dict[str, Path] = {}
"""Page of the site -> the file or folder that it shows."""


def page_of(source: Path) -> str:
    """Returns the name below `docs/` of the page that shows a file or folder."""
    if source in (ROOT / "README.md", DOCS):
        return "index.md"
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS).as_posix()
    name = source.relative_to(ROOT).as_posix()
    return name if source.suffix == ".md" else f"{name}.md"


def target_of(source: Path, link: str) -> Path | None:
    """Returns the file or folder of the source tree that a page's link names."""
    path = Path(os.path.normpath(source.parent / link))
    return path if path.is_relative_to(ROOT) and path.exists() else None


def text_of(source: Path) -> str:
    """Returns the Markdown that shows a file or folder: a list, the cells of a notebook, code."""
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")
    title = f"# {source.relative_to(ROOT).as_posix()}\n\n"
    if source.is_dir():
        shown = [path for path in sorted(source.iterdir()) if path.name != "__pycache__"]
        return title + "".join(f"- {entry(path)}\n" for path in shown)
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".ipynb":
        cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"])
        return "\n\n".join(fenced("python", t) if kind == "code" else t for kind, t in cells)
    return title + fenced(LEXERS.get(source.suffix, source.suffix[1:]), text)


def entry(path: Path) -> str:
    """Returns the line of a file in the list of its folder: its name, a link where a page shows it,
    and the first sentence in it."""
    name = f"`{path.name}`"
    if page_of(path) in _sources:
        name = f"[{name}]({path.parent.name}/{path.name})"
    if path.suffix not in (".py", ".yaml"):
        return name
    lines = [line.strip(DELIMITERS) for line in path.read_text(encoding="utf-8").split("\n")]
    sentence, _, _ = " ".join(lines[: [*lines, ""].index("")]).partition(". ")
    return f"{name}: {sentence}"


def fenced(lexer: str, text: str) -> str:
    return f"{FENCE}{lexer}\n{text}\n{FENCE}\n"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the README and all that is reached by links."""
    _sources.clear()
    waiting = [ROOT / "README.md", *DOCS.glob("*.md")]
    while waiting:
        source = waiting.pop()
        if page_of(source) in _sources or (DOCS in source.parents and source.suffix != ".md"):
            continue
        _sources[page_of(source)] = source
        if source.suffix in (".md", ".ipynb"):
            named = (target_of(source, link) for link in LINK.findall(text_of(source)))
            waiting += filter(None, named)
    for name, source in _sources.items():
        if DOCS not in source.parents:
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, name, content=text_of(source), inclusion=level))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to the pages that show what they name, and puts docstrings where comments ask for
    them, which readers of the plain page do not see."""
    source = _sources[page.file.src_uri]
    here = os.path.dirname(page.file.src_uri)
    if source.suffix not in (".md", ".ipynb") and not source.is_dir():
        page.meta["search"] = {"exclude": True}
        return markdown

    def lead(link: re.Match[str]) -> str:
        target = target_of(source, link[1])
        return link[1] if target is None else os.path.relpath(page_of(target), here)

    return HIDDEN.sub(r"\1", LINK.sub(lead, markdown))
