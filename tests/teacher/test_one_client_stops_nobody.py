"""Programs of a served teacher: few are compiled, one at a time, outside of the turns."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import Memory, make_mesh, tiny_config, tiny_tensors

from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.data.batch import pack_sequences
from jaxrl.process.http_server import Limits
from jaxrl.teacher import server as server_module
from jaxrl.teacher.protocol import Options, Request, read_request, write_request
from jaxrl.teacher.server import ScoringService, TeacherServer
from jaxrl.types import Sequences, TeacherSignal, signal_of

V = 64


class Words:
    eos_token_id, chat_template = 2, None

    def get_vocab(self) -> dict[str, int]:
        return {f"w{i}": i for i in range(V)}


@pytest.fixture(scope="module")
def service() -> ScoringService:
    tensors = Memory(tiny_tensors("llama"))
    source = ModelSource("tiny", Path("tiny"), tiny_config("llama"), tensors, None)
    return ScoringService(source, Words(), make_mesh(1, 1, 1), "float32")


@pytest.fixture
def fresh(service: ScoringService) -> ScoringService:
    """Without programs."""
    other = object.__new__(ScoringService)
    other.__dict__ |= service.__dict__ | {"_programs": {}}
    return other


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    rows = np.random.RandomState(3).randint(3, V, (2, 12)).tolist()
    prompts, completions = [row[:5] for row in rows], [row[5:] for row in rows]
    return pack_sequences(
        prompts, completions, prompt_width=5, completion_width=7, pad_id=0, row_multiple=1
    )


def options(**changed: Any) -> Options:
    plain = {"signal": "topk", "top_k": 4, "entropy_top_k": None, "distill_temperature": 1.0}
    return Options(**plain | {"vocab_size": V, "chunk_tokens": 64} | changed)


def request(service: ScoringService, sequences: Sequences, **changed: Any) -> Request:
    body = write_request(options(**changed), service.info.fingerprint, sequences, None)
    return read_request(body, service.info)


def scored(service: ScoringService, asked: Request) -> TeacherSignal:
    return signal_of(service.turns.submit(service.compile(asked), lambda: True).result(60))


def counted(service: ScoringService, seconds: float | None = None) -> list[Options]:
    """What is compiled from now on. With `seconds` each takes so long, and is the program that the
    service has, which is as good where nobody reads the answer."""
    compiled: list[Options] = []
    compile_one, there = service._compile, list(service._programs.values())

    def compiling(asked: Options, inputs: Any) -> Any:
        compiled.append(asked)
        if seconds is None:
            return compile_one(asked, inputs)
        time.sleep(seconds)
        return there[0]

    service.__dict__["_compile"] = compiling
    return compiled


def test_a_temperature_is_an_argument(fresh: ScoringService, sequences: Sequences) -> None:
    compiled = counted(fresh)
    told = {
        t: scored(fresh, request(fresh, sequences, distill_temperature=t))
        for t in (1.0, 0.5, 0.7, 1.3, 2.0, 7.0)
    }
    assert len(compiled) == 1
    whole = scored(fresh, request(fresh, sequences, top_k=V))
    logits = np.take_along_axis(whole.topk_logprobs, np.argsort(whole.topk_ids, -1), -1)
    for t, signal in told.items():
        cold = logits.astype(np.float64) / t
        cold -= np.log(np.exp(cold).sum(-1, keepdims=True))
        theirs = np.take_along_axis(cold, signal.topk_ids.astype(int), -1)
        np.testing.assert_allclose(signal.topk_logprobs, theirs, atol=2e-5)


def test_what_changes_no_answer_changes_no_program(
    fresh: ScoringService, sequences: Sequences
) -> None:
    compiled: list[Options] = []
    fresh.__dict__["_compile"] = lambda asked, inputs: compiled.append(asked) or "a program"
    for chunk in (1, 3, 63, 64, 65, 5000, 10**9):
        fresh.compile(request(fresh, sequences, chunk_tokens=chunk))
    assert len(compiled) == 5
    compiled.clear()
    for temperature, k, v, chunk in itertools.product((0.5, 2.0), (1, 9), (V, 30), (70,)):
        same = {"distill_temperature": temperature, "top_k": k, "vocab_size": v}
        asked = request(fresh, sequences, signal="hidden", chunk_tokens=chunk, **same)
        fresh.compile(asked)
    assert len(compiled) == 1
    compiled.clear()
    for k in (1, 2, 9):
        fresh.compile(request(fresh, sequences, signal="sampled", top_k=k))
    assert len(compiled) == 1


@pytest.fixture
def server(fresh: ScoringService) -> Iterator[TeacherServer]:
    server = TeacherServer("localhost", 0, token=None, limits=Limits(), log=print)
    server.start({"": fresh})
    yield server
    server.close()


def post(server: TeacherServer, body: bytes) -> tuple[int, float]:
    """Status, and the seconds until the answer."""
    began = time.monotonic()
    host, port = server.address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", "/v1/score", body)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, time.monotonic() - began


@pytest.fixture
def bodies(fresh: ScoringService, sequences: Sequences) -> Callable[..., bytes]:
    def body(**changed: Any) -> bytes:
        return write_request(options(**changed), fresh.info.fingerprint, sequences, None)

    return body


def test_programs_are_compiled_once_and_delay_no_request_whose_programs_are_there(
    server: TeacherServer,
    fresh: ScoringService,
    bodies: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert post(server, bodies(top_k=9))[0] == 200
    (program,) = fresh._programs.values()
    now, most, go = list[Options](), list[int](), threading.Event()

    def compiling(asked: Options, inputs: Any) -> Any:
        now.append(asked)
        most.append(len(now))
        assert go.wait(60)
        now.remove(asked)
        return program

    fresh.__dict__["_compile"] = compiling
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(post, server, bodies(top_k=k % 3 + 1)) for k in range(12)]
        while not now:
            time.sleep(0.01)
        assert post(server, bodies(top_k=9, distill_temperature=1.7))[0] == 200
        go.set()
        assert [each.result()[0] for each in asked] == [200] * 12
    assert most == [1, 1, 1]
    monkeypatch.setattr(server_module, "MOST_PROGRAMS", 3)
    assert [post(server, bodies(top_k=k))[0] for k in (9, 10)] == [200] * 2
    assert len(fresh._programs) == 3 and 9 in {key.top_k for key, _ in fresh._programs}


def test_a_client_that_leaves_has_nothing_compiled(
    server: TeacherServer, fresh: ScoringService, bodies: Callable[..., bytes]
) -> None:
    assert post(server, bodies(top_k=1))[0] == 200
    compiled = counted(fresh, 1.0)
    host, port = server.address.split(":")
    first = threading.Thread(target=post, args=(server, bodies(top_k=2)))
    first.start()
    while not compiled:
        time.sleep(0.01)
    leaving = [http.client.HTTPConnection(host, int(port)) for _ in range(5)]
    for k, connection in enumerate(leaving):
        connection.request("POST", "/v1/score", bodies(top_k=10 + k))
    while server.open < 6:
        time.sleep(0.01)
    for connection in leaving:
        connection.close()
    first.join()
    while server.open:
        time.sleep(0.01)
    assert [each.top_k for each in compiled] == [2]


def test_a_server_that_compiles_closes_at_once(
    server: TeacherServer, fresh: ScoringService, bodies: Callable[..., bytes]
) -> None:
    begun, go = threading.Event(), threading.Event()

    def compiling(asked: Options, inputs: Any) -> None:
        begun.set()
        assert go.wait(60)

    fresh.__dict__["_compile"] = compiling
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server, bodies(top_k=2))
        assert begun.wait(20)
        closing = threading.Thread(target=server.close)
        closing.start()
        closing.join(20)
        ended = not closing.is_alive()
        go.set()
        assert ended and asked.result(20)[0] == 503


def test_options_that_do_not_go_together_are_refused(
    server: TeacherServer, bodies: Callable[..., bytes]
) -> None:
    assert post(server, bodies(signal="hidden", entropy_top_k=3))[0] in (200, 400)
    assert post(server, bodies(top_k=V + 1))[0] == 400
