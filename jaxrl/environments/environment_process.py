"""Environments by their names, found in the run; and what a process that runs them does: it loads
one, and holds the live instances of many episodes."""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from jaxrl.data.example import JsonObject, Message
from jaxrl.environments.environment import Answer, Environment, Unavailable
from jaxrl.environments.tool_calls import LONGEST, SchemaTool, cut_text
from jaxrl.errors import UserError, near, shown
from jaxrl.process.json_types import finite
from jaxrl.process.plugin import CodeSource, is_plugin, load_source, locate
from jaxrl.process.user_process import Answerer, Call, CodeFailed, TooLong, traceback_of_user

KEY, ARGUMENTS = "environment.name", "environment.arguments"
PACKAGES = {
    "gymnasium": "jaxrl.environments.packages.gymnasium:Gymnasium",
    "mcp": "jaxrl.environments.packages.mcp:McpTools",
    "openenv": "jaxrl.environments.packages.openenv:OpenEnv",
    "verifiers": "jaxrl.environments.packages.verifiers_v1:Verifiers",
}
"""Name -> where it is, of those for environments of other packages; also the name of the extra that
installs the package."""
BUILT_IN = {
    "calculator": "jaxrl.environments.built_in:Calculator",
    "guess_number": "jaxrl.environments.built_in:GuessNumber",
    "text_world": "jaxrl.environments.built_in:TextWorld",
    **PACKAGES,
}
"""Name -> where it is."""
T = TypeVar("T")
Prompted = tuple[Message, ...] | str
ROLES = ("user", "tool", "system")
"""Whose words may follow a turn of the model."""
KEYS = ("messages", "reward", "done")
_SHAPE = "Answer(messages, reward=None, done=False), or a dict of these"


@dataclass(frozen=True)
class EnvironmentSource(CodeSource):
    """Where an environment comes from: a class or, of a Python program, also a function that makes
    an instance."""

    arguments: JsonObject = field(default_factory=dict)
    """Keyword arguments for it."""


@dataclass(frozen=True)
class EnvironmentFacts:
    """What the run must know of a loaded environment."""

    resets: bool
    """Whether it makes prompts of its own (`reset` is not the one of the base class)."""
    tools: Sequence[JsonObject] = ()
    """JSON schemas of its tools."""


def find(
    text: str,
    arguments: JsonObject | None = None,
    given: Mapping[str, bytes] = MappingProxyType({}),
) -> EnvironmentSource:
    """Returns the source that `environment.name` names; its code is not run.

    Args:
        arguments: `environment.arguments`; None: there are none.
        given: what a Python program gave, pickled, by its entry in the config.

    Raises:
        UserError: it names nothing.
    """
    if not is_plugin(text) and text not in BUILT_IN:
        raise UserError(
            f"unknown {KEY} {text!r}{near(text, BUILT_IN)}: it is path/to/file.py:Class,"
            f" package.module:Class or one of {', '.join(BUILT_IN)}"
        )
    found = vars(locate(BUILT_IN.get(text, text), KEY, "Class", given, "environment={}"))
    return EnvironmentSource(**{**found, "text": text}, arguments=arguments or {})


def load_class(source: EnvironmentSource) -> Callable[..., Environment]:
    """Loads and returns the class, or the function that makes an instance.

    Raises:
        UserError: it cannot be imported, is not there, or is no environment; or its file has
            changed since the run began.
    """
    try:
        found: Callable[..., Environment] = load_source(source, KEY, "Class")
    except UserError as error:
        if source.text in PACKAGES and isinstance(error.__cause__, ImportError):
            raise UserError(
                f"{KEY}: {source.text} needs the extra `{source.text}`: pip install"
                f" 'jaxrl[{source.text}]' ({error.__cause__})"
            ) from error.__cause__
        raise
    if not source.code and not (inspect.isclass(found) and issubclass(found, Environment)):
        what = "a class" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise UserError(
            f"{KEY}: {source.text} is {what}, it must be a subclass of"
            " jaxrl.environments.Environment"
        )
    return found


def facts_of(
    source: EnvironmentSource, kind: Callable[..., Environment], describe: bool
) -> EnvironmentFacts:
    """Looks at an instance; what is asked of a server once in a process is then known.

    Args:
        describe: whether the schemas of its tools are wanted, which take seconds.

    Raises:
        UserError: it cannot be made, or has neither `step` nor tools, or a tool without a schema.
    """
    given = (
        f"with {ARGUMENTS}={dict(source.arguments)}" if source.arguments else "without arguments"
    )
    takes = ""
    try:
        signature = inspect.signature(kind)
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        plain = signature.replace(parameters=bare, return_annotation=signature.empty)
        takes = f"; {ARGUMENTS} must be those of {source.name}{plain}"
        signature.bind(**source.arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{KEY}: {source.text} cannot be made {given}: {error}{takes}") from error
    try:
        made = kind(**source.arguments)
        if not isinstance(made, Environment):
            raise UserError(
                f"it makes {shown(made)}, which is no instance of jaxrl.environments.Environment"
            )
        tools = list(made.tools)
    except UserError as error:
        raise UserError(f"{KEY}: {source.text}: {error}") from error
    except Exception as error:
        raise UserError(
            f"{KEY}: {source.text} cannot be made {given}: {type(error).__name__}: {error}"
        ) from error
    if not tools and type(made).step is Environment.step:
        raise UserError(f"{KEY}: {source.text} has neither a method `step` nor `tools`")
    schemas = []
    for tool in tools if describe else ():
        if isinstance(tool, SchemaTool):
            schemas.append(tool.schema)
            continue
        from transformers.utils import get_json_schema  # takes seconds

        try:
            schema = get_json_schema(tool)
        except Exception as error:  # whatever transformers raises
            name = getattr(tool, "__name__", repr(tool))
            raise UserError(
                f"{KEY}: {source.text}: the tool {name} has no schema: "
                f"{' '.join(str(error).split())}; give its arguments type hints, and its docstring"
                " a section `Args:` with a line for each"
            ) from error
        schema["function"].pop("return", None)
        schemas.append(schema)
    return EnvironmentFacts(type(made).reset is not Environment.reset, schemas)


@dataclass(frozen=True)
class Observation:
    """The answer of an environment to one turn, whose messages were cut to LONGEST characters."""

    messages: tuple[Message, ...]
    reward: float | None
    done: bool

    @classmethod
    def of_json(cls, value: JsonObject) -> Observation:
        """Returns the answer of which this is the `asdict`, perhaps read from JSON."""
        return cls(tuple(value["messages"]), value["reward"], value["done"])


@dataclass
class Session:
    """One episode, as the run sees it; also what is needed to make its instance again."""

    key: Hashable
    row: JsonObject
    first: Prompted | None = None
    """The prompt that its `reset` returned; None: it was not asked for one."""
    turns: list[tuple[str, Observation]] = field(default_factory=list)
    """The model's turns and their answers."""
    strict: bool = True
    """Whether an instance that is made again must give the same answers again; else these
    count."""


@dataclass
class _Live:
    environment: Environment
    messages: list[Message]


def load(source: EnvironmentSource, first: bool, ready: Callable[[object], None]) -> Answerer:
    """Loads an environment in a process of its own (`process.user_process.main`).

    The content of a call begins with its kind and the key of its episode: ("begin", key, row),
    ("step", key, `Session` of an instance to make again or None, text), ("end", key).
    """
    kind, facts = load_class(source), None
    # A process that comes later lets its episodes fail, should a server be away by then.
    with nullcontext() if first else suppress(UserError):
        facts = facts_of(source, kind, first)
    try:
        ready(asdict(facts) if first and facts else None)
    except TooLong as error:
        count = len(facts.tools) if facts else 0
        raise UserError(
            f"{KEY}: {source.text}: the schemas of its tools ({count}) are {error}: let it offer"
            " fewer, or describe them in fewer words"
        ) from None
    return _Instances(source, kind).answer


class _Instances:
    """The live instances of a process, by the keys of their episodes."""

    def __init__(self, source: EnvironmentSource, kind: Callable[..., Environment]):
        self._source, self._kind = source, kind
        self._live: dict[Hashable, _Live] = {}

    async def answer(self, call: Call, kind: str, key: Hashable, *content: Any) -> None:
        try:
            if kind == "begin":
                call.say({"result": await self._begun(call, key, *content)})
            elif kind == "step":
                past, text = content
                if past is not None:
                    await self._again(call, key, past)
                if key not in self._live:
                    why = f"{self._source.text}: the instance of this episode could not be made"
                    raise CodeFailed("exception", why)
                call.say({"result": asdict(await self._stepped(call, self._live[key], text))})
            else:
                # The episode is over: what goes wrong is printed, and no failure.
                live = self._live.pop(key, None)
                if live is None:  # its instance could not be made
                    call.begin()
                else:
                    try:
                        await self._run(call, live.environment.close)
                    except CodeFailed as failed:
                        traceback.print_exception(failed)
                call.say({"result": None})
        except TooLong as error:
            method = "reset" if kind == "begin" else "step"
            text = f"{self._source.text}: what `{method}` returned is {error}"
            raise CodeFailed("exception", text) from None

    async def _again(self, call: Call, key: Hashable, past: Session) -> None:
        """Makes the instance of an episode that another process had."""
        first, live = await self._begun(call, key, past.row), self._live[key]
        if past.first is not None and first != past.first:
            if past.strict:
                raise self._differs("its prompt", past.first, first)
            live.messages = _as_messages(past.first)
        for number, (text, before) in enumerate(past.turns):
            heard = len(live.messages)
            now = await self._stepped(call, live, text)
            if now == before:
                continue
            if past.strict:
                raise self._differs(f"turn {number + 1}", before, now)
            live.messages[heard + 1 :] = before.messages

    async def _begun(self, call: Call, key: Hashable, row: JsonObject) -> Prompted:
        """Makes the instance of an episode, which lives once its `reset` has returned; returns the
        prompt."""
        environment = await self._run(call, self._kind, **self._source.arguments)
        environment.row = row
        first = await self._run(call, environment.reset, row)
        self._live[key] = live = _Live(environment, [])
        if type(environment).reset is not Environment.reset:
            first = self._checked(first_messages, first)
        elif not isinstance(first, str):
            first = tuple(dict(message) for message in first)
        live.messages = _as_messages(first)
        return first

    async def _stepped(self, call: Call, live: _Live, text: str) -> Observation:
        before = [dict(message) for message in live.messages]
        step = live.environment.step
        observation = self._checked(observed, await self._run(call, step, text, before))
        live.messages += [{"role": "assistant", "content": text}, *observation.messages]
        return observation

    async def _run(
        self, call: Call, function: Callable[..., object], /, *args: object, **arguments: object
    ) -> Any:
        call.begin()
        try:
            return await call.run(function, *args, **arguments)
        except CodeFailed as failed:
            if isinstance(failed.error, Unavailable):
                raise CodeFailed("exception", str(failed.error)) from None
            raise

    def _checked(self, check: Callable[[object], T], result: object) -> T:
        try:
            return check(result)
        except UserError as error:
            raise CodeFailed("exception", f"{self._source.text}: {error}") from None
        except BaseException as error:  # of the user's classes, such as a generator of messages
            raise CodeFailed("exception", traceback_of_user(error)) from None

    def _differs(self, what: str, before: object, now: object) -> CodeFailed:
        return CodeFailed(
            "exception",
            f"{self._source.text} is not deterministic: for the same row it gave {what} as"
            f" {shown(now)}, and before that as {shown(before)}; let all random numbers come from a"
            " seed in the row",
        )


def _as_messages(first: Prompted) -> list[Message]:
    return [{"role": "user", "content": first}] if isinstance(first, str) else list(first)


def observed(result: object) -> Observation:
    """Checks the result of `step`. Raises UserError where it is no answer."""
    if isinstance(result, Answer):
        result = {key: getattr(result, key) for key in KEYS}
    if not isinstance(result, Mapping):
        raise _bad("step", shown(result), _SHAPE)
    for key in result:
        if key not in KEYS:
            raise _bad("step", f"a dict with the key {key!r}{near(str(key), KEYS)}", _SHAPE)
    reward, done = result.get("reward"), result.get("done", False)
    if hasattr(done, "item") and getattr(done, "shape", None) == ():  # numpy's
        done = done.item()
    if not isinstance(done, bool):
        raise _bad("step", f"done={shown(done)}", "True or False")
    number = None if reward is None else finite(reward)
    if reward is not None and number is None:
        raise _bad("step", f"the reward {shown(reward)}", "a finite number, or None")
    messages = result.get("messages", ())
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}] if messages else []
    left, kept = LONGEST, []
    for message in checked_messages(messages, "step", ROLES):
        text = cut_text(message["content"], left)
        left = max(left - len(text), 0)
        kept.append({**message, "content": text})
    if not kept and not done:
        raise UserError("`step` returned no message for the model, and not done=True")
    return Observation(tuple(kept), number, done)


def first_messages(result: object) -> tuple[Message, ...] | str:
    """Checks the result of `reset`. Raises UserError where it is no prompt."""
    text = isinstance(result, str) and result
    given = [{"role": "user", "content": text}] if text else result
    messages = checked_messages(given, "reset", (*ROLES, "assistant"))
    if not messages:
        raise UserError("`reset` returned no message: the model needs a prompt")
    return text or messages


def checked_messages(messages: object, method: str, roles: Sequence[str]) -> tuple[Message, ...]:
    """Returns chat messages with texts `role` and `content`, as plain dicts with all of their
    fields."""
    if isinstance(messages, Mapping | bytes) or not hasattr(messages, "__iter__"):
        raise _bad(method, f"the messages {shown(messages)}", "a list")
    found = []
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        texts = [fields.get(name) for name in ("role", "content")]
        if not all(isinstance(text, str) for text in texts):
            what = f"the message {shown(message)}"
            raise _bad(method, what, "a dict with the texts `role` and `content`")
        if texts[0] not in roles:
            raise _bad(method, f"a message of the role {texts[0]!r}", f"of {', '.join(roles)}")
        try:
            text = json.dumps(dict(fields), ensure_ascii=False, allow_nan=False)
            found.append(json.loads(text.encode()))
        except (TypeError, ValueError, RecursionError) as error:
            raise _bad(method, f"the message {shown(message)}", f"JSON ({error})") from error
    return tuple(found)


def _bad(method: str, what: str, must: str) -> UserError:
    return UserError(f"`{method}` returned {what}: it must be {must}")
