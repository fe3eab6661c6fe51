"""Runs of Qwen2.5's widths for machines that are not here, described by `config.json` alone."""

from __future__ import annotations

import json
import operator
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from jaxrl.algorithms.methods import needed_roles
from jaxrl.aot.compile_report import MEMORY, THUNKS
from jaxrl.aot.hlo import Graphs, read_thunks, read_total
from jaxrl.aot.machine import compilers, machine, prepare
from jaxrl.aot.subprocess_compile import apart
from jaxrl.config.schema import Config
from jaxrl.models.kernels import compiling_for
from jaxrl.plan import target_plan
from jaxrl.plan.declarations import RunPrograms
from jaxrl.plan.peaks import planned_bytes
from jaxrl.plan.table import Plan
from jaxrl.roles.declared import Program, local_bytes

MISSING = {"cuda", "tpu"} - compilers()
NEEDS_COMPILERS = [
    pytest.mark.aot,
    pytest.mark.skipif(bool(MISSING), reason=f"no compiler for {sorted(MISSING)} (extra aot)"),
]
STUDENT = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TEACHER = STUDENT | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
PROMPT, NEW, BATCH, GROUP = 448, 832, 8, 4


def config(tmp: Path, model: Mapping[str, Any] | None = None, **keys: Any) -> Config:
    """A run of 1.5B and 7B parameters, of two layers unless `model` changes that of both."""
    for name, whole in (("student", STUDENT), ("teacher", TEACHER)):
        (tmp / name).mkdir(exist_ok=True)
        described = {} if "text_config" in (model or {}) else whole  # a nested config is whole
        (tmp / name / "config.json").write_text(json.dumps(described | dict(model or {})))
    raw: dict[str, Any] = {
        "mesh": "actor=4,rollout=2,teacher=2",
        "batch_size": BATCH,
        "group_size": GROUP,
        "max_prompt_tokens": PROMPT,
        "max_new_tokens": NEW,
        "student": {"model": str(tmp / "student")},
        "teacher": {"model": str(tmp / "teacher")},
        "data": {"train": "arithmetic"},
        "run_dir": str(tmp / "run"),
        "actor": {"micro_batch_tokens": PROMPT + GROUP * NEW},
    }
    return Config.parse(raw | keys)


NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"
SETTINGS = re.compile(r"^(?:(?:steps|settings) [^\n]*|run = \{$.*?^\})", re.M | re.S)
ASSIGNMENT = operator.methodcaller("partition", "=")
LEAST, MOST = 0.97, 1.25
"""Of what an estimate without a compiler says, in parts of the compiler's bytes."""
UPDATES = [(n, remat) for n in (1, 2, 4, 8) for remat in ("full", "dots", "none")]


def notebook_run(name: str, *overrides: str) -> Config:
    """The run of a notebook on one accelerator: its lines that say `steps` and `settings`, or its
    mapping `run`; then the overrides."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"mesh": "actor+rollout+teacher=1"}
    for code in codes:
        exec("\n".join(SETTINGS.findall(code)), names)
    if "run" not in names:
        return Config.load(None, [*names["settings"], *overrides])
    further = {key: yaml.safe_load(value) for key, _, value in map(ASSIGNMENT, overrides)}
    return Config.of(names["run"] | {"reward.functions": ["exact"]} | further)


def distilled(
    tmp: Path, devices: int, remat: str, model: Mapping[str, Any] | None = None
) -> Config:
    """Qwen2.5-7B teaches Qwen2.5-1.5B at full depth, on devices that all roles share."""
    return config(
        tmp,
        {"num_hidden_layers": 28} | (model or {}),
        mesh=f"actor+rollout+teacher={devices}",
        batch_size=48,
        max_prompt_tokens=1024,
        max_new_tokens=2048,
        actor={"micro_batch_tokens": 12288, "remat": remat},
    )


def programs(run: Config, target: str, *names: str) -> Iterator[tuple[Plan, Program]]:
    """The plan of a run for a machine, and each of its programs: with names, those. A program for
    GPUs must be lowered before the next is asked for (`compiling_for`)."""
    prepare()
    there = machine(target)
    plan = target_plan(run, needed_roles(run), there)
    with compiling_for(plan.inputs.target):
        for program in RunPrograms(plan.setting, there.compiled):
            if not names or program.name in names:
                yield plan, program


@dataclass(frozen=True)
class Compiling:
    """A program that another thread compiles: it holds no lock of Python's meanwhile."""

    plan: Plan
    program: Program
    job: Future[tuple[Any, Graphs | None]]

    @property
    def compiled(self) -> Any:
        """What the compiler made of it, once it is done."""
        return self.job.result()[0]

    @cached_property
    def planned(self) -> int:
        """Bytes that the plan counts of the role while the program runs."""
        return planned_bytes(self.program, self.plan.inputs.target)

    @property
    def graphs(self) -> Graphs | None:
        """CUDA graphs, of a launch of decode steps."""
        return self.job.result()[1]

    @cached_property
    def text(self) -> str:
        return str(self.compiled.as_text())


def compiling(
    pool: ThreadPoolExecutor, run: Config, target: str, *names: str
) -> Iterator[Compiling]:
    """Traces programs of a run for a machine, and has the pool compile them."""
    for plan, program in programs(run, target, *names):
        job = pool.submit(_made, program.lower(), program.name == "decode")
        yield Compiling(plan, program, job)


def _made(lowered: Any, looks: bool) -> tuple[Any, Graphs | None]:
    """The compiled program and, with `looks`, its CUDA graphs."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(dump if looks else None)
        thunks = [path.read_text() for path in Path(folder).glob(THUNKS)]
    return compiled, read_thunks(thunks[0]) if thunks else None


def planned_and_reported(run: Config, target: str, role: str, name: str) -> tuple[int, int]:
    """Bytes that a role holds while a program runs, by the plan and by the compiler of a TPU.

    The compiler reports them seconds after it has started. It would generate code for minutes:
    its process is ended.
    """
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        rows = apart(ended, _compile, run, target, role, name, folder)
        try:
            planned, beside = next(rows)
            compiling = thread.submit(list, rows)
            while not (found := [*Path(folder).glob(MEMORY)]) or not found[0].read_text():
                if compiling.done():
                    compiling.result()
                time.sleep(0.1)
            time.sleep(0.1)  # for the rest of the file
            return planned, read_total(found[0].read_text()) + beside
        finally:
            ended.set()


def _compile(
    run: Config, target: str, role: str, name: str, folder: str
) -> Iterator[tuple[int, int]]:
    """Yields planned bytes, and those that the role holds beside what the program reads; then
    compiles."""
    for plan, program in programs(run, target, name):
        if program.role == role:
            planned = planned_bytes(program, plan.inputs.target)
            lowered = program.lower()
            yield planned, program.beside + _unread(program, lowered)
            lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})


def _unread(program: Program, lowered: Any) -> int:
    """Bytes on one device of the arguments that jax drops, as the program never reads them: the LM
    head of a teacher that sends hidden states."""
    arrays = [x for x in jax.tree.leaves((program.args, program.kwargs)) if hasattr(x, "sharding")]
    kept = lowered._lowering.compile_args["kept_var_idx"]
    return local_bytes([x for number, x in enumerate(arrays) if number not in kept])


def state_bytes(program: Program) -> int:
    """Bytes on one device of parameters and optimizer state, an update's first argument."""
    return local_bytes(program.args[0])
