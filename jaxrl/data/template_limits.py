"""Limits on what a chat template may do: it is a program that comes with a model.

jinja's sandbox keeps it from the machine, and limits one loop; not loops within loops, nor what a
filter or a method does at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import BuiltinMethodType, FrameType
from typing import Any

from jinja2 import TemplateRuntimeError

TEMPLATE_LINES = 5_000_000
"""Lines of Python, of the template and of what it calls. A chat of a thousand turns takes a fifth
of it."""
TEMPLATE_TEXT = 1 << 23
"""Characters or items of what a template makes: more than the longest context has."""
_OFTEN = 32
"""So often TEMPLATE_TEXT may all texts together have that are made."""
_WIDTH = re.compile(r"\d{6}|\*")
"""In a form for numbers, a width that makes a text of a million characters."""
_ANY_NUMBER = ("default", "d")
"""Filters whose arguments are values, not sizes."""


@lru_cache(64)
def program(template: str) -> Any:
    """Compiles a template in the sandbox that transformers has for chat templates, limited."""
    from transformers.utils import chat_template_utils  # seconds

    # What is constant in a template is not worked out before the limits hold.
    shared = chat_template_utils._compile_jinja_template("").environment
    limited = shared.overlay(optimized=False)
    operate, call = limited.call_binop, limited.call

    def bounded_operate(context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check(max(_size(left) * _count(right), _size(right) * _count(left)))
            _check(_count(left).bit_length() + _count(right).bit_length())
        elif operator == "+":
            _check(_size(left) + _size(right))
        elif operator == "**":
            _check(_count(left).bit_length() * _count(right))
        elif isinstance(left, str):
            _check_form(left)
        return operate(context, operator, left, right)

    def bounded_call(context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # the sandbox has a `format` of its own
        if isinstance(method, BuiltinMethodType):
            _check_arguments(method.__name__, method.__self__, (*args, *kwargs.values()))
        return call(context, called, *args, **kwargs)

    limited.intercepted_binops = frozenset(("*", "+", "**", "%"))
    limited.call_binop, limited.call = bounded_operate, bounded_call
    limited.filters = {name: _bounded(name, each) for name, each in shared.filters.items()}
    return limited.from_string(template)


@contextmanager
def limits() -> Iterator[None]:
    """Limits templates: within this context, one that runs more than TEMPLATE_LINES lines of
    Python, including those of the filters and functions that it calls, or that puts together a text
    longer than TEMPLATE_TEXT, ends with a TemplateRuntimeError."""
    left, made, before = TEMPLATE_LINES, 0, sys.gettrace()

    def count(frame: FrameType, event: str, value: object) -> Any:
        nonlocal left, made
        if event == "line":
            left -= 1
            if left < 0:
                raise TemplateRuntimeError(f"it does not end within {TEMPLATE_LINES:,} lines")
        elif event == "return" and isinstance(value, str):
            made += len(value)
            _check(max(len(value), made // _OFTEN))
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def _bounded(name: str, each: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that refuses arguments which would make it work without end."""

    @wraps(each)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        # A filter may get the environment or the context before the value.
        first = 1 if hasattr(each, "jinja_pass_arg") else 0
        value, rest = args[first], (*args[first + 1 :], *kwargs.values())
        _check_arguments(name, value, () if name in _ANY_NUMBER else rest)
        return each(*args, **kwargs)

    return bounded


def _check_arguments(name: str, value: Any, rest: tuple[Any, ...]) -> None:
    """Checks the arguments of a filter or a method: `value` is what it is applied to, `rest` its
    arguments."""
    _check(_size(value))
    for one in rest:
        _check(max(_size(one), _count(one)))
    if name in ("replace", "join") and rest:
        _check(_size(value) * max(map(_size, rest)))
    elif name in ("format", "format_map") and isinstance(value, str):
        _check_form(value)
    elif name == "join":
        _check(sum(map(_size, value)) if isinstance(value, list | tuple) else 0)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _count(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _check(size: int) -> None:
    if size > TEMPLATE_TEXT:
        raise TemplateRuntimeError(f"it asks for more than {TEMPLATE_TEXT:,} characters or items")


def _check_form(form: str) -> None:
    # The digits of what is formatted are not looked at: only those within its braces and signs.
    for field in re.findall(r"%[^a-zA-Z%]*|\{[^}]*", form):
        if _WIDTH.search(field):
            raise TemplateRuntimeError(f"it formats with {field[:40]!r}")
