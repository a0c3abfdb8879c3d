"""The reporter: writes the figures by minute, and the report by which operators see this process.

The rows are hints for people: no promise depends on the rows, so a round that fails delays no handler. The reporter
uses the connection of rare statements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

import msgspec

from outboxio.loops.loop import RoundResult
from outboxio.operations.reporting.minutes import MinuteKeeper
from outboxio.storage.protocols import Database
from outboxio.storage.protocols.operating import HandlerMinute, InstanceReport
from outboxio.support import machine
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of

logger = log_of(__name__)

REPORT_DELAY = 10.0  # seconds between two reports of a process to a server
REPORT_DELAY_OF_FILES = 60.0  # on SQLite each write keeps all writers waiting
KEEP_MINUTES = timedelta(hours=48)
KEEP_REPORTS = timedelta(hours=1)  # of a process that has died
REMOVE_DELAY = timedelta(minutes=1)
REMOVE_AGAIN = timedelta(hours=1)  # after a failure: the process may lack the right
PIECE = 1000  # rows of each table that one statement removes
SPREAD = 0.5  # seconds over which processes spread the write at the end of a minute


class Reporter:
    """Reports on a shard, on behalf of one process."""

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
        """``content``: the report, as an object that encodes to JSON. ``drains``: write the minutes only."""
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
        """Write the minute that is over, and a report if a report is due."""
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
        """Write the runs of the present minute, and remove the report: the process is gone for operators.

        A drain has no report, and removes old rows instead: perhaps no process is ever in ``running()``.
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
                self._namespace, settled - KEEP_MINUTES, settled - KEEP_REPORTS, PIECE
            )
        except Exception as error:
            self._removed = now + REMOVE_AGAIN
            logger.warning(
                "old figures and reports of shard %s stay for now, and are removed in an hour: %s", self._shard, error,
                shard=self._shard,
            )  # fmt: skip
            return
        self._removed = now if removed >= PIECE else now + REMOVE_DELAY


def _until_next_minute(now: datetime) -> float:
    return 60.0 - now.second - now.microsecond / 1e6
