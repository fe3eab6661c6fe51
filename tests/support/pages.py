"""The pages of the documentation, and the commands that they show."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
COMMAND_PAGES = [*PAGES, *sorted((ROOT / "benchmarks").glob("*.md"))]

SETTINGS = r"(?:[A-Z_]+=\S* )*"
PYTHON = r"python -m (?:jaxrl|pytest)[\w.]*|python benchmarks/\S+"
PROGRAM = rf"(?:jaxrl [a-z][\w-]*|{PYTHON}|pip install|pytest|ray [a-z]+)"
IN_A_BLOCK = re.compile(rf"^    ({SETTINGS}{PROGRAM}(?: .*)?)$", re.MULTILINE)
# In a sentence a program without arguments is a name. So are those of ray, with half of an option.
IN_A_SENTENCE = re.compile(rf"(?<!`)`({SETTINGS}(?!ray ){PROGRAM} [^`\n]+)`(?!`)")


def name_of(page: Path) -> str:
    return page.name


def blocks(page: Path) -> list[str]:
    """The Python of a page, each block at its own line, so that an error tells where."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def commands(page: Path) -> list[list[str]]:
    """Returns the words of every command of a page, in the order of the page.

    A line that ends with a backslash goes on in the next one; `&&` joins two commands. What a
    shell does with the output (`> FILE`, `| grep ...`) is left out.
    """
    text = re.sub(r" \\\n +", " ", page.read_text(encoding="utf-8"))
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = [(m.start(), m[1]) for at in (IN_A_BLOCK, IN_A_SENTENCE) for m in at.finditer(text)]
    return [
        words
        for _, line in sorted(found)
        for command in re.split(r" && ", re.split(r" (?:2>&1|[|>]) ", line)[0])
        if (words := shlex.split(command, comments=True))
    ]


def script(name: str) -> ModuleType:
    """A script of the repository, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
