"""The built-in models cut to one layer, whose programs take less time to compile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.checkpoint import model_source

ASSETS = Path(model_source.__file__).parents[1] / "assets"


def cut_models(folder: Path) -> Path:
    """Writes a student and a teacher, which answer nothing right any more: for runs of which only
    that they train and evaluate is asked."""
    for name in ("student", "teacher"):
        shutil.copytree(ASSETS / name, folder / name)
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
        weights = load_file(folder / name / "model.safetensors")
        left = {k: v for k, v in weights.items() if ".layers." not in k or ".layers.0." in k}
        save_file(left, folder / name / "model.safetensors")
    return folder


def take_cut_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`builtin:student` and `builtin:teacher` are those of a folder from now on."""
    real = model_source._locate

    def locate(name: str) -> Path:
        kind, _, rest = name.partition(":")
        return folder / rest if kind == "builtin" and rest in ("student", "teacher") else real(name)

    monkeypatch.setattr(model_source, "_locate", locate)
