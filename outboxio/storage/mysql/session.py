"""A transaction of the application, on a connection of aiomysql or asyncmy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent
from outboxio.storage.consuming import Consuming
from outboxio.storage.mysql import driver, errors
from outboxio.storage.mysql.columns import notifications_of, partition_of
from outboxio.storage.mysql.connection import (
    ALL_ROWS,
    Arguments,
    drop,
    fetch,
    id_list,
    may_leave_something,
    run,
    send,
)
from outboxio.storage.mysql.flavour import Server, for_flavours
from outboxio.storage.mysql.insertion import (
    CONSUME,
    CONSUME_ONE,
    CONSUMED,
    CONSUMED_ONE,
    FIND_CONSUMED,
    consumed_parameters,
    consumed_rows,
    insertions,
    received_insertions,
    refusal_of,
)
from outboxio.storage.mysql.values import NO_BACKSLASH_ESCAPES, as_json, as_moment, as_rows, as_value, escape_of
from outboxio.storage.protocols import CommitLost, ConsumeResult, NewNotification, SessionUnit, TransactionLost
from outboxio.storage.transaction_endings import IMPLICIT_COMMITS, MYSQL, MYSQL_NOT_ESCAPING

# Decision 9. A transaction can end behind the session's back: by a deadlock (the action swallowed the error), by CREATE
# TABLE, by a COMMIT inside a procedure. The server would then commit each further statement by itself. A savepoint
# reveals the end, because the savepoints of a transaction end with the transaction:
# * RELEASE_SAVEPOINT, in a message with COMMIT, fails unless the transaction of SET_SAVEPOINT is still open. Released
#   earlier, the savepoint would take the savepoints of the application behind it along.
# * IS_OPEN fails without any transaction, because the server forgets a savepoint outside of a transaction at once.
# * While every message was a single statement that reads or changes rows, and no statement failed, the transaction
#   cannot have ended: no savepoint is set yet.
BEGIN = "START TRANSACTION"
BEGIN_READING = b"START TRANSACTION READ ONLY"
SET_SAVEPOINT = "SAVEPOINT outboxio"
RELEASE_SAVEPOINT = "RELEASE SAVEPOINT outboxio"
IS_OPEN = "SAVEPOINT outboxio_open; RELEASE SAVEPOINT outboxio_open"
_NO_SUCH_SAVEPOINT = 1305

_COMMITS = re.compile(rf"\s*+({IMPLICIT_COMMITS})", re.IGNORECASE)

# A function or a trigger that such a statement calls may not commit either. Behind a semicolon there may be a second
# statement.
_READS_OR_CHANGES_ROWS = re.compile(r"\s*(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH)\b[^;]*\Z", re.IGNORECASE)

# Locked rows are skipped: two processes that claim at once still have a single effect. FORCE INDEX: a planner with old
# statistics of a small table would scan the table, and lock every row under REPEATABLE READ.
CLAIM = """
SELECT n.id, n.errors FROM eventlog.event_notifications n FORCE INDEX (PRIMARY)
WHERE n.id IN ({ids}) AND FIND_IN_SET(n.state, %s) {all_rows} FOR UPDATE SKIP LOCKED
"""
FINISH = """
UPDATE eventlog.event_notifications n FORCE INDEX (PRIMARY)
SET n.state = %s, n.attempts = %s, n.updated_date = %s WHERE n.id IN ({ids})
"""

# As fan-out makes notifications, but for the columns that the application decides. No process can have made any before:
# the event belongs to this transaction.
_INTO, _SELECT = notifications_of({
    "id": "o.id", "event_id": "e.id", "handler_name": "o.handler_name", "state": "o.state", "attempts": "o.attempts",
    "next_retry_at": "o.next_retry_at", "created_date": "%(now)s", "updated_date": "%(now)s",
    "ordering_key": "o.ordering_key", "priority": "o.priority", "errors": "o.errors",
    "partition_number": partition_of("e.namespace", "o.handler_name", "o.ordering_key", "e.id"),
    "retention_from": "GREATEST(COALESCE(e.available_at, %(now)s), %(now)s)",
})  # fmt: skip
INSERT_NOTIFICATIONS = for_flavours(f"""
{_INTO}
{_SELECT}
FROM JSON_TABLE(%(owed)s, '$[*]' COLUMNS (
  id {{id}} PATH '$[0]', handler_name {{text}} PATH '$[1]', state {{text}} PATH '$[2]', attempts INT PATH '$[3]',
  next_retry_at DATETIME(6) PATH '$[4]', errors {{document}} PATH '$[5]',
  ordering_key {{text}} PATH '$[6]', priority INT PATH '$[7]')) o
STRAIGHT_JOIN eventlog.events e FORCE INDEX (PRIMARY) ON e.id = %(event_id)s
""")
DELIVER = "UPDATE eventlog.events e FORCE INDEX (PRIMARY) SET e.delivered = TRUE WHERE e.id = %(event_id)s"


class MysqlSession(Consuming):
    """A transaction on a connection: a connection of ours, or the application's own with an open transaction.

    On a connection of ours, BEGIN may travel together with the first statement of the application (decision 13).
    """

    _last_words: Sequence[str] = ("COMMIT",)
    """The statements that end the transaction, in a message with our last statements."""

    def __init__(self, connection: Any, server: Server, *, is_given: bool = False) -> None:
        """``is_given``: the application gave the connection, with a transaction that is not ours to begin or end."""
        self._connection = connection
        self._server = server
        self._is_given = is_given
        self._is_to_begin = False
        """True until BEGIN, which travels with the next statement."""
        self._has_savepoint = True  # no transaction of ours yet, or the application's own: no savepoint is needed
        self._may_have_ended = False
        """True after a statement that failed: the server may have rolled back."""
        self._is_over = False
        self._has_run = False
        self._is_running = self._is_too_long = False
        self.may_have_left_something = False
        """True if a statement of the action may have changed the session of the connection."""

    @property
    def unit(self) -> SessionUnit | None:
        return None

    @property
    def connection(self) -> Any:
        self.may_have_left_something = True
        if not self._has_savepoint:  # the application's next statement follows on the same connection
            driver.send_ahead(self._connection, _joined(*self._opening()))
        return self._connection

    @property
    def driver_connection(self) -> Any:
        """The driver's connection as it is. :attr:`connection` prepares it for the application's next statement."""
        return self._connection

    async def begin(self, *, soon: bool = False) -> None:
        self._is_to_begin, self._has_savepoint = True, False
        if not (soon and driver.can_send_ahead(self._connection)):
            await self._set_savepoint()

    async def begin_reading(self) -> None:
        try:
            await send(self._connection, self._server, BEGIN_READING)
        except BaseException:
            self.discard()  # the transaction may have begun or not
            raise

    async def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> None:
        if action is not None and events:
            messages = self._insertions(action, events, ends=True)
        elif self._is_to_begin:
            self._is_to_begin = False
            return  # the action ran no statement
        else:
            messages = [_joined(*self._opening(ends=True), *self._last_words)]
        try:
            await send(self._connection, self._server, *filter(None, messages))
            await self._end()
        except Exception as error:
            if (refusal := self._refusal_of(error, action)) is not None:
                raise refusal from error
            if errors.is_unreachable(error) and not errors.is_read_only(error):  # read only: the server rolled back
                raise CommitLost from error
            raise

    async def _end(self) -> None:
        """End a transaction that :attr:`_last_words` do not end."""

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        await self._send_insertions(action, self._insertions(action, events, ends=False))

    async def _send_insertions(self, action: ActionRecord, messages: Sequence[bytes]) -> None:
        try:
            await send(self._connection, self._server, *messages)
        except Exception as error:
            if (refusal := self._refusal_of(error, action)) is not None:
                raise refusal from error
            raise

    async def rollback(self) -> None:
        if self._is_to_begin:
            self._is_to_begin = False
        elif self._is_running:
            # A task that the action left behind still waits for an answer, and would take the answer of ROLLBACK.
            self.discard()
        elif not driver.is_closed(self._connection):
            await run(self._connection, "ROLLBACK", timeout=10)

    def discard(self) -> None:
        drop(self._connection)

    def in_transaction(self) -> bool:
        if not self._is_over and (
            self._is_to_begin
            or self._connection.get_transaction_status()
            or driver.has_unread(self._connection)
            or (self._is_given and not self._connection.get_autocommit())
        ):
            return True
        return driver.is_closed(self._connection)  # then the next statement raises the driver's own error

    def would_end(self, sql: str) -> str | None:
        # As the first statement such a statement commits no rows; the statements behind are refused.
        if self._has_run and (words := _COMMITS.match(sql)) is not None:
            return words[1]
        if (ending := MYSQL.ending_in(sql, has_run=self._has_run)) is None and "\\" not in sql:
            return None
        escapes = not self._connection.server_status & NO_BACKSLASH_ESCAPES
        return ending if escapes else MYSQL_NOT_ESCAPING.ending_in(sql, has_run=self._has_run)

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
        await self._set_savepoint()
        rows = await fetch(self._connection, CLAIM.format(ids=id_list(ids), all_rows=ALL_ROWS), (",".join(states),))
        return {UUID(row[0]): row[1] for row in rows}

    async def finish(self, ids: Sequence[UUID], state: str, attempts: int, now: datetime) -> None:
        if ids:
            await self._set_savepoint()
            await run(self._connection, FINISH.format(ids=id_list(ids)), (state, attempts, now))

    async def insert_notifications(self, event_id: UUID, owed: Sequence[NewNotification], now: datetime) -> None:
        listed = as_json(
            (
                o.id, o.handler_name, o.state, o.attempts, as_moment(o.next_retry_at), o.errors, o.ordering_key,
                o.priority,
            )
            for o in sorted(owed, key=lambda o: o.id)
        )  # fmt: skip
        args = {"event_id": str(event_id), "owed": listed, "now": as_value(now)}
        statements = f"{self._server.spell(INSERT_NOTIFICATIONS)}; {DELIVER}" if owed else DELIVER
        opening = () if self._is_given else self._opening()
        await self._run_in_transaction("; ".join([*opening, statements]), args)

    async def insert_received(self, received: Sequence[ReceivedEvent]) -> None:
        rows = received_insertions(received, escape_of(self._connection), self._server.largest_packet)
        await self._send_insertions(received[0][0], self._in_messages(list(rows)))

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        # A single row is the common case, and costs half as much without a JSON_TABLE.
        await self._set_savepoint()
        key = (consumed.source, consumed.external_id, consumed.handler_name)
        rest = (str(consumed.event_id), consumed.payload_hash, consumed.consumed_date)
        await run(self._connection, CONSUME_ONE, (*key, *rest))
        [row] = consumed_rows(await fetch(self._connection, CONSUMED_ONE, key))
        return row

    async def _consume(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        await self._set_savepoint()
        parameters = consumed_parameters(consumed)
        await run(self._connection, self._server.spell(CONSUME), parameters)
        return consumed_rows(await fetch(self._connection, self._server.spell(CONSUMED), parameters))

    async def _find_consumed(self, wanted: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        await self._set_savepoint()
        sql = self._server.spell(FIND_CONSUMED)
        return consumed_rows(await fetch(self._connection, sql, consumed_parameters(wanted)))

    def _insertions(self, action: ActionRecord, events: Sequence[EventRecord], *, ends: bool) -> list[bytes]:
        """The messages that write the rows of an action; with ``ends``, the last message commits."""
        messages = list(insertions(action, events, escape_of(self._connection), self._server.largest_packet))
        return self._in_messages(messages, ends=ends)

    def _in_messages(self, messages: list[bytes], *, ends: bool = False) -> list[bytes]:
        if not self._is_given:
            messages[0] = _joined(*self._opening(ends=ends and len(messages) == 1), messages[0])
            if ends and len(messages) > 1:
                messages[-1] = _joined(*self._opening(ends=True), messages[-1])
            if ends:
                messages[-1] = _joined(messages[-1], *self._last_words)
        return messages

    def _refusal_of(self, error: Exception, action: ActionRecord | None) -> Exception | None:
        """The error to raise in place of the driver's, if the transaction has ended or the rows are too large."""
        if errors.number(error) == _NO_SUCH_SAVEPOINT:
            return TransactionLost()
        return None if action is None else refusal_of(error, action, self._server)

    def _opening(self, *, ends: bool = False) -> list[str]:
        """The statements in front of our own in a message: begin the transaction, or prove that there is a transaction.

        The opening sets the savepoint as well, unless the transaction ``ends`` in this message.
        """
        if self._is_to_begin:
            opening = [BEGIN]
        elif ends:
            opening = [RELEASE_SAVEPOINT] if self._has_savepoint else [IS_OPEN] if self._may_have_ended else []
        else:
            opening = [IS_OPEN]
        if not (ends or self._has_savepoint):
            opening.append(SET_SAVEPOINT)
        self._is_to_begin = self._may_have_ended = False
        self._has_savepoint = not ends
        return opening

    async def _set_savepoint(self) -> None:
        """Set the savepoint, unless there is one already; before, begin the transaction that is still to begin."""
        if not self._has_savepoint:
            try:
                await send(self._connection, self._server, _joined(*self._opening()))
            except BaseException:
                self.discard()  # the transaction may have begun or not
                raise

    async def _run_in_transaction(self, statements: str, args: Arguments = None) -> None:
        """Run statements behind IS_OPEN. Raises :class:`TransactionLost` if the transaction has ended."""
        try:
            await run(self._connection, statements, args)
        except Exception as error:
            if errors.number(error) == _NO_SUCH_SAVEPOINT:
                raise TransactionLost from error
            raise

    def _literal(self, value: Any) -> str:
        if isinstance(value, bytes | bytearray):
            return f"X'{value.hex()}'"
        literal: str = self._connection.escape(as_value(value))
        return literal

    async def _run(self, sql: str, args: Sequence[Any]) -> tuple[int, list[str], Sequence[Any]]:
        """Run a string of the application: the number of rows, the names of the columns, and the rows.

        Of several statements, the result is that of the first. All answers are read, because any of the statements may
        end the transaction.
        """
        # As the driver fills in values, except for bytes, which some versions of the driver cannot write. Without
        # arguments a percent sign is a percent sign.
        statement = sql % tuple(map(self._literal, args)) if args else sql
        longest = self._server.longest_statement
        self._is_running = True
        if longest is not None:
            longest.begin(self, MysqlSession._end_statement)
        try:
            if self._may_have_ended:  # without a transaction the server would commit the statement by itself
                await self._run_in_transaction(IS_OPEN)
                self._may_have_ended = False
            before = self._before(sql)
            if before and len(statement) > self._server.largest_packet // 8:
                await self._set_savepoint()  # a message may be too small for all
                before = []
            self._is_to_begin, self._has_savepoint = False, self._has_savepoint or SET_SAVEPOINT in before
            self._has_run = True
            self.may_have_left_something = self.may_have_left_something or may_leave_something(sql)
            cursor = driver.cursor(self._connection, driver.Cursor)
            await cursor.execute("; ".join([*before, statement]) if before else statement)
            for _ in before:
                await cursor.nextset()
            columns = [column[0] for column in cursor.description or ()]
            found = int(cursor.rowcount), columns, driver.rows(cursor) if columns else ()
            while await cursor.nextset():
                pass
        except BaseException as error:
            self._may_have_ended, self._is_over = True, self._is_over or errors.rolled_back(error)
            if self._is_too_long and isinstance(error, Exception):
                raise TimeoutError("a statement took longer than action_statement_timeout; it was given up") from error
            raise
        finally:
            self._is_running = False
            if longest is not None:
                longest.end(self)
        return found

    def _end_statement(self) -> None:
        self._is_too_long = True
        self.discard()

    def _before(self, sql: str) -> list[str]:
        """The statements in front of a statement of the application, in a single message."""
        before = [BEGIN] if self._is_to_begin else []
        if not (self._has_savepoint or _READS_OR_CHANGES_ROWS.match(sql)):
            before.append(SET_SAVEPOINT)
        return before


def _joined(*statements: str | bytes) -> bytes:
    return b"; ".join(statement.encode() if isinstance(statement, str) else statement for statement in statements)


async def give_back(pool: Any, connection: Any) -> None:
    """Give a connection back to a given pool.

    aiomysql wakes no task when the pool takes back a connection that is lost. Without free connections the waiting
    tasks would wait for ever, so ``clear`` wakes the tasks.
    """
    await pool.release(connection)
    if driver.is_closed(connection) and not pool.freesize:
        await pool.clear()
