"""The tools of a server of the Model Context Protocol: the built-in environment `mcp`."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeGuard

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, Tool

from jaxrl.environments.environment import Environment, Unavailable
from jaxrl.environments.tool_calls import Arguments, SchemaTool
from jaxrl.errors import UserError, near, short

MOST_NAMES = 1000
"""Characters of the names of a server's tools in a message."""
LIST_S = 60.0
"""Longest wait for a server to start and to list its tools."""

Server = str | tuple[str, ...]
"""The address of a server, or the command that starts one."""


class McpTools(Environment):
    """The model may call the tools of a server; a turn without a call ends the episode.

    Prompts are the rows' own, and rewards come from `reward.functions`. Each episode has a
    connection of its own: it starts the server where that is a command, and has a session there
    where it is an address.
    """

    def __init__(self, server: str | Sequence[str], tools: Sequence[str] | None = None):
        """
        Args:
            server: its address, `http://...` (Streamable HTTP), or the words of the command that
                starts it (stdio), which gets the variables of the run's environment.
            tools: names of those that the model may call; None: all.
        """
        if isinstance(server, str) and server.startswith(("http://", "https://")):
            self._server: Server = server
        elif _words(server):
            self._server = tuple(server)
        else:
            raise UserError(
                f"server={server!r} must be an address that begins with http:// or https://, or a"
                " list of the words of a command, as in [python, my_server.py]"
            )
        if tools is not None and not _words(tools):
            raise UserError(f"tools={tools!r} must be a list of names, as in [add]")
        known = {tool.name: tool for tool in _tools_of(self._server)}
        for name in known if tools is None else tools:
            if name not in known:
                raise UserError(
                    f"{_shown(self._server)} has no tool {name!r}{near(name, known)}: it has"
                    f" {short(', '.join(known), MOST_NAMES)}"
                )
        self.tools = [
            SchemaTool(name, known[name].description or "", known[name].input_schema, self._called)
            for name in (known if tools is None else tools)
        ]
        self._connection: _Connection | None = None

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _called(self, name: str, arguments: Arguments) -> str:
        """Calls a tool and returns its text, which may be an error of its own.

        Raises:
            ValueError, TypeError: arguments that JSON cannot say, which the model reads.
        """
        json.dumps(dict(arguments), allow_nan=False, ensure_ascii=False).encode()
        if self._connection is None:
            self._connection = _Connection(self._server)
        try:
            client = await self._connection.client()
            return _text(await client.call_tool(name, dict(arguments)))
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise  # the server refuses the call
            raise Unavailable(_gone(self._server, error)) from None
        except Exception as error:
            raise Unavailable(_gone(self._server, error)) from None


class _Connection:
    """A connection to a server. One task opens and closes it, as the library asks."""

    def __init__(self, server: Server):
        self._server = server
        self._ended = asyncio.Event()
        self._open: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def client(self) -> Client:
        """Returns the connected client; raises whatever kept it from connecting."""
        return await asyncio.shield(self._open)

    async def close(self) -> None:
        self._ended.set()
        if not self._open.done():
            self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _hold(self) -> None:
        try:
            async with Client(_target(self._server)) as client:
                self._open.set_result(client)
                await self._ended.wait()
        except Exception as error:
            if not self._open.done():
                self._open.set_exception(error)


def _words(value: object) -> TypeGuard[Sequence[str]]:
    listed = value if isinstance(value, list | tuple) else ()
    return bool(listed) and all(isinstance(word, str) for word in listed)


@cache
def _tools_of(server: Server) -> tuple[Tool, ...]:
    """Returns the tools of a server, which is asked once per process."""

    async def listed() -> tuple[Tool, ...]:
        tools: list[Tool] = []
        async with asyncio.timeout(LIST_S), Client(_target(server)) as client:
            page = await client.list_tools()
            tools += page.tools
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
        if not tools:
            raise UserError("it has no tools")
        return tuple(tools)

    try:
        return asyncio.run(listed())
    except Exception as error:
        raise UserError(_gone(server, error)) from error


def _target(server: Server) -> Any:
    """Converts to the place that a client of the library connects to."""
    if isinstance(server, str):
        return server
    command, *words = server
    parameters = StdioServerParameters(command=command, args=words, env=dict(os.environ))
    return stdio_client(parameters)


def _text(result: CallToolResult) -> str:
    """Writes a tool's result as a model can read it: its texts, and anything else by
    its kind."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource":
            parts.append(getattr(block.resource, "text", f"[{block.resource.uri}]"))
        else:
            parts.append(f"[{block.type}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _shown(server: Server) -> str:
    return f"the MCP server {server if isinstance(server, str) else shlex.join(server)}"


def _gone(server: Server, error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):  # of the library's tasks
        error = error.exceptions[0]
    reason = str(error) or f"no answer within {LIST_S:g} s"
    hint = "" if isinstance(server, str) else "; its output is above"
    if isinstance(error, FileNotFoundError):
        hint = "; is the command on PATH?"
    return f"{_shown(server)} is not available: {type(error).__name__}: {reason}{hint}"
