"""Redis Streams: a relay that appends events to a stream, and an inbox that receives from a stream.

Needs ``outboxio[redis]``, that is redis-py, and Redis 6.2 or newer.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from outboxio.errors import ConfigurationError, InvalidEvent, OutboxError
from outboxio.integrations.brokers.connection import CONNECT_TIMEOUT, BrokerConnection
from outboxio.integrations.brokers.inbox import ANSWER, WAIT, BrokerInbox, InboxOptions, Incoming, incoming_of
from outboxio.integrations.brokers.message import Template
from outboxio.integrations.brokers.relay import DeliveryResult, Parcel, Relay, RelayOptions, too_large
from outboxio.support.text import briefly, without_passwords

try:
    import redis.asyncio as aioredis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError, ResponseError
except ImportError as error:
    raise ConfigurationError("outboxio.integrations.redis needs redis-py: pip install 'outboxio[redis]'") from error

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

__all__ = ["AppendRefused", "RedisInbox", "RedisRelay"]

LARGEST_VALUE = 512 * 2**20  # bytes, unless Redis reports a different proto-max-bulk-len
REMEMBERS_IDS = (8, 6)
"""The first version of Redis whose XADD deduplicates messages by id."""
_AWAY = ("OOM", "LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "MISCONF", "NOREPLICAS", "TRYAGAIN")
_LOST = (OSError, TimeoutError, RedisError)
"""The errors of a connection that is lost, or that Redis refuses."""
_is_id = re.compile(r"\d+-\d+").fullmatch  # the id of an appended message

Server = str | aioredis.Redis
"""A URL such as ``redis://:password@localhost:6379/0``, or a client that your application creates and closes."""

Fields = Mapping[bytes, bytes]
Entry = tuple[bytes, Fields | None]


class _RedisConnection(BrokerConnection):
    """A client that reconnects after a failure, and does not retry commands.

    The options are those of ``redis.asyncio.from_url``, such as ``ssl_ca_certs``.
    """

    broker = "Redis"
    url = "redis://localhost:6379/0"
    _client: aioredis.Redis | None = None

    @property
    def client(self) -> Any:  # redis-py types the answers of few commands
        """The client; :class:`ConnectionError` if :meth:`open` was not called."""
        if self._client is None:
            raise ConnectionError(self.reason())
        return self._client

    async def open(self, timeout: float) -> None:
        """Connect. ``timeout`` is how long Redis may take to answer, in seconds.

        Raises :class:`ConnectionError` with the reason: no server, credentials, or a certificate.
        """
        if self.is_given:
            self._client = self.server
        else:
            # No retries by the client: a repeated XADD could append a message twice, or out of order.
            retry, connect = Retry(NoBackoff(), 0), CONNECT_TIMEOUT
            options = {"retry": retry, "socket_connect_timeout": connect, "socket_timeout": timeout, **self.options}
            try:
                self._client = aioredis.from_url(self.server, **options)
            except ValueError as error:
                url = without_passwords(self.server)
                raise ConfigurationError(f"server={url!r} is not a Redis URL: {error}") from error
        try:
            await self.client.ping()
        except _LOST as error:
            raise ConnectionError(self.reason(error)) from error

    async def close(self) -> None:
        """Close the client, if :meth:`open` created it."""
        found, self._client = self._client, None
        if found is not None and not self.is_given:
            await found.aclose()


class AppendRefused(OutboxError):
    """Redis rejected a message, for example because the key does not hold a stream."""


class RedisRelay(Relay):
    """Appends events to a Redis stream.

    ``server``: a URL, or a client of redis-py (``redis.asyncio``), which the relay does not close. ``stream``: the key
    of the stream, a template with the fields ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and
    ``{key}``. ``maxlen``: the approximate length of a stream; Redis removes older messages, **read or not**. ``None``
    keeps all. ``connect``: options of ``redis.asyncio.from_url``. ``options`` are those of all relays
    (:class:`~outboxio.integrations.brokers.relay.RelayOptions`).

    The messages of a batch are sent in one pipeline. Redis 8.6 and later deduplicates retried messages (``IDMP``). With
    ``ordered=True``, a message is sent only after the previous message of its key has been appended.

    * If Redis rejects a message, the attempt counts, and the retry policy applies.
    * A message that is too large becomes DEAD.
    * While Redis is unavailable, refuses the credentials, or is out of memory, the handler's circuit is open, and no
      attempt counts.

    Raises :class:`~outboxio.ConfigurationError` for an invalid option or template.

    Example::

        outbox.add_handler(
            RedisRelay("redis://localhost", name="to-redis", types=(MoneyDeposited,), stream="wallets")
        )
    """

    keeps_order: ClassVar[bool] = False

    def __init__(
        self,
        server: Server,
        *,
        stream: str,
        maxlen: int | None = None,
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        super().__init__(prefix="ce_", destination=Template(stream, option="stream"), **options)
        if maxlen is not None and (not isinstance(maxlen, int) or maxlen < 1):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(f"maxlen is {briefly(maxlen)}; expected a whole number from 1, or None")
        self._maxlen = maxlen
        self._connection = _RedisConnection(server, connect, name=f"relay {self.name!r}")
        self._largest = LARGEST_VALUE
        self._remembers_ids = False

    async def connect(self) -> None:
        await self._connection.open(self.publish_timeout)
        client = self._connection.client
        server: dict[str, Any] = {}
        limits: dict[str, Any] = {}
        with suppress(ResponseError):  # without the permission, assume an older version
            server = await client.info("server")
        with suppress(ResponseError):  # many hosts forbid CONFIG
            limits = await client.config_get("proto-max-bulk-len")
        self._remembers_ids = version_of(server.get("redis_version", "")) >= REMEMBERS_IDS
        self._largest = int(limits.get("proto-max-bulk-len") or LARGEST_VALUE)

    async def disconnect(self) -> None:
        await self._connection.close()

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[DeliveryResult]:
        results: list[DeliveryResult] = [self._flaw(parcel) for parcel in parcels]
        places = [place for place, flaw in enumerate(results) if flaw is None]
        if not places:
            return results
        try:
            async with self._connection.client.pipeline(transaction=False) as pipeline:
                for place in places:
                    pipeline.execute_command(*self._command(parcels[place]))
                answers = await pipeline.execute(raise_on_error=False)
        except _LOST as error:
            raise ConnectionError(self._connection.reason(error)) from error
        for place, answer in zip(places, answers, strict=True):
            if not _is_id(answer.decode() if isinstance(answer, bytes) else str(answer)):
                results[place] = self._result(parcels[place], answer)
        return results

    def _command(self, parcel: Parcel) -> list[str | bytes | int]:
        message, wire = parcel.message, parcel.wire
        once = ("IDMP", message.source, message.id) if self._remembers_ids else ()
        trim = ("MAXLEN", "~", self._maxlen) if self._maxlen is not None else ()
        fields = (part for field in wire.headers.items() for part in field)
        return [
            "XADD", parcel.destination, *once, *trim, "*", *fields, "content-type", wire.content_type, "data", wire.body
        ]  # fmt: skip

    def _flaw(self, parcel: Parcel) -> DeliveryResult:
        """Check the size first: for a larger message Redis closes the connection, and all others fail too."""
        size = len(parcel.wire.body)
        if size <= self._largest:
            return None
        reason = f"has {size} bytes; Redis accepts at most {self._largest}"
        return too_large(parcel, reason, "raise proto-max-bulk-len of Redis")

    def _result(self, parcel: Parcel, answer: Any) -> Exception:
        text = str(answer)
        if not isinstance(answer, Exception):  # QUEUED, if your application left a transaction open on its client
            return AppendRefused(f"Redis did not return a message id for the stream {parcel.destination!r}: {text}")
        if not isinstance(answer, ResponseError) or text.startswith(_AWAY) or type(answer) is not ResponseError:
            return self.unavailable(self._connection.reason(answer))
        hint = ": the key does not hold a stream; delete the key, or change stream=" if "WRONGTYPE" in text else ""
        return AppendRefused(f"Redis refused a message to the stream {parcel.destination!r}: {text}{hint}")


def version_of(version: str) -> tuple[int, ...]:
    """Parse a version into its numbers.

    Example::

        version_of("7.0.15")  # (7, 0, 15)
    """
    return tuple(int(part) for part in str(version).split(".") if part.isdigit())


class RedisInbox(BrokerInbox):
    """Stores the messages of a stream in the inbox of an outbox, each exactly once.

    ``server``: as for :class:`RedisRelay`; your own client must not decode responses. ``stream``: the key of the
    stream. ``group``: the consumer group, which stores the position; a missing group is created and starts at the first
    message. Processes with the same ``group`` share the messages. ``claim_after``: seconds after which messages that
    another process left unacknowledged are taken over. ``consumer``: the consumer name in the group, unique by default.
    ``connect``: options of ``redis.asyncio.from_url``. All other options:
    :class:`~outboxio.integrations.brokers.inbox.BrokerInbox`.

    A message that can never be stored is moved to the stream ``<stream>.dead``, with the reason in the field
    ``outboxio_reason``. If the order matters, read the stream in a single process with a fixed ``consumer``.

    Example::

        async with outbox.running(), RedisInbox(outbox, "redis://localhost", stream="wallets", group="audit").running():
            await stop.wait()
    """

    def __init__(
        self,
        outbox: Outbox,
        server: Server,
        *,
        stream: str,
        group: str,
        consumer: str | None = None,
        claim_after: float = 30.0,
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[InboxOptions],
    ) -> None:
        super().__init__(outbox, **options)
        for option, name in (("stream", stream), ("group", group)):
            if not name:
                raise ConfigurationError(f"{option} is {briefly(name)}; expected a name")
        if claim_after <= 0:
            raise ConfigurationError(f"claim_after is {briefly(claim_after)}; expected a positive number of seconds")
        self.stream = stream
        self.group = group
        self.place = f"stream {stream} ({group})"
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._is_passing = consumer is None
        self._claim_after = claim_after
        self._connection = _RedisConnection(server, connect, name=f"inbox of {self.place}")
        self._has_old = True
        """True while this consumer may have fetched messages that it has not acknowledged."""
        self._claims_at = 0.0
        self._cursor: bytes | str = "0-0"

    async def connect(self) -> None:
        await self._connection.open(WAIT + ANSWER)
        try:
            await self._connection.client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):  # the group exists
                raise
        self._has_old = True
        self._claims_at = 0.0

    async def disconnect(self) -> None:
        try:
            if self.stopping.is_set() and self._is_passing:
                await self._leave_group()
        finally:
            await self._connection.close()

    async def fetch(self, most: int) -> Sequence[Incoming]:
        entries = await self._own_old(most) or await self._left_by_others(most)
        entries = entries or await self._read(most, ">", "BLOCK", int(WAIT * 1000))
        return [self._incoming(entry) for entry in entries]

    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        await self._connection.client.xack(self.stream, self.group, *(message.raw[0] for message in messages))

    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        number, fields = message.raw
        parts: list[bytes] = [part for field in cast("Fields", fields or {}).items() for part in field]
        why = ("outboxio_stream", self.stream, "outboxio_entry", number, "outboxio_reason", error.without_value)
        # Not in a transaction: Redis would acknowledge even if XADD fails, such as for a key of another type.
        client, dead = self._connection.client, f"{self.stream}.dead"
        try:
            await client.execute_command("XADD", dead, "*", *parts, *why)
        except ResponseError as refusal:
            raise ConnectionError(
                f"Redis refused to append message {message.place} to {dead!r}: {refusal}"
            ) from refusal
        await client.xack(self.stream, self.group, number)

    async def _own_old(self, most: int) -> list[Entry]:
        entries = await self._read(most, "0") if self._has_old else []
        self._has_old = bool(entries)
        return entries

    async def _left_by_others(self, most: int) -> list[Entry]:
        """Claim messages of dead consumers. Checked twice per ``claim_after``."""
        if time.monotonic() < self._claims_at:
            return []
        client = self._connection.client
        answer = await client.execute_command(
            "XAUTOCLAIM", self.stream, self.group, self.consumer, int(self._claim_after * 1000), self._cursor,
            "COUNT", most,
        )  # fmt: skip
        self._cursor, entries = answer[0], _entries(answer[1])
        if self._cursor in (b"0-0", "0-0"):
            self._claims_at = time.monotonic() + self._claim_after / 2
        return entries

    async def _read(self, most: int, after: str, *wait: str | int) -> list[Entry]:
        client = self._connection.client
        answer = await client.execute_command(
            "XREADGROUP", "GROUP", self.group, self.consumer, "COUNT", most, *wait, "STREAMS", self.stream, after
        )
        if not answer:
            return []
        [stream] = cast("dict[bytes, Any]", answer).items() if isinstance(answer, dict) else answer
        return _entries(stream[1])

    async def _leave_group(self) -> None:
        """Remove the consumer, unless it has unacknowledged messages, which Redis would lose track of."""
        client = self._connection.client
        if not await client.xpending_range(self.stream, self.group, "-", "+", 1, consumername=self.consumer):
            await client.xgroup_delconsumer(self.stream, self.group, self.consumer)

    def _incoming(self, entry: Entry) -> Incoming:
        number, found = entry
        id = f"{self.stream}/{number.decode()}"
        if found is None:  # removed from the stream by MAXLEN or XDEL before the inbox has read the message
            return Incoming(
                place=id,
                raw=entry,
                flaw=InvalidEvent(f"message {id!r}", "it was removed from the stream before it was read"),
            )
        fields = dict(found)
        body = fields.pop(b"data", None)
        if body is None:
            flaw = InvalidEvent(f"message {id!r}", "it has no field 'data' with the JSON of the event")
            return Incoming(place=id, raw=entry, flaw=flaw)
        headers = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
        return incoming_of(headers, body, fallback=self.fallback(id, f"redis:{self.stream}"), raw=entry)


def _entries(found: Any) -> list[Entry]:
    """Normalize entries to pairs of id and fields, for every protocol version and parser of the client."""
    entries: list[Entry] = []
    for each in found:
        if each is None or each[0] is None:  # Redis 6.2: claimed, and removed from the stream
            continue
        fields = each[1]
        if isinstance(fields, list):
            flat = cast("list[bytes]", fields)
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
        entries.append((each[0], fields))
    return entries
