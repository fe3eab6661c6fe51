"""The chat templates of the model families that the package trl brings, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(
    r"<[|｜][^<>'\"{}\s]{1,40}[|｜]>|<\|?/?[a-z_]{2,30}\|?>|<[A-Z_/]{2,30}>|\[/?[A-Z_]{3,30}\]"
)
_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates of models with images, which take no content that is text."""


@cache
def templates() -> dict[str, str]:
    """Name -> template; empty where trl is not installed. The package is not imported."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(next(iter(spec.submodule_search_locations))) / "chat_templates"
    found = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}
    return {name: text for name, text in found.items() if not name.startswith(_PARTS)}


@cache
def tokenizer_of(name: str) -> Any:
    """A tokenizer of bytes, two line breaks as one token as real vocabularies have them, with the
    template's special tokens and the token with which it ends a chat."""
    template = templates()[name]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("Ċ", "Ċ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    special = sorted(
        {*_SPECIAL.findall(template), "<|bos|>", "<|eos|>", "<|pad|>", "<think>", "</think>"}
    )
    plain = ("think", "tool", "function", "parameter", "arg_")
    inner.add_special_tokens(
        [AddedToken(one, special=not any(word in one for word in plain)) for one in special]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=template,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
    )
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    tail = made.apply_chat_template(chat, tokenize=False).rpartition("answer")[2]
    ends = [one for one in special if tail.strip().startswith(one)]
    if "<|END_OF_TURN_TOKEN|>" in tail:
        ends = ["<|END_OF_TURN_TOKEN|>"]
    made.eos_token = ends[0] if ends else "<|eos|>"
    return made


def call(arguments: Any, content: str = "", **fields: Any) -> dict[str, Any]:
    """A turn of the assistant that calls a tool; `...` stands for no field."""
    function = {"name": "look", "arguments": arguments}
    if arguments is ...:
        del function["arguments"]
    calls = [{"type": "function", "id": "call00001", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **fields}


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "where"}},
            "required": ["city"],
        },
    },
}
ASK: dict[str, Any] = {"role": "user", "content": "2+2?"}
MORE: dict[str, Any] = {"role": "user", "content": "and\n\nthen?"}
FOUR: dict[str, Any] = {"role": "assistant", "content": "four"}
LAST: dict[str, Any] = {"role": "assistant", "content": "the end"}
RAIN: dict[str, Any] = {
    "role": "tool",
    "name": "look",
    "tool_call_id": "call00001",
    "content": "rain",
}
SUN: dict[str, Any] = {**RAIN, "content": "sun"}
BOTH: dict[str, Any] = {"role": "assistant", "content": "both"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
OSLO = {"city": "Oslo", "days": 2, "deep": {"a": [1, None, True]}}
CHATS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "answer": ([ASK, FOUR], False),
    "system": ([SYSTEM, ASK, FOUR], False),
    "two turns": ([ASK, FOUR, MORE, LAST], False),
    "unused tools": ([ASK, FOUR], True),
    "line breaks": ([ASK, {"role": "assistant", "content": "\n\nfour\n\n"}], False),
    "thoughts": ([ASK, {**FOUR, "reasoning_content": "two and two"}], False),
    "thoughts twice": (
        [
            ASK,
            {**FOUR, "reasoning_content": "two and two"},
            MORE,
            {**LAST, "reasoning_content": "so"},
        ],
        False,
    ),
    "think in content": (
        [ASK, {**FOUR, "content": "<think>\ntwo and two\n</think>\n\nfour"}],
        False,
    ),
    "call": ([ASK, call(OSLO)], True),
    "call and text": ([ASK, call(OSLO, "I look.")], True),
    "call and thoughts": ([ASK, call(OSLO, reasoning_content="where")], True),
    "call answered": ([ASK, call(OSLO), RAIN, LAST], True),
    "call as text": ([ASK, call(json.dumps(OSLO))], True),
    "call as text answered": ([ASK, call(json.dumps(OSLO)), RAIN, LAST], True),
    # More of the same kinds.
    "call of null": ([ASK, call(None), RAIN, LAST], True),
    "call of nothing": ([ASK, call("")], True),
    "call without arguments": ([ASK, call(...), RAIN, LAST], True),
    "call as other text": ([ASK, call('{"t":1.50}'), RAIN, LAST], True),
    "thinking": ([ASK, {**FOUR, "thinking": "two\n\nand two"}], False),
    "spaces": ([ASK, {**FOUR, "content": " four "}], False),
    "break first": (
        [ASK, {**FOUR, "content": "\nfour"}, MORE, {**LAST, "content": "\n\n\nend"}],
        False,
    ),
    "empty": ([ASK, {**FOUR, "content": ""}, MORE, LAST], False),
    "same": ([ASK, FOUR, ASK, FOUR, ASK, FOUR], False),
    "think in both": (
        [
            ASK,
            {**FOUR, "content": "<think>\ntwo\n</think>\n\nfour"},
            MORE,
            {**LAST, "content": "<think>so</think>the end"},
        ],
        False,
    ),
    "calls and thoughts": (
        [
            SYSTEM,
            ASK,
            call(OSLO, reasoning_content="where"),
            RAIN,
            call({"city": "Rome"}, "Again.", reasoning_content="there"),
            {**RAIN, "content": '{"sun": 1}'},
            {**LAST, "reasoning_content": "done"},
        ],
        True,
    ),
    "call then more": ([ASK, call(OSLO), RAIN, FOUR, MORE, LAST], True),
    # Agents' chats, whose earlier turns some templates write in another way once later ones follow.
    "rounds": (
        [
            ASK,
            call({"city": "Oslo"}, reasoning_content="first"),
            RAIN,
            call({"city": "Rome"}, reasoning_content="then"),
            SUN,
            BOTH,
        ],
        True,
    ),
    "rounds then more": (
        [
            ASK,
            call({"city": "Oslo"}, reasoning_content="first"),
            RAIN,
            call({"city": "Rome"}, reasoning_content="then"),
            SUN,
            {**BOTH, "reasoning_content": "done"},
            MORE,
            LAST,
        ],
        True,
    ),
    "round, more, round": (
        [
            ASK,
            call({"city": "Oslo"}, reasoning_content="first"),
            RAIN,
            BOTH,
            MORE,
            call({"city": "Rome"}),
            SUN,
            LAST,
        ],
        True,
    ),
    "rounds with text": (
        [ASK, call({"city": "Oslo"}, "I look."), RAIN, call({"city": "Rome"}), SUN, BOTH],
        True,
    ),
    "same rounds": (
        [
            ASK,
            call({"city": "Oslo"}, reasoning_content="first"),
            RAIN,
            call({"city": "Oslo"}, reasoning_content="first"),
            RAIN,
            FOUR,
            ASK,
            FOUR,
        ],
        True,
    ),
    "answers in a row": ([ASK, FOUR, BOTH], False),
}
