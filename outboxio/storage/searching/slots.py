"""The number of partitions of each stored handler name."""

from __future__ import annotations

from collections.abc import Iterable

from outboxio.model.lock_name import Slot


def numbers_of(slots: Iterable[Slot]) -> dict[str, int]:
    """The number of partitions of each name: one more than the highest partition of the name."""
    numbers: dict[str, int] = {}
    for name, partition in slots:
        numbers[name] = max(numbers.get(name, 0), partition + 1)
    return numbers
