"""Reports: a running process writes its runs per minute and its state for operators, on each dialect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from outboxio import EventEnvelope, Outbox, RetryPolicy
from outboxio.health.reporter import KEEP_MINUTES, KEEP_REPORTS
from outboxio.storage.protocols.operating import HandlerMinute, InstanceReport
from outboxio.testing import MovableClock, memory_outbox
from tests.kit.app import Emit, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import database_of, owner_of, run_of
from tests.kit.spies import breaks, watch

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]


async def reports_of(outbox: Outbox) -> list[InstanceReport]:
    """All reports of the namespace."""
    found: list[InstanceReport] = await database_of(outbox).reports.reports(outbox.namespace, CLOCK_BEGIN)
    return found


async def minutes_of(outbox: Outbox) -> list[HandlerMinute]:
    found: list[HandlerMinute] = await database_of(outbox).reports.minutes(outbox.namespace, CLOCK_BEGIN)
    return found


CLOCK_BEGIN = MovableClock().now() - timedelta(days=36_500)


def reports_again(outbox: Outbox) -> None:
    """Let the reporter run a round now."""
    run_of(outbox).loops.reports.wake()


async def has_report(outbox: Outbox) -> bool:
    return bool(await reports_of(outbox))


def with_receipt(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="receipt", concurrency=3)
    async def receipt(envelope: Envelope) -> None: ...


# --- reports ---------------------------------------------------------------------------------------


async def test_a_process_is_visible_from_entering_running_until_it_leaves(outbox: Outbox, clock: MovableClock) -> None:
    with_receipt(outbox)
    async with outbox.running():
        await eventually(lambda: has_report(outbox))
        await eventually(lambda: outbox.statistics["default"].locks_held.get("dispatch/receipt") == 1)
        clock.advance(61)
        reports_again(outbox)
        await eventually(lambda: _was_seen(outbox, clock))
        [report] = await reports_of(outbox)
    assert report.instance == owner_of(outbox)
    assert report.version == __import__("outboxio").__version__
    assert (report.last_seen_date - report.started_date) == timedelta(seconds=61)
    content = msgspec.json.decode(report.report)
    assert content["roles"] == ["fanout", "handling"]
    assert content["locks"] == {"fanout": 1, "dispatch/receipt": 1}
    assert content["handlers"]["receipt"] == {
        "in_flight": 0, "limit": 3, "stuck": 0, "alert_age": 60.0, "types": ["MoneyDeposited"],
    }  # fmt: skip
    assert (content["stuck"], content["paused"], content["clock_offset"]) == ([], [], None)
    assert 0 <= content["loop_lag"] < 10
    assert await reports_of(outbox) == []


async def _was_seen(outbox: Outbox, clock: MovableClock) -> bool:
    return [report.last_seen_date for report in await reports_of(outbox)] == [clock.now()]


async def test_each_process_has_its_own_report(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    one, two = [await make_outbox(clock=clock) for _ in range(2)]
    with_receipt(one)
    with_receipt(two)
    async with one.running(handling=False):
        async with two.running(fanout=False):
            await eventually(lambda: _number_of_reports(one, 2))
            roles = {report.instance: msgspec.json.decode(report.report)["roles"] for report in await reports_of(one)}
            assert roles == {owner_of(one): ["fanout"], owner_of(two): ["handling"]}
        assert [report.instance for report in await reports_of(one)] == [owner_of(one)]


async def test_a_report_in_progress_does_not_outlive_its_process(outbox: Outbox) -> None:
    with_receipt(outbox)
    watched, written, answer = watch(outbox, "reports"), asyncio.Event(), asyncio.Event()

    async def answer_late(method: Callable[..., Awaitable[None]], *args: Any) -> None:
        await method(*args)
        written.set()
        await answer.wait()

    watched.trouble["write_report"] = answer_late
    async with outbox.running():
        await written.wait()
        leaving = asyncio.create_task(run_of(outbox)._reporting.reporter.leave())
        await asyncio.sleep(0)
        answer.set()
        await leaving
        assert await reports_of(outbox) == []


async def _number_of_reports(outbox: Outbox, number: int) -> bool:
    return len(await reports_of(outbox)) == number


async def test_a_drain_writes_its_minutes_and_removes_old_ones(outbox: Outbox, clock: MovableClock) -> None:
    with_receipt(outbox)
    await outbox.execute(Emit((1, 2)))
    await outbox.drain()
    await outbox.execute(Emit((3,)))
    await outbox.drain()
    await outbox.drain()

    [minute] = await minutes_of(outbox)
    assert (minute.handler_name, minute.succeeded) == ("receipt", 3)

    clock.advance(KEEP_MINUTES + timedelta(minutes=2))
    await outbox.execute(Emit((4,)))
    await outbox.drain()
    [minute] = await minutes_of(outbox)
    assert minute.succeeded == 1


async def test_a_drain_writes_no_report(outbox: Outbox) -> None:
    with_receipt(outbox)
    watched = watch(outbox, "reports")
    await outbox.execute(Emit((1,)))
    await outbox.drain()
    assert watched.count("write_report") == 0
    assert await reports_of(outbox) == []


async def test_a_report_names_paused_handlers_and_stuck_runs(clock: MovableClock) -> None:
    released = asyncio.Event()
    async with memory_outbox(clock=clock) as outbox:

        @outbox.handler(MoneyDeposited, name="stuck", timeout="50ms", retry=RetryPolicy(max_attempts=3))
        async def stuck(envelope: Envelope) -> None:
            while not released.is_set():
                with suppress(asyncio.CancelledError):
                    await released.wait()

        @outbox.handler(WalletOpened, name="idle")
        async def idle(envelope: Any) -> None: ...

        await outbox.admin.pause("idle")
        async with outbox.running():
            await outbox.execute(Emit((1,)))
            await eventually(lambda: outbox.statistics["default"].of("stuck").stuck == 1)
            content = run_of(outbox)._reporting.live.report()
            released.set()
    assert content["paused"] == ["idle"]
    [run] = content["stuck"]
    assert run["handler"] == "stuck"
    assert "in wait" in run["at"] or "in stuck" in run["at"]
    assert len(run["event_id"]) == 36
    assert content["handlers"]["stuck"]["stuck"] == 1
    assert content["options"] == {"stuck": {"timeout": "50ms", "retry": "max_attempts 3"}}, "defaults are left out"


# --- minutes ---------------------------------------------------------------------------------------


async def test_a_minute_is_written_at_its_end_or_when_leaving(outbox: Outbox, clock: MovableClock) -> None:
    with_receipt(outbox)
    clock.set(clock.now().replace(second=5, microsecond=0))
    minute = clock.now().replace(second=0)
    async with outbox.running():
        await eventually(lambda: has_report(outbox))
        await outbox.execute(Emit((1, 2)))
        await eventually(lambda: outbox.statistics["default"].of("receipt").succeeded == 2)
        assert await minutes_of(outbox) == []
        clock.advance(60)
        reports_again(outbox)
        await eventually(lambda: _has_minutes(outbox, 1))
        await outbox.execute(Emit((3,)))
        await eventually(lambda: outbox.statistics["default"].of("receipt").succeeded == 3)
    rows = await minutes_of(outbox)
    assert [(row.minute_date, row.succeeded) for row in rows] == [(minute, 2), (minute + timedelta(minutes=1), 1)]
    assert [sum(row.durations) for row in rows] == [2, 1]

    async with outbox.running():  # once more in the same minute
        await outbox.execute(Emit((4,)))
        await eventually(lambda: outbox.statistics["default"].of("receipt").succeeded == 4)
    assert [row.succeeded for row in await minutes_of(outbox)] == [2, 2]


async def _has_minutes(outbox: Outbox, number: int) -> bool:
    return len(await minutes_of(outbox)) == number


async def test_minutes_that_could_not_be_written_are_written_later(clock: MovableClock) -> None:
    async with memory_outbox(clock=clock) as outbox:
        with_receipt(outbox)
        watched = watch(outbox, "reports")
        watched.trouble["write_minutes"] = breaks(1)
        async with outbox.running():
            await eventually(lambda: has_report(outbox))
            await outbox.execute(Emit((1,)))
            await eventually(lambda: outbox.statistics["default"].of("receipt").succeeded == 1)
            clock.advance(60)
            reports_again(outbox)
            await eventually(lambda: _has_minutes(outbox, 1))
            assert outbox.statistics["default"].loop_failures["reports"] == 1
        assert watched.count("write_minutes") == 2


# --- old rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fans_out", [True, False])
async def test_the_process_that_fans_out_removes_old_rows(clock: MovableClock, fans_out: bool) -> None:
    async with memory_outbox(clock=clock) as outbox:
        with_receipt(outbox)
        reports = database_of(outbox).reports
        row = HandlerMinute(
            handler_name="gone", minute_date=clock.now() - KEEP_MINUTES - timedelta(minutes=1), succeeded=1, failed=0,
            dead=0, expired=0, skipped=0, duration_us=0, durations=(0,) * 17, lags=(0,) * 17,
        )  # fmt: skip
        await reports.write_minutes(outbox.namespace, "dead", [row])
        seen = clock.now() - KEEP_REPORTS - timedelta(minutes=1)
        await reports.write_report(
            outbox.namespace,
            InstanceReport(
                instance="dead", version="0", started_date=seen, last_seen_date=seen, delay_seconds=10,
                report=msgspec.Raw(b"{}"),
            ),
        )  # fmt: skip
        async with outbox.running(fanout=fans_out):
            await eventually(lambda: _reports_itself(outbox))
            clock.advance(61)  # the first round may have come before the lock
            reports_again(outbox)
            await eventually(lambda: _was_seen_last(outbox, clock))
            left = [report.instance for report in await reports_of(outbox)], len(await minutes_of(outbox))
    assert left == (([owner_of(outbox)], 0) if fans_out else (["dead", owner_of(outbox)], 1))


async def _reports_itself(outbox: Outbox) -> bool:
    return owner_of(outbox) in {report.instance for report in await reports_of(outbox)}


async def _was_seen_last(outbox: Outbox, clock: MovableClock) -> bool:
    seen = {report.instance: report.last_seen_date for report in await reports_of(outbox)}
    has_rows_to_remove = "dead" in seen and run_of(outbox).fans_out
    return seen[owner_of(outbox)] == clock.now() and not has_rows_to_remove


async def test_a_process_without_the_delete_right_reports_it_and_continues(
    clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory_outbox(clock=clock) as outbox:
        with_receipt(outbox)
        watched = watch(outbox, "reports")

        async def refuse(method: Any, *args: Any) -> int:
            raise PermissionError("DELETE is denied")

        watched.trouble["remove_old"] = refuse
        with caplog.at_level(logging.WARNING):
            async with outbox.running():
                await eventually(lambda: has_report(outbox))
                await eventually(lambda: run_of(outbox).fans_out)
                clock.advance(61)
                reports_again(outbox)
                await eventually(lambda: watched.count("remove_old") == 1)
                clock.advance(61)
                reports_again(outbox)
                await eventually(lambda: _was_seen(outbox, clock))
        assert watched.count("remove_old") == 1
        assert outbox.statistics["default"].loop_failures["reports"] == 0
    assert "retrying in an hour" in caplog.text
