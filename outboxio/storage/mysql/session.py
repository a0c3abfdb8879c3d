"""A pooled connection, checked out for one transaction of the application."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any
from uuid import UUID

from outboxio.errors import InvalidEvent
from outboxio.event import ActionRecord, EventRecord
from outboxio.storage.mysql import errors
from outboxio.storage.mysql.connection import drop, fetch, id_list, is_closed, run, send
from outboxio.storage.mysql.driver import Driver, driver_of
from outboxio.storage.mysql.flavour import Server, in_both
from outboxio.storage.mysql.values import Escape, as_json, as_moment, as_rows, as_value, escape_of
from outboxio.storage.pool import GiveBack
from outboxio.storage.protocols import CommitLost, Consumed, Owed, TransactionLost
from outboxio.waiting import to_the_end

logger = logging.getLogger(__name__)

# A transaction that has ended does not know its savepoint: that tells it apart whatever ended it, a deadlock that was
# swallowed, a CREATE TABLE, a COMMIT inside a procedure. After it, statements would be committed one by one.
# It is committed in one message with giving the savepoint up. Earlier, a savepoint of its own tells whether there is
# any transaction: without one it is forgotten at once. To give up the first one would give up the user's, too.
# While nothing was run but single statements that read or change rows, and none of them failed, nothing can have ended
# it: then there is no savepoint yet.
BEGIN = "START TRANSACTION"
MARK = "SAVEPOINT outboxio"
STILL_MARKED = "RELEASE SAVEPOINT outboxio"
IS_OPEN = "SAVEPOINT outboxio_open; RELEASE SAVEPOINT outboxio_open"
AROUND = 128  # bytes of a message that are not its rows', at most
_NO_SUCH_SAVEPOINT = 1305
_TOO_LARGE = 1301

# What commits by itself what was written before it. Atomic groups: each comment is passed over in one way only.
_COMMITS = re.compile(
    r"(?>\s+|;|--[^\n]*\n|#[^\n]*\n|/\*.*?\*/)*+"
    r"((?:ALTER|CREATE|DROP)\s+(?!TEMPORARY\b)\w+|RENAME\s+\w+|TRUNCATE|GRANT|REVOKE|LOCK\s+\w+|UNLOCK\s+\w+|FLUSH|"
    r"ANALYZE\s+\w+|OPTIMIZE\s+\w+|REPAIR\s+\w+|CHECK\s+TABLE|SET\s+PASSWORD|SET\s+(?:@@|SESSION\s+)?AUTOCOMMIT)",
    re.IGNORECASE | re.DOTALL,
)

# What these call, functions and triggers, is not allowed to commit either. A semicolon may begin another statement.
_READS_OR_CHANGES_ROWS = re.compile(r"\s*(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH)\b[^;]*\Z", re.IGNORECASE)

# What differs from event to event comes first, and then what the action's rows share.
INSERT_EVENTS = """
INSERT INTO eventlog.events (id, model_id, model_type, event_type, payload, ordering_key, topic, available_at,
  namespace, action_id, action_name, action_params, started_date, completion_date, event_date, source, correlation_id,
  causation_id, headers, hops, delivered)
VALUES """

# Rows that another process works on are passed by: two at once still have one effect. The index is named, for a planner
# that believes the table to be small would scan it, and under REPEATABLE READ lock all of it.
CLAIM = """
SELECT n.id, n.errors FROM eventlog.event_notifications n FORCE INDEX (PRIMARY)
WHERE n.id IN ({ids}) AND FIND_IN_SET(n.state, %s) FOR UPDATE SKIP LOCKED
"""
FINISH = """
UPDATE eventlog.event_notifications n FORCE INDEX (PRIMARY)
SET n.state = %s, n.attempts = %s, n.updated_date = %s WHERE n.id IN ({ids})
"""

# As fan-out makes them, but for what the caller says. The event is this transaction's own, so nobody else has made any.
OWE = in_both("""
INSERT INTO eventlog.event_notifications (id, event_id, handler_name, namespace, action_id, action_name,
  action_params, started_date, completion_date, model_id, model_type, event_type, payload, event_date, state,
  attempts, next_retry_at, created_date, updated_date, sequence, ordering_key, priority, errors, correlation_id,
  causation_id, headers, hops, retention_from)
SELECT o.id, e.id, o.handler_name, e.namespace, e.action_id, e.action_name, e.action_params, e.started_date,
  e.completion_date, e.model_id, e.model_type, e.event_type, e.payload, e.event_date, o.state, o.attempts,
  o.next_retry_at, %(now)s, %(now)s, e.sequence, o.ordering_key, o.priority, o.errors, e.correlation_id,
  e.causation_id, e.headers, e.hops, GREATEST(COALESCE(e.available_at, %(now)s), %(now)s)
FROM JSON_TABLE(%(owed)s, '$[*]' COLUMNS (
  id {id} PATH '$[0]', handler_name {text} PATH '$[1]', state {text} PATH '$[2]', attempts INT PATH '$[3]',
  next_retry_at DATETIME(6) PATH '$[4]', errors {document} PATH '$[5]',
  ordering_key {text} PATH '$[6]', priority INT PATH '$[7]')) o
STRAIGHT_JOIN eventlog.events e FORCE INDEX (PRIMARY) ON e.id = %(event_id)s
""")
DELIVER = "UPDATE eventlog.events e FORCE INDEX (PRIMARY) SET e.delivered = TRUE WHERE e.id = %(event_id)s"

# Whoever comes second waits for the first to commit, and then sees what it wrote: a locking read sees it in an old
# snapshot, too.
CONSUME = """
INSERT INTO eventlog.consumed_events (source, external_id, handler_name, event_id, payload_hash, consumed_date)
VALUES (%s, %s, %s, %s, %s, %s) ON DUPLICATE KEY UPDATE source = eventlog.consumed_events.source
"""
CONSUMED = """
SELECT event_id, payload_hash, consumed_date FROM eventlog.consumed_events
WHERE source = %s AND external_id = %s AND handler_name = %s FOR UPDATE
"""
SEEN = """
SELECT source, external_id, handler_name, event_id, payload_hash, consumed_date FROM eventlog.consumed_events
WHERE source = %s AND external_id = %s AND handler_name IN ({names})
"""


def insertions(
    action: ActionRecord, events: Sequence[EventRecord], escape: Escape, largest_packet: int
) -> Iterator[bytes]:
    """The statements that write the rows of one action: one, unless it would be longer than the server takes."""
    shared = _spelled(escape, _of_action(action))
    statement = INSERT_EVENTS.encode()
    begun, room = statement, largest_packet - AROUND
    for event in events:
        row = f"({_spelled(escape, _of_event(event))}, {shared}, FALSE)".encode()
        if len(INSERT_EVENTS) + len(row) >= room:
            raise InvalidEvent(
                f"event {event.event_type or 'of ' + action.action_name}",
                f"its row has {len(row)} bytes with the action's parameters; the server's max_allowed_packet is "
                f"{largest_packet}: raise it, or store what is large elsewhere",
            )
        if statement is not begun and len(statement) + len(row) + 2 >= room:
            yield statement
            statement = begun
        statement = statement + row if statement is begun else statement + b",\n" + row
    yield statement


def _of_event(event: EventRecord) -> tuple[Any, ...]:
    return (
        event.id, event.model_id, event.model_type, event.event_type, event.payload, event.ordering_key, event.topic,
        event.available_at,
    )  # fmt: skip


def _of_action(action: ActionRecord) -> tuple[Any, ...]:
    return (
        action.namespace, action.action_id, action.action_name, action.action_params, action.started_date,
        action.completion_date, action.completion_date, action.source, action.correlation_id, action.causation_id,
        action.headers, action.hops,
    )  # fmt: skip


def _spelled(escape: Escape, values: Sequence[Any]) -> str:
    """Values of our own rows; the driver takes three times as long."""
    return ", ".join([
        "NULL" if value is None
        else escape(value) if isinstance(value, str)
        else f"'{value}'" if isinstance(value, UUID)
        else f"'{as_moment(value)}'" if isinstance(value, datetime)
        else str(int(value))
        for value in values
    ])  # fmt: skip


async def insert_events(connection: Any, action: ActionRecord, events: Sequence[EventRecord], server: Server) -> None:
    """Write the rows of one action on a driver's connection, in the transaction that is open there."""
    await _send(connection, action, insertions(action, events, escape_of(connection), server.largest_packet), server)


async def _send(connection: Any, action: ActionRecord, messages: Iterable[bytes], server: Server) -> None:
    for message in messages:
        try:
            await send(connection, message, server)
        except Exception as error:
            if errors.number(error) != _TOO_LARGE:
                raise
            raise InvalidEvent(
                f"an event of {action.action_name}",
                "its JSON, as the server spells it, is longer than the server's max_allowed_packet of "
                f"{server.largest_packet} bytes: raise it, or store what is large elsewhere",
            ) from error


class MysqlSession:
    """One transaction on one driver's connection; or a caller's own connection, with the transaction that it has.

    It may begin in one message with the application's first statement.
    """

    def __init__(self, connection: Any, server: Server, *, is_callers: bool = False) -> None:
        self._connection = connection
        self._server = server
        self._is_callers = is_callers
        self._is_to_begin = False
        self._is_marked = True  # there is nothing to mark: no transaction yet, or the caller's own
        self._is_doubtful = False
        self._is_over = False
        self._has_run = False
        self._is_running = False

    @property
    def _driver(self) -> Driver:
        return driver_of(self._connection)

    @property
    def connection(self) -> Any:
        if not self._is_marked:  # whoever asks for it uses it at once: behind this, on the same wire
            self._driver.send_ahead(self._connection, _joined(*self._opening()))
        return self._connection

    async def begin(self, *, soon: bool = False) -> None:
        self._is_to_begin, self._is_marked = True, False
        if not (soon and self._driver.sends_ahead(self._connection)):
            await self._mark()

    async def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> None:
        if action is not None and events:
            statements = self._write(action, events, ends=True)
        elif self._is_to_begin:
            self._is_to_begin = False
            return  # nothing was done
        else:
            statements = send(self._connection, _joined(*self._opening(ends=True), "COMMIT"), self._server)
        try:
            await self._require_open(statements)
        except Exception as error:
            if errors.is_unreachable(error):
                raise CommitLost from error
            raise

    async def rollback(self) -> None:
        if self._is_to_begin:
            self._is_to_begin = False
        elif self._is_running:  # a task was left behind with a statement, whose answer would be taken for ROLLBACK's
            self.discard()
        elif not is_closed(self._connection):
            await run(self._connection, "ROLLBACK", timeout=10)

    def discard(self) -> None:
        drop(self._connection)

    def in_transaction(self) -> bool:
        if not self._is_over and (
            self._is_to_begin
            or self._connection.get_transaction_status()
            or self._driver.has_unread(self._connection)
            or (self._is_callers and not self._connection.get_autocommit())
        ):
            return True
        return is_closed(self._connection)  # one that is gone speaks for itself, with the driver's own error

    def would_commit(self, sql: str) -> str | None:
        # As the first statement it commits nothing, and what comes after it is refused.
        words = _COMMITS.match(sql) if self._has_run else None
        return None if words is None else words[1]

    async def execute(self, sql: str, args: Sequence[Any]) -> int:
        count, _, _ = await self._run(sql, args)
        return count

    async def fetch(self, sql: str, args: Sequence[Any]) -> list[Any]:
        _, columns, rows = await self._run(sql, args)
        return as_rows(columns, rows)

    async def fetchrow(self, sql: str, args: Sequence[Any]) -> Any | None:
        rows = await self.fetch(sql, args)
        return rows[0] if rows else None

    async def claim(self, ids: Sequence[UUID], states: Sequence[str]) -> dict[UUID, str]:
        if not ids:
            return {}
        await self._mark()
        rows = await fetch(self._connection, CLAIM.format(ids=id_list(ids)), (",".join(states),))
        return {UUID(row[0]): row[1] for row in rows}

    async def finish(self, ids: Sequence[UUID], state: str, attempts: int, now: datetime) -> None:
        if ids:
            await self._mark()
            await run(self._connection, FINISH.format(ids=id_list(ids)), (state, attempts, now))

    async def owe(self, event_id: UUID, owed: Sequence[Owed], now: datetime) -> None:
        listed = as_json(
            (
                o.id,
                o.handler_name,
                o.state,
                o.attempts,
                as_moment(o.next_retry_at),
                o.errors,
                o.ordering_key,
                o.priority,
            )
            for o in sorted(owed, key=lambda o: o.id)
        )
        args = {"event_id": str(event_id), "owed": listed, "now": as_value(now)}
        statements = f"{self._server.spell(OWE)}; {DELIVER}" if owed else DELIVER
        opening = () if self._is_callers else self._opening()
        await self._require_open(run(self._connection, "; ".join([*opening, statements]), args))

    async def consume(self, consumed: Consumed) -> Consumed:
        key = (consumed.source, consumed.external_id, consumed.handler_name)
        rest = (str(consumed.event_id), consumed.payload_hash, consumed.consumed_date)
        await self._mark()
        await run(self._connection, CONSUME, (*key, *rest))
        (row,) = await fetch(self._connection, CONSUMED, key)
        return Consumed(*key, UUID(row[0]), row[1], row[2])

    async def consumed(self, source: str, external_id: str, handler_names: Sequence[str]) -> list[Consumed]:
        await self._mark()
        seen = SEEN.format(names=", ".join(["%s"] * len(handler_names)))
        rows = await fetch(self._connection, seen, (source, external_id, *handler_names))
        return [
            Consumed(source, external_id, name, UUID(event_id), payload_hash, moment)
            for _, _, name, event_id, payload_hash, moment in rows
        ]

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        await self._require_open(self._write(action, events, ends=False))

    async def _write(self, action: ActionRecord, events: Sequence[EventRecord], *, ends: bool) -> None:
        """Write the rows of one action, and commit if it ``ends``."""
        messages = list(insertions(action, events, escape_of(self._connection), self._server.largest_packet))
        if not self._is_callers:
            messages[0] = _joined(*self._opening(ends=ends and len(messages) == 1), messages[0])
            if ends and len(messages) > 1:
                messages[-1] = _joined(*self._opening(ends=True), messages[-1])
            if ends:
                messages[-1] = _joined(messages[-1], "COMMIT")
        await _send(self._connection, action, messages, self._server)

    def _opening(self, *, ends: bool = False) -> list[str]:
        """What goes before statements of ours, in one message with them: the transaction begins, or is still there.

        It is marked as well, unless it ``ends`` in this message.
        """
        if self._is_to_begin:
            opening = [BEGIN]
        elif ends:
            opening = [STILL_MARKED] if self._is_marked else [IS_OPEN] if self._is_doubtful else []
        else:
            opening = [IS_OPEN]
        if not (ends or self._is_marked):
            opening.append(MARK)
        self._is_to_begin = self._is_doubtful = False
        self._is_marked = not ends
        return opening

    async def _mark(self) -> None:
        """Mark the transaction, unless it is; begin it, if that was to come with the application's first statement."""
        if not self._is_marked:
            try:
                await send(self._connection, _joined(*self._opening()), self._server)
            except BaseException:
                self.discard()  # nobody knows whether it began
                raise

    async def _require_open(self, statements: Awaitable[Any]) -> None:
        """Run statements of which the first release a savepoint; without it there is no transaction any more."""
        try:
            await statements
        except Exception as error:
            if errors.number(error) == _NO_SUCH_SAVEPOINT:
                raise TransactionLost from error
            raise

    def _spelled(self, value: Any) -> str:
        if isinstance(value, bytes | bytearray):
            return f"X'{value.hex()}'"
        spelled: str = self._connection.escape(as_value(value))
        return spelled

    async def _run(self, sql: str, args: Sequence[Any]) -> tuple[int, list[str], Sequence[Any]]:
        """How many rows a statement touched, the names of its columns, and its rows.

        Of several statements, the first's; but all are waited for, for any of them may end the transaction.
        """
        # As the driver does, but for bytes, which not every version of it can write. Without arguments a percent sign
        # is only a percent sign.
        statement = sql % tuple(map(self._spelled, args)) if args else sql
        driver = self._driver
        self._is_running = True
        try:
            if self._is_doubtful:  # without a transaction it would be committed alone
                await self._require_open(run(self._connection, IS_OPEN))
                self._is_doubtful = False
            before = self._before(sql)
            if before and len(statement) > self._server.largest_packet // 8:
                await self._mark()  # there may be no room for both
                before = []
            self._is_to_begin, self._is_marked = False, self._is_marked or MARK in before
            self._has_run = True
            cursor = driver.cursor(self._connection, driver.Cursor)
            await cursor.execute("; ".join([*before, statement]) if before else statement)
            for _ in before:
                await cursor.nextset()
            columns = [column[0] for column in cursor.description or ()]
            found = int(cursor.rowcount), columns, await driver.rows(cursor) if columns else ()
            while await cursor.nextset():
                pass
        except BaseException as error:
            self._is_doubtful, self._is_over = True, self._is_over or errors.rolled_back(error)
            raise
        finally:
            self._is_running = False
        return found

    def _before(self, sql: str) -> list[str]:
        """What goes before a statement of the application's, in one message with it."""
        before = [BEGIN] if self._is_to_begin else []
        if not (self._is_marked or _READS_OR_CHANGES_ROWS.match(sql)):
            before.append(MARK)
        return before


def _joined(*statements: str | bytes) -> bytes:
    return b"; ".join(statement.encode() if isinstance(statement, str) else statement for statement in statements)


class PooledSession:
    """Checks a connection out of a pool, and gives it back."""

    def __init__(self, check_out: Callable[[], Awaitable[tuple[Any, GiveBack]]], server: Server) -> None:
        self._check_out = check_out
        self._server = server

    async def __aenter__(self) -> MysqlSession:
        self._connection, self._give_back = await self._check_out()
        return MysqlSession(self._connection, self._server)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (giving := self._give_back(self._connection)) is not None:
            await to_the_end(giving)


async def give_back(pool: Any, connection: Any) -> None:
    """Give a connection back to a pool of a driver's, and wake whoever waits for one.

    aiomysql's wakes nobody by itself when it takes back a connection that is lost: without free ones, whoever waits
    would wait for ever.
    """
    await pool.release(connection)
    if is_closed(connection) and not pool.freesize:
        await pool.clear()
