"""The questions and orders of an operator about partitions and processes."""

from __future__ import annotations

from collections.abc import Sequence

from outboxio.errors import ConfigurationError
from outboxio.handlers.handler import Handler
from outboxio.handlers.options import OLDER_FOR, AnyPartitions
from outboxio.operations.arguments import given_handler, given_partitions
from outboxio.operations.base import AdminBase
from outboxio.operations.partitions.owners import (
    ClusterInstance,
    HandlerPartitions,
    find_instances,
    find_partitions,
)
from outboxio.operations.recorder import AdminShard, Order
from outboxio.storage.protocols import Database, counts_of
from outboxio.storage.tables.partitions import PartitionTables
from outboxio.support.log import log_of

logger = log_of(__name__)


class PartitionOrders(AdminBase):
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
        """The partitions of a handler, or of all handlers, and their owners. With ``number``, set the number first.

        ``number``, 1 to 64, may be larger or smaller than the present number, and holds for all processes within about
        a second, without a restart. The order within a key does not change, and waiting notifications move to their new
        partitions. A number in code raises the number again only if the number in code is larger than all numbers that
        code declared before, and never lowers the number.

        ``"auto"`` leaves the number to outboxio again, which begins with the present number: it raises the number while
        notifications wait, and lowers the number to 1 after a day in which none waited. Any other number stands until
        then.

        The result has an entry for each shard and stored name: the handler's name, and the aliases, under which
        notifications may still wait. ``number`` is set for all of these names.

        Raises :class:`UnknownHandler` for an unknown name, and :class:`ConfigurationError` for a number that the
        handler cannot have: outside of 1 to 64, more than its ``total_concurrency``, more than 1 with a
        ``Batch(schedule=...)``, more than 1 on SQLite, or more than now while a process of an older version of
        outboxio, which knows no partitions, has announced the handler within 2 minutes. Only a process with the handler
        knows the handler's options. In all these cases no number changes.

        Example::

            for one in await outbox.admin.partitions("score", 8):
                print(one.shard, one.handler_name, one.number, [owner.owner for owner in one.owners])
        """
        if handler is None:
            if number is not None:
                raise ConfigurationError(f"partitions(number={number!r}) names no handler: partitions('score', 8)")
            return await self._all_partitions(shard)
        handler, wanted = given_handler(handler), None if number is None else given_partitions(number)
        await self._known.refuse_unknown(handler, self._shards.databases(shard))
        if wanted is not None:
            order = self._recorder.order("partitions", {"handler": handler, "number": wanted}, actor, reason)
            await self._set_partitions(order, handler, wanted, shard)
        found: list[HandlerPartitions] = []
        for database in self._shards.databases(shard):
            names = await self._known.family_of(handler, database)
            found += await find_partitions(database, self._namespace, names)
        return found

    async def instances(self, *, shard: str | None = None) -> Sequence[ClusterInstance]:
        """The processes of the cluster, each with the partitions that the process owns. One entry for each shard.

        A process that has died is listed until a second process has taken its partitions, and for an hour after its
        last report; a process that shared handlers and died without a partition is listed for a day.

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

    async def _set_partitions(self, order: Order, handler: str, number: AnyPartitions, shard: str | None) -> None:
        """Set the number on all chosen shards, unless a shard refuses the number."""
        reached = self._shards.to_write(order.call, shard)
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
                    logger.info("handler %r: partitions=%r from now on", name, number, handler=name, partitions=number)
                one.decisions_changed()
            return 0

        await self._recorder.carry_out(order, shard, change)

    async def _changes(self, one: AdminShard, handler: str, number: AnyPartitions) -> list[str]:
        """The stored names that have a different number now; :class:`ConfigurationError` if the number must stay."""
        database = one.database
        if database.partitions is None:
            if number != "auto" and number > 1:
                raise ConfigurationError(
                    f"shard {database.name!r} is {database.dialect}, which has one writer: a handler has a single "
                    f"partition there, not {number}; several processes share a handler on PostgreSQL, MySQL and MariaDB"
                )
            return []
        counts = await counts_of(database, self._namespace)
        names = await self._known.family_of(handler, database)
        if number == "auto":
            return sorted(name for name in names if name in counts and not counts[name].is_automatic)
        present = {name: counts[name].number if name in counts else 1 for name in names}
        if any(number > before for before in present.values()):
            older = await database.partitions.names_of_older(self._namespace, await one.now() - OLDER_FOR)
            if announced := sorted(older & present.keys()):
                raise ConfigurationError(
                    f"handler {announced[0]!r} was announced within {OLDER_FOR.total_seconds() / 60:.0f} minutes by a "
                    "process of an older version of outboxio, which knows no partitions and takes the whole handler: "
                    "stop the older processes first"
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
            f"handler {handler.name!r} has total_concurrency={total}, so with {number} partitions some partitions "
            f"would never run: ask for {total} or fewer, or raise total_concurrency first ({handler.where})"
        )
    if number > 1 and batch is not None and batch.schedule is not None:
        raise ConfigurationError(
            f"handler {handler.name!r} has batch=Batch(schedule=...), and a report is one call: it has a single "
            f"partition, not {number} ({handler.where})"
        )


def _repository(database: Database) -> PartitionTables:
    assert database.partitions is not None
    return database.partitions
