"""The event of a row in a bootstrap."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from outboxio.model.payloads.classes import AnyEvent

if TYPE_CHECKING:
    from outboxio.transaction import Transaction


class Snapshot(Struct, frozen=True):
    """The event of a row in a bootstrap, with the same parameters of ``tx.emit`` as the row's other events.

    ``model_id`` defaults to the row's key, and ``ordering_key`` to ``model_id``.

    Example::

        def to_event(row: Mapping[str, Any]) -> Snapshot:
            return Snapshot(OrderChanged(row["id"], row["state"]), model_type="Order", ordering_key=row["customer_id"])
    """

    event: AnyEvent
    model_id: object = None
    model_type: str | None = None
    ordering_key: object = None


SnapshotRows: TypeAlias = "Callable[[Transaction, Any, int], Awaitable[Sequence[Mapping[str, Any]]]]"
ToEvent: TypeAlias = "Callable[[Any], AnyEvent | Snapshot | None]"
