"""A connection to a teacher's server, and the request and answer on it: their deadlines."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

LINGER_S = 1.0
"""How long the rest of a refused body is read: a connection closed with unread bytes loses its
answer."""
Address = tuple[str, int]


@dataclass(frozen=True)
class Limits:
    """Limits on time and concurrency of requests."""

    threads: int = 8
    """Requests that are computed or answered at once; further ones wait in the queue."""
    header_s: float = 10.0
    """Longest time from the connection to the end of the request's header."""
    idle_s: float = 10.0
    """Longest wait for the next bytes of a request, or for the client to take the next bytes of an
    answer."""
    body_s: float = 120.0
    """Longest time for a whole request to arrive."""
    answer_s: float = 120.0
    """Longest time for the client to take a whole answer."""
    wait_s: float = 60.0
    """Longest time in the queue. After that the answer is status 503, and the client retries."""


class Connection(H11Protocol):
    """A connection with one request. It closes itself if the request's header is late, or the end
    of the answer is not taken."""

    def __init__(
        self,
        config: uvicorn.Config,
        limits: Limits,
        on_garbage: Callable[[Address], None],
        on_close: Callable[[Address], None],
        address: Address,
    ):
        """
        Args:
            on_garbage: called with the address after the answer to what is no HTTP request.
            on_close: called with the address when the connection is closed.
            address: of the client.
        """
        super().__init__(config, ServerState(), {"connection": self})
        self.server_state.default_headers = [(b"server", b"jaxrl"), (b"connection", b"close")]
        self.address, self._limits = address, limits
        self._on_garbage, self._on_close = on_garbage, on_close

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_end = self.loop.time() + self._limits.header_s
        self._close_later(self._limits.idle_s)

    def data_received(self, data: bytes) -> None:
        self._late.cancel()
        super().data_received(data)
        if self.cycle is None:
            self._close_later(min(self._limits.idle_s, self._header_end - self.loop.time()))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Half a request is answered; whoever has sent a whole one and hangs up is gone."""
        half = self.cycle is not None and self.cycle.more_body
        self._end_body()
        return half and self.scheme == "http"

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self._end_body()  # the request is refused by what is known of it
            return
        why = f"no HTTP request: {sys.exception()}"
        if "Content-Length" in why:
            why = "Content-Length is no number of bytes"
        headers, body = refusal(400, why)
        lines = [b"HTTP/1.1 400 Bad Request", *(b": ".join(header) for header in headers)]
        self.transport.write(b"\r\n".join([*lines, b"Connection: close", b"", body]))
        self.transport.close()
        self._on_garbage(self.address)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._close_later(self._limits.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)
        self._on_close(self.address)

    def _close_later(self, seconds: float) -> None:
        self._late = self.loop.call_later(seconds, self.transport.abort)

    def _end_body(self) -> None:
        if self.cycle is not None:
            self.cycle.more_body = False
            self.cycle.message_event.set()


class Exchange:
    """A request and its answer: their deadlines, and how far both have come."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits):
        self._connection: Connection = scope["state"]["connection"]
        self._receive, self._send, self._limits = receive, send, limits
        self.address = self._connection.address
        self.status = self.held = 0
        """Of the answer; 0 before it has begun. Bytes of the request in memory."""
        self._whole = False

    async def receive(self) -> Message:
        async with asyncio.timeout(self._limits.idle_s):
            message = await self._receive()
        self._whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._end = message["status"], time.monotonic() + self._limits.answer_s
        left = min(self._end - time.monotonic(), self._limits.idle_s)
        async with asyncio.timeout(max(left, 0.0)):
            await self._send(message)

    async def refuse(self, status: int, message: str) -> None:
        if self.status:
            self.hang_up()  # the client would take more bytes for the rest of the answer
            return
        headers, body = refusal(status, message)
        await self.send(start(status, headers))
        await self.send(part(body))
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self._whole:
                    await self.receive()
        await self.send(part(b"", last=True))

    def hang_up(self) -> None:
        self._connection.transport.abort()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Callable[[], bool]]:
        """Gives a function that says whether the client still waits for its answer. Its request is
        complete."""
        gone = threading.Event()

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone.set()

        watching = asyncio.create_task(watch())
        try:
            yield lambda: not gone.is_set()
        finally:
            watching.cancel()


def refusal(status: int, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an answer that says why there is none."""
    error = JSONResponse({"error": {"status": status, "message": message}})
    if status == 401:
        error.headers["WWW-Authenticate"] = "Bearer"
    return error.raw_headers, bytes(error.body)


def start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not last}
