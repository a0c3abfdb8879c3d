"""Options for people: the fields of a struct that differ from the defaults, in the forms of JSON."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct

from outboxio.handlers.batch import Batch
from outboxio.handlers.options import HandlerOptions, checked_options
from outboxio.model.retry import RetryPolicy
from outboxio.support.duration import format_duration

DEFAULT_OPTIONS: HandlerOptions = checked_options("", "", {})


def changed(given: Struct, defaults: Struct) -> dict[str, Any]:
    """The fields that differ from the defaults, as text where JSON has no form.

    Example::

        changed(handler.options, DEFAULT_OPTIONS)  # {"ordered": True, "timeout": "5m"}
    """
    names = given.__struct_fields__
    differing = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(defaults, name)}
    return {name: _plain(value) for name, value in differing.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, RetryPolicy | Batch):
        return changed(value, type(value)()) or type(value).__name__
    if isinstance(value, datetime):
        return value.isoformat()
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return value
