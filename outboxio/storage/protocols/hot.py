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
    """The SQLAlchemy session of a transaction, if the database is a user-supplied engine."""

    def session(self, action_name: str) -> AsyncSession:
        """Return the session, which is created by the first call. Its error on commit() names the action."""
        ...

    async def flush(self) -> None:
        """Flush the session, if there is one."""
        ...


class Session(Protocol):
    """A connection that is checked out for a single transaction of your application."""

    @property
    def unit(self) -> SessionUnit | None:
        """The unit of work of the transaction; ``None`` unless the database is a user-supplied engine."""
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
        """Begin a read-only transaction, which :meth:`rollback` ends."""
        ...

    def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> Awaitable[None]:
        """Write the rows of the action, if there are events, and commit, in as few round trips as possible.

        Raises :class:`CommitLost` if the result of COMMIT is unknown, and :class:`TransactionLost` if the transaction
        had already ended.
        """
        ...

    async def rollback(self) -> None: ...

    def discard(self) -> None:
        """Close the connection immediately, because its state is unknown."""
        ...

    def in_transaction(self) -> bool:
        """Return True if a transaction is open. SQL of your application may have ended it."""
        ...

    def would_end(self, sql: str) -> str | None:
        """Return the keywords of the first statement in ``sql`` that ends the transaction, or ``None``."""
        ...

    async def execute(self, sql: str, args: Sequence[Any]) -> int:
        """Run a statement; return the number of affected rows."""
        ...

    async def fetch(self, sql: str, args: Sequence[Any]) -> list[Any]: ...

    async def fetchrow(self, sql: str, args: Sequence[Any]) -> Any | None: ...

    async def claim(self, ids: Sequence[UUID], states: Sequence[str]) -> dict[UUID, str]:
        """Lock notifications until the transaction ends; return their errors as JSON text, by id.

        Rows in other states than ``states``, and rows locked by another transaction, are left out.
        """
        ...

    async def finish(self, ids: Sequence[UUID], state: str, attempts: int, now: datetime) -> None:
        """Write the outcome of claimed notifications, which commits with the transaction."""
        ...

    async def insert_notifications(self, event_id: UUID, owed: Sequence[NewNotification], now: datetime) -> None:
        """Write notifications of an event of this transaction, and mark the event delivered."""
        ...

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        """Record that an inbox message was received, unless a row exists; return the row."""
        ...

    async def consume_all(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        """Record many inbox messages with a single statement, except existing rows; return the rows.

        ``consumed`` is sorted by primary key. Of equal keys the first is written.
        """
        ...

    async def consumed(self, source: str, external_id: str, handler_names: Sequence[str]) -> list[ConsumeResult]:
        """Return the rows of ``consumed_events`` with this external id and one of the handler names."""
        ...

    async def insert_received(self, received: Sequence[ReceivedEvent]) -> None:
        """Write the events of inbox messages in order, with a single statement unless the rows are very large.

        Raises :class:`TransactionLost` if the transaction had already ended.
        """
        ...

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        """Write the rows of an action in a single statement.

        Raises :class:`TransactionLost` if the transaction had already ended.
        """
        ...


class FanoutStore(Protocol):
    """Turns events into notifications."""

    async def fan_out(self, request: FanoutRequest) -> FanoutResult:
        """Write the notifications of undelivered events, and mark the events delivered, in a single transaction.

        Keys of ordered handlers advance together: if a key reaches its limit, no other key advances beyond the last
        event of that key. So a later event of an ordering key never becomes due before an earlier event of a different
        type. A key counts as full if it has remaining events for this reason.
        """
        ...

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        """Return True if an undelivered event waits for a live subscription."""
        ...


class DispatchStore(Protocol):
    """Finds notifications for the dispatcher, and writes their outcomes."""

    @property
    def can_settle(self) -> bool:
        """True if the connection for outcomes is open. Runs start only while outcomes can be written."""
        ...

    async def find_due(self, namespace: str, now: datetime, queries: Sequence[DueQuery]) -> Sequence[Notification]:
        """Return due rows in order: for each query up to ``limit`` rows after its scan position."""
        ...

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        """Write a bucket of outcomes in a single autocommit statement; return how many were written.

        An outcome is rejected if its term is over (decision 3), or if the row is in a final state.
        """
        ...

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        """Write a bucket of outcomes and ``bucket.emitted`` in one transaction: all outcomes or none."""
        ...


class OrderingRepository(Protocol):
    """Rows of ``event_notifications`` that wait for another row.

    The key queue of an ordering key holds the unfinished rows of an ordered handler with this key, under the handler's
    name and aliases. The head is the row with the lowest sequence; all others wait for it. A DEAD or EXPIRED row that
    parks the key stays in the queue. Waiting rows are BLOCKED, which keeps them out of the index of due rows.

    Only the process with the handler's dispatch lock blocks and unblocks rows. A superfluous block or unblock is
    harmless, because admission checks the key queue before every start, not only the state of the row.
    """

    async def find_heads(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool
    ) -> dict[str, Head]:
        """Return the head of each key that has rows, over all names. ``parks``: DEAD and EXPIRED rows count."""
        ...

    async def find_queues(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, *, parks: bool
    ) -> dict[str, list[UUID]]:
        """Return the first ``limit`` rows of each key queue, over all names, starting at the head."""
        ...

    async def heads_after(
        self, namespace: str, name: str, after: str | None, limit: int, *, parks: bool
    ) -> dict[str, Head]:
        """Return the heads of the next ``limit`` keys of a name after the key ``after``, by key.

        ``after`` is ``None`` for the first keys.
        """
        ...

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        """Make PENDING and FAILED rows BLOCKED; return the number of rows. The ids are sorted: the order of locking."""
        ...

    async def unblock(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, now: datetime
    ) -> int:
        """Make the first ``limit`` BLOCKED rows of each key PENDING; return their number. Retention starts now."""
        ...

    async def find_preceded(self, ids: Sequence[UUID]) -> set[UUID]:
        """Return the ids of rows that a PENDING or BLOCKED row of the same event with a lower priority precedes."""
        ...

    async def find_blocked(
        self, namespace: str, names: Sequence[str], after: int, limit: int
    ) -> list[tuple[int, UUID]]:
        """Return BLOCKED rows without an ordering key after a sequence: sequence and event id, by sequence."""
        ...

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        """Make BLOCKED rows of the events PENDING unless another row precedes them; return the number of rows.

        Retention starts now.
        """
        ...

    async def find_undelivered(
        self, namespace: str, key: str, before: int, limit: int, *, is_topic: bool
    ) -> list[tuple[int, str | None]]:
        """Return the first events of a type or topic that wait for fan-out: sequence and ordering key, by sequence.

        ``before``: only events with a lower sequence.
        """
        ...

    async def postpone(self, ids: Sequence[UUID], until: datetime, now: datetime) -> int:
        """Make PENDING rows due at ``until``, when their retention starts; return the number of rows.

        The ids are sorted: the order of locking.
        """
        ...


class ClusterLock(Protocol):
    """Exclusivity across processes: named locks that are held as long as a session of this process lives.

    The same session receives wake-ups from other processes (decision 4).
    """

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        """Try to acquire each lock once; return the locks that this process now holds."""
        ...

    async def try_probe(self, name: LockName) -> bool:
        """Try to acquire a lock without a lease until :meth:`close`. Returns False if two shards share a database."""
        ...

    async def heartbeat(self) -> Proof:
        """Prove that the session is alive. Raises an error if it has ended."""
        ...

    @property
    def proof(self) -> Proof | None:
        """The last proof of a thread that makes proofs itself; ``None`` without a thread or a session."""
        ...

    async def release(self, names: Sequence[LockName]) -> None:
        """Release locks, and write ``released_term`` in the leases."""
        ...

    async def listen(self, on_wake: Callable[[str], None]) -> None:
        """Open the session if needed. Call ``on_wake`` with each wake-up from another process."""
        ...

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` as soon as the session is found to have ended."""
        ...

    async def close(self) -> None: ...


# --- keyed locks of your application: the sessions that hold them ----------------------------------


class KeySession(Protocol):
    """A session that holds keyed locks as long as it lives. It is opened once.

    A failed or interrupted call drops the session and with it all of its locks, because the server may have granted a
    lock before the failure.
    """

    @property
    def is_open(self) -> bool: ...

    @property
    def waits(self) -> bool:
        """True if :meth:`take` can wait on the server, in the order of the calls."""
        ...

    @property
    def longest_silence(self) -> float:
        """The seconds after which the server ends an inactive session."""
        ...

    async def open(self) -> None:
        """Open the session. Raises :class:`DatabaseUnavailable`."""
        ...

    async def take(self, name: LockName, seconds: int) -> bool:
        """Acquire a lock, and wait up to ``seconds`` on the server; return False if it was not free.

        If the dialect has a queue of processes, the caller then stays in it until :meth:`leave`.
        """
        ...

    async def leave(self, name: LockName) -> None:
        """Release a lock, or leave the queue of processes that wait for it."""
        ...

    async def raise_term(self, lease: str) -> int:
        """Increment the fencing term in a row of ``leases``, and return it.

        The statement runs on this session, so its result proves that the session held its locks.
        """
        ...

    async def prove(self) -> None:
        """Raise an error if the session, and so its locks, are lost."""
        ...

    def drop(self) -> None:
        """Close the session immediately. The server releases the locks."""
        ...

    async def close(self) -> None:
        """Close the session cleanly, or return a dropped connection to its pool."""
        ...
