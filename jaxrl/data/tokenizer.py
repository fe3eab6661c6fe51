"""Text to tokens and back, with chat templates; and whether two models speak the same tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.data import chat_template
from jaxrl.data.example import Message, is_learned
from jaxrl.data.spelled_tokens import MARK, encode_marked
from jaxrl.data.thoughts import CHANNELS, opening_of
from jaxrl.errors import UserError, short, user_path
from jaxrl.formats import hf
from jaxrl.process.json_types import read_json
from jaxrl.types import NO_INPUTS, Prompt, TemplateInputs, Turn

Tokenizer = Any
"""A transformers `PreTrainedTokenizerBase`; Any, because transformers takes seconds to import."""
PromptLike = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages."""
_BORDERS = ("\n", "0", "|", "x")
"""Texts that a text is tokenised behind where its first token must not begin with a space that is
not there."""
_OF_GGUF = "; of a GGUF file, in those of the folder that `jaxrl export FILE.gguf FOLDER` writes"
_MOST_GROWTH = 1024
_MOST_ID = 2**24 - 1
_SHOWN = 5
"""Differing ids that an error names; the others are counted."""


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """Loads the tokenizer of a Hugging Face folder or a `.gguf` file; returns None where a folder
    has none.

    Texts are split as its `tokenizer.json` says, the file that the model was trained with: some
    classes of transformers that a config names split them in a way of their own. Nothing is
    fetched: only files that are there are read. No code in them is run (`trust_remote_code` is
    always False).

    Raises:
        UserError: nothing at `path`, or tokenizer files that cannot be read.
    """
    place = Path(path)
    if not place.exists():
        raise UserError(f"tokenizer: {path}: there is no such file or folder")
    if place.suffix == ".gguf":
        from jaxrl.formats import gguf  # a tenth of a second

        return gguf.read_tokenizer(place)
    if not hf.has_tokenizer(place):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # take seconds

    whole = (place / hf.TOKENIZER).is_file()
    _check_ids(place)
    try:
        with _panics("cannot be read"):
            loaded = (PreTrainedTokenizerFast if whole else AutoTokenizer).from_pretrained(
                str(place), local_files_only=True, trust_remote_code=False
            )
            loaded("x")  # what its config says of the wrong type is first read here
    except Exception as error:  # whatever the readers of transformers raise, Exception included
        raise UserError(f"tokenizer: {path}: cannot be read: {_one_line(error)}") from error
    growth = _growth(loaded)
    if growth > _MOST_GROWTH:
        raise UserError(
            f"tokenizer: {path}: its normalizer makes a text up to {growth:.3g} times as long; at"
            f" most {_MOST_GROWTH} times are allowed: is tokenizer.json damaged?"
        )
    return loaded


def read_chat_template(name: str) -> str:
    """Reads a chat template: a Jinja file, or that of the model in a folder or a GGUF file.

    Raises:
        UserError: nothing there, no text, no template, or a model without one.
    """
    place = user_path(name)
    if place.is_dir() or place.suffix == ".gguf":
        own = load_tokenizer(place)
        template = None if own is None else own.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise UserError(f"{name}: the model there has no chat template")
        return str(template)
    try:
        template = place.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8, so no chat template") from error
    try:
        chat_template.program(template)
    except Exception as error:  # of Jinja, which is imported with transformers
        line = getattr(error, "lineno", None)
        where = "" if line is None else f", line {line}"
        raise UserError(f"{name}{where}: no chat template: {_one_line(error)}") from error
    return template


def _check_ids(folder: Path) -> None:
    """Refuses ids far beyond any vocabulary, for which transformers makes lists as long."""
    for name in (hf.TOKENIZER, hf.TOKENIZER_CONFIG, "vocab.json", "added_tokens.json"):
        file = folder / name
        for token, number in _ids_in(name, read_json(file)) if file.is_file() else ():
            if isinstance(number, int) and not 0 <= number <= _MOST_ID:
                raise UserError(
                    f"tokenizer: {file}: the token {short(repr(token))} has the id"
                    f" {short(str(number))}; ids are from 0 to {_MOST_ID}: is the file damaged?"
                )


def _ids_in(name: str, raw: dict[str, Any]) -> Iterator[tuple[object, object]]:
    """Yields the tokens in a tokenizer's file with their ids, whatever is there in their place."""

    def items(value: object) -> Iterable[tuple[str, Any]]:
        return value.items() if isinstance(value, dict) else ()

    if name == hf.TOKENIZER:
        yield from items(dict(items(raw.get("model"))).get("vocab"))
        added = raw.get("added_tokens")
        yield from ((t.get("content"), t.get("id")) for t in added or () if isinstance(t, dict))
    elif name == hf.TOKENIZER_CONFIG:
        added = items(raw.get("added_tokens_decoder"))
        yield from ((token, int(number)) for number, token in added if number.isdecimal())
    else:
        yield from items(raw)


def _growth(tokenizer: Tokenizer) -> float:
    """Returns by what factor the normalizer may lengthen a text through its replacements."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = [] if backend is None else [json.loads(backend.to_str()).get("normalizer")]
    growth = 1.0
    while steps:
        step = steps.pop() or {}
        steps += step.get("normalizers", ())
        if step.get("type") == "Replace":
            # A regular expression may match one character, or between any two.
            short = len(step["pattern"].get("String", "")) or 1
            growth *= max(1.0, len(step["content"]) / short)
    return growth


@contextmanager
def _panics(what: str, text: str | None = None) -> Iterator[None]:
    """Raises UserError where the Rust code of a tokenizer panics, which is no Exception in Python:
    at a regular expression that backtracks without end; and where it takes a text for none, such as
    one with half of a surrogate pair."""
    try:
        yield
    except BaseException as error:
        refused = text is not None and isinstance(error, TypeError | ValueError)
        if type(error).__name__ != "PanicException" and not refused:
            raise
        what += "" if text is None else f" {short(repr(text))}"
        raise UserError(f"the tokenizer {what}: {_one_line(error)}") from error


def encode_prompt(
    tokenizer: Tokenizer | None, prompt: PromptLike, inputs: TemplateInputs = NO_INPUTS
) -> tuple[int, ...]:
    """Encodes a prompt as tokens, at least one.

    Args:
        tokenizer: may be None for token ids.
        prompt: text, with the tokenizer's own BOS but no EOS; messages, rendered by the chat
            template up to where the assistant's turn begins; or token ids, taken as they are.
        inputs: what the chat template reads beside messages; text and ids have no place for it.
    """
    messages = as_messages(prompt)
    if messages is not None:
        tokens = render_chat(tokenizer, messages, True, inputs)
    elif isinstance(prompt, str):
        tokens = encode_text(tokenizer, prompt, eos=False)
    else:
        try:
            if isinstance(prompt, bytes | set):
                raise TypeError  # numbers, but no tokens one after the other
            tokens = tuple(token.__index__() for token in prompt)  # type: ignore[union-attr]
        except (AttributeError, TypeError) as error:
            raise UserError(
                f"the prompt {short(repr(prompt))} is neither text, token ids nor chat messages"
            ) from error
    if not tokens:
        raise UserError(f"the prompt {short(repr(prompt))} has no tokens")
    return tokens


@dataclass(frozen=True)
class Encoded:
    """A prompt with the completion that the data have."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    """EOS last."""
    turns: tuple[Turn, ...]
    """The parts of the completion, in order; they have all of its tokens between them."""
    notes: tuple[tuple[str, str], ...] = ()
    """(kind, text): what the user should know about how the chat template renders the chat."""


def encode_completion(
    tokenizer: Tokenizer,
    prompt: PromptLike,
    completion: str | Sequence[Message],
    eos_ids: Sequence[int],
    inputs: TemplateInputs = NO_INPUTS,
) -> Encoded:
    """Returns the tokens of a prompt and of the completion that the data have for it.

    Their text is that of the whole: of a chat the template's (`chat_template.split_chat`), up to
    the EOS that ends the last turn. After a text it is the whole completion, in which the tokens
    that it spells are tokens.

    Args:
        completion: text, which after a chat is a turn of the assistant, whose end it may spell; or,
            after a chat, the messages themselves, of which those of the assistant are learned, the
            first and the last among them.
        eos_ids: what ends a completion; where it does not end with one, the tokenizer's own or else
            the first is added.

    Raises:
        UserError: no EOS, or a chat template that refuses the chat or leaves out its tool calls.
    """
    if not eos_ids:
        raise UserError(
            "completions need an EOS token: the model's config and its tokenizer name none"
        )
    messages, own = as_messages(prompt), chat_template.with_end_ids(tokenizer, eos_ids).eos_token_id
    end = own if own in eos_ids else eos_ids[0]
    ends = [_spelt(tokenizer, [one]) for one in eos_ids]
    if messages is None:
        assert isinstance(completion, str), "messages follow messages"
        head, whole = encode_prompt(tokenizer, prompt), tuple[int, ...]()
        if isinstance(prompt, str):
            begun = prompt == tokenizer.bos_token and completion.startswith(prompt)
            whole = encode_text(tokenizer, completion if begun else prompt + completion, eos=False)
        merged = not whole or whole[: len(head)] != head
        tokens = encode_after(tokenizer, completion) if merged else whole[len(head) :]
        last = max((n for n, token in enumerate(tokens) if token in eos_ids), default=-1)
        if last < 0 or _spelt(tokenizer, tokens[last + 1 :]).strip():
            tokens = (*tokens, end)
        return Encoded(head, tokens, (Turn("assistant", len(tokens), completion),))
    if isinstance(completion, str):
        if (written := _end_of(completion, ends)) is not None:  # a template writes it itself
            completion = completion.rstrip().removesuffix(written)
        completion = [{"role": "assistant", "content": completion}]
    chat = [*messages, *completion]
    several = sum(message["role"] == "assistant" for message in completion) > 1
    split = chat_template.split_chat(tokenizer, chat, len(messages), ends, inputs, marked=several)
    text, last, spaced = split.prompt, len(chat) - 1, adds_space(tokenizer)
    found: tuple[int, ...] = ()
    turns: list[Turn] = []
    said, ending = len(messages), False  # what no turn has spoken for yet; within the last turn
    for piece in split.pieces:
        # Behind a turn that ended, as `TurnEncoder` makes the tokens of an episode.
        tokens = encode_after(tokenizer, piece.text, "" if turns and not spaced else text)
        text += piece.text
        ending |= piece.learned and piece.message == last
        ended = next((n + 1 for n, one in enumerate(tokens) if ending and one in eos_ids), None)
        tokens = tokens[:ended]
        if piece.learned:
            content, said = chat[piece.message].get("content") or "", piece.message + 1
            turns.append(Turn("assistant", len(tokens), content))
        else:
            heard = list(takewhile(lambda one: not is_learned(one), chat[said:]))
            turns.append(heard_turn(heard, len(tokens)))
            said += len(heard)
        found += tokens
        if ended is not None:
            break
    else:
        if not turns:  # an empty turn that the template does not end
            turns.append(Turn("assistant", 0, ""))
        if turns[-1].role == "environment":  # what a template writes behind what it marks
            found = found[: len(found) - turns.pop().tokens]
        found = (*found, end)
        turns[-1] = replace(turns[-1], tokens=turns[-1].tokens + 1)
    prompt_tokens = _ids(tokenizer, split.prompt)
    notes = (*split.notes, *_ends_as_text(chat, len(messages), ends))
    return Encoded(prompt_tokens, found, tuple(turns), notes)


def heard_turn(messages: Sequence[Message], tokens: int) -> Turn:
    """Makes the part of a completion that has what others than the policy say in it."""
    said = "\n".join(message.get("content") or "" for message in messages)
    return Turn("environment", tokens, said, roles=roles_of(messages))


def roles_of(messages: Iterable[Message]) -> tuple[str, ...]:
    """Lists the roles of messages, each once."""
    return tuple(dict.fromkeys(message["role"] for message in messages))


def _end_of(text: str, ends: Iterable[str]) -> str | None:
    return next((end for end in ends if end and text.rstrip().endswith(end)), None)


def _ends_as_text(
    chat: Sequence[Message], first: int, ends: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yields notes of the learned messages whose content ends with what spells an end."""
    for at, message in enumerate(chat):
        end = _end_of(str(message.get("content") or ""), ends)
        if at >= first and message["role"] == "assistant" and end is not None:
            why = f"message {at}: its content ends with {end!r}, which is learned as text"
            yield "end", f"{why}, before the end that the template writes: remove it if it is that"


def encode_after(tokenizer: Tokenizer, text: str, before: str = "") -> tuple[int, ...]:
    """Encodes a text that continues another one as tokens.

    They are what both have beyond the tokens of the first. Where a token would span the border, the
    text is tokenised on its own, without the space that SentencePiece puts before a text.

    Args:
        before: the text that it continues, or the end of it; "": any.
    """
    borders = _BORDERS if adds_space(tokenizer) else ()
    for first in filter(None, (before, *borders)):
        head, whole = _ids(tokenizer, first), _ids(tokenizer, first + text)
        if whole[: len(head)] == head:
            return whole[len(head) :]
    return _ids(tokenizer, text)


def with_opening(tokenizer: Tokenizer, tokens: Sequence[int], opening: str) -> tuple[int, ...]:
    """Returns the tokens of a prompt with another end in place of what opens thoughts there
    (`opening_of`); "" takes it off."""
    own, at = opening_of(tokenizer, tokens), len(tokens)
    if own == opening:
        return tuple(tokens)
    while not (end := _spelt(tokenizer, tokens[at:])).endswith(own):
        at -= 1
    return (*tokens[:at], *encode_after(tokenizer, end.removesuffix(own) + opening))


def decode_text(
    tokenizer: Tokenizer | None, tokens: Sequence[int] | np.ndarray, special: bool = False
) -> str:
    """Decodes tokens to text; "" without a tokenizer.

    Args:
        special: with all tokens; else without those of the turns (`turn_tokens`), except those that
            tags of thoughts consist of, which other families have as text.
    """
    if tokenizer is None:
        return ""
    left_out = (
        frozenset[int]() if special else _ids_of(tokenizer, chat_template.turn_tokens(tokenizer))
    )
    kept = [token for token in map(int, tokens) if token not in left_out]
    return tokenizer.decode(kept, skip_special_tokens=False)


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, ...]:
    """Returns the text of each token, special ones too: joined, the text of all. What several
    tokens spell together, such as the bytes of one character, is the last one's text, and the
    others have ""."""
    texts, first, whole = list[str](), 0, 0  # `whole` tokens have texts, read from `first` on
    for end in range(1, len(tokens) + 1):
        before, text = (
            tokenizer.decode(list(tokens[first:stop]), skip_special_tokens=False)
            for stop in (whole, end)
        )
        complete = end == len(tokens) or not text.endswith("\ufffd")
        texts.append(text[len(before) :] if complete else "")
        if complete:
            first, whole = whole, end
    return tuple(texts)


@lru_cache(16)
def _ids_of(tokenizer: Tokenizer, names: frozenset[str]) -> frozenset[int]:
    hidden = [name for name in names if not any(name in tag for tag in CHANNELS)]
    return frozenset(tokenizer.convert_tokens_to_ids(hidden))


def as_messages(prompt: PromptLike) -> Sequence[Message] | None:
    """Returns the prompt if it is a chat, else None."""
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, str):
        return None
    is_chat = len(prompt) and isinstance(prompt[0], Mapping)
    return prompt if is_chat else None  # type: ignore[return-value]  # the first item says so


def chat_of(prompt: Prompt) -> Sequence[Message] | None:
    """Returns the messages of a prompt that was a chat, else None. A text prompt may have a column
    `messages` too; for a chat, the prompt's text is the last message."""
    messages = _messages_of(prompt)
    return None if messages is None or messages[-1].get("content") != prompt.text else messages


def _messages_of(prompt: Prompt) -> Sequence[Message] | None:
    chat = prompt.columns.get("messages")
    return as_messages(chat) if isinstance(chat, Sequence) else None


def check_same_vocabulary(
    student: Tokenizer | None,
    teacher: Tokenizer | None,
    student_rows: int,
    teacher_rows: int,
    student_eos: Iterable[int] = (),
    teacher_eos: Iterable[int] = (),
) -> int:
    """Refuses a teacher whose ids or EOS are not the student's.

    Args:
        student_rows, teacher_rows: rows of the embeddings, padding rows included.
        student_eos, teacher_eos: EOS ids of the model configs.

    Returns:
        V = min(rows): every loss uses the first V rows.

    Raises:
        UserError: naming the ids that differ, the first few and their number.
    """
    if student is None or teacher is None:
        who = "student" if student is None else "teacher"
        raise UserError(
            f"{who}.model has no tokenizer, so that its tokens cannot be compared: put "
            "tokenizer.json and tokenizer_config.json into its folder"
        )
    v = min(student_rows, teacher_rows)
    ours, theirs = _by_id(student), _by_id(teacher)
    differing = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if differing:

        def both(i: int) -> str:
            here, there = (repr(names[i]) if i in names else "no token" for names in (ours, theirs))
            return f"{i} is {here} for the student, {there} for the teacher"

        raise UserError(
            f"student and teacher have different vocabularies: {len(differing)} ids differ: "
            f"{_first(differing, both)}; distillation needs a teacher with the student's tokenizer"
        )
    check_every_token(student, v, "the student" if student_rows <= teacher_rows else "the teacher")
    check_eos(student.eos_token_id, teacher.eos_token_id, set(student_eos), set(teacher_eos))
    return v


def same_prompts(student: Tokenizer, teacher: Tokenizer) -> bool:
    """Returns whether two tokenizers with the same vocabulary make the same tokens of prompts."""
    probe = "a prompt"
    begin = encode_prompt(student, probe) == encode_prompt(teacher, probe)
    return begin and student.chat_template == teacher.chat_template


def check_same_prompts(
    student: Tokenizer | None, teacher: Tokenizer | None, prompts: Iterable[Prompt]
) -> None:
    """Refuses a teacher whose chat template makes other prompts of the run's chats than the
    student's, which renders them. Templates may differ in what none of these prompts uses.

    Raises:
        UserError: with the place where the two renderings part.
    """
    for prompt in prompts:
        messages = _messages_of(prompt)
        if messages is None or encode_prompt(student, messages, prompt.inputs) != prompt.tokens:
            continue  # no chat, or a text prompt whose row has such a column too
        if not chat_template.has_template(teacher):
            raise UserError(
                "prompts are chats, but the teacher's tokenizer has no chat template: set"
                " teacher.chat_template to the student's folder or file, or data.chat=raw if the"
                " data are texts"
            )
        theirs = encode_prompt(teacher, messages, prompt.inputs)
        if theirs != prompt.tokens:
            texts = _spelt(student, prompt.tokens), _spelt(teacher, theirs)
            at = len(os.path.commonprefix(texts))
            here, there = (repr(text[at : at + 40]) for text in texts)
            raise UserError(
                "the chat templates of student and teacher make different prompts: from character"
                f" {at} on, student {here}, teacher {there}; set "
                "data.system_prompt if only the default system message differs, give both models "
                "one template (teacher.chat_template, student.chat_template), or set data.chat=raw"
                " if the data are texts"
            )


def check_eos(student: int | None, teacher: int | None, ours: set[int], theirs: set[int]) -> None:
    """Refuses a teacher that ends completions at other tokens than the student (`end_ids`).

    Args:
        student, teacher: EOS ids of the tokenizers.
        ours, theirs: EOS ids of the model configs.
    """
    ours = ours | (set() if student is None else {student})
    theirs = theirs | (set() if teacher is None else {teacher})
    if ours == theirs:
        return
    if student != teacher:
        raise UserError(
            f"the tokenizers have different EOS ids: student {student}, teacher {teacher}; set the "
            f"same eos_token in both tokenizer_config.json{_OF_GGUF}"
        )
    raise UserError(
        f"the models have different EOS ids: student {sorted(ours)}, teacher {sorted(theirs)}; "
        f"set the same eos_token_id in both generation_config.json (or config.json){_OF_GGUF}"
    )


def end_ids(stated: Sequence[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the tokens that end a completion, as vLLM has them: those that the model's config and
    generation config state, and the tokenizer's own."""
    own = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return tuple(dict.fromkeys((*stated, *own)))


def tokens_without_row(tokenizer: Tokenizer, rows: int) -> dict[int, str]:
    """Returns the tokens, by id, that an embedding of so many rows has no row for."""
    return {i: token for i, token in sorted(_by_id(tokenizer).items()) if i >= rows}


def check_every_token(tokenizer: Tokenizer, rows: int, model: str) -> None:
    """Refuses a tokenizer with any token that the model's embedding of `rows` rows has no row for:
    for texts that are only known while a run works."""
    without = tokens_without_row(tokenizer, rows)
    if without:
        raise UserError(
            f"{model} has {rows} embedding rows (vocab_size), which {len(without)} tokens of its"
            f" tokenizer lie beyond: {_first([*without.items()], _spell)}; give the"
            " model rows for them (resize_token_embeddings), or take them out of each"
            " tokenizer that has them"
        )


def check_rows(tokenizer: Tokenizer, rows: int, tokens: Iterable[int], what: str) -> None:
    """Refuses tokens that a model's embedding of `rows` rows has no row for."""
    without = sorted({i for i in tokens if i >= rows})
    if without:
        names = zip(without, tokenizer.convert_ids_to_tokens(without), strict=True)
        raise UserError(
            f"{what} has tokens without a row in the embedding of the model, which has {rows}"
            f" (vocab_size): {_first([*names], _spell)}; give the model"
            " rows for them (resize_token_embeddings), or use none of them"
        )


def render_chat(
    tokenizer: Tokenizer | None,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    inputs: TemplateInputs = NO_INPUTS,
) -> tuple[int, ...]:
    """Renders messages as tokens with the tokenizer's chat template; raises as `render_text`."""
    return _ids(
        tokenizer, chat_template.render_text(tokenizer, messages, add_generation_prompt, inputs)
    )


def encode_text(tokenizer: Tokenizer | None, text: str, eos: bool = True) -> tuple[int, ...]:
    """Encodes a text as tokens with the tokenizer's special ones; a BOS that the text begins with
    is not doubled.

    Args:
        eos: False leaves out an EOS that the tokenizer adds: the text goes on.
    """
    if tokenizer is None:
        raise UserError("text cannot be read: the model folder has no tokenizer; give token ids")
    with _panics("cannot split", text):
        tokens = tuple(tokenizer(text)["input_ids"])
    bos = tokenizer.bos_token_id
    tokens = tokens[1:] if bos is not None and tokens[:2] == (bos, bos) else tokens
    if eos or tokens[-1:] != (tokenizer.eos_token_id,):
        return tokens
    return tokens if _ids(tokenizer, text)[-1:] == tokens[-1:] else tokens[:-1]


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Encodes a text as tokens as it is, including special ones that it spells out, but for those
    that a chat's text has marked (`data.spelled_tokens`)."""
    with _panics("cannot split", text):
        if MARK in text and getattr(tokenizer, "backend_tokenizer", None) is not None:
            return encode_marked(tokenizer, text, chat_template.turn_tokens(tokenizer))
        if MARK in text:  # written in Python: parts of a spelling are none
            first, *parts = text.split(MARK)
            rest = (encode_after(tokenizer, part) for part in parts)
            return (*_ids(tokenizer, first), *chain.from_iterable(rest))
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@lru_cache(16)
def adds_space(tokenizer: Tokenizer) -> bool:
    """Returns whether a space is put before each text, as SentencePiece does."""
    first = tokenizer.convert_ids_to_tokens(_ids(tokenizer, "x")[:1])
    return bool(first) and str(first[0]).startswith("\u2581")


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}


def _first(items: Sequence[Any], describe: Callable[[Any], str]) -> str:
    shown = "; ".join(map(describe, items[:_SHOWN]))
    return shown + (f"; and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _spell(token: tuple[int, object]) -> str:
    return f"{token[0]} {token[1]!r}"


def _spelt(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=False)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


_OBSERVATIONS = 4096
"""Different observations whose tokens are kept."""
_TURN = "ASSISTANT_TURN"


def cut_turns(turns: Iterable[Turn], most: int) -> tuple[Turn, ...]:
    """Cuts the turns of an episode to those of its first `most` tokens."""
    kept = []
    for turn in turns:
        if most > 0:
            kept.append(replace(turn, tokens=min(turn.tokens, most)))
        most -= turn.tokens
    return tuple(kept)


class TurnEncoder:
    """Tokens of what an environment says in an episode, for one tokenizer: no turn of the model is
    tokenised a second time.

    What follows a turn is taken from the chat template as text, and tokenised by itself. So the ids
    that the model wrote stay, also where the text of the whole chat would be tokenised otherwise
    (merges across a border, several spellings of one text) or rendered otherwise (templates that
    leave out earlier thoughts).
    """

    def __init__(self, tokenizer: Tokenizer, notify: Callable[[str], object] = lambda text: None):
        """
        Args:
            notify: gets a message, once, where the template has no role for the observations.
        """
        self._tokenizer, self._notify = tokenizer, notify
        self._kept = lru_cache(_OBSERVATIONS)(self._encoded)
        self._taken = lru_cache(_OBSERVATIONS)(self._roles_taken)

    def after(
        self,
        messages: Sequence[Message],
        *,
        eos: int | None,
        chat: bool,
        inputs: TemplateInputs = NO_INPUTS,
    ) -> tuple[int, ...]:
        """Returns the tokens from the end of one turn of the model to the beginning of its next.

        Args:
            messages: of the environment.
            eos: the turn's last token, where that is an EOS: it is left out where the template ends
                turns with it.
            chat: whether the prompt is a chat; else the texts follow as they are.
            inputs: what the template reads beside the messages, as it did in the prompt.

        Raises:
            UserError: the chat template has no place for the messages.
        """
        beside = [list(map(dict, inputs.tools)), dict(inputs.arguments)]
        keys = (json.dumps(one, ensure_ascii=False) for one in (list(map(dict, messages)), beside))
        return self._kept(*keys, eos, chat and chat_template.has_template(self._tokenizer))

    def _encoded(self, key: str, beside: str, eos: int | None, chat: bool) -> tuple[int, ...]:
        messages: list[Message] = json.loads(key)
        if not chat:
            return encode_after(self._tokenizer, "".join(one["content"] for one in messages))
        end = "" if eos is None else self._tokenizer.decode([eos], skip_special_tokens=False)
        roles = self._taken(tuple(message["role"] for message in messages), beside)
        if len(roles) < len(messages):
            messages = [{"content": "\n".join(message["content"] for message in messages)}]
        given = zip(roles, messages, strict=True)
        between = self._rest([{**one, "role": role} for role, one in given], beside)
        text = chat_template.without_end(self._tokenizer, between, end)
        return encode_after(self._tokenizer, text, end if adds_space(self._tokenizer) else "")

    def _roles_taken(self, roles: tuple[str, ...], beside: str) -> tuple[str, ...]:
        """Returns the roles in which the template takes messages of these roles after one of the
        assistant: the roles themselves, or that of the user for each message, or for all together.
        """
        users = ("user",) * len(roles)
        errors = []
        for given in dict.fromkeys((roles, users, users[:1])):
            words = [f"OBSERVATION{number}" for number in range(len(given))]
            try:
                pairs = zip(given, words, strict=True)
                said = [{"role": role, "content": word} for role, word in pairs]
                text = self._rest(said, beside)
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

    def _rest(self, messages: Sequence[Message], beside: str) -> str:
        """Renders messages behind one of the assistant's, without that."""
        mark = _TURN
        while any(mark in message["content"] for message in messages):
            mark += "_"
        begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        tools, arguments = json.loads(beside)
        inputs = TemplateInputs(tuple(tools), arguments)
        return chat_template.render_text(
            self._tokenizer, [*begun, *messages], True, inputs
        ).partition(mark)[2]
