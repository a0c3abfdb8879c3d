"""A keyed lock: one block of code in the whole cluster at a time."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from outboxio.errors import ConcurrentUse, DatabaseUnavailable, LockLost, LockTimeout
from outboxio.locks.sessions import Member
from outboxio.model.lock_name import LockName
from outboxio.support.aio import to_the_end
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from outboxio.locks.locks import ShardLocks

logger = log_of(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.1  # seconds between two tries where the server cannot be waited on
MOST_FAILURES = 3  # sessions in a row that are cut off under a request, before the error is raised


class KeyedLock:
    """The lock of a key, for one ``async with`` block. Made by ``outbox.lock(key)``.

    Example::

        async with outbox.lock("invoice 7", timeout="5s") as lock:
            await charge(invoice, fence=await lock.term())
            if lock.lost.is_set():
                return
    """

    def __init__(self, locks: ShardLocks, key: str, timeout: float | None) -> None:
        self.key = key
        self.lost = asyncio.Event()
        """Set when the session that holds the lock has ended: a different process may hold the lock from then on."""
        self._locks = locks
        self._timeout = timeout
        self._name = LockName(locks.namespace, "lock", key)
        self._member: Member | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def shard(self) -> str:
        """The shard whose database holds the lock."""
        return self._locks.shard

    @property
    def is_held(self) -> bool:
        """True from the entry of the block to its end, unless the lock was lost."""
        return self._member is not None

    async def term(self) -> int:
        """The fencing term: a number that is larger than each number that an earlier holder of the key was given.

        Write the term beside the data that the lock protects, and refuse a write with a smaller term: a holder that was
        frozen, and wakes up after its lock was lost, then changes no data. Each call raises the number, and takes one
        statement (two on MySQL and MariaDB). The number is raised on the session that holds the lock.

        Raises :class:`LockLost` if the lock is not held any more, :class:`WaitsForItself` inside a transaction on
        SQLite, and :class:`DatabaseUnavailable`, after which the lock is lost.

        Example::

            async with outbox.lock("report") as lock:
                term = await lock.term()
                await tx.execute("UPDATE report SET body = $1, term = $2 WHERE term < $2", body, term)
        """
        self._locks.refuse_term_in_transaction()
        member = self._member
        if member is None:
            raise LockLost(self.key, self.shard)
        return await self._locks.sessions.raise_term(member, self._locks.term_name(self._name))

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise ConcurrentUse(f"lock {self.key!r}: a lock is entered once; call outbox.lock({self.key!r}) again")
        task = self._task = asyncio.current_task()
        assert task is not None
        self._locks.enter()
        statistics, time = self._locks.statistics, asyncio.get_running_loop().time
        begun = time()
        statistics.waiting += 1
        try:
            async with asyncio.timeout(self._timeout or None) as limit:
                await self._locks.lines.enter(self._place, self.key, task)
                try:
                    self._member = await self._take(limit.when())
                    if self._member is not None:
                        limit.reschedule(None)
                finally:
                    if self._member is None:
                        self._locks.lines.leave(self._place)
        except TimeoutError as error:
            if isinstance(error, LockTimeout) or not limit.expired():
                raise
        finally:
            statistics.waiting -= 1
        if self._member is None:
            statistics.timeouts += 1
            raise LockTimeout(self.key, self.shard, self._timeout or 0.0)
        statistics.taken += 1
        statistics.held += 1
        statistics.waits.add(time() - begun)
        self._locks.held[self] = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        member = self._forget()
        if member is not None:
            try:
                await to_the_end(self._locks.sessions.release(member, self._name))
            finally:
                self._locks.lines.leave(self._place)

    def ended(self) -> None:
        """The session has ended, and the lock with it: the next task of this process may ask for the key."""
        if self._forget() is not None:
            self._locks.statistics.lost += 1
            self.lost.set()
            logger.warning("keyed lock %r was lost: its session with the database has ended", self.key)
            self._locks.lines.leave(self._place)

    async def _take(self, deadline: float | None) -> Member | None:
        """Take the lock; ``None`` if the lock is not free, and there is no time to wait."""
        failures, pause = 0, FIRST_PAUSE
        sessions, time = self._locks.sessions, asyncio.get_running_loop().time
        while True:
            try:
                if (member := await sessions.try_(self._name, self)) is not None or self._timeout == 0:
                    return member
                left = float("inf") if deadline is None else deadline - time()
                if left >= 1 and (member := await sessions.wait(self._name, self, left)) is not None:
                    return member
                failures = 0
            except DatabaseUnavailable:
                failures += 1
                if failures == MOST_FAILURES:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _forget(self) -> Member | None:
        member, self._member = self._member, None
        if member is not None:
            self._locks.statistics.held -= 1
            self._locks.held.pop(self, None)
        return member

    @property
    def _place(self) -> tuple[str, LockName]:
        return self._locks.shard, self._name
