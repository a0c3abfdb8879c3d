"""The ``event_notifications`` table on MySQL and MariaDB: find and settle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any
from uuid import UUID

import msgspec

from outboxio.model.notification import NO_CONTEXT, Context, DueQuery, Notification, checked
from outboxio.model.outcome import Bucket
from outboxio.storage.mysql.columns import (
    BY_DUE,
    BY_ID,
    CONTEXT_COLUMNS,
    CONTEXT_DATES,
    DUE_COLUMNS,
    as_json_value,
    selected,
)
from outboxio.storage.mysql.connection import Arguments, LoopConnection, execute, fetch, id_list, run
from outboxio.storage.mysql.flavour import Server, Statement, for_flavours
from outboxio.storage.mysql.insertion import insert_events
from outboxio.storage.mysql.values import as_json, as_timestamp
from outboxio.storage.undispatchable import UndispatchableRows

# --- due rows --------------------------------------------------------------------------------------
#
# The statements that read due rows, and the conversion of rows to :class:`Notification`.
#
# All rows of a slot are returned as one JSON text with the number of rows, because decoding a row takes the driver
# longer than everything else. There are two exceptions:
#
# * few rows on MariaDB are returned as one text each, because an aggregate needs an on-disk table, which takes 1.5 ms;
# * rows that together exceed ``max_allowed_packet`` are returned as columns (``FIND_LARGE``).
#
# The text of a row is built with CONCAT (decision 13), which takes half as long as the server's JSON functions.

# One branch of UNION ALL for each slot, which scans the index from the slot's scan position. The position is written
# with OR, for which the server reads two ranges of the index; it cannot use a range for a comparison of pairs. The rows
# are not locked, because this process holds the cluster lock of the slot (decision 2).
_DUE = f"""
FROM {BY_DUE}
WHERE n.namespace = %s AND n.is_unfinished = TRUE AND n.handler_name = %s AND n.partition_number = %s
  AND (n.next_retry_at = %s AND n.sequence > %s OR n.next_retry_at > %s) AND n.next_retry_at <= %s
ORDER BY n.next_retry_at, n.sequence LIMIT %s
"""
_COLUMNS, _CONTEXT = (", ',', ".join(map(as_json_value, columns)) for columns in (DUE_COLUMNS, CONTEXT_COLUMNS))
DOCUMENT = f"CONCAT('[', {_COLUMNS}, ',[', {_CONTEXT}, ']]')"
AS_ONE = "SELECT COUNT(*), CONCAT('[', GROUP_CONCAT(d.document), ']')"
FIND_FEW = f"(SELECT {DOCUMENT} AS document {_DUE})"
FIND_DUE = f"({AS_ONE} FROM {FIND_FEW} d)"
FIND_LARGE = f"(SELECT {', '.join(map(selected, (*DUE_COLUMNS, *CONTEXT_COLUMNS)))} {_DUE})"

# A process may own 64 partitions of each handler, and planning that many of the branches above takes 20 ms. So
# partitions are read with two cheaper statements:
# * All ranges of all slots in one index scan, which is enough for up to FEW_OF_SLOTS rows.
# * Otherwise, branches that only read ids from the index, and then the rows by id: a quarter of the planning time.
FEW_OF_SLOTS = 64
_OF_SLOT = """n.handler_name = %s AND n.partition_number = %s
  AND (n.next_retry_at = %s AND n.sequence > %s OR n.next_retry_at > %s) AND n.next_retry_at <= %s"""
FIND_FEW_OF_SLOTS = f"""
SELECT {DOCUMENT} FROM {BY_DUE} WHERE n.namespace = %s AND n.is_unfinished = TRUE AND ({{slots}})
LIMIT {FEW_OF_SLOTS + 1}
"""
_IDS_OF_SLOT = f"(SELECT n.id {_DUE})"
FIND_OF_SLOTS = f"""
SELECT COUNT(*), CONCAT('[', GROUP_CONCAT({DOCUMENT}), ']') FROM ({{slots}}) f STRAIGHT_JOIN {BY_ID} ON n.id = f.id
"""


class _Due(Notification, array_like=True, gc=False):
    """A due row, in the format of ``DOCUMENT``."""

    payload: msgspec.Raw
    raw_context: msgspec.Raw


_decode_due = msgspec.json.Decoder(list[_Due]).decode


def few_of_slots(namespace: str, now: datetime, queries: Sequence[DueQuery]) -> tuple[str, tuple[Any, ...]]:
    """Return the statement that reads a few due rows of many slots, without their limits, and its arguments."""
    slots = FIND_FEW_OF_SLOTS.format(slots=" OR ".join([_OF_SLOT] * len(queries)))
    positions = ((q.handler_name, q.partition, *q.after, q.after[0], now) for q in queries)
    return slots, (namespace, *chain.from_iterable(positions))


def of_slots(namespace: str, now: datetime, queries: Sequence[DueQuery]) -> tuple[str, tuple[Any, ...]]:
    """Return the statement that reads many due rows of many slots, and its arguments."""
    slots = FIND_OF_SLOTS.format(slots=" UNION ALL ".join([_IDS_OF_SLOT] * len(queries)))
    return slots, branch_args(namespace, now, queries)


def branch_args(namespace: str, now: datetime, queries: Sequence[DueQuery]) -> tuple[Any, ...]:
    """Return the arguments of a statement with a branch for each slot."""
    args: list[Any] = []
    for q in queries:
        args += (namespace, q.handler_name, q.partition, q.after[0], q.after[1], q.after[0], now, q.limit)
    return tuple(args)


def first_of_slots(rows: Sequence[Notification], queries: Sequence[DueQuery]) -> list[Notification]:
    """Return the rows in order, up to the limit of each slot."""
    remaining = {(q.handler_name, q.partition): q.limit for q in queries}
    first: list[Notification] = []
    for row in sorted(rows, key=lambda row: (row.next_retry_us, row.sequence)):
        slot = (row.handler_name, row.partition_number)
        if remaining[slot]:
            remaining[slot] -= 1
            first.append(row)
    return first


def as_notifications(found: Sequence[tuple[Any, ...]]) -> list[Notification] | None:
    """Decode notifications from texts with one row each, or from texts with many rows and their number.

    ``None`` if the server has truncated a text.
    """
    if found and len(found[0]) == 1:
        texts = [text for (text,) in found]
        found = [(len(texts), None if None in texts else f"[{','.join(texts)}]")]
    rows: list[Notification] = []
    for number, text in found:
        if number:
            try:
                decoded = _decode_due(text or "")
            except msgspec.DecodeError:
                return None
            if len(decoded) != number:
                return None
            rows += decoded
    return rows


def from_columns(rows: Iterable[Sequence[Any]], undispatchable: UndispatchableRows) -> list[Notification]:
    """Convert rows of ``FIND_LARGE`` to notifications. Rows with a malformed id go to ``undispatchable``."""
    found: list[Notification] = []
    for row in rows:
        values: dict[str, Any] = dict(zip((*DUE_COLUMNS, *CONTEXT_COLUMNS), row, strict=True))
        context = _context(values)
        due = {column: values[column] for column in DUE_COLUMNS}
        try:
            due["id"] = UUID(due["id"])
        except ValueError:
            undispatchable.add(due["id"], due["handler_name"])
        else:
            found.append(checked(Notification(**due, raw_context=context)))
    return found


def _context(values: Mapping[str, Any]) -> Context | bytes:
    """Build the context from the columns of a row. Only handlers that use a malformed context get an error."""
    read: dict[str, Any] = {column: values[column] for column in CONTEXT_COLUMNS}
    try:
        for column in ("action_params", "headers"):
            read[column] = msgspec.Raw(b"null" if read[column] is None else read[column].encode())
        for column in ("event_id", "action_id", "causation_id"):
            read[column] = None if read[column] is None else UUID(read[column])
    except (ValueError, AttributeError):
        return NO_CONTEXT
    is_whole = all(isinstance(read[column], datetime) for column in CONTEXT_DATES)
    return Context(**read) if is_whole else NO_CONTEXT


# --- settling --------------------------------------------------------------------------------------
#
# The statements that settle notifications: equal outcomes (a bucket) are written by one UPDATE.

# The fence (decision 3). The statement that writes the outcomes locks the lease rows in shared mode. A new holder that
# increments a term waits for this lock; once the term has changed, the statement finds no lease. A plain join could
# write after the commit of the new term. EXISTS would become a join that scans the leases, and waits for the leases of
# other handlers. LIMIT makes the server look up the leases once, instead of once for each row.
_HELD = """
SELECT held.handler_name, held.partition_number FROM (
  SELECT mine.handler_name, mine.partition_number FROM JSON_TABLE(%(leases)s, '$[*]' COLUMNS (
    name {text} PATH '$[0]', handler_name {text} PATH '$[1]', partition_number SMALLINT PATH '$[2]',
    term BIGINT PATH '$[3]')) mine
  WHERE (SELECT 1 FROM eventlog.leases l WHERE l.name = mine.name AND l.term = mine.term LIMIT 1
    LOCK IN SHARE MODE) = 1
  LIMIT 18446744073709551615) held
"""
_UNSETTLED = "n.state NOT IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED')"

SETTLE = for_flavours(f"""
UPDATE {BY_ID} SET n.state = %(state)s, n.attempts = %(attempts)s, n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND {_UNSETTLED} AND (n.handler_name, n.partition_number) IN ({_HELD})
""")

# The same, with a next_retry_at and an error for each row:
# * MySQL looks up the details of a row with an automatic index. It rejects a join unless a database is selected.
# * MariaDB joins the details. A lookup would read all details for each row.
# If an operator has replaced the errors with something other than a JSON array, a new array replaces that value, so
# that the error is kept.
_DETAILS = """JSON_TABLE(%(details)s, '$[*]' COLUMNS (
  id {id} PATH '$[0]', next_retry_at DATETIME(6) PATH '$[1]', error {document} PATH '$[2]'))"""
_LATEST = """CASE WHEN CAST(JSON_TYPE(n.errors) AS CHAR) {collate} <> 'ARRAY' THEN JSON_ARRAY()
  WHEN JSON_LENGTH(n.errors) >= 10 THEN JSON_REMOVE(n.errors, '$[0]') ELSE n.errors END"""
_LOOKED_UP = f"(SELECT o.{{column}} FROM (SELECT d.* FROM {_DETAILS} d LIMIT 18446744073709551615) o WHERE o.id = n.id)"
SETTLE_WITH_DETAILS: Statement = {
    "mysql": for_flavours(f"""
UPDATE {BY_ID} SET n.state = %(state)s, n.attempts = %(attempts)s, n.updated_date = %(now)s,
  n.next_retry_at = COALESCE({_LOOKED_UP.replace("{column}", "next_retry_at")}, n.next_retry_at),
  n.errors = JSON_MERGE_PRESERVE({_LATEST}, {_LOOKED_UP.replace("{column}", "error")})
WHERE n.id IN ({{ids}}) AND {_UNSETTLED} AND (n.handler_name, n.partition_number) IN ({_HELD})
""")["mysql"],
    "mariadb": for_flavours(f"""
UPDATE {_DETAILS} o STRAIGHT_JOIN {BY_ID} ON n.id = {{id_of o.id}}
SET n.state = %(state)s, n.attempts = %(attempts)s, n.updated_date = %(now)s,
  n.next_retry_at = COALESCE(o.next_retry_at, n.next_retry_at), n.errors = JSON_MERGE_PRESERVE({_LATEST}, o.error)
WHERE {_UNSETTLED} AND (n.handler_name, n.partition_number) IN ({_HELD})
""")["mariadb"],
}


def settlement(bucket: Bucket, now: datetime, server: Server) -> tuple[str, Arguments]:
    """Return the statement that settles a bucket, and its arguments."""
    args: dict[str, Any] = {
        "state": bucket.state.value,
        "attempts": bucket.attempts,
        "now": now,
        "leases": as_json((lease.name, lease.handler_name, lease.partition, lease.term) for lease in bucket.leases),
    }
    statement = SETTLE
    if bucket.has_details:
        statement = SETTLE_WITH_DETAILS
        args["details"] = as_json(
            (
                outcome.notification_id,
                None if outcome.next_retry_at is None else as_timestamp(outcome.next_retry_at),
                outcome.error,
            )
            for outcome in bucket.by_id
        )
    return server.sql_for(statement).replace("{ids}", id_list(bucket.ids)), args


# --- the table -------------------------------------------------------------------------------------


FEW = 100  # the most due rows to read as one text each, on MariaDB
MANY_SECONDS = 1.0  # how long all rows are read as one text, after a read of more than FEW rows
READS_BY_COLUMN = 50  # how many reads are by column, after a result did not fit into one text


class MysqlNotifications:
    def __init__(self, find: LoopConnection, settle: LoopConnection, server: Server) -> None:
        self._find = find
        self._settle = settle
        self._server = server
        self._undispatchable = UndispatchableRows()
        self._reads_by_column = 0
        """How many of the next reads are column by column."""
        self._many_until = float("-inf")
        self._has_many = False
        """True if the last read of partitions found many rows."""

    @property
    def can_settle(self) -> bool:
        return self._settle.is_open

    async def find_due(self, namespace: str, now: datetime, queries: Sequence[DueQuery]) -> Sequence[Notification]:
        # Open the connection for outcomes before a run starts: later, the handlers may hold all connections of a
        # user-supplied pool.
        await self._settle.ready()
        if not self._reads_by_column:
            read = self._find_of_slots if any(query.partition for query in queries) else self._find_of_names
            found = await read(namespace, now, queries)
            if found is not None:
                return found
            self._reads_by_column = READS_BY_COLUMN
        self._reads_by_column -= 1
        args = branch_args(namespace, now, queries)
        return from_columns(await self._find.fetch_all(FIND_LARGE, len(queries), args), self._undispatchable)

    async def _find_of_names(
        self, namespace: str, now: datetime, queries: Sequence[DueQuery]
    ) -> Sequence[Notification] | None:
        """Read slots of a few unpartitioned handlers; ``None`` if the rows do not fit into the result."""
        time = asyncio.get_running_loop().time()
        few = self._server.flavour.aggregates_in_files and time >= self._many_until
        args = branch_args(namespace, now, queries)
        found = as_notifications(await self._find.fetch_all(FIND_FEW if few else FIND_DUE, len(queries), args))
        if found is not None and len(found) > FEW:
            self._many_until = time + MANY_SECONDS
        return found

    async def _find_of_slots(
        self, namespace: str, now: datetime, queries: Sequence[DueQuery]
    ) -> Sequence[Notification] | None:
        """Like :meth:`_find_of_names`, but for partitions, of which a process may own many."""
        if not self._has_many:
            sql, args = few_of_slots(namespace, now, queries)
            found = as_notifications(await self._find.use(lambda connection: fetch(connection, sql, args)))
            if found is None or len(found) <= FEW_OF_SLOTS:
                return None if found is None else first_of_slots(found, queries)
        sql, args = of_slots(namespace, now, queries)
        found = as_notifications(await self._find.use(lambda connection: fetch(connection, sql, args)))
        self._has_many = found is not None and len(found) > FEW_OF_SLOTS
        return None if found is None else first_of_slots(found, queries)

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        statement, args = settlement(bucket, now, self._server)
        async with self._settle.opened() as connection:
            return int((await run(connection, statement, args)).rowcount)

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        async def insert_and_settle(connection: Any) -> int:
            # The settlement comes last, because it locks leases.
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
    """The fence rejected a part of the bucket, so the transaction is rolled back."""
