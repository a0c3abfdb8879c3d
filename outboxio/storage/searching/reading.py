"""What a dialect reads for a walk, and how far the stretches of a walk were read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

from outboxio.model.operating.filter import Place, Search
from outboxio.storage.searching.walks import Chunk, Key, Match, Request, Stretch, place_at, rank_of

FEWEST_ROWS, MOST_ROWS = 200, 2000
"""The rows of the first read and of each later read, where a read may have to pass over rows that do not match."""


class Reader(ABC):
    """What a dialect reads for a walk."""

    @abstractmethod
    async def stretches(self, namespace: str, walk: str, search: Search) -> list[Stretch]:
        """The stretches of a walk over rows of a few states, in order."""

    @abstractmethod
    async def read(
        self, namespace: str, walk: str, search: Search, requests: Sequence[Request], size: int, *, only_counts: bool
    ) -> Sequence[Chunk]:
        """Up to ``size`` rows of each request; the chunks are in the order of the requests."""

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
        self.matches: deque[Match] = deque()
        """Matching rows that were read and not yet taken."""
        self.is_fresh = True
        self.is_at_end = False

    @property
    def request(self) -> Request:
        return Request(self.stretch, self.after)

    @property
    def rank(self) -> object:
        """The rank before which all rows of the stretch were read."""
        return rank_of(self.walk, self.stretch, self.after)

    @property
    def place(self) -> Place:
        """The place behind the rows that were read."""
        return place_at(self.walk, self.stretch, self.after)

    def heed(self, chunk: Chunk, size: int) -> None:
        """Go on behind a chunk of at most ``size`` rows."""
        self.is_fresh = False
        self.matches.extend(chunk.matches or ())
        self.is_at_end = chunk.read < size or chunk.last is None
        if chunk.last is not None:
            self.after = chunk.last


class Pace:
    """How many rows the next read may read, and how many rows all reads may read."""

    def __init__(self, first: int, most: int) -> None:
        self.left = most
        self._next = min(first, MOST_ROWS)

    def size(self, stretches: int) -> int:
        """The rows of each stretch in the next read."""
        total = min(self._next, self.left)
        self._next = min(2 * self._next, MOST_ROWS)
        return max(1, total // stretches)

    def heed(self, chunks: Iterable[Chunk]) -> None:
        self.left -= sum(chunk.read for chunk in chunks)
