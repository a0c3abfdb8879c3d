"""Reads the facts of a shard, in about 15 short bounded statements, and the smaller set of figures for metrics.

The process that reads them may not have the handlers, as with a command line that only has a URL. Therefore the
handlers are read from ``subscriptions``, and their options from the reports of the processes.
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
from outboxio.health.facts import (
    GONE_AFTER,
    JUST_ANNOUNCED,
    MOST_FAILING,
    SOON,
    Failing,
    HandlerFacts,
    InstanceFacts,
    LockFacts,
    RowFacts,
    ShardFacts,
)
from outboxio.health.reasons import Reason, waiting_in
from outboxio.health.values import MOST, brief
from outboxio.model.lock_name import LockName, Slot
from outboxio.model.notification import NotificationRecord, State
from outboxio.model.operating.groups import Search
from outboxio.model.operating.operation import JobRow, Operation, OperationState
from outboxio.model.redaction import Redact, redacted_error
from outboxio.settings import Settings
from outboxio.statistics.figures import Figures, HandlerFigures, JobFigures
from outboxio.storage.protocols import (
    Announced,
    Database,
    DeadFigures,
    DueFigures,
    HandlerMinute,
    PartitionCount,
    near_lock_capacity,
    slots_of,
)
from outboxio.support import machine
from outboxio.support.clock import ShardClock, naive_utc, utc_now
from outboxio.support.text import without_passwords

PATIENCE = 5.0  # seconds for all statements on a shard
CHECKED_AGAIN = 60.0  # seconds between two complete checks of the tables
HOUR = timedelta(hours=1)
MAX_KEYS = 100
MAX_METRIC_KEYS = 1000
_INSTANCES_FOR = timedelta(minutes=10)  # how long a dead process is shown
_OPERATIONS = 20

_FAILURES = (State.FAILED, State.DEAD, State.EXPIRED, State.DYING)

Families = Mapping[str, Sequence[str]]
"""The stored names of each handler: its current name and its aliases."""


class Collector:
    """Reads the facts of a shard."""

    def __init__(
        self, namespace: str, database: Database, clock: ShardClock, handlers: HandlerRegistry, settings: Settings,
        redact: Redact,
    ) -> None:  # fmt: skip
        self.shard = database.name
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._handlers = handlers
        self._ttl = settings.subscription_ttl
        self._failing_after = settings.failing_alert_after
        self._redact = redact
        self._checked_at = float("-inf")
        self._pending: Sequence[str] = ()

    async def collect(self) -> ShardFacts:
        """Return the facts. An unreachable shard or a missing table is a fact, not an error."""
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
        pending = await self._check()
        now, offset = await self._now()
        facts = await self.rows_and_locks(now)
        minutes = await self._database.reports.minutes(self._namespace, now - HOUR) if facts.handlers else []
        return replace(
            facts, pending=pending, clock_offset=offset,
            handlers=await self._failing([await self._completed(one, minutes, now) for one in facts.handlers], now),
            failed_operations=await self._failed_operations(now),
            jobs=[
                redacted_error(job, self._redact) for job in await self._database.jobs.faulty(self._namespace, now)
            ],
        )  # fmt: skip

    async def rows_and_locks(
        self, now: datetime, *, most: int = MOST, most_keys: int = MAX_KEYS, names: Sequence[str] | None = None
    ) -> ShardFacts:
        """Return the facts about rows, locks and processes, without errors, jobs and figures by minute.

        ``most``: the bound of all counts. ``names``: count only the rows of these stored names.
        """
        namespace, database = self._namespace, self._database
        seen_since = self._clock.settled() - self._ttl
        subscriptions = await database.subscriptions.announced(namespace)
        announced = [one for one in subscriptions if one.last_seen_date > seen_since]
        families = _families(announced)
        known = {name for each in families.values() for name in each}
        controls = await database.subscriptions.control_state(namespace)
        counts = {one.handler_name: one for one in controls.partitions}
        instances = [
            InstanceFacts.of(one, now, self._redact)
            for one in await database.reports.reports(namespace, now - _INSTANCES_FOR)
        ]
        fanout, held = await self._locks(slots_of(counts, sorted(known)), announced, instances, now)
        dead_names = set(await database.probes.dead_names(namespace))
        others = {*await database.stored_notifications.unfinished_names(namespace), *dead_names} - known
        stored = sorted(known | others) if names is None else names
        rows = await self._rows(stored, families, counts, dead_names, held, now, most, most_keys)
        lacks_locks = bool(families) and await near_lock_capacity(database, counts.values()) is not None
        paused = await database.subscriptions.pauses(namespace) if controls.pauses else ()
        pauses = {one.handler_name: one.paused_date or now for one in paused if one.ended_date is None}
        alert_ages, gone = _alert_ages(instances, self._handlers), _gone(subscriptions, instances, now)

        def handler(name: str, family: Sequence[str]) -> HandlerFacts:
            ours = [one for one in announced if one.handler_name == name]
            return HandlerFacts(
                name=name,
                aliases=tuple(each for each in family if each != name),
                event_types=tuple(sorted({one.event_type for one in ours if one.event_type})),
                topics=tuple(sorted({one.topic for one in ours if one.topic})),
                last_seen=max(one.last_seen_date for one in ours),
                is_gone=name in gone,
                locks=[lock for slot, lock in held.items() if slot.handler_name == name],
                unheld={
                    each: tuple(slot.partition for slot, lock in held.items() if slot[0] == each and not lock.is_held)
                    for each in family
                },
                paused_since=min((pauses[each] for each in family if each in pauses), default=None),
                alert_age=alert_ages.get(name, ALERT_AGE),
                lacks_locks=lacks_locks and (name not in counts or counts[name].is_automatic),
                **asdict(RowFacts.together([rows[each] for each in family if each in rows])),
            )

        return ShardFacts(
            name=database.name, now=now, instances=instances, rows=rows, fanout=fanout,
            handlers=_present([handler(*family) for family in families.items()]),
            undelivered=await database.probes.undelivered(namespace, now, most),
        )  # fmt: skip

    async def _locks(
        self, slots: Sequence[Slot], announced: Sequence[Announced], instances: Sequence[InstanceFacts], now: datetime
    ) -> tuple[LockFacts, dict[Slot, LockFacts]]:
        """Return the fan-out lock and the locks of the slots."""
        fanout = LockName(self._namespace, "fanout")
        locks = {slot: LockName(self._namespace, "dispatch", *slot) for slot in slots}
        holders = await self._database.subscriptions.holders([fanout, *locks.values()])
        since = now - JUST_ANNOUNCED
        just_announced = {name for one in announced if one.last_seen_date > since for name in one.names}
        return LockFacts.of(0, holders.get(fanout), instances, now), {
            slot: LockFacts.of(
                slot.partition, holders.get(lock), instances, now, is_announced=slot.handler_name in just_announced
            )
            for slot, lock in locks.items()
        }

    async def _check(self) -> Sequence[str]:
        """Check the tables at most once a minute. Return the contract files that are not applied yet."""
        if machine.monotonic() - self._checked_at >= CHECKED_AGAIN:
            with suppress(SchemaNewer):  # during a deployment, this process is the older one and continues
                await self._database.schema.check()
            self._pending = await self._database.schema.pending()
            self._checked_at = machine.monotonic()
        return self._pending

    async def _now(self) -> tuple[datetime, float | None]:
        """Return the time by the clock that outboxio uses, and the offset of this machine's wall clock in seconds."""
        sent, said, answered = utc_now(), await self._database.now(), utc_now()
        if self._clock.is_user_supplied:
            return self._clock(), None
        await self._clock.measure(self._database.now)
        slow, fast = (sent - said).total_seconds(), (answered - said).total_seconds()
        return self._clock(), 0.0 if slow <= 0 <= fast else min(slow, fast, key=abs)

    async def _rows(
        self, names: Sequence[str], families: Families, counts: Mapping[str, PartitionCount], dead_names: Set[str],
        held: Mapping[Slot, LockFacts], now: datetime, most: int, most_keys: int,
    ) -> dict[str, RowFacts]:  # fmt: skip
        """Return the notifications of each stored name.

        ``dead_names``: the names whose DEAD and EXPIRED notifications are counted.
        """
        namespace, probes = self._namespace, self._database.probes
        slots = slots_of(counts, names)
        due = {one.handler_name: one for one in await probes.due(namespace, slots, now + SOON, most)}
        unheld = [slot for slot in slots if slot in held and not held[slot].is_held and due[slot.handler_name].due]
        unowned = {one.handler_name: one for one in await probes.due(namespace, unheld, now + SOON, most)}
        deferred = await self._database.deferred.count(namespace, slots, most)
        blocked = await probes.blocked(namespace, names, most)
        ended_names = sorted(dead_names & set(names))
        dead = {one.handler_name: one for one in await probes.dead(namespace, ended_names, now - HOUR, most)}
        parking = [family for family in families.values() if not dead_names.isdisjoint(family)]
        parked = await probes.parked(namespace, parking, most_keys) if parking else ()

        def rows_of(name: str) -> RowFacts:
            ended = dead.get(name, DeadFigures(name, 0, 0, None))
            without_owner = unowned.get(name, DueFigures(name, 0, 0, None))
            return RowFacts(
                due=due[name].due, oldest_due=due[name].oldest_due,
                unowned=without_owner.due, oldest_unowned=without_owner.oldest_due,
                waiting=due[name].waiting, retrying=due[name].retrying, far=due[name].far,
                deferred=[one for one in deferred if one.handler_name == name], blocked=blocked[name].number,
                dead=ended.number, dead_hour=ended.recent, newest_dead=ended.newest,
                parked=[key for key in parked if key.handler_name == name],
            )  # fmt: skip

        return {name: rows_of(name) for name in names}

    # --- errors ------------------------------------------------------------------------------------

    async def _completed(self, handler: HandlerFacts, minutes: Sequence[HandlerMinute], now: datetime) -> HandlerFacts:
        """Add the figures by minute to a handler, and its newest error if it is failing."""
        names = (handler.name, *handler.aliases)
        ours = [minute for minute in minutes if minute.handler_name in names]
        handler, error = replace(handler, minutes=ours), None
        if handler.is_failing(now):
            search = Search(states=_FAILURES, names=names)
            errors = (await self._database.search.last_errors(self._namespace, search, 1)).rows
            error = brief(self._redact(f"{errors[0].type}: {errors[0].message}")) if errors else None
        return replace(handler, last_error=error)

    async def _failing(self, handlers: Sequence[HandlerFacts], now: datetime) -> list[HandlerFacts]:
        """Add the notifications that have been failing for a long time to their handlers."""
        slots = [
            Slot(name, lock.partition)
            for one in handlers if one.retrying or any(minute.failed for minute in one.minutes)
            for name in (one.name, *one.aliases)
            for lock in one.locks
        ]  # fmt: skip
        before = now - self._failing_after
        found = await self._database.probes.failing(self._namespace, slots, before, MOST_FAILING) if slots else ()
        records = await self._database.stored_notifications.records(self._namespace, found, documents=False)
        failed = sorted(
            (since, record.sequence, record)
            for record in records
            if record.attempts and (since := failing_since(record)) < before
        )

        def with_failing(handler: HandlerFacts) -> HandlerFacts:
            ours = [one for one in failed if one[2].handler_name in (handler.name, *handler.aliases)]
            if not ours:
                return handler
            since, _, first = ours[0]
            error = first.errors[-1] if first.errors else {"type": "no error", "message": "is stored"}
            keys = sorted({record.ordering_key for _, _, record in ours if record.ordering_key is not None})
            text = brief(self._redact(f"{error.get('type')}: {error.get('message')}"))
            return replace(handler, failing=Failing(len(ours), since, text, keys))

        return list(map(with_failing, handlers))

    async def _failed_operations(self, now: datetime) -> list[Operation]:
        newest = await self._database.operations.select(self._namespace, _OPERATIONS, None)
        failed = [one for one in newest if one.state is OperationState.FAILED and one.updated_date > now - HOUR]
        return [redacted_error(one, self._redact) for one in failed]

    # --- metrics -----------------------------------------------------------------------------------

    async def figures(self) -> Figures:
        """Return the figures for metrics, each counted up to a bound, including stored names without a handler."""
        now, database = self._clock(), self._database
        facts = await self.rows_and_locks(now, most_keys=MAX_METRIC_KEYS)
        by_reason = waiting_in(facts)
        present = {name: one.name for one in facts.handlers for name in (*one.aliases, one.name)}
        present |= {name: handler.name for handler in self._handlers for name in handler.names}
        shown: dict[str, list[str]] = {}
        for name in facts.rows:
            shown.setdefault(present.get(name, name), []).append(name)
        wanted = {one.event_type for handler in self._handlers for one in self._handlers.subscriptions_of(handler)}
        wanted |= facts.wanted_types
        waits = [one for name, one in facts.undelivered.items() if name in wanted]
        return Figures(
            handlers={
                handler: _handler_figures(RowFacts.together([facts.rows[name] for name in names]), now)
                for handler, names in shown.items()
            },
            waiting={
                (handler, reason.value): sum(by_reason[name].get(reason, 0) for name in names)
                for handler, names in shown.items() for reason in Reason
            },
            jobs={job.name: _job_figures(job, now) for job in await database.jobs.all(self._namespace, errors=False)},
            undelivered=sum(one.number for one in waits),
            undelivered_age=_age(min((one.oldest for one in waits if one.oldest is not None), default=None), now),
            unwanted=sum(one.number for name, one in facts.undelivered.items() if name not in wanted),
            unroutable=sum(
                counts.get(Reason.NO_HANDLER, 0) + counts.get(Reason.VERSION, 0) for counts in by_reason.values()
            ),
        )  # fmt: skip


def failing_since(record: NotificationRecord) -> datetime:
    """Return when a notification first failed, as far as the last ten errors show."""
    first = record.errors[0] if record.errors else {}
    try:
        failed = naive_utc(datetime.fromisoformat(str(first.get("time"))))
    except ValueError:  # written by other tools
        return record.retention_from
    return record.retention_from if first.get("attempt") not in (None, 1) else max(failed, record.retention_from)


def _gone(subscriptions: Iterable[Announced], instances: Iterable[InstanceFacts], now: datetime) -> set[str]:
    """Return the handlers that no process has had for some minutes, although processes with other handlers run.

    After a time without any process, nothing is concluded from the first processes that start.
    """
    seen: dict[str, datetime] = {}
    for one in subscriptions:
        seen[one.handler_name] = max(one.last_seen_date, seen.get(one.handler_name, one.last_seen_date))
    started = [one.started for one in instances if one.is_alive]
    if started and min(started) > now - GONE_AFTER:
        return set()
    return {name for name, last in seen.items() if last < max(seen.values()) - GONE_AFTER}


def _present(handlers: Sequence[HandlerFacts]) -> list[HandlerFacts]:
    """Return the handlers except those that were renamed and run under their new name."""
    names = {alias for one in handlers if not one.is_gone for alias in one.aliases}
    return [one for one in handlers if not (one.is_gone and one.name in names)]


def _unreachable(error: Exception) -> str:
    """Return why a shard cannot be reached. Only the reason is shortened, not the address before it."""
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
    """Return the ``alert_age`` of each handler, from the code of this process or else from the reports."""
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
