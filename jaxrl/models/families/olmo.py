"""OLMo 2, which norms the output of attention and of the MLP, and all heads of q and k at once
(arXiv 2501.00656); and OLMo 3, of whose layers three have a window to one that has none (arXiv
2512.13961)."""

from __future__ import annotations

from dataclasses import replace

from jaxrl.models.family import (
    BlockKind,
    DecoderLike,
    Family,
    Raw,
    positive_number,
    read_ropes,
    read_windows,
    window_of,
    write_ropes,
    write_windows,
)
from jaxrl.process.json_types import JsonObject

DEFAULTS: JsonObject = {"rope_theta": 5e5, "sliding_window": 4096}
"""What a `config.json` of OLMo 3 leaves out where it is this."""
LOCAL = "rope_theta of sliding_attention"
PERIOD = 4
"""Of so many layers the last one has no window, where there are no `layer_types`."""


def _prepare(raw: Raw) -> Raw:
    return DEFAULTS | read_ropes(raw, LOCAL)


def _read(raw: Raw) -> JsonObject:
    """Layers with a window do not scale their positions."""
    local = positive_number(raw, LOCAL, positive_number(raw, "rope_theta"))
    return {"kinds": read_windows(raw, window_of(raw), lambda i: (i + 1) % PERIOD != 0, local)}


def _write(config: DecoderLike) -> JsonObject:
    return write_windows(config) | write_ropes(config)


OLMO2 = Family(
    "Olmo2ForCausalLM",
    BlockKind(qk_norm="width", norms="after", norm_in_float32=True),
    rms_norm_eps=1e-5,
    gguf="olmo2",
)
OLMO3 = replace(OLMO2, architecture="Olmo3ForCausalLM", prepare=_prepare, read=_read, write=_write)
