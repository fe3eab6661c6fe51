"""The sizes of a run as its roles cut it: the widths of arrays, the rows of batches and of their
parts, slots and caches, each at the largest that the config allows. They follow from the config,
from the models' `config.json` and from the placement, so that a role can say before a weight is
read which programs it runs and which arrays it keeps (`roles.declared`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms.methods import sampled_share
from jaxrl.algorithms.schedule import staleness_of
from jaxrl.algorithms.signals import Projection, score_completions, signal_tensors
from jaxrl.config.schema import Config
from jaxrl.config.section import show_value
from jaxrl.errors import UserError
from jaxrl.losses.token_spans import Outcomes
from jaxrl.models.batching import ladder_width, round_up, rows_of
from jaxrl.models.bert import EncoderConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import Target, Use
from jaxrl.models.parameters import Layout, Params, abstract_params, param_shardings
from jaxrl.models.shared_prompts import why_not_paged
from jaxrl.roles.declared import Remedy, placed
from jaxrl.roles.microbatch import saves_by_sharing, scored_group
from jaxrl.sampling.engine import prefill_batch
from jaxrl.sampling.slots import pool_pages
from jaxrl.sharding.axes import ROWS, Axes, resolve_axes
from jaxrl.sharding.placement import Placement
from jaxrl.types import OwnSignal, Sequences, TeacherSignal, TokenAlignment, signal_of

LONG = 8192
"""Tokens of sequences for which the axis `context` is considered."""


@dataclass(frozen=True)
class RunInputs:
    """What stays the same while keys of the config are tried."""

    placement: Placement
    roles: tuple[str, ...]
    """Those of the run; others may be placed, but hold nothing."""
    student: DecoderConfig
    teacher: DecoderConfig | None
    target: Target
    """The device that all of them are, or can do as much as."""
    reward: DecoderConfig | None = None
    grouper: EncoderConfig | None = None
    several: tuple[DecoderConfig, ...] = ()
    """All teachers where there are several; `teacher` is then the largest of them."""
    adapted: bool = False
    """The student begins with adapters that were trained before, which its reference keeps."""
    host_of: tuple[int, ...] = ()
    """Number of each device's host; empty where all are on one, or not known."""

    @property
    def teachers(self) -> tuple[DecoderConfig, ...]:
        return self.several or (() if self.teacher is None else (self.teacher,))

    @property
    def on_cpu(self) -> bool:
        return self.target.platform == "cpu"

    def widths(self, config: Config) -> tuple[int, int]:
        """Returns the widths of the longest prompts and completions, as arrays have them."""
        multiple = self.target.width_multiple
        tokens = config.max_prompt_tokens, config.max_new_tokens
        return round_up(tokens[0], multiple), round_up(tokens[1], multiple)

    def model(self, role: str) -> DecoderConfig | EncoderConfig:
        own = {"teacher": self.teacher, "reward": self.reward, "grouper": self.grouper}
        return own.get(role) or self.student

    def models(self, role: str) -> tuple[DecoderConfig | EncoderConfig, ...]:
        return self.teachers if role == "teacher" else (self.model(role),)

    def kernel_uses(self, config: Config, roles: Iterable[str]) -> list[Use]:
        """Lists the attention kernels that these roles need (`kernels.try_kernels`)."""
        return [
            (dim, config.roles[role].compute_dtype, generates(config, role))
            for role in roles
            for model in self.models(role)
            for dim in model.head_dims
        ]

    def axes(self, config: Config) -> dict[str, Axes]:
        """Returns the mesh axes of each role of the run.

        Raises:
            UserError: axes that do not divide the role's devices or the model's heads; keys that
                need a mixture of experts, of a model that is none.
        """
        found = {}
        for role in self.roles:
            n = len(self.placement.roles[role].devices)
            given = config.roles[role].parallel
            sizes = {axis: getattr(given, axis) for axis in type(given).model_fields}
            axes = found[role] = resolve_axes(role, n, **sizes)
            if axes.tensor > 1 and self.whole_vocabulary(config, role):
                raise UserError(
                    f"{role}.parallel.tensor={axes.tensor} splits the vocabulary, and a teacher"
                    " with teacher.tokenizer=own needs all of it at once: set"
                    f" {role}.parallel.tensor=1, and fsdp or data"
                )
            for model in self.models(role):
                heads, experts = model.n_heads, None
                if isinstance(model, DecoderConfig) and model.experts is not None:
                    experts = model.experts.count
                if heads % axes.heads:
                    allowed = [t for t in range(1, n + 1) if heads % t == 0 and n % t == 0]
                    asked = {"tensor": axes.tensor, "context": axes.context}
                    keys = [f"{role}.parallel.{axis}={k}" for axis, k in asked.items() if k > 1]
                    product = f" times {keys[1]}, {axes.heads}," if len(keys) > 1 else ""
                    raise UserError(
                        f"{keys[0]}{product} does not divide its model's n_heads={heads}:"
                        f" on {n} devices, use {' or '.join(map(str, allowed))}"
                    )
                if (experts or 1) % axes.expert:
                    has, use = f"has num_experts={experts}", f"a divisor of {experts}"
                    if experts is None:
                        has, use = "has no experts", "data or fsdp"
                    raise UserError(
                        f"{role}.parallel.expert={axes.expert} does not divide the experts of its"
                        f" model, which {has}: use {use}"
                    )
        balances = config.student.router_aux_loss_coef
        for key, now, off in (
            ("student.router_aux_loss_coef", balances, 0),
            ("policy.router_replay", config.policy.router_replay, False),
        ):
            if now and self.student.experts is None:
                raise UserError(
                    f"{key}={show_value(now)} needs a mixture of experts, and student.model is of"
                    f" the family {self.student.family}: set it to {show_value(off)}"
                )
        if balances and config.spec.method is not None:
            raise UserError(
                f"student.router_aux_loss_coef={balances:g} is a term of jaxrl's losses, and"
                f" algorithm={config.algorithm} has its own method: set it to 0"
            )
        return found

    def whole_vocabulary(self, config: Config, role: str) -> bool:
        """Returns whether each device of a role needs the logits of all tokens, so that `tensor`
        cannot split its model."""
        return config.teacher.tokenizer == "own" and role in ("actor", "teacher")

    def possible_axes(self, config: Config, role: str) -> Iterator[Axes]:
        """Yields ways to use the devices of a role, from copies to ever smaller pieces: of `data`,
        `fsdp` and `tensor` two at most, `context` for long sequences, and copies of what is trained
        in each of several hosts alone. What does not divide the model's widths or heads is left
        out: those weights would be whole on each device."""
        n, model = len(self.placement.roles[role].devices), self.model(role)
        most = 1 if self.whole_vocabulary(config, role) else n
        long = "context" in type(config.roles[role].parallel).model_fields
        long = long and sum(self.widths(config)) >= LONG
        sizes = product((1, 2, 4, 8) if long else (1,), range(1, most + 1))
        for context, tensor in ((c, t) for c, t in sizes if n % (c * t) == 0):
            rest = n // (tensor * context)
            found = [Axes(fsdp=rest, tensor=tensor, context=context)]
            if role != "actor":
                copies = Axes(data=rest, tensor=tensor, context=context)
                found = [copies, *found] if tensor == 1 < rest else [copies]
            elif rest % (hosts := self.spanned(role)) == 0 and 1 < hosts < rest:
                found.append(found[0]._replace(data=hosts, fsdp=rest // hosts))
            for axes in found:
                divided = model.d_model % axes.weights == 0 and model.d_ff % axes.tensor == 0
                if divided and model.n_heads % axes.heads == 0:
                    yield axes

    def spanned(self, role: str) -> int:
        """Returns the number of hosts among which the devices of a role are divided evenly; 1 where
        they are not, or on one host."""
        devices = self.placement.roles[role].devices
        hosts = [self.host_of[i] for i in devices] if self.host_of else []
        count = len(set(hosts))
        even = count > 1 and all(hosts.count(host) * count == len(hosts) for host in set(hosts))
        return count if even and hosts == sorted(hosts) else 1

    def together(self, a: str, b: str) -> bool:
        """Returns whether two roles share a worker."""
        return self.placement.roles[a].pool == self.placement.roles[b].pool


def common_remedies(run: RunShapes, role: str) -> Iterator[Remedy]:
    """Yields the remedies that every role has: the number of parts of its batch, what is offloaded
    for other roles of its pool, its mesh axes, its dtype."""
    config, inputs, now = run.config, run.inputs, run.axes[role]
    section: Any = config.roles[role]
    if "num_microbatches" in type(section).model_fields:
        parts = section.num_microbatches
        more = [parts * n for n in (2, 4, 8, 16)]
        yield Remedy(f"{role}.num_microbatches", range(1, parts), more, timed=True)
    others = inputs.placement.pool_of(role).roles
    if sum(other in inputs.roles for other in others) > 1:
        for key in type(config.offload).model_fields:
            yield Remedy(f"offload.{key}", smaller=[True])
    given, sizes = section.parallel.model_dump(), [2, 4, 8]
    if given["tensor"] is None and not inputs.whole_vocabulary(config, role):
        tensor = [t for t in sizes if t > now.tensor and now.size % t == 0]
        yield Remedy(f"{role}.parallel.tensor", smaller=tensor)
    # Where one sequence is all that a device computes at once: fewer cannot help.
    if given.get("context", now) is None and run.passes(role).rows == 1:
        context = [c for c in sizes if now.size % (now.tensor * c) == 0]
        yield Remedy(f"{role}.parallel.context", smaller=context)
    if not inputs.on_cpu:
        yield Remedy(f"{role}.dtype", smaller=["bfloat16"])


def fractions(whole: int) -> list[int]:
    """Returns numbers below `whole`, the largest first: by eighths, and below one by halves."""
    eighths = {whole * part // 8 for part in range(1, 8)}
    halves = {whole >> n for n in range(4, whole.bit_length())}
    return sorted((eighths | halves) - {0}, reverse=True)


def generates(config: Config, role: str) -> bool:
    """Returns whether a role generates: the teacher where the student learns from what it writes,
    or is evaluated beside it."""
    if role != "teacher":
        return role == "rollout"
    return config.distill.seq_kd or evaluated(config, role)


class RunShapes:
    """A config with the mesh axes of its roles, and what follows from them."""

    def __init__(self, config: Config, inputs: RunInputs):
        self.config, self.inputs, self.axes = config, inputs, inputs.axes(config)
        self.student, self.teacher = inputs.student, inputs.teacher
        self.prompt_rows, self.sequences = config.batch_size, config.batch_rows  # B
        self.staleness = staleness_of(config)  # batches generated ahead
        self.prompt_tokens, self.new_tokens = inputs.widths(config)
        self.width = self.prompt_tokens + self.new_tokens
        self.update_rows = self.rows("actor", -(-self.sequences // config.minibatches))
        # With its padding, so that every mesh divides it.
        multiple = math.lcm(*(sizes.rows for sizes in self.axes.values()))
        self.padded_rows = -(-self.sequences // multiple) * multiple
        # Of what the actor is given at once.
        self.trained_rows = -(-self.sequences // (config.parts * multiple)) * multiple
        # Whether the teacher reads completions in its own tokens.
        self.aligned = self.teacher is not None and config.teacher.tokenizer == "own"
        self.teacher_widths = [model.d_model for model in inputs.teachers]
        self.signal: str | None = None
        self.signal_bytes = 0  # bytes that the teacher sends per completion token
        self.vocab = self.student.vocab_size  # V of the losses: rows common to both heads
        if self.teacher is not None:
            self.signal = config.distill.signal
            combine = max if config.mixture is None else sum
            width, dtype = combine(self.teacher_widths), config.teacher.compute_dtype
            tensors = signal_tensors(config.distill, dtype, width, config.spec.signal).values()
            aligned = 3 * np.dtype(np.float32).itemsize * self.aligned
            self.signal_bytes = aligned + sum(
                np.dtype(dtype).itemsize * math.prod(dims) for dtype, dims in tensors
            )
            if not self.aligned:
                self.vocab = min(self.vocab, *(model.vocab_size for model in inputs.teachers))
        # Rows of a teacher's LM head on the actor.
        self.teacher_rows = self.teacher.vocab_size if self.teacher and self.aligned else self.vocab
        # The most tokens of a micro-batch in one row shard (`roles.update.ActorPrograms.budget`).
        tokens = config.actor.micro_batch_tokens
        self.budget = None if tokens is None else tokens * self.axes["actor"].context
        # The policy before training: with adapters that were trained before, merged weights.
        self.reference = self.student.plain if inputs.adapted else self.student.base

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

    def layout(self, role: str) -> Layout:
        """Returns the layout of a role's weights: one array per layer where it samples."""
        return "unstacked" if generates(self.config, role) else "stacked"

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
    def signal_waits(self) -> bool:
        """Whether a batch's signal stays on the teacher's devices while something else runs
        there."""
        waits = self.staleness > 0 or self.inputs.together("actor", "teacher")
        return waits and not self.on_actors_mesh("teacher")

    @property
    def recorded(self) -> jax.ShapeDtypeStruct | None:
        """Returns the experts of a token [layers, chosen] that the rollout records for updates, if
        it does."""
        if not self.config.policy.router_replay:
            return None
        experts = self.student.experts
        assert experts is not None, "`RunInputs.axes` refuses it"
        return jax.ShapeDtypeStruct((self.student.n_layers, experts.chosen), experts.id_dtype)

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
        if c.only_data or off_policy:
            return 1
        shared = saves_by_sharing(c.group_size, self.prompts(role), self.completions(role), budget)
        return c.group_size if shared else 1

    def rows(self, role: str, sequences: int) -> int:
        """Returns how many of `sequences` are on one device of a role."""
        return -(-sequences // self.axes[role].rows)

    def micro_batches(self) -> tuple[int, int]:
        """Returns the number of micro-batches of an update, and the rows of one on a device."""
        group = self.shared_group
        tokens = self.prompt_tokens + group * self.new_tokens  # of a group, its prompt once
        groups = -(-self.update_rows // group)
        most = groups if self.budget is None else max(1, self.budget // tokens)
        count = -(-groups // most)
        return count, -(-groups // count) * group

    def passes(self, role: str) -> Passes:
        """Returns how a role passes over a batch in a step."""
        actor = self.config.actor
        if role == "actor":
            count, rows = self.micro_batches()
            calls, remat = count * self.config.updates_per_batch, actor.remat
            layers, heads = 3 if remat == "full" else 2, 2 if remat == "none" else 3
            return Passes(calls, rows, layers, heads, RECOMPUTED[remat], actor.epochs_per_batch)
        parts = self.config.slices(role)
        return Passes(parts, -(-self.rows(role, self.sequences) // parts))

    @property
    def gradient_dtype(self) -> str:
        """Returns the dtype in which the actor's gradients are summed over devices."""
        return self.config.actor.reduce_dtype or self.config.actor.compute_dtype

    def scored_share(self, role: str) -> float:
        """Returns the share of a batch's rows that each model of a role scores."""
        return 1 / len(self.inputs.models(role)) if self.config.mixture is None else 1.0

    def batch_limits(self, most: int) -> dict[str, int]:
        """Maps each key of a batch's size to the largest value to try, at most `most`."""
        c = self.config
        positions = self.student.max_positions - c.max_prompt_tokens
        longest = min(most, positions, c.rollout.cache_tokens or most)
        groups = {} if c.only_data else {"group_size": most}
        return {"batch_size": most, **groups, "max_new_tokens": longest}

    @property
    def decode_steps(self) -> int:
        """Returns the decode steps of a batch whose completions all are as long as allowed."""
        slots = min(self.config.slots, self.sequences)
        return self.new_tokens * -(-self.sequences // slots)

    def prefill_rows(self, role: str) -> int:
        """Returns the number of prompts of each data shard in the largest prefill of a role."""
        width, slots = self.prompts(role), self.sampling_slots(role)
        return max(prefill_batch(slots, *way, width) for way in asked(self.config, role))

    @property
    def launch_steps(self) -> int:
        """Returns the decode steps of a launch of the rollout."""
        return self.config.rollout.launch_tokens

    def sampling_slots(self, role: str) -> int:
        """Returns the number of slots of each data shard of a role that samples."""
        slots, axes = self.config.slots, self.axes[role]
        return -(-slots // axes.size) * axes.size // axes.rows

    @property
    def why_not_paged(self) -> str | None:
        """Returns why the rollout's cache cannot be in pages; None if it can."""
        c, how = self.config, (self.inputs.target, self.config.rollout.compute_dtype)
        return why_not_paged(self.student, *how, episodes=c.environment.name is not None)

    def paged_cache(self) -> tuple[int, int]:
        """Returns the pages of the rollout's pool on a device, 0 where each slot has a cache of its
        own, and the positions of its longest completion.

        Raises:
            UserError: `rollout.cache_tokens`, where the cache cannot be in pages, and why.
        """
        c, tokens, most = self.config, self.config.rollout.cache_tokens, self.config.max_new_tokens
        if c.data.eval is not None:
            most = max(most, c.eval.max_new_tokens or 0)
        positions = round_up(most, self.inputs.target.width_multiple)
        if tokens is None:
            return 0, positions
        if (why := self.why_not_paged) is not None:
            raise UserError(
                f"rollout.cache_tokens={tokens} needs prompts apart from completions, and here"
                f" a cache holds both: {why}; set it to null"
            )
        return pool_pages(tokens, self.sampling_slots("rollout"), most), positions

    def scored_rows(self, role: str, parts: int) -> tuple[int, int]:
        """Returns the rows on one device of one of `parts` slices of the batch, as
        `roles.microbatch.scored_part` cuts it, and how many of them share each prompt."""
        shards = self.axes[role].rows
        apart = role == "teacher" and self.config.teacher_gets_feedback  # each its own prompt
        shared = 1 if apart else self._shared(role, None)
        group = scored_group(self.sequences, parts, shards, shared)
        return -(-self.sequences // (parts * shards * group)) * group, group


class Passes(NamedTuple):
    """Passes of a role over a batch of the longest sequences, in a step."""

    calls: int
    """Programs, each of a part of the batch."""
    rows: int
    """Of a part, on one device."""
    layers: int = 1
    """Passes over the layers in a call: forward, backward, and what that computes again."""
    heads: int = 1
    """Passes in which heads are exchanged (`context`, `expert`); remat=dots keeps none of them."""
    recomputed: float = 0.0
    """Share of a forward pass that the backward pass computes again."""
    epochs: int = 1
    """Times that the batch is trained on."""


RECOMPUTED = {"none": 0.0, "dots": 0.15, "full": 1.0}
"""`actor.remat`, the fastest first -> share of a forward pass that is computed again."""


def asked(config: Config, role: str) -> list[tuple[int, int]]:
    """Returns the prompts, and samples of each, for which a role is asked at once: those of
    training batches, where it samples any, and of evaluations, where it does so for them."""
    trains, evaluates = sampled_share(config) > 0, evaluated(config, role)
    if role == "teacher":
        trains = config.distill.seq_kd
    found = [(config.batch_size, config.group_size)] * trains
    return found + [(config.eval.prompts, config.eval.samples)] * evaluates


def evaluated(config: Config, role: str) -> bool:
    """Returns whether a role that samples is evaluated."""
    return config.data.eval is not None and (role != "teacher" or config.evaluates_teacher)


class RunArrays:
    """The abstract arrays of a run on the meshes of its roles."""

    def __init__(self, shapes: RunShapes, meshes: Mapping[str, Mesh]):
        """
        Args:
            meshes: of each role of the run.
        """
        self.shapes, self.config, self.student = shapes, shapes.config, shapes.student
        self.meshes = meshes
        models = shapes.inputs.teachers
        names = list(self.config.teachers or [""])[: len(models)]
        self.teachers = list(zip(names, models, strict=True))
        """Name and model of each."""

    def array(
        self, role: str, dtype: Any, *shape: int, whole: bool = False
    ) -> jax.ShapeDtypeStruct:
        """Returns an abstract array on the mesh of a role, with its rows divided or `whole`."""
        spec = PartitionSpec() if whole else PartitionSpec(ROWS)
        sharding = NamedSharding(self.meshes[role], spec)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    def params(
        self, role: str, model: DecoderConfig, dtype: Any = None, layout: Layout | None = None
    ) -> Params:
        """Returns the weights of a model, in the dtype and layout of the role unless others are
        given."""
        dtype = self.config.roles[role].compute_dtype if dtype is None else dtype
        layout = layout or self.shapes.layout(role)
        return dict(placed_params(model, self.meshes[role], jnp.dtype(dtype), layout))

    def sequences(self, role: str, rows: int, group: int = 1) -> Sequences:
        completions = self.shapes.completions(role)
        width = self.shapes.prompts(role) + completions
        tokens, mask = (self.array(role, dtype, rows, width) for dtype in (jnp.int32, bool))
        return Sequences(tokens, mask, self.array(role, bool, rows, completions), group)

    def signal(self, role: str, rows: int) -> TeacherSignal:
        """Returns the teacher's signal for so many rows, as abstract arrays on the mesh of a
        role."""
        c, m = self.config, self.shapes
        if not m.aligned:
            # Of several teachers: the hidden states of the widest, or of all.
            combine = max if c.mixture is None else sum
            width = combine(m.teacher_widths) if m.teacher_widths else 0
            own = c.spec.signal
            shapes = signal_tensors(c.distill, c.teacher.compute_dtype, width, own)
            make = signal_of if own is None else OwnSignal
            return make(
                {
                    name: self.array(role, dtype, rows, m.new_tokens, *dims)
                    for name, (dtype, dims) in shapes.items()
                }
            )
        projection, args = self.score(rows, self.teachers[-1])
        out = jax.eval_shape(partial(score_completions, projection, self.teachers[-1][1]), *args)
        if role == "actor":
            out = replace(out, baseline=jax.ShapeDtypeStruct((rows, m.new_tokens), jnp.float32))
        signal: TeacherSignal = jax.tree.map(lambda x: self.array(role, x.dtype, *x.shape), out)
        return signal

    def outcomes(self, role: str) -> Outcomes:
        """Returns those of the student's and the teacher's tokens, where these are others."""
        (_, teacher), *_ = self.teachers
        counts = self.student.vocab_size, teacher.vocab_size
        return Outcomes(*(self.array(role, jnp.int32, n, whole=True) for n in counts))

    def scored(self, role: str, parts: int) -> tuple[int, int]:
        """Returns the rows of one of `parts` slices of the batch over all devices of a role, and
        the number of rows that share a prompt."""
        rows, group = self.shapes.scored_rows(role, parts)
        return rows * self.shapes.axes[role].rows, group

    def score(
        self, rows: int, teacher: tuple[str, DecoderConfig], group: int = 1, *, sends: bool = False
    ) -> tuple[Projection, tuple[Any, ...]]:
        """Returns how a teacher scores so many rows, and the arguments of its program.

        Args:
            sends: it sends hidden states, of which a mixture is made.
        """
        c, m, role = self.config, self.shapes, "teacher"
        _, model = teacher
        vocab = model.vocab_size if m.aligned else m.vocab
        projection = Projection.from_config(c, self.meshes[role], vocab)
        ids, aligned = None, tuple[Any, ...]()
        if m.aligned:
            one = self.array(role, jnp.int32, rows, m.new_tokens)
            starts = self.array(role, bool, rows, m.completions(role))
            aligned = (TokenAlignment(one, one, one, starts), self.outcomes(role))
        if sends:
            distill = c.distill.model_copy(update={"signal": "hidden"})
            projection = replace(projection, distill=distill)
        elif c.distill.signal == "student_topk":
            ids = self.array(role, jnp.int32, rows, m.new_tokens, c.distill.top_k)
        given = (self.params("teacher", model), self.sequences(role, rows, group), ids, *aligned)
        return projection, given

    def text_batch(
        self, role: str, batches: Collection[tuple[int, int]]
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the abstract tokens and mask of the widest of the `text_batches` of a role."""
        width, rows = max(batches)
        rows *= self.shapes.axes[role].rows
        return tuple(self.array(role, dtype, rows, width) for dtype in (jnp.int32, bool))


@cache
def text_batches(longest: int, batch_tokens: int) -> frozenset[tuple[int, int]]:
    """Returns the width of each full batch of texts of at most `longest` tokens, and its rows on a
    device."""
    widths = {ladder_width(n, longest) for n in range(1, longest + 1)}
    return frozenset((width, rows_of(width, batch_tokens)) for width in widths)


@lru_cache(maxsize=256)
def placed_params(
    model: DecoderConfig, mesh: Mesh | AbstractMesh, dtype: jnp.dtype, layout: Layout = "stacked"
) -> Params:
    """Returns the weights of a model as abstract arrays on a mesh."""
    abstract = abstract_params(model, dtype, layout)
    return placed(abstract, param_shardings(model, mesh, layout))
