"""One row of data before tokenisation, and what every collection of rows offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from jaxrl.process.json_types import JsonObject as JsonObject

if TYPE_CHECKING:  # it imports jax, which the processes of environments do not need
    from jaxrl.types import TemplateInputs

Split = Literal["train", "eval"]
CompletionTurns = Literal["last", "all"]
Message = Mapping[str, Any]
"""One chat turn: the texts `role` and `content`, and what else a chat template reads of it, such as
`tool_calls`."""
Columns = Mapping[str, Any]
"""The fields of a data row by their names."""


@dataclass(frozen=True)
class Example:
    """A prompt with what is known about its solution."""

    prompt: str | tuple[Message, ...]
    """Text, or the chat turns before the completion."""
    completion: str | None = None
    """The data set's own completion, without EOS; of several turns, the first one."""
    answer: str | None = None
    """What a verifier compares with."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Every other field of the row; `task` names the procedural task that made it."""
    document: bool = False
    """A text prompt that the completion simply continues: never wrapped as a chat turn."""
    answer_value: object = None
    """The answer as the row has it; None where that is the text itself."""
    system: str | None = None
    """A system message for a text prompt that becomes a message; a chat has it among its own."""
    inputs: TemplateInputs | None = None
    """What a chat template reads beside the messages; None: nothing."""
    turns: tuple[Message, ...] = ()
    """A completion of several turns: what follows the prompt, the assistant's turn first and last.
    """


def is_learned(message: Message) -> bool:
    """Returns whether a message of a completion is learned: one of the assistant that the data do
    not mark otherwise (`data.rows.LEARNED`)."""
    return message["role"] == "assistant" and message.get("weight") != 0


def fields_of(example: Example) -> frozenset[tuple[object, ...]]:
    """Lists what decides whether a chat template can show a row: the role of each message, its
    fields that say something, whether it has several calls, and what else a template reads."""
    messages = () if isinstance(example.prompt, str) else example.prompt
    found = set[tuple[object, ...]]()
    if example.inputs is not None:
        found = {("tools", bool(example.inputs.tools)), ("arguments", *example.inputs.arguments)}
    if example.system is not None:
        found.add(("system",))
    for message in (*messages, *example.turns):
        says = sorted(name for name, value in message.items() if value not in (None, "", [], {}))
        found.add((message["role"], *says, len(message.get("tool_calls") or ()) > 1))
    return frozenset(found)


class Part(ABC):
    """Rows of one kind under one name, with random access."""

    name: str
    """As given in `data.train` or `data.eval`."""
    procedural = False
    """Whether rows are made on demand: their number is then nominal, and reading them all is not
    cheap."""
    columns: tuple[str, ...] = ()
    """Names of the fields that the rows of a file have."""

    def where(self, index: int) -> str:
        """Returns the place of a row, for error messages."""
        return f"{self.name}: row {index}"

    @abstractmethod
    def digest(self) -> str:
        """Returns a hex hash of what decides the rows: the bytes of files, wherever they lie, or
        the settings of a task and its first row."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Example: ...
