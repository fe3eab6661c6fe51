"""What a program needs on one device beside its arguments, by a walk over its jaxpr: no formula,
and no constant fitted to a compiler.

1. What is computed element by element is in memory only where something reads it that is no fusion
   (a product, a loop, a kernel, a sort, a gather, a barrier), where it is a result, or a sum of
   more than two arrays that several read.
2. An array lives from the equation that makes it to the last one that reads it, or that reads what
   is fused from it.
3. What is computed from an array that nothing else reads takes its place; a product writes it
   directly. So do a loop's carries, and what is updated, with what they began with, and results
   with donated arguments. A result that is an argument is a copy.
4. A loop needs its body once, and its stacked results whole; one of a single turn is none. A TPU
   computes before a loop what the loop's constants alone decide, such as weights in the dtype of
   the products.
5. Arrays are divided over the devices as what they are computed from, stacked gradients as what
   they are added to, and results as the program says.
6. What is summed over the devices is whole on each until it is used; weights that are divided along
   another dim than the result are gathered for it. Where that is not their first dim, a GPU and a
   CPU gather a transposed copy.
7. A TPU's tiles have 128 columns: it keeps a table of another number transposed, and copies it
   where its rows are read.
8. A CPU computes what is ready in the order in which it became ready, and writes no result over
   what it is computed from. It writes out what is dear or reduced and read twice, writes products
   alone, broadcasts what they are divided by before a reduction, and has copies in float32 of what
   gradients of weights are computed from in bfloat16. It gathers arguments at the start (bfloat16
   in float32), has the rows in order again for loops, and keeps results apart from the start.

`benchmarks/plan_compared.py` compares it with the compilers of GPUs and TPUs.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, cycle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from jaxrl.models.kernels import CPU as CPU_TARGET
from jaxrl.models.kernels import TPU
from jaxrl.roles.declared import Program

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
"""The axes of the mesh, of more than one device, that divide each dim of an array."""

_VIEWS = """broadcast_in_dim iota reshape squeeze transpose expand_dims slice stop_gradient split
copy sharding_constraint name reshard pvary"""
_DEAR = "exp exp2 log log1p expm1 tanh logistic sqrt rsqrt cbrt pow div rem sin cos tan erf erf_inv"
_CHEAP = """add sub mul neg sign max min integer_pow abs floor ceil round is_finite and or not xor
eq ne lt le gt ge select_n rev pad convert_element_type copy_p clamp nextafter square shift_left
shift_right_logical shift_right_arithmetic reduce_precision add_any random_wrap mul_add
random_unwrap random_bits threefry2x32 bitcast_convert_type population_count real imag concatenate
device_put psum_invariant stack"""
_CALLS = """eval_jaxpr pjit jit closed_call core_call remat2 checkpoint remat custom_jvp_call
custom_vjp_call custom_vjp_call_jaxpr"""
VIEWS = frozenset(_VIEWS.split())
"""Operations that a fusion reads through, whatever reads their results."""
DEAR = frozenset(_DEAR.split())
"""Operations element by element that are too dear to be computed for each reader."""
FUSED = VIEWS | DEAR | frozenset(_CHEAP.split())
"""Operations element by element."""
UPDATES = ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add")
"""Operations that change a part of their first argument."""
CALLS = frozenset(_CALLS.split())
"""Operations that call a jaxpr, their parameter `jaxpr`, `call_jaxpr` or `fun_jaxpr`."""
LOOPS = ("scan", "while")
BODIED = frozenset(("cond", "shard_map", *LOOPS))
"""Operations whose bodies are walked apart."""
BARRIER = "optimization_barrier"
SUMMED = 2
"""Arrays that each reader of a sum adds up for itself; of more, such as the residual of layers that
are no loop, the sum is written out."""
CONVERT = "convert_element_type"
MOVED = FUSED | {BARRIER, "scan"}
"""Operations whose results are divided as what is computed from them."""
CPU = CPU_TARGET.platform
LANES = 128
"""Columns of a TPU's tile."""


@dataclass(frozen=True)
class Array:
    """An array that is alive at the peak."""

    bytes: int
    """On one device."""
    form: str
    """Dtype and global shape, as in `f32[8,1024]`."""
    line: str
    """File and line of jaxrl that makes it."""


@dataclass(frozen=True)
class Live:
    """What a program needs beside its arguments."""

    bytes: int
    arrays: tuple[Array, ...]
    """Those alive at the peak, the largest first."""


class _Variable:
    """A literal, or a result of a call that is written out in place: each call has its own."""

    __slots__ = ("aval", "shape")

    def __init__(self, aval: Any):
        self.aval, self.shape = aval, tuple(getattr(aval, "shape", ()))


class _Value(NamedTuple):
    """What is known of a variable."""

    dims: Dims
    roots: frozenset[_Variable] = frozenset()
    """Variables in memory from which it is computed: itself, if it is in memory."""
    batch: bool = False
    """It depends on the batch, not on weights alone."""


class _Equation(NamedTuple):
    name: str
    params: Mapping[str, Any]
    invars: list[_Variable]
    outvars: list[_Variable]
    source: Any


_Inside = tuple[int, list[Dims], list[Array]]
"""Bytes that an equation needs beside its results, how these are divided, and its arrays."""


class _Step(NamedTuple):
    """An equation as the walk passes it."""

    equation: _Equation
    roots: frozenset[_Variable]
    """Variables in memory that it reads, or from which what it reads is computed."""
    made: list[_Variable]
    """Its results that are in memory."""
    extra: int
    """Bytes that it needs beside them."""
    arrays: list[Array]
    """Those at the peak of its body."""


class _Flat:
    """The equations of a jaxpr, with those of the calls in it in their places, as a platform
    computes them."""

    def __init__(self, jaxpr: Any, platform: str):
        self.platform = platform
        self.equations: list[_Equation] = []
        self.wide: dict[_Variable, _Variable] = {}
        names: dict[Any, _Variable] = {}
        self.constvars = [names.setdefault(v, _Variable(v.aval)) for v in jaxpr.constvars]
        self.invars = [names.setdefault(v, _Variable(v.aval)) for v in jaxpr.invars]
        self.outvars = self._inline(jaxpr, names)

    def _inline(self, jaxpr: Any, names: dict[Any, _Variable]) -> list[_Variable]:
        def look(v: Any) -> _Variable:
            return _Variable(v.aval) if isinstance(v, core.Literal) else names[v]

        for e in jaxpr.eqns:
            given, inner = list(map(look, e.invars)), _called(e)
            if inner is not None and len(inner.invars) == len(given):
                within = dict(zip(inner.invars, given, strict=True))
                within |= {c: _Variable(c.aval) for c in inner.constvars}
                names |= zip(e.outvars, self._inline(inner, within), strict=True)
                continue
            made = [_Variable(v.aval) for v in e.outvars]
            names |= zip(e.outvars, made, strict=True)
            equation = _Equation(e.primitive.name, e.params, given, made, e.source_info)
            if equation.name == "div" and self.platform == CPU and given[1].shape:
                whole = given[1].aval.update(shape=made[0].shape)
                dims = {"broadcast_dimensions": range(len(made[0].shape))}
                given[1] = self._view(equation, "broadcast_in_dim", given[1], whole, **dims)
            if equation.name == "scan" and e.params["length"] == 1:
                names |= zip(e.outvars, self._inline_turn(equation), strict=True)
            elif self.platform == CPU and _by_rows(equation):
                self._append_in_float32(equation)
            else:
                self.equations.append(equation)
        return list(map(look, jaxpr.outvars))

    def _inline_turn(self, e: _Equation) -> list[_Variable]:
        """Writes out the body of a loop of one turn; returns its results as they are stacked."""
        loop = _Loop.of(e)
        names = {c: _Variable(c.aval) for c in loop.jaxpr.constvars}
        for given, v in zip(e.invars, loop.jaxpr.invars, strict=True):
            names[v] = self._view(e, "squeeze", given, v.aval, dimensions=(0,))
        return [
            self._view(e, "expand_dims", made, v.aval)
            for made, v in zip(self._inline(loop.jaxpr, names), e.outvars, strict=True)
        ]

    def _view(self, e: _Equation, name: str, v: _Variable, aval: Any, **params: Any) -> _Variable:
        if v.shape == aval.shape:
            return v
        view = _Variable(aval)
        self.equations.append(_Equation(name, params, [v], [view], e.source))
        return view

    def _append_in_float32(self, e: _Equation) -> None:
        given = []
        for v in e.invars:
            if v.aval.dtype == jnp.bfloat16 and v not in self.wide:
                self.wide[v] = _Variable(v.aval.update(dtype=jnp.float32))
                self.equations.append(_Equation(CONVERT, {}, [v], [self.wide[v]], e.source))
            given.append(self.wide.get(v, v))
        if e.outvars[0].aval.dtype != jnp.bfloat16:
            self.equations.append(e._replace(invars=given))
            return
        made = [_Variable(e.outvars[0].aval.update(dtype=jnp.float32))]
        self.equations.append(e._replace(invars=given, outvars=made))
        self.equations.append(_Equation(CONVERT, {}, made, e.outvars, e.source))


def _by_rows(e: _Equation) -> bool:
    """Returns whether a product sums over the rows of bfloat16, as gradients of weights do: XLA's
    kernel for these on a CPU knows float32 alone."""
    if e.name != "dot_general" or all(v.aval.dtype != jnp.bfloat16 for v in e.invars):
        return False
    (contracted, _), (batch, _) = e.params["dimension_numbers"]
    rank, n = len(e.invars[0].shape), len(batch)
    # XLA transposes a batched product of more dims, or whose batch does not lead.
    as_it_is = n == 0 or (rank == n + 2 and tuple(batch) == tuple(range(n)))
    return as_it_is and rank - 1 not in contracted


def _called(e: Any) -> Any:
    if e.primitive.name not in CALLS:
        return None
    inner = next((x for key, x in e.params.items() if key.endswith("jaxpr")), None)
    return getattr(inner, "jaxpr", inner)


@dataclass(frozen=True)
class _Places:
    """What is known of the arguments and results of a jaxpr."""

    over: frozenset[_Variable] = frozenset()
    """Results that have their places already, as those that are written over arguments."""
    donated: frozenset[_Variable] = frozenset()
    """Arguments that nothing else reads."""
    divided: Mapping[_Variable, Dims] = field(default_factory=dict)
    """How some results are divided."""
    turns: bool = False
    """They are those of a loop's body, in which the arguments are alike unless they are donated."""
    of_program: bool = False
    """They are those of a whole program, of which a CPU keeps the results apart from the start."""
    copied: int = 0
    """Bytes of the arguments that are copied for everything but loops."""


def live_arrays(program: Program) -> Live:
    """Walks a program for the arrays that it needs on one device beside its arguments."""
    traced = program.jitted.trace(*program.args, **program.kwargs)
    given = jax.tree.leaves((program.args, program.kwargs))
    leaves = [x for x in given if hasattr(x, "shape") and hasattr(x, "dtype")]
    meshes = [x if isinstance(x, Mesh) else getattr(_sharding(x), "mesh", None) for x in given]
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    devices = np.asarray(getattr(mesh, "devices", ()))
    platform = next((str(device.platform) for device in devices.flat), "")
    walk = _Walk({} if mesh is None else mesh.shape, platform)
    flat, values = _Flat(traced.jaxpr.jaxpr, platform), []
    for v, x in zip(flat.invars, leaves, strict=True):
        spec = getattr(_sharding(x), "spec", None) or [None]
        # Weights have floats, and no rows that are divided over `data`.
        batch = v.aval.dtype.kind in "iub" or "data" in (spec[0] or ())
        values.append(_Value(walk.dims_of(spec, v), batch=batch))
    infos = jax.tree.leaves(traced.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    freed = [info.donated for info in infos if hasattr(info, "donated")]
    donated = {v for v, free in zip(flat.invars, freed, strict=True) if free}
    forms = [(v.shape, v.aval.dtype) for v in flat.invars if v in donated]
    over = set()
    for v in flat.outvars:
        if (form := (v.shape, getattr(v.aval, "dtype", None))) in forms:
            forms.remove(form)
            over.add(v)
    outs = zip(flat.outvars, map(_sharding, jax.tree.leaves(traced.out_info)), strict=True)
    specs = ((v, getattr(out, "spec", None)) for v, out in outs)
    divided = {v: walk.dims_of(spec, v) for v, spec in specs if spec is not None}
    arguments = list(zip(flat.invars, values, strict=True))
    copied = sum(
        walk.local(v, x.dims)
        for v, x in arguments
        if platform == TPU and not x.batch and len(x.dims) == 2 and walk.parts(v, x.dims)[1] % LANES
    )
    copies = sum(walk.local(v, x.dims) for v, x in arguments if v in {*flat.outvars} - donated)
    taken = frozenset(over), frozenset(donated)
    places = _Places(*taken, divided, of_program=True, copied=copied)
    body = _Body(walk, flat, values, places)
    return Live(body.bytes + copies, tuple(sorted(body.arrays, key=lambda x: -x.bytes)))


def _sharding(x: Any) -> Any:
    return getattr(x, "sharding", None)


def _once(dims: Sequence[Axes]) -> Dims:
    """Leaves each axis of the mesh at the first dim that it divides."""
    owners = {axis: k for k, axes in reversed([*enumerate(dims)]) for axis in axes}
    return tuple(tuple(a for a in axes if owners[a] == k) for k, axes in enumerate(dims))


class _Walk:
    def __init__(self, sizes: Mapping[str, int], platform: str):
        """Takes the size of each axis of the mesh."""
        self.sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self.platform = platform
        self.known: dict[Hashable, tuple[object, _Inside]] = {}
        """What was found inside an equation. Its parameters are kept: the id stays theirs."""

    def dims_of(self, spec: Any, v: _Variable) -> Dims:
        """Returns how a PartitionSpec divides a variable."""
        entries = (*(spec or ()), *[None] * len(v.shape))[: len(v.shape)]
        named = ((e,) if isinstance(e, str) else e or () for e in entries)
        return tuple(tuple(axis for axis in axes if axis in self.sizes) for axes in named)

    def parts(self, v: _Variable, dims: Dims) -> list[int]:
        """Returns the shape of a variable on one device."""
        if not any(dims):
            return list(v.shape)
        divided = zip(v.shape, dims, strict=True)
        return [-(-n // math.prod(self.sizes[axis] for axis in axes)) for n, axes in divided]

    def local(self, v: _Variable, dims: Dims) -> int:
        """Returns the bytes of a variable on one device."""
        return math.prod(self.parts(v, dims)) * getattr(v.aval.dtype, "itemsize", 4)

    # How results are divided.

    def spread(self, e: _Equation, xs: list[_Value]) -> list[Dims]:
        name, params, out = e.name, e.params, e.outvars[0].shape
        dims = xs[0].dims if xs else ()
        if name == "sharding_constraint":
            spec = getattr(params["sharding"], "spec", None)
            return [dims if spec is None else self.dims_of(spec, e.outvars[0])]
        if not any(any(x.dims) for x in xs):
            return [_whole(v) for v in e.outvars]
        if name == "dot_general":
            return [self._product(params, *xs)]
        if name == "transpose":
            return [tuple(dims[i] for i in params["permutation"])]
        if name == "broadcast_in_dim":
            placed = dict(zip(params["broadcast_dimensions"], range(len(dims)), strict=True))
            kept = {d: i for d, i in placed.items() if e.invars[0].shape[i] == out[d]}
            return [tuple(dims[kept[d]] if d in kept else () for d in range(len(out)))]
        if name == "expand_dims":
            return [((), *dims)]
        if name == "reshape":
            return [self._reshaped(e.invars[0].shape, out, dims)]
        if name == "squeeze" or _reduces(name):
            gone = params.get("axes", params.get("dimensions", ()))
            return [tuple(d for i, d in enumerate(dims) if i not in gone)] * len(e.outvars)
        if name == "gather":
            offset, index = params["dimension_numbers"].offset_dims, list(xs[1].dims[:-1])
            each = [() if i in offset or not index else index.pop(0) for i in range(len(out))]
            return [_once(each)]
        alike = [(v.shape, x.dims) for v, x in zip(e.invars, xs, strict=True)]
        return [self._as_operands(v.shape, alike) for v in e.outvars]

    @staticmethod
    def _as_operands(shape: tuple[int, ...], operands: list[tuple[tuple[int, ...], Dims]]) -> Dims:
        of_rank = [operand for operand in operands if len(operand[0]) == len(shape)]
        return _once(
            [
                next((dims[k] for sizes, dims in of_rank if sizes[k] == size and dims[k]), ())
                for k, size in enumerate(shape)
            ]
        )

    @staticmethod
    def _product(params: Any, left: _Value, right: _Value) -> Dims:
        (lc, rc), (lb, rb) = params["dimension_numbers"]
        ours = [left.dims[i] for i in range(len(left.dims)) if i not in (*lc, *lb)]
        theirs = [right.dims[i] for i in range(len(right.dims)) if i not in (*rc, *rb)]
        pairs = zip(lb, rb, strict=True)
        both = [tuple(dict.fromkeys(left.dims[i] + right.dims[j])) for i, j in pairs]
        return _once(both + ours + theirs)

    def _reshaped(self, before: tuple[int, ...], after: tuple[int, ...], dims: Dims) -> Dims:
        """Divides, of each group of dims that becomes another group, the first dim that can be; and
        the next one where that is divided into single elements."""
        ends = sorted({*accumulate(before, operator.mul)} & {*accumulate(after, operator.mul)})

        def groups(shape: tuple[int, ...]) -> list[int]:
            starts = accumulate(shape[:-1], operator.mul, initial=1)
            return [bisect_right(ends, n) for n in starts][: len(shape)]

        def parts(axes: Sequence[str]) -> int:
            return math.prod(self.sizes[axis] for axis in axes)

        found: list[Axes] = [()] * len(after)
        ours, theirs = groups(before), groups(after)
        for group in {g for g, axes in zip(ours, dims, strict=True) if axes}:
            left: Axes = ()
            for k in (k for k, g in enumerate(ours) if g == group):
                left += dims[k]
                if left and before[k] != parts(dims[k]):
                    break
            for k in (k for k, g in enumerate(theirs) if g == group):
                n = next(n for n in range(len(left), -1, -1) if after[k] % parts(left[:n]) == 0)
                found[k], left = left[:n], left[n:]
                if n and after[k] != parts(found[k]):
                    break
        return tuple(found)

    # What an equation needs beside its results.

    def inner(self, e: _Equation, xs: list[_Value]) -> _Inside:
        if e.name in BODIED:
            inside = {"cond": self._cond, "shard_map": self._shard_map}.get(e.name, self._loop)
            # One equation is met again: in each layer that calls it, and each time that the loop
            # around it is walked.
            key = id(e.params), *((x.dims, x.batch) for x in xs)
            if key not in self.known:
                self.known[key] = e.params, inside(e, xs)
            size, outs, arrays = self.known[key][1]
            return size, outs[:], arrays[:]
        # A sum is whole before each device takes its part.
        whole = self.local(e.invars[0], xs[0].dims) if e.name == "reduce_scatter" else 0
        return whole, self.spread(e, xs), []

    def gathered(
        self, e: _Equation, xs: list[_Value], outs: list[Dims]
    ) -> Iterator[tuple[frozenset[_Variable], int, int]]:
        """Yields roots and bytes of the operands that the devices gather, and of the copies from
        which they do: what a constraint asks for, and weights, over the axes that divide the batch
        which they meet."""
        if e.name not in ("sharding_constraint", "dot_general"):
            return
        of_batch = {axis for x in xs if x.batch for axes in x.dims for axis in axes}
        for v, x in zip(e.invars, xs, strict=True):
            dims = outs[0]
            if e.name == "dot_general":
                dims = tuple(tuple(a for a in axes if a not in of_batch) for axes in x.dims)
            part, whole = self.local(v, x.dims), self.local(v, dims)
            if whole <= part or (x.batch and e.name == "dot_general"):
                continue
            moved = 0 if self.parts(v, x.dims)[1:] == self.parts(v, dims)[1:] else part
            if self.platform == CPU and v.aval.dtype == jnp.bfloat16:
                moved = 2 * whole
            yield x.roots, whole, 0 if self.platform == TPU else moved

    def _cond(self, e: _Equation, xs: list[_Value]) -> _Inside:
        branches = [_Flat(b.jaxpr, self.platform) for b in e.params["branches"]]
        bodies = [_Body(self, b, xs[1:], _Places(frozenset(b.outvars))) for b in branches]
        body = max(bodies, key=lambda body: body.bytes)
        return body.bytes, [x.dims for x in body.results], body.arrays

    def _loop(self, e: _Equation, xs: list[_Value]) -> _Inside:
        loop = _Loop.of(e)
        flat, consts, carries = _Flat(loop.jaxpr, self.platform), loop.consts, len(loop.begun)
        first = consts + carries
        given = xs[len(xs) - len(flat.invars) :]
        given[first:] = [x._replace(dims=x.dims[1:]) for x in given[first:]]
        over, donated = frozenset(flat.outvars[:carries]), frozenset(flat.invars[consts:])
        places = _Places(over, donated, turns=True)
        for _ in range(2):  # until the division of the carry settles
            body, before = _Body(self, flat, given, places), given[:]
            for i, out in enumerate(body.results[:carries], consts):
                pairs = zip(given[i].dims, out.dims, strict=True)
                joined = _once([x if x == y else tuple(dict.fromkeys(x + y)) for x, y in pairs])
                given[i] = given[i]._replace(dims=joined, batch=given[i].batch or out.batch)
            if given == before or not self.sizes:
                break
        slices = map(self.local, flat.invars[first:], (x.dims for x in given[first:]))
        dims = [x.dims for x in body.results]
        stacked = [((), *divided) for divided in dims[carries:]]
        return body.bytes + sum(slices), dims[:carries] + stacked, body.arrays

    def _shard_map(self, e: _Equation, xs: list[_Value]) -> _Inside:
        specs = e.params.get("out_specs", e.params.get("out_names"))
        inside, flat = _Walk({}, self.platform), _Flat(e.params["jaxpr"], self.platform)
        given = [_Value(_whole(v), batch=x.batch) for v, x in zip(flat.invars, xs, strict=True)]
        body = _Body(inside, flat, given)
        beside = max(0, body.bytes - sum(inside.local(v, ()) for v in flat.outvars))
        gathered = sum(
            max(0, inside.local(v, ()) - self.local(o, x.dims))
            for v, o, x in zip(flat.invars, e.invars, xs, strict=True)
        )
        dims = [self.dims_of(s, v) for v, s in zip(e.outvars, specs, strict=True)]
        return beside + gathered, dims, _largest_within(beside, body.arrays)


class _Body:
    """A jaxpr as it runs: `bytes` at the peak beside the inputs, its `results`, and the `arrays` at
    the peak."""

    def __init__(
        self, walk: _Walk, jaxpr: _Flat, given: Sequence[_Value], places: _Places = _Places()
    ):
        self.walk, self.jaxpr, self.places, self.platform = walk, jaxpr, places, walk.platform
        self.values = {v: _Value(_whole(v), frozenset([v])) for v in jaxpr.constvars}
        for v, x in zip(jaxpr.invars, given, strict=True):
            self.values[v] = x._replace(roots=frozenset([v]))
        inputs = {*self.values}
        # Roots -> bytes of what is gathered of them at the start, and of the copies for it.
        self.early: dict[frozenset[_Variable], tuple[int, int]] = {}
        self.kept = inputs - places.donated
        self.constants = {*(self.kept if places.turns else inputs)}
        self.stored, self.taken = self._stored()
        steps = list(map(self._step, jaxpr.equations))
        if walk.sizes:
            self._divide_as_read()
        if self.platform == CPU:
            steps = _breadth_first(steps)
        self.results = list(map(self._read, jaxpr.outvars))
        last: dict[_Variable, int] = {}
        for k, step in enumerate(steps):
            last |= dict.fromkeys((*step.made, *step.roots), k)
        for x in self.results:
            last |= dict.fromkeys(x.roots, len(steps))
        free = places.over | inputs | self._written_over(steps, last)
        sizes = {v: 0 if v in free else self._held(v) for v in self.values}
        for e in jaxpr.equations:
            if e.name == "all_gather" and e.params["all_gather_dimension"] and self.platform != TPU:
                sizes[e.outvars[0]] += self._held(e.invars[0])
        begun = self._begun(steps, sizes)
        if self.platform == CPU and places.of_program:
            begun |= self.stored & {*jaxpr.outvars}
        last |= dict.fromkeys(begun, len(steps))
        live = sum(sizes[v] for v in begun) + sum(whole for whole, _ in self.early.values())
        self.bytes, peak = live + sum(moved for _, moved in self.early.values()), 0
        ends = [0] * (len(steps) + 1)
        for k, step in enumerate(steps):
            for v in step.made:
                ends[last[v]] += sizes[v]
                live += 0 if v in begun else sizes[v]
            if live + step.extra > self.bytes:
                self.bytes, peak = live + step.extra, k
            live -= ends[k]
        self.arrays = steps[peak].arrays if steps else []
        self.arrays += (
            Array(sizes[v], _form(v.aval), _line(step.equation.source))
            for step in steps[: peak + 1]
            for v in step.made
            if last[v] >= peak and sizes[v]
        )

    def _read(self, v: _Variable) -> _Value:
        return self.values.get(v) or _Value(_whole(v))

    def _held(self, v: _Variable) -> int:
        return self.walk.local(v, self._read(v).dims)

    def _step(self, e: _Equation) -> _Step:
        xs = list(map(self._read, e.invars))
        extra, outs, within = self.walk.inner(e, xs)
        for of, whole, moved in self.walk.gathered(e, xs, outs):
            if self.platform == CPU and of <= self.constants:
                rows = self.places.turns and moved
                self.early[of] = whole, max(whole, moved) if rows else moved
            else:
                extra += whole + moved
        batch = any(x.batch for x in xs)
        roots = frozenset().union(*(x.roots for x in xs))
        made = [v for v in e.outvars if v in self.stored]
        if e.name == CONVERT and roots <= self.constants:
            self.constants.update(made)
        for i, (v, dims) in enumerate(zip(e.outvars, outs, strict=True)):
            own = xs[i].roots if e.name == BARRIER else frozenset([v]) if v in made else roots
            self.values[v] = _Value(self.places.divided.get(v, dims), own, batch)
        return _Step(e, roots, made, extra + (e.name not in LOOPS) * self.places.copied, within)

    def _begun(self, steps: list[_Step], sizes: dict[_Variable, int]) -> set[_Variable]:
        """Finds what XLA on a TPU computes before a loop: what its constants alone decide, if the
        results are no larger than the constants."""
        begun = set[_Variable]()
        for step in steps if self.platform == TPU and self.places.turns else ():
            if step.roots and step.roots <= self.constants | begun:
                read = sum(map(self._held, step.roots))
                begun.update(v for v in step.made if sizes[v] <= read)
        return begun

    def _divide_as_read(self) -> None:
        """Divides arrays as what is computed from them element by element, back to where a loop
        has stacked them."""
        makers = {v: e.name for e in self.jaxpr.equations for v in e.outvars}
        for e in reversed(self.jaxpr.equations):
            if e.name not in MOVED or e.name in LOOPS:
                continue
            results = e.outvars if e.name == BARRIER else cycle(e.outvars)
            for v, o in zip(e.invars, results, strict=False):
                if v.shape == o.shape and makers.get(v) in MOVED:
                    dims = self.values[v].dims, self.values[o].dims
                    least = min(dims, key=partial(self.walk.local, v))
                    self.values[v] = self.values[v]._replace(dims=least)

    def _stored(self) -> tuple[set[_Variable], dict[_Variable, _Variable]]:
        """Returns the variables that are in memory, and for those that take the place of another
        one, that one."""
        readers: dict[_Variable, list[_Equation]] = defaultdict(list)
        for e in self.jaxpr.equations:
            for v in e.invars:
                readers[v].append(e)
        results = {*self.jaxpr.outvars}

        # Variable -> the first two of what its fusions end in: results, and what is no fusion.
        ends: dict[_Variable, set[Any]] = defaultdict(set)
        for v in results:
            ends[v].add(v)
        whole = set[_Variable]()  # what something reads that is no fusion, or views of it
        for k, e in enumerate(reversed(self.jaxpr.equations)):
            found = set().union(*(ends[v] for v in e.outvars)) if e.name in FUSED else {k}
            for v in e.invars:
                if len(ends[v]) < 2:
                    ends[v] |= found
            views = e.name in VIEWS and not whole.isdisjoint(e.outvars)
            if views or (e.name not in FUSED and not _reduces(e.name)):
                whole.update(e.invars)

        def written_out(e: _Equation, v: _Variable) -> bool:
            if e.name not in FUSED or v in results:
                return True
            if e.name in VIEWS or v in whole:
                return e.name not in VIEWS
            # XLA on a CPU fuses what is dear into one reader alone, and reductions apart.
            apart = v in dear or any(_reduces(r.name) or r.name == "slice" for r in readers[v])
            return self.platform == CPU and len(readers[v]) > 1 and apart

        stored, dear = set[_Variable](), set[_Variable]()
        roots: dict[_Variable, frozenset[_Variable]] = {}
        if self.platform == CPU:
            stored = self._broadcast_for(readers)
        for e in self.jaxpr.equations:
            if e.name == BARRIER:
                continue
            if e.name in DEAR or not dear.isdisjoint(e.invars):
                dear.update(e.outvars)
            made = {v for v in e.outvars if written_out(e, v)}
            terms = frozenset[_Variable]().union(*(roots.get(v, (v,)) for v in e.invars))
            if e.name == "add" and len(ends[e.outvars[0]]) > 1:  # a sum that goes on
                size = math.prod(e.outvars[0].shape)
                if sum(math.prod(x.shape) == size for x in terms) > SUMMED:
                    made.update(e.outvars)
            roots |= {v: frozenset([v]) if v in made else terms for v in e.outvars}
            stored |= made
            dear -= made
        taken: dict[_Variable, _Variable] = {}
        if self.platform == CPU:
            return stored, taken
        within = stored - results
        for v in (v for e in self.jaxpr.equations for v in e.outvars if v in within):
            o = v
            while len(read := readers[o]) == 1 and read[0].name in FUSED:
                o = read[0].outvars[0]
                if o in stored:
                    taken.setdefault(o, v)
                    break
        products = {e.outvars[0] for e in self.jaxpr.equations if e.name == "dot_general"}
        # A loop's carry is read until the product is done.
        stored -= products & {v for o, v in taken.items() if o not in self.places.over}
        return stored, {o: v for o, v in taken.items() if v in stored}

    def _broadcast_for(self, readers: Mapping[_Variable, list[_Equation]]) -> set[_Variable]:
        """Finds what XLA on a CPU broadcasts in memory: factors of a product that is fused with a
        reduction, such as those of softmax's gradients."""
        wide = {e.outvars[0] for e in self.jaxpr.equations if e.name == "broadcast_in_dim"}
        found = set[_Variable]()
        for e in self.jaxpr.equations:
            v = e.outvars[0]
            while len(read := readers[v]) == 1 and read[0].name in VIEWS:
                v = read[0].outvars[0]
            if e.name == "dot_general" and len(read) > 1:
                found |= {o for reader in read for o in reader.invars} & wide
        return found

    def _written_over(self, steps: list[_Step], last: dict[_Variable, int]) -> set[_Variable]:
        """Returns carries of loops, and arrays that are updated, which take the place of what they
        began with, unless that is kept; it lives as long as they do."""
        over, kept = set[_Variable](), {*self.kept}
        for k, (e, _, made, _, _) in enumerate(steps):
            pairs: Iterable[tuple[_Variable, _Variable]] = ()
            if e.name in LOOPS:
                pairs = zip(_Loop.of(e).begun, e.outvars, strict=False)
            elif e.name in UPDATES:
                pairs = [(e.invars[0], e.outvars[0])]
            elif e.name == "shard_map":
                inner = e.params["jaxpr"]
                passed = dict(zip(inner.invars, e.invars, strict=True))
                outs = zip(inner.outvars, e.outvars, strict=True)
                pairs = [(passed[v], o) for v, o in outs if isinstance(v, core.Var) and v in passed]
            elif e.name in FUSED:
                pairs = [(self.taken[v], v) for v in made if v in self.taken]
            for a, b in pairs:
                roots = self._read(a).roots
                if b not in made or len(roots) != 1:
                    continue
                (root,) = roots
                if root not in kept and last[root] <= k and self._held(root) == self._held(b):
                    over.add(b)
                    kept.add(root)
                    last[root] = max(last[root], last[b])
        return over


class _Loop(NamedTuple):
    jaxpr: Any
    consts: int
    """Inputs of the body that are the same at each turn, before the carries."""
    begun: list[_Variable]
    """What the carries are at first."""

    @classmethod
    def of(cls, e: _Equation) -> _Loop:
        if e.name == "while":
            jaxpr, consts = e.params["body_jaxpr"].jaxpr, e.params["body_nconsts"]
            return cls(jaxpr, consts, e.invars[-len(e.outvars) :])
        jaxpr = getattr(e.params["jaxpr"], "jaxpr", e.params["jaxpr"])
        # Only what is cut into slices, and what is stacked, has a dim more outside.
        whole, carries = (
            sum(len(a.shape) == len(b.aval.shape) for a, b in zip(outside, within, strict=True))
            for outside, within in ((e.invars, jaxpr.invars), (e.outvars, jaxpr.outvars))
        )
        return cls(jaxpr, whole - carries, e.invars[whole - carries : whole])


def _breadth_first(steps: list[_Step]) -> list[_Step]:
    """Orders steps as they become ready."""
    steps = [step for step in steps if step.made or step.extra]
    makers = {v: k for k, step in enumerate(steps) for v in step.made}
    missing = [{makers[v] for v in step.roots if v in makers} for step in steps]
    readers: list[list[int]] = [[] for _ in steps]
    for k, needed in enumerate(missing):
        for maker in needed:
            readers[maker].append(k)
    order = [k for k, needed in enumerate(missing) if not needed]
    for maker in order:  # which grows
        for k in readers[maker]:
            missing[k].remove(maker)
            if not missing[k]:
                order.append(k)
    return [steps[k] for k in order]


def _largest_within(size: int, arrays: list[Array]) -> list[Array]:
    """Returns the largest arrays that have room in so many bytes: those of a body without its
    results."""
    found = []
    for array in sorted(arrays, key=lambda x: -x.bytes):
        if array.bytes <= size:
            found.append(array)
            size -= array.bytes
    return found


def _whole(v: _Variable) -> Dims:
    return ((),) * len(v.shape)


def _form(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _reduces(name: str) -> bool:
    return name not in FUSED and name.startswith(("reduce", "argm"))


def _line(source: Any) -> str:
    """Returns the innermost line of jaxrl that an equation comes from."""
    traceback = getattr(source, "traceback", None)
    for frame in () if traceback is None else traceback.frames:
        _, found, name = frame.file_name.rpartition("/jaxrl/")
        if found:
            return f"{name}:{frame.line_num}"
    return ""
