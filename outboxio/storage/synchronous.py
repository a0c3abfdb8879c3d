"""The callers' synchronous connections on which ``outboxio.sync.Producer`` writes rows of ``events``.

The statements and columns are those of the asynchronous sessions. Only the driver of the standard library is imported
here: the caller has already imported the driver of its connection.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from outboxio.errors import ConfigurationError
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.payloads.fields import kept_by_double, kept_by_numeric
from outboxio.storage.mysql.columns import INSERT_EVENTS, values_of_action, values_of_event
from outboxio.storage.mysql.values import as_value, encoding_of_charset
from outboxio.storage.postgres.columns import encoding_called
from outboxio.storage.postgres.insertion import blocking_insertion
from outboxio.storage.sqlite import insertion
from outboxio.storage.sqlite.connection import commits_each_statement
from outboxio.support.codec import Check
from outboxio.support.text import UTF_8, TextEncoding

Insertion = Callable[[ActionRecord, Sequence[EventRecord]], tuple[str, Any]]
"""Returns the INSERT of the rows of an action, and its parameters."""


class SyncDialect(Struct, frozen=True):
    """A dialect for synchronous connections."""

    stores_nul: bool
    check_numbers: Check | None
    insertion: Insertion


def _mysql_insertion(action: ActionRecord, events: Sequence[EventRecord]) -> tuple[str, list[Any]]:
    shared = [as_value(value) for value in values_of_action(action)]
    own = ((*values_of_event(event), action.headers_of(event)) for event in events)
    values = [value for each in own for value in (*map(as_value, each), *shared)]
    row = f"({', '.join(['%s'] * (len(values) // len(events)))}, FALSE)"
    return INSERT_EVENTS + ",\n".join([row] * len(events)), values


def _sqlite_insertion(action: ActionRecord, events: Sequence[EventRecord]) -> tuple[str, dict[str, Any]]:
    return insertion.INSERT_EVENTS, insertion.event_parameters(action, events)


POSTGRES = SyncDialect(stores_nul=False, check_numbers=kept_by_numeric, insertion=blocking_insertion)
MYSQL = SyncDialect(stores_nul=True, check_numbers=kept_by_double, insertion=_mysql_insertion)
MARIADB = SyncDialect(stores_nul=True, check_numbers=None, insertion=_mysql_insertion)
SQLITE = SyncDialect(stores_nul=True, check_numbers=None, insertion=_sqlite_insertion)
DIALECTS = (POSTGRES, MYSQL, MARIADB, SQLITE)


def mysql_or_mariadb(connection: Any) -> SyncDialect:
    """Return the dialect of a connection of PyMySQL or mysqlclient."""
    return MARIADB if "mariadb" in str(connection.get_server_info()).lower() else MYSQL


class SyncConnection(Protocol):
    """A caller's synchronous connection."""

    @property
    def dialect(self) -> SyncDialect: ...

    @property
    def encoding(self) -> TextEncoding:
        """The characters that can be stored over this connection."""
        ...

    def in_transaction(self) -> bool:
        """Return True if a transaction is open, or starts with the next statement."""
        ...

    def execute(self, sql: str, parameters: Any) -> None: ...


def encoding_of_postgres(connection: Any) -> TextEncoding:
    """Return the narrower of the encodings of the database and of a psycopg connection."""
    names = (connection.info.parameter_status(name) for name in ("server_encoding", "client_encoding"))
    return next((one for one in map(encoding_called, names) if one is not UTF_8), UTF_8)


class _Psycopg:
    dialect = POSTGRES

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @property
    def encoding(self) -> TextEncoding:
        return encoding_of_postgres(self._connection)

    def in_transaction(self) -> bool:
        return not self._connection.autocommit or self._connection.info.transaction_status != 0  # IDLE

    def execute(self, sql: str, parameters: Any) -> None:
        from psycopg import Cursor

        # connection.cursor() may return a class with other placeholders.
        with Cursor[Any](self._connection) as cursor:
            cursor.execute(sql.encode(), parameters)


class _Pymysql:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.dialect = mysql_or_mariadb(connection)

    @property
    def encoding(self) -> TextEncoding:
        from pymysql import charset  # type: ignore[import-untyped]  # the driver has no types

        # "utf8" means a different character set in older versions of PyMySQL.
        driver: Any = charset
        return encoding_of_charset(driver.charset_by_name(self._connection.character_set_name()).name)

    def in_transaction(self) -> bool:
        in_transaction = 1  # SERVER_STATUS_IN_TRANS of the protocol
        return not self._connection.get_autocommit() or bool(self._connection.server_status & in_transaction)

    def execute(self, sql: str, parameters: Any) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters)


class _Sqlite:
    dialect = SQLITE
    encoding = UTF_8

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        return not commits_each_statement(self._connection)

    def execute(self, sql: str, parameters: Any) -> None:
        self._connection.execute(sql, parameters).close()


_DRIVERS: dict[str, Callable[[Any], SyncConnection]] = {
    "psycopg.Connection": _Psycopg,
    "pymysql.connections.Connection": _Pymysql,
    "sqlite3.Connection": _Sqlite,
}
_ASYNCHRONOUS = (
    "asyncpg.",
    "aiomysql.",
    "asyncmy.",
    "aiosqlite.",
    "psycopg.AsyncConnection",
    "sqlalchemy.ext.asyncio.",
)


def synchronous(connection: object) -> SyncConnection:
    """Wrap a driver's connection. Raises :class:`ConfigurationError` with the fix for any other object."""
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(connection).__mro__]
    for name in names:
        if (driver := _DRIVERS.get(name)) is not None:
            return driver(connection)
    if any(name.startswith(_ASYNCHRONOUS) for name in names):
        raise ConfigurationError(
            f"Producer.record() does not accept {names[0]}, which is asynchronous; use `await outbox.record(...)`, or "
            "outbox.bind(session) for an AsyncSession"
        )
    raise ConfigurationError(
        f"Producer.record() does not accept {names[0]}; pass a connection of psycopg 3, PyMySQL, sqlite3 or "
        "Django, or a Session or Connection of SQLAlchemy over one of these drivers"
    )
