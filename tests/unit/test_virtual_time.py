"""The mark ``virtual_time``: the clocks of the event loop and the engine, and their behavior without any event."""

from __future__ import annotations

import asyncio
import time

import pytest

from outboxio.support import machine
from tests.kit import virtual_time
from tests.kit.app import eventually, hang
from tests.kit.virtual_time import VirtualTimeLoop


@pytest.mark.virtual_time
async def test_a_long_sleep_advances_only_the_virtual_clocks() -> None:
    clocks = (
        asyncio.get_running_loop().time,
        machine.monotonic,
        machine.perf_counter,
        lambda: machine.steady_ns() / 1e9,
    )
    before, began = [clock() for clock in clocks], time.process_time()
    await asyncio.sleep(3600)
    assert all(3600 <= clock() - then < 3601 for clock, then in zip(clocks, before, strict=True))
    assert time.process_time() - began < 60


@pytest.mark.virtual_time
async def test_timers_fire_in_their_order() -> None:
    fired = list[float]()
    async with asyncio.TaskGroup() as group:
        for seconds in (86_400.0 * 3, 0.001, 60.0):
            group.create_task(asyncio.sleep(seconds)).add_done_callback(lambda _, s=seconds: fired.append(s))
    assert fired == [0.001, 60.0, 86_400.0 * 3]


@pytest.mark.virtual_time
async def test_a_condition_that_never_holds_fails_after_its_virtual_time() -> None:
    with pytest.raises(AssertionError, match="never happened"):
        await eventually(lambda: False)


@pytest.mark.virtual_time
async def test_a_timeout_ends_a_wait_without_an_event() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await hang()


def test_a_wait_that_nothing_can_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "STUCK_AFTER", 0.01)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.raises(RuntimeError, match="never happens"):
        runner.run(hang())


def test_the_clocks_of_the_engine_are_real_again_after_the_test() -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert machine.monotonic == runner.get_loop().time
    assert machine.monotonic is machine.REAL.monotonic


async def test_without_the_mark_the_clock_is_real() -> None:
    assert not isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
    assert machine.monotonic is machine.REAL.monotonic
