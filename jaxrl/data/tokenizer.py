"""Text to tokens and back, with chat templates; and whether two models speak the same tokens."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import TemplateRuntimeError

from jaxrl.data.example import Message
from jaxrl.errors import UserError, short
from jaxrl.formats import hf
from jaxrl.process.plain import JsonObject
from jaxrl.types import Prompt

Tokenizer = Any
"""A transformers `PreTrainedTokenizerBase`; Any, because transformers takes seconds to import."""
PromptLike = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages."""
TEMPLATE_LINES = 1_000_000
"""A chat of a thousand turns takes a tenth of it."""
_SHOWN = 5
"""Differing ids that an error names; the others are counted."""


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder or a `.gguf` file; None where a folder has none.

    Nothing is fetched: only files that are there are read. No code in them is run
    (`trust_remote_code` is always False).

    Raises:
        UserError: nothing at `path`, or tokenizer files that cannot be read.
    """
    place = Path(path)
    if not place.exists():
        raise UserError(f"tokenizer: {path}: there is no such file or folder")
    if place.suffix == ".gguf":
        from jaxrl.formats import gguf_tokenizer  # imports transformers

        return gguf_tokenizer.load(place)
    if not hf.has_tokenizer(place):
        return None
    # It advises to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # takes seconds

    try:
        return AutoTokenizer.from_pretrained(
            str(place), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever the readers of transformers raise, Exception included
        raise UserError(f"tokenizer: {path}: cannot be read: {_one_line(error)}") from error


def has_template(tokenizer: Tokenizer | None) -> bool:
    """Whether chat messages can be rendered."""
    return tokenizer is not None and bool(tokenizer.chat_template)


def encode_prompt(
    tokenizer: Tokenizer | None, prompt: PromptLike, tools: Sequence[JsonObject] = ()
) -> tuple[int, ...]:
    """Tokens of a prompt, at least one.

    Args:
        tokenizer: may be None for token ids.
        prompt: text, with the tokenizer's own BOS but no EOS; messages, rendered by the chat
            template up to where the assistant's turn begins; or token ids, taken as they are.
        tools: JSON schemas that the chat template shows; text and ids have no place for them.
    """
    messages = as_messages(prompt)
    if messages is not None:
        tokens = render_chat(tokenizer, messages, add_generation_prompt=True, tools=tools)
    elif isinstance(prompt, str):
        tokens = _encode_text(tokenizer, prompt)
    else:
        tokens = _token_ids(prompt)
    if not tokens:
        raise UserError(f"the prompt {short(repr(prompt))} has no tokens")
    return tokens


def encode_completion(
    tokenizer: Tokenizer,
    prompt: PromptLike,
    completion: str | Message,
    eos_ids: Sequence[int],
    tools: Sequence[JsonObject] = (),
) -> tuple[int, ...]:
    """Tokens that follow `encode_prompt(tokenizer, prompt, tools)` in a sequence of both, EOS
    last.

    They are what the whole sequence has beyond the prompt, up to the first EOS: as sampling would
    give them. Where the whole does not begin with the prompt's tokens (a merge across the border, a
    template that rewrites earlier turns), the completion is tokenised on its own.

    Args:
        completion: text; after a chat it may also be the message itself.
        eos_ids: what ends a completion; where none follows it, the tokenizer's own or else the
            first is added.
    """
    if not eos_ids:
        raise UserError(
            "completions need an EOS token: the model's config and its tokenizer name none"
        )
    head, messages = encode_prompt(tokenizer, prompt, tools), as_messages(prompt)
    text: str = completion if isinstance(completion, str) else completion["content"]
    if messages is not None:
        turn = {"role": "assistant", "content": text}
        whole = render_chat(tokenizer, [*messages, turn], False, tools)
        if not isinstance(completion, str) and "tool_calls" in completion:
            without, calls = whole, [*messages, completion]
            whole = render_chat(tokenizer, calls, False, tools)
            if whole == without or whole[: len(head)] != head:
                raise UserError(
                    "the chat template does not render `tool_calls` after the prompt: write the"
                    " calls as text, in the `content` of their message"
                )
    else:
        whole = _encode_text(tokenizer, prompt + text) if isinstance(prompt, str) else ()
    if whole[: len(head)] == head:
        tokens = whole[len(head) :]
    else:
        tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    for at, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: at + 1]
    own = tokenizer.eos_token_id
    return (*tokens, own if own in eos_ids else eos_ids[0])


def decode(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
    """Text of tokens, special ones left out."""
    return _need(tokenizer, "tokens").decode(list(tokens), skip_special_tokens=True)


def as_messages(prompt: PromptLike) -> Sequence[Message] | None:
    """The prompt where it is a chat, else None."""
    if isinstance(prompt, str) or not len(prompt) or not isinstance(prompt[0], Mapping):
        return None
    return prompt  # type: ignore[return-value]  # the first item says so


def chat_of(prompt: Prompt) -> Sequence[Message] | None:
    """The messages of a prompt that was a chat, else None. A text prompt may have a column
    `messages` too; of a chat, the prompt's text is the last message."""
    chat = prompt.columns.get("messages")
    messages = as_messages(chat) if isinstance(chat, Sequence) else None
    return None if messages is None or messages[-1].get("content") != prompt.text else messages


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
    _check_ids(ours, theirs)
    beyond = sorted(i for i in ours if i >= v)
    if beyond:
        smaller = "student" if student_rows <= teacher_rows else "teacher"
        raise UserError(
            f"the {smaller} has {v} embedding rows, which {len(beyond)} tokens lie beyond: "
            f"{_list(beyond, lambda i: f'{i} {ours[i]!r}')}; give it rows for them "
            "(resize_token_embeddings), or take them out of both tokenizers"
        )
    check_eos(student.eos_token_id, teacher.eos_token_id, set(student_eos), set(teacher_eos))
    return v


def same_prompts(student: Tokenizer, teacher: Tokenizer) -> bool:
    """Whether two tokenizers of one vocabulary make the same tokens of prompts."""
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
        chat = prompt.columns.get("messages")
        messages = as_messages(chat) if isinstance(chat, Sequence) else None
        tools = prompt.columns.get("tools")
        shown = tools if isinstance(tools, tuple) else ()
        if messages is None or encode_prompt(student, messages, shown) != prompt.tokens:
            continue  # no chat, or a text prompt whose row has such a column too
        if not has_template(teacher):
            raise UserError(
                "prompts are chats, but the teacher's tokenizer has no chat template: put the "
                "student's (chat_template.jinja) into the teacher's folder, or set data.chat=raw "
                "if the data are texts"
            )
        theirs = encode_prompt(teacher, messages, shown)
        if theirs != prompt.tokens:
            where = _first_difference(_spelt(student, prompt.tokens), _spelt(teacher, theirs))
            raise UserError(
                f"the chat templates of student and teacher make different prompts: {where}; set "
                "data.system_prompt if only the default system message differs, give both models "
                "one template (chat_template.jinja), or set data.chat=raw if the data are texts"
            )


def _check_ids(ours: Mapping[int, str], theirs: Mapping[int, str]) -> None:
    differing = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if differing:

        def both(i: int) -> str:
            return f"{i} is {_token(ours, i)} for the student, {_token(theirs, i)} for the teacher"

        raise UserError(
            f"student and teacher have different vocabularies: {len(differing)} ids differ: "
            f"{_list(differing, both)}; distillation needs a teacher with the student's tokenizer"
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
            "same eos_token in both tokenizer_config.json"
        )
    raise UserError(
        f"the models have different EOS ids: student {sorted(ours)}, teacher {sorted(theirs)}; "
        "set the same eos_token_id in both generation_config.json (or config.json)"
    )


def end_ids(stated: Sequence[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the tokens that end a completion, as vLLM has them: those that the model's config and
    generation config state, and the tokenizer's own."""
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys((*stated, *(() if own is None else (own,)))))


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
            f" tokenizer lie beyond: {_list(list(without), lambda i: f'{i} {without[i]!r}')}; give"
            " the model rows for them (resize_token_embeddings), or take them out of the tokenizer"
        )


def check_rows(tokenizer: Tokenizer, rows: int, tokens: Iterable[int], what: str) -> None:
    """Refuses tokens that a model's embedding of `rows` rows has no row for."""
    without = {i for i in tokens if i >= rows}
    if without:
        names = tokenizer.convert_ids_to_tokens(sorted(without))
        pairs = dict(zip(sorted(without), names, strict=True))
        raise UserError(
            f"{what} has tokens without a row in the embedding of the model, which has {rows}"
            f" (vocab_size): {_list(list(pairs), lambda i: f'{i} {pairs[i]!r}')}; give the model"
            " rows for them (resize_token_embeddings), or use none of them"
        )


def render_chat(
    tokenizer: Tokenizer | None,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[JsonObject] = (),
) -> tuple[int, ...]:
    """Tokens of messages by the tokenizer's chat template.

    Raises:
        UserError: no tokenizer, no template, or one that refuses the messages or does not end.
    """
    return tuple(_rendered(tokenizer, messages, add_generation_prompt, tools, tokenize=True))


def render_text(tokenizer: Tokenizer | None, messages: Sequence[Message]) -> str:
    """The text of which `render_chat` gives the tokens, up to where the assistant's turn begins.
    Raises UserError as it does."""
    return _rendered(tokenizer, messages, True, (), tokenize=False)


def _rendered(
    tokenizer: Tokenizer | None,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[JsonObject],
    tokenize: bool,
) -> Any:
    tokenizer = _need(tokenizer, "chat messages")
    if not tokenizer.chat_template:
        raise UserError(
            "chat messages need a tokenizer with a chat template, this has none; give text prompts"
        )
    try:
        with _limited_template():
            return tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                return_dict=False,
            )
    except Exception as error:  # a template is a program that comes with the model
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise UserError(
            f"the chat template refuses messages of {roles}: {_one_line(error)}"
        ) from error


@contextmanager
def _limited_template() -> Iterator[None]:
    """Ends a chat template that runs more than TEMPLATE_LINES lines of the Python that jinja makes
    of it: its sandbox limits one loop, but not loops within loops."""
    left, before = TEMPLATE_LINES, sys.gettrace()

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise TemplateRuntimeError(f"it does not end within {TEMPLATE_LINES} lines")
        return count

    def enter(frame: FrameType, *_: object) -> Any:
        return count if frame.f_code.co_filename == "<template>" else None

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def _encode_text(tokenizer: Tokenizer | None, text: str) -> tuple[int, ...]:
    """Tokens of a text to continue: special tokens may be put before it, but no EOS after it."""
    tokenizer = _need(tokenizer, "text")
    tokens = tuple(tokenizer(text)["input_ids"])
    if tokens and tokens[-1] == tokenizer.eos_token_id:
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not bare or bare[-1] != tokenizer.eos_token_id:
            return tokens[:-1]
    return tokens


def _token_ids(prompt: Sequence[Any]) -> tuple[int, ...]:
    try:
        return tuple(token.__index__() for token in prompt)
    except AttributeError as error:
        raise UserError(
            f"the prompt {short(repr(prompt))} is neither text, token ids nor chat messages"
        ) from error


def _need(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise UserError(f"{what} cannot be read: the model folder has no tokenizer; give token ids")
    return tokenizer


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}


def _token(vocabulary: Mapping[int, str], i: int) -> str:
    return repr(vocabulary[i]) if i in vocabulary else "no token"


def _list(ids: Sequence[int], describe: Callable[[int], str]) -> str:
    shown = "; ".join(describe(i) for i in ids[:_SHOWN])
    return shown + (f"; and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else "")


def _spelt(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of tokens, special ones included."""
    return tokenizer.decode(list(tokens), skip_special_tokens=False)


def _first_difference(student: str, teacher: str) -> str:
    """Where two texts part."""
    at = len(os.path.commonprefix([student, teacher]))
    ours, theirs = student[at : at + 40], teacher[at : at + 40]
    return f"from character {at} on, student {ours!r}, teacher {theirs!r}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
