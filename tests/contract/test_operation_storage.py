"""The table ``operations`` on every database: who requested which operation, and which process runs it."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import pytest
from msgspec.structs import replace

from outboxio import Outbox
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.storage.tables.operations import NOBODY, Operations
from outboxio.support.ids import uuid7
from tests.kit.app import Emit, Journal, MoneyDeposited
from tests.kit.inside import database_of
from tests.kit.storage import NOW

LATER = NOW + timedelta(seconds=31)


@pytest.fixture
def operations(outbox: Outbox) -> Operations:
    return database_of(outbox).operations


def new_operation(created: datetime = NOW) -> Operation:
    return Operation(
        id=uuid7(),
        kind="retry",
        state=OperationState.RUNNING,
        matched=0,
        done=0,
        refused=0,
        request={"handler": "mail", "states": ["DEAD"], "key": "'\"\\\n\U0001f600"},
        actor="ada@host",
        origin="code",
        reason="it's fixed",
        created_date=created,
        updated_date=created,
        finished_date=None,
        error=None,
        shard="default",
    )


async def test_an_operation_is_read_back_unchanged(operations: Operations) -> None:
    written = new_operation()
    await operations.insert("app", written, "worker")
    assert await operations.get("app", written.id) == written

    ended = replace(
        written, state=OperationState.FAILED, matched=7, done=2**40, refused=3, updated_date=LATER,
        finished_date=LATER, error="ValueError: \U0001f600",
    )  # fmt: skip
    assert not await operations.finish("app", ended, "another worker")
    assert await operations.finish("app", ended, "worker")
    assert await operations.get("app", written.id) == ended
    assert not await operations.finish("app", ended, "worker"), "a finished operation never changes"


async def test_operations_of_another_namespace_are_neither_seen_nor_changed(
    operations: Operations,
) -> None:
    written = new_operation()
    await operations.insert("app", written, NOBODY)
    assert await operations.get("other", written.id) is None
    assert await operations.select("other", 10, None) == []
    assert await operations.stale("other", LATER, 10) == []
    assert await operations.take("other", written.id, "worker", LATER, LATER) is None
    assert not await operations.request_stop("other", written.id)
    assert not await operations.stop_requested("other", written.id)
    assert await operations.remove_old("other", LATER, 10) == 0
    assert await operations.get("app", written.id) == written


async def test_operations_are_listed_newest_first_in_pages(operations: Operations) -> None:
    same = NOW + timedelta(seconds=9)
    stored = [new_operation(created=NOW + timedelta(seconds=second)) for second in range(3)]
    stored += [new_operation(created=same) for _ in range(3)]
    for one in stored:
        await operations.insert("app", one, "worker")
    newest_first = sorted(stored, key=lambda one: (one.created_date, str(one.id)), reverse=True)

    found: list[Operation] = []
    before: tuple[datetime, UUID] | None = None
    while page := await operations.select("app", 2, before):
        found += page
        before = page[-1].created_date, page[-1].id
    assert found == newest_first


async def test_an_operation_of_a_dead_worker_is_taken_over_once(operations: Operations) -> None:
    written = new_operation()
    await operations.insert("app", written, "the dead")
    seen_before = LATER - timedelta(seconds=30)
    assert await operations.stale("app", NOW, 10) == [], "the worker has written just now"
    assert await operations.stale("app", seen_before, 10) == [written.id]

    taken = await asyncio.gather(
        *(operations.take("app", written.id, f"successor {number}", seen_before, LATER) for number in range(3))
    )
    [winner] = [one for one in taken if one is not None]
    assert winner.operation == replace(written, updated_date=LATER)
    assert winner.reached is None
    assert await operations.stale("app", seen_before, 10) == []


async def test_an_operation_without_a_worker_is_taken_at_once(operations: Operations) -> None:
    written = new_operation(created=LATER)
    await operations.insert("app", written, NOBODY)
    assert await operations.stale("app", NOW, 10) == [written.id]
    assert await operations.take("app", written.id, "worker", NOW, LATER) is not None
    assert await operations.stale("app", NOW, 10) == []


async def test_runs_to_cancel_are_read_with_the_control_state(outbox: Outbox, operations: Operations) -> None:
    subscriptions = database_of(outbox).subscriptions
    await subscriptions.pause("app", "mail", NOW)
    await operations.insert("app", new_operation(), "worker")
    assert not (await subscriptions.control_state("app", cancels=True)).has_cancels, "only a retry is in progress"
    old, new = replace(new_operation(), kind="cancel"), replace(new_operation(created=LATER), kind="cancel")
    for one in (old, new):
        await operations.insert("app", one, "worker")

    read = await subscriptions.control_state("app", cancels=True)
    assert read.has_cancels
    assert [pause.handler_name for pause in read.pauses] == ["mail"]
    assert list(read.partitions) == []
    assert not (await subscriptions.control_state("app")).has_cancels, "not requested"
    assert not (await subscriptions.control_state("other", cancels=True)).has_cancels
    assert await operations.running("app", "cancel", NOW - timedelta(seconds=1)) == [old, new]
    assert await operations.running("app", "cancel", NOW) == [new]
    assert await operations.running("other", "cancel", NOW) == []

    for one in (old, new):
        assert await operations.take("app", one.id, "owner", datetime(9999, 1, 1), LATER) is not None
        assert not await operations.finish("app", replace(one, state=OperationState.DONE), "worker"), "taken"
        assert await operations.finish("app", replace(one, state=OperationState.DONE), "owner")
    assert not (await subscriptions.control_state("app", cancels=True)).has_cancels


async def test_only_a_running_operation_can_be_stopped(operations: Operations) -> None:
    written = new_operation()
    await operations.insert("app", written, "worker")
    assert not await operations.stop_requested("app", written.id)
    assert await operations.request_stop("app", written.id)
    assert await operations.request_stop("app", written.id)
    assert await operations.stop_requested("app", written.id)
    await operations.finish("app", replace(written, state=OperationState.STOPPED), "worker")
    assert not await operations.request_stop("app", written.id)
    assert not await operations.request_stop("app", uuid4())


async def test_old_operations_are_removed_unless_running(operations: Operations) -> None:
    running, ended = new_operation(), [new_operation(created=NOW + timedelta(seconds=second)) for second in range(4)]
    for one in (running, *ended):
        await operations.insert("app", one, "worker")
    for one in ended:
        await operations.finish("app", replace(one, state=OperationState.DONE), "worker")
    before = NOW + timedelta(seconds=3)
    assert await operations.remove_old("app", before, 2) == 2
    assert await operations.remove_old("app", before, 2) == 1
    assert {one.id for one in await operations.select("app", 10, None)} == {running.id, ended[3].id}


async def test_the_states_of_notifications_are_read_by_id(outbox: Outbox, operations: Operations) -> None:
    outbox.handler(MoneyDeposited, name="first")(
        Journal(lambda envelope: ValueError() if envelope.event.amount == 1 else None)
    )
    await outbox.executor.execute(Emit((1, 2)))
    await outbox.drain()
    records = await outbox.admin.list()
    expected = {record.id: record.state for record in records}
    assert len(expected) == 2
    assert await operations.states("app", [*expected, uuid4()]) == expected
    assert await operations.states("other", list(expected)) == {}
    assert await operations.states("app", []) == {}
