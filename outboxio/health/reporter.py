"""Figures by minute: the difference between the statistics at the start and the end of each minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

import msgspec

from outboxio.loops.loop import RoundResult
from outboxio.statistics.figures import added
from outboxio.statistics.handlers import OUTCOMES, HandlerStatistics
from outboxio.statistics.shard import ShardStatistics
from outboxio.storage.protocols import Database
from outboxio.storage.protocols.operating import HandlerMinute, InstanceReport
from outboxio.support import machine
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of

MOST_UNWRITTEN = 5_000  # rows that are kept while the database cannot be reached

_Numbers = tuple[list[int], list[int], list[int]]
"""The outcomes with the total duration in us, the duration buckets and the lag buckets of a handler."""


class MinuteKeeper:
    """Splits the statistics of a shard into minutes of the database clock.

    A row of the current minute may be written before the minute is over. The row of the whole minute replaces it.
    """

    def __init__(self, statistics: ShardStatistics) -> None:
        self._statistics = statistics
        self._minute = datetime.min
        self._base: dict[str, _Numbers] = {}
        self._unwritten: dict[tuple[datetime, str], HandlerMinute] = {}

    def begin(self, now: datetime) -> None:
        """Start counting, unless this minute is already being counted."""
        if _minute_of(now) != self._minute:
            self._cut(now)

    def over(self, now: datetime) -> list[HandlerMinute]:
        """Return the rows of completed minutes, including earlier ones that could not be written."""
        if _minute_of(now) != self._minute:
            self._keep(self._rows())
            self._cut(now)
        return list(self._unwritten.values())

    def with_present(self, now: datetime) -> list[HandlerMinute]:
        """Return the rows of :meth:`over`, and those of the current minute so far."""
        return [*self.over(now), *self._rows()]

    def written(self, rows: Iterable[HandlerMinute]) -> None:
        """Mark rows as written."""
        for row in rows:
            self._unwritten.pop((row.minute_date, row.handler_name), None)

    def _cut(self, now: datetime) -> None:
        self._minute = _minute_of(now)
        self._base = {name: _numbers(one) for name, one in self._statistics.handlers.items()}

    def _keep(self, rows: Iterable[HandlerMinute]) -> None:
        for row in rows:
            self._unwritten[row.minute_date, row.handler_name] = row
        while len(self._unwritten) > MOST_UNWRITTEN:
            del self._unwritten[next(iter(self._unwritten))]

    def _rows(self) -> list[HandlerMinute]:
        """Return a row for each handler with runs in the minute."""
        rows: list[HandlerMinute] = []
        for name, handler in self._statistics.handlers.items():
            base = self._base.get(name)
            outcomes, durations, lags = (
                _difference(now, then) for now, then in zip(_numbers(handler), base or _numbers_of_nothing, strict=True)
            )
            if any(outcomes) or any(durations) or any(lags):
                *counts, duration_us = outcomes
                rows.append(
                    HandlerMinute(
                        handler_name=name, minute_date=self._minute, duration_us=duration_us,
                        durations=tuple(durations), lags=tuple(lags), **dict(zip(OUTCOMES, counts, strict=True)),
                    )
                )  # fmt: skip
        return rows


def _numbers(handler: HandlerStatistics) -> _Numbers:
    histograms = handler.durations
    seconds = sum(histogram.seconds for histogram in histograms)
    outcomes = [*(getattr(handler, name) for name in OUTCOMES), int(seconds * 1e6)]
    return outcomes, added(histogram.buckets for histogram in histograms), list(handler.lag.buckets)


def _difference(now: list[int], then: list[int]) -> list[int]:
    return [a - b for a, b in zip(now, then, strict=True)]


def _minute_of(time: datetime) -> datetime:
    return time.replace(second=0, microsecond=0)


_numbers_of_nothing = _numbers(HandlerStatistics())


# --- the reporter ---------------------------------------------------------------------------------
#
# Writes the figures by minute, and the report that shows this process to operators.
#
# The rows are for information only: no guarantee depends on them, so a failed round delays no handler. The reporter
# uses the connection for infrequent statements.


logger = log_of(__name__)

REPORT_DELAY = 10.0  # seconds between two reports of a process to a server
REPORT_DELAY_OF_FILES = 60.0  # on SQLite, where each write blocks all other writers
KEEP_MINUTES = timedelta(hours=48)
KEEP_REPORTS = timedelta(hours=1)  # of a process that has died
REMOVE_DELAY = timedelta(minutes=1)
REMOVE_AGAIN = timedelta(hours=1)  # after a failure: the process may lack the privilege
CHUNK = 1000  # rows of each table per DELETE
SPREAD = 0.5  # seconds over which the writes of processes at the end of a minute are spread


class Reporter:
    """Writes the figures and the report of this process to a shard."""

    def __init__(
        self,
        namespace: str,
        instance: str,
        version: str,
        database: Database,
        clock: ShardClock,
        minutes: MinuteKeeper,
        *,
        content: Callable[[], object],
        fans_out: Callable[[], bool],
        drains: bool = False,
    ) -> None:
        """``content``: returns the report, an object that encodes to JSON. ``drains``: write only the minutes."""
        self.delay = REPORT_DELAY_OF_FILES if database.has_one_writer else REPORT_DELAY
        self._namespace = namespace
        self._instance = instance
        self._version = version
        self._reports = database.reports
        self._shard = database.name
        self._clock = clock
        self._minutes = minutes
        self._content = content
        self._fans_out = fans_out
        self._drains = drains
        self._round = asyncio.Lock()
        self._has_left = False
        self._started: datetime | None = None
        self._reported = self._removed = datetime.min
        self._spread = machine.uniform(0, SPREAD)

    async def run_once(self) -> RoundResult:
        """Write the completed minutes, and the report if it is due."""
        async with self._round:
            if self._has_left:
                return RoundResult(0)
            return await self._write_what_is_due()

    async def _write_what_is_due(self) -> RoundResult:
        now = self._clock()
        if self._started is None:
            self._started = now
            self._minutes.begin(now)
        await self._write(self._minutes.over(now))
        if self._drains:
            return RoundResult(0, again_in=_until_next_minute(self._clock()))
        if abs(now - self._reported) >= timedelta(seconds=0.9 * self.delay):
            await self._report(self._started, now)
            self._reported = now
        if self._fans_out() and now >= self._removed:
            await self._remove_old(now)
        return RoundResult(0, again_in=_until_next_minute(self._clock()) + self._spread)

    async def leave(self) -> None:
        """Write the runs of the current minute and remove the report, so that operators no longer see the process.

        A drain has no report. It removes old rows instead, because there may be no process that ever uses
        ``running()``.
        """
        async with self._round:  # a report that is being written would outlive its process
            self._has_left = True
            if self._started is None:
                return
            rows = self._minutes.with_present(now := self._clock())
            await self._write(rows)
            if not self._drains:
                await self._reports.remove_report(self._namespace, self._instance)
            elif rows:
                await self._remove_old(now)

    async def _write(self, rows: list[HandlerMinute]) -> None:
        if rows:
            await self._reports.write_minutes(self._namespace, self._instance, rows)
            self._minutes.written(rows)

    async def _report(self, started: datetime, now: datetime) -> None:
        report = InstanceReport(
            instance=self._instance, version=self._version, started_date=started, last_seen_date=now,
            delay_seconds=round(self.delay), report=msgspec.Raw(msgspec.json.encode(self._content())),
        )  # fmt: skip
        await self._reports.write_report(self._namespace, report)

    async def _remove_old(self, now: datetime) -> None:
        settled = self._clock.settled()
        try:
            removed = await self._reports.remove_old(
                self._namespace, settled - KEEP_MINUTES, settled - KEEP_REPORTS, CHUNK
            )
        except Exception as error:
            self._removed = now + REMOVE_AGAIN
            logger.warning(
                "could not remove old figures and reports of shard %s; retrying in an hour: %s", self._shard, error,
                shard=self._shard,
            )  # fmt: skip
            return
        self._removed = now if removed >= CHUNK else now + REMOVE_DELAY


def _until_next_minute(now: datetime) -> float:
    return 60.0 - now.second - now.microsecond / 1e6
