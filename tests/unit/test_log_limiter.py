"""Rate-limited logging: one entry a second for each key, and the suppressed counts add up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import pytest

from outboxio.loops import log_limiter
from outboxio.loops.log_limiter import PERIOD, LogLimiter, flush_limiters
from outboxio.support.log import log_of, shared_fields

pytestmark = pytest.mark.virtual_time

NAME = "outboxio.test_log_limiter"


class Written(logging.Handler):
    """The entries, each with the time of the event loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[float, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()
        self.records.append((asyncio.get_running_loop().time(), vars(record)))

    @property
    def entries(self) -> list[tuple[str, str, int]]:
        """Level, first argument, and the number of entries that were not written."""
        return [(r["levelname"], str(r["args"][0]), r.get("outboxio_suppressed", 0)) for _, r in self.records]

    @property
    def total(self) -> int:
        """The number of entries, including the suppressed ones."""
        return sum(1 + suppressed for _, _, suppressed in self.entries)


@pytest.fixture
def written() -> Iterator[Written]:
    handler, logger = Written(), logging.getLogger(NAME)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
async def limiter() -> AsyncIterator[LogLimiter]:
    limiter = LogLimiter(log_of(NAME))
    yield limiter
    limiter.flush()


def fail(limiter: LogLimiter, event: object, key: str = "key", level: int = logging.WARNING, **fields: Any) -> None:
    if limiter.admits(key, level):
        limiter.log(key, level, "event %s failed", event, event=event, **fields)


def timers() -> int:
    loop: Any = asyncio.get_running_loop()
    return sum(not timer.cancelled() for timer in loop._scheduled)


async def test_failures_a_second_apart_are_all_logged_without_a_timer(limiter: LogLimiter, written: Written) -> None:
    for number in range(3):
        fail(limiter, number)
        assert len(written.records) == number + 1
        assert timers() == 0
        await asyncio.sleep(PERIOD)

    assert written.entries == [("WARNING", str(number), 0) for number in range(3)]


async def test_ten_thousand_equal_failures_are_two_lines_with_the_count(limiter: LogLimiter, written: Written) -> None:
    for number in range(10_000):
        fail(limiter, number)
    assert timers() == 1
    await asyncio.sleep(PERIOD)

    assert written.entries == [("WARNING", "0", 0), ("WARNING", "1", 9_998)]
    assert written.records[1][1]["args"][-1] == " (and 9998 more like it within 1.0 s)"
    assert written.total == 10_000
    await asyncio.sleep(PERIOD)
    assert timers() == 0


async def test_repeated_entries_are_logged_once_a_second(limiter: LogLimiter, written: Written) -> None:
    for number in range(5_000):
        fail(limiter, number)
        await asyncio.sleep(0.001)
    await asyncio.sleep(2 * PERIOD)

    times = [at for at, _ in written.records]
    assert len(times) in (6, 7)
    assert all(later - earlier >= PERIOD - 0.001 for earlier, later in pairwise(times))
    assert written.total == 5_000
    assert timers() == 0


async def test_each_key_is_limited_separately(limiter: LogLimiter, written: Written) -> None:
    for number in range(300):
        fail(limiter, number, key=f"key {number % 3}")
    await asyncio.sleep(PERIOD)

    assert len(written.records) == 6
    assert written.total == 300


async def test_one_more_failure_within_the_second_is_logged_later_unchanged(
    limiter: LogLimiter, written: Written
) -> None:
    fail(limiter, "first")
    fail(limiter, "second", attempt=7)
    await asyncio.sleep(PERIOD)

    assert written.entries == [("WARNING", "first", 0), ("WARNING", "second", 0)]
    assert written.records[1][1]["outboxio_attempt"] == 7
    assert "outboxio_suppressed" not in written.records[1][1]


async def test_the_most_severe_failure_of_a_second_is_logged(limiter: LogLimiter, written: Written) -> None:
    for number, level in enumerate([logging.INFO, logging.INFO, logging.ERROR, logging.WARNING, logging.ERROR]):
        fail(limiter, number, level=level)
    await asyncio.sleep(PERIOD)

    assert written.entries == [("INFO", "0", 0), ("ERROR", "2", 3)]


async def test_failures_of_a_disabled_level_neither_count_nor_hide_others(
    limiter: LogLimiter, written: Written
) -> None:
    logging.getLogger(NAME).setLevel(logging.WARNING)
    for number in range(10):
        fail(limiter, number, level=logging.INFO)
    fail(limiter, "seen")

    assert written.entries == [("WARNING", "seen", 0)]
    assert timers() == 0


async def test_the_text_of_a_counted_failure_is_not_formatted(limiter: LogLimiter, written: Written) -> None:
    fail(limiter, 0)
    fail(limiter, 1)

    assert [limiter.admits("key", logging.WARNING) for _ in range(100)] == [False] * 100


async def test_leaving_an_outbox_logs_the_counts_at_once(limiter: LogLimiter, written: Written) -> None:
    for number in range(10):
        fail(limiter, number)
    flush_limiters()

    assert written.entries == [("WARNING", "0", 0), ("WARNING", "1", 8)]
    assert timers() == 0
    await asyncio.sleep(2 * PERIOD)
    assert len(written.records) == 2


async def test_the_summary_has_the_fields_of_its_entry(limiter: LogLimiter, written: Written) -> None:
    with shared_fields(shard="one"):
        fail(limiter, 0)
        fail(limiter, 1)
    with shared_fields(shard="two", loop="other"):
        fail(limiter, 2)
        await asyncio.sleep(PERIOD)

    _, record = written.records[1]
    assert (record["outboxio_event"], record["outboxio_shard"]) == (1, "one")
    assert "outboxio_loop" not in record


async def test_expired_keys_are_forgotten(limiter: LogLimiter, written: Written) -> None:
    for number in range(1_000):
        fail(limiter, number, key=f"key {number}")
        await asyncio.sleep(PERIOD / 10)

    assert len(limiter._periods) <= log_limiter.MOST_REMEMBERED + 10
    assert written.total == 1_000


async def test_without_the_event_loop_of_its_thread_every_entry_is_logged(
    limiter: LogLimiter, caplog: pytest.LogCaptureFixture
) -> None:
    fail(limiter, "here")

    def in_a_thread() -> None:
        for number in range(3):
            fail(limiter, number)
        asyncio.run(in_a_loop())

    async def in_a_loop() -> None:
        for number in range(3):
            fail(limiter, number)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()

    assert len([record for record in caplog.records if record.name == NAME]) == 1 + 3 + 3


def test_a_new_event_loop_logs_the_counts_of_the_former_loop(caplog: pytest.LogCaptureFixture) -> None:
    limiter = LogLimiter(log_of(NAME))

    async def some() -> None:
        for number in range(5):
            fail(limiter, number)

    asyncio.run(some())
    assert len(caplog.records) == 1
    asyncio.run(some())
    limiter.flush()

    entries = [vars(record).get("outboxio_suppressed", 0) for record in caplog.records]
    assert sum(1 + number for number in entries) == 10
