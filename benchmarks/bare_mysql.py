"""The bare pipeline and the bare transaction on MySQL and MariaDB, over aiomysql.

aiomysql parses rows in Python, about 2 us per column and 5 us per row. A batch of ids is therefore sent as one JSON
text, and values that a handler may never read are sent as one column. The server is the bottleneck, so it produces no
more JSON than necessary. Several statements share a message where possible.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import aiomysql
import msgspec
from pymysql.constants import CLIENT

from benchmarks import bare
from benchmarks.bare import BATCH, now
from benchmarks.workload import COLUMNS, fill, run
from outboxio.support.ids import uuid7
from tests.kit import mysql

_ID = "char(36) CHARACTER SET ascii COLLATE ascii_bin"
EVENTS = f"""
CREATE TABLE bare.events (id {_ID} PRIMARY KEY, namespace varchar(255) NOT NULL, action_id {_ID} NOT NULL,
  action_name varchar(255) NOT NULL, action_params json NOT NULL, started_date datetime(6) NOT NULL,
  completion_date datetime(6) NOT NULL, model_id varchar(255), model_type varchar(255), event_type varchar(255),
  payload json, event_date datetime(6) NOT NULL, delivered boolean NOT NULL,
  KEY (action_id), KEY undelivered (delivered, event_type, event_date)) ENGINE=InnoDB
"""
NOTIFICATIONS = f"""
CREATE TABLE bare.event_notifications (id {_ID} PRIMARY KEY, event_id {_ID} NOT NULL,
  handler_name varchar(255) NOT NULL, namespace varchar(255) NOT NULL, action_id {_ID} NOT NULL,
  action_name varchar(255) NOT NULL,
  action_params json NOT NULL, started_date datetime(6) NOT NULL, completion_date datetime(6) NOT NULL,
  model_id varchar(255), model_type varchar(255), event_type varchar(255) NOT NULL, payload json,
  event_date datetime(6) NOT NULL, state varchar(24) NOT NULL, attempts int NOT NULL DEFAULT 0,
  next_retry_at datetime(6) NOT NULL, created_date datetime(6) NOT NULL, updated_date datetime(6) NOT NULL,
  UNIQUE KEY (event_id, handler_name), KEY due (state, next_retry_at, id)) ENGINE=InnoDB
"""
_COPIED = (
    "namespace, action_id, action_name, action_params, started_date, completion_date, model_id, model_type, "
    "event_type, payload, event_date"
)
# One SELECT per type, combined with UNION ALL.
CLAIM = """
(SELECT JSON_ARRAYAGG(b.id) FROM (SELECT id FROM bare.events FORCE INDEX (undelivered)
  WHERE delivered = FALSE AND event_type = '{event_type}' ORDER BY event_date LIMIT {share} FOR UPDATE SKIP LOCKED) b)
"""
# The event's id with the handler's number at the end: appended in index order, and cheaper than a random id.
INSERT_NOTIFICATIONS = f"""
INSERT INTO bare.event_notifications (id, event_id, handler_name, {_COPIED}, state, attempts, next_retry_at,
  created_date, updated_date)
SELECT CONCAT(LEFT(e.id, 24), s.number, RIGHT(e.id, 10)), e.id, s.handler, {_COPIED}, 'PENDING', 0,
  '{{now}}', '{{now}}', '{{now}}'
FROM bare.events e JOIN ({{handlers}}) s WHERE e.id IN ({{ids}})
ON DUPLICATE KEY UPDATE id = bare.event_notifications.id
"""
MARK_DELIVERED = "UPDATE bare.events SET delivered = TRUE WHERE id IN ({ids}); COMMIT"
FIND_DUE = """
SELECT id, payload, next_retry_at, CONCAT_WS('|', event_id, handler_name, namespace, action_id, action_name,
  started_date, completion_date, event_date, COALESCE(model_id, ''), COALESCE(model_type, ''), event_type, attempts,
  action_params)
FROM bare.event_notifications FORCE INDEX (due) WHERE state = 'PENDING' AND next_retry_at <= %s
  AND (next_retry_at > %s OR (next_retry_at = %s AND id > %s)) ORDER BY next_retry_at, id LIMIT %s
"""
SETTLE = """
UPDATE bare.event_notifications SET state = 'SUCCEEDED', attempts = attempts + 1, updated_date = '{now}'
WHERE id IN ({ids})
"""
COUNT = """
SELECT (SELECT count(*) FROM bare.events WHERE delivered = TRUE),
  (SELECT count(*) FROM bare.event_notifications WHERE state = 'SUCCEEDED')
"""

BEGINNING = ("1970-01-01", "")


_ids = msgspec.json.Decoder(list[str]).decode


class Quiet(aiomysql.Cursor):
    """A cursor that does not fetch warnings, which would cost a round trip each time."""

    async def _show_warnings(self, connection: Any) -> None:
        pass


class Tables:
    events = "bare.events"

    def __init__(self, url: str, dialect: str) -> None:
        self._url = url
        self._dialect = dialect
        self._position = BEGINNING

    async def make(self, events: int, types: int, handlers: int) -> None:
        await _make(self._url, EVENTS, NOTIFICATIONS)
        await fill(self._url, self._dialect, "bare.events", events, types)
        self._connections = [await _connect(self._url) for _ in range(3)]
        self._fan_out, self._find, self._settle = self._connections
        self._types = [f"E{t}" for t in range(types)]
        self._handlers = " UNION ALL ".join(
            f"SELECT 'h{number}' AS handler, '{number:02}' AS number" for number in range(handlers)
        )

    async def fan_out(self) -> int:
        share = max(1, BATCH // len(self._types))
        claims = " UNION ALL ".join(CLAIM.format(event_type=t, share=share) for t in self._types)
        rows = await _run(self._fan_out, f"START TRANSACTION; {claims}")
        ids = [i for (found,) in rows if found for i in _ids(found)]
        if not ids:
            await _run(self._fan_out, "COMMIT")
            return 0
        listed = _listed(ids)
        await _run(self._fan_out, INSERT_NOTIFICATIONS.format(now=now(), handlers=self._handlers, ids=listed))
        await _run(self._fan_out, MARK_DELIVERED.format(ids=listed))
        return len(ids)

    async def find_due(self, limit: int) -> Sequence[Any]:
        due, key = self._position
        rows = await _run(self._find, FIND_DUE, (now(), due, due, key, limit))
        if rows:
            self._position = rows[-1][2], rows[-1][0]
        return rows

    def start_over(self) -> None:
        self._position = BEGINNING

    async def settle(self, ids: Sequence[Any]) -> None:
        await _run(self._settle, SETTLE.format(now=now(), ids=_listed(sorted(ids))))

    async def count(self) -> tuple[int, int]:
        [(delivered, succeeded)] = await _run(self._find, COUNT)
        return delivered, succeeded

    async def close(self) -> None:
        for connection in self._connections:
            await connection.ensure_closed()
        await run(self._url, "DROP DATABASE bare")


async def _make(url: str, *tables: str) -> None:
    await run(url, "DROP DATABASE IF EXISTS bare")
    await run(url, "CREATE DATABASE bare CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
    for table in tables:
        await run(url, table)


async def _connect(url: str) -> aiomysql.Connection:
    return await aiomysql.connect(
        **mysql.address(url), autocommit=True, client_flag=CLIENT.MULTI_STATEMENTS, cursorclass=Quiet,
        init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    )  # fmt: skip


async def _run(connection: aiomysql.Connection, sql: str, args: tuple[Any, ...] | None = None) -> Sequence[Any]:
    """Run one or more statements. Return the rows of the last statement that has rows."""
    cursor = await connection.cursor()
    await cursor.execute(sql, args)
    rows = await cursor.fetchall()
    while await cursor.nextset():
        if cursor.description:
            rows = await cursor.fetchall()
    return rows


def _listed(ids: Sequence[str]) -> str:
    return "'" + "','".join(ids) + "'"


# --- writing ---------------------------------------------------------------------------------------

WALLETS = "CREATE TABLE wallets (id int PRIMARY KEY, balance bigint NOT NULL)"
FILL_WALLETS = f"""
INSERT INTO wallets WITH RECURSIVE d(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM d WHERE n < {bare.WALLETS - 1})
SELECT n, 0 FROM d
"""
DEPOSIT = "UPDATE wallets SET balance = balance + 1 WHERE id = %s"
BALANCE = "SELECT balance FROM wallets WHERE id = %s"
INSERT = f"""
INSERT INTO eventlog.events ({COLUMNS})
VALUES (%s, 'bench', %s, 'Deposit', %s, %s, %s, %s, 'Wallet', 'Deposited', %s, %s, FALSE)
"""


class Writer:
    """Writes the same rows as an action into outboxio's table."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def open(self, callers: int) -> None:
        for statement in (WALLETS, FILL_WALLETS):
            await run(self._url, statement)
        self._pool: Any = await aiomysql.create_pool(
            **mysql.address(self._url), minsize=callers, maxsize=callers, autocommit=True, cursorclass=Quiet
        )

    async def deposit(self, wallet: int) -> None:
        started = now()
        async with self._pool.acquire() as connection:
            cursor = await connection.cursor()
            await connection.begin()
            try:
                await cursor.execute(DEPOSIT, (wallet,))
                await cursor.execute(BALANCE, (wallet,))
                [(balance,)] = await cursor.fetchall()
                params = json.dumps({"wallet": wallet})
                payload = json.dumps({"model_id": str(wallet), "amount": balance, "currency": "EUR"})
                row = (str(uuid7()), str(uuid7()), params, started, started, str(wallet), payload, started)
                await cursor.execute(INSERT, row)
                await connection.commit()
            except BaseException:
                await connection.rollback()
                raise

    async def count(self) -> int:
        async with self._pool.acquire() as connection:
            [(number,)] = await _run(connection, "SELECT count(*) FROM eventlog.events")
        return int(number)

    async def close(self) -> None:
        self._pool.close()
        await self._pool.wait_closed()
