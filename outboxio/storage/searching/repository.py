"""The search of a dialect: everything that does not depend on the dialect."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.groups import Place, Search
from outboxio.storage.protocols.operating import BulkOrder, Counted, FoundErrors, FoundRows, LastError, Piece
from outboxio.storage.searching.reading import Reader
from outboxio.storage.searching.walker import Walker
from outboxio.storage.searching.walks import END, EVENTS, place_of_row, walks_of, walks_of_states

ROWS_OF_A_PIECE = 5000
"""The rows that are read for a piece of a bulk order, matching or not."""
ERRORS_AT_ONCE = 1000
"""The rows whose errors a statement reads."""


class Change(msgspec.Struct, frozen=True):
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
        """The date of the change, not before ``until``, so that a changed row does not match again."""
        return self.now if self.search.until is None else max(self.now, self.search.until)

    @property
    def reached_json(self) -> str:
        return msgspec.json.encode(self.reached).decode()


class WalkedSearch(Reader):
    """Implements :class:`SearchRepository` with the reads and the change of a dialect."""

    def __init__(self) -> None:
        self._walker = Walker(self)

    @abstractmethod
    async def records(self, namespace: str, ids: Sequence[str], *, documents: bool = True) -> list[NotificationRecord]:
        """The notifications with these ids, in any order. ``documents``: see :class:`EventSearch`."""

    @abstractmethod
    async def errors(self, namespace: str, ids: Sequence[str]) -> list[LastError]:
        """The last errors of these notifications, in any order; a row without a last error is left out."""

    @abstractmethod
    async def change(self, piece: Change) -> tuple[int, int] | None:
        """The transaction of :meth:`SearchRepository.change_piece`; how many rows matched, and how many changed.

        ``None`` if the operation is not this worker's any longer, or is to be stopped.
        """

    async def find(
        self,
        namespace: str,
        search: Search,
        limit: int,
        after: Place | None = None,
        *,
        most: int | None = None,
        documents: bool = True,
    ) -> FoundRows:
        found = await self._walker.find(namespace, search, limit, after, most)
        rows = await self.records(namespace, found.ids, documents=documents) if found.ids else []
        records = {str(row.id): row for row in rows}
        return FoundRows([records[id] for id in found.ids if id in records], found.next)

    async def place_of(self, namespace: str, search: Search, id: UUID) -> Place | None:
        walks = walks_of(search)
        walks = walks if walks != (EVENTS,) else (EVENTS, *walks_of_states(search))
        rows = await self.records(namespace, [str(id)])
        return place_of_row(walks, rows[0]) if rows else None

    async def count(self, namespace: str, search: Search, most: int, *, reads: int | None = None) -> Counted:
        return await self._walker.count(namespace, search, most, reads)

    async def last_errors(self, namespace: str, search: Search, limit: int, *, most: int | None = None) -> FoundErrors:
        found = await self._walker.find(namespace, search, limit, None, most)
        errors: dict[str, LastError] = {}
        for start in range(0, len(found.ids), ERRORS_AT_ONCE):
            some = found.ids[start : start + ERRORS_AT_ONCE]
            errors |= {str(error.id): error for error in await self.errors(namespace, some)}
        return FoundErrors([errors[id] for id in found.ids if id in errors], found.next)

    async def change_piece(
        self, namespace: str, order: BulkOrder, after: Place | None, limit: int, now: datetime
    ) -> Piece:
        # Found without locks: a piece may have to pass over many rows.
        found = await self._walker.find(namespace, order.search, limit, after, ROWS_OF_A_PIECE)
        changed = await self.change(Change(namespace, order, found.ids, found.next or END, now))
        if changed is None:
            return Piece(0, 0, 0, after, is_ours=False)
        matched, done = changed
        return Piece(matched, done, matched - done, found.next)
