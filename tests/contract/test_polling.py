"""How often due rows and undelivered events are read, and from which position."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from decimal import Decimal
from itertools import count
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Event, Outbox, Settings
from outboxio.loops.loop import Signals
from outboxio.model.notification import DueQuery
from outboxio.runs.cursor import SWEEP_IN_FLIGHT
from outboxio.runs.handler_queue import FIRST_WINDOW
from outboxio.runtime import shard_run
from outboxio.runtime.wakeups import LONGEST_GAP
from outboxio.storage.protocols import FanoutRequest
from outboxio.support import scan_position
from outboxio.support.clock import utc_now
from outboxio.support.scan_position import FEW
from tests.kit import mysql
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually, opened
from tests.kit.inside import cursors_of, database_of, dispatcher_of, run_of
from tests.kit.marks import needs_many_writers
from tests.kit.probes import MakeOutbox, open_transaction
from tests.kit.spies import watch

pytestmark = pytest.mark.one_of_family


class Numbered(Event):
    number: int


QUIET = Settings(handling_poll_delay="1h", fanout_poll_delay="1h", notify=False)


def counted_finds(outbox: Outbox) -> list[int]:
    """The sizes of all later reads."""
    notifications = database_of(outbox).notifications
    find_due, sizes = notifications.find_due, list[int]()

    async def counted(*args: Any) -> Any:
        rows = await find_due(*args)
        sizes.append(len(rows))
        return rows

    notifications.find_due = counted
    return sizes


async def test_a_fully_read_backlog_is_not_read_again_when_half_done(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On databases where no loop polls; on the others a busy loop reads every 20 ms."""
    monkeypatch.setattr(shard_run, "_CLOCKS_DIFFER", 3600)  # the second read after a takeover, for clocks that differ
    number = FIRST_WINDOW - 10
    async with opened(Outbox(postgres_url, namespace="app", settings=QUIET)) as outbox:
        outbox.handler(MoneyDeposited, name="h")(Journal())
        await outbox.executor.execute(Emit(tuple(range(number))))
        async with outbox.running(handling=False):
            await eventually(lambda: counted(outbox, undelivered=0))
        sizes = counted_finds(outbox)
        async with outbox.running(fanout=False):
            await eventually(lambda: counted(outbox, SUCCEEDED=number))

    assert sizes == [number]


async def counted(outbox: Outbox, **wanted: int) -> bool:
    counts = await outbox.admin.counts()
    return all(counts[name] == number for name, number in wanted.items())


@pytest.mark.real_time("shows that no second sweep follows")
@pytest.mark.above_statements
async def test_one_sweep_is_scheduled_however_often_rows_are_read(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUIET)
    outbox.handler(MoneyDeposited, name="h")(Journal())
    async with outbox.running():
        await eventually(lambda: cursors_of(outbox))
        await asyncio.sleep(0.1)  # the first reads are over
        [source] = cursors_of(outbox).values()
        source.sweeps = False
        woken: list[bool] = []
        signals: Any = Signals()  # instead of the signals that other parts of the shard set
        signals.find.set = lambda: woken.append(True)
        dispatcher_of(outbox)._state.signals = signals
        for _ in range(5):
            dispatcher_of(outbox)._finder._learn([(source, DueQuery("h", 10))], [], 0.0, utc_now())
        await asyncio.sleep(1.5 * SWEEP_IN_FLIGHT)

        assert woken == [True]


SMALL = Settings(fanout_batch_size=10, notify=False, fanout_poll_delay="1h")


@needs_many_writers
async def test_reading_a_backlog_in_batches_misses_no_late_commit(
    make_outbox: MakeOutbox, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_position, "SWEEP_IN_BACKLOG", 60.0)  # a slow machine does not sweep in between either
    outbox, journal = await make_outbox(settings=SMALL), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    events = database_of(outbox).events
    fan_out, requests = events.fan_out, list[Any]()
    async with open_transaction(look) as (connection, commit):
        await outbox.record(connection, MoneyDeposited(uuid4(), Decimal(1000)), action="Late")
        await outbox.executor.execute(Emit(tuple(range(55))))

        async def watched(*args: Any, **options: Any) -> Any:
            requests.append(args[-1].after.get("MoneyDeposited"))
            if len(requests) == 3:
                await commit()
            return await fan_out(*args, **options)

        events.fan_out = watched
        await outbox.drain()

    assert sorted(journal.amounts) == [*range(55), 1000]
    behind = [sequence for sequence in requests if sequence is not None]
    assert requests[0] is None  # no position is known yet
    assert len(behind) >= 4
    assert behind == sorted(behind)
    assert requests[-1] is None  # the last sweep finds late commits


@needs_many_writers
async def test_under_load_recent_positions_are_used_without_losing_late_commits(
    make_outbox: MakeOutbox, look: Look
) -> None:
    outbox, journal = await make_outbox(settings=QUIET), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    events = database_of(outbox).events
    fan_out, bounds = events.fan_out, list[int]()

    async def watched(*args: Any, **options: Any) -> Any:
        bounds.extend(args[-1].after.values())
        return await fan_out(*args, **options)

    events.fan_out = watched
    amounts = count()

    async def load() -> None:
        await outbox.executor.execute(Emit(tuple(next(amounts) for _ in range(2 * FEW))))

    async def is_bounded() -> bool:
        await load()
        return bool(bounds)

    async def has_come() -> bool:
        await load()
        return -1 in journal.amounts

    async with open_transaction(look) as (connection, commit):
        await outbox.record(connection, MoneyDeposited(uuid4(), Decimal(-1)), action="Late")
        async with outbox.running():
            await eventually(is_bounded)
            await commit()
            await eventually(has_come)
            number = next(amounts)
            await eventually(lambda: counted(outbox, undelivered=0, SUCCEEDED=number + 1))

    assert min(bounds) > min(row["sequence"] for row in await look.events())
    assert sorted(journal.amounts) == [-1, *range(number)]


@pytest.mark.parametrize("topic", [None, "audit"], ids=["by-type", "by-topic"])
async def test_a_backlog_is_read_from_the_last_position(make_outbox: MakeOutbox, look: Look, topic: str | None) -> None:
    outbox = await make_outbox(settings=SMALL)
    if topic:
        outbox.handler(topic=topic, name="h")(Journal())
    else:
        outbox.handler(MoneyDeposited, name="h")(Journal())
    await outbox.drain()  # announces it
    async with outbox.transaction("Deposits") as tx:
        for amount in range(4):
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), topic=topic)
    sequences = [row["sequence"] for row in await look.events()]
    key, now = f"#{topic}" if topic else "MoneyDeposited", utc_now()
    events = database_of(outbox).events

    done = await events.fan_out(FanoutRequest("app", now, now - timedelta(days=1), {key: 2}, 10, {key: sequences[1]}))

    expected = sequences[:2] if look.is_file else sequences[2:]  # SQLite has no dead index entries to skip
    assert (done.events, set(done.full)) == ({key: 2}, {key})
    assert done.reached == ({} if look.is_file else {key: sequences[3]})
    assert [row["sequence"] for row in await look.notifications()] == expected


@pytest.mark.parametrize(("ordered", "found"), [(True, {"MoneyDeposited": 3}), (False, {})])
@pytest.mark.not_on("sqlite", why="SQLite does not continue a backlog from a position")
async def test_an_ordered_handler_never_skips_an_event_committed_late(
    make_outbox: MakeOutbox, look: Look, *, ordered: bool, found: dict[str, int]
) -> None:
    outbox = await make_outbox(settings=SMALL)
    outbox.handler(MoneyDeposited, name="h", ordered=ordered)(Journal())
    await outbox.drain()  # announces it
    await outbox.executor.execute(Emit((1, 2, 3)))

    now, far_behind = utc_now(), {"MoneyDeposited": 10**9}
    events = database_of(outbox).events
    done = await events.fan_out(
        FanoutRequest("app", now, now - timedelta(days=1), {"MoneyDeposited": 10}, 10, far_behind)
    )

    assert done.events == found


async def test_a_backlog_of_many_types_is_finished(make_outbox: MakeOutbox) -> None:
    """Beyond some dozens MySQL and MariaDB keep no positions."""
    outbox, journal = await make_outbox(settings=Settings(fanout_batch_size=100, notify=False)), Journal()
    types = [type(Event)(f"Type{number}", (Numbered,), {"__module__": __name__}) for number in range(100)]
    outbox.handler(*types, name="h")(journal)
    async with outbox.transaction("Emit") as tx:
        for number in range(500):
            tx.emit(types[number % len(types)](number))

    assert (await outbox.drain()).succeeded == 500
    assert sorted(envelope.event.number for envelope in journal.envelopes) == list(range(500))


@needs_many_writers
async def test_a_locked_event_blocks_no_other(make_outbox: MakeOutbox, look: Look) -> None:
    """A predecessor may hang in its transaction."""
    outbox, journal = await make_outbox(settings=QUIET), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    await outbox.drain()  # announces it
    await outbox.executor.execute(Emit((1, 2, 3)))
    events, now = database_of(outbox).events, utc_now()

    async def fan_out() -> int:
        done = await events.fan_out(FanoutRequest("app", now, now - timedelta(days=1), {}, 10, {}))
        return sum(done.events.values())

    async with open_transaction(look) as (connection, commit):
        lock = f"SELECT id FROM eventlog.events WHERE sequence = {(await look.events())[1]['sequence']} FOR UPDATE"
        await (mysql.fetch(connection, lock) if look.driver == "aiomysql" else connection.fetch(lock))
        assert [await fan_out(), await fan_out()] == [2, 0]
        await outbox.executor.execute(Emit((4,)))
        assert await fan_out() == 1
        await commit()
    assert await fan_out() == 1
    await outbox.drain()
    assert sorted(journal.amounts) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.real_time("counts the reads of a second")
@pytest.mark.parametrize(("fans_out", "ordered"), [(True, False), (False, False), (True, True)])
async def test_a_process_that_fans_out_does_not_poll_for_notifications(
    make_outbox: MakeOutbox, fans_out: bool, ordered: bool
) -> None:
    """Unless a handler may have to wait for handlers of another process; where wake-ups exist, no read is needed."""
    outbox = await make_outbox(settings=QUIET)
    wakes = database_of(outbox).wakes_across_processes
    notifications = watch(outbox, "notifications")
    outbox.handler(MoneyDeposited, name="h", ordered=ordered)(Journal())

    async with outbox.running(fanout=fans_out):
        if wakes or (fans_out and not ordered):
            await eventually(lambda: notifications.count("find_due") >= 1)
            await asyncio.sleep(1)
            assert notifications.count("find_due") <= 6
        else:
            await eventually(lambda: notifications.count("find_due") >= 10)


@pytest.mark.real_time("the pauses between polls depend on how long nothing was found")
@pytest.mark.above_statements
async def test_events_of_a_process_without_wakeups_are_found_quickly(make_outbox: MakeOutbox) -> None:
    silent, outbox = await make_outbox(settings=QUIET), await make_outbox(settings=QUIET)
    journal = Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)

    async with outbox.running():
        work = run_of(outbox)
        await asyncio.sleep(2 * LONGEST_GAP)  # until fan-out has stopped reading for what it was woken for
        work.loops.fanout._schedule._delay = lambda: 0.05
        work.loops.fanout.wake()
        await asyncio.sleep(2 * LONGEST_GAP)
        await silent.executor.execute(Emit((1,)))
        await eventually(lambda: journal.amounts == [1])
        work.loops.fanout._schedule._delay = lambda: 3600.0
        await asyncio.sleep(2 * LONGEST_GAP)
        await silent.executor.execute(Emit((2,)))
        await eventually(lambda: journal.amounts == [1, 2])
