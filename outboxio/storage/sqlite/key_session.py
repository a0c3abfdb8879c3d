"""Keyed locks of the application on SQLite: lock files beside the database, or names in memory (decision 56)."""

from __future__ import annotations

import sqlite3

from outboxio.errors import DatabaseUnavailable
from outboxio.model.lock_name import LockName
from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.lock import RAISE_TERMS, Held, Locks
from outboxio.storage.sqlite.values import as_json, as_text
from outboxio.support.clock import utc_now

TERM = "SELECT term FROM eventlog_leases WHERE name = :name"


class SqliteKeySession:
    """Lock files that this process holds. A file is removed with its lock, because keys are without number."""

    waits = False
    longest_silence = float("inf")

    def __init__(self, connections: Connections, locks: Locks, shard: str, owner: str) -> None:
        self._connections = connections
        self._locks = locks
        self._shard = shard
        self._owner = owner[:255]
        self._held: dict[LockName, Held] = {}
        self._is_open = False

    @property
    def is_open(self) -> bool:
        return self._is_open and all(lock.is_ours for lock in self._held.values())

    async def open(self) -> None:
        self._connections.guard.enter()
        self._is_open = True

    async def take(self, name: LockName, seconds: int) -> bool:
        self._connections.guard.enter()
        await self.prove()
        try:
            lock = self._locks.take(name)
        except OSError as error:
            self.drop()
            raise DatabaseUnavailable(self._shard, str(error.filename), f"cannot lock: {error.strerror}") from error
        if lock is not None:
            self._held[name] = lock
        return lock is not None

    async def leave(self, name: LockName) -> None:
        await self.prove()
        if (lock := self._held.pop(name, None)) is not None:
            lock.end()

    async def raise_term(self, lease: str) -> int:
        await self.prove()
        row = {"names": as_json([lease]), "name": lease, "owner": self._owner, "now": as_text(utc_now())}

        def raise_and_read(connection: sqlite3.Connection) -> int:
            connection.execute(RAISE_TERMS, row)
            return int(fetch_value(connection, TERM, row))

        return await self._connections.transact(raise_and_read)

    async def prove(self) -> None:
        if not self.is_open:
            self.drop()
            raise DatabaseUnavailable(self._shard, "its lock files", "the files were removed, replaced or closed")

    def drop(self) -> None:
        self._is_open, held = False, self._held
        self._held = {}
        for lock in held.values():
            lock.release()

    async def close(self) -> None:
        self._is_open, held = False, self._held
        self._held = {}
        for lock in held.values():
            lock.end()
