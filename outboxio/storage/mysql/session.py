"""The transactions of actions on MySQL and MariaDB, on connections of aiomysql or asyncmy."""

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
    may_change_session,
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
from outboxio.storage.mysql.values import NO_BACKSLASH_ESCAPES, as_json, as_rows, as_timestamp, as_value, escape_of
from outboxio.storage.protocols import CommitLost, ConsumeResult, NewNotification, SessionUnit, TransactionLost
from outboxio.storage.transaction_endings import IMPLICIT_COMMITS, MYSQL, MYSQL_NOT_ESCAPING

# Decision 9. A transaction can end unnoticed: by a deadlock (if the action suppressed the error), by CREATE TABLE, or
# by a COMMIT inside a procedure. The server would then commit each further statement by itself. A savepoint detects
# this, because savepoints end with their transaction:
# * RELEASE_SAVEPOINT, in a message with COMMIT, fails unless the transaction of SET_SAVEPOINT is still open. Releasing
#   it earlier would also release the later savepoints of your application.
# * IS_OPEN fails without a transaction, because then the server discards a savepoint immediately.
# * As long as every message is a single statement that reads or changes rows, and none has failed, the transaction
#   cannot have ended, so no savepoint is set.
BEGIN = "START TRANSACTION"
BEGIN_READING = b"START TRANSACTION READ ONLY"
SET_SAVEPOINT = "SAVEPOINT outboxio"
RELEASE_SAVEPOINT = "RELEASE SAVEPOINT outboxio"
IS_OPEN = "SAVEPOINT outboxio_open; RELEASE SAVEPOINT outboxio_open"
_NO_SUCH_SAVEPOINT = 1305

_COMMITS = re.compile(rf"\s*+({IMPLICIT_COMMITS})", re.IGNORECASE)

# Functions and triggers that such a statement calls cannot commit either. After a semicolon, a second statement may
# follow.
_READS_OR_CHANGES_ROWS = re.compile(r"\s*(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH)\b[^;]*\Z", re.IGNORECASE)

# Rows that another process has locked are skipped, so that an effect happens once. FORCE INDEX: with statistics from
# when the table was small, the planner would scan the table, and lock every row under REPEATABLE READ.
CLAIM = """
SELECT n.id, n.errors FROM eventlog.event_notifications n FORCE INDEX (PRIMARY)
WHERE n.id IN ({ids}) AND FIND_IN_SET(n.state, %s) {all_rows} FOR UPDATE SKIP LOCKED
"""
FINISH = """
UPDATE eventlog.event_notifications n FORCE INDEX (PRIMARY)
SET n.state = %s, n.attempts = %s, n.updated_date = %s WHERE n.id IN ({ids})
"""

# Like the notifications of fan-out, except for the columns that the caller sets. No other process can have created them
# yet, because the event was written by this transaction.
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
    """A transaction on a connection of outboxio's pool, of a user-supplied pool or engine, or of the caller.

    Unless it is the caller's transaction, BEGIN may be sent together with the first statement of the action (decision
    13).
    """

    _ending: Sequence[str] = ("COMMIT",)
    """The statements that end the transaction, in a message with outboxio's last statements."""

    def __init__(self, connection: Any, server: Server, *, is_callers: bool = False) -> None:
        """``is_callers``: the caller passed the connection, and begins and ends the transaction."""
        self._connection = connection
        self._server = server
        self._is_callers = is_callers
        self._is_to_begin = False
        """True until BEGIN, which is sent with the next statement."""
        self._has_savepoint = True  # no savepoint is needed before begin(), or in the caller's transaction
        self._may_have_ended = False
        """True after a statement failed: the server may have rolled back."""
        self._is_over = False
        self._has_run = False
        self._is_running = self._has_timed_out = False
        self.may_have_changed_session = False
        """True if a statement of the action may have changed the state of the session."""

    @property
    def unit(self) -> SessionUnit | None:
        return None

    @property
    def connection(self) -> Any:
        self.may_have_changed_session = True
        if not self._has_savepoint:  # the action's next statement follows on the same connection
            driver.send_ahead(self._connection, _joined(*self._opening()))
        return self._connection

    @property
    def driver_connection(self) -> Any:
        """The driver's connection, without the side effects of :attr:`connection`."""
        return self._connection

    async def begin(self, *, soon: bool = False) -> None:
        self._is_to_begin, self._has_savepoint = True, False
        if not (soon and driver.can_send_ahead(self._connection)):
            await self._set_savepoint()

    async def begin_reading(self) -> None:
        try:
            await send(self._connection, self._server, BEGIN_READING)
        except BaseException:
            self.discard()  # the transaction may have begun
            raise

    async def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> None:
        if action is not None and events:
            messages = self._insertions(action, events, ends=True)
        elif self._is_to_begin:
            self._is_to_begin = False
            return  # the action ran no statement
        else:
            messages = [_joined(*self._opening(ends=True), *self._ending)]
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
        """End a transaction that :attr:`_ending` do not end."""

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
            # A task that the action did not await still waits for a response, and would read that of ROLLBACK.
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
            or (self._is_callers and not self._connection.get_autocommit())
        ):
            return True
        return driver.is_closed(self._connection)  # then the next statement raises the driver's own error

    def would_end(self, sql: str) -> str | None:
        # As the first statement, such a statement commits no rows, and those that follow are rejected.
        if self._has_run and (commit := _COMMITS.match(sql)) is not None:
            return commit[1]
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
                o.id, o.handler_name, o.state, o.attempts, as_timestamp(o.next_retry_at), o.errors, o.ordering_key,
                o.priority,
            )
            for o in sorted(owed, key=lambda o: o.id)
        )  # fmt: skip
        args = {"event_id": str(event_id), "owed": listed, "now": as_value(now)}
        statements = f"{self._server.sql_for(INSERT_NOTIFICATIONS)}; {DELIVER}" if owed else DELIVER
        opening = () if self._is_callers else self._opening()
        await self._run_in_transaction("; ".join([*opening, statements]), args)

    async def insert_received(self, received: Sequence[ReceivedEvent]) -> None:
        rows = received_insertions(received, escape_of(self._connection), self._server.largest_packet)
        await self._send_insertions(received[0][0], self._in_messages(list(rows)))

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        # A single row is the common case, and takes half as long without a JSON_TABLE.
        await self._set_savepoint()
        key = (consumed.source, consumed.external_id, consumed.handler_name)
        values = (str(consumed.event_id), consumed.payload_hash, consumed.consumed_date)
        await run(self._connection, CONSUME_ONE, (*key, *values))
        [row] = consumed_rows(await fetch(self._connection, CONSUMED_ONE, key))
        return row

    async def _consume(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        await self._set_savepoint()
        parameters = consumed_parameters(consumed)
        await run(self._connection, self._server.sql_for(CONSUME), parameters)
        return consumed_rows(await fetch(self._connection, self._server.sql_for(CONSUMED), parameters))

    async def _find_consumed(self, keys: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        await self._set_savepoint()
        sql = self._server.sql_for(FIND_CONSUMED)
        return consumed_rows(await fetch(self._connection, sql, consumed_parameters(keys)))

    def _insertions(self, action: ActionRecord, events: Sequence[EventRecord], *, ends: bool) -> list[bytes]:
        """Return the messages that insert the events of an action; with ``ends``, the last message commits."""
        messages = list(insertions(action, events, escape_of(self._connection), self._server.largest_packet))
        return self._in_messages(messages, ends=ends)

    def _in_messages(self, messages: list[bytes], *, ends: bool = False) -> list[bytes]:
        if not self._is_callers:
            messages[0] = _joined(*self._opening(ends=ends and len(messages) == 1), messages[0])
            if ends and len(messages) > 1:
                messages[-1] = _joined(*self._opening(ends=True), messages[-1])
            if ends:
                messages[-1] = _joined(messages[-1], *self._ending)
        return messages

    def _refusal_of(self, error: Exception, action: ActionRecord | None) -> Exception | None:
        """Return the error to raise instead of the driver's if the transaction has ended or the rows are too large."""
        if errors.number(error) == _NO_SUCH_SAVEPOINT:
            return TransactionLost()
        return None if action is None else refusal_of(error, action, self._server)

    def _opening(self, *, ends: bool = False) -> list[str]:
        """Return the statements at the start of a message: they begin the transaction, or verify that it is open.

        They also set the savepoint, unless the transaction ``ends`` in this message.
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
        """Begin the transaction if that is still to be done, and set the savepoint unless there is one."""
        if not self._has_savepoint:
            try:
                await send(self._connection, self._server, _joined(*self._opening()))
            except BaseException:
                self.discard()  # the transaction may have begun
                raise

    async def _run_in_transaction(self, statements: str, args: Arguments = None) -> None:
        """Run statements that include IS_OPEN. Raises :class:`TransactionLost` if the transaction has ended."""
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
        """Run SQL of the action, and return the number of rows, the column names, and the rows.

        If there are several statements, the result is that of the first. All responses are read, because any statement
        may end the transaction.
        """
        # Values are substituted as in the driver, except for bytes, which some of its versions do not support. Without
        # arguments, percent signs need no escaping.
        statement = sql % tuple(map(self._literal, args)) if args else sql
        longest = self._server.action_statement_limit
        self._is_running = True
        if longest is not None:
            longest.begin(self, MysqlSession._on_timeout)
        try:
            if self._may_have_ended:  # without a transaction, the server would commit the statement by itself
                await self._run_in_transaction(IS_OPEN)
                self._may_have_ended = False
            before = self._before(sql)
            if before and len(statement) > self._server.largest_packet // 8:
                await self._set_savepoint()  # all of them may not fit into one message
                before = []
            self._is_to_begin, self._has_savepoint = False, self._has_savepoint or SET_SAVEPOINT in before
            self._has_run = True
            self.may_have_changed_session = self.may_have_changed_session or may_change_session(sql)
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
            if self._has_timed_out and isinstance(error, Exception):
                raise TimeoutError("a statement exceeded action_statement_timeout; its connection is closed") from error
            raise
        finally:
            self._is_running = False
            if longest is not None:
                longest.end(self)
        return found

    def _on_timeout(self) -> None:
        self._has_timed_out = True
        self.discard()

    def _before(self, sql: str) -> list[str]:
        """Return the statements to send in a message before a statement of the action."""
        before = [BEGIN] if self._is_to_begin else []
        if not (self._has_savepoint or _READS_OR_CHANGES_ROWS.match(sql)):
            before.append(SET_SAVEPOINT)
        return before


def _joined(*statements: str | bytes) -> bytes:
    return b"; ".join(statement.encode() if isinstance(statement, str) else statement for statement in statements)


async def release(pool: Any, connection: Any) -> None:
    """Release a connection to a user-supplied pool.

    aiomysql wakes no waiting task when a closed connection is released. Without free connections, the tasks would wait
    without limit, so ``clear`` wakes them.
    """
    await pool.release(connection)
    if driver.is_closed(connection) and not pool.freesize:
        await pool.clear()
