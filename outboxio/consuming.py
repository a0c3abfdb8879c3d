"""Consuming: what comes from outside is given to its handlers at once, each independent of the others' failures.

It differs from dispatch in what a row is: a mark in ``consumed_events`` says that a handler is done with an event, and
is written in the transaction of a transactional handler, or right after another one has succeeded. Only what a handler
could not do, or may not do here, becomes an event and notifications.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from outboxio.calling import Caller, Counters, Envelope, TakenByAnother
from outboxio.clock import Clock, as_micros
from outboxio.envelope import HandlerContext
from outboxio.errors import CommitUnknown
from outboxio.event import ActionRecord, EventRecord
from outboxio.handler import Handler, HandlerRegistry
from outboxio.ids import uuid7
from outboxio.names import LockName
from outboxio.notification import Context, Notification, State
from outboxio.options import DeadHook, Delivery
from outboxio.outcome import Lease, Outcome
from outboxio.queues import HandlerQueue, Run
from outboxio.settings import Settings
from outboxio.storage.protocols import CommitLost, Consumed, Database, Owed, Session
from outboxio.transaction import roll_back
from outboxio.waiting import to_the_end

PAUSES_ARE_OLD = 1.0  # seconds


class Received(StrEnum):
    """What became of a delivery. It can be acknowledged in each case."""

    RECEIVED = "RECEIVED"
    """It is new, and stored; its handlers will run."""
    DUPLICATE = "DUPLICATE"
    """It was received before."""
    CONFLICT = "CONFLICT"
    """Something else was received under this id before, and is kept: its producer has used one id twice."""


class Consumption(Struct, frozen=True, kw_only=True):
    """What became of one message, by handler name.

    ``status``: RECEIVED if any handler had to do with it, DUPLICATE if all of them were done with it before, CONFLICT
    if something else was consumed under its id before, which is kept: then no handler is run.
    """

    status: Received
    succeeded: tuple[str, ...] = ()
    """They have handled it now."""
    seen: tuple[str, ...] = ()
    """They had handled it before."""
    stored: tuple[str, ...] = ()
    """They will handle it later, as any other event."""
    failed: Mapping[str, BaseException] = {}
    """They failed."""


class Message(Struct, frozen=True):
    """One message from outside, as an event and the action that received it."""

    source: str
    external_id: str
    payload_hash: str
    action: ActionRecord
    event: EventRecord


class InlineShard:
    """Runs handlers for messages on one shard."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        clock: Clock,
        handlers: HandlerRegistry,
        settings: Settings,
        context: HandlerContext,
        *,
        on_dead: DeadHook | None,
        committed: Callable[[], None],
        became_due: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._handlers = handlers
        self._settings = settings
        self._context = context
        self._on_dead = on_dead
        self._committed = committed
        self._became_due = became_due
        self._queues: dict[str, HandlerQueue] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._pauses: set[str] = set()
        self._asked_at = float("-inf")
        self._transactions = asyncio.Semaphore(database.handler_transactions)

    def interested(self, event: EventRecord) -> list[Handler]:
        """The handlers for an event, in the order of their priority; none that would send it out again."""
        found = [h for h in self._handlers if self._wants(h, event) and not h.options.relay]
        return sorted(found, key=lambda handler: handler.options.priority)

    def _wants(self, handler: Handler, event: EventRecord) -> bool:
        wanted = self._handlers.wanted_by(handler)
        return any(s.event_type == event.event_type or (s.topic and s.topic == event.topic) for s in wanted)

    async def seen(self, message: Message, handlers: Sequence[Handler]) -> dict[str, Consumed]:
        """What was marked before, by the name that the handler has now."""
        marks = {self._mark(name): handler.name for handler in handlers for name in handler.names}
        async with self._database.session() as session:
            found = await session.consumed(message.source, message.external_id, sorted(marks))
        return {marks[consumed.handler_name]: consumed for consumed in found}

    async def run(self, message: Message, handler: Handler) -> BaseException | None:
        """Run one handler; what it failed with. Another process that does the same leaves this one nothing to do."""
        queue = self._queue(handler)
        run = Run(self._notification(message, handler), queue, Lease("", handler.name, 0))
        caller = _InlineCaller(self, message)
        async with self._slots.setdefault(handler.name, asyncio.Semaphore(queue.limit)):
            outcome = await self._watched(caller, run)
        if caller.error is not None:
            return caller.error
        if outcome is not None and not run.is_settled:
            await self._mark_done(message, handler, outcome)
        if run.is_settled or (outcome is not None and outcome.emitted):
            self._committed()
        return None

    async def runs_now(self, message: Message, handler: Handler) -> bool:
        """Whether a handler is run for a message at once, rather than given a notification."""
        if message.event.available_at is not None and message.event.available_at > self._clock():
            return False
        return runs_inline(handler) and not handler.names & await self._paused()

    async def _paused(self) -> set[str]:
        """The handlers that an operator has paused, as of a second ago at most."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_at > PAUSES_ARE_OLD:
            pauses = await self._database.subscriptions.pauses(self._namespace)
            self._pauses = {pause.handler_name for pause in pauses if pause.ended_date is None}
            self._asked_at = now
        return self._pauses

    async def store(self, message: Message, waiting: Iterable[Handler], failed: Mapping[str, BaseException]) -> None:
        """Make an event of the message, and notifications for these handlers, to be handled as all others are."""
        now, action, event = self._clock(), message.action, message.event
        owed = [self._owed(message, handler, None) for handler in waiting]
        owed += [self._owed(message, self._handler(name), error) for name, error in failed.items()]

        async def write(session: Session) -> None:
            ours = [o for o in owed if await self._mark_in(session, message, o.handler_name, now)]
            if ours:
                await session.insert_events(action.completed(now), [event])
                await session.owe(event.id, ours, now)

        await self._transact(message, write)
        self._became_due()

    # --- one handler ---------------------------------------------------------------------------

    async def _watched(self, caller: Caller, run: Run) -> Outcome | None:
        """Call it in a task of its own, which is cancelled at its deadline, or when the consumer is."""
        loop = asyncio.get_running_loop()
        run.queue.running[run] = None

        async def call() -> Outcome | None:
            task = asyncio.current_task()
            assert task is not None
            run.task, run.started = task, loop.time()
            return await caller.call(run, task)

        task = loop.create_task(call(), context=contextvars.copy_context())
        deadline = loop.call_later(run.queue.timeout, _time_is_up, run, task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.interrupted, run.cancelled_at = True, 0.0
            task.cancel()
            await to_the_end(asyncio.wait({task}, timeout=run.queue.grace))
            raise
        finally:
            deadline.cancel()
            run.queue.running.pop(run, None)

    async def _mark_done(self, message: Message, handler: Handler, outcome: Outcome) -> None:
        """Mark that a handler is done, together with what it emitted."""

        async def write(session: Session) -> None:
            if await self._mark_in(session, message, handler.name, self._clock()) and outcome.emitted:
                action, events = outcome.emitted
                await session.insert_events(action, events)

        await self._transact(message, write)

    async def _transact(self, message: Message, write: Callable[[Session], Awaitable[None]]) -> None:
        async with self._database.session() as session:
            await session.begin()
            try:
                await write(session)
            except BaseException:
                await to_the_end(roll_back(session))
                raise
            try:
                await to_the_end(session.commit())
            except CommitLost as error:
                raise CommitUnknown(message.action.action_name, message.action.action_id) from error

    async def mark_claimed(self, session: Session, message: Message, handler_name: str) -> bool:
        """Mark it in a handler's own transaction; whether nobody had."""
        return await self._mark_in(session, message, handler_name, self._clock())

    async def _mark_in(self, session: Session, message: Message, handler_name: str, now: datetime) -> bool:
        mark = Consumed(
            message.source, message.external_id, self._mark(handler_name), message.event.id, message.payload_hash, now
        )
        return (await session.consume(mark)).event_id == message.event.id

    def _mark(self, handler_name: str) -> str:
        return LockName(self._namespace, "consume", handler_name).lease

    def _queue(self, handler: Handler) -> HandlerQueue:
        queue = self._queues.get(handler.name)
        if queue is None:
            queue = self._queues[handler.name] = HandlerQueue(
                handler, self._settings, len(self._handlers), self._on_dead
            )
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
            headers=msgspec.Raw((action.headers or "null").encode()),
            hops=action.hops,
            ordering_key=event.ordering_key,
            created_date=now,
        )
        moment = as_micros(now)
        return Notification(
            uuid7(), handler.name, event.event_type or "", event.payload, State.PENDING, 0, moment, moment, 0, context
        )

    def _owed(self, message: Message, handler: Handler, error: BaseException | None) -> Owed:
        """The notification of a handler that has failed, or that was not run at all."""
        notification, options = self._notification(message, handler), handler.options
        key = message.event.ordering_key or message.event.model_id
        owed = Owed(
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
        run = Run(notification, self._queue(handler), Lease("", handler.name, 0))
        outcome = _InlineCaller(self, message).judge(run, error)
        return msgspec.structs.replace(
            owed,
            state=outcome.state,
            attempts=outcome.attempts,
            next_retry_at=outcome.next_retry_at or notification.next_retry_at,
            errors=f"[{outcome.error}]",
        )

    @property
    def parts(self) -> tuple[str, Database, HandlerRegistry, Clock, HandlerContext, Counters]:
        """What a caller is made of."""
        return self._namespace, self._database, self._handlers, self._clock, self._context, Counters()

    @property
    def transactions(self) -> asyncio.Semaphore:
        """The slots of transactional handlers, so that actions find a connection as well."""
        return self._transactions


def runs_inline(handler: Handler) -> bool:
    """Whether a handler can be run outside of dispatch.

    Order and batches are kept there, and only there a run that may not begin a second time is seen to be cut short.
    """
    options = handler.options
    return not (options.ordered or options.batch or options.delivery is Delivery.AT_MOST_ONCE)


class _InlineCaller(Caller):
    """Calls a handler for a message: what it claims is the mark that it has handled it."""

    def __init__(self, shard: InlineShard, message: Message) -> None:
        super().__init__(*shard.parts, emitted=lambda: None, transactions=shard.transactions)
        self._shard = shard
        self._message = message
        self.error: BaseException | None = None

    def _failed(self, run: Run, error: BaseException, task: asyncio.Task[None]) -> Outcome | None:
        known = error if isinstance(error, TakenByAnother) else self._cause(run, error, task)
        self.error = known or error.__cause__ or error
        return None

    async def _claim(
        self, session: Session, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State]
    ) -> dict[Run, Envelope]:
        if not await self._shard.mark_claimed(session, self._message, run.notification.handler_name):
            raise TakenByAnother
        return dict(envelopes)

    async def _finish(self, session: Session, claimed: Iterable[Run], ended: Any) -> None:
        """There is no row: the mark says it."""


def _time_is_up(run: Run, task: asyncio.Task[Any]) -> None:
    run.cancelled_at = asyncio.get_running_loop().time()
    task.cancel()
