"""Reward functions in processes: what hangs, ends or fails costs its own item and nothing else."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxrl
from jaxrl.data.example import Example
from jaxrl.data.source import open_source
from jaxrl.errors import RunError, UserError
from jaxrl.process import user_process
from jaxrl.process.user_process import Call
from jaxrl.rewards import verifiers
from jaxrl.rewards.functions import Function, find
from jaxrl.rewards.reward_pool import Item, RewardPool, Scores

HERE = Path(__file__).parent.parent / "support" / "reward_functions.py"
NAMES = (
    *("length", "arguments", "names", "as_numpy", "as_told", "trouble", "slow", "result"),
    *("waits", "blocks", "shares", "one_at_a_time", "imported", "forks", "forks_awaited", "writes"),
    *("with_messages", "as_of_trl", "of_texts", "stripped"),
)
TIMEOUT = 1.0


def items(*completions: str, **columns: object) -> list[Item]:
    return [Item("p", completion, "5", columns) for completion in completions]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    sources = [find(f"{HERE}:{name}") for name in NAMES]
    with RewardPool(sources, workers=2, timeout=TIMEOUT, startup=60) as made:
        yield made


def judge(pool: RewardPool, name: str, *completions: str, **columns: object) -> Scores:
    function = NAMES.index(name)
    return pool.judge(function, items(*completions, **columns)).result(30)


def test_values_come_back_in_order(pool: RewardPool) -> None:
    texts = ["x" * n for n in (3, 1, 4, 1, 5, 9, 2, 6) * 9]
    assert judge(pool, "length", *texts).values == [len(text) for text in texts]
    assert judge(pool, "as_numpy", "abc", "d").values == [3, 1]
    assert judge(pool, "as_told", "true", "false", "else").values == [1, 0, None]
    assert judge(pool, "length").values == []


def test_a_function_may_say_something_of_a_completion(pool: RewardPool) -> None:
    texts = ["abcd", "", "e"] * 9
    scores = judge(pool, "with_messages", *texts)
    assert scores.values == [len(text) for text in texts] and not scores.failures
    said = [scores.messages[i] for i in range(len(texts))]
    assert said == [f"{text[:3]} has {len(text)}" if text else "" for text in texts]
    assert not any(judge(pool, "length", "a", "b").messages.values())


def test_a_function_that_forks_shifts_no_reward(pool: RewardPool) -> None:
    """What its children return, or raise, belongs to no call."""
    for name in ("forks", "forks_awaited"):
        for texts in (["a"], ["bb", "ccc"], ["dddd"] * 3):
            scores = judge(pool, name, *texts)
            assert scores.values == [len(text) for text in texts] and not scores.failures
        assert judge(pool, "length", "abc", "d").values == [3, 1]


def test_what_is_no_answer_is_not_taken_for_one(pool: RewardPool) -> None:
    before = pool.lost
    assert judge(pool, "writes", "a", "bb").values == [1, 2]
    assert judge(pool, "length", "abc", "d").values == [3, 1]
    assert pool.lost == before


def test_a_flood_of_what_is_no_answer_costs_its_own_item(pool: RewardPool) -> None:
    scores = judge(pool, "writes", "a", "flood", "ccc")
    assert scores.values == [1, None, 3] and "not an answer" in scores.failures[1].text
    assert judge(pool, "length", "abc", "d").values == [3, 1]


def test_memory_has_a_limit() -> None:
    sources = [find(f"{HERE}:hungry")]
    with RewardPool(sources, workers=1, timeout=20, startup=60, memory_mb=4096) as pool:
        scores = pool.judge(0, items("a", "hungry", "ccc")).result(60)
    assert scores.values == [1, None, 3]
    (failure,) = scores.failures.values()
    assert failure.kind == "exception" and "reward.memory_mb=4096" in failure.text


@pytest.mark.parametrize(
    ("bad", "most", "kind", "told"),
    [
        ("breeds", 20, "exception", "more than reward.max_processes=20"),
        ("breeds", 100, "timeout", "no answer after 3 s"),
        ("leaves", 100, "exception", "exit code 3"),
    ],
)
def test_the_number_of_processes_has_a_limit_and_none_is_left(
    bad: str, most: int, kind: str, told: str, tmp_path: Path
) -> None:
    """However their parent ends, also those of other sessions."""
    sources = [find(f"{HERE}:breeds")]
    with RewardPool(sources, workers=1, timeout=3, startup=60, max_processes=most) as pool:
        texts = items("a", bad, "ccc", folder=str(tmp_path))
        scores = pool.judge(0, texts).result(60)
    assert scores.values == [1, None, 3]
    assert scores.failures[1].kind == kind and told in scores.failures[1].text
    children = [int(path.name) for path in tmp_path.iterdir()]
    assert len(children) > 20
    wait_for(lambda: not any(map(alive, children)), 10)


PRINTS = """
import sys
from jaxrl.rewards.functions import find
from jaxrl.rewards.reward_pool import Item, RewardPool
with RewardPool([find(sys.argv[1])], workers=1, timeout=60, startup=60) as pool:
    print(pool.judge(0, [Item("p", "abc", None, {})]).result(60).values)
"""


def test_what_functions_print_has_a_limit() -> None:
    """20 MB on both outputs: the beginning is shown, and that there was more."""
    command = [sys.executable, "-c", PRINTS, f"{HERE}:prints"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[3.0]\n", done.stderr[:2000]
    assert 10_000 < len(done.stderr) < 100_000
    assert done.stderr.startswith("xxx") and "more output" in done.stderr


def test_a_function_gets_the_columns_that_it_names(pool: RewardPool) -> None:
    assert judge(pool, "arguments", "c", "c", level=2).values == [1, 1]
    # answer, a, b and, as the signature does not name them, prompts.
    assert judge(pool, "names", "x", a=1, b=2).values == [4]


CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "p"})
TEXT = "were text, as the prompts are"
MESSAGES = "were lists of messages, as the prompts are; `completion_texts` has"


def conversational(*completions: str) -> list[Item]:
    columns = {"messages": CHAT}
    return [Item("p", text, "5", columns, conversational=True) for text in completions]


def test_completions_have_the_form_of_their_prompts(pool: RewardPool) -> None:
    """Messages where the data has messages, as in TRL, else text; by its own name always text. A
    function that takes the one for the other says which it got."""

    def judged(name: str, rows: list[Item]) -> Scores:
        return pool.judge(NAMES.index(name), rows).result(30)

    text, chat, both = (
        items("a", "bb"),
        conversational("a", "bb"),
        [*items("a"), *conversational("bb")],
    )
    assert judged("as_of_trl", chat).values == [901, 902]
    assert judged("stripped", text).values == judged("of_texts", text).values == [1, 2]
    assert judged("of_texts", chat).values == judged("of_texts", both).values == [1, 2]
    for name, rows, form in (("as_of_trl", text, TEXT), ("stripped", chat, MESSAGES)):
        failures = judged(name, rows).failures
        assert sorted(failures) == [0, 1] and all(form in one.text for one in failures.values())
    mixed = judged("stripped", both)
    assert mixed.values == [1, None] and MESSAGES in mixed.failures[1].text
    # What comes with jaxrl reads text, and says nothing of forms.
    with RewardPool([find("number")], workers=1, timeout=5, startup=60) as verifier:
        assert verifier.judge(0, conversational("5", "4")).result(30).values == [1, 0]


def test_the_processes_are_light(pool: RewardPool) -> None:
    assert judge(pool, "imported", "").values == [1]


@pytest.mark.parametrize(
    ("bad", "kind", "told"),
    [
        ("regex", "timeout", f'"{HERE}", line \\d+ in trouble'),
        ("exit", "exception", "ended with exit code 3"),
        ("segfault", "exception", f"SIGSEGV(.|\n)*{HERE}"),
    ],
)
def test_a_lost_process_costs_its_own_item(
    pool: RewardPool, bad: str, kind: str, told: str
) -> None:
    before = pool.lost
    scores = judge(pool, "trouble", "a", "bb", bad, "dddd")
    assert scores.values == [1, 2, None, 4]
    (failure,) = scores.failures.values()
    assert failure.kind == kind and 2 in scores.failures
    assert re.search(told, failure.text), failure.text
    assert pool.lost == before + 2, "the call, then the item by itself"
    assert judge(pool, "length", "abc", "d").values == [3, 1]


def test_an_exception_costs_its_own_item(pool: RewardPool) -> None:
    before = pool.lost
    scores = judge(pool, "trouble", "a", "raise", "ccc", "leave")
    assert scores.values == [1, None, 3, None] and pool.lost == before
    assert {f.kind for f in scores.failures.values()} == {"exception"}
    first = scores.failures[1].text
    assert "KeyError: 'no such thing'" in first and "in trouble" in first
    assert str(Path(jaxrl.__file__).parent) not in first, "the user's frames alone"
    assert "SystemExit: bye" in scores.failures[3].text


def test_a_call_that_is_slow_as_a_whole_is_judged_one_by_one(pool: RewardPool) -> None:
    scores = judge(pool, "slow", *"abcdef")
    assert scores.values == [1] * 6 and scores.slow_calls == 2 and not scores.failures


def test_awaited_calls_run_at_the_same_time(pool: RewardPool) -> None:
    started = time.monotonic()
    scores = judge(pool, "waits", *["x"] * 60)
    assert scores.values == [1] * 60
    assert time.monotonic() - started < 3, "60 calls of 0.3 s, in 2 processes: 9 s one by one"


def test_an_awaited_call_that_is_late_is_cancelled(pool: RewardPool) -> None:
    before = pool.lost
    scores = judge(pool, "waits", "x", "hang", "y")
    assert scores.values == [1, None, 1] and scores.failures[1].kind == "timeout"
    assert pool.lost == before
    assert judge(pool, "shares", *"abcd").values == judge(pool, "shares", *"abcd").values == [1] * 4


def test_awaited_calls_that_wait_for_one_another_are_judged_again(pool: RewardPool) -> None:
    """Each takes 0.7 of the time that it has, and each process runs one at a time."""
    scores = judge(pool, "one_at_a_time", *"abcd")
    assert scores.values == [1] * 4 and not scores.failures and scores.slow_calls == 2


def test_an_async_function_that_blocks_is_killed(pool: RewardPool) -> None:
    scores = judge(pool, "blocks", "a", "block", "b", "c")
    assert scores.values == [2, None, 2, 2] and scores.failures[1].kind == "timeout"


@pytest.mark.parametrize(
    ("completion", "told"),
    [
        ("too few", "returned 0 numbers for 1"),
        ("too many", "returned 2 numbers for 1"),
        ("a number", r"returned 1.0 \(float\)"),
        ("text", r"returned '1' \(str\) for 1"),
        ("a dict", r"\(dict\)"),
        ("nan", r"nan \(float\).*finite number, or None"),
        ("inf", r"-inf \(float\)"),
        ("texts", r"'1' \(str\) for a completion"),
        ("huge", r"10+\.\.\. \(int\)"),
        ("an array", r"\(ndarray\)"),
    ],
)
def test_a_result_that_is_none_is_refused(completion: str, told: str) -> None:
    function = Function(find(f"{HERE}:result"))
    with pytest.raises(UserError, match=f"result returned.*{told}|result.*{told}"):
        asyncio.run(function.run(items(completion), Call(1, -1, timeout=1.0)))


def test_a_refused_result_ends_its_job_alone(pool: RewardPool) -> None:
    with pytest.raises(UserError, match="reward_functions.py:result returned nan"):
        judge(pool, "result", "nan")
    assert judge(pool, "length", "abc").values == [3]


def test_too_many_failures_end_the_job_at_once(pool: RewardPool) -> None:
    texts = ["raise"] * 3 + ["x"] * 5
    future = pool.judge(NAMES.index("trouble"), items(*texts), limit=2)
    with pytest.raises(RunError, match="3 of 8 completions(.|\n)*KeyError: 'no such thing'"):
        future.result(30)
    kept = pool.judge(NAMES.index("trouble"), items(*texts), limit=3).result(30)
    assert len(kept.failures) == 3 and kept.values[3:] == [1] * 5


def test_a_closed_pool_leaves_no_process_and_no_waiting_future() -> None:
    pool = RewardPool([find(f"{HERE}:trouble")], workers=1, timeout=60, startup=60)
    pool.facts()
    future = pool.judge(0, items("regex"))
    time.sleep(0.2)
    pool.close()
    with pytest.raises(RunError, match="closed"):
        future.result(1)
    with pytest.raises(RunError, match="closed"):
        pool.judge(0, items("a")).result(1)
    assert not pool._thread.is_alive()


PARENT = """
import sys, time
from jaxrl.rewards.functions import find
from jaxrl.rewards.reward_pool import Item, RewardPool
pool = RewardPool([find(sys.argv[1])], workers=1, timeout=1000, startup=60)
pool.judge(0, [Item("p", sys.argv[2], None, {})])
time.sleep(1000)
"""


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    """Also where the function keeps the interpreter to itself and has started a process."""
    ids = tmp_path / "ids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, f"{HERE}:family", str(ids)])
    try:
        wait_for(lambda: ids.exists() and len(ids.read_text().split()) == 2, 30)
        family = [int(word) for word in ids.read_text().split()]
        assert all(map(alive, family))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(lambda: not any(map(alive, family)), 5)


def test_what_a_process_starts_before_it_is_dead_is_killed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often a family has grown since it was listed, and where a list lacks those whose
    parent was reaped while it was made."""
    killed = list[int]()

    class Started(int):
        def kill(self) -> None:
            killed.append(self)

    monkeypatch.setattr(user_process.os, "killpg", lambda guard, number: killed.append(-guard))
    for lists in ([], [[0, 1]], [[0], [0, 1], [2, 3]], [[0, 1], [], [2], [2, 3]]):
        listed = iter([*lists, [], []])
        monkeypatch.setattr(user_process, "family", lambda _, i=listed: [*map(Started, next(i))])
        killed.clear()
        user_process.kill_family(9)
        assert killed == [*sum(lists, []), -9] and next(listed, None) is None


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def wait_for(true, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "too late"
        time.sleep(0.05)


def test_a_file_that_changes_is_refused_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = "import os\ndef f(completions):\n    os._exit(1)\n"
    path.write_text(text)
    with RewardPool([find(f"{path}:f")], workers=1, timeout=5, startup=60) as pool:
        pool.facts()
        path.write_text(text + "#\n")
        with pytest.raises(UserError, match=r"mine\.py has changed since the run began"):
            pool.judge(0, items("a", "b")).result(30)


def test_a_process_that_ends_between_two_calls_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = "import os, threading\ndef f(completions):\n    if completions[0] == 'later':\n"
    text += "        threading.Timer(0.2, os._exit, [1]).start()\n    return [1.0]\n"
    path.write_text(text)
    with RewardPool([find(f"{path}:f")], workers=1, timeout=5, startup=60) as pool:
        assert pool.judge(0, items("later")).result(30).values == [1]
        wait_for(lambda: pool.lost == 1, 10)
        scores = pool.judge(0, items("a")).result(30)
        assert scores.values == [1] and not scores.failures


def test_where_a_process_cannot_be_replaced_all_end(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = "import os, time\ndef f(completions):\n    time.sleep(0.1)\n"
    text += "    return [os._exit(1) if c == 'exit' else os.getpid() for c in completions]\n"
    path.write_text(text)
    with RewardPool([find(f"{path}:f")], workers=2, timeout=5, startup=60) as pool:
        pids: set[float | None] = set()

        def both_have_started() -> bool:
            pids.update(pool.judge(0, items("a", "b")).result(30).values)
            return len(pids) == 2

        wait_for(both_have_started, 30)
        path.write_text(text + "#\n")
        assert pool.judge(0, items("exit")).result(30).values == [None]
        wait_for(lambda: not any(alive(int(pid or 0)) for pid in pids), 10)
        with pytest.raises(UserError, match="has changed since the run began"):
            pool.judge(0, items("a")).result(1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("mathe", "did you mean math"),
        ("nonsense", "path/to/file.py:function"),
        ("no/such.py:f", "no file .*no/such.py"),
        ("a.py:", "must be path/to/file.py:function"),
        ("my-package:f", "neither a .py file nor"),
        ("regex:(", "not a regular expression"),
    ],
)
def test_what_names_nothing_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        find(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{HERE}:lenght", "no function lenght .did you mean length"),
        (f"{HERE}:THREE", "must be a function"),
        (f"{HERE}:Judge", "is a class"),
        (f"{HERE}:no_completions", r"no_completions\(prompts, answers\).*parameter `completions`"),
        (f"{HERE}:positional", "prompts cannot be named"),
        ("no_such_package.rewards:f", "cannot be imported: ModuleNotFoundError"),
        ("os.path:joint", "no function joint"),
    ],
)
def test_what_cannot_be_called_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Function(find(text))


def test_an_import_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("x = 1\ny = x / 0\ndef f(completions):\n    return []\n")
    with RewardPool([find(f"{path}:f")], workers=2, timeout=5, startup=60) as pool:
        with pytest.raises(UserError, match=r"ZeroDivisionError.*mine\.py, line 2"):
            pool.facts()
        with pytest.raises(UserError, match="ZeroDivisionError"):
            pool.judge(0, items("a")).result(5)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a\nb</think>\n<answer>5</answer>\n", 1),
        ("a, as the template has begun</think><answer>5</answer>", 1),
        ("<think>a</think> so <answer>5</answer>", 0),
        ("<think>a</think><answer>5</answer> and more", 0),
        ("<think>a</think><answer>5</answer><answer>6</answer>", 0),
        ("<think>a<think>b</think><answer>5</answer>", 0),
        ("<answer>5</answer>", 0),
        ("<think>a", 0),
        ("", 0),
    ],
)
def test_the_format(completion: str, score: float) -> None:
    assert bool(re.search(find("format").place, completion)) == score


def test_a_completion_that_never_ends_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation: math-verify computes what the completion says."""
    pytest.importorskip("math_verify")
    monkeypatch.setattr(verifiers, "TIMEOUT_S", 1.0)
    verifiers._pool.cache_clear()
    math = verifiers.verifier("math")
    assert math(r"$\prod_{k=1}^{10^7} k$", Example("p", answer="5")) == 0
    assert math("so 5", Example("p", answer="5")) == 1
    assert math("so 5", Example("p", answer=None)) is None
    assert math("5", Example("p", answer="")) is None
    verifiers._pool("math").close()
    verifiers._pool.cache_clear()


def test_the_scorers_of_reasoning_gym_run_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its countdown computes the expression that the completion is."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(verifiers, "TIMEOUT_S", 1.0)
    verifiers._pool.cache_clear()
    example = open_source("reasoning_gym/countdown", split="eval")[0]
    auto = verifiers.verifier("auto")
    answer = example.columns["entry"]["metadata"]["expression"]
    assert auto(answer, example) == verifiers.VERIFIERS["auto"](answer, example) == 1
    assert auto("9**9**9**9", example) == 0
    assert auto(answer, example) == 1
    verifiers._pool("auto").close()
    verifiers._pool.cache_clear()
