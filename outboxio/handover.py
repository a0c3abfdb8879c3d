"""Handing over: what fan-out has just made goes straight to the dispatcher of the same process, and need not be found.

Only where that changes nothing but the time it takes: rows of handlers that keep up, that have no order to be kept, no
batch to be filled and no transaction to be begun. All others are found, and so is whatever there was no room for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from outboxio.notification import Notification


class Handover:
    """What the dispatcher would take in one round of fan-out."""

    def __init__(
        self,
        names: Sequence[str],
        most: int,
        take: Callable[[Handover, Sequence[Notification]], int],
        closed: Callable[[Handover], None],
    ) -> None:
        self.names = names
        """The handler names whose rows may be handed over."""
        self.most = most
        """How many rows, at most."""
        self.taken = 0
        """How many were taken."""
        self.settled: set[UUID] = set()
        """What was settled meanwhile: a row may be found, and run, before it is handed over."""
        self._take = take
        self._closed = closed

    def hand(self, rows: Sequence[Notification]) -> None:
        """Let these run. Their transaction need not be committed yet, but nothing in it is to come that could wait."""
        self.taken += self._take(self, rows)

    def close(self) -> None:
        """The round is over."""
        self._closed(self)
