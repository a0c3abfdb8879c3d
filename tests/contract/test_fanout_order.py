"""Event types and topics of an ordered handler advance together, on every database.

After every round its notifications belong to the first events, and none to a later event of another type.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from outboxio import Event, Outbox
from outboxio.storage.protocols import FanoutRequest
from outboxio.support.scan_position import FairShare
from tests.kit.app import Look
from tests.kit.storage import LONG_AGO, NOW, Store

pytestmark = pytest.mark.one_of_family


class Many(Event):
    number: int


class Few(Event):
    number: int


class Rare(Event):
    number: int


EVENTS = (Many, Few, Rare)
NAMES = tuple(cls.__name__ for cls in EVENTS)


@pytest.fixture
def store(outbox: Outbox, look: Look) -> Store:
    return Store(outbox, look)


async def emit(store: Store, events: Sequence[type[Event]], topic: str | None = None) -> None:
    """Commit events in this order."""
    async with store.outbox.transaction("Emit") as tx:
        for number, cls in enumerate(events):
            tx.emit(cls(number), ordering_key=number % 3, topic=topic)


async def sequences(store: Store, *, topic: str | None = None) -> list[int]:
    """The sequences of all events, or of the events on a topic, in order."""
    rows = await store.look.events()
    return [row["sequence"] for row in rows if row["event_type"] and topic in (None, row["topic"])]


async def notified(store: Store, name: str) -> list[int]:
    """The sequences of a handler's notifications, in order."""
    return [row.sequence for row in await store.rows(name)]


def unequal(seed: int = 0, length: int = 120) -> list[type[Event]]:
    """Events of three types: one has nearly all events, and one is rare."""
    return Random(seed).choices(EVENTS, weights=(20, 4, 1), k=length)


@pytest.mark.parametrize("seed", range(3))
async def test_an_ordered_handler_gets_all_its_types_in_order(store: Store, seed: int) -> None:
    await store.subscribe("ledger", ordered=True, types=NAMES)
    await emit(store, unequal(seed))
    expected = await sequences(store)

    rounds, done = 0, await store.fan_out(batch_size=12)
    while done.events:
        rounds += 1
        found = await notified(store, "ledger")
        assert found == expected[: len(found)], f"round {rounds} has skipped an event"
        done = await store.fan_out(batch_size=12)

    assert await notified(store, "ledger") == expected
    assert rounds <= 60


async def test_a_truncated_batch_counts_as_full_and_another_round_follows(store: Store) -> None:
    await store.subscribe("ledger", ordered=True, types=("Many", "Few"))
    await emit(store, [Many, Few, Many, Many, Few, Few, Many, Few])

    done = await store.fan_out(limits={"Many": 2, "Few": 100})
    assert (done.events, done.full) == ({"Many": 2, "Few": 1}, {"Many", "Few"})
    assert done.notifications == 3

    done = await store.fan_out(limits={"Many": 100, "Few": 2})
    assert (done.events, done.full) == ({"Many": 1, "Few": 2}, {"Many", "Few"})

    done = await store.fan_out(limits={"Many": 100, "Few": 100})
    assert (done.events, done.full) == ({"Many": 1, "Few": 1}, frozenset())
    assert await notified(store, "ledger") == await sequences(store)


async def test_types_ahead_of_the_others_wait_for_a_later_round(store: Store) -> None:
    await store.subscribe("ledger", ordered=True, types=("Many", "Few"))
    await emit(store, [Many, Many, Many, Few])

    done = await store.fan_out(limits={"Many": 2, "Few": 1})

    assert done.events == {"Many": 2}
    assert "Many" in done.full
    assert (await store.fan_out(limits={"Many": 2, "Few": 1})).events == {"Many": 1, "Few": 1}


async def test_types_in_succession_still_fill_a_batch(store: Store) -> None:
    """A type that has to wait uses no capacity of the other types."""
    kinds = [type(f"Kind{i}", (Event,), {"__annotations__": {"number": int}}) for i in range(8)]
    await store.subscribe("ledger", ordered=True, types=[cls.__name__ for cls in kinds])
    await emit(store, [cls for cls in kinds for _ in range(50)])
    expected = await sequences(store)

    quotas, rounds = FairShare(40), 0
    while True:
        limits = quotas.limits()
        done = await store.database.events.fan_out(FanoutRequest("app", NOW, LONG_AGO, limits, quotas.batch_size))
        quotas.learn(limits, done.events, done.full)
        found = await notified(store, "ledger")
        assert found == expected[: len(found)]
        if not done.full:
            break
        rounds += 1

    assert found == expected
    assert rounds <= 25  # of 400 events, 40 to a batch


async def test_types_without_an_ordered_handler_advance_independently(store: Store) -> None:
    await store.subscribe("ledger", ordered=True, types=("Many", "Few"))
    await store.subscribe("plain", types=("Rare",))
    await emit(store, [Many, Many, Many, Rare, Rare, Rare, Few, Few])

    done = await store.fan_out(limits={"Many": 1, "Few": 5, "Rare": 2})

    assert done.events == {"Many": 1, "Rare": 2}
    assert {"Many", "Rare"} <= done.full
    assert len(await notified(store, "plain")) == 2


async def test_without_ordered_handlers_every_type_fills_its_limit(store: Store) -> None:
    await store.subscribe("plain", types=NAMES)
    await emit(store, [Many, Many, Many, Rare, Rare, Few, Few, Few])
    done = await store.fan_out(limits={"Many": 1, "Rare": 2, "Few": 5})
    assert done.events == {"Many": 1, "Rare": 2, "Few": 3}
    assert done.full == {"Many", "Rare"}


async def test_other_handlers_of_these_types_get_the_same_events(store: Store) -> None:
    await store.subscribe("ledger", ordered=True, types=("Many", "Few"))
    await store.subscribe("plain", types=("Few",))
    await emit(store, [Many, Many, Few, Few])
    assert (await store.fan_out(limits={"Many": 1, "Few": 9})).events == {"Many": 1}
    assert await notified(store, "plain") == []
    await store.fan_out()
    assert await notified(store, "plain") == (await sequences(store))[2:]


async def test_topics_of_an_ordered_handler_advance_with_its_types(store: Store) -> None:
    await store.subscribe("ledger", ordered=True, types=("Many",), topics=("audit",))
    await emit(store, [Many, Many], topic=None)
    await emit(store, [Few, Rare, Many, Few], topic="audit")
    await emit(store, [Many, Many])
    expected = await sequences(store)

    for _ in range(8):
        await store.fan_out(limits={"Many": 2, "#audit": 1})
        found = await notified(store, "ledger")
        assert found == expected[: len(found)]
        assert len(found) > 0
    assert found == expected


async def test_events_of_a_topic_claimed_by_type_keep_their_order(store: Store) -> None:
    """Another handler subscribes to some of the topic's types, so such events are not claimed by topic."""
    await store.subscribe("ledger", ordered=True, types=(), topics=("audit",))
    await store.subscribe("plain", types=("Few", "Rare"))
    await emit(store, [Many, Few, Many, Many, Rare, Few, Few, Many, Few, Rare, Many], topic="audit")
    expected = await sequences(store, topic="audit")

    for limits in ({"#audit": 2, "Few": 9, "Rare": 9}, {"#audit": 9, "Few": 1, "Rare": 9}, *[{}] * 9):
        await store.fan_out(limits=limits, batch_size=3)
        found = await notified(store, "ledger")
        assert found == expected[: len(found)]
    assert found == expected


async def test_a_formerly_ordered_handler_holds_nothing_back(store: Store) -> None:
    await store.subscribe("ledger", ordered=True, types=("Many", "Few"))
    await store.subscribe("ledger", types=("Many", "Few"))
    await emit(store, [Many, Many, Few])
    assert (await store.fan_out(limits={"Many": 1, "Few": 1})).events == {"Many": 1, "Few": 1}


async def test_notification_ids_sort_by_the_time_of_fan_out(store: Store) -> None:
    await store.subscribe("plain", types=("Many",))
    for _ in range(4):
        await emit(store, [Many, Many, Many])
        await store.fan_out()
    ids = [row.id for row in await store.rows()]
    batches = [ids[i : i + 3] for i in range(0, 12, 3)]
    assert all(max(before) < min(after) for before, after in pairwise(batches))
    assert {i.version for i in ids} == {7}


async def test_ids_of_backfilled_notifications_sort_the_same_way(store: Store) -> None:
    await store.subscribe("plain", types=("Many",))
    await emit(store, [Many])
    await store.fan_out()
    await store.subscribe("late", types=("Many",))
    await store.database.stored_events.backfill("app", "late", [], LONG_AGO, NOW)
    [plain, late] = [(await store.rows(name))[0].id for name in ("plain", "late")]
    assert plain < late
    assert late.version == 7
