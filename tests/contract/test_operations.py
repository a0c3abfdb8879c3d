"""Operations on every database: filters, pages, groups, records, and bulk operations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from msgspec.structs import replace

from outboxio import (
    ConfigurationError,
    EventEnvelope,
    Filter,
    NotificationRecord,
    Operation,
    OperationState,
    Outbox,
    SelfDeadlock,
    UnknownEventType,
    UnknownHandler,
    Unprocessable,
)
from outboxio.model.operating.groups import Search
from outboxio.operations import notifications
from outboxio.storage.protocols import BulkOperation
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.inside import database_of

MakeOutbox = Callable[..., Awaitable[Outbox]]

DEAD = Filter(states=("DEAD",))
CHUNK = 5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "CHUNK", CHUNK)


class Refusal(Exception):
    pass


async def fails(outbox: Outbox, name: str = "mail", amounts: int = 3, **options: Any) -> Journal:
    """A handler whose notifications all ended DEAD."""
    journal = Journal(lambda envelope: Unprocessable(f"no {int(envelope.event.amount)} for 'ada'"))
    outbox.handler(MoneyDeposited, name=name, **options)(journal)
    await outbox.executor.execute(Emit(tuple(range(amounts))))
    await outbox.drain()
    return journal


def numbers(operation: Operation) -> tuple[str, int, int, int]:
    return str(operation.state), operation.matched, operation.done, operation.refused


def labels(records: Any) -> list[int]:
    return [int(record.model_id) for record in records]


# --- queries -------------------------------------------------------------------------------------


async def test_pages_contain_every_match_newest_first(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal(lambda envelope: Unprocessable("no"))
    outbox.handler(MoneyDeposited, name="mail")(journal)
    for amount in range(7):
        await outbox.executor.execute(Emit((amount,)))
        await outbox.drain()
        clock.advance("1s")

    for filter in (DEAD, Filter(handler="mail"), Filter(event_type="MoneyDeposited", states=("DEAD", "FAILED"))):
        found: list[NotificationRecord] = []
        page = await outbox.admin.list(filter, limit=3)
        found += page
        while page.next is not None:
            page = await outbox.admin.list(filter, limit=3, after=page.next)
            found += page
        assert labels(found) == [6, 5, 4, 3, 2, 1, 0]
        after = await outbox.admin.list(filter, limit=2, after=found[2].id)
        assert labels(after) == [3, 2]
        assert labels([record async for record in outbox.admin.export(filter)]) == [6, 5, 4, 3, 2, 1, 0]
        assert (count := await outbox.admin.count(filter), count.is_complete) == (7, True)
    bounded = await outbox.admin.count(DEAD, most=4)
    assert (bounded, bounded.is_complete, str(bounded)) == (4, False, "4+")


@pytest.mark.above_statements
async def test_a_page_continues_only_with_its_own_filter_and_id(outbox: Outbox) -> None:
    await fails(outbox)
    page = await outbox.admin.list(DEAD, limit=1)
    for after, message in (
        (page.next, "after belongs to a list with a different filter"),
        ("nonsense", "after is 'nonsense'; expected page.next"),
        (7, "after is 7; expected page.next"),
        (uuid4(), "there is no such notification"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            await outbox.admin.list(Filter(states=("DEAD", "EXPIRED")), after=after)  # type: ignore[arg-type]


async def test_a_list_of_several_shards_has_pages_without_gaps(
    make_outbox: MakeOutbox, database_url: str, second_url: str
) -> None:
    outbox = await make_outbox(database={"one": database_url, "two": second_url})
    outbox.handler(MoneyDeposited, name="mail")(Journal(lambda envelope: Unprocessable("no")))
    for amount in range(8):
        await outbox.executor.execute(Emit((amount,)), shard="one" if amount % 3 else "two")
        await outbox.drain()

    found: list[NotificationRecord] = []
    after: str | None = None
    while True:
        page = await outbox.admin.list(DEAD, limit=3, after=after)
        found += page
        if page.next is None:
            break
        after = page.next
    assert labels(found) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert labels(await outbox.admin.list(DEAD, shard="two")) == [6, 3, 0]
    with pytest.raises(ConfigurationError, match=r"the list has 2 shards; pass page\.next, or name the shard"):
        await outbox.admin.list(DEAD, after=found[0].id)

    operation = await outbox.admin.retry(DEAD, reason="both")
    assert (numbers(operation), operation.shard) == (("DONE", 8, 8, 0), "one, two")
    [listed] = await outbox.admin.operations()
    assert listed == await outbox.admin.operation(operation.id)
    assert (numbers(listed), listed.shard, listed.reason) == (("DONE", 8, 8, 0), "one, two", "both")
    [of_one] = await outbox.admin.operations(shard="one")
    assert (of_one.id, of_one.done, of_one.shard) == (operation.id, 5, "one")


async def test_failures_are_grouped_and_a_group_can_be_retried(outbox: Outbox) -> None:
    await fails(outbox, "mail", 3)
    outbox.handler(MoneyDeposited, name="pdf")(Journal(lambda envelope: Refusal("no 9 for 'bob'")))
    outbox.handler(MoneyDeposited, name="fine")(Journal())
    await outbox.executor.execute(Emit((7,)))
    await outbox.drain()

    groups = await outbox.admin.groups()
    assert str(groups) == "grouped over all 5"
    kind = "outboxio.errors.handlers.Unprocessable"
    assert [(g.handler_name, g.count, g.fingerprint.rpartition(".")[2]) for g in groups] == [
        ("mail", 4, "Unprocessable: no * for *"),
        ("pdf", 1, "Refusal: no * for *"),
    ], kind
    mail = groups[0]
    assert mail.sample.endswith("no 7 for 'ada'")
    assert await outbox.admin.count(mail.filter) == 4
    assert numbers(await outbox.admin.retry(mail.filter)) == ("DONE", 4, 4, 0)
    assert [g.handler_name for g in await outbox.admin.groups()] == ["pdf"]
    assert str(await outbox.admin.groups(Filter(handler="pdf"), limit=1)) == "grouped over all 1"


# --- single notifications ------------------------------------------------------------------------


@pytest.mark.above_statements
async def test_an_operation_returns_its_record(outbox: Outbox, clock: MovableClock) -> None:
    await fails(outbox, amounts=1)
    [dead] = await outbox.admin.list("DEAD")
    retried_at = clock.advance("1h")

    operation = await outbox.admin.retry([dead.id, uuid4()], actor="ada", reason="it's fixed")
    assert numbers(operation) == ("DONE", 1, 1, 0)
    assert (operation.kind, operation.reason) == ("retry", "it's fixed")
    assert (operation.actor, operation.origin) == ("ada", "code")
    assert (operation.created_date, operation.finished_date, operation.error) == (retried_at, retried_at, None)
    assert operation.request["number"] == 2
    assert await outbox.admin.operations() == [operation]
    assert await outbox.admin.operation(str(operation.id)) == operation
    assert await outbox.admin.operation(uuid4()) is None


@pytest.mark.above_statements
async def test_a_dry_run_counts_and_writes_nothing(outbox: Outbox, look: Look) -> None:
    await fails(outbox, amounts=2)
    outbox.handler(MoneyDeposited, name="fine")(Journal())
    await outbox.executor.execute(Emit((5,)))
    await outbox.drain()
    before = await look.notifications()
    ids = [record.id for record in await outbox.admin.list()]

    retried = await outbox.admin.retry([*ids, uuid4()], dry_run=True)
    skipped = await outbox.admin.skip(ids, dry_run=True)
    bulk = await outbox.admin.retry(Filter(), dry_run=True)
    assert [numbers(one) for one in (retried, skipped, bulk)] == [
        ("DONE", 4, 0, 0), ("DONE", 4, 0, 1), ("DONE", 3, 0, 0),
    ]  # fmt: skip
    assert all(one.is_dry_run and one.is_complete for one in (retried, skipped, bulk))
    assert (await outbox.admin.operations(), await look.notifications()) == ([], before)


@pytest.mark.above_statements
async def test_every_operation_is_recorded_with_its_actor(outbox: Outbox, clock: MovableClock) -> None:
    await fails(outbox, "ledger", 1, ordered=True)
    admin = outbox.admin.by("ada@host", origin="cli")
    since = clock.now() - timedelta(days=1)
    await admin.pause("ledger", reason="it moves")
    await admin.unpause("ledger")
    await admin.resume("ledger", "0")
    await admin.replay("ledger", since=since, states={"SKIPPED"}, actor="bob")
    await admin.backfill("ledger", since=since, types=["MoneyDeposited"])
    await admin.purge()
    await admin.partitions("ledger", 1)
    await admin.stop(uuid4())
    await admin.unsubscribe("ledger")

    operations = (await outbox.admin.operations())[::-1]
    assert [one.kind for one in operations] == [
        "pause", "unpause", "resume", "replay", "backfill", "purge", "partitions", "stop", "unsubscribe",
    ]  # fmt: skip
    assert {one.origin for one in operations} == {"cli"}
    assert {one.actor for one in operations} == {"ada@host", "bob"}
    assert {one.state for one in operations} == {OperationState.DONE}
    by_kind = {one.kind: one for one in operations}
    assert (by_kind["pause"].reason, by_kind["pause"].request) == ("it moves", {"handler": "ledger"})
    assert by_kind["replay"].actor == "bob"
    assert [by_kind[kind].done for kind in ("resume", "replay", "backfill")] == [1, 1, 0]

    pages = [await outbox.admin.operations(limit=4)]
    while pages[-1].next is not None:
        pages.append(await outbox.admin.operations(limit=4, after=pages[-1].next))
    assert [one for page in pages for one in page] == operations[::-1]


@pytest.mark.above_statements
async def test_a_failed_operation_is_recorded_with_its_error(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    await fails(outbox, amounts=1)
    [dead] = await outbox.admin.list("DEAD")

    async def retry(*args: object) -> int:
        raise ValueError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(database_of(outbox).stored_notifications, "retry", retry)
        with pytest.raises(ValueError, match="the disk is full"):
            await outbox.admin.retry([dead.id])
    [failed] = await outbox.admin.operations()
    assert (failed.state, failed.error) == (OperationState.FAILED, "ValueError: the disk is full")


@pytest.mark.above_statements
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"actor": "a" * 256}, "^actor: .* has 256 characters"),
        ({"actor": "a\0"}, "^actor: .* contains NUL"),
        ({"reason": "r" * 1001}, "^reason is .*; expected a text of at most 1000 characters"),
        ({"reason": 7}, "^reason is 7; expected a text"),
        ({"reason": "\ud800"}, "^reason: .* lone surrogate"),
    ],
    ids=lambda value: ascii(value)[:20],
)
async def test_a_text_that_cannot_be_recorded_is_refused(outbox: Outbox, given: Any, message: str) -> None:
    await fails(outbox, amounts=1)
    for order in (lambda: outbox.admin.retry(DEAD, **given), lambda: outbox.admin.pause("mail", **given)):
        with pytest.raises(ConfigurationError, match=message):
            await order()
    assert (await outbox.admin.operations(), await outbox.admin.paused()) == ([], set())


@pytest.mark.above_statements
async def test_a_filter_with_a_misspelt_name_is_refused_before_writing(outbox: Outbox) -> None:
    await fails(outbox, amounts=1)
    admin = outbox.admin
    calls: list[Callable[[Filter], Awaitable[object]]] = [
        admin.list, admin.count, admin.groups, admin.retry, admin.skip,
        lambda filter: admin.retry(filter, dry_run=True),
    ]  # fmt: skip
    for use in calls:
        with pytest.raises(UnknownHandler, match="did you mean 'mail'"):
            await use(Filter(handler="mial"))
        with pytest.raises(UnknownEventType, match="did you mean 'MoneyDeposited'"):
            await use(Filter(event_type="MoneyDeposted"))
        with pytest.raises(ConfigurationError, match="there is no state 'DAED'"):
            await use(Filter(states=("DAED",)))
    assert await admin.operations() == []


# --- everything that matches ---------------------------------------------------------------------


async def test_all_matches_are_retried_in_chunks_with_progress(outbox: Outbox, clock: MovableClock) -> None:
    amounts = 2 * CHUNK + 1
    journal = await fails(outbox, amounts=amounts)
    reported: list[Operation] = []

    operation = await outbox.admin.retry(DEAD, progress=reported.append, actor="ada")

    assert numbers(operation) == ("DONE", amounts, amounts, 0)
    assert [numbers(one) for one in reported[:2]] == [("RUNNING", n * CHUNK, n * CHUNK, 0) for n in (1, 2)]
    assert reported[-1] == operation == await outbox.admin.operation(operation.id)
    assert operation.request["filter"] == {"states": ["DEAD"]}
    assert await outbox.admin.count(Filter(states=("PENDING",))) == amounts
    assert (await outbox.drain()).dead == amounts
    assert len(journal) == 2 * amounts


@pytest.mark.above_statements
async def test_a_bulk_operation_without_states_uses_its_default_states(outbox: Outbox) -> None:
    await fails(outbox, "dead", 2)
    outbox.handler(MoneyDeposited, name="failed")(Journal(lambda envelope: ValueError()))
    outbox.handler(MoneyDeposited, name="fine")(Journal())
    await outbox.executor.execute(Emit((7,)))
    await outbox.drain()

    assert numbers(await outbox.admin.retry(Filter())) == ("DONE", 4, 4, 0)
    assert numbers(await outbox.admin.skip(Filter(handler="dead"))) == ("DONE", 3, 3, 0)
    assert numbers(await outbox.admin.skip(Filter(handler="fine"))) == ("DONE", 0, 0, 0)
    assert numbers(await outbox.admin.skip(Filter(handler="fine", states=("SUCCEEDED",)))) == ("DONE", 1, 0, 1)


@pytest.mark.above_statements
async def test_rows_that_die_again_during_a_bulk_retry_are_left(outbox: Outbox, look: Look) -> None:
    await fails(outbox, amounts=CHUNK + 5)
    killed = 0

    async def kill() -> None:
        nonlocal killed
        killed += 1
        await look.fetch("UPDATE {event_notifications} SET state = 'DEAD' WHERE state = 'PENDING'")

    tasks: list[asyncio.Task[None]] = []
    operation = await outbox.admin.retry(DEAD, progress=lambda _: tasks.append(asyncio.ensure_future(kill())))
    await asyncio.gather(*tasks)

    assert killed >= 2
    assert numbers(operation) == ("DONE", CHUNK + 5, CHUNK + 5, 0)


@pytest.mark.above_statements
async def test_a_bulk_operation_can_be_stopped_and_keeps_its_changes(outbox: Outbox) -> None:
    await fails(outbox, amounts=2 * CHUNK)
    stops: list[asyncio.Task[bool]] = []

    async def stop(operation: Operation) -> bool:
        return await outbox.admin.stop(operation.id, reason="enough")

    def progress(operation: Operation) -> None:
        if not stops:
            stops.append(asyncio.ensure_future(stop(operation)))

    operation = await outbox.admin.retry(DEAD, progress=progress)
    assert await stops[0]
    assert operation.state in (OperationState.STOPPED, OperationState.DONE)
    stopped = await outbox.admin.operation(operation.id)
    assert stopped == operation
    assert await outbox.admin.count(Filter(states=("PENDING",))) == operation.done
    assert not await outbox.admin.stop(operation.id)


@pytest.mark.above_statements
async def test_cancelling_the_call_stops_its_operation(outbox: Outbox) -> None:
    await fails(outbox, amounts=2 * CHUNK)

    def cancel(operation: Operation) -> None:
        call.cancel()

    call = asyncio.ensure_future(outbox.admin.skip(DEAD, progress=cancel))
    with pytest.raises(asyncio.CancelledError):
        await call
    [operation] = await outbox.admin.operations()
    assert numbers(operation) == ("STOPPED", CHUNK, CHUNK, 0)


@pytest.mark.above_statements
async def test_a_background_operation_is_run_by_its_own_process(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    await fails(outbox, amounts=CHUNK + 1)
    async with outbox.running(handling=False):
        operation = await outbox.admin.skip(DEAD, background=True)
        assert numbers(operation) == ("RUNNING", 0, 0, 0)
        await eventually(lambda: has_ended(outbox, operation))
    assert numbers(await ended(outbox, operation)) == ("DONE", CHUNK + 1, CHUNK + 1, 0)


@pytest.mark.above_statements
async def test_a_background_operation_waits_for_a_running_process(make_outbox: MakeOutbox) -> None:
    tool, outbox = await make_outbox(), await make_outbox()
    await fails(outbox, amounts=2)
    operation = await tool.admin.retry(DEAD, background=True)
    async with outbox.running(handling=False):
        await eventually(lambda: has_ended(tool, operation))
    assert numbers(await ended(tool, operation)) == ("DONE", 2, 2, 0)


@pytest.mark.above_statements
async def test_a_background_operation_can_be_stopped_before_it_starts(make_outbox: MakeOutbox) -> None:
    tool, outbox = await make_outbox(), await make_outbox()
    await fails(outbox, amounts=2)
    operation = await tool.admin.retry(DEAD, background=True)
    assert await tool.admin.stop(operation.id)
    async with outbox.running(handling=False):
        await eventually(lambda: has_ended(tool, operation))
    assert numbers(await ended(tool, operation)) == ("STOPPED", 0, 0, 0)


@pytest.mark.above_statements
async def test_bulk_operations_of_a_dead_process_continue_and_single_ones_fail(
    outbox: Outbox, clock: MovableClock
) -> None:
    await fails(outbox, amounts=CHUNK + 1)
    repository, admin = database_of(outbox).operations, outbox.admin
    started = await admin.retry(DEAD, background=True)
    left = await repository.take("app", started.id, "the dead", clock.now(), clock.now())
    assert left is not None
    search = database_of(outbox).search
    until = clock.now() + timedelta(microseconds=1)
    order = BulkOperation("retry", started.id, "the dead", search_in(left.operation))
    chunk = await search.change_chunk("app", order, None, CHUNK, until)
    assert (chunk.done, chunk.is_ours) == (CHUNK, True)
    pause = replace(started, id=uuid4(), kind="pause", request={"handler": "mail"})
    await repository.insert("app", pause, "the dead")

    clock.advance("31s")
    async with outbox.running(handling=False):
        await eventually(lambda: has_ended(outbox, started))
        await eventually(lambda: has_ended(outbox, pause))
    assert numbers(await ended(outbox, started)) == ("DONE", CHUNK + 1, CHUNK + 1, 0)
    interrupted = await ended(outbox, pause)
    assert (interrupted.state, "check the notifications" in str(interrupted.error)) == (OperationState.FAILED, True)
    again = await search.change_chunk("app", order, None, CHUNK, until)
    assert not again.is_ours, "a process that wakes up changes nothing"


@pytest.mark.above_statements
async def test_a_transactional_handler_cannot_bulk_change_its_own_row(outbox: Outbox) -> None:
    answers: list[object] = []

    @outbox.handler(MoneyDeposited, name="ledger", delivery="transactional")
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        for order in (outbox.admin.retry, outbox.admin.skip):
            try:
                answers.append(await order(Filter(handler="ledger")))
            except SelfDeadlock as error:
                answers.append(error)
        answers.append(await outbox.admin.retry(Filter(handler="ledger"), dry_run=True))

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1
    assert [type(answer) for answer in answers] == [SelfDeadlock, SelfDeadlock, Operation]


async def has_ended(outbox: Outbox, operation: Operation) -> bool:
    return (await ended(outbox, operation)).has_ended


async def ended(outbox: Outbox, operation: Operation) -> Operation:
    found = await outbox.admin.operation(operation.id)
    assert found is not None
    return found


def search_in(operation: Operation) -> Any:
    return msgspec.convert(operation.request["search"], Search)
