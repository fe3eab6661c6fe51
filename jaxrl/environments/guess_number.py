"""Guess a number between 1 and 99: the built-in environment `guess_number`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from jaxrl.data.example import Columns, Message
from jaxrl.environments.environment import Answer, Environment

MOST = 99


class GuessNumber(Environment):
    """For rows of any kind, whose prompt only chooses the number.

    The prompt is `1-99?`. A turn is a number; `+?` says that the number to find is larger, `-?`
    that it is smaller, and `?` that the turn was no number. The right number has reward 1 and ends
    the episode; `environment.discount` below 1 makes fewer guesses better.
    """

    def reset(self, row: Columns) -> str:
        digest = hashlib.sha256(row["prompt"].encode()).digest()  # the same in every process
        self.number = 1 + int.from_bytes(digest[:8], "little") % MOST
        return f"1-{MOST}?"

    def step(self, text: str, messages: Sequence[Message]) -> Answer:
        guess = text.strip()
        if not (guess.isascii() and guess.isdigit()) or len(guess) > 9:
            return Answer("?")
        if int(guess) == self.number:
            return Answer("=", reward=1.0, done=True)
        return Answer("+?" if int(guess) < self.number else "-?")
