"""Queries about the whole outbox: the overview, handlers, locks, parked keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from outboxio.health.collector import HOUR, MAX_KEYS
from outboxio.health.reasons import Reason, waiting_in
from outboxio.health.values import HandlerStatus, KeyStatus, LockStatus, Overview
from outboxio.model.lock_name import LockName
from outboxio.operations.arguments import handler_argument, unknown_namespace
from outboxio.operations.base import AdminBase
from outboxio.operations.partitions.owners import locks_of
from outboxio.storage.protocols import Database, counts_of
from outboxio.storage.protocols.values import Holder

PATIENCE = 2.0  # seconds

_NO_BOUND = 2**31 - 1


class OverviewQueries(AdminBase):
    """A part of ``Admin``."""

    async def overview(self) -> Overview:
        """Return the state of the outbox: figures, and findings with the worst first.

        Queries are bounded and an overview is reused for 1 s (unless an operation of this process has ended since), so
        it may be polled. An unreachable shard is a finding, not an error.

        Example::

            overview = await outbox.admin.overview()
            if overview.level != "ok":
                print("\\n".join(overview.verdict))
        """
        return (await self._setup.overviews.read())[1]

    async def waiting(self, handler: str | None = None, *, shard: str | None = None) -> dict[str, int]:
        """Return the number of unfinished notifications for each reason why they have not run.

        Every unfinished notification has exactly one reason. The sum is exact while no notification changes. The
        reasons are those of :class:`~outboxio.health.reasons.Reason`: ``queued`` (due, or running now), ``retry``,
        ``delayed``, ``schedule``, ``batch``, ``blocked``, ``version``, ``no_handler``, ``no_owner``, ``paused``,
        ``unavailable``, ``rate``, ``concurrency``.

        Counts all unfinished notifications; :meth:`overview` counts up to 10,000 of each handler. Raises
        :class:`UnknownHandler` for an unknown name.

        Example::

            waiting = await outbox.admin.waiting("invoice-pdf")
            print({reason: number for reason, number in waiting.items() if number})  # {"retry": 3, "paused": 40}
        """
        name = None if handler is None else handler_argument(handler)
        counts = Counter[Reason](dict.fromkeys(Reason, 0))
        for one in self._shards.chosen(shard):
            names = None if name is None else await self._known.names_of(name, one.database)
            collector = self._setup.overviews.collectors[one.database.name]
            facts = await collector.rows_and_locks(await one.now(), most=_NO_BOUND, names=names)
            for by_reason in waiting_in(facts).values():
                counts.update(by_reason)
        if name is not None and not counts.total():
            await self._known.refuse_unknown(name, self._shards.databases(shard), among_rows=True)
        return {reason.value: number for reason, number in counts.items()}

    async def handlers(self) -> Sequence[HandlerStatus]:
        """Return the handlers of the namespace, worst first: backlog, failures, owners. Cached like :meth:`overview`.

        Example::

            for handler in await outbox.admin.handlers():
                print(handler.handler_name, handler.due, handler.oldest_due, handler.fail_share)
        """
        return (await self.overview()).handlers

    async def keys(
        self, handler: str | None = None, *, limit: int = MAX_KEYS, shard: str | None = None
    ) -> Sequence[KeyStatus]:
        """Return the parked ordering keys of one or all handlers, the longest parked first; at most ``limit``.

        Example::

            for key in await outbox.admin.keys("ledger"):
                print(key.ordering_key, key.since, key.blocked)
                await outbox.admin.retry([key.notification_id])
        """
        name = None if handler is None else handler_argument(handler)
        found: list[KeyStatus] = []
        for database in self._shards.databases(shard):
            families = [await self._known.names_of(name, database)] if name is not None else [
                [dead] for dead in await database.probes.dead_names(self._namespace)
            ]  # fmt: skip
            for key in await database.probes.parked(self._namespace, families, limit) if families else ():
                found.append(KeyStatus(
                    handler_name=key.handler_name, ordering_key=key.ordering_key, notification_id=key.id,
                    event_id=key.event_id, since=key.since, blocked=key.blocked, shard=database.name,
                ))  # fmt: skip
        if name is not None and not found:
            await self._known.refuse_unknown(name, self._shards.databases(shard), among_rows=True)
        return sorted(found, key=lambda key: key.since)[:limit]

    async def namespaces(self) -> Sequence[str]:
        """Return the namespaces in this outbox's databases: those with handlers, jobs, processes or waiting events.

        The namespace of this outbox is among them if one of its processes has ever run.

        Example::

            if outbox.namespace not in await outbox.admin.namespaces():
                print("nothing has been written yet")
        """
        found, own = set[str](), LockName(self._namespace, "fanout")
        for database in self._shards.databases(None):
            found |= set(await database.subscriptions.namespaces())
            if self._namespace not in found and await database.subscriptions.start_dates([own]):
                found.add(self._namespace)
        return sorted(found)

    async def unknown_namespace(self) -> str | None:
        """Return why the namespace of this outbox is probably mistyped: others have rows, and this one has none.

        ``None`` if the process has handlers of the namespace, if a process has ever run, or if there are no rows at
        all. Also ``None`` if a database does not respond within 2 s: the next query reports the problem.

        Example::

            outbox = Outbox(url, namespace="bookngs")
            print(await outbox.admin.unknown_namespace())  # no such namespace 'bookngs'; there are: 'bookings'
        """
        if self._handlers.names:
            return None
        try:
            async with asyncio.timeout(PATIENCE):
                return unknown_namespace(self._namespace, await self.namespaces())
        except Exception:
            return None

    async def locks(self, *, shard: str | None = None) -> Sequence[LockStatus]:
        """Return the cluster locks: fan-out of each shard, the jobs, and each partition of each stored handler name.

        Example::

            for lock in await outbox.admin.locks():
                print(lock.role, lock.handler_name, lock.partition, lock.owner, lock.since)
        """
        found: list[LockStatus] = []
        for one in self._shards.chosen(shard):
            database, now = one.database, await one.now()
            counts = await counts_of(database, self._namespace)
            names = sorted(await self._known.subscribed_names(database) | counts.keys())
            fanout, *dispatch = LockName(self._namespace, "fanout"), *locks_of(self._namespace, names, counts)
            holders = await database.subscriptions.holders([fanout, *dispatch])
            reports = await database.reports.reports(self._namespace, now - HOUR)
            alive = {report.instance: report.is_alive(now) for report in reports}
            found.append(_status(database.name, fanout, holders.get(fanout), alive))
            found += await self._locks_of_jobs(database, alive)
            found += [_status(database.name, lock, holders.get(lock), alive) for lock in dispatch]
        return found

    async def _locks_of_jobs(self, database: Database, alive: Mapping[str, bool]) -> list[LockStatus]:
        """Return the locks of jobs that a process holds, or a free lock if there are jobs and no process holds one.

        Processes with different jobs have different locks. A lock of jobs that were removed has no living holder.
        """
        own, holders = LockName(self._namespace, "jobs"), await database.subscriptions.job_holders(self._namespace)
        held = [_status(database.name, own, holder, alive, name) for name, holder in holders.items()]
        held = [lock for lock in held if lock.owner is not None]
        living = [lock for lock in held if lock.is_alive is not False]
        if held or not await database.jobs.all(self._namespace, errors=False):
            return living or held
        return [_status(database.name, own, None, alive)]


def _status(
    shard: str, lock: LockName, holder: Holder | None, alive: Mapping[str, bool], name: str | None = None
) -> LockStatus:
    owner = None if holder is None or holder.is_released else holder.owner
    return LockStatus(
        shard=shard, name=name or lock.lease, role=cast(Any, lock.role), handler_name=lock.handler_name or None,
        partition=lock.partition, owner=owner, since=None if holder is None or owner is None else holder.since,
        is_alive=None if owner is None else alive.get(owner),
    )  # fmt: skip
