"""The events that a test has emitted, in any outbox of the process, committed by outboxio or by the application."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast, overload
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.errors import InvalidEvent
from outboxio.model.emitter import watchers
from outboxio.model.event import ActionRecord, EventRecord, type_names
from outboxio.model.payloads.classes import AnyEvent, decoder_of
from outboxio.model.payloads.fields import field_names

E = TypeVar("E", bound=AnyEvent)
E_co = TypeVar("E_co", covariant=True)


class EmittedEvent(Struct, Generic[E_co], frozen=True, kw_only=True):
    """An emitted event with the columns of its row.

    ``event`` is the emitted object; a message of the inbox, which has none, shows the decoded JSON.
    """

    event: E_co
    event_id: UUID
    event_type: str
    namespace: str
    action_id: UUID
    action_name: str
    action_params: Mapping[str, Any]
    model_id: str | None
    model_type: str | None
    ordering_key: str | None
    topic: str | None
    correlation_id: str | None
    causation_id: UUID | None
    headers: Mapping[str, Any]

    def __str__(self) -> str:
        model = f"  of {self.model_type or 'model'} {self.model_id}" if self.model_id is not None else ""
        topic = f"  on topic {self.topic}" if self.topic is not None else ""
        return f"{self.event!r}{model}{topic}  by {self.action_name}"


class EventsOf(Sequence[E], Generic[E]):
    """The events of a class, oldest first: a sequence of event objects, which equals a list of the same events.

    ``rows`` has the ids, the model and the headers of each event.
    """

    def __init__(self, event_type: type[E], all_events: EmittedEvents) -> None:
        self._name = event_type.__name__
        self._fields = field_names(event_type)
        self._all = all_events
        names = type_names(event_type)
        self.rows: Sequence[EmittedEvent[E]] = [
            _as_object(row, event_type) for row in all_events if isinstance(row.event, event_type) or (
                isinstance(row.event, dict) and row.event_type in names
            )
        ]  # fmt: skip

    def one(self, **fields: Any) -> E:
        """The only event of the class with these field values. ``AssertionError`` shows all emitted events.

        Example::

            assert outbox_events.of(OrderPaid).one(order_id=7).total == Decimal("9.50")
        """
        __tracebackhide__ = True
        return self.one_row(**fields).event

    def one_row(self, **fields: Any) -> EmittedEvent[E]:
        """The same, with the columns of the row: ``one_row().model_id``."""
        __tracebackhide__ = True
        if unknown := sorted(fields.keys() - self._fields):
            raise InvalidEvent(f"one({self._name})", f"has no field {unknown[0]!r}")
        found = [row for row in self.rows if all(getattr(row.event, name) == value for name, value in fields.items())]
        if len(found) != 1:
            wanted = ", ".join(f"{name}={value!r}" for name, value in fields.items())
            raise AssertionError(f"expected one {self._name}({wanted}), found {len(found)}; {self._all.told()}")
        return found[0]

    def none(self) -> None:
        """Raise ``AssertionError``, with all emitted events, if an event of the class was emitted."""
        __tracebackhide__ = True
        if self.rows:
            raise AssertionError(f"expected no {self._name}, found {len(self.rows)}; {self._all.told()}")

    @overload
    def __getitem__(self, index: int) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[E]: ...
    def __getitem__(self, index: int | slice) -> E | Sequence[E]:
        return [row.event for row in self.rows][index]

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(cast("Sequence[object]", other)) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return repr(list(self)) if self.rows else f"<no {self._name}; {self._all.told()}>"


class EmittedEvents(Sequence[EmittedEvent[Any]]):
    """The events that were emitted since the test began, oldest first.

    - An event of an action, of a handler or of ``outbox.bind`` counts when outboxio or the session has committed the
      event. So a failed action has emitted nothing, and an action that was repeated has emitted once.
    - An event of ``outbox.record`` counts when the row is written, because the application commits or rolls back
      afterwards.

    Example::

        async def test_payment(outbox_events: EmittedEvents) -> None:
            await pay(order)
            assert outbox_events.of(OrderPaid).one().order_id == order.id
            assert len(outbox_events) == 1
    """

    def __init__(self) -> None:
        self._rows: list[EmittedEvent[Any]] = []
        self._objects: dict[UUID, object] = {}

    def of(self, event_type: type[E]) -> EventsOf[E]:
        """The events of a class and of its subclasses."""
        return EventsOf(event_type, self)

    def clear(self) -> None:
        """Forget the events so far, such as the events of a fixture."""
        self._rows.clear()

    def none(self) -> None:
        """Raise ``AssertionError``, with the emitted events, if an event was emitted."""
        __tracebackhide__ = True
        if self._rows:
            raise AssertionError(f"expected no event; {self.told()}")

    def told(self) -> str:
        """All events in words, an event in a line."""
        return "emitted were:\n  " + ("\n  ".join(map(str, self._rows)) or "(none)")

    def emitted(self, event_id: UUID, event: object) -> None:
        """Is called by outboxio when an event object is emitted."""
        self._objects[event_id] = event

    def written(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        """Is called by outboxio when the rows of an action are written."""
        self._rows += (self._row(action, record) for record in events if record.event_type is not None)

    @overload
    def __getitem__(self, index: int) -> EmittedEvent[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[EmittedEvent[Any]]: ...
    def __getitem__(self, index: int | slice) -> EmittedEvent[Any] | Sequence[EmittedEvent[Any]]:
        return self._rows[index]

    def __iter__(self) -> Iterator[EmittedEvent[Any]]:
        return iter(list(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<{len(self._rows)} events; {self.told()}>"

    def _row(self, action: ActionRecord, record: EventRecord) -> EmittedEvent[Any]:
        event = self._objects.pop(record.id, None)
        return EmittedEvent(
            event=_decoded(record.payload) if event is None else event,
            event_id=record.id,
            event_type=record.event_type or "",
            namespace=action.namespace,
            action_id=action.action_id,
            action_name=action.action_name,
            action_params=_decoded(action.action_params),
            model_id=record.model_id,
            model_type=record.model_type,
            ordering_key=record.ordering_key,
            topic=record.topic,
            correlation_id=action.correlation_id,
            causation_id=action.causation_id,
            headers=_decoded(action.headers_of(record)),
        )


@contextmanager
def watch_events() -> Generator[EmittedEvents]:
    """The events that are emitted in the block, in any outbox of the process. The fixture ``outbox_events`` is this.

    Example::

        with watch_events() as events:
            await outbox.executor.execute(PayOrder(7))
        assert events.of(OrderPaid).one().order_id == 7
    """
    events = EmittedEvents()
    watchers.append(events)
    try:
        yield events
    finally:
        watchers[:] = [watcher for watcher in watchers if watcher is not events]


def _decoded(text: str | None) -> Any:
    return {} if text is None else msgspec.json.decode(text)


def _as_object(row: EmittedEvent[Any], event_type: type[E]) -> EmittedEvent[E]:
    if isinstance(row.event, event_type):
        return row
    return msgspec.structs.replace(row, event=decoder_of(event_type)(msgspec.json.encode(row.event)))
