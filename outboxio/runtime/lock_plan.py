"""Lock plans: which cluster locks a process takes, and which locks it gives back.

Declarations: the numbers of partitions that the code of this process asks for.

A process of a version without partitions reads the rows of all partitions, as far as the process holds the lock of
partition 0. So a number is not declared while such a process may still run. ``subscriptions`` shows that: a version
without partitions announces its handlers every minute, and leaves ``partitioned_seen_date`` as it is.

Balance: the number of slots that each process should hold, and the slots that a process takes first.

Each process computes the balance alone, from the same view of the cluster: no leader, no stored assignment, no command.
The cluster lock of a slot is the truth, so processes with different views may hold an uneven number of slots for a
while, but never the same slot. ``partition_share.py`` decides with these functions; a function here has no state.

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
    """The work of a round: the locks to give back, and the locks to try afterwards."""

    back: Sequence[LockName]
    tries: Sequence[LockName]


class LockPlan(Protocol):
    """Decides which locks this process takes and gives back."""

    @property
    def names(self) -> Collection[LockName]:
        """The locks that this process may hold."""
        ...

    @property
    def has_more(self) -> bool:
        """True if the plan has further moves as soon as a round has taken locks."""
        ...

    def next_moves(self, held: Collection[LockName]) -> LockMoves:
        """The moves of the next round. ``held``: the locks that this process has taken."""
        ...

    def taken(self, grants: Mapping[LockName, LockGrant]) -> None:
        """Hear of the locks that a round has taken."""
        ...

    def given_back(self, names: Collection[LockName]) -> None:
        """Hear of the locks that a round has given back."""
        ...


class EveryLock:
    """The plan of a process that shares no handler: try every lock, and give no lock back."""

    has_more = False

    def __init__(self, names: Iterable[LockName]) -> None:
        self.names: Collection[LockName] = list(names)

    def next_moves(self, held: Collection[LockName]) -> LockMoves:
        return LockMoves((), [name for name in self.names if name not in held])

    def taken(self, grants: Mapping[LockName, LockGrant]) -> None: ...

    def given_back(self, names: Collection[LockName]) -> None: ...


ASK_AGAIN = 5.0  # seconds


class Declarations:
    """Declares the numbers of partitions once, as soon as no older version announces the handler."""

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
        self._asked_at = float("-inf")
        self._waited_for: set[str] = set()

    async def make(self) -> None:
        """Declare the numbers of the handlers that no older version has announced for two minutes."""
        time = asyncio.get_running_loop().time
        if self._repository is None or not self._left or time() - self._asked_at < ASK_AGAIN:
            return
        now = self._clock()
        older = await self._repository.names_of_older(self._namespace, now - OLDER_FOR)
        ready = {name: number for name, number in self._left.items() if name not in older}
        if ready:
            await self._repository.declare(self._namespace, ready, now)
        self._left = {name: number for name, number in self._left.items() if name in older}
        for name in sorted(self._left.keys() - self._waited_for):
            logger.warning(
                "handler %r keeps its number of partitions: a process of an older version of outboxio, which knows no "
                "partitions, has announced the handler within two minutes", name, handler=name,
            )  # fmt: skip
        self._waited_for |= self._left.keys()
        self._asked_at = time()


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

    @property
    def goes_on(self) -> bool:
        """True if slots are halted."""
        return bool(self._halted)

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
            for slot in to_give_first(halted, in_flight, self._me)[surplus:]:
                self._resume(slot)
            return []
        if len(halted) == surplus:
            return []
        others = [slot for slot in slots if slot not in self._halted and slot not in self._busy]
        return self.halt(to_give_first(others, in_flight, self._me)[: surplus - len(halted)], now)

    def end(self, in_flight: Callable[[Slot], int]) -> tuple[list[Slot], list[Slot]]:
        """The slots that are resumed, and the slots that are halted and idle."""
        return self._resumed, [slot for slot in self._halted if not in_flight(slot)]

    def _resume(self, slot: Slot) -> None:
        del self._halted[slot]
        self._resumed.append(slot)


LONGEST_RELEASE = 1.0  # seconds in which a slot that this process gave back may still look held by it


_ANY_TERM = -1


class SeenCluster:
    """The newest view of the cluster, and the part of earlier views that the rules need."""

    def __init__(self, me: str) -> None:
        self.at = float("-inf")
        """The moment of the newest view."""
        self.leases: dict[Slot, SeenLease] = {}
        self._me = me
        self._instances: dict[str, Instance] = {}
        self._dead: dict[str, datetime] = {}
        """Processes that died: when each was last seen."""
        self._know_partitions: set[str] = set()
        self._free: dict[Slot, tuple[int, float]] = {}
        """The free slots: the term, and the moment since when the slot has been free under the term."""
        self._given_at: dict[Slot, float] = {}
        self._giving: set[str] = set()
        """Processes that have given a slot back since the newest view."""

    def take_in(
        self, instances: Sequence[Instance], leases: Mapping[Slot, SeenLease], slots: Collection[Slot], now: float
    ) -> bool:
        """Take in a view; True if it differs from what was known."""
        known = self.leases, {name: one.names for name, one in self._instances.items()}, self._dead.keys(), self.at
        self.at, self.leases, self._giving = now, dict(leases), set()
        # A view that was asked for before this process gave a slot back, or meanwhile, may show the slot as held.
        self._given_at = {slot: moment for slot, moment in self._given_at.items() if now - moment < LONGEST_RELEASE}
        for slot, moment in self._given_at.items():
            if now <= moment or self.holder_of(slot) == self._me:
                self._mark_given_back(slot)
        self._instances = {one.instance: one for one in instances}
        owners = {lease.owner for lease in leases.values()}
        # A row that was written again: the process lives.
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
            if lease is None or lease.is_given_back:
                term = 0 if lease is None else lease.term
                before, since = self._free.get(slot, (term, now))
                free[slot] = (term, since if before in (term, _ANY_TERM) else now)
        self._free = free
        seen = self.leases, {name: one.names for name, one in self._instances.items()}, self._dead.keys()
        return known[-1] == float("-inf") or known[:-1] != seen

    @property
    def has_free_slots(self) -> bool:
        """True if a slot is not held, by the views."""
        return bool(self._free)

    def members_of(self, name: str) -> frozenset[str]:
        """The processes that have a handler name, this process included."""
        alive = self._instances.keys() - self._dead.keys()
        return frozenset((self._me, *(one for one in alive if name in self._instances[one].names)))

    def forget(self, instance: str) -> None:
        row = self._instances.get(instance)
        self._dead[instance] = datetime.min if row is None else row.last_seen_date

    def is_giving(self, instance: str) -> bool:
        """True if the process is known to have given a slot back since the newest view."""
        return instance in self._giving

    def is_gone(self, instance: str) -> bool:
        """True if the process is known to have died, or is no member by the newest view."""
        return instance in self._dead or (instance not in self._instances and instance != self._me)

    def knows_partitions(self, instance: str) -> bool:
        """True if the process shares partitions, now or before: a process without partitions never does."""
        return instance == self._me or instance in self._know_partitions

    def holder_of(self, slot: Slot) -> str | None:
        """The process that holds a slot by the view, or died with the slot."""
        lease = self.leases.get(slot)
        return None if lease is None or lease.is_given_back else lease.owner

    def free_for(self, slot: Slot, now: float) -> float:
        """The seconds since when a slot has been free by the views; negative if the slot is new or not free."""
        return now - self._free[slot][1] if slot in self._free else -1.0

    def expect(self, slot: Slot, moment: float) -> None:
        """A new slot: the seconds in which the slot is free count from a later moment."""
        self._free[slot] = (_ANY_TERM, moment)

    def given_back(self, slot: Slot, now: float) -> None:
        """This process gives a slot back: the slot is free before the next view says so."""
        self._given_at[slot] = now
        self._mark_given_back(slot)
        self._free[slot] = (self.leases[slot].term if slot in self.leases else 0, now)

    def taken(self, slot: Slot, *, follows_crash: bool) -> None:
        holder = self.holder_of(slot)
        if holder is not None and not follows_crash:
            self._giving.add(holder)
        term = self.leases[slot].term if slot in self.leases else 0
        self.leases[slot] = SeenLease(self._me, term + 1, 0)
        self._free.pop(slot, None)
        self._given_at.pop(slot, None)

    def _mark_given_back(self, slot: Slot) -> None:
        lease = self.leases.get(slot)
        if lease is not None:
            self.leases[slot] = SeenLease(self._me, lease.term, lease.term)
