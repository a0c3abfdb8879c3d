"""What the dispatcher has in memory of each handler: what is ready, what runs, and how far its rows were read.

A queue belongs to a handler, a source to one name under which its rows are stored: its own, or an alias. A run is one
call of a handler, for one row or for a batch of rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta

from msgspec import Struct

from outboxio.batch import moments_of
from outboxio.event import Event
from outboxio.handler import Handler
from outboxio.notification import BEGINNING, Notification, Position, Wanted
from outboxio.options import DeadHook, Delivery, OnDeadKey
from outboxio.outcome import Lease, Verdict
from outboxio.settings import Settings
from outboxio.storage.protocols import Session
from outboxio.trail import FEW, SWEEP_IN_BACKLOG, SWEEP_NEARBY, Trail

SWEEP_IN_FLIGHT = 0.2  # seconds between sweeps while so much is in flight that reading it again costs something
SHORTEST_GATHERING = 0.05  # seconds that a batch which is not full waits at least, if it waits
FEW_IN_FLIGHT = 100
MOST_READY = 10_000  # rows that all handlers together have ready at most
FIRST_WINDOW = 128  # rows that a handler has ready at most, to begin with
QUICK, SLOW = 0.25, 2.0  # seconds between two reads that double, or halve, that number
LONGEST_GRACE = 5.0  # seconds between a handler's cancellation and calling it stuck
LONGEST_TURN = 0.2  # seconds that a queue waits for a slot before it goes ahead of those of higher priority


class Run(Struct, eq=False, gc=False):
    """One notification on its way through one handler."""

    notification: Notification
    queue: HandlerQueue
    lease: Lease
    key: str | None = None
    """Its ordering key, if its handler is ordered."""
    started: float = 0.0
    cancelled_at: float | None = None
    interrupted: bool = False
    abandoned: bool = False
    is_clean: bool = True
    """Whether the handler left no context variables behind that the next event would find."""
    has_begun: bool = False
    """Whether a handler that may run only once was called."""
    is_settled: bool = False
    """Whether its outcome is committed already, together with what the handler wrote."""
    session: Session | None = None
    """The transaction that it works in, if it needs one."""
    verdict: Verdict | None = None
    """What was decided about it, if its hook is owed."""
    task: asyncio.Task[None] | None = None

    @property
    def undone(self) -> Iterable[Run]:
        """The rows that it still has to account for."""
        return (self,)


class BatchRun(Run, eq=False, kw_only=True, gc=False):
    """One call of a handler for many notifications, and the smaller calls that it is split into if it fails."""

    remaining: dict[Run, None]
    parts: list[list[Run]]
    """What is still to be called, the next one last."""

    @classmethod
    def of(cls, rows: list[Run]) -> BatchRun:
        first = rows[0]
        return cls(first.notification, first.queue, first.lease, remaining=dict.fromkeys(rows), parts=[rows])

    @property
    def undone(self) -> Iterable[Run]:
        return tuple(self.remaining)


class HandlerQueue:
    """What one handler has ready and running."""

    def __init__(
        self,
        handler: Handler,
        settings: Settings,
        handlers: int,
        on_dead: DeadHook | None,
        strict_types: frozenset[str] = frozenset(),
    ) -> None:
        options = handler.options
        self.handler = handler
        self.function = handler.function
        self.delivery = options.delivery
        self.batch = options.batch
        self.priority = options.priority
        self.strict_types = strict_types
        self.next_moment = None if self.batch is None or not self.batch.schedule else moments_of(self.batch.schedule)
        self.parks = options.on_dead_key is OnDeadKey.PARK
        self.is_choosy = bool(options.ordered or options.relay or self.next_moment or strict_types)
        """Whether rows that are due may have to wait all the same."""
        wanted = options.concurrency or (1 if self.batch else settings.concurrency)
        self.limit = min(wanted, settings.concurrency)
        self.share = min(self.limit, max(1, settings.concurrency // (2 * handlers)))
        self.policy = options.retry
        self.retention = self.policy.retention or settings.handling_retention_window
        self.retention_us = self.retention // timedelta(microseconds=1)
        self.retention_renewed = 0
        """When the handler's last pause ended, in us since 1970: what waited then has its retention from the start."""
        self.cap = settings.handling_max_backoff_cap
        self.timeout = (options.timeout or settings.handler_timeout).total_seconds()
        self.grace = min(LONGEST_GRACE, max(0.1, self.timeout))
        self.hooks = [hook for hook in (options.on_dead, on_dead) if hook is not None]
        self.needs_transaction = self.delivery is Delivery.TRANSACTIONAL
        self.watch(is_watched=False)
        self.decoders: dict[str, Callable[[str], Event]] = {}
        self.ready: deque[Run] = deque()
        self.gathering: list[Run] = []
        """Rows that wait for others to fill a batch."""
        self.gather_timer: asyncio.TimerHandle | None = None
        self.running: dict[Run, None] = {}  # in the order in which they started, so in that of their deadlines
        self.is_listed = False
        self.listed_at = 0.0
        per_call = self.batch.size if self.batch else 1
        self._largest_window = max(self.limit, min(settings.handling_batch_size, MOST_READY // handlers))
        if self.batch:
            self._largest_window = per_call * (self.limit + 1)
        self.window = self._largest_window if self.batch else min(self._largest_window, max(self.limit, FIRST_WINDOW))
        self._per_call = per_call
        self.most_in_flight = 2 * (self._largest_window + self.limit) + 4 * settings.outcome_batch
        self.most_in_flight += settings.handling_batch_size
        """Rows that can be in flight at once, at most: read ahead, running, and waiting to be settled."""
        self.read_at = 0.0
        self.was_full = False
        self.may_have_more = True
        """Whether there may be due rows that were not read, for want of room."""

    def watch(self, *, is_watched: bool) -> None:
        """Have the starts of its rows recorded before they are made, or no longer (``crashes.py``)."""
        self.is_watched = is_watched
        self.is_plain = self.delivery is Delivery.AT_LEAST_ONCE and self.batch is None and not is_watched

    def starts_now(self, run: Run, now: float) -> None:
        """A run's time begins only now: it had to wait for a connection, or is the next part of a call."""
        run.started = now
        del self.running[run]
        self.running[run] = None

    def is_too_old(self, notification: Notification, now: int) -> bool:
        """Whether a row has outlived its retention before its handler was called; ``now`` in us since 1970."""
        return now > notification.retention_us + self.retention_us

    @property
    def wants_more(self) -> bool:
        return len(self.ready) * self._per_call + len(self.gathering) <= self.window // 2

    @property
    def room(self) -> int:
        """How many rows may be ready besides."""
        return self.window - len(self.ready)

    def adapt_window(self, now: float) -> None:
        """Read far ahead for a handler that is quick, and hardly at all for one that is slow."""
        since, self.read_at = now - self.read_at, now
        if not self.was_full or self.batch:
            return
        if since < QUICK:
            self.window = min(self._largest_window, self.window * 2)
        elif since > SLOW:
            self.window = min(self._largest_window, max(self.limit, self.window // 2))

    def take_batch(self) -> BatchRun:
        """A call for what has gathered."""
        rows, self.gathering = self.gathering[: self._per_call], self.gathering[self._per_call :]
        return BatchRun.of(rows)


class Source:
    """One stored handler name, a handler's own or an alias, whose lock this process holds."""

    def __init__(self, name: str, queue: HandlerQueue, lease: Lease) -> None:
        self.name = name
        self.queue = queue
        self.lease = lease
        self.position: Position = BEGINNING
        self.in_flight = 0
        self.found = 0
        """How many rows were found in all."""
        self.has_backlog = False
        self.reads_again = False
        """Whether what is in flight is read once more, for what may lie between."""
        self.sweeps = False
        """Whether all is, from the beginning."""
        self.is_paused = True  # until it is known that it is not
        self._trail = Trail(SWEEP_NEARBY, BEGINNING)
        self._read_again_at = self._swept_at = float("-inf")
        self._found_by_then = 0
        self._is_busy = False

    def next_read(self, room: int, now: float) -> Wanted:
        """What to ask for: on from the position; or from a little behind it; or from the beginning, for a sweep."""
        self._trail.goes_on(now, self.position)
        pause = SWEEP_IN_BACKLOG if self.has_backlog else SWEEP_IN_FLIGHT
        few = self.in_flight <= FEW_IN_FLIGHT and not self.has_backlog
        self.reads_again = few or now - self._read_again_at >= pause
        self.sweeps = self.reads_again and self._may_sweep(now)
        if not self.reads_again:
            return Wanted(self.name, room, self.position)
        self._read_again_at = now
        return Wanted(self.name, room + self.in_flight, BEGINNING if self.sweeps else self._nearby)

    def _may_sweep(self, now: float) -> bool:
        """Under load only twice a second: a row that was settled stays in the index until the database cleans up."""
        since = now - self._swept_at
        if self._is_busy and since < SWEEP_IN_BACKLOG:
            return False
        if since >= SWEEP_IN_BACKLOG:
            self._is_busy = self.found - self._found_by_then >= FEW
            self._found_by_then, self._swept_at = self.found, now
        return True

    @property
    def _nearby(self) -> Position:
        return min(self._trail.before, self.position)

    @property
    def may_be_handed(self) -> bool:
        """Whether it would change nothing if its new rows were not found, but handed over."""
        queue = self.queue
        keeps_up = queue.wants_more and not self.has_backlog and self._swept_at > float("-inf")
        return keeps_up and queue.is_plain and not (queue.is_choosy or self.is_paused)

    def sweep_soon(self) -> None:
        """Rows became due behind the position: the next read begins at the beginning."""
        self._read_again_at = self._swept_at = float("-inf")

    def start_over(self) -> None:
        """What was read has been given back."""
        self.has_backlog, self.position = False, BEGINNING


class Turns:
    """Queues that have something to start, each in turn; those of a lower priority number before the others.

    A queue that has waited for a while goes first all the same, so nobody starves.
    """

    def __init__(self) -> None:
        self._levels: dict[int, deque[HandlerQueue]] = {}

    def __bool__(self) -> bool:
        return any(self._levels.values())

    def append(self, queue: HandlerQueue) -> None:
        queue.listed_at = asyncio.get_running_loop().time()
        level = self._levels.get(queue.priority)
        if level is None:
            level = self._levels[queue.priority] = deque()
            self._levels = dict(sorted(self._levels.items()))
        level.append(queue)

    def popleft(self) -> HandlerQueue:
        levels = [level for level in self._levels.values() if level]
        longest = min(levels, key=lambda level: level[0].listed_at)
        if asyncio.get_running_loop().time() - longest[0].listed_at > LONGEST_TURN:
            return longest.popleft()
        return levels[0].popleft()
