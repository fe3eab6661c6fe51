"""Environments in processes: what hangs, ends or fails costs its own episode and nothing else."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from jaxrl.environments.environment_pool import EnvironmentPool
from jaxrl.environments.environment_process import Observation, Session, find
from jaxrl.errors import RunError, UserError
from jaxrl.process.user_code import Failure

HERE = Path(__file__).parent.parent / "support" / "episode_environments.py"
TIMEOUT = 1.5
KEYS = itertools.count()


def made(name: str, workers: int = 2, **limits: float) -> EnvironmentPool:
    given = {"timeout": TIMEOUT, "startup": 60, **limits}
    return EnvironmentPool(find(f"{HERE}:{name}"), workers=workers, **given)


@pytest.fixture(scope="module")
def echo() -> Iterator[EnvironmentPool]:
    with made("Echo") as pool:
        yield pool


@pytest.fixture(scope="module")
def waits() -> Iterator[EnvironmentPool]:
    with made("Waits") as pool:
        yield pool


def session(**row: object) -> Session:
    return Session(next(KEYS), {"prompt": "p", "answer": None, **row})


def step(pool: EnvironmentPool, episode: Session, text: str) -> Observation | Failure:
    return pool.submit(pool.step(episode, text)).result(30)


def words(result: Observation | Failure) -> str:
    assert isinstance(result, Observation), result
    (message,) = result.messages
    return message["content"]


def lines(pool: EnvironmentPool, episodes: list[Session], text: str) -> list[str]:
    asked = [pool.submit(pool.step(episode, text)) for episode in episodes]
    return [words(future.result(30)) for future in asked]


def test_an_episode_has_an_instance_of_its_own(echo: EnvironmentPool) -> None:
    episodes = [session() for _ in range(6)]
    assert lines(echo, episodes, "a") == ["a"] * 6
    assert lines(echo, episodes[::2], "b") == ["a b"] * 3
    assert lines(echo, episodes, "c") == ["a b c", "a c"] * 3
    held = [process.sessions for process in echo.processes]
    assert sorted(len(keys & {e.key for e in episodes}) for keys in held) == [3, 3]
    half = step(echo, episodes[0], "half")
    assert half == Observation(({"role": "user", "content": "a b c half"},), 0.5, False)
    assert step(echo, episodes[0], "done") == Observation(
        ({"role": "user", "content": "bye"},), 1.0, True
    )
    for episode in episodes:
        echo.submit(echo.end(episode)).result(30)
    assert not any(keys & {e.key for e in episodes} for keys in held)


@pytest.mark.parametrize(
    ("bad", "kind", "expected", "lost"),
    [
        ("raise", "exception", "KeyError: 'no such thing'", 0),
        ("leave", "exception", "SystemExit: bye", 0),
        ("regex", "timeout", " in trouble", 1),
        ("exit", "exception", "its process ended with exit code 3", 1),
        ("segfault", "exception", "SIGSEGV", 1),
        ("flood", "exception", "bytes that are not an answer", 1),
    ],
)
def test_trouble_costs_its_own_episode(
    echo: EnvironmentPool, bad: str, kind: str, expected: str, lost: int
) -> None:
    """Of eight in two processes the other seven go on, the process's own from where they were."""
    episodes, before = [session() for _ in range(8)], echo.lost
    lines(echo, episodes, "a")
    asked = [echo.submit(echo.step(e, bad if e is episodes[3] else "b")) for e in episodes]
    results = [future.result(30) for future in asked]
    failure = results.pop(3)
    assert isinstance(failure, Failure) and failure.kind == kind and expected in failure.text
    assert "jaxrl/environments" not in failure.text, "the user's frames alone"
    assert [words(result) for result in results] == ["a b"] * 7
    assert echo.lost == before + lost
    del episodes[3]
    assert lines(echo, episodes, "c") == ["a b c"] * 7


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EnvironmentPool, Path]]:
    folder = tmp_path_factory.mktemp("stages")
    source = find(f"{HERE}:Stages", {"folder": str(folder)})
    with EnvironmentPool(source, workers=1, timeout=TIMEOUT, startup=60) as pool:
        pool.facts()
        yield pool, folder


@pytest.mark.parametrize("stage", ["__init__", "reset", "step", "close"])
@pytest.mark.parametrize(
    ("deed", "reason", "lost"),
    [("raise", "KeyError", 0), ("exit", "exit code 3", 1), ("hang", "no answer after 1.5 s", 1)],
)
def test_an_episode_that_goes_wrong_at_any_stage_ends_itself_only(
    stages: tuple[EnvironmentPool, Path], stage: str, deed: str, reason: str, lost: int
) -> None:
    """In one process: each episode ends well or fails with a reason, and `close` is called once on
    each instance that began, where its process was not lost, and on no other."""
    pool, folder = stages
    while not pool.processes:  # the one that takes the place of a lost one makes an instance too
        time.sleep(0.02)
    (folder / "log").write_text("")
    if stage == "__init__":
        (folder / stage).write_text(deed)
    bad, before = session(**({} if stage == "__init__" else {stage: deed})), pool.lost

    async def whole(episode: Session) -> list[Observation | Failure]:
        answers: list[Observation | Failure] = []
        for text in "abc":
            answers.append(await pool.step(episode, text))
            if isinstance(answers[-1], Failure):
                if not lost:  # nobody should ask again
                    answers.append(await pool.step(episode, text))
                break
        await pool.end(episode)
        return answers

    played = [pool.submit(whole(e)) for e in (session(), bad, session(reset="wait"), session())]
    results = [future.result(30) for future in played]
    failed = [answers for answers in results if isinstance(answers[0], Failure)]
    good = [answers for answers in results if answers not in failed]
    assert [[words(answer) for answer in answers] for answers in good] == [
        ["a", "a b", "a b c"]
    ] * len(good)
    assert len(failed) == (stage != "close")
    for first, *_ in failed:
        assert isinstance(first, Failure) and reason in first.text
    if stage in ("reset", "step"):
        assert failed == [results[1]]
    assert pool.lost - before == lost
    noted = [line.split(maxsplit=1) for line in (folder / "log").read_text().splitlines()]
    begun, closed = ([name for what, name in noted if what == w] for w in ("begun", "closed"))
    assert set(closed) <= set(begun)
    if not lost:
        assert sorted(closed) == sorted(begun)


def test_an_environment_may_run_a_loop_of_its_own(echo: EnvironmentPool) -> None:
    assert lines(echo, [session() for _ in range(3)], "run") == ["run"] * 3


def test_a_fork_answers_once(echo: EnvironmentPool) -> None:
    episode = session()
    assert words(step(echo, episode, "fork")) == "fork"
    assert words(step(echo, episode, "a")) == "fork a"


def test_a_call_does_not_wait_on_anothers_time() -> None:
    """Eight calls of 0.4 s, one after the other in one process, with 1.5 s for each."""
    with made("Echo", workers=1) as pool:
        assert lines(pool, [session() for _ in range(8)], "slow") == ["slow"] * 8


def test_what_is_awaited_runs_at_the_same_time(waits: EnvironmentPool) -> None:
    waits.facts()
    episodes, started = [session() for _ in range(20)], time.monotonic()
    assert lines(waits, episodes, "a") == ["yes"] * 20
    assert time.monotonic() - started < 2.5, "20 calls of 0.3 s in 2 processes"
    first = waits.submit(waits.begin(session(prompt="x"))).result(30)
    assert first == "begin x"


@pytest.mark.parametrize(
    ("bad", "lost", "expected"),
    [("hang", 0, "was cancelled"), ("block", 1, "in blocks"), ("stay", 1, "no answer after 1.5 s")],
)
def test_awaited_trouble_costs_its_own_episode(
    waits: EnvironmentPool, bad: str, lost: int, expected: str
) -> None:
    waits.facts()
    episodes, before = [session() for _ in range(6)], waits.lost
    asked = [waits.submit(waits.step(e, bad if e is episodes[2] else "a")) for e in episodes]
    results = [future.result(30) for future in asked]
    failure = results.pop(2)
    assert isinstance(failure, Failure) and failure.kind == "timeout" and expected in failure.text
    assert [words(result) for result in results] == ["yes"] * 5
    assert waits.lost == before + lost


def test_an_environment_without_a_rule_keeps_its_process_and_fails_where_that_is_lost() -> None:
    with made("Random", workers=1) as pool:
        kept, ends = session(), session()
        pool.submit(pool.begin(kept)).result(30)
        said = [words(step(pool, kept, "a")) for _ in range(3)]
        assert len(set(said)) == 3
        failure = step(pool, ends, "exit")
        assert isinstance(failure, Failure) and "exit code 1" in failure.text
        failure = step(pool, kept, "b")
        assert isinstance(failure, Failure) and "is not deterministic" in failure.text
        lenient = session()
        lenient.turns = [("a", Observation(({"role": "user", "content": "recorded"},), 1.0, False))]
        lenient.strict = False
        result = step(pool, lenient, "b")
        assert isinstance(result, Observation) and result.reward == 3, "prompt, turn, observation"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing", "returned None"),
        ("text", r"returned 'hello' \(str\)"),
        ("key", "key 'message' .did you mean messages"),
        ("nan", "reward nan"),
        ("word", "reward 'much'"),
        ("half", "surrogate"),
        ("done", "done=1"),
        ("silence", "no message"),
        ("role", "role 'assistant'"),
        ("shape", "`role` and `content`"),
        ("number", "messages 7"),
    ],
)
def test_garbage_is_named(garbage: EnvironmentPool, text: str, expected: str) -> None:
    failure = step(garbage, session(), text)
    assert isinstance(failure, Failure) and failure.kind == "exception"
    pytest.raises(UserError, _raise, failure.text).match(expected)


def _raise(text: str) -> None:
    raise UserError(text)


@pytest.fixture(scope="module")
def garbage() -> Iterator[EnvironmentPool]:
    with made("Garbage", workers=1) as pool:
        yield pool


def test_tools_are_described_and_run() -> None:
    with made("Tools", workers=1) as pool:
        add, later = (tool["function"] for tool in pool.facts().tools)
        assert add["name"] == "add" and list(add["parameters"]["properties"]) == ["a", "b"]
        assert add["parameters"]["required"] == ["a"] and later["name"] == "later"
        episode = session()
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
        result = step(pool, episode, f"Hm. {call}")
        assert isinstance(result, Observation) and not result.done
        assert result.messages == ({"role": "tool", "content": "5"},)
        both = (
            call + '<tool_call>{"name": "later", "arguments": "{\\"word\\": \\"x\\"}"}</tool_call>'
        )
        result = step(pool, episode, both)
        assert [m["content"] for m in result.messages] == ["5", "X"]  # type: ignore[union-attr]
        assert words(step(pool, episode, "I call\nadd(40, b=2)")) == "42"
        assert words(step(pool, episode, "add(40, c=2)")).startswith("Error: TypeError")
        assert words(step(pool, episode, "add('x')")).startswith("Error: TypeError")
        assert "must be JSON" in words(step(pool, episode, "<tool_call>{</tool_call>"))
        assert "no tool 'f', only add, later" in words(
            step(pool, episode, '<tool_call>{"name": "f"}</tool_call>')
        )
        assert step(pool, episode, "That is 42, by add(40).") == Observation((), None, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NoSchema", "the tool bare has no schema(.|\n)*Args:"),
        ("Nothing", "neither a method `step` nor `tools`"),
        ("NeedsArguments", "cannot be made without arguments"),
        ("NoEnvironment", "is a class, it must be a subclass of"),
        ("Ecco", "no class Ecco .did you mean Echo"),
    ],
)
def test_what_is_no_environment_is_refused(name: str, expected: str) -> None:
    with made(name, workers=1) as pool:
        with pytest.raises(UserError, match=expected):
            pool.facts()
        with pytest.raises(UserError, match=expected):
            step(pool, session(), "a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("calculater", "did you mean calculator"),
        ("no/such.py:Class", "there is no file"),
        (f"{HERE}:", "must be path/to/file.py:Class"),
        ("no-module:Class", "neither a .py file nor the name of a module"),
    ],
)
def test_a_name_of_nothing_is_refused(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        find(text)


def test_a_closed_pool_leaves_no_process_and_no_waiting_future(tmp_path: Path) -> None:
    pool, ids = made("Echo", workers=1, timeout=60), tmp_path / "ids"
    future: Future[Observation | Failure] = pool.submit(pool.step(session(), f"child {ids}"))
    end = time.monotonic() + 30
    while not (ids.exists() and len(ids.read_text().split()) == 2):
        assert time.monotonic() < end
        time.sleep(0.02)
    pool.close()
    with pytest.raises(RunError, match="closed"):
        future.result(1)
    with pytest.raises(RunError, match="closed"):
        step(pool, session(), "a")
    running = [int(word) for word in ids.read_text().split()]
    end = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in running):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_memory_has_a_limit_and_no_other_file_takes_the_place_of_one(tmp_path: Path) -> None:
    path = tmp_path / "hungry.py"
    text = (
        "import os\nfrom jaxrl.environments import Environment\n"
        "class Hungry(Environment):\n    def step(self, text, messages):\n"
        "        return os._exit(1) if text == 'exit' else {'messages': str(bytearray(1 << 40))}\n"
    )
    path.write_text(text)
    source = find(f"{path}:Hungry")
    with EnvironmentPool(source, workers=1, timeout=9, startup=60, memory_mb=4096) as pool:
        failure = step(pool, session(), "eat")
        assert isinstance(failure, Failure) and failure.kind == "exception"
        assert "MemoryError (environment.memory_mb=4096 is the limit)" in failure.text
        path.write_text(text + "#\n")
        assert isinstance(step(pool, session(), "exit"), Failure)
        with pytest.raises(UserError, match=r"hungry\.py has changed since the run began"):
            step(pool, session(), "eat")
