"""Outcomes that the database has refused because the handler's lock was lost before the write (decision 21).

The runs of refused outcomes have ended, and need not be repeated while the rows are unchanged. Another process may
have run a row meanwhile, but if that process has settled the row, the row has changed. So when this process holds the
lock again and finds a row unchanged, the outcome is written under the new term, and the handler is not called. Without
this, two processes would take turns for ever to run a handler that blocks the event loop, and so loses the lock.

``next_retry_at`` shows if a row is unchanged: a retry and an operator's order write a new ``next_retry_at``.
"""

from __future__ import annotations

from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.notification import Notification, State
from outboxio.model.outcome import Lease, Outcome
from outboxio.runs.run import Run

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
