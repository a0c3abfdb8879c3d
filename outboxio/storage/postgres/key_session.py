"""Keyed locks of the application on PostgreSQL: session advisory locks (decision 56).

A session never waits inside ``pg_advisory_lock``, because a waiting statement keeps the oldest snapshot of the whole
database server. Processes try again and again. A process that found the lock taken holds a second lock meanwhile, the
**gate** of the key: only the process at the gate tries for the key, so a busy process cannot take the key again and
again past the processes that wait.

Statements are prepared before the session holds a lock, for the reason in ``LoopConnection``. Statements of a session
that waits have no parameters, and answer with the number of rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from outboxio.model.lock_name import LockName
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.connection import LoopConnection, row_count
from outboxio.storage.protocols import LONGEST_SILENCE
from outboxio.support.aio import TimeLimit

# 2: the session holds the key; 1: the session holds the gate; 0: neither.
TRY = """
SELECT CASE WHEN pg_try_advisory_lock($2) THEN
  CASE WHEN pg_try_advisory_lock($1) THEN 1 + pg_advisory_unlock($2)::int ELSE 1 END ELSE 0 END
"""
UNLOCK = "SELECT pg_advisory_unlock($1)"
TRY_AT_GATE = "SELECT WHERE CASE WHEN pg_try_advisory_lock({key}) THEN pg_advisory_unlock({gate}) ELSE FALSE END"
LEAVE_GATE = "SELECT pg_advisory_unlock({gate})"
PROVE = "SELECT 1"

RAISE_TERM = """
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
VALUES ($1, 1, $2, clock_timestamp() AT TIME ZONE 'UTC', 0)
ON CONFLICT (name) DO UPDATE SET term = leases.term + 1, owner = excluded.owner, acquired_date = excluded.acquired_date
RETURNING term
"""


class PostgresKeySession:
    waits = False

    def __init__(self, session: LoopConnection, owner: str, heartbeat: float) -> None:
        self.longest_silence = LONGEST_SILENCE * heartbeat
        session.set("idle_session_timeout", str(round(1000 * self.longest_silence)))
        self._session = session
        self._owner = owner[:255]
        self._timeout = max(heartbeat, 1.0)
        self._limit = TimeLimit(self._timeout)
        self._connection: Any = None
        self._try: Any = None
        self._unlock: Any = None
        self._raise_term: Any = None
        self._held: set[LockName] = set()
        self._at_gate: set[LockName] = set()

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._session.current is self._connection

    async def open(self) -> None:
        with self._session.dropped_on_failure():
            async with asyncio.timeout(self._timeout):
                await self._session.use(self._prepare)

    async def _prepare(self, connection: Any) -> None:
        self._try, self._unlock = await connection.prepare(TRY), await connection.prepare(UNLOCK)
        try:
            self._raise_term = await connection.prepare(RAISE_TERM)
        except Exception as error:
            if not errors.lacks_schema(error):  # locks work before the tables are made, terms do not
                raise
        self._connection = connection

    async def take(self, name: LockName, seconds: int) -> bool:
        key, gate = _key_and_gate(name)
        if name in self._at_gate:
            taken = 1 + row_count(await self._execute(TRY_AT_GATE.format(key=key, gate=gate)))
        else:
            taken = await self._in_time(lambda _: self._try.fetchval(key, gate))
        if taken == 2:
            self._at_gate.discard(name)
            self._held.add(name)
        elif taken == 1:
            self._at_gate.add(name)
        return bool(taken == 2)

    async def leave(self, name: LockName) -> None:
        if name in self._held:
            key, _ = _key_and_gate(name)
            await self._in_time(lambda _: self._unlock.fetchval(key))
            self._held.discard(name)
        elif name in self._at_gate:
            await self._execute(LEAVE_GATE.format(gate=_key_and_gate(name)[1]))
            self._at_gate.discard(name)

    async def raise_term(self, lease: str) -> int:
        async def fetch(connection: Any) -> Any:
            raising = self._raise_term or await connection.prepare(RAISE_TERM)
            return await raising.fetchval(lease, self._owner, timeout=self._timeout)

        return int(await self._use(fetch))

    async def prove(self) -> None:
        await self._execute(PROVE)

    def drop(self) -> None:
        self._session.terminate()

    async def close(self) -> None:
        async def reset(connection: Any) -> None:
            await connection.reset()  # the locks that are left

        await self._session.close_after(reset, within=self._timeout)

    async def _execute(self, sql: str) -> str:
        return str(await self._use(lambda connection: connection.execute(sql, timeout=self._timeout)))

    async def _in_time(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """:meth:`_use` with one timer for many statements. A statement without an answer in time ends the session."""
        self._limit.begin(work, self._is_late)
        try:
            return await self._use(work)
        finally:
            self._limit.end(work)

    def _is_late(self, work: object) -> None:
        self.drop()

    async def _use(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a statement on the session that was opened: a new session would hold no lock."""
        if self._connection is None:
            raise ConnectionResetError("the lock session has ended")
        try:
            return await self._session.use_if_open(work, only=self._connection)
        except BaseException:
            self.drop()
            raise


@lru_cache(1024)
def _key_and_gate(name: LockName) -> tuple[int, int]:
    return name.key, LockName(name.namespace, "gate", name.handler_name).key
