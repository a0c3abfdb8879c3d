"""The one writing connection, checked out for one transaction of the application; and a caller's own connection."""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol
from uuid import UUID

import msgspec

from outboxio.errors import TransactionError
from outboxio.event import ActionRecord, EventRecord
from outboxio.storage.protocols import Consumed, Owed
from outboxio.storage.sqlite.connection import Connections, Parameters, Work, begin, fetch_value, roll_back
from outboxio.storage.sqlite.values import as_json, as_parameters, as_text

# One statement however many events there are, so that a caller who catches its error has all of them or none.
# json_each takes the list apart in order, which is the order in which the rows are numbered.
INSERT_EVENTS = """
INSERT INTO eventlog_events (id, namespace, action_id, action_name, action_params, started_date, completion_date,
    model_id, model_type, event_type, payload, event_date, delivered, ordering_key, topic, source, correlation_id,
    causation_id, headers, available_at, hops)
SELECT json_extract(value, '$[0]'), :namespace, :action_id, :action_name, :action_params, :started_date,
    :completion_date, json_extract(value, '$[1]'), json_extract(value, '$[2]'), json_extract(value, '$[3]'),
    json_extract(value, '$[4]'), :completion_date, FALSE, json_extract(value, '$[5]'), json_extract(value, '$[6]'),
    :source, :correlation_id, :causation_id, :headers, json_extract(value, '$[7]'), :hops
FROM json_each(:events)
"""


# Whoever has begun to write is the only one, so there is nothing to lock. The index is SQLite's own of the ids.
CLAIM = """
SELECT json_group_object(id, errors)
FROM eventlog_event_notifications INDEXED BY sqlite_autoindex_eventlog_event_notifications_1
WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN (SELECT value FROM json_each(:states))
"""
FINISH = """
UPDATE eventlog_event_notifications INDEXED BY sqlite_autoindex_eventlog_event_notifications_1
SET state = :state, attempts = :attempts, updated_date = :now WHERE id IN (SELECT value FROM json_each(:ids))
"""

OWE = """
INSERT INTO eventlog_event_notifications (id, event_id, handler_name, namespace, action_id, action_name,
  action_params, started_date, completion_date, model_id, model_type, event_type, payload, event_date, state,
  attempts, next_retry_at, created_date, updated_date, sequence, ordering_key, priority, errors, correlation_id,
  causation_id, headers, hops, retention_from)
SELECT json_extract(o.value, '$[0]'), e.id, json_extract(o.value, '$[1]'), e.namespace, e.action_id, e.action_name,
  e.action_params, e.started_date, e.completion_date, e.model_id, e.model_type, e.event_type, e.payload, e.event_date,
  json_extract(o.value, '$[2]'), json_extract(o.value, '$[3]'), json_extract(o.value, '$[4]'), :now, :now, e.sequence,
  json_extract(o.value, '$[6]'), json_extract(o.value, '$[7]'), json_extract(o.value, '$[5]'), e.correlation_id,
  e.causation_id, e.headers, e.hops, max(coalesce(e.available_at, :now), :now)
FROM json_each(:owed) o CROSS JOIN eventlog_events e INDEXED BY sqlite_autoindex_eventlog_events_1
WHERE e.id = :event_id
"""
MARK_DELIVERED = """
UPDATE eventlog_events INDEXED BY sqlite_autoindex_eventlog_events_1 SET delivered = TRUE WHERE id = :event_id
"""


CONSUME = """
INSERT INTO eventlog_consumed_events (source, external_id, handler_name, event_id, payload_hash, consumed_date)
VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (source, external_id, handler_name) DO NOTHING
"""
CONSUMED = """
SELECT event_id, payload_hash, consumed_date FROM eventlog_consumed_events
WHERE source = ? AND external_id = ? AND handler_name = ?
"""
SEEN = """
SELECT source, external_id, handler_name, event_id, payload_hash, consumed_date FROM eventlog_consumed_events
WHERE source = ? AND external_id = ? AND handler_name IN (SELECT value FROM json_each(?))
"""


def event_parameters(action: ActionRecord, events: Sequence[EventRecord]) -> dict[str, Any]:
    """The parameters of ``INSERT_EVENTS``."""
    return {
        "namespace": action.namespace,
        "action_id": str(action.action_id),
        "action_name": action.action_name,
        "action_params": action.action_params,
        "started_date": as_text(action.started_date),
        "completion_date": as_text(action.completion_date),
        "source": action.source,
        "correlation_id": action.correlation_id,
        "causation_id": None if action.causation_id is None else str(action.causation_id),
        "headers": action.headers,
        "hops": action.hops,
        "events": as_json(
            (
                event.id,
                event.model_id,
                event.model_type,
                event.event_type,
                event.payload,
                event.ordering_key,
                event.topic,
                None if event.available_at is None else as_text(event.available_at),
            )
            for event in events
        ),
    }


def owed_parameters(event_id: UUID, owed: Sequence[Owed], now: datetime) -> dict[str, Any]:
    """The parameters of ``OWE`` and of ``MARK_DELIVERED``."""
    rows = as_json(
        (o.id, o.handler_name, o.state, o.attempts, as_text(o.next_retry_at), o.errors, o.ordering_key, o.priority)
        for o in owed
    )
    return {"event_id": str(event_id), "owed": rows, "now": as_text(now)}


class SqliteSession:
    """One transaction on the writing connection.

    It may begin with its first statement, and ends with its last one, in one way to the thread each. As soon as the
    last one is handed over the next transaction has its turn: the thread does everything in order.
    """

    def __init__(self, writer: Writer, pass_on: Callable[[], None], discard: Callable[[], None]) -> None:
        self._writer = writer
        self._pass_on = pass_on
        self._discard = discard
        self._connection: Any = None
        self._is_to_begin = False
        self.is_open = False
        """Whether something was begun, or may have been, and was not ended."""

    @property
    def connection(self) -> Any:
        if self._is_to_begin:
            # Whoever asks for it uses it at once, and blocks the event loop with it anyway.
            self._is_to_begin, self.is_open = False, True
            self._connection = self._writer.run_at_once(begin)
        return self._connection

    async def begin(self, *, soon: bool = False) -> None:
        self._is_to_begin = True
        if not soon:
            await self._run(lambda connection: None)

    def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> Awaitable[None]:
        parameters = None if action is None or not events else event_parameters(action, events)
        if self._is_to_begin and parameters is None:
            self._is_to_begin = False
            return _nothing_was_done()
        ended = self._hand_over(lambda connection: _end(connection, parameters))
        self.is_open = False
        self._pass_on()
        return ended

    async def rollback(self) -> None:
        if self.is_open:
            await self._run(roll_back)
        self._is_to_begin = self.is_open = False

    def discard(self) -> None:
        if self.is_open:
            self._discard()

    def in_transaction(self) -> bool:
        if not self.is_open:
            return self._is_to_begin  # what the connection does now is another's
        return self._connection is not None and bool(self._connection.in_transaction)

    def would_commit(self, sql: str) -> str | None:
        return None  # CREATE and its like are part of the transaction

    async def execute(self, sql: str, args: Sequence[Any]) -> int:
        parameters = as_parameters(sql, args)
        return int(await self._run(lambda connection: _execute(connection, sql, parameters)))

    async def fetch(self, sql: str, args: Sequence[Any]) -> list[Any]:
        parameters = as_parameters(sql, args)
        return list(await self._run(lambda connection: _fetch(connection, sql, parameters)))

    async def fetchrow(self, sql: str, args: Sequence[Any]) -> Any | None:
        parameters = as_parameters(sql, args)
        return await self._run(lambda connection: _fetch_first(connection, sql, parameters))

    async def claim(self, ids: Sequence[UUID], states: Sequence[str]) -> dict[UUID, str]:
        values = {"ids": as_json(ids), "states": as_json(states)}
        claimed = await self._run(lambda connection: fetch_value(connection, CLAIM, values))
        return msgspec.json.decode(claimed, type=dict[UUID, str])

    async def finish(self, ids: Sequence[UUID], state: str, attempts: int, now: datetime) -> None:
        values = {"ids": as_json(ids), "state": state, "attempts": attempts, "now": as_text(now)}
        await self._run(lambda connection: connection.execute(FINISH, values))

    async def owe(self, event_id: UUID, owed: Sequence[Owed], now: datetime) -> None:
        parameters = owed_parameters(event_id, owed, now)
        await self._run(lambda connection: connection.execute(OWE, parameters))
        await self._run(lambda connection: connection.execute(MARK_DELIVERED, parameters))

    async def consume(self, consumed: Consumed) -> Consumed:
        key = (consumed.source, consumed.external_id, consumed.handler_name)
        rest = (str(consumed.event_id), consumed.payload_hash, as_text(consumed.consumed_date))
        row = await self._run(lambda connection: _consume(connection, key, rest))
        return Consumed(*key, UUID(row[0]), row[1], datetime.fromisoformat(row[2]))

    async def consumed(self, source: str, external_id: str, handler_names: Sequence[str]) -> list[Consumed]:
        key = (source, external_id, as_json(handler_names))
        rows = await self._run(lambda connection: connection.execute(SEEN, key).fetchall())
        return [
            Consumed(source, external_id, name, UUID(event_id), payload_hash, datetime.fromisoformat(moment))
            for _, _, name, event_id, payload_hash, moment in rows
        ]

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        parameters = event_parameters(action, events)
        await self._run(lambda connection: connection.execute(INSERT_EVENTS, parameters))

    async def _run(self, work: Work[Any]) -> Any:
        return await self._hand_over(work)

    def _hand_over(self, work: Work[Any]) -> Awaitable[Any]:
        begins, self._is_to_begin = self._is_to_begin, False
        self.is_open = True

        def within(connection: sqlite3.Connection) -> Any:
            if begins:
                self._connection = begin(connection)
            # Always on the connection that began, never on one that has taken its place.
            return work(connection if self._connection is None else self._connection)

        return self._writer.hand_over(within)


class CheckedOutSession:
    """Takes the writer's turn, and gives it on with no transaction open, whatever happened meanwhile."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._session = SqliteSession(connections.writer, self._pass_on, connections.discard_writer)
        self._has_turn = False

    async def __aenter__(self) -> SqliteSession:
        await self._connections.turn.take()
        self._has_turn = True
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._session.is_open:
                # Even if this is cancelled, the thread does it before anything that comes after.
                await self._connections.writer.run(roll_back)
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._connections.turn.pass_on()


class Writer(Protocol):
    """What runs statements on a connection: a thread of its own."""

    def hand_over(self, work: Work[Any]) -> Awaitable[Any]: ...

    def run_at_once(self, work: Work[Any]) -> Any: ...


class _Callers:
    """A caller's own connection is the caller's: nothing is begun on it, and nothing ended."""

    async def hand_over(self, work: Work[Any]) -> Any:
        raise TransactionError("the transaction on a caller's own connection is the caller's to use and to end")

    run_at_once = hand_over


class CallersSession(SqliteSession):
    """A caller's own ``sqlite3`` or ``aiosqlite`` connection: what is ours is written on it, and nothing else."""

    def __init__(self, connection: Any) -> None:
        super().__init__(_Callers(), _nothing, _nothing)
        self._connection = connection
        self.is_open = True

    async def consume(self, consumed: Consumed) -> Consumed:
        key = (consumed.source, consumed.external_id, consumed.handler_name)
        rest = (str(consumed.event_id), consumed.payload_hash, as_text(consumed.consumed_date))
        await _awaited((await _awaited(self._connection.execute(CONSUME, (*key, *rest)))).close())
        cursor = await _awaited(self._connection.execute(CONSUMED, key))
        row = tuple(await _awaited(cursor.fetchone()))
        await _awaited(cursor.close())
        return Consumed(*key, UUID(row[0]), row[1], datetime.fromisoformat(row[2]))

    async def owe(self, event_id: UUID, owed: Sequence[Owed], now: datetime) -> None:
        parameters = owed_parameters(event_id, owed, now)
        for statement in (OWE, MARK_DELIVERED):
            await _awaited((await _awaited(self._connection.execute(statement, parameters))).close())

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        cursor = await _awaited(self._connection.execute(INSERT_EVENTS, event_parameters(action, events)))
        await _awaited(cursor.close())


def is_connection(connection: object) -> bool:
    """Whether it is a connection of sqlite3, or of aiosqlite, which need not be installed."""
    return isinstance(connection, sqlite3.Connection) or any(
        f"{cls.__module__}.{cls.__qualname__}" == "aiosqlite.core.Connection" for cls in type(connection).__mro__
    )


def _end(connection: sqlite3.Connection, events: Parameters | None) -> None:
    """Write events, and commit; or roll back, for the next transaction comes right behind this."""
    try:
        if events is not None:
            connection.execute(INSERT_EVENTS, events)
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # then it is done when the next one begins
            roll_back(connection)
        raise


def _consume(connection: sqlite3.Connection, key: tuple[str, ...], rest: tuple[str, ...]) -> tuple[str, str, str]:
    connection.execute(CONSUME, (*key, *rest))
    found: tuple[str, str, str] = connection.execute(CONSUMED, key).fetchone()
    return found


def _execute(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> int:
    before = connection.total_changes
    cursor = connection.execute(sql, parameters)
    returned = len(cursor.fetchall())  # RETURNING counts, and ends, with its last row
    if cursor.rowcount >= 0:
        return cursor.rowcount
    # sqlite3 counts for statements that begin with INSERT, UPDATE, DELETE or REPLACE; WITH may lead to one of them.
    return returned if connection.total_changes == before else int(fetch_value(connection, "SELECT changes()", ()))


def _fetch(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> list[Any]:
    return _with_names(connection).execute(sql, parameters).fetchall()


def _fetch_first(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> Any | None:
    cursor = _with_names(connection)
    try:
        return cursor.execute(sql, parameters).fetchone()
    finally:
        cursor.close()  # a statement that is not at its end would hold up COMMIT


def _with_names(connection: sqlite3.Connection) -> sqlite3.Cursor:
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor


async def _awaited(value: Any) -> Any:
    """What aiosqlite has to be waited for, and sqlite3 has at once."""
    return await value if inspect.isawaitable(value) else value


async def _nothing_was_done() -> None:
    return None


def _nothing() -> None:
    return None
