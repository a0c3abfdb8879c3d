"""Outgoing webhooks: an event becomes one delivery per endpoint, and each delivery one signed request.

``Webhooks`` registers two handlers. The first one emits a :class:`WebhookDelivery` event per endpoint, exactly once and
in one transaction. The second one sends the requests. So each endpoint has its own notification and attempts, and an
endpoint that is down does not delay the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from inspect import isawaitable
from typing import Any, ClassVar, Literal, Required, TypedDict, Unpack, cast
from uuid import UUID

import msgspec
from msgspec.structs import replace

from outboxio.errors import ConfigurationError, HandlerFailed, Unprocessable
from outboxio.handlers.handler import EventHandler
from outboxio.handlers.options import Batch
from outboxio.integrations.webhooks.addresses import UrlRefused
from outboxio.integrations.webhooks.endpoint import (
    LANES,
    MODEL,
    DeliveryPostponed,
    Endpoint,
    Lane,
    WebhookEndpointDisabled,
)
from outboxio.integrations.webhooks.sending import DeliveryFailed, EndpointGone, Sender
from outboxio.model.decorated import event
from outboxio.model.envelope import EventEnvelope
from outboxio.model.event import type_names, upcasters_of, version_of, with_subclasses
from outboxio.model.operating.groups import Filter
from outboxio.model.payloads.classes import decoder_of, upcasting
from outboxio.model.retry import Backoff, RetryPolicy
from outboxio.support.signature import is_async
from outboxio.support.text import briefly, instead_of

# pyright: reportPrivateUsage=false

Envelope = EventEnvelope[Any]
Endpoints = Callable[[Envelope], Iterable[Endpoint] | Awaitable[Iterable[Endpoint]]] | Iterable[Endpoint]

_OF_FIRST = ("name", "topic", "raw", "aliases", "since")
SUFFIX, TOPIC = ".deliveries", "outboxio.webhooks."
RETRY = RetryPolicy(base="5s", factor=4, cap="8h", retention="5d")


class WebhookOptions(TypedDict, total=False):
    """The options of :class:`Webhooks`.

    * ``name``: the handler's name. The handler of the deliveries has the same name with the suffix ``.deliveries``.
    * ``types``: the event types, as in ``@outbox.handler``; or ``topic``, all events on a topic.
    * ``endpoints``: see :class:`Webhooks`.
    * ``ordered``: each endpoint gets its events in order; a failed delivery blocks the later ones.
    * ``timeout``: total time of a request, 15 s by default; ``connect_timeout``: time to connect, 5 s by default.
    * ``retry``: retry policy of deliveries; by default after 5 s, 20 s, 80 s ... 8 h, for 5 days.
    * ``concurrency``: concurrent deliveries in a process, 256 by default; at most 4 requests per endpoint.
    * ``allow``: host names and networks that may be reached although they are not public, for tests and internal use.
    * ``raw``, ``aliases``, ``since``: as in ``@outbox.handler``.
    """

    name: Required[str]
    endpoints: Required[Endpoints]
    types: Iterable[Any]
    topic: str | None
    ordered: bool
    timeout: timedelta | float | str
    connect_timeout: timedelta | float | str
    retry: RetryPolicy | Backoff
    concurrency: int
    allow: Iterable[str]
    raw: bool
    aliases: Iterable[str]
    since: datetime | Literal["now"] | None


@event("outboxio.WebhookDelivery")
class WebhookDelivery(msgspec.Struct, frozen=True):
    """An event to deliver to an endpoint. Contains no URL or secrets, which are looked up at each attempt.

    Not a subclass of ``Event``, because a handler of ``Event``, which gets all events, may be a ``Webhooks`` itself.
    """

    endpoint_id: str
    event_id: UUID
    type: str
    version: int
    model_id: str | None
    model_type: str | None
    body: str


class Webhooks(EventHandler[Any]):
    """Sends each event to its endpoints, signed as specified by Standard Webhooks.

    ``endpoints`` is a list of endpoints, or a sync or async function of the envelope that returns the endpoints of an
    event, for example those of its tenant. The function is called when the event is handled, and again at each attempt
    of a delivery, so the URL and the secrets are always current. It can read your tables through ``envelope.tx``, which
    is read-only during an attempt. There, only ``event``, ``event_id``, ``event_type``, ``model_id``, ``model_type``,
    ``correlation_id``, ``shard`` and ``resources`` of the envelope are those of the original event. If the function no
    longer returns the endpoint, the delivery becomes DEAD.

    The body is ``{"type", "timestamp", "data"}``, and ``webhook-id`` is the event id. A 2xx response is a success.
    After a 410 response the delivery becomes DEAD; after any other it is retried. Redirects are not followed. After a
    410, or when a delivery has used up ``retry`` and the endpoint has had no success in the meantime, the outbox emits
    :class:`WebhookEndpointDisabled` and sends nothing to the endpoint for 10 min.

    A URL must be ``https`` on port 443 or above 1023, and its host must have only public addresses.

    Raises :class:`~outboxio.ConfigurationError` for an invalid option.

    Example::

        async def endpoints(envelope: EventEnvelope[OrderPaid]) -> list[Endpoint]:
            sql = "SELECT id, url, secret FROM endpoints WHERE tenant_id = $1 AND is_on"
            rows = await envelope.tx.fetch(sql, envelope.event.tenant_id)
            return [Endpoint(row["url"], [row["secret"]], id=str(row["id"])) for row in rows]

        outbox.add_handler(Webhooks(name="webhooks", types=[OrderPaid], endpoints=endpoints))
    """

    delivery: ClassVar[Any] = "transactional"
    batch: ClassVar[Batch | None] = Batch(size=50, max_wait=0)

    def __init__(self, **options: Unpack[WebhookOptions]) -> None:
        for option in options:
            if option not in WebhookOptions.__annotations__:
                hint = instead_of(option, WebhookOptions.__annotations__)
                raise ConfigurationError(f"Webhooks {options.get('name')!r} has no option {option!r}: {hint}")
        endpoints: Any = options.get("endpoints")
        self._endpoints = cast("Endpoints", endpoints if callable(endpoints) else checked_endpoints(endpoints))
        own: dict[str, Any] = {name: value for name, value in options.items() if name in _OF_FIRST}
        self.__dict__.update(own, event_types=options.get("types", ()))  # class variables, which each object has
        self._deliveries = _Deliveries(self, options)

    def companions(self) -> Iterable[EventHandler[Any]]:
        return (self._deliveries,)

    async def handle(self, envelopes: list[EventEnvelope[Any]]) -> None:
        """Emit a delivery for each endpoint of each event."""
        for envelope in envelopes:
            body = _body(envelope)
            for endpoint in await self.endpoints_of(envelope):
                if (envelope.model_type, envelope.model_id) == (MODEL, endpoint.key):
                    continue  # its own WebhookEndpointDisabled event would disable it again
                delivery = WebhookDelivery(
                    endpoint.key, envelope.event_id, envelope.event_type, envelope.event_version, envelope.model_id,
                    envelope.model_type, body,
                )  # fmt: skip
                envelope.emit(
                    delivery,
                    model_id=endpoint.key,
                    model_type=MODEL,
                    ordering_key=endpoint.key,
                    topic=TOPIC + self.name,
                )

    async def endpoints_of(self, envelope: Envelope) -> list[Endpoint]:
        """Return the endpoints of an event. Raises :class:`~outboxio.ConfigurationError` for an invalid result."""
        if not callable(self._endpoints):
            return cast("list[Endpoint]", self._endpoints)
        found = self._endpoints(envelope)
        return checked_endpoints(await found if isawaitable(found) else found)

    async def endpoint(self, envelope: EventEnvelope[WebhookDelivery]) -> Endpoint | None:
        """Return the current endpoint of a delivery; ``None`` if the event no longer has this endpoint."""
        delivery, original = envelope.event, envelope
        async with AsyncExitStack() as stack:
            if callable(self._endpoints):
                original = self._original(envelope)
            if is_async(self._endpoints):  # a plain function cannot read through a transaction
                outbox: Any = envelope._context.outbox
                connection = await stack.enter_async_context(outbox.connection(shard=envelope.shard))
                original.within(connection._tx, shared=True)
            found = await self.endpoints_of(original)
        return next((one for one in found if one.key == delivery.endpoint_id), None)

    def _original(self, envelope: EventEnvelope[WebhookDelivery]) -> Envelope:
        """Return an envelope of the delivered event."""
        delivery, row = envelope.event, envelope._row
        payload = bytes(msgspec.json.decode(delivery.body, type=dict[str, msgspec.Raw])["data"])
        context = replace(
            row.context, event_id=delivery.event_id, model_id=delivery.model_id, model_type=delivery.model_type
        )
        original = replace(row, event_type=delivery.type, payload=payload, raw_context=context)
        return EventEnvelope(self._decoded(delivery, payload), original, envelope._context)

    def _decoded(self, delivery: WebhookDelivery, payload: bytes) -> Any:
        if vars(self).get("raw", False):
            return payload
        classes = (cls for given in self.event_types if isinstance(given, type) for cls in with_subclasses(given))
        cls = next((cls for cls in classes if delivery.type in type_names(cls)), None)
        if cls is None:
            return msgspec.json.decode(payload)
        decode = upcasting(delivery.type, decoder_of(cls), delivery.version, version_of(cls), upcasters_of(cls))
        return decode(payload.decode())


class _Deliveries(EventHandler[WebhookDelivery]):
    """The handler that sends the requests."""

    event_types: ClassVar[Any] = (WebhookDelivery,)

    def __init__(self, webhooks: Webhooks, options: WebhookOptions) -> None:
        self._webhooks = webhooks
        self._sender = Sender(
            options.get("timeout", 15.0), options.get("connect_timeout", 5.0), options.get("allow", ())
        )
        self._lanes: dict[str, Lane] = {}  # the least recently used first
        name, *aliases = [name + SUFFIX for name in (webhooks.name, *webhooks.aliases)]
        ordered = options.get("ordered", False)
        self.__dict__.update(
            name=name, aliases=aliases, topic=TOPIC + webhooks.name, ordered=ordered,
            on_dead_key="continue" if ordered else None, retry=options.get("retry", RETRY),
            concurrency=options.get("concurrency", 256),
            timeout=self._sender.timeout + 45,  # the lookup, and the wait for a request of the endpoint
        )  # fmt: skip

    async def handle(self, envelope: EventEnvelope[WebhookDelivery]) -> None:
        """Send one request. The type of an error determines whether and when it is retried."""
        delivery = envelope.event
        lane = self._lane(delivery.endpoint_id)
        async with lane.request():
            endpoint = await self._webhooks.endpoint(envelope)
            if endpoint is None:
                missing = f"endpoints= no longer returns endpoint {delivery.endpoint_id!r}"
                raise EndpointMissing(f"{missing}: it was removed or disabled")
            started = asyncio.get_running_loop().time()
            try:
                await self._sender.send(endpoint, str(delivery.event_id), delivery.body)
            except (DeliveryFailed, DeliveryPostponed, Unprocessable) as error:
                lane.failed(error)
                raise
            lane.succeeded(asyncio.get_running_loop().time() - started, envelope.event_date)

    async def on_dead(  # pyright: ignore[reportIncompatibleVariableOverride]  # a handler may write the option as a method
        self, envelope: EventEnvelope[WebhookDelivery], error: HandlerFailed
    ) -> None:
        """Disable an endpoint that is gone, or that has had no success since this event."""
        delivery: Any = envelope.event  # None if it cannot be decoded
        if delivery is None or not error.type.endswith(_OF_ENDPOINTS):  # such as an error of the callable endpoints
            return
        lane, is_gone = self._lane(delivery.endpoint_id), error.type.endswith(EndpointGone.__name__)
        if not is_gone and await self._has_worked(lane, envelope):
            return
        if lane.disable(envelope.notification_id, error.message):
            disabled = WebhookEndpointDisabled(delivery.endpoint_id, error.message)
            envelope.emit(disabled, model_id=delivery.endpoint_id, model_type=MODEL)

    async def _has_worked(self, lane: Lane, envelope: EventEnvelope[WebhookDelivery]) -> bool:
        """True if the endpoint has received a later event, according to this process or to the tables."""
        if lane.succeeded_date is not None and lane.succeeded_date > envelope.event_date:
            return True
        taken = Filter(
            states=["SUCCEEDED"], handler=self.name, model_id=envelope.event.endpoint_id, since=envelope.event_date
        )
        outbox: Any = envelope._context.outbox
        page = await outbox.admin.list(taken, 1, documents=False, shard=envelope.shard)
        return bool(page) or page.next is not None  # the read stopped before the end of the list

    def _lane(self, endpoint_id: str) -> Lane:
        known = self._lanes.pop(endpoint_id) if endpoint_id in self._lanes else None  # the newest is at the end
        lane = self._lanes[endpoint_id] = known or Lane()
        if len(self._lanes) > LANES:
            oldest = next(iter(self._lanes))
            if not (unused := self._lanes.pop(oldest)).is_idle():
                self._lanes[oldest] = unused
        return lane

    async def close(self) -> None:
        self._lanes.clear()
        await self._sender.close()


class EndpointMissing(Unprocessable):
    """The event of a delivery no longer has this endpoint."""


_OF_ENDPOINTS = tuple(cls.__name__ for cls in (DeliveryFailed, DeliveryPostponed, EndpointGone, UrlRefused))


def checked_endpoints(endpoints: Any) -> list[Endpoint]:
    """Return endpoints as a list with unique ids. Raises :class:`~outboxio.ConfigurationError` for anything else."""
    found: list[Any] = list(endpoints) if isinstance(endpoints, Iterable) else [endpoints]  # pyright: ignore[reportUnknownArgumentType]  # checked below
    for one in found:
        if not isinstance(one, Endpoint):
            raise ConfigurationError(
                f"endpoints= has {briefly(one)}; expected Endpoint objects, or a function that returns them"
            )
    by_key: dict[str, Endpoint] = {}
    for one in cast("list[Endpoint]", found):
        other = by_key.setdefault(one.key, one)
        if other.url != one.url:
            raise ConfigurationError(f"endpoints= has two URLs for the id {one.key!r}; give each endpoint its own id")
        if other is not one:  # two rows of customers with the same URL
            by_key[one.key] = Endpoint(one.url, list(dict.fromkeys([*other.secrets, *one.secrets])), one.key)
    return list(by_key.values())


def _body(envelope: Envelope) -> str:
    """Return the body recommended by Standard Webhooks, with the stored JSON of the event."""
    timestamp, data = f"{envelope.event_date.isoformat()}Z", msgspec.Raw(envelope.payload)
    return msgspec.json.encode({"type": envelope.event_type, "timestamp": timestamp, "data": data}).decode()
