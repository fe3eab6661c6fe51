"""The model behind a served teacher: it computes what requests ask for, on devices that it may
share with other teachers of its server."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.stages import Compiled

from jaxrl.algorithms.signals import Projection, score
from jaxrl.checkpoint.source import ModelSource
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.models import parameters
from jaxrl.models.buckets import bucket
from jaxrl.models.packing import room_of, row_devices
from jaxrl.models.parameters import Params
from jaxrl.process.json_types import Keywords
from jaxrl.sharding.axes import ROWS, Axes, row_shards
from jaxrl.sharding.ledger import attribute, current
from jaxrl.sharding.mesh import ensure_devices, role_mesh, verify_arrays
from jaxrl.teacher.protocol import (
    PROTOCOL,
    SIGNALS,
    DType,
    Gone,
    Info,
    Options,
    Refused,
    Request,
    vocab_hash,
)
from jaxrl.types import Array, Sequences, TeacherSignal, Tree

T = TypeVar("T")
MB = 10**6
DTYPES = get_args(DType)
MOST_CHUNK = 4096
"""Tokens whose logits exist at once, at most, whatever a client asks for."""
POLL_S = 0.5
"""How often a request that waits for the devices looks whether its client is still there."""
HEAD_S = 600.0
"""Longest wait for the head's weights on their way to the host, behind the requests before."""
MOST_PROGRAMS, PROGRAMS_OF_ONE = 64, 16
"""Compiled programs kept, in total and of those that requests of one address were compiled for; the
one unused for longest goes first."""
Answer = Callable[[Callable[[], bool]], TeacherSignal]
"""Computes the answer to a request whose programs are compiled; gets a function that says whether
it is still wanted, and raises `Gone` where it is not."""


class ScoringService:
    """One frozen model that answers requests in order of arrival.

    Programs are compiled before a request stands in line for the devices. They depend on its shapes
    and on the options that change them: a temperature is an argument, and the tokens of a chunk are
    a power of two.
    """

    def __init__(
        self,
        source: ModelSource,
        tokenizer: Tokenizer,
        mesh: Mesh,
        dtype: DType,
        *,
        max_tokens: int | None = None,
        max_batch_tokens: int = 65536,
        max_request_bytes: int = 64 * MB,
        max_answer_bytes: int = 1024 * MB,
        turns: ThreadPoolExecutor | None = None,
        offload: bool = False,
    ):
        """
        Args:
            max_tokens: longest sequence; None: the model's positions.
            max_batch_tokens: tokens (padding included) on the devices at once; a longer request is
                scored in slices.
            turns: the thread that uses the devices, which several teachers may share; None: a new
                one.
            offload: the weights are on the host while another teacher has its turn.

        Raises:
            UserError: no tokenizer, or more tokens than the model has positions.
        """
        model = source.config
        if max_tokens is not None and max_tokens > model.max_positions:
            has = f"the model has {model.max_positions} positions"
            raise UserError(f"--max-tokens {max_tokens}: {has}")
        max_tokens = model.max_positions if max_tokens is None else max_tokens
        source = source.for_length(max_tokens)
        model = source.config
        if tokenizer is None:
            raise UserError(
                f"--model {source.name} has no tokenizer, so that no run can compare its tokens:"
                " put tokenizer.json and tokenizer_config.json into its folder"
            )
        self.model, self.mesh = model, mesh
        self._turns = turns or ThreadPoolExecutor(1, thread_name_prefix="teacher-devices")
        self._stage, self._offload = f"{source.name} {id(self)}", offload
        self._in_turn(self._load, source, jnp.dtype(dtype)).result()
        self._abstract = jax.tree.map(_described, self.params)
        self._max_batch_tokens = max_batch_tokens
        self._rows = NamedSharding(mesh, PartitionSpec(ROWS))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._programs: dict[tuple[Options, str], _Program] = {}
        self._lock = threading.Lock()
        vocabulary = vocab_hash(tokenizer)
        known_by = (model, dtype, vocabulary, tokenizer.eos_token_id)
        fingerprint = hashlib.sha256(repr(known_by).encode() + self._weights)
        self.info = Info(
            protocol=PROTOCOL,
            model=source.name,
            family=model.family,
            n_params=model.n_params,
            d_model=model.d_model,
            vocab_size=model.vocab_size,
            final_softcap=model.final_softcap,
            vocab_hash=vocabulary,
            tokenizer_eos=tokenizer.eos_token_id,
            model_eos=model.eos_ids,
            chat_template=tokenizer.chat_template or None,
            dtype=dtype,
            max_tokens=max_tokens,
            max_request_bytes=max_request_bytes,
            max_answer_bytes=max_answer_bytes,
            signals=SIGNALS,
            fingerprint=fingerprint.hexdigest(),
        )

    def __str__(self) -> str:
        """Model and devices, in words."""
        devices, info = self.mesh.devices.flat, self.info
        axes = ", ".join(f"{name} {n}" for name, n in self.mesh.shape.items() if n > 1)
        where = f"{len(devices)} {devices[0].platform} device(s)" + (f" ({axes})" if axes else "")
        return (
            f"{info.model} ({info.n_params:,} parameters, {info.dtype}) on {where}, sequences of"
            f" at most {info.max_tokens} tokens"
        )

    def head(self) -> np.ndarray:
        """The LM head [V, D]."""
        return self._head

    @cached_property
    def _head(self) -> np.ndarray:
        found = self._in_turn(lambda: np.asarray(parameters.head(self.params)))
        return found.result(timeout=HEAD_S)

    def score(self, request: Request, wanted: Callable[[], bool]) -> TeacherSignal:
        """What a request asks for, as numpy arrays [B, C, ...].

        Raises:
            Gone: the answer was no longer wanted when its turn came.
        """
        return self.compile(request, "", wanted)(wanted)

    def ready(self, request: Request) -> Answer | None:
        """`compile` of a request whose programs there are; None where one is not."""
        work = self._cut(request)
        with self._lock:
            found = [self._programs.get(key) for key, _, _ in work]
            if not all(each is not None and each.compiled.done() for each in found):
                return None
        return self.compile(request, "", lambda: True)

    def compile(self, request: Request, address: str, wanted: Callable[[], bool]) -> Answer:
        """Compiles the programs of a request that there are not yet.

        Args:
            address: of the client, whose programs may not take the place of all others.

        Raises:
            Gone: the answer is no longer wanted.
            Refused: its options do not go together.
        """
        if not wanted():
            raise Gone
        try:
            request.options.distill(MOST_CHUNK)
        except ValueError as error:
            raise Refused(400, f"options: {error}") from error
        work = [
            (self._program(key, inputs, address, wanted), inputs, n)
            for key, inputs, n in self._cut(request)
        ]
        temperature = np.float32(request.options.distill_temperature)

        def answer(wanted: Callable[[], bool]) -> TeacherSignal:
            done = waited(self._in_turn(self._run, work, temperature, wanted), wanted)
            return jax.tree.map(lambda *xs: xs[0] if len(xs) == 1 else np.concatenate(xs), *done)

        return answer

    def _cut(self, request: Request) -> list[tuple[tuple[Options, str], Tree, int]]:
        """Slices of a request that fit the devices: the key of the program, its inputs, and how
        many of their rows are real."""
        inputs = (request.sequences, request.ids)
        b, t = request.sequences.tokens.shape
        shards = row_shards(self.mesh.shape)
        most = max(self._max_batch_tokens // t // shards, 1) * shards
        slices = -(-b // most)
        ends = [b * i // slices for i in range(slices + 1)]
        rows = [(start, stop - start) for start, stop in pairwise(ends)]
        parts = [
            jax.tree.map(partial(_rows, start=a, n=n, size=rows_of(n, shards, most)), inputs)
            for a, n in rows
        ]
        rooms = [room_of(sequences, row_devices(self.mesh)) for sequences, _ in parts]
        room = max(n for n, _ in rooms), max(m for _, m in rooms)
        options, work = self._decisive(request.options), []
        for (_, n), (sequences, ids) in zip(rows, parts, strict=True):
            padded = replace(sequences, room=room), ids
            shapes = str(jax.tree.map(lambda x: (x.shape, x.dtype.name), padded))
            work.append(((options, shapes), padded, n))
        return work

    def _decisive(self, options: Options) -> Options:
        """The options with what changes no program set to one value."""
        chunk = 1 << min(options.chunk_tokens, MOST_CHUNK).bit_length() - 1
        same: Keywords = {"distill_temperature": 1.0, "chunk_tokens": chunk}
        if "topk" not in options.signal:
            same["top_k"] = 1
        if options.signal == "hidden":
            same |= {"chunk_tokens": 1, "vocab_size": self.info.vocab_size, "entropy_top_k": None}
        return options.model_copy(update=same)

    def close(self) -> None:
        """Nothing more is computed but what runs."""
        self._turns.shutdown(wait=False, cancel_futures=True)

    def _in_turn(self, compute: Callable[..., T], *arguments: object) -> Future[T]:
        """Computes on the thread of the devices, with this teacher's weights there."""

        def run() -> T:
            current().enter(self._stage)
            return compute(*arguments)

        return self._turns.submit(run)

    def _load(self, source: ModelSource, dtype: np.dtype) -> None:
        """Reads the weights, and their hash."""
        self.params = source.load(self.mesh, dtype, "stacked")
        verify_arrays("teacher", self.params, self.mesh)
        self._weights = _weights_hash(self.params)
        current().resident(
            self._stage,
            *attribute(self, "params"),
            stages=[self._stage],
            offload=self._offload,
        )

    def _run(
        self,
        work: list[tuple[Compiled, Tree, int]],
        temperature: np.float32,
        wanted: Callable[[], bool],
    ) -> list[TeacherSignal]:
        """On the thread of the devices."""
        done, scalar = [], jax.device_put(temperature, self._everywhere)
        for program, inputs, n in work:
            if not wanted():
                raise Gone
            signal = program(self.params, *jax.device_put(inputs, self._rows), scalar)
            done.append(jax.tree.map(lambda x, n=n: np.asarray(x)[:n], signal))
        return done

    def _program(
        self, key: tuple[Options, str], inputs: Tree, address: str, wanted: Callable[[], bool]
    ) -> Compiled:
        """Compiled for these shapes; two that need the same one at once compile it once."""
        with self._lock:
            found = self._programs.pop(key, None)
            program = found or _Program(address)
            self._programs[key] = program
            theirs = [k for k, each in self._programs.items() if each.address == program.address]
            if len(theirs) > PROGRAMS_OF_ONE:
                self._programs.pop(theirs[0])
            elif len(self._programs) > MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
        compiled = program.compiled
        if found is None:
            compiled.set_running_or_notify_cancel()  # no client that leaves can cancel it
            try:
                compiled.set_result(self._compile(key[0], inputs))
            except BaseException as error:
                compiled.set_exception(error)
                with self._lock:
                    self._programs.pop(key, None)
        return waited(compiled, wanted)

    def _compile(self, options: Options, inputs: Tree) -> Compiled:
        distill = options.distill(MOST_CHUNK)
        projection = Projection(distill, self.mesh, options.vocab_size)

        def signal(
            params: Params, sequences: Sequences, ids: Array, temperature: Array
        ) -> TeacherSignal:
            at = replace(projection, temperature=temperature)
            return score(at, self.model, params, sequences, ids)

        given = jax.tree.map(lambda x: _described(x, self._rows), inputs)
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._everywhere)
        program = jax.jit(signal, out_shardings=self._rows)
        return program.lower(self._abstract, *given, scalar).compile()


@dataclass(frozen=True)
class _Program:
    address: str
    """Of the client that it was compiled for."""
    compiled: Future[Compiled] = field(default_factory=Future)


def _described(x: Array, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)


def serving_mesh(devices: int | None, fsdp: int | None, tensor: int) -> Mesh:
    """The first devices as a mesh.

    Args:
        devices: None: all that there are; one where they are emulated.
        fsdp: None: the devices that `tensor` leaves.
    """
    visible = ensure_devices(devices or 1)
    n = devices or (1 if visible.emulated else len(visible.devices))
    fsdp = fsdp or max(n // tensor, 1)
    if n % (fsdp * tensor):
        raise UserError(f"{n} devices are not a multiple of --fsdp {fsdp} x --tensor {tensor}")
    return role_mesh(visible.devices[:n], Axes(n // (fsdp * tensor), fsdp, tensor))


def waited(future: Future[T], wanted: Callable[[], bool]) -> T:
    """The value of a future, for as long as somebody wants it; else raises Gone."""
    while not future.done():
        wait([future], timeout=POLL_S)
        if not future.done() and not wanted():
            future.cancel()  # where it has not begun
            raise Gone
    return future.result(timeout=0)


def rows_of(n: int, multiple: int, most: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, ... times `multiple` that holds n rows, or `most`."""
    return min(bucket(-(-n // multiple), steps=2) * multiple, most)


def _rows(x: np.ndarray, start: int, n: int, size: int) -> np.ndarray:
    """n rows, and below them rows of zeros up to `size`: no token of theirs is real."""
    return np.pad(x[start : start + n], [(0, size - n)] + [(0, 0)] * (x.ndim - 1))


def _weights_hash(params: Params) -> bytes:
    """SHA-256 over all the weights, the same on every mesh: what devices add up are integers."""
    found = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        parts = range(x.shape[0]) if x.ndim > 2 else [None]  # layers, if they are stacked
        sums = [_sum(x, part) for part in parts]
        found.update(jax.tree_util.keystr(path).encode() + np.asarray(sums, np.uint32).tobytes())
    return found.digest()


@jax.jit
def _sum(x: Array, part: int | None) -> Array:
    """The bits of an array's numbers, mixed with their places, added up modulo 2^32."""
    x = x if part is None else x[part]
    place, stride = jnp.zeros((), jnp.uint32), 0x9E3779B1
    for axis in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    mixed = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    # The finalizer of MurmurHash3 is a bijection: a number that changes changes its term.
    mixed ^= place
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)
