"""The search for events on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from outboxio.model.operating.filter import Search
from outboxio.storage.mysql.columns import BY_EVENT
from outboxio.storage.mysql.connection import LoopConnection, fetch
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.mysql.matching import Conditions
from outboxio.storage.protocols.operating import EventSummary
from outboxio.storage.searching.events import EVENT_COLUMNS, EventChunk, WalkedEvents, summary_of
from outboxio.storage.searching.repository import WalkedSearch

_BY_ID = "eventlog.events n FORCE INDEX (PRIMARY)"
# A row is an id, and whether the event matches.
READ = f"""
SELECT COUNT(*), SUBSTRING_INDEX(GROUP_CONCAT(r.id ORDER BY r.id DESC), ',', -1),
  GROUP_CONCAT(IF(r.is_match, r.id, NULL) ORDER BY r.id DESC)
FROM (SELECT n.id AS id, {{matches}} AS is_match FROM {_BY_ID}
  WHERE n.id < %(before)s ORDER BY n.id DESC LIMIT %(size)s) r
"""
MATCHING = f"SELECT n.id FROM {_BY_ID} WHERE n.id IN ({{ids}}) AND {{matches}}"
SUMMARIES = f"""
SELECT {", ".join(f"n.{column}" for column in EVENT_COLUMNS)} FROM {_BY_ID}
WHERE n.namespace = %(namespace)s AND n.id IN ({{ids}})
"""
# Joined by UNION ALL, once for each cause.
CAUSED = """
(SELECT n.sequence, n.id FROM eventlog.events n FORCE INDEX (events_causation)
WHERE n.causation_id = %s AND n.namespace = %s LIMIT %s)
"""
MOST_CAUSES = 64  # of a statement
NOTIFICATION_IDS = f"""
SELECT n.id FROM {BY_EVENT} WHERE n.event_id IN ({{ids}}) AND n.namespace = %(namespace)s
ORDER BY n.event_id, n.handler_name LIMIT %(limit)s
"""


class MysqlEventSearch(WalkedEvents):
    def __init__(self, admin: LoopConnection, server: Server, search: WalkedSearch) -> None:
        super().__init__(search)
        self._admin = admin
        self._server = server

    async def read(self, namespace: str, search: Search, before: str, size: int) -> EventChunk:
        scope = Conditions(self._server, namespace, search, of_events=True)
        args = {**scope.args, "before": before, "size": size}
        [(read, last, matches)] = await self._fetch(READ.replace("{matches}", scope.text), args)
        return EventChunk(read, last, str(matches).split(",") if matches else None)

    async def matching(self, namespace: str, search: Search, ids: Sequence[str]) -> list[str]:
        scope = Conditions(self._server, namespace, search, of_events=True)
        statement = MATCHING.replace("{matches}", scope.text).replace("{ids}", scope.listed("id", ids))
        return [row[0] for row in await self._fetch(statement, scope.args)]

    async def summaries(self, namespace: str, ids: Sequence[str]) -> list[EventSummary]:
        scope = Conditions(self._server, namespace, Search())
        rows = await self._fetch(SUMMARIES.replace("{ids}", scope.listed("id", ids)), scope.args)
        return [summary_of(dict(zip(EVENT_COLUMNS, row, strict=True))) for row in rows]

    async def caused(self, namespace: str, causes: Sequence[str], limit: int) -> list[str]:
        rows: list[tuple[Any, ...]] = []
        for start in range(0, len(causes), MOST_CAUSES):
            some = causes[start : start + MOST_CAUSES]
            args = tuple(value for cause in some for value in (cause, namespace, limit))
            rows += await self._admin.fetch_all(CAUSED, len(some), args)
        return [row[1] for row in sorted(rows)[:limit]]

    async def notification_ids(self, namespace: str, events: Sequence[str], limit: int) -> list[str]:
        scope = Conditions(self._server, namespace, Search())
        statement = NOTIFICATION_IDS.replace("{ids}", scope.listed("id", events))
        return [row[0] for row in await self._fetch(statement, {**scope.args, "limit": limit})]

    async def _fetch(self, statement: str, args: dict[str, Any]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = await self._admin.use(partial(fetch, sql=statement, args=args))
        return rows
