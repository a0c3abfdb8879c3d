"""Tasks that wait for a connection: in FIFO order, with a timeout and a log entry."""

from __future__ import annotations

import asyncio
import logging

import pytest

from outboxio import DatabaseUnavailable, PoolExhausted
from outboxio.storage.sqlite.thread import Turn
from outboxio.support.aio import Waiters
from tests.kit.pools import Wires, start_checkout
from tests.kit.virtual_time import timers

pytestmark = pytest.mark.virtual_time


# --- a pool ----------------------------------------------------------------------------------------


async def test_the_timeout_error_names_the_connections_in_use() -> None:
    wires = Wires(2, timeout=0.05)
    first, _ = await wires.pool.acquire(), await wires.pool.acquire()
    with pytest.raises(PoolExhausted) as caught:
        await wires.pool.acquire()

    said = str(caught.value)
    assert "shard 'main' at db:5432/app has no free connection: 2 of at most 2 connections for actions are in" in said
    assert "none was released within pool_timeout, 0.05 s" in said
    assert "raise pool_timeout" in said
    assert isinstance(caught.value, DatabaseUnavailable)
    assert caught.value.held is not None
    assert 0.04 < caught.value.held < 10
    wires.pool.release(first)
    assert await wires.pool.acquire() is first


async def test_many_timeouts_leave_no_waiters() -> None:
    wires = Wires(1, timeout=0.05)
    connection = await wires.pool.acquire()
    results = await asyncio.gather(*(wires.pool.acquire() for _ in range(500)), return_exceptions=True)

    assert {type(error) for error in results} == {PoolExhausted}
    assert not wires.pool._waiters._queue
    wires.pool.release(connection)
    assert await wires.pool.acquire() is connection


async def test_waiting_tasks_share_one_timer() -> None:
    wires = Wires(1)
    before = timers()
    connection = await wires.pool.acquire()
    wires.pool.release(connection)
    connection = await wires.pool.acquire()
    assert timers() == before
    waiting = [await start_checkout(wires.pool) for _ in range(10)]
    assert timers() == before + 1
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_permit_is_reserved_for_the_first_waiting_task() -> None:
    wires = Wires(1)
    lost = await wires.pool.acquire()
    first = await start_checkout(wires.pool)
    lost.is_usable = False
    wires.may_open.clear()
    wires.pool.release(lost)
    latecomer = await start_checkout(wires.pool)  # requests a connection before the first task has opened one
    wires.may_open.set()

    connection = await first
    assert not latecomer.done()
    wires.pool.release(connection)
    assert await latecomer is connection
    assert len(wires.opened) == 2


async def test_a_cancelled_task_passes_its_permit_on() -> None:
    wires = Wires(1)
    lost = await wires.pool.acquire()
    leaver, next_one = await start_checkout(wires.pool), await start_checkout(wires.pool)
    lost.is_usable = False
    wires.pool.release(lost)
    leaver.cancel()

    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert await asyncio.wait_for(next_one, 5) is wires.opened[1]
    assert not wires.pool._opening


async def test_a_connection_opened_before_close_is_not_pooled_again() -> None:
    wires = Wires(1)
    kept = await wires.pool.acquire()
    await wires.pool.close(0)
    wires.pool.release(kept)

    assert kept.end == "dropped"
    assert await wires.pool.acquire() is not kept


async def test_a_connection_opened_while_the_pool_closes_is_dropped() -> None:
    wires = Wires(1)
    wires.may_open.clear()
    opening = await start_checkout(wires.pool)
    await wires.pool.close(0)
    wires.may_open.set()

    with pytest.raises(ConnectionResetError, match="the pool is closed"):
        await opening
    assert [wire.end for wire in wires.opened] == ["dropped"]
    assert await wires.pool.acquire() is wires.opened[1]


async def test_slow_waits_are_logged_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outboxio.support.aio.SLOW_WAIT", 0.01)
    wires = Wires(1)
    connection = await wires.pool.acquire()
    for _ in range(3):
        waiting = await start_checkout(wires.pool)
        await asyncio.sleep(0.02)
        wires.pool.release(connection)
        assert await waiting is connection

    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "for one of the 1 connections of shard main" in record.getMessage()


# --- the writer's turn -----------------------------------------------------------------------------


async def test_waiting_too_long_for_the_writer_raises() -> None:
    turn = Turn("main", "app.db", 0.05)
    await turn.take()
    with pytest.raises(PoolExhausted, match=r"shard 'main' at app\.db has no free connection: 1 of at most 1 "):
        await asyncio.create_task(turn.take())
    turn.pass_on()
    await turn.take()


async def test_the_first_waiting_task_is_served_before_new_ones() -> None:
    turn, order = Turn("main", "app.db", 30.0), list[str]()

    async def take(name: str) -> None:
        await turn.take()
        order.append(name)

    await turn.take()
    tasks = [asyncio.create_task(take(name)) for name in ("first", "leaver", "second")]
    await asyncio.sleep(0)
    tasks[1].cancel()
    turn.pass_on()
    tasks.append(asyncio.create_task(take("latecomer")))
    for _ in range(3):
        await asyncio.sleep(0.01)
        turn.pass_on()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["first", "second", "latecomer"]


async def test_a_task_cancelled_when_served_passes_its_turn_on() -> None:
    turn = Turn("main", "app.db", 30.0)
    await turn.take()
    served, next_one = asyncio.create_task(turn.take()), asyncio.create_task(turn.take())
    await asyncio.sleep(0)
    turn.pass_on()
    served.cancel()

    with pytest.raises(asyncio.CancelledError):
        await served
    async with asyncio.timeout(5):
        await next_one


async def test_a_timeout_and_a_cancellation_at_once_log_no_error() -> None:
    waiters: Waiters[str] = Waiters(30.0, timeout_error=RuntimeError, on_slow_wait=lambda seconds: None)
    waiting = asyncio.create_task(waiters.wait(lambda served: None))
    await asyncio.sleep(0)
    waiters.refuse_all(RuntimeError("closed"))
    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not waiters.serve("nobody is in line")


async def test_a_closed_pool_leaves_no_timer() -> None:
    wires = Wires(1, timeout=30.0)
    connection = await wires.pool.acquire()
    waiting, before = await start_checkout(wires.pool), timers()
    wires.pool.release(connection)
    wires.pool.release(await waiting)
    await wires.pool.close()
    assert timers() == before - 1


async def test_the_timer_stays_for_tasks_that_wait_for_the_writer() -> None:
    turn, before = Turn("main", "app.db", 30.0), timers()
    await turn.take()
    served, cancelled = asyncio.create_task(turn.take()), asyncio.create_task(turn.take())
    await asyncio.sleep(0)
    turn.stop_timer()
    assert timers() == before + 1
    turn.pass_on()
    cancelled.cancel()
    await asyncio.wait((served, cancelled))
    turn.stop_timer()
    assert timers() == before
