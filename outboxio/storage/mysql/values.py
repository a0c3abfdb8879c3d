"""How values are written for MySQL and MariaDB, and how rows are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec

from outboxio.support.clock import naive_utc
from outboxio.support.text import UTF8MB3, UTF_8, TextEncoding, encoding_named


class Row(tuple[Any, ...]):
    """A row with columns by index and by name, as rows of the drivers for PostgreSQL and SQLite."""

    _places: Mapping[str, int]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._places[key] if isinstance(key, str) else key)

    def keys(self) -> list[str]:
        """The names of the columns, in order."""
        return list(self._places)


def as_rows(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Rows of a result. Of columns with the same name, the name is the first column."""
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

NO_BACKSLASH_ESCAPES = 1 << 9  # of the protocol, in a session's status

_AS_THEY_ARE = {str, int, float, bytes, type(None)}


def as_value(value: Any) -> Any:
    """A value of the application as the driver takes it: moments in UTC, UUIDs as text, enum members as the value."""
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
    """The function that writes a text as a literal for this session: it doubles quotes, and escapes backslashes.

    No further character has a meaning within single quotes. The driver also escapes control characters, for people who
    read logs, and takes five times as long.
    """
    return _doubling_quotes if connection.server_status & NO_BACKSLASH_ESCAPES else _escaping_backslashes


def _escaping_backslashes(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _doubling_quotes(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_CODECS = {"utf8mb3": UTF8MB3, "utf8": UTF8MB3, "latin1": "cp1252"}
"""The codecs of Python that have a different name than the character set of MySQL."""


def encoding_of_charset(name: str) -> TextEncoding:
    """The characters of a character set."""
    return UTF_8 if name == "utf8mb4" else encoding_named(name, _CODECS.get(name, name))


def as_json(values: Iterable[Any]) -> str:
    """A list as a JSON text for JSON_TABLE."""
    return msgspec.json.encode(list(values)).decode()


def as_moment(moment: datetime) -> str:
    """A moment within such a list."""
    return naive_utc(moment).isoformat(" ", "microseconds")
