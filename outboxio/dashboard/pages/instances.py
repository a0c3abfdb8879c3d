"""The processes of the outbox, and the locks that they hold."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS
from outboxio.dashboard.pages.handlers import links_of, overview_for
from outboxio.dashboard.view import View
from outboxio.operations.overview.values import Finding, InstanceStatus, LockStatus
from outboxio.operations.partitions.owners import in_ranges

_RULES = ("no_instance", "lock_without_holder", "stuck_runs", "partition_unowned", "clock_off")


class LockRow(Struct, frozen=True, kw_only=True):
    """The locks of a handler, or of fan-out, that a process holds, or that no process holds."""

    shard: str
    handler_name: str | None
    """``None`` for the lock of fan-out."""
    partitions: str
    """The numbers of the partitions: ``0-3, 7``. Empty for fan-out, and for a handler with a single partition."""
    owner: str | None
    since: datetime | None
    """The moment at which the first of these locks was taken."""
    is_alive: bool | None
    """True if the owner has reported within three delays; ``None`` without a report, or without an owner."""


class InstancesFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    instances: tuple[InstanceStatus, ...]
    locks: list[LockRow]
    findings: tuple[Finding, ...]
    """What is wrong with processes and locks."""


async def instances(asked: Asked) -> View:
    """The processes by their own reports, and who holds which lock."""
    refuse_unknown_words(asked.query, OTHER_WORDS)
    overview = await overview_for(asked)
    facts = InstancesFacts(
        instances=overview.instances,
        locks=_rows(await asked.admin.locks(shard=asked.shard)),
        findings=tuple(finding for finding in overview.findings if finding.rule in _RULES),
    )
    return View(
        template="instances.html",
        title="Instances and locks",
        facts=facts,
        shown={"links": links_of(facts.findings, asked)},
    )


def _rows(locks: Iterable[LockStatus]) -> list[LockRow]:
    """The locks, one row for all partitions of a handler with the same owner. Locks without an owner come first."""
    found: dict[tuple[str, str | None, str | None], list[LockStatus]] = {}
    parted: set[tuple[str, str | None]] = set()
    for lock in locks:
        if lock.partition:
            parted.add((lock.shard, lock.handler_name))
        found.setdefault((lock.shard, lock.handler_name, lock.owner), []).append(lock)
    rows = [
        LockRow(
            shard=shard, handler_name=name,
            partitions=in_ranges(lock.partition for lock in each) if (shard, name) in parted else "", owner=owner,
            since=min((lock.since for lock in each if lock.since is not None), default=None), is_alive=each[0].is_alive,
        )
        for (shard, name, owner), each in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row.handler_name is not None, row.owner is not None, row.handler_name or ""))
