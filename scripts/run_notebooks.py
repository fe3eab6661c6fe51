"""Executes the notebooks in place, so that what they show is what a run printed and drew.

    python -m jaxrl.scripts.run_notebooks [NOTEBOOK ...]

Takes ten minutes on two CPU cores. Needs the extra `dev`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from jaxrl.config import cli

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
CELL_S = 1800
"""Seconds that a cell may take."""


def execute(path: Path, folder: Path, settings: dict[str, Any]) -> nbformat.NotebookNode:
    """Returns the notebook with its outputs.

    Args:
        folder: the working directory, where its runs are left.
        settings: variables that are set below the cell tagged `parameters`, as papermill does.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    at = next(i for i, cell in enumerate(notebook.cells) if "parameters" in tags(cell))
    if settings:
        lines = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
        notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(lines))
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=CELL_S, resources=place, record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Joins outputs that were printed one after the other: there is one for each print."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        follows = kept and output.output_type == kept[-1].output_type == "stream"
        if follows and output.name == kept[-1].name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def tags(cell: nbformat.NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.run_notebooks", __doc__ or "")
    parser.add_argument(
        "notebooks", nargs="*", type=Path, metavar="NOTEBOOK", help="default: all of notebooks/"
    )
    for path in parser.parse(argv).notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder), {})
        nbformat.write(notebook, path)
        print(f"{path}: {os.path.getsize(path) / 1e3:.0f} kB")


if __name__ == "__main__":
    cli.exit_process(cli.run(main))
