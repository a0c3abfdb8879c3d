"""A keyed lock: one block of code in the whole cluster at a time."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Self

from outboxio.errors import DatabaseUnavailable, KeyedLockError, LockHeld, LockLost, LockTimeout
from outboxio.locks.session import LockSession
from outboxio.model.lock_name import LockName
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from outboxio.locks.shard_locks import ShardLocks

logger = log_of(__name__)

MOST_FAILURES = 3  # sessions in a row that end under a waiting task, before the task gets the error

_around: ContextVar[tuple[KeyedLock, ...]] = ContextVar("keyed locks around", default=())
"""The locks whose blocks are around the running code. A task inherits the locks of the spawning task."""


class KeyedLock:
    """The lock of a key, for one ``async with`` block. Made by ``outbox.lock(key)``.

    Example::

        async with outbox.lock("invoice 7", timeout="5s") as lock:
            await charge(invoice, fence=await lock.term())
            if lock.lost.is_set():
                return
    """

    def __init__(self, locks: ShardLocks, key: str, timeout: float | None) -> None:
        """``timeout``: the seconds of the longest wait; ``None`` without a limit."""
        self.key = key
        self.shard = locks.shard
        """The shard whose database holds the lock."""
        self.lost = asyncio.Event()
        """Set when the session that holds the lock has ended: a different process may hold the lock from then on."""
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
        """True from the entry of the block to its end, unless the lock was lost."""
        return self._is_held

    async def term(self) -> int:
        """The fencing term of this block: larger than the term of each earlier block of the key.

        Write the term beside the data that the lock protects, and refuse a write with a smaller term: a holder that was
        frozen, and wakes up after its lock was lost, then changes no data. The first call raises the term in the table
        ``leases``, on the session that holds the lock, with one statement (two on MySQL and MariaDB). Later calls
        return the same number.

        Raises :class:`LockLost` if the lock is not held any more, :class:`WaitsForItself` inside a transaction on
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
            raise KeyedLockError(self.key, self.shard, "was entered before: call outbox.lock() for each block")
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
                self._let_go()
        if self.lost.is_set() and error is None:
            raise LockLost(self.key, self.shard)

    def lose(self) -> None:
        """The session has ended, and the lock with it: the next task of this process may ask for the key."""
        if self._is_held:
            self._let_go()
            self.lost.set()
            self._locks.statistics.lost += 1
            logger.warning("keyed lock %r on shard %s was lost: its session has ended", self.key, self.shard)

    def _let_go(self) -> None:
        if self._is_held and self._session is not None:
            self._is_held = False
            self._locks.statistics.held -= 1
            self._locks.sessions.leave(self._session, self)
            self._locks.lines.leave(self._name)

    async def _enter(self, begun: float, beside: LockSession | None) -> None:
        """Pass the line of this process, then take the lock on a session. A cancelled call leaves no trace."""
        until = None if self._timeout is None else begun + self._timeout
        era = self._locks.sessions.era
        try:
            await self._locks.lines.enter(self._name, until)
        except TimeoutError:
            raise self._late("a different task of this process holds the lock, or waits before this task") from None
        try:
            for failures in range(1, MOST_FAILURES + 1):
                try:
                    return await self._take(beside, until, era)
                except DatabaseUnavailable:
                    if failures == MOST_FAILURES or era != self._locks.sessions.era:
                        raise
        except BaseException:
            self._locks.lines.leave(self._name)
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
                "a different process, uses a session: raise the setting lock_sessions, or hold fewer locks at once"
            ) from None
        try:
            try:
                await sessions.open(session, until if self._timeout else None)
            except TimeoutError:
                raise self._late("no session was open in time") from None
            if not await session.take(self._name, until):
                raise self._late("a different process holds the lock")
        except BaseException:
            try:
                await session.leave(self._name)
            finally:
                sessions.leave(session, self)
            raise
        self._session = session

    def _late(self, why: str) -> LockTimeout:
        return LockTimeout(self.key, self.shard, self._timeout or 0.0, why)
