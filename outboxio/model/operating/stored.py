"""Actions as an operator sees the rows of their events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.model.notification import State


class EmittedEvent(Struct, frozen=True, kw_only=True):
    """An event of an action, without its documents."""

    id: UUID
    sequence: int
    event_type: str
    model_type: str | None
    model_id: str | None
    ordering_key: str | None
    is_delivered: bool
    """True if fan-out has made the notifications."""
    states: Mapping[str, int]
    """How many notifications of the event each state has."""

    @property
    def worst(self) -> State | None:
        """The worst state of the event's notifications; ``None`` without notifications."""
        return worst_of(self.states)


class StoredAction(Struct, frozen=True, kw_only=True):
    """An executed action, as its events tell. Dates are naive UTC.

    Example::

        for action in await outbox.admin.actions():
            print(action.started_date, action.name, "did nothing" if action.is_empty else action.worst)
    """

    id: UUID
    name: str
    started_date: datetime
    completion_date: datetime
    correlation_id: str | None
    causation_id: UUID | None
    """The event whose handler has executed the action; ``None`` for an action of the application."""
    hops: int
    source: str | None
    events: tuple[EmittedEvent, ...]
    """The events in the order in which the action emitted the events; at most 20."""
    is_complete: bool
    """False if the action has more events."""
    shard: str

    @property
    def is_empty(self) -> bool:
        """True if the action emitted nothing."""
        return not self.events

    @property
    def worst(self) -> State | None:
        """The worst state of all notifications of the action's events; ``None`` without notifications."""
        return worst_of({str(event.worst): 1 for event in self.events if event.worst is not None})


# --- events as an operator sees the rows, and the tree of what an event has caused ----------------


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
