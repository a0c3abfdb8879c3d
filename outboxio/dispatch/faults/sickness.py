"""Sickness: a process holds locks, and no run of the process comes to an end.

A sick process proves the locks all the same, so no other process takes over. The process itself finds out about the
sickness, and gives the slots away. The question costs nothing while runs end.
"""

from __future__ import annotations

from collections.abc import Sequence

from outboxio.dispatch.in_flight import InFlight
from outboxio.dispatch.settler import Settler
from outboxio.dispatch.state import DispatchState
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.support.clock import ShardClock, as_micros

NO_END = 30.0  # seconds without the end of a run
LONG_DUE = 60_000_000  # microseconds for which a row has been due


class Sickness:
    """Finds out if this process is alive, and runs nothing.

    A handler may take long, and rows of the handler wait for good reason while a run has time left. So a row counts
    only if no run of the handler has time left, or if a run was given up as stuck since the last end of a run.
    """

    def __init__(
        self,
        queues: Sequence[HandlerQueue],
        state: DispatchState,
        in_flight: InFlight,
        settler: Settler,
        clock: ShardClock,
    ) -> None:
        self._queues = queues
        self._state = state
        self._in_flight = in_flight
        self._settler = settler
        self._clock = clock
        self._ended, self._stuck = -1, 0
        self._since = float("-inf")
        """The moment of the last question at which a run had ended since the question before."""

    def is_sick(self, now: float) -> bool:
        """True if no run has ended for 30 s although rows have been due for over 60 s. ``now``: the loop's clock."""
        state = self._state
        if state.ended != self._ended or not self._in_flight.rows:
            self._ended, self._stuck, self._since = state.ended, state.counters.stuck, now
            return False
        if now - self._since < NO_END or self._settler.waiting or self._settler.writing:
            return False  # runs have ended, and the database takes no outcome
        had_stuck = state.counters.stuck > self._stuck
        busy = set[HandlerQueue]() if had_stuck else {queue for queue in self._queues if _has_time_left(queue, now)}
        due_by = as_micros(self._clock()) - LONG_DUE
        rows = self._in_flight.rows.values()
        return any(
            run.notification.next_retry_us < due_by and run.queue not in busy and run.queue.quota.rest is None
            for run in rows
        )


def _has_time_left(queue: HandlerQueue, now: float) -> bool:
    """True if a run of a handler, or of the hooks, is not past the deadline."""
    longest = queue.spec.timeout + queue.spec.grace
    runs = (*queue.running, *queue.hook_lane.running)
    return any(not run.started or now - run.started < longest for run in runs)
