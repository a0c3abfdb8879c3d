"""The tables ``handler_minutes`` and ``instance_reports`` on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from msgspec.json import encode

from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.protocols.operating import HandlerMinute, InstanceReport
from outboxio.storage.reporting import in_key_order, minute_of, report_of, summed

# The rows go in the order of the primary key, as every writer's rows do.
WRITE_MINUTES = """
INSERT INTO eventlog.handler_minutes (namespace, minute_date, handler_name, instance, succeeded, failed, dead, expired,
  skipped, duration_us, durations, lags)
SELECT $1, m.minute_date, m.handler_name, $2, m.succeeded, m.failed, m.dead, m.expired, m.skipped, m.duration_us,
  m.durations, m.lags
FROM jsonb_to_recordset($3::text::jsonb) AS m(minute_date timestamp, handler_name text, succeeded bigint, failed bigint,
  dead bigint, expired bigint, skipped bigint, duration_us bigint, durations jsonb, lags jsonb)
ORDER BY m.minute_date, m.handler_name
ON CONFLICT (namespace, minute_date, handler_name, instance) DO UPDATE SET succeeded = excluded.succeeded,
  failed = excluded.failed, dead = excluded.dead, expired = excluded.expired, skipped = excluded.skipped,
  duration_us = excluded.duration_us, durations = excluded.durations, lags = excluded.lags
"""

MINUTES = """
SELECT handler_name, minute_date, succeeded, failed, dead, expired, skipped, duration_us, durations::text, lags::text
FROM eventlog.handler_minutes
WHERE namespace = $1 AND minute_date >= $2
ORDER BY minute_date, handler_name
"""

# OFFSET 0 keeps the planner from joining the two in a different way: a day of all handlers may have 100,000 rows.
MINUTES_OF_HANDLER = """
SELECT h.handler_name, h.minute_date, h.succeeded, h.failed, h.dead, h.expired, h.skipped, h.duration_us,
  h.durations::text, h.lags::text
FROM unnest($3::timestamp[]) AS m(minute_date)
CROSS JOIN LATERAL (
  SELECT * FROM eventlog.handler_minutes
  WHERE namespace = $1 AND minute_date = m.minute_date AND handler_name = $2 OFFSET 0) h
ORDER BY h.minute_date
"""

WRITE_REPORT = """
INSERT INTO eventlog.instance_reports (namespace, instance, version, started_date, last_seen_date, delay_seconds,
  report)
VALUES ($1, $2, $3, $4, $5, $6, $7::text::jsonb)
ON CONFLICT (namespace, instance) DO UPDATE SET version = excluded.version, started_date = excluded.started_date,
  last_seen_date = excluded.last_seen_date, delay_seconds = excluded.delay_seconds, report = excluded.report
"""

REPORTS = """
SELECT instance, version, started_date, last_seen_date, delay_seconds, report::text FROM eventlog.instance_reports
WHERE namespace = $1 AND last_seen_date >= $2 ORDER BY instance
"""

REMOVE_REPORT = "DELETE FROM eventlog.instance_reports WHERE namespace = $1 AND instance = $2"

REMOVE_MINUTES = """
DELETE FROM eventlog.handler_minutes WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM eventlog.handler_minutes WHERE namespace = $1 AND minute_date < $2
  ORDER BY minute_date, handler_name, instance LIMIT $3))
"""
REMOVE_REPORTS = """
DELETE FROM eventlog.instance_reports WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM eventlog.instance_reports WHERE namespace = $1 AND last_seen_date < $2 LIMIT $3))
"""


class PostgresReports:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def write_minutes(self, namespace: str, instance: str, minutes: Sequence[HandlerMinute]) -> None:
        if minutes:
            await self._admin.execute(WRITE_MINUTES, namespace, instance, encode(in_key_order(minutes)).decode())

    async def minutes(self, namespace: str, since: datetime) -> list[HandlerMinute]:
        return summed(minute_of(*row) for row in await self._admin.fetch(MINUTES, namespace, since))

    async def minutes_of(self, namespace: str, handler: str, minutes: Sequence[datetime]) -> list[HandlerMinute]:
        rows = await self._admin.fetch(MINUTES_OF_HANDLER, namespace, handler, list(minutes))
        return summed(minute_of(*row) for row in rows)

    async def write_report(self, namespace: str, report: InstanceReport) -> None:
        await self._admin.execute(
            WRITE_REPORT, namespace, report.instance, report.version, report.started_date, report.last_seen_date,
            report.delay_seconds, self._admin.encoding.escaped_in_json(bytes(report.report).decode()),
        )  # fmt: skip

    async def reports(self, namespace: str, seen_since: datetime) -> list[InstanceReport]:
        rows = await self._admin.fetch(REPORTS, namespace, seen_since)
        return [report_of(*row) for row in rows]

    async def remove_report(self, namespace: str, instance: str) -> None:
        await self._admin.execute(REMOVE_REPORT, namespace, instance)

    async def remove_old(self, namespace: str, minutes_before: datetime, seen_before: datetime, limit: int) -> int:
        removed = await self._admin.execute(REMOVE_MINUTES, namespace, minutes_before, limit)
        return removed + await self._admin.execute(REMOVE_REPORTS, namespace, seen_before, limit)
