"""Events raised by mapped objects, in a session with ``outbox.bind``."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from outboxio import ConfigurationError, InvalidEvent, Outbox
from tests.kit.app import Look
from tests.kit.orm import GiftOrder, Line, Noted, Order, a_sessionmaker
from tests.kit.probes import written

Maker = async_sessionmaker[AsyncSession]


@pytest.fixture
async def outbox(sqlite_url: str) -> AsyncIterator[Outbox]:
    async with Outbox(sqlite_url, namespace="app") as outbox:
        await outbox.migrate()
        yield outbox


@pytest.fixture
def look(sqlite_url: str) -> Look:
    return Look(sqlite_url)


@pytest.fixture
async def maker(outbox: Outbox, sqlite_url: str) -> AsyncIterator[Maker]:
    async with a_sessionmaker(sqlite_url) as maker:
        yield maker


async def notes(look: Look) -> list[str]:
    return [row["payload"]["text"] for row in sorted(await written(look), key=lambda row: row["sequence"])]


async def test_events_are_written_in_the_order_they_were_raised(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        outbox.bind(session, action="Place")
        first, second = Order(), GiftOrder()
        second.note("second, in no session")
        first.note("first, in no session")
        session.add_all([first, second])
        first.note("first")
        await session.flush()
        second.note("second")
        line = Line(order_id=first.id, number=2)
        line.raise_event(Noted("line"), ordering_key="k", topic="t")
        session.add(line)
        second.raise_event(Noted("named"), model_id="x", model_type="Gift")
    rows = sorted(await written(look), key=lambda row: row["sequence"])
    assert [(row["payload"]["text"], row["model_type"], row["model_id"]) for row in rows] == [
        ("second, in no session", "GiftOrder", str(second.id)),
        ("first, in no session", "Order", str(first.id)),
        ("first", "Order", str(first.id)),
        ("second", "GiftOrder", str(second.id)),
        ("line", "Line", f"{first.id},2"),
        ("named", "Gift", "x"),
    ]
    assert {row["action_name"] for row in rows} == {"Place"}
    assert (rows[4]["ordering_key"], rows[4]["topic"]) == ("k", "t")


@pytest.mark.slow
async def test_an_unchanged_object_that_only_raises_is_included(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        session.add(Order(id=1))
    async with maker.begin() as session:
        outbox.bind(session)
        order = await session.get_one(Order, 1)
        order.note("a")
        del order
        gc.collect()
    assert await notes(look) == ["a"]


async def test_a_rollback_drops_raised_events(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker() as session:
        outbox.bind(session)
        order = Order(id=1)
        session.add(order)
        order.note("before")
        with suppress(RuntimeError):
            async with session.begin_nested():
                order.note("in a savepoint, before its flush")
                raise RuntimeError
        savepoint = await session.begin_nested()
        order.note("in a savepoint, flushed")
        order.state = "paid"
        await session.flush()
        await savepoint.rollback()
        async with session.begin_nested():
            order.note("released")
        await session.commit()
        order.note("rolled back")
        await session.rollback()
        await session.refresh(order)
        order.note("after the rollback")
        await session.commit()
        order.note("never committed")
    assert await notes(look) == ["before", "released", "after the rollback"]


async def test_a_failed_flush_drops_raised_events(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        session.add(Order(id=1))
    async with maker() as session:
        outbox.bind(session)
        order = Order(id=1)
        session.add(order)
        order.note("lost")
        with pytest.raises(IntegrityError):
            await session.commit()
        await session.rollback()
        session.add(Order(id=2))
        await session.commit()
    assert await notes(look) == []


@pytest.mark.slow
async def test_events_of_a_detached_object_stay_with_it(outbox: Outbox, look: Look, maker: Maker) -> None:
    order = Order(id=1)
    order.note("a")
    gc.collect()
    copied, pickled = copy.copy(order), pickle.loads(pickle.dumps(order))
    assert (pickled.id, sorted(vars(pickled))) == (1, sorted(vars(order)))
    async with maker.begin() as session:
        outbox.bind(session)
        session.add(pickled)  # a copy has raised nothing
    async with maker() as session:
        outbox.bind(session)
        found = (await session.scalars(select(Order))).one()
        found.note("expunged before the flush")
        session.expunge(found)
        await session.commit()
        session.add(found)
        await session.commit()
        session.add(Order(id=2))
        await session.commit()
    del copied
    assert await notes(look) == ["expunged before the flush"]
    async with maker.begin() as session:
        outbox.bind(session)
        order.id = 3
        session.add(order)
    assert await notes(look) == ["expunged before the flush", "a"]


async def test_events_of_a_deleted_object_are_written(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        outbox.bind(session)
        session.add(order := Order(id=1))
        await session.flush()
        await session.delete(order)
        order.note("deleted")
    assert [(row["payload"]["text"], row["model_id"]) for row in await written(look)] == [("deleted", "1")]


@pytest.mark.parametrize("changes", [True, False])
async def test_raised_events_are_refused_in_a_session_without_an_outbox(
    outbox: Outbox, look: Look, maker: Maker, changes: bool
) -> None:
    async with maker.begin() as session:
        session.add(Order(id=1))
    async with maker() as session:
        order = await session.get_one(Order, 1)
        order.note("a")
        if changes:
            order.state = "paid"
        with pytest.raises(ConfigurationError, match=r"Order has raised Noted in a session without.*outbox\.bind"):
            await session.commit()
        await session.rollback()
        order.note("b")
        outbox.bind(session)  # early enough, because nothing was flushed
        await session.commit()
    assert await notes(look) == ["b"]


async def test_an_invalid_event_fails_the_flush(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker() as session:
        outbox.bind(session)
        session.add(order := Order(id=1))
        order.raise_event(Noted(None))  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent, match=r"\$\.text"):
            await session.commit()
        await session.rollback()
        assert await session.get(Order, 1) is None
    assert await notes(look) == []
