"""Conversion of values for SQLite, which only has text, numbers and bytes."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec

from outboxio.storage.sqlite.connection import Parameters
from outboxio.support.clock import naive_utc

# Quoted texts and comments, which cannot contain placeholders, and then the placeholders.
_PLACEHOLDER = re.compile(
    r"""'[^']*'|"[^"]*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|(?P<positional>\?)|\$(?P<number>\d+)\b""", re.DOTALL
)


def as_text(at: datetime) -> str:
    """Format a naive datetime, always with six decimals, so that the texts sort chronologically."""
    return at.isoformat(" ", "microseconds")


def as_json(values: Iterable[Any]) -> str:
    """Encode a list as JSON text, for ``json_each``."""
    return msgspec.json.encode(list(values)).decode()


def as_parameters(sql: str, arguments: Sequence[Any]) -> Parameters:
    """Convert the arguments of a user-supplied statement to parameters for sqlite3.

    ``?`` takes arguments by position. ``$1`` is a name for SQLite, so arguments are named 1, 2, ... if the first
    placeholder of the statement, outside of quotes and comments, is ``$`` with a number.
    """
    values = [as_value(argument) for argument in arguments]
    highest = _highest_number(sql) if "$" in sql else 0
    if not highest:
        return values
    if highest != len(values):
        raise sqlite3.ProgrammingError(
            f"the statement has placeholders up to ${highest}, but there are {len(values)} arguments"
        )
    return {str(number): value for number, value in enumerate(values, 1)}


def as_value(value: Any) -> Any:
    """Convert a user-supplied value to a type that SQLite stores; sqlite3 rejects values of unknown types."""
    match value:
        case UUID() | Decimal():
            return str(value)
        case datetime():
            return as_text(naive_utc(value))
        case date():
            return value.isoformat()
        case time():
            return value.isoformat("microseconds")
        case Enum():
            return as_value(value.value)
        case _:
            return value


@lru_cache(maxsize=512)
def _highest_number(sql: str) -> int:
    """Return the highest n of all ``$n`` in the statement; 0 if the first placeholder is ``?``."""
    found = [match for match in _PLACEHOLDER.finditer(sql) if match["positional"] or match["number"]]
    if not found or found[0]["positional"]:
        return 0
    return max(int(match["number"] or 0) for match in found)
