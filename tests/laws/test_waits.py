"""Every wait has an end: one without a timeout of its own stands here, with what bounds it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "jaxrl"
WAITS = ("join", "result", "wait", "get", "acquire")
CALLS = "a call: `result` looks at its deadline, and at the worker, twice a second"
ENDED = "it has ended: this only takes its value"
QUEUE = "a daemon thread that waits for work; None is its end"
CHECKPOINT = "runs inside the calls `save` and `saved`, which deadlines.checkpoint bounds"
SCORES = "the reward pool ends each item after reward.timeout, and its process with it"
ANSWERS = "the pool of environments ends each call after environment.timeout, and its process too"
TASK = "a task that keeps a connection or a server, and ends with its episode or its process"
BOUNDED = {
    ("aot/subprocess_compile.py", "child.wait()"): "its output has ended, or it was killed",
    (
        "aot/subprocess_compile.py",
        "ended.wait()",
    ): "in a thread that nobody waits for, until the caller ends",
    (
        "aot/compile_report.py",
        "job.result()",
    ): "a compiler, whose program is named before it starts",
    ("environments/packages/mcp.py", "self._ended.wait()"): TASK,
    ("environments/packages/verifiers_v1.py", "asked.result()"): ENDED,
    ("environments/packages/verifiers_v1.py", "asyncio.Event().wait()"): TASK,
    ("environments/packages/verifiers_v1.py", "self._requests.get()"): ANSWERS,
    ("environments/packages/verifiers_v1.py", "self.run.result()"): ENDED,
    ("environments/episode_batches.py", "future.result()"): ANSWERS,
    ("formats/hub.py", "answer.result()"): ENDED,
    ("roles/actor.py", "saving.wait()"): CHECKPOINT,
    ("checkpoint/writer.py", "pending.saved.result()"): CALLS,
    ("checkpoint/writer.py", "rollout.result()"): CALLS,
    ("checkpoint/writer.py", "self._queue.get()"): QUEUE,
    ("run/launch.py", "started.result()"): CALLS,
    ("run/attempt.py", "exported.result()"): CALLS,
    ("run/loop.py", "future.result()"): CALLS,
    ("profile/traces.py", "future.result()"): CALLS,
    ("run/reporting.py", "future.result()"): CALLS,
    ("run/reporting.py", "futures['score.reward'].result()"): ENDED,
    ("run/reporting.py", "futures[key].result()"): ENDED,
    ("run/reporting.py", "rewards.result()"): ENDED,
    ("process/user_process.py", "_NUMBER.get()"): "a variable of the context: no wait",
    ("process/user_code.py", "self._closing.wait()"): "a daemon thread that waits for `close`",
    ("process/user_code.py", "self._facts.result()"): "a process loads within its start-up limit",
    ("rewards/reward_pool.py", "self._idle.get()"): SCORES,
    ("rewards/reward_pool.py", "self._facts.result()"): "it is done",
    ("rewards/batch_rewards.py", "f.result()"): SCORES,
    ("rewards/batch_rewards.py", "self.pool.judge(i, items).result()"): SCORES,
    ("rewards/verifiers.py", "_pool(name).judge(0, [item]).result()"): SCORES,
    ("runtime/worker.py", "self._calls.get()"): QUEUE,
    ("runtime/ray/remote_calls.py", "value.result()"): "the driver's own value, which is there",
    ("runtime/ray/worker_group.py", "reported.result()"): ENDED,
    ("runtime/ray/remote_calls.py", "super().result()"): CALLS,
    ("sampling/engine.py", "sample.reply.result()"): ENDED,
    ("teacher/cache.py", "writing.result()"): "a thread that writes one shard, then ends",
    ("teacher/remote.py", "answer.result()"): ENDED,
    ("teacher/server.py", "lock.acquire()"): "the compilation that holds it ends",
    (
        "teacher/server.py",
        "self._thread.join()",
    ): "its loop ends with the socket that it listens to",
    ("teacher/server.py", "self._turns.acquire()"): "inside asyncio.timeout(limits.wait_s)",
    (
        "teacher/server.py",
        "self.turns.submit(self._load, source, jnp.dtype(dtype), offload).result()",
    ): ("weights are read before the server listens"),
    ("telemetry/trackers.py", "self._waiting.get()"): QUEUE,
}
"""File and call -> why it ends."""


def bare_waits() -> set[tuple[str, str]]:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or node.args or node.keywords:
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
                found.add((path.relative_to(PACKAGE).as_posix(), ast.unparse(node)))
    return found


def test_every_wait_without_a_timeout_has_a_reason() -> None:
    found = bare_waits()
    assert found - BOUNDED.keys() == set(), "give it a timeout, or a reason here"
    assert BOUNDED.keys() - found == set(), "these are no more: take them out of the list"
