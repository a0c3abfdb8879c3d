"""Cluster locks on PostgreSQL: session advisory locks, fencing terms and LISTEN on a single session (decision 4).

A lock lasts exactly as long as its session. When the holder's process dies, the server closes the session, and the next
attempt of a standby succeeds. Standbys poll instead of waiting in ``pg_advisory_lock``, because a waiting statement
holds back the oldest snapshot of the whole database server. ``idle_session_timeout`` makes the server close an idle
session, so that a standby also replaces a frozen holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from outboxio.model.lock_name import LockName
from outboxio.storage.connections.driver import Proof, make_proof
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.connection import LoopConnection, quoted, row_count
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.protocols import LONGEST_SILENCE, LockGrant
from outboxio.support import machine
from outboxio.support.aio import TimeLimit
from outboxio.support.log import log_of

logger = log_of(__name__)

# Takes the free locks and increments their terms. All writers lock leases in the order of the names. released_term is
# read from the locked row, not from an earlier snapshot.
ACQUIRE = """
WITH taken AS MATERIALIZED (
  SELECT w.name FROM unnest($1::text[], $2::text[]::bigint[]) AS w(name, key) WHERE pg_try_advisory_lock(w.key)
)
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
SELECT name, 1, $3, clock_timestamp() AT TIME ZONE 'UTC', 0 FROM taken ORDER BY name
ON CONFLICT (name) DO UPDATE SET term = leases.term + 1, owner = excluded.owner, acquired_date = excluded.acquired_date
RETURNING name, term, released_term
"""

# Without a lease: only detects whether two shards share a database.
TRY = "SELECT pg_try_advisory_lock($1)"

# Without parameters, so that the statements are a single message (see LoopConnection). Until it is done, the ACQUIRE of
# a standby waits for the lease row.
RECORD_RELEASE = "UPDATE eventlog.leases SET released_term = term WHERE name = {} AND owner = {}"
RELEASE = "SELECT pg_advisory_unlock({})"

# The heartbeat also sends a probe to its own session: if the probe does not arrive, LISTEN is broken although the
# session is alive.
HEARTBEAT = "SELECT clock_timestamp() AT TIME ZONE 'UTC', pg_notify($1, $2)"
HEARTBEAT_WITHOUT_LISTEN = "SELECT clock_timestamp() AT TIME ZONE 'UTC'"


class PostgresClusterLock:
    proof = None

    def __init__(self, session: LoopConnection, owner: str, channel: str | None, timeout: float) -> None:
        self._session = session
        self._owner = owner[:255]
        self._channel = channel
        self._timeout = timeout
        self._lost: Callable[[], None] = _nothing
        self._on_wake: Callable[[str], None] = _ignored
        self._watched: Any = None
        self._probe = f"probe {machine.token(8)}"
        self._missed_probes = 0

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        by_lease = {name.lease: name for name in names}
        with self._session.dropped_on_failure():  # releases locks that the server granted before the failure
            rows = await self._fetch(ACQUIRE, list(by_lease), as_texts(n.key for n in by_lease.values()), self._owner)
        return {by_lease[row["name"]]: LockGrant(row["term"], row["released_term"]) for row in rows}

    async def try_probe(self, name: LockName) -> bool:
        return bool((await self._session.fetch(TRY, name.key, timeout=self._timeout))[0][0])

    async def heartbeat(self) -> Proof:
        with self._session.dropped_on_failure():
            if self._channel is None:
                return await make_proof(self._read_time(HEARTBEAT_WITHOUT_LISTEN))
            await self._repeat_listen_if_lost()
            return await make_proof(self._read_time(HEARTBEAT, self._channel, self._probe))

    async def release(self, names: Sequence[LockName]) -> None:
        if names and self._session.is_open:
            leases = sorted(name.lease for name in names)
            recording = [RECORD_RELEASE.format(quoted(lease), quoted(self._owner)) for lease in leases]
            releasing = [RELEASE.format(name.key) for name in names]
            with self._session.dropped_on_failure():
                await self._session.execute("; ".join((*recording, *releasing)), timeout=self._timeout)

    async def listen(self, on_wake: Callable[[str], None]) -> None:
        async def start(connection: Any) -> None:
            if connection is not self._watched:
                if self._watched is not None:  # the previous session ended without a callback
                    self._lost()
                self._on_wake = on_wake
                if self._channel is not None:
                    await connection.add_listener(self._channel, self._on_notification)
                connection.add_termination_listener(self._ended)
                self._watched, self._missed_probes = connection, 0

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
                await connection.reset()  # releases the remaining locks

        if watched is None:
            await self._session.close()
        else:  # close_after waits for its turn, because a NOTIFY may be under way on the session
            await self._session.close_after(reset, within=self._timeout)

    async def _read_time(self, sql: str, *args: Any) -> datetime:
        now: datetime = (await self._fetch(sql, *args))[0][0]
        return now

    async def _fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run a statement on the session that holds the locks. A result of a new session would prove nothing."""

        async def fetch_there(connection: Any) -> list[Any]:
            if connection is not self._watched:
                raise ConnectionResetError("the session that holds the cluster locks has ended")
            rows: list[Any] = await connection.fetch(sql, *args, timeout=self._timeout)
            return rows

        rows: list[Any] = await self._session.use_if_open(fetch_there)
        return rows

    def _on_notification(self, connection: Any, pid: int, channel: str, payload: Any) -> None:
        if payload == self._probe:
            self._missed_probes = 0
        elif not str(payload).startswith("probe "):
            self._on_wake(str(payload))

    async def _repeat_listen_if_lost(self) -> None:
        """Repeat LISTEN if the last probe did not arrive. Until a probe arrives, polling finds the work."""
        if self._missed_probes and self._watched is not None:
            if self._missed_probes == 1:
                logger.warning("NOTIFY wake-ups are not arriving; repeating LISTEN, and polling until they do")

            async def listen_again(connection: Any) -> None:
                await connection.remove_listener(self._channel, self._on_notification)
                await connection.add_listener(self._channel, self._on_notification)

            async with asyncio.timeout(self._timeout):
                await self._session.use(listen_again)
            for missed in ("events", "notifications"):  # wake-ups of both kinds may have been lost
                self._on_wake(missed)
        self._missed_probes += 1

    def _ended(self, connection: Any) -> None:
        if self._watched is None or self._session.is_closed(self._watched):
            self._watched = None
            self._lost()


def _nothing() -> None:
    return None


def _ignored(payload: str) -> None:
    return None


# --- keyed locks -----------------------------------------------------------------------------------
#
# Your application's keyed locks on PostgreSQL: session advisory locks (decision 56).
#
# A session never waits in ``pg_advisory_lock``, because a waiting statement holds back the oldest snapshot of the whole
# database server. Processes poll instead. While the key is locked, one waiting process holds a second lock, the
# **gate** of the key. Only the process at the gate tries to take the key, so a busy process cannot overtake the waiting
# processes and take the key again and again.
#
# Statements are prepared before the session holds a lock (see ``LoopConnection``). The statements of a waiting session
# have no parameters, and return their result as the number of rows.

# 2: the session holds the key; 1: the session holds the gate; 0: neither.
TRY_KEY = """
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
        self._try, self._unlock = await connection.prepare(TRY_KEY), await connection.prepare(UNLOCK)
        try:
            self._raise_term = await connection.prepare(RAISE_TERM)
        except Exception as error:
            if not errors.lacks_schema(error):  # before the migration, locks work and terms do not
                raise
        self._connection = connection

    async def take(self, name: LockName, seconds: int) -> bool:
        key, gate = _key_and_gate(name)
        if name in self._at_gate:
            taken = 1 + row_count(await self._execute(TRY_AT_GATE.format(key=key, gate=gate)))
        else:
            taken = await self._with_timeout(lambda _: self._try.fetchval(key, gate))
        if taken == 2:
            self._at_gate.discard(name)
            self._held.add(name)
        elif taken == 1:
            self._at_gate.add(name)
        return bool(taken == 2)

    async def leave(self, name: LockName) -> None:
        if name in self._held:
            key, _ = _key_and_gate(name)
            await self._with_timeout(lambda _: self._unlock.fetchval(key))
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
            await connection.reset()  # releases the remaining locks

        await self._session.close_after(reset, within=self._timeout)

    async def _execute(self, sql: str) -> str:
        return str(await self._use(lambda connection: connection.execute(sql, timeout=self._timeout)))

    async def _with_timeout(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Like :meth:`_use`, with one timer for many statements. A statement that times out closes the session."""
        self._limit.begin(work, self._on_timeout)
        try:
            return await self._use(work)
        finally:
            self._limit.end(work)

    def _on_timeout(self, work: object) -> None:
        self.drop()

    async def _use(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a statement on the opened session; a new session would not hold the locks."""
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
