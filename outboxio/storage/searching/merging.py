"""The merge of the stretches of a walk: the newest row of all stretches comes first.

A row can be taken when no stretch can hold an unread row that comes before. So after each read, all rows before the
first unread row are taken, and the stretches that lag behind are read next.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

from outboxio.model.operating.groups import Place
from outboxio.storage.searching.reading import Cursor
from outboxio.storage.searching.walks import Match, place_at, rank_of

_rank: Any = attrgetter("rank")
_first: Any = itemgetter(0)


class Merge:
    """The rows of all stretches of a walk, in order."""

    def __init__(self, cursors: Sequence[Cursor]) -> None:
        self._cursors = cursors

    @property
    def unread(self) -> list[Cursor]:
        return [cursor for cursor in self._cursors if not cursor.is_at_end]

    @property
    def is_at_end(self) -> bool:
        """True if all rows were read and taken."""
        return all(cursor.is_at_end and not cursor.matches for cursor in self._cursors)

    @property
    def place(self) -> Place | None:
        """The place behind all rows that were read or taken in order; ``None`` if all rows were read."""
        first = max(self.unread, key=_rank, default=None)
        return None if first is None else first.place

    def take(self, limit: int) -> tuple[list[Match], Place | None]:
        """Up to ``limit`` rows that come before all unread rows, and the place of the last of these rows."""
        first = max(self.unread, key=_rank, default=None)
        rows = self._read()
        if first is not None:
            # A row with the rank of the first unread row is in the same stretch, and was read before.
            rows = [row for row in rows if row[0] >= first.rank]
        rows = rows[:limit]
        for _, cursor, _ in rows:
            cursor.matches.popleft()
        if not rows:
            return [], None
        _, cursor, last = rows[-1]
        return [match for _, _, match in rows], place_at(cursor.walk, cursor.stretch, last.key)

    def lagging(self, wanted: int) -> Sequence[Cursor]:
        """The stretches to read next, so that ``wanted`` rows can be taken.

        If enough rows were read, these are the stretches that may hold a row before the last of the wanted rows.
        Otherwise these are the half of the stretches that lags most: a stretch with few rows by date would otherwise be
        read to its end.
        """
        rows, unread = self._read(), sorted(self.unread, key=_rank, reverse=True)
        if len(rows) >= wanted:
            return [cursor for cursor in unread if cursor.rank > rows[wanted - 1][0]]
        fresh = [cursor for cursor in unread if not cursor.reads]
        return fresh or unread[: (len(unread) + 1) // 2]

    def _read(self) -> list[tuple[Any, Cursor, Match]]:
        """The rows that were read and not taken, in order, with ranks and stretches."""
        rows = [
            (rank_of(cursor.walk, cursor.stretch, match.key), cursor, match)
            for cursor in self._cursors
            for match in cursor.matches
        ]
        return sorted(rows, key=_first, reverse=True)
