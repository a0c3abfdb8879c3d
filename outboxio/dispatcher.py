"""Dispatch: due notifications -> handlers -> outcomes -> settled rows.

Three things go on at once, and meet only in this object's memory:

* ``find_once`` reads due rows into the queue of their handler, ahead of need but bounded. Nothing is claimed in the
  database: this process holds the lock of every name that it asks for, and remembers what it has in flight.
* ``concurrency`` long-lived workers take runs from the queues, a handler in turn with the others, and call it.
* ``settle_once`` writes what they decided, equal outcomes with one UPDATE.

How a row is found although other rows became due behind it: each name has a position up to which its rows were read.
While there is a backlog, reading goes on from there; a sweep from the beginning, skipping what is in flight, follows
as soon as the backlog ends, and at least twice a second while it lasts. So a retry, a late commit or a row that an
operator put back is never missed, and a drain reads every row once.

A worker is a task of its own kind: a handler that ignores its cancellation cannot be waited for, which a TaskGroup
would do for ever. All tasks are kept here, and :meth:`stop` accounts for each.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any, cast
from uuid import UUID

import msgspec

from outboxio.backoff import pause_after
from outboxio.clock import Clock
from outboxio.emission import encode_params
from outboxio.envelope import EventEnvelope, HandlerContext, current_envelope
from outboxio.errors import CommitUnknown, InterruptedRun, InvalidEvent, NotBegun, ShutdownError
from outboxio.event import ActionRecord, Event
from outboxio.handler import DeadHook, Delivery, Handler, HandlerRegistry
from outboxio.ids import uuid7
from outboxio.notification import BEGINNING, Notification, State, Wanted
from outboxio.outcome import (
    Bucket,
    Lease,
    Outcome,
    expired,
    failure,
    hook_failure,
    in_buckets,
    shown,
    success,
    too_old,
    verdict_of,
)
from outboxio.queues import LONGEST_GRACE, SWEEP_IN_FLIGHT, HandlerQueue, Run, Source
from outboxio.quota import Quotas
from outboxio.round import NOTHING, Round
from outboxio.settings import Settings
from outboxio.storage.protocols import Database, Session
from outboxio.transaction import Transaction, commit, open_transaction, roll_back
from outboxio.waiting import to_the_end

logger = logging.getLogger(__name__)

Work = Callable[[Run, EventEnvelope[Any]], Awaitable[tuple[State, int]]]
"""What is done within a transaction, and the state and attempts that the row has after it."""

SLICE = 0.001  # seconds that workers may run on without giving the event loop a turn
_NULL = (None, msgspec.Raw(b"null"))
TRIES_TO_SETTLE = 5  # of one drain, within about three seconds


class Counters(msgspec.Struct):
    """What this process did with notifications since it started."""

    succeeded: int = 0
    failed: int = 0
    expired: int = 0
    dead: int = 0
    dying: int = 0
    """Verdicts, and failed tries of their hooks: the hook is owed."""
    refused: int = 0
    """Outcomes that the fence refused: another process holds the handler now, or the row was settled already."""
    stuck: int = 0

    def count(self, state: State, number: int) -> None:
        name = state.lower()
        setattr(self, name, getattr(self, name) + number)


class Dispatcher:
    """Runs the handlers of one outbox for the notifications of one shard."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        handlers: HandlerRegistry,
        clock: Clock,
        settings: Settings,
        context: HandlerContext,
        *,
        on_dead: DeadHook | None,
        emitted: Callable[[], None],
        left_behind: set[UUID],
    ) -> None:
        self.counters = Counters()
        self.home: asyncio.Task[Any] | None = None
        """The task that everything here belongs to: when it is cancelled, so is everything."""
        self.wake_finding: Callable[[], None] = _nothing
        self.wake_settling: Callable[[], None] = _nothing
        self.doubt: Callable[[Lease], None] = lambda lease: None
        self._namespace = namespace
        self._database = database
        self._handlers = handlers
        self._clock = clock
        self._settings = settings
        self._context = context
        self._emitted = emitted
        self._queues = {id(h): HandlerQueue(h, settings, len(handlers), on_dead) for h in handlers}
        self._unclaimed = sum(queue.share for queue in self._queues.values())
        self._held_back: list[HandlerQueue] = []
        self._sources: dict[str, Source] = {}
        self._quotas = Quotas(settings.handling_batch_size)
        self._in_flight: dict[UUID, Run] = {}
        self._runnable: deque[HandlerQueue] = deque()
        self._ready = 0
        self._running = 0
        self._waiting: list[Outcome] = []
        self._writing: list[Bucket] = []
        self._flush_timer: asyncio.TimerHandle | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._workers: set[asyncio.Task[None]] = set()
        self._stuck: dict[asyncio.Task[None], Run] = {}
        self._left_behind = left_behind
        self._idle: list[asyncio.Future[bool]] = []
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._transactions = asyncio.Semaphore(database.handler_transactions)
        self._finding = asyncio.Lock()
        self._settled_meanwhile: set[UUID] = set()
        self._settling = asyncio.Lock()
        self._refused_runs: dict[UUID, Run] = {}
        self._base_context = contextvars.copy_context()
        self._now = datetime.min
        self._proven_until = float("inf")
        self._stopping = False

    # --- which handlers are ours ---------------------------------------------------------------

    def take(self, name: str, lease: Lease) -> None:
        """This process holds the lock of a stored handler name now."""
        handler = self._handlers.find(name)
        if handler is not None:
            source = self._sources[name] = Source(name, self._queues[id(handler)], lease)
            source.in_flight = sum(run.notification.handler_name == name for run in self._in_flight.values())
            self.wake_finding()

    def lose(self, name: str) -> None:
        """It does no longer: nothing of this name is started any more. What runs goes on; the fence judges it."""
        if self._sources.pop(name, None) is not None:
            self._drop_ready(lambda run: run.notification.handler_name == name)
            self._refused_runs = {i: r for i, r in self._refused_runs.items() if r.notification.handler_name != name}

    def trust_until(self, moment: float) -> None:
        """Start nothing after this moment of the event loop's clock, unless the locks are proven anew."""
        self._proven_until = moment

    # --- one round -----------------------------------------------------------------------------

    async def run_once(self) -> Round:
        """Find, run and settle one batch; returns when all of it is settled."""
        found = await self.find_once()
        await self.finish()
        return found

    async def finish(self) -> None:
        """Wait until nothing is ready or running, and everything is settled. A write that fails is tried again."""
        failures = 0
        while True:
            await self._quiet.wait()
            try:
                await self.settle_once()  # takes its turn behind a write that is under way
                failures = 0
            except Exception:
                failures += 1
                if failures > TRIES_TO_SETTLE:
                    raise
                await asyncio.sleep(pause_after(failures))
            if self.is_idle:
                return

    @property
    def is_idle(self) -> bool:
        return not (self._ready or self._running or self._waiting or self._writing)

    # --- finding -------------------------------------------------------------------------------

    async def find_once(self) -> Round:
        """Read due rows for every name that has room; at most about one batch."""
        async with self._finding:
            now = asyncio.get_running_loop().time()
            asked = self._next_reads(now)
            if not asked:
                return NOTHING
            self._now = self._clock()
            self._settled_meanwhile.clear()
            rows = await self._database.notifications.find_due(
                self._namespace, self._now, [wanted for _, wanted in asked]
            )
            started = self._take_in(rows)
            more = self._learn(asked, rows, now)
        return Round(started, more)

    def _next_reads(self, now: float) -> list[tuple[Source, Wanted]]:
        batch = self._settings.handling_batch_size
        if self._stopping or now > self._proven_until:
            return []
        if len(self._waiting) > 4 * self._settings.outcome_batch + batch:
            return []  # the database takes outcomes more slowly than handlers make them
        open_sources = [source for source in self._sources.values() if source.queue.wants_more]
        rooms = self._quotas.rooms([source.name for source in open_sources])
        for queue in {id(source.queue): source.queue for source in open_sources}.values():
            queue.adapt_window(now)
        return [(s, s.next_read(min(rooms[s.name], s.queue.window), now)) for s in open_sources]

    def _take_in(self, rows: Iterable[Notification]) -> int:
        """Queue the rows that are not in flight; how many.

        Rows that were settled while this read was under way may be in it as they were before.
        """
        taken = 0
        in_flight, sources, settled = self._in_flight, self._sources, self._settled_meanwhile
        for row in rows:
            source = sources.get(row.handler_name)
            if source is None or row.id in in_flight or row.id in settled or row.id in self._left_behind:
                continue
            if self._refused_runs and self._proves_lease_over(row, source.lease):
                self.doubt(source.lease)
                continue
            queue = source.queue
            run = in_flight[row.id] = Run(row, queue, source.lease)
            source.in_flight += 1
            queue.ready.append(run)
            self._ready += 1
            self._quiet.clear()
            self._list(queue)
            taken += 1
        self._call_workers(taken)
        return taken

    def _proves_lease_over(self, row: Notification, lease: Lease) -> bool:
        """Whether an outcome of this row was refused under this lease, although the row was never settled.

        Then the lease is worth nothing, and running the row again would end in the same way for ever.
        """
        refused = self._refused_runs.pop(row.id, None)
        return refused is not None and refused.lease is lease and refused.notification.attempts == row.attempts

    def _learn(self, asked: list[tuple[Source, Wanted]], rows: Iterable[Notification], now: float) -> bool:
        """Move the positions on; whether there is more to read for which there is room."""
        counts: dict[str, int] = {}
        last: dict[str, Notification] = {}
        for row in rows:
            counts[row.handler_name] = counts.get(row.handler_name, 0) + 1
            last[row.handler_name] = row
        full = {source.name for source, wanted in asked if counts.get(source.name, 0) >= wanted.limit}
        self._quotas.learn([source.name for source, _ in asked], counts, full)
        for source, _ in asked:
            source.has_backlog = source.queue.was_full = source.name in full
            if source.name in last:
                reached = (last[source.name].next_retry_at, last[source.name].sequence)
                source.position = max(source.position, reached) if source.sweeps else reached
            if not source.has_backlog and not source.sweeps:
                asyncio.get_running_loop().call_later(SWEEP_IN_FLIGHT, self.wake_finding)
        return any(source.has_backlog and source.queue.wants_more for source, _ in asked)

    # --- running -------------------------------------------------------------------------------

    def _list(self, queue: HandlerQueue) -> None:
        """Handlers take turns: a queue stands in line while it has something to start."""
        if not queue.is_listed and queue.ready and len(queue.running) < queue.limit:
            queue.is_listed = True
            self._runnable.append(queue)

    def _has_slot(self, queue: HandlerQueue) -> bool:
        """Every handler has its share of the slots, and any that others have not claimed beyond theirs.

        So however many runs of slow handlers there are, another handler can always start something at once.
        """
        if len(queue.running) < queue.share:
            return True
        free = self._settings.concurrency - self._running
        return free > min(self._unclaimed, self._settings.concurrency // 2)

    def _next_run(self) -> Run | None:
        while self._runnable:
            queue = self._runnable.popleft()
            queue.is_listed = False
            if not queue.ready or len(queue.running) >= queue.limit:
                continue
            if not self._has_slot(queue):
                self._held_back.append(queue)
                continue
            if len(queue.running) < queue.share:
                self._unclaimed -= 1
            run = queue.ready.popleft()
            queue.running[run] = None
            self._ready -= 1
            self._running += 1
            self._list(queue)
            if len(queue.ready) == queue.window // 2:
                self.wake_finding()
            return run
        return None

    def _call_workers(self, number: int) -> None:
        """Wake so many idle workers, and hire what is lacking."""
        while number and self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(True)
                number -= 1
        for _ in range(min(number, self._settings.concurrency - len(self._workers))):
            worker = asyncio.create_task(self._work(), context=self._base_context.copy())
            self._workers.add(worker)
            worker.add_done_callback(self._worker_ended)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if (stuck := self._stuck.pop(worker, None)) is not None:
            self._left_behind.discard(stuck.notification.id)
            self.wake_finding()
        if not worker.cancelled() and worker.exception() is not None:
            logger.error("a worker failed; another takes its place", exc_info=worker.exception())
        for run in [run for queue in self._queues.values() for run in queue.running if run.task is worker]:
            self._finished(run, None)  # nobody knows how it ended: its row is found again
        if self._runnable and not self._stopping:
            self._call_workers(1)

    async def _work(self) -> None:
        """A worker's life: run after run, until it is sent home or a run leaves its mark on it."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        slice_ends = loop.time() + SLICE
        while True:
            now = loop.time()
            if now > slice_ends:
                await asyncio.sleep(0)
                now = loop.time()
                self._now, slice_ends = self._clock(), now + SLICE
                if now > self._proven_until:
                    self._drop_ready(lambda run: True)
            run = self._next_run()
            if run is None:
                if not await self._rest():
                    return
            elif not await self._run(run, task, now):
                return

    async def _rest(self) -> bool:
        """Wait to be called; whether there is work, rather than the end of it."""
        current_envelope.set(None)
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        if self._stopping:
            return False
        return await waiter

    async def _run(self, run: Run, task: asyncio.Task[None], now: float) -> bool:
        """Call the handler for one notification; whether this worker may go on."""
        queue, notification = run.queue, run.notification
        is_dying = notification.state == State.DYING
        if not is_dying and too_old(notification, self._now, queue.retention):
            self._finished(run, expired(notification, run.lease))
            return True
        # Whoever needs a transaction waits for it first, and that is not the handler's time.
        run.task, run.started = task, 0.0 if is_dying or queue.delivery is Delivery.TRANSACTIONAL else now
        if self._watch_timer is None:
            self._watch()
        before = None
        try:
            envelope = self._open_dead(run) if is_dying else self._open(run)
            current_envelope.set(envelope)
            before = contextvars.copy_context()
            if is_dying:
                await self._in_transaction(run, envelope, (State.DYING,), self._bury)
            elif queue.is_plain:
                await queue.function(envelope)
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
        if run.abandoned:
            self._returned(run)
            return False
        self._finished(run, outcome)
        # A context variable that a handler left behind must not reach the next event.
        return not run.interrupted and (before is None or contextvars.copy_context() == before)

    async def _deliver(self, run: Run, envelope: EventEnvelope[Any]) -> None:
        """Call a handler that asks for more than at least once."""
        if run.queue.delivery is Delivery.TRANSACTIONAL:
            await self._in_transaction(run, envelope, (State.PENDING, State.FAILED), self._perform)
        else:
            await self._mark(run)
            run.has_begun = True
            await run.queue.function(envelope)

    async def _in_transaction(
        self, run: Run, envelope: EventEnvelope[Any], states: Sequence[State], work: Work
    ) -> None:
        """Claim the row, do the work, and commit what it wrote, what it emitted and the row's new state together."""
        queue, loop = run.queue, asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._transactions)
            queue.starts_now(run, loop.time())
            try:
                session = run.session = await stack.enter_async_context(self._database.session())
                await session.begin()
            except Exception as error:
                raise NotBegun(queue.handler.name) from error
            tx = await self._work_in(session, run, envelope, states, work)
            try:
                await to_the_end(commit(session, tx))
            except CommitUnknown as error:
                raise _NobodyKnows from error
            finally:
                run.is_settled = tx.is_committed  # a cancellation meanwhile changes nothing about it
        if tx.events or tx.has_parts:
            self._emitted()

    async def _work_in(
        self, session: Session, run: Run, envelope: EventEnvelope[Any], states: Sequence[State], work: Work
    ) -> Transaction:
        """Everything between BEGIN and COMMIT; rolled back if any of it fails."""
        notification, record = run.notification, self._action_of(run, envelope)
        tx = Transaction(
            session, self._context.emitter, action_id=record.action_id, action_name=record.action_name,
            now=record.started_date, shard=self._context.shard, resources=self._context.resources,
            cause=envelope.cause, in_handler=True,
        )  # fmt: skip
        try:
            claimed = await session.claim([notification.id], states)
            if notification.id not in claimed:
                raise _TakenByAnother
            if notification.state == State.DYING:
                run.verdict = verdict_of(claimed[notification.id])
            state, attempts = await self._call_within(tx, run, envelope, work)
            if tx.events:
                await tx.write(record.completed(self._clock()), tx.events)
            tx.require_open("a statement on envelope.tx.connection")
            await session.finish([notification.id], state, attempts, self._clock())
        except BaseException:
            tx.abandon()
            await to_the_end(roll_back(session))
            raise
        return tx

    async def _call_within(
        self, tx: Transaction, run: Run, envelope: EventEnvelope[Any], work: Work
    ) -> tuple[State, int]:
        """Do the work within the transaction; a run that was given up must not commit."""
        envelope.within(tx)
        token = open_transaction.set((self._context.outbox, tx))
        try:
            result = await work(run, envelope)
            tx.close()
        finally:
            open_transaction.reset(token)
        if run.cancelled_at is not None and not run.interrupted:
            raise self._timeout_error(run)
        return result

    async def _perform(self, run: Run, envelope: EventEnvelope[Any]) -> tuple[State, int]:
        await run.queue.function(envelope)
        return State.SUCCEEDED, run.notification.attempts + 1

    async def _bury(self, run: Run, envelope: EventEnvelope[Any]) -> tuple[State, int]:
        """Tell the hooks of a verdict. Its handler is not called again for it."""
        assert run.verdict is not None
        for hook in run.queue.hooks:
            await hook(envelope, run.verdict.error)
        return run.verdict.state, run.notification.attempts

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
            raise _TakenByAnother

    def _open(self, run: Run) -> EventEnvelope[Any]:
        """Decode the event; what cannot be decoded is a failure of this row alone."""
        notification, queue = run.notification, run.queue
        decode = queue.decoders.get(notification.event_type)
        if decode is None:
            decode = queue.decoders[notification.event_type] = self._decoder(queue.handler, notification.event_type)
        if notification.payload in _NULL:
            raise InvalidEvent(f"event {notification.event_type}", "its payload is NULL")
        return EventEnvelope(decode(notification.payload), notification, self._context)

    def _open_dead(self, run: Run) -> EventEnvelope[Any]:
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

    def _succeeded(self, run: Run, envelope: EventEnvelope[Any]) -> Outcome:
        outcome = success(run.notification, run.lease)
        if envelope.emitted:
            outcome.emitted = (self._action_of(run, envelope), envelope.emitted)
        return outcome

    def _failed(self, run: Run, error: BaseException, task: asyncio.Task[None]) -> Outcome | None:
        """What a raising handler means; ``None`` if the shutdown interrupted it, or it was judged before."""
        if isinstance(error, _TakenByAnother):
            self.counters.refused += 1
            return None
        if isinstance(error, _NobodyKnows):
            logger.warning("%s; the row says what became of it", error.__cause__)
            return None
        if run.interrupted or run.abandoned:
            return self._judge(run, error) if run.has_begun and not run.abandoned else None
        if run.cancelled_at is not None:
            return self._judge(run, self._timeout_error(run))
        if isinstance(error, asyncio.CancelledError) and task.cancelling():
            if self.home is not None and self.home.cancelling():
                run.interrupted = True  # the whole event loop is being torn down
                return None
            while task.cancelling():  # the handler cancelled itself
                task.uncancel()
        return self._judge(run, error)

    def _timeout_error(self, run: Run) -> TimeoutError:
        return TimeoutError(
            f"handler {run.queue.handler.name!r} ran longer than its timeout of {run.queue.timeout:g} s"
        )

    def _judge(self, run: Run, error: BaseException) -> Outcome:
        queue, notification = run.queue, run.notification
        if notification.state == State.DYING:
            logger.error(
                "a hook of handler %r failed for event %s, and is tried again: %s",
                queue.handler.name, notification.event_id, shown(error),
            )  # fmt: skip
            return hook_failure(notification, run.lease, error, self._clock(), run.verdict, queue.cap)
        outcome = failure(
            notification, run.lease, error, self._clock(), queue.policy, retention=queue.retention, cap=queue.cap,
            is_final=queue.delivery is Delivery.AT_MOST_ONCE and not isinstance(error, NotBegun),
            owes_hook=bool(queue.hooks),
        )  # fmt: skip
        logger.log(
            logging.WARNING if outcome.state is State.FAILED else logging.ERROR,
            "handler %r failed for event %s (attempt %d, now %s): %s",
            queue.handler.name, notification.event_id, notification.attempts + 1, outcome.state, shown(error),
            extra={
                "handler_name": queue.handler.name, "event_id": str(notification.event_id),
                "notification_id": str(notification.id), "attempt": notification.attempts + 1,
            },
        )  # fmt: skip
        return outcome

    def _action_of(self, run: Run, envelope: EventEnvelope[Any]) -> ActionRecord:
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

    def _finished(self, run: Run, outcome: Outcome | None) -> None:
        """A run is over: free its slot, and hand its outcome to settling."""
        self._leave(run)
        if run.is_settled:
            self.counters.count(State.SUCCEEDED if run.verdict is None else run.verdict.state, 1)
        if outcome is None or run.is_settled:
            self._release(run.notification)
        else:
            self._add(outcome)

    def _leave(self, run: Run) -> None:
        queue = run.queue
        del queue.running[run]
        self._running -= 1
        if len(queue.running) < queue.share:
            self._unclaimed += 1
        self._list(queue)
        while self._held_back:
            self._list(self._held_back.pop())
        if not self._running and not self._ready:
            self._quiet.set()

    def _release(self, notification: Notification) -> None:
        """The row is no longer ours to remember: it may be found again."""
        self._forget(notification.id, notification.handler_name)

    def _forget(self, notification_id: UUID, handler_name: str) -> None:
        run = self._in_flight.get(notification_id)
        if run is not None:
            del self._in_flight[notification_id]
            if self._finding.locked():
                self._settled_meanwhile.add(notification_id)
            source = self._sources.get(handler_name)
            if source is not None:
                source.in_flight -= 1

    def _drop_ready(self, condition: Callable[[Run], bool]) -> None:
        """Give back what has not started; another process, or a later round, finds it again."""
        for queue in self._queues.values():
            kept = deque(run for run in queue.ready if not condition(run))
            for run in queue.ready:
                if condition(run):
                    self._release(run.notification)
            self._ready -= len(queue.ready) - len(kept)
            queue.ready = kept
        for source in self._sources.values():
            source.has_backlog, source.position = False, BEGINNING
        if not self._running and not self._ready:
            self._quiet.set()

    # --- deadlines -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look for handlers past their deadline: one timer for all of them, only while something runs."""
        self._watch_timer = None
        if not self._running:
            return
        loop = asyncio.get_running_loop()
        now, shortest = loop.time(), 1.0
        for queue in self._queues.values():
            shortest = min(shortest, queue.timeout / 4, queue.grace / 2)
            for run in list(queue.running):
                if run.started and now - run.started < queue.timeout:
                    break
                if run.started:
                    self._overdue(run, now)
        self._watch_timer = loop.call_later(max(shortest, 0.01), self._watch)

    def _overdue(self, run: Run, now: float) -> None:
        assert run.task is not None
        if run.cancelled_at is None:
            run.cancelled_at = now
            run.task.cancel()
        elif now - run.cancelled_at > run.queue.grace and not run.interrupted:
            self._abandon(run)

    def _abandon(self, run: Run) -> None:
        """A handler ignores its cancellation: report it with its stack, fail its row, and replace its slot."""
        assert run.task is not None
        run.abandoned = True
        self.counters.stuck += 1
        self._workers.discard(run.task)
        self._leave_behind(run)
        error = self._timeout_error(run)
        stack = _stack_of(run.task)
        error.add_note(f"it ignores its cancellation, stuck at\n{stack}")
        logger.error(
            "handler %r is stuck for event %s: it ignores its cancellation; its slot is replaced. It waits at\n%s",
            run.queue.handler.name, run.notification.event_id, stack,
            extra={"handler_name": run.queue.handler.name, "event_id": str(run.notification.event_id)},
        )  # fmt: skip
        self._leave(run)
        if run.session is None:
            self._add(self._judge(run, error))
        else:
            # Its transaction holds the row, so no outcome could be written. It is found again when the run has ended.
            run.session.discard()
            self._release(run.notification)
        self._call_workers(1)

    def _leave_behind(self, run: Run) -> None:
        """While a stuck run lasts, its row is not started again in this process, in a later stay neither."""
        assert run.task is not None
        self._stuck[run.task] = run
        self._left_behind.add(run.notification.id)

    def _returned(self, run: Run) -> None:
        """A stuck handler came back at last: its result counts for nothing."""
        logger.warning(
            "handler %r came back for event %s after it was given up; its result is refused",
            run.queue.handler.name, run.notification.event_id,
        )  # fmt: skip

    # --- settling ------------------------------------------------------------------------------

    def _add(self, outcome: Outcome) -> None:
        self._waiting.append(outcome)
        if len(self._waiting) >= self._settings.outcome_batch or not (self._running or self._ready):
            self.wake_settling()
        elif self._flush_timer is None:
            delay = self._settings.outcome_delay.total_seconds()
            self._flush_timer = asyncio.get_running_loop().call_later(delay, self.wake_settling)

    async def settle_once(self) -> Round:
        """Write what waits, at most about one batch of outcomes."""
        async with self._settling:
            if self._flush_timer is not None:
                self._flush_timer.cancel()
                self._flush_timer = None
            size = self._settings.outcome_batch * 2
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            more = bool(self._waiting)
            self._writing = in_buckets(batch)
            problem: Exception | None = None
            unwritten: list[Bucket] = []
            try:
                while self._writing:
                    try:
                        self._writing[-1:] = await self._settle(self._writing[-1])
                    except Exception as error:
                        if self._database.is_unreachable(error):
                            raise
                        problem = error  # of this bucket alone, so the others go on
                        unwritten.append(self._writing.pop())
            finally:
                # Nothing is lost: what was not written goes first next time.
                self._waiting[:0] = [o for bucket in (*unwritten, *self._writing) for o in bucket.outcomes]
                self._writing = []
            if problem is not None:
                raise problem
        if batch:
            self.wake_finding_if_starved()
        return Round(len(batch), more=more or len(self._waiting) >= self._settings.outcome_batch)

    def wake_finding_if_starved(self) -> None:
        """Finding holds back while too many outcomes wait to be written."""
        if any(source.has_backlog and source.queue.wants_more for source in self._sources.values()):
            self.wake_finding()

    async def _settle(self, bucket: Bucket) -> list[Bucket]:
        """Write one bucket; what is still to be written of it.

        That is nothing, or its halves: they lead to the one value in it that the database refuses.
        """
        try:
            settled = await self._write(bucket)
        except Exception as error:
            if not self._database.refuses_value(error):
                raise
            if len(bucket.outcomes) > 1:
                return list(bucket.halves())
            refused = bucket.outcomes[0]
            logger.error("the database refuses a value of notification %s: %s", refused.notification_id, shown(error))
            (bucket,) = in_buckets([self._storable(refused, error)])
            settled = await self._write(bucket)
        if settled < len(bucket.outcomes):
            if bucket.emitted and len(bucket.outcomes) > 1:
                return list(bucket.halves())
            self._refused(bucket, len(bucket.outcomes) - settled)
        self.counters.count(bucket.state, settled)
        if bucket.state in (State.FAILED, State.DYING):
            self._wake_when_due(min(outcome.next_retry_at or datetime.max for outcome in bucket.outcomes))
        for outcome in bucket.outcomes:
            self._forget(outcome.notification_id, outcome.lease.handler_name)
        return []

    def _wake_when_due(self, moment: datetime) -> None:
        """A retry that is due before the next poll is found on time, not up to a poll later."""
        delay = (moment - self._clock()).total_seconds()
        if delay < self._settings.handling_poll_delay.total_seconds():
            asyncio.get_running_loop().call_later(max(delay, 0) + 0.001, self.wake_finding)

    async def _write(self, bucket: Bucket) -> int:
        if not bucket.emitted:
            return await self._database.notifications.settle(bucket, self._clock())
        settled = await self._database.notifications.settle_emitting(bucket, self._clock())
        if settled:
            self._emitted()
        return settled

    def _storable(self, outcome: Outcome, error: Exception) -> Outcome:
        """The same outcome without what the database refuses. A run whose events are refused has failed."""
        run = self._in_flight.get(outcome.notification_id)
        if outcome.emitted is not None and run is not None:
            return self._judge(run, error).without_error_text()
        return outcome.without_error_text()

    def _refused(self, bucket: Bucket, number: int) -> None:
        self.counters.refused += number
        ids = [outcome.notification_id for outcome in bucket.outcomes]
        self._refused_runs.update({i: self._in_flight[i] for i in ids if i in self._in_flight})
        logger.warning(
            "%d of %d outcomes (%s) were refused: another process has taken over %s, or the rows are settled already",
            number, len(bucket.outcomes), bucket.state, ", ".join(repr(lease.handler_name) for lease in bucket.leases),
        )  # fmt: skip

    # --- stopping ------------------------------------------------------------------------------

    async def stop(self, grace: float) -> None:
        """Start nothing more, wait ``grace`` seconds for what runs, cancel the rest, and write every outcome.

        Raises :class:`ShutdownError` if outcomes could not be written in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        self._stopping = True
        self._drop_ready(lambda run: True)
        for waiter in self._idle:
            if not waiter.done():
                waiter.set_result(False)
        if self._workers:
            await asyncio.wait(self._workers, timeout=grace)
        await self._interrupt()
        await self._settle_all(max(deadline, loop.time() + min(grace, LONGEST_GRACE)))
        for timer in (self._flush_timer, self._watch_timer):
            if timer is not None:
                timer.cancel()

    async def _interrupt(self) -> None:
        """Cancel what still runs; it uses up no attempt."""
        runs = [run for queue in self._queues.values() for run in queue.running]
        for run in runs:
            run.interrupted = True
            run.cancelled_at = 0.0
            if run.task is not None:
                run.task.cancel()
        for task in self._stuck:
            task.cancel()
        if runs:
            logger.warning(
                "cancelled %d handlers that were still running at shutdown: %s", len(runs),
                ", ".join(f"{run.queue.handler.name} for {run.notification.event_id}" for run in runs),
            )  # fmt: skip
        if self._workers:
            await asyncio.wait(self._workers, timeout=LONGEST_GRACE)
            for run in runs:
                if run.task in self._workers:
                    self._leave_behind(run)
        if self._stuck:
            logger.error("%d handlers ignore their cancellation and are left behind", len(self._stuck))

    async def _settle_all(self, deadline: float) -> None:
        loop, pause = asyncio.get_running_loop(), 0.05
        while True:
            try:
                async with asyncio.timeout_at(max(deadline, loop.time() + LONGEST_GRACE)):
                    await self.settle_once()  # takes its turn behind a write that is under way
                if not self._waiting:
                    return
            except Exception as error:
                if loop.time() + pause > deadline:
                    unwritten = [outcome for bucket in self._writing for outcome in bucket.outcomes]
                    raise ShutdownError([o.notification_id for o in (*unwritten, *self._waiting)]) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)


class _NobodyKnows(Exception):
    """The connection was lost during the COMMIT of a run's own transaction."""


class _TakenByAnother(Exception):
    """Another process works on the row, or has settled it already: it is none of ours."""


def _is_current(task: asyncio.Task[None]) -> bool:
    """Whether this is called by the task, rather than by whoever throws its coroutine away."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:
        return False


def _stack_of(worker: asyncio.Task[None]) -> str:
    """Where the handler that a worker runs is waiting, from the handler's own frame to the innermost one."""
    frames: list[traceback.FrameSummary] = []
    waiting: Any = worker.get_coro()
    while waiting is not None:
        frame = next(filter(None, (getattr(waiting, f"{kind}_frame", None) for kind in ("cr", "gi", "ag"))), None)
        if frame is None:
            break
        frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        waiting = getattr(waiting, "cr_await", getattr(waiting, "gi_yieldfrom", getattr(waiting, "ag_await", None)))
    return "".join(traceback.format_list([f for f in frames if f.filename != __file__])).rstrip() or "an unknown place"


def _nothing() -> None:
    return None
