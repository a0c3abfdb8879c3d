"""Entering and leaving ``running()``: waits, refusals, and an unreachable shard."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outboxio import (
    ConfigurationError,
    DatabaseUnavailable,
    EventEnvelope,
    Outbox,
    SameDatabase,
    SchemaMissing,
    Settings,
    ShutdownError,
)
from outboxio.storage import Shard
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually, hang, opened
from tests.kit.fragile import breakable, late
from tests.kit.inside import cursors_of, dispatcher_of
from tests.kit.leaks import Leaks
from tests.kit.logged_problems import logged_problems
from tests.kit.processes import ROOT
from tests.kit.proxy import proxy_to
from tests.kit.spies import disable_handoff, watch

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]

#: Connections that the pool for actions, or SQLite's writer, keeps open until ``close()``.
POOL = 1


#: How long the network may take at the end; in the library 5 s each, here less.
PATIENCE = (
    ("runtime.shard_run", "_LONGEST_LEAVE"),
    ("dispatch.dispatcher", "LONGEST_GRACE"),
    ("storage.postgres.connection", "CLOSE_TIMEOUT"),
    ("storage.postgres.database", "CLOSE_TIMEOUT"),
)


class Slow:
    """A handler that runs until the test releases it; a test can wait for its start."""

    def __init__(self) -> None:
        self.started = Journal()
        self.let_go = asyncio.Event()
        self.ended: list[int] = []
        self.saw_stopping = False

    async def __call__(self, envelope: EventEnvelope[MoneyDeposited]) -> None:
        await self.started(envelope)
        await self.let_go.wait()
        self.saw_stopping = envelope.stopping.is_set()
        self.ended.append(int(envelope.event.amount))


# --- entering and leaving ------------------------------------------------------------------------


async def test_running_may_be_left_from_another_task(make_outbox: MakeOutbox, leaks: Leaks) -> None:
    outbox, journal = await make_outbox(), Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    stay = outbox.running()

    entered = await asyncio.create_task(stay.__aenter__())
    assert entered is outbox
    await outbox.executor.execute(Emit((1,)))
    await journal.calls(1)
    await asyncio.create_task(stay.__aexit__(None, None, None))

    await leaks.nothing_is_left(POOL)


async def test_running_may_be_nested_and_ends_with_the_outermost_block(make_outbox: MakeOutbox) -> None:
    outbox, journal = await make_outbox(), Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)

    async with outbox.running():
        async with outbox.running(handling=False):
            await outbox.executor.execute(Emit((1,)))
            await journal.calls(1)
        await outbox.executor.execute(Emit((2,)))
        await journal.calls(2)
    await outbox.executor.execute(Emit((3,)))
    assert await _undelivered(outbox) == 1


async def test_an_inner_block_cannot_add_a_role(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    async with outbox.running(handling=False):
        with pytest.raises(ConfigurationError, match="entered already"):
            async with outbox.running():
                pass


async def test_running_may_be_entered_again(make_outbox: MakeOutbox, leaks: Leaks) -> None:
    outbox, journal = await make_outbox(), Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    for number in range(1, 4):
        async with outbox.running():
            await outbox.executor.execute(Emit((number,)))
            await journal.calls(number)
        await leaks.nothing_is_left(POOL)
    assert journal.amounts == [1, 2, 3]


async def test_entering_while_another_task_leaves_waits_for_it(
    make_outbox: MakeOutbox, leaks: Leaks, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(fanout_poll_delay="60s", handling_poll_delay="60s")
    outbox, slow, journal = await make_outbox(settings=settings), Slow(), Journal()
    outbox.handler(MoneyDeposited, name="slow")(slow)
    outbox.handler(MoneyDeposited, name="quick")(journal)

    async def first() -> None:
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await slow.started.calls(1)
        assert slow.ended == [1]

    async def second() -> None:
        async with outbox.running():
            assert slow.ended == [1], "entered before the other task had left"
            await outbox.executor.execute(Emit((2,)))
            await journal.calls(2)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(first())
        await eventually(lambda: slow.started.envelopes and slow.started.envelopes[0].stopping.is_set())
        group.create_task(second())
        asyncio.get_running_loop().call_later(0.05, slow.let_go.set)
    await leaks.nothing_is_left(POOL)
    assert logged_problems(caplog) == []


async def test_entering_during_a_drain_waits_for_it(make_outbox: MakeOutbox, leaks: Leaks) -> None:
    outbox, slow = await make_outbox(), Slow()
    outbox.handler(MoneyDeposited, name="slow")(slow)
    await outbox.executor.execute(Emit((1,)))
    drain = asyncio.create_task(outbox.drain())
    await slow.started.calls(1)
    asyncio.get_running_loop().call_later(0.05, slow.let_go.set)
    async with asyncio.timeout(20):
        async with outbox.running():
            assert (await drain).succeeded == 1
            await outbox.executor.execute(Emit((2,)))
            await slow.started.calls(2)
    await leaks.nothing_is_left(POOL)


async def test_a_task_waiting_for_another_to_enter_gets_its_failure(database_url: str) -> None:
    async with Outbox(database_url, namespace="app") as outbox:

        async def stay() -> None:
            async with outbox.running():
                pass

        results = await asyncio.gather(stay(), stay(), return_exceptions=True)
        assert [type(result) for result in results] == [SchemaMissing, SchemaMissing]


async def test_exceptions_of_the_body_pass_through_unchanged(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with outbox.running():
            raise error
    assert caught.value is error


async def test_leaving_immediately_is_clean(
    make_outbox: MakeOutbox, leaks: Leaks, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = await make_outbox()
    outbox.handler(MoneyDeposited, name="first")(Journal())
    for turns in range(8):
        async with outbox.running():
            for _ in range(turns):
                await asyncio.sleep(0)
        await leaks.nothing_is_left()
    assert logged_problems(caplog) == []


async def test_closing_ends_running_first(database_url: str, leaks: Leaks) -> None:
    slow = Slow()
    async with Outbox(database_url, namespace="app") as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="slow")(slow)
        stay = outbox.running()
        await stay.__aenter__()
        await outbox.executor.execute(Emit((1,)))
        await slow.started.calls(1)
        asyncio.get_running_loop().call_later(0.05, slow.let_go.set)
    assert slow.ended == [1]
    await stay.__aexit__(None, None, None)  # the block that it closed under, ends
    await leaks.nothing_is_left()
    assert await Look(database_url).states() == {"SUCCEEDED": 1}


# --- the waits of leaving ------------------------------------------------------------------------


async def test_leaving_waits_for_handlers_and_starts_nothing_more(
    make_outbox: MakeOutbox, look: Look, leaks: Leaks
) -> None:
    outbox, slow = await make_outbox(), Slow()
    outbox.handler(MoneyDeposited, name="slow", concurrency=2)(slow)

    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2, 3, 4)))
        await slow.started.calls(2)
        asyncio.get_running_loop().call_later(0.1, slow.let_go.set)

    assert slow.saw_stopping
    assert sorted(slow.ended) == sorted(slow.started.amounts) == [1, 2]
    assert await look.states() == {"SUCCEEDED": 2, "PENDING": 2}
    await leaks.nothing_is_left(POOL)


async def test_rows_found_while_leaving_are_not_started(
    make_outbox: MakeOutbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, slow = await make_outbox(), Slow()
    outbox.handler(MoneyDeposited, name="slow")(slow)
    has_read, may_continue, leaving = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def read_and_wait(find_due: Callable[..., Awaitable[list[Any]]], *args: Any) -> list[Any]:
        rows = await find_due(*args)
        if rows:
            has_read.set()
            await may_continue.wait()
        return rows

    async def stay() -> None:
        async with outbox.running():
            await leaving.wait()

    staying = asyncio.create_task(stay())
    await outbox.executor.execute(Emit((1,)))
    await slow.started.calls(1)
    watch(outbox, "notifications").trouble["find_due"] = read_and_wait
    disable_handoff(outbox)
    dispatcher = dispatcher_of(outbox)
    await outbox.executor.execute(Emit((2,)))
    await has_read.wait()
    leaving.set()
    await eventually(lambda: dispatcher._state.is_stopping)
    may_continue.set()
    await eventually(lambda: not dispatcher._state.finding.locked())
    slow.let_go.set()
    await staying

    assert slow.ended == slow.started.amounts == [1]
    assert await look.states() == {"SUCCEEDED": 1, "PENDING": 1}
    assert logged_problems(caplog) == []


async def test_a_handler_that_sees_stopping_can_end_early(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, started = await make_outbox(), Journal()

    @outbox.handler(MoneyDeposited, name="polite")
    async def polite(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await started(envelope)
        await envelope.stopping.wait()

    async with asyncio.timeout(20), outbox.running():  # less than shutdown_timeout, 25 s
        await outbox.executor.execute(Emit((1, 2)))
        await started.calls(2)
    assert await look.states() == {"SUCCEEDED": 2}


@pytest.mark.real_time("measures how long leaving takes")
async def test_handlers_past_shutdown_timeout_are_cancelled_without_an_attempt(
    make_outbox: MakeOutbox, look: Look, leaks: Leaks, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, slow = await make_outbox(settings=Settings(shutdown_timeout="200ms")), Slow()
    outbox.handler(MoneyDeposited, name="slow")(slow)

    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2)))
        await slow.started.calls(2)
        left_at = time.monotonic()
    assert time.monotonic() - left_at >= 0.2

    assert [(row["state"], row["attempts"]) for row in await look.notifications()] == [("PENDING", 0)] * 2
    reports = [r.getMessage() for r in caplog.records if "cancelled 2 handlers" in r.getMessage()]
    assert len(reports) == 1
    assert all(str(envelope.event_id) in reports[0] for envelope in slow.started.envelopes)
    await leaks.nothing_is_left(POOL)

    slow.let_go.set()
    async with outbox.running():
        await slow.started.calls(4)
    assert [envelope.attempt for envelope in slow.started.envelopes] == [1, 1, 1, 1]
    assert await look.states() == {"SUCCEEDED": 2}


@pytest.mark.real_time("measures how long leaving takes")
async def test_unwritable_outcomes_are_reported_in_time(
    database_url: str, tmp_path: Path, look: Look, leaks: Leaks
) -> None:
    slow = Slow()
    settings = Settings(shutdown_timeout="500ms")
    async with breakable(database_url) as database:
        outbox = Outbox(database.source, namespace="app", settings=settings)
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="slow")(slow)
        with pytest.raises(ShutdownError) as caught:  # noqa: PT012  # it is raised by the end of the block
            async with outbox.running():
                await outbox.executor.execute(Emit((1, 2)))
                await slow.started.calls(2)
                await database.breaks()
                slow.let_go.set()
                left_at = time.monotonic()
        # shutdown_timeout for the handlers, as long again (at most 5 s) for outcomes, 5 s for locks and connections. A
        # loaded machine needs longer, and less than connect_timeout, 10 s.
        assert time.monotonic() - left_at < 0.5 + 0.5 + 5.0 + 3.5
        ids = {envelope.notification_id for envelope in slow.started.envelopes}
        assert set(caught.value.notification_ids) == ids
        assert all(str(notification_id) in str(caught.value) for notification_id in ids)
        await database.recovers()

        async with outbox.running():
            await slow.started.calls(4)  # at least once
        assert await look.states() == {"SUCCEEDED": 2}
        await outbox.close()
    await leaks.nothing_is_left()


# --- roles ---------------------------------------------------------------------------------------


async def test_each_role_can_be_disabled_for_an_instance(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, journal = await make_outbox(), Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    await outbox.executor.execute(Emit((1,)))

    async with outbox.running(fanout=False):
        await eventually(lambda: cursors_of(outbox) and all(one.scan.has_period for one in cursors_of(outbox).values()))
    assert await _undelivered(outbox) == 1
    async with outbox.running(handling=False):
        await eventually(lambda: _are(look, {"PENDING": 1}))
    assert len(journal) == 0
    async with outbox.running(fanout=False):
        await journal.calls(1)
    assert await look.states() == {"SUCCEEDED": 1}


async def test_handling_enabled_false_equals_handling_false(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, journal = await make_outbox(settings=Settings(handling_enabled=False)), Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: _are(look, {"PENDING": 1}))
    assert len(journal) == 0
    assert await look.value("SELECT count(*) FROM {leases}") == 1, "only fan-out has a lock"


# --- shards --------------------------------------------------------------------------------------


async def test_each_shards_events_are_handled_on_that_shard(database_url: str, second_url: str) -> None:
    journal = Journal()
    async with opened(Outbox({"one": database_url, "two": second_url}, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await outbox.executor.execute(Emit((2,)), shard="two")
            await journal.calls(2)
    assert {(e.shard, int(e.event.amount)) for e in journal.envelopes} == {("one", 1), ("two", 2)}
    assert await Look(second_url).states() == {"SUCCEEDED": 1}


async def test_two_shards_of_the_same_database_are_refused(database_url: str, leaks: Leaks) -> None:
    async with opened(Outbox(database_url, namespace="app")):
        pass
    async with Outbox({"one": database_url, "two": database_url}, namespace="app") as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        with pytest.raises(SameDatabase, match="'one' and 'two'"):
            async with outbox.running():
                pass
        with pytest.raises(SameDatabase):
            await outbox.check()
    await leaks.nothing_is_left()


async def test_an_unreachable_shard_at_startup_delays_no_other(
    database_url: str, second_url: str, tmp_path: Path, leaks: Leaks
) -> None:
    journal = Journal()
    async with (
        opened(Outbox(database_url, namespace="app")),
        opened(Outbox(second_url, namespace="app")) as producer,
        late(second_url, tmp_path) as database,
    ):
        await producer.executor.execute(Emit((1,)))
        async with Outbox({"late": database.source, "here": database_url}, namespace="app") as outbox:
            outbox.handler(MoneyDeposited, name="first")(journal)
            async with outbox.running():
                await outbox.executor.execute(Emit((2,)), shard="here")
                await journal.calls(1, timeout=8)  # less than connect_timeout
                with pytest.raises(DatabaseUnavailable, match="'late'"):
                    await outbox.executor.execute(Emit((3,)), shard="late")

                await database.arrives()

                await journal.calls(2)
                await outbox.executor.execute(Emit((4,)), shard="late")
                await journal.calls(3)
    assert {(e.shard, int(e.event.amount)) for e in journal.envelopes} == {("here", 2), ("late", 1), ("late", 4)}
    await leaks.nothing_is_left()


@pytest.mark.real_time("measures how long leaving takes")
async def test_a_shard_that_was_never_reached_does_not_delay_leaving(
    database_url: str, second_url: str, tmp_path: Path, leaks: Leaks
) -> None:
    async with (
        opened(Outbox(database_url, namespace="app")),
        late(second_url, tmp_path) as database,
        Outbox({"late": database.source, "here": database_url}, namespace="app") as outbox,
    ):
        async with outbox.running():
            left_at = time.monotonic()
        assert time.monotonic() - left_at < 4.0  # the end of a task that does not end by itself takes 5 s
    await leaks.nothing_is_left()


async def test_no_reachable_shard_is_an_error(database_url: str, tmp_path: Path) -> None:
    async with late(database_url, tmp_path) as database, Outbox(database.source, namespace="app") as outbox:
        with pytest.raises(DatabaseUnavailable, match="'default'"):
            async with outbox.running():
                pass


async def test_a_database_that_fails_before_the_start_is_unavailable(database_url: str, leaks: Leaks) -> None:
    async with breakable(database_url) as database, Outbox(database.source, namespace="app") as outbox:
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="first")(Journal())
        await database.breaks()
        with pytest.raises(DatabaseUnavailable, match="'default'"):
            async with outbox.running():
                pass
    await leaks.nothing_is_left()


async def test_a_shard_that_fails_before_the_start_is_probed(database_url: str, second_url: str, leaks: Leaks) -> None:
    journal = Journal()
    async with (
        breakable(second_url) as database,
        Outbox({"here": database_url, "breaks": database.source}, namespace="app") as outbox,
    ):
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="first")(journal)
        await database.breaks()
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)), shard="here")
            await journal.calls(1)
            await database.recovers()
            await outbox.executor.execute(Emit((2,)), shard="breaks")
            await journal.calls(2)
    assert [envelope.shard for envelope in journal.envelopes] == ["here", "breaks"]
    await leaks.nothing_is_left()


@pytest.mark.real_time("a handler tidies up for longer than another shard takes to fail")
async def test_a_failing_shard_does_not_interrupt_handlers_of_others(
    database_url: str, second_url: str, leaks: Leaks
) -> None:
    started, let_go = Journal(), asyncio.Event()
    settings = Settings(shutdown_timeout="300ms")
    async with breakable(second_url) as database:
        outbox = Outbox({"here": database_url, "breaks": database.source}, namespace="app", settings=settings)
        await outbox.migrate()

        @outbox.handler(MoneyDeposited, name="first")
        async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
            await started(envelope)
            if envelope.shard == "breaks":
                return await let_go.wait() and None
            try:
                await hang()
            except asyncio.CancelledError:
                await asyncio.sleep(1.5)  # the handler tidies up, longer than the second shard takes to fail

        with pytest.raises(ShutdownError) as caught:  # noqa: PT012  # it is raised by the end of the block
            async with outbox.running():
                await outbox.executor.execute(Emit((1,)), shard="here")
                await outbox.executor.execute(Emit((2,)), shard="breaks")
                await started.calls(2)
                await database.breaks()
                let_go.set()
        assert {e.notification_id for e in started.envelopes if e.shard == "breaks"} == {*caught.value.notification_ids}
        assert await Look(database_url).states() == {"SUCCEEDED": 1}, "the failure of one shard interrupted the other"
        await database.recovers()
        await outbox.close()
    await leaks.nothing_is_left()


# --- the end of the interpreter ------------------------------------------------------------------

FORGETFUL = """
    async def main():
        await outbox.migrate()
        stay = outbox.running()
        await stay.__aenter__()
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)

    asyncio.run(main())
"""

TWICE = """
    async def main(number):
        await outbox.migrate()
        async with outbox.running():
            await asyncio.gather(*(outbox.executor.execute(Emit((n,))) for n in range(5)))
            await journal.calls(5 * number)
        assert (await outbox.admin.counts())["SUCCEEDED"] == 5 * number

    asyncio.run(main(1))
    journal._called = asyncio.Condition()
    asyncio.run(main(2))
"""


AFTER_FORGETTING = f"""
    {FORGETFUL}
    async def again():
        journal.__init__()
        async with outbox.running():
            await outbox.executor.execute(Emit((2,)))
            await journal.calls(1)
        await outbox.executor.execute(Emit((3,)))
        assert (await outbox.drain()).succeeded == 1

    asyncio.run(again())
"""


@pytest.mark.parametrize(
    "body", [FORGETFUL, TWICE, AFTER_FORGETTING], ids=["forgets-to-close", "runs-twice", "runs-after-forgetting"]
)
async def test_a_process_that_never_closes_exits_cleanly(database_url: str, body: str) -> None:
    done = await asyncio.to_thread(_run_script, database_url, body)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "destroyed" not in done.stderr


def _run_script(url: str, body: str) -> subprocess.CompletedProcess[str]:
    script = f"""
    import asyncio
    from outboxio import Outbox
    from tests.kit.app import Emit, Journal, MoneyDeposited

    outbox, journal = Outbox({url!r}, namespace="app"), Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    """
    code = textwrap.dedent(script) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


# --- databases that come and go ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def impatient_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer waits for a shorter time than usual, so that these tests are fast."""
    monkeypatch.setattr("outboxio.storage.sqlite.connection.BUSY_TIMEOUT", 0.3)


@pytest.mark.real_time("measures how long leaving takes")
async def test_a_silent_network_delays_leaving_for_a_bounded_time(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in PATIENCE:
        monkeypatch.setattr(f"outboxio.{module}.{name}", 0.5)
    slow = Slow()
    settings = Settings(shutdown_timeout="500ms", lock_heartbeat="500ms")
    async with proxy_to(postgres_url) as proxy:
        outbox = Outbox({"default": Shard(proxy.url)}, namespace="app", settings=settings)
        await outbox.migrate()
        outbox.handler(MoneyDeposited, name="slow")(slow)
        with pytest.raises(ShutdownError) as caught:  # noqa: PT012  # it is raised by the end of the block
            async with outbox.running():
                await outbox.executor.execute(Emit((1,)))
                await slow.started.calls(1)
                proxy.stall()
                slow.let_go.set()
                left_at = time.monotonic()
        # shutdown_timeout, then so long at most for outcomes, for locks, for statements under way, for connections.
        # The margin is for a loaded machine.
        assert time.monotonic() - left_at < 0.5 + 4 * 0.5 + 6.0
        assert caught.value.notification_ids == (slow.started.envelopes[0].notification_id,)
        proxy.resume()
        await outbox.close()


async def _undelivered(outbox: Outbox) -> int:
    return (await outbox.admin.counts())["undelivered"]


async def _are(look: Look, states: dict[str, int]) -> bool:
    return await look.states() == states
