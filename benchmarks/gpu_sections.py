"""What `gpu.py` measures, section by section. A section yields rows; see `Bench.row`."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import divergence as losses
import jax
import jax.numpy as jnp
import numpy as np
from described import (
    MODELS,
    DescribedRun,
    Measured,
    Size,
    arguments,
    bytes_in_use,
    describe,
    filled,
    measure,
    peak_bytes,
    timed,
)

import jaxrl
from jaxrl.aot.suggest import launch_seconds, part_seconds, stage_costs
from jaxrl.formats.hf import write_folder
from jaxrl.formats.weights import tensor_shapes
from jaxrl.models import split_k
from jaxrl.models.config import DecoderConfig
from jaxrl.plan.peaks import pool_peaks
from jaxrl.profile.traces import PROFILE_DIR, STAGES_FILE
from jaxrl.profile.work import Work, decode_work, divergence_work, forward_work
from jaxrl.roles.declared import Program
from jaxrl.roles.run_shapes import RunArrays
from jaxrl.sampling.decode import GRAPHED, launch_with
from jaxrl.sharding.ledger import HOST
from jaxrl.sharding.reshard import checksums, reshard
from jaxrl.sharding.targets import (
    GPUS,
    PUBLISHED,
    Ceilings,
    TargetMachine,
    best_seconds,
    ceilings_of,
    product_flops,
    read_bandwidth,
)

GB, TERA = 1e9, 1e12
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""The variable by which a process takes no memory of a device before it needs it."""
Row = dict[str, Any]
Rows = Iterator[Row]


@dataclass
class Bench:
    """The devices that are measured and what they reach at best, once that is known."""

    size: Size
    devices: Sequence[jax.Device]
    limit: float = float("inf")
    """`time.time()` at which a section begins nothing more."""
    measured: Ceilings | None = None

    @property
    def published(self) -> Ceilings | None:
        device = self.devices[0]
        return ceilings_of(device, "bfloat16") if device.device_kind in PUBLISHED else None

    @property
    def best(self) -> Ceilings:
        """What shares are shares of: the ceilings measured in the same session."""
        assert self.measured is not None, "the section `ceilings` comes first"
        return self.measured

    @property
    def target(self) -> TargetMachine:
        """This machine, as the predictions see it."""
        n, kind = len(self.devices), self.devices[0].device_kind
        plain = replace(GPUS["t4"], kind=kind, link_gbs=25)
        chip = next((gpu for gpu in GPUS.values() if gpu.kind == kind), plain)
        return TargetMachine("here", chip, (n,), 1)

    def row(self, section: str, name: str, find: Callable[[], Row]) -> Row:
        """What `find` measures, or why it could not. All keys but the first two may be missing:

        value, unit: the result. seconds: of one call. floor_seconds: the least that the work takes
        at the measured ceilings. share: of the ceiling that `share_of` names. predicted: seconds by
        `jaxrl.aot.suggest`, from the `measured` and from the `published` ceilings. planned,
        compiled, device: bytes on a device by the plan, the compiled program and the device's
        statistics. attention, graphs, collectives: as the program's text says. error: why there is
        no result.
        """
        row: Row = {"section": section, "name": name}
        if time.time() > self.limit:
            return row | {"error": "left out: the time budget is spent"}
        try:
            return row | find()
        except Exception as error:  # whatever compiler and device refuse; the rest goes on
            lines = str(error).strip().splitlines()
            notes = [f"{note}; " for note in getattr(error, "__notes__", ())]
            first = f"{''.join(notes)}{type(error).__name__}: {lines[0] if lines else ''}"
            return row | {"error": first[:400]}

    def floor(self, parts: Sequence[Work], n: int) -> float:
        """Seconds that the parts take at least on n devices."""
        n = 1 if self.best.shared else n
        each = (max(p.flops / self.best.flops, p.bytes / self.best.bandwidth) for p in parts)
        return sum(each) / n

    def predicted(self, seconds: Callable[[Ceilings], float]) -> dict[str, float]:
        found = {"measured": self.measured, "published": self.published}
        return {name: seconds(each) for name, each in found.items() if each is not None}

    def of(self, run: DescribedRun, program: Program, parts: Sequence[Work]) -> Row:
        """What every program has."""
        found = measure(run, program, self.size.seconds)
        floor = self.floor(parts, run.setting.axes[program.role].size)
        return {
            "seconds": found.median,
            "best_seconds": min(found.seconds),
            "calls": len(found.seconds),
            "compile_seconds": found.compile_seconds,
            "floor_seconds": floor,
            **_as_text_says(found),
        }


def _as_text_says(found: Measured) -> Row:
    return {
        "planned": found.planned,
        "compiled": found.compiled,
        "device": found.device,
        "attention": found.attention,
        "graphs": found.graphs and asdict(found.graphs),
        "collectives": found.collectives,
    }


# Ceilings.


def ceilings(bench: Bench) -> Rows:
    """A big read, a big copy and a big product, on one device; beside what is published."""
    device, size = bench.devices[0], bench.size
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    speeds: dict[str, float] = {}

    def moved(name: str) -> Row:
        with jax.default_device(device):
            if name == "read":
                speeds[name] = read_bandwidth(size.moved)
            else:
                x = jnp.ones(size.moved // 4, jnp.float32)
                add = jax.jit(lambda x: x + 1)
                speeds[name] = 2 * size.moved / best_seconds(lambda: add(x))
        share = bench.published and speeds[name] / bench.published.bandwidth
        return {"value": speeds[name] / GB, "unit": "GB/s", "share": share}

    def product() -> Row:
        with jax.default_device(device):
            flops = speeds["product"] = product_flops(
                size.product, size.product, size.product, dtype
            )
        share = bench.published and flops / bench.published.flops
        return {"value": flops / TERA, "unit": "TFLOP/s", "share": share, "share_of": "published"}

    for name in ("read", "copy"):
        yield bench.row("ceilings", name, partial(moved, name)) | {"share_of": "published"}
    yield bench.row("ceilings", f"product of {size.product}, {dtype.__name__}", product)
    if len(speeds) < 3:  # the rows say why
        return
    bandwidth, shared = max(speeds["read"], speeds["copy"]), device.platform == "cpu"
    bench.measured = Ceilings(device.device_kind, speeds["product"], bandwidth, False, shared)


# Sampling.


def decode(bench: Bench) -> Rows:
    """Launches of decode steps over a full cache, and a prefill of each width."""
    size = bench.size
    cells = [(b, c) for b in size.batches for c in size.contexts]
    for batch, context in sorted(cells, key=lambda cell: cell[0] * cell[1]):
        name = f"{size.student} x {batch}, context {context}"
        yield bench.row("decode", name, partial(_decode, bench, batch, context))
    for context in size.contexts:
        name = f"prefill of {size.student}, width {context - size.launch}"
        yield bench.row("decode", name, partial(_prefill, bench, context))


def sampling_run(bench: Bench, batch: int, context: int, **more: Any) -> DescribedRun:
    """The run whose slots all attend to so many tokens."""
    new = bench.size.launch
    sections = {"max_prompt_tokens": context - new, "max_new_tokens": new, **more}
    slots = {"slots": batch}
    return describe(bench.size, bench.devices, batch_size=batch, rollout=slots, **sections)


def _reads(run: DescribedRun, role: str) -> tuple[int, int]:
    """Bytes of a weight, and how many groups of devices read all of them."""
    axes = run.setting.axes[role]
    return jnp.dtype(run.config.roles[role].dtype).itemsize, axes.data * axes.fsdp


def _decode(
    bench: Bench,
    batch: int,
    context: int,
    options: Mapping[str, str | int] | None = None,
    blocks: int = split_k.BLOCKS,
    **more: Any,
) -> Row:
    """Measures launches.

    Args:
        options: compiler options; None: those of a run.
        blocks: that share the keys of all slots in the split-K kernel.
        more: keys of the config.
    """
    run = sampling_run(bench, batch, context, **more)
    program = run.program("rollout", "decode")
    if options is not None:
        program = replace(program, jitted=launch_with(tuple(options.items())))
    if blocks != split_k.BLOCKS:
        before, split_k.BLOCKS = split_k.BLOCKS, blocks
        jax.clear_caches()  # which know nothing of it
        try:
            return _decode(bench, batch, context, options, blocks, **more)
        finally:
            split_k.BLOCKS = before
            jax.clear_caches()
    steps = program.kwargs["n_tokens"]
    model, axes = run.inputs.student, run.setting.axes["rollout"]
    work = decode_work(model, context, batch * steps, steps, *_reads(run, "rollout"))
    found = bench.of(run, program, [work])

    def seconds(ceilings: Ceilings) -> float:
        return part_seconds(work, axes.size, ceilings) + launch_seconds(model, axes, steps)

    return found | {
        "value": batch * steps / found["seconds"],
        "unit": "tokens/s",
        "share": found["floor_seconds"] / found["seconds"],
        "share_of": "floor",
        "predicted": bench.predicted(seconds),
    }


def _prefill(bench: Bench, context: int) -> Row:
    run = sampling_run(bench, max(bench.size.batches), context)
    program = run.program("rollout", "prefill")
    rows, width = program.args[3].shape
    work = forward_work(run.inputs.student, [width] * rows, *_reads(run, "rollout"))
    found = _products(bench, run, program, [work], rows * width)
    return found | {"value": found["tflops"], "unit": "TFLOP/s"}


def _products(
    bench: Bench,
    run: DescribedRun,
    program: Program,
    parts: Sequence[Work],
    tokens: int,
    predicted: Callable[[Ceilings], float] | None = None,
) -> Row:
    """A program that is products for the most part; its share is the MFU."""
    n = run.setting.axes[program.role].size
    found = bench.of(run, program, parts)
    ceiling = bench.published or bench.best
    speed = sum(part.flops for part in parts) / found["seconds"]

    def counted(ceilings: Ceilings) -> float:
        return sum(part_seconds(part, n, ceilings) for part in parts)

    return found | {
        "value": tokens / found["seconds"],
        "unit": "tokens/s",
        "tflops": speed / TERA,
        "share": speed / (ceiling.flops * (1 if ceiling.shared else n)),
        "share_of": "MFU",
        "predicted": bench.predicted(predicted or counted),
    }


# Training.

REMATS = ("full", "dots", "none")


def update(bench: Bench) -> Rows:
    """The teacher's score, and an update with less and less of the forward pass recomputed."""
    name = f"score by {bench.size.teacher}"
    yield bench.row("update", name, partial(_trained, bench, "teacher", "score", {}))
    for remat in REMATS:
        find = partial(_trained, bench, "actor", "update", {"actor": {"remat": remat}})
        yield bench.row("update", f"update of {bench.size.student}, remat {remat}", find)


def _trained(bench: Bench, role: str, name: str, sections: dict[str, Any]) -> Row:
    run = describe(bench.size, bench.devices, **sections)
    program, m = run.program(role, name), run.programs.setting
    lengths = [m.width] * m.sequences
    student, teacher = run.inputs.student, run.inputs.teacher
    itemsize, copies = _reads(run, role)
    assert teacher is not None
    if name == "score":
        parts = [forward_work(teacher, lengths, itemsize, copies) * (1 / program.calls)]
    else:
        tokens = m.sequences * m.new_tokens
        width = teacher.d_model
        parts = common.train_work(student, width, m.vocab, lengths, tokens, itemsize)

    def seconds(ceilings: Ceilings) -> float:
        return stage_costs(run.setting, ceilings, bench.target)[role, name] / program.calls

    tokens = round(m.sequences * m.width / program.calls)
    return _products(bench, run, program, parts, tokens, seconds)


def divergence(bench: Bench) -> Rows:
    """The divergence and its gradients from hidden states, in three ways, on one device."""
    for name in ("lean", "fused", "naive"):
        tokens, vocab = bench.size.divergence
        yield bench.row("divergence", f"{name}, {tokens} x {vocab}", partial(_loss, bench, name))


def _loss(bench: Bench, name: str) -> Row:
    tokens, vocab = bench.size.divergence
    widths = MODELS[bench.size.student].d_model, MODELS[bench.size.teacher].d_model
    device = bench.devices[:1]
    dtype = "float32" if device[0].platform == "cpu" else "bfloat16"
    held = bytes_in_use(device)
    with jax.default_device(device[0]):
        args = losses.arrays(tokens, widths, vocab, dtype)
        compiled = losses.losses(min(512, tokens // 4))[name].lower(*args).compile()
        before = peak_bytes(device)
        took = statistics.median(timed(lambda: compiled(*args), bench.size.seconds))
    sizes, after = compiled.memory_analysis(), peak_bytes(device)
    work = divergence_work(vocab, *widths, tokens, jnp.dtype(dtype).itemsize)
    grown = before is not None and after is not None and after > before
    return {
        "value": work.flops / took / TERA,
        "unit": "TFLOP/s",
        "seconds": took,
        "floor_seconds": bench.floor([work], 1),
        "share": bench.floor([work], 1) / took,
        "share_of": "floor",
        "predicted": bench.predicted(partial(part_seconds, work, 1)),
        "compiled": sizes.argument_size_in_bytes
        + sizes.temp_size_in_bytes
        + sizes.output_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "device": after - (held or 0) if grown and after is not None else None,
    }


def variants(bench: Bench) -> Rows:
    """Decode steps and an update with one choice changed that only a device can judge; on a CPU,
    where some change nothing, the first of each kind."""
    size, first = bench.size, bench.devices[0].platform == "cpu" or None
    batch, context = max(size.batches), max(size.contexts)
    step = partial(_decode, bench, batch, context)
    for blocks in (split_k.BLOCKS, split_k.BLOCKS // 2, 2 * split_k.BLOCKS)[:first]:
        name = f"decode, {blocks} blocks of split-K"
        yield bench.row("variants", name, partial(step, blocks=blocks))
    sampling = {"top_p": 0.95}
    yield bench.row("variants", "decode, top_p=0.95", partial(step, sampling=sampling))
    for more in ("", ",WHILE,CONDITIONAL")[: first and 0]:
        options = {"xla_gpu_enable_command_buffer": GRAPHED + more}
        find = partial(step, options=options, sampling=sampling)
        name = f"decode, top_p=0.95, graphs {'with' if more else 'without'} loops"
        yield bench.row("variants", name, find)
    for tokens in (512, 2048)[:first]:
        sections = {"distill": {"chunk_tokens": tokens}}
        find = partial(_trained, bench, "actor", "update", sections)
        yield bench.row("variants", f"update, chunk_tokens={tokens}", find)


# Moves.


def moves(bench: Bench) -> Rows:
    """To pinned host memory and back, beside a product; new weights for the rollout."""
    size, device = bench.size.moved, bench.devices[0]
    x = jax.device_put(jnp.ones(size // 4, jnp.float32), device)
    away = x.sharding.with_memory_kind(HOST)
    took: dict[str, float] = {}

    def copied(way: str) -> Row:
        source, target = (x, away) if way == "to host" else (jax.device_put(x, away), x.sharding)
        jax.block_until_ready(source)
        took[way] = min(timed(lambda: jax.device_put(source, target), bench.size.seconds))
        return {"value": size / took[way] / GB, "unit": "GB/s", "seconds": took[way]}

    for way in ("to host", "from host"):
        yield bench.row("moves", f"offload, {way}", partial(copied, way))
    for way in ("to host", "from host"):
        find = partial(_overlap, bench, x, away, way)
        yield bench.row("moves", f"offload, {way}, beside products", find)
    yield bench.row("moves", f"weights of {bench.size.student}, converted", partial(_sync, bench))
    yield bench.row("moves", f"weights of {bench.size.student}, checked", partial(_checked, bench))
    if len(bench.devices) > 1:
        name = f"weights of {bench.size.student}, converted and sent"
        yield bench.row("moves", name, partial(_sync, bench, sent=True))


def _overlap(bench: Bench, x: jax.Array, away: Any, way: str) -> Row:
    """How much of the shorter of a copy and products of about its length the other one hides."""
    n = bench.size.product
    dtype = jnp.float32 if bench.devices[0].platform == "cpu" else jnp.bfloat16
    source, target = (x, away) if way == "to host" else (jax.device_put(x, away), x.sharding)
    a = jax.device_put(jnp.ones((n, n), dtype), bench.devices[0])

    @partial(jax.jit, static_argnums=1)
    def products(a: jax.Array, times: int) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda i, b: (a @ b) * (1 / n), a)

    def seconds(call: Callable[[], Any]) -> float:
        return min(timed(call, bench.size.seconds))

    copy = seconds(lambda: jax.device_put(source, target))
    times = max(1, round(copy / seconds(lambda: products(a, 1))))
    work = seconds(lambda: products(a, times))
    both = seconds(lambda: (jax.device_put(source, target), products(a, times)))
    hidden = (copy + work - both) / min(copy, work)
    return {
        "value": x.nbytes / both / GB,
        "unit": "GB/s",
        "seconds": both,
        "share": hidden,
        "share_of": "overlap",
        "alone": {"copy": copy, "products": work},
    }


def _sync(bench: Bench, sent: bool = False) -> Row:
    """The weights as the rollout wants them, and where it has devices of its own, on those."""
    half = len(bench.devices) // 2
    mesh = f"actor+teacher={half},rollout={half}" if sent else None
    run = describe(bench.size, bench.devices, mesh)
    program = run.program("actor", "convert")
    if not sent:
        found = bench.of(run, program, [])
        size = common.tree_bytes(jax.eval_shape(program.jitted, *program.args))
        return found | {"value": size / found["seconds"] / GB, "unit": "GB/s"}
    compiled = program.compile()
    given = arguments(run, program)
    c = run.config.rollout
    arrays = RunArrays(run.programs.setting, run.programs.meshes)
    there = arrays.params("rollout", run.inputs.student, c.compute_dtype)
    shardings = jax.tree.map(lambda x: x.sharding, there)
    names = compiled(*given).keys()
    shardings = {name: shardings[name] for name in names}

    def send() -> Any:
        return reshard(compiled(*given), shardings)

    size, took = common.tree_bytes(send()), statistics.median(timed(send, bench.size.seconds))
    return {"value": size / took / GB, "unit": "GB/s", "seconds": took}


def _checked(bench: Bench) -> Row:
    """The checksums of the rollout's weights, which each weight sync between processes takes."""
    run = describe(bench.size, bench.devices)
    dtype = run.config.rollout.compute_dtype
    shapes = RunArrays(run.programs.setting, run.programs.meshes)
    params = shapes.params("rollout", run.inputs.student, dtype)
    arrays = jax.tree.leaves(filled(params, below=2))
    size, took = common.tree_bytes(arrays), statistics.median(timed(lambda: checksums(arrays), 0.0))
    return {"value": size / took / GB, "unit": "GB/s", "seconds": took}


# A whole step.

SCHEDULES = ("serial", "one_step_off")
WARM, TIMED, PROFILED = 2, 3, 2
"""Steps that are left out, because they compile; those that count; those after them that are
traced for the table of stages."""


def step(bench: Bench) -> Rows:
    """`jaxrl.train` on models of random weights, every role on the same devices.

    It runs as a process of its own, which is ended once the table of its stages is there: the
    trained model would be saved for nothing.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for role in ("student", "teacher"):
            config = MODELS[getattr(bench.size, role)]
            made = bench.row("step", role, partial(_write_model, folder / role, config))
            if "error" in made:
                yield made
                return
        _write_prompts(folder / "prompts.jsonl", bench.size)
        for schedule in SCHEDULES:
            find = partial(_step, bench, folder, schedule)
            yield bench.row("step", f"GKD, {schedule}", find)


def _write_model(folder: Path, config: DecoderConfig) -> Row:
    """A Hugging Face folder with the built-in tokenizer; one block of random numbers over and
    over, since a random number takes longer than its place on the disk."""
    block = np.random.default_rng(0).standard_normal(2**22, np.float32) * 0.02
    block = block.astype(jnp.bfloat16)

    shapes = tensor_shapes(config)

    def read(name: str) -> np.ndarray:
        return np.resize(block, shapes[name])

    tokenizer = Path(jaxrl.__file__).parent / "assets" / "student"
    write_folder(folder, config, read, dtype="bfloat16", tokenizer_from=tokenizer)
    return {}


def _write_prompts(path: Path, size: Size) -> None:
    """Sums: a token for each character, and one before all."""
    rng = np.random.default_rng(0)
    batch, width, _ = size.step
    rows = []
    for _ in range(batch * (WARM + TIMED + PROFILED + 3)):
        digits = "".join(map(str, rng.integers(0, 10, width - 2)))
        rows.append(json.dumps({"prompt": digits + "="}))
    path.write_text("\n".join(rows) + "\n")


def _step(bench: Bench, folder: Path, schedule: str) -> Row:
    size = bench.size
    batch, prompt, new = size.step
    sections: dict[str, Any] = {
        "schedule": schedule,
        "batch_size": batch,
        "max_prompt_tokens": prompt,
        "max_new_tokens": new,
        "student": {"model": str(folder / "student")},
        "teacher": {"model": str(folder / "teacher")},
        "data": {"train": str(folder / "prompts.jsonl"), "eval": None, "chat": "raw"},
    }
    run = describe(size, bench.devices, **sections)
    place = folder / schedule
    first = WARM + TIMED + 1
    raw = run.config.model_dump(mode="json", exclude_unset=True) | {
        "run_dir": str(place),
        "launcher": "local",
        "steps": first + PROFILED + 2,
        "checkpoint": {"every": 0},
        "logging": {"console": "quiet", "samples": 0, "tensorboard": False},
        "profile": {"steps": f"{first}:{first + PROFILED}"},
        "compile_cache": str(folder / "cache"),  # the second schedule has the same programs
    }
    file = folder / f"{schedule}.yaml"
    file.write_text(json.dumps(raw))
    table = place / PROFILE_DIR / STAGES_FILE
    command = [sys.executable, "-m", "jaxrl.train", "--config", str(file)]
    rows, profile = _until(command, table, bench.limit)
    rows, stages = rows[WARM : WARM + TIMED], profile["stages"]
    took = statistics.median(row["time/step_s"] for row in rows)
    tokens = statistics.median(row["tokens/generated"] for row in rows)
    peak = max(pool.bytes for pool in pool_peaks(run.setting))

    def seconds(ceilings: Ceilings) -> float:  # one pool does one thing at a time
        return sum(stage_costs(run.setting, ceilings, bench.target).values())

    reported = [row for row in rows if not row.get("memory/actor/planned", 1)]
    shutil.rmtree(place)
    return {
        "value": tokens / took,
        "unit": "tokens/s",
        "seconds": took,
        "predicted": bench.predicted(seconds),
        "planned": peak,
        "device": max((row["memory/actor/peak_bytes"] for row in reported), default=None),
        "stages": stages,
        "note": ", ".join(f"{s['stage'].split('.')[1]} {s['seconds']:.3g} s" for s in stages[:4]),
    }


def _until(command: list[str], file: Path, limit: float) -> tuple[list[Row], Row]:
    """The rows of a run up to the moment when `file` is there, and what that holds.

    Raises:
        RuntimeError: the run ended before, with its last words.
        TimeoutError: `limit` came before.
    """
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(command, stdout=words, stderr=words, env=_environment())
        try:
            while (table := _whole(file)) is None:
                if time.time() > limit:
                    raise TimeoutError("the time budget is spent")
                if process.poll() is not None:
                    words.seek(0)
                    lines = words.read().strip().splitlines() or [f"exit {process.returncode}"]
                    raise RuntimeError(next((x for x in lines if "error" in x.lower()), lines[-1]))
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    text = (file.parent.parent / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if "time/step_s" in row], table


def _whole(file: Path) -> Row | None:
    """The JSON object in a file; None where it is not there, or not yet written to its end."""
    try:
        found: Row = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found


def _environment() -> dict[str, str]:
    """Of a process that has the devices' memory to itself, which this one has left to it."""
    return {key: value for key, value in os.environ.items() if key != PREALLOCATE}


def torch(bench: Bench) -> Rows:
    """The same work in torch, in a process of its own: see `gpu_torch.py`."""
    size = bench.size
    on = "cpu" if bench.devices[0].platform == "cpu" else "cuda"
    work = {
        "config": MODELS[size.student].to_hf("bfloat16"),
        "device": on,
        "batches": size.batches,
        "contexts": size.contexts,
        "new": size.launch,
        "update": [size.rows, size.prompt + size.new, size.micro_batch],
        "seconds": size.seconds,
    }
    script = str(Path(__file__).with_name("gpu_torch.py"))
    done = subprocess.run(  # its rows come together: those before a timeout are lost
        [sys.executable, script, json.dumps(work)],
        capture_output=True,
        text=True,
        env=_environment(),
        timeout=None if math.isinf(bench.limit) else max(1.0, bench.limit - time.time()),
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    yield from ({"section": "torch", **json.loads(line)} for line in lines)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        yield {"section": "torch", "name": "torch", "error": last[:400]}


SECTIONS: dict[str, Callable[[Bench], Rows]] = {
    "ceilings": ceilings,
    "decode": decode,
    "update": update,
    "divergence": divergence,
    "moves": moves,
    "variants": variants,
    "step": step,
    "torch": torch,
}
"""In order of importance."""
