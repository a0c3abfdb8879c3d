"""The thread with its own event loop: the work in it, and its end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from outboxio.loops.owner import Background
from tests.kit.app import eventually, hang


@pytest.fixture
def thread() -> Iterator[Background]:
    background = Background.enlist()
    yield background
    background.leave()
    assert not background.is_alive


async def test_what_is_done_there_runs_in_one_thread_for_everybody(thread: Background) -> None:
    another = Background.enlist()

    async def where() -> str:
        return threading.current_thread().name

    assert await thread.run(where) == await another.run(where) == "outboxio"
    assert another is thread
    another.leave()
    assert thread.is_alive, "somebody needs it still"


async def test_errors_come_back(thread: Background) -> None:
    async def fails() -> None:
        raise ValueError("there")

    with pytest.raises(ValueError, match="there"):
        await thread.run(fails)


async def test_a_cancellation_is_handed_on_and_its_end_is_waited_for(thread: Background) -> None:
    begun, cancelled, may_end, ended = (threading.Event() for _ in range(4))

    async def waits() -> None:
        begun.set()
        try:
            await hang()
        finally:
            cancelled.set()
            await asyncio.to_thread(may_end.wait, 5)
            ended.set()

    task = asyncio.create_task(thread.run(waits))
    await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    await eventually(cancelled.is_set)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set(), "it went on after the caller had been told that it was cancelled"


async def test_whoever_waits_hears_of_the_end_of_the_thread() -> None:
    background, begun = Background.enlist(), threading.Event()

    async def for_ever() -> None:
        begun.set()
        await hang()

    task = asyncio.create_task(background.run(for_ever))
    await eventually(begun.is_set)
    background.leave()
    with pytest.raises(ConnectionResetError):
        await task
    with pytest.raises(ConnectionResetError):
        await background.run(for_ever)


async def test_after_its_end_the_next_one_is_another() -> None:
    first = Background.enlist()
    first.leave()
    second = Background.enlist()
    assert second is not first
    assert second.is_alive
    second.leave()
    assert [thread for thread in threading.enumerate() if thread.name == "outboxio"] == []


def test_a_forked_child_has_no_such_thread_and_may_have_one_of_its_own(thread: Background) -> None:
    child = os.fork()
    if child == 0:
        try:
            is_alone = not thread.is_alive and not thread.soon(print)
            own = Background.enlist()
            is_alone = is_alone and own is not thread and own.is_alive
            own.leave()
            os._exit(0 if is_alone else 1)
        finally:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert thread.is_alive
