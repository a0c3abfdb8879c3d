"""Django: ``django.db.connection`` and ``connections[alias]``, inside ``transaction.atomic()``."""

from __future__ import annotations

from typing import Any

from outboxio.storage.synchronous import MYSQL, POSTGRES, SyncConnection, SyncDialect, synchronous

_DIALECTS = {"postgresql": POSTGRES, "mysql": MYSQL}


class _DjangoConnection:
    """A connection of Django to a server. The cursors of Django hide the driver, such as mysqlclient."""

    def __init__(self, connection: Any, dialect: SyncDialect) -> None:
        self.dialect = dialect
        self._connection = connection

    def in_transaction(self) -> bool:
        return bool(self._connection.in_atomic_block or not self._connection.get_autocommit())

    def execute(self, sql: str, parameters: Any) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters)


def is_of_django(given: object) -> bool:
    """True for a connection of Django, which need not be installed."""
    return hasattr(given, "in_atomic_block") and hasattr(given, "ensure_connection")


def connection_of(given: Any) -> SyncConnection:
    """The connection of Django, or the connection of ``sqlite3`` inside."""
    if (dialect := _DIALECTS.get(given.vendor)) is not None:
        return _DjangoConnection(given, dialect)
    given.ensure_connection()
    return synchronous(given.connection)
