"""Dividing a batch among many keys, so that a round reads about one batch and not one batch of each key."""

from __future__ import annotations

from collections.abc import Collection

_PROBES = 10  # a key that had little last time is looked at with a tenth of its even share


class Quotas:
    """How much to read of each key, by what each had last time.

    Keys that filled their room last time share the batch; the others are probed with little. So 200 event types of
    which one is busy cost about as much as that one alone.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._quiet: set[str] = set()
        self._known: set[str] = set()

    def rooms(self, keys: Collection[str] | None = None) -> dict[str, int]:
        """How many to take of each key at most; of every key that was ever found, if none are named."""
        asked = self._known if keys is None else keys
        hungry = sum(key not in self._quiet for key in asked)
        share = max(1, self.batch_size // max(1, hungry))
        probe = max(1, self.batch_size // (_PROBES * max(1, len(asked))))
        return {key: probe if key in self._quiet else share for key in asked}

    def learn(self, asked: Collection[str], found: Collection[str], full: Collection[str]) -> None:
        """Take in a round: the keys that were asked for, those that had something, and those that filled their room."""
        self._known.update(found)
        self._quiet.update(asked, found)
        self._quiet.difference_update(full)
