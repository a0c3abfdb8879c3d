"""One SQLite database: a file, or the memory of this process."""

from __future__ import annotations

import os
import sqlite3
from typing import Any

from outboxio.errors import ConfigurationError
from outboxio.storage.sqlite import errors
from outboxio.storage.sqlite.connection import Connections
from outboxio.storage.sqlite.events import SqliteEvents
from outboxio.storage.sqlite.lines import SqliteLines
from outboxio.storage.sqlite.lock import FileLocks, MemoryLocks, SqliteClusterLock
from outboxio.storage.sqlite.notifications import SqliteNotifications
from outboxio.storage.sqlite.retention import SqliteRetention
from outboxio.storage.sqlite.schema import SqliteSchema
from outboxio.storage.sqlite.session import CallersSession, CheckedOutSession, is_connection
from outboxio.storage.sqlite.starts import SqliteStarts
from outboxio.storage.sqlite.subscriptions import SqliteSubscriptions

OLDEST = (3, 35, 0)


class SqliteDatabase:
    dialect = "sqlite"
    stores_nul = True
    wakes_across_processes = False

    def __init__(self, name: str, path: str | None) -> None:
        if sqlite3.sqlite_version_info < OLDEST:
            raise ConfigurationError(
                f"this Python has SQLite {sqlite3.sqlite_version}; outboxio needs {'.'.join(map(str, OLDEST))} or later"
            )
        self.name = name
        # The directory that we are in now is meant, not the one that we are in when the database is opened.
        path = None if path is None else os.path.abspath(path)
        self._connections = Connections(name, path)
        self._locks = MemoryLocks() if path is None else FileLocks(path)
        self.events = SqliteEvents(self._connections)
        self.notifications = SqliteNotifications(self._connections, name)
        self.lines = SqliteLines(self._connections)
        self.starts = SqliteStarts(self._connections)
        self.retention = SqliteRetention(self._connections)
        self.subscriptions = SqliteSubscriptions(self._connections)
        self.schema = SqliteSchema(self._connections, name, path)

    def session(self) -> CheckedOutSession:
        return CheckedOutSession(self._connections)

    def wrap(self, connection: Any) -> CallersSession | None:
        return CallersSession(connection) if is_connection(connection) else None

    def cluster_lock(self, owner: str, channel: str | None, heartbeat: float) -> SqliteClusterLock:
        return SqliteClusterLock(self._connections, self._locks, self.name, owner)

    async def notify(self, channel: str, payload: str) -> None:
        """SQLite cannot wake other processes: they poll."""

    async def refuse_shared_sessions(self) -> None:
        """There are no sessions that a proxy could share."""

    def require_room(self, loops: int) -> None:
        """There is no pool that could be too small."""

    @property
    def handler_transactions(self) -> int:
        return 1  # there is one writer at a time

    async def release_loops(self) -> None:
        await self._connections.close_readers()

    async def close(self) -> None:
        await self._connections.close()

    is_transient = staticmethod(errors.is_transient)
    refuses_value = staticmethod(errors.refuses_value)
    is_unreachable = staticmethod(errors.is_unreachable)
    lacks_schema = staticmethod(errors.lacks_schema)
