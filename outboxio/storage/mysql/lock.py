"""Cluster locks on MySQL and MariaDB: ``GET_LOCK`` and fencing terms, on one dedicated session.

A lock lasts exactly as long as the session: when the holder's process dies, its server closes the session and the
next try of a standby succeeds. Standbys try; to wait inside ``GET_LOCK`` would take a connection for each name, MySQL
rounds such waits up to whole seconds, and MariaDB 10.11 knows no endless one. ``wait_timeout`` makes the server end a
session that has gone silent, so a frozen holder is replaced as well.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from outboxio.names import LockName
from outboxio.storage.mysql.connection import Arguments, Dedicated, execute, fetch, is_closed
from outboxio.storage.mysql.flavour import Server, Statement, in_both
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import LONGEST_SILENCE, Acquired

# Names of locks are the server's and not a database's, and so is the one eventlog.
TRY = in_both("""
SELECT w.name FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name VARCHAR(64) PATH '$')) w WHERE GET_LOCK(w.name, 0) = 1
""")
RELEASE = in_both("""
SELECT RELEASE_LOCK(w.name) FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name VARCHAR(64) PATH '$')) w
""")
GIVE_BACK = "UPDATE eventlog.leases SET released_term = term WHERE name = %(lease{place})s AND owner = %(owner)s"
RELEASE_ALL = "SELECT RELEASE_ALL_LOCKS()"

# Leases are locked in name order, as every writer does. Nobody else raises them: this session holds their locks.
RAISE_TERMS = in_both("""
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
SELECT w.name, 1, %(owner)s, UTC_TIMESTAMP(6), 0 FROM JSON_TABLE(%(leases)s, '$[*]' COLUMNS (name {text} PATH '$')) w
ON DUPLICATE KEY UPDATE term = eventlog.leases.term + 1, owner = %(owner)s, acquired_date = UTC_TIMESTAMP(6)
""")
TERMS = in_both("""
SELECT l.name, l.term, l.released_term FROM JSON_TABLE(%(leases)s, '$[*]' COLUMNS (name {text} PATH '$')) w
STRAIGHT_JOIN eventlog.leases l ON l.name = w.name
""")

HEARTBEAT = in_both("SELECT UTC_TIMESTAMP(6)")

LOOK_DELAY = 0.2  # seconds between two looks at whether the server has closed the connection; costs no round trip


class MysqlClusterLock:
    def __init__(self, session: Dedicated, server: Server, owner: str, heartbeat: float) -> None:
        self._session = session
        self._server = server
        self._watched: Any = None
        self._owner = owner[:255]
        self._timeout = max(heartbeat, 1.0)
        session.set("wait_timeout", longest_silence(heartbeat))
        session.set("net_write_timeout", longest_silence(heartbeat))
        self._lost: Callable[[], None] = _nothing
        self._look: asyncio.TimerHandle | None = None

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, Acquired]:
        by_text = {name.text: name for name in names}
        rows = await self._run(TRY, {"names": as_json(by_text)})
        taken = {by_text[row[0]].lease: by_text[row[0]] for row in rows}
        if not taken:
            return {}
        leases = {"leases": as_json(sorted(taken)), "owner": self._owner}
        await self._run(RAISE_TERMS, leases)
        return {taken[name]: Acquired(*terms) for name, *terms in await self._run(TERMS, leases)}

    async def try_probe(self, name: LockName) -> bool:
        return bool(await self._session.fetch(TRY, {"names": as_json([name.text])}, self._timeout))

    async def heartbeat(self) -> datetime:
        moment: datetime = (await self._run(HEARTBEAT))[0][0]
        return moment

    async def release(self, names: Sequence[LockName]) -> None:
        if names and self._holds_session:
            leases = sorted(name.lease for name in names)
            given_back = {"owner": self._owner, **{f"lease{place}": lease for place, lease in enumerate(leases)}}
            await self._run(_give_back(len(leases)), {**given_back, "names": as_json(name.text for name in names)})

    async def listen(self, heard: Callable[[str], None]) -> None:
        """Open the session, and watch over it. There are no wake-ups: other processes poll."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._session.use(self._watch)
        except BaseException:
            self._session.terminate()
            raise

    def when_lost(self, callback: Callable[[], None]) -> None:
        self._lost = callback

    async def close(self) -> None:
        self._lost = _nothing
        self._stop_looking()
        try:
            if self._holds_session:
                async with asyncio.timeout(self._timeout):
                    await self._session.use(lambda connection: execute(connection, RELEASE_ALL))
        except BaseException:
            self._session.terminate()
            raise
        finally:
            self._watched = None
            await self._session.close()

    @property
    def _holds_session(self) -> bool:
        """Whether the session that took the locks is still there."""
        return self._watched is not None and not is_closed(self._watched)

    async def _run(self, statement: Statement, args: Arguments = None) -> list[tuple[Any, ...]]:
        """Run a statement on the session that has the locks; on a new one it would prove nothing."""

        async def run_there(connection: Any) -> list[tuple[Any, ...]]:
            if connection is not self._watched:
                raise ConnectionResetError("the session that holds the cluster locks has ended")
            return await fetch(connection, self._server.spell(statement), args, self._timeout)

        try:
            rows: list[tuple[Any, ...]] = await self._session.use(run_there)
            return rows
        except BaseException:
            # Locks may have been taken or kept that nobody knows of; they end with the session.
            self._session.terminate()
            raise

    async def _watch(self, connection: Any) -> None:
        if connection is self._watched:
            return
        is_another, self._watched = self._watched is not None, connection
        if is_another:
            self._lost()
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_DELAY, self._look_at_session)

    def _look_at_session(self) -> None:
        """The driver tells nobody that the server has closed the connection, so it is asked."""
        if self._holds_session:
            self._look = asyncio.get_running_loop().call_later(LOOK_DELAY, self._look_at_session)
        else:
            self._look, self._watched = None, None
            self._lost()

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None


def longest_silence(heartbeat: float) -> int:
    """Seconds after which the server ends a silent session: whole ones, and no fraction less than it is trusted."""
    return max(1, math.ceil(heartbeat * LONGEST_SILENCE))


def _give_back(leases: int) -> Statement:
    """One statement for each lease, in name order, and the locks, all in one message."""
    given_back = [GIVE_BACK.format(place=place) for place in range(leases)]
    return {flavour: "; ".join((*given_back, release)) for flavour, release in RELEASE.items()}


def _nothing() -> None:
    return None
