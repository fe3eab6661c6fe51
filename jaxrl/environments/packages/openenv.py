"""Environments of OpenEnv servers: the built-in environment `openenv`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from functools import cache
from typing import TypeVar
from urllib.error import URLError
from urllib.request import urlopen

from openenv.core.generic_client import GenericEnvClient

from jaxrl.data.example import Columns, JsonObject, Message
from jaxrl.environments.environment import Answer, Environment, Unavailable
from jaxrl.environments.packages import seed_of
from jaxrl.environments.tool_calls import as_text
from jaxrl.errors import UserError, near
from jaxrl.rewards.verifiers import after_thoughts

T = TypeVar("T")
SCHEMA_S = 30.0
"""Longest wait for a server's schemas."""
ANSWER_S = 86400.0
"""Longest wait for an answer; `environment.timeout` is shorter."""
SESSIONS = "; its max_concurrent_envs must allow a session for each episode at once"
"""What may be wrong where no session begins."""
APART = ("metadata", "done", "reward")
"""Fields of every action and observation, which are no part of its content."""


class OpenEnv(Environment):
    """An episode is a session of a server, on a connection of its own.

    The prompt is the observation of its reset. A turn without its thoughts is the text of one field
    of an action; the observation that follows is the answer, its reward that of the turn.
    """

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        instructions: str = "",
        seed: str = "seed",
    ):
        """
        Args:
            url: of the server, `http://HOST:PORT`.
            action: field of an action that a turn becomes; None: its only field for text.
            observation: field that the model reads; None: the only field for text where there is
                one, else all fields as JSON.
            instructions: what the prompt begins with.
            seed: column of the rows with the seed of an episode; where a row has none, its prompt
                chooses the seed.
        """
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise UserError(f"url={url!r} must begin with http:// or https://")
        self._url, self._instructions, self._seed = url.rstrip("/"), instructions, seed
        schemas = _schemas(self._url)
        self._action = _field(schemas["action"], action, "action")
        if self._action is None:
            raise UserError(
                f"the actions of {url} have the fields {_fields(schemas['action'])}: set action in"
                " environment.arguments to the one that a turn of the model becomes"
            )
        self._observation = _field(schemas["observation"], observation, "observation")
        self._client = GenericEnvClient(self._url, message_timeout_s=ANSWER_S)

    async def reset(self, row: Columns) -> str:
        result = await self._asked(self._client.reset(seed=seed_of(row, self._seed)), SESSIONS)
        words = self._words(result.observation)
        return f"{self._instructions}\n{words}" if self._instructions else words

    async def step(self, text: str, messages: Sequence[Message]) -> Answer:
        said = after_thoughts(text) or ""
        result = await self._asked(self._client.step({str(self._action): said}))
        heard = {"role": "user", "content": self._words(result.observation)}
        return Answer([heard], result.reward, bool(result.done))

    async def close(self) -> None:
        await self._client.close()

    async def _asked(self, request: Awaitable[T], hint: str = "") -> T:
        try:
            return await request
        except Exception as error:
            raise Unavailable(_gone(self._url, error) + hint) from None

    def _words(self, observation: JsonObject) -> str:
        field = self._observation
        return as_text(observation if field is None else observation.get(field))


@cache
def _schemas(url: str) -> JsonObject:
    """Fetches the JSON schemas of a server's actions and observations, once per process."""
    try:
        with urlopen(f"{url}/schema", timeout=SCHEMA_S) as answer:
            schemas = json.load(answer)
        return {kind: dict(schemas[kind]["properties"]) for kind in ("action", "observation")}
    except (URLError, OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{_gone(url, error)} ({url}/schema must answer with the schemas of an OpenEnv server)"
        ) from error


def _field(properties: JsonObject, asked: str | None, kind: str) -> str | None:
    """Returns the field that was asked for, or else the only text field."""
    if asked is not None:
        if asked not in properties:
            raise UserError(
                f"{kind}={asked!r}{near(asked, properties)} is no field of it: it has"
                f" {_fields(properties)}"
            )
        return asked
    texts = [
        name
        for name, schema in properties.items()
        if name not in APART and schema.get("type") == "string"
    ]
    return texts[0] if len(texts) == 1 else None


def _fields(properties: JsonObject) -> str:
    return ", ".join(name for name in properties if name not in APART) or "none"


def _gone(url: str, error: BaseException) -> str:
    return f"the OpenEnv server {url}: {type(error).__name__}: {error}"
