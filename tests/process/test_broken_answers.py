"""Processes whose user code writes into their answers, or breaks them: its own item is lost."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from jaxrl.environments.environment_pool import EnvironmentPool
from jaxrl.environments.environment_process import Observation, Session
from jaxrl.environments.environment_process import find as find_environment
from jaxrl.errors import UserError
from jaxrl.process.user_code import Failure
from jaxrl.rewards.functions import find
from jaxrl.rewards.reward_pool import Item, RewardPool, Scores

HERE = Path(__file__).parent.parent / "support" / "garbling.py"
TIMEOUT = 2.0
KEYS = itertools.count()
NO_REWARDS: list[dict[str, Any]] = [
    {},
    {"begin": 0},
    {"begin": True},
    {"imports": True},
    {"values": []},
    {"values": [1.0, 1.0, 1.0, 1.0]},
    {"values": ["1"]},
    {"values": [True]},
    {"values": [1.0], "messages": ["a", "b"]},
    {"values": [1.0], "messages": [7]},
    {"values": 1.0},
    {"values": [float("nan")]},
    {"items": [0], "values": [1.0]},
    {"failure": "no"},
    {"failure": ["strange", "no"]},
    {"values": [1.0], "more": 1},
    {"ready": 1, "signatures": []},
    {"ready": 1, "facts": None},
    {"refused": 7},
]
NO_ANSWERS: list[dict[str, Any]] = [
    {},
    {"result": None},
    {"result": {}},
    {"result": {"messages": [], "reward": None}},
    {"result": {"messages": [{"role": "user"}], "reward": None, "done": True}},
    {"result": {"messages": "ab", "reward": None, "done": True}},
    {"result": {"messages": [], "reward": "1", "done": True}},
    {"result": {"messages": [], "reward": None, "done": 1}},
    {"result": 7},
    {"result": "another order's"},
    {"result": None, "more": True},
    {"ready": 1, "facts": None},
    {"failure": "no"},
    {"failure": ["strange", "no"]},
    {"begin": False},
    {"items": [0], "values": [1.0]},
]


def judged(pool: RewardPool, *completions: str, function: int = 0) -> Scores:
    items = [Item("p", completion, "5", {}) for completion in completions]
    return pool.judge(function, items).result(60)


def session(**row: object) -> Session:
    return Session(next(KEYS), {"prompt": "p", "answer": None, **row})


def step(pool: EnvironmentPool, episode: Session, text: str) -> Observation | Failure:
    return pool.submit(pool.step(episode, text)).result(60)


def environments(name: str, **arguments: Any) -> EnvironmentPool:
    source = find_environment(f"{HERE}:{name}", arguments)
    return EnvironmentPool(source, workers=1, timeout=TIMEOUT, startup=60)


SOME = [pytest.param(8), pytest.param(1, marks=pytest.mark.slow)]
"""One in so many of the answers."""


@pytest.mark.parametrize("every", SOME)
def test_rewards_that_write_what_is_no_answer_lose_their_own_item(every: int) -> None:
    """Nothing raises a KeyError, and no other item gets another value."""
    with RewardPool([find(f"{HERE}:judge")], workers=2, timeout=TIMEOUT, startup=60) as pool:
        for answer in NO_REWARDS[::every]:
            scores = judged(pool, "a", json.dumps(answer), "ccc")
            assert scores.values == [1, None, 3], answer
            (failure,) = scores.failures.values()
            assert failure.kind == "exception"
            assert "it wrote something that is not an answer: {" in failure.text


@pytest.mark.parametrize("what", ["load", "close", "deaf", "write"])
def test_a_reward_that_breaks_its_process_costs_seconds_and_not_the_start(what: str) -> None:
    with RewardPool([find(f"{HERE}:judge")], workers=1, timeout=TIMEOUT, startup=60) as pool:
        judged(pool, "a")
        started = time.monotonic()
        scores = judged(pool, "a", what, "ccc")
        assert scores.values[0] == 1 and scores.values[2] == 3
        later = judged(pool, "bb", "dddd")
        assert later.values == [2, 4]
        assert time.monotonic() - started < 30, "60 s are for what a process imports"


def test_a_message_that_is_too_long_names_the_limit() -> None:
    with RewardPool([find(f"{HERE}:talks")], workers=1, timeout=30, startup=60) as pool:
        scores = judged(pool, "10", "3000000", "600000", "600000")
    assert scores.values == [1, None, 1, 1], "two of 0.6 MB are too long together only"
    assert [len(scores.messages[i]) for i in (0, 2, 3)] == [10, 600_000, 600_000]
    (failure,) = scores.failures.values()
    assert "garbling.py:talks returned 2.9 MB, longer than 1 MB" in failure.text


@pytest.mark.parametrize("every", SOME)
def test_environments_that_write_what_is_no_answer_lose_their_own_episode(every: int) -> None:
    with environments("Garbles") as pool:
        other = session()
        step(pool, other, "a")
        for number, answer in enumerate(NO_ANSWERS[::every]):
            failure = step(pool, session(), json.dumps(answer))
            assert isinstance(failure, Failure) and failure.kind == "exception", answer
            assert "it wrote something that is not an answer: {" in failure.text
            if number % 5 == 0:
                result = step(pool, other, "a")
                assert isinstance(result, Observation), result
        heard = [observation.messages[0]["content"] for _, observation in other.turns]
        assert heard == [f"heard {number + 1}" for number in range(len(heard))] and heard[1:]


@pytest.mark.parametrize("what", ["close", "deaf", "load", "write", '{"result": 7}'])
def test_an_environment_that_breaks_its_process_costs_no_other_episode(what: str) -> None:
    """Those that were in the process together run one by one until the guilty one is known."""
    with environments("Garbles") as pool:
        episodes = [session() for _ in range(6)]
        for episode in episodes:
            step(pool, episode, "a")
        started = time.monotonic()
        texts = ["b", "b", what, "b", what, "b"]
        asked = [pool.submit(pool.step(e, text)) for e, text in zip(episodes, texts, strict=True)]
        results = [future.result(60) for future in asked]
        for result, text in zip(results, texts, strict=True):
            if text == "b":
                assert isinstance(result, Observation), result
                assert result.messages[0]["content"] == "heard 2"
        later = [step(pool, e, "c") for e, text in zip(episodes, texts, strict=True) if text == "b"]
        assert all(isinstance(r, Observation) and "heard 3" in str(r.messages) for r in later)
        assert time.monotonic() - started < 50, "60 s are for what a process imports"


def test_what_an_environment_returns_is_shown_cut_or_named() -> None:
    with environments("Messages") as pool:

        def said(text: str) -> Any:
            return step(pool, session(), text)

        assert [m["content"] for m in said("generator").messages] == ["a", "b"]
        (message,) = said("fields").messages
        assert message == {"role": "tool", "content": "7", "name": "f", "id": [1, 2]}
        for text in ("big", "many"):
            contents = [message["content"] for message in said(text).messages]
            assert "characters are left out)" in contents[-1]
            assert 99_000 < sum(map(len, contents)) < 101_000
        for text, expected in {
            "breaks": "KeyError: 'no more'",
            "odd": "OSError: odd",
            "no json": "`step` returned the message .*: it must be JSON",
            "none": "`step` returned the message .* the texts `role` and `content`",
            "parts": "`step` returned the message .* the texts `role` and `content`",
            "dict": "`step` returned the messages .*: it must be a list",
            "big field": "what `step` returned is 2.9 MB, longer than 1 MB",
            "big error": "ValueError: invalid literal",
            "half": "it must be JSON .*surrogates not allowed",
        }.items():
            failure = said(text)
            assert isinstance(failure, Failure) and failure.kind == "exception", text
            pytest.raises(UserError, _raise, failure.text).match(f"(?s).*{expected}")
        assert pool.lost == 0
        failure = pool.submit(pool.begin(session(size=3_000_000))).result(60)
        assert isinstance(failure, Failure)
        assert "what `reset` returned is 2.9 MB, longer than 1 MB" in failure.text
        whole = pool.submit(pool.begin(session(size=900_000))).result(60)
        assert isinstance(whole, str) and len(whole) == 900_000, "prompts are not cut"


def _raise(text: str) -> None:
    raise UserError(text)


@pytest.mark.parametrize("long", [False, True])
def test_too_many_or_too_long_tools_are_named(long: bool) -> None:
    with environments("ManyTools", long=long) as pool, pytest.raises(UserError) as caught:
        pool.facts()
    count = 1 if long else 10_000
    assert f"schemas of its tools ({count}) are" in str(caught.value)
    assert "longer than 1 MB" in str(caught.value) and len(str(caught.value)) < 1000
