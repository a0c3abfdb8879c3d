"""An application with SQLAlchemy on SQLite, in simulated processes with all faults."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxio import Action, Event, EventEnvelope, Outbox, RetryPolicy, Transaction
from outboxio.testing import SimulationFailed, World, simulate


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


class Placed(Event):
    number: int


class PlaceOrder(Action):
    number: int

    async def perform(self, tx: Transaction) -> None:
        tx.session.add(Order(id=self.number, state="placed"))
        tx.emit(Placed(self.number), model_id=self.number, model_type="Order")


def application(world: World, **options: Any) -> Any:
    def make_outbox(database: str) -> Outbox:
        outbox = Outbox(world.engine(**options), namespace="shop")

        @outbox.handler(Placed, name="pay", delivery="transactional", retry=RetryPolicy(base="50ms", factor=1))
        async def pay(envelope: EventEnvelope[Placed]) -> None:
            order = await envelope.tx.session.get(Order, envelope.event.number)
            assert order is not None
            await asyncio.sleep(0.01)
            order.state += ", paid"

        return outbox

    return make_outbox


async def scenario(world: World) -> None:
    world.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT NOT NULL)")
    process = await world.process(application(world))
    for number in range(4):
        await process.outbox.execute(PlaceOrder(number))
        await asyncio.sleep(world.random.random() * 0.2)
    await world.settle()
    assert world.fetch("SELECT id, state FROM orders ORDER BY id") == [(n, "placed, paid") for n in range(4)]


def test_sessions_of_actions_and_handlers_commit_once_under_all_faults() -> None:
    before = threading.active_count()

    simulate(scenario, seeds=range(30))

    assert threading.active_count() == before


def test_the_same_seed_gives_the_same_trace() -> None:
    async def fails(world: World) -> None:
        await scenario(world)
        raise LookupError

    traces: list[list[str]] = []
    for _ in range(2):
        with pytest.raises(SimulationFailed) as raised:
            simulate(fails, seeds=[5])
        traces.append(raised.value.trace)

    assert traces[0] == traces[1]


def test_options_and_events_of_the_engine_and_of_the_orm_apply() -> None:
    async def uses(world: World) -> None:
        connected: list[str] = []
        changes: list[str] = []

        def make_outbox(database: str) -> Outbox:
            engine = world.engine(pool_size=2, connect_args={"timeout": 1})

            def connect(connection: Any, record: object) -> None:
                cursor = connection.cursor()
                cursor.execute("PRAGMA foreign_keys = ON")
                cursor.close()
                connected.append("connected")

            event.listen(engine.sync_engine, "connect", connect)
            return Outbox(engine, namespace="shop")

        @event.listens_for(Order.state, "set")
        def changed(order: Order, value: str, *_: object) -> None:
            changes.append(value)

        world.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT NOT NULL)")
        process = await world.process(make_outbox)
        await process.outbox.execute(PlaceOrder(1))
        async with process.outbox.transaction("Read") as tx:
            assert await tx.fetchval("PRAGMA foreign_keys") == 1
        event.remove(Order.state, "set", changed)
        assert connected
        assert changes == ["placed"]

    simulate(uses, seeds=[1], faults=False)


def test_an_engine_with_threads_is_refused() -> None:
    async def wrong(world: World) -> None:
        def make_outbox(database: str) -> Outbox:
            return Outbox(create_async_engine(database.replace("sqlite:", "sqlite+aiosqlite:")), namespace="shop")

        await world.process(make_outbox)

    with pytest.raises(SimulationFailed, match=r"create it with world\.engine"):
        simulate(wrong, seeds=[1], faults=False)


def test_an_engine_of_another_process_is_refused() -> None:
    async def shared(world: World) -> None:
        engine: AsyncEngine = world.engine()

        async def read() -> None:
            async with engine.connect() as connection:
                assert (await connection.execute(select(text("1")))).scalar() == 1

        def make_outbox(database: str) -> Outbox:
            outbox = Outbox(database, namespace="shop")

            @outbox.handler(Placed, name="reads")
            async def reads(envelope: EventEnvelope[Placed]) -> None:
                await read()

            return outbox

        await read()
        await engine.dispose()
        process = await world.process(make_outbox)
        async with process.outbox.transaction("Place") as tx:
            tx.emit(Placed(1))
        await world.settle()

    with pytest.raises(SimulationFailed, match="each process has its own engine"):
        simulate(shared, seeds=[1], faults=False)
