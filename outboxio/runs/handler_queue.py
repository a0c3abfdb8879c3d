"""Handler queues: the rows of a handler that are ready or running in this process.

Handler specs: how a handler is run, computed once from options and settings.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from msgspec import Struct

from outboxio.handlers.handler import Handler
from outboxio.handlers.options import Batch, DeadHook, Delivery, OnDeadKey, next_time_of
from outboxio.model.notification import Notification
from outboxio.model.payloads.classes import Decoder
from outboxio.model.retry import RetryPolicy
from outboxio.runs.run import BatchRun, HookRun, Run
from outboxio.runs.transaction_shares import TransactionShare
from outboxio.settings import Settings
from outboxio.statistics.handlers import HandlerStatistics

QUICK, SLOW = (
    0.25,
    2.0,
)  # seconds between two full reads below or above which the window of a handler is doubled or halved


class HookLane:
    """The ready and running hook runs of a handler."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ready: deque[HookRun] = deque()
        self.running: dict[Run, None] = {}
        self.is_listed = False
        """True while the lane waits for its turn."""
        self.claim: TransactionShare | None = None
        """The lane's share of the transactions."""


class ReadAhead:
    """How many rows of a handler may be ready: many for a fast handler, few for a slow one."""

    __slots__ = ("_read_at", "_spec", "may_have_more", "was_full", "window")

    def __init__(self, spec: HandlerSpec) -> None:
        self._spec = spec
        self._read_at = 0.0
        self.window = spec.first_window
        """The maximum number of ready rows."""
        self.was_full = False
        """True if the last read, or the last handoff, returned as many rows as requested."""
        self.may_have_more = True
        """True if due rows may remain unread because the queue was full."""

    def adapt(self, now: float) -> None:
        """Double the window if full reads follow within 0.25 s; halve it if they are more than 2 s apart."""
        since, self._read_at = now - self._read_at, now
        if not self.was_full or self._spec.batch:
            return
        if since < QUICK:
            self.window = min(self._spec.largest_window, self.window * 2)
        elif since > SLOW:
            self.window = min(self._spec.largest_window, max(self._spec.limit, self.window // 2))


class OpenCircuit:
    """The open circuit of a handler that needs an unavailable service."""

    __slots__ = ("is_probing", "older", "reason", "since", "step", "until")

    def __init__(self, reason: str, since: float) -> None:
        self.reason = reason
        self.since = since
        """When the circuit opened (event loop time)."""
        self.until = since
        """When a run may probe the service."""
        self.step = 0.1
        """For how many seconds the circuit opens next if the error names no delay."""
        self.is_probing = False
        """True while the circuit is half-open: a single run may start as a probe."""
        self.older: set[Run] = set()
        """The runs that started before the circuit opened, whose outcomes say nothing about the service now."""

    @property
    def most(self) -> int:
        """The maximum number of concurrent runs."""
        return len(self.older) + 1 if self.is_probing else 0


class Quota:
    """The concurrency limit of a handler."""

    __slots__ = ("allowed", "circuit", "gate", "gives_back_at")

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        """Lower than the limit of the spec if this process has only a small share of a cluster-wide limit."""
        self.gives_back_at = -1
        """The number of runs at which a halted slot can be released (``dispatch/limits.py``)."""
        self.gate: Gate | None = None
        """The rate limit, if the handler has one (``dispatch/rates.py``)."""
        self.circuit: OpenCircuit | None = None
        """Set while the circuit is open (``dispatch/circuit_breakers.py``)."""


class Gate(Protocol):
    """The rate limit of a handler, as the queue uses it (``dispatch/rates.py``)."""

    is_closed: bool
    """True while the rate limit allows no run to start."""

    @property
    def holds_back(self) -> bool:
        """True if the rate limit has delayed ready rows, now or within the last second."""
        ...

    def may_start(self) -> bool:
        """Return True if a ready run may start now. Otherwise the gate closes, and opens again by itself."""
        ...

    def take(self) -> Run:
        """Take the ready run for which :meth:`may_start` was true."""
        ...

    def reset(self) -> None:
        """Called when a slot was acquired or the partition count has changed."""
        ...


class HandlerQueue:
    """The state of a handler in this process."""

    def __init__(self, spec: HandlerSpec, statistics: HandlerStatistics | None = None) -> None:
        self.spec = spec
        self.statistics = statistics or HandlerStatistics()
        self.handler = spec.handler
        self.limit = spec.limit
        """The concurrency limit: the quota, or less while the circuit is open or the rate limit holds rows back."""
        self.quota = Quota(spec.limit)
        self.function = spec.handler.function
        self.retention_renewed = 0
        """When the last pause ended, in us since 1970. The retention of rows that waited begins then."""
        self.start_date: datetime | None = None
        """The start date of the handler: earlier events are skipped."""
        self.claim: TransactionShare | None = None
        """The share of the transactions, if the handler is transactional."""
        self.hook_lane = HookLane(spec.limit)
        self.decoders: dict[str, Decoder] = {}
        self.ahead = ReadAhead(spec)
        self.ready: deque[Run] = deque()
        self.batch_buffer: list[Run] = []
        """Rows that wait until the batch is full."""
        self.gather_timer: asyncio.TimerHandle | None = None
        self.running: dict[Run, None] = {}
        """The runs in the order of their start times, which is the order of their deadlines."""
        self.is_listed = False
        """True while the queue waits for its turn."""
        self.listed_at = 0.0
        self.watch(is_watched=False)

    def watch(self, *, is_watched: bool) -> None:
        """Record the starts of rows before the handler is called, or stop doing so (``runs/poison.py``)."""
        self.is_watched = is_watched
        self.is_plain = self.spec.delivery is Delivery.AT_LEAST_ONCE and self.spec.batch is None and not is_watched

    @property
    def takes_ordinary(self) -> bool:
        """True if an ordinary row is ready as soon as it is found."""
        spec = self.spec
        return not (spec.batch or spec.needs_admission or self.start_date or self.retention_renewed)

    def allow(self, number: int) -> None:
        """Set the concurrency limit. The effective limit is lower while the circuit is open or the rate is exceeded."""
        self.quota.allowed, circuit = number, self.quota.circuit
        self.limit = number if circuit is None else min(number, circuit.most)
        if self.quota.gate is not None and self.quota.gate.is_closed:
            self.limit = 0

    @property
    def is_rate_limited(self) -> bool:
        """True if ready rows wait for the rate limit, and not for free capacity."""
        gate = self.quota.gate
        return gate is not None and gate.holds_back

    def starts_now(self, run: Run, now: float) -> None:
        """Restart the clock of the handler, after the wait for a connection or for the next part of a call."""
        run.started = now
        running = self.hook_lane.running if isinstance(run, HookRun) else self.running
        del running[run]
        running[run] = None

    @property
    def wants_more(self) -> bool:
        """True if at most half of the window is ready, few DYING rows wait for hooks, and the circuit is closed."""
        circuit = self.quota.circuit
        if circuit is not None and not circuit.is_probing:
            return False
        read_ahead = len(self.ready) * self.spec.per_call + len(self.batch_buffer)
        return read_ahead <= self.ahead.window // 2 and len(self.hook_lane.ready) <= HOOKS_AHEAD

    @property
    def may_be_handed(self) -> bool:
        """True if fan-out may hand fresh rows directly to the handler."""
        return self.is_plain and not self.spec.needs_admission and self.wants_more

    @property
    def capacity(self) -> int:
        """How many more rows may become ready."""
        return self.ahead.window - len(self.ready)

    def take_batch(self) -> BatchRun:
        """Take a call for the gathered rows."""
        size = self.spec.per_call
        rows, self.batch_buffer = self.batch_buffer[:size], self.batch_buffer[size:]
        return BatchRun.of(rows)


MOST_READY = 10_000  # ready rows of all handlers of a shard
FIRST_WINDOW = 128  # ready rows of a handler whose speed is not known yet
LONGEST_GRACE = 5.0  # seconds between the cancellation of a run and when it counts as stuck
HOOKS_AHEAD = 500  # DYING rows that may wait for hooks before the handler stops reading rows


class HandlerSpec(Struct, frozen=True, eq=False):
    """How a handler is run. A spec is immutable; the state of the handler is in its ``HandlerQueue``."""

    handler: Handler
    names: Sequence[str]
    """All stored names of the handler: its name and its aliases."""
    delivery: Delivery
    batch: Batch | None
    priority: int
    strict_types: frozenset[str]
    """Event types whose rows wait until the handlers with lower priority numbers have tried the event."""
    next_time: Callable[[datetime], datetime] | None
    """Returns the next scheduled time of a batch; ``None`` without a schedule."""
    needs_admission: bool
    """True if due rows may have to wait: for their ordering key, for other handlers, or for a scheduled time."""
    needs_transaction: bool
    follows: bool
    """True if a call may contain several rows of an ordering key, in order from the head."""
    parks: bool
    """True if a dead row parks its ordering key."""
    limit: int
    """The maximum number of concurrent runs in this process."""
    total: int | None
    """The maximum number of concurrent runs in all processes; ``None`` without such a limit."""
    share: int
    """The number of concurrent runs for which workers are reserved."""
    policy: RetryPolicy
    retention: timedelta
    retention_us: int
    cap: timedelta
    """The upper limit of the backoff."""
    timeout: float
    """The timeout of a run in seconds."""
    grace: float
    """Seconds between the cancellation of a run and when it counts as stuck."""
    hooks: tuple[DeadHook, ...]
    per_call: int
    """The maximum number of rows per call."""
    largest_window: int
    """The maximum number of ready rows."""
    first_window: int
    most_in_flight: int
    """The maximum number of rows in flight: ready, running, or waiting to be settled."""

    @classmethod
    def of(
        cls,
        handler: Handler,
        settings: Settings,
        handlers: int,
        on_dead: DeadHook | None,
        strict_types: frozenset[str] = frozenset(),
    ) -> HandlerSpec:
        """Create the spec of a handler. ``handlers``: how many handlers the shard has."""
        options, batch = handler.options, handler.options.batch
        requested = options.concurrency or (1 if batch else settings.concurrency)
        limit = min(requested, settings.concurrency)
        if batch:
            largest = first = batch.size * (limit + 1)
        else:
            largest = max(limit, min(settings.handling_batch_size, MOST_READY // handlers))
            first = min(largest, max(limit, FIRST_WINDOW))
        next_time = next_time_of(batch.schedule) if batch and batch.schedule else None
        retention = options.retry.retention or settings.handling_retention_window
        timeout = (options.timeout or settings.handler_timeout).total_seconds()
        most_in_flight = 2 * (largest + limit) + 4 * settings.outcome_batch + HOOKS_AHEAD
        return cls(
            handler=handler,
            names=sorted(handler.names),
            delivery=options.delivery,
            batch=batch,
            priority=options.priority,
            strict_types=strict_types,
            next_time=next_time,
            needs_admission=bool(options.ordered or options.relay or next_time or strict_types),
            needs_transaction=options.delivery is Delivery.TRANSACTIONAL,
            follows=options.ordered and batch is not None and options.delivery is Delivery.AT_LEAST_ONCE,
            parks=options.on_dead_key is OnDeadKey.PARK,
            limit=limit,
            total=options.total_concurrency,
            share=min(limit, max(1, settings.concurrency // (2 * handlers))),
            policy=options.retry,
            retention=retention,
            retention_us=retention // _MICROSECOND,
            cap=settings.handling_max_backoff_cap,
            timeout=timeout,
            grace=min(LONGEST_GRACE, max(0.1, timeout)),
            hooks=tuple(hook for hook in (options.on_dead, on_dead) if hook is not None),
            per_call=batch.size if batch else 1,
            largest_window=largest,
            first_window=first,
            most_in_flight=most_in_flight + 2 * settings.handling_batch_size,
        )

    def is_too_old(self, notification: Notification, now: int) -> bool:
        """Return True if the retention of a row is over. ``now``: in us since 1970."""
        return now > notification.retention_us + self.retention_us


_MICROSECOND = timedelta(microseconds=1)
