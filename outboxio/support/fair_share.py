"""Fair shares: a batch divided among many keys, so that a round reads about a batch in all."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_PROBES = 2  # a key without rows in the last round may read half of an even share


class FairShare(Generic[K]):
    """The number of rows to read of each key, by the rows that the key had in the last round.

    * Keys that were full, with as many rows as were asked for, divide the batch evenly.
    * A key that was not full may read twice as many rows as in the last round, and a little more. The keys that were
      not full may read about one batch in all.

    So 200 event types with a single busy type cost about as much as the busy type alone, and under steady load a round
    reads every row that is there.

    Example::

        share = FairShare(1000)
        limits = share.limits(["a", "b"])                    # {"a": 500, "b": 500}
        share.learn(["a", "b"], {"a": 500, "b": 3}, {"a"})   # a was full, b had 3 rows
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._had: dict[K, int] = {}
        """The rows of the keys that were not full."""
        self._known: set[K] = set()

    def limits(self, keys: Collection[K] | None = None) -> dict[K, int]:
        """The number of rows to read of each key, at most. Without ``keys``: of every key that was ever found."""
        asked, had = self._known if keys is None else keys, self._had
        hungry = sum(key not in had for key in asked)
        share = max(1, self.batch_size // max(1, hungry))
        probe = max(1, self.batch_size // (_PROBES * max(1, len(asked))))
        expected = 2 * sum(had.get(key, 0) for key in asked)
        part = 2 * min(1.0, self.batch_size / max(1, expected))
        return {key: probe + int(part * had[key]) if key in had else share for key in asked}

    def learn(self, asked: Collection[K], found: Mapping[K, int], full: Collection[K]) -> None:
        """Take in a round: the keys that were read, the rows that each key had, and the keys that were full."""
        self._known.update(found)
        for key in (*asked, *found):
            self._had[key] = found.get(key, 0)
        for key in full:
            self._had.pop(key, None)
