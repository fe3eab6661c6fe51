"""From a config to started roles: find the models, check that they fit together, place them, start
the workers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms.methods import method_of
from jaxrl.algorithms.objective import configured_correction, objective_notes
from jaxrl.algorithms.signals import Projection
from jaxrl.checkpoint.source import ModelSource, resolve_model
from jaxrl.config.schema import Config
from jaxrl.data.source import Split, open_source
from jaxrl.data.stream import EvalSet, PromptStream
from jaxrl.data.tokenizer import check_same_prompts, check_same_vocabulary, decode
from jaxrl.errors import UserError, user_input
from jaxrl.models.decoder import Layout
from jaxrl.models.encoder_config import find_folder, read_encoder
from jaxrl.models.kernels import Target
from jaxrl.models.rules import param_shardings
from jaxrl.plan import Plan, without_weights
from jaxrl.plan.roles import TEMPLATE_TOKENS
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.xla_flags import worker_environment
from jaxrl.rewards.scoring import RewardFunctions
from jaxrl.rewards.verifiers import Verifier, verifier
from jaxrl.roles.actor import Actor
from jaxrl.roles.grouper import Grouper
from jaxrl.roles.reference import Reference
from jaxrl.roles.reward import Reward, RewardModel
from jaxrl.roles.reward_model import open_reward
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.scorer import Scorer
from jaxrl.roles.teacher import Teacher
from jaxrl.run.conversion import converted_once
from jaxrl.run.inputs import encoder, end_ids, held_out_sets, keys, pad_id, tokenizer_of
from jaxrl.runtime.local import LocalCrew
from jaxrl.runtime.worker import Crew, Future
from jaxrl.sharding.mesh import (
    Visible,
    accelerators_here,
    carve,
    ensure_devices,
    role_mesh,
    verify_arrays,
)
from jaxrl.sharding.placement import Axes, Placement, device_list, parse
from jaxrl.sharding.reshard import put
from jaxrl.teacher.remote import (
    RemoteTeacher,
    check_remote,
    check_remote_prompts,
    remote_head,
    remote_info,
)
from jaxrl.types import Prompt

Log = Callable[[str], None]
STOP_S = 10.0
"""Longest wait for the workers at the end of a run."""


@dataclass(frozen=True)
class Job:
    """What a run is about, before any weight is read: models, tokenizers, data. Everything in it
    fits together.
    """

    config: Config
    student: ModelSource
    teacher: ModelSource | None
    """None where there is none, or it runs elsewhere (`teacher.address`)."""
    tokenizer: Any
    vocab_size: int
    """Tokens that student and teacher share."""
    train: PromptStream
    held_out: tuple[EvalSet, ...]
    judge: Verifier
    eos_ids: tuple[int, ...]
    pad_id: int
    opens_thought: bool
    """The prompts end inside a thought: the chat template opens `<think>`."""
    notes: tuple[str, ...] = ()
    """What could not be checked."""
    given: Mapping[str, bytes] = field(default_factory=dict)
    """Reward functions from Python, pickled, by their entries in `reward.functions`."""

    @property
    def held_out_prompts(self) -> tuple[Prompt, ...]:
        """Those of all sets, one after the other."""
        return tuple(prompt for one in self.held_out for prompt in one.prompts)

    def packing(self, row_multiple: int, target: Target) -> dict[str, Any]:
        """How prompts and completions become arrays for the devices of a run: arguments of
        `make_rollout`.
        """
        return {
            "pad_id": self.pad_id,
            "max_prompt_tokens": self.config.max_prompt_tokens,
            "max_new_tokens": self.config.max_new_tokens,
            "row_multiple": row_multiple,
            "width_multiple": target.width_multiple,
        }

    @property
    def teacher_samples(self) -> bool:
        """Whether the teacher generates, for the student to learn from or for its own accuracy."""
        asked = self.config.distill.seq_kd or (self.config.eval.teacher and bool(self.held_out))
        return self.teacher is not None and asked


def make_job(config: Config, given: Mapping[str, bytes] | None = None) -> Job:
    """Reads configs, tokenizers and data. Raises UserError for what does not fit together.

    Args:
        given: reward functions from Python (`rewards.callables.bind`).
    """
    student = resolve_model(config.student.model)
    teacher = None if config.teacher.model is None else resolve_model(config.teacher.model)
    tokenizer = tokenizer_of(student)
    vocab_size = student.config.vocab_size
    theirs = None
    if teacher is not None:
        theirs = tokenizer_of(teacher)
        vocab_size = check_same_vocabulary(
            tokenizer,
            theirs,
            student.config.vocab_size,
            teacher.config.vocab_size,
            student.config.eos_ids,
            teacher.config.eos_ids,
        )
    remote = None if config.teacher.address is None else remote_info(config)
    if remote is not None:
        vocab_size = check_remote(config, remote, tokenizer, student.config)
    _check_sizes(config, student, teacher, vocab_size)
    eos_ids = end_ids(student, tokenizer)
    train, held_out = _data(config, tokenizer, eos_ids)
    prompts = [*train.batch(0), *(prompt for one in held_out for prompt in one.prompts)]
    notes: list[str | None] = []
    if config.learns_from_rewards:
        notes += _check_rewards(config, train, given or {})
    if theirs is not None:
        check_same_prompts(tokenizer, theirs, prompts)
    if remote is not None:
        notes.append(check_remote_prompts(config, remote, tokenizer, prompts, vocab_size))
        if config.eval.teacher and held_out:
            where = config.teacher.address
            notes.append(f"the teacher at {where} only scores: its own accuracy is not evaluated")
    return Job(
        config,
        student,
        teacher,
        tokenizer,
        vocab_size,
        train,
        held_out,
        verifier(config.data.verifier),
        eos_ids,
        pad_id(student, eos_ids),
        decode(tokenizer, prompts[0].tokens).rstrip().endswith("<think>"),
        tuple(filter(None, notes)),
        given or {},
    )


def check_job(config: Config, given: Mapping[str, bytes]) -> None:
    """Raises the UserError that `make_job` would. Of models that have no weights here, as in a plan
    for another machine, only `config.json` is known: data and reward functions are checked alone.
    """
    if not without_weights(config):
        make_job(config, given)
        return
    for label, sources, split in _data_sources(config):
        open_source(sources, config.seed, split, keys(config), label)
    if config.learns_from_rewards:
        with user_input("policy"):
            configured_correction(config)
        with RewardFunctions(
            config.rewards, config.max_new_tokens, config.deadlines.startup, given
        ) as rewards:
            rewards.pool.signatures()


def _data_sources(config: Config) -> Iterator[tuple[str, Sequence[str], Split]]:
    """Key, sources and split of all that a run reads."""
    d = config.data
    yield "data.train", d.train, "train"
    if d.few_shot is not None:
        yield "data.few_shot", d.few_shot, "train"
    if isinstance(d.eval, dict):
        for name, sources in d.eval.items():
            yield f"data.eval.{name}", sources, "eval"
    elif d.eval is not None:
        yield "data.eval", d.eval, "eval"


def _check_rewards(config: Config, train: PromptStream, given: Mapping[str, bytes]) -> list[str]:
    """Everything about the rewards that would otherwise fail after the first sampling."""
    notes: list[str] = []
    with user_input("policy"):
        configured_correction(config)
        if config.spec.loss is not None:
            notes = objective_notes(config)
    with RewardFunctions(
        config.rewards, config.max_new_tokens, config.deadlines.startup, given
    ) as rewards:
        rewards.check(train.batch(0))
    if config.reward.model is not None:
        open_reward(config.reward.model)
    if config.grouper.model is not None and config.policy.advantages == "similarity":
        read_encoder(find_folder(config.grouper.model))
    return notes


def _check_sizes(
    config: Config, student: ModelSource, teacher: ModelSource | None, vocab_size: int
) -> None:
    """Widths against the models' positions, and top-k against their vocabulary."""
    longest = max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    width = config.max_prompt_tokens + longest
    for role, source in (("student", student), ("teacher", teacher)):
        if source is not None and width > source.config.max_positions:
            raise UserError(
                f"max_prompt_tokens={config.max_prompt_tokens} and max_new_tokens={longest} make"
                f" {width} positions; {role}.model has {source.config.max_positions}"
            )
    d = config.distill
    asked = {"distill.top_k": d.top_k} if d.signal in ("topk", "student_topk") else {}
    if d.entropy_aware:
        asked["distill.entropy_top_k"] = d.entropy_top_k
    for key, k in asked.items():
        if teacher is not None and k > vocab_size:
            raise UserError(f"{key}={k} exceeds the vocabulary: it has {vocab_size} tokens")


def _data(
    config: Config, tokenizer: Any, eos_ids: tuple[int, ...]
) -> tuple[PromptStream, tuple[EvalSet, ...]]:
    d = config.data
    encode = encoder(config, tokenizer, eos_ids)
    source = open_source(d.train, config.seed, "train", keys(config))
    stream = PromptStream(
        source, encode, config.batch_size, config.seed, d.shuffle, weights=d.weights
    )
    if method_of(config).reads_completions(config):
        stream.check_completions()
    return stream, held_out_sets(config, encode)


@dataclass(frozen=True)
class Setup:
    """What a worker makes its roles from. It can be pickled: models are named, not loaded."""

    config: Config
    student: ModelSource
    teacher: ModelSource | None
    tokenizer: Any
    vocab_size: int
    eos_ids: tuple[int, ...]
    pad_id: int
    teacher_samples: bool
    opens_thought: bool
    row_multiple: int
    """Rows of a batch are a multiple of this: every mesh divides them."""
    run_dir: Path
    restore: Path | None
    """The checkpoint that the actor goes on from."""
    given: Mapping[str, bytes]
    """As in `Job`."""


def make_setup(
    job: Job, axes: Mapping[str, Axes], run_dir: Path, restore: Path | None = None
) -> Setup:
    return Setup(
        job.config,
        job.student,
        job.teacher,
        job.tokenizer,
        job.vocab_size,
        job.eos_ids,
        job.pad_id,
        job.teacher_samples,
        job.opens_thought,
        math.lcm(*(sizes.data * sizes.fsdp for sizes in axes.values())),
        run_dir,
        restore,
        job.given,
    )


def devices_for(config: Config) -> Callable[[int], Visible]:
    """Where the devices of a run are found: on this host, or in a cluster (`launcher`)."""

    def find(needed: int) -> Visible:
        launcher, why = _choose_launcher(config, needed)
        if launcher == "local":
            return replace(ensure_devices(needed), why=why)
        from jaxrl.runtime.ray.connect import connect  # an optional package

        seen = connect(config.ray, parse(config.mesh))
        return replace(seen, why="; ".join(filter(None, [why, seen.why])))

    return find


def _choose_launcher(config: Config, needed: int) -> tuple[str, str]:
    """`local` or `ray`, and why where it is not what everybody expects."""
    if config.launcher != "auto":
        return config.launcher, f"launcher={config.launcher}"
    if config.ray.address or os.environ.get("RAY_ADDRESS"):
        return "ray", ""
    here = accelerators_here()
    if 0 < here < needed:
        return "ray", f"this host has {here} of the {needed} accelerators needed"
    return "local", ""


def start_roles(setup: Setup, plan: Plan, log: Log) -> Crew:
    """One worker for each pool, as the plan's launcher makes them; roles of different pools load
    and build side by side. Those of one host that load the same GGUF file convert it once.
    """
    wait_s = setup.config.deadlines.startup
    with converted_once(_loads(setup, plan), plan, wait_s, log) as shared:
        sources = {
            name: replace(source, scratch=shared.get(source.path.resolve()))
            for name in ("student", "teacher")
            if (source := getattr(setup, name)) is not None
        }
        return LAUNCHERS[plan.launcher](replace(setup, **sources), plan, log)


def _loads(setup: Setup, plan: Plan) -> dict[str, tuple[ModelSource, str]]:
    """What each role reads when it starts; the rollout gets its weights from the actor."""
    config = setup.config
    found = {"reference": (setup.student, config.reference.compute_dtype)}
    if setup.restore is None:
        found["actor"] = (setup.student, config.actor.param_dtype)
    if setup.teacher is not None:
        found["teacher"] = (setup.teacher, config.teacher.compute_dtype)
    starting = set(plan.runs) - set(config.lazy)
    return {role: found[role] for role in sorted(found) if role in starting}


def _local(setup: Setup, plan: Plan, log: Log) -> LocalCrew:
    crew = LocalCrew(STOP_S)
    meshes = carve(plan.devices, plan.placement, plan.axes)
    deadline = setup.config.deadlines.startup
    starting: dict[str, Future] = {}
    try:
        for pool in plan.placement.pools:
            roles = [role for role in pool.roles if role in plan.runs]
            makers = {role: partial(MAKERS[role], setup, meshes) for role in roles}
            devices = [d for role in roles if role in meshes for d in meshes[role].devices.flat]
            starting |= crew.start(pool.name, devices, makers, deadline, setup.config.lazy)
        for role, started in starting.items():
            started.result()
            if role in setup.config.lazy:
                continue
            where = "without devices"
            if role in meshes:
                ids = device_list(device.id for device in meshes[role].devices.flat)
                where = f"on devices {ids}"
            log(f"{role}: ready in {started.times.seconds:.1f} s, {where}")
    except BaseException:
        crew.stop()
        raise
    return crew


def _ray(setup: Setup, plan: Plan, log: Log) -> Crew:
    from jaxrl.runtime.ray.crew import RayCrew  # an optional package

    crew = RayCrew(
        setup.config.ray,
        plan.placement,
        partial(pool_makers, setup, dict(plan.axes)),
        log,
        startup_s=setup.config.deadlines.startup,
        roles=plan.runs,
        lazy=setup.config.lazy,
        environment=worker_environment(setup.config.deterministic),
    )
    try:
        crew.start()
    except BaseException:
        crew.stop()
        raise
    return crew


LAUNCHERS: dict[str, Callable[[Setup, Plan, Log], Crew]] = {"local": _local, "ray": _ray}


def pool_makers(
    setup: Setup, axes: Mapping[str, Axes], placement: Placement, pool: int, devices: Sequence[Any]
) -> dict[str, Callable[[], Any]]:
    """Role -> what makes it, in a process that sees the devices of one pool and no others."""
    enable_compile_cache(setup.config.compile_cache)
    start, roles = placement.pools[pool].start, placement.pools[pool].roles
    meshes = {
        role: role_mesh([devices[i - start] for i in placement.roles[role].devices], axes[role])
        for role in roles
        if role in axes
    }
    return {role: partial(MAKERS[role], setup, meshes) for role in roles if role in MAKERS}


def make_actor(setup: Setup, meshes: Mapping[str, Mesh]) -> Actor:
    config, mesh = setup.config, meshes["actor"]
    method = method_of(config)
    frozen: dict[str, Any] = {}
    if config.learns_from_teacher and config.distill.signal == "hidden":
        frozen["teacher_head"] = _teacher_head(setup, mesh)
    receiver = meshes.get("rollout")  # elsewhere, where another process has it
    student = setup.student
    actor = Actor(
        config,
        student.config,
        mesh,
        load=lambda dtype: student.load(mesh, dtype, "stacked"),
        prepare=method.prepare(config),
        loss=method.make_loss(config, student.config, mesh, setup.vocab_size),
        finish=method.finish,
        frozen=frozen,
        receiver=receiver and param_shardings(student.config, receiver, config.rollout.layout),
        run_dir=setup.run_dir,
        restore=setup.restore,
    )
    verify_arrays("actor", (actor.state, frozen), mesh)
    return actor


def _teacher_head(setup: Setup, mesh: Mesh) -> jax.Array:
    """The teacher's LM head [V, Dt] on the actor's mesh; V is what both models share."""
    if setup.teacher is not None:
        head = setup.teacher.load_head(mesh, jnp.dtype(setup.config.teacher.dtype))
        return _first_rows(head, setup.vocab_size, mesh)
    there = remote_head(setup.config, setup.vocab_size)
    return put(there, _head_sharding(there.shape, mesh))


def make_rollout_role(setup: Setup, meshes: Mapping[str, Mesh]) -> Sampler:
    layout = setup.config.rollout.layout
    return _sampler(setup, setup.student, meshes["rollout"], layout, params=None)


def make_teacher(setup: Setup, meshes: Mapping[str, Mesh]) -> Teacher | RemoteTeacher:
    config, source = setup.config, setup.teacher
    if source is None:
        return RemoteTeacher(config, setup.vocab_size)
    mesh = meshes["teacher"]
    layout: Layout = "unstacked" if setup.teacher_samples else "stacked"
    params = source.load(mesh, jnp.dtype(config.teacher.dtype), layout)
    verify_arrays("teacher", params, mesh)
    projection = Projection(config.distill, mesh, setup.vocab_size)
    sampler = None
    if setup.teacher_samples:
        sampler = _sampler(setup, source, mesh, layout, params=params)
    return Teacher(Scorer(source.config, params, projection), sampler, config.offload.frozen)


def make_reference(setup: Setup, meshes: Mapping[str, Mesh]) -> Reference:
    config, mesh = setup.config, meshes["reference"]
    params = setup.student.load(mesh, jnp.dtype(config.reference.dtype), "stacked")
    verify_arrays("reference", params, mesh)
    return Reference(
        setup.student.config,
        params,
        mesh,
        config.sampling.temperature,
        config.distill.chunk_tokens,
        config.offload.frozen,
    )


def make_reward(setup: Setup, meshes: Mapping[str, Mesh]) -> Reward:
    config = setup.config.rewards
    longest = setup.config.max_prompt_tokens + setup.config.max_new_tokens
    startup = setup.config.deadlines.startup
    functions = RewardFunctions(config, setup.config.max_new_tokens, startup, setup.given)
    model = None
    if config.model is not None:
        model = RewardModel(
            open_reward(config.model),
            meshes["reward"],
            config.compute_dtype,
            config.batch_tokens,
            config.max_tokens or longest + TEMPLATE_TOKENS,
            setup.config.offload.frozen,
        )
    return Reward(functions, model)


def make_grouper(setup: Setup, meshes: Mapping[str, Mesh]) -> Grouper:
    config = setup.config.grouper
    assert config.model is not None
    return Grouper(
        config.model,
        meshes["grouper"],
        config.compute_dtype,
        config.batch_tokens,
        setup.opens_thought,
        setup.config.offload.frozen,
    )


MAKERS: dict[str, Callable[[Setup, Mapping[str, Mesh]], Any]] = {
    "actor": make_actor,
    "rollout": make_rollout_role,
    "teacher": make_teacher,
    "reference": make_reference,
    "reward": make_reward,
    "grouper": make_grouper,
}
"""Role -> (setup, the meshes of the roles that this process has) -> the role."""


def _sampler(setup: Setup, source: ModelSource, mesh: Mesh, layout: Layout, params: Any) -> Sampler:
    config = setup.config
    return Sampler(
        config,
        source.config,
        mesh,
        layout=layout,
        slots=config.rollout.slots or config.batch_size * config.group_size,
        tokenizer=setup.tokenizer,
        pad_id=setup.pad_id,
        eos_ids=setup.eos_ids,
        row_multiple=setup.row_multiple,
        vocab_size=setup.vocab_size,
        params=params,
    )


def _first_rows(head: jax.Array, rows: int, mesh: Mesh) -> jax.Array:
    """The head without the rows that the other model has not; cut once, not at every step."""
    if head.shape[0] == rows:
        return head
    sharding = _head_sharding((rows, head.shape[1]), mesh)
    return jax.jit(lambda head: head[:rows], out_shardings=sharding)(head)


def _head_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Rows over `tensor` and width over `fsdp`, where these divide them."""
    vocab = "tensor" if shape[0] % mesh.shape["tensor"] == 0 else None
    width = "fsdp" if shape[1] % mesh.shape["fsdp"] == 0 else None
    return NamedSharding(mesh, PartitionSpec(vocab, width))
