"""What the roles of a run declare, for the devices of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxrl.plan.plan_inputs import Setting
from jaxrl.roles.actor import actor_programs
from jaxrl.roles.declared import Program
from jaxrl.roles.grouper import grouper_programs
from jaxrl.roles.reference import reference_programs
from jaxrl.roles.reward import reward_programs
from jaxrl.roles.rollout import rollout_programs
from jaxrl.roles.run_shapes import RunArrays
from jaxrl.sharding.mesh import role_meshes
from jaxrl.teacher.local_teacher import teacher_programs

PROGRAMS: dict[str, Callable[[RunArrays], Iterator[Program]]] = {
    "actor": actor_programs,
    "rollout": rollout_programs,
    "teacher": teacher_programs,
    "reference": reference_programs,
    "reward": reward_programs,
    "grouper": grouper_programs,
}
"""Role -> the function of its module that yields its programs."""


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
        arrays = RunArrays(self.setting, self.meshes)
        for role in self.meshes:
            more = self.setting.in_flight if role == "teacher" else 0
            more -= self.setting.counted_as_the_actors(role)
            for program in PROGRAMS[role](arrays):
                yield replace(program, beside=program.beside + more)
