"""Runs a search along its index scans: page by page, in reads of a bounded number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from outboxio.model.operating.groups import PageCursor, Search
from outboxio.storage.protocols.operating import Counted, Found
from outboxio.storage.tables.scans import (
    ALL,
    DEAD,
    END,
    EVENTS,
    MAX_INDEX_ENTRIES,
    MAX_ROWS,
    MERGED,
    MIN_ERRORS,
    MIN_ROWS,
    STATES_OF,
    Key,
    Match,
    ReadBudget,
    ReadResult,
    Segment,
    SegmentCursor,
    cursor_at,
    key_after,
    rank_of,
    scans_of,
    scans_of_states,
    segment_of,
    start_of,
)

if TYPE_CHECKING:
    from outboxio.storage.tables.reads import ScanReads

SEGMENTS_AT_ONCE = 64
"""The segments that are counted at once."""
MAX_EVENTS = 5000
"""The most events of a correlation id or action that are read one by one. Searches for more events scan by state."""
EVENTS_AT_ONCE = 200


class Scanner:
    """Finds and counts the rows of a search."""

    def __init__(self, reader: ScanReads) -> None:
        self._reader = reader

    async def find(
        self, namespace: str, search: Search, limit: int, after: PageCursor | None, most: int | None
    ) -> Found[str, PageCursor]:
        """Return up to ``limit`` ids of matching rows after a page cursor. Stop after reading about ``most`` rows.

        If ``most`` is ``None``, the bounds of the database apply.
        """
        if after == END:
            return Found([], None)
        run = _SearchScan(self._reader, namespace, search, limit, most)
        scans = await run.scans(after)
        for number, scan in enumerate(scans):
            cursor = await run.advance(scan, after if after is not None and after.scan == scan else None)
            if cursor is None and run.is_done and number + 1 < len(scans):
                cursor = cursor_at(scans[number + 1], Segment(""), start_of(scans[number + 1], search))
            if cursor is not None:
                return Found(run.found, cursor)
        return Found(run.found, None)

    async def count(self, namespace: str, search: Search, most: int, reads: int | None) -> Counted:
        """Count the matching rows, up to ``most``. Stop after reading about ``reads`` rows."""
        run = _SearchScan(self._reader, namespace, search, most + 1, reads)
        for scan in await run.scans(None):
            if not await run.count(scan):
                return Counted(min(run.number, most), False)
        return Counted(run.number, True)


class _SearchScan:
    """The state of one search: the rows found so far, and how many may still be read."""

    def __init__(self, reader: ScanReads, namespace: str, search: Search, limit: int, most: int | None) -> None:
        self.found: list[str] = []
        self.number = 0
        """How many matching rows were counted."""
        self._reader = reader
        self._namespace = namespace
        self._search = search
        self._limit = limit
        self._most = MAX_INDEX_ENTRIES if most is None else most
        self._is_bounded = most is None
        self._event_ids: Sequence[str] = ()

    @property
    def is_done(self) -> bool:
        """True if enough rows were found or read."""
        return len(self.found) >= self._limit or self._most <= 0

    async def scans(self, after: PageCursor | None) -> Sequence[str]:
        """Return the scans that remain after a page cursor."""
        scans = scans_of(self._search)
        if scans == (EVENTS,):
            by_state = scans_of_states(self._search)
            if (after is not None and after.scan in by_state) or not await self._find_events():
                scans = by_state
        return scans if after is None or after.scan not in scans else scans[scans.index(after.scan) :]

    async def advance(self, scan: str, after: PageCursor | None) -> PageCursor | None:
        """Read along a scan. Return the cursor at which the next page starts, or ``None`` at the end of the scan."""
        most = self._max_rows(scan)
        if scan == EVENTS:
            self._most = most
            return await self._advance_events(after)
        budget, cursors = self._budget(scan, most), await self._cursors(scan, after)
        end = await (self._merge(scan, cursors, budget) if scan in MERGED else self._one_by_one(scan, cursors, budget))
        self._most -= most - budget.left
        return end

    async def count(self, scan: str) -> bool:
        """Count the rows of a scan. Return False if too many rows match or would have to be read."""
        most = self._max_rows(scan)
        if scan == EVENTS:
            self._most = most
            return await self._count_events()
        most = min(most, self._limit) if self._takes_all(scan) else most
        whole = await self._reader.counted(self._namespace, scan, self._search, most)
        if whole is not None:
            self.number += whole.matching
            self._most -= whole.read
            return whole.read < most and self.number < self._limit
        cursors: list[SegmentCursor] = await self._cursors(scan, None)
        is_by_index = scan in STATES_OF and self._takes_all(scan)
        at_once = MAX_INDEX_ENTRIES if is_by_index else MAX_ROWS
        budget = ReadBudget(self._limit, most, self._reader.bounds.skipped, at_once)
        while cursors and self.number < self._limit and not budget.is_spent:
            some = cursors[:SEGMENTS_AT_ONCE]
            self.number += sum(len(result.matches or ()) for result in await self._read(scan, some, budget))
            cursors = [cursor for cursor in cursors if not cursor.is_at_end]
        self._most -= most - budget.left
        return not cursors and self.number < self._limit

    async def _merge(self, scan: str, cursors: Sequence[SegmentCursor], budget: ReadBudget) -> PageCursor | None:
        merge = Merge(cursors)
        while True:
            rows, last = merge.take(self._limit - len(self.found))
            self.found += [row.id for row in rows]
            if merge.is_at_end:
                return None
            if len(self.found) >= self._limit:
                return last
            if budget.is_spent:
                return merge.page_cursor
            await self._read(scan, merge.lagging(self._limit - len(self.found)), budget)

    async def _one_by_one(self, scan: str, cursors: Sequence[SegmentCursor], budget: ReadBudget) -> PageCursor | None:
        for cursor in cursors:
            start = cursor.page_cursor
            while not cursor.is_at_end:
                if budget.is_spent and (cursor.reads == 0 or cursor.page_cursor != start):
                    return cursor.page_cursor
                await self._read(scan, [cursor], budget)
                missing = self._limit - len(self.found)
                rows = list(cursor.matches)
                cursor.matches.clear()
                self.found += [row.id for row in rows[:missing]]
                is_last = cursor is cursors[-1] and cursor.is_at_end and len(rows) <= missing
                if len(rows) >= missing and not is_last:
                    return cursor_at(scan, cursor.segment, rows[missing - 1].key)
        return None

    async def _advance_events(self, after: PageCursor | None) -> PageCursor | None:
        before = None if after is None else after.key[:-1]
        ids = [event_id for event_id in self._event_ids if before is None or event_id <= before[0]]
        for start in range(0, len(ids), EVENTS_AT_ONCE):
            if self._most <= 0:
                return cursor_at(EVENTS, Segment(""), (ids[start - 1], ""))
            result = await self._read_events(ids[start : start + EVENTS_AT_ONCE])
            found = [match for match in result.matches or () if before is None or match.key < before]
            rows = sorted(found, key=_key, reverse=True)
            missing = self._limit - len(self.found)
            self.found += [row.id for row in rows[:missing]]
            if len(rows) > missing or (len(rows) == missing and start + EVENTS_AT_ONCE < len(ids)):
                return cursor_at(EVENTS, Segment(""), rows[missing - 1].key)
        return None

    async def _count_events(self) -> bool:
        for start in range(0, len(self._event_ids), EVENTS_AT_ONCE):
            if self._most <= 0 or self.number >= self._limit:
                return False
            result = await self._read_events(self._event_ids[start : start + EVENTS_AT_ONCE])
            self.number += len(result.matches or ())
        return self.number < self._limit

    async def _find_events(self) -> bool:
        """Read the ids of the events. Return False if there are too many."""
        ids = await self._reader.event_ids(self._namespace, self._search, MAX_EVENTS + 1)
        self._event_ids = sorted(ids, reverse=True)
        return len(ids) <= MAX_EVENTS

    async def _cursors(self, scan: str, after: PageCursor | None) -> list[SegmentCursor]:
        """Return the segments of a scan that have rows after a page cursor."""
        if scan == ALL:
            segments = [Segment("")]
        else:
            segments = await self._reader.segments(self._namespace, scan, self._search)
        start = start_of(scan, self._search)
        if after is None:
            return [SegmentCursor(scan, segment, start) for segment in segments]
        if scan in MERGED:
            keys = [key_after(scan, segment, after) for segment in segments]
            if scan == DEAD and self._search.until is not None:
                keys = [min(key, start) for key in keys]  # the cursor may lie after ``until``
            return [SegmentCursor(scan, segment, key) for segment, key in zip(segments, keys, strict=True)]
        reached = segment_of(after)
        remaining = [segment for segment in segments if segment >= reached]
        return [SegmentCursor(scan, segment, after.key[:-1] if segment == reached else start) for segment in remaining]

    def _takes_all(self, scan: str) -> bool:
        """True if every row of the scan matches."""
        return self._reader.residual(scan, self._search) == Search()

    def _max_rows(self, scan: str) -> int:
        """Return how many rows of a scan may be read."""
        return min(self._most, self._reader.max_rows(scan, self._search)) if self._is_bounded else self._most

    def _budget(self, scan: str, most: int) -> ReadBudget:
        first = self._limit + 1
        if replace(self._reader.residual(scan, self._search), states=()) != Search():
            # Few rows may match. A condition on states alone would match most rows of a scan.
            first = max(first, MIN_ERRORS if self._search.error else MIN_ROWS)
        elif scan in MERGED:
            first *= 2  # the rows of a page are spread unevenly over the segments
        return ReadBudget(first, most, self._reader.bounds.skipped)

    async def _read(self, scan: str, cursors: Sequence[SegmentCursor], budget: ReadBudget) -> Sequence[ReadResult]:
        requests = budget.requests(cursors)
        results = await self._reader.read(self._namespace, scan, self._search, requests)
        for cursor, request, result in zip(cursors, requests, results, strict=True):
            cursor.advance(result, request.size)
        budget.spend(results)
        return results

    async def _read_events(self, ids: Sequence[str]) -> ReadResult:
        result = await self._reader.read_events(self._namespace, self._search, ids)
        self._most -= result.read
        return result


def _key(match: Match) -> Key:
    return match.key


_rank: Any = attrgetter("rank")
_first: Any = itemgetter(0)


class Merge:
    """Merges the segments of a scan, so that the newest row of all segments comes first.

    A row can be taken once no segment can hold an unread row before it. After each read, all rows before the first
    unread row are taken, and the segments that lag behind are read next.
    """

    def __init__(self, cursors: Sequence[SegmentCursor]) -> None:
        self._cursors = cursors

    @property
    def unread(self) -> list[SegmentCursor]:
        return [cursor for cursor in self._cursors if not cursor.is_at_end]

    @property
    def is_at_end(self) -> bool:
        """True if all rows were read and taken."""
        return all(cursor.is_at_end and not cursor.matches for cursor in self._cursors)

    @property
    def page_cursor(self) -> PageCursor | None:
        """The page cursor after all rows that could be taken; ``None`` if all rows were read."""
        first = max(self.unread, key=_rank, default=None)
        return None if first is None else first.page_cursor

    def take(self, limit: int) -> tuple[list[Match], PageCursor | None]:
        """Return up to ``limit`` rows that come before all unread rows, and the page cursor after the last of them."""
        first = max(self.unread, key=_rank, default=None)
        rows = self._read()
        if first is not None:
            # A row with the rank of the first unread row is in the same segment and was already read.
            rows = [row for row in rows if row[0] >= first.rank]
        rows = rows[:limit]
        for _, cursor, _ in rows:
            cursor.matches.popleft()
        if not rows:
            return [], None
        _, cursor, last = rows[-1]
        return [match for _, _, match in rows], cursor_at(cursor.scan, cursor.segment, last.key)

    def lagging(self, needed: int) -> Sequence[SegmentCursor]:
        """Return the segments to read next, so that ``needed`` rows can be taken.

        If enough rows were read, these are the segments that may hold a row before the last of them. Otherwise it is
        the half of the segments that lags behind most: reading all of them would read sparse segments to their end.
        """
        rows, unread = self._read(), sorted(self.unread, key=_rank, reverse=True)
        if len(rows) >= needed:
            return [cursor for cursor in unread if cursor.rank > rows[needed - 1][0]]
        fresh = [cursor for cursor in unread if not cursor.reads]
        return fresh or unread[: (len(unread) + 1) // 2]

    def _read(self) -> list[tuple[Any, SegmentCursor, Match]]:
        """Return the rows that were read and not taken, in order, with their ranks and cursors."""
        rows = [
            (rank_of(cursor.scan, cursor.segment, match.key), cursor, match)
            for cursor in self._cursors
            for match in cursor.matches
        ]
        return sorted(rows, key=_first, reverse=True)
