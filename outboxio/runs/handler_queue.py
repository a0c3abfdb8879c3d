"""Handler queues: the rows of a handler that are ready or run in this process.

Handler specs: the numbers by which a handler is run, computed once from options and settings.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from msgspec import Struct

from outboxio.handlers.handler import Handler
from outboxio.handlers.options import Batch, DeadHook, Delivery, OnDeadKey, moments_of
from outboxio.model.notification import Notification
from outboxio.model.payloads.classes import Decoder
from outboxio.model.retry import RetryPolicy
from outboxio.runs.run import BatchRun, HookRun, Run
from outboxio.runs.transaction_shares import Claim
from outboxio.settings import Settings
from outboxio.statistics.handlers import HandlerStatistics

QUICK, SLOW = 0.25, 2.0  # seconds between two full reads that double, or halve, the window of a handler


class HookLane:
    """The hook runs of a handler that are ready or run."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ready: deque[HookRun] = deque()
        self.running: dict[Run, None] = {}
        self.is_listed = False
        """True while the lane stands in the turns of all lanes."""
        self.claim: Claim | None = None
        """The lane's share of the transactions."""


class ReadAhead:
    """How many rows of a handler may be ready: many of a quick handler, few of a slow handler."""

    __slots__ = ("_read_at", "_spec", "may_have_more", "was_full", "window")

    def __init__(self, spec: HandlerSpec) -> None:
        self._spec = spec
        self._read_at = 0.0
        self.window = spec.first_window
        """Rows that may be ready, at most."""
        self.was_full = False
        """True if the last read, or the last handoff, found as many rows as it had asked for."""
        self.may_have_more = True
        """True if there may be due rows that were not read because the queue was full."""

    def adapt(self, now: float) -> None:
        """Double the window if a full read follows within 0.25 s, halve the window if a full read follows after 2 s."""
        since, self._read_at = now - self._read_at, now
        if not self.was_full or self._spec.batch:
            return
        if since < QUICK:
            self.window = min(self._spec.largest_window, self.window * 2)
        elif since > SLOW:
            self.window = min(self._spec.largest_window, max(self._spec.limit, self.window // 2))


class Rest:
    """The state of a handler that rests, because a service that the handler needs is away."""

    __slots__ = ("is_probing", "older", "reason", "since", "step", "until")

    def __init__(self, reason: str, since: float) -> None:
        self.reason = reason
        self.since = since
        """When the first run found the service away, by the event loop's clock."""
        self.until = since
        """When a run may try the service again."""
        self.step = 0.1
        """The seconds of this rest, if the error names no time."""
        self.is_probing = False
        """True if a single run may start, which tries the service."""
        self.older: set[Run] = set()
        """The runs that began before this rest: their ends say nothing about the service."""

    @property
    def most(self) -> int:
        """Runs at the same time, at most."""
        return len(self.older) + 1 if self.is_probing else 0


class Quota:
    """How many runs of a handler may go on at the same time."""

    __slots__ = ("allowed", "gate", "gives_back_at", "rest")

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        """Fewer than the spec says if this process has few of the cluster's runs."""
        self.gives_back_at = -1
        """With so many runs a halted slot can be given back (``dispatch/limits.py``)."""
        self.gate: Gate | None = None
        """The rate, if the handler has one (``dispatch/rates.py``)."""
        self.rest: Rest | None = None
        """Set while the handler rests (``dispatch/rests.py``)."""


class Gate(Protocol):
    """The rate of a handler, as the queue sees the rate (``dispatch/rates.py``)."""

    is_closed: bool
    """True while no run may start because of the rate."""

    @property
    def holds_back(self) -> bool:
        """True if ready rows wait for the rate, now or within the last second."""
        ...

    def may_start(self) -> bool:
        """True if a ready run may start now. Otherwise the gate closes, and opens by itself."""
        ...

    def take(self) -> Run:
        """Take the ready run for which :meth:`may_start` was true."""
        ...

    def begin_anew(self) -> None:
        """A slot was taken, or the number of partitions was changed."""
        ...


class HandlerQueue:
    """The state of a handler in this process."""

    def __init__(self, spec: HandlerSpec, statistics: HandlerStatistics | None = None) -> None:
        self.spec = spec
        self.statistics = statistics or HandlerStatistics()
        self.handler = spec.handler
        self.limit = spec.limit
        """Runs at the same time, at most: the quota, or fewer while the handler rests or the rate holds rows back."""
        self.quota = Quota(spec.limit)
        self.function = spec.handler.function
        self.retention_renewed = 0
        """When the handler's last pause ended, in us since 1970: the retention of rows that waited begins there."""
        self.beginning: datetime | None = None
        """The handler does not want events from before this moment."""
        self.claim: Claim | None = None
        """The share of the transactions, if the handler is transactional."""
        self.hook_lane = HookLane(spec.limit)
        self.decoders: dict[str, Decoder] = {}
        self.ahead = ReadAhead(spec)
        self.ready: deque[Run] = deque()
        self.batch_buffer: list[Run] = []
        """Rows that wait until the batch is full."""
        self.gather_timer: asyncio.TimerHandle | None = None
        self.running: dict[Run, None] = {}
        """The runs, in the order in which their handlers' time began, which is the order of their deadlines."""
        self.is_listed = False
        """True while the queue stands in the turns of all queues."""
        self.listed_at = 0.0
        self.watch(is_watched=False)

    def watch(self, *, is_watched: bool) -> None:
        """Record the starts of rows before the handler is called, or stop doing so (``runs/poison.py``)."""
        self.is_watched = is_watched
        self.is_plain = self.spec.delivery is Delivery.AT_LEAST_ONCE and self.spec.batch is None and not is_watched

    @property
    def takes_ordinary(self) -> bool:
        """True if an ordinary row is ready as soon as the row is found."""
        spec = self.spec
        return not (spec.batch or spec.needs_admission or self.beginning or self.retention_renewed)

    def allow(self, number: int) -> None:
        """Let so many runs go on at the same time, or fewer while the handler rests or the rate holds rows back."""
        self.quota.allowed, rest = number, self.quota.rest
        self.limit = number if rest is None else min(number, rest.most)
        if self.quota.gate is not None and self.quota.gate.is_closed:
            self.limit = 0

    @property
    def is_rate_limited(self) -> bool:
        """True if the rate holds ready rows back: these rows do not wait for want of processes."""
        gate = self.quota.gate
        return gate is not None and gate.holds_back

    def starts_now(self, run: Run, now: float) -> None:
        """The handler's time begins now: the run had to wait for a connection, or is the next part of a call."""
        run.started = now
        running = self.hook_lane.running if isinstance(run, HookRun) else self.running
        del running[run]
        running[run] = None

    @property
    def wants_more(self) -> bool:
        """True if at most half of the window is ready, few verdicts wait for hooks, and the handler does not rest."""
        rest = self.quota.rest
        if rest is not None and not rest.is_probing:
            return False
        read_ahead = len(self.ready) * self.spec.per_call + len(self.batch_buffer)
        return read_ahead <= self.ahead.window // 2 and len(self.hook_lane.ready) <= HOOKS_AHEAD

    @property
    def may_be_handed(self) -> bool:
        """True if the handler takes new rows from fan-out without a read."""
        return self.is_plain and not self.spec.needs_admission and self.wants_more

    @property
    def room(self) -> int:
        """How many more rows may become ready."""
        return self.ahead.window - len(self.ready)

    def take_batch(self) -> BatchRun:
        """A call for the rows that have gathered."""
        size = self.spec.per_call
        rows, self.batch_buffer = self.batch_buffer[:size], self.batch_buffer[size:]
        return BatchRun.of(rows)


MOST_READY = 10_000  # rows that all handlers of a shard have ready
FIRST_WINDOW = 128  # rows that a handler may have ready before the handler's speed is known
LONGEST_GRACE = 5.0  # seconds between a handler's cancellation and the moment at which the run is stuck
HOOKS_AHEAD = 500  # verdicts that may wait for hooks while more rows of the handler are read


class HandlerSpec(Struct, frozen=True, eq=False):
    """How a handler is run. A spec never changes; the state of the handler is in the ``HandlerQueue``."""

    handler: Handler
    names: Sequence[str]
    """All stored names of the handler: its name and its aliases."""
    delivery: Delivery
    batch: Batch | None
    priority: int
    strict_types: frozenset[str]
    """Event types of which a row waits until the handlers of lower priority numbers have tried the event."""
    next_moment: Callable[[datetime], datetime] | None
    """The first moment of a batch schedule after a moment; ``None`` without a schedule."""
    needs_admission: bool
    """True if due rows may have to wait: for their ordering key, for other handlers, or for a moment."""
    needs_transaction: bool
    follows: bool
    """True if a call may have several rows of an ordering key: the first rows of the key, in order."""
    parks: bool
    """True if a dead row parks its ordering key."""
    limit: int
    """Runs at the same time in this process, at most."""
    total: int | None
    """Runs at the same time in all processes together, at most; ``None`` without such a limit."""
    share: int
    """Runs at the same time for which workers are reserved."""
    policy: RetryPolicy
    retention: timedelta
    retention_us: int
    cap: timedelta
    """The longest pause that the backoff may make."""
    timeout: float
    """Seconds that one run may take."""
    grace: float
    """Seconds from the cancellation of a run to the moment at which the run is stuck."""
    hooks: tuple[DeadHook, ...]
    per_call: int
    """Rows of one call, at most."""
    largest_window: int
    """Rows that may be ready, at most."""
    first_window: int
    most_in_flight: int
    """Rows that are in flight at the same time, at most: read ahead, running, and waiting to be settled."""

    @classmethod
    def of(
        cls,
        handler: Handler,
        settings: Settings,
        handlers: int,
        on_dead: DeadHook | None,
        strict_types: frozenset[str] = frozenset(),
    ) -> HandlerSpec:
        """The spec of a handler among so many ``handlers`` of a shard."""
        options, batch = handler.options, handler.options.batch
        wanted = options.concurrency or (1 if batch else settings.concurrency)
        limit = min(wanted, settings.concurrency)
        if batch:
            largest = first = batch.size * (limit + 1)
        else:
            largest = max(limit, min(settings.handling_batch_size, MOST_READY // handlers))
            first = min(largest, max(limit, FIRST_WINDOW))
        next_moment = moments_of(batch.schedule) if batch and batch.schedule else None
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
            next_moment=next_moment,
            needs_admission=bool(options.ordered or options.relay or next_moment or strict_types),
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
        """True if a row has outlived the retention before the first call of the handler; ``now`` in us since 1970."""
        return now > notification.retention_us + self.retention_us


_MICROSECOND = timedelta(microseconds=1)
