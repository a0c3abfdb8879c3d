"""Transactions: SQL of the application, and ``emit``."""

# pyright: reportPrivateUsage=false
# The functions of this module are the other half of Transaction, which would be too long with them.

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, _AsyncGeneratorContextManager
from contextvars import ContextVar, Token
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

from outboxio.errors import (
    CommitUnknown,
    ConcurrentUse,
    ConfigurationError,
    StaleRecord,
    TransactionClosed,
    TransactionEnded,
)
from outboxio.model.emitter import Cause, Emitter, tell_written, watchers
from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent
from outboxio.model.payloads.classes import AnyEvent, named_by
from outboxio.storage.protocols import CommitLost, ConsumeResult, Session, TransactionLost
from outboxio.support.aio import over, to_the_end
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from outboxio.integrations.sessions import SessionEvents

P = ParamSpec("P")
T = TypeVar("T")

Rows = tuple[ActionRecord, Sequence[EventRecord]]

logger = log_of(__name__)

ROLLBACK_TIMEOUT = 10.0  # seconds; a connection that answers no longer is discarded instead


class Transaction:
    """The open transaction of an action: runs SQL, and emits events.

    SQL is the driver's own and is not rewritten: ``$1`` on PostgreSQL, ``%s`` on MySQL and MariaDB, ``?`` (or ``$1``)
    on SQLite. Statements run one at a time. Events are kept until the action ends, and are written in a single
    statement just before COMMIT.

    Use after the action ended raises :class:`TransactionClosed`, use by two tasks at once :class:`ConcurrentUse`,
    and a statement that would end the transaction :class:`TransactionEnded`.

    Example::

        async def perform(self, tx: Transaction) -> None:
            await tx.execute("UPDATE wallets SET balance = balance + $1 WHERE id = $2", self.amount, self.wallet_id)
            tx.emit(MoneyDeposited(self.wallet_id, self.amount), model_id=self.wallet_id, model_type="Wallet")
    """

    _busy = _closed = False  # most transactions keep this value and those below
    was_joined = False
    """True if actions have joined the transaction. They may have written events."""
    is_committed = False
    """True if the COMMIT of the rows and events has succeeded."""
    owner: object = None
    """The outbox of the transaction, from :func:`work_in` on."""
    claimed: frozenset[UUID] = frozenset()
    """The notifications that a handler's transaction has locked."""
    _untold: list[Rows] | None = None
    """Rows of which watchers are told after the COMMIT, in a transaction that outboxio commits later."""
    _raised: SessionEvents | None = None
    """The events that objects of the session raise, from the first use of the session on."""

    def __init__(
        self,
        session: Session,
        emitter: Emitter,
        action: ActionRecord,
        *,
        shard: str,
        resources: Any,
        cause: Cause | None,
        in_handler: bool = False,
        untold: list[Rows] | None = None,
        is_reading: bool = False,
    ) -> None:
        self._session = session
        self._emitter = emitter
        self._cause = cause
        self.action_id = action.action_id
        """The id that all rows of this execution share."""
        self.action_name = action.action_name
        self.now = action.started_date
        """When the action began: naive UTC, by the clock of the shard."""
        self.shard = shard
        self.resources = resources
        """The value of ``Outbox(resources=...)``."""
        self.events: list[EventRecord] = []
        self.in_handler = in_handler
        """True for a handler's transaction: ``envelope.tx``, or an action that joined ``envelope.tx``."""
        self.is_reading = is_reading
        """True for a transaction of ``outbox.connection()``, in which the database refuses to write."""
        if in_handler or untold is not None:
            self._untold = [] if untold is None else untold

    @property
    def connection(self) -> Any:
        """The driver's own connection, in the open transaction. Do not end the transaction.

        outboxio does not see a statement that ends the transaction here, and never notices the end if the application
        begins a new transaction afterwards. On SQLite, MySQL and MariaDB the transaction begins with the first
        statement, or with the first read of this attribute, which on SQLite blocks the event loop meanwhile. Raises
        :class:`ConcurrentUse` while a statement runs.
        """
        if self._closed:
            raise TransactionClosed(self.action_name)
        if self._busy:
            raise ConcurrentUse(self.action_name)
        return self._session.connection

    @property
    def session(self) -> AsyncSession:
        """The SQLAlchemy session of the transaction, if the outbox was made from an engine or a sessionmaker.

        The session is made by the sessionmaker of the application, at the first use. The end of the action writes the
        changes, then the events, and commits. If the version of an object has changed meanwhile, the action fails with
        a :class:`StaleRecord` and is retried, with a new session. ``commit``, ``rollback`` and ``close`` raise
        :class:`TransactionEnded`; ``begin_nested`` works. Raises :class:`ConfigurationError` for an outbox without an
        engine.

        Example::

            order = await tx.session.get_one(Order, self.order_id)
            order.state = "paid"
            tx.emit(OrderPaid(order.id, order.total), model=order)
        """
        if (unit := self._session.unit) is None:
            raise ConfigurationError(
                f"shard {self.shard!r} was not given as an engine, so that {self.action_name} has no tx.session: make "
                "the outbox with an engine, as in Outbox(create_async_engine(url), ...)"
            )
        _ = self.connection  # the transaction begins, and the statements of the session follow on the same connection
        session = unit.session(self.action_name)
        if self._raised is None:
            from outboxio.integrations.sessions import ActionSink, events_of

            self._raised = events_of(session.sync_session)
            self._raised.sink = ActionSink(self)
        return session

    async def flush(self) -> None:
        """Write the changes of the session, and take the events that its objects have raised, if there is a session."""
        if self._raised is not None and (unit := self._session.unit) is not None:
            await unit.flush()
            self._raised.collect(unit.session(self.action_name).sync_session)

    def resume(self) -> None:
        """Take the events of the session again: an action that had joined has ended."""
        if self._raised is not None:
            from outboxio.integrations.sessions import ActionSink

            self._raised.sink = ActionSink(self)

    def emit(
        self,
        event: AnyEvent,
        *,
        model: object = None,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
    ) -> None:
        """Record an event. The event is committed with the action, or not at all.

        ``model_id`` and ``model_type`` name the changed object; ``model``, an object that SQLAlchemy has mapped, gives
        both: the primary key, and the name of the class. ``ordering_key`` (default: ``model_id``) is the key
        within which ordered handlers keep the order. ``topic`` reaches the handlers of that topic as well.
        ``available_at`` (naive UTC, or aware) delays the handlers until then. Raises :class:`InvalidEvent` if the event
        cannot be stored.
        """
        if self._closed:
            raise TransactionClosed(self.action_name)
        if model is not None:
            model_id, model_type = named_by(model, model_id, model_type)
        self.events.append(
            self._emitter.record(
                event,
                self._cause,
                model_id=model_id,
                model_type=model_type,
                ordering_key=ordering_key,
                topic=topic,
                available_at=available_at,
            )
        )

    def add(self, record: EventRecord) -> None:
        """Add the record of an event."""
        if self._closed:
            raise TransactionClosed(self.action_name)
        self.events.append(record)

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        """Write the row of an inbox message, unless the row exists; the row that exists now."""
        return await self._session.consume(consumed)

    async def consume_all(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        """Write the rows of many inbox messages, except rows that exist; the rows afterwards."""
        return await self._session.consume_all(consumed)

    def joined_by(self, action: ActionRecord) -> Transaction:
        """The same transaction for an action that joins. The joined action keeps its events apart."""
        if self._closed:
            raise TransactionClosed(self.action_name)
        self.was_joined = True
        return Transaction(
            self._session, self._emitter, action, shard=self.shard, resources=self.resources, cause=self._cause,
            in_handler=self.in_handler, untold=self._untold,
        )  # fmt: skip

    async def write(self, record: ActionRecord, events: Sequence[EventRecord]) -> None:
        """Write the rows of an action; :class:`TransactionEnded` if the transaction has ended."""
        self.require_open("a statement on tx.connection")
        sending = self._emitter.telemetry.chosen.sending(self.shard, record, events)
        record = sending.marked(record)
        try:
            with sending:
                await self._session.insert_events(record, events)
        except TransactionLost as error:
            raise TransactionEnded(record.action_name, "an earlier statement") from error.__cause__
        self._emitter.count(events)
        if watchers:
            self._tell((record, events))

    async def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> None:
        """Write the rows of the action, if any are left to write, and commit; or roll back.

        A cancellation meanwhile goes on only when the end of the COMMIT is known. Raises :class:`CommitUnknown` if the
        connection was lost before that.
        """
        session = self._session
        ending = asyncio.ensure_future(session.commit(action, events))
        cancelled = await over(ending, session.discard)
        try:
            await self._committed(ending)
        except Exception as error:
            if cancelled is not None:
                raise cancelled from error
            raise
        finally:
            if self.is_committed:
                self._emitter.count(events)
                if watchers:
                    self._tell_after_commit(action, events)
        if cancelled is not None:
            raise cancelled

    def _tell(self, rows: Rows) -> None:
        if self._untold is None:
            tell_written(*rows)
        else:
            self._untold.append(rows)

    def _tell_after_commit(self, action: ActionRecord | None, events: Sequence[EventRecord]) -> None:
        for rows in self._untold or ():
            tell_written(*rows)
        if action is not None:
            tell_written(action, events)

    async def _committed(self, ending: asyncio.Future[None]) -> None:
        """Take in the result of a COMMIT that has ended."""
        session = self._session
        try:
            ending.result()
        except CommitLost as lost:
            session.discard()
            raise CommitUnknown(self.action_name, self.action_id) from lost.__cause__
        except TransactionLost as error:
            raise TransactionEnded(self.action_name, "an earlier statement") from error.__cause__
        except BaseException:
            if session.in_transaction():
                await to_the_end(roll_back(session))
            raise
        self.is_committed = True

    async def execute(self, sql: str, *args: Any) -> int:
        """Run a statement; the number of rows that the statement touched."""
        return await self._alone(self._session.execute, sql, args)

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run a statement; all rows. Columns are reached by index and by name."""
        return await self._alone(self._session.fetch, sql, args)

    async def fetchrow(self, sql: str, *args: Any) -> Any | None:
        """Run a statement; the first row, or ``None``."""
        return await self._alone(self._session.fetchrow, sql, args)

    async def fetchval(self, sql: str, *args: Any) -> Any:
        """Run a statement; the first column of the first row, or ``None``."""
        row = await self._alone(self._session.fetchrow, sql, args)
        return None if row is None else row[0]

    async def expect_one(
        self, sql: str, *args: Any, model_type: str, model_id: object = None, version: object = None
    ) -> None:
        """Run a statement that must touch exactly 1 row; otherwise raise :class:`StaleRecord`, which is retried.

        Example::

            await tx.expect_one(
                "UPDATE wallets SET balance = $1, version = version + 1 WHERE id = $2 AND version = $3",
                balance, wallet_id, version, model_type="Wallet", model_id=wallet_id, version=version,
            )
        """
        if await self.execute(sql, *args) != 1:
            raise StaleRecord(model_type, model_id, version)

    @property
    def is_closed(self) -> bool:
        """True if the action has ended."""
        return self._closed

    def close(self) -> None:
        """Refuse all further use, and refuse to end while a statement is still under way."""
        self._closed = True
        if self._busy:
            raise ConcurrentUse(self.action_name)

    def abandon(self) -> None:
        """Refuse all further use: the action failed."""
        self._closed = True

    async def _alone(self, run: Callable[[str, Sequence[Any]], Awaitable[T]], sql: str, args: Sequence[Any]) -> T:
        if self._closed:
            raise TransactionClosed(self.action_name)
        if self._busy:
            raise ConcurrentUse(self.action_name)
        if (words := self._session.would_end(sql)) is not None:
            raise TransactionEnded(self.action_name, words)
        # Outside of a transaction a statement would be committed at once, and without events.
        self.require_open("an earlier statement")
        self._busy = True
        try:
            result = await run(sql, args)
        except TransactionLost as error:
            raise TransactionEnded(self.action_name, "an earlier statement") from error.__cause__
        finally:
            self._busy = False
        self.require_open(sql)
        return result

    def require_open(self, statement: str) -> None:
        """Raise :class:`TransactionEnded`, blaming ``statement``, unless the transaction is still there."""
        if not self._session.in_transaction():
            raise TransactionEnded(self.action_name, statement)


class _Unopened(_AsyncGeneratorContextManager[Transaction]):
    """A transaction before ``async with``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Transaction, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"the transaction is not open: write `async with outbox.transaction(...) as tx:`, and tx.{name} in it"
        )


def opens_transaction(function: Callable[P, AsyncGenerator[Transaction]]) -> Callable[P, _Unopened]:
    """``asynccontextmanager`` for a transaction. A use of it before ``async with`` says what is missing."""

    @wraps(function)
    def open(*args: P.args, **options: P.kwargs) -> _Unopened:
        return _Unopened(function, args, options)

    return open


_Around = tuple[Transaction, "_Around | None"]
open_transaction: ContextVar[_Around | None] = ContextVar("outboxio_open_transaction", default=None)
"""The innermost open transaction around this code, with the transactions around it."""


def work_in(tx: Transaction, owner: object) -> Token[_Around | None]:
    """Put the code that runs from now on inside this transaction of an outbox, until :func:`work_outside`."""
    tx.owner = owner
    return open_transaction.set((tx, open_transaction.get()))


def work_outside(token: Token[_Around | None]) -> None:
    """The work in the transaction has ended."""
    open_transaction.reset(token)


def transactions_around() -> Iterable[Transaction]:
    """The open transactions around this call, of any outbox, the innermost first."""
    around = open_transaction.get()
    return () if around is None else _open_ones(around)


def _open_ones(innermost: _Around) -> Iterator[Transaction]:
    around: _Around | None = innermost
    while around is not None:
        tx, around = around
        if not tx.is_closed:
            yield tx


async def write_received(tx: Transaction, received: Sequence[ReceivedEvent], *, commits: bool) -> None:
    """Write the events of inbox messages; :class:`TransactionEnded` if the transaction has ended.

    ``commits``: outboxio commits the transaction, and tells watchers of the events after the COMMIT.
    """
    tx.require_open("a statement on tx.connection")
    tx.was_joined = True  # fan-out is woken for events of other actions
    emitter, marked = tx._emitter, list[ReceivedEvent]()
    try:
        with ExitStack() as stack:
            for record, event in received:
                sending = emitter.telemetry.chosen.sending(tx.shard, record, [event])
                marked.append((sending.marked(record), event))
                stack.enter_context(sending)
            await tx._session.insert_received(marked)
    except TransactionLost as error:
        raise TransactionEnded(tx.action_name, "an earlier statement") from error.__cause__
    emitter.count([event for _, event in marked])
    if commits and tx._untold is None:
        tx._untold = []
    for record, event in marked if watchers else ():
        tx._tell((record, [event]))


async def roll_back(session: Session) -> None:
    """Roll back. If the ROLLBACK fails, the connection is discarded; the error of the work stays the raised error."""
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT):
            await session.rollback()
    except Exception as error:
        logger.warning("ROLLBACK failed with %s; the connection is discarded", error)
        session.discard()
