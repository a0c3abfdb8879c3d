"""The relay to a stream of Redis."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from redis.exceptions import ResponseError

from outboxio.errors import ConfigurationError, OutboxError, Unprocessable
from outboxio.integrations.brokers.in_order import publish_in_order
from outboxio.integrations.brokers.message import Message
from outboxio.integrations.brokers.relay import Parcel, Relay, RelayOptions, Verdict
from outboxio.integrations.brokers.template import Template
from outboxio.integrations.redis.connection import LOST, Connection, Server
from outboxio.support.text import briefly

LARGEST_VALUE = 512 * 2**20  # bytes, unless Redis tells a different proto-max-bulk-len
REMEMBERS_IDS = (8, 6)
"""The first version of Redis whose XADD takes the id of a message, and appends a repeated id once."""
_AWAY = ("OOM", "LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "MISCONF", "NOREPLICAS", "TRYAGAIN")


_is_id = re.compile(r"\d+-\d+").fullmatch  # the id of an appended message


class AppendRefused(OutboxError):
    """Redis has refused a message, for example because the key holds no stream."""


class RedisRelay(Relay):
    """Appends events to a stream of Redis, with an answer for each message.

    ``server``: a URL, or a client of redis-py (``redis.asyncio``), which the relay does not close. ``stream``: the key
    of the stream, a template with the fields ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and
    ``{key}``. ``maxlen``: about how many messages a stream keeps; Redis removes older messages, **read or not**.
    ``None`` keeps all. ``connect``: keywords of ``redis.asyncio.from_url``. ``options`` are those of all relays
    (:class:`~outboxio.integrations.brokers.relay.RelayOptions`).

    The messages of a batch go in one pipeline. Redis 8.6 and newer append a message that is sent again once (``IDMP``).
    With ``ordered=True`` a message waits for the answer to the message before with the same key.

    * A message that Redis refuses uses up an attempt, and the retry policy applies.
    * A message that is too large ends DEAD.
    * While Redis is away, refuses the credentials, or is out of memory, the handler rests, and no attempt is used up.

    Raises :class:`~outboxio.ConfigurationError` for an option or a template that makes no sense.

    Example::

        outbox.add_handler(
            RedisRelay("redis://localhost", name="to-redis", types=(MoneyDeposited,), stream="wallets")
        )
    """

    def __init__(
        self,
        server: Server,
        *,
        stream: str,
        maxlen: int | None = None,
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        super().__init__(prefix="ce_", **options)
        if maxlen is not None and (not isinstance(maxlen, int) or maxlen < 1):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(f"maxlen is {briefly(maxlen)}; expected a whole number from 1, or None")
        self._stream = Template(stream, option="stream")
        self._maxlen = maxlen
        self._connection = Connection(server, connect or {}, name=f"relay {self.name!r}", timeout=self.publish_timeout)
        self._largest = LARGEST_VALUE
        self._remembers_ids = False

    def destination_of(self, message: Message) -> str:
        return self._stream(message)

    async def connect(self) -> None:
        await self._connection.open()
        client = self._connection.client
        try:
            told: dict[str, Any] = await client.info("server")
        except ResponseError:
            told = {}  # the user may not ask; then Redis is taken for an older version
        self._remembers_ids = version_of(told.get("redis_version", "")) >= REMEMBERS_IDS
        try:
            limits: dict[str, Any] = await client.config_get("proto-max-bulk-len")
        except ResponseError:
            limits = {}  # many hosts forbid CONFIG
        self._largest = int(limits.get("proto-max-bulk-len") or LARGEST_VALUE)

    async def disconnect(self) -> None:
        await self._connection.close()

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[Verdict]:
        if self.ordered:
            return await publish_in_order(parcels, self._publish)
        return await self._publish(parcels)

    async def _publish(self, parcels: Sequence[Parcel]) -> list[Verdict]:
        verdicts: list[Verdict] = [self._flaw(parcel) for parcel in parcels]
        places = [place for place, flaw in enumerate(verdicts) if flaw is None]
        if not places:
            return verdicts
        try:
            async with self._connection.client.pipeline(transaction=False) as pipeline:
                for place in places:
                    pipeline.execute_command(*self._command(parcels[place]))
                answers = await pipeline.execute(raise_on_error=False)
        except LOST as error:
            await self.leave()
            raise self.unavailable(self._connection.reason(error)) from error
        for place, answer in zip(places, answers, strict=True):
            if not _is_id(answer.decode() if isinstance(answer, bytes) else str(answer)):
                verdicts[place] = self._verdict(parcels[place], answer)
        return verdicts

    def _command(self, parcel: Parcel) -> list[str | bytes | int]:
        message, wire = parcel.message, parcel.wire
        once = ("IDMP", message.source, message.id) if self._remembers_ids else ()
        trim = ("MAXLEN", "~", self._maxlen) if self._maxlen is not None else ()
        fields = (part for field in wire.headers.items() for part in field)
        return [
            "XADD", parcel.destination, *once, *trim, "*", *fields, "content-type", wire.content_type, "data", wire.body
        ]  # fmt: skip

    def _flaw(self, parcel: Parcel) -> Verdict:
        """The reason why Redis would close the connection for a message, and with it fail all others."""
        size = len(parcel.wire.body)
        if size <= self._largest:
            return None
        return Unprocessable(
            f"event {parcel.message.id} has {size} bytes, and Redis takes {self._largest}: raise proto-max-bulk-len of "
            "Redis, or store the large part elsewhere and send its address"
        )

    def _verdict(self, parcel: Parcel, answer: Any) -> Exception:
        told = str(answer)
        if not isinstance(answer, Exception):  # QUEUED, if the application has left a transaction open on its client
            return AppendRefused(
                f"Redis has not answered with the id of a message in the stream {parcel.destination!r}: {told}"
            )
        if not isinstance(answer, ResponseError) or told.startswith(_AWAY) or type(answer) is not ResponseError:
            return self.unavailable(self._connection.reason(answer))
        hint = ": the key holds no stream; remove the key, or change stream=" if "WRONGTYPE" in told else ""
        return AppendRefused(f"Redis refused a message to the stream {parcel.destination!r}: {told}{hint}")


def version_of(told: str) -> tuple[int, ...]:
    """The numbers of a version.

    Example::

        version_of("7.0.15")  # (7, 0, 15)
    """
    return tuple(int(part) for part in str(told).split(".") if part.isdigit())
