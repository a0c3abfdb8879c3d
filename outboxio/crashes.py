"""Crashes: finding the row whose handler ends its process, at no cost while no process dies.

A handler may end the process that it runs in: by ``os._exit``, in native code, for lack of memory. Its row is still due
then, the next process runs it again, and so on for ever. Nothing that was written says which of the rows it was, and to
write it for every run would cost as much as settling does. So it is found out afterwards:

1. A lease says whether its last holder gave the lock back. After one that did not, the starts of all rows that can have
   been in flight are recorded, each before its handler is called, and the record is removed when the run has ended.
2. If that process dies as well, the rows whose records are left are suspects: the cause is one of them. They run one
   at a time, without another run of their handler beside them and without another suspect in the whole process, and
   their starts are counted.
3. A suspect that has been started ``max_crashes`` times, and never came to an end, is not started again: it is DEAD.

The first crash is not counted, for nothing was recorded before it. The first start that is counted has company, so it
proves nothing about one row; that is why no row is DEAD before it was started alone.

What a row of the table says is worth nothing once its notification was written after it: a run ended in some other way,
or an operator ordered something. So a record that nobody could remove does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from outboxio.clock import Clock
from outboxio.errors import CrashedProcess, NotBegun
from outboxio.notification import Notification, State, Wanted
from outboxio.options import Delivery
from outboxio.queues import HandlerQueue, Run, Source
from outboxio.storage.protocols import StartedRun, StartRepository

logger = logging.getLogger(__name__)

LEAST_STARTS = 2  # a start in company, and one alone
CLOCKS_DIFFER = timedelta(seconds=1)  # so much later than by our clock the row may be due that was running
LOOK_AGAIN = 0.05  # seconds between two looks whether a suspect of another shard still runs


class Watch:
    """One handler name whose lock was taken after a holder that had not given it back."""

    __slots__ = ("lease", "left", "queue", "suspects", "until")

    def __init__(self, source: Source, until: datetime) -> None:
        self.lease = source.lease
        self.queue = source.queue
        self.until = until
        """What the former holder was running was due by then."""
        self.left = source.queue.most_in_flight
        """How many more starts are recorded of rows that are no suspects."""
        self.suspects: dict[UUID, int] | None = None
        """The starts of each row that may have ended a process; ``None`` until they are read."""


class Crashes:
    """What one dispatcher knows of runs that ended their process."""

    def __init__(
        self,
        namespace: str,
        repository: StartRepository,
        clock: Clock,
        max_crashes: int,
        *,
        in_flight: Mapping[UUID, Run],
        left_behind: Collection[UUID],
        wake: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._repository = repository
        self._clock = clock
        self._most = max(max_crashes, LEAST_STARTS)
        self._in_flight = in_flight
        self._left_behind = left_behind
        self._wake = wake
        self._watches: dict[str, Watch] = {}
        self._recorded: dict[UUID, str] = {}
        """What this process has recorded, and not removed yet, with the handler name."""
        self._alone: UUID | None = None
        self._beginning: dict[UUID, StartedRun] = {}
        self._turn = asyncio.Lock()
        _everyone.add(self)

    @property
    def is_wary(self) -> bool:
        """Whether anything has to be recorded, or removed again."""
        return bool(self._watches or self._recorded)

    @property
    def alone_in(self) -> HandlerQueue | None:
        """The queue of which a suspect runs now, and nothing else does."""
        run = None if self._alone is None else self._in_flight.get(self._alone)
        return None if run is None else run.queue

    def taken(self, source: Source) -> None:
        """The lock of a name was taken: watch over its rows if its former holder may have died of one."""
        lease, watch = source.lease, self._watches.get(source.name)
        if watch is not None and watch.lease is lease:
            return  # taken again, and nobody had it in between
        if watch is not None:
            self._forget(source.name)
        if lease.follows_crash:
            lease.follows_crash = False  # once is enough, however often the lock is taken again
            self._watches[source.name] = Watch(source, self._clock() + CLOCKS_DIFFER)
            source.queue.watch(is_watched=True)

    def leave(self) -> None:
        """Nothing is started here any more, so no other shard need wait for it."""
        self._alone = None

    # --- finding -------------------------------------------------------------------------------

    async def sift(self, asked: Iterable[tuple[Source, Wanted]], rows: Sequence[Notification]) -> list[Notification]:
        """Of rows that were found due, those that may start now. The others are found again."""
        await self.clear()
        await self._read_suspects()
        queues = {source.name: source.queue for source, _ in asked}
        self._relax({source.name for source, _ in asked if source.sweeps}, rows)
        held = self._make_room([row for row in rows if self._is_suspect(row) and self._can_start(row)])
        return [
            row
            for row in rows
            if row.id == self._alone or not (queues.get(row.handler_name) is held or self._is_suspect(row))
        ]

    async def _read_suspects(self) -> None:
        unread = [name for name, watch in self._watches.items() if watch.suspects is None]
        if not unread:
            return
        await self._repository.remove_ended(self._namespace)  # a run may end, and its process before the record is gone
        found = await self._repository.find(self._namespace, unread)
        for name in unread:
            if (watch := self._watches.get(name)) is None:
                continue
            watch.suspects = {run.notification_id: run.starts for run in found if run.handler_name == name}
            if watch.suspects:
                logger.warning(
                    "%d runs of handler %r had begun when their process ended, and one of them may be why; each is run "
                    "alone now", len(watch.suspects), name, extra={"handler_name": name},
                )  # fmt: skip

    def _make_room(self, suspects: Sequence[Notification]) -> HandlerQueue | None:
        """The queue of which nothing but one suspect may start, if there is one; the suspect is chosen when it can."""
        if (queue := self.alone_in) is not None:
            return queue
        self._alone = None
        if not suspects:
            return None
        if any(other.alone_in is not None for other in tuple(_everyone)):
            asyncio.get_running_loop().call_later(LOOK_AGAIN, self._wake)
            return None
        queue = self._watches[suspects[0].handler_name].queue
        if not any(run.queue is queue for run in self._in_flight.values()):
            self._alone = suspects[0].id
        return queue

    def _relax(self, swept: Collection[str], rows: Iterable[Notification]) -> None:
        """Record no more of a name when nothing is left of what can have been in flight."""
        now, earliest = self._clock(), dict[str, datetime]()
        for row in (*rows, *(run.notification for run in self._in_flight.values())):
            earliest[row.handler_name] = min(row.next_retry_at, earliest.get(row.handler_name, row.next_retry_at))
        for name, watch in tuple(self._watches.items()):
            if name in swept and now > watch.until and earliest.get(name, datetime.max) > watch.until:
                watch.left = 0
            if not watch.left and not watch.suspects:
                self._forget(name)

    def _forget(self, name: str) -> None:
        queue = self._watches.pop(name).queue
        queue.watch(is_watched=any(watch.queue is queue for watch in self._watches.values()))

    def _is_suspect(self, row: Notification) -> bool:
        watch = self._watches.get(row.handler_name)
        return watch is not None and bool(watch.suspects) and row.id in (watch.suspects or ())

    def _can_start(self, row: Notification) -> bool:
        return row.id not in self._in_flight and row.id not in self._left_behind

    # --- running -------------------------------------------------------------------------------

    async def begin(self, run: Run, rows: Iterable[Run]) -> None:
        """Record the rows of a call before it begins.

        Raises :class:`CrashedProcess` for a suspect that was begun too often, :class:`NotBegun` if the database does
        not take the record.
        """
        beginning = {row.notification.id: row for row in rows if self._is_to_be_recorded(row)}
        if not beginning:
            return
        counted_from, run.started = run.started, 0.0  # this is not the handler's time
        try:
            await self._record({i: self._start_of(row) for i, row in beginning.items()})
        except CrashedProcess:
            raise
        except Exception as error:
            raise NotBegun(run.queue.handler.name) from error
        self._recorded.update((i, row.notification.handler_name) for i, row in beginning.items())
        if counted_from:
            run.queue.starts_now(run, asyncio.get_running_loop().time())

    def ended(self) -> None:
        """A call is over. If it was a suspect's, the next one may begin."""
        if self._alone is not None:
            self._wake()

    async def clear(self) -> None:
        """Remove the records of runs that have ended, whatever their end was.

        That one ended is worth knowing even where the lock was lost meanwhile, and its next holder has counted it.
        """
        ended = [i for i in self._recorded if i not in self._in_flight]
        if not ended:
            return
        await self._repository.remove(ended)
        for i in ended:
            watch = self._watches.get(self._recorded.pop(i, ""))
            if watch is not None and watch.suspects:
                watch.suspects.pop(i, None)
                self._wake()

    def _is_to_be_recorded(self, row: Run) -> bool:
        notification = row.notification
        watch = self._watches.get(notification.handler_name)
        if watch is None or notification.id in self._recorded:
            return False
        if row.queue.delivery is Delivery.AT_MOST_ONCE and notification.state != State.DYING:
            return False  # it has a mark of its own
        return self._is_suspect(notification) or (watch.left > 0 and notification.next_retry_at <= watch.until)

    def _start_of(self, row: Run) -> StartedRun:
        notification = row.notification
        watch = self._watches[notification.handler_name]
        starts = (watch.suspects or {}).get(notification.id, 0)
        if starts >= self._most:
            self._recorded[notification.id] = notification.handler_name  # it is over for this record, too
            raise CrashedProcess(row.queue.handler.name, starts)
        watch.left -= not starts
        return StartedRun(notification.id, notification.handler_name, starts + 1)

    async def _record(self, beginning: Mapping[UUID, StartedRun]) -> None:
        """Write what begins; what begins while a statement is under way is written together by the next one."""
        group = self._beginning
        group.update(beginning)
        async with self._turn:
            if group:
                self._beginning = {}
                await self._repository.record(self._namespace, list(group.values()), self._clock())
                group.clear()


# A crash ends all shards of a process, so what one of them suspects runs alone among all of them.
_everyone: weakref.WeakSet[Crashes] = weakref.WeakSet()
