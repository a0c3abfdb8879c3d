"""The parts of a dispatcher in isolation: on an in-memory database, with handlers that are called directly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, cast
from uuid import UUID

import msgspec

from outboxio.dispatch.circuit_breakers import CircuitBreakers
from outboxio.dispatch.core import Core
from outboxio.dispatch.dispatcher import Dispatcher
from outboxio.dispatch.in_flight import InFlight
from outboxio.dispatch.intake import Intake
from outboxio.dispatch.limits import TotalLimits
from outboxio.dispatch.state import DispatchState, Shared
from outboxio.dispatch.watchdog import Watchdog
from outboxio.dispatch.workers import WorkerPool
from outboxio.handlers.handler import HandlerRegistry, make_handler
from outboxio.loops.loop import Signals
from outboxio.model.envelope import HandlerContext
from outboxio.model.event import Event, EventTypes
from outboxio.model.lock_name import Slot
from outboxio.model.notification import DYING, DeferredQuery, DueQuery, Notification, State
from outboxio.model.outcome import Bucket, Lease, Outcome, expired, success
from outboxio.runs.cursor import Cursors, HandlerCursor, Partitions
from outboxio.runs.handler_queue import HandlerQueue, HandlerSpec
from outboxio.runs.key_queues import KeyQueues
from outboxio.runs.poison import PoisonGuard
from outboxio.runs.ports import HandlingSetup, StuckRows, WorkNote
from outboxio.runs.run import Run
from outboxio.settings import Settings
from outboxio.storage.protocols import PartitionCount
from outboxio.support.clock import ShardClock, as_micros
from tests.kit.app import eventually

NOON = datetime(2026, 1, 1, 12)
LONG_AGO = datetime(2025, 1, 1)


class Opened(Event):
    pass


class Refused(Exception):
    """The database refuses a value."""


class Gone(Exception):
    """The database cannot be reached."""


class Table:
    """Settled buckets, due rows, and the faults of a database."""

    can_settle = True

    def __init__(self) -> None:
        self.settled: list[tuple[str, list[int]]] = []
        self.due: list[Notification] = []
        self.queries: list[Sequence[DueQuery]] = []
        self.trouble: Callable[[Bucket], int | None] = lambda bucket: None
        self.while_reading: Callable[[], None] = lambda: None

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        written = self.trouble(bucket)
        if written is None:
            written = len(bucket.outcomes)
            self.settled.append((bucket.state.value, [number.int for number in bucket.ids]))
        return written

    async def find_due(self, namespace: str, due_by: datetime, queries: Sequence[DueQuery]) -> list[Notification]:
        self.queries.append(queries)
        self.while_reading()
        return [
            row
            for query in queries
            for row in self.due
            if (row.handler_name, row.partition_number) == (query.handler_name, query.partition)
        ]


class NothingDeferred:
    """No rows of newer versions."""

    async def wake(self, namespace: str, slots: Sequence[DeferredQuery], now: datetime, limit: int) -> int:
        return 0


class Database:
    """The part of a database that dispatch needs here."""

    starts: Any = None
    ordering: Any = None
    partitions: Any = None
    handler_transactions = 4
    sends_text = True

    def __init__(self) -> None:
        self.notifications = Table()
        self.deferred = NothingDeferred()

    def is_unreachable(self, error: Exception) -> bool:
        return isinstance(error, Gone)

    def refuses_value(self, error: Exception) -> bool:
        return isinstance(error, Refused)


class Locks:
    """The requests of dispatch to the lock manager."""

    def __init__(self) -> None:
        self.suspected: list[Lease] = []
        self.proof_requests = 0

    def suspect(self, lease: Lease) -> None:
        self.suspected.append(lease)

    def look_for_proof(self) -> None:
        self.proof_requests += 1


class WakeUps:
    """A shard that wakes no loop."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.notes: list[WorkNote] = []

    def committed(self) -> None: ...

    def unblocked(self) -> None:
        self.sent.append("unblocked")

    def moved(self) -> None:
        self.sent.append("moved")

    def send_note(self, note: WorkNote) -> None:
        self.notes.append(note)


class Invoker:
    """Call handlers with their run, and treat every error as a failure that is due in an hour."""

    def redact(self, text: str) -> str:
        return text

    async def call(self, run: Run, task: asyncio.Task[None], is_plain: bool = False) -> Outcome | None:
        try:
            await cast(Any, run.queue.function)(run)
        except BaseException as error:
            if run.interrupted or run.abandoned:
                return None
            if run.cancelled_at is not None:
                task.uncancel()
            return self.classifier(run, error)
        return success(run.notification, run.lease)

    def classifier(self, run: Run, error: BaseException, described: Any = None) -> Outcome:
        row = run.notification
        due = NOON + timedelta(hours=1)
        return Outcome(row.id, run.lease, State.FAILED, row.attempts + 1, due, f'"{type(error).__name__}"')

    def stuck_error(self, run: Run, stack: str) -> TimeoutError:
        return TimeoutError(stack)


class FailureClassifier:
    def __init__(self, invoker: Invoker) -> None:
        self._invoker = invoker

    def __call__(self, run: Run, error: BaseException, described: Any = None) -> Outcome:
        return self._invoker.classifier(run, error)

    def describe(self, error: BaseException) -> None:
        return None

    def expired(self, run: Run) -> Outcome:
        return expired(run.notification, run.lease)


def queue_of(
    name: str = "h",
    function: Callable[[Any], Awaitable[None]] | None = None,
    *,
    settings: Settings | None = None,
    handlers: int = 1,
    strict: frozenset[str] = frozenset(),
    **options: Any,
) -> HandlerQueue:
    """Create the queue of a handler; ``handlers``: the total number of handlers."""

    async def nothing(envelope: Any) -> None: ...

    handler = make_handler(
        function or nothing, name=name, event_types=(Opened,), aliases=(), topic=None, where="here", **options
    )
    HandlerRegistry(EventTypes()).add(handler)
    return HandlerQueue(HandlerSpec.of(handler, settings or Settings(), handlers, None, strict))


def row_of(
    number: int, name: str = "h", *, state: str = State.PENDING, flaw: str | None = None, partition: int = 0
) -> Notification:
    """A due row of an event of noon, under the ordering key ``a``."""
    micros, identity, date = as_micros(NOON), UUID(int=number), NOON.isoformat()
    context = msgspec.json.encode(
        [identity, identity, "Open", {}, date, date, None, None, date, None, None, None, 0, "a", date]
    )
    return Notification(identity, name, "Opened", "{}", state, 0, micros, micros, number, partition, context, flaw)


class Parts:
    """All parts of a dispatcher below the finder, wired as in the dispatcher."""

    def __init__(self, *queues: HandlerQueue, settings: Settings | None = None, transactions: int = 4) -> None:
        self.settings = settings or Settings()
        self.database, self.locks, self.signals = Database(), Locks(), Signals()
        self.database.handler_transactions = transactions
        self.table = self.database.notifications
        context: Any = type("Context", (), {"namespace": "app", "redact": str})()
        self.now = NOON
        self.setup = HandlingSetup(
            cast(Any, self.database), cast(Any, None), ShardClock(lambda: self.now), self.settings, context
        )
        self.state = DispatchState(self.signals, self.locks)
        self.cursors, self.keys = Cursors(), KeyQueues()
        self.in_flight = InFlight(self.cursors, self.keys, self.state.finding, has_halted=self.signals.locks.set)
        self.returned: list[bool] = []
        self.stuck = StuckRows(lambda: self.returned.append(True))
        self.guard = PoisonGuard(
            "app", cast(Any, None), lambda: self.now, 3, in_flight=self.in_flight.rows, abandoned=self.stuck.ids,
            signals=self.signals,
        )  # fmt: skip
        invoker: Any = Invoker()
        invoker.classifier = FailureClassifier(Invoker())
        self.partitions, self.wakeups = Partitions(lambda: self.now), WakeUps()
        self.core = Core.of(
            Shared(
                self.setup, self.state, queues, self.in_flight, self.partitions, self.guard, invoker, self.wakeups,
                self.stuck,
            )
        )  # fmt: skip
        self.scheduler, self.settler = self.core.scheduler, self.core.settler
        self.watchdog, self.circuits, self.limits = (
            Watchdog(self.core),
            CircuitBreakers(self.core),
            TotalLimits(self.core),
        )
        self.intake = Intake(self.core)
        self.workers = WorkerPool(self.core, self.intake, self.watchdog, self.circuits)
        self.leases = {queue.handler.name: self.hold(queue) for queue in queues}

    def hold(self, queue: HandlerQueue, partition: int = 0) -> Lease:
        """Hold the lock of a partition of a handler's name."""
        name = queue.handler.name
        lease = Lease(f"app/dispatch/{name}/{partition}", name, 1, partition=partition)
        cursor = self.cursors.take(Slot(name, partition), queue, lease)
        cursor.is_paused = False
        return cursor.lease

    def cursor(self, name: str = "h", partition: int = 0) -> HandlerCursor:
        return self.cursors.by_slot[name, partition]

    def in_flight_run(self, number: int, name: str = "h", partition: int = 0) -> Run:
        """A row in flight whose run has not been queued yet."""
        cursor = self.cursor(name, partition)
        run = Run(row_of(number, name, partition=partition), cursor.queue, cursor.lease)
        self.in_flight.add([run], cursor)
        return run

    def outcome(self, run: Run, state: State = State.SUCCEEDED, error: str | None = None) -> Outcome:
        due = NOON + timedelta(hours=1) if state in (State.FAILED, DYING) else None
        return Outcome(run.notification.id, run.lease, state, 1, due, error)

    def take(self, *rows: Notification) -> int:
        """Take found rows and start workers."""
        taken, _ = self.intake.take_in(rows, set())
        self.workers.start()
        self.scheduler.call()
        return taken

    async def quiet(self) -> list[tuple[str, list[int]]]:
        """Wait until nothing is ready or running, settle, and return the buckets."""
        async with asyncio.timeout(10):
            await self.state.quiet.wait()
            await self.settler.settle_once()
        return sorted(self.table.settled)

    async def close(self) -> None:
        self.state.is_stopping = True
        self.workers.stop()
        tasks = self.state.workers.keys() | self.state.hook_tasks.keys()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        for part in (self.settler, self.watchdog, self.intake):
            part.stop_timer()
        self.state.find_alarm.cancel()


class Whole:
    """A whole dispatcher, which holds the locks of some slots, with the signals of a shard."""

    def __init__(
        self, *slots: Slot, call: Callable[[Any], Awaitable[None]] | None = None, settings: Settings | None = None,
        partitions_on: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        """``call``: the handler ``h``, with ``options``. ``partitions_on``: the repository of partitions."""

        async def nothing(envelope: Any) -> None: ...

        self.database, self.locks, self.signals, self.now = Database(), Locks(), Signals(), NOON
        self.database.partitions, self.wakeups = partitions_on, WakeUps()
        self.table = self.database.notifications
        registry = HandlerRegistry(EventTypes())
        aliases = options.pop("aliases", ())
        registry.add(
            make_handler(
                call or nothing, name="h", event_types=(Opened,), aliases=aliases, topic=None, where="here", **options
            )
        )
        unused: Any = None
        context = HandlerContext(
            namespace="app", shard="default", resources=None, stopping=asyncio.Event(), emitter=unused, execute=unused,
            join=unused, outbox=None,
        )  # fmt: skip
        clock = ShardClock(lambda: self.now)
        setup = HandlingSetup(cast(Any, self.database), registry, clock, settings or Settings(), context)
        self.dispatcher = Dispatcher(
            setup, signals=self.signals, locks=self.locks, wakeups=self.wakeups, stuck=StuckRows(lambda: None)
        )
        self.dispatcher.apply_pauses(())
        for slot in slots:
            self.take(slot)

    def take(self, slot: Slot, term: int = 1) -> Lease:
        lease = Lease(f"app/dispatch/{slot.handler_name}/{slot.partition}", slot.handler_name, term)
        lease.partition = slot.partition
        self.dispatcher.take(slot, lease)
        return lease

    def partitions(self, number: int, active: int = 0, name: str = "h", changed: datetime = LONG_AGO) -> None:
        """Tell the dispatcher the number of partitions of a handler name."""
        self.dispatcher.apply_partition_counts({name: PartitionCount(name, number, max(active, number), changed)})

    async def was_notified(self) -> bool:
        """True if the lock manager was notified since the last call that a slot may be released."""
        return await self.signals.locks.wait(0)

    @property
    def queue(self) -> HandlerQueue:
        [queue] = self.dispatcher._queues.values()
        return queue

    @property
    def requested_partitions(self) -> list[list[int]]:
        """The partitions that each read requested."""
        return [[query.partition for query in queries] for queries in self.table.queries]

    async def __aenter__(self) -> Whole:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.dispatcher.stop(0)


class Gate:
    """A handler whose runs last until the gate is opened."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.started: list[int] = []

    async def __call__(self, envelope: Any) -> None:
        self.started.append(envelope.event_id.int)
        await self.is_open.wait()

    async def has_started(self, number: int) -> None:
        """Wait for this many runs."""
        await eventually(lambda: len(self.started) >= number)
