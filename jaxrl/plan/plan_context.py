"""A run as the plan sees it: its config with models, mesh axes and widths, and what follows from
them of how roles cut and share their work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from jaxrl.algorithms.methods import sampled_share
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.config.schema import Config
from jaxrl.config.section import DType
from jaxrl.models.batching import round_up
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import fuses, step_kernel_of
from jaxrl.models.parameters import Layout
from jaxrl.models.shared_prompts import PAGE
from jaxrl.plan.array_bytes import F32, ITEMSIZE, layer_bytes, trained_bytes, weight_bytes
from jaxrl.plan.plan_inputs import PlanInputs, generates
from jaxrl.plan.temporaries import Pass
from jaxrl.roles.microbatch import scored_group, shares
from jaxrl.sampling.engine import ANSWER_TOKENS, prefill_batch
from jaxrl.sampling.slots import pool_pages, rows_at_most, seats_of_row
from jaxrl.sharding.axes import Axes

STORE = 1.1e9
"""Bytes per second from a process to another through Ray's object store, packed and loaded: the
least of docs/cluster.md's best rounds, of hosts without GPUs."""


class Setting:
    """A config with the mesh axes of its roles: all inputs from which the memory is computed."""

    def __init__(self, config: Config, inputs: PlanInputs, axes: Mapping[str, Axes]):
        self.config, self.inputs, self.axes = config, inputs, axes
        self.student, self.teacher = inputs.student, inputs.teacher
        self.sequences = config.batch_size * config.group_size  # B, the rows of a batch
        self.prompt_tokens, self.new_tokens = inputs.widths(config)
        self.width = self.prompt_tokens + self.new_tokens
        self.update_rows = self.rows("actor", -(-self.sequences // config.minibatches))
        self.signal: str | None = None
        self.signal_bytes = 0  # bytes that the teacher sends per completion token
        self.vocab = self.student.vocab_size  # V of the losses: rows common to both heads
        if self.teacher is not None:
            self.signal = config.distill.signal
            self.signal_bytes = signal_bytes(config, self.teacher_widths)
            if not self.aligned:
                self.vocab = min(self.vocab, *(model.vocab_size for model in inputs.teachers))
        # Whether the loss sums the head's gradient in float32 during its forward pass.
        self.loss_fused = self.signal not in (None, "sampled") and not config.distill.lean

    @property
    def sent(self) -> dict[tuple[str, str], int]:
        """Maps (sender, receiver) to the bytes that all devices of a role send to those of another
        in a step, 0 where both have the same: the policy's weights, and the teacher's signal."""
        c, found = self.config, {}
        follow = [("rollout", sampled_share(c) > 0), ("teacher", c.teacher_follows)]
        for role in (role for role, gets in follow if gets and role in self.axes):
            found["actor", role] = trained_bytes(self.student, Axes(), c.roles[role].compute_dtype)
        if "teacher" in self.axes:
            found["teacher", "actor"] = self.sequences * self.new_tokens * self.signal_bytes
        return {
            ends: 0 if self.on_actors_mesh(ends[0 if ends[1] == "actor" else 1]) else size
            for ends, size in found.items()
        }

    def store_seconds(self, sender: str, receiver: str) -> float | None:
        """Returns the seconds that this part of `sent` takes through the object store; None where
        the run has one host, or the roles are in one process."""
        inputs = self.inputs
        if not inputs.host_of or inputs.together(sender, receiver):
            return None
        devices = (inputs.placement.roles[role].devices for role in (sender, receiver))
        # Each host has a process of its own, which sends or takes its part.
        processes = min(len({inputs.host_of[i] for i in numbers}) for numbers in devices)
        return self.sent[sender, receiver] / (STORE * processes)

    def on_actors_mesh(self, role: str) -> bool:
        """Returns whether a role has the actor's devices and axes."""
        where = self.inputs.placement.roles
        same = where["actor"].devices == where[role].devices
        return same and self.axes["actor"] == self.axes[role]

    def sampled(self, role: str) -> DecoderConfig:
        """Returns the model that a role samples from."""
        if role == "teacher":
            assert self.teacher is not None
            return self.teacher
        return self.student.plain if self.config.rollout.merge else self.student

    @property
    def reference(self) -> DecoderConfig:
        """Returns the policy before training: with adapters that were trained before, merged
        weights."""
        return self.student.plain if self.inputs.adapted else self.student.base

    @property
    def aligned(self) -> bool:
        """Returns whether the teacher reads completions in its own tokens."""
        return self.teacher is not None and self.config.teacher.tokenizer == "own"

    @property
    def teacher_rows(self) -> int:
        """Returns the rows of a teacher's LM head on the actor."""
        return self.teacher.vocab_size if self.teacher and self.aligned else self.vocab

    @property
    def teacher_widths(self) -> tuple[int, ...]:
        """Returns the widths of the hidden states of each teacher."""
        return tuple(model.d_model for model in self.inputs.teachers)

    def layout(self, role: str) -> Layout:
        """Returns the layout of a role's weights: one array per layer where it samples."""
        return "unstacked" if generates(self.config, role) else "stacked"

    def stacked(self, role: str) -> bool:
        """Returns whether all layers of a role's model are one array."""
        return self.layout(role) == "stacked"

    def published_dtype(self, role: str) -> DType:
        """Returns the dtype in which the actor holds the weights that it publishes to a role."""
        averaged = role == "teacher" and self.config.keeps_ema
        return "float32" if averaged else self.config.actor.param_dtype

    def shared_bytes(self, role: str) -> int:
        """Returns the bytes on one device of the policy's trained weights in arrays that the
        rollout, or a teacher that follows the policy, shares with the actor."""
        c, dtype = self.config, self.config.roles[role].compute_dtype
        own = c.rollout.merge  # or, of a teacher, where each gets arrays of its own from the host
        if role == "teacher":
            own = not c.teacher_follows or c.offloads_follower
        if own or not self.on_actors_mesh(role) or dtype != self.published_dtype(role):
            return 0
        whole = trained_bytes(self.student, self.axes["actor"], dtype)
        if self.stacked(role):
            return whole
        if self.student.lora is not None:  # adapters are in the layers
            return 0
        return whole - layer_bytes(self.student, self.axes["actor"], dtype)

    def base_bytes(self, role: str) -> int:
        """Returns the bytes on one device of the frozen base weights, in arrays of the role's own:
        what it shares with the actor is the actor's. 0 without adapters."""
        if self.student.lora is None:
            return 0
        dtype = self.config.base_dtype
        if role != "actor":
            if self._shares_base(role):
                return 0
            dtype = self.config.roles[role].compute_dtype
        model = self.reference if role == "reference" else self.student.base
        return weight_bytes(model, self.axes[role], dtype)

    def _shares_base(self, role: str) -> bool:
        """Returns whether the frozen base weights are arrays of the actor's."""
        if role == "reference" and self.inputs.adapted:
            return False
        c, stacked = self.config, self.config.rollout.merge or self.stacked(role)
        same = c.roles[role].compute_dtype == c.base_dtype and stacked and not c.offload.params
        return same and self.on_actors_mesh(role)

    def counted_as_the_actors(self, role: str) -> int:
        """Returns the bytes of the arrays of a role on one device that are among the actor's
        entries."""
        shared = self.shared_bytes(role) if role in ("rollout", "teacher") else 0
        reads = ("reference",) if self.config.rollout.merge else ("reference", "rollout")
        if self.student.lora is not None and role in reads:
            base, dtype = self.student.base, self.config.base_dtype
            shared += self._shares_base(role) * weight_bytes(base, self.axes[role], dtype)
        return shared

    def prompts(self, role: str) -> int:
        """Returns the width of the longest prompts that a role reads."""
        if role != "teacher" or (self.config.teacher.prompt is None and not self.aligned):
            return self.prompt_tokens
        return round_up(self.config.teacher_prompt_tokens, self.inputs.target.width_multiple)

    def completions(self, role: str) -> int:
        """Returns the width of the longest completions that a role reads."""
        if role != "teacher" or not self.aligned:
            return self.new_tokens
        return round_up(self.config.teacher_new_tokens, self.inputs.target.width_multiple)

    @property
    def teacher_samples(self) -> bool:
        """Returns whether the teacher generates, for the student to learn from or to be
        evaluated."""
        return generates(self.config, "teacher")

    @property
    def in_flight(self) -> int:
        """Returns the bytes of a batch's signal that stay on a device of the teacher while
        something else runs there."""
        waits = SCHEDULES[self.config.schedule] > 0 or self.inputs.together("actor", "teacher")
        if not waits or self.on_actors_mesh("teacher"):
            return 0
        return self.rows("teacher", self.sequences) * self.new_tokens * self.signal_bytes

    @property
    def budget(self) -> int | None:
        """Returns the most tokens of a micro-batch in one row shard
        (`roles.update.ActorPrograms.budget`)."""
        tokens = self.config.actor.micro_batch_tokens
        return None if tokens is None else tokens * self.axes["actor"].context

    @cached_property
    def shared_group(self) -> int:
        """Returns the number of completions that share a prompt in an update, if all prompts and
        completions are as long as allowed; 1 if the actor would not share prompts then."""
        c = self.config
        return 1 if c.batch_size % c.minibatches else self._shared("actor", self.budget)

    def _shared(self, role: str, budget: int | None) -> int:
        """Returns the number of completions for which a role computes one prompt once.

        Args:
            budget: most tokens of a micro-batch on one device.
        """
        c = self.config
        off_policy = c.distill.on_policy_fraction < 1 and not c.learns_from_rewards
        if c.spec.learns_from == "data" or off_policy:
            return 1
        shared = shares(c.group_size, self.prompts(role), self.completions(role), budget)
        return c.group_size if shared else 1

    def scored(self, role: str, model: DecoderConfig, parts: int) -> Pass:
        """Returns a role's forward pass over one of `parts` slices of the batch, as
        `roles.microbatch.scored_part` cuts it."""
        shards, prompts = self.axes[role].rows, self.prompts(role)
        apart = role == "teacher" and self.config.teacher_gets_feedback  # each its own prompt
        shared = 1 if apart else self._shared(role, None)
        group = scored_group(self.sequences, parts, shards, shared)
        rows = -(-self.sequences // (parts * shards * group)) * group
        run = self.run(role, model, rows, prompts + self.completions(role), joined=group > 1)
        return replace(run, shared=None if group == 1 else (group, prompts))

    def rows(self, role: str, sequences: int) -> int:
        """Returns how many of `sequences` are on one device of a role."""
        axes = self.axes[role]
        return -(-sequences // axes.rows)

    @property
    def padded_rows(self) -> int:
        """Returns the number of sequences of a batch with its padding, so that every mesh divides
        it."""
        multiple = math.lcm(*(sizes.rows for sizes in self.axes.values()))
        return -(-self.sequences // multiple) * multiple

    def run(
        self, role: str, model: DecoderConfig, rows: int, width: int, joined: bool = False
    ) -> Pass:
        dtype = self.config.roles[role].compute_dtype
        target = self.inputs.target
        fused = all(fuses(target, dim, dtype, joined) for dim in model.head_dims)
        return Pass(model, self.axes[role], rows, width, dtype, fused)

    def chunk(self, rows: int, role: str = "actor") -> int:
        """Returns how many completion tokens of `rows` sequences are projected onto the vocabulary
        at once."""
        return min(self.config.distill.loss_chunk, rows * self.completions(role))

    def micro_batches(self) -> tuple[int, int]:
        """Returns the number of micro-batches of an update, and the rows of one on a device."""
        rows, group = self.update_rows, self.shared_group
        tokens = self.prompt_tokens + group * self.new_tokens  # of a group, its prompt once
        groups = -(-rows // group)
        most = groups if self.budget is None else max(1, self.budget // tokens)
        count = -(-groups // most)
        return count, -(-groups // count) * group

    def step_kernel(self, role: str, dim: int) -> str | None:
        """Returns the name of the kernel of a decode step's attention for heads of `dim`; None
        without one."""
        return step_kernel_of(self.inputs.target, dim, self.config.roles[role].compute_dtype)

    def prefill_rows(self, role: str) -> int:
        """Returns the number of prompts of each data shard in the largest prefill of a role."""
        width, slots = self.prompts(role), self.sampling_slots(role)
        return max(prefill_batch(slots, *way, width) for way in asked(self.config, role))

    def sampling_slots(self, role: str) -> int:
        """Returns the number of slots of each data shard of a role that samples."""
        slots, axes = self.config.rollout.slots or self.sequences, self.axes[role]
        return -(-slots // axes.size) * axes.size // axes.rows

    def slots(self, role: str) -> CacheSizes:
        """Returns the slots of the sampling engine of a role: the larger of those of training and
        of evaluations."""
        c, axes = self.config, self.axes[role]
        width, multiple = self.prompts(role), self.inputs.target.width_multiple
        count = self.sampling_slots(role)
        most = c.teacher_new_tokens if role == "teacher" else c.max_new_tokens
        if c.data.eval is not None:
            most = max(most, c.eval.max_new_tokens or 0)
        episodes = role == "rollout" and c.environment.name is not None
        tokens = c.rollout.cache_tokens if role == "rollout" else None
        pages = 0 if tokens is None else pool_pages(tokens, count, most)
        whole = round_up(width + most, multiple)
        positions = round_up(most + ANSWER_TOKENS[1] * episodes, multiple)
        found = []
        for prompts, samples in asked(c, role):
            rows = rows_at_most(count, axes.rows, samples, prompts)
            seats = seats_of_row(count, samples)
            found.append(CacheSizes(count, positions, rows, seats, pages, whole))
        return max(found, key=lambda each: each.rows * (each.seats + 1))


class CacheSizes(NamedTuple):
    """The slots of a device that samples, and the prompts that they share, if any."""

    slots: int
    positions: int
    """Of each slot's cache, or of the longest completion in a pool of pages."""
    rows: int = 0
    """Shared prompts, at most."""
    seats: int = 0
    """Slots that read one of them, at most."""
    pages: int = 0
    """Of the pool, where there is one in place of the slots' caches."""
    whole: int = 0
    """Positions of the longest sequence with its prompt."""

    @property
    def own(self) -> tuple[int, int]:
        """Returns rows and positions of the cache."""
        return (self.pages, PAGE) if self.pages else (self.slots, self.positions)


def asked(config: Config, role: str) -> list[tuple[int, int]]:
    """Returns the prompts, and samples of each, for which a role is asked at once: those of
    training batches, where it samples any, and of evaluations, where it does so for them."""
    trains, evaluates = sampled_share(config) > 0, evaluated(config, role)
    if role == "teacher":
        trains = config.distill.seq_kd and config.distill.on_policy_fraction < 1
    found = [(config.batch_size, config.group_size)] * (trains or not evaluates)
    return found + [(config.eval.prompts, config.eval.samples)] * evaluates


def evaluated(config: Config, role: str) -> bool:
    """Returns whether a role that samples is evaluated."""
    return config.data.eval is not None and (role != "teacher" or config.eval.teacher)


def signal_bytes(config: Config, widths: Sequence[int]) -> int:
    """Returns the bytes that the teacher sends for each completion token.

    Args:
        widths: of the hidden states of each teacher.
    """
    d = config.distill
    aligned = 3 * F32 if config.teacher.tokenizer == "own" else 0
    if d.signal == "hidden":
        sent = max(widths) if config.mixture is None else sum(widths)
        return sent * ITEMSIZE[config.teacher.compute_dtype] + aligned
    sent = (4 if d.signal == "sampled" else 8 * d.top_k + 4) + aligned
    return sent + (8 * d.entropy_top_k + 8 if d.entropy_aware else 0)
