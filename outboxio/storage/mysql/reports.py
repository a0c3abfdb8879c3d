"""The tables ``handler_minutes`` and ``instance_reports`` on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from outboxio.storage.mysql.connection import LoopConnection
from outboxio.storage.mysql.flavour import for_flavours
from outboxio.storage.mysql.values import as_json, as_moment
from outboxio.storage.protocols.operating import HandlerMinute, InstanceReport
from outboxio.storage.reporting import minute_of, report_of, rows_of, summed, values_of_report

# The columns of ``reporting.rows_of``. A histogram is a text, and a count of 64 bits has 20 digits.
WRITE_MINUTES = for_flavours("""
INSERT INTO eventlog.handler_minutes (namespace, minute_date, handler_name, instance, succeeded, failed, dead, expired,
  skipped, duration_us, durations, lags)
SELECT %(namespace)s, m.minute_date, m.handler_name, %(instance)s, m.succeeded, m.failed, m.dead, m.expired, m.skipped,
  m.duration_us, m.durations, m.lags
FROM JSON_TABLE(%(minutes)s, '$[*]' COLUMNS (handler_name {text} PATH '$[0]', minute_date DATETIME(6) PATH '$[1]',
  succeeded BIGINT PATH '$[2]', failed BIGINT PATH '$[3]', dead BIGINT PATH '$[4]', expired BIGINT PATH '$[5]',
  skipped BIGINT PATH '$[6]', duration_us BIGINT PATH '$[7]', durations VARCHAR(400) PATH '$[8]',
  lags VARCHAR(400) PATH '$[9]')) m
ON DUPLICATE KEY UPDATE succeeded = m.succeeded, failed = m.failed, dead = m.dead, expired = m.expired,
  skipped = m.skipped, duration_us = m.duration_us, durations = m.durations, lags = m.lags
""")

_MINUTES = """
SELECT handler_name, minute_date, succeeded, failed, dead, expired, skipped, duration_us, durations, lags
FROM eventlog.handler_minutes WHERE namespace = %(namespace)s AND minute_date >= %(since)s"""
MINUTES = for_flavours(f"{_MINUTES} ORDER BY minute_date, handler_name")

# STRAIGHT_JOIN: each minute is a seek in the primary key. A day of all handlers may have 100,000 rows.
MINUTES_OF_HANDLER = for_flavours("""
SELECT h.handler_name, h.minute_date, h.succeeded, h.failed, h.dead, h.expired, h.skipped, h.duration_us, h.durations,
  h.lags
FROM JSON_TABLE(%(minutes)s, '$[*]' COLUMNS (minute_date DATETIME(6) PATH '$')) m
STRAIGHT_JOIN eventlog.handler_minutes h FORCE INDEX (PRIMARY)
  ON h.namespace = %(namespace)s AND h.minute_date = m.minute_date AND h.handler_name = %(handler)s
ORDER BY h.minute_date
""")

WRITE_REPORT = for_flavours("""
INSERT INTO eventlog.instance_reports (namespace, instance, version, started_date, last_seen_date, delay_seconds,
  report)
VALUES (%(namespace)s, %(instance)s, %(version)s, %(started_date)s, %(last_seen_date)s, %(delay_seconds)s, %(report)s)
ON DUPLICATE KEY UPDATE version = %(version)s, started_date = %(started_date)s, last_seen_date = %(last_seen_date)s,
  delay_seconds = %(delay_seconds)s, report = %(report)s
""")

REPORTS = for_flavours("""
SELECT instance, version, started_date, last_seen_date, delay_seconds, report FROM eventlog.instance_reports
WHERE namespace = %(namespace)s AND last_seen_date >= %(seen_since)s ORDER BY instance
""")

REMOVE_REPORT = for_flavours("""
DELETE FROM eventlog.instance_reports WHERE namespace = %(namespace)s AND instance = %(instance)s
""")

REMOVE_MINUTES = for_flavours("""
DELETE FROM eventlog.handler_minutes WHERE namespace = %(namespace)s AND minute_date < %(before)s
ORDER BY minute_date, handler_name, instance LIMIT %(limit)s
""")
REMOVE_REPORTS = for_flavours("""
DELETE FROM eventlog.instance_reports WHERE namespace = %(namespace)s AND last_seen_date < %(before)s
ORDER BY instance LIMIT %(limit)s
""")


class MysqlReports:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def write_minutes(self, namespace: str, instance: str, minutes: Sequence[HandlerMinute]) -> None:
        if minutes:
            scope = {"namespace": namespace, "instance": instance, "minutes": rows_of(minutes)}
            await self._admin.execute(WRITE_MINUTES, scope)

    async def minutes(self, namespace: str, since: datetime) -> list[HandlerMinute]:
        rows = await self._admin.fetch(MINUTES, {"namespace": namespace, "since": since})
        return summed(minute_of(*row) for row in rows)

    async def minutes_of(self, namespace: str, handler: str, minutes: Sequence[datetime]) -> list[HandlerMinute]:
        scope = {"namespace": namespace, "handler": handler, "minutes": as_json(map(as_moment, minutes))}
        return summed(minute_of(*row) for row in await self._admin.fetch(MINUTES_OF_HANDLER, scope))

    async def write_report(self, namespace: str, report: InstanceReport) -> None:
        await self._admin.execute(WRITE_REPORT, values_of_report(namespace, report))

    async def reports(self, namespace: str, seen_since: datetime) -> list[InstanceReport]:
        rows = await self._admin.fetch(REPORTS, {"namespace": namespace, "seen_since": seen_since})
        return [report_of(*row) for row in rows]

    async def remove_report(self, namespace: str, instance: str) -> None:
        await self._admin.execute(REMOVE_REPORT, {"namespace": namespace, "instance": instance})

    async def remove_old(self, namespace: str, minutes_before: datetime, seen_before: datetime, limit: int) -> int:
        scope = {"namespace": namespace, "limit": limit}
        removed = await self._admin.execute(REMOVE_MINUTES, {**scope, "before": minutes_before})
        return removed + await self._admin.execute(REMOVE_REPORTS, {**scope, "before": seen_before})
