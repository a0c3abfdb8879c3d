"""Builds the overview of ``outbox.admin`` from the facts of all shards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from outboxio.health.collector import Collector
from outboxio.health.engine import worst
from outboxio.health.facts import FAILING_WITHIN, Facts, HandlerFacts, InstanceFacts, RowFacts, ShardFacts
from outboxio.health.reasons import Reason, counts_of, waiting_in
from outboxio.health.rules import RULES
from outboxio.health.values import (
    MOST,
    Finding,
    HandlerStatus,
    InstanceStatus,
    Level,
    Overview,
    OverviewFigures,
    ShardStatus,
    human_duration,
)
from outboxio.statistics.figures import DURATIONS, LAGS, added, percentile
from outboxio.storage.protocols import HandlerMinute
from outboxio.support import machine

FRESH = 1.0  # seconds for which facts are cached
MINUTES = 60
SEVERITY: dict[Level, int] = {"ok": 0, "degraded": 1, "down": 2}


class OverviewReader:
    """Reads the facts of all shards and builds the overview.

    Reads the databases at most once a second, however many callers there are.
    """

    def __init__(self, namespace: str, collectors: Sequence[Collector]) -> None:
        self.collectors = {collector.shard: collector for collector in collectors}
        self._namespace = namespace
        self._last: tuple[Facts, Overview] | None = None
        self._read_at = float("-inf")
        self._operations = 0
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def read(self) -> tuple[Facts, Overview]:
        """Return facts and overview, at most 1 s old and not older than the last operation of this process."""
        async with self._in_turn():
            if self._last is None or machine.monotonic() - self._read_at >= FRESH:
                began, operations = machine.monotonic(), self._operations
                shards = await asyncio.gather(*(collector.collect() for collector in self.collectors.values()))
                facts = Facts(namespace=self._namespace, shards=shards, took=machine.monotonic() - began)
                self._last = facts, overview_of(facts)
                self._read_at = machine.monotonic() if operations == self._operations else float("-inf")
            return self._last

    def operation_ended(self) -> None:
        """Discard the cached facts, because an operation of this process has ended."""
        self._operations += 1
        self._read_at = float("-inf")

    def _in_turn(self) -> asyncio.Lock:
        """Return the lock of the running event loop. After a loop has ended, an outbox may be used in a new one."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = loop, asyncio.Lock()
        return self._turn[1]


def waiting_by_reason(facts: Facts) -> Counter[Reason]:
    """Count all unfinished rows by reason, each row once."""
    counts = Counter[Reason](dict.fromkeys(Reason, 0))
    for shard in facts.shards:
        for by_reason in waiting_in(shard).values():
            counts.update(by_reason)
    return counts


def overview_of(facts: Facts) -> Overview:
    """Build the overview from facts."""
    findings = RULES.apply(facts)
    shards, instances = tuple(map(_shard, facts.shards)), _instances(facts)
    handlers = _handlers(facts, findings)
    figures = _figures(facts, handlers, shards, instances)
    return Overview(
        level=worst(findings),
        verdict=[finding.text for finding in findings] or [_all_is_well(handlers, figures)],
        findings=tuple(findings),
        figures=figures,
        handlers=handlers,
        instances=instances,
        shards=shards,
        namespace=facts.namespace,
        read_date=facts.shards[0].now,
        took=facts.took,
    )


def _all_is_well(handlers: Sequence[HandlerStatus], figures: OverviewFigures) -> str:
    number = f"{len(handlers)} handler{'' if len(handlers) == 1 else 's'}"
    oldest = "nothing is due" if figures.oldest_due is None else f"oldest due {human_duration(figures.oldest_due)}"
    rate = figures.per_minute
    return f"All is well: {number}, {rate:,.0f} notification{'' if round(rate) == 1 else 's'} a minute, {oldest}."


# --- handlers ------------------------------------------------------------------------------------


def _handlers(facts: Facts, findings: Sequence[Finding]) -> tuple[HandlerStatus, ...]:
    """Return the handlers, worst first: by level, then by the age of the oldest due notification."""
    known: dict[str, list[tuple[ShardFacts, HandlerFacts]]] = {}
    for shard in facts.shards:
        for handler in shard.handlers:
            known.setdefault(handler.name, []).append((shard, handler))
    alive = [instance for shard in facts.shards for instance in shard.alive]
    levels: dict[str | None, Level] = {one.handler: one.level for one in reversed(findings)}  # worst last
    made = [_handler(name, on, alive, levels.get(name, "ok")) for name, on in known.items()]
    return tuple(sorted(made, key=lambda one: (-SEVERITY[one.level], -(one.oldest_due or 0), one.handler_name)))


def _handler(
    name: str, on: Sequence[tuple[ShardFacts, HandlerFacts]], instances: Sequence[InstanceFacts], level: Level
) -> HandlerStatus:
    facts = [handler for _, handler in on]
    rows = RowFacts.together(facts)
    minutes = [minute for handler in facts for minute in handler.minutes]
    runs = [handler.failures(shard.now) for shard, handler in on]
    number, failed = sum(each for each, _ in runs), sum(each * share for each, share in runs)
    reports = [instance.report.handlers[name] for instance in instances if name in instance.report.handlers]
    options_from, options = _options(name, instances)
    return HandlerStatus(
        handler_name=name,
        aliases=_union(handler.aliases for handler in facts),
        event_types=_union(handler.event_types for handler in facts),
        topics=_union(handler.topics for handler in facts),
        level=level,
        last_seen_date=_highest(handler.last_seen for handler in facts),
        due=rows.due,
        oldest_due=_highest(shard.age_of(handler.oldest_due) for shard, handler in on),
        waiting=rows.waiting,
        blocked=rows.blocked,
        dead=rows.dead,
        dead_hour=rows.dead_hour,
        newest_dead=rows.newest_dead,
        parked_keys=len(rows.parked),
        paused_since=min((handler.paused_since for handler in facts if handler.paused_since), default=None),
        holders={shard.name: _holders(handler) for shard, handler in on},
        unheld={
            shard.name: tuple(lock.partition for lock in handler.locks if not lock.is_held) for shard, handler in on
        },
        runs=number,
        fail_share=failed / number if number else None,
        per_minute=(number - failed) / (FAILING_WITHIN / timedelta(minutes=1)),
        minutes=_sparkline(on[0][0], minutes),
        duration_p50=_percentile(DURATIONS, [minute.durations for minute in minutes], 0.5),
        duration_p95=_percentile(DURATIONS, [minute.durations for minute in minutes], 0.95),
        lag_p95=_percentile(LAGS, [minute.lags for minute in minutes], 0.95),
        in_flight=sum(report.in_flight for report in reports),
        limit=sum(report.limit for report in reports),
        stuck=sum(report.stuck for report in reports),
        limited_to=next((report.limited_to for report in reports if report.limited_to), None),
        reasons=_reasons(on),
        options=options,
        options_from=options_from,
    )


def _reasons(on: Sequence[tuple[ShardFacts, HandlerFacts]]) -> dict[str, int]:
    counts = Counter[Reason]()
    for shard, handler in on:
        counts.update(counts_of(handler, handler, shard))
    return {reason.value: min(MOST, counts[reason]) for reason in Reason if counts[reason]}


def _options(name: str, instances: Sequence[InstanceFacts]) -> tuple[str | None, Mapping[str, str] | None]:
    """Return the newest process that reports the options of a handler, and the options."""
    for one in sorted(instances, key=lambda one: one.started, reverse=True):
        if name in one.report.handlers and one.report.options is not None:
            return one.instance, one.report.options.get(name, {})
    return None, None


def _holders(handler: HandlerFacts) -> tuple[str, ...]:
    return tuple(sorted({lock.owner for lock in handler.locks if lock.owner is not None and lock.is_held}))


def _sparkline(shard: ShardFacts, minutes: Iterable[HandlerMinute]) -> tuple[int, ...]:
    """Return the successes in each of the last 60 minutes, the current minute last."""
    present = shard.now.replace(second=0, microsecond=0)
    counts = [0] * MINUTES
    for minute in minutes:
        ago = round((present - minute.minute_date) / timedelta(minutes=1))
        if 0 <= ago < MINUTES:
            counts[MINUTES - 1 - ago] += minute.succeeded
    return tuple(counts)


def _percentile(bounds: Sequence[float], histograms: Sequence[Sequence[int]], share: float) -> float | None:
    return percentile(bounds, added(histograms), share) if histograms else None


# --- figures, shards and processes ---------------------------------------------------------------


def _figures(
    facts: Facts, handlers: Sequence[HandlerStatus], shards: Sequence[ShardStatus], instances: Sequence[InstanceStatus]
) -> OverviewFigures:
    """Add up the figures of all handlers and shards."""
    lags = [minute.lags for shard in facts.shards for handler in shard.handlers for minute in handler.minutes]
    waits = waiting_by_reason(facts)
    counts: dict[str, Any] = {
        name: _sum(getattr(handler, name) for handler in handlers)
        for name in ("due", "waiting", "blocked", "dead", "dead_hour")
    }
    return OverviewFigures(
        undelivered=_sum(shard.undelivered for shard in shards),
        oldest_undelivered=_highest(shard.oldest_undelivered for shard in shards),
        oldest_due=_highest(handler.oldest_due for handler in handlers),
        parked_keys=sum(handler.parked_keys for handler in handlers),
        unroutable=_sum([waits[Reason.NO_HANDLER], waits[Reason.VERSION]]),
        reasons={reason.value: min(MOST, number) for reason, number in waits.items()},
        per_minute=sum(handler.per_minute for handler in handlers),
        minutes=tuple(map(sum, zip(*(handler.minutes for handler in handlers), strict=True))) or (0,) * MINUTES,
        lag_p95=_percentile(LAGS, lags, 0.95),
        in_flight=sum(handler.in_flight for handler in handlers),
        stuck=sum(instance.stuck for instance in instances if instance.is_alive),
        **counts,
    )


def _shard(shard: ShardFacts) -> ShardStatus:
    held = shard.fanout.is_held
    return ShardStatus(
        shard=shard.name,
        is_reachable=shard.error is None,
        error=shard.error,
        schema=shard.schema,
        pending=tuple(shard.pending),
        fanout_holder=shard.fanout.owner if held else None,
        fanout_since=shard.fanout.since if held else None,
        undelivered=_sum([shard.wanted.number]),
        oldest_undelivered=shard.age_of(shard.wanted.oldest),
        clock_offset=shard.clock_offset,
        took=shard.took,
    )


def _instances(facts: Facts) -> tuple[InstanceStatus, ...]:
    """Return each process once, although it reports to all of its shards."""
    on: dict[str, list[tuple[str, InstanceFacts]]] = {}
    for shard in facts.shards:
        for instance in shard.instances:
            on.setdefault(instance.instance, []).append((shard.name, instance))
    return tuple(_instance([shard for shard, _ in each], [one for _, one in each]) for _, each in sorted(on.items()))


def _instance(shards: Sequence[str], reports: Sequence[InstanceFacts]) -> InstanceStatus:
    newest = max(reports, key=lambda one: one.last_seen)
    handlers = [handler for one in reports for handler in one.report.handlers.values()]
    return InstanceStatus(
        instance=newest.instance,
        version=newest.version,
        roles=newest.report.roles,
        jobs=_union(one.report.jobs for one in reports),
        started_date=newest.started,
        last_seen_date=newest.last_seen,
        is_alive=any(one.is_alive for one in reports),
        loop_lag=newest.report.loop_lag,
        clock_offset=newest.report.clock_offset,
        in_flight=sum(handler.in_flight for handler in handlers),
        stuck=sum(handler.stuck for handler in handlers),
        handlers=_union(tuple(one.report.handlers) for one in reports),
        shards=tuple(shards),
        stuck_runs=tuple(run for one in reports for run in one.report.stuck),
    )


def _sum(numbers: Iterable[int]) -> int:
    """Add counts that stop at the bound; the sum stops there too."""
    return min(MOST, sum(numbers))


_Value = TypeVar("_Value", float, datetime)


def _highest(values: Iterable[_Value | None]) -> _Value | None:
    return max((value for value in values if value is not None), default=None)


def _union(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({name for each in names for name in each}))
