"""The background thread with its own event loop: its work and its shutdown."""

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
    background._thread.join(60)
    assert not background.is_alive


async def test_all_callers_run_in_the_same_background_thread(thread: Background) -> None:
    another = Background.enlist()

    async def where() -> str:
        return threading.current_thread().name

    assert await thread.run(where) == await another.run(where) == "outboxio"
    assert another is thread
    another.leave()
    assert thread.is_alive, "another caller still uses it"


async def test_errors_are_raised_in_the_caller(thread: Background) -> None:
    async def fails() -> None:
        raise ValueError("there")

    with pytest.raises(ValueError, match="there"):
        await thread.run(fails)


async def test_a_cancellation_is_forwarded_and_awaited(thread: Background) -> None:
    started, cancelled, may_end, ended = (threading.Event() for _ in range(4))

    async def waits() -> None:
        started.set()
        try:
            await hang()
        finally:
            cancelled.set()
            await asyncio.to_thread(may_end.wait, 5)
            ended.set()

    task = asyncio.create_task(thread.run(waits))
    await asyncio.to_thread(started.wait, 5)
    task.cancel()
    await eventually(cancelled.is_set)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set(), "it kept running after the caller was notified of the cancellation"


async def test_waiters_are_notified_when_the_thread_ends() -> None:
    background, started = Background.enlist(), threading.Event()

    async def never_ends() -> None:
        started.set()
        await hang()

    task = asyncio.create_task(background.run(never_ends))
    await eventually(started.is_set)
    background.leave()
    with pytest.raises(ConnectionResetError):
        await task
    with pytest.raises(ConnectionResetError):
        await background.run(never_ends)


async def test_a_new_thread_starts_after_the_old_one_ended() -> None:
    first = Background.enlist()
    first.leave()
    second = Background.enlist()
    assert second is not first
    assert second.is_alive
    second.leave()
    second._thread.join(60)
    assert [thread for thread in threading.enumerate() if thread.name == "outboxio"] == []


def test_a_forked_child_starts_its_own_thread(thread: Background) -> None:
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
