"""What the texts of a compiled program say: collectives, what overlaps them, kernels, graphs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
ARRAY = re.compile(r"\b(?:pred|[suf]|bf)(\d*)\w*\[([\d,]*)\]")
"""An array in the text of a shape: the bits of a number (none: a byte for a boolean), and dims."""
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
CALLED = re.compile(r"(?:body|condition|calls|to_apply|async_execution_thread)=%?([\w.\-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
OPERAND = re.compile(r"%([\w.\-]+)")
TARGET = re.compile(r'custom_call_target="([^"]+)"')
PRODUCTS = {"custom-call", "dot", "convolution", "call"}
"""Matrix products and kernels, or what holds such."""
UPDATE = "dynamic-update-slice"
ATTENTION = {
    "__cudnn$fmha": "cuDNN's flash attention",
    "tpu_custom_call": "a TPU kernel (Pallas)",
    "mosaic_gpu": "a Mosaic GPU kernel",
    "__gpu$xla.gpu.triton": "a Triton kernel",
}
"""Beginning of a custom call's target -> the attention kernel."""


class Instruction(NamedTuple):
    """One line of HLO."""

    name: str
    result: str
    """Its shapes, as text."""
    kind: str
    rest: str


@dataclass(frozen=True)
class Collective:
    """All collectives of a kind in a program."""

    calls: int
    """In one call of the program, those in loops counted as often as they run."""
    bytes: int
    """On a device: of the larger of operands and results, over all of these."""
    overlapped: int
    """Of the bytes, those of collectives beside which a product or a kernel runs, or fusions that
    write as many bytes: adding up a scalar hides nothing."""

    def sent(self, kind: str, devices: int) -> float:
        """Returns the bytes that a device sends, where `devices` take part: each has its own share
        already, and an all-reduce is a scatter and a gather."""
        if kind == "collective-permute":
            return self.bytes
        return self.bytes * (2 if kind == "all-reduce" else 1) * (devices - 1) / devices


@dataclass(frozen=True)
class Compiled:
    """What a compiled program does, as its text says."""

    collectives: dict[str, Collective]
    largest_gather: dict[str, int]
    """Computation -> bytes of the largest all-gather in it."""
    attention: str | None
    """The kernel; None where attention is made of matrix products."""


def read_program(text: str) -> Compiled:
    """Parses an optimized program's `as_text()`."""
    lines_of = computations(text)
    # How often each computation runs in a call of the program; a loop of unknown length once.
    trips: dict[str, int] = defaultdict(int)

    def visit(name: str, n: int) -> None:
        trips[name] += n
        for line in lines_of.get(name, ()):
            known = TRIPS.search(line.rest)
            inside = n * (int(known[1]) if known and line.kind == "while" else 1)
            for called in CALLED.findall(line.rest):
                if called in lines_of and line.kind != "fusion":
                    visit(called, inside)
            for called in re.findall(r"branch_computations=\{([^}]*)\}", line.rest):
                for branch in called.replace("%", "").split(", "):
                    visit(branch, inside)

    visit("ENTRY", 1)
    collectives: dict[str, Collective] = {}
    gathers: dict[str, int] = {}
    for name, lines in lines_of.items():
        held = {line.name: _size(line.result) for line in lines}
        for at, line in enumerate(lines if trips.get(name) else ()):
            kind, starts = line.kind.removesuffix("-start"), line.kind.endswith("-start")
            if kind not in KINDS:
                continue
            # The larger of operands and results: XLA combines several collectives into one, and the
            # result of one that starts may have its operands too.
            operands = sum(held.get(x, 0) for x in OPERAND.findall(line.rest.partition(")")[0]))
            size = max(operands, held[line.name] - operands if starts else held[line.name])
            hidden = starts and _work_beside(line, lines[at + 1 :], held, lines_of) >= size
            calls, moved = trips[name], trips[name] * size
            before = collectives.get(kind, Collective(0, 0, 0))
            collectives[kind] = Collective(
                before.calls + calls,
                before.bytes + moved,
                before.overlapped + (moved if hidden else 0),
            )
            if kind == "all-gather":
                gathers[name] = max(gathers.get(name, 0), size)
    kernels = set(TARGET.findall(text))
    known = (name for start, name in ATTENTION.items() if any(k.startswith(start) for k in kernels))
    return Compiled(dict(sorted(collectives.items())), gathers, next(known, None))


def _size(shapes: str) -> int:
    """Returns the bytes of the arrays in the text of a shape."""
    return sum(
        int(bits or 8) * math.prod(int(n) for n in dims.split(",") if n) // 8
        for bits, dims in ARRAY.findall(shapes)
    )


def _work_beside(
    start: Instruction,
    later: Sequence[Instruction],
    sizes: Mapping[str, int],
    lines_of: Mapping[str, Sequence[Instruction]],
) -> float:
    """Returns the bytes that fusions write before a collective that `start`s is done; infinity
    where a matrix product or a kernel, which takes long, runs meanwhile. A fusion that writes a
    slice in place does next to nothing."""
    work, end = 0.0, re.compile(rf"%?{re.escape(start.name)}\b")
    for line in later:
        if line.kind.endswith("-done") and end.search(line.rest):
            break
        called = CALLED.findall(line.rest) if line.kind == "fusion" else ()
        inside = {instruction.kind for name in called for instruction in lines_of.get(name, ())}
        if not PRODUCTS.isdisjoint(inside | {line.kind}):
            return math.inf
        if line.kind == "fusion" and UPDATE not in inside:
            work += sizes[line.name]
    return work


def computations(text: str) -> dict[str, list[Instruction]]:
    """Parses the computations of a program, by name; `ENTRY` is what is called."""
    found: dict[str, list[Instruction]] = {}
    lines: list[Instruction] = []
    for line in text.splitlines():
        begin = COMPUTATION.match(line)
        if begin is not None:
            lines = found["ENTRY" if begin[1] else begin[2]] = []
        elif (instruction := INSTRUCTION.match(line)) is not None:
            lines.append(Instruction(*instruction.groups()))
    return found


THUNK = re.compile(r"^(\s*)\d+: (k\w+)")
CONTROL = ("kWhile", "kConditional", "kCommandBuffer", "kSequential")


@dataclass(frozen=True)
class Graphs:
    """What a GPU program launches in its loops."""

    graphs: int
    """CUDA graphs (command buffers)."""
    inside: int
    """Kernels, copies and library calls in them."""
    outside: int
    """Those that the host launches one by one."""


def read_thunks(text: str) -> Graphs:
    """Parses XLA's dump `thunk_sequence_after_thunk_passes`: one line a thunk, indented by the
    loops, conditions and graphs that it is in."""
    above: list[tuple[int, str]] = []
    graphs = inside = outside = 0
    for line in text.splitlines():
        found = THUNK.match(line)
        if found is None:
            continue
        depth, kind = len(found[1]), found[2]
        while above and above[-1][0] >= depth:
            above.pop()
        kinds = [name for _, name in above]
        if kind == "kCommandBuffer":
            graphs += "kWhile" in kinds
        elif kind not in CONTROL and "kWhile" in kinds:
            inside += "kCommandBuffer" in kinds
            outside += "kCommandBuffer" not in kinds
        above.append((depth, kind))
    return Graphs(graphs, inside, outside)


TOTAL = re.compile(r"Total bytes: (\d+)")


def read_total(report: str) -> int:
    """Returns the bytes of a TPU program's arguments, results and temporaries in a device's HBM, by
    what XLA's dump `memory-usage-report` says of each memory space, the HBM first. The compiler
    refuses a program for which they are too many."""
    found = TOTAL.search(report)
    assert found is not None
    return int(found[1])
