"""Cluster locks on PostgreSQL: session advisory locks, fencing terms, and LISTEN, on one dedicated session.

A lock lasts exactly as long as the session: when the holder's process dies, its server closes the session and the
next try of a standby succeeds. Standbys try; they do not wait inside ``pg_advisory_lock``, which would pin the oldest
snapshot of the whole cluster for as long as it waits. ``idle_session_timeout`` makes the server end a session that
has gone silent, so a frozen holder is replaced as well.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from outboxio.names import LockName
from outboxio.storage.postgres.connection import Dedicated, as_texts
from outboxio.storage.protocols import Acquired

logger = logging.getLogger(__name__)

# One statement takes what is free and raises its terms. Leases are locked in name order, as every writer does. Whether
# the former term was given back is told by the row as it is when it is locked, not by a snapshot from before.
ACQUIRE = """
WITH taken AS MATERIALIZED (
  SELECT w.name FROM unnest($1::text[], $2::text[]::bigint[]) AS w(name, key) WHERE pg_try_advisory_lock(w.key)
)
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
SELECT name, 1, $3, clock_timestamp() AT TIME ZONE 'UTC', 0 FROM taken ORDER BY name
ON CONFLICT (name) DO UPDATE SET term = leases.term + 1, owner = excluded.owner, acquired_date = excluded.acquired_date
RETURNING name, term, released_term
"""

# Without a lease: only to find out whether two shards are one database.
TRY = "SELECT pg_try_advisory_lock($1)"

# Without parameters, so that one message does it all (see Dedicated). Who tries meanwhile waits for the lease row.
GIVE_BACK = "UPDATE eventlog.leases SET released_term = term WHERE name = {} AND owner = {}"
RELEASE = "SELECT pg_advisory_unlock({})"

# The beat also sends this session a wake-up of its own: if it does not come back, LISTEN is dead although the session
# lives.
HEARTBEAT = "SELECT clock_timestamp() AT TIME ZONE 'UTC', pg_notify($1, $2)"
HEARTBEAT_IN_SILENCE = "SELECT clock_timestamp() AT TIME ZONE 'UTC'"


class PostgresClusterLock:
    def __init__(self, session: Dedicated, owner: str, channel: str | None, timeout: float) -> None:
        self._session = session
        self._owner = owner[:255]
        self._channel = channel
        self._timeout = timeout
        self._lost: Callable[[], None] = _nothing
        self._heard: Callable[[str], None] = _ignored
        self._watched: Any = None
        self._probe = f"probe {secrets.token_hex(8)}"
        self._unheard = 0

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, Acquired]:
        by_lease = {name.lease: name for name in names}
        try:
            rows = await self._session.fetch(
                ACQUIRE, list(by_lease), as_texts(n.key for n in by_lease.values()), self._owner, timeout=self._timeout
            )
        except BaseException:
            # Locks may have been taken that nobody knows of; they end with the session.
            self._session.terminate()
            raise
        return {by_lease[row["name"]]: Acquired(row["term"], row["released_term"]) for row in rows}

    async def try_probe(self, name: LockName) -> bool:
        return bool((await self._session.fetch(TRY, name.key, timeout=self._timeout))[0][0])

    async def heartbeat(self) -> datetime:
        try:
            if self._channel is None:
                rows = await self._session.fetch(HEARTBEAT_IN_SILENCE, timeout=self._timeout)
            else:
                await self._doubt_silence()
                rows = await self._session.fetch(HEARTBEAT, self._channel, self._probe, timeout=self._timeout)
        except BaseException:
            self._session.terminate()
            raise
        moment: datetime = rows[0][0]
        return moment

    async def release(self, names: Sequence[LockName]) -> None:
        if names and self._session.is_open:
            try:
                leases = sorted(name.lease for name in names)
                given_back = [GIVE_BACK.format(_literal(lease), _literal(self._owner)) for lease in leases]
                released = [RELEASE.format(name.key) for name in names]
                await self._session.execute("; ".join((*given_back, *released)), timeout=self._timeout)
            except BaseException:
                self._session.terminate()  # they end with the session
                raise

    async def listen(self, heard: Callable[[str], None]) -> None:
        async def start(connection: Any) -> None:
            if connection is not self._watched:
                self._heard = heard
                if self._channel is not None:
                    await connection.add_listener(self._channel, self._on_notification)
                connection.add_termination_listener(self._ended)
                self._watched, self._unheard = connection, 0

        try:
            async with asyncio.timeout(self._timeout):
                await self._session.use(start)
        except BaseException:
            self._session.terminate()
            raise

    def when_lost(self, callback: Callable[[], None]) -> None:
        self._lost = callback

    async def close(self) -> None:
        self._lost = _nothing
        watched, self._watched = self._watched, None
        try:
            if watched is not None and self._session.is_open:
                watched.remove_termination_listener(self._ended)
                async with asyncio.timeout(self._timeout):
                    if self._channel is not None:
                        await watched.remove_listener(self._channel, self._on_notification)
                    await watched.reset()  # every lock that is left
        except BaseException:
            self._session.terminate()
            raise
        finally:
            await self._session.close()

    def _on_notification(self, connection: Any, pid: int, channel: str, payload: Any) -> None:
        if payload == self._probe:
            self._unheard = 0
        elif not str(payload).startswith("probe "):
            self._heard(str(payload))

    async def _doubt_silence(self) -> None:
        """Listen anew if the last probe never came back; until one does, polling finds the work."""
        if self._unheard and self._watched is not None:
            if self._unheard == 1:
                logger.warning("wake-ups do not arrive any more; listening anew, polling meanwhile")

            async def listen_anew(connection: Any) -> None:
                await connection.remove_listener(self._channel, self._on_notification)
                await connection.add_listener(self._channel, self._on_notification)

            async with asyncio.timeout(self._timeout):
                await self._session.use(listen_anew)
            for missed in ("events", "notifications"):  # nobody knows what went unheard
                self._heard(missed)
        self._unheard += 1

    def _ended(self, connection: Any) -> None:
        self._watched = None
        self._lost()


def _literal(text: str) -> str:
    """Quoted in the way that means the same whatever the session thinks of backslashes."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _nothing() -> None:
    return None


def _ignored(payload: str) -> None:
    return None
