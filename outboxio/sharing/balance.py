"""Balance: the number of slots that each process should hold, and the slots that a process takes first.

Each process computes the balance alone, from the same view of the cluster: no leader, no stored assignment, no command.
The cluster lock of a slot is the truth, so processes with different views may hold an uneven number of slots for a
while, but never the same slot. ``partition_share.py`` decides with these functions; a function here has no state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256

from msgspec import Struct

from outboxio.model.lock_name import Slot


class SlotGroup(Struct, frozen=True):
    """Slots that are balanced together over the processes that may hold each of the slots."""

    key: str
    """The same text in each process with the group."""
    slots: tuple[Slot, ...]
    members: frozenset[str]
    """The processes by name, this process included."""
    is_shared: bool
    """False: the first process that tries a slot holds the slot, and gives nothing away for the balance."""


def quotas(members: Collection[str], counts: Mapping[str, int], slots: int, key: str) -> dict[str, int]:
    """The number of slots that each member should hold; ``counts``: the number that each member holds now.

    Where the slots cannot be divided evenly, the members that hold most get the remainder, so no slot moves for the
    remainder. Among members that hold the same number a hash decides, which differs by ``key``: no member gets the
    remainder of all handlers.

    Example::

        quotas(["a", "b", "c"], {"b": 9}, 16, "score")   # {"b": 6, "a": 5, "c": 5}
    """
    least, remainder = divmod(slots, len(members))
    order = sorted(members, key=lambda member: (-counts.get(member, 0), _rank(key, member)))
    return {member: least + (place < remainder) for place, member in enumerate(order)}


def in_preferred_order(slots: Sequence[Slot], me: str) -> list[Slot]:
    """The slots from a start that differs by process, so that processes that join together try different slots."""
    start = _rank("", me) % max(1, len(slots))
    return [*slots[start:], *slots[:start]]


def to_give_first(slots: Iterable[Slot], in_flight: Callable[[Slot], int], me: str) -> list[Slot]:
    """The held slots in the order in which the process gives slots away: idle slots first, because these move at once.

    Partition 0 comes late: a process without a slot of the handler waits until a process holds partition 0.
    """
    least_preferred = in_preferred_order(sorted(slots), me)[::-1]
    return sorted(least_preferred, key=lambda slot: (in_flight(slot), slot.partition == 0))


def groups_of(
    active: Mapping[str, int],
    members_of: Callable[[str], frozenset[str]],
    *,
    numbers: Mapping[str, int],
    spreads_all: bool,
) -> list[SlotGroup]:
    """The slots of all handler names in groups.

    ``numbers``: the number of partitions by stored handler name. ``active``: only partitions below this number may
    have unfinished rows, and the number is larger after an operator has lowered the number of partitions.

    A handler name with several partitions is a group. The partitions that get no new rows are a further group: a
    process that had nothing but such partitions would soon be idle. Handler names with a single partition are groups
    of a single slot that is not shared. With ``spreads_all`` the names with the same members are a shared group: a
    process with few handlers is not counted for a slot that the process cannot hold.
    """
    groups, together = list[SlotGroup](), dict[frozenset[str], list[Slot]]()
    for name, end in sorted(active.items()):
        number, members = numbers[name], members_of(name)
        if number == 1 and spreads_all:
            together.setdefault(members, []).append(Slot(name))
        else:
            slots = tuple(Slot(name, partition) for partition in range(number))
            groups.append(SlotGroup(name, slots, members, number > 1))
        if number < end:
            former = tuple(Slot(name, partition) for partition in range(number, end))
            groups.append(SlotGroup(f"{name} before", former, members, True))
    for members, slots_of_one in together.items():
        groups.append(SlotGroup(f"names as {slots_of_one[0].handler_name}", tuple(slots_of_one), members, True))
    return groups


@lru_cache(maxsize=4096)
def _rank(key: str, member: str) -> int:
    return int.from_bytes(sha256(f"{key}/{member}".encode()).digest()[:8])
