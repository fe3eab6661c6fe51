"""Whatever a teacher's server answers, a run learns from it or ends with a few lines."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _threads_queues
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save
from tiny_models import tiny_config
from tiny_tokenizer import tiny_tokenizer

from jaxrl.config.schema import Config
from jaxrl.data.batch import pack_sequences
from jaxrl.errors import RunError, UserError
from jaxrl.process.awake_clock import TEMPORARY
from jaxrl.teacher import remote
from jaxrl.teacher.protocol import (
    PROTOCOL,
    SIGNALS,
    Info,
    Options,
    check_answer,
    first_mistake,
    vocab_hash,
)
from jaxrl.teacher.remote import Endpoint, TeacherError
from jaxrl.types import Prompt, Rollout

K, C, T = 3, 4, 8
TOKENIZER = tiny_tokenizer()
STUDENT = replace(tiny_config("llama"), vocab_size=512)
V = STUDENT.vocab_size

DEEP = "[" * 100_000 + "]" * 100_000
OBJECTS = '{"a":' * 100_000 + "1" + "}" * 100_000
WRONG = [
    *("null", '""', '"x"', "-1", "0", "1", "1e400", "-1e400", "NaN", "true", "[]", "{}", "1.5"),
    *("9" * 400, "9" * 5000, '"' + "y" * 100_000 + '"', DEEP, OBJECTS, "[null]", '[{"id": 1}]'),
    *('"\\ud800"', '"a\\nb"', "[[1]]", '{"data": []}', '"2"', "2.0", "1e-400"),
]
"""JSON of what a field may hold in the place of what it should."""

INFO = Info(
    protocol=PROTOCOL,
    model="m",
    family="llama",
    n_params=1,
    d_model=8,
    vocab_size=V,
    final_softcap=None,
    vocab_hash=vocab_hash(TOKENIZER),
    tokenizer_eos=TOKENIZER.eos_token_id,
    model_eos=tuple(STUDENT.eos_ids),
    chat_template=None,
    dtype="float32",
    max_tokens=512,
    max_request_bytes=1 << 20,
    max_answer_bytes=1 << 20,
    signals=SIGNALS,
    fingerprint="f",
)


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_WRONG", 1)


def config(**teacher: Any) -> Config:
    lines = [f"teacher.{key}={value}" for key, value in teacher.items()]
    keys = ["teacher.model=null", "teacher.address=http://localhost:1/v1", f"distill.top_k={K}"]
    signal = [] if "api" in teacher else ["distill.signal=topk"]
    sizes = [f"max_new_tokens={C}", f"max_prompt_tokens={T - C}", "batch_size=2"]
    api = ["distill.signal=topk", "distill.entropy_aware=false"] if "api" in teacher else signal
    return Config.load("builtin:quickstart", [*keys, *sizes, *api, *lines])


def answering(monkeypatch: pytest.MonkeyPatch, answers: dict[str, bytes]) -> None:
    """Every question has the answer of the first path that its own begins with."""

    def once(
        self: Endpoint, method: str, path: str, *rest: Any
    ) -> tuple[int, bytes, dict[str, str]]:
        body = next(answer for begin, answer in answers.items() if path.startswith(begin))
        return 200, body, {}

    monkeypatch.setattr(Endpoint, "_once", once)


def survives(ask: Callable[[], object]) -> None:
    try:
        ask()
    except (UserError, RunError) as error:
        text = str(error)
        assert len(text) < 2000 and text.count("\n") < 5, text[:3000]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, the whole first."""
    yield path
    if isinstance(value, dict | list):
        children = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in list(children)[:4]:
            yield from places(child, (*path, key))


def with_wrong(value: Any, path: tuple[Any, ...], wrong: str | None) -> bytes:
    """The JSON of a value with another at that place; None: without it."""
    if not path:
        return (wrong or "").encode()
    changed = deepcopy(value)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    if wrong is None:
        del parent[path[-1]]
        return json.dumps(changed).encode()
    parent[path[-1]] = "@@"
    return json.dumps(changed).replace('"@@"', wrong).encode()


def meet(made: Config) -> None:
    """What a run does before it begins, and its first question."""
    info = remote.remote_info(made)
    v = remote.check_remote(made, info, TOKENIZER, STUDENT)
    prompts = [Prompt(0, (3, 4, 5), "p")]
    remote.check_together(made, {remote.ONLY: info})
    remote.check_remote_prompts(made, info, TOKENIZER, prompts, v)
    teacher = remote.RemoteTeachers(made, v, {remote.ONLY: info})
    teacher._clients[0].score(sequences(), None, made.distill, v)
    if made.teacher.api == "jaxrl":
        remote.remote_head(made, v, info)


def sequences() -> Any:
    rows = [[3, 4, 5], [4, 5, 6, 7]]
    sizes = {"prompt_width": T - C, "completion_width": C, "pad_id": 0, "row_multiple": 1}
    return pack_sequences(rows, [[5, 6, 7, 8], [6, 7]], **sizes)


def topk() -> dict[str, np.ndarray]:
    ids = np.broadcast_to(np.arange(K, dtype=np.int32), (2, C, K)).copy()
    even = np.full((2, C, K), -np.log(K + 1), np.float32)
    return {"topk_ids": ids, "topk_logprobs": even, "tail_logprob": even[..., 0].copy()}


HEAD = save({"head": np.zeros((V, 8), np.float32)})
INFO_JSON = json.loads(INFO.model_dump_json())


def test_an_honest_one_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    info = INFO.model_dump_json().encode()
    answering(monkeypatch, {"/v1/info": info, "/v1/head": HEAD, "/v1/score": save(topk())})
    meet(config())


@pytest.mark.parametrize("place", [*places(INFO_JSON)], ids=str)
def test_the_handshake_of_a_served_teacher(
    monkeypatch: pytest.MonkeyPatch, place: tuple[Any, ...]
) -> None:
    made = config()
    for wrong in [None, *WRONG]:
        info = with_wrong(INFO_JSON, place, wrong)
        answers = {"/v1/info": info, "/v1/head": HEAD, "/v1/score": save(topk())}
        answering(monkeypatch, answers)
        survives(lambda: meet(made))


RAW: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda body: b"",
    "half": lambda body: body[: len(body) // 2],
    "a header of all bytes": lambda body: b"\xff" * 8 + body[8:],
    "deep": lambda body: len(DEEP).to_bytes(8, "little") + DEEP.encode(),
    "deep objects": lambda body: len(OBJECTS).to_bytes(8, "little") + OBJECTS.encode(),
    "json": lambda body: b'{"a": 1}',
    "zeros": lambda body: bytes(len(body)),
    "no tensors": lambda body: save({}),
    "another": lambda body: save({"x": np.zeros(3)}),
    "no floats": lambda body: body.replace(b"F32", b"I32"),
    "a dtype that is none": lambda body: body.replace(b"F32", b"F33"),
    "metadata": lambda body: save({"a": np.zeros(1)}, {"request": DEEP}),
}


@pytest.mark.parametrize("kind", RAW)
@pytest.mark.parametrize("path", ["/v1/head", "/v1/score"])
def test_tensors_that_are_none(monkeypatch: pytest.MonkeyPatch, kind: str, path: str) -> None:
    answers = {"/v1/head": HEAD, "/v1/score": save(topk())}
    answers[path] = RAW[kind](answers[path])
    answering(monkeypatch, {"/v1/info": INFO.model_dump_json().encode(), **answers})
    with pytest.raises(TeacherError, match="its answer cannot be used"):
        meet(config())


@pytest.mark.parametrize("field", topk())
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1, 2**31 - 1, 0, 1e30])
def test_tensors_with_wrong_values(
    monkeypatch: pytest.MonkeyPatch, field: str, value: float
) -> None:
    tensors = topk()
    if tensors[field].dtype == np.int32 and not np.isfinite(value):
        value = -(2**31)
    tensors[field].reshape(-1)[:2] = (
        np.clip(value, -(2.0**31), 2.0**31 - 1) if (field == "topk_ids") else value
    )
    answers = {"/v1/info": INFO.model_dump_json().encode(), "/v1/head": HEAD}
    answering(monkeypatch, answers | {"/v1/score": save(tensors)})
    with pytest.raises(TeacherError, match="its answer cannot be used"):
        meet(config())


@pytest.mark.parametrize("name", ["topk", "best"])
def test_a_token_is_among_the_best_once(name: str) -> None:
    mask = np.array([[True, True, False]])
    ids = np.array([[[4, 1, 7], [2, 0, 9], [5, 5, 5]]], np.int32)
    even = np.full((1, 3, 3), -np.log(4), np.float32)
    fields = ("topk_ids", "topk_logprobs", "tail_logprob")
    fields = fields if name == "topk" else ("best_ids", "best_logprobs", "best_tail")
    shapes: Any = dict(
        zip(fields, [("int32", (3,)), ("float32", (3,)), ("float32", ())], strict=True)
    )
    tensors = dict(zip(fields, (ids, even, even[..., 0]), strict=True))
    check_answer(tensors, shapes, mask, 10)
    for again in ([0, 0, 0], [3, 4, 3], [3, 3, 4], [4, 3, 3]):
        ids[0, 1] = again
        with pytest.raises(ValueError, match=rf"{fields[0]} is [03] at \[0, 1, [12]\]: .* once"):
            check_answer(tensors, shapes, mask, 10)


# Completions servers

MODELS = {"data": [{"id": "m", "max_model_len": 100}]}


def spoken(style: str, n: int) -> dict[str, Any]:
    """An answer about a prompt of the tokens that are asked, in one of the styles."""
    best = dict.fromkeys(range(K), -1.5)
    if style == "echo":
        entry = {f"token_id:{i}": value for i, value in best.items()}
        tokens = [f"token_id:{i}" for i in range(n)]
        told: Any = {
            "logprobs": {
                "tokens": tokens,
                "token_logprobs": [None, *[-1.5] * (n - 1)],
                "top_logprobs": [None, *[entry] * (n - 1)],
            }
        }
    else:
        entries = {str(i): {"logprob": -1.5, "rank": i, "decoded_token": "w"} for i in best}
        told = {"prompt_logprobs": [None, *[entries] * (n - 1)], "prompt_token_ids": None}
    return {"choices": [told], "usage": {"prompt_tokens": n}}


def asked_of_completions(style: str, body: bytes) -> dict[str, Any]:
    request = json.loads(body)
    if ("echo" in request) != (style == "echo"):
        return {"choices": [{}]}
    tokens = request["prompt"]
    answer = spoken(style, len(tokens))
    choice = answer["choices"][0]
    for at, token in enumerate(tokens[1:], 1):
        if style == "echo":
            told = choice["logprobs"]
            told["tokens"] = [f"token_id:{i}" for i in tokens]
            told["top_logprobs"][at] = told["top_logprobs"][at] | {f"token_id:{token}": -1.5}
        else:
            own = {"logprob": -1.5, "rank": 1, "decoded_token": "w"}
            choice["prompt_logprobs"][at] = choice["prompt_logprobs"][at] | {str(token): own}
    return answer


@pytest.mark.parametrize("style", ["prompt_logprobs", "echo"])
def test_any_answer_of_a_completions_server(monkeypatch: pytest.MonkeyPatch, style: str) -> None:
    made = config(api="openai")
    example = spoken(style, 3)
    wrongs = [(place, wrong) for place in places(example) for wrong in [None, *WRONG]]
    for place, wrong in wrongs:

        def once(
            self: Endpoint,
            method: str,
            path: str,
            body: bytes | None,
            *rest: Any,
            place: Any = place,
            wrong: Any = wrong,
        ) -> tuple[int, bytes, dict[str, str]]:
            if body is None:
                return 200, json.dumps(MODELS).encode(), {}
            answer = asked_of_completions(style, body)
            try:
                return 200, with_wrong(answer, place, wrong), {}
            except (KeyError, IndexError, TypeError):  # the place is not in this answer
                return 200, json.dumps(answer).encode(), {}

        monkeypatch.setattr(Endpoint, "_once", once)
        survives(lambda: meet(made))


@pytest.mark.parametrize("place", [*places(MODELS)], ids=str)
def test_any_list_of_models(monkeypatch: pytest.MonkeyPatch, place: tuple[Any, ...]) -> None:
    made = config(api="openai")
    for wrong in [None, *WRONG]:
        models = with_wrong(MODELS, place, wrong)

        def once(
            self: Endpoint,
            method: str,
            path: str,
            body: bytes | None,
            *rest: Any,
            models: bytes = models,
        ) -> tuple[int, bytes, dict[str, str]]:
            if body is None:
                return 200, models, {}
            return 200, json.dumps(asked_of_completions("echo", body)).encode(), {}

        monkeypatch.setattr(Endpoint, "_once", once)
        survives(lambda: meet(made))


@pytest.mark.parametrize("status", [400, 404, 500, 301, 204, 999])
def test_any_refusal(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    made = config()
    for wrong in ["", *WRONG, json.dumps({"error": {"message": "x\n" * 9000}}), "\0\x1b[2J"]:
        monkeypatch.setattr(Endpoint, "_once", lambda *_, wrong=wrong: (status, wrong.encode(), {}))
        with pytest.raises(UserError):
            meet(made)
        survives(lambda: meet(made))


# Busy and dead servers


@pytest.mark.parametrize("status", TEMPORARY)
def test_a_busy_server_is_asked_again_when_it_says(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    class Over(list[float]):
        is_set, wait = (lambda _: False), list.append

    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    for headers, least in (
        ({}, 0),
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": date}, 20),
        ({"RateLimit": '"api";r=0;t=8'}, 8 if status == 429 else 0),
        ({"Retry-After": "soon"}, 0),
    ):
        answers = [(status, b"busy", headers), (200, b"fine", {})]
        monkeypatch.setattr(Endpoint, "_once", lambda *_, answers=answers: answers.pop(0))
        over = Over()
        assert Endpoint("http://h", None, 60.0, over=over).ask("GET", "/", bytes.decode) == "fine"
        assert len(over) == 1 and least <= over[0] <= least + 12
    late = status, b"busy", {"Retry-After": "61"}
    monkeypatch.setattr(Endpoint, "_once", lambda *_: late)
    words = f"status {status}: busy; it wants to be asked again in 61 s; given up after .* s and 1"
    with pytest.raises(TeacherError, match=words):
        Endpoint("http://h", None, 60.0).ask("GET", "/", bytes.decode)


class Server:
    """Stands for the wire: answers after a while, and counts."""

    def __init__(self, seconds: float, healthy: int = 1000):
        self.seconds, self.healthy, self.asked, self.at_once, self.peak = seconds, healthy, 0, 0, 0
        self.lock, self.ends = threading.Lock(), set[float]()

    def once(
        self, method: str, path: str, body: bytes | None, kind: str, end: float, most: int
    ) -> tuple[int, bytes, dict[str, str]]:
        with self.lock:
            self.ends.add(end)
            self.asked, self.at_once = self.asked + 1, self.at_once + 1
            self.peak, healthy = max(self.peak, self.at_once), self.asked <= self.healthy
        time.sleep(self.seconds)
        with self.lock:
            self.at_once -= 1
        if not healthy:
            return 503, b"the engine is dead", {}
        if path == "/completions":
            assert body is not None
            return 200, json.dumps(asked_of_completions("echo", body)).encode(), {}
        return 200, save({name: x[:1] for name, x in topk().items()}), {}

    def teachers(
        self, monkeypatch: pytest.MonkeyPatch, api: str, threads: int, deadline: float
    ) -> remote.RemoteTeachers:
        """A role that sends a request for each row."""
        monkeypatch.setattr(Endpoint, "_once", lambda _, *asked: self.once(*asked))
        monkeypatch.setattr(remote, "rows_at_once", lambda *_: 1)
        made = config(service_threads=threads, **({"api": api} if api == "openai" else {}))
        deadlines = made.deadlines.model_copy(update={"score": deadline})
        completions = remote.CompletionsInfo("m", 99, "echo")
        infos = {remote.ONLY: completions if api == "openai" else INFO}
        return remote.RemoteTeachers(made.model_copy(update={"deadlines": deadlines}), V, infos)


def rollout() -> Rollout:
    none = np.zeros((2, C), np.float32)
    return Rollout(sequences(), (), (), np.zeros(2, np.int32), none, none, 0)


APIS = ("jaxrl", "openai")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("threads", [1, 2])
def test_so_many_requests_as_asked_for_are_on_the_wire(
    monkeypatch: pytest.MonkeyPatch, api: str, threads: int
) -> None:
    server = Server(0.02)
    teachers = server.teachers(monkeypatch, api, threads, deadline=30)
    with ThreadPoolExecutor(4) as calls:
        assert None not in calls.map(teachers.score, [rollout()] * 4)
    assert (server.asked, server.peak) == (8, threads)


@pytest.mark.parametrize("api", APIS)
def test_all_requests_of_a_call_share_its_deadline_and_the_last_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    server = Server(0.01, healthy=1)
    teachers = server.teachers(monkeypatch, api, 1, deadline=0.5)
    words = "localhost:1/v1: POST .*the engine is dead.*deadline 0.45 s"
    with pytest.raises(TeacherError, match=words):
        teachers.score(rollout())
    assert server.asked > 2 and len(server.ends) == 1


@pytest.mark.parametrize("api", APIS)
def test_nothing_is_asked_once_the_role_is_closed(
    monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    """And no process waits at its end for a thread that still asks."""
    server = Server(0.1, healthy=0)
    teachers = server.teachers(monkeypatch, api, 2, deadline=100)
    with ThreadPoolExecutor(1) as calls:
        before = set(threading.enumerate())
        call = calls.submit(teachers.score, rollout())
        own, end = set[threading.Thread](), time.monotonic() + 30
        while not server.asked or len(own) < (2 if api == "openai" else 0):
            assert time.monotonic() < end, own
            time.sleep(0.01)
            own = set(threading.enumerate()) - before - calls._threads
        assert all(thread.daemon for thread in own) and not own & set(_threads_queues)
        teachers.close()
        with pytest.raises(TeacherError, match="the run is over"):
            call.result(5)
    asked = server.asked
    with pytest.raises(TeacherError, match="the run is over"):
        teachers.score(rollout())
    assert server.asked == asked


def test_what_has_not_begun_is_dropped_with_the_first_error() -> None:
    begun, go = list[int](), threading.Event()

    def call(i: int) -> int:
        begun.append(i)
        if i == 1:
            raise TeacherError("1")
        assert go.wait(30)
        return i

    with pytest.raises(TeacherError, match="1"):  # though 0 has not ended
        remote._side_by_side(call, [*([0] * 2), 1, *range(2, 50)], 3)
    go.set()
    assert len(begun) < 10
    assert remote._side_by_side(str, range(20), 3) == [str(i) for i in range(20)]


SPELLINGS: dict[str, Callable[[int], str]] = {
    "the piece of the vocabulary": TOKENIZER.convert_ids_to_tokens,
    "its text": lambda token: TOKENIZER.decode([token]),
    "its text without blanks": lambda token: TOKENIZER.decode([token]).strip(),
    "no part of a character": lambda token: TOKENIZER.decode([token]).replace("\ufffd", ""),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_server_with_the_student_s_vocabulary_is_accepted_however_it_spells_it(
    monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    made, info = config(api="openai"), remote.CompletionsInfo("m", 99, "prompt_logprobs")
    spell, shift = SPELLINGS[spelling], 0

    def scores(self: Any, tokens: Any, *_: Any) -> Any:
        return {}, [spell(token + shift) for token in tokens[1:]]

    monkeypatch.setattr(remote.CompletionsClient, "scores", scores)
    for text in ("plain", "What is 2+2?", "Wie groß\nist das?", "2 + 2 \N{GRINNING FACE}"):
        prompts = [Prompt(0, tuple(TOKENIZER.encode(text)), text)]
        shift = 0
        assert remote.check_remote_prompts(made, info, TOKENIZER, prompts, V) is None
        shift = 1
        with pytest.raises(UserError, match="different vocabularies: token"):
            remote.check_remote_prompts(made, info, TOKENIZER, prompts, V)


# The wire

DRIP = b"HTTP/1.1 200 OK\r\n"
WIRES: dict[str, tuple[bytes, bytes]] = {
    "a body without end": (DRIP + b"\r\n", b"y"),
    "chunks without end": (DRIP + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\ny\r\n"),
    "chunks that are none": (DRIP + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b""),
    "a length that is none": (DRIP + b"Content-Length: -5\r\n\r\n", b""),
    "a length in words": (DRIP + b"Content-Length: many\r\n\r\n{", b""),
    "a huge length": (DRIP + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{", b""),
    "garbage": (b"\x00\xff" * 100, b""),
    "another version": (b"HTTP/9.9 200 OK\r\n\r\n", b""),
    "a status that is none": (b"HTTP/1.1 abc OK\r\n\r\n", b""),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("kind", WIRES)
def test_no_answer_is_waited_for_beyond_the_deadline(kind: str) -> None:
    first, again = WIRES[kind]
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                wire, _ = listener.accept()
            except OSError:
                return
            try:
                wire.recv(1 << 16)
                wire.sendall(first)
                while again and not stop.wait(0.02):
                    wire.sendall(again)
            except OSError:
                pass
            finally:
                wire.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        endpoint = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", None, 1.0)
        began = time.monotonic()
        with pytest.raises(TeacherError) as caught:
            endpoint.ask("GET", "/v1/info", json.loads)
        assert time.monotonic() - began < 4
        assert len(str(caught.value)) < 1000
        stop.set()


@pytest.mark.parametrize("longest", [0, -5, True, 1.5, "9"])
def test_a_length_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, longest: object) -> None:
    models = json.dumps({"data": [{"id": "m", "max_model_len": longest}]}).encode()
    monkeypatch.setattr(Endpoint, "_once", lambda *_: (200, models, {}))
    with pytest.raises(UserError, match="an id and a length are expected"):
        meet(config(api="openai"))


def test_options_that_do_not_go_together_are_told_in_a_line() -> None:
    asked = {"signal": "topk", "top_k": 2, "entropy_top_k": 9, "vocab_size": 64}
    asked |= {"distill_temperature": 1.0, "chunk_tokens": 8}
    with pytest.raises(ValidationError) as error:
        Options.model_validate(asked)
    told = first_mistake(error.value)
    assert "entropy_top_k=9 top_k=2: " in told and "DistillConfig" not in told and "\n" not in told
