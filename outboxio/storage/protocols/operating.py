"""The protocols behind what operators see and order: search for notifications, probes, operations, reports.

Every read is bounded: no statement reads all the rows that retention keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Generic, Literal, TypeVar
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.operating.groups import Place, Search
from outboxio.model.operating.operation import EventColumns, Operation

R = TypeVar("R")
P = TypeVar("P")

SILENT_REPORTS = 3
"""A process counts as alive until so many of its reports are missing."""


class Found(Struct, Generic[R, P], frozen=True):
    """A page of matching rows, or of what is shown of them."""

    rows: Sequence[R]
    next: P | None
    """The place after which to go on; ``None`` after the last match. A page may have few rows and a place: the read
    ended at its bound."""


class Counted(Struct, frozen=True):
    """A bounded count."""

    number: int
    is_complete: bool
    """False if there are more matches, or there may be."""


class LastError(Struct, frozen=True):
    """The last error of a matching notification."""

    id: UUID
    event_id: UUID
    handler_name: str
    updated_date: datetime
    type: str
    message: str


class BulkOrder(Struct, frozen=True):
    """A bulk order, as the worker carries the order out."""

    kind: Literal["retry", "skip"]
    operation: UUID
    worker: str
    """The process that carries the order out."""
    search: Search


class Piece(Struct, frozen=True):
    """The result of a piece of a bulk order."""

    matched: int
    done: int
    refused: int
    next: Place | None
    """The place after which the next piece begins; ``None`` after the last piece."""
    is_ours: bool = True
    """False if the operation is not RUNNING any longer, has a different worker, or is to be stopped. Then nothing was
    changed."""


class DueFigures(Struct, frozen=True):
    """The unfinished notifications of a stored handler name. All numbers are counted up to a bound."""

    handler_name: str
    due: int
    """PENDING, FAILED and DYING rows that are due now."""
    waiting: int
    """PENDING, FAILED and DYING rows that are due later: delayed, scheduled, or waiting for a retry."""
    oldest_due: datetime | None
    """The earliest due date of a row that is due now."""
    retrying: int = 0
    """Rows among ``waiting`` that have failed; the rest is delayed or scheduled."""
    far: int = 0
    """Rows among ``waiting`` that are due in more than a year."""


class DeferredFigures(Struct, frozen=True):
    """The notifications of a stored handler name that wait for code with a newer version of an event."""

    handler_name: str
    event_type: str
    version: int
    number: int


class DeadFigures(Struct, frozen=True):
    """The DEAD and EXPIRED notifications of a stored handler name, counted up to a bound."""

    handler_name: str
    number: int
    recent: int
    """The number of rows that ended after a given moment."""
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
    """The moment at which the notification ended."""
    blocked: int
    """The BLOCKED rows behind, counted up to a bound."""


class HandlerMinute(Struct, frozen=True, kw_only=True):
    """The runs of a handler within a minute in one process, or in several."""

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
    """A row of ``instance_reports``: a process in ``running()``, by its own report."""

    instance: str
    """The name of the process in ``leases``."""
    version: str
    started_date: datetime
    last_seen_date: datetime
    delay_seconds: int
    report: msgspec.Raw
    """A JSON object."""

    def is_alive(self, now: datetime) -> bool:
        """True until three reports are missing. This is the only rule by which a process counts as alive."""
        return now - self.last_seen_date < SILENT_REPORTS * timedelta(seconds=max(1, self.delay_seconds))


class Taken(Struct, frozen=True):
    """An operation that this process carries out from now on."""

    operation: Operation
    reached: Place | None
    """The place after the last piece that was done."""


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
    place: UUID
    """The newest matching event."""
    events: Sequence[EventSummary]
    """Events of the action without documents, in the order of the sequence; at most 20."""
    is_complete: bool
    """False if the action has more events."""


class ActionPlace(Struct, frozen=True, array_like=True):
    """A place in the list of actions: behind the event with this id. JSON can hold a place."""

    event: UUID
    large: tuple[UUID, ...] = ()
    """The actions before the place with so many events that not all ids were read."""
