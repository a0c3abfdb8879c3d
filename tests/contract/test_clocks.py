"""Clock changes while an outbox runs: the wall clock of a host, and the clock of a database."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace

from outboxio import Batch, EventEnvelope, Outbox, Settings
from outboxio.storage.connections.driver import Proof
from outboxio.support import clock as clocks
from outboxio.support import ids, machine
from outboxio.support.clock import utc_now
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import clock_of, database_of
from tests.kit.probes import MakeOutbox

DAYS = timedelta(days=8)  # longer than a notification, a subscription and a finished row last by default
NONE = timedelta()
SOON = timedelta(milliseconds=300)
SETTINGS = Settings(lock_heartbeat="100ms", fanout_poll_delay="100ms", handling_poll_delay="100ms")


class DatabaseClock:
    """The clock of a database, which jumps when a test sets ``jump``.

    The driver's response is changed on its way to outboxio, so the text of the statements does not matter.
    """

    def __init__(self) -> None:
        self.jump = NONE

    def control(self, outbox: Outbox) -> Outbox:
        database = database_of(outbox)
        make_lock, now = database.cluster_lock, database.now

        def cluster_lock(*args: Any) -> Any:
            lock = make_lock(*args)
            at_the_driver = getattr(lock, "_inner", lock)  # of a lock that lives in a thread
            heartbeat = at_the_driver.heartbeat

            async def jumping_heartbeat() -> Proof:
                proof: Proof = await heartbeat()
                return replace(proof, database_now=proof.database_now + self.jump)

            at_the_driver.heartbeat = jumping_heartbeat
            return lock

        async def jumping_now() -> datetime:
            unchanged: datetime = await now()
            return unchanged + self.jump

        database.cluster_lock, database.now = cluster_lock, jumping_now
        return outbox


@pytest.fixture
def database_clock() -> DatabaseClock:
    return DatabaseClock()


@pytest.fixture
def quick_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """outboxio follows a jump quickly, and the jump settles only when a test requests it."""
    monkeypatch.setattr(clocks, "FOLLOWED_AFTER", SOON)


async def noticed(*outboxes: Outbox) -> None:
    await eventually(lambda: all(clock_of(outbox)._jump is not None for outbox in outboxes))


def has_noticed(clock: Any, jump: timedelta) -> bool:
    """True if the clock has noticed the jump, and has followed it by now or not."""
    return clock._jump is not None or bool(clock.ahead) == bool(jump)


async def unnoticed(*outboxes: Outbox) -> None:
    await eventually(lambda: all(clock_of(outbox)._jump is None for outbox in outboxes))


async def followed(*outboxes: Outbox) -> None:
    await eventually(lambda: all(clock_of(outbox).ahead for outbox in outboxes))


async def pair(make_outbox: MakeOutbox, database_clock: DatabaseClock) -> tuple[Outbox, Outbox, Journal, Journal]:
    """An instance that fans out, and another instance, each with a handler."""
    outboxes = [database_clock.control(await make_outbox(settings=SETTINGS)) for _ in range(2)]
    journals = [Journal(), Journal()]
    for outbox, journal, name in zip(outboxes, journals, ("here", "elsewhere"), strict=True):
        outbox.handler(MoneyDeposited, name=name)(journal)
    return (*outboxes, *journals)  # type: ignore[return-value]  # two and two


async def all_are(look: Look, **states: int) -> bool:
    return await look.states() == states


# --- the database's clock --------------------------------------------------------------------------


async def test_a_short_jump_of_the_database_clock_affects_no_notification(
    make_outbox: MakeOutbox, look: Look, database_clock: DatabaseClock
) -> None:
    one, other, here, elsewhere = await pair(make_outbox, database_clock)
    async with one.running(), other.running(fanout=False):
        database_clock.jump = DAYS
        await noticed(one, other)
        for number in range(20):
            await one.executor.execute(Emit((number,)))
        await here.calls(20)
        await elsewhere.calls(20)
        database_clock.jump = NONE
        await unnoticed(one, other)
        await one.executor.execute(Emit((20,)))
        await elsewhere.calls(21)
        await eventually(lambda: all_are(look, SUCCEEDED=42))

    assert sorted(here.amounts) == sorted(elsewhere.amounts) == list(range(21))


async def test_a_followed_jump_expires_and_unsubscribes_nothing(
    make_outbox: MakeOutbox, look: Look, database_clock: DatabaseClock, quick_to_follow: None
) -> None:
    one, other, here, elsewhere = await pair(make_outbox, database_clock)
    number = 0
    async with one.running(), other.running(fanout=False):
        for jump in (DAYS, NONE):
            database_clock.jump = jump
            await eventually(lambda jump=jump: all(has_noticed(clock_of(outbox), jump) for outbox in (one, other)))
            while jump and not all(clock_of(outbox).ahead for outbox in (one, other)):  # first one, then the other one
                await one.executor.execute(Emit((number,)))
                number += 1
                await here.calls(number)
            await unnoticed(one, other)
            await one.executor.execute(Emit((number,)))
            number += 1
            await here.calls(number)
            await elsewhere.calls(number)
        await eventually(lambda: all_are(look, SUCCEEDED=2 * number))


async def test_a_jump_does_not_remove_a_handler_without_instances(
    make_outbox: MakeOutbox, look: Look, database_clock: DatabaseClock, quick_to_follow: None
) -> None:
    one, other, here, _ = await pair(make_outbox, database_clock)
    async with other.running():
        pass
    async with one.running():
        database_clock.jump = DAYS
        await followed(one)
        await one.executor.execute(Emit((1,)))
        await eventually(lambda: all_are(look, SUCCEEDED=1, PENDING=1))
        assert {row["handler_name"] for row in await look.notifications()} == {"here", "elsewhere"}
        assert here.amounts == [1]
        assert (await one.admin.counts())["unroutable"] == 0


async def test_a_failure_during_a_jump_is_retried_and_does_not_expire(
    make_outbox: MakeOutbox, look: Look, database_clock: DatabaseClock, quick_to_follow: None
) -> None:
    outbox = database_clock.control(await make_outbox(settings=SETTINGS))
    journal = Journal(lambda envelope: ValueError("not yet"))
    outbox.handler(MoneyDeposited, name="here")(journal)
    async with outbox.running():
        async with outbox.transaction("Early") as tx:
            tx.emit(MoneyDeposited(uuid4(), Decimal(1)), available_at=utc_now() + timedelta(days=1))
        await eventually(lambda: all_are(look, PENDING=1))
        database_clock.jump = DAYS
        await journal.calls(1)
        await eventually(lambda: all_are(look, FAILED=1))


async def test_a_scheduled_batch_does_not_start_by_a_short_jump(
    make_outbox: MakeOutbox, look: Look, database_clock: DatabaseClock
) -> None:
    outbox, opened, deposited = database_clock.control(await make_outbox(settings=SETTINGS)), [], Journal()

    @outbox.handler(WalletOpened, name="nightly", batch=Batch(schedule="0 0 1 1 *"))
    async def nightly(envelopes: Sequence[EventEnvelope[WalletOpened]]) -> None:
        opened.extend(envelopes)

    outbox.handler(MoneyDeposited, name="here")(deposited)
    async with outbox.running():
        async with outbox.transaction("Open") as tx:
            tx.emit(WalletOpened(uuid4()))
        await eventually(lambda: all_are(look, PENDING=1))
        database_clock.jump = timedelta(days=400)
        await noticed(outbox)
        for number in range(3):
            await outbox.executor.execute(Emit((number,)))
            await deposited.calls(number + 1)
    assert opened == []


async def test_nothing_is_removed_until_a_jump_has_settled(
    make_outbox: MakeOutbox,
    look: Look,
    database_clock: DatabaseClock,
    quick_to_follow: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clocks, "SETTLED_AFTER", timedelta(hours=1))
    settings = Settings(lock_heartbeat="100ms", dedup_retention="7d", purge_enabled=False)
    outbox, journal = database_clock.control(await make_outbox(settings=settings)), Journal()
    outbox.handler(MoneyDeposited, name="here")(journal)
    async with outbox.running():
        await outbox.inbox.receive(
            source="bank", external_id="1", event=MoneyDeposited(uuid4(), Decimal(1)),
        )  # fmt: skip
        await eventually(lambda: all_are(look, SUCCEEDED=1))
        database_clock.jump = DAYS
        await followed(outbox)
        kept = await outbox.admin.purge()
        clock_of(outbox)._settles_at = datetime.min
        await eventually(lambda: not clock_of(outbox).ahead)
        removed = await outbox.admin.purge()

    assert (kept.notifications, kept.events, kept.consumed_events) == (0, 0, 0)
    assert (removed.notifications, removed.events, removed.consumed_events) == (1, 1, 1)


async def aged(look: Look, days: int) -> None:
    """Make all notifications older."""
    then = utc_now() - timedelta(days=days)
    earlier = then if look.driver == "asyncpg" else then.isoformat(" ", timespec="microseconds")
    await look.fetch("UPDATE {event_notifications} SET retention_from = $1, next_retry_at = $2", earlier, earlier)


async def test_after_a_week_of_downtime_old_rows_expire_at_once(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, journal = await make_outbox(settings=SETTINGS), Journal()
    outbox.handler(MoneyDeposited, name="here")(journal)
    await outbox.drain()  # announces it
    await outbox.executor.execute(Emit((1,)))
    async with outbox.running(handling=False):
        await eventually(lambda: all_are(look, PENDING=1))
    await aged(look, 8)

    async with outbox.running():
        await eventually(lambda: all_are(look, EXPIRED=1))
    assert journal.amounts == []


async def test_rows_too_old_by_a_wrong_clock_wait_until_it_settles(
    make_outbox: MakeOutbox, look: Look, database_clock: DatabaseClock
) -> None:
    """The process starts while the clock of the database or its host is wrong, which outboxio cannot detect."""
    outbox, journal = database_clock.control(await make_outbox(settings=SETTINGS)), Journal()
    outbox.handler(MoneyDeposited, name="here")(journal)
    database_clock.jump = DAYS
    await outbox.drain()  # announces it
    assert clock_of(outbox).ahead > DAYS / 2
    for number, outcome in ((1, "SUCCEEDED"), (2, "EXPIRED")):
        await outbox.executor.execute(Emit((number,)))
        async with outbox.running(handling=False):
            await eventually(lambda: fanned_out(outbox))
        await aged(look, days=1)
        async with outbox.running():
            await eventually(partial(ended, look, outcome))
            clock_of(outbox)._settles_at = datetime.min
            await eventually(lambda: not clock_of(outbox).ahead)
    assert journal.amounts == [1]


async def fanned_out(outbox: Outbox) -> bool:
    return (await outbox.admin.counts())["undelivered"] == 0


async def ended(look: Look, state: str) -> bool:
    return (await look.states()).get(state) == 1


# --- the clock of a host ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", [timedelta(hours=1), -timedelta(hours=1)], ids=["forward", "back"])
async def test_fanned_out_rows_are_due_at_once_after_a_clock_step(
    make_outbox: MakeOutbox, look: Look, monkeypatch: pytest.MonkeyPatch, step: timedelta
) -> None:
    outbox, journal = await make_outbox(settings=Settings(lock_heartbeat="1h")), Journal()
    outbox.handler(MoneyDeposited, name="here")(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((0,)))
        await journal.calls(1)
        before, real = utc_now(), time.time_ns
        latest = machine.local("ids", ids._Latest)
        monkeypatch.setattr(latest, "ns", latest.ns)  # the ids of later tests go by the right clock again
        monkeypatch.setattr(machine, "time_ns", lambda: real() + step // timedelta(microseconds=1) * 1000)
        for number in range(1, 5):
            await outbox.executor.execute(Emit((number,)))
        await journal.calls(5)
    for row in [*await look.notifications(), *await look.events()]:
        for column in {"next_retry_at", "retention_from", "created_date", "started_date", "event_date"} & {*row}:
            assert abs(datetime.fromisoformat(str(row[column])) - before) < timedelta(minutes=10), (column, row)
    in_order = [row["id"] for row in await look.events()]
    assert in_order == sorted(in_order), "ids grow with time, whatever the clock does"


async def test_an_operators_wrong_clock_does_not_affect_due_dates(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has only the clock of its host."""
    look, journal = Look(server_url), Journal(lambda envelope: ValueError("always"))
    async with Outbox(server_url, namespace="app") as outbox, Outbox(server_url, namespace="app") as operator:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="here")(journal)
        await outbox.executor.execute(Emit((1,)))
        await outbox.drain()
        [failed] = await look.notifications()
        before, real = utc_now(), time.time_ns
        latest = machine.local("ids", ids._Latest)
        monkeypatch.setattr(latest, "ns", latest.ns)  # the ids of later tests go by the right clock again
        monkeypatch.setattr(machine, "time_ns", lambda: real() + 3_600_000_000_000)
        assert (await operator.admin.retry([failed["id"] if look.driver == "asyncpg" else str(failed["id"])])).done == 1
    [row] = await look.notifications()
    assert abs(datetime.fromisoformat(str(row["next_retry_at"])) - before) < timedelta(minutes=10)
