"""What a decode step launches and moves, by the compilers of GPUs; prints a table.

    python benchmarks/decode_step.py [REGEX]

No accelerator is needed, but the extra `aot`. Each case whose name has the pattern is compiled with
one layer and with three, in a minute or so each; the difference is what two layers add. No time is
measured: the share of the floor is that of a step which reads and writes at the speed of the data
sheet and takes `LAUNCH_S` more for each kernel. All positions of the cache count as read.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from compiled_runs import compiling, config

from jaxrl.aot.hlo import ARRAY, OPERAND, Instruction, computations
from jaxrl.aot.programs import local_bytes
from jaxrl.aot.suggest import LAUNCH_S
from jaxrl.sharding.targets import GPUS

QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
SMALL = QWEN3 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
LARGE = QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """The rollout of a model on one GPU."""

    target: str
    model: Mapping[str, Any]
    layers: int
    """Of the whole model."""
    slots: int
    new: int
    """Tokens of a completion, after prompts of 512 that 8 slots share."""


CASES = {
    "Qwen3-1.7B, H200": Case("h200x1", SMALL, 28, 128, 2048),
    "Qwen3-8B, H200": Case("h200x1", LARGE, 36, 128, 2048),
    "Qwen3-1.7B, T4": Case("t4x1", SMALL, 28, 16, 512),
}
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "iota")
SLICES = ("dynamic-slice", "slice")


@dataclass(frozen=True)
class Step:
    """A decode step, or a part of one."""

    kernels: float
    moved: float
    """Bytes read and written."""
    least: float
    """Bytes of weights, keys and values."""

    def __add__(self, other: Step) -> Step:
        return Step(
            self.kernels + other.kernels, self.moved + other.moved, self.least + other.least
        )

    def __mul__(self, n: float) -> Step:
        return Step(n * self.kernels, n * self.moved, n * self.least)


def size(shapes: str) -> int:
    return sum(
        int(bits or 8) * math.prod(int(n) for n in dims.split(",") if n) // 8
        for bits, dims in ARRAY.findall(shapes)
    )


def operands(line: Instruction) -> list[str]:
    return OPERAND.findall(re.split(r"\), |\)$", line.rest)[0])


def read_of(name: str, whole: int, body: Iterable[Instruction]) -> int:
    """Counts the bytes that a fusion reads of a parameter: slices and gathers read parts of it, and
    what is updated in place is not read."""
    total = 0
    for line in body:
        given = operands(line) if line.kind != "parameter" else []
        if name not in given:
            continue
        if line.kind == "bitcast":
            total += read_of(line.name, whole, body)
        elif line.kind in SLICES or (line.kind == "gather" and given[0] == name):
            total += size(line.result)
        elif line.kind not in ("dynamic-update-slice", "scatter") or given[0] != name:
            return whole
    return min(total, whole)


def written(line: Instruction, body: Mapping[str, Instruction]) -> int:
    """Counts the bytes that the root of a fusion writes."""
    given = operands(line)
    if line.kind == "tuple":
        return sum(written(body[name], body) for name in given)
    if line.kind == "bitcast":
        return written(body[given[0]], body)
    if line.kind == "parameter":
        return 0
    at = {"dynamic-update-slice": 1, "scatter": 2}.get(line.kind)
    return size(line.result if at is None else body[given[at]].result)


def moved(
    line: Instruction, held: Mapping[str, str], lines_of: dict[str, list[Instruction]]
) -> int:
    """Counts the bytes that an instruction reads and writes."""
    given = operands(line)
    if line.kind == "fusion":
        called = re.search(r"calls=%?([\w.\-]+)", line.rest)
        assert called is not None
        body = lines_of[called[1]]
        names = {int(x.rest.partition(")")[0]): x.name for x in body if x.kind == "parameter"}
        read = sum(read_of(names[i], size(held[name]), body) for i, name in enumerate(given))
        return read + written(body[-1], {x.name: x for x in body})
    if line.kind == "dynamic-update-slice":
        return 2 * size(held[given[1]])
    if line.kind in (*SLICES, "gather"):
        return 2 * size(line.result)
    scratch = re.search(r"s8\[(\d+)\]", line.result) if "cublas" in line.rest else None
    read = sum(size(held[name]) for name in given)
    return read + size(line.result) - (int(scratch[1]) if scratch else 0)


def step(text: str) -> tuple[int, int]:
    """Returns kernels and bytes of a decode step: of the loop's body that has most of them."""
    lines_of, best = computations(text), (0, 0)
    for name in set(re.findall(r"body=%?([\w.\-]+)", text)):
        lines = [
            line for line in lines_of[name] if line.kind not in (*FREE, "while", "conditional")
        ]
        held = {line.name: line.result for line in lines_of[name]}
        sizes = [n for line in lines if (n := moved(line, held, lines_of)) > 0]
        best = max(best, (len(sizes), sum(sizes)))
    return best


def measured(case: Case, layers: int) -> Step:
    """Compiles a model of so many layers."""
    with tempfile.TemporaryDirectory() as tmp, ThreadPoolExecutor(1) as pool:
        run = config(
            Path(tmp),
            dict(case.model) | {"num_hidden_layers": layers},
            mesh="actor+rollout=1",
            algorithm="gspo",
            batch_size=case.slots // 8,
            group_size=8,
            max_prompt_tokens=512,
            max_new_tokens=case.new,
            teacher={"model": None},
            reward={"functions": ["exact"]},
        )
        (decode,) = compiling(pool, run, case.target, "decode")
        args = decode.program.args
        params, cache, (prompts, _) = args[2], args[3], args[7]
        least = local_bytes((params, cache, prompts))
        if not case.model["tie_word_embeddings"]:  # of the table a step reads a row a slot
            least -= local_bytes(params["embed"])
        return Step(*step(decode.text), least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="of the names; default: all")
    args = parser.parse_args()
    print(
        "| model, GPU, slots | kernels a layer | a step | MB a token | MB at least | share of the"
        " floor |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name, case in CASES.items():
        if not re.search(args.pattern, name):
            continue
        one, three = (measured(case, n) for n in (1, 3))
        layer = (three + one * -1) * 0.5
        whole = one + layer * (case.layers - 1)
        gpu = GPUS[case.target.partition("x")[0]]
        floor = whole.least / (gpu.bandwidth_gbs * 1e9)
        took = whole.moved / (gpu.bandwidth_gbs * 1e9) + whole.kernels * LAUNCH_S
        print(
            f"| {name}, {case.slots} | {layer.kernels:.0f} | {whole.kernels:.0f}"
            f" | {whole.moved / case.slots / 1e6:.1f} | {whole.least / case.slots / 1e6:.1f}"
            f" | {floor / took:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
