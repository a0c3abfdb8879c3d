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
from outboxio.storage.left_alone import LeftAlone
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
from outboxio.storage.mysql.values import as_json, as_moment

# --- due rows --------------------------------------------------------------------------------------
#
# Due notifications: the statements that read due rows, and the mapping of rows to :class:`Notification`.
#
# All rows of a slot come as a single JSON text with the number of rows, because the driver takes longer for a row than
# for all the rest. Two exceptions:
#
# * few rows on MariaDB come as a text each: an aggregate takes a table in a file there, which costs 1.5 ms;
# * rows that together exceed ``max_allowed_packet`` come column by column (``FIND_LARGE``).
#
# The text of a row is put together by hand (decision 13), which takes the server half as long as the JSON functions of
# the server.

# Joined by UNION ALL, once for each slot: each branch walks the index from the scan position of the slot. The position
# is written with OR, which is two ranges of the index; a comparison of pairs would be none. The rows are not locked:
# this process holds the cluster lock of the slot (decision 2).
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

# A process may own 64 partitions of each handler, and the planning of so many of the branches above takes 20 ms. So
# partitions are read with two cheaper statements:
# * All ranges of all slots in a single walk along the index: enough if there are at most FEW_OF_SLOTS rows.
# * Otherwise branches that read only ids, out of the index, and the rows by id: a quarter of the time of the planning.
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
    """A due row in the form of ``DOCUMENT``."""

    payload: msgspec.Raw
    raw_context: msgspec.Raw


_decode_due = msgspec.json.Decoder(list[_Due]).decode


def few_of_slots(namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> tuple[str, tuple[Any, ...]]:
    """The statement that reads a few due rows of many slots, without the limits of the slots, with the arguments."""
    slots = FIND_FEW_OF_SLOTS.format(slots=" OR ".join([_OF_SLOT] * len(wanted)))
    places = ((w.handler_name, w.partition, *w.after, w.after[0], now) for w in wanted)
    return slots, (namespace, *chain.from_iterable(places))


def of_slots(namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> tuple[str, tuple[Any, ...]]:
    """The statement that reads many due rows of many slots, with the arguments."""
    slots = FIND_OF_SLOTS.format(slots=" UNION ALL ".join([_IDS_OF_SLOT] * len(wanted)))
    return slots, branch_args(namespace, now, wanted)


def branch_args(namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> tuple[Any, ...]:
    """The arguments of a statement with a branch for each slot."""
    args: list[Any] = []
    for w in wanted:
        args += (namespace, w.handler_name, w.partition, w.after[0], w.after[1], w.after[0], now, w.limit)
    return tuple(args)


def first_of_slots(rows: Sequence[Notification], wanted: Sequence[DueQuery]) -> list[Notification]:
    """The rows in order, for each slot up to its limit."""
    room = {(w.handler_name, w.partition): w.limit for w in wanted}
    first: list[Notification] = []
    for row in sorted(rows, key=lambda row: (row.next_retry_us, row.sequence)):
        slot = (row.handler_name, row.partition_number)
        if room[slot]:
            room[slot] -= 1
            first.append(row)
    return first


def as_notifications(found: Sequence[tuple[Any, ...]]) -> list[Notification] | None:
    """The notifications in texts of a row each, or in texts of many rows with the number of rows.

    ``None`` if the server has cut a text off.
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


def from_columns(rows: Iterable[Sequence[Any]], left_alone: LeftAlone) -> list[Notification]:
    """The notifications in rows of ``FIND_LARGE``. A row that cannot be read is left alone, and the rest is read."""
    found: list[Notification] = []
    for row in rows:
        values: dict[str, Any] = dict(zip((*DUE_COLUMNS, *CONTEXT_COLUMNS), row, strict=True))
        context = _context(values)
        due = {column: values[column] for column in DUE_COLUMNS}
        try:
            due["id"] = UUID(due["id"])
        except ValueError:
            left_alone.add(due["id"], due["handler_name"])
        else:
            found.append(checked(Notification(**due, raw_context=context)))
    return found


def _context(values: Mapping[str, Any]) -> Context | bytes:
    """The context in the columns of a row. Only a handler that uses an unreadable context gets an error."""
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
# The statements that settle notifications: equal outcomes (a bucket) are a single UPDATE.

# The fence (decision 3). The statement that writes the outcomes locks the lease rows shared. A successor that raises a
# term waits for this lock; after the successor has raised the term, the statement finds no lease. A plain join would
# write after the commit of the new term. EXISTS would become a join that scans the leases, and waits for the leases of
# foreign handlers. LIMIT makes the server look the leases up once, and not once for each row.
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
# * MySQL looks the details of a row up, by an index made for the purpose. A join is refused by MySQL unless a
#   database is selected.
# * MariaDB joins the details. A lookup would read all details for each row.
# If an operator has replaced the list of errors by a different JSON value, a new list replaces that value, so that the
# error is kept.
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
    """The statement that settles a bucket, with the arguments."""
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
                None if outcome.next_retry_at is None else as_moment(outcome.next_retry_at),
                outcome.error,
            )
            for outcome in bucket.by_id
        )
    return server.spell(statement).replace("{ids}", id_list(bucket.ids)), args


# --- the table -------------------------------------------------------------------------------------


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
