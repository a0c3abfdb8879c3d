"""The inbox: stores each message of a broker or webhook once, so that it can be acknowledged and handled as an event.

Messages are deduplicated by source and external id. The row in ``consumed_events`` is written in the same transaction
as the event and kept longer. Its payload hash distinguishes a redelivery from a different message with the same id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Unpack

from msgspec.structs import replace

from outboxio.actions.executor import ActionExecutor, WritableShard
from outboxio.errors import ConfigurationError, InvalidEvent, Unavailable
from outboxio.handlers.handler import Handler
from outboxio.inbox.inline import Consumption, InlineRunner, Message, PayloadConflict, Received
from outboxio.inbox.message import (
    MessageInput,
    MessageParts,
    Messages,
    OnInvalid,
    checked,
    checked_all,
    hash_of,
    parts_of,
)
from outboxio.model.event import RECEIVED_ACTION, EventRecord
from outboxio.model.lock_name import LockName
from outboxio.model.payloads.classes import AnyEvent
from outboxio.runs.opening import TakenByAnother
from outboxio.storage.protocols import ConsumeResult, Session
from outboxio.support.ids import uuid7
from outboxio.support.log import log_of
from outboxio.support.text import briefly
from outboxio.transaction import Transaction

logger = log_of(__name__)

Wrap = Callable[[WritableShard, Any], Awaitable[Session]]
"""Creates a session from the caller's connection, on which a transaction must be open."""


class Inbox:
    """Receives messages from brokers, webhooks and other systems."""

    def __init__(
        self, namespace: str, executor: ActionExecutor, wrap: Wrap, inline: Callable[[str], InlineRunner]
    ) -> None:
        self._executor = executor
        self._wrap = wrap
        self._inline = inline
        self._consumer = LockName(namespace, "inbox").lease
        self.conflicts = 0
        """The number of messages with the id of an earlier message but a different payload."""

    async def receive(
        self,
        *,
        source: str,
        external_id: str,
        event: AnyEvent | None = None,
        type: str | None = None,
        payload: object = None,
        version: int = 1,
        model: object = None,
        model_id: object = None,
        model_type: str | None = None,
        topic: str | None = None,
        ordering_key: object = None,
        headers: Mapping[str, Any] | None = None,
        correlation_id: str | None = None,
        available_at: datetime | None = None,
        connection: Any = None,
        shard: str | None = None,
    ) -> Received:
        """Store the message of ``source`` with the id ``external_id`` once, so that it can be acknowledged.

        Pass either ``event``, or ``type`` and ``payload`` (a mapping, a struct, or JSON text or bytes), with the event
        ``version`` that the sender used. Handlers of the event type and of ``topic`` run afterwards, as for any event.
        ``model``, ``model_id``, ``model_type`` and ``ordering_key`` are as in ``tx.emit``. The same id with a different
        payload is a CONFLICT: the first message is kept, and :attr:`conflicts` is incremented. With ``connection`` (of
        any kind that ``outbox.record`` accepts) the message is stored in its open transaction, otherwise in a new one.

        Raises :class:`InvalidEvent` before writing if the message cannot be stored, and :class:`NoTransaction` if no
        transaction is open on the connection.

        Example::

            await outbox.inbox.receive(
                source="billing", external_id=message.id, type="InvoicePaid", payload=message.body
            )
            await message.ack()
        """
        parts = MessageInput(
            source=source, external_id=external_id, event=event, type=type, payload=payload, version=version,
            model=model, model_id=model_id, model_type=model_type, topic=topic, ordering_key=ordering_key,
            headers=headers, correlation_id=correlation_id, available_at=available_at,
        )  # fmt: skip
        target = self._executor.shard(shard)
        record = parts.checked(target.emitter)
        row = ConsumeResult(source, external_id, self._consumer, record.id, hash_of(record), target.clock())
        options: dict[str, Any] = {"headers": headers, "correlation_id": correlation_id, "source": source}
        try:
            if connection is None:
                seen = await self._store(row, record, parts.params, shard=shard, **options)
                return Received.RECEIVED if seen is None else self._seen_before(seen, row)
            session = await self._wrap(target, connection)
            await _require_new(session, row)
            await self._executor.record(target, session, RECEIVED_ACTION, parts.params, [record], **options)
        except _Seen as seen:
            return self._seen_before(seen, row)
        return Received.RECEIVED

    async def _store(
        self, row: ConsumeResult, event: EventRecord, params: Mapping[str, Any], *, shard: str | None, **options: Any
    ) -> _Seen | None:
        """Store a message in a new transaction, unless the message was received before.

        Stale records and transient failures are retried.
        """
        executor, action_id = self._executor, uuid7()
        retries = executor.retries((), shard)
        with executor.executing(RECEIVED_ACTION, shard, options["headers"]) as execution:
            while True:
                try:
                    async with executor.attempt(
                        RECEIVED_ACTION, params, shard=shard, action_id=action_id, **options
                    ) as tx:
                        await _require_new(tx, replace(row, consumed_date=tx.now))
                        tx.add(event)
                    return None
                except _Seen as seen:
                    execution.was_duplicate()
                    return seen
                except Exception as error:
                    delay = executor.delay_before_retry(retries, error, RECEIVED_ACTION, action_id, shard)
                    if delay is None:
                        raise
                await asyncio.sleep(delay)
                execution.repeated()

    async def receive_many(
        self,
        messages: Iterable[object],
        *,
        on_invalid: OnInvalid = "raise",
        connection: Any = None,
        shard: str | None = None,
    ) -> list[Received | InvalidEvent]:
        """Store many messages in a single transaction. Return the result of each, in the order of ``messages``.

        A message is a mapping with the parameters of :meth:`receive`, or an object with attributes of these names. The
        events are written in the order of ``messages``, each with its own headers, correlation id and ordering key. Of
        two messages with the same id, the second is a DUPLICATE or a CONFLICT. At most 10,000 messages.

        With ``on_invalid="raise"`` a message that cannot be stored raises :class:`InvalidEvent` with the index of the
        message, and no row is written. With ``on_invalid="return"`` the :class:`InvalidEvent` is the result of that
        message, and all other messages are stored. ``connection`` is as for :meth:`receive`.

        Example::

            messages = await subscription.fetch(500)
            results = await outbox.inbox.receive_many(
                [
                    {"source": "billing", "external_id": message.id, "type": message.type, "payload": message.body}
                    for message in messages
                ],
                on_invalid="return",
            )
            for message, result in zip(messages, results):
                await (message.reject() if isinstance(result, InvalidEvent) else message.ack())
        """
        target = self._executor.shard(shard)
        many = checked_all(self._executor, target, messages, on_invalid, self._consumer)
        if not many.valid:
            return many.results(self._count_conflict)
        if connection is None:
            await self._store_many(many, shard)
        else:
            session = await self._wrap(target, connection)
            await self._executor.within(target, session, RECEIVED_ACTION, many.store_in)
        return many.results(self._count_conflict)

    async def _store_many(self, many: Messages, shard: str | None) -> None:
        """Store messages in a new transaction. Transient failures are retried."""
        executor, action_id = self._executor, uuid7()
        retries = executor.retries((), shard)
        with executor.executing(RECEIVED_ACTION, shard, None) as execution:
            while True:
                try:
                    async with executor.attempt(
                        RECEIVED_ACTION, {}, shard=shard, correlation_id=None, headers=None, action_id=action_id
                    ) as tx:
                        if not await many.store_in(tx, tx.now, commits=True):
                            raise _NothingNew
                    return
                except _NothingNew:
                    execution.was_duplicate()
                    return
                except Exception as error:
                    delay = executor.delay_before_retry(retries, error, RECEIVED_ACTION, action_id, shard)
                    if delay is None:
                        raise
                await asyncio.sleep(delay)
                execution.repeated()

    async def consume(
        self,
        message: object = None,
        /,
        *,
        on_error: Literal["raise", "store"] = "raise",
        shard: str | None = None,
        **parts: Unpack[MessageParts],
    ) -> Consumption:
        """Run the handlers of a message immediately, in the order of their priority.

        Pass the parameters of :meth:`receive` as keywords, or in a mapping or an object. Every handler runs, even if a
        previous one has failed, except those that have already handled this id. With ``on_error="raise"`` the failures
        are raised together at the end, as an ``ExceptionGroup``, so that the broker redelivers the message and the
        failed handlers run again. With ``on_error="store"`` each failure becomes a notification, which is retried as
        usual, so that the message can be acknowledged. A handler that raises :class:`Unavailable` gets the message
        later, and this does not count as an attempt.

        The same id with a different payload is a CONFLICT, and no handler runs. If two payloads of an id arrive at the
        same time, the second one stops with CONFLICT at the first handler that has handled the other payload. Until
        then a non-transactional handler may run with both payloads.

        The message is stored, and handled later like any event, for

        * ordered handlers, batch handlers, and handlers that run at most once,
        * paused handlers,
        * all handlers, before ``available_at``,
        * handlers whose event class has an older version than the message's ``version``.

        Raises :class:`ConfigurationError` if no handler in this process subscribes to the event (:meth:`receive` keeps
        it for a later handler), :class:`InvalidEvent` if the message cannot be stored, and :class:`NestedExecute`
        inside a transaction of this outbox.

        Example::

            async for message in subscription:
                await outbox.inbox.consume(
                    source="billing", external_id=message.id, type="InvoicePaid", payload=message.body, on_error="store"
                )
                await message.ack()
        """
        if on_error not in ("raise", "store"):
            raise ConfigurationError(f"on_error is {briefly(on_error)}; expected 'raise' or 'store'")
        self._executor.refuse_nesting(RECEIVED_ACTION)
        fields: dict[str, Any] = {**parts_of(message), **parts}
        target = self._executor.shard(shard)
        inbound = checked(self._executor, target, MessageInput(**fields))
        inline = self._inline(target.database.name)
        handlers = inline.interested(inbound.event)
        if not handlers:
            raise ConfigurationError(
                f"no handler in this process subscribes to events of type {inbound.event.event_type!r}; register one, "
                "or call inbox.receive(), which keeps the event for a later handler"
            )
        seen = await inline.seen(inbound, handlers)
        if any(row.payload_hash != inbound.payload_hash for row in seen.values()):
            return self._conflict(inbound)
        try:
            return await self._consume(inline, inbound, handlers, seen, stores=on_error == "store")
        except PayloadConflict:
            return self._conflict(inbound)

    async def _consume(
        self,
        inline: InlineRunner,
        message: Message,
        handlers: Sequence[Handler],
        seen: Container[str],
        *,
        stores: bool,
    ) -> Consumption:
        succeeded: list[str] = []
        done: list[str] = []
        failed: dict[str, BaseException] = {}
        waiting: list[Handler] = []
        for handler in handlers:
            if handler.name in seen:
                done.append(handler.name)
            elif not await inline.runs_now(message, handler):
                waiting.append(handler)
            elif (error := await inline.run(message, handler)) is None:
                succeeded.append(handler.name)
            elif issubclass(type(error), PayloadConflict):  # isinstance() would read the error's __class__
                raise error
            elif issubclass(type(error), TakenByAnother):
                done.append(handler.name)
            elif stores and issubclass(type(error), Unavailable):
                waiting.append(handler)
            else:
                failed[handler.name] = error
        if waiting or (failed and stores):
            await inline.store(message, waiting, failed if stores else {})
        is_new = bool(succeeded or waiting or failed)
        result = Consumption(
            status=Received.RECEIVED if is_new else Received.DUPLICATE,
            succeeded=tuple(succeeded),
            seen=tuple(done),
            stored=(*(handler.name for handler in waiting), *(failed if stores else ())),
            failed=failed,
        )
        if failed and not stores:
            inline.count_failures(failed)
            text = f"{len(failed)} of {len(handlers)} handlers failed for {message.external_id!r} of {message.source!r}"
            raise BaseExceptionGroup(text, list(failed.values()))
        return result

    def _conflict(self, message: Message) -> Consumption:
        self._count_conflict(message.source, message.external_id)
        return Consumption(status=Received.CONFLICT)

    def _count_conflict(self, source: str, external_id: str) -> None:
        self.conflicts += 1
        logger.error(
            "%r redelivered message %r with a different payload; keeping the first one", source, external_id,
            source=source, external_id=external_id,
        )  # fmt: skip

    def _seen_before(self, seen: _Seen, row: ConsumeResult) -> Received:
        if seen.payload_hash == row.payload_hash:
            return Received.DUPLICATE
        self._count_conflict(row.source, row.external_id)
        return Received.CONFLICT


class _Seen(Exception):
    """The message was received before."""

    def __init__(self, payload_hash: str) -> None:
        self.payload_hash = payload_hash
        super().__init__(payload_hash)


class _NothingNew(Exception):
    """All messages of a call were received before, so the transaction is rolled back."""


async def _require_new(writer: Transaction | Session, row: ConsumeResult) -> None:
    """Write the inbox message's row. Raises :class:`_Seen` if it exists."""
    found = await writer.consume(row)
    if found.event_id != row.event_id:
        raise _Seen(found.payload_hash)
