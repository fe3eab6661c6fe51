"""The model behind a served teacher: it computes what requests ask for, on devices that it may
share with other teachers of its server."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.stages import Compiled

from jaxrl.algorithms.signals import Projection, score
from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.models import parameters
from jaxrl.models.batching import bucket
from jaxrl.models.packing import room_of, row_devices
from jaxrl.models.parameters import Params
from jaxrl.process.json_types import Keywords
from jaxrl.sharding.axes import ROWS, row_shards
from jaxrl.sharding.ledger import attribute, current
from jaxrl.sharding.mesh import verify_arrays
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

MB = 10**6
MOST_CHUNK = 4096
"""Tokens whose logits exist at once, at most, whatever a client asks for."""
MOST_PROGRAMS, PROGRAMS_OF_ONE = 64, 16
"""Compiled programs kept, in total and of those that requests of one address were compiled for; the
least recently used goes first."""
Wanted = Callable[[], bool]
"""Says whether a client still waits for its answer."""
Answer = Callable[[Wanted], TeacherSignal]
"""Computes the answer to a request on the thread of the devices, as numpy arrays [B, C, ...], or
raises `Gone` because it is no longer wanted."""
ProgramKey = tuple[Options, str]
"""The options that a program depends on, and the shapes of its inputs."""


class ScoringService:
    """One frozen model, whose requests are computed on the thread `turns`, in order of arrival.

    Programs are compiled before a request waits for the devices. They depend on its shapes and on
    the options that change them: a temperature is an argument, and the tokens of a chunk are a
    power of two.
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
        """Loads the weights.

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
        positions = source.config.max_positions
        if max_tokens is not None and max_tokens > positions:
            raise UserError(f"--max-tokens {max_tokens}: the model has {positions} positions")
        if tokenizer is None:
            raise UserError(
                f"--model {source.name} has no tokenizer, so that no run can compare its tokens:"
                " put tokenizer.json and tokenizer_config.json into its folder"
            )
        source = source.for_length(max_tokens or positions)
        self.model, self.mesh = source.config, mesh
        self.turns = turns or ThreadPoolExecutor(1, thread_name_prefix="teacher-devices")
        self._stage, self._max_batch_tokens = f"{source.name} {id(self)}", max_batch_tokens
        self._rows = NamedSharding(mesh, PartitionSpec(ROWS))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._programs: dict[ProgramKey, tuple[str, Compiled]] = {}
        """With the address of the client that each was compiled for; the last used is last."""
        self._lock = threading.Lock()
        weights_hash = self.turns.submit(self._load, source, jnp.dtype(dtype), offload).result()
        self._abstract = jax.tree.map(_abstract, self.params)
        vocabulary = vocab_hash(tokenizer)
        known_by = (self.model, dtype, vocabulary, tokenizer.eos_token_id)
        self.info = Info(
            protocol=PROTOCOL,
            model=source.name,
            family=self.model.family,
            n_params=self.model.n_params,
            d_model=self.model.d_model,
            vocab_size=self.model.vocab_size,
            final_softcap=self.model.final_softcap,
            vocab_hash=vocabulary,
            tokenizer_eos=tokenizer.eos_token_id,
            model_eos=self.model.eos_ids,
            chat_template=tokenizer.chat_template or None,
            dtype=dtype,
            max_tokens=max_tokens or positions,
            max_request_bytes=max_request_bytes,
            max_answer_bytes=max_answer_bytes,
            signals=SIGNALS,
            fingerprint=hashlib.sha256(repr(known_by).encode() + weights_hash).hexdigest(),
        )

    def __str__(self) -> str:
        devices, info = self.mesh.devices.flat, self.info
        axes = ", ".join(f"{name} {n}" for name, n in self.mesh.shape.items() if n > 1)
        where = f"{len(devices)} {devices[0].platform} device(s)" + (f" ({axes})" if axes else "")
        return (
            f"{info.model} ({info.n_params:,} parameters, {info.dtype}) on {where}, sequences of"
            f" at most {info.max_tokens} tokens"
        )

    def _load(self, source: ModelSource, dtype: np.dtype, offload: bool) -> bytes:
        """Loads the weights and returns their hash."""
        current().enter(self._stage)
        self.params = source.load(self.mesh, dtype, "stacked")
        verify_arrays("teacher", self.params, self.mesh)
        weights_hash = _weights_hash(self.params)
        params = attribute(self, "params")
        current().resident(self._stage, *params, stages=[self._stage], offload=offload)
        return weights_hash

    def head(self) -> np.ndarray:
        """Returns the LM head [V, D]; call it on the thread `turns`."""
        current().enter(self._stage)
        return np.asarray(parameters.head(self.params))

    def ready(self, request: Request) -> Answer | None:
        """Returns what `compile` returns if all programs of the request are there, else None."""
        keys = [key for key, _, _ in self._slices(request)]
        with self._lock:
            there = all(key in self._programs for key in keys)
        return self.compile(request, "") if there else None

    def compile(self, request: Request, address: str) -> Answer:
        """Compiles the programs of a request that are not there yet. Called from one thread only,
        it compiles no program twice.

        Args:
            address: of the client, whose programs may not take the place of all others.

        Raises:
            Refused: its options do not go together.
        """
        try:
            request.options.distill(MOST_CHUNK)
        except ValueError as error:
            raise Refused(400, f"options: {error}") from error
        work = [
            (self._program(key, inputs, address), inputs, n)
            for key, inputs, n in self._slices(request)
        ]
        temperature = np.float32(request.options.distill_temperature)

        def answer(wanted: Wanted) -> TeacherSignal:
            current().enter(self._stage)
            scalar, signals = jax.device_put(temperature, self._everywhere), []
            for program, inputs, n in work:
                if not wanted():
                    raise Gone
                signal = program(self.params, *jax.device_put(inputs, self._rows), scalar)
                signals.append(jax.tree.map(lambda x, n=n: np.asarray(x)[:n], signal))
            return jax.tree.map(lambda *xs: xs[0] if len(xs) == 1 else np.concatenate(xs), *signals)

        return answer

    def _slices(self, request: Request) -> list[tuple[ProgramKey, Tree, int]]:
        """Cuts a request into slices that fit the devices: the key of the program, its inputs, and
        how many of their rows are real."""
        options = request.options
        chunk = 1 << min(options.chunk_tokens, MOST_CHUNK).bit_length() - 1
        # Options that change no program have the same value in all keys.
        same: Keywords = {"distill_temperature": 1.0, "chunk_tokens": chunk}
        if "topk" not in options.signal:
            same["top_k"] = 1
        if options.signal == "hidden":
            same |= {"chunk_tokens": 1, "vocab_size": self.info.vocab_size, "entropy_top_k": None}
        options = options.model_copy(update=same)
        b, t = request.sequences.tokens.shape
        shards = row_shards(self.mesh.shape)
        most = max(self._max_batch_tokens // t // shards, 1) * shards
        n_slices = -(-b // most)
        ends = [b * i // n_slices for i in range(n_slices + 1)]
        parts, slices = [], []
        for start, stop in pairwise(ends):
            size = rows_of(stop - start, shards, most)

            def cut(x: np.ndarray, at: slice = slice(start, stop), size: int = size) -> np.ndarray:
                rows = x[at]  # below them rows of zeros, which have no real token
                return np.pad(rows, [(0, size - len(rows))] + [(0, 0)] * (x.ndim - 1))

            inputs = jax.tree.map(cut, (request.sequences, request.ids))
            parts.append((stop - start, *inputs))
        rooms = [room_of(sequences, row_devices(self.mesh)) for _, sequences, _ in parts]
        room = max(n for n, _ in rooms), max(m for _, m in rooms)
        for n, sequences, ids in parts:
            inputs = replace(sequences, room=room), ids
            shapes = str(jax.tree.map(lambda x: (x.shape, x.dtype.name), inputs))
            slices.append(((options, shapes), inputs, n))
        return slices

    def _program(self, key: ProgramKey, inputs: Tree, address: str) -> Compiled:
        with self._lock:
            if (known := self._programs.pop(key, None)) is not None:
                self._programs[key] = known
                return known[1]
        compiled = self._compile(key[0], inputs)
        with self._lock:
            self._programs[key] = address, compiled
            of_address = [k for k, (client, _) in self._programs.items() if client == address]
            if len(of_address) > PROGRAMS_OF_ONE:
                del self._programs[of_address[0]]
            elif len(self._programs) > MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        return compiled

    def _compile(self, options: Options, inputs: Tree) -> Compiled:
        projection = Projection(options.distill(MOST_CHUNK), self.mesh, options.vocab_size)

        def signal(
            params: Params, sequences: Sequences, ids: Array, temperature: Array
        ) -> TeacherSignal:
            at = replace(projection, temperature=temperature)
            return score(at, self.model, params, sequences, ids)

        rows = jax.tree.map(lambda x: _abstract(x, self._rows), inputs)
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._everywhere)
        program = jax.jit(signal, out_shardings=self._rows)
        return program.lower(self._abstract, *rows, scalar).compile()


def rows_of(n: int, multiple: int, most: int) -> int:
    """Returns the smallest of 1, 2, 3, 4, 6, 8, 12, ... times `multiple` that holds n rows, or
    `most`."""
    return min(bucket(-(-n // multiple), steps=2) * multiple, most)


def _abstract(x: Array, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)


def _weights_hash(params: Params) -> bytes:
    """Computes SHA-256 over all weights. It is the same on every mesh, because what the devices add
    up are integers."""
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        parts = range(x.shape[0]) if x.ndim > 2 else [None]  # layers, if they are stacked
        sums = [_sum(x, part) for part in parts]
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(sums, np.uint32).tobytes())
    return digest.digest()


@jax.jit
def _sum(x: Array, part: int | None) -> Array:
    """Adds up the bits of an array's numbers, mixed with their positions, modulo 2^32."""
    x = x if part is None else x[part]
    position, stride = jnp.zeros((), jnp.uint32), 0x9E3779B1
    for axis in reversed(range(x.ndim)):
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    mixed = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    # The finalizer of MurmurHash3 is a bijection: a number that changes changes its term.
    mixed ^= position
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)
