"""``outbox.bind`` on each database: events of a session that the application commits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from outboxio import ConfigurationError, EventEnvelope, Outbox, Settings, WrongDatabase
from outboxio.sync import Producer
from tests.kit.app import Journal, Look, MoneyDeposited
from tests.kit.opened_by import engine_url
from tests.kit.orm import Noted, Order, a_sessionmaker
from tests.kit.probes import MakeOutbox, written

pytestmark = pytest.mark.one_of_family

Maker = async_sessionmaker[AsyncSession]


@pytest.fixture
async def maker(outbox: Outbox, database_url: str) -> AsyncIterator[Maker]:
    async with a_sessionmaker(database_url) as maker:
        yield maker


async def notes(look: Look) -> list[str]:
    return [row["payload"]["text"] for row in sorted(await written(look), key=lambda row: row["sequence"])]


async def orders(look: Look) -> int:
    return len(await look.fetch("SELECT id FROM orders"))


async def test_events_commit_with_the_session_in_one_statement(outbox: Outbox, look: Look, maker: Maker) -> None:
    statements: list[str] = []
    async with maker.begin() as session:
        session.add(Order(id=1))
        outbox.bind(session, action="Place", params={"a": 1}, correlation_id="req-7", headers={"tenant": 1}).emit(
            Noted("a"), model_id=1, model_type="Order", ordering_key="k", topic="t"
        )
        outbox.bind(session).emit(Noted("b"))
        assert (await notes(look), await orders(look)) == ([], 0)
        write = outbox.executor.write

        async def counted(*args: Any) -> None:
            statements.append(args[2].action_name)
            await write(*args)

        outbox.executor.write = counted  # type: ignore[method-assign]
    assert statements == ["Place"]
    assert (await notes(look), await orders(look)) == (["a", "b"], 1)
    first, second = sorted(await written(look), key=lambda row: row["sequence"])
    assert first["action_id"] == second["action_id"]
    shared = {"action_name": "Place", "action_params": {"a": 1}, "correlation_id": "req-7", "headers": {"tenant": 1}}
    assert {**first, **shared} == first
    assert {**second, **shared} == second
    assert (first["model_id"], first["model_type"], first["ordering_key"], first["topic"]) == ("1", "Order", "k", "t")


async def test_each_transaction_of_a_session_has_its_own_events(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker() as session:
        bound = outbox.bind(session)
        bound.emit(Noted("committed"))
        await session.commit()
        bound.emit(Noted("rolled back"))
        await session.rollback()
        async with session.begin():
            bound.emit(Noted("committed in a block"))
        with suppress(RuntimeError):
            async with session.begin():
                bound.emit(Noted("failed"))
                raise RuntimeError
        session.add(Order(id=1))
        bound.emit(Noted("with an order"))
        await session.commit()
        bound.emit(Noted("closed without a commit"))
    assert await notes(look) == ["committed", "committed in a block", "with an order"]
    rows = await written(look)
    assert len({row["action_id"] for row in rows}) == 3
    assert {row["action_name"] for row in rows} == {"session.commit"}


async def test_rolling_back_a_savepoint_drops_its_events(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        emit = outbox.bind(session).emit
        emit(Noted("before"))
        async with session.begin_nested():
            emit(Noted("released"))
            undone = await session.begin_nested()
            emit(Noted("undone"))
            async with session.begin_nested():
                emit(Noted("released within the undone"))
            await undone.rollback()
            emit(Noted("after the undone"))
        with suppress(RuntimeError):
            async with session.begin_nested():
                async with session.begin_nested():
                    emit(Noted("released, then lost"))
                raise RuntimeError
        emit(Noted("after"))
    assert await notes(look) == ["before", "released", "after the undone", "after"]


async def test_a_savepoint_that_was_open_at_bind_counts(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        savepoint = await session.begin_nested()
        outbox.bind(session).emit(Noted("undone"))
        await savepoint.rollback()
        outbox.bind(session).emit(Noted("kept"))
    assert await notes(look) == ["kept"]


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_commit_with_open_savepoints_commits_their_events(
    outbox: Outbox, look: Look, maker: Maker, depth: int
) -> None:
    async with maker.begin() as session:
        for number in range(depth):
            await session.begin_nested()
            outbox.bind(session).emit(Noted(f"block {number}"))
    async with maker() as session:
        for number in range(depth):
            await session.begin_nested()
            outbox.bind(session).emit(Noted(f"commit {number}"))
        await session.commit()
    assert await notes(look) == [f"{how} {number}" for how in ("block", "commit") for number in range(depth)]


async def test_events_of_a_session_wake_the_loops(make_outbox: MakeOutbox, database_url: str) -> None:
    # The pause is so long that only the wake-up can end it.
    outbox = await make_outbox(settings=Settings(fanout_poll_delay="1h", handling_poll_delay="1h"))
    texts: list[str] = []

    @outbox.handler(Noted, name="notes")
    async def note(envelope: EventEnvelope[Noted]) -> None:
        texts.append(envelope.event.text)
        async with maker.begin() as session:  # a handler is the cause
            outbox.bind(session).emit(MoneyDeposited(envelope.event_id, 1), model_id=1)  # type: ignore[arg-type]

    journal = Journal()
    outbox.handler(MoneyDeposited, name="journal")(journal)
    async with a_sessionmaker(database_url) as maker, outbox.running():
        async with maker.begin() as session:
            outbox.bind(session, correlation_id="req-7").emit(Noted("a"))
        await journal.calls(1)
    assert texts == ["a"]
    (envelope,) = journal.envelopes
    assert envelope.correlation_id == "req-7"


async def test_committing_on_another_database_is_refused(database_url: str, second_url: str) -> None:
    async with Outbox(second_url, namespace="app") as outbox, a_sessionmaker(database_url) as maker, maker() as session:
        session.add(Order(id=1))
        outbox.bind(session).emit(Noted("a"))
        with pytest.raises(WrongDatabase):
            await session.commit()
        await session.rollback()
        assert await session.get(Order, 1) is None


async def test_a_session_without_a_default_engine_is_refused_at_first_use(sqlite_url: str) -> None:
    engine, blocking = create_async_engine(engine_url(sqlite_url)), create_engine(sqlite_url)
    maker = async_sessionmaker(binds={Order: engine})
    refused = pytest.raises(ConfigurationError, match=r"no default engine.*async_sessionmaker\(engine, binds=")
    async with Outbox(sqlite_url, namespace="app") as outbox, maker() as session:
        session.add(Order(id=1))
        with refused:
            outbox.bind(session)
        with refused:
            await outbox.record(session, Noted("a"), action="Note")
        with refused:
            await outbox.inbox.receive(source="a", external_id="1", event=Noted("a"), connection=session)
        with Session(binds={Order: blocking}) as synchronous, refused:
            synchronous.begin()
            Producer("app").record(synchronous, Noted("a"), action="Note")
        session.sync_session.bind = engine.sync_engine
        outbox.bind(session)
    with pytest.raises(ConfigurationError, match="an async_sessionmaker without a default engine"):
        Outbox(maker, namespace="app")
    blocking.dispose()
    await engine.dispose()


@pytest.mark.not_on("sqlite", why="its driver starts no transaction at SAVEPOINT, so RELEASE commits")
async def test_a_session_in_a_rolled_back_outer_transaction_leaves_no_row(
    outbox: Outbox, look: Look, database_url: str, maker: Maker
) -> None:
    """SQLAlchemy's recipe for tests: each test runs in a transaction that is rolled back."""
    engine = create_async_engine(engine_url(database_url))
    try:
        async with engine.connect() as connection:
            outer = await connection.begin()
            session = AsyncSession(bind=connection, join_transaction_mode="create_savepoint")
            outbox.bind(session).emit(Noted("a"))
            await session.commit()
            table = look.table("events")
            assert len((await connection.exec_driver_sql(f"SELECT id FROM {table}")).all()) == 1
            await session.close()
            await outer.rollback()
    finally:
        await engine.dispose()
    assert await notes(look) == []
