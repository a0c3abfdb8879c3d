"""The pulse of a loop: rounds, pauses, and rounds that wait for the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from outboxio.loops import loop as pulse
from outboxio.loops.loop import (
    NOTHING,
    Loop,
    PollSchedule,
    RoundResult,
    age_of,
    has_died,
    is_late,
    is_long,
    waits_for_database,
)

STORAGE = ModuleType("outboxio.storage.of_a_test")
exec("async def answer(event):\n    await event.wait()", vars(STORAGE))


@asynccontextmanager
async def driven(round: Any, delay: float = 60.0) -> AsyncIterator[Loop]:
    loop = Loop("work", round, PollSchedule(lambda: delay))
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(0)
    try:
        yield loop
    finally:
        task.cancel()
        await asyncio.wait({task})


async def nothing() -> RoundResult:
    return NOTHING


async def test_a_loop_before_its_first_round_is_neither_late_nor_dead() -> None:
    loop = Loop("work", nothing, PollSchedule(lambda: 1.0))

    assert age_of(loop, 5.0) is None
    assert [is_late(loop, 5.0), is_long(loop), has_died(loop), waits_for_database(loop)] == [False] * 4


async def test_a_loop_is_late_after_three_pauses_and_10_s() -> None:
    async with driven(nothing, 60.0) as slow, driven(nothing, 1.0) as quick:
        assert slow.pause is not None
        assert not is_late(slow, slow.ended + 3 * slow.pause - 0.1)
        assert is_late(slow, slow.ended + 3 * slow.pause + 0.1)
        assert not is_late(quick, quick.ended + 9.9)
        assert is_late(quick, quick.ended + 10.1)
        assert age_of(quick, quick.ended + 2.5) == pytest.approx(2.5)


async def test_a_failed_round_is_a_round() -> None:
    async def fails() -> RoundResult:
        raise ValueError("no")

    async with driven(fails) as loop:
        assert age_of(loop, loop.ended) == 0.0
        assert loop.good_at == float("-inf")


async def test_a_long_round_waits_for_the_database_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "LONGEST_ROUND", 0.0)
    forever = asyncio.Event()

    async def queries() -> RoundResult:
        async with asyncio.timeout(60):
            await STORAGE.answer(forever)
        return NOTHING

    async def hangs() -> RoundResult:
        await forever.wait()
        return NOTHING

    async with driven(queries) as querying, driven(hangs) as hanging, driven(nothing) as idle:
        assert (is_long(querying), waits_for_database(querying)) == (True, True)
        assert (is_long(hanging), waits_for_database(hanging)) == (True, False)
        assert (is_long(idle), waits_for_database(idle)) == (False, False)


async def test_frames_hidden_by_an_async_context_manager_count_as_the_database() -> None:
    @asynccontextmanager
    async def session() -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    async def queries() -> RoundResult:
        async with session():
            return NOTHING

    async with driven(queries) as loop:
        assert waits_for_database(loop)


async def test_a_cancelled_loop_has_died_and_a_stopped_loop_has_not() -> None:
    loops = [Loop("work", nothing, PollSchedule(lambda: 60.0)) for _ in range(2)]
    tasks = [asyncio.create_task(loop.run()) for loop in loops]
    await asyncio.sleep(0)

    tasks[0].cancel()
    loops[1].stop()
    await asyncio.wait(tasks)

    assert [has_died(loop) for loop in loops] == [True, False]
