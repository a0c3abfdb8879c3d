"""Slot shares: how many rows of each slot a find round reads, so that a round reads about a batch in all.

The stored handler names share the batch. The slots of a name share the part of the name, which is at most the window of
the handler. So the number of partitions of a handler changes neither the rows that the handler has ready, nor the part
of any other handler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from outboxio.model.lock_name import Slot
from outboxio.runs.cursor import HandlerCursor
from outboxio.support.fair_share import FairShare

Counts = dict[tuple[str, int], int]
"""The rows that were found of each slot."""


class SlotShares:
    """A batch divided among slots, by the rows that each slot had in the last round (``support/fair_share.py``)."""

    def __init__(self, batch_size: int) -> None:
        self._names: FairShare[str] = FairShare(batch_size)
        self._slots: dict[str, FairShare[int]] = {}
        """The shares of the partitions, for names with several partitions in this process."""

    def limits(self, cursors: Sequence[HandlerCursor]) -> list[tuple[HandlerCursor, int, int]]:
        """The rows to read of each slot, at most, and how many slots of the handler name are read."""
        by_name: dict[str, list[HandlerCursor]] = {}
        for cursor in cursors:
            by_name.setdefault(cursor.slot.handler_name, []).append(cursor)
        found: list[tuple[HandlerCursor, int, int]] = []
        for name, limit in self._names.limits(by_name).items():
            ours = by_name[name]
            most = min(limit, ours[0].queue.ahead.window)
            if len(ours) == 1:
                found.append((ours[0], most, 1))
                continue
            shares = self._slots.setdefault(name, FairShare(most))
            shares.batch_size = most
            limits = shares.limits([cursor.slot.partition for cursor in ours])
            found += [(cursor, limits[cursor.slot.partition], len(ours)) for cursor in ours]
        return found

    def learn(self, asked: Sequence[Slot], counts: Mapping[tuple[str, int], int], full: Collection[Slot]) -> None:
        """Take in a round: the slots that were read, the rows that each slot had, and the slots that were full."""
        found: dict[str, int] = {}
        for slot in asked:
            found[slot.handler_name] = found.get(slot.handler_name, 0) + counts.get(slot, 0)
        self._names.learn(list(found), found, {slot.handler_name for slot in full})
        for name, shares in self._slots.items():
            ours = [slot for slot in asked if slot.handler_name == name]
            shares.learn(
                [slot.partition for slot in ours],
                {slot.partition: counts[slot] for slot in ours if slot in counts},
                {slot.partition for slot in full if slot.handler_name == name},
            )
