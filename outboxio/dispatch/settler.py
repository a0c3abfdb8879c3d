"""The settler: outcomes -> buckets -> settled rows, equal outcomes with one UPDATE.

An outcome is never lost while this process is alive: outcomes that could not be written come first in the next round.
The database can reject an outcome for two reasons:

* A value cannot be stored. The bucket is split into halves until the row is found, which is then settled without the
  value.
* The lease is no longer the newest, or the row is already settled (the fence, decision 3). The outcome is remembered
  (decision 21): if this process reacquires the lock and finds the row unchanged, it writes the outcome without another
  run.

Buckets are written one after the other. A crash between two of them must leave no row of an ordering key finished
behind an unfinished row, so the later rows of a key wait for a bucket that could not be written (decision 50).
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from heapq import heappop, heappush

from outboxio.dispatch.state import Shared
from outboxio.errors import InvalidEvent, ShutdownError
from outboxio.loops.loop import RoundResult
from outboxio.model.emitter import notify_watchers
from outboxio.model.notification import DYING, State
from outboxio.model.outcome import Bucket, Outcome, QueueKey, in_buckets
from outboxio.runs.run import RefusedOutcomes, Run
from outboxio.support import machine
from outboxio.support.aio import Alarm
from outboxio.support.log import Fields, log_of, log_text, type_name

logger = log_of(__name__)

FIND_AGAIN = 1.0  # seconds until a row is read again after a run without an outcome


class Settler:
    """Collects and writes the outcomes of a shard."""

    def __init__(self, shared: Shared) -> None:
        self.refused = RefusedOutcomes()
        self.waiting: list[Outcome] = []
        """Outcomes that have yet to be written."""
        self.writing: list[Bucket] = []
        """The buckets of the current round that are not written yet."""
        self._setup = shared.setup
        self._batch = shared.setup.settings.outcome_batch
        self._state = shared.state
        self._in_flight = shared.in_flight
        self._cursors = shared.in_flight.cursors
        self._invoker = shared.invoker
        self._guard = shared.guard
        self._wakeups = shared.wakeups
        self._timer: asyncio.TimerHandle | None = None
        self._retries: list[float] = []
        """A heap of the event loop times at which retries are due before the next poll."""
        self._retry_alarm = Alarm(self._find_retries)
        self._settling = asyncio.Lock()

    @property
    def is_overloaded(self) -> bool:
        """True if outcomes are produced faster than the database can write them."""
        return len(self.waiting) > 4 * self._batch + self._setup.settings.handling_batch_size

    # --- collecting outcomes -------------------------------------------------------------------

    def add(self, outcome: Outcome) -> None:
        """Write an outcome soon: once there are ``outcome_batch``, after ``outcome_delay``, or when no run is left."""
        self.waiting.append(outcome)
        state = self._state
        if len(self.waiting) == self._batch or (not state.running and state.nothing_follows):
            state.signals.settle.set()
        elif self._timer is None:
            delay = self._setup.settings.outcome_delay.total_seconds()
            self._timer = asyncio.get_running_loop().call_later(delay, state.signals.settle.set)

    def end(self, row: Run, outcome: Outcome | None) -> None:
        """End the run of a row. Without an outcome, an unsettled row is due as before."""
        if row.is_settled:
            final = row.final_outcome
            self._state.counters.count(State.SUCCEEDED if final is None else final.state, 1)
            self._in_flight.release(row)
            self._rows_ended()
        elif outcome is None:
            self._in_flight.release(row)
            self._cursors.sweep_soon(row.lease.slot)
            self._find_again_soon()
        else:
            if row.key is not None and row.queue.spec.follows:
                outcome.queue_key = (id(row.queue), row.key)
            self.add(outcome)

    def wake_if_gathered(self) -> None:
        """Write the collected outcomes if no more are expected soon."""
        if self.waiting and self._state.nothing_follows:
            self._state.signals.settle.set()

    def _rows_ended(self) -> None:
        """Start rows that waited for settled rows."""
        if self._in_flight.keys.has_moved or self._guard.is_holding:
            self._state.signals.find.set()

    def _find_again_soon(self) -> None:
        """Find a row again in 1 s, and not at once, because another process may be working on it."""
        if not self._state.is_stopping:
            self._state.find_alarm.set(asyncio.get_running_loop().time() + FIND_AGAIN)

    # --- writing outcomes ----------------------------------------------------------------------

    async def settle_once(self) -> RoundResult:
        """Write waiting outcomes, at most about a batch. Rounds do not overlap."""
        async with self._settling:
            self._stop_delay()
            size = self._batch * 2
            batch, self.waiting = self.waiting[:size], self.waiting[size:]
            more = bool(self.waiting)
            self.writing = in_buckets(batch)
            problem: Exception | None = None
            unwritten: list[Outcome] = []
            try:
                while self.writing:
                    try:
                        self.writing[:1] = await self._settle(self.writing[0])
                    except Exception as error:
                        if self._setup.database.is_unreachable(error):
                            raise
                        problem = error  # the error only affects this bucket, so the next ones are written
                        failed = self.writing[0]
                        unwritten += failed.outcomes + self._take_behind(failed.queue_keys)
                        del self.writing[0]
            finally:
                # Outcomes that were not written come first in the next round.
                left = unwritten + [outcome for bucket in self.writing for outcome in bucket.outcomes]
                self.waiting[:0] = left
                self.writing = []
                if len(left) < len(batch):
                    self._rows_ended()
                    self.wake_finding_if_starved()
            if problem is not None:
                raise problem
        if self._guard.is_active:
            await self._guard.clear()
        return RoundResult(len(batch), more=more or len(self.waiting) >= self._batch)

    def wake_finding_if_starved(self) -> None:
        """Begin a find round if a slot has a backlog, because finding pauses while too many outcomes wait."""
        if any(cursor.has_backlog and cursor.queue.wants_more for cursor in self._cursors):
            self._state.signals.find.set()

    async def _settle(self, bucket: Bucket) -> list[Bucket]:
        """Write a bucket; return what is still to be written of it.

        That is nothing, or both halves of the bucket, in order to isolate a value that the database rejects.
        """
        takes, notifications = self._cursors.takes, self._setup.database.notifications
        began = machine.perf_counter()
        try:
            if bucket.emitted:
                settled = await self._settle_emitting(bucket)
            else:
                settled = await notifications.settle(bucket, self._setup.clock())
        except Exception as error:
            if not (isinstance(error, InvalidEvent) or self._setup.database.refuses_value(error)):
                raise
            if len(bucket.outcomes) > 1:
                return list(bucket.halves())
            refused = bucket.outcomes[0]
            bucket, settled = await self._settle_without_value(refused, error)
            if bucket.state is not refused.state:
                self._release_behind(bucket.queue_keys)
        self._setup.statistics.settles.add(machine.perf_counter() - began)
        if settled < len(bucket.outcomes):
            if bucket.emitted and len(bucket.outcomes) > 1:
                return list(bucket.halves())
            self._refuse(bucket, len(bucket.outcomes) - settled, is_same_term=takes == self._cursors.takes)
        if not bucket.is_deferral:
            self._state.counters.count(bucket.state, settled)
        if bucket.state in (State.FAILED, DYING):
            self._wake_when_due(min(outcome.next_retry_at or datetime.max for outcome in bucket.outcomes))
        self._in_flight.forget(bucket.ids)
        return []

    async def _settle_emitting(self, bucket: Bucket) -> int:
        """Write outcomes together with the events that the handlers emitted (decision 6)."""
        settled = await self._setup.database.notifications.settle_emitting(bucket, self._setup.clock())
        if settled:
            self._wakeups.committed()
            for action, events in bucket.emitted:
                self._setup.context.emitter.count(events)
                notify_watchers(action, events)
        return settled

    async def _settle_without_value(self, refused: Outcome, error: Exception) -> tuple[Bucket, int]:
        """Write an outcome without a value that the database rejects. A run whose events are rejected has failed."""
        reason = log_text(error, self._invoker.redact)
        run, outcome = self._in_flight.rows.get(refused.notification_id), refused
        fields: Fields = {} if run is None else run.log_fields
        fields["notification_id"] = refused.notification_id
        logger.error(
            "the database rejected a value of notification %s: %s", refused.notification_id, reason,
            **fields, state=refused.state, error_type=type_name(error),
        )  # fmt: skip
        if refused.emitted is not None and run is not None:
            outcome = self._invoker.classifier(run, error)
            outcome.queue_key = refused.queue_key
            run.queue.statistics.count(outcome)
        (bucket,) = in_buckets([outcome.without_error_text()])
        if bucket.emitted:
            return bucket, await self._settle_emitting(bucket)
        return bucket, await self._setup.database.notifications.settle(bucket, self._setup.clock())

    def _wake_when_due(self, due: datetime) -> None:
        """Schedule a find round for a retry that is due before the next poll."""
        delay = (due - self._setup.clock()).total_seconds()
        if delay < self._setup.settings.handling_poll_delay.total_seconds():
            heappush(self._retries, asyncio.get_running_loop().time() + max(delay, 0) + 0.001)
            self._retry_alarm.set(self._retries[0])

    def _find_retries(self) -> None:
        heappop(self._retries)
        if self._retries:
            self._retry_alarm.set(self._retries[0])
        self._state.signals.find.set()

    def _refuse(self, bucket: Bucket, number: int, *, is_same_term: bool) -> None:
        """Process the rejection of some outcomes of a bucket. It is unknown which ones, so all are remembered.

        A row behind the head of its ordering key is run again instead, because the head may fail in another process.

        ``is_same_term``: False if a lock was reacquired while the bucket was being written.
        """
        for outcome in bucket.outcomes:
            run = self._in_flight.rows.get(outcome.notification_id)
            if run is not None and (outcome.queue_key is None or self._in_flight.keys.is_head(run, outcome.queue_key)):
                self.refused.remember(run, outcome, outcome.lease.term if is_same_term else None)
        self._state.counters.refused += number
        for lease in bucket.leases:
            self._cursors.sweep_soon(lease.slot)
        logger.warning(
            "%d of %d outcomes (%s) were rejected: another process has taken over %s, or the rows are already "
            "settled",
            number, len(bucket.outcomes), bucket.state, ", ".join(str(lease.slot) for lease in bucket.leases),
            refused=number, state=bucket.state,
        )  # fmt: skip
        if not is_same_term:
            self._release_behind(bucket.queue_keys)  # otherwise the later rows would be admitted
        self._find_again_soon()

    def _take_behind(self, queue_keys: set[QueueKey]) -> list[Outcome]:
        """Remove the later rows of these keys from the buckets after the first."""
        if not queue_keys:
            return []
        current, *buckets = self.writing
        behind = [outcome for bucket in buckets for outcome in bucket.outcomes if outcome.queue_key in queue_keys]
        if behind:
            kept = (
                [outcome for outcome in bucket.outcomes if outcome.queue_key not in queue_keys] for bucket in buckets
            )
            self.writing = [current, *(Bucket(some[0].state, some[0].attempts, some) for some in kept if some)]
        return behind

    def _release_behind(self, queue_keys: set[QueueKey]) -> None:
        """Release the later rows of keys whose row was not settled with the outcome of its run. They run again."""
        if not queue_keys:
            return
        behind = self._take_behind(queue_keys) + [
            outcome for outcome in self.waiting if outcome.queue_key in queue_keys
        ]
        self.waiting = [outcome for outcome in self.waiting if outcome.queue_key not in queue_keys]
        self._in_flight.forget([outcome.notification_id for outcome in behind])
        for outcome in behind:
            self._cursors.sweep_soon(outcome.lease.slot)
        self._find_again_soon()

    # --- the end -------------------------------------------------------------------------------

    def stop_timer(self) -> None:
        self._retry_alarm.cancel()
        self._stop_delay()

    def _stop_delay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def settle_all(self, deadline: float, *, patience: float) -> None:
        """Write every outcome before a deadline (event loop time), pausing 0.05 to 1 s after failures.

        Each round may take ``patience`` seconds, even after the deadline. Raises :class:`ShutdownError` if outcomes are
        still unwritten at the deadline.
        """
        loop, pause = asyncio.get_running_loop(), 0.05
        while True:
            try:
                async with asyncio.timeout_at(max(deadline, loop.time() + patience)):
                    await self.settle_once()
                if not self.waiting:
                    return
            except Exception as error:
                if loop.time() + pause > deadline:
                    unwritten = [outcome for bucket in self.writing for outcome in bucket.outcomes] + self.waiting
                    if not unwritten:
                        logger.warning(
                            "could not delete the start records of finished runs: %s",
                            log_text(error, self._invoker.redact), error_type=type_name(error),
                        )  # fmt: skip
                        return
                    raise ShutdownError([outcome.notification_id for outcome in unwritten]) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
