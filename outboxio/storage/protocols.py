"""The seam: what the flow asks of a database, and what every dialect answers in the same way.

Repositories turn rows into values and back. ``insert_events`` works inside a transaction that is already open;
everything else is a short transaction or one autocommit statement of its own, on a connection that the loops do not
share with the application's actions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from msgspec import Struct

from outboxio.event import ActionRecord, EventRecord
from outboxio.handover import Handover
from outboxio.names import LockName
from outboxio.notification import Notification, NotificationRecord, Wanted
from outboxio.outcome import Bucket
from outboxio.subscription import Subscription

#: Heartbeats after which a session that has the locks is ended by its server, and is not trusted any more, if it was
#: silent for so long. The rest of two is for the standby.
LONGEST_SILENCE = 1.8


class CommitLost(Exception):
    """The connection was lost while COMMIT was under way; nobody knows yet whether it took effect."""


class TransactionLost(Exception):
    """The transaction had ended before its events were written: a statement in it ended it, or a deadlock did."""


class FannedOut(Struct, frozen=True):
    """What one round of fan-out did.

    Its keys are event types, and topics as ``#topic``. ``events``: how many of each were marked delivered; ``full``:
    those that filled their room, so that there is probably more. ``reached``: the highest sequence of each, where the
    dialect says so. ``looked_at``: the only keys that were looked at, where a dialect knew better than to look at all.
    """

    events: Mapping[str, int]
    full: frozenset[str]
    notifications: int
    reached: Mapping[str, int] = {}
    looked_at: frozenset[str] | None = None


class Consumed(Struct, frozen=True):
    """One row of ``consumed_events``: what came from outside, and who has it."""

    source: str
    external_id: str
    handler_name: str
    event_id: UUID
    payload_hash: str
    consumed_date: datetime


class Owed(Struct, frozen=True, kw_only=True):
    """One notification as it is made outside of fan-out; the rest of its columns are the event's."""

    id: UUID
    handler_name: str
    state: str
    attempts: int
    next_retry_at: datetime
    errors: str
    """A JSON array."""
    ordering_key: str | None
    priority: int


class Head(Struct, frozen=True):
    """The first row in line of an ordering key."""

    id: UUID
    state: str


class Purged(Struct, frozen=True):
    """What one batch of removing did.

    ``position`` is the id of the last row that was looked at; ``None`` at the end, which is also where a whole batch
    was too young: ids grow with time.
    """

    removed: int
    position: UUID | None


class Pause(Struct, frozen=True):
    """A handler that an operator paused. ``ended_date``: when it was unpaused; ``None`` while it lasts."""

    handler_name: str
    ended_date: datetime | None


class Acquired(Struct, frozen=True):
    """One lock that is ours now, under a new term. ``released_term``: the last one that was given back."""

    term: int
    released_term: int

    @property
    def follows_crash(self) -> bool:
        """Whether the former holder did not give it back: it died, or lost its session."""
        return self.released_term < self.term - 1


class StartedRun(Struct, frozen=True):
    """One run that was recorded before it began. ``starts``: how often, without one that came to an end."""

    notification_id: UUID
    handler_name: str
    starts: int


class Session(Protocol):
    """One connection, checked out for one transaction of the application."""

    @property
    def connection(self) -> Any:
        """The driver's own connection."""
        ...

    async def begin(self, *, soon: bool = False) -> None:
        """Begin a transaction. ``soon``: together with what is done in it first, where that saves a way."""
        ...

    def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> Awaitable[None]:
        """Write the rows of an action, if there are any, and commit, in as few ways as the database allows.

        Raises :class:`CommitLost` if nobody can know whether it took effect, :class:`TransactionLost` if there was no
        transaction.
        """
        ...

    async def rollback(self) -> None: ...

    def discard(self) -> None:
        """Never use this connection again: nobody knows in which state it is."""
        ...

    def in_transaction(self) -> bool:
        """Whether a transaction is still open: the user's SQL may have ended it."""
        ...

    def would_commit(self, sql: str) -> str | None:
        """The first words of a statement that commits by itself what was written before it, if it is one."""
        ...

    async def execute(self, sql: str, args: Sequence[Any]) -> int:
        """Run a statement; how many rows it touched."""
        ...

    async def fetch(self, sql: str, args: Sequence[Any]) -> list[Any]: ...

    async def fetchrow(self, sql: str, args: Sequence[Any]) -> Any | None: ...

    async def claim(self, ids: Sequence[UUID], states: Sequence[str]) -> dict[UUID, str]:
        """Lock notifications until the transaction ends; their errors, as JSON text, by id.

        Those that are in none of these states by now, or that somebody else has locked, are left out.
        """
        ...

    async def finish(self, ids: Sequence[UUID], state: str, attempts: int, now: datetime) -> None:
        """Write one outcome of claimed notifications, to be committed with everything else."""
        ...

    async def owe(self, event_id: UUID, owed: Sequence[Owed], now: datetime) -> None:
        """Make notifications of an event that this transaction has written, and mark it delivered."""
        ...

    async def consume(self, consumed: Consumed) -> Consumed:
        """Write that something was received, unless it was before: what the row says now, and says first."""
        ...

    async def consumed(self, source: str, external_id: str, handler_names: Sequence[str]) -> list[Consumed]:
        """What was written of an id by any of these names."""
        ...

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        """Write the rows of one action, in one statement. :class:`TransactionLost` if there is no transaction."""
        ...


class EventRepository(Protocol):
    """The ``events`` table, as fan-out and inspection see it."""

    async def fan_out(
        self,
        namespace: str,
        now: datetime,
        seen_since: datetime,
        rooms: Mapping[str, int],
        batch_size: int,
        after: Mapping[str, int] | None = None,
        *,
        expected: bool = False,
        committed: Sequence[EventRecord] = (),
        handover: Handover | None = None,
    ) -> FannedOut:
        """Make the notifications of undelivered events, and mark these delivered, in one transaction.

        ``rooms``: how many events of each key to take at most; keys not named there share one ``batch_size``.
        ``after``: the sequence behind which to look, of keys that were read so far. A dialect may pass it over, and
        does for keys that ordered handlers want, for which an event that was committed late may not be overtaken.
        ``expected``: this process has just committed some, so that to look whether there are any is one look too many.
        ``committed``: which, if that is known and they are few. A dialect may pass it over.
        ``handover``: who takes rows that are due at once, as soon as they are written. A dialect may pass it over.
        Subscriptions count that were seen after ``seen_since``.

        Keys that ordered handlers want advance together: of these keys none is taken beyond the last event of one that
        filled its room, so that no later event of an ordering key is made due before an earlier one of another type.
        A key of which that left something counts as full, unless it left all of it: then it needs no room by now.
        """
        ...

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        """Whether an undelivered event waits that a live subscription wants."""
        ...

    async def count_undelivered(self, namespace: str) -> int: ...

    async def payloads(self, namespace: str, types: Sequence[str]) -> list[str]:
        """The payloads of events of these types, in the order of their sequence."""
        ...

    async def backfill(
        self, namespace: str, handler_name: str, types: Sequence[str], since: datetime, now: datetime
    ) -> int:
        """Make notifications for one handler from delivered events; how many."""
        ...


class NotificationRepository(Protocol):
    """The ``event_notifications`` table."""

    @property
    def can_settle(self) -> bool:
        """Whether the connection for outcomes is open: what is started must be settled."""
        ...

    async def find_due(self, namespace: str, now: datetime, wanted: Sequence[Wanted]) -> Sequence[Notification]:
        """Due rows for each wanted handler name, in order, behind its cursor, up to its limit."""
        ...

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        """Write one bucket of outcomes in one autocommit statement that requires the newest terms; how many it took.

        The rest was refused: its term is over, or its row is already terminal.
        """
        ...

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        """The same, in one transaction with ``bucket.emitted``; all of the bucket, or nothing."""
        ...

    async def any_due(self, namespace: str, now: datetime, names: Sequence[str]) -> bool: ...

    async def count_states(self, namespace: str) -> dict[str, int]: ...

    async def unfinished_names(self, namespace: str) -> list[str]:
        """The handler names that have unfinished rows, BLOCKED ones included, without reading these."""
        ...

    async def count_unfinished(self, namespace: str, names: Sequence[str]) -> int: ...

    async def expire(self, namespace: str, names: Sequence[str], before: datetime, now: datetime, limit: int) -> int:
        """End unfinished rows of these names whose retention began before ``before``; how many.

        Each by its own retention, BLOCKED or not, but none that is DYING. At most ``limit`` at once.
        """
        ...

    async def select(
        self, namespace: str, state: str | None, handler_name: str | None, event_type: str | None, limit: int
    ) -> list[NotificationRecord]: ...

    async def select_by_id(self, namespace: str, ids: Sequence[UUID]) -> list[NotificationRecord]:
        """These notifications, or those of these events: an id may be of either."""
        ...

    async def retry(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int: ...

    async def skip(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int: ...

    async def resume(self, namespace: str, names: Sequence[str], ordering_key: str, now: datetime) -> int:
        """Skip the DEAD and EXPIRED rows of a key, which park it; how many."""
        ...

    async def replay(
        self,
        namespace: str,
        names: Sequence[str],
        since: datetime,
        until: datetime,
        types: Sequence[str],
        states: Sequence[str],
        now: datetime,
    ) -> int:
        """Make finished rows of these names due again, by event date (``since <= date < until``), as a retry does.

        ``types``: no other event types; empty for all. In pieces, each a transaction of its own.
        """
        ...


class LineRepository(Protocol):
    """Rows of ``event_notifications`` that wait for one another.

    In line are the unfinished rows of one ordering key of an ordered handler, under its name and its aliases; a line's
    head is the one of the lowest sequence, and the others wait for it. A DEAD or EXPIRED row is in line as well where
    it parks its key. A row that waits is BLOCKED, which keeps it out of the due index. Only whoever holds the
    handler's dispatch lock blocks and unblocks; both may be done too often, for no row is started on the word of its
    state alone.
    """

    async def find_heads(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool
    ) -> dict[str, Head]:
        """The head of each key that has one, over all names. ``parks``: whether DEAD and EXPIRED rows count."""
        ...

    async def heads_after(
        self, namespace: str, name: str, after: str | None, limit: int, *, parks: bool
    ) -> dict[str, Head]:
        """The heads of the next keys behind ``after`` (``None``: from the first) under one name, by key in order."""
        ...

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        """Make PENDING and FAILED rows BLOCKED; how many."""
        ...

    async def unblock(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, now: datetime
    ) -> int:
        """Make the first ``limit`` BLOCKED rows of each key PENDING; how many. Their retention begins now."""
        ...

    async def find_preceded(self, ids: Sequence[UUID]) -> set[UUID]:
        """Those of these rows for whose event a row of lower priority is PENDING or BLOCKED."""
        ...

    async def find_blocked(
        self, namespace: str, names: Sequence[str], after: int, limit: int
    ) -> list[tuple[int, UUID]]:
        """BLOCKED rows without an ordering key behind a sequence: sequence and event id, in order of the sequence."""
        ...

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        """Make those BLOCKED rows of these events PENDING that are preceded no more; how many.

        Their retention begins now.
        """
        ...

    async def postpone(self, ids: Sequence[UUID], until: datetime, now: datetime) -> int:
        """Make PENDING rows due at ``until``, from when on their retention counts as well; how many."""
        ...


class StartRepository(Protocol):
    """The ``started_runs`` table: runs with which their process may die. Nothing is written unless one has died."""

    async def record(self, namespace: str, runs: Sequence[StartedRun], now: datetime) -> None:
        """Write that these runs begin; what was written of them before is replaced."""
        ...

    async def find(self, namespace: str, names: Sequence[str]) -> list[StartedRun]:
        """The recorded runs of these handler names that never ended.

        Not those of rows that are finished, or were written after the run was recorded: those runs came to an end, or
        an operator had the row begin anew.
        """
        ...

    async def remove(self, ids: Sequence[UUID]) -> int:
        """Remove the records of runs that have ended; how many."""
        ...

    async def remove_ended(self, namespace: str) -> int:
        """Remove all records that :meth:`find` would leave out; how many."""
        ...


class RetentionRepository(Protocol):
    """Removing what was kept long enough, in small batches, along an index or the primary key."""

    async def purge_notifications(
        self, namespace: str, position: UUID, finished_before: datetime, dead_before: datetime, limit: int
    ) -> Purged:
        """Look at up to ``limit`` rows behind ``position``, by id, and remove those that ended long enough ago.

        SUCCEEDED, EXPIRED and SKIPPED rows that were last updated before ``finished_before``, DEAD ones before
        ``dead_before``; never one that parks a key in which rows are BLOCKED, and none of another namespace.
        """
        ...

    async def purge_events(self, namespace: str, position: UUID, before: datetime, limit: int) -> Purged:
        """Look at up to ``limit`` events behind ``position``, by id, and remove settled ones older than ``before``.

        By ``event_date``. Settled are sentinels, and delivered events of which no notification is unfinished.
        """
        ...

    async def purge_consumed(self, before: datetime, limit: int) -> int:
        """Remove up to ``limit`` rows of ``consumed_events`` older than ``before``; how many."""
        ...


class SubscriptionRepository(Protocol):
    """The ``subscriptions`` table."""

    async def announce(self, namespace: str, subscriptions: Sequence[Subscription], now: datetime) -> None:
        """Write what this instance's handlers are subscribed to, and that they were seen now."""
        ...

    async def routable_names(self, namespace: str, seen_since: datetime) -> set[str]:
        """The names, aliases included, of all handlers that some instance has."""
        ...

    async def names_of(self, namespace: str, handler_name: str) -> set[str]:
        """The name itself, and all aliases that were ever announced with it."""
        ...

    async def pause(self, namespace: str, handler_name: str, now: datetime) -> None:
        """Write that a handler is paused; nothing changes if it is."""
        ...

    async def unpause(self, namespace: str, handler_name: str, now: datetime) -> int:
        """Write that its pause has ended; how many pauses that were: 1, or 0 if it was not paused."""
        ...

    async def pauses(self, namespace: str) -> list[Pause]:
        """All pauses, those that are over included: rows that waited then count their retention from their end."""
        ...

    async def forget(self, namespace: str, handler_name: str) -> int: ...


class ClusterLock(Protocol):
    """Exclusivity across processes: named locks that last as long as one session of ours.

    The same session hears the wake-ups of other processes.
    """

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, Acquired]:
        """Try each name once; those that were free are ours now."""
        ...

    async def try_probe(self, name: LockName) -> bool:
        """Try a lock that has no lease, held until :meth:`close`: whether two shards are one database."""
        ...

    async def heartbeat(self) -> datetime:
        """Prove that the session lives; the database's clock. Raises if it does not."""
        ...

    async def release(self, names: Sequence[LockName]) -> None:
        """Give locks back, and write in their leases that they were given back."""
        ...

    async def listen(self, heard: Callable[[str], None]) -> None:
        """Call ``heard`` with each wake-up that another process sends."""
        ...

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` as soon as the session is known to have ended."""
        ...

    async def close(self) -> None: ...


class Schema(Protocol):
    """The tables: bringing them up to date, and saying what is missing."""

    async def migrate(self) -> list[str]:
        """Apply the files that are not applied yet; their names."""
        ...

    async def check(self) -> None:
        """Raise :class:`SchemaMissing` or :class:`SchemaNewer` unless all is there."""
        ...


class Database(Protocol):
    """One shard's database: owns its connections, and closes what it opened."""

    @property
    def name(self) -> str:
        """The name of the shard."""
        ...

    @property
    def dialect(self) -> str: ...

    @property
    def stores_nul(self) -> bool:
        """Whether JSON strings may hold NUL."""
        ...

    @property
    def wakes_across_processes(self) -> bool:
        """Whether ``notify`` reaches other processes."""
        ...

    @property
    def events(self) -> EventRepository: ...

    @property
    def notifications(self) -> NotificationRepository: ...

    @property
    def lines(self) -> LineRepository: ...

    @property
    def starts(self) -> StartRepository: ...

    @property
    def retention(self) -> RetentionRepository: ...

    @property
    def subscriptions(self) -> SubscriptionRepository: ...

    @property
    def schema(self) -> Schema: ...

    def session(self) -> AbstractAsyncContextManager[Session]:
        """A connection for one transaction of the application."""
        ...

    def wrap(self, connection: Any) -> Session | None:
        """A caller's own connection with whatever transaction it has open; ``None`` if it is of another driver."""
        ...

    def cluster_lock(self, owner: str, channel: str | None, heartbeat: float) -> ClusterLock:
        """A lock object of its own session, which hears ``channel`` (``None``: nothing)."""
        ...

    async def notify(self, channel: str, payload: str) -> None:
        """Wake other processes, outside of every business transaction."""
        ...

    async def refuse_shared_sessions(self) -> None:
        """Raise :class:`PooledConnection` if locks and LISTEN would go through a pooling proxy."""
        ...

    def require_room(self, loops: int) -> None:
        """Raise :class:`PoolTooSmall` if a given pool cannot hold so many loops beside one action."""
        ...

    @property
    def handler_transactions(self) -> int:
        """How many transactional handlers may run at once, so that actions find a connection as well."""
        ...

    async def release_loops(self) -> None:
        """Give back the connections that the loops held."""
        ...

    async def close(self) -> None: ...

    def is_transient(self, error: BaseException) -> bool:
        """A serialization failure, a deadlock, a busy database: the same again may succeed."""
        ...

    def refuses_value(self, error: BaseException) -> bool:
        """The database refused a value, so writing it again will fail again."""
        ...

    def is_unreachable(self, error: BaseException) -> bool:
        """The database cannot be reached, or stopped answering."""
        ...

    def lacks_schema(self, error: BaseException) -> bool:
        """A table or column of ours is not there."""
        ...
