"""Rows of ``events`` and ``event_notifications`` with any values, written by SQL, as an operator could."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from itertools import count
from typing import Any
from uuid import UUID

from outboxio.support.ids import uuid7
from tests.kit.app import Look

EPOCH = datetime(2030, 1, 1, 12)  # the time of the `clock` fixture
AT_ONCE = 200
"""Rows of a statement."""

ACTION = UUID(int=1)

_sequences = count(1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A notification. The fields are columns."""

    id: UUID = field(default_factory=uuid7)
    event_id: UUID = field(default_factory=uuid7)
    handler_name: str = "ledger"
    namespace: str = "app"
    action_id: UUID = ACTION
    action_name: str = "Deposit"
    action_params: str = "{}"
    started_date: datetime = EPOCH
    completion_date: datetime = EPOCH
    model_id: str | None = None
    model_type: str | None = None
    event_type: str = "MoneyDeposited"
    payload: str | None = "{}"
    event_date: datetime = EPOCH
    state: str = "PENDING"
    attempts: int = 0
    next_retry_at: datetime = EPOCH
    created_date: datetime = EPOCH
    updated_date: datetime = EPOCH
    sequence: int = field(default_factory=lambda: next(_sequences))
    ordering_key: str | None = None
    priority: int = 0
    errors: str = "[]"
    correlation_id: str | None = None
    causation_id: UUID | None = None
    headers: str | None = "{}"
    hops: int = 0
    retention_from: datetime = EPOCH
    partition_number: int = 0

    def but(self, **values: Any) -> Row:
        """A new row with further values."""
        fresh = {"id": uuid7(), "event_id": uuid7(), "sequence": next(_sequences)}
        return replace(self, **(fresh | values))


@dataclass(frozen=True, kw_only=True)
class EventRow:
    """An event. The fields are columns; the database gives the sequence."""

    id: UUID = field(default_factory=uuid7)
    namespace: str = "app"
    action_id: UUID = ACTION
    action_name: str = "Deposit"
    action_params: str = "{}"
    started_date: datetime = EPOCH
    completion_date: datetime = EPOCH
    model_id: str | None = None
    model_type: str | None = None
    event_type: str | None = "MoneyDeposited"
    payload: str | None = "{}"
    event_date: datetime = EPOCH
    delivered: bool = True
    ordering_key: str | None = None
    topic: str | None = None
    source: str | None = None
    correlation_id: str | None = None
    causation_id: UUID | None = None
    headers: str | None = "{}"
    available_at: datetime | None = None
    hops: int = 0


async def insert(look: Look, rows: Iterable[Row | EventRow]) -> None:
    """Write rows of one kind."""
    rows = list(rows)
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        table = "event_notifications" if isinstance(some[0], Row) else "events"
        columns = [column.name for column in fields(some[0])]
        values = ", ".join(_values(look, [getattr(row, column) for column in columns]) for row in some)
        await look.fetch(f"INSERT INTO {{{table}}} ({', '.join(columns)}) VALUES " + values)


def _values(look: Look, values: Sequence[Any]) -> str:
    return f"({', '.join(_literal(look, value) for value in values)})"


def _literal(look: Look, value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int):
        return str(value)
    text = value.isoformat(" ", "microseconds") if isinstance(value, datetime) else str(value)
    if look.driver == "aiomysql":
        text = text.replace("\\", "\\\\")
    return "'" + text.replace("'", "''") + "'"


def at(seconds: float) -> datetime:
    """The time this many seconds after the start of the test."""
    return EPOCH + timedelta(seconds=seconds)
