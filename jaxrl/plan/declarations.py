"""What the roles of a run declare: their programs, for the devices of a machine, and the arrays
that they keep."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from jaxrl.config.schema import Config
from jaxrl.plan.plan_inputs import PlanInputs, Setting
from jaxrl.roles.actor import actor_programs, actor_residents
from jaxrl.roles.declared import Program, Resident, local_bytes
from jaxrl.roles.grouper import grouper_programs, grouper_residents
from jaxrl.roles.reference import reference_programs, reference_residents
from jaxrl.roles.reward import reward_programs, reward_residents
from jaxrl.roles.rollout import rollout_programs, rollout_residents
from jaxrl.roles.run_shapes import RunArrays
from jaxrl.sharding.mesh import DeviceFacts, role_meshes
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
Form = tuple[tuple[int, ...], Any, PartitionSpec | None]
"""Shape, dtype and how it is divided over a mesh, of an array."""


@dataclass(frozen=True)
class Kept:
    """Resident arrays of a role, and the roles that hold these very arrays too."""

    resident: Resident
    others: tuple[Resident, ...]
    bytes: int
    """On one device."""
    forms: tuple[tuple[Form, int], ...]
    """Form and bytes of each."""

    @property
    def title(self) -> str:
        """Returns the name in the plan."""
        roles = [f"the {other.role}'s too" for other in self.others]
        return ", ".join([self.resident.title, *roles])

    def away(self, stage: str) -> bool:
        """Returns whether they are not on the devices at a stage of their pool."""
        return all(holder.away(stage) for holder in (self.resident, *self.others))

    def there(self, program: Program) -> bool:
        """Returns whether they are on the devices while a program of their pool runs."""
        return not self.away(program.stage) and self.resident.name not in program.without

    def held_by(self, role: str) -> bool:
        """Returns whether a role holds them, its own or another's."""
        return any(holder.role == role for holder in (self.resident, *self.others))


def kept_arrays(run: RunArrays, roles: Collection[str]) -> Iterator[Kept]:
    """Yields what some roles of a run keep, each array once: as that of the first role that holds
    it. Roles share arrays only where they share devices."""
    residents = [resident for role in roles for resident in RESIDENTS[role](run.config)]
    forms = {resident.name: _forms(resident.arrays(run)) for resident in residents}
    # Path of an array -> who shares it with its owner.
    sharers: dict[str, dict[KeyPath, list[Resident]]] = {
        r.name: defaultdict(list) for r in residents
    }
    for resident in residents:
        owner, mine = forms.get(resident.shares), forms[resident.name]
        if owner is None or not run.shapes.on_actors_mesh(resident.role):
            continue
        for path in [path for path, form in mine.items() if owner.get(path) == form]:
            sharers[resident.shares][path].append(resident)
            del mine[path]
    for resident in residents:
        found: dict[tuple[Resident, ...], list[tuple[Form, int]]] = defaultdict(list)
        for path, form in forms[resident.name].items():
            found[tuple(sharers[resident.name][path])].append(form)
        for others, each in found.items():
            yield Kept(resident, others, sum(size for _, size in each), tuple(each))


def _forms(arrays: Tree) -> dict[KeyPath, tuple[Form, int]]:
    """Maps the path of each abstract array to its form, and to its bytes on one device."""
    return {path: (_form(x), _bytes(x)) for path, x in jax.tree_util.tree_leaves_with_path(arrays)}


def _form(x: jax.ShapeDtypeStruct) -> Form:
    return x.shape, x.dtype, getattr(x.sharding, "spec", None)


@lru_cache(maxsize=1 << 14)
def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return local_bytes(x)


class RunPrograms:
    """The programs of a run as planned for a machine, over which it iterates, and what its roles
    keep."""

    def __init__(
        self,
        setting: Setting,
        devices: Sequence[DeviceFacts] | None = None,
        roles: Collection[str] | None = None,
    ):
        """
        Args:
            setting: of the plan for that machine.
            devices: of the machine, to which the placement refers by index. None: described ones,
                for which the programs can be traced and not compiled.
            roles: those of some pools; None: of all.
        """
        if devices is None:
            devices = described_devices(setting.inputs)
        self.setting = setting
        self.meshes = role_meshes(devices, setting.inputs.placement, setting.axes)
        self._arrays = RunArrays(setting, self.meshes)
        self.roles = [role for role in self.meshes if roles is None or role in roles]
        self.kept = list(kept_arrays(self._arrays, self.roles))

    def held_by(self, roles: Collection[str], stage: str) -> int:
        """Returns the bytes that these roles keep on a device at a stage of another one."""
        return sum(x.bytes for x in self.kept if x.resident.role in roles and not x.away(stage))

    def __iter__(self) -> Iterator[Program]:
        for role in self.roles:
            mine = [x for x in self.kept if x.held_by(role)]
            for program in PROGRAMS[role](self._arrays):
                yield replace(program, beside=program.beside + _kept_beside(program, mine))


def _kept_beside(program: Program, kept: Sequence[Kept]) -> int:
    """Returns the bytes that a role keeps on a device while a program runs which has them not among
    its arguments, less those of the arguments that are kept as another role's.

    Args:
        kept: what the role holds, its own or another's.
    """
    leaves = jax.tree.leaves((program.args, program.kwargs))
    arguments = Counter(_form(x) for x in leaves if isinstance(x, jax.ShapeDtypeStruct))
    beside = 0
    for x in (x for x in kept if x.there(program)):
        beside += x.bytes * (x.resident.role == program.role)
        # What arrives or waits is no argument, though it has the form of one.
        for form, size in x.forms if x.resident.column != "activations" else ():
            if arguments[form]:
                arguments[form] -= 1
                beside -= size
    return beside


def described_devices(inputs: PlanInputs) -> list[DescribedDevice]:
    """Returns devices that can do what the plan's target can, as many as its roles need. Each pool
    counts its own from 0, so that pools of the same size have the same programs wherever they are
    on a host."""
    target, hosts = inputs.target, inputs.host_of
    capability = None if target.capability is None else "{}.{}".format(*target.capability)
    what = target.kind, capability or "none"
    return [
        DescribedDevice(number, target.platform, hosts[i] if hosts else 0, *what)
        for pool in inputs.placement.pools
        for number, i in enumerate(pool.devices)
    ]
