"""The share of a process in the slots of a cluster: which slots to try, to give away, and to give back.

A pure state machine: no I/O, no clock. ``now`` is in seconds of the event loop's clock. ``lock_manager.py`` takes the
locks. The rules:

* **Below the quota** a process tries the slots that are free by the view, up to the quota.
* **Orphans**: each process tries one slot of each holder, whatever the quota, because the session of a process holds
  all its locks. The lock is free only if the holder died, or has just given the slot back to another process. If the
  holder died, the process tries all slots of the holder at once. A process at the quota leaves a holder above its
  quota alone for 1 s, because the holder is about to give.
* **Left over**: a slot that was given back is for the process below its quota. Only after 1 s each process tries.
* **Evidence**: the taker of an orphan knows that the former holder died (:meth:`PartitionShare.forget`). So the quotas
  are right at once, and not after two heartbeats.
* **Above the quota** a process gives the surplus away, idle slots first. A slot moves only when idle: the process
  starts no more rows of the slot, and waits at most 5 s for the runs in flight. A process that has just taken more
  than its quota gives none of the group away for 20 s, unless the members change: a member that died without evidence
  would let slots go to and fro.
* **Partition 0**: a process of a version without partitions reads the rows of all partitions under the lock of
  partition 0. So a process holds further partitions only while partition 0 is held by a process that knows partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from outboxio.model.lock_name import Slot
from outboxio.runtime import lock_plan
from outboxio.runtime.lock_plan import Giving, SeenCluster, SlotGroup
from outboxio.storage.protocols import Instance, PartitionCount, SeenLease, active_partitions, slots_of

#: The seconds in which a process that took more than its quota gives nothing away, while the members are the same.
REST_AFTER_SURPLUS = 20.0
#: The age in seconds at which a free slot is left over: each process takes the slot, whatever the quota.
LEFT_OVER_AGE = 1.0
#: The seconds in which a holder above its quota should have begun to give.
LONGEST_SURPLUS = 1.0
#: The seconds in which every process learns that a handler has more partitions. Until then no new slot is left over.
NEWS_DELAY = 1.0
#: The age in seconds at which a view is too old for giving slots away: two views at rest are missing.
LONGEST_VIEW_AGE = 11.0
#: The age in seconds at which a free slot is a reason for an alarm.
ALARM_AGE = 5.0


class Plan(Struct, frozen=True):
    """The next steps of a process. The order: ``halt``, ``resume``, ``release``, then the tries.

    After a slot was taken the next plan may contain more slots to try: a process without slots of a handler takes
    partition 0 first.
    """

    wanted: tuple[Slot, ...]
    """Free by the view, and to be tried now, in the order that this process prefers."""
    orphans: tuple[Slot, ...]
    """Not known to be free: held by another process, or the holder died. To be tried as well."""
    halt: tuple[Slot, ...]
    """To be given away: the process starts no more rows, and drops the rows that are ready."""
    resume: tuple[Slot, ...]
    """No longer to be given away: the process starts rows again."""
    release: tuple[Slot, ...]
    """Halted, by this plan or an earlier plan, and idle: the process gives the locks back now."""


class PartitionShare:
    """Decides for a process which slots to try, and which slots to give away.

    The runtime calls :meth:`heed` with the numbers of partitions, :meth:`see` with each view, and then :meth:`plan`,
    whose steps the runtime takes at once; :meth:`took` reports each lock that was taken::

        share = PartitionShare("host-1/4711", spreads_all=False)
        share.heed(["score"], {"score": PartitionCount("score", 16, 16, changed)}, now)
        share.see(view.instances, leases, now)
        plan = share.plan(held, in_flight, now)
    """

    def __init__(self, me: str, *, spreads_all: bool, takes_all: bool = False) -> None:
        """``me``: the owner in ``leases``. ``takes_all``: a drain, which takes all that is free and is no member."""
        self._me = me
        self._spreads_all = spreads_all and not takes_all
        self._takes_all = takes_all
        self._active: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._slots: tuple[Slot, ...] = ()
        self.is_shared = False
        """True if the process needs views. Otherwise each handler name is for the first process that takes the lock."""
        self._cluster = SeenCluster(me)
        self._giving = Giving(me)
        self._groups: list[SlotGroup] | None = None
        """``None`` after a change, until the next use."""
        self._held: frozenset[Slot] = frozenset()
        self._probed: set[str] = set()
        """The holders of which the present plan tries a slot."""
        self._is_unsettled = False
        """True if the present plan has a surplus, or tries slots that become free or whose holder is gone."""
        self._at_rest: Plan | None = None
        """The plan while nothing moves, which stays the same until something changes."""
        self._beyond: dict[Slot, tuple[float, frozenset[str]]] = {}
        """The slots that were taken beyond the quota: when, and among which members."""
        self._givers: dict[tuple[str, str], float] = {}
        """By group and holder: since when the holder has had more than its quota, by the views."""
        self._sick_until = float("-inf")
        self._is_leaving = False

    def heed(self, names: Collection[str], counts: Mapping[str, PartitionCount], now: float) -> None:
        """Take in the stored handler names of this process, and the numbers of partitions of the cluster."""
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
    def is_at_rest(self) -> bool:
        """True if the last plan moves no slot, and knows of no free slot."""
        return self._at_rest is not None

    @property
    def is_short(self) -> bool:
        """True if this process has fewer slots than its quota by the newest view: the next view is then due soon."""
        return not self._is_leaving and any(
            group.is_shared and sum(slot in self._held for slot in group.slots) < self._quota(group)
            for group in self._current_groups()
        )

    def names_for_others(self, now: float) -> tuple[str, ...]:
        """The handler names for which the other processes should count this process as a member.

        The runtime writes the names into the row of ``instances``. A process that is sick or leaves writes no names:
        so the quotas of the other processes rise, and the row still says that the process knows partitions.
        """
        is_away = self._is_leaving or self._takes_all or self.is_giving_all(now)
        return () if is_away else tuple(self._active)

    def see(self, instances: Sequence[Instance], leases: Mapping[Slot, SeenLease], now: float) -> None:
        """Take in the newest view. ``instances``: the processes that were seen within 2 heartbeats."""
        if self._cluster.take_in(instances, leases, self._slots, now):
            self._changed()

    def owner_of(self, slot: Slot, before_term: int) -> str | None:
        """The process that held a slot under a term, by the newest view.

        The taker of the next term knows that this process died, if the lock was not given back.
        """
        lease = self._cluster.leases.get(slot)
        is_evidence = lease is not None and lease.term == before_term and not lease.is_given_back
        return lease.owner if lease is not None and is_evidence and lease.owner != self._me else None

    def plan(self, held: Collection[Slot], in_flight: Callable[[Slot], int], now: float) -> Plan:
        """The next steps. ``in_flight``: the number of rows of a slot that were found and are not settled."""
        if frozenset(held) == self._held and self._at_rest is not None:
            return self._at_rest
        self._held, self._probed, self._is_unsettled, self._at_rest = frozenset(held), set(), False, None
        self._beyond = {
            slot: (since, members)
            for slot, (since, members) in self._beyond.items()
            if slot in self._held and now - since < REST_AFTER_SURPLUS
        }
        wanted, orphans = list[Slot](), list[Slot]()
        must_go = self._must_go(now)
        self._giving.begin(self._held, now)
        halt = self._giving.halt(must_go, now)
        for group in self._current_groups():
            mine = [slot for slot in group.slots if slot in self._held]
            halt += self._give(group, [slot for slot in mine if slot not in must_go], in_flight, now)
            if not self._is_leaving and not self._is_sick_for(group, now):
                self._take(group, self._quota(group) - len(mine), wanted, orphans, now)
        resume, release = self._giving.end(in_flight)
        for slot in release:
            self._cluster.given_back(slot, now)
        plan = Plan(*(tuple(slots) for slots in (wanted, orphans, halt, resume, release)))
        is_moving = wanted or halt or resume or release or self._is_unsettled or self._giving.goes_on or self._beyond
        is_ending = self._is_leaving or self.is_giving_all(now)
        if not (is_moving or is_ending or self._givers or self._cluster.has_free_slots):
            self._at_rest = plan
        return plan

    def took(self, slot: Slot, now: float, *, follows_crash: bool) -> None:
        """Report that this process has taken the lock of a slot. ``follows_crash``: the former holder died."""
        self._held |= {slot}
        self._at_rest = None
        group = next((group for group in self._current_groups() if slot in group.slots), None)
        holder = self._cluster.holder_of(slot)
        # The surplus goes at once if the holder is known to have died, because the quotas are right, and if the holder
        # had just given the slot to another process.
        if group is not None and self._surplus(group) > 0:
            is_left_over = holder is None and self._cluster.free_for(slot, now) >= LEFT_OVER_AGE
            if is_left_over or (follows_crash and holder in group.members):
                self._beyond[slot] = (now, group.members)
        self._cluster.taken(slot, follows_crash=follows_crash)

    def forget(self, instance: str) -> None:
        """A process is known to have died: the process is no member until seen again."""
        self._cluster.forget(instance)
        self._changed()

    def give_all(self, now: float, *, seconds: float) -> None:
        """This process is alive but sick. For so long the process gives away every slot that another process may hold,
        and takes none of these slots."""
        self._sick_until = now + seconds
        self._changed()

    def is_giving_all(self, now: float) -> bool:
        """True while this process is sick by :meth:`give_all`."""
        return now < self._sick_until

    def leave(self) -> None:
        """This process ends: from now on the process gives each slot back as soon as the slot is idle."""
        self._is_leaving = True
        self._changed()

    def unowned(self, now: float) -> list[Slot]:
        """The slots that have been free for 5 s by the views: due rows of such a slot are a reason for an alarm."""
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
        self._groups = self._at_rest = None

    def _current_groups(self) -> list[SlotGroup]:
        if self._groups is None:
            self._groups = lock_plan.groups_of(
                self._active, self._members_of, numbers=self._numbers, spreads_all=self._spreads_all
            )
        return self._groups

    def _members_of(self, name: str) -> frozenset[str]:
        return frozenset({self._me}) if self._takes_all else self._cluster.members_of(name)

    def _quotas(self, group: SlotGroup) -> tuple[Counter[str], Mapping[str, int]]:
        """The number of slots of a group that each process holds, and should hold."""
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
        """The holders that have had more than their quotas only for a moment."""
        counts, quotas = self._quotas(group)
        givers = [holder for holder, number in counts.items() if number > quotas.get(holder, 0) and holder != self._me]
        before, since = self._givers, {(group.key, holder): now for holder in givers}
        self._givers = {key: moment for key, moment in before.items() if key[0] != group.key}
        self._givers |= {key: before.get(key, moment) for key, moment in since.items()}
        return {holder for holder in givers if now - self._givers[group.key, holder] < LONGEST_SURPLUS}

    def _must_go(self, now: float) -> set[Slot]:
        """The held slots that this process must not keep, however long their runs take."""
        if self._is_leaving:
            return set(self._held)
        must_go = set(self._held.difference(self._slots))
        for group in self._current_groups():
            if self._is_sick_for(group, now):
                must_go |= self._held.intersection(group.slots)
        return must_go | {slot for slot in self._held if self._is_older_process_at_work(slot)}

    def _is_sick_for(self, group: SlotGroup, now: float) -> bool:
        return self.is_giving_all(now) and len(group.members) > 1

    def _is_older_process_at_work(self, slot: Slot) -> bool:
        """True for a partition above 0 if a process that knows no partitions holds partition 0."""
        if slot.partition == 0:
            return False
        first = Slot(slot.handler_name)
        holder = self._cluster.holder_of(first)
        return first not in self._held and holder is not None and not self._cluster.knows_partitions(holder)

    def _may_try(self, slot: Slot) -> bool:
        """True unless partition 0 comes first."""
        first = Slot(slot.handler_name)
        if slot.partition == 0 or first in self._held:
            return True
        lease = self._cluster.leases.get(first)
        if lease is None or not self._cluster.knows_partitions(lease.owner):
            return False
        return not lease.is_given_back or any(held.handler_name == slot.handler_name for held in self._held)

    def _take(self, group: SlotGroup, room: int, wanted: list[Slot], orphans: list[Slot], now: float) -> None:
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
            elif room > 0:
                wanted.append(slot)
                room -= 1
            elif self._cluster.free_for(slot, now) >= LEFT_OVER_AGE:
                wanted.append(slot)
        givers = self._givers_of(group, now)
        for holder, slots in lost.items():
            tried = slots[: self._number_to_try(holder, room, is_giver=holder in givers)]
            orphans += tried
            if self._cluster.is_gone(holder):
                room -= len(tried)

    def _number_to_try(self, holder: str, room: int, *, is_giver: bool) -> int | None:
        """How many slots of a holder to try; ``None``: all.

        The holder is dead, or the slot is on its way to another process. A taken slot tells which. The slots of a
        process that is gone are divided by the quotas, like free slots.
        """
        if self._takes_all or holder == self._me:
            return None
        if is_giver or self._cluster.is_gone(holder) or self._cluster.is_giving(holder):
            self._is_unsettled = True
            return max(int(self._cluster.is_gone(holder)), room)
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
