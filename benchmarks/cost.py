"""Seconds of the programs of a step, over tokens of a sequence, sequences, layers and devices.

    python benchmarks/cost.py                     # the table, in Markdown
    python benchmarks/cost.py --only tokens --models 1.5b --dtype bfloat16

One of the four varies at a time, from `BASE`. An update learns from the teacher's hidden states
(JSD); a decode step is one of a launch in which each slot holds as many tokens as a sequence has.
The last column divides the update by its tokens: where it is constant, cost follows the tokens;
attention makes it grow with long sequences. Emulated devices share this machine's cores, so that
more of them take no less time: what they show is the cost of dividing the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import jax
from described import MODELS, SIZES, Size, _qwen, describe, measure

SMALL = {
    f"{name} of {layers} layers": _qwen(width, layers, 4, 2, 3 * width, vocab_size=8192)
    for layers in (2, 4, 8, 16)
    for name, width in (("student", 256), ("teacher", 384))
}
BASE = {"tokens": 512, "sequences": 4, "layers": 4, "devices": 1}
VALUES = {
    "tokens": (64, 128, 256, 512, 1024, 2048, 4096),
    "sequences": (1, 2, 4, 8, 16),
    "layers": (2, 4, 8, 16),
    "devices": (1, 2, 4, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=VALUES, nargs="+", default=list(VALUES))
    parser.add_argument("--models", choices=SIZES, help="real sizes (layers do not vary then)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the device's")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each program, at least")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(VALUES["devices"]))
    MODELS.update(SMALL)
    print("| varies | value | update | score | decode step | update, µs a token |")
    print("|---|---|---|---|---|---|", flush=True)
    for what in arguments.only:
        for at in points(what, arguments.models):
            print(line(what, at, arguments), flush=True)


def points(what: str, models: str | None) -> Iterator[dict[str, int]]:
    """The work of each row of the table, as `BASE`."""
    if what == "layers" and models:
        return
    for value in VALUES[what]:
        if what != "devices" or value <= len(jax.devices()):
            yield {**BASE, what: value}


def line(what: str, at: dict[str, int], arguments: argparse.Namespace) -> str:
    """A row of the table."""
    prompt = at["tokens"] // 4
    names = (f"{role} of {at['layers']} layers" for role in ("student", "teacher"))
    size = SIZES[arguments.models] if arguments.models else Size(*names)
    size = replace(
        size,
        rows=at["sequences"],
        prompt=prompt,
        new=at["tokens"] - prompt,
        micro_batch=at["sequences"] * at["tokens"],
        launch=8,
    )
    dtypes = {} if arguments.dtype is None else {"dtype": arguments.dtype}
    sections = dict.fromkeys(("actor", "rollout", "teacher"), dtypes)
    run = describe(size, jax.devices()[: at["devices"]], **sections)
    update, score, decode = (
        measure(run, run.program(role, name), arguments.seconds).median
        for role, name in (("actor", "update"), ("teacher", "score"), ("rollout", "decode"))
    )
    step, tokens = decode / size.launch, at["sequences"] * at["tokens"]
    seconds = f"{number(update)} s | {number(score)} s | {number(step)} s"
    return f"| {what} | {at[what]} | {seconds} | {1e6 * update / tokens:.0f} |"


def number(seconds: float) -> str:
    return f"{seconds:.3g}"


if __name__ == "__main__":
    main()
