"""Codecs that the application has set on its connections (``set_type_codec`` of asyncpg).

Codecs for JSON are of no consequence: every statement of outboxio sends and reads JSON as text. The other types travel
as values of Python, so that a codec for one of these types must not change the values.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.errors import ConfigurationError
from outboxio.storage.postgres.errors import is_unreachable

_SENT: dict[str, tuple[str, Any]] = {
    "bool": ("SELECT $1::pg_catalog.bool", True),
    "int2": ("SELECT $1::pg_catalog.int2", 1),
    "int4": ("SELECT $1::pg_catalog.int4", 1),
    "int8": ("SELECT $1::pg_catalog.int8", 1),
    "float8": ("SELECT $1::pg_catalog.float8", 0.5),
    "text": ("SELECT $1::pg_catalog.text", "text"),
    "varchar": ("SELECT $1::pg_catalog.varchar", "text"),
    "uuid": ("SELECT $1::pg_catalog.uuid", UUID(int=1)),
    "timestamp": ("SELECT $1::pg_catalog.timestamp", datetime(2000, 1, 2, 3, 4, 5, 6)),
}
"""A statement that reads a value back, and the value, for each type that statements of outboxio send and read."""


async def refuse_codecs(connection: Any, shard: str) -> None:
    """Raise :class:`ConfigurationError` with the types whose values do not come back as sent."""
    names = [name for name, (statement, value) in _SENT.items() if not await _comes_back(connection, statement, value)]
    if names:
        raise ConfigurationError(
            f"the connections of shard {shard!r} have codecs for {', '.join(names)} (set_type_codec), with which "
            "outboxio cannot read and write its rows: remove these codecs from the init of the pool, or give the "
            "outbox a URL instead of the pool. Codecs for json and jsonb may stay"
        )


async def _comes_back(connection: Any, statement: str, value: Any) -> bool:
    try:
        got = await connection.fetchval(statement, value)
    except Exception as error:  # a codec of the application may raise any error
        if is_unreachable(error):
            raise
        return False
    return isinstance(got, type(value)) and bool(got == value)
