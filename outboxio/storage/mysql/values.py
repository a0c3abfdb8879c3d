"""How values are written for MySQL, and how rows are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec

from outboxio.clock import naive_utc


class Row(tuple[Any, ...]):
    """A row whose columns are reached by index and by name, as those of the other drivers are."""

    _places: Mapping[str, int]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._places[key] if isinstance(key, str) else key)

    def keys(self) -> list[str]:
        """The names of the columns, in order."""
        return list(self._places)


def as_rows(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Rows of one result; columns of one name are reached by index."""
    if not rows:
        return []
    kind = _kind_of_row(tuple(names))
    return [kind(row) for row in rows]


@lru_cache(maxsize=1024)  # to make a class takes longer than to read a row
def _kind_of_row(names: tuple[str, ...]) -> Any:
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        places.setdefault(name, place)
    return type("Row", (Row,), {"_places": places})


Escape = Callable[[str], str]

_NO_BACKSLASH_ESCAPES = 1 << 9  # of the protocol, in a session's status

_AS_THEY_ARE = {str, int, float, bytes, type(None)}


def as_value(value: Any) -> Any:
    """A value of the application as the driver takes it: moments in UTC, UUIDs as text, members as their value."""
    if type(value) in _AS_THEY_ARE:
        return value
    match value:
        case UUID():
            return str(value)
        case datetime():
            return naive_utc(value)
        case Enum():
            return as_value(value.value)
        case _:
            return value


def escape_of(connection: Any) -> Escape:
    """How this session writes a text as a literal; in single quotes nothing else has a meaning.

    The drivers write more of it in another way, for people who read logs, and take five times as long.
    """
    return _doubling_quotes if connection.server_status & _NO_BACKSLASH_ESCAPES else _escaping_backslashes


def _escaping_backslashes(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _doubling_quotes(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def as_json(values: Iterable[Any]) -> str:
    """A list as the one text that JSON_TABLE takes apart again."""
    return msgspec.json.encode(list(values)).decode()


def as_moment(moment: datetime) -> str:
    """A moment within such a list."""
    return naive_utc(moment).isoformat(" ", "microseconds")
