"""The ``event_notifications`` table on MySQL and MariaDB."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
from msgspec.json import decode

from outboxio.notification import BEGINNING, Context, Notification, NotificationRecord, Wanted, record_of
from outboxio.outcome import Bucket
from outboxio.storage.mysql.connection import Arguments, Dedicated, execute, fetch, id_list
from outboxio.storage.mysql.flavour import Server, Statement, in_both
from outboxio.storage.mysql.lines import BLOCKED, ENDED
from outboxio.storage.mysql.session import insert_events
from outboxio.storage.mysql.values import as_json, as_moment

# MariaDB refuses to put columns of several collations into one JSON text; JSON columns have this one there.
_TEXT = {"handler_name", "event_type", "namespace", "action_name", "model_id", "model_type", "correlation_id", "state",
         "ordering_key"}  # fmt: skip
_JSON = ("action_params", "payload", "headers", "errors")
_MOMENTS = {"next_retry_us": "next_retry_at", "retention_us": "retention_from"}


_NUMBERS = {"attempts", "sequence", "hops", *_MOMENTS}


def _object(columns: Iterable[str]) -> str:
    return "JSON_OBJECT(" + ", ".join(f"'{column}', {_selected(column)}" for column in columns) + ")"


def _selected(column: str) -> str:
    if column in _MOMENTS:
        return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', n.{_MOMENTS[column]})"
    return f"n.{column} COLLATE utf8mb4_bin" if column in _TEXT else f"n.{column}"


def _as_json(column: str) -> str:
    """A column as the text of a JSON value."""
    if column in _NUMBERS:
        return _selected(column)
    if column in _JSON:
        value = f"n.{column}"
    elif column in _TEXT:
        value = f"JSON_QUOTE({_selected(column)})"
    else:  # ids and dates, in which there is nothing to escape
        value = f"CONCAT('\"', n.{column}, '\"')"
    return f"IFNULL({value}, 'null' COLLATE utf8mb4_bin)"


PIECE = 1000  # rows that one statement of an operator's order looks at, or writes

_DUE_COLUMNS = Notification.__struct_fields__[:-1]
_CONTEXT_COLUMNS = Context.__struct_fields__
_RECORD_COLUMNS = tuple(f for f in NotificationRecord.__struct_fields__ if f != "shard")

# Indexes are named everywhere: with statistics from when the table was small the planner would scan it for ever.
_BY_DUE = "eventlog.event_notifications n FORCE INDEX (event_notifications_due)"
_BY_LINE = "eventlog.event_notifications n FORCE INDEX (event_notifications_line)"
_BY_EVENT = "eventlog.event_notifications n FORCE INDEX (event_notifications_event)"
_BY_ID = "eventlog.event_notifications n FORCE INDEX (PRIMARY)"

# Put together with UNION ALL, one for each handler name. As a join it would read everything of a name that is not due.
ANY_DUE = f"""
(SELECT 1 FROM {_BY_DUE}
WHERE n.namespace = %s AND n.is_unfinished = TRUE AND n.handler_name = %s AND n.next_retry_at <= %s LIMIT 1)
"""

# These are put together with UNION ALL, one for each handler name: each is one walk along the index, from its own
# position. Said with OR the position is two ranges of the index, which a comparison of pairs would not be. No row is
# claimed, for whoever runs this holds the handler's lock.
_DUE = f"""
FROM {_BY_DUE}
WHERE n.namespace = %s AND n.is_unfinished = TRUE AND n.handler_name = %s
  AND (n.next_retry_at = %s AND n.sequence > %s OR n.next_retry_at > %s) AND n.next_retry_at <= %s
ORDER BY n.next_retry_at, n.sequence LIMIT %s
"""
# All rows of a name come as one text, with how many there are: the driver takes longer for a row than for all the rest.
# But a few of MariaDB's come as a text each: to put them together it makes a table in a file, for 1.5 ms. The text of a
# row is put together by hand, which takes the server half as long as its own functions for JSON.
_COLUMNS, _CONTEXT = (", ',', ".join(map(_as_json, columns)) for columns in (_DUE_COLUMNS, _CONTEXT_COLUMNS))
_DOCUMENT = f"CONCAT('[', {_COLUMNS}, ',[', {_CONTEXT}, ']]')"
FEW = 100  # rows, in every look of a while
A_WHILE = 1.0  # seconds
FEW_MADE = 250  # rows, for certain
FEWEST_MADE = 10  # rows that come sooner by themselves from any server
FIND_FEW = f"(SELECT {_DOCUMENT} AS document {_DUE})"
_AS_ONE = "SELECT COUNT(*), CONCAT('[', GROUP_CONCAT(d.document), ']')"
FIND_DUE = f"({_AS_ONE} FROM {FIND_FEW} d)"
# The same of rows that were just made of some events, and for some handlers. They are in memory, so MySQL need not put
# their places in order before it reads them.
JUST_MADE_FEW = f"""
SELECT /*+ NO_MRR(n) */ {_DOCUMENT} AS document FROM {_BY_EVENT}
WHERE n.event_id IN ({{ids}}) AND n.handler_name IN ({{names}}) AND n.state = 'PENDING' AND n.next_retry_at <= %(now)s
LIMIT {{most}}
"""
JUST_MADE = f"{_AS_ONE} FROM ({JUST_MADE_FEW}) d"
# For what does not fit into one text, which is no longer than max_allowed_packet.
FIND_LARGE = f"(SELECT {', '.join(map(_selected, (*_DUE_COLUMNS, *_CONTEXT_COLUMNS)))} {_DUE})"

# The lease rows are locked shared by the very statement that writes: a successor that raises a term waits for it,
# and once it has raised it this finds nothing. A plain join would write after the new term had committed; EXISTS would
# be turned into one that scans the leases, and waits for those of other handlers. The limit is there so that the
# leases are looked up once, and not for each row again.
_HELD = """
SELECT held.handler_name FROM (
  SELECT mine.handler_name FROM JSON_TABLE(%(leases)s, '$[*]' COLUMNS (
    name {text} PATH '$[0]', handler_name {text} PATH '$[1]', term BIGINT PATH '$[2]')) mine
  WHERE (SELECT 1 FROM eventlog.leases l WHERE l.name = mine.name AND l.term = mine.term LIMIT 1
    LOCK IN SHARE MODE) = 1
  LIMIT 18446744073709551615) held
"""
_UNSETTLED = "n.state NOT IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED')"

SETTLE = in_both(f"""
UPDATE {_BY_ID} SET n.state = %(state)s, n.attempts = %(attempts)s, n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND {_UNSETTLED} AND n.handler_name IN ({_HELD})
""")

# The same, with what differs from row to row. MySQL looks it up by an index that it makes for the purpose, MariaDB
# would read all of it for each row; but MariaDB can join it, which MySQL refuses unless some database is selected.
_DETAILS = """JSON_TABLE(%(details)s, '$[*]' COLUMNS (
  id {id} PATH '$[0]', next_retry_at DATETIME(6) PATH '$[1]', error {document} PATH '$[2]'))"""
_LATEST = "IF(JSON_LENGTH(n.errors) >= 10, JSON_REMOVE(n.errors, '$[0]'), n.errors)"
_LOOKED_UP = f"(SELECT o.{{column}} FROM (SELECT d.* FROM {_DETAILS} d LIMIT 18446744073709551615) o WHERE o.id = n.id)"
SETTLE_WITH_DETAILS: Statement = {
    "mysql": in_both(f"""
UPDATE {_BY_ID} SET n.state = %(state)s, n.attempts = %(attempts)s, n.updated_date = %(now)s,
  n.next_retry_at = COALESCE({_LOOKED_UP.replace("{column}", "next_retry_at")}, n.next_retry_at),
  n.errors = JSON_MERGE_PRESERVE({_LATEST}, {_LOOKED_UP.replace("{column}", "error")})
WHERE n.id IN ({{ids}}) AND {_UNSETTLED} AND n.handler_name IN ({_HELD})
""")["mysql"],
    "mariadb": in_both(f"""
UPDATE {_DETAILS} o STRAIGHT_JOIN {_BY_ID} ON n.id = {{id_of o.id}}
SET n.state = %(state)s, n.attempts = %(attempts)s, n.updated_date = %(now)s,
  n.next_retry_at = COALESCE(o.next_retry_at, n.next_retry_at), n.errors = JSON_MERGE_PRESERVE({_LATEST}, o.error)
WHERE {_UNSETTLED} AND n.handler_name IN ({_HELD})
""")["mariadb"],
}

COUNT_STATES = in_both("""
SELECT state, COUNT(*) FROM eventlog.event_notifications WHERE namespace = %(namespace)s GROUP BY state
""")

# One jump to the next handler name, along the due index and what is BLOCKED in that of lines. As one recursive
# statement it would read every row between.
NEXT_UNFINISHED_NAME = f"""
SELECT MIN(name) FROM (
  SELECT MIN(n.handler_name) AS name FROM {_BY_DUE}
  WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name > %(name)s
  UNION ALL
  SELECT MIN(n.handler_name) FROM {_BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {BLOCKED} AND n.handler_name > %(name)s) nexts
"""

_OF_NAMES = "JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {text} PATH '$')) w STRAIGHT_JOIN"
_DUE_OF_NAMES = f"""{_OF_NAMES} {_BY_DUE}
  ON n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = w.name"""
_BLOCKED_OF_NAMES = f"""{_OF_NAMES} {_BY_LINE}
  ON n.namespace = %(namespace)s AND n.line_part = {BLOCKED} AND n.handler_name = w.name"""

COUNT_UNFINISHED = in_both(f"""
SELECT (SELECT COUNT(*) FROM {_DUE_OF_NAMES}) + (SELECT COUNT(*) FROM {_BLOCKED_OF_NAMES})
""")

# Each part has the limit as well: a server is free to read all of them before it heeds that of the whole.
FIND_EXPIRED = in_both(f"""
(SELECT n.id FROM {_DUE_OF_NAMES}
WHERE n.state <> 'DYING' AND n.retention_from < %(before)s LIMIT %(limit)s)
UNION ALL
(SELECT n.id FROM {_BLOCKED_OF_NAMES}
WHERE n.retention_from < %(before)s LIMIT %(limit)s)
LIMIT %(limit)s
""")
EXPIRE = in_both(f"""
UPDATE {_BY_ID} SET n.state = 'EXPIRED', n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state IN ('PENDING', 'FAILED', 'BLOCKED') AND n.retention_from < %(before)s
""")

# Only ids are sorted: MySQL has no room to sort rows with large documents in them.
_CHOSEN = """
  SELECT n.id FROM eventlog.event_notifications n
  WHERE n.namespace = %(namespace)s AND (%(state)s IS NULL OR n.state = %(state)s)
    AND (%(handler_name)s IS NULL OR n.handler_name = %(handler_name)s)
    AND (%(event_type)s IS NULL OR n.event_type = %(event_type)s)
  ORDER BY n.created_date, n.sequence, n.handler_name LIMIT %(limit)s
"""
# An OR would be a scan.
_CHOSEN_BY_ID = f"""
  SELECT n.id FROM {_BY_ID} WHERE n.namespace = %(namespace)s AND n.id IN ({{ids}})
  UNION SELECT n.id FROM {_BY_EVENT} WHERE n.namespace = %(namespace)s AND n.event_id IN ({{ids}})
"""
_RECORDS_OF = f"FROM ({{chosen}}) chosen STRAIGHT_JOIN {_BY_ID} ON n.id = chosen.id"
# The id goes first, for asyncmy loses a row whose first column has 16 MiB.
SELECT = f"SELECT n.id, {_object(_RECORD_COLUMNS)} {_RECORDS_OF}"
SELECT_LARGE = f"SELECT {', '.join(f'n.{column}' for column in _RECORD_COLUMNS)} {_RECORDS_OF}"

# What parks a key is a part of its line.
FIND_PARKING = in_both(f"""
SELECT n.id FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {{text}} PATH '$')) w STRAIGHT_JOIN {_BY_LINE}
  ON n.namespace = %(namespace)s AND n.line_part = {ENDED} AND n.handler_name = w.name
  AND n.ordering_key = %(ordering_key)s
""")
RESUME = f"""
UPDATE {_BY_ID} SET n.state = 'SKIPPED', n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state IN ('DEAD', 'EXPIRED')
"""

# No index knows finished rows by their date, so all of a name are looked at, a piece in each statement. They are
# written when all are found: what is replayed may end meanwhile, and would be found again.
_FINISHED = "n.state IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED') AND FIND_IN_SET(n.state, %(states)s)"
LOOK_BACK = in_both(f"""
SELECT n.next_retry_at, n.sequence, IF({_FINISHED} AND n.event_date >= %(since)s AND n.event_date < %(until)s
  AND (%(types)s = '[]' OR n.event_type IN (
    SELECT t.event_type FROM JSON_TABLE(%(types)s, '$[*]' COLUMNS (event_type {{text}} PATH '$')) t)), n.id, NULL)
FROM {_BY_DUE}
WHERE n.namespace = %(namespace)s AND n.is_unfinished = FALSE AND n.handler_name = %(name)s
  AND (n.next_retry_at = %(due)s AND n.sequence > %(sequence)s OR n.next_retry_at > %(due)s)
ORDER BY n.next_retry_at, n.sequence LIMIT {PIECE}
""")
REPLAY = f"""
UPDATE {_BY_ID} SET n.state = 'PENDING', n.attempts = 0, n.next_retry_at = %(now)s, n.retention_from = %(now)s,
  n.updated_date = %(now)s WHERE n.id IN ({{ids}}) AND {_FINISHED}
"""

# How many rows an UPDATE really changed is not how many it was meant for, so these are locked and counted first.
RETRY = f"""
UPDATE {_BY_ID} SET n.state = 'PENDING', n.attempts = 0, n.next_retry_at = %(now)s, n.retention_from = %(now)s,
  n.updated_date = %(now)s WHERE n.id IN ({{ids}})
"""
SKIP = f"UPDATE {_BY_ID} SET n.state = 'SKIPPED', n.updated_date = %(now)s WHERE n.id IN ({{ids}})"
LOCK = f"SELECT n.id, n.state FROM {_BY_ID} WHERE n.namespace = %(namespace)s AND n.id IN ({{ids}}) FOR UPDATE"


class _Due(Notification, array_like=True, gc=False):
    """A due row as FIND_DUE writes it."""

    payload: msgspec.Raw
    raw_context: msgspec.Raw


_decode_due = msgspec.json.Decoder(list[_Due]).decode
IN_ROWS = 50  # reads row by row after one that did not fit into a text


class MysqlNotifications:
    def __init__(self, find: Dedicated, settle: Dedicated, admin: Dedicated, server: Server, shard: str) -> None:
        self._find = find
        self._settle = settle
        self._admin = admin
        self._server = server
        self._shard = shard
        self._in_rows = 0
        self._many_until = float("-inf")

    @property
    def can_settle(self) -> bool:
        return self._settle.is_open

    async def find_due(self, namespace: str, now: datetime, wanted: Sequence[Wanted]) -> Sequence[Notification]:
        # What is found is going to be settled: a given pool may be exhausted by then.
        await self._settle.ready()
        args: list[Any] = []
        for w in wanted:
            args += (namespace, w.handler_name, w.after[0], w.after[1], w.after[0], now, w.limit)
        if not self._in_rows:
            moment = asyncio.get_running_loop().time()
            few = self._server.flavour.aggregates_in_files and moment >= self._many_until
            statement = FIND_FEW if few else FIND_DUE
            found = as_notifications(await self._find.fetch_all(statement, len(wanted), tuple(args)))
            if found is not None:
                if len(found) > FEW:
                    self._many_until = moment + A_WHILE
                return found
            self._in_rows = IN_ROWS
        self._in_rows -= 1
        return [_plain(row) for row in await self._find.fetch_all(FIND_LARGE, len(wanted), tuple(args))]

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        return int(await self._settle.use(lambda connection: self._write(connection, bucket, now)))

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        async def insert_and_settle(connection: Any) -> int:
            # The settlement goes last, for it locks leases.
            for action, events in bucket.emitted:
                await insert_events(connection, action, events, self._server)
            settled = await self._write(connection, bucket, now)
            if settled < len(bucket.outcomes):
                raise _Refused
            return settled

        try:
            return int(await self._settle.in_transaction(insert_and_settle))
        except _Refused:
            return 0

    async def any_due(self, namespace: str, now: datetime, names: Sequence[str]) -> bool:
        args = tuple(value for name in names for value in (namespace, name, now))
        return bool(names and await self._admin.fetch_all(ANY_DUE, len(names), args))

    async def count_states(self, namespace: str) -> dict[str, int]:
        return {row[0]: row[1] for row in await self._admin.fetch(COUNT_STATES, {"namespace": namespace})}

    async def unfinished_names(self, namespace: str) -> list[str]:
        async def jump(connection: Any) -> list[str]:
            names = [""]
            while True:
                scope = {"namespace": namespace, "name": names[-1]}
                name = (await fetch(connection, NEXT_UNFINISHED_NAME, scope))[0][0]
                if name is None:
                    return names[1:]
                names.append(name)

        found: list[str] = await self._admin.use(jump)
        return found

    async def count_unfinished(self, namespace: str, names: Sequence[str]) -> int:
        scope = {"namespace": namespace, "names": as_json(names)}
        return int((await self._admin.fetch(COUNT_UNFINISHED, scope))[0][0])

    async def expire(self, namespace: str, names: Sequence[str], before: datetime, now: datetime, limit: int) -> int:
        scope = {"namespace": namespace, "names": as_json(names), "before": before, "limit": limit, "now": now}
        ids = sorted(row[0] for row in await self._admin.fetch(FIND_EXPIRED, scope))
        if not ids:
            return 0
        expire = self._server.spell(EXPIRE).replace("{ids}", id_list(ids))
        return int(await self._admin.use(lambda connection: execute(connection, expire, scope)))

    async def select(
        self, namespace: str, state: str | None, handler_name: str | None, event_type: str | None, limit: int
    ) -> list[NotificationRecord]:
        scope = {
            "namespace": namespace,
            "state": state,
            "handler_name": handler_name,
            "event_type": event_type,
            "limit": limit,
        }
        return await self._records(_CHOSEN, scope)

    async def select_by_id(self, namespace: str, ids: Sequence[UUID]) -> list[NotificationRecord]:
        if not ids:
            return []
        return await self._records(_CHOSEN_BY_ID.format(ids=id_list(ids)), {"namespace": namespace})

    async def retry(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        return await self._change(RETRY, namespace, ids, now, unless=())

    async def skip(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        return await self._change(SKIP, namespace, ids, now, unless=("SUCCEEDED", "SKIPPED"))

    async def resume(self, namespace: str, names: Sequence[str], ordering_key: str, now: datetime) -> int:
        scope = {"namespace": namespace, "names": as_json(names), "ordering_key": ordering_key, "now": now}
        return await self._write_found([row[0] for row in await self._admin.fetch(FIND_PARKING, scope)], RESUME, scope)

    async def replay(
        self,
        namespace: str,
        names: Sequence[str],
        since: datetime,
        until: datetime,
        types: Sequence[str],
        states: Sequence[str],
        now: datetime,
    ) -> int:
        scope = {
            "namespace": namespace,
            "since": since,
            "until": until,
            "types": as_json(types),
            "states": ",".join(states),
            "now": now,
        }
        found: list[str] = []
        for name in names:
            due, sequence = BEGINNING
            while True:
                position = {"name": name, "due": due, "sequence": sequence}
                rows = await self._admin.fetch(LOOK_BACK, {**scope, **position})
                found += [row[2] for row in rows if row[2] is not None]
                if len(rows) < PIECE:
                    break
                due, sequence, _ = rows[-1]
        return await self._write_found(found, REPLAY, scope)

    async def _write_found(self, ids: Sequence[str], statement: str, args: Arguments) -> int:
        """Write rows that were found, in the order of their ids, and in pieces; how many."""
        ids, written = sorted(ids), 0

        async def write(connection: Any, piece: str) -> int:
            return await execute(connection, piece, args)

        for start in range(0, len(ids), PIECE):
            piece = statement.format(ids=id_list(ids[start : start + PIECE]))
            written += await self._admin.use(partial(write, piece=piece))
        return written

    async def _records(self, chosen: str, scope: Arguments) -> list[NotificationRecord]:
        rows = await self._admin.use(lambda connection: fetch(connection, SELECT.format(chosen=chosen), scope))
        if any(document is None for _, document in rows):
            large = SELECT_LARGE.format(chosen=chosen)
            rows = await self._admin.use(lambda connection: fetch(connection, large, scope))
            found = [dict(zip(_RECORD_COLUMNS, row, strict=True)) for row in rows]
            found = [{**row, **{c: None if row[c] is None else decode(row[c]) for c in _JSON}} for row in found]
        else:
            found = [decode(document) for _, document in rows]
        records = [record_of(row, self._shard) for row in found]
        return sorted(records, key=lambda record: (record.created_date, record.sequence, record.handler_name))

    async def _change(
        self, statement: str, namespace: str, ids: Sequence[UUID], now: datetime, *, unless: Sequence[str]
    ) -> int:
        async def lock_and_change(connection: Any) -> int:
            lock = LOCK.format(ids=id_list(sorted(ids)))
            found = [i for i, state in await fetch(connection, lock, {"namespace": namespace}) if state not in unless]
            if found:
                await execute(connection, statement.format(ids=id_list(found)), {"now": now})
            return len(found)

        return 0 if not ids else int(await self._admin.in_transaction(lock_and_change))

    async def _write(self, connection: Any, bucket: Bucket, now: datetime) -> int:
        statement, args = settlement(bucket, now)
        return await execute(connection, self._server.spell(statement).replace("{ids}", id_list(bucket.ids)), args)


class _Refused(Exception):
    """The fence let some of a bucket through, and not all: take it all back."""


def settlement(bucket: Bucket, now: datetime) -> tuple[Statement, Arguments]:
    """The statement that writes a bucket, and its arguments but for the ids."""
    args: dict[str, Any] = {
        "state": bucket.state.value,
        "attempts": bucket.attempts,
        "now": now,
        "leases": as_json((lease.name, lease.handler_name, lease.term) for lease in bucket.leases),
    }
    if not bucket.has_details:
        return SETTLE, args
    details = as_json(
        (
            outcome.notification_id,
            None if outcome.next_retry_at is None else as_moment(outcome.next_retry_at),
            outcome.error,
        )
        for outcome in bucket.outcomes
    )
    return SETTLE_WITH_DETAILS, {**args, "details": details}


def as_notifications(found: Sequence[tuple[Any, ...]]) -> list[Notification] | None:
    """What was found as texts of one row each, or of many with their number; ``None`` if a text was cut off."""
    if found and len(found[0]) == 1:
        texts = [text for (text,) in found]
        found = [(len(texts), None if None in texts else f"[{','.join(texts)}]")]
    rows: list[Notification] = []
    for number, text in found:
        if number:
            try:
                some = _decode_due(text or "")
            except msgspec.DecodeError:
                return None
            if len(some) != number:
                return None
            rows += some
    return rows


def _plain(row: Sequence[Any]) -> Notification:
    """A row that came column by column."""
    values: dict[str, Any] = dict(zip((*_DUE_COLUMNS, *_CONTEXT_COLUMNS), row, strict=True))
    for column in ("action_params", "headers"):
        values[column] = msgspec.Raw(b"null" if values[column] is None else values[column].encode())
    for column in ("id", "event_id", "action_id", "causation_id"):
        values[column] = None if values[column] is None else UUID(values[column])
    context = Context(**{column: values.pop(column) for column in _CONTEXT_COLUMNS})
    return Notification(**values, raw_context=context)
