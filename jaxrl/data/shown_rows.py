"""A row of data as a run reads it: its tokens with their texts, which of them are learned, what the
chat template read beside the messages, what was cut.

The run's own encoder makes the tokens, and the completion that a batch would hold says which of
them are learned.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from jaxrl.data import tokenizer as tokenizers
from jaxrl.data.batch import data_completion
from jaxrl.data.example import Example, JsonObject, Part, is_learned
from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.stream import LABEL, placed
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import counted, short
from jaxrl.process.streams import readable
from jaxrl.types import Completion, Prompt

if TYPE_CHECKING:
    from rich.text import Text

LEARNED = "green"
"""Colour of what is learned, which `MARK` marks too."""
MARK = "+"
LOST = 40
"""Characters that are shown of each end of a text that was cut."""
MOST = 400
"""Characters that are shown of a column."""
INDENT = 17
"""Columns before what is said of a row."""
LEAST_WIDTH = 20
"""Columns of a text, however narrow the screen is."""


class TokenSpan(NamedTuple):
    """Tokens that one speaks, or that are the prompt."""

    role: str
    """`prompt`, `assistant`, or who answers: `tool`, `user` ..."""
    learned: bool
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    """Of each token, as `tokenizer.token_texts` has them."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


def spans_of(
    tokenizer: Tokenizer, prompt: Sequence[int], completion: Completion | None = None
) -> tuple[TokenSpan, ...]:
    """Returns a sequence as a batch holds it, a prompt and the completion that follows it."""
    parts = [("prompt", False, len(prompt))]
    tokens = (*prompt,)
    if completion is not None:
        tokens += (*completion.tokens,)
        turns = [(turn.speaker, turn.role == "assistant", turn.tokens) for turn in completion.turns]
        parts += turns or [("assistant", True, len(completion.tokens))]
    texts, spans, end = tokenizers.token_texts(tokenizer, tokens), list[TokenSpan](), 0
    for role, learned, count in parts:
        begin, end = end, end + count
        spans.append(TokenSpan(role, learned, tokens[begin:end], texts[begin:end]))
    return tuple(span for span in spans if span.tokens)


class View(NamedTuple):
    """One of the sequences that a run makes of a row."""

    use: str
    """`learned`: prompt and completion. `sampled`: a prompt to sample from. `prompt`: one that
    nothing is sampled from. `teacher`: the prompt that the teacher reads. `left out`: a prompt that
    is too long."""
    spans: tuple[TokenSpan, ...]

    @property
    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.tokens]

    @property
    def learned(self) -> list[bool]:
        """Returns of each token whether it is learned."""
        return [span.learned for span in self.spans for _ in span.tokens]

    def heading(self) -> str:
        """Says how many tokens there are, and how many of them are learned."""
        learned, n = sum(self.learned), len(self.tokens)
        said = {
            "learned": f"learned: {learned} of {counted(n, 'token')}",
            "sampled": f"sampled from: {counted(n, 'token')}; nothing in a prompt is learned",
            "prompt": f"nothing is learned: a prompt of {counted(n, 'token')}, no completion",
            "teacher": f"the teacher reads in place of the prompt: {counted(n, 'token')}",
            "left out": f"left out: {counted(n, 'token')}",
        }
        return said[self.use]


@dataclass(frozen=True)
class ShownRow:
    """A row as a run reads it."""

    where: str
    """Its place: file and line."""
    views: tuple[View, ...]
    facts: tuple[tuple[str, str], ...]
    """(what, text): where the system message is from, tools, arguments, turns, what was cut ..."""
    answer: object
    """What verifiers and reward functions compare with; None: nothing."""
    columns: JsonObject
    """Other columns, which reward functions get by their names."""
    notes: tuple[str, ...]
    """What a run says of such a row."""

    def json(self) -> JsonObject:
        """Returns the row as an object of JSON."""
        views = [
            {
                "use": view.use,
                "tokens": view.tokens,
                "learned": view.learned,
                "texts": [text for span in view.spans for text in span.texts],
                "spans": [
                    {"role": s.role, "learned": s.learned, "tokens": len(s.tokens), "text": s.text}
                    for s in view.spans
                ],
            }
            for view in self.views
        ]
        row = asdict(replace(self, views=())) | {"views": views, "facts": dict(self.facts)}
        plain: JsonObject = json.loads(json.dumps(row, default=str))
        return plain

    def lines(self, width: int) -> Iterator[Text]:
        """Yields the lines for a screen of `width` characters."""
        from rich.cells import chop_cells  # a tenth of a second
        from rich.console import Console
        from rich.text import Text

        console = Console(width=width)
        facts = [*self.facts, *(("note", note) for note in self.notes)]
        if self.answer is not None:
            facts.append(("answer", readable(str(self.answer))))
        for name, value in self.columns.items():
            if value is None:  # a table's, for rows without the column
                continue
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            facts.append((f"column {readable(name)}", readable(text)))
        yield Text(self.where, "bold")
        room = max(width - INDENT, LEAST_WIDTH)
        for name, text in facts:
            for number, words in enumerate(Text(short(text, MOST)).wrap(console, room)):
                words.rstrip()
                head = "" if number else name
                if len(head) >= INDENT:
                    yield Text(head)
                    head = ""
                yield Text.assemble((f"{head:<{INDENT}}", "dim"), words)
        for view in self.views:
            yield Text("")
            yield Text(view.heading(), "bold")
            yield Text(f"text ({MARK} learned)" if any(view.learned) else "text", "dim")
            room = max(width - len(MARK) - 1, LEAST_WIDTH)
            for span in view.spans:
                for line in re.findall("[^\n]*\n|[^\n]+", span.text):  # `\u21b5` may end each
                    yield from (_marked(span, w) for w in chop_cells(readable(line), room))
            yield Text("tokens: the number of the first in a line; id and text of each", "dim")
            at, digits = 0, len(str(len(view.tokens)))
            for span in view.spans:
                for count, cells in _token_lines(span, width - len(MARK) - digits - 2):
                    yield _marked(span, f"{at:>{digits}} {cells}")
                    at += count


def _marked(span: TokenSpan, line: str) -> Text:
    from rich.text import Text

    return Text(f"{MARK if span.learned else ' ' * len(MARK)} {line}", LEARNED * span.learned)


def _token_lines(span: TokenSpan, width: int) -> Iterator[tuple[int, str]]:
    """Yields lines of tokens, and how many are in each."""
    from rich.cells import cell_len

    line: list[str] = []
    for token, text in zip(span.tokens, span.texts, strict=True):
        cell = f"{token} '{readable(text)}'" if text else f"{token} ..."
        if line and cell_len("  ".join([*line, cell])) > width:
            yield len(line), "  ".join(line)
            line = []
        line.append(cell)
    if line:
        yield len(line), "  ".join(line)


def show_row(encode: PromptEncoder, part: Part, row: int) -> ShownRow:
    """Reads a row as the run with this encoder does.

    Raises:
        UserError: the row cannot be read; the message names it and says why.
    """
    encode, may_cut = replace(encode, noted={}), not part.procedural
    with placed(part, row, LABEL, encode):
        example = part[row]
        prompt = encode.encode(example, row, may_cut)
        facts = tuple(_facts(encode, example, prompt, may_cut))
        views = tuple(_views(encode, example, prompt))
    answer = example.answer if example.answer_value is None else example.answer_value
    notes = tuple(encode.noted.values())
    return ShownRow(part.where(row), views, facts, answer, dict(example.columns), notes)


def _views(encode: PromptEncoder, example: Example, prompt: Prompt | None) -> Iterator[View]:
    tokenizer, teacher = encode.tokenizer, encode.teacher
    if prompt is None:
        yield View("left out", spans_of(tokenizer, encode.prompt_tokens(example)))
        return
    if prompt.completion is not None:
        completion = data_completion(prompt, encode.max_new_tokens, lambda tokens: "")
        yield View("learned", spans_of(tokenizer, prompt.tokens, completion))
    if prompt.completion is None or (encode.samples and prompt.sampling_tokens is not None):
        use = "sampled" if encode.samples else "prompt"
        yield View(use, spans_of(tokenizer, prompt.to_sample.tokens))
    if teacher is not None and prompt.teacher_tokens is not None:
        yield View("teacher", spans_of(teacher.tokenizer or tokenizer, prompt.teacher_tokens))


def _facts(
    encode: PromptEncoder, example: Example, prompt: Prompt | None, may_cut: bool
) -> Iterator[tuple[str, str]]:
    """Yields what decided the tokens of a row, beside its text."""
    whole = encode.length(example)
    limit = f"max_prompt_tokens={encode.max_prompt_tokens}"
    if prompt is None:
        over = whole > encode.max_prompt_tokens
        why = f"its prompt has {counted(whole, 'token')}, {limit}"
        other = f"its prompt with the completion, or the teacher's, is longer than {limit}"
        way = "; data.long_prompts=cut shortens it" if encode.long_prompts == "drop" else ""
        yield "left out", f"{why if over else other}{encode.teacher_limit}{way}"
        return
    if encode.completions and prompt.completion is None:
        yield "no completion", "a run that learns the data's completions refuses the row"
    messages = encode.prompt_of(example)
    if not isinstance(messages, str) and messages[0]["role"] == "system":
        own = not isinstance(example.prompt, str) and example.prompt[0]["role"] == "system"
        of = "the row's" if own or example.system else "data.system_prompt"
        yield "system message", f"{of}: {readable(messages[0]['content'])}"
    if encode.few_shot:
        yield "few-shot", f"up to {counted(len(encode.few_shot), 'row')} before the prompt"
    if prompt.inputs.tools:
        names = [str((tool.get("function") or tool).get("name")) for tool in prompt.inputs.tools]
        yield "tools", ", ".join(names)
    if prompt.inputs.arguments:
        yield "arguments", json.dumps(prompt.inputs.arguments, default=str)
    yield from _turn_facts(encode, example)
    if encode.fit(example, may_cut) == "cut":
        kept = encode.cut(example)
        lost = _lost(example.prompt, kept.prompt)
        count = counted(whole - encode.length(kept), "token")
        yield "prompt cut", f"{count} and more than {limit}: without its {_ends(lost)}"
    if prompt.completion is None or len(prompt.completion) < encode.max_new_tokens:
        return
    longer = replace(encode, max_new_tokens=sys.maxsize).encode(example, 0, may_cut)
    assert longer is not None and longer.completion is not None
    lost_tokens = longer.completion[encode.max_new_tokens :]
    if lost_tokens:
        text = "".join(tokenizers.token_texts(encode.tokenizer, lost_tokens))
        count = f"{len(lost_tokens)} of {counted(len(longer.completion), 'token')}"
        limit = f"max_new_tokens={encode.max_new_tokens}"
        yield "completion cut", f"without the last {count}, by {limit}: {_ends(text)}"


def _turn_facts(encode: PromptEncoder, example: Example) -> Iterator[tuple[str, str]]:
    before = () if isinstance(example.prompt, str) else example.prompt
    chat = (*before, *example.turns)
    said = [at for at, message in enumerate(chat) if message["role"] == "assistant"]
    if not (encode.completions and said):
        return
    learned = [at for at in said if at >= len(before) and is_learned(chat[at])]
    if not learned and example.completion is not None:
        learned = [len(chat)]
    left = [
        f"{at} ({'marked' if chat[at].get('weight') == 0 else 'in the prompt'})"
        for at in said
        if at not in learned
    ]
    if left:
        yield "turns learned", f"message {', '.join(map(str, learned))} of the assistant"
        yield "turns read only", f"message {', '.join(left)}"


def _lost(whole: object, kept: object) -> str:
    """Returns what a cut took from the beginning of a text, or of a message."""
    if isinstance(whole, str) and isinstance(kept, str):
        return whole[: len(whole) - len(kept)]
    assert isinstance(whole, tuple) and isinstance(kept, tuple)
    pairs = zip(whole, kept, strict=True)
    return next(_lost(a["content"], b["content"]) for a, b in pairs if a != b)


def _ends(text: str) -> str:
    """Returns a text that was cut, its middle left out where it is long."""
    text = readable(text)
    if len(text) <= 2 * LOST:
        return f"'{text}'"
    return f"'{text[:LOST]}' ... '{text[-LOST:]}'"
