"""Runs: a run is a call of a handler for a notification or a batch, or a call of the hooks of a DYING row.

Refused outcomes: those that the database rejected because the lock was lost before they were written (decision 21).

Their runs have ended, and need not be repeated while the rows are unchanged. Another process may have run a row in
between, but if it has settled the row, the row has changed. So when this process holds the lock again and finds a row
unchanged, it writes the outcome under the new term without calling the handler. Otherwise two processes could take
turns endlessly to run a handler that blocks the event loop, because each of them loses the lock during the run.

``next_retry_at`` shows whether a row is unchanged: retries and operations write a new value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import IntEnum
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.errors import CancelledByOperator, Unavailable
from outboxio.model.notification import PENDING, Notification, State
from outboxio.model.outcome import FinalOutcome, Lease, Outcome
from outboxio.storage.protocols import Session
from outboxio.support.log import Fields

if TYPE_CHECKING:
    from outboxio.runs.handler_queue import HandlerQueue


class Phase(IntEnum):
    """How a started run is expected to end. After a phase above OVERDUE its worker takes no further run."""

    RUNNING = 0
    """The handler is within its deadline."""
    OVERDUE = 1
    """The handler was cancelled at its deadline, or by an operator."""
    INTERRUPTED = 2
    """The handler was cancelled because the process shuts down. The run uses up no attempt."""
    STUCK = 3
    """The handler has ignored its cancellation for longer than the grace period. Its result is discarded."""


RUNNING, OVERDUE, INTERRUPTED, STUCK = Phase.RUNNING, Phase.OVERDUE, Phase.INTERRUPTED, Phase.STUCK


class Run(Struct, eq=False, gc=False):
    """A notification that a handler processes, from when it was found until it is settled."""

    notification: Notification
    queue: HandlerQueue
    lease: Lease
    key: str | None = None
    """The ordering key, if the handler is ordered."""
    started: float = 0.0
    """When the timeout of the handler began (event loop time); 0.0 while it does not run."""
    phase: Phase = RUNNING
    cancelled_at: float | None = None
    """When the handler was cancelled (event loop time)."""
    is_clean: bool = True
    """False if the handler left changed context variables, which the next event would see."""
    has_begun: bool = False
    """True if the start of an at-most-once run is committed: the handler must not be called again."""
    is_settled: bool = False
    """True if the outcome is already committed, together with the rows that the handler wrote."""
    session: Session | None = None
    """The transaction in which the handler works, if the handler is transactional."""
    final_outcome: FinalOutcome | None = None
    """The final outcome of a DYING notification, whose hooks have not been called yet."""
    is_undecodable: bool = False
    """True if the event could not be decoded, so that the handler was not called."""
    task: asyncio.Task[None] | None = None
    unavailable: Unavailable | None = None
    """The error of a handler whose service is unavailable. The run is repeated once the circuit allows it."""
    cancelled_by: CancelledByOperator | None = None
    """Set if an operator has cancelled the run."""

    @property
    def called(self) -> Sequence[Run]:
        """The rows of the call in progress."""
        return (self,)

    @property
    def undone(self) -> Iterable[Run]:
        """The rows of this call that have no outcome yet."""
        return (self,)

    @property
    def log_fields(self) -> Fields:
        """The fields of a log entry about the run."""
        return {**self.notification.log_fields, "handler": self.queue.handler.name}

    @property
    def interrupted(self) -> bool:
        """True if the handler was cancelled by the shutdown."""
        return self.phase is INTERRUPTED

    @property
    def abandoned(self) -> bool:
        """True if the run was abandoned as stuck."""
        return self.phase is STUCK

    def exceed_deadline(self, now: float) -> None:
        """Record that the handler is cancelled at its deadline."""
        self.phase, self.cancelled_at = OVERDUE, now

    def cancel(self, error: CancelledByOperator, now: float) -> None:
        """Record that an operator cancels the handler. The run ends as at its deadline, with a different error."""
        self.exceed_deadline(now)
        self.cancelled_by = error

    def interrupt(self) -> None:
        """Record that the handler is cancelled because the process shuts down."""
        self.phase, self.cancelled_at = INTERRUPTED, 0.0

    def abandon(self) -> None:
        """Record that the handler ignores its cancellation."""
        self.phase = STUCK

    def resume(self) -> None:
        """Begin the next part of a call whose previous part was cancelled."""
        self.phase, self.cancelled_at, self.cancelled_by = RUNNING, None, None

    def begin_again(self) -> None:
        """Reset the run, so that it can start again."""
        self.resume()
        self.started, self.is_clean = 0.0, True
        self.session = self.task = self.unavailable = None

    def precedes(self, start_date: datetime) -> bool:
        """Return True if the event is older than ``start_date`` and the notification has had no run yet."""
        notification = self.notification
        is_untouched = notification.state == PENDING and not notification.attempts
        return is_untouched and notification.context.event_date < start_date


class HookRun(Run, eq=False, gc=False):
    """A call of the hooks of a DYING row. It occupies no worker."""


class BatchRun(Run, eq=False, kw_only=True, gc=False):
    """A call of a handler for many notifications, and the smaller calls into which a failed call is split."""

    remaining: dict[Run, None]
    parts: list[list[Run]]
    """The rows of the remaining calls. The next call comes last."""
    broken: set[str] = msgspec.field(default_factory=set[str])
    """Ordering keys of which a row has not succeeded. Later rows of these keys leave the batch unprocessed."""

    @classmethod
    def of(cls, rows: list[Run]) -> BatchRun:
        first = rows[0]
        return cls(first.notification, first.queue, first.lease, remaining=dict.fromkeys(rows), parts=[rows])

    @property
    def called(self) -> Sequence[Run]:
        untouched = {row for part in self.parts for row in part}
        return [row for row in self.remaining if row not in untouched]

    @property
    def undone(self) -> Iterable[Run]:
        return tuple(self.remaining)

    @property
    def log_fields(self) -> Fields:
        return {"handler": self.queue.handler.name, "batch_size": len(self.remaining)}


MOST_BYTES = 16 * 2**20  # of all remembered outcomes; the oldest ones are dropped first
BYTES_EACH = 1000  # estimate per outcome, without the emitted events


class RefusedOutcome(Struct, frozen=True):
    """A refused outcome, and the values by which its row is recognized as unchanged."""

    outcome: Outcome
    term: int | None
    """The term under which the outcome was rejected; ``None`` if the lock was reacquired during the write."""
    state: str
    attempts: int
    next_retry_us: int
    size: int

    def fits(self, row: Notification) -> bool:
        """Return True if the row is unchanged since the run."""
        found = (row.state, row.attempts, row.next_retry_us)
        return found == (self.state, self.attempts, self.next_retry_us)

    def was_under(self, lease: Lease) -> bool:
        """Return True if the outcome was rejected under this lease and term, which this process still trusts."""
        return self.outcome.lease is lease and self.term == lease.term

    def under(self, lease: Lease) -> Outcome:
        """Return the outcome for writing under a newer lease."""
        return msgspec.structs.replace(self.outcome, lease=lease)


class RefusedOutcomes:
    """The refused outcomes of a dispatcher, bounded by size."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._refused: dict[UUID, RefusedOutcome] = {}

    def __len__(self) -> int:
        return len(self._refused)

    def remember(self, run: Run, outcome: Outcome, term: int | None) -> None:
        """Keep the outcome of a run. ``term``: the term of the lease when the database rejected the outcome."""
        row = run.notification
        # An at-most-once run has committed its start: the row is PENDING with one attempt.
        state, attempts = (State.PENDING, 1) if run.has_begun else (row.state, row.attempts)
        self.forget(row.id)
        refused = RefusedOutcome(outcome, term, state, attempts, row.next_retry_us, _size_of(outcome))
        self._refused[row.id] = refused
        self._bytes += refused.size
        while self._bytes > self._most_bytes:
            self.forget(next(iter(self._refused)))

    def of(self, row: Notification) -> RefusedOutcome | None:
        """Return the outcome to write for a due row; ``None`` if the handler has to be called."""
        refused = self._refused.get(row.id)
        if refused is not None and not refused.fits(row):
            self.forget(row.id)
            return None
        return refused

    def forget(self, notification_id: UUID) -> None:
        refused = self._refused.pop(notification_id, None)
        if refused is not None:
            self._bytes -= refused.size


def _size_of(outcome: Outcome) -> int:
    events = [] if outcome.emitted is None else outcome.emitted[1]
    return BYTES_EACH + sum(BYTES_EACH + len(event.payload or "") for event in events)
