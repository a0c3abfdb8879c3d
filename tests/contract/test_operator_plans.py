"""Operator queries read the same number of rows, whatever the retention and the planner's estimates.

Rows are counted by the means of each dialect (``tests/kit/meters.py``): the plans of PostgreSQL, the handler counters
of MySQL and MariaDB, and the steps of SQLite. ``python -m benchmarks.operating`` runs the same queries on tables with
the rows of a year.
"""

from __future__ import annotations

from typing import Any

import pytest

from outboxio import Outbox
from outboxio.model.notification import State
from outboxio.model.operating.groups import Search
from outboxio.storage.postgres.port import SYNTAX
from outboxio.storage.protocols.operating import Counted
from outboxio.storage.statement import Query, with_placeholders
from outboxio.storage.tables.reads import COUNTS
from outboxio.storage.tables.scans import DEAD
from tests.kit.app import Look
from tests.kit.inside import database_of
from tests.kit.meters import meter
from tests.kit.operator_queries import OperatorQueries
from tests.kit.size import FULL
from tests.kit.watched import Filling

pytestmark = [pytest.mark.every_version, pytest.mark.with_tables, pytest.mark.slow]

#: The small tables already reach each bound.
SMALL, LARGE = 12_500, 400_000 if FULL else 40_000
MOST, COUNTED = 400, 4
#: A page ends within a read, a few rows earlier or later. On SQLite the unit is a step of the virtual machine.
SLACK = {"postgres": 300, "mysql": 900, "mariadb": 900, "sqlite": 15_000}

TABLES = ("events", "event_notifications")


class Statistics:
    """The statistics of the planner."""

    def __init__(self, look: Look) -> None:
        self._look = look

    async def freeze(self) -> None:
        """Let only :meth:`analyse` update statistics from now on."""
        for table in TABLES:
            if self._look.driver == "asyncpg":
                await self._look.fetch(f"ALTER TABLE {{{table}}} SET (autovacuum_enabled = false)")
            if self._look.driver == "aiomysql":
                await self._look.fetch(f"ALTER TABLE {{{table}}} STATS_PERSISTENT = 1, STATS_AUTO_RECALC = 0")

    async def analyse(self) -> None:
        for table in TABLES:
            await self._look.fetch(f"ANALYZE {'TABLE' if self._look.driver == 'aiomysql' else ''} {{{table}}}")


async def reads_of(url: str, total: int) -> dict[str, int]:
    """The rows that each query reads, with current plans."""
    look = Look(url)
    async with Outbox(url, namespace="app") as outbox:
        database = database_of(outbox)
        read, reads = meter(database, look), {}
        for name, query in OperatorQueries(total, most=MOST, counted=COUNTED).all().items():
            answer, reads[name] = await read(lambda query=query: query(database))
            assert answer is not None
        return reads


async def test_operator_queries_read_no_more_rows_with_longer_retention(database_url: str, look: Look) -> None:
    async with Outbox(database_url, namespace="app") as outbox:
        await outbox.migrate()
    filling, statistics = Filling(look), Statistics(look)
    await statistics.freeze()
    await statistics.analyse()
    await filling.fill(SMALL)
    await filling.fill_beside()
    small = await reads_of(database_url, SMALL)
    await filling.fill(LARGE)

    reads: dict[str, dict[str, int]] = {"statistics of empty tables": await reads_of(database_url, LARGE)}
    await statistics.analyse()
    reads["fresh statistics"] = await reads_of(database_url, LARGE)

    slack = SLACK[look.dialect]
    more: dict[str, Any] = {
        f"{name}, {planned}": (small[name], large[name])
        for planned, large in reads.items() for name in small if large[name] > small[name] * 1.1 + slack
    }  # fmt: skip
    assert more == {}
    assert max(small.values()) < (60 * MOST if not look.is_file else 4_000_000)


#: For each row, including rows of a derived table. Evaluating a row takes 60 steps of SQLite or more.
MOST_READ_FOR_A_COUNT = {"postgres": 1.3, "mysql": 2.3, "mariadb": 2.3, "sqlite": 40}


async def test_an_index_only_count_reads_index_entries_only(database_url: str, look: Look) -> None:
    async with Outbox(database_url, namespace="app") as outbox:
        await outbox.migrate()
        filling = Filling(look)
        await filling.fill(SMALL)
        await Statistics(look).analyse()
        database = database_of(outbox)
        search = Search(states=(State.DEAD, State.EXPIRED))

        counted, reads = await meter(database, look)(lambda: database.search.count("app", search, 1000))

        assert counted == Counted(1000, False)
        assert reads <= MOST_READ_FOR_A_COUNT[look.dialect] * 1000 + 200
        if look.driver == "asyncpg":
            await look.fetch("VACUUM {event_notifications}")
            plan = await look.fetch(f"EXPLAIN {inlined(COUNTS[DEAD])}")
            read = [row["QUERY PLAN"] for row in plan if "event_notifications_dead" in row["QUERY PLAN"]]
            assert read
            assert all("Index Only Scan" in line for line in read)


def inlined(query: Query[Any]) -> str:
    """The statement for a single handler name, with literals instead of parameters."""
    values = {"listed": """'[{"name": "h05"}]'""", "namespace": "'app'", "most": "1000"}
    return with_placeholders(query.rendered(SYNTAX), values.__getitem__)


async def test_a_chunk_reads_only_what_it_changes(database_url: str, look: Look) -> None:
    async with Outbox(database_url, namespace="app") as outbox:
        await outbox.migrate()
        filling = Filling(look)
        await filling.fill(SMALL)
        await filling.fill_beside()
        database = database_of(outbox)
        read, query = meter(database, look), OperatorQueries(SMALL).chunk()
        first, small = await read(lambda: query(database))
        await filling.fill(LARGE)

        second, large = await read(lambda: query(database))

    assert (first.done, second.done) == (500, 500)
    assert large <= small * 1.1 + 10 * SLACK[look.dialect]
