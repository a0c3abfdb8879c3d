"""Lock plans: which cluster locks a process acquires and releases.

Declarations: the partition counts that the code of this process requests.

A process with a version that does not support partitions reads the rows of all partitions while it holds the lock of
partition 0. So a count is not declared while such a process may still run. ``subscriptions`` shows whether one runs:
such a version announces its handlers every minute without updating ``partitioned_seen_date``.

Balance: how many slots each process should hold, and which it takes first.

Each process computes the balance alone from the same view of the cluster. There is no leader and no stored assignment.
The cluster lock of a slot is authoritative: processes with different views may hold an uneven number of slots for a
while, but never the same slot. The functions are stateless; ``partition_share.py`` makes the decisions with them.

Giving slots away: a slot moves only when idle, and a slot that does not become idle stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from typing import Protocol

from msgspec import Struct

from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.options import OLDER_FOR
from outboxio.model.lock_name import LockName, Slot
from outboxio.storage.protocols import Instance, LockGrant, SeenLease
from outboxio.storage.tables.partitions import PartitionTables
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of

logger = log_of(__name__)


class LockMoves(Struct, frozen=True):
    """The work of a round: the locks to release, and the locks to try afterwards."""

    back: Sequence[LockName]
    tries: Sequence[LockName]


class LockPlan(Protocol):
    """Decides which locks this process acquires and releases."""

    @property
    def names(self) -> Collection[LockName]:
        """The locks that this process may hold."""
        ...

    @property
    def has_more(self) -> bool:
        """True if the plan has further moves as soon as a round has taken locks."""
        ...

    def next_moves(self, held: Collection[LockName]) -> LockMoves:
        """Return the moves of the next round. ``held``: the locks that this process has acquired."""
        ...

    def taken(self, grants: Mapping[LockName, LockGrant]) -> None:
        """Process the locks that a round has acquired."""
        ...

    def released(self, names: Collection[LockName]) -> None:
        """Process the locks that a round has released."""
        ...


class EveryLock:
    """The plan of a process that shares no handler: try every lock, and release none."""

    has_more = False

    def __init__(self, names: Iterable[LockName]) -> None:
        self.names: Collection[LockName] = list(names)

    def next_moves(self, held: Collection[LockName]) -> LockMoves:
        return LockMoves((), [name for name in self.names if name not in held])

    def taken(self, grants: Mapping[LockName, LockGrant]) -> None: ...

    def released(self, names: Collection[LockName]) -> None: ...


RECHECK_DELAY = 5.0  # seconds


class Declarations:
    """Declares the partition counts once, as soon as no older version announces the handler."""

    def __init__(
        self, namespace: str, repository: PartitionTables | None, handlers: HandlerRegistry, clock: ShardClock
    ) -> None:
        """``repository``: ``None`` if all handlers have a single partition."""
        self._namespace = namespace
        self._repository = repository
        self._clock = clock
        self._left = {
            handler.name: handler.options.declared_partitions
            for handler in handlers
            if handler.options.declared_partitions > 1
        }
        self._checked_at = float("-inf")
        self._waited_for: set[str] = set()

    async def make(self) -> None:
        """Declare the counts of the handlers that no older version has announced within the last two minutes."""
        time = asyncio.get_running_loop().time
        if self._repository is None or not self._left or time() - self._checked_at < RECHECK_DELAY:
            return
        now = self._clock()
        older = await self._repository.names_of_older_versions(self._namespace, now - OLDER_FOR)
        ready = {name: number for name, number in self._left.items() if name not in older}
        if ready:
            await self._repository.declare(self._namespace, ready, now)
        self._left = {name: number for name, number in self._left.items() if name in older}
        for name in sorted(self._left.keys() - self._waited_for):
            logger.warning(
                "handler %r keeps its partition count: a process with an older version of outboxio, which does "
                "not support partitions, announced the handler within the last two minutes", name, handler=name,
            )  # fmt: skip
        self._waited_for |= self._left.keys()
        self._checked_at = time()


class SlotGroup(Struct, frozen=True):
    """Slots that are balanced together over the processes that may hold them."""

    key: str
    """The same text in every process that has the group."""
    slots: tuple[Slot, ...]
    members: frozenset[str]
    """The names of the processes, including this one."""
    is_shared: bool
    """If False, the first process that tries a slot keeps it, and slots are not balanced."""


def quotas(members: Collection[str], counts: Mapping[str, int], slots: int, key: str) -> dict[str, int]:
    """Return how many slots each member should hold. ``counts``: how many each member holds now.

    If the slots cannot be divided evenly, the members that hold the most get the remainder, so that no slot moves
    because of it. Among members that hold equally many, a hash with ``key`` decides, so that no member gets the
    remainder of every handler.

    Example::

        quotas(["a", "b", "c"], {"b": 9}, 16, "score")   # {"b": 6, "a": 5, "c": 5}
    """
    least, remainder = divmod(slots, len(members))
    order = sorted(members, key=lambda member: (-counts.get(member, 0), _rank(key, member)))
    return {member: least + (rank < remainder) for rank, member in enumerate(order)}


def in_preferred_order(slots: Sequence[Slot], me: str) -> list[Slot]:
    """Return the slots, rotated by process, so that processes that join at the same time try different slots."""
    start = _rank("", me) % max(1, len(slots))
    return [*slots[start:], *slots[:start]]


def to_give_first(slots: Iterable[Slot], in_flight: Callable[[Slot], int], me: str) -> list[Slot]:
    """Return the held slots in the order in which to release them: idle slots first, because they move at once.

    Partition 0 comes late, because a process without a slot of the handler waits until another holds partition 0.
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
    """Group the slots of all handler names.

    ``numbers``: the number of partitions by stored handler name. ``active``: only partitions below this number may
    have unfinished rows. It exceeds the number of partitions after an operator has lowered it.

    A handler name with several partitions is a group. Its partitions that get no new rows are a separate group, because
    a process that had only such partitions would soon be idle. A handler name with one partition is a group of a single
    slot that is not shared. With ``spreads_all`` the names with the same members form one shared group, so that a
    process is only counted for slots that it can hold.
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


#: The seconds that a halted slot has to become idle.
LONGEST_GIVING = 5.0
#: The seconds for which a slot that did not become idle is not halted again.
BUSY_SLOT_PAUSE = 30.0


class Giving:
    """The slots that this process is giving away."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._halted: dict[Slot, float] = {}
        """When each slot was halted."""
        self._busy: dict[Slot, float] = {}
        """Slots that did not become idle, and when each slot may be halted again."""
        self._resumed: list[Slot] = []

    def number(self, slots: Collection[Slot]) -> int:
        """Return how many of these slots are halted."""
        return sum(slot in self._halted for slot in slots)

    @property
    def is_active(self) -> bool:
        """True if slots are halted."""
        return bool(self._halted)

    def begin(self, held: Collection[Slot], now: float) -> None:
        """Begin a round: forget the slots that are no longer held."""
        self._halted = {slot: since for slot, since in self._halted.items() if slot in held}
        self._busy = {slot: until for slot, until in self._busy.items() if until > now}
        self._resumed = []

    def halt(self, slots: Collection[Slot], now: float) -> list[Slot]:
        """Halt slots that must move, however long their runs take; return those that were not halted before."""
        fresh = [slot for slot in slots if slot not in self._halted]
        self._halted.update(dict.fromkeys(fresh, now))
        return fresh

    def give(self, slots: Collection[Slot], surplus: int, in_flight: Callable[[Slot], int], now: float) -> list[Slot]:
        """Keep ``surplus`` slots of a group halted; return those that were not halted before."""
        halted = [slot for slot in slots if slot in self._halted]
        for slot in halted:
            if now - self._halted[slot] >= LONGEST_GIVING and in_flight(slot):
                self._resume(slot)
                self._busy[slot] = now + BUSY_SLOT_PAUSE
        halted = [slot for slot in halted if slot in self._halted]
        if len(halted) > surplus:
            for slot in to_give_first(halted, in_flight, self._me)[surplus:]:
                self._resume(slot)
            return []
        if len(halted) == surplus:
            return []
        others = [slot for slot in slots if slot not in self._halted and slot not in self._busy]
        return self.halt(to_give_first(others, in_flight, self._me)[: surplus - len(halted)], now)

    def end(self, in_flight: Callable[[Slot], int]) -> tuple[list[Slot], list[Slot]]:
        """Return the slots to resume, and the slots that are halted and idle."""
        return self._resumed, [slot for slot in self._halted if not in_flight(slot)]

    def _resume(self, slot: Slot) -> None:
        del self._halted[slot]
        self._resumed.append(slot)


LONGEST_RELEASE = 1.0  # seconds for which a view may still show a released slot as held
_ANY_TERM = -1


class SeenCluster:
    """The newest view of the cluster, and what the rules need of earlier views."""

    def __init__(self, me: str) -> None:
        self.at = float("-inf")
        """The time of the newest view."""
        self.leases: dict[Slot, SeenLease] = {}
        self._me = me
        self._instances: dict[str, Instance] = {}
        self._dead: dict[str, datetime] = {}
        """The processes that died, and when each was last seen."""
        self._know_partitions: set[str] = set()
        self._free: dict[Slot, tuple[int, float]] = {}
        """The free slots: the term, and since when each has been free under it."""
        self._released_at: dict[Slot, float] = {}
        self._giving: set[str] = set()
        """Processes that have released a slot since the newest view."""

    def take_in(
        self, instances: Sequence[Instance], leases: Mapping[Slot, SeenLease], slots: Collection[Slot], now: float
    ) -> bool:
        """Process a view; return True if it differs from the last one."""
        known = self.leases, {name: one.names for name, one in self._instances.items()}, self._dead.keys(), self.at
        self.at, self.leases, self._giving = now, dict(leases), set()
        # A view that was requested before this process had released a slot may still show it as held.
        self._released_at = {slot: at for slot, at in self._released_at.items() if now - at < LONGEST_RELEASE}
        for slot, at in self._released_at.items():
            if now <= at or self.holder_of(slot) == self._me:
                self._mark_released(slot)
        self._instances = {one.instance: one for one in instances}
        owners = {lease.owner for lease in leases.values()}
        # A process that wrote its row again is alive.
        self._dead = {
            name: seen
            for name, seen in self._dead.items()
            if (self._instances[name].last_seen_date <= seen if name in self._instances else name in owners)
        }
        self._know_partitions &= owners
        self._know_partitions |= self._instances.keys()
        self._know_partitions |= {
            lease.owner for slot, lease in leases.items() if slot.partition > 0 or lease.is_of_instance
        }
        free = dict[Slot, tuple[int, float]]()
        for slot in slots:
            lease = self.leases.get(slot)
            if lease is None or lease.is_released:
                term = 0 if lease is None else lease.term
                before, since = self._free.get(slot, (term, now))
                free[slot] = (term, since if before in (term, _ANY_TERM) else now)
        self._free = free
        seen = self.leases, {name: one.names for name, one in self._instances.items()}, self._dead.keys()
        return known[-1] == float("-inf") or known[:-1] != seen

    @property
    def has_free_slots(self) -> bool:
        """True if a slot is free by the views."""
        return bool(self._free)

    def members_of(self, name: str) -> frozenset[str]:
        """Return the processes that have a handler name, including this one."""
        alive = self._instances.keys() - self._dead.keys()
        return frozenset((self._me, *(one for one in alive if name in self._instances[one].names)))

    def forget(self, instance: str) -> None:
        row = self._instances.get(instance)
        self._dead[instance] = datetime.min if row is None else row.last_seen_date

    def is_giving(self, instance: str) -> bool:
        """Return True if the process has released a slot since the newest view."""
        return instance in self._giving

    def is_gone(self, instance: str) -> bool:
        """Return True if the process is known to have died, or is missing in the newest view."""
        return instance in self._dead or (instance not in self._instances and instance != self._me)

    def knows_partitions(self, instance: str) -> bool:
        """Return True if the version of a process supports partitions, as its shared partitions show."""
        return instance == self._me or instance in self._know_partitions

    def holder_of(self, slot: Slot) -> str | None:
        """Return the process that holds a slot by the view, or died holding it."""
        lease = self.leases.get(slot)
        return None if lease is None or lease.is_released else lease.owner

    def free_for(self, slot: Slot, now: float) -> float:
        """Return for how many seconds a slot has been free by the views; negative if it is new or not free."""
        return now - self._free[slot][1] if slot in self._free else -1.0

    def expect(self, slot: Slot, since: float) -> None:
        """Add a new slot, which counts as free since ``since``."""
        self._free[slot] = (_ANY_TERM, since)

    def released(self, slot: Slot, now: float) -> None:
        """Mark a slot that this process releases as free, before the next view shows it."""
        self._released_at[slot] = now
        self._mark_released(slot)
        self._free[slot] = (self.leases[slot].term if slot in self.leases else 0, now)

    def taken(self, slot: Slot, *, follows_crash: bool) -> None:
        holder = self.holder_of(slot)
        if holder is not None and not follows_crash:
            self._giving.add(holder)
        term = self.leases[slot].term if slot in self.leases else 0
        self.leases[slot] = SeenLease(self._me, term + 1, 0)
        self._free.pop(slot, None)
        self._released_at.pop(slot, None)

    def _mark_released(self, slot: Slot) -> None:
        lease = self.leases.get(slot)
        if lease is not None:
            self.leases[slot] = SeenLease(self._me, lease.term, lease.term)
