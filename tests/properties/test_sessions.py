"""Whatever a session does and however it ends, each committed row has its event, and each event its row.

A program is a list of steps. Each step that adds a row also emits the event of the row at the same point.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, AsyncSessionTransaction, async_sessionmaker
from sqlalchemy.orm import Session

from outboxio import Outbox, Transaction
from tests.kit.app import Look
from tests.kit.orm import Noted, Order, a_sessionmaker
from tests.kit.probes import written

pytestmark = [pytest.mark.one_of_family, pytest.mark.slow]

KEEPER = -2  # the id of an order that is in the database before a program begins, and in its session
TAKEN = -1  # the id of an order that is in the database only
Maker = async_sessionmaker[AsyncSession]

RAISED = "raised "  # the beginning of the text of an event that an object raises

HOOKS = ("before_commit", "before_flush", "after_flush", "after_flush_postexec")

numbers = count(1)
"""The ids of orders, and the texts of their events."""


class Refused(Exception):
    """A listener has refused the commit or the flush."""


class Step(NamedTuple):
    name: str
    number: int
    """Which of the open savepoints, or which of the next commits and releases."""


class Listener(NamedTuple):
    hook: str
    work: str
    number: int
    """How often the listener is called before it works."""


WORK = (
    "insert", "raise", "add", "add and raise",
    "in a savepoint", "in a savepoint that is undone", "in a savepoint that is left open",
)  # fmt: skip
STEPS = (
    *WORK[:4], *["insert on the connection"] * 2, *["savepoint"] * 3, "release", *["undo"] * 2, "flush", "fail",
)  # fmt: skip
ENDS = ("commit", "commit the root", "refuse", "roll back", "close")


def programs(*ends: str) -> st.SearchStrategy[list[Step]]:
    """Programs that may end and start transactions by ``ends``."""
    step = st.builds(Step, st.sampled_from(STEPS * 2 + ends), st.integers(0, 2))
    return st.lists(step, min_size=8, max_size=30)


listeners = st.lists(
    st.builds(Listener, st.sampled_from(HOOKS), st.sampled_from(WORK), st.integers(0, 3))
    # SQLAlchemy forgets the objects of a flush if a savepoint is rolled back during it, and loses track of a savepoint
    # that is left open.
    .filter(lambda each: each.hook == "before_commit" or each.work not in WORK[-2:]),
    max_size=2,
)


class Program:
    """Runs the steps of a program on a session."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session
        self.savepoints: list[AsyncSessionTransaction] = []
        self.waiting: list[Listener] = []
        self.refuses = 0
        """How many commits and releases before the one that a listener refuses; 0 if it refuses none."""
        self.keeper = Order(id=KEEPER)

    async def run(self, steps: list[Step], waiting: list[Listener]) -> None:
        self.waiting = [*waiting]
        hooks = {hook: self._listener_of(hook) for hook in HOOKS}
        for hook, listener in hooks.items():
            event.listen(self.session.sync_session, hook, listener)
        try:
            for step in steps:
                await self.prepare()
                try:
                    await self.step(step)
                except (Refused, IntegrityError):
                    if not self.session.is_active:
                        await self.roll_back_innermost()
                self.savepoints = [each for each in self.savepoints if self._is_open(each)]
        finally:
            for hook, listener in hooks.items():
                event.remove(self.session.sync_session, hook, listener)

    async def prepare(self) -> None:
        if self.keeper not in self.session:
            self.keeper = await self.session.get_one(Order, KEEPER)

    async def step(self, step: Step) -> None:
        session, opened = self.session, self.savepoints
        savepoint = opened[step.number % len(opened)] if opened else None
        match step.name:
            case "savepoint":
                await session.run_sync(flush_all)
                self.savepoints.append(await session.begin_nested())
            case "release" if savepoint is not None:
                await savepoint.commit()
            case "undo" if savepoint is not None:
                await savepoint.rollback()
            case "flush":
                await session.flush()
            case "fail":
                session.add(Order(id=TAKEN))
                await session.flush()
            case "insert on the connection":
                await self.insert_on_the_connection(self.row())
            case work if work in WORK:
                await session.run_sync(self.work, work)
            case _:
                pass  # no savepoint is open

    def work(self, session: Session, work: str) -> None:
        """Add a row, and its event."""
        match work:
            case "insert":
                session.execute(text(self.row()))
            case "raise":
                session.execute(text(self.row(self.raise_)))
            case "add":
                session.add(Order(id=(number := next(numbers))))
                self.emit(str(number))
            case "add and raise":
                session.add(order := Order(id=next(numbers)))
                order.note(f"{RAISED}{order.id}")
            case _:
                savepoint = session.begin_nested()
                session.execute(text(self.row()))
                if work == "in a savepoint":
                    savepoint.commit()
                elif work == "in a savepoint that is undone":
                    savepoint.rollback()

    def row(self, emit: Callable[[str], None] | None = None) -> str:
        """The INSERT of a row whose event has been emitted."""
        number = next(numbers)
        (emit or self.emit)(str(number))
        return f"INSERT INTO orders (id, kind, state) VALUES ({number}, 'order', 'new')"

    def emit(self, note: str) -> None:
        raise NotImplementedError

    def raise_(self, note: str) -> None:
        self.keeper.note(f"{RAISED}{note}")

    async def insert_on_the_connection(self, sql: str) -> None:
        raise NotImplementedError

    async def roll_back_innermost(self) -> None:
        raise NotImplementedError

    def _is_open(self, savepoint: AsyncSessionTransaction) -> bool:
        transaction = self.session.sync_session.get_nested_transaction()
        while transaction is not None and transaction is not savepoint.sync_transaction:
            transaction = transaction.parent
        return transaction is not None

    def _listener_of(self, hook: str) -> Callable[..., None]:
        def listener(session: Session, *_: object) -> None:
            if hook == "before_commit" and self.refuses:
                self.refuses -= 1
                if not self.refuses:
                    raise Refused
            for each in [each for each in self.waiting if each.hook == hook]:
                if each not in self.waiting:  # its work has called the listener again
                    continue
                self.waiting.remove(each)
                if each.number:
                    self.waiting.append(each._replace(number=each.number - 1))
                else:
                    if hook == "before_commit":
                        flush_all(session)
                    self.work(session, each.work)

        return listener


class OwnSession(Program):
    """A program on a session that the application commits, with ``outbox.bind``."""

    def __init__(self, session: AsyncSession, outbox: Outbox, *, is_bound: bool) -> None:
        super().__init__(session)
        self._outbox = outbox
        self._is_bound = is_bound
        self._connection: AsyncConnection | None = None

    async def prepare(self) -> None:
        if not self.session.in_transaction():
            if self._is_bound:
                self._outbox.bind(self.session)
                self._connection = await self.session.connection()
            else:
                # The driver of SQLite sends no BEGIN before a SAVEPOINT, and outboxio does for its sessions only.
                await self.session.execute(text(f"UPDATE orders SET state = 'kept' WHERE id = {KEEPER}"))
        await super().prepare()

    async def step(self, step: Step) -> None:
        match step.name:
            case "commit":
                await self.session.commit()
            case "commit the root" if (root := self.session.get_transaction()) is not None:
                await root.commit()
            case "refuse":
                self.refuses = step.number + 1
                await self.session.commit()
            case "roll back":
                await self.session.rollback()
            case "close":
                await self.session.close()
            case _:
                await super().step(step)

    def work(self, session: Session, work: str) -> None:
        if "raise" in work:
            self._outbox.bind(self.session)
        super().work(session, work)

    def emit(self, note: str) -> None:
        self._outbox.bind(self.session).emit(Noted(note))

    async def insert_on_the_connection(self, sql: str) -> None:
        connection = self._connection if self._is_bound else await self.session.connection()
        assert connection is not None
        await connection.execute(text(sql))

    async def roll_back_innermost(self) -> None:
        await (self.savepoints[-1] if self.savepoints else self.session).rollback()


class ActionSession(Program):
    """A program on the session of an action, with ``tx.emit``."""

    def __init__(self, tx: Transaction) -> None:
        super().__init__(tx.session)
        self._tx = tx

    def emit(self, note: str) -> None:
        self._tx.emit(Noted(note))

    async def insert_on_the_connection(self, sql: str) -> None:
        await self._tx.execute(sql)

    async def step(self, step: Step) -> None:
        if step.name != "fail" or self.savepoints:  # nothing but the end of the action follows a failed flush
            await super().step(step)

    async def roll_back_innermost(self) -> None:
        await self.savepoints[-1].rollback()


def flush_all(session: Session) -> None:
    """Write what listeners of a flush have added before a savepoint starts: its rollback forgets unwritten objects."""
    while session.new and not session._flushing:
        session.flush()


@pytest.fixture
async def maker(outbox: Outbox, database_url: str) -> AsyncIterator[Maker]:
    async with a_sessionmaker(database_url) as maker:
        async with maker.begin() as session:
            session.add_all([Order(id=KEEPER), Order(id=TAKEN)])
        yield maker


async def delete_and_compare(look: Look) -> None:
    """Delete the committed rows and the committed events, and compare them."""
    rows = await look.fetch("SELECT id FROM orders WHERE id > 0")
    events = sorted(await written(look), key=lambda row: row["sequence"])
    await look.fetch("DELETE FROM {events}")
    await look.fetch("DELETE FROM orders WHERE id > 0")
    notes = [event["payload"]["text"] for event in events if event["payload"] is not None]
    assert sorted(int(note.removeprefix(RAISED)) for note in notes) == sorted(row["id"] for row in rows)
    emitted = [int(note) for note in notes if not note.startswith(RAISED)]
    assert emitted == sorted(emitted)


@given(programs(*ENDS), st.sampled_from(ENDS), listeners, st.booleans())
async def test_rows_and_events_of_a_session_are_committed_together(
    outbox: Outbox,
    maker: Maker,
    look: Look,
    program: list[Step],
    end: str,
    waiting: list[Listener],
    is_bound: bool,
) -> None:
    async with maker() as session:
        await OwnSession(session, outbox, is_bound=is_bound).run([*program, Step(end, 0)], waiting)
    await delete_and_compare(look)


@given(programs(), listeners, st.sampled_from([False, False, False, True]))
async def test_rows_and_events_of_an_action_are_committed_together(
    database_url: str, maker: Maker, look: Look, program: list[Step], waiting: list[Listener], fails: bool
) -> None:
    async with Outbox(maker, namespace="app") as outbox:
        with suppress(Refused):
            async with outbox.transaction("Program") as tx:
                await ActionSession(tx).run(program, waiting)
                if fails:
                    raise Refused
    await delete_and_compare(look)
