"""Django: ``django.db.connection`` and ``connections[alias]``, inside ``transaction.atomic()``."""

from __future__ import annotations

from typing import Any

from outboxio.storage.mysql.values import encoding_of_charset
from outboxio.storage.synchronous import (
    POSTGRES,
    SyncConnection,
    SyncDialect,
    encoding_of_postgres,
    mysql_or_mariadb,
    synchronous,
)
from outboxio.support.text import TextEncoding


class _DjangoConnection:
    """A Django connection to a server. Django's cursors hide the driver, such as mysqlclient."""

    def __init__(self, connection: Any, dialect: SyncDialect) -> None:
        self.dialect = dialect
        self._connection = connection

    @property
    def encoding(self) -> TextEncoding:
        driver = self._connection.connection
        if self.dialect is POSTGRES:
            return encoding_of_postgres(driver)
        return encoding_of_charset(driver.character_set_name())

    def in_transaction(self) -> bool:
        return bool(self._connection.in_atomic_block or not self._connection.get_autocommit())

    def execute(self, sql: str, parameters: Any) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, parameters)


def is_of_django(given: object) -> bool:
    """True for a Django connection. Django need not be installed."""
    return hasattr(given, "in_atomic_block") and hasattr(given, "ensure_connection")


def connection_of(given: Any) -> SyncConnection:
    """Return the Django connection, or the ``sqlite3`` connection inside it."""
    given.ensure_connection()
    if given.vendor == "postgresql":
        return _DjangoConnection(given, POSTGRES)
    if given.vendor == "mysql":
        return _DjangoConnection(given, mysql_or_mariadb(given.connection))
    return synchronous(given.connection)
