"""The search for notifications along the indexes of ``event_notifications``, and the pieces of bulk operations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.groups import Place, Search
from outboxio.storage.protocols.operating import BulkOrder, Counted, Found, LastError, Piece
from outboxio.storage.statement import Port, Query, Runner, Statement
from outboxio.storage.tables.notifications import RETRY, SKIP, StoredNotifications
from outboxio.storage.tables.probes import Probes
from outboxio.storage.tables.reads import LAST_ERROR, NO_ERROR, WalkReads, matching
from outboxio.storage.tables.walker import Walker
from outboxio.storage.tables.walks import (
    END,
    EVENTS,
    Bounds,
    place_of_row,
    walks_of,
    walks_of_states,
)

# --- rows ------------------------------------------------------------------------------------------

_BY_ID = "{table event_notifications primary n}"
_OF_IDS = "n.namespace = :namespace AND {ids n.id :ids}"
ERRORS = Query(
    f"SELECT n.id, n.event_id, n.handler_name, n.updated_date, {{text {{stored_error}}}} FROM {_BY_ID} WHERE {_OF_IDS}",
    tuple[UUID, UUID, str, datetime, tuple[Any, ...] | None],
    lenient=True,
).having(stored_error=LAST_ERROR)

# --- pieces ----------------------------------------------------------------------------------------

LOCK_OPERATION = Query(
    """
SELECT 1 FROM {table operations primary}
WHERE id = :operation AND namespace = :namespace AND worker = :worker AND state = 'RUNNING' AND NOT stop_ordered
{for_update}
""",
    int,
)
# Rows are locked in the order of the primary key, as all statements of the loops lock rows.
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


ROWS_OF_A_PIECE = 5000
"""The rows that are read for a piece of a bulk order, matching or not."""
ERRORS_AT_ONCE = 1000
"""The rows whose errors a statement reads."""


class Change(Struct, frozen=True):
    """A piece of a bulk order: the rows to change, and what to write into ``operations``."""

    namespace: str
    order: BulkOrder
    ids: Sequence[str]
    """Rows that have matched; a row that does not match any longer is left."""
    reached: Place
    now: datetime

    @property
    def search(self) -> Search:
        return self.order.search

    @property
    def moment(self) -> datetime:
        """The ``updated_date`` of the rows, not before ``until``, so that a changed row does not match again."""
        return self.now if self.search.until is None else max(self.now, self.search.until)


class NotificationSearch(WalkReads):
    """Matching notifications, newest first, along the index that fits the search (decision 43).

    The walks, each with its own order:

    - ``dead``: only DEAD and EXPIRED rows are wanted. By the date of the end, newest first.
    - ``waiting``: only PENDING, FAILED and DYING rows. By due date, latest first.
    - ``blocked``: only BLOCKED rows. By handler name, ordering key and sequence.
    - ``events``: the events of a correlation id or of an action id are known, at most 5,000. Newest event first.
    - ``all``: everything else, along the unique key (event_id, handler_name), newest event first. Ids of events are in
      the order of time.

    A search of several states takes several walks, one after the other. A row that does not change is in exactly one
    page. ``most``: a read ends after about as many rows, matching or not; the page then has a place and may have few
    rows. ``None``: after as many rows as a database reads within 50 ms.
    """

    def __init__(self, port: Port, bounds: Bounds, probes: Probes, notifications: StoredNotifications) -> None:
        super().__init__(port, bounds, probes, notifications)
        self._walker = Walker(self)

    async def find(
        self,
        namespace: str,
        search: Search,
        limit: int,
        after: Place | None = None,
        *,
        most: int | None = None,
        documents: bool = True,
    ) -> Found[NotificationRecord, Place]:
        """Up to ``limit`` matches after a place. The place is from a page of the same search.

        ``documents``: see ``EventSearch``.
        """
        found = await self._walker.find(namespace, search, limit, after, most)
        rows = await self._notifications.records(namespace, found.rows, documents=documents)
        records = {str(row.id): row for row in rows}
        return Found([records[id] for id in found.rows if id in records], found.next)

    async def place_of(self, namespace: str, search: Search, id: UUID) -> Place | None:
        """The place of a notification in the walk of the search.

        ``None`` for an unknown id, and for a row in a state that the walk does not have, or no longer has.
        """
        walks = walks_of(search)
        walks = walks if walks != (EVENTS,) else (EVENTS, *walks_of_states(search))
        rows = await self._notifications.records(namespace, [str(id)])
        return place_of_row(walks, rows[0]) if rows else None

    async def count(self, namespace: str, search: Search, most: int, *, reads: int | None = None) -> Counted:
        """The number of matches, up to ``most``; about ``reads`` rows are read, matching or not.

        ``None``: as many rows as a database reads within 50 ms.
        """
        return await self._walker.count(namespace, search, most, reads)

    async def last_errors(
        self, namespace: str, search: Search, limit: int, *, most: int | None = None
    ) -> Found[LastError, Place]:
        """The last errors of the newest ``limit`` matches, in the order of :meth:`find`."""
        found = await self._walker.find(namespace, search, limit, None, most)
        errors: dict[str, LastError] = {}
        for start in range(0, len(found.rows), ERRORS_AT_ONCE):
            some = found.rows[start : start + ERRORS_AT_ONCE]
            errors |= {str(error.id): error for error in await self.errors(namespace, some)}
        return Found([errors[id] for id in found.rows if id in errors], found.next)

    async def change_piece(
        self, namespace: str, order: BulkOrder, after: Place | None, limit: int, now: datetime
    ) -> Piece:
        """Retry or skip up to ``limit`` matches after a place, and write the new place into ``operations``.

        A row that SKIP does not change, because the row is SUCCEEDED or SKIPPED, is refused. A row that does not match
        any longer is left.

        Both happen in a single transaction, in which the row of the operation is locked: the row must be RUNNING, with
        the worker of the order and without an order to stop. The search of a bulk order has ``until``, so a changed
        row, whose ``updated_date`` is not before ``until``, never matches again. The transaction also adds to
        ``matched``, ``done`` and ``refused``, and sets ``updated_date``.
        """
        # Found without locks: a piece may have to pass over many rows.
        found = await self._walker.find(namespace, order.search, limit, after, ROWS_OF_A_PIECE)
        changed = await self.change(Change(namespace, order, found.rows, found.next or END, now))
        if changed is None:
            return Piece(0, 0, 0, after, is_ours=False)
        matched, done = changed
        return Piece(matched, done, matched - done, found.next)

    # --- inside ------------------------------------------------------------------------------------

    async def errors(self, namespace: str, ids: Sequence[str]) -> list[LastError]:
        """The last errors of these notifications, in any order; a row without a last error is left out."""
        rows = await self._port.fetch(ERRORS, namespace=namespace, ids=list(ids))
        return [
            LastError(id, event_id, handler_name, date, *error)
            for id, event_id, handler_name, date, error in rows
            if error is not None and len(error) == 2 and all(isinstance(text, str) for text in error)
        ]

    async def change(self, piece: Change) -> tuple[int, int] | None:
        """The transaction of :meth:`change_piece`; how many rows matched, and how many changed.

        ``None`` if the operation is not this worker's any longer, or is to be stopped.
        """

        async def work(transaction: Runner) -> tuple[int, int] | None:
            order, scope = piece.order, {"namespace": piece.namespace, "operation": piece.order.operation}
            if not await transaction.fetch(LOCK_OPERATION, worker=order.worker, **scope):
                return None
            matched, done = await lock_matching(transaction) if piece.ids else [], 0
            if matched:
                change = {"namespace": piece.namespace, "ids": matched, "now": piece.now, "moment": piece.moment}
                done = await transaction.execute(CHANGES[order.kind], **change)
            reached = msgspec.Raw(msgspec.json.encode(piece.reached))
            written = {"matched": len(matched), "done": done, "reached": reached, "now": piece.now}
            await transaction.execute(WRITE_OPERATION, **scope, **written)
            return len(matched), done

        async def lock_matching(transaction: Runner) -> list[UUID]:
            parts, values = matching(piece.search)
            query = LOCK_MATCHING.having(**parts)
            return await transaction.fetch(query, namespace=piece.namespace, ids=sorted(piece.ids), **values)

        return await self._port.transaction(work)
