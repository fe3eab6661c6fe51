"""What lies in the memory of a pool's devices; and what goes to the host while it is not needed.

Every worker has one ledger. Roles tell it what they keep (`resident`), what comes and goes (`put`,
`drop`) and the temporaries of the programs that they run (`running`); it knows the peak, and of
what that consisted. Bytes are those of the fullest device.

Before each call the worker enters a stage, named as the call (`actor.update`). Residents that may
be offloaded and that the stage does not need go to pinned host memory, those that it needs come
back. What the next stage will need begins to come back before this one ends, as soon as that no
longer raises the peak (`nearly_done`); which stage is next is what came next the last time.
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
from typing import Any, Literal, TypeGuard

import jax
from jax.sharding import Sharding

from jaxrl.errors import UserError
from jaxrl.types import Tree

HOST = "pinned_host"
"""The memory kind of what is away."""


Buffer = tuple[jax.Device, int]
"""A device and an address there."""


@dataclass(frozen=True)
class Move:
    """Arrays of a resident on their way between a device and the host."""

    name: str
    to: Literal["host", "device"]
    nbytes: int
    """Over all devices of this process."""
    started: float
    finished: float
    """`time.monotonic` seconds."""
    waited: float
    """Seconds that a stage could not begin because of it."""

    def later(self, seconds: float) -> Move:
        """The same by the clock of another process."""
        return replace(self, started=self.started + seconds, finished=self.finished + seconds)


@dataclass
class _Resident:
    name: str
    stages: Collection[str]
    read: Callable[[], Tree]
    write: Callable[[Tree], None]
    offload: bool
    stale_at: Collection[str]


@dataclass
class _Coming:
    """What was asked to come back and has not been waited for."""

    name: str
    host: list[jax.Array]
    device: list[jax.Array]
    started: float


@dataclass
class Ledger:
    """The memory of one pool; used by the thread of its worker alone."""

    announce: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Names what the worker does while it waits for a move."""
    peak: int = 0
    """Most bytes that a device has held."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """Name -> bytes on that device then."""
    moves: list[Move] = field(default_factory=list)
    """Since they were last taken."""
    _residents: dict[str, _Resident] = field(default_factory=dict)
    _held: dict[str, Counter[jax.Device]] = field(default_factory=dict)
    """Name -> bytes on each device; residents too."""
    _pinned: dict[str, list[Buffer]] = field(default_factory=dict)
    """Name -> where that lies which was `put`; it may be a resident's as well."""
    _coming: list[_Coming] = field(default_factory=list)
    _stage: str = ""
    _after: dict[str, str] = field(default_factory=dict)
    _programs: weakref.WeakKeyDictionary[object, dict[object, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Program -> form of its arguments -> bytes."""

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
        """Arrays that a role keeps, as a tree.

        Args:
            read, write: of the tree; None: there is none now.
            stages: those that need it.
            offload: it goes to the host in all others.
            stale_at: stages at whose beginning it is freed: nobody reads it again before it is
                written anew.

        Raises:
            UserError: offload where the devices have no pinned host memory.
        """
        arrays = _arrays(read())
        if offload and arrays:
            device: Any = next(iter(arrays[0].sharding.addressable_devices))
            kinds = [memory.kind for memory in device.addressable_memories()]
            if HOST not in kinds:
                raise UserError(
                    f"offload of {name}: {device.platform} devices have no memory {HOST}, only"
                    f" {', '.join(kinds)}; set offload.params, optimizer and frozen to false"
                )
        self._residents[name] = _Resident(name, stages, read, write, offload, stale_at)
        self.changed()

    def enter(self, stage: str) -> None:
        """Makes the memory what the stage wants of it. No program may still be reading what the
        last stage used: roles wait for theirs before they return.
        """
        if self._stage:
            self._after[self._stage] = stage
        self._stage = stage
        wanted = [r for r in self._residents.values() if stage in r.stages]
        kept = {buffer(x) for r in wanted for x in _arrays(r.read())}
        kept |= {place for places in self._pinned.values() for place in places}
        rest = [r for r in self._residents.values() if r not in wanted]
        for resident in rest:
            if stage in resident.stale_at:
                self._free(resident, kept)
        self._send_away([resident for resident in rest if resident.offload], kept)
        for resident in wanted:
            self._call_back(resident)
        self._await()
        self.changed()

    def nearly_done(self) -> None:
        """The stage needs less from here on: what the next one needs may come back already."""
        following = self._after.get(self._stage)
        for resident in self._residents.values():
            if following not in resident.stages:
                continue
            incoming: Counter[jax.Device] = Counter()
            for array in _arrays(resident.read()):
                if _is_away(array):
                    incoming += _per_device(array)
            if incoming and max((self._total() + incoming).values()) <= self.peak:
                self._call_back(resident)

    def changed(self) -> None:
        """Residents hold other arrays than before; every stage looks by itself at its start."""
        seen: set[Buffer] = set()
        for resident in self._residents.values():
            mine: Counter[jax.Device] = Counter()
            for array in _arrays(resident.read()):
                if not _is_away(array) and buffer(array) not in seen:
                    seen.add(buffer(array))
                    mine += _per_device(array)
            self._held[resident.name] = mine
        self._note()

    def put(self, name: str, tree: Tree) -> None:
        """Arrays that are there until `drop`; put again, they take the place of the old ones."""
        arrays = _arrays(tree)
        self._pinned[name] = [buffer(array) for array in arrays]
        resident = {buffer(x) for r in self._residents.values() for x in _arrays(r.read())}
        own = [array for array in arrays if buffer(array) not in resident]
        self._held[name] = sum(map(_per_device, own), Counter())
        self._note()

    def drop(self, name: str) -> None:
        self._held.pop(name, None)
        self._pinned.pop(name, None)

    @contextlib.contextmanager
    def running(
        self, program: jax.stages.Wrapped, *args: object, **kwargs: object
    ) -> Iterator[None]:
        """A jitted function runs with these arguments: its temporaries and new outputs are there.

        What XLA says of it (`memory_analysis`) is asked once for each form of the arguments, and
        costs no compilation of its own.
        """
        leaves = jax.tree.leaves((args, kwargs))
        known, form = self._programs.setdefault(program, {}), tuple(map(_form, leaves))
        if form not in known:
            found = program.lower(*args, **kwargs).compile().memory_analysis()
            new = found.output_size_in_bytes - found.alias_size_in_bytes if found else 0
            known[form] = found.temp_size_in_bytes + max(new, 0) if found else 0
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

    def _send_away(self, residents: Collection[_Resident], kept: Collection[Buffer]) -> None:
        """What several of them share becomes one copy on the host."""
        self._await()  # what is still coming is not sent back before it is there
        copies: dict[Buffer, jax.Array] = {}
        old: list[jax.Array] = []
        for resident in residents:
            leaves, form = jax.tree.flatten(resident.read())
            going = [
                i
                for i, leaf in enumerate(leaves)
                if _is_here(leaf) and not _is_away(leaf) and buffer(leaf) not in kept
            ]
            if not going:
                continue
            started = time.monotonic()
            here = [leaves[i] for i in going]
            size = _nbytes([leaf for leaf in here if buffer(leaf) not in copies])
            with self.announce(f"{resident.name} to the host"):
                given = [copies.get(buffer(leaf), leaf) for leaf in here]
                away = [leaf.sharding.with_memory_kind(HOST) for leaf in here]
                new = jax.block_until_ready(_put(given, away))
            for i, before, after in zip(going, here, new, strict=True):
                leaves[i] = copies[buffer(before)] = after
            old += here
            resident.write(jax.tree.unflatten(form, leaves))
            ended = time.monotonic()
            move = Move(resident.name, "host", size, started, ended, ended - started)
            self.moves.append(move)
        for leaf in old:
            leaf.delete()

    def _free(self, resident: _Resident, kept: Collection[Buffer]) -> None:
        arrays = [array for array in _arrays(resident.read()) if buffer(array) not in kept]
        if arrays:
            resident.write(None)
            for array in arrays:
                array.delete()
            self.changed()

    def _call_back(self, resident: _Resident) -> None:
        """Begins to bring what is away."""
        leaves, form = jax.tree.flatten(resident.read())
        coming = [i for i, leaf in enumerate(leaves) if _is_away(leaf)]
        if not coming:
            return
        started = time.monotonic()
        old = [leaves[i] for i in coming]
        with self.announce(f"{resident.name} to the device"):
            new = _put(old, [leaf.sharding.with_memory_kind("device") for leaf in old])
        for i, leaf in zip(coming, new, strict=True):
            leaves[i] = leaf
        resident.write(jax.tree.unflatten(form, leaves))
        self._coming.append(_Coming(resident.name, old, new, started))
        self.changed()

    def _await(self) -> None:
        """Waits for what is coming back."""
        for coming in self._coming:
            began = time.monotonic()
            with self.announce(f"{coming.name} to the device"):
                jax.block_until_ready(coming.device)
            ended, size = time.monotonic(), _nbytes(coming.host)
            waited = ended - max(began, coming.started)
            move = Move(coming.name, "device", size, coming.started, ended, waited)
            self.moves.append(move)
        self._coming.clear()

    def _total(self) -> Counter[jax.Device]:
        return sum(self._held.values(), Counter())

    def _note(self) -> None:
        total = self._total()
        device = max(total, key=lambda d: total[d], default=None)
        if device is not None and total[device] > self.peak:
            self.peak = total[device]
            self.at_peak = {name: held[device] for name, held in self._held.items() if held[device]}


_here = threading.local()


def use(ledger: Ledger) -> None:
    """Makes it the ledger of this thread."""
    _here.ledger = ledger


def current() -> Ledger:
    """That of this thread's worker; outside of workers one that nobody looks at."""
    if not hasattr(_here, "ledger"):
        _here.ledger = Ledger()
    return _here.ledger


def buffer(array: jax.Array) -> Buffer:
    """Where its first shard lies: two arrays that share their memory have this in common."""
    first = array.addressable_data(0)
    return next(iter(first.devices())), first.unsafe_buffer_pointer()


def _arrays(tree: Tree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_here(leaf)]


def _is_here(leaf: object) -> TypeGuard[jax.Array]:
    """An array with a part on a device of this process, and still there: an update donates what
    the rollout shares with it.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_deleted():
        return False
    return bool(leaf.sharding.addressable_devices)


def _is_away(leaf: object) -> TypeGuard[jax.Array]:
    return _is_here(leaf) and leaf.sharding.memory_kind == HOST


def _per_device(array: jax.Array) -> Counter[jax.Device]:
    """Bytes on each device of this process."""
    size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return Counter(dict.fromkeys(array.sharding.addressable_devices, size))


def _nbytes(arrays: Collection[jax.Array]) -> int:
    """Over all devices of this process."""
    return sum(sum(_per_device(array).values()) for array in arrays)


def _form(leaf: Tree) -> object:
    if not hasattr(leaf, "dtype"):
        return leaf  # static arguments can be hashed
    return tuple(leaf.shape), leaf.dtype, getattr(leaf, "sharding", None)


def _put(arrays: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """To another memory of the same devices; of a mesh of several processes each does the same."""
    if all(array.is_fully_addressable for array in arrays):
        return jax.device_put(arrays, shardings)
    return jax.jit(lambda xs: xs, out_shardings=shardings)(arrays)
