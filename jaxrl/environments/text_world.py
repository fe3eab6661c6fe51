"""Four rooms, a key and a chest: the built-in environment `text_world`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from jaxrl.data.example import Columns, Message
from jaxrl.environments.environment import Answer, Environment

DOORS = {
    "hall": {"north": "library", "east": "kitchen"},
    "library": {"south": "hall", "east": "garden"},
    "kitchen": {"west": "hall", "north": "garden"},
    "garden": {"west": "library", "south": "kitchen"},
}
"""Room -> direction -> room."""
TASK = (
    "You are in a house with four rooms. Find the key, take it, and open the chest with it."
    " Commands: go north, go east, go south, go west, take key, open chest. Give one in a turn."
)


class TextWorld(Environment):
    """For rows of any kind, whose prompt only chooses where key and chest are.

    The last line of a turn is the command. Opening the chest with the key has reward 1 and ends the
    episode; nothing else has a reward.
    """

    def reset(self, row: Columns) -> str:
        places = hashlib.sha256(row["prompt"].encode()).digest()
        others = [room for room in DOORS if room != "hall"]
        self.room, self.has_key = "hall", False
        self.key, self.chest = others[places[0] % 3], others[places[1] % 3]
        return f"{TASK}\n{self._view()}"

    def step(self, text: str, messages: Sequence[Message]) -> Answer:
        lines = text.strip().lower().splitlines() or [""]
        verb, _, thing = lines[-1].strip(" .!").partition(" ")
        if verb == "go" and thing in DOORS[self.room]:
            self.room = DOORS[self.room][thing]
            return Answer(self._view())
        if (verb, thing) == ("take", "key") and self._sees_key():
            self.has_key = True
            return Answer("You have the key.")
        if (verb, thing) == ("open", "chest") and self.room == self.chest:
            if self.has_key:
                return Answer("The chest is open.", reward=1.0, done=True)
            return Answer("It is locked.")
        return Answer(f"You cannot do that here. {self._view()}")

    def _sees_key(self) -> bool:
        return self.room == self.key and not self.has_key

    def _view(self) -> str:
        things = ["a key"] * self._sees_key() + ["a chest"] * (self.room == self.chest)
        seen = f" You see {' and '.join(things)}." if things else ""
        return f"You are in the {self.room}.{seen} Doors: {', '.join(DOORS[self.room])}."
