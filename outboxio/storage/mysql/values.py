"""Conversion of values for MySQL and MariaDB, and of rows."""

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
    """A row with columns by index and by name, like the rows of PostgreSQL and SQLite drivers."""

    _positions: Mapping[str, int]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._positions[key] if isinstance(key, str) else key)

    def keys(self) -> list[str]:
        """Return the names of the columns, in order."""
        return list(self._positions)


def as_rows(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Convert the rows of a result. A duplicate column name refers to the first such column."""
    if not rows:
        return []
    row_class = _row_class(tuple(names))
    return [row_class(row) for row in rows]


@lru_cache(maxsize=1024)  # creating a class takes longer than reading a row
def _row_class(names: tuple[str, ...]) -> Any:
    positions: dict[str, int] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, position)
    return type("Row", (Row,), {"_positions": positions})


Escape = Callable[[str], str]

NO_BACKSLASH_ESCAPES = 1 << 9  # flag in the session status of the protocol

_PLAIN = {str, int, float, bytes, type(None)}


def as_value(value: Any) -> Any:
    """Convert a user-supplied value for the driver: datetimes to UTC, UUIDs to text, enum members to their value."""
    if type(value) in _PLAIN:
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
    """Return the function that quotes a text as a literal for this session: it doubles quotes and escapes backslashes.

    No other character is special within single quotes. The driver also escapes control characters, to make logs
    readable, and takes five times as long.
    """
    return _doubling_quotes if connection.server_status & NO_BACKSLASH_ESCAPES else _escaping_backslashes


def _escaping_backslashes(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _doubling_quotes(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_CODECS = {"utf8mb3": UTF8MB3, "utf8": UTF8MB3, "latin1": "cp1252"}
"""Python's codecs whose names differ from MySQL's character sets."""


def encoding_of_charset(name: str) -> TextEncoding:
    """Look up the encoding of a character set."""
    return UTF_8 if name == "utf8mb4" else encoding_named(name, _CODECS.get(name, name))


def as_json(values: Iterable[Any]) -> str:
    """Encode a list as JSON text, for JSON_TABLE."""
    return msgspec.json.encode(list(values)).decode()


def as_timestamp(at: datetime) -> str:
    """Format a timestamp within such a list."""
    return naive_utc(at).isoformat(" ", "microseconds")
