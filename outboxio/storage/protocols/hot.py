"""The protocols on the path of every action, every round of fan-out and every round of dispatch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent
from outboxio.model.lock_name import LockName
from outboxio.model.notification import DueQuery, Notification
from outboxio.model.outcome import Bucket
from outboxio.storage.connections.driver import Proof
from outboxio.storage.protocols.values import (
    ConsumeResult,
    FanoutRequest,
    FanoutResult,
    Head,
    LockGrant,
    NewNotification,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


class SessionUnit(Protocol):
    """The SQLAlchemy session of a transaction, for a database that was given as an engine."""

    def session(self, action_name: str) -> AsyncSession:
        """The session, made at the first call. The session refuses to commit in the name of the action."""
        ...

    async def flush(self) -> None:
        """Write the changes of the session, if there is a session."""
        ...


class Session(Protocol):
    """A connection, checked out for a single transaction of the application."""

    @property
    def unit(self) -> SessionUnit | None:
        """The unit of the transaction; ``None`` unless the database was given as an engine."""
        ...

    @property
    def connection(self) -> Any:
        """The driver's connection."""
        ...

    async def begin(self, *, soon: bool = False) -> None:
        """Begin a transaction.

        ``soon``: a dialect may send BEGIN together with the first statement, which saves a round trip.
        """
        ...

    async def begin_reading(self) -> None:
        """Begin a read-only transaction. :meth:`rollback` ends the transaction."""
        ...

    def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> Awaitable[None]:
        """Write the rows of the action, if events are given, and commit, in as few round trips as the database allows.

        Raises :class:`CommitLost` if the result of COMMIT is unknown, :class:`TransactionLost` if the transaction had
        ended before.
        """
        ...

    async def rollback(self) -> None: ...

    def discard(self) -> None:
        """Close the connection at once, because the state is unknown."""
        ...

    def in_transaction(self) -> bool:
        """True if a transaction is open. SQL of the application may have ended the transaction."""
        ...

    def would_end(self, sql: str) -> str | None:
        """The first words of a statement in ``sql`` that ends the transaction; ``None`` if no statement does."""
        ...

    async def execute(self, sql: str, args: Sequence[Any]) -> int:
        """Run a statement; the number of rows that the statement touched."""
        ...

    async def fetch(self, sql: str, args: Sequence[Any]) -> list[Any]: ...

    async def fetchrow(self, sql: str, args: Sequence[Any]) -> Any | None: ...

    async def claim(self, ids: Sequence[UUID], states: Sequence[str]) -> dict[UUID, str]:
        """Lock notifications until the transaction ends; the errors of each as JSON text, by id.

        Left out are rows in a state that is not in ``states``, and rows with a lock of a different transaction.
        """
        ...

    async def finish(self, ids: Sequence[UUID], state: str, attempts: int, now: datetime) -> None:
        """Write the outcome of claimed notifications. The outcome commits with the transaction."""
        ...

    async def insert_notifications(self, event_id: UUID, owed: Sequence[NewNotification], now: datetime) -> None:
        """Write notifications of an event that this transaction has written, and mark the event delivered."""
        ...

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        """Write that an inbox message was received, unless a row says so already; the row afterwards."""
        ...

    async def consume_all(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        """Write the rows of many inbox messages with a single statement, except rows that exist; the rows afterwards.

        ``consumed`` is in the order of the primary key. Of equal keys the first is written.
        """
        ...

    async def consumed(self, source: str, external_id: str, handler_names: Sequence[str]) -> list[ConsumeResult]:
        """The rows of ``consumed_events`` with the external id and a name of ``handler_names``."""
        ...

    async def insert_received(self, received: Sequence[ReceivedEvent]) -> None:
        """Write the events of inbox messages in their order, with a single statement unless the rows are very large.

        Raises :class:`TransactionLost` if the transaction had ended before.
        """
        ...

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        """Write the rows of an action in a single statement.

        Raises :class:`TransactionLost` if the transaction had ended before.
        """
        ...


class FanoutStore(Protocol):
    """Events to notifications."""

    async def fan_out(self, request: FanoutRequest) -> FanoutResult:
        """Write the notifications of undelivered events, and mark the events delivered, in a single transaction.

        Keys that ordered handlers want advance together: if a key reaches the limit, the remaining keys give no event
        after the last event of that key. So a later event of an ordering key never becomes due before an earlier event
        of a different type. A key counts as full if events were left for this reason.
        """
        ...

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        """True if an undelivered event waits for a live subscription."""
        ...


class DispatchStore(Protocol):
    """Notifications to the dispatcher, and outcomes back."""

    @property
    def can_settle(self) -> bool:
        """True if the connection for outcomes is open. A run may only start if the outcome can be written."""
        ...

    async def find_due(self, namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> Sequence[Notification]:
        """Due rows in order: for each query the rows behind the scan position, up to the limit."""
        ...

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        """Write a bucket of outcomes in a single autocommit statement; the number of outcomes that were written.

        The statement refuses an outcome if the term is over (decision 3), or if the row is terminal.
        """
        ...

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        """Write a bucket of outcomes and ``bucket.emitted`` in a transaction: the whole bucket, or no outcome."""
        ...


class OrderingRepository(Protocol):
    """Rows of ``event_notifications`` that wait for a row in front.

    The key queue of an ordering key holds the unfinished rows of an ordered handler with this key, under the handler's
    name and aliases. The head is the row with the lowest sequence, and the rest waits for the head. A DEAD or
    EXPIRED row that parks the key stays in the key queue. A waiting row is BLOCKED, which keeps it out of the due
    index.

    Only the process with the handler's dispatch lock blocks and unblocks rows. A superfluous block or unblock does no
    harm, because admission decides every start by the key queue and not by the state of the row alone.
    """

    async def find_heads(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool
    ) -> dict[str, Head]:
        """The head of each key that has rows, over all names. ``parks``: DEAD and EXPIRED rows count."""
        ...

    async def find_lines(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, *, parks: bool
    ) -> dict[str, list[UUID]]:
        """The first ``limit`` rows in the key queue of each key, over all names, in order, beginning with the head."""
        ...

    async def heads_after(
        self, namespace: str, name: str, after: str | None, limit: int, *, parks: bool
    ) -> dict[str, Head]:
        """The heads of the next ``limit`` keys of a name behind the key ``after``, in the order of the keys.

        ``after`` is ``None`` for the first keys.
        """
        ...

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        """Make PENDING and FAILED rows BLOCKED; the number of rows. The ids are in order, as rows are locked."""
        ...

    async def unblock(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, now: datetime
    ) -> int:
        """Make the first ``limit`` BLOCKED rows of each key PENDING; the number of rows. The retention starts now."""
        ...

    async def find_preceded(self, ids: Sequence[UUID]) -> set[UUID]:
        """The ids of rows that a PENDING or BLOCKED row of lower priority and of the same event precedes."""
        ...

    async def find_blocked(
        self, namespace: str, names: Sequence[str], after: int, limit: int
    ) -> list[tuple[int, UUID]]:
        """BLOCKED rows without an ordering key behind a sequence: sequence and event id, in order of the sequence."""
        ...

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        """Make BLOCKED rows of the events PENDING if no row of lower priority precedes; the number of rows.

        The retention starts now.
        """
        ...

    async def find_undelivered(
        self, namespace: str, wanted: str, before: int, limit: int, *, is_topic: bool
    ) -> list[tuple[int, str | None]]:
        """The first events of a type, or on a topic, that wait for fan-out: sequence and ordering key, in order.

        ``before``: only events of a lower sequence.
        """
        ...

    async def postpone(self, ids: Sequence[UUID], until: datetime, now: datetime) -> int:
        """Make PENDING rows due at ``until``; the number of rows. The retention starts at ``until``.

        The ids are in order, as rows are locked.
        """
        ...


class ClusterLock(Protocol):
    """Exclusivity across processes: named locks that last as long as a session of this process.

    The same session receives the wake-ups from outside (decision 4).
    """

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        """Try each name once; the locks that were free, which this process now holds."""
        ...

    async def try_probe(self, name: LockName) -> bool:
        """Try a lock that has no lease, until :meth:`close`. False shows that two shards share a database."""
        ...

    async def heartbeat(self) -> Proof:
        """Prove that the session lives. Raises if the session has ended."""
        ...

    @property
    def proof(self) -> Proof | None:
        """The last proof, if a thread makes proofs by itself; ``None`` without a thread or without a session."""
        ...

    async def release(self, names: Sequence[LockName]) -> None:
        """Give locks back, and write ``released_term`` in the leases."""
        ...

    async def listen(self, heard: Callable[[str], None]) -> None:
        """Open the session if needed. Call ``heard`` with each wake-up from outside."""
        ...

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` as soon as the session is known to have ended."""
        ...

    async def close(self) -> None: ...


# --- keyed locks of the application: the sessions that hold the locks -----------------------------


class KeySession(Protocol):
    """A session that holds keyed locks. The locks last as long as the session, which is opened once.

    A failed or interrupted call drops the session, because the server may have given a lock of which this process does
    not know. All locks of the session end with the session.
    """

    @property
    def is_open(self) -> bool: ...

    @property
    def waits(self) -> bool:
        """True if :meth:`take` can wait on the server, in the order in which the calls come."""
        ...

    @property
    def longest_silence(self) -> float:
        """The seconds after which the server ends a silent session."""
        ...

    async def open(self) -> None:
        """Open the session. Raises :class:`DatabaseUnavailable`."""
        ...

    async def take(self, name: LockName, seconds: int) -> bool:
        """Take a lock, and wait up to ``seconds`` on the server; False if the lock was not free.

        A refused caller has a place in the line of processes, if the dialect has a line, until :meth:`leave`.
        """
        ...

    async def leave(self, name: LockName) -> None:
        """Release a lock, or leave the line of processes that wait for the lock."""
        ...

    async def raise_term(self, lease: str) -> int:
        """Raise the fencing term in a row of ``leases``, and return the term.

        The statement runs on this session, so the answer proves that the session held its locks.
        """
        ...

    async def prove(self) -> None:
        """Raise an error if the session, and so its locks, are lost."""
        ...

    def drop(self) -> None:
        """Close the session at once. The server releases the locks."""
        ...

    async def close(self) -> None:
        """Close the session with a goodbye to the server, or give a dropped connection back to its pool."""
        ...
