"""The part of an outbox that makes keyed locks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.locks.keyed_lock import KeyedLock
from outboxio.locks.shard_locks import ShardLocks
from outboxio.model.event import checked_name
from outboxio.support.duration import parse_duration
from outboxio.support.text import briefly


class Locking:
    """The base class of :class:`~outboxio.Outbox` that makes keyed locks."""

    def __init__(self, locks: Mapping[str, ShardLocks]) -> None:
        """``locks``: by shard."""
        self._locks = locks

    def lock(self, key: str, *, shard: str | None = None, timeout: timedelta | float | str | None = None) -> KeyedLock:
        """A lock that one task in the whole cluster holds at a time for ``key``, in this namespace.

        Enter the lock once, with ``async with``. ``key`` is a text of 1 to 255 characters. ``shard`` names a shard that
        is not the first. ``timeout`` is the longest wait: 0 tries once, ``None`` waits without limit. The tasks of a
        process wait in the order of arrival. The processes take turns on PostgreSQL, come in the order of arrival on
        MySQL and MariaDB, and have no order on SQLite.

        Each lock that is held, or waits for a different process, uses a session of its own, at most ``lock_sessions``
        in a process and shard; further tasks wait for a session. A lock lasts as long as its session. If the session
        ends, ``lock.lost`` is set, and the end of the block raises :class:`LockLost`. An event loop that stands still
        for 1.8 times ``lock_heartbeat`` loses its locks. ``await lock.term()`` is a number with which the database
        refuses a late writer.

        Raises :class:`ConfigurationError` for a key, a shard or a timeout that cannot be used, and on entry
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
