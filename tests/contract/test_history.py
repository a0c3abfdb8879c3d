"""``admin.history()``: the runs of a handler over time, on each dialect."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from outboxio import ConfigurationError, HandlerHistory, Outbox, UnknownHandler
from outboxio.storage.protocols import HandlerMinute
from outboxio.testing import MovableClock
from tests.kit.app import Journal, Look, MoneyDeposited
from tests.kit.inside import database_of
from tests.kit.marks import needs_asyncpg
from tests.kit.meters import meter

MakeOutbox = Callable[..., Awaitable[Outbox]]


NOON = datetime(2030, 1, 1, 12)
MINUTE = timedelta(minutes=1)


def minute(ago: int, handler: str = "mail", *, fast: int = 0, slow: int = 0, **given: int) -> HandlerMinute:
    """A row this many minutes before noon, with fast runs of up to 5 ms and slow runs of up to 1 s."""
    numbers: dict[str, Any] = {"succeeded": 0, "failed": 0, "dead": 0, "expired": 0, "skipped": 0, **given}
    buckets = (0, 0, fast, 0, 0, 0, 0, 0, 0, slow, 0, 0, 0, 0, 0, 0, 0)
    return HandlerMinute(
        handler_name=handler, minute_date=NOON - ago * MINUTE, duration_us=fast * 4_000 + slow * 900_000,
        durations=buckets, lags=(fast + slow, *[0] * 16), **numbers,
    )  # fmt: skip


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> Outbox:
    made = await make_outbox(clock=MovableClock(NOON + timedelta(seconds=30)))
    made.handler(MoneyDeposited, name="mail", aliases={"post"})(Journal())
    return made


async def write(outbox: Outbox, instance: str, *rows: HandlerMinute) -> None:
    await database_of(outbox).reports.write_minutes("app", instance, rows)


async def test_a_history_adds_up_processes_aliases_and_minutes(outbox: Outbox) -> None:
    await write(outbox, "a", minute(1, fast=98, succeeded=98), minute(1, "post", slow=1, failed=1))
    await write(outbox, "b", minute(1, slow=1, dead=1), minute(59, fast=4, succeeded=1, expired=2, skipped=3))
    await write(outbox, "b", minute(60, fast=9, succeeded=9), minute(2, "other", fast=50, succeeded=50))

    hour: HandlerHistory = await outbox.admin.history("mail")
    assert (hour.since, hour.until, hour.step) == (NOON - 59 * MINUTE, NOON + timedelta(seconds=30), MINUTE)
    assert [point.begin for point in hour.points] == [NOON - ago * MINUTE for ago in range(59, -1, -1)]
    last, present = hour.points[-2:]
    assert (last.succeeded, last.failed, last.dead, last.runs, last.failures, last.fail_share) == (
        98,
        1,
        1,
        100,
        2,
        0.02,
    )
    assert (last.duration_p50, last.duration_p95, last.duration_p99) == (0.005, 0.005, 1.0)
    assert last.duration_mean == pytest.approx((98 * 0.004 + 2 * 0.9) / 100)
    assert (last.lag_p50, last.lag_p95, last.lag_p99) == (0.001, 0.001, 0.001)
    assert (present.runs, present.fail_share, present.duration_p50, present.lag_p99) == (0, None, None, None)
    assert (hour.points[0].succeeded, hour.points[0].expired, hour.points[0].skipped) == (1, 2, 3)
    assert (hour.total.begin, hour.total.succeeded, hour.total.runs) == (hour.since, 99, 103)

    day = await outbox.admin.history("mail", within=timedelta(hours=24), step=15 * MINUTE)
    assert len(day.points) == 96
    assert (day.since, day.points[-1].begin) == (datetime(2029, 12, 31, 12, 15), NOON)
    assert [point.succeeded for point in day.points if point.runs] == [10, 98]
    assert math.isclose(day.total.duration_mean or 0, (111 * 0.004 + 2 * 0.9) / 113)


async def test_a_history_of_all_handlers_is_the_sum_of_an_hour(outbox: Outbox) -> None:
    await write(outbox, "a", minute(1, fast=98, succeeded=98), minute(1, "other", slow=2, failed=2))
    await write(outbox, "b", minute(59, "other", fast=1, succeeded=1), minute(60, fast=9, succeeded=9))

    hour = await outbox.admin.history()
    assert (hour.handler_name, len(hour.points), hour.points[0].succeeded) == (None, 60, 1)
    assert (hour.points[-2].succeeded, hour.points[-2].failed, hour.points[-2].lag_p95) == (98, 2, 0.001)
    assert hour.total.runs == 101
    with pytest.raises(ConfigurationError, match="1 minute to 1 hour, unless a handler is named"):
        await outbox.admin.history(within=timedelta(hours=2))


async def test_a_history_is_empty_without_runs_and_none_if_unknown(outbox: Outbox) -> None:
    empty = await outbox.admin.history("mail")
    assert (empty.total.runs, empty.total.duration_p95, len(empty.points)) == (0, None, 60)
    with pytest.raises(UnknownHandler, match="mail"):
        await outbox.admin.history("mial")
    wrong: list[dict[str, Any]] = [
        {"within": timedelta(seconds=59)}, {"within": timedelta(hours=49)}, {"within": 60}, {"step": MINUTE / 2},
        {"step": timedelta(0)}, {"step": timedelta(hours=2)}, {"step": "1m"},
    ]  # fmt: skip
    for given in wrong:
        with pytest.raises(ConfigurationError, match="expected a timedelta"):
            await outbox.admin.history("mail", **given)


@needs_asyncpg
async def test_a_history_of_a_day_reads_no_rows_of_other_handlers(database_url: str, look: Look) -> None:
    async with Outbox(database_url, namespace="app") as outbox:
        await outbox.migrate()
        database = database_of(outbox)
        minutes = [NOON - ago * MINUTE for ago in range(200)]
        await write(outbox, "a", *(minute(ago, fast=1, succeeded=1) for ago in range(200)))
        read = meter(database, look)
        _, alone = await read(lambda: database.reports.minutes_of("app", "mail", minutes))
        for number in range(30):
            await write(outbox, "a", *(minute(ago, f"h{number}", fast=1, succeeded=1) for ago in range(200)))
        if look.driver == "asyncpg":
            await look.fetch("ANALYZE eventlog.handler_minutes")
        found, among_others = await read(lambda: database.reports.minutes_of("app", "mail", minutes))

    assert len(found) == 200
    assert among_others <= 2 * alone + 1000, (alone, among_others)
