from __future__ import annotations

import asyncio

import pytest

from outboxio.storage.connections.pool import LONGEST_IDLE, LONGEST_LIFE
from tests.kit.pools import Wire, Wires, in_line

pytestmark = pytest.mark.virtual_time


async def test_the_connection_used_last_is_used_first() -> None:
    wires = Wires(2)
    first, second = await wires.pool.acquire(), await wires.pool.acquire()
    wires.pool.release(second)
    wires.pool.release(first)

    assert await wires.pool.acquire() is first
    assert wires.opened == [first, second]


async def test_whoever_waits_is_served_before_whoever_comes_later() -> None:
    wires = Wires(1)
    connection = await wires.pool.acquire()
    first, second = await in_line(wires.pool), await in_line(wires.pool)
    wires.pool.release(connection)
    latecomer = await in_line(wires.pool)  # asks before the first in line has run

    assert await first is connection
    assert not second.done()
    wires.pool.release(connection)
    assert await second is connection
    wires.pool.release(connection)
    assert await latecomer is connection


@pytest.mark.parametrize("is_served", [True, False])
async def test_a_waiter_that_is_cancelled_passes_on_what_it_was_given(is_served: bool) -> None:
    wires = Wires(1)
    connection = await wires.pool.acquire()
    cancelled, next_one = await in_line(wires.pool), await in_line(wires.pool)
    if is_served:
        wires.pool.release(connection)
        cancelled.cancel()
    else:
        cancelled.cancel()
        wires.pool.release(connection)

    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await asyncio.wait_for(next_one, 3) is connection


async def test_in_place_of_a_lost_connection_whoever_waits_opens_another() -> None:
    wires = Wires(1)
    lost = await wires.pool.acquire()
    waiting = await in_line(wires.pool)
    lost.is_usable = False
    wires.pool.release(lost)

    assert await asyncio.wait_for(waiting, 3) is wires.opened[1]
    assert lost.end == "dropped"


async def test_whoever_cannot_open_one_lets_the_next_try() -> None:
    wires = Wires(1)
    wires.refuses = True
    first, second = await in_line(wires.pool), await in_line(wires.pool)

    for refused in (first, second):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.wait_for(refused, 3)


@pytest.mark.parametrize(("seconds", "is_kept"), [(LONGEST_IDLE - 1, True), (LONGEST_IDLE + 1, False)])
async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_kept: bool
) -> None:
    wires = Wires(2)
    connection = await wires.pool.acquire()
    wires.pool.release(connection)
    _advance(monkeypatch, seconds)

    assert (await wires.pool.acquire() is connection) is is_kept
    assert connection.end == ("" if is_kept else "dropped")


@pytest.mark.parametrize(("seconds", "is_kept"), [(LONGEST_LIFE - 1, True), (LONGEST_LIFE + 1, False)])
async def test_a_connection_has_an_end_however_much_it_is_used(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_kept: bool
) -> None:
    wires = Wires(2)
    connection = await wires.pool.acquire()
    _advance(monkeypatch, seconds)
    wires.pool.release(connection)

    assert (await wires.pool.acquire() is connection) is is_kept


async def test_closing_waits_for_what_is_in_use_and_drops_what_does_not_come_back() -> None:
    wires = Wires(3)
    idle, back, lost = [await wires.pool.acquire() for _ in range(3)]
    wires.pool.release(idle)
    closing = asyncio.create_task(wires.pool.close(0.2))
    await asyncio.sleep(0.02)
    wires.pool.release(back)

    assert await closing == 1
    assert [wire.end for wire in (idle, back, lost)] == ["goodbye", "dropped", "dropped"]


async def test_whoever_waits_when_it_is_closed_is_told() -> None:
    wires = Wires(1)
    connection = await wires.pool.acquire()
    waiting = await in_line(wires.pool)
    closing = asyncio.create_task(wires.pool.close(1))

    with pytest.raises(ConnectionResetError, match="the pool is closed"):
        await waiting
    wires.pool.release(connection)
    assert await closing == 0


def test_another_event_loop_has_connections_of_its_own() -> None:
    wires = Wires(1)
    first = asyncio.run(wires.pool.acquire())

    assert asyncio.run(wires.pool.acquire()) is not first
    assert asyncio.run(wires.pool.close(1)) == 0


def _advance(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + seconds)


# --- connections in doubt ------------------------------------------------------------------------


async def test_no_connection_that_was_open_when_one_was_in_doubt_is_used_again() -> None:
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


async def test_a_pool_that_was_never_used_has_nothing_to_renew() -> None:
    wires = Wires(2)
    wires.pool.renew()

    assert await wires.pool.acquire() is wires.opened[0]


async def test_whoever_waits_opens_another_in_place_of_a_connection_in_doubt() -> None:
    wires = Wires(1)
    doubtful = await wires.pool.acquire()
    waiting = await in_line(wires.pool)
    wires.pool.renew()
    wires.pool.release(doubtful)

    assert await asyncio.wait_for(waiting, 3) is wires.opened[1]


def test_a_connection_is_idle_for_less_than_balancers_remember_it() -> None:
    assert LONGEST_IDLE < 240  # seconds: Azure's; others remember for longer


async def test_all_idle_connections_are_told_goodbye_at_once() -> None:
    """A server that has fallen silent answers none."""
    wires = Wires(20)
    for wire in [await wires.pool.acquire() for _ in range(20)]:
        wires.pool.release(wire)
    together = asyncio.Barrier(20)

    async def hang_up(wire: Wire) -> None:
        await together.wait()
        raise ConnectionResetError

    wires.pool._hang_up = hang_up  # type: ignore[method-assign]  # a server of another kind
    assert await asyncio.wait_for(wires.pool.close(1), 3) == 0
