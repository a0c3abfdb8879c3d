"""Compare ``tx.session`` with hand-written code, for an ORM change and one event: ``python -m benchmarks.orm URL``.

Both write the same rows through the same engine, in alternating rounds. The figures are the ratio of the best rounds
and the median ratio of the rounds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import JSON, Boolean, Column, DateTime, Integer, MetaData, String, Table, Uuid, event, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxio import Action, Event, Outbox, Transaction
from outboxio.support.ids import uuid7

CALLERS = 16
WARM_UP, ROUND, ROUNDS = 200, 1_000, 7  # actions before the rounds, actions per round, rounds of each


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "bench_orders"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    total: Mapped[int]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  # SQLAlchemy's convention


class OrderPaid(Event):
    order_id: int
    total: int


class Pay(Action):
    order_id: int

    async def perform(self, tx: Transaction) -> None:
        order = await tx.session.get_one(Order, self.order_id)
        order.total += 1
        tx.emit(OrderPaid(order.id, order.total), model=order)


def events_table(engine: AsyncEngine) -> Table:
    """Return the columns of ``events`` that both sides write."""
    is_file = engine.dialect.name == "sqlite"
    text_or_id = Uuid() if engine.dialect.name == "postgresql" else String(36)
    date = String(32) if is_file else DateTime()
    kinds: dict[str, Any] = {
        "id": text_or_id, "namespace": String(255), "action_id": text_or_id, "action_name": String(255),
        "action_params": JSON(), "started_date": date, "completion_date": date, "event_date": date,
        "event_type": String(255), "payload": JSON(), "model_id": String(255), "model_type": String(255),
        "hops": Integer(), "delivered": Boolean(),
    }  # fmt: skip
    columns = [Column(name, kind) for name, kind in kinds.items()]
    return Table(
        "eventlog_events" if is_file else "events", MetaData(), *columns, schema=None if is_file else "eventlog"
    )


def by_hand(engine: AsyncEngine, maker: async_sessionmaker[AsyncSession]) -> Callable[[int], Awaitable[None]]:
    events = events_table(engine)
    is_file, has_uuids = engine.dialect.name == "sqlite", engine.dialect.name == "postgresql"

    def own(value: Any) -> Any:
        return value if has_uuids else str(value)

    async def pay(order_id: int) -> None:
        async with maker() as session, session.begin():
            begun = datetime.now(UTC).replace(tzinfo=None)
            order = await session.get_one(Order, order_id)
            order.total += 1
            await session.flush()
            now: Any = datetime.now(UTC).replace(tzinfo=None)
            if is_file:
                begun, now = (each.isoformat(timespec="microseconds") for each in (begun, now))  # type: ignore[assignment]
            row = {
                "id": own(uuid7()), "namespace": "hand", "action_id": own(uuid7()), "action_name": "Pay",
                "action_params": {"order_id": order_id}, "started_date": begun, "completion_date": now,
                "event_date": now, "event_type": "OrderPaid", "payload": {"order_id": order_id, "total": order.total},
                "model_id": str(order.id), "model_type": "Order", "hops": 0,
                "delivered": False,
            }  # fmt: skip
            await session.execute(insert(events), row)

    return pay


class Round(NamedTuple):
    """A round of actions: actions per second, and milliseconds of this process per action."""

    speed: float
    cpu: float


async def measured(pay: Callable[[int], Awaitable[Any]], number: int) -> Round:
    """Run a round. Each caller has its own order, so that no caller waits for a row lock."""

    async def call(caller: int) -> None:
        for _ in range(number // CALLERS):
            await pay(caller)

    actions = number // CALLERS * CALLERS
    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(call(caller) for caller in range(CALLERS)))
    return Round(actions / (time.perf_counter() - began), 1_000 * (time.process_time() - used) / actions)


async def main(url: str) -> None:
    # Sixteen writers to one SQLite file would only wait for one another, and the hand-written code get SQLITE_BUSY.
    pooled: Any = {"pool_size": 1 if url.startswith("sqlite") else CALLERS, "max_overflow": 0}
    engine = create_async_engine(url, **pooled)
    if url.startswith("sqlite"):
        # Both sides acquire the write lock at BEGIN, as SQLAlchemy's documentation recommends.
        event.listen(engine.sync_engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(engine.sync_engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    maker = async_sessionmaker(engine, expire_on_commit=False)
    async with Outbox(maker, namespace="ours") as outbox:
        await outbox.migrate()
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.drop_all)
            await connection.run_sync(Base.metadata.create_all)
        async with maker.begin() as session:
            session.add_all([Order(id=number, total=0) for number in range(CALLERS)])

        async def ours(order_id: int) -> None:
            await outbox.executor.execute(Pay(order_id))

        hand = by_hand(engine, maker)
        await measured(ours, WARM_UP)
        await measured(hand, WARM_UP)
        rounds: list[tuple[Round, Round]] = []
        for number in range(ROUNDS):
            if number % 2:
                mine = await measured(ours, ROUND)
                rounds.append((mine, await measured(hand, ROUND)))
            else:
                theirs = await measured(hand, ROUND)
                rounds.append((await measured(ours, ROUND), theirs))
    await engine.dispose()
    print(json.dumps({"database": engine.dialect.name, **figures(rounds)}))


def figures(rounds: list[tuple[Round, Round]]) -> dict[str, Any]:
    best = [max(round.speed for round in of) for of in zip(*rounds, strict=True)]
    cpu = [min(round.cpu for round in of) for of in zip(*rounds, strict=True)]
    return {
        "tx.session": f"{best[0]:.0f}/s, {cpu[0]:.2f} ms CPU",
        "by hand": f"{best[1]:.0f}/s, {cpu[1]:.2f} ms CPU",
        "best to best": round(best[0] / best[1], 3),
        "median of rounds": round(statistics.median(ours.speed / hand.speed for ours, hand in rounds), 3),
        "rounds": [round(ours.speed / hand.speed, 2) for ours, hand in rounds],
    }


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
