"""A single timer that many tasks share."""

from __future__ import annotations

import asyncio

import pytest

from outboxio.support.aio import Alarm

pytestmark = pytest.mark.virtual_time


class Rings:
    """Records the times of its calls."""

    def __init__(self) -> None:
        self.number = 0
        self.has_rung = asyncio.Event()
        self.alarm = Alarm(self.ring)
        self.now = asyncio.get_running_loop().time()

    def ring(self) -> None:
        self.number += 1
        self.has_rung.set()


async def test_the_alarm_fires_once_at_the_earliest_time() -> None:
    rings = Rings()
    for delay in (3600.0, 0.01, 7200.0, 0.02):
        rings.alarm.set(rings.now + delay)
    async with asyncio.timeout(10):
        await rings.has_rung.wait()
    await asyncio.sleep(0.05)
    assert rings.number == 1


async def test_the_alarm_can_be_set_again_after_firing_or_cancelling() -> None:
    rings = Rings()
    rings.alarm.set(rings.now - 1)
    await asyncio.sleep(0.01)
    assert rings.number == 1
    rings.alarm.set(rings.now)
    rings.alarm.cancel()
    rings.alarm.cancel()
    await asyncio.sleep(0.01)
    assert rings.number == 1
    rings.alarm.set(rings.now)
    await asyncio.sleep(0.01)
    assert rings.number == 2
