"""Cluster locks on MySQL and MariaDB: ``GET_LOCK`` and fencing terms, on a dedicated session (decision 4).

A lock lasts exactly as long as its session. When the holder's process dies, the server closes the session, and the next
attempt of a standby succeeds. Standbys poll instead of waiting in ``GET_LOCK``, which would take a connection for each
name; MySQL also rounds such waits up to whole seconds, and MariaDB 10.11 cannot wait without a timeout.
``wait_timeout`` makes the server close an idle session, so that a standby also replaces a frozen holder.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from outboxio.model.lock_name import LockName
from outboxio.storage.connections.driver import Proof, make_proof
from outboxio.storage.mysql.connection import Arguments, LoopConnection, execute, fetch
from outboxio.storage.mysql.driver import is_closed
from outboxio.storage.mysql.flavour import Server, Statement, for_flavours
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import LONGEST_SILENCE, LockGrant

# Lock names are global to the server, like the database eventlog.
TRY = for_flavours("""
SELECT w.name FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name VARCHAR(64) PATH '$')) w WHERE GET_LOCK(w.name, 0) = 1
""")
RELEASE = for_flavours("""
SELECT RELEASE_LOCK(w.name) FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name VARCHAR(64) PATH '$')) w
""")
RECORD_RELEASE = "UPDATE eventlog.leases SET released_term = term WHERE name = %(lease{place})s AND owner = %(owner)s"
RELEASE_ALL = "SELECT RELEASE_ALL_LOCKS()"

# All writers lock leases in the order of the names. Only this session increments the terms, because it holds the locks.
RAISE_TERMS = for_flavours("""
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
SELECT w.name, 1, %(owner)s, UTC_TIMESTAMP(6), 0 FROM JSON_TABLE(%(leases)s, '$[*]' COLUMNS (name {text} PATH '$')) w
ON DUPLICATE KEY UPDATE term = eventlog.leases.term + 1, owner = %(owner)s, acquired_date = UTC_TIMESTAMP(6)
""")
TERMS = for_flavours("""
SELECT l.name, l.term, l.released_term FROM JSON_TABLE(%(leases)s, '$[*]' COLUMNS (name {text} PATH '$')) w
STRAIGHT_JOIN eventlog.leases l ON l.name = w.name
""")

HEARTBEAT = for_flavours("SELECT UTC_TIMESTAMP(6)")

CHECK_DELAY = 0.2  # seconds between checks whether the server has closed the connection, without a round trip


class MysqlClusterLock:
    proof = None

    def __init__(self, session: LoopConnection, server: Server, owner: str, heartbeat: float) -> None:
        self._session = session
        self._server = server
        self._watched: Any = None
        self._owner = owner[:255]
        self._timeout = max(heartbeat, 1.0)
        session.set("wait_timeout", longest_silence(heartbeat))
        session.set("net_write_timeout", longest_silence(heartbeat))
        self._lost: Callable[[], None] = _nothing
        self._check_timer: asyncio.TimerHandle | None = None

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        by_text = {name.text: name for name in names}
        rows = await self._run(TRY, {"names": as_json(by_text)})
        taken = {by_text[row[0]].lease: by_text[row[0]] for row in rows}
        if not taken:
            return {}
        leases = {"leases": as_json(sorted(taken)), "owner": self._owner}
        await self._run(RAISE_TERMS, leases)
        return {taken[name]: LockGrant(*terms) for name, *terms in await self._run(TERMS, leases)}

    async def try_probe(self, name: LockName) -> bool:
        return bool(await self._session.fetch(TRY, {"names": as_json([name.text])}, self._timeout))

    async def heartbeat(self) -> Proof:
        return await make_proof(self._read_time())

    async def release(self, names: Sequence[LockName]) -> None:
        if names and self._holds_session:
            leases = sorted(name.lease for name in names)
            args = {"owner": self._owner, **{f"lease{number}": lease for number, lease in enumerate(leases)}}
            await self._run(_release(len(leases)), {**args, "names": as_json(name.text for name in names)})

    async def listen(self, on_wake: Callable[[str], None]) -> None:
        """Open the session, and watch it. MySQL cannot wake processes, so they poll."""
        with self._session.dropped_on_failure():
            async with asyncio.timeout(self._timeout):
                await self._session.use(self._watch)

    def when_lost(self, callback: Callable[[], None]) -> None:
        self._lost = callback

    async def close(self) -> None:
        self._lost = _nothing
        self._stop_checking()
        watched, self._watched = self._watched, None
        if watched is None:
            await self._session.close()
        else:
            await self._session.close_after(lambda connection: execute(connection, RELEASE_ALL), within=self._timeout)

    @property
    def _holds_session(self) -> bool:
        """True if the session that took the locks is still open."""
        return self._watched is not None and not is_closed(self._watched)

    async def _read_time(self) -> datetime:
        now: datetime = (await self._run(HEARTBEAT))[0][0]
        return now

    async def _run(self, statement: Statement, args: Arguments = None) -> list[tuple[Any, ...]]:
        """Run a statement on the session that holds the locks. A result of a new session would prove nothing."""

        async def run_there(connection: Any) -> list[tuple[Any, ...]]:
            if connection is not self._watched:
                raise ConnectionResetError("the session that holds the cluster locks has ended")
            return await fetch(connection, self._server.sql_for(statement), args, self._timeout)

        # On failure, the server may hold locks that this process has not recorded; they end with the session.
        with self._session.dropped_on_failure():
            rows: list[tuple[Any, ...]] = await self._session.use_if_open(run_there)
            return rows

    async def _watch(self, connection: Any) -> None:
        if connection is self._watched:
            return
        is_replaced, self._watched = self._watched is not None, connection
        if is_replaced:
            self._lost()
        if self._check_timer is None:
            self._check_timer = asyncio.get_running_loop().call_later(CHECK_DELAY, self._check_session)

    def _check_session(self) -> None:
        """Check whether the server has closed the connection, which the driver does not report."""
        if self._holds_session:
            self._check_timer = asyncio.get_running_loop().call_later(CHECK_DELAY, self._check_session)
        else:
            self._check_timer, self._watched = None, None
            self._lost()

    def _stop_checking(self) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None


def longest_silence(heartbeat: float) -> int:
    """Whole seconds after which the server closes an idle session: at least as long as a lock is trusted."""
    return max(1, math.ceil(heartbeat * LONGEST_SILENCE))


def _release(leases: int) -> Statement:
    """Return a single message: a statement for each lease, in the order of the names, and the release of the locks."""
    recording = [RECORD_RELEASE.format(place=number) for number in range(leases)]
    return {flavour: "; ".join((*recording, release)) for flavour, release in RELEASE.items()}


def _nothing() -> None:
    return None


# --- keyed locks -----------------------------------------------------------------------------------
#
# Your application's keyed locks on MySQL and MariaDB: ``GET_LOCK``, which waits on the server (decision 56).

TAKE = for_flavours("SELECT GET_LOCK(%(name)s, %(seconds)s)")
RELEASE_KEY = for_flavours("DO RELEASE_LOCK(%(name)s)")
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
            raise ConnectionResetError("the server interrupted GET_LOCK")
        if is_taken := bool(rows[0][0]):
            self._held.add(name)
        return is_taken

    async def leave(self, name: LockName) -> None:
        if name in self._held:
            await self._fetch(RELEASE_KEY, {"name": name.text})
            self._held.discard(name)

    async def raise_term(self, lease: str) -> int:
        # Between the statements, the holder of a different key may increment the term again. The term still grows.
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
        """Run a statement on the opened session; a new session would not hold the locks."""
        if not self.is_open:
            raise ConnectionResetError("the lock session has ended")
        sql = self._server.sql_for(statement)
        with self._session.dropped_on_failure():
            rows: list[tuple[Any, ...]] = await self._session.use_if_open(
                lambda connection: fetch(connection, sql, args, timeout or self._timeout)
            )
            return rows
