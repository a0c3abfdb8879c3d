"""A process of a version without partitions, reduced to what affects others.

``python -m tests.chaos.older '{...}'``. The process holds the lock of partition 0 under the name known to all versions,
is not in ``instances``, and runs the rows of all partitions of its handler. PostgreSQL only.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg

from outboxio.model.lock_name import LockName
from tests.chaos.history import History, keep_log
from tests.flow.worker import report, stop_on_sigterm

TRY = "SELECT pg_try_advisory_lock($1)"
RAISE_TERM = """
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
VALUES ($1, 1, $2, now() AT TIME ZONE 'UTC', 0)
ON CONFLICT (name) DO UPDATE SET term = leases.term + 1, owner = excluded.owner, acquired_date = excluded.acquired_date
RETURNING term
"""
FIND = """
SELECT id, event_id, sequence, attempts FROM eventlog.event_notifications
WHERE namespace = 'app' AND handler_name = $1 AND state IN ('PENDING', 'FAILED', 'DYING') AND next_retry_at <= $2
ORDER BY next_retry_at, sequence LIMIT 10
"""
SETTLE = """
UPDATE eventlog.event_notifications SET state = 'SUCCEEDED', attempts = attempts + 1, updated_date = $4
WHERE id = $1 AND state <> ALL ('{SUCCEEDED,EXPIRED,DEAD,SKIPPED}')
  AND EXISTS (SELECT FROM eventlog.leases WHERE name = $2 AND term = $3)
"""
GIVE_BACK = "UPDATE eventlog.leases SET released_term = term WHERE name = $1 AND term = $2"


class Older:
    """The loop of the older version: find, run, settle."""

    def __init__(self, connection: asyncpg.Connection[Any], history: History, handler: str) -> None:
        self._connection = connection
        self._history = history
        self._handler = handler
        self._lock = LockName("app", "dispatch", handler)
        self._numbers = count(1)
        self._term = 0

    async def take(self) -> None:
        while not await self._connection.fetchval(TRY, self._lock.key):  # noqa: ASYNC110  # no event announces the end
            await asyncio.sleep(0.02)
        self._term = await self._connection.fetchval(RAISE_TERM, self._lock.lease, "a process of an older version")
        self._history.write("taken", lock=self._lock.lease, term=self._term)
        self._history.write("proven", until=time.monotonic_ns() + 10**12)

    async def run_once(self) -> None:
        moment = time.monotonic_ns()
        rows = await self._connection.fetch(FIND, self._handler, _now())
        for row in rows:
            number = next(self._numbers)
            config = {"run": number, "event": str(row["event_id"]), "handler": self._handler}
            self._history.write(
                "start", **config, notification=str(row["id"]), sequence=row["sequence"], attempt=row["attempts"] + 1,
                term=self._term, decided=moment,
            )  # fmt: skip
            await asyncio.sleep(0.02)
            self._history.write("effect", **config)
            self._history.write("finish", run=number, how="done")
            settling = next(self._numbers)
            written = [(str(row["id"]), self._handler, self._term)]
            self._history.write("settling", run=settling, state="SUCCEEDED", rows=written)
            status = await self._connection.execute(SETTLE, row["id"], self._lock.lease, self._term, _now())
            self._history.write("settled", run=settling, number=int(status.split()[-1]))

    async def give_back(self) -> None:
        self._history.write("released", locks=[self._lock.lease], how="leaving")
        self._history.write("lost", lock=self._lock.lease)
        await self._connection.execute(GIVE_BACK, self._lock.lease, self._term)


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


async def main(config: dict[str, Any]) -> None:
    stop = stop_on_sigterm()
    keep_log(Path(config["folder"]), config["name"])
    history = History(Path(config["folder"]), config["name"])
    connection = await asyncpg.connect(config["direct"] or config["database"])
    older = Older(connection, history, config["handler"])
    await older.take()
    report("running")
    while not stop.is_set():
        await older.run_once()
        await asyncio.sleep(0.02)
    await older.give_back()
    await connection.close()
    history.write("left")
    report("left")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
