"""Guarantees of takeovers, rolling deploys, shutdowns and outages, repeated under load.

``OUTBOXIO_TEST_FULL_SIZE=1`` runs the tests as often and as long as documented; ``-s`` prints the figures. The suite
runs them at a small size.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest

from outboxio import Outbox, Settings
from tests.kit.app import Emit, Look, eventually, opened
from tests.kit.private_servers import private_server
from tests.kit.processes import Worker
from tests.kit.proxy import Proxy, proxy_to
from tests.kit.size import FULL

pytestmark = pytest.mark.above_statements

StartWorker = Callable[..., Awaitable[Worker]]

LOCKS = ("app/fanout", "app/dispatch/receipt")
#: The tolerance of a busy machine for promises in seconds; the promised figures are printed. The suite runs on machines
#: that stop a process for 3 s. That is sooner than leaving cancels a task, 5 s, and than connecting fails, 10 s.
LATE = 2.0 if FULL else 4.5


def size(full: float, small: float) -> float:
    return full if FULL else small


def times(full: int, small: int) -> range:
    return range(full if FULL else small)


def in_words(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.2f} to {max(seconds):.2f} s"


class Load:
    """Numbered events that are committed in turn, until the load is stopped."""

    def __init__(self, producer: Outbox, pause: float) -> None:
        self.number = 0
        """How many are committed; the number of the next."""
        self._producer = producer
        self._pause = pause
        self._enough = asyncio.Event()
        self._task = asyncio.create_task(self._emit())

    async def stop(self) -> None:
        self._enough.set()
        await self._task

    async def _emit(self) -> None:
        while not self._enough.is_set():
            await self._producer.executor.execute(Emit((self.number,)))
            self.number += 1
            await asyncio.sleep(self._pause)


@pytest.fixture
async def producer(database_url: str) -> AsyncIterator[Outbox]:
    """An outbox of this process, which runs no handlers."""
    async with opened(Outbox(database_url, namespace="app", settings=Settings(purge_enabled=False))) as outbox:
        yield outbox


@asynccontextmanager
async def load_of(producer: Outbox, pause: float) -> AsyncIterator[Load]:
    load = Load(producer, pause)
    try:
        yield load
    finally:
        await load.stop()


async def all_succeeded(look: Look, number: int) -> bool:
    return await look.states() == {"SUCCEEDED": number}


# --- take-over -------------------------------------------------------------------------------------

RECEIPT = {"name": "receipt", "sleep": 0.02}


@pytest.mark.real_time("measures how long a take-over lasts")
async def test_a_standby_takes_over_whenever_a_holder_is_killed(
    producer: Outbox, look: Look, start_worker: StartWorker
) -> None:
    workers, seconds = [await start_worker(look.url, RECEIPT)], list[float]()
    await workers[0].until_running(*LOCKS)
    async with load_of(producer, 0.01) as load:
        for _ in times(5, 1):
            holder, standby = workers[-1], await start_worker(look.url, RECEIPT)
            workers.append(standby)
            await standby.until_running()
            await holder.until("call", 10)
            killed_at = time.monotonic()
            holder.kill()
            seconds.append(await first_call(standby) - killed_at)
    await eventually(lambda: all_succeeded(look, load.number))

    print(f"\n{look.dialect}: {len(seconds)} take-overs after kill -9: {in_words(seconds)}, {load.number} events")
    assert max(seconds) < 1.0 + LATE
    assert {amount for worker in workers for amount in worker.amounts} == set(range(load.number))


@pytest.mark.real_time("measures how long a take-over lasts")
async def test_an_unresponsive_holder_is_replaced_within_two_heartbeats(
    server_url: str, start_worker: StartWorker
) -> None:
    heartbeat, look = size(5.0, 0.5), Look(server_url)
    async with AsyncExitStack() as ends:

        async def start() -> tuple[Worker, Proxy]:
            """An instance on a host with its own network."""
            proxy = await ends.enter_async_context(proxy_to(server_url))
            return await start_worker(proxy.url, RECEIPT, lock_heartbeat=heartbeat), proxy

        producer = await ends.enter_async_context(opened(Outbox(server_url, namespace="app")))
        instances, seconds = [await start()], list[float]()
        await instances[0][0].until_running(*LOCKS)
        async with load_of(producer, 0.02) as load:
            for _ in times(5, 1):
                instances.append(await start())
                (holder, network), (standby, _) = instances[-2:]
                await standby.until_running()
                await holder.until("call", 10)
                silent_at = time.monotonic()
                network.stall()
                seconds.append(await first_call(standby, timeout=60) - silent_at)
                network.resume()
                await holder.leave()
        await eventually(lambda: all_succeeded(look, load.number))

    print(
        f"\n{look.dialect}: {len(seconds)} take-overs from a silent host, heartbeat {heartbeat:g} s: "
        f"{in_words(seconds)}, {load.number} events"
    )
    assert max(seconds) < 2 * heartbeat + (0 if FULL else LATE)
    assert {amount for worker, _ in instances for amount in worker.amounts} == set(range(load.number))


async def first_call(standby: Worker, timeout: float = 20) -> float:
    """The time of its first handler call."""
    return float((await standby.until("call", timeout=timeout))[0]["at"])


# --- rolling deploys -------------------------------------------------------------------------------


def version(number: int) -> list[dict[str, Any]]:
    """The handlers of a version: one with a new name in each version, and one of this version only."""
    renamed = {"name": f"receipt-{number}", "aliases": [f"receipt-{number - 1}"], "sleep": 0.01}
    own = {"name": f"own-{number}", "sleep": 0.1, "concurrency": 1}  # slower than events arrive, so some are left
    return [renamed, own]


async def test_rolling_deploys_lose_no_event_and_waste_no_attempt(
    producer: Outbox, look: Look, start_worker: StartWorker
) -> None:
    deploys, workers = len(times(5, 1)), list[Worker]()

    async def start(*handlers: dict[str, Any]) -> Worker:
        worker = await start_worker(look.url, *handlers)
        workers.append(worker)
        await worker.until_running()
        return worker

    old = await asyncio.gather(*(start(*version(0)) for _ in times(2, 1)))
    since = {0: 0}
    async with load_of(producer, 0.02) as load:
        for number in range(1, deploys + 1):
            await started_by_somebody(old, f"own-{number - 1}")
            new = list[Worker]()
            for leaving in old:
                new.append(await start(*version(number)))
                since.setdefault(number, load.number + 1)  # the previous event may be in progress
                await leaving.leave()
            old = new
        await started_by_somebody(old, f"own-{deploys}")
    await eventually(lambda: are_done(look, "receipt-", load.number), timeout=60)
    await asyncio.gather(*(worker.leave() for worker in old))
    left = [row for row in await look.notifications() if row["state"] != "SUCCEEDED"]
    assert {(row["state"], row["attempts"]) for row in left} == {("PENDING", 0)}

    # A version that has the names again finds all of their rows.
    await start(*({"name": f"own-{number}"} for number in since))
    await eventually(lambda: nothing_is_left(look), timeout=60)

    print(
        f"\n{look.dialect}: {deploys} rolling deploys, {load.number} events, "
        f"{len(left)} notifications left of names that were gone"
    )
    runs = [(call["handler"], call["amount"]) for worker in workers for call in worker.of("call")]
    assert Counter(amount for name, amount in runs if name.startswith("receipt-")) == Counter(range(load.number))
    for number, first in since.items():
        assert {amount for name, amount in runs if name == f"own-{number}"} >= set(range(first, load.number))
    assert len(runs) == len(set(runs)), "something ran twice, although every process left cleanly"
    assert {row["attempts"] for row in await look.notifications()} == {1}


async def started_by_somebody(workers: Sequence[Worker], handler: str) -> None:
    await eventually(lambda: any(len(worker.of("call", handler=handler)) > 3 for worker in workers))


async def are_done(look: Look, prefix: str, number: int) -> bool:
    """True if every event was handled under one of these names."""
    rows = [row for row in await look.notifications() if row["handler_name"].startswith(prefix)]
    return len(rows) == number and all(row["state"] == "SUCCEEDED" for row in rows)


async def nothing_is_left(look: Look) -> bool:
    return (await look.states()).keys() == {"SUCCEEDED"}


# --- shutdowns -------------------------------------------------------------------------------------

SHUTDOWN_TIMEOUT = 0.3


@pytest.mark.real_time("measures how long a shutdown lasts")
async def test_a_shutdown_under_load_repeats_no_finished_run(
    producer: Outbox, look: Look, start_worker: StartWorker
) -> None:
    # The latter outlasts each shutdown, and ends in the last process only.
    handlers = {"name": "quick", "sleep": 0.02}, {"name": "slow", "gated": True}
    workers, seconds = list[Worker](), list[float]()

    async def start() -> Worker:
        # Outcomes wait for longer than a shutdown takes, so that there are always some to be written at the end.
        worker = await start_worker(look.url, *handlers, shutdown_timeout=SHUTDOWN_TIMEOUT, outcome_delay=0.5)
        workers.append(worker)
        await worker.until_running()
        return worker

    async with load_of(producer, 0.03) as load:
        leaving = await start()
        for _ in times(50, 2):
            await leaving.until("call")  # it has the locks, which a starting process could acquire
            staying = await start()
            await leaving.until("call", random.randrange(1, 40))
            await leaving.until("call", handler="slow")
            asked_at = time.monotonic()
            await leaving.leave()
            seconds.append(time.monotonic() - asked_at)
            leaving = staying
    leaving.open_gate()
    await eventually(lambda: all_succeeded(look, 2 * load.number), timeout=60)
    await leaving.leave()

    calls = [call for worker in workers for call in worker.of("call")]
    done = Counter((end["handler"], end["amount"]) for worker in workers for end in worker.of("done"))
    cut = len(calls) - done.total()
    print(
        f"\n{look.dialect}: {len(seconds)} shutdowns under load, {load.number} events, {len(calls)} runs, {cut} of "
        f"them cancelled after {SHUTDOWN_TIMEOUT:g} s; from SIGTERM to the exit {in_words(seconds)}"
    )
    assert max(seconds) < SHUTDOWN_TIMEOUT + LATE
    assert [run for run, number in done.items() if number > 1] == []
    assert len(done) == 2 * load.number
    assert cut > 0, "nothing was under way for longer than the shutdown waits"
    assert {call["attempt"] for call in calls} == {1}
    assert {row["attempts"] for row in await look.notifications()} == {1}


# --- a database that is down -----------------------------------------------------------------------


class Interruptible(NamedTuple):
    """A database that can be unavailable for a while."""

    url: str
    stop: Callable[[], Awaitable[Any]]
    start: Callable[[], Awaitable[Any]]


@asynccontextmanager
async def interruptible(url: str) -> AsyncIterator[Interruptible]:
    """In full size a server that is stopped, which takes some time; otherwise a server that cannot be reached."""
    if FULL:
        with private_server(like=url) as server:
            yield Interruptible(
                server.url, partial(asyncio.to_thread, server.stop), partial(asyncio.to_thread, server.start)
            )
    else:
        async with proxy_to(url) as proxy:
            yield Interruptible(proxy.url, proxy.stop, proxy.start)


@pytest.mark.real_time("shows that no run starts while the database is down")
async def test_an_application_survives_an_outage_of_its_database(server_url: str, start_program: StartWorker) -> None:
    async with interruptible(server_url) as database:
        look = Look(database.url)
        async with opened(Outbox(database.url, namespace="app")):
            pass
        app = await start_program("tests.flow.busy_worker", database=database.url, settings={})
        await app.until("handled", 20)
        before = app.of("health")[-1]["memory"]

        await database.stop()
        down_at = time.monotonic()
        await asyncio.sleep(size(60, 1))  # the test shows that no run starts
        down_until = time.monotonic()
        await database.start()
        up_at = time.monotonic()
        await app.until_it(lambda: any(handled["at"] > up_at for handled in app.of("handled")))
        recovered = next(handled["at"] for handled in app.of("handled") if handled["at"] > up_at) - up_at
        await app.leave()

        refused = [r for r in app.of("refused") if r["begun"] > down_at and r["at"] < down_until]
        waited = [r["at"] - r["begun"] for r in refused]
        health = app.of("health")
        executed = {r["number"] for r in app.of("executed")}
        unknown = {r["number"] for r in app.of("refused") if r["error"] == "CommitUnknown"}
        handled = [r["number"] for r in app.of("handled")]
        late, memory = max(h["late"] for h in health), max(h["memory"] for h in health)
        print(
            f"\n{look.dialect}: down for {down_until - down_at:.1f} s, {len(refused)} actions refused in "
            f"{in_words(waited)}, first event handled {recovered:.2f} s after the server was back, event loop late by "
            f"at most {late * 1000:.0f} ms, memory {before:.0f} MB before and {memory:.0f} MB at most; "
            f"{len(executed)} events, {len(handled) - len(set(handled))} handled again, {len(unknown)} commits unknown"
        )
        assert {r["error"] for r in refused} == {"DatabaseUnavailable"}
        assert all("'default'" in r["message"] and "cannot be reached" in r["message"] for r in refused)
        assert max(waited) < LATE
        assert late < LATE
        assert memory - before < 50
        assert executed <= set(handled) <= executed | unknown
        assert (await look.states()).keys() == {"SUCCEEDED"}
        assert {row["attempts"] for row in await look.notifications()} == {1}
