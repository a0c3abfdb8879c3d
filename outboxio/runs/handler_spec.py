"""Handler specs: the numbers by which a handler is run, computed once from options and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from outboxio.handlers.handler import Handler
from outboxio.handlers.options import Batch, DeadHook, Delivery, OnDeadKey, moments_of
from outboxio.model.notification import Notification
from outboxio.model.retry import RetryPolicy
from outboxio.settings import Settings

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
