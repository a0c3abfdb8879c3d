"""Calls that would wait for their own handler or transaction are refused, with advice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from outboxio import (
    Action,
    Batch,
    EventEnvelope,
    HandlerFailed,
    NestedExecute,
    Outbox,
    SelfDeadlock,
    Settings,
    Transaction,
    Unprocessable,
)
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import run_of
from tests.kit.probes import MakeOutbox, doing
from tests.kit.spies import counters

pytestmark = pytest.mark.above_statements

Call = Callable[[Outbox], Awaitable[Any]]
Envelope = EventEnvelope[Any]

PATIENT = Settings(handler_timeout="60s", shutdown_timeout="60s", purge_enabled=False)
"""What waits for itself would do so for longer than a test may take."""

CALLS: dict[str, Call] = {
    "drain": lambda outbox: outbox.drain(),
    "drain-within-a-time": lambda outbox: asyncio.wait_for(outbox.drain(), 60),
    "drain-in-a-task": lambda outbox: asyncio.create_task(outbox.drain()),
    "close": lambda outbox: outbox.close(),
    "close-in-a-task": lambda outbox: asyncio.create_task(outbox.close()),
}


class Answers:
    """The results of calls made by handlers."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    async def of(self, call: Awaitable[Any]) -> None:
        try:
            self.answers.append(await call)
        except SelfDeadlock as error:
            self.answers.append(error)

    async def wait(self, number: int = 1) -> list[Any]:
        await eventually(lambda: len(self.answers) >= number)
        return self.answers


# --- drain and close -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("options", [{}, {"delivery": "transactional"}, {"batch": Batch(size=1)}], ids=str)
async def test_waiting_calls_inside_a_handler_are_refused_by_name(
    make_outbox: MakeOutbox, options: Any, name: str
) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()

    @outbox.handler(MoneyDeposited, name="mail", **options)
    async def handle(given: Any) -> None:
        await calls.of(CALLS[name](outbox))

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        [error] = await calls.wait()
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert (error.call, error.inside) == (f"outbox.{name.partition('-')[0]}()", "handler 'mail'")


async def test_waiting_calls_inside_a_hook_are_refused(make_outbox: MakeOutbox) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        await calls.of(outbox.drain())
        await calls.of(outbox.admin.skip([envelope.notification_id]))

    outbox.handler(MoneyDeposited, name="mail", on_dead=hook)(Journal(lambda envelope: Unprocessable("no")))
    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).dead == 1

    assert [error.call.partition(" of")[0] for error in await calls.wait(2)] == ["outbox.drain()", "admin.skip()"]


async def test_waiting_calls_inside_consume_are_refused(make_outbox: MakeOutbox) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()

    @outbox.handler(MoneyDeposited, name="mail")
    async def handle(envelope: Envelope) -> None:
        await calls.of(outbox.drain())
        await calls.of(outbox.close())

    done = await outbox.inbox.consume(source="bank", external_id="1", event=MoneyDeposited(uuid4(), Decimal(1)))
    assert done.succeeded == ("mail",)
    assert [type(answer) for answer in calls.answers] == [SelfDeadlock] * 2


async def test_a_task_that_outlives_its_handler_may_drain_and_close(make_outbox: MakeOutbox) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()
    tasks: list[asyncio.Task[None]] = []
    has_ended = asyncio.Event()

    async def later() -> None:
        await has_ended.wait()
        await calls.of(outbox.drain())
        await calls.of(outbox.close())

    @outbox.handler(MoneyDeposited, name="mail")
    async def handle(envelope: Envelope) -> None:
        tasks.append(asyncio.create_task(later()))

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: counters(outbox).succeeded == 1)
        has_ended.set()
        drained, closed = await calls.wait(2)

    assert (drained.failed, closed) == (0, None)


async def test_a_handler_may_drain_an_outbox_it_does_not_run_in(make_outbox: MakeOutbox, second_url: str) -> None:
    first = await make_outbox(settings=PATIENT)
    second, calls = await make_outbox("second", database=second_url, settings=PATIENT), Answers()

    @first.handler(MoneyDeposited, name="outer")
    async def outer(envelope: Envelope) -> None:
        await second.executor.execute(Emit((2,)))
        await calls.of(second.drain())

    @second.handler(MoneyDeposited, name="inner")
    async def inner(envelope: Envelope) -> None:
        await calls.of(first.drain())

    await first.executor.execute(Emit((1,)))
    assert (await first.drain()).succeeded == 1
    circle, drained = calls.answers

    assert (circle.call, circle.inside) == ("outbox.drain()", "handler 'outer'")
    assert drained.succeeded == 1

    await second.executor.execute(Emit((3,)))
    assert (await second.drain()).succeeded == 1
    assert calls.answers[2].succeeded == 0, "a handler that the first outbox does not wait for"


# --- rows that a handler's own transaction has locked ----------------------------------------------

Order = Callable[[Outbox, list[UUID]], Awaitable[Any]]
OPERATIONS: dict[str, Order] = {
    "retry": lambda outbox, ids: outbox.admin.retry(ids),
    "skip": lambda outbox, ids: outbox.admin.skip(ids),
    "skip-within-a-time": lambda outbox, ids: asyncio.wait_for(outbox.admin.skip(ids), 60),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("through", ["its own outbox", "another", "an action that joined"])
async def test_a_transactional_handler_may_not_operate_on_its_own_row(
    make_outbox: MakeOutbox, name: str, through: str
) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()
    operator = await make_outbox(settings=PATIENT) if through == "another" else outbox

    @outbox.handler(MoneyDeposited, name="ledger", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        async def operate(tx: Transaction | None = None) -> None:
            await calls.of(OPERATIONS[name](operator, [uuid4(), envelope.notification_id]))

        await (envelope.execute(doing(operate)) if through == "an action that joined" else operate())

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1
    [error] = calls.answers

    assert error.call.startswith(f"admin.{name.partition('-')[0]}() of notification ")
    assert "raise an error to retry it" in str(error)


async def test_a_transactional_batch_may_not_operate_on_its_rows(make_outbox: MakeOutbox) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()

    @outbox.handler(MoneyDeposited, name="ledger", delivery="transactional", batch=Batch(size=3))
    async def handle(envelopes: list[Envelope]) -> None:
        for envelope in envelopes:
            await calls.of(outbox.admin.retry([envelope.notification_id]))

    await outbox.executor.execute(Emit((1, 2, 3)))
    assert (await outbox.drain()).succeeded == 3
    assert [type(answer) for answer in calls.answers] == [SelfDeadlock] * 3


async def test_a_plain_handler_may_operate_on_its_own_row(make_outbox: MakeOutbox) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()

    @outbox.handler(MoneyDeposited, name="mail")
    async def handle(envelope: Envelope) -> None:
        await calls.of(outbox.admin.skip([envelope.notification_id]))

    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    assert [operation.done for operation in calls.answers] == [1]


@pytest.mark.above_statements(False)
async def test_operations_on_other_rows_do_not_wait(make_outbox: MakeOutbox, look: Look) -> None:
    """Unless there is a single writer whose turn this transaction has: then operations are refused, in any task.

    After the transaction has ended, no operation is refused.
    """
    outbox, calls = await make_outbox(settings=PATIENT), Answers()
    other = Journal(lambda envelope: Unprocessable("no"))
    outbox.handler(WalletOpened, name="other", ordered=True)(other)
    async with outbox.transaction("Open") as tx:
        for _ in range(2):
            tx.emit(WalletOpened(uuid4()), ordering_key="k")
    await outbox.drain()
    (dead,) = await outbox.admin.list(state="DEAD")

    async def operate_on_others() -> None:
        admin = outbox.admin
        await calls.of(admin.retry([dead.id]))
        await calls.of(admin.skip([dead.id]))
        await calls.of(admin.resume("other", "k"))
        await calls.of(admin.replay("ledger", since=dead.event_date))
        await calls.of(admin.replay("other", since=dead.event_date, states=["SKIPPED"]))
        await calls.of(admin.backfill("other", since=dead.event_date))
        await calls.of(admin.pause("other"))
        await calls.of(admin.unpause("other"))
        await calls.of(admin.purge())
        await calls.of(admin.unsubscribe("other"))

    tasks: list[asyncio.Task[None]] = []

    @outbox.handler(MoneyDeposited, name="ledger", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        await asyncio.wait_for(operate_on_others(), 60)
        assert len(await asyncio.wait_for(outbox.admin.list(handler="other"), 60)) == 2
        tasks.append(asyncio.create_task(afterwards()))

    async def afterwards() -> None:
        await eventually(lambda: counters(outbox).succeeded >= 1)
        await calls.of(outbox.admin.pause("other"))

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        *answers, last = await calls.wait(11)

    refused = [answer for answer in answers if isinstance(answer, SelfDeadlock)]
    assert len(refused) == (len(answers) if look.is_file else 0)
    assert last is None


# --- inside a transaction --------------------------------------------------------------------------

INSIDE: dict[str, Call] = {
    **CALLS,
    "migrate": lambda outbox: outbox.migrate(),
    "migrate-in-a-task": lambda outbox: asyncio.create_task(outbox.migrate()),
    "running": lambda outbox: outbox.running().__aenter__(),
}


with_one_writer = pytest.mark.not_on(
    "postgres", "mysql", "mariadb", why="on a server these wait for a transaction only if their rows are locked in it"
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=with_one_writer if name.startswith(("drain", "running")) else ()) for name in INSIDE],
)
async def test_waiting_calls_inside_a_transaction_are_refused_and_it_continues(
    make_outbox: MakeOutbox, name: str
) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()
    outbox.handler(MoneyDeposited, name="mail")(Journal())

    async with outbox.transaction("Deposit") as tx:
        await calls.of(INSIDE[name](outbox))
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)))

    [error] = calls.answers
    assert (error.call, error.inside) == (f"outbox.{name.partition('-')[0]}()", "the transaction of Deposit")
    assert (await outbox.drain()).succeeded == 1


class Migrates(Action):
    async def perform(self, tx: Transaction) -> None:
        await OUTBOXES[-1].migrate()


OUTBOXES: list[Outbox] = []


async def test_waiting_calls_inside_an_action_are_refused(make_outbox: MakeOutbox) -> None:
    OUTBOXES.append(outbox := await make_outbox())
    with pytest.raises(SelfDeadlock, match="the transaction of Migrates"):
        await outbox.executor.execute(Migrates())
    OUTBOXES.clear()


async def test_nesting_is_detected_through_transactions_of_other_outboxes(
    make_outbox: MakeOutbox, second_url: str
) -> None:
    first, second = await make_outbox(), await make_outbox("second", database=second_url)

    async with first.transaction("Outer"), second.transaction("Between"):
        with pytest.raises(NestedExecute, match="inside the transaction of Outer"):
            await first.executor.execute(Emit((1,)))


# --- running() -------------------------------------------------------------------------------------


async def test_a_block_inside_a_handler_does_not_prolong_running(make_outbox: MakeOutbox) -> None:
    """Leaving the last outer block waits for the handler, which leaves its own block at once."""
    outbox = await make_outbox(settings=PATIENT)
    is_inside, ends = asyncio.Event(), list[str]()

    @outbox.handler(MoneyDeposited, name="mail")
    async def handle(envelope: Envelope) -> None:
        async with outbox.running() as entered:
            assert entered is outbox
            is_inside.set()
            await envelope.stopping.wait()
        ends.append("handler")

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await is_inside.wait()
    ends.append("stay")

    assert ends == ["handler", "stay"]
    assert (await outbox.admin.counts())["SUCCEEDED"] == 1


async def test_a_handler_cannot_leave_the_last_running_block(make_outbox: MakeOutbox) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()
    stay = outbox.running()

    @outbox.handler(MoneyDeposited, name="mail")
    async def handle(envelope: Envelope) -> None:
        await calls.of(stay.__aexit__(None, None, None))

    await stay.__aenter__()
    await outbox.executor.execute(Emit((1,)))
    [error] = await calls.wait()
    assert (error.call, error.inside) == ("leaving outbox.running()", "handler 'mail'")
    await eventually(lambda: counters(outbox).succeeded == 1)
    assert run_of(outbox), "it continues to run"
    await stay.__aexit__(None, None, None)


async def test_a_handler_run_by_drain_does_not_wait_for_it(make_outbox: MakeOutbox) -> None:
    outbox, calls = await make_outbox(settings=PATIENT), Answers()

    @outbox.handler(MoneyDeposited, name="mail")
    async def handle(envelope: Envelope) -> None:
        await calls.of(outbox.running().__aenter__())

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1
    assert [answer.call for answer in calls.answers] == ["outbox.running()"]
