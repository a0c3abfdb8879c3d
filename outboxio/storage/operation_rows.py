"""The rows of ``operations``, as every dialect reads and writes the rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from outboxio.model.operating.filter import Place
from outboxio.model.operating.operation import Operation

#: The columns of an operation, in the order of :func:`operation_of`.
COLUMNS = (
    "id", "kind", "state", "matched", "done", "refused", "request", "actor", "origin", "reason", "created_date",
    "updated_date", "finished_date", "error",
)  # fmt: skip

NOBODY = ""
"""The worker of an operation that waits for the process that fans out."""

EVER = (datetime(9999, 1, 1), UUID(int=2**128 - 1))
"""The place before the newest operation."""


def operation_of(row: Sequence[Any], shard: str) -> Operation:
    """The operation of a row with the values of ``COLUMNS``. ``request`` is JSON text."""
    fields = dict(zip(COLUMNS, row, strict=True))
    request: dict[str, object] = msgspec.json.decode(fields["request"])
    return msgspec.convert({**fields, "request": request, "shard": shard}, Operation)


def place_of(reached: str | None) -> Place | None:
    """The place in the column ``reached``."""
    return None if reached is None else msgspec.json.decode(reached, type=Place)


def request_of(operation: Operation) -> str:
    """The JSON text for the column ``request``."""
    return msgspec.json.encode(operation.request).decode()


def key_of(namespace: str, id: UUID) -> dict[str, Any]:
    """The values by which a statement with names finds an operation."""
    return {"namespace": namespace, "id": str(id)}


def end_of(namespace: str, operation: Operation, worker: str) -> dict[str, Any]:
    """The values that the end of an operation writes, by the names of the columns."""
    return {
        **key_of(namespace, operation.id),
        "worker": worker,
        "state": operation.state.value,
        "matched": operation.matched,
        "done": operation.done,
        "refused": operation.refused,
        "updated_date": operation.updated_date,
        "finished_date": operation.finished_date,
        "error": operation.error,
    }


def values_of(namespace: str, operation: Operation, worker: str) -> dict[str, Any]:
    """The values of the whole row, by the names of the columns."""
    return {
        **end_of(namespace, operation, worker),
        "kind": operation.kind,
        "request": request_of(operation),
        "actor": operation.actor,
        "origin": operation.origin,
        "reason": operation.reason,
        "created_date": operation.created_date,
    }
