"""Tools that a model may call: functions, or whatever brings a JSON schema; and the calls in a
turn, in the form in which the model's family writes them.

The marks in the text tell the form, so that one table serves all families. What stands in a model's
thoughts is no call.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from jaxrl.data.example import JsonObject
from jaxrl.data.thoughts import CLOSES, OPENS, THOUGHTS
from jaxrl.errors import short

_ANY: TypeAdapter[Any] = TypeAdapter(Any, config={"ser_json_inf_nan": "constants"})
Arguments = Mapping[str, Any]
"""Of a call of a tool, by their names."""
Tool = Callable[..., Any]
Tools = Mapping[str, Tool]
"""Those that may be called, by name."""
LONGEST = 100_000
"""Characters of what an environment answers to a turn; what is more is left out."""
CUT_WORDS = 80
"""Room for the words about what is left out."""
LONGEST_ERROR = 2000
"""Characters of an exception's text."""
MOST_VALUES = 10_000
"""Values of a generator, or of an array that is shown as a whole."""


class SchemaTool:
    """A tool that brings a JSON schema of its own, where a function's signature would give it."""

    def __init__(
        self,
        name: str,
        description: str,
        parameters: JsonObject,
        call: Callable[[str, Arguments], object],
    ):
        """
        Args:
            parameters: the JSON schema of an object, whose properties are the arguments.
            call: gets the name and the arguments of a call, and returns what a tool does.
        """
        self.__name__, self._call = name, call
        self.schema: JsonObject = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": dict(parameters)},
        }
        required = parameters.get("required") or ()
        names = [name for name in parameters.get("properties") or () if name.isidentifier()]
        each = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if name in required else None,
            )
            for name in sorted(names, key=lambda name: name not in required)
            if not keyword.iskeyword(name)
        ]
        self.__signature__ = inspect.Signature(each)

    def __call__(self, /, **arguments: object) -> object:
        return self._call(self.__name__, arguments)


def types_of(tool: Tool, parameter: str) -> set[str] | None:
    """Returns the JSON types that a parameter of a tool may have, as in {"integer", "null"}; None
    where its schema or type hint does not say."""
    if isinstance(tool, SchemaTool):
        properties = tool.schema["function"]["parameters"].get("properties") or {}
        return _types(properties.get(parameter))
    try:
        hint = inspect.signature(tool, eval_str=True).parameters[parameter].annotation
        return None if hint is inspect.Parameter.empty else _types(TypeAdapter(hint).json_schema())
    except Exception:  # no such parameter, or a hint that is no type of JSON
        return None


def _types(schema: object) -> set[str] | None:
    if not isinstance(schema, Mapping):
        return None
    if "type" in schema:
        named = schema["type"]
        return {named} if isinstance(named, str) else set(named)
    options = schema.get("anyOf", schema.get("oneOf"))
    found = [_types(option) for option in options or ()]
    return set().union(*(types or () for types in found)) if found and all(found) else None


def as_text(result: object) -> str:
    """Writes a tool's result for the model: text as it is, bytes as UTF-8, an exception by
    its text, anything else as JSON; values that JSON does not have as Python shows them, a table or
    a long array without quotes. The end of what is longer than LONGEST is left out. Raises what a
    generator raises."""
    if isinstance(result, Iterator):
        result = list(itertools.islice(result, MOST_VALUES))
    try:
        text = _text(result)
    except Exception as error:
        what = f"a value of the type {type(result).__name__} that cannot be shown"
        text = f"Error: {what} ({type(error).__name__})"
    return cut_text(text, LONGEST).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut_text(text: str, most: int) -> str:
    """Cuts a text to at most `most` characters, adding words about those that are left out; returns
    these words alone where there is no room for more."""
    if len(text) <= most:
        return text
    kept = max(most - CUT_WORDS, 0)
    return f"{text[:kept]}... ({len(text) - kept} of {len(text)} characters are left out)"


def _text(result: object) -> str:
    if isinstance(result, str):
        return str(result)
    if isinstance(result, BaseException):
        return f"Error: {type(result).__name__}: {short(str(result), LONGEST_ERROR)}"
    if isinstance(result, bytes | bytearray | memoryview):
        return bytes(result).decode(errors="backslashreplace")
    if isinstance(result, Set):  # its order is another one in each process
        result = sorted(result, key=repr)
    try:
        value = _ANY.dump_python(result, mode="json", fallback=_plain)
        if isinstance(value, str) and ("\n" in value or hasattr(result, "__array__")):
            return value
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):  # in a circle, bytes that are no text
        return _without_address(result)


def _plain(value: Any) -> object:
    """Converts a value that JSON does not have: an array to lists, anything else to what Python
    shows of it."""
    if hasattr(value, "tolist") and value.size <= MOST_VALUES:
        return value.tolist()
    return _text(value) if isinstance(value, BaseException) else _without_address(value)


def _without_address(value: object) -> str:
    """Shows a value as Python does, without its memory address, which means nothing."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


Call = tuple[str, Arguments] | str
"""A call of a tool, or what is wrong with it, in words for the model."""
Read = tuple[list[Call], int]
"""The calls behind a mark, and where in the text reading goes on."""

TABLE: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[1] / "assets" / "tool_calls.yaml").read_text(encoding="utf-8")
)
"""What calls look like; each part says what its rows are."""
_PATTERNS = {
    name: re.compile(row[1], re.DOTALL)
    for name, row in (TABLE["forms"] | TABLE["patterns"]).items()
}
_ENDS = re.compile(f"{TABLE['patterns']['ends'][1]}|{CLOSES.pattern}")
_DECODER = json.JSONDecoder(strict=False)
_NOT_JSON = (ValueError, RecursionError)
_NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
LONGEST_HEADER = 500
"""Characters before `<|message|>` in which a message of gpt-oss says what it is."""
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
"""Constants as JSON and Python spell them; chat templates write either."""


def parse_calls(text: str, tools: Sequence[Tool]) -> list[Call]:
    """Parses the tool calls in a turn, each a name with arguments or what is wrong with it.

    They have one of the FORMS. A turn without their marks is a call where all of it is JSON with
    `name` and `parameters` or `arguments` (Llama 3), a list of such, or a list of calls as in
    Python, and where its last line is a call as in Python, `name(1, other="text")`, whose arguments
    are constants. The JSON or the Python may stand in a fence that ends the turn.

    Args:
        text: the turn, with special tokens. Thoughts that are never closed reach to its end, and a
            text that closes thoughts without opening them begins with them.
        tools: what may be called. Where a form has no quotes, their types tell texts from numbers.
    """
    by_name = {tool.__name__: tool for tool in tools}
    text = text.rstrip()
    while text.endswith("|>") and re.fullmatch(r"<\|(?!message)\w+\|>", text[text.rfind("<|") :]):
        text = text[: text.rfind("<|")].rstrip()
    calls, at = _whole(text, 0, by_name), 0
    if calls:
        return calls
    marks = {pattern: pattern.search(text) for pattern in (*FORMS, OPENS, CLOSES)}
    while True:
        for pattern, found in marks.items():
            if found is not None and found.start() < at:
                marks[pattern] = pattern.search(text, at)
        mark = min(filter(None, marks.values()), key=lambda found: found.start(), default=None)
        if mark is None:
            return calls or _unmarked(text[at:].strip(), by_name)
        if mark.re in FORMS:
            more, at = FORMS[mark.re](mark, by_name)
            calls += more
            continue
        began, at = at, mark.end()
        if mark.re is OPENS:
            closed = text.find(THOUGHTS[mark[0]], at)
            # Thoughts begin a turn or a line, or follow other thoughts or a special token.
            before = text[max(mark.start() - 80, began) : mark.start()].rstrip(" \t")
            if closed < 0 and before.strip() and not before.endswith(("\n", "|>")):
                continue  # it is only mentioned
            at = len(text) if closed < 0 else closed + len(THOUGHTS[mark[0]])
        else:
            calls = []
        if whole := _whole(text, at, by_name):
            return calls + whole


def _whole(text: str, at: int, tools: Tools) -> list[Call]:
    """Parses the calls of a text that is nothing but their JSON or a fence, which may hold any
    mark."""
    start = _gap(text, at)
    if text.startswith("```", start) and text.endswith("```"):
        return _fenced(text[start:], tools)
    if not text.startswith(("{", "["), start):
        return []
    try:
        values, end = _values(text, start)
    except _NOT_JSON:
        return [_wrong("json")] if _PATTERNS["bare"].match(text, start) else []
    inner = [value.get("function", value) if isinstance(value, dict) else {} for value in values]
    keys = [value.keys() if isinstance(value, dict) else set() for value in inner]
    named = all("name" in some and some & {"parameters", "arguments"} for some in keys)
    return [_call(value) for value in values] if named and end == len(text) else []


def _fenced(turn: str, tools: Tools) -> list[Call]:
    """Parses the calls in the fences that end a turn."""
    calls: list[Call] = []
    while (fence := _PATTERNS["fence"].fullmatch(turn)) is not None:
        more = _in_fence((fence["kind"] or "").lower(), fence["body"].strip(), tools)
        if not more:
            break
        calls, turn = more + calls, (fence["before"] or "").rstrip()
    return calls


def _in_fence(kind: str, body: str, tools: Tools) -> list[Call]:
    """Parses the calls in a fence; one for code or data counts only for tools that there are."""
    is_json = body.startswith(("{", "[")) and not re.match(r"\[\s*\w", body)
    if kind.startswith("tool"):
        try:
            read = [_call(one) for one in _values(body, 0)[0]] if is_json else None
        except _NOT_JSON:
            read = [_wrong("json")]
        return (_as_python(body, tools) if read is None else read) or [_wrong("json", "python")]
    calls = _whole(body, 0, tools) if is_json else _as_python(body, tools)
    begins = re.split(r"[\s(]", body.lstrip("[ "), maxsplit=1)[0] in tools
    return calls if all(begins if isinstance(c, str) else c[0] in tools for c in calls) else []


def _unmarked(turn: str, tools: Tools) -> list[Call]:
    """Parses the calls, written as in Python, of a turn without any mark."""
    if turn.endswith("```"):
        return _fenced(turn, tools)
    if turn.startswith("[") and turn.endswith("]"):
        calls = _as_python(turn, tools)
        return calls if all(not isinstance(c, str) and c[0] in tools for c in calls) else []
    line = turn.splitlines()[-1].strip() if turn else ""
    if not line.endswith(")"):
        line = _PATTERNS["comment"].sub(r"\1", line)
    if line.partition("(")[0].strip() not in tools or not line.endswith(")"):
        return []
    calls = _as_python(line, tools)
    return calls if all(isinstance(call, str) or call[0] in tools for call in calls) else []


def _json(mark: re.Match[str], tools: Tools) -> Read:
    """Reads JSON: of the arguments where the mark has the tool's name, else of calls."""
    name = mark.groupdict().get("name")
    if name is not None:
        return _named(name, mark)
    try:
        values, at = _values(mark.string, mark.end())
        return [_call(value) for value in values], at
    except _NOT_JSON:
        return [_wrong("json")], _end(mark)


def _named(name: str, mark: re.Match[str]) -> Read:
    """Reads the JSON of a tool's arguments; there are no arguments where the text is empty."""
    text, end = mark.string, _end(mark)
    if not text[mark.end() : end].strip():
        return [(name, {})], end
    try:
        value, at = _DECODER.raw_decode(text, _gap(mark.string, mark.end()))
        return [(name, _arguments(value))], at
    except _NOT_JSON:
        return [_wrong("named")], end


def _tagged(mark: re.Match[str], tools: Tools) -> Read:
    """Reads what is in `<tool_call>`: JSON, something with a mark of its own, or a name and pairs
    of tags (GLM)."""
    at = _gap(mark.string, mark.end())
    if mark.string.startswith(("{", "["), at):
        return _json(mark, tools)
    if _PATTERNS["function"].match(mark.string, at) or _PATTERNS["invoked"].match(mark.string, at):
        return [], at
    named = _PATTERNS["glm name"].match(mark.string, at)
    known = named and (named["name"] in tools or named["fields"])
    if named is None or not known:
        return [_wrong("json", "xml")], _end(mark)
    return _fields(named, _PATTERNS["glm field"], "</tool_call>", tools, "glm")


def _function(mark: re.Match[str], tools: Tools) -> Read:
    """Reads a function in a tag: with JSON (Llama 3), or with parameters in tags."""
    if mark.string.startswith("{", _gap(mark.string, mark.end())):
        return _json(mark, tools)
    return _fields(mark, _PATTERNS["xml field"], "</function>", tools, "xml")


def _invoked(mark: re.Match[str], tools: Tools) -> Read:
    """Parameters in tags with a prefix of the family's."""
    prefix = re.escape(mark["prefix"])
    field = (
        rf'\s*<{prefix}parameter name="(?P<key>[^"]+)"(?: string="(?P<text>\w+)")?>(?P<value>.*?)'
        rf"</{prefix}parameter>(?=\s*(?:<{prefix}parameter |</{prefix}invoke>|$))"
    )
    pattern = re.compile(field, re.DOTALL)
    return _fields(mark, pattern, f"</{mark['prefix']}invoke>", tools, "invoke")


def _fields(
    mark: re.Match[str], field: re.Pattern[str], closes: str, tools: Tools, words: str
) -> Read:
    """Reads arguments in tags, which are texts without quotes; `closes` must follow, unless the
    turn was cut. The groups of a field are `key`, `value` and perhaps `text`: whether it is one.
    """
    text, at = mark.string, mark.end()
    tool = tools.get(mark["name"])
    arguments = {}
    while (found := field.match(text, at)) is not None:
        key, at = found["key"], found.end()
        types = None if tool is None else types_of(tool, key)
        if said := found.groupdict().get("text"):
            types = {"string"} if said == "true" else None
        arguments[key] = _typed(found["value"], types)
    end = _gap(text, at)
    if end < len(text) and not text.startswith((closes, "</tool_call>"), end):
        return [_wrong(words)], _end(mark)
    return [(mark["name"], arguments)], at


def _typed(text: str, types: set[str] | None) -> object:
    """Converts a text without quotes to a value of JSON types; None: they are not known."""
    if types == {"string"}:
        return text
    bare = text.strip()
    try:
        value = _WORDS[bare] if bare in _WORDS else json.loads(bare)
    except _NOT_JSON:
        return text
    if types is not None and "integer" in types and isinstance(value, float) and value % 1 == 0:
        return int(value)
    kinds = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    kind = kinds.get(type(value), "null")
    fits = types is None or kind in types or (kind == "integer" and "number" in types)
    return text if isinstance(value, str) or not fits else value


def _message(mark: re.Match[str], tools: Tools) -> Read:
    """Reads a message of gpt-oss or of Muse, which may be for a tool."""
    text, begin = mark.string, max(mark.start() - LONGEST_HEADER, 0)
    header = _PATTERNS["message ends"].split(text[begin : mark.start()])[-1]
    to = _PATTERNS["addressee"].search(header)
    addressed = to is not None and (to[1] is not None or to[2] in tools)
    thinks = "<|channel|>analysis" in header and not addressed
    if thinks or (to is not None and to[2] == "self"):
        end = _PATTERNS["message ends"].search(text, mark.end())
        return [], len(text) if end is None else end.start()
    if to is None or re.compile(r"\s*<[^|]").match(text, mark.end()):
        return [], mark.end()
    return _named(to[2], mark)


def _gemma(mark: re.Match[str], tools: Tools) -> Read:
    """Reads a call of Gemma 4: JSON whose keys have no quotes, and whose texts have quotes of their
    own."""
    parts = mark["body"].split('<|"|>')
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = json.dumps(part)
        else:
            keyed = _PATTERNS["unquoted key"].sub(lambda key: json.dumps(key[1]) + ":", part)
            words = r"(?<=[:,\[])\s*(True|False|None)(?=\s*[,\]}])"
            parts[index] = re.sub(words, lambda word: json.dumps(_WORDS[word[1]]), keyed)
    try:
        return [(mark["name"], _arguments(json.loads("".join(parts), strict=False)))], mark.end()
    except _NOT_JSON:
        return [_wrong("gemma")], mark.end()


def _python(mark: re.Match[str], tools: Tools) -> Read:
    """Calls as in Python, unless they turn out to be JSON or tags."""
    at, end = _gap(mark.string, mark.end()), _end(mark)
    if mark.string.startswith("<", at):
        return [], at
    if re.compile(r"\[?\s*\{").match(mark.string, at):
        return _json(mark, tools)
    return _as_python(mark.string[at:end].strip(), tools), end


def _as_python(text: str, tools: Tools) -> list[Call]:
    """Parses calls in Python, each on a line of its own or all in a list."""
    names = {f"tool_{at}_": name for at, name in enumerate(tools)}
    for word, name in names.items():
        if not name.isidentifier():
            text = re.sub(rf"(?<![\w.'\"-]){re.escape(name)}(?=\()", word, text)
    try:
        try:
            body = ast.parse(text).body
        except SyntaxError:
            body = ast.parse(_PATTERNS["unescaped"].sub(lambda found: repr(found[1]), text)).body
        values = [line.value if isinstance(line, ast.Expr) else line for line in body]
        nodes = [n for v in values for n in (v.elts if isinstance(v, ast.List) else [v])]
        return [_python_call(node, names, tools) for node in nodes]
    except _NOT_PYTHON as error:
        return [f"Error: {type(error).__name__}: {error}"]


def _python_call(node: ast.AST, names: Mapping[str, str], tools: Tools) -> Call:
    """Raises TypeError where the arguments are not those of the tool.

    Args:
        names: word in the text -> the name that it stands for, which is no word of Python.
    """
    if not isinstance(node, ast.Call):
        return _wrong("python")
    name = ast.unparse(node.func).removesuffix(".call")  # as Llama 3 calls what is built in
    name = names.get(name, name)
    try:
        given = [_constant(argument) for argument in node.args]
        if any(word.arg is None for word in node.keywords):
            raise ValueError
        named = {str(word.arg): _constant(word.value) for word in node.keywords}
    except ValueError:  # its text would tell where in memory a node is
        return _wrong("python")
    tool = tools.get(name)
    if tool is None:
        return name, named
    signature = inspect.signature(tool)
    arguments = signature.bind(*given, **named).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return name, arguments


def _constant(node: ast.expr) -> Any:
    """Returns the value of a constant, whose words may be those of JSON."""

    class Words(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.Constant(_WORDS[name.id]) if name.id in _WORDS else name

    return ast.literal_eval(Words().visit(node))


def _values(text: str, at: int) -> tuple[list[Any], int]:
    """Reads the JSON values that follow each other, those of a list one by one, and returns them
    with where they end. Raises ValueError where there are none."""
    values: list[Any] = []
    start = _gap(text, at)
    while True:
        value, at = _DECODER.raw_decode(text, start)
        values += value if isinstance(value, list) else [value]
        start = _gap(text, at)
        if not text.startswith(("{", "["), start):
            return values, at


def _call(value: object) -> Call:
    """Returns the call that a JSON value stands for: as in OpenAI's API, Hermes, Llama 3 or
    Cohere."""
    call = value if isinstance(value, dict) else {}
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name = next((call[key] for key in ("name", "tool_name", "function") if key in call), None)
    given = [call[key] for key in ("arguments", "parameters", "args") if key in call]
    if not isinstance(name, str):
        return _wrong("json")
    try:
        return name, _arguments(given[0] if given else None)
    except _NOT_JSON:
        return _wrong("json")


def _arguments(value: object) -> Arguments:
    """Returns arguments given as an object, as its JSON, perhaps encoded twice, or as nothing.
    Raises ValueError if they are anything else."""
    for _ in range(2):
        if isinstance(value, str):
            value = json.loads(value, strict=False) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError
    return value


def _wrong(*forms: str) -> str:
    return f"Error: a tool call must be {', or '.join(TABLE['words'][form] for form in forms)}"


def _gap(text: str, at: int) -> int:
    """Returns where the next call may begin."""
    gap = _PATTERNS["gap"].match(text, at)
    assert gap is not None  # it may be empty
    return gap.end()


def _end(mark: re.Match[str]) -> int:
    """Returns where the call after a mark ends, if it cannot be read."""
    end = _ENDS.search(mark.string, mark.end())
    return len(mark.string) if end is None else end.start()


READERS: dict[str, Callable[[re.Match[str], Tools], Read]] = {
    "tagged": _tagged,
    "function": _function,
    "invoked": _invoked,
    "message": _message,
    "gemma": _gemma,
    "json": _json,
    "python": _python,
}
FORMS = {_PATTERNS[name]: READERS[row[2]] for name, row in TABLE["forms"].items()}
"""What calls begin with -> what reads them."""
