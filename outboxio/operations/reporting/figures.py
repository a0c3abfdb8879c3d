"""Reads the figures of the tables for metrics, in the process that fans out, while metrics want the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from outboxio.handlers.handler import HandlerRegistry
from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.model.lock_name import Slot
from outboxio.model.operating.operation import JobRow
from outboxio.operations.overview.job_rules import has_failed
from outboxio.operations.partitions.owners import counts_of
from outboxio.statistics.figures import MOST_COUNTED, Figures, HandlerFigures, JobFigures
from outboxio.statistics.shard import ShardStatistics
from outboxio.storage.protocols import Announced, Database, slots_of
from outboxio.storage.protocols.operating import DueFigures
from outboxio.support.clock import ShardClock

FIGURES_DELAY = 15.0  # seconds between two reads
RECENT = timedelta(hours=1)
MOST_KEYS = 1000  # parked keys that are counted


class FigureReader:
    """Reads the figures of a shard: about ten statements, each of which reads index entries up to a bound."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        handlers: HandlerRegistry,
        clock: ShardClock,
        statistics: ShardStatistics,
        *,
        fans_out: Callable[[], bool],
        seen_since: Callable[[], datetime],
    ) -> None:
        """``seen_since``: see ``Announcer``."""
        self._namespace = namespace
        self._database = database
        self._handlers = handlers
        self._clock = clock
        self._statistics = statistics
        self._fans_out = fans_out
        self._seen_since = seen_since

    async def run_once(self) -> RoundResult:
        """Read the figures, if metrics want the figures and this process fans out."""
        if not (self._statistics.figures_wanted and self._fans_out()):
            self._statistics.figures = None
            return NOTHING
        try:
            self._statistics.figures = await self.read()
        except BaseException:
            self._statistics.figures = None  # old figures would hide that the tables cannot be read
            raise
        return NOTHING

    async def read(self) -> Figures:
        """The figures of now. A number of 10,000 stands for 10,000 or more."""
        now, probes, namespace = self._clock(), self._database.probes, self._namespace
        announced = await self._database.subscriptions.announced(namespace)
        present = self._present_names(announced)
        stored = sorted({*present, *await self._database.stored_notifications.unfinished_names(namespace)})
        slots = await self._slots(stored)
        figures = _ByHandler(present)
        due = await probes.due(namespace, slots, now, MOST_COUNTED)
        figures.add_due(due, now)
        for dead in await probes.dead(namespace, await probes.dead_names(namespace), now - RECENT, MOST_COUNTED):
            figures.add(dead.handler_name, dead=dead.number, dead_recently=dead.recent)
        ordered = self._ordered(present)
        for name, counted in (
            await probes.blocked(namespace, [name for names in ordered for name in names], MOST_COUNTED)
        ).items():
            figures.add(name, blocked=counted.number)
        for key in await probes.parked(namespace, ordered, MOST_KEYS):
            figures.add(key.handler_name, parked_keys=1)
        waiting = await probes.undelivered(namespace, now, MOST_COUNTED)
        wanted = waiting.keys() & self._wanted_types(announced)
        dates = (waiting[name].oldest for name in wanted)
        oldest = min((date for date in dates if date is not None), default=None)
        jobs = await self._database.jobs.all(namespace, errors=False)
        return Figures(
            moment=now,
            handlers=figures.handlers,
            jobs={job.name: _job_figures(job, now) for job in jobs},
            undelivered=sum(waiting[name].number for name in wanted),
            undelivered_age=_age(oldest, now),
            unwanted=sum(one.number for name, one in waiting.items() if name not in wanted),
            unroutable=await self._unroutable(slots, due),
        )

    def _present_names(self, announced: Iterable[Announced]) -> dict[str, str]:
        """The present name of each handler by stored name: of the handlers here, and of all announced handlers."""
        names = {name: one.handler_name for one in announced for name in one.names}
        return names | {name: handler.name for handler in self._handlers for name in handler.names}

    def _wanted_types(self, announced: Iterable[Announced]) -> set[str]:
        ours = {one.event_type for handler in self._handlers for one in self._handlers.wanted_by(handler)}
        return ours | {one.event_type for one in announced}

    async def _slots(self, stored: Iterable[str]) -> list[Slot]:
        return slots_of(await counts_of(self._database, self._namespace), stored)

    def _ordered(self, present: Mapping[str, str]) -> list[list[str]]:
        """The stored names of each handler that may have key queues. A handler of another process may be ordered."""
        families: dict[str, list[str]] = {}
        for stored, name in present.items():
            handler = self._handlers.find(name)
            if handler is None or handler.options.ordered:
                families.setdefault(name, []).append(stored)
        return [sorted(names) for names in families.values()]

    async def _unroutable(self, slots: Sequence[Slot], due: Sequence[DueFigures]) -> int:
        routable = await self._database.subscriptions.routable_names(self._namespace, self._seen_since())
        routable |= set(self._handlers.names)
        deferred = await self._database.deferred.count(self._namespace, slots, MOST_COUNTED)
        return sum(one.number for one in deferred) + sum(
            one.due + one.waiting for one in due if one.handler_name not in routable
        )


class _ByHandler:
    """Adds the figures of stored handler names up, by the present name of the handler."""

    def __init__(self, present: Mapping[str, str]) -> None:
        self._present = present
        self.handlers: dict[str, HandlerFigures] = {name: HandlerFigures() for name in sorted(set(present.values()))}

    def add_due(self, due: Iterable[DueFigures], now: datetime) -> None:
        for one in due:
            self.add(one.handler_name, due=one.due, retrying=one.waiting)
            name = self._present.get(one.handler_name, one.handler_name)
            age = max(self.handlers[name].due_age, _age(one.oldest_due, now))
            self.handlers[name] = replace(self.handlers[name], due_age=age)

    def add(self, stored: str, **numbers: int) -> None:
        name = self._present.get(stored, stored)
        figures = self.handlers.get(name, HandlerFigures())
        self.handlers[name] = replace(
            figures, **{field: getattr(figures, field) + number for field, number in numbers.items()}
        )


def _job_figures(job: JobRow, now: datetime) -> JobFigures:
    waits = job.state != "RUNNING" and (job.paused_date is None or job.ordered_date is not None)
    return JobFigures(
        due_age=_age(job.due_date, now) if waits else 0.0,
        failing=has_failed(job),
        paused=job.paused_date is not None,
    )


def _age(moment: datetime | None, now: datetime) -> float:
    return 0.0 if moment is None else max(0.0, (now - moment).total_seconds())
