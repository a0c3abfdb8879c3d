"""The statistics of a shard: the handlers, and what the loops did, since the outbox was made."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from outboxio.model.lock_name import LockName
from outboxio.statistics.figures import DURATIONS, LAGS, Counters, Figures, Histogram
from outboxio.statistics.handlers import OTHER, HandlerStatistics, Jobs, KeyedLockStatistics

MOST_ACTIONS = 200  # names of actions that are counted apart


class Live(Protocol):
    """The shard run that goes on, as the statistics see the shard run. Any thread may ask."""

    @property
    def roles(self) -> Sequence[str]:
        """The roles of this process: ``fanout``, ``handling``."""
        ...

    @property
    def loop_lag(self) -> float:
        """The longest time, in seconds, that the event loop needed to answer within the last 15 s."""
        ...

    @property
    def connections_in_use(self) -> int:
        """The connections of the pool that actions and handlers have in use."""
        ...

    @property
    def paused(self) -> Sequence[str]:
        """The names of the paused handlers of this process."""
        ...


class ShardStatistics:
    """The work of this process on a shard. The numbers outlive ``running()`` and only rise.

    Only the event loop of the outbox writes the numbers; any thread may read.
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
        """``sent``: how many events of each type were written, a mapping that its owner goes on writing."""
        self.sent: Mapping[str, int] = {} if sent is None else sent
        """Events by type that this process has written. Events of a transaction of the application count when they are
        written, before the COMMIT."""
        self.new_handler: Callable[[str], HandlerStatistics] = lambda name: HandlerStatistics()
        """Makes the statistics of a handler, by its name."""
        self.handlers: dict[str, HandlerStatistics] = {}
        """By the present name of the handler."""
        self.jobs = Jobs()
        """The runs of jobs, on the first shard."""
        self.actions: dict[tuple[str, str], int] = {}
        """Executed actions by name and outcome; names beyond the first 200 count as ``other``."""
        self.fanned_out = 0
        """Events that this process has fanned out."""
        self.fanout_lag = Histogram(LAGS)
        """The time from a commit of this process to the end of the next round of fan-out, once for each round."""
        self.notifications = 0
        """Notifications that fan-out of this process has made."""
        self.unroutable_expired = 0
        """Rows without a handler that ended by retention."""
        self.lock_changes: dict[str, int] = {}
        """How often cluster locks were taken or lost, by :func:`lock_label`."""
        self.locks_held: dict[str, int] = {}
        """Cluster locks that this process holds, by :func:`lock_label`."""
        self.loop_failures: dict[str, int] = {}
        """Rounds that failed, by loop."""
        self.purged: dict[str, int] = {}
        """Rows that retention has removed, by table."""
        self.keyed_locks = KeyedLockStatistics()
        """The locks of ``outbox.lock``."""
        self.sends = Histogram(DURATIONS)
        """The time in which the events of an action were written and committed."""
        self.settles = Histogram(DURATIONS)
        """The time in which equal outcomes were written."""
        self.figures: Figures | None = None
        """The numbers of the tables; ``None`` in a process that does not fan out."""
        self.figures_wanted = False
        """True if metrics want the numbers of the tables."""
        self._counters = Counters(), Counters()  # of all former shard runs, and of the present shard run
        self._live: Live | None = None

    @property
    def live(self) -> Live | None:
        """The shard run that goes on; ``None`` outside of ``running()``."""
        return self._live

    @contextmanager
    def showing(self, live: Live) -> Generator[None]:
        """Show a shard run in metrics while the block lasts."""
        self._live = live
        try:
            yield
        finally:
            self._live = self.figures = None

    def follow(self, counters: Counters) -> None:
        """The counters of a shard run that begins. The counters of the former shard run are kept as numbers."""
        self._counters = Counters(refused=self.refused, standstills=self.standstills), counters

    @property
    def refused(self) -> int:
        """Outcomes that the fence refused, because a second process holds the handler, or the row is settled."""
        return sum(counters.refused for counters in self._counters)

    @property
    def standstills(self) -> int:
        """How often the event loop stood still for about a second or longer."""
        return sum(counters.standstills for counters in self._counters)

    def begin_anew(self) -> None:
        """A new event loop takes over: the runs of the former event loop do not go on."""
        for handler in self.handlers.values():
            handler.begin_anew()
        self.jobs.begin_anew()

    def of(self, handler_name: str) -> HandlerStatistics:
        """The statistics of a handler."""
        found = self.handlers.get(handler_name)
        if found is None:
            found = self.handlers[handler_name] = self.new_handler(handler_name)
        return found

    def expect_handler(self, name: str, alert_age: timedelta) -> None:
        """A handler that a shard run is to run. Metrics show the handler before its first run."""
        self.of(name).alert_age = alert_age.total_seconds()

    def expect_loop(self, name: str) -> None:
        """A loop of a shard run, which has not failed yet."""
        self.loop_failures.setdefault(name, 0)

    def expect_lock(self, name: LockName) -> None:
        """A cluster lock that this process tries to take. Metrics show the lock as not held until then."""
        self.locks_held.setdefault(lock_label(name), 0)

    def loop_failed(self, name: str) -> None:
        """A round of a loop has failed."""
        self.loop_failures[name] = self.loop_failures.get(name, 0) + 1

    def lock_changed(self, name: LockName, *, is_held: bool) -> None:
        """A cluster lock was taken or lost."""
        label = lock_label(name)
        self.lock_changes[label] = self.lock_changes.get(label, 0) + 1
        self.locks_held[label] = self.locks_held.get(label, 0) + (1 if is_held else -1)

    def purged_from(self, table: str, rows: int) -> None:
        """Retention has removed rows of a table."""
        self.purged[table] = self.purged.get(table, 0) + rows

    def executed(self, action_name: str, outcome: str) -> None:
        """A transaction of an action has ended: ``committed``, ``refused`` (rolled back), or ``unknown``."""
        actions, key = self.actions, (action_name, outcome)
        if key not in actions and len(actions) >= MOST_ACTIONS:
            key = (OTHER, outcome)
        actions[key] = actions.get(key, 0) + 1


def lock_label(name: LockName) -> str:
    """The locks of all partitions of a handler under one label: ``fanout``, or ``dispatch/`` and the handler name."""
    return f"{name.role}/{name.handler_name}" if name.handler_name else name.role
