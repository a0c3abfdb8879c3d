"""The keyed locks of this process, as numbers in memory."""

from __future__ import annotations

from outboxio.statistics.buckets import DURATIONS, Histogram


class KeyedLockStatistics:
    """The keyed locks of this process on a shard. The counters only rise."""

    __slots__ = ("held", "lost", "timeouts", "waiting", "waits")

    def __init__(self) -> None:
        self.waits = Histogram(DURATIONS)
        """The time from the request to the lock, once for each lock that was taken."""
        self.timeouts = 0
        """Requests that ended with :class:`LockTimeout`."""
        self.lost = 0
        """Locks that ended with their session, before their block."""
        self.held = 0
        """Locks that are held now."""
        self.waiting = 0
        """Tasks that wait for a lock now."""

    @property
    def taken(self) -> int:
        """Locks that were taken."""
        return self.waits.number
