"""``Outbox(engine)`` and ``tx.session``: SQLAlchemy objects and events are committed in one transaction."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import String, event, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxio import (
    Action,
    ConfigurationError,
    Event,
    EventEnvelope,
    HandlerFailed,
    InvalidEvent,
    Outbox,
    PoolExhausted,
    Retry,
    RetryPolicy,
    Settings,
    Shard,
    StaleRecord,
    Transaction,
    TransactionClosed,
    TransactionEnded,
    Unprocessable,
)
from outboxio.integrations.sqlalchemy import RaisesEvents
from tests.kit.app import Look, eventually
from tests.kit.marks import needs_many_writers
from tests.kit.opened_by import engine_url
from tests.kit.probes import doing

pytestmark = pytest.mark.with_tables

ACTIONS = 1_000 if os.environ.get("OUTBOXIO_TEST_FULL_SIZE") else 100
CALLERS = 16


class Base(DeclarativeBase):
    pass


class Account(RaisesEvents, Base):
    __tablename__ = "accounts"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  # the name and the form are SQLAlchemy's


class Entry(Base):
    __tablename__ = "entries"
    region: Mapped[str] = mapped_column(String(20), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Paid(Event):
    amount: int


class Pay(Action):
    amount: int
    account: int = 1

    async def perform(self, tx: Transaction) -> int:
        account = await tx.session.get_one(Account, self.account)
        account.balance += self.amount
        tx.emit(Paid(self.amount), model=account)
        return account.balance


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(engine_url(database_url))
    yield engine
    await engine.dispose()


@pytest.fixture
async def outbox(engine: AsyncEngine) -> AsyncIterator[Outbox]:
    async with outbox_of(engine) as outbox:
        yield outbox


@asynccontextmanager
async def outbox_of(source: Any, **options: Any) -> AsyncIterator[Outbox]:
    """An outbox with tables, and an account."""
    async with Outbox(source, namespace="app", **options) as outbox:
        await outbox.migrate()
        engine = source if isinstance(source, AsyncEngine) else source.kw["bind"]
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with AsyncSession(engine) as session, session.begin():
            session.add(Account(id=1, balance=0))
        yield outbox


async def balance(engine: AsyncEngine) -> int:
    async with AsyncSession(engine) as session:
        return (await session.get_one(Account, 1)).balance


async def becomes_idle(engine: AsyncEngine) -> None:
    """Wait until no connection of the engine is in use. A task sends wake-ups after an action has returned."""
    pool: Any = engine.pool
    await eventually(lambda: pool.checkedout() == 0)


async def conflict(engine: AsyncEngine) -> None:
    """A concurrent transaction changes the account."""
    async with AsyncSession(engine) as session, session.begin():
        (await session.get_one(Account, 1)).balance += 100


async def test_objects_and_events_are_one_transaction(outbox: Outbox, engine: AsyncEngine, look: Look) -> None:
    assert await outbox.executor.execute(Pay(7)) == 7

    (row,) = await look.events()
    assert (row["model_id"], row["model_type"], row["action_name"]) == ("1", "Account", "Pay")
    assert await balance(engine) == 7
    await becomes_idle(engine)


async def test_an_action_may_end_with_open_savepoints(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("Pay") as tx:
        await tx.session.begin_nested()
        tx.session.add(Entry(region="north", number=1))
        await tx.session.begin_nested()
        tx.emit(Paid(1))
    assert await look.value("SELECT count(*) FROM entries") == 1
    assert len(await look.events()) == 1


async def test_a_failed_action_leaves_neither(outbox: Outbox, engine: AsyncEngine, look: Look) -> None:
    async def fail(tx: Transaction) -> None:
        await Pay(7).perform(tx)
        await tx.session.flush()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await outbox.executor.execute(doing(fail))
    assert (await look.events(), await balance(engine)) == ([], 0)
    await becomes_idle(engine)


async def test_sql_and_the_session_see_each_others_changes_in_any_order(outbox: Outbox, engine: AsyncEngine) -> None:
    async def mix(tx: Transaction) -> tuple[Any, ...]:
        await tx.execute("UPDATE accounts SET balance = 5 WHERE id = 1")
        account = await tx.session.get_one(Account, 1)
        first, account.balance = account.balance, 6
        await tx.session.flush()
        return first, await tx.fetchval("SELECT balance FROM accounts WHERE id = 1")

    assert await outbox.executor.execute(doing(mix)) == (5, 6)
    assert await balance(engine) == 6


async def test_the_session_is_flushed_before_events_and_its_commit(
    outbox: Outbox, engine: AsyncEngine, look: Look
) -> None:
    order: list[str] = []

    async def listen(tx: Transaction) -> None:
        own = tx.session.sync_session
        event.listen(own, "after_flush", lambda *_: order.append("flush"))
        event.listen(own, "after_commit", lambda *_: order.append("commit"))
        event.listen(engine.sync_engine, "commit", lambda _: order.append("COMMIT"))
        await Pay(1).perform(tx)

    await outbox.executor.execute(doing(listen))
    assert order == ["flush", "COMMIT", "commit"]
    assert len(await look.events()) == 1


@pytest.mark.parametrize("explicit", [True, False], ids=["at its own flush", "at the end"])
@needs_many_writers
async def test_a_version_conflict_is_retried_with_a_new_session(
    outbox: Outbox, engine: AsyncEngine, look: Look, explicit: bool
) -> None:
    sessions: list[AsyncSession] = []

    async def pay(tx: Transaction) -> None:
        sessions.append(tx.session)
        account = await tx.session.get_one(Account, 1)
        if len(sessions) == 1:
            await conflict(engine)
        account.balance += 1
        tx.emit(Paid(1), model=account)
        if explicit:
            await tx.session.flush()

    await outbox.executor.execute(doing(pay))
    assert len(sessions) == 2
    assert sessions[0] is not sessions[1]
    assert (await balance(engine), len(await look.events())) == (101, 1)
    await becomes_idle(engine)


async def test_a_conflict_in_every_attempt_ends_as_a_stale_record(
    outbox: Outbox, engine: AsyncEngine, look: Look
) -> None:
    async def pay(tx: Transaction) -> None:
        account = await tx.session.get_one(Account, 1)
        await tx.execute("UPDATE accounts SET version = version + 1")  # as if by another transaction
        account.balance += 1
        tx.emit(Paid(1))

    with pytest.raises(StaleRecord) as refused:
        await outbox.executor.execute(doing(pay), retry=Retry(on=StaleRecord, attempts=2, delay="1ms"))
    assert type(refused.value.__cause__).__name__ == "StaleDataError"
    assert (await look.events(), await balance(engine)) == ([], 0)


ENDS: dict[str, Callable[[AsyncSession], Awaitable[Any]]] = {
    "session.commit()": lambda session: session.commit(),
    "session.rollback()": lambda session: session.rollback(),
    "session.close()": lambda session: session.close(),
}


@pytest.mark.parametrize("call", ENDS)
async def test_a_session_refuses_to_end_the_transaction(
    outbox: Outbox, engine: AsyncEngine, look: Look, call: str
) -> None:
    async def end(tx: Transaction) -> None:
        account = await tx.session.get_one(Account, 1)
        account.balance = 3
        with pytest.raises(TransactionEnded, match=f"{call[:-2]}.*outboxio commits when perform returns"):
            await ENDS[call](tx.session)
        tx.emit(Paid(3))

    await outbox.executor.execute(doing(end))
    assert (await balance(engine), len(await look.events())) == (3, 1)


async def test_a_connection_committed_by_hand_is_detected(outbox: Outbox, look: Look) -> None:
    async def end(tx: Transaction) -> None:
        await tx.session.get_one(Account, 1)
        await (await tx.session.connection()).commit()
        tx.emit(Paid(3))

    with pytest.raises(TransactionEnded):
        await outbox.executor.execute(doing(end))
    assert await look.events() == []


async def test_a_rolled_back_savepoint_takes_only_its_own_rows(outbox: Outbox, engine: AsyncEngine, look: Look) -> None:
    async def try_twice(tx: Transaction) -> None:
        (await tx.session.get_one(Account, 1)).balance = 3
        with pytest.raises(IntegrityError):
            async with tx.session.begin_nested():
                await tx.session.execute(text("INSERT INTO accounts (id, balance, version) VALUES (1, 0, 1)"))
        async with tx.session.begin_nested():
            tx.session.add(Account(id=2, balance=0))
        tx.emit(Paid(3))

    await outbox.executor.execute(doing(try_twice))
    async with AsyncSession(engine) as session:
        assert [a.balance for a in await session.scalars(select(Account).order_by(Account.id))] == [3, 0]
    assert len(await look.events()) == 1


async def test_raised_and_emitted_events_keep_order_and_follow_savepoints(outbox: Outbox, look: Look) -> None:
    async def raise_some(tx: Transaction) -> None:
        account = await tx.session.get_one(Account, 1)
        tx.emit(Paid(1))
        savepoint = await tx.session.begin_nested()
        account.raise_event(Paid(2))
        account.balance = 5
        await tx.session.flush()
        tx.emit(Paid(3))
        await savepoint.rollback()
        account.raise_event(Paid(4))  # and no row of the object changes

    await outbox.executor.execute(doing(raise_some))
    assert ["1" in row["payload"] or "4" in row["payload"] for row in await look.events()] == [True, True]


async def test_a_joining_action_has_its_own_events(outbox: Outbox, look: Look) -> None:
    class Joins(Action):
        async def perform(self, tx: Transaction) -> None:
            (await tx.session.get_one(Account, 1)).raise_event(Paid(5))

    @outbox.handler(Paid, name="books", delivery="transactional")
    async def book(envelope: EventEnvelope[Paid]) -> None:
        if envelope.event.amount == 1:
            account = await envelope.tx.session.get_one(Account, 1)
            await envelope.execute(Joins())
            account.raise_event(Paid(6))

    await outbox.executor.execute(Pay(1))
    await outbox.drain()
    names = {row["payload"].strip('{} "amount:'): row["action_name"] for row in await look.events()}
    assert names == {"1": "Pay", "5": "Joins", "6": "books"}


async def test_a_swallowed_flush_failure_commits_nothing(outbox: Outbox, engine: AsyncEngine, look: Look) -> None:
    async def swallow(tx: Transaction) -> None:
        await tx.execute("UPDATE accounts SET balance = 9 WHERE id = 1")
        tx.session.add(Account(id=1, balance=0))
        with pytest.raises(IntegrityError):
            await tx.session.flush()
        tx.emit(Paid(9))

    with pytest.raises(Exception, match=r"rolled back|ends the transaction"):
        await outbox.executor.execute(doing(swallow))
    assert (await balance(engine), await look.events()) == (0, [])
    await becomes_idle(engine)


async def test_the_session_is_made_by_the_users_sessionmaker(engine: AsyncEngine, look: Look) -> None:
    class OwnSession(AsyncSession):
        pass

    maker = async_sessionmaker(engine, class_=OwnSession, expire_on_commit=False, info={"by": "the application"})
    async with outbox_of(maker) as outbox, outbox.transaction("Pay") as tx:
        assert isinstance(tx.session, OwnSession)
        assert tx.session is tx.session
        assert tx.session.info["by"] == "the application"
        tx.session.add(Entry(region="eu", number=7))
        await tx.session.flush()
        tx.emit(Paid(1), model=await tx.session.get_one(Entry, ("eu", 7)))
    assert [row["model_id"] for row in await look.events()] == ["eu,7"]
    with pytest.raises(TransactionClosed):
        _ = tx.session


async def test_classes_bound_to_the_engine_join_the_actions_transaction(
    outbox: Outbox, engine: AsyncEngine, look: Look
) -> None:
    async def fail(tx: Transaction) -> None:
        tx.session.add(Account(id=2, balance=0))
        tx.session.add(Entry(region="eu", number=1))
        await tx.session.flush()
        assert await tx.fetchval("SELECT count(*) FROM entries") == 1
        raise RuntimeError

    maker = async_sessionmaker(engine, binds={Account: engine.execution_options(), Entry: engine})
    async with Outbox(maker, namespace="app") as bound:
        with pytest.raises(RuntimeError):
            await bound.executor.execute(doing(fail))
    assert await look.value("SELECT count(*) FROM accounts WHERE id = 2") == 0


async def test_statements_after_begin_nested_are_inside_the_savepoint(outbox: Outbox, look: Look) -> None:
    """SQLAlchemy itself sends SAVEPOINT before its next statement."""
    async with outbox.transaction("Pay") as tx:
        savepoint = await tx.session.begin_nested()
        await tx.execute("UPDATE accounts SET balance = 7 WHERE id = 1")
        tx.emit(Paid(7))
        await savepoint.rollback()
        tx.emit(Paid(1))
    assert await look.value("SELECT balance FROM accounts WHERE id = 1") == 0
    assert ["1" in row["payload"] for row in await look.events()] == [True]


async def test_a_commit_listener_cannot_add_events(outbox: Outbox, engine: AsyncEngine, look: Look) -> None:
    """Raised events too: the events of the action are already written."""
    async with AsyncSession(engine) as session:
        account = await session.get_one(Account, 1)

    async def work(tx: Transaction) -> None:
        loaded = await tx.session.get_one(Account, account.id)
        event.listen(tx.session.sync_session, "before_commit", lambda _: loaded.raise_event(Paid(2)))
        tx.emit(Paid(1))

    with pytest.raises(TransactionClosed):
        await outbox.executor.execute(doing(work))
    assert await look.events() == []


async def test_objects_without_a_key_or_a_mapping_are_refused(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("Refused") as tx:
        with pytest.raises(InvalidEvent, match=r"no primary key yet: await tx\.session\.flush\(\)"):
            tx.emit(Paid(1), model=Account(balance=0))
        with pytest.raises(InvalidEvent, match="mapped by SQLAlchemy"):
            tx.emit(Paid(1), model=object())
    assert [row["event_type"] for row in await look.events()] == [None]


async def test_a_transactional_handler_and_its_hook_have_a_session(
    outbox: Outbox, engine: AsyncEngine, look: Look
) -> None:
    async def hook(envelope: EventEnvelope[Paid], error: HandlerFailed) -> None:
        (await envelope.tx.session.get_one(Account, 1)).balance -= 1
        envelope.emit(Paid(0), model=await envelope.tx.session.get_one(Account, 1))

    @outbox.handler(Paid, name="books", delivery="transactional", on_dead=hook)
    async def book(envelope: EventEnvelope[Paid]) -> None:
        account = await envelope.tx.session.get_one(Account, 1)
        account.balance += envelope.event.amount * 10
        if envelope.event.amount == 2:
            raise Unprocessable("never")

    await outbox.executor.execute(Pay(1))
    await outbox.executor.execute(Pay(2))
    drained = await outbox.drain()

    assert (drained.succeeded, drained.dead) == (2, 1)
    assert await balance(engine) == 3 + 10 - 1
    assert [row["model_id"] for row in await look.events()] == ["1", "1", "1"]
    await becomes_idle(engine)


async def test_a_handler_whose_session_fails_at_the_end_is_retried(outbox: Outbox, engine: AsyncEngine) -> None:
    calls = 0

    @outbox.handler(Paid, name="books", delivery="transactional", retry=RetryPolicy(max_attempts=2, base="10ms"))
    async def book(envelope: EventEnvelope[Paid]) -> None:
        nonlocal calls
        calls += 1
        envelope.tx.session.add(Account(id=1 if calls == 1 else 2, balance=5))

    await outbox.executor.execute(Pay(1))
    async with outbox.running():
        await eventually(lambda: calls == 2)
        await becomes_idle(engine)


async def test_a_cancelled_action_returns_a_clean_connection(database_url: str, look: Look) -> None:
    pooled: Any = {"pool_size": 1, "max_overflow": 0}
    engine = create_async_engine(engine_url(database_url), **pooled)
    async with outbox_of(engine) as outbox:
        for waits_in in ("the action", "a statement"):
            started = asyncio.Event()

            async def wait(tx: Transaction, started: asyncio.Event = started, waits_in: str = waits_in) -> None:
                await Pay(1).perform(tx)
                await tx.session.flush()
                started.set()
                while waits_in == "a statement":
                    await tx.session.execute(text("SELECT 1"))
                await asyncio.Event().wait()

            task = asyncio.create_task(outbox.executor.execute(doing(wait)))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await becomes_idle(engine)
        assert await outbox.executor.execute(Pay(1)) == 1
    assert (await balance(engine), len(await look.events())) == (1, 1)
    await engine.dispose()


async def test_running_takes_no_connection_of_the_users_pool(server_url: str) -> None:
    engine = create_async_engine(engine_url(server_url), pool_size=1, max_overflow=0)
    async with outbox_of(engine, settings=Settings(pool_timeout="50ms")) as outbox:
        done = asyncio.Event()

        @outbox.handler(Paid, name="counts")
        async def count(envelope: EventEnvelope[Paid]) -> None:
            done.set()

        async with outbox.running(), asyncio.timeout(30):
            await outbox.executor.execute(Pay(1))
            async with engine.connect():
                await done.wait()
                with pytest.raises(PoolExhausted, match=r"the pool of the engine .*1 of at most 1"):
                    await outbox.executor.execute(Pay(1))
        await becomes_idle(engine)
    assert await balance(engine) == 1, "the engine is the application's, and stays open"
    await engine.dispose()


async def test_actions_with_conflicts_and_cancellations_lose_nothing(
    outbox: Outbox, engine: AsyncEngine, look: Look
) -> None:
    """Balance and events agree: no action is lost or duplicated. Cancelled actions leak no connection."""
    chance = random.Random(25)
    often = Retry(on=StaleRecord, attempts=15, delay="1ms")
    async with AsyncSession(engine) as session, session.begin():
        session.add_all([Account(id=number, balance=0) for number in range(2, 6)])
    amounts = iter(range(1, ACTIONS + 1))
    started, paid, cancelled = list[int](), list[int](), list[int]()

    class NotedPay(Pay):
        async def perform(self, tx: Transaction) -> int:
            started.append(self.amount)
            task = asyncio.current_task()
            if task is not None and chance.random() < 0.1:
                asyncio.get_running_loop().call_later(chance.uniform(0, 0.002), task.cancel)
            return await super().perform(tx)

    async def work() -> None:
        for amount in amounts:
            task = asyncio.create_task(outbox.executor.execute(NotedPay(amount, amount % 5 + 1), retry=often))
            if chance.random() < 0.1:  # also while the action waits for a connection, or for a turn at the file
                for _ in range(chance.randrange(40)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                cancelled.append(amount)
            else:
                task.result()
                paid.append(amount)

    await asyncio.gather(*(work() for _ in range(CALLERS)))
    rows = await look.fetch("SELECT payload FROM {events}")
    amounts_of_rows = [int("".join(filter(str.isdigit, row["payload"]))) for row in rows]
    assert len(set(amounts_of_rows)) == len(amounts_of_rows)
    assert set(amounts_of_rows) >= set(paid)
    async with AsyncSession(engine) as session:
        assert sum(account.balance for account in await session.scalars(select(Account))) == sum(amounts_of_rows)
    await becomes_idle(engine)
    assert set(started) & set(cancelled), "no action was cancelled in the middle"
    if not look.is_file:  # the actions on a file take turns
        assert len(started) > len(set(started)), "no conflict caused an action to be retried"


async def test_a_url_may_be_that_of_an_engine(database_url: str, look: Look) -> None:
    async with Outbox(engine_url(database_url), namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("Plain") as tx:
            with pytest.raises(ConfigurationError, match=r"has no SQLAlchemy engine.*Outbox\(create_async_engine"):
                _ = tx.session
            tx.emit(Paid(1))
    assert len(await look.events()) == 1


async def test_a_begin_event_of_the_engine_starts_the_transaction(sqlite_url: str) -> None:
    """The recipe of SQLAlchemy's documentation for SQLite."""
    engine = create_async_engine(engine_url(sqlite_url))

    @event.listens_for(engine.sync_engine, "connect")
    def disable_driver_begin(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    async with outbox_of(engine) as outbox:
        assert await outbox.executor.execute(Pay(2)) == 2
        assert await balance(engine) == 2
    await engine.dispose()


async def test_an_engine_in_autocommit_is_refused(postgres_url: str) -> None:
    engine = create_async_engine(engine_url(postgres_url), isolation_level="AUTOCOMMIT")
    async with Outbox(engine, namespace="app") as outbox:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            async with outbox.transaction("Refused"):
                pass
    await engine.dispose()


async def test_loops_may_have_their_own_url(server_url: str, look: Look) -> None:
    engine = create_async_engine(engine_url(server_url))
    async with Outbox(Shard(engine, direct_url=server_url), namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("Emits") as tx:
            tx.emit(Paid(1))
        await outbox.drain()
    await engine.dispose()


WRONG: dict[str, Callable[[], Any]] = {
    "in-memory": lambda: create_async_engine("sqlite+aiosqlite://"),
    "without a default engine": lambda: async_sessionmaker(),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_database_value_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Outbox(WRONG[name](), namespace="app")
