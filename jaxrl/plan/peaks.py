"""What each role holds on one of its devices, before any weight is read: what it keeps, and what
its programs need besides, by a walk over each (`plan/live_arrays.py`) and a margin.

A worker does one thing at a time, so the peak of a device is the largest over the programs of all
roles there: what is resident and not away then, and what the program needs.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import jax

from jaxrl.errors import UserError
from jaxrl.models.kernels import CPU, TPU, Target, compiling_for
from jaxrl.plan.declarations import Kept, RunPrograms
from jaxrl.plan.live_arrays import Array, Live, live_arrays
from jaxrl.plan.plan_inputs import GB, MB, Account, Entry, PoolPeak, Setting, peak
from jaxrl.roles.declared import Program, local_bytes

MARGINS = {CPU.platform: 0.10, TPU: 0.05}
"""Platform -> what is added to the bytes of a program as the walk counts them: its compilers may
need so much more (`benchmarks/plan_compared.py`)."""
MARGIN_OF_GPUS = 0.03
SYNC = "weight sync"
"""The moment at which the next version of a role's weights arrives."""
LARGEST = 3
"""Arrays at a program's peak that are named."""


def margin_of(target: Target) -> float:
    return MARGINS.get(target.platform, MARGIN_OF_GPUS)


def walk(program: Program, target: Target) -> Live:
    """Walks a program for the arrays that it needs on one device beside its arguments; programs
    that are alike once."""
    leaves, structure = jax.tree.flatten((program.args, dict(program.kwargs)))
    return _walk(program.jitted, structure, tuple(leaves), target)


@lru_cache(maxsize=2048)
def _walk(jitted: Any, structure: Any, leaves: tuple[Any, ...], target: Target) -> Live:
    args, kwargs = jax.tree.unflatten(structure, leaves)
    collects = gc.isenabled()
    gc.disable()  # which would look at all objects of jax again and again
    try:
        with compiling_for(target):
            live = live_arrays(Program("", "", jitted, args, "", kwargs=kwargs))
    except OverflowError:
        size = size_text(local_bytes((args, kwargs)))
        raise UserError(
            f"the batch does not fit: {jitted.__name__} has an array of more than 2^31 numbers on a"
            f" device, which jax cannot index, and its arguments alone take {size} there; lower"
            " batch_size, group_size or max_new_tokens (--dry-run shows what each takes)"
        ) from None
    finally:
        if collects:
            gc.enable()
    return Live(live.bytes, tuple(dict.fromkeys(live.arrays))[:LARGEST])


def walked_bytes(program: Program, target: Target) -> int:
    """Returns the bytes that the role holds on a device while a program of `RunPrograms` runs,
    without a margin."""
    arguments = local_bytes((program.args, program.kwargs))
    return arguments + program.beside + walk(program, target).bytes


def planned_bytes(program: Program, target: Target) -> int:
    """Returns the bytes that the plan counts of the role while a program of `RunPrograms` runs:
    with the margin."""
    return round((1 + margin_of(target)) * walked_bytes(program, target))


def role_accounts(setting: Setting, roles: Collection[str] | None = None) -> dict[str, Account]:
    """Returns the account of each role of the run, or of those of some pools: what it keeps, each
    entry with the moments at which it is offloaded or freed (`away`), and what its programs need
    besides."""
    target, programs = setting.inputs.target, RunPrograms(setting, roles=roles)
    largest: dict[str, dict[str, Program]] = {}  # of those of one name in a role
    for program in programs:
        mine = largest.setdefault(program.role, {})
        other = mine.get(program.name)
        if other is None or walked_bytes(program, target) > walked_bytes(other, target):
            mine[program.name] = program
    accounts = {}
    for role in programs.roles:
        mine = largest.get(role, {})
        where = setting.inputs.placement.pool_of(role).roles
        kept = [x for x in programs.kept if x.bytes and x.resident.role in where]
        # Moment -> program, and -> stage where weights arrive, of everything that a worker does.
        running = {
            f"{other}: {name}": program
            for other in where
            for name, program in largest.get(other, {}).items()
        }
        arriving = {
            f"{x.resident.role}: {SYNC}": x.resident.stages[0] for x in kept if x.resident.passing
        }
        own, entries = [x for x in kept if x.resident.role == role], list[Entry]()
        for x in own:
            given = x.resident.column, x.title, x.bytes
            away = [moment for moment, program in running.items() if not x.there(program)]
            away += [moment for moment, stage in arriving.items() if x.away(stage)]
            more: Any = {"phase": SYNC} if x.resident.passing else {"away": frozenset(away)}
            entries.append(Entry(*given, **more))
        for program in mine.values():
            entries += _entries(program, own, target)
        if entries:
            accounts[role] = Account(role, tuple(entries))
    return accounts


def _entries(program: Program, kept: list[Kept], target: Target) -> Iterator[Entry]:
    """Yields what a program needs beside what its role keeps."""
    there = sum(x.bytes for x in kept if x.there(program))
    made, whole = walk(program, target).bytes, walked_bytes(program, target)
    cache = min(local_bytes(program.cache), whole - made - there)
    sizes = {
        "arguments of the program": whole - made - there - cache,
        "what the program makes": made,
        f"margin of {margin_of(target):.0%}": planned_bytes(program, target) - whole,
    }
    if cache > 0:
        yield Entry("cache", "keys and values", cache, program.name)
    for name, size in sizes.items():
        if size:
            yield Entry("activations", name, size, program.name)


def pool_peaks(setting: Setting) -> tuple[PoolPeak, ...]:
    """Returns the fullest device of each pool."""
    return setting.inputs.pools(role_accounts(setting))


def pool_peak(setting: Setting, index: int) -> PoolPeak:
    """Returns the fullest device of one pool, of which alone the programs are walked: of devices
    that share no memory of a host with those of others."""
    inputs = setting.inputs
    pool = inputs.placement.pools[index]
    load = inputs.load(pool, role_accounts(setting, pool.roles))
    return PoolPeak(pool, *load, inputs.limits[index])


def largest_arrays(setting: Setting, accounts: Mapping[str, Account]) -> Iterator[str]:
    """Yields, for each role, the largest arrays that its program makes where the role holds most,
    and the lines of jaxrl that make them."""
    programs, target = list(RunPrograms(setting)), setting.inputs.target
    for role, account in accounts.items():
        fullest = peak((account,))[1].partition(": ")[2]
        mine = [p for p in programs if (p.role, p.name) == (role, fullest)]
        if mine:  # several teachers have programs of one name
            program = max(mine, key=lambda p: walked_bytes(p, target))
            yield from largest_line(role, program.name, walk(program, target).arrays)


def largest_line(role: str, program: str, arrays: tuple[Array, ...]) -> Iterator[str]:
    """Yields one line about the largest arrays of a program, if it makes any."""
    words = [f"{size_text(x.bytes)} {x.form} ({x.line or 'jax'})" for x in arrays]
    if words:
        yield f"{role} {program}: its largest arrays are {', '.join(words)}"


def size_text(n: int) -> str:
    return f"{n / GB:,.1f} GB" if n >= GB else f"{n / MB:.1f} MB"
