"""User-defined functions, operators and types never replace PostgreSQL's own in outboxio's statements.

MySQL, MariaDB and SQLite are not affected. On MySQL and MariaDB an unqualified name means the built-in function if one
with that name exists; outboxio's tables are qualified with their database, and users cannot define operators. Functions
of SQLite belong to a connection, and only outboxio adds functions to its connection.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outboxio import EventEnvelope, Outbox, Settings
from outboxio.storage.__main__ import statements
from outboxio.storage.postgres import database as database_module
from outboxio.storage.postgres import events, lock, notifications, ordering, schema, session
from tests.kit.app import Emit, Journal, MoneyDeposited, WalletOpened, eventually
from tests.kit.rendered import on_postgres
from tests.kit.spies import Gate

MODULES = (database_module, events, ordering, lock, notifications, schema, session)

LONG_AGO = datetime(2000, 1, 1)

#: The types of our columns and arguments, and the types derived from them.
TYPES = (
    "text", "varchar", "uuid", "int4", "int8", "timestamp", "timestamptz", "jsonb", "bool", "text[]", "varchar[]",
    "uuid[]", "int4[]", "int8[]", "timestamp[]",
)  # fmt: skip
OPERATORS = ("=", "<>", "<", "<=", ">", ">=", "@>", "<@", "||", "+", "-", "*", "/", "<<", ">>", "&", "->", "->>")

MAKE_OPERATORS = """
DO $do$
DECLARE l text; r text; o text; f text; n int := 0;
BEGIN
  FOREACH l IN ARRAY $1 LOOP FOREACH r IN ARRAY $1 LOOP
    n := n + 1; f := 'public.foreign_' || n;
    EXECUTE format('CREATE FUNCTION %s(%s, %s) RETURNS bool LANGUAGE plpgsql AS '
      '$f$ BEGIN RAISE EXCEPTION ''somebody else''''s operator ran''; END $f$', f, l, r);
    FOREACH o IN ARRAY $2 LOOP
      EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = %s)', o, l, r, f);
    END LOOP;
  END LOOP; END LOOP;
END $do$
"""
SIGNATURES = """
SELECT DISTINCT proname::text AS name, pronargs AS arguments FROM pg_catalog.pg_proc
WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY ($1::text[]) AND pronargs BETWEEN 1 AND 2
"""


def our_statements(module: Any) -> Iterator[str]:
    """The constants of a module that are statements."""
    for name, value in vars(module).items():
        if name.lstrip("_").isupper() and isinstance(value, str):
            yield value


def names_called(statements: str) -> set[str]:
    return set(re.findall(r"\b([a-z][a-z0-9_]*)\s*\(", statements))


@asynccontextmanager
async def shadowed(url: str) -> AsyncIterator[None]:
    """Create a namesake in ``public`` of every function and operator of the statements, with the same arguments."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SET search_path = pg_catalog")
        types, operators = (f"ARRAY{list(names)!r}" for names in (TYPES, OPERATORS))
        await connection.execute(MAKE_OPERATORS.replace("$1", types).replace("$2", operators))
        texts = [text for module in MODULES for text in our_statements(module)]
        texts += [on_postgres(statement) for _, _, statement in statements()]
        called = names_called("\n".join(texts)) - {"array_agg"}  # asyncpg calls it on the application's connection
        for name, arguments in await connection.fetch(SIGNATURES, sorted(called)):
            for first in TYPES:
                for second in TYPES if arguments == 2 else ("",):
                    await connection.execute(
                        f'CREATE FUNCTION public."{name}"({first}{second and ", "}{second}) RETURNS text '
                        "LANGUAGE plpgsql AS $f$ BEGIN RAISE EXCEPTION 'somebody else''s function ran'; END $f$"
                    )
        yield
    finally:
        await connection.close()


@pytest.fixture
async def among_namesakes(postgres_url: str) -> AsyncIterator[str]:
    async with shadowed(postgres_url):
        yield postgres_url


async def test_a_statement_without_schemas_would_run_user_defined_code(among_namesakes: str) -> None:
    connection = await asyncpg.connect(among_namesakes)
    try:
        for statement in (
            "SELECT 'a'::varchar = 'a'", "SELECT ARRAY['a'] @> ARRAY['a'::text]", "SELECT * FROM unnest(ARRAY['a'])",
            "SELECT array_position(ARRAY['a'], 'a'::text)",
        ):  # fmt: skip
            with pytest.raises(asyncpg.RaiseError, match=r"somebody else's (operator|function) ran"):
                await connection.fetch(statement)
    finally:
        await connection.close()


async def test_the_whole_life_of_events_runs_no_user_defined_code(among_namesakes: str) -> None:
    settings = Settings(handling_max_backoff_cap="10ms")
    failing = [True]
    async with Outbox(among_namesakes, namespace="app", settings=settings) as outbox:
        await outbox.migrate()
        journals = {delivery: Journal() for delivery in ("at_least_once", "at_most_once", "transactional")}
        for delivery, journal in journals.items():
            outbox.handler(MoneyDeposited, name=delivery, delivery=delivery)(journal)  # type: ignore[arg-type]  # a delivery
        outbox.handler(MoneyDeposited, name="ordered", aliases={"former"}, ordered=True, priority=3)(Journal())

        @outbox.handler(MoneyDeposited, name="emits", delivery="transactional")
        async def emits(envelope: EventEnvelope[MoneyDeposited]) -> None:
            assert await envelope.tx.fetchval("SHOW search_path") == '"$user", public'
            envelope.emit(WalletOpened(envelope.event.wallet_id))

        @outbox.handler(WalletOpened, name="fails")
        async def fails(envelope: EventEnvelope[WalletOpened]) -> None:
            if failing:
                raise ValueError

        outbox.handler(WalletOpened, name="emits-later")(emit_later)

        async with outbox.running():
            await outbox.executor.execute(Emit((1, 2, 3)))
            await record(outbox, among_namesakes)
            for journal in journals.values():
                await journal.calls(4)
            await outbox.inbox.receive(source="s", external_id="1", event=WalletOpened(uuid4()))
            await outbox.inbox.consume(source="s", external_id="2", event=WalletOpened(uuid4()), on_error="store")
            await outbox.inbox.consume(source="s", external_id="2", event=WalletOpened(uuid4()), on_error="store")
            await eventually(lambda: is_failed(outbox))
            failing.clear()
        await outbox.drain()
        await operate(outbox)
        await outbox.migrate()
        await outbox.check()


async def emit_later(envelope: EventEnvelope[WalletOpened]) -> None:
    """The emitted events are written with the outcome, on an internal connection."""
    if envelope.action_name != "emits-later":
        envelope.emit(WalletOpened(uuid4()))


async def is_failed(outbox: Outbox) -> bool:
    return any(row.attempts for row in await outbox.admin.list(handler="fails"))


async def record(outbox: Outbox, url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await outbox.record(connection, MoneyDeposited(uuid4(), Decimal(4)), action="Deposit", ordering_key="k")
            await outbox.inbox.receive(source="s", external_id="3", event=WalletOpened(uuid4()), connection=connection)
    finally:
        await connection.close()
    outbox.wake()


async def operate(outbox: Outbox) -> None:
    """Run every operation of an operator."""
    admin = outbox.admin
    counts = await admin.counts()
    assert counts["SUCCEEDED"] > 10, counts
    assert counts["undelivered"] == 0, counts
    rows = await admin.list(handler="fails")
    assert await admin.inspect(rows[0].id)
    await admin.retry([row.id for row in rows])
    await admin.skip([row.id for row in rows])
    await admin.pause("fails")
    await admin.unpause("fails")
    await admin.replay("ordered", since=LONG_AGO)
    await admin.backfill("ordered", since=LONG_AGO)
    await admin.resume("ordered", "k")
    await admin.purge()
    await admin.unsubscribe("fails")


async def test_comparing_two_failures_runs_no_user_defined_code(among_namesakes: str) -> None:
    """Settle runs whose process may have died."""
    async with Outbox(among_namesakes, namespace="app") as outbox:
        await outbox.migrate()
        gate = Gate()
        outbox.handler(MoneyDeposited, name="waits")(gate)
        connection = await asyncpg.connect(among_namesakes)
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await gate.calls(1)
            taken = "SELECT pg_terminate_backend(l.pid) FROM pg_locks l WHERE l.locktype = 'advisory'"
            await connection.execute("SET search_path = pg_catalog")
            await connection.execute(taken)
            await connection.execute("UPDATE eventlog.leases SET term = term + 1 WHERE name LIKE '%dispatch%'")
            await outbox.executor.execute(Emit((2,)))
            await gate.calls(2)
            gate.open()
        await connection.close()
        assert not await outbox.admin.list(state="DEAD")


# --- statement by statement ------------------------------------------------------------------------

#: Keywords of PostgreSQL, which no schema can redefine: before a bracket, and as types.
GRAMMAR = {
    "any", "array", "as", "by", "coalesce", "conflict", "e", "events", "from", "greatest", "key", "o", "operator", "or",
    "then", "values", "where",
}  # fmt: skip
GRAMMAR_TYPES = {"int", "bigint", "smallint", "timestamp", "varchar", "boolean"}

TABLES = r"eventlog\.[a-z_]+\s*\([^()]*\)"  # INSERT INTO table (columns)
QUALIFIED = r"OPERATOR\(pg_catalog\.[^)]+\)|pg_catalog\.[a-z_]+"
ASSIGNMENTS = r"\bSET\b.*?(?=\bWHERE\b|\bRETURNING\b|$)"


def unqualified(statement: str) -> set[str]:
    """The operators, functions and types of a statement without a schema."""
    flat = " ".join(statement.split())
    flat = re.sub(r"'[^']*'", "''", flat)
    flat = re.sub(TABLES, " ", re.sub(QUALIFIED, " ", flat))
    flat = re.sub(ASSIGNMENTS, lambda found: found[0].replace("=", " "), flat)
    types = {name for name in re.findall(r"::\s*([a-z_]+)", flat) if name not in GRAMMAR_TYPES}
    functions = {name for name in re.findall(r"\b([a-z_]+)\s*\(", flat, re.IGNORECASE) if name.lower() not in GRAMMAR}
    operators = set(re.findall(r"[-+/<>=~!@#%^&|`]+|(?<![.(])\*(?!\s*(?:FROM|;|\)|$))", flat.replace("::", " ")))
    keywords = {
        keyword for keyword in ("IN", "LIKE", "BETWEEN", "DISTINCT", "NULLIF") if re.search(rf"\b{keyword}\b", flat)
    }
    return types | functions | operators | keywords


def test_statements_on_user_connections_name_every_schema() -> None:
    texts = list(our_statements(session))
    assert len(texts) >= 7
    for statement in texts:
        assert unqualified(statement) == set(), statement


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("SELECT 1 FROM eventlog.events WHERE id = $1", {"="}),
        ("SELECT 1 WHERE $1::text[] OPERATOR(pg_catalog.@>) $2", {"text"}),
        ("SELECT x FROM unnest($1) AS e(x)", {"unnest"}),
        ("SELECT pg_catalog.lower($1) || $2", {"||"}),
        ("UPDATE eventlog.events SET a = $1, b = $2 WHERE id <> $3", {"<>"}),
        ("SELECT 1 WHERE $1 IN ('a', 'b')", {"IN"}),
        ("SELECT * FROM pg_catalog.unnest($1::pg_catalog.uuid[]) AS e(x)", set()),
    ],
)
def test_a_statement_without_a_schema_would_be_found(statement: str, found: set[str]) -> None:
    assert found <= unqualified(statement)
    assert bool(unqualified(statement)) == bool(found)
