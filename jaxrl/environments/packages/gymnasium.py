"""Environments of Gymnasium whose observations are text: the built-in environment `gymnasium`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import gymnasium

from jaxrl.data.example import Columns, JsonObject, Message
from jaxrl.environments.environment import Answer, Environment
from jaxrl.environments.packages import seed_of
from jaxrl.environments.tool_calls import as_text
from jaxrl.errors import UserError
from jaxrl.rewards.verifiers import after_thoughts

NUMBER = re.compile(r"(?<!\d)-?\d+")
COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)
"""What a terminal shows in colours, as the cell where the player is."""


class Gymnasium(Environment):
    """An environment that `gymnasium.make` makes.

    The prompt is its first observation. A turn without its thoughts is an action: the text itself
    in a space `Text`, its last whole number in a space `Discrete`. The observation that follows is
    the answer, its reward that of the turn; an episode that is terminated or truncated is done.
    Subclasses for other spaces have an `action` and a `words` of their own.
    """

    def __init__(self, id: str, instructions: str = "", seed: str = "seed", **options: object):
        """
        Args:
            id: as for `gymnasium.make`; `module:Name-v0` imports a module that registers it.
            instructions: what the prompt begins with.
            seed: column of the rows with the seed of an episode; where a row has none, its prompt
                chooses the seed.
            options: further arguments of `gymnasium.make`.
        """
        self._instructions, self._seed = instructions, seed
        self.game = gymnasium.make(id, **{"disable_env_checker": True, **options})
        modes = self.game.metadata.get("render_modes", [])
        has = f"it has {', '.join(map(str, modes)) or 'none'}"
        if options.get("render_mode") not in (None, *modes):
            raise UserError(f"render_mode={options['render_mode']!r} is none of {id}: {has}")
        own, spaces = type(self), gymnasium.spaces
        speaks = isinstance(self.game.observation_space, spaces.Text)
        speaks |= self.game.render_mode == "ansi"
        if own.words is Gymnasium.words and not speaks:
            raise UserError(
                f"the observations of {id} are {self.game.observation_space}, not text: set"
                " render_mode: ansi in environment.arguments where it has that mode"
                f" ({has}), or name a subclass of {__name__}:Gymnasium with a method `words`"
            )
        acts = isinstance(self.game.action_space, spaces.Text | spaces.Discrete)
        if own.action is Gymnasium.action and not acts:
            raise UserError(
                f"the actions of {id} are {self.game.action_space}, neither Text nor Discrete: name"
                f" a subclass of {__name__}:Gymnasium with a method `action`"
            )

    def reset(self, row: Columns) -> str:
        observation, info = self.game.reset(seed=seed_of(row, self._seed))
        words = as_text(self.words(observation, info))
        return f"{self._instructions}\n{words}" if self._instructions else words

    def step(self, text: str, messages: Sequence[Message]) -> Answer:
        try:
            action = self.action(after_thoughts(text) or "")
        except ValueError as error:
            return Answer(f"Error: {error}")
        observation, reward, terminated, truncated, info = self.game.step(action)
        said = {"role": "user", "content": as_text(self.words(observation, info))}
        return Answer([said], reward, bool(terminated or truncated))

    def close(self) -> None:
        self.game.close()

    def words(self, observation: Any, info: JsonObject) -> str:
        """Writes an observation for the model: coloured text stands in brackets."""
        shown = observation if isinstance(observation, str) else str(self.game.render())
        return COLOURED.sub(r"[\1]", shown)

    def action(self, text: str) -> object:
        """Returns the action that a turn, without its thoughts, stands for; raises ValueError with
        what the model should do instead."""
        space = self.game.action_space
        if isinstance(space, gymnasium.spaces.Text):
            return text
        first, last = int(space.start), int(space.start + space.n) - 1
        numbers = NUMBER.findall(text)
        if not numbers or len(numbers[-1]) > 9 or not first <= int(numbers[-1]) <= last:
            raise ValueError(f"an action is a number from {first} to {last}")
        return int(numbers[-1])
