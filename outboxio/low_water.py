"""Where fan-out begins to look: behind what was delivered a moment ago, and from the beginning now and then.

A delivered event stays in the index of undelivered ones until the database has cleaned up, which it does once a minute,
or not while any transaction is open that may want to see it. At 20,000 events a second a round that begins at the
beginning walks past a million of them.
"""

from __future__ import annotations

from outboxio.storage.protocols import FannedOut
from outboxio.trail import FEW, SWEEP_IN_BACKLOG, SWEEP_NEARBY, Trail


class LowWater:
    """Behind which sequence each key is looked at: what is below is delivered, but may still be in the index.

    A key that has a backlog is read on from where it was reached. Under load all others are read from where they were
    reached a little earlier, so that what was committed out of turn is found at once all the same; what was committed
    even later, by rounds that begin further back, or at the beginning. Where little is found, all do.
    """

    def __init__(self) -> None:
        self._near, self._far = Trail[dict[str, int]](SWEEP_NEARBY, {}), Trail[dict[str, int]](SWEEP_IN_BACKLOG, {})
        self._backlog: dict[str, int] = {}
        self._reached: dict[str, int] = {}
        self._found = 0  # since the last sweep
        self._is_busy = False
        self._is_in_doubt = False

    def begin(self, now: float) -> dict[str, int]:
        """The bounds of the next round; none if it is to be a sweep."""
        nearby_is_over = self._near.goes_on(now, self._reached)
        if self._far.goes_on(now, self._reached):
            self._is_busy, self._found = self._found >= FEW, 0
            return {}
        if self._is_in_doubt:
            return {}
        if not self._is_busy:
            return self._backlog
        return (self._far if nearby_is_over else self._near).before | self._backlog

    def learn(self, done: FannedOut) -> None:
        """Take in what a round did."""
        self._backlog = {key: done.reached[key] for key in done.full if key in done.reached}
        for key, sequence in done.reached.items():
            self._reached[key] = max(sequence, self._reached.get(key, sequence))
        self._found += sum(done.events.values())
        self._is_in_doubt = not done.events  # there may be something below
