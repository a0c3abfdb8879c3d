"""Keyed locks of the application on SQLite: lock files beside the database, or names in memory (decision 56)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from outboxio.errors import DatabaseUnavailable
from outboxio.model.lock_name import LockName
from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.lock import RAISE_TERMS, FileLock, Held, Locks
from outboxio.storage.sqlite.values import as_json, as_text
from outboxio.support.clock import utc_now

TERM = "SELECT term FROM eventlog_leases WHERE name = :name"


class SqliteKeySession:
    """The lock files that this process holds. A file lasts as long as the lock, for keys are without number."""

    is_open = True

    def __init__(self, connections: Connections, locks: Locks, shard: str, owner: str) -> None:
        self._connections = connections
        self._locks = locks
        self._shard = shard
        self._owner = owner[:255]
        self._held: dict[LockName, Held] = {}

    async def open(self) -> None:
        self._connections.guard.enter()

    async def take(self, name: LockName, wait: float) -> bool:
        self._connections.guard.enter()
        try:
            lock = self._locks.take(name)
        except OSError as error:
            raise DatabaseUnavailable(self._shard, str(error.filename), f"cannot lock: {error.strerror}") from error
        if lock is not None:
            self._held[name] = lock
        return lock is not None

    async def release(self, name: LockName) -> None:
        if (lock := self._held.pop(name, None)) is not None:
            _end(lock)

    async def raise_term(self, name: LockName) -> int:
        await self.prove()
        row = {"names": as_json([name.lease]), "name": name.lease, "owner": self._owner, "now": as_text(utc_now())}

        def raise_and_read(connection: sqlite3.Connection) -> int:
            connection.execute(RAISE_TERMS, row)
            return int(fetch_value(connection, TERM, row))

        return await self._connections.transact(raise_and_read)

    async def prove(self) -> None:
        if not all(lock.is_ours for lock in self._held.values()):
            self.drop()
            raise DatabaseUnavailable(self._shard, "its lock files", "the files were removed or replaced")

    def drop(self) -> None:
        held, self._held = self._held, {}
        for lock in held.values():
            lock.release()

    async def abandon(self) -> None:
        """Do nothing: no call waits."""

    async def close(self) -> None:
        held, self._held = self._held, {}
        for lock in held.values():
            _end(lock)


class SqliteKeySessions:
    waits = False

    def __init__(self, make: Callable[[], SqliteKeySession]) -> None:
        self.make = make

    def most(self, wanted: int) -> int:
        return 1  # a file has no session


def _end(lock: Held) -> None:
    """Release a lock, and remove the file. A process that opened the file before finds that the path leads elsewhere."""
    if isinstance(lock, FileLock):
        lock.remove()
    lock.release()
