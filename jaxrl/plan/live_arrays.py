"""What a program needs on one device beside its arguments, by a walk over its jaxpr: no formula,
and no constant fitted to a compiler.

1. What is computed element by element is in memory only where something reads it that is no fusion
   (a product, a loop, a kernel, a sort, a gather, a barrier), or where it is a result.
2. An array lives from the equation that makes it to the last one that reads it, or that reads what
   is fused from it.
3. What is computed from an array that nothing else reads takes its place; a product writes it
   directly. So do a loop's carries, and what is updated, with what they began with, and results
   with donated arguments.
4. A loop needs its body once, and its stacked results whole. A TPU computes before a loop what the
   loop's constants alone decide, such as weights in the dtype of the products.
5. Arrays are divided over the devices as what they are computed from, stacked gradients as what
   they are added to, and results as the program says.
6. What is summed over the devices is whole on each until it is used; weights that are divided along
   another dim than the result are gathered for it. Where that is not their first dim, a GPU and a
   CPU gather a transposed copy.
7. A TPU's tiles have 128 columns: it keeps a table of another number transposed, and copies it
   where its rows are read.

8. A CPU writes out what is dear and read twice, writes products alone, has copies of bfloat16
   operands in float32, and gathers at the start what it gathers of arguments.

`benchmarks/plan_compared.py` compares it with the compilers of GPUs and TPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxrl.models.kernels import CPU as CPU_TARGET
from jaxrl.models.kernels import TPU
from jaxrl.roles.declared import Program

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
"""The axes of the mesh that divide each dim of an array."""

_VIEWS = """broadcast_in_dim iota reshape squeeze transpose expand_dims slice stop_gradient split
copy sharding_constraint name reshard pvary"""
_FUSED = """add sub mul div neg sign max min pow integer_pow exp exp2 log log1p expm1 tanh logistic
sqrt rsqrt cbrt abs floor ceil round is_finite and or not xor eq ne lt le gt ge select_n rev pad
convert_element_type copy_p rem sin cos tan erf erf_inv clamp nextafter square shift_left
shift_right_logical shift_right_arithmetic reduce_precision add_any random_wrap mul_add
random_unwrap random_bits threefry2x32 bitcast_convert_type population_count real imag concatenate
device_put psum_invariant stack"""
_DEAR = (
    """exp exp2 log log1p expm1 tanh logistic sqrt rsqrt cbrt pow div rem sin cos tan erf erf_inv"""
)
_CALLS = """eval_jaxpr pjit jit closed_call core_call remat2 checkpoint remat custom_jvp_call
custom_vjp_call custom_vjp_call_jaxpr"""
VIEWS = frozenset(_VIEWS.split())
"""Operations that a fusion reads through, whatever reads their results."""
FUSED = VIEWS | frozenset(_FUSED.split())
"""Operations element by element."""
UPDATES = ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add")
"""Operations that change a part of their first argument."""
CALLS = frozenset(_CALLS.split())
"""Operations that call a jaxpr, their parameter `jaxpr`, `call_jaxpr` or `fun_jaxpr`."""
CPU = CPU_TARGET.platform
LANES = 128
"""Columns of a TPU's tile."""
DEAR = frozenset(_DEAR.split())
"""Operations of `FUSED` that are too dear to be computed for each reader."""
LOOPS = ("scan", "while")
BARRIER = "optimization_barrier"
MOVED = FUSED | {BARRIER, "scan"}
"""Operations whose results are divided as what is computed from them."""
VIEWS_DEEP = 12
"""Views of views that are followed."""


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


@dataclass
class _Value:
    """What is known of a variable."""

    dims: Dims
    roots: frozenset[Any] = frozenset()
    """Variables in memory from which it is computed."""
    made: bool = False
    """It is itself in memory."""
    batch: bool = False
    """It depends on the batch, not on weights alone."""


class _Variable:
    """A result of a call that is written out in place: each call has its own."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval


@dataclass(eq=False)
class _Equation:
    primitive: Any
    params: Any
    invars: list[Any]
    outvars: list[Any]
    source: Any

    @property
    def name(self) -> str:
        return str(self.primitive.name)


class _Step(NamedTuple):
    """An equation as the walk passes it."""

    equation: _Equation
    roots: frozenset[Any]
    """Variables in memory that it reads, or from which what it reads is computed."""
    made: list[Any]
    """Its results that are in memory."""
    extra: int
    """Bytes that it needs beside them."""
    arrays: list[Array]
    """Those at the peak of its body."""


class _Flat:
    """The equations of a jaxpr, with those of the calls in it in their places."""

    def __init__(self, jaxpr: Any):
        self.invars, self.constvars = list(jaxpr.invars), list(jaxpr.constvars)
        self.equations: list[_Equation] = []
        self.outvars = self._inline(jaxpr, {})

    def _inline(self, jaxpr: Any, outer: dict[Any, Any]) -> list[Any]:
        def look(v: Any) -> Any:
            return v if isinstance(v, core.Literal) else outer.get(v, v)

        for e in jaxpr.eqns:
            inner = _called(e)
            if inner is not None and len(inner.invars) == len(e.invars):
                within = dict(zip(inner.invars, map(look, e.invars), strict=True))
                within |= {c: _Variable(c.aval) for c in inner.constvars}
                results = self._inline(inner, within)
                outer |= dict(zip(e.outvars, results, strict=True))
                continue
            outer |= {v: _Variable(v.aval) for v in e.outvars}
            given, made = list(map(look, e.invars)), [outer[v] for v in e.outvars]
            self.equations.append(_Equation(e.primitive, e.params, given, made, e.source_info))
        return list(map(look, jaxpr.outvars))


def _called(e: Any) -> Any:
    if e.primitive.name not in CALLS:
        return None
    inner = next((x for key, x in e.params.items() if key.endswith("jaxpr")), None)
    return getattr(inner, "jaxpr", inner)


def live_arrays(program: Program) -> Live:
    """Walks a program for the arrays that it needs on one device beside its arguments."""
    traced = program.jitted.trace(*program.args, **program.kwargs)
    arguments = program.args, program.kwargs
    jaxpr = traced.jaxpr.jaxpr
    leaves = [x for x in jax.tree.leaves(arguments) if hasattr(x, "shape") and hasattr(x, "dtype")]
    meshes = (getattr(getattr(x, "sharding", None), "mesh", None) for x in leaves)
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    devices = np.asarray(getattr(mesh, "devices", ()))
    platform = next((str(device.platform) for device in devices.flat), "")
    walk = _Walk({} if mesh is None else dict(mesh.shape), platform)
    values = []
    for v, x in zip(jaxpr.invars, leaves, strict=True):
        spec = getattr(getattr(x, "sharding", None), "spec", None)
        dims = _dims_of(spec, len(v.aval.shape))
        # Weights have floats, and no rows that are divided over `data`.
        batch = v.aval.dtype.kind in "iub" or any("data" in axes for axes in dims[:1])
        values.append(_Value(dims, batch=batch))
    infos = jax.tree.leaves(traced.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    donated = [info.donated for info in infos if hasattr(info, "donated")]
    given = [v for v, freed in zip(jaxpr.invars, donated, strict=True) if freed]
    free = [(v.aval.shape, v.aval.dtype) for v in given]
    flat, over = _Flat(jaxpr), set()
    for v in flat.outvars:
        form = (v.aval.shape, v.aval.dtype)
        if form in free and not isinstance(v, core.Literal):
            free.remove(form)
            over.add(v)
    # How results are divided, where the program says so.
    said: dict[Any, Dims] = {}
    for v, out in zip(flat.outvars, jax.tree.leaves(traced.out_info), strict=True):
        spec = getattr(getattr(out, "sharding", None), "spec", None)
        if spec is not None and not isinstance(v, core.Literal):
            said[v] = _dims_of(spec, len(_shape(v)))
    copied = sum(
        walk.local(v, x.dims)
        for v, x in zip(jaxpr.invars, values, strict=True)
        if platform == TPU and not x.batch and len(x.dims) == 2 and walk.parts(v, x.dims)[1] % LANES
    )
    constants = frozenset(jaxpr.invars if platform == CPU else ())
    place = _Places(frozenset(over), frozenset(given), said, constants, copied)
    peak, _, arrays = walk.peak(flat, values, place)
    return Live(peak, tuple(sorted(arrays, key=lambda x: -x.bytes)))


def _dims_of(spec: Any, n: int) -> Dims:
    entries = (*(spec or ()), *[None] * n)[:n]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _once(dims: Sequence[Axes]) -> Dims:
    """Leaves each axis of the mesh at the first dim that it divides."""
    seen: set[str] = set()
    found = []
    for axes in dims:
        found.append(tuple(axis for axis in axes if axis not in seen))
        seen.update(axes)
    return tuple(found)


@dataclass(frozen=True)
class _Places:
    """What is known of the arguments and results of a jaxpr."""

    over: frozenset[Any] = frozenset()
    """Results that are written over arguments."""
    donated: frozenset[Any] = frozenset()
    """Arguments that nothing else reads."""
    divided: Mapping[Any, Dims] = field(default_factory=dict)
    """How some results are divided."""
    constants: frozenset[Any] = frozenset()
    """Arguments that are the same at each turn of a loop."""
    copied: int = 0
    """Bytes of the arguments that are copied for everything but loops."""


class _Walk:
    def __init__(self, sizes: dict[str, int], platform: str):
        """Takes the size of each axis of the mesh."""
        self.sizes, self.platform = sizes, platform

    def parts(self, v: Any, dims: Dims) -> list[int]:
        """Returns the shape of a variable on one device."""
        divided = zip(v.aval.shape, dims or [()] * len(v.aval.shape), strict=False)
        return [
            -(-size // math.prod(self.sizes.get(axis, 1) for axis in axes))
            for size, axes in divided
        ]

    def local(self, v: Any, dims: Dims) -> int:
        """Returns the bytes of a variable on one device."""
        if not hasattr(v.aval, "shape") or not hasattr(v.aval, "dtype"):
            return 0
        return math.prod(self.parts(v, dims)) * getattr(v.aval.dtype, "itemsize", 4)

    # How results are divided.

    def spread(self, e: _Equation, xs: list[_Value]) -> list[Dims]:
        name, params = e.name, e.params
        out = _shape(e.outvars[0])
        if name == "sharding_constraint":
            spec = getattr(params["sharding"], "spec", None)
            return [xs[0].dims if spec is None else _dims_of(spec, len(out))]
        if name == "dot_general":
            return [self._product(params, *xs)]
        if name == "transpose":
            return [tuple(xs[0].dims[i] for i in params["permutation"])]
        if name == "broadcast_in_dim":
            found: list[Axes] = [()] * len(out)
            for i, d in enumerate(params["broadcast_dimensions"]):
                if _shape(e.invars[0])[i] == out[d]:
                    found[d] = xs[0].dims[i]
            return [tuple(found)]
        if name == "reshape":
            return [self._reshaped(_shape(e.invars[0]), out, xs[0].dims)]
        if name == "squeeze":
            gone = params["dimensions"]
            return [tuple(d for i, d in enumerate(xs[0].dims) if i not in gone)]
        if name.startswith(("reduce_", "argm")) and name != "reduce_precision":
            gone = params.get("axes", params.get("dimensions", ()))
            kept = tuple(d for i, d in enumerate(xs[0].dims) if i not in gone)
            return [kept] * len(e.outvars)
        if name == "gather":
            offset, index = params["dimension_numbers"].offset_dims, list(xs[1].dims[:-1])
            each = [() if i in offset or not index else index.pop(0) for i in range(len(out))]
            return [_once(each)]
        results = []
        for v in e.outvars:
            shape = _shape(v)
            best: list[Axes] = [()] * len(shape)
            pairs = zip(e.invars, xs, strict=True)
            for x, value in sorted(pairs, key=lambda pair: not pair[1].batch):
                given = _shape(x)
                if len(given) == len(shape):
                    for k, size in enumerate(shape):
                        if given[k] == size and not best[k]:
                            best[k] = value.dims[k]
                elif given and shape and given[0] == shape[0] and not best[0]:
                    best[0] = value.dims[0]
            results.append(_once(best))
        return results

    @staticmethod
    def _product(params: Any, left: _Value, right: _Value) -> Dims:
        (lc, rc), (lb, rb) = params["dimension_numbers"]
        ours = [left.dims[i] for i in range(len(left.dims)) if i not in (*lc, *lb)]
        theirs = [right.dims[i] for i in range(len(right.dims)) if i not in (*rc, *rb)]
        pairs = zip(lb, rb, strict=True)
        both = [tuple(dict.fromkeys(left.dims[i] + right.dims[j])) for i, j in pairs]
        if left.batch or not right.batch:
            return _once(both + ours + theirs)
        used = {axis for axes in both + theirs for axis in axes}
        ours = [tuple(axis for axis in axes if axis not in used) for axes in ours]
        return tuple(both + ours + theirs)

    def _reshaped(self, before: tuple[int, ...], after: tuple[int, ...], dims: Dims) -> Dims:
        found: list[Axes] = [()] * len(after)
        i = j = 0
        while i < len(before) and j < len(after):
            first, start, p, q = i, j, before[i], after[j]
            i, j = i + 1, j + 1
            while p != q:
                if p < q:
                    if i >= len(before):
                        return tuple(found)
                    p, i = p * before[i], i + 1
                else:
                    if j >= len(after):
                        return tuple(found)
                    q, j = q * after[j], j + 1
            axes = next((dims[k] for k in range(first, i) if dims[k]), ())
            parts = math.prod(self.sizes.get(axis, 1) for axis in axes)
            at = next((k for k in range(start, j) if after[k] % parts == 0), None)
            if at is not None:
                found[at] = axes
        return tuple(found)

    # What is alive.

    def peak(
        self, jaxpr: _Flat, given: Sequence[_Value], places: _Places = _Places()
    ) -> tuple[int, list[_Value], list[Array]]:
        """Returns the bytes at the peak beside the inputs, the results, and the arrays at the
        peak."""
        values: dict[Any, _Value] = {}

        def read(v: Any) -> _Value:
            found = None if isinstance(v, core.Literal) else values.get(v)
            return found or _Value(((),) * len(_shape(v)))

        for v, x in zip(jaxpr.invars, given, strict=True):
            values[v] = _Value(x.dims, frozenset([v]), True, x.batch)
        for v in jaxpr.constvars:
            values[v] = _Value(((),) * len(_shape(v)), frozenset([v]), True)
        inputs = {*jaxpr.invars, *jaxpr.constvars}
        results = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
        stored, taken = self._stored(jaxpr, results, places.over)
        steps: list[_Step] = []
        before: dict[frozenset[Any], int] = {}
        for e in jaxpr.equations:
            xs = [read(v) for v in e.invars]
            extra, outs, within = self.inner(e, xs)
            gathered = self.gathered(e, xs, outs)
            # A CPU gathers before a loop what is the same at each turn.
            once = {x for x in gathered if x <= places.constants and self.platform == CPU}
            before |= {x: gathered.pop(x) for x in once}
            extra += sum(gathered.values())
            batch = any(x.batch for x in xs)
            roots = frozenset().union(*(x.roots for x in xs))
            made = [v for v in e.outvars if v in stored and e.name != BARRIER]
            for i, (v, dims) in enumerate(zip(e.outvars, outs, strict=True)):
                own = xs[i].roots if e.name == BARRIER else frozenset([v]) if v in made else roots
                values[v] = _Value(places.divided.get(v, dims), own, v in made, batch)
            if e.name not in LOOPS:
                extra += places.copied
            steps.append(_Step(e, roots, made, extra, within))
        self._divide_as_read(jaxpr, values)
        last: dict[Any, int] = {}
        for k, step in enumerate(steps):
            last |= dict.fromkeys(step.roots, k)
            for v in step.made:
                last.setdefault(v, k)
        for v in results:
            if v in values:
                last |= dict.fromkeys(values[v].roots, len(steps))
        free = places.over | inputs
        free |= self._written_over(steps, last, inputs, places.donated, values, taken)
        sizes = {v: 0 if v in free else self.local(v, x.dims) for v, x in values.items()}
        for e in jaxpr.equations:
            if e.name == "all_gather" and e.params["all_gather_dimension"] and self.platform != TPU:
                sizes[e.outvars[0]] += self.local(e.invars[0], read(e.invars[0]).dims)
        begun = (
            self._begun(steps, sizes, values, places.constants) if self.platform == TPU else set()
        )
        last |= dict.fromkeys(begun, len(steps))
        ends: dict[int, list[Any]] = {}
        for v, k in last.items():
            ends.setdefault(k, []).append(v)
        peak = live = sum(sizes[v] for v in begun) + sum(before.values())
        where = 0
        for k, step in enumerate(steps):
            live += sum(sizes[v] for v in step.made if v not in begun)
            begun.update(step.made)
            if live + step.extra > peak:
                peak, where = live + step.extra, k
            live -= sum(sizes[v] for v in ends.get(k, ()) if v in begun)
        arrays = _filling(steps[where].arrays, steps[where].extra) if steps else []
        for step in steps[: where + 1]:
            for v in step.made:
                if last[v] >= where and sizes[v]:
                    arrays.append(Array(sizes[v], _form(v.aval), _line(step.equation.source)))
        return peak, [read(v) for v in jaxpr.outvars], arrays

    def _begun(
        self,
        steps: list[_Step],
        sizes: dict[Any, int],
        values: dict[Any, _Value],
        constants: frozenset[Any],
    ) -> set[Any]:
        """Finds the equations that XLA computes before a loop: those that its constants alone
        decide, if their results are no larger than the constants."""
        begun = set[Any]()
        for step in steps:
            if step.roots and step.roots <= constants | begun:
                read = sum(self.local(x, values[x].dims) for x in step.roots)
                begun.update(v for v in step.made if sizes[v] <= read)
        return begun

    def _divide_as_read(self, jaxpr: _Flat, values: dict[Any, _Value]) -> None:
        """Divides arrays as what is computed from them element by element, back to where a loop
        has stacked them."""
        makers = {v: e.name for e in jaxpr.equations for v in e.outvars}
        for e in reversed(jaxpr.equations):
            if e.name not in MOVED or e.name in LOOPS:
                continue
            results = e.outvars if e.name == BARRIER else cycle(e.outvars)
            for v, o in zip(e.invars, results, strict=False):
                if isinstance(v, core.Literal) or _shape(v) != _shape(o):
                    continue
                if makers.get(v) in MOVED:
                    dims = values[v].dims, values[o].dims
                    values[v].dims = min(dims, key=partial(self.local, v))

    def _stored(
        self, jaxpr: _Flat, results: set[Any], over: frozenset[Any]
    ) -> tuple[set[Any], dict[Any, Any]]:
        """Returns the variables that are in memory, and for those that take the place of another
        one, that one."""
        readers: dict[Any, list[_Equation]] = {}
        for e in jaxpr.equations:
            for v in e.invars:
                if not isinstance(v, core.Literal):
                    readers.setdefault(v, []).append(e)

        def read_whole(v: Any, depth: int = 0) -> bool:
            """Returns whether something that is no fusion reads a variable, or a view of it."""
            return any(
                any(read_whole(o, depth + 1) for o in e.outvars)
                if e.name in VIEWS and depth < VIEWS_DEEP
                else e.name not in FUSED and not _reduces(e.name)
                for e in readers.get(v, ())
            )

        def written_as(v: Any) -> Any:
            """Follows a variable through its chain of single, fused readers to the last result."""
            while len(read := readers.get(v, [])) == 1 and read[0].name in FUSED:
                v = read[0].outvars[0]
                if v in stored:
                    return v
            return None

        stored = {
            v
            for e in jaxpr.equations
            for v in e.outvars
            if (v in results and e.name != "iota")
            or (e.name not in VIEWS and (e.name not in FUSED or read_whole(v)))
            # XLA on a CPU fuses what is dear into one reader alone.
            or (self.platform == CPU and e.name in DEAR and len(readers.get(v, ())) > 1)
        }
        taken: dict[Any, Any] = {}
        for e in jaxpr.equations:
            for v in e.outvars:
                if v in stored and v not in results and (o := written_as(v)) is not None:
                    taken.setdefault(o, v)
        products = {e.outvars[0] for e in jaxpr.equations if e.name == "dot_general"}
        products &= {v for o, v in taken.items() if o not in over and self.platform != CPU}
        return stored - products, taken

    def _written_over(
        self,
        steps: list[_Step],
        last: dict[Any, int],
        inputs: set[Any],
        donated: frozenset[Any],
        values: dict[Any, _Value],
        taken: dict[Any, Any],
    ) -> set[Any]:
        """Returns carries of loops, and arrays that are updated, which take the place of what they
        began with; that lives as long as they do."""

        def held(v: Any) -> int:
            return self.local(v, values[v].dims)

        over, kept = set[Any](), set[Any]()
        for k, (e, _, made, _, _) in enumerate(steps):
            if e.name == "scan":
                consts, carries, _ = _scan_parts(e)
                begun = e.invars[consts : consts + carries]
                pairs = list(zip(begun, e.outvars[:carries], strict=True))
            elif e.name == "while":
                pairs = list(zip(e.invars[-len(e.outvars) :], e.outvars, strict=True))
            elif e.name in UPDATES:
                pairs = [(e.invars[0], e.outvars[0])]
            elif e.name in FUSED:
                before = [(taken[v], v) for v in made if v in taken and values[taken[v]].made]
                pairs = [(a, b) for a, b in before if held(a) == held(b)]
            else:
                continue
            for a, b in pairs:
                if isinstance(a, core.Literal) or b not in made or a not in values:
                    continue
                value = values[a]
                root = a if value.made else next(iter(value.roots), None)
                if root is None or root in kept or (not value.made and len(value.roots) > 1):
                    continue
                if (root in inputs and root not in donated) or last.get(root, k) > k:
                    continue
                over.add(b)
                kept.add(root)
                if root not in inputs:
                    last[root] = last.get(b, k)
        return over

    # What an equation needs beside its results.

    def inner(self, e: _Equation, xs: list[_Value]) -> tuple[int, list[Dims], list[Array]]:
        if e.name == "scan":
            return self._scan(e, xs)
        if e.name == "while":
            body, skipped = _Flat(e.params["body_jaxpr"].jaxpr), e.params["cond_nconsts"]
            carry = frozenset(body.invars[e.params["body_nconsts"] :])
            over = frozenset(v for v in body.outvars if not isinstance(v, core.Literal))
            constants = frozenset(body.invars) - carry
            places = _Places(over, carry, constants=constants)
            peak, made, arrays = self.peak(body, xs[skipped:], places)
            return peak, [o.dims for o in made], arrays
        if e.name == "cond":
            branches = [self.peak(_Flat(b.jaxpr), xs[1:]) for b in e.params["branches"]]
            peak, made, arrays = max(branches, key=lambda found: found[0])
            return self._beyond(e, peak, made), [o.dims for o in made], arrays
        if e.name == "shard_map":
            return self._shard_map(e, xs)
        outs = self.spread(e, xs)
        if e.name == "dot_general":
            pairs = zip(e.invars, xs, strict=True)
            return sum(2 * self.local(v, x.dims) for v, x in pairs if self.widens(v)), outs, []
        if e.name == "reduce_scatter":  # the sum is whole before each device takes its part
            return self.local(e.invars[0], xs[0].dims), outs, []
        return 0, outs, []

    def widens(self, v: Any) -> bool:
        """Returns whether products and gathers of a variable take a copy in float32."""
        return bool(self.platform == CPU and v.aval.dtype == jnp.bfloat16)

    def gathered(self, e: _Equation, xs: list[_Value], outs: list[Dims]) -> dict[Any, int]:
        """Returns the bytes of each operand that the devices gather, with those of the part: what a
        constraint asks for, and weights, over the axes that divide the batch which they meet."""
        of_batch = {axis for x in xs if x.batch for axes in x.dims for axis in axes}
        found = {}
        for v, x in zip(e.invars, xs, strict=True):
            if e.name == "sharding_constraint":
                dims = outs[0]
            elif e.name == "dot_general" and not x.batch:
                dims = tuple(tuple(a for a in axes if a not in of_batch) for axes in x.dims)
            else:
                continue
            part, whole = self.local(v, x.dims), self.local(v, dims)
            if whole > part:
                size = whole if self.platform == TPU else whole + part
                found[x.roots] = 2 * size if self.widens(v) else size
        return found

    def _beyond(self, e: _Equation, peak: int, outs: list[_Value]) -> int:
        results = zip(e.outvars, outs, strict=True)
        return max(0, peak - sum(self.local(v, o.dims) for v, o in results))

    def _scan(self, e: _Equation, xs: list[_Value]) -> tuple[int, list[Dims], list[Array]]:
        consts, carries, jaxpr = _scan_parts(e)
        body, first = _Flat(jaxpr), consts + carries
        given = xs[:first] + [_Value(x.dims[1:], batch=x.batch) for x in xs[first:]]
        over = frozenset(v for v in body.outvars[:carries] if not isinstance(v, core.Literal))
        constants = frozenset(body.invars[:consts])
        places = _Places(over, frozenset(body.invars[consts:first]), constants=constants)
        for _ in range(2):  # until the division of the carry settles
            peak, outs, arrays = self.peak(body, given, places)
            for i, out in enumerate(outs[:carries], consts):
                pairs = zip(given[i].dims, out.dims, strict=True)
                joined = _once([x if x == y else tuple(dict.fromkeys(x + y)) for x, y in pairs])
                given[i] = _Value(joined, batch=given[i].batch or out.batch)
        slices = sum(
            self.local(v, x.dims) for v, x in zip(body.invars[first:], given[first:], strict=True)
        )
        dims = [o.dims for o in outs[:carries]] + [((), *o.dims) for o in outs[carries:]]
        return peak + slices, dims, arrays

    def _shard_map(self, e: _Equation, xs: list[_Value]) -> tuple[int, list[Dims], list[Array]]:
        jaxpr = e.params["jaxpr"]
        specs = e.params.get("out_specs", e.params.get("out_names"))
        inside = _Walk({}, self.platform)
        given = [
            _Value(((),) * len(_shape(v)), batch=x.batch)
            for v, x in zip(jaxpr.invars, xs, strict=True)
        ]
        peak, outs, arrays = inside.peak(_Flat(jaxpr), given)
        results = sum(inside.local(v, ()) for v in jaxpr.outvars)
        gathered = sum(
            max(0, inside.local(v, ()) - self.local(o, x.dims))
            for v, o, x in zip(jaxpr.invars, e.invars, xs, strict=True)
        )
        dims = [_dims_of(s, len(_shape(v))) for v, s in zip(e.outvars, specs, strict=True)]
        return max(0, peak - results) + gathered, dims, arrays


def _filling(arrays: list[Array], size: int) -> list[Array]:
    """Returns the largest arrays within so many bytes: the results of an equation, which are among
    those of its body, are counted as its own."""
    found = []
    for array in sorted(arrays, key=lambda x: -x.bytes):
        if array.bytes <= size:
            found.append(array)
            size -= array.bytes
    return found


def _form(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _reduces(name: str) -> bool:
    return name.startswith("reduce_") or name in ("argmax", "argmin", "reduce")


def _scan_parts(e: _Equation) -> tuple[int, int, Any]:
    """Returns the numbers of constants and of carries of a scan, and its body. Only the arrays that
    are cut into slices, and those that are stacked, have a dim more outside."""
    jaxpr = getattr(e.params["jaxpr"], "jaxpr", e.params["jaxpr"])
    whole, carries = (
        sum(len(_shape(a)) == len(_shape(b)) for a, b in zip(outside, inside, strict=True))
        for outside, inside in ((e.invars, jaxpr.invars), (e.outvars, jaxpr.outvars))
    )
    return whole - carries, carries, jaxpr


def _line(source: Any) -> str:
    """Returns the innermost line of jaxrl that an equation comes from."""
    traceback = getattr(source, "traceback", None)
    for frame in () if traceback is None else traceback.frames:
        _, found, name = frame.file_name.rpartition("/jaxrl/")
        if found:
            return f"{name}:{frame.line_num}"
    return ""
