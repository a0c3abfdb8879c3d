"""Notifications: "this handler is owed this event", as the dispatcher and as an operator see them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.clock import from_micros


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

    __hash__ = str.__hash__  # the enum's own is a function in Python


# To look a member up in its class takes five times as long as to compare it.
DYING, SUCCEEDED = State.DYING, State.SUCCEEDED
TERMINAL = (State.SUCCEEDED, State.EXPIRED, State.DEAD, State.SKIPPED)


class Context(Struct, frozen=True, array_like=True):
    """What a notification knows of its event and the action that caused it; few handlers look at all of it.

    The order of the fields is the order of the values in the array that every dialect's ``find_due`` selects.
    ``action_params`` and ``headers`` are JSON, as an object or as the text of one.
    """

    event_id: UUID
    action_id: UUID
    action_name: str
    action_params: msgspec.Raw
    started_date: datetime
    completion_date: datetime
    model_id: str | None
    model_type: str | None
    event_date: datetime
    correlation_id: str | None
    causation_id: UUID | None
    headers: msgspec.Raw
    hops: int
    ordering_key: str | None
    created_date: datetime


_decode_context = msgspec.json.Decoder(Context).decode


class Notification(Struct, gc=False):
    """A due row, as far as dispatch needs it.

    The order of the fields is the order of the columns in every dialect's ``find_due``. ``payload`` is the text or the
    bytes of a JSON object, or ``None``. Moments are microseconds since 1970, UTC, because drivers take 1 us to make a
    datetime. ``raw_context`` is one column for all that a handler may never look at: drivers take longer to decode its
    parts than databases take to put them together.
    """

    id: UUID
    handler_name: str
    event_type: str
    payload: Any
    state: str
    attempts: int
    next_retry_us: int
    retention_us: int
    sequence: int
    raw_context: Any

    @property
    def next_retry_at(self) -> datetime:
        return from_micros(self.next_retry_us)

    @property
    def retention_from(self) -> datetime:
        return from_micros(self.retention_us)

    @property
    def context(self) -> Context:
        """The event and the action, decoded when first asked for."""
        if not isinstance(self.raw_context, Context):
            self.raw_context = _decode_context(self.raw_context)
        return self.raw_context

    @property
    def event_id(self) -> UUID:
        return self.context.event_id


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


_DOCUMENTS: Mapping[str, Any] = {"action_params": {}, "payload": None, "headers": None, "errors": []}


def record_of(row: Mapping[str, Any], shard: str) -> NotificationRecord:
    """A row that came as JSON. Documents stay as they are: an operator wants to see what is malformed, too."""
    record = msgspec.convert({**row, **_DOCUMENTS, "shard": shard}, NotificationRecord)
    return msgspec.structs.replace(record, **{column: row[column] for column in _DOCUMENTS})


Position = tuple[datetime, int]
"""Where a handler's rows have been read up to: (next_retry_at, sequence)."""

BEGINNING: Position = (datetime(1900, 1, 1), -1)


class Wanted(Struct, frozen=True):
    """What the dispatcher asks for one handler name: so many due rows behind a position."""

    handler_name: str
    limit: int
    after: Position = BEGINNING
