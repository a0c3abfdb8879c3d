"""Wake-ups of finding: a row that becomes startable in this process is found at once, without polling.

No loop polls in these tests, so work without a wake-up is never done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Event, EventEnvelope, HandlerFailed, Outbox, RetryPolicy, Settings, Unprocessable
from outboxio.errors import CommitUnknown
from outboxio.runs import key_queues
from outboxio.testing import MovableClock
from outboxio.transaction import Transaction
from tests.kit.app import Journal, Look, MoneyDeposited, eventually
from tests.kit.inside import cursors_of, dispatcher_of, locks_of, run_of
from tests.kit.marks import needs_many_writers
from tests.kit.probes import MakeOutbox, open_transaction
from tests.kit.spies import Trouble, counters, watch

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

UNPOLLED = Settings(handling_poll_delay="1h", fanout_poll_delay="1h", purge_enabled=False)
QUIET_AFTER = 0.6  # seconds after which no earlier timer wakes the finding loop any more
Envelope = EventEnvelope[MoneyDeposited]


class Closed(Event, strict_priority=True):
    number: int


@asynccontextmanager
async def unpolled(*outboxes: Outbox) -> AsyncIterator[None]:
    """All of these outboxes run, and read due rows only when they are woken.

    Without a wake-up an outbox reads its first rows, and on some databases the writes of other processes.
    """
    async with AsyncExitStack() as stack:
        for outbox in outboxes:
            await stack.enter_async_context(outbox.running())
            finding: Any = run_of(outbox).loops.find
            settling: Any = run_of(outbox).loops.settle
            finding._schedule._eager_for, settling._schedule._delay = lambda: 0.0, lambda: 3600.0
            for loop in (finding, settling):
                await eventually(lambda loop=loop: loop._signal._waiter is not None)
                loop.wake()  # the wait in progress was a short one
        yield


async def post(outbox: Outbox, key: object, *amounts: int) -> None:
    async with outbox.transaction("Post") as tx:
        for amount in amounts:
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key=key, model_id=amount)


async def queues_scanned(outbox: Outbox) -> None:
    """Wait until the outbox has scanned its ordering keys and will not scan them again for a second."""
    stranded, loop = dispatcher_of(outbox)._gate.stranded, asyncio.get_running_loop()
    await eventually(lambda: not stranded.is_due(loop.time()))


# --- rows that end in a transaction of their own ---------------------------------------------------


@pytest.mark.parametrize("delivery", ["transactional", "at_least_once", "at_most_once"])
async def test_all_events_of_a_key_are_handled_one_after_another(make_outbox: MakeOutbox, delivery: str) -> None:
    outbox = await make_outbox(settings=UNPOLLED)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True, delivery=delivery)(journal := Journal())

    async with unpolled(outbox):
        await post(outbox, "ada", *range(10))
        await journal.calls(10)

    assert journal.amounts == [*range(10)]


@pytest.mark.parametrize("delivery", ["transactional", "at_least_once"])
async def test_a_key_continues_after_a_dead_event_once_the_hook_returned(
    make_outbox: MakeOutbox, delivery: str
) -> None:
    outbox = await make_outbox(settings=UNPOLLED)
    journal = Journal(lambda envelope: Unprocessable("no") if envelope.event.amount % 2 else None)
    hook_calls: list[int] = []

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        hook_calls.append(int(envelope.event.amount))

    outbox.handler(
        MoneyDeposited, name="ledger", ordered=True, on_dead_key="continue", on_dead=hook, delivery=delivery
    )(journal)

    async with unpolled(outbox):
        await post(outbox, "ada", *range(6))
        await journal.calls(6)
        await eventually(lambda: hook_calls == [1, 3, 5])

    assert journal.amounts == [*range(6)]


@pytest.mark.parametrize("delivery", ["transactional", "at_least_once"])
@pytest.mark.parametrize("fails", [False, True])
async def test_the_next_handler_of_a_strict_event_follows_the_first_attempt(
    make_outbox: MakeOutbox, delivery: str, fails: bool
) -> None:
    outbox = await make_outbox(settings=UNPOLLED)
    started: list[tuple[str, int]] = []

    def handler(name: str) -> Any:
        async def handle(envelope: EventEnvelope[Closed]) -> None:
            started.append((name, envelope.event.number))
            if fails:
                raise Unprocessable("no")

        return handle

    for priority, name in enumerate(("first", "second", "third")):
        outbox.handler(Closed, name=name, priority=priority, delivery=delivery)(handler(name))

    async with unpolled(outbox):
        for number in range(3):
            async with outbox.transaction("Close") as tx:
                tx.emit(Closed(number))
            await eventually(lambda number=number: len(started) == 3 * number + 3)

    assert started == [(name, number) for number in range(3) for name in ("first", "second", "third")]


async def test_skipped_and_expired_rows_do_not_block_later_ones(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(settings=UNPOLLED, clock=clock)
    journal = Journal()
    outbox.handler(MoneyDeposited, name="relay", relay=True, ordered=True, on_dead_key="continue")(journal)
    await post(outbox, "ada", 0, 1)
    async with outbox.running(handling=False):
        await eventually(lambda: _all_are_fanned_out(outbox))
    clock.advance("30d")

    async with unpolled(outbox):
        for number in (2, 3):
            await outbox.inbox.receive(
                source="bank", external_id=str(number), event=MoneyDeposited(uuid4(), Decimal(9)), ordering_key="ada"
            )
        await post(outbox, "ada", 4)
        await journal.calls(1)
        # The next row of the key may start before the outcomes of the rows in front of it are counted.
        await eventually(lambda: (counters(outbox).expired, counters(outbox).skipped) == (2, 2))

    assert journal.amounts == [4]


# --- runs with an unknown outcome ------------------------------------------------------------------


@pytest.mark.real_time("waits until no timer is left that could wake finding")
async def test_a_run_with_a_lost_commit_is_repeated(make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = await make_outbox(settings=UNPOLLED)
    outbox.handler(MoneyDeposited, name="ledger", delivery="transactional")(journal := Journal())
    commit, lost = Transaction.commit, list[Any]()

    async def lose(tx: Transaction, *rows: Any) -> None:
        if lost or not tx.in_handler:
            return await commit(tx, *rows)
        lost.append(tx)
        await asyncio.sleep(QUIET_AFTER)
        await tx._session.rollback()
        raise CommitUnknown(tx.action_name, tx.action_id)

    monkeypatch.setattr(Transaction, "commit", lose)
    async with unpolled(outbox):
        await post(outbox, "ada", 1)
        await journal.calls(2)
        await eventually(lambda: counters(outbox).succeeded == 1)


@needs_many_writers
async def test_a_row_locked_by_a_transaction_is_handled_after_it_ends(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=UNPOLLED)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True, delivery="transactional")(journal := Journal())
    await post(outbox, "ada", 1, 2)
    async with outbox.running(handling=False):
        await eventually(lambda: _all_are_fanned_out(outbox))

    async with open_transaction(look) as (connection, end):
        await _lock_first_row(look, connection)
        async with unpolled(outbox):
            await eventually(lambda: counters(outbox).refused >= 2)
            assert len(journal) == 0
            await end()
            refused = counters(outbox).refused
            await journal.calls(2)
            assert counters(outbox).refused <= refused + 1, "a locked row is retried occasionally, not continuously"


async def _all_are_fanned_out(outbox: Outbox) -> bool:
    return (await outbox.admin.counts())["undelivered"] == 0


async def _lock_first_row(look: Look, connection: Any) -> None:
    first = (await look.notifications())[0]["id"]
    statement = f"SELECT id FROM eventlog.event_notifications WHERE id = '{first}' FOR UPDATE"
    if look.driver == "asyncpg":
        await connection.execute(statement)
        return
    async with connection.cursor() as cursor:
        await cursor.execute(statement)


@pytest.mark.real_time("waits until no timer is left that could wake finding")
async def test_a_row_with_a_refused_outcome_is_read_again(make_outbox: MakeOutbox) -> None:
    """The lease has expired: the lock is reacquired, and the outcome is written under the new term, without a rerun."""
    outbox = await make_outbox(settings=UNPOLLED)
    outbox.handler(MoneyDeposited, name="mail")(journal := Journal())
    refusals = [1]

    async def refuse(method: Callable[..., Awaitable[int]], *args: Any) -> int:
        if not refusals:
            return await method(*args)
        await asyncio.sleep(QUIET_AFTER)
        return refusals.pop() - 1

    watch(outbox, "notifications").trouble["settle"] = refuse
    async with unpolled(outbox):
        await post(outbox, "ada", 1)
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert len(journal) == 1


async def test_an_unwritable_bucket_blocks_no_key_of_another_handler(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=UNPOLLED)
    outbox.handler(MoneyDeposited, name="fails")(Journal(lambda envelope: ValueError("it fails")))
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(journal := Journal())
    notifications = watch(outbox, "notifications")
    notifications.trouble["settle"] = _refuses("FAILED")

    async with unpolled(outbox):
        await post(outbox, "ada", *range(5))
        await journal.calls(5)
        notifications.trouble.clear()


def _refuses(state: str) -> Trouble:
    async def trouble(method: Callable[..., Awaitable[Any]], bucket: Any, *args: Any) -> Any:
        if bucket.state == state:
            raise ValueError("this cannot be written")
        return await method(bucket, *args)

    return trouble


# --- rows that others finish -----------------------------------------------------------------------


async def skip(outbox: Outbox) -> None:
    (dead,) = await outbox.admin.list(state="DEAD")
    await outbox.admin.skip([dead.id])


async def retry(outbox: Outbox) -> None:
    (dead,) = await outbox.admin.list(state="DEAD")
    await outbox.admin.retry([dead.id])


async def resume(outbox: Outbox) -> None:
    await outbox.admin.resume("ledger", "ada")


async def replay(outbox: Outbox) -> None:
    (dead,) = await outbox.admin.list(state="DEAD")
    await outbox.admin.replay("ledger", since=dead.event_date, states=["DEAD"])


@pytest.mark.parametrize("operate", [skip, retry, resume, replay])
@pytest.mark.parametrize("delivery", ["transactional", "at_least_once"])
async def test_a_parked_key_continues_when_an_operator_resumes_it(
    make_outbox: MakeOutbox, operate: Callable[[Outbox], Awaitable[None]], delivery: str
) -> None:
    outbox = await make_outbox(settings=UNPOLLED)
    broken = [Unprocessable("its service is down")]
    journal = Journal(lambda envelope: broken.pop() if broken else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True, delivery=delivery)(journal)

    async with unpolled(outbox):
        await post(outbox, "ada", 0, 1, 2)
        await eventually(lambda: _states(outbox, DEAD=1, BLOCKED=2))
        outbox.wake()
        await queues_scanned(outbox)
        await operate(outbox)
        await journal.calls(3 if operate in (skip, resume) else 4)

    assert journal.amounts == ([0, 1, 2] if operate in (skip, resume) else [0, 0, 1, 2])


async def _states(outbox: Outbox, **expected: int) -> bool:
    counts = await outbox.admin.counts()
    return all(counts[state] == number for state, number in expected.items())


@pytest.mark.not_on("mysql", "mariadb", "sqlite", why="only PostgreSQL wakes other processes")
async def test_an_operation_of_another_process_wakes_where_supported(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, operator = await make_outbox(settings=UNPOLLED), await make_outbox(settings=UNPOLLED)
    broken = [Unprocessable("its service is down")]
    journal = Journal(lambda envelope: broken.pop() if broken else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(journal)

    async with unpolled(outbox):
        await post(outbox, "ada", 0, 1, 2)
        await eventually(lambda: _states(outbox, DEAD=1, BLOCKED=2))
        await queues_scanned(outbox)
        await operator.admin.resume("ledger", "ada")
        await journal.calls(3)


@pytest.mark.parametrize("delivery", ["transactional", "at_least_once"])
@pytest.mark.not_on("mysql", "mariadb", "sqlite", why="only PostgreSQL wakes other processes")
async def test_strict_priority_across_processes_does_not_wait_for_a_poll(
    make_outbox: MakeOutbox, delivery: str
) -> None:
    one, two = await make_outbox(settings=UNPOLLED), await make_outbox(settings=UNPOLLED)
    first, second = Journal(), Journal()
    one.handler(Closed, name="first", delivery=delivery)(first)
    two.handler(Closed, name="second", priority=1)(second)

    async with unpolled(one, two):
        for number in range(5):
            async with one.transaction("Close") as tx:
                tx.emit(Closed(number))
        await first.calls(5)
        await second.calls(5)


async def test_a_handler_continues_when_its_pause_ends(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=UNPOLLED)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(journal := Journal())

    async with unpolled(outbox):
        await outbox.admin.pause("ledger")
        await eventually(lambda: _is_paused(outbox))
        await post(outbox, "ada", 1, 2)
        await eventually(lambda: _all_are_fanned_out(outbox))
        await outbox.admin.unpause("ledger")
        await journal.calls(2)


def _is_paused(outbox: Outbox) -> bool:
    return all(cursor.is_paused for cursor in cursors_of(outbox).values())


async def test_rows_waiting_for_a_removed_handler_continue_when_it_expires(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    gone = await make_outbox(settings=UNPOLLED, clock=clock)
    gone.handler(Closed, name="gone")(Journal())
    outbox = await make_outbox(settings=UNPOLLED, clock=clock)
    outbox.handler(Closed, name="stays", priority=1)(journal := Journal())
    await gone.admin.pause("gone")
    await gone.drain()  # announces it
    async with outbox.transaction("Close") as tx:
        tx.emit(Closed(1))
    await outbox.drain()
    assert await _states(outbox, PENDING=1, BLOCKED=1)
    clock.advance("30d")
    await outbox.admin.unsubscribe("gone")

    async with unpolled(outbox):
        await queues_scanned(outbox)
        await eventually(lambda: run_of(outbox).fans_out)
        run_of(outbox).loops.housekeeping.wake()
        await eventually(lambda: _states(outbox, EXPIRED=1))
        await journal.calls(1)


async def test_a_new_holder_checks_all_key_queues(
    make_outbox: MakeOutbox, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predecessor blocked the rows, and died before it unblocked them."""
    monkeypatch.setattr(key_queues, "CHUNK", 2)
    outbox = await make_outbox(settings=UNPOLLED)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(journal := Journal())
    for key in range(7):
        await post(outbox, key, key)
    async with outbox.running(handling=False):
        await eventually(lambda: _all_are_fanned_out(outbox))
    await look.fetch("UPDATE {event_notifications} SET state = 'BLOCKED'")

    async with unpolled(outbox):
        await journal.calls(7)


@pytest.mark.real_time("waits until no timer is left that could wake finding")
async def test_a_row_runs_again_once_its_earlier_stuck_run_ended(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(**_as_options(UNPOLLED), shutdown_timeout=0))
    released, started, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="stuck", timeout="60s")
    async def handle(envelope: Envelope) -> None:
        if started.is_set():
            return done.set()
        started.set()
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    async with outbox.running():
        await post(outbox, "ada", 1)
        await started.wait()
    async with unpolled(outbox):
        await asyncio.sleep(QUIET_AFTER)
        assert not done.is_set()
        released.set()
        async with asyncio.timeout(20):
            await done.wait()


def _as_options(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("handling_poll_delay", "fanout_poll_delay", "purge_enabled")}


async def test_a_retry_due_soon_is_found_on_time(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=UNPOLLED)
    failures = [ValueError("once"), ValueError("twice")]
    journal = Journal(lambda envelope: failures.pop() if failures else None)
    outbox.handler(MoneyDeposited, name="mail", retry=RetryPolicy(base="50ms", jitter=0))(journal)

    async with unpolled(outbox):
        await post(outbox, "ada", 1)
        await journal.calls(3)


async def test_unproven_locks_cause_no_busy_loop_after_an_operation(
    make_outbox: MakeOutbox,
) -> None:
    outbox = await make_outbox(settings=Settings(**_as_options(UNPOLLED), lock_heartbeat="1s"))
    broken = [Unprocessable("its service is down")]
    journal = Journal(lambda envelope: broken.pop() if broken else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(journal)

    async with unpolled(outbox):
        await post(outbox, "ada", 0, 1, 2)
        await eventually(lambda: _states(outbox, DEAD=1, BLOCKED=2))
        stay, rounds = run_of(outbox), [0]
        finding: Any = stay.loops.find
        find_once = finding._run_once

        async def count() -> Any:
            rounds[0] += 1
            return await find_once()

        finding._run_once = count
        locks_of(outbox)._trusted_until = float("-inf")
        stay.locks_proven_until(float("-inf"))
        dispatcher_of(outbox)._gate.stranded._next = float("-inf")  # it is time to scan the key queues
        await outbox.admin.resume("ledger", "ada")
        await journal.calls(3)

    assert rounds[0] < 100
