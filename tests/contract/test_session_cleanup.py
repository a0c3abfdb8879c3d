"""Session changes of an action are undone before the next action on the same connection."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import asyncpg
import pytest

from outboxio import Outbox, Settings, Transaction
from tests.kit.app import Look
from tests.kit.marks import needs_asyncpg
from tests.kit.probes import directly, doing

pytestmark = pytest.mark.with_tables

# --- PostgreSQL ------------------------------------------------------------------------------------

WHO = "SELECT current_user || ' of ' || session_user || ' on ' || pg_backend_pid()"


@pytest.fixture
async def tenant(postgres_url: str) -> AsyncIterator[str]:
    """A role that may write events. Roles belong to the whole server, so its name is unique."""
    name, look = f"tenant_{secrets.token_hex(4)}", Look(postgres_url)
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
    await look.fetch(f"CREATE ROLE {name} LOGIN")
    await look.fetch(f"GRANT USAGE ON SCHEMA eventlog TO {name}")
    await look.fetch(f"GRANT ALL ON ALL TABLES IN SCHEMA eventlog TO {name}")
    yield name
    await look.fetch(f"DROP OWNED BY {name}")
    await look.fetch(f"DROP ROLE {name}")


async def who(outbox: Outbox) -> str:
    async def read(tx: Transaction) -> str:
        return str(await tx.fetchval(WHO))

    return str(await outbox.executor.execute(doing(read)))


def becoming(statement: str, error: Exception | None = None, *, bypassing: bool = False) -> Any:
    async def become(tx: Transaction) -> None:
        await (directly(tx, statement) if bypassing else tx.execute(statement))
        if error is not None:
            raise error

    return doing(become)


@pytest.mark.parametrize("bypassing", [False, True])
@pytest.mark.parametrize("error", [None, LookupError()])
@pytest.mark.parametrize("kind", ["ROLE", "SESSION AUTHORIZATION"])
async def test_an_action_never_runs_with_the_role_of_another(
    postgres_url: str, tenant: str, kind: str, error: Exception | None, bypassing: bool
) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox:
        before = await who(outbox)
        with suppress(LookupError):
            await outbox.executor.execute(becoming(f"SET {kind} {tenant}", error, bypassing=bypassing))
        assert await who(outbox) == before


async def test_an_action_without_events_resets_its_role_too(postgres_url: str, tenant: str) -> None:
    async with Outbox(postgres_url, namespace="app", settings=Settings(record_empty_actions=False)) as outbox:
        before = await who(outbox)
        await outbox.executor.execute(becoming(f"SET ROLE {tenant}"))
        assert await who(outbox) == before


@needs_asyncpg
async def test_a_role_set_when_a_connection_opens_is_kept(postgres_url: str, tenant: str) -> None:
    url = f"{postgres_url}{'&' if '?' in postgres_url else '?'}{urlencode({'role': tenant})}"
    async with Outbox(url, namespace="app") as outbox:
        before = await who(outbox)
        assert before.startswith(f"{tenant} of ")
        await outbox.executor.execute(becoming("RESET ROLE"))
        await outbox.executor.execute(becoming("SET ROLE NONE"))
        assert await who(outbox) == before


async def test_a_temporary_table_is_dropped_after_its_action(postgres_url: str) -> None:
    """The temporary table would hide the application's table of that name."""

    async def shadow(tx: Transaction) -> int:
        await tx.execute("CREATE TEMPORARY TABLE wallets (id INT)")
        return int(await tx.fetchval("SELECT pg_backend_pid()"))

    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        assert await outbox.executor.execute(doing(shadow)) == await outbox.executor.execute(doing(shadow))


#: The state of a PostgreSQL session.
STATE_OF_POSTGRES = """
SELECT pg_backend_pid(), current_user, session_user, current_setting('role'), current_setting('work_mem'),
  current_setting('application_name'), to_regclass('pg_temp.own')::text,
  (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),
  (SELECT count(*) FROM pg_cursors WHERE is_holdable), (SELECT count(*) FROM pg_listening_channels())
"""

#: The changes that actions make: by a statement, and hidden in a function.
CHANGES_OF_POSTGRES = [
    "SET ROLE {tenant}", "SET SESSION AUTHORIZATION {tenant}", "SET work_mem = '1MB'", "SELECT pg_advisory_lock(7)",
    "CREATE TEMPORARY TABLE own (n INT)", "DECLARE kept CURSOR WITH HOLD FOR SELECT 1", "LISTEN own", "DEALLOCATE ALL",
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES_OF_POSTGRES)
async def test_no_session_change_outlives_its_action(postgres_url: str, tenant: str, change: str) -> None:
    async def read(tx: Transaction) -> tuple[Any, ...]:
        return tuple(await tx.fetchrow(STATE_OF_POSTGRES) or ())

    statement = change.format(tenant=tenant)
    unseen = f"DO $do$ BEGIN EXECUTE $sql${statement}$sql$; END $do$"
    async with Outbox(postgres_url, namespace="app") as outbox:
        before = await outbox.executor.execute(doing(read))
        for each in (statement, unseen, unseen):
            for error in (None, LookupError()):
                if each is unseen and "CURSOR" in change:
                    continue
                with suppress(LookupError):
                    await outbox.executor.execute(becoming(each, error))
                assert await outbox.executor.execute(doing(read)) == before, (each, error)


class Impatient(asyncpg.Connection):
    """A user-defined connection class that resets no setting."""

    def get_reset_query(self) -> str:
        return ""


async def reset(connection: Any) -> None:
    """A user-defined way to reset a connection."""


@pytest.mark.parametrize("has_role", [False, True], ids=["", "with a role of its own"])
@pytest.mark.parametrize(
    "options", [{}, {"connection_class": Impatient}, {"reset": reset}], ids=["plain", "own class", "own reset"]
)
async def test_a_connection_returns_to_a_user_pool_with_its_role(
    postgres_url: str, tenant: str, options: dict[str, Any], has_role: bool
) -> None:
    async def init(connection: Any) -> None:
        if has_role:
            await connection.execute(f"SET ROLE {tenant}")

    other = f"{tenant}_too"
    look = Look(postgres_url)
    await look.fetch(f"CREATE ROLE {other} ROLE {tenant}")
    await look.fetch(f"GRANT USAGE ON SCHEMA eventlog TO {other}")
    await look.fetch(f"GRANT ALL ON ALL TABLES IN SCHEMA eventlog TO {other}")
    try:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=1, init=init, **options) as pool:
            outbox = Outbox(pool, namespace="app")
            before = await who(outbox)
            assert before.startswith(f"{tenant} of ") is has_role
            for bypassing in (False, True):
                await outbox.executor.execute(becoming(f"SET ROLE {other}", bypassing=bypassing))
                assert await who(outbox) == before
                assert await pool.fetchval(WHO) == before
            await outbox.close()
    finally:
        await look.fetch(f"DROP OWNED BY {other}")
        await look.fetch(f"DROP ROLE {other}")


async def test_a_user_pool_costs_no_additional_round_trip(postgres_url: str) -> None:
    """The role of a connection is read once, and restored together with the driver's own messages."""
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=1) as pool:
        outbox = Outbox(pool, namespace="app")
        sent: list[str] = []

        async def listen(tx: Transaction) -> None:
            tx.connection.add_query_logger(lambda record: sent.append(record.query))

        await outbox.executor.execute(doing(listen))
        sent.clear()
        await who(outbox)
        assert [statement.split()[0] for statement in sent] == ["BEGIN;", "SELECT", "INSERT", "COMMIT;", "SET"]
        await outbox.close()


# --- MySQL and MariaDB -----------------------------------------------------------------------------

#: The state of a session.
STATE = """
    SELECT CONNECTION_ID(), CURRENT_ROLE(), DATABASE(), @@autocommit, @mine, @@character_set_client, @@sql_mode,
      @@collation_connection, @@SESSION.time_zone, @@SESSION.foreign_key_checks, IS_USED_LOCK('outboxio_test_mine')
"""

#: The changes that actions make, one by one.
CHANGES = [
    "SET @mine = 'a secret'", "SELECT 'a secret' INTO @mine",
    "SET sql_mode = ''", "SET NAMES latin1", "SET SESSION time_zone = '+03:00', foreign_key_checks = 0",
    "SELECT GET_LOCK('outboxio_test_mine', 0)", "USE information_schema", "SET ROLE {role}",
]  # fmt: skip


@pytest.fixture
async def role(mysql_url: str) -> AsyncIterator[str]:
    """A role that the test's user may assume."""
    name, look = f"role_{secrets.token_hex(4)}", Look(mysql_url)
    await look.fetch(f"CREATE ROLE {name}")
    await look.fetch(f"GRANT {name} TO CURRENT_USER()")
    yield name
    await look.fetch(f"DROP ROLE {name}")


async def state(outbox: Outbox) -> tuple[Any, ...]:
    async def read(tx: Transaction) -> tuple[Any, ...]:
        return tuple(await tx.fetchrow(STATE) or ())

    found = await outbox.executor.execute(doing(read))
    return tuple(found)


async def warmed_up(outbox: Outbox) -> tuple[Any, ...]:
    """The state of a session after every statement of outboxio has run once."""
    await outbox.migrate()
    await state(outbox)
    return await state(outbox)


@pytest.mark.parametrize("bypassing", [False, True])
async def test_a_setting_of_an_action_does_not_affect_the_next(mysql_url: str, role: str, bypassing: bool) -> None:
    async with Outbox(mysql_url, namespace="app") as outbox:
        before = await warmed_up(outbox)
        for change in CHANGES:
            for error in (None, LookupError()):
                statement = change.format(role=role)
                with suppress(LookupError):
                    await outbox.executor.execute(becoming(statement, error, bypassing=bypassing))
                assert await state(outbox) == before, (statement, error)


async def test_temporary_tables_and_table_locks_end_with_their_action(mysql_url: str) -> None:
    async with Outbox(mysql_url, namespace="app") as outbox:
        before = await warmed_up(outbox)
        await Look(mysql_url).fetch("CREATE TABLE own (n INT)")
        for _ in range(2):
            await outbox.executor.execute(becoming("CREATE TEMPORARY TABLE own_too (n INT)"))
        with suppress(Exception):
            await outbox.executor.execute(becoming("LOCK TABLES own WRITE", bypassing=True))
        await Look(mysql_url).fetch("INSERT INTO own VALUES (1)")
        assert (await state(outbox))[1:] == before[1:]


async def test_plain_statements_cost_no_additional_round_trip(mysql_url: str) -> None:
    commands: list[int] = []

    async def listen(tx: Transaction) -> None:
        connection = tx.connection
        send = connection._execute_command

        async def tapped(command: int, statement: Any) -> None:
            commands.append(command)
            await send(command, statement)

        connection._execute_command = tapped

    async def work(tx: Transaction) -> None:
        await tx.execute("INSERT INTO own VALUES (%s)", 1)
        await tx.execute("SAVEPOINT part")
        await tx.fetch("WITH a AS (SELECT 1 AS n) SELECT n FROM a")

    async with Outbox(mysql_url, namespace="app") as outbox:
        await warmed_up(outbox)
        await Look(mysql_url).fetch("CREATE TABLE own (n INT)")
        await outbox.executor.execute(doing(listen))
        commands.clear()
        await outbox.executor.execute(doing(work))
        query, reset = 3, 31
        assert {*commands} == {query}
        await outbox.executor.execute(becoming("SET @mine = 1"))
        assert reset in commands


async def test_without_a_database_a_changed_connection_is_reopened(mysql_url: str) -> None:
    """A session cannot return to having selected none."""
    url = mysql_url.rpartition("/")[0]
    if "unix_socket" in mysql_url:
        pytest.skip("the URL has its socket after the database")
    async with Outbox(url, namespace="app") as outbox:
        before = await warmed_up(outbox)
        await outbox.executor.execute(becoming("USE information_schema"))
        after = await state(outbox)
        assert after[0] != before[0]
        assert after[1:] == before[1:]


async def test_a_connection_that_cannot_be_reset_is_replaced(mysql_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Outbox(mysql_url, namespace="app") as outbox:
        before = await warmed_up(outbox)

        async def spoil(tx: Transaction) -> None:
            tx.connection.restore_sql = "SET ROLE no_such_role_at_all"

        await outbox.executor.execute(doing(spoil))
        after = await state(outbox)
        assert after[0] != before[0]
        assert after[1:] == before[1:]
        assert "could not be reset" in caplog.text
