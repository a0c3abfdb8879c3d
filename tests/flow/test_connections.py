"""Connections that a database ends, and the demands on given connections."""

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
from tests.kit.complaints import complaints
from tests.kit.inside import lock_loop_of, locks_of
from tests.kit.private_servers import pgbouncer_to, private_postgres, private_server
from tests.kit.proxy import proxy_to
from tests.kit.server_acts import ServerActs, acts_on, lock_session
from tests.kit.spies import counters, nothing_is_handed_over
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
def acts(server_url: str) -> ServerActs:
    return acts_on(server_url)


@pytest.fixture
async def pool(acts: ServerActs) -> AsyncIterator[Any]:
    async with acts.pool() as pool:
        yield pool


@asynccontextmanager
async def producing(outbox: Outbox, acts: ServerActs) -> AsyncIterator[None]:
    """Events flow while the block lasts; an action whose connection is cut gets an error."""

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
    """Wait until all events committed by now are handled. More events come meanwhile, so a rest may always be left."""
    last = await rows.value("SELECT max(sequence) FROM {events}")
    await eventually(lambda: rows.value(f"SELECT NOT EXISTS ({UNHANDLED} AND e.sequence <= {last})"))


UNHANDLED = """
SELECT 1 FROM {events} e WHERE e.event_type IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM {event_notifications} n WHERE n.event_id = e.id AND n.state = 'SUCCEEDED')
"""


# --- lost connections ----------------------------------------------------------------------------


@pytest.mark.real_time("keeps a load up while connections are cut")
@pytest.mark.parametrize("source", ["url", "given-pool"])
async def test_whichever_connection_is_lost_everything_is_handled(
    server_url: str, rows: Look, acts: ServerActs, pool: Any, source: str
) -> None:
    journal = Journal()
    async with opened(Outbox(server_url if source == "url" else pool, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running(), producing(outbox, acts):
            for name in ("find", "settle", "pool", "fanout"):
                await journal.calls(len(journal) + 10)
                await eventually(lambda name=name: name in acts.own_sessions(outbox))
                await acts.end([acts.own_sessions(outbox)[name]])
                await journal.calls(len(journal) + 10)
                await caught_up(rows)
                if name == "fanout" and rows.driver == "aiomysql":
                    # Handlers begin during the commit: outcomes of lost rows are refused, and the events are handled
                    # once more.
                    await eventually(lambda: len(repeated(journal)) <= counters(outbox).refused)
                else:
                    assert repeated(journal) == [], f"handled twice, although only {name} was lost"

            await acts.end([acts.own_sessions(outbox)["lock"]])
            await journal.calls(len(journal) + 10)
        await outbox.drain()
    events = await rows.fetch("SELECT model_id FROM {events} WHERE event_type IS NOT NULL")
    assert {int(event["model_id"]) for event in events} == set(journal.amounts)


def repeated(journal: Journal) -> list[int]:
    return [amount for amount, times in Counter(journal.amounts).items() if times > 1]


@pytest.mark.real_time("keeps a load up while connections are cut")
async def test_all_connections_lost_at_once_are_survived(server_url: str, rows: Look, acts: ServerActs) -> None:
    journal = Journal()
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running(), producing(outbox, acts):
            for _ in range(3):
                await journal.calls(len(journal) + 20)
                await acts.end(list(acts.own_sessions(outbox).values()))
            await journal.calls(len(journal) + 20)
        await outbox.drain()
        assert await all_handled(rows)


@pytest.mark.real_time("keeps a load up while connections are cut")
async def test_a_restart_of_the_server_is_survived_without_anybody_s_help(server_url: str) -> None:
    journal = Journal()
    with private_server(like=server_url) as server:
        rows, acts = Look(server.url), acts_on(server.url)
        async with opened(Outbox(server.url, namespace="app")) as outbox:
            outbox.handler(MoneyDeposited, name="first")(journal)
            async with outbox.running(), producing(outbox, acts):
                await journal.calls(20)
                await asyncio.to_thread(server.stop)
                await asyncio.to_thread(server.start)
                await journal.calls(len(journal) + 20)
            await outbox.drain()
            assert await all_handled(rows)


async def test_a_fan_out_that_the_server_loses_in_a_crash_is_done_again(postgres_url: str) -> None:
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


async def test_a_connection_that_is_cut_during_commit_leaves_the_outcome_unknown(server_url: str, rows: Look) -> None:
    """The server commits, and its answer does not arrive."""
    async with (
        opened(Outbox(server_url, namespace="app")),
        proxy_to(server_url) as proxy,
        Outbox(proxy.url, namespace="app", settings=Settings(notify=False)) as outbox,
    ):
        await outbox.executor.execute(Emit((1,)))
        proxy.fall_silent_after(b"commit")
        acting = asyncio.create_task(outbox.executor.execute(Emit((2,))))
        await eventually(lambda: not proxy.waits_for_last_words)
        await eventually(lambda: _has_events(rows, 2))
        await proxy.stop()
        with pytest.raises(CommitUnknown):
            await acting

        await proxy.start()
        await outbox.executor.execute(Emit((3,)))
    assert await _has_events(rows, 3)


async def test_a_commit_that_is_never_answered_is_given_up(server_url: str, rows: Look) -> None:
    async with (
        opened(Outbox(server_url, namespace="app")),
        proxy_to(server_url) as proxy,
        Outbox(proxy.url, namespace="app", settings=Settings(statement_timeout="500ms")) as outbox,
    ):
        await outbox.executor.execute(Emit((1,)))
        proxy.fall_silent_after(b"commit")
        begun = asyncio.get_running_loop().time()
        with pytest.raises(CommitUnknown):
            await outbox.executor.execute(Emit((2,)))
        assert asyncio.get_running_loop().time() - begun >= 0.5
        await outbox.executor.execute(Emit((3,)))
    assert await _has_events(rows, 3)


async def _has_events(rows: Look, number: int) -> bool:
    return len(await rows.events()) == number


@pytest.mark.real_time("counts the attempts of a second")
async def test_a_database_that_is_gone_is_asked_ever_more_rarely(server_url: str, acts: ServerActs) -> None:
    async with proxy_to(server_url) as proxy, opened(Outbox(proxy.url, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        async with outbox.running():
            await eventually(lambda: "lock" in acts.own_sessions(outbox))
            gone_at = time.monotonic()
            await proxy.stop()
            await asyncio.sleep(1)
            await eventually(lambda: lock_loop_of(outbox).errors >= 2)
            number, seconds = lock_loop_of(outbox).errors, time.monotonic() - gone_at
            await proxy.start()
            assert number <= 5 + seconds  # after 0.1, 0.2, 0.4, 0.8 s, jittered
            await eventually(lambda: "lock" in acts.own_sessions(outbox))


async def test_a_lost_listen_connection_listens_again(postgres_url: str) -> None:
    journal, acts = Journal(), acts_on(postgres_url)
    async with (
        opened(Outbox(postgres_url, namespace="app")) as producer,
        Outbox(postgres_url, namespace="app", settings=Settings(**NO_POLLS)) as outbox,
    ):
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            await producer.executor.execute(Emit((1,)))
            await journal.calls(1)
            before = acts.own_sessions(outbox)["lock"]
            await acts.end([before])
            # Events that were committed while no session listened are found as soon as a session listens.
            await producer.executor.execute(Emit((2,)))
            await journal.calls(2)
            # The event may have been handled just before the process noticed the end of the session.
            await eventually(lambda: acts.own_sessions(outbox).get("lock", before) != before)

            await producer.executor.execute(Emit((3,)))
            await journal.calls(3)


@pytest.mark.real_time("measures the time until a connection is replaced")
@pytest.mark.parametrize("moment", ["idle", "in-the-middle-of-a-statement"])
async def test_a_lock_connection_that_fell_silent_is_replaced_by_the_heartbeat(postgres_url: str, moment: str) -> None:
    journal, acts = Journal(), acts_on(postgres_url)
    settings = Settings(**NO_POLLS, lock_heartbeat="500ms")
    async with proxy_to(postgres_url) as proxy, opened(Outbox(postgres_url, namespace="app")) as producer:
        through = Shard(postgres_url, direct_url=proxy.url)
        async with Outbox({"default": through}, namespace="app", settings=settings) as outbox:
            outbox.handler(MoneyDeposited, name="first")(journal)
            async with outbox.running():
                await eventually(lambda: "lock" in acts.own_sessions(outbox))
                if moment == "idle":
                    await producer.executor.execute(Emit((1,)))
                    await journal.calls(1)
                    assert proxy.fall_silent(b"LISTEN") == 1
                else:  # after the first message of the wake-up that fan-out sends
                    nothing_is_handed_over(outbox)
                    proxy.fall_silent_after(b"notify")
                    await producer.executor.execute(Emit((1,)))
                    await eventually(lambda: not proxy.waits_for_last_words)
                silent_at = time.monotonic()
                await producer.executor.execute(Emit((2,)))

                await journal.calls(2)

                # A heartbeat notices: at most 1 s for its answer, and the server ends the session it cannot reach
                # after twice the heartbeat; a standby's try follows. The rest is for a loaded machine.
                assert time.monotonic() - silent_at < 1.0 + 2 * 0.5 + 8.0


async def test_a_lock_connection_that_fell_silent_is_replaced_on_every_server(
    server_url: str, acts: ServerActs
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
                before = acts.own_sessions(outbox)["lock"]
                assert proxy.fall_silent(acts.lock_words) == 1

                await eventually(lambda: acts.own_sessions(outbox).get("lock", before) != before)

                await producer.executor.execute(Emit((2,)))
                await journal.calls(2)


# --- settings of the database and of pools -------------------------------------------------------


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
async def test_the_database_s_default_isolation_changes_nothing(
    postgres_url: str, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = postgres_url.rpartition("/")[2]
    await Look(postgres_url).fetch(f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
    async with opened(Outbox(postgres_url, namespace="app")) as outbox:
        await check_flow(outbox)
    assert [line for line in complaints(caplog) if "RetryAfter" not in line] == []


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
async def test_a_given_pool_does_all_and_comes_back_as_it_was(
    postgres_url: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    size = options.get("max_size", 10)
    async with asyncpg.create_pool(postgres_url, **{"min_size": 0, "max_size": size, **options}) as pool:
        async with opened(Outbox(pool, namespace="app")) as outbox:
            await check_flow(outbox)
            await acts_on(postgres_url).comes_to_rest(pool)
        assert not pool.is_closing()
        async with AsyncExitStack() as stack:
            connections = [await stack.enter_async_context(pool.acquire()) for _ in range(size)]
            for connection in connections:
                assert await left_on(connection) == [[], [], []]
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_given_pool_of_any_driver_does_all_and_gets_its_connections_back(
    acts: ServerActs, caplog: pytest.LogCaptureFixture
) -> None:
    async with acts.pool() as pool, opened(Outbox(pool, namespace="app")) as outbox:
        await check_flow(outbox)
        await acts.comes_to_rest(pool)
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def left_on(connection: Any) -> list[list[Any]]:
    """Session settings, channels and advisory locks."""
    looks = (
        "SELECT name FROM pg_settings WHERE source = 'session' AND setting IS DISTINCT FROM reset_val",
        "SELECT pg_listening_channels()",
        "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    )
    return [[tuple(row) for row in await connection.fetch(sql)] for sql in looks]


async def test_a_given_pool_is_free_while_nothing_runs(acts: ServerActs) -> None:
    async with (
        acts.pool(1) as pool,
        opened(Outbox(pool, namespace="app")) as outbox,
        asyncio.timeout(10),
    ):
        await outbox.executor.execute(Emit((1,)))
        assert (await outbox.admin.counts())["undelivered"] == 1
        await outbox.executor.execute(Emit((2,)))


async def test_a_given_pool_that_is_too_small_is_refused(acts: ServerActs) -> None:
    async with (
        acts.pool(SMALLEST_POOL - 1) as pool,
        opened(Outbox(pool, namespace="app")) as outbox,
    ):
        outbox.handler(MoneyDeposited, name="first")(Journal())
        wanted = f"{acts.size_option}={SMALLEST_POOL}"
        with pytest.raises(PoolTooSmall, match=f"at most {SMALLEST_POOL - 1} .* {wanted}"):
            async with outbox.running():
                pass
        await acts.comes_to_rest(pool)


async def test_handlers_that_hold_the_whole_pool_do_not_stop_outcomes(
    server_url: str, rows: Look, acts: ServerActs, pool: Any
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
    rows, acts = Look(postgres_url), acts_on(postgres_url)
    async with (
        opened(Outbox(postgres_url, namespace="app")) as holder,
        Outbox(postgres_url, namespace="app") as standby,
    ):
        for outbox in (holder, standby):
            outbox.handler(MoneyDeposited, name="first")(Journal())
        async with holder.running(), standby.running():
            await eventually(lambda: "lock" in acts.own_sessions(standby))
            pid, begun, looks = acts.own_sessions(standby)["lock"], set(), set()

            async def tries_again_and_again() -> bool:
                found = await session(rows, pid)
                assert found is not None
                begun.add(found["query_start"])
                # A try is a statement of a millisecond; between two of them there is neither snapshot nor transaction.
                held = (found["backend_xmin"], found["backend_xid"], found["xact_start"])
                if found["state"] == "idle" and held != (None, None, None):
                    # The server reads the columns one after the other: the snapshot may be that of the next try.
                    assert found["query_start"] not in looks, found
                    looks.add(found["query_start"])
                return len(begun) >= 5

            await eventually(tries_again_and_again)


# --- PgBouncer in transaction mode ---------------------------------------------------------------


async def test_running_through_a_transaction_pooling_proxy_is_refused_in_words(postgres_url: str) -> None:
    async with opened(Outbox(postgres_url, namespace="app")):
        pass
    with pgbouncer_to(postgres_url) as through:
        async with Outbox({"main": through}, namespace="app") as outbox:
            outbox.handler(MoneyDeposited, name="first")(Journal())
            with pytest.raises(PooledConnection, match="'main' is reached through a transaction-pooling proxy"):
                async with outbox.running():
                    pass


async def test_actions_through_the_proxy_and_loops_beside_it_work(postgres_url: str) -> None:
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


async def test_a_session_with_the_locks_that_ended_without_a_word_goes_back_to_its_pool(postgres_url: str) -> None:
    """asyncpg tells its pool, and its listeners, only of an end that asyncpg was told of."""
    pool = await asyncpg.create_pool(postgres_url, min_size=0, max_size=10)
    async with opened(Outbox(pool, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        async with outbox.running():
            session = lock_session(locks_of(outbox)._lock)
            await eventually(lambda: session._connection)
            session._connection._con._protocol.abort()
    async with asyncio.timeout(20):
        await pool.close()
