"""Notifications: "this handler is owed this event", as the dispatcher and as an operator see them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from msgspec import Struct


class State(StrEnum):
    """The life of a notification. The last four are terminal."""

    PENDING = "PENDING"
    FAILED = "FAILED"
    BLOCKED = "BLOCKED"
    DYING = "DYING"
    SUCCEEDED = "SUCCEEDED"
    EXPIRED = "EXPIRED"
    DEAD = "DEAD"
    SKIPPED = "SKIPPED"


class Notification(Struct, gc=False):
    """A due row, as far as dispatch needs it. JSON columns are text until somebody looks at them.

    The order of the fields is the order of the columns in every dialect's ``find_due``.
    """

    id: UUID
    event_id: UUID
    handler_name: str
    action_id: UUID
    action_name: str
    action_params: str
    started_date: datetime
    completion_date: datetime
    model_id: str | None
    model_type: str | None
    event_type: str
    payload: str | None
    event_date: datetime
    attempts: int
    next_retry_at: datetime
    retention_from: datetime
    sequence: int
    correlation_id: str | None
    causation_id: UUID | None
    headers: str | None
    hops: int


class NotificationRecord(Struct, frozen=True, kw_only=True):
    """One whole row of ``event_notifications``, as ``outbox.admin.list`` returns it."""

    id: UUID
    event_id: UUID
    handler_name: str
    namespace: str
    action_id: UUID
    action_name: str
    action_params: dict[str, object]
    started_date: datetime
    completion_date: datetime
    model_id: str | None
    model_type: str | None
    event_type: str
    payload: dict[str, object] | None
    event_date: datetime
    state: State
    attempts: int
    next_retry_at: datetime
    created_date: datetime
    updated_date: datetime
    sequence: int
    ordering_key: str | None
    priority: int
    errors: list[dict[str, object]]
    correlation_id: str | None
    causation_id: UUID | None
    headers: dict[str, object] | None
    hops: int
    retention_from: datetime
    shard: str


Position = tuple[datetime, int]
"""Where a handler's rows have been read up to: (next_retry_at, sequence)."""

BEGINNING: Position = (datetime(1900, 1, 1), -1)


class Wanted(Struct, frozen=True):
    """What the dispatcher asks for one handler name: so many due rows behind a position."""

    handler_name: str
    limit: int
    after: Position = BEGINNING
