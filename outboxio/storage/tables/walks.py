"""The walks over matching notifications: which walk a search takes, and the places of each walk.

A walk has *stretches*: the rows of a stored handler name, and further divided, in the order of an index. A walk over
the DEAD rows or the waiting rows merges the stretches, so that the newest row of all handlers comes first. The other
walks take one stretch after the other.
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
from outboxio.model.operating.groups import Place, Search

DEAD, WAITING, BLOCKED, EVENTS, ALL = "dead", "waiting", "blocked", "events", "all"
END = Place("end", "", ())
"""The place behind the last row of all walks."""

STATES_OF: Mapping[str, frozenset[State]] = {
    DEAD: frozenset({State.DEAD, State.EXPIRED}),
    WAITING: frozenset({State.PENDING, State.FAILED, State.DYING}),
    BLOCKED: frozenset({State.BLOCKED}),
}
"""The walks over rows of a few states, in the order in which a search of several states takes the walks."""
MERGED = frozenset({DEAD, WAITING})

KEYED, KEYLESS = 0, 1
"""The two stretches of a name in the walk over BLOCKED rows: with an ordering key, and without."""

LAST_MOMENT = "9999-12-31 23:59:59.999999"
LAST_SEQUENCE = str(2**63 - 1)
FIRST_ID, LAST_ID = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"
_OUT_OF_RANGE = ("infinity", "-infinity", "0000-00-00 00:00:00.000000")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_REST_OF_ID = "-ffff-7fff-bfff-ffffffffffff"

Key = tuple[str, ...]
"""The values of the index columns of a row within a stretch, as texts. A moment has six decimals."""


class Stretch(NamedTuple):
    """The rows of a stored handler name in a walk. ``part``: a partition, or KEYED or KEYLESS, or 0."""

    name: str
    part: int = 0


class Match(Struct, frozen=True, array_like=True):
    """A matching row of a stretch: the values of its key, and its id."""

    one: str
    two: str
    id: str

    @property
    def key(self) -> Key:
        return self.one, self.two


class Request(Struct, frozen=True):
    """A read of a part of a stretch: up to ``size`` rows behind ``after``."""

    stretch: Stretch
    after: Key
    size: int


class Chunk(Struct, frozen=True, kw_only=True):
    """The rows that a request has read."""

    number: int = 0
    """The place of the request."""
    read: int
    """The number of rows of the namespace that were read, matching or not."""
    last: Key | None = None
    """The last row of the namespace that was read."""
    foreign: int = 0
    """The rows of other namespaces that were passed: the index of the walk over all rows has every namespace."""
    reached: Key | None = None
    """The last row of any namespace that was passed. An answer must not contain it."""
    matches: list[Match] | None = None
    """The matching rows."""
    matching: int = 0
    """The number of matching rows, where rows are only counted."""


def walks_of(search: Search) -> tuple[str, ...]:
    """The walks that find all rows of a search, in order."""
    if search.correlation_id is not None or search.action_id is not None:
        return (EVENTS,)
    return walks_of_states(search)


def walks_of_states(search: Search) -> tuple[str, ...]:
    """The walks by the states alone."""
    wanted = set(search.states)
    walks = tuple(walk for walk, states in STATES_OF.items() if states & wanted)
    is_covered = bool(wanted) and wanted <= frozenset[State]().union(*STATES_OF.values())
    return walks if is_covered else (ALL,)


def given(search: Search) -> list[str]:
    """The fields with a condition; the error, which takes long, is last. No name at all is a condition, too."""
    values = ((field, getattr(search, field)) for field in sorted(Search.__struct_fields__, key="error".__eq__))
    return [field for field, value in values if value is not None and (value != () or field == "names")]


def rest_of(walk: str, search: Search) -> Search:
    """The conditions that are judged row by row. The index of the walk holds the others, and the namespace.

    The walk over all rows and the walk over the events of a request hold none, not even the namespace. The index of the
    walk over BLOCKED rows may have the unfinished rows before them.
    """
    if walk not in STATES_OF:
        return search
    is_of_states = walk in MERGED and STATES_OF[walk] <= set(search.states)
    own = tuple(state for state in search.states if state in STATES_OF[walk])  # rows in others are in another walk
    rest = replace(search, names=None, states=() if is_of_states else own)
    return replace(rest, since=None, until=None) if walk == DEAD else rest


def start_of(walk: str, search: Search) -> Key:
    """The key before the first row of a stretch."""
    match walk:
        case "dead":
            return (LAST_MOMENT, LAST_ID) if search.until is None else (as_text(search.until), FIRST_ID)
        case "waiting":
            return LAST_MOMENT, LAST_SEQUENCE
        case "blocked":
            return "", "-1"
        case _:
            return LAST_ID, ""


def place_at(walk: str, stretch: Stretch, key: Key) -> Place:
    """The place behind a row."""
    return Place(walk, stretch.name, (*key, str(stretch.part)))


def shown_id(own: str, reached: str) -> str:
    """The id after which a list continues that has passed ids of other namespaces, newest first.

    ``own``: the last id of the namespace itself. ``reached``: the last id that was passed, which must not be shown. Of
    a UUIDv7, the answer keeps the time, rounded up to about a minute; any other id is not replaced.
    """
    if reached == own or reached[14] != "7":
        return own
    return min(own, reached[:8] + _REST_OF_ID)


def is_place(place: Place) -> bool:
    """True for a place that :func:`place_at` can have made, so that every database understands the key."""
    if any("\0" in text for text in (place.name, *place.key)):
        return False
    match place.walk, place.key:
        case "end", ():
            return not place.name
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
    """True for a moment as a key has it. Databases have moments that Python has not."""
    if text in _OUT_OF_RANGE:
        return True
    try:
        return as_text(datetime.fromisoformat(text)) == text
    except ValueError:
        return False


def stretch_of(place: Place) -> Stretch:
    return Stretch(place.name, int(place.key[-1]))


def key_behind(walk: str, stretch: Stretch, place: Place) -> Key:
    """The key behind which a stretch of a merged walk goes on after a place, possibly in a different stretch.

    Of rows with equal dates (and sequences) in different stretches, the row of the greater stretch comes first.
    """
    key, reached = place.key[:-1], stretch_of(place)
    if stretch == reached:
        return key
    is_behind = stretch < reached
    if walk == DEAD:
        return key[0], LAST_ID if is_behind else FIRST_ID
    return key[0], str(min(int(key[1]) + is_behind, int(LAST_SEQUENCE)))


def rank_of(walk: str, stretch: Stretch, key: Key) -> Any:
    """What decides between rows of different stretches of a merged walk; the greatest rank comes first."""
    return (key[0], stretch) if walk == DEAD else (key[0], int(key[1]), stretch)


def place_of_row(walks: Sequence[str], row: NotificationRecord) -> Place | None:
    """The place behind a row in these walks; ``None`` if the row is in no walk."""
    for walk in walks:
        if walk in (ALL, EVENTS):
            return place_at(walk, Stretch(""), (str(row.event_id), row.handler_name))
        if row.state in STATES_OF[walk]:
            return place_at(walk, *_position(walk, row))
    return None


def _position(walk: str, row: NotificationRecord) -> tuple[Stretch, Key]:
    match walk:
        case "dead":
            return Stretch(row.handler_name), (as_text(row.updated_date), str(row.id))
        case "waiting":
            key = (as_text(row.next_retry_at), str(row.sequence))
            return Stretch(row.handler_name, row.partition_number), key
        case _:
            part = KEYLESS if row.ordering_key is None else KEYED
            return Stretch(row.handler_name, part), (row.ordering_key or "", str(row.sequence))


def as_text(moment: datetime) -> str:
    """A naive moment, as keys have moments."""
    return moment.isoformat(" ", "microseconds")


# --- how far the stretches of a walk were read -----------------------------------------------------

FEWEST_ROWS, FEWEST_ERRORS, MOST_ROWS = 400, 200, 2000
"""The rows of a first read that may have to pass over rows, and by an error; and the rows of any read."""
MOST_ENTRIES = 10_000
"""The entries of a question that an index alone answers."""
FOREIGN_AT_ONCE = 10_000
"""The rows of other namespaces that any read passes, along an index that does not hold the namespace."""
GROWTH = 4


class Bounds(Struct, frozen=True):
    """How many rows a question may read, so that the answer takes less than 50 ms (decision 43)."""

    rows: int
    errors: int
    """The rows of a question about errors, which are long texts."""
    foreign: int = 100_000
    """The rows of other namespaces that a question passes. These rows are not judged, and take up to a second."""
    blocked_alone: bool = False
    """True if the index of the walk over BLOCKED rows has no other rows."""


class Cursor:
    """A stretch of a walk, and how far the stretch was read."""

    def __init__(self, walk: str, stretch: Stretch, after: Key) -> None:
        self.walk = walk
        self.stretch = stretch
        self.after = after
        """The last row that was passed, of any namespace."""
        self._own = after
        """The last row of the namespace that was read."""
        self.matches: deque[Match] = deque()
        """Matching rows that were read and not yet taken."""
        self.reads = 0
        """The number of reads so far."""
        self.is_at_end = False

    @property
    def rank(self) -> object:
        """The rank before which all rows of the stretch were read."""
        return rank_of(self.walk, self.stretch, self.after)

    @property
    def place(self) -> Place:
        """The place behind the rows that were read. It contains nothing of another namespace."""
        if self.after == self._own:
            return place_at(self.walk, self.stretch, self.after)
        id = shown_id(self._own[0], self.after[0])
        return place_at(self.walk, self.stretch, self._own if id == self._own[0] else (id, ""))

    def heed(self, chunk: Chunk, size: int) -> None:
        """Go on behind a chunk of at most ``size`` rows."""
        self.reads += 1
        self.matches.extend(chunk.matches or ())
        reached = chunk.reached or chunk.last
        self.is_at_end = chunk.read + chunk.foreign < size or reached is None
        if reached is not None:
            self.after, self._own = reached, chunk.last or self._own


class Pace:
    """How many rows the next read of each stretch may read, and how many rows all reads may read.

    The first read is small, because most pages need few rows. Each further read of a stretch is four times as long as
    the read before. Rows of other namespaces have a bound of their own, so that a busy namespace does not use up the
    rows of a quiet one: they are only passed, not judged.
    """

    def __init__(self, first: int, most: int, foreign: int, at_once: int = MOST_ROWS) -> None:
        """``first``: the rows of the first read of all stretches together. ``at_once``: the rows of any read.

        ``foreign``: the rows of other namespaces that all reads may pass.
        """
        self.left = most
        self._foreign = 0
        self._most_foreign = foreign
        self._first = first
        self._at_once = at_once
        self._of_stretch = 0

    def requests(self, cursors: Sequence[Cursor]) -> list[Request]:
        """The next read of each stretch; together not much more than the rows of any read."""
        if not self._of_stretch:
            self._of_stretch = -(-self._first // len(cursors))
        largest = max(1, min(self._at_once, self.left) // len(cursors), min(self._foreign, FOREIGN_AT_ONCE))
        sizes = [min(self._of_stretch * GROWTH**cursor.reads, largest) for cursor in cursors]
        return [Request(cursor.stretch, cursor.after, size) for cursor, size in zip(cursors, sizes, strict=True)]

    @property
    def is_over(self) -> bool:
        """True if no more rows may be read."""
        return self.left <= 0 or self._foreign >= self._most_foreign

    def heed(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self.left -= chunk.read
            self._foreign += chunk.foreign
