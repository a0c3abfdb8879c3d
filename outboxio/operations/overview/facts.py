"""The facts of a shard, as the rules of the verdict read them. The collector (``collector.py``) reads the facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from msgspec import Struct

from outboxio.handlers.options import ALERT_AGE
from outboxio.model.operating.operation import JobRow
from outboxio.operations.overview.values import StuckRunStatus
from outboxio.storage.protocols import DeferredFigures, HandlerMinute, ParkedKey, Waiting


class LockFacts(Struct, frozen=True, kw_only=True):
    """A cluster lock."""

    partition: int = 0
    owner: str | None = None
    """The process that took the lock last, unless the process gave the lock back."""
    since: datetime | None = None
    is_dead: bool = False
    """True if three reports of the owner are missing, or if the owner has no report and took the lock long ago."""

    @property
    def is_held(self) -> bool:
        """True if a process holds the lock, as far as is known."""
        return self.owner is not None and not self.is_dead


class HandlerFacts(Struct, frozen=True, kw_only=True):
    """A handler on a shard. Numbers are those of the name and the aliases together."""

    name: str
    aliases: tuple[str, ...] = ()
    event_types: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    last_seen: datetime | None = None
    """The last announcement; ``None`` if no process has announced the handler within ``subscription_ttl``."""
    due: int = 0
    oldest_due: datetime | None = None
    waiting: int = 0
    deferred: Sequence[DeferredFigures] = ()
    """The notifications that wait for a newer version of their event."""
    blocked: int = 0
    dead: int = 0
    dead_hour: int = 0
    newest_dead: datetime | None = None
    parked: Sequence[ParkedKey] = ()
    locks: Sequence[LockFacts] = ()
    """The locks of the present name."""
    unowned_due: Sequence[int] = ()
    """Partitions without a holder that have had due notifications for more than 5 s."""
    paused_since: datetime | None = None
    minutes: Sequence[HandlerMinute] = ()
    """The minutes of the last hour with runs."""
    last_error: str | None = None
    """The newest error, read only if the handler fails."""
    alert_age: timedelta = ALERT_AGE

    @property
    def is_held(self) -> bool:
        """True if a process holds a partition of the handler."""
        return any(lock.is_held for lock in self.locks)

    def minutes_since(self, moment: datetime) -> Sequence[HandlerMinute]:
        """The minutes that had not ended at a moment."""
        return [minute for minute in self.minutes if minute.minute_date > moment - timedelta(minutes=1)]


class RestReport(Struct, frozen=True):
    """A handler that rests, because a service is unavailable."""

    since: datetime
    reason: str


class HandlerReport(Struct, frozen=True):
    """A handler in the report of a process. A value that is missing is unknown."""

    in_flight: int = 0
    limit: int = 0
    stuck: int = 0
    alert_age: float | None = None
    rest: RestReport | None = None


class Report(Struct, frozen=True):
    """The JSON object in ``instance_reports``. Older and newer versions may write fewer or more values."""

    roles: tuple[str, ...] = ()
    loop_lag: float | None = None
    clock_offset: float | None = None
    handlers: Mapping[str, HandlerReport] = {}
    stuck: tuple[StuckRunStatus, ...] = ()


class InstanceFacts(Struct, frozen=True, kw_only=True):
    """A process, by its report."""

    instance: str
    version: str
    started: datetime
    last_seen: datetime
    is_alive: bool
    report: Report = Report()

    @property
    def stuck(self) -> Mapping[str, int]:
        """The stuck runs by handler."""
        return {name: handler.stuck for name, handler in self.report.handlers.items() if handler.stuck}

    @property
    def resting(self) -> Mapping[str, RestReport]:
        """The handlers that rest, by name."""
        return {name: handler.rest for name, handler in self.report.handlers.items() if handler.rest is not None}


class FailedOperation(Struct, frozen=True):
    """An order that has failed within the last hour."""

    kind: str
    actor: str
    error: str
    id: str


class ShardFacts(Struct, frozen=True, kw_only=True):
    """The facts of a shard at the moment ``now``, by the clock of the database."""

    name: str
    now: datetime
    error: str | None = None
    """Why the shard cannot be reached."""
    schema: str | None = None
    """What is wrong with the tables. The facts below are then unknown."""
    pending: Sequence[str] = ()
    clock_offset: float | None = None
    handlers: Sequence[HandlerFacts] = ()
    fanout: LockFacts = LockFacts()
    undelivered: Mapping[str, Waiting] = {}
    """By event type."""
    unroutable: Mapping[str, int] = {}
    """Unfinished notifications by a handler name that no process has."""
    instances: Sequence[InstanceFacts] = ()
    failed_operations: Sequence[FailedOperation] = ()
    jobs: Sequence[JobRow] = ()
    """The jobs that are due, whose last run did not succeed, or that are paused. The first shard keeps the jobs."""
    took: float = 0.0

    @property
    def is_known(self) -> bool:
        """True if the facts could be read."""
        return self.error is None and self.schema is None

    @property
    def wanted_types(self) -> frozenset[str]:
        """The event types that a handler wants."""
        return frozenset(event_type for handler in self.handlers for event_type in handler.event_types)

    @property
    def has_topics(self) -> bool:
        """True if a handler wants the events of a topic, of any type."""
        return any(handler.topics for handler in self.handlers)

    def age(self, moment: datetime) -> float:
        """The seconds since a moment; 0 for a moment in the future."""
        return max(0.0, (self.now - moment).total_seconds())


class Facts(Struct, frozen=True, kw_only=True):
    """The facts of all shards."""

    namespace: str
    shards: Sequence[ShardFacts]
    took: float = 0.0
