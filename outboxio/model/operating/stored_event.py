"""Events as an operator sees the rows, and the tree of what an event has caused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.model.notification import State

#: The states of notifications, the worst first.
WORST_FIRST = (
    State.DEAD, State.EXPIRED, State.DYING, State.FAILED, State.BLOCKED, State.PENDING, State.SKIPPED, State.SUCCEEDED,
)  # fmt: skip


def worst_of(states: Mapping[str, int]) -> State | None:
    """The worst state with a notification; ``None`` if there is none."""
    return next((state for state in WORST_FIRST if states.get(state)), None)


class StoredEvent(Struct, frozen=True, kw_only=True):
    """A row of ``events``. Documents are shown as ``Outbox(redact=...)`` returns them. Dates are naive UTC."""

    id: UUID
    sequence: int
    event_type: str | None
    """``None`` for the sentinel event of an action that emitted nothing."""
    model_type: str | None
    model_id: str | None
    action_id: UUID
    action_name: str
    action_params: dict[str, object]
    payload: dict[str, object] | None
    headers: dict[str, object] | None
    event_date: datetime
    available_at: datetime | None
    is_delivered: bool
    """True if fan-out has made the notifications."""
    topic: str | None
    source: str | None
    ordering_key: str | None
    correlation_id: str | None
    causation_id: UUID | None
    hops: int
    shard: str


class TreeNode(Struct, frozen=True, kw_only=True):
    """An event in the tree of causation."""

    event: StoredEvent
    states: Mapping[str, int]
    """How many notifications of the event each state has."""
    children: tuple[TreeNode, ...]
    """The events that handlers of this event have emitted."""

    @property
    def worst(self) -> State | None:
        """The worst state of the event's notifications; ``None`` without notifications."""
        return worst_of(self.states)

    def __iter__(self) -> Iterator[TreeNode]:
        """This node, and all nodes below."""
        yield self
        for child in self.children:
            yield from child


class EventTree(Struct, frozen=True, kw_only=True):
    """The events of a chain of causation, from the first event down.

    Example::

        tree = await outbox.admin.tree(event_id)
        for node in tree.root:
            print("  " * node.event.hops, node.event.event_type, node.worst)
    """

    event_id: UUID
    """The event that was asked for."""
    root: TreeNode
    """The first event of the chain that is still stored."""
    number: int
    """The events in the tree."""
    is_complete: bool
    """False if the chain has more events than the tree shows."""
    is_purged_above: bool
    """True if the root has a cause that is no longer stored."""
