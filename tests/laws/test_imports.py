"""Laws of the import graph, read from the source: downwards, no cycles, extras optional."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "jaxrl"

# Top to bottom, one row for each room (a folder), and those that know nothing of one another
# side by side. A module may import from its own room, where that makes no cycle, and from below.
# A module that stands below its room is named by itself: the config asks it.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "__init__",
        "__main__",
        "train",
        "evaluate",
        "generate",
        "export",
        "devices",
        "serve_teacher",
    ),
    ("report", "aot", "score"),
    ("run",),
    ("profile",),
    ("plan",),
    ("teacher",),
    ("roles",),
    ("algorithms", "environments"),
    ("rewards", "telemetry"),
    ("runtime",),
    ("checkpoint",),
    ("sampling",),
    ("data",),
    ("config",),
    ("losses", "teacher.key_rules"),
    ("formats",),
    ("models",),
    ("sharding",),
    ("process",),
    ("types", "errors"),
)
FORBIDDEN = ("tensorflow",)
TORCH_HOME = "formats.hf"
SLOW = ("flax", "jax", "matplotlib", "optax", "orbax", "pandas", "pyarrow", "ray", "transformers")
"""Packages that take part of a second or more to import."""
ANSWERS = """
import contextlib, io, json, sys
from importlib import import_module
import jaxrl
from jaxrl import Config
from jaxrl.config import cli
from jaxrl.config.cli import COMMANDS

modules = [module for module, _ in COMMANDS.values()] + sys.argv[1:]
for module, *argv in [
    *([module, option] for module in modules for option in ("--help", "--version", "--no-such")),
    ["jaxrl.train", "no.such=1"],
    ["jaxrl.train", "steps=-1"],
    ["jaxrl.train", "batch_size=8", "--mesh", "actor=1", "mesh=actor=2"],
]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = cli.run(import_module(module).main, argv)
        except SystemExit as end:
            code = end.code
    loaded = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps([module, argv, code, loaded]))
"""
"""Prints command, arguments, exit code and the packages that are loaded after it, a line each."""
RAY_HOME = "runtime.ray"
EXTRAS = (
    *("data", "gymnasium", "mcp", "mlflow", "notebook", "openenv", "plot", "ray", "serve"),
    *("tasks", "torch", "verifiers", "wandb"),
)
LATE = (
    *("process.http_server", "teacher.server", "rewards.expressions"),
    *(f"environments.packages.{name}" for name in ("gymnasium", "mcp", "openenv", "verifiers_v1")),
)
"""Modules of an extra, which import it at once and are themselves imported late."""
IMPORT_NAME = {
    "ipython": "IPython",
    "openenv-core": "openenv",
    "orbax-checkpoint": "orbax",
    "pyyaml": "yaml",
    "tensorboardx": "tensorboardX",
}


@dataclass(frozen=True)
class Import:
    importer: str
    """Without the leading ``jaxrl.``."""
    target: str
    """Full dotted name."""
    line: int
    runs_at_import: bool
    """False inside functions and under TYPE_CHECKING."""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


@cache
def modules() -> frozenset[str]:
    return frozenset(module_name(path) for path in PACKAGE.rglob("*.py"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file; several laws read them."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


def under_type_checking(test: ast.expr) -> bool:
    names = {getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(test)}
    return "TYPE_CHECKING" in names


def imports_in(tree: ast.AST, importer: str, at_import: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                yield Import(importer, f"{node.module}.{alias.name}", node.lineno, at_import)
        else:
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(node, ast.If) and under_type_checking(node.test)
            )
            yield from imports_in(node, importer, at_import and not deferred)


@cache
def all_imports() -> tuple[Import, ...]:
    found: list[Import] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        found += imports_in(nodes_of(path)[0], module_name(path))
    return tuple(found)


def own_module(target: str) -> str | None:
    """The module of ours that ``target`` loads: the longest one that it starts with."""
    if target.split(".")[0] != "jaxrl":
        return None
    parts = target.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in modules():
            return ".".join(parts[:length])
    return "__init__"


def row_of(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for row, names in enumerate(LAYERS):
            if name in names:
                return row
    raise AssertionError(f"jaxrl.{module} has no row in LAYERS: give it one")


def edges() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for item in all_imports():
        target = own_module(item.target)
        if target is not None and target != item.importer:
            graph[item.importer].add(target)
    return graph


def test_imports_point_down() -> None:
    upward = [
        f"jaxrl.{item.importer}:{item.line} imports {item.target}"
        for item in all_imports()
        if (target := own_module(item.target)) is not None
        and row_of(target) < row_of(item.importer)
    ]
    assert upward == []


def test_no_test_imports_another() -> None:
    """What several tests need is in tests/support."""
    tests = list((ROOT / "tests").rglob("test_*.py"))
    names = {path.stem for path in tests}
    for path in tests:
        text = path.read_text(encoding="utf-8")
        if names.isdisjoint(re.findall(r"\btest_\w+", text)):
            continue
        for item in imports_in(ast.parse(text), path.stem):
            assert names.isdisjoint(item.target.split(".")), f"{path}:{item.line}"


def test_every_row_names_modules_that_are_there() -> None:
    rooms = {module.split(".")[0] for module in modules()}
    assert sorted(name for row in LAYERS for name in row if "." not in name) == sorted(rooms)
    assert len(LAYERS) <= 20 and len(list(PACKAGE.glob("*.py"))) <= 10


def test_no_identifier_is_told() -> None:
    """Metrics, messages and callbacks have the field's words for names."""
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            names = [getattr(node, field, None) for field in ("id", "arg", "attr", "name")]
            assert "told" not in names, f"{path}:{getattr(node, 'lineno', 0)}"


def test_a_public_class_name_has_one_meaning() -> None:
    counts = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(counts) > 200 and [name for name, count in counts.items() if count > 1] == []


def test_every_module_has_a_layer() -> None:
    for module in modules():
        row_of(module)


def test_no_cycle_even_through_late_imports() -> None:
    graph = {module: set(targets) for module, targets in edges().items()}
    while True:
        leaves = {module for module, targets in graph.items() if not targets}
        if not leaves:
            break
        graph = {m: targets - leaves for m, targets in graph.items() if m not in leaves}
    assert graph == {}, "these modules import each other"


def test_torch_and_ray_in_one_place_each() -> None:
    for item in all_imports():
        root = item.target.split(".")[0]
        assert root not in FORBIDDEN, f"jaxrl.{item.importer}:{item.line} imports {root}"
        assert root != "torch" or item.importer == TORCH_HOME, f"jaxrl.{item.importer}:{item.line}"
        at_home = f"{item.importer}.".startswith(f"{RAY_HOME}.")
        assert root != "ray" or at_home, f"jaxrl.{item.importer}:{item.line}"


def declared(extra: str | None) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    names = {line.split(">")[0].split("[")[0].split("=")[0].strip().lower() for line in lines}
    return {IMPORT_NAME.get(name, name.replace("-", "_")) for name in names}


def test_what_is_imported_is_declared_and_extras_are_imported_late() -> None:
    required = declared(None)
    optional = set().union(*(declared(extra) for extra in EXTRAS)) - required
    for item in all_imports():
        root = item.target.split(".")[0]
        if own_module(item.target) in LATE and item.importer not in LATE:
            assert not item.runs_at_import, f"jaxrl.{item.importer}:{item.line}"
        if root in sys.stdlib_module_names or root in ("jaxrl", "ray"):
            continue
        where = f"jaxrl.{item.importer}:{item.line} imports {root}"
        if root in optional and item.importer not in LATE:
            assert not item.runs_at_import, f"{where}, an extra, before it is needed"
        else:
            assert root in required | optional, f"{where}, which pyproject.toml does not declare"


@pytest.mark.parametrize(
    ("source", "runs_at_import"),
    [
        ("import a", True),
        ("try:\n    import a\nexcept ImportError:\n    pass", True),
        ("class C:\n    import a", True),
        ("def f():\n    import a", False),
        ("if TYPE_CHECKING:\n    import a", False),
    ],
)
def test_the_reader_tells_late_imports(source: str, runs_at_import: bool) -> None:
    (item,) = imports_in(ast.parse(source), "m")
    assert (item.target, item.runs_at_import) == ("a", runs_at_import)


def test_the_reader_finds_the_module_behind_a_name() -> None:
    assert own_module("jaxrl.errors.UserError") == "errors"
    assert own_module("jaxrl.telemetry.metrics") == "telemetry.metrics"
    assert own_module("jaxrl.no_such_name") == "__init__"
    assert own_module("numpy.random") is None
    assert row_of("telemetry.metrics") == row_of("telemetry") != row_of("errors")


def test_help_and_refusals_load_no_slow_package() -> None:
    scripts = [f"jaxrl.scripts.{path.stem}" for path in (ROOT / "scripts").glob("*.py")]
    command = [sys.executable, "-c", ANSWERS, *scripts]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) > 3 * (9 + 5)
    for module, argv, code, loaded in answers:
        assert code == (0 if argv in (["--help"], ["--version"]) else 2), (module, argv)
        assert set(SLOW).isdisjoint(loaded), (module, argv)


def test_no_wait_for_ray_is_unbounded() -> None:
    """Without a timeout they wait for ever for a process that does not answer."""
    bare, seen = [], 0
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not named or ast.unparse(node.func) not in ("ray.get", "ray.wait"):
                continue
            seen += 1
            if not any(keyword.arg == "timeout" for keyword in node.keywords):
                bare.append(f"{path.name}:{node.lineno}")
    assert seen > 5 and bare == []
