"""Limits on what a chat template may do: it is a program that comes with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from jinja2 import Template, TemplateRuntimeError

TEMPLATE_LINES = 1_000_000
"""A chat of a thousand turns takes a tenth of it."""


@lru_cache(64)
def program(template: str) -> Template:
    """The compiled template, in the sandbox of transformers."""
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template(template)


@contextmanager
def limited() -> Iterator[None]:
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
