"""The facts that the rules read, about a shard, its handlers and processes, and about the process that reads them.

``collector.py`` reads the tables of a shard, and ``reader.py`` the memory of this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import reduce

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.handlers.options import ALERT_AGE, LONGEST_UNSEEN
from outboxio.health.values import MOST, Fit, LoopHealth, Phase, ShardHealth, StuckRunStatus
from outboxio.model.operating.operation import JobRow, Operation
from outboxio.model.redaction import Redact, keep_all
from outboxio.storage.protocols import DeferredFigures, HandlerMinute, Holder, InstanceReport, ParkedKey, Waiting

FAILING_WITHIN, FAILING_SHARE, FAILING_RUNS = timedelta(minutes=5), 0.5, 10
JUST_ANNOUNCED = LONGEST_UNSEEN + timedelta(seconds=30)
"""A process that runs has announced its handlers within this time."""
GONE_AFTER = 3 * LONGEST_UNSEEN
"""An announcement may come late, and the next may fail. After so long, no process has the handler."""
SOON = timedelta(seconds=1)
"""A row that is due within this time counts as due: it may have been made after the facts were begun to be read."""
REACHED_WITHIN = 30.0  # seconds for which an answer of a shard keeps the process ready
NEVER = float("-inf")  # by the clock of an event loop


# --- the tables of a shard -----------------------------------------------------------------------


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

    @classmethod
    def of(
        cls, partition: int, holder: Holder | None, instances: Iterable[InstanceFacts], now: datetime, *,
        is_announced: bool = False,
    ) -> LockFacts:  # fmt: skip
        """A lock and its holder. ``is_announced``: True if a process has announced the handler just now.

        A holder without a report is a drain, or a process of an older version, if the handler was announced just now.
        Otherwise the holder died long ago, and its report was removed.
        """
        if holder is None or holder.has_given_back:
            return cls(partition=partition)
        alive = [one.is_alive for one in instances if one.instance == holder.owner]
        is_old = not is_announced and now - holder.since > JUST_ANNOUNCED
        is_dead = not any(alive) if alive else is_old
        return cls(partition=partition, owner=holder.owner, since=holder.since, is_dead=is_dead)


class RowFacts(Struct, frozen=True, kw_only=True):
    """The notifications of one stored handler name, or of several, each number counted up to a bound."""

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
        """The notifications of several names."""
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
"""Up to so many notifications of a stored name are counted that have been failing for long."""


class Failing(Struct, frozen=True):
    """Notifications that have been failing for long. Their number is counted up to a bound."""

    number: int
    since: datetime
    """When the first of them failed first."""
    error: str
    """The last error of that one."""
    keys: Sequence[str] = ()
    """Their ordering keys."""


class HandlerFacts(RowFacts, frozen=True, kw_only=True):
    """A handler on a shard. The notifications are those of the name and the aliases together."""

    name: str
    aliases: tuple[str, ...] = ()
    event_types: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    last_seen: datetime | None = None
    """The last announcement; ``None`` if no process has announced the handler within ``subscription_ttl``."""
    locks: Sequence[LockFacts] = ()
    """The locks of the present name."""
    unheld: Mapping[str, Sequence[int]] = {}
    """The partitions that no process holds, by stored name."""
    is_gone: bool = False
    """True if no process has had the handler for some minutes, while other handlers have a process."""
    failing: Failing | None = None
    paused_since: datetime | None = None
    minutes: Sequence[HandlerMinute] = ()
    """The minutes of the last hour with runs."""
    last_error: str | None = None
    """The newest error, read only if the handler fails."""
    alert_age: timedelta = ALERT_AGE
    lacks_locks: bool = False
    """True if the number of partitions is automatic, and cannot rise for want of locks in the server."""

    @property
    def is_held(self) -> bool:
        """True if a process holds a partition of the handler."""
        return any(lock.is_held for lock in self.locks)

    def failures(self, now: datetime) -> tuple[int, float]:
        """The number of runs of the last 5 minutes, and the share of failures."""
        since = now - FAILING_WITHIN - timedelta(minutes=1)
        minutes = [minute for minute in self.minutes if minute.minute_date > since]
        failed = sum(minute.failed + minute.dead + minute.expired for minute in minutes)
        runs = failed + sum(minute.succeeded for minute in minutes)
        return runs, failed / runs if runs else 0.0

    def is_failing(self, now: datetime) -> bool:
        """True if more than half of at least 10 runs have failed within 5 minutes."""
        runs, share = self.failures(now)
        return runs >= FAILING_RUNS and share > FAILING_SHARE


class RestReport(Struct, frozen=True):
    """The open circuit breaker of a handler whose service is unavailable."""

    since: datetime
    reason: str


class HandlerReport(Struct, frozen=True):
    """A handler in the report of a process. A value that is missing is unknown."""

    in_flight: int = 0
    limit: int = 0
    stuck: int = 0
    alert_age: float | None = None
    rest: RestReport | None = None
    limited_to: str | None = None
    """The rate, such as ``100/s``, if the rate holds notifications back."""
    max_wait: float | None = None
    """For how many seconds an event waits for a full batch, at most."""
    schedule: str | None = None
    """The schedule of a batch handler."""

    def beside(self, other: HandlerReport) -> HandlerReport:
        """The reports of two processes as one."""
        return HandlerReport(
            self.in_flight + other.in_flight, self.limit + other.limit, self.stuck + other.stuck,
            self.alert_age or other.alert_age, self.rest or other.rest, self.limited_to or other.limited_to,
            self.max_wait or other.max_wait, self.schedule or other.schedule,
        )  # fmt: skip


class FullPool(Struct, frozen=True):
    """A connection pool whose connections were all in use at every report since then."""

    size: int
    since: datetime


class Report(Struct, frozen=True):
    """The JSON object in ``instance_reports``. Older and newer versions may write fewer or more values."""

    roles: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    loop_lag: float | None = None
    clock_offset: float | None = None
    full_pool: FullPool | None = None
    handlers: Mapping[str, HandlerReport] = {}
    options: Mapping[str, Mapping[str, str]] | None = None
    """The options that differ from the defaults, of the handlers that have any; ``None`` from an older version."""
    stuck: tuple[StuckRunStatus, ...] = ()

    @classmethod
    def of(cls, raw: msgspec.Raw, redact: Redact) -> Report:
        """The report of a process, which may have another ``redact``. A report of an unknown shape has no values."""
        try:
            report = msgspec.json.decode(bytes(raw), type=Report)
        except msgspec.MsgspecError:
            return Report()
        handlers = {
            name: one if one.rest is None else replace(one, rest=replace(one.rest, reason=redact(one.rest.reason)))
            for name, one in report.handlers.items()
        }
        return replace(report, handlers=handlers)


class InstanceFacts(Struct, frozen=True, kw_only=True):
    """A process, by its report."""

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
    """The facts of a shard at the time ``now``, by the clock of the database."""

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
    rows: Mapping[str, RowFacts] = {}
    """The notifications by stored handler name, also of names that no process has."""
    instances: Sequence[InstanceFacts] = ()
    failed_operations: Sequence[Operation] = ()
    """Of the last hour."""
    jobs: Sequence[JobRow] = ()
    """The jobs that are due, whose last run did not succeed, or that are paused. The first shard keeps the jobs."""
    took: float = 0.0
    here: LocalShard | None = None
    """The shard as this process knows it, for ``outbox.health()``. Takes precedence over ``error`` and ``schema``."""

    @property
    def alive(self) -> Sequence[InstanceFacts]:
        """The processes whose reports are not missing."""
        return [one for one in self.instances if one.is_alive]

    def handler_of(self, stored_name: str) -> HandlerFacts | None:
        """The handler of a stored name: of this name, or else with this alias."""
        found = [one for one in self.handlers if stored_name in (one.name, *one.aliases)]
        return min(found, key=lambda one: one.name != stored_name, default=None)

    def reported(self, handler_name: str) -> HandlerReport:
        """What the running processes report about a handler, together."""
        reports = [one.report.handlers[handler_name] for one in self.alive if handler_name in one.report.handlers]
        return reduce(HandlerReport.beside, reports, HandlerReport())

    @property
    def unroutable(self) -> Mapping[str, int]:
        """Unfinished notifications by a stored handler name that no process has announced."""
        return {name: n for name, rows in self.rows.items() if self.handler_of(name) is None and (n := rows.unfinished)}

    @property
    def wanted_types(self) -> frozenset[str]:
        """The event types that a handler wants."""
        return frozenset(event_type for handler in self.handlers for event_type in handler.event_types)

    @property
    def wanted(self) -> Waiting:
        """The undelivered events that a handler wants: their number, and since when the first one has waited."""
        types = self.wanted_types
        found = [waiting for name, waiting in self.undelivered.items() if name in types]
        oldest = min((one.oldest for one in found if one.oldest is not None), default=None)
        return Waiting(sum(one.number for one in found), oldest)

    def age(self, time: datetime) -> float:
        """The seconds since a time; 0 for a time in the future."""
        return max(0.0, (self.now - time).total_seconds())

    def age_of(self, time: datetime | None) -> float | None:
        return None if time is None else self.age(time)


# --- this process --------------------------------------------------------------------------------


class Probe(Struct, frozen=True, kw_only=True):
    """The result of a short query that ``outbox.health()`` sent to a shard. A query may end without any answer."""

    sent: float = NEVER
    """When the query was sent, by the event loop's clock."""
    answered: bool = False
    refused: bool = False
    """True if the shard could not be reached."""
    schema: Fit = "unknown"


class LocalShard(Struct, frozen=True, kw_only=True):
    """A shard as this process knows it: from its loops, and from the last probe."""

    now: float
    """When these facts were read, by the event loop's clock."""
    in_running: bool = False
    """True if this process is in ``running()``, and does not leave it."""
    runs: bool = False
    """True if loops work on the shard, or try to reach the shard."""
    fit: Fit = "unknown"
    """As the loops know."""
    answered: float = NEVER
    """When the database last answered a loop, by the event loop's clock."""
    clock_offset: float | None = None
    locks_held: Sequence[str] = ()
    locks_lacking: Sequence[str] = ()
    stuck: int = 0
    loops: Mapping[str, LoopHealth] = {}
    dead: Sequence[str] = ()
    """The loops that do no rounds any more, in sentences."""
    is_sick: bool = False
    """True if due notifications wait and no run ends (``dispatch/watchdog.py``)."""
    resting: Mapping[str, str] = {}
    """The handlers whose circuit breaker is open, each with the reason."""
    probe: Probe = Probe()

    @property
    def schema(self) -> Fit:
        return self.fit if self.fit != "unknown" else self.probe.schema

    @property
    def _answered(self) -> float:
        return max(self.answered, self.probe.sent if self.probe.answered else NEVER)

    @property
    def reachable(self) -> bool | None:
        """True after an answer within 30 s, unless a probe was refused since. ``None`` if nothing was sent yet."""
        if self._answered == NEVER:
            return None if self.probe.sent == NEVER and not self.runs else False
        was_refused = self.probe.refused and self.probe.sent > self._answered
        return self.now - self._answered <= REACHED_WITHIN and not was_refused

    @property
    def is_ready(self) -> bool:
        """True if loops work on the shard. A refused probe is not enough: the server may be back in a second."""
        return self.runs and self.fit == "fits" and self.now - self._answered <= REACHED_WITHIN

    @property
    def health(self) -> ShardHealth:
        return ShardHealth(
            reachable=self.reachable, schema=self.schema, clock_offset=self.clock_offset, locks_held=self.locks_held,
            locks_lacking=self.locks_lacking,
        )  # fmt: skip


class ProcessFacts(Struct, frozen=True, kw_only=True):
    """What this process knows of itself and of its shards."""

    phase: Phase
    shards: Mapping[str, LocalShard]
    ended: Sequence[str] = ()
    """The parts of ``running()`` that have ended by themselves, in sentences."""
    blocked: tuple[float, float] = (0.0, float("inf"))
    """For how many seconds the event loop was last blocked, and how many seconds ago."""
    tables_unknown: str | None = None
    """Why the tables could not be read."""


class Facts(Struct, frozen=True, kw_only=True):
    """All facts about an outbox: one value, which the rules read."""

    namespace: str = ""
    shards: Sequence[ShardFacts]
    process: ProcessFacts | None = None
    """For ``outbox.health()`` only."""
    took: float = 0.0
