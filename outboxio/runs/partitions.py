"""The numbers of partitions of the stored handler names, as this process knows the numbers.

A process reads the numbers at least once a second, so a number may be out of date. The database computes the partition
of each row, and a cluster lock covers each partition. So an old number delays rows, but no row is lost or run twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

from outboxio.storage.protocols import PartitionCount
from outboxio.support.clock import Clock

UNSETTLED = timedelta(minutes=10)  # after a change of a number: rows of one key may still lie in several partitions


class Partitions:
    """The numbers of partitions by stored handler name. A name that is not known has a single partition.

    Example::

        partitions = Partitions(clock)
        partitions.heed({"score": PartitionCount("score", number=4, active=16, changed_date=moment)})
        partitions.number("score")     # 4: fan-out spreads new rows over the partitions 0 to 3
        partitions.active("score")     # 16: unfinished rows may lie in the partitions 0 to 15
        partitions.active("report")    # 1
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: Mapping[str, PartitionCount] = {}

    def heed(self, counts: Mapping[str, PartitionCount]) -> set[str]:
        """Take in the numbers of all names; the names of which a number has changed."""
        former = self._counts
        if counts == former:
            return set()
        self._counts = dict(counts)
        return {name for name in {*former, *counts} if former.get(name) != counts.get(name)}

    def find(self, name: str) -> PartitionCount | None:
        """What is known of a name; ``None`` if the name has a single partition and always had."""
        return self._counts.get(name)

    def number(self, name: str) -> int:
        """The number of partitions over which new rows are spread."""
        count = self._counts.get(name)
        return 1 if count is None else count.number

    def active(self, name: str) -> int:
        """The number of partitions that may have unfinished rows."""
        count = self._counts.get(name)
        return 1 if count is None else max(count.active, count.number)

    def are_several(self, names: Iterable[str]) -> bool:
        """True if rows of one ordering key may lie in several partitions of these names."""
        return bool(self._counts) and any(self.active(name) > 1 for name in names)

    def unsettled(self) -> set[str]:
        """The names of which the number was changed not long ago."""
        if not self._counts:
            return set()
        now = self._clock()
        return {name for name, count in self._counts.items() if now < count.changed_date + UNSETTLED}
