"""Trails: where reading had got to a while ago, for what comes to light a little behind it."""

from __future__ import annotations

from copy import copy
from typing import Generic, TypeVar

Reached = TypeVar("Reached")

SWEEP_NEARBY = 0.1  # seconds between reads that begin further back, under load
SWEEP_IN_BACKLOG = 0.5  # seconds between reads from the beginning, under load and while a backlog is read
FEW = 500  # rows between two of these, which leave too little in the index to care


class Trail(Generic[Reached]):
    """What had been reached a while ago: at least one period, at most two and a round."""

    def __init__(self, period: float, beginning: Reached) -> None:
        self._period = period
        self._begun_at = float("-inf")
        self._at_its_begin = self.before = beginning

    def goes_on(self, now: float, reached: Reached) -> bool:
        """Begin the next period, if this one is over."""
        if now - self._begun_at < self._period:
            return False
        self._begun_at = now
        self.before, self._at_its_begin = self._at_its_begin, copy(reached)
        return True
