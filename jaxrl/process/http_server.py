"""An HTTP server in a thread of its own, on starlette and uvicorn as they are.

A handler is a coroutine function that gets a `Request` and returns a response, which may stream. It
reads the body by `read_body`, does what is dear inside of `turn`, and raises `Refused` where it
gives no answer: clients get that as JSON. All handlers run in the event loop of the thread.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl.errors import NotFinite, Refused, UserError
from jaxrl.process.json_types import Keywords

LOOPBACK = ("localhost", "127.0.0.1", "::1")
STOPPING = "this server is being stopped"
Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Limits:
    """Limits on time and concurrency of requests."""

    threads: int = 8
    """Requests in hand (`HttpServer.turn`) at once; further ones wait in the queue."""
    wait_s: float = 60.0
    """Longest time in the queue. After that the answer is status 503, and the client retries."""
    body_s: float = 120.0
    """Longest time for a whole body to arrive."""
    idle_s: float = 10.0
    """Longest wait for the client to take the next bytes of an answer."""
    body_bytes: int = 1 << 29
    """Of all request bodies in memory."""
    connections: int = 256
    """Open at once; requests on further ones get status 503."""


class HttpServer:
    """A server on one address."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None = None,
        limits: Limits = Limits(),
        log: Callable[[str], None],
        log_requests: bool = False,
        tls: Mapping[str, str] | None = None,
    ):
        """Binds the address, at any free port for 0; `serve` begins to accept connections.

        Args:
            token: the secret that clients must send as bearer token; None: none is needed.
            log: receives the tracebacks of requests that failed inside.
            tls: as `server_tls` returns it.

        Raises:
            UserError: the address cannot be bound.
        """
        self.limits, self.token, self.log, self._log_requests = limits, token, log, log_requests
        self.counts = Counter(served=0, refused=0, failed=0)
        """Number of requests so far, by outcome."""
        self.open = self.in_hand = self.held = 0
        """Requests that are not over; those that have a turn; bytes of bodies in memory."""
        self.draining = False
        self._turns = asyncio.Semaphore(limits.threads)
        self._thread: threading.Thread | None = None
        self._tls: Keywords = dict(tls or {})
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise UserError(f"--host {host} --port {port}: {error}") from error
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.url = f"{'https' if tls else 'http'}://{self.address}"

    def serve(self, routes: Mapping[str, Handler], public: Collection[str] = ()) -> None:
        """Begins to accept connections; returns at once.

        Args:
            routes: by method and path, as in "POST /v1/{name}/score".
            public: those of them that need no token, and are answered while the server drains.
        """
        self._known = ", ".join(route for route in routes if "{" not in route)

        def guarded(handler: Handler) -> Handler:
            async def answer(request: Request) -> ASGIApp:
                if not self.knows_token(request):
                    text = "the token is missing or wrong: Authorization: Bearer TOKEN"
                    raise Refused(401, text)
                if self.draining:
                    raise Refused(503, STOPPING)
                return await handler(request)

            return answer

        table = []
        for route, handler in routes.items():
            method, _, path = route.partition(" ")
            chosen = handler if route in public else guarded(handler)
            table.append(Route(path, chosen, methods=[method]))
        self._router = Router(table, redirect_slashes=False)
        quiet: Keywords = {"log_config": None, "log_level": "critical", "lifespan": "off"}
        quiet |= {"proxy_headers": False, "server_header": False, "timeout_graceful_shutdown": 0}
        plain: Keywords = {"interface": "asgi3", "http": "h11", "ws": "none", "loop": "asyncio"}
        most = self.limits.connections
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(self._answer, limit_concurrency=most, **plain, **quiet, **self._tls)
        )
        self._socket.listen(128)
        run = partial(self._uvicorn.run, sockets=[self._socket])
        self._thread = threading.Thread(target=run, name="http server", daemon=True)
        self._thread.start()

    def drain(self, seconds: float) -> bool:
        """Takes no more requests, and waits for those in hand for at most `seconds`. Returns
        whether all were answered."""
        self.draining, end = True, time.monotonic() + seconds
        while self.in_hand and time.monotonic() < end:
            time.sleep(0.02)
        return not self.in_hand

    def close(self) -> None:
        """Closes all connections."""
        if self._thread is not None:
            self._uvicorn.should_exit = True
            self._thread.join(10)
        self._socket.close()

    # What handlers use.

    def knows_token(self, request: Request) -> bool:
        """Returns whether the client sent the token, or none is needed."""
        if self.token is None:
            return True
        sent = request.headers.get("Authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(sent, f"Bearer {self.token}".encode())

    async def read_body(self, request: Request, most: int) -> bytes:
        """Reads the body of a request. Raises Refused where it has more than `most` bytes, and
        TimeoutError where it does not come in time."""
        body, length = bytearray(), int(request.headers.get("Content-Length", 0))  # h11 checks it
        async with asyncio.timeout(self.limits.body_s):
            if length <= most:
                async for piece in request.stream():
                    if self.held + len(piece) > self.limits.body_bytes:
                        raise Refused(503, f"busy: {self.held:,} bytes of requests in memory")
                    request.scope["held"] += len(piece)
                    self.held += len(piece)
                    body += piece
                    if (length := len(body)) > most:
                        break
        if length > most:
            raise Refused(413, f"a body of {length:,} bytes: at most {most:,} are taken")
        return bytes(body)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Has the request in hand in this block, in order of arrival. Raises Refused where no turn
        is free in time, or the server drains."""
        try:
            async with asyncio.timeout(self.limits.wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise Refused(503, f"busy: {self.in_hand} requests in hand") from None
        self.in_hand += 1
        try:
            if self.draining:
                raise Refused(503, STOPPING)
            yield
        finally:
            self.in_hand -= 1
            self._turns.release()

    # Requests.

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or says why not."""
        began, status = time.monotonic(), 0

        async def send_in_time(message: Message) -> None:
            nonlocal status
            status = status or message["status"]
            async with asyncio.timeout(self.limits.idle_s):
                await send(message)

        self.open += 1
        scope.update(app=self, held=0)  # with an app, the router raises HTTPException
        try:
            await self._router(scope, receive, send_in_time)
        except (Exception, asyncio.CancelledError) as error:  # no request may end the server
            refused, begun = self._refusal(scope, error), bool(status)
            if begun:  # the client would take more bytes for the rest of the answer
                status = refused.status
                raise
            content = {"error": {"status": refused.status, "message": str(refused)}}
            headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else None
            response = JSONResponse(content, refused.status, headers)
            await response(scope, receive, send_in_time)
        finally:
            self.open -= 1
            self.held -= scope["held"]
            self.counts["served" if status < 400 else "refused" if status < 500 else "failed"] += 1
            if self._log_requests:  # without headers, which hold the token
                host, question = scope["client"][0], f"{scope['method']} {scope['path'][:100]!r}"
                self.log(f"{host} {question} {status} {time.monotonic() - began:.2f} s")

    def _refusal(self, scope: Scope, error: BaseException) -> Refused:
        """Converts what a request raised into a status and a message; logs what is a bug."""
        path, method = scope["path"][:100], scope["method"]
        match error:
            case Refused():
                return error
            case HTTPException():  # of the router
                text = f"{method} {path!r}: {error.detail}; there are {self._known}"
                return Refused(error.status_code, text)
            case asyncio.CancelledError():
                return Refused(503, STOPPING)
            case TimeoutError():
                return Refused(408, "the request, or the reading of its answer, took too long")
            case ClientDisconnect():
                return Refused(499, "the client is gone")
            case NotFinite():
                self.log(f"{method} {path!r}: {error}")
                return Refused(500, str(error))
        self.log("".join(traceback.format_exception(error)).rstrip())
        return Refused(500, f"{type(error).__name__}: {error}"[:600])


@asynccontextmanager
async def while_connected(request: Request) -> AsyncIterator[Callable[[], bool]]:
    """Cancels the block when the client disconnects, and raises ClientDisconnect. The block gets
    a function that says, in any thread, whether the client is still there. The body is read."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            yield lambda: not watching.done()
            watching.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def server_tls(certificate: str, private_key: str | None) -> dict[str, str]:
    """Returns uvicorn's options for the PEM files of a certificate and its key (None: it is in the
    same file). Raises UserError if they cannot be read, or do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key, password="")  # else it may ask for one
    except (OSError, ValueError) as error:
        key = f" --private-key {private_key}" if private_key else ""
        why = f"no certificate with its private key: {error}"
        raise UserError(f"--certificate {certificate}{key}: {why}") from error
    return {"ssl_certfile": certificate, "ssl_keyfile": private_key or certificate}
