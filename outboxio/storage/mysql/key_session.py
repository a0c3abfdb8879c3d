"""Keyed locks of the application on MySQL and MariaDB: ``GET_LOCK``, which waits on the server (decision 56)."""

from __future__ import annotations

import asyncio
from typing import Any

from outboxio.model.lock_name import LockName
from outboxio.storage.mysql.connection import Arguments, LoopConnection, execute, fetch
from outboxio.storage.mysql.flavour import Server, Statement, for_flavours
from outboxio.storage.mysql.lock import RAISE_TERMS, RELEASE_ALL, TERMS, longest_silence
from outboxio.storage.mysql.values import as_json

TAKE = for_flavours("SELECT GET_LOCK(%(name)s, %(seconds)s)")
RELEASE = for_flavours("DO RELEASE_LOCK(%(name)s)")
PROVE = for_flavours("SELECT 1")


class MysqlKeySession:
    waits = True

    def __init__(self, session: LoopConnection, server: Server, owner: str, heartbeat: float) -> None:
        self.longest_silence = longest_silence(heartbeat)
        session.set("wait_timeout", self.longest_silence)
        session.set("net_write_timeout", self.longest_silence)
        self._session = session
        self._server = server
        self._owner = owner[:255]
        self._timeout = max(heartbeat, 1.0)
        self._connection: Any = None
        self._held: set[LockName] = set()

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._session.current is self._connection

    async def open(self) -> None:
        async def remember(connection: Any) -> None:
            self._connection = connection

        with self._session.dropped_on_failure():
            async with asyncio.timeout(self._timeout):
                await self._session.use(remember)

    async def take(self, name: LockName, seconds: int) -> bool:
        rows = await self._fetch(TAKE, {"name": name.text, "seconds": seconds}, seconds + self._timeout)
        if rows[0][0] is None:
            self.drop()
            raise ConnectionResetError("GET_LOCK was ended by the server")
        if is_taken := bool(rows[0][0]):
            self._held.add(name)
        return is_taken

    async def leave(self, name: LockName) -> None:
        if name in self._held:
            await self._fetch(RELEASE, {"name": name.text})
            self._held.discard(name)

    async def raise_term(self, lease: str) -> int:
        # Between the statements the holder of a different key may raise the term again: the term still grows.
        leases = {"leases": as_json([lease]), "owner": self._owner}
        await self._fetch(RAISE_TERMS, leases)
        return int((await self._fetch(TERMS, leases))[0][1])

    async def prove(self) -> None:
        await self._fetch(PROVE)

    def drop(self) -> None:
        self._session.terminate()

    async def close(self) -> None:
        await self._session.close_after(lambda connection: execute(connection, RELEASE_ALL), within=self._timeout)

    async def _fetch(
        self, statement: Statement, args: Arguments = None, timeout: float | None = None
    ) -> list[tuple[Any, ...]]:
        """Run a statement on the session that was opened: a new session would hold no lock."""
        if not self.is_open:
            raise ConnectionResetError("the lock session has ended")
        sql = self._server.spell(statement)
        with self._session.dropped_on_failure():
            rows: list[tuple[Any, ...]] = await self._session.use_if_open(
                lambda connection: fetch(connection, sql, args, timeout or self._timeout)
            )
            return rows
