"""The bare pipeline and the bare transaction on PostgreSQL, over asyncpg."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from benchmarks import bare
from benchmarks.bare import BATCH, now
from benchmarks.workload import COLUMNS, fill, run
from outboxio.support.ids import uuid7

EVENTS = """
DROP SCHEMA IF EXISTS bare CASCADE; CREATE SCHEMA bare;
CREATE TABLE bare.events (id uuid PRIMARY KEY, namespace varchar(255) NOT NULL, action_id uuid NOT NULL,
  action_name varchar(255) NOT NULL, action_params jsonb NOT NULL, started_date timestamp NOT NULL,
  completion_date timestamp NOT NULL, model_id varchar(255), model_type varchar(255), event_type varchar(255),
  payload jsonb, event_date timestamp NOT NULL, delivered boolean NOT NULL);
CREATE INDEX ON bare.events (action_id);
CREATE INDEX ON bare.events (event_type, event_date) WHERE delivered = FALSE;
"""
NOTIFICATIONS = """
CREATE TABLE bare.event_notifications (id uuid PRIMARY KEY, event_id uuid NOT NULL,
  handler_name varchar(255) NOT NULL, namespace varchar(255) NOT NULL, action_id uuid NOT NULL,
  action_name varchar(255) NOT NULL, action_params jsonb NOT NULL, started_date timestamp NOT NULL,
  completion_date timestamp NOT NULL, model_id varchar(255), model_type varchar(255), event_type varchar(255) NOT NULL,
  payload jsonb, event_date timestamp NOT NULL, state varchar(24) NOT NULL, attempts int NOT NULL DEFAULT 0,
  next_retry_at timestamp NOT NULL, created_date timestamp NOT NULL, updated_date timestamp NOT NULL,
  UNIQUE (event_id, handler_name));
CREATE INDEX ON bare.event_notifications (next_retry_at, id) WHERE state IN ('PENDING', 'FAILED');
"""

# Each type gets a share of the batch: with a whole batch per type, up to 200 batches would be read for nothing.
FAN_OUT = """
WITH batch AS MATERIALIZED (
  SELECT b.* FROM unnest($1::text[]) types(t) CROSS JOIN LATERAL (
    SELECT ctid AS place, * FROM bare.events WHERE delivered = FALSE AND event_type = types.t
    ORDER BY event_date LIMIT $3 FOR UPDATE) b),
made AS (
  INSERT INTO bare.event_notifications
  SELECT overlay(gen_random_uuid()::text placing $5 from 1 for 15)::uuid, b.id, handler, b.namespace, b.action_id,
         b.action_name, b.action_params, b.started_date, b.completion_date, b.model_id, b.model_type, b.event_type,
         b.payload, b.event_date, 'PENDING', 0, $4, $4, $4
  FROM batch b CROSS JOIN unnest($2::text[]) AS handler
  ON CONFLICT DO NOTHING)
UPDATE bare.events SET delivered = TRUE WHERE ctid = ANY(ARRAY(SELECT place FROM batch))
"""
FIND_DUE = """
SELECT id, payload, event_id, handler_name, namespace, action_id, action_name, action_params, started_date,
       completion_date, model_id, model_type, event_type, event_date, attempts, next_retry_at
FROM bare.event_notifications WHERE state IN ('PENDING', 'FAILED') AND next_retry_at <= $1
  AND (next_retry_at, id) > ($3, $4)
ORDER BY next_retry_at, id LIMIT $2
"""
SETTLE = """
UPDATE bare.event_notifications SET state = 'SUCCEEDED', attempts = attempts + 1, updated_date = $2
WHERE id = ANY($1::uuid[])
"""
COUNT = """
SELECT (SELECT count(*) FROM bare.events WHERE delivered),
  (SELECT count(*) FROM bare.event_notifications WHERE state = 'SUCCEEDED')
"""

BEGINNING = (datetime(1970, 1, 1), UUID(int=0))


class Tables:
    events = "bare.events"

    def __init__(self, url: str) -> None:
        self._url = url
        self._position = BEGINNING

    async def make(self, events: int, types: int, handlers: int) -> None:
        await run(self._url, EVENTS + NOTIFICATIONS)
        await fill(self._url, "postgres", "bare.events", events, types)
        self._connections: list[Any] = [await asyncpg.connect(self._url) for _ in range(3)]
        for connection in self._connections:
            await connection.execute("SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off")
        fan_out, find, settle = self._connections
        self._fan_out, self._find = await fan_out.prepare(FAN_OUT), await find.prepare(FIND_DUE)
        self._settle = await settle.prepare(SETTLE)
        self._types = [f"E{t}" for t in range(types)]
        self._handlers = [f"h{h}" for h in range(handlers)]

    async def fan_out(self) -> int:
        share = max(1, BATCH // len(self._types))
        await self._fan_out.fetch(self._types, self._handlers, share, now(), str(uuid7())[:15])
        return int(self._fan_out.get_statusmsg().split()[-1])

    async def find_due(self, limit: int) -> Sequence[Any]:
        due: list[Any] = await self._find.fetch(now(), limit, *self._position)
        if due:
            self._position = due[-1][15], due[-1][0]
        return due

    def start_over(self) -> None:
        self._position = BEGINNING

    async def settle(self, ids: Sequence[Any]) -> None:
        await self._settle.fetch(ids, now())

    async def count(self) -> tuple[int, int]:
        delivered, succeeded = await self._connections[0].fetchrow(COUNT)
        return delivered, succeeded

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


# --- writing ---------------------------------------------------------------------------------------

WALLETS = "CREATE TABLE wallets (id int PRIMARY KEY, balance bigint NOT NULL)"
FILL_WALLETS = f"INSERT INTO wallets SELECT i, 0 FROM generate_series(0, {bare.WALLETS - 1}) AS i"
DEPOSIT = "UPDATE wallets SET balance = balance + 1 WHERE id = $1 RETURNING balance"

INSERT = f"""
INSERT INTO eventlog.events ({COLUMNS})
VALUES ($1, 'bench', $2, 'Deposit', $3, $4, $4, $5, 'Wallet', 'Deposited', $6, $4, FALSE)
"""


class Writer:
    """Writes the same rows as an action into outboxio's table."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def open(self, callers: int) -> None:
        await run(self._url, f"{WALLETS}; {FILL_WALLETS}")
        self._pool: Any = await asyncpg.create_pool(self._url, min_size=callers, max_size=callers)

    async def deposit(self, wallet: int) -> None:
        started = now()
        async with self._pool.acquire() as connection, connection.transaction():
            balance = await connection.fetchval(DEPOSIT, wallet)
            params = json.dumps({"wallet": wallet})
            payload = json.dumps({"model_id": str(wallet), "amount": balance, "currency": "EUR"})
            await connection.execute(INSERT, uuid7(), uuid7(), params, started, str(wallet), payload)

    async def count(self) -> int:
        return int(await self._pool.fetchval("SELECT count(*) FROM eventlog.events"))

    async def close(self) -> None:
        await self._pool.close()
