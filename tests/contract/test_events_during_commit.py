"""Events emitted by listeners during a commit, and events around savepoints: they are written, or the commit fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession, async_session, async_sessionmaker
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from outboxio import ConfigurationError, Outbox, TransactionError
from tests.kit.app import Look
from tests.kit.orm import Noted, Order, a_sessionmaker
from tests.kit.probes import written
from tests.kit.sources import ROOT

Maker = async_sessionmaker[AsyncSession]
Work = Callable[[Session], object]

pytestmark = [pytest.mark.with_tables, pytest.mark.above_statements, pytest.mark.slow]

HOOKS = ["before_commit", "before_flush", "after_flush", "after_flush_postexec"]


@pytest.fixture
async def maker(outbox: Outbox, database_url: str) -> AsyncIterator[Maker]:
    async with a_sessionmaker(database_url) as maker:
        yield maker


@contextmanager
def once(hook: str, work: Work, **options: Any) -> Generator[None]:
    """Do ``work`` when SQLAlchemy first calls the listener."""
    waiting = [work]

    def listener(session: Session, *_: object) -> None:
        if waiting:
            waiting.pop()(session)

    event.listen(Session, hook, listener, **options)
    try:
        yield
    finally:
        event.remove(Session, hook, listener)


async def add(session: AsyncSession, number: int) -> None:
    await session.execute(text(f"INSERT INTO orders (id, kind, state) VALUES ({number}, 'order', 'new')"))


async def notes(look: Look) -> list[str]:
    return [row["payload"]["text"] for row in sorted(await written(look), key=lambda row: row["sequence"])]


async def orders(look: Look) -> list[int]:
    return [row["id"] for row in await look.fetch("SELECT id FROM orders ORDER BY id")]


@pytest.mark.parametrize("hook", HOOKS)
async def test_the_first_bind_may_be_in_a_commit_listener(outbox: Outbox, look: Look, maker: Maker, hook: str) -> None:
    with once(hook, lambda session: outbox.bind(async_session(session)).emit(Noted("a"))):  # type: ignore[arg-type]
        async with maker.begin() as session:
            session.add(Order(id=1))
    assert (await orders(look), await notes(look)) == ([1], ["a"])


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("is_bound", [True, False])
async def test_the_first_event_may_be_raised_in_a_commit_listener(
    outbox: Outbox, look: Look, maker: Maker, hook: str, is_bound: bool
) -> None:
    async with maker.begin() as session:
        session.add(Order(id=1))
    async with maker() as session:
        order = await session.get_one(Order, 1)
        session.add(Order(id=2))
        if is_bound:
            outbox.bind(session)
        with once(hook, lambda _: order.note("a")):
            if is_bound:
                await session.commit()
            else:
                with pytest.raises(ConfigurationError, match=r"outbox\.bind"):
                    await session.commit()
    assert (await orders(look), await notes(look)) == (([1, 2], ["a"]) if is_bound else ([1], []))


async def test_events_of_an_object_added_by_a_listener_are_written(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        session.add(Order(id=1))
    async with maker() as session:
        order = await session.get_one(Order, 1)
    order.note("a")
    async with maker() as session:
        outbox.bind(session)
        with once("before_commit", lambda session: session.add(order)):
            await session.commit()
    assert await notes(look) == ["a"]


async def test_listeners_may_emit_in_their_own_savepoints(outbox: Outbox, look: Look, maker: Maker) -> None:
    def work(session: Session) -> None:
        emit = outbox.bind(async_session(session)).emit  # type: ignore[arg-type]
        for kept in (True, False):
            savepoint = session.begin_nested()
            emit(Noted(f"{kept}"))
            savepoint.commit() if kept else savepoint.rollback()
        emit(Noted("outside"))
        session.begin_nested()  # and left open
        emit(Noted("open"))

    for hook in ("before_commit", "before_flush"):
        with once(hook, work):
            async with maker() as session:
                outbox.bind(session).emit(Noted(hook))
                session.add(Order())
                await session.commit()
    assert await notes(look) == [
        note for hook in ("before_commit", "before_flush") for note in (hook, "True", "outside", "open")
    ]


@pytest.mark.parametrize("who", ["another task", "a coroutine of a listener"])
async def test_emitting_during_a_running_commit_is_refused(outbox: Outbox, look: Look, maker: Maker, who: str) -> None:
    async def emit() -> None:
        outbox.bind(session).emit(Noted("too late"))

    def listener(_: Session) -> None:
        await_only(emit() if who == "a coroutine of a listener" else asyncio.create_task(emit()))

    async with maker() as session:
        outbox.bind(session)
        await add(session, 1)
        with once("before_commit", listener), pytest.raises(TransactionError, match=r"emit\(\) while the session comm"):
            await session.commit()
        outbox.bind(session).emit(Noted("after the refused commit"))
        await session.commit()
    assert (await orders(look), await notes(look)) == ([1], ["after the refused commit"])


async def test_a_failed_commit_may_be_repeated(outbox: Outbox, look: Look, maker: Maker) -> None:
    """The first of two actions is written before the commit fails."""
    write, names = outbox.executor.write, list[str]()

    async def fails_once(*args: Any) -> None:
        names.append(args[2].action_name)
        if names == ["A", "B"]:
            raise RuntimeError
        await write(*args)

    outbox.executor.write = fails_once  # type: ignore[method-assign]
    async with maker() as session:
        outbox.bind(session, action="A").emit(Noted("a"))
        outbox.bind(session, action="B").emit(Noted("b"))
        with pytest.raises(RuntimeError):
            await session.commit()
        await session.commit()
    assert (names, await notes(look)) == (["A", "B", "B"], ["a", "b"])


async def test_events_emitted_after_a_refused_commit_are_written_once(outbox: Outbox, look: Look, maker: Maker) -> None:
    def refuse(_: Session) -> None:
        raise RuntimeError

    async with maker() as session:
        emit = outbox.bind(session).emit
        emit(Noted("before"))
        with once("before_commit", refuse), pytest.raises(RuntimeError):
            await session.commit()
        emit(Noted("outside"))
        savepoint = await session.begin_nested()
        emit(Noted("inside"))
        await savepoint.rollback()
        await session.commit()
    assert await notes(look) == ["before", "outside"]


async def test_a_savepoint_rollback_drops_no_event_emitted_outside(outbox: Outbox, look: Look, maker: Maker) -> None:
    """Releasing an outer savepoint also releases an inner one, which SQLAlchemy reports like a COMMIT."""
    async with maker() as session:
        emit = outbox.bind(session).emit
        outer = await session.begin_nested()
        await session.begin_nested()
        emit(Noted("released"))
        await outer.commit()
        emit(Noted("outside"))
        savepoint = await session.begin_nested()
        emit(Noted("undone"))
        await savepoint.rollback()
        await session.commit()
    assert await notes(look) == ["released", "outside"]


async def test_a_commit_that_rolls_back_an_open_savepoint_keeps_other_events(
    outbox: Outbox, look: Look, maker: Maker
) -> None:
    def roll_back(session: Session) -> None:
        savepoint = session.get_nested_transaction()
        assert savepoint is not None
        savepoint.rollback()

    with once("before_commit", roll_back):
        async with maker.begin() as session:
            outbox.bind(session).emit(Noted("outside"))
            await session.begin_nested()
            outbox.bind(session).emit(Noted("undone"))
    assert await notes(look) == ["outside"]


async def test_statements_on_the_connection_are_inside_the_savepoint(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker.begin() as session:
        outbox.bind(session).emit(Noted("outside"))
        connection = await session.connection()
        savepoint = await session.begin_nested()
        await connection.execute(text("INSERT INTO orders (id, kind, state) VALUES (1, 'order', 'new')"))
        outbox.bind(session).emit(Noted("undone"))
        await savepoint.rollback()
    assert (await orders(look), await notes(look)) == ([], ["outside"])


async def test_rows_of_a_released_savepoint_roll_back_with_the_session(
    outbox: Outbox, look: Look, maker: Maker
) -> None:
    """The driver of SQLite sends no BEGIN before a SAVEPOINT, so RELEASE commits."""
    async with maker() as session:
        emit = outbox.bind(session).emit
        async with session.begin_nested():
            session.add(Order(id=1))
            emit(Noted("a"))
        await session.rollback()
    assert (await orders(look), await notes(look)) == ([], [])


async def test_a_failed_savepoint_leaves_the_session_unchanged(outbox: Outbox, look: Look, maker: Maker) -> None:
    async with maker() as session:
        outbox.bind(session).emit(Noted("a"))

        def refuse(*_: object) -> None:
            raise RuntimeError

        engine = session.sync_session.get_bind()
        event.listen(engine, "savepoint", refuse)
        with pytest.raises(RuntimeError):
            await session.begin_nested()
        event.remove(engine, "savepoint", refuse)
        assert not session.in_nested_transaction()
        outbox.bind(session).emit(Noted("b"))
        await session.commit()
    assert await notes(look) == ["a", "b"]


async def test_an_end_listener_may_emit_for_the_next_transaction(outbox: Outbox, look: Look, maker: Maker) -> None:
    """Even a listener that runs before those of outboxio."""

    def emit(session: Session) -> None:
        outbox.bind(async_session(session)).emit(Noted("next"))  # type: ignore[arg-type]

    async with maker() as session:
        outbox.bind(session).emit(Noted("rolled back"))
        with once("after_transaction_end", emit, insert=True):
            await session.rollback()
        await session.commit()
    assert await notes(look) == ["next"]


async def test_a_listener_may_emit_in_a_starting_savepoint(outbox: Outbox, look: Look, maker: Maker) -> None:
    def emit(session: Session) -> None:
        outbox.bind(async_session(session)).emit(Noted("inside"))  # type: ignore[arg-type]

    async with maker() as session:
        outbox.bind(session).emit(Noted("outside"))
        with once("after_transaction_create", emit):
            savepoint = await session.begin_nested()
        await savepoint.rollback()
        await session.commit()
    assert await notes(look) == ["outside"]


async def test_a_listener_that_emits_during_a_flush_may_fail(outbox: Outbox, look: Look, maker: Maker) -> None:
    def fail(session: Session) -> None:
        outbox.bind(async_session(session)).emit(Noted("lost with the flush"))  # type: ignore[arg-type]
        raise RuntimeError

    async with maker() as session:
        outbox.bind(session)
        with once("after_flush", fail), suppress(RuntimeError):
            session.add(Order(id=1))
            await session.commit()
        await session.rollback()
        await session.commit()
    assert (await orders(look), await notes(look)) == ([], [])


async def test_events_raised_before_a_savepoint_survive_its_rollback(outbox: Outbox, look: Look, maker: Maker) -> None:
    """Also if a listener of the flush starts the savepoint, so that no flush precedes it."""
    async with maker.begin() as session:
        session.add(Order(id=1))
    async with maker() as session:
        outbox.bind(session)
        order = await session.get_one(Order, 1)

        def undo(session: Session) -> None:
            order.note("outside")
            savepoint = session.begin_nested()
            order.note("undone")
            savepoint.rollback()

        with once("before_flush", undo):
            order.state = "paid"
            await session.flush()
        await session.commit()
    assert await notes(look) == ["outside"]


async def test_a_savepoint_lost_by_sqlalchemy_loses_no_event(outbox: Outbox, look: Look, maker: Maker) -> None:
    """SQLAlchemy flushes before it starts a savepoint, and loses a savepoint that a listener leaves open."""
    async with maker() as session:
        outbox.bind(session).emit(Noted("a"))
        session.add(Order(id=1))
        with once("before_flush", lambda session: session.begin_nested()):
            await session.begin_nested()
        outbox.bind(session).emit(Noted("b"))
        await session.commit()
    assert (await orders(look), await notes(look)) == ([1], ["a", "b"])


@pytest.mark.not_on("postgres", "mysql", "mariadb", why="SQLAlchemy ends these savepoints in an order that they refuse")
@pytest.mark.filterwarnings("ignore:nested transaction already deassociated")
async def test_a_release_keeps_events_of_inner_open_savepoints(look: Look, maker: Maker) -> None:
    async with Outbox(maker, namespace="app") as outbox, outbox.transaction("Note") as tx:

        def work(session: Session) -> None:
            session.begin_nested()
            tx.emit(Noted("b"))

        savepoint = await tx.session.begin_nested()
        tx.session.add(Order(id=1))
        tx.emit(Noted("a"))
        with once("before_flush", work):
            await savepoint.commit()
    assert (await orders(look), await notes(look)) == ([1], ["a", "b"])


FIRST_BIND = """
import asyncio, sys
from outboxio import Event, Outbox

class Noted(Event):
    text: str

outbox = Outbox(sys.argv[1], namespace="app")

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import async_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session
from tests.kit.opened_by import engine_url
from tests.kit.orm import Order

def listener(session, *_):
    outbox.bind(async_session(session)).emit(Noted("a"))

async def main():
    engine = create_async_engine(engine_url(sys.argv[1]))
    async with async_sessionmaker(engine)() as session:
        session.add(Order(id=1))
        event.listen(Session, "before_flush", listener)
        await session.commit()
    await engine.dispose()

asyncio.run(main())
"""


async def test_the_first_bind_of_a_process_may_be_in_a_listener(sqlite_url: str) -> None:
    async with Outbox(sqlite_url, namespace="app") as outbox, a_sessionmaker(sqlite_url):
        await outbox.migrate()
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", FIRST_BIND, sqlite_url], cwd=ROOT, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    look = Look(sqlite_url)
    assert (await orders(look), await notes(look)) == ([1], ["a"])
