"""Fan-out hands new rows over to the dispatcher of its process; no row is lost or run twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from outboxio import Batch, Outbox, Settings
from outboxio.dispatch import finder
from outboxio.fanout.fanout import FEW
from outboxio.model.notification import Notification
from outboxio.runs.handler_queue import FIRST_WINDOW
from outboxio.storage.mysql import fanout as mysql_fanout
from outboxio.storage.mysql import new_notifications as fast_path
from outboxio.storage.mysql import new_notifications as handoff
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.inside import cursors_of, database_of, dispatcher_of, run_of
from tests.kit.probes import MakeOutbox
from tests.kit.spies import counters, watch

pytestmark = [
    pytest.mark.not_on("sqlite", why="nothing is handed over on SQLite: finding a row needs only a call in a thread"),
    pytest.mark.above_statements,
]

QUIET = Settings(handling_poll_delay="1h", fanout_poll_delay="1h")


async def ready_for_handoff(outbox: Outbox) -> None:
    """Wait until all handlers have read their rows once, so that fan-out may hand new rows over."""
    await eventually(lambda: cursors_of(outbox))
    await eventually(lambda: all(cursor.scan.has_period for cursor in cursors_of(outbox).values()))
    await eventually(lambda: database_of(outbox).notifications.can_settle)
    dispatcher, offers = dispatcher_of(outbox), list[Any]()
    offer = dispatcher.handoff

    def offering() -> Any:
        offers.append(offer())
        return offers[-1]

    # A round that started earlier would take the next event without a handoff, or before the test is ready for it.
    dispatcher.handoff = offering
    run_of(outbox).loops.fanout.wake()
    await eventually(lambda: any(offers) and dispatcher._core.in_flight.handoff is None)
    dispatcher.handoff = offer


def offered_names(outbox: Outbox) -> list[str] | None:
    """The names of a handoff, which is closed again; ``None`` without a handoff."""
    handoff = dispatcher_of(outbox).handoff()
    if handoff is None:
        return None
    handoff.close()
    return sorted(handoff.names)


async def is_settled(outbox: Outbox, **wanted: int) -> bool:
    counts = await outbox.admin.counts()
    return all(counts[state] == wanted.get(state, 0) for state in ("PENDING", "FAILED", "undelivered")) and all(
        counts[state] == number for state, number in wanted.items()
    )


def found(outbox: Outbox) -> list[int]:
    """The number of rows of each later read of due rows."""
    notifications, numbers = watch(outbox, "notifications"), list[int]()

    async def recorded(
        find_due: Callable[..., Awaitable[Sequence[Notification]]], *args: Any
    ) -> Sequence[Notification]:
        rows = await find_due(*args)
        numbers.append(len(rows))
        return rows

    notifications.trouble["find_due"] = recorded
    return numbers


async def test_rows_that_are_handed_over_need_no_read(make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "SWEEP_IN_BACKLOG", 3600.0)
    outbox, journal = await make_outbox(settings=QUIET), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    numbers = found(outbox)
    async with outbox.running():
        await ready_for_handoff(outbox)
        for amount in range(20):
            await outbox.executor.execute(Emit((amount,)))
            await journal.calls(amount + 1)
        await eventually(lambda: is_settled(outbox, SUCCEEDED=20))
    assert journal.amounts == list(range(20))
    assert sum(numbers) < 10  # without wake-ups, a poll may come in between


async def test_a_handler_starts_before_fan_out_counts_the_event(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUIET)
    counted, came = list[int](), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="h")
    async def handle(_: object) -> None:
        counted.append(outbox.statistics["default"].fanned_out)
        came.set()

    async with outbox.running():
        await ready_for_handoff(outbox)
        await outbox.executor.execute(Emit((1,)))
        await came.wait()
        await eventually(lambda: outbox.statistics["default"].fanned_out == 1)

    assert counted == [0]


async def test_only_rows_of_plain_handlers_are_handed_over(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUIET)
    for name, options in {
        "plain": {},
        "ordered": {"ordered": True},
        "batch": {"batch": Batch(size=10)},
        "once": {"delivery": "at_most_once"},
        "together": {"delivery": "transactional"},
        "paused": {},
    }.items():
        outbox.handler(MoneyDeposited, name=name, **options)(Journal())
    async with outbox.running():
        await ready_for_handoff(outbox)
        assert offered_names(outbox) == ["paused", "plain"]
        cursors_of(outbox)["paused"].is_paused = True
        assert offered_names(outbox) == ["plain"]
        cursors_of(outbox)["plain"].has_backlog = True
        assert offered_names(outbox) is None


async def test_rows_beyond_the_capacity_are_found_by_reading(make_outbox: MakeOutbox) -> None:
    outbox, journal = await make_outbox(settings=Settings(handling_batch_size=50, concurrency=10)), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    numbers = found(outbox)
    async with outbox.running():
        await ready_for_handoff(outbox)
        await outbox.executor.execute(Emit(tuple(range(600))))
        await eventually(lambda: is_settled(outbox, SUCCEEDED=600))
    assert sorted(journal.amounts) == list(range(600))
    assert sum(numbers) >= 400


async def test_nothing_is_handed_over_right_after_a_busy_round(make_outbox: MakeOutbox) -> None:
    """After a busy round, the two stages are faster when they run concurrently."""
    outbox, journal = await make_outbox(settings=QUIET), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    events, rounds = watch(outbox, "events"), list[tuple[bool, int]]()

    async def recorded(fan_out: Any, *args: Any) -> Any:
        done = await fan_out(*args)
        rounds.append((args[0].handoff is not None, sum(done.events.values())))
        return done

    events.trouble["fan_out"] = recorded
    async with outbox.running():
        await ready_for_handoff(outbox)
        await outbox.executor.execute(Emit(tuple(range(5 * FEW))))
        await eventually(lambda: is_settled(outbox, SUCCEEDED=5 * FEW))
        await eventually(lambda: run_of(outbox).loops.fanout.wake() or rounds[-1] == (True, 0))

    behind_busy_ones = [is_handed for (_, before), (is_handed, _) in pairwise(rounds) if before > FEW]
    assert behind_busy_ones
    assert not any(behind_busy_ones)


async def test_a_fast_handler_is_handed_more_and_more(make_outbox: MakeOutbox) -> None:
    number = FIRST_WINDOW + 100
    outbox, journal = await make_outbox(settings=Settings(concurrency=10)), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    numbers, rounds = found(outbox), 0
    async with outbox.running():
        await ready_for_handoff(outbox)
        while rounds < 50 and (not rounds or sum(numbers)):
            numbers.clear()
            await outbox.executor.execute(Emit(tuple(range(number))))
            rounds += 1
            await journal.calls(rounds * number)
    assert 1 < rounds < 50


async def test_a_row_settled_before_its_handoff_is_not_run_again(
    make_outbox: MakeOutbox,
) -> None:
    outbox, journal = await make_outbox(settings=QUIET), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    events = watch(outbox, "events")

    async def late_handoff(fan_out: Any, *args: Any) -> Any:
        handoff, late = args[0].handoff, list[Sequence[Notification]]()
        if handoff is not None:
            hand, handoff.hand = handoff.hand, lambda rows: late.extend([rows] if rows else [])
        done = await fan_out(*args)
        for rows in late:
            run_of(outbox).signals.find.set()
            await eventually(lambda: counters(outbox).succeeded == 1)
            hand(rows)
            assert (len(rows), handoff.taken) == (1, 0)
        return done

    events.trouble["fan_out"] = late_handoff
    async with outbox.running():
        await ready_for_handoff(outbox)
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: is_settled(outbox, SUCCEEDED=1))
        events.trouble.clear()
        await outbox.executor.execute(Emit((2,)))
        await journal.calls(2)
    assert journal.amounts == [1, 2], "a second run of the first row would have come before the second row's"


async def test_a_handoff_skips_no_rows_that_are_still_to_be_found(make_outbox: MakeOutbox) -> None:
    outbox, journal = await make_outbox(settings=QUIET), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    events, positions = watch(outbox, "events"), list[tuple[Any, Any]]()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            [source] = cursors_of(outbox).values()
            before, done = source.scan.last, function(*args)
            positions.append((before, source.scan.last))
            return done

        return recorded

    async def watched_handoff(fan_out: Any, *args: Any) -> Any:
        handoff = args[0].handoff
        if handoff is not None:
            handoff._take, handoff._closed = noting(handoff._take), noting(handoff._closed)
        return await fan_out(*args)

    async with outbox.running():
        await ready_for_handoff(outbox)
        events.trouble["fan_out"] = watched_handoff
        await outbox.executor.execute(Emit((1, 2, 3)))
        await journal.calls(3)
        await eventually(lambda: len(positions) > 1)
    assert all(before == after for before, after in positions)


async def test_a_handler_paused_before_the_handoff_starts_nothing(make_outbox: MakeOutbox) -> None:
    outbox, journal = await make_outbox(settings=QUIET), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    events, handed = watch(outbox, "events"), list[int]()

    async def pausing_first(fan_out: Any, *args: Any) -> Any:
        if (handoff := args[0].handoff) is not None:
            await outbox.admin.pause("h")
            cursors_of(outbox)["h"].is_paused = True
        done = await fan_out(*args)
        if done.notifications:
            handed.append(0 if handoff is None else handoff.taken)
        return done

    async with outbox.running():
        await ready_for_handoff(outbox)
        events.trouble["fan_out"] = pausing_first
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: is_settled(outbox, PENDING=1))
        await eventually(lambda: handed)
        assert (handed, len(journal)) == ([0], 0)
        events.trouble.clear()
        await outbox.admin.unpause("h")
        await journal.calls(1)


@pytest.mark.not_on("postgres", "sqlite", why="only MySQL and MariaDB hand rows over before the commit")
async def test_a_failed_commit_fans_the_event_out_and_handles_it_again(
    make_outbox: MakeOutbox, look: Look, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, journal = await make_outbox(settings=Settings(fanout_poll_delay="50ms")), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    execute, failed = handoff.execute_with_handoff, list[str]()

    async def failing_once(connection: Any, message: str, *args: Any, **options: Any) -> Any:
        if failed:
            return await execute(connection, message, *args, **options)
        before, commit, _ = message.rpartition("COMMIT")
        failed.append(commit)
        await execute(connection, before, *args, **options)
        await journal.calls(1)
        raise ConnectionError("lost in COMMIT")

    for module in (mysql_fanout, fast_path):
        monkeypatch.setattr(module, "execute_with_handoff", failing_once)
    with caplog.at_level(logging.WARNING):
        async with outbox.running():
            await ready_for_handoff(outbox)
            await outbox.executor.execute(Emit((1,)))
            await eventually(lambda: is_settled(outbox, SUCCEEDED=1))
            await eventually(lambda: counters(outbox).refused == 1)
    assert failed == ["COMMIT"]
    assert journal.amounts == [1, 1]
    assert journal.envelopes[0].event_id == journal.envelopes[1].event_id
