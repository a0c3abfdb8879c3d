"""The search for notifications along the indexes of ``event_notifications``, and the chunks of bulk operations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.groups import PageCursor, Search
from outboxio.storage.protocols.operating import BulkOperation, ChunkResult, Counted, Found, LastError
from outboxio.storage.statement import Port, Query, Runner, Statement
from outboxio.storage.tables.notifications import RETRY, SKIP, StoredNotifications
from outboxio.storage.tables.probes import Probes
from outboxio.storage.tables.reads import LAST_ERROR, NO_ERROR, ScanReads, matching
from outboxio.storage.tables.scanner import Scanner
from outboxio.storage.tables.scans import (
    END,
    EVENTS,
    Bounds,
    cursor_of_row,
    scans_of,
    scans_of_states,
)

# --- rows ------------------------------------------------------------------------------------------

_BY_ID = "{table event_notifications primary n}"
_OF_IDS = "n.namespace = :namespace AND {ids n.id :ids}"
ERRORS = Query(
    f"SELECT n.id, n.event_id, n.handler_name, n.updated_date, {{text {{stored_error}}}} FROM {_BY_ID} WHERE {_OF_IDS}",
    tuple[UUID, UUID, str, datetime, tuple[Any, ...] | None],
    lenient=True,
).having(stored_error=LAST_ERROR)

# --- chunks ----------------------------------------------------------------------------------------

LOCK_OPERATION = Query(
    """
SELECT 1 FROM {table operations primary}
WHERE id = :operation AND namespace = :namespace AND worker = :worker AND state = 'RUNNING' AND NOT stop_ordered
{for_update}
""",
    int,
)
# Rows are locked in primary key order, as in all statements of the loops.
LOCK_MATCHING = Query(
    f"""
SELECT n.id FROM {_BY_ID} WHERE {_OF_IDS} AND {{matches}} AND {{has_texts}} ORDER BY n.id {{for_update}}
""",
    UUID,
).having(**NO_ERROR, error=LAST_ERROR)

CHANGES = {"retry": RETRY, "skip": SKIP}

WRITE_OPERATION = Statement("""
UPDATE {table operations primary} SET matched = matched + :matched, done = done + :done,
  refused = refused + :matched - :done, reached = {json :reached}, updated_date = :now
WHERE id = :operation
""")

# --- the table -------------------------------------------------------------------------------------


ROWS_PER_CHUNK = 5000
"""The rows that are read for a chunk of a bulk operation, matching or not."""
ERRORS_AT_ONCE = 1000
"""The rows whose errors are read by one statement."""


class Change(Struct, frozen=True):
    """A chunk of a bulk operation: the rows to change, and what to write into ``operations``."""

    namespace: str
    operation: BulkOperation
    ids: Sequence[str]
    """Rows that matched when they were found. A row that no longer matches is not changed."""
    reached: PageCursor
    now: datetime

    @property
    def search(self) -> Search:
        return self.operation.search

    @property
    def updated_at(self) -> datetime:
        """The ``updated_date`` of the rows, not before ``until``, so that a changed row does not match again."""
        return self.now if self.search.until is None else max(self.now, self.search.until)


class NotificationSearch(ScanReads):
    """Matching notifications, newest first, along the index that fits the search (decision 43).

    Each scan has its own order:

    - ``dead``: only DEAD and EXPIRED rows. By the date on which they ended, newest first.
    - ``waiting``: only PENDING, FAILED and DYING rows. By due date, latest first.
    - ``blocked``: only BLOCKED rows. By handler name, ordering key and sequence.
    - ``events``: rows of the events of a correlation id or an action id, at most 5,000 events. Newest event first.
    - ``all``: everything else, along the unique key (event_id, handler_name), newest event first. Event ids are in time
      order.

    A search for several states runs several scans, one after another. A row that does not change is on exactly one
    page. A read ends after about ``most`` rows, matching or not; the page then has a cursor and may have few rows. With
    ``most=None`` it ends after as many rows as the database reads within 50 ms.
    """

    def __init__(self, port: Port, bounds: Bounds, probes: Probes, notifications: StoredNotifications) -> None:
        super().__init__(port, bounds, probes, notifications)
        self._scanner = Scanner(self)

    async def find(
        self,
        namespace: str,
        search: Search,
        limit: int,
        after: PageCursor | None = None,
        *,
        most: int | None = None,
        documents: bool = True,
    ) -> Found[NotificationRecord, PageCursor]:
        """Return up to ``limit`` matches after the cursor of a page of the same search.

        ``documents``: see ``EventSearch``.
        """
        found = await self._scanner.find(namespace, search, limit, after, most)
        rows = await self._notifications.records(namespace, found.rows, documents=documents)
        # A row may have reached another state since its id was found.
        records = {str(row.id): row for row in rows if not search.states or row.state in search.states}
        return Found([records[id] for id in found.rows if id in records], found.next)

    async def cursor_of_notification(self, namespace: str, search: Search, id: UUID) -> PageCursor | None:
        """Return the page cursor after a notification in the scans of the search.

        ``None`` if the id is unknown, or the row is in a state that these scans do not have.
        """
        scans = scans_of(search)
        scans = scans if scans != (EVENTS,) else (EVENTS, *scans_of_states(search))
        rows = await self._notifications.records(namespace, [str(id)])
        return cursor_of_row(scans, rows[0]) if rows else None

    async def count(self, namespace: str, search: Search, most: int, *, reads: int | None = None) -> Counted:
        """Count the matches, up to ``most``, and read about ``reads`` rows, matching or not.

        With ``reads=None``, as many rows are read as the database reads within 50 ms.
        """
        return await self._scanner.count(namespace, search, most, reads)

    async def last_errors(
        self, namespace: str, search: Search, limit: int, *, most: int | None = None
    ) -> Found[LastError, PageCursor]:
        """Return the last errors of the newest ``limit`` matches, in the order of :meth:`find`."""
        found = await self._scanner.find(namespace, search, limit, None, most)
        errors: dict[str, LastError] = {}
        for start in range(0, len(found.rows), ERRORS_AT_ONCE):
            some = found.rows[start : start + ERRORS_AT_ONCE]
            errors |= {str(error.id): error for error in await self.errors(namespace, some)}
        return Found([errors[id] for id in found.rows if id in errors], found.next)

    async def change_chunk(
        self, namespace: str, operation: BulkOperation, after: PageCursor | None, limit: int, now: datetime
    ) -> ChunkResult:
        """Retry or skip up to ``limit`` matches after a page cursor, and store the new cursor in ``operations``.

        SKIP refuses rows that are SUCCEEDED or SKIPPED. Rows that no longer match are not changed.

        Both happen in a single transaction that locks the row of the operation. This row must be RUNNING, belong to the
        worker, and have no request to stop. The search of a bulk operation has ``until``, and a changed row gets an
        ``updated_date`` that is not before ``until``, so it never matches again. The transaction also adds to
        ``matched``, ``done`` and ``refused``, and sets ``updated_date``.
        """
        # Rows are found without locks, because many rows may have to be skipped.
        found = await self._scanner.find(namespace, operation.search, limit, after, ROWS_PER_CHUNK)
        changed = await self.change(Change(namespace, operation, found.rows, found.next or END, now))
        if changed is None:
            return ChunkResult(0, 0, 0, after, is_ours=False)
        matched, done = changed
        return ChunkResult(matched, done, matched - done, found.next)

    # --- inside ------------------------------------------------------------------------------------

    async def errors(self, namespace: str, ids: Sequence[str]) -> list[LastError]:
        """Return the last errors of these notifications, in any order, without rows that have none."""
        rows = await self._port.fetch(ERRORS, namespace=namespace, ids=list(ids))
        return [
            LastError(id, event_id, handler_name, date, *error)
            for id, event_id, handler_name, date, error in rows
            if error is not None and len(error) == 2 and all(isinstance(text, str) for text in error)
        ]

    async def change(self, chunk: Change) -> tuple[int, int] | None:
        """Run the transaction of :meth:`change_chunk`; return how many rows matched and how many changed.

        ``None`` if the operation no longer belongs to this worker, or should stop.
        """

        async def work(transaction: Runner) -> tuple[int, int] | None:
            operation, scope = chunk.operation, {"namespace": chunk.namespace, "operation": chunk.operation.operation}
            if not await transaction.fetch(LOCK_OPERATION, worker=operation.worker, **scope):
                return None
            matched, done = await lock_matching(transaction) if chunk.ids else [], 0
            if matched:
                change = {
                    "namespace": chunk.namespace,
                    "ids": matched,
                    "now": chunk.now,
                    "changed_at": chunk.updated_at,
                }
                done = await transaction.execute(CHANGES[operation.kind], **change)
            reached = msgspec.Raw(msgspec.json.encode(chunk.reached))
            written = {"matched": len(matched), "done": done, "reached": reached, "now": chunk.now}
            await transaction.execute(WRITE_OPERATION, **scope, **written)
            return len(matched), done

        async def lock_matching(transaction: Runner) -> list[UUID]:
            parts, values = matching(chunk.search)
            query = LOCK_MATCHING.having(**parts)
            return await transaction.fetch(query, namespace=chunk.namespace, ids=sorted(chunk.ids), **values)

        return await self._port.transaction(work)
