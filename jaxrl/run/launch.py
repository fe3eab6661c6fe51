"""Starts the roles of a plan: finds devices, starts workers, and builds the roles in them."""

from __future__ import annotations

import json
import os
import platform
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import cloudpickle
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl.algorithms import protocols
from jaxrl.checkpoint.fingerprint import BASE_WEIGHTS
from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.config.schema import Config
from jaxrl.config.section import DType
from jaxrl.errors import UserError
from jaxrl.formats import hub
from jaxrl.formats.opened import Checksums, reading
from jaxrl.models.kernels import Use, target_of, try_kernels
from jaxrl.models.lora import frozen_and_trained
from jaxrl.models.parameters import Layout, Params, param_shardings
from jaxrl.plan.table import Plan
from jaxrl.process import atomic_files
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.gpu_memory import worker_share
from jaxrl.process.json_types import parse_json, read_file
from jaxrl.process.plugin import give_objects
from jaxrl.process.streams import to_stderr
from jaxrl.process.xla_flags import worker_environment
from jaxrl.roles.actor import Actor
from jaxrl.roles.grouper import Grouper
from jaxrl.roles.reference import Reference
from jaxrl.roles.reward import Reward, RewardModel, open_reward
from jaxrl.roles.rollout import Sampler
from jaxrl.run import job
from jaxrl.runtime.worker import Future, LocalWorkerGroup, WorkerGroup
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.ledger import HOST
from jaxrl.sharding.mesh import (
    Visible,
    accelerators_here,
    ensure_devices,
    role_mesh,
    role_meshes,
    verify_arrays,
)
from jaxrl.sharding.placement import Placement, device_list, parse

Log = Callable[[str], None]
NOT_REHEARSED = ("cpu",)
"""Platforms whose rollout rehearses nothing while the weights are read: its launches take the cores
that read them, and the first step came 4 to 7% later (benchmarks/RESULTS.md)."""
OPENED = "opened"
"""Folder in a run directory: of each worker's weights, file -> piece of a tensor -> CRC-32."""
STOP_S = 10.0
"""Longest wait for the workers at the end of a run."""


def devices_for(config: Config) -> Callable[[int], Visible]:
    """Returns a function that finds the devices of a run, on this host or in a cluster
    (`launcher`)."""

    def find(needed: int) -> Visible:
        launcher, why = config.launcher, f"launcher={config.launcher}"
        if launcher == "auto":
            launcher, why = "local", ""
            if config.ray.address or os.environ.get("RAY_ADDRESS"):
                launcher = "ray"
            elif 0 < (here := accelerators_here()) < needed:
                launcher = "ray"
                why = f"this host has {here} of the {needed} accelerators needed"
        if launcher == "local":
            return replace(ensure_devices(needed), why=why)
        from jaxrl.runtime.ray.connect import connect  # an optional package

        seen = connect(config.ray, parse(config.mesh))
        return replace(seen, why="; ".join(filter(None, [why, seen.why])))

    return find


def start_roles(setup: job.Setup, plan: Plan, log: Log) -> WorkerGroup:
    """Starts one worker for each pool, with the plan's launcher, and builds the roles in them, all
    pools in parallel.

    Returns:
        The running workers. If one fails to start, all are stopped and its error is raised.
    """
    if plan.launcher == "ray":
        return _start_in_ray(setup, plan, log)
    worker_group = LocalWorkerGroup(STOP_S, protocols.protocols(setup.config))
    meshes = role_meshes(plan.devices, plan.placement, plan.axes)
    deadline = setup.config.deadlines.startup
    starting: dict[str, Future[object]] = {}
    try:
        for pool in plan.placement.pools:
            roles = [role for role in pool.roles if role in plan.runs]
            makers = {role: partial(build_role, role, setup, meshes) for role in roles}
            devices = [d for role in roles if role in meshes for d in meshes[role].devices.flat]
            starting |= worker_group.start(pool.name, devices, makers, deadline, setup.config.lazy)
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
        worker_group.stop()
        raise
    return worker_group


def _start_in_ray(setup: job.Setup, plan: Plan, log: Log) -> WorkerGroup:
    from jaxrl.runtime.ray.connect import address_of, import_ray  # an optional package

    import_ray(address_of(setup.config.ray))
    from jaxrl.runtime.ray.worker_group import RayWorkerGroup

    uses = {role: plan.inputs.kernel_uses(plan.config, [role]) for role in plan.runs}
    worker_group = RayWorkerGroup(
        setup.config.ray,
        plan.placement,
        partial(pool_makers, setup.packed(), dict(plan.axes), uses),
        log,
        startup_s=setup.config.deadlines.startup,
        roles=plan.runs,
        lazy=setup.config.lazy,
        environment=worker_environment(setup.config.deterministic, setup.run_dir)
        | worker_share()
        | hub.hub_variables(),
        protocols=protocols.protocols(setup.config),
    )
    try:
        worker_group.start()
    except BaseException:
        worker_group.stop()
        raise
    return worker_group


def pool_makers(
    packed: bytes,
    axes: Mapping[str, Axes],
    uses: Mapping[str, Sequence[Use]],
    placement: Placement,
    pool: int,
    devices: Sequence[jax.Device],
) -> dict[str, Callable[[], object]]:
    """Maps each role to the function that makes it, in a process that sees the devices of one pool
    and no others.

    Args:
        packed: a `Setup`, which Ray itself would unpack where no error of its models is caught.
        uses: of each role's models (`kernels.try_kernels`).
    """
    try:
        setup: job.Setup = cloudpickle.loads(packed)
        give_objects(setup.given)
    except UserError as error:
        raise UserError(
            f"{error}. The run read it when it began: it has changed since, or is another one on"
            f" {platform.node()}"
        ) from error
    enable_compile_cache(setup.config.compile_cache)
    start, roles = placement.pools[pool].devices.start, placement.pools[pool].roles
    for note in try_kernels(devices, [use for role in roles for use in uses.get(role, ())]):
        to_stderr(note)
    meshes = {
        role: role_mesh([devices[i - start] for i in placement.roles[role].devices], axes[role])
        for role in roles
        if role in axes
    }
    return {role: partial(build_role, role, setup, meshes) for role in roles if role in MAKERS}


def make_actor(setup: job.Setup, meshes: Mapping[str, Mesh]) -> protocols.ActorRole:
    config, mesh = setup.config, meshes["actor"]
    student, loaded = setup.student, None
    frozen = setup.teacher.frozen(mesh, student.config.final_softcap)
    if (receiver := meshes.get("rollout")) is not None:  # else another process has it
        shardings = param_shardings(student.config, receiver, "unstacked")
        _, loaded = frozen_and_trained(shardings)
    base = _base(setup, mesh, config.base_dtype, "stacked")

    def load(dtype: DTypeLike) -> Params:
        """Loads the parameters that the actor trains, as they are before training."""
        if student.config.lora is None:
            return student.load(mesh, dtype, "stacked")
        return student.load_adapters(mesh, dtype, config.seed)

    actor = Actor(
        config,
        student.config,
        mesh,
        load=load,
        vocab_size=setup.vocab_size,
        frozen=frozen,
        rollout_shardings=loaded,
        run_dir=setup.run_dir,
        restore=setup.restore,
        teacher=setup.teacher.receiver(meshes.get("teacher"), setup.teacher_samples),
        base=base,
        base_name=student.base_name,
        base_digest=setup.opened.get(BASE_WEIGHTS),
    )
    verify_arrays("actor", (actor.state, frozen, base), mesh)
    return actor


_BASES: dict[tuple[object, ...], tuple[Params, list[weakref.ref[jax.Array]]]] = {}
"""Frozen base weights in use in this process: (tree structure, weak references to leaves)."""


def _base(setup: job.Setup, mesh: Mesh, dtype: DType, layout: Layout) -> Params:
    """Loads the frozen base weights of a model with adapters; returns {} without adapters. Roles
    that ask for the same ones on the same mesh share the arrays."""
    if setup.student.config.lora is None:
        return {}
    key = (setup.student.name, setup.student.config.quantised, mesh, dtype, layout)
    form, held = _BASES.get(key, (None, []))
    leaves = [array for array in (ref() for ref in held) if array is not None]
    if (
        held
        and len(leaves) == len(held)
        and not any(array.is_deleted() or array.sharding.memory_kind == HOST for array in leaves)
    ):
        return jax.tree.unflatten(form, leaves)
    params: Params = setup.student.load(mesh, jnp.dtype(dtype), layout)
    leaves, form = jax.tree.flatten(params)
    _BASES[key] = form, [weakref.ref(leaf) for leaf in leaves]
    return params


def make_rollout_role(setup: job.Setup, meshes: Mapping[str, Mesh]) -> protocols.RolloutRole:
    mesh, rollout = meshes["rollout"], setup.config.rollout
    base = _base(setup, mesh, rollout.compute_dtype, "stacked" if rollout.merge else "unstacked")
    if base:
        verify_arrays("rollout", base, mesh)
    sampler = _sampler(setup, setup.student, mesh, params=None, base=base)
    others = [other for role, other in meshes.items() if role != "rollout"]
    idle = not any(set(other.devices.flat) & set(mesh.devices.flat) for other in others)
    if idle and target_of(mesh.devices.flat).platform not in NOT_REHEARSED:
        sampler.rehearse(setup.first_prompts)
    return sampler


def make_teacher(setup: job.Setup, meshes: Mapping[str, Mesh]) -> protocols.TeacherRole:
    sampler = partial(_sampler, setup, teacher=True) if setup.teacher_samples else None
    return setup.teacher.make(meshes.get("teacher"), setup.open_tokenizer, sampler)


def make_reference(setup: job.Setup, meshes: Mapping[str, Mesh]) -> protocols.ReferenceRole:
    config, mesh = setup.config, meshes["reference"]
    start, dtype = setup.student.start, config.reference.compute_dtype
    params = {} if setup.student.adapter else _base(setup, mesh, dtype, "stacked")
    params = params or start.load(mesh, jnp.dtype(dtype), "stacked")
    verify_arrays("reference", params, mesh)
    return Reference(config, start.config, params, mesh)


def make_reward(setup: job.Setup, meshes: Mapping[str, Mesh]) -> protocols.RewardRole:
    config, model = setup.config, None
    if config.reward.model is not None:
        model = RewardModel(config, open_reward(config.reward.model), meshes["reward"])
    return Reward(job.reward_functions, config, setup.given, model)


def make_grouper(setup: job.Setup, meshes: Mapping[str, Mesh]) -> protocols.GrouperRole:
    return Grouper(setup.config, meshes["grouper"])


MAKERS: dict[str, Callable[[job.Setup, Mapping[str, Mesh]], object]] = {
    "actor": make_actor,
    "rollout": make_rollout_role,
    "teacher": make_teacher,
    "reference": make_reference,
    "reward": make_reward,
    "grouper": make_grouper,
}
"""Role -> (setup, the meshes of the roles that this process has) -> the role."""


def build_role(role: str, setup: job.Setup, meshes: Mapping[str, Mesh]) -> object:
    """Makes a role of what the run began with, also in a worker that is started again.

    The record in the run directory has the checksums of the weights that were read. It counts for
    workers of this run that are started again, and for a run that resumes; where that may have
    other weights (`resume_changed`), what has changed is reported and noted.
    """
    job.check_inputs(setup, role)
    file = setup.run_dir / OPENED / f"{role}-{jax.process_index()}.json"
    before: Checksums = {}
    session = ""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        noted = parse_json(read_file(file))
        if setup.restore is not None or noted["session"] == setup.session:
            before = {name: dict(pieces) for name, pieces in noted["weights"].items()}
            session = noted["session"]
    with reading() as read:
        made = MAKERS[role](setup, meshes)
    resumed = session != setup.session
    weights, changed = read.checksums(
        before, lambda file: resumed and job.may_have_changed(setup, role, file)
    )
    for name in changed:
        to_stderr(f"{role}: changed since: {name}")
    if weights:
        text = json.dumps(
            {"session": setup.session, "weights": weights, "changed": changed}, indent=0
        )
        with suppress(OSError):  # a full disk: a worker that is started again is not compared
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.put_file(file, lambda path: path.write_text(text, encoding="utf-8"))
    return made


def _sampler(
    setup: job.Setup,
    source: ModelSource,
    mesh: Mesh,
    params: Params | None,
    base: Params | None = None,
    teacher: bool = False,
) -> Sampler:
    """Builds a `Sampler`, for a teacher with the teacher's tokenizer where that has its own;
    `params` are None if the weights come later, `base` is what adapters are on."""
    config, tokenizer, eos_ids = setup.config, setup.open_tokenizer(), setup.eos_ids
    aligner = setup.teacher.open_aligner() if teacher else None
    if aligner is not None:
        tokenizer, eos_ids = aligner.teacher.tokenizer, aligner.teacher.end_ids
    made = partial(
        job.episodes,
        config,
        tokenizer,
        run_dir=setup.answers or setup.run_dir,
        given=setup.given,
        asks=setup.answers is None,
    )
    return Sampler(
        config,
        source.config,
        mesh,
        slots=config.slots,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        vocab_size=setup.vocab_size,
        packing=setup.packing(target_of(mesh.devices.flat)),
        params=params,
        base=base,
        teacher=teacher,
        max_new_tokens=None if aligner is None else config.teacher_new_tokens,
        **({} if teacher else {"episodes": made}),
    )
