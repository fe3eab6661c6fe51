"""Values that are written as JSON or YAML, or handed on by name."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
"""An object of JSON or a mapping of YAML, as it is parsed or written."""
Keywords = dict[str, Any]
"""Keyword arguments of a function that is called later, or in several places."""
