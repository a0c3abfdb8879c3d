"""The search for events on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from outboxio.model.notification import DOCUMENTS
from outboxio.model.operating.filter import Search
from outboxio.storage.mysql.columns import BY_EVENT
from outboxio.storage.mysql.connection import LoopConnection, fetch
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.mysql.matching import Conditions
from outboxio.storage.protocols.events import EventSummary
from outboxio.storage.searching.events import EVENT_COLUMNS, EventChunk, WalkedEvents, summary_of
from outboxio.storage.searching.repository import WalkedSearch

_BY_ID = "eventlog.events n FORCE INDEX (PRIMARY)"
# A row is an id, and whether the event is of the namespace, and matches.
READ = f"""
SELECT COUNT(IF(r.is_own, 1, NULL)), MIN(IF(r.is_own, r.id, NULL)),
  GROUP_CONCAT(IF(r.is_match, r.id, NULL) ORDER BY r.id DESC), COUNT(IF(r.is_own, NULL, 1)), MIN(r.id)
FROM (SELECT n.id AS id, n.namespace = %(namespace)s AS is_own, {{matches}} AS is_match FROM {_BY_ID}
  WHERE n.id < %(before)s ORDER BY n.id DESC LIMIT %(size)s) r
"""
MATCHING = f"SELECT n.id FROM {_BY_ID} WHERE n.id IN ({{ids}}) AND {{matches}}"
_OF_IDS = f"FROM {_BY_ID} WHERE n.namespace = %(namespace)s AND n.id IN ({{ids}})"
SUMMARIES = f"""
SELECT {", ".join(f"n.{column}" for column in EVENT_COLUMNS)} {_OF_IDS}
"""
WITHOUT_DOCUMENTS = f"""
SELECT {", ".join("NULL" if column in DOCUMENTS else f"n.{column}" for column in EVENT_COLUMNS)} {_OF_IDS}
"""
# Joined by UNION ALL, once for each cause.
CAUSED = """
(SELECT n.sequence, n.id FROM eventlog.events n FORCE INDEX (events_causation)
WHERE n.causation_id = %s AND n.namespace = %s LIMIT %s)
"""
# Joined by UNION ALL, once for each action.
OF_ACTION = """
(SELECT n.id FROM eventlog.events n FORCE INDEX (idx_events_action_id)
WHERE n.action_id = %s AND n.namespace = %s LIMIT %s)
"""
MOST_AT_ONCE = 64  # causes or actions of a statement
STATES = f"""
SELECT n.event_id, n.state, COUNT(*) FROM {BY_EVENT} WHERE n.event_id IN ({{ids}}) AND n.namespace = %(namespace)s
GROUP BY n.event_id, n.state
"""
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
        [(read, last, matches, *passed)] = await self._fetch(READ.replace("{matches}", scope.text), args)
        return EventChunk(read, last, str(matches).split(",") if matches else None, *passed)

    async def matching(self, namespace: str, search: Search, ids: Sequence[str]) -> list[str]:
        scope = Conditions(self._server, namespace, search, of_events=True)
        statement = MATCHING.replace("{matches}", scope.text).replace("{ids}", scope.listed("id", ids))
        return [row[0] for row in await self._fetch(statement, scope.args)]

    async def summaries(self, namespace: str, ids: Sequence[str], *, documents: bool) -> list[EventSummary]:
        scope = Conditions(self._server, namespace, Search())
        statement = SUMMARIES if documents else WITHOUT_DOCUMENTS
        rows = await self._fetch(statement.replace("{ids}", scope.listed("id", ids)), scope.args)
        return [summary_of(dict(zip(EVENT_COLUMNS, row, strict=True))) for row in rows]

    async def caused(self, namespace: str, causes: Sequence[str], limit: int) -> list[str]:
        return [row[1] for row in sorted(await self._each(CAUSED, namespace, causes, limit))[:limit]]

    async def of_actions(self, namespace: str, actions: Sequence[str], limit: int) -> list[str]:
        return [row[0] for row in await self._each(OF_ACTION, namespace, actions, limit)]

    async def states(self, namespace: str, events: Sequence[str]) -> list[tuple[str, str, int]]:
        scope = Conditions(self._server, namespace, Search())
        rows = await self._fetch(STATES.replace("{ids}", scope.listed("id", events)), scope.args)
        return [(event, state, number) for event, state, number in rows]

    async def notification_ids(self, namespace: str, events: Sequence[str], limit: int) -> list[str]:
        scope = Conditions(self._server, namespace, Search())
        statement = NOTIFICATION_IDS.replace("{ids}", scope.listed("id", events))
        return [row[0] for row in await self._fetch(statement, {**scope.args, "limit": limit})]

    async def _each(self, part: str, namespace: str, ids: Sequence[str], limit: int) -> list[tuple[Any, ...]]:
        """The rows of a part for each id."""
        rows: list[tuple[Any, ...]] = []
        for start in range(0, len(ids), MOST_AT_ONCE):
            some = ids[start : start + MOST_AT_ONCE]
            args = tuple(value for id in some for value in (id, namespace, limit))
            rows += await self._admin.fetch_all(part, len(some), args)
        return rows

    async def _fetch(self, statement: str, args: dict[str, Any]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = await self._admin.use(partial(fetch, sql=statement, args=args))
        return rows
