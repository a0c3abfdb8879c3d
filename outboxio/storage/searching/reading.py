"""What a dialect reads for a walk, and how far the stretches of a walk were read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from outboxio.model.operating.groups import Place, Search
from outboxio.storage.searching.walks import (
    STATES_OF,
    Chunk,
    Key,
    Match,
    Request,
    Stretch,
    place_at,
    rank_of,
    rest_of,
    shown_id,
)

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


class Reader(ABC):
    """What a dialect reads for a walk."""

    bounds: Bounds

    def most_rows(self, walk: str, search: Search) -> int:
        """How many rows a question may read along a walk."""
        if walk in STATES_OF and self.rest(walk, search) == Search():
            return MOST_ENTRIES
        return self.bounds.errors if search.error else self.bounds.rows

    def rest(self, walk: str, search: Search) -> Search:
        """The conditions that no index of the walk holds, so that each row is read."""
        return rest_of(walk, search)

    @abstractmethod
    async def stretches(self, namespace: str, walk: str, search: Search) -> list[Stretch]:
        """The stretches of a walk over rows of a few states, in order."""

    @abstractmethod
    async def read(
        self, namespace: str, walk: str, search: Search, requests: Sequence[Request], *, only_counts: bool
    ) -> Sequence[Chunk]:
        """The rows of each request; the chunks are in the order of the requests."""

    async def counted(
        self, namespace: str, walk: str, search: Search, stretches: Sequence[Stretch], most: int
    ) -> Chunk | None:
        """The first ``most`` rows of all stretches, only counted; ``None`` if they are to be read part by part."""
        return None

    @abstractmethod
    async def event_ids(self, namespace: str, search: Search, limit: int) -> list[str]:
        """Up to ``limit`` ids of events with the correlation id or the action id of the search, in any order."""

    @abstractmethod
    async def read_events(self, namespace: str, search: Search, event_ids: Sequence[str]) -> Chunk:
        """All notifications of some events. The keys of the matches are (event id, handler name), in any order."""


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
