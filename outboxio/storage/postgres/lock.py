"""Cluster locks on PostgreSQL: session advisory locks, fencing terms and LISTEN on a single session (decision 4).

A lock lasts exactly as long as the session. When the holder's process dies, the server closes the session, and the next
try of a standby succeeds. A standby tries and does not wait inside ``pg_advisory_lock``, because a waiting statement
keeps the oldest snapshot of the whole database server. ``idle_session_timeout`` makes the server end a silent session,
so that a standby also replaces a frozen holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from outboxio.model.lock_name import LockName
from outboxio.storage.connections.driver import Proof, measured
from outboxio.storage.postgres.connection import LoopConnection, quoted
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.protocols import LockGrant
from outboxio.support import machine
from outboxio.support.log import log_of

logger = log_of(__name__)

# The statement takes the free locks and raises their terms. All writers lock leases in the order of the names.
# released_term is read from the locked row, not from a snapshot of before the lock.
ACQUIRE = """
WITH taken AS MATERIALIZED (
  SELECT w.name FROM unnest($1::text[], $2::text[]::bigint[]) AS w(name, key) WHERE pg_try_advisory_lock(w.key)
)
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
SELECT name, 1, $3, clock_timestamp() AT TIME ZONE 'UTC', 0 FROM taken ORDER BY name
ON CONFLICT (name) DO UPDATE SET term = leases.term + 1, owner = excluded.owner, acquired_date = excluded.acquired_date
RETURNING name, term, released_term
"""

# Without a lease: only shows if two shards share a database.
TRY = "SELECT pg_try_advisory_lock($1)"

# Without parameters, so that the statements are a single message (see LoopConnection). The ACQUIRE of a standby waits
# for the lease row in the meantime.
GIVE_BACK = "UPDATE eventlog.leases SET released_term = term WHERE name = {} AND owner = {}"
RELEASE = "SELECT pg_advisory_unlock({})"

# The heartbeat also sends a probe to its own session: without the probe's return, LISTEN is dead although the session
# lives.
HEARTBEAT = "SELECT clock_timestamp() AT TIME ZONE 'UTC', pg_notify($1, $2)"
HEARTBEAT_IN_SILENCE = "SELECT clock_timestamp() AT TIME ZONE 'UTC'"


class PostgresClusterLock:
    proof = None

    def __init__(self, session: LoopConnection, owner: str, channel: str | None, timeout: float) -> None:
        self._session = session
        self._owner = owner[:255]
        self._channel = channel
        self._timeout = timeout
        self._lost: Callable[[], None] = _nothing
        self._heard: Callable[[str], None] = _ignored
        self._watched: Any = None
        self._probe = f"probe {machine.token(8)}"
        self._unheard = 0

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        by_lease = {name.lease: name for name in names}
        with self._session.dropped_on_failure():  # a lock of which only the server knows ends with the session
            rows = await self._fetch(ACQUIRE, list(by_lease), as_texts(n.key for n in by_lease.values()), self._owner)
        return {by_lease[row["name"]]: LockGrant(row["term"], row["released_term"]) for row in rows}

    async def try_probe(self, name: LockName) -> bool:
        return bool((await self._session.fetch(TRY, name.key, timeout=self._timeout))[0][0])

    async def heartbeat(self) -> Proof:
        with self._session.dropped_on_failure():
            if self._channel is None:
                return await measured(self._ask(HEARTBEAT_IN_SILENCE))
            await self._repeat_listen_if_silent()
            return await measured(self._ask(HEARTBEAT, self._channel, self._probe))

    async def release(self, names: Sequence[LockName]) -> None:
        if names and self._session.is_open:
            leases = sorted(name.lease for name in names)
            given_back = [GIVE_BACK.format(quoted(lease), quoted(self._owner)) for lease in leases]
            released = [RELEASE.format(name.key) for name in names]
            with self._session.dropped_on_failure():
                await self._session.execute("; ".join((*given_back, *released)), timeout=self._timeout)

    async def listen(self, heard: Callable[[str], None]) -> None:
        async def start(connection: Any) -> None:
            if connection is not self._watched:
                if self._watched is not None:  # the end of the former session went unnoticed
                    self._lost()
                self._heard = heard
                if self._channel is not None:
                    await connection.add_listener(self._channel, self._on_notification)
                connection.add_termination_listener(self._ended)
                self._watched, self._unheard = connection, 0

        with self._session.dropped_on_failure():
            async with asyncio.timeout(self._timeout):
                await self._session.use(start)

    def when_lost(self, callback: Callable[[], None]) -> None:
        self._lost = callback

    async def close(self) -> None:
        self._lost = _nothing
        watched, self._watched = self._watched, None

        async def reset(connection: Any) -> None:
            if connection is watched:
                connection.remove_termination_listener(self._ended)
                if self._channel is not None:
                    await connection.remove_listener(self._channel, self._on_notification)
                await connection.reset()  # every lock that is left

        if watched is None:
            await self._session.close()
        else:  # close_after waits for its turn, because a NOTIFY may be under way on the session
            await self._session.close_after(reset, within=self._timeout)

    async def _ask(self, sql: str, *args: Any) -> datetime:
        moment: datetime = (await self._fetch(sql, *args))[0][0]
        return moment

    async def _fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run a statement on the session with the locks: the answer of a new session would prove nothing."""

        async def fetch_there(connection: Any) -> list[Any]:
            if connection is not self._watched:
                raise ConnectionResetError("the session that holds the cluster locks has ended")
            rows: list[Any] = await connection.fetch(sql, *args, timeout=self._timeout)
            return rows

        rows: list[Any] = await self._session.use_if_open(fetch_there)
        return rows

    def _on_notification(self, connection: Any, pid: int, channel: str, payload: Any) -> None:
        if payload == self._probe:
            self._unheard = 0
        elif not str(payload).startswith("probe "):
            self._heard(str(payload))

    async def _repeat_listen_if_silent(self) -> None:
        """Repeat LISTEN if the last probe did not return. Until a probe returns, polling finds the work."""
        if self._unheard and self._watched is not None:
            if self._unheard == 1:
                logger.warning("wake-ups do not arrive any more; listening anew, polling meanwhile")

            async def listen_anew(connection: Any) -> None:
                await connection.remove_listener(self._channel, self._on_notification)
                await connection.add_listener(self._channel, self._on_notification)

            async with asyncio.timeout(self._timeout):
                await self._session.use(listen_anew)
            for missed in ("events", "notifications"):  # wake-ups of both kinds may have been lost
                self._heard(missed)
        self._unheard += 1

    def _ended(self, connection: Any) -> None:
        if self._watched is None or self._session.is_closed(self._watched):
            self._watched = None
            self._lost()


def _nothing() -> None:
    return None


def _ignored(payload: str) -> None:
    return None
