"""Notifications: the delivery of an event to a handler, for dispatch and for operators.

The handoff: fan-out passes new rows directly to the dispatcher of the same process (decision 16), so that they need not
be read from the database. It only reduces latency. It is used for handlers without a backlog that are not ordered,
batched or transactional, and only if this process holds all partitions of the handler. All other rows, and rows for
which the handler has no capacity, are read from the database.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from operator import attrgetter
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.payloads.classes import any_marked, is_marked, version_in
from outboxio.support.clock import from_micros
from outboxio.support.codec import decode_object, nests_deeper
from outboxio.support.log import Fields, trace_id_in, type_name, without_value
from outboxio.telemetry.protocol import sampled_in_bytes, sampled_in_text


class State(StrEnum):
    """The state of a notification. The last four are terminal."""

    PENDING = "PENDING"
    FAILED = "FAILED"
    BLOCKED = "BLOCKED"
    DYING = "DYING"
    SUCCEEDED = "SUCCEEDED"
    EXPIRED = "EXPIRED"
    DEAD = "DEAD"
    SKIPPED = "SKIPPED"

    __hash__ = str.__hash__  # the enum's own hash is a slower Python function


# Reading a member from the class takes five times as long as a comparison.
DYING, PENDING, SUCCEEDED = State.DYING, State.PENDING, State.SUCCEEDED
TERMINAL = (State.SUCCEEDED, State.EXPIRED, State.DEAD, State.SKIPPED)


class Context(Struct, frozen=True, array_like=True):
    """The event and the action of a notification. Few handlers read all of the fields.

    The order of the fields is the order of the values in the array that every dialect's ``find_due`` selects.
    ``action_params`` and ``headers`` are JSON objects, or texts of JSON objects.
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
    """The columns of a due row that dispatch needs.

    The order of the fields is the order of the columns in every dialect's ``find_due``. ``payload`` is the text or the
    bytes of a JSON object, or ``None``. Times are microseconds since 1970, UTC, because drivers take 1 us to create a
    datetime. ``raw_context`` combines all values that a handler may never read in one column, because it takes the
    driver longer to decode the parts than the database to combine them.
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
    partition_number: int
    raw_context: Any
    flaw: str | None = None
    """Why the row is malformed. Such a row ends with this reason, and the handler is not called."""

    @property
    def next_retry_at(self) -> datetime:
        return from_micros(self.next_retry_us)

    @property
    def retention_from(self) -> datetime:
        return from_micros(self.retention_us)

    @property
    def context(self) -> Context:
        """The event and the action, decoded on first use."""
        if not isinstance(self.raw_context, Context):
            self.raw_context = _decode_context(self.raw_context)
        return self.raw_context

    @property
    def event_id(self) -> UUID:
        return self.context.event_id

    @property
    def event_label(self) -> str:
        """The event in a log line: the event's id, or the notification's id if the event's id is malformed."""
        return self.known_event_id or f"of notification {self.id}"

    @property
    def known_event_id(self) -> str | None:
        """The event's id, or ``None`` if it is malformed."""
        return str(self.event_id) if self.has_context else None

    @property
    def log_fields(self) -> Fields:
        """The fields of a log record about the row. Malformed parts are ``None``."""
        context = self.context if self.has_context else None
        return {
            "handler": self.handler_name,
            "event_id": None if context is None else context.event_id,
            "notification_id": self.id,
            "event_type": self.event_type or None,
            "attempt": self.attempts + 1,
            "action": None if context is None else context.action_name,
            "model_type": None if context is None else context.model_type,
            "model_id": None if context is None else context.model_id,
            "ordering_key": None if context is None else context.ordering_key,
            "correlation_id": None if context is None else context.correlation_id,
            "trace_id": None if context is None else _trace_id(context.headers),
        }

    @property
    def may_have_version(self) -> bool:
        """False if the row certainly has version 1, so that the context need not be decoded."""
        raw = self.raw_context
        return is_marked(raw.headers if isinstance(raw, Context) else raw)

    @property
    def may_be_sampled(self) -> bool:
        """False if the row certainly does not belong to a sampled trace.

        This decides nearly all rows in 0.3 us, without decoding. True also if other text in the row looks like the
        header; then the header itself must be read.
        """
        raw = self.raw_context
        if type(raw) is str:
            return sampled_in_text(raw) is not None
        return sampled_in_bytes(raw.headers if isinstance(raw, Context) else raw) is not None

    @property
    def version(self) -> int:
        """The version of the event. Raises :class:`InvalidEvent` for an invalid header."""
        return version_in(self.context.headers) if self.may_have_version else 1

    @property
    def has_context(self) -> bool:
        """True if the event and the action can be decoded."""
        return self.flaw_of_context is None

    @property
    def flaw_of_context(self) -> str | None:
        """Why the event and the action cannot be decoded, or ``None``."""
        try:
            self.context  # noqa: B018  # decodes the context and keeps it
        except Exception as error:
            return flaw_of(error, Context.__struct_fields__)
        return None


def _trace_id(headers: msgspec.Raw) -> str | None:
    """Return the id of the trace in which the event was emitted, from the header ``traceparent``."""
    try:
        return trace_id_in(decode_object(headers).get("traceparent"))
    except Exception:  # written by other tools
        return None


# For use with ``map`` on batches of rows: per-row Python code dominates the cost of a drain.
id_of = attrgetter("id")
slot_of = attrgetter("handler_name", "partition_number")
"""A row's stored handler name and partition."""
flaw_in = attrgetter("flaw")
_state_of, _context_of = attrgetter("state"), attrgetter("raw_context")


def are_ordinary(rows: Sequence[Notification]) -> bool:
    """Return True if no row is malformed or DYING, and all certainly have version 1."""
    if any(map(flaw_in, rows)) or DYING in map(_state_of, rows):
        return False
    return not any_marked(list(map(_context_of, rows)))


NO_CONTEXT = b"null"
"""A ``raw_context`` that cannot be decoded."""

_PATH = re.compile(r" - at `\$\[(\d+)\]`\Z")
_WHOLE_NUMBERS = ("attempts", "next_retry_us", "retention_us", "sequence", "partition_number")
_COLUMNS = {"next_retry_us": "next_retry_at", "retention_us": "retention_from"}


def flaw_of(error: Exception, fields: Sequence[str]) -> str:
    """Return the malformed column and the reason, without the value."""
    message = without_value(error) if isinstance(error, msgspec.ValidationError) else type_name(error)
    path = _PATH.search(message)
    if path is None:
        return message
    field = fields[int(path[1])]
    return f"{_COLUMNS.get(field, field)}: {message[: path.start()]}"


def checked(row: Notification) -> Notification:
    """Return the row, marked as malformed if a numeric column holds another value."""
    for field in _WHOLE_NUMBERS:
        if not isinstance(getattr(row, field), int):
            row.flaw = f"{_COLUMNS.get(field, field)}: not a number"
            setattr(row, field, 0)
    return row


def malformed(id: UUID, handler_name: str, flaw: str) -> Notification:
    """Return a due row of which only the id and the handler name are known, which is enough to end it."""
    return Notification(id, handler_name, "", None, State.PENDING, 0, 0, 0, 0, 0, NO_CONTEXT, flaw)


class NotificationRecord(Struct, frozen=True, kw_only=True):
    """A whole row of ``event_notifications``, from ``outbox.admin.list``."""

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
    partition_number: int
    shard: str


COPIED = (
    "namespace", "action_id", "action_name", "action_params", "started_date", "completion_date", "model_id",
    "model_type", "event_type", "payload", "event_date", "sequence", "correlation_id", "causation_id", "headers",
    "hops",
)  # fmt: skip
"""The columns that a notification copies from its event."""

DOCUMENTS = frozenset({"action_params", "payload", "headers"})
"""The columns of an event, and of its notifications, that may be large."""

_DOCUMENTS: Mapping[str, Any] = {"action_params": {}, "payload": None, "headers": None, "errors": []}
_DEEPEST_SHOWN = 100  # the limit of MySQL; printing or encoding a deeper document overflows the stack


def record_of(row: Mapping[str, Any], shard: str) -> NotificationRecord:
    """Return the record of a row whose documents are JSON texts. A document that cannot be shown becomes a note."""
    record = msgspec.convert({**row, **_DOCUMENTS, "shard": shard}, NotificationRecord)
    stored = {column: row[column] for column in _DOCUMENTS if row[column] is not None}
    return msgspec.structs.replace(record, **{column: shown_document(column, stored[column]) for column in stored})


def shown_document(column: str, text: str | None) -> Any:
    """Decode the document of a column. If that fails, return the text, or the reason."""
    if text is None:
        return None
    if nests_deeper(text.encode(), _DEEPEST_SHOWN):
        return _not_shown(column)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text  # operators need to see malformed text
    except RecursionError:
        return _not_shown(column)


def _not_shown(column: str) -> Any:
    """Return a note instead of a document that is nested too deeply, which only external writers store."""
    reason = f"the column {column} of this row is nested more than {_DEEPEST_SHOWN} levels deep; read it with SQL"
    if column == "errors":
        return [{"time": None, "type": "NotShown", "message": reason, "traceback": "", "attempt": None}]
    return {"not shown": reason}


Position = tuple[datetime, int]
"""A position in the index of due rows: (next_retry_at, sequence)."""

FIRST_POSITION: Position = (datetime.min, -1)  # RetryAfter may name any time in the past


FIRST_DEFERRED = datetime(9999, 12, 30)
"""The earliest ``next_retry_at`` of a deferred row. No other row has such a late time."""


def version_awaited(next_retry_at: datetime) -> int:
    """Return the event version that a row with this ``next_retry_at`` waits for."""
    return (next_retry_at - FIRST_DEFERRED) // timedelta(microseconds=1)


class DeferredQuery(Struct, frozen=True):
    """The deferred rows of a slot that become due: those up to ``until``, and those past their retention.

    ``before``: rows whose retention began earlier are past it.
    """

    handler_name: str
    partition: int
    until: datetime
    before: datetime


class DueQuery(Struct, frozen=True):
    """A read of due rows: at most ``limit`` rows of a partition of a handler name after a position."""

    handler_name: str
    limit: int
    after: Position = FIRST_POSITION
    partition: int = 0


class Handoff:
    """The rows that the dispatcher can take in a round of fan-out."""

    def __init__(
        self,
        names: Sequence[str],
        capacity: int,
        take: Callable[[Handoff, Sequence[Notification]], int],
        closed: Callable[[Handoff], None],
    ) -> None:
        self.names = names
        """The handler names whose rows may be handed over."""
        self.capacity = capacity
        """The number of rows that the dispatcher can take."""
        self.taken = 0
        """The number of rows that the dispatcher has taken."""
        self.settled: set[UUID] = set()
        """The rows that were settled during the round, because a row may be found and run before it is handed over."""
        self._take = take
        self._closed = closed

    def hand(self, rows: Sequence[Notification]) -> None:
        """Hand over rows, which start running immediately.

        Their transaction need not be committed yet, but none of its remaining statements may wait for a lock.
        """
        self.taken += self._take(self, rows)

    def close(self) -> None:
        """End the round of fan-out."""
        self._closed(self)
