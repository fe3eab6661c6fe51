"""The axes of a role's mesh: what each divides, and their sizes. Pure text and integers, no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from jaxrl.errors import UserError, counted

AxisName = Literal["data", "fsdp", "tensor", "context", "expert"]
SplitOver = AxisName | tuple[AxisName, ...] | None
"""An entry of a `PartitionSpec`."""
AXIS_NAMES: tuple[AxisName, ...] = get_args(AxisName)
ROWS: tuple[AxisName, ...] = ("data", "fsdp", "expert")
"""Axes that divide the rows of a batch."""
TOKENS: AxisName = "context"
"""The axis that divides the tokens of a row."""
EXPERTS: AxisName = "expert"
"""The axis that divides the experts of a mixture; the other weights are whole on each of its
devices, as they are on those of `data`."""
WEIGHTS: tuple[AxisName, ...] = ("fsdp", TOKENS)
"""Axes that divide the weights by their width, to be gathered where a layer runs."""
COPIES: tuple[AxisName, ...] = tuple(axis for axis in ROWS if axis not in WEIGHTS)
"""Axes that divide rows and copy the weights (`expert`: those that are not experts')."""
HEADS: tuple[AxisName, ...] = ("tensor", TOKENS)
"""Axes that divide the heads where attention is computed, on whole rows."""

DEFAULT_AXES: dict[str, tuple[AxisName, ...]] = {
    "actor": ("fsdp", "data"),
    "rollout": ("data", "tensor"),
    "teacher": ("fsdp", "data"),
    "reference": ("fsdp", "data"),
    "reward": ("fsdp", "data"),
    "grouper": ("data",),
}
"""Role -> axes that may take the devices that the given sizes leave; the first free one does."""


class Axes(NamedTuple):
    """Sizes of a role's mesh axes; their product is the number of its devices."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        return math.prod(self)

    @property
    def rows(self) -> int:
        """Returns the number of parts into which the rows of a batch are divided."""
        return self.data * self.fsdp * self.expert

    @property
    def weights(self) -> int:
        """Returns the number of parts into which a width of the weights is divided, to be gathered
        layer by layer."""
        return self.fsdp * self.context

    @property
    def gathered(self) -> Axes:
        """Returns the axes that are left where a layer's weights are gathered."""
        return self._replace(fsdp=1, context=1)

    @property
    def heads(self) -> int:
        """Returns the number of parts into which the heads of attention are divided."""
        return self.tensor * self.context

    def __str__(self) -> str:
        """Lists the axes above 1, as in `fsdp=2 tensor=2`; gives `1 device` if there is none."""
        sizes = zip(AXIS_NAMES, self, strict=True)
        return " ".join(f"{name}={size}" for name, size in sizes if size > 1) or "1 device"


def resolve_axes(role: str, n_devices: int, **asked: int | None) -> Axes:
    """Computes the sizes of a role's mesh axes on `n_devices` devices, of those that are asked for.

    An axis of -1 takes what the others leave. Without one, the first axis of `DEFAULT_AXES[role]`
    that has no size does; every other axis without a size is 1.

    Raises:
        UserError: sizes that do not divide, or do not use, the devices of the role.
    """
    assert asked.keys() <= set(AXIS_NAMES), asked
    stated = {name: asked.get(name) for name in AXIS_NAMES}
    sizes = {name: size for name, size in stated.items() if size is not None}
    axes_text = " ".join(f"{role}.parallel.{name}={size}" for name, size in sizes.items())
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise UserError(
                f"{role}.parallel.{name}={size}: an axis is at least 1, or -1 for the rest"
            )
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise UserError(f"{axes_text}: {len(rest)} axes are -1, and only 1 may take the rest")
    free = rest + [name for name in DEFAULT_AXES[role] if name not in sizes]
    fixed = math.prod(max(size, 1) for size in sizes.values())
    if n_devices % fixed:
        raise UserError(
            f"{axes_text}: axes of {counted(fixed, 'device')} do not divide"
            f" the {counted(n_devices, 'device')} of {role}"
        )
    if not free and fixed != n_devices:
        raise UserError(
            f"{axes_text}: axes use {counted(fixed, 'device')}, but {role} has {n_devices}"
        )
    result = {name: max(sizes.get(name, 1), 1) for name in AXIS_NAMES}
    if free:
        result[free[0]] = n_devices // fixed
    return Axes(**result)


def row_shards(sizes: Mapping[str, int]) -> int:
    """Returns the number of parts into which a mesh of these axis sizes (`mesh.shape`) divides the
    rows of a batch."""
    return math.prod(sizes[axis] for axis in ROWS)


def dim_spec(size: int, axes: tuple[AxisName, ...], sizes: Mapping[str, int]) -> SplitOver:
    """Returns the entry of a `PartitionSpec` for a dim of this size: its axes, without those of one
    device, or None if they do not divide it."""
    axes = tuple(axis for axis in axes if sizes[axis] > 1) or axes[:1]
    if size % math.prod(sizes[axis] for axis in axes):
        return None
    return axes if len(axes) > 1 else axes[0]
