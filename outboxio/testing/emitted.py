"""The events that a test emitted, in any outbox of the process."""

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

    ``event`` is the emitted object, or the decoded JSON of an inbox message.
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
    """The events of a class, oldest first. Compares equal to a list of the same events.

    ``rows`` has the ids, model and headers of each event.
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
        """Return the only event of the class with these field values.

        Otherwise raises ``AssertionError`` with all emitted events.

        Example::

            assert outbox_events.of(OrderPaid).one(order_id=7).total == Decimal("9.50")
        """
        __tracebackhide__ = True
        return self.one_row(**fields).event

    def one_row(self, **fields: Any) -> EmittedEvent[E]:
        """Like :meth:`one`, but return the row: ``one_row().model_id``."""
        __tracebackhide__ = True
        if unknown := sorted(fields.keys() - self._fields):
            raise InvalidEvent(f"one({self._name})", f"has no field {unknown[0]!r}")
        found = [row for row in self.rows if all(getattr(row.event, name) == value for name, value in fields.items())]
        if len(found) != 1:
            values = ", ".join(f"{name}={value!r}" for name, value in fields.items())
            raise AssertionError(f"expected one {self._name}({values}), found {len(found)}; {self._all.summary()}")
        return found[0]

    def none(self) -> None:
        """Raise ``AssertionError``, with all emitted events, if an event of the class was emitted."""
        __tracebackhide__ = True
        if self.rows:
            raise AssertionError(f"expected no {self._name}, found {len(self.rows)}; {self._all.summary()}")

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
        return repr(list(self)) if self.rows else f"<no {self._name}; {self._all.summary()}>"


class EmittedEvents(Sequence[EmittedEvent[Any]]):
    """The events emitted since the test started, oldest first.

    - Events of actions, handlers and ``outbox.bind`` appear once they are committed. A failed action emits nothing, and
      a retried action emits once.
    - Events of ``outbox.record`` appear when they are written, because your code commits or rolls back later.

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
        """Return the events of a class and its subclasses."""
        return EventsOf(event_type, self)

    def clear(self) -> None:
        """Forget the events so far, for example those of a fixture."""
        self._rows.clear()

    def none(self) -> None:
        """Raise ``AssertionError``, with the emitted events, if there are any."""
        __tracebackhide__ = True
        if self._rows:
            raise AssertionError(f"expected no event; {self.summary()}")

    def summary(self) -> str:
        """Return all events as text, one per line."""
        return "emitted events:\n  " + ("\n  ".join(map(str, self._rows)) or "(none)")

    def emitted(self, event_id: UUID, event: object) -> None:
        """Called by outboxio when an event object is emitted."""
        self._objects[event_id] = event

    def written(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        """Called by outboxio when the rows of an action are written."""
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
        return f"<{len(self._rows)} events; {self.summary()}>"

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
    """Collect the events emitted in the block, in any outbox of the process, as the fixture ``outbox_events`` does.

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
