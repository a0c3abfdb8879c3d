"""Handlers that block the event loop: locks, repeated runs, and the log."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outboxio import EventEnvelope, Outbox, Settings
from outboxio.model.lock_name import LockName
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, hang, opened
from tests.kit.inside import locks_of
from tests.kit.leaks import Leaks
from tests.kit.processes import ROOT, Worker
from tests.kit.server_actions import ServerActions, actions_on
from tests.kit.spies import counters

pytestmark = pytest.mark.above_statements

StartWorker = Callable[..., Awaitable[Worker]]
MakeOutbox = Callable[..., Awaitable[Outbox]]

#: A machine that stops a process for 3 s does not end the session with the locks, which may be silent for 3.6 s.
HEARTBEAT = 2.0
BLOCKS = 2.25 * HEARTBEAT  # seconds: longer than the server keeps a silent session
SHORT = 0.5  # a heartbeat where the locks may be lost
FANOUT, DISPATCH = "app/fanout", "app/dispatch/report"
RECEIPT = LockName("app", "dispatch", "report")


@pytest.fixture
def rows(server_url: str) -> Look:
    return Look(server_url)


@pytest.fixture
async def producer(server_url: str) -> AsyncIterator[Outbox]:
    """An outbox of this process, which runs no handlers."""
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        yield outbox


async def a_pair(start_worker: StartWorker, url: str, handler: dict[str, Any], **options: Any) -> list[Worker]:
    """A worker that holds every lock, and a standby."""
    holder = await start_worker(url, handler, **options)
    await holder.until_running(FANOUT, DISPATCH)
    standby = await start_worker(url, handler, **options)
    await standby.until_running()
    return [holder, standby]


async def all_succeeded(rows: Look, number: int) -> bool:
    return await rows.states() == {"SUCCEEDED": number}


def lines(worker: Worker) -> list[str]:
    return [report["message"] for report in worker.of("log")]


# --- the session lives in a thread ---------------------------------------------------------------


async def test_a_long_blocking_handler_runs_once_and_keeps_its_lock(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    handler = {"name": "report", "blocks": BLOCKS}
    holder, standby = await a_pair(start_worker, server_url, handler, lock_heartbeat=HEARTBEAT)

    await producer.executor.execute(Emit((1,)))

    await eventually(lambda: all_succeeded(rows, 1))
    assert (holder.amounts, standby.amounts) == ([1], [])
    assert holder.of("lost") == standby.of("taken") == []


async def test_short_blocks_in_a_row_repeat_nothing(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    """A heartbeat takes several turns of an event loop, and each turn runs a handler that blocks."""
    handler = {"name": "report", "blocks": HEARTBEAT / 2}
    holder, standby = await a_pair(start_worker, server_url, handler, lock_heartbeat=HEARTBEAT)

    await producer.executor.execute(Emit(tuple(range(6))))

    await eventually(lambda: all_succeeded(rows, 6))
    assert sorted(holder.amounts) == list(range(6))
    assert standby.amounts == []
    assert holder.of("lost") == []


@pytest.mark.real_time("the event loop is truly blocked")
async def test_locks_are_proven_as_soon_as_a_blocked_loop_continues(server_url: str) -> None:
    settings = Settings(lock_heartbeat=HEARTBEAT)
    async with opened(Outbox(server_url, namespace="app", settings=settings)) as outbox:
        outbox.handler(MoneyDeposited, name="report")(Journal())
        async with outbox.running():
            await eventually(lambda: locks_of(outbox).holds(RECEIPT))
            for _ in range(2):
                time.sleep(BLOCKS)  # noqa: ASYNC251  # the block is the point
                assert locks_of(outbox).holds(RECEIPT), "nothing else has run since the loop was blocked"
                await asyncio.sleep(0.05)


@pytest.mark.real_time("the event loop is truly blocked")
async def test_a_session_that_ended_during_a_block_is_not_trusted(server_url: str, rows: Look) -> None:
    acts = actions_on(server_url)
    settings = Settings(lock_heartbeat=SHORT)
    async with opened(Outbox(server_url, namespace="app", settings=settings)) as outbox:
        outbox.handler(MoneyDeposited, name="report")(Journal())
        async with outbox.running():
            await eventually(lambda: locks_of(outbox).holds(RECEIPT))
            ended = threading.Thread(target=end_lock_session, args=(acts, acts.outbox_sessions(outbox)["lock"]))
            ended.start()
            ended.join()  # which blocks the event loop
            locks, loop = locks_of(outbox), asyncio.get_running_loop()
            block_until(lambda: locks._lock.proof is None and loop.time() >= locks._trusted_until)
            assert not locks.holds(RECEIPT)
            await eventually(lambda: locks_of(outbox).holds(RECEIPT))


def block_until(holds: Callable[[], bool]) -> None:
    """Block the event loop until another thread has made the condition true."""
    while not holds():
        time.sleep(0.01)


def end_lock_session(acts: ServerActions, session: int) -> None:
    asyncio.run(acts.end([session]))


async def test_a_process_whose_loop_stays_blocked_is_replaced(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    """After the handler timeout, and then the idle timeout of a session."""
    options = {"lock_heartbeat": SHORT, "handler_timeout": 2 * SHORT}
    holder = await start_worker(server_url, {"name": "report", "blocks": 3600}, **options)
    await holder.until_running(FANOUT, DISPATCH)
    standby = await start_worker(server_url, {"name": "report"}, **options)
    await standby.until_running()

    await producer.executor.execute(Emit((1,)))

    blocked_at = (await holder.until("call"))[0]["at"]
    taken_at = (await standby.until("taken", lock=DISPATCH))[0]["at"]
    assert taken_at - blocked_at > 2 * SHORT
    await eventually(lambda: all_succeeded(rows, 1))
    [line] = [line for line in lines(holder) if "has been blocked for" in line]
    assert "running: report (" in line
    assert "worker.py:" in line


# --- given pools ---------------------------------------------------------------------------------


async def test_over_a_user_pool_each_process_runs_a_blocking_handler_once(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    """The sessions are lost, because they need the event loop; the outcome of a run is kept, and finally written."""
    handler = {"name": "report", "blocks": 5 * SHORT}
    options = {"lock_heartbeat": SHORT, "given_pool": True}
    pair = await a_pair(start_worker, server_url, handler, **options)

    await producer.executor.execute(Emit((1, 2)))

    await eventually(lambda: all_succeeded(rows, 2), timeout=60)
    for worker in pair:
        assert max(Counter(worker.amounts).values(), default=0) <= 1, "it ran again in the same process"


async def test_over_a_user_pool_short_blocks_repeat_nothing(
    server_url: str, producer: Outbox, rows: Look, start_worker: StartWorker
) -> None:
    handler = {"name": "report", "blocks": 0.8}
    options = {"lock_heartbeat": 1.6, "given_pool": True}
    holder, standby = await a_pair(start_worker, server_url, handler, **options)

    await producer.executor.execute(Emit(tuple(range(5))))

    await eventually(lambda: all_succeeded(rows, 5), timeout=60)
    assert sorted(holder.amounts + standby.amounts) == list(range(5))


# --- further handlers in the same process --------------------------------------------------------


@pytest.mark.real_time("the event loop is truly blocked")
async def test_a_handler_delayed_by_a_blocking_one_does_not_time_out(make_outbox: MakeOutbox, look: Look) -> None:
    """The awaited response was there in time, while the loop could not deliver it."""
    outbox, has_begun, waits = await make_outbox(), asyncio.Event(), Journal()

    @outbox.handler(MoneyDeposited, name="waits", timeout="700ms")
    async def wait(envelope: EventEnvelope[MoneyDeposited]) -> None:
        has_begun.set()
        await asyncio.sleep(0.1)
        await waits(envelope)

    @outbox.handler(MoneyDeposited, name="blocks")
    async def block(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await has_begun.wait()
        time.sleep(1.5)  # noqa: ASYNC251  # the block is the point

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: counters(outbox).succeeded + counters(outbox).failed == 2)
    assert await look.states() == {"SUCCEEDED": 2}
    assert len(waits) == 1


@pytest.mark.real_time("the event loop is truly blocked")
async def test_timeouts_still_apply_while_a_loop_is_blocked_repeatedly(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()

    @outbox.handler(MoneyDeposited, name="slow", timeout="700ms")
    async def slow(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await hang()

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        while not counters(outbox).failed:
            time.sleep(0.8)  # noqa: ASYNC251  # the block is the point
            await asyncio.sleep(0.02)


# --- the log -------------------------------------------------------------------------------------


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.real_time("the event loop is truly blocked")
async def test_the_worker_log_names_the_blocking_handler_and_its_line(
    make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, other = await make_outbox(), Journal()

    @outbox.handler(MoneyDeposited, name="crunches")
    async def crunches(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await other.calls(1)
        time.sleep(1.5)  # noqa: ASYNC251  # the block is the point

    @outbox.handler(MoneyDeposited, name="waits")
    async def waits(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await other(envelope)
        await asyncio.sleep(0.5)

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: counters(outbox).succeeded == 2)
        assert counters(outbox).standstills >= 1

    # A busy machine may stop the process as well: that is logged differently, or like this if the handler is running.
    [line] = [line for line in warnings_in(caplog) if f"; running: crunches ({__file__}:" in line]
    assert "in crunches)" in line
    assert "waits" not in line
    assert line.startswith("this process was suspended for ") or (
        line.startswith("event loop blocked for ") and "asyncio.to_thread" in line
    )


@pytest.mark.real_time("the event loop is truly blocked")
@pytest.mark.parametrize("source", ["url", "given-pool"])
async def test_the_log_of_a_blocked_loop_shows_no_driver_internals(
    server_url: str, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Sessions that were idle, or in the transaction that writes an outcome with its events."""
    settings = Settings(lock_heartbeat=SHORT)
    async with actions_on(server_url).pool() as pool:
        outbox = Outbox(server_url if source == "url" else pool, namespace="app", settings=settings)
        async with opened(outbox):

            @outbox.handler(MoneyDeposited, name="report")
            async def report(envelope: EventEnvelope[MoneyDeposited]) -> None:
                envelope.emit(WalletOpened(envelope.event.wallet_id))
                time.sleep(3 * SHORT)  # noqa: ASYNC251  # the block is the point

            async with outbox.running():
                await outbox.executor.execute(Emit((1, 2)))
                await eventually(lambda: counters(outbox).succeeded == 2)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    known = (
        "event loop blocked for",
        "this process was suspended",
        "cluster lock session lost",
        "were rejected",
    )
    assert [line for line in warnings_in(caplog) if not any(words in line for words in known)] == []


# --- the thread leaves nothing behind ------------------------------------------------------------


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_repeated_entering_and_leaving_leaks_no_thread_or_descriptor(
    make_outbox: MakeOutbox, leaks: Leaks
) -> None:
    outbox = await make_outbox()
    outbox.handler(MoneyDeposited, name="report")(Journal())
    await asyncio.to_thread(time.sleep, 0)  # the executor's thread is not part of outboxio
    threads = files = 0
    warm, cycles = 2, 9  # executor threads and SQLite readers are created on demand, also later
    for cycle in range(warm + 1 + cycles):
        async with outbox.running():
            await outbox.executor.execute(Emit((cycle,)))
            await eventually(lambda: locks_of(outbox).holds(RECEIPT))
        ours = [thread.name for thread in threading.enumerate() if thread.name == "outboxio"]
        assert ours == []
        if cycle == warm:
            threads, files = threading.active_count(), open_files()
    assert threading.active_count() < threads + cycles
    assert open_files() < files + cycles
    await leaks.nothing_is_left(1)


SCRIPT = """
import asyncio, gc, os, sys, threading, time
from outboxio import Outbox, Settings
from outboxio.model.lock_name import LockName
from tests.kit.app import Emit, Journal, MoneyDeposited, eventually
from tests.kit.inside import locks_of

def make(name):
    outbox = Outbox({url!r}, namespace="app", settings=Settings(lock_heartbeat={heartbeat}))
    outbox.handler(MoneyDeposited, name=name)(journal)
    return outbox

async def enter(outbox):
    await outbox.migrate()
    await outbox.running().__aenter__()
    await outbox.executor.execute(Emit((1,)))
    await journal.calls(1)
    print("entered", flush=True)

def of_ours():
    return [thread for thread in threading.enumerate() if thread.name == "outboxio"]

journal = Journal()
outbox = make("report")
"""


def script(url: str, body: str, heartbeat: float = SHORT) -> list[str]:
    head = SCRIPT.format(url=url, heartbeat=heartbeat)
    return [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(body)]


def run(url: str, body: str, heartbeat: float = SHORT) -> tuple[int, list[str], str]:
    """Run such a script, and return its exit code, output and warnings."""
    done = subprocess.run(script(url, body, heartbeat), cwd=ROOT, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout.split(), done.stderr


ABANDONS_ITS_LOOP = """
    loop = asyncio.new_event_loop()
    loop.run_until_complete(enter(outbox))
"""

EXITS_INSIDE = """
    async def main():
        await enter(outbox)
        sys.exit(0)

    asyncio.run(main())
"""


@pytest.mark.parametrize("body", [ABANDONS_ITS_LOOP, EXITS_INSIDE], ids=["abandons-its-loop", "exits-inside"])
async def test_the_thread_does_not_prevent_interpreter_exit(server_url: str, body: str) -> None:
    code, said, complaints = await asyncio.to_thread(run, server_url, body)
    assert (code, said) == (0, ["entered"]), complaints


CLOSES_ITS_LOOP = """
    loop = asyncio.new_event_loop()
    loop.run_until_complete(enter(outbox))
    loop.close()
    until = time.monotonic() + 10
    while of_ours() and time.monotonic() < until:
        time.sleep(0.05)
    print(len(of_ours()))
"""


async def test_the_thread_ends_with_the_session_of_a_closed_loop(server_url: str) -> None:
    code, said, complaints = await asyncio.to_thread(run, server_url, CLOSES_ITS_LOOP)
    assert (code, said) == (0, ["entered", "0"]), complaints


STOPS_ITS_LOOP = """
    loop = asyncio.new_event_loop()
    loop.run_until_complete(enter(outbox))
    time.sleep(3600)
"""


async def test_a_stopped_loop_keeps_no_lock(server_url: str, start_worker: StartWorker) -> None:
    process = await asyncio.create_subprocess_exec(
        *script(server_url, STOPS_ITS_LOOP), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"entered\n"
        standby = await start_worker(server_url, {"name": "report"}, lock_heartbeat=0.5)
        await standby.until_running(FANOUT, DISPATCH)
    finally:
        process.kill()
        await process.wait()


FORKS = """
    async def child():
        journal.__init__()
        await enter(make("other"))
        gc.collect()

    async def main():
        await enter(outbox)
        locks, journal.envelopes = locks_of(outbox), []
        child_s = os.fork()
        if child_s == 0:
            try:
                asyncio.run(child())
                os._exit(len(of_ours()))
            finally:
                os._exit(9)
        _, status = await asyncio.to_thread(os.waitpid, child_s, 0)
        print("child", os.waitstatus_to_exitcode(status))
        ended_at = time.monotonic()
        await eventually(lambda: locks._lock.proof is None or locks._lock.proof.sent_at > ended_at)
        await outbox.executor.execute(Emit((2,)))
        await journal.calls(2)
        print("gains", locks.gains, locks.holds(LockName("app", "dispatch", "report")))

    asyncio.run(main())
"""


async def test_a_forked_child_has_its_own_thread(server_url: str) -> None:
    """The child has copies of the parent's sockets, and of all objects that may close them."""
    code, said, complaints = await asyncio.to_thread(run, server_url, FORKS, HEARTBEAT)
    assert (code, said[:4]) == (0, ["entered", "entered", "child", "0"]), complaints
    assert said[4:] == ["gains", "3", "True"], complaints  # two locks acquired, and trusted once
