"""Measures what the checksums of weights cost while a worker reads them.

    python benchmarks/weights_read.py [--gb 0.75] [--pairs 5] [--cold]

Makes a model folder of random bfloat16 weights in the system's temporary folder, loads it with and
without checksums in turn, each time in the other order, and prints the median of the ratios.
`--cold` drops the file from the page cache before each load, so that the disk is read. The folder
is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.formats import hf
from jaxrl.formats.opened import reading
from jaxrl.models.config import DecoderConfig


def make_model(folder: Path, gb: float) -> None:
    """Writes a model of about so many gigabytes."""
    width = 1024
    layers = max(1, round(gb * 1e9 / 2 / (12 * width * width)))
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": 4096,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 8 * width // 3 // 64 * 64,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "eos_token_id": 0,
        }
    )
    random = np.random.default_rng(0)
    shapes = hf.weights.tensor_shapes(config)
    draw = {shape: random.normal(size=shape).astype(np.float32) for shape in {*shapes.values()}}
    hf.write_folder(folder, config, lambda name: draw[shapes[name]], dtype="bfloat16")


def drop_from_cache(folder: Path) -> None:
    """Has the next load read the disk."""
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(folder: Path, checksums: bool, cold: bool) -> float:
    """Returns how long one load takes."""
    source = resolve_model(str(folder))
    if cold:
        drop_from_cache(folder)
    began = time.monotonic()
    if checksums:
        with reading() as read:
            params = source.load(None, "bfloat16")
        assert read.checksums({}, lambda file: False)[0]
    else:
        params = source.load(None, "bfloat16")
    jax.block_until_ready(params)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=0.75)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        make_model(folder, asked.gb)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
        seconds(folder, False, asked.cold)
        ratios = []
        for pair in range(asked.pairs):
            order = (False, True) if pair % 2 else (True, False)
            took = {checksums: seconds(folder, checksums, asked.cold) for checksums in order}
            ratios.append(took[True] / took[False])
            print(f"{size:.2f} GB: {took[False]:.2f} s, with checksums {took[True]:.2f} s")
        print(f"{statistics.median(ratios):.3f} times as long, the median of {len(ratios)} pairs")


if __name__ == "__main__":
    main()
