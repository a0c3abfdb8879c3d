"""A server that responds but refuses writes: a standby behind an address that has not been switched yet.

On PostgreSQL a setting of the database simulates the standby: its responses are the same. It applies to connections
opened later, as if the address led to another server. MySQL and MariaDB have a switch for the whole server, which
applies to all users except administrators.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

from outboxio import DatabaseUnavailable, Outbox, Settings, Transaction
from outboxio.storage.connections.loop_connection import MAX_FAILURES
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually, opened
from tests.kit.inside import database_of, run_of
from tests.kit.private_servers import private_server
from tests.kit.probes import doing
from tests.kit.server_actions import ServerActions, actions_on

QUICK = {"fanout_poll_delay": "100ms", "handling_poll_delay": "100ms", "lock_heartbeat": "500ms"}
DOES_NOT_WRITE = "the server is read-only"

Switch = Callable[[bool], Awaitable[None]]


@pytest.fixture
def rows(postgres_url: str) -> Look:
    return Look(postgres_url)


@pytest.fixture
def acts(postgres_url: str) -> ServerActions:
    return actions_on(postgres_url)


@pytest.fixture
def be_read_only(postgres_url: str, rows: Look) -> Switch:
    """Let new connections reach a server that refuses writes, or stop doing so."""
    name = urlsplit(postgres_url).path[1:]

    async def be_read_only(on: bool) -> None:
        what = "SET default_transaction_read_only = on" if on else "RESET default_transaction_read_only"
        connection = await asyncpg.connect(postgres_url)
        try:
            await connection.execute("SET default_transaction_read_only = off")
            await connection.execute(f'ALTER DATABASE "{name}" {what}')
        finally:
            await connection.close()

    return be_read_only


# --- PostgreSQL ------------------------------------------------------------------------------------


async def test_actions_fail_clearly_and_keep_no_connection_to_such_servers(
    postgres_url: str, acts: ServerActions, be_read_only: Switch
) -> None:
    async with opened(Outbox(postgres_url, namespace="app", settings=Settings(notify=False))) as outbox:
        await be_read_only(True)
        results = await asyncio.gather(*(outbox.executor.execute(Emit((1,))) for _ in range(5)), return_exceptions=True)
        assert [type(error) for error in results] == [DatabaseUnavailable] * 5, results
        assert DOES_NOT_WRITE in str(results[0])
        assert isinstance(results[0].__cause__, asyncpg.ReadOnlySQLTransactionError)

        await be_read_only(False)

        await asyncio.gather(*(outbox.executor.execute(Emit((1,))) for _ in range(5)))


async def test_an_idle_connection_is_not_used_after_another_was_refused(
    postgres_url: str, be_read_only: Switch
) -> None:
    settings = Settings(notify=False, record_empty_actions=False)
    async with opened(Outbox(postgres_url, namespace="app", settings=settings)) as outbox:
        await be_read_only(True)
        both = asyncio.Barrier(2)

        async def look(tx: Transaction) -> None:
            await tx.fetchval("SELECT 1")
            await both.wait()

        await asyncio.gather(*(outbox.executor.execute(doing(look)) for _ in range(2)))
        with pytest.raises(DatabaseUnavailable, match=DOES_NOT_WRITE):
            await outbox.executor.execute(Emit((1,)))
        await be_read_only(False)

        await outbox.executor.execute(Emit((1,)))


@pytest.mark.parametrize("swallows", [True, False])
async def test_such_a_connection_is_closed_even_if_the_action_recovers(
    postgres_url: str, rows: Look, be_read_only: Switch, swallows: bool
) -> None:
    async with opened(Outbox(postgres_url, namespace="app", settings=Settings(notify=False))) as outbox:
        await rows.fetch("CREATE TABLE own (id int)")

        async def act(tx: Transaction) -> None:
            try:
                await tx.execute("INSERT INTO own VALUES (1)")
            except asyncpg.ReadOnlySQLTransactionError as error:
                if not swallows:
                    raise LookupError from error

        await be_read_only(True)
        with pytest.raises(asyncpg.InFailedSQLTransactionError if swallows else LookupError):
            await outbox.executor.execute(doing(act))
        await be_read_only(False)

        await outbox.executor.execute(doing(act))
        assert len(await rows.events()) == 1


async def test_a_connection_lost_after_the_refusal_returns_to_its_pool(postgres_url: str, be_read_only: Switch) -> None:
    """A closed connection cannot report the state of its server."""
    async with opened(Outbox(postgres_url, namespace="app", settings=Settings(notify=False))) as outbox:

        async def act(tx: Transaction) -> None:
            try:
                await tx.execute("CREATE TABLE own (id int)")
            finally:
                tx.connection.terminate()

        await be_read_only(True)
        with pytest.raises(DatabaseUnavailable, match=DOES_NOT_WRITE):
            await outbox.executor.execute(doing(act))
        await be_read_only(False)

        database = database_of(outbox)
        assert not database._action_pool.used


async def test_operators_may_read_from_such_a_server(postgres_url: str, be_read_only: Switch) -> None:
    async with opened(Outbox(postgres_url, namespace="app")) as outbox:
        await outbox.executor.execute(Emit((1,)))
    await be_read_only(True)
    async with Outbox(postgres_url, namespace="app") as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        await outbox.check()
        assert (await outbox.admin.counts())["undelivered"] == 1
        with pytest.raises(DatabaseUnavailable, match=DOES_NOT_WRITE):
            await outbox.admin.pause("first")
        assert "default_transaction_read_only is on" in (await outbox.admin.operations_unavailable())["default"]
    await be_read_only(False)


async def test_a_read_only_transaction_gets_the_drivers_error(postgres_url: str, acts: ServerActions) -> None:
    async with opened(Outbox(postgres_url, namespace="app", settings=Settings(notify=False))) as outbox:
        await outbox.executor.execute(Emit((1,)))
        before = acts.outbox_sessions(outbox)["pool"]

        async def act(tx: Transaction) -> None:
            await tx.execute("SET TRANSACTION READ ONLY")
            tx.emit(MoneyDeposited(uuid4(), Decimal(1)))

        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            await outbox.executor.execute(doing(act))
        assert acts.outbox_sessions(outbox)["pool"] == before


@pytest.mark.parametrize("name", ["fanout", "find", "settle", "lock"])
async def test_a_loop_recovers_from_a_short_connection_to_such_a_server(
    postgres_url: str, rows: Look, acts: ServerActions, be_read_only: Switch, name: str
) -> None:
    journal = Journal()
    async with (
        opened(Outbox(postgres_url, namespace="app")) as producer,
        Outbox(postgres_url, namespace="app", settings=Settings(**QUICK)) as outbox,
    ):
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            await producer.executor.execute(Emit((1,)))
            await journal.calls(1)
            await eventually(lambda: name in acts.outbox_sessions(outbox))
            await be_read_only(True)
            # If the machine stopped the process for long, the lock session has already ended.
            await acts.end([session for own, session in acts.outbox_sessions(outbox).items() if own == name])
            # No row is read while the connection for outcomes is closed: a started run must be settled.
            loop = getattr(run_of(outbox).loops, {"fanout": "fanout", "lock": "locks"}.get(name, "find"))
            await eventually(lambda: DOES_NOT_WRITE in str(loop.last_error))
            await be_read_only(False)

            await producer.executor.execute(Emit((2,)))
            await eventually(lambda: is_handled(outbox, 2))


async def is_handled(outbox: Outbox, number: int) -> bool:
    return (await outbox.admin.counts()).get("SUCCEEDED") == number


async def test_a_process_without_a_writable_server_releases_its_locks(
    postgres_url: str, rows: Look, acts: ServerActions
) -> None:
    """The lock session is healthy, and is connected to the right server: only new connections are misdirected."""
    astray, name = Journal(), f"astray_{urlsplit(postgres_url).path[1:]}"
    parts = urlsplit(postgres_url)
    await rows.fetch(f'CREATE ROLE "{name}" LOGIN SUPERUSER')
    try:
        elsewhere = parts._replace(netloc=f"{name}@{parts.netloc.rpartition('@')[2]}").geturl()
        standing_by = Journal()
        async with (
            opened(Outbox(postgres_url, namespace="app", settings=Settings(**QUICK))) as standby,
            Outbox(elsewhere, namespace="app", settings=Settings(**QUICK)) as outbox,
        ):
            outbox.handler(MoneyDeposited, name="first")(astray)
            standby.handler(MoneyDeposited, name="first")(standing_by)
            async with outbox.running():
                await standby.executor.execute(Emit((1,)))
                await astray.calls(1)
                async with standby.running():
                    await rows.fetch(f'ALTER ROLE "{name}" SET default_transaction_read_only = on')
                    await acts.end([acts.outbox_sessions(outbox)["fanout"]])

                    await standby.executor.execute(Emit((2,)))
                    await standing_by.calls(1)
                    assert run_of(outbox).loops.fanout.errors >= MAX_FAILURES
                    await rows.fetch(f'ALTER ROLE "{name}" RESET default_transaction_read_only')
    finally:
        await rows.fetch(f'DROP ROLE "{name}"')


# --- MySQL and MariaDB -----------------------------------------------------------------------------

EVERYTHING = "SELECT, INSERT, UPDATE, DELETE, CREATE, INDEX, ALTER, DROP"


@asynccontextmanager
async def a_server_that_may_not_write(like: str) -> AsyncIterator[tuple[str, Look, Switch]]:
    """The URL of an ordinary user, an administrator's view, and the switch."""
    with private_server(like=like) as server:
        rows, parts = Look(server.url), urlsplit(server.url)
        for statement in ("CREATE USER app", *(f"GRANT {EVERYTHING} ON {d}.* TO app" for d in ("eventlog", "private"))):
            await rows.fetch(statement)

        async def be_read_only(on: bool) -> None:
            await rows.fetch(f"SET GLOBAL read_only = {int(on)}")

        yield parts._replace(netloc=f"app@{parts.netloc.rpartition('@')[2]}").geturl(), rows, be_read_only
        await be_read_only(False)


async def test_operations_report_such_a_server_and_continue_afterwards(mysql_url: str) -> None:
    async with a_server_that_may_not_write(mysql_url) as (url, _, be_read_only):
        journal = Journal()
        async with opened(Outbox(url, namespace="app", settings=Settings(**QUICK))) as outbox:
            outbox.handler(MoneyDeposited, name="first")(journal)
            async with outbox.running():
                await outbox.executor.execute(Emit((1,)))
                await journal.calls(1)
                await eventually(lambda: is_handled(outbox, 1))

                await be_read_only(True)
                with pytest.raises(DatabaseUnavailable, match=DOES_NOT_WRITE):
                    await outbox.executor.execute(Emit((2,)))
                with pytest.raises(DatabaseUnavailable, match=DOES_NOT_WRITE):
                    await outbox.admin.pause("first")
                assert "read-only" in (await outbox.admin.operations_unavailable())["default"]
                # The lock session was healthy, but another process may reach a writable server.
                await eventually(lambda: not run_of(outbox).fans_out)

                await be_read_only(False)
                assert await outbox.admin.operations_unavailable() == {}
                await outbox.executor.execute(Emit((3,)))
                await journal.calls(2)
                await eventually(lambda: is_handled(outbox, 2))


async def test_an_action_whose_commit_such_a_server_refuses_is_rolled_back(mysql_url: str) -> None:
    async with (
        a_server_that_may_not_write(mysql_url) as (url, rows, be_read_only),
        opened(Outbox(url, namespace="app")) as outbox,
    ):

        async def act(tx: Transaction) -> None:
            assert await tx.fetchval("SELECT 1") == 1
            await be_read_only(True)
            await Emit((1,)).perform(tx)

        with pytest.raises(DatabaseUnavailable, match=DOES_NOT_WRITE):
            await outbox.executor.execute(doing(act))
        await be_read_only(False)
        assert await rows.events() == []


async def test_a_read_only_setting_does_not_affect_the_next_action(mysql_url: str) -> None:
    settings = Settings(notify=False, record_empty_actions=False)
    async with opened(Outbox(mysql_url, namespace="app", settings=settings)) as outbox:
        await outbox.executor.execute(doing(lambda tx: tx.execute("SET SESSION TRANSACTION READ ONLY")))

        await outbox.executor.execute(Emit((1,)))

        assert len(await Look(mysql_url).events()) == 1
