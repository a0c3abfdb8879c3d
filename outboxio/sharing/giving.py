"""Giving slots away: a slot moves only when idle, and a slot that does not become idle stays."""

from __future__ import annotations

from collections.abc import Callable, Collection

from outboxio.model.lock_name import Slot
from outboxio.sharing import balance

#: The seconds in which a slot that moves has to become idle.
LONGEST_GIVING = 5.0
#: The seconds in which a slot that did not become idle is not given away again.
REST_OF_BUSY_SLOT = 30.0


class Giving:
    """The slots that this process is giving away."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._halted: dict[Slot, float] = {}
        """The moment at which each slot was halted."""
        self._busy: dict[Slot, float] = {}
        """Slots that did not become idle, and when each slot may be halted again."""
        self._resumed: list[Slot] = []

    def number(self, slots: Collection[Slot]) -> int:
        """The number of these slots that are halted."""
        return sum(slot in self._halted for slot in slots)

    def begin(self, held: Collection[Slot], now: float) -> None:
        """Forget the slots that are not held any more."""
        self._halted = {slot: since for slot, since in self._halted.items() if slot in held}
        self._busy = {slot: until for slot, until in self._busy.items() if until > now}
        self._resumed = []

    def halt(self, slots: Collection[Slot], now: float) -> list[Slot]:
        """Halt slots that have to go, however long their runs take; the slots that were not halted before."""
        fresh = [slot for slot in slots if slot not in self._halted]
        self._halted.update(dict.fromkeys(fresh, now))
        return fresh

    def give(self, slots: Collection[Slot], surplus: int, in_flight: Callable[[Slot], int], now: float) -> list[Slot]:
        """Have ``surplus`` of the slots of a group halted; the slots that were not halted before."""
        halted = [slot for slot in slots if slot in self._halted]
        for slot in halted:
            if now - self._halted[slot] >= LONGEST_GIVING and in_flight(slot):
                self._resume(slot)
                self._busy[slot] = now + REST_OF_BUSY_SLOT
        halted = [slot for slot in halted if slot in self._halted]
        if len(halted) > surplus:
            for slot in balance.to_give_first(halted, in_flight, self._me)[surplus:]:
                self._resume(slot)
            return []
        if len(halted) == surplus:
            return []
        others = [slot for slot in slots if slot not in self._halted and slot not in self._busy]
        return self.halt(balance.to_give_first(others, in_flight, self._me)[: surplus - len(halted)], now)

    def end(self, in_flight: Callable[[Slot], int]) -> tuple[list[Slot], list[Slot]]:
        """The slots that are resumed, and the slots that are halted and idle."""
        return self._resumed, [slot for slot in self._halted if not in_flight(slot)]

    def _resume(self, slot: Slot) -> None:
        del self._halted[slot]
        self._resumed.append(slot)
