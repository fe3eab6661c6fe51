"""The HTTP server of a teacher that serves several runs. `teacher.service.ScoringService` does the
computation.

The server reads and checks a whole request before it queues it for the devices, so that an invalid
or slow request delays no other. Every read and write has a deadline, every body a maximum size, and
every connection carries one request. If one address, or all together, have too many connections,
the server closes the oldest connection whose request is still incomplete to accept a new one.
"""

from __future__ import annotations

import hmac
import io
import json
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from jaxrl.errors import UserError
from jaxrl.teacher.protocol import (
    HEAD,
    JSON,
    SAFETENSORS,
    TOKEN,
    Gone,
    Info,
    Piece,
    Refused,
    frame,
    read_request,
    write_signal,
)
from jaxrl.teacher.service import ScoringService
from jaxrl.types import JsonObject

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_CONNECTIONS, MOST_OF_ONE = 256, 64
"""Connections open at once, in total and per address. If all of these have sent a whole request, a
further connection is closed without an answer."""
MOST_BODIES, BODIES_OF_ONE = 8, 4
"""Bytes of request bodies in memory, in total and per address, as multiples of the maximum size of
a request."""
PIECE = 1 << 20
"""Bytes read or written between two checks of the deadline."""
LOG_EVERY_S = 60.0
POLL_S, LINGER_S = 0.1, 1.0
METHODS = {"/health": "GET", "/v1/info": "GET", "/v1/head": "GET", "/v1/score": "POST"}


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


class TeacherServer(ThreadingTCPServer):
    """A server on one address. The constructor binds the address; `start` begins to accept
    connections."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 128
    service: ScoringService

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None,
        limits: Limits,
        log: Callable[[str], None],
        log_requests: bool = False,
    ):
        """
        Args:
            port: 0 for any free one.
            token: the secret that clients must send; required if other hosts can connect.
            log: receives a line with counts each minute in which there were requests.
            log_requests: also log a line for each request.

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
        self._logged, self._log_at = self.counts.copy(), 0.0
        self._change, self._line = threading.Condition(), deque[object]()
        self._in_hand, self._draining, self._started = 0, False, False
        self._bodies = Counter[str]()
        """Address -> bytes of its requests in memory."""
        self._open: dict[socket.socket, str] = {}
        """Open connection -> its address, the oldest first."""
        self._asking: dict[socket.socket, str] = {}
        """The open connections whose request is still incomplete."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except (OSError, OverflowError) as error:
            self.server_close()
            raise UserError(f"--host {host} --port {port}: {error}") from error

    @property
    def address(self) -> str:
        """`host:port`."""
        host, port = self.server_address[:2]
        name = str(host)
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    @property
    def info(self) -> Info:
        return self.service.info

    def start(self, service: ScoringService) -> None:
        self.service, self._began, self._started = service, time.monotonic(), True
        self._log_at = self._began + LOG_EVERY_S
        self.server_activate()
        threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True).start()

    def drain(self, seconds: float) -> bool:
        """Accepts no more requests, and waits for the current ones for at most `seconds`. Returns
        whether all were answered."""
        with self._change:
            self._draining = True
            self._change.notify_all()
            return self._change.wait_for(lambda: self._in_hand == 0, seconds)

    def close(self) -> None:
        self._draining = True
        if self._started:
            self.shutdown()
        self.server_close()

    # Called by the handlers of requests.

    def health(self, known: bool) -> JsonObject:
        """
        Args:
            known: whether the client sent the token; without it the answer is the status only.
        """
        status = {"status": "draining" if self._draining else "ok"}
        if not known:
            return status
        with self._change:
            return {
                **status,
                "model": self.info.model,
                **self.counts,
                "in_hand": self._in_hand,
                "waiting": len(self._line),
                "seconds_up": round(time.monotonic() - self._began, 1),
            }

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits in the queue; inside the block the request is one of at most `limits.threads`
        current ones. Requests are admitted in order of arrival."""
        me = object()

        def is_next() -> bool:
            return self._line[0] is me and self._in_hand < self.limits.threads

        with self._change:
            self._line.append(me)
            try:
                self._change.wait_for(lambda: self._draining or is_next(), self.limits.wait_s)
                if self._draining:
                    raise Refused(503, "this teacher is being stopped")
                if not is_next():
                    raise Refused(503, f"busy: {self._in_hand} requests in hand")
                self._in_hand += 1
            finally:
                self._line.remove(me)
                self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self._in_hand -= 1
                self._change.notify_all()

    def hold(self, address: str, n: int) -> None:
        """Adds n (which may be negative) to the bytes of requests in memory. Raises `Refused` over
        the limit."""
        unit = self.info.max_request_bytes
        with self._change:
            held, theirs = self._bodies.total(), self._bodies[address] + n
            if n > 0 and (held + n > MOST_BODIES * unit or theirs > BODIES_OF_ONE * unit):
                raise Refused(503, f"busy: {held:,} bytes of requests in memory")
            self._bodies[address] = theirs
            self._bodies += Counter()  # removes the addresses with 0 bytes

    def answered(self, client: str, question: str, status: int, seconds: float) -> None:
        """Counts a finished request. Its headers are never logged."""
        with self._change:
            self.counts["served" if status < 400 else "refused" if status < 500 else "failed"] += 1
        if self._log_requests:
            self.log(f"{client} {question} {status} {seconds:.2f} s")

    def asked(self, connection: socket.socket) -> None:
        """Marks the connection's request as complete: it will no longer be closed to accept
        others."""
        with self._change:
            self._asking.pop(connection, None)

    # Called by `serve_forever`.

    def service_actions(self) -> None:
        if time.monotonic() < self._log_at:
            return
        with self._change:
            now, before = self.counts.copy(), self._logged
        if now != before:
            counts = ", ".join(f"{n - before[kind]} {kind}" for kind, n in now.items())
            self.log(f"last {LOG_EVERY_S:g} s: {counts}; {self._in_hand} in hand")
        self._logged, self._log_at = now, time.monotonic() + LOG_EVERY_S

    def process_request(self, request: Any, client_address: Any) -> None:
        address = client_address[0]
        with self._change:
            room = self._make_room(address)
            if room:
                self._open[request] = self._asking[request] = address
        if room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._change:
                self._open.pop(request, None)
                self._asking.pop(request, None)

    def _make_room(self, address: str) -> bool:
        """Whether one more connection may open; may close an older, incomplete one for it."""
        theirs = list(self._open.values()).count(address) >= MOST_OF_ONE
        if not theirs and len(self._open) < MOST_CONNECTIONS:
            return True
        asking = (wire for wire, of in self._asking.items() if not theirs or of == address)
        oldest = next(asking, None)
        if oldest is None:
            return False
        del self._open[oldest], self._asking[oldest]
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its thread then reads the end of the stream
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a broken connection; the handler logs every other error


class _Wire(io.RawIOBase):
    """Reads a socket until a deadline for the whole transfer (`within`). Each read also fails if no
    byte arrives for `idle_s`."""

    def __init__(self, connection: socket.socket, idle_s: float):
        self._connection, self._idle_s, self._end = connection, idle_s, 0.0

    def within(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(min(left, self._idle_s))
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "jaxrl", ""
    server: TeacherServer

    def setup(self) -> None:
        super().setup()
        self._limits, self._address = self.server.limits, self.client_address[0]
        self._wire = _Wire(self.connection, self._limits.idle_s)
        self._wire.within(self._limits.header_s)
        self.rfile = io.BufferedReader(self._wire, 1 << 16)
        self._unread = self._held = 0
        self._begun = False

    def do_GET(self) -> None:
        began, path, status = time.monotonic(), urlsplit(self.path).path, 200
        self.close_connection = True
        try:
            self._respond(path)
        except Refused as error:
            status = error.status
            self._send_error(status, str(error))
        except TimeoutError:
            status = 408
            self._send_error(status, "the request, or the reading of its answer, took too long")
        except (Gone, ConnectionError):
            status = 499
        except Exception as error:  # no request may end the server
            status = 500
            self.server.log("".join(traceback.format_exception(error)).rstrip())
            self._send_error(status, f"{type(error).__name__}: {error}"[:600])
        finally:
            self.server.hold(self._address, -self._held)
            question, seconds = f"{self.command} {path[:100]!r}", time.monotonic() - began
            self.server.answered(self._address, question, status, seconds)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass  # the server logs counts instead

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends errors that the base class finds in a request's header in the same form as
        others."""
        self._send_error(code, message or HTTPStatus(code).phrase)
        self.server.answered(self._address, "?", code, 0.0)

    def _respond(self, path: str) -> None:
        known, service = self._knows_token(), self.server.service
        if (self.command, path) == ("GET", "/health"):
            self._send(200, [json.dumps(self.server.health(known)).encode()], JSON)
            return
        self._unread = self._length() if self.command == "POST" else 0
        if path not in METHODS:
            raise Refused(404, f"no such route {path[:100]!r}: there are {', '.join(METHODS)}")
        if not known:
            raise Refused(401, "the token is missing or wrong: Authorization: Bearer TOKEN")
        if self.command != METHODS[path]:
            raise Refused(405, f"{path} takes {METHODS[path]}, not {self.command}")
        if path == "/v1/info":
            self._send(200, [service.info.model_dump_json().encode()], JSON)
            return
        request = read_request(self._body(), service.info) if path == "/v1/score" else None
        self.server.asked(self.connection)
        with self.server.turn():
            if request is None:
                pieces = frame({HEAD: service.head()}, {})
            else:
                pieces = write_signal(service.score(request, self._wanted))
            self._send(200, pieces, SAFETENSORS)

    def _knows_token(self) -> bool:
        """Whether the client sent the token, or none is needed."""
        if self.server.token is None:
            return True
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(given, f"Bearer {self.server.token}".encode())

    def _length(self) -> int:
        given = self.headers.get("Content-Length")
        if "Transfer-Encoding" in self.headers or given is None:
            raise Refused(411, "Content-Length is needed; chunked bodies are not read")
        if not (given.isascii() and given.isdigit() and len(given) < 16):
            raise Refused(400, f"Content-Length {given[:40]!r} is no number of bytes")
        return int(given)

    def _body(self) -> bytes:
        length, most = self._unread, self.server.info.max_request_bytes
        if length > most:
            raise Refused(413, f"a body of {length:,} bytes: at most {most:,} are taken")
        self._wire.within(self._limits.body_s)
        body = bytearray()
        while self._unread and (piece := self.rfile.read1(min(self._unread, PIECE))):
            self._unread -= len(piece)
            self.server.hold(self._address, len(piece))
            self._held += len(piece)
            body += piece
        if self._unread:
            self._unread = 0
            raise Refused(400, f"the body ended after {len(body):,} of {length:,} bytes")
        return bytes(body)

    def _wanted(self) -> bool:
        """Whether the client still waits for the answer. Its request is complete, so the only thing
        left to read is the end of the stream."""
        self.connection.settimeout(0)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _send(self, status: int, pieces: Sequence[Piece], kind: str) -> None:
        self._begun = True
        self.connection.settimeout(self._limits.idle_s)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(sum(map(len, pieces))))
        self.send_header("Connection", "close")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        end = time.monotonic() + self._limits.answer_s
        for piece in pieces:
            for start in range(0, len(piece), PIECE):
                left = min(end - time.monotonic(), self._limits.idle_s)
                if left <= 0:
                    raise TimeoutError
                self.connection.settimeout(left)
                self.wfile.write(piece[start : start + PIECE])

    def _send_error(self, status: int, message: str) -> None:
        self.close_connection = True
        if self._begun:
            return  # the client would take more bytes for the rest of the answer
        body = json.dumps({"error": {"status": status, "message": message}}).encode()
        with suppress(OSError):  # the client may be gone
            self._send(status, [body], JSON)
            # Reads the rest for a moment: a connection closed with unread bytes loses its answer.
            self.connection.shutdown(socket.SHUT_WR)
            self._wire.within(LINGER_S)
            while self._unread > 0 and (piece := self.rfile.read1(min(self._unread, 1 << 16))):
                self._unread -= len(piece)
