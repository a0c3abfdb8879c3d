"""The owners of partitions, for operators, read from ``leases``, ``handler_partitions`` and the process tables.

``instances`` lists the processes that share handlers, and ``instance_reports`` all processes in ``running()``.

Only a cluster lock proves ownership. ``leases`` names the process that acquired a lock last: a process that died is
shown as the owner until the takeover, which takes a quarter of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal

from msgspec import Struct

from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import Database, Holder, PartitionCount, active_partitions, counts_of, slots_of

EVER = datetime(2000, 1, 1)


class PartitionOwner(Struct, frozen=True, kw_only=True):
    """A partition of a handler name, and the process that owns it. ``since`` is naive UTC."""

    partition: int
    owner: str | None
    """The process: host name, process id and a random part. ``None`` if no process owns the partition."""
    since: datetime | None


class HandlerPartitions(Struct, frozen=True, kw_only=True):
    """The partitions of a stored handler name on a shard, and their owners.

    ``number``: the partition count for new notifications. ``active``: partitions below this number may have unfinished
    notifications; it is larger than ``number`` for a while after the count was lowered. ``declared``: the largest
    count that code has declared; an operator may have set a different one.

    ``source``: who set ``number``, at ``changed_date`` (naive UTC): ``"automatic"`` for outboxio itself, depending on
    the load, ``"operator"``, or ``"code"``. ``None`` for the single partition that every handler starts with.
    """

    handler_name: str
    shard: str
    number: int
    active: int
    declared: int
    owners: tuple[PartitionOwner, ...]
    """The partitions from 0 to ``active - 1``."""
    source: Literal["automatic", "operator", "code"] | None = None
    changed_date: datetime | None = None

    @property
    def why(self) -> str:
        """Why the partition count has its current value."""
        if self.source is None or self.changed_date is None:
            return "not shared"
        at = f"{self.changed_date:%Y-%m-%d %H:%M} UTC"
        if self.source == "automatic":
            return f"automatic: notifications waited at {at}" if self.number > 1 else f"automatic: lowered at {at}"
        return f"set by an operator at {at}" if self.source == "operator" else "set in code"

    @property
    def by_owner(self) -> Mapping[str | None, tuple[int, ...]]:
        """The partitions of each process; under ``None``, those that no process owns."""
        owned: dict[str | None, list[int]] = {}
        for one in self.owners:
            owned.setdefault(one.owner, []).append(one.partition)
        return {owner: tuple(partitions) for owner, partitions in owned.items()}

    def __str__(self) -> str:
        owned = "; ".join(f"{owner or 'no process'} owns {in_ranges(each)}" for owner, each in self.by_owner.items())
        beyond = f" ({self.active} still active)" if self.active > self.number else ""
        why = "" if self.source is None else f", {self.why}"
        return f"handler {self.handler_name!r} has {_counted(self.number)}{beyond}{why}: {owned}"


class ClusterInstance(Struct, frozen=True, kw_only=True):
    """A process of the cluster, as seen by a shard, with the partitions that it owns.

    - ``last_seen_date`` (naive UTC): the last report. Every process in ``running()`` reports, and a process that
      shares handlers also updates its row in ``instances``. ``None`` without a report: the process is in ``drain()``,
      or has just started.
    - ``version``: of outboxio; ``None`` without a report.
    - ``is_alive``: False if three reports are missing; ``None`` without a report.
    - ``partitions``: the owned partitions by stored handler name.
    """

    instance: str
    shard: str
    last_seen_date: datetime | None
    fans_out: bool
    partitions: dict[str, tuple[int, ...]]
    version: str | None = None
    is_alive: bool | None = None

    def __str__(self) -> str:
        owned = [f"{name!r} {in_ranges(numbers)}" for name, numbers in self.partitions.items()]
        does = [*["fan-out"] * self.fans_out, *owned]
        version = "" if self.version is None else f", version {self.version}"
        seen = "" if self.last_seen_date is None else f", seen at {self.last_seen_date:%Y-%m-%d %H:%M:%S} UTC"
        unresponsive = ", unresponsive since" if self.is_alive is False else ""
        return f"{self.instance} owns {', '.join(does) or 'no partition'}{version}{seen}{unresponsive}"


async def find_partitions(database: Database, namespace: str, names: Iterable[str]) -> list[HandlerPartitions]:
    """Return the partitions of these stored handler names, and their owners."""
    counts = await counts_of(database, namespace)
    ordered = sorted(names)
    holders = await database.subscriptions.holders(locks_of(namespace, ordered, counts))
    return [_partitions(database.name, namespace, name, counts, holders) for name in ordered]


async def find_instances(
    database: Database, namespace: str, names: Iterable[str], now: datetime
) -> list[ClusterInstance]:
    """Return the processes that have reported or own a lock. ``names``: all stored handler names."""
    fanout = LockName(namespace, "fanout")
    counts = await counts_of(database, namespace)
    holders = await database.subscriptions.holders([fanout, *locks_of(namespace, sorted({*names, *counts}), counts)])
    owned: dict[str, list[LockName]] = {}
    for lock, holder in sorted(holders.items()):
        if not holder.is_released:
            owned.setdefault(holder.owner, []).append(lock)
    reports = {report.instance: report for report in await database.reports.reports(namespace, EVER)}
    seen = {report.instance: report.last_seen_date for report in reports.values()}
    if database.partitions is not None:
        for one in (await database.partitions.view(namespace, EVER, [])).instances:
            seen[one.instance] = max(one.last_seen_date, seen.get(one.instance, EVER))
    return [
        ClusterInstance(
            instance=instance,
            shard=database.name,
            last_seen_date=seen.get(instance),
            fans_out=fanout in owned.get(instance, ()),
            partitions=_by_name(lock for lock in owned.get(instance, ()) if lock != fanout),
            version=None if (report := reports.get(instance)) is None else report.version,
            is_alive=None if report is None else report.is_alive(now),
        )
        for instance in sorted({*seen, *owned})
    ]


def in_ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: ``0-3, 7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def locks_of(namespace: str, names: Sequence[str], counts: Mapping[str, PartitionCount]) -> list[LockName]:
    """Return the locks of all partitions of stored handler names."""
    return [LockName(namespace, "dispatch", *slot) for slot in slots_of(counts, names)]


def _partitions(
    shard: str, namespace: str, name: str, counts: Mapping[str, PartitionCount], holders: Mapping[LockName, Holder]
) -> HandlerPartitions:
    count, active = counts.get(name), active_partitions(counts, name)
    number, declared = (1, 1) if count is None else (count.number, count.declared)

    def owner(partition: int) -> PartitionOwner:
        holder = holders.get(LockName(namespace, "dispatch", name, partition))
        if holder is None or holder.is_released:
            return PartitionOwner(partition=partition, owner=None, since=None)
        return PartitionOwner(partition=partition, owner=holder.owner, since=holder.since)

    return HandlerPartitions(
        handler_name=name, shard=shard, number=number, active=active, declared=declared,
        owners=tuple(map(owner, range(active))), source=_source(count),
        changed_date=None if count is None else count.changed_date,
    )  # fmt: skip


def _source(count: PartitionCount | None) -> Literal["automatic", "operator", "code"] | None:
    if count is None:
        return None
    if count.is_automatic:
        return "automatic"
    return "code" if count.number == count.declared > 1 else "operator"


def _by_name(locks: Iterable[LockName]) -> dict[str, tuple[int, ...]]:
    owned: dict[str, list[int]] = {}
    for lock in locks:
        owned.setdefault(lock.handler_name, []).append(lock.partition)
    return {name: tuple(numbers) for name, numbers in owned.items()}


def _counted(number: int) -> str:
    return "1 partition" if number == 1 else f"{number} partitions"
