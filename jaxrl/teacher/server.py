"""The HTTP server of teachers that serve several runs, on starlette and uvicorn.
`teacher.service.ScoringService` does the computation.

The server reads and checks a whole request before it queues it for the devices, so that an invalid
or slow request delays no other. Every read and write has a deadline, every body a maximum size, and
every connection carries one request. If one address, or all together, have too many connections,
the server closes the oldest connection whose request is still incomplete to accept a new one.

Everything but the computation runs in the event loop of one thread, to which all state belongs.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from weakref import WeakValueDictionary

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl.errors import UserError
from jaxrl.process.json_types import JsonObject
from jaxrl.teacher import protocol
from jaxrl.teacher.connection import Address, Connection, Exchange, Limits, part, start
from jaxrl.teacher.protocol import (
    FINGERPRINT,
    HEAD,
    JSON,
    SAFETENSORS,
    TOKEN,
    Gone,
    Piece,
    Refused,
    check_meant,
    frame,
    read_request,
    write_signal,
)
from jaxrl.teacher.service import Answer, ScoringService

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_CONNECTIONS, MOST_OF_ONE = 256, 64
"""Connections open at once, in total and per address. If all of these have sent a whole request, a
further connection is closed without an answer."""
MOST_BODIES, BODIES_OF_ONE = 8, 4
"""Bytes of request bodies in memory, in total and per address, as multiples of the maximum size of
a request."""
PIECE = 1 << 20
"""Bytes written between two checks of the deadline."""
LOG_EVERY_S = 60.0
ROUTES = "/health, /v1/models, /v1/info, /v1/head, /v1/score"


class TeacherServer:
    """A server on one address. The constructor binds the address; `start` begins to accept
    connections."""

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
        """
        Args:
            port: 0 for any free one.
            token: the secret that clients must send; required if other hosts can connect.
            log: receives a line with counts each minute in which there were requests.
            log_requests: also log a line for each request.
            tls: the server's certificate; None: plain HTTP.

        Raises:
            UserError: the address cannot be bound, or needs a token.
        """
        if host not in LOOPBACK and not token:
            raise UserError(
                f"--host {host} lets other hosts connect: set {TOKEN} to a secret that the"
                " runs know too, or leave --host at localhost"
            )
        self.limits, self.token, self.log, self._log_requests = limits, token, log, log_requests
        self.counts = Counter(served=0, refused=0, failed=0)
        """Number of requests so far, by outcome."""
        self._turns, self._idle = asyncio.Semaphore(limits.threads), asyncio.Event()
        self._waiting, self._in_hand, self._draining = 0, 0, False
        self._compiling = WeakValueDictionary[str, asyncio.Lock]()
        """Address -> held while a program is compiled for it."""
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="teacher-compiler")
        self._bodies = Counter[str]()
        """Address -> bytes of its requests in memory."""
        self._open: dict[Address, socket.socket] = {}
        """The open connections, the oldest first."""
        self._asking: dict[Address, socket.socket] = {}
        """Those of them whose request is still incomplete."""
        self._tls = tls
        self._routes = Router(
            [
                Route("/health", self._health),
                Route("/v1/models", self._models),
                *(
                    Route(teacher + path, handler, methods=[method])
                    for teacher in ("", "/{teacher}")
                    for method, path, handler in (
                        ("GET", "/v1/info", self._info),
                        ("GET", "/v1/head", self._head),
                        ("POST", "/v1/score", self._score),
                    )
                ),
            ],
            redirect_slashes=False,
        )
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            lifespan="off",
            proxy_headers=False,
            ws="none",
            log_config=None,
            log_level="critical",
        )
        config.load()
        self._connection = partial(Connection, config, limits, self._garbage, self._closed)
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix="teacher-requests")
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
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
        """
        Args:
            services: by the names that stand before their routes; "": without one.
        """
        self.services, self._began = services, time.monotonic()
        self._most_bytes = max(each.info.max_request_bytes for each in services.values())
        self._socket.listen(128)
        self._thread.start()
        self._ready.wait()

    def drain(self, seconds: float) -> bool:
        """Accepts no more requests, and waits for the current ones for at most `seconds`. Returns
        whether all were answered."""
        try:
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result(seconds)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._accepting.cancel)
            self._thread.join()
        self._socket.close()
        for threads in (self._threads, self._compiler):
            threads.shutdown(wait=False, cancel_futures=True)

    # Connections.

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._accept())

    async def _accept(self) -> None:
        accepting = asyncio.current_task()
        assert accepting is not None
        self._loop, self._accepting = asyncio.get_running_loop(), accepting
        self._idle.set()
        self._ready.set()
        tasks = {self._loop.create_task(self._log_counts())}
        try:
            while True:
                try:
                    wire, address = await self._loop.sock_accept(self._socket)
                except OSError:  # no more files may be open
                    await asyncio.sleep(0.1)
                    continue
                if self._make_room(address[0]):
                    self._open[address[:2]] = self._asking[address[:2]] = wire
                    task = self._loop.create_task(self._connect(wire, address[:2]))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                else:
                    wire.close()
        finally:
            self._socket.close()
            for wire in self._open.values():
                _hang_up(wire)

    async def _connect(self, wire: socket.socket, address: Address) -> None:
        patience = None if self._tls is None else self.limits.header_s
        try:
            await self._loop.connect_accepted_socket(
                partial(self._connection, address),
                wire,
                ssl=self._tls,
                ssl_handshake_timeout=patience,
            )
        except OSError:  # no TLS, or not in time
            self._closed(address)
            wire.close()

    def _make_room(self, host: str) -> bool:
        """Whether one more connection may open; may close an older, incomplete one for it."""
        theirs = sum(each == host for each, _ in self._open) >= MOST_OF_ONE
        if not theirs and len(self._open) < MOST_CONNECTIONS:
            return True
        asking = (each for each in self._asking if not theirs or each[0] == host)
        oldest = next(asking, None)
        if oldest is None:
            return False
        wire = self._asking[oldest]
        self._closed(oldest)
        _hang_up(wire)
        return True

    def _closed(self, address: Address) -> None:
        self._open.pop(address, None)
        self._asking.pop(address, None)

    # Requests.

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or says why not."""
        exchange, began = Exchange(scope, receive, send, self.limits), time.monotonic()
        scope.update(app=self, exchange=exchange)
        refused: Refused | None = None
        try:
            await self._routes(scope, exchange.receive, exchange.send)
        except Refused as error:
            refused = error
        except HTTPException as error:
            refused = _refusal(scope, error)
        except TimeoutError:
            refused = Refused(408, "the request, or the reading of its answer, took too long")
        except (Gone, ClientDisconnect):
            refused = Refused(499, "the client is gone")
        except Exception as error:  # no request may end the server
            refused = Refused(500, f"{type(error).__name__}: {error}"[:600])
            self.log("".join(traceback.format_exception(error)).rstrip())
        host, status = exchange.address[0], refused.status if refused else exchange.status
        try:
            if refused is not None:
                await exchange.refuse(status, str(refused))
        except TimeoutError:
            exchange.hang_up()
        finally:
            self._hold(host, -exchange.held)
            question = f"{scope['method']} {scope['path'][:100]!r}"
            self._count(host, question, status, time.monotonic() - began)

    def _garbage(self, address: Address) -> None:
        self._count(address[0], "?", 400, 0.0)

    def _count(self, host: str, question: str, status: int, seconds: float) -> None:
        """Counts a finished request. Its headers are never logged."""
        self.counts["served" if status < 400 else "refused" if status < 500 else "failed"] += 1
        if self._log_requests:
            self.log(f"{host} {question} {status} {seconds:.2f} s")

    async def _health(self, request: Request) -> Response:
        status: JsonObject = {"status": "draining" if self._draining else "ok"}
        if self._knows_token(request):
            names = {name: each.info.model for name, each in self.services.items()}
            status |= {
                **({"model": names[""]} if "" in names else {"teachers": names}),
                **self.counts,
                "in_hand": self._in_hand,
                "waiting": self._waiting,
                "seconds_up": round(time.monotonic() - self._began, 1),
            }
        return JSONResponse(status)

    async def _models(self, request: Request) -> Response:
        """The teachers, in the form in which completions servers list their models."""
        self._check_token(request)
        each = {name or one.info.model: one.info for name, one in self.services.items()}
        known = [
            {"id": name, "object": "model", "root": i.model, "max_model_len": i.max_tokens}
            for name, i in each.items()
        ]
        return JSONResponse({"object": "list", "data": known})

    async def _info(self, request: Request) -> Response:
        return Response(self._teacher(request).info.model_dump_json(), media_type=JSON)

    async def _head(self, request: Request) -> ASGIApp:
        service = self._teacher(request)
        if FINGERPRINT in request.query_params:
            check_meant(request.query_params[FINGERPRINT], service.info)
        return self._tensors(lambda wanted: frame({HEAD: service.head()}))

    async def _score(self, request: Request) -> ASGIApp:
        service = self._teacher(request)
        body = await self._body(request, service.info.max_request_bytes)
        asked = await asyncio.to_thread(read_request, body, service.info)
        answer = await self._compiled(service, asked, request.scope["exchange"])
        return self._tensors(lambda wanted: write_signal(answer(wanted)))

    async def _compiled(
        self, service: ScoringService, asked: protocol.Request, exchange: Exchange
    ) -> Answer:
        """Has the programs of a request compiled, which may take minutes, without holding a turn:
        on one thread, and for one request of an address at a time."""
        ready = await asyncio.to_thread(service.ready, asked)
        if ready is not None:
            return ready
        if self._draining:
            raise Refused(503, "this teacher is being stopped")
        self._asking.pop(exchange.address, None)  # is no longer closed to make room
        host = exchange.address[0]
        lock = self._compiling.setdefault(host, asyncio.Lock())
        self._waiting += 1
        try:
            async with exchange.watched() as wanted, lock:
                compiling = partial(service.compile, asked, host, wanted)
                return await self._loop.run_in_executor(self._compiler, compiling)
        finally:
            self._waiting -= 1

    def _knows_token(self, request: Request) -> bool:
        """Whether the client sent the token, or none is needed."""
        if self.token is None:
            return True
        given = request.headers.get("Authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())

    def _check_token(self, request: Request) -> None:
        if not self._knows_token(request):
            raise Refused(401, "the token is missing or wrong: Authorization: Bearer TOKEN")

    def _teacher(self, request: Request) -> ScoringService:
        """The teacher that the path names."""
        self._check_token(request)
        name = request.path_params.get("teacher", "")
        if name not in self.services:
            first = next(iter(self.services))
            names = f"the teachers {', '.join(self.services)}: name one, as in /{first}/v1/info"
            alone = "one teacher without a name, at /v1/info"
            raise Refused(404, f"here {'are ' + names if first else 'is ' + alone}")
        return self.services[name]

    async def _body(self, request: Request, most: int) -> bytes:
        length, body = _length(request), bytearray()
        if length > most:
            raise Refused(413, f"a body of {length:,} bytes: at most {most:,} are taken")
        exchange: Exchange = request.scope["exchange"]
        async with asyncio.timeout(self.limits.body_s):
            async for piece in request.stream():
                self._hold(exchange.address[0], len(piece))
                exchange.held += len(piece)
                body += piece
        if len(body) < length:
            raise Refused(400, f"the body ended after {len(body):,} of {length:,} bytes")
        return bytes(body)

    def _hold(self, host: str, n: int) -> None:
        """Adds n (which may be negative) to the bytes of requests in memory. Raises `Refused` over
        the limit."""
        held, theirs = self._bodies.total(), self._bodies[host] + n
        most, of_one = MOST_BODIES * self._most_bytes, BODIES_OF_ONE * self._most_bytes
        if n > 0 and (held + n > most or theirs > of_one):
            raise Refused(503, f"busy: {held:,} bytes of requests in memory")
        self._bodies[host] = theirs
        self._bodies += Counter()  # removes the addresses with 0 bytes

    def _tensors(self, compute: Callable[[Callable[[], bool]], list[Piece]]) -> ASGIApp:
        """The answer that `compute` makes in a thread, once it is the request's turn.

        Args:
            compute: gets a function that says whether the client still waits.
        """

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            exchange: Exchange = scope["exchange"]
            self._asking.pop(exchange.address, None)  # is no longer closed to make room
            async with self._turn(), exchange.watched() as wanted:
                pieces = await self._loop.run_in_executor(self._threads, compute, wanted)
                length = str(sum(map(len, pieces)))
                headers = Response(headers={"Content-Length": length}, media_type=SAFETENSORS)
                await send(start(200, headers.raw_headers))
                for piece in pieces:
                    for at in range(0, len(piece), PIECE):
                        await send(part(bytes(piece[at : at + PIECE])))
                await send(part(b""))  # waits until most of the piece before has gone
                await send(part(b"", last=True))

        return answer

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Waits in the queue; inside the block the request is one of at most `limits.threads`
        current ones. Requests are admitted in order of arrival."""
        stopping = Refused(503, "this teacher is being stopped")
        if self._draining:
            raise stopping
        self._waiting += 1
        try:
            async with asyncio.timeout(self.limits.wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise Refused(503, f"busy: {self._in_hand} requests in hand") from None
        finally:
            self._waiting -= 1
        self._in_hand += 1
        self._idle.clear()
        try:
            if self._draining:
                raise stopping
            yield
        finally:
            self._in_hand -= 1
            self._turns.release()
            if not self._in_hand:
                self._idle.set()

    async def _drain(self) -> None:
        self._draining = True
        await self._idle.wait()

    async def _log_counts(self) -> None:
        """Each minute in which there were requests."""
        while True:
            before = self.counts.copy()
            await asyncio.sleep(LOG_EVERY_S)
            if self.counts != before:
                counts = ", ".join(f"{n - before[kind]} {kind}" for kind, n in self.counts.items())
                self.log(f"last {LOG_EVERY_S:g} s: {counts}; {self._in_hand} in hand")


def server_tls(certificate: str, private_key: str | None) -> ssl.SSLContext:
    """What a server needs to speak TLS.

    Args:
        certificate: PEM file of the certificate, and of those that signed it.
        private_key: PEM file; None: it is in the file of the certificate.

    Raises:
        UserError: the files cannot be read, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key, password="")  # else it may ask for one
    except (OSError, ValueError) as error:
        key = f" --private-key {private_key}" if private_key else ""
        why = f"no certificate with its private key: {error}"
        raise UserError(f"--certificate {certificate}{key}: {why}") from error
    return context


def _length(request: Request) -> int:
    given = request.headers.get("Content-Length")
    if "Transfer-Encoding" in request.headers or given is None:
        raise Refused(411, "Content-Length is needed; chunked bodies are not read")
    return int(given)


def _refusal(scope: Scope, error: HTTPException) -> Refused:
    """Of a request that no route takes."""
    path, method = scope["path"][:100], scope["method"]
    if error.status_code == 405:
        takes = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
        return Refused(
            405 if method in ("GET", "POST") else 501, f"{path} takes {takes}, not {method}"
        )
    return Refused(error.status_code, f"no such route {path!r}: there are {ROUTES}")


def _hang_up(wire: socket.socket) -> None:
    with suppress(OSError):
        wire.shutdown(socket.SHUT_RDWR)  # its owner then reads the end of the stream
