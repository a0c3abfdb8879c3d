from __future__ import annotations

import asyncio

import pytest

from outboxio.storage.connections.pool import MAX_AGE, MAX_IDLE
from tests.kit.pools import Wire, Wires, start_checkout

pytestmark = pytest.mark.virtual_time


async def test_the_connection_used_last_is_used_first() -> None:
    wires = Wires(2)
    first, second = await wires.pool.acquire(), await wires.pool.acquire()
    wires.pool.release(second)
    wires.pool.release(first)

    assert await wires.pool.acquire() is first
    assert wires.opened == [first, second]


async def test_waiting_tasks_are_served_before_new_ones() -> None:
    wires = Wires(1)
    connection = await wires.pool.acquire()
    first, second = await start_checkout(wires.pool), await start_checkout(wires.pool)
    wires.pool.release(connection)
    latecomer = await start_checkout(wires.pool)  # requests a connection before the first task has run

    assert await first is connection
    assert not second.done()
    wires.pool.release(connection)
    assert await second is connection
    wires.pool.release(connection)
    assert await latecomer is connection


@pytest.mark.parametrize("is_served", [True, False])
async def test_a_cancelled_waiter_passes_its_connection_on(is_served: bool) -> None:
    wires = Wires(1)
    connection = await wires.pool.acquire()
    cancelled, next_one = await start_checkout(wires.pool), await start_checkout(wires.pool)
    if is_served:
        wires.pool.release(connection)
        cancelled.cancel()
    else:
        cancelled.cancel()
        wires.pool.release(connection)

    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await asyncio.wait_for(next_one, 3) is connection


async def test_a_waiting_task_replaces_a_lost_connection() -> None:
    wires = Wires(1)
    lost = await wires.pool.acquire()
    waiting = await start_checkout(wires.pool)
    lost.is_usable = False
    wires.pool.release(lost)

    assert await asyncio.wait_for(waiting, 3) is wires.opened[1]
    assert lost.end == "dropped"


async def test_after_a_failed_connect_the_next_task_tries() -> None:
    wires = Wires(1)
    wires.refuses = True
    first, second = await start_checkout(wires.pool), await start_checkout(wires.pool)

    for refused in (first, second):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.wait_for(refused, 3)


@pytest.mark.parametrize(("seconds", "is_kept"), [(MAX_IDLE - 1, True), (MAX_IDLE + 1, False)])
async def test_a_connection_idle_for_too_long_is_replaced(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_kept: bool
) -> None:
    wires = Wires(2)
    connection = await wires.pool.acquire()
    wires.pool.release(connection)
    _advance(monkeypatch, seconds)

    assert (await wires.pool.acquire() is connection) is is_kept
    assert connection.end == ("" if is_kept else "dropped")


@pytest.mark.parametrize(("seconds", "is_kept"), [(MAX_AGE - 1, True), (MAX_AGE + 1, False)])
async def test_a_connection_is_replaced_at_its_maximum_age(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_kept: bool
) -> None:
    wires = Wires(2)
    connection = await wires.pool.acquire()
    _advance(monkeypatch, seconds)
    wires.pool.release(connection)

    assert (await wires.pool.acquire() is connection) is is_kept


async def test_close_waits_for_connections_in_use_and_then_drops_them() -> None:
    wires = Wires(3)
    idle, back, lost = [await wires.pool.acquire() for _ in range(3)]
    wires.pool.release(idle)
    closing = asyncio.create_task(wires.pool.close(0.2))
    await asyncio.sleep(0.02)
    wires.pool.release(back)

    assert await closing == 1
    assert [wire.end for wire in (idle, back, lost)] == ["goodbye", "dropped", "dropped"]


async def test_close_fails_waiting_tasks() -> None:
    wires = Wires(1)
    connection = await wires.pool.acquire()
    waiting = await start_checkout(wires.pool)
    closing = asyncio.create_task(wires.pool.close(1))

    with pytest.raises(ConnectionResetError, match="the pool is closed"):
        await waiting
    wires.pool.release(connection)
    assert await closing == 0


def test_a_new_event_loop_uses_new_connections() -> None:
    wires = Wires(1)
    first = asyncio.run(wires.pool.acquire())

    assert asyncio.run(wires.pool.acquire()) is not first
    assert asyncio.run(wires.pool.close(1)) == 0


def _advance(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + seconds)


# --- connections in doubt ------------------------------------------------------------------------


async def test_renew_replaces_all_open_connections() -> None:
    wires = Wires(3)
    idle, used = await wires.pool.acquire(), await wires.pool.acquire()
    wires.pool.release(idle)

    wires.pool.renew()

    assert idle.end == "dropped"
    wires.pool.release(used)
    assert used.end == "dropped"
    another = await wires.pool.acquire()
    assert another is wires.opened[2]
    wires.pool.release(another)
    assert await wires.pool.acquire() is another


async def test_renewing_an_unused_pool_does_nothing() -> None:
    wires = Wires(2)
    wires.pool.renew()

    assert await wires.pool.acquire() is wires.opened[0]


async def test_a_waiting_task_replaces_a_renewed_connection() -> None:
    wires = Wires(1)
    doubtful = await wires.pool.acquire()
    waiting = await start_checkout(wires.pool)
    wires.pool.renew()
    wires.pool.release(doubtful)

    assert await asyncio.wait_for(waiting, 3) is wires.opened[1]


def test_the_maximum_idle_time_is_below_load_balancer_timeouts() -> None:
    assert MAX_IDLE < 240  # seconds, for Azure; others keep connections for longer


async def test_idle_connections_are_closed_concurrently() -> None:
    """An unresponsive server would delay each of them."""
    wires = Wires(20)
    for wire in [await wires.pool.acquire() for _ in range(20)]:
        wires.pool.release(wire)
    together = asyncio.Barrier(20)

    async def hang_up(wire: Wire) -> None:
        await together.wait()
        raise ConnectionResetError

    wires.pool._close_connection = hang_up  # type: ignore[method-assign]  # a server of another kind
    assert await asyncio.wait_for(wires.pool.close(1), 3) == 0
