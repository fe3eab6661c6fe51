"""What the plan says of programs, against the compilers of GPUs and TPUs; prints a table.

    python benchmarks/plan_compared.py [REGEX] [--compiled FILE] [--walk]

No accelerator is needed, but the extra `aot`. Each program of `CASES` whose name has the pattern is
traced from `config.json` alone and compiled up to the assignment of its memory, in about 10 s each.
With `--compiled` the compilers' figures are read from that file where it has them, and added to
it where not: a change of the plan is then compared in seconds. With `--walk` the first figure is
that of the walk over the program's equations (`plan.live_arrays`) in place of the plan's.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from compiled_runs import GROUP, NEW, PROMPT, config, planned_and_reported, programs
from large_models import NAMED

from jaxrl.config.schema import Config
from jaxrl.plan.live_arrays import live_arrays
from jaxrl.roles.declared import local_bytes

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

    def planned(self, tmp: Path) -> int:
        """Bytes that the role holds on a device while the program runs, by the plan alone."""
        for plan, program in programs(self.run(tmp), self.target, self.program):
            if program.role == self.role:
                return plan.accounts[self.role].planned(program)
        raise KeyError(f"no run of {self.keys} has a program {self.role} {self.program}")

    def walked(self, tmp: Path) -> int:
        """The same by the walk over the program's equations."""
        for _, program in programs(self.run(tmp), self.target, self.program):
            if program.role == self.role:
                arguments = local_bytes((program.args, program.kwargs))
                return arguments + program.beside + live_arrays(program).bytes
        raise KeyError(f"no run of {self.keys} has a program {self.role} {self.program}")

    def compared(self, tmp: Path) -> tuple[int, int]:
        """The same by the plan and by the compiler."""
        return planned_and_reported(self.run(tmp), self.target, self.role, self.program)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="of the names; default: all")
    parser.add_argument("--compiled", type=Path, help="file of the compilers' figures")
    parser.add_argument("--walk", action="store_true", help="the walk in place of the plan")
    args = parser.parse_args()
    file = args.compiled
    known = json.loads(file.read_text()) if file is not None and file.exists() else {}

    def row(name: str) -> tuple[int, int]:
        with tempfile.TemporaryDirectory() as tmp:
            if name in known:
                return CASES[name].planned(Path(tmp)), known[name]
            planned, compiled = CASES[name].compared(Path(tmp))
        known[name] = compiled
        if file is not None:
            file.write_text(json.dumps(known, indent=1) + "\n")
        return planned, compiled

    names = [name for name in CASES if re.search(args.pattern, name)]
    print("| program | planned, GB | compiled, GB | off by |\n| --- | --- | --- | --- |")
    for name in names:
        planned, compiled = row(name)
        if args.walk:
            with tempfile.TemporaryDirectory() as tmp:
                planned = CASES[name].walked(Path(tmp))
        off = planned / compiled - 1
        print(f"| {name} | {planned / GB:.2f} | {compiled / GB:.2f} | {off:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
