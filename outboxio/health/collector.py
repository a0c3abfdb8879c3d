"""Reads the facts of a shard: about 15 short statements, each bounded. And the figures for metrics, which are fewer.

The facts may be read in a process without the handlers, such as a command line with a URL. So the handlers are those
of ``subscriptions``, and the options are those of the reports of processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime, timedelta

from msgspec.structs import asdict, replace

from outboxio.errors import DatabaseUnavailable, SchemaError, SchemaNewer
from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.options import ALERT_AGE
from outboxio.health.facts import JUST_ANNOUNCED, HandlerFacts, InstanceFacts, LockFacts, RowFacts, ShardFacts
from outboxio.health.values import MOST, brief
from outboxio.model.lock_name import LockName, Slot
from outboxio.model.notification import State
from outboxio.model.operating.groups import Search
from outboxio.model.operating.operation import JobRow, Operation, OperationState
from outboxio.model.redaction import Redact, redacted_error
from outboxio.statistics.figures import Figures, HandlerFigures, JobFigures
from outboxio.storage.protocols import (
    Announced,
    Database,
    DeadFigures,
    PartitionCount,
    counts_of,
    full_of_automatic,
    slots_of,
)
from outboxio.support import machine
from outboxio.support.clock import ShardClock, utc_now
from outboxio.support.text import without_passwords

PATIENCE = 5.0  # seconds for all statements on a shard
CHECKED_AGAIN = 60.0  # seconds between two complete checks of the tables
HOUR = timedelta(hours=1)
MOST_KEYS = 100
MOST_KEYS_OF_METRICS = 1000
_INSTANCES_FOR = timedelta(minutes=10)  # the time for which a dead process is shown
_OPERATIONS = 20
_UNOWNED_FOR = timedelta(seconds=5)

_FAILURES = (State.FAILED, State.DEAD, State.EXPIRED, State.DYING)

Families = Mapping[str, Sequence[str]]
"""The stored names of each handler: its present name and its aliases."""


class Collector:
    """Reads the facts of a shard."""

    def __init__(
        self, namespace: str, database: Database, clock: ShardClock, handlers: HandlerRegistry, ttl: timedelta,
        redact: Redact,
    ) -> None:  # fmt: skip
        """``ttl``: the setting ``subscription_ttl``."""
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._handlers = handlers
        self._ttl = ttl
        self._redact = redact
        self._checked_at = float("-inf")
        self._pending: Sequence[str] = ()

    async def collect(self) -> ShardFacts:
        """The facts. A shard that cannot be reached, or lacks tables, is a fact and not an error."""
        began = machine.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                facts = await self._collect()
        except TimeoutError:
            facts = self._without(error=f"no answer within {PATIENCE:g} s")
        except SchemaError as error:
            facts = self._without(schema=str(error))
        except Exception as error:
            if self._database.lacks_schema(error):
                facts = self._without(schema=f"{error}. Tables or columns are missing")
            elif isinstance(error, DatabaseUnavailable) or self._database.is_unreachable(error):
                facts = self._without(error=_unreachable(error))
            else:
                raise
        return replace(facts, took=machine.monotonic() - began)

    def _without(self, *, error: str | None = None, schema: str | None = None) -> ShardFacts:
        self._checked_at = float("-inf")
        return ShardFacts(name=self._database.name, now=self._clock(), error=error, schema=schema)

    async def _collect(self) -> ShardFacts:
        namespace, database = self._namespace, self._database
        pending = await self._check()
        now, offset = await self._now()
        seen_since = self._clock.settled() - self._ttl
        announced = [
            one for one in await database.subscriptions.announced(namespace) if one.last_seen_date > seen_since
        ]
        families = _families(announced)
        known = {name for names in families.values() for name in names}
        unroutable = sorted({*await database.stored_notifications.unfinished_names(namespace)} - known)
        dead_names = known.intersection(await database.probes.dead_names(namespace))
        counts = await counts_of(database, namespace)
        rows = await self._rows(families, unroutable, counts, dead_names, now, MOST_KEYS)
        instances = [
            InstanceFacts.of(one, now, self._redact)
            for one in await database.reports.reports(namespace, now - _INSTANCES_FOR)
        ]
        fanout = LockName(namespace, "fanout")
        holder = (await database.subscriptions.holders([fanout])).get(fanout)
        numbers = {name: rows[name].unfinished for name in unroutable}
        return ShardFacts(
            name=database.name, now=now, pending=pending, clock_offset=offset, instances=instances,
            handlers=await self._handler_facts(families, announced, rows, counts, instances, now),
            fanout=LockFacts.of(0, holder, instances, now),
            undelivered=await database.probes.undelivered(namespace, now, MOST),
            unroutable={name: number for name, number in numbers.items() if number},
            failed_operations=await self._failed_operations(now),
            jobs=[redacted_error(job, self._redact) for job in await database.jobs.faulty(namespace, now)],
        )  # fmt: skip

    async def _check(self) -> Sequence[str]:
        """Check the tables at most once a minute. Returns the contract files that wait."""
        if machine.monotonic() - self._checked_at >= CHECKED_AGAIN:
            with suppress(SchemaNewer):  # during a deployment, this process is the older one and continues
                await self._database.schema.check()
            self._pending = await self._database.schema.pending()
            self._checked_at = machine.monotonic()
        return self._pending

    async def _now(self) -> tuple[datetime, float | None]:
        """The time by the clock that outboxio uses, and the offset of this machine's wall clock, in seconds."""
        sent, said, answered = utc_now(), await self._database.now(), utc_now()
        if self._clock.is_given:
            return self._clock(), None
        await self._clock.measure(self._database.now)
        slow, fast = (sent - said).total_seconds(), (answered - said).total_seconds()
        return self._clock(), 0.0 if slow <= 0 <= fast else min(slow, fast, key=abs)

    async def _rows(
        self, families: Families, others: Sequence[str], counts: Mapping[str, PartitionCount],
        dead_names: Set[str], now: datetime, most_keys: int,
    ) -> dict[str, RowFacts]:  # fmt: skip
        """The notifications of each stored name: of handlers, and of other names.

        ``dead_names``: the names of which DEAD and EXPIRED notifications are counted.
        """
        names = sorted({*others, *(name for family in families.values() for name in family)})
        namespace, probes = self._namespace, self._database.probes
        slots = slots_of(counts, names)
        due = {one.handler_name: one for one in await probes.due(namespace, slots, now, MOST)}
        deferred = await self._database.deferred.count(namespace, slots, MOST)
        blocked = await probes.blocked(namespace, names, MOST)
        dead = {one.handler_name: one for one in await probes.dead(namespace, sorted(dead_names), now - HOUR, MOST)}
        parking = [family for family in families.values() if not dead_names.isdisjoint(family)]
        parked = await probes.parked(namespace, parking, most_keys) if parking else ()

        def rows_of(name: str) -> RowFacts:
            ended = dead.get(name, DeadFigures(name, 0, 0, None))
            return RowFacts(
                due=due[name].due, oldest_due=due[name].oldest_due, waiting=due[name].waiting,
                deferred=[one for one in deferred if one.handler_name == name], blocked=blocked[name].number,
                dead=ended.number, dead_hour=ended.recent, newest_dead=ended.newest,
                parked=[key for key in parked if key.handler_name == name],
            )  # fmt: skip

        return {name: rows_of(name) for name in names}

    # --- handlers ----------------------------------------------------------------------------------

    async def _handler_facts(
        self, families: Families, announced: Sequence[Announced], rows: Mapping[str, RowFacts],
        counts: Mapping[str, PartitionCount], instances: Sequence[InstanceFacts], now: datetime,
    ) -> list[HandlerFacts]:  # fmt: skip
        if not families:
            return []
        namespace, subscriptions = self._namespace, self._database.subscriptions
        locks = [LockName(namespace, "dispatch", *slot) for slot in slots_of(counts, sorted(families))]
        holders = await subscriptions.holders(locks)
        pauses = [one for one in await subscriptions.pauses(namespace) if one.ended_date is None]
        minutes = await self._database.reports.minutes(namespace, now - HOUR)
        alert_ages = _alert_ages(instances, self._handlers)
        lacks_locks = await full_of_automatic(self._database, counts.values()) is not None

        def facts_of(name: str, family: Sequence[str]) -> HandlerFacts:
            ours = [one for one in announced if one.handler_name == name]
            last_seen = max(one.last_seen_date for one in ours)
            is_announced = now - last_seen < JUST_ANNOUNCED
            paused = [one.paused_date or now for one in pauses if one.handler_name in family]
            return HandlerFacts(
                name=name,
                aliases=tuple(each for each in family if each != name),
                event_types=tuple(sorted({one.event_type for one in ours if one.event_type})),
                topics=tuple(sorted({one.topic for one in ours if one.topic})),
                last_seen=last_seen,
                locks=[
                    LockFacts.of(lock.partition, holders.get(lock), instances, now, is_announced=is_announced)
                    for lock in locks if lock.handler_name == name
                ],
                paused_since=min(paused, default=None),
                minutes=[minute for minute in minutes if minute.handler_name in family],
                alert_age=alert_ages.get(name, ALERT_AGE),
                lacks_locks=lacks_locks and (name not in counts or counts[name].is_automatic),
                **asdict(RowFacts.together([rows[each] for each in family])),
            )  # fmt: skip

        return [await self._completed(facts_of(name, family), now) for name, family in families.items()]

    async def _completed(self, handler: HandlerFacts, now: datetime) -> HandlerFacts:
        """The handler with partitions that no process holds, and with its newest error if it fails."""
        unowned: list[int] = []
        unheld = [lock.partition for lock in handler.locks if not lock.is_held]
        if len(unheld) < len(handler.locks):
            any_due, long_ago = self._database.stored_notifications.any_due, now - _UNOWNED_FOR
            unowned = [one for one in unheld if await any_due(self._namespace, long_ago, [Slot(handler.name, one)])]
        error: str | None = None
        if handler.is_failing(now):
            search = Search(states=_FAILURES, names=(handler.name, *handler.aliases))
            errors = (await self._database.search.last_errors(self._namespace, search, 1)).rows
            error = brief(self._redact(f"{errors[0].type}: {errors[0].message}")) if errors else None
        return replace(handler, unowned_due=unowned, last_error=error)

    async def _failed_operations(self, now: datetime) -> list[Operation]:
        newest = await self._database.operations.select(self._namespace, _OPERATIONS, None)
        failed = [one for one in newest if one.state is OperationState.FAILED and one.updated_date > now - HOUR]
        return [redacted_error(one, self._redact) for one in failed]

    # --- metrics -----------------------------------------------------------------------------------

    async def figures(self) -> Figures:
        """The figures that metrics show, each counted up to a bound. A stored name without a handler is shown too."""
        now, namespace, database = self._clock(), self._namespace, self._database
        announced = await database.subscriptions.announced(namespace)
        present = {name: one.handler_name for one in announced for name in one.names}
        present |= {name: handler.name for handler in self._handlers for name in handler.names}
        unfinished = await database.stored_notifications.unfinished_names(namespace)
        dead_names = set(await database.probes.dead_names(namespace))
        families: dict[str, list[str]] = {}
        for name in sorted({*present, *unfinished, *dead_names}):
            families.setdefault(present.get(name, name), []).append(name)
        rows = await self._rows(
            families, (), await counts_of(database, namespace), dead_names, now, MOST_KEYS_OF_METRICS
        )
        wanted = {one.event_type for handler in self._handlers for one in self._handlers.wanted_by(handler)}
        wanted |= {one.event_type for one in announced}
        undelivered = await database.probes.undelivered(namespace, now, MOST)
        dates = (one.oldest for name, one in undelivered.items() if name in wanted)
        seen_since = self._clock.settled() - self._ttl
        routable = {name for one in announced if one.last_seen_date > seen_since for name in one.names}
        routable |= set(self._handlers.names)
        return Figures(
            handlers={
                handler: _handler_figures(RowFacts.together([rows[name] for name in names]), now)
                for handler, names in families.items()
            },
            jobs={job.name: _job_figures(job, now) for job in await database.jobs.all(namespace, errors=False)},
            undelivered=sum(one.number for name, one in undelivered.items() if name in wanted),
            undelivered_age=_age(min((date for date in dates if date is not None), default=None), now),
            unwanted=sum(one.number for name, one in undelivered.items() if name not in wanted),
            unroutable=sum(
                sum(each.number for each in one.deferred) + (0 if name in routable else one.due + one.waiting)
                for name, one in rows.items()
            ),
        )


def _unreachable(error: Exception) -> str:
    """Why a shard cannot be reached. The address is kept whole, so the reason behind it is not cut off."""
    if not isinstance(error, DatabaseUnavailable):
        return brief(without_passwords(str(error) or type(error).__name__))
    before = str(error).removesuffix(error.reason)
    return without_passwords(before.removeprefix(f"shard {error.shard!r} at ") + brief(error.reason))


def _families(announced: Iterable[Announced]) -> dict[str, list[str]]:
    names: dict[str, set[str]] = {}
    for one in announced:
        names.setdefault(one.handler_name, {one.handler_name}).update(one.names)
    return {handler: sorted(each) for handler, each in names.items()}


def _alert_ages(instances: Iterable[InstanceFacts], handlers: HandlerRegistry) -> dict[str, timedelta]:
    """The ``alert_age`` of each handler: by the code of this process, or else by the reports."""
    ages = {
        name: timedelta(seconds=report.alert_age)
        for instance in instances
        for name, report in instance.report.handlers.items()
        if report.alert_age is not None
    }
    return {**ages, **{handler.name: handler.options.alert_age for handler in handlers}}


def _handler_figures(rows: RowFacts, now: datetime) -> HandlerFigures:
    return HandlerFigures(
        due=rows.due, due_age=_age(rows.oldest_due, now), retrying=rows.waiting, dead=rows.dead,
        dead_recently=rows.dead_hour, blocked=rows.blocked, parked_keys=len(rows.parked),
    )  # fmt: skip


def _job_figures(job: JobRow, now: datetime) -> JobFigures:
    waits = job.state != "RUNNING" and (job.paused_date is None or job.ordered_date is not None)
    due_age = _age(job.due_date, now) if waits else 0.0
    return JobFigures(due_age=due_age, failing=job.has_failed, paused=job.paused_date is not None)


def _age(time: datetime | None, now: datetime) -> float:
    return 0.0 if time is None else max(0.0, (now - time).total_seconds())
