"""``outbox.bind``: rules that do not depend on the database."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine

from outboxio import ConfigurationError, InvalidEvent, NoTransaction, Outbox, TransactionError
from tests.kit.app import Look
from tests.kit.opened_by import engine_url
from tests.kit.orm import Noted, Order, a_sessionmaker
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


async def orders(look: Look) -> int:
    return len(await look.fetch("SELECT id FROM orders"))


async def test_two_sessions_have_separate_events(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker() as first, maker() as second:
        outbox.bind(first).emit(Noted("first"))
        outbox.bind(second).emit(Noted("second"))
        await second.rollback()
        await first.commit()
    assert await notes(look) == ["first"]


async def test_a_failed_flush_at_commit_drops_the_events(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        session.add(Order(id=1))
    async with maker() as session:
        session.add(Order(id=1))
        bound = outbox.bind(session)
        bound.emit(Noted("lost"))
        with pytest.raises(IntegrityError):
            await session.commit()
        with pytest.raises(TransactionError, match="Roll back first"):
            bound.emit(Noted("refused"))
        await session.rollback()
        bound.emit(Noted("kept"))
        await session.commit()
    assert await notes(look) == ["kept"]


async def test_listeners_of_the_application_may_emit(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker() as session:
        emit = outbox.bind(session).emit
        flushes: list[str] = []

        def in_before_commit(session: Any) -> None:
            emit(Noted("before_commit"))
            session.add(Order(id=2))  # a flush after the events were written

        def in_a_flush(name: str) -> Any:
            def listener(*_: Any) -> None:
                flushes.append(name)
                emit(Noted(f"{name} {flushes.count(name)}"))

            return listener

        sqlalchemy_event.listen(session.sync_session, "before_commit", in_before_commit)
        for name in ("before_flush", "after_flush", "after_flush_postexec"):
            sqlalchemy_event.listen(session.sync_session, name, in_a_flush(name))
        refused: list[Exception] = []

        def in_after_commit(_: Any) -> None:
            try:
                emit(Noted("after_commit"))
            except TransactionError as error:
                refused.append(error)

        sqlalchemy_event.listen(session.sync_session, "after_commit", in_after_commit)
        session.add(Order(id=1))
        await session.commit()
    stored = await notes(look)
    each_of_2 = [f"{name} {n}" for n in (1, 2) for name in ("before_flush", "after_flush", "after_flush_postexec")]
    assert stored == [*each_of_2[:3], "before_commit", *each_of_2[3:]]
    assert len(refused) == 1
    assert await orders(look) == 2


# --- the names of actions ------------------------------------------------------------------------------------


async def test_each_bind_may_name_an_action_and_order_is_kept(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        first = outbox.bind(session, action="First")
        first.emit(Noted("a"))
        outbox.bind(session, action="Second").emit(Noted("b"))
        outbox.bind(session).emit(Noted("c"))
        first.emit(Noted("d"))
    rows = sorted(await written(look), key=lambda row: row["sequence"])
    assert [row["action_name"] for row in rows] == ["First", "Second", "Second", "First"]
    assert await notes(look) == ["a", "b", "c", "d"]
    assert len({row["action_id"] for row in rows}) == 2


# --- the rest of the application -----------------------------------------------------------------------------


async def test_a_scoped_session_is_resolved_to_its_session(outbox: Outbox, look: Look, maker: Maker) -> None:
    scoped = async_scoped_session(maker, scopefunc=asyncio.current_task)
    outbox.bind(scoped).emit(Noted("scoped"))
    await scoped.commit()
    await scoped.remove()
    assert await notes(look) == ["scoped"]


@pytest.mark.slow
async def test_a_session_is_garbage_collected_once_unreferenced(outbox: Outbox, maker: Maker) -> None:
    session = maker()
    outbox.bind(session).emit(Noted("forgotten"))
    await session.close()
    forgotten = weakref.ref(session.sync_session)
    del session
    gc.collect()
    assert forgotten() is None


async def test_emit_outside_a_transaction_begins_one_like_add(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker() as session:
        outbox.bind(session).emit(Noted("a"))
        with pytest.raises(InvalidRequestError, match="already begun"):
            await session.begin()
    async with maker(autobegin=False) as session:
        bound = outbox.bind(session)
        with pytest.raises(NoTransaction, match="Begin a transaction"):
            bound.emit(Noted("b"))
        async with session.begin():
            bound.emit(Noted("c"))
    assert await notes(look) == ["c"]


# --- what is refused -----------------------------------------------------------------------------------------


async def test_a_refused_event_leaves_the_session_unchanged(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        session.add(Order(id=1))
        with pytest.raises(InvalidEvent, match="is not an Event"):
            outbox.bind(session).emit("noted")  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent, match="300 characters"):
            outbox.bind(session, action="x" * 300).emit(Noted("a"))
        with pytest.raises(InvalidEvent, match="300 characters"):
            outbox.bind(session, action="X").emit(Noted("a"), model_id="x" * 300)
    assert (await notes(look), await orders(look)) == ([], 1)


async def test_other_sessions_are_refused_with_a_fix(outbox: Outbox, maker: Maker, sqlite_url: str) -> None:
    engine = create_async_engine(engine_url(sqlite_url))
    try:
        async with maker() as session, engine.connect() as connection, Outbox(sqlite_url, namespace="second") as second:
            outbox.bind(session)
            for bind, given, message in (
                (outbox.bind, session.sync_session, "pass a connection of its driver, or an AsyncSession"),
                (outbox.bind, connection, "pass an AsyncSession, or use"),
                (outbox.bind, object(), "give an AsyncSession of SQLAlchemy"),
                (outbox.bind, AsyncSession(engine, twophase=True), "without two-phase commit"),
                (second.bind, session, "bound to another outbox"),
            ):
                with pytest.raises(ConfigurationError, match=message):
                    bind(given)  # type: ignore[arg-type]
    finally:
        await engine.dispose()
