"""What an action works with: the caller's SQL, and ``emit``."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from outboxio.emission import Cause, Emitter
from outboxio.errors import CommitUnknown, ConcurrentUse, StaleRecord, TransactionClosed, TransactionEnded
from outboxio.event import ActionRecord, Event, EventRecord
from outboxio.storage.protocols import CommitLost, Consumed, Session, TransactionLost
from outboxio.waiting import over, to_the_end

# Only what ends or replaces the transaction; a savepoint and ROLLBACK TO one are the user's to use.
# Atomic groups: each comment is passed over in one way only, or many of them would take for ever.
_ENDS_TRANSACTION = re.compile(
    r"(?>\s+|;|--[^\n]*\n|/\*.*?\*/)*+"
    r"(COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|ROLLBACK(?!(?:\s+(?:WORK|TRANSACTION))?\s+TO\b))"
    r"\b",
    re.IGNORECASE | re.DOTALL,
)


T = TypeVar("T")

logger = logging.getLogger(__name__)

ROLLBACK_TIMEOUT = 10.0  # seconds; a connection that answers no longer is discarded instead


class Transaction:
    """One action's open transaction: run SQL on it, and emit what happened.

    SQL is the driver's own and is not rewritten: ``$1`` on PostgreSQL, ``%s`` on MySQL and MariaDB, ``?`` (or ``$1``)
    on SQLite. One statement runs at a time. Events are kept until the action ends, and are written in one statement
    just before COMMIT.

    Use after the action ended raises :class:`TransactionClosed`, use by two tasks at once :class:`ConcurrentUse`,
    and a statement that would end the transaction :class:`TransactionEnded`.

    Example::

        async def perform(self, tx: Transaction) -> None:
            await tx.execute("UPDATE wallets SET balance = balance + $1 WHERE id = $2", self.amount, self.wallet_id)
            tx.emit(MoneyDeposited(self.wallet_id, self.amount), model_id=self.wallet_id, model_type="Wallet")
    """

    def __init__(
        self,
        session: Session,
        emitter: Emitter,
        *,
        action_id: UUID,
        action_name: str,
        now: datetime,
        shard: str,
        resources: Any,
        cause: Cause | None,
        in_handler: bool = False,
    ) -> None:
        self._session = session
        self._emitter = emitter
        self._cause = cause
        self._busy = False
        self._closed = False
        self.action_id = action_id
        """The id that all rows of this execution share."""
        self.action_name = action_name
        self.now = now
        """When the action began: naive UTC, by the clock of the shard."""
        self.shard = shard
        self.resources = resources
        """What the application gave as ``Outbox(resources=...)``."""
        self.events: list[EventRecord] = []
        self.in_handler = in_handler
        """Whether it is a handler's: ``envelope.tx``, or an action that joined it."""
        self.has_parts = False
        """Whether actions have joined it, which may have written events of their own."""
        self.is_committed = False
        """Whether the rows of the action, and its events, are in the database for good."""

    @property
    def connection(self) -> Any:
        """The driver's own connection, with the transaction open on it. Do not end that transaction.

        On SQLite, MySQL and MariaDB the transaction begins with its first statement, or with this, which on SQLite
        blocks the event loop meanwhile. Raises :class:`ConcurrentUse` while a statement runs.
        """
        if self._closed:
            raise TransactionClosed(self.action_name)
        if self._busy:
            raise ConcurrentUse(self.action_name)
        return self._session.connection

    def emit(
        self,
        event: Event,
        *,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
    ) -> None:
        """Record that something happened; it is committed with the action, or not at all.

        ``model_id`` and ``model_type`` say what it happened to. ``ordering_key`` (default: ``model_id``) is what
        ordered handlers keep in order. ``topic`` reaches handlers of that topic as well. ``available_at`` (naive UTC,
        or aware) delays its handlers until then. Raises :class:`InvalidEvent` for what cannot be stored.
        """
        if self._closed:
            raise TransactionClosed(self.action_name)
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
        """Take in an event that was recorded elsewhere."""
        if self._closed:
            raise TransactionClosed(self.action_name)
        self.events.append(record)

    async def consume(self, consumed: Consumed) -> Consumed:
        """Write that something was received, unless it was before; what is written now."""
        return await self._session.consume(consumed)

    def part(self, *, action_id: UUID, action_name: str, now: datetime) -> Transaction:
        """Another action's view of the same transaction: what it emits is its own."""
        if self._closed:
            raise TransactionClosed(self.action_name)
        self.has_parts = True
        return Transaction(
            self._session, self._emitter, action_id=action_id, action_name=action_name, now=now, shard=self.shard,
            resources=self.resources, cause=self._cause, in_handler=self.in_handler,
        )  # fmt: skip

    async def write(self, record: ActionRecord, events: Sequence[EventRecord]) -> None:
        """Write the rows of one action; :class:`TransactionEnded` if the transaction is not there any more."""
        self.require_open("a statement on tx.connection")
        try:
            await self._session.insert_events(record, events)
        except TransactionLost as error:
            raise TransactionEnded(record.action_name, "an earlier statement") from error.__cause__

    async def execute(self, sql: str, *args: Any) -> int:
        """Run one statement; the number of rows that it touched."""
        return await self._alone(self._session.execute, sql, args)

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run one statement; all rows. Columns are reached by index and by name."""
        return await self._alone(self._session.fetch, sql, args)

    async def fetchrow(self, sql: str, *args: Any) -> Any | None:
        """Run one statement; its first row, or ``None``."""
        return await self._alone(self._session.fetchrow, sql, args)

    async def fetchval(self, sql: str, *args: Any) -> Any:
        """Run one statement; the first column of its first row, or ``None``."""
        row = await self._alone(self._session.fetchrow, sql, args)
        return None if row is None else row[0]

    async def expect_one(
        self, sql: str, *args: Any, model_type: str, model_id: object = None, version: object = None
    ) -> None:
        """Run a statement that must touch exactly one row; otherwise raise :class:`StaleRecord`, which is retried.

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
        """Whether the action has ended."""
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
        ending = _ENDS_TRANSACTION.match(sql)
        if ending is not None:
            raise TransactionEnded(self.action_name, ending[1])
        if (words := self._session.would_commit(sql)) is not None:
            raise TransactionEnded(self.action_name, words)
        # Outside of a transaction a statement would be committed at once, and without its events.
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


open_transaction: ContextVar[tuple[object, Transaction] | None] = ContextVar("outboxio_open_transaction", default=None)
"""The transaction that is being worked in here, and the outbox that it belongs to."""


async def commit(
    session: Session, tx: Transaction, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()
) -> None:
    """Write the rows of the action, if any are left to write, and commit; or roll back.

    A cancellation meanwhile goes on only when it is known what became of it. Raises :class:`CommitUnknown` if nobody
    can know.
    """
    ending = asyncio.ensure_future(session.commit(action, events))
    cancelled = await over(ending, session.discard)
    try:
        await _committed(ending, session, tx)
    except Exception as error:
        if cancelled is not None:
            raise cancelled from error
        raise
    if cancelled is not None:
        raise cancelled


async def _committed(ending: asyncio.Future[None], session: Session, tx: Transaction) -> None:
    """What became of a COMMIT that has ended."""
    try:
        ending.result()
    except CommitLost as lost:
        session.discard()
        raise CommitUnknown(tx.action_name, tx.action_id) from lost.__cause__
    except TransactionLost as error:
        raise TransactionEnded(tx.action_name, "an earlier statement") from error.__cause__
    except BaseException:
        if session.in_transaction():
            await to_the_end(roll_back(session))
        raise
    tx.is_committed = True


async def roll_back(session: Session) -> None:
    """Roll back; a connection that cannot even do that is discarded, and must not hide why the work failed."""
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT):
            await session.rollback()
    except Exception as error:
        logger.warning("ROLLBACK failed with %r; the connection is discarded", error)
        session.discard()
