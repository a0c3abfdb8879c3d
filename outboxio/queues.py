"""What the dispatcher has in memory of each handler: what is ready, what runs, and how far its rows were read.

A queue belongs to a handler, a source to one name under which its rows are stored: its own, or an alias.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from outboxio.event import Event
from outboxio.handler import DeadHook, Delivery, Handler
from outboxio.notification import BEGINNING, Notification, Position, Wanted
from outboxio.outcome import Lease, Verdict
from outboxio.settings import Settings
from outboxio.storage.protocols import Session

SWEEP_IN_BACKLOG = 0.5  # seconds between sweeps while a backlog is read
SWEEP_IN_FLIGHT = 0.05  # seconds between sweeps while so much is in flight that reading past it costs something
FEW_IN_FLIGHT = 100
MOST_READY = 10_000  # rows that all handlers together have ready at most
FIRST_WINDOW = 128  # rows that a handler has ready at most, to begin with
QUICK, SLOW = 0.25, 2.0  # seconds between two reads that double, or halve, that number
LONGEST_GRACE = 5.0  # seconds between a handler's cancellation and calling it stuck


class Run:
    """One notification on its way through one handler."""

    __slots__ = (
        "abandoned", "cancelled_at", "has_begun", "interrupted", "is_settled", "lease", "notification", "queue",
        "session", "started", "task", "verdict",
    )  # fmt: skip

    def __init__(self, notification: Notification, queue: HandlerQueue, lease: Lease) -> None:
        self.notification = notification
        self.queue = queue
        self.lease = lease
        self.started = 0.0
        self.cancelled_at: float | None = None
        self.interrupted = False
        self.abandoned = False
        self.has_begun = False
        """Whether a handler that may run only once was called."""
        self.is_settled = False
        """Whether its outcome is committed already, together with what the handler wrote."""
        self.session: Session | None = None
        """The transaction that it works in, if it needs one."""
        self.verdict: Verdict | None = None
        """What was decided about it, if its hook is owed."""
        self.task: asyncio.Task[None] | None = None


class HandlerQueue:
    """What one handler has ready and running."""

    def __init__(self, handler: Handler, settings: Settings, handlers: int, on_dead: DeadHook | None) -> None:
        self.handler = handler
        self.function = handler.function
        self.delivery = handler.options.delivery
        options = handler.options
        self.limit = min(options.concurrency or settings.concurrency, settings.concurrency)
        self.share = min(self.limit, max(1, settings.concurrency // (2 * handlers)))
        self.policy = options.retry
        self.retention = self.policy.retention or settings.handling_retention_window
        self.cap = settings.handling_max_backoff_cap
        self.timeout = (options.timeout or settings.handler_timeout).total_seconds()
        self.grace = min(LONGEST_GRACE, max(0.1, self.timeout))
        self.hooks = [hook for hook in (options.on_dead, on_dead) if hook is not None]
        self.is_plain = self.delivery is Delivery.AT_LEAST_ONCE
        self.decoders: dict[str, Callable[[str], Event]] = {}
        self.ready: deque[Run] = deque()
        self.running: dict[Run, None] = {}  # in the order in which they started, so in that of their deadlines
        self.is_listed = False
        self._largest_window = max(self.limit, min(settings.handling_batch_size, MOST_READY // handlers))
        self.window = min(self._largest_window, max(self.limit, FIRST_WINDOW))
        self.read_at = 0.0
        self.was_full = False

    def starts_now(self, run: Run, now: float) -> None:
        """A run's time begins only now: it had to wait for a connection."""
        run.started = now
        del self.running[run]
        self.running[run] = None

    @property
    def wants_more(self) -> bool:
        return len(self.ready) <= self.window // 2

    def adapt_window(self, now: float) -> None:
        """Read far ahead for a handler that is quick, and hardly at all for one that is slow."""
        since, self.read_at = now - self.read_at, now
        if not self.was_full:
            return
        if since < QUICK:
            self.window = min(self._largest_window, self.window * 2)
        elif since > SLOW:
            self.window = min(self._largest_window, max(self.limit, self.window // 2))


class Source:
    """One stored handler name, a handler's own or an alias, whose lock this process holds."""

    def __init__(self, name: str, queue: HandlerQueue, lease: Lease) -> None:
        self.name = name
        self.queue = queue
        self.lease = lease
        self.position: Position = BEGINNING
        self.in_flight = 0
        self.has_backlog = False
        self.swept_at = float("-inf")
        self.sweeps = False

    def next_read(self, room: int, now: float) -> Wanted:
        """What to ask for: on from the position, or from the beginning if it is time for a sweep."""
        pause = SWEEP_IN_BACKLOG if self.has_backlog else SWEEP_IN_FLIGHT
        few = self.in_flight <= FEW_IN_FLIGHT and not self.has_backlog
        self.sweeps = few or now - self.swept_at >= pause
        if self.sweeps:
            self.swept_at = now
            return Wanted(self.name, room + self.in_flight)
        return Wanted(self.name, room, self.position)
