"""Serves a teacher over HTTP on its own devices, for one run or several that share it.

A run names it as teacher.address=HOST:PORT in place of teacher.model. The secret that its clients
must know, if any, is read from the environment variable JAXRL_TEACHER_TOKEN.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, get_args

from jaxrl.config import cli
from jaxrl.config.schema import Config, DType
from jaxrl.errors import UserError
from jaxrl.process.streams import Output

if TYPE_CHECKING:
    from jaxrl.teacher.service import ScoringService

DTYPES = get_args(DType)


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse(argv)
    _check(arguments)
    from jaxrl.teacher.protocol import TOKEN, token_from_environment
    from jaxrl.teacher.server import Limits, TeacherServer

    server = TeacherServer(
        arguments.host,
        arguments.port,
        token=token_from_environment(),
        limits=Limits(threads=arguments.threads),
        log=_log,
        log_requests=arguments.log_requests,
    )
    with closing(server), closing(_service(arguments)) as service:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            server.start(service)
            guard = f"{TOKEN} is asked for" if server.token else "no token: everyone here may ask"
            _log(f"serving {service}\nat http://{server.address}; {guard}")
            while True:
                time.sleep(60)
        except KeyboardInterrupt:
            _log(f"stopping: {arguments.drain_seconds:g} s for the requests in hand")
        drained = server.drain(arguments.drain_seconds)  # a second signal ends this at once
    counts = ", ".join(f"{n} {kind}" for kind, n in server.counts.items())
    _log(f"stopped; requests: {counts}" + ("" if drained else "; some in hand were cut off"))
    return 0 if drained else cli.EXIT_INTERRUPTED


def _log(text: str) -> None:
    Output(sys.stdout).line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def _service(arguments: Namespace) -> ScoringService:
    from jaxrl.checkpoint.source import resolve_model
    from jaxrl.process.compile_cache import enable_compile_cache
    from jaxrl.run.inputs import tokenizer_of
    from jaxrl.teacher.service import MB, ScoringService, serving_mesh

    source = resolve_model(arguments.model)
    enable_compile_cache(Config.model_fields["compile_cache"].default)
    return ScoringService(
        source,
        tokenizer_of(source),
        serving_mesh(arguments.devices, arguments.fsdp, arguments.tensor),
        arguments.dtype,
        max_tokens=arguments.max_tokens,
        max_batch_tokens=arguments.max_batch_tokens,
        max_request_bytes=arguments.max_request_mb * MB,
        max_answer_bytes=arguments.max_answer_mb * MB,
    )


def _parser() -> cli.Parser:
    parser = cli.Parser("jaxrl.serve_teacher", __doc__ or "")
    add = parser.add_argument
    add("--model", required=True, help="HF folder, hub id, .gguf file, run directory, ...")
    add("--host", default="localhost", help="address to listen at (default localhost)")
    add("--port", type=int, required=True, help="0 takes a free one and prints it")
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


if __name__ == "__main__":
    cli.leave(cli.run(main))
