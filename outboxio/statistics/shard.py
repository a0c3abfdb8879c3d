"""The statistics of a shard since the outbox was created: its handlers and loops."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from outboxio.model.lock_name import LockName
from outboxio.statistics.figures import DURATIONS, LAGS, Counters, Figures, Histogram
from outboxio.statistics.handlers import OTHER, HandlerStatistics, Jobs, KeyedLockStatistics

MOST_ACTIONS = 200  # action names that are counted separately


class Live(Protocol):
    """The current shard run, as the statistics use it. Thread-safe."""

    @property
    def roles(self) -> Sequence[str]:
        """The roles of this process: ``fanout``, ``handling``."""
        ...

    @property
    def loop_lag(self) -> float:
        """The longest response time of the event loop within the last 15 s, in seconds."""
        ...

    @property
    def connections_in_use(self) -> int:
        """The number of pool connections in use by actions and handlers."""
        ...

    @property
    def paused(self) -> Sequence[str]:
        """The names of the paused handlers of this process."""
        ...


class ShardStatistics:
    """The work of this process on a shard. Counters are kept after ``running()`` exits, and never decrease.

    Only the event loop of the outbox writes them; any thread may read them.
    """

    __slots__ = (
        "_counters",
        "_live",
        "actions",
        "fanned_out",
        "fanout_lag",
        "figures",
        "figures_wanted",
        "handlers",
        "jobs",
        "keyed_locks",
        "lock_changes",
        "locks_held",
        "loop_failures",
        "new_handler",
        "notifications",
        "purged",
        "sends",
        "sent",
        "settles",
        "unroutable_expired",
    )  # fmt: skip

    def __init__(self, sent: Mapping[str, int] | None = None) -> None:
        """``sent``: the number of written events by type, which its owner keeps up to date."""
        self.sent: Mapping[str, int] = {} if sent is None else sent
        """Events by type that this process has written. In a transaction of your application they count when they are
        written, before the COMMIT."""
        self.new_handler: Callable[[str], HandlerStatistics] = lambda name: HandlerStatistics()
        """Creates the statistics of a handler from its name."""
        self.handlers: dict[str, HandlerStatistics] = {}
        """By the current name of the handler."""
        self.jobs = Jobs()
        """The runs of jobs, on the first shard."""
        self.actions: dict[tuple[str, str], int] = {}
        """Executed actions by name and outcome; names beyond the first 200 count as ``other``."""
        self.fanned_out = 0
        """Events that this process has fanned out."""
        self.fanout_lag = Histogram(LAGS)
        """The time from a commit of this process to the end of the next fan-out round, once per round."""
        self.notifications = 0
        """Notifications that this process has created."""
        self.unroutable_expired = 0
        """Rows without a handler that expired."""
        self.lock_changes: dict[str, int] = {}
        """How often cluster locks were acquired or lost, by :func:`lock_label`."""
        self.locks_held: dict[str, int] = {}
        """Cluster locks that this process holds, by :func:`lock_label`."""
        self.loop_failures: dict[str, int] = {}
        """Rounds that failed, by loop."""
        self.purged: dict[str, int] = {}
        """Rows that retention has removed, by table."""
        self.keyed_locks = KeyedLockStatistics()
        """The locks of ``outbox.lock``."""
        self.sends = Histogram(DURATIONS)
        """The time to write and commit the events of an action."""
        self.settles = Histogram(DURATIONS)
        """The time to write equal outcomes."""
        self.figures: Figures | None = None
        """The figures of the tables; ``None`` in a process that does not fan out."""
        self.figures_wanted = False
        """True if metrics need the figures of the tables."""
        self._counters = Counters(), Counters()  # of all earlier shard runs, and of the current one
        self._live: Live | None = None

    @property
    def live(self) -> Live | None:
        """The current shard run; ``None`` outside of ``running()``."""
        return self._live

    @contextmanager
    def showing(self, live: Live) -> Generator[None]:
        """Show a shard run in metrics inside the ``with`` block."""
        self._live = live
        try:
            yield
        finally:
            self._live = self.figures = None

    def follow(self, counters: Counters) -> None:
        """Use the counters of a new shard run, and keep the totals of the earlier ones."""
        self._counters = Counters(refused=self.refused, standstills=self.standstills), counters

    @property
    def refused(self) -> int:
        """Outcomes that were rejected because another process holds the handler, or the row is settled."""
        return sum(counters.refused for counters in self._counters)

    @property
    def standstills(self) -> int:
        """How often the event loop was blocked for about a second or longer."""
        return sum(counters.standstills for counters in self._counters)

    def reset(self) -> None:
        """Reset for a new event loop: the runs of the previous one do not continue."""
        for handler in self.handlers.values():
            handler.reset()
        self.jobs.reset()

    def of(self, handler_name: str) -> HandlerStatistics:
        """Return the statistics of a handler."""
        found = self.handlers.get(handler_name)
        if found is None:
            found = self.handlers[handler_name] = self.new_handler(handler_name)
        return found

    def expect_handler(self, name: str, alert_age: timedelta) -> None:
        """Register a handler, so that metrics show it before its first run."""
        self.of(name).alert_age = alert_age.total_seconds()

    def expect_loop(self, name: str) -> None:
        """Register a loop, so that metrics show it before it fails."""
        self.loop_failures.setdefault(name, 0)

    def expect_lock(self, name: LockName) -> None:
        """Register a cluster lock, which metrics show as not held until it is acquired."""
        self.locks_held.setdefault(lock_label(name), 0)

    def loop_failed(self, name: str) -> None:
        """Count a failed round of a loop."""
        self.loop_failures[name] = self.loop_failures.get(name, 0) + 1

    def lock_changed(self, name: LockName, *, is_held: bool) -> None:
        """Count an acquired or lost cluster lock."""
        label = lock_label(name)
        self.lock_changes[label] = self.lock_changes.get(label, 0) + 1
        self.locks_held[label] = self.locks_held.get(label, 0) + (1 if is_held else -1)

    def purged_from(self, table: str, rows: int) -> None:
        """Count rows of a table that retention has removed."""
        self.purged[table] = self.purged.get(table, 0) + rows

    def executed(self, action_name: str, outcome: str) -> None:
        """Count the transaction of an action: ``committed``, ``refused`` (rolled back), or ``unknown``."""
        actions, key = self.actions, (action_name, outcome)
        if key not in actions and len(actions) >= MOST_ACTIONS:
            key = (OTHER, outcome)
        actions[key] = actions.get(key, 0) + 1


def lock_label(name: LockName) -> str:
    """Return the label of a lock, common to all partitions: ``fanout``, or ``dispatch/`` and the handler name."""
    return f"{name.role}/{name.handler_name}" if name.handler_name else name.role
