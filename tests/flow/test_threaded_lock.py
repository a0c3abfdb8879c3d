"""A cluster lock whose session is in a thread. The inner lock is a stub; see the flow tests for real locks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Any, cast

import pytest

from outboxio.loops import blocked_loop
from outboxio.model.lock_name import LockName
from outboxio.storage.connections.driver import Proof
from outboxio.storage.connections.threaded_lock import ThreadedLock
from outboxio.storage.protocols import LockGrant
from tests.kit.app import eventually, hang

NOON = datetime(2026, 1, 1, 12)
NAME = LockName("app", "dispatch", "mail")
HEARTBEAT = 0.1
LONG = 60.0
"""A heartbeat during which the thread sends none by itself."""


class Inner:
    """A lock that is always free, and the threads that used it."""

    proof = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.failure: Exception | None = None
        self.waits: asyncio.Event | None = None
        self.lose: Callable[[], None] = lambda: None
        self.notify: Callable[[str], None] = lambda payload: None

    async def _called(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread().name)
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        await self._called("acquire")
        if self.waits is not None:
            await hang()
        return dict.fromkeys(names, LockGrant(1, 0))

    async def try_probe(self, name: LockName) -> bool:
        await self._called("try_probe")
        return True

    async def heartbeat(self) -> Proof:
        sent_at = time.monotonic()
        await self._called("heartbeat")
        return Proof(sent_at, NOON, NOON, NOON)

    async def release(self, names: Sequence[LockName]) -> None:
        await self._called("release")

    async def listen(self, on_wakeup: Callable[[str], None]) -> None:
        await self._called("listen")
        self.notify = on_wakeup

    def when_lost(self, callback: Callable[[], None]) -> None:
        self.lose = callback

    async def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def inner() -> Inner:
    return Inner()


@pytest.fixture
async def lock(inner: Inner, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ThreadedLock]:
    monkeypatch.setattr(blocked_loop, "TICK", 0.02)
    lock = ThreadedLock(inner, cast(Any, inner), HEARTBEAT, longest_block=4 * HEARTBEAT)
    yield lock
    await lock.close()
    assert threads() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "outboxio"]


async def begin(lock: ThreadedLock, on_wakeup: Callable[[str], None] = lambda payload: None) -> Proof:
    await lock.listen(on_wakeup)
    return await lock.heartbeat()


async def test_everything_runs_in_the_thread(lock: ThreadedLock, inner: Inner) -> None:
    lock._heartbeat = LONG
    await begin(lock)
    assert await lock.acquire([NAME]) == {NAME: LockGrant(1, 0)}
    assert await lock.try_probe(NAME)
    await lock.release([NAME])
    assert inner.calls == ["listen", "heartbeat", "acquire", "try_probe", "release"]
    assert inner.threads == {"outboxio"}


@pytest.mark.real_time("the event loop is truly blocked")
async def test_the_thread_sends_heartbeats_while_the_loop_is_blocked(lock: ThreadedLock) -> None:
    await begin(lock)
    lock._longest_block = 60.0  # a machine may stop the process
    blocked_at = time.monotonic()
    while lock.proof is None or lock.proof.sent_at <= blocked_at:
        time.sleep(0.01)  # noqa: ASYNC251  # the block is the point


@pytest.mark.real_time("the event loop is truly blocked")
async def test_heartbeats_stop_when_the_loop_is_blocked_too_long(
    lock: ThreadedLock, inner: Inner, caplog: pytest.LogCaptureFixture
) -> None:
    await begin(lock)

    def reported() -> list[str]:
        return [
            record.levelname
            for record in caplog.records
            if "longer than the timeout of every handler" in record.getMessage()
        ]

    while not reported():
        time.sleep(0.01)  # noqa: ASYNC251  # the block is the point
    beats = inner.calls.count("heartbeat")
    time.sleep(3 * HEARTBEAT)  # noqa: ASYNC251  # the block is the point
    assert inner.calls.count("heartbeat") == beats
    assert reported() == ["ERROR"]
    await eventually(lambda: inner.calls.count("heartbeat") > beats)  # the loop continues, and so does the thread


async def test_a_recent_proof_is_not_repeated(lock: ThreadedLock, inner: Inner) -> None:
    lock._heartbeat = LONG
    first = await begin(lock)
    assert await lock.heartbeat() is first
    assert inner.calls.count("heartbeat") == 1


async def test_wakeups_arrive_on_the_applications_loop(lock: ThreadedLock, inner: Inner) -> None:
    received: list[tuple[str, str]] = []
    await begin(lock, lambda payload: received.append((payload, threading.current_thread().name)))

    async def wake() -> None:
        inner.notify("events")

    await lock.in_thread(wake)
    await eventually(lambda: received)
    assert received == [("events", threading.current_thread().name)]


async def test_the_end_of_the_session_is_reported_at_once(lock: ThreadedLock, inner: Inner) -> None:
    lost: list[str] = []
    lock.when_lost(lambda: lost.append(threading.current_thread().name))
    await begin(lock)

    async def lose() -> None:
        inner.lose()

    await lock.in_thread(lose)
    assert lock.proof is None
    assert not lock.is_open
    await eventually(lambda: lost)
    assert lost == [threading.current_thread().name]


async def test_a_failed_heartbeat_is_reported_when_the_session_reopens(lock: ThreadedLock, inner: Inner) -> None:
    lost: list[bool] = []
    lock.when_lost(lambda: lost.append(True))
    lock._heartbeat = 2.0  # the failure of a session that was silent for longer than 3.6 s is ignored
    await begin(lock)
    inner.failure = OSError("no route to host")
    await eventually(lambda: lost)
    inner.failure = None
    with pytest.raises(OSError, match="no route"):
        await lock.listen(lambda payload: None)
    await begin(lock)
    assert lock.is_open


async def test_a_cancelled_acquisition_ends_the_session(lock: ThreadedLock, inner: Inner) -> None:
    """The acquisition may have taken a lock that no task knows of, and that the thread would keep."""
    await begin(lock)
    inner.waits = asyncio.Event()
    task = asyncio.create_task(lock.acquire([NAME]))
    await eventually(lambda: "acquire" in inner.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: inner.calls[-1] == "close")
    await eventually(lambda: not threads())  # the cancelled task has not waited for the end
    assert not lock.is_open


@pytest.mark.real_time("a thread has to begin to wait")
async def test_a_cancelled_close_ends_the_session_as_well(lock: ThreadedLock, inner: Inner) -> None:
    await begin(lock)
    inner.waits = asyncio.Event()
    acquiring = asyncio.create_task(lock.acquire([NAME]))
    await eventually(lambda: "acquire" in inner.calls)
    closing = asyncio.create_task(lock.close())  # waits until the session is free
    await asyncio.sleep(0.02)
    closing.cancel()
    acquiring.cancel()
    results = await asyncio.gather(acquiring, closing, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    await eventually(lambda: inner.calls[-1] == "close")
    await eventually(lambda: not threads())  # the cancelled task has not waited for the end


async def test_the_lock_may_be_reopened_after_close(lock: ThreadedLock, inner: Inner) -> None:
    lock._heartbeat = LONG
    for _ in range(2):
        await begin(lock)
        await lock.close()
        assert not lock.is_open
    assert inner.calls == ["listen", "heartbeat", "close"] * 2
