from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outboxio.storage.pool import LONGEST_IDLE, LONGEST_LIFE, Pool


class Wire:
    """Stands for a connection."""

    def __init__(self) -> None:
        self.is_usable = True
        self.end = ""


class Wires:
    """A pool, and all connections that it has opened."""

    def __init__(self, largest: int = 2) -> None:
        self.opened: list[Wire] = []
        self.refuses = False
        self.pool = Pool(
            connect=self._connect, hang_up=self._hang_up, drop=self._drop, is_usable=lambda wire: wire.is_usable,
            largest=largest,
        )  # fmt: skip

    async def _connect(self) -> Wire:
        await asyncio.sleep(0)
        if self.refuses:
            raise ConnectionRefusedError
        self.opened.append(Wire())
        return self.opened[-1]

    async def _hang_up(self, wire: Wire) -> None:
        wire.end = "goodbye"

    def _drop(self, wire: Wire) -> None:
        wire.end = "dropped"


async def in_line(pool: Pool) -> asyncio.Task[Any]:
    """Somebody who waits for a connection."""
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return waiting


async def test_the_connection_used_last_is_used_first() -> None:
    wires = Wires()
    first, second = await wires.pool.acquire(), await wires.pool.acquire()
    wires.pool.release(second)
    wires.pool.release(first)

    assert await wires.pool.acquire() is first
    assert wires.opened == [first, second]


async def test_whoever_waits_is_served_before_whoever_comes_later() -> None:
    wires = Wires(largest=1)
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
    wires = Wires(largest=1)
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
    wires = Wires(largest=1)
    lost = await wires.pool.acquire()
    waiting = await in_line(wires.pool)
    lost.is_usable = False
    wires.pool.release(lost)

    assert await asyncio.wait_for(waiting, 3) is wires.opened[1]
    assert lost.end == "dropped"


async def test_whoever_cannot_open_one_lets_the_next_try() -> None:
    wires = Wires(largest=1)
    wires.refuses = True
    first, second = await in_line(wires.pool), await in_line(wires.pool)

    for refused in (first, second):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.wait_for(refused, 3)


@pytest.mark.parametrize(("seconds", "is_kept"), [(LONGEST_IDLE - 1, True), (LONGEST_IDLE + 1, False)])
async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_kept: bool
) -> None:
    wires = Wires()
    connection = await wires.pool.acquire()
    wires.pool.release(connection)
    _advance(monkeypatch, seconds)

    assert (await wires.pool.acquire() is connection) is is_kept
    assert connection.end == ("" if is_kept else "dropped")


@pytest.mark.parametrize(("seconds", "is_kept"), [(LONGEST_LIFE - 1, True), (LONGEST_LIFE + 1, False)])
async def test_a_connection_has_an_end_however_much_it_is_used(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_kept: bool
) -> None:
    wires = Wires()
    connection = await wires.pool.acquire()
    _advance(monkeypatch, seconds)
    wires.pool.release(connection)

    assert (await wires.pool.acquire() is connection) is is_kept


async def test_closing_waits_for_what_is_in_use_and_drops_what_does_not_come_back() -> None:
    wires = Wires(largest=3)
    idle, back, lost = [await wires.pool.acquire() for _ in range(3)]
    wires.pool.release(idle)
    closing = asyncio.create_task(wires.pool.close(0.2))
    await asyncio.sleep(0.02)
    wires.pool.release(back)

    assert await closing == 1
    assert [wire.end for wire in (idle, back, lost)] == ["goodbye", "dropped", "dropped"]


async def test_whoever_waits_when_it_is_closed_is_told() -> None:
    wires = Wires(largest=1)
    connection = await wires.pool.acquire()
    waiting = await in_line(wires.pool)
    closing = asyncio.create_task(wires.pool.close(1))

    with pytest.raises(ConnectionResetError, match="the pool is closed"):
        await waiting
    wires.pool.release(connection)
    assert await closing == 0


def test_another_event_loop_has_connections_of_its_own() -> None:
    wires = Wires(largest=1)
    first = asyncio.run(wires.pool.acquire())

    assert asyncio.run(wires.pool.acquire()) is not first
    assert asyncio.run(wires.pool.close(1)) == 0


def _advance(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + seconds)
