"""The text of a chat by a tokenizer's chat template, and which parts of that text are learned.

There is one rendering of a chat: the template's own text of all of its messages. What is learned is
cut out of it, so that prompt and completion together always spell it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

from jinja2 import meta

from jaxrl.data.example import Message, is_learned
from jaxrl.data.spelled_tokens import mark_tokens, remove_marks, with_marked_ends
from jaxrl.data.thoughts import OPENS, OTHER_THOUGHTS, THOUGHT_FIELDS, THOUGHTS, opened_thoughts
from jaxrl.errors import UserError, near
from jaxrl.process.json_types import JsonObject
from jaxrl.process.waiting import waiting
from jaxrl.types import NO_INPUTS, TemplateInputs

_PROBES = ("Q", "Z")
"""Contents that stand in for a turn's, to see where the template puts it. They differ from their
first to their last character, and no template writes them between two turns."""
_LONGEST_HEADER = 64
"""Characters before a turn that are looked for, where it has no header of its own."""
_NO_BORDERS = (
    "where this turn of the assistant begins and ends cannot be found in the chat template's text;"
    " set data.completion_turns=last, or give the model a template that marks what is"
    " learned with {% generation %}"
)


def dated(tokenizer: Any, day: str | None) -> Any:
    """Returns the tokenizer, whose chat template shows this date (`strftime_now`) from now on, also
    in processes that it is sent to.

    Args:
        day: YYYY-MM-DD; None: the day of each rendering.
    """
    if tokenizer is not None:
        tokenizer.chat_date = day
    return tokenizer


def today() -> str:
    """Returns today's date, YYYY-MM-DD."""
    return date.today().isoformat()


Span = tuple[int, int]


class Unrendered(UserError):
    """A chat that the template refuses or leaves messages out of."""


@dataclass(frozen=True)
class ChatPiece:
    """A part of a chat's text after the prompt."""

    text: str
    learned: bool
    message: int
    """Index of the message that a learned piece belongs to, or that the others come before."""


@dataclass(frozen=True)
class Split:
    """The text of a chat, cut where what is learned begins and ends."""

    prompt: str
    pieces: tuple[ChatPiece, ...]
    """What follows the prompt; joined, they are the rest of the template's text."""
    notes: tuple[tuple[str, str], ...] = ()
    """(kind, text): what the user should know about how the template renders this chat."""


def has_template(tokenizer: Any) -> bool:
    return tokenizer is not None and bool(tokenizer.chat_template)


def with_end_ids(tokenizer: Any, ids: Iterable[int]) -> Any:
    """Returns the tokenizer, which from now on knows that these tokens end turns, too: a model's
    config may state others than its tokenizer."""
    if tokenizer is not None:
        tokenizer.end_ids = frozenset(ids) | getattr(tokenizer, "end_ids", frozenset())
    return tokenizer


def turn_tokens(tokenizer: Any) -> frozenset[str]:
    """Returns the texts of the added tokens that make the structure of a chat: BOS, padding, what
    ends a turn, and what the template writes around messages. Tags of thoughts and of calls, which
    stand within a turn, are none."""
    ends: frozenset[int] = getattr(tokenizer, "end_ids", frozenset())
    named = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
    return _turn_tokens(tokenizer, str(tokenizer.chat_template or ""), ends, named)


_WORD = "Q7Z"
_ASKS, _SAYS, _RULES = (
    {"role": role, "content": _WORD} for role in ("user", "assistant", "system")
)
_CALL = {"name": "look", "arguments": {"at": _WORD}}
_CALLS = {**_SAYS, "tool_calls": [{"id": "call00001", "type": "function", "function": _CALL}]}
_HEARS = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": _WORD}
_LOOK = {"name": "look", "description": _WORD, "parameters": {"type": "object", "properties": {}}}
_TOOLS = TemplateInputs(({"type": "function", "function": _LOOK},))


@lru_cache(16)
def _turn_tokens(
    tokenizer: Any, template: str, ends: frozenset[int], named: tuple[str | None, ...]
) -> frozenset[str]:
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    tags = [*THOUGHTS, *THOUGHTS.values()]
    possible = [token for token in added if not any(token in tag for tag in tags)]

    def text(*chat: Message) -> str:
        renderer = _Renderer(tokenizer, _TOOLS if _CALLS in chat else NO_INPUTS)
        return template and renderer.tried(renderer.in_form(chat, False), False) or ""

    def within(text: str) -> set[str]:
        return {token for token in possible if token in text}

    found = {*named, *tokenizer.convert_ids_to_tokens(sorted(ends))} & added.keys()
    # The last turn of the assistant may have more: tags of thoughts with names of the model's own.
    found |= within(text(_RULES, _ASKS) + text(_ASKS, _SAYS, _ASKS))
    found |= within(text(_ASKS, _SAYS).rpartition(_WORD)[2])
    calls, hears = text(_ASKS, _CALLS), text(_ASKS, _CALLS, _HEARS)
    at = _same_start(calls, hears)
    answers = within(hears[at:]) - within(calls[calls.find(_WORD) : at])
    found |= {token for token in answers if added[token]}
    # Some vocabularies have runs of spaces, or words, as added tokens.
    return frozenset(x for x in found if any(map(str.isalpha, x)) and not x.strip().isalnum())


def holds_turns(tokenizer: Any, text: str) -> bool:
    """Returns whether a text is a chat that the template has rendered already: it begins with a
    token of the turns, or with the text of a system message where the template writes nothing
    before that, and holds what the template writes between question and answer."""
    text, tokens = text.lstrip(), turn_tokens(tokenizer)
    starts, asks, border = _turn_shape(tokenizer, str(tokenizer.chat_template), tokens)
    start = next(filter(text.startswith, starts), None)
    rest = text.partition(asks)[2] if start is None and asks else text.removeprefix(start or "")
    return rest != text and border in "".join(rest.split())


@lru_cache(16)
def _turn_shape(
    tokenizer: Any, template: str, tokens: frozenset[str]
) -> tuple[tuple[str, ...], str, str]:
    """Finds what a rendered chat may begin with; what stands before a question, where a system
    message has nothing but BOS before it, else ""; and, without spaces, what stands between a
    question and its answer."""
    chats = (_ASKS,), (_RULES, _ASKS)
    asks, rules = (_Renderer(tokenizer, NO_INPUTS).tried(chat, True) or "" for chat in chats)
    heads = asks.partition(_WORD)[0], rules.partition(_WORD)[0]
    starts = [token for token in tokens if any(token in head for head in heads)]
    starts += [head.strip() for head in heads if any(token in head for token in starts)]
    behind = asks.rpartition(_WORD)[2]
    opened = OPENS.search(behind)
    border = "".join(behind[: opened.start() if opened else None].split())
    bos = str(tokenizer.bos_token or "")
    asks = heads[0].removeprefix(bos).strip()
    bare = bool(border) and heads[1].strip() in ("", bos) and any(one in asks for one in tokens)
    return (tuple(starts) if border else ()), asks if bare and rules else "", border


@dataclass(frozen=True)
class _Renderer:
    """A tokenizer's chat template with what it reads beside messages."""

    tokenizer: Any
    inputs: TemplateInputs

    def marked(
        self, messages: Sequence[Message], generation: bool
    ) -> tuple[_Renderer, list[Message]]:
        """Marks the texts of a chat, which spell no tokens: returns its renderer and messages."""
        if not has_template(self.tokenizer):
            return self, list(messages)  # refused where they are rendered
        tokens = turn_tokens(self.tokenizer)
        formed: list[Message] = mark_tokens(self.in_form(messages, generation), tokens)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        normalizer = getattr(backend, "normalizer", None)
        normal = None if normalizer is None else normalizer.normalize_str
        tools = tuple(mark_tokens(self.inputs.tools, tokens))
        inputs = TemplateInputs(tools, mark_tokens(self.inputs.arguments, tokens))
        formed = [with_marked_ends(message, tokens, normal) for message in formed]
        return _Renderer(self.tokenizer, inputs), formed

    def in_form(self, messages: Sequence[Message], generation: bool) -> list[Message]:
        """Returns the messages with the arguments of tool calls as the template takes them.

        Data write them as an object or as its text. Templates take objects, but some join texts,
        and some take both. The object is what templates document; the text is for those that refuse
        the object or print it as Python does. Where both give one text, the row's own form stays,
        which keeps its spelling (`1.50`).
        """
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)

        def filled(arguments: Any) -> Any:
            return {} if arguments is None or not str(arguments).strip() else arguments

        plain = [_with_arguments(message, filled) for message in messages]
        objects = [_with_arguments(message, _as_object) for message in plain]
        texts = [_with_arguments(message, _as_text) for message in objects]
        by_object, written = self.tried(objects, generation), list[Any]()
        for message in objects:
            _with_arguments(message, written.append)
        # what Python prints of an object is not JSON
        printed = [str(x) for x in written if isinstance(x, dict | list) and str(x) != _as_text(x)]
        refused = by_object is None or any(form in by_object for form in printed)
        if not refused and plain == objects:
            return objects  # spares a rendering
        by_text = self.tried(texts, generation)
        if refused and by_text is not None:
            return [_with_arguments(message, _as_text) for message in plain]
        return plain if by_object is not None and by_object == by_text else objects

    def render(self, messages: Sequence[Message], generation: bool) -> tuple[str, list[Span]]:
        """Returns the template's text of messages, and the parts of it that the template marks."""
        if self.tokenizer is None:
            raise UserError(
                "chat messages cannot be read: the model folder has no tokenizer; give token ids"
            )
        if not self.tokenizer.chat_template:
            raise UserError(
                "chat messages need a tokenizer with a chat template, this has none; give text"
                " prompts"
            )
        if not messages:
            raise UserError("the chat has no messages")
        blocks, marks = list[str](), list[Span]()
        day = getattr(self.tokenizer, "chat_date", None) or today()
        try:
            tools = list(self.inputs.tools) or None
            template = program(self.tokenizer.get_chat_template(tools=tools))
            with (
                waiting("the chat template, which renders one chat"),
                template.environment.activate_tracker(blocks, marks),
            ):
                for block in template.generate(
                    **{
                        **self.tokenizer.special_tokens_map,
                        "documents": None,
                        **self.inputs.arguments,
                        "messages": list(map(_as_templates_read, messages)),
                        "tools": tools,
                        "add_generation_prompt": generation,
                        "strftime_now": datetime.fromisoformat(day).strftime,  # at midnight
                    }
                ):
                    blocks.append(block)
        except Exception as error:  # a template is a program that comes with the model
            roles = ", ".join(str(message.get("role")) for message in messages)
            why = remove_marks(" ".join(str(error).split())[:300]) or type(error).__name__
            raise Unrendered(f"the chat template refuses messages of {roles}: {why}") from error
        return "".join(blocks), marks

    def tried(self, messages: Sequence[Message], generation: bool) -> str | None:
        try:
            return self.render(messages, generation)[0]
        except UserError:
            return None


def render_text(
    tokenizer: Any,
    messages: Sequence[Message],
    generation: bool = False,
    inputs: TemplateInputs = NO_INPUTS,
) -> str:
    """Returns the template's text of messages.

    Args:
        generation: whether the text goes on to where the assistant's next turn begins.
        inputs: what the template reads beside the messages.

    Returns:
        The text, in which the spellings of `turn_tokens` in messages are marked
        (`data.spelled_tokens`).

    Raises:
        UserError: no template, or one that refuses the messages.
    """
    renderer, messages = _Renderer(tokenizer, inputs).marked(messages, generation)
    return renderer.render(messages, generation)[0]


def split_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    first: int,
    ends: Sequence[str],
    inputs: TemplateInputs = NO_INPUTS,
    marked: bool = False,
) -> Split:
    """Cuts the template's text of a chat into the prompt and what follows it.

    A turn is learned from where the template's generation prompt ends. Where the text of the whole
    chat does not go on like that (a generation prompt that opens thoughts which the turn does not
    have), it is learned from where the two part.

    Args:
        messages: the whole chat, which ends with a turn of the assistant.
        first: index of the first message that is learned, one of the assistant; so are all later
            ones of the assistant.
        ends: texts of the tokens that end a completion.
        marked: whether, in a template that marks what is learned (`{% generation %}`), only what is
            marked is learned, and the token that ends each turn.

    Raises:
        UserError: no template; answers or tool calls of a learned turn that are not rendered; a
            text in which the turns cannot be told apart.
        Unrendered: a template that refuses the chat, or leaves out messages after the prompt.
    """
    renderer, messages = _Renderer(tokenizer, inputs).marked(messages, False)
    text, marks = renderer.render(messages, False)
    chat = _Chat(renderer, messages, text, tuple(ends))
    notes: list[tuple[str, str]] = []
    for number, one in enumerate(messages[:-1]):
        if one["role"] != "assistant" and not _shows_content(chat, number):
            why = f"message {number}: the chat template does not render messages of {one['role']}"
            if number > first:  # the assistant hears it later
                raise Unrendered(why)
            notes.append(("messages", f"{why}: the prompt is without it"))
    learned = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    starts = [chat.start(at) for at in learned]
    pieces: list[ChatPiece] = []
    at = starts[0]
    for message, start, limit in zip(learned, starts, [*starts[1:], len(text)], strict=True):
        spans = chat.spans(message, start, limit)
        if marked and marks:
            spans = _marked(marks, start, spans[-1][1], chat)
        for begin, stop in spans:
            if begin < at:
                raise UserError(f"message {message}: {_NO_BORDERS}")
            pieces.append(ChatPiece(text[at:begin], False, message))
            pieces.append(ChatPiece(text[begin:stop], is_learned(messages[message]), message))
            at = stop
    if not pieces:
        raise UserError("the chat template marks nothing of the assistant's turns to be learned")
    if at < len(text):
        pieces.append(ChatPiece(text[at:], False, len(messages)))
    begins = starts[0] + len(pieces[0].text)
    learned = [at for at in learned if is_learned(messages[at])]
    notes = [*chat.notes, *notes, *_not_rendered(chat, learned, text[begins:])]
    return Split(
        text[:begins],
        tuple(_joined(pieces[1:])),
        tuple((kind, remove_marks(note)) for kind, note in notes),
    )


def _joined(pieces: Sequence[ChatPiece]) -> Iterator[ChatPiece]:
    """Yields the pieces that have a text; those without loss are one between two learned ones."""
    for learned, some in groupby(filter(lambda one: one.text, pieces), lambda one: one.learned):
        parts = list(some)
        if learned:
            yield from parts
        else:
            yield ChatPiece("".join(one.text for one in parts), False, parts[-1].message)


class _Chat:
    """A rendered chat, and where its turns begin and end in the text."""

    def __init__(
        self, renderer: _Renderer, messages: Sequence[Message], text: str, ends: tuple[str, ...]
    ):
        self.renderer, self.messages, self.text, self.ends = renderer, messages, text, ends
        self.notes: list[tuple[str, str]] = []
        self._words = cache(self._find_words)
        added = renderer.tokenizer.added_tokens_decoder.values()
        self.added = sorted({token.content for token in added}, key=len, reverse=True)

    def start(self, at: int) -> int:
        """Finds where in the text that begins which the assistant writes in its message `at`."""
        prompt = self.renderer.tried(self.messages[:at], True)
        if prompt is not None and self.text.startswith(prompt):
            return len(prompt)
        words = self._words(at)
        if words is None:
            raise UserError(
                f"message {at}: the chat template does not render this turn of the assistant: give"
                " the model a template of whole chats"
            )
        heard = next(filter(None, map(self._words, range(at - 1, -1, -1))), (0, 0))
        low = heard[1] if heard[1] <= words[0] else 0
        if prompt is None:
            return self._headless(at, low, words[0])
        before = self.renderer.tried(self.messages[:at], False) or ""
        tail = prompt[_same_start(prompt, before) :]
        begins, unwritten = self._behind(at, prompt, tail, low, words[0])
        if not opened_thoughts(prompt):  # what opens the turn's thoughts is its own
            opened = len(opened_thoughts(self.text[low:begins]))
            begins, unwritten = begins - opened, self.text[begins - opened : begins] + unwritten
        if not self.notes:
            whole = self.text
            note = (
                f"message {at}: the chat template's generation prompt goes on with"
                f" {unwritten[:40]!r}, its text of the whole chat with"
                f" {whole[begins:][:40]!r}: from there on, the text of the whole chat is learned"
            )
            if not unwritten:
                parted = self._whole_tokens(_same_start(prompt, whole))
                note = (
                    f"message {at}: the chat template writes the messages before this turn"
                    f" differently once the chat continues: {prompt[parted:][:40]!r} in the"
                    f" generation prompt, {whole[parted:][:40]!r} in the text of the whole chat,"
                    " which is learned"
                )
            self.notes.append(("generation prompt", note))
        return begins

    def _behind(self, at: int, prompt: str, tail: str, low: int, high: int) -> tuple[int, str]:
        """Finds where message `at` begins, whose words begin at `high`, after the words of an
        earlier message, which end at `low`: after the last place that has the `tail` with which a
        prompt starts generation, or else the longest head of it. Also returns the rest of the tail,
        which the text lacks."""
        if not tail:  # a turn without a header: what it follows
            for length in range(min(len(prompt), _LONGEST_HEADER), 0, -1):
                place = self.text.rfind(prompt[-length:], max(0, low - length), high)
                if place >= 0:
                    return place + length, ""
        place = self.text.rfind(tail, low, high + len(tail)) if tail else -1
        if place >= 0:
            return place + len(tail), ""
        first = next((len(one) for one in self.added if one and tail.startswith(one)), 1)
        for length in range(len(tail) - 1, first - 1, -1):
            whole = tail[:length].endswith(tuple(self.added))
            place = self.text.rfind(tail[:length], low, high + length * whole)
            if place >= 0:
                begins = self._whole_tokens(place + length)
                return begins, tail[begins - place :]
        return self._headless(at, low, high), tail

    def _headless(self, at: int, low: int, high: int) -> int:
        """Finds where a turn begins that lacks the header of a generation prompt: where a plain
        turn would have other text, at the latest at its words."""
        plain, _ = self._differing(self._probed(at))
        return self._whole_tokens(plain if low <= plain < high else high)

    def spans(self, at: int, start: int, limit: int) -> list[tuple[int, int]]:
        """Returns the parts of the text that are message `at`: one, or two where the template
        writes what the message says besides its tool calls after the tools' answers (Gemma 4).

        Args:
            limit: where the next turn of the assistant begins, or the text ends.
        """
        message, heard = self.messages[at], self.messages[at + 1 : at + 2]
        if limit == len(self.text) and not heard:
            return [(start, limit)]
        if message.get("tool_calls") and message.get("content") and heard:
            says, answer = self._content(at), self._content(at + 1)
            if says and answer and heard[0]["role"] != "assistant" and answer[0] < says[0]:
                silent = {**message, "content": ""}
                text = self._with(at, silent) or ""
                chat = [*self.messages[:at], silent, *self.messages[at + 1 :]]
                calls = _Chat(self.renderer, chat, text, self.ends)
                stop = _run_end(self.added, self.text, says[1], self.ends) or limit
                ended = stop <= limit and self.text[:stop].endswith(self.ends)
                behind = says[0], stop if ended else says[1]
                return [(start, calls._end(at, start, answer[0])), behind]
        return [(start, self._end(at, start, limit))]

    def _content(self, at: int) -> tuple[int, int] | None:
        probes = self._probed(at, whole=True)
        return self._differing(probes) if probes and probes[0] != probes[1] else None

    def _differing(self, others: Sequence[str]) -> tuple[int, int]:
        """Returns where the part of the text begins and ends that other texts have otherwise."""
        ends = (text[::-1] for text in (self.text, *others))
        return _same_start(self.text, *others), len(self.text) - _same_start(*ends)

    def _end(self, at: int, start: int, limit: int) -> int:
        """Finds the index in the text at which message `at` ends, including the token that ends the
        turn where the template has one; the next turn of the assistant begins at `limit`."""
        text = self.text
        alone = self.renderer.tried(self.messages[: at + 1], False)
        for here, there in self._same_places(at, alone):
            # The chat that ends here has the same text up to the token that ends it, which may be
            # another one (`<|return|>` in place of `<|end|>`), or be followed by one.
            assert alone is not None
            common = self._whole_tokens(here + _same_start(text[here:], alone[there:]))
            rest = alone[there + common - here :]
            if start < common <= limit and not self._without_tokens(rest).strip():
                content = start + len(text[start:common].rstrip())
                if text[start:content].endswith(self.ends):
                    return content
                stop = _run_end(self.added, text, content, self.ends)
                ended = stop is not None and text[:stop].endswith(self.ends)
                return stop if stop is not None and (ended or rest.strip()) else content
        probes = self._probed(at)
        _, content = self._differing(probes)
        if probes and start <= content <= limit:
            end = _run_end(self.added, text, content, self.ends)
            if end is not None:
                return end
            if not self.messages[at].get("tool_calls"):
                return content
        raise UserError(f"message {at}: {_NO_BORDERS}")

    def _same_places(self, at: int, alone: str | None) -> Iterator[tuple[int, int]]:
        """Yields pairs of places, in the text and in the chat that ends with message `at`, from
        which on both are the same: the beginning, or, where that chat has other text before, the
        end of the words."""
        if alone is None:
            return
        yield 0, 0
        chat = _Chat(self.renderer, self.messages[: at + 1], alone, self.ends)
        if (ours := self._words(at)) and (theirs := chat._words(at)):
            yield ours[1], theirs[1]

    def _find_words(self, at: int) -> tuple[int, int] | None:
        """Returns where the words of a message (thoughts, content, arguments of calls) begin and
        end in the text; None if they make no difference to it."""

        def other(text: str) -> str:  # with another first and last character
            ends = (text[0].upper(), text[-1].upper())
            return next(probe for probe in (*_PROBES, "X") if probe not in ends)

        def other_arguments(arguments: Any) -> Any:
            changed = {_PROBES[0]: _PROBES[0]}
            return _as_text(changed) if isinstance(arguments, str) else changed

        message = self.messages[at]
        changes: JsonObject = {
            name: other(str(message[name]).strip())
            for name in ("content", *THOUGHT_FIELDS)
            if str(message.get(name) or "").strip()
        }
        if message.get("tool_calls"):
            changes["tool_calls"] = _with_arguments(message, other_arguments)["tool_calls"]
        found: list[str] = []
        for some in (changes, *({name: value} for name, value in changes.items())):
            text = self._with(at, {**message, **some})
            if text is not None and text != self.text:
                found.append(text)
            if text is not None and some is changes:
                break  # all at once tells as much as each
        found = found or [one for one in self._probed(at) if one != self.text]
        return self._differing(found) if found else None

    def _without_tokens(self, text: str) -> str:
        for token in self.added:
            text = text.replace(token, "")
        return text

    def _whole_tokens(self, at: int) -> int:
        """Returns the index or, within an added token, where that token begins."""
        for token in self.added:
            begin = self.text.find(token, max(0, at - len(token) + 1), at + len(token) - 1)
            if 0 <= begin < at:
                return begin
        return at

    def _probed(self, at: int, whole: bool = False) -> list[str]:
        """Returns the chat's text with other contents in message `at`, as a plain turn if possible
        and not `whole`."""
        plain = [] if whole else [{"role": self.messages[at]["role"]}]
        for keep in (*plain, self.messages[at]):
            found = [self._with(at, {**keep, "content": x}) for x in _PROBES]
            if None not in found:
                return [one for one in found if one is not None]
        return []

    def _with(self, at: int, message: Message) -> str | None:
        return self.renderer.tried([*self.messages[:at], message, *self.messages[at + 1 :]], False)


def _same_start(*texts: str) -> int:
    return len(os.path.commonprefix(texts))


def without_end(tokenizer: Any, text: str, end: str) -> str:
    """Returns the text that a template puts after a turn, without the tokens that the turn ended
    with: `end` and what comes before it."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    stop = _run_end(added, text, 0, (end,)) if end else None
    return text[stop:] if stop is not None and text[:stop].endswith(end) else text


def _run_end(added: Sequence[str], text: str, at: int, ends: Sequence[str]) -> int | None:
    """Returns the index after the first of `ends` in the run of added tokens that begins here,
    line breaks and spaces left out, or else after the first token of the run; None where there is
    none."""
    first, tokens = None, [token for token in (*ends, *added) if token]
    while True:
        rest = text[at:].lstrip()
        token = max(filter(rest.startswith, tokens), key=len, default=None)
        if token is None:
            return first
        at = text.index(token, at) + len(token)
        first = first or at
        if token in ends:
            return at


def _marked(marks: Sequence[Span], start: int, end: int, chat: _Chat) -> list[Span]:
    """Returns the parts of a turn that are marked, joined where they touch. The tokens after the
    last part belong to it: a turn that is learned is learned with its end."""
    spans: list[Span] = []
    for begin, stop in marks:
        empty = begin == stop and start <= begin <= end  # a turn that says nothing, and ends
        begin, stop = max(begin, start), min(stop, end)
        if begin <= stop and spans and spans[-1][1] == begin:
            spans[-1] = spans[-1][0], stop
        elif begin < stop or empty:
            spans.append((begin, stop))
    if spans and not chat._without_tokens(chat.text[spans[-1][1] : end]).strip():
        spans[-1] = spans[-1][0], end
    return [(begin, stop) for begin, stop in spans if begin < stop]


UNSEEN = {
    "calls": "does not render `tool_calls`: write the calls as text, in the `content` of their"
    " message",
    "answer": "does not render the answer {said!r}: give the model a template of whole chats",
    "thoughts": "does not render {where} ({said!r}): it is learned without them",
    "other thoughts": "does not render {where}: it is learned without it. Thoughts are read from"
    f" {' or '.join(THOUGHT_FIELDS)}",
    "content": "renders only a part of its `content` ({said!r}): that part is learned",
    "content with calls": "does not render its `content` with `tool_calls` ({said!r}): it is"
    " learned without it",
    "calls of the prompt": "does not render `tool_calls`: the prompt is without them",
}
"""What a message has and the template does not show -> what is said of it. Answers and tool calls
are errors: a turn would be learned that does something else."""
_ERRORS = ("calls", "answer")


def _not_rendered(chat: _Chat, learned: Sequence[int], text: str) -> list[tuple[str, str]]:
    """Notes what the template does not show, as (kind of UNSEEN, text), or raises UserError."""
    notes: list[tuple[str, str]] = []
    for at in learned:
        for kind, where, said in _unseen(chat, at, text):
            what = UNSEEN[kind].format(where=where, said=remove_marks(said.strip()[:40]))
            notes.append((kind, f"message {at}: the chat template {what}"))
            if kind in _ERRORS:
                raise UserError(notes[-1][1])
    for at, message in enumerate(chat.messages[: learned[0]]):
        if message.get("tool_calls") and not _shows(chat, at, ("tool_calls",)):
            kind = "calls of the prompt"
            return [*notes, (kind, f"message {at}: the chat template {UNSEEN[kind]}")]
    return notes


def _unseen(chat: _Chat, at: int, text: str) -> Iterator[tuple[str, str, str]]:
    """Yields kind of UNSEEN, field and text of what a learned message has and `text` does not."""
    message = chat.messages[at]
    if message.get("tool_calls") and not _shows(chat, at, ("tool_calls",)):
        yield "calls", "", ""
    field = next((name for name in THOUGHT_FIELDS if message.get(name)), "")
    thought = str(message.get(field) or "").strip()
    before, end, said = (message.get("content") or "").rpartition("</think>")
    if thought not in text and not _shows(chat, at, THOUGHT_FIELDS):
        yield "thoughts", f"its `{field}`", thought
    opened = before.partition("</think>")[0].rpartition("<think>")[2].strip() if end else ""
    if opened not in text:
        yield "thoughts", "the thoughts in its `content`", opened
    for field in sorted(set(message) & set(OTHER_THOUGHTS)):
        if message[field] and not _shows(chat, at, (field,)):
            yield "other thoughts", f"its `{field}`", ""
    if said.strip() in text:
        return
    if _shows_content(chat, at):
        longer = {**message, "content": f"{message['content']}{_PROBES[0]}"}
        if chat._with(at, longer) == chat.text:
            yield "content", "", said
    else:
        yield "content with calls" if message.get("tool_calls") else "answer", "", said


def _shows(chat: _Chat, at: int, fields: Sequence[str]) -> bool:
    bare = {name: value for name, value in chat.messages[at].items() if name not in fields}
    return chat._with(at, bare) != chat.text


def _shows_content(chat: _Chat, at: int) -> bool:
    """Returns whether the content of a message makes a difference to the text."""
    content = (chat.messages[at].get("content") or "").strip()
    return content in chat.text or any(one != chat.text for one in chat._probed(at, whole=True))


def shows_tools(tokenizer: Any, messages: Sequence[Message], inputs: TemplateInputs) -> bool:
    """Returns whether the template shows the tools in the prompt that messages make."""
    text = render_text(tokenizer, messages, True, inputs)
    names = [(tool.get("function") or tool).get("name") for tool in inputs.tools]
    if all(isinstance(name, str) and name in text for name in names):
        return True
    return render_text(tokenizer, messages, True, replace(inputs, tools=())) != text


def unread_arguments(tokenizer: Any, inputs: TemplateInputs) -> list[str]:
    """Returns a note for each argument that the template does not read."""
    if not inputs.arguments:
        return []
    read = _names_read(tokenizer.get_chat_template(tools=list(inputs.tools) or None))
    return [
        f"the chat template does not read its argument `{name}`{near(name, read)}: it changes"
        " nothing (data.chat_template_arguments, or `chat_template_kwargs` of a row)"
        for name in inputs.arguments
        if name not in read
    ]


@lru_cache(16)
def _names_read(template: str) -> frozenset[str]:
    """Returns the names that a template reads and does not make itself."""
    return frozenset(meta.find_undeclared_variables(program(template).environment.parse(template)))


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    calls = message.get("tool_calls")
    return message if not calls else {**message, "tool_calls": [_call(c, change) for c in calls]}


def _call(call: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], change)}
    return {**call, "arguments": change(call.get("arguments"))}


def _as_object(arguments: Any) -> Any:
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _as_text(arguments: Any) -> str:
    given = isinstance(arguments, str)
    return arguments if given else json.dumps(arguments, ensure_ascii=False, default=str)


def _as_templates_read(message: Message) -> JsonObject:
    """Returns a message with its thoughts under the names that templates read, nulls left out, as
    `apply_chat_template` of transformers gives it."""
    there = ((name, value) for name, value in message.items() if name != "weight")
    turn = {name: value for name, value in there if value is not None}
    found = [turn[name] for name in THOUGHT_FIELDS if name in turn]
    if found:
        thought = next(filter(None, found), found[0])
        turn |= {"thinking": turn.get("thinking") or thought, "reasoning_content": thought}
    return turn


def program(template: str) -> Any:
    """Compiles a template in the sandbox that transformers has for chat templates, once."""
    from transformers.utils import chat_template_utils  # seconds

    return chat_template_utils._compile_jinja_template(template)
