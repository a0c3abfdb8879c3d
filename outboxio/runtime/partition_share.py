"""The share of a process in the slots of the cluster: which slots to try, to halt, and to release.

A pure state machine without I/O or a clock. ``now`` is event loop time in seconds. ``lock_manager.py`` acquires the
locks. The rules:

* **Below the quota**, a process tries slots that are free by the view, up to the quota.
* **Orphans**: whatever its quota, each process tries one slot of every other holder. A process holds all its locks in
  one session, so such a lock is free only if the holder died, or has just released the slot to another process. If the
  holder died, the process tries all its slots at once. A process at its quota skips a holder that exceeds its quota
  for 1 s, because that holder is about to release slots.
* **Left over**: a released slot is meant for a process below its quota. After 1 s every process tries it.
* **Evidence**: a process that acquires an orphan knows that the previous holder died (:meth:`PartitionShare.forget`),
  so the quotas are correct at once, and not only after two heartbeats.
* **Above the quota**, a process gives the surplus away, idle slots first. A slot moves only when idle: the process
  starts no more of its rows, and waits at most 5 s for the runs in flight. A process that has just exceeded its quota
  gives no slot of the group away for 20 s, unless the members change. Otherwise slots would move back and forth after
  a member died without evidence.
* **Partition 0**: a process with a version that does not support partitions reads the rows of all partitions under the
  lock of partition 0. So other partitions are held only while the holder of partition 0 supports partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from outboxio.model.lock_name import Slot
from outboxio.runtime import lock_plan
from outboxio.runtime.lock_plan import Giving, SeenCluster, SlotGroup
from outboxio.storage.protocols import Instance, PartitionCount, SeenLease, active_partitions, slots_of

#: The seconds for which a process that exceeds its quota gives nothing away, while the members stay the same.
SURPLUS_GRACE = 20.0
#: The age in seconds at which a free slot is left over, so that any process takes it, whatever its quota.
LEFT_OVER_AGE = 1.0
#: The seconds within which a holder above its quota should begin to release slots.
LONGEST_SURPLUS = 1.0
#: The seconds until every process knows that a handler has more partitions. Until then no new slot is left over.
NEWS_DELAY = 1.0
#: The age in seconds at which a view is too old to give slots away: two regular views were missed.
LONGEST_VIEW_AGE = 11.0
#: The age in seconds at which a free slot raises an alarm.
ALARM_AGE = 5.0


class Plan(Struct, frozen=True):
    """The next steps of a process, in the order ``halt``, ``resume``, ``release``, and then ``free`` and ``orphans``.

    After a slot was acquired the next plan may contain more slots to try, because a process without slots of a handler
    acquires partition 0 first.
    """

    free: tuple[Slot, ...]
    """Slots to try that are free by the view, in the order that this process prefers."""
    orphans: tuple[Slot, ...]
    """Slots to try as well: they are held by another process, or their holder died."""
    halt: tuple[Slot, ...]
    """Slots to give away: the process starts no more of their rows, and drops the ready ones."""
    resume: tuple[Slot, ...]
    """Slots that are no longer given away: the process starts their rows again."""
    release: tuple[Slot, ...]
    """Halted slots that are idle: the process releases their locks now."""


class PartitionShare:
    """Decides which slots a process tries, and which it gives away.

    The runtime calls :meth:`apply` with the partition counts, :meth:`see` with each view, and then :meth:`plan`, whose
    steps it executes at once; it calls :meth:`took` for each lock that it has acquired::

        share = PartitionShare("host-1/4711", spreads_all=False)
        share.apply(["score"], {"score": PartitionCount("score", 16, 16, changed)}, now)
        share.see(view.instances, leases, now)
        plan = share.plan(held, in_flight, now)
    """

    def __init__(self, me: str, *, spreads_all: bool, takes_all: bool = False) -> None:
        """``me``: the owner in ``leases``. ``takes_all``: a drain, which takes every free slot but is not a member."""
        self._me = me
        self._spreads_all = spreads_all and not takes_all
        self._takes_all = takes_all
        self._active: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._slots: tuple[Slot, ...] = ()
        self.is_shared = False
        """True if the process needs views. Otherwise the first process that acquires a lock keeps it."""
        self._cluster = SeenCluster(me)
        self._giving = Giving(me)
        self._groups: list[SlotGroup] | None = None
        """``None`` after a change, until the next use."""
        self._held: frozenset[Slot] = frozenset()
        self._probed: set[str] = set()
        """The holders of which the current plan tries a slot."""
        self._is_unsettled = False
        """True if the current plan has a surplus, or tries slots that become free or whose holder died."""
        self._steady: Plan | None = None
        """The plan while nothing moves, which is valid until something changes."""
        self._beyond: dict[Slot, tuple[float, frozenset[str]]] = {}
        """The slots that were acquired beyond the quota: when, and among which members."""
        self._givers: dict[tuple[str, str], float] = {}
        """By group and holder: since when the holder has exceeded its quota, by the views."""
        self._stalled_until = float("-inf")
        self._is_leaving = False

    def apply(self, names: Collection[str], counts: Mapping[str, PartitionCount], now: float) -> None:
        """Apply the stored handler names of this process, and the partition counts of the cluster."""
        active = {name: active_partitions(counts, name) for name in names}
        numbers = {name: counts[name].number if name in counts else 1 for name in names}
        if numbers != self._numbers:
            self._numbers = numbers
            self._changed()
        if active == self._active:
            return
        for name, number in active.items():
            for partition in range(self._active.get(name, number), number):
                self._cluster.expect(Slot(name, partition), now + NEWS_DELAY)
        self._active = active
        self._changed()
        self._slots = tuple(slots_of(counts, active))
        self.is_shared = any(number > 1 for number in active.values()) or (self._spreads_all and bool(active))

    @property
    def slots(self) -> Sequence[Slot]:
        """All slots that this process may hold."""
        return self._slots

    @property
    def is_steady(self) -> bool:
        """True if the last plan moves no slot, and no slot is known to be free."""
        return self._steady is not None

    @property
    def is_short(self) -> bool:
        """True if this process has fewer slots than its quota by the newest view, so that the next view is due soon."""
        return not self._is_leaving and any(
            group.is_shared and sum(slot in self._held for slot in group.slots) < self._quota(group)
            for group in self._current_groups()
        )

    def names_for_others(self, now: float) -> tuple[str, ...]:
        """Return the handler names for which other processes should count this process as a member.

        The runtime writes the names into the row of ``instances``. A process that is stalled or leaving writes no
        names, so that the quotas of the other processes rise. Its row still shows that it supports partitions.
        """
        is_away = self._is_leaving or self._takes_all or self.is_giving_all(now)
        return () if is_away else tuple(self._active)

    def see(self, instances: Sequence[Instance], leases: Mapping[Slot, SeenLease], now: float) -> None:
        """Process the newest view. ``instances``: the processes that were seen within two heartbeats."""
        if self._cluster.take_in(instances, leases, self._slots, now):
            self._changed()

    def owner_of(self, slot: Slot, before_term: int) -> str | None:
        """Return the process that held a slot under a term, by the newest view.

        If the lock was not released, the process that acquires the next term knows that this process died.
        """
        lease = self._cluster.leases.get(slot)
        is_evidence = lease is not None and lease.term == before_term and not lease.is_released
        return lease.owner if lease is not None and is_evidence and lease.owner != self._me else None

    def plan(self, held: Collection[Slot], in_flight: Callable[[Slot], int], now: float) -> Plan:
        """Return the next steps. ``in_flight``: how many rows of a slot were found and are not settled."""
        if frozenset(held) == self._held and self._steady is not None:
            return self._steady
        self._held, self._probed, self._is_unsettled, self._steady = frozenset(held), set(), False, None
        self._beyond = {
            slot: (since, members)
            for slot, (since, members) in self._beyond.items()
            if slot in self._held and now - since < SURPLUS_GRACE
        }
        free, orphans = list[Slot](), list[Slot]()
        must_go = self._must_go(now)
        self._giving.begin(self._held, now)
        halt = self._giving.halt(must_go, now)
        for group in self._current_groups():
            mine = [slot for slot in group.slots if slot in self._held]
            halt += self._give(group, [slot for slot in mine if slot not in must_go], in_flight, now)
            if not self._is_leaving and not self._is_stalled_for(group, now):
                self._take(group, self._quota(group) - len(mine), free, orphans, now)
        resume, release = self._giving.end(in_flight)
        for slot in release:
            self._cluster.released(slot, now)
        plan = Plan(*(tuple(slots) for slots in (free, orphans, halt, resume, release)))
        is_moving = free or halt or resume or release or self._is_unsettled or self._giving.is_active or self._beyond
        is_ending = self._is_leaving or self.is_giving_all(now)
        if not (is_moving or is_ending or self._givers or self._cluster.has_free_slots):
            self._steady = plan
        return plan

    def took(self, slot: Slot, now: float, *, follows_crash: bool) -> None:
        """Record that this process has acquired the lock of a slot. ``follows_crash``: the previous holder died."""
        self._held |= {slot}
        self._steady = None
        group = next((group for group in self._current_groups() if slot in group.slots), None)
        holder = self._cluster.holder_of(slot)
        # The surplus is given away at once if the holder is known to have died, because then the quotas are correct, or
        # if the holder had just released the slot to another process.
        if group is not None and self._surplus(group) > 0:
            is_left_over = holder is None and self._cluster.free_for(slot, now) >= LEFT_OVER_AGE
            if is_left_over or (follows_crash and holder in group.members):
                self._beyond[slot] = (now, group.members)
        self._cluster.taken(slot, follows_crash=follows_crash)

    def forget(self, instance: str) -> None:
        """Record that a process has died: it is not a member until it is seen again."""
        self._cluster.forget(instance)
        self._changed()

    def give_all(self, now: float, *, seconds: float) -> None:
        """Give away every slot that another process may hold, and take none, because this process is stalled."""
        self._stalled_until = now + seconds
        self._changed()

    def is_giving_all(self, now: float) -> bool:
        """Return True while :meth:`give_all` applies."""
        return now < self._stalled_until

    def leave(self) -> None:
        """Release each slot as soon as it is idle, because this process shuts down."""
        self._is_leaving = True
        self._changed()

    def unowned(self, now: float) -> list[Slot]:
        """Return the slots that have been free for 5 s by the views. Due rows of such a slot raise an alarm."""
        if now - self._cluster.at > LONGEST_VIEW_AGE:
            return []
        return [
            slot
            for slot in self._slots
            if slot not in self._held
            and self._cluster.free_for(slot, self._cluster.at) >= ALARM_AGE
            and not self._is_older_process_at_work(slot)
        ]

    def _changed(self) -> None:
        self._groups = self._steady = None

    def _current_groups(self) -> list[SlotGroup]:
        if self._groups is None:
            self._groups = lock_plan.groups_of(
                self._active, self._members_of, numbers=self._numbers, spreads_all=self._spreads_all
            )
        return self._groups

    def _members_of(self, name: str) -> frozenset[str]:
        return frozenset({self._me}) if self._takes_all else self._cluster.members_of(name)

    def _quotas(self, group: SlotGroup) -> tuple[Counter[str], Mapping[str, int]]:
        """Return how many slots of a group each process holds, and how many it should hold."""
        holders = [self._me if slot in self._held else self._cluster.holder_of(slot) for slot in group.slots]
        counts = Counter(holder for holder in holders if holder is not None)
        if not group.is_shared or len(group.members) == 1:
            return counts, {self._me: len(group.slots)}
        return counts, lock_plan.quotas(group.members, counts, len(group.slots), group.key)

    def _quota(self, group: SlotGroup) -> int:
        return self._quotas(group)[1][self._me]

    def _surplus(self, group: SlotGroup) -> int:
        return max(0, sum(slot in self._held for slot in group.slots) - self._quota(group))

    def _givers_of(self, group: SlotGroup, now: float) -> set[str]:
        """Return the holders that have only just exceeded their quotas."""
        counts, quotas = self._quotas(group)
        givers = [holder for holder, number in counts.items() if number > quotas.get(holder, 0) and holder != self._me]
        before, since = self._givers, {(group.key, holder): now for holder in givers}
        self._givers = {key: at for key, at in before.items() if key[0] != group.key}
        self._givers |= {key: before.get(key, at) for key, at in since.items()}
        return {holder for holder in givers if now - self._givers[group.key, holder] < LONGEST_SURPLUS}

    def _must_go(self, now: float) -> set[Slot]:
        """Return the held slots that this process must give away, however long their runs take."""
        if self._is_leaving:
            return set(self._held)
        must_go = set(self._held.difference(self._slots))
        for group in self._current_groups():
            if self._is_stalled_for(group, now):
                must_go |= self._held.intersection(group.slots)
        return must_go | {slot for slot in self._held if self._is_older_process_at_work(slot)}

    def _is_stalled_for(self, group: SlotGroup, now: float) -> bool:
        return self.is_giving_all(now) and len(group.members) > 1

    def _is_older_process_at_work(self, slot: Slot) -> bool:
        """Return True for a partition above 0 if the holder of partition 0 does not support partitions."""
        if slot.partition == 0:
            return False
        first = Slot(slot.handler_name)
        holder = self._cluster.holder_of(first)
        return first not in self._held and holder is not None and not self._cluster.knows_partitions(holder)

    def _may_try(self, slot: Slot) -> bool:
        """Return False if partition 0 has to be acquired first."""
        first = Slot(slot.handler_name)
        if slot.partition == 0 or first in self._held:
            return True
        lease = self._cluster.leases.get(first)
        if lease is None or not self._cluster.knows_partitions(lease.owner):
            return False
        return not lease.is_released or any(held.handler_name == slot.handler_name for held in self._held)

    def _take(self, group: SlotGroup, capacity: int, free: list[Slot], orphans: list[Slot], now: float) -> None:
        if not (self._takes_all or (self.is_shared and self._cluster.at > float("-inf"))):  # there is no view
            orphans += [] if group.is_shared else [slot for slot in group.slots if slot not in self._held]
            return
        lost = dict[str, list[Slot]]()
        for slot in lock_plan.in_preferred_order(group.slots, self._me):
            if slot in self._held or not self._may_try(slot):
                continue
            holder = self._cluster.holder_of(slot)
            if holder is not None:
                lost.setdefault(holder, []).append(slot)
            elif capacity > 0:
                free.append(slot)
                capacity -= 1
            elif self._cluster.free_for(slot, now) >= LEFT_OVER_AGE:
                free.append(slot)
        givers = self._givers_of(group, now)
        for holder, slots in lost.items():
            tried = slots[: self._number_to_try(holder, capacity, is_giver=holder in givers)]
            orphans += tried
            if self._cluster.is_gone(holder):
                capacity -= len(tried)

    def _number_to_try(self, holder: str, capacity: int, *, is_giver: bool) -> int | None:
        """Return how many slots of a holder to try; ``None`` for all.

        Either the holder is dead, or it has released the slot to another process. Trying the slot shows which. The
        slots of a dead process are divided by the quotas, like free slots.
        """
        if self._takes_all or holder == self._me:
            return None
        if is_giver or self._cluster.is_gone(holder) or self._cluster.is_giving(holder):
            self._is_unsettled = True
            return max(int(self._cluster.is_gone(holder)), capacity)
        is_probed = holder in self._probed
        self._probed.add(holder)
        return 0 if is_probed else 1

    def _give(self, group: SlotGroup, mine: Sequence[Slot], in_flight: Callable[[Slot], int], now: float) -> list[Slot]:
        surplus = self._surplus(group)
        self._is_unsettled |= surplus > 0  # busy slots, or an old view, only delay the surplus
        if any(self._beyond[slot][1] == group.members for slot in mine if slot in self._beyond):
            surplus = 0
        elif now - self._cluster.at > LONGEST_VIEW_AGE:
            surplus = min(surplus, self._giving.number(mine))
        return self._giving.give(mine, surplus, in_flight, now)
