"""The history of a handler's runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import zip_longest

from outboxio.errors import ConfigurationError
from outboxio.model.operating.groups import HandlerHistory, HistoryPoint
from outboxio.operations.arguments import handler_argument
from outboxio.operations.base import AdminBase
from outboxio.statistics.figures import DURATIONS, LAGS, percentile
from outboxio.storage.protocols import HandlerMinute
from outboxio.support.text import briefly

MINUTE = timedelta(minutes=1)
LONGEST = timedelta(hours=48)
"""How long the figures of each minute are kept."""
LONGEST_OF_ALL = timedelta(hours=1)
"""The longest time range for all handlers together: a day may have 100,000 rows."""


class HistoryQueries(AdminBase):
    """A part of ``Admin``."""

    async def history(
        self,
        handler: str | None = None,
        *,
        within: timedelta = timedelta(hours=1),
        step: timedelta = MINUTE,
        shard: str | None = None,
    ) -> HandlerHistory:
        """Return the runs, failures, durations and lags of a handler over time.

        ``handler``: by default all handlers together, for at most the last hour. ``within``: the time range until now,
        1 minute to 48 hours. ``step``: the length of a period, in whole minutes; periods begin at multiples of ``step``
        after midnight UTC. The last period is incomplete. Processes write their figures at the end of each minute, so
        the current minute is empty.

        Reads one row per minute and process, and per handler if no handler is named. Raises :class:`UnknownHandler` for
        an unknown name, and :class:`ConfigurationError` for an invalid range or step.

        Example::

            history = await outbox.admin.history("invoice-pdf", within=timedelta(hours=24), step=timedelta(minutes=15))
            print(history.total.duration_p95, [point.succeeded for point in history.points])
        """
        name = None if handler is None else handler_argument(handler)
        within = _within(within, LONGEST if name is not None else LONGEST_OF_ALL)
        step = _step(step, within)
        found: list[HandlerMinute] = []
        chosen = self._shards.chosen(shard)
        until = await chosen[0].now()
        since = _floor(until - within + step, step)
        minutes = [since + number * MINUTE for number in range((until - since) // MINUTE + 1)]
        for one in chosen:
            if name is None:
                of_all = await one.database.reports.minutes(self._namespace, since)
                found += [minute for minute in of_all if minute.minute_date <= minutes[-1]]
                continue
            for stored in await self._known.names_of(name, one.database):
                found += await one.database.reports.minutes_of(self._namespace, stored, minutes)
        if not found and name is not None:
            await self._known.refuse_unknown(name, self._shards.databases(shard), among_rows=True)
        return HandlerHistory(
            handler_name=name, since=since, until=until, step=step, total=_point(since, found),
            points=_points(since, until, step, found),
        )  # fmt: skip


def _points(
    since: datetime, until: datetime, step: timedelta, minutes: Sequence[HandlerMinute]
) -> tuple[HistoryPoint, ...]:
    periods: list[list[HandlerMinute]] = [[] for _ in range((until - since) // step + 1)]
    for minute in minutes:
        periods[(minute.minute_date - since) // step].append(minute)
    return tuple(_point(since + number * step, period) for number, period in enumerate(periods))


def _point(begin: datetime, minutes: Sequence[HandlerMinute]) -> HistoryPoint:
    durations, lags = _added(one.durations for one in minutes), _added(one.lags for one in minutes)
    runs = sum(durations)
    return HistoryPoint(
        begin=begin,
        succeeded=sum(one.succeeded for one in minutes),
        failed=sum(one.failed for one in minutes),
        dead=sum(one.dead for one in minutes),
        expired=sum(one.expired for one in minutes),
        skipped=sum(one.skipped for one in minutes),
        duration_mean=sum(one.duration_us for one in minutes) / 1e6 / runs if runs else None,
        duration_p50=_percentile(DURATIONS, durations, 0.5),
        duration_p95=_percentile(DURATIONS, durations, 0.95),
        duration_p99=_percentile(DURATIONS, durations, 0.99),
        lag_p50=_percentile(LAGS, lags, 0.5),
        lag_p95=_percentile(LAGS, lags, 0.95),
        lag_p99=_percentile(LAGS, lags, 0.99),
    )


def _added(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Add up histograms. A different version may have written fewer buckets, or more."""
    return [sum(numbers) for numbers in zip_longest(*histograms, fillvalue=0)]


def _percentile(bounds: Sequence[float], buckets: Sequence[int], share: float) -> float | None:
    number = len(bounds) + 1
    known = [*buckets[: number - 1], sum(buckets[number - 1 :])] if buckets else []
    return percentile(bounds, [*known, *[0] * (number - len(known))], share)


def _within(within: object, longest: timedelta) -> timedelta:
    if not isinstance(within, timedelta) or not MINUTE <= within <= longest:
        why = "for which the figures are kept" if longest == LONGEST else "unless a handler is named"
        raise ConfigurationError(
            f"within is {briefly(within)}; expected a timedelta of 1 minute to {longest // timedelta(hours=1)} "
            f"hour{'' if longest == LONGEST_OF_ALL else 's'}, {why}"
        )
    return within


def _step(step: object, within: timedelta) -> timedelta:
    if not isinstance(step, timedelta) or not MINUTE <= step <= within or step % MINUTE:
        raise ConfigurationError(
            f"step is {briefly(step)}; expected a timedelta of whole minutes, 1 or more, not longer than within"
        )
    return step


def _floor(time: datetime, step: timedelta) -> datetime:
    """Round down to a multiple of a step after midnight."""
    midnight = datetime.min.replace(year=time.year, month=time.month, day=time.day)
    return midnight + (time - midnight) // step * step
