"""The mixin for mapped classes whose objects raise events."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from outboxio.integrations.sessions import listen, raise_event
from outboxio.model.payloads.classes import AnyEvent

listen()


class RaisesEvents:
    """A mixin for declarative models whose objects raise events, which are passed to the outbox at the next flush.

    The session is the ``tx.session`` of an action, or a session with ``outbox.bind(session)``. Events of all objects in
    a session are written in the order in which they were raised, and commit together with the rows. A rollback discards
    them; rolling back a savepoint discards the events raised within it. An object that is not in a session keeps its
    events until it is added to one.

    Example::

        class Order(RaisesEvents, Base):
            __tablename__ = "orders"
            id: Mapped[int] = mapped_column(primary_key=True)
            state: Mapped[str]

            def pay(self) -> None:
                self.state = "paid"
                self.raise_event(OrderPaid(self.id))
    """

    def raise_event(
        self,
        event: AnyEvent,
        *,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
    ) -> None:
        """Raise an event. The parameters are those of ``tx.emit``.

        By default, ``model_id`` is the object's primary key after the flush, and ``model_type`` is its class name. The
        flush raises :class:`InvalidEvent` if the event cannot be stored, and :class:`ConfigurationError` if the session
        has no outbox. Raises :class:`TransactionError` if the session's transaction has failed.
        """
        options: dict[str, Any] = {
            "model_id": model_id, "model_type": model_type, "ordering_key": ordering_key, "topic": topic,
            "available_at": available_at,
        }  # fmt: skip
        raise_event(self, event, {name: value for name, value in options.items() if value is not None})
