"""The HTTP side of a teacher that serves several runs; `service.ScoringService` computes.

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
"""Open at once, in all and of one address; one more is closed unanswered where all have asked."""
MOST_BODIES, BODIES_OF_ONE = 8, 4
"""Bytes of requests in memory, in all and of one address, in units of the largest request."""
PIECE = 1 << 20
"""Bytes between two looks at the clock."""
LOG_EVERY_S = 60.0
POLL_S, LINGER_S = 0.1, 1.0
METHODS = {"/health": "GET", "/v1/info": "GET", "/v1/head": "GET", "/v1/score": "POST"}


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


class TeacherServer(ThreadingTCPServer):
    """One address. It is taken when this is made; connections are accepted from `start` on."""

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
            token: what clients must know; needed where others than this host can connect.
            log: gets a line a minute with counts, where there is something to count.
            log_requests: a line for each request too.

        Raises:
            UserError: an address that cannot be had, or one that needs a token.
        """
        if host not in LOOPBACK and not token:
            raise UserError(
                f"--host {host} lets other hosts connect: set {TOKEN} to a secret that the"
                " runs know too, or leave --host at localhost"
            )
        self.limits, self.token, self.log, self._log_requests = limits, token, log, log_requests
        self.counts = Counter(served=0, refused=0, failed=0)
        """Requests so far, by what came of them."""
        self._logged, self._log_at = self.counts.copy(), 0.0
        self._change, self._line = threading.Condition(), deque[object]()
        self._in_hand, self._draining, self._started = 0, False, False
        self._bodies = Counter[str]()
        """Bytes of requests that each address has in memory."""
        self._open: dict[socket.socket, str] = {}
        """Address of each open connection, the oldest first."""
        self._asking: dict[socket.socket, str] = {}
        """Of those, the ones whose request has not arrived as a whole."""
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
        """Takes no more requests, and waits for those in hand; whether all were answered."""
        with self._change:
            self._draining = True
            self._change.notify_all()
            return self._change.wait_for(lambda: self._in_hand == 0, seconds)

    def close(self) -> None:
        self._draining = True
        if self._started:
            self.shutdown()
        self.server_close()

    # What the handlers of requests use.

    def health(self, known: bool) -> JsonObject:
        """
        Args:
            known: whether the client knows the token; others learn the status only.
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
        """Inside, a request is in hand; at most `limits.threads` are, in order of arrival."""
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
        """Counts n bytes more (or fewer) of requests in memory; raises `Refused` over budget."""
        unit = self.info.max_request_bytes
        with self._change:
            held, theirs = self._bodies.total(), self._bodies[address] + n
            if n > 0 and (held + n > MOST_BODIES * unit or theirs > BODIES_OF_ONE * unit):
                raise Refused(503, f"busy: {held:,} bytes of requests in memory")
            self._bodies[address] = theirs
            self._bodies += Counter()  # forgets the addresses that have none

    def answered(self, client: str, question: str, status: int, seconds: float) -> None:
        """Counts a request; none of its headers is ever logged."""
        with self._change:
            self.counts["served" if status < 400 else "refused" if status < 500 else "failed"] += 1
        if self._log_requests:
            self.log(f"{client} {question} {status} {seconds:.2f} s")

    def asked(self, connection: socket.socket) -> None:
        """The connection's request is whole: it no longer makes room for others."""
        with self._change:
            self._asking.pop(connection, None)

    # What `serve_forever` calls.

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
        """Whether one more connection can be had, perhaps at the cost of an older one."""
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
        pass  # a connection that broke; whatever fails inside is logged by the handler


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
        except Exception as error:  # the server outlives whatever a request does to it
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
        """What the base class finds wrong with a request's first lines, as all other errors."""
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
        """Whether the client knows the token, or none is needed."""
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
            return  # more bytes would be taken for the rest of the answer that was begun
        body = json.dumps({"error": {"status": status, "message": message}}).encode()
        with suppress(OSError):  # nobody may be there to read it
            self._send(status, [body], JSON)
            # Reads on for a moment: closed with bytes unread, a connection loses its answer.
            self.connection.shutdown(socket.SHUT_WR)
            self._wire.within(LINGER_S)
            while self._unread > 0 and (piece := self.rfile.read1(min(self._unread, 1 << 16))):
                self._unread -= len(piece)
