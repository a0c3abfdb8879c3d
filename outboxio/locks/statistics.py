"""What this process did with keyed locks, as numbers in memory."""

from __future__ import annotations

from outboxio.statistics.buckets import DURATIONS, Histogram


class KeyedLockStatistics:
    """The keyed locks of this process on a shard. The counters only rise."""

    __slots__ = ("held", "lost", "taken", "timeouts", "waiting", "waits")

    def __init__(self) -> None:
        self.taken = 0
        """Locks that were taken."""
        self.lost = 0
        """Locks that were lost with their session."""
        self.timeouts = 0
        """Waits that ended with :class:`LockTimeout`."""
        self.held = 0
        """Locks that are held now."""
        self.waiting = 0
        """Tasks that wait for a lock now."""
        self.waits = Histogram(DURATIONS)
        """The time from the request for a lock to the lock."""
