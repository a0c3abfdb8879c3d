"""Log records about a blocked event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from outboxio.loops import blocked_loop
from outboxio.loops.blocked_loop import LoopWatch, Running, blocked_since, watched
from tests.kit.app import eventually, hang

TICK = 0.02
THRESHOLD = 0.2
BLOCKS = 0.4


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_loop, "TICK", TICK)
    monkeypatch.setattr(blocked_loop, "THRESHOLD", THRESHOLD)
    monkeypatch.setattr(blocked_loop, "REPEATED_AFTER", 0.0)  # a stop of the process suppresses no later record


class Handlers:
    """Handlers that run as tasks, and the reported blocks."""

    def __init__(self) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.reported: list[float] = []

    def start(self, name: str, block: Callable[[], None] | None = None) -> asyncio.Task[None]:
        async def handle() -> None:
            if block is not None:
                block()
            await hang()

        self.tasks[name] = asyncio.create_task(handle())
        return self.tasks[name]

    def running(self) -> Running:
        return [*self.tasks.items()]

    def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()


BLAMES_THE_LOOP = "event loop blocked for "


def blamed(caplog: pytest.LogCaptureFixture) -> list[float]:
    """The seconds of the records that blame the loop, without shorter blocks, which a busy machine may cause."""
    texts = [record.getMessage() for record in records_with(caplog, BLAMES_THE_LOOP)]
    return [seconds for text in texts if (seconds := float(text.split()[3])) >= BLOCKS]


def records_with(caplog: pytest.LogCaptureFixture, words: str) -> list[logging.LogRecord]:
    """The records with this text. A machine that stops the process or a thread for 0.2 s adds one at any time."""
    return [record for record in caplog.records if words in record.getMessage()]


def crunch() -> None:
    time.sleep(BLOCKS)


async def answered() -> None:
    """Let the loop continue until it has answered a check started now."""
    watch, since = blocked_loop._watches[asyncio.get_running_loop()], time.monotonic()
    await eventually(lambda: watch._answered_at > since and watch._ping.is_answered)


@pytest.mark.real_time("the event loop is truly blocked")
async def test_the_log_names_the_blocking_handler_and_its_line(caplog: pytest.LogCaptureFixture) -> None:
    handlers, began = Handlers(), time.monotonic()
    with watched(handlers.running, handlers.reported.append):
        handlers.start("waits")
        await answered()
        handlers.start("blocks", crunch)
        await answered()
    handlers.end()
    record = records_with(caplog, f"; running: blocks ({__file__}:")[0]
    assert (record.name, record.levelno) == ("outboxio.loops.blocked_loop", logging.WARNING)
    assert "in handle)" in record.getMessage(), "the handler's own frame, not that of what it called"
    assert handlers.reported
    assert min(handlers.reported) >= THRESHOLD
    assert sum(handlers.reported) <= time.monotonic() - began


@pytest.mark.real_time("the event loop is truly blocked")
async def test_a_block_outside_a_handler_is_logged_with_its_position(caplog: pytest.LogCaptureFixture) -> None:
    with watched(lambda: [], lambda seconds: None):
        await answered()
        crunch()
        await answered()
    assert records_with(caplog, f"; running: no handler ({__file__}:")


@pytest.mark.real_time("the event loop is truly blocked")
async def test_all_running_handlers_are_named_if_the_blocker_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    """For example, if a helper task of a handler blocks."""
    handlers = Handlers()
    with watched(handlers.running, handlers.reported.append):
        handlers.start("first")
        handlers.start("second")
        await answered()
        crunch()
        await answered()
    handlers.end()
    assert records_with(caplog, "; running: first, second (")


@pytest.mark.real_time("shows that a loop that waits is not reported")
async def test_a_waiting_loop_is_not_reported_as_blocked(caplog: pytest.LogCaptureFixture) -> None:
    handlers = Handlers()
    with watched(handlers.running, handlers.reported.append):
        handlers.start("waits")
        await asyncio.sleep(2 * BLOCKS)
        blocked_for = blocked_since(float("-inf"))
    handlers.end()
    assert blamed(caplog) == []
    if not caplog.records:  # a machine that stops the process adds a record
        assert (blocked_for, handlers.reported) == (0, [])


async def test_the_same_handlers_are_logged_once_per_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_loop, "REPEATED_AFTER", 60.0)
    watch = LoopWatch.enlist()
    for _ in range(3):
        watch._log(2.0, {"blocks": "here"}, is_frozen=False)
    watch._log(2.0, {"another": "there"}, is_frozen=False)
    monkeypatch.setattr(blocked_loop, "REPEATED_AFTER", 0.0)
    watch._log(2.0, {"blocks": "here"}, is_frozen=False)
    watch.leave()
    first, another, second = [record.getMessage() for record in caplog.records]
    assert "blocked for 2.0 s; running: blocks (here);" in first
    assert "running: another (there);" in another
    assert "blocked for 2.0 s, and 2 more times since the last such record; running: blocks (here);" in second


@pytest.mark.real_time("the event loop is truly blocked")
async def test_a_stopped_process_is_not_reported_as_a_blocked_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The process was stopped, or a call held the interpreter lock: the thread did not run either."""
    watch = LoopWatch.enlist()
    await answered()
    watch.thread.soon(time.sleep, BLOCKS)
    time.sleep(BLOCKS)  # noqa: ASYNC251  # the block is the point
    await answered()
    watch.leave()
    assert blamed(caplog) == []
    assert records_with(caplog, "this process was suspended for ")


@pytest.mark.real_time("the event loop is truly blocked")
def test_an_unused_loop_is_not_reported_as_blocked(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()

    async def enter() -> LoopWatch:
        watch = LoopWatch.enlist()
        await answered()
        return watch

    watch = loop.run_until_complete(enter())
    time.sleep(BLOCKS)
    assert not watch.is_responsive(3600)
    loop.run_until_complete(answered())
    watch.leave()
    loop.close()
    assert blamed(caplog) == []


def test_a_closed_loop_is_cleaned_up_in_the_thread() -> None:
    loop, said = asyncio.new_event_loop(), threading.Event()

    async def farewell() -> None:
        said.set()

    async def enter() -> LoopWatch:
        watch = LoopWatch.enlist()
        watch.on_loop_closed(farewell)
        return watch

    watch = loop.run_until_complete(enter())
    loop.close()
    assert said.wait(5)
    watch.thread._thread.join(5)
    assert watch.has_ended
    assert not watch.thread.is_alive


@pytest.mark.real_time("the event loop is truly blocked")
async def test_blocks_that_ended_since_a_time_are_reported() -> None:
    with watched(lambda: [], lambda seconds: None):
        await answered()
        before = time.monotonic()
        crunch()
        assert blocked_since(before) >= BLOCKS / 2, "nothing else has run yet"
        await answered()
        assert blocked_since(before) >= BLOCKS / 2
        assert blocked_since(time.monotonic()) == 0


@pytest.mark.real_time("a thread checks the event loop")
async def test_several_watchers_share_one_loop_until_the_last_leaves() -> None:
    first, second = LoopWatch.enlist(), LoopWatch.enlist()
    assert first is second
    first.leave()
    await answered()
    assert second.thread.is_alive
    assert second.is_responsive(3600)
    second.leave()
    second.thread._thread.join(60)
    assert not second.thread.is_alive
