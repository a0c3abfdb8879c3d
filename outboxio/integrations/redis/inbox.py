"""The inbox of a stream of Redis."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from redis.exceptions import ResponseError

from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.integrations.brokers.inbox import BrokerInbox
from outboxio.integrations.brokers.incoming import Fallback, Incoming, incoming_of
from outboxio.integrations.redis.connection import Connection, Server
from outboxio.support.text import briefly

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

WAIT = 0.5  # seconds that a fetch waits for the first message
ANSWER = 5.0  # seconds that an answer may take

Fields = Mapping[bytes, bytes]
Entry = tuple[bytes, Fields | None]


class InboxOptions(TypedDict, total=False):
    """The keywords that the inboxes of all brokers have: see :class:`~outboxio.integrations.brokers.BrokerInbox`."""

    source: str | None
    type: str | None
    topic: str | None
    batch: int
    shard: str | None


class RedisInbox(BrokerInbox):
    """Stores the messages of a stream in the inbox of an outbox, each once.

    ``server``: as for :class:`RedisRelay`; a client that is given must not decode answers. ``stream``: the key of the
    stream. ``group``: the consumer group, which keeps the position; the inbox makes a missing group, from the first
    message. Processes with the same ``group`` share the messages. ``claim_after``: seconds after which a message that
    another process has left unacknowledged is taken over. ``consumer``: the name in the group, by default a new one.
    ``connect``: keywords of ``redis.asyncio.from_url``. Further keywords:
    :class:`~outboxio.integrations.brokers.inbox.BrokerInbox`.

    A message that can never be stored is moved to the stream ``<stream>.dead``, with the reason in the field
    ``outboxio_reason``. Let a single process with a fixed ``consumer`` read a stream whose order matters.

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
            raise ConfigurationError(f"claim_after is {briefly(claim_after)}; expected seconds above 0")
        self.stream = stream
        self.group = group
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._is_passing = consumer is None
        self._claim_after = claim_after
        self._connection = Connection(server, connect or {}, name=f"inbox of {self.place}", timeout=WAIT + ANSWER)
        self._has_old = True
        """True while messages may be left that this consumer has fetched and not acknowledged."""
        self._claims_at = 0.0
        self._cursor: bytes | str = "0-0"

    @property
    def place(self) -> str:
        return f"stream {self.stream} ({self.group})"

    async def connect(self) -> None:
        await self._connection.open()
        try:
            await self._connection.client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
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
        entries = await self._own_old(most) or await self._left_by_others(most) or await self._new(most)
        return [self._incoming(entry) for entry in entries]

    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        await self._connection.client.xack(self.stream, self.group, *(message.raw[0] for message in messages))

    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        number, fields = message.raw
        parts: list[bytes] = [part for field in cast("Fields", fields or {}).items() for part in field]
        why = ("outboxio_stream", self.stream, "outboxio_entry", number, "outboxio_reason", error.without_value)
        # Not in a transaction: Redis would acknowledge although it has refused to append, as to a key of another type.
        client, dead = self._connection.client, f"{self.stream}.dead"
        try:
            await client.execute_command("XADD", dead, "*", *parts, *why)
        except ResponseError as refusal:
            raise ConnectionError(f"Redis does not append message {message.place} to {dead!r}: {refusal}") from refusal
        await client.xack(self.stream, self.group, number)

    async def _own_old(self, most: int) -> list[Entry]:
        if not self._has_old:
            return []
        entries = await self._read(most, "0", None)
        self._has_old = bool(entries)
        return entries

    async def _left_by_others(self, most: int) -> list[Entry]:
        """Messages of consumers that have died. Redis is asked twice in ``claim_after``."""
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

    async def _new(self, most: int) -> list[Entry]:
        return await self._read(most, ">", int(WAIT * 1000))

    async def _read(self, most: int, after: str, block: int | None) -> list[Entry]:
        wait = () if block is None else ("BLOCK", block)
        client = self._connection.client
        answer = await client.execute_command(
            "XREADGROUP", "GROUP", self.group, self.consumer, "COUNT", most, *wait, "STREAMS", self.stream, after
        )
        if not answer:
            return []
        [stream] = cast("dict[bytes, Any]", answer).items() if isinstance(answer, dict) else answer
        return _entries(stream[1])

    async def _leave_group(self) -> None:
        """Remove the consumer, unless messages are unacknowledged: Redis would forget these."""
        client = self._connection.client
        if not await client.xpending_range(self.stream, self.group, "-", "+", 1, consumername=self.consumer):
            await client.xgroup_delconsumer(self.stream, self.group, self.consumer)

    def _incoming(self, entry: Entry) -> Incoming:
        number, given = entry
        id = f"{self.stream}/{number.decode()}"
        if given is None:  # removed from the stream by MAXLEN or XDEL before the inbox has read the message
            return Incoming(place=id, raw=entry, flaw=InvalidEvent(f"message {id!r}", "the stream has removed it"))
        fields = dict(given)
        body = fields.pop(b"data", None)
        if body is None:
            flaw = InvalidEvent(f"message {id!r}", "it has no field 'data' with the JSON of the event")
            return Incoming(place=id, raw=entry, flaw=flaw)
        headers = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
        fallback = Fallback(id=id, source=self.source or f"redis:{self.stream}", type=self.type)
        return incoming_of(headers, body, fallback=fallback, raw=entry)


def _entries(found: Any) -> list[Entry]:
    """Entries as pairs of id and fields, whichever protocol and parser of the client."""
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
