"""Values for operators: searches for notifications, probes, operations, reports.

Every read is bounded: no statement reads all the rows that retention keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Generic, Literal, TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.operating.groups import PageCursor, Search
from outboxio.model.operating.operation import EventColumns, Operation

R = TypeVar("R")
P = TypeVar("P")

MISSED_REPORTS = 3
"""A process counts as alive until it has missed this many reports."""


class Found(Struct, Generic[R, P], frozen=True):
    """A page of matching rows, or of values taken from them."""

    rows: Sequence[R]
    next: P | None
    """The cursor of the next page; ``None`` after the last match. A page with a cursor may have few rows, if the read
    reached its bound."""


class Counted(Struct, frozen=True):
    """A bounded count."""

    number: int
    is_complete: bool
    """False if there may be more matches."""


class LastError(Struct, frozen=True):
    """The last error of a matching notification."""

    id: UUID
    event_id: UUID
    handler_name: str
    updated_date: datetime
    type: str
    message: str


class BulkOperation(Struct, frozen=True):
    """A bulk operation, as its worker carries it out."""

    kind: Literal["retry", "skip"]
    operation: UUID
    worker: str
    """The process that carries it out."""
    search: Search


class ChunkResult(Struct, frozen=True):
    """The result of a chunk of a bulk operation."""

    matched: int
    done: int
    refused: int
    next: PageCursor | None
    """The cursor of the next chunk; ``None`` after the last chunk."""
    is_ours: bool = True
    """False if the operation is no longer RUNNING, has a different worker, or should stop. Then nothing was changed."""


class DueFigures(Struct, frozen=True):
    """The unfinished notifications of a stored handler name. All counts are bounded."""

    handler_name: str
    due: int
    """PENDING, FAILED and DYING rows that are due now."""
    waiting: int
    """PENDING, FAILED and DYING rows that are due later: delayed, scheduled, or waiting for a retry."""
    oldest_due: datetime | None
    """The earliest due date of a row that is due now."""
    retrying: int = 0
    """Rows among ``waiting`` that have failed; the others are delayed or scheduled."""
    far: int = 0
    """Rows among ``waiting`` that are due in more than a year."""


class DeferredFigures(Struct, frozen=True):
    """The notifications of a stored handler name that are deferred until code with a newer event version runs."""

    handler_name: str
    event_type: str
    version: int
    number: int


class DeadFigures(Struct, frozen=True):
    """The DEAD and EXPIRED notifications of a stored handler name. All counts are bounded."""

    handler_name: str
    number: int
    recent: int
    """How many rows ended after a given time."""
    newest: datetime | None


class ParkedKey(Struct, frozen=True):
    """An ordering key that a DEAD or EXPIRED notification parks."""

    handler_name: str
    """The stored handler name of the notification that parks the key."""
    ordering_key: str
    id: UUID
    """The notification that parks the key."""
    event_id: UUID
    since: datetime
    """When the notification ended."""
    blocked: int
    """The BLOCKED rows behind it; a bounded count."""


class HandlerMinute(Struct, frozen=True, kw_only=True):
    """The runs of a handler within a minute, in one process or several."""

    handler_name: str
    minute_date: datetime
    succeeded: int
    failed: int
    dead: int
    expired: int
    skipped: int
    duration_us: int
    durations: tuple[int, ...]
    lags: tuple[int, ...]


class InstanceReport(Struct, frozen=True, kw_only=True):
    """A row of ``instance_reports``: the last report of a process in ``running()``."""

    instance: str
    """The name of the process in ``leases``."""
    version: str
    started_date: datetime
    last_seen_date: datetime
    delay_seconds: int
    report: msgspec.Raw
    """A JSON object."""

    def is_alive(self, now: datetime) -> bool:
        """Return True until the process has missed three reports. No other rule decides whether a process is alive."""
        return now - self.last_seen_date < MISSED_REPORTS * timedelta(seconds=max(1, self.delay_seconds))


class Taken(Struct, frozen=True):
    """An operation that this process has taken over."""

    operation: Operation
    reached: PageCursor | None
    """The cursor after the last chunk that was done."""


# --- the values behind the lists of events and actions --------------------------------------------


class EventSummary(EventColumns, frozen=True, kw_only=True):
    """A row of ``events`` for an operator."""

    action_params: msgspec.Raw
    payload: msgspec.Raw | None
    headers: msgspec.Raw | None
    started_date: datetime
    completion_date: datetime
    delivered: bool


class FoundAction(Struct, frozen=True):
    """An action with its events."""

    action_id: UUID
    newest: UUID
    """The newest matching event."""
    events: Sequence[EventSummary]
    """At most 20 events of the action, by sequence, without documents."""
    is_complete: bool
    """False if the action has more events."""


class ActionPageCursor(Struct, frozen=True, array_like=True):
    """A position in the list of actions: after the event with this id."""

    event: UUID
    large: tuple[UUID, ...] = ()
    """Actions on earlier pages with so many events that not all were checked."""
