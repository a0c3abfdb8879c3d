"""Queries and operations on partitions and processes."""

from __future__ import annotations

from collections.abc import Sequence

from outboxio.errors import ConfigurationError
from outboxio.handlers.handler import Handler
from outboxio.handlers.options import OLDER_FOR, AnyPartitions
from outboxio.operations.arguments import handler_argument, partitions_argument
from outboxio.operations.base import AdminBase
from outboxio.operations.partitions.owners import (
    ClusterInstance,
    HandlerPartitions,
    find_instances,
    find_partitions,
)
from outboxio.operations.recorder import AdminShard, OperationRequest
from outboxio.storage.protocols import Database, counts_of
from outboxio.storage.tables.partitions import PartitionTables
from outboxio.support.log import log_of

logger = log_of(__name__)


class PartitionOperations(AdminBase):
    """A part of ``Admin``: partitions and processes."""

    async def partitions(
        self,
        handler: str | None = None,
        number: AnyPartitions | None = None,
        *,
        actor: str | None = None,
        reason: str | None = None,
        shard: str | None = None,
    ) -> Sequence[HandlerPartitions]:
        """Return the partitions of a handler, or of all handlers, with their owners; with ``number``, set it first.

        ``number``, 1 to 64, may be larger or smaller than the current count, and takes effect in all processes within
        about a second, without a restart. The order within a key is kept, and waiting notifications move to their new
        partitions. A count declared in code raises it again only if it is larger than all counts declared before, and
        never lowers it.

        ``"auto"`` lets outboxio choose again, starting from the current count: it raises the count while notifications
        are waiting, and lowers it to 1 after a day without waiting notifications. Any other number stays until it is
        changed.

        The result has an entry for each shard and stored name: the handler's name, and its aliases, under which
        notifications may still wait. ``number`` is set for all of these names.

        Raises :class:`UnknownHandler` for an unknown name, and :class:`ConfigurationError` for a number that the
        handler cannot have: outside of 1 to 64, more than its ``total_concurrency``, more than 1 with a
        ``Batch(schedule=...)``, more than 1 on SQLite, or an increase while a process with an older version of
        outboxio, without support for partitions, announced the handler within the last 2 minutes. The options of a
        handler are checked only in a process that has it. In all these cases nothing changes.

        Example::

            for one in await outbox.admin.partitions("score", 8):
                print(one.shard, one.handler_name, one.number, [owner.owner for owner in one.owners])
        """
        if handler is None:
            if number is not None:
                raise ConfigurationError(f"partitions(number={number!r}) names no handler: partitions('score', 8)")
            return await self._all_partitions(shard)
        handler, count = handler_argument(handler), None if number is None else partitions_argument(number)
        await self._known.refuse_unknown(handler, self._shards.databases(shard))
        if count is not None:
            requested = self._recorder.request("partitions", {"handler": handler, "number": count}, actor, reason)
            await self._set_partitions(requested, handler, count, shard)
        found: list[HandlerPartitions] = []
        for database in self._shards.databases(shard):
            names = await self._known.family_of(handler, database)
            found += await find_partitions(database, self._namespace, names)
        return found

    async def instances(self, *, shard: str | None = None) -> Sequence[ClusterInstance]:
        """Return the processes of the cluster with the partitions that they own, an entry for each shard.

        A process that has died is listed until another process has taken over its partitions, and for an hour after
        its last report; a process that shared handlers and died without a partition is listed for a day.

        Example::

            for instance in await outbox.admin.instances():
                print(instance.instance, instance.version, instance.last_seen_date, instance.is_alive)
        """
        found: list[ClusterInstance] = []
        for one in self._shards.chosen(shard):
            names = await self._known.subscribed_names(one.database)
            found += await find_instances(one.database, self._namespace, names, await one.now())
        return found

    async def _all_partitions(self, shard: str | None) -> Sequence[HandlerPartitions]:
        found: list[HandlerPartitions] = []
        for database in self._shards.databases(shard):
            names = await self._known.subscribed_names(database) | (await counts_of(database, self._namespace)).keys()
            found += await find_partitions(database, self._namespace, names)
        return found

    async def _set_partitions(
        self, requested: OperationRequest, handler: str, number: AnyPartitions, shard: str | None
    ) -> None:
        """Set the partition count on all chosen shards, unless a shard refuses it."""
        reached = self._shards.to_write(requested.call, shard)
        if (ours := self._handlers.find(handler)) is not None and number != "auto":
            _refuse_by_options(ours, number)
        changes = {one.database.name: await self._changes(one, handler, number) for one in reached}

        async def change(one: AdminShard) -> int:
            if names := changes[one.database.name]:
                repository = _repository(one.database)
                for name in names:
                    if number == "auto":
                        await repository.make_automatic(self._namespace, name, await one.now())
                    else:
                        await repository.set_number(self._namespace, name, number, await one.now())
                    logger.info("handler %r: partition count set to %r", name, number, handler=name, partitions=number)
                one.decisions_changed()
            return 0

        await self._recorder.carry_out(requested, shard, change)

    async def _changes(self, one: AdminShard, handler: str, number: AnyPartitions) -> list[str]:
        """Return the stored names whose count must change. Raises :class:`ConfigurationError` if it cannot."""
        database = one.database
        if database.partitions is None:
            if number != "auto" and number > 1:
                raise ConfigurationError(
                    f"shard {database.name!r} is {database.dialect}, which has a single writer: a handler has one "
                    f"partition there, not {number}; processes can share a handler on PostgreSQL, MySQL and MariaDB"
                )
            return []
        counts = await counts_of(database, self._namespace)
        names = await self._known.family_of(handler, database)
        if number == "auto":
            return sorted(name for name in names if name in counts and not counts[name].is_automatic)
        present = {name: counts[name].number if name in counts else 1 for name in names}
        if any(number > before for before in present.values()):
            older = await database.partitions.names_of_older_versions(self._namespace, await one.now() - OLDER_FOR)
            if announced := sorted(older & present.keys()):
                raise ConfigurationError(
                    f"handler {announced[0]!r} was announced within the last {OLDER_FOR.total_seconds() / 60:.0f} "
                    "minutes by a process with an older version of outboxio, which does not support partitions and "
                    "would take the whole handler: stop the older processes first"
                )
        return sorted(
            name
            for name, before in present.items()
            if before != number or (name in counts and counts[name].is_automatic)
        )


def _refuse_by_options(handler: Handler, number: int) -> None:
    total, batch = handler.options.total_concurrency, handler.options.batch
    if total is not None and number > total:
        raise ConfigurationError(
            f"handler {handler.name!r} has total_concurrency={total}, so with {number} partitions some of them would "
            f"never run: use {total} or fewer, or raise total_concurrency first ({handler.where})"
        )
    if number > 1 and batch is not None and batch.schedule is not None:
        raise ConfigurationError(
            f"handler {handler.name!r} has batch=Batch(schedule=...), which makes a single call: it must have one "
            f"partition, not {number} ({handler.where})"
        )


def _repository(database: Database) -> PartitionTables:
    assert database.partitions is not None
    return database.partitions
