"""A handler name without a process is reported within minutes, and a name with a process never is."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from outboxio import Outbox, Settings
from outboxio.cli.commands.status import status
from outboxio.handlers.options import LONGEST_UNSEEN
from outboxio.health.facts import GONE_AFTER
from outboxio.operations.stranded import StrandedWatch
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import database_of, run_of
from tests.kit.storage import Store

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]

A_WHILE = GONE_AFTER + timedelta(seconds=1)


async def deployed(make_outbox: MakeOutbox, clock: MovableClock, name: str, **options: Any) -> Outbox:
    """A version of the application in which the handler has this name, and fails."""
    outbox = await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name=name, **options)(Journal(lambda envelope: ValueError()))
    return outbox


async def test_what_a_rename_without_an_alias_leaves_behind_is_found(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    before = await deployed(make_outbox, clock, "confirmation-email")
    await before.executor.execute(Emit((1, 2)))
    await before.drain()
    made = clock.now()
    assert await before.admin.stranded() == []

    clock.advance(A_WHILE)
    after = await deployed(make_outbox, clock, "order-confirmation")
    await after.executor.execute(Emit((3,)))
    await after.drain()

    [stranded] = await after.admin.stranded()
    assert (stranded.handler_name, stranded.unfinished, stranded.shard) == ("confirmation-email", 3, "default")
    assert (stranded.oldest_date, stranded.last_seen_date) == (made, made)
    alias = "if 'order-confirmation' is its new name, add `aliases={'confirmation-email'}` there"
    for words in ("'confirmation-email' has 3 unfinished", "the oldest of 2030-01-01", alias):
        assert words in str(stranded)
    assert (await after.admin.counts())["unroutable"] == 0


async def test_only_a_handler_of_the_same_events_may_be_the_new_name(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    before = await deployed(make_outbox, clock, "confirmation-email")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    clock.advance(A_WHILE)
    after = await make_outbox(clock=clock)
    after.handler(WalletOpened, name="welcome")(Journal())
    after.handler(WalletOpened, MoneyDeposited, name="audit")(Journal())
    await after.drain()

    [stranded] = await after.admin.stranded()
    assert stranded.successors == ()
    assert str(stranded).endswith("add `aliases={'confirmation-email'}` to the handler that has replaced it")


async def test_a_rename_with_an_alias_strands_nothing(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    before = await deployed(make_outbox, clock, "confirmation-email")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    clock.advance(A_WHILE)
    after = await deployed(make_outbox, clock, "order-confirmation", aliases={"confirmation-email"})
    await after.drain()

    assert await after.admin.stranded() == []


async def test_while_every_process_is_down_nothing_is_stranded(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    for name in ("one", "two"):
        outbox = await deployed(make_outbox, clock, name)
        await outbox.executor.execute(Emit((1,)))
        await outbox.drain()
        clock.advance(LONGEST_UNSEEN)  # as far apart as living processes may be seen
    clock.advance("3h")

    assert await outbox.admin.stranded() == []


async def test_names_without_unfinished_rows_or_of_another_namespace_are_not_stranded(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    done = await make_outbox(clock=clock)
    done.handler(MoneyDeposited, name="done")(Journal())
    await done.executor.execute(Emit((1,)))
    await done.drain()
    stranger = await make_outbox("stranger", clock=clock)
    clock.advance(A_WHILE)
    other = await deployed(make_outbox, clock, "other")
    await other.drain()

    assert await other.admin.stranded() == await stranger.admin.stranded() == []


async def test_what_was_not_seen_for_longer_than_that_counts_is_unroutable_instead(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    before = await deployed(make_outbox, clock, "gone")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    clock.advance("8d")
    after = await deployed(make_outbox, clock, "other")
    await after.drain()

    assert await after.admin.stranded() == []


async def test_rows_that_are_blocked_are_stranded_like_others(outbox: Outbox, look: Look, clock: MovableClock) -> None:
    store = Store(outbox, look)
    await store.subscribe("ledger", ordered=True)
    await store.insert_notifications("k", "k", "k")
    await store.put("BLOCKED", 2, 3, name="ledger")
    clock.advance(A_WHILE)
    outbox.handler(WalletOpened, name="other")(Journal())
    await outbox.drain()

    [stranded] = await outbox.admin.stranded()
    assert stranded.unfinished == 3
    assert stranded.oldest_date is not None
    await store.put("BLOCKED", 1, name="ledger")
    [stranded] = await outbox.admin.stranded()
    assert (stranded.unfinished, stranded.oldest_date) == (3, None)
    assert "the oldest" not in str(stranded)


async def test_status_tells_people_and_machines(
    make_outbox: MakeOutbox, clock: MovableClock, capsys: pytest.CaptureFixture[str]
) -> None:
    before = await deployed(make_outbox, clock, "confirmation[-email]")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    clock.advance(A_WHILE)
    after = await deployed(make_outbox, clock, "order-confirmation")
    await after.drain()

    assert await status(after, as_json=False) == 0
    told = capsys.readouterr().out
    assert "1 notification of `confirmation[-email]` waits, and no process has such a handler" in " ".join(told.split())
    assert await status(after, as_json=True) == 0
    findings = json.loads(capsys.readouterr().out)["overview"]["findings"]
    assert ("unroutable", "confirmation[-email]") in [(one["rule"], one["handler"]) for one in findings]


# --- the log -------------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.name == "outboxio.operations.stranded" and r.levelno == logging.WARNING
    ]


async def test_whoever_fans_out_warns_once_for_each_name_and_again_when_it_comes_back(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    before = await deployed(make_outbox, clock, "confirmation-email")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    after = await deployed(make_outbox, clock, "order-confirmation")
    watch = StrandedWatch("app", database_of(after), clock, timedelta(days=7))

    await watch.look()
    clock.advance(A_WHILE)
    await after.drain()
    for _ in range(3):
        await watch.look()
    assert len(warnings(caplog)) == 1
    assert "handler 'confirmation-email' has 1 unfinished notifications" in warnings(caplog)[0]
    told = [vars(record) for record in caplog.records if record.name == "outboxio.operations.stranded"]
    assert [record["outboxio_handler"] for record in told] == ["confirmation-email"]

    await before.drain()  # it was taken back
    await watch.look()
    clock.advance(A_WHILE)
    await after.drain()
    await watch.look()
    assert len(warnings(caplog)) == 2


async def test_a_fleet_that_was_just_started_is_given_time_to_say_what_it_has(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    workers = await deployed(make_outbox, clock, "by-workers")
    await workers.executor.execute(Emit((1,)))
    await workers.drain()
    clock.advance("3h")  # everything was down
    web = await deployed(make_outbox, clock, "by-web")
    watch = StrandedWatch("app", database_of(web), clock, timedelta(days=7))
    await web.drain()
    await watch.look()
    clock.advance(GONE_AFTER - timedelta(seconds=1))
    await watch.look()
    await workers.drain()  # the workers are up as well
    clock.advance("2s")
    await web.drain()
    await watch.look()

    assert warnings(caplog) == []


async def test_a_running_process_warns(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    before = await deployed(make_outbox, clock, "confirmation-email")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    after = await make_outbox(clock=clock, settings=Settings(fanout_poll_delay="10ms"))
    after.handler(MoneyDeposited, name="order-confirmation")(Journal())

    async with after.running():
        work = run_of(after)
        # Its own pause between two looks is half a minute.
        await eventually(lambda: work.loops.housekeeping.wake() or work.housekeeping.stranded._begun)
        clock.advance(A_WHILE)
        await work.announcer.announce_if_due()
        await eventually(lambda: work.loops.housekeeping.wake() or warnings(caplog))
    assert "'confirmation-email' has 1 unfinished notifications" in warnings(caplog)[0]
