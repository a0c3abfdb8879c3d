"""The tables ``handler_minutes`` and ``instance_reports`` on SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from outboxio.storage.protocols.operating import HandlerMinute, InstanceReport
from outboxio.storage.reporting import minute_of, report_of, rows_of, summed, values_of_report
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_json, as_text, as_values

# WHERE TRUE: without a condition SQLite would read ON CONFLICT as the condition of a join.
WRITE_MINUTES = """
INSERT INTO eventlog_handler_minutes (namespace, minute_date, handler_name, instance, succeeded, failed, dead, expired,
  skipped, duration_us, durations, lags)
SELECT :namespace, json_extract(value, '$[1]'), json_extract(value, '$[0]'), :instance, json_extract(value, '$[2]'),
  json_extract(value, '$[3]'), json_extract(value, '$[4]'),
  json_extract(value, '$[5]'), json_extract(value, '$[6]'), json_extract(value, '$[7]'),
  json_extract(value, '$[8]'), json_extract(value, '$[9]')
FROM json_each(:minutes) WHERE TRUE
ON CONFLICT (namespace, minute_date, handler_name, instance) DO UPDATE SET succeeded = excluded.succeeded,
  failed = excluded.failed, dead = excluded.dead, expired = excluded.expired, skipped = excluded.skipped,
  duration_us = excluded.duration_us, durations = excluded.durations, lags = excluded.lags
"""

MINUTES = """
SELECT json_group_array(json_array(handler_name, minute_date, succeeded, failed, dead, expired, skipped, duration_us,
  durations, lags))
FROM (SELECT * FROM eventlog_handler_minutes WHERE namespace = :namespace AND minute_date >= :since
  ORDER BY minute_date, handler_name)
"""

# CROSS JOIN: each minute is a seek in the primary key.
MINUTES_OF_HANDLER = """
SELECT json_group_array(json_array(handler_name, minute_date, succeeded, failed, dead, expired, skipped, duration_us,
  durations, lags))
FROM (SELECT h.* FROM json_each(:minutes) AS m CROSS JOIN eventlog_handler_minutes AS h
  ON h.namespace = :namespace AND h.minute_date = m.value AND h.handler_name = :handler
  ORDER BY h.minute_date)
"""

WRITE_REPORT = """
INSERT INTO eventlog_instance_reports (namespace, instance, version, started_date, last_seen_date, delay_seconds,
  report)
VALUES (:namespace, :instance, :version, :started_date, :last_seen_date, :delay_seconds, :report)
ON CONFLICT (namespace, instance) DO UPDATE SET version = excluded.version, started_date = excluded.started_date,
  last_seen_date = excluded.last_seen_date, delay_seconds = excluded.delay_seconds, report = excluded.report
"""

REPORTS = """
SELECT json_group_array(json_array(instance, version, started_date, last_seen_date, delay_seconds, report))
FROM (SELECT * FROM eventlog_instance_reports WHERE namespace = :namespace AND last_seen_date >= :seen_since
  ORDER BY instance)
"""

REMOVE_REPORT = "DELETE FROM eventlog_instance_reports WHERE namespace = :namespace AND instance = :instance"

# Old rows are sought without the write lock.
FIND_OLD = """
SELECT json_array(
  (SELECT json_group_array(rowid) FROM (SELECT rowid FROM eventlog_handler_minutes
    WHERE namespace = :namespace AND minute_date < :minutes_before ORDER BY minute_date LIMIT :limit)),
  (SELECT json_group_array(rowid) FROM (SELECT rowid FROM eventlog_instance_reports
    WHERE namespace = :namespace AND last_seen_date < :seen_before LIMIT :limit)))
"""
REMOVE_MINUTES = """
DELETE FROM eventlog_handler_minutes
WHERE rowid IN (SELECT value FROM json_each(:rows)) AND minute_date < :minutes_before
"""
REMOVE_REPORTS = """
DELETE FROM eventlog_instance_reports
WHERE rowid IN (SELECT value FROM json_each(:rows)) AND last_seen_date < :seen_before
"""

_minutes = msgspec.json.Decoder(list[tuple[str, datetime, int, int, int, int, int, int, str, str]])
_reports = msgspec.json.Decoder(list[tuple[str, str, datetime, datetime, int, str]])
_old = msgspec.json.Decoder(tuple[list[int], list[int]])


class SqliteReports:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def write_minutes(self, namespace: str, instance: str, minutes: Sequence[HandlerMinute]) -> None:
        if minutes:
            scope = {"namespace": namespace, "instance": instance, "minutes": rows_of(minutes)}
            await self._connections.write(WRITE_MINUTES, scope)

    async def minutes(self, namespace: str, since: datetime) -> list[HandlerMinute]:
        return await self._read_minutes(MINUTES, {"namespace": namespace, "since": as_text(since)})

    async def minutes_of(self, namespace: str, handler: str, minutes: Sequence[datetime]) -> list[HandlerMinute]:
        scope = {"namespace": namespace, "handler": handler, "minutes": as_json(map(as_text, minutes))}
        return await self._read_minutes(MINUTES_OF_HANDLER, scope)

    async def _read_minutes(self, statement: str, scope: dict[str, str]) -> list[HandlerMinute]:
        return summed(minute_of(*row) for row in _minutes.decode(await self._connections.inspect(statement, scope)))

    async def write_report(self, namespace: str, report: InstanceReport) -> None:
        await self._connections.write(WRITE_REPORT, as_values(values_of_report(namespace, report)))

    async def reports(self, namespace: str, seen_since: datetime) -> list[InstanceReport]:
        scope = {"namespace": namespace, "seen_since": as_text(seen_since)}
        return [report_of(*row) for row in _reports.decode(await self._connections.inspect(REPORTS, scope))]

    async def remove_report(self, namespace: str, instance: str) -> None:
        await self._connections.write(REMOVE_REPORT, {"namespace": namespace, "instance": instance})

    async def remove_old(self, namespace: str, minutes_before: datetime, seen_before: datetime, limit: int) -> int:
        old = {"minutes_before": as_text(minutes_before)}
        gone = {"seen_before": as_text(seen_before)}
        scope = {"namespace": namespace, "limit": limit, **old, **gone}
        minutes, reports = _old.decode(await self._connections.inspect(FIND_OLD, scope))
        removed = 0
        if minutes:
            removed += await self._connections.write(REMOVE_MINUTES, {"rows": as_json(minutes), **old})
        if reports:
            removed += await self._connections.write(REMOVE_REPORTS, {"rows": as_json(reports), **gone})
        return removed
