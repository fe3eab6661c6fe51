"""The HTTP server of teachers that serve several runs, on starlette and uvicorn.
`ScoringService` does the computation, on devices that it may share with other teachers.

The story of a request: its connection is accepted, and takes the place of an older, incomplete one
if there are too many (`_accept`); header and body arrive, each within its deadline and size
(`_answer`, `_body`); the body is checked before it waits for the devices, so that an invalid or
slow request delays no other; its programs are compiled (`_compiled`); in its turn it is computed
and its answer sent (`_tensors`). Every connection carries one request.

All this runs in the event loop of one thread, to which all state belongs. Computation and
compilation have threads of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import uvicorn
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.stages import Compiled
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from jaxrl.algorithms.signals import Projection, score
from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.config.section import DType
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import NotFinite, UserError
from jaxrl.formats.finite import broken_rows, check_finite, not_finite
from jaxrl.models import parameters
from jaxrl.models.batching import bucket
from jaxrl.models.packing import room_of, row_devices
from jaxrl.models.parameters import Params
from jaxrl.process.json_types import JsonObject, Keywords
from jaxrl.sharding.axes import ROWS
from jaxrl.sharding.ledger import attribute, current
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.sharding.reshard import checksums
from jaxrl.teacher import protocol
from jaxrl.teacher.protocol import FINGERPRINT, HEAD, TOKEN, Info, Options, Refused
from jaxrl.types import Array, Sequences, TeacherSignal, Tree

MB = 10**6
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_CONNECTIONS, MOST_OF_ONE = 256, 64
"""Connections open at once, in total and per address. If all of these have sent a whole request, a
further connection is closed without an answer."""
MOST_BODIES, BODIES_OF_ONE = 8, 4
"""Bytes of request bodies in memory, in total and per address, as multiples of the maximum size of
a request."""
PIECE = 1 << 20
"""Bytes of an answer written between two checks of the deadline."""
LINGER_S = 1.0
"""How long the rest of a refused body is read: a connection closed with unread bytes loses its
answer."""
STOPPING = "this teacher is being stopped"
MOST_CHUNK = 4096
"""Tokens whose logits exist at once, at most, whatever a client asks for."""
MOST_PROGRAMS, PROGRAMS_OF_ONE = 64, 16
"""Compiled programs kept, in total and of those that requests of one address were compiled for; the
least recently used goes first."""
Wanted = Callable[[], bool]
"""Says whether a client still waits for its answer."""
Answer = Callable[[Wanted], Mapping[str, np.ndarray]]
"""Computes the tensors of an answer on the thread of the devices, or raises
ClientDisconnect because it is no longer wanted."""
Handler = Callable[[Request], Awaitable[ASGIApp]]
ProgramKey = tuple[Options, str]
"""The options that a program depends on, and the shapes of its inputs."""


@dataclass(frozen=True)
class Limits:
    """Limits on time and concurrency of requests."""

    threads: int = 8
    """Requests that are computed or answered at once; further ones wait in the queue."""
    header_s: float = 10.0
    """Longest time from the connection to the end of the request's header."""
    idle_s: float = 10.0
    """Longest wait for the next bytes of a body, or for the client to take the next bytes of an
    answer."""
    body_s: float = 120.0
    """Longest time for a whole body to arrive."""
    answer_s: float = 120.0
    """Longest time for the client to take a whole answer."""
    wait_s: float = 60.0
    """Longest time in the queue. After that the answer is status 503, and the client retries."""


@dataclass(eq=False)
class Connection:
    """A client's connection and its only request."""

    wire: socket.socket
    host: str
    stage: Literal["arriving", "waiting", "in hand", "over"] = "arriving"
    """Of the request. While it arrives, the connection may be closed to make room."""
    held: int = 0
    """Bytes of the body in memory."""
    status: int = 0
    """Of the answer; 0: it has not begun."""
    late: asyncio.TimerHandle | None = None
    """Hangs up if the header does not come in time."""
    opening: asyncio.Future[Any] | None = None

    def hang_up(self) -> None:
        with suppress(OSError):  # closed already
            self.wire.shutdown(socket.SHUT_RDWR)  # its owner then reads the end of the stream


class TeacherServer:
    """A server on one address."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None,
        limits: Limits,
        log: Callable[[str], None],
        log_requests: bool = False,
        tls: ssl.SSLContext | None = None,
    ):
        """Binds the address, at any free port for 0; `start` begins to accept connections.

        Args:
            token: the secret that clients must send; required if other hosts can connect.
            log: receives the tracebacks of requests that failed inside.

        Raises:
            UserError: the address cannot be bound, or needs a token.
        """
        if host not in LOOPBACK and not token:
            raise UserError(
                f"--host {host} lets other hosts connect: set {TOKEN} to a secret that the runs"
                " also have, or leave --host at localhost"
            )
        self.limits, self.token, self.log, self._log_requests = limits, token, log, log_requests
        self.counts = Counter(served=0, refused=0, failed=0)
        """Number of requests so far, by outcome."""
        self._turns = asyncio.Semaphore(limits.threads)
        self._draining, self._closing = False, False
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="teacher-compiler")
        self._compiling = WeakValueDictionary[str, asyncio.Lock]()
        """Address -> held while a program is compiled for it."""
        self._open: list[Connection] = []
        """The oldest first."""
        self._tls = tls
        own: dict[str, Handler] = {
            "GET /v1/info": self._info,
            "GET /v1/head": self._tensors,
            "POST /v1/score": self._tensors,
        }
        self._handlers = {"GET /health": self._health, "GET /v1/models": self._models} | own
        named = {route.replace("/", "/{teacher}/", 1): handler for route, handler in own.items()}
        routes = [
            Route(route.partition(" ")[2], handler, methods=[route.partition(" ")[0]])
            for route, handler in (self._handlers | named).items()
        ]
        self._routes = Router(routes, redirect_slashes=False)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._accept()), daemon=True)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setblocking(False)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise UserError(f"--host {host} --port {port}: {error}") from error
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.url = f"{'https' if tls else 'http'}://{self.address}"

    def start(self, services: Mapping[str, ScoringService]) -> None:
        """Begins to accept connections.

        Args:
            services: by the names that stand before their routes; "": without one.
        """
        self.services, self._began = services, time.monotonic()
        self._most_bytes = max(service.info.max_request_bytes for service in services.values())
        self._socket.listen(128)
        self._thread.start()

    def drain(self, seconds: float) -> bool:
        """Accepts no more requests, and waits for the current ones for at most `seconds`. Returns
        whether all were answered."""
        self._draining, end = True, time.monotonic() + seconds
        while self.count("in hand") and time.monotonic() < end:
            time.sleep(0.02)
        return not self.count("in hand")

    def count(self, stage: str) -> int:
        """Counts the requests of open connections that are at a stage."""
        return sum(connection.stage == stage for connection in self._open)

    def close(self) -> None:
        """Closes all connections."""
        self._closing = True
        with suppress(OSError):  # it never listened, or another thread closes it
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait for the next connection
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    # Connections.

    async def _accept(self) -> None:
        """Accepts connections until the server closes, and hands them to uvicorn's protocol.
        `uvicorn.Server` has no deadline for a header or a TLS handshake, and makes no room."""
        self._loop = asyncio.get_running_loop()
        plain: Keywords = {"proxy_headers": False, "log_config": None, "log_level": "critical"}
        config = uvicorn.Config(self._answer, interface="asgi3", http="h11", ws="none", **plain)
        config.load()
        http_protocol: Callable[..., Any] = config.http_protocol_class
        state = ServerState()
        state.default_headers = [(b"server", b"jaxrl"), (b"connection", b"close")]
        while not self._closing:
            try:
                wire, address = await self._loop.sock_accept(self._socket)
            except OSError:  # no more files may be open, or the server closes
                await asyncio.sleep(0 if self._closing else 0.1)
                continue
            if not self._make_room(address[0]):
                wire.close()
                continue
            connection = Connection(wire, address[0])
            self._open.append(connection)
            connection.late = self._loop.call_later(self.limits.header_s, connection.hang_up)
            make = partial(http_protocol, config, state, {"connection": connection})
            opening = self._loop.connect_accepted_socket(make, wire, ssl=self._tls)
            # What fails to open, since it speaks no TLS or too slowly, is closed and needs no word.
            connection.opening = asyncio.gather(opening, return_exceptions=True)
        for connection in self._open:
            connection.hang_up()

    def _make_room(self, host: str) -> bool:
        """Returns whether one more connection may open; may close an older, incomplete one."""
        # One that is closed counts as long as its request is in memory.
        self._open = [one for one in self._open if one.wire.fileno() >= 0 or one.held]
        of_host = [one for one in self._open if one.host == host]
        for rivals, most in ((of_host, MOST_OF_ONE), (self._open, MOST_CONNECTIONS)):
            if len(rivals) >= most:
                oldest = next((one for one in rivals if one.stage == "arriving"), None)
                if oldest is None:
                    return False
                self._open.remove(oldest)
                oldest.hang_up()
        return True

    # Requests.

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or says why not."""
        connection, began = scope["state"]["connection"], time.monotonic()
        connection.late.cancel()

        async def send_noted(message: Message) -> None:
            connection.status = connection.status or message["status"]
            await send(message)

        try:
            scope["app"] = self  # the router then raises HTTPException
            await self._routes(scope, receive, send_noted)
        except Exception as error:  # no request may end the server
            refused = self._refusal(scope, error)
            begun, connection.status = connection.status, refused.status
            if begun:  # the client would take more bytes for the rest of the answer
                connection.hang_up()
                return
            content = {"error": {"status": refused.status, "message": str(refused)}}
            headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else None
            response = JSONResponse(content, headers=headers)
            await send(_start(refused.status, response))
            await send(_part(bytes(response.body)))
            if connection.stage == "arriving":  # reads the rest of the request first
                with suppress(TimeoutError, ClientDisconnect):
                    async with asyncio.timeout(LINGER_S):
                        async for _ in Request(scope, receive).stream():
                            pass
            await send(_part(b"", last=True))
        finally:
            connection.stage, connection.held = "over", 0
            self._loop.call_later(self.limits.idle_s, connection.hang_up)  # the end is not taken
            status, host = connection.status or 503, connection.host  # cut off: the server closes
            self.counts["served" if status < 400 else "refused" if status < 500 else "failed"] += 1
            if self._log_requests:  # without headers, which hold the token
                question = f"{scope['method']} {scope['path'][:100]!r}"
                self.log(f"{host} {question} {status} {time.monotonic() - began:.2f} s")

    def _refusal(self, scope: Scope, error: Exception) -> Refused:
        """Converts what a request raised into a status and a message; logs what is a bug."""
        path, method = scope["path"][:100], scope["method"]
        match error:
            case Refused():
                return error
            case HTTPException():  # of the router
                text = f"{method} {path!r}: {error.detail}; there are {', '.join(self._handlers)}"
                return Refused(error.status_code, text)
            case TimeoutError():
                return Refused(408, "the request, or the reading of its answer, took too long")
            case ClientDisconnect():
                return Refused(499, "the client is gone")
            case NotFinite():
                self.log(f"{method} {path!r}: {error}")
                return Refused(500, str(error))
        self.log("".join(traceback.format_exception(error)).rstrip())
        return Refused(500, f"{type(error).__name__}: {error}"[:600])

    async def _health(self, request: Request) -> Response:
        status: JsonObject = {"status": "draining" if self._draining else "ok"}
        if self._knows_token(request):
            names = {name: service.info.model for name, service in self.services.items()}
            status |= {
                **({"model": names[""]} if "" in names else {"teachers": names}),
                **self.counts,
                "in_hand": self.count("in hand"),
                "waiting": self.count("waiting"),
                "seconds_up": round(time.monotonic() - self._began, 1),
            }
        return JSONResponse(status)

    async def _models(self, request: Request) -> Response:
        """Lists the teachers, in the form in which completions servers list their models."""
        self._check_token(request)
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
        service, connection = self._teacher(request), request.state.connection
        asked: protocol.Request | None = None
        if request.method == "POST":
            body = await self._body(request, service.info.max_request_bytes)
            connection.stage = "waiting"
            asked = await asyncio.to_thread(protocol.read_request, body, service.info)
        elif FINGERPRINT in request.query_params:
            protocol.check_meant(request.query_params[FINGERPRINT], service.info)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            connection.stage = "waiting"
            async with _while_connected(receive) as wanted:
                if asked is None:
                    compute: Answer = service.head
                else:
                    compute = await self._compiled(service, asked, connection.host)
                try:  # in order of arrival
                    async with asyncio.timeout(self.limits.wait_s):
                        await self._turns.acquire()
                except TimeoutError:
                    text = f"busy: {self.count('in hand')} requests in hand"
                    raise Refused(503, text) from None
                connection.stage = "in hand"
                try:
                    if self._draining:
                        raise Refused(503, STOPPING)
                    tensors = await self._loop.run_in_executor(service.turns, compute, wanted)
                    await self._send_tensors(tensors, send)
                finally:
                    self._turns.release()

        return answer

    def _knows_token(self, request: Request) -> bool:
        """Returns whether the client sent the token, or none is needed."""
        if self.token is None:
            return True
        sent = request.headers.get("Authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(sent, f"Bearer {self.token}".encode())

    def _check_token(self, request: Request) -> None:
        if not self._knows_token(request):
            raise Refused(401, "the token is missing or wrong: Authorization: Bearer TOKEN")

    def _teacher(self, request: Request) -> ScoringService:
        """Returns the teacher that the path names."""
        self._check_token(request)
        if self._draining:
            raise Refused(503, STOPPING)
        name = request.path_params.get("teacher", "")
        if name not in self.services:
            first = next(iter(self.services))
            names = f"the teachers {', '.join(self.services)}: name one, as in /{first}/v1/info"
            alone = "one teacher without a name, at /v1/info"
            raise Refused(404, f"here {'are ' + names if first else 'is ' + alone}")
        return self.services[name]

    async def _body(self, request: Request, most: int) -> bytes:
        length = request.headers.get("Content-Length")
        if "Transfer-Encoding" in request.headers or length is None:
            raise Refused(411, "Content-Length is needed; chunked bodies are not read")
        if int(length) > most:  # h11 has checked that it is a number
            raise Refused(413, f"a body of {int(length):,} bytes: at most {most:,} are taken")
        body, connection, now = bytearray(), request.state.connection, self._loop.time
        end = now() + self.limits.body_s
        async with asyncio.timeout(self.limits.idle_s) as deadline:
            async for piece in request.stream():
                of_host = [one for one in self._open if one.host == connection.host]
                for rivals, most in ((of_host, BODIES_OF_ONE), (self._open, MOST_BODIES)):
                    held = sum(one.held for one in rivals)
                    if held + len(piece) > most * self._most_bytes:
                        raise Refused(503, f"busy: {held:,} bytes of requests in memory")
                connection.held += len(piece)
                body += piece
                deadline.reschedule(min(now() + self.limits.idle_s, end))
        return bytes(body)

    async def _compiled(
        self, service: ScoringService, asked: protocol.Request, host: str
    ) -> Answer:
        """Has the programs of a request compiled, which may take minutes, without holding a turn:
        on one thread, and for one request of an address at a time."""
        answer = await asyncio.to_thread(service.ready, asked)
        if answer is not None:
            return answer
        lock = self._compiling.setdefault(host, asyncio.Lock())
        await lock.acquire()

        async def compiled() -> Answer:
            try:
                compiler = self._compiler
                return await self._loop.run_in_executor(compiler, service.compile, asked, host)
            finally:
                lock.release()

        return await asyncio.shield(compiled())  # holds the lock to its end, though the client left

    async def _send_tensors(self, tensors: Mapping[str, np.ndarray], send: Send) -> None:
        pieces, now = protocol.frame(tensors), self._loop.time
        headers = {"Content-Length": str(sum(map(len, pieces)))}
        end = now() + self.limits.answer_s
        async with asyncio.timeout(self.limits.idle_s) as deadline:
            await send(_start(200, Response(headers=headers, media_type=protocol.SAFETENSORS)))
            for piece in pieces:
                for at in range(0, len(piece), PIECE):
                    await send(_part(bytes(piece[at : at + PIECE])))
                    deadline.reschedule(min(now() + self.limits.idle_s, end))
            await send(_part(b""))  # waits until most of the piece before has gone
        await send(_part(b"", last=True))


@asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncIterator[Wanted]:
    """Cancels the block when the client disconnects, and raises ClientDisconnect. The block gets
    a function that says, in any thread, whether the client is still there."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            yield lambda: not watching.done()
            watching.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _start(status: int, response: Response) -> Message:
    return {"type": "http.response.start", "status": status, "headers": response.raw_headers}


def _part(body: bytes, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}


def server_tls(certificate: str, private_key: str | None) -> ssl.SSLContext:
    """Reads the PEM files of a certificate and its key (None: it is in the same file). Raises
    UserError if they cannot be read, or do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key, password="")  # else it may ask for one
    except (OSError, ValueError) as error:
        key = f" --private-key {private_key}" if private_key else ""
        why = f"no certificate with its private key: {error}"
        raise UserError(f"--certificate {certificate}{key}: {why}") from error
    return context


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
        self._programs: dict[ProgramKey, tuple[str, Compiled]] = {}
        """With the address of the client that each was compiled for; the last used is last."""
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
        """Returns what `compile` returns if all programs of the request are there, else None."""
        keys = [key for key, _, _ in self._slices(request)]
        with self._lock:
            there = all(key in self._programs for key in keys)
        return self.compile(request, "") if there else None

    def compile(self, request: protocol.Request, address: str) -> Answer:
        """Compiles the programs of a request that are not there yet. Called from one thread only,
        it compiles no program twice.

        Args:
            address: of the client, whose programs may not take the place of all others.
        """
        work = []
        for key, inputs, n in self._slices(request):
            with self._lock:
                if known := self._programs.pop(key, None):
                    self._programs[key] = known  # the last used is last
            if known is None:
                known = address, self._compile(key[0], inputs)
                with self._lock:
                    self._programs[key] = known
                    mine = [k for k, (client, _) in self._programs.items() if client == address]
                    if len(mine) > PROGRAMS_OF_ONE:
                        del self._programs[mine[0]]
                    elif len(self._programs) > MOST_PROGRAMS:
                        del self._programs[next(iter(self._programs))]
            work.append((known[1], inputs, n))
        temperature = np.float32(request.options.distill_temperature)

        def answer(wanted: Wanted) -> Mapping[str, np.ndarray]:
            current().enter(self._stage)
            scalar, signals = jax.device_put(temperature, self._everywhere), []
            for program, inputs, n in work:
                if not wanted():
                    raise ClientDisconnect
                signal = program(self.params, *jax.device_put(inputs, self._rows), scalar)
                signals.append({k: np.asarray(x)[:n] for k, x in protocol.present(signal).items()})
                if (wrong := broken_rows(signals[-1])).any():
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
        room = room_of(sequences, devices, np.arange(n * size).reshape(n, size))
        slices = []
        for start in range(0, b, size):
            inputs = jax.tree.map(lambda x, at=start: x[at : at + size], (sequences, ids))
            inputs = replace(inputs[0], room=room), inputs[1]
            shapes = str(jax.tree.map(lambda x: (x.shape, x.dtype.name), inputs))
            slices.append(((options, shapes), inputs, min(b - start, size)))
        return slices

    def _compile(self, options: Options, inputs: Tree) -> Compiled:
        projection = Projection(options.distill, self.mesh, options.vocab_size)

        def signal(
            params: Params, sequences: Sequences, ids: Array, temperature: Array
        ) -> TeacherSignal:
            at = replace(projection, temperature=temperature)
            return score(at, self.model, params, sequences, ids)

        rows = jax.tree.map(lambda x: _abstract(x, self._rows), inputs)
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._everywhere)
        program = jax.jit(signal, out_shardings=self._rows)
        return program.lower(self._abstract, *rows, scalar).compile()


def _abstract(x: Array, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)
