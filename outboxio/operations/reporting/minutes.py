"""Figures by minute: the difference between the statistics at the beginning and at the end of a minute."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from outboxio.statistics.figures import added
from outboxio.statistics.handlers import OUTCOMES, HandlerStatistics
from outboxio.statistics.shard import ShardStatistics
from outboxio.storage.protocols.operating import HandlerMinute

MOST_UNWRITTEN = 5_000  # rows that are kept while the database cannot be reached

_Numbers = tuple[list[int], list[int], list[int]]
"""The outcomes with the duration in us, the durations, and the lags of a handler."""


class MinuteKeeper:
    """Cuts the statistics of a shard into minutes, by the clock of the database.

    A row of the present minute may be written before the minute is over: the row of the whole minute replaces it.
    """

    def __init__(self, statistics: ShardStatistics) -> None:
        self._statistics = statistics
        self._minute = datetime.min
        self._base: dict[str, _Numbers] = {}
        self._unwritten: dict[tuple[datetime, str], HandlerMinute] = {}

    def begin(self, now: datetime) -> None:
        """Count from now on, unless this minute is counted already."""
        if _minute_of(now) != self._minute:
            self._cut(now)

    def over(self, now: datetime) -> list[HandlerMinute]:
        """The rows to write: of the minutes that are over, and of earlier minutes whose writing failed."""
        if _minute_of(now) != self._minute:
            self._keep(self._rows())
            self._cut(now)
        return list(self._unwritten.values())

    def with_present(self, now: datetime) -> list[HandlerMinute]:
        """The rows of :meth:`over`, and those of the present minute so far."""
        return [*self.over(now), *self._rows()]

    def written(self, rows: Iterable[HandlerMinute]) -> None:
        """The rows are written."""
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
        """A row for each handler with runs in the minute."""
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


def _minute_of(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)


_numbers_of_nothing = _numbers(HandlerStatistics())
