"""The mixin for mapped classes whose objects raise events."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from outboxio.integrations.sessions import listen, raise_event
from outboxio.model.payloads.classes import AnyEvent

listen()


class RaisesEvents:
    """A mixin for declarative models: an object raises events, and a flush of its session gives them to the outbox.

    The session is ``tx.session`` of an action, or a session with ``outbox.bind(session)``. The events of all objects of
    a session are written in the order in which the objects raised the events, and commit with the rows. A rollback
    drops the events, and a savepoint that is rolled back drops the events that were raised within. Events of an object
    that is in no session stay with the object, and are taken in when the object is added to a session.

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

        ``model_id`` and ``model_type`` are by default the primary key of the object after the flush, and the name of
        its class. The flush raises :class:`InvalidEvent` if the event cannot be stored, and :class:`ConfigurationError`
        if the session has no outbox. Raises :class:`TransactionError` in a session whose transaction has failed.
        """
        options: dict[str, Any] = {
            "model_id": model_id, "model_type": model_type, "ordering_key": ordering_key, "topic": topic,
            "available_at": available_at,
        }  # fmt: skip
        raise_event(self, event, {name: value for name, value in options.items() if value is not None})
