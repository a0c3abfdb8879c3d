"""A handler name without a process is reported within minutes; a name with a process never is."""

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


async def test_rows_of_a_rename_without_an_alias_are_found(make_outbox: MakeOutbox, clock: MovableClock) -> None:
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
    for part in ("'confirmation-email' has 3 unfinished", "the oldest from 2030-01-01", alias):
        assert part in str(stranded)
    assert (await after.admin.counts())["unroutable"] == 0


async def test_only_a_handler_of_the_same_events_is_suggested(make_outbox: MakeOutbox, clock: MovableClock) -> None:
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
    assert str(stranded).endswith("add `aliases={'confirmation-email'}` to the handler that replaced it")


async def test_a_rename_with_an_alias_strands_nothing(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    before = await deployed(make_outbox, clock, "confirmation-email")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    clock.advance(A_WHILE)
    after = await deployed(make_outbox, clock, "order-confirmation", aliases={"confirmation-email"})
    await after.drain()

    assert await after.admin.stranded() == []


async def test_nothing_is_stranded_while_every_process_is_down(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    for name in ("one", "two"):
        outbox = await deployed(make_outbox, clock, name)
        await outbox.executor.execute(Emit((1,)))
        await outbox.drain()
        clock.advance(LONGEST_UNSEEN)  # as far apart as living processes may be seen
    clock.advance("3h")

    assert await outbox.admin.stranded() == []


async def test_finished_and_other_namespaces_names_are_not_stranded(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    done = await make_outbox(clock=clock)
    done.handler(MoneyDeposited, name="done")(Journal())
    await done.executor.execute(Emit((1,)))
    await done.drain()
    third = await make_outbox("other", clock=clock)
    clock.advance(A_WHILE)
    other = await deployed(make_outbox, clock, "other")
    await other.drain()

    assert await other.admin.stranded() == await third.admin.stranded() == []


async def test_names_unseen_for_too_long_are_unroutable_instead(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    before = await deployed(make_outbox, clock, "gone")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    clock.advance("8d")
    after = await deployed(make_outbox, clock, "other")
    await after.drain()

    assert await after.admin.stranded() == []


async def test_blocked_rows_are_stranded_like_others(outbox: Outbox, look: Look, clock: MovableClock) -> None:
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


async def test_status_shows_stranded_names_as_text_and_json(
    make_outbox: MakeOutbox, clock: MovableClock, capsys: pytest.CaptureFixture[str]
) -> None:
    before = await deployed(make_outbox, clock, "confirmation[-email]")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    clock.advance(A_WHILE)
    after = await deployed(make_outbox, clock, "order-confirmation")
    await after.drain()

    assert await status(after, as_json=False) == 0
    printed = capsys.readouterr().out
    assert "1 notification of `confirmation[-email]` waits, but no process has this handler" in " ".join(
        printed.split()
    )
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


async def test_each_stranded_name_is_logged_once_per_occurrence(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    before = await deployed(make_outbox, clock, "confirmation-email")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    after = await deployed(make_outbox, clock, "order-confirmation")
    watch = StrandedWatch("app", database_of(after), clock, timedelta(days=7))

    await watch.check()
    clock.advance(A_WHILE)
    await after.drain()
    for _ in range(3):
        await watch.check()
    assert len(warnings(caplog)) == 1
    assert "handler 'confirmation-email' has 1 unfinished notifications" in warnings(caplog)[0]
    printed = [vars(record) for record in caplog.records if record.name == "outboxio.operations.stranded"]
    assert [record["outboxio_handler"] for record in printed] == ["confirmation-email"]

    await before.drain()  # the rename was reverted
    await watch.check()
    clock.advance(A_WHILE)
    await after.drain()
    await watch.check()
    assert len(warnings(caplog)) == 2


async def test_freshly_started_processes_have_time_to_announce_their_handlers(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    workers = await deployed(make_outbox, clock, "by-workers")
    await workers.executor.execute(Emit((1,)))
    await workers.drain()
    clock.advance("3h")  # no process was running
    web = await deployed(make_outbox, clock, "by-web")
    watch = StrandedWatch("app", database_of(web), clock, timedelta(days=7))
    await web.drain()
    await watch.check()
    clock.advance(GONE_AFTER - timedelta(seconds=1))
    await watch.check()
    await workers.drain()  # the workers run as well
    clock.advance("2s")
    await web.drain()
    await watch.check()

    assert warnings(caplog) == []


async def test_a_running_process_logs_stranded_names(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    before = await deployed(make_outbox, clock, "confirmation-email")
    await before.executor.execute(Emit((1,)))
    await before.drain()
    after = await make_outbox(clock=clock, settings=Settings(fanout_poll_delay="10ms"))
    after.handler(MoneyDeposited, name="order-confirmation")(Journal())

    async with after.running():
        work = run_of(after)
        # Its pause between two checks is half a minute.
        await eventually(lambda: work.loops.housekeeping.wake() or work.housekeeping.stranded._started_at)
        clock.advance(A_WHILE)
        await work.announcer.announce_if_due()
        await eventually(lambda: work.loops.housekeeping.wake() or warnings(caplog))
    assert "'confirmation-email' has 1 unfinished notifications" in warnings(caplog)[0]
