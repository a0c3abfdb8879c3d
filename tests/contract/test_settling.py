"""Outcomes are written together, are never lost, and are never written by a process without the lock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outboxio import EventEnvelope, Outbox, RetryPolicy, Settings, ShutdownError
from outboxio.dispatch import dispatcher
from outboxio.model.lock_name import LockName
from outboxio.runtime import shard_run
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, opened
from tests.kit.inside import fanout_of, lock_loop_of, locks_of
from tests.kit.spies import Gate, breaks, counters, deposits, watch

pytestmark = pytest.mark.every_version

MakeOutbox = Callable[..., Awaitable[Outbox]]

QUICK = Settings(fanout_poll_delay="30ms", handling_poll_delay="30ms")


def fails_if_odd(envelope: EventEnvelope[MoneyDeposited]) -> BaseException | None:
    return ValueError(f"poison {int(envelope.event.amount)}") if envelope.event.amount % 2 else None


# --- together ------------------------------------------------------------------------------------


async def test_a_thousand_outcomes_need_few_statements(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(outcome_delay="20s"))  # otherwise the result depends on timing
    outbox.handler(MoneyDeposited, name="first")(Journal())
    outbox.handler(MoneyDeposited, name="second")(Journal(fails_if_odd))
    notifications = watch(outbox, "notifications")
    await deposits(outbox, 1000)

    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed) == (1500, 500)
    assert notifications.count("settle") <= 40


async def test_outcomes_of_different_kinds_reach_their_own_rows(outbox: Outbox, clock: MovableClock) -> None:
    policies = {"dies": RetryPolicy(max_attempts=1), "expires": RetryPolicy(retention="1s"), "fails": RetryPolicy()}
    for name, policy in policies.items():
        outbox.handler(MoneyDeposited, name=name, retry=policy)(Journal(fails_if_odd))
    await outbox.executor.execute(Emit(tuple(range(10))))

    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed, drained.expired, drained.dead) == (15, 5, 5, 5)
    for record in await outbox.admin.list():
        odd = int(record.model_id or 0) % 2
        ends = {"dies": "DEAD", "expires": "EXPIRED", "fails": "FAILED"}
        assert record.state == (ends[record.handler_name] if odd else "SUCCEEDED")
        assert [error["message"] for error in record.errors] == ([f"poison {record.model_id}"] if odd else [])


# --- values that a database refuses --------------------------------------------------------------


def with_unstorable_text(marker: str) -> Callable[..., Awaitable[Any]]:
    """Send the database a text that no driver can send, instead of an error's text."""

    async def trouble(method: Callable[..., Awaitable[Any]], bucket: Any, *args: Any) -> Any:
        for outcome in bucket.outcomes:
            if outcome.error is not None and marker in outcome.error:
                outcome.error = outcome.error.replace(marker, "\ud800")
        return await method(bucket, *args)

    return trouble


async def test_a_text_refused_by_the_database_affects_only_its_row(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal(fails_if_odd))
    notifications = watch(outbox, "notifications")
    notifications.trouble["settle"] = with_unstorable_text("poison 13")
    await outbox.executor.execute(Emit(tuple(range(40))))

    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed) == (20, 20)
    errors = {record.model_id: record.errors[0] for record in await outbox.admin.list(state="FAILED")}
    assert errors.pop("13")["type"] == "Unstorable"
    assert {f"poison {number}" for number in errors} == {error["message"] for error in errors.values()}
    assert notifications.count("settle") < 20


async def test_written_parts_of_a_split_bucket_are_not_written_again(
    make_outbox: MakeOutbox,
) -> None:
    outbox = await make_outbox(settings=QUICK)
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda e: ValueError(f"poison {int(e.event.amount)}")))
    notifications = watch(outbox, "notifications")
    poison, broken = with_unstorable_text("poison 3"), breaks(1)
    calls = 0

    async def trouble(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return await (broken if calls == 4 else poison)(method, *args)

    notifications.trouble["settle"] = trouble
    await outbox.executor.execute(Emit((0, 1, 2, 3)))
    async with outbox.running():
        await eventually(lambda: counters(outbox).failed == 4)

    assert [(r.attempts, len(r.errors)) for r in await outbox.admin.list()] == [(1, 1)] * 4


# --- nothing is lost -----------------------------------------------------------------------------


async def test_a_failed_write_is_retried_and_no_handler_runs_twice(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    watch(outbox, "notifications").trouble["settle"] = breaks(3)
    await outbox.executor.execute(Emit((1, 2)))

    async with outbox.running():
        await eventually(lambda: counters(outbox).succeeded == 2)
        assert (await outbox.admin.counts())["SUCCEEDED"] == 2

    assert sorted(journal.amounts) == [1, 2]


async def test_a_write_that_always_fails_blocks_no_other(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal = Journal(fails_if_odd)
    outbox.handler(MoneyDeposited, name="first")(journal)

    async def refuses_failures(method: Callable[..., Awaitable[Any]], bucket: Any, *args: Any) -> Any:
        if bucket.has_details:
            raise RuntimeError("refused by a user-defined trigger")
        return await method(bucket, *args)

    notifications = watch(outbox, "notifications")
    notifications.trouble["settle"] = refuses_failures
    async with outbox.running():
        await deposits(outbox, 10)
        await eventually(lambda: counters(outbox).succeeded == 5)
        notifications.trouble.clear()
        await eventually(lambda: counters(outbox).failed == 5)

    assert sorted(journal.amounts) == list(range(10))


async def test_a_write_with_a_lost_response_counts_as_written(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    journal = Journal(fails_if_odd)
    outbox.handler(MoneyDeposited, name="first")(journal)
    watch(outbox, "notifications").trouble["settle"] = breaks(2, before=False)
    await outbox.executor.execute(Emit((1, 2)))

    async with outbox.running():
        await journal.calls(2)
        await outbox.drain(timeout=10)

    assert sorted(journal.amounts) == [1, 2]
    assert await look.states() == {"SUCCEEDED": 1, "FAILED": 1}
    (failed,) = await outbox.admin.list(state="FAILED")
    assert failed.attempts == 1


async def test_drain_survives_a_failed_write(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    watch(outbox, "notifications").trouble["settle"] = breaks(2)
    await outbox.executor.execute(Emit((1, 2)))

    assert (await outbox.drain(timeout=20)).succeeded == 2

    assert journal.amounts == [1, 2]
    assert await look.states() == {"SUCCEEDED": 2}


async def test_leaving_waits_for_the_write_in_progress(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    outbox.handler(MoneyDeposited, name="first")(Journal())
    started, may_continue = asyncio.Event(), asyncio.Event()

    async def slow(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        started.set()
        await may_continue.wait()
        return await method(*args)

    watch(outbox, "notifications").trouble["settle"] = slow
    await outbox.executor.execute(Emit((1,)))
    running = outbox.running()
    await running.__aenter__()
    await asyncio.wait_for(started.wait(), 20)
    leaving = asyncio.ensure_future(running.__aexit__(None, None, None))
    done, _ = await asyncio.wait([leaving], timeout=0.1)
    may_continue.set()
    await leaving

    assert not done
    assert await look.states() == {"SUCCEEDED": 1}


async def test_unwritable_outcomes_at_shutdown_are_logged_and_run_again(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "LONGEST_GRACE", 0.2)
    monkeypatch.setattr(shard_run, "_LONGEST_LEAVE", 0.2)
    outbox = await make_outbox(settings=Settings(shutdown_timeout="200ms", fanout_poll_delay="30ms"))
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    notifications = watch(outbox, "notifications")
    await outbox.executor.execute(Emit((1,)))

    async def hangs(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        await asyncio.Event().wait()

    for trouble in (breaks(1_000_000), hangs):
        notifications.trouble["settle"] = trouble
        with pytest.raises(ShutdownError) as caught:
            async with outbox.running():
                await journal.calls(len(journal) + 1)
        assert caught.value.notification_ids == ((await outbox.admin.list())[0].id,)

    notifications.trouble.clear()
    assert (await outbox.drain()).succeeded == 1
    assert len(journal) == 3


async def test_shutting_down_a_long_handler_uses_no_attempt(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(shutdown_timeout="50ms", fanout_poll_delay="30ms"))
    gate = Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    await outbox.executor.execute(Emit((1,)))
    async with outbox.running():
        await gate.calls(1)

    (record,) = await outbox.admin.list()
    assert (record.state, record.attempts, record.errors) == ("PENDING", 0, [])
    gate.open()
    assert (await outbox.drain()).succeeded == 1
    assert [envelope.attempt for envelope in gate.envelopes] == [1, 1]


async def test_a_handler_that_respects_stopping_ends_in_time(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    started = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="first")
    async def first(envelope: EventEnvelope[Any]) -> None:
        started.set()
        await envelope.stopping.wait()

    await outbox.executor.execute(Emit((1,)))
    async with outbox.running():
        await started.wait()

    assert await look.states() == {"SUCCEEDED": 1}


# --- who may write -------------------------------------------------------------------------------


def lease_of(handler: str, namespace: str = "app") -> str:
    return LockName(namespace, "dispatch", handler).lease


async def lose_lock(outbox: Outbox) -> None:
    """End the session that holds the locks; the locks are reacquired within a heartbeat."""
    await locks_of(outbox).release()


async def take_lock(outbox: Outbox) -> None:
    lock_loop_of(outbox).wake()
    await eventually(lambda: locks_of(outbox).holds(LockName("app", "dispatch", "first")))


async def raise_term(look: Look, handler: str) -> None:
    """Let another process take the handler's lock."""
    term = "SELECT term FROM {leases} WHERE name = $1"
    before = await look.value(term, lease_of(handler))
    await look.fetch("UPDATE {leases} SET term = term + 1 WHERE name = $1", lease_of(handler))
    assert await look.value(term, lease_of(handler)) == before + 1


async def test_an_outcome_under_an_old_term_is_refused_and_counted(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate, sibling = Gate(), Journal()
    outbox.handler(MoneyDeposited, name="fenced")(gate)
    outbox.handler(MoneyDeposited, name="sibling")(sibling)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await gate.calls(1)
        await eventually(lambda: counters(outbox).succeeded == 1)
        await raise_term(look, "fenced")
        locks_of(outbox).suspect = lambda lease: None  # the term stays old
        before = await look.notifications()
        gate.open()
        await eventually(lambda: counters(outbox).refused == 1)
        assert await look.notifications() == before


async def test_an_expired_term_reacquires_its_lock_and_repeats_nothing(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate = Gate()
    outbox.handler(MoneyDeposited, name="fenced")(gate)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await gate.calls(1)
        await raise_term(look, "fenced")
        gate.open()
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert len(gate) == 1
    assert await look.states() == {"SUCCEEDED": 1}


async def test_events_emitted_under_an_old_term_are_not_committed(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate = Gate()

    @outbox.handler(MoneyDeposited, name="fenced")
    async def emits(envelope: EventEnvelope[MoneyDeposited]) -> None:
        envelope.emit(WalletOpened(envelope.event.wallet_id))
        await gate(envelope)

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await gate.calls(1)
        await raise_term(look, "fenced")
        gate.open()
        await eventually(lambda: counters(outbox).refused == 1)
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert await look.value("SELECT count(*) FROM {events} WHERE event_type = 'WalletOpened'") == 1


async def test_outcomes_under_old_terms_are_refused_beside_current_ones(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate = Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await gate.calls(1)
        await lose_lock(outbox)
        await raise_term(look, "first")
        await take_lock(outbox)
        await outbox.executor.execute(Emit((2,)))
        await gate.calls(2)
        gate.open()  # both end at once, so their outcomes are written together
        await eventually(lambda: counters(outbox).refused == 1)
        await eventually(lambda: counters(outbox).succeeded == 2)

    assert gate.amounts == [1, 2]


async def test_a_settled_row_is_never_reopened(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate = Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2)))
        await gate.calls(2)
        await eventually(lambda: fanout_of(outbox).notifications == 2)  # fan-out has committed
        records = await outbox.admin.list()
        assert (await outbox.admin.skip([records[-1].id])).done == 1
        gate.open()
        await eventually(lambda: counters(outbox).refused == 1 and counters(outbox).succeeded == 1)

    assert {r.model_id: str(r.state) for r in await outbox.admin.list()} == {"1": "SKIPPED", "2": "SUCCEEDED"}


async def test_runs_stay_valid_when_a_lost_lock_is_reacquired_immediately(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate = Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2)))
        await gate.calls(2)
        await lose_lock(outbox)
        await take_lock(outbox)
        assert await look.value("SELECT term FROM {leases} WHERE name = $1", lease_of("first")) == 2
        gate.open()
        await eventually(lambda: counters(outbox).succeeded == 2)
        assert counters(outbox).refused == 0

    assert len(gate) == 2


async def test_runs_are_refused_once_if_another_process_held_the_lock(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate = Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await gate.calls(1)
        await lose_lock(outbox)
        await raise_term(look, "first")
        await take_lock(outbox)
        gate.open()
        await eventually(lambda: counters(outbox).succeeded == 1)
        assert counters(outbox).refused == 1

    assert len(gate) == 1


async def test_nothing_is_started_while_the_lock_is_lost(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, other = await make_outbox(settings=QUICK), await make_outbox(settings=QUICK)
    ours, theirs = Gate(), Gate()
    outbox.handler(MoneyDeposited, name="first", concurrency=2)(ours)
    other.handler(MoneyDeposited, name="first")(theirs)
    async with outbox.running():
        await outbox.executor.execute(Emit(tuple(range(10))))
        await ours.calls(2)
        lock_loop_of(outbox).stop()
        await locks_of(outbox).release()
        async with other.running():
            await theirs.calls(10)
            ours.open()
            await eventually(lambda: counters(outbox).refused == 2)
            assert len(ours) == 2
            theirs.open()
            await eventually(lambda: counters(other).succeeded == 10)


# --- two instances -------------------------------------------------------------------------------


async def test_two_concurrent_instances_handle_each_event_once(make_outbox: MakeOutbox, look: Look) -> None:
    outboxes = [await make_outbox(settings=QUICK) for _ in range(2)]
    journal = Journal()
    for outbox in outboxes:
        outbox.handler(MoneyDeposited, name="first")(journal)
        outbox.handler(MoneyDeposited, name="second")(journal)

    async with outboxes[0].running(), outboxes[1].running():
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                emit = Emit(tuple(range(5 * number, 5 * number + 5)))
                group.create_task(outboxes[number % 2].executor.execute(emit))
        await journal.calls(200)
        for outbox in outboxes:
            await outbox.drain(timeout=20)

    assert sorted(journal.amounts) == sorted(list(range(100)) * 2)
    assert await look.states() == {"SUCCEEDED": 200}


async def test_another_instance_takes_over_rows_of_a_leaving_one(make_outbox: MakeOutbox, look: Look) -> None:
    settings = Settings(shutdown_timeout="50ms", fanout_poll_delay="30ms", handling_poll_delay="30ms")
    leaving, staying = await make_outbox(settings=settings), await make_outbox(settings=settings)
    gate, journal = Gate(), Journal()
    leaving.handler(MoneyDeposited, name="first")(gate)
    staying.handler(MoneyDeposited, name="first")(journal)
    async with leaving.running():
        await leaving.executor.execute(Emit((1, 2, 3)))
        await gate.calls(3)
        async with staying.running():
            await leaving.close()
            await journal.calls(3)
            await staying.drain()

    assert sorted(journal.amounts) == [1, 2, 3]
    assert await look.states() == {"SUCCEEDED": 3}


async def test_a_run_whose_events_violate_a_user_constraint_fails(postgres_url: str) -> None:
    look = Look(postgres_url)
    async with opened(Outbox(postgres_url, namespace="app")) as outbox:
        await look.fetch("ALTER TABLE {events} ADD CHECK (event_type <> 'WalletOpened')")

        @outbox.handler(MoneyDeposited, name="emits")
        async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
            envelope.emit(WalletOpened(envelope.event.wallet_id))

        await outbox.executor.execute(Emit((1,)))
        assert (await outbox.drain(timeout=20)).failed == 1
        assert await look.states() == {"FAILED": 1}
