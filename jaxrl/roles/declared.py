"""What a role is, before a weight is read: the jitted programs that it calls, with abstract
arguments, and the arrays that it keeps. Each role's module yields its own from the config and the
models' `config.json` alone, and calls the very programs that it declares.

An abstract array is a `jax.ShapeDtypeStruct` with a sharding over the devices of the role's mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from jaxrl.sharding.ledger import attribute, current
from jaxrl.types import Tree


@dataclass(frozen=True)
class Program:
    """A jitted function of a role, with the abstract arguments of its largest call in a run."""

    role: str
    name: str
    jitted: Any
    args: tuple[Any, ...]
    stage: str
    """Of the ledger, that it runs in (`actor.update`)."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    beside: int = 0
    """Bytes that the role holds on a device meanwhile, apart from the arguments and from what it
    keeps (`Resident`); as `declarations.RunPrograms` yields it, with what it keeps, and without
    those of the arguments that the plan counts as another role's."""
    cache: Any = ()
    """Arrays among those, or among the arguments, that are keys and values of a cache."""
    without: tuple[str, ...] = ()
    """Names of residents of the role that are not there yet, or are what the program makes."""
    calls: int = 1
    """Calls in a training step; 0 if none calls it."""
    otherwise: str = "eval"
    """What calls it where no step does: `eval`, evaluations; `start`, the start of a run; `waits`,
    a sample that waits for pages of the cache."""

    def lower(self) -> Any:
        """Traces it; returns a `jax.stages.Lowered`."""
        return self.jitted.lower(*self.args, **self.kwargs)

    def compile(self, options: Mapping[str, Any] | None = None) -> Any:
        """Compiles it for the devices of its mesh; returns a `jax.stages.Compiled`."""
        return self.lower().compile(compiler_options=options)

    def held(self, compiled: Any, total: int | None = None) -> int:
        """Returns the bytes that its role holds on one device while the compiled program runs.

        Args:
            total: arguments, results and temporaries as the compiler of a TPU reports them
                (`hlo.read_total`); its `memory_analysis` exceeds them where there are loops.
        """
        sizes = compiled.memory_analysis()
        # XLA does not count arguments that the program never reads, but they stay on the device.
        unread = max(0, local_bytes((self.args, self.kwargs)) - sizes.argument_size_in_bytes)
        if total is None:
            results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            total = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + results
        return int(total + unread + self.beside)


@dataclass(frozen=True)
class Resident:
    """Arrays that a role keeps from call to call."""

    name: str
    """In the ledger: the role, or the role and its part, and what they are (`actor.params`)."""
    title: str
    """In the plan."""
    arrays: Callable[[Any], Tree] = field(compare=False)
    """Maps a `roles.run_shapes.RunArrays` to the abstract arrays, on the mesh of the role."""
    stages: tuple[str, ...]
    """Those that need them on the devices (`actor.update`)."""
    attribute: str = ""
    """Of the role's object, by whose name they are found; as in `state.params`."""
    column: Literal["weights", "optimizer", "activations"] = "weights"
    offload: bool = False
    """They are on the host at all other stages."""
    stale_at: tuple[str, ...] = ()
    """Stages at which they are freed, because they are overwritten before they are read again."""
    made_at: tuple[str, ...] = ()
    """Further stages at which the next ones are made, and so are on the devices."""
    passing: bool = False
    """They are on the devices at their stages alone, beside the arrays that they will replace; the
    ledger does not keep them."""
    shares: str = ""
    """Name of the resident of another role, of which it holds the very arrays that are equal: of
    the same path, shape, dtype and sharding over the same devices."""

    @property
    def role(self) -> str:
        return self.name.partition(".")[0]

    def away(self, stage: str) -> bool:
        """Returns whether they are not on the devices at a stage of their pool."""
        there = (*self.stages, *self.made_at)
        free = self.offload or self.passing or stage in self.stale_at
        return stage not in there and free

    def keep(self, owner: object) -> None:
        """Registers the arrays of a role's object in the ledger."""
        if not self.passing:
            self.register(*attribute(owner, self.attribute))

    def register(self, read: Callable[[], Tree], write: Callable[[Tree], None]) -> None:
        """Registers in the ledger what `read` returns; `write` sets it."""
        options: dict[str, Any] = {"stages": self.stages, "stale_at": self.stale_at}
        current().resident(self.name, read, write, offload=self.offload, **options)


@dataclass(frozen=True)
class Remedy:
    """A key of the config that makes a role smaller or faster, with the values to try; the present
    one is left out of them."""

    key: str
    faster: Sequence[Any] = ()
    """The fastest first."""
    smaller: Sequence[Any] = ()
    """Those that take less memory, the mildest first."""
    timed: bool = False
    """The seconds of a step are predicted for each value (`--suggest`)."""
    choices: Sequence[Any] = ()
    """Where the key is null: what the plan sets it to, which is the first that fits; None leaves it
    null."""
    null: Any = None
    """The value that null stands for."""
    note: str = ""
    """Why, with the `{pool}` and the `{size}` in GB that it takes with the first of the choices."""


def local_bytes(tree: Any) -> int:
    """Returns the bytes on one device of a pytree of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    )


def placed(shapes: Tree, shardings: Tree) -> Tree:
    """Returns abstract arrays with these shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )
