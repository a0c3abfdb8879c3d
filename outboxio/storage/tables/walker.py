"""A search along its walks: page by page, in reads of a bounded number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from outboxio.model.operating.groups import Place, Search
from outboxio.storage.protocols.operating import Counted, Found
from outboxio.storage.tables.walks import (
    ALL,
    DEAD,
    END,
    EVENTS,
    FEWEST_ERRORS,
    FEWEST_ROWS,
    MERGED,
    MOST_ENTRIES,
    MOST_ROWS,
    STATES_OF,
    Chunk,
    Cursor,
    Key,
    Match,
    Pace,
    Stretch,
    key_behind,
    place_at,
    rank_of,
    start_of,
    stretch_of,
    walks_of,
    walks_of_states,
)

if TYPE_CHECKING:
    from outboxio.storage.tables.reads import WalkReads

STRETCHES_AT_ONCE = 64
"""The stretches that a read counts."""
MOST_EVENTS = 5000
"""The events of a correlation id, or of an action, that are walked one by one. A search for more walks by state."""
EVENTS_AT_ONCE = 200


class Walker:
    """Finds and counts the rows of a search."""

    def __init__(self, reader: WalkReads) -> None:
        self._reader = reader

    async def find(
        self, namespace: str, search: Search, limit: int, after: Place | None, most: int | None
    ) -> Found[str, Place]:
        """Up to ``limit`` matching rows after a place. The reads end after about ``most`` rows.

        ``None``: after the rows that a question may read.
        """
        if after == END:
            return Found([], None)
        walking = _Walking(self._reader, namespace, search, limit, most)
        walks = await walking.walks(after)
        for number, walk in enumerate(walks):
            place = await walking.along(walk, after if after is not None and after.walk == walk else None)
            if place is None and walking.is_over and number + 1 < len(walks):
                place = place_at(walks[number + 1], Stretch(""), start_of(walks[number + 1], search))
            if place is not None:
                return Found(walking.found, place)
        return Found(walking.found, None)

    async def count(self, namespace: str, search: Search, most: int, reads: int | None) -> Counted:
        """The number of matching rows, up to ``most``. The reads end after about ``reads`` rows."""
        walking = _Walking(self._reader, namespace, search, most + 1, reads)
        for walk in await walking.walks(None):
            if not await walking.count(walk):
                return Counted(min(walking.number, most), False)
        return Counted(walking.number, True)


class _Walking:
    """A single search: what was found, and how many rows may still be read."""

    def __init__(self, reader: WalkReads, namespace: str, search: Search, limit: int, most: int | None) -> None:
        self.found: list[str] = []
        self.number = 0
        """The number of matching rows that were counted."""
        self._reader = reader
        self._namespace = namespace
        self._search = search
        self._limit = limit
        self._most = MOST_ENTRIES if most is None else most
        self._is_bounded = most is None
        self._event_ids: Sequence[str] = ()

    @property
    def is_over(self) -> bool:
        """True if enough rows were found or read."""
        return len(self.found) >= self._limit or self._most <= 0

    async def walks(self, after: Place | None) -> Sequence[str]:
        """The walks from a place on."""
        walks = walks_of(self._search)
        if walks == (EVENTS,):
            by_state = walks_of_states(self._search)
            if (after is not None and after.walk in by_state) or not await self._find_events():
                walks = by_state
        return walks if after is None or after.walk not in walks else walks[walks.index(after.walk) :]

    async def along(self, walk: str, after: Place | None) -> Place | None:
        """Go along a walk; the place after which to go on, or ``None`` at the end of the walk."""
        most = self._most_rows(walk)
        if walk == EVENTS:
            self._most = most
            return await self._along_events(after)
        pace, cursors = self._pace(walk, most), await self._cursors(walk, after)
        place = await (self._merge(walk, cursors, pace) if walk in MERGED else self._one_by_one(walk, cursors, pace))
        self._most -= most - pace.left
        return place

    async def count(self, walk: str) -> bool:
        """Count the rows of a walk; False if too many rows match, or had to be read."""
        most = self._most_rows(walk)
        if walk == EVENTS:
            self._most = most
            return await self._count_events()
        most = min(most, self._limit) if self._takes_all(walk) else most
        whole = await self._reader.counted(self._namespace, walk, self._search, most)
        if whole is not None:
            self.number += whole.matching
            self._most -= whole.read
            return whole.read < most and self.number < self._limit
        cursors: list[Cursor] = await self._cursors(walk, None)
        is_by_index = walk in STATES_OF and self._takes_all(walk)
        at_once = MOST_ENTRIES if is_by_index else MOST_ROWS
        pace = Pace(self._limit, most, self._reader.bounds.foreign, at_once)
        while cursors and self.number < self._limit and not pace.is_over:
            some = cursors[:STRETCHES_AT_ONCE]
            self.number += sum(len(chunk.matches or ()) for chunk in await self._read(walk, some, pace))
            cursors = [cursor for cursor in cursors if not cursor.is_at_end]
        self._most -= most - pace.left
        return not cursors and self.number < self._limit

    async def _merge(self, walk: str, cursors: Sequence[Cursor], pace: Pace) -> Place | None:
        merge = Merge(cursors)
        while True:
            rows, last = merge.take(self._limit - len(self.found))
            self.found += [row.id for row in rows]
            if merge.is_at_end:
                return None
            if len(self.found) >= self._limit:
                return last
            if pace.is_over:
                return merge.place
            await self._read(walk, merge.lagging(self._limit - len(self.found)), pace)

    async def _one_by_one(self, walk: str, cursors: Sequence[Cursor], pace: Pace) -> Place | None:
        for cursor in cursors:
            start = cursor.place
            while not cursor.is_at_end:
                if pace.is_over and (cursor.reads == 0 or cursor.place != start):
                    return cursor.place
                await self._read(walk, [cursor], pace)
                wanted = self._limit - len(self.found)
                rows = list(cursor.matches)
                cursor.matches.clear()
                self.found += [row.id for row in rows[:wanted]]
                is_last = cursor is cursors[-1] and cursor.is_at_end and len(rows) <= wanted
                if len(rows) >= wanted and not is_last:
                    return place_at(walk, cursor.stretch, rows[wanted - 1].key)
        return None

    async def _along_events(self, after: Place | None) -> Place | None:
        before = None if after is None else after.key[:-1]
        ids = [event_id for event_id in self._event_ids if before is None or event_id <= before[0]]
        for start in range(0, len(ids), EVENTS_AT_ONCE):
            if self._most <= 0:
                return place_at(EVENTS, Stretch(""), (ids[start - 1], ""))
            chunk = await self._read_events(ids[start : start + EVENTS_AT_ONCE])
            found = [match for match in chunk.matches or () if before is None or match.key < before]
            rows = sorted(found, key=_key, reverse=True)
            wanted = self._limit - len(self.found)
            self.found += [row.id for row in rows[:wanted]]
            if len(rows) > wanted or (len(rows) == wanted and start + EVENTS_AT_ONCE < len(ids)):
                return place_at(EVENTS, Stretch(""), rows[wanted - 1].key)
        return None

    async def _count_events(self) -> bool:
        for start in range(0, len(self._event_ids), EVENTS_AT_ONCE):
            if self._most <= 0 or self.number >= self._limit:
                return False
            chunk = await self._read_events(self._event_ids[start : start + EVENTS_AT_ONCE])
            self.number += len(chunk.matches or ())
        return self.number < self._limit

    async def _find_events(self) -> bool:
        """Read the ids of the events; False if there are too many."""
        ids = await self._reader.event_ids(self._namespace, self._search, MOST_EVENTS + 1)
        self._event_ids = sorted(ids, reverse=True)
        return len(ids) <= MOST_EVENTS

    async def _cursors(self, walk: str, after: Place | None) -> list[Cursor]:
        """The stretches of a walk that have rows after a place."""
        if walk == ALL:
            stretches = [Stretch("")]
        else:
            stretches = await self._reader.stretches(self._namespace, walk, self._search)
        start = start_of(walk, self._search)
        if after is None:
            return [Cursor(walk, stretch, start) for stretch in stretches]
        if walk in MERGED:
            keys = [key_behind(walk, stretch, after) for stretch in stretches]
            if walk == DEAD and self._search.until is not None:
                keys = [min(key, start) for key in keys]  # a caller may name a row behind ``until``
            return [Cursor(walk, stretch, key) for stretch, key in zip(stretches, keys, strict=True)]
        reached = stretch_of(after)
        rest = [stretch for stretch in stretches if stretch >= reached]
        return [Cursor(walk, stretch, after.key[:-1] if stretch == reached else start) for stretch in rest]

    def _takes_all(self, walk: str) -> bool:
        """True if every row of the walk matches."""
        return self._reader.rest(walk, self._search) == Search()

    def _most_rows(self, walk: str) -> int:
        """The rows that may be read along a walk."""
        return min(self._most, self._reader.most_rows(walk, self._search)) if self._is_bounded else self._most

    def _pace(self, walk: str, most: int) -> Pace:
        first = self._limit + 1
        if replace(self._reader.rest(walk, self._search), states=()) != Search():
            # Few rows may match; most rows of a walk are in the states of a search.
            first = max(first, FEWEST_ERRORS if self._search.error else FEWEST_ROWS)
        elif walk in MERGED:
            first *= 2  # the rows of a page are not spread evenly over the stretches
        return Pace(first, most, self._reader.bounds.foreign)

    async def _read(self, walk: str, cursors: Sequence[Cursor], pace: Pace) -> Sequence[Chunk]:
        requests = pace.requests(cursors)
        chunks = await self._reader.read(self._namespace, walk, self._search, requests)
        for cursor, request, chunk in zip(cursors, requests, chunks, strict=True):
            cursor.heed(chunk, request.size)
        pace.heed(chunks)
        return chunks

    async def _read_events(self, ids: Sequence[str]) -> Chunk:
        chunk = await self._reader.read_events(self._namespace, self._search, ids)
        self._most -= chunk.read
        return chunk


def _key(match: Match) -> Key:
    return match.key


_rank: Any = attrgetter("rank")
_first: Any = itemgetter(0)


class Merge:
    """The rows of all stretches of a walk: the newest row of all stretches comes first.

    A row can be taken when no stretch can hold an unread row that comes before. So after each read, all rows before the
    first unread row are taken, and the stretches that lag behind are read next.
    """

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
