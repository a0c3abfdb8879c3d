"""The bare pipeline and the bare transaction on SQLite, over the standard library's driver.

One connection writes in a thread, and a second one reads in a second thread. A batch of rows is a single row with a
JSON text: the driver releases the GIL at every row, and reacquires it only when the event loop pauses.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiosqlite
import msgspec
from msgspec import Struct

from benchmarks import bare
from benchmarks.bare import BATCH, now
from benchmarks.workload import COLUMNS, fill, run
from outboxio.support.ids import uuid7

T = TypeVar("T")

EVENTS = """
CREATE TABLE bare_events (id TEXT PRIMARY KEY NOT NULL, namespace TEXT NOT NULL, action_id TEXT NOT NULL,
  action_name TEXT NOT NULL, action_params TEXT NOT NULL, started_date TEXT NOT NULL, completion_date TEXT NOT NULL,
  model_id TEXT, model_type TEXT, event_type TEXT, payload TEXT, event_date TEXT NOT NULL, delivered INTEGER NOT NULL)
""", """
CREATE INDEX bare_events_action ON bare_events (action_id)
""", """
CREATE INDEX bare_undelivered ON bare_events (event_type, event_date) WHERE delivered = FALSE
"""  # fmt: skip
NOTIFICATIONS = """
CREATE TABLE bare_event_notifications (id TEXT PRIMARY KEY NOT NULL, event_id TEXT NOT NULL,
  handler_name TEXT NOT NULL, namespace TEXT NOT NULL, action_id TEXT NOT NULL, action_name TEXT NOT NULL,
  action_params TEXT NOT NULL, started_date TEXT NOT NULL, completion_date TEXT NOT NULL, model_id TEXT,
  model_type TEXT, event_type TEXT NOT NULL, payload TEXT, event_date TEXT NOT NULL, state TEXT NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0, next_retry_at TEXT NOT NULL, created_date TEXT NOT NULL,
  updated_date TEXT NOT NULL, UNIQUE (event_id, handler_name))
""", """
CREATE INDEX bare_due ON bare_event_notifications (next_retry_at, id) WHERE state IN ('PENDING', 'FAILED')
"""  # fmt: skip

CLAIM = """
SELECT json_group_array(id) FROM (SELECT id FROM bare_events INDEXED BY bare_undelivered
  WHERE delivered = FALSE AND event_type = ? ORDER BY event_date LIMIT ?)
"""
_COPIED = (
    "namespace, action_id, action_name, action_params, started_date, completion_date, model_id, model_type, "
    "event_type, payload, event_date"
)
# The event's id with the handler's number at the end: appended in index order, and cheaper than a random id.
INSERT_NOTIFICATIONS = f"""
INSERT INTO bare_event_notifications (id, event_id, handler_name, {_COPIED}, state, attempts, next_retry_at,
  created_date, updated_date)
SELECT substr(e.id, 1, 24) || printf('%02d', h.key) || substr(e.id, 27), e.id, h.value, {_COPIED}, 'PENDING', 0,
  :now, :now, :now
FROM json_each(:ids) i CROSS JOIN bare_events e ON e.id = i.value CROSS JOIN json_each(:handlers) h WHERE TRUE
ON CONFLICT DO NOTHING
"""
MARK_DELIVERED = "UPDATE bare_events SET delivered = TRUE WHERE id IN (SELECT value FROM json_each(:ids))"
FIND_DUE = """
SELECT json_group_array(json_array(id, payload, next_retry_at, json_array(event_id, handler_name, namespace, action_id,
  action_name, action_params, started_date, completion_date, event_date, model_id, model_type, event_type, attempts)))
FROM (SELECT * FROM bare_event_notifications INDEXED BY bare_due
  WHERE state IN ('PENDING', 'FAILED') AND next_retry_at <= :now AND (next_retry_at, id) > (:due, :id)
  ORDER BY next_retry_at, id LIMIT :limit)
"""
SETTLE = """
UPDATE bare_event_notifications SET state = 'SUCCEEDED', attempts = attempts + 1, updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids))
"""
COUNT = """
SELECT (SELECT count(*) FROM bare_events WHERE delivered),
  (SELECT count(*) FROM bare_event_notifications WHERE state = 'SUCCEEDED')
"""

BEGINNING = ("", "")


class _Due(Struct, array_like=True, gc=False):
    id: str
    payload: str
    next_retry_at: str
    context: msgspec.Raw


_due = msgspec.json.Decoder(list[_Due]).decode
_ids = msgspec.json.Decoder(list[str]).decode


class _Thread:
    """A connection with its own thread."""

    def __init__(self, url: str) -> None:
        self._path = urlsplit(url).path[1:]
        self._thread = ThreadPoolExecutor(max_workers=1)

    async def open(self) -> None:
        def connect() -> None:
            self.connection = sqlite3.connect(self._path, isolation_level=None)
            self.connection.execute("PRAGMA journal_mode = WAL").fetchone()

        await self._in_thread(connect)

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._in_thread(lambda: work(self.connection))

    async def close(self) -> None:
        await self._in_thread(lambda: self.connection.close())
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class Tables:
    events = "bare_events"

    def __init__(self, url: str) -> None:
        self._url = url
        self._position = BEGINNING
        self._reader, self._writer = _Thread(url), _Thread(url)

    async def make(self, events: int, types: int, handlers: int) -> None:
        for thread in (self._reader, self._writer):
            await thread.open()
        for statement in (*EVENTS, *NOTIFICATIONS):
            await run(self._url, statement)
        await fill(self._url, "sqlite", "bare_events", events, types)
        self._types = [f"E{t}" for t in range(types)]
        self._handlers = json.dumps([f"h{h}" for h in range(handlers)])

    async def fan_out(self) -> int:
        def claim_and_notify(connection: sqlite3.Connection) -> int:
            share, ids = max(1, BATCH // len(self._types)), list[str]()
            connection.execute("BEGIN IMMEDIATE")
            for event_type in self._types:
                ids += _ids(connection.execute(CLAIM, (event_type, share)).fetchone()[0])
            scope = {"ids": json.dumps(ids), "handlers": self._handlers, "now": _text()}
            connection.execute(INSERT_NOTIFICATIONS, scope)
            done = connection.execute(MARK_DELIVERED, scope).rowcount
            connection.execute("COMMIT")
            return done

        return await self._writer.run(claim_and_notify)

    async def find_due(self, limit: int) -> Sequence[Any]:
        due, key = self._position
        scope = {"now": _text(), "due": due, "id": key, "limit": limit}
        [text] = await self._reader.run(lambda connection: connection.execute(FIND_DUE, scope).fetchone())
        found = _due(text)
        if found:
            self._position = found[-1].next_retry_at, found[-1].id
        return [(row.id, row.payload) for row in found]

    def start_over(self) -> None:
        self._position = BEGINNING

    async def settle(self, ids: Sequence[Any]) -> None:
        scope = {"ids": json.dumps(ids), "now": _text()}
        await self._writer.run(lambda connection: connection.execute(SETTLE, scope))

    async def count(self) -> tuple[int, int]:
        row: tuple[int, int] = await self._reader.run(lambda connection: connection.execute(COUNT).fetchone())
        return row

    async def close(self) -> None:
        for thread in (self._reader, self._writer):
            await thread.close()


def _text() -> str:
    return now().isoformat(" ", "microseconds")


# --- writing ---------------------------------------------------------------------------------------

WALLETS = "CREATE TABLE wallets (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL)"
FILL_WALLETS = f"""
INSERT INTO wallets WITH RECURSIVE d(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM d WHERE n < {bare.WALLETS - 1})
SELECT n, 0 FROM d
"""
DEPOSIT = "UPDATE wallets SET balance = balance + 1 WHERE id = ?1 RETURNING balance"
INSERT = f"""
INSERT INTO eventlog_events ({COLUMNS})
VALUES (?1, 'bench', ?2, 'Deposit', ?3, ?4, ?4, ?5, 'Wallet', 'Deposited', ?6, ?4, FALSE)
"""
COUNT_EVENTS = "SELECT count(*) FROM eventlog_events"


class InOneVisit:
    """Whole transactions in the writing thread; each costs a single switch to the thread.

    The transactions are functions, not coroutines: no application code runs between their statements.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._thread = _Thread(url)

    async def open(self, callers: int) -> None:
        await self._thread.open()
        for statement in (WALLETS, FILL_WALLETS):
            await run(self._url, statement)

    async def deposit(self, wallet: int) -> None:
        await self._thread.run(lambda connection: self._deposit(connection, wallet))

    def _deposit(self, connection: sqlite3.Connection, wallet: int) -> None:
        connection.execute("BEGIN IMMEDIATE")
        [balance] = connection.execute(DEPOSIT, (wallet,)).fetchone()
        connection.execute(INSERT, _row(wallet, balance))
        connection.execute("COMMIT")

    async def count(self) -> int:
        [number] = await self._thread.run(lambda connection: connection.execute(COUNT_EVENTS).fetchone())
        return int(number)

    async def close(self) -> None:
        await self._thread.close()


class StatementByStatement:
    """Transactions as on the servers: coroutines that await each statement, here over aiosqlite.

    They run one at a time: writers on separate connections would wait for each other inside SQLite, and time out.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._turn = asyncio.Lock()

    async def open(self, callers: int) -> None:
        for statement in (WALLETS, FILL_WALLETS):
            await run(self._url, statement)
        self._connection = await aiosqlite.connect(urlsplit(self._url).path[1:], isolation_level=None)

    async def deposit(self, wallet: int) -> None:
        async with self._turn:
            await self._connection.execute("BEGIN IMMEDIATE")
            [[balance]] = await self._connection.execute_fetchall(DEPOSIT, (wallet,))
            await self._connection.execute(INSERT, _row(wallet, balance))
            await self._connection.execute("COMMIT")

    async def count(self) -> int:
        [[number]] = await self._connection.execute_fetchall(COUNT_EVENTS)
        return int(number)

    async def close(self) -> None:
        await self._connection.close()


def _row(wallet: int, balance: int) -> tuple[str, ...]:
    payload = json.dumps({"model_id": str(wallet), "amount": balance, "currency": "EUR"})
    return str(uuid7()), str(uuid7()), json.dumps({"wallet": wallet}), _text(), str(wallet), payload
