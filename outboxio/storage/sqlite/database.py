"""A SQLite database: a file, or the memory of this process."""

from __future__ import annotations

import os
import sqlite3
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any

from outboxio.errors import ConfigurationError, WrongDatabase
from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.connections.driver import DEFAULT_LIMITS, Limits
from outboxio.storage.engines.user_engine import UserEngine
from outboxio.storage.sqlite import errors
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.events import SqliteEvents
from outboxio.storage.sqlite.lock import FileLocks, MemoryLocks, SqliteClusterLock, SqliteKeySession
from outboxio.storage.sqlite.notifications import SqliteNotifications
from outboxio.storage.sqlite.ordering import SqliteOrdering
from outboxio.storage.sqlite.port import SqlitePort
from outboxio.storage.sqlite.schema import SqliteSchema
from outboxio.storage.sqlite.session import (
    CallerSession,
    CheckedOutSession,
    ReadingSession,
    SqliteSession,
    files_of,
    is_connection,
)
from outboxio.storage.tables import Tables
from outboxio.storage.tables.scans import Bounds
from outboxio.support import machine
from outboxio.support.clock import utc_now
from outboxio.support.text import UTF_8

OLDEST = (3, 35, 0)


class SqliteDatabase(Tables):
    dialect = "sqlite"
    stores_nul = True
    check_numbers = None
    encoding = UTF_8
    sends_text = False
    wakes_across_processes = False

    def __init__(
        self,
        name: str,
        path: str | None,
        engine: UserEngine | None = None,
        *,
        guard: EventLoopGuard | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if sqlite3.sqlite_version_info < OLDEST:
            raise ConfigurationError(
                f"this Python has SQLite {sqlite3.sqlite_version}; outboxio needs {'.'.join(map(str, OLDEST))} or later"
            )
        self.name = name
        self._path: str | None
        self._engine = engine
        if engine is not None:
            from outboxio.storage.sqlite.engine_session import roll_back_first

            engine.before_invalidation(roll_back_first)
        # A relative path refers to the current directory, not to the one at the time when the database is opened.
        path = self._path = None if path is None else os.path.abspath(path)
        self._in_memory = path is None
        guard = guard or EventLoopGuard.of_shard(name)
        self._connections = Connections(name, path, guard, limits.pool_timeout)
        self._locks = MemoryLocks() if path is None else (machine.file_locks or FileLocks)(path)
        guard.when_taken_over(self._locks.reset)
        self.events = SqliteEvents(self._connections)
        self.notifications = SqliteNotifications(self._connections)
        self.ordering = SqliteOrdering(self._connections)
        admin, loops = SqlitePort(self._connections), SqlitePort(self._connections, is_of_loops=True)
        # A single process at a time writes to a SQLite file, so each handler has a single partition.
        bounds = Bounds(rows=5000, errors=2500)
        Tables.__init__(self, name, bounds, admin, loops, loops, loops, partitions=False)
        self.schema = SqliteSchema(self._connections, name, path)

    def session(self) -> AbstractAsyncContextManager[SqliteSession]:
        if self._engine is not None:
            from outboxio.storage.sqlite import engine_session

            return engine_session.CheckedOutSession(self._engine, self._connections)
        return CheckedOutSession(self._connections)

    def reading(self) -> AbstractAsyncContextManager[SqliteSession]:
        """Return a reading session: on a separate connection, or on the writer for a database in memory."""
        return CheckedOutSession(self._connections) if self._in_memory else ReadingSession(self._connections)

    def wrap(self, connection: Any) -> CallerSession | None:
        return CallerSession(connection) if is_connection(connection) else None

    async def require_same_database(self, connection: Any) -> None:
        """Accept the file even if it is only attached: SQLite searches all attached files for a table."""
        files = await files_of(connection)
        if not any(self._is_own(file) for file in files):
            own = "a database in memory" if self._path is None else f"the file {self._path!r}"
            raise WrongDatabase(self.name, f"the file {files[0]!r}" if files[0] else "a database in memory", own)

    def _is_own(self, file: str) -> bool:
        """True if ``file`` is the file of this database. Databases in memory cannot be distinguished."""
        if self._path is None or not file:
            return self._path is None and not file
        try:
            return os.path.samefile(file, self._path)
        except OSError:
            return os.path.abspath(file) == self._path  # a file was removed, or its directory is not readable

    def cluster_lock(
        self, owner: str, channel: str | None, heartbeat: float, longest_block: float = 0.0
    ) -> SqliteClusterLock:
        """Return a file lock, which the operating system keeps while the process lives, even with a blocked loop."""
        return SqliteClusterLock(self._connections, self._locks, self.name, owner)

    def key_session(self, owner: str, heartbeat: float) -> SqliteKeySession:
        return SqliteKeySession(self._connections, self._locks, self.name, owner)

    def max_key_sessions(self, configured: int) -> int:
        return configured

    async def notify(self, channel: str, payload: str) -> None:
        """Do nothing: SQLite cannot wake processes, so they poll."""

    async def now(self) -> datetime:
        return utc_now()  # all processes that can open the file have the same clock

    async def lock_capacity(self) -> int | None:
        return None

    async def refuse_shared_sessions(self) -> None:
        """Do nothing: SQLite has no sessions that a proxy could share."""

    async def check_connections(self) -> None:
        """Do nothing: no connection setting changes the values of SQLite."""

    def require_capacity(self, loops: int) -> None:
        """Do nothing: SQLite has no pool that could be too small."""

    @property
    def has_one_writer(self) -> bool:
        return True

    @property
    def pool_size(self) -> int:
        return 0

    @property
    def connections_in_use(self) -> int:
        return self._connections.in_use if self._engine is None else self._engine.in_use

    @property
    def handler_transactions(self) -> int:
        return 1  # SQLite has a single writer

    async def release_loops(self) -> None:
        await self._connections.close_readers()

    async def close(self) -> None:
        await self._connections.close()

    is_transient = staticmethod(errors.is_transient)
    refuses_value = staticmethod(errors.refuses_value)
    is_unreachable = staticmethod(errors.is_unreachable)
    lacks_schema = staticmethod(errors.lacks_schema)
    lacks_rights = staticmethod(errors.lacks_rights)
