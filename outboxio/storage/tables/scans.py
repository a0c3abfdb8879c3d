"""The index scans behind a search for notifications, and the page cursors of each scan.

A scan is divided into *segments*: the rows of one stored handler name, and where the index needs it of one partition,
in index order. Scans over DEAD or waiting rows merge their segments, so that the newest row of all handlers comes
first. All other scans read one segment after another.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from outboxio.model.notification import NotificationRecord, State
from outboxio.model.operating.groups import PageCursor, Search

DEAD, WAITING, BLOCKED, EVENTS, ALL = "dead", "waiting", "blocked", "events", "all"
END = PageCursor("end", "", ())
"""The cursor after the last row of all scans."""

STATES_OF: Mapping[str, frozenset[State]] = {
    DEAD: frozenset({State.DEAD, State.EXPIRED}),
    WAITING: frozenset({State.PENDING, State.FAILED, State.DYING}),
    BLOCKED: frozenset({State.BLOCKED}),
}
"""The scans over rows in certain states, in the order in which a search for several states runs them."""
MERGED = frozenset({DEAD, WAITING})

KEYED, KEYLESS = 0, 1
"""The two segments of a handler name in the scan over BLOCKED rows: with and without an ordering key."""

LATEST_TIME = "9999-12-31 23:59:59.999999"
LAST_SEQUENCE = str(2**63 - 1)
FIRST_ID, LAST_ID = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"
_OUT_OF_RANGE = ("infinity", "-infinity", "0000-00-00 00:00:00.000000")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_ID_SUFFIX = "-ffff-7fff-bfff-ffffffffffff"

Key = tuple[str, ...]
"""The index columns of a row within its segment, as text. Timestamps have six decimals."""


class Segment(NamedTuple):
    """The rows of a stored handler name in a scan. ``part``: the partition, KEYED or KEYLESS, or 0."""

    name: str
    part: int = 0


class Match(Struct, frozen=True, array_like=True):
    """A matching row: the two values of its key, and its id."""

    one: str
    two: str
    id: str

    @property
    def key(self) -> Key:
        return self.one, self.two


class ReadRequest(Struct, frozen=True):
    """A request for up to ``size`` rows of a segment after the key ``after``."""

    segment: Segment
    after: Key
    size: int


class ReadResult(Struct, frozen=True, kw_only=True):
    """The rows read for a request."""

    number: int = 0
    """The index of the request in its list."""
    read: int
    """How many rows of the namespace were read, matching or not."""
    last: Key | None = None
    """The last row of the namespace."""
    skipped: int = 0
    """How many rows of other namespaces were skipped. Only the scan over all rows reads them."""
    reached: Key | None = None
    """The last row of any namespace. It must not appear in a response."""
    matches: list[Match] | None = None
    """The matching rows."""
    matching: int = 0
    """How many rows match, if rows are only counted."""


def scans_of(search: Search) -> tuple[str, ...]:
    """Return the scans that find all rows of a search, in order."""
    if search.correlation_id is not None or search.action_id is not None:
        return (EVENTS,)
    return scans_of_states(search)


def scans_of_states(search: Search) -> tuple[str, ...]:
    """Return the scans chosen by state alone."""
    requested = set(search.states)
    scans = tuple(scan for scan, states in STATES_OF.items() if states & requested)
    is_covered = bool(requested) and requested <= frozenset[State]().union(*STATES_OF.values())
    return scans if is_covered else (ALL,)


def conditions_of(search: Search) -> list[str]:
    """Return the fields with a condition, the expensive error last. An empty tuple of names is a condition too."""
    values = ((field, getattr(search, field)) for field in sorted(Search.__struct_fields__, key="error".__eq__))
    return [field for field, value in values if value is not None and (value != () or field == "names")]


def residual_of(scan: str, search: Search) -> Search:
    """Return the residual conditions: those that the index of the scan does not cover, so each row is checked.

    The scans ALL and EVENTS cover no condition, not even the namespace. The index of the scan BLOCKED may also hold
    other unfinished rows.
    """
    if scan not in STATES_OF:
        return search
    is_of_states = scan in MERGED and STATES_OF[scan] <= set(search.states)
    own = tuple(state for state in search.states if state in STATES_OF[scan])  # another scan covers the other states
    residual = replace(search, names=None, states=() if is_of_states else own)
    return replace(residual, since=None, until=None) if scan == DEAD else residual


def start_of(scan: str, search: Search) -> Key:
    """Return the key before the first row of a segment."""
    match scan:
        case "dead":
            return (LATEST_TIME, LAST_ID) if search.until is None else (as_text(search.until), FIRST_ID)
        case "waiting":
            return LATEST_TIME, LAST_SEQUENCE
        case "blocked":
            return "", "-1"
        case _:
            return LAST_ID, ""


def cursor_at(scan: str, segment: Segment, key: Key) -> PageCursor:
    """Return the page cursor after a row."""
    return PageCursor(scan, segment.name, (*key, str(segment.part)))


def shown_id(own: str, reached: str) -> str:
    """Return the id after which a newest-first list continues, without revealing an id of another namespace.

    ``own``: the last id of the list's namespace. ``reached``: the last id that was read, of any namespace. The
    returned id keeps only the time of a UUIDv7 ``reached``, rounded up to about a minute. Ids of other versions are not
    used.
    """
    if reached == own or reached[14] != "7":
        return own
    return min(own, reached[:8] + _ID_SUFFIX)


def is_page_cursor(cursor: PageCursor) -> bool:
    """Return True if :func:`cursor_at` can have made the cursor, so that every database accepts its key."""
    if any("\0" in text for text in (cursor.name, *cursor.key)):
        return False
    match cursor.scan, cursor.key:
        case "end", ():
            return not cursor.name
        case "dead", (date, id, part):
            return _is_date(date) and _is_id(id) and _is_number(part)
        case "waiting", (date, sequence, part):
            return _is_date(date) and _is_number(sequence) and _is_number(part)
        case "blocked", (_, sequence, part):
            return _is_number(sequence) and _is_number(part)
        case "all" | "events", (id, _, part):
            return _is_id(id) and _is_number(part)
        case _:
            return False


def _is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None and abs(int(text)) <= int(LAST_SEQUENCE)


def _is_date(text: str) -> bool:
    """Return True for a timestamp in the format of keys. Databases have timestamps that Python cannot represent."""
    if text in _OUT_OF_RANGE:
        return True
    try:
        return as_text(datetime.fromisoformat(text)) == text
    except ValueError:
        return False


def segment_of(cursor: PageCursor) -> Segment:
    return Segment(cursor.name, int(cursor.key[-1]))


def key_after(scan: str, segment: Segment, cursor: PageCursor) -> Key:
    """Return the key after which a segment of a merged scan continues; the cursor may lie in a different segment.

    Among rows of different segments with equal dates (and sequences), the row of the greater segment comes first.
    """
    key, reached = cursor.key[:-1], segment_of(cursor)
    if segment == reached:
        return key
    is_later = segment < reached
    if scan == DEAD:
        return key[0], LAST_ID if is_later else FIRST_ID
    return key[0], str(min(int(key[1]) + is_later, int(LAST_SEQUENCE)))


def rank_of(scan: str, segment: Segment, key: Key) -> Any:
    """Return the sort key of rows across the segments of a merged scan; the greatest comes first."""
    return (key[0], segment) if scan == DEAD else (key[0], int(key[1]), segment)


def cursor_of_row(scans: Sequence[str], row: NotificationRecord) -> PageCursor | None:
    """Return the page cursor after a row in the first of these scans that has it, or ``None``."""
    for scan in scans:
        if scan in (ALL, EVENTS):
            return cursor_at(scan, Segment(""), (str(row.event_id), row.handler_name))
        if row.state in STATES_OF[scan]:
            return cursor_at(scan, *_position(scan, row))
    return None


def _position(scan: str, row: NotificationRecord) -> tuple[Segment, Key]:
    match scan:
        case "dead":
            return Segment(row.handler_name), (as_text(row.updated_date), str(row.id))
        case "waiting":
            key = (as_text(row.next_retry_at), str(row.sequence))
            return Segment(row.handler_name, row.partition_number), key
        case _:
            part = KEYLESS if row.ordering_key is None else KEYED
            return Segment(row.handler_name, part), (row.ordering_key or "", str(row.sequence))


def as_text(timestamp: datetime) -> str:
    """Return a naive timestamp in the format of keys."""
    return timestamp.isoformat(" ", "microseconds")


# --- the progress of a scan ------------------------------------------------------------------------

MIN_ROWS, MIN_ERRORS, MAX_ROWS = 400, 200, 2000
"""The smallest first read if few rows may match, the same for a search by error, and the largest read."""
MAX_INDEX_ENTRIES = 10_000
"""The index entries that a search may read if the index alone answers it."""
SKIPPED_AT_ONCE = 10_000
"""The rows of other namespaces that a read may skip, on an index without the namespace."""
GROWTH = 4


class Bounds(Struct, frozen=True):
    """How many rows a search may read, so that it takes less than 50 ms (decision 43)."""

    rows: int
    errors: int
    """The rows of a search by error, because errors are long texts."""
    skipped: int = 100_000
    """The rows of other namespaces that a search may skip. They are not checked, and take up to a second."""
    blocked_alone: bool = False
    """True if the index of the scan BLOCKED holds only BLOCKED rows."""


class SegmentCursor:
    """The read position within a segment of a scan."""

    def __init__(self, scan: str, segment: Segment, after: Key) -> None:
        self.scan = scan
        self.segment = segment
        self.after = after
        """The last row that was read, of any namespace."""
        self._own = after
        """The last row of the namespace that was read."""
        self.matches: deque[Match] = deque()
        """Matching rows that were read and not yet taken."""
        self.reads = 0
        self.is_at_end = False

    @property
    def rank(self) -> object:
        """The rank up to which the segment was read."""
        return rank_of(self.scan, self.segment, self.after)

    @property
    def page_cursor(self) -> PageCursor:
        """The page cursor after the rows that were read. It reveals nothing of another namespace."""
        if self.after == self._own:
            return cursor_at(self.scan, self.segment, self.after)
        id = shown_id(self._own[0], self.after[0])
        return cursor_at(self.scan, self.segment, self._own if id == self._own[0] else (id, ""))

    def advance(self, result: ReadResult, size: int) -> None:
        """Add the result of a read of at most ``size`` rows."""
        self.reads += 1
        self.matches.extend(result.matches or ())
        reached = result.reached or result.last
        self.is_at_end = result.read + result.skipped < size or reached is None
        if reached is not None:
            self.after, self._own = reached, result.last or self._own


class ReadBudget:
    """How many rows the next read of each segment may read, and how many are left for all reads.

    The first read is small, because most pages need few rows. Each further read of a segment is four times as large as
    the one before. Rows of other namespaces have a separate bound, so that a busy namespace does not use up the budget
    of a quiet one.
    """

    def __init__(self, first: int, most: int, skipped: int, at_once: int = MAX_ROWS) -> None:
        """``first``: the rows of the first read, over all segments. ``at_once``: the largest number of rows per read.

        ``most``: the rows of all reads. ``skipped``: the rows of other namespaces that all reads may skip.
        """
        self.left = most
        self._skipped = 0
        self._max_skipped = skipped
        self._first = first
        self._at_once = at_once
        self._per_segment = 0

    def requests(self, cursors: Sequence[SegmentCursor]) -> list[ReadRequest]:
        """Return the next read of each segment; together they read little more than ``at_once`` rows."""
        if not self._per_segment:
            self._per_segment = -(-self._first // len(cursors))
        largest = max(1, min(self._at_once, self.left) // len(cursors), min(self._skipped, SKIPPED_AT_ONCE))
        sizes = [min(self._per_segment * GROWTH**cursor.reads, largest) for cursor in cursors]
        return [ReadRequest(cursor.segment, cursor.after, size) for cursor, size in zip(cursors, sizes, strict=True)]

    @property
    def is_spent(self) -> bool:
        """True if no more rows may be read."""
        return self.left <= 0 or self._skipped >= self._max_skipped

    def spend(self, results: Iterable[ReadResult]) -> None:
        for result in results:
            self.left -= result.read
            self._skipped += result.skipped
