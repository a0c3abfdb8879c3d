"""Membership: this process among the processes that share handlers.

* A cluster lock proves that a process owns a partition. Everything else is a hint.
* ``instances`` lists the processes, and ``leases`` shows which process acquired each lock. The membership reads both
  tables (the *view*), and records that this process is alive.
* The share (``partition_share.py``) decides by the view which partitions this process acquires and gives away. Each
  process decides alone, so a wrong view can only cause an imbalance.

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

CHECK_DELAY = 0.2  # seconds between two views while partitions move
POLL_DELAY = 0.5  # seconds between two views while nothing moves, without wake-ups or with free partitions
STEADY_DELAY = 5.0  # seconds between two views while nothing moves, with wake-ups; at most a heartbeat
DECISIONS_DELAY = 1.0  # seconds between two reads of pauses and partition counts
STALLED_FOR = 60.0  # seconds for which a stalled process takes no partition
VIEW_TIMEOUT = 10.0  # seconds


class SlotControl(Protocol):
    """The shard run, as the membership uses it."""

    def halt(self, slot: Slot) -> None:
        """Start no more rows of a slot."""

    def resume(self, slot: Slot) -> None:
        """Start rows of a halted slot again."""

    def in_flight(self, slot: Slot) -> int:
        """Return how many rows of a slot are in flight. A slot without such rows can be released."""
        ...

    def is_stalled(self, now: float) -> bool:
        """Return True if due rows have waited for long while no run has finished."""
        ...

    def locks_released(self) -> None:
        """Wake the other processes, because this one has released locks, has joined, or leaves."""

    async def unowned(self, slots: Sequence[Slot]) -> None:
        """Check slots that no process has owned for 5 s."""


class Member(Struct, frozen=True):
    """A process that may share handlers."""

    namespace: str
    owner: str
    """The name of the process in ``leases`` and ``instances``."""
    always: Sequence[LockName]
    """The locks that the process always tries, such as the fan-out lock."""
    heartbeat: float
    """Seconds. The process counts as alive for twice as long after it last wrote its row in ``instances``."""
    is_woken: bool
    """True if the process receives wake-ups of other processes."""


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
        """True if acquiring a lock may allow this process to acquire more locks at once."""
        return self._share.is_shared

    def next_moves(self, held: Collection[LockName]) -> LockMoves:
        """Halt and resume slots, and return the locks to release and to try."""
        slots = [name.slot for name in held if name.role == "dispatch"]
        plan = self._share.plan(slots, self._control.in_flight, asyncio.get_running_loop().time())
        for slot in plan.halt:
            self._control.halt(slot)
        for slot in plan.resume:
            self._control.resume(slot)
        was_moving, self._is_moving = self._is_moving, bool(plan.free or plan.halt or plan.release)
        if self._is_moving and not was_moving:
            self._signals.share.set()  # the next view was not due soon, because nothing moved
        tries = [name for name in self._member.always if name not in held]
        tries += map(self._name, (*plan.free, *plan.orphans))
        return LockMoves(list(map(self._name, plan.release)), tries)

    def taken(self, grants: Mapping[LockName, LockGrant]) -> None:
        """Process the locks that a round has acquired."""
        now = asyncio.get_running_loop().time()
        for name, grant in grants.items():
            if name.role == "dispatch":
                former = self._share.owner_of(name.slot, grant.term - 1) if grant.follows_crash else None
                self._share.took(name.slot, now, follows_crash=grant.follows_crash)
                if former is not None:
                    self._has_died(former)

    def released(self, names: Collection[LockName]) -> None:
        """Notify the other processes that locks are free."""
        if self._share.is_shared:
            self._control.locks_released()

    def _name(self, slot: Slot) -> LockName:
        name = self._names.get(slot)
        if name is None:
            name = self._names[slot] = LockName(self._namespace, "dispatch", slot.handler_name, slot.partition)
        return name

    def _has_died(self, instance: str) -> None:
        """Record that a process or its session is dead, because its lock was free without having been released.

        So the quotas are correct at once. A process that only lost its session writes its row again.
        """
        self._share.forget(instance)
        self._died.add(instance)
        self._signals.share.set()

    # --- handlers ------------------------------------------------------------------------------

    def apply(self, names: Collection[str], counts: Mapping[str, PartitionCount]) -> None:
        """Apply the stored handler names of this process, and their partition counts."""
        was_shared, before = self._share.is_shared, len(self._share.slots)
        self._share.apply(names, counts, asyncio.get_running_loop().time())
        if self._share.is_shared != was_shared:
            self._signals.share.set()
        if len(self._share.slots) != before:
            self._signals.locks.set()

    # --- the view ------------------------------------------------------------------------------

    def look_delay(self) -> float:
        """Return the seconds until the next view is due."""
        share = self._share
        if share.is_shared and (self._is_moving or share.is_short):
            return CHECK_DELAY
        is_steady = not share.is_shared or (self._member.is_woken and share.is_steady)
        return min(STEADY_DELAY, self._member.heartbeat) if is_steady else POLL_DELAY

    async def look_once(self) -> RoundResult:
        """Record that this process is alive, if that is due, and read the view."""
        if self._repository is None or not self._share.is_shared or self._is_leaving:
            return NOTHING
        async with asyncio.timeout(VIEW_TIMEOUT):
            await self._look(self._repository)
        now = asyncio.get_running_loop().time()
        if not self._share.is_giving_all(now) and self._control.is_stalled(now):
            logger.error(
                "no run has finished for 30 s although rows have been due for over 60 s: releasing the "
                "partitions of this process to other processes, and acquiring none for %d s",
                STALLED_FOR, alarm="process_sick",
            )  # fmt: skip
            self._share.give_all(now, seconds=STALLED_FOR)
            self._seen_at = min(self._seen_at, now - self._member.heartbeat)  # so that the next view writes the change
        if slots := self._share.unowned(now):
            await self._control.unowned(slots)
        return NOTHING

    async def _look(self, repository: PartitionTables) -> None:
        time, now = asyncio.get_running_loop().time, self._clock()
        while self._died:
            died = next(iter(self._died))
            await repository.leave(self._namespace, died)
            self._died.discard(died)
            logger.warning("%s has disappeared without releasing its locks", died, owner=died)
            self._control.locks_released()  # the other processes acquire their share of the partitions
        if time() - self._seen_at >= self._member.heartbeat / 2:
            is_new = not self._is_member
            await self._announce_names(repository)
            if is_new:
                self._control.locks_released()  # the other processes give partitions away for this process
        leases = {self._name(slot).lease: slot for slot in self._share.slots}
        requested_at, alive_for = time(), timedelta(seconds=2 * self._member.heartbeat)
        view = await repository.view(self._namespace, now - alive_for, list(leases))
        # After the database clock was set back, the row of a dead process may be dated in the future. A live process
        # writes its row again within a heartbeat after it has followed the clock.
        alive = [one for one in view.instances if one.last_seen_date < now + alive_for]
        self._share.see(alive, {leases[name]: lease for name, lease in view.leases.items()}, requested_at)
        self._signals.locks.set()  # the share decides with the newest view

    async def _announce_names(self, repository: PartitionTables) -> None:
        """Write the handler names for which other processes should count this process as a member."""
        time = asyncio.get_running_loop().time
        names = self._share.names_for_others(time())
        await repository.seen(self._namespace, Instance(self._owner, names, self._clock()))
        self._seen_at = time()

    # --- the end -------------------------------------------------------------------------------

    async def begin_to_leave(self) -> None:
        """Release each slot as soon as it is idle, while the quotas of the other processes rise."""
        self._is_leaving = True
        if self._is_member and self._repository is not None:
            self._share.leave()
            self._signals.locks.set()
            await self._announce_names(self._repository)
            self._control.locks_released()

    async def leave(self) -> None:
        """Remove the row of this process from ``instances``, after all its locks were released."""
        if self._is_member and self._repository is not None:
            await self._repository.leave(self._namespace, self._owner)

    @property
    def _is_member(self) -> bool:
        """True if this process has a row in ``instances``."""
        return self._seen_at > float("-inf")
