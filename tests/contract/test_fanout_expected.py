"""Fan-out right after a commit of the same process may skip a read, and still misses no event."""

from __future__ import annotations

import pytest

from outboxio import Event, Outbox
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.spies import watch
from tests.kit.storage import Store

pytestmark = pytest.mark.one_of_family


class Many(Event):
    number: int


class Few(Event):
    number: int


class Rare(Event):
    number: int


NAMES = tuple(cls.__name__ for cls in (Many, Few, Rare))


@pytest.fixture
def store(outbox: Outbox, look: Look) -> Store:
    return Store(outbox, look)


async def emit(store: Store, *events: type[Event], topic: str | None = None) -> None:
    async with store.outbox.transaction("Emit") as tx:
        for number, cls in enumerate(events):
            tx.emit(cls(number), topic=topic, ordering_key="k")


@pytest.mark.parametrize("topic", [None, "audit"], ids=["by-type", "by-topic"])
async def test_events_are_found_at_the_last_position_and_elsewhere(store: Store, topic: str | None) -> None:
    def found(cls: type[Event]) -> dict[str, int]:
        return {cls.__name__ if topic is None else f"#{topic}": 1}

    await store.subscribe("h", **({"types": NAMES} if topic is None else {"types": (), "topics": (topic,)}))
    await emit(store, Many, topic=topic)
    await store.fan_out()
    for cls in (Many, Many, Few, Many, Rare, Rare):
        await emit(store, cls, topic=topic)
        assert (await store.fan_out(expected=True)).events == found(cls)
    assert (await store.fan_out(expected=True)).events == {}
    assert len(await store.rows()) == 7


async def test_busy_keys_delay_others_by_at_most_one_round(store: Store) -> None:
    await store.subscribe("h", types=NAMES)
    await emit(store, Many)
    await store.fan_out()
    for _ in range(3):
        await emit(store, Many, Few)
        first = (await store.fan_out(expected=True)).events
        await emit(store, Many)
        second = (await store.fan_out(expected=True)).events
        assert first.get("Few", 0) + second.get("Few", 0) == 1


async def test_events_without_a_current_subscriber_are_not_delivered(store: Store, look: Look) -> None:
    await store.subscribe("h", types=("Many",))
    await emit(store, Many)
    await store.fan_out()
    await look.fetch("DELETE FROM {subscriptions}")
    await emit(store, Many)

    assert (await store.fan_out(expected=True)).events == {}

    await store.subscribe("h", types=("Many",))
    assert (await store.fan_out()).events == {"Many": 1}


async def test_a_new_subscriber_gets_the_events_too(store: Store) -> None:
    await store.subscribe("h", types=("Many",))
    await emit(store, Many)
    await store.fan_out()
    await store.subscribe("late", types=("Many",), topics=("audit",))
    await emit(store, Many, topic="audit")

    assert (await store.fan_out(expected=True)).notifications == 2
    assert [row.handler_name for row in await store.rows()] == ["h", "h", "late"]


async def test_a_new_ordered_handler_gets_the_events_in_order(store: Store, look: Look) -> None:
    await store.subscribe("h", types=("Many",))
    await emit(store, Many)
    await store.fan_out()
    await store.subscribe("ledger", types=NAMES, ordered=True)
    await emit(store, Few, Many, Rare, Many, Few, Many)
    in_order = [row["sequence"] for row in (await look.events())[1:]]

    for _ in range(20):
        if not (await store.fan_out(limits={"Many": 2, "Few": 1, "Rare": 1}, expected=True)).events:
            break
        notified = [row.sequence for row in await store.rows("ledger")]
        assert notified == in_order[: len(notified)]
    assert notified == in_order


async def test_only_a_process_that_committed_events_expects_some(outbox: Outbox) -> None:
    events, journal = watch(outbox, "events"), Journal()
    expected: list[bool] = []

    async def note(fan_out: object, *args: object) -> object:
        expected.append(args[0].expected)  # type: ignore[attr-defined]
        return await fan_out(*args)  # type: ignore[operator]

    events.trouble["fan_out"] = note
    outbox.handler(MoneyDeposited, name="h")(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit(()))
        rounds = len(expected)
        await eventually(lambda: len(expected) > rounds + 1)
        assert not any(expected)

        # A read in progress may find the events first; a read that expects events follows in any case.
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: expected.count(True) == 1)
        await outbox.executor.execute(Emit((2,)))
        await eventually(lambda: expected.count(True) == 2)
        await journal.calls(2)
    assert expected.count(True) == 2
