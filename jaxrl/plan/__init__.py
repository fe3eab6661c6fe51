"""The plan of a run: who gets which devices, and how much memory each role takes there.

Made before any weight is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jaxrl.algorithms.methods import needed_roles
from jaxrl.checkpoint.model_source import lora_of, resolve_model
from jaxrl.config.schema import Config
from jaxrl.errors import UserError, counted, user_path
from jaxrl.formats import hf, peft
from jaxrl.formats.hub import WEIGHTS, find_folder
from jaxrl.formats.weights import gguf_parts
from jaxrl.models.bert import read_encoder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import (
    GPU,
    TPU,
    UNKNOWN_GPU,
    default_dtype,
    target_of,
    try_kernels,
    why_no_step_kernel,
    why_not_fused,
)
from jaxrl.plan.advice import (
    advise,
    chosen_keys,
    faster_keys,
    largest_batch,
    with_choices,
    with_loss_chunk,
)
from jaxrl.plan.peaks import largest_arrays, margin_of, pool_peaks, role_accounts
from jaxrl.plan.plan_inputs import GB, HostMemory, PlanInputs, PoolPeak, Setting
from jaxrl.plan.predicted import schedule_notes
from jaxrl.plan.search import Candidate, get_key, set_key
from jaxrl.plan.table import Plan
from jaxrl.process.gpu_memory import VARIABLE as SHARE_VARIABLE
from jaxrl.process.gpu_memory import gpu_share, taken_share
from jaxrl.process.json_types import Keywords
from jaxrl.roles.actor import checkpoint_notes
from jaxrl.roles.optimizer import warmup_note
from jaxrl.roles.reward import read_reward
from jaxrl.roles.rollout import rollout_notes
from jaxrl.runtime.cluster import ClusterDevice
from jaxrl.sharding.mesh import Visible, bytes_limit
from jaxrl.sharding.placement import Placement, check_visible, place, place_without_devices
from jaxrl.sharding.targets import TargetMachine
from jaxrl.teacher.kinds import kind_of

GPU_SIZES = (8, 12, 16, 24, 40, 80, 141)
"""GB of the GPUs that a plan made without one is judged for."""
CLOSE = 1.1
"""Times a device's limit, up to which the compiler may say that a run fits which the plan says does
not."""
PROCESS_BYTES = 600_000_000
"""What a process grows by from its plan to the end of a run, arrays aside: the tokenizers' library,
compiled programs, buffers of the allocator. Measured on the quickstart."""


def target_plan(
    config: Config, roles: Sequence[str], target: TargetMachine, *, room: bool = False
) -> Plan:
    """Returns the plan of a run on a machine that is not present, with its own verdict.

    Args:
        room: as of `make_plan`.

    Raises:
        UserError: the mesh needs more devices than the machine has, or does not suit the models.
    """

    def visible(needed: int) -> Visible:
        if needed > target.count:
            raise UserError(
                f"the mesh {config.mesh!r} needs {counted(needed, 'device')}, and {target.name} has"
                f" {target.count}: set --mesh to at most {target.count}, or name a larger target"
            )
        return Visible(target.devices, None)

    plan = make_plan(config, roles, visible, target.usable / GB, room=room)
    first, *others = plan.verdict
    kind, size = target.devices[0].device_kind, target.usable / GB
    where = f"on {target.name}, of whose {kind} a run may use {size:.1f} GB each"
    verdict, colon, why = first.partition(": does not fit")
    first = f"{verdict}{colon} {where}{why}" if colon else f"{first} {where}"
    return replace(plan, verdict=(*others, first) if plan.fits else (first, *others))


def make_plan(
    config: Config,
    roles: Sequence[str],
    visible: Callable[[int], Visible] | None = None,
    limit_gb: float | None = None,
    *,
    room: bool = False,
) -> Plan:
    """Places the roles and counts their memory, from the models' `config.json` alone.

    Args:
        roles: what the algorithm asks for.
        visible: devices needed -> those that a run would get (`ensure_devices`); None plans for a
            machine that is not here.
        limit_gb: memory of a device of a machine that is not here; None asks the devices.
        room: says further what the devices have room for (larger batches, faster keys), and on a
            host without any which GPUs the run fits on.

    Raises:
        UserError: a mesh that cannot be, in one line with both numbers.
    """
    slices = {role: section.devices for role, section in config.roles.items()}
    served = [role for role in roles if role in services(config)]
    placement = place(config.mesh, [role for role in roles if role not in served], slices)
    student = model_config(config.student.model)
    student = replace(student, lora=lora_of(config), quantised=config.quantised)
    teachers = kind_of(config).planned_models(config, model_config, student)
    teacher = max(teachers, key=lambda t: t.n_params, default=None)
    seen = Visible((), None) if visible is None else visible(placement.n_devices)
    if seen.devices:
        placement = check_visible(placement, len(seen.devices))
    for role in served:
        placement = place_without_devices(placement, role)
    pool = placement.pool_of("rollout").roles if "rollout" in placement.roles else ()
    if config.streams and (beside := [role for role in pool if role != "rollout"]):
        raise UserError(
            f"schedule=streaming: the rollout samples all the time, and shares its devices with"
            f" {', '.join(beside)} in mesh={config.mesh}; give it its own, as in"
            " mesh=actor=1,rollout=1, or set schedule=serial"
        )
    roles = tuple(role for role in roles if role not in served)
    frozen: Keywords = {"several": teachers if len(teachers) > 1 else ()}
    if "reward" in roles and config.reward.model is not None:
        frozen["reward"] = read_reward(config.reward.model)[1]
    if "grouper" in roles and config.grouper.model is not None:
        frozen["grouper"] = read_encoder(find_folder(config.grouper.model))[0]
    if student.lora is not None and not (user_path(config.student.model) / "config.json").is_file():
        frozen["adapted"] = resolve_model(config.student.model).adapter is not None
    mapped = 0
    if seen.emulated:  # the files of GGUF models stay mapped once they are read
        names = {config.student.model, *config.teacher_models.values()}
        described = (name for name in names if not (user_path(name) / "config.json").is_file())
        for path in {resolve_model(name).path for name in described}:
            files = (path.with_name(name) for name in gguf_parts(path.name))
            mapped += sum(file.stat().st_size for file in files if file.is_file())
    given = (config, roles, placement, student, teacher, seen, limit_gb, frozen, mapped)
    return build(*given, room=room)


def planned_run(config: Config, limit: int | None) -> Candidate:
    """Returns a run as configured, on devices elsewhere, to try changes of.

    Args:
        limit: bytes of each device; None where nobody knows.
    """
    inputs = make_plan(config, needed_roles(config), None, limit and limit / GB).inputs
    run = config.with_dtypes(default_dtype(inputs.target))
    return Candidate(run, inputs, completed=lambda *tried: with_choices(*tried)[0])


def services(config: Config) -> dict[str, str]:
    """Maps each role of the run that takes no devices to the reason."""
    found = {}
    if why := kind_of(config).without_devices(config):
        found["teacher"] = why
    if config.learns_from_rewards and config.reward.model is None:
        found["reward"] = "its functions run in separate processes"
    return found


def without_weights(config: Config) -> list[str]:
    """Returns the keys of models that are folders with a `config.json` and no weights."""
    sections = ("student", "teacher", "reward", "grouper")
    models = {f"{role}.model": getattr(config, role).model for role in sections}
    models |= {config.teacher_key(name): model for name, model in config.teacher_models.items()}
    return [key for key, name in models.items() if name and _only_described(name)]


def _only_described(name: str) -> bool:
    folder = user_path(name)
    weights = any((folder / file).is_file() for file in WEIGHTS)
    adapters = (folder / peft.CONFIG).is_file()
    return (folder / "config.json").is_file() and not weights and not adapters


def model_config(name: str) -> DecoderConfig:
    """Returns the config of a model, held against its files; of a folder without weights, what its
    `config.json` says."""
    if _only_described(name):
        return hf.read_config(user_path(name))
    return resolve_model(name).config


def build(
    config: Config,
    roles: Sequence[str],
    placement: Placement,
    student: DecoderConfig,
    teacher: DecoderConfig | None,
    seen: Visible,
    limit_gb: float | None = None,
    frozen: Keywords | None = None,
    mapped: int = 0,
    *,
    room: bool = False,
) -> Plan:
    """Plans a placement on the devices `seen`; where there are none, on GPUs elsewhere.

    Args:
        mapped: bytes of the files that stay mapped on each host.
        room: as of `make_plan`.
    """
    target = target_of(seen.devices) if seen.devices else UNKNOWN_GPU
    asked, config = config, config.with_dtypes(default_dtype(target))

    # A process of another launcher than Ray's has a host alone. Emulated devices share the free
    # memory of their host, where that is known, with each process.
    names = [getattr(device, "host", device.process_index) for device in seen.devices]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    by_host: dict[str, list[int]] = {}
    emulated = seen.devices if target.platform == "cpu" and limit_gb is None else ()
    for i, device in enumerate(emulated):
        host = device.host if isinstance(device, ClusterDevice) else "this host"
        by_host.setdefault(host, []).append(i)
    hosts = []
    for host, own in by_host.items():
        if (free := bytes_limit(seen.devices[own[0]])) is not None:
            processes = len({seen.devices[i].process_index for i in own})
            counts = tuple(len({*own}.intersection(pool.devices)) for pool in placement.pools)
            hosts.append(HostMemory(host, free, processes * PROCESS_BYTES + mapped, counts))

    # The smallest device of each pool counts; of accelerators that all know their own.
    limits: list[int | None] = []
    for pool in placement.pools:
        sizes = [None if limit_gb is None else round(limit_gb * GB)]
        if limit_gb is None and seen.devices and not hosts:
            sizes = [bytes_limit(seen.devices[i]) for i in pool.devices]
        known = [size for size in sizes if size is not None]
        limits.append(min(known) if known and len(known) == len(sizes) else None)
    inputs = PlanInputs(
        placement,
        tuple(roles),
        student,
        teacher,
        target,
        limits=tuple(limits),
        host_of=tuple(numbers[name] for name in names) if len(numbers) > 1 else (),
        hosts=tuple(hosts),
        **(frozen or {}),
    )

    try_kernels(seen.devices, inputs.kernel_uses(config, inputs.roles))  # the plan counts them
    run = config
    config, chosen = (config, ()) if seen.emulated else with_choices(config, inputs)
    sized, more = with_loss_chunk(config, inputs)
    for key, value in chosen_keys(sized, inputs).items():
        if value != get_key(run, key):
            run = set_key(run, key, value)
    m = Setting(sized, inputs)
    accounts = role_accounts(m)
    pools = inputs.pools(accounts)

    shares = []  # of the GPUs, for each kind that there is
    for device in seen.devices:
        limit = bytes_limit(device) if device.platform in GPU else None
        if limit is not None:
            share = getattr(device, "share", None) or taken_share()  # a cluster's says its own
            whole = f"of each GPU's {limit / share / GB:.0f} GB"
            shares.append(f"{whole} jax takes {share:.0%}: {SHARE_VARIABLE} changes that")
    notes = (
        f"launcher: {seen.launcher} ({seen.why})" if seen.why else None,
        seen.note,
        *dict.fromkeys(shares),
        *placement.notes,
        *chosen,
        *more,
        *_mesh_notes(m),
        *checkpoint_notes(config, student, here=limit_gb is None),
        *_compute_notes(asked, run, inputs),
        warmup_note(config.optimizer, config.steps * config.updates_per_batch),
        *rollout_notes(m),
        *(schedule_notes(m) if room else ()),
        *transfer_notes(m),
        *(host.note([pool.bytes for pool in pools]) for host in hosts),
        f"memory: counted from the traced programs, plus a margin of {margin_of(target):.0%}",
        *largest_arrays(m, accounts),
    )

    verdict = [_verdict(pools, hosts)]
    if room:
        verdict += filter(None, [largest_batch(config, inputs)])
        verdict += faster_keys(sized, inputs)

    if seen.emulated and (n := placement.n_devices) > 1:
        cores = counted(os.cpu_count() or 1, "CPU core")
        verdict[0] += f" (the {n} devices are emulated and share {cores} of this host)"

    elsewhere = fits_elsewhere = None
    if room and (seen.emulated or not seen.devices) and limit_gb is None:
        gpus = replace(inputs, target=UNKNOWN_GPU, hosts=())
        elsewhere = _elsewhere(asked.with_dtypes(default_dtype(UNKNOWN_GPU)), gpus)
    if elsewhere is None:
        advice = advise(config, inputs)
    else:
        lines, advice, smallest = elsewhere
        fits_elsewhere = smallest is not None
        verdict += lines
        if seen.devices:
            here = verdict[0].removeprefix("verdict: ")
            verdict[0] = f"on the CPU of this host, which has no accelerator: {here}"
        words = f"of {smallest} GB and more" if smallest else f"of up to {GPU_SIZES[-1]} GB"
        fits = "fits" if smallest else "does not fit"
        verdict.append(f"verdict: {fits} on GPUs {words}; --target h100x8 plans for a machine")
    return Plan(
        run,
        m,
        seen.devices,
        seen.launcher,
        accounts,
        pools,
        tuple(filter(None, notes)),
        tuple(verdict),
        tuple(advice),
        fits_elsewhere=fits_elsewhere,
    )


def _compute_notes(asked: Config, config: Config, inputs: PlanInputs) -> Iterator[str]:
    """Yields the dtypes that were chosen for the roles, what is slower than it looks, and the roles
    of an accelerator that compute in a dtype of its kernels and have none for their attention."""
    wanted = {r: asked.roles[r].dtype for r in inputs.roles}
    chosen = [role for role, dtype in wanted.items() if dtype is None]
    if chosen:
        dtype = default_dtype(inputs.target)
        where = "the default of accelerators"
        if inputs.on_cpu:
            where = "a CPU computes in it anyway"
        elif dtype == "float32":
            dim = inputs.model(chosen[0]).head_dims[0]
            missing = why_not_fused(inputs.target, dim, "bfloat16")
            where = f"this GPU has no tensor cores for bfloat16, nor fused attention: {missing}"
        yield f"dtype={dtype} of {', '.join(chosen)}: {where}"
    slow = [role for role, dtype in wanted.items() if dtype == "bfloat16"]
    if inputs.on_cpu and slow:
        yield (
            f"dtype=bfloat16 of {', '.join(slow)}: a CPU computes it in float32 from copies of the"
            " weights, slower than float32 and with additional memory for the copies"
        )
    if inputs.on_cpu:
        return
    dtypes = ("bfloat16", "float32") if inputs.target.platform == TPU else ("bfloat16",)
    uses = [(role, *use) for role in inputs.roles for use in inputs.kernel_uses(config, [role])]
    uses = [use for use in uses if use[2] in dtypes]
    why: dict[str, dict[str, None]] = {}
    for role, dim, computed, _ in uses:
        if (reason := why_not_fused(inputs.target, dim, computed)) is not None:
            why.setdefault(reason, {})[role] = None
    for reason, roles in why.items():
        yield (
            f"attention of {', '.join(roles)}: {reason}; matrix products are used, slower and with"
            " the scores in memory"
        )
    steps = (why_no_step_kernel(inputs.target, *use[1:3]) for use in uses if use[3])
    for reason in filter(None, dict.fromkeys(steps)):
        yield (
            f"sampling: {reason}; each decode step reads the cache as far as its longest"
            " sequence reaches, for every slot"
        )


def transfer_notes(m: Setting) -> Iterator[str]:
    """Yields what a run on several hosts sends through the object store in a step, in seconds."""
    for (sender, receiver), size in m.sent.items():
        seconds, what = m.store_seconds(sender, receiver), "the weights"
        if sender == "teacher":
            what = f"its signal ({m.config.distill.signal})"
        if seconds is not None:
            yield (
                f"{sender} to {receiver}: {what}, {size / GB:.2f} GB a step, take about"
                f" {seconds:.1f} s through Ray's object store (docs/cluster.md)"
            )


def _mesh_notes(m: Setting) -> Iterator[str]:
    """Yields what the mesh does to the models and to the batch without being asked."""
    config, inputs, axes = m.config, m.inputs, m.axes
    for key in without_weights(config):
        yield f"{key}: no weights here, only a config.json: planned for another machine"
    for model in dict.fromkeys(inputs.model(role) for role in axes):
        if isinstance(model, DecoderConfig) and model.experts is not None:
            of = ", ".join(role for role in axes if inputs.model(role) == model)
            yield (
                f"{of}: a mixture of {model.n_params / 1e9:.2f} billion parameters, of which"
                f" {model.n_active / 1e9:.2f} compute a token"
            )
    for role, why in services(config).items():
        yield f"{role}: no devices here, {why}"
    if kind_of(config).unknown_model(config):
        yield "teacher: its model is not known here; what it sends is planned as the student's size"
    for role, sizes in axes.items():
        model, kv_heads, states = inputs.model(role), [], 0
        if isinstance(model, DecoderConfig):
            kv_heads = [one.n_kv_heads for one in model.shapes]
            states = 0 if model.delta is None else model.delta.k_heads
        for heads in dict.fromkeys(kv_heads or [model.n_heads]):
            if heads % sizes.tensor:
                yield (
                    f"{role}: tensor={sizes.tensor} does not divide the {heads} KV heads:"
                    " each device keeps all"
                )
            elif heads % sizes.heads:
                yield (
                    f"{role}: {sizes.heads} parts of the heads (tensor times context) do not divide"
                    f" the {heads} KV heads: for attention each device gathers all"
                )
        width = "fsdp times context" if sizes.context > 1 else "fsdp"
        for axis, size, name, dim in (
            (width, sizes.weights, "d_model", model.d_model),
            ("tensor", sizes.tensor, "d_ff", model.d_ff),
            ("tensor", sizes.tensor, "vocabulary", model.vocab_size),
            ("tensor", sizes.tensor, "key heads of layers with a state, a number", states),
        ):
            if dim % size:
                yield (
                    f"{role}: {axis}={size} does not divide the {name} of {dim}:"
                    " these weights are replicated on each device"
                )
    if m.padded_rows != m.sequences:
        yield (
            f"the {m.sequences} sequences of a batch are padded to {m.padded_rows},"
            " so that every mesh divides them"
        )


def _verdict(pools: Sequence[PoolPeak], hosts: Sequence[HostMemory] = ()) -> str:
    if not hosts and all(pool.limit is None for pool in pools):
        return "verdict: no limit is known"
    over = [pool.excess for pool in pools if not pool.fits]
    if hosts:
        over = [text for host in hosts if (text := host.excess(pools))]
    if not over:
        return "verdict: fits"
    close = not hosts and all(p.limit is None or p.bytes <= CLOSE * p.limit for p in pools)
    measure = "; by so little that --dry-run --compile should decide" if close else ""
    return f"verdict: does not fit: {'; '.join(over)}{measure}"


def _elsewhere(
    config: Config, inputs: PlanInputs
) -> tuple[list[str], list[str], int | None] | None:
    """Plans the run for GPUs: a line for each of the usual sizes, the advice for the largest of
    those that are too small, and the smallest that is large enough. None for models that fit
    anywhere.

    What each GPU needs is counted with the axes that the roles get on the smallest size that fits.
    Sizes of less than half of that have one line together, and no advice.
    """
    share, before = gpu_share(), inputs.axes(config)
    needed, lines, advice = pool_peaks(Setting(config, inputs)), list[str](), list[str]()
    largest: tuple[int, Config, PlanInputs] | None = None  # of those that are too small
    if max(pool.bytes for pool in needed) < GB:
        return None
    smallest: int | None = None
    far_too_small: list[int] = []
    for k, size in reversed([*enumerate(GPU_SIZES)]):
        usable = round(size * share * GB)
        there = replace(inputs, limits=(usable,) * len(inputs.placement.pools))
        choice, _ = with_choices(config, there)
        pools = pool_peaks(Setting(choice, there))
        if 2 * usable < max(pool.bytes for pool in pools) and size != GPU_SIZES[-1]:
            # Where nothing fits, the choices are those that take least: no less on smaller ones.
            far_too_small = [*GPU_SIZES[: k + 1]]
            break
        verdict = _verdict(pools).removeprefix("verdict: ")
        axes = there.axes(choice).items()
        split = [f"{role}: {sizes}" for role, sizes in axes if sizes != before[role]]
        asked = chosen_keys(config, there)
        chosen = chosen_keys(choice, there).items()
        split += [f"{key}={value}" for key, value in chosen if value != asked[key]]
        verdict += f" ({', '.join(split)})" if split else ""
        lines.insert(0, f"on GPUs of {size} GB, of which jax takes {share:.0%}: {verdict}")
        if all(pool.fits for pool in pools):
            needed, smallest, largest = pools, size, None
        elif largest is None:
            largest = size, choice, there
    if largest is not None:
        size, choice, there = largest
        advice = [f"for {size} GB: {line}" for line in advise(choice, there)]
    if far_too_small:
        sizes = ", ".join(map(str, far_too_small))
        lines.insert(0, f"on GPUs of {sizes} GB: does not fit: less than half of what one needs")
    each = [f"{peak.pool.name} {peak.bytes / GB:.1f} GB ({peak.moment})" for peak in needed]
    return ["each GPU needs: " + ", ".join(each), *lines], advice, smallest
