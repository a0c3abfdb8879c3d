"""The cluster as a process sees the cluster: the newest view, and the part of earlier views that the rules need."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from outboxio.model.lock_name import Slot
from outboxio.storage.protocols import Instance, SeenLease

#: The seconds in which a slot that this process gave back may still look held by this process.
LONGEST_RELEASE = 1.0

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
    ) -> None:
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
