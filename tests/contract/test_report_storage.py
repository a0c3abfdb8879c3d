"""The tables ``handler_minutes`` and ``instance_reports`` in storage, on each dialect."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from outboxio import Outbox
from outboxio.storage.protocols.operating import HandlerMinute, InstanceReport
from outboxio.storage.tables.reports import Reports
from tests.kit.app import Look
from tests.kit.inside import database_of

NOON = datetime(2030, 1, 1, 12)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def reports(outbox: Outbox) -> Reports:
    repository: Reports = database_of(outbox).reports
    return repository


def minute(handler: str = "h", date: datetime = NOON, *, succeeded: int = 1, **given: Any) -> HandlerMinute:
    numbers: dict[str, Any] = {"failed": 2, "dead": 3, "expired": 4, "skipped": 5, "duration_us": 6_000_000, **given}
    return HandlerMinute(
        handler_name=handler, minute_date=date, succeeded=succeeded, durations=tuple(range(17)),
        lags=(10**12, *[0] * 16), **numbers,
    )  # fmt: skip


def report(instance: str = "host:1:a", seen: datetime = NOON, **content: Any) -> InstanceReport:
    return InstanceReport(
        instance=instance, version="1.2.3", started_date=NOON - MINUTE, last_seen_date=seen, delay_seconds=10,
        report=msgspec.Raw(msgspec.json.encode(content)),
    )  # fmt: skip


async def test_minutes_are_read_back_unchanged(reports: Reports) -> None:
    written = [minute("b"), minute("a", skipped=2**62), minute("a", NOON + MINUTE), minute("\"ü😀'\\")]
    await reports.write_minutes("app", "host:1:a", written)

    found = await reports.minutes("app", NOON)
    assert sorted(found, key=lambda m: (m.minute_date, m.handler_name)) == sorted(
        written, key=lambda m: (m.minute_date, m.handler_name)
    )


async def test_rewriting_a_minute_replaces_it(reports: Reports) -> None:
    await reports.write_minutes("app", "host:1:a", [minute(succeeded=1), minute("other")])
    await reports.write_minutes("app", "host:1:a", [minute(succeeded=7, failed=0)])

    assert await reports.minutes_of("app", "h", [NOON]) == [minute(succeeded=7, failed=0)]


async def test_the_minutes_of_several_processes_are_added_up(reports: Reports) -> None:
    for instance in ("host:1:a", "host:2:b", "host:3:c"):
        await reports.write_minutes("app", instance, [minute(succeeded=4), minute(date=NOON + MINUTE)])

    [first, second] = await reports.minutes("app", NOON)
    assert (first.succeeded, first.duration_us, first.durations[16], first.lags[0]) == (12, 18_000_000, 48, 3 * 10**12)
    assert (second.minute_date, second.succeeded) == (NOON + MINUTE, 3)


async def test_minutes_are_selected_by_time_handler_and_namespace(reports: Reports) -> None:
    await reports.write_minutes("app", "i", [minute("a"), minute("b"), minute("a", NOON + MINUTE)])
    await reports.write_minutes("other", "i", [minute("a")])

    assert await reports.minutes("app", NOON + MINUTE) == [minute("a", NOON + MINUTE)]
    assert await reports.minutes_of("app", "b", [NOON, NOON + MINUTE]) == [minute("b")]
    assert await reports.minutes_of("app", "a", [NOON + MINUTE, NOON]) == [minute("a"), minute("a", NOON + MINUTE)]
    assert await reports.minutes_of("app", "a", [NOON + MINUTE]) == [minute("a", NOON + MINUTE)]
    assert await reports.minutes_of("app", "a", []) == []
    assert len(await reports.minutes("other", NOON)) == 1
    assert await reports.minutes("none", NOON) == []


async def test_a_report_is_replaced_by_the_next_report_of_its_process(reports: Reports) -> None:
    await reports.write_report("app", report(loop_lag=0.5))
    await reports.write_report("app", report("host:2:b"))
    await reports.write_report("app", report(seen=NOON + MINUTE, text="ü😀'\\\"", loop_lag=0.25))

    [first, second] = await reports.reports("app", NOON)
    assert (first.instance, first.version, first.delay_seconds) == ("host:1:a", "1.2.3", 10)
    assert (first.started_date, first.last_seen_date) == (NOON - MINUTE, NOON + MINUTE)
    assert msgspec.json.decode(first.report) == {"loop_lag": 0.25, "text": "ü😀'\\\""}
    assert second.instance == "host:2:b"
    assert [each.instance for each in await reports.reports("app", NOON + MINUTE)] == ["host:1:a"]
    assert await reports.reports("other", NOON) == []


async def test_a_leaving_process_removes_only_its_own_report(reports: Reports) -> None:
    for instance in ("a", "b"):
        await reports.write_report("app", report(instance))
    await reports.write_report("other", report("a"))
    await reports.remove_report("app", "a")

    assert [each.instance for each in await reports.reports("app", NOON)] == ["b"]
    assert [each.instance for each in await reports.reports("other", NOON)] == ["a"]


async def test_old_rows_are_removed_in_chunks_oldest_minutes_first(reports: Reports, look: Look) -> None:
    await reports.write_minutes("app", "i", [minute(date=NOON + number * MINUTE) for number in range(5)])
    await reports.write_minutes("other", "i", [minute()])
    for number in range(3):
        await reports.write_report("app", report(f"i{number}", NOON + number * MINUTE))

    assert await reports.remove_old("app", NOON + 4 * MINUTE, NOON + MINUTE, 3) == 3 + 1
    assert [each.minute_date for each in await reports.minutes("app", NOON)] == [NOON + 3 * MINUTE, NOON + 4 * MINUTE]
    assert await reports.remove_old("app", NOON + 4 * MINUTE, NOON + MINUTE, 3) == 1
    assert await reports.remove_old("app", NOON + 4 * MINUTE, NOON + MINUTE, 3) == 0
    assert [each.instance for each in await reports.reports("app", NOON)] == ["i1", "i2"]
    assert len(await reports.minutes("other", NOON)) == 1


async def test_concurrent_writes_of_the_same_minutes_do_not_deadlock(reports: Reports, make_outbox: Any) -> None:
    names = [f"h{number}" for number in range(20)]
    others = [database_of(await make_outbox()).reports for _ in range(4)]

    async def write(repository: Reports, instance: str) -> None:
        for round in range(10):
            shuffled = names[round:] + names[:round]
            await repository.write_minutes("app", instance, [minute(name, succeeded=round) for name in shuffled])
            await repository.remove_old("app", NOON - MINUTE, NOON - MINUTE, 10)

    async with asyncio.TaskGroup() as group:
        for number, repository in enumerate((reports, *others)):
            group.create_task(write(repository, f"i{number}"))

    found = await reports.minutes("app", NOON)
    assert [(each.handler_name, each.succeeded) for each in found] == [(name, 45) for name in sorted(names)]
