"""The cost of an event in statements: a change that adds statements fails here, independent of timing.

All messages are read from the wire (``tests/kit/wire.py``), so the driver's own messages count as well. The rows read
by statements are tested in ``test_plans.py`` and ``test_mysql_plans.py``.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import count
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outboxio import Event, Outbox, Settings, Transaction
from outboxio.model.lock_name import LockName
from outboxio.model.notification import DueQuery, State
from outboxio.model.operating.operation import JobRow
from outboxio.model.outcome import Bucket, Lease, Outcome
from outboxio.runtime import run_loops
from outboxio.storage.postgres import events
from outboxio.storage.postgres.connection import LOOP_SETTINGS, applying
from outboxio.storage.postgres.events import FAN_OUT_PLAIN, UNLESS_MADE, id_head
from outboxio.storage.postgres.insertion import INSERT_EVENTS
from outboxio.storage.postgres.notifications import SETTLE
from outboxio.storage.protocols import FanoutRequest
from outboxio.storage.tables.jobs import PAUSE
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import database_of
from tests.kit.marks import needs_asyncpg
from tests.kit.probes import MakeOutbox, add_wallet, doing
from tests.kit.spies import counters, deposits
from tests.kit.storage import LONG_AGO, NOW, Store
from tests.kit.wire import Wire, watched

pytestmark = [
    needs_asyncpg,
    pytest.mark.every_version,
    pytest.mark.with_tables,
    pytest.mark.one_of_family,
    pytest.mark.slow,
]

BATCH = 1000
OUTCOMES = 500
ALONE = Settings(notify=False)  # wake-ups for other processes are sent at unobserved times


@pytest.fixture
def wire(database_url: str) -> Iterator[Wire]:
    """Records every message of the test; created before any connection."""
    with watched(keeps_texts=True) as wire:
        yield wire


class Spent:
    """The messages sent within a block."""

    statements = round_trips = 0
    texts: Sequence[str] = ()


@contextmanager
def counted(wire: Wire) -> Iterator[Spent]:
    spent = Spent()
    statements, round_trips, texts = wire.statements, wire.round_trips, len(wire.texts)
    yield spent
    spent.statements, spent.round_trips = wire.statements - statements, wire.round_trips - round_trips
    spent.texts = wire.texts[texts:]


# --- one batch -------------------------------------------------------------------------------------

# (statements, round trips) of a batch, however large it is. SQLite has no wire.
PER_BATCH: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "fan-out": {"postgres": (1, 1), "mysql": (8, 3), "mariadb": (8, 3), "sqlite": (7, 0)},
    "finding": {"postgres": (1, 1), "mysql": (1, 1), "mariadb": (1, 1), "sqlite": (1, 0)},
    "settling": {"postgres": (1, 1), "mysql": (1, 1), "mariadb": (1, 1), "sqlite": (1, 0)},
}


@pytest.mark.parametrize("size", [1, BATCH])
async def test_a_batch_costs_a_fixed_number_of_statements_and_round_trips(
    wire: Wire, make_outbox: MakeOutbox, look: Look, size: int
) -> None:
    store = Store(await make_outbox(settings=ALONE), look)
    await store.subscribe("h")
    lease = await lease_of(store, "h")
    stages: dict[str, Callable[[], Awaitable[Any]]] = {
        "fan-out": lambda: store.database.events.fan_out(FanoutRequest("app", NOW, LONG_AGO, {}, BATCH)),
        "finding": lambda: store.database.notifications.find_due("app", NOW, [DueQuery("h", BATCH)]),
        "settling": lambda: store.database.notifications.settle(succeeded(found, lease), NOW),
    }
    for warm in (True, False):  # connections are opened and statements prepared on first use
        found: Any = []
        await deposits(store.outbox, size)
        for stage, run in stages.items():
            with counted(wire) as spent:
                result = await run()
            if stage == "finding":
                found = result
            if not warm:
                assert (spent.statements, spent.round_trips) == PER_BATCH[stage][look.dialect], (stage, spent.texts)
        assert len(found) == size


# Right after a commit in the same process, fan-out does not look for events first.
PER_EXPECTED = {"postgres": (1, 1), "mysql": (6, 2), "mariadb": (6, 2), "sqlite": (6, 0)}


async def test_expected_events_save_a_lookup(wire: Wire, make_outbox: MakeOutbox, look: Look) -> None:
    store = Store(await make_outbox(settings=ALONE), look)
    await store.subscribe("h")
    for _ in range(2):
        await store.insert_notifications("a")
    await deposits(store.outbox, 3)

    with counted(wire) as spent:
        done = await store.fan_out(expected=True)

    assert done.notifications == 3
    assert (spent.statements, spent.round_trips) == PER_EXPECTED[look.dialect], spent.texts


# Nor while every round finds some.
UNDER_LOAD = {**PER_EXPECTED, "sqlite": PER_BATCH["fan-out"]["sqlite"]}


async def test_under_load_fan_out_claims_without_a_lookup(wire: Wire, make_outbox: MakeOutbox, look: Look) -> None:
    store = Store(await make_outbox(settings=ALONE), look)
    await store.subscribe("h")
    for number in range(5):
        await deposits(store.outbox, 3)
        with counted(wire) as spent:
            done = await store.fan_out()
        assert done.notifications == 3
        if number >= 2:
            assert (spent.statements, spent.round_trips) == UNDER_LOAD[look.dialect], spent.texts


async def test_a_batch_of_many_types_costs_no_more_than_one_type(
    wire: Wire, make_outbox: MakeOutbox, look: Look
) -> None:
    outbox = await make_outbox(settings=ALONE)
    types = [type(Event)(f"Type{number}", (Event,), {"__module__": __name__}) for number in range(60)]
    outbox.handler(*types, name="h")(Journal())
    await outbox.drain()  # announces it
    costs = list[tuple[int, int]]()
    for number in (1, 1, 60):  # the first opens the connection
        async with outbox.transaction("Emit") as tx:
            for kind in types[:number]:
                tx.emit(kind())
                tx.emit(kind())
        with counted(wire) as spent:
            done = await database_of(outbox).events.fan_out(FanoutRequest("app", NOW, LONG_AGO, {}, BATCH))
        assert (len(done.events), done.notifications) == (number, 2 * number)
        costs.append((spent.statements, spent.round_trips))

    assert costs[2] == costs[1], spent.texts


async def lease_of(store: Store, name: str) -> Lease:
    lock = LockName("app", "dispatch", name)
    table = store.look.table("leases")
    await store.look.fetch(f"INSERT INTO {table} VALUES ('{lock.lease}', 1, 'me', '2030-01-01 12:00:00', 0)")
    return Lease(lock.lease, name, 1)


def succeeded(rows: Sequence[Any], lease: Lease) -> Bucket:
    outcomes = [Outcome(row.id, lease, State.SUCCEEDED, 1) for row in rows]
    return Bucket(State.SUCCEEDED, 1, sorted(outcomes, key=lambda outcome: outcome.notification_id.int))


async def test_a_drain_needs_few_batches(wire: Wire, make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes wait here for more outcomes, not for a delay; the number of reads depends slightly on timing.

    On PostgreSQL the same statement reads events and creates notifications, and after the last one fan-out reads a few
    more times, less and less often, and only for a short time.
    """
    events = 5 * BATCH
    monkeypatch.setattr(run_loops, "SETTLE_DELAY", 3600.0)
    rarely = {"fanout_poll_delay": "1h", "handling_poll_delay": "1h"}
    outbox = await make_outbox(settings=Settings(outcome_delay="20s", notify=False, **rarely))
    outbox.handler(MoneyDeposited, name="h")(Journal())
    await deposits(outbox, events)

    with counted(wire) as spent:
        async with outbox.running():
            await eventually(lambda: counters(outbox).succeeded == events)

    kinds = Counter(kind_of(text) for text in spent.texts)
    assert kinds["notify"] <= events / BATCH + 16, kinds
    assert kinds["settle"] <= events / OUTCOMES + 5, kinds
    assert kinds["find"] <= 60, kinds


KINDS = {
    "notify": r"INSERT INTO eventlog[._]event_notifications",
    "settle": r"UPDATE eventlog[._]event_notifications\b.*SET (n\.)?state",
    "fan-out": r"eventlog[._]events\b|UNION ALL|subscribed|eventlog[._]subscriptions",
    "find": r"FROM eventlog[._]event_notifications|json_array|JSON_ARRAY",
    "pauses": r"eventlog[._]pauses",
    "locks": r"pg_notify|clock_timestamp|UTC_TIMESTAMP|leases|LOCK",
}


def kind_of(text: str) -> str:
    """The purpose of a statement as a keyword."""
    flat = " ".join(text.split())
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, flat)), flat[:60])


# --- rows ------------------------------------------------------------------------------------------

TALLY = "CREATE TABLE tally (what VARCHAR(40) NOT NULL)"
NOTE = {
    "postgres": """
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $f$
BEGIN INSERT INTO public.tally VALUES (lower(TG_OP) || ' ' || TG_TABLE_NAME); RETURN NULL; END $f$
""",
}
TRIGGER = {
    "postgres": "CREATE TRIGGER {name} AFTER {act} ON {on} FOR EACH ROW EXECUTE FUNCTION note()",
    "sqlite": "CREATE TRIGGER {name} AFTER {act} ON {on} BEGIN INSERT INTO tally VALUES ('{what}'); END",
    "aiomysql": """
CREATE TRIGGER eventlog.{name} AFTER {act} ON {on} FOR EACH ROW INSERT INTO {db}.tally VALUES ('{what}')
""",
}


async def test_each_event_and_notification_is_written_twice(outbox: Outbox, look: Look) -> None:
    """Once as a row, and again at delivery or settlement; no row is claimed or marked."""
    for name in ("first", "second"):
        outbox.handler(MoneyDeposited, name=name)(Journal())
    await tally(look)

    await deposits(outbox, 300)
    await outbox.drain()

    rows = await look.fetch("SELECT what, count(*) AS n FROM tally GROUP BY what")
    assert {row["what"]: row["n"] for row in rows} == {
        "insert events": 300,
        "update events": 300,
        "insert event_notifications": 600,
        "update event_notifications": 600,
    }


async def tally(look: Look) -> None:
    """Count in the database the rows written from now on."""
    await look.fetch(TALLY)
    if look.dialect in NOTE:
        await look.fetch(NOTE[look.dialect])
    trigger = TRIGGER.get(look.dialect) or TRIGGER[look.driver]
    for table in ("events", "event_notifications"):
        for act in ("insert", "update", "delete"):
            named = {"name": f"{act}_{table}", "act": act, "on": look.table(table), "what": f"{act} {table}"}
            await look.fetch(trigger.format(**named, db=look.url.rpartition("/")[2]))


# WAL records of a row, from and to: a row with one index entry fewer or more is outside. Where a page is full, its
# split is a few records more.
WAL_RECORDS = {"an event": (4.0, 4.5), "fanning out": (9.0, 9.6), "settling": (4.0, 4.5)}


async def test_the_wal_records_of_an_event(postgres_url: str) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        await require_wal_records(outbox, postgres_url)


async def require_wal_records(outbox: Outbox, postgres_url: str) -> None:
    store = Store(outbox, Look(postgres_url))
    await store.subscribe("h")
    lease = await lease_of(store, "h")
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(applying(LOOP_SETTINGS))
    ids, nothing = [str(uuid4()) for _ in range(BATCH)], [None] * BATCH
    shared = ("app", uuid4(), "Deposit", "{}", NOW, NOW, None, None, None, 0)
    models, payloads = [str(i) for i in range(BATCH)], ['{"amount": 1}'] * BATCH
    each = (ids, models, ["Wallet"] * BATCH, ["MoneyDeposited"] * BATCH, payloads, nothing, nothing, nothing, nothing)
    try:
        found = {"an event": await wal_records(connection, INSERT_EVENTS, *shared, *each) / BATCH}
        fan_out = ("app", NOW, LONG_AGO, [], [], BATCH, id_head(), [], None)
        found["fanning out"] = await wal_records(connection, FAN_OUT_PLAIN, *fan_out) / BATCH
        rows = [row["id"] for row in await connection.fetch("SELECT id FROM eventlog.event_notifications ORDER BY id")]
        assert len(rows) == BATCH
        leases = ([lease.name], [f"{lease.handler_name}/{lease.partition}"], [lease.term])
        settle = (rows[:OUTCOMES], "SUCCEEDED", 1, *leases, NOW)
        found["settling"] = await wal_records(connection, SETTLE, *settle) / OUTCOMES
    finally:
        await connection.close()

    for what, (least, most) in WAL_RECORDS.items():
        assert least <= found[what] <= most, found


@contextmanager
def fan_outs() -> Iterator[list[bool]]:
    """The fan-out statements sent within the block: True for one that skips existing rows."""
    found = list[bool]()
    with watched(keeps_texts=True) as wire:
        yield found
    found += [UNLESS_MADE in text for text in wire.texts if "AS limits(key" in text]


async def test_repeated_fan_out_costs_one_failed_statement_a_minute(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, look = Settings(fanout_batch_size=2, handling_enabled=False), Look(postgres_url)
    async with Outbox(postgres_url, namespace="app", settings=settings) as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="h")(Journal())

        async def set_back(number: int) -> None:
            await look.fetch("UPDATE {events} SET delivered = FALSE")
            assert (await outbox.drain()).fanned_out == number

        with fan_outs() as first:
            await deposits(outbox, 4)
            await outbox.drain()
        with fan_outs() as again:
            await set_back(4)
            await set_back(4)
        monkeypatch.setattr(events, "CONFLICTS_SECONDS", 0.0)
        database_of(outbox).events._conflicts_until = database_of(outbox).events._not_plain_until = 0.0
        with fan_outs() as later:
            await set_back(4)
        assert len(await look.notifications()) == 4

    assert len(first) >= 2
    assert not any(first)
    assert len(again) >= 5
    assert (again[0], all(again[1:])) == (False, True)
    assert later[:4] == [False, True] * 2


async def test_matching_by_type_and_by_topic_makes_one_row(postgres_url: str) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        store = Store(outbox, Look(postgres_url))
        await store.subscribe("h", topics=["audit"])
        with fan_outs() as statements:
            async with outbox.transaction("Deposit") as tx:
                tx.emit(MoneyDeposited(uuid4(), Decimal(1)), topic="audit")
            assert (await store.fan_out()).notifications == 1

    assert not any(statements)


NOT_PLAIN: Mapping[str, Callable[[Store], Awaitable[object]]] = {
    "by topic": lambda store: store.subscribe("h", topics=["audit"]),
    "ordered": lambda store: store.subscribe("h", ordered=True),
    "renamed": lambda store: store.subscribe("h", aliases=("former",)),
    "with partitions": lambda store: store.look.fetch(
        f"INSERT INTO eventlog.handler_partitions VALUES ('app', 'plain', 2, 2, 2, '{NOW}', NULL, NULL)"
    ),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
async def test_a_non_plain_subscription_costs_one_statement_a_minute(postgres_url: str, kind: str) -> None:
    with watched(keeps_texts=True) as wire:
        async with Outbox(postgres_url, namespace="app") as outbox:
            await outbox.migrate()
            store = Store(outbox, Look(postgres_url))
            await store.subscribe("plain")

            async def are_plain() -> list[bool]:
                """Whether each statement of a round that claims an event is the plain one."""
                await store.deposit("key")
                with counted(wire) as spent:
                    assert (await store.fan_out()).events == {"MoneyDeposited": 1}
                return ["not_plain AS" in text for text in spent.texts if "AS limits(key" in text]

            assert await are_plain() == [True]
            await NOT_PLAIN[kind](store)
            assert await are_plain() == [True, False]
            assert await are_plain() == [False]


async def test_fan_out_waits_for_no_fsync_but_later_transactions_do(postgres_url: str) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        store = Store(outbox, Look(postgres_url))
        await store.subscribe("h")
        connection = await asyncpg.connect(postgres_url)
        try:
            async with connection.transaction():
                await connection.execute(EMIT_ONE, uuid4(), NOW)
                assert await connection.fetchval("SHOW synchronous_commit") == "on"
                [taken] = await connection.fetch(
                    FAN_OUT_PLAIN, "app", NOW, LONG_AGO, [], [], BATCH, id_head(), [], None
                )
                assert taken["notifications"] == 1
                assert await connection.fetchval("SHOW synchronous_commit") == "off"
            assert await connection.fetchval("SHOW synchronous_commit") == "on"
        finally:
            await connection.close()


EMIT_ONE = """
INSERT INTO eventlog.events (id, namespace, action_id, action_name, action_params, started_date, completion_date,
  model_id, model_type, event_type, payload, event_date, delivered)
VALUES ($1, 'app', $1, 'Deposit', '{}', $2, $2, '1', 'Wallet', 'MoneyDeposited', '{}', $2, FALSE)
"""


async def wal_records(connection: Any, sql: str, *args: Any) -> int:
    """Run a statement, and return the WAL that the server reports for it."""
    text = await connection.fetchval(f"EXPLAIN (ANALYZE, WAL, FORMAT JSON) {sql}", *args)
    plan = json.loads(text)[0]["Plan"]
    parts = list(nodes(plan))
    read = {f"CTE {part['CTE Name']}" for part in parts if "CTE Name" in part}
    # A part without a reader runs after the others, and its records are not in the total.
    unread = [
        part for part in parts if part.get("Subplan Name", "").startswith("CTE") and part["Subplan Name"] not in read
    ]
    return sum(int(part["WAL Records"]) for part in (plan, *unread))


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


# --- an action -------------------------------------------------------------------------------------

# One statement of the action's own, and its events: (statements, round trips). On PostgreSQL COMMIT takes along what
# resets a connection, four statements; on MySQL BEGIN goes with the action's first statement and COMMIT with
# the events, so that nothing is sent besides.
PER_ACTION = {"postgres": (8, 4), "mysql": (4, 2), "mariadb": (4, 2), "sqlite": (4, 0)}


@pytest.mark.parametrize("events", [1, 10, 100])
async def test_the_events_of_an_action_cost_at_most_one_round_trip(
    wire: Wire, make_outbox: MakeOutbox, look: Look, events: int
) -> None:
    outbox = await make_outbox(settings=ALONE)
    await look.fetch("CREATE TABLE wallets (id VARCHAR(36) PRIMARY KEY, balance BIGINT NOT NULL)")
    names = (f"w{number}" for number in count())

    async def act(tx: Transaction) -> None:
        await add_wallet(tx, next(names))
        for number in range(events):
            tx.emit(WalletOpened(uuid4()), model_id=number)

    for _ in range(2):
        with counted(wire) as spent:
            await outbox.executor.execute(doing(act))

    assert (spent.statements, spent.round_trips) == PER_ACTION[look.dialect], spent.texts


# Where nothing of the action's own is written, MySQL needs one message for all.
PER_EMISSION = {"postgres": (7, 3), "mysql": (3, 1), "mariadb": (3, 1), "sqlite": (3, 0)}


async def test_an_action_that_only_emits_costs_what_its_events_cost(
    wire: Wire, make_outbox: MakeOutbox, look: Look
) -> None:
    outbox = await make_outbox(settings=ALONE)
    for _ in range(2):
        with counted(wire) as spent:
            await outbox.executor.execute(Emit((1, 2, 3)))

    assert (spent.statements, spent.round_trips) == PER_EMISSION[look.dialect], spent.texts


# BEGIN, the rows of the inbox, the rows now stored, the events, COMMIT; and the check or reset of the session.
PER_RECEIVE_MANY = {"postgres": (9, 5), "mysql": (9, 5), "mariadb": (9, 5), "sqlite": (5, 0)}


@pytest.mark.parametrize("messages", [1, 10, 500])
async def test_many_inbox_messages_cost_a_fixed_number_of_statements(
    wire: Wire, make_outbox: MakeOutbox, look: Look, messages: int
) -> None:
    outbox = await make_outbox(settings=ALONE)
    for call in range(2):
        with counted(wire) as spent:
            await outbox.inbox.receive_many(
                [
                    {"source": "s", "external_id": f"{call}-{number}", "type": "Paid", "payload": {"number": number}}
                    for number in range(messages)
                ]
            )

    assert (spent.statements, spent.round_trips) == PER_RECEIVE_MANY[look.dialect], spent.texts


# --- an idle process -------------------------------------------------------------------------------

STARTING = 4.5  # seconds until the work at startup is done, and reads happen once a second
IDLE = 2.0  # seconds


async def test_each_write_of_a_job_is_one_statement(wire: Wire, make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    table = database_of(outbox).jobs
    await table.insert("app", [JobRow("first", "every 1s", "WAITING", NOW, NOW)])  # opens the connection
    with counted(wire) as spent:
        await table.insert("app", [JobRow(f"job {number}", "every 1s", "WAITING", NOW, NOW) for number in range(3)])
        assert await table.write(PAUSE, namespace="app", name="job 1", now=NOW)

    assert [text.split()[0] for text in spent.texts] == ["INSERT", "UPDATE"], spent.texts


@pytest.mark.real_time("counts the statements of an idle second")
async def test_an_idle_second_costs_one_read_of_each_table(wire: Wire, make_outbox: MakeOutbox, look: Look) -> None:
    """Fan-out and finding read once a second, as does the loop that reads pauses; the locks are proven every 5 s.

    The figures of a minute are written, and old figures removed, at the end of a minute, which this test avoids.
    """
    outbox = await make_outbox()
    outbox.handler(MoneyDeposited, name="h")(Journal())
    await avoid_the_end_of_a_minute(STARTING + IDLE)
    async with outbox.running():
        await asyncio.sleep(STARTING)
        with counted(wire) as spent:
            started, before = time.monotonic(), wire.statements
            await asyncio.sleep(IDLE)
            await eventually(lambda: wire.statements >= before + 3)
            seconds = time.monotonic() - started

    kinds = Counter(kind_of(text) for text in spent.texts)
    assert set(kinds) <= {"notify", "fan-out", "find", "pauses", "locks"}, kinds
    assert spent.statements <= MOST_IN_IDLENESS[look.dialect] * seconds / IDLE, (kinds, seconds)


async def avoid_the_end_of_a_minute(seconds: float) -> None:
    """Wait for the next minute if this one ends within ``seconds``."""
    behind = 2.0  # seconds by which the writes at the end of a minute may be late
    into = time.time() % 60
    if into < behind or into + seconds > 59:
        await asyncio.sleep((60 - into + behind) % 60)


MOST_IN_IDLENESS = {"postgres": 11, "mysql": 11, "mariadb": 11, "sqlite": 18}
