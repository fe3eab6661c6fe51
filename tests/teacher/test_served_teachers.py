"""Several served teachers teach as those of a run do: one port, TLS, servers that lie or die."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cases import and_slow
from runs import CONSTANT, SHORT, save_model
from safetensors.numpy import load_file
from tiny_models import Memory, make_mesh, tiny_config, tiny_model, tiny_tensors

from jaxrl import replay, serve_teacher
from jaxrl.algorithms.signals import Projection
from jaxrl.checkpoint.model_source import ModelSource, resolve_model
from jaxrl.config.cli import run
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.errors import RunError, UserError
from jaxrl.process.http_server import Limits, server_tls
from jaxrl.sharding.reshard import to_host
from jaxrl.teacher.local_teacher import RoutedTeachers, Scorer
from jaxrl.teacher.protocol import TOKEN, present
from jaxrl.teacher.remote import (
    RemoteTeachers,
    TeacherClient,
    TeacherError,
    check_together,
    remote_info,
)
from jaxrl.teacher.server import ScoringService, TeacherServer
from jaxrl.train import train
from jaxrl.types import Completion, Prompt, Rollout, SampledSignal, TeacherSignal

NAMES = ("math", "code", "chat")
FAMILY = "qwen2"
"""Of all of them, so that their programs are equal; each has weights of its own."""
VOCAB = 30
WEIGHTS = {"math": 0.5, "chat": 1.5}


class Words:
    """As much of a tokenizer as a handshake needs."""

    eos_token_id, chat_template = 2, None

    def get_vocab(self) -> dict[str, int]:
        return {f"w{i}": i for i in range(VOCAB)}


@pytest.fixture(scope="module")
def services() -> dict[str, ScoringService]:
    """They take turns on one device, and wait for them in the host's memory."""
    mesh, turns = make_mesh(1, 1, 1), ThreadPoolExecutor(1)

    def service(name: str) -> ScoringService:
        tensors = Memory(tiny_tensors(FAMILY, NAMES.index(name)))
        source = ModelSource(name, Path(name), tiny_config(FAMILY), tensors, None)
        return ScoringService(source, Words(), mesh, "float32", turns=turns, offload=True)

    return {name: service(name) for name in NAMES}


@contextmanager
def serving(services: Any, **options: Any) -> Iterator[TeacherServer]:
    given = {"token": None, "limits": Limits(), "log": lambda line: None} | options
    with closing(TeacherServer("localhost", given.pop("port", 0), **given)) as server:
        server.start(services)
        yield server


@pytest.fixture(scope="module")
def server(services: dict[str, ScoringService]) -> Iterator[TeacherServer]:
    with serving(services) as server:
        yield server


def config(teachers: dict[str, Any], signal: str, *overrides: str) -> Config:
    asked = [f"teachers={json.dumps(teachers)}", "teacher.model=null", f"distill.signal={signal}"]
    more = ["distill.top_k=3", "distill.entropy_top_k=3", "distill.chunk_tokens=7"]
    more += ["distill.jsd_beta=1"] if signal == "sampled" else []
    return Config.load("builtin:quickstart", [*asked, *more, "deadlines.score=20", *overrides])


def served(server: TeacherServer, names: Sequence[str] = NAMES) -> dict[str, Any]:
    return {name: {"address": f"{server.url}/{name}"} for name in names}


def batch(columns: Sequence[Any]) -> Rollout:
    """Two completions for each value of the column `kind`; the last rows are padding."""
    draw = np.random.default_rng(0)
    prompts, completions = [], []
    for number, kind in enumerate(columns):
        tokens = tuple(int(t) for t in draw.integers(1, VOCAB, 2 + number))
        prompts.append(Prompt(number, tokens, f"p{number}", columns={"kind": kind}))
        drawn = [tuple(int(t) for t in draw.integers(1, VOCAB, n)) for n in draw.integers(1, 7, 2)]
        completions.append(
            [Completion(t, np.zeros(len(t)), np.zeros(len(t)), "stop") for t in drawn]
        )
    limits = {"pad_id": 0, "max_prompt_tokens": 16, "max_new_tokens": 8, "row_multiple": 4}
    rollout = make_rollout(prompts, completions, policy_version=0, **limits)
    shape = (*rollout.sequences.loss_mask.shape, 3)
    ids = np.argsort(draw.random((*shape[:2], VOCAB)), -1)[..., :3].astype(np.int32)
    return replace(rollout, student_topk=ids)


def local(made: Config) -> RoutedTeachers:
    mesh = make_mesh(1, 1, 1)
    projection = Projection.from_config(made, mesh, VOCAB)
    each = (
        made.distill
        if made.mixture is None
        else made.distill.model_copy(update={"signal": "hidden"})
    )
    models = {name: tiny_model(FAMILY, mesh, seed=i) for i, name in enumerate(NAMES)}
    role = RoutedTeachers(made, projection, max(model.d_model for model, _ in models.values()))
    for name, model in models.items():
        role.add(name, Scorer(*model, Projection(each, mesh, VOCAB)))
    return role


def joined(teacher: Any, rollout: Rollout, parts: int) -> dict[str, np.ndarray]:
    found = filter(None, [teacher.score(rollout, part, parts) for part in range(parts)])
    given = [{k: to_host(x) for k, x in vars(part).items() if x is not None} for part in found]
    return {name: np.concatenate([part[name] for part in given]) for name in given[0]}


ROUTED, MIXED = (
    ("math", "chat", "math", "code", "chat"),
    ("code", WEIGHTS, WEIGHTS, "math", {"chat": 2}),
)


@pytest.mark.parametrize(
    ("signal", "columns", "parts", "more"),
    and_slow(
        [
            ("hidden", ROUTED, 2, ["distill.entropy_aware=true"]),
            ("topk", ROUTED, 1, ["distill.entropy_aware=true", "distill.distill_temperature=2"]),
            ("hidden", MIXED, 1, ["distill.mixture=geometric"]),
            ("sampled", MIXED, 1, ["distill.mixture=arithmetic"]),
        ],
        [("student_topk", MIXED, 1, ["distill.mixture=arithmetic"])],  # of given ids, as sampled
    ),
)
def test_served_teachers_say_what_those_of_a_run_say(
    signal: str, columns: Any, parts: int, more: list[str], server: TeacherServer
) -> None:
    rollout, more = batch(columns), ["data.teacher_key=kind", *more]
    remote = config(served(server), signal, *more)
    infos = {name: remote_info(remote, name) for name in NAMES}
    check_together(remote, infos)
    found = joined(RemoteTeachers(remote, VOCAB, infos), rollout, parts)
    here = config({name: {"model": "builtin:teacher"} for name in NAMES}, signal, *more)
    wanted = joined(local(here), rollout, parts)
    seen = rollout.sequences.loss_mask
    assert found.keys() == wanted.keys()
    for field, value in wanted.items():
        assert found[field].dtype == value.dtype and found[field].shape == value.shape
        np.testing.assert_allclose(found[field][seen], value[seen], atol=1e-5, err_msg=field)


def test_a_part_of_padding_alone_has_a_signal(server: TeacherServer) -> None:
    made = config(served(server), "hidden", "data.teacher_key=kind")
    teachers = RemoteTeachers(made, VOCAB, {})
    parts = [teachers.score(batch(ROUTED), part, 6) for part in range(6)]
    assert [part.hidden.shape for part in parts] == [parts[0].hidden.shape] * 6  # type: ignore[union-attr]
    assert not parts[-1].hidden.any()  # type: ignore[union-attr]


def test_teachers_wait_for_their_turn_on_the_host(
    server: TeacherServer, services: dict[str, ScoringService]
) -> None:
    made = config(served(server), "topk", "data.teacher_key=kind")
    teachers = RemoteTeachers(made, VOCAB, {})
    for name in ("math", "code"):
        assert teachers.score(batch([name])) is not None
        for other, service in services.items():
            kinds = {x.sharding.memory_kind for x in jax.tree.leaves(service.params)}
            assert kinds == {"device" if other == name else "pinned_host"}, (name, other)


# One port.


def get(server: TeacherServer, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.address, timeout=10)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_a_server_of_several_says_whom_it_has(server: TeacherServer) -> None:
    assert get(server, "/v1/models")[1]["data"][1] == {
        "id": "code", "object": "model", "root": "code", "max_model_len": 256,
    }  # fmt: skip
    assert get(server, "/health")[1]["teachers"] == {name: name for name in NAMES}
    for path in ("/v1/info", "/physics/v1/info"):
        status, told = get(server, path)
        assert status == 404
        assert "math, code, chat: name one, as in /math/v1/info" in told["error"]["message"]
    assert get(server, "/code/v1/info")[1]["model"] == "code"
    made = config({"a": {"address": server.address}}, "topk")
    with pytest.raises(UserError, match="teachers.a.address=127.*teacher a at .*404.*math, code"):
        remote_info(made, "a")


def test_one_teacher_has_no_name(services: dict[str, ScoringService]) -> None:
    with serving({"": services["math"]}) as server:
        status, told = get(server, "/math/v1/info")
        assert status == 404 and "without a name" in told["error"]["message"]
        assert get(server, "/v1/models")[1]["data"][0]["id"] == "math"


class Lying:
    """A service that says what it likes."""

    def __init__(self, service: ScoringService, signal: TeacherSignal):
        self.info, self.turns, self._signal = service.info, service.turns, signal

    def ready(self, request: Any) -> Any:
        return lambda wanted: present(self._signal)


@pytest.mark.parametrize(
    ("lie", "word"),
    [
        (np.full((2, 8), 0.5, np.float32), "token_logprobs is 0.5 at .*: a log-prob is a finite"),
        (np.zeros((3, 8), np.float32), r"float32 \[3, 8\]"),
        (np.zeros((900, 600), np.float32), "longer than the 16,4.. bytes that were asked for"),
    ],
)
def test_the_one_that_lies_is_named(
    services: dict[str, ScoringService], lie: np.ndarray, word: str
) -> None:
    lying = Lying(services["code"], SampledSignal(token_logprobs=lie))
    with serving(services | {"code": lying}) as server:
        made = config(served(server), "sampled", "data.teacher_key=kind")
        teachers = RemoteTeachers(made, VOCAB, {})
        assert teachers.score(batch(["math", "chat"])) is not None
        with pytest.raises(TeacherError, match=f"teacher code at {server.url}/code: .*{word}"):
            teachers.score(batch(["code"]))


def test_another_teacher_at_the_address_is_refused(services: dict[str, ScoringService]) -> None:
    with serving(services) as server:
        made = config(served(server), "topk", "data.teacher_key=kind")
        infos = {name: remote_info(made, name) for name in NAMES}
        port = int(server.address.rpartition(":")[2])
    swapped = services | {"code": services["chat"]}
    with serving(swapped, port=port) as server:
        teachers = RemoteTeachers(made, VOCAB, infos)
        assert teachers.score(batch(["chat"])) is not None
        with pytest.raises(TeacherError, match="teacher code at .*409.*another teacher.*'chat'"):
            teachers.score(batch(["code"]))


def test_hidden_states_of_several_dtypes_do_not_mix(server: TeacherServer) -> None:
    made = config(served(server), "hidden", "data.teacher_key=kind")
    infos = {name: remote_info(made, name) for name in NAMES}
    other = infos["math"].model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(UserError, match="math bfloat16, code float32.*--dtype"):
        check_together(made, infos | {"math": other})
    check_together(config(served(server), "topk", "data.teacher_key=kind"), infos | {"math": other})


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        (["distill.signal=topk"], "arithmetic mixture of served teachers.*signal=hidden"),
        (["distill.signal=sampled", "distill.mixture=geometric"], "geometric mixture of served"),
        (
            ["distill.signal=student_topk", "distill.entropy_aware=true"],
            "entropy_aware=true: the arithmetic mixture",
        ),
        ([{"b": {"model": "x"}}], "partly served .a.*all of them an address"),
        (["teacher.prompt={prompt}!"], "read the student's prompts"),
        ([{"b": {"weight": 1}}], "set model, or address"),
        ([{"b": {"address": "h:1", "model": "x"}}], "two teachers"),
        ([{"b": {"address": "nowhere"}}], "no server's address"),
    ],
)
def test_teachers_that_cannot_be_served_so_are_refused(keys: list[Any], word: str) -> None:
    two = {name: {"address": f"h:1/{name}"} for name in "ab"}
    two |= keys.pop() if isinstance(keys[-1], dict) else {}
    keys = ["distill.jsd_beta=1", *keys]
    with pytest.raises(UserError, match=word) as error:
        Config.load(
            "builtin:quickstart", [f"teachers={json.dumps(two)}", "teacher.model=null", *keys]
        )
    assert len(str(error.value).splitlines()) <= 2


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of localhost, signed by itself; and its key."""
    return signed(tmp_path_factory.mktemp("tls"), "localhost", "DNS:localhost,IP:127.0.0.1")


def signed(folder: Path, name: str, names: str) -> tuple[str, str]:
    pem, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", key, "-out", pem, "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", f"subjectAltName={names}"]
    subprocess.run(command, check=True, capture_output=True)
    return pem, key


def test_tls_is_verified_and_carries_the_token(
    services: dict[str, ScoringService],
    certificate: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tls, names = server_tls(*certificate), ("math", "code")
    monkeypatch.setenv(TOKEN, "secret-3")
    with serving(services, tls=tls, token="secret-3", limits=Limits(body_s=0.5)) as server:
        trusted = config(
            served(server), "topk", "data.teacher_key=kind", f"teacher.ca_file={certificate[0]}"
        )
        assert server.url.startswith("https://")
        teachers = RemoteTeachers(trusted, VOCAB, {n: remote_info(trusted, n) for n in NAMES})
        assert teachers.score(batch(names)) is not None
        host, port = server.address.split(":")
        half = b"POST /math/v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\nhalf"
        context = ssl.create_default_context(cafile=certificate[0])
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host) as wire,
        ):
            wire.sendall(half.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer secret-3\r\n\r\n"))
            assert b"408" in wire.makefile("rb").read()  # the rest never came
        began = time.monotonic()
        with pytest.raises(UserError, match="math at https.*not trusted: self.signed.*ca_file"):
            remote_info(config(served(server), "hidden"), "math")
        monkeypatch.setattr("jaxrl.teacher.remote.MEET_S", 1.0)
        unsafe = {"math": {"address": f"{server.address}/math"}}
        with pytest.raises(UserError, match="if it speaks TLS, write https://"):
            remote_info(config(unsafe, "hidden"), "math")
        monkeypatch.setenv(TOKEN, "wrong")
        with pytest.raises(UserError, match=f"status 401: the token is missing.*set {TOKEN}"):
            remote_info(trusted, "math")
        assert time.monotonic() - began < 8
        with pytest.raises(UserError, match="teacher.ca_file=.*nowhere.pem.*No such file"):
            remote_info(config(served(server), "hidden", "teacher.ca_file=/nowhere.pem"), "math")


def test_a_certificate_of_another_host_is_refused_with_what_to_write(
    services: dict[str, ScoringService], tmp_path: Path
) -> None:
    pem, key = signed(tmp_path, "elsewhere", "DNS:elsewhere")
    with serving(services, tls=server_tls(pem, key)) as server:
        for host, why in (("127.0.0.1", "IP address mismatch"), ("localhost", "Hostname mismatch")):
            address = server.url.replace("127.0.0.1", host)
            asked = config({"a": {"address": address}}, "hidden", f"teacher.ca_file={pem}")
            words = f"not trusted: {why}.*; write the address with a host that the certificate"
            with pytest.raises(UserError, match=words):
                remote_info(asked, "a")


@pytest.mark.parametrize(
    ("addresses", "word"),
    [
        (
            ["https://h:1/a", "h:1/b"],
            r"ca_file=x.pem .*teachers.b.address=h:1/b: the address has no TLS",
        ),
        (
            ["http://h:1/a", "https://h:1/b"],
            r"teachers.a.address=http://h:1/a: the address has no TLS",
        ),
        ([], "no teacher is served: set teacher.address"),
    ],
)
def test_trusted_certificates_are_for_https_alone(addresses: list[str], word: str) -> None:
    teachers = {name: {"address": one} for name, one in zip("ab", addresses, strict=False)}
    words = [f"teachers={json.dumps(teachers)}", "teacher.model=null"] if teachers else []
    with pytest.raises(UserError, match=word):
        Config.load("builtin:quickstart", [*words, "teacher.ca_file=x.pem"])
    alone = ["teacher.model=null", "teacher.ca_file=x.pem", "teacher.address="]
    with pytest.raises(UserError, match="teacher.address=h:1: the address has no TLS"):
        Config.load("builtin:quickstart", [*alone[:2], alone[2] + "h:1"])
    assert Config.load("builtin:quickstart", [*alone[:2], alone[2] + "https://h:1"]).served


def test_https_to_a_server_without_tls_is_refused_at_once(server: TeacherServer) -> None:
    address = f"https://{server.address}/math"
    with pytest.raises(UserError, match="math at https://.*speaks no TLS: write http://"):
        remote_info(config({"math": {"address": address}}, "hidden"), "math")


# A run.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    names = ("math", "code")
    rows = [{"prompt": f"{i} + {i}", "kind": names[i % 2], "answer": "1"} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"student": (32, 1, 0), "math": (48, 1, 1), "code": (32, 1, 2)}
    cap = {"math": {"softcap": 3.0}}
    saved = {name: save_model(folder / name, *x, **cap.get(name, {})) for name, x in sizes.items()}
    return saved | {"rows": str(folder / "rows.jsonl")}


def trained(models: dict[str, str], run_dir: Path, teachers: Any, *overrides: str) -> Any:
    keys = [f"student.model={models['student']}", f"data.train={models['rows']}", "data.eval=null"]
    keys += ["mesh=actor=1,rollout=1" + ",teacher=1" * ("model" in str(teachers)), *SHORT]
    keys += ["rollout.launch_tokens=8", *CONSTANT]
    keys += ["actor.dtype=float32", "rollout.dtype=float32", "data.teacher_key=kind"]
    keys += ["teacher.model=null", f"teachers={json.dumps(teachers)}", f"run_dir={run_dir}"]
    return train(
        Config.load("builtin:quickstart", [*keys, "teacher.num_microbatches=2", *overrides])
    )


@pytest.fixture(scope="module")
def both(models: dict[str, str]) -> dict[str, ScoringService]:
    mesh, turns = make_mesh(1, 1, 1), ThreadPoolExecutor(1)
    sources = {name: resolve_model(models[name]) for name in ("math", "code")}
    return {
        name: ScoringService(source, source.tokenizer(), mesh, "float32", turns=turns)
        for name, source in sources.items()
    }


@pytest.fixture(scope="module")
def there(
    models: dict[str, str],
    both: dict[str, ScoringService],
    certificate: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Any]:
    """A run whose teachers are on one port, over TLS, with a token."""
    folder = tmp_path_factory.mktemp("served") / "there"
    with pytest.MonkeyPatch.context() as patch, server_of(both, certificate, patch) as server:
        return folder, trained(models, folder, served(server, [*both]), *over_tls(certificate))


@contextmanager
def server_of(
    services: Any, certificate: tuple[str, str], patch: pytest.MonkeyPatch
) -> Iterator[TeacherServer]:
    patch.setenv(TOKEN, "secret-4")
    with serving(services, tls=server_tls(*certificate), token="secret-4") as server:
        yield server


def over_tls(certificate: tuple[str, str]) -> list[str]:
    return [f"teacher.ca_file={certificate[0]}", "teacher.service_threads=2"]


def test_a_run_with_two_teachers_on_one_port_goes_on_with_the_same_alone(
    there: tuple[Path, Any],
    models: dict[str, str],
    both: dict[str, ScoringService],
    certificate: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, found = there
    for row in found.metrics[1:]:
        assert row["distill/math/divergence"] > 0 and row["distill/code/tokens"] > 0
    swapped = both | {"code": both["math"]}
    with server_of(swapped, certificate, monkeypatch) as server:
        word = "what teachers.code.address names has changed"  # math, elsewhere, is still itself
        with pytest.raises(UserError, match=word):
            again = served(server, [*both])
            trained(models, folder, again, "steps=3", *over_tls(certificate))


@pytest.mark.parametrize("at", and_slow([3], [0]))
def test_a_replay_names_the_teacher_that_answers_otherwise(
    models: dict[str, str],
    both: dict[str, ScoringService],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
) -> None:
    """And the step: each batch is asked about in two parts."""
    run, real, asked = tmp_path / "run", TeacherClient.score, []

    def other(client: TeacherClient, *given: Any) -> TeacherSignal:
        answer = real(client, *given)
        if client.endpoint.name == "code":
            asked.append(given)
            if len(asked) == at + 1:
                return jax.tree.map(lambda x: x + x.dtype.type(0.01), answer)
        return answer

    with serving(both) as server:
        trained(models, run, served(server, [*both]))
        assert replay(run).same
        monkeypatch.setattr(TeacherClient, "score", other)
        found = replay(run)
        assert found.differs_at == 1 + at // 2 and "answer of teacher code" in found.differences
        assert f"not repeatable: teacher code at step {1 + at // 2}," in str(found)
        assert "teacher math" not in str(found) and len(asked) == 2 * found.last == 4


@pytest.mark.slow
def test_a_run_with_two_teachers_on_one_port_is_that_with_its_own(
    there: tuple[Path, Any], models: dict[str, str], tmp_path: Path
) -> None:
    """To rounding, since a row is computed beside others. In the default suite the signals are
    compared, of which all else is the same."""
    folder, found = there
    wanted = trained(models, tmp_path, {name: {"model": models[name]} for name in ("math", "code")})
    names = ["loss", "distill/math/divergence", "distill/code/tokens"]
    for mine, other in zip(found.metrics, wanted.metrics, strict=True):
        for name in names if "loss" in other else []:
            assert mine[name] == pytest.approx(other[name], rel=1e-6), name
    ends = [load_file(place / "final" / "model.safetensors") for place in (tmp_path, folder)]
    for name, value in ends[0].items():
        np.testing.assert_allclose(ends[1][name], value, atol=2e-5, err_msg=name)


def test_a_teacher_that_dies_ends_the_run_by_its_name(
    models: dict[str, str],
    both: dict[str, ScoringService],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving({"math": both["math"]}) as stays, serving({"code": both["code"]}) as dies:
        asked, compile_request = [], both["code"].compile

        def once(*given: Any) -> Any:
            asked.append(given)
            if len(asked) > 2:
                threading.Thread(target=dies.close).start()
                time.sleep(1)
            return compile_request(*given)

        monkeypatch.setattr(both["code"], "compile", once)
        there = served(stays, ["math"]) | served(dies, ["code"])
        with pytest.raises(RunError, match=f"teacher code at {dies.url}/code: POST "):
            trained(models, tmp_path / "run", there, "steps=4", "deadlines.score=8")
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(asked) > 2 and any("distill/code/tokens" in row for row in rows)


# The command.


TEACHERS = ["--teacher", "a=builtin:teacher"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*TEACHERS, "--model", "builtin:teacher", "--port", "0"], "--model MODEL, or --teacher"),
        (
            [*TEACHERS, "--teacher", "a=builtin:student", "--port", "0"],
            "write NAME=MODEL, each NAME once",
        ),
        (["--teacher", "builtin:teacher", "--port", "0"], "write NAME=MODEL"),
        (["--teacher", "a/b=builtin:teacher", "--port", "0"], "the name 'a/b' may have letters"),
        (TEACHERS, "give --port PORT"),
        ([*TEACHERS, "--port", "0", "--private-key", "k"], "give --certificate too"),
        ([*TEACHERS, "--port", "0", "--certificate", "{pem}"], "--certificate"),
        (
            [*TEACHERS, "--port", "0", "--certificate", "/no.pem"],
            "--certificate /no.pem: no certificate with its private key: ",
        ),
        ([*TEACHERS, "--port", "0", "--token-file", "/no.txt"], "--token-file /no.txt: "),
        ([*TEACHERS, "--port", "0", "--token-file", "{empty}"], "it is empty"),
        ([*TEACHERS, "--port", "0", "--token-file", "{blank}"], "no blank"),
        (["--config", "{config}"], "config: unknown key prot (did you mean port?)"),
    ],
)
def test_bad_options_exit_with_2(
    words: list[str],
    told: str,
    tmp_path: Path,
    certificate: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    files = {"empty": "\n", "blank": "two words", "config": "prot: 1\nteacher: {a: b}\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    places = {name: tmp_path / name for name in files} | {"pem": certificate[0]}
    words = [word.format(**places) for word in words]
    assert run(serve_teacher.main, words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("token: hunter2", "unknown key token (did you mean token_file?)"),
        ("token_file: {a: hunter2}", "token_file: Input should be a valid string"),
        ("config: hunter2", "unknown key config"),
        ("port: hunter2", "port: Input should be a valid integer"),
        ("port: true", "port: Input should be a valid integer"),
        ("offload: hunter2", "offload: Input should be a valid boolean"),
        ("dtype: hunter2", "dtype: Input should be 'float32' or 'bfloat16'"),
        ("model: [hunter2]", "model: Input should be a valid string"),
        ("teacher: [hunter2]", "teacher must be `NAME: MODEL` lines"),
        ("teacher: hunter2", "teacher must be `NAME: MODEL` lines"),
        ("teacher: {math: }", "teacher.math: Input should be a valid string"),
        ("teacher: {a=b: hunter2}", "teacher: the name 'a=b' may have letters"),
    ],
)
def test_a_file_of_options_is_checked_and_its_values_are_not_shown(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    needed = "" if text.startswith("port") else "port: 0\n"
    needed += "" if text.startswith(("model", "teacher")) else "model: builtin:teacher\n"
    file.write_text(f"{needed}{text}\n")
    assert run(serve_teacher.main, ["--config", str(file), "--max-tokens", "7"]) == 2
    said = capsys.readouterr().err
    assert f"{file}: {told}" in said and "hunter2" not in said


def test_the_command_line_comes_before_the_file_and_paths_are_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "there", tmp_path / "here"
    for place in (folder / "models" / "b", folder / "models" / "m", here):
        place.mkdir(parents=True)
    for name in ("secret", "cert.pem"):
        (folder / name).write_text("")
    several, one = folder / "several.yaml", folder / "one.yaml"
    several.write_text(
        "teacher: {a: models/a, b: models/b}\nport: 1\nthreads: 3\ntoken-file: secret\n"
        "certificate: cert.pem\nprivate_key: key.pem\noffload: false\nmax_tokens: null\n"
    )
    one.write_text("model: models/m\nport: 1\n")
    monkeypatch.chdir(here)

    def parse(file: Path, *words: str) -> Any:
        return serve_teacher.read_options([*words, "--config", str(file)])

    found = parse(several, "--port", "2", "--teacher", "a=other")
    assert found.teacher == {"a": "other", "b": f"{folder}/models/b"}
    assert (found.port, found.threads, found.offload, found.max_tokens) == (2, 3, False, None)
    assert found.token_file == f"{folder}/secret" and found.certificate == f"{folder}/cert.pem"
    assert found.private_key == "key.pem"  # is in neither folder
    assert parse(one).model == f"{folder}/models/m"
    assert (parse(one, "--model", "x").model, parse(one, "--teacher", "a=x").model) == ("x", None)
    assert (alone := parse(several, "--model", "x")).model == "x" and alone.teacher == {}


def test_a_package_that_is_missing_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("jaxrl.process.http_server", "jaxrl.teacher.server"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(serve_teacher.main, [*TEACHERS, "--port", "0"]) == 2
    assert "package uvicorn: pip install 'jaxrl[serve]'" in capsys.readouterr().err


def test_the_command_serves_what_its_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret-5\n")
    (tmp_path / "serve.yaml").write_text(
        "port: 0\nteacher: {math: builtin:teacher, code: builtin:student}\ndtype: float32\n"
        f"devices: 1\ntoken_file: {tmp_path / 'token'}\noffload: true\n"
    )
    started, real = threading.Event(), TeacherServer.start
    seen: dict[str, Any] = {}

    def start(server: TeacherServer, services: Any) -> None:
        real(server, services)
        made = config(served(server, ["math", "code"]), "topk", "data.teacher_key=kind")
        monkeypatch.setenv(TOKEN, "secret-5")
        seen.update({name: remote_info(made, name) for name in services})
        started.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(TeacherServer, "start", start)
    command = ["--config", str(tmp_path / "serve.yaml"), "--host", "0.0.0.0"]
    assert run(serve_teacher.main, command) == 0
    assert started.is_set() and [info.model for info in seen.values()] == [
        "builtin:teacher",
        "builtin:student",
    ]
    said = capsys.readouterr().out
    assert "no --certificate: the token" in said and "secret-5" not in said
