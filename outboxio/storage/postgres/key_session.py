"""Keyed locks of the application on PostgreSQL: session advisory locks on sessions of their own (decision 56).

Statements are prepared when the session is opened, for the reason in ``LoopConnection``: a process that freezes between
the preparation and the statement would keep its locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
from msgspec import Struct

from outboxio.model.lock_name import LockName
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.connection import LoopConnection

TRY = "SELECT pg_try_advisory_lock($1)"

# The server serves waiting sessions in the order of arrival. A waiting statement keeps the oldest snapshot of the
# server, so the caller waits in pieces. lock_timeout holds for this statement alone.
WAIT = "SELECT set_config('lock_timeout', $2, TRUE), pg_advisory_lock($1)"
RELEASE = "SELECT pg_advisory_unlock($1)"
PROVE = "SELECT 1"
RAISE_TERM = """
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
VALUES ($1, 1, $2, clock_timestamp() AT TIME ZONE 'UTC', 0)
ON CONFLICT (name) DO UPDATE SET term = leases.term + 1, owner = excluded.owner, acquired_date = excluded.acquired_date
RETURNING term
"""


class _Prepared(Struct):
    connection: Any
    try_: Any
    wait: Any
    release: Any
    raise_term: Any


class PostgresKeySession:
    def __init__(self, session: LoopConnection, owner: str, timeout: float) -> None:
        """``timeout``: the seconds for the answer to a statement that does not wait."""
        self._session = session
        self._owner = owner[:255]
        self._timeout = timeout
        self._prepared: _Prepared | None = None

    @property
    def is_open(self) -> bool:
        return self._prepared is not None and self._session.current is self._prepared.connection

    async def open(self) -> None:
        async with asyncio.timeout(self._timeout):
            await self._session.use(self._prepare)

    async def _prepare(self, connection: Any) -> None:
        if self._prepared is None or self._prepared.connection is not connection:
            ready = [await connection.prepare(sql) for sql in (TRY, WAIT, RELEASE)]
            try:
                ready.append(await connection.prepare(RAISE_TERM))
            except Exception as error:
                if not errors.lacks_schema(error):
                    raise
                ready.append(None)  # locks work before the tables are made; terms do not
            self._prepared = _Prepared(connection, *ready)

    async def take(self, name: LockName, wait: float) -> bool:
        if wait <= 0:
            return bool(await self._run(lambda ready: ready.try_.fetchval(name.key, timeout=self._timeout)))
        lock_timeout = str(max(1, round(wait * 1000)))
        try:
            # The server's lock_timeout ends the wait. The driver's timeout is for a server that does not answer.
            await self._session.use_if_open(
                lambda _: self._ready.wait.fetch(name.key, lock_timeout, timeout=wait + self._timeout)
            )
        except asyncpg.LockNotAvailableError:
            return False
        return True

    async def release(self, name: LockName) -> None:
        await self._run(lambda ready: ready.release.fetchval(name.key, timeout=self._timeout))

    async def raise_term(self, name: LockName) -> int:
        if self._ready.raise_term is None:
            return int(await self._run(lambda r: r.connection.fetchval(RAISE_TERM, name.lease, self._owner)))
        term = self._ready.raise_term.fetchval
        return int(await self._run(lambda _: term(name.lease, self._owner, timeout=self._timeout)))

    async def prove(self) -> None:
        await self._run(lambda ready: ready.connection.execute(PROVE, timeout=self._timeout))

    def drop(self) -> None:
        self._session.terminate()

    async def abandon(self) -> None:
        """Close the session as usual: the driver has asked the server to cancel the wait."""
        await self._session.close()

    async def close(self) -> None:
        await self._session.close()

    @property
    def _ready(self) -> _Prepared:
        if self._prepared is None:
            raise ConnectionResetError("the lock session is not open")
        return self._prepared

    async def _run(self, statement: Callable[[_Prepared], Any]) -> Any:
        ready = self._ready

        async def run_there(connection: Any) -> Any:
            if connection is not ready.connection:
                raise ConnectionResetError("the lock session has ended")
            return await statement(ready)

        with self._session.dropped_on_failure():
            return await self._session.use_if_open(run_there)


class PostgresKeySessions:
    waits = True

    def __init__(self, make: Callable[[], PostgresKeySession], room: int | None) -> None:
        """``room``: the connections of a given pool, which serves the lock sessions too; ``None`` without a limit."""
        self.make = make
        self._room = room

    def most(self, wanted: int) -> int:
        return wanted if self._room is None else max(1, min(wanted, self._room // 4))
