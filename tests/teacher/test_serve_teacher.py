"""A teacher over HTTP says what the scorer says, to several runs, whatever else is sent to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save
from starlette.requests import ClientDisconnect
from tiny_models import Memory, make_mesh, tiny_config, tiny_tensors
from tiny_tokenizer import tiny_tokenizer

from jaxrl import serve_teacher
from jaxrl.algorithms.signals import Projection
from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.config.cli import run
from jaxrl.config.roles import NamedTeacherConfig, TeacherConfig
from jaxrl.config.schema import Config
from jaxrl.config.settings import DistillConfig
from jaxrl.data.batch import pack_sequences
from jaxrl.errors import NotFinite, UserError
from jaxrl.models import decoder, parameters
from jaxrl.process.http_server import Limits
from jaxrl.teacher.local_teacher import Scorer
from jaxrl.teacher.protocol import (
    TOKEN,
    Info,
    Options,
    decode,
    frame,
    present,
    read_request,
    vocab_hash,
    write_request,
)
from jaxrl.teacher.remote import (
    TAIL_FLOOR,
    Endpoint,
    RemoteTeachers,
    TeacherClient,
    TeacherError,
    check_remote,
    check_remote_prompts,
    remote_head,
    remote_info,
    tail_logprob,
)
from jaxrl.teacher.server import ScoringService, TeacherServer
from jaxrl.types import (
    HiddenSignal,
    Prompt,
    Rollout,
    SampledSignal,
    Sequences,
    TeacherSignal,
    signal_of,
)

V, K = 64, 4
DISTILLS = {
    "hidden": DistillConfig(signal="hidden", entropy_aware=True, chunk_tokens=16),
    "topk": DistillConfig(signal="topk", top_k=K, distill_temperature=2.0, chunk_tokens=16),
    "student_topk": DistillConfig(signal="student_topk", top_k=K, chunk_tokens=16),
    "sampled": DistillConfig(
        signal="sampled", jsd_beta=1.0, entropy_aware=True, entropy_top_k=3, chunk_tokens=16
    ),
}
PLAIN = DistillConfig(signal="topk", top_k=K, chunk_tokens=16)
SAMPLED = DistillConfig(signal="sampled", jsd_beta=1.0, chunk_tokens=16)


class Words:
    """As much of a tokenizer as a handshake needs: token i is the word `wI`."""

    eos_token_id, chat_template = 2, None

    def __init__(self, n: int = V):
        self.n = n

    def get_vocab(self) -> dict[str, int]:
        return {f"w{i}": i for i in range(self.n)}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(f"w{i}" for i in tokens)

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"w{token}"


class Ready:
    """A service without programs."""

    turns = ThreadPoolExecutor(8)

    def ready(self, request: Any) -> Any:
        return lambda wanted: present(self.score(request, wanted))  # type: ignore[attr-defined]


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong answers are believed at once."""
    monkeypatch.setattr("jaxrl.teacher.remote.MOST_WRONG", 1)


@pytest.fixture(scope="module")
def mesh() -> Any:
    return make_mesh(1, 1, 1)


def service_on(mesh: Any) -> ScoringService:
    source = ModelSource(
        "tiny", Path("tiny"), tiny_config("llama"), Memory(tiny_tensors("llama")), None
    )
    return ScoringService(source, Words(), mesh, "float32", max_request_bytes=1 << 20)


@pytest.fixture(scope="module")
def service(mesh: Any) -> ScoringService:
    return service_on(mesh)


def scored(service: ScoringService, request: Any) -> TeacherSignal:
    return signal_of(service.turns.submit(service.compile(request), lambda: True).result(60))


@contextmanager
def serving(service: Any, token: str | None = None, **limits: Any) -> Iterator[TeacherServer]:
    told: list[str] = []
    server = TeacherServer(
        "localhost", 0, token=token, limits=Limits(**limits), log=told.append, log_requests=True
    )
    server.told = told  # type: ignore[attr-defined]
    server.start({"": service})
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(service: ScoringService) -> Iterator[TeacherServer]:
    with serving(service) as server:
        yield server


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """Six rows of 12 tokens, 7 of them in the completion; the last row is padding."""
    random = np.random.RandomState(3)
    draw = lambda n: random.randint(3, V, n).tolist()  # noqa: E731
    prompts = [draw(n) for n in (5, 2, 3, 4, 1)]
    completions = [draw(n) for n in (7, 1, 5, 6, 3)]
    sequences = pack_sequences(
        prompts, completions, prompt_width=5, completion_width=7, pad_id=0, row_multiple=2
    )
    ids = np.argsort(random.rand(6, 7, V), -1)[..., :K].astype(np.int32)
    nothing = np.zeros((6, 7), np.float32)
    return Rollout(sequences, (), (), np.zeros(6, np.int32), nothing, nothing, 0, student_topk=ids)


@pytest.fixture(scope="module")
def expected(
    service: ScoringService, mesh: Any, rollout: Rollout
) -> Callable[[DistillConfig], TeacherSignal]:
    """What the scorer of a run says."""
    told: dict[DistillConfig, Any] = {}

    def score(distill: DistillConfig) -> TeacherSignal:
        if distill not in told:
            projection = Projection(distill, mesh, V)
            signal = Scorer(service.model, service.params, projection).score(rollout)
            told[distill] = jax.tree.map(np.asarray, signal)
        return told[distill]

    return score


def config(address: str, distill: DistillConfig, deadline: float = 30.0, **teacher: Any) -> Config:
    base = Config.load(None, ["max_prompt_tokens=5", "max_new_tokens=7"])
    deadlines = base.deadlines.model_copy(update={"score": deadline})
    teacher_section = TeacherConfig(address=address, **teacher)
    changed = {"teacher": teacher_section, "distill": distill, "deadlines": deadlines}
    return base.model_copy(update=changed)


def assert_equal(
    ours: TeacherSignal | None, theirs: TeacherSignal, rows: Any = slice(None)
) -> None:
    assert ours is not None
    some = 0
    assert type(ours) is type(theirs)
    for field in fields(theirs):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        assert (mine is None) == (other is None), field.name
        if other is not None:
            np.testing.assert_array_equal(mine, other[rows], strict=True)
            some += 1
    assert some


# What a run asks for.


@pytest.mark.parametrize("signal", DISTILLS)
def test_signals_are_bit_equal_to_the_scorers(
    signal: str, server: TeacherServer, rollout: Rollout, expected: Any
) -> None:
    teacher = RemoteTeachers(config(server.address, DISTILLS[signal]), V)
    assert_equal(teacher.score(rollout), expected(DISTILLS[signal]))


def test_signals_of_two_devices_are_bit_equal_to_the_scorers(rollout: Rollout) -> None:
    service = service_on(mesh := make_mesh(1, 2, 1))
    distill = DISTILLS["hidden"]
    alone = Scorer(service.model, service.params, Projection(distill, mesh, V)).score(rollout)
    with serving(service) as server:
        found = RemoteTeachers(config(server.address, distill), V).score(rollout)
    assert_equal(found, jax.tree.map(np.asarray, alone))


def test_parts_are_even_slices_of_the_rows(
    server: TeacherServer, rollout: Rollout, expected: Any
) -> None:
    teacher = RemoteTeachers(config(server.address, PLAIN), V)
    sizes = []
    for part in range(8):
        signal = teacher.score(rollout, part, 8)
        sizes.append(0 if signal is None else len(signal.topk_ids))
    assert sum(sizes) == 6 and set(sizes) == {0, 1}
    parts = [teacher.score(rollout, part, 4) for part in range(4)]
    joined = np.concatenate([part.topk_logprobs for part in parts if part is not None])
    np.testing.assert_allclose(joined, expected(PLAIN).topk_logprobs, atol=1e-5)


def test_the_head_is_the_models(server: TeacherServer, service: ScoringService) -> None:
    head = np.asarray(parameters.head(service.params))
    asked = config(server.address, DISTILLS["hidden"])
    np.testing.assert_array_equal(remote_head(asked, V, service.info), head, strict=True)
    np.testing.assert_array_equal(remote_head(asked, 40, service.info), head[:40])
    other = service.info.model_copy(update={"fingerprint": "of the one before & its restart"})
    with pytest.raises(TeacherError, match="GET /v1/head: status 409: this is another teacher"):
        remote_head(asked, V, other)


def test_bfloat16_travels_as_it_is() -> None:
    values = np.arange(12, dtype=np.float32).astype(jnp.bfloat16).reshape(2, 3, 2)
    back, _ = decode(b"".join(frame({"hidden": values})))
    assert back["hidden"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(back["hidden"], values)


def test_a_request_over_the_limits_is_sent_in_several_and_computed_in_slices(
    service: ScoringService, rollout: Rollout, expected: Any
) -> None:
    d = service.info.d_model
    assert d is not None
    small = service.info.model_copy(update={"max_answer_bytes": 2 * 7 * d * 4})
    seen = []

    class Small(Ready):
        info, head = small, service.head

        def score(self, request: Any, wanted: Any) -> TeacherSignal:
            seen.append(len(request.sequences.tokens))
            return signal_of(service.compile(request)(wanted))

    with serving(Small()) as server:
        teacher = RemoteTeachers(config(server.address, DISTILLS["hidden"]), V)
        told = teacher.score(rollout)
    assert seen == [2, 2, 2] and told is not None
    real = rollout.sequences.loss_mask
    theirs = expected(DISTILLS["hidden"]).hidden
    np.testing.assert_allclose(told.hidden[real], theirs[real], atol=1e-5)

    sliced = object.__new__(ScoringService)
    sliced.__dict__ |= service.__dict__ | {"_max_batch_tokens": 2 * 12, "_programs": {}}
    request = read_request(
        write_request(
            Options.of(DISTILLS["hidden"], V), service.info.fingerprint, rollout.sequences, None
        ),
        service.info,
    )
    hidden = scored(sliced, request).hidden
    assert hidden.shape == (6, 7, d)
    (key,) = sliced._programs
    assert "(2, 12)" in key[1]  # three slices, one program
    np.testing.assert_array_equal(hidden, told.hidden)


def test_a_teacher_is_known_by_what_it_computes_not_by_its_limits(
    service: ScoringService, mesh: Any
) -> None:
    def fingerprint(words: Words, dtype: str, seen: float = 1.0, **limits: int) -> str:
        tensors = tiny_tensors("llama")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(seen)
        source = ModelSource("other", Path("other"), tiny_config("llama"), Memory(tensors), None)
        return ScoringService(source, words, mesh, dtype, **limits).info.fingerprint

    ours = service.info.fingerprint
    assert fingerprint(Words(), "float32", max_tokens=20, max_answer_bytes=7) == ours
    others = [
        fingerprint(Words(), "bfloat16"),
        fingerprint(Words(63), "float32"),
        fingerprint(Words(), "float32", seen=1.001),
    ]
    assert len({ours, *others}) == 4


def test_any_weight_that_differs_makes_another_teacher_and_no_mesh_does(
    service: ScoringService,
) -> None:
    def fingerprint(tensors: dict[str, np.ndarray], *axes: int) -> str:
        source = ModelSource("tiny", Path("tiny"), tiny_config("llama"), Memory(tensors), None)
        return ScoringService(source, Words(), make_mesh(*axes), "float32").info.fingerprint

    ours, tensors = service.info.fingerprint, tiny_tensors("llama")
    for axes in ((1, 1, 1), (1, 1, 2), (2, 1, 1)):
        assert fingerprint(tensors, *axes) == ours, axes
    found = {ours}
    for name, tensor in tensors.items():
        changed = tensor.copy()
        changed.flat[-1] += 1e-3
        found.add(fingerprint(tensors | {name: changed}, 1, 1, 1))
    assert len(found) == 1 + len(tensors) > 12
    name = next(name for name in tensors if "layers.1.mlp.up_proj" in name)
    swapped = tensors[name].copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert fingerprint(tensors | {name: swapped}, 1, 1, 1) not in found


def test_clients_with_other_options_are_served_side_by_side(
    server: TeacherServer, rollout: Rollout, expected: Any
) -> None:
    teachers = {name: RemoteTeachers(config(server.address, d), V) for name, d in DISTILLS.items()}
    names = [*DISTILLS] * 5
    with ThreadPoolExecutor(8) as pool:
        signals = list(pool.map(lambda name: teachers[name].score(rollout), names))
    for name, told in zip(names, signals, strict=True):
        assert_equal(told, expected(DISTILLS[name]))


def test_a_client_that_leaves_spoils_no_program_that_another_waits_for(
    service: ScoringService, rollout: Rollout, expected: Any
) -> None:
    begun, go = threading.Event(), threading.Event()
    compiled = []

    def compile_late(*inputs: Any) -> Any:
        begun.set()
        assert go.wait(10)
        compiled.append(service._compile(*inputs))
        return compiled[-1]

    fresh = object.__new__(ScoringService)
    fresh.__dict__ |= service.__dict__ | {"_programs": {}, "_compile": compile_late}
    with serving(fresh) as server, ThreadPoolExecutor(1) as pool:
        host, port = server.address.split(":")
        leaving = http.client.HTTPConnection(host, int(port))
        leaving.request("POST", "/v1/score", good(service.info, rollout))
        assert begun.wait(10)
        stays = pool.submit(RemoteTeachers(config(server.address, PLAIN), V).score, rollout)
        eventually(lambda: server.open == 2)
        leaving.close()
        go.set()
        assert_equal(stays.result(30), expected(PLAIN))
    assert len(compiled) == 1


# What may be sent besides.


def send(
    server: TeacherServer,
    method: str,
    path: str,
    body: bytes | None = None,
    token: str | None = None,
    **headers: str,
) -> tuple[int, Any]:
    host, port = server.address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    answer = response.read()
    assert response.getheader("Content-Type") == "application/json"
    return response.status, json.loads(answer)


def eventually(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """A request is counted once its answer is gone, a moment after the client has it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def good(info: Info, rollout: Rollout, **changed: Any) -> bytes:
    """A request, with some of its tensors or words replaced."""
    s = rollout.sequences
    words = {"options": Options.of(PLAIN, V).model_dump(), "fingerprint": info.fingerprint}
    words["options"] |= changed.pop("options", {})
    words |= {key: changed.pop(key) for key in ("fingerprint", "extra") if key in changed}
    tensors = {"tokens": s.tokens, "mask": s.mask, "loss_mask": s.loss_mask} | changed
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return save(present, {"request": json.dumps(words)})


LONG = np.zeros((1, 300), np.int32)
PADDED = {"tokens": LONG, "mask": np.arange(300)[None] >= 50, "loss_mask": LONG[:, :7] > 0}
"""As a device that wants rounded widths pads a sequence that the server's limit allows."""
BAD: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "missing": ({"mask": None}, 400, ("['loss_mask', 'tokens']", "mask [B, T]")),
    "rank": (
        {"tokens": np.zeros(3, np.int32)},
        400,
        ("tokens is int32 [3]", "[B, T] int32"),
    ),
    "dtype": ({"tokens": np.zeros((6, 12), np.float32)}, 400, ("float32 [6, 12]", "int32")),
    "shape": (
        {"mask": np.ones((6, 11), bool)},
        400,
        ("mask is bool [6, 11]", "[6, 12]", "[B, T]"),
    ),
    "gap": ({"mask": np.arange(12)[None] != np.full((6, 1), 2)}, 400, ("gap", "on the left only")),
    "width": ({"loss_mask": np.ones((6, 12), bool)}, 400, ("1 <= C < T",)),
    "empty": (
        {
            "tokens": np.zeros((0, 12), np.int32),
            "mask": np.zeros((0, 12), bool),
            "loss_mask": np.zeros((0, 7), bool),
        },
        400,
        ("B >= 1",),
    ),
    "unmasked": ({"mask": np.zeros((6, 12), bool)}, 400, ("loss_mask is True where",)),
    "long": (
        {"tokens": LONG, "mask": LONG == 0, "loss_mask": LONG[:, :7] == 0},
        413,
        ("300 tokens", "at most 256"),
    ),
    "token": (
        {"tokens": np.full((6, 12), V, np.int32)},
        400,
        ("tokens has the token [64]", "0 to 63"),
    ),
    "vocabulary": ({"options": {"vocab_size": V + 1}}, 400, ("vocab_size 65", "64 tokens")),
    "signal": ({"options": {"signal": "logits"}}, 400, ("options.signal", "'hidden'")),
    "top_k": ({"options": {"top_k": 100}}, 400, ("best 100 of 64",)),
    "together": (
        {"options": {"signal": "sampled", "distill_temperature": 2.0}},
        400,
        ("distill_temperature=1",),
    ),
    "extra": ({"extra": 1}, 400, ("extra",)),
    "ids": (
        {"options": {"signal": "student_topk"}, "ids": np.zeros((6, 7, 2), np.int32)},
        400,
        ("[6, 7, 2]", "[6, 7, 4]"),
    ),
    "beyond": (
        {"options": {"signal": "student_topk"}, "ids": np.full((6, 7, 4), V, np.int32)},
        400,
        ("ids has the token [64]", "0 to 63"),
    ),
    "another": ({"fingerprint": "0"}, 409, ("another teacher", "tiny")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_request_that_does_not_fit_is_told_why(
    case: str, server: TeacherServer, rollout: Rollout
) -> None:
    changed, status, words = BAD[case]
    found, told = send(
        server, "POST", "/v1/score", good(server.services[""].info, rollout, **dict(changed))
    )
    assert found == status == told["error"]["status"], told
    assert all(word in told["error"]["message"] for word in words), told


def test_padding_is_not_counted_as_length(server: TeacherServer, rollout: Rollout) -> None:
    read = read_request(
        good(server.services[""].info, rollout, **dict(PADDED)), server.services[""].info
    )
    assert read.sequences.tokens.shape == (1, 300) and server.services[""].info.max_tokens == 256


def test_other_refusals(server: TeacherServer, rollout: Rollout) -> None:
    def refused(status: int, word: str, *request: Any, **headers: str) -> None:
        found, told = send(server, *request, **headers)
        assert (found, word in told["error"]["message"]) == (status, True), told

    refused(404, "GET '/v2/score': Not Found; there are GET /health", "GET", "/v2/score")
    refused(404, "POST /v1/score", "POST", "/", b"x")
    refused(405, "GET '/v1/score': Method Not Allowed", "GET", "/v1/score")
    refused(405, "GET /v1/info", "POST", "/v1/info", b"x")
    refused(405, "POST /v1/score", "PUT", "/v1/score", b"x")
    refused(400, "no safetensors", "POST", "/v1/score", b"garbage" * 100)
    refused(400, "no safetensors", "POST", "/v1/score", b"\xff" * 8 + b"{}")
    refused(400, "no safetensors", "POST", "/v1/score", b"")
    refused(413, "1,048,576", "POST", "/v1/score", b"x" * (1 << 20) + b"x")
    refused(413, "1,048,576", "POST", "/v1/score", b"x", **{"Content-Length": str(10**12)})
    host, port = server.address.split(":")
    post = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: "
    for garbage in (b"\x16\x03\x01 what is this\r\n\r\n", post + b"-1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as wire:
            wire.sendall(garbage)
            assert b" 400 " in wire.recv(1 << 16)
    before = server.counts["refused"]
    with socket.create_connection((host, int(port)), timeout=5) as wire:
        wire.sendall(post + b"100\r\n\r\nhalf")
        wire.shutdown(socket.SHUT_WR)
        assert wire.recv(1 << 16) == b""
    eventually(lambda: server.counts["refused"] == before + 1)
    eventually(lambda: send(server, "GET", "/health")[1]["in_hand"] == 0)
    status, health = send(server, "GET", "/health")
    assert (status, health["status"]) == (200, "ok")
    assert health["refused"] >= 10 and health["model"] == "tiny"
    body = good(server.services[""].info, rollout)
    client = TeacherClient(Endpoint(server.url, None, 10))
    client.endpoint.ask("POST", "/v1/score", lambda answer: answer, body)


def test_a_token_is_asked_for_and_never_told(
    service: ScoringService, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(service, token="secret-1") as server:
        for token in (None, "wrong", "secret-", "secret-12"):
            for path in ("/v1/info", "/v1/head", "/nowhere"):
                status, told = send(server, "GET", path, token=token)
                assert status == (404 if path == "/nowhere" else 401)
                assert "secret" not in json.dumps(told)
            assert send(server, "POST", "/v1/score", b"x" * 1000, token=token)[0] == 401
            assert send(server, "GET", "/health", token=token) == (200, {"status": "ok"})
        assert send(server, "GET", "/health", token="secret-1")[1]["model"] == "tiny"
        assert not any("secret" in line for line in server.told)  # type: ignore[attr-defined]
        asked = config(server.address, PLAIN)
        monkeypatch.delenv(TOKEN, raising=False)
        with pytest.raises(UserError, match=f"status 401.*set {TOKEN}"):
            remote_info(asked)
        monkeypatch.setenv(TOKEN, "secret-1")
        assert remote_info(asked) == service.info
        assert "secret" not in repr(Endpoint(server.url, "secret-1", 1))
    monkeypatch.setenv(TOKEN, "two words")
    with pytest.raises(UserError, match="no blank"):
        remote_info(asked)


def test_what_is_open_to_other_hosts_needs_a_token() -> None:
    make = lambda token: TeacherServer(  # noqa: E731
        "0.0.0.0", 0, token=token, limits=Limits(), log=print
    )
    for token in (None, ""):
        with pytest.raises(UserError, match=f"set {TOKEN}"):
            make(token)
    make("secret").close()


# Faults.


class Failing(Ready):
    """A service that waits for `go`, or fails."""

    def __init__(self, info: Info, error: Exception | None = None):
        self.info, self.error = info, error
        self.go, self.asked = threading.Event(), threading.Semaphore(0)
        self.calls = self.computed = 0

    def head(self, wanted: Any) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def score(self, request: Any, wanted: Callable[[], bool]) -> TeacherSignal:
        self.calls += 1
        self.asked.release()
        if self.error is not None:
            raise self.error
        assert self.go.wait(10)
        if not wanted():
            raise ClientDisconnect
        self.computed += 1
        b, c = request.sequences.loss_mask.shape
        return SampledSignal(token_logprobs=np.zeros((b, c), np.float32))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("no room for 7 GB"), "MemoryError: no room for 7 GB"),
        (NotFinite("the scores are not finite: layer 0"), "the scores are not finite: layer 0"),
    ],
)
def test_a_request_that_fails_inside_is_told_and_the_server_lives(
    service: ScoringService, rollout: Rollout, error: Exception, told: str
) -> None:
    failing = Failing(service.info, error)
    with serving(failing) as server:
        teacher = RemoteTeachers(config(server.address, PLAIN), V)
        with pytest.raises(TeacherError, match=f"status 500: {told}.*3 tries"):
            teacher.score(rollout)
        assert failing.calls == 3
        eventually(lambda: send(server, "GET", "/health")[1]["failed"] == 3)
        lines = [line for line in server.told if told in line]  # type: ignore[attr-defined]
        # A traceback is of a bug.
        assert len(lines) == 3
        assert any("Traceback" in line for line in lines) == (not isinstance(error, NotFinite))


class Flaky:
    """A server's address of which the first connections go wrong, one way each."""

    def __init__(self, server: TeacherServer, ways: Sequence[str]):
        self.ways, self.count = list(ways), 0
        host, port = server.address.split(":")
        self.behind = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                wire, _ = self.listener.accept()
            except OSError:
                return
            way = self.ways[self.count] if self.count < len(self.ways) else "whole"
            self.count += 1
            with wire, socket.create_connection(self.behind) as behind:
                if way == "drop":
                    continue
                self._relay(wire, behind, way)

    def _relay(self, wire: socket.socket, behind: socket.socket, way: str) -> None:
        def upwards() -> None:
            with suppress(OSError):  # the connection is closed here
                while piece := wire.recv(1 << 16):
                    behind.sendall(re.sub(b"(?i)keep-alive", b"close", piece))

        threading.Thread(target=upwards, daemon=True).start()
        answer = b""
        while piece := behind.recv(1 << 16):
            answer += piece
        if way == "half":
            answer = answer[: len(answer) - 40]
        if way == "header":
            answer = answer[:20]
        if way == "503":
            answer = b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}"
        if way == "408":
            answer = b"HTTP/1.1 408 Stalled\r\nContent-Length: 2\r\n\r\n{}"
        if way == "garbage":
            answer = answer[:-200] + b"\x00" * 200 if b"octet" in answer else answer
            answer = answer.replace(b'"dtype"', b'"dtypo"')
        wire.sendall(answer)
        wire.shutdown(socket.SHUT_RDWR)  # closing alone waits for the thread that reads


@pytest.mark.parametrize(
    "ways", [["drop", "half", "whole", "half", "header", "garbage", "503"], ["whole", *["408"] * 4]]
)
def test_half_an_answer_is_asked_for_again(
    ways: list[str], server: TeacherServer, rollout: Rollout, expected: Any
) -> None:
    flaky = Flaky(server, ways)
    try:
        teacher = RemoteTeachers(config(flaky.address, PLAIN), V)
        assert_equal(teacher.score(rollout), expected(PLAIN))
    finally:
        flaky.listener.close()
    assert flaky.count == len(ways) + 1


def test_an_answer_for_other_rows_is_refused(server: TeacherServer, rollout: Rollout) -> None:
    class Short(Failing):
        def score(self, request: Any, wanted: Any) -> TeacherSignal:
            self.calls += 1
            return SampledSignal(token_logprobs=np.zeros((3, 7), np.float32))

    short = Short(server.services[""].info)
    with serving(short) as half:
        teacher = RemoteTeachers(config(half.address, SAMPLED), V)
        with pytest.raises(TeacherError, match=r"cannot be used.*\[3, 7\], float32 \[6, 7\] was"):
            teacher.score(rollout)


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][1, 0] = value  # a token that trains

    return change


def _replace(name: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


BENT: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "nan": ("sampled", _set("token_logprobs", np.nan), r"token_logprobs is nan at \[1, 0\]: "),
    "above 0": ("sampled", _set("token_logprobs", 7), "token_logprobs is 7 at .* at most 0"),
    "infinite": ("topk", _set("topk_logprobs", -np.inf), "topk_logprobs is -inf at .* finite"),
    "huge id": ("topk", _set("topk_ids", 10**9), "topk_ids is 1000000000 at .* 0 to 63"),
    "id below 0": ("topk", _set("topk_ids", -1), "topk_ids is -1 at .* 0 to 63"),
    "other ids": (
        "student_topk",
        _replace("topk_ids", lambda x: (x + 1) % V),
        "others than the student's",
    ),
    "more than 1": (
        "topk",
        _set("topk_logprobs", -0.1),
        "sum of topk_logprobs is [34][.].* up to 1",
    ),
    "tail": ("sampled", _set("best_tail", 0.5), "best_tail is 0.5 at"),
    "entropy": ("sampled", _set("entropy", 5), r"entropy is 5 at .* 0 to log\(64\) = 4.16"),
    "hidden nan": ("hidden", _set("hidden", np.nan), r"hidden is nan at \[1, 0, 0\]"),
    "int hidden": ("hidden", _replace("hidden", lambda x: x.astype(np.int32)), "int32 .* float32"),
    "narrow": ("hidden", _replace("hidden", lambda x: x[..., :-1]), r"hidden is .*, float32 \[6"),
    "float64": ("topk", _replace("tail_logprob", lambda x: x.astype(np.float16)), "is float16 "),
    "fewer": ("topk", _replace("topk_ids", lambda x: x[..., :-1]), r"\[6, 7, 3\].*\[6, 7, 4\]"),
    "missing": ("topk", lambda tensors: tensors.pop("tail_logprob"), "'topk_logprobs'.* asked for"),
}


@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize("case", BENT)
def test_an_answer_that_no_teacher_can_give_is_refused(
    case: str, server: TeacherServer, rollout: Rollout, expected: Any
) -> None:
    """With the tensor's name, the value and what is allowed; what no token reads is free."""
    signal, change, word = BENT[case]
    service = Failing(server.services[""].info)

    def tell(change: Callable[[dict[str, Any]], None]) -> None:
        tensors = {k: x for k, x in vars(expected(DISTILLS[signal])).items() if x is not None}
        change(tensors)
        service.score = lambda *_: SimpleNamespace(**tensors)  # type: ignore[method-assign, return-value]

    def unread(tensors: dict[str, Any]) -> None:
        for name, x in tensors.items():
            if x.dtype.kind == "f":
                tensors[name] = x.copy()
                tensors[name][~rollout.sequences.loss_mask] = np.nan

    with serving(service) as bent:
        teacher = RemoteTeachers(config(bent.address, DISTILLS[signal]), V)
        tell(unread)
        assert teacher.score(rollout) is not None
        tell(change)
        with pytest.raises(TeacherError, match=f"its answer cannot be used: .*{word}"):
            teacher.score(rollout)


@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize(
    ("value", "word"),
    [
        (lambda x: x[:, :-1], r"head is float32 \[64, .*, float32 \[64, .* was asked for"),
        (lambda x: x.astype(np.float16), "head is float16"),
        (lambda x: x * np.float32(np.nan), r"head is nan at \[0, 0\]"),
    ],
)
def test_a_head_that_is_none_is_refused(service: ScoringService, value: Any, word: str) -> None:
    bent = Failing(service.info)
    bent.head = lambda wanted: {"head": value(service.head(wanted)["head"])}  # type: ignore[method-assign]
    with serving(bent) as server, pytest.raises(TeacherError, match=word):
        remote_head(config(server.address, DISTILLS["hidden"]), V, service.info)


def test_a_dead_or_hung_server_is_told_within_the_deadline(
    service: ScoringService, rollout: Rollout
) -> None:
    ready = Failing(service.info)
    ready.go.set()
    with serving(ready) as server:
        dead = RemoteTeachers(config(server.address, SAMPLED, deadline=1.0), V)
        dead.score(rollout)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        hung = RemoteTeachers(config(address, PLAIN, deadline=1.0), V)
        for teacher, where, what in (
            (dead, server.address, "Connection refused"),
            (hung, address, "no answer in time"),
        ):
            start = time.monotonic()
            with pytest.raises(TeacherError) as caught:
                teacher.score(rollout)
            assert time.monotonic() - start < 3
            assert where in str(caught.value) and what in str(caught.value), caught.value
            assert re.search(r"(POST /v1/score|GET /v1/info).*deadline 0.9 s", str(caught.value))


def test_a_server_that_comes_back_is_found_again(
    service: ScoringService, rollout: Rollout, expected: Any
) -> None:
    with serving(service) as server:
        teacher = RemoteTeachers(config(server.address, PLAIN), V)
        teacher.score(rollout)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(teacher.score, rollout)
        time.sleep(0.3)
        port = int(server.address.split(":")[1])
        again = TeacherServer("localhost", port, token=None, limits=Limits(), log=print)
        again.start({"": service})
        try:
            assert_equal(waiting.result(20), expected(PLAIN))
        finally:
            again.close()


def test_requests_in_hand_are_finished_and_no_others_taken(
    service: ScoringService, rollout: Rollout
) -> None:
    slow = Failing(service.info)
    with serving(slow, threads=1) as server, ThreadPoolExecutor(3) as pool:
        asked = config(server.address, SAMPLED, deadline=3.0)
        first = pool.submit(RemoteTeachers(asked, V).score, rollout)
        assert slow.asked.acquire(timeout=5)
        assert not server.drain(0.05)
        status, told = send(server, "POST", "/v1/score", good(server.services[""].info, rollout))
        assert (status, "being stopped" in told["error"]["message"]) == (503, True)
        assert send(server, "GET", "/health")[1]["status"] == "draining"
        ended = pool.submit(server.drain, 5.0)
        slow.go.set()
        assert ended.result(5) and first.result(5) is not None
    assert slow.computed == 1


def test_no_more_than_threads_are_in_hand_and_the_abandoned_are_not_computed(
    service: ScoringService, rollout: Rollout
) -> None:
    slow = Failing(service.info)
    with serving(slow, threads=2, wait_s=0.2) as server, ThreadPoolExecutor(4) as pool:
        body = good(server.services[""].info, rollout)
        host, port = server.address.split(":")
        leaving = http.client.HTTPConnection(host, int(port))
        leaving.request("POST", "/v1/score", body)
        staying = RemoteTeachers(config(server.address, SAMPLED), V)
        kept = pool.submit(staying.score, rollout)
        assert slow.asked.acquire(timeout=5) and slow.asked.acquire(timeout=5)
        status, told = send(server, "POST", "/v1/score", body)
        assert (status, "2 requests in hand" in told["error"]["message"]) == (503, True)
        leaving.close()
        time.sleep(0.05)
        slow.go.set()
        assert kept.result(5) is not None
    assert (slow.calls, slow.computed) == (2, 1)


HALF = b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n" + b"x" * 99


@contextmanager
def connections(server: TeacherServer, n: int, first: bytes) -> Iterator[list[socket.socket]]:
    host, port = server.address.split(":")
    wires = [socket.create_connection((host, int(port)), timeout=10) for _ in range(n)]
    try:
        for wire in wires:
            with suppress(OSError):  # one that had to make room
                wire.sendall(first)
        yield wires
    finally:
        for wire in wires:
            wire.close()


def test_a_body_that_comes_too_slowly_is_refused(service: ScoringService) -> None:
    with serving(service, body_s=0.3) as server, connections(server, 1, HALF) as (wire,):
        assert b" 408 " in wire.recv(1 << 16)
        eventually(lambda: not server.open and not server.held)
        with connections(server, 1, HALF):  # takes no turn
            eventually(lambda: server.open == 1)
            assert send(server, "GET", "/health")[1]["in_hand"] == 0


def test_requests_in_memory_have_a_budget(service: ScoringService, rollout: Rollout) -> None:
    """Counted as they arrive, and free again once they are answered or refused."""
    most = service.info.max_request_bytes
    head = f"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: {most}\r\n\r\n".encode()
    body = good(service.info, rollout)
    with serving(service, body_bytes=2 * most) as server:
        with connections(server, 2, head + b"x" * (most - 100)):
            eventually(lambda: server.held == 2 * (most - 100), 30)
            status, told = send(server, "POST", "/v1/score", body)
            assert status == 503 and "bytes of requests in memory" in told["error"]["message"]
        eventually(lambda: not server.held, 30)
        RemoteTeachers(config(server.address, PLAIN), V).score(rollout)


def test_more_connections_than_allowed_are_told_that_it_is_busy(service: ScoringService) -> None:
    with serving(service, connections=3) as server:
        with connections(server, 2, b""):
            time.sleep(0.1)
            host, port = server.address.split(":")
            asked = http.client.HTTPConnection(host, int(port), timeout=10)
            asked.request("GET", "/health")
            assert asked.getresponse().status == 503
            asked.close()
        eventually(lambda: len(server._uvicorn.server_state.connections) == 0)
        assert send(server, "GET", "/health")[0] == 200


def test_an_answer_that_nobody_takes_holds_no_turn_for_long(
    service: ScoringService, rollout: Rollout
) -> None:
    big = Failing(service.info)
    big.score = lambda *_: HiddenSignal(hidden=np.zeros((6, 7, 400_000), np.float32))  # type: ignore[method-assign]
    with serving(big, threads=1, idle_s=0.3) as server:
        body = good(service.info, rollout)
        head = f"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with connections(server, 1, head + body):
            eventually(lambda: server.in_hand == 1, 30)
            eventually(lambda: server.in_hand == 0, 30)


# Completions servers.


@cache
def true_logprobs(service: ScoringService) -> Callable[..., Any]:
    """Compiled once for all fakes."""
    config, params = service.model, service.params

    @jax.jit
    def logprobs(tokens: Any) -> Any:
        hidden = decoder.forward(config, params, tokens, jnp.ones(tokens.shape, bool))
        return jax.nn.log_softmax(decoder.token_logits(config, params, hidden), -1)

    return logprobs


class FakeCompletions:
    """Computes true log-probs, and tells them in one of the two styles."""

    def __init__(self, service: ScoringService, style: str, most: int, silent: bool = False):
        self.style, self.most, self.silent = style, most, silent
        self.logprobs = true_logprobs(service)
        self.bend: Callable[[Any], None] = lambda told: None
        self.spelling, self.requests, self.at_once, self.peak = "w", 0, 0, 0
        self.keys: set[str | None] = set()
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": "big", "max_model_len": 100}]})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.keys.add(self.headers.get("Authorization"))
                with fake._lock:
                    fake.requests, fake.at_once = fake.requests + 1, fake.at_once + 1
                    fake.peak = max(fake.peak, fake.at_once)
                time.sleep(0.02)
                status, told = fake.complete(asked)
                with fake._lock:
                    fake.at_once -= 1
                self.reply(status, told)

            def reply(self, status: int, told: Any) -> None:
                body = json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def complete(self, asked: dict[str, Any]) -> tuple[int, Any]:
        assert asked["model"] == "big" and asked["max_tokens"] == 1 and asked["temperature"] == 0
        k = asked.get("prompt_logprobs" if self.style == "vllm" else "logprobs")
        if k is None:
            choice: dict[str, Any] = {"text": "", "logprobs": None}
            return 200, {"choices": [choice]}
        if k > self.most and not self.silent:
            return 400, {"message": f"Requested {k} log-probs, greater than {self.most}"}
        tokens, k = asked["prompt"], min(k, self.most)
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(tokens)] = tokens
        with self._lock:
            table = np.asarray(self.logprobs(padded))[0]
        rows = [(token, table[i]) for i, token in enumerate(tokens[1:])]
        told = {"choices": [self._vllm(rows, k) if self.style == "vllm" else self._echo(rows, k)]}
        if self.style == "echo":
            told["choices"][0]["logprobs"]["tokens"].insert(0, self._name(tokens[0]))
        self.bend(told)
        return 200, told

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.spelling != "text" else f"w{token}"

    def _vllm(self, rows: list[Any], k: int) -> Any:
        positions: list[Any] = [None]
        for token, logprobs in rows:
            order = np.argsort(-logprobs)
            positions.append(
                {
                    str(i): {
                        "logprob": float(logprobs[i]),
                        "rank": int(np.flatnonzero(order == i)[0]) + 1,
                        "decoded_token": f" {self.spelling}{i}",
                    }
                    for i in [token, *order[:k].tolist()]
                }
            )
        return {"prompt_logprobs": positions}

    def _echo(self, rows: list[Any], k: int) -> Any:
        best = [
            {self._name(i): float(logprobs[i]) for i in np.argsort(-logprobs)[:k].tolist()}
            for _, logprobs in rows
        ]
        told = {
            "tokens": [*(self._name(token) for token, _ in rows), self._name(5)],
            "token_logprobs": [None, *(float(lp[token]) for token, lp in rows), -1.0],
            "top_logprobs": [None, *best, {self._name(5): -1.0}],
        }
        return {"logprobs": told}


@contextmanager
def completions(*args: Any, **options: Any) -> Iterator[FakeCompletions]:
    fake = FakeCompletions(*args, **options)
    try:
        yield fake
    finally:
        fake.http.shutdown()
        fake.http.server_close()


@pytest.mark.parametrize("style", ["vllm", "echo"])
def test_a_completions_server_tells_what_the_scorer_tells(
    style: str,
    service: ScoringService,
    rollout: Rollout,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN, "key-1")
    real = rollout.sequences.loss_mask
    with completions(service, style, most=8) as fake:
        for distill in (PLAIN, SAMPLED):
            asked = config(fake.url, distill, api="openai", service_threads=3)
            told = RemoteTeachers(asked, V).score(rollout)
            assert told is not None
            theirs = expected(distill)
            for field in fields(theirs):
                mine, other = getattr(told, field.name), getattr(theirs, field.name)
                assert (mine is None) == (other is None)
                if other is not None:
                    np.testing.assert_allclose(mine[real], other[real], atol=1e-5)
                    assert mine.dtype == other.dtype and np.isfinite(mine).all()
        assert fake.keys == {"Bearer key-1"}
        assert 2 <= fake.peak <= 3
        info = remote_info(asked)
        assert (info.model, info.max_tokens, info.signals) == ("big", 99, ("topk", "sampled"))


def test_two_completions_servers_are_mixed(
    service: ScoringService, rollout: Rollout, expected: Any
) -> None:
    """Of one model, so that the mixture is it too; the last row has no prompt, and no teacher."""
    shared = [Prompt(i, (5,), "") for i in range(5)]
    real = rollout.sequences.loss_mask
    with completions(service, "vllm", most=8) as one, completions(service, "echo", most=8) as other:
        named = {"api": "openai", "api_model": "big"}
        teachers = {
            "a": NamedTeacherConfig(address=one.url, weight=3, **named),
            "b": NamedTeacherConfig(address=other.url, **named),
        }
        asked = config("localhost:1", SAMPLED)
        asked = asked.model_copy(update={"teachers": teachers})
        infos = {name: remote_info(asked, name) for name in teachers}
        role = RemoteTeachers(asked, V, infos)
        told = role.score(replace(rollout, prompts=tuple(shared)))
        assert isinstance(told, SampledSignal) and min(one.requests, other.requests) > 5
    wanted = expected(SAMPLED).token_logprobs
    np.testing.assert_allclose(told.token_logprobs[real], wanted[real], atol=1e-5)
    np.testing.assert_allclose(told.token_logprobs[~real], 0, atol=1e-6)


@pytest.mark.parametrize("style", ["vllm", "echo"])
@pytest.mark.parametrize("silent", [True, False])
def test_more_log_probs_than_a_server_tells_are_refused_with_its_limit(
    style: str, silent: bool, service: ScoringService
) -> None:
    prompts = [Prompt(0, (5, 6, 7, 8), "")]
    with completions(service, style, most=3, silent=silent) as fake:
        asked = config(fake.url, PLAIN, api="openai")
        info = remote_info(asked)
        words = "it returns 3 log-probs.*distill.top_k=4 needs more" if silent else "greater than 3"
        with pytest.raises(UserError, match=words):
            check_remote_prompts(asked, info, Words(), prompts, V)


def test_a_completions_server_is_tried_before_the_run(service: ScoringService) -> None:
    prompts = [Prompt(0, (5, 6, 7, 8), "")]
    student = tiny_config("llama")
    with completions(service, "vllm", most=8) as fake:
        asked = config(fake.url, PLAIN, api="openai")
        info = remote_info(asked)
        assert check_remote(asked, info, Words(), student) == V
        assert check_remote_prompts(asked, info, Words(), prompts, V) is None
        fake.spelling = "q"
        with pytest.raises(UserError, match="different vocabularies: token 6 is 'w6'.* ' q6' for"):
            check_remote_prompts(asked, info, Words(), prompts, V)
        for changed, word in (
            ({"entropy_aware": True, "entropy_top_k": 2}, "entropy of the whole vocabulary"),
            ({"distill_temperature": 2.0}, "those at temperature 1"),
            ({"signal": "hidden"}, "offers topk and sampled only"),
        ):
            other = asked.model_copy(update={"distill": PLAIN.model_copy(update=changed)})
            with pytest.raises(UserError, match=word):
                check_remote(other, info, Words(), student)
        with pytest.raises(UserError, match="teacher.api_model=small.*has big"):
            remote_info(config(fake.url, PLAIN, api="openai", api_model="small"))
    with completions(service, "echo", most=8) as fake:
        asked = config(fake.url, PLAIN, api="openai")
        told = check_remote_prompts(asked, remote_info(asked), Words(), prompts, V)
        assert told is not None and "could not be checked" in told
        fake.spelling = "text"
        with pytest.raises(UserError, match="not return the log-probs(.|\n)*return_tokens_as_t"):
            remote_info(asked)


def _vllm(change: Callable[[list[Any]], Any]) -> Callable[[Any], None]:
    """Changes what is told of position 2, in place, or all of it."""

    def bend(told: Any) -> None:
        if len(told["choices"][0]["prompt_logprobs"]) > 2:  # not the handshake's
            change(told["choices"][0]["prompt_logprobs"])

    return bend


def _first(told: list[Any]) -> Any:
    """The most probable token at position 2."""
    return min(told[2].values(), key=lambda entry: entry["rank"])


BENT_COMPLETIONS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "shifted": (
        "vllm",
        _vllm(lambda told: told.__setitem__(slice(1, -1), told[2:])),
        "prompt_logprobs at position 1 are of the tokens .*, not of 6, which was sent there",
    ),
    "padded": (
        "vllm",
        _vllm(lambda told: told[2].__setitem__(str(V), {"logprob": -0.0, "rank": 1})),
        r"topk_ids is 64 at \[2, 0\]: .* 0 to 63",
    ),
    "above 0": ("vllm", _vllm(lambda t: _first(t).update(logprob=7.0)), "topk_logprobs is 7 at"),
    "nan": ("vllm", _vllm(lambda t: t[2]["7"].update(logprob=float("nan"))), "nan at .* finite"),
    "null": ("vllm", _vllm(lambda t: t[2]["7"].update(logprob=None)), "a log-prob is null"),
    "sum": (
        "vllm",
        _vllm(lambda told: [entry.update(logprob=-0.1) for entry in told[2].values()]),
        "sum of topk_logprobs is .* at .*: ",
    ),
    "counted": ("vllm", lambda t: t.update(usage={"prompt_tokens": 5}), "read 5 tokens, .* sent"),
    "other prompt": (
        "vllm",
        lambda told: told["choices"][0].update(prompt_token_ids=[1, 5, 6]),
        r"it read the tokens \[1, 5, 6\] \(3\), \[.*\] .* were sent",
    ),
    "echo shifted": (
        "echo",
        lambda told: told["choices"][0]["logprobs"]["tokens"].insert(0, "token_id:1"),
        r"it echoes the tokens \[1, .* were sent",
    ),
    "echo apart": (
        "echo",
        lambda told: told["choices"][0]["logprobs"]["token_logprobs"].__setitem__(1, -0.25),
        "token_logprobs at position 1 say -0.25 of token .*, top_logprobs",
    ),
}


@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize("case", BENT_COMPLETIONS)
def test_log_probs_that_are_not_of_the_tokens_sent_are_refused(
    case: str, service: ScoringService
) -> None:
    style, bend, word = BENT_COMPLETIONS[case]
    prompts = [Prompt(0, (5, 6, 7, 8), "")]
    distill = DistillConfig(signal="topk", top_k=V if "echo" in case else K, chunk_tokens=16)
    with completions(service, style, most=V) as fake:
        asked = config(fake.url, distill, api="openai")
        info = remote_info(asked)
        assert "refused" not in str(check_remote_prompts(asked, info, Words(), prompts, V))
        fake.bend = bend
        with pytest.raises(UserError, match=word):
            check_remote_prompts(asked, info, Words(), prompts, V)


def test_the_tail_is_what_the_best_leave_over() -> None:
    tails = tail_logprob(np.log([[0.5, 0.25], [1 - 1e-5, 1e-30]]))
    np.testing.assert_allclose(tails, np.log([0.25, 1e-5]), rtol=1e-4)
    for more_than_all in ([0.0], [1e-9], [np.log(0.5), np.log(0.5) + 1e-6]):
        assert tail_logprob(np.array(more_than_all)) == np.float32(TAIL_FLOOR)
    assert np.exp(TAIL_FLOOR) == pytest.approx(2.0**-24)


# What is checked before a run.


def test_a_teacher_that_does_not_fit_is_refused(service: ScoringService) -> None:
    student, info = tiny_config("llama"), service.info
    asked = config("localhost:1", DISTILLS["hidden"])
    assert check_remote(asked, info, Words(), student) == V

    def refused(word: str, tokenizer: Any = None, run: Config = asked, **changed: Any) -> None:
        other = info.model_copy(update=changed)
        with pytest.raises(UserError, match=word):
            check_remote(run, other, tokenizer or Words(), student)

    refused(f"{vocab_hash(Words())[:12]}.*{vocab_hash(Words(63))[:12]}", Words(63))
    other_eos = Words()
    other_eos.eos_token_id = 3
    refused("different EOS ids: student 3, .* 2;", other_eos)
    refused(r"student \[2\], .* \[2, 3\]", model_eos=(2, 3))
    refused("60 embedding rows .*which 4 tokens of its tokenizer lie beyond", vocab_size=60)
    refused("make 12 positions; the teacher at localhost:1 takes 11", max_tokens=11)
    refused("offers topk only", signals=("topk",))
    refused("--max-answer-mb", max_answer_bytes=100)
    refused("seq_kd=true", run=asked.model_copy(update={"distill": _seq_kd()}))
    with pytest.raises(UserError, match="no tokenizer"):
        check_remote(asked, info, None, student)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl.teacher.remote.MEET_S", 0.3)
        with pytest.raises(UserError, match="localhost:1: .*Connection refused"):
            remote_info(asked)


def test_another_version_of_the_protocol_is_refused_at_once(
    service: ScoringService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(service) as server:
        monkeypatch.setattr("jaxrl.teacher.protocol.PROTOCOL", 3)
        with pytest.raises(UserError, match="speaks version 2 .*, this jaxrl version 3: install"):
            remote_info(config(server.address, PLAIN))
        eventually(lambda: server.counts["served"] == 1)


def _seq_kd() -> DistillConfig:
    return DistillConfig(seq_kd=True, on_policy_fraction=0.5)


def test_chat_templates_are_compared_on_the_runs_prompts(service: ScoringService) -> None:
    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "hi"}]
    tokens = tuple(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    )
    prompts = [Prompt(0, tokens, "", columns={"messages": chat})]
    asked = config("localhost:1", PLAIN)
    same = tokenizer.chat_template + "{# another spelling of the same #}"
    for template, word in (
        (same, None),
        (same.replace("assistant", "teacher"), "different prompts: .*teacher"),
        (None, "no chat template"),
    ):
        info = service.info.model_copy(update={"chat_template": template})
        if word is None:
            assert check_remote_prompts(asked, info, tokenizer, prompts, V) is None
        else:
            with pytest.raises(UserError, match=word):
                check_remote_prompts(asked, info, tokenizer, prompts, V)
    assert tokenizer.chat_template + "{# another spelling of the same #}" == same


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"address": "localhost:1", "model": "x"}, "two teachers"),
        ({"address": "localhost"}, "host:port"),
        ({"address": "http://user:word@host:1"}, "host:port"),
        ({"address": "host:99999"}, "host:port"),
        ({"address": "ho st:1"}, "host:port"),
        ({"address": "host:1/a b"}, "host:port"),
        ({"address": "host:1\t"}, "host:port"),
        ({"address": "h\u00f6st:1"}, "host:port"),
        ({"address": "host:1", "api": "openai"}, "http://host:port/v1"),
        ({"address": "host:1", "api_model": "m"}, "api=openai"),
        ({"api": "openai"}, "set address"),
        ({"api_model": "m", "model": "x"}, "set address"),
    ],
)
def test_keys_that_name_no_server_are_refused(keys: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        TeacherConfig(**keys)


# The command.


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--port", "0"], "--model"),
        (["--model", "builtin:teacher", "--port", "70000"], "--port 70000"),
        (["--model", "builtin:teacher", "--port", "0", "--threads", "0"], "--threads 0"),
        (["--model", "builtin:teacher", "--port", "0", "--host", "0.0.0.0"], TOKEN),
        (["--model", "builtin:nobody", "--port", "0"], "builtin:nobody"),
        (["--model", "builtin:teacher", "--port", "0", "--max-tokens", "99999"], "positions"),
    ],
)
def test_bad_options_exit_with_2(
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert run(serve_teacher.main, words) == 2
    assert told in capsys.readouterr().err


def test_an_address_that_is_taken_is_told(
    server: TeacherServer, capsys: pytest.CaptureFixture[str]
) -> None:
    port = server.address.split(":")[1]
    assert run(serve_teacher.main, ["--model", "builtin:teacher", "--port", port]) == 2
    assert f"--port {port}: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_stop(number: int) -> None:
    command = [sys.executable, "-m", "jaxrl.serve_teacher", "--model", "builtin:teacher"]
    command += ["--port", "0", "--dtype", "float32", "--devices", "2", "--log-requests"]
    environment = os.environ | {TOKEN: "secret-2", "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline(), process.stdout.readline()]
            found = re.search(r"http://127.0.0.1:\d+", lines[1])
            assert found is not None and "on cpu, fsdp=2" in lines[0], lines
            client = TeacherClient(Endpoint(found[0], "secret-2", 30))
            info = client.info
            assert info.vocab_size is not None
            tokens = np.full((3, 8), 5, np.int32)
            sequences = Sequences(tokens, tokens > 0, np.ones((3, 4), bool))
            told = client.score(sequences, None, DISTILLS["hidden"], info.vocab_size)
            head = client.head()
            assert told.hidden.shape == (3, 4, info.d_model)
            logits = told.hidden[0] @ head.T
            assert logits.shape == (4, info.vocab_size) and np.isfinite(logits).all()
            process.send_signal(number)
            rest = process.stdout.read()
            assert process.wait(20) == 0
            assert "POST '/v1/score' 200" in rest and "3 served, 0 refused" in rest
            assert "secret-2" not in "".join(lines) + rest
        finally:
            process.kill()
