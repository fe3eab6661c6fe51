"""OLMo 2, which norms the output of attention and of the MLP, and all heads of q and k at once
(arXiv 2501.00656); and OLMo 3, of whose layers three have a window to one that has none (arXiv
2512.13961)."""

from __future__ import annotations

from dataclasses import replace

from jaxrl.models import family
from jaxrl.process.json_types import JsonObject

DEFAULTS: JsonObject = {"rope_theta": 5e5, "sliding_window": 4096}
"""What a `config.json` of OLMo 3 leaves out where it is this."""
LOCAL = "rope_theta of sliding_attention"
PERIOD = 4
"""Every so many layers one has no window, where there are no `layer_types`."""


def _prepare(raw: family.Raw) -> family.Raw:
    return DEFAULTS | family.read_ropes(raw, LOCAL)


def _read(raw: family.Raw) -> JsonObject:
    """Reads the kinds of layers: those with a window do not scale their positions."""
    local = family.positive_number(raw, LOCAL, family.positive_number(raw, "rope_theta"))
    return {
        "kinds": family.read_windows(
            raw, family.window_of(raw), lambda i: (i + 1) % PERIOD != 0, local
        )
    }


def _write(config: family.DecoderLike) -> JsonObject:
    return family.write_windows(config) | family.write_ropes(config)


OLMO2 = family.Family(
    "Olmo2ForCausalLM",
    family.BlockKind(qk_norm="width", norms="after", norm_in_float32=True),
    rms_norm_eps=1e-5,
    gguf="olmo2",
)
OLMO3 = replace(OLMO2, architecture="Olmo3ForCausalLM", prepare=_prepare, read=_read, write=_write)
