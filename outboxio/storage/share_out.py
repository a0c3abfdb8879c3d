"""How far a round of fan-out takes each key (event type or topic), where each key is read separately."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

from msgspec import Struct

K = TypeVar("K")


class Reach(Struct, frozen=True, gc=False):
    """The undelivered events that a read has found of a key."""

    first: int
    """The lowest sequence."""
    last: int
    """The highest sequence."""
    size: int
    """The number of events."""


def share_out(found: Mapping[K, Reach], limits: Mapping[K, int], ordered: Container[K]) -> tuple[dict[K, int], set[K]]:
    """The last sequence to take of each key, and the keys that probably have more events. Keys without events: neither.

    Keys in ``ordered`` advance together: an ordered handler may want events of the same ordering key by several types
    or topics, and must see the events in the order of the sequence. A key that filled the limit has unread events
    behind the last sequence. So no key in ``ordered`` is taken beyond the lowest last sequence of such full keys.

    Example: ``deposited`` filled the limit of 10 up to sequence 40, ``withdrawn`` was found from 35 to 60. Then
    ``withdrawn`` is taken up to 40, and has more.
    """
    horizon = min(
        (reach.last for key, reach in found.items() if key in ordered and reach.size >= limits[key]), default=None
    )
    upto: dict[K, int] = {}
    full: set[K] = set()
    for key, reach in found.items():
        last = reach.last if horizon is None or key not in ordered else min(reach.last, horizon)
        if last < reach.first:
            continue
        upto[key] = last
        if reach.size >= limits[key] or last != reach.last:
            full.add(key)
    return upto, full
