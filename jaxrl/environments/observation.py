"""What an environment returned, checked: as it is sent, recorded and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrl.data.example import JsonObject, Message
from jaxrl.environments.environment import Answer
from jaxrl.environments.tools import LONGEST, cut_text
from jaxrl.errors import UserError, near, shown
from jaxrl.process.json_types import finite

ROLES = ("user", "tool", "system")
"""Whose words may follow a turn of the model."""
KEYS = ("messages", "reward", "done")
_SHAPE = "Answer(messages, reward=None, done=False), or a dict of these"


@dataclass(frozen=True)
class Observation:
    """The answer of an environment to one turn, whose messages were cut to LONGEST characters."""

    messages: tuple[Message, ...]
    reward: float | None
    done: bool

    @classmethod
    def of_json(cls, value: JsonObject) -> Observation:
        """Returns the answer of which this is the `asdict`, perhaps read from JSON."""
        return cls(tuple(value["messages"]), value["reward"], value["done"])


def observed(result: object) -> Observation:
    """Returns what `step` returned. Raises UserError where it is no answer."""
    if isinstance(result, Answer):
        result = {key: getattr(result, key) for key in KEYS}
    if not isinstance(result, Mapping):
        raise UserError(f"`step` returned {shown(result)}: it must return {_SHAPE}")
    for key in result:
        if key not in KEYS:
            raise UserError(
                f"`step` returned a dict with the key {key!r}{near(str(key), KEYS)}: it must return"
                f" {_SHAPE}"
            )
    reward, done = result.get("reward"), result.get("done", False)
    if not isinstance(done, bool):
        raise UserError(f"`step` returned done={shown(done)}: it must be True or False")
    messages = result.get("messages", ())
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}] if messages else []
    checked = checked_messages(messages, "step", ROLES)
    if not checked and not done:
        raise UserError("`step` returned no message for the model, and not done=True")
    left, kept = LONGEST, []
    for message in checked:
        text = cut_text(message["content"], left)
        left = max(left - len(text), 0)
        kept.append({**message, "content": text})
    return Observation(tuple(kept), _reward(reward), done)


def first_messages(result: object) -> tuple[Message, ...] | str:
    """Returns what `reset` returned. Raises UserError where that is no prompt."""
    if isinstance(result, str):
        _check_text(result, "reset")
        messages: tuple[Message, ...] | str = result
    else:
        messages = checked_messages(result, "reset", (*ROLES, "assistant"))
    if not messages:
        raise UserError("`reset` returned no message: the model needs a prompt")
    return messages


def checked_messages(messages: object, method: str, roles: Sequence[str]) -> tuple[Message, ...]:
    """Returns chat messages with texts `role` and `content`, as plain dicts with all of their
    fields."""
    if isinstance(messages, Mapping | bytes) or not hasattr(messages, "__iter__"):
        raise UserError(f"`{method}` returned the messages {shown(messages)}: they must be a list")
    found = []
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        texts = [fields.get(name) for name in ("role", "content")]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"`{method}` returned the message {shown(message)}: it must have the texts `role`"
                " and `content`"
            )
        if texts[0] not in roles:
            raise UserError(
                f"`{method}` returned a message of the role {texts[0]!r}: it must be one of"
                f" {', '.join(roles)}"
            )
        _check_text(str(texts[1]), method)
        try:
            text = json.dumps(dict(fields), ensure_ascii=False, allow_nan=False)
            found.append(json.loads(text.encode()))
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"`{method}` returned the message {shown(message)}, which is no JSON: {error}"
            ) from error
    return tuple(found)


def _reward(value: object) -> float | None:
    if value is None:
        return None
    number = finite(value)
    if number is None:
        raise UserError(
            f"`step` returned the reward {shown(value)}: it must be a finite number, or None"
        )
    return number


def _check_text(text: str, method: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"`{method}` returned a text with half of a surrogate pair at character {error.start}"
        ) from error
