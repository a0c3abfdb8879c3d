"""How often a process wakes the other processes."""

from __future__ import annotations

import asyncio

import pytest

from outboxio.runtime.wakeups import PAUSE, WakeupSender

pytestmark = pytest.mark.virtual_time


class Sent:
    def __init__(self, failures: int = 0) -> None:
        self.number = 0
        self.failures = failures

    async def send(self) -> None:
        self.number += 1
        if self.number <= self.failures:
            raise ConnectionResetError("the connection broke")


async def test_the_first_wake_up_of_a_burst_is_sent_at_once() -> None:
    sent = Sent()
    sender = WakeupSender(sent.send)
    for _ in range(10):
        sender.send_soon()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sent.number == 1
    for _ in range(10):
        sender.send_soon()
    await asyncio.sleep(3 * PAUSE)
    assert sent.number == 2


async def test_close_sends_the_due_wake_up_without_the_pause() -> None:
    sent = Sent()
    sender = WakeupSender(sent.send)
    sender.send_soon()
    await asyncio.sleep(PAUSE / 5)
    sender.send_soon()
    await sender.close()
    assert sent.number == 2
    assert len(asyncio.all_tasks()) == 1


async def test_a_failed_wake_up_stops_nothing() -> None:
    sent = Sent(failures=1)
    sender = WakeupSender(sent.send)
    sender.send_soon()
    await asyncio.sleep(PAUSE / 5)
    assert sender.failures == 1
    sender.send_soon()
    await sender.close()
    assert (sent.number, sender.failures) == (2, 0)
