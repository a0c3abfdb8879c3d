"""The cost of a poll depends on the rows found, whatever the tables contain and the planner estimates.

The plans are those of the loops' own statements with a loop's settings, as generic plans, with the rows and buffers
actually used.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import pytest

from outboxio import Outbox
from outboxio.model.lock_name import MAX_PARTITIONS
from outboxio.model.notification import FIRST_POSITION, Position
from outboxio.storage.postgres.connection import LOOP_SETTINGS, applying
from outboxio.storage.postgres.events import ANY_UNDELIVERED, FAN_OUT, FAN_OUT_PLAIN, id_head
from outboxio.storage.postgres.notifications import FIND_DUE, SETTLE, SETTLE_WITH_DETAILS
from outboxio.storage.postgres.ordering import FIND_HEADS, UNBLOCK
from outboxio.storage.postgres.session import CLAIM, FINISH
from outboxio.storage.tables.events import WAITING_BY_TYPE
from outboxio.storage.tables.notifications import (
    ANY_DUE,
    COUNT_UNFINISHED,
    EXPIRE,
    FIND_EXPIRED,
    FIND_PARKING,
    LOOK_BACK,
    OLDEST_UNFINISHED,
    REPLAY,
    RESUME,
    RETRY,
    SELECT_BY_ID,
    SKIP,
    UNFINISHED_NAMES,
)
from outboxio.storage.tables.ordering import (
    BLOCK,
    FIND_BLOCKED,
    FIND_PRECEDED,
    FIRST_HEADS,
    HEADS_AFTER,
    POSTPONE,
    RELEASE,
)
from outboxio.storage.tables.partitions import FIND_MISPLACED, REHASH
from outboxio.storage.tables.retention import (
    FIND_EVENTS,
    FIND_NOTIFICATIONS,
    PARKING,
    REMOVE_EVENTS,
    REMOVE_NOTIFICATIONS,
)
from tests.kit.rendered import on_postgres
from tests.kit.size import FULL

pytestmark = [pytest.mark.every_version, pytest.mark.with_tables]

NOW = datetime(2030, 1, 1)
LONG_AGO = NOW - timedelta(days=365)
TYPES = 8
BATCH = 1000

#: The number of unrelated rows: half a million with ``OUTBOXIO_TEST_FULL_SIZE=1``.
PARTS = 1 if FULL else 10

EVENTS = """
INSERT INTO eventlog.events (id, namespace, action_id, action_name, action_params, started_date, completion_date,
  model_id, model_type, event_type, payload, event_date, delivered)
SELECT gen_random_uuid(), $1, gen_random_uuid(), 'Deposit', '{"amount": 1}', $2::timestamp, $2::timestamp, i::text,
  'Wallet', $3 || (i % $4::int), '{"amount": 1, "currency": "EUR"}', $2::timestamp + i * interval '1 ms', $6
FROM generate_series(1, $5::int) AS i
"""

NOTIFICATIONS = """
INSERT INTO eventlog.event_notifications (id, event_id, handler_name, namespace, action_id, action_name, action_params,
  started_date, completion_date, model_id, model_type, event_type, payload, event_date, state, attempts, next_retry_at,
  created_date, updated_date, sequence, retention_from)
SELECT gen_random_uuid(), gen_random_uuid(), $1, $2, gen_random_uuid(), 'Deposit', '{"amount": 1}', $3, $3, i::text,
  'Wallet', 'T0', '{"amount": 1}', $3, $4, 1, $3, $3, $3, i, $3
FROM generate_series(1, $5::int) AS i
"""

#: Rows of two keys in turn, or without a key.
ROWS_WITH_KEYS = """
INSERT INTO eventlog.event_notifications (id, event_id, handler_name, namespace, action_id, action_name, action_params,
  started_date, completion_date, model_id, model_type, event_type, payload, event_date, state, attempts, next_retry_at,
  created_date, updated_date, sequence, retention_from, ordering_key)
SELECT gen_random_uuid(), gen_random_uuid(), $1, 'app', gen_random_uuid(), 'Deposit', '{"amount": 1}', $2, $2, i::text,
  'Wallet', 'T0', '{"amount": 1}', $2, $3, 1, $2, $2, $2, i, $2, $4 || (i % 2)
FROM generate_series(1, $5::int) AS i
"""

SUBSCRIBE = """
INSERT INTO eventlog.subscriptions SELECT 'app', $1, 'T' || i, '', '[]', 0, FALSE, $2 FROM generate_series(0, 7) AS i
"""


@asynccontextmanager
async def loop_connection(url: str) -> AsyncIterator[Any]:
    """A connection like those of the loops, on a database with outboxio's tables and without autovacuum."""
    async with Outbox(url, namespace="app") as outbox:
        await outbox.migrate()
    connection = await asyncpg.connect(url)
    for table in ("events", "event_notifications", "subscriptions"):
        await connection.execute(f"ALTER TABLE eventlog.{table} SET (autovacuum_enabled = false)")
    await connection.execute(applying(LOOP_SETTINGS))
    try:
        yield connection
    finally:
        await connection.close()


class Plan:
    """The rows and pages touched by an execution of a statement."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.nodes = list(_nodes(root))
        # The cost of an insert grows with the height of the indexes; the cost of finding rows must not grow.
        finding = next((node for node in self.nodes if _finds(node, root)), root)
        self.buffers: int = finding["Shared Hit Blocks"] + finding["Shared Read Blocks"]
        self.rows_read = sum(
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            for node in self.nodes
            if node["Node Type"].startswith("Index") and node.get("Relation Name") in ("events", "event_notifications")
        )
        self.indexes = {node["Index Name"] for node in self.nodes if "Index Name" in node}
        self.sorts = [node for node in self.nodes if "Sort" in node["Node Type"]]
        self.table_scans = {
            node["Relation Name"]
            for node in self.nodes
            if node["Node Type"] in ("Seq Scan", "Bitmap Heap Scan") and node["Relation Name"].startswith("event")
        }


def _finds(node: dict[str, Any], root: dict[str, Any]) -> bool:
    """True for the part of a statement that finds the rows for the writing parts."""
    part = node.get("Subplan Name", "")
    return part == "CTE batch" or (root["Node Type"] == "ModifyTable" and part.startswith("InitPlan"))


async def prepare(connection: Any, name: str, statement: str) -> None:
    """Create the generic plan now, for the current state of the tables."""
    await connection.execute(f"PREPARE {name} AS {statement}")


async def explain(connection: Any, name: str, *args: Any) -> Plan:
    """Run a prepared statement, roll it back, and return its plan."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        literals = ", ".join(_literal(arg) for arg in args)
        text = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE {name}({literals})")
        return Plan(json.loads(text)[0]["Plan"])
    finally:
        await transaction.rollback()


def each(values: Iterable[Mapping[str, Any]]) -> str:
    """The sets of values of a query that runs for each of them."""
    return json.dumps(list(values))


EVERY_PARTITION = each({"partition": number} for number in range(MAX_PARTITIONS))


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "'{" + ", ".join(f'"{item}"' for item in value) + "}'"
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, int) else f"'{value}'"


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


async def fan_out(connection: Any, prepared: str, *closed: int) -> Plan:
    types = [f"T{i}" for i in range(TYPES)]
    limits = types, [BATCH // TYPES] * TYPES
    return await explain(connection, prepared, "app", NOW, LONG_AGO, *limits, BATCH, id_head(), [0] * TYPES, 0, *closed)


async def find_due(connection: Any, prepared: str, names: Sequence[str]) -> Plan:
    number = len(names)
    positions = [FIRST_POSITION[0]] * number, [FIRST_POSITION[1]] * number
    limits = [BATCH // number] * number
    return await explain(connection, prepared, "app", NOW, list(names), [0] * number, limits, *positions)


async def with_all_statistics(
    connection: Any, statement: str, fill: Callable[[], Awaitable[None]]
) -> AsyncIterator[str]:
    """The statement planned for empty tables, then for full tables without statistics, then with current statistics."""
    await fill()
    yield "planned_when_empty"
    await prepare(connection, "planned_without_statistics", statement)
    yield "planned_without_statistics"
    await connection.execute("ANALYZE")
    await prepare(connection, "planned_with_statistics", statement)
    yield "planned_with_statistics"


def assert_flat(small: Plan, large: Plan, what: str) -> None:
    """A poll of a large table reads the same rows as of a small table, and no more of the index above them."""
    assert not large.table_scans, f"{what} scans {large.table_scans}"
    assert large.rows_read <= small.rows_read * 1.1 + 10, f"{what} reads {large.rows_read} rows"
    assert large.buffers <= small.buffers * 1.3 + 50, f"{what} touches {large.buffers} buffers"


@pytest.mark.parametrize("statement", [FAN_OUT, FAN_OUT_PLAIN], ids=["any", "plain"])
async def test_fan_out_reads_one_batch_for_any_backlog(postgres_url: str, statement: str) -> None:
    closed = [0] * (statement == FAN_OUT)
    async with loop_connection(postgres_url) as connection:
        await prepare(connection, "planned_when_empty", statement)
        await prepare(connection, "any_undelivered", ANY_UNDELIVERED)
        await prepare(connection, "waiting", on_postgres(WAITING_BY_TYPE))
        await connection.execute(SUBSCRIBE, "h", NOW)
        await connection.execute(EVENTS, "app", LONG_AGO, "T", TYPES, 2 * BATCH, False)
        small = await fan_out(connection, "planned_when_empty", *closed)
        assert small.rows_read == pytest.approx(BATCH, rel=0.05)

        async def fill() -> None:
            await connection.execute(EVENTS, "app", LONG_AGO, "T", TYPES, 200_000 // PARTS, False)
            await connection.execute(EVENTS, "app", LONG_AGO, "Unsubscribed", 3, 50_000 // PARTS, False)
            await connection.execute(EVENTS, "another", LONG_AGO, "T", TYPES, 50_000 // PARTS, False)
            await connection.execute(NOTIFICATIONS, "h", "app", LONG_AGO, "SUCCEEDED", 200_000 // PARTS)

        async for prepared in with_all_statistics(connection, statement, fill):
            large = await fan_out(connection, prepared, *closed)
            assert "events_undelivered" in large.indexes
            assert_flat(small, large, f"fan-out {prepared}")
            if closed:
                await connection.execute("UPDATE eventlog.subscriptions SET ordered = TRUE")
                ordered = await fan_out(connection, prepared, *closed)
                assert_flat(small, ordered, f"fan-out to ordered handlers {prepared}")
                await connection.execute("UPDATE eventlog.subscriptions SET ordered = FALSE")
        waiting = await explain(connection, "any_undelivered", "app", LONG_AGO)
        assert waiting.rows_read <= TYPES
        assert not waiting.table_scans
        counted = await explain(connection, "waiting", each([{"key": "T0"}, {"key": "T1"}]), "app", 100)
        assert counted.rows_read == 200
        assert not counted.table_scans
        assert not counted.sorts


async def test_finding_due_rows_reads_one_batch_among_any_others(postgres_url: str) -> None:
    async with loop_connection(postgres_url) as connection:
        await prepare(connection, "planned_when_empty", FIND_DUE)
        await prepare(connection, "any_due", on_postgres(ANY_DUE))
        await prepare(connection, "unfinished_names", on_postgres(UNFINISHED_NAMES))
        await connection.execute(NOTIFICATIONS, "quick", "app", LONG_AGO, "PENDING", BATCH)
        await connection.execute(NOTIFICATIONS, "other", "app", LONG_AGO, "FAILED", BATCH)
        small = await find_due(connection, "planned_when_empty", ["quick", "other"])
        assert small.rows_read == pytest.approx(BATCH, rel=0.05)

        async def fill() -> None:
            before = LONG_AGO - timedelta(days=1)
            await connection.execute(NOTIFICATIONS, "quick", "app", LONG_AGO, "SUCCEEDED", 200_000 // PARTS)
            await connection.execute(NOTIFICATIONS, "without-a-slot", "app", before, "PENDING", 300_000 // PARTS)
            await connection.execute(NOTIFICATIONS, "quick", "another", LONG_AGO, "PENDING", 20_000)

        async for prepared in with_all_statistics(connection, FIND_DUE, fill):
            large = await find_due(connection, prepared, ["quick", "other"])
            assert "event_notifications_partition" in large.indexes
            assert not large.sorts, "the index has the rows in order"
            assert_flat(small, large, f"the due query {prepared}")
        slots = each({"handler_name": name, "partition": 0} for name in ("quick", "other", "nobody"))
        due = await explain(connection, "any_due", slots, "app", NOW)
        assert due.rows_read <= 3
        assert not due.table_scans
        names = await explain(connection, "unfinished_names", "app")
        assert names.rows_read <= 10
        assert not names.table_scans


OLDER_INDEX = """
CREATE INDEX event_notifications_due ON eventlog.event_notifications (namespace, handler_name, next_retry_at, sequence)
WHERE state IN ('PENDING', 'FAILED', 'DYING')
"""

#: Rows with numbers of partitions, in turn.
SPREAD = """
INSERT INTO eventlog.event_notifications (id, event_id, handler_name, namespace, action_id, action_name, action_params,
  started_date, completion_date, model_id, model_type, event_type, payload, event_date, state, attempts, next_retry_at,
  created_date, updated_date, sequence, retention_from, partition_number)
SELECT gen_random_uuid(), gen_random_uuid(), 'shared', 'app', gen_random_uuid(), 'Deposit', '{"amount": 1}', $1, $1,
  i::text, 'Wallet', 'T0', '{"amount": 1}', $1, $2, 1, $1, $1, $1, i, $1, i % $3::int
FROM generate_series(1, $4::int) AS i
"""


class Polls:
    """The statements that read a handler by partition, for a number of partitions."""

    def __init__(self, number: int) -> None:
        self.size, self.all, self.last = BATCH // number, list(range(number)), number - 1

    def __iter__(self) -> Iterator[tuple[str, str, Sequence[Any], int]]:
        """A name, the statement, the arguments, and the number of rows to read at most."""
        yield "all partitions", FIND_DUE, self._find(self.all, FIRST_POSITION), self.size * len(self.all)
        yield "one partition", FIND_DUE, self._find([self.last], FIRST_POSITION), self.size
        yield "behind a position", FIND_DUE, self._find([self.last], (LONG_AGO, 200)), self.size
        yield "a chunk of a backlog", on_postgres(FIND_MISPLACED), self._misplaced(), 50
        slots = [{"handler_name": "shared", "partition": number} for number in self.all]
        yield "whether a row is due", on_postgres(ANY_DUE), [each(slots), "app", NOW], len(self.all)
        yield "whether none is due", on_postgres(ANY_DUE), [each(slots[-1:]), "app", LONG_AGO - timedelta(1)], 0
        yield (
            "the oldest row",
            on_postgres(OLDEST_UNFINISHED),
            [EVERY_PARTITION, "app", "shared"],
            len(self.all) + 1,
        )  # rounded
        yield "names", on_postgres(UNFINISHED_NAMES), ["app"], 1
        yield "expiring", on_postgres(FIND_EXPIRED), [each([{"name": "shared"}]), "app", NOW, 10], 20

    def _find(self, partitions: list[int], after: Position) -> Sequence[Any]:
        number = len(partitions)
        return ["app", NOW, ["shared"] * number, partitions, [self.size] * number, *([part] * number for part in after)]

    def _misplaced(self) -> Sequence[Any]:
        return ["app", "shared", self.last, LONG_AGO, 200, NOW, 50]


@pytest.mark.parametrize("has_older_index", [False, True], ids=["contracted", "with-the-older-index"])
@pytest.mark.parametrize("number", [1, 16, 64])
async def test_a_partition_read_touches_no_row_of_another_partition(
    postgres_url: str, number: int, has_older_index: bool
) -> None:
    """With any planner statistics. ANALYZE and TRUNCATE make each statement be planned again."""
    polls, sorting = list(Polls(number)), {"the oldest row"}  # only the rows read are sorted
    async with loop_connection(postgres_url) as connection:
        if has_older_index:
            await connection.execute(OLDER_INDEX)
        counts = "INSERT INTO eventlog.handler_partitions VALUES ('app', 'shared', $1, $1, $1, $2)"
        await connection.execute(counts, number, NOW)

        async def plan(statistics: str) -> None:
            for place, (_, statement, _, _) in enumerate(polls):
                await prepare(connection, f"{statistics}_{place}", statement)

        async def fill(rows: int) -> None:
            await connection.execute(SPREAD, LONG_AGO, "PENDING", number, rows)
            await connection.execute(SPREAD, LONG_AGO, "SUCCEEDED", number, rows)

        async def look(statistics: str) -> None:
            for place, (what, _, arguments, most) in enumerate(polls):
                found = await explain(connection, f"{statistics}_{place}", *arguments)
                assert found.rows_read <= most, (
                    f"{what}, planned {statistics}: {found.rows_read} rows of {found.indexes}"
                )
                assert not found.table_scans, f"{what}, planned {statistics}"
                assert not found.sorts or what in sorting, f"{what}, planned {statistics}"

        await plan("when_empty")
        await fill(100_000 // PARTS)
        await look("when_empty")
        await connection.execute("TRUNCATE eventlog.event_notifications")
        await fill(2 * BATCH)
        await connection.execute("ANALYZE")
        await plan("when_small")
        await look("when_small")
        await fill(100_000 // PARTS)
        await look("when_small")
        await plan("with_stale_statistics")
        await look("with_stale_statistics")
        await connection.execute("ANALYZE")
        await look("when_small")


@pytest.mark.parametrize("statement", [SETTLE, SETTLE_WITH_DETAILS], ids=["equal", "with-details"])
async def test_settling_reaches_rows_by_their_primary_key(postgres_url: str, statement: str) -> None:
    async with loop_connection(postgres_url) as connection:
        await prepare(connection, "planned_when_empty", statement)
        await connection.execute("INSERT INTO eventlog.leases VALUES ('app/dispatch/h', 1, 'me', $1, 0)", NOW)
        await connection.execute(NOTIFICATIONS, "h", "app", LONG_AGO, "PENDING", BATCH)

        async def fill() -> None:
            await connection.execute(NOTIFICATIONS, "h", "app", LONG_AGO, "PENDING", 50_000)

        async for prepared in with_all_statistics(connection, statement, fill):
            rows = await connection.fetch("SELECT id FROM eventlog.event_notifications LIMIT 500")
            ids = [str(row["id"]) for row in rows]
            leases = ["app/dispatch/h"], ["h/0"], [1]
            details = [[NOW] * 500, ["{}"] * 500] if statement is SETTLE_WITH_DETAILS else []
            plan = await explain(connection, prepared, ids, "FAILED", 1, *leases, NOW, *details)
            assert plan.rows_read == 500, prepared
            assert "event_notifications_pkey" in plan.indexes
            assert not plan.table_scans


# --- key queues ------------------------------------------------------------------------------------------

NIL = "00000000-0000-0000-0000-000000000000"
ABSENT = each([{"name": "old"}, {"name": "nobody"}])
KEY_QUEUES: dict[str, tuple[str, Sequence[Any], str]] = {
    "a head": (FIND_HEADS, ["app", ["ledger"], ["blocked0"], True], "line"),
    "heads under two names": (FIND_HEADS, ["app", ["ledger", "old"], ["blocked0", "blocked1"], False], "line"),
    "the first keys": (on_postgres(FIRST_HEADS), ["app", "ledger", "", True, 3], "line"),
    "the keys behind one": (on_postgres(HEADS_AFTER), ["app", "ledger", "blocked1", False, 3], "line"),
    "unblocking": (UNBLOCK, ["app", ["ledger"], ["blocked0", "blocked1", "pending0"], 3, NOW], "line"),
    "blocked rows without a key": (
        on_postgres(FIND_BLOCKED),
        [each([{"name": "plain"}, {"name": "ledger"}]), "app", 5, 10],
        "line",
    ),
    "due rows": (FIND_DUE, ["app", NOW, ["ledger"], [0], [10], [FIRST_POSITION[0]], [FIRST_POSITION[1]]], "partition"),
    "resuming": (on_postgres(FIND_PARKING), [each([{"name": "ledger"}]), "app", "dead1"], "parked"),
    "unfinished names": (on_postgres(UNFINISHED_NAMES), ["app"], "line"),
    "counting waiting rows of a neighbouring name": (on_postgres(COUNT_UNFINISHED), [ABSENT, "app"], "line"),
    "the oldest that waits": (on_postgres(OLDEST_UNFINISHED), [EVERY_PARTITION, "app", "ledger"], "partition"),
    "expiring a few": (on_postgres(FIND_EXPIRED), [each([{"name": "ledger"}]), "app", NOW, 10], "line"),
    "expiring blocked rows": (on_postgres(FIND_EXPIRED), [each([{"name": "plain"}]), "app", NOW, 10], "line"),
    "expiring due rows": (on_postgres(FIND_EXPIRED), [each([{"name": "ledger"}]), "app", NOW, 3], "partition"),
    "expiring nothing": (on_postgres(FIND_EXPIRED), [ABSENT, "app", NOW, 10], "line"),
}


async def fill_key_queues(connection: Any, blocked: int, others: int, dead: int) -> None:
    """Blocked rows of two keys, more rows of both keys and of no key; a few due rows; dead rows of other keys."""
    await connection.execute(ROWS_WITH_KEYS, "ledger", LONG_AGO, "BLOCKED", "blocked", blocked)
    await connection.execute(ROWS_WITH_KEYS, "ledger", LONG_AGO, "SUCCEEDED", "blocked", others)
    await connection.execute(ROWS_WITH_KEYS, "ledger", LONG_AGO, "DEAD", "blocked", others)
    await connection.execute(ROWS_WITH_KEYS, "plain", LONG_AGO, "BLOCKED", None, others)
    await connection.execute(ROWS_WITH_KEYS, "ledger", LONG_AGO, "PENDING", "pending", 4)
    await connection.execute(ROWS_WITH_KEYS, "ledger", LONG_AGO, "EXPIRED", "dead", dead)


async def test_a_long_key_queue_costs_no_more_than_a_short_one(postgres_url: str) -> None:
    async with loop_connection(postgres_url) as connection:
        await fill_key_queues(connection, 20, others=20, dead=4)
        for number, (statement, _, _) in enumerate(KEY_QUEUES.values()):
            await prepare(connection, f"when_small_{number}", statement)
        small = [
            await explain(connection, f"when_small_{number}", *arguments)
            for number, (_, arguments, _) in enumerate(KEY_QUEUES.values())
        ]

        await fill_key_queues(connection, 100_000, others=20_000, dead=0)
        for statistics in ("when_small", "without_statistics", "with_statistics"):
            if statistics == "with_statistics":
                await connection.execute("ANALYZE")
            for number, (what, (statement, arguments, index)) in enumerate(KEY_QUEUES.items()):
                if statistics != "when_small":
                    await prepare(connection, f"{statistics}_{number}", statement)
                large = await explain(connection, f"{statistics}_{number}", *arguments)
                assert f"event_notifications_{index}" in large.indexes, f"{what}, planned {statistics}"
                assert_flat(small[number], large, f"{what}, planned {statistics},")
                assert large.buffers < 100


BY_KEY: dict[str, tuple[str, Callable[[list[str], list[str]], Sequence[Any]], str]] = {
    "blocking": (on_postgres(BLOCK), lambda ids, event_ids: [NOW, ids], "pkey"),
    "postponing": (on_postgres(POSTPONE), lambda ids, event_ids: [NOW, NOW, ids], "pkey"),
    "claiming": (CLAIM, lambda ids, event_ids: [ids, ["PENDING", "FAILED"]], "pkey"),
    "finishing": (FINISH, lambda ids, event_ids: [ids, "SUCCEEDED", 1, NOW], "pkey"),
    "preceded rows": (on_postgres(FIND_PRECEDED), lambda ids, event_ids: [ids], "event_id_handler_name_key"),
    "releasing": (
        on_postgres(RELEASE),
        lambda ids, event_ids: [NOW, event_ids],
        "event_id_handler_name_key",
    ),
    "moving": (on_postgres(REHASH), lambda ids, event_ids: [ids, 0, "app/dispatch/h", 1], "pkey"),
    "rows by their id": (
        on_postgres(SELECT_BY_ID),
        lambda ids, event_ids: ["app", event_ids],
        "event_id_handler_name_key",
    ),
    "retrying": (on_postgres(RETRY), lambda ids, event_ids: [NOW, NOW, "app", ids], "pkey"),
    "skipping": (on_postgres(SKIP), lambda ids, event_ids: [NOW, "app", ids], "pkey"),
    "expiring found rows": (on_postgres(EXPIRE), lambda ids, event_ids: [NOW, ids, NOW], "pkey"),
    "resuming found rows": (on_postgres(RESUME), lambda ids, event_ids: [NOW, ids], "pkey"),
    "replaying found rows": (on_postgres(REPLAY), lambda ids, event_ids: [NOW, ids, ["DEAD"]], "pkey"),
}


async def test_rows_are_found_by_their_id_and_by_event_id(postgres_url: str) -> None:
    async with loop_connection(postgres_url) as connection:
        for number, (statement, _, _) in enumerate(BY_KEY.values()):
            await prepare(connection, f"when_empty_{number}", statement)
        await fill_key_queues(connection, 10_000, others=5000, dead=5000)
        rows = await connection.fetch("SELECT id, event_id FROM eventlog.event_notifications ORDER BY id LIMIT 200")
        ids, event_ids = ([str(row[column]) for row in rows] for column in ("id", "event_id"))

        for statistics in ("when_empty", "without_statistics", "with_statistics"):
            if statistics == "with_statistics":
                await connection.execute("ANALYZE")
            for number, (what, (statement, arguments, index)) in enumerate(BY_KEY.items()):
                if statistics != "when_empty":
                    await prepare(connection, f"{statistics}_{number}", statement)
                plan = await explain(connection, f"{statistics}_{number}", *arguments(ids, event_ids))
                assert plan.rows_read <= 3 * len(rows), f"{what}, planned {statistics}"
                assert f"event_notifications_{index}" in plan.indexes, f"{what}, planned {statistics}"
                rest = plan.indexes - {"event_notifications_pkey", "event_notifications_event_id_handler_name_key"}
                assert rest <= {"handler_partitions_pkey", "leases_pkey"}, f"{what}, planned {statistics}"
                assert not plan.table_scans


async def test_rows_of_unordered_handlers_are_in_no_key_index(postgres_url: str) -> None:
    async with loop_connection(postgres_url) as connection:
        sizes = (
            "SELECT pg_relation_size('eventlog.event_notifications_line'),"
            " pg_relation_size('eventlog.event_notifications_parked')"
        )
        empty = await connection.fetchrow(sizes)
        for state in ("PENDING", "FAILED", "SUCCEEDED", "DEAD", "EXPIRED"):
            await connection.execute(NOTIFICATIONS, "plain", "app", LONG_AGO, state, BATCH)
        await connection.execute("INSERT INTO eventlog.leases VALUES ('app/dispatch/h', 1, 'me', $1, 0)", NOW)
        await prepare(connection, "settle", SETTLE)
        await prepare(connection, "due", FIND_DUE)
        rows = await connection.fetch("SELECT id FROM eventlog.event_notifications WHERE state = 'PENDING'")
        leases = ["app/dispatch/h"], ["plain/0"], [1]

        due = await find_due(connection, "due", ["plain"])
        settle = await explain(connection, "settle", [str(row[0]) for row in rows], "DEAD", 1, *leases, NOW)

        assert due.indexes == {"event_notifications_partition"}
        assert settle.rows_read == BATCH
        assert "event_notifications_line" not in settle.indexes
        assert await connection.fetchrow(sizes) == empty


# --- removal ---------------------------------------------------------------------------------------------

NAMES = '[{"name": "", "other": ""}, {"name": "ledger", "other": "books"}]'


def scans(notifications: Sequence[str] = (), events: Sequence[str] = ()) -> dict[str, tuple[str, Sequence[Any]]]:
    """The statements of scans. ``notifications``, ``events``: the ids of a batch."""
    return {
        "notifications": (on_postgres(FIND_NOTIFICATIONS), ["app", NOW, NOW, NOW, NIL, BATCH]),
        "notifications_that_park": (on_postgres(PARKING), [notifications, NAMES, "app"]),
        "notifications_removed": (on_postgres(REMOVE_NOTIFICATIONS), [notifications, NOW, NOW]),
        "events": (on_postgres(FIND_EVENTS), ["app", NOW, NIL, BATCH]),
        "events_removed": (on_postgres(REMOVE_EVENTS), [events, NOW]),
        "replay": (
            on_postgres(LOOK_BACK),
            ["app", ["ledger", "plain"], ["DEAD", "SUCCEEDED"], LONG_AGO, NOW, True, [], NIL, BATCH],
        ),
    }


async def first_ids(connection: Any, table: str) -> list[str]:
    return [str(row[0]) for row in await connection.fetch(f"SELECT id FROM eventlog.{table} ORDER BY id LIMIT {BATCH}")]


async def test_a_batch_of_a_scan_reads_only_its_own_rows(postgres_url: str) -> None:
    """And one row after its own rows: one per key."""
    async with loop_connection(postgres_url) as connection:
        for what, (statement, _) in scans().items():
            await prepare(connection, f"{what}_when_empty", statement)
        await connection.execute(EVENTS, "app", LONG_AGO, "T", TYPES, 50_000, True)
        await connection.execute(EVENTS, "another", LONG_AGO, "T", TYPES, 50_000 // PARTS, False)
        await fill_key_queues(connection, 20_000, others=10_000, dead=20_000)
        batches = [await first_ids(connection, table) for table in ("event_notifications", "events")]
        for statistics in ("when_empty", "without_statistics", "with_statistics"):
            if statistics == "with_statistics":
                await connection.execute("ANALYZE")
            for what, (statement, arguments) in scans(*batches).items():
                if statistics != "when_empty":
                    await prepare(connection, f"{what}_{statistics}", statement)
                plan = await explain(connection, f"{what}_{statistics}", *arguments)
                assert not plan.table_scans, f"{what}, planned {statistics}"
                assert BATCH <= plan.rows_read <= 4 * BATCH, f"{what}, planned {statistics}"
