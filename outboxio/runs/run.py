"""Runs: a run is a call of a handler for a notification or a batch, or a call of the hooks of a verdict.

Outcomes that the database has refused because the handler's lock was lost before the write (decision 21).

The runs of refused outcomes have ended, and need not be repeated while the rows are unchanged. Another process may
have run a row meanwhile, but if that process has settled the row, the row has changed. So when this process holds the
lock again and finds a row unchanged, the outcome is written under the new term, and the handler is not called. Without
this, two processes would take turns for ever to run a handler that blocks the event loop, and so loses the lock.

``next_retry_at`` shows if a row is unchanged: a retry and an operator's order write a new ``next_retry_at``.
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
from outboxio.model.outcome import Lease, Outcome, Verdict
from outboxio.storage.protocols import Session
from outboxio.support.log import Fields

if TYPE_CHECKING:
    from outboxio.runs.handler_queue import HandlerQueue


class Phase(IntEnum):
    """How a run that has started is to end. After a phase above OVERDUE the worker takes no further run."""

    RUNNING = 0
    """The handler may take its time."""
    OVERDUE = 1
    """The handler was cancelled at its deadline, or by an operator."""
    INTERRUPTED = 2
    """The handler was cancelled because the process shuts down. The run uses up no attempt."""
    STUCK = 3
    """The handler ignores its cancellation for longer than its grace period. The result of the run is refused."""


RUNNING, OVERDUE, INTERRUPTED, STUCK = Phase.RUNNING, Phase.OVERDUE, Phase.INTERRUPTED, Phase.STUCK


class Run(Struct, eq=False, gc=False):
    """A notification on the way through a handler."""

    notification: Notification
    queue: HandlerQueue
    lease: Lease
    key: str | None = None
    """The ordering key, if the handler is ordered."""
    started: float = 0.0
    """When the handler's time began, by the event loop's clock. 0.0 while the handler's time does not count."""
    phase: Phase = RUNNING
    cancelled_at: float | None = None
    """When the handler was cancelled, by the event loop's clock."""
    is_clean: bool = True
    """False if the handler left context variables behind that the next event would find."""
    has_begun: bool = False
    """True if the start of an at-most-once run is committed: the handler must not be called again."""
    is_settled: bool = False
    """True if the outcome is committed already, together with the rows that the handler wrote."""
    session: Session | None = None
    """The transaction in which the handler works, if the handler is transactional."""
    verdict: Verdict | None = None
    """The verdict on the notification, if the hooks of the verdict are owed."""
    is_undecodable: bool = False
    """True if the event could not be decoded, so that the handler was not called."""
    task: asyncio.Task[None] | None = None
    unavailable: Unavailable | None = None
    """The error with which the handler has said that a service is away: the run is made again after a rest."""
    cancelled_by: CancelledByOperator | None = None
    """The error of a run that an operator has cancelled."""

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
        """The fields of a log entry about the run. A run of many rows has only the handler."""
        return {**self.notification.log_fields, "handler": self.queue.handler.name}

    @property
    def interrupted(self) -> bool:
        """True if shutdown has cancelled the handler."""
        return self.phase is INTERRUPTED

    @property
    def abandoned(self) -> bool:
        """True if the run was given up as stuck."""
        return self.phase is STUCK

    def exceed_deadline(self, now: float) -> None:
        """The handler is cancelled because the time is over."""
        self.phase, self.cancelled_at = OVERDUE, now

    def cancel(self, error: CancelledByOperator, now: float) -> None:
        """The handler is cancelled by an operator: the run ends as at its deadline, with a different error."""
        self.exceed_deadline(now)
        self.cancelled_by = error

    def interrupt(self) -> None:
        """The handler is cancelled because the process shuts down."""
        self.phase, self.cancelled_at = INTERRUPTED, 0.0

    def give_up(self) -> None:
        """The handler ignores the cancellation."""
        self.phase = STUCK

    def go_on(self) -> None:
        """The next part of a call begins. The former part exceeded the deadline, or was cancelled."""
        self.phase, self.cancelled_at, self.cancelled_by = RUNNING, None, None

    def begin_again(self) -> None:
        """The run waits for a new start, as if no run had been made."""
        self.go_on()
        self.started, self.is_clean = 0.0, True
        self.session = self.task = self.unavailable = None

    def precedes(self, beginning: datetime) -> bool:
        """True if the event is older than ``beginning`` and no run was made for the notification yet."""
        notification = self.notification
        is_untouched = notification.state == PENDING and not notification.attempts
        return is_untouched and notification.context.event_date < beginning


class HookRun(Run, eq=False, gc=False):
    """A call of the hooks that are owed for a verdict. A hook run takes no worker from the handler's own runs."""


class BatchRun(Run, eq=False, kw_only=True, gc=False):
    """A call of a handler for many notifications, and the smaller calls into which a failed call is split."""

    remaining: dict[Run, None]
    parts: list[list[Run]]
    """The rows of the calls that are still to be made. The next call comes last."""
    broken: set[str] = msgspec.field(default_factory=set[str])
    """Ordering keys of which a row has ended without success: the later rows of the key leave the batch untouched."""

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


MOST_BYTES = 16 * 2**20  # of all remembered outcomes; the oldest outcome is forgotten first
BYTES_EACH = 1000  # of an outcome, without the events that the handler emitted


class RefusedOutcome(Struct, frozen=True):
    """An outcome, and the row as after the run."""

    outcome: Outcome
    term: int | None
    """The term under which the outcome was refused; ``None`` if the lock was taken anew during the refused write."""
    state: str
    attempts: int
    next_retry_us: int
    size: int

    def fits(self, row: Notification) -> bool:
        """True if the row is unchanged since the run."""
        found = (row.state, row.attempts, row.next_retry_us)
        return found == (self.state, self.attempts, self.next_retry_us)

    def was_under(self, lease: Lease) -> bool:
        """True if the outcome was refused under this lease and term, although this process still trusts the lease."""
        return self.outcome.lease is lease and self.term == lease.term

    def under(self, lease: Lease) -> Outcome:
        """The outcome, to be written under a newer lease."""
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
        """Keep the outcome of a run. ``term``: the term of the lease when the database refused the outcome."""
        row = run.notification
        # An at-most-once run has committed the start: the row is PENDING with an attempt.
        state, attempts = (State.PENDING, 1) if run.has_begun else (row.state, row.attempts)
        self.forget(row.id)
        refused = RefusedOutcome(outcome, term, state, attempts, row.next_retry_us, _size_of(outcome))
        self._refused[row.id] = refused
        self._bytes += refused.size
        while self._bytes > self._most_bytes:
            self.forget(next(iter(self._refused)))

    def of(self, row: Notification) -> RefusedOutcome | None:
        """The outcome to write for a row that was found due; ``None`` if the handler has to be called."""
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
