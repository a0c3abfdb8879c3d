"""The log about an event loop that stood still."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from outboxio.loops import standstill
from outboxio.loops.standstill import LoopWatch, Running, stood_still_since, watched
from tests.kit.app import eventually, hang

TICK = 0.02
THRESHOLD = 0.2
BLOCKS = 0.4


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "TICK", TICK)
    monkeypatch.setattr(standstill, "THRESHOLD", THRESHOLD)
    monkeypatch.setattr(standstill, "REPEATED_AFTER", 0.0)  # a stop of the process keeps no later line back


class Handlers:
    """Handlers that run as tasks, and the reported standstills."""

    def __init__(self) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.heard: list[float] = []

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


BLAMES_THE_LOOP = "the event loop stood still for "


def records_with(caplog: pytest.LogCaptureFixture, words: str) -> list[logging.LogRecord]:
    """The records with these words. A machine that stops the process for 0.2 s adds a record at any time."""
    return [record for record in caplog.records if words in record.getMessage()]


def crunch() -> None:
    time.sleep(BLOCKS)


async def answered() -> None:
    """Let the loop go on until it has answered a question that was asked just now."""
    watch, since = standstill._watches[asyncio.get_running_loop()], time.monotonic()
    await eventually(lambda: watch._answered_at > since and watch._question.is_answered)


@pytest.mark.real_time("the event loop is truly blocked")
async def test_a_standstill_names_the_handler_that_was_on_and_its_line(caplog: pytest.LogCaptureFixture) -> None:
    handlers = Handlers()
    with watched(handlers.running, handlers.heard.append):
        handlers.start("waits")
        await answered()
        handlers.start("blocks", crunch)
        await answered()
    handlers.end()
    [record] = records_with(caplog, f"; running: blocks ({__file__}:")
    assert (record.name, record.levelno) == ("outboxio.loops.standstill", logging.WARNING)
    assert "in handle)" in record.getMessage(), "the handler's own frame, not that of what it called"
    assert any(BLOCKS - 2 * TICK < seconds < 10 * BLOCKS for seconds in handlers.heard)


@pytest.mark.real_time("the event loop is truly blocked")
async def test_what_blocks_outside_of_a_handler_is_shown_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with watched(lambda: [], lambda seconds: None):
        await answered()
        crunch()
        await answered()
    assert len(records_with(caplog, f"; running: no handler ({__file__}:")) == 1


@pytest.mark.real_time("the event loop is truly blocked")
async def test_where_nobody_can_tell_all_that_run_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A handler's own helper task blocks, for example."""
    handlers = Handlers()
    with watched(handlers.running, handlers.heard.append):
        handlers.start("first")
        handlers.start("second")
        await answered()
        crunch()
        await answered()
    handlers.end()
    assert len(records_with(caplog, "; running: first, second (")) == 1


@pytest.mark.real_time("shows that a loop that waits is not reported")
async def test_a_loop_that_waits_does_not_stand_still(caplog: pytest.LogCaptureFixture) -> None:
    handlers = Handlers()
    with watched(handlers.running, handlers.heard.append):
        handlers.start("waits")
        await asyncio.sleep(2 * THRESHOLD)
        stood_still = stood_still_since(float("-inf"))
    handlers.end()
    assert records_with(caplog, BLAMES_THE_LOOP) == []
    if not caplog.records:  # the machine has not stopped the process meanwhile
        assert (stood_still, handlers.heard) == (0, [])


async def test_of_the_same_handlers_there_is_one_line_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standstill, "REPEATED_AFTER", 60.0)
    watch = LoopWatch.enlist()
    for _ in range(3):
        watch._tell(2.0, {"blocks": "here"}, is_frozen=False)
    watch._tell(2.0, {"another": "there"}, is_frozen=False)
    monkeypatch.setattr(standstill, "REPEATED_AFTER", 0.0)
    watch._tell(2.0, {"blocks": "here"}, is_frozen=False)
    watch.leave()
    first, another, second = [record.getMessage() for record in caplog.records]
    assert "stood still for 2.0 s; running: blocks (here);" in first
    assert "running: another (there);" in another
    assert "stood still for 2.0 s, and 2 more times since the last such line; running: blocks (here);" in second


@pytest.mark.real_time("the event loop is truly blocked")
async def test_a_process_that_stood_still_as_a_whole_is_not_blamed_on_its_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The process was stopped, or a call kept the interpreter's lock: the thread did not run either."""
    watch = LoopWatch.enlist()
    await answered()
    watch.thread.soon(time.sleep, BLOCKS)
    time.sleep(BLOCKS)  # noqa: ASYNC251  # the block is the point
    await answered()
    watch.leave()
    assert records_with(caplog, BLAMES_THE_LOOP) == []
    assert records_with(caplog, "this process stood still for ")


@pytest.mark.real_time("the event loop is truly blocked")
def test_a_loop_that_nobody_runs_does_not_stand_still(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()

    async def enter() -> LoopWatch:
        watch = LoopWatch.enlist()
        await answered()
        return watch

    watch = loop.run_until_complete(enter())
    time.sleep(BLOCKS)
    assert not watch.goes_on(3600)
    loop.run_until_complete(answered())
    watch.leave()
    loop.close()
    assert records_with(caplog, BLAMES_THE_LOOP) == []


def test_a_loop_that_was_closed_is_said_goodbye_to_in_the_thread() -> None:
    loop, said = asyncio.new_event_loop(), threading.Event()

    async def farewell() -> None:
        said.set()

    async def enter() -> LoopWatch:
        watch = LoopWatch.enlist()
        watch.at_farewell(farewell)
        return watch

    watch = loop.run_until_complete(enter())
    loop.close()
    assert said.wait(5)
    watch.thread._thread.join(5)
    assert watch.has_ended
    assert not watch.thread.is_alive


@pytest.mark.real_time("the event loop is truly blocked")
async def test_whoever_asks_hears_of_standstills_that_have_ended_since() -> None:
    with watched(lambda: [], lambda seconds: None):
        await answered()
        before = time.monotonic()
        crunch()
        assert stood_still_since(before) >= BLOCKS / 2, "nothing else has run yet"
        await answered()
        assert stood_still_since(before) >= BLOCKS / 2
        assert stood_still_since(time.monotonic()) == 0


@pytest.mark.real_time("a thread asks the event loop")
async def test_several_watch_one_loop_and_the_last_one_ends_it() -> None:
    first, second = LoopWatch.enlist(), LoopWatch.enlist()
    assert first is second
    first.leave()
    await answered()
    assert second.thread.is_alive
    assert second.goes_on(3600)
    second.leave()
    assert not second.thread.is_alive
