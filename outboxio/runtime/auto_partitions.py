"""Automatic partitions: a handler that cannot keep up is shared among the processes that have it.

A handler with ``partitions="auto"`` starts with one partition, which one process runs. The owner of partition 0 raises
the partition count after ready rows of the handler have repeatedly waited for over a second, for as long as
``settings.spread_after``. Waiting rows are counted in memory, so a handler that keeps up costs no statement. Only when
the count is raised, the owner reads which processes have the handler (``instance_reports``), and chooses four
partitions per process.

The count falls to 1 after a day in which no row waited. ``handler_partitions.waited_date`` keeps the time of the last
wait across restarts; each owner writes it at most once an hour. So the count rises with the load, survives
deployments, and does not oscillate. A count set by an operator stays until ``admin.partitions(handler, "auto")``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta

import msgspec

from outboxio.dispatch.dispatcher import Dispatcher
from outboxio.handlers.handler import Handler
from outboxio.handlers.options import OLDER_FOR
from outboxio.runs.ports import HandlingSetup
from outboxio.storage.protocols import SHARE_OF_AUTOMATIC, InstanceReport, PartitionCount
from outboxio.storage.tables.partitions import PartitionTables
from outboxio.support.log import log_of

logger = log_of(__name__)

LONGEST_WAIT = timedelta(seconds=1)  # a handler whose ready rows wait longer does not keep up
LONGEST_GAP = timedelta(seconds=3)  # between two checks that found waiting rows, for them to count as one period
PER_PROCESS = 4  # partitions, for even shares when processes come and go
NOTED_EVERY = timedelta(hours=1)
FALLS_AFTER = timedelta(days=1)  # without waiting rows
MAX_AGE_OF_REPORTS = timedelta(minutes=5)


class HandlersOfProcess(msgspec.Struct):
    """The part of a process's report that names its handlers."""

    handlers: dict[str, msgspec.Raw] = {}


class AutoPartitions:
    """Chooses the partition counts of the handlers of a shard that have automatic partitions."""

    def __init__(self, setup: HandlingSetup, dispatcher: Dispatcher, changed: Callable[[], None]) -> None:
        """``changed``: notifies all processes that a partition count has changed."""
        self._setup = setup
        self._dispatcher = dispatcher
        self._changed = changed
        self._waiting: dict[str, tuple[datetime, datetime]] = {}
        """By handler: since when rows have been waiting, and when that was last seen."""
        self._most = {handler.name: _most_partitions(handler, setup) for handler in setup.handlers}
        self._has_warned = False

    async def look(self, counts: Mapping[str, PartitionCount]) -> None:
        """Raise or lower partition counts, if due. Call this about once a second with the current counts."""
        partitions = self._setup.database.partitions
        if partitions is None:
            return
        now = self._setup.clock()
        waiting = self._dispatcher.waiting_names(now - LONGEST_WAIT)
        if not (waiting or self._waiting or counts):
            return
        await self._follow_code(partitions, counts)
        for name in self._waiting_long_enough(waiting, counts, now):
            await self._raise(partitions, name, counts)
        for count in counts.values():
            if count.is_automatic and count.number > 1 and count.waited_date is not None:
                await self._note_or_lower(partitions, count, count.waited_date, now)

    async def _follow_code(self, partitions: PartitionTables, counts: Mapping[str, PartitionCount]) -> None:
        """Replace a larger automatic count by the count in code; ``Declarations`` raises a smaller one."""
        for handler in self._setup.handlers:
            count, number = counts.get(handler.name), handler.options.declared_partitions
            is_automatic = count is not None and count.is_automatic and number <= count.number
            if is_automatic and handler.options.partitions != "auto":
                await partitions.set_number(self._setup.namespace, handler.name, number, self._setup.clock())
                self._changed()

    def _waiting_long_enough(
        self, waiting: Collection[str], counts: Mapping[str, PartitionCount], now: datetime
    ) -> list[str]:
        """Return the handlers whose rows have waited for ``spread_after``. ``waiting``: those with waiting rows."""
        for name in waiting:
            since, last = self._waiting.get(name, (now, now))
            self._waiting[name] = (since if now - last <= LONGEST_GAP else now, now)
        self._waiting = {name: (since, at) for name, (since, at) in self._waiting.items() if now - at <= LONGEST_GAP}
        due = list[str]()
        for name, (since, last) in self._waiting.items():
            count = counts.get(name)
            is_open = self._most.get(name, 1) > 1 and (count is None or count.is_automatic)
            if is_open and last == now and now - since >= self._setup.settings.spread_after:
                due.append(name)
        for name in due:
            self._waiting[name] = (now, now)
        return due

    async def _raise(self, partitions: PartitionTables, name: str, counts: Mapping[str, PartitionCount]) -> None:
        lease, setup = self._dispatcher.first_lease(name), self._setup
        if lease is None:
            return
        now, present = setup.clock(), counts[name].number if name in counts else 1
        reports = await setup.database.reports.reports(setup.namespace, now - MAX_AGE_OF_REPORTS)
        processes = _processes_with(name, reports, now, setup.settings.spread_after)
        if processes < 2:
            return
        others = sum(one.number for key, one in counts.items() if key != name and one.is_automatic and one.number > 1)
        capacity = await setup.database.lock_capacity()
        number = number_for(
            processes, self._most[name], None if capacity is None else capacity // SHARE_OF_AUTOMATIC - others
        )
        if number <= present:
            if number < number_for(processes, self._most[name], None) and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "handler %r stays at %d partitions: automatic partitions may use at most an eighth of the "
                    "%d locks of the server; raise max_locks_per_transaction", name, present, capacity, handler=name,
                )  # fmt: skip
            return
        if name in await partitions.names_of_older_versions(setup.namespace, now - OLDER_FOR):
            return
        if await partitions.set_automatic(
            setup.namespace, lease, number, expected=present, waited_before=datetime.max, now=now
        ):
            logger.info(
                "handler %r: increased to %d partitions for %d processes, because its notifications have been "
                "waiting for %d s",
                name, number, processes, setup.settings.spread_after.total_seconds(), handler=name, partitions=number,
            )  # fmt: skip
            self._changed()

    async def _note_or_lower(
        self, partitions: PartitionTables, count: PartitionCount, waited: datetime, now: datetime
    ) -> None:
        """Record that rows have waited, or lower the count after a day without waiting rows."""
        name, lease = count.handler_name, self._dispatcher.first_lease(count.handler_name)
        if name in self._waiting:
            if waited < now - NOTED_EVERY:
                await partitions.waited(self._setup.namespace, name, now, now - NOTED_EVERY)
            return
        before = now - FALLS_AFTER
        if lease is None or waited >= before:
            return
        if await partitions.set_automatic(
            self._setup.namespace, lease, 1, expected=count.number, waited_before=before, now=now
        ):
            logger.info(
                "handler %r: reduced to 1 partition, because no notification has had to wait for a day", name,
                handler=name, partitions=1,
            )  # fmt: skip
            self._changed()


def number_for(processes: int, most: int, capacity: int | None) -> int:
    """Return the partition count for a number of processes: 4 per process, rounded up to a power of two.

    ``most``: the limit of the handler. ``capacity``: the locks that are left, or ``None`` without such a limit.

    Example::

        number_for(3, 64, None)   # 16
    """
    if processes < 2:
        return 1
    needed = min(PER_PROCESS * processes, most)
    number = 1
    while number < needed:
        number *= 2
    limit = most if capacity is None else min(most, max(1, capacity))
    while number > limit:
        number //= 2
    return number


def _processes_with(name: str, reports: Collection[InstanceReport], now: datetime, present_for: timedelta) -> int:
    """Return how many live processes have run a handler for some time, including this process."""
    long_ago = now - present_for
    return sum(
        report.is_alive(now)
        and report.started_date <= long_ago
        and name in msgspec.json.decode(report.report, type=HandlersOfProcess).handlers
        for report in reports
    )


def _most_partitions(handler: Handler, setup: HandlingSetup) -> int:
    """Return the largest count that may be chosen: 1 with strict priority, which only holds within a process."""
    types = {one.event_type for one in setup.handlers.subscriptions_of(handler)}
    return 1 if types & setup.handlers.strict_types() else handler.options.most_partitions
