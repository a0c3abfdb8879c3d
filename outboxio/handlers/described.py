"""Readable options: the fields of a struct that differ from the defaults, as JSON values or as text."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, cast

from msgspec import Struct

from outboxio.handlers.options import Batch, HandlerOptions, checked_options
from outboxio.handlers.rate import Rate
from outboxio.model.retry import RetryPolicy
from outboxio.support.duration import format_duration

DEFAULT_OPTIONS: HandlerOptions = checked_options("", "", {})


def changed(given: Struct, defaults: Struct) -> dict[str, Any]:
    """Return the fields that differ from the defaults, as JSON values, or as text where JSON has no type for them.

    Example::

        changed(handler.options, DEFAULT_OPTIONS)  # {"ordered": True, "timeout": "5m"}
    """
    names = given.__struct_fields__
    differing = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(defaults, name)}
    return {name: _plain(value) for name, value in differing.items()}


def in_texts(options: HandlerOptions) -> dict[str, str]:
    """Return the options that differ from the defaults, as text.

    Example::

        in_texts(handler.options)  # {"ordered": "True", "retry": "max_attempts 3"}
    """
    return {name: _text(value) for name, value in changed(options, DEFAULT_OPTIONS).items()}


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    parts = cast("dict[str, Any]", value)
    return ", ".join(f"{part} {each}" for part, each in parts.items())


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, RetryPolicy | Batch):
        return changed(value, type(value)()) or type(value).__name__
    if isinstance(value, datetime | Rate):
        return value.isoformat() if isinstance(value, datetime) else str(value)
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return value
