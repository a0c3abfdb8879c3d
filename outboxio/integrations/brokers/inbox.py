"""Inboxes of brokers: receive messages, store these in one transaction, commit, and only then acknowledge.

A process that dies between the commit and the acknowledgement gets the messages again, and the inbox knows their ids.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypedDict

from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.handlers.batch import LARGEST_BATCH
from outboxio.integrations.brokers.incoming import Fallback, Incoming
from outboxio.support.aio import over, to_the_end
from outboxio.support.backoff import pause_after
from outboxio.support.log import log_of, type_name
from outboxio.support.text import briefly

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

logger = log_of(__name__)

WAIT = 0.5  # seconds that a fetch waits for the first message
ANSWER = 5.0  # seconds that the broker may take beyond that
LONGEST_PAUSE = 30.0  # seconds between two tries, while the broker or the database is away


class InboxOptions(TypedDict, total=False):
    """The keywords that the inboxes of all brokers have.

    ``source`` and ``type``: of messages that name none. ``topic``: the topic of the stored events. ``batch``: the most
    messages of a transaction, and in memory; 500 by default. ``shard``: where the messages are stored.
    """

    source: str | None
    type: str | None
    topic: str | None
    batch: int
    shard: str | None


class BrokerInbox(ABC):
    """Stores the messages of a broker in the inbox of an outbox. Subclasses know the client of one broker.

    A subclass implements :meth:`connect`, :meth:`disconnect`, :meth:`fetch`, :meth:`acknowledge` and :meth:`refuse`.
    Use an inbox inside ``outbox.running()``::

        async with outbox.running(), NatsInbox(outbox, url, stream="WALLETS", durable="audit").running():
            ...

    At most ``batch`` messages are in memory. While the database is away, the inbox keeps these and fetches no more.
    While the broker is away, the inbox connects again, after 0.1 s to 30 s.
    """

    place: str
    """The stream, topics or queue that messages come from, for log entries."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        source: str | None = None,
        type: str | None = None,
        topic: str | None = None,
        batch: int = 500,
        shard: str | None = None,
    ) -> None:
        """``source`` and ``type``: of messages that name none. ``topic``: the topic of the stored events."""
        if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= LARGEST_BATCH:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(f"batch is {briefly(batch)}; expected a whole number from 1 to {LARGEST_BATCH}")
        self.batch = batch
        self.source = source
        self.type = type
        self.topic = topic
        self.received = 0
        """How many messages were stored, without duplicates."""
        self.duplicates = 0
        """How many messages came again, or under the id of a different message (``outbox.inbox.conflicts``)."""
        self.refused = 0
        """How many messages went to the broker's dead letters."""
        self.stopping = asyncio.Event()
        """Is set when the application leaves :meth:`running`."""
        self._outbox = outbox
        self._shard = shard
        self._is_running = False
        self._is_open = False
        """True from the begin of :meth:`connect` to :meth:`disconnect`."""

    def fallback(self, id: str, source: str, type: str | None = None) -> Fallback:
        """The parts of a message that names none. The ``source`` and the ``type`` of the inbox take precedence."""
        return Fallback(id=id, source=self.source or source, type=self.type or type)

    @abstractmethod
    async def connect(self) -> None:
        """Connect, and subscribe. Any error is logged, and the inbox connects again."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Close a connection, also a half-open one. Unacknowledged messages come again.

        A client that the application gave stays open; only its subscriptions end.
        """

    @abstractmethod
    async def fetch(self, most: int) -> Sequence[Incoming]:
        """The next messages, at most ``most``, in order. Waits at most 1 s for the first message."""

    @abstractmethod
    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """Tell the broker that messages are stored, in the order in which they came."""

    @abstractmethod
    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        """Give a message that can never be stored to the broker's dead letters. The message must not come again."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Receive messages while the block runs. The end of the block waits for the messages in hand.

        Example::

            async with inbox.running():
                await stop.wait()
        """
        if self._is_running:
            raise ConfigurationError(f"the inbox of {self.place} is running; enter running() once")
        self._is_running = True
        self.stopping.clear()
        receiving = asyncio.create_task(self._run(), name=f"outboxio inbox {self.place}")
        try:
            yield
        finally:
            self.stopping.set()
            cancelled = await over(receiving, lambda: _cancel(receiving))
            self._is_running = False
            if cancelled is not None:
                raise cancelled
            if not receiving.cancelled() and (error := receiving.exception()) is not None:
                raise error

    async def _run(self) -> None:
        failures = 0
        try:
            while not self.stopping.is_set():
                try:
                    await self._round()
                except Exception as error:
                    failures += 1
                    pause = pause_after(failures, longest=LONGEST_PAUSE)
                    logger.warning(
                        "the inbox of %s has lost its broker, and connects again in %.1f s: %s: %s",
                        self.place, pause, type_name(error), error,
                    )  # fmt: skip
                    await self._leave()
                    await self._rest(pause)
                else:
                    failures = 0
        finally:
            await to_the_end(self._leave())

    async def _round(self) -> None:
        """Fetch messages, store these, and acknowledge."""
        if not self._is_open:
            self._is_open = True
            await self.connect()
        messages = await self.fetch(self.batch)
        if messages and await self._store(messages):
            await self._settle(messages)

    async def _store(self, messages: Sequence[Incoming]) -> bool:
        """Store messages, however long the database is away. False if the application leaves meanwhile."""
        sound = [message for message in messages if message.flaw is None]
        failures = 0
        while sound:
            try:
                stored = await self._outbox.inbox.receive_many(
                    [message.parts(self.topic) for message in sound], on_invalid="return", shard=self._shard
                )
                break
            except Exception as error:
                failures += 1
                pause = pause_after(failures, longest=LONGEST_PAUSE)
                logger.warning(
                    "the inbox of %s cannot store %d messages, and tries again in %.1f s: %s: %s",
                    self.place, len(sound), pause, type_name(error), error,
                )  # fmt: skip
                await self._rest(pause)
                if self.stopping.is_set():
                    return False
        else:
            return True
        for message, verdict in zip(sound, stored, strict=True):
            if isinstance(verdict, InvalidEvent):
                message.flaw = verdict
            elif verdict == "RECEIVED":  # outboxio.inbox lies above this package
                self.received += 1
            else:
                self.duplicates += 1
        return True

    async def _settle(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge stored messages, and give the others to the broker's dead letters."""
        stored = [message for message in messages if message.flaw is None]
        if stored:
            await self.acknowledge(stored)
        for message in messages:
            if message.flaw is not None:
                logger.error(
                    "the inbox of %s refuses message %s, which cannot be stored: %s",
                    self.place, message.place, message.flaw.without_value,
                )  # fmt: skip
                await self.refuse(message, message.flaw)
                self.refused += 1

    async def _leave(self) -> None:
        """Close the connection. An error of a connection that is gone anyway is logged."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            await self.disconnect()
        except Exception as error:
            logger.info("the inbox of %s could not close its connection: %r", self.place, error)

    async def _rest(self, seconds: float) -> None:
        """Wait, or until the application leaves."""
        try:
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            return


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
