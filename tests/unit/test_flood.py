"""A flood of equal log entries: one entry a second for each key, and the numbers add up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import pytest

from outboxio.loops import flood as flood_module
from outboxio.loops.flood import PERIOD, Flood, end_floods
from outboxio.support.log import log_of, shared_fields

pytestmark = pytest.mark.virtual_time

NAME = "outboxio.test_flood"


class Written(logging.Handler):
    """The entries, each with the moment of the event loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[float, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()
        self.records.append((asyncio.get_running_loop().time(), vars(record)))

    @property
    def told(self) -> list[tuple[str, str, int]]:
        """Level, first argument, and the number of entries that were not written."""
        return [(r["levelname"], str(r["args"][0]), r.get("outboxio_suppressed", 0)) for _, r in self.records]

    @property
    def total(self) -> int:
        """How many entries the written entries stand for."""
        return sum(1 + suppressed for _, _, suppressed in self.told)


@pytest.fixture
def written() -> Iterator[Written]:
    handler, logger = Written(), logging.getLogger(NAME)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
async def flood() -> AsyncIterator[Flood]:
    flood = Flood(log_of(NAME))
    yield flood
    flood.end()


def fail(flood: Flood, event: object, key: str = "key", level: int = logging.WARNING, **fields: Any) -> None:
    if flood.admits(key, level):
        flood.log(key, level, "event %s failed", event, event=event, **fields)


def timers() -> int:
    loop: Any = asyncio.get_running_loop()
    return sum(not timer.cancelled() for timer in loop._scheduled)


async def test_failures_that_are_a_second_apart_are_all_written_at_once_and_without_a_timer(
    flood: Flood, written: Written
) -> None:
    for number in range(3):
        fail(flood, number)
        assert len(written.records) == number + 1
        assert timers() == 0
        await asyncio.sleep(PERIOD)

    assert written.told == [("WARNING", str(number), 0) for number in range(3)]


async def test_ten_thousand_equal_failures_are_two_lines_and_the_right_sum(flood: Flood, written: Written) -> None:
    for number in range(10_000):
        fail(flood, number)
    assert timers() == 1
    await asyncio.sleep(PERIOD)

    assert written.told == [("WARNING", "0", 0), ("WARNING", "1", 9_998)]
    assert written.records[1][1]["args"][-1] == " (and 9998 more like it within 1.0 s)"
    assert written.total == 10_000
    await asyncio.sleep(PERIOD)
    assert timers() == 0


async def test_a_long_flood_is_one_line_a_second(flood: Flood, written: Written) -> None:
    for number in range(5_000):
        fail(flood, number)
        await asyncio.sleep(0.001)
    await asyncio.sleep(2 * PERIOD)

    moments = [moment for moment, _ in written.records]
    assert len(moments) in (6, 7)
    assert all(later - earlier >= PERIOD - 0.001 for earlier, later in pairwise(moments))
    assert written.total == 5_000
    assert timers() == 0


async def test_each_key_has_a_flood_of_its_own(flood: Flood, written: Written) -> None:
    for number in range(300):
        fail(flood, number, key=f"key {number % 3}")
    await asyncio.sleep(PERIOD)

    assert len(written.records) == 6
    assert written.total == 300


async def test_one_more_failure_within_the_second_is_written_as_it_is_only_later(
    flood: Flood, written: Written
) -> None:
    fail(flood, "first")
    fail(flood, "second", attempt=7)
    await asyncio.sleep(PERIOD)

    assert written.told == [("WARNING", "first", 0), ("WARNING", "second", 0)]
    assert written.records[1][1]["outboxio_attempt"] == 7
    assert "outboxio_suppressed" not in written.records[1][1]


async def test_the_most_severe_failure_of_a_second_is_the_one_that_is_written(flood: Flood, written: Written) -> None:
    for number, level in enumerate([logging.INFO, logging.INFO, logging.ERROR, logging.WARNING, logging.ERROR]):
        fail(flood, number, level=level)
    await asyncio.sleep(PERIOD)

    assert written.told == [("INFO", "0", 0), ("ERROR", "2", 3)]


async def test_failures_of_a_level_that_nobody_wants_neither_count_nor_hide_others(
    flood: Flood, written: Written
) -> None:
    logging.getLogger(NAME).setLevel(logging.WARNING)
    for number in range(10):
        fail(flood, number, level=logging.INFO)
    fail(flood, "seen")

    assert written.told == [("WARNING", "seen", 0)]
    assert timers() == 0


async def test_the_words_of_a_counted_failure_are_not_made(flood: Flood, written: Written) -> None:
    fail(flood, 0)
    fail(flood, 1)

    assert [flood.admits("key", logging.WARNING) for _ in range(100)] == [False] * 100


async def test_when_an_outbox_is_left_the_sums_are_written_at_once(flood: Flood, written: Written) -> None:
    for number in range(10):
        fail(flood, number)
    end_floods()

    assert written.told == [("WARNING", "0", 0), ("WARNING", "1", 8)]
    assert timers() == 0
    await asyncio.sleep(2 * PERIOD)
    assert len(written.records) == 2


async def test_the_sum_has_the_fields_of_its_entry_and_of_no_other_run(flood: Flood, written: Written) -> None:
    with shared_fields(shard="one"):
        fail(flood, 0)
        fail(flood, 1)
    with shared_fields(shard="two", loop="other"):
        fail(flood, 2)
        await asyncio.sleep(PERIOD)

    _, record = written.records[1]
    assert (record["outboxio_event"], record["outboxio_shard"]) == (1, "one")
    assert "outboxio_loop" not in record


async def test_many_keys_are_forgotten_when_their_second_is_over(flood: Flood, written: Written) -> None:
    for number in range(1_000):
        fail(flood, number, key=f"key {number}")
        await asyncio.sleep(PERIOD / 10)

    assert len(flood._periods) <= flood_module.MOST_REMEMBERED + 10
    assert written.total == 1_000


async def test_without_an_event_loop_and_for_the_loop_of_another_thread_every_entry_is_written(
    flood: Flood, caplog: pytest.LogCaptureFixture
) -> None:
    fail(flood, "here")

    def in_a_thread() -> None:
        for number in range(3):
            fail(flood, number)
        asyncio.run(in_a_loop())

    async def in_a_loop() -> None:
        for number in range(3):
            fail(flood, number)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()

    assert len([record for record in caplog.records if record.name == NAME]) == 1 + 3 + 3


def test_a_new_event_loop_writes_what_the_former_loop_has_counted(caplog: pytest.LogCaptureFixture) -> None:
    flood = Flood(log_of(NAME))

    async def some() -> None:
        for number in range(5):
            fail(flood, number)

    asyncio.run(some())
    assert len(caplog.records) == 1
    asyncio.run(some())
    flood.end()

    told = [vars(record).get("outboxio_suppressed", 0) for record in caplog.records]
    assert sum(1 + number for number in told) == 10
