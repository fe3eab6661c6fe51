"""Texts that spell a token without being it: what a message says is text, and only the chat
template writes the tokens of the turns.

In the text of a chat a mark stands within whatever spells such a token in a message. A template
trims, splits and quotes marked contents as any others, nobody who searches its text takes them for
the template's own tokens, and `encode_marked` makes ordinary tokens of them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from jaxrl.errors import UserError, short

MARK = "\udb7f"
"""Half of a surrogate pair, which no text has. It stands after the first character of a text that
spells a token, and beside a text that would spell one with what stands there."""
_QUOTED = MARK.encode("ascii", "backslashreplace").decode()
"""The mark as `repr` and JSON of ASCII characters write it."""


def mark_tokens(value: Any, tokens: Collection[str]) -> Any:
    """Returns a text, or a value of JSON with all its texts, in which the spellings of tokens are
    marked. Raises UserError for a text with half of a surrogate pair in the mark's place."""
    if isinstance(value, str):
        if MARK in value:
            raise UserError(f"the tokenizer cannot split {short(repr(value))}")
        if not any(token in value for token in tokens):
            return value
        starts = f"(?=(?:{'|'.join(map(re.escape, tokens))}))."
        return re.sub(starts, lambda match: match[0] + MARK, value, flags=re.DOTALL)
    if isinstance(value, Mapping):
        return {mark_tokens(key, tokens): mark_tokens(one, tokens) for key, one in value.items()}
    return [mark_tokens(one, tokens) for one in value] if isinstance(value, list | tuple) else value


def with_marked_ends(
    message: Mapping[str, Any], tokens: frozenset[str], normal: Callable[[str], str] | None
) -> dict[str, Any]:
    """Returns a message whose content and name make no token together with what stands beside them
    (the template's text, another part of the content), nor once the tokenizer has normalised
    them."""
    heads, tails, parts = _parts(tokens)

    def text(value: str) -> str:
        def spells() -> bool:
            return normal is not None and bool(_any_of(tokens).search(normal(value)))

        if value in parts or value.startswith(tails) or (MARK not in value and spells()):
            value = MARK + value
        if (head := next(filter(value.endswith, heads), None)) is not None:
            at = len(value) - len(head) + 1
            value = value[:at] + MARK + value[at:]
        return value

    def within(value: Any) -> Any:
        if isinstance(value, list):
            return [{**one, "text": within(one["text"])} if "text" in one else one for one in value]
        return text(value) if isinstance(value, str) and value else value

    return {key: within(one) if key in ("content", "name") else one for key, one in message.items()}


@lru_cache(16)
def _parts(tokens: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """Returns the beginnings of tokens, the longest first, their ends, and what is within them."""
    ends = [(token, at) for token in tokens for at in range(1, len(token))]
    heads = sorted({token[:at] for token, at in ends}, key=len, reverse=True)
    parts = {token[a:b] for token, b in ends for a in range(1, b)}
    return tuple(heads), tuple({token[at:] for token, at in ends}), frozenset(parts)


def remove_marks(text: str) -> str:
    """Returns a text, or a message that quotes one, without marks."""
    return text.replace(MARK, "").replace(_QUOTED, "")


def encode_marked(tokenizer: Any, text: str, tokens: frozenset[str]) -> tuple[int, ...]:
    """Encodes the text of a chat in which a message spells some of `tokens`: marked spellings
    become ordinary tokens, and all others those that they are."""
    encoder, names = _renamed(tokenizer, tokens)
    text = _any_of(names).sub(lambda match: names[match[0]], text).replace(MARK, "")
    return tuple(encoder.encode(text, add_special_tokens=False).ids)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


@lru_cache(4)
def _renamed(tokenizer: Any, tokens: frozenset[str]) -> tuple[Any, dict[str, str]]:
    """Returns the tokenizer with other names for some added tokens, which no text spells, and these
    names."""
    from tokenizers import Tokenizer  # a tenth of a second

    names = {token: f"\ufdd0{secrets.token_hex(8)}\ufdd1" for token in sorted(tokens)}

    def name(token: str) -> str:
        return names.get(token, token)

    given = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in given["added_tokens"]:
        token["content"] = name(token["content"])
    model = given["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {name(piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [[name(piece), score] for piece, score in model["vocab"]]
    if "merges" in model:  # none may make a renamed token
        pairs = (
            (*pair,) if isinstance(pair, list) else (*pair.split(" "),) for pair in model["merges"]
        )
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    if model.get("unk_token"):
        model["unk_token"] = name(model["unk_token"])
    encoder = Tokenizer.from_str(
        json.dumps(given | {"post_processor": None, "truncation": None, "padding": None})
    )
    return encoder, names
