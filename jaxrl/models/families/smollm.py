"""SmolLM3: Llama's blocks, of which every fourth does not rotate queries and keys (NoPE, arXiv
2305.19466), and Hugging Face's own checkpoints no layer at a window."""

from __future__ import annotations

from dataclasses import replace

from jaxrl.errors import UserError, short
from jaxrl.models import family
from jaxrl.process.json_types import JsonObject

EVERY = 4
"""Every so many layers one does not rotate, where a `config.json` does not say it."""


def _read(raw: family.Raw) -> JsonObject:
    n, every = (
        family.size(raw, "num_hidden_layers"),
        family.size(raw, "no_rope_layer_interval", EVERY),
    )
    rotates = family.value_or(
        raw.get("no_rope_layers"), [int((i + 1) % every != 0) for i in range(n)]
    )
    if not isinstance(rotates, list) or len(rotates) < n or set(rotates) - {0, 1}:
        raise UserError(
            f"no_rope_layers={short(repr(rotates))} must be a list of num_hidden_layers={n}"
            " numbers, 1 of layers that rotate and 0 of the others"
        )
    window = family.size(raw, "sliding_window", 0) if raw.get("use_sliding_window") else None
    kinds = family.read_windows(raw, window, lambda i: not rotates[i])
    pairs = zip(kinds, rotates[:n], strict=True)
    return {"kinds": tuple(replace(kind, rotates=bool(turned)) for kind, turned in pairs)}


def _write(config: family.DecoderLike) -> JsonObject:
    written = family.write_windows(config)
    repeats = config.n_layers // len(config.kinds)
    return written | {
        "no_rope_layers": [int(kind.rotates) for kind in config.kinds] * repeats,
        "use_sliding_window": written["sliding_window"] is not None,
        "attention_bias": False,
        "mlp_bias": False,
    }


SMOLLM3 = family.Family(
    "SmolLM3ForCausalLM",
    rope_theta=2e6,
    tie_embeddings=True,
    max_positions=32_768,
    gguf="smollm3",
    gguf_interleaved=True,
    read=_read,
    write=_write,
)
