"""What a decode step launches and moves, by the compilers of GPUs; prints a table.

    python benchmarks/decode_step.py [REGEX] [--kernels]

No accelerator is needed, but the extras `aot` and `dev` (pytest). Each case whose name has the
pattern is compiled with one layer and with three, in a minute or so each; the difference is what
two layers add. No time is
measured: the share of the floor is that of a step which reads and writes at the speed of the data
sheet and takes `LAUNCH_S` more for each kernel. All positions of the cache count as read.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from compiled_runs import Compiling, compiling, config

from jaxrl.aot.hlo import ARRAY, OPERAND, Instruction, computations
from jaxrl.aot.suggest import LAUNCH_S
from jaxrl.roles.declared import local_bytes
from jaxrl.sampling.sampler import BLOCK
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
TINY = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
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
    """Tokens of a completion, after prompts of 512 that 8 slots share, unless they are greedy."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the section `sampling`; empty: temperature 1."""


SAMPLINGS: dict[str, Mapping[str, Any]] = {
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.95},
    "top-k, top-p, min-p": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    "greedy": {"temperature": 0.0},
}
CASES = {
    "Qwen3-1.7B, H200": Case("h200x1", SMALL, 28, 128, 2048),
    "Qwen3-8B, H200": Case("h200x1", LARGE, 36, 128, 2048),
    "Qwen3-1.7B, T4": Case("t4x1", SMALL, 28, 16, 512),
    "SmolLM2-135M, T4": Case("t4x1", TINY, 30, 64, 512),
    **{
        f"Qwen3-1.7B, H100, {name}": Case("h100x1", SMALL, 28, 128, 2048, sampling)
        for name, sampling in SAMPLINGS.items()
    },
}
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "iota")
SLICES = ("dynamic-slice", "slice")
POINTWISE = (
    *("bitcast", "bitcast-convert", "convert", "reshape", "pad", "add", "subtract", "multiply"),
    *("divide", "exponential", "compare", "select", "and", "or"),
)


@dataclass(frozen=True)
class Step:
    """A decode step, or a part of one."""

    kernels: float
    moved: float
    """Bytes read and written."""
    least: float
    """Bytes of weights, keys and values."""
    read: float
    """How many times it reads the logits."""
    wrote: float

    def __add__(self, other: Step) -> Step:
        return Step(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, n: float) -> Step:
        return Step(*(n * a for a in astuple(self)))


class Moved(NamedTuple):
    """An array of a kernel, and its bytes that the kernel reads and writes."""

    shape: str
    read: float
    wrote: float


def size(shapes: str) -> int:
    return sum(
        int(bits or 8) * math.prod(int(n) for n in dims.split(",") if n) // 8
        for bits, dims in ARRAY.findall(shapes)
    )


def elements(shape: str) -> int:
    """Counts the numbers in an array, or in the first of several."""
    found = ARRAY.search(shape)
    return math.prod(int(n) for n in found[2].split(",") if n) if found else 0


def operands(line: Instruction) -> list[str]:
    return OPERAND.findall(re.split(r"\), |\)$", line.rest)[0])


def read_shares(body: Sequence[Instruction]) -> dict[str, float]:
    """Returns for each value of a fusion the part of it that is read. Slices and gathers read parts
    of it, also through what is computed of one element by element, or summed over an outer dim;
    what is updated in place is not read."""
    sizes, shares = {line.name: size(line.result) for line in body}, defaultdict[str, float](float)
    for line in reversed(body):
        given = operands(line) if line.kind != "parameter" else []
        for name in set(given):
            if line.kind in (*POINTWISE, "reduce") and line is not body[-1]:
                part = shares[line.name]
            elif line.kind in SLICES or (line.kind == "gather" and given[0] == name):
                part = sizes[line.name] / max(sizes[name], 1)
            else:
                part = line.kind not in ("dynamic-update-slice", "scatter") or given[0] != name
            shares[name] = min(shares[name] + part, 1)
    return shares


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
) -> Iterator[Moved]:
    """Yields each array that an instruction reads or writes."""
    given = operands(line)
    if line.kind == "fusion":
        called = re.search(r"calls=%?([\w.\-]+)", line.rest)
        assert called is not None
        body = lines_of[called[1]]
        names = {int(x.rest.partition(")")[0]): x.name for x in body if x.kind == "parameter"}
        shares = read_shares(body)
        for i, name in enumerate(given):
            yield Moved(held[name], size(held[name]) * shares[names[i]], 0)
        by_name = {x.name: x for x in body}
        root = body[-1]
        for name in operands(root) if root.kind == "tuple" else [root.name]:
            yield Moved(by_name[name].result, 0, written(by_name[name], by_name))
    elif line.kind == "dynamic-update-slice":
        part = size(held[given[1]])
        yield Moved(held[given[1]], part, part)
    elif line.kind in (*SLICES, "gather"):
        yield Moved(line.result, size(line.result), size(line.result))
    else:
        for name in given:
            yield Moved(held[name], size(held[name]), 0)
        for array in ARRAY.finditer(line.result):
            scratch = "cublas" in line.rest and array[0].startswith("s8[")
            yield Moved(array[0], 0, 0 if scratch else size(array[0]))


Kernels = list[tuple[Instruction, list[Moved]]]
"""And what each moves (`moved`)."""


def kernels(text: str) -> Kernels:
    """Returns the kernels of a decode step: of the loop's body that has most of them."""
    return max(loops(text), key=len)


def loops(text: str) -> Iterator[Kernels]:
    """Yields the kernels of the body of each loop."""
    lines_of = computations(text)
    for name in set(re.findall(r"body=%?([\w.\-]+)", text)):
        lines = [
            line for line in lines_of[name] if line.kind not in (*FREE, "while", "conditional")
        ]
        held = {line.name: line.result for line in lines_of[name]}
        each = [(line, list(moved(line, held, lines_of))) for line in lines]
        yield [one for one in each if total(one[1]) > 0]


def total(arrays: Iterable[Moved]) -> float:
    """Sums what `moved` says."""
    return sum(array.read + array.wrote for array in arrays)


def step(text: str) -> tuple[int, float]:
    """Returns how many kernels a decode step has, and its bytes."""
    found = kernels(text)
    return len(found), sum(total(arrays) for _, arrays in found)


def passes(text: str, rows: int, vocabulary: int) -> tuple[float, float]:
    """Returns how many times a decode step, or a chunk of a loss, reads and writes arrays of the
    logits' size, such as weights that are made of them: an array of 16-bit numbers counts half, and
    what is read of candidates for top-k by its share."""
    logits = rows * vocabulary
    padded = rows * -(-vocabulary // BLOCK) * BLOCK
    found = []
    for each in loops(text):
        arrays = [x for _, held in each for x in held if elements(x.shape) in (logits, padded)]
        found.append((sum(x.read for x in arrays), sum(x.wrote for x in arrays)))
    read, wrote = max(found)
    return read / (4 * logits), wrote / (4 * logits)


def compiled(case: Case, layers: int) -> Compiling:
    """Compiles a model of so many layers."""
    group = 1 if case.sampling.get("temperature") == 0 else 8
    with tempfile.TemporaryDirectory() as tmp, ThreadPoolExecutor(1) as pool:
        run = config(
            Path(tmp),
            dict(case.model) | {"num_hidden_layers": layers},
            mesh="actor+rollout+teacher=1",
            batch_size=case.slots // group,
            group_size=group,
            max_prompt_tokens=512,
            max_new_tokens=case.new,
            sampling=dict(case.sampling),
        )
        (decode,) = compiling(pool, run, case.target, "decode")
        return decode


def measured(case: Case, layers: int) -> Step:
    """Counts the step of a model of so many layers."""
    decode = compiled(case, layers)
    args = decode.program.args
    params, cache, (prompts, _) = args[2], args[3], args[7]
    least = local_bytes((params, cache, prompts))
    if not case.model["tie_word_embeddings"]:  # of the table a step reads a row a slot
        least -= local_bytes(params["embed"])
    read, wrote = passes(decode.text, case.slots, case.model["vocab_size"])
    return Step(*step(decode.text), least, read, wrote)


def listed(case: Case) -> Iterator[str]:
    """Yields a line for each kernel of the step of a model of one layer: MB that it reads and
    writes, its result, and the operation that it is named after."""
    for line, arrays in kernels(compiled(case, 1).text):
        read, wrote = sum(x.read for x in arrays) / 1e6, sum(x.wrote for x in arrays) / 1e6
        operation = re.search(r'op_name="[^"]*?([^"/]*)"', line.rest)
        yield f"{read:9.3f} {wrote:8.3f} {operation[1] if operation else '':24} {line.result}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="of the names; default: all")
    parser.add_argument("--kernels", action="store_true", help="list those of one layer instead")
    args = parser.parse_args()
    if args.kernels:
        for name in (name for name in CASES if re.search(args.pattern, name)):
            print(f"{name}: MB read, written", *listed(CASES[name]), sep="\n", flush=True)
        return
    print(
        "| model, GPU, slots | kernels a layer | a step | MB a token | MB at least | share of the"
        " floor | logits read, written |\n| --- | --- | --- | --- | --- | --- | --- |"
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
            f" | {floor / took:.0%} | {whole.read:.1f}, {whole.wrote:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
