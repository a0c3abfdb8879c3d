"""Runs the handlers of an inbox message immediately. If a handler fails, the following handlers still run.

A row of ``consumed_events`` records that a handler has handled a message. It is written in the transaction of a
transactional handler, and otherwise right after the handler has succeeded. The message becomes an event with
notifications only for handlers that have failed, and for those that cannot run inline.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from outboxio.errors import CommitUnknown, Unavailable
from outboxio.handlers.handler import Handler
from outboxio.handlers.options import Delivery
from outboxio.model.emitter import notify_watchers
from outboxio.model.envelope import begin_inside
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.lock_name import LockName
from outboxio.model.notification import Context, Notification, State
from outboxio.model.outcome import NO_LEASE, Emitted, Outcome
from outboxio.runs.deferral import is_newer
from outboxio.runs.failure_classifier import FailureClassifier
from outboxio.runs.handler_queue import HandlerQueue, HandlerSpec
from outboxio.runs.invoker import HandlerInvoker, handler_invoker
from outboxio.runs.opening import Claimer, Envelope, EnvelopeOpener, TakenByAnother, WorkResult
from outboxio.runs.ports import HandlingSetup
from outboxio.runs.run import Run
from outboxio.runs.transaction_shares import Shares
from outboxio.statistics.figures import Counters
from outboxio.storage.protocols import CommitLost, ConsumeResult, NewNotification, Session
from outboxio.support.aio import run_to_completion
from outboxio.support.clock import as_micros
from outboxio.support.ids import uuid7
from outboxio.support.log import type_name
from outboxio.transaction import roll_back

PAUSES_ARE_OLD = 1.0  # seconds


class Received(StrEnum):
    """The result of receiving a message, which can be acknowledged in each case."""

    RECEIVED = "RECEIVED"
    """The message is new and stored; the handlers will run."""
    DUPLICATE = "DUPLICATE"
    """The message was received before."""
    CONFLICT = "CONFLICT"
    """The id was received before with a different payload, which is kept: the producer reused the id."""


class Consumption(Struct, frozen=True, kw_only=True):
    """The result of consuming a message, by handler name.

    ``status`` is

    * RECEIVED if the message was new to at least one handler;
    * DUPLICATE if all handlers had already handled the message;
    * CONFLICT if the id was consumed with a different payload, before or at the same time. That payload is kept, and
      no further handler runs with this one.
    """

    status: Received
    succeeded: tuple[str, ...] = ()
    """Handlers that handled the message in this call."""
    seen: tuple[str, ...] = ()
    """Handlers that had already handled the message."""
    stored: tuple[str, ...] = ()
    """Handlers that will handle the message later, as an event."""
    failed: Mapping[str, BaseException] = {}
    """Handlers that failed, each with its error."""


class PayloadConflict(TakenByAnother):
    """The handler has handled a message with this id and a different payload, perhaps while it ran here."""


class Message(Struct, frozen=True):
    """An inbox message as an event, with the action that received it."""

    source: str
    external_id: str
    payload_hash: str
    action: ActionRecord
    event: EventRecord

    def row(self, consumer: str, now: datetime) -> ConsumeResult:
        """Return the row of ``consumed_events`` for a consumer."""
        return ConsumeResult(self.source, self.external_id, consumer, self.event.id, self.payload_hash, now)


class InlineRunner:
    """Runs the handlers of inbox messages on a shard."""

    def __init__(self, setup: HandlingSetup, *, committed: Callable[[], None], became_due: Callable[[], None]) -> None:
        """``committed`` is called after a COMMIT with events, ``became_due`` after a COMMIT with notifications."""
        context = setup.context
        self._setup = setup
        self._namespace = setup.namespace
        self._database = setup.database
        self._clock = setup.clock
        self._handlers = setup.handlers
        self._settings = setup.settings
        self._committed = committed
        self._became_due = became_due
        self._classifier = FailureClassifier(
            setup.clock, context.redact, context.outbox, context.telemetry, context.log_fields
        )
        self._opener = EnvelopeOpener(setup.handlers, context)
        self._queues: dict[str, HandlerQueue] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._stuck: dict[tuple[str, str, str], asyncio.Task[Any]] = {}
        """Stuck runs, which ignore the cancellation of the consumer, by source, external id and handler name."""
        self._pauses: set[str] = set()
        self._pauses_read_at = float("-inf")
        transactional = [handler.name for handler in setup.handlers if _works_in_transaction(handler)]
        self._transactions = Shares(setup.database.handler_transactions, handlers=len(transactional))
        self._claims = {name: self._transactions.of_handler() for name in transactional}

    def interested(self, event: EventRecord) -> list[Handler]:
        """Return the handlers of a new event by priority, except relays, which would publish the event again."""
        found = [
            h for h in self._handlers if self._subscribes(h, event) and not h.options.relay and not self._is_early(h)
        ]
        return sorted(found, key=lambda handler: handler.options.priority)

    def _subscribes(self, handler: Handler, event: EventRecord) -> bool:
        subscriptions = self._handlers.subscriptions_of(handler)
        return any(s.event_type == event.event_type or (s.topic and s.topic == event.topic) for s in subscriptions)

    def _is_early(self, handler: Handler) -> bool:
        """Return True if the start date of the handler is in the future."""
        since = handler.options.since
        return isinstance(since, datetime) and self._clock() < since

    async def seen(self, message: Message, handlers: Sequence[Handler]) -> dict[str, ConsumeResult]:
        """Return the rows of handlers that have already handled the message, by current handler name."""
        consumers = {self._consumer(name): handler.name for handler in handlers for name in handler.names}
        async with self._database.session() as session:
            found = await session.consumed(message.source, message.external_id, sorted(consumers))
        return {consumers[consumed.handler_name]: consumed for consumed in found}

    async def run(self, message: Message, handler: Handler) -> BaseException | None:
        """Run a handler and return its error, if any; :class:`TakenByAnother` if the message was already handled."""
        queue = self._queue(handler)
        run = Run(self._notification(message, handler), queue, NO_LEASE)
        claim = _MessageClaim(self, message)
        key = (message.source, message.external_id, handler.name)
        if (stuck := self._stuck.get(key)) is not None:
            await asyncio.wait({stuck})
        async with (
            self._slots.setdefault(handler.name, asyncio.Semaphore(queue.spec.limit)),
            self._transaction_share(handler),
        ):
            outcome = await self._watched(self._invoker(claim), run, key)
        seconds = asyncio.get_running_loop().time() - run.started
        if claim.error is not None:
            if not issubclass(type(claim.error), TakenByAnother):
                queue.statistics.durations_of("failed", type_name(claim.error)).add(seconds)
            return claim.error
        queue.statistics.succeeded += 1
        queue.statistics.successes.add(seconds)
        if outcome is not None and not run.is_settled:
            await self._write_done(message, handler, outcome)
        if run.is_settled or (outcome is not None and outcome.emitted):
            self._committed()
        return None

    async def runs_now(self, message: Message, handler: Handler) -> bool:
        """Return True if the handler runs for the message now, and False if it needs a notification."""
        if message.event.available_at is not None and message.event.available_at > self._clock():
            return False
        own = message.event.headers
        headers = None if own is None else msgspec.Raw(own.encode())
        if is_newer(self._handlers, handler, message.event.event_type or "", headers):
            return False
        return runs_inline(handler) and not handler.names & await self._paused()

    async def _paused(self) -> set[str]:
        """Return the handlers that an operator has paused, as read within the last second."""
        now = asyncio.get_running_loop().time()
        if now - self._pauses_read_at > PAUSES_ARE_OLD:
            pauses = await self._database.subscriptions.pauses(self._namespace)
            self._pauses = {pause.handler_name for pause in pauses if pause.ended_date is None}
            self._pauses_read_at = now
        return self._pauses

    async def store(self, message: Message, waiting: Iterable[Handler], failed: Mapping[str, BaseException]) -> None:
        """Store the message as an event with notifications for the ``waiting`` and ``failed`` handlers."""
        await self._clock.measure(self._database.now)  # the notifications are due by the database's clock
        now, action, event = self._clock(), message.action, message.event
        owed = [self._owed(message, handler, None) for handler in waiting]
        owed += [self._owed(message, self._handler(name), error) for name, error in failed.items()]
        sending = self._setup.context.emitter.telemetry.chosen.sending(self._setup.context.shard, action, [event])

        async def write(session: Session) -> Emitted | None:
            ours = [o for o in owed if await self._write_row(session, message, o.handler_name, now)]
            if not ours:
                return None
            written = sending.marked(action.completed(now)), [event]
            await session.insert_events(*written)
            await session.insert_notifications(event.id, ours, now)
            return written

        with sending:
            await self._transact(message, write)
        self._became_due()

    def count_failures(self, failed: Iterable[str]) -> None:
        """Count the failures of handlers that run again when the sender redelivers the message."""
        for name in failed:
            self._setup.statistics.of(name).failed += 1

    # --- a run ---------------------------------------------------------------------------------

    async def _watched(self, invoker: HandlerInvoker, run: Run, key: tuple[str, str, str]) -> Outcome | None:
        """Call the handler in a new task, which is cancelled after the handler's timeout or together with the consumer.

        A cancelled consumer waits for at most the handler's grace period. If the run continues after that, the next run
        of the handler for the same message waits until the stuck run has ended.
        """
        loop = asyncio.get_running_loop()
        run.queue.running[run] = None

        async def call() -> Outcome | None:
            task = asyncio.current_task()
            assert task is not None
            run.task, run.started = task, loop.time()
            return await invoker.call(run, task)

        context = contextvars.copy_context()
        context.run(begin_inside)
        task = loop.create_task(call(), context=context)
        deadline = loop.call_later(run.queue.spec.timeout, _time_is_up, run, task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.interrupt()
            task.cancel()
            await run_to_completion(asyncio.wait({task}, timeout=run.queue.spec.grace))
            if not task.done():
                self._stuck[key] = task
                task.add_done_callback(lambda _: self._stuck.pop(key, None))
            raise
        finally:
            deadline.cancel()
            run.queue.running.pop(run, None)

    async def _write_done(self, message: Message, handler: Handler, outcome: Outcome) -> None:
        """Record that a handler has handled the message, together with the emitted events."""

        async def write(session: Session) -> Emitted | None:
            is_new = await self._write_row(session, message, handler.name, self._clock())
            if not is_new or outcome.emitted is None:
                return None
            await session.insert_events(*outcome.emitted)
            return outcome.emitted

        await self._transact(message, write)

    async def _transact(self, message: Message, write: Callable[[Session], Awaitable[Emitted | None]]) -> None:
        """Run ``write`` in a transaction. It returns the events that it has written."""
        async with self._database.session() as session:
            await session.begin()
            try:
                written = await write(session)
            except BaseException:
                await run_to_completion(roll_back(session))
                raise
            try:
                await run_to_completion(self._commit(session, written))
            except CommitLost as error:
                raise CommitUnknown(message.action.action_name, message.action.action_id) from error

    async def _commit(self, session: Session, written: Emitted | None) -> None:
        await session.commit()
        if written is not None:
            self._setup.context.emitter.count(written[1])
            notify_watchers(*written)

    async def claim(self, session: Session, message: Message, handler_name: str) -> bool:
        """Write the handler's row in its transaction. Return True if the row is new."""
        return await self._write_row(session, message, handler_name, self._clock())

    async def _write_row(self, session: Session, message: Message, handler_name: str, now: datetime) -> bool:
        """Write the handler's row. Return True if the row is new. Raises :class:`PayloadConflict`."""
        found = await session.consume(message.row(self._consumer(handler_name), now))
        if found.payload_hash != message.payload_hash:
            raise PayloadConflict
        return found.event_id == message.event.id

    def _consumer(self, handler_name: str) -> str:
        return LockName(self._namespace, "consume", handler_name).lease

    def _queue(self, handler: Handler) -> HandlerQueue:
        queue = self._queues.get(handler.name)
        if queue is None:
            queue = self._queues[handler.name] = HandlerQueue(
                HandlerSpec.of(handler, self._settings, len(self._handlers), self._setup.on_dead),
                self._setup.statistics.of(handler.name),
            )
            queue.statistics.follow_consumer(queue)
        return queue

    def _handler(self, name: str) -> Handler:
        handler = self._handlers.find(name)
        assert handler is not None
        return handler

    def _notification(self, message: Message, handler: Handler) -> Notification:
        action, event, now = message.action, message.event, self._clock()
        context = Context(
            event_id=event.id,
            action_id=action.action_id,
            action_name=action.action_name,
            action_params=msgspec.Raw(action.action_params.encode()),
            started_date=action.started_date,
            completion_date=action.completion_date,
            model_id=event.model_id,
            model_type=event.model_type,
            event_date=action.completion_date,
            correlation_id=action.correlation_id,
            causation_id=action.causation_id,
            headers=msgspec.Raw((action.headers_of(event) or "null").encode()),
            hops=action.hops,
            ordering_key=event.ordering_key,
            created_date=now,
        )
        now_us = as_micros(now)
        return Notification(
            uuid7(), handler.name, event.event_type or "", event.payload, State.PENDING, 0, now_us, now_us, 0, 0,
            context,
        )  # fmt: skip

    def _owed(self, message: Message, handler: Handler, error: BaseException | None) -> NewNotification:
        """Return the notification for a handler that failed with ``error``, or has not run if it is ``None``."""
        notification, options = self._notification(message, handler), handler.options
        key = message.event.ordering_key or message.event.model_id
        owed = NewNotification(
            id=notification.id,
            handler_name=handler.name,
            state=State.PENDING,
            attempts=0,
            next_retry_at=message.event.available_at or notification.next_retry_at,
            errors="[]",
            ordering_key=key if options.ordered else None,
            priority=options.priority,
        )
        if error is None:
            return owed
        queue = self._queue(handler)
        run = Run(notification, queue, NO_LEASE)
        with suppress(Exception):  # an event that cannot be decoded makes the later run fail
            self._opener.open(run)
        outcome = self._classifier(run, error)
        queue.statistics.count(outcome)
        return msgspec.structs.replace(
            owed,
            state=outcome.state,
            attempts=outcome.attempts,
            next_retry_at=outcome.next_retry_at or notification.next_retry_at,
            errors=f"[{outcome.error}]",
        )

    def _invoker(self, claim: Claimer) -> HandlerInvoker:
        return handler_invoker(self._setup)(self._setup, Counters(), emitted=lambda: None, claim=claim)

    def _transaction_share(self, handler: Handler) -> AbstractAsyncContextManager[None]:
        """Hold one of the transactions for a transactional handler. Waiting for it does not count as run time."""
        if not _works_in_transaction(handler):
            return nullcontext()
        claim = self._claims.get(handler.name)
        if claim is None:  # registered later
            claim = self._claims[handler.name] = self._transactions.of_handler()
        return self._transactions.hold(claim)


def runs_inline(handler: Handler) -> bool:
    """Return True if the handler can be run outside of dispatch.

    Only dispatch preserves order and fills batches, and only dispatch detects interrupted at-most-once runs.
    """
    options = handler.options
    return not (options.ordered or options.batch or options.delivery is Delivery.AT_MOST_ONCE)


def _works_in_transaction(handler: Handler) -> bool:
    return runs_inline(handler) and handler.options.delivery is Delivery.TRANSACTIONAL


class _MessageClaim:
    """Claims a message for a handler with a row in ``consumed_events``, and stores the error of the run."""

    def __init__(self, runner: InlineRunner, message: Message) -> None:
        self._runner = runner
        self._message = message
        self.error: BaseException | None = None

    async def take(
        self, session: Session, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State]
    ) -> dict[Run, Envelope]:
        if not await self._runner.claim(session, self._message, run.notification.handler_name):
            raise TakenByAnother
        return dict(envelopes)

    async def finish(self, session: Session, claimed: Iterable[Run], ended: WorkResult) -> None:
        """There is no notification to finish."""

    def failed(self, run: Run, error: BaseException, cause: BaseException | None) -> Outcome | None:
        if cause is None and not issubclass(type(error), TakenByAnother | Unavailable) and error.__cause__ is not None:
            cause = error.__cause__  # outboxio's error that represents CommitUnknown
        self.error = error if cause is None else cause
        return None


def _time_is_up(run: Run, task: asyncio.Task[Any]) -> None:
    run.exceed_deadline(asyncio.get_running_loop().time())
    task.cancel()
