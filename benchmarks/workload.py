"""Create the events for every contestant inside the database: the same rows for outboxio and the bare pipelines.

The rows look as if an application's actions had written them: ids in the order of time, about twenty per millisecond,
with alternating types.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from outboxio import Event
from tests.kit import mysql
from tests.kit.app import Look

NAMESPACE = "bench"
PIECE = 100_000  # rows per transaction: more would create a long undo log

COLUMNS = (
    "id, namespace, action_id, action_name, action_params, started_date, completion_date, model_id, model_type, "
    "event_type, payload, event_date, delivered"
)
_NOTIFIED = (
    "id, event_id, handler_name, namespace, action_id, action_name, action_params, started_date, completion_date, "
    "model_id, model_type, event_type, payload, event_date, state, attempts, next_retry_at, created_date, "
    "updated_date, sequence, retention_from"
)
_COPIED = (
    "namespace, action_id, action_name, action_params, started_date, completion_date, model_id, model_type, "
    "event_type, payload, event_date"
)


class Deposited(Event):
    """The event, in each of its types."""

    model_id: str
    amount: int
    currency: str


def event_types(number: int) -> list[type[Event]]:
    """E0, E1 and so on."""
    return [type(Event)(f"E{i}", (Deposited,), {"__module__": __name__}, frozen=True) for i in range(number)]


# --- events ----------------------------------------------------------------------------------------

_FILL = {
    "postgres": """
INSERT INTO {table} ({columns})
SELECT {id}, 'bench', {action_id}, 'DepositMoney', jsonb_build_object('wallet_id', i::text, 'amount', i),
  {start}, {start}, i::text, 'Wallet', 'E' || (i % {types}),
  jsonb_build_object('model_id', i::text, 'amount', i, 'currency', 'EUR'), {start} + i * interval '1 us', {delivered}
FROM generate_series({first}, {first} + {number} - 1) AS i ORDER BY i
""",
    "mysql": """
INSERT INTO {table} ({columns})
WITH RECURSIVE d(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM d WHERE n < LEAST({number}, 1000) - 1)
SELECT {id}, 'bench', {action_id}, 'DepositMoney', JSON_OBJECT('wallet_id', CONCAT(i, ''), 'amount', i),
  {start}, {start}, i, 'Wallet', CONCAT('E', i % {types}),
  JSON_OBJECT('model_id', CONCAT(i, ''), 'amount', i, 'currency', 'EUR'), {start} + INTERVAL i MICROSECOND, {delivered}
FROM (SELECT {first} + a.n * 1000 + b.n AS i FROM d a STRAIGHT_JOIN d b
      WHERE a.n * 1000 < {number} AND a.n * 1000 + b.n < {number} ORDER BY i LIMIT {number}) AS numbers
""",
    "sqlite": """
INSERT INTO {table} ({columns})
WITH RECURSIVE numbers(i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM numbers WHERE i < {first} + {number} - 1)
SELECT {id}, 'bench', {action_id}, 'DepositMoney', json_object('wallet_id', i || '', 'amount', i),
  {start}, {start}, i || '', 'Wallet', 'E' || (i % {types}),
  json_object('model_id', i || '', 'amount', i, 'currency', 'EUR'),
  strftime('%Y-%m-%d %H:%M:%S', 'now') || printf('.%06d', i % 1000000), {delivered}
FROM numbers
""",
}
# 0199b3c50000 is a time in 2025, in milliseconds.
_ID = {
    "postgres": "(lpad(to_hex(x'0199b3c50000'::bigint + i / 20), 12, '0') || '{version}0008000' || "
    "lpad(to_hex(i), 12, '0'))::uuid",
    "mysql": "LOWER(CONCAT(LPAD(HEX((0x0199b3c50000 + i DIV 20) >> 16), 8, '0'), '-', "
    "LPAD(HEX((0x0199b3c50000 + i DIV 20) & 65535), 4, '0'), '-{version}000-8000-', LPAD(HEX(i), 12, '0')))",
    "sqlite": "printf('%08x-%04x-{version}000-8000-%012x', (1760103432192 + i / 20) >> 16, "
    "(1760103432192 + i / 20) & 65535, i)",
}
_START = {
    "postgres": "(now() AT TIME ZONE 'UTC')",
    "mysql": "UTC_TIMESTAMP(6)",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now')",
}
_SETTLE_DOWN = {"postgres": "VACUUM ANALYZE {table}", "mysql": "ANALYZE TABLE {table}", "sqlite": "ANALYZE {table}"}


async def fill(
    url: str, dialect: str, table: str, events: int, types: int, *, first: int = 0, delivered: bool = False
) -> None:
    """Commit the events, and update the planner's statistics."""
    for start in range(first, first + events, PIECE):
        number = min(PIECE, first + events - start)
        await run(url, insertion(dialect, table, start, number, types, delivered=delivered))
    await run(url, _SETTLE_DOWN[_spelling(dialect)].format(table=table))


def _spelling(dialect: str) -> str:
    return "mysql" if dialect == "mariadb" else dialect


def insertion(dialect: str, table: str, first: int, number: int, types: int, *, delivered: bool = False) -> str:
    """Return the statement that writes ``number`` events, with amounts that count up from ``first``."""
    spelling = _spelling(dialect)
    return _FILL[spelling].format(
        table=table,
        columns=COLUMNS,
        first=first,
        number=number,
        types=types,
        start=_START[spelling],
        delivered=str(delivered).upper(),
        id=_ID[spelling].format(version=7),
        action_id=_ID[spelling].format(version=4),
    )


async def finish_events(url: str, dialect: str, handler: str, events: int, types: int) -> None:
    """Write the rows of the past: delivered events, each with a succeeded notification, before all other rows."""
    look = Look(url)
    table, notifications = look.table("events"), look.table("event_notifications")
    await fill(url, dialect, table, events, types, delivered=True)
    start = _START[_spelling(dialect)]
    last = await look.value(f"SELECT max(sequence) AS last FROM {table}")  # the sequence may have gaps
    for first in range(0, last, PIECE):
        await run(
            url,
            f"INSERT INTO {notifications} ({_NOTIFIED}) "
            f"SELECT id, id, '{handler}', {_COPIED}, 'SUCCEEDED', 1, {start}, {start}, {start}, sequence, {start} "
            f"FROM {table} WHERE sequence > {first} AND sequence <= {first + PIECE} ORDER BY sequence",
        )
    await run(url, _SETTLE_DOWN[_spelling(dialect)].format(table=notifications))


async def run(url: str, statement: str) -> None:
    """Run a statement that may take long."""
    async with running(url) as execute:
        await execute(statement)


@asynccontextmanager
async def running(url: str) -> AsyncIterator[Callable[[str], Awaitable[Any]]]:
    """Yield a function that runs statements on one connection, each in its own transaction."""
    look = Look(url)
    if look.driver == "asyncpg":
        connection = await asyncpg.connect(url)
        try:
            yield connection.execute
        finally:
            await connection.close()
    elif look.driver == "aiomysql":
        async with mysql.connected(url) as connection:
            yield partial(mysql.fetch, connection)
    else:
        yield look.fetch


@asynccontextmanager
async def old_snapshot(url: str) -> AsyncIterator[None]:
    """Keep a read transaction open, so that the server cannot clean up rows that it may still see."""
    look = Look(url)
    if look.driver == "asyncpg":
        reader: Any = await asyncpg.connect(url)
        try:
            async with reader.transaction(isolation="repeatable_read"):
                await reader.fetch(f"SELECT 1 FROM {look.table('events')} LIMIT 1")
                yield
        finally:
            await reader.close()
    elif look.driver == "aiomysql":
        async with mysql.connected(url) as reader:
            await mysql.fetch(reader, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await mysql.fetch(reader, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
            await mysql.fetch(reader, f"SELECT 1 FROM {look.table('events')} LIMIT 1")
            yield
    else:
        connection = sqlite3.connect(urlsplit(url).path[1:], isolation_level=None)
        try:
            connection.execute("BEGIN")
            connection.execute(f"SELECT 1 FROM {look.table('events')} LIMIT 1").fetchone()
            yield
        finally:
            connection.close()
