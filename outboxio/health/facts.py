"""The facts that the rules use: about a shard, its handlers and processes, and about the current process.

``collector.py`` reads them from the tables of a shard, and ``reader.py`` from the memory of this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import reduce

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from outboxio.handlers.options import ALERT_AGE, LONGEST_UNSEEN
from outboxio.health.values import MOST, Fit, LoopHealth, Phase, ShardHealth, StuckRunStatus
from outboxio.model.operating.operation import JobRow, Operation
from outboxio.model.redaction import Redact, keep_all
from outboxio.storage.protocols import DeferredFigures, HandlerMinute, Holder, InstanceReport, ParkedKey, Waiting

FAILING_WITHIN, FAILING_SHARE, FAILING_RUNS = timedelta(minutes=5), 0.5, 10
JUST_ANNOUNCED = LONGEST_UNSEEN + timedelta(seconds=30)
"""Every running process has announced its handlers within this time."""
GONE_AFTER = 3 * LONGEST_UNSEEN
"""After this time without an announcement, no process has the handler. One may be late, and the next may fail."""
SOON = timedelta(seconds=1)
"""A row that is due within this time counts as due, because it may be newer than the time of the facts."""
REACHED_WITHIN = 30.0  # seconds for which an answer of a shard keeps the process ready
NEVER = float("-inf")  # by the event loop's clock


# --- the tables of a shard -----------------------------------------------------------------------


class LockFacts(Struct, frozen=True, kw_only=True):
    """A cluster lock."""

    partition: int = 0
    owner: str | None = None
    """The last process that acquired the lock, unless it has released the lock."""
    since: datetime | None = None
    is_dead: bool = False
    """True if the owner missed three reports, or has no report and acquired the lock long ago."""

    @property
    def is_held(self) -> bool:
        """True if a process is known to hold the lock."""
        return self.owner is not None and not self.is_dead

    @classmethod
    def of(
        cls, partition: int, holder: Holder | None, instances: Iterable[InstanceFacts], now: datetime, *,
        is_announced: bool = False,
    ) -> LockFacts:  # fmt: skip
        """Return a lock and its holder. ``is_announced``: True if a process has just announced the handler.

        If so, a holder without a report is a drain or a process of an older version. Otherwise it died long ago, and
        its report was removed.
        """
        if holder is None or holder.is_released:
            return cls(partition=partition)
        alive = [one.is_alive for one in instances if one.instance == holder.owner]
        is_old = not is_announced and now - holder.since > JUST_ANNOUNCED
        is_dead = not any(alive) if alive else is_old
        return cls(partition=partition, owner=holder.owner, since=holder.since, is_dead=is_dead)


class RowFacts(Struct, frozen=True, kw_only=True):
    """The notifications of one or more stored handler names. Each count stops at a bound."""

    due: int = 0
    oldest_due: datetime | None = None
    unowned: int = 0
    """Notifications among ``due`` in partitions that no process holds."""
    oldest_unowned: datetime | None = None
    waiting: int = 0
    """Notifications that are due later."""
    retrying: int = 0
    """Notifications among ``waiting`` that have failed."""
    far: int = 0
    """Notifications among ``waiting`` that are due in more than a year."""
    deferred: Sequence[DeferredFigures] = ()
    """Notifications that wait for a newer version of their event."""
    blocked: int = 0
    dead: int = 0
    dead_hour: int = 0
    newest_dead: datetime | None = None
    parked: Sequence[ParkedKey] = ()

    @property
    def unfinished(self) -> int:
        return min(MOST, self.due + self.waiting + self.blocked + sum(one.number for one in self.deferred))

    @staticmethod
    def together(rows: Sequence[RowFacts]) -> RowFacts:
        """Return the notifications of several names as one value."""
        return RowFacts(
            due=min(MOST, sum(one.due for one in rows)),
            oldest_due=min((one.oldest_due for one in rows if one.oldest_due is not None), default=None),
            unowned=min(MOST, sum(one.unowned for one in rows)),
            oldest_unowned=min((one.oldest_unowned for one in rows if one.oldest_unowned is not None), default=None),
            waiting=min(MOST, sum(one.waiting for one in rows)),
            retrying=min(MOST, sum(one.retrying for one in rows)),
            far=min(MOST, sum(one.far for one in rows)),
            deferred=[each for one in rows for each in one.deferred],
            blocked=min(MOST, sum(one.blocked for one in rows)),
            dead=min(MOST, sum(one.dead for one in rows)),
            dead_hour=min(MOST, sum(one.dead_hour for one in rows)),
            newest_dead=max((one.newest_dead for one in rows if one.newest_dead is not None), default=None),
            parked=[key for one in rows for key in one.parked],
        )


MOST_FAILING = 20
"""The bound up to which the long-failing notifications of a stored name are counted."""


class Failing(Struct, frozen=True):
    """Notifications that have been failing for a long time. Their count stops at a bound."""

    number: int
    since: datetime
    """The time of the earliest first failure."""
    error: str
    """The last error of the notification that has been failing longest."""
    keys: Sequence[str] = ()
    """Their ordering keys."""


class HandlerFacts(RowFacts, frozen=True, kw_only=True):
    """A handler on a shard, with the notifications of its name and its aliases together."""

    name: str
    aliases: tuple[str, ...] = ()
    event_types: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    last_seen: datetime | None = None
    """The last announcement; ``None`` if no process has announced the handler within ``subscription_ttl``."""
    locks: Sequence[LockFacts] = ()
    """The locks of the current name."""
    unheld: Mapping[str, Sequence[int]] = {}
    """The partitions that no process holds, by stored name."""
    is_gone: bool = False
    """True if no process has had the handler for some minutes, although processes with other handlers run."""
    failing: Failing | None = None
    paused_since: datetime | None = None
    minutes: Sequence[HandlerMinute] = ()
    """The minutes of the last hour in which the handler ran."""
    last_error: str | None = None
    """The newest error, read only if the handler is failing."""
    alert_age: timedelta = ALERT_AGE
    lacks_locks: bool = False
    """True if the partition count is automatic, but cannot grow because the server is short of locks."""

    @property
    def is_held(self) -> bool:
        """True if a process holds a partition of the handler."""
        return any(lock.is_held for lock in self.locks)

    def failures(self, now: datetime) -> tuple[int, float]:
        """Return the number of runs in the last 5 minutes, and the share of failures."""
        since = now - FAILING_WITHIN - timedelta(minutes=1)
        minutes = [minute for minute in self.minutes if minute.minute_date > since]
        failed = sum(minute.failed + minute.dead + minute.expired for minute in minutes)
        runs = failed + sum(minute.succeeded for minute in minutes)
        return runs, failed / runs if runs else 0.0

    def is_failing(self, now: datetime) -> bool:
        """True if more than half of at least 10 runs have failed within 5 minutes."""
        runs, share = self.failures(now)
        return runs >= FAILING_RUNS and share > FAILING_SHARE


class CircuitReport(Struct, frozen=True):
    """The open circuit breaker of a handler."""

    since: datetime
    reason: str


class HandlerReport(Struct, frozen=True):
    """A handler in the report of a process. Missing values are unknown."""

    in_flight: int = 0
    limit: int = 0
    stuck: int = 0
    alert_age: float | None = None
    circuit: CircuitReport | None = field(default=None, name="rest")
    limited_to: str | None = None
    """The rate, such as ``100/s``, if the rate holds notifications back."""
    max_wait: float | None = None
    """The maximum time in seconds that an event waits for a full batch."""
    schedule: str | None = None
    """The schedule of a batch handler."""

    def beside(self, other: HandlerReport) -> HandlerReport:
        """Combine the reports of two processes."""
        return HandlerReport(
            self.in_flight + other.in_flight, self.limit + other.limit, self.stuck + other.stuck,
            self.alert_age or other.alert_age, self.circuit or other.circuit, self.limited_to or other.limited_to,
            self.max_wait or other.max_wait, self.schedule or other.schedule,
        )  # fmt: skip


class FullPool(Struct, frozen=True):
    """A connection pool whose connections have all been in use in every report since ``since``."""

    size: int
    since: datetime


class Report(Struct, frozen=True):
    """The JSON object in ``instance_reports``. Other versions may write fewer or more values."""

    roles: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    loop_lag: float | None = None
    clock_offset: float | None = None
    full_pool: FullPool | None = None
    handlers: Mapping[str, HandlerReport] = {}
    options: Mapping[str, Mapping[str, str]] | None = None
    """Options that differ from the defaults, by handler; ``None`` if an older version wrote the report."""
    stuck: tuple[StuckRunStatus, ...] = ()

    @classmethod
    def of(cls, raw: msgspec.Raw, redact: Redact) -> Report:
        """Decode a report, and redact it again: the process may use a different ``redact``.

        A report of an unknown shape has no values.
        """
        try:
            report = msgspec.json.decode(bytes(raw), type=Report)
        except msgspec.MsgspecError:
            return Report()
        handlers = {
            name: one
            if one.circuit is None
            else replace(one, circuit=replace(one.circuit, reason=redact(one.circuit.reason)))
            for name, one in report.handlers.items()
        }
        return replace(report, handlers=handlers)


class InstanceFacts(Struct, frozen=True, kw_only=True):
    """A process, according to its report."""

    instance: str
    version: str
    started: datetime
    last_seen: datetime
    is_alive: bool
    report: Report = Report()

    @classmethod
    def of(cls, row: InstanceReport, now: datetime, redact: Redact = keep_all) -> InstanceFacts:
        return cls(
            instance=row.instance, version=row.version, started=row.started_date, last_seen=row.last_seen_date,
            is_alive=row.is_alive(now), report=Report.of(row.report, redact),
        )  # fmt: skip


class ShardFacts(Struct, frozen=True, kw_only=True):
    """The facts about a shard at the time ``now`` (database clock)."""

    name: str
    now: datetime
    error: str | None = None
    """Why the shard cannot be reached."""
    schema: str | None = None
    """What is wrong with the tables. If set, the facts below are unknown."""
    pending: Sequence[str] = ()
    clock_offset: float | None = None
    handlers: Sequence[HandlerFacts] = ()
    fanout: LockFacts = LockFacts()
    undelivered: Mapping[str, Waiting] = {}
    """By event type."""
    rows: Mapping[str, RowFacts] = {}
    """The notifications by stored handler name, including names that no process has."""
    instances: Sequence[InstanceFacts] = ()
    failed_operations: Sequence[Operation] = ()
    """Operations that failed in the last hour."""
    jobs: Sequence[JobRow] = ()
    """Jobs that are due or paused, or whose last run did not succeed. Jobs are stored on the first shard."""
    took: float = 0.0
    here: LocalShard | None = None
    """The state in this process, for ``outbox.health()``. Takes precedence over ``error`` and ``schema``."""

    @property
    def alive(self) -> Sequence[InstanceFacts]:
        """The processes that have reported recently."""
        return [one for one in self.instances if one.is_alive]

    def handler_of(self, stored_name: str) -> HandlerFacts | None:
        """Return the handler with this name, or else the one with this alias."""
        found = [one for one in self.handlers if stored_name in (one.name, *one.aliases)]
        return min(found, key=lambda one: one.name != stored_name, default=None)

    def reported(self, handler_name: str) -> HandlerReport:
        """Return the combined reports of the running processes about a handler."""
        reports = [one.report.handlers[handler_name] for one in self.alive if handler_name in one.report.handlers]
        return reduce(HandlerReport.beside, reports, HandlerReport())

    @property
    def unroutable(self) -> Mapping[str, int]:
        """Unfinished notifications of handlers that no process has announced, by stored name."""
        return {name: n for name, rows in self.rows.items() if self.handler_of(name) is None and (n := rows.unfinished)}

    @property
    def wanted_types(self) -> frozenset[str]:
        """The event types that any handler subscribes to."""
        return frozenset(event_type for handler in self.handlers for event_type in handler.event_types)

    @property
    def wanted(self) -> Waiting:
        """The undelivered events with a subscribed handler: their number, and the time since which the oldest waits."""
        types = self.wanted_types
        found = [waiting for name, waiting in self.undelivered.items() if name in types]
        oldest = min((one.oldest for one in found if one.oldest is not None), default=None)
        return Waiting(sum(one.number for one in found), oldest)

    def age(self, time: datetime) -> float:
        """Return the seconds since ``time``; 0 if it is in the future."""
        return max(0.0, (self.now - time).total_seconds())

    def age_of(self, time: datetime | None) -> float | None:
        return None if time is None else self.age(time)


# --- this process --------------------------------------------------------------------------------


class Probe(Struct, frozen=True, kw_only=True):
    """The result of a short query that ``outbox.health()`` sent to a shard, and which may have timed out."""

    sent: float = NEVER
    """When the query was sent, by the event loop's clock."""
    answered: bool = False
    refused: bool = False
    """True if the shard could not be reached."""
    schema: Fit = "unknown"


class LocalShard(Struct, frozen=True, kw_only=True):
    """The state of a shard in this process, from its loops and the last probe."""

    now: float
    """When these facts were read, by the event loop's clock."""
    in_running: bool = False
    """True if this process is in ``running()`` and is not leaving it."""
    runs: bool = False
    """True if loops are working on the shard, or trying to reach it."""
    fit: Fit = "unknown"
    """According to the loops."""
    answered: float = NEVER
    """When the database last answered a loop, by the event loop's clock."""
    clock_offset: float | None = None
    locks_held: Sequence[str] = ()
    locks_lacking: Sequence[str] = ()
    stuck: int = 0
    loops: Mapping[str, LoopHealth] = {}
    dead: Sequence[str] = ()
    """Texts about the loops that have stopped."""
    is_stalled: bool = False
    """True if notifications are due but no run finishes (``dispatch/watchdog.py``)."""
    open_circuits: Mapping[str, str] = {}
    """The reasons of open circuit breakers, by handler."""
    probe: Probe = Probe()

    @property
    def schema(self) -> Fit:
        return self.fit if self.fit != "unknown" else self.probe.schema

    @property
    def _answered(self) -> float:
        return max(self.answered, self.probe.sent if self.probe.answered else NEVER)

    @property
    def reachable(self) -> bool | None:
        """True if the shard has answered within 30 s and refused no probe since. ``None`` if no query was sent yet."""
        if self._answered == NEVER:
            return None if self.probe.sent == NEVER and not self.runs else False
        was_refused = self.probe.refused and self.probe.sent > self._answered
        return self.now - self._answered <= REACHED_WITHIN and not was_refused

    @property
    def is_ready(self) -> bool:
        """True if loops are working on the shard. One refused probe is ignored: the server may be back in a second."""
        return self.runs and self.fit == "fits" and self.now - self._answered <= REACHED_WITHIN

    @property
    def health(self) -> ShardHealth:
        return ShardHealth(
            reachable=self.reachable, schema=self.schema, clock_offset=self.clock_offset, locks_held=self.locks_held,
            locks_lacking=self.locks_lacking,
        )  # fmt: skip


class ProcessFacts(Struct, frozen=True, kw_only=True):
    """The facts about this process and its shards, from memory."""

    phase: Phase
    shards: Mapping[str, LocalShard]
    ended: Sequence[str] = ()
    """Texts about the parts of ``running()`` that have ended on their own."""
    blocked: tuple[float, float] = (0.0, float("inf"))
    """How long the event loop was last blocked, and how long ago, in seconds."""
    tables_unknown: str | None = None
    """Why the tables could not be read."""


class Facts(Struct, frozen=True, kw_only=True):
    """All facts about an outbox, as the input of the rules."""

    namespace: str = ""
    shards: Sequence[ShardFacts]
    process: ProcessFacts | None = None
    """For ``outbox.health()`` only."""
    took: float = 0.0
