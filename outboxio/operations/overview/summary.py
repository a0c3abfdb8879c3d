"""From the facts of all shards to the overview. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from outboxio.operations.overview.facts import Facts, HandlerFacts, InstanceFacts, ShardFacts
from outboxio.operations.overview.rules import FAILING_WITHIN, RULE_NAMES, failures, findings_of
from outboxio.operations.overview.values import (
    MOST,
    Finding,
    HandlerStatus,
    InstanceStatus,
    Level,
    Overview,
    OverviewFigures,
    ShardStatus,
)
from outboxio.operations.overview.wording import spoken
from outboxio.statistics.figures import DURATIONS, LAGS, added, percentile
from outboxio.storage.protocols import HandlerMinute

MINUTES = 60
SEVERITY: dict[Level, int] = {"ok": 0, "degraded": 1, "down": 2}


def overview_of(facts: Facts) -> Overview:
    """The overview of facts."""
    findings = _sorted([_placed(finding, facts) for shard in facts.shards for finding in findings_of(shard)])
    level = _level(facts, findings)
    if level != "down":  # other shards work: the fault of a shard is the fault of a part
        findings = [replace(finding, level="degraded") for finding in findings]
    handlers = _handlers(facts, findings)
    figures = _figures(facts, handlers)
    return Overview(
        level=level,
        verdict=[finding.sentence for finding in findings] or [_all_is_well(handlers, figures)],
        findings=tuple(findings),
        figures=figures,
        handlers=handlers,
        instances=_instances(facts),
        shards=tuple(_shard(shard) for shard in facts.shards),
        namespace=facts.namespace,
        read_date=facts.shards[0].now,
        took=facts.took,
    )


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first: by level, then in the order of the rules."""
    return sorted(findings, key=lambda finding: (-SEVERITY[finding.level], RULE_NAMES.index(finding.rule)))


def _placed(finding: Finding, facts: Facts) -> Finding:
    """The finding, with the shard in the sentence if there are several shards."""
    if len(facts.shards) == 1 or f"`{finding.shard}`" in finding.sentence:
        return finding
    return replace(finding, sentence=f"{finding.sentence.rstrip('.')} (shard `{finding.shard}`).")


def _level(facts: Facts, findings: Sequence[Finding]) -> Level:
    """The worst level. An outbox is down only if all shards are down."""
    down = {finding.shard for finding in findings if finding.level == "down"}
    if len(down) == len(facts.shards):
        return "down"
    return "degraded" if findings else "ok"


def _all_is_well(handlers: Sequence[HandlerStatus], figures: OverviewFigures) -> str:
    number = f"{len(handlers)} handler{'' if len(handlers) == 1 else 's'}"
    oldest = "nothing is due" if figures.oldest_due is None else f"oldest due {spoken(figures.oldest_due)}"
    rate = figures.per_minute
    return f"All is well: {number}, {rate:,.0f} notification{'' if round(rate) == 1 else 's'} a minute, {oldest}."


# --- handlers ------------------------------------------------------------------------------------


def _handlers(facts: Facts, findings: Sequence[Finding]) -> tuple[HandlerStatus, ...]:
    """The handlers, the worst first: by level, then by the age of what is due."""
    known: dict[str, list[tuple[ShardFacts, HandlerFacts]]] = {}
    for shard in facts.shards:
        for handler in shard.handlers:
            known.setdefault(handler.name, []).append((shard, handler))
    instances = _alive(facts)
    levels: dict[str | None, Level] = {
        finding.handler: finding.level for finding in sorted(findings, key=lambda one: SEVERITY[one.level])
    }
    made = [_handler(name, on, instances, levels.get(name, "ok")) for name, on in known.items()]
    return tuple(sorted(made, key=lambda one: (-SEVERITY[one.level], -(one.oldest_due or 0), one.handler_name)))


def _handler(
    name: str, on: Sequence[tuple[ShardFacts, HandlerFacts]], instances: Sequence[InstanceFacts], level: Level
) -> HandlerStatus:
    facts = [handler for _, handler in on]
    minutes = [minute for handler in facts for minute in handler.minutes]
    ages = [shard.age(handler.oldest_due) for shard, handler in on if handler.oldest_due is not None]
    runs = [failures(shard, handler) for shard, handler in on]
    number = sum(each for each, _ in runs)
    failed = sum(each * share for each, share in runs)
    reports = [instance.report.handlers[name] for instance in instances if name in instance.report.handlers]
    return HandlerStatus(
        handler_name=name,
        aliases=_union(handler.aliases for handler in facts),
        event_types=_union(handler.event_types for handler in facts),
        topics=_union(handler.topics for handler in facts),
        level=level,
        last_seen_date=_latest(handler.last_seen for handler in facts),
        due=_sum(handler.due for handler in facts),
        oldest_due=max(ages, default=None),
        waiting=_sum(handler.waiting for handler in facts),
        deferred=_sum(one.number for handler in facts for one in handler.deferred),
        blocked=_sum(handler.blocked for handler in facts),
        dead=_sum(handler.dead for handler in facts),
        dead_hour=_sum(handler.dead_hour for handler in facts),
        newest_dead=_latest(handler.newest_dead for handler in facts),
        parked_keys=sum(len(handler.parked) for handler in facts),
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
    )


def _holders(handler: HandlerFacts) -> tuple[str, ...]:
    return tuple(sorted({lock.owner for lock in handler.locks if lock.owner is not None and lock.is_held}))


def _sparkline(shard: ShardFacts, minutes: Iterable[HandlerMinute]) -> tuple[int, ...]:
    """The successes of each of the last 60 minutes, the present minute last."""
    present = shard.now.replace(second=0, microsecond=0)
    counts = [0] * MINUTES
    for minute in minutes:
        ago = round((present - minute.minute_date) / timedelta(minutes=1))
        if 0 <= ago < MINUTES:
            counts[MINUTES - 1 - ago] += minute.succeeded
    return tuple(counts)


def _percentile(bounds: Sequence[float], histograms: Sequence[Sequence[int]], share: float) -> float | None:
    return percentile(bounds, added(histograms), share) if histograms else None


# --- the rest ------------------------------------------------------------------------------------


def _figures(facts: Facts, handlers: Sequence[HandlerStatus]) -> OverviewFigures:
    shards = [_shard(shard) for shard in facts.shards]
    lags = [minute.lags for shard in facts.shards for handler in shard.handlers for minute in handler.minutes]
    return OverviewFigures(
        undelivered=_sum(shard.undelivered for shard in shards),
        oldest_undelivered=_oldest(shard.oldest_undelivered for shard in shards),
        due=_sum(handler.due for handler in handlers),
        oldest_due=_oldest(handler.oldest_due for handler in handlers),
        waiting=_sum(handler.waiting for handler in handlers),
        blocked=_sum(handler.blocked for handler in handlers),
        dead=_sum(handler.dead for handler in handlers),
        dead_hour=_sum(handler.dead_hour for handler in handlers),
        parked_keys=sum(handler.parked_keys for handler in handlers),
        unroutable=_sum(
            [
                *(number for shard in facts.shards for number in shard.unroutable.values()),
                *(handler.deferred for handler in handlers),
            ]
        ),
        per_minute=sum(handler.per_minute for handler in handlers),
        minutes=tuple(map(sum, zip(*(handler.minutes for handler in handlers), strict=True))) or (0,) * MINUTES,
        lag_p95=_percentile(LAGS, lags, 0.95),
        in_flight=sum(handler.in_flight for handler in handlers),
        stuck=sum(instance.stuck for instance in _instances(facts) if instance.is_alive),
    )


def _shard(shard: ShardFacts) -> ShardStatus:
    wanted = [waiting for name, waiting in shard.undelivered.items() if name in shard.wanted_types]
    return ShardStatus(
        shard=shard.name,
        is_reachable=shard.error is None,
        error=shard.error,
        schema=shard.schema,
        pending=tuple(shard.pending),
        fanout_holder=shard.fanout.owner if shard.fanout.is_held else None,
        fanout_since=shard.fanout.since if shard.fanout.is_held else None,
        undelivered=_sum(waiting.number for waiting in wanted),
        oldest_undelivered=_oldest(None if each.oldest is None else shard.age(each.oldest) for each in wanted),
        clock_offset=shard.clock_offset,
        took=shard.took,
    )


def _instances(facts: Facts) -> tuple[InstanceStatus, ...]:
    """The processes, each once. A process reports to all of its shards."""
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


def _alive(facts: Facts) -> list[InstanceFacts]:
    return [instance for shard in facts.shards for instance in shard.instances if instance.is_alive]


def _sum(numbers: Iterable[int]) -> int:
    """The sum of numbers that were each counted up to the bound, again up to the bound."""
    return min(MOST, sum(numbers))


def _oldest(ages: Iterable[float | None]) -> float | None:
    return max((age for age in ages if age is not None), default=None)


def _latest(moments: Iterable[datetime | None]) -> datetime | None:
    return max((moment for moment in moments if moment is not None), default=None)


def _union(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({name for each in names for name in each}))
