"""Calls of tools: what each family's template renders is read back, and nothing of thoughts."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import importlib.util
import inspect
import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow

from jaxrl.data.thoughts import THOUGHTS, opened_thoughts
from jaxrl.environments import Answer, Environment
from jaxrl.environments.environment_process import observed
from jaxrl.environments.tool_calls import TABLE, SchemaTool, as_text, parse_calls
from jaxrl.errors import UserError

STRING, TYPES = {"type": "string"}, ("integer", "number", "boolean", "null", "array", "object")
TEXTS = {
    "plain": "Oslo",
    "quotes": 'she said "hi", it\'s {fine}, [ok]: <b>1</b>',
    "lines": "one\n  two\n\nthree",
    "edges": "\n between line breaks \n",
    "letters": "Ærøskøbing ✓ 東京 🙂",
    "like_a_number": "007",
    "like_a_bool": "true",
    "like_json": '{"a": [1, "b"]}',
    "empty": "",
    "code": "f(x=1)\n<function=g>",
}
ESCAPES = {"path": "C:\\new\\table", "latex": "\\frac{1}{2}", "ends": "it ends here \\"}
VALUES = {
    "integer": -3,
    "number": 2.5,
    "small": 1e-07,
    "boolean": True,
    "null": None,
    "array": [1, "x", [True, None], {"k": "v"}],
    "object": {"k": "v", "deep": {"list": [{}], "none": None, "n": 1.5}},
}
SCHEMA: dict[str, Any] = {name: STRING for name in (*TEXTS, *ESCAPES)} | {  # noqa: C420
    name: {"type": name if name in TYPES else "number"} for name in VALUES
}
SCHEMA["null"] = {"anyOf": [STRING, {"type": "null"}]}
TOOLS = [
    SchemaTool("f", "", {"type": "object", "properties": SCHEMA}, lambda name, given: given),
    SchemaTool("get_g-2", "", {"type": "object", "properties": {}}, lambda name, given: given),
]
CALLS: dict[str, list[tuple[str, Any]]] = {
    "texts": [("f", TEXTS)],
    "escapes": [("f", ESCAPES)],
    "values": [("f", VALUES)],
    "nothing": [("get_g-2", {})],
    "several": [("f", {"plain": "a"}), ("get_g-2", {}), ("f", VALUES | TEXTS)],
}
SAID = {"role": "user", "content": "hi"}


def templates() -> list[Path]:
    """The chat templates of the installed package trl that render calls."""
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.submodule_search_locations[0]) if spec else Path()  # type: ignore[index]
    found = sorted((folder / "chat_templates").glob("*.jinja"))
    # R1's distillations drop calls: their templates render none of them.
    return [p for p in found if "tool_calls" in p.read_text() and "r1_distill" not in p.name]


def rendered(path: Path, calls: Sequence[tuple[str, Any]]) -> str | None:
    """What the template writes of a turn with the calls; None where it takes one call alone."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def text(messages: Sequence[Any], prompt: bool) -> str:
        return render_jinja_template(
            [messages],
            tools=[tool.schema for tool in TOOLS],
            chat_template=path.read_text(),
            add_generation_prompt=prompt,
            bos_token="<s>",
            eos_token="</s>",
        )[0][0]

    def whole(arguments_as: Any) -> str:
        made = [
            {"id": "abcdefghi", "type": "function", "function": {"name": n, "arguments": a}}
            for n, a in [(name, arguments_as(arguments)) for name, arguments in calls]
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": made}
        return text([SAID, turn], False)

    try:
        both = whole(lambda arguments: arguments)
    except TypeError:  # the template joins a text
        both = whole(json.dumps)
    except Exception as error:
        assert "single tool-calls" in str(error), error
        return None
    begun = [text([SAID], prompt) for prompt in (True, False)]
    before = next(b for b in begun if both.startswith(b))
    return opened_thoughts(before) + both[len(before) :]


PAIRS = [
    (path, kind, i + j)
    for i, path in enumerate(templates() or [None])
    for j, kind in enumerate(CALLS)
]
"""Each template and what it renders, numbered."""


@pytest.mark.parametrize(
    ("path", "kind"),
    and_slow([p[:2] for p in PAIRS if p[2] % 3 == 0], [p[:2] for p in PAIRS if p[2] % 3]),
    ids=lambda x: x.stem if isinstance(x, Path) else str(x),
)
def test_what_a_chat_template_renders_is_read_back(path: Path | None, kind: str) -> None:
    if path is None:
        pytest.skip("trl is not installed, which brings the templates of the families")
    if path.stem in ("lfm2_2_5", "lfm2_2_5_v2") and kind != "nothing":
        pytest.skip("it escapes nothing: see the next test")
    text = rendered(path, CALLS[kind])
    if text is None:
        pytest.skip("the template takes one call in a turn")
    shown = CALLS[kind][:1] if path.stem.startswith("gptoss") else CALLS[kind]  # one in a turn
    assert parse_calls(text, TOOLS) == shown, text


DOCS = Path(__file__).parents[2] / "docs" / "environments.md"
FORMS = re.findall(r"^([^:`]+): (.*stock.*)$", DOCS.read_text().split("~~~")[1], re.MULTILINE)
"""The list of the docs: families, and how they call stock(item="apples", most=3)."""


def stock(item: str = "all", most: int | None = None) -> str:
    """How many there are.

    Args:
        item: its name.
        most: at most so many.
    """
    return f"{item} {most!r}"


class Shop(Environment):
    tools = [stock]


def said(text: str) -> list[str]:
    answer = Shop().step(text, [])
    assert isinstance(answer, Answer)
    return [message["content"] for message in answer.messages]  # type: ignore[index]


def is_over(text: str) -> bool:
    return Shop().step(text, []) == Answer(done=True)


def test_the_docs_show_forms() -> None:
    assert len(FORMS) >= 15


@pytest.mark.parametrize(("families", "call"), FORMS)
def test_a_form_is_read_wherever_it_stands_but_in_thoughts(families: str, call: str) -> None:
    whole = call.startswith(("{", "[s", "[{", "stock"))  # these have no mark, and stand alone
    before = "" if whole else "I look it up.\n"
    for text in (
        call,
        f"{before}{call}",
        f"<think>\nhm\n</think>\n\n{call}\n",
        f"so</think>{call}",
    ):
        assert said(text) == ["apples 3"], text
    for opens, closes in {**THOUGHTS, "": "</think>"}.items():
        thoughts = f"{opens}I could write {call}\nbut no.\n{closes}"
        assert is_over(f"{thoughts}There are none."), thoughts
        assert said(f"{thoughts}\n{call}") == ["apples 3"], "the one behind the thoughts alone"
        if opens:
            assert is_over(f"{opens}I write\n{call}"), "thoughts without an end"
    analysis = f"<|channel|>analysis<|message|>I could write {call}"
    assert is_over(analysis)
    assert is_over(f"{analysis}<|end|><|start|>assistant<|channel|>final<|message|>None.<|return|>")


@pytest.mark.parametrize(
    "nothing", ["", ' "arguments": null', ' "arguments": ""', ' "arguments": {}']
)
@pytest.mark.parametrize(
    "mark", ["<tool_call>{}</tool_call>", "<|python_tag|>{}", "[TOOL_CALLS][{}]"]
)
def test_a_tool_without_arguments_is_called(mark: str, nothing: str) -> None:
    call = '{"name": "stock"' + ("," if nothing else "") + nothing + "}"
    assert said(mark.replace("{}", call)) == ["all None"]


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.stock <|constrain|>json<|message|><|call|>",
        "<tool_call><function=stock></function></tool_call>",
        "<function=stock>",
        "<|tool_call>call:stock{}<tool_call|>",
        "<tool_call>stock</tool_call>",
        "[TOOL_CALLS]stock",
        "<|tool_call_start|>[stock()]<|tool_call_end|>",
        '{"name": "stock", "parameters": {}}',
    ],
)
def test_every_form_may_have_no_arguments(text: str) -> None:
    assert said(text) == ["all None"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"item": "apples", "most": 3},
        json.dumps({"item": "apples", "most": 3}),
        json.dumps(json.dumps({"item": "apples", "most": 3})),
    ],
)
def test_arguments_may_be_json_in_a_text(arguments: object) -> None:
    for call in (
        {"name": "stock", "arguments": arguments},
        {"function": {"name": "stock", "arguments": arguments}},
    ):
        assert said(f"<tool_call>{json.dumps(call)}</tool_call>") == ["apples 3"]
        assert said(f"[TOOL_CALLS] [{json.dumps(call)}, {json.dumps(call)}]") == ["apples 3"] * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>{</tool_call>", "must be JSON such as"),
        ('<tool_call>{"name": "stock", "arguments": [1]}</tool_call>', "must be JSON such as"),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', "must be JSON such as"),
        ('<tool_call>{"name": "stock", "arguments": "{"}</tool_call>', "must be JSON such as"),
        ("<tool_call>" + '{"a":' * 100_000, "must be JSON such as"),
        ("<tool_call>7</tool_call>", "must be JSON such as .*, or <function=f>"),
        ("<tool_call>how many?</tool_call>", "must be JSON .*, or <function=f>\n<parameter=x>"),
        (
            "<tool_call><function=stock>\nitem: apples\n</function></tool_call>",
            "must be <function=f>",
        ),
        ("<tool_call>stock\n<arg_key>item</arg_key>apples</tool_call>", "must be f\n<arg_key>"),
        ('<x:invoke name="stock"><x:parameter>1</x:parameter></x:invoke>', "must be <invoke name="),
        ("<|tool_call>call:stock{item:apples}<tool_call|>", "must be call:f{x:1}"),
        (
            "<|channel|>commentary to=functions.stock<|message|>apples<|call|>",
            "JSON of its arguments",
        ),
        ("<function=stock>{apples}</function>", "JSON of its arguments"),
        ('{"name": "stock", "parameters": {"item": "app', "must be JSON such as"),
        ("<|tool_call_start|>[stock(apples)]<|tool_call_end|>", "with constants as arguments"),
        ("<|tool_call_start|>[stock(]<|tool_call_end|>", "SyntaxError"),
        ('<tool_call>{"name": "shelf"}</tool_call>', "there is no tool 'shelf', only stock"),
        ('<tool_call>{"name": "stock", "arguments": {"size": 1}}</tool_call>', "argument 'size'"),
        ("stock(1, 2, 3)", "TypeError"),
        ("```python\nstock(1, 2, 3)\n```", "TypeError"),
        ("stock(**{})", "with constants as arguments"),
        ("stock(item=item)", "with constants as arguments"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_by_the_form(text: str, expected: str) -> None:
    (answer,) = said(text)
    assert answer.startswith("Error") and re.search(expected, answer), answer
    assert not re.search(r"<\||\|>|tool_call>|\[TOOL", answer), "would be special tokens"
    assert " at 0x" not in answer


@pytest.mark.parametrize(
    "text",
    [
        "There are 3 apples.",
        "",
        '{"item": "apples", "stock": 3}',
        '{"name": "Bo", "age": 3}',
        "[stick(1)]",
        "[1, 2]",
        "The answer is f(x) = stock (of all)",
        "<|channel|>final<|message|>There are 3.<|return|>",
        "no call</think>",
        "Use <b>bold</b> and {braces}.",
        'stock("apples").upper()',
        'print(stock("apples"))',
    ],
)
def test_an_answer_ends_the_episode(text: str) -> None:
    assert is_over(text)


def test_values_without_quotes_have_the_types_of_the_tool() -> None:
    def f(  # type: ignore[no-untyped-def]
        a: str,
        b: int,
        c: float,
        d: bool,
        e: list[int],
        g: dict[str, Any],
        h: str | None,
        i: int | str,
        j,
        k: Literal[1, 2],
    ) -> None: ...

    given = dict(
        zip("abcdeghijk", ["1", "1", "1", "True", "[1]", "{}", "None", "1", "1", "2"], strict=True)
    )

    def read(values: dict[str, str]) -> dict[str, object]:
        fields = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
        (call,) = parse_calls(f"<function=f>{fields}</function>", [f])
        assert not isinstance(call, str)
        return dict(call[1])

    assert list(read(given).values()) == ["1", 1, 1, True, [1], {}, None, 1, 1, 2]
    words = dict.fromkeys(given, "x")
    assert read(words) == words, "what has another type is left to the tool"


def test_unescaped_texts_of_lfm2_5() -> None:
    text = """<|tool_call_start|>[f(s='it's a "q"\nline', n=3, b=True), get_g-2(), f(s='')]"""
    tool = SchemaTool(
        "f", "", {"type": "object", "properties": {"s": STRING, "n": {}, "b": {}}}, print
    )
    calls = parse_calls(text + "<|tool_call_end|>", [tool, TOOLS[1]])
    first = {"s": 'it\'s a "q"\nline', "n": 3, "b": True}
    assert calls == [("f", first), ("get_g-2", {}), ("f", {"s": ""})]


JSON_LIST = '[{"name": "stock", "parameters": {"item": "apples", "most": 3}}]'
JSON_CALL = '{"name": "stock", "arguments": {"item": "apples", "most": 3}}'
PYTHON_CALL = 'stock("apples", most=3)'


@pytest.mark.parametrize(
    "call",
    [
        JSON_LIST,
        f"\n{JSON_LIST}\n",
        *(f"```{kind}\n{JSON_LIST}\n```" for kind in ("json", "tool_call", "tool_calls", "")),
        *(f"```{kind}\n{JSON_CALL}\n```" for kind in ("json", "tool_call", "tool_code", "python")),
        *(f"```{kind}\n{PYTHON_CALL}\n```" for kind in ("tool_code", "python", "tool_call")),
        f"```tool_code\n[{PYTHON_CALL}]\n```",
        f"```json {JSON_CALL} ```",
        f"```JSON\n{JSON_CALL}```",
        f'[{{"type": "function", "function": {JSON_CALL}}}]',
        f"```json \n\n{json.dumps(json.loads(JSON_LIST), indent=2)}\n\n```\n",
        f"{PYTHON_CALL}  # comment",
        f"{PYTHON_CALL} # (a comment)",
        f"{PYTHON_CALL}# a) or b",
        f"<TOOLCALL>{JSON_LIST}</TOOLCALL>",
        f"<TOOLCALL>{JSON_LIST}",
        f"<TOOLCALL>[{PYTHON_CALL}]</TOOLCALL>",
        f"<tool_calls>\n{JSON_LIST}\n</tool_calls>",
        f"<tool_calls><tool_call>{JSON_CALL}</tool_call></tool_calls>",
        f"functools{JSON_LIST}",
        f"functools {JSON_LIST}",
    ],
)
def test_a_call_in_a_list_a_fence_or_tags_is_read(call: str) -> None:
    texts = [call, f"<think>\nI do.\n</think>\n\n{call}", f"{call}<|im_end|>"]
    if not call.strip().startswith("["):
        texts += [f"I look it up.\n{call}", f"Code is\n```python\nx = 1\n```\nbut:\n\n{call}"]
    for text in texts:
        assert said(text) == ["apples 3"], text
    assert is_over(f"<think>I could write\n{call}\n</think>None."), "in thoughts"


def test_several_calls_and_marks_inside_of_a_list_or_a_fence() -> None:
    for item in ("<think>", "</think>", "```json", "<tool_call>{", "[TOOL_CALLS]", "a\nb"):
        calls = [{"name": "stock", "arguments": {"item": item}}] * 2
        for text in (json.dumps(calls), f"```json\n{json.dumps(calls)}\n```"):
            assert said(text) == [f"{item} None"] * 2, text
    assert said('```tool_code\nstock("a")\nstock("b")\n```') == ["a None", "b None"]
    fences = (
        "```json\nnone\n```" + '\n\n```python\nstock("a")\n```' * 2 + f"\n```json\n{JSON_CALL}```"
    )
    assert said(f"Both:\n{fences}") == ["a None", "a None", "apples 3"]


@pytest.mark.parametrize(
    "text",
    [
        f"```json\n{JSON_CALL}\n```\nis how I would call it.",
        '```json\n{"name": "Bo", "arguments": {"x": 1}}\n```',
        '```json\n[{"name": "Bo", "age": 3}]\n```',
        "```json\n[1, 2]\n```",
        '```json\n{"name": "stock", "price": 3}\n```',
        "```python\n\n```",
        "```python\nprint(1)\n```",
        "```python\nx = stock('a')\n```",
        "```python\ndef f():\n    return 1\n```",
        f"```bash\n{PYTHON_CALL}\n```",
        "```\nthree apples\n```",
        "```",
        "``````",
        '[{"name": "Bo", "age": 3}]',
        "[]",
        "functools[0] is the first.",
        'stock("a").upper()  # upper',
        "three  # stock(1",
    ],
)
def test_lists_and_fences_that_are_answers(text: str) -> None:
    assert is_over(text)


@pytest.mark.parametrize("fence", ["tool_code", "tool_call"])
def test_a_fence_for_calls_that_holds_none_is_answered_by_the_form(fence: str) -> None:
    assert said(f'```{fence}\n{{"name": "stock"}}\n```') == ["all None"]
    for body in ("how many?", "x = 1", '{"name": 5}', "[1, 2", "", '{"name": "stock", ', "stock("):
        (answer,) = said(f"```{fence}\n{body}\n```")
        assert answer.startswith("Error"), body
    (answer,) = said(f"```{fence}\n{JSON_CALL.replace('stock', 'shelf')}\n```")
    assert "there is no tool 'shelf'" in answer


def test_a_message_of_gpt_oss_in_its_analysis_may_be_for_a_function() -> None:
    arguments = '{"item": "apples", "most": 3}'
    for header in (
        "<|channel|>analysis to=functions.stock <|constrain|>json",
        "<|channel|>analysis to=functions.stock code",
        "<|start|>assistant to=functions.stock<|channel|>analysis json",
        "to=functions.stock<|channel|>analysis",
    ):
        call = f"{header}<|message|>{arguments}<|call|>"
        assert said(call) == ["apples 3"], call
        thoughts = "<|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant "
        assert said(f"{thoughts}{call}") == ["apples 3"], call
    assert is_over(f"<|channel|>analysis<|message|>to=functions.stock {arguments}")
    assert is_over(f"<|channel|>analysis to=self<|message|>{arguments}")


@pytest.mark.parametrize("opens", [opens for opens in THOUGHTS if "|" not in opens])
def test_an_answer_may_mention_what_opens_thoughts(opens: str) -> None:
    call = f"<tool_call>{JSON_CALL}</tool_call>"
    closes = THOUGHTS[opens]
    for before in (f"I do not use {opens} here.", f"The tag `{opens}` is known.\n", f"a{opens}b"):
        assert said(f"{before}{call}") == ["apples 3"], before
        assert said(f"{opens}hm{closes}{before}{call}") == ["apples 3"], before
        assert said(f"{before}\n{PYTHON_CALL}") == ["apples 3"], before
    for before in ("", "\n ", f"{opens}hm{closes}", f"{opens}hm{closes}\n\n", "Let me see.\n"):
        assert is_over(f"{before}{opens}I could write {call}"), before
        assert said(f"{before}{opens}Or {call}{closes}{call}") == ["apples 3"], before


PIECES = (
    *(
        "<tool_call>",
        "<think>",
        "</think>",
        "<function=f>",
        "<|message|>",
        "[TOOL_CALLS]",
        "'",
        "\n```json\n",
        "```python\nf(1)\n```\n",
        "\n```\n",
        "functools[{",
        "x<think>",
        "</think>[",
        "{[",
    ),
    *(
        "<parameter=x>",
        '<x:invoke name="f">',
        "<|tool_call>call:f{",
        '<|"|>',
        "</think>{",
        " ",
        "<|a|>",
    ),
)


@pytest.mark.parametrize(("size", "most"), and_slow([(40_000, 10)], [(80_000, 20)]))
def test_a_long_turn_is_read_in_time(size: int, most: int) -> None:
    """Characters that begin calls again and again, and seconds."""
    started = time.monotonic()
    for piece in PIECES:
        for begin in ("", "<function=f>", '<|tool_call>call:f{x:<|"|>'):
            parse_calls(begin + piece * (size // len(piece)), [stock])
        assert time.monotonic() - started < most, piece


def test_thoughts_that_a_prompt_opens() -> None:
    assert opened_thoughts("<|im_start|>assistant\n<think>\n") == "<think>\n"
    for prompt in ("", "x", "<think>\n\n</think>\n\n", "<think> so", "say <think>!"):
        assert opened_thoughts(prompt) == ""
    assert opened_thoughts("<|turn>model\n<|channel>thought\n") == "<|channel>thought\n"


@dataclass
class Point:
    x: int
    y: object


class Rude:
    def __str__(self) -> str:
        raise KeyError("no text")


class Plain:
    pass


def _fails(error: BaseException) -> Any:
    raise error


async def _later(value: Any) -> Any:
    return value() if callable(value) else value


async def _yields() -> Any:
    yield 1
    yield "b"


def _circle() -> list[Any]:
    circle: list[Any] = [1]
    circle.append(circle)
    return circle


RESULTS: list[tuple[Any, str]] = [
    ("text", "text"),
    ("", ""),
    (None, "null"),
    (True, "true"),
    (1.5, "1.5"),
    (float("inf"), "Infinity"),
    (10**30, "1" + "0" * 30),
    (lambda: 10**5000, "Error: .*int.*"),
    (lambda: (1 // (2 - i) for i in range(5)), "Error: ZeroDivisionError: .*"),
    ({"a": [1, None], "b": "ü"}, '{"a": [1, null], "b": "ü"}'),
    ({1: "a", (2, 3): "b"}, ".*a.*b.*"),
    ((1, "a"), '[1, "a"]'),
    ({"b", "a", "c"}, '["a", "b", "c"]'),
    (b"caf\xc3\xa9", "café"),
    (b"caf\xe9 \x89PNG", r"caf\\xe9 \\x89PNG"),
    (bytearray(b"x"), "x"),
    ({"raw": b"\xff"}, r".*\\xff.*"),
    (Point(1, Point(2, None)), '{"x": 1, "y": {"x": 2, "y": null}}'),
    (np.arange(3), r"\[0, 1, 2\]"),
    (np.zeros((2, 2), np.float32), r"\[\[0.0, 0.0\], \[0.0, 0.0\]\]"),
    (np.int64(7), "7"),
    (np.float32(0.5), "0.5"),
    ({"n": np.float32(0.5), "v": np.arange(2)}, r'\{"n": 0.5, "v": \[0, 1\]\}'),
    (np.arange(10**6), r".*0 +1 +2 \.\.\. .*999999.*"),
    (np.arange(10**6), r"\[ *0 +1 +2 \.\.\. .*999999\]"),
    (jnp.zeros((200, 200)), r"\[\[0\. 0\. .*\]\n \[0\. .*\]\]"),
    (jnp.arange(3), r"\[0, 1, 2\]"),
    ((i for i in range(3)), r"\[0, 1, 2\]"),
    (map(str, itertools.count()), r'\["0", "1", .*'),
    (datetime.date(2024, 5, 1), '"2024-05-01"'),
    (Path("/a/b"), '"/a/b"'),
    (decimal.Decimal("1.50"), '"1.50"'),
    (1 + 2j, r'"\(?1\+2j\)?"'),
    (Plain(), ".*Plain object>.*"),
    (Plain, ".*Plain.*"),
    (len, ".*len.*"),
    ({"k": Plain()}, ".*Plain object>.*"),
    (Rude(), "Error: .*Rude.* cannot be shown.*"),
    (_circle(), r"\[1, \[\.\.\.\]\]"),
    ("half \ud83d and \udc00", "half \ufffd and \ufffd"),
    ({"half": "\ud83d"}, '{"half": "\ufffd"}'),
    ("a\x00b", "a\x00b"),
    (ValueError("wrong"), "Error: ValueError: wrong"),
    (lambda: _fails(KeyError("k")), "Error: KeyError: 'k'"),
    (lambda: _fails(SystemExit(3)), "Error: SystemExit: 3"),
    (lambda: _fails(ValueError("x" * 10**6)), r"Error: ValueError: x+\.\.\."),
    (lambda: _fails(ValueError(Rude())), "Error: .*ValueError.*"),
    (lambda: _later("later"), "later"),
    (lambda: _later(lambda: _fails(OSError("gone"))), "Error: OSError: gone"),
    (lambda: _later(Point(1, 2)), '{"x": 1, "y": 2}'),
    (_yields, r'\[1, "b"\]'),
    ("x" * 3_000_000, r"x{99920}\.\.\. \(2900080 of 3000000 characters are left out\)"),
    (["🙂" * 60_000] * 9, r'\["🙂+.*characters are left out\)'),
]


@pytest.mark.parametrize(("result", "expected"), RESULTS)
def test_what_a_tool_returns_is_shown_or_explained(result: Any, expected: str) -> None:
    calls_it = callable(result) and not isinstance(result, type) and result is not len

    def tool() -> Any:
        return result() if calls_it else result

    environment = Environment()
    environment.tools = [tool]
    answer = environment.step("tool()", [])
    if inspect.isawaitable(answer):
        answer = asyncio.run(_later_answer(answer))
    observation = observed(answer)
    (message,) = observation.messages
    text = message["content"]
    assert message["role"] == "tool" and len(text) <= 100_000
    assert text == expected or re.fullmatch(expected, text, re.DOTALL), text[:300]
    assert " at 0x" not in text
    json.dumps(message, ensure_ascii=False).encode()


def test_the_calls_of_a_turn_run_one_after_the_other() -> None:
    """Each sees what those before it have done, whether it or they are awaited."""
    told: list[str] = []

    def now(x: str) -> str:
        told.append(x)
        return " ".join(told)

    async def later(x: str) -> str:
        await asyncio.sleep(0)
        return now(x)

    environment = Environment()
    environment.tools = [now, later]
    names = ("now", "later", "now", "unknown", "later", "now")
    calls = [{"name": name, "arguments": {"x": str(i)}} for i, name in enumerate(names)]
    answer = environment.step(json.dumps(calls), [])
    assert told == ["0"] and inspect.isawaitable(answer)
    contents = [m["content"] for m in asyncio.run(_later_answer(answer)).messages]
    assert "no tool 'unknown'" in contents.pop(3)
    assert contents == ["0", "0 1", "0 1 2", "0 1 2 4", "0 1 2 4 5"]


def test_numbers_of_numpy_are_numbers() -> None:
    answer = Answer("next", reward=np.float32(1), done=np.bool_(False))  # type: ignore[arg-type]
    assert asdict(observed(answer)) == asdict(observed({"messages": "next", "reward": 1.0}))
    assert observed({"done": np.array(True)}).done is True
    for wrong in (np.int64(1), np.array([True])):
        with pytest.raises(UserError, match="must be True or False"):
            observed({"done": wrong})


def test_a_table_is_shown_as_python_shows_it() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"n": [1, 2], "s": ["a", "b"]})
    assert as_text(table) == "   n  s\n0  1  a\n1  2  b"
    assert as_text(table["n"]) == "[1, 2]"
    assert as_text(pandas.DataFrame({"n": range(10**5)})) == str(
        pandas.DataFrame({"n": range(10**5)})
    )


async def _later_answer(answer: Any) -> Any:
    return await answer


@pytest.mark.parametrize("name", TABLE["forms"])
def test_each_form_of_the_table_is_read(name: str) -> None:
    families, pattern, _, example = TABLE["forms"][name]
    tool = SchemaTool(
        "f", "", {"properties": {"x": {"type": "integer"}}}, lambda name, given: given
    )
    assert re.search(pattern, example) and parse_calls(example, [tool]) == [("f", {"x": 1})], (
        families
    )


@pytest.mark.parametrize("name", TABLE["patterns"])
def test_each_pattern_of_the_table_finds_its_example(name: str) -> None:
    _, pattern, example, expected = TABLE["patterns"][name]
    found = re.search(pattern, example, re.DOTALL)
    assert found is not None and found[0] == expected
