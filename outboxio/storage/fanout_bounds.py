"""How far a round of fan-out advances each key (event type or topic), if keys are read separately."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

from msgspec import Struct

K = TypeVar("K")


class KeyRange(Struct, frozen=True, gc=False):
    """The undelivered events that were found for a key."""

    first: int
    """The lowest sequence."""
    last: int
    """The highest sequence."""
    size: int
    """The number of events."""


def fanout_bounds(
    found: Mapping[K, KeyRange], limits: Mapping[K, int], ordered: Container[K]
) -> tuple[dict[K, int], set[K]]:
    """Return the last sequence to take of each key, and the keys that probably have more events.

    Keys in ``ordered`` advance together, because an ordered handler may get events of the same ordering key through
    several types or topics, and must get them by sequence. A key that reached its limit has unread events after its
    last sequence. So keys in ``ordered`` do not advance beyond the lowest last sequence of such full keys.

    Example: ``deposited`` reached its limit of 10 at sequence 40, ``withdrawn`` was found from 35 to 60. Then
    ``withdrawn`` is taken up to 40 and has more.
    """
    horizon = min((one.last for key, one in found.items() if key in ordered and one.size >= limits[key]), default=None)
    upto: dict[K, int] = {}
    full: set[K] = set()
    for key, one in found.items():
        last = one.last if horizon is None or key not in ordered else min(one.last, horizon)
        if last < one.first:
            continue
        upto[key] = last
        if one.size >= limits[key] or last != one.last:
            full.add(key)
    return upto, full
