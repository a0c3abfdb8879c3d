"""Several processes on one database: who works, who takes over, and the limits of a former holder."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from outboxio import Outbox, Settings
from outboxio.model.lock_name import channel_name
from outboxio.support.clock import utc_now
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually, opened
from tests.kit.processes import Worker

pytestmark = pytest.mark.above_statements

StartWorker = Callable[..., Awaitable[Worker]]

FANOUT, DISPATCH = "app/fanout", "app/dispatch/receipt"
LOCKS = (FANOUT, DISPATCH)

HEARTBEAT = 1.0
#: A standby tries every 200 ms, and then reads and starts. A loaded machine needs longer, but never as long as the
#: server keeps the locks of an unresponsive process: 9 s.
STANDBY_TAKES = 6.0
NEVER = 60.0  # too long a poll delay to find the rows
SETTLED = 20  # the holder then keeps further runs in progress until the test ends the process
HOLDER = {"name": "receipt", "sleep": 0.02, "concurrency": 2, "holds_after": SETTLED}


@pytest.fixture
async def producer(server_url: str) -> AsyncIterator[Outbox]:
    """An outbox of this process, which runs no handlers."""
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        yield outbox


@pytest.fixture
async def postgres_producer(postgres_url: str) -> AsyncIterator[Outbox]:
    async with opened(Outbox(postgres_url, namespace="app")) as outbox:
        yield outbox


@pytest.fixture
def rows(server_url: str) -> Look:
    return Look(server_url)


async def a_pair(start_worker: StartWorker, url: str, *handlers: dict[str, Any], **options: Any) -> list[Worker]:
    """A worker that holds every lock, and a standby."""
    holder = await start_worker(url, handlers[0], **options)
    await holder.until_running(*LOCKS)
    standby = await start_worker(url, handlers[-1], **options)
    await standby.until_running()
    return [holder, standby]


@pytest.mark.real_time("measures how long a take-over lasts")
async def test_a_killed_holder_is_replaced_at_once(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    holder, standby = await a_pair(start_worker, server_url, HOLDER, {"name": "receipt"})
    await producer.executor.execute(Emit(tuple(range(100))))
    await eventually(lambda: _are(rows, {"SUCCEEDED": SETTLED, "PENDING": 100 - SETTLED}))
    assert not standby.of("taken")

    killed_at = time.monotonic()
    holder.kill()

    first_call = (await standby.until("call"))[0]
    assert first_call["at"] - killed_at < STANDBY_TAKES
    await eventually(lambda: _are(rows, {"SUCCEEDED": 100}))
    assert {*holder.amounts, *standby.amounts} == set(range(100))
    assert len(standby.amounts) == 100 - SETTLED, "what the first had settled runs again"


async def test_a_leaving_holder_is_replaced_at_once_and_repeats_nothing(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    holder, standby = await a_pair(start_worker, server_url, HOLDER, {"name": "receipt"})
    await producer.executor.execute(Emit(tuple(range(100))))
    await holder.until("call", SETTLED + 1)

    await holder.leave()

    left_at = holder.of("lost")[-1]["at"]
    first_call = (await standby.until("call"))[0]
    assert first_call["at"] - left_at < STANDBY_TAKES
    await eventually(lambda: _are(rows, {"SUCCEEDED": 100}))
    assert sorted(holder.amounts + standby.amounts) == list(range(100))
    assert len(holder.of("done")) == len(holder.amounts), "a handler was cut short"


@pytest.mark.real_time("measures how long a take-over lasts")
async def test_a_frozen_holder_is_replaced_and_later_changes_nothing(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    holder, successor = await a_pair(
        start_worker,
        server_url,
        {"name": "receipt", "gated": True, "concurrency": 2},
        {"name": "receipt", "fails_on": [0]},
        lock_heartbeat=HEARTBEAT,
    )
    await producer.executor.execute(Emit(tuple(range(6))))
    assert len(await holder.until("call", 2)) == 2  # two run, four are prefetched

    frozen_at = time.monotonic()
    holder.freeze()

    first_call = (await successor.until("call"))[0]
    assert first_call["at"] - frozen_at < 2 * HEARTBEAT + STANDBY_TAKES
    # The failed row is not final: only the term prevents the former holder from changing it.
    await eventually(lambda: _are(rows, {"SUCCEEDED": 5, "FAILED": 1}))
    left_as = await rows.notifications()

    holder.open_gate()
    holder.thaw()

    await holder.until_it(lambda: any("2 of 2 outcomes" in r["message"] for r in holder.of("log")))
    await holder.leave()
    assert sorted(holder.amounts) == [0, 1], "a prefetched row was started after waking up"
    assert await rows.notifications() == left_as
    assert sorted(successor.amounts) == list(range(6))


async def test_a_holder_frozen_inside_a_transaction_is_replaced(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    frozen = await start_worker(
        server_url, {"name": "receipt", "emits": True}, freezes_in_settlement=True, lock_heartbeat=HEARTBEAT
    )
    await frozen.until_running(*LOCKS)
    successor = await start_worker(server_url, {"name": "receipt", "emits": True}, lock_heartbeat=HEARTBEAT)
    await successor.until_running()

    await producer.executor.execute(Emit((1,)))

    frozen_at = (await frozen.until("freezing"))[0]["at"]
    first_call = (await successor.until("call"))[0]
    assert first_call["at"] - frozen_at < 2 * HEARTBEAT + STANDBY_TAKES
    await eventually(lambda: _are(rows, {"SUCCEEDED": 1}))
    frozen.thaw()
    await frozen.until("lost", lock=DISPATCH)
    await frozen.leave()
    assert await rows.value("SELECT count(*) FROM {events} WHERE event_type = 'WalletOpened'") == 1


async def test_instances_with_different_handlers_run_at_the_same_time(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    web, worker = await asyncio.gather(
        start_worker(server_url, {"name": "web", "gated": True}),
        start_worker(server_url, {"name": "worker", "gated": True}),
    )
    await web.until_running("app/dispatch/web")
    await worker.until_running("app/dispatch/worker")

    await producer.executor.execute(Emit(tuple(range(20))))

    await web.until("call", 20)
    await worker.until("call", 20)
    assert not web.of("done")
    assert not worker.of("done"), "they do not run at the same time"
    web.open_gate()
    worker.open_gate()
    await eventually(lambda: _are(rows, {"SUCCEEDED": 40}))
    assert sorted(web.amounts) == sorted(worker.amounts) == list(range(20))
    assert {r["handler"] for r in web.of("call")} == {"web"}


async def test_a_handler_renamed_in_a_rolling_deploy_handles_every_event_once(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    old = await start_worker(server_url, {"name": "receipt", "sleep": 0.5, "concurrency": 1})
    await old.until_running(*LOCKS)
    await producer.executor.execute(Emit(tuple(range(40))))
    await old.until("call", 3)
    new = await start_worker(server_url, {"name": "deposit-receipt", "aliases": ["receipt"]})
    await new.until_running("app/dispatch/deposit-receipt")

    # The old version fans out and runs the remaining rows under the old name; new events get the new name only.
    await producer.executor.execute(Emit(tuple(range(40, 60))))
    await new.until("call", 20)
    assert sorted(new.amounts) == list(range(40, 60))
    assert max(old.amounts) < 40
    await old.leave()

    await eventually(lambda: _are(rows, {"SUCCEEDED": 60}))
    assert Counter(old.amounts + new.amounts) == Counter(range(60))
    assert len(new.amounts) > 20, "nothing was left of the old name, so its alias was not tried"


async def test_a_producer_wakes_fanout_and_handlers_in_other_processes(
    postgres_url: str, postgres_producer: Outbox, start_worker: StartWorker
) -> None:
    producer = postgres_producer
    polls = {"fanout_poll_delay": NEVER, "handling_poll_delay": NEVER}
    fanning, handling = await asyncio.gather(
        start_worker(postgres_url, {"name": "receipt"}, roles={"handling": False}, **polls),
        start_worker(postgres_url, {"name": "receipt"}, roles={"fanout": False}, **polls),
    )
    await fanning.until_running(FANOUT)
    await handling.until_running(DISPATCH)

    for number in range(1, 6):
        await producer.executor.execute(Emit((number,)))
        await handling.until("call", number)


async def test_rows_dated_slightly_ahead_are_found_without_a_poll(postgres_url: str) -> None:
    """No further wake-up arrives for these rows."""
    ahead = lambda: utc_now() + timedelta(milliseconds=200)  # noqa: E731
    settings, journal = Settings(fanout_poll_delay=NEVER, handling_poll_delay=NEVER), Journal()
    async with (
        opened(Outbox(postgres_url, namespace="app", clock=ahead, settings=settings)) as fanning,
        Outbox(postgres_url, namespace="app", settings=settings) as handling,
    ):
        for outbox in (fanning, handling):
            outbox.handler(MoneyDeposited, name="receipt")(journal)
        async with handling.running(fanout=False):
            pass  # its connections are open and its clock is measured
        async with fanning.running(handling=False):
            await fanning.executor.execute(Emit((1,)))
            await eventually(lambda: fanned_out(fanning))
        async with handling.running(fanout=False):
            await journal.calls(1)


async def fanned_out(outbox: Outbox) -> bool:
    return (await outbox.admin.counts())["undelivered"] == 0


@pytest.mark.real_time("a wake-up comes between two looks that are 0.25 s apart")
async def test_rows_due_later_by_the_local_clock_are_found(postgres_url: str) -> None:
    """Both processes have measured the database's clock, one of them inaccurately."""
    ahead = lambda: utc_now() + timedelta(milliseconds=100)  # noqa: E731
    settings, journal = Settings(fanout_poll_delay=NEVER, handling_poll_delay=NEVER), Journal()
    async with (
        opened(Outbox(postgres_url, namespace="app", clock=ahead, settings=settings)) as fanning,
        Outbox(postgres_url, namespace="app", settings=settings) as handling,
    ):
        for outbox in (fanning, handling):
            outbox.handler(MoneyDeposited, name="receipt")(journal)
        async with fanning.running(handling=False), handling.running(fanout=False):
            for number in range(1, 4):
                await fanning.executor.execute(Emit((number,)))
                await journal.calls(number)
            # A wake-up during the wait for a second check gets its own second check.
            await fanning.executor.execute(Emit((4,)))
            await asyncio.sleep(0.2)
            await fanning.executor.execute(Emit((5,)))
            await journal.calls(5)


@pytest.mark.real_time("counts the wake-ups of a second")
async def test_wakeups_of_a_burst_are_combined(postgres_url: str, postgres_producer: Outbox) -> None:
    producer = postgres_producer
    wakeups: list[float] = []
    listener = await asyncpg.connect(postgres_url)
    await listener.add_listener(channel_name("app"), lambda *_: wakeups.append(time.monotonic()))
    await producer.executor.execute(Emit((0,)))
    await eventually(lambda: wakeups)
    await asyncio.sleep(0.1)  # the pause after that check is over
    wakeups.clear()

    begun_at = time.monotonic()
    await producer.executor.execute(Emit((0,)))
    await eventually(lambda: wakeups)
    for number in range(200):
        await producer.executor.execute(Emit((number,)))
    ended_at = time.monotonic()
    await eventually(lambda: wakeups[-1] >= ended_at)

    # At most a wake-up per 50 ms, and a last wake-up for the last commit.
    assert len(wakeups) <= 2 + (wakeups[-1] - begun_at) / 0.05
    await listener.close()


async def test_no_wakeup_is_sent_inside_a_business_transaction(postgres_url: str) -> None:
    statements: list[str] = []

    async def log_queries(connection: asyncpg.Connection[Any]) -> None:
        connection.add_query_logger(lambda query: statements.append(query.query))

    async with (
        asyncpg.create_pool(postgres_url, min_size=1, max_size=1, init=log_queries) as pool,
        opened(Outbox(pool, namespace="app")) as outbox,
    ):
        for _ in range(2):  # the first time, the driver reads types
            statements.clear()
            await outbox.executor.execute(Emit((1, 2)))
            await eventually(lambda: any("NOTIFY" in statement for statement in statements))

    inside = statements[statements.index("BEGIN;") + 1 : statements.index("COMMIT;")]
    assert [" ".join(statement.split()[:3]) for statement in inside] == ["INSERT INTO eventlog.events"]


@pytest.mark.real_time("measures how long a take-over lasts")
async def test_two_processes_share_one_sqlite_file(sqlite_url: str, start_worker: StartWorker) -> None:
    rows = Look(sqlite_url)
    async with opened(Outbox(sqlite_url, namespace="app")) as producer:
        holder, standby = await a_pair(start_worker, sqlite_url, HOLDER, {"name": "receipt"})
        await producer.executor.execute(Emit(tuple(range(60))))
        await holder.until("call", SETTLED + 1)
        assert not standby.of("taken")

        killed_at = time.monotonic()
        holder.kill()

        first_call = (await standby.until("call"))[0]
        assert first_call["at"] - killed_at < STANDBY_TAKES
        await eventually(lambda: _are(rows, {"SUCCEEDED": 60}))
        assert {*holder.amounts, *standby.amounts} == set(range(60))


async def _are(rows: Look, states: dict[str, int]) -> bool:
    return await rows.states() == states
