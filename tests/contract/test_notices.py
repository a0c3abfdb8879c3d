"""Receivers are notified of findings: once at the start and once at the end, by one process in the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from outboxio import Finding, Outbox, RegistrationError, RetryPolicy, Unprocessable
from outboxio.health import notices, overview
from outboxio.health.notices import FindingWatch
from outboxio.storage.protocols import InstanceReport
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, MoneyDeposited, eventually
from tests.kit.inside import database_of, finding_watch_of, watching_of
from tests.kit.proxy import proxy_to

pytestmark = [pytest.mark.with_tables, pytest.mark.above_statements]

MakeOutbox = Callable[..., Awaitable[Outbox]]

ONCE = RetryPolicy(max_attempts=1)
BEGUN, ENDED = ("new_dead", False), ("new_dead", True)


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "FRESH", 0.0)


class Receiver:
    """Collects findings about dead letters; the other findings in these tests report that no process runs."""

    def __init__(self, name: str = "pager") -> None:
        self.name = name
        self.got: list[Finding] = []
        self.fails = False

    async def __call__(self, finding: Finding) -> None:
        if finding.rule != "new_dead":
            return
        if self.fails:
            raise ConnectionError("no pager")
        self.got.append(finding)

    @property
    def seen(self) -> list[tuple[str, bool]]:
        return [(one.rule, one.ended is not None) for one in self.got]

    def watch(self, outbox: Outbox, **options: Any) -> FindingWatch:
        return finding_watch_of(outbox, self.name, self, **options)


async def rounds(watch: FindingWatch, number: int = 1) -> None:
    for _ in range(number):
        await watch.run_once()


async def with_dead_letter(make_outbox: MakeOutbox, clock: MovableClock, name: str = "mail") -> Outbox:
    outbox = await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name=name, retry=ONCE)(Journal(lambda envelope: Unprocessable("never")))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    return outbox


async def stored(outbox: Outbox) -> list[InstanceReport]:
    return await database_of(outbox).reports.reports("", notices.datetime(1970, 1, 1))


async def test_a_finding_is_reported_at_its_start_and_end(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, receiver = await with_dead_letter(make_outbox, clock), Receiver()
    watch, started = receiver.watch(outbox), clock.now()

    await rounds(watch, 3)
    assert receiver.seen == [BEGUN]
    [finding] = receiver.got
    assert (finding.handler, finding.since, finding.ended) == ("mail", started, None)
    assert finding.fix == "outboxio dead --handler mail"

    clock.advance("61m")
    await rounds(watch)
    assert receiver.seen == [BEGUN], "a single absence may be a flap"
    gone = clock.now()
    clock.advance("15s")
    await rounds(watch, 3)
    assert receiver.seen == [BEGUN, ENDED]
    assert (receiver.got[1].since, receiver.got[1].ended) == (started, gone)
    await watch.close()


async def test_a_flapping_finding_is_reported_once(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, receiver = await with_dead_letter(make_outbox, clock), Receiver()
    watch = receiver.watch(outbox)
    await rounds(watch)
    clock.advance("61m")
    await rounds(watch)

    await outbox.executor.execute(Emit((2,)))
    await outbox.drain()
    await rounds(watch, 3)

    assert receiver.seen == [BEGUN]
    await watch.close()


async def test_a_restarted_process_repeats_nothing_and_reports_ends(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox, receiver = await with_dead_letter(make_outbox, clock), Receiver()
    first = receiver.watch(outbox)
    await rounds(first)
    await first.close()

    second = receiver.watch(outbox)
    await rounds(second, 2)
    assert receiver.seen == [BEGUN]
    await second.close()

    clock.advance("61m")
    for _ in range(2):  # as cron does: each process evaluates once
        third = receiver.watch(outbox)
        await rounds(third)
        await third.close()
    assert receiver.seen == [BEGUN, ENDED]


async def test_the_row_of_a_receiver_lasts_as_long_as_findings(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, receiver = await with_dead_letter(make_outbox, clock), Receiver()
    watch = receiver.watch(outbox)
    await rounds(watch)

    assert [one.instance for one in await stored(outbox)] == ["app/lock/findings pager"]
    assert (await outbox.admin.overview()).instances == ()

    async with outbox.running():
        clock.advance("61m")

        async def is_removed() -> bool:
            await rounds(watch)
            return await stored(outbox) == []

        await eventually(is_removed)
    await watch.close()


async def test_receivers_are_independent(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, good, bad = await with_dead_letter(make_outbox, clock), Receiver("good"), Receiver("bad")
    bad.fails = True
    watches = [each.watch(outbox) for each in (bad, good)]

    with caplog.at_level(logging.WARNING, "outboxio.health.notices"):
        for watch in watches:
            await rounds(watch, 3)
    assert (good.seen, bad.seen) == ([BEGUN], [])
    assert [watch.has_failed for watch in watches] == [True, False]
    [text] = [record.message for record in caplog.records if record.name == "outboxio.health.notices"]
    assert text.startswith("could not report finding new_dead to bad")
    assert "no pager" in text

    bad.fails = False
    await rounds(watches[0], 2)
    assert bad.seen == [BEGUN]
    for watch in watches:
        await watch.close()


async def test_a_hanging_call_is_cancelled_and_delays_no_other(
    make_outbox: MakeOutbox, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = await with_dead_letter(make_outbox, clock)
    monkeypatch.setattr(notices, "LONGEST_CALL", 0.01)
    got: list[str] = []

    async def receive(finding: Finding) -> None:
        if finding.rule == "new_dead":
            await asyncio.Event().wait()
        got.append(finding.rule)

    watch = finding_watch_of(outbox, "hangs", receive)
    await rounds(watch, 2)
    assert (got, watch.has_failed) == (["no_instance"], True)
    await watch.close()


async def test_a_cancellation_by_the_function_itself_is_a_failure(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await with_dead_letter(make_outbox, clock)

    async def receive(finding: Finding) -> None:
        raise asyncio.CancelledError

    watch = finding_watch_of(outbox, "cancels", receive)
    await rounds(watch)
    assert watch.has_failed
    await watch.close()


@pytest.mark.above_statements(False)
async def test_a_single_process_notifies_and_another_takes_over(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    one, other, receiver = await with_dead_letter(make_outbox, clock), await make_outbox(clock=clock), Receiver()
    first, second = receiver.watch(one), receiver.watch(other)
    await rounds(first)
    await rounds(second, 2)
    assert (first.leads, second.leads, receiver.seen) == (True, False, [BEGUN])

    await first.close()
    clock.advance("61m")

    async def is_reported() -> bool:
        await rounds(second)
        return len(receiver.seen) > 1

    await eventually(is_reported)
    assert (second.leads, receiver.seen) == (True, [BEGUN, ENDED])
    await second.close()


@pytest.mark.not_on("sqlite", why="a file is always reachable")
async def test_the_last_notifier_reports_a_lost_database_from_memory(
    make_outbox: MakeOutbox, database_url: str
) -> None:
    got: list[tuple[str, str, bool]] = []

    def to(name: str) -> Callable[[Finding], Awaitable[None]]:
        async def receive(finding: Finding) -> None:
            got.append((name, finding.rule, finding.ended is not None))

        return receive

    async with proxy_to(database_url) as proxy, AsyncExitStack() as stack:
        watches: list[FindingWatch] = []
        for name in ("leads", "stands by"):
            outbox = await stack.enter_async_context(Outbox(proxy.url, namespace="app"))
            watches.append(finding_watch_of(outbox, "pager", to(name)))
            await rounds(watches[-1])
            stack.push_async_callback(watches[-1].close)
        await proxy.stop()
        for watch in watches:
            await rounds(watch, 3)
        assert got == [("leads", "shard_unreachable", False)]
        starts = finding_watch_of(outbox, "pager", to("starts"), starts=True)
        await rounds(starts, 2)
        assert got[1:] == [("starts", "shard_unreachable", False)]
        await starts.close()

        await proxy.start()
        await rounds(watches[0], 3)
        assert got[2:] == [("leads", "shard_unreachable", True)]


async def test_functions_are_called_inside_running(
    make_outbox: MakeOutbox, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, got = await with_dead_letter(make_outbox, clock), asyncio.Queue[Finding]()

    @outbox.on_finding
    async def page(finding: Finding) -> None:
        await got.put(finding)

    async with outbox.running():
        assert len(watching_of(outbox)) == 1
        async with asyncio.timeout(30):
            while (await got.get()).rule != "new_dead":
                pass
        with pytest.raises(RegistrationError, match="before running"):
            outbox.on_finding(page)


async def test_an_outbox_without_notice_functions_evaluates_nothing(outbox: Outbox) -> None:
    async with outbox.running():
        assert watching_of(outbox) == []


async def test_uncallable_functions_are_refused(outbox: Outbox) -> None:
    with pytest.raises(RegistrationError, match="expected an async function of a Finding"):
        outbox.on_finding(lambda finding: None)  # type: ignore[arg-type, return-value]  # callers may not be typed

    async def nothing() -> None: ...

    async def page(finding: Finding) -> None: ...

    with pytest.raises(RegistrationError, match="calls a function with a Finding"):
        outbox.on_finding(nothing)
    assert outbox.on_finding(page) is page
    with pytest.raises(RegistrationError, match="two functions of on_finding are named"):
        outbox.on_finding(page)
