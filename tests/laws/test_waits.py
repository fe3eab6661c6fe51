"""Every wait has an end: one without a timeout of its own stands here, with what bounds it. And one
for something outside of the run's computing is said (`process.waiting`), or stands here too.
"""

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
    ("environments/episode_batches.py", "self.pool.submit(journal.add(FACTS, known)).result()"): (
        "a line for the disk, which a thread writes"
    ),
    ("sampling/engine.py", "reply.result()"): ENDED,
    ("sampling/partial_completion.py", "reply.result()"): ANSWERS,
    ("roles/rollout.py", "future.result()"): ENDED,
    ("run/loop.py", "of_batch[0].result()"): "it is done: a replay knows it from the record",
    ("run/reporting.py", "part.result()"): ENDED,
    ("formats/hub.py", "answer.result()"): ENDED,
    ("roles/actor.py", "saving.wait()"): CHECKPOINT,
    ("checkpoint/writer.py", "pending.saved.result()"): CALLS,
    ("checkpoint/writer.py", "made.result()"): CALLS,
    ("checkpoint/writer.py", "self._queue.get()"): QUEUE,
    ("run/launch.py", "started.result()"): CALLS,
    ("run/attempt.py", "exported.result()"): CALLS,
    ("run/batch_by_hand.py", "self.sampled.result()"): ENDED,
    ("run/batch_by_hand.py", "parts[0].result()"): ENDED,
    ("run/batch_by_hand.py", "part.result()"): ENDED,
    ("run/session.py", "future.result()"): ENDED,
    ("run/loop.py", "future.result()"): CALLS,
    ("run/loop.py", "self.made.result()"): CALLS,
    ("run/loop.py", "self.so_far.result()"): CALLS,
    ("profile/traces.py", "future.result()"): CALLS,
    ("run/reporting.py", "future.result()"): CALLS,
    ("process/user_process.py", "_NUMBER.get()"): "a variable of the context: no wait",
    ("models/decoder.py", "_WATCHED.get()"): "a variable of the context: no wait",
    ("formats/opened.py", "_READING.get()"): "a variable of the context: no wait",
    ("formats/opened.py", "future.result()"): "a checksum of what is in memory",
    ("process/user_code.py", "self._closing.wait()"): "a daemon thread that waits for `close`",
    ("process/user_code.py", "self._facts.result()"): "a process loads within its start-up limit",
    ("process/user_code.py", "self._changed.wait()"): "every call ends after its timeout",
    ("rewards/reward_pool.py", "self._facts.result()"): "it is done",
    ("rewards/batch_rewards.py", "f.result()"): SCORES,
    ("rewards/batch_rewards.py", "self.pool.judge(i, items).result()"): SCORES,
    ("rewards/verifiers.py", "_pool(name).judge(0, [item]).result()"): SCORES,
    ("runtime/worker.py", "self._calls.get()"): QUEUE,
    ("runtime/ray/remote_calls.py", "value.result()"): "the driver's own value, which is there",
    ("runtime/ray/worker_group.py", "reported.result()"): ENDED,
    ("runtime/ray/remote_calls.py", "super().result()"): CALLS,
    ("roles/rollout.py", "x.result()"): ENDED,
    ("sampling/engine.py", "future.result()"): ENDED,
    ("teacher/cache.py", "writing.result()"): "a thread that writes one shard, then ends",
    ("teacher/remote.py", "answer.result()"): ENDED,
    ("process/http_server.py", "self._turns.acquire()"): "inside asyncio.timeout(limits.wait_s)",
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


BLOCKING = (
    *("time.sleep", "wait", "asyncio.wait", "select.select", "socket.create_connection"),
    *("ray.wait", "ray.get", "ray.init"),
)
METHODS = ("wait", "result", "communicate")
ROLES = "of the roles' calls, whose phases the console shows; what they wait for outside says so"
LOOKS = "a look at something, every so often or for a second or two"
IS_THERE = "what it asks for is there"
CALLER = "whoever calls it says so: "
SILENT = {
    ("algorithms/sampled_batch.py", "refill_batch"): ROLES,
    (
        "aot/compile_report.py",
        "_compiled",
    ): "a compiler, which is named before it starts",
    ("aot/subprocess_compile.py", "apart"): "a compiler",
    ("aot/subprocess_compile.py", "_kill"): "in a thread that nobody waits for",
    ("checkpoint/writer.py", "_write"): ROLES,
    ("checkpoint/writer.py", "finish"): "a write to the disk, whose failure is told",
    ("environments/packages/mcp.py", "_hold"): "a task that keeps a connection",
    ("environments/packages/verifiers_v1.py", "_next"): CALLER + "the engine, for the environment",
    ("environments/packages/verifiers_v1.py", "_reward"): IS_THERE,
    ("environments/packages/verifiers_v1.py", "_serve"): "a task that keeps a server",
    ("formats/hub.py", "ask"): IS_THERE,
    ("formats/hub.py", "run"): CALLER + "`ask`, and it writes a line of its own",
    ("formats/opened.py", "checksums"): "of what was read, which is its own work",
    ("formats/opened.py", "reading"): "the same",
    ("process/user_code.py", "hold"): CALLER + "the rewards, and the engine for an environment",
    ("process/user_code.py", "kill"): LOOKS,
    ("process/user_code.py", "_serve"): "the end of the pool, in its thread",
    ("process/user_process.py", "_watch"): LOOKS,
    ("process/user_process.py", "kill_family"): "ends after DEAD_S",
    ("process/waiting.py", "_watch"): LOOKS,
    ("process/awake_clock.py", "watch"): LOOKS,
    ("profile/traces.py", "_finish"): ROLES,
    ("rewards/reward_pool.py", "_judge"): IS_THERE,
    ("rewards/verifiers.py", "judge"): "one answer, within its limit",
    ("roles/actor.py", "save"): ROLES,
    ("roles/actor.py", "saved"): ROLES,
    ("run/attempt.py", "export"): ROLES,
    ("run/batch_by_hand.py", "_rewarded"): IS_THERE,
    ("run/batch_by_hand.py", "_rewards_now"): IS_THERE,
    ("run/batch_by_hand.py", "rollout"): IS_THERE,
    ("run/session.py", "_ask"): ROLES,
    ("run/session.py", "_join"): ROLES,
    ("run/launch.py", "start_roles"): ROLES,
    ("run/loop.py", "wait"): ROLES,
    ("run/replay_steps.py", "_look"): ROLES,
    ("environments/episode_batches.py", "facts"): "the disk",
    ("roles/rollout.py", "value"): IS_THERE,
    ("run/loop.py", "_cut"): IS_THERE,
    ("run/loop.py", "close"): ROLES,
    ("run/reporting.py", "rewards_of"): IS_THERE,
    ("sampling/partial_completion.py", "tell_again"): CALLER + "`Sampler._go_on`",
    ("run/reporting.py", "Run"): ROLES,
    ("run/reporting.py", "row"): ROLES,
    ("run/reporting.py", "_batch"): ROLES,
    ("run/reporting.py", "_version"): ROLES,
    ("runtime/ray/connect.py", "find_hosts"): CALLER + "`find_seats`",
    ("runtime/ray/connect.py", "read_cluster"): LOOKS,
    ("runtime/ray/local_cluster.py", "start"): "of one that did not start, killed a moment ago",
    ("runtime/ray/local_cluster.py", "_read_address"): CALLER + "`join`",
    ("runtime/ray/local_cluster.py", "run"): LOOKS,
    ("runtime/ray/local_cluster.py", "_look"): LOOKS,
    ("runtime/ray/local_cluster.py", "leave"): "at the end of the process, where no thread starts",
    ("runtime/ray/remote_calls.py", "result"): ROLES,
    ("runtime/ray/remote_calls.py", "_get_all"): ROLES,
    ("runtime/ray/remote_calls.py", "fetch"): ROLES,
    ("runtime/ray/remote_calls.py", "place"): IS_THERE,
    ("runtime/ray/worker_group.py", "start"): CALLER + "`_reserve` and `_launch`",
    ("runtime/ray/worker_group.py", "_get_all"): CALLER + "`_launch`, and roles then load",
    ("runtime/ray/worker_group.py", "_answered"): IS_THERE,
    ("runtime/ray/worker_group.py", "_reported"): IS_THERE,
    ("runtime/ray/worker_group.py", "stacks"): LOOKS,
    ("runtime/ray/worker_group.py", "kill"): LOOKS,
    ("runtime/role_server.py", "run"): ROLES,
    ("runtime/role_server.py", "examine_process"): LOOKS,
    ("runtime/worker.py", "wait"): ROLES,
    ("runtime/worker.py", "result"): ROLES,
    ("runtime/worker.py", "_value"): ROLES,
    ("runtime/worker.py", "_hold"): ROLES,
    ("sampling/engine.py", "step"): "it enters `waiting` once for all its looks",
    ("sampling/engine.py", "generate"): IS_THERE,
    ("sampling/engine.py", "so_far"): IS_THERE,
    ("roles/rollout.py", "_finished"): IS_THERE,
    ("run/loop.py", "result"): ROLES,
    ("sampling/engine.py", "_resume"): IS_THERE,
    ("serve_teacher.py", "main"): "for clients, which is what it is for",
    ("teacher/cache.py", "_start"): "a write of one shard, which is its own work",
    ("teacher/remote.py", "_side_by_side"): CALLER + "`Endpoint.ask`, in its threads",
    ("process/http_server.py", "drain"): LOOKS,
    ("teacher/server.py", "__init__"): "weights are read, which is its own work",
    ("telemetry/timeline.py", "_run"): LOOKS,
}
"""File and function that wait, and say nothing -> why."""


def silent_waits() -> set[tuple[str, str]]:
    """Where something is waited for outside of every `with waiting(...)`."""
    found = set()

    def visit(node: ast.AST, file: str, where: str, said: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where, said = node.name, False
        if isinstance(node, ast.With):
            said |= any(ast.unparse(item).startswith("waiting(") for item in node.items)
        if isinstance(node, ast.Call) and not said:
            called = ast.unparse(node.func)
            if called in BLOCKING or ("." in called and called.rsplit(".", 1)[1] in METHODS):
                found.add((file, where))
        for child in ast.iter_child_nodes(node):
            visit(child, file, where, said)

    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        visit(ast.parse(path.read_text(encoding="utf-8")), file, "", False)
    return found


def test_every_wait_for_something_outside_is_said() -> None:
    found = silent_waits()
    assert found - SILENT.keys() == set(), "put `with waiting(...)` round it, or a reason here"
    assert SILENT.keys() - found == set(), "these are no more: take them out of the list"
