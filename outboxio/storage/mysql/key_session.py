"""Keyed locks of the application on MySQL and MariaDB: ``GET_LOCK`` on sessions of their own (decision 56)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from outboxio.model.lock_name import LockName
from outboxio.storage.mysql.connection import Arguments, LoopConnection, fetch
from outboxio.storage.mysql.flavour import Server, Statement, for_flavours
from outboxio.storage.mysql.lock import RAISE_TERMS, TERMS, longest_silence
from outboxio.storage.mysql.values import as_json

# MySQL rounds waits to whole seconds, and MariaDB 10.11 has no endless wait: the caller waits in pieces.
TAKE = for_flavours("SELECT GET_LOCK(%(name)s, %(wait)s)")
RELEASE = for_flavours("SELECT RELEASE_LOCK(%(name)s)")
PROVE = for_flavours("SELECT 1")


class MysqlKeySession:
    def __init__(self, session: LoopConnection, server: Server, owner: str, heartbeat: float, timeout: float) -> None:
        """``timeout``: the seconds for the answer to a statement that does not wait."""
        session.set("wait_timeout", longest_silence(heartbeat))
        session.set("net_write_timeout", longest_silence(heartbeat))
        self._session = session
        self._server = server
        self._owner = owner[:255]
        self._timeout = timeout
        self._connection: Any = None

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._session.current is self._connection

    async def open(self) -> None:
        async def remember(connection: Any) -> None:
            self._connection = connection

        async with asyncio.timeout(self._timeout):
            await self._session.use(remember)

    async def take(self, name: LockName, wait: float) -> bool:
        seconds = int(wait)
        if wait > 0 and seconds == 0:
            return False  # the caller tries again
        rows = await self._run(TAKE, {"name": name.text, "wait": seconds}, seconds + self._timeout)
        if rows[0][0] is None:
            self.drop()
            raise ConnectionResetError("GET_LOCK was ended by the server")
        return bool(rows[0][0])

    async def release(self, name: LockName) -> None:
        await self._run(RELEASE, {"name": name.text})

    async def raise_term(self, name: LockName) -> int:
        leases = {"leases": as_json([name.lease]), "owner": self._owner}
        await self._run(RAISE_TERMS, leases)
        return int((await self._run(TERMS, leases))[0][1])

    async def prove(self) -> None:
        await self._run(PROVE)

    def drop(self) -> None:
        self._session.terminate()

    async def abandon(self) -> None:
        """Drop the session: the driver cannot use a connection on which a wait was cancelled."""
        self._session.terminate()
        await self._session.close()

    async def close(self) -> None:
        await self._session.close()

    async def _run(
        self, statement: Statement, args: Arguments = None, timeout: float | None = None
    ) -> list[tuple[Any, ...]]:
        async def run_there(connection: Any) -> list[tuple[Any, ...]]:
            if connection is not self._connection:
                raise ConnectionResetError("the lock session has ended")
            return await fetch(connection, self._server.spell(statement), args, timeout or self._timeout)

        with self._session.dropped_on_failure():
            rows: list[tuple[Any, ...]] = await self._session.use_if_open(run_there)
            return rows


class MysqlKeySessions:
    waits = True

    def __init__(self, make: Callable[[], MysqlKeySession], room: int | None) -> None:
        """``room``: the connections of a given pool, which serves the lock sessions too; ``None`` without a limit."""
        self.make = make
        self._room = room

    def most(self, wanted: int) -> int:
        return wanted if self._room is None else max(1, min(wanted, self._room // 4))
