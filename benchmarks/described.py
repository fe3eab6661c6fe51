"""Runs of models that are given by their numbers alone, and their programs on the devices here.

A program is one that a role declares (`jaxrl.roles.declared`): compiled from abstract arguments, as
for a machine that is not here, and then called with arrays in their place.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.aot.compile_report import compile_program
from jaxrl.aot.hlo import Graphs, read_program
from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import default_dtype, target_of
from jaxrl.models.shared_prompts import Seats
from jaxrl.plan.advice import with_choices, with_loss_chunk
from jaxrl.plan.declarations import RunPrograms
from jaxrl.plan.peaks import planned_bytes
from jaxrl.plan.plan_inputs import PlanInputs, Setting
from jaxrl.roles.declared import Program
from jaxrl.roles.sampling_programs import sampling_params
from jaxrl.sampling import decode
from jaxrl.sampling.sampler import sampling_arrays
from jaxrl.sharding.axes import row_shards
from jaxrl.sharding.mesh import bytes_limit
from jaxrl.sharding.placement import place
from jaxrl.sharding.reshard import put

ROLES = ("actor", "rollout", "teacher")
QWEN = {
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "eos_token_id": 151645,
}


def _qwen(width: int, layers: int, heads: int, kv: int, ff: int, **more: Any) -> DecoderConfig:
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ff,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    return DecoderConfig.from_hf(QWEN | sizes | more)


MODELS = {
    "tiny": _qwen(64, 2, 4, 2, 160, vocab_size=512, eos_token_id=2),
    "tiny teacher": _qwen(96, 2, 4, 4, 256, vocab_size=512, eos_token_id=2),
    "Qwen2.5-0.5B": _qwen(896, 24, 14, 2, 4864),
    "Qwen2.5-1.5B": _qwen(1536, 28, 12, 2, 8960),
    "Qwen2.5-7B": _qwen(3584, 28, 28, 4, 18944, vocab_size=152064, tie_word_embeddings=False),
    "Qwen3-8B": _qwen(
        4096, 36, 32, 8, 12288, model_type="qwen3", head_dim=128, tie_word_embeddings=False
    ),
}
"""The numbers of each model's `config.json`."""


@dataclass(frozen=True)
class Size:
    """Which models are measured, and with how much work."""

    student: str
    teacher: str
    batches: tuple[int, ...] = (8, 64, 256)
    """Sequences that decode side by side."""
    contexts: tuple[int, ...] = (512, 4096)
    """Tokens that each of them attends to."""
    launch: int = 32
    """Decode steps of a launch."""
    rows: int = 64
    """Sequences of an update."""
    prompt: int = 512
    new: int = 512
    micro_batch: int = 16384
    """Tokens, of one device."""
    divergence: tuple[int, int] = (4096, 151936)
    """Tokens and vocabulary of the divergence alone; its widths are those of the models."""
    moved: int = 2**30
    """Bytes that are copied and offloaded."""
    product: int = 8192
    """Rows, inner width and columns of the largest product."""
    step: tuple[int, int, int] = (64, 256, 512)
    """Prompts of a whole step, their tokens and those of their completions."""
    seconds: float = 2.0
    """That each program is called for, three times at least."""


SIZES = {
    "tiny": Size(
        *("tiny", "tiny teacher", (2, 4), (32,), 8, 4, 16, 16, 64, (64, 1024), 2**20, 256),
        step=(4, 16, 16),
        seconds=0.05,
    ),
    "0.5b": Size("Qwen2.5-0.5B", "Qwen2.5-1.5B"),
    "1.5b": Size("Qwen2.5-1.5B", "Qwen2.5-7B"),
    "7b": Size("Qwen2.5-7B", "Qwen2.5-7B", rows=16, step=(16, 256, 512)),
    "8b": Size("Qwen3-8B", "Qwen3-8B", rows=16, step=(16, 256, 512)),
}


@dataclass(frozen=True)
class DescribedRun:
    """A run of a size on some devices: its config, its plan and its programs."""

    config: Config
    inputs: PlanInputs
    setting: Setting
    programs: RunPrograms

    def program(self, role: str, name: str) -> Program:
        return next(p for p in self.programs if (p.role, p.name) == (role, name))


def describe(
    size: Size, devices: Sequence[jax.Device], mesh: str | None = None, **sections: Any
) -> DescribedRun:
    """The run that a config with these sections would be.

    Args:
        mesh: all roles on all devices where None.
        sections: keys of the config, or of a section, as in `actor={"remat": "full"}`.
    """
    raw: dict[str, Any] = {
        "mesh": mesh or f"{'+'.join(ROLES)}={len(devices)}",
        "batch_size": size.rows,
        "group_size": 1,
        "max_prompt_tokens": size.prompt,
        "max_new_tokens": size.new,
        "student": {"model": size.student},
        "teacher": {"model": size.teacher},
        "data": {"train": "arithmetic"},
        "actor": {"micro_batch_tokens": size.micro_batch},
        "rollout": {"launch_tokens": size.launch},
    }
    for key, value in sections.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    target = target_of(devices)
    config = Config.parse(raw).with_dtypes(default_dtype(target))
    placement = place(config.mesh, ROLES)
    limits = None if target.platform == "cpu" else bytes_limit(devices[0])
    inputs = PlanInputs(
        placement,
        ROLES,
        MODELS[size.student],
        MODELS[size.teacher],
        target,
        limits=(limits,) * len(placement.pools),
    )
    config, _ = with_loss_chunk(with_choices(config, inputs)[0], inputs)
    setting = Setting(config, inputs)
    return DescribedRun(config, inputs, setting, RunPrograms(setting, devices))


# Arrays in place of abstract ones.


@lru_cache
def _maker(shape: tuple[int, ...], dtype: Any, sharding: Any, below: int) -> Any:
    def make(seed: jax.Array) -> jax.Array:
        index = jnp.full(shape, seed, jnp.uint32)
        for dim, n in enumerate(shape):
            index = index * np.uint32(n) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        for multiplier, shift in ((2654435761, 15), (2246822519, 13)):
            index = index * np.uint32(multiplier)
            index = index ^ (index >> shift)
        if jnp.issubdtype(dtype, jnp.floating):
            uniform = (index >> 8).astype(jnp.float32) * 2.0**-24
            return ((uniform - 0.5) * 0.07).astype(dtype)  # as spread as a normal of 0.02
        return (index % np.uint32(below)).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def filled(tree: Any, below: int) -> Any:
    """Arrays for the `jax.ShapeDtypeStruct`s of a tree, on their shardings, that a hash of the
    position fills: floats around zero, integers from 0 up to `below`, booleans True.

    Each is one kernel that needs no memory beside its result.
    """
    leaves, form = jax.tree.flatten(tree)

    def one(seed: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype == bool:
            return jnp.ones(leaf.shape, bool, device=leaf.sharding)
        make = _maker(leaf.shape, leaf.dtype, leaf.sharding, below)
        found: jax.Array = make(np.uint32(seed * 7919))
        return found

    return jax.tree.unflatten(form, [one(i, leaf) for i, leaf in enumerate(leaves)])


def zeros(tree: Any) -> Any:
    """The same with zeros."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), tree)


def is_static(argument: Any) -> bool:
    """Whether an argument of a `Program` is part of the compiled program, and not passed to it."""
    return any(not isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(argument))


def arguments(run: DescribedRun, program: Program) -> list[Any]:
    """What the compiled program is called with: its largest call, every row and slot in use."""
    below = min(run.inputs.student.vocab_size, run.programs.setting.vocab)
    given = [a for a in program.args if not is_static(a)]
    if program.name == "update":
        state, frozen, batch, place = given
        # Moments of zero, as before the first update: random ones might be negative.
        params, moments = filled(state.params, below), zeros(state.opt_state)
        state = replace(state, params=params, opt_state=moments, updates=zeros(state.updates))
        rows, n = np.arange(math.prod(place.shape)), run.programs.setting.padded_rows
        index = np.where(rows < n, rows, -1).astype(np.int32).reshape(place.shape)
        return [state, filled(frozen, below), filled(batch, below), put(index, place.sharding)]
    if program.name == "decode":
        params, cache, table, number, knobs, prompts, pages = given
        assert pages is None, "rollout.cache_tokens is not measured"
        slots, longest = table.shape[0], cache[0][0].shape[decode.POSITIONS]
        longest_prompt = prompts[0][0][0].shape[decode.POSITIONS]
        steps = program.kwargs["n_tokens"]
        columns = np.zeros((slots, decode.COLUMNS), np.int32)
        columns[:, decode.TOKEN] = np.arange(slots) % below
        columns[:, decode.COUNT] = longest - steps
        columns[:, decode.POSITION] = longest_prompt + longest - steps
        prompts = shared_by_all(
            *prompts, shards=row_shards(run.programs.meshes[program.role].shape)
        )
        columns[:, decode.LIMIT] = columns[:, decode.COUNT] + steps + 1  # so that all steps run
        columns[:, decode.PROMPT] = np.arange(slots)
        sampling = sampling_arrays(sampling_params(run.config, "train", steps))
        return [
            *(filled(params, below), zeros(cache), put(columns, table.sharding)),
            put(np.int32(slots + 1), number.sharding),
            jax.tree.map(lambda x, s: put(np.asarray(x), s.sharding), sampling, knobs),
            prompts,
            pages,
        ]
    found = [filled(a, below) for a in given]
    if program.name == "prefill":
        tokens, lengths = given[1:]
        full = np.full(lengths.shape, tokens.shape[1], np.int32)
        found[2] = put(full, lengths.sharding)
    return found


def shared_by_all(cache: Any, seats: Seats, shards: int) -> tuple[Any, Seats]:
    """Prompts of which each has as many slots as seats, one after the other."""
    (rows, n), (slots,) = seats.slots.shape, seats.places.shape
    places = np.tile(np.arange(slots // shards, dtype=np.int32), shards)
    at = np.arange(rows * n, dtype=np.int32).reshape(shards, -1)
    at = np.where(at % at.shape[1] < slots // shards, at % at.shape[1], -1)
    lengths = np.full(rows, cache[0][0].shape[decode.POSITIONS], np.int32)
    lengths = np.where((at.reshape(rows, n) >= 0).any(1), lengths, 0)
    filled = Seats(at.reshape(rows, n).astype(np.int32), lengths.astype(np.int32), places)
    return zeros(cache), jax.tree.map(lambda x, like: put(x, like.sharding), filled, seats)


# Measuring.

DONATED = {"update": 0, "decode": 1}
"""Program -> which of the arrays that it is called with it takes and gives back, as the first of
its results."""


LEAST = 3
"""Calls that are timed at least."""


@dataclass
class Measured:
    """A program as it was predicted and as it ran. Bytes are of one device."""

    seconds: list[float] = field(default_factory=list)
    """Of each call, after the first."""
    planned: int | None = None
    """What the plan counts for its role meanwhile."""
    compiled: int | None = None
    """The same from the compiled program."""
    device: int | None = None
    """The same from the device's own statistics; None where it has none, or where this process has
    held more before."""
    attention: str | None = None
    """The kernel, as the program's text says; None where attention is made of products."""
    graphs: Graphs | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    """Kind -> bytes a call."""
    compile_seconds: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(run: DescribedRun, program: Program, seconds: float) -> Measured:
    """Compiles a program, fills its arguments and calls it for so many seconds.

    Raises whatever the compiler or the device does, out of memory for one, with a note of the
    bytes that the plan counts.
    """
    planned = planned_bytes(program, run.inputs.target)
    try:
        return _measured(run, program, seconds, planned)
    except Exception as error:
        if planned is not None:
            error.add_note(f"the plan counts {planned / 1e9:.1f} GB")
        raise


def _measured(run: DescribedRun, program: Program, seconds: float, planned: int | None) -> Measured:
    devices = list(run.programs.meshes[program.role].devices.flat)
    begin = time.perf_counter()
    compiled, graphs, total = compile_program(program, run.inputs.target)
    text = read_program(compiled.as_text())
    found = Measured(
        planned=planned,
        compiled=total,
        attention=text.attention,
        graphs=graphs,
        collectives={kind: each.bytes for kind, each in text.collectives.items()},
        compile_seconds=time.perf_counter() - begin,
    )
    before, held = peak_bytes(devices), bytes_in_use(devices)  # after the compiler's own trials
    given, donated = arguments(run, program), DONATED.get(program.name)

    def call() -> Any:
        out = compiled(*given)
        if donated is not None:
            given[donated] = out[0]
        return out

    found.seconds = timed(call, seconds)
    after = peak_bytes(devices)
    if before is not None and after is not None and after > before:
        found.device = after - (held or 0) + program.beside
    return found


def timed(call: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of calls one after the other, after one to warm up: of three at least."""
    jax.block_until_ready(call())
    found: list[float] = []
    while len(found) < LEAST or sum(found) < seconds:
        begin = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - begin)
    return found


def peak_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Of the fullest device, since this process began."""
    return _statistic(devices, "peak_bytes_in_use")


def bytes_in_use(devices: Sequence[jax.Device]) -> int | None:
    return _statistic(devices, "bytes_in_use")


def _statistic(devices: Sequence[jax.Device], name: str) -> int | None:
    found = [(device.memory_stats() or {}).get(name) for device in devices]
    known = [int(n) for n in found if n is not None]
    return max(known) if len(known) == len(found) else None
