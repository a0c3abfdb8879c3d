"""Synchronous producers: Django, Flask and scripts record events, and the workers of an outbox handle them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.actions.executor import current_cause
from outboxio.errors import ConfigurationError, NoTransaction
from outboxio.integrations.django import connection_of, is_of_django
from outboxio.model.emitter import Emitter
from outboxio.model.event import EventRecord, EventTypes, checked_name, refusal_of
from outboxio.model.payloads.classes import AnyEvent
from outboxio.settings import Settings
from outboxio.storage.synchronous import DIALECTS, SyncConnection, SyncDialect, synchronous
from outboxio.support.clock import Clock, naive_utc, utc_now
from outboxio.support.ids import uuid7
from outboxio.support.text import UTF_8, briefly

__all__ = ["Producer"]


class Producer:
    """Records events in open transactions of synchronous code. A producer may be shared by threads.

    ``namespace`` is the namespace of the outbox whose workers handle the events. Of ``settings`` (default:
    ``Settings.load()``, the environment), a producer uses ``validate_events``, ``record_empty_actions`` and
    ``max_hops``. ``clock`` is a callable that returns the current time; the default is the clock of this machine. A
    producer opens no connection and starts no thread.

    Raises :class:`InvalidEvent` for a namespace that cannot be stored, and :class:`SettingsError` for an unknown or
    invalid setting in the environment.

    Example::

        producer = Producer("shop")

        def pay(request, order_id):                    # a view of Django
            with transaction.atomic():
                Order.objects.filter(id=order_id).update(state="paid")
                producer.record(connection, OrderPaid(order_id), action="PayOrder")
    """

    def __init__(self, namespace: str, *, settings: Settings | None = None, clock: Clock | None = None) -> None:
        self.namespace = checked_name(namespace, "namespace")
        if not isinstance(settings, Settings | None):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(f"settings is {briefly(settings)}; expected Settings(...)")
        self._settings = settings or Settings.load()
        self._clock = clock or utc_now
        self._types = EventTypes()
        self._emitters = {dialect: self._emitter(dialect) for dialect in DIALECTS}

    def record(
        self,
        connection: Any,
        *events: AnyEvent,
        action: str,
        params: Any = None,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Record events inside an open transaction of your application. Returns the id of the action.

        ``connection``: a ``Session``, ``scoped_session`` or ``Connection`` of SQLAlchemy; a connection of psycopg 3,
        PyMySQL or ``sqlite3``; ``django.db.connection`` or ``connections[alias]`` inside ``transaction.atomic()``. The
        other parameters, and the written rows, are those of ``outbox.record``. Your application commits; the workers
        find the events by polling, within ``fanout_poll_delay``.

        Raises :class:`NoTransaction` if the connection is in autocommit mode, :class:`ConfigurationError` for an
        asynchronous connection or an unknown driver, :class:`InvalidEvent` if an event cannot be stored, and the
        driver's error if the INSERT fails.

        Example::

            with Session(engine) as session, session.begin():
                session.add(order)
                producer.record(session, OrderPlaced(order.number), action="PlaceOrder", correlation_id=request_id)
        """
        target = _connection_of(connection)
        emitter, cause = self._emitters[target.dialect], current_cause()
        records = [
            emitter.record(
                event,
                cause,
                model_id=model_id,
                model_type=model_type,
                ordering_key=ordering_key,
                topic=topic,
                available_at=available_at,
            )
            for event in events
        ]
        row = emitter.action(
            self.namespace, naive_utc(self._clock()), action, params, action_id=uuid7(), cause=cause,
            correlation_id=correlation_id, headers=headers,
        )  # fmt: skip
        if not target.in_transaction():
            raise NoTransaction(connection)
        if not records and self._settings.record_empty_actions:
            records = [EventRecord(id=uuid7())]
        if (encoding := target.encoding) is not UTF_8 and (
            refusal := refusal_of([*records, row], encoding)
        ) is not None:
            raise refusal
        if records:
            target.execute(*target.dialect.insertion(row, records))
        return row.action_id

    def _emitter(self, dialect: SyncDialect) -> Emitter:
        settings = self._settings
        return Emitter(
            self._types,
            stores_nul=dialect.stores_nul,
            check_numbers=dialect.check_numbers,
            max_hops=settings.max_hops,
            validates=settings.validate_events,
        )


def _connection_of(connection: Any) -> SyncConnection:
    if is_of_django(connection):
        return connection_of(connection)
    if type(connection).__module__.startswith("sqlalchemy.") or hasattr(connection, "get_bind"):
        from outboxio.integrations.sqlalchemy import blocking_driver_connection

        connection = blocking_driver_connection(connection)
    return synchronous(connection)
