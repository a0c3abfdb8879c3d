"""The ``event_notifications`` table on MySQL and MariaDB: find and settle, and the orders of operators."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from outboxio.model.notification import DueQuery, Notification
from outboxio.model.outcome import Bucket
from outboxio.storage.left_alone import LeftAlone
from outboxio.storage.mysql.connection import LoopConnection, execute, fetch, run
from outboxio.storage.mysql.due_rows import (
    FEW_OF_SLOTS,
    FIND_DUE,
    FIND_FEW,
    FIND_LARGE,
    as_notifications,
    branch_args,
    few_of_slots,
    first_of_slots,
    from_columns,
    of_slots,
)
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.mysql.insertion import insert_events
from outboxio.storage.mysql.settlement import settlement

FEW = 100  # due rows at most that come as a text each, on MariaDB
MANY_FOR = 1.0  # seconds after a read of more than FEW rows, during which all rows come as a single text
READS_BY_COLUMN = 50  # reads column by column, after a read that did not fit into a single text


class MysqlNotifications:
    def __init__(self, find: LoopConnection, settle: LoopConnection, server: Server) -> None:
        self._find = find
        self._settle = settle
        self._server = server
        self._left_alone = LeftAlone()
        self._reads_by_column = 0
        """How many of the next reads are column by column."""
        self._many_until = float("-inf")
        self._has_many = False
        """True if the last read of partitions has found many rows."""

    @property
    def can_settle(self) -> bool:
        return self._settle.is_open

    async def find_due(self, namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> Sequence[Notification]:
        # The outcomes of the rows will need the connection for settling, and by then a given pool may be exhausted.
        await self._settle.ready()
        if not self._reads_by_column:
            read = self._find_of_slots if any(w.partition for w in wanted) else self._find_of_names
            found = await read(namespace, now, wanted)
            if found is not None:
                return found
            self._reads_by_column = READS_BY_COLUMN
        self._reads_by_column -= 1
        args = branch_args(namespace, now, wanted)
        return from_columns(await self._find.fetch_all(FIND_LARGE, len(wanted), args), self._left_alone)

    async def _find_of_names(
        self, namespace: str, now: datetime, wanted: Sequence[DueQuery]
    ) -> Sequence[Notification] | None:
        """Read slots of few handlers without partitions; ``None`` if the rows do not fit into the answer."""
        moment = asyncio.get_running_loop().time()
        few = self._server.flavour.aggregates_in_files and moment >= self._many_until
        args = branch_args(namespace, now, wanted)
        found = as_notifications(await self._find.fetch_all(FIND_FEW if few else FIND_DUE, len(wanted), args))
        if found is not None and len(found) > FEW:
            self._many_until = moment + MANY_FOR
        return found

    async def _find_of_slots(
        self, namespace: str, now: datetime, wanted: Sequence[DueQuery]
    ) -> Sequence[Notification] | None:
        """The same for partitions, of which a process may own many."""
        if not self._has_many:
            sql, args = few_of_slots(namespace, now, wanted)
            found = as_notifications(await self._find.use(lambda connection: fetch(connection, sql, args)))
            if found is None or len(found) <= FEW_OF_SLOTS:
                return None if found is None else first_of_slots(found, wanted)
        sql, args = of_slots(namespace, now, wanted)
        found = as_notifications(await self._find.use(lambda connection: fetch(connection, sql, args)))
        self._has_many = found is not None and len(found) > FEW_OF_SLOTS
        return None if found is None else first_of_slots(found, wanted)

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        statement, args = settlement(bucket, now, self._server)
        async with self._settle.opened() as connection:
            return int((await run(connection, statement, args)).rowcount)

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        async def insert_and_settle(connection: Any) -> int:
            # The UPDATE of the outcomes goes last, because the UPDATE locks leases.
            for action, events in bucket.emitted:
                await insert_events(connection, action, events, self._server)
            settled = await execute(connection, *settlement(bucket, now, self._server))
            if settled < len(bucket.outcomes):
                raise _Refused
            return settled

        try:
            return int(await self._settle.in_transaction(insert_and_settle))
        except _Refused:
            return 0


class _Refused(Exception):
    """The fence refused a part of a bucket: the whole transaction is rolled back."""
