"""Serves a teacher over HTTP on its own devices, for one run or several that share it.

A run names it as teacher.address=HOST:PORT in place of teacher.model. The secret that its clients
must know, if any, is read from the environment variable JAXRL_TEACHER_TOKEN.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from functools import cached_property
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms.signals import Projection, completion_hidden, teacher_signal
from jaxrl.checkpoint.source import ModelSource, resolve_model
from jaxrl.config import cli
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models import decoder
from jaxrl.models.decoder import Params
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.streams import Output
from jaxrl.run.inputs import tokenizer_of
from jaxrl.sharding.mesh import ensure_devices, role_mesh, verify_arrays
from jaxrl.sharding.placement import Axes
from jaxrl.teacher.http import TOKEN, token_from_environment
from jaxrl.teacher.protocol import (
    PROTOCOL,
    SIGNALS,
    Info,
    Options,
    Refused,
    Request,
    vocab_hash,
)
from jaxrl.teacher.server import Gone, Limits, TeacherServer
from jaxrl.types import Sequences, TeacherSignal

MB = 10**6
DTYPES = ("bfloat16", "float32")
MOST_CHUNK = 4096
"""Tokens whose logits exist at once, at most, whatever a client asks for."""
POLL_S = 0.5
"""How often a request that waits for the devices looks whether its client is still there."""
HEAD_S = 600.0
"""Longest wait for the head's weights on their way to the host, behind the requests before."""
MOST_PROGRAMS = 64
"""Compiled programs kept; the one unused for longest goes first."""


class ScoringService:
    """One frozen model that answers requests in order of arrival (`teacher.server.Service`).

    Programs are compiled where a request is read; only what is ready to run stands in line for the
    devices.
    """

    def __init__(
        self,
        source: ModelSource,
        tokenizer: Any,
        mesh: Mesh,
        dtype: str,
        *,
        max_tokens: int | None = None,
        max_batch_tokens: int = 65536,
        max_request_bytes: int = 64 * MB,
        max_answer_bytes: int = 1024 * MB,
    ):
        """
        Args:
            max_tokens: longest sequence; None: the model's positions.
            max_batch_tokens: tokens (padding included) on the devices at once; a longer request is
                scored in slices.
        """
        self.model, self.mesh = source.config, mesh
        self.params = source.load(mesh, jnp.dtype(dtype), "stacked")
        verify_arrays("teacher", self.params, mesh)
        self._max_batch_tokens = max_batch_tokens
        self._rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        self._programs: dict[Any, Future[Any]] = {}
        self._lock = threading.Lock()
        self._devices = ThreadPoolExecutor(1, thread_name_prefix="teacher-devices")
        facts = {
            "protocol": PROTOCOL,
            "model": source.name,
            "family": self.model.family,
            "n_params": self.model.n_params,
            "d_model": self.model.d_model,
            "vocab_size": self.model.vocab_size,
            "vocab_hash": vocab_hash(tokenizer),
            "tokenizer_eos": tokenizer.eos_token_id,
            "model_eos": self.model.eos_ids,
            "chat_template": tokenizer.chat_template or None,
            "dtype": dtype,
            "max_tokens": self.model.max_positions if max_tokens is None else max_tokens,
            "max_request_bytes": max_request_bytes,
            "max_answer_bytes": max_answer_bytes,
            "signals": SIGNALS,
        }
        known_by = (self.model, dtype, facts["vocab_hash"], facts["tokenizer_eos"])
        told = hashlib.sha256(repr(known_by).encode() + _sample(self.params))
        self.info = Info(**facts, fingerprint=told.hexdigest())

    def head(self) -> np.ndarray:
        return self._head

    @cached_property
    def _head(self) -> np.ndarray:
        found = self._devices.submit(lambda: np.asarray(decoder.head(self.params)))
        return found.result(timeout=HEAD_S)

    def score(self, request: Request, wanted: Callable[[], bool]) -> TeacherSignal:
        sequences, ids = request.sequences, request.ids
        b, t = sequences.tokens.shape
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        most = max(self._max_batch_tokens // t // shards, 1) * shards
        slices = -(-b // most)
        bounds = [b * i // slices for i in range(slices + 1)]
        work = []
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
            size = row_bucket(stop - start, shards, most)
            part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], (sequences, ids))
            padded = jax.tree.map(lambda x, size=size: _padded(x, size), part)
            program = self._program(request.options, padded, wanted)
            work.append((program, padded, stop - start))
        parts = waited(self._devices.submit(self._run, work, wanted), wanted)
        return jax.tree.map(lambda *xs: xs[0] if len(xs) == 1 else np.concatenate(xs), *parts)

    def close(self) -> None:
        """Nothing more is computed but what runs."""
        self._devices.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: list[Any], wanted: Callable[[], bool]) -> list[TeacherSignal]:
        """On the thread of the devices."""
        done = []
        for program, inputs, n in work:
            if not wanted():
                raise Gone
            signal = program(self.params, *jax.device_put(inputs, self._rows))
            done.append(jax.tree.map(lambda x, n=n: np.asarray(x)[:n], signal))
        return done

    def _program(self, options: Options, inputs: Any, wanted: Callable[[], bool]) -> Any:
        """Compiled for these shapes; two that need the same one at once compile it once."""
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), inputs)
        key = (options, str(shapes))
        with self._lock:
            found = self._programs.pop(key, None)
            mine = found is None
            compiled: Future[Any] = Future() if found is None else found
            self._programs[key] = compiled
            while len(self._programs) > MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
        if mine:
            try:
                compiled.set_result(self._compile(options, inputs))
            except BaseException as error:
                compiled.set_exception(error)
                with self._lock:
                    self._programs.pop(key, None)
        return waited(compiled, wanted)

    def _compile(self, options: Options, inputs: Any) -> Any:
        try:
            distill = options.distill(MOST_CHUNK)
        except ValueError as error:
            raise Refused(400, f"options: {error}") from error
        projection = Projection(distill, self.mesh, options.vocab_size)

        def signal(params: Params, sequences: Sequences, ids: Any) -> TeacherSignal:
            hidden = completion_hidden(self.model, params, sequences, self.mesh)
            return teacher_signal(projection, hidden, decoder.head(params), sequences, ids)

        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._rows), inputs
        )
        jitted = jax.jit(signal, out_shardings=self._rows)
        return jitted.lower(self.params, *abstract).compile()


def waited(future: Future[Any], wanted: Callable[[], bool]) -> Any:
    """The value of a future, for as long as somebody wants it; else raises Gone."""
    while not future.done():
        wait([future], timeout=POLL_S)
        if not future.done() and not wanted():
            future.cancel()  # where it has not begun
            raise Gone
    return future.result(timeout=0)


def row_bucket(n: int, multiple: int, most: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, ... times `multiple` that holds n rows, or `most`."""
    size, units = 1, -(-n // multiple)
    while size < units:
        size = size * 3 // 2 if size > 1 and size & (size - 1) == 0 else -(-size * 4 // 3)
    return min(size * multiple, most)


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    """Rows of zeros added: no token of theirs is real."""
    return np.pad(x, [(0, rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _sample(params: Params) -> bytes:
    """Some of the weights: two models of one shape differ in them."""
    norms = [params["layers"][name]["scale"] for name in ("attn_norm", "mlp_norm")]
    some = [*norms, params["norm"]["scale"], decoder.head(params)[:16]]
    return b"".join(np.asarray(x).tobytes() for x in some)


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse(argv)
    _check(arguments)
    tell = _teller()
    server = TeacherServer(
        arguments.host,
        arguments.port,
        token=token_from_environment(),
        limits=Limits(threads=arguments.threads),
        tell=tell,
        tell_requests=arguments.log_requests,
    )
    try:
        service = _service(arguments)
        with _signals() as asked, closing(service):
            server.start(service)
            tell(_told(arguments, server, service))
            asked.wait()
            tell(f"stopping: {arguments.drain_seconds:g} s for the requests in hand")
            drained = server.drain(arguments.drain_seconds)
    finally:
        server.close()
    counts = ", ".join(f"{n} {kind}" for kind, n in vars(server.counts).items())
    tell(f"stopped; requests: {counts}" + ("" if drained else "; some in hand were cut off"))
    return 0 if drained else cli.EXIT_INTERRUPTED


def _service(arguments: Namespace) -> ScoringService:
    source = resolve_model(arguments.model)
    positions = source.config.max_positions
    if arguments.max_tokens is not None and arguments.max_tokens > positions:
        raise UserError(f"--max-tokens {arguments.max_tokens}: the model has {positions} positions")
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        raise UserError(
            f"--model {arguments.model} has no tokenizer, so that no run can compare its tokens:"
            " put tokenizer.json and tokenizer_config.json into its folder"
        )
    enable_compile_cache(Config.model_fields["compile_cache"].default)
    return ScoringService(
        source,
        tokenizer,
        _mesh(arguments),
        arguments.dtype,
        max_tokens=arguments.max_tokens,
        max_batch_tokens=arguments.max_batch_tokens,
        max_request_bytes=arguments.max_request_mb * MB,
        max_answer_bytes=arguments.max_answer_mb * MB,
    )


def _mesh(arguments: Namespace) -> Mesh:
    visible = ensure_devices(arguments.devices or 1)
    everything = 1 if visible.emulated else len(visible.devices)
    n, tensor = arguments.devices or everything, arguments.tensor
    fsdp = arguments.fsdp or max(n // tensor, 1)
    if n % (fsdp * tensor):
        raise UserError(f"{n} devices are not a multiple of --fsdp {fsdp} x --tensor {tensor}")
    return role_mesh(visible.devices[:n], Axes(n // (fsdp * tensor), fsdp, tensor))


def _told(arguments: Namespace, server: TeacherServer, service: ScoringService) -> str:
    devices = service.mesh.devices.flat
    axes = ", ".join(f"{name} {n}" for name, n in service.mesh.shape.items() if n > 1)
    where = f"{len(devices)} {devices[0].platform} device(s)" + (f" ({axes})" if axes else "")
    guard = f"{TOKEN} is asked for" if server.token else "no token: everyone on this host may ask"
    return (
        f"serving {arguments.model} ({service.info.n_params:,} parameters, {arguments.dtype}) on"
        f" {where}\nat http://{server.address}, sequences of at most {service.info.max_tokens}"
        f" tokens; {guard}"
    )


def _parser() -> cli.Parser:
    parser = cli.Parser("jaxrl.serve_teacher", __doc__ or "")
    add = parser.add_argument
    add("--model", required=True, help="HF folder, .gguf file, run directory, builtin:teacher, ...")
    add("--host", default="localhost", help="address to listen at (default localhost)")
    add("--port", type=int, required=True, help="0 takes a free one and tells it")
    add("--devices", type=int, help="devices to use (default: all; 1 where there is none but CPU)")
    add("--fsdp", type=int, help="shards of weights and sequences (default: devices / tensor)")
    add("--tensor", type=int, default=1, help="shards of each layer (default 1)")
    add("--dtype", choices=DTYPES, default=DTYPES[0])
    add("--max-tokens", type=int, help="longest sequence (default: the model's positions)")
    add(
        "--max-batch-tokens",
        type=int,
        default=65536,
        help="tokens on the devices at once; longer requests are cut (default 65536)",
    )
    add("--max-request-mb", type=int, default=64, help="largest request (default 64)")
    add("--max-answer-mb", type=int, default=1024, help="largest answer (default 1024)")
    add("--threads", type=int, default=8, help="requests in hand at once (default 8)")
    add("--drain-seconds", type=float, default=60.0, help="to finish them at the end (default 60)")
    add("--log-requests", action="store_true", help="a line for each request")
    return parser


def _check(arguments: Namespace) -> None:
    for name in (
        *("devices", "fsdp", "tensor", "max_tokens", "max_batch_tokens"),
        *("max_request_mb", "max_answer_mb", "threads"),
    ):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if not 0 <= arguments.port <= 65535:
        raise UserError(f"--port {arguments.port} must be 0 to 65535")
    if not 0 <= arguments.drain_seconds < threading.TIMEOUT_MAX:
        raise UserError(f"--drain-seconds {arguments.drain_seconds} must be 0 or more")


def _teller() -> Callable[[str], None]:
    def tell(text: str) -> None:
        Output(sys.stdout).line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    return tell


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; a second one ends the process at once."""
    asked = threading.Event()

    def heard(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    cli.leave(cli.run(main))
