"""The handoff: fan-out gives fresh rows directly to the dispatcher of the same process (decision 16).

A row that is handed over need not be read from the database. A handoff shortens the time until a row runs, and has no
further effect. So only rows of handlers are handed over that keep up, keep no order, fill no batch and need no
transaction, and only if this process holds all partitions of the handler. The remaining rows are found by a read, and
so are rows for which the handler has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from outboxio.model.notification import Notification


class Handoff:
    """The rows that the dispatcher can take in a round of fan-out."""

    def __init__(
        self,
        names: Sequence[str],
        most: int,
        take: Callable[[Handoff, Sequence[Notification]], int],
        closed: Callable[[Handoff], None],
    ) -> None:
        self.names = names
        """The handler names whose rows may be handed over."""
        self.most = most
        """The number of rows that the dispatcher can take."""
        self.taken = 0
        """The number of rows that the dispatcher has taken."""
        self.settled: set[UUID] = set()
        """The rows that were settled during the round: a row may be found and run before it is handed over."""
        self._take = take
        self._closed = closed

    def hand(self, rows: Sequence[Notification]) -> None:
        """Hand rows over, which run at once.

        The transaction of the rows need not be committed, but none of its further statements may wait for a lock.
        """
        self.taken += self._take(self, rows)

    def close(self) -> None:
        """The fan-out round is over."""
        self._closed(self)
