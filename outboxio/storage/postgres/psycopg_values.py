"""Rows and arguments of psycopg 3 in asyncpg's form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast
from uuid import UUID


class Row(tuple[Any, ...]):
    """A row whose columns can also be read by name, like a record of asyncpg. Each list of names has its own class."""

    __slots__ = ()
    _positions: dict[str, int]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._positions[key] if type(key) is str else key)

    def keys(self) -> list[str]:
        return list(self._positions)

    def values(self) -> list[Any]:
        return list(self)

    def items(self) -> list[tuple[str, Any]]:
        return list(zip(self._positions, self, strict=True))

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._positions else default

    def __repr__(self) -> str:
        return f"<Row {' '.join(f'{name}={value!r}' for name, value in self.items())}>"


@lru_cache(1024)
def _row_class(names: tuple[str, ...]) -> type[Row]:
    return type("Row", (Row,), {"__slots__": (), "_positions": {name: n for n, name in enumerate(names)}})


def rows_of(cursor: Any) -> Any:
    columns = cursor.description
    return tuple if columns is None else _row_class(tuple(column.name for column in columns))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_TEXTS: dict[type, Callable[[Any], str]] = {
    str: _quoted,
    int: str,
    bool: str,
    UUID: lambda value: value.hex,
}


def argument(value: Any) -> Any:
    """Convert a value for psycopg. A list with NULL stays a list: in a text, NULL depends on ``array_nulls``."""
    kind = cast("type[object]", type(value))
    if kind is int:
        return str(value)
    if kind is list or kind is tuple:
        with suppress(KeyError):
            return "{" + ",".join([_TEXTS[type(item)](item) for item in value]) + "}"
        return list(value)
    return value
