"""Facts as JSON: the same facts as on the page, with exact numbers, and with moments in UTC."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
from msgspec import Raw, Struct

from outboxio.model.operating.page import BoundedCount


def as_json(facts: object) -> bytes:
    """The facts as indented JSON.

    - A moment is ISO 8601 in UTC: ``2026-01-31T02:41:00Z``. A duration is seconds.
    - A number has all of its digits, also within a document of an event.
    - A bounded count is an object with ``number`` and ``is_complete``.
    - A lone surrogate, which JSON in UTF-8 cannot have, becomes its escape as text.
    """
    return msgspec.json.format(msgspec.json.encode(_plain(facts)), indent=2) + b"\n"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | Raw):
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, BoundedCount):
        return {"number": int(value), "is_complete": value.is_complete}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, object]", value)
        return {_plain(str(key)): _plain(each) for key, each in fields.items()}
    if isinstance(value, Iterable):
        return [_plain(each) for each in cast("Iterable[object]", value)]
    return value
