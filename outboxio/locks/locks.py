"""``outbox.lock``: makes keyed locks, and knows the keyed locks that this process holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from outboxio.actions.nesting import refuse_in_transaction
from outboxio.errors import ConfigurationError
from outboxio.locks.keyed_lock import KeyedLock
from outboxio.locks.line import Lines
from outboxio.locks.sessions import Sessions
from outboxio.locks.statistics import KeyedLockStatistics
from outboxio.loops.owner import EventLoopGuard
from outboxio.model.lock_name import LockName
from outboxio.settings import Settings
from outboxio.storage.protocols import Database
from outboxio.support.duration import parse_duration
from outboxio.support.text import briefly

TERM_ROWS = 64  # rows in leases for the terms of all keys of a namespace: keys are without number


class ShardLocks:
    """The keyed locks of a shard."""

    def __init__(
        self, owner: object, namespace: str, database: Database, process: str, settings: Settings, guard: EventLoopGuard
    ) -> None:
        """``owner``: the outbox. ``process``: the name of this process in the table of leases."""
        self.namespace = namespace
        self.shard = database.name
        self.statistics = KeyedLockStatistics()
        self.held: dict[KeyedLock, None] = {}
        self.lines = Lines()
        heartbeat = settings.lock_heartbeat.total_seconds()
        self.sessions = Sessions(database, process, settings.lock_sessions, heartbeat)
        self._owner = owner
        self._has_one_writer = database.has_one_writer
        self._guard = guard
        guard.when_taken_over(self._begin_anew)

    def _begin_anew(self) -> object:
        self.held, self.lines = {}, Lines()
        self.statistics.held = self.statistics.waiting = 0
        return self.sessions.begin_anew()

    def enter(self) -> None:
        """Bind the outbox to the running event loop."""
        self._guard.enter()

    def refuse_term_in_transaction(self) -> None:
        """Raise :class:`WaitsForItself` inside a transaction on a database with a single writer."""
        if self._has_one_writer:
            remedy = "ask for the term before the transaction begins"
            refuse_in_transaction(self._owner, "lock.term()", remedy, [self.shard])

    def term_name(self, name: LockName) -> LockName:
        """The row of the fencing term: one of ``TERM_ROWS`` rows, by the digest of the key."""
        return LockName(self.namespace, "lock", partition=name.digest[0] % TERM_ROWS)


class KeyedLocks:
    """``outbox.lock``: a function that makes locks, with the statistics of the locks of this process."""

    def __init__(self, shards: Mapping[str, ShardLocks]) -> None:
        self._shards = shards

    def __call__(
        self, key: str, *, shard: str | None = None, timeout: timedelta | float | str | None = None
    ) -> KeyedLock:
        """A lock that a single task in the whole cluster holds at a time for ``key``, in this namespace.

        Enter the lock once with ``async with``; call this method again for the next block. ``shard`` names a shard that
        is not the first. ``timeout`` is the longest wait; 0 tries once, ``None`` waits without limit. Tasks of this
        process wait in the order of arrival. The first task of each process waits on the server, which serves
        processes in the order of arrival for 10 s; then the task begins a new wait behind the others. SQLite tries every
        0.1 s, without an order between processes.

        The lock is held on a session of its own, and lasts as long as the session. When the session ends, ``lock.lost``
        is set within 0.1 s of the news, or after an unanswered proof within two times ``lock_heartbeat``. An event loop
        that stands still for longer than 1.8 times ``lock_heartbeat`` loses its locks. ``await lock.term()`` gives a
        fencing term to those who write.

        Raises :class:`ConfigurationError` for a key or shard that cannot be used, and on entry :class:`LockTimeout`,
        :class:`LockHeld` if this task holds the key, :class:`LockDeadlock` if tasks of this process would wait for each
        other, :class:`DatabaseUnavailable`, and :class:`PooledConnection` behind a proxy that shares sessions.

        Example::

            async with outbox.lock(f"customer {customer_id}", timeout="10s") as lock:
                await export(customer_id, lost=lock.lost)
        """
        if not isinstance(key, str) or not key:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise ConfigurationError(f"lock key {briefly(key)}: expected a text that is not empty")
        longest = None if timeout is None else parse_duration(timeout, key="lock timeout").total_seconds()
        return KeyedLock(self._of(shard), key, longest)

    @property
    def held(self) -> Sequence[KeyedLock]:
        """The locks that this process holds now."""
        return [lock for shard in self._shards.values() for lock in shard.held]

    @property
    def statistics(self) -> Mapping[str, KeyedLockStatistics]:
        """What this process did with locks, by shard: ``outbox.lock.statistics["default"].taken``."""
        return {name: shard.statistics for name, shard in self._shards.items()}

    async def close(self) -> None:
        """Close all lock sessions. Locks that are still held are lost."""
        for shard in self._shards.values():
            await shard.sessions.close()

    def _of(self, shard: str | None) -> Any:
        if shard is None:
            return next(iter(self._shards.values()))
        if shard not in self._shards:
            raise ConfigurationError(f"shard {briefly(shard)} is unknown; this outbox has {', '.join(self._shards)}")
        return self._shards[shard]
