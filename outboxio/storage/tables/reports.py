"""The tables ``handler_minutes`` and ``instance_reports``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import zip_longest

from msgspec.structs import asdict, replace

from outboxio.storage.protocols.operating import HandlerMinute, InstanceReport
from outboxio.storage.statement import Port, Query, Statement, as_document, delete

# --- statements ------------------------------------------------------------------------------------

_NUMBERS = ("succeeded", "failed", "dead", "expired", "skipped", "duration_us")
_HISTOGRAMS = ("durations", "lags")
_WRITTEN = ", ".join((*_NUMBERS, *_HISTOGRAMS))
_SELECT = f"SELECT h.handler_name, h.minute_date, h.{', h.'.join(_NUMBERS)}, {{text h.durations}}, {{text h.lags}}"

# Histograms are passed as text within the rows, because JSON_TABLE of MariaDB cannot read arrays.
WRITE_MINUTES = Statement(f"""
INSERT INTO eventlog.handler_minutes (namespace, instance, minute_date, handler_name, {_WRITTEN})
SELECT :namespace, :instance, m.minute_date, m.handler_name, m.{", m.".join(_NUMBERS)},
  {{json m.durations}}, {{json m.lags}}
FROM {{rows :minutes m minute_date timestamp, handler_name text, {" bigint, ".join(_NUMBERS)} bigint,
  durations document, lags document}} WHERE TRUE
{{upsert namespace, minute_date, handler_name, instance: {_WRITTEN} from m}}
""")
MINUTES = Query(
    f"""
{_SELECT} FROM eventlog.handler_minutes h WHERE h.namespace = :namespace AND h.minute_date >= :since
ORDER BY h.minute_date, h.handler_name
""",
    HandlerMinute,
)

# Each minute is a primary key lookup, because a day of all handlers may have 100,000 rows. On PostgreSQL, OFFSET 0
# keeps the planner from choosing a different join.
_THIS = "h.namespace = :namespace AND h.minute_date = m.minute_date AND h.handler_name = :handler"
_OF_HANDLER = f"""
{_SELECT} FROM {{rows :minutes m minute_date timestamp}}
STRAIGHT_JOIN {{table handler_minutes primary h}} ON {_THIS} ORDER BY h.minute_date
"""
MINUTES_OF_HANDLER = Query(
    _OF_HANDLER,
    HandlerMinute,
    postgres=f"""
{_SELECT} FROM {{rows :minutes m minute_date timestamp}}
CROSS JOIN LATERAL (SELECT * FROM eventlog.handler_minutes h WHERE {_THIS} OFFSET 0) h ORDER BY h.minute_date
""",
    sqlite=_OF_HANDLER.replace("STRAIGHT_JOIN", "CROSS JOIN"),
)

WRITE_REPORT = Statement("""
INSERT INTO eventlog.instance_reports (namespace, instance, version, started_date, last_seen_date, delay_seconds,
  report)
VALUES (:namespace, :instance, :version, :started_date, :last_seen_date, :delay_seconds, {json :report})
{upsert namespace, instance: version, started_date, last_seen_date, delay_seconds, report}
""")
REPORTS = Query(
    """
SELECT instance, version, started_date, last_seen_date, delay_seconds, {text report} FROM eventlog.instance_reports
WHERE namespace = :namespace AND last_seen_date >= :seen_since ORDER BY instance
""",
    InstanceReport,
)
REMOVE_REPORT = Statement("DELETE FROM eventlog.instance_reports WHERE namespace = :namespace AND instance = :instance")

REMOVE_MINUTES = delete(
    "handler_minutes", "namespace = :namespace AND minute_date < :before", order="minute_date, handler_name, instance"
)
REMOVE_REPORTS = delete("instance_reports", "namespace = :namespace AND last_seen_date < :before", order="instance")

# --- the tables ------------------------------------------------------------------------------------


class Reports:
    """Reads and writes the reports of processes: the runs of each handler by minute, and the state of the process."""

    def __init__(self, port: Port) -> None:
        self._port = port

    async def write_minutes(self, namespace: str, instance: str, minutes: Sequence[HandlerMinute]) -> None:
        """Write the minutes of this process in one statement. Existing rows are replaced."""
        # All processes lock the rows in primary key order.
        rows = [
            {**asdict(minute), **{name: as_document(getattr(minute, name)) for name in _HISTOGRAMS}}
            for minute in sorted(minutes, key=_key)
        ]
        if rows:
            await self._port.execute(WRITE_MINUTES, namespace=namespace, instance=instance, minutes=rows)

    async def minutes(self, namespace: str, since: datetime) -> list[HandlerMinute]:
        """Return the minutes of all handlers since a time, summed over all processes."""
        return _summed(await self._port.fetch(MINUTES, namespace=namespace, since=since))

    async def minutes_of(self, namespace: str, handler: str, minutes: Sequence[datetime]) -> list[HandlerMinute]:
        """Return the rows of a handler name for these minutes, oldest first, summed over all processes.

        Each minute is a primary key lookup, so the rows of other handlers are not read.
        """
        rows = [{"minute_date": minute} for minute in minutes]
        values = {"namespace": namespace, "handler": handler, "minutes": rows}
        return _summed(await self._port.fetch(MINUTES_OF_HANDLER, **values)) if rows else []

    async def write_report(self, namespace: str, report: InstanceReport) -> None:
        """Write the report of this process, replacing the previous one."""
        await self._port.execute(WRITE_REPORT, namespace=namespace, **asdict(report))

    async def reports(self, namespace: str, seen_since: datetime) -> list[InstanceReport]:
        """Return the reports of processes seen since a time, by name."""
        return await self._port.fetch(REPORTS, namespace=namespace, seen_since=seen_since)

    async def remove_report(self, namespace: str, instance: str) -> None:
        """Remove the report of a process that shuts down."""
        await self._port.execute(REMOVE_REPORT, namespace=namespace, instance=instance)

    async def remove_old(self, namespace: str, minutes_before: datetime, seen_before: datetime, limit: int) -> int:
        """Remove up to ``limit`` old rows of each table; return the number of rows."""
        values = {"namespace": namespace, "limit": limit}
        removed = await self._port.execute(REMOVE_MINUTES, **values, before=minutes_before)
        return removed + await self._port.execute(REMOVE_REPORTS, **values, before=seen_before)


def _key(minute: HandlerMinute) -> tuple[datetime, str]:
    return minute.minute_date, minute.handler_name


def _summed(minutes: Iterable[HandlerMinute]) -> list[HandlerMinute]:
    """Return the sums over processes. ``minutes`` is sorted by minute and handler name."""
    totals: list[HandlerMinute] = []
    for minute in minutes:
        if totals and _key(totals[-1]) == _key(minute):
            totals[-1] = _sum(totals[-1], minute)
        else:
            totals.append(minute)
    return totals


def _sum(one: HandlerMinute, other: HandlerMinute) -> HandlerMinute:
    """Return the sum of two rows. Other versions may write more or fewer buckets."""
    numbers = {name: getattr(one, name) + getattr(other, name) for name in _NUMBERS}
    histograms = {
        name: tuple(map(sum, zip_longest(getattr(one, name), getattr(other, name), fillvalue=0)))
        for name in _HISTOGRAMS
    }
    return replace(one, **numbers, **histograms)
