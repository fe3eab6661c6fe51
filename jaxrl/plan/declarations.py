"""What the roles of a run declare: their programs, for the devices of a machine, and the arrays
that they keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from jaxrl.config.schema import Config
from jaxrl.models.kernels import compiling_for
from jaxrl.plan.live_arrays import Array, live_arrays
from jaxrl.plan.plan_inputs import GB, MB, Account, PlanInputs, Setting, peak
from jaxrl.roles.actor import actor_programs, actor_residents
from jaxrl.roles.declared import Program, Resident, local_bytes
from jaxrl.roles.grouper import grouper_programs, grouper_residents
from jaxrl.roles.reference import reference_programs, reference_residents
from jaxrl.roles.reward import reward_programs, reward_residents
from jaxrl.roles.rollout import rollout_programs, rollout_residents
from jaxrl.roles.run_shapes import RunArrays
from jaxrl.sharding.mesh import DeviceFacts, abstract_mesh, role_meshes
from jaxrl.sharding.targets import DescribedDevice
from jaxrl.teacher.local_teacher import teacher_arrays, teacher_programs
from jaxrl.types import Tree

PROGRAMS: dict[str, Callable[[RunArrays], Iterator[Program]]] = {
    "actor": actor_programs,
    "rollout": rollout_programs,
    "teacher": teacher_programs,
    "reference": reference_programs,
    "reward": reward_programs,
    "grouper": grouper_programs,
}
"""Role -> the function of its module that yields its programs."""
RESIDENTS: dict[str, Callable[[Config], tuple[Resident, ...]]] = {
    "actor": actor_residents,
    "rollout": rollout_residents,
    "teacher": teacher_arrays,
    "reference": reference_residents,
    "reward": reward_residents,
    "grouper": grouper_residents,
}
"""Role -> the function of its module that returns the arrays that it keeps."""
LARGEST = 3
"""Arrays at a program's peak that are named."""
Form = tuple[tuple[int, ...], Any, PartitionSpec]
"""Shape, dtype and how it is divided, of an array."""


@dataclass(frozen=True)
class Kept:
    """Resident arrays of a role, and the roles that hold these very arrays too."""

    resident: Resident
    others: tuple[Resident, ...]
    bytes: int
    """On one device."""

    @property
    def title(self) -> str:
        """Returns the name in the plan."""
        roles = [f"the {other.role}'s too" for other in self.others]
        return ", ".join([self.resident.title, *roles])

    def away(self, stage: str) -> bool:
        """Returns whether they are not on the devices at a stage of their pool."""
        return all(holder.away(stage) for holder in (self.resident, *self.others))


def kept_arrays(setting: Setting) -> Iterator[Kept]:
    """Yields what the roles of a run keep, each array once: as that of the first role that holds
    it."""
    meshes: Any = {role: abstract_mesh(axes) for role, axes in setting.axes.items()}
    run = RunArrays(setting, meshes)
    residents = [resident for role in meshes for resident in RESIDENTS[role](setting.config)]
    forms = {resident.name: _forms(resident.arrays(run)) for resident in residents}
    # Path of an array -> who shares it with its owner.
    sharers: dict[str, dict[KeyPath, list[Resident]]] = {
        r.name: defaultdict(list) for r in residents
    }
    for resident in residents:
        owner, mine = forms.get(resident.shares), forms[resident.name]
        if owner is None or not setting.on_actors_mesh(resident.role):
            continue
        for path in [path for path, form in mine.items() if owner.get(path) == form]:
            sharers[resident.shares][path].append(resident)
            del mine[path]
    for resident in residents:
        sizes: dict[tuple[Resident, ...], int] = defaultdict(int)
        for path, (_, size) in forms[resident.name].items():
            sizes[tuple(sharers[resident.name][path])] += size
        yield from (Kept(resident, others, size) for others, size in sizes.items())


def _forms(arrays: Tree) -> dict[KeyPath, tuple[Form, int]]:
    """Maps the path of each abstract array to its form, and to its bytes on one device."""
    return {
        path: ((x.shape, x.dtype, x.sharding.spec), _bytes(x))
        for path, x in jax.tree_util.tree_leaves_with_path(arrays)
    }


@lru_cache(maxsize=1 << 14)
def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return local_bytes(x)


class RunPrograms:
    """The programs of a run as planned for a machine, over which it iterates."""

    def __init__(self, setting: Setting, devices: Sequence[DeviceFacts] | None = None):
        """
        Args:
            setting: of the plan for that machine.
            devices: of the machine, to which the placement refers by index. None: described ones,
                for which the programs can be traced and not compiled.
        """
        inputs = setting.inputs
        if devices is None:
            devices = described_devices(inputs)
        self.setting = setting
        self.meshes = role_meshes(devices, inputs.placement, setting.axes)
        self.kept = list(kept_arrays(setting))

    def held_by(self, roles: Collection[str], stage: str) -> int:
        """Returns the bytes that these roles keep on a device at a stage of another one."""
        in_flight = self.setting.in_flight if "teacher" in roles else 0
        kept = (x for x in self.kept if x.resident.role in roles and not x.away(stage))
        return in_flight + sum(x.bytes for x in kept)

    def __iter__(self) -> Iterator[Program]:
        arrays, kept = RunArrays(self.setting, self.meshes), self.kept
        for role in self.meshes:
            more = self.setting.in_flight if role == "teacher" else 0
            # Arrays of another role, of which the plan counts them.
            more -= sum(x.bytes for x in kept if role in (other.role for other in x.others))
            for program in PROGRAMS[role](arrays):
                yield replace(program, beside=program.beside + more)


def described_devices(inputs: PlanInputs) -> list[DescribedDevice]:
    """Returns devices that can do what the plan's target can, as many as its roles need."""
    target = inputs.target
    capability = None if target.capability is None else "{}.{}".format(*target.capability)
    count = 1 + max(i for where in inputs.placement.roles.values() for i in (*where.devices, 0))
    hosts = inputs.host_of or (0,) * count
    given = target.platform, target.kind, capability or "none"
    return [DescribedDevice(i, given[0], hosts[i], *given[1:]) for i in range(count)]


def largest_arrays(setting: Setting, accounts: Mapping[str, Account]) -> Iterator[str]:
    """Yields, for each role, the largest arrays that its program makes where the role holds most,
    and the lines of jaxrl that make them."""
    programs = list(RunPrograms(setting))
    for role, account in accounts.items():
        fullest = peak((account,))[1].partition(": ")[2]
        mine = (p for p in programs if p.role == role and fullest in p.covered)
        if (program := next(mine, None)) is not None:
            with compiling_for(setting.inputs.target):
                found = live_arrays(program).arrays
            yield from largest_line(role, program.name, found)


def largest_line(role: str, program: str, arrays: Sequence[Array]) -> Iterator[str]:
    """Yields one line about the largest arrays of a program, if it makes any."""
    words = [
        f"{size_text(x.bytes)} {x.form} ({x.line or 'jax'})"
        for x in list(dict.fromkeys(arrays))[:LARGEST]
    ]
    if words:
        yield f"{role} {program}: its largest arrays are {', '.join(words)}"


def size_text(n: int) -> str:
    return f"{n / GB:,.1f} GB" if n >= GB else f"{n / MB:.1f} MB"
