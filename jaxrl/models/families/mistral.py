"""Mistral 7B and what has its blocks (arXiv 2310.06825): Llama's, all of whose layers attend to a
window in the first version, and to everything in later ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.models.family import Family
from jaxrl.models.fields import size
from jaxrl.models.kinds import LayerKind

WINDOW = 4096
"""Of a `config.json` that does not say it; null says that there is none."""


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    whole = "sliding_window" in raw and raw["sliding_window"] is None
    return {"kinds": (LayerKind(None if whole else size(raw, "sliding_window", WINDOW)),)}


def write(config: Any) -> dict[str, Any]:
    return {"sliding_window": config.kinds[0].window}


MISTRAL = Family("MistralForCausalLM", read=read, write=write)
