"""Dividing a batch among many keys, so that a round reads about one batch and not one batch of each key."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_PROBES = 2  # a key that had nothing last time is looked at with half of its even share


class Quotas:
    """How much to read of each key, by what each had last time.

    Keys that filled their room last time share the batch. The others have room for twice what they had, one batch all
    together, and for a little more. So 200 event types of which one is busy cost about as much as that one alone, and
    under steady load a round finds all that there is.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._had: dict[str, int] = {}
        """What the keys had that did not fill their room."""
        self._known: set[str] = set()

    def rooms(self, keys: Collection[str] | None = None) -> dict[str, int]:
        """How many to take of each key at most; of every key that was ever found, if none are named."""
        asked, had = self._known if keys is None else keys, self._had
        hungry = sum(key not in had for key in asked)
        share = max(1, self.batch_size // max(1, hungry))
        probe = max(1, self.batch_size // (_PROBES * max(1, len(asked))))
        expected = 2 * sum(had.get(key, 0) for key in asked)
        part = 2 * min(1.0, self.batch_size / max(1, expected))
        return {key: probe + int(part * had[key]) if key in had else share for key in asked}

    def learn(self, asked: Collection[str], found: Mapping[str, int], full: Collection[str]) -> None:
        """Take in a round: the keys that were asked for, how much each had, and those that filled their room."""
        self._known.update(found)
        for key in (*asked, *found):
            self._had[key] = found.get(key, 0)
        for key in full:
            self._had.pop(key, None)
