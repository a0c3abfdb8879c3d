"""While a transaction holds a snapshot, the database cannot clean up, and sweeps take longer and longer.

Sweeps are then rare. Most of these tests allow no sweep at all: the rows are found without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from decimal import Decimal
from itertools import count
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outboxio import Event, EventEnvelope, Outbox, RetryPolicy, Settings
from outboxio.model.lock_name import LockName
from outboxio.model.notification import FIRST_POSITION, Position
from outboxio.model.outcome import Lease
from outboxio.storage.protocols import FanoutRequest
from outboxio.support import scan_position as paces
from outboxio.support import scan_position as trails
from outboxio.support.scan_position import Pace
from tests.kit import mysql
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, opened
from tests.kit.inside import cursors_of, dispatcher_of, fanout_of, run_of
from tests.kit.probes import open_transaction
from tests.kit.spies import counters, deposits, watch

pytestmark = [pytest.mark.with_tables, pytest.mark.one_of_family]

SETTINGS = Settings(fanout_poll_delay="50ms", handling_poll_delay="50ms", notify=False)
SHORT = 20  # rows


@pytest.fixture
def no_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow no sweep after the first one, unless a row needs it at once."""

    def put_off(self: Pace, started: float, ended: float, rows: int, *, is_sweep: bool) -> None:
        self._next = float("inf") if is_sweep else self._next

    monkeypatch.setattr(Pace, "learn", put_off)


@pytest.fixture
def short_trails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads between sweeps start some dozens of rows, or 1 s, before the scan position.

    Without sweeps, a row of the test that commits later than that after its position was passed is never found. On a
    busy machine a COMMIT took more than 0.1 s.
    """
    monkeypatch.setattr(trails, "FEW_LATE", SHORT)
    monkeypatch.setattr(trails, "LATE", 1.0)


class Traffic:
    """A few events from time to time, and the scan position of fan-out."""

    def __init__(self, outbox: Outbox, journal: Journal) -> None:
        self.outbox, self.journal = outbox, journal
        self.numbers = count()
        self.behind: list[int] = []
        self.closed: list[int] = []
        self._events = watch(outbox, "events")
        self._events.trouble["fan_out"] = self._note

    async def _note(self, fan_out: Any, request: FanoutRequest) -> Any:
        self.behind += [request.behind] if request.behind is not None else []
        self.closed += [request.closed] if request.closed is not None else []
        return await fan_out(request)

    async def emit(self, number: int = 1) -> None:
        """Emit events in turn, each after the previous one was handled."""
        for _ in range(number):
            amount = next(self.numbers)
            await self.outbox.executor.execute(Emit((amount,)))
            await self.has_handled(amount)

    async def has_handled(self, amount: int) -> None:
        await eventually(lambda: amount in self.journal.amounts)

    async def emits_until(self, holds: Callable[[], bool]) -> None:
        async def emit() -> bool:
            await self.emit()
            return holds()

        await eventually(emit)

    async def passes(self, sequence: int) -> None:
        """Wait until fan-out no longer reads for an event of this sequence."""
        await self.emits_until(lambda: bool(self.behind) and self.behind[-1] > sequence)

    async def closes(self, sequence: int) -> None:
        """Wait until fan-out no longer reads for such an event for ordered handlers either."""
        await self.emits_until(lambda: self.closed[-1] > sequence)


@asynccontextmanager
async def traffic(url: str, *, name: str = "h") -> AsyncIterator[Traffic]:
    async with opened(Outbox(url, namespace="app", settings=SETTINGS)) as outbox:
        outbox.handler(MoneyDeposited, name=name)(journal := Journal())
        light = Traffic(outbox, journal)
        async with outbox.running():
            yield light


@asynccontextmanager
async def late_event(
    light: Traffic, look: Look, amount: int
) -> AsyncIterator[tuple[int, Callable[[], Awaitable[None]]]]:
    """An event in an open transaction: yields its sequence and the commit."""
    async with open_transaction(look) as (connection, commit):
        await light.outbox.record(connection, MoneyDeposited(uuid4(), Decimal(amount)), action="Late")
        text = "SELECT max(sequence) FROM eventlog.events"
        if look.driver == "aiomysql":
            [row] = await mysql.fetch(connection, text)
            sequence = next(iter(row.values()))
        else:
            sequence = await connection.fetchval(text)
        yield sequence, commit


async def test_an_event_overtaken_by_few_is_found_without_a_sweep(
    server_url: str, no_sweeps: None, short_trails: None
) -> None:
    async with traffic(server_url) as light:
        await light.emits_until(lambda: len(light.behind) > 0)
        await light.emit(3 * SHORT)
        async with late_event(light, Look(server_url), -1) as (_, commit):
            await light.emit(SHORT // 2)
            await commit()
            await light.has_handled(-1)


async def test_an_event_overtaken_by_many_is_found_by_the_next_sweep(
    server_url: str, no_sweeps: None, short_trails: None
) -> None:
    async with traffic(server_url) as light:
        async with late_event(light, Look(server_url), -1) as (sequence, commit):
            await light.passes(sequence)
            await commit()
        await light.emit(3)
        assert -1 not in light.journal.amounts, "found without a sweep"
        fanout_of(light.outbox)._scan._pace.allow_now()
        await light.has_handled(-1)


async def test_a_drain_ends_with_a_sweep_however_long_it_takes(
    server_url: str, no_sweeps: None, short_trails: None
) -> None:
    async with traffic(server_url) as light:
        async with late_event(light, Look(server_url), -1) as (sequence, commit):
            await light.passes(sequence)
            await commit()
        await light.outbox.drain()
        assert -1 in light.journal.amounts


@pytest.mark.one_of_family(False)
async def test_an_event_of_a_key_committed_late_is_never_overtaken(
    postgres_url: str, no_sweeps: None, short_trails: None
) -> None:
    """Rounds for ordered handlers are not sweeps either, where the database can tell which positions are closed."""
    look, seen = Look(postgres_url), list[tuple[str | None, int]]()
    async with traffic(postgres_url) as light:
        pass
    async with Outbox(postgres_url, namespace="app", settings=SETTINGS) as outbox:

        @outbox.handler(MoneyDeposited, name="h", ordered=True)
        async def ledger(envelope: EventEnvelope[MoneyDeposited]) -> None:
            seen.append((envelope.ordering_key, int(envelope.event.amount)))
            await light.journal(envelope)

        light = Traffic(outbox, light.journal)
        async with outbox.running():
            await light.emits_until(lambda: len(light.closed) > 0)
            for number in range(3):
                async with open_transaction(look) as (connection, commit):
                    await connection.execute("SELECT pg_current_xact_id()")  # as a row lock does
                    deposit = MoneyDeposited(uuid4(), Decimal(-10 * number - 1))
                    await outbox.record(connection, deposit, action="Late", ordering_key=f"late {number}")
                    sequence = await connection.fetchval("SELECT max(sequence) FROM eventlog.events")
                    await light.passes(sequence)
                    assert light.closed[-1] < sequence, "an earlier transaction is still open"
                    await commit()
                async with outbox.transaction("Next") as tx:
                    deposit = MoneyDeposited(uuid4(), Decimal(-10 * number - 2))
                    tx.emit(deposit, ordering_key=f"late {number}")
                await light.has_handled(-10 * number - 2)
                await light.closes(sequence)

    for number in range(3):
        in_order = [-10 * number - 1, -10 * number - 2]
        assert [amount for key, amount in seen if key == f"late {number}"] == in_order


@pytest.mark.one_of_family(False)
async def test_a_row_that_was_locked_is_found_although_sweeps_are_deferred(
    server_url: str, no_sweeps: None, short_trails: None
) -> None:
    look = Look(server_url)
    async with traffic(server_url) as light:
        pass
    async with Outbox(server_url, namespace="app", settings=SETTINGS) as outbox:
        wallets, journal = Journal(), Journal()
        outbox.handler(WalletOpened, name="wallets", delivery="transactional")(wallets)
        outbox.handler(MoneyDeposited, name="h")(journal)
        light = Traffic(outbox, journal)
        async with outbox.running(handling=False):
            async with outbox.transaction("Open") as tx:
                tx.emit(WalletOpened(uuid4()))
            await eventually(lambda: made(look, 1))
        notifications = watch(outbox, "notifications")
        async with open_transaction(look) as (connection, commit):
            [row] = await look.notifications()
            lock = f"SELECT id FROM eventlog.event_notifications WHERE id = '{row['id']}' FOR UPDATE"
            await (mysql.fetch(connection, lock) if look.driver == "aiomysql" else connection.fetch(lock))
            async with outbox.running():
                await light.emits_until(lambda: begins_further_on(notifications.calls, "h"))
                await light.emit(3 * SHORT)
                assert len(wallets) == 0
                await commit()
                await wallets.calls(1)


async def made(look: Look, number: int) -> bool:
    return len(await look.notifications()) == number


def begins_further_on(calls: list[tuple[str, tuple[Any, ...]]], name: str, position: Position = FIRST_POSITION) -> bool:
    """True if the last read of a handler's due rows started after earlier rows."""
    reads = [args[2] for call, args in calls if call == "find_due"]
    return bool(reads) and any(w.handler_name == name and w.after > position for w in reads[-1])


class Closed(Event, strict_priority=True):
    number: int


async def test_a_drain_finishes_although_sweeps_are_deferred(
    database_url: str, no_sweeps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for period in ("FEW_LATE", "LATE", "SWEEP_NEARBY"):
        monkeypatch.setattr(trails, period, 0)
    async with opened(Outbox(database_url, namespace="app", settings=SETTINGS)) as outbox:
        outbox.handler(MoneyDeposited, name="h")(Journal())
        for _ in range(3):
            await outbox.executor.execute(Emit(tuple(range(3 * SHORT))))
            assert (await outbox.drain(timeout="60s")).succeeded == 3 * SHORT


async def test_work_for_another_process_is_found_although_sweeps_are_deferred(
    database_url: str, no_sweeps: None, short_trails: None
) -> None:
    first, second, slow = Journal(), Journal(), asyncio.Event()

    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(opened(Outbox(database_url, namespace="app", settings=SETTINGS)))
            for _ in range(2)
        ]

        @one.handler(Closed, name="first", priority=0)
        async def handle_first(envelope: EventEnvelope[Closed]) -> None:
            await first(envelope)
            await slow.wait()

        two.handler(Closed, name="second", priority=1)(second)
        two.handler(MoneyDeposited, name="h")(journal := Journal())
        light = Traffic(two, journal)
        await stack.enter_async_context(one.running(fanout=False))
        await stack.enter_async_context(two.running())
        async with one.transaction("Close") as tx:
            tx.emit(Closed(1))
        await first.calls(1)
        await light.emit(SHORT)
        assert len(second) == 0
        slow.set()
        await second.calls(1)


async def test_a_stuck_handlers_row_is_found_although_sweeps_are_deferred(
    database_url: str, no_sweeps: None, short_trails: None
) -> None:
    calls, released = list[int](), asyncio.Event()
    async with opened(Outbox(database_url, namespace="app", settings=SETTINGS)) as outbox:

        @outbox.handler(WalletOpened, name="stubborn", timeout="50ms", retry=RetryPolicy(base="50ms"))
        async def stubborn(envelope: EventEnvelope[WalletOpened]) -> None:
            calls.append(envelope.attempt)
            while len(calls) == 1 and not released.is_set():
                with suppress(asyncio.CancelledError):
                    await released.wait()

        outbox.handler(MoneyDeposited, name="h")(journal := Journal())
        notifications, light = watch(outbox, "notifications"), Traffic(outbox, journal)
        async with outbox.running():
            async with outbox.transaction("Open") as tx:
                tx.emit(WalletOpened(uuid4()))
            await eventually(lambda: counters(outbox).failed == 1)
            [row] = await outbox.admin.list(handler="stubborn")
            await light.emits_until(
                lambda: begins_further_on(notifications.calls, "stubborn", (row.next_retry_at, row.sequence))
            )
            assert calls == [1]
            released.set()
            await eventually(lambda: calls == [1, 2])


async def test_a_row_with_a_refused_outcome_is_found_without_a_sweep(
    database_url: str, no_sweeps: None, short_trails: None
) -> None:
    """An operator emptied a table while its handler was running."""
    look, calls, released = Look(database_url), list[int](), asyncio.Event()
    async with opened(Outbox(database_url, namespace="app", settings=SETTINGS)) as outbox:

        @outbox.handler(WalletOpened, name="slow")
        async def slow(envelope: EventEnvelope[WalletOpened]) -> None:
            calls.append(envelope.attempt)
            await released.wait()

        outbox.handler(MoneyDeposited, name="h")(journal := Journal())
        notifications, light = watch(outbox, "notifications"), Traffic(outbox, journal)
        async with outbox.running():
            async with outbox.transaction("Open") as tx:
                tx.emit(WalletOpened(uuid4()))
            await eventually(lambda: calls == [1] and fanout_of(outbox).notifications == 1)  # fan-out has committed
            [row] = await outbox.admin.list(handler="slow")
            await light.emits_until(
                lambda: begins_further_on(notifications.calls, "slow", (row.next_retry_at, row.sequence))
            )
            await look.fetch("DELETE FROM {leases}")
            released.set()
            await eventually(lambda: settled(look, 1))
            assert calls == [1], "the outcome is written under the new term, without another run"


async def settled(look: Look, number: int) -> bool:
    rows = await look.fetch("SELECT state FROM {event_notifications} WHERE handler_name = 'slow'")
    return [row["state"] for row in rows] == ["SUCCEEDED"] * number


async def test_a_fan_out_takeover_starts_with_a_sweep(server_url: str, no_sweeps: None, short_trails: None) -> None:
    """Another process has fanned out: the scan position of this process is outdated."""
    async with traffic(server_url) as light:
        async with late_event(light, Look(server_url), -1) as (sequence, commit):
            await light.passes(sequence)
            await commit()
        name = LockName("app", "fanout")
        run_of(light.outbox).lock_taken(name, Lease(name.lease, "", 2))
        await light.has_handled(-1)


async def test_an_urgent_sweep_of_one_name_delays_no_other_sweep(database_url: str, no_sweeps: None) -> None:
    async with traffic(database_url) as light:
        await light.emit()
        pace = dispatcher_of(light.outbox)._finder.pace = Pace()
        pace._next = (much_later := asyncio.get_running_loop().time() + 3600)
        notifications = watch(light.outbox, "notifications")
        for source in cursors_of(light.outbox).values():
            source.sweep_soon()
        await eventually(lambda: swept(notifications.calls))
        await light.emit()
        assert pace._next == much_later


def swept(calls: list[tuple[str, tuple[Any, ...]]]) -> bool:
    return any(call == "find_due" and any(w.after == FIRST_POSITION for w in args[2]) for call, args in calls)


@asynccontextmanager
async def held_snapshot(look: Look) -> AsyncIterator[None]:
    """A transaction with a stable snapshot that reads no row."""
    if look.driver == "aiomysql":
        async with mysql.connected(look.url) as connection:
            await mysql.fetch(connection, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await mysql.fetch(connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
            yield
        return
    connection = await asyncpg.connect(look.url)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetchval("SELECT count(*) FROM eventlog.events")
            yield
    finally:
        await connection.close()


MANY, AT_ONCE = 15_000, 1000


@pytest.mark.one_of_family(False)
async def test_under_a_held_snapshot_light_traffic_does_not_rescan_handled_rows(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paces, "UNNOTICED", 0.0005)  # a rescan would already show with fewer rows than in production
    async with traffic(server_url) as light, held_snapshot(Look(server_url)):
        for _ in range(MANY // AT_ONCE):
            await deposits(light.outbox, AT_ONCE)
        await eventually(lambda: counters(light.outbox).succeeded == MANY, timeout=60)
        notifications = watch(light.outbox, "notifications")
        light.numbers = count(MANY)
        reached = max(row["sequence"] for row in await Look(server_url).events())
        await light.emits_until(
            lambda: any(behind > reached for behind in light.behind) and begins_further_on(notifications.calls, "h")
        )
