"""Relays: handlers that send events to a broker, in batches, with a verdict for each message.

With ``ordered=True``, no message of a key leaves before the broker has the message before.
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
LONGEST_REST = 3.0  # seconds
HANDLER_TIMEOUT = timedelta(seconds=60)


class RelayOptions(TypedDict, total=False):
    """The keywords that the relays of all brokers have.

    * ``name``: the handler's name, which is stored with every notification.
    * ``types``: the event types to send, as classes or as stored names; or ``topic``, all events on a topic.
    * ``format``: ``"cloudevents"`` (attributes in headers), ``"structured"`` (one JSON document) or ``"debezium"``.
    * ``ordered``: messages with the same key leave in order, and a key waits behind its first failure.
    * ``publish_timeout``: how long the broker may take to acknowledge a message, 5 s by default.
    * The rest are options of handlers, as in ``@outbox.handler``.
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


Verdict = Exception | None
"""The end of one message: ``None`` if the broker has the message, else the reason.

* :class:`~outboxio.Unprocessable`: the broker will never take this message. The notification is DEAD.
* :class:`~outboxio.Unavailable`: the broker is away. No attempt is used up.
* a different error uses up an attempt, and the retry policy applies.
"""


class Relay(EventHandler[Any]):
    """A handler that sends each event to a broker. Subclasses know the client of one broker.

    A subclass implements :meth:`connect`, :meth:`disconnect`, :meth:`publish` and :meth:`destination_of`. The relay
    connects at the first event, and :meth:`close`, which the outbox calls at its end, closes the connection. A client
    that the application gave is used as it is, and not closed. Events that came through the inbox are not sent.
    """

    relay: ClassVar[bool] = True
    raw: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True
    """``publish`` keeps the order of a key. If False, an ordered relay gives it only one message of each key."""

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

        ``destination``: the function that :meth:`destination_of` calls, unless a subclass implements the method.
        """
        self._refuse_unknown(options)
        self.__dict__.update(_handler_options(options))  # class variables, which a relay has for each object
        self.publish_timeout = _seconds(options, "publish_timeout", PUBLISH_TIMEOUT)
        if _seconds(options, "timeout", HANDLER_TIMEOUT) <= self.publish_timeout:
            raise ConfigurationError(
                f"relay {self.name!r} has timeout={briefly(options.get('timeout'))} and publish_timeout="
                f"{self.publish_timeout} s: the call would end before the broker's answer; give a longer timeout"
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
        """Close the connection that :meth:`connect` opened, if there is one. A client that was given stays open."""

    @abstractmethod
    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[Verdict]:
        """Send messages, at once; a verdict for each, in the order of ``parcels``.

        With ``ordered``, messages of a key come in order. After the first failure of a key, the verdicts of the key's
        later messages do not count: these messages are sent again after the failed message.

        Raises :class:`ConnectionError` if the connection is lost and nothing is known about any message: the relay
        closes the connection, no attempt is used up, and all are sent again.
        """

    def destination_of(self, message: Message) -> str:
        """The topic, subject, routing key or stream of a message, unless the format names one.

        Raises :class:`~outboxio.Unprocessable` if the message has no such destination.
        """
        assert self._destination is not None, "a subclass implements the method, or gives destination="
        return self._destination(message)

    def address_of(self, event_type: str, namespace: str) -> str | None:
        """The destination of an event type for the catalogue: parts that differ by event are in braces.

        ``None`` if a function of the application decides, and needs a real event.
        """
        message = Message(
            id="{event_id}", type=event_type, source=f"/{namespace}", subject="{model_id}", key="{key}",
            time=datetime.min, data=b"{}", attributes={"modeltype": "{model_type}"},
        )  # fmt: skip
        try:
            return self._encode(message).destination or self.destination_of(message)
        except Exception:  # of a function that the application gave
            return None

    @property
    def is_up(self) -> bool:
        """True if the connection is open, as far as the client knows."""
        return self.is_connected

    async def handle(self, given: Any) -> list[tuple[EventEnvelope[Any], Exception]]:
        """Send the events of a call; the events that failed, each with the reason.

        ``given`` is a list of envelopes, or in a relay with ``batch=None`` one envelope, whose failure is raised.
        """
        if isinstance(given, list):
            return await self.send(cast("list[EventEnvelope[Any]]", given))
        for _, error in await self.send([given]):
            raise error
        return []

    async def send(self, envelopes: list[EventEnvelope[Any]]) -> list[tuple[EventEnvelope[Any], Exception]]:
        """Send events; the events that failed, each with the reason."""
        sent, parcels, failed = self._parcels(envelopes)
        if not parcels:
            return failed
        try:
            verdicts = await self._verdicts(parcels)
        except Unavailable:
            self._failures += 1
            raise
        is_away = False
        for envelope, verdict in zip(sent, verdicts, strict=True):
            if verdict is not None:
                failed.append((envelope, verdict))
                is_away = is_away or isinstance(verdict, Unavailable)
        self._failures = self._failures + 1 if is_away else 0
        return failed

    async def _verdicts(self, parcels: Sequence[Parcel]) -> Sequence[Verdict]:
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
        """The events to send, their messages, and the events that make no message, each with the reason."""
        sent: list[EventEnvelope[Any]] = []
        parcels: list[Parcel] = []
        failed: list[tuple[EventEnvelope[Any], Exception]] = []
        encode, destination_of = self._encode, self.destination_of
        behind: set[str] = set()
        for envelope in envelopes:
            if behind and envelope.ordering_key in behind:
                continue  # the event comes again, after the event of the key that makes no message
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
        """Close the connection, unless the application gave the client. The outbox calls this at its end."""
        await self.leave()

    def unavailable(self, reason: str) -> Unavailable:
        """The error for a broker that is away. The handler rests 0.1 s, doubled by each call that fails, up to 3 s.

        So a relay is back at work soon after its broker, even after hours.
        """
        return Unavailable(reason, retry_in=pause_after(self._failures + 1, longest=LONGEST_REST))

    async def leave(self) -> None:
        """Close a connection that is lost, so that the next call connects."""
        async with self._connecting:
            self.is_connected = False
            await self.disconnect()

    async def ensure_connected(self) -> None:
        """Connect, unless the connection is open, or another call opens it at the same time."""
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
    """The attributes that an :class:`EventHandler` has for these options."""
    return {
        "retry": RetryPolicy(base="1s", cap="1m"),
        "batch": Batch(size=500, max_wait=0),
        "event_types": options.get("types", ()),
        **{name: value for name, value in options.items() if name not in _OF_RELAYS},
    }


def _seconds(options: RelayOptions, name: Literal["publish_timeout", "timeout"], default: timedelta) -> float:
    given = options.get(name)
    return (default if given is None else parse_duration(given, key=name)).total_seconds()


async def publish_in_order(
    parcels: Sequence[Parcel], publish: Callable[[Sequence[Parcel]], Awaitable[Sequence[Verdict]]]
) -> list[Verdict]:
    """Publish messages in waves. A wave has one message of each key; a key waits behind its first failure."""
    waves: list[list[int]] = []
    seen: dict[str, int] = {}
    for place, parcel in enumerate(parcels):
        number = seen.get(parcel.message.key, 0)
        seen[parcel.message.key] = number + 1
        if number == len(waves):
            waves.append([])
        waves[number].append(place)
    verdicts: list[Verdict] = [None] * len(parcels)
    failed: dict[str, Exception] = {}
    for wave in waves:
        going: list[int] = []
        for place in wave:
            verdicts[place] = failed.get(parcels[place].message.key)
            if verdicts[place] is None:
                going.append(place)
        if not going:
            continue
        for place, verdict in zip(going, await publish([parcels[place] for place in going]), strict=True):
            if verdict is not None:
                verdicts[place] = failed[parcels[place].message.key] = verdict
    return verdicts


def too_large(parcel: Parcel, reason: str, fix: str) -> Unprocessable:
    """The verdict for a message that the broker would never take."""
    advice = f"{fix}, or store the large part elsewhere and send its address"
    return Unprocessable(f"event {parcel.message.id} {reason}: {advice}")
