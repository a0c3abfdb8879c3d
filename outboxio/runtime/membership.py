"""Membership: this process among the processes that share handlers.

The parts of sharing handlers:

* A cluster lock proves that a process owns a partition. All further knowledge is a hint.
* ``instances`` lists the processes, and ``leases`` shows who took each lock. The membership reads both tables, the
  *view*, and writes that this process lives.
* The share (``partition_share.py``) decides from the view which partitions this process takes and gives away. Each
  process decides alone: a wrong view can only unbalance.

A process without shared handlers reads and writes no view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from msgspec import Struct

from outboxio.loops.loop import NOTHING, RoundResult, Signals
from outboxio.model.lock_name import LockName, Slot
from outboxio.runtime.lock_plan import LockMoves
from outboxio.runtime.partition_share import PartitionShare
from outboxio.storage.protocols import Instance, LockGrant, PartitionCount
from outboxio.storage.tables.partitions import PartitionTables
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of

logger = log_of(__name__)

LOOK_DELAY = 0.2  # seconds between two views while partitions move
POLL_DELAY = 0.5  # seconds between two views at rest without wake-ups between processes, or with free partitions
REST_DELAY = 5.0  # seconds between two views at rest with wake-ups between processes; at most a heartbeat
ORDERS_DELAY = 1.0  # seconds between two reads of pauses and numbers of partitions
SICK_FOR = 60.0  # seconds for which a sick process takes no partition
VIEW_TIMEOUT = 10.0  # seconds that the database has to answer


class SlotControl(Protocol):
    """The shard run, for sharing."""

    def halt(self, slot: Slot) -> None:
        """Start no more rows of a slot."""

    def resume(self, slot: Slot) -> None:
        """Start rows of a halted slot again."""

    def in_flight(self, slot: Slot) -> int:
        """The number of rows of a slot in flight. A slot without such rows can be given back."""
        ...

    def is_sick(self, now: float) -> bool:
        """True if due rows have waited for long, and no run has ended for long."""
        ...

    def gave_back(self) -> None:
        """This process has given locks of shared handlers back, or comes or leaves: wake the other processes."""

    async def unowned(self, slots: Sequence[Slot]) -> None:
        """No process has owned these slots for 5 s."""


class Member(Struct, frozen=True):
    """A process that may share handlers."""

    namespace: str
    owner: str
    """The name of the process in ``leases`` and ``instances``."""
    always: Sequence[LockName]
    """The locks that the process tries in any case: the lock of fan-out."""
    heartbeat: float
    """The process counts as alive for two times so many seconds after its last row in ``instances``."""
    is_woken: bool
    """True if wake-ups of other processes reach the process."""


class Membership:
    """The lock plan of a process, and the view of the processes that share its handlers."""

    def __init__(
        self,
        member: Member,
        repository: PartitionTables | None,
        share: PartitionShare,
        clock: ShardClock,
        signals: Signals,
        *,
        control: SlotControl,
    ) -> None:
        """``repository``: ``None`` if no handler can be shared."""
        self._member = member
        self._namespace = member.namespace
        self._owner = member.owner
        self._repository = repository
        self._share = share
        self._clock = clock
        self._signals = signals
        self._control = control
        self._seen_at = float("-inf")
        self._died: set[str] = set()
        self._is_moving = False
        self._is_leaving = False
        self._names: dict[Slot, LockName] = {}

    # --- the lock plan -------------------------------------------------------------------------

    @property
    def names(self) -> Collection[LockName]:
        """The locks that this process may hold."""
        return [*self._member.always, *map(self._name, self._share.slots)]

    @property
    def has_more(self) -> bool:
        """True if taking a lock may allow this process to take further locks at once."""
        return self._share.is_shared

    def next_moves(self, held: Collection[LockName]) -> LockMoves:
        """Halt and resume slots, and say which locks to give back and which locks to try."""
        slots = [name.slot for name in held if name.role == "dispatch"]
        plan = self._share.plan(slots, self._control.in_flight, asyncio.get_running_loop().time())
        for slot in plan.halt:
            self._control.halt(slot)
        for slot in plan.resume:
            self._control.resume(slot)
        was_moving, self._is_moving = self._is_moving, bool(plan.wanted or plan.halt or plan.release)
        if self._is_moving and not was_moving:
            self._signals.share.set()  # the next view was due after the pause of a cluster at rest
        tries = [name for name in self._member.always if name not in held]
        tries += map(self._name, (*plan.wanted, *plan.orphans))
        return LockMoves(list(map(self._name, plan.release)), tries)

    def taken(self, grants: Mapping[LockName, LockGrant]) -> None:
        """Hear of the locks that a round has taken."""
        now = asyncio.get_running_loop().time()
        for name, grant in grants.items():
            if name.role == "dispatch":
                former = self._share.owner_of(name.slot, grant.term - 1) if grant.follows_crash else None
                self._share.took(name.slot, now, follows_crash=grant.follows_crash)
                if former is not None:
                    self._has_died(former)

    def given_back(self, names: Collection[LockName]) -> None:
        """Tell the other processes that locks are free."""
        if self._share.is_shared:
            self._control.gave_back()

    def _name(self, slot: Slot) -> LockName:
        name = self._names.get(slot)
        if name is None:
            name = self._names[slot] = LockName(self._namespace, "dispatch", slot.handler_name, slot.partition)
        return name

    def _has_died(self, instance: str) -> None:
        """A process had not given a lock back, and the lock was free: the process, or its session, is dead.

        The quotas are right at once. A process that only lost its session writes its row again.
        """
        self._share.forget(instance)
        self._died.add(instance)
        self._signals.share.set()

    # --- what the handlers are -----------------------------------------------------------------

    def heed(self, names: Collection[str], counts: Mapping[str, PartitionCount]) -> None:
        """Take in the stored handler names of this process, and the numbers of their partitions."""
        was_shared, before = self._share.is_shared, len(self._share.slots)
        self._share.heed(names, counts, asyncio.get_running_loop().time())
        if self._share.is_shared != was_shared:
            self._signals.share.set()
        if len(self._share.slots) != before:
            self._signals.locks.set()

    # --- the view ------------------------------------------------------------------------------

    def look_delay(self) -> float:
        """The seconds until the next view is due."""
        share = self._share
        if share.is_shared and (self._is_moving or share.is_short):
            return LOOK_DELAY
        is_at_rest = not share.is_shared or (self._member.is_woken and share.is_at_rest)
        return min(REST_DELAY, self._member.heartbeat) if is_at_rest else POLL_DELAY

    async def look_once(self) -> RoundResult:
        """Write that this process lives, if that is due, and read the view."""
        if self._repository is None or not self._share.is_shared or self._is_leaving:
            return NOTHING
        async with asyncio.timeout(VIEW_TIMEOUT):
            await self._look(self._repository)
        now = asyncio.get_running_loop().time()
        if not self._share.is_giving_all(now) and self._control.is_sick(now):
            logger.error(
                "no run has ended for 30 s while rows have been due for over 60 s: this process gives its partitions "
                "to other processes, and takes none for %d s", SICK_FOR, alarm="process_sick",
            )  # fmt: skip
            self._share.give_all(now, seconds=SICK_FOR)
            self._seen_at = min(self._seen_at, now - self._member.heartbeat)  # the next view writes the change
        if slots := self._share.unowned(now):
            await self._control.unowned(slots)
        return NOTHING

    async def _look(self, repository: PartitionTables) -> None:
        time, now = asyncio.get_running_loop().time, self._clock()
        while self._died:
            died = next(iter(self._died))
            await repository.leave(self._namespace, died)
            self._died.discard(died)
            logger.warning("%s is gone: the process did not give its locks back", died, owner=died)
            self._control.gave_back()  # the other processes take their part of the partitions
        if time() - self._seen_at >= self._member.heartbeat / 2:
            is_new = not self._is_member
            await self._tell_names(repository)
            if is_new:
                self._control.gave_back()  # the other processes give partitions away for this process
        leases = {self._name(slot).lease: slot for slot in self._share.slots}
        asked_at, alive_for = time(), timedelta(seconds=2 * self._member.heartbeat)
        view = await repository.view(self._namespace, now - alive_for, list(leases))
        # After the database's clock was set back, the last row of a dead process is dated in the future. A live process
        # writes a new row at the latest a heartbeat after it has followed the clock.
        alive = [one for one in view.instances if one.last_seen_date < now + alive_for]
        self._share.see(alive, {leases[name]: lease for name, lease in view.leases.items()}, asked_at)
        self._signals.locks.set()  # the share decides with the newest view

    async def _tell_names(self, repository: PartitionTables) -> None:
        """Write for which handler names the other processes should count this process as a member."""
        time = asyncio.get_running_loop().time
        names = self._share.names_for_others(time())
        await repository.seen(self._namespace, Instance(self._owner, names, self._clock()))
        self._seen_at = time()

    # --- the end -------------------------------------------------------------------------------

    async def begin_to_leave(self) -> None:
        """Give each slot back as soon as the slot is idle, while the quotas of the other processes rise."""
        self._is_leaving = True
        if self._is_member and self._repository is not None:
            self._share.leave()
            self._signals.locks.set()
            await self._tell_names(self._repository)
            self._control.gave_back()

    async def leave(self) -> None:
        """This process has given all locks back: remove the row of ``instances``."""
        if self._is_member and self._repository is not None:
            await self._repository.leave(self._namespace, self._owner)

    @property
    def _is_member(self) -> bool:
        """True if this process has a row in ``instances``."""
        return self._seen_at > float("-inf")
