"""Transactions: your application's SQL, and ``emit``."""

# pyright: reportPrivateUsage=false
# The functions of this module belong to Transaction, which would be too long with them.

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
from outboxio.model.emitter import Cause, Emitter, notify_watchers, watchers
from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent
from outboxio.model.payloads.classes import AnyEvent, named_by
from outboxio.storage.protocols import CommitLost, ConsumeResult, Session, TransactionLost
from outboxio.support.aio import run_to_completion, wait_done
from outboxio.support.log import log_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from outboxio.integrations.sessions import SessionEvents

P = ParamSpec("P")
T = TypeVar("T")

Rows = tuple[ActionRecord, Sequence[EventRecord]]

logger = log_of(__name__)

ROLLBACK_TIMEOUT = 10.0  # seconds, after which the connection is discarded


class Transaction:
    """The open transaction of an action: runs SQL, and emits events.

    SQL uses the driver's placeholders and is not rewritten: ``$1`` on PostgreSQL, ``%s`` on MySQL and MariaDB, ``?``
    (or ``$1``) on SQLite. Statements run one at a time. Events are buffered until the action ends, and are written in
    a single statement just before COMMIT.

    Raises :class:`TransactionClosed` if it is used after the action has ended, :class:`ConcurrentUse` if two tasks use
    it at the same time, and :class:`TransactionEnded` for a statement that would end the transaction.

    Example::

        async def perform(self, tx: Transaction) -> None:
            await tx.execute("UPDATE wallets SET balance = balance + $1 WHERE id = $2", self.amount, self.wallet_id)
            tx.emit(MoneyDeposited(self.wallet_id, self.amount), model_id=self.wallet_id, model_type="Wallet")
    """

    _busy = _closed = False  # class attributes, because most transactions keep these defaults
    was_joined = False
    """True if actions have joined the transaction. They may have written events."""
    is_committed = False
    """True if the COMMIT has succeeded."""
    owner: object = None
    """The outbox of the transaction, set by :func:`enter_transaction`."""
    claimed: frozenset[UUID] = frozenset()
    """The notifications that a handler's transaction has locked."""
    _unreported: list[Rows] | None = None
    """Rows that watchers are notified of after the COMMIT, in a transaction that outboxio commits later."""
    _raised: SessionEvents | None = None
    """The events that objects of the session raise; ``None`` until the session is used."""

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
        unreported: list[Rows] | None = None,
        is_reading: bool = False,
    ) -> None:
        self._session = session
        self._emitter = emitter
        self._cause = cause
        self.action_id = action.action_id
        """The id that all rows of this execution share."""
        self.action_name = action.action_name
        self.now = action.started_date
        """When the action started: naive UTC, by the clock of the shard."""
        self.shard = shard
        self.resources = resources
        """The value of ``Outbox(resources=...)``."""
        self.events: list[EventRecord] = []
        self.in_handler = in_handler
        """True for a handler's transaction: ``envelope.tx``, or an action that joined ``envelope.tx``."""
        self.is_reading = is_reading
        """True for the read-only transaction of ``outbox.connection()``."""
        if in_handler or unreported is not None:
            self._unreported = [] if unreported is None else unreported

    @property
    def connection(self) -> Any:
        """The driver's connection, in the open transaction. Do not end the transaction.

        outboxio does not see the statements that run on it, and cannot detect that the transaction was ended if a new
        one was begun afterwards. On SQLite, MySQL and MariaDB the transaction begins with the first statement, or when
        this attribute is first read, which on SQLite blocks the event loop. Raises :class:`ConcurrentUse` while a
        statement is running.
        """
        if self._closed:
            raise TransactionClosed(self.action_name)
        if self._busy:
            raise ConcurrentUse(self.action_name)
        return self._session.connection

    @property
    def session(self) -> AsyncSession:
        """The SQLAlchemy session of the transaction, if the outbox was created from an engine or a sessionmaker.

        The session is created by your sessionmaker on first use. When the action ends, its changes are flushed, then
        the events are written, and the transaction commits. If an object's version has changed in the database, the
        action fails with :class:`StaleRecord` and is retried with a new session. ``commit``, ``rollback`` and ``close``
        raise :class:`TransactionEnded`; ``begin_nested`` works. Raises :class:`ConfigurationError` for an outbox
        without an engine.

        Example::

            order = await tx.session.get_one(Order, self.order_id)
            order.state = "paid"
            tx.emit(OrderPaid(order.id, order.total), model=order)
        """
        if (unit := self._session.unit) is None:
            raise ConfigurationError(
                f"shard {self.shard!r} has no SQLAlchemy engine, so {self.action_name} has no tx.session: create the "
                "outbox from an engine, as in Outbox(create_async_engine(url), ...)"
            )
        _ = self.connection  # begins the transaction on the connection that the session will use
        session = unit.session(self.action_name)
        if self._raised is None:
            from outboxio.integrations.sessions import ActionSink, events_of

            self._raised = events_of(session.sync_session)
            self._raised.sink = ActionSink(self)
        return session

    async def flush(self) -> None:
        """Flush the session, if there is one, and collect the events that its objects have raised."""
        if self._raised is not None and (unit := self._session.unit) is not None:
            await unit.flush()
            self._raised.collect(unit.session(self.action_name).sync_session)

    def resume(self) -> None:
        """Collect the events of the session again, after a joined action has ended."""
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
        """Record an event, which is committed with the action or not at all.

        ``model_id`` and ``model_type`` identify the changed object; ``model``, an object mapped by SQLAlchemy, sets
        both, to its primary key and the name of its class. Ordered handlers process the events of one ``ordering_key``
        (default: ``model_id``) in order. With ``topic``, the handlers of that topic get the event too. Handlers do not
        run before ``available_at`` (naive UTC, or aware). Raises :class:`InvalidEvent` if the event cannot be stored.
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
        """Add an event that is already encoded."""
        if self._closed:
            raise TransactionClosed(self.action_name)
        self.events.append(record)

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        """Insert the row of an inbox message unless it exists; return the stored row."""
        return await self._session.consume(consumed)

    async def consume_all(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        """Insert the rows of many inbox messages unless they exist; return the stored rows."""
        return await self._session.consume_all(consumed)

    def joined_by(self, action: ActionRecord) -> Transaction:
        """Return the same transaction for an action that joins it and keeps its events separate."""
        if self._closed:
            raise TransactionClosed(self.action_name)
        self.was_joined = True
        return Transaction(
            self._session, self._emitter, action, shard=self.shard, resources=self.resources, cause=self._cause,
            in_handler=self.in_handler, unreported=self._unreported,
        )  # fmt: skip

    async def write(self, record: ActionRecord, events: Sequence[EventRecord]) -> None:
        """Write the rows of an action. Raises :class:`TransactionEnded` if the transaction has ended."""
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
            self._notify((record, events))

    async def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> None:
        """Write the remaining rows of the action, and commit; roll back on an error.

        A cancellation during the COMMIT is re-raised when its result is known. Raises :class:`CommitUnknown` if the
        connection is lost before that.
        """
        session = self._session
        ending = asyncio.ensure_future(session.commit(action, events))
        cancelled = await wait_done(ending, session.discard)
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
                    self._notify_after_commit(action, events)
        if cancelled is not None:
            raise cancelled

    def _notify(self, rows: Rows) -> None:
        if self._unreported is None:
            notify_watchers(*rows)
        else:
            self._unreported.append(rows)

    def _notify_after_commit(self, action: ActionRecord | None, events: Sequence[EventRecord]) -> None:
        for rows in self._unreported or ():
            notify_watchers(*rows)
        if action is not None:
            notify_watchers(action, events)

    async def _committed(self, ending: asyncio.Future[None]) -> None:
        """Process the result of a finished COMMIT."""
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
                await run_to_completion(roll_back(session))
            raise
        self.is_committed = True

    async def execute(self, sql: str, *args: Any) -> int:
        """Run a statement, and return the number of affected rows."""
        return await self._alone(self._session.execute, sql, args)

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run a statement, and return all rows. Columns are accessible by index and by name."""
        return await self._alone(self._session.fetch, sql, args)

    async def fetchrow(self, sql: str, *args: Any) -> Any | None:
        """Run a statement, and return the first row, or ``None``."""
        return await self._alone(self._session.fetchrow, sql, args)

    async def fetchval(self, sql: str, *args: Any) -> Any:
        """Run a statement, and return the first column of the first row, or ``None``."""
        row = await self._alone(self._session.fetchrow, sql, args)
        return None if row is None else row[0]

    async def expect_one(
        self, sql: str, *args: Any, model_type: str, model_id: object = None, version: object = None
    ) -> None:
        """Run a statement that must affect exactly one row; otherwise raise :class:`StaleRecord`, which is retried.

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
        """Refuse all further use. Raises :class:`ConcurrentUse` if a statement is still running."""
        self._closed = True
        if self._busy:
            raise ConcurrentUse(self.action_name)

    def abandon(self) -> None:
        """Refuse all further use after a failure."""
        self._closed = True

    async def _alone(self, run: Callable[[str, Sequence[Any]], Awaitable[T]], sql: str, args: Sequence[Any]) -> T:
        if self._closed:
            raise TransactionClosed(self.action_name)
        if self._busy:
            raise ConcurrentUse(self.action_name)
        if (statement := self._session.would_end(sql)) is not None:
            raise TransactionEnded(self.action_name, statement)
        # Outside of a transaction the statement would be committed immediately, without events.
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
        """Raise :class:`TransactionEnded`, which names ``statement`` as the cause, unless the transaction is open."""
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
    """Return an ``asynccontextmanager`` that raises a clear error if it is used before ``async with``."""

    @wraps(function)
    def open(*args: P.args, **options: P.kwargs) -> _Unopened:
        return _Unopened(function, args, options)

    return open


_Around = tuple[Transaction, "_Around | None"]
open_transaction: ContextVar[_Around | None] = ContextVar("outboxio_open_transaction", default=None)
"""The innermost open transaction around this code, with the transactions around it."""


def enter_transaction(tx: Transaction, owner: object) -> Token[_Around | None]:
    """Make ``tx`` the innermost open transaction of this context, until :func:`leave_transaction`."""
    tx.owner = owner
    return open_transaction.set((tx, open_transaction.get()))


def leave_transaction(token: Token[_Around | None]) -> None:
    """Restore the context from before :func:`enter_transaction`."""
    open_transaction.reset(token)


def enclosing_transactions() -> Iterable[Transaction]:
    """Return the open transactions around this call, of any outbox, the innermost first."""
    around = open_transaction.get()
    return () if around is None else _open_ones(around)


def _open_ones(innermost: _Around) -> Iterator[Transaction]:
    around: _Around | None = innermost
    while around is not None:
        tx, around = around
        if not tx.is_closed:
            yield tx


async def write_received(tx: Transaction, received: Sequence[ReceivedEvent], *, commits: bool) -> None:
    """Write the events of inbox messages. Raises :class:`TransactionEnded` if the transaction has ended.

    ``commits``: outboxio commits the transaction, and notifies watchers of the events after the COMMIT.
    """
    tx.require_open("a statement on tx.connection")
    tx.was_joined = True  # so that fan-out is woken, as for events of other actions
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
    if commits and tx._unreported is None:
        tx._unreported = []
    for record, event in marked if watchers else ():
        tx._notify((record, [event]))


async def roll_back(session: Session) -> None:
    """Roll back. If the ROLLBACK fails, the connection is discarded, and the failure is logged but not raised."""
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT):
            await session.rollback()
    except Exception as error:
        logger.warning("ROLLBACK failed: %s; discarding the connection", error)
        session.discard()
