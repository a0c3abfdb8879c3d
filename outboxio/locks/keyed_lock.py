"""Keyed locks: for each key, only one block of code runs at a time in the whole cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import timedelta
from types import TracebackType
from typing import Self

from outboxio.actions.executor import refuse_in_transaction
from outboxio.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    InvalidEvent,
    KeyedLockError,
    LockHeld,
    LockLost,
    LockTimeout,
)
from outboxio.locks.sessions import LockQueues, LockSession, LockSessions, Process
from outboxio.loops.owner import EventLoopGuard
from outboxio.model.event import checked_name
from outboxio.model.lock_name import LockName
from outboxio.settings import Settings
from outboxio.statistics.handlers import KeyedLockStatistics
from outboxio.storage.protocols import Database
from outboxio.support.duration import parse_duration
from outboxio.support.log import log_of
from outboxio.support.text import briefly

logger = log_of(__name__)

MOST_FAILURES = 3  # consecutive sessions that end while a task waits; then the error is raised

_around: ContextVar[tuple[KeyedLock, ...]] = ContextVar("keyed locks around", default=())
"""The locks whose blocks surround the current code. A task inherits those of the task that created it."""


class KeyedLock:
    """The lock of a key for one ``async with`` block, created by ``outbox.lock(key)``.

    Example::

        async with outbox.lock("invoice 7", timeout="5s") as lock:
            await charge(invoice, fence=await lock.term())
            if lock.lost.is_set():
                return
    """

    def __init__(self, locks: ShardLocks, key: str, timeout: float | None) -> None:
        """``timeout``: the maximum wait in seconds; ``None`` without a limit."""
        self.key = key
        self.shard = locks.shard
        """The shard whose database holds the lock."""
        self.lost = asyncio.Event()
        """Set when the session that holds the lock has ended, so that another process may hold the lock."""
        self._locks = locks
        self._timeout = timeout
        self._name = LockName(locks.namespace, "lock", key)
        self._session: LockSession | None = None
        self._was_entered = self._is_held = False
        self._term: int | None = None

    def __repr__(self) -> str:
        state = "held" if self._is_held else "lost" if self.lost.is_set() else "not held"
        return f"<KeyedLock {self.key!r} on shard {self.shard!r}, {state}>"

    @property
    def is_held(self) -> bool:
        """True inside the block, unless the lock was lost."""
        return self._is_held

    async def term(self) -> int:
        """Return the fencing term of this block, which is larger than that of every earlier block of the key.

        Store the term with the data that the lock protects, and reject writes with a smaller term. Then a holder that
        lost its lock while it was suspended cannot change the data. The first call increments the term in the table
        ``leases``, in the session that holds the lock, with one statement (two on MySQL and MariaDB). Later calls
        return the same number.

        Raises :class:`LockLost` if the lock is no longer held, :class:`SelfDeadlock` inside a transaction on
        SQLite, and :class:`DatabaseUnavailable`, after which the lock is lost.

        Example::

            async with outbox.lock("report") as lock:
                term = await lock.term()
                await tx.execute("UPDATE report SET body = $1, term = $2 WHERE term <= $2", body, term)
        """
        if self._term is None:
            self._locks.refuse_term_in_transaction()
            if self._session is None or not self._is_held:
                raise LockLost(self.key, self.shard)
            self._term = await self._session.raise_term(self._locks.term_row(self._name))
        if not self._is_held:
            raise LockLost(self.key, self.shard)
        return self._term

    async def __aenter__(self) -> Self:
        time, statistics = self._locks.enter().time, self._locks.statistics
        if self._was_entered:
            raise KeyedLockError(self.key, self.shard, "was already entered: call outbox.lock() for each block")
        around = [lock for lock in _around.get() if lock._is_held and lock._locks is self._locks]
        if any(lock.key == self.key for lock in around):
            raise LockHeld(self.key, self.shard)
        begun, self._was_entered = time(), True
        statistics.waiting += 1
        try:
            await self._enter(begun, around[-1]._session if around else None)
        except LockTimeout:
            statistics.timeouts += 1
            raise
        finally:
            statistics.waiting -= 1
        statistics.held += 1
        statistics.waits.add(time() - begun)
        self._is_held = True
        _around.set((*around, self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock. Raises :class:`LockLost` if the lock was lost, unless the block has raised an error."""
        _around.set(tuple(lock for lock in _around.get() if lock is not self))
        if self._is_held and self._session is not None:
            try:
                if not await self._session.leave(self._name):
                    self.lose()
            finally:
                self._release()
        if self.lost.is_set() and error is None:
            raise LockLost(self.key, self.shard)

    def lose(self) -> None:
        """Mark the lock as lost, and let the next task of this process try to acquire it."""
        if self._is_held:
            self._release()
            self.lost.set()
            self._locks.statistics.lost += 1
            logger.warning("keyed lock %r on shard %s was lost, because its session ended", self.key, self.shard)

    def _release(self) -> None:
        if self._is_held and self._session is not None:
            self._is_held = False
            self._locks.statistics.held -= 1
            self._locks.sessions.leave(self._session, self)
            self._locks.queues.leave(self._name)

    async def _enter(self, begun: float, beside: LockSession | None) -> None:
        """Wait for the turn in this process, then acquire the lock in a session. Undo all steps on cancellation."""
        until = None if self._timeout is None else begun + self._timeout
        era = self._locks.sessions.era
        try:
            await self._locks.queues.enter(self._name, until)
        except TimeoutError:
            raise self._late("another task of this process holds the lock, or is ahead in the queue") from None
        try:
            for failures in range(1, MOST_FAILURES + 1):
                try:
                    return await self._take(beside, until, era)
                except DatabaseUnavailable:
                    if failures == MOST_FAILURES or era != self._locks.sessions.era:
                        raise
        except BaseException:
            self._locks.queues.leave(self._name)
            raise

    async def _take(self, beside: LockSession | None, until: float | None, era: int) -> None:
        sessions = self._locks.sessions
        if beside is not None and not beside.is_open:
            beside = None
        try:
            session = await sessions.enter(self, beside, until, era)
        except TimeoutError:
            raise self._late(
                f"all {sessions.most} lock sessions of this process were in use. Each lock that is held, or waits for "
                "another process, uses a session: raise the setting lock_sessions, or hold fewer locks at once"
            ) from None
        try:
            try:
                await sessions.open(session, until if self._timeout else None)
            except TimeoutError:
                raise self._late("no lock session could be opened in time") from None
            if not await session.take(self._name, until):
                raise self._late("another process holds the lock")
        except BaseException:
            try:
                await session.leave(self._name)
            finally:
                sessions.leave(session, self)
            raise
        self._session = session

    def _late(self, why: str) -> LockTimeout:
        return LockTimeout(self.key, self.shard, self._timeout or 0.0, why)


# --- the keyed locks of a shard -------------------------------------------------------------------


TERM_ROWS = 64  # rows in leases that all keys of a namespace share, because the number of keys is unlimited


class ShardLocks:
    """The shared state of the keyed locks of a shard: queues, sessions and rows of fencing terms."""

    def __init__(
        self,
        outbox: object,
        process: Process,
        database: Database,
        settings: Settings,
        guard: EventLoopGuard,
        statistics: KeyedLockStatistics,
    ) -> None:
        """``outbox``: used to detect calls inside a transaction of the same outbox."""
        self.namespace = process.namespace
        self.shard = database.name
        self.statistics = statistics
        self.queues = LockQueues()
        heartbeat = settings.lock_heartbeat.total_seconds()
        self.sessions = LockSessions(database, process, settings.lock_sessions, heartbeat)
        self._outbox = outbox
        self._has_one_writer = database.has_one_writer
        self._guard = guard
        guard.when_taken_over(self._reset)

    def _reset(self) -> None:
        self.queues = LockQueues()
        self.statistics.held = self.statistics.waiting = 0
        self.sessions.reset()

    def enter(self) -> asyncio.AbstractEventLoop:
        """Bind the outbox to the running event loop."""
        return self._guard.enter()

    def refuse_term_in_transaction(self) -> None:
        """Raise :class:`SelfDeadlock` inside a transaction on a database with a single writer."""
        if self._has_one_writer:
            fix = "read the term before the transaction begins"
            refuse_in_transaction(self._outbox, "lock.term()", fix, [self.shard])

    def term_row(self, name: LockName) -> str:
        """Return the row of a fencing term, one of ``TERM_ROWS``, chosen by the digest of the key."""
        return LockName(self.namespace, "lock", partition=1 + name.digest[0] % TERM_ROWS).lease


# --- outbox.lock() --------------------------------------------------------------------------------


class Locking:
    """The base class of :class:`~outboxio.Outbox` that creates keyed locks."""

    def __init__(self, locks: Mapping[str, ShardLocks]) -> None:
        """``locks``: by shard."""
        self._locks = locks

    def lock(self, key: str, *, shard: str | None = None, timeout: timedelta | float | str | None = None) -> KeyedLock:
        """Return a lock for ``key`` that only one task in the cluster can hold at a time, within this namespace.

        Enter the lock once, with ``async with``. ``key`` is a string of 1 to 255 characters. ``shard`` names a shard
        other than the first. ``timeout`` is the maximum wait: 0 tries once, ``None`` waits without limit. The tasks of
        a process are served in the order of their arrival. Processes take turns on PostgreSQL, are served in the order
        of their arrival on MySQL and MariaDB, and in no particular order on SQLite.

        Each lock that is held or waits for another process uses its own session, at most ``lock_sessions`` per process
        and shard; further tasks wait for a session. A lock lasts as long as its session. If the session ends,
        ``lock.lost`` is set, and leaving the block raises :class:`LockLost`. If the event loop is blocked for 1.8 times
        ``lock_heartbeat``, its locks are lost. ``await lock.term()`` returns a fencing term, with which the database
        can reject a late write.

        Raises :class:`ConfigurationError` for an invalid key, shard or timeout, and on entry
        :class:`LockTimeout`, :class:`LockHeld` inside the block of the same key, :class:`DatabaseUnavailable`, and
        :class:`PooledConnection` behind a proxy that shares sessions.

        Example::

            async with outbox.lock(f"customer {customer_id}", timeout="10s") as lock:
                await export(customer_id, lost=lock.lost)
        """
        try:
            checked_name(key, "lock key")
        except InvalidEvent as error:
            raise ConfigurationError(str(error)) from None
        longest = None if timeout is None else parse_duration(timeout, key="lock timeout").total_seconds()
        return KeyedLock(self._locks_of(shard), key, longest)

    def _locks_of(self, shard: str | None) -> ShardLocks:
        found = next((locks for name, locks in self._locks.items() if shard is None or name == shard), None)
        if found is None:
            shards = ", ".join(map(repr, self._locks))
            raise ConfigurationError(f"there is no shard {briefly(shard)}; the shards are {shards}")
        return found
