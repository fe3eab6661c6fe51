"""The HTTP server of teachers that serve several runs, and `ScoringService`, which computes on
devices that it may share with other teachers.

The story of a request: its body arrives and is checked before it waits for the devices, so that an
invalid or slow request delays no other; its programs are compiled (`_compiled`); in its turn it is
computed and its answer sent (`_tensors`). Computation and compilation have threads of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.stages import Compiled
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl.algorithms.signals import Projection
from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.config.section import DType
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import Refused, UserError
from jaxrl.formats.finite import check_finite, not_finite
from jaxrl.models import parameters
from jaxrl.models.batching import bucket
from jaxrl.models.packing import capacity_of, row_devices
from jaxrl.process.http_server import LOOPBACK, Handler, HttpServer, while_connected
from jaxrl.process.json_types import JsonObject, Keywords
from jaxrl.sharding.axes import ROWS
from jaxrl.sharding.ledger import attribute, current
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.sharding.reshard import checksums
from jaxrl.teacher import protocol
from jaxrl.teacher.local_teacher import score_program
from jaxrl.teacher.protocol import FINGERPRINT, HEAD, TOKEN, Info, Options
from jaxrl.types import Array, Tree

MB = 10**6
PIECE = 1 << 20
"""Bytes of an answer that a client must take in `Limits.idle_s`."""
MOST_CHUNK = 4096
"""Tokens whose logits exist at once, at most, whatever a client asks for."""
MOST_PROGRAMS = 64
"""Compiled programs kept; the least recently used goes first."""
Wanted = Callable[[], bool]
"""Says whether a client still waits for its answer."""
Answer = Callable[[Wanted], Mapping[str, np.ndarray]]
"""Computes the tensors of an answer on the thread of the devices, or raises
ClientDisconnect because it is no longer wanted."""
ProgramKey = tuple[Options, str]
"""The options that a program depends on, and the shapes of its inputs."""


class TeacherServer(HttpServer):
    """A server of one teacher or several. Other hosts need a token."""

    def __init__(self, host: str, port: int, *, token: str | None, **options: Any):
        """Takes and raises what `HttpServer` does; UserError for a token that is missing."""
        if host not in LOOPBACK and not token:
            raise UserError(
                f"--host {host} lets other hosts connect: set {TOKEN} to a secret that the runs"
                " also have, or leave --host at localhost"
            )
        super().__init__(host, port, token=token, **options)
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="teacher-compiler")

    def start(self, services: Mapping[str, ScoringService]) -> None:
        """Begins to accept connections.

        Args:
            services: by the names that stand before their routes; "": without one.
        """
        self.services, self._began = services, time.monotonic()
        own: dict[str, Handler] = {
            "GET /v1/info": self._info,
            "GET /v1/head": self._tensors,
            "POST /v1/score": self._tensors,
        }
        named = {route.replace("/", "/{teacher}/", 1): handler for route, handler in own.items()}
        general: dict[str, Handler] = {"GET /health": self._health, "GET /v1/models": self._models}
        self.serve(general | own | named, public=("GET /health",))

    def close(self) -> None:
        super().close()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    async def _health(self, request: Request) -> Response:
        status: JsonObject = {"status": "draining" if self.draining else "ok"}
        if self.knows_token(request):
            names = {name: service.info.model for name, service in self.services.items()}
            status |= {
                **({"model": names[""]} if "" in names else {"teachers": names}),
                **self.counts,
                "in_hand": self.in_hand,
                "waiting": self.open - self.in_hand - 1,
                "seconds_up": round(time.monotonic() - self._began, 1),
            }
        return JSONResponse(status)

    async def _models(self, request: Request) -> Response:
        """Lists the teachers, in the form in which completions servers list their models."""
        models: list[JsonObject] = []
        for name, service in self.services.items():
            model, longest = service.info.model, service.info.max_tokens
            words = {"object": "model", "root": model, "max_model_len": longest}
            models.append({"id": name or model} | words)
        return JSONResponse({"object": "list", "data": models})

    async def _info(self, request: Request) -> Response:
        return Response(self._teacher(request).info.model_dump_json(), media_type=protocol.JSON)

    async def _tensors(self, request: Request) -> ASGIApp:
        """Answers with the scores that a POST asks for, or with the head."""
        service = self._teacher(request)
        asked: protocol.Request | None = None
        if request.method == "POST":
            body = await self.read_body(request, service.info.max_request_bytes)
            asked = await asyncio.to_thread(protocol.read_request, body, service.info)
        elif FINGERPRINT in request.query_params:
            protocol.check_meant(request.query_params[FINGERPRINT], service.info)
        loop = asyncio.get_running_loop()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with while_connected(request):
                compute = service.head if asked is None else await self._compiled(service, asked)
            async with self.turn():  # until the answer has gone: it may be large
                async with while_connected(request) as wanted:
                    tensors = await loop.run_in_executor(service.turns, compute, wanted)
                await _stream(tensors)(scope, receive, send)

        return answer

    def _teacher(self, request: Request) -> ScoringService:
        name = request.path_params.get("teacher", "")
        if name not in self.services:
            first = next(iter(self.services))
            names = f"the teachers {', '.join(self.services)}: name one, as in /{first}/v1/info"
            alone = "one teacher without a name, at /v1/info"
            raise Refused(404, f"here {'are ' + names if first else 'is ' + alone}")
        return self.services[name]

    async def _compiled(self, service: ScoringService, asked: protocol.Request) -> Answer:
        """Has the programs of a request compiled, which may take minutes, without holding a
        turn."""
        answer = await asyncio.to_thread(service.ready, asked)
        if answer is not None:
            return answer
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compiler, service.compile, asked)


def _stream(tensors: Mapping[str, np.ndarray]) -> Response:
    frames = protocol.frame(tensors)

    async def pieces() -> AsyncIterator[bytes]:
        for frame in frames:
            for at in range(0, len(frame), PIECE):
                yield bytes(frame[at : at + PIECE])

    headers = {"Content-Length": str(sum(map(len, frames)))}
    return StreamingResponse(pieces(), headers=headers, media_type=protocol.SAFETENSORS)


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
        max_tokens = max_tokens or positions
        if max_tokens > positions:
            raise UserError(f"--max-tokens {max_tokens}: the model has {positions} positions")
        if tokenizer is None:
            raise UserError(
                f"--model {source.name} has no tokenizer, so that no run can compare its tokens:"
                " put tokenizer.json and tokenizer_config.json into its folder"
            )
        source = source.for_length(max_tokens)
        self.model, self.mesh = source.config, mesh
        self.turns = turns or ThreadPoolExecutor(1, thread_name_prefix="teacher-devices")
        self._stage, self._max_batch_tokens = f"{source.name} {id(self)}", max_batch_tokens
        self._rows = NamedSharding(mesh, PartitionSpec(ROWS))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._programs: dict[ProgramKey, Compiled] = {}
        """The last used is last."""
        self._lock = threading.Lock()
        weights = self.turns.submit(self._load, source, jnp.dtype(dtype), offload).result()
        self._abstract = jax.tree.map(_abstract, self.params)
        vocabulary = protocol.vocab_hash(tokenizer)
        known_by = self.model, dtype, vocabulary, tokenizer.eos_token_id, weights
        self.info = Info(
            protocol=protocol.PROTOCOL,
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
            max_tokens=max_tokens,
            max_request_bytes=max_request_bytes,
            max_answer_bytes=max_answer_bytes,
            signals=protocol.SIGNALS,
            fingerprint=hashlib.sha256(repr(known_by).encode()).hexdigest(),
        )

    def _load(self, source: ModelSource, dtype: np.dtype, offload: bool) -> dict[str, int]:
        """Loads the weights and returns their checksums, which are the same on every mesh."""
        current().enter(self._stage)
        self.params = source.load(self.mesh, dtype, "stacked")
        verify_arrays("teacher", self.params, self.mesh)
        check_finite(f"the weights of {source.name}", self.params, self.model, self.mesh)
        params = attribute(self, "params")
        current().resident(self._stage, *params, stages=[self._stage], offload=offload)
        paths, arrays = zip(*jax.tree_util.tree_leaves_with_path(self.params), strict=True)
        return dict(zip(map(jax.tree_util.keystr, paths), checksums(arrays), strict=True))

    def head(self, wanted: Wanted) -> Mapping[str, np.ndarray]:
        """Returns the LM head [V, D]; an `Answer`."""
        current().enter(self._stage)
        return {HEAD: np.asarray(parameters.head(self.params))}

    def ready(self, request: protocol.Request) -> Answer | None:
        """Returns the result of `compile` if all programs of the request are there, else None."""
        keys = [key for key, _, _ in self._slices(request)]
        with self._lock:
            there = all(key in self._programs for key in keys)
        return self.compile(request) if there else None

    def compile(self, request: protocol.Request) -> Answer:
        """Compiles the programs of a request that are not there yet. Called from one thread only,
        it compiles no program twice."""
        work = []
        for key, inputs, n in self._slices(request):
            with self._lock:
                program = self._programs.get(key)
            program = program or self._compile(key[0], inputs)
            with self._lock:
                self._programs.pop(key, None)
                self._programs[key] = program  # the last used is last
                while len(self._programs) > MOST_PROGRAMS:
                    del self._programs[next(iter(self._programs))]
            work.append((program, inputs, n))
        temperature = np.float32(request.options.distill_temperature)

        def answer(wanted: Wanted) -> Mapping[str, np.ndarray]:
            current().enter(self._stage)
            scalar, signals = jax.device_put(temperature, self._everywhere), []
            for program, inputs, n in work:
                if not wanted():
                    raise ClientDisconnect
                placed = jax.device_put(inputs, self._rows)
                signal, broken = program(self.params, *placed, temperature=scalar)
                signals.append({k: np.asarray(x)[:n] for k, x in protocol.present(signal).items()})
                if (wrong := np.asarray(broken)[:n]).any():
                    row, of = int(np.argmax(wrong)), inputs[0]
                    tokens = of.tokens[row][of.mask[row]]
                    what = "the scores of a request"
                    raise not_finite(what, self.params, self.model, tokens, self.mesh)
            if len(signals) == 1:
                return signals[0]
            return {name: np.concatenate([x[name] for x in signals]) for name in signals[0]}

        return answer

    def _slices(self, request: protocol.Request) -> list[tuple[ProgramKey, Tree, int]]:
        """Cuts a request into slices that fit the devices: the key of the program, its inputs, and
        how many of their rows are real."""
        options, chunk = request.options, 1
        if options.signal != "hidden":
            chunk = 1 << min(options.chunk_tokens, MOST_CHUNK).bit_length() - 1
        # Options that change no program have the same value in all keys.
        same: Keywords = {"top_k": 1, "entropy_top_k": None, "vocab_size": self.info.vocab_size}
        same |= options.decisive | {"distill_temperature": 1.0, "chunk_tokens": chunk}
        options = Options(**same)
        # Of 1, 2, 3, 4, 6, 8, 12, ... rows for each shard, so that requests share programs. Rows of
        # zeros at the end have no real token.
        devices, (b, t) = row_devices(self.mesh), request.sequences.tokens.shape
        most = max(self._max_batch_tokens // t // devices.count, 1)
        n = -(-b // (most * devices.count))
        size = bucket(-(-b // n // devices.count), steps=2, most=most) * devices.count
        sequences, ids = jax.tree.map(
            lambda x: np.pad(x, [(0, n * size - b)] + [(0, 0)] * (x.ndim - 1)),
            (request.sequences, request.ids),
        )
        capacity = capacity_of(sequences, devices, np.arange(n * size).reshape(n, size))
        slices = []
        for start in range(0, b, size):
            inputs = jax.tree.map(lambda x, at=start: x[at : at + size], (sequences, ids))
            inputs = replace(inputs[0], capacity=capacity), inputs[1]
            shapes = str(jax.tree.map(lambda x: (x.shape, x.dtype.name), inputs))
            slices.append(((options, shapes), inputs, min(b - start, size)))
        return slices

    def _compile(self, options: Options, inputs: Tree) -> Compiled:
        projection = Projection(options.distill, self.mesh, options.vocab_size)
        rows = jax.tree.map(lambda x: _abstract(x, self._rows), inputs)
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._everywhere)
        program = score_program(self.model, projection)
        return program.lower(self._abstract, *rows, temperature=scalar).compile()


def _abstract(x: Array, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)
