"""What a user writes: an environment that answers the turns of a model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.data.example import Columns, Message
from jaxrl.environments.tool_calls import (
    LONGEST_ERROR,
    MOST_VALUES,
    Call,
    Tool,
    as_text,
    parse_calls,
)
from jaxrl.errors import near, short


@dataclass(frozen=True)
class Answer:
    """What an environment answers to a turn of the model. A dict of these keys is as good."""

    messages: Sequence[Message] | str = ()
    """What the model reads next: chat messages, or a text, which is one message of the role `user`.
    Without a chat template their contents follow the turn as they are."""
    reward: float | None = None
    """Of the turn that is answered; a finite number, or None."""
    done: bool = False
    """Whether the episode is over; there must be a message otherwise."""


Answers = Answer | Mapping[str, Any]
First = Sequence[Message] | str


class Unavailable(Exception):
    """What an environment needs, such as a server, is gone: the episode fails. Of a tool's
    exceptions this is the only one that is not answered by its text."""


class Environment:
    """The base class of environments; an instance lives for one episode.

    An instance is made with `environment.arguments`, in a process of its own that holds those of
    other episodes too. What it answers must depend on the row and the turns alone, since it is made
    again from these where its process is lost: random numbers come from a seed in the row.
    """

    row: Columns
    """What `reset` gets; it is there before that is called."""
    tools: Sequence[Tool] = ()
    """Functions that the model may call. Their JSON schemas, which signatures and docstrings (with
    a section `Args:`) give, are shown to the model by the chat template."""

    def reset(self, row: Columns) -> First | Awaitable[First]:
        """Begins an episode; may be `async def`.

        Args:
            row: the columns of the data row, with the prompt's text (of a chat its last message)
                under `prompt`, all messages of a chat under `messages`, and the reference solution,
                or None, under `answer`.

        Returns:
            The whole prompt, as messages or as text. It must be the same for equal rows: all
            samples of a prompt begin with it.
        """
        return row["messages"] if "messages" in row else str(row["prompt"])

    def step(self, text: str, messages: Sequence[Message]) -> Answers | Awaitable[Answers]:
        """Answers a turn of the model; may be `async def`.

        This one runs the tools that the turn calls, one after the other, and is done where it
        calls none.

        Args:
            text: of the turn as the model wrote it, with special tokens, without EOS. Where the
                prompt ends with what opens the model's thoughts, the text begins with that.
            messages: all before it: the prompt, and the turns with their answers.
        """
        calls = parse_calls(text, self.tools)
        if not calls:
            return Answer(done=True)
        done, results = list[str](), map(self._run, calls)  # each runs when it is asked for
        for result in results:
            if not isinstance(result, str):
                return _awaited(itertools.chain(done, [result], results))
            done.append(result)
        return _said_by_tools(done)

    def close(self) -> Awaitable[None] | None:
        """Ends the episode: gives back what `reset` and `step` opened, such as a connection. It is
        called only where `reset` has returned; may be `async def`."""
        return None

    def _run(self, call: Call) -> str | Awaitable[str]:
        """Runs a tool; returns its result as text, or why there is none."""
        if isinstance(call, str):
            return call
        name, arguments = call
        tools = {tool.__name__: tool for tool in self.tools}
        if name not in tools:
            names = short(", ".join(tools), LONGEST_ERROR)
            return f"Error: there is no tool {short(repr(name))}{near(name, tools)}, only {names}"
        try:
            result = tools[name](**arguments)
            if inspect.isawaitable(result) or inspect.isasyncgen(result):
                return _awaited_text(result)
            return as_text(result)
        except Unavailable:
            raise
        except (Exception, SystemExit) as error:  # the model is to see what it did wrong
            return as_text(error)


async def _awaited(results: Iterable[str | Awaitable[str]]) -> Answer:
    return _said_by_tools([r if isinstance(r, str) else await r for r in results])


def _said_by_tools(texts: Sequence[str]) -> Answer:
    return Answer([{"role": "tool", "content": text} for text in texts])


async def _awaited_text(result: Any) -> str:
    try:
        if inspect.isawaitable(result):
            return as_text(await result)
        values = []
        async for value in result:
            values.append(value)
            if len(values) == MOST_VALUES:
                break
        return as_text(values)
    except Unavailable:
        raise
    except (Exception, SystemExit) as error:
        return as_text(error)
