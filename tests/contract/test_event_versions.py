"""Event versions: older rows are decoded as the current version, and rows of newer versions wait for newer code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

import outboxio
from outboxio import Batch, Event, EventEnvelope, Outbox, RetryPolicy
from outboxio.testing import MovableClock
from tests.kit.app import Look, eventually

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]


class First(Event, type_name="Paid", aliases={"OldPaid"}):
    number: int


class Second(Event, type_name="Paid", aliases={"OldPaid"}, version=2):
    number: int
    currency: str


@outboxio.event("Paid", aliases={"OldPaid"}, version=3)
class Third(BaseModel):
    number: int
    money: str


@outboxio.upcaster(Second, from_version=1)
@outboxio.upcaster(Third, from_version=1)
def with_currency(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "currency": "EUR"}


@outboxio.upcaster(Third, from_version=2)
def with_money(stored: dict[str, Any]) -> dict[str, Any]:
    return {"number": stored["number"], "money": f"1 {stored['currency']}"}


DEPLOYED: tuple[Any, ...] = (First, Second, Third)
THREE: tuple[Any, ...] = (First(1), Second(2, "USD"), Third(number=3, money="9 CHF"))
AS_THIRD = [Third(number=1, money="1 EUR"), Third(number=2, money="1 USD"), Third(number=3, money="9 CHF")]

Seen = dict[str, list[Any]]


def deploy(outbox: Outbox, version: int) -> Seen:
    """Register handlers of every kind for the class of a version; return the events that each receives."""
    cls, seen = DEPLOYED[version - 1], Seen()

    def handler(name: str, **options: Any) -> None:
        async def handle(envelope: Any) -> None:
            for one in envelope if isinstance(envelope, list) else [envelope]:
                seen.setdefault(name, []).append(one.event)

        outbox.handler(cls, name=name, **options)(handle)

    handler("plain")
    handler("ordered", ordered=True)
    handler("transactional", delivery="transactional")
    handler("ordered-transactional", ordered=True, delivery="transactional")
    handler("once", delivery="at_most_once")
    handler("batch", batch=Batch(max_wait=0))
    return seen


HANDLERS = ("plain", "ordered", "transactional", "ordered-transactional", "once", "batch")


async def emit(outbox: Outbox, *events: Any, **options: Any) -> None:
    async with outbox.transaction("Pay", headers=options.pop("headers", None)) as tx:
        for event in events:
            tx.emit(event, **options)


async def write_three(make_outbox: MakeOutbox, clock: MovableClock, **options: Any) -> None:
    """Write an event of each version in turn, as three deployments would."""
    for event in THREE:
        writer = await make_outbox(clock=clock)
        await emit(writer, event, **options)
        await writer.close()


async def test_rows_of_three_versions_arrive_in_todays_version_everywhere(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    await write_three(make_outbox, clock, ordering_key="k", headers={"trace": "t"})
    outbox = await make_outbox(clock=clock)
    seen = deploy(outbox, 3)
    headers: list[Any] = []

    @outbox.handler(Third, name="headers")
    async def look_at_headers(envelope: EventEnvelope[Third]) -> None:
        headers.append((envelope.event_version, envelope.headers))

    assert (await outbox.drain()).succeeded == 3 * (len(HANDLERS) + 1)

    assert {name: sorted(seen[name], key=lambda event: event.number) for name in HANDLERS} == dict.fromkeys(
        HANDLERS, AS_THIRD
    )
    assert seen["ordered"] == seen["ordered-transactional"] == AS_THIRD
    assert sorted(headers, key=str) == [(version, {"trace": "t"}) for version in (1, 2, 3)]
    stored = {row.event_type: 0 for row in await outbox.admin.list()}
    assert stored == {"Paid": 0}
    rows = {row.payload["number"]: row.headers for row in await outbox.admin.list(handler="plain") if row.payload}
    assert rows == {
        1: {"trace": "t"},
        2: {"trace": "t", "outboxio-event-version": 2},
        3: {"trace": "t", "outboxio-event-version": 3},
    }


async def test_rows_of_newer_versions_wait_for_newer_code_without_an_attempt(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    await write_three(make_outbox, clock)
    rolled_back = await make_outbox(clock=clock)
    seen = deploy(rolled_back, 1)

    drained = await rolled_back.drain()

    assert (drained.succeeded, drained.failed) == (len(HANDLERS), 0)
    assert seen == {name: [First(1)] for name in HANDLERS}
    waiting = await rolled_back.admin.list("PENDING")
    assert {row.attempts for row in waiting} == {0}
    assert len(waiting) == 2 * len(HANDLERS)
    assert (await rolled_back.admin.counts())["unroutable"] == 2 * len(HANDLERS)
    assert "of version 3: the class in this process has version 1" in str(
        [row.errors[-1]["message"] for row in waiting]
    )
    again = await rolled_back.drain()
    assert (again.succeeded, again.failed) == (0, 0)
    assert {len(row.errors) for row in await rolled_back.admin.list("PENDING")} == {1}, "the rows were read again"
    await rolled_back.close()

    half_way = await make_outbox(clock=clock)
    seen = deploy(half_way, 2)
    assert (await half_way.drain()).succeeded == len(HANDLERS)
    assert seen == {name: [Second(2, "USD")] for name in HANDLERS}
    assert (await half_way.admin.counts())["unroutable"] == len(HANDLERS)
    await half_way.close()

    newest = await make_outbox(clock=clock)
    seen = deploy(newest, 3)
    assert (await newest.drain()).succeeded == len(HANDLERS)
    assert seen == {name: [AS_THIRD[2]] for name in HANDLERS}
    assert (await newest.admin.counts())["unroutable"] == 0
    assert {row.attempts for row in await newest.admin.list()} == {1}


async def test_rows_behind_a_newer_version_keep_the_order_of_their_key(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    rolled_back = await make_outbox(clock=clock)
    seen = deploy(rolled_back, 1)
    newer = await make_outbox(clock=clock)
    await emit(rolled_back, First(1), ordering_key="k")
    await emit(newer, Second(2, "USD"), ordering_key="k")
    await emit(rolled_back, First(3), First(4), ordering_key="k")
    await emit(rolled_back, First(5), ordering_key="other")
    await newer.close()

    await rolled_back.drain()

    for name in ("ordered", "ordered-transactional"):
        assert sorted(event.number for event in seen[name]) == [1, 5]
    assert sorted(event.number for event in seen["batch"]) == [1, 3, 4, 5]
    await rolled_back.close()

    newest = await make_outbox(clock=clock)
    seen = deploy(newest, 2)
    await newest.drain()
    for name in ("ordered", "ordered-transactional"):
        assert [event.number for event in seen[name]] == [2, 3, 4]


async def test_rows_of_newer_versions_expire_by_retention(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock)
    numbers: list[int] = []

    @outbox.handler(First, name="h", ordered=True, on_dead_key="continue", retry=RetryPolicy(retention="1h"))
    async def handle(envelope: EventEnvelope[First]) -> None:
        numbers.append(envelope.event.number)

    newer = await make_outbox(clock=clock)
    await emit(newer, Second(1, "USD"), ordering_key="k")
    await outbox.drain()
    clock.advance(timedelta(minutes=59))
    assert (await outbox.drain()).expired == 0
    await emit(outbox, First(2), ordering_key="k")
    clock.advance(timedelta(minutes=2))

    assert (await outbox.drain()).expired == 1
    assert numbers == [2]


async def test_many_rows_of_a_newer_version_do_not_block_others(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock)
    seen = 0

    @outbox.handler(First, name="h")
    async def handle(envelope: EventEnvelope[First]) -> None:
        nonlocal seen
        seen += 1

    newer = await make_outbox(clock=clock)
    await emit(newer, *[Second(number, "USD") for number in range(2500)])
    await emit(outbox, *[First(number) for number in range(10)])
    await newer.close()

    assert (await outbox.drain()).succeeded == seen == 10
    assert (await outbox.admin.counts())["unroutable"] == 2500
    await outbox.close()

    back = await make_outbox(clock=clock)
    back.handler(Second, name="h")(ignore)
    assert (await back.drain()).succeeded == 2500


async def ignore(envelope: Any) -> None: ...


async def test_newer_code_finds_deferred_rows_which_operators_may_replay(
    make_outbox: MakeOutbox,
) -> None:
    old = await make_outbox()
    old.handler(First, name="h")(ignore)
    newer = await make_outbox()
    await emit(newer, Second(1, "USD"))
    async with old.running():
        await eventually(lambda: counted(old, "unroutable"))
        (row,) = await old.admin.list()
        await old.admin.retry([row.id])
        await eventually(lambda: was_read_twice(old))
    assert (row.state, row.attempts) == ("PENDING", 0)
    back = await make_outbox()
    back.handler(Second, name="h")(ignore)
    async with back.running():
        await eventually(lambda: counted(back, "SUCCEEDED"))


async def counted(outbox: Outbox, what: str) -> bool:
    return (await outbox.admin.counts())[what] == 1


async def was_read_twice(outbox: Outbox) -> bool:
    return len((await outbox.admin.list())[0].errors) == 2


async def test_a_raw_handler_gets_rows_of_any_version(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock)
    seen: list[Any] = []

    @outbox.handler(name="audit", topic="audit")
    async def audit(envelope: EventEnvelope[Any]) -> None:
        seen.append((envelope.event_version, envelope.event))

    newer = await make_outbox(clock=clock)
    await emit(newer, Second(1, "USD"), topic="audit")

    assert (await outbox.drain()).succeeded == 1
    assert seen == [(2, {"number": 1, "currency": "USD"})]


async def test_messages_of_the_inbox_have_a_version(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock)
    seen = deploy(outbox, 2)
    inbox = outbox.inbox
    await inbox.receive(source="s", external_id="1", type="OldPaid", payload={"number": 1})
    await inbox.receive(source="s", external_id="2", type="Paid", version=2, payload={"number": 2, "currency": "USD"})
    await inbox.receive(source="s", external_id="3", event=Second(3, "CHF"))
    consumed = await inbox.consume(
        source="s", external_id="4", type="Paid", version=3, payload={"number": 4, "money": "1 CHF"}
    )
    assert set(consumed.stored) == set(HANDLERS)
    consumed = await inbox.consume(source="s", external_id="5", type="Paid", payload={"number": 5})
    assert set(consumed.succeeded) == {"plain", "transactional"}

    await outbox.drain()

    assert sorted(seen["plain"], key=lambda event: event.number) == [
        Second(1, "EUR"), Second(2, "USD"), Second(3, "CHF"), Second(5, "EUR"),
    ]  # fmt: skip
    assert (await outbox.admin.counts())["unroutable"] == len(HANDLERS)
