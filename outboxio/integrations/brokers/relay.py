"""Relays: handlers that send events to a broker, in batches, with a result for each message.

With ``ordered=True``, a message is sent only after the broker has acknowledged the previous message of the same key.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, Required, TypedDict, Unpack, cast

from msgspec import Struct

from outboxio.errors import ConfigurationError, Unavailable, Unprocessable
from outboxio.handlers.handler import EventHandler
from outboxio.handlers.options import Batch
from outboxio.integrations.brokers.message import Escape, Message, Wire, message_of, wire_format
from outboxio.model.envelope import EventEnvelope
from outboxio.model.retry import Backoff, RetryPolicy
from outboxio.support.duration import parse_duration, pause_after
from outboxio.support.log import type_name
from outboxio.support.text import briefly, instead_of

PUBLISH_TIMEOUT = timedelta(seconds=5)
LONGEST_PAUSE = 3.0  # seconds
HANDLER_TIMEOUT = timedelta(seconds=60)


class RelayOptions(TypedDict, total=False):
    """The options that the relays of all brokers share.

    * ``name``: the handler's name, which is stored with every notification.
    * ``types``: the event types to send, as classes or as stored names; or ``topic``, all events on a topic.
    * ``format``: ``"cloudevents"`` (attributes in headers), ``"structured"`` (one JSON document) or ``"debezium"``.
    * ``ordered``: send messages with the same key in order; a failed message blocks its key.
    * ``publish_timeout``: how long the broker may take to acknowledge a message, 5 s by default.
    * All other options are handler options, as in ``@outbox.handler``.
    """

    name: Required[str]
    types: Iterable[Any]
    topic: str | None
    aliases: Iterable[str]
    format: Literal["cloudevents", "structured", "debezium"]
    publish_timeout: timedelta | float | str
    ordered: bool
    on_dead_key: Any
    partitions: int
    batch: Batch | None
    retry: RetryPolicy | Backoff | None
    timeout: timedelta | float | str | None
    concurrency: int | None
    total_concurrency: int | None
    priority: int
    since: datetime | Literal["now"] | None
    alert_age: timedelta | float | str
    on_dead: Any


class Parcel(Struct, frozen=True, gc=False):
    """A message on its way to a broker."""

    message: Message
    wire: Wire
    destination: str


DeliveryResult = Exception | None
"""The result for one message: ``None`` if the broker has acknowledged it, otherwise the error.

* :class:`~outboxio.Unprocessable`: the broker can never accept this message; the notification becomes DEAD.
* :class:`~outboxio.Unavailable`: the broker is unavailable; this does not count as an attempt.
* Any other error counts as an attempt, and the retry policy applies.
"""


class Relay(EventHandler[Any]):
    """A handler that sends each event to a broker. Each subclass supports one broker.

    A subclass implements :meth:`connect`, :meth:`disconnect`, :meth:`publish` and :meth:`destination_of`. The relay
    connects when the first event arrives; the outbox calls :meth:`close` when it stops. A client that your application
    passes in is used as is and never closed. Events received through the inbox are not sent.
    """

    relay: ClassVar[bool] = True
    raw: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True
    """``publish`` keeps the order of a key. If False, an ordered relay passes it at most one message of each key."""

    def __init__(
        self,
        *,
        prefix: str,
        escape: Escape = str,
        fit: Escape = str,
        destination: Callable[[Message], str] | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        """``prefix``, ``escape`` and ``fit``: as for :func:`~outboxio.integrations.brokers.wire_format`.

        ``destination``: the function that :meth:`destination_of` calls, unless a subclass overrides the method.
        """
        self._refuse_unknown(options)
        self.__dict__.update(_handler_options(options))  # class variables, which a relay has for each object
        self.publish_timeout = _seconds(options, "publish_timeout", PUBLISH_TIMEOUT)
        if _seconds(options, "timeout", HANDLER_TIMEOUT) <= self.publish_timeout:
            raise ConfigurationError(
                f"relay {self.name!r} has timeout={briefly(options.get('timeout'))} and publish_timeout="
                f"{self.publish_timeout} s: the handler would time out before the broker answers; set a longer timeout"
            )
        self.is_connected = False
        self._encode = wire_format(options.get("format", "cloudevents"), prefix=prefix, escape=escape, fit=fit)
        self._destination = destination
        self._connecting = asyncio.Lock()
        self._failures = 0

    @abstractmethod
    async def connect(self) -> None:
        """Connect to the broker. Raises :class:`~outboxio.Unavailable` with a reason, or any error of the client."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Close the connection that :meth:`connect` opened, if any. A client of your application stays open."""

    @abstractmethod
    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[DeliveryResult]:
        """Send messages concurrently, and return a result for each, in the order of ``parcels``.

        With ``ordered``, the messages of a key are passed in order. After the first failure of a key, the results of
        its later messages are ignored: they are sent again after the failed message.

        Raises :class:`ConnectionError` if the connection is lost and the result of every message is unknown. The relay
        then closes the connection and sends all messages again, without counting an attempt.
        """

    def destination_of(self, message: Message) -> str:
        """Return the topic, subject, routing key or stream of a message. Not called if the format determines it.

        Raises :class:`~outboxio.Unprocessable` if the message has no such destination.
        """
        assert self._destination is not None, "a subclass must override the method or pass destination="
        return self._destination(message)

    def address_of(self, event_type: str, namespace: str) -> str | None:
        """Return the destination of an event type for the catalog, with braces around the parts that vary by event.

        ``None`` if your application's function decides, and needs a real event.
        """
        message = Message(
            id="{event_id}", type=event_type, source=f"/{namespace}", subject="{model_id}", key="{key}",
            time=datetime.min, data=b"{}", attributes={"modeltype": "{model_type}"},
        )  # fmt: skip
        try:
            return self._encode(message).destination or self.destination_of(message)
        except Exception:  # from your application's function
            return None

    @property
    def is_up(self) -> bool:
        """True if the connection is open, as far as the client knows."""
        return self.is_connected

    async def handle(self, envelopes: Any) -> list[tuple[EventEnvelope[Any], Exception]]:
        """Send the events of a call, and return those that failed, each with its error.

        ``envelopes`` is a list, or with ``batch=None`` a single envelope, whose error is raised.
        """
        if isinstance(envelopes, list):
            return await self.send(cast("list[EventEnvelope[Any]]", envelopes))
        for _, error in await self.send([envelopes]):
            raise error
        return []

    async def send(self, envelopes: list[EventEnvelope[Any]]) -> list[tuple[EventEnvelope[Any], Exception]]:
        """Send events, and return those that failed, each with its error."""
        sent, parcels, failed = self._parcels(envelopes)
        if not parcels:
            return failed
        try:
            results = await self._results(parcels)
        except Unavailable:
            self._failures += 1
            raise
        is_away = False
        for envelope, result in zip(sent, results, strict=True):
            if result is not None:
                failed.append((envelope, result))
                is_away = is_away or isinstance(result, Unavailable)
        self._failures = self._failures + 1 if is_away else 0
        return failed

    async def _results(self, parcels: Sequence[Parcel]) -> Sequence[DeliveryResult]:
        await self.ensure_connected()
        try:
            if self.ordered and not self.keeps_order:
                return await publish_in_order(parcels, self.publish)
            return await self.publish(parcels)
        except ConnectionError as error:
            await self.leave()
            raise self.unavailable(str(error)) from error

    def _parcels(
        self, envelopes: Iterable[EventEnvelope[Any]]
    ) -> tuple[list[EventEnvelope[Any]], list[Parcel], list[tuple[EventEnvelope[Any], Exception]]]:
        """Return the events to send, their messages, and the events that cannot be encoded, each with its error."""
        sent: list[EventEnvelope[Any]] = []
        parcels: list[Parcel] = []
        failed: list[tuple[EventEnvelope[Any], Exception]] = []
        encode, destination_of = self._encode, self.destination_of
        behind: set[str] = set()
        for envelope in envelopes:
            if behind and envelope.ordering_key in behind:
                continue  # retried after the earlier event of the key that could not be encoded
            try:
                message = message_of(envelope)
                wire = encode(message)
                parcels.append(Parcel(message, wire, wire.destination or destination_of(message)))
            except Unprocessable as error:
                failed.append((envelope, error))
                if self.ordered and envelope.ordering_key is not None:
                    behind.add(envelope.ordering_key)
            else:
                sent.append(envelope)
        return sent, parcels, failed

    async def close(self) -> None:
        """Close the connection, unless the client belongs to your application. The outbox calls this when it stops."""
        await self.leave()

    def unavailable(self, reason: str) -> Unavailable:
        """Return the error for an unavailable broker. It opens the handler's circuit for 0.1 s, doubling up to 3 s.

        The low maximum lets a relay resume soon after its broker, even after a long outage.
        """
        return Unavailable(reason, retry_in=pause_after(self._failures + 1, longest=LONGEST_PAUSE))

    async def leave(self) -> None:
        """Close a lost connection, so that the next call reconnects."""
        async with self._connecting:
            self.is_connected = False
            await self.disconnect()

    async def ensure_connected(self) -> None:
        """Connect, unless the connection is open or another call is opening it."""
        if self.is_up:
            return
        async with self._connecting:
            if self.is_up:
                return
            if self.is_connected:
                self.is_connected = False
                await self.disconnect()
            try:
                await self.connect()
            except (OSError, TimeoutError) as error:
                reason = str(error) or type_name(error)
                raise self.unavailable(f"relay {self.name!r} cannot connect: {reason}") from error
            self.is_connected = True

    @staticmethod
    def _refuse_unknown(options: RelayOptions) -> None:
        for option in options:
            if option not in RelayOptions.__annotations__:
                hint = instead_of(option, RelayOptions.__annotations__)
                raise ConfigurationError(f"relay {options.get('name')!r} has no option {option!r}: {hint}")


_OF_RELAYS = ("types", "format", "publish_timeout")


def _handler_options(options: RelayOptions) -> dict[str, Any]:
    """Return the attributes that an :class:`EventHandler` has for these options."""
    return {
        "retry": RetryPolicy(base="1s", cap="1m"),
        "batch": Batch(size=500, max_wait=0),
        "event_types": options.get("types", ()),
        **{name: value for name, value in options.items() if name not in _OF_RELAYS},
    }


def _seconds(options: RelayOptions, name: Literal["publish_timeout", "timeout"], default: timedelta) -> float:
    value = options.get(name)
    return (default if value is None else parse_duration(value, key=name)).total_seconds()


async def publish_in_order(
    parcels: Sequence[Parcel], publish: Callable[[Sequence[Parcel]], Awaitable[Sequence[DeliveryResult]]]
) -> list[DeliveryResult]:
    """Publish messages in waves with at most one message of each key; a failed message blocks its key."""
    waves: list[list[int]] = []
    seen: dict[str, int] = {}
    for place, parcel in enumerate(parcels):
        number = seen.get(parcel.message.key, 0)
        seen[parcel.message.key] = number + 1
        if number == len(waves):
            waves.append([])
        waves[number].append(place)
    results: list[DeliveryResult] = [None] * len(parcels)
    failed: dict[str, Exception] = {}
    for wave in waves:
        going: list[int] = []
        for place in wave:
            results[place] = failed.get(parcels[place].message.key)
            if results[place] is None:
                going.append(place)
        if not going:
            continue
        for place, result in zip(going, await publish([parcels[place] for place in going]), strict=True):
            if result is not None:
                results[place] = failed[parcels[place].message.key] = result
    return results


def too_large(parcel: Parcel, reason: str, fix: str) -> Unprocessable:
    """Return the error for a message that is too large for the broker."""
    advice = f"{fix}, or store the large part elsewhere and send a reference to it"
    return Unprocessable(f"event {parcel.message.id} {reason}: {advice}")
