"""Llama 2 and 3, and what has their blocks (arXiv 2302.13971, 2407.21783); Mistral 7B and what has
its blocks (arXiv 2310.06825): Llama's, all of whose layers attend to a window in the first version,
and to everything in later ones."""

from __future__ import annotations

from jaxrl.models.family import Family, read_window

WINDOW = 4096
"""The window where a `config.json` does not say it; null says that there is none."""

LLAMA = Family(
    "LlamaForCausalLM",
    gguf="llama",
    gguf_interleaved=True,
    write=lambda _: {"attention_bias": False, "mlp_bias": False},
)
MISTRAL = Family(
    "MistralForCausalLM",
    max_positions=131_072,
    read=lambda raw: {"kinds": read_window(raw, WINDOW)},
    write=lambda config: {"sliding_window": config.kinds[0].window},
)
