"""The HTTP server serves any routes: streams, bodies of some size, a token, an end that waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jaxrl.errors import Refused, UserError
from jaxrl.process.http_server import HttpServer, Limits

GO, BEGUN = threading.Event(), threading.Event()


async def words(request: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        for word in request.path_params["text"].split("-"):
            yield word.encode()
            await asyncio.sleep(0.01)

    return StreamingResponse(pieces())


@pytest.fixture
def server() -> Iterator[HttpServer]:
    lines = list[str]()
    server = HttpServer("localhost", 0, token="secret", limits=Limits(threads=1), log=lines.append)

    async def count(request: Request) -> Response:
        return JSONResponse(len(await server.read_body(request, 10)))

    async def slow(request: Request) -> Response:
        async with server.turn():
            BEGUN.set()
            await asyncio.to_thread(GO.wait, 30)
        return JSONResponse("done")

    async def gone(request: Request) -> Response:
        raise Refused(410, "the episode is over")

    routes = {"GET /words/{text}": words, "POST /count": count, "GET /slow": slow, "GET /": gone}
    server.serve(routes, public=("GET /",))
    yield server
    server.close()
    assert not lines


def test_any_routes_are_served_and_an_end_waits_for_what_is_in_hand(server: HttpServer) -> None:
    with (
        httpx2.Client(base_url=server.url, headers={"Authorization": "Bearer secret"}) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with client.stream("GET", "/words/a-bc-d") as reply:
            assert "".join(reply.iter_text()) == "abcd"
        assert client.post("/count", content=b"x" * 10).json() == 10
        assert client.post("/count", content=iter([b"x"] * 10)).json() == 10  # chunked
        for content in (b"x" * 11, iter([b"x"] * 11)):
            refused = client.post("/count", content=content)
            assert (refused.status_code, "at most 10" in refused.text) == (413, True)
        bare = httpx2.get(f"{server.url}/")
        assert (bare.status_code, bare.json()["error"]["message"]) == (410, "the episode is over")
        assert httpx2.get(f"{server.url}/slow").status_code == 401
        in_hand = pool.submit(client.get, "/slow", timeout=30)
        assert BEGUN.wait(30) and not server.drain(0.05)
        assert client.get("/words/a").status_code == 503
        GO.set()
        assert server.drain(30) and in_hand.result(30).json() == "done"
    assert server.held == server.in_hand == 0
    with pytest.raises(UserError, match="--port"):
        HttpServer("localhost", int(server.address.split(":")[1]), log=print)
