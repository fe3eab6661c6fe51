"""Serves teachers over HTTP on their own devices, for one run or several that share them.

A run names the only teacher as teacher.address=HOST:PORT, one of several as HOST:PORT/NAME.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, Field, ValidationError

from jaxrl.config import cli, paths, yaml_text
from jaxrl.config.roles import read_family
from jaxrl.config.schema import Config
from jaxrl.config.section import DType, Flag, Name, Number, Positive, Section, check_user_names
from jaxrl.errors import UserError, near, user_path
from jaxrl.process.streams import Output
from jaxrl.teacher.key_rules import Rule

FILES = ("certificate", "private_key", "token_file")


class ServeOptions(Section):
    """The options of the command line, and keys of the file that `--config` names."""

    model: Name | None = None
    """the only teacher: HF folder, hub id, .gguf file, run directory, ..."""
    teacher: Annotated[dict[str, Name], AfterValidator(check_user_names)] = {}
    """one of several teachers, at HOST:PORT/NAME; give the option once for each"""
    family: Annotated[Name, AfterValidator(read_family)] | None = None
    """FILE.py:NAME: a model family of your own (the folder of a run keeps its own)"""
    host: Name = "localhost"
    """address to listen at"""
    port: Annotated[int, Field(strict=True, ge=0, le=65535)]
    """0 takes a free one and prints it"""
    certificate: Name | None = None
    """PEM file of a certificate (chain), for TLS"""
    private_key: Name | None = None
    """PEM file of its key (default: the same file)"""
    token_file: Name | None = None
    """file of the secret (default: $JAXRL_TEACHER_TOKEN)"""
    devices: Positive | None = None
    """devices to use (default: all; 1 where there is none but CPU)"""
    fsdp: Positive | None = None
    """shards of weights and sequences (default: devices / tensor)"""
    tensor: Positive = 1
    """shards of each layer"""
    offload: Flag = False
    """teachers are in host memory until their turn"""
    dtype: DType = get_args(DType)[0]
    """of weights, activations and hidden states: float32 or bfloat16"""
    max_tokens: Positive | None = None
    """longest sequence (default: the model's positions)"""
    max_batch_tokens: Positive = 65536
    """tokens on the devices at once; longer requests are cut"""
    max_request_mb: Positive = 64
    """largest request"""
    max_answer_mb: Positive = 1024
    """largest answer"""
    threads: Positive = 8
    """requests in hand at once"""
    drain_seconds: Annotated[Number, Field(ge=0, lt=threading.TIMEOUT_MAX)] = 60.0
    """to finish them at the end"""
    log_requests: Flag = False
    """a line for each request"""

    def _rules(self) -> Iterator[Rule]:
        both = (self.model is None) == (not self.teacher)
        yield both, "give --model MODEL, or --teacher NAME=MODEL once for each teacher"
        alone = self.private_key is not None and self.certificate is None
        yield alone, "--private-key belongs to a certificate: give --certificate too"


def main(argv: Sequence[str]) -> int:
    """Serves until it is told to stop."""
    options = read_options(argv)
    try:
        from jaxrl.process.http_server import LOOPBACK, Limits, server_tls
        from jaxrl.teacher.server import MB, ScoringService, TeacherServer
    except ImportError as error:
        install = f"a server needs the package {error.name}: pip install 'jaxrl[serve]'"
        raise UserError(install) from error
    from jaxrl.checkpoint.model_source import resolve_model
    from jaxrl.models.kernels import try_kernels
    from jaxrl.process.compile_cache import enable_compile_cache
    from jaxrl.sharding.axes import Axes
    from jaxrl.sharding.mesh import ensure_devices, role_mesh
    from jaxrl.teacher.protocol import find_token

    certificate = options.certificate
    with ExitStack() as stack:
        server = TeacherServer(  # keeps its address while the models are read
            options.host,
            options.port,
            token=find_token(options.token_file),
            limits=Limits(threads=options.threads, body_bytes=8 * options.max_request_mb * MB),
            log=_log,
            log_requests=options.log_requests,
            tls=None if certificate is None else server_tls(certificate, options.private_key),
        )
        stack.enter_context(closing(server))
        if certificate is None and options.host not in LOOPBACK:
            _log("no --certificate: the token and all answers can be read on their way")
        models = options.teacher if options.model is None else {"": options.model}
        sources = {name: resolve_model(model).with_weights() for name, model in models.items()}
        enable_compile_cache(Config.model_fields["compile_cache"].default)
        visible, tensor = ensure_devices(options.devices or 1), options.tensor
        n = options.devices or (1 if visible.emulated else len(visible.devices))
        fsdp = options.fsdp or max(n // tensor, 1)
        if n % (fsdp * tensor):
            raise UserError(f"{n} devices are not a multiple of --fsdp {fsdp} x --tensor {tensor}")
        axes = Axes(n // (fsdp * tensor), fsdp, tensor)
        mesh = role_mesh(visible.devices[:n], axes)
        turns, services = ThreadPoolExecutor(1, thread_name_prefix="teacher-devices"), {}
        stack.callback(turns.shutdown, wait=False, cancel_futures=True)
        for name, source in sources.items():
            uses = [(dim, options.dtype, False) for dim in source.config.head_dims]
            for note in try_kernels(mesh.devices.flat, uses):
                _log(note)
            services[name] = ScoringService(
                source,
                source.tokenizer(),
                mesh,
                options.dtype,
                max_tokens=options.max_tokens,
                max_batch_tokens=options.max_batch_tokens,
                max_request_bytes=options.max_request_mb * MB,
                max_answer_bytes=options.max_answer_mb * MB,
                turns=turns,
                offload=options.offload,
            )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            server.start(services)
            for name, service in services.items():
                info = service.info
                _log(
                    f"serving {info.model} ({info.n_params:,} parameters, {info.dtype}) on"
                    f" {mesh.devices.flat[0].platform}, {axes}, sequences of at most"
                    f" {info.max_tokens} tokens\nat {server.url}{'/' * bool(name)}{name}"
                )
            _log("the token is asked for" if server.token else "no token: everyone here may ask")
            while True:
                time.sleep(60)
        except KeyboardInterrupt:
            _log(f"stopping: {options.drain_seconds:g} s for the current requests")
        drained = server.drain(options.drain_seconds)  # a second signal ends this at once
    counts = ", ".join(f"{n} {kind}" for kind, n in server.counts.items())
    _log(f"stopped; requests: {counts}" + ("" if drained else "; some in hand were cut off"))
    return 0 if drained else cli.EXIT_INTERRUPTED


def _log(text: str) -> None:
    Output(sys.stdout).line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def read_options(argv: Sequence[str]) -> ServeOptions:
    """Reads the command line, whose options come before those of the file that `--config` names:
    `--teacher` before the file's of that name, `--model` before all models of the file.

    Raises:
        UserError: naming the option or the key; never a value of the file, which may be a secret.
    """
    parser = cli.Parser("jaxrl.serve_teacher", __doc__ or "")
    parser.usage = f"{parser.prog} [OPTION ...]"
    parser.add_argument("--config", metavar="FILE", help="YAML file: `port: 8790`, ...")
    for name, field in ServeOptions.model_fields.items():
        default = field.default if isinstance(field.default, int | float | str) else None
        kind: dict[str, Any] = {"metavar": name.rpartition("_")[2].upper()}
        if isinstance(default, bool):
            default, kind = None, {"action": "store_true"}
        elif name == "teacher":
            kind = {"metavar": "NAME=MODEL", "action": "append"}
        text = (field.description or "") + (f" (default {default})" if default is not None else "")
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, help=text, **kind)
    words = {name: value for name, value in vars(parser.parse(argv)).items() if value is not None}
    path, file = words.pop("config", None), dict[str, Any]()
    if path is not None:  # relative paths are looked for beside the file first
        place = user_path(path)
        file = {key.replace("-", "_"): x for key, x in yaml_text.read_mapping(place).items()}
        for key in file.keys() - ServeOptions.model_fields:
            raise UserError(f"{place}: unknown key {key}{near(key, ServeOptions.model_fields)}")
        folder = place.absolute().parent
        file = {key: value for key, value in file.items() if value is not None}
        file = paths.beside(file, folder, ("model", "teacher", "family"))
        for key in FILES:
            if isinstance(value := file.get(key), str):
                beside, alone = folder / Path(value).expanduser(), Path(value).expanduser()
                file[key] = str(beside if beside.exists() else alone)
        if not isinstance(file.get("teacher", {}), dict):
            raise UserError(f"{place}: teacher must be `NAME: MODEL` lines")
    if "model" in words:
        file.pop("teacher", None)
    if "teacher" in words:
        file.pop("model", None)
        models: dict[str, str] = {}
        for word in words["teacher"]:
            name, _, model = word.partition("=")
            if not model or name in models:
                raise UserError(f"--teacher {word}: write NAME=MODEL, each NAME once")
            models[name] = model
        file["teacher"] = file.get("teacher", {}) | models
    for name, value in words.items():
        if name in FILES:
            file[name] = str(user_path(value))
        elif name != "teacher":
            file[name] = yaml_text.parse_value(value) if isinstance(value, str) else value
    try:
        return ServeOptions.model_validate(file)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where, message = [str(part) for part in first["loc"]], first["msg"]
        message = message.removeprefix("Value error, ")
        if first["type"] == "missing":
            raise UserError("give --port PORT; 0 takes a free one") from None
        if where and where[0] in file.keys() - words:
            message = f"{path}: {'.'.join(where)}: {message}"
        elif where:
            option = where[0].replace("_", "-"), str(words.get(where[0], ""))
            message = f"--{' '.join(filter(None, option))}: {message}"
        raise UserError(message) from None


if __name__ == "__main__":
    cli.exit_process(cli.run(main))
