"""The findings of ``admin.overview()``: a fault in a real database triggers each rule, and its end clears the rule."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from outboxio import Event, EventEnvelope, Outbox, RetryPolicy, Settings, Unavailable, Unprocessable
from outboxio.dashboard import Dashboard, allow_all
from outboxio.health import collector
from outboxio.health import overview as overview_module
from outboxio.health.reasons import Reason
from outboxio.health.rules import RULE_NAMES
from outboxio.model.lock_name import LockName
from outboxio.storage.connections.pool import MAX_POOL_SIZE
from outboxio.storage.protocols import HandlerMinute, InstanceReport
from outboxio.support.clock import utc_now
from outboxio.testing import MovableClock
from tests.contract import test_job_findings
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, opened
from tests.kit.dashboards import browser
from tests.kit.inside import clock_of, database_of, fresh_overview, owner_of, run_of
from tests.kit.proxy import proxy_to
from tests.kit.spies import counters

pytestmark = [
    pytest.mark.with_tables,
    pytest.mark.above_statements,
    pytest.mark.usefixtures("patient_pages"),
]

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]

WELL: list[str] = []
NOTHING_WAITS = {reason.value: 0 for reason in Reason}


async def found_rules(outbox: Outbox) -> list[str]:
    """The rules that currently find a fault."""
    overview = await fresh_overview(outbox)
    found = [finding.rule for finding in overview.findings]
    assert overview.verdict == [finding.text for finding in overview.findings] or overview.level == "ok"
    assert (overview.level == "ok") == (found == [])
    return found


async def sentence(outbox: Outbox, rule: str) -> str:
    """The text of the only finding of a rule, which the dashboard shows too."""
    [finding] = (await fresh_overview(outbox)).findings
    assert finding.rule == rule
    assert finding.fix
    assert finding.text.replace("`", "") in await page_of(outbox)
    return finding.text


async def page_of(outbox: Outbox) -> str:
    """The text of the overview page."""
    async with browser(Dashboard(outbox, authorize=allow_all)) as client:
        answer = await client.get("/")
    assert answer.status_code == 200
    return " ".join(html.unescape(re.sub("<[^>]+>", "", answer.text)).split())


async def report(outbox: Outbox, instance: str = "host-a:7:c0ffee", **content: Any) -> InstanceReport:
    """A report of a process, as the process itself would write it."""
    now = database_now(outbox)
    written = InstanceReport(
        instance=instance, version="1", started_date=now, last_seen_date=now, delay_seconds=10,
        report=msgspec.Raw(msgspec.json.encode({"roles": ["fanout", "handling"], **content})),
    )  # fmt: skip
    await database_of(outbox).reports.write_report("app", written)
    return written


def database_now(outbox: Outbox) -> datetime:
    now: datetime = clock_of(outbox)()
    return now


def succeeds(outbox: Outbox, name: str = "mail", **options: Any) -> Journal:
    journal = Journal()
    outbox.handler(MoneyDeposited, name=name, **options)(journal)
    return journal


# --- the status ----------------------------------------------------------------------------------


async def test_a_running_outbox_is_healthy_and_its_figures_are_read(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox = await make_outbox(clock=clock)  # in which no minute ends
    succeeds(outbox, aliases={"post"})
    assert (await fresh_overview(outbox)).verdict == [
        "All is well: 0 handlers, 0 notifications a minute, nothing is due."
    ]
    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2, 3)))
        await outbox.drain()
        overview = await fresh_overview(outbox)
        assert overview.level == "ok", overview.verdict
        assert overview.verdict == ["All is well: 1 handler, 0 notifications a minute, nothing is due."]
        [handler] = overview.handlers
        assert (handler.handler_name, handler.aliases, handler.event_types) == ("mail", ("post",), ("MoneyDeposited",))
        assert handler.holders == {"default": (owner_of(outbox),)}
        assert handler.unheld == {"default": ()}
        assert list(await outbox.admin.handlers()) == [handler]
        [shard] = overview.shards
        assert (shard.is_reachable, shard.schema, shard.fanout_holder) == (True, None, owner_of(outbox))
        [instance] = overview.instances
        assert (instance.instance, instance.is_alive, instance.roles) == (
            owner_of(outbox),
            True,
            ("fanout", "handling"),
        )
        assert instance.handlers == ("mail",)
        locks = await outbox.admin.locks()
        assert {(lock.role, lock.handler_name, lock.owner, lock.is_alive) for lock in locks} == {
            ("fanout", None, owner_of(outbox), True),
            *(("dispatch", name, owner_of(outbox), True) for name in ("mail", "post")),
        }
    minutes = sum(one.succeeded for one in await database_of(outbox).reports.minutes("app", datetime(2000, 1, 1)))
    assert minutes == 3
    after = await fresh_overview(outbox)
    assert sum(after.handlers[0].minutes) == 3
    assert after.handlers[0].duration_p95 is not None


async def test_an_overview_is_read_once_a_second_for_all_callers(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_module, "FRESH", 3600.0)
    first, *others = await asyncio.gather(*(outbox.admin.overview() for _ in range(10)))
    assert all(one is first for one in others)
    assert await outbox.admin.by("ada").overview() is first
    monkeypatch.setattr(overview_module, "FRESH", 0.0)
    assert await outbox.admin.overview() is not first


async def test_an_overview_after_an_operation_includes_it(outbox: Outbox) -> None:
    """A page that says "paused" beside a button to pause would be wrong."""
    outbox.handler(WalletOpened, name="mail")(Journal())
    async with outbox.running():
        await eventually(lambda: is_announced(outbox, "mail"))
        await outbox.admin.overview()
        await outbox.admin.by("ada").pause("mail")
        [paused] = [one.paused_since for one in (await outbox.admin.overview()).handlers if one.handler_name == "mail"]
        await outbox.admin.unpause("mail")
        [unpaused] = [
            one.paused_since for one in (await outbox.admin.overview()).handlers if one.handler_name == "mail"
        ]
    assert paused is not None
    assert unpaused is None


async def is_announced(outbox: Outbox, name: str) -> bool:
    return any(one.handler_name == name for one in (await outbox.admin.overview()).handlers)


async def test_every_rule_has_a_test_here() -> None:
    tests = {name for name in (*globals(), *vars(test_job_findings)) if name.startswith("test_rule_")}
    assert {f"test_rule_{name}" for name in RULE_NAMES} == tests


# --- shards and processes ------------------------------------------------------------------------


async def test_rule_shard_unreachable(server_url: str) -> None:
    async with proxy_to(server_url) as proxy, opened(Outbox(proxy.url, namespace="app")) as outbox:
        assert await found_rules(outbox) == WELL
        await proxy.stop()
        overview = await fresh_overview(outbox)
        assert (overview.level, [one.rule for one in overview.findings]) == ("down", ["shard_unreachable"])
        assert overview.verdict[0].startswith("Shard `default` cannot be reached: ")
        assert overview.shards[0].is_reachable is False
        await proxy.start()
        await eventually(lambda: _is_well(outbox))


async def _is_well(outbox: Outbox) -> bool:
    return await found_rules(outbox) == WELL


@pytest.mark.with_tables(False)
async def test_rule_schema_behind(database_url: str, look: Look) -> None:
    async with Outbox(database_url, namespace="app") as outbox:
        shown = await sentence(outbox, "schema_behind")
        assert shown.startswith("The tables of shard `default` do not match this version of outboxio: ")
        await outbox.migrate()
        assert await found_rules(outbox) == WELL
        await look.fetch("DROP TABLE {operations}")
        assert "operations" in await sentence(outbox, "schema_behind")
        await look.fetch("DELETE FROM {schema_versions} WHERE version = 7")


async def test_rule_no_instance(outbox: Outbox, clock: MovableClock) -> None:
    succeeds(outbox)
    async with outbox.running():
        await eventually(lambda: _reports(outbox))
        assert await found_rules(outbox) == WELL
    shown = await sentence(outbox, "no_instance")
    assert shown == "No process is running: events and notifications are waiting."
    assert (await fresh_overview(outbox)).level == "down"
    await report(outbox)
    assert await found_rules(outbox) == WELL
    clock.advance("31s")
    assert "(last seen 31 s ago)" in await sentence(outbox, "no_instance")


async def _reports(outbox: Outbox) -> bool:
    return bool((await fresh_overview(outbox)).instances)


async def test_rule_clock_off(make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = await make_outbox()
    succeeds(outbox)
    await outbox.drain()
    await report(outbox, clock_offset=-5.25)
    assert await sentence(outbox, "clock_off") == "The clock of host-a is 5.2 s behind the clock of the database."
    await report(outbox, clock_offset=0.1)
    assert await found_rules(outbox) == WELL
    with monkeypatch.context() as patched:
        patched.setattr(collector, "utc_now", lambda: utc_now() + timedelta(seconds=7))
        assert (
            await sentence(outbox, "clock_off")
            == "The clock of this machine is 7.0 s ahead of the clock of the database."
        )
    assert await found_rules(outbox) == WELL


# --- locks and backlogs --------------------------------------------------------------------------


async def test_rule_lock_without_holder(outbox: Outbox, clock: MovableClock) -> None:
    succeeds(outbox)
    await outbox.drain()  # releases the locks
    await outbox.executor.execute(Emit((1, 2)))
    await report(outbox)
    assert await found_rules(outbox) == WELL
    clock.advance("31s")
    await report(outbox)
    assert await sentence(outbox, "lock_without_holder") == "No process holds fan-out: 2 events wait."

    async with outbox.running(handling=False):
        await eventually(lambda: outbox.admin.list("PENDING"))
        clock.advance("31s")
        await report(outbox)
        assert await sentence(outbox, "lock_without_holder") == "No process holds `mail`: 2 notifications wait."
    async with outbox.running():
        await outbox.drain()
        await report(outbox)
        assert await found_rules(outbox) == WELL


async def test_rule_fanout_behind(outbox: Outbox, clock: MovableClock, look: Look) -> None:
    succeeds(outbox)
    await outbox.drain()
    await outbox.executor.execute(Emit((1,)))
    worker = await report(outbox)
    await holds(look, LockName("app", "fanout"), worker.instance)
    clock.advance("31s")
    await report(outbox)
    shown = await sentence(outbox, "fanout_behind")
    assert shown == "Fan-out is behind: the oldest event has been waiting for 31 s, 1 waiting."
    async with outbox.running():
        await eventually(lambda: outbox.admin.list("SUCCEEDED"))
        assert await found_rules(outbox) == WELL


async def holds(look: Look, name: LockName, owner: str) -> None:
    """Write the lease that a process holding the lock has."""
    await look.fetch(f"UPDATE {{leases}} SET owner = '{owner}', term = released_term + 1 WHERE name = '{name.lease}'")


async def test_rule_handler_behind(make_outbox: MakeOutbox, clock: MovableClock, look: Look) -> None:
    outbox, tool = await make_outbox(clock=clock), await make_outbox(clock=clock)
    gate = asyncio.Event()
    for name, age in (("mail", "90s"), ("report", "26h")):

        @outbox.handler(MoneyDeposited, name=name, concurrency=1, alert_age=age)
        async def wait(envelope: Envelope) -> None:
            await gate.wait()

    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2, 3)))
        await eventually(lambda: _reports(tool))
        await eventually(lambda: outbox.admin.list("PENDING"))
        clock.advance("89s")
        await report(outbox, owner_of(outbox), handlers={"mail": {"alert_age": 90}, "report": {"alert_age": 93600}})
        for one in (outbox, tool):
            assert await found_rules(one) == WELL
        clock.advance("2s")
        await report(outbox, owner_of(outbox), handlers={"mail": {"alert_age": 90}, "report": {"alert_age": 93600}})
        for one in (outbox, tool):  # the tool reads the option from the report
            assert await sentence(one, "handler_behind") == "`mail` is behind: oldest due 91 s, 3 waiting."
        gate.set()
        await outbox.drain()
        await report(outbox, owner_of(outbox))
        assert await found_rules(outbox) == WELL


async def test_rule_pool_exhausted(server_url: str, clock: MovableClock) -> None:
    free = asyncio.Event()
    async with opened(Outbox(server_url, namespace="app", clock=clock)) as outbox:

        async def request() -> None:
            async with outbox.connection():
                await free.wait()

        succeeds(outbox, delivery="transactional")
        async with outbox.running(), asyncio.TaskGroup() as requests:
            for _ in range(MAX_POOL_SIZE):
                requests.create_task(request())
            await eventually(lambda: database_of(outbox).connections_in_use == MAX_POOL_SIZE)
            await reported(outbox, clock)
            assert await found_rules(outbox) == WELL
            await reported(outbox, clock)
            assert await sentence(outbox, "pool_exhausted") == (
                f"All {MAX_POOL_SIZE} connections of the pool of process {owner_of(outbox)} have been in use for 61 s: "
                "actions and transactional handlers are waiting for one."
            )
            free.set()
            await eventually(lambda: database_of(outbox).connections_in_use == 0)
            await reported(outbox, clock)
            assert await found_rules(outbox) == WELL


async def test_rule_handler_failing(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="pdf", retry=RetryPolicy(base="1s", jitter=0))(
        Journal(lambda envelope: ConnectionError("pdf:8080"))
    )
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await report(outbox)
    minute = HandlerMinute(
        handler_name="pdf", minute_date=clock.now().replace(second=0), succeeded=1, failed=10, dead=0, expired=0,
        skipped=0, duration_us=1, durations=(11, *[0] * 16), lags=(11, *[0] * 16),
    )  # fmt: skip
    # The drain has written the minute with its own run, which failed.
    await database_of(outbox).reports.write_minutes("app", "host-a:7:c0ffee", [minute])
    shown = await sentence(outbox, "handler_failing")
    assert shown == "`pdf` failed 92% of 12 runs in the last 5 minutes: ConnectionError: pdf:8080."
    [handler] = await outbox.admin.handlers()
    assert (handler.runs, handler.fail_share, handler.per_minute) == (12, pytest.approx(11 / 12), pytest.approx(0.2))
    clock.advance("6m")
    await report(outbox)
    assert "handler_failing" not in await found_rules(outbox)


# --- what needs an operator ----------------------------------------------------------------------


async def test_rule_new_dead(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="mail")(Journal(lambda envelope: Unprocessable("no")))
    await outbox.executor.execute(Emit((1, 2, 3)))
    await outbox.drain()
    clock.advance("4m")
    await report(outbox)
    shown = await sentence(outbox, "new_dead")
    assert shown == "3 notifications of `mail` ended DEAD or EXPIRED in the last hour, most recently 4 min ago."
    clock.advance("57m")
    await report(outbox)
    assert await found_rules(outbox) == WELL
    assert (await fresh_overview(outbox)).handlers[0].dead == 3


async def test_rule_parked_keys(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(
        Journal(lambda envelope: Unprocessable("no") if envelope.event.amount in (1, 3) else None)
    )
    async with outbox.transaction("Pay") as tx:
        for amount, key in ((1, "a"), (2, "a"), (3, "b"), (4, "b"), (5, "b"), (6, "c")):
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key=key, model_id=amount)
    await outbox.drain()
    clock.advance("2h")
    await report(outbox)
    shown = await sentence(outbox, "parked_keys")
    assert shown == "2 keys of `ledger` are parked by a dead letter, and 3 notifications wait behind."
    keys = await outbox.admin.keys()
    assert [(key.handler_name, key.ordering_key, key.blocked) for key in keys] == [
        ("ledger", "a", 1),
        ("ledger", "b", 2),
    ]
    assert list(await outbox.admin.keys("ledger", limit=1)) == [keys[0]]
    await outbox.admin.resume("ledger", "a")
    await outbox.admin.retry([keys[1].notification_id])
    await outbox.admin.skip([keys[1].notification_id])
    await outbox.drain()
    await report(outbox)
    assert await found_rules(outbox) == WELL


async def test_rule_circuit_open(outbox: Outbox, clock: MovableClock) -> None:
    away, calls = True, 0

    @outbox.handler(MoneyDeposited, name="mail")
    async def mail(envelope: Envelope) -> None:
        nonlocal calls
        calls += 1
        if away:
            raise Unavailable("the mail server is away", retry_in="20ms")

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: calls > 0)
        await reported(outbox, clock)
        [shown] = [one for one in (await fresh_overview(outbox)).findings if one.rule == "circuit_open"]
        assert shown.handler == "mail"
        assert f"in process {owner_of(outbox)}: " in shown.text
        assert "the mail server is away" in shown.text
        away = False
        await eventually(lambda: outbox.statistics["default"].handlers["mail"].succeeded == 1)
        await reported(outbox, clock)
        assert "circuit_open" not in await found_rules(outbox)


async def test_rule_stuck_runs(outbox: Outbox, clock: MovableClock) -> None:
    free = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="mail", timeout="50ms", retry=RetryPolicy(max_attempts=1))
    async def stubborn(envelope: Envelope) -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    try:
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await eventually(lambda: counters(outbox).stuck == 1)
            await reported(outbox, clock)
            shown = [one.text for one in (await fresh_overview(outbox)).findings if one.rule == "stuck_runs"]
            assert shown == [f"1 run of `mail` is stuck in process {owner_of(outbox)}."]
            [[stuck]] = [one.stuck_runs for one in (await fresh_overview(outbox)).instances]
            assert (stuck.handler, "in wait" in stuck.at or "in stubborn" in stuck.at) == ("mail", True)
            free.set()
            await eventually(lambda: outbox.statistics["default"].handlers["mail"].stuck == 0)
            await reported(outbox, clock)
            assert "stuck_runs" not in await found_rules(outbox)
    finally:
        free.set()


async def reported(outbox: Outbox, clock: MovableClock) -> None:
    """Make the process in ``running()`` write its next report now."""
    clock.advance("61s")
    run_of(outbox).loops.reports.wake()
    await eventually(lambda: _has_reported(outbox, clock.now()))


async def _has_reported(outbox: Outbox, seen_at: datetime) -> bool:
    reports = await database_of(outbox).reports.reports("app", seen_at)
    return any(one.instance == owner_of(outbox) for one in reports)


async def test_rule_unroutable(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    former, present = await make_outbox(clock=clock), await make_outbox(clock=clock)
    former.handler(MoneyDeposited, name="old-name")(Journal(lambda envelope: ValueError()))
    await former.executor.execute(Emit((1, 2)))
    await former.drain()
    await former.admin.unsubscribe("old-name")
    succeeds(present, "new-name")
    await present.drain()
    await report(present)
    shown = await sentence(present, "unroutable")
    assert shown == (
        "2 notifications of `old-name` wait, but no process has this handler: deploy it, or add "
        "`aliases={'old-name'}` to the handler with its new name."
    )
    await present.admin.skip([record.id for record in await present.admin.list("FAILED")])
    assert await found_rules(present) == WELL


class MadeFirst(Event, type_name="Made"):
    number: int


class MadeSecond(Event, type_name="Made", version=2):
    number: int


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"delivery": "transactional"}, {"partitions": 2}], ids=str)
async def test_events_of_an_unavailable_version_are_a_finding(
    make_outbox: MakeOutbox, clock: MovableClock, options: dict[str, Any]
) -> None:
    web, worker = await make_outbox(clock=clock), await make_outbox(clock=clock)
    if "partitions" in options and database_of(worker).partitions is None:
        options = {}
    journal = Journal()
    worker.handler(MadeFirst, name="mail", **options)(journal)
    async with web.transaction("Make") as tx:
        for number in range(5):
            tx.emit(MadeSecond(number), model_id=number)
    async with worker.running():
        await eventually(lambda: _has_read_versions(worker))

        shown = await sentence(worker, "unroutable")
        assert shown.startswith("5 notifications of `mail` wait for version 2 of `Made`, but no process that runs")
        [status] = await worker.admin.handlers()
        assert (status.reasons, status.level, status.due) == ({"version": 5}, "degraded", 0)
        assert (await web.admin.overview()).figures.unroutable == 5
        health = await worker.health()
        assert (health.status, health.unroutable) == ("degraded", 5)
        assert any("version 2 of `Made`" in reason for reason in health.reasons)
        assert (await worker.admin.counts())["unroutable"] == 5
        assert not journal.envelopes
    await worker.close()

    newer = await make_outbox(clock=clock)
    newer.handler(MadeSecond, name="mail", **options)(journal)
    await newer.drain()
    assert (await newer.admin.handlers())[0].reasons == {}
    assert await found_rules(newer) == ["no_instance"]


async def _has_read_versions(outbox: Outbox) -> bool:
    return await found_rules(outbox) == ["unroutable"] and (await outbox.admin.handlers())[0].reasons == {"version": 5}


async def test_rule_failing_long(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    """However small the share of failures among the handler's runs."""
    outbox = await make_outbox(clock=clock, settings=Settings(failing_alert_after="30m"))
    journal = Journal(lambda envelope: ValueError("no amount") if envelope.event.amount == 7 else None)
    outbox.handler(MoneyDeposited, name="mail", ordered=True, retry=RetryPolicy(base="10m", jitter=0))(journal)
    async with outbox.transaction("Pay") as tx:
        for amount in (7, 8, 9):
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key="k1")
    async with outbox.running():
        await eventually(lambda: counters(outbox).failed == 1)
        for minutes, failures in ((10, 2), (20, 3)):
            await report(outbox)
            assert await found_rules(outbox) == WELL
            clock.advance(f"{minutes}m")
            run_of(outbox).signals.find.set()
            await eventually(lambda failures=failures: counters(outbox).failed == failures)
        clock.advance("1s")
        await report(outbox)
        assert await sentence(outbox, "failing_long") == (
            "1 notification of `mail` has been failing for 30 min: ValueError: no amount. Later notifications of key "
            "`k1` are blocked until it succeeds or is skipped."
        )
        assert await outbox.admin.waiting() == NOTHING_WAITS | {"retry": 1, "blocked": 2}
        [row] = await outbox.admin.list("FAILED")
        await outbox.admin.skip([row.id])
        await eventually(lambda: counters(outbox).succeeded == 2)
        assert await found_rules(outbox) == WELL


async def test_a_manual_retry_restarts_the_time_of_failing(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock, settings=Settings(handling_max_backoff_cap="10h"))
    journal = Journal(lambda envelope: ValueError("no amount"))
    outbox.handler(MoneyDeposited, name="mail", retry=RetryPolicy(base="10h", jitter=0))(journal)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await report(outbox)
    clock.advance("61m")
    await report(outbox)
    assert await found_rules(outbox) == ["failing_long"]
    await outbox.admin.retry([(await outbox.admin.list())[0].id])
    await outbox.drain()
    assert await found_rules(outbox) == WELL


async def test_rule_delayed_long(outbox: Outbox, clock: MovableClock) -> None:
    succeeds(outbox)
    for year in (2030, 3000):
        async with outbox.transaction("Pay") as tx:
            tx.emit(MoneyDeposited(uuid4(), Decimal(1)), available_at=datetime(year, 12, 1))
    await outbox.drain()
    await report(outbox)
    shown = await sentence(outbox, "delayed_long")
    assert shown == "1 notification of `mail` is delayed for more than a year: `outboxio retry ID` runs one now."
    [late, soon] = await outbox.admin.list("PENDING")
    assert (await outbox.admin.inspect(late.id)).reason == "Delayed until 3000-12-01 00:00:00 UTC."
    await outbox.admin.retry([late.id])
    assert (await outbox.drain()).succeeded == 1
    assert await found_rules(outbox) == WELL
    assert await outbox.admin.waiting() == NOTHING_WAITS | {"delayed": 1}
    assert (await outbox.admin.inspect(soon.id)).reason == "Delayed until 2030-12-01 00:00:00 UTC."


async def test_rule_event_without_handler(outbox: Outbox, clock: MovableClock) -> None:
    succeeds(outbox)
    async with outbox.transaction("Open") as tx:
        tx.emit(WalletOpened(uuid4()))
    await outbox.drain()
    await report(outbox)
    assert await found_rules(outbox) == WELL
    clock.advance("31s")
    await report(outbox)
    shown = await sentence(outbox, "event_without_handler")
    assert shown == "1 event type has no handler anywhere: `WalletOpened`. 1 event waits."
    outbox.handler(WalletOpened, name="welcome")(Journal())
    await outbox.drain()
    assert await found_rules(outbox) == WELL


async def test_a_handler_since_now_finishes_unneeded_events_without_a_run(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    present, once = await make_outbox(clock=clock), await make_outbox(clock=clock)
    succeeds(present)
    async with present.transaction("Open") as tx:
        tx.emit(WalletOpened(uuid4()))
        tx.emit(WalletOpened(uuid4()))
    clock.advance("8d")
    await present.drain()
    await present.admin.purge()
    assert len(await look.events()) == 2, "retention never removes an undelivered event"
    await report(present)
    assert "2 events wait" in await sentence(present, "event_without_handler")

    runs: list[Any] = []

    @once.handler("WalletOpened", name="forget-wallet-opened", raw=True, since="now")
    async def forget(envelope: EventEnvelope[Any]) -> None:
        runs.append(envelope)

    async with present.running():  # the script runs beside a worker, which fans out
        await once.drain()
        await once.admin.unsubscribe("forget-wallet-opened")
    await report(present)
    assert (runs, await look.states()) == ([], {"SKIPPED": 2})
    assert await found_rules(present) == WELL
    clock.advance("8d")
    await present.admin.purge()
    assert await look.events() == []


async def test_rule_paused_long(outbox: Outbox, clock: MovableClock) -> None:
    succeeds(outbox)
    await outbox.drain()
    await outbox.admin.pause("mail")
    clock.advance("23h")
    await report(outbox)
    assert await found_rules(outbox) == WELL
    clock.advance("25h")
    await report(outbox)
    assert await sentence(outbox, "paused_long") == "`mail` has been paused for 2 days, 0 waiting."
    await outbox.admin.unpause("mail")
    assert await found_rules(outbox) == WELL


async def test_a_partition_without_an_owner_is_named(server_url: str, clock: MovableClock) -> None:
    look = Look(server_url)
    async with opened(Outbox(server_url, namespace="app", clock=clock)) as outbox:
        succeeds(outbox, "score", partitions=2)
        await outbox.drain()
        async with outbox.transaction("Pay") as tx:
            for amount in range(20):
                tx.emit(MoneyDeposited(uuid4(), Decimal(amount)))
        async with outbox.running(handling=False):
            await eventually(lambda: outbox.admin.list("PENDING"))
        worker = await report(outbox)
        await holds(look, LockName("app", "dispatch", "score", 0), worker.instance)
        assert await found_rules(outbox) == WELL
        clock.advance("31s")
        await report(outbox)
        waiting = await outbox.admin.waiting("score")
        assert waiting["no_owner"] + waiting["queued"] == 20
        shown = await sentence(outbox, "lock_without_holder")
        assert shown == f"No process holds partition 1 of `score`: {waiting['no_owner']} notifications wait."
        async with outbox.running():
            await outbox.drain()
            assert await found_rules(outbox) == WELL


async def test_rule_operation_failed(outbox: Outbox, clock: MovableClock, monkeypatch: pytest.MonkeyPatch) -> None:
    succeeds(outbox)
    await outbox.drain()
    await report(outbox)

    async def fail(*args: object) -> None:
        raise ValueError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(database_of(outbox).subscriptions, "pause", fail)
        with pytest.raises(ValueError, match="no room"):
            await outbox.admin.pause("mail", actor="ada")
    shown = await sentence(outbox, "operation_failed")
    assert shown == "Operation failed: pause by ada: ValueError: no room"
    clock.advance("61m")
    await report(outbox)
    assert await found_rules(outbox) == WELL
