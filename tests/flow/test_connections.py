"""Connections ended by the database, and requirements for user-supplied pools."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outboxio import (
    Action,
    CommitUnknown,
    EventEnvelope,
    Outbox,
    PooledConnection,
    PoolTooSmall,
    RetryAfter,
    Settings,
    Shard,
    Transaction,
)
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, opened
from tests.kit.inside import lock_loop_of, locks_of
from tests.kit.logged_problems import logged_problems
from tests.kit.private_servers import pgbouncer_to, private_postgres, private_server
from tests.kit.proxy import proxy_to
from tests.kit.server_actions import ServerActions, actions_on, lock_session
from tests.kit.spies import counters, disable_handoff
from tests.kit.storage import Store

pytestmark = pytest.mark.one_of_family

#: Polling cannot have found the rows.
NO_POLLS = {"fanout_poll_delay": "60s", "handling_poll_delay": "60s"}

LOOPS = 5  # lock, admin, fan-out, find, settle
SMALLEST_POOL = LOOPS + 1


class Welcome(Action):
    """The action that a handler executes: an action with parameters and an event."""

    amount: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(WalletOpened(uuid4()), model_id=self.amount)


def add_handlers(outbox: Outbox) -> tuple[Journal, Journal]:
    """Two kinds of handlers, the second caused by the first: retried once, emitting, executing."""
    first, second = Journal(), Journal()

    @outbox.handler(MoneyDeposited, name="first")
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        if envelope.attempt == 1:
            raise RetryAfter("10ms")
        assert isinstance(envelope.action_params, dict)
        envelope.emit(WalletOpened(envelope.event.wallet_id), model_id=int(envelope.event.amount))
        await envelope.execute(Welcome(int(envelope.event.amount)))
        await first(envelope)

    outbox.handler(WalletOpened, name="second")(second)
    return first, second


async def check_flow(outbox: Outbox) -> None:
    """An outbox with ``add_handlers`` does all of its work."""
    first, second = add_handlers(outbox)
    async with outbox.running():
        await asyncio.gather(*(outbox.executor.execute(Emit((n,))) for n in range(5)))
        await outbox.executor.execute(Emit(()), headers={"a": 1}, correlation_id="c")
        await first.calls(5)
        await second.calls(10)
    assert sorted(first.amounts) == list(range(5))
    counts = await outbox.admin.counts()
    assert counts["SUCCEEDED"] == 15
    records = await outbox.admin.list(handler="first")
    assert {record.errors[0]["type"] for record in records} == {"RetryAfter"}


async def session(rows: Look, pid: int) -> dict[str, Any] | None:
    found = await rows.fetch("SELECT * FROM pg_stat_activity WHERE pid = $1", pid)
    return found[0] if found else None


@pytest.fixture
def rows(server_url: str) -> Look:
    return Look(server_url)


@pytest.fixture
def acts(server_url: str) -> ServerActions:
    return actions_on(server_url)


@pytest.fixture
async def pool(acts: ServerActions) -> AsyncIterator[Any]:
    async with acts.pool() as pool:
        yield pool


@asynccontextmanager
async def producing(outbox: Outbox, acts: ServerActions) -> AsyncIterator[None]:
    """Events are emitted during the block; an action whose connection is cut gets an error."""

    enough = asyncio.Event()

    async def produce() -> None:
        for number in itertools.count():
            with suppress(*acts.cut):
                await outbox.executor.execute(Emit((number,)))
            await asyncio.sleep(0.002)
            if enough.is_set():
                return

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        yield
        enough.set()


async def all_handled(rows: Look) -> Any:
    return await rows.value(
        "SELECT (SELECT count(*) FROM {events} WHERE event_type IS NOT NULL) ="
        " (SELECT count(*) FROM {event_notifications} WHERE state = 'SUCCEEDED')"
    )


async def caught_up(rows: Look) -> None:
    """Wait until all events committed before the call are handled. Events that arrive later do not count."""
    last = await rows.value("SELECT max(sequence) FROM {events}")
    await eventually(lambda: rows.value(f"SELECT NOT EXISTS ({UNHANDLED} AND e.sequence <= {last})"))


UNHANDLED = """
SELECT 1 FROM {events} e WHERE e.event_type IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM {event_notifications} n WHERE n.event_id = e.id AND n.state = 'SUCCEEDED')
"""


# --- lost connections ----------------------------------------------------------------------------


@pytest.mark.real_time("keeps a load up while connections are cut")
@pytest.mark.parametrize("source", ["url", "given-pool"])
async def test_any_lost_connection_is_survived(
    server_url: str, rows: Look, acts: ServerActions, pool: Any, source: str
) -> None:
    journal = Journal()
    async with opened(Outbox(server_url if source == "url" else pool, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running(), producing(outbox, acts):
            for name in ("find", "settle", "pool", "fanout"):
                await journal.calls(len(journal) + 10)
                await eventually(lambda name=name: name in acts.outbox_sessions(outbox))
                await acts.end([acts.outbox_sessions(outbox)[name]])
                await journal.calls(len(journal) + 10)
                await caught_up(rows)
                if name == "fanout" and rows.driver == "aiomysql":
                    # Handlers begin during the commit: outcomes of lost rows are refused, so events run again.
                    await eventually(lambda: len(repeated(journal)) <= counters(outbox).refused)
                else:
                    assert repeated(journal) == [], f"handled twice, although only {name} was lost"

            await acts.end([acts.outbox_sessions(outbox)["lock"]])
            await journal.calls(len(journal) + 10)
        await outbox.drain()
    events = await rows.fetch("SELECT model_id FROM {events} WHERE event_type IS NOT NULL")
    assert {int(event["model_id"]) for event in events} == set(journal.amounts)


def repeated(journal: Journal) -> list[int]:
    return [amount for amount, times in Counter(journal.amounts).items() if times > 1]


@pytest.mark.real_time("keeps a load up while connections are cut")
async def test_losing_all_connections_at_once_is_survived(server_url: str, rows: Look, acts: ServerActions) -> None:
    journal = Journal()
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running(), producing(outbox, acts):
            for _ in range(3):
                await journal.calls(len(journal) + 20)
                await acts.end(list(acts.outbox_sessions(outbox).values()))
            await journal.calls(len(journal) + 20)
        await outbox.drain()
        assert await all_handled(rows)


@pytest.mark.real_time("keeps a load up while connections are cut")
async def test_a_server_restart_is_survived_without_intervention(server_url: str) -> None:
    journal = Journal()
    with private_server(like=server_url) as server:
        rows, acts = Look(server.url), actions_on(server.url)
        async with opened(Outbox(server.url, namespace="app")) as outbox:
            outbox.handler(MoneyDeposited, name="first")(journal)
            async with outbox.running(), producing(outbox, acts):
                await journal.calls(20)
                await asyncio.to_thread(server.stop)
                await asyncio.to_thread(server.start)
                await journal.calls(len(journal) + 20)
            await outbox.drain()
            assert await all_handled(rows)


async def test_a_fan_out_lost_in_a_server_crash_is_repeated(postgres_url: str) -> None:
    """The fan-out's commit does not wait for the disk; the commit of the event did."""
    journal = Journal()
    with private_postgres() as server:
        rows = Look(server.url)
        await rows.fetch("ALTER SYSTEM SET wal_writer_delay = '10s'")  # no background writes
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        async with opened(Outbox(server.url, namespace="app")) as outbox:
            store = Store(outbox, rows)
            await store.subscribe("first")
            await outbox.executor.execute(Emit((1,)))
            await store.fan_out()
            assert await found(rows) == {"delivered": 1, "notifications": 1}

            await asyncio.to_thread(server.crash)
            await asyncio.to_thread(server.start)
            assert await found(rows) == {"delivered": 0, "notifications": 0}

            outbox.handler(MoneyDeposited, name="first")(journal)
            async with outbox.running():
                await journal.calls(1)
            await outbox.drain()
        assert await all_handled(rows)
        assert journal.amounts == [1]


async def found(rows: Look) -> dict[str, int]:
    [row] = await rows.fetch(
        "SELECT (SELECT count(*) FROM {events} WHERE delivered) AS delivered,"
        " (SELECT count(*) FROM {event_notifications}) AS notifications"
    )
    return dict(row)


async def test_a_connection_lost_during_commit_leaves_the_outcome_unknown(server_url: str, rows: Look) -> None:
    """The server commits, and its response does not arrive."""
    async with (
        opened(Outbox(server_url, namespace="app")),
        proxy_to(server_url) as proxy,
        Outbox(proxy.url, namespace="app", settings=Settings(notify=False)) as outbox,
    ):
        await outbox.executor.execute(Emit((1,)))
        proxy.stall_after(b"commit")
        acting = asyncio.create_task(outbox.executor.execute(Emit((2,))))
        await eventually(lambda: not proxy.waits_to_stall)
        await eventually(lambda: _has_events(rows, 2))
        await proxy.stop()
        with pytest.raises(CommitUnknown):
            await acting

        await proxy.start()
        await outbox.executor.execute(Emit((3,)))
    assert await _has_events(rows, 3)


async def test_a_commit_without_a_response_times_out(server_url: str, rows: Look) -> None:
    async with (
        opened(Outbox(server_url, namespace="app")),
        proxy_to(server_url) as proxy,
        Outbox(proxy.url, namespace="app", settings=Settings(statement_timeout="500ms")) as outbox,
    ):
        await outbox.executor.execute(Emit((1,)))
        proxy.stall_after(b"commit")
        begun = asyncio.get_running_loop().time()
        with pytest.raises(CommitUnknown):
            await outbox.executor.execute(Emit((2,)))
        assert asyncio.get_running_loop().time() - begun >= 0.5
        await outbox.executor.execute(Emit((3,)))
    assert await _has_events(rows, 3)


async def _has_events(rows: Look, number: int) -> bool:
    return len(await rows.events()) == number


@pytest.mark.real_time("counts the attempts of a second")
async def test_an_unavailable_database_is_polled_less_and_less_often(server_url: str, acts: ServerActions) -> None:
    async with proxy_to(server_url) as proxy, opened(Outbox(proxy.url, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        async with outbox.running():
            await eventually(lambda: "lock" in acts.outbox_sessions(outbox))
            gone_at = time.monotonic()
            await proxy.stop()
            await asyncio.sleep(1)
            await eventually(lambda: lock_loop_of(outbox).errors >= 2)
            number, seconds = lock_loop_of(outbox).errors, time.monotonic() - gone_at
            await proxy.start()
            assert number <= 5 + seconds  # after 0.1, 0.2, 0.4, 0.8 s, jittered
            await eventually(lambda: "lock" in acts.outbox_sessions(outbox))


async def test_a_lost_listen_connection_listens_again(postgres_url: str) -> None:
    journal, acts = Journal(), actions_on(postgres_url)
    async with (
        opened(Outbox(postgres_url, namespace="app")) as producer,
        Outbox(postgres_url, namespace="app", settings=Settings(**NO_POLLS)) as outbox,
    ):
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            await producer.executor.execute(Emit((1,)))
            await journal.calls(1)
            before = acts.outbox_sessions(outbox)["lock"]
            await acts.end([before])
            # Events that were committed while no session listened are found as soon as a session listens.
            await producer.executor.execute(Emit((2,)))
            await journal.calls(2)
            # The event may have been handled just before the process noticed the end of the session.
            await eventually(lambda: acts.outbox_sessions(outbox).get("lock", before) != before)

            await producer.executor.execute(Emit((3,)))
            await journal.calls(3)


@pytest.mark.real_time("measures the time until a connection is replaced")
@pytest.mark.parametrize("phase", ["idle", "in-the-middle-of-a-statement"])
async def test_an_unresponsive_lock_connection_is_replaced_by_the_heartbeat(postgres_url: str, phase: str) -> None:
    journal, acts = Journal(), actions_on(postgres_url)
    settings = Settings(**NO_POLLS, lock_heartbeat="500ms")
    async with proxy_to(postgres_url) as proxy, opened(Outbox(postgres_url, namespace="app")) as producer:
        through = Shard(postgres_url, direct_url=proxy.url)
        async with Outbox({"default": through}, namespace="app", settings=settings) as outbox:
            outbox.handler(MoneyDeposited, name="first")(journal)
            async with outbox.running():
                await eventually(lambda: "lock" in acts.outbox_sessions(outbox))
                if phase == "idle":
                    await producer.executor.execute(Emit((1,)))
                    await journal.calls(1)
                    assert proxy.stall(b"LISTEN") == 1
                else:  # after the first message of the wake-up that fan-out sends
                    disable_handoff(outbox)
                    proxy.stall_after(b"notify")
                    await producer.executor.execute(Emit((1,)))
                    await eventually(lambda: not proxy.waits_to_stall)
                silent_at = time.monotonic()
                await producer.executor.execute(Emit((2,)))

                await journal.calls(2)

                # A heartbeat notices: at most 1 s for its answer, and the server ends the session it cannot reach
                # after twice the heartbeat; then a standby acquires the lock. The margin is for a loaded machine.
                assert time.monotonic() - silent_at < 1.0 + 2 * 0.5 + 8.0


async def test_an_unresponsive_lock_connection_is_replaced_on_every_server(
    server_url: str, acts: ServerActions
) -> None:
    journal = Journal()
    settings = Settings(lock_heartbeat="500ms")
    async with proxy_to(server_url) as proxy, opened(Outbox(server_url, namespace="app")) as producer:
        through = Shard(server_url, direct_url=proxy.url)
        async with Outbox({"default": through}, namespace="app", settings=settings) as outbox:
            outbox.handler(MoneyDeposited, name="first")(journal)
            async with outbox.running():
                await producer.executor.execute(Emit((1,)))
                await journal.calls(1)
                before = acts.outbox_sessions(outbox)["lock"]
                assert proxy.stall(acts.lock_statement) == 1

                await eventually(lambda: acts.outbox_sessions(outbox).get("lock", before) != before)

                await producer.executor.execute(Emit((2,)))
                await journal.calls(2)


# --- settings of the database and of pools -------------------------------------------------------


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
async def test_the_databases_default_isolation_changes_nothing(
    postgres_url: str, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = postgres_url.rpartition("/")[2]
    await Look(postgres_url).fetch(f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
    async with opened(Outbox(postgres_url, namespace="app")) as outbox:
        await check_flow(outbox)
    assert [line for line in logged_problems(caplog) if "RetryAfter" not in line] == []


async def with_dicts(connection: asyncpg.Connection[Any]) -> None:
    for name in ("json", "jsonb"):
        await connection.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")


class ResetsNothing(asyncpg.Connection):  # type: ignore[type-arg]
    def get_reset_query(self) -> str:
        return ""


@pytest.mark.parametrize(
    "options",
    [
        {"init": with_dicts},
        {"statement_cache_size": 0},
        {"max_size": SMALLEST_POOL},
        {"connection_class": ResetsNothing},
    ],
    ids=["jsonb-as-dicts", "no-statement-cache", "smallest", "no-reset"],
)
async def test_a_user_pool_supports_everything_and_is_returned_unchanged(
    postgres_url: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    size = options.get("max_size", 10)
    async with asyncpg.create_pool(postgres_url, **{"min_size": 0, "max_size": size, **options}) as pool:
        async with opened(Outbox(pool, namespace="app")) as outbox:
            await check_flow(outbox)
            await actions_on(postgres_url).becomes_idle(pool)
        assert not pool.is_closing()
        async with AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(pool.acquire()) for _ in range(size)]
            for connection in connections:
                assert await left_on(connection) == [[], [], []]
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_user_pool_of_any_driver_gets_its_connections_back(
    acts: ServerActions, caplog: pytest.LogCaptureFixture
) -> None:
    async with acts.pool() as pool, opened(Outbox(pool, namespace="app")) as outbox:
        await check_flow(outbox)
        await acts.becomes_idle(pool)
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def left_on(connection: Any) -> list[list[Any]]:
    """Session settings, channels and advisory locks."""
    looks = (
        "SELECT name FROM pg_settings WHERE source = 'session' AND setting IS DISTINCT FROM reset_val",
        "SELECT pg_listening_channels()",
        "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    )
    return [[tuple(row) for row in await connection.fetch(sql)] for sql in looks]


async def test_a_user_pool_is_free_while_nothing_runs(acts: ServerActions) -> None:
    async with (
        acts.pool(1) as pool,
        opened(Outbox(pool, namespace="app")) as outbox,
        asyncio.timeout(10),
    ):
        await outbox.executor.execute(Emit((1,)))
        assert (await outbox.admin.counts())["undelivered"] == 1
        await outbox.executor.execute(Emit((2,)))


async def test_a_user_pool_that_is_too_small_is_refused(acts: ServerActions) -> None:
    async with (
        acts.pool(SMALLEST_POOL - 1) as pool,
        opened(Outbox(pool, namespace="app")) as outbox,
    ):
        outbox.handler(MoneyDeposited, name="first")(Journal())
        wanted = f"{acts.size_option}={SMALLEST_POOL}"
        with pytest.raises(PoolTooSmall, match=f"at most {SMALLEST_POOL - 1} .* {wanted}"):
            async with outbox.running():
                pass
        await acts.becomes_idle(pool)


async def test_handlers_that_occupy_the_whole_pool_do_not_stop_outcomes(
    server_url: str, rows: Look, acts: ServerActions, pool: Any
) -> None:
    release = asyncio.Event()
    quick = Journal()
    async with opened(Outbox(server_url, namespace="app")) as producer, Outbox(pool, namespace="app") as outbox:

        @outbox.handler(MoneyDeposited, name="holds")
        async def hold(envelope: EventEnvelope[MoneyDeposited]) -> None:
            async with pool.acquire():
                await release.wait()

        outbox.handler(WalletOpened, name="quick")(quick)
        async with outbox.running():
            await producer.executor.execute(Emit(tuple(range(20))))
            await eventually(lambda: acts.is_exhausted(pool))

            await producer.executor.execute(Welcome(1))

            try:
                await quick.calls(1)
                await eventually(lambda: _are(rows, {"PENDING": 20, "SUCCEEDED": 1}))
            finally:
                release.set()
            await eventually(lambda: _are(rows, {"SUCCEEDED": 21}))


async def test_a_standby_holds_no_transaction_open(postgres_url: str) -> None:
    rows, acts = Look(postgres_url), actions_on(postgres_url)
    async with (
        opened(Outbox(postgres_url, namespace="app")) as holder,
        Outbox(postgres_url, namespace="app") as standby,
    ):
        for outbox in (holder, standby):
            outbox.handler(MoneyDeposited, name="first")(Journal())
        async with holder.running(), standby.running():
            await eventually(lambda: "lock" in acts.outbox_sessions(standby))
            pid, begun, looks = acts.outbox_sessions(standby)["lock"], set(), set()

            async def tries_again_and_again() -> bool:
                found = await session(rows, pid)
                assert found is not None
                begun.add(found["query_start"])
                # An attempt is a statement of a millisecond; between attempts there is no snapshot and no transaction.
                held = (found["backend_xmin"], found["backend_xid"], found["xact_start"])
                if found["state"] == "idle" and held != (None, None, None):
                    # The server reads the columns one after the other: the snapshot may be that of the next attempt.
                    assert found["query_start"] not in looks, found
                    looks.add(found["query_start"])
                return len(begun) >= 5

            await eventually(tries_again_and_again)


# --- PgBouncer in transaction mode ---------------------------------------------------------------


async def test_running_through_a_transaction_pooling_proxy_is_refused(postgres_url: str) -> None:
    async with opened(Outbox(postgres_url, namespace="app")):
        pass
    with pgbouncer_to(postgres_url) as through:
        async with Outbox({"main": through}, namespace="app") as outbox:
            outbox.handler(MoneyDeposited, name="first")(Journal())
            with pytest.raises(PooledConnection, match="'main' is reached through a transaction-pooling proxy"):
                async with outbox.running():
                    pass


async def test_actions_use_the_proxy_while_loops_connect_directly(postgres_url: str) -> None:
    journal = Journal()
    with pgbouncer_to(postgres_url) as through:
        shard = Shard(through, direct_url=postgres_url)
        async with (
            opened(Outbox({"main": shard}, namespace="app")) as producer,
            Outbox({"main": shard}, namespace="other") as outbox,
            Outbox({"main": shard}, namespace="app", settings=Settings(**NO_POLLS)) as worker,
        ):
            await check_flow(outbox)
            worker.handler(MoneyDeposited, name="first")(journal)
            async with worker.running():
                await asyncio.gather(*(producer.executor.execute(Emit((n,))) for n in range(50)))
                await journal.calls(50)
            assert sorted(journal.amounts) == list(range(50))


async def _are(rows: Look, states: dict[str, int]) -> bool:
    return await rows.states() == states


async def test_a_silently_ended_lock_session_returns_to_its_pool(postgres_url: str) -> None:
    """asyncpg notifies its pool and its listeners only of an end that was reported to asyncpg."""
    pool = await asyncpg.create_pool(postgres_url, min_size=0, max_size=10)
    async with opened(Outbox(pool, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        async with outbox.running():
            session = lock_session(locks_of(outbox)._lock)
            await eventually(lambda: session._connection)
            session._connection._con._protocol.abort()
    async with asyncio.timeout(20):
        await pool.close()
