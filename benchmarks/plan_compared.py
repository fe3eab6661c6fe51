"""The bytes of the walk over a program's equations, and with the plan's margin, against the
compilers of GPUs and TPUs and against what devices held; prints tables.

    python benchmarks/plan_compared.py [REGEX] [--compile]

No accelerator is needed, but the extra `dev`. Each program of `CASES` whose name has the pattern is
planned and traced from `config.json` alone. The compilers' figures are in `compiled_bytes.json`;
with `--compile` they are asked again, in about 10 s each, and the file is written anew (extra
`aot`). What devices held while a program ran is in `measured/`, as `gpu.py` printed it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from compiled_runs import GROUP, NEW, PROMPT, config, planned_and_reported
from described import SIZES, describe
from gpu_sections import Bench, sampling_run
from large_models import NAMED

from jaxrl.algorithms.methods import needed_roles
from jaxrl.config.schema import Config
from jaxrl.plan import target_plan
from jaxrl.plan.declarations import RunPrograms
from jaxrl.plan.peaks import planned_bytes, walked_bytes
from jaxrl.sharding.targets import GPUS, target_machine

GB = 1e9
TARGETS = {
    "H200": "h200x8",
    "v5e": "tpu-v5e:2x2",
    "v5p": "tpu-v5p:2x2x1",
    "v6e": "tpu-v6e:2x2",
}
HALF = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
}
"""Qwen2.5-0.5B, with what it shares with 1.5B."""
BATCHES: dict[str, dict[str, Any]] = {
    "32 x 1280": {},
    "192 x 4096": {"batch_size": 48, "max_prompt_tokens": 1024, "max_new_tokens": 3072},
}
"""Rows and tokens of each -> keys of the config."""
TOKENS = {"32 x 1280": PROMPT + GROUP * NEW, "192 x 4096": 16384}
"""`actor.micro_batch_tokens`."""
REWARDED: dict[str, Any] = {
    "algorithm": "gspo",
    "teacher": {"model": None},
    "reward": {"functions": ["exact"]},
}
OTHERS = [("teacher", "score"), ("rollout", "prefill"), ("rollout", "decode"), ("actor", "convert")]


@dataclass(frozen=True)
class Case:
    """A program of a run."""

    target: str
    role: str
    program: str
    layers: int
    model: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)

    def run(self, tmp: Path) -> Config:
        return config(tmp, {"num_hidden_layers": self.layers} | dict(self.model), **self.keys)

    def estimates(self, tmp: Path) -> tuple[int, int]:
        """Bytes that the role holds on a device while the program runs, by the walk and by the
        plan, neither of which needs the target's compiler."""
        run = self.run(tmp)
        plan = target_plan(run, needed_roles(run), target_machine(self.target, "--target"))
        for program in RunPrograms(plan.setting):
            if (program.role, program.name) == (self.role, self.program):
                given = program, plan.inputs.target
                return walked_bytes(*given), planned_bytes(*given)
        raise KeyError(f"no run of {self.keys} has a program {self.role} {self.program}")

    def compiled(self, tmp: Path) -> int:
        """The same by the compiler."""
        return planned_and_reported(self.run(tmp), self.target, self.role, self.program)[1]


def cases() -> Iterator[tuple[str, Case]]:
    """Names and programs: updates by a teacher of 7B (student of 1.5B) and by rewards (0.5B), and
    the programs beside them. Layers of programs that compile one after the other are few but once.
    """
    for short, target in TARGETS.items():
        for batch, more in BATCHES.items():
            for devices in (1, 2, 4, 8):
                for remat in ("none", "dots", "full"):
                    if short != "H200" and (devices in (2, 8) or remat == "none"):
                        continue
                    actor = {"micro_batch_tokens": TOKENS[batch], "remat": remat}
                    where = f"{short}: update, {{}}, {batch}, {remat}, {devices} devices"
                    keys = {**more, "mesh": f"actor+rollout+teacher={devices}", "actor": actor}
                    yield where.format("GKD"), Case(target, "actor", "update", 28, {}, keys)
                    keys = {**keys, "mesh": f"actor+rollout={devices}", **REWARDED}
                    yield where.format("GSPO"), Case(target, "actor", "update", 24, HALF, keys)
            for role, name in OTHERS:
                keys = {**more, "mesh": "actor=1,rollout=1,teacher=2", "rollout": {"slots": 64}}
                deep = name in ("score", "convert") or (short == "H200" and batch != "32 x 1280")
                layers = 28 if deep else 2
                yield (
                    f"{short}: {name}, {batch}, {layers} layers",
                    Case(target, role, name, layers, {}, keys),
                )
    keys = {"mesh": "actor=1,rollout=1,teacher=2", "rollout": {"slots": 64}}
    states = NAMED["Qwen/Qwen3.5-9B"]
    yield "H200: score, states, 32 x 1280", Case("h200x8", "teacher", "score", 32, states, keys)
    for short in ("H200", "v5e"):
        for signal in ("topk", "student_topk"):
            more = keys | {"distill": {"signal": signal, "chunk_tokens": 2048}}
            name = f"{short}: score, {signal}, 32 x 1280"
            yield name, Case(TARGETS[short], "teacher", "score", 28, {}, more)
        # Few rows, so that their logits outweigh the layers.
        distill = {"signal": "sampled", "jsd_beta": 1.0, "chunk_tokens": 4096}
        few = {"mesh": "actor=1,rollout=1,teacher=1", "batch_size": 1, "distill": distill}
        ranked = few | {"distill": distill | {"signal": "student_topk", "jsd_beta": 0.0}}
        rewarded = {**few, "mesh": "actor=1,rollout=1,reference=1", **REWARDED}
        rewarded["policy"] = {"kl_coef": 0.01}
        for role, name, more in (
            ("teacher", "score", few),
            ("rollout", "top-k of the policy", ranked),
            ("reference", "score", rewarded),
        ):
            yield (
                f"{short}: {name}, {role}, 4 x 1280",
                Case(TARGETS[short], role, name, 2, {}, more),
            )


CASES = dict(cases())


RECORD = Path(__file__).parent / "compiled_bytes.json"
"""The compilers' versions, and by them the bytes of each case."""


MEASURED = Path(__file__).parent / "measured"
SAMPLED = re.compile(r".* x (\d+), context (\d+)")
OF_ROLES = {
    "score by": ("teacher", "score"),
    "update of": ("actor", "update"),
    "weights of": ("actor", "convert"),
}
"""First words of a row's name -> its role and program."""


def measured() -> dict[str, tuple[Any, Any]]:
    """Names of the programs of roles of which a device said what it held -> the first row of their
    file, which has the device, and their own."""
    found = {}
    for file in sorted(MEASURED.glob("*.jsonl")):
        first, *rows = map(json.loads, file.read_text().splitlines())
        of_roles = (row for row in rows if row.get("device") and "planned" in row)
        found |= {row["name"]: (first, row) for row in of_roles if "compiled" in row}
    return found


def walked_as_measured(first: Any, row: Any) -> int:
    """Bytes of a row's program by the walk."""
    name, size = row["name"], SIZES[first["size"]]
    (gpu,) = (target for target, gpu in GPUS.items() if gpu.kind == first["device"])
    devices = target_machine(f"{gpu}x{first['devices']}", "--target").devices
    if sampled := SAMPLED.fullmatch(name):
        run = sampling_run(Bench(size, devices), *map(int, sampled.groups()))
        role, program = "rollout", "decode"
    else:
        _, _, remat = name.partition("remat ")
        run = describe(size, devices, **({"actor": {"remat": remat}} if remat else {}))
        role, program = OF_ROLES[" ".join(name.split()[:2])]
    return walked_bytes(run.program(role, program), run.inputs.target)


def recorded() -> dict[str, int]:
    return dict(json.loads(RECORD.read_text())["bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="of the names; default: all")
    parser.add_argument("--compile", action="store_true", help="ask the compilers again")
    args = parser.parse_args()
    compiled, off = recorded(), defaultdict[tuple[str, str], list[float]](list)
    print("| program | compiled, GB | walked | planned |\n| --- | --- | --- | --- |")
    for name in (name for name in CASES if re.search(args.pattern, name)):
        with tempfile.TemporaryDirectory() as tmp:
            estimates = CASES[name].estimates(Path(tmp))
            if args.compile:
                versions = {x: version(x) for x in ("jax", "libtpu", "jax-cuda12-plugin")}
                compiled[name] = CASES[name].compiled(Path(tmp))
                ordered = {name: compiled[name] for name in CASES if name in compiled}
                record = {"versions": versions, "bytes": ordered}
                RECORD.write_text(json.dumps(record, indent=1) + "\n")
        ratios = [estimate / compiled[name] - 1 for estimate in estimates]
        for by, ratio in zip(("walked", "planned"), ratios, strict=True):
            off[name.partition(":")[0], by].append(ratio)
        shown = " | ".join(f"{ratio:+.1%}" for ratio in ratios)
        print(f"| {name} | {compiled[name] / GB:.2f} | {shown} |", flush=True)
    print("\n| program | on a device, GB | walked |\n| --- | --- | --- |")
    for name, (first, row) in measured().items():
        if re.search(args.pattern, name):
            ratio = walked_as_measured(first, row) / row["device"] - 1
            print(f"| {first['device']}: {name} | {row['device'] / GB:.2f} | {ratio:+.1%} |")
    print("\n| target | programs | lowest | median size | highest |\n" + "| --- " * 5 + "|")
    for (target, by), all_of in off.items():
        median = statistics.median(map(abs, all_of))
        ends = f"{min(all_of):+.1%} | {median:.1%} | {max(all_of):+.1%}"
        print(f"| {target}, {by} | {len(all_of)} | {ends} |")


if __name__ == "__main__":
    main()
