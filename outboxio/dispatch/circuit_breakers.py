"""Circuit breakers: pause a handler while a service that it needs is unavailable (decision 49).

A run that raises :class:`~outboxio.Unavailable` uses no attempt and writes no row: its rows return to the front of the
ready rows in memory. The circuit of the handler opens for 0.1 s, or for as long as the error says. Then a single run
probes the service (half-open). If it raises ``Unavailable`` too, the circuit stays open twice as long, up to 30 s. Any
other outcome closes the circuit, and all runs continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outboxio.dispatch.core import Core
from outboxio.errors import Unavailable
from outboxio.model.outcome import Outcome
from outboxio.runs.handler_queue import HandlerQueue, OpenCircuit
from outboxio.runs.run import BatchRun, Run
from outboxio.support.duration import parse_duration
from outboxio.support.log import log_of, log_text

logger = log_of(__name__)

SHORTEST, LONGEST = 0.1, 30.0  # seconds that a circuit stays open if the error names no time


class CircuitBreakers:
    """Open and close the circuits of the handlers of a shard."""

    def __init__(self, core: Core) -> None:
        self._state = core.state
        self._cursors = core.in_flight.cursors
        self._scheduler = core.scheduler
        self._settler = core.settler
        self._redact = core.setup.context.redact
        self._timers: dict[HandlerQueue, asyncio.TimerHandle] = {}

    # --- a run has ended -----------------------------------------------------------------------

    def begin(self, run: Run, rows: Sequence[Run], *, progressed: bool = False) -> None:
        """Open the circuit after a run raised ``Unavailable``, and put ``rows`` back.

        ``progressed``: other rows of the same call have an outcome, so the service was available just before.
        """
        queue, error = run.queue, run.unavailable
        assert error is not None
        queue.statistics.unavailable += 1
        now, circuit = asyncio.get_running_loop().time(), queue.quota.circuit
        pause = _retry_delay(error)
        if circuit is None:
            circuit = queue.quota.circuit = OpenCircuit(log_text(error, self._redact), now)
            logger.warning(
                "handler %r: circuit breaker open (%s)", queue.handler.name, circuit.reason,
                **run.log_fields,
            )  # fmt: skip
        elif run in circuit.older:
            circuit.older.discard(run)
            circuit.until = max(circuit.until, now + (pause or 0.0))
            self._put_back(queue, rows)
            return
        else:
            circuit.reason = log_text(error, self._redact)
            circuit.step = SHORTEST if progressed else min(circuit.step * 2, LONGEST)
        circuit.older = set(queue.running)
        circuit.until = now + (circuit.step if pause is None else pause)
        circuit.is_probing = False
        queue.allow(queue.quota.allowed)
        self._put_back(queue, rows)
        self._set_timer(queue, circuit)

    def update(self, run: Run, outcome: Outcome | None) -> bool:
        """Open or close the circuit when a run ends; return True if the run is repeated later.

        A run of a handler with at-most-once delivery is not repeated, and has an outcome.
        """
        if run.unavailable is None:
            self._ended(run)
            return False
        has_outcome = outcome is not None
        self.begin(run, () if has_outcome else (run,))
        return not has_outcome

    def _ended(self, run: Run) -> None:
        """Close the circuit, if it is open, after a run that reached the service."""
        queue, circuit = run.queue, run.queue.quota.circuit
        if circuit is None:
            return
        if run in circuit.older:
            circuit.older.discard(run)
            queue.allow(queue.quota.allowed)
            return
        queue.quota.circuit = None
        queue.allow(queue.quota.allowed)
        self.stop_timer_of(queue)
        seconds = asyncio.get_running_loop().time() - circuit.since
        logger.info(
            "handler %r: circuit breaker closed after %.1f s", queue.handler.name, seconds,
            handler=queue.handler.name, seconds=round(seconds, 3),
        )  # fmt: skip
        self._resume(queue)

    # --- rows ----------------------------------------------------------------------------------

    def _put_back(self, queue: HandlerQueue, rows: Sequence[Run]) -> None:
        """Put rows back at the front of the ready rows. Rows that can no longer start here are released."""
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
        """Return True if the row may start in this process later. A start record would make a waiting row a suspect."""
        notification = row.notification
        cursor = self._cursors.by_slot.get((notification.handler_name, notification.partition_number))
        is_ours = cursor is not None and cursor.lease is row.lease and not cursor.is_paused
        return is_ours and not (row.queue.is_watched or self._state.is_stopping)

    # --- time ----------------------------------------------------------------------------------

    def _set_timer(self, queue: HandlerQueue, circuit: OpenCircuit) -> None:
        self.stop_timer_of(queue)
        self._timers[queue] = asyncio.get_running_loop().call_at(circuit.until, self._is_over, queue, circuit)

    def _is_over(self, queue: HandlerQueue, circuit: OpenCircuit) -> None:
        """Half-open the circuit: let a single run probe the service."""
        if (
            circuit.until > asyncio.get_running_loop().time()
        ):  # extended by a run that started before the circuit opened
            self._set_timer(queue, circuit)
            return
        del self._timers[queue]
        circuit.is_probing = True
        queue.allow(queue.quota.allowed)
        self._resume(queue)

    def _resume(self, queue: HandlerQueue) -> None:
        self._scheduler.enlist(queue)
        self._state.signals.find.set()
        self._scheduler.call()

    def stop_timer_of(self, queue: HandlerQueue) -> None:
        """Cancel the timer that half-opens the circuit of a handler."""
        if (timer := self._timers.pop(queue, None)) is not None:
            timer.cancel()

    def stop_timer(self) -> None:
        """Cancel all timers, because the dispatcher stops."""
        for queue in tuple(self._timers):
            self.stop_timer_of(queue)


def _retry_delay(error: Unavailable) -> float | None:
    """Return the delay of the error in seconds, or ``None``. A subclass may hold any value."""
    try:
        return None if error.retry_in is None else max(parse_duration(error.retry_in).total_seconds(), SHORTEST / 10)
    except Exception:
        return None
