"""Handoffs: which fresh rows fan-out may give directly to this dispatcher (decision 16)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from outboxio.dispatch.finder import Finder
from outboxio.dispatch.in_flight import InFlight
from outboxio.dispatch.intake import Intake
from outboxio.dispatch.settler import Settler
from outboxio.dispatch.state import DispatchState
from outboxio.dispatch.workers import WorkerPool
from outboxio.model.handoff import Handoff
from outboxio.model.notification import Notification
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.partitions import Partitions
from outboxio.runs.poison import PoisonGuard
from outboxio.runs.ports import HandlingSetup
from outboxio.support.scan_position import SWEEP_IN_BACKLOG


class Handoffs:
    """Offers a handoff to each fan-out round of this process, and takes the rows that are handed over."""

    def __init__(
        self,
        setup: HandlingSetup,
        state: DispatchState,
        in_flight: InFlight,
        settler: Settler,
        guard: PoisonGuard,
        workers: WorkerPool,
        intake: Intake,
        finder: Finder,
        partitions: Partitions,
    ) -> None:
        self._notifications = setup.database.notifications
        self._state = state
        self._in_flight = in_flight
        self._cursors = in_flight.cursors
        self._settler = settler
        self._guard = guard
        self._workers = workers
        self._intake = intake
        self._finder = finder
        self._partitions = partitions

    def offer(self) -> Handoff | None:
        """A handoff for the handlers that keep up and need no admission; ``None`` if there are none."""
        now = asyncio.get_running_loop().time()
        if not self._state.may_start(now) or self._settler.is_choked or self._guard.is_active:
            return None
        if not self._notifications.can_settle:
            return None
        names = self._open_names(cursor.slot.handler_name for cursor in self._cursors if not cursor.slot.partition)
        if not names:
            return None
        queues = {id(queue): queue for queue in names.values()}.values()
        for queue in queues:
            queue.ahead.adapt(now)
            queue.ahead.was_full = False
        handoff = Handoff(list(names), min(queue.room for queue in queues), self._take, self._close)
        self._in_flight.handoff = handoff
        return handoff

    def _take(self, handoff: Handoff, rows: Sequence[Notification]) -> int:
        """Make rows ready that are handed over; how many. 0 if runs may not start any more."""
        if not self._state.may_start(asyncio.get_running_loop().time()) or self._guard.is_active:
            return 0
        open_names = self._open_names(handoff.names)
        readable = [row for row in rows if row.handler_name in open_names and row.flaw is None]  # the rest are found
        taken, _ = self._intake.take_in(readable, handoff.settled)
        for queue in open_names.values():
            queue.ahead.was_full = len(rows) >= handoff.most
        self._workers.call()
        return taken

    def _open_names(self, names: Iterable[str]) -> dict[str, HandlerQueue]:
        """The names of which all partitions may be handed rows of, each with the queue of its handler.

        A fresh row may belong to any partition, and a row that is handed over need not be read.
        """
        cursors, found = self._cursors.by_slot, dict[str, HandlerQueue]()
        for name in names:
            first = cursors.get((name, 0))
            if first is None or not first.may_be_handed or self._finder.rehoming.owes(name):
                continue
            rest = [cursors.get((name, partition)) for partition in range(1, self._partitions.active(name))]
            if all(cursor is not None and cursor.may_be_handed for cursor in rest):
                found[name] = first.queue
        return found

    def _close(self, handoff: Handoff) -> None:
        """The fan-out round is over.

        Handing rows over does not move the scan position, because rows of an earlier round may lie behind the rows that
        were handed over. So a find round follows within 0.5 s.
        """
        self._in_flight.handoff = None
        if handoff.taken:
            self._finder.sweep_in(SWEEP_IN_BACKLOG)
