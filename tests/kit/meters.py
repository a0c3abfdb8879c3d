"""Count the index and table rows that a query reads, with the tools of each dialect."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg

from outboxio.storage.mysql.connection import fetch
from tests.kit.app import Look

Meter = Callable[[Callable[[], Awaitable[Any]]], Awaitable[tuple[Any, int]]]
"""The result of a query and the number of rows read; on SQLite, the steps of the virtual machine."""


def meter(database: Any, look: Look) -> Meter:
    """Return the meter of the dialect, for queries on the connection of operators."""
    if look.is_file:
        return _steps(database)
    return _handler_reads(database._admin) if look.driver == "aiomysql" else _plans_or_statistics(database._admin, look)


EXPLAINING = """
LOAD 'auto_explain';
SET auto_explain.log_min_duration = 0; SET auto_explain.log_analyze = on; SET auto_explain.log_timing = off;
SET auto_explain.log_format = 'json'; SET auto_explain.log_level = 'notice'
"""


class Plans:
    """The plans of all statements on a connection of PostgreSQL, with the rows that were actually read."""

    def __init__(self) -> None:
        self.rows = 0
        self.scanned: set[str] = set()
        """The tables that were read without an index."""

    def record(self, connection: Any, message: Any) -> None:
        _, found, text = message.message.partition("plan:\n")
        if found:
            self._record(json.loads(text)["Plan"])

    def _record(self, node: dict[str, Any]) -> None:
        if (
            node.get("Relation Name") in ("events", "event_notifications", "handler_minutes")
            and "Scan" in node["Node Type"]
        ):
            passed_over = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
            self.rows += round((node["Actual Rows"] + passed_over) * node["Actual Loops"])
            if not node["Node Type"].startswith("Index"):
                self.scanned.add(node["Relation Name"])
        for child in node.get("Plans", ()):
            self._record(child)


def _plans_or_statistics(on: Any, look: Look) -> Meter:
    """Count by the plans, or by the index statistics if the module auto_explain is not installed."""

    async def measured(query: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
        try:
            return await _explained(on)(query)
        except asyncpg.UndefinedFileError:
            return await _index_reads(on, look)(query)

    return measured


READS = """
SELECT (SELECT coalesce(sum(idx_tup_read), 0) FROM pg_stat_user_indexes WHERE schemaname = 'eventlog')
  + (SELECT coalesce(sum(seq_tup_read), 0) FROM pg_stat_user_tables
     WHERE schemaname = 'eventlog' AND relname IN ('events', 'event_notifications'))
"""


def _index_reads(on: Any, look: Look) -> Meter:
    async def reads() -> int:
        await on.fetch("SELECT pg_stat_force_next_flush()")
        await on.fetch("SELECT 1")
        return int(await look.value(READS))

    async def measured(query: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
        before = await reads()
        answer = await query()
        return answer, await reads() - before

    return measured


def _explained(on: Any) -> Meter:
    async def measured(query: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
        plans = Plans()
        async with on.opened() as connection:
            await connection.execute(EXPLAINING)
            connection.add_log_listener(plans.record)
        try:
            answer = await query()
        finally:
            async with on.opened() as connection:
                connection.remove_log_listener(plans.record)
                await connection.execute("SET auto_explain.log_min_duration = -1")
        assert not plans.scanned, plans.scanned
        return answer, plans.rows

    return measured


def _handler_reads(on: Any) -> Meter:
    async def reads() -> int:
        show = "SHOW SESSION STATUS LIKE 'Handler\\_read\\_%'"
        return sum(int(value) for _, value in await on.use(lambda connection: fetch(connection, show)))

    async def measured(query: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
        overhead = -await reads() + await reads()
        before = await reads()
        answer = await query()
        return answer, await reads() - before - overhead

    return measured


def _steps(database: Any) -> Meter:
    connections = database._connections

    async def measured(query: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
        steps = [0]

        def count() -> int:
            steps[0] += 100
            return 0

        for connection in (connections._inspector, connections.writer):
            await connection.submit(lambda sqlite: sqlite.set_progress_handler(count, 100))
        try:
            answer = await query()
        finally:
            for connection in (connections._inspector, connections.writer):
                await connection.submit(lambda sqlite: sqlite.set_progress_handler(None, 0))
        return answer, steps[0]

    return measured
