"""Calling handlers: one notification or a batch, with what its delivery promises, and judging what came of it.

Three kinds of delivery differ in when their outcome is committed. At least once: the outcome is written afterwards,
with many others. At most once: that the run begins is committed before it does. Transactional: the row is claimed in
the handler's own transaction, and what it wrote, what it emitted and its success commit together.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from outboxio.clock import Clock
from outboxio.crashes import Crashes
from outboxio.emission import encode_params
from outboxio.envelope import EventEnvelope, HandlerContext, current_envelope
from outboxio.errors import (
    CommitUnknown,
    CrashedProcess,
    InterruptedRun,
    InvalidEvent,
    NotBegun,
    RetryAfter,
    ReturnedAsFailed,
)
from outboxio.event import ActionRecord, Event
from outboxio.handler import Handler, HandlerRegistry
from outboxio.ids import uuid7
from outboxio.notification import DYING, State
from outboxio.options import Delivery
from outboxio.outcome import Bucket, Outcome, failure, hook_crash, hook_failure, shown, success, verdict_of
from outboxio.queues import BatchRun, Run
from outboxio.storage.protocols import Database, Session
from outboxio.transaction import Transaction, commit, open_transaction, roll_back
from outboxio.waiting import to_the_end

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STARTABLE = (State.PENDING, State.FAILED)
_NULL = (None, msgspec.Raw(b"null"))

Envelope = EventEnvelope[Any]
Done = Callable[[Run, Outcome | None], None]
"""Told of each row of a batch as soon as it is judged; ``None``: there is nothing to write."""


class Counters(msgspec.Struct):
    """What this process did with notifications since it started."""

    succeeded: int = 0
    failed: int = 0
    expired: int = 0
    dead: int = 0
    skipped: int = 0
    dying: int = 0
    """Verdicts, and failed tries of their hooks: the hook is owed."""
    refused: int = 0
    """Outcomes that the fence refused: another process holds the handler now, or the row was settled already."""
    stuck: int = 0

    def count(self, state: State, number: int) -> None:
        name = state.lower()
        setattr(self, name, getattr(self, name) + number)


class _Ended(Struct, frozen=True):
    """What the work in a transaction made of its rows: they are finished in it, or have failed."""

    state: State
    attempts_more: int
    failed: Mapping[Run, BaseException] = {}


_Work = Callable[[Run, Mapping[Run, Envelope]], Awaitable[_Ended]]


class Caller:
    """Calls the handlers of one shard."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        handlers: HandlerRegistry,
        clock: Clock,
        context: HandlerContext,
        counters: Counters,
        *,
        emitted: Callable[[], None],
        transactions: asyncio.Semaphore | None = None,
        crashes: Crashes | None = None,
    ) -> None:
        self.home: asyncio.Task[Any] | None = None
        """The task that everything here belongs to: when it is cancelled, so is everything."""
        self.redact = context.redact
        self._namespace = namespace
        self._database = database
        self._handlers = handlers
        self._clock = clock
        self._context = context
        self._counters = counters
        self._emitted = emitted
        self._transactions = transactions or asyncio.Semaphore(database.handler_transactions)
        self._crashes = crashes

    async def call(self, run: Run, task: asyncio.Task[None]) -> Outcome | None:
        """Call the handler, or the hooks that are owed, for one row; ``None`` if there is nothing to write."""
        queue, before, is_dying = run.queue, None, run.notification.state == DYING
        try:
            envelope = self._open_dead(run) if is_dying else self._open(run)
            current_envelope.set(envelope)
            before = contextvars.copy_context()
            if queue.is_plain and not is_dying:
                await queue.function(cast(Any, envelope))
            elif queue.is_watched:
                await self._recorded(run, (run,), lambda: self._deliver(run, envelope))
            else:
                await self._deliver(run, envelope)
            if run.is_settled or run.cancelled_at is None or run.interrupted:
                outcome: Outcome | None = self._succeeded(run, envelope)
            else:
                outcome = self._failed(run, self._timeout_error(run), task)  # it came back, but too late
        except BaseException as error:
            if isinstance(error, GeneratorExit) and not _is_current(task):
                raise  # the worker itself is thrown away with its event loop
            outcome = self._failed(run, error, task)
        if run.cancelled_at is not None:
            task.uncancel()
        # A context variable that a handler left behind must not reach the next event.
        run.is_clean = before is None or contextvars.copy_context() == before
        return outcome

    async def _deliver(self, run: Run, envelope: Envelope) -> None:
        """Call a handler that asks for more than at least once, or hooks."""
        if run.notification.state == DYING:
            await self._in_transaction(run, {run: envelope}, (DYING,), self._bury)
        elif run.queue.delivery is Delivery.TRANSACTIONAL:
            await self._in_transaction(run, {run: envelope}, _STARTABLE, self._perform)
        elif run.queue.delivery is Delivery.AT_LEAST_ONCE:
            await run.queue.function(cast(Any, envelope))
        else:
            await self._mark(run)
            run.has_begun = True
            await run.queue.function(cast(Any, envelope))

    async def _recorded(self, run: Run, rows: Iterable[Run], call: Callable[[], Awaitable[T]]) -> T:
        """A call that the process may die of: that it begins is written before it does."""
        assert self._crashes is not None
        await self._crashes.begin(run, rows)
        try:
            return await call()
        finally:
            self._crashes.ended()

    # --- batches -------------------------------------------------------------------------------

    async def call_batch(self, batch: BatchRun, task: asyncio.Task[None], done: Done) -> None:
        """Call a handler for many rows. A call that fails is split in halves, until what fails is alone."""
        while batch.parts:
            rows = batch.parts.pop()
            try:
                failed = await self._call_part(batch, rows, done)
            except BaseException as error:
                if isinstance(error, GeneratorExit) and not _is_current(task):
                    raise
                self._part_failed(batch, rows, error, task, done)
            else:
                self._part_done(batch, rows, failed, done)
            if batch.cancelled_at is not None:
                task.uncancel()
                if batch.interrupted or batch.abandoned:
                    return
                batch.cancelled_at = None
            if batch.parts:
                batch.session, batch.is_settled = None, False
                # Waiting for a connection is not the handler's time.
                now = 0.0 if batch.queue.needs_transaction else asyncio.get_running_loop().time()
                batch.queue.starts_now(batch, now)

    async def _call_part(self, batch: BatchRun, rows: list[Run], done: Done) -> Mapping[Run, BaseException]:
        """One call; the rows that the handler says have failed, with why."""
        envelopes = self._open_all(rows, done)
        if not envelopes:
            return {}
        current_envelope.set(next(iter(envelopes.values())))
        before = contextvars.copy_context()
        in_transaction = batch.queue.delivery is Delivery.TRANSACTIONAL
        try:
            if batch.queue.is_watched:
                failed = await self._recorded(batch, envelopes, lambda: self._call_all(batch, envelopes))
            else:
                failed = await self._call_all(batch, envelopes)
        finally:
            batch.is_clean = batch.is_clean and contextvars.copy_context() == before
        if batch.cancelled_at is not None and not batch.interrupted and not batch.is_settled:
            raise self._timeout_error(batch)
        for run, envelope in envelopes.items():
            if run not in failed and run in batch.remaining:
                # In a transaction it is settled already, or it was another's and is released.
                done(run, None if in_transaction else self._succeeded(run, envelope))
        return failed

    async def _call_all(self, batch: BatchRun, envelopes: Mapping[Run, Envelope]) -> Mapping[Run, BaseException]:
        if batch.queue.delivery is Delivery.TRANSACTIONAL:
            return (await self._in_transaction(batch, envelopes, _STARTABLE, self._perform_batch)).failed
        return await _call_with(batch, envelopes)

    def _open_all(self, rows: Iterable[Run], done: Done) -> dict[Run, Envelope]:
        """The envelopes of a call; a row that cannot be decoded fails by itself."""
        opened: dict[Run, Envelope] = {}
        for run in rows:
            try:
                opened[run] = self._open(run)
            except Exception as error:
                done(run, self.judge(run, error))
        return opened

    def _part_done(self, batch: BatchRun, rows: Iterable[Run], failed: Mapping[Run, BaseException], done: Done) -> None:
        for run in rows:
            if run in failed and run in batch.remaining:
                done(run, self.judge(run, failed[run]))

    def _part_failed(
        self, batch: BatchRun, rows: Sequence[Run], error: BaseException, task: asyncio.Task[None], done: Done
    ) -> None:
        cause = self._cause(batch, error, task)
        left = [run for run in rows if run in batch.remaining]
        if cause is None or batch.interrupted or batch.abandoned:
            batch.parts.append(left)
            for part in batch.parts:
                for run in part:
                    if run in batch.remaining:
                        done(run, None)
            batch.parts.clear()
        elif len(left) == 1 or isinstance(cause, RetryAfter):
            for run in left:
                done(run, self.judge(run, cause))
        else:
            logger.info(
                "handler %r failed for %d events at once; trying halves of them: %s",
                batch.queue.handler.name, len(left), shown(cause, self.redact),
                extra={"handler_name": batch.queue.handler.name},
            )  # fmt: skip
            middle = len(left) // 2
            batch.parts += [left[middle:], left[:middle]]

    # --- transactions --------------------------------------------------------------------------

    async def _in_transaction(
        self, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State], work: _Work
    ) -> _Ended:
        """Claim the rows, do the work, and commit what it wrote, what it emitted and the rows' new state together."""
        queue, loop = run.queue, asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._transactions)
            queue.starts_now(run, loop.time())
            try:
                session = run.session = await stack.enter_async_context(self._database.session())
                await session.begin()
            except Exception as error:
                raise NotBegun(queue.handler.name) from error
            first = next(iter(envelopes.values()))
            record = self._action_of(run, first)
            tx = Transaction(
                session, self._context.emitter, action_id=record.action_id, action_name=record.action_name,
                now=record.started_date, shard=self._context.shard, resources=self._context.resources,
                cause=first.cause, in_handler=True,
            )  # fmt: skip
            try:
                claimed = await self._claim(session, run, envelopes, states)
                ended = await self._call_within(tx, run, claimed, work)
                await self._write(tx, run, record, claimed, ended)
                await self._finish(session, claimed, ended)
            except BaseException:
                tx.abandon()
                await to_the_end(roll_back(session))
                raise
            try:
                await commit(session, tx)
            except CommitUnknown as error:
                raise _NobodyKnows from error
            finally:
                # A cancellation meanwhile changes nothing about it.
                run.is_settled = tx.is_committed
                for row in claimed.keys() - ended.failed.keys():
                    row.is_settled = tx.is_committed
        if tx.events or tx.has_parts or any(envelope.emitted for envelope in claimed.values()):
            self._emitted()
        return ended

    async def _claim(
        self, session: Session, run: Run, envelopes: Mapping[Run, Envelope], states: Sequence[State]
    ) -> dict[Run, Envelope]:
        """Lock the rows; those that another process works on, or has settled, are none of ours."""
        errors = await session.claim(sorted(row.notification.id for row in envelopes), states)
        claimed = {row: envelope for row, envelope in envelopes.items() if row.notification.id in errors}
        if not claimed:
            raise TakenByAnother
        self._counters.refused += len(envelopes) - len(claimed)
        if states == (DYING,):
            run.verdict = verdict_of(errors[run.notification.id])
        return claimed

    async def _call_within(self, tx: Transaction, run: Run, envelopes: Mapping[Run, Envelope], work: _Work) -> _Ended:
        """Do the work within the transaction; a run that was given up must not commit."""
        for envelope in envelopes.values():
            envelope.within(tx, shared=isinstance(run, BatchRun))
        token = open_transaction.set((self._context.outbox, tx))
        try:
            ended = await work(run, envelopes)
            tx.close()
        finally:
            open_transaction.reset(token)
        if run.cancelled_at is not None and not run.interrupted:
            raise self._timeout_error(run)
        return ended

    async def _write(
        self, tx: Transaction, run: Run, record: ActionRecord, envelopes: Mapping[Run, Envelope], ended: _Ended
    ) -> None:
        """Write what was emitted, each event as caused by the one whose envelope it was emitted through."""
        if tx.events:
            await tx.write(record.completed(self._clock()), tx.events)
        for row, envelope in envelopes.items():
            if envelope.emitted and row not in ended.failed:
                await tx.write(self._action_of(run, envelope).completed(self._clock()), envelope.emitted)
        tx.require_open("a statement on envelope.tx.connection")

    async def _finish(self, session: Session, claimed: Iterable[Run], ended: _Ended) -> None:
        def attempts(row: Run) -> int:
            return row.notification.attempts + ended.attempts_more

        rows = sorted((row for row in claimed if row not in ended.failed), key=attempts)
        for number, some in groupby(rows, key=attempts):
            await session.finish(sorted(row.notification.id for row in some), ended.state, number, self._clock())

    async def _perform(self, run: Run, envelopes: Mapping[Run, Envelope]) -> _Ended:
        await run.queue.function(cast(Any, envelopes[run]))
        return _Ended(State.SUCCEEDED, 1)

    async def _perform_batch(self, run: Run, envelopes: Mapping[Run, Envelope]) -> _Ended:
        return _Ended(State.SUCCEEDED, 1, await _call_with(run, envelopes))

    async def _bury(self, run: Run, envelopes: Mapping[Run, Envelope]) -> _Ended:
        """Tell the hooks of a verdict. Its handler is not called again for it."""
        assert run.verdict is not None
        for hook in run.queue.hooks:
            await hook(envelopes[run], run.verdict.error)
        return _Ended(run.verdict.state, 0)

    async def _mark(self, run: Run) -> None:
        """Commit that this run has begun. If it is found unfinished after that, it is never begun again."""
        notification = run.notification
        if notification.attempts > 0:
            raise InterruptedRun(run.queue.handler.name)
        begun = Bucket(State.PENDING, 1, [Outcome(notification.id, run.lease, State.PENDING, 1)])
        try:
            is_ours = await self._database.notifications.settle(begun, self._clock())
        except Exception as error:
            raise NotBegun(run.queue.handler.name) from error
        if not is_ours:
            raise TakenByAnother

    # --- envelopes -----------------------------------------------------------------------------

    def _open(self, run: Run) -> Envelope:
        """Decode the event; what cannot be decoded is a failure of this row alone."""
        notification, queue = run.notification, run.queue
        decode = queue.decoders.get(notification.event_type)
        if decode is None:
            decode = queue.decoders[notification.event_type] = self._decoder(queue.handler, notification.event_type)
        if notification.payload in _NULL:
            raise InvalidEvent(f"event {notification.event_type}", "its payload is NULL")
        return EventEnvelope(decode(notification.payload), notification, self._context)

    def _open_dead(self, run: Run) -> Envelope:
        """For hooks: an event that cannot be decoded is ``None``."""
        try:
            return self._open(run)
        except Exception:
            return EventEnvelope(cast(Any, None), run.notification, self._context)

    def _decoder(self, handler: Handler, event_type: str) -> Callable[[str], Event]:
        cls = self._handlers.event_class(handler, event_type)
        if cls is not None:
            return msgspec.json.Decoder(cls).decode
        if handler.topic is not None:
            # Whatever comes along on a topic; a class of this name gives it a type.
            return msgspec.json.Decoder(dict).decode  # type: ignore[return-value]  # documented for topics
        raise InvalidEvent(f"event type {event_type!r}", f"no event class of handler {handler.name!r} has this name")

    # --- judging -------------------------------------------------------------------------------

    def _succeeded(self, run: Run, envelope: Envelope) -> Outcome:
        outcome = success(run.notification, run.lease)
        if envelope.has_emitted:
            outcome.emitted = (self._action_of(run, envelope), envelope.emitted)
        return outcome

    def _failed(self, run: Run, error: BaseException, task: asyncio.Task[None]) -> Outcome | None:
        """What a raising handler means; ``None`` if the shutdown interrupted it, or it was judged before."""
        cause = self._cause(run, error, task)
        return None if cause is None else self.judge(run, cause)

    def _cause(self, run: Run, error: BaseException, task: asyncio.Task[None]) -> BaseException | None:
        """What a run is to be judged by; ``None`` if it is not to be."""
        if isinstance(error, TakenByAnother):
            self._counters.refused += len(tuple(run.undone))
            return None
        if isinstance(error, _NobodyKnows):
            logger.warning("%s; the row says what became of it", error.__cause__)
            return None
        if run.interrupted or run.abandoned:
            return error if run.has_begun and not run.abandoned else None
        if run.cancelled_at is not None:
            return self._timeout_error(run)
        if isinstance(error, asyncio.CancelledError) and task.cancelling():
            if self.home is not None and self.home.cancelling():
                run.interrupted = True  # the whole event loop is being torn down
                return None
            while task.cancelling():  # the handler cancelled itself
                task.uncancel()
        return error

    def _timeout_error(self, run: Run) -> TimeoutError:
        return TimeoutError(
            f"handler {run.queue.handler.name!r} ran longer than its timeout of {run.queue.timeout:g} s"
        )

    def stuck_error(self, run: Run, stack: str) -> TimeoutError:
        """Why a run is given up that ignores its cancellation."""
        error = self._timeout_error(run)
        error.add_note(f"it ignores its cancellation, stuck at\n{stack}")
        return error

    def judge(self, run: Run, error: BaseException) -> Outcome:
        """What a failure means for one row: another try, or the end."""
        queue, notification = run.queue, run.notification
        if notification.state == DYING and isinstance(error, CrashedProcess):
            logger.error("event %s is DEAD without its hook: %s", notification.event_id, shown(error))
            return hook_crash(notification, run.lease, error, self._clock())
        if notification.state == DYING:
            logger.error(
                "a hook of handler %r failed for event %s, and is tried again: %s",
                queue.handler.name, notification.event_id, shown(error, self.redact),
            )  # fmt: skip
            return hook_failure(
                notification, run.lease, error, self._clock(), run.verdict, queue.cap, self.redact
            )  # fmt: skip
        outcome = failure(
            notification, run.lease, error, self._clock(), queue.policy, retention=queue.retention, cap=queue.cap,
            is_final=queue.delivery is Delivery.AT_MOST_ONCE and not isinstance(error, NotBegun),
            owes_hook=bool(queue.hooks), redact=self.redact,
        )  # fmt: skip
        logger.log(
            logging.WARNING if outcome.state is State.FAILED else logging.ERROR,
            "handler %r failed for event %s (attempt %d, now %s): %s",
            queue.handler.name, notification.event_id, notification.attempts + 1, outcome.state,
            shown(error, self.redact),
            extra={
                "handler_name": queue.handler.name, "event_id": str(notification.event_id),
                "notification_id": str(notification.id), "attempt": notification.attempts + 1,
            },
        )  # fmt: skip
        return outcome

    def _action_of(self, run: Run, envelope: Envelope) -> ActionRecord:
        """The action that a handler's own events belong to: the handler itself."""
        name, cause, now = run.queue.handler.name, envelope.cause, self._clock()
        params = {"event_id": cause.event_id, "handler_name": cause.handler_name}
        return ActionRecord(
            namespace=self._namespace,
            action_id=uuid7(),
            action_name=name,
            action_params=encode_params(params, name, stores_nul=True),
            started_date=now,
            completion_date=now,
            correlation_id=cause.correlation_id,
            causation_id=cause.event_id,
            hops=cause.hops + 1,
        )


async def _call_with(run: Run, envelopes: Mapping[Run, Envelope]) -> Mapping[Run, BaseException]:
    """Call a handler with a list; the rows that it says have failed."""
    returned = await run.queue.function(cast(Any, list(envelopes.values())))
    if returned is None:
        return {}
    name = run.queue.handler.name
    by_envelope = {id(envelope): row for row, envelope in envelopes.items()}
    failed: dict[Run, BaseException] = {}
    for item in cast(Iterable[object], returned):
        is_pair = isinstance(item, tuple)
        pair = cast(tuple[object, ...], item) if is_pair else (item, ReturnedAsFailed(name))
        row = by_envelope.get(id(pair[0])) if len(pair) == 2 else None
        error = pair[-1]
        if row is None or not isinstance(error, BaseException):
            raise TypeError(
                f"batch handler {name!r} returned {repr(item)[:200]} among what failed; expected envelopes of this "
                "call, or pairs of (envelope, error)"
            )
        failed[row] = error
    return failed


class _NobodyKnows(Exception):
    """The connection was lost during the COMMIT of a run's own transaction."""


class TakenByAnother(Exception):
    """Another process works on the row, or has settled it already: it is none of ours."""


def _is_current(task: asyncio.Task[None]) -> bool:
    """Whether this is called by the task, rather than by whoever throws its coroutine away."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:
        return False
