"""The HTTP side of a teacher that serves several runs; what computes stands behind `Service`.

A request is read, checked and only then put in line for the devices, so that a bad or a slow one
delays nobody. Every read and write has a deadline, every body a limit, and every connection one
request. Where one client has too many connections, or all have, the oldest one whose request is not
whole makes room for a new one.
"""

from __future__ import annotations

import hmac
import io
import json
import socket
import socketserver
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from jaxrl.errors import UserError
from jaxrl.teacher.protocol import (
    HEAD,
    Info,
    Piece,
    Refused,
    Request,
    frame,
    read_request,
    write_signal,
)
from jaxrl.types import TeacherSignal

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_CONNECTIONS, MOST_OF_ONE = 256, 64
"""Open at once, in all and of one address; one more is closed unanswered where all have asked."""
MOST_BODIES, BODIES_OF_ONE = 8, 4
"""Bytes of requests in memory, in all and of one address, in units of the largest request."""
PIECE = 1 << 20
"""Bytes between two looks at the clock."""
TELL_EVERY_S = 60.0
POLL_S, LINGER_S = 0.1, 1.0
JSON, SAFETENSORS = "application/json", "application/octet-stream"
METHODS = {"/health": "GET", "/v1/info": "GET", "/v1/head": "GET", "/v1/score": "POST"}


class Gone(Exception):
    """The client no longer waits for its answer."""


class Service(Protocol):
    """What answers."""

    @property
    def info(self) -> Info: ...

    def head(self) -> np.ndarray:
        """[V, D]."""
        ...

    def score(self, request: Request, wanted: Callable[[], bool]) -> TeacherSignal:
        """Numpy arrays. Raises `Gone` where the answer is no longer wanted when its turn comes."""
        ...


@dataclass(frozen=True)
class Limits:
    """What one client may take of the server."""

    threads: int = 8
    """Requests in hand at once: computed or being answered; others wait in line."""
    header_s: float = 10.0
    """From a connection to the end of its header."""
    idle_s: float = 10.0
    """Longest wait for the next bytes of a request, or for the next piece of an answer to go."""
    body_s: float = 120.0
    """For a whole request to arrive."""
    answer_s: float = 120.0
    """For a whole answer to be taken."""
    wait_s: float = 60.0
    """In line; then status 503, and the client comes again."""


@dataclass
class Counts:
    """Requests so far, by what came of them."""

    served: int = 0
    refused: int = 0
    failed: int = 0


class TeacherServer:
    """One address. It is taken when this is made; connections are accepted from `start` on."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None,
        limits: Limits,
        tell: Callable[[str], None],
        tell_requests: bool = False,
    ):
        """
        Args:
            port: 0 for any free one.
            token: what clients must know; needed where others than this host can connect.
            tell: gets a line a minute with counts, where there is something to count.
            tell_requests: a line for each request too.

        Raises:
            UserError: an address that cannot be had, or one that needs a token.
        """
        if host not in LOOPBACK and not token:
            raise UserError(
                f"--host {host} lets other hosts connect: set JAXRL_TEACHER_TOKEN to a secret that"
                " the runs know too, or leave --host at localhost"
            )
        self.limits, self.token, self.counts = limits, token, Counts()
        self.service: Service | None = None
        self._tell, self._tell_requests = tell, tell_requests
        self._change, self._line = threading.Condition(), deque[object]()
        self._bodies = Counter[str]()
        """Bytes of requests that each address has in memory."""
        self._in_hand, self._draining, self._closed = 0, False, threading.Event()
        self._began = time.monotonic()
        try:
            self._http = _Http(self, host, port)
        except (OSError, OverflowError) as error:
            raise UserError(f"--host {host} --port {port}: {error}") from error

    @property
    def address(self) -> str:
        """`host:port`."""
        host, port = self._http.server_address[:2]
        name = str(host)
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    def start(self, service: Service) -> None:
        self.service, self._began = service, time.monotonic()
        self._http.server_activate()
        for run, *arguments in ((self._http.serve_forever, POLL_S), (self._tell_counts,)):
            threading.Thread(target=run, args=arguments, daemon=True).start()

    def drain(self, seconds: float) -> bool:
        """Takes no more requests, and waits for those in hand; whether all were answered."""
        with self._change:
            self._draining = True
            self._change.notify_all()
            return self._change.wait_for(lambda: self._in_hand == 0, seconds)

    def close(self) -> None:
        self._draining = True
        self._closed.set()
        if self.service is not None:
            self._http.shutdown()
        self._http.server_close()

    def health(self) -> dict[str, Any]:
        with self._change:
            in_hand, waiting = self._in_hand, len(self._line)
        return {
            "status": self.status,
            "model": self.info.model,
            "served": self.counts.served,
            "refused": self.counts.refused,
            "failed": self.counts.failed,
            "in_hand": in_hand,
            "waiting": waiting,
            "seconds_up": round(time.monotonic() - self._began, 1),
        }

    @property
    def status(self) -> str:
        return "draining" if self._draining else "ok"

    @property
    def info(self) -> Info:
        assert self.service is not None
        return self.service.info

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, a request is in hand; at most `limits.threads` are, in order of arrival."""
        me = object()
        with self._change:
            self._line.append(me)
            try:
                self._change.wait_for(lambda: self._draining or self._next(me), self.limits.wait_s)
                if self._draining:
                    raise Refused(503, "this teacher is being stopped")
                if not self._next(me):
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

    @contextmanager
    def body(self, address: str) -> Iterator[Callable[[int], None]]:
        """Gives what counts each piece of a request; all of it is free again at the end."""
        assert self.info.max_request_bytes is not None
        unit, held = self.info.max_request_bytes, 0

        def take(n: int) -> None:
            nonlocal held
            with self._change:
                everyone, theirs = self._bodies.total() + n, self._bodies[address] + n
                if everyone > MOST_BODIES * unit or theirs > BODIES_OF_ONE * unit:
                    raise Refused(503, f"busy: {everyone - n:,} bytes of requests in memory")
                self._bodies[address] = theirs
                held += n

        try:
            yield take
        finally:
            with self._change:
                self._bodies[address] -= held
                self._bodies += Counter()  # forgets the addresses that have none

    def _next(self, me: object) -> bool:
        return self._line[0] is me and self._in_hand < self.limits.threads

    def answered(self, client: str, question: str, status: int, seconds: float) -> None:
        """Counts a request; none of its headers is ever told."""
        with self._change:
            kind = "served" if status < 400 else "refused" if status < 500 else "failed"
            setattr(self.counts, kind, getattr(self.counts, kind) + 1)
        if self._tell_requests:
            self._tell(f"{client} {question} {status} {seconds:.2f} s")

    def failed(self, error: BaseException) -> None:
        self._tell("".join(traceback.format_exception(error)).rstrip())

    def _tell_counts(self) -> None:
        before = Counts()
        while not self._closed.wait(TELL_EVERY_S):
            now = Counts(**vars(self.counts))
            if now != before:
                told = (
                    f"{getattr(now, kind) - getattr(before, kind)} {kind}" for kind in vars(now)
                )
                self._tell(f"last {TELL_EVERY_S:g} s: {', '.join(told)}; {self._in_hand} in hand")
            before = now


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, teacher: TeacherServer, host: str, port: int):
        self.teacher = teacher
        self._lock = threading.Lock()
        self._open: dict[Any, str] = {}
        """Address of each open connection, the oldest first."""
        self._asking: dict[Any, str] = {}
        """Of those, the ones whose request has not arrived as a whole."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for the host's name.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._has_room(client_address[0]):
            with self._lock:
                self._open[request] = self._asking[request] = client_address[0]
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
                self._asking.pop(request, None)

    def asked(self, request: Any) -> None:
        """The connection's request is whole: it no longer makes room for others."""
        with self._lock:
            self._asking.pop(request, None)

    def _has_room(self, address: str) -> bool:
        """Whether one more connection can be had, perhaps at the cost of an older one."""
        with self._lock:
            theirs = list(self._open.values()).count(address) >= MOST_OF_ONE
            if not theirs and len(self._open) < MOST_CONNECTIONS:
                return True
            asking = (wire for wire, of in self._asking.items() if not theirs or of == address)
            oldest = next(asking, None)
            if oldest is None:
                return False
            del self._open[oldest], self._asking[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
            return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a connection that broke; whatever fails inside is told by the handler


class _Wire(io.RawIOBase):
    """A socket to read from until a deadline, however few bytes come at a time, and as long as
    some do."""

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
    server: _Http

    def setup(self) -> None:
        super().setup()
        self.teacher = self.server.teacher
        self._wire = _Wire(self.connection, self.teacher.limits.idle_s)
        self._wire.within(self.teacher.limits.header_s)
        self.rfile = io.BufferedReader(self._wire, 1 << 16)
        self._unread, self._begun = 0, False

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass  # counts are told instead

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class finds wrong with a request's first lines, as all other errors."""
        self._send_error(code, message or HTTPStatus(code).phrase)
        self.teacher.answered(self.client_address[0], "?", code, 0.0)

    def _answer(self) -> None:
        began, path, status = time.monotonic(), urlsplit(self.path).path, 200
        self.close_connection = True
        try:
            if path == "/health" and self.command == "GET":
                self._send(200, [json.dumps(self._health()).encode()], JSON)
            else:
                self._check(path)
                self._respond(path)
        except Refused as error:
            status = error.status
            self._send_error(status, str(error))
        except TimeoutError:
            status = 408
            self._send_error(status, "the request, or the reading of its answer, took too long")
        except (Gone, ConnectionError):
            status = 499
        except Exception as error:  # the server outlives whatever a request does to it
            status = 500
            self.teacher.failed(error)
            self._send_error(status, f"{type(error).__name__}: {error}"[:600])
        finally:
            question = f"{self.command} {path[:100]!r}"
            seconds = time.monotonic() - began
            self.teacher.answered(self.client_address[0], question, status, seconds)

    def _health(self) -> dict[str, Any]:
        return self.teacher.health() if self._known() else {"status": self.teacher.status}

    def _respond(self, path: str) -> None:
        service = self.teacher.service
        assert service is not None
        if path == "/v1/info":
            self._send(200, [service.info.model_dump_json().encode()], JSON)
            return
        with self.teacher.body(self.client_address[0]) as take:
            request = self._request(service.info, take) if path == "/v1/score" else None
            self.server.asked(self.connection)
            with self.teacher.turn():
                if request is None:
                    pieces = frame({HEAD: service.head()}, {})
                else:
                    pieces = write_signal(service.score(request, self._wanted))
                self._send(200, pieces, SAFETENSORS)

    def _known(self) -> bool:
        """Whether the client knows the token, or none is needed."""
        token = self.teacher.token
        if token is None:
            return True
        told = self.headers.get("Authorization", "")
        return hmac.compare_digest(told.encode("latin-1", "replace"), f"Bearer {token}".encode())

    def _check(self, path: str) -> None:
        self._unread = self._length() if self.command == "POST" else 0
        if path not in METHODS:
            raise Refused(404, f"no such route {path[:100]!r}: there are {', '.join(METHODS)}")
        if not self._known():
            raise Refused(401, "the token is missing or wrong: Authorization: Bearer TOKEN")
        if self.command != METHODS[path]:
            raise Refused(405, f"{path} takes {METHODS[path]}, not {self.command}")

    def _length(self) -> int:
        told = self.headers.get("Content-Length")
        if "Transfer-Encoding" in self.headers or told is None:
            raise Refused(411, "Content-Length is needed; chunked bodies are not read")
        if not (told.isascii() and told.isdigit() and len(told) < 16):
            raise Refused(400, f"Content-Length {told[:40]!r} is no number of bytes")
        return int(told)

    def _request(self, info: Info, take: Callable[[int], None]) -> Request:
        length, body = self._unread, bytearray()
        assert info.max_request_bytes is not None
        if length > info.max_request_bytes:
            raise Refused(
                413, f"a body of {length:,} bytes: at most {info.max_request_bytes:,} are taken"
            )
        self._wire.within(self.teacher.limits.body_s)
        while self._unread and (piece := self.rfile.read1(min(self._unread, PIECE))):
            self._unread -= len(piece)
            take(len(piece))
            body += piece
        if self._unread:
            self._unread = 0
            raise Refused(400, f"the body ended after {len(body):,} of {length:,} bytes")
        return read_request(bytes(body), info)

    def _wanted(self) -> bool:
        """Whether the client still waits: it has sent all, so what can be read is the end."""
        self.connection.settimeout(0)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _send(self, status: int, pieces: Sequence[Piece], kind: str) -> None:
        self._begun = True
        self.connection.settimeout(self.teacher.limits.idle_s)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(sum(map(len, pieces))))
        self.send_header("Connection", "close")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        end = time.monotonic() + self.teacher.limits.answer_s
        for piece in pieces:
            for start in range(0, len(piece), PIECE):
                left = min(end - time.monotonic(), self.teacher.limits.idle_s)
                if left <= 0:
                    raise TimeoutError
                self.connection.settimeout(left)
                self.wfile.write(piece[start : start + PIECE])

    def _send_error(self, status: int, message: str) -> None:
        self.close_connection = True
        if self._begun:
            return  # more bytes would be taken for the rest of the answer that was begun
        body = json.dumps({"error": {"status": status, "message": message}}).encode()
        try:
            self._send(status, [body], JSON)
            self._linger()
        except OSError:
            pass  # nobody is there to be told

    def _linger(self) -> None:
        """Reads on for a moment: closed with bytes unread, a connection loses its answer."""
        self.connection.shutdown(socket.SHUT_WR)
        self._wire.within(LINGER_S)
        while self._unread > 0 and (piece := self.rfile.read1(min(self._unread, 1 << 16))):
            self._unread -= len(piece)
