"""Environments of the package `verifiers`: the built-in environment `verifiers`.

There an environment calls a model's API itself. Its model here is a small server in the same
process, whose completions are the turns of the policy: a request is the answer to the turn before,
and waits until the next turn is there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cache, cached_property
from typing import Any

import httpx2
import verifiers.v1 as vf
from starlette.requests import Request
from starlette.responses import JSONResponse
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils import loaders

from jaxrl.data.example import Columns, JsonObject, Message
from jaxrl.environments.environment import Answer, Environment, Unavailable
from jaxrl.environments.packages import seed_of
from jaxrl.environments.tool_calls import Arguments, SchemaTool, as_text, parse_calls
from jaxrl.errors import Refused, UserError
from jaxrl.process.http_server import HttpServer, Limits
from jaxrl.process.streams import to_stderr
from jaxrl.rewards.verifiers import after_thoughts

__all__ = ["Turns", "Verifiers"]
HARNESS = "jaxrl_turns"
"""The name of this module among the harnesses of `verifiers`, which are found by a name of one
word."""
sys.modules[HARNESS] = sys.modules[__name__]
START_S = 60.0
"""Longest wait for the tools of an environment."""
MOST_TASKS = 1000
"""Tasks of a set that has no end."""
LARGEST = 2**30
"""Bytes of requests."""
MOST = 10_000
"""Episodes that wait for a turn."""


class Turns(vf.Harness[vf.HarnessConfig]):
    """A chat with the model in this process, which runs the tools that it calls. Those that come
    with `verifiers` start a program for each episode."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Runs the chat until the model calls no tool; see `Harness.launch`."""
        system, prompt = self.resolve_prompt(data)
        given = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages = [{"role": "system", "content": system}] if system else []
        messages += [message_to_wire(message) for message in given]
        async with AsyncExitStack() as stack:
            addresses = {name: {"url": url} for name, url in mcp_urls.items()}
            tools, places, servers = await connect_mcp({"mcpServers": addresses}, stack)
            headers = {"Authorization": f"Bearer {secret}"}
            client = httpx2.AsyncClient(timeout=None, trust_env=False, headers=headers)
            await stack.enter_async_context(client)
            while True:
                body = {"model": ctx.model, "messages": messages}
                body |= {"tools": tools} if tools else {}
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.status_code >= 400:  # the environment stops the episode, or has failed
                    return vf.ProgramResult(1, "", reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value})
                for call in message.get("tool_calls") or ():
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                    try:
                        content = await call_mcp(servers, places, name, json.loads(arguments))
                    except Exception as error:  # the model is to see what it did wrong
                        content = f"Error: {type(error).__name__}: {error}"
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": content}
                    )
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")


class Verifiers(Environment):
    """Plays the tasks of a taskset of `verifiers`, as the environment that belongs to it does.

    An episode's prompt is what the environment first asks a model, and its reward is given at the
    end: the sum of the weighted rewards of the task. It must be for one agent.
    """

    def __init__(
        self, taskset: str | JsonObject, env: JsonObject | None = None, index: str = "task_index"
    ):
        """
        Args:
            taskset: name of an installed taskset, or its config with the name under `id`.
            env: further keys of the environment's config; None: none.
            index: column of the rows with the number of the task; where a row has none, its prompt
                chooses the task.
        """
        chosen = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
        if not chosen.get("id"):
            raise UserError(f"taskset={taskset!r} must be the name of a taskset, or {{id: NAME}}")
        config = {**(env or {}), "taskset": chosen}
        self._stage = _stage_of(json.dumps(config, sort_keys=True))
        self._index = index
        self._play: _Play | None = None

    @cached_property
    def tools(self) -> Sequence[SchemaTool]:  # type: ignore[override]
        """Returns the tools that the first task offers."""
        return _as_tools(asyncio.run(self._stage.first_request()))

    async def reset(self, row: Columns) -> list[Message]:
        tasks = self._stage.tasks
        self._play = await self._stage.begin(tasks[seed_of(row, self._index) % len(tasks)])
        return await self._play.first()

    async def step(self, text: str, messages: Sequence[Message]) -> Answer:
        assert self._play is not None
        return await self._play.turn(text)

    async def close(self) -> None:
        if self._play is not None:
            await self._play.close()


class _Play:
    """One run of a task by the environment, which asks for the turns."""

    def __init__(self, leave: Callable[[], None]):
        self.run: asyncio.Task[vf.Episode]
        self.request: JsonObject = {"messages": []}  # the last one of the environment
        self._leave = leave
        self._requests: asyncio.Queue[JsonObject] = asyncio.Queue()
        self._turn: asyncio.Future[JsonObject] | None = None

    async def completion(self, request: JsonObject) -> JsonObject:
        """Waits for the assistant's message that answers a request of the environment."""
        self._turn = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        return await self._turn

    async def first(self) -> list[Message]:
        found = await self._next(0)
        if found is None:
            self._reward()
            raise Unavailable("the environment ended before it asked the model for a turn")
        return found

    async def turn(self, text: str) -> Answer:
        """Asks the environment for its answer to a turn of the policy."""
        calls = parse_calls(text, _as_tools(self.request))
        wrong = [call for call in calls if isinstance(call, str)]
        if wrong:  # the environment takes no call that cannot be read
            return Answer([{"role": "tool", "content": error} for error in wrong])
        known = len(self.request["messages"]) + 1  # with the turn
        assert self._turn is not None
        content = after_thoughts(text) or ""
        thoughts = text.strip().removesuffix(content)
        message: JsonObject = {"role": "assistant", "content": content}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        if calls:
            named = [call for call in calls if not isinstance(call, str)]
            message["tool_calls"] = [
                {
                    "id": f"call_{known}_{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(dict(given), default=str)},
                }
                for index, (name, given) in enumerate(named)
            ]
        self._turn.set_result(message)
        found = await self._next(known)
        return Answer(reward=self._reward(), done=True) if found is None else Answer(found)

    async def close(self) -> None:
        self._leave()
        if self._turn is not None:
            self._turn.cancel()  # there is none: the request ends
        self.run.cancel()
        with suppress(asyncio.CancelledError):
            await self.run

    async def _next(self, known: int) -> list[Message] | None:
        """Waits for the next request and returns its messages after the known ones; None where
        there is no further request."""
        asked = asyncio.create_task(self._requests.get())
        try:
            await asyncio.wait({asked, self.run}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return None
            before, self.request = self.request["messages"], asked.result()
        finally:
            asked.cancel()
        messages = self.request["messages"]
        if messages[: len(before)] != before or len(messages) <= known:
            raise Unavailable(
                "the environment began another conversation: it must have one agent, and must not"
                " change earlier messages"
            )
        new = messages[known:]
        return [{"role": m["role"], "content": _text(m.get("content"))} for m in new]

    def _reward(self) -> float:
        """Returns the reward of a run that is over."""
        episode = self.run.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise Unavailable(f"the environment failed: {errors[0].type}: {errors[0].message}")
        return float(sum(trace.reward for trace in episode.traces))


class _Stage:
    """What the episodes of a process share: the environment, its tasks, and the model's server."""

    def __init__(self, config: JsonObject):
        kind = loaders.env_config_type(config["taskset"]["id"], config.get("id", ""))
        for name, field in kind.model_fields.items():
            if isinstance(field.default, AgentConfig):
                played = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
                config[name] = {**played, **config.get(name, {})}
        self._env = loaders.load_environment(loaders.resolve_env_config(config))
        tasks = self._env.taskset
        self.tasks = list(itertools.islice(tasks, None if tasks.bounded else MOST_TASKS))
        if not self.tasks:
            raise UserError(f"the taskset {config['taskset']['id']} has no task")
        self._plays: dict[str, _Play] = {}  # by the id of the trace that `verifiers` makes of it
        self._serving: asyncio.Task[None] | None = None
        self._context: asyncio.Future[vf.ModelContext]

    async def begin(self, task: vf.Task) -> _Play:
        if self._serving is None:
            self._context = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve())
        context = await asyncio.shield(self._context)
        traces: list[str] = []

        def enter(trace: Any) -> None:
            traces.append(trace.id)
            self._plays[trace.id] = play

        def leave() -> None:
            for trace in traces:
                self._plays.pop(trace, None)

        play = _Play(leave)
        play.run = asyncio.create_task(self._env.run_episode(task, context, on_trace=enter))
        return play

    async def first_request(self) -> JsonObject:
        """Returns the first task's first request to the model, made in an event loop that ends with
        it; empty where the task can offer no tools."""
        taskset = self._env.taskset
        offers = type(taskset).task_type().toolsets(taskset.config.task)
        if not offers and not taskset.toolsets(taskset.config):
            return {}
        try:
            async with asyncio.timeout(START_S):
                play = await self.begin(self.tasks[0])
                await play.first()
        except TimeoutError:
            raise UserError(f"the tools of its first task did not start in {START_S:g} s") from None
        await play.close()
        assert self._serving is not None
        self._serving.cancel()
        with suppress(asyncio.CancelledError):
            await self._serving
        self._serving = None
        return play.request

    async def _serve(self) -> None:
        """Keeps the servers. One task opens and closes them, as the library asks."""
        loop, limits = asyncio.get_running_loop(), Limits(body_bytes=LARGEST, connections=MOST)
        server = HttpServer("127.0.0.1", 0, limits=limits, log=to_stderr)

        async def complete(request: Request) -> JSONResponse:
            body = json.loads(await server.read_body(request, LARGEST))
            episode = request.headers.get(SESSION_ID_HEADER, "")
            turn = asyncio.run_coroutine_threadsafe(self._complete(episode, body), loop)
            return JSONResponse(await asyncio.wrap_future(turn))

        try:
            server.serve({"POST /chat/completions": complete})
            client = vf.EvalClientConfig(base_url=server.url, api_key_var="JAXRL_NO_KEY")
            async with self._env.serving():
                self._context.set_result(vf.ModelContext(model="policy", client=client))
                await asyncio.Event().wait()
        except Exception as error:
            if not self._context.done():
                self._context.set_exception(error)
        finally:
            await asyncio.to_thread(server.close)

    async def _complete(self, episode: str, request: JsonObject) -> JsonObject:
        play = self._plays.get(episode)
        if play is None:
            raise Refused(410, "the episode is over")
        message = await play.completion(request)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        head = {"id": "turn", "object": "chat.completion", "created": 0, "model": "policy"}
        return {**head, "choices": [choice]}


@cache
def _stage_of(config: str) -> _Stage:
    """Returns the stage of an environment's config, given as JSON; it is made once per process."""
    return _Stage(json.loads(config))


def _as_tools(request: JsonObject) -> list[SchemaTool]:
    found = [tool["function"] for tool in request.get("tools") or ()]
    return [
        SchemaTool(f["name"], f.get("description") or "", f.get("parameters") or {}, _no_call)
        for f in found
    ]


def _no_call(name: str, arguments: Arguments) -> object:
    raise AssertionError(f"{name} is called by the harness")


def _text(content: str | list[JsonObject] | None) -> str:
    """Returns the texts of a message's content."""
    if isinstance(content, list):
        texts = [part.get("text") or f"[{part.get('type')}]" for part in content]
        return as_text("\n".join(map(str, texts)))
    return as_text(content or "")
