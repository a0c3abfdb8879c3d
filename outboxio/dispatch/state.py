"""The state of a dispatcher: counts, queues, rows in flight, and the values of the shard that handling needs."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence

from msgspec import Struct

from outboxio.dispatch.in_flight import InFlight
from outboxio.loops.loop import Signals
from outboxio.model.envelope import begin_inside
from outboxio.runs.cursor import Cursors, Partitions
from outboxio.runs.handler_queue import HandlerQueue, HandlerSpec
from outboxio.runs.invoker import HandlerInvoker, handler_invoker
from outboxio.runs.key_queues import KeyQueues
from outboxio.runs.poison import PoisonGuard
from outboxio.runs.ports import HandlingSetup, LockTrust, StuckRows, WakeUps
from outboxio.statistics.figures import Counters
from outboxio.support.aio import Alarm
from outboxio.telemetry.protocol import HandlingTelemetry


class DispatchState:
    """Counts of ready and running rows, and the permission to start runs.

    A run may start while the dispatcher is not stopping and the cluster locks are proven. The lock manager sets until
    when they are proven (:attr:`proven_until`, event loop time).
    """

    def __init__(self, signals: Signals, locks: LockTrust, telemetry: HandlingTelemetry | None = None) -> None:
        self.signals = signals
        self.locks = locks
        self.counters = Counters()
        self.ready = 0
        """Runs and hook runs that are ready; a batch counts as one run."""
        self.running = 0
        self.hooks = 0
        """Active hook runs."""
        self.ended = 0
        """How many runs and hook runs have ended, without those abandoned as stuck."""
        self.workers: dict[asyncio.Task[None], None] = {}
        """The tasks of the workers, without those of stuck runs."""
        self.hook_tasks: dict[asyncio.Task[None], None] = {}
        self.finding = asyncio.Lock()
        """Held during a find round."""
        self.quiet = asyncio.Event()
        """Set while no run is ready or active."""
        self.quiet.set()
        self.find_alarm = Alarm(signals.find.set)
        """Starts a find round at a later time."""
        self.is_stopping = False
        self.proven_until = float("inf")
        self.handlers_context = contextvars.copy_context()
        """The initial context of each task that calls handlers."""
        self.handlers_context.run(begin_inside)
        if telemetry is not None:
            self.handlers_context.run(telemetry.begin)

    def may_start(self, now: float) -> bool:
        """Return True if runs may start."""
        return not self.is_stopping and self.is_proven(now)

    def is_proven(self, now: float) -> bool:
        """Return True if the locks are proven, possibly by a thread while the event loop was blocked."""
        if now > self.proven_until:
            self.locks.look_for_proof()
        return now <= self.proven_until

    @property
    def is_busy(self) -> bool:
        """True if a run is ready or active."""
        return bool(self.running or self.ready or self.hooks)

    @property
    def nothing_follows(self) -> bool:
        """True if no more outcomes are expected soon."""
        return not (self.running or self.ready or self.hooks or self.finding.locked())

    def set_if_quiet(self) -> None:
        if not self.is_busy:
            self.quiet.set()


class Shared(Struct, frozen=True):
    """The values that exist before any part of a dispatcher."""

    setup: HandlingSetup
    state: DispatchState
    queues: Sequence[HandlerQueue]
    in_flight: InFlight
    partitions: Partitions
    guard: PoisonGuard
    invoker: HandlerInvoker
    wakeups: WakeUps
    stuck: StuckRows

    def unblocked(self) -> None:
        """Wake other processes after rows were unblocked. After a recent partition change they may hold these rows."""
        wake = self.wakeups.moved if self.partitions.unsettled() else self.wakeups.unblocked
        wake()


def shared_of(
    setup: HandlingSetup, *, signals: Signals, locks: LockTrust, wakeups: WakeUps, stuck: StuckRows
) -> Shared:
    """Create the values of a new dispatcher. ``stuck``: the rows of stuck runs, including earlier shard runs."""
    state = DispatchState(signals, locks, setup.context.telemetry)
    in_flight = InFlight(Cursors(), KeyQueues(), state.finding, has_halted=signals.locks.set)
    guard = PoisonGuard(
        setup.namespace, setup.database.starts, setup.clock, setup.settings.max_crashes,
        in_flight=in_flight.rows, abandoned=stuck.ids, signals=signals,
    )  # fmt: skip
    invoker = handler_invoker(setup)(setup, state.counters, emitted=wakeups.committed, crashes=guard)
    return Shared(setup, state, _queues_of(setup), in_flight, Partitions(setup.clock), guard, invoker, wakeups, stuck)


def _queues_of(setup: HandlingSetup) -> list[HandlerQueue]:
    """Create the queue of each handler of a shard."""
    handlers = setup.handlers
    strict, number = handlers.strict_types(), len(handlers)
    queues = list[HandlerQueue]()
    for handler in handlers:
        spec = HandlerSpec.of(handler, setup.settings, number, setup.on_dead, strict)
        queue = HandlerQueue(spec, setup.statistics.of(handler.name))
        queue.statistics.follow(queue)
        queues.append(queue)
    return queues
