"""Envelopes: the event that a handler receives, with the context of the action that emitted it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import reduce
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from uuid import NAMESPACE_OID, UUID, uuid5

from msgspec import Struct
from msgspec.structs import replace

from outboxio.errors import ConfigurationError, NoHandlerTransaction
from outboxio.model.emitter import Cause, Emitter
from outboxio.model.event import RECEIVED_ACTION, ActionRecord, EventRecord
from outboxio.model.notification import Notification
from outboxio.model.payloads.classes import VERSION_HEADER, AnyEvent, named_by, version_in
from outboxio.model.redaction import Redact, keep_all
from outboxio.support.codec import decode_exactly, decode_object
from outboxio.support.log import PREFIX, Fields, as_fields, current_trace_id, take_run_fields_from
from outboxio.support.text import briefly
from outboxio.telemetry.protocol import NO_TELEMETRY, HandlingTelemetry, carried, headers_in, with_trace

if TYPE_CHECKING:
    from outboxio.model.action import Performs, Result_co
    from outboxio.transaction import Transaction

P = TypeVar("P")
E_co = TypeVar("E_co", bound=AnyEvent | bytes, covariant=True)

_NO_HEADERS = len('"{}"')  # or null, or {}


class Execute(Protocol):
    """Runs an action: ``ActionExecutor.execute``."""

    async def __call__(self, action: Performs[Result_co], *, shard: str | None = None) -> Result_co: ...


class Join(Protocol):
    """Runs an action inside a transaction that is open: ``ActionExecutor.join``."""

    async def __call__(self, tx: Transaction, action: Performs[Result_co]) -> Result_co: ...


class HandlerContext(Struct, kw_only=True, eq=False):
    """The values that all envelopes of a shard share."""

    namespace: str
    shard: str
    resources: Any
    stopping: asyncio.Event
    emitter: Emitter
    execute: Execute
    join: Join
    outbox: object
    redact: Redact = keep_all
    telemetry: HandlingTelemetry | None = None
    """Observes each call of a handler, if there is telemetry for calls."""
    handler_name_of: Callable[[str], str] = str
    """The handler's name for a stored name, which may be an alias."""

    @property
    def log_fields(self) -> Fields:
        return {"namespace": self.namespace, "shard": self.shard}


class EventEnvelope(Struct, Generic[E_co], eq=False):
    """An event with its context, as passed to a handler.

    ``event`` is the decoded event; in a raw handler, its stored JSON. ``event_id`` is the same for all retries and
    handlers; :meth:`idempotency_key` is derived from it. ``attempt`` counts the runs of this handler for this event,
    from 1. Dates are naive UTC. ``stopping`` is set when your application leaves ``running()``: a long handler should
    then return.

    Example::

        async def send_receipt(envelope: EventEnvelope[MoneyDeposited]) -> None:
            await mail.send(envelope.event.wallet_id, idempotency_key=str(envelope.idempotency_key("receipt")))
    """

    event: E_co
    _row: Notification
    _context: HandlerContext
    recorded: list[EventRecord] | None = None
    """The events that ``emit`` recorded in this run; ``None`` before the first."""
    _tx: Transaction | None = None
    _is_tx_shared: bool = False
    is_over: bool = False
    """True if the handler has ended; tasks that it has spawned may still be running."""
    batch_size: int | None = None
    """The number of events in the call, in the first envelope of a batch only."""
    in_log: Mapping[str, object] | None = None
    """The fields of the handler's log records, cached when it writes the first one."""

    @property
    def event_id(self) -> UUID:
        """The event's id: the same for every handler and every attempt."""
        return self._row.event_id

    @property
    def event_type(self) -> str:
        """The name under which the event is stored."""
        return self._row.event_type

    @property
    def payload(self) -> bytes:
        """The stored JSON of the event, of the version :attr:`event_version`. Databases may reorder its keys.

        Example::

            await client.publish(f"events.{envelope.event_type}", envelope.payload)
        """
        return as_bytes(self._row.payload)

    @property
    def notification_id(self) -> UUID:
        """The id of the notification, the delivery of this event to this handler."""
        return self._row.id

    @property
    def namespace(self) -> str:
        return self._context.namespace

    @property
    def shard(self) -> str:
        """The name of the shard that stores the event."""
        return self._context.shard

    @property
    def attempt(self) -> int:
        """The number of this run of the handler for the event, from 1."""
        return self._row.attempts + 1

    @property
    def action_id(self) -> UUID:
        return self._row.context.action_id

    @property
    def action_name(self) -> str:
        return self._row.context.action_name

    @property
    def action_params(self) -> dict[str, Any]:
        """The parameters of the action, as stored: a JSON object. Decimal numbers are floats; see :meth:`params`."""
        return decode_object(self._row.context.action_params)

    def params(self, type: type[P]) -> P:
        """Decode the parameters of the action as a class, or as any type that msgspec decodes.

        A ``Decimal`` in the class gets all digits of the stored number, and in ``dict[str, Any]`` each number with a
        decimal point is a ``Decimal``: decimal numbers become floats only if the class declares a float. Raises
        ``msgspec.ValidationError``, with the path of the value, if the parameters do not match.

        Example::

            class Deposit(msgspec.Struct, rename="camel"):
                wallet_id: UUID
                amount: Decimal

            amount = envelope.params(Deposit).amount
        """
        return decode_exactly(self._row.context.action_params, type)

    @property
    def started_date(self) -> datetime:
        """When the action started."""
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
        """The ordering key: ordered handlers process events with the same key in order."""
        return self._row.context.ordering_key

    @property
    def source(self) -> str | None:
        """The source of an inbox message; ``None`` for an event that your application emitted."""
        if self._row.context.action_name != RECEIVED_ACTION:
            return None
        source: str | None = self.action_params.get("source")
        return source

    @property
    def correlation_id(self) -> str | None:
        """The correlation id of the execution that started the chain of events."""
        return self._row.context.correlation_id

    @property
    def causation_id(self) -> UUID | None:
        """The id of the event that caused this event through a handler; ``None`` at the start of a chain."""
        return self._row.context.causation_id

    @property
    def headers(self) -> dict[str, Any]:
        """The headers of the execution; an empty mapping if it has none."""
        headers = decode_object(self._row.context.headers)
        headers.pop(VERSION_HEADER, None)
        return headers

    @property
    def has_headers(self) -> bool:
        """False if :attr:`headers` is certainly empty and :attr:`event_version` is 1; nothing is decoded."""
        return len(bytes(self._row.context.headers)) > _NO_HEADERS

    @property
    def event_version(self) -> int:
        """The version under which the event is stored. :attr:`event` is upcast to the version of the class."""
        return version_in(self._row.context.headers)

    @property
    def resources(self) -> Any:
        """The value of ``Outbox(resources=...)``."""
        return self._context.resources

    @property
    def stopping(self) -> asyncio.Event:
        """Set when your application leaves ``running()``. A run that continues is cancelled after ``shutdown_timeout``,
        which does not count as an attempt."""
        return self._context.stopping

    @property
    def tx(self) -> Transaction:
        """The transaction that commits together with this delivery, for handlers with ``delivery="transactional"``.

        Raises :class:`NoHandlerTransaction` in a handler without a transaction.
        """
        if self._tx is None:
            raise NoHandlerTransaction(self._row.handler_name)
        return self._tx

    def idempotency_key(self, name: str) -> UUID:
        """Return the idempotency key of an effect of this handler, for a service that ignores repeated keys.

        The key is the same in every attempt and process, after a retry or a replay, and for a message that is
        redelivered to ``inbox.consume``. It differs between names, handlers and events. Raises
        :class:`ConfigurationError` for a blank name.

        Example::

            await payments.charge(cents, idempotency_key=str(envelope.idempotency_key("charge")))
        """
        return _idempotency_key(self, name)

    def emit(
        self,
        event: AnyEvent,
        *,
        model: object = None,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
    ) -> None:
        """Record an event that is caused by this handler.

        The event is committed in the same transaction as the success of the run, so a failed run emits nothing. The
        parameters are those of ``tx.emit``. Raises :class:`InvalidEvent` if the event cannot be stored, and
        :class:`TooManyHops` if the chain of events becomes longer than ``max_hops``.
        """
        if model is not None:
            model_id, model_type = named_by(model, model_id, model_type)
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
        if self.recorded is None:
            self.recorded = []
        self.recorded.append(record)

    def execute(self, action: Performs[Result_co], *, shard: str | None = None) -> Coroutine[Any, Any, Result_co]:
        """Run an action in a new transaction, on the shard of this event or on ``shard``.

        The ``causation_id`` of the action's events is the id of this event. The action commits before the handler ends:
        if the handler fails afterwards, the next run executes the action again.

        In a transactional handler the action joins :attr:`tx` and commits with it; another shard is refused.

        A synchronous handler must call ``anyio.from_thread.run(envelope.execute, action)``, because it runs in a thread
        without an event loop: a direct call there raises :class:`ConfigurationError`.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigurationError(
                f"handler {self._row.handler_name!r} runs in a thread without an event loop: call "
                "anyio.from_thread.run(envelope.execute, action), or write the handler as `async def`"
            ) from None
        return self._execute(action, shard)

    async def _execute(self, action: Performs[Result_co], shard: str | None) -> Result_co:
        if self._tx is not None:
            if shard is not None and shard != self._context.shard:
                raise ConfigurationError(
                    f"handler {self._row.handler_name!r} has a transaction open on shard {self._context.shard!r}; an "
                    f"action on shard {shard!r} cannot join it: emit an event there instead"
                )
            return await self._context.join(self._tx, action)
        return await self._context.execute(action, shard=shard or self._context.shard)

    def within(self, tx: Transaction, *, shared: bool) -> None:
        """Use ``tx`` from now on. ``shared``: the envelopes of a batch share it, and each keeps its own events."""
        self._tx = tx
        self._is_tx_shared = shared

    @property
    def cause(self) -> Cause:
        """The origin that is stored with the rows that this handler writes."""
        row, context = self._row, self._row.context
        return Cause(context.event_id, row.handler_name, context.correlation_id, context.hops)

    @property
    def handler_name(self) -> str:
        """The name under which the notification is stored: the handler's name, or an alias."""
        return self._row.handler_name

    def is_of(self, outbox: object) -> bool:
        """True if the handler belongs to this outbox."""
        return self._context.outbox is outbox

    @property
    def trace_headers(self) -> dict[str, str]:
        """The trace headers of the event, if it has any."""
        return carried(headers_in(self._row.context.headers))

    def continues_trace(self, action: ActionRecord) -> ActionRecord:
        """Return the action of emitted events, with the trace of the handler's event if there is telemetry."""
        if self._context.emitter.telemetry.chosen is NO_TELEMETRY:
            return action
        trace = self.trace_headers
        return replace(action, headers=with_trace(action.headers, trace, trace)) if trace else action

    def send_later(self, action: ActionRecord) -> ActionRecord:
        """Return the action of the emitted events, which are written together with the outcome of the run."""
        action = self.continues_trace(action)
        sending = self._context.emitter.telemetry.chosen.sending(self.shard, action, self.emitted)
        with sending:
            return sending.marked(action)

    @property
    def log_fields(self) -> Fields:
        """The fields of a log record of the handler. A batch has no fields of a single event."""
        name, size = self._context.handler_name_of(self._row.handler_name), self.batch_size
        of_row = self._row.log_fields if size is None else {"batch_size": size}
        return {**self._context.log_fields, **of_row, "handler": name}

    @property
    def emitted(self) -> list[EventRecord]:
        """The events that ``emit`` recorded in this run."""
        return self.recorded or []

    def __repr__(self) -> str:
        row = self._row
        return f"<EventEnvelope {row.event_type} {row.event_id} for {row.handler_name!r}, attempt {self.attempt}>"


def _idempotency_key(envelope: EventEnvelope[Any], name: str) -> UUID:
    if not isinstance(name, str) or not name.strip():  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise ConfigurationError(f"idempotency_key({briefly(name)}): pass a name for the effect, such as 'charge'")
    origin = envelope.event_id
    if (source := envelope.source) is not None:  # each delivery to inbox.consume has a new event id
        message = (envelope.namespace, envelope.shard, source, str(envelope.action_params.get("external_id")))
        origin = reduce(uuid5, message, NAMESPACE_OID)
    # A row keeps the handler name under which it was stored, so renaming with an alias does not change keys.
    return reduce(uuid5, (envelope.handler_name, name), origin)


def as_bytes(payload: Any) -> bytes:
    """Return the JSON of a row's payload, which is text, or bytes, or ``None``."""
    return payload.encode() if isinstance(payload, str) else b"null" if payload is None else bytes(payload)


current_envelope: ContextVar[EventEnvelope[Any] | None] = ContextVar("outboxio_current_envelope", default=None)
"""The envelope of the handler that is running here. The event is the cause of the actions that run here."""

_enclosing: ContextVar[tuple[EventEnvelope[Any], ...]] = ContextVar("outboxio_enclosing_envelopes", default=())
"""The envelopes of the handlers around the running handler, of any outbox: a handler may drain a second outbox."""


def run_fields() -> dict[str, object]:
    """Return the prefixed log fields of the current run; empty outside of a handler."""
    envelope = current_envelope.get()
    if envelope is None or envelope.is_over:
        return {}
    if envelope.in_log is None:
        envelope.in_log = as_fields(envelope.log_fields)
    trace_id = current_trace_id()
    return {**envelope.in_log, **({} if trace_id is None else {f"{PREFIX}trace_id": trace_id})}


take_run_fields_from(run_fields)


def begin_inside() -> None:
    """Record the current handler, if any, as enclosing the handlers that run in this context from now on."""
    envelope = current_envelope.get()
    if envelope is not None and not envelope.is_over:
        _enclosing.set((*_enclosing.get(), envelope))


def leave_handlers() -> None:
    """Mark this context as outside of any handler."""
    current_envelope.set(None)
    _enclosing.set(())


def handler_around(outbox: object) -> EventEnvelope[Any] | None:
    """Return the envelope of the innermost running handler of an outbox around this call."""
    around: Sequence[EventEnvelope[Any] | None] = (current_envelope.get(), *reversed(_enclosing.get()))
    for envelope in around:
        if envelope is not None and not envelope.is_over and envelope.is_of(outbox):
            return envelope
    return None
