"""What a handler receives: the event, and everything about the action that caused it."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from uuid import UUID

from outboxio.codec import decode_object
from outboxio.emission import Cause, Emitter
from outboxio.errors import ConfigurationError, NoHandlerTransaction
from outboxio.event import RECEIVED_ACTION, Event, EventRecord
from outboxio.notification import Notification
from outboxio.redaction import Redact, as_it_is

if TYPE_CHECKING:
    from outboxio.action import Performs, Result_co
    from outboxio.transaction import Transaction

E_co = TypeVar("E_co", bound=Event, covariant=True)


class Execute(Protocol):
    """Runs an action: ``ActionExecutor.execute``."""

    async def __call__(self, action: Performs[Result_co], *, shard: str | None = None) -> Result_co: ...


class Join(Protocol):
    """Runs an action inside a transaction that is open: ``ActionExecutor.join``."""

    async def __call__(self, tx: Transaction, action: Performs[Result_co]) -> Result_co: ...


class HandlerContext:
    """What all envelopes of one shard share."""

    __slots__ = ("emitter", "execute", "join", "namespace", "outbox", "redact", "resources", "shard", "stopping")

    def __init__(
        self,
        *,
        namespace: str,
        shard: str,
        resources: Any,
        stopping: asyncio.Event,
        emitter: Emitter,
        execute: Execute,
        join: Join,
        outbox: object,
        redact: Redact = as_it_is,
    ) -> None:
        self.namespace = namespace
        self.shard = shard
        self.resources = resources
        self.stopping = stopping
        self.emitter = emitter
        self.execute = execute
        self.join = join
        self.outbox = outbox
        self.redact = redact


class EventEnvelope(Generic[E_co]):
    """One event on its way to one handler.

    ``event`` is the decoded event. ``event_id`` stays the same over retries and over handlers, so it is the natural
    idempotency key. ``attempt`` counts this handler's runs for this event from 1. Dates are naive UTC.
    ``stopping`` is set when the outbox is being left: a long handler that sees it should come to an end.

    Example::

        async def send_receipt(envelope: EventEnvelope[MoneyDeposited]) -> None:
            await mail.send(envelope.event.wallet_id, idempotency_key=str(envelope.event_id))
    """

    __slots__ = ("_context", "_emitted", "_is_tx_shared", "_row", "_tx", "event")

    def __init__(self, event: E_co, row: Notification, context: HandlerContext) -> None:
        self.event = event
        self._row = row
        self._context = context
        self._emitted: list[EventRecord] | None = None
        self._tx: Transaction | None = None
        self._is_tx_shared = False

    @property
    def event_id(self) -> UUID:
        """The event's id: the same for every handler and every attempt."""
        return self._row.event_id

    @property
    def event_type(self) -> str:
        """The name under which the event is stored."""
        return self._row.event_type

    @property
    def notification_id(self) -> UUID:
        """The id of this delivery: one event owed to one handler."""
        return self._row.id

    @property
    def namespace(self) -> str:
        return self._context.namespace

    @property
    def shard(self) -> str:
        """The name of the shard that the event lives on."""
        return self._context.shard

    @property
    def attempt(self) -> int:
        """Which run of this handler for this event this is, from 1."""
        return self._row.attempts + 1

    @property
    def action_id(self) -> UUID:
        return self._row.context.action_id

    @property
    def action_name(self) -> str:
        return self._row.context.action_name

    @property
    def action_params(self) -> dict[str, Any]:
        """The parameters of the action, as stored: a JSON object."""
        return decode_object(self._row.context.action_params)

    @property
    def started_date(self) -> datetime:
        """When the action began."""
        return self._row.context.started_date

    @property
    def completion_date(self) -> datetime:
        """When the action's ``perform`` returned."""
        return self._row.context.completion_date

    @property
    def event_date(self) -> datetime:
        return self._row.context.event_date

    @property
    def model_id(self) -> str | None:
        return self._row.context.model_id

    @property
    def model_type(self) -> str | None:
        return self._row.context.model_type

    @property
    def ordering_key(self) -> str | None:
        """For ordered handlers: the key within which this event has its place."""
        return self._row.context.ordering_key

    @property
    def source(self) -> str | None:
        """Where the event came in from, through the inbox; ``None`` for the service's own."""
        if self._row.context.action_name != RECEIVED_ACTION:
            return None
        source: str | None = self.action_params.get("source")
        return source

    @property
    def correlation_id(self) -> str | None:
        """What the first execution of this chain was given to be found by."""
        return self._row.context.correlation_id

    @property
    def causation_id(self) -> UUID | None:
        """The id of the event whose handler caused this one; ``None`` at the start of a chain."""
        return self._row.context.causation_id

    @property
    def headers(self) -> dict[str, Any]:
        """The headers of the execution; an empty mapping where there are none."""
        return decode_object(self._row.context.headers)

    @property
    def resources(self) -> Any:
        """What the application gave as ``Outbox(resources=...)``."""
        return self._context.resources

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the outbox is being left: come to an end soon, or be cancelled without using up an attempt."""
        return self._context.stopping

    @property
    def tx(self) -> Transaction:
        """The transaction that commits together with this delivery; for handlers with ``delivery="transactional"``.

        Raises :class:`NoHandlerTransaction` in others.
        """
        if self._tx is None:
            raise NoHandlerTransaction(self._row.handler_name)
        return self._tx

    def emit(
        self,
        event: Event,
        *,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
    ) -> None:
        """Record an event that this handler causes.

        It is committed in the same transaction as this delivery's success, so a run that fails emits nothing. The
        parameters are those of ``tx.emit``. Raises :class:`InvalidEvent` for what cannot be stored, and
        :class:`TooManyHops` when a chain of events becomes longer than ``max_hops``.
        """
        record = self._context.emitter.record(
            event,
            self.cause,
            model_id=model_id,
            model_type=model_type,
            ordering_key=ordering_key,
            topic=topic,
            available_at=available_at,
        )
        if self._tx is not None and not self._is_tx_shared:
            self._tx.add(record)
            return
        if self._emitted is None:
            self._emitted = []
        self._emitted.append(record)

    async def execute(self, action: Performs[Result_co], *, shard: str | None = None) -> Result_co:
        """Run an action in a transaction of its own, on this event's shard unless ``shard`` names another.

        Its events carry this event's id as their ``causation_id``. It commits before the handler ends: if the handler
        fails afterwards, it will run again, and execute again.

        Where :attr:`tx` is open the action joins it, and commits with it; another shard is refused there.
        """
        if self._tx is not None:
            if shard is not None and shard != self._context.shard:
                raise ConfigurationError(
                    f"handler {self._row.handler_name!r} has a transaction open on shard {self._context.shard!r}; an "
                    f"action on shard {shard!r} cannot join it: emit an event there instead"
                )
            return await self._context.join(self._tx, action)
        return await self._context.execute(action, shard=shard or self._context.shard)

    def within(self, tx: Transaction, *, shared: bool) -> None:
        """From now on this delivery works in ``tx``. ``shared``: with others, so that each keeps what it emits."""
        self._tx = tx
        self._is_tx_shared = shared

    @property
    def cause(self) -> Cause:
        """What rows that this handler writes say of their origin."""
        row, context = self._row, self._row.context
        return Cause(context.event_id, row.handler_name, context.correlation_id, context.hops)

    @property
    def has_emitted(self) -> bool:
        return self._emitted is not None

    @property
    def emitted(self) -> list[EventRecord]:
        """What ``emit`` recorded in this run."""
        return self._emitted or []

    def __repr__(self) -> str:
        row = self._row
        return f"<EventEnvelope {row.event_type} {row.event_id} for {row.handler_name!r}, attempt {self.attempt}>"


current_envelope: ContextVar[EventEnvelope[Any] | None] = ContextVar("outboxio_current_envelope", default=None)
"""The envelope whose handler is running here: actions that it executes are caused by its event."""
