"""Serves teachers over HTTP on their own devices, for one run or several that share them.

A run names the only teacher as teacher.address=HOST:PORT, one of several as HOST:PORT/NAME.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from argparse import Action, Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from jaxrl.config import cli, yaml_text
from jaxrl.config import paths as config_paths
from jaxrl.config.schema import Config
from jaxrl.config.section import NAMED, DType
from jaxrl.errors import UserError, near, user_path
from jaxrl.process.json_types import JsonObject
from jaxrl.process.streams import Output

if TYPE_CHECKING:
    from jaxrl.teacher.server import TeacherServer
    from jaxrl.teacher.service import ScoringService

DTYPES = get_args(DType)
FILES = {"certificate", "private_key", "token_file"}
"""Options that name files."""


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    models = _check(arguments)
    with ExitStack() as stack:
        server = stack.enter_context(closing(_server(arguments)))
        services = _services(arguments, models)
        for service in services.values():
            stack.enter_context(closing(service))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            server.start(services)
            for name, service in services.items():
                _log(f"serving {service}\nat {server.url}{'/' * bool(name)}{name}")
            _log("the token is asked for" if server.token else "no token: everyone here may ask")
            while True:
                time.sleep(60)
        except KeyboardInterrupt:
            _log(f"stopping: {arguments.drain_seconds:g} s for the requests in hand")
        drained = server.drain(arguments.drain_seconds)  # a second signal ends this at once
    counts = ", ".join(f"{n} {kind}" for kind, n in server.counts.items())
    _log(f"stopped; requests: {counts}" + ("" if drained else "; some in hand were cut off"))
    return 0 if drained else cli.EXIT_INTERRUPTED


def _server(arguments: Namespace) -> TeacherServer:
    """Bound to its address, which it keeps while the models are read."""
    try:
        from jaxrl.teacher.connection import Limits
        from jaxrl.teacher.server import LOOPBACK, TeacherServer, server_tls
    except ImportError as error:
        install = f"a server needs the package {error.name}: pip install 'jaxrl[serve]'"
        raise UserError(install) from error
    from jaxrl.teacher.protocol import find_token

    certificate = arguments.certificate
    server = TeacherServer(
        arguments.host,
        arguments.port,
        token=find_token(arguments.token_file),
        limits=Limits(threads=arguments.threads),
        log=_log,
        log_requests=arguments.log_requests,
        tls=None if certificate is None else server_tls(certificate, arguments.private_key),
    )
    if certificate is None and arguments.host not in LOOPBACK:
        _log("no --certificate: the token and all answers can be read on their way")
    return server


def _log(text: str) -> None:
    Output(sys.stdout).line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def _services(arguments: Namespace, models: Mapping[str, str]) -> dict[str, ScoringService]:
    from jaxrl.checkpoint.source import resolve_model
    from jaxrl.process.compile_cache import enable_compile_cache
    from jaxrl.run.inputs import tokenizer_of
    from jaxrl.teacher.service import MB, ScoringService, serving_mesh

    sources = {name: resolve_model(model).with_weights() for name, model in models.items()}
    enable_compile_cache(Config.model_fields["compile_cache"].default)
    mesh = serving_mesh(arguments.devices, arguments.fsdp, arguments.tensor)
    turns = ThreadPoolExecutor(1, thread_name_prefix="teacher-devices")
    return {
        name: ScoringService(
            source,
            tokenizer_of(source),
            mesh,
            arguments.dtype,
            max_tokens=arguments.max_tokens,
            max_batch_tokens=arguments.max_batch_tokens,
            max_request_bytes=arguments.max_request_mb * MB,
            max_answer_bytes=arguments.max_answer_mb * MB,
            turns=turns,
            offload=arguments.offload,
        )
        for name, source in sources.items()
    }


def _parse(argv: Sequence[str]) -> Namespace:
    """Options of the command line, which come before those of the file that `--config` names."""
    parser = _parser()
    given = parser.parse(argv)
    if given.config is None:
        return given
    known = {each.dest: each for each in parser._actions if each.dest not in ("help", "config")}
    path = user_path(given.config)
    parser.set_defaults(**_defaults(path.absolute().parent, _read(path, known), given))
    return parser.parse(argv)


def _read(path: Path, known: Mapping[str, Action]) -> JsonObject:
    """The options in a file, by their names. Errors say where, never what a value is: it may be a
    secret.

    Raises:
        UserError: the file cannot be read, or has an unknown key, or a value of another type.
    """
    found = {}
    for key, value in yaml_text.read_mapping(path).items():
        name = key.replace("-", "_")
        if name not in known:
            raise UserError(f"{path}: unknown key {key}{near(name, known)}")
        wanted = None if value is None else _wanted(known[name], value)
        if wanted is not None:
            raise UserError(f"{path}: {key} must be {wanted}")
        found[name] = value
    return found


def _wanted(option: Action, value: object) -> str | None:
    """What an option's value must be; None where this one is."""
    if option.dest == "teacher":
        given = value.items() if isinstance(value, dict) else [("", None)]
        if all(NAMED.fullmatch(name) and model and isinstance(model, str) for name, model in given):
            return None
        return "`NAME: MODEL` lines; a name has letters, digits, `_`, `.` and `-`"
    if option.nargs == 0:
        return None if isinstance(value, bool) else "true or false"
    if option.choices is not None:
        return None if value in option.choices else f"one of {', '.join(option.choices)}"
    if option.type in (int, float):
        number = isinstance(value, int if option.type is int else (int, float))
        return None if number and not isinstance(value, bool) else "a number"
    return None if isinstance(value, str) and value else "text"


def _defaults(folder: Path, options: JsonObject, given: Namespace) -> JsonObject:
    """A file's options as defaults of the command line's, without models in whose place that has
    others. What exists beside the file is meant before what is in the working directory."""
    found = {name: value for name, value in options.items() if value is not None}
    named = {each.partition("=")[0] for each in given.teacher}

    def local(model: str) -> str:
        return config_paths.beside({"student": {"model": model}}, folder)["student"]["model"]

    models = found.pop("teacher", {})
    others = {} if given.model else {name: models[name] for name in models if name not in named}
    found["teacher"] = [f"{name}={local(model)}" for name, model in others.items()]
    if "model" in found:
        found["model"] = None if named else local(found["model"])
    for name in found.keys() & FILES:
        here = Path(found[name]).expanduser()
        found[name] = str(folder / here if (folder / here).exists() else here)
    return found


def _parser() -> cli.Parser:
    parser = cli.Parser("jaxrl.serve_teacher", __doc__ or "")
    add = parser.add_argument
    add("--model", help="the only teacher: HF folder, hub id, .gguf file, run directory, ...")
    add(
        "--teacher",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="one of several teachers, at HOST:PORT/NAME; give the option once for each",
    )
    add("--config", metavar="FILE", help="YAML file: `port: 8790`, `teacher: {NAME: MODEL}`, ...")
    add("--host", default="localhost", help="address to listen at (default localhost)")
    add("--port", type=int, help="0 takes a free one and prints it")
    add("--certificate", metavar="FILE", help="PEM file of a certificate (chain), for TLS")
    add("--private-key", metavar="FILE", help="PEM file of its key (default: the same file)")
    add("--token-file", metavar="FILE", help="file of the secret (default: $JAXRL_TEACHER_TOKEN)")
    add("--devices", type=int, help="devices to use (default: all; 1 where there is none but CPU)")
    add("--fsdp", type=int, help="shards of weights and sequences (default: devices / tensor)")
    add("--tensor", type=int, default=1, help="shards of each layer (default 1)")
    add("--offload", action="store_true", help="teachers are in host memory until their turn")
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


def _check(arguments: Namespace) -> dict[str, str]:
    """The models, by the teachers' names; "" for one without. Raises UserError for bad options."""
    if (arguments.model is None) == (not arguments.teacher):
        raise UserError("give --model MODEL, or --teacher NAME=MODEL once for each teacher")
    if arguments.port is None:
        raise UserError("give --port PORT; 0 takes a free one")
    if arguments.private_key is not None and arguments.certificate is None:
        raise UserError("--private-key belongs to a certificate: give --certificate too")
    models = {} if arguments.model is None else {"": arguments.model}
    for given in arguments.teacher:
        name, equals, model = given.partition("=")
        if not (NAMED.fullmatch(name) and model):
            raise UserError(
                f"--teacher {given}: write NAME=MODEL; a name has letters, digits, `_`, `.` and `-`"
            )
        if name in models:
            raise UserError(f"--teacher {given}: {name} is {models[name]} already")
        models[name] = model
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
    return models


if __name__ == "__main__":
    cli.leave(cli.run(main))
