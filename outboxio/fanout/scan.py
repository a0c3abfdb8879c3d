"""Where a round of fan-out starts to read, for each key.

A delivered event stays in the index of undelivered events until the database has cleaned up: for a minute, or for as
long as any transaction is open that may want to see the event. At 20,000 events per second a round that starts at the
beginning of the index walks past a million delivered events. So most rounds start further on
(``support/scan_position.py``, decision 2).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from outboxio.storage.protocols import FanoutResult
from outboxio.support.scan_position import FEW_LATE, Pace, ScanPosition

_NEVER = float("inf")


class Bounds(Struct, frozen=True):
    """The sequences after which a round reads.

    ``after``: by key, for the keys that have a sequence of their own. ``behind``: for all other keys, ``None`` for the
    beginning. ``closed``: for the keys that ordered handlers want.
    """

    after: Mapping[str, int] = {}
    behind: int | None = None
    closed: int | None = None
    is_put_off: bool = False
    """True if the round would be a sweep, but for a sweep a short while ago that took long."""

    @property
    def is_sweep(self) -> bool:
        return not self.after and self.behind is None and self.closed is None


class Closed:
    """The sequence up to which no event can be committed any more.

    The proof has two parts. A transaction that had begun by the time of a round has a number below the round's next
    transaction number. An event of a later transaction has a sequence above the round's scan position, because the
    sequence is given out when the event is written. So the round's scan position is closed as soon as all transactions
    are over that had begun by then.

    A producer of ordered events has begun before the event gets a sequence, because the producer has locked a row. A
    producer of events without an order begins some milliseconds after that. So the position that counts is the scan
    position of a while before the round.
    """

    def __init__(self) -> None:
        self.sequence: int | None = None
        self._awaited: tuple[int, int] | None = None

    def learn(self, transactions: tuple[int, int], reached_before: int | None) -> None:
        """Learn from a round that has left nothing. ``transactions``: the oldest open number, and the next number."""
        oldest_open, following = transactions
        if self._awaited is not None and self._awaited[0] <= oldest_open:
            closed, self._awaited = self._awaited[1], None
            self.sequence = closed if self.sequence is None else max(closed, self.sequence)
        if self._awaited is None and reached_before is not None:
            self._awaited = (following, reached_before)


class FanoutScan:
    """Decides the start of each round of fan-out.

    * A key with a backlog is read on from its last position.
    * Under load every other key is read from its position of 0.1 to 0.2 s ago, ten times per second from its position
      of 0.5 to 1 s ago, and twice per second from the beginning. So an event that was committed out of turn is found at
      once if it is a little late, and a little later if it is very late.
    * Without load, and after a round that found nothing, a round is a sweep.
    * A sweep that would take long is put off (``support/scan_position.py``). The round starts long ago instead.
    """

    def __init__(self) -> None:
        # The last position of each key; complete is the highest of all keys, below which nothing was left.
        self._scan = ScanPosition[dict[str, int], int | None]({}, None)
        self._closed = Closed()
        self._pace = Pace()
        self._backlog: dict[str, int] = {}
        self._had_many = self._is_in_doubt = False
        self._was_bounded = self._was_put_off = False

    def begin(self, now: float) -> Bounds:
        """The bounds of the next round; empty bounds if the round is a sweep."""
        scan = self._scan
        is_further_back = scan.move_on(now)
        sweeps_all = scan.begin_period(now) or self._is_in_doubt
        is_put_off = (sweeps_all or not scan.is_busy) and not self._pace.allows(now)
        if sweeps_all and not is_put_off:
            return Bounds()
        if not (scan.is_busy or is_put_off):
            return Bounds(self._backlog)
        behind, closed = scan.long_ago, self._closed.sequence
        if not scan.is_busy:
            return Bounds(self._backlog, behind, closed, is_put_off)
        nearby = scan.further if is_further_back else scan.nearby
        return Bounds(nearby | self._backlog, behind, closed, is_put_off)

    def learn(self, done: FanoutResult, bounds: Bounds, began: float, ended: float) -> None:
        """Learn from the result of a round, and from its duration."""
        scan, found = self._scan, sum(done.events.values())
        self._backlog = {key: done.reached[key] for key in done.full if key in done.reached}
        for key, sequence in done.reached.items():
            scan.last[key] = max(sequence, scan.last.get(key, sequence))
        if not done.full:
            scan.read_to_the_end(max(scan.last.values(), default=None), after_backlog=self._had_many)
            if done.transactions is not None:
                self._closed.learn(done.transactions, scan.long_ago)
        scan.found += found
        self._had_many = bool(done.full) or found >= FEW_LATE
        self._is_in_doubt = not found  # an event may lie behind the position
        self._was_bounded, self._was_put_off = not bounds.is_sweep, bounds.is_put_off
        self._pace.learn(began, ended, found, is_sweep=bounds.is_sweep)

    def wait(self, now: float) -> float:
        """The seconds until a sweep may find an event that the last round may have missed; infinite if none is due."""
        is_due = self._was_bounded and (self._is_in_doubt or self._was_put_off)
        return self._pace.wait(now) if is_due else _NEVER

    def sweep_soon(self) -> bool:
        """Make the next round a sweep. True if the last round was not a sweep."""
        was_bounded, self._was_bounded = self._was_bounded, False
        if was_bounded:
            self._is_in_doubt = True
            self._pace.hurry()
        return was_bounded
