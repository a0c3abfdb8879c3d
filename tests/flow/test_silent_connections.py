"""Connections that are open but dead: statements are sent and never answered.

The proxy simulates a host without power, or a load balancer that has dropped a connection. It acknowledges every
packet, as a proxy between the application and its server would, so no operating system detects it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outboxio import CommitUnknown, DatabaseUnavailable, Outbox, Settings, Transaction
from outboxio.storage.connections import watch as watch_module
from outboxio.storage.mysql import driver as mysql_driver
from outboxio.storage.mysql.connection import waits_for as mysql_waits_for
from outboxio.storage.postgres.asyncpg_connection import OurConnection
from outboxio.storage.protocols import Database
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually, opened, turns
from tests.kit.inside import database_of
from tests.kit.private_servers import pgbouncer_to
from tests.kit.probes import doing, open_transaction, run_on
from tests.kit.proxy import Proxy, proxy_to
from tests.kit.server_actions import actions_on

pytestmark = pytest.mark.one_of_family

ALL_LINKS = b"\0"  # what every connection has sent
BOUND = 20.0  # seconds: less than half of any limit in minutes, and more than a busy machine needs
ALONE = Settings(notify=False)

SLEEP = {"asyncpg": "SELECT pg_sleep({})", "aiomysql": "SELECT SLEEP({})"}


@pytest.fixture
def rows(server_url: str) -> Look:
    return Look(server_url)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """All waits of the watch are shorter; MySQL reports idle times in whole seconds."""
    for name, seconds in (
        ("CHECK_INTERVAL", 0.05), ("PATIENCE", 1.0), ("SUSPECT_PATIENCE", 0.8), ("RECHECK_INTERVAL", 0.2),
        ("IDLE_FOR", 0.9),
    ):  # fmt: skip
        monkeypatch.setattr(watch_module, name, seconds)


@asynccontextmanager
async def behind(proxy: Proxy, server_url: str, settings: Settings = ALONE) -> AsyncIterator[Outbox]:
    """An outbox that reaches its server through the proxy."""
    async with opened(Outbox(server_url, namespace="app")):
        pass
    async with Outbox(proxy.url, namespace="app", settings=settings) as outbox:
        yield outbox


async def sleep(tx: Transaction, seconds: float) -> None:
    """A long statement of the application."""
    driver = "aiomysql" if hasattr(tx.connection, "cursor") and not hasattr(tx.connection, "fetchval") else "asyncpg"
    await tx.fetchval(SLEEP[driver].format(seconds))


async def work_until(tx: Transaction, holds: Callable[[], bool]) -> None:
    """Send long statements until the condition holds. A process without CPU time during a statement sends no query
    about it.
    """
    while not holds():
        await sleep(tx, 2)


def at_once(outbox: Outbox, number: int) -> Any:
    """This many concurrent actions."""
    return asyncio.gather(
        *(outbox.executor.execute(doing(lambda tx: sleep(tx, 0.05))) for _ in range(number)), return_exceptions=True
    )


# --- actions ---------------------------------------------------------------------------------------


@pytest.mark.real_time("a statement sleeps in the server")
async def test_actions_on_silent_connections_fail_within_seconds(server_url: str, rows: Look) -> None:
    """With all limits at their defaults, in a process that only executes actions."""
    async with proxy_to(server_url) as proxy, behind(proxy, server_url) as outbox:
        assert await at_once(outbox, 3) == [None] * 3
        proxy.stall(ALL_LINKS)

        async with asyncio.timeout(BOUND):
            results = await at_once(outbox, 2)
        assert [type(error) for error in results] == [DatabaseUnavailable] * 2, results
        assert "no response for" in str(results[0])
        assert isinstance(results[0].__cause__, Exception)

        # The third connection was idle. An action on it would fail as well.
        assert await at_once(outbox, 3) == [None] * 3
        assert len(await rows.events()) == 6


@pytest.mark.usefixtures("hurried")
async def test_an_action_fails_if_its_connection_becomes_silent(server_url: str, rows: Look) -> None:
    async with proxy_to(server_url) as proxy, behind(proxy, server_url) as outbox:

        async def act(tx: Transaction) -> None:
            await sleep(tx, 0)
            proxy.stall(ALL_LINKS)
            await sleep(tx, 0)

        with pytest.raises(DatabaseUnavailable, match="no response for"):
            async with asyncio.timeout(BOUND):
                await outbox.executor.execute(doing(act))
        assert await rows.events() == []


@pytest.mark.usefixtures("hurried")
async def test_a_commit_on_a_silent_connection_has_an_unknown_outcome(server_url: str, rows: Look) -> None:
    async with proxy_to(server_url) as proxy, behind(proxy, server_url) as outbox:
        await outbox.executor.execute(Emit((1,)))
        proxy.stall_after(b"commit")
        with pytest.raises(CommitUnknown):
            async with asyncio.timeout(BOUND):
                await outbox.executor.execute(Emit((2,)))
        await outbox.executor.execute(Emit((3,)))
        assert len(await rows.events()) == 3


@pytest.mark.usefixtures("hurried")
async def test_sql_on_the_raw_connection_is_watched_as_well(server_url: str) -> None:
    async with proxy_to(server_url) as proxy, behind(proxy, server_url) as outbox:

        async def act(tx: Transaction) -> None:
            connection: Any = tx.connection
            for statement in ("SELECT 1", "SELECT 2"):
                if hasattr(connection, "fetchval"):
                    await connection.fetchval(statement)
                else:
                    async with connection.cursor() as cursor:
                        await cursor.execute(statement)
                        await cursor.fetchall()
                proxy.stall(ALL_LINKS)

        with pytest.raises(DatabaseUnavailable, match="no response for"):
            async with asyncio.timeout(BOUND):
                await outbox.executor.execute(doing(act))


@pytest.mark.usefixtures("hurried")
async def test_a_server_that_answers_nobody_is_detected(server_url: str) -> None:
    settings = Settings(notify=False, connect_timeout="500ms")
    async with proxy_to(server_url) as proxy, behind(proxy, server_url, settings) as outbox:
        await outbox.executor.execute(Emit((1,)))
        proxy.stall()

        with pytest.raises(DatabaseUnavailable, match="new connections were not answered"):
            async with asyncio.timeout(BOUND):
                await outbox.executor.execute(doing(lambda tx: sleep(tx, 0)))
        with pytest.raises(DatabaseUnavailable):
            async with asyncio.timeout(BOUND):
                await outbox.executor.execute(Emit((2,)))
        proxy.resume()
        await outbox.executor.execute(Emit((3,)))


@pytest.mark.real_time("a statement sleeps in the server")
@pytest.mark.usefixtures("hurried")
async def test_a_long_statement_is_not_interrupted(server_url: str) -> None:
    async with opened(Outbox(server_url, namespace="app", settings=ALONE)) as outbox:
        queries = count_queries(outbox)
        await outbox.executor.execute(doing(lambda tx: work_until(tx, lambda: len(queries) >= 2)))


@pytest.mark.real_time("an action is idle for longer than a response may take")
@pytest.mark.usefixtures("hurried")
async def test_an_action_that_is_busy_elsewhere_is_not_interrupted(server_url: str, rows: Look) -> None:
    """The action's session is rightly idle."""
    async with opened(Outbox(server_url, namespace="app", settings=ALONE)) as outbox:
        queries = count_queries(outbox)

        def both_were_queried() -> bool:
            return any(len(numbers) >= 2 for numbers in queries)

        async def act(tx: Transaction) -> None:
            await sleep(tx, 0)
            await eventually(both_were_queried)
            await sleep(tx, 0)

        # The server is queried because of the other connection, and reports the state of both.
        working = outbox.executor.execute(doing(lambda tx: work_until(tx, both_were_queried)))
        await asyncio.gather(outbox.executor.execute(doing(act)), working)
        assert len(await rows.events()) == 2


@pytest.mark.real_time("a statement sleeps in the server")
@pytest.mark.usefixtures("hurried")
async def test_a_statement_through_a_session_sharing_proxy_is_not_interrupted(postgres_url: str) -> None:
    """The proxy's response about a session is about another client's session."""
    with pgbouncer_to(postgres_url) as through:
        async with opened(Outbox(postgres_url, namespace="app")), Outbox(through, namespace="app") as outbox:
            queries = count_queries(outbox)
            await outbox.executor.execute(doing(lambda tx: work_until(tx, lambda: len(queries) >= 2)))


def count_queries(outbox: Outbox) -> list[Any]:
    """A list that grows with each query to the server about its sessions."""
    watch, queries = database_of(outbox)._watch, list[Any]()
    query = watch._query_sessions

    async def counted(numbers: Any) -> Any:
        queries.append(numbers)
        return await query(numbers)

    watch._query_sessions = counted
    return queries


# --- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["begin;", "insert into eventlog.events", "commit;"])
async def test_internal_statements_on_a_user_pool_have_a_timeout(server_url: str, rows: Look, words: str) -> None:
    """A watch needs a URL to query over a new connection."""
    if words != "insert into eventlog.events" and rows.driver != "asyncpg":
        return  # the other drivers send everything in one message
    settings = Settings(notify=False, statement_timeout="500ms")
    async with (
        opened(Outbox(server_url, namespace="app")),
        proxy_to(server_url) as proxy,
        actions_on(proxy.url).pool(2) as pool,
        Outbox(pool, namespace="app", settings=settings) as outbox,
    ):
        proxy.stall_after(words.encode())
        is_unknown = words == "commit;" or rows.driver != "asyncpg"
        with pytest.raises(CommitUnknown if is_unknown else DatabaseUnavailable):
            async with asyncio.timeout(BOUND):
                await outbox.executor.execute(Emit((2,)))
        await outbox.executor.execute(Emit((3,)))
        assert "3" in [row["model_id"] for row in await rows.events()]


@pytest.mark.real_time("a statement sleeps in the server")
async def test_a_statement_of_an_action_may_have_a_timeout(server_url: str, rows: Look) -> None:
    settings = Settings(notify=False, action_statement_timeout="300ms")
    async with opened(Outbox(server_url, namespace="app", settings=settings)) as outbox:
        async with asyncio.timeout(BOUND) as bound:
            with pytest.raises(TimeoutError):
                await outbox.executor.execute(doing(lambda tx: sleep(tx, 60)))
        assert not bound.expired()
        await outbox.executor.execute(Emit((1,)))
        assert len(await rows.events()) == 1


async def test_every_internal_socket_detects_a_lost_host(server_url: str) -> None:
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            database = database_of(outbox)
            loops = [database._find, database._settle, database._fanout, database._admin]
            await eventually(lambda: all(loop.is_open for loop in loops))
            ours = [loop._connection for loop in loops] + [connection for _, connection in database._action_pool._idle]
            assert len(ours) >= 5
            for each in [*ours, *lock_sessions(outbox)]:
                found = socket_of(each)
                assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    assert 0 < found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
                    idle = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
                    between = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
                    times = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
                    assert idle + between * times <= 30


def socket_of(connection: Any) -> Any:
    transport = connection._transport if isinstance(connection, OurConnection) else mysql_driver.transport(connection)
    return transport.get_extra_info("socket")


async def test_the_statement_a_driver_waits_for_is_visible(server_url: str, rows: Look) -> None:
    """The same token while a response is awaited, and a new token for the next statement."""
    await rows.fetch("CREATE TABLE waits (number INT PRIMARY KEY)")
    await rows.fetch("INSERT INTO waits VALUES (0), (1), (2)")
    acts = actions_on(server_url)
    async with (
        opened(Outbox(server_url, namespace="app", settings=ALONE)) as outbox,
        outbox.transaction("Look") as tx,
    ):
        await sleep(tx, 0)
        connection, seen = tx.connection, {None}
        for number in range(3):
            assert waits_for(connection) is None
            async with open_transaction(rows) as (holder, end):
                await run_on(holder, ROW.format(number))
                waiting = asyncio.create_task(see(tx, number))
                await eventually(lambda: acts.blocked_sessions("FROM waits"))
                token = waits_for(connection)
                assert token not in seen
                await turns()
                assert waits_for(connection) == token
                await end()
            seen.add(token)
            await waiting
        assert waits_for(connection) is None


ROW = "SELECT number FROM waits WHERE number = {} FOR UPDATE"


async def see(tx: Transaction, number: int) -> None:
    if not isinstance(tx.connection, OurConnection):
        await tx.fetchval(ROW.format(number))
    elif number:
        await tx.execute(ROW.format("$1"), number)
    else:
        await tx.connection.execute(ROW.format(number))


def waits_for(connection: Any) -> Any:
    return connection.waits_for() if isinstance(connection, OurConnection) else mysql_waits_for(connection)


# --- loops -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hurried")
async def test_silence_between_prepare_and_execute_is_detected(postgres_url: str) -> None:
    """The server's session is then neither idle nor working, and reports itself as active."""
    async with proxy_to(postgres_url) as proxy, behind(proxy, postgres_url) as outbox:
        proxy.stall_after(b"insert into eventlog.events")  # in the message that prepares it
        with pytest.raises(DatabaseUnavailable, match="its server session is idle"):
            async with asyncio.timeout(BOUND):
                await outbox.executor.execute(Emit((1,)))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("heartbeat", ["500ms", "1h"])
async def test_loops_on_silent_connections_continue_within_seconds(server_url: str, heartbeat: str) -> None:
    """Whether the lock session notices first, or a statement of a loop."""
    journal = Journal()
    settings = Settings(lock_heartbeat=heartbeat, fanout_poll_delay="100ms", handling_poll_delay="100ms")
    async with (
        proxy_to(server_url) as proxy,
        opened(Outbox(server_url, namespace="app")) as producer,
        Outbox(proxy.url, namespace="app", settings=settings) as outbox,
    ):
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            await producer.executor.execute(Emit((1,)))
            await journal.calls(1)
            silence_all_but(proxy, lock_sessions(outbox) if heartbeat == "1h" else [])

            await producer.executor.execute(Emit((2,)))
            await journal.calls(2, timeout=BOUND)
            await eventually(lambda: is_settled(outbox, 2), timeout=BOUND)


def lock_sessions(outbox: Outbox) -> list[Any]:
    """The connections that hold cluster locks."""
    sessions = [getattr(lock, "_session", lock) for lock in database_of(outbox)._connections.locks]
    return [session.current for session in sessions if session.current is not None]


def silence_all_but(proxy: Proxy, kept: list[Any]) -> None:
    """The network drops the bytes of every open connection, except for the given ones."""
    ports = {socket_of(connection).getsockname()[1] for connection in kept}
    for link in proxy._links:
        if link.ends[0].get_extra_info("peername")[1] not in ports:
            link.flowing.clear()


async def is_settled(outbox: Outbox, number: int) -> bool:
    database: Database = database_of(outbox)
    return (await database.stored_notifications.count_states("app")).get("SUCCEEDED") == number
