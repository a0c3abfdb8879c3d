"""Which rows of ``instances`` count as members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

from outboxio.loops.loop import Signals
from outboxio.model.lock_name import Slot
from outboxio.runtime.membership import Member, Membership
from outboxio.runtime.partition_share import PartitionShare
from outboxio.storage.protocols import ClusterView, Instance, PartitionCount, SeenLease
from outboxio.support.clock import ShardClock

NOON = datetime(2026, 1, 1, 12)
HEARTBEAT = timedelta(seconds=5)


class WatchedShare(PartitionShare):
    def __init__(self) -> None:
        super().__init__("me", spreads_all=False)
        self.apply(("score",), {"score": PartitionCount("score", 4, 4, NOON)}, 0.0)
        self.seen: set[str] = set()

    def see(self, instances: Sequence[Instance], leases: Mapping[Slot, SeenLease], now: float) -> None:
        self.seen = {one.instance for one in instances}
        super().see(instances, leases, now)


class Repository:
    """The rows of ``instances``: name and date."""

    def __init__(self, **rows: datetime) -> None:
        self._rows = rows

    async def seen(self, namespace: str, instance: Instance) -> None: ...

    async def view(self, namespace: str, seen_since: datetime, leases: Sequence[str]) -> ClusterView:
        rows = [Instance(name, ("score",), date) for name, date in self._rows.items() if date > seen_since]
        return ClusterView(rows, {})


class Control:
    def is_stalled(self, now: float) -> bool:
        return False

    def locks_released(self) -> None: ...

    async def unowned(self, slots: Sequence[Slot]) -> None: ...


async def members(**rows: datetime) -> set[str]:
    share, repository, control = WatchedShare(), Repository(**rows), Control()
    parts: tuple[Any, ...] = (repository, share, ShardClock(lambda: NOON), Signals())
    member = Member("app", "me", [], HEARTBEAT.total_seconds(), is_woken=True)
    await Membership(member, *parts, control=cast(Any, control)).look_once()
    return share.seen


async def test_a_process_is_a_member_for_two_heartbeats() -> None:
    assert await members(alive=NOON - HEARTBEAT, dead=NOON - 3 * HEARTBEAT) == {"alive"}


async def test_a_dead_process_stays_out_after_a_backward_clock_change() -> None:
    slightly_ahead, set_back = NOON + HEARTBEAT, NOON + timedelta(hours=1)

    assert await members(alive=slightly_ahead, dead=set_back) == {"alive"}
