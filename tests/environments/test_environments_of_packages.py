"""Environments of other packages, each with the package itself and a server on this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from jaxrl.environments import Answer, Environment, Unavailable
from jaxrl.environments.environment_pool import EnvironmentPool
from jaxrl.environments.environment_process import (
    PACKAGES,
    Observation,
    Session,
    facts_of,
    find,
    load_class,
)
from jaxrl.environments.packages import seed_of
from jaxrl.environments.tool_calls import SchemaTool, parse_calls
from jaxrl.errors import UserError
from jaxrl.process.user_code import Failure

SUPPORT = Path(__file__).parent.parent / "support"
KEYS = itertools.count()
TIMEOUT = 6.0


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def pool_of(name: str, arguments: dict[str, Any], timeout: float = TIMEOUT) -> EnvironmentPool:
    source = find(name, arguments)
    return EnvironmentPool(source, workers=1, timeout=timeout, startup=120)


def session(**row: object) -> Session:
    return Session(next(KEYS), {"prompt": "p", "answer": None, **row})


def step(pool: EnvironmentPool, episode: Session, text: str) -> Observation | Failure:
    return pool.submit(pool.step(episode, text)).result(60)


def said(pool: EnvironmentPool, episode: Session, text: str) -> str:
    result = step(pool, episode, text)
    assert isinstance(result, Observation), result
    return "".join(message["content"] for message in result.messages)


def failed(pool: EnvironmentPool, episode: Session, text: str) -> Failure:
    result = step(pool, episode, text)
    assert isinstance(result, Failure)
    return result


def refusal(name: str, arguments: dict[str, Any]) -> str:
    source = find(name, arguments)
    with pytest.raises(UserError) as caught:
        facts_of(source, load_class(source), describe=True)
    return str(caught.value)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def served(script: str, *more: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of tests/support with its address, once it listens."""
    port = free_port()
    command = [sys.executable, str(SUPPORT / script), str(port), *more]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                urlopen(f"http://127.0.0.1:{port}/schema", timeout=5).close()
                break
            except (URLError, OSError) as error:
                if getattr(error, "code", None):  # it listens, and has no such page
                    break
                assert process.poll() is None, "the server ended"
                time.sleep(0.05)
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.startswith(PACKAGES[name].partition(":")[0])]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    with pytest.raises(UserError, match=rf"the extra `{name}`: pip install 'jaxrl\[{name}\]'"):
        load_class(find(name))


@pytest.mark.parametrize("text", ["add(1, b=2)", "add(1, 2)"])
def test_a_tool_with_a_schema_is_called_as_a_function_is(text: str) -> None:
    properties = {"b": {"type": "integer"}, "a": {"type": "integer"}, "not a name": {}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    tool = SchemaTool("add", "Adds.", parameters, lambda name, given: (name, given))
    assert tool(self=1) == ("add", {"self": 1})
    ((name, arguments),) = parse_calls(text, [tool])
    assert tool(**arguments) == (name, {"a": 1, "b": 2})
    assert tool.schema["function"]["parameters"] == parameters


@pytest.mark.parametrize("waits", [False, True])
def test_a_tool_that_cannot_work_fails_its_episode(waits: bool) -> None:
    def away() -> str:
        raise Unavailable("the shop is closed")

    async def far_away() -> str:
        return away()

    environment = Environment()
    environment.tools = [far_away if waits else away]
    with pytest.raises(Unavailable, match="the shop is closed"):
        result = environment.step(f"{environment.tools[0].__name__}()", [])
        assert inspect.isawaitable(result)
        asyncio.run(as_coroutine(result))


@pytest.mark.parametrize("written", [3, 3.0, "3", "3.0"])
def test_a_whole_number_of_a_row_is_one_in_any_format(written: object) -> None:
    """A table with gaps has floats, a CSV file has texts."""
    number = seed_of({"prompt": "p", "n": written}, "n")
    assert number == 3 and isinstance(number, int)


@pytest.mark.parametrize("written", [3.5, -1, -1.0, True, "x", "", "3e2", 1e300, [3]])
def test_what_is_no_whole_number_is_refused(written: object) -> None:
    with pytest.raises(Unavailable, match="must be an integer, 0 or more"):
        seed_of({"prompt": "p", "n": written}, "n")


async def as_coroutine(waits: Any) -> Any:
    return await waits


STDIO = [sys.executable, str(SUPPORT / "mcp_server.py")]


@pytest.fixture(scope="module")
def numbers() -> Iterator[EnvironmentPool]:
    os.environ["NUMBERS_UNIT"] = "apples"
    with pool_of("mcp", {"server": STDIO}) as pool:
        yield pool
    del os.environ["NUMBERS_UNIT"]


@needs("mcp")
def test_the_tools_of_an_mcp_server_are_called(numbers: EnvironmentPool) -> None:
    add, *_ = numbers.facts().tools
    assert add["function"]["name"] == "add" and not numbers.facts().resets
    assert add["function"]["description"] == "The sum of two numbers."
    assert list(add["function"]["parameters"]["properties"]) == ["a", "b"]
    first, other = session(), session()
    assert said(numbers, first, "Let me see.\nadd(3, b=4)") == "7"
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert said(numbers, first, call + call) == "22"
    assert "Error" in said(numbers, first, "add(b=4)")
    assert "validation error" in said(numbers, first, 'add("x")'), "the server's own words"
    assert "Error executing tool fail" in said(numbers, first, "fail()")
    assert "not JSON serializable" in said(numbers, first, "add(..., 1)"), "what JSON cannot say"
    assert "surrogates not allowed" in said(numbers, first, r'add("\ud800", 1)')
    assert said(numbers, first, "remember(3)") == "3 apples", "the run's variables"
    assert said(numbers, first, "remember(4)") == "7 apples"
    assert said(numbers, other, "remember(4)") == "4 apples", "a server of its own"
    assert step(numbers, first, "That is 7.") == Observation((), None, True)
    for episode in (first, other):
        numbers.submit(numbers.end(episode)).result(30)


@needs("mcp")
def test_an_mcp_server_that_ends_or_hangs_costs_its_episode(numbers: EnvironmentPool) -> None:
    before, others, ends, hangs = numbers.lost, session(), session(), session()
    assert said(numbers, others, "remember(1)") == "1 apples"
    failure = failed(numbers, ends, "leave()")
    assert failure.kind == "exception" and "Traceback" not in failure.text
    assert "mcp_server.py is not available: MCPError: Connection closed" in failure.text
    late = failed(numbers, hangs, "hang()")
    assert late.kind == "timeout" and f"{TIMEOUT:g} s" in late.text
    assert said(numbers, others, "remember(1)") == "2 apples" and numbers.lost == before


@needs("mcp")
def test_an_mcp_server_at_an_address() -> None:
    with served("mcp_server.py") as (url, process):
        with pool_of("mcp", {"server": f"{url}/mcp", "tools": ["remember", "add"]}) as pool:
            names = [tool["function"]["name"] for tool in pool.facts().tools]
            assert names == ["remember", "add"]
            episode, other = session(), session()
            assert said(pool, episode, "remember(3)").split()[0] == "3"
            assert said(pool, other, "remember(4)").split()[0] == "7", "one server for both"
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            assert f"{url}/mcp is not available" in failed(pool, episode, "add(1)").text
            worker = pool.processes[0].worker
            assert worker is not None
            os.kill(worker, signal.SIGKILL)
            later = failed(pool, session(), "add(1)").text
            assert f"{url}/mcp is not available" in later, "the process is replaced all the same"
        assert f"{url}/mcp is not available" in refusal("mcp", {"server": f"{url}/mcp"})


@needs("mcp")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"server": ["no-such-program"]}, "MCP server no-such-program is not available.* on PATH"),
        ({"server": "localhost:80"}, "must be an address that begins with http://"),
        ({"server": STDIO, "tools": ["ad"]}, r"no tool 'ad' \(did you mean add\?\)"),
        ({"server": STDIO, "tools": "add"}, r"tools='add' must be a list of names, as in \[add\]"),
        ({"sever": STDIO}, r"must be those of McpTools\(server, tools=None\)"),
    ],
)
def test_a_wrong_mcp_server_is_found_at_the_start(arguments: Any, expected: str) -> None:
    assert re.search(expected, refusal("mcp", arguments))


FROZEN = {"id": "FrozenLake-v1", "render_mode": "ansi", "is_slippery": False}


@needs("gymnasium")
def test_a_gymnasium_environment_is_played_by_its_numbers() -> None:
    """The lake is crossed on the way that Gymnasium itself rewards."""
    import gymnasium

    way = [1, 1, 2, 2, 1, 2]
    lake = gymnasium.make(**FROZEN)
    lake.reset(seed=3)
    expected = [lake.step(action) for action in way]
    with pool_of("gymnasium", {**FROZEN, "instructions": "Cross the lake."}) as pool:
        assert pool.facts().resets
        episode = session(seed=3)
        first = pool.submit(pool.begin(episode)).result(30)
        assert isinstance(first, str) and first.startswith("Cross the lake.\n")
        assert "[S]FFF" in first and "\x1b" not in first, "the cell of the player"
        assert said(pool, episode, "north") == "Error: an action is a number from 0 to 3"
        assert said(pool, episode, "I go to 4") == "Error: an action is a number from 0 to 3"
        results = [step(pool, episode, f"go {action}") for action in way]
    for result, (_, reward, terminated, _, _) in zip(results, expected, strict=True):
        assert isinstance(result, Observation)
        assert (result.reward, result.done) == (reward, terminated)
    assert results[-1].reward == 1 and results[-1].done


@needs("gymnasium")
def test_a_gymnasium_environment_of_texts_has_the_rows_seed() -> None:
    name = {"id": "text_games:Hidden-v0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUPPORT))
        with pool_of("gymnasium", name) as pool:
            seeds = [pool.submit(pool.begin(session(seed=n))).result(30) for n in (1, 1, 2)]
            rows = [pool.submit(pool.begin(session(prompt=p))).result(30) for p in "aab"]
            episode = session(seed=1)
            assert pool.submit(pool.begin(episode)).result(30) == seeds[0]
            bad = pool.submit(pool.begin(session(seed="x"))).result(30)
            assert isinstance(bad, Failure) and bad.text.startswith("the row's seed='x' must be")
            word = str(seeds[0]).split()[-1]
            assert step(pool, episode, "no") == Observation(
                ({"role": "user", "content": f"It was {word}, not no"},), -1.0, False
            )
            last = step(pool, episode, f"<think>\nno?\n</think>\n\n  {word} ")
            assert isinstance(last, Observation) and (last.reward, last.done) == (1.0, True)
    assert seeds[0] == seeds[1] != seeds[2] and rows[0] == rows[1] != rows[2]


@needs("gymnasium")
def test_thoughts_of_a_number_are_no_action() -> None:
    from jaxrl.environments.packages.gymnasium import Gymnasium

    lake = Gymnasium(**FROZEN)
    lake.reset({"prompt": "p"})
    for text in ("<think>\n2, or 1?\n</think>\n\nI do not know.", "<think>\n2"):
        assert lake.step(text, []) == Answer("Error: an action is a number from 0 to 3")
    first = lake.step("<think>\nNot 1.\n</think>\n\n2", [])
    lake.reset({"prompt": "p"})
    assert lake.step("2", []) == first


@needs("gymnasium")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"id": "FrozenLake-v1"}, "set render_mode: ansi"),
        ({**FROZEN, "render_mode": "asci"}, "render_mode='asci' is none of FrozenLake-v1: it has"),
        ({"id": "FrozenLak-v1"}, "Did you mean: `FrozenLake`?"),
        ({"id": "CartPole-v1"}, "a subclass of jaxrl.environments.packages.gymnasium:Gymnasium"),
        ({**FROZEN, "size": 3}, "unexpected keyword argument 'size'"),
    ],
)
def test_a_wrong_gymnasium_environment_is_found_at_the_start(arguments: Any, expected: str) -> None:
    assert expected in refusal("gymnasium", arguments)


@needs("openenv")
def test_an_openenv_server_is_played() -> None:
    with served("openenv_server.py", "3") as (url, process):
        with pool_of("openenv", {"url": url, "instructions": "Guess."}) as pool:
            assert pool.facts().resets
            episode, other = session(seed=7), session(seed=7)
            first = pool.submit(pool.begin(episode)).result(30)
            assert first == "Guess.\n0-9? (seed 7)"
            assert pool.submit(pool.begin(other)).result(30) == first
            thoughts = "<think>\n9?\n</think>\n\n"
            results = [step(pool, episode, f"{thoughts}{number}") for number in range(6)]
            assert results[4] == Observation(({"role": "user", "content": "more"},), 0.0, False)
            assert results[5] == Observation(({"role": "user", "content": "yes"},), 1.0, True)
            assert "no such thing" in failed(pool, other, "raise").text, "the server's own words"
            assert said(pool, other, "9") == "less", "and the session goes on"
            late = failed(pool, other, "hang")
            assert late.kind == "timeout" and f"{TIMEOUT:g} s" in late.text
            pool.submit(pool.end(episode)).result(30)
            again = session(prompt="q")
            assert "seed" in str(pool.submit(pool.begin(again)).result(30))
            full = pool.submit(pool.begin(session())).result(30)
            full = pool.submit(pool.begin(session())).result(30)
            assert isinstance(full, Failure) and "max_concurrent_envs" in full.text
            process.kill()
            process.wait(10)
            assert f"the OpenEnv server {url}: " in failed(pool, again, "1").text
        from jaxrl.environments.packages import openenv

        openenv._schemas.cache_clear()
        assert "must answer with the schemas" in refusal("openenv", {"url": url})


@needs("openenv")
def test_the_fields_of_openenv_are_chosen() -> None:
    from jaxrl.environments.packages.openenv import _field

    code = {"code": {"type": "string"}, "metadata": {"type": "object"}, "n": {"type": "integer"}}
    assert _field(code, None, "action") == "code" and _field(code, "n", "action") == "n"
    assert _field({**code, "stdin": {"type": "string"}}, None, "action") is None
    with pytest.raises(UserError, match=r"action='cod' \(did you mean code\?\).*it has code, n"):
        _field(code, "cod", "action")


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasksets of tests/support are found, as installed ones are, by tool servers too."""
    paths = [str(SUPPORT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@needs("verifiers")
def test_an_environment_of_verifiers_takes_its_turns(tasksets: None) -> None:
    with pool_of("verifiers", {"taskset": "word_tasks"}) as pool:
        assert pool.facts().resets and not pool.facts().tools
        first, second, raises = (session(task_index=n) for n in range(3))
        system = {"role": "system", "content": "You are brief."}
        for number, episode in enumerate((first, second, raises)):
            begun = pool.submit(pool.begin(episode)).result(30)
            user = {"role": "user", "content": f"Say the word number {number % 2}."}
            assert begun == (system, user)
        answer = Observation(({"role": "user", "content": "No. 2 left."},), None, False)
        assert step(pool, first, "red?") == Observation((), 2.0, True), "its weight is 2"
        assert step(pool, second, "<think>\nblue?\n</think>\n\nred?") == answer
        assert said(pool, second, "green") == "No. 1 left."
        assert step(pool, second, "no") == Observation((), 0.0, True)
        assert "KeyError: 'no such thing'" in failed(pool, raises, "raise").text
        for episode in (first, second, raises):
            pool.submit(pool.end(episode)).result(30)


@needs("verifiers")
def test_the_tools_of_verifiers_are_called(tasksets: None) -> None:
    with pool_of("verifiers", {"taskset": "price_tasks"}, timeout=60) as pool:
        (tool,) = pool.facts().tools
        assert tool["function"]["name"] == "shop_price"
        episode = session()
        pool.submit(pool.begin(episode)).result(60)
        assert said(pool, episode, 'shop_price("pen")') == "2"
        assert "cat" in said(pool, episode, 'shop_price("cat")')
        assert "must be JSON" in said(pool, episode, "<tool_call>x</tool_call>")
        call = '<tool_call>{"name": "shop_price", "arguments": {"item": "book"}}</tool_call>'
        assert said(pool, episode, call) == "9"
        assert step(pool, episode, "11") == Observation((), 1.0, True)


@needs("verifiers")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"taskset": "no_such_set"}, "taskset 'no_such_set' not found"),
        ({"taskset": {}}, "must be the name of a taskset"),
        (
            {"set": "word_tasks"},
            "must be those of Verifiers(taskset, env=None, index='task_index')",
        ),
    ],
)
def test_a_wrong_taskset_is_found_at_the_start(arguments: Any, expected: str) -> None:
    assert expected in refusal("verifiers", arguments)
