"""The memory of the sampling engine on one device of a role: the cache in each form that a run has
it in, and what prefills and decode steps need besides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jaxrl.algorithms.methods import sampled_share
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.activations import F32, SAMPLER_ARRAYS, Pass, logits, split, whole_rows
from jaxrl.models.buckets import round_up
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import GPU, step_kernel_of
from jaxrl.models.pages import PAGE
from jaxrl.models.split_k import parts_of
from jaxrl.plan.memory import (
    ITEMSIZE,
    Entry,
    cache_bytes,
    layer_bytes,
    shards,
    weight_bytes,
)
from jaxrl.plan.setting import Setting
from jaxrl.sampling.engine import ANSWER_ROWS, ANSWER_TOKENS, prefill_batch
from jaxrl.sampling.page_pool import pool_pages
from jaxrl.sampling.prompt_rows import rows_at_most, seats_of_row
from jaxrl.sharding.axes import Axes

GATHERED_TO_DECODE = 0.22
"""Share of the layers' weights, not stacked, that a GPU has gathered over `fsdp` at once in a
decode step, which computes little meanwhile: read from three compiled programs."""
EVALUATIONS = " for evaluations"
"""Behind the name of a phase that differs there from training."""


class CacheSizes(NamedTuple):
    """The slots of a device, and the prompts that they share, if any."""

    slots: int
    positions: int
    """Of each slot's cache, or of the longest completion in a pool of pages."""
    rows: int = 0
    """Of shared prompts, at most."""
    seats: int = 0
    """Slots that read one row, at most."""
    pages: int = 0
    """Of the pool, where there is one in place of the slots' caches."""
    whole: int = 0
    """Positions of the longest sequence, where one is read again after it had to wait."""


def forms(m: Setting, role: str) -> dict[str, CacheSizes]:
    """Returns the caches of a run: of training and evaluations, the one with more prompts."""
    c, axes = m.config, m.axes[role]
    width, multiple = m.prompts(role), m.inputs.target.width_multiple
    count = -(-(c.rollout.slots or m.sequences) // axes.size) * axes.size // axes.rows
    most = c.teacher_new_tokens if role == "teacher" else c.max_new_tokens
    if c.data.eval is not None:
        most = max(most, c.eval.max_new_tokens or 0)
    episodes = role == "rollout" and c.environment.name is not None
    beyond = ANSWER_TOKENS[1] * episodes
    tokens = c.rollout.cache_tokens if role == "rollout" else None
    pages = 0 if tokens is None else pool_pages(tokens, count, most)
    whole = round_up(width + most, multiple) if pages else 0
    found = []
    for prompts, samples in asked(c, role):
        rows = rows_at_most(count, axes.rows, samples, prompts)
        seats = seats_of_row(count, samples)
        found.append(
            CacheSizes(count, round_up(most + beyond, multiple), rows, seats, pages, whole)
        )
    return {"": max(found, key=lambda x: x.rows * (x.seats + 1))}


def sampling_entries(m: Setting, role: str) -> Iterator[Entry]:
    """Memory that the sampling engine allocates in `generate`."""
    for suffix, slots in forms(m, role).items():
        yield from _entries(m, role, slots, suffix)


def _entries(m: Setting, role: str, of: CacheSizes, suffix: str) -> Iterator[Entry]:
    c, axes, dtype = m.config, m.axes[role], m.config.roles[role].compute_dtype
    config, width = m.sampled(role), m.prompts(role)
    slots, positions = of.slots, of.positions
    prompts = prefill_rows(c, role, width, axes)
    run = m.run(role, config, -(-prompts // axes.rows), width)
    step = m.run(role, config, slots, 1)
    episodes = role == "rollout" and c.environment.name is not None
    own = (of.pages, PAGE) if of.pages else (slots, positions)
    cache = cache_bytes(config, axes, *own, dtype)
    shared = cache_bytes(config, axes, of.rows, width, dtype)
    held = cache_bytes(config, axes, prompts, width, dtype)
    heads, seats = split(config.n_heads, axes.tensor), of.rows * of.seats
    scores = 2 * heads * (own[0] * own[1] + seats * width) * F32
    kernels = [step_kernel_of(m.inputs.target, dim, dtype) for dim in config.head_dims]
    kernel = kernels[0] if all(kernels) else None
    if kernel is not None:
        part = max(config.head_dims) * ITEMSIZE[dtype] + 2 * F32  # with its largest score, its sum
        parts = own[0] * parts_of(own[1]) + seats * parts_of(width)
        scores = heads * part * (parts if kernel == "split-k" else own[0] + seats)
        if any(kind.window is not None for kind in config.kinds):
            scores += 2 * heads * seats * width * F32  # the prompts' keys, by products
    drawn = logits(slots, config.vocab_size, axes.tensor, SAMPLER_ARRAYS)
    table = whole_rows(config.vocab_size, config.embedded, axes, ITEMSIZE[dtype])
    shard = table // axes.weights if axes.weights > 1 else 0
    copy = table if axes.weights > 1 else 0
    each = (cache_bytes(one, axes, *own, dtype) for one in config.shapes)
    one, on_gpu = max(each), m.inputs.target.platform in GPU
    projected = drawn + copy if on_gpu else max(drawn, copy)
    # A CPU has the kernels of all layers dequantised at once, an accelerator one kernel.
    quantised = m.inputs.on_cpu and config.quantised is not None
    floats = [s for s in shards(config.plain, axes) if quantised and s.path.startswith("layers")]
    whole = sum(s.bytes(dtype) for s in floats)
    experts = sum(s.bytes(dtype) for s in floats if "experts/" in s.path)

    def prefilled(run: Pass) -> int:  # which dequantises a few experts at a time
        return max(run.forward(stacked=False), shard + copy * on_gpu) + whole - experts

    work = {
        "prefill": prefilled(run),
        "decode": max(scores, projected, step.every_expert) + whole,
        "longer cache": one,
    }
    if episodes:  # the cache has its full length from the start
        answers = m.run(role, config, ANSWER_ROWS, ANSWER_TOKENS[1])
        scored = heads * answers.rows * answers.width * (width + positions)
        picked = (2 * cache // slots + shared // of.rows) * min(slots, ANSWER_ROWS)
        work["answers"] = picked + max(answers.forward(stacked=False), 2 * F32 * scored)
        del work["longer cache"]
    if of.pages:  # the pool does not grow
        work.pop("longer cache", None)
        read = cache_bytes(config, axes, 1, of.whole, dtype)
        work["read again"] = read + prefilled(m.run(role, config, 1, of.whole))
    for phase, size in work.items():
        yield Entry("cache", "KV cache", cache, phase + suffix)
        yield Entry("cache", "prompts that slots share", shared, phase + suffix)
        yield Entry("cache", "keys and values of prompts", held, phase + suffix)
        yield Entry("activations", phase, size, phase + suffix)
    name = "weights gathered over fsdp"
    if axes.weights > 1 and on_gpu:
        size = round(GATHERED_TO_DECODE * layer_bytes(config, axes.gathered, dtype))
        yield Entry("activations", name, size, "decode" + suffix)
    elif axes.weights > 1:  # each program gathers all before its first layer
        size = weight_bytes(config, axes.gathered, dtype)
        unused = (0 if config.tie_embeddings else table) + run.layer  # nearly all of the last layer
        yield Entry("activations", name, size - unused, "prefill" + suffix)
        yield Entry("activations", name, size, "decode" + suffix)


def pool_note(m: Setting, model: DecoderConfig, why: str | None) -> str:
    """What `rollout.cache_tokens` saves.

    Args:
        why: the cache cannot be in pages.

    Raises:
        UserError: the cache cannot be in pages, and why.
    """
    key = f"rollout.cache_tokens={m.config.rollout.cache_tokens}"
    if why is not None:
        raise UserError(f"{key} needs completions in pages, and here {why}; set it to null")
    axes, dtype = m.axes["rollout"], m.config.roles["rollout"].compute_dtype
    of = max(forms(m, "rollout").values())
    sizes = ((of.pages, PAGE), (of.slots, of.positions))
    pool, slots = (cache_bytes(model, axes, *size, dtype) / 1e9 for size in sizes)
    room = f"All slots have room for {of.pages // of.slots * PAGE} tokens"
    if of.pages < of.slots:
        room = f"Each page is one slot's, so no more than {of.pages} slots are used at once"
    return (
        f"sampling: {key}: a device's {of.pages} pages of {PAGE} tokens take {pool:.2f} GB; its"
        f" {of.slots} slots with {of.positions} tokens each would take {slots:.2f} GB. {room};"
        " where pages run out, the youngest sample waits"
    )


def asked(config: Config, role: str) -> list[tuple[int, int]]:
    """Prompts, and samples of each, for which a role is asked at once: those of training batches,
    where it samples any, and of evaluations, where it does so for them."""
    trains, evaluates = sampled_share(config) > 0, evaluated(config, role)
    if role == "teacher":
        trains = config.distill.seq_kd and config.distill.on_policy_fraction < 1
    found = [(config.batch_size, config.group_size)] * (trains or not evaluates)
    return found + [(config.eval.prompts, config.eval.samples)] * evaluates


def evaluated(config: Config, role: str) -> bool:
    """Whether a role that samples is evaluated."""
    return config.data.eval is not None and (role != "teacher" or config.eval.teacher)


def prefill_rows(config: Config, role: str, width: int, axes: Axes) -> int:
    """Number of prompts of `width` tokens in the largest prefill of a role that samples, over its
    whole mesh."""
    slots = config.rollout.slots or config.batch_size * config.group_size
    each = asked(config, role)
    return max(prefill_batch(slots, prompts, n, width, axes.rows) for prompts, n in each)
