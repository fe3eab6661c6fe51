"""Accounting of the device memory of a pool, and offloading of idle arrays to the host.

Every worker has one ledger. Roles register the arrays that they keep (`resident`), temporary arrays
(`put`, `drop`) and the programs that they run, with their temporaries (`running`). The ledger
records the peak of the fullest device.

Before each call the worker enters a stage with the name of the call (`actor.update`). Towards its
end (`prefetch_next`) the arrays of the next stage, taken to be the one that followed the last time,
start to move back, if they fit below the current peak.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import jax
from jax.sharding import Sharding

from jaxrl.errors import UserError
from jaxrl.types import Tree

HOST = "pinned_host"
"""The memory kind of offloaded arrays."""

Buffer = tuple[jax.Device, int]
"""A device and an address there."""


@dataclass(frozen=True)
class Move:
    """A transfer of a resident's arrays between devices and host."""

    name: str
    to: Literal["host", "device"]
    nbytes: int
    """Over all devices of this process."""
    started: float
    finished: float
    """`time.monotonic` seconds."""
    waited: float
    """Seconds by which it delayed the start of a stage."""

    def later(self, seconds: float) -> Move:
        """Returns the same transfer with its times shifted to the clock of another process."""
        return replace(self, started=self.started + seconds, finished=self.finished + seconds)


@dataclass
class _Resident:
    name: str
    stages: Collection[str]
    read: Callable[[], Tree]
    write: Callable[[Tree], None]
    offload: bool
    stale_at: Collection[str]


def attribute(owner: object, name: str) -> tuple[Callable[[], Tree], Callable[[Tree], None]]:
    """Returns the functions that get and set an attribute, for `Ledger.resident`; with a name of
    two parts (`state.params`) a field of a frozen dataclass, which is replaced."""
    outer, _, inner = name.partition(".")
    if not inner:
        return partial(getattr, owner, name), partial(setattr, owner, name)

    def write(tree: Tree) -> None:
        setattr(owner, outer, replace(getattr(owner, outer), **{inner: tree}))

    return lambda: getattr(getattr(owner, outer), inner), write


@dataclass
class Ledger:
    """The memory of one pool. Only the thread of its worker may use it."""

    announce: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Sets the worker's phase while it waits for a transfer."""
    peak: int = 0
    """Most bytes that a device has held so far."""
    moves: list[Move] = field(default_factory=list)
    """Transfers since the last `take_moves`."""
    _residents: dict[str, _Resident] = field(default_factory=dict)
    _held: dict[str, Counter[jax.Device]] = field(default_factory=dict)
    """Name -> bytes on each device, of residents and of other arrays."""
    _pinned: dict[str, list[Buffer]] = field(default_factory=dict)
    """Name -> buffers of the arrays that were `put`; they may belong to a resident too."""
    _coming: list[tuple[str, list[jax.Array], float]] = field(default_factory=list)
    """Transfers back that were started and not yet waited for: name, arrays, start."""
    _stage: str = ""
    _after: dict[str, str] = field(default_factory=dict)
    _programs: weakref.WeakKeyDictionary[object, dict[object, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Program -> shapes and shardings of its arguments -> bytes of temporaries and outputs."""

    def resident(
        self,
        name: str,
        read: Callable[[], Tree],
        write: Callable[[Tree], None],
        *,
        stages: Collection[str],
        offload: bool = False,
        stale_at: Collection[str] = (),
    ) -> None:
        """Registers arrays that a role keeps, as a pytree.

        Args:
            read, write: get and set the pytree; None stands for "no arrays now".
            stages: stages that need the arrays.
            offload: move the arrays to the host during all other stages.
            stale_at: stages at whose start the arrays are freed, because they are overwritten
                before they are read again.

        Raises:
            UserError: offload=True, but the devices have no pinned host memory.
        """
        arrays = _arrays(read())
        if offload and arrays:
            device: jax.Device = next(iter(arrays[0].sharding.addressable_devices))
            kinds = [memory.kind for memory in device.addressable_memories()]
            if HOST not in kinds:
                raise UserError(
                    f"offload of {name}: {device.platform} devices have no memory {HOST}, only"
                    f" {', '.join(kinds)}; set offload.params, optimizer and frozen to false"
                )
        self._residents[name] = _Resident(name, stages, read, write, offload, stale_at)
        self.refresh()

    def enter(self, stage: str) -> None:
        """Frees, offloads and brings back arrays as the stage needs it. No program of the last
        stage may still be running: roles wait for their programs before they return."""
        if self._stage:
            self._after[self._stage] = stage
        self._stage = stage
        wanted = [r for r in self._residents.values() if stage in r.stages]
        kept = {buffer(x) for r in wanted for x in _arrays(r.read())}
        kept |= {place for places in self._pinned.values() for place in places}
        rest = [r for r in self._residents.values() if r not in wanted]
        for resident in rest:
            if stage not in resident.stale_at:
                continue
            arrays = [array for array in _arrays(resident.read()) if buffer(array) not in kept]
            if arrays:
                resident.write(None)
                for array in arrays:
                    array.delete()
                self.refresh()
        # What another resident keeps on the device stays, whichever of them may leave it.
        kept |= {buffer(x) for r in rest if not r.offload for x in _arrays(r.read())}
        self._await()  # an array must have arrived before it is sent away again
        copies: dict[Buffer, jax.Array] = {}  # several residents may share one
        old: list[jax.Array] = []
        for resident in rest:
            leaves, form = jax.tree.flatten(resident.read())
            here = [x for x in _arrays(leaves, away=False) if buffer(x) not in kept]
            if not resident.offload or not here:
                continue
            started = time.monotonic()
            size = _nbytes([x for x in here if buffer(x) not in copies])
            with self.announce(f"{resident.name} to the host"):
                arrays = [copies.get(buffer(x), x) for x in here]
                away = [x.sharding.with_memory_kind(HOST) for x in here]
                new = jax.block_until_ready(_put(arrays, away))
            copies |= {buffer(before): after for before, after in zip(here, new, strict=True)}
            moved = {id(before): after for before, after in zip(here, new, strict=True)}
            old += here
            resident.write(jax.tree.unflatten(form, [moved.get(id(x), x) for x in leaves]))
            ended = time.monotonic()
            self.moves.append(
                Move(resident.name, "host", size, started, ended, waited=ended - started)
            )
        for array in old:
            array.delete()
        for resident in wanted:
            self._call_back(resident)
        self._await()
        self.refresh()

    def prefetch_next(self) -> None:
        """Starts to move the arrays of the next stage back; a role calls this when the rest of its
        stage needs less memory."""
        following = self._after.get(self._stage)
        for resident in self._residents.values():
            if following not in resident.stages:
                continue
            incoming: Counter[jax.Device] = Counter()
            for array in _arrays(resident.read(), away=True):
                incoming += _per_device(array)
            if incoming and max(sum(self._held.values(), incoming).values()) <= self.peak:
                self._call_back(resident)

    def refresh(self) -> None:
        """Notes that a resident has other arrays than before; a role calls this then. `enter` does
        it too."""
        seen: set[Buffer] = set()
        for resident in self._residents.values():
            held: Counter[jax.Device] = Counter()
            for array in _arrays(resident.read(), away=False):
                if buffer(array) not in seen:
                    seen.add(buffer(array))
                    held += _per_device(array)
            self._held[resident.name] = held
        self._note()

    def put(self, name: str, tree: Tree) -> None:
        """Records arrays that exist until `drop`. A second `put` with this name replaces the
        first."""
        arrays = _arrays(tree)
        self._pinned[name] = [buffer(array) for array in arrays]
        resident = {buffer(x) for r in self._residents.values() for x in _arrays(r.read())}
        others = [array for array in arrays if buffer(array) not in resident]
        self._held[name] = sum(map(_per_device, others), Counter())
        self._note()

    def drop(self, name: str) -> None:
        self._held.pop(name, None)
        self._pinned.pop(name, None)

    @contextlib.contextmanager
    def running(
        self, program: jax.stages.Wrapped, *args: object, **kwargs: object
    ) -> Iterator[None]:
        """Records the temporaries and new outputs of a jitted function while it runs with these
        arguments.

        The bytes are those of XLA's `memory_analysis`, looked up once per shapes and shardings of
        the arguments. This costs no further compilation.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        known = self._programs.setdefault(program, {})
        form = (
            tree,
            *(
                (tuple(leaf.shape), leaf.dtype, getattr(leaf, "sharding", None))
                if hasattr(leaf, "dtype")
                else leaf  # static arguments can be hashed
                for leaf in leaves
            ),
        )
        if form not in known:
            analysis = program.lower(*args, **kwargs).compile().memory_analysis()
            new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes if analysis else 0
            known[form] = analysis.temp_size_in_bytes + max(new, 0) if analysis else 0
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        devices = set().union(*(array.sharding.addressable_devices for array in arrays))
        name = f"temporaries of {getattr(program, '__name__', 'a program')}"
        self._held[name] = Counter(dict.fromkeys(devices, known[form]))
        self._note()
        try:
            yield
        finally:
            self.drop(name)

    def take_moves(self) -> tuple[Move, ...]:
        taken, self.moves = tuple(self.moves), []
        return taken

    def _call_back(self, resident: _Resident) -> None:
        """Starts to move a resident's offloaded arrays back."""
        leaves, form = jax.tree.flatten(resident.read())
        old = _arrays(leaves, away=True)
        if not old:
            return
        started = time.monotonic()
        with self.announce(f"{resident.name} to the device"):
            new = _put(old, [leaf.sharding.with_memory_kind("device") for leaf in old])
        moved = {id(before): after for before, after in zip(old, new, strict=True)}
        resident.write(jax.tree.unflatten(form, [moved.get(id(x), x) for x in leaves]))
        self._coming.append((resident.name, new, started))
        self.refresh()

    def _await(self) -> None:
        """Waits for all transfers back to the device."""
        for name, arrays, started in self._coming:
            began = time.monotonic()
            with self.announce(f"{name} to the device"):
                jax.block_until_ready(arrays)
            ended, waits_from = time.monotonic(), max(began, started)
            moved = Move(name, "device", _nbytes(arrays), started, ended, ended - waits_from)
            self.moves.append(moved)
        self._coming.clear()

    def _note(self) -> None:
        self.peak = max([self.peak, *sum(self._held.values(), Counter()).values()])


_here = threading.local()


def use(ledger: Ledger) -> None:
    """Sets the ledger of this thread."""
    _here.ledger = ledger


def current() -> Ledger:
    """Returns the ledger of this thread's worker; outside workers a dummy."""
    if not hasattr(_here, "ledger"):
        _here.ledger = Ledger()
    return _here.ledger


def buffer(array: jax.Array) -> Buffer:
    """Returns the device and address of the array's first shard. Arrays that share memory have the
    same one."""
    first = array.addressable_data(0)
    return next(iter(first.devices())), first.unsafe_buffer_pointer()


def _arrays(tree: Tree, away: bool | None = None) -> list[jax.Array]:
    """Returns the arrays of a tree that have a part on a device of this process and were not
    deleted. (An update donates arrays that the rollout may share.)

    Args:
        away: those on the host alone, or those on devices alone; None: both.
    """
    return [
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array)
        and not leaf.is_deleted()
        and leaf.sharding.addressable_devices
        and away in (None, leaf.sharding.memory_kind == HOST)
    ]


def _per_device(array: jax.Array) -> Counter[jax.Device]:
    """Counts the bytes of the array on each device of this process."""
    size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return Counter(dict.fromkeys(array.sharding.addressable_devices, size))


def _nbytes(arrays: Collection[jax.Array]) -> int:
    """Counts the bytes of the arrays over all devices of this process."""
    return sum(sum(_per_device(array).values()) for array in arrays)


def _put(arrays: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """Moves arrays to another memory kind of the same devices. On a mesh of several processes, all
    of them call it."""
    if all(array.is_fully_addressable for array in arrays):
        return jax.device_put(arrays, shardings)
    return jax.jit(lambda xs: xs, out_shardings=shardings)(arrays)
