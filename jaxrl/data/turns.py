"""The tokens of an episode after its prompt: no turn is tokenised a second time.

What follows a turn of the model is taken from the chat template as text, and tokenised by itself.
So the ids that the model wrote stay, also where the text of the whole chat would be tokenised
otherwise (merges across a border, several spellings of one text) or rendered otherwise (templates
that leave out earlier thoughts).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from jaxrl.data.chat_template import has_template, render, without_end
from jaxrl.data.example import Message
from jaxrl.data.tokenizer import Tokenizer, adds_space, encode_after
from jaxrl.errors import UserError
from jaxrl.types import Turn

KEPT = 4096
"""Different observations whose tokens are kept."""
_MARK = "ASSISTANT_TURN"


def cut_turns(turns: Iterable[Turn], most: int) -> tuple[Turn, ...]:
    """Cuts the turns of an episode to those of its first `most` tokens."""
    kept = []
    for turn in turns:
        if most > 0:
            kept.append(replace(turn, tokens=min(turn.tokens, most)))
        most -= turn.tokens
    return tuple(kept)


class TurnEncoder:
    """Tokens of what an environment says, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, notify: Callable[[str], object] = lambda text: None):
        """
        Args:
            notify: gets a message, once, where the template has no role for the observations.
        """
        self._tokenizer, self._notify = tokenizer, notify
        self._kept = lru_cache(KEPT)(self._encoded)
        self._taken = lru_cache(KEPT)(self._roles_taken)

    def after(self, messages: Sequence[Message], *, eos: int | None, chat: bool) -> tuple[int, ...]:
        """Returns the tokens from the end of one turn of the model to the beginning of its next.

        Args:
            messages: of the environment.
            eos: the turn's last token, where that is an EOS: it is left out where the template ends
                turns with it.
            chat: whether the prompt is a chat; else the texts follow as they are.

        Raises:
            UserError: the chat template has no place for the messages.
        """
        key = json.dumps(list(map(dict, messages)), ensure_ascii=False)
        return self._kept(key, eos, chat and has_template(self._tokenizer))

    def _encoded(self, key: str, eos: int | None, chat: bool) -> tuple[int, ...]:
        messages: list[Message] = json.loads(key)
        if not chat:
            return encode_after(self._tokenizer, "".join(one["content"] for one in messages))
        end = "" if eos is None else self._tokenizer.decode([eos], skip_special_tokens=False)
        roles = self._taken(tuple(message["role"] for message in messages))
        if len(roles) < len(messages):
            messages = [{"content": "\n".join(message["content"] for message in messages)}]
        between = self._rest(
            [{**one, "role": role} for role, one in zip(roles, messages, strict=True)]
        )
        text = without_end(self._tokenizer, between, end)
        return encode_after(self._tokenizer, text, end if adds_space(self._tokenizer) else "")

    def _roles_taken(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the roles in which the template takes messages of these roles after one of the
        assistant: the roles themselves, or that of the user for each message, or for all together.
        """
        users = ("user",) * len(roles)
        errors = []
        for given in dict.fromkeys((roles, users, users[:1])):
            words = [f"OBSERVATION{number}" for number in range(len(given))]
            try:
                pairs = zip(given, words, strict=True)
                text = self._rest([{"role": role, "content": word} for role, word in pairs])
                if all(word in text for word in words):
                    if given != roles:
                        self._notify(
                            f"the chat template has no place for messages of {', '.join(roles)}"
                            f" after a turn of the assistant; given as {', '.join(given)}"
                        )
                    return given
                errors.append(f"the chat template leaves out messages of {', '.join(given)}")
            except UserError as error:
                errors.append(str(error))
        raise UserError(f"{', '.join(roles)} after a turn of the assistant: {errors[0]}")

    def _rest(self, messages: Sequence[Message]) -> str:
        """Returns what the template renders after an assistant's message that is followed by
        these."""
        mark = _MARK
        while any(mark in message["content"] for message in messages):
            mark += "_"
        begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        return render(self._tokenizer, [*begun, *messages], True).partition(mark)[2]
