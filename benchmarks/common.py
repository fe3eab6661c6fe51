"""What the benchmarks share: sampling and updates as work, the machine, taking turns, the line.

A benchmark counts the work first (`jaxrl.profile.work`): the floor of a part is the longer of its
FLOPs at the machine's best matrix product and its bytes at the machine's best bandwidth, both
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from jaxrl.models.config import DecoderConfig
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.profile.work import Work, adamw_work, decode_work, divergence_work, forward_work
from jaxrl.sharding.targets import best_seconds, product_flops, read_bandwidth

BIG = 2**28
"""Bytes of the array that is read for the bandwidth: far above every cache."""


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every benchmark has; `defaults` replace those given here."""
    told = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    told.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    told.add_argument("--devices", type=int, default=1, help="CPU devices to emulate")
    told.add_argument(
        "--repeats", type=int, default=5, help="measured rounds, after one to warm up"
    )
    told.set_defaults(**defaults)
    return told


def start(arguments: argparse.Namespace) -> None:
    """Emulates the devices; call it before anything asks jax for its devices."""
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    enable_compile_cache("~/.cache/jaxrl/compile")


# The work.


def train_work(
    student: DecoderConfig,
    teacher_width: int,
    vocab: int,
    lengths: Sequence[float],
    tokens: int,
    itemsize: int,
) -> list[Work]:
    """An update: forward and backward of the blocks, divergence of `tokens` tokens, AdamW."""
    forward = forward_work(student, lengths, itemsize)
    return [
        forward,
        divergence_work(vocab, student.d_model, teacher_width, tokens, itemsize),
        forward * 2,
        adamw_work(student.n_params),
    ]


def sampling_work(
    c: DecoderConfig, prompts: Sequence[int], lengths: np.ndarray, slots: int, itemsize: int
) -> list[Work]:
    """Each prompt prefilled once; then as few decode steps as the slots allow, which read the keys
    of a prompt once for all of its samples.

    Args:
        prompts: tokens of each prompt.
        lengths: [prompts, samples] tokens of each completion.
    """
    steps = max(int(lengths.max()), -(-int(lengths.sum()) // slots))
    prompt = np.asarray(prompts, float)[:, None]
    context, read = (
        float((lengths * (held + lengths / 2)).sum() / lengths.sum())
        for held in (prompt, prompt / lengths.shape[1])
    )
    decode = decode_work(c, context, float(lengths.sum()), steps, itemsize, read=read)
    return [forward_work(c, prompts, itemsize), decode]


# The machine.


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches, measured in this run."""

    flops: float
    """Per second: the best of all products below."""
    bandwidth: float
    """Bytes read per second."""
    at: dict[str, float]
    """GFLOP/s of products of the work's own shapes, as `rows x inner x columns`."""

    def floor(self, parts: Sequence[Work]) -> float:
        """Seconds that the parts take at least, one after the other."""
        return sum(max(p.flops / self.flops, p.bytes / self.bandwidth) for p in parts)

    def told(self) -> dict[str, Any]:
        return {
            "gflop_per_s": round(self.flops / 1e9, 1),
            "gb_per_s": round(self.bandwidth / 1e9, 1),
            "gflop_per_s_at": self.at,
        }


def ceilings(dtype: Any, *shapes: tuple[int, int, int]) -> Ceilings:
    """Best of a few tries: a busy machine only ever lowers it."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    found = {shape: product_flops(*shape, dtype) for shape in ((size,) * 3, *shapes)}
    at = {" x ".join(map(str, shape)): round(x / 1e9, 1) for shape, x in found.items()}
    return Ceilings(max(found.values()), read_bandwidth(BIG), at)


def tree_bytes(tree: Any) -> int:
    """Counts the bytes of the arrays of `tree`, each array once however it is replicated."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def copy_seconds(nbytes: int) -> float:
    """A plain copy of so many bytes in the host's memory."""
    source = np.ones(nbytes, np.uint8)
    target = np.empty_like(source)
    return best_seconds(lambda: np.copyto(target, source))


def alternate(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; they take turns, the first round (compilation) is not
    counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 1):
        for name, run in ways.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            if i > 0:
                found[name].append(time.perf_counter() - begin)
    return found


# The line.


def figure(
    seconds: Sequence[float], parts: Sequence[Work], machine: Ceilings, **more: Any
) -> dict[str, Any]:
    """One measured quantity with its floor beside it."""
    middle, floor = statistics.median(seconds), machine.floor(parts)
    return {
        "seconds": rounded(middle),
        "best_seconds": rounded(min(seconds)),
        "gflop": rounded(sum(p.flops for p in parts) / 1e9),
        "gbytes": rounded(sum(p.bytes for p in parts) / 1e9),
        "floor_seconds": rounded(floor),
        "over_floor": rounded(middle / floor),
        **more,
    }


def line(
    arguments: argparse.Namespace, machine: Ceilings, figures: Mapping[str, Any], **more: Any
) -> str:
    """The JSON line of a benchmark; `figures` are name -> `figure`."""
    told = {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "jax": version("jax")},
        "load": round(os.getloadavg()[0], 2),
        "arguments": vars(arguments),
        "ceilings": machine.told(),
        "figures": figures,
    }
    return json.dumps(told | more)


def rounded(x: float, digits: int = 4) -> float:
    """`x` to a number of significant digits."""
    return float(f"{x:.{digits}g}")
