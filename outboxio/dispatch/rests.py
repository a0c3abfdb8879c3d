"""Rests: a handler pauses while a service that the handler needs is away (decision 49).

A run that ends with :class:`~outboxio.Unavailable` has used up no attempt, and no row is written: the rows go back to
the front of the ready rows, in memory. The handler rests for 0.1 s, or as long as the error says. Then a single run,
the probe, tries the service. If the probe ends with ``Unavailable`` again, the next rest is twice as long, up to 30 s.
With any other end of the probe, all runs go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outboxio.dispatch.core import Core
from outboxio.errors import Unavailable
from outboxio.model.outcome import Outcome
from outboxio.runs.handler_queue import HandlerQueue, Rest
from outboxio.runs.run import BatchRun, Run
from outboxio.support.duration import parse_duration
from outboxio.support.log import log_of, log_text

logger = log_of(__name__)

SHORTEST, LONGEST = 0.1, 30.0  # seconds of a rest, if the error names no time


class Rests:
    """Begins and ends the rests of the handlers of a shard."""

    def __init__(self, core: Core) -> None:
        self._state = core.state
        self._cursors = core.in_flight.cursors
        self._scheduler = core.scheduler
        self._settler = core.settler
        self._redact = core.setup.context.redact
        self._timers: dict[HandlerQueue, asyncio.TimerHandle] = {}

    # --- a run has ended -----------------------------------------------------------------------

    def begin(self, run: Run, rows: Sequence[Run], *, progressed: bool = False) -> None:
        """A run has ended with ``Unavailable``: put ``rows`` back, and let the handler rest.

        ``progressed``: other rows of the same call have an outcome, so the service was there a moment ago.
        """
        queue, error = run.queue, run.unavailable
        assert error is not None
        queue.statistics.unavailable += 1
        now, rest = asyncio.get_running_loop().time(), queue.quota.rest
        pause = _wanted(error)
        if rest is None:
            rest = queue.quota.rest = Rest(log_text(error, self._redact), now)
            logger.warning(
                "handler %r rests, because a service is unavailable: %s", queue.handler.name, rest.reason,
                **run.log_fields,
            )  # fmt: skip
        elif run in rest.older:
            rest.older.discard(run)
            rest.until = max(rest.until, now + (pause or 0.0))
            self._put_back(queue, rows)
            return
        else:
            rest.reason = log_text(error, self._redact)
            rest.step = SHORTEST if progressed else min(rest.step * 2, LONGEST)
        rest.older = set(queue.running)
        rest.until = now + (rest.step if pause is None else pause)
        rest.is_probing = False
        queue.allow(queue.quota.allowed)
        self._put_back(queue, rows)
        self._set_timer(queue, rest)

    def heed(self, run: Run, outcome: Outcome | None) -> bool:
        """Begin or end a rest by the end of a run; True if the run is made again after the rest.

        The single run of a handler that may not run a second time has an outcome.
        """
        if run.unavailable is None:
            self._ended(run)
            return False
        is_over = outcome is not None
        self.begin(run, () if is_over else (run,))
        return not is_over

    def _ended(self, run: Run) -> None:
        """A run of a handler that rests has ended in another way."""
        queue, rest = run.queue, run.queue.quota.rest
        if rest is None:
            return
        if run in rest.older:
            rest.older.discard(run)
            queue.allow(queue.quota.allowed)
            return
        queue.quota.rest = None
        queue.allow(queue.quota.allowed)
        self.stop_timer_of(queue)
        seconds = asyncio.get_running_loop().time() - rest.since
        logger.info(
            "handler %r goes on after a rest of %.1f s", queue.handler.name, seconds,
            handler=queue.handler.name, seconds=round(seconds, 3),
        )  # fmt: skip
        self._go_on(queue)

    # --- rows ----------------------------------------------------------------------------------

    def _put_back(self, queue: HandlerQueue, rows: Sequence[Run]) -> None:
        """Make rows ready again, before all ready rows. Rows that may not start here any more are released."""
        kept: list[Run] = []
        for row in rows:
            if self._may_wait(row):
                row.begin_again()
                kept.append(row)
            else:
                self._settler.end(row, None)
        if not kept:
            return
        if queue.spec.batch is None:
            queue.ready.extendleft(reversed(kept))
            self._state.ready += len(kept)
        else:
            queue.ready.appendleft(BatchRun.of(kept))
            self._state.ready += 1
        self._state.quiet.clear()

    def _may_wait(self, row: Run) -> bool:
        """True if the row may start in this process later. A record of a start would accuse a row that waits."""
        notification = row.notification
        cursor = self._cursors.by_slot.get((notification.handler_name, notification.partition_number))
        is_ours = cursor is not None and cursor.lease is row.lease and not cursor.is_paused
        return is_ours and not (row.queue.is_watched or self._state.is_stopping)

    # --- time ----------------------------------------------------------------------------------

    def _set_timer(self, queue: HandlerQueue, rest: Rest) -> None:
        self.stop_timer_of(queue)
        self._timers[queue] = asyncio.get_running_loop().call_at(rest.until, self._is_over, queue, rest)

    def _is_over(self, queue: HandlerQueue, rest: Rest) -> None:
        """The time of a rest is over: let a single run try the service."""
        if rest.until > asyncio.get_running_loop().time():  # a run that began before the rest has asked for more
            self._set_timer(queue, rest)
            return
        del self._timers[queue]
        rest.is_probing = True
        queue.allow(queue.quota.allowed)
        self._go_on(queue)

    def _go_on(self, queue: HandlerQueue) -> None:
        self._scheduler.enlist(queue)
        self._state.signals.find.set()
        self._scheduler.call()

    def stop_timer_of(self, queue: HandlerQueue) -> None:
        """Let the rest of a handler end no more by itself."""
        if (timer := self._timers.pop(queue, None)) is not None:
            timer.cancel()

    def stop_timer(self) -> None:
        """The dispatcher stops."""
        for queue in tuple(self._timers):
            self.stop_timer_of(queue)


def _wanted(error: Unavailable) -> float | None:
    """The seconds that an error asks for. A subclass may hold any value."""
    try:
        return None if error.retry_in is None else max(parse_duration(error.retry_in).total_seconds(), SHORTEST / 10)
    except Exception:
        return None
