"""What the roles of a run declare: their programs, for the devices of a machine, and the arrays
that they keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.tree_util import KeyPath

from jaxrl.config.schema import Config
from jaxrl.plan.plan_inputs import Setting
from jaxrl.roles.actor import actor_programs, actor_residents
from jaxrl.roles.declared import Program, Resident, local_bytes
from jaxrl.roles.grouper import grouper_programs, grouper_residents
from jaxrl.roles.reference import reference_programs, reference_residents
from jaxrl.roles.reward import reward_programs, reward_residents
from jaxrl.roles.rollout import rollout_programs, rollout_residents
from jaxrl.roles.run_shapes import RunArrays
from jaxrl.sharding.axes import AXIS_NAMES
from jaxrl.sharding.mesh import role_meshes
from jaxrl.teacher.local_teacher import teacher_programs, teacher_residents
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
    "teacher": teacher_residents,
    "reference": reference_residents,
    "reward": reward_residents,
    "grouper": grouper_residents,
}
"""Role -> the function of its module that returns the arrays that it keeps."""
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
    meshes = {
        role: AbstractMesh(tuple(axes), AXIS_NAMES, axis_types=(AxisType.Auto,) * len(AXIS_NAMES))
        for role, axes in setting.axes.items()
    }
    run = RunArrays(setting, meshes)  # type: ignore[arg-type]
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

    def __init__(self, setting: Setting, devices: Sequence[Any]):
        """
        Args:
            setting: of the plan for that machine.
            devices: of the machine; the placement refers to them by index.
        """
        self.setting = setting
        self.meshes = role_meshes(devices, setting.inputs.placement, setting.axes)

    def __iter__(self) -> Iterator[Program]:
        arrays, kept = RunArrays(self.setting, self.meshes), list(kept_arrays(self.setting))
        for role in self.meshes:
            more = self.setting.in_flight if role == "teacher" else 0
            # Arrays of another role, of which the plan counts them.
            more -= sum(x.bytes for x in kept if role in (other.role for other in x.others))
            for program in PROGRAMS[role](arrays):
                yield replace(program, beside=program.beside + more)
