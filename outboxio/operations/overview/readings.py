"""From the answers of a database to the facts about handlers. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.options import ALERT_AGE
from outboxio.model.lock_name import LockName, Slot
from outboxio.model.redaction import Redact, keep_all
from outboxio.operations.overview.facts import HandlerFacts, InstanceFacts, LockFacts, Report
from outboxio.operations.overview.rules import JUST_ANNOUNCED
from outboxio.operations.overview.values import MOST
from outboxio.storage.protocols import (
    Announced,
    Counted,
    DeadFigures,
    DeferredFigures,
    DueFigures,
    HandlerMinute,
    Holder,
    InstanceReport,
    ParkedKey,
    PartitionCount,
    Pause,
    slots_of,
)


class KnownHandlers(Struct, frozen=True):
    """The handlers of a shard by present name, and the numbers of partitions by stored name."""

    handlers: Mapping[str, Sequence[Announced]]
    counts: Mapping[str, PartitionCount]

    def names_of(self, handler: str) -> list[str]:
        """The present name of a handler, and its aliases."""
        return sorted({handler, *(name for one in self.handlers[handler] for name in one.names)})

    @property
    def names(self) -> set[str]:
        """All stored names."""
        return {name for handler in self.handlers for name in self.names_of(handler)}

    def slots(self, names: Iterable[str]) -> list[Slot]:
        """The slots of stored names."""
        return slots_of(self.counts, sorted(names))


class Readings(Struct, frozen=True, kw_only=True):
    """The answers of a database about all handlers of a shard."""

    now: datetime
    instances: Sequence[InstanceFacts]
    due: Sequence[DueFigures]
    deferred: Sequence[DeferredFigures]
    blocked: Mapping[str, Counted]
    dead: Sequence[DeadFigures]
    parked: Sequence[ParkedKey]
    locks: Sequence[LockName]
    holders: Mapping[LockName, Holder]
    pauses: Sequence[Pause]
    minutes: Sequence[HandlerMinute]
    alert_ages: Mapping[str, timedelta]

    def facts(self, known: KnownHandlers, handler: str) -> HandlerFacts:
        """The facts of a handler: the numbers of all of its names together."""
        family, announced = known.names_of(handler), known.handlers[handler]
        last_seen = max(one.last_seen_date for one in announced)
        due = [one for one in self.due if one.handler_name in family]
        dead = [one for one in self.dead if one.handler_name in family]
        paused = [one for one in self.pauses if one.handler_name in family and one.ended_date is None]
        return HandlerFacts(
            name=handler,
            aliases=tuple(name for name in family if name != handler),
            event_types=tuple(sorted({one.event_type for one in announced if one.event_type})),
            topics=tuple(sorted({one.topic for one in announced if one.topic})),
            last_seen=last_seen,
            due=min(MOST, sum(one.due for one in due)),
            oldest_due=min((one.oldest_due for one in due if one.oldest_due is not None), default=None),
            waiting=min(MOST, sum(one.waiting for one in due)),
            deferred=[one for one in self.deferred if one.handler_name in family],
            blocked=min(MOST, sum(self.blocked[name].number for name in family if name in self.blocked)),
            dead=min(MOST, sum(one.number for one in dead)),
            dead_hour=min(MOST, sum(one.recent for one in dead)),
            newest_dead=max((one.newest for one in dead if one.newest is not None), default=None),
            parked=[key for key in self.parked if key.handler_name in family],
            locks=self._locks_of(handler, is_announced=self.now - last_seen < JUST_ANNOUNCED),
            paused_since=min((one.paused_date or self.now for one in paused), default=None),
            minutes=[minute for minute in self.minutes if minute.handler_name in family],
            alert_age=self.alert_ages.get(handler, ALERT_AGE),
        )

    def _locks_of(self, handler: str, *, is_announced: bool) -> list[LockFacts]:
        return [
            lock_facts(name.partition, self.holders.get(name), self.instances, self.now, is_announced=is_announced)
            for name in self.locks
            if name.handler_name == handler
        ]


def lock_facts(
    partition: int, holder: Holder | None, instances: Sequence[InstanceFacts], now: datetime, *, is_announced: bool
) -> LockFacts:
    """A lock and its holder. ``is_announced``: True if a process has announced the handler just now.

    A holder without a report is a drain, or a process of an older version, if the handler was announced just now.
    Otherwise the holder died long ago, and its report was removed.
    """
    if holder is None or holder.has_given_back:
        return LockFacts(partition=partition)
    reports = [one for one in instances if one.instance == holder.owner]
    if reports:
        is_dead = not any(one.is_alive for one in reports)
    else:
        is_dead = not is_announced and now - holder.since > JUST_ANNOUNCED
    return LockFacts(partition=partition, owner=holder.owner, since=holder.since, is_dead=is_dead)


def instance_facts(one: InstanceReport, now: datetime, redact: Redact = keep_all) -> InstanceFacts:
    """A process, by its report. The process may have another ``redact``, or none."""
    return InstanceFacts(
        instance=one.instance,
        version=one.version,
        started=one.started_date,
        last_seen=one.last_seen_date,
        is_alive=one.is_alive(now),
        report=_redacted(_report(one.report), redact),
    )


def alert_ages(instances: Iterable[InstanceFacts], handlers: HandlerRegistry) -> dict[str, timedelta]:
    """The ``alert_age`` of each handler: by the code of this process, or else by the reports."""
    ages = {
        name: timedelta(seconds=report.alert_age)
        for instance in instances
        for name, report in instance.report.handlers.items()
        if report.alert_age is not None
    }
    return {**ages, **{handler.name: handler.options.alert_age for handler in handlers}}


def _report(raw: msgspec.Raw) -> Report:
    """The report of a process. A report of an unknown shape has no values."""
    try:
        return msgspec.json.decode(bytes(raw), type=Report)
    except msgspec.MsgspecError:
        return Report()


def _redacted(report: Report, redact: Redact) -> Report:
    handlers = {
        name: one if one.rest is None else replace(one, rest=replace(one.rest, reason=redact(one.rest.reason)))
        for name, one in report.handlers.items()
    }
    return replace(report, handlers=handlers)
