"""How an example becomes tokens: system prompt, few-shot rows, chat template, limits; and the
prompt that a teacher reads in its place."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from string import Formatter
from typing import Any, Literal
from unicodedata import normalize

from jaxrl.config.roles import template_names
from jaxrl.data import chat_template
from jaxrl.data import tokenizer as tokenizers
from jaxrl.data.chat_template import Unrendered
from jaxrl.data.example import Example, Message, is_learned
from jaxrl.data.rows import KEYS, Keys, listed
from jaxrl.data.source import Source
from jaxrl.data.thoughts import OTHER_THOUGHTS, THOUGHT_FIELDS, opening_of
from jaxrl.data.tokenizer import Encoded, PromptLike, Tokenizer, TurnEncoder
from jaxrl.errors import UserError, about, near
from jaxrl.types import NO_INPUTS, Prompt, Rollout, TemplateInputs, Turn

Chat = Literal["auto", "raw"]
LongPrompts = Literal["drop", "cut"]
Fit = Literal["whole", "cut", "too long"]
"""How a prompt comes under `max_prompt_tokens`, if it does."""
_LONGER = 32
"""So many tokens below the limit, and less, a prompt is measured as it is learned, too."""


@dataclass(frozen=True)
class TeacherPrompt:
    """The prompt that a teacher reads of a row, where it is not the student's: of another template,
    which is what is privileged in on-policy self-distillation (OPSD, arXiv 2601.18734; SDFT, arXiv
    2601.19897), or in the tokens and the chat template of another tokenizer.

    The template takes the place of a text prompt, or of the last message of a chat; what stands
    before it and the chat template stay. A template that names `messages` replaces the whole chat.
    """

    template: str | None
    """None: the row's own prompt."""
    max_tokens: int
    """Rows with a longer one are left out."""
    late: Mapping[str, str] = field(default_factory=dict)
    """Names that are only known once a completion is judged -> what stands for them until then
    (`data.prompt_encoder.PLACES`)."""
    tokenizer: Tokenizer | None = None
    """The teacher's; None: it is the student's."""
    keys: Keys = KEYS
    """Under whose names, too, the template finds the fields of a row."""

    def of(self, example: Example) -> Example:
        """Returns the row with the teacher's prompt. Raises UserError if the row lacks a field."""
        if self.template is None:
            return example
        names = template_names(self.template)
        fields = {**example.columns, "answer": example.answer, "completion": example.completion}
        if isinstance(example.prompt, str):
            fields["prompt"] = example.prompt
        else:
            turns = [f"{turn['role']}: {turn['content']}" for turn in example.prompt]
            fields |= {"prompt": example.prompt[-1]["content"], "messages": "\n\n".join(turns)}
        also = {name: of for name, of in self.keys.fields if of in fields and name not in fields}
        fields |= {name: fields[of] for name, of in also.items()}
        values = {
            name: json.dumps(value, ensure_ascii=False, default=str)
            if isinstance(value, list | tuple | dict)
            else str(value)
            for name, value in fields.items()
            if value is not None
        }
        values |= {name: self.late[name] for name in names if name in self.late}
        for name in names:
            if name not in values:
                raise UserError(
                    f"teacher.prompt names {{{name}}}{near(name, list(values))}; the row has"
                    f" {listed(values)}"
                )
        parts = Formatter().parse(self.template)
        text = "".join(literal + (values[name] if name else "") for literal, name, *_ in parts)
        if isinstance(example.prompt, str):
            return replace(example, prompt=text)
        if "messages" in (also.get(name, name) for name in names):
            return replace(example, prompt=_user(text))
        *before, last = example.prompt
        return replace(example, prompt=(*before, {**last, "content": text}))


@dataclass(frozen=True)
class PromptEncoder:
    """How an example becomes tokens.

    A chat prompt is: the row's own system message or else `system_prompt`; the few-shot rows, each
    as its turns and the assistant's completion; the row's turns. A text prompt is: of each few-shot
    row the prompt, right after it the completion, and a blank line; the row's prompt.
    """

    tokenizer: Tokenizer
    max_prompt_tokens: int
    """Longest prompt, with all that stands before it."""
    max_new_tokens: int
    """Longer completions are cut, and then have no EOS."""
    eos_ids: tuple[int, ...] = ()
    """What ends a completion; () for the tokenizer's own."""
    system_prompt: str | None = None
    """System message before every chat that has none."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """For the chat template; those of a row come before them."""
    chat: Chat = "auto"
    """auto: a text prompt becomes a user message where the tokenizer has a chat template, unless it
    is a document to continue (`arithmetic`). raw: text prompts stay text."""
    few_shot: tuple[Example, ...] = ()
    """Solved rows before every prompt; their own system messages are left out."""
    long_prompts: LongPrompts = "drop"
    """drop: prompts that are too long are left out. cut: a text prompt loses its beginning, a chat
    the beginning of its longest user message, as little as makes it fit; system prompt, few-shot
    rows and the template's own tokens stay whole. Where that is not enough, the prompt is left out.
    """
    teacher: TeacherPrompt | None = None
    """Makes the teacher's prompts, where they are not the student's. It reads prompts as they are
    after a cut, and is never cut itself."""
    completions: bool = True
    """Whether completions of the data are encoded; False where nothing learns from them."""
    samples: bool = False
    """Whether prompts are sampled from, so that each row needs one."""
    rows: int | None = None
    """Rows of the embedding that reads the tokens: rows of data with others are refused. None:
    those of the tokenizer."""
    noted: dict[str, str] = field(default_factory=dict, compare=False)
    """What the chat template does with a row that its user should know, the first row of each kind:
    kind -> text. `data.stream` puts the place of the row before it."""

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise UserError("data: prompts need a tokenizer, and the student's folder has none")
        chat_template.with_end_ids(self.tokenizer, self.eos_ids)
        if self.system_prompt is not None and not chat_template.has_template(self.tokenizer):
            raise UserError(
                "data.system_prompt is set, but the student's tokenizer has no chat template to "
                "put it in; unset it"
            )
        chats = self.chat == "auto" and chat_template.has_template(self.tokenizer)
        if self.few_shot:  # rows that leave less than one token more than they take
            before = self.prompt_of(Example("")) if chats else self._text_before(self.few_shot)
            inputs = TemplateInputs(arguments=self.arguments)
            taken = len(tokenizers.encode_prompt(self.tokenizer, before, inputs))
            if taken >= self.max_prompt_tokens:
                raise UserError(
                    f"data.few_shot: {len(self.few_shot)} rows take {taken} tokens, which leaves"
                    f" none of max_prompt_tokens={self.max_prompt_tokens} to a prompt; lower "
                    "data.few_shot_rows or raise max_prompt_tokens"
                )

    @property
    def teacher_limit(self) -> str:
        """Returns the other limit that a row that is left out may exceed, for messages."""
        return "" if self.teacher is None else f", or for the teacher {self.teacher.max_tokens}"

    def prompt_of(
        self, example: Example, tokenizer: Tokenizer | None = None
    ) -> str | tuple[Message, ...]:
        """Makes what is tokenised: text, or messages, with everything that comes before the row's
        own."""
        prompt = example.prompt
        asked = self.few_shot and _question(prompt)
        shots = [shot for shot in self.few_shot if _question(shot.prompt) != asked]
        if isinstance(prompt, str):
            own = tokenizer or self.tokenizer
            text = self.chat == "raw" or example.document or not chat_template.has_template(own)
            if text or chat_template.holds_turns(own, f"{prompt}{example.completion or ''}"):
                if self.samples and not prompt:
                    raise UserError(
                        "the row has a text alone (data.text_key), which is learned as a whole, and"
                        " no prompt to sample from: algorithm=sft learns such rows; if the texts"
                        " are prompts, set data.prompt_key to the name of their field"
                    )
                before = self._text_before(shots) if shots else ""
                return before + prompt or self._start
            prompt = _user(prompt)
        system: tuple[Message, ...] = ()
        if prompt[0]["role"] == "system":
            system, prompt = prompt[:1], prompt[1:]
        elif (rules := example.system or self.system_prompt) is not None:
            system = ({"role": "system", "content": rules},)
        return (*system, *_turns_of(shots), *prompt)

    def inputs_of(self, example: Example) -> TemplateInputs:
        """Collects the tools and arguments that the chat template reads with a row."""
        own = example.inputs or NO_INPUTS
        return replace(own, arguments={**self.arguments, **own.arguments})

    def fit(self, example: Example, may_cut: bool = True, length: int | None = None) -> Fit:
        """Returns whether the prompt is short enough, as it is or cut.

        Args:
            may_cut: False where a shortened prompt would ask for something else (puzzles).
            length: the prompt's, where it is known.
        """
        cut = not self._fits(example, length)
        if cut:
            last = len(_longest_text(example).rstrip()) - 1
            allowed = may_cut and self.long_prompts == "cut" and last > 0
            if not allowed or not self._fits(_without(example, last)):
                return "too long"
        if self.teacher is not None:
            theirs = self._teacher_tokens(self.cut(example) if cut else example)
            if len(theirs) > self.teacher.max_tokens:
                return "too long"
        return "cut" if cut else "whole"

    def length(self, example: Example) -> int:
        """Returns the tokens of the student's prompt, whatever the limits."""
        return len(self.prompt_tokens(example))

    def prompt_tokens(self, example: Example) -> tuple[int, ...]:
        """Returns the student's prompt to sample from, whatever the limits."""
        return tokenizers.encode_prompt(
            self.tokenizer, self.prompt_of(example), self.inputs_of(example)
        )

    def encode(self, example: Example, prompt_id: int, may_cut: bool = True) -> Prompt | None:
        """Encodes the prompt with its completion; returns None where the prompt is too long."""
        prompt, inputs = self.prompt_of(example), self.inputs_of(example)
        tokens = tokenizers.encode_prompt(self.tokenizer, prompt, inputs)
        found, sampled = None, None
        if len(tokens) <= self.max_prompt_tokens and self._learns(example):
            found = self._encoded(example, prompt)
        plain = isinstance(prompt, str) and chat_template.has_template(self.tokenizer)
        if plain and self.chat == "auto" and not example.document:
            self.noted.setdefault(
                "turns",
                "the prompt is a text that has the turns of the chat template already: such"
                " prompts are taken as they are, and their completions too",
            )
        longest = max(len(tokens), 0 if found is None else len(found.prompt))
        if longest > self.max_prompt_tokens:
            fit = self.fit(example, may_cut)
            if fit == "whole":  # longer by more than _LONGER
                self.noted.setdefault(
                    "longer prompt",
                    f"the chat template writes the prompt with {longest} tokens once the chat"
                    f" continues, more than max_prompt_tokens={self.max_prompt_tokens}: another row"
                    " is learned in its place",
                )
            return self.encode(self.cut(example), prompt_id) if fit == "cut" else None
        theirs = self._for_teacher(example, tokens, found)
        if theirs is None:
            return None
        messages = tokenizers.as_messages(prompt)
        self._note_unread(messages, inputs, example.system)
        completion: tuple[int, ...] | None = None
        turns: tuple[Turn, ...] = ()
        if found is not None:
            for kind, note in found.notes:
                self.noted.setdefault(kind, note)
            completion = found.completion[: self.max_new_tokens]
            if len(found.turns) > 1:
                turns = tokenizers.cut_turns(found.turns, self.max_new_tokens)
            if found.prompt != tokens:
                tokens, sampled = found.prompt, tokens
        if self.lacks_rows:
            assert self.rows is not None
            for name, read in (("prompt", (*tokens, *(sampled or ()))), ("completion", completion)):
                tokenizers.check_rows(self.tokenizer, self.rows, read or (), f"the {name}")
        return Prompt(
            prompt_id,
            tokens,
            messages[-1]["content"] if messages else str(example.prompt),
            completion,
            sampling_tokens=sampled,
            turns=turns,
            answer=example.answer,
            answer_value=example.answer_value,
            columns={**example.columns, **({"messages": messages} if messages else {})},
            inputs=inputs,
            conversational=not isinstance(example.prompt, str),
            **theirs,
        )

    def _for_teacher(
        self, example: Example, tokens: tuple[int, ...], found: Encoded | None
    ) -> dict[str, Any] | None:
        """Makes the fields of a `Prompt` that the teacher reads; None where they are too long.

        Args:
            tokens: the student's prompt, with which sampling begins.
            found: the same with the completion of the data.
        """
        if self.teacher is None:
            return {}
        generation, sampling = self._teacher_tokens(example), None
        theirs = self._teacher_before(generation, tokens)
        read = [generation, theirs]
        late = self.teacher.late.keys() & {*template_names(self.teacher.template or "")}
        if found is not None and found.prompt != tokens and not late:
            sampling, theirs = theirs, self._teacher_before(generation, found.prompt)
            if self.teacher.tokenizer is None:
                theirs = self._encoded(example, self._teacher_prompt(example)).prompt
            read.append(theirs)
        if max(map(len, read)) > self.teacher.max_tokens:
            return None
        if late:
            return {"teacher_prompt": self._teacher_prompt(example)}
        own = None if generation == (sampling or theirs) else generation
        return {
            "teacher_tokens": theirs,
            "teacher_generation_tokens": own,
            "teacher_sampling_tokens": sampling,
        }

    def _note_unread(
        self, messages: Sequence[Message] | None, inputs: TemplateInputs, system: str | None
    ) -> None:
        """Notes what a row has for the chat template and the prompt does not show."""
        if messages is None:
            has = {"tools": inputs.tools, "system": system, "arguments": inputs.arguments}
            names = [f"`{name}`" for name, value in has.items() if value]
            raw = self.chat == "raw"
            if names:
                why = "data.chat=raw" if raw else "a tokenizer without chat template"
                way = "set data.chat=auto" if raw else "give the model a chat template"
                self.noted.setdefault(
                    f"text {names}",
                    f"its prompt is text, which shows no {' and no '.join(names)} with {why}: such"
                    f" prompts are without. Write them into the prompts, {way}, or set"
                    " data.tools_key, data.system_key or data.chat_template_arguments_key to null",
                )
            return
        asks = inputs.tools and "tools" not in self.noted
        if asks and not chat_template.shows_tools(self.tokenizer, messages, inputs):
            self.noted["tools"] = (
                "the chat template does not show `tools`: prompts are without them. Give the model"
                " a template that shows tools, write them into the system message, or set"
                " data.tools_key=null"
            )
        for note in (
            chat_template.unread_arguments(self.tokenizer, inputs) if inputs.arguments else ()
        ):
            self.noted.setdefault(note, note)

    @cached_property
    def lacks_rows(self) -> bool:
        """Returns whether the tokenizer has tokens that the embedding has no row for."""
        return self.rows is not None and bool(
            tokenizers.tokens_without_row(self.tokenizer, self.rows)
        )

    def _teacher_tokens(self, example: Example) -> tuple[int, ...]:
        assert self.teacher is not None
        prompt = fill_places(self._teacher_prompt(example), dict.fromkeys(LATE, ""))
        return tokenizers.encode_prompt(
            self.teacher.tokenizer or self.tokenizer, prompt, self.inputs_of(example)
        )

    def _teacher_before(
        self, generation: tuple[int, ...], tokens: Sequence[int]
    ) -> tuple[int, ...]:
        """Returns the teacher's generation prompt as it stands before a completion that follows
        these tokens of the student: thoughts are opened in both or in neither."""
        own = None if self.teacher is None else self.teacher.tokenizer
        if own is None:
            return generation
        return tokenizers.with_opening(own, generation, opening_of(self.tokenizer, tokens))

    def _teacher_prompt(self, example: Example) -> str | tuple[Message, ...]:
        assert self.teacher is not None
        return self.prompt_of(self.teacher.of(example), self.teacher.tokenizer)

    def _fits(self, example: Example, length: int | None = None) -> bool:
        """Returns whether the prompt to sample from is short enough and, where that is close, the
        prompt of the data's completion, which a chat template may write otherwise."""
        tokens, prompt = self.length(example) if length is None else length, self.prompt_of(example)
        spare = self.max_prompt_tokens - tokens
        if not 0 <= spare < _LONGER or isinstance(prompt, str) or not self._learns(example):
            return spare >= 0
        return len(self._encoded(example, prompt).prompt) <= self.max_prompt_tokens

    def _learns(self, example: Example) -> bool:
        return self.completions and example.completion is not None

    def _encoded(self, example: Example, prompt: str | tuple[Message, ...]) -> Encoded:
        """Encodes a whole prompt (`prompt_of`), the student's or the teacher's, and the row's
        completion."""
        own = self.tokenizer.eos_token_id
        eos_ids = self.eos_ids or (() if own is None else (own,))
        answer: str | tuple[Message, ...] = example.turns
        if not answer or isinstance(prompt, str):
            answer = self._as_text(example)
        try:
            return tokenizers.encode_completion(
                self.tokenizer, prompt, answer, eos_ids, self.inputs_of(example)
            )
        except Unrendered as why:
            if len(example.turns) < 2:
                raise
            self.noted.setdefault(
                "turn by turn",
                f"{why}. Each turn of such a chat is rendered on its own, as in an episode: the"
                " learned text is not one that the template writes for a whole chat. To avoid"
                " that, give the model a template that renders the whole chat",
            )
            return self._turn_by_turn(example, prompt, eos_ids)

    def _as_text(self, example: Example) -> str:
        """Returns the completion of a text prompt: what its message says, if it is one. Raises
        UserError for a message with calls, which a text has no place for."""
        for turn in example.turns:
            if turn.get("tool_calls"):
                raise UserError(
                    "the completion has `tool_calls`, and a text prompt no chat template that would"
                    " write them: write the calls as text, in its `content`"
                )
            for name in (*THOUGHT_FIELDS, *OTHER_THOUGHTS):
                if turn.get(name):
                    lost = f"a text prompt has no place for `{name}` of its completion, which is"
                    self.noted.setdefault("thoughts of texts", f"{lost} learned without it")
        return str(example.completion)

    def cut(self, example: Example) -> Example:
        """Returns an example that is too long (`fit`) without the fewest characters that must
        go."""
        last = len(_longest_text(example).rstrip()) - 1
        start = bisect_left(
            range(last), True, lo=1, key=lambda start: self._fits(_without(example, start))
        )
        return _without(example, start)

    def _turn_by_turn(
        self, example: Example, prompt: str | tuple[Message, ...], eos_ids: tuple[int, ...]
    ) -> Encoded:
        """Encodes a chat that the template does not take as a whole, as an episode does: what
        follows a turn is rendered after that turn alone."""
        first, *turns = example.turns
        inputs = self.inputs_of(example)
        found = tokenizers.encode_completion(self.tokenizer, prompt, (first,), eos_ids, inputs)
        tokens, parts, heard = found.completion, [*found.turns], list[Message]()
        for turn in turns:
            if not is_learned(turn):
                heard.append(turn)
                continue
            between = self._encode_turns.after(heard, eos=tokens[-1], chat=True, inputs=inputs)
            written = tokenizers.encode_completion(
                self.tokenizer, _user("?"), (turn,), eos_ids, inputs
            )
            parts.append(tokenizers.heard_turn(heard, len(between)))
            parts += written.turns
            tokens, heard = (*tokens, *between, *written.completion), []
        return replace(found, completion=tokens, turns=tuple(parts))

    @cached_property
    def _encode_turns(self) -> TurnEncoder:
        return TurnEncoder(self.tokenizer, lambda text: self.noted.setdefault("roles", text))

    @cached_property
    def _start(self) -> str:
        """Chooses what a text without a prompt is learned after: BOS, or else an end token, behind
        which a document begins."""
        ends = [*self.eos_ids, *sorted(getattr(self.tokenizer, "end_ids", ()))]
        names = [self.tokenizer.bos_token, self.tokenizer.eos_token]
        return next(filter(None, [*names, *self.tokenizer.convert_ids_to_tokens(ends)]), "")

    def _text_before(self, shots: Sequence[Example]) -> str:
        for shot in shots:
            if not isinstance(shot.prompt, str):
                raise UserError(
                    "data.few_shot has chats, which cannot precede a text prompt; use rows with"
                    " text prompts"
                )
        with about("data.few_shot"):
            return "".join(f"{shot.prompt}{self._as_text(shot)}\n\n" for shot in shots)


def hidden_columns(prompts: Sequence[Prompt], own: Collection[str]) -> set[str]:
    """Returns those columns of the data (`own`) in whose place prompts have the messages that the
    template showed, which are a tuple; what a row has of its own is never one."""
    hidden = any(isinstance(one.columns.get("messages"), tuple) for one in prompts)
    return {"messages"} & set(own) if hidden else set()


def few_shot(source: Source, rows: int) -> tuple[Example, ...]:
    """Returns the first `rows` rows of a source, each with its completion."""
    if rows > len(source):
        raise UserError(
            f"data.few_shot: {source.name} has {len(source)} rows, data.few_shot_rows asks for"
            f" {rows}"
        )
    for index in range(rows):
        if source[index].completion is None or source[index].prompt == "":
            raise UserError(
                f"data.few_shot: {source.where(index)}: few-shot rows need a completion"
                " after a prompt (data.completion_key, or messages that end with the assistant's)"
            )
    return tuple(source[index] for index in range(rows))


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _turns_of(shots: Sequence[Example]) -> Iterator[Message]:
    for shot in shots:
        asked = _user(shot.prompt) if isinstance(shot.prompt, str) else shot.prompt
        yield from (turn for turn in asked if turn["role"] != "system")
        yield from shot.turns or ({"role": "assistant", "content": str(shot.completion)},)


def _question(prompt: str | tuple[Message, ...]) -> list[tuple[str, str]]:
    """Reads the question of a prompt: two rows with the same one are one example."""
    turns = _user(prompt) if isinstance(prompt, str) else prompt
    asked = [(turn["role"], str(turn.get("content"))) for turn in turns if turn["role"] != "system"]
    return [(role, " ".join(normalize("NFC", text).split())) for role, text in asked]


def _longest_text(example: Example) -> str:
    """Returns the text that a cut shortens: a text prompt, a chat's longest user message, or ""."""
    if isinstance(example.prompt, str):
        return example.prompt
    return max((m["content"] for m in example.prompt if m["role"] == "user"), key=len, default="")


def _without(example: Example, start: int) -> Example:
    """Returns the example with its longest text cut to begin at character `start`."""
    longest = _longest_text(example)
    if isinstance(example.prompt, str):
        return replace(example, prompt=longest[start:])
    at = [m["role"] == "user" and m["content"] == longest for m in example.prompt].index(True)
    turn = {**example.prompt[at], "content": longest[start:]}
    return replace(example, prompt=(*example.prompt[:at], turn, *example.prompt[at + 1 :]))


LATE = ("feedback", "attempt")
"""Names in `teacher.prompt` that are known once a completion is judged: what the reward functions
said of it, and the completion itself (self-distillation with feedback, SDPO, arXiv 2601.20802)."""
PLACES = {name: f"\0{name}\0" for name in LATE}
"""Name -> what stands for it in `Prompt.teacher_prompt`."""
_PLACE = re.compile(f"\0({'|'.join(LATE)})\0")


def with_feedback(
    rollout: Rollout, messages: Sequence[str], tokenizer: Tokenizer, max_tokens: int
) -> tuple[Rollout, int]:
    """Returns the rollout with a teacher's prompt for each completion, and how many of these
    prompts were cut.

    Args:
        messages: of the reward functions, one for each completion.
        max_tokens: longest prompt of the teacher; feedback and attempt lose their ends, the longer
            one first, where it would be longer.
    """
    prompts, cut = [], 0
    rows = zip(rollout.prompts, rollout.completions, messages, strict=True)
    for prompt, completion, message in rows:
        texts = {"feedback": message, "attempt": completion.text}
        tokens, whole = _fitted(prompt, texts, tokenizer, max_tokens)
        prompts.append(replace(prompt, teacher_tokens=tokens))
        cut += not whole
    return replace(rollout, prompts=tuple(prompts)), cut


def _fitted(
    prompt: Prompt, texts: Mapping[str, str], tokenizer: Tokenizer, max_tokens: int
) -> tuple[tuple[int, ...], bool]:
    """Returns the tokens, and whether they hold all of the texts. The longest texts keep equally
    many characters, as many as fit."""

    def tokens(most: int) -> tuple[int, ...]:
        short = {name: text[:most] for name, text in texts.items()}
        asked = fill_places(prompt.teacher_prompt or "", short)
        return tokenizers.encode_prompt(tokenizer, asked, prompt.inputs)

    most = max(map(len, texts.values()))
    found = tokens(most)
    if len(found) <= max_tokens:
        return found, True
    # without feedback and attempt it fits: else the row was left out
    fits = bisect_left(range(1, most), True, key=lambda most: len(tokens(most)) > max_tokens)
    return tokens(fits), False


def fill_places(prompt: PromptLike, texts: Mapping[str, str]) -> PromptLike:
    """Fills a prompt with texts in place of `PLACES`, in one pass: nothing in a text is one."""

    def replaced(text: str) -> str:
        return _PLACE.sub(lambda place: texts[place[1]], text)

    chat = tokenizers.as_messages(prompt)
    if chat is None:
        return replaced(str(prompt))
    return tuple({**turn, "content": replaced(turn["content"])} for turn in chat)
