"""The notebooks: what they say is there, what they show was run, and they run from end to end."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

import jaxrl
from jaxrl.config.keys import keys
from jaxrl.config.schema import Config
from jaxrl.sharding.placement import ROLES
from jaxrl.telemetry.metrics import read_metrics

nbformat = pytest.importorskip("nbformat", reason="notebooks need the extra dev")
pytest.importorskip("nbclient", reason="notebooks need the extra dev")
from IPython.core.inputtransformer2 import TransformerManager  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import run_notebooks  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000
"""Of a notebook with its outputs: what a code host still draws."""


def name_of(path: Path) -> str:
    return path.stem


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)


def code_cells(path: Path) -> list[Any]:
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def trees(path: Path) -> list[ast.Module]:
    """The Python of the cells."""
    sources = [TransformerManager().transform_cell(cell.source) for cell in code_cells(path)]
    return [ast.parse(source) for source in sources]


def outputs(cells: list[Any], kind: str) -> str:
    """All outputs of a kind: `stream` (stdout and stderr), or a mime type."""
    found = []
    for output in (output for cell in cells for output in cell.outputs):
        if output.output_type == kind == "stream":
            found.append(output.text)
        elif kind in output.get("data", {}):
            found.append(output.data[kind])
    return "\n".join(found)


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["gspo.ipynb", "quickstart.ipynb"]


@each
def test_a_notebook_is_valid_and_has_one_cell_of_parameters(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    (cell,) = (cell for cell in code_cells(path) if "parameters" in run_notebooks.tags(cell))
    assert re.match(r"steps = \d+ ", cell.source)


ADDRESS = "git+https://host.example/owner/jaxrl"


@each
@pytest.mark.parametrize("place", [None, ADDRESS])
def test_its_first_cell_installs_the_package_in_one_line(
    path: Path, place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkout that it is in, or from the address in its first variable."""
    source = code_cells(path)[0].source
    if place is not None:
        source, changed = re.subn('ADDRESS = ""', f'ADDRESS = "{place}"', source)
        assert changed == 1
    ran: list[tuple[str, str]] = []
    names: dict[str, Any] = {"get_ipython": lambda: SimpleNamespace(run_line_magic=note)}

    def note(magic: str, line: str) -> None:
        ran.append((magic, line.format(**names)))  # as IPython fills the braces in

    code = TransformerManager().transform_cell(source)
    monkeypatch.chdir(path.parent)
    exec(code, names)
    assert ran == []  # it is installed here
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(code, names)
    ((magic, line),) = ran
    assert magic == "pip" and line.startswith("install --quiet ")
    requirement = Requirement(line.partition("--quiet ")[2].strip('"'))
    assert requirement.name == "jaxrl" and "notebook" in requirement.extras
    assert requirement.url == (place or ROOT.as_uri())


@each
def test_without_a_checkout_the_package_index_has_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Colab, or in a folder of another project."""
    (tmp_path / "below").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    requirement = installed(code_cells(path)[0].source)
    assert (requirement.name, requirement.url) == ("jaxrl", None)
    assert "notebook" in requirement.extras


def installed(source: str) -> Requirement:
    """What the cell gives pip to install."""
    ran: list[str] = []
    names: dict[str, Any] = {}

    def note(magic: str, line: str) -> None:
        ran.append(line.format(**names))  # as IPython fills the braces in

    names["get_ipython"] = lambda: SimpleNamespace(run_line_magic=note)
    exec(TransformerManager().transform_cell(source), names)
    return Requirement(ran[0].partition("--quiet ")[2].strip('"'))


@each
@pytest.mark.parametrize(("room", "size"), [(1000, None), (32, 32), (1, 8)])
def test_it_halves_its_batch_until_the_plan_fits(path: Path, room: int, size: int | None) -> None:
    """On devices with memory for `room` prompts: sizes come from the plan, not from a table."""
    (cell,) = (cell for cell in code_cells(path) if ".fits" in cell.source)
    setup = [cell.source for cell in code_cells(path) if cell.source.startswith("run = {")]
    planned: list[int] = []

    def dry_run(config: Any, **objects: Any) -> SimpleNamespace:
        functions = [] if path.stem == "quickstart" else ["exact"]
        given = {**config, "reward.functions": functions} if functions else config
        planned.append(Config.of(given).batch_size)
        return SimpleNamespace(fits=planned[-1] <= room, text=lambda: "the plan")

    names: dict[str, Any] = {"steps": 1, "mesh": "actor+rollout+teacher=1", "nearness": len}
    _, source = cell.source.split("\n", 1)  # below its import
    names |= {"dry_run": dry_run, "Config": Config}
    exec("\n".join([*setup, source]), names)
    run = names["run"] if setup else {"batch_size": names["batch_size"]}
    assert run["batch_size"] == planned[-1] == (size or planned[0])


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        (["cpu"] * 8, "actor=2,rollout=2,teacher=4"),
        (["gpu"], "actor+rollout+teacher=1"),
        (["tpu"] * 4, "actor+rollout+teacher=1"),
        (["gpu"] * 8, "actor=2,rollout=2,teacher=4"),
    ],
)
def test_the_quickstart_fits_its_mesh_to_the_devices(
    devices: list[str], mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = (c for c in code_cells(ROOT / "notebooks/quickstart.ipynb") if "mesh =" in c.source)
    found = [SimpleNamespace(platform=platform, device_kind=platform) for platform in devices]
    monkeypatch.setattr("jax.devices", lambda: found)
    monkeypatch.setattr("jax.config.update", lambda name, value: None)
    names: dict[str, Any] = {}
    exec(cell.source, names)
    assert names["mesh"] == mesh


@each
@pytest.mark.parametrize(
    ("there", "extras"),
    [("nvidia-smi", {"cuda", "notebook"}), ("libtpu", {"tpu", "notebook"}), ("", {"notebook"})],
)
def test_it_installs_what_drives_the_accelerator(
    path: Path, there: str, extras: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if name == there else None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name == there else None)
    monkeypatch.chdir(path.parent)
    assert installed(code_cells(path)[0].source).extras == extras


@each
def test_it_uses_public_names_alone(path: Path) -> None:
    names = set()
    for node in (node for tree in trees(path) for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("jaxrl") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxrl"):
            assert node.module == "jaxrl"
            names |= {alias.name for alias in node.names}
    assert {"dry_run", "generate", "load_model", "train"} <= names <= set(jaxrl.__all__)


@each
def test_the_keys_that_it_sets_exist(path: Path) -> None:
    known = {key.path for key in keys(Config)}
    texts = [
        node.value
        for tree in trees(path)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    found = [re.match(r"([a-z_]+(?:\.[a-z_]+)*)=", text) for text in texts]
    asked = {match[1] for match in found if match} - set(ROLES)  # a mesh begins with a role
    mappings = [
        node for tree in trees(path) for node in ast.walk(tree) if isinstance(node, ast.Dict)
    ]
    inner = {id(value) for node in mappings for value in node.values}
    for node in mappings:
        asked |= set() if id(node) in inner else set(keys_in(node))
    assert {"steps", "resume", "run_dir"} <= asked <= known


def keys_in(mapping: ast.Dict) -> Iterator[str]:
    """The dotted keys of a mapping, of its inner ones too."""
    for name, value in zip(mapping.keys, mapping.values, strict=True):
        if isinstance(name, ast.Constant) and isinstance(value, ast.Dict):
            yield from (f"{name.value!s}.{key}" for key in keys_in(value))
        elif isinstance(name, ast.Constant):
            yield str(name.value)


@each
def test_it_shows_a_whole_run_without_an_error(path: Path) -> None:
    """Each cell was executed once, from the first to the last."""
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = [output for cell in cells for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    assert not [output for output in shown if output.get("name") == "stderr"]
    assert outputs(cells, "image/png") and path.stat().st_size < MOST_BYTES
    steps = re.findall(r"^done: (\d+) steps", outputs(cells, "stream"), re.MULTILINE)
    assert f"steps = {steps[0]} " in "\n".join(cell.source for cell in cells)


CONSOLE = """
import threading
from jaxrl.config.schema import Config
from jaxrl.config.settings import LoggingConfig
from jaxrl.telemetry.console import Console

with Console(LoggingConfig(), steps=3) as console:
    console.message("loading")
    console.step({"step": 1, "reward/mean": 0.25})
    last = threading.Thread(target=console.step, args=[{"step": 3, "reward/mean": 0.75}])
    last.start()
    last.join()
    console.message("done")
"""
PLAN = """
from jaxrl import dry_run
print(dry_run(Config.load()).text())
"""


def test_the_live_display_and_the_plan_in_a_cell(tmp_path: Path) -> None:
    """One piece of HTML that ends with the last row, from whatever thread; messages as text."""
    cells = [nbformat.v4.new_code_cell(source) for source in (CONSOLE, PLAN)]
    cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    display, plan = run_notebooks.execute(tmp_path / "a.ipynb", tmp_path, {}).cells
    html = outputs([display], "text/html")
    assert html.count("<pre") == 1 and "3/3" in html and "0.750" in html and "0.250" not in html
    assert outputs([display], "stream").split() == ["loading", "done"]
    assert "actor" in outputs([plan], "stream").split("verdict")[0]
    assert not outputs([plan], "text/html")


@pytest.mark.slow
@each
def test_it_runs_from_end_to_end(path: Path, tmp_path: Path) -> None:
    """With few steps; a resumed run and the plots included."""
    notebook = run_notebooks.execute(path, tmp_path, {"steps": 4})
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "timeline.json" in outputs(cells[-1:], "stream") and outputs(cells, "image/png")
    (run,) = (tmp_path / "runs").glob(path.stem)
    assert [row["step"] for row in read_metrics(run)][:5] == [0, 1, 2, 3, 4]
    assert read_metrics(run)[-1]["step"] > 4 and (run / "final" / "config.json").exists()
