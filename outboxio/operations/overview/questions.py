"""The questions of an operator about the whole: the overview, handlers, locks, parked keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outboxio.model.lock_name import LockName
from outboxio.operations.arguments import given_handler
from outboxio.operations.base import AdminBase, AdminSetup
from outboxio.operations.overview.collector import HOUR, MOST_KEYS, Collector
from outboxio.operations.overview.facts import Facts
from outboxio.operations.overview.summary import overview_of
from outboxio.operations.overview.values import HandlerStatus, KeyStatus, LockStatus, Overview
from outboxio.operations.partitions.owners import counts_of, locks_of
from outboxio.operations.recorder import By
from outboxio.support import machine

FRESH = 1.0  # seconds for which an overview is used again


class OverviewReader:
    """Reads overviews. However many callers ask, the databases are asked once a second."""

    def __init__(self, setup: AdminSetup) -> None:
        self._namespace = setup.namespace
        self._collectors = [
            Collector(setup.namespace, one, setup.settings, setup.handlers, setup.redact)
            for one in setup.shards.values()
        ]
        self._last: Overview | None = None
        self._read_at = float("-inf")
        self._orders = 0
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def read(self) -> Overview:
        """The overview of the last second, or a new overview if an order of this process has ended since."""
        async with self._in_turn():
            if self._last is None or machine.monotonic() - self._read_at >= FRESH:
                began, orders = machine.monotonic(), self._orders
                shards = await asyncio.gather(*(collector.collect() for collector in self._collectors))
                took = machine.monotonic() - began
                self._last = overview_of(Facts(namespace=self._namespace, shards=shards, took=took))
                self._read_at = machine.monotonic() if orders == self._orders else float("-inf")
            return self._last

    def order_ended(self) -> None:
        """An order of this process has ended: the overview of the last second is out of date."""
        self._orders += 1
        self._read_at = float("-inf")

    def _in_turn(self) -> asyncio.Lock:
        """The lock of the running event loop: an outbox may be used in a new event loop after the former has ended."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = loop, asyncio.Lock()
        return self._turn[1]


class OverviewQuestions(AdminBase):
    """A part of ``Admin``."""

    def __init__(self, setup: AdminSetup, by: By, overviews: OverviewReader | None = None) -> None:
        self._overviews = overviews or OverviewReader(setup)
        super().__init__(setup, by, self._overviews.order_ended)

    async def overview(self) -> Overview:
        """The state of the outbox at a glance: figures, and what is wrong, in sentences, the worst first.

        The figures are bounded, so the overview may be polled; an overview is used again for 1 s, unless an order of
        this process has ended since. A shard that cannot
        be reached is a finding, and no error.

        Example::

            overview = await outbox.admin.overview()
            if overview.level != "ok":
                print("\\n".join(overview.verdict))
        """
        return await self._overviews.read()

    async def handlers(self) -> Sequence[HandlerStatus]:
        """The handlers of the namespace, the worst first: backlog, failures, holders. As in :meth:`overview`.

        Example::

            for handler in await outbox.admin.handlers():
                print(handler.handler_name, handler.due, handler.oldest_due, handler.fail_share)
        """
        return (await self._overviews.read()).handlers

    async def keys(
        self, handler: str | None = None, *, limit: int = MOST_KEYS, shard: str | None = None
    ) -> Sequence[KeyStatus]:
        """The parked ordering keys of a handler, or of all handlers, the longest parked first; at most ``limit``.

        Example::

            for key in await outbox.admin.keys("ledger"):
                print(key.ordering_key, key.since, key.blocked)
                await outbox.admin.retry([key.notification_id])
        """
        wanted = None if handler is None else given_handler(handler)
        found: list[KeyStatus] = []
        for database in self._shards.databases(shard):
            families = [await self._known.names_of(wanted, database)] if wanted is not None else [
                [name] for name in await database.probes.dead_names(self._namespace)
            ]  # fmt: skip
            for key in await database.probes.parked(self._namespace, families, limit) if families else ():
                found.append(KeyStatus(
                    handler_name=key.handler_name, ordering_key=key.ordering_key, notification_id=key.id,
                    event_id=key.event_id, since=key.since, blocked=key.blocked, shard=database.name,
                ))  # fmt: skip
        if wanted is not None and not found:
            await self._known.refuse_unknown(wanted, self._shards.databases(shard), among_rows=True)
        return sorted(found, key=lambda key: key.since)[:limit]

    async def locks(self, *, shard: str | None = None) -> Sequence[LockStatus]:
        """The cluster locks: fan-out of each shard, and each partition of each stored handler name.

        Example::

            for lock in await outbox.admin.locks():
                print(lock.role, lock.handler_name, lock.partition, lock.owner, lock.since)
        """
        found: list[LockStatus] = []
        for one in self._shards.chosen(shard):
            database, now = one.database, await one.now()
            counts = await counts_of(database, self._namespace)
            names = sorted(await self._known.subscribed_names(database) | counts.keys())
            locks = [LockName(self._namespace, "fanout"), *locks_of(self._namespace, names, counts)]
            holders = await database.subscriptions.holders(locks)
            reports = await database.reports.reports(self._namespace, now - HOUR)
            alive = {report.instance: report.is_alive(now) for report in reports}
            for lock in locks:
                holder = holders.get(lock)
                owner = None if holder is None or holder.has_given_back else holder.owner
                found.append(LockStatus(
                    shard=database.name, role="fanout" if lock.role == "fanout" else "dispatch",
                    handler_name=lock.handler_name or None, partition=lock.partition, owner=owner,
                    since=None if holder is None or owner is None else holder.since,
                    is_alive=None if owner is None else alive.get(owner),
                ))  # fmt: skip
        return found
