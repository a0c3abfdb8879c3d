"""The database of a shard, which puts the rest together; migration, and the checks at start-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from outboxio.errors import RightsMissing
from outboxio.storage.protocols.hot import (
    ClusterLock,
    DispatchStore,
    FanoutStore,
    KeySession,
    OrderingRepository,
    Session,
)
from outboxio.storage.protocols.values import PartitionCount
from outboxio.storage.schema import Rights
from outboxio.support.codec import Check
from outboxio.support.text import TextEncoding

if TYPE_CHECKING:
    from outboxio.storage.tables.bootstraps import Bootstraps
    from outboxio.storage.tables.deferred import Deferred
    from outboxio.storage.tables.event_search import EventSearch
    from outboxio.storage.tables.events import StoredEvents
    from outboxio.storage.tables.jobs import Jobs
    from outboxio.storage.tables.notifications import StoredNotifications
    from outboxio.storage.tables.operations import Operations
    from outboxio.storage.tables.partitions import PartitionTables
    from outboxio.storage.tables.probes import Probes
    from outboxio.storage.tables.rates import Rates
    from outboxio.storage.tables.reports import Reports
    from outboxio.storage.tables.retention import Retention
    from outboxio.storage.tables.search import NotificationSearch
    from outboxio.storage.tables.starts import Starts
    from outboxio.storage.tables.subscriptions import Subscriptions


class Schema(Protocol):
    """The tables: migration, and the check that all tables are complete."""

    async def migrate(self, *, contract: bool = False) -> list[str]:
        """Apply the files that are not applied yet; their names.

        A file that drops a part for which an older version has a use (a contract file) waits for ``contract``. Raises
        :class:`SchemaInUse` if an older version has announced handlers within 2 minutes, in any namespace.
        """
        ...

    async def adopt(self, *, dry_run: bool = False) -> list[str]:
        """Take over the tables of Ekbatan, and apply the later files; the statements that were run for the tables.

        With ``dry_run`` nothing changes. Raises :class:`SchemaNotAdoptable` for tables that are not Ekbatan's.
        """
        ...

    async def pending(self) -> list[str]:
        """The contract files that are not applied yet; their names."""
        ...

    async def uses_alembic(self) -> bool:
        """True if Alembic has changed this database: its table ``alembic_version`` exists."""
        ...

    async def orders_refused(self) -> str | None:
        """Why this user cannot change notifications here: a standby, or a missing right; ``None`` if orders work."""
        ...

    async def rights_lacking(self) -> Mapping[str, RightsMissing]:
        """The kinds of operations for which this user lacks a right, each with the error that names the right."""
        ...

    async def check(self, needed: Rights | None = None) -> None:
        """Raise :class:`SchemaMissing` or :class:`SchemaNewer` unless the tables are complete.

        ``needed``: the rights that the process needs on each table. Raises :class:`RightsMissing` without these rights,
        or without the right to read the tables that exist.
        """
        ...


class Database(Protocol):
    """The database of a shard. A database closes the connections that the database opened."""

    bootstraps: Bootstraps
    deferred: Deferred
    event_search: EventSearch
    jobs: Jobs
    operations: Operations
    partitions: PartitionTables | None
    """The tables of partitions and processes; ``None`` if all handlers have a single partition (SQLite)."""
    rates: Rates
    reports: Reports
    retention: Retention
    search: NotificationSearch
    starts: Starts
    stored_events: StoredEvents
    stored_notifications: StoredNotifications
    subscriptions: Subscriptions

    @property
    def name(self) -> str:
        """The name of the shard."""
        ...

    @property
    def dialect(self) -> str: ...

    @property
    def stores_nul(self) -> bool:
        """True if JSON strings may hold NUL."""
        ...

    @property
    def check_numbers(self) -> Check | None:
        """The check of the numbers in JSON documents; ``None`` if the database keeps all numbers."""
        ...

    @property
    def sends_text(self) -> bool:
        """True if the payload of :meth:`notify` reaches all processes, and not only the fact that there is one."""
        ...

    @property
    def encoding(self) -> TextEncoding:
        """The characters that the database can store; known after the first connection."""
        ...

    @property
    def wakes_across_processes(self) -> bool:
        """True if :meth:`notify` reaches all processes."""
        ...

    @property
    def has_one_writer(self) -> bool:
        """True if an open transaction keeps all new transactions from writing."""
        ...

    @property
    def handler_transactions(self) -> int:
        """The largest number of transactional handlers at a time that leaves connections for actions."""
        ...

    @property
    def pool_size(self) -> int:
        """The largest number of connections that may be in use for actions and handlers; 0 without a limit."""
        ...

    @property
    def connections_in_use(self) -> int:
        """The number of connections that actions, handlers and reads of the application have in use."""
        ...

    @property
    def events(self) -> FanoutStore: ...

    @property
    def notifications(self) -> DispatchStore: ...

    @property
    def ordering(self) -> OrderingRepository: ...

    @property
    def probes(self) -> Probes: ...

    @property
    def schema(self) -> Schema: ...

    def session(self) -> AbstractAsyncContextManager[Session]:
        """A connection for a single transaction of the application."""
        ...

    def reading(self) -> AbstractAsyncContextManager[Session]:
        """A connection for a single read-only transaction of the application."""
        ...

    def wrap(self, connection: Any) -> Session | None:
        """The application's connection, in the open transaction; ``None`` for a connection of a different driver."""
        ...

    async def require_own(self, connection: Any) -> None:
        """Raise :class:`OtherDatabase` if a connection of the application leads to a different database.

        Each connection is checked once.
        """
        ...

    def cluster_lock(
        self, owner: str, channel: str | None, heartbeat: float, longest_block: float = 60.0
    ) -> ClusterLock:
        """A cluster lock with a separate session, which listens on ``channel`` (``None``: on no channel).

        ``heartbeat``: the seconds between two proofs. ``longest_block``: the seconds for which the event loop may stand
        still without losing the locks, if the session lives in a thread.
        """
        ...

    def key_session(self, owner: str, heartbeat: float) -> KeySession:
        """A session for keyed locks, which is not open yet. ``heartbeat``: the seconds between two proofs."""
        ...

    def most_key_sessions(self, wanted: int) -> int:
        """The largest number of key sessions, if the setting says ``wanted``: a given pool serves only a few."""
        ...

    async def notify(self, channel: str, payload: str) -> None:
        """Wake all processes, outside of the application's transactions."""
        ...

    async def now(self) -> datetime:
        """The time of the database's clock, naive UTC."""
        ...

    async def lock_room(self) -> int | None:
        """The number of locks for which the server has room, for all applications; ``None`` without such a limit."""
        ...

    async def refuse_shared_sessions(self) -> None:
        """Raise :class:`PooledConnection` if locks and LISTEN would go through a proxy that shares server sessions."""
        ...

    async def check_connections(self) -> None:
        """Raise :class:`ConfigurationError` if connections of the application would change values of outboxio."""
        ...

    def require_room(self, loops: int) -> None:
        """Raise :class:`PoolTooSmall` if a given pool is too small for ``loops`` loops and an action."""
        ...

    async def release_loops(self) -> None:
        """Give back the connections of the loops."""
        ...

    async def close(self) -> None: ...

    def is_transient(self, error: BaseException) -> bool:
        """True for a serialization failure, a deadlock or a busy database: another try may succeed."""
        ...

    def refuses_value(self, error: BaseException) -> bool:
        """True if the database refused a value, so that the same value would fail again."""
        ...

    def is_unreachable(self, error: BaseException) -> bool:
        """True if the database cannot be reached, or stopped answering."""
        ...

    def lacks_rights(self, error: BaseException) -> bool:
        """True if the user of the database lacks a right for a statement."""
        ...

    def lacks_schema(self, error: BaseException) -> bool:
        """True if a table or a column of outboxio is missing."""
        ...


SHARE_OF_AUTOMATIC = 8  # all automatic partitions together use at most this part of the server's room for locks


async def full_of_automatic(database: Database, counts: Iterable[PartitionCount]) -> tuple[int, int] | None:
    """The automatic partitions and the server's room for locks, if the next handler cannot have as many again."""
    automatic = sum(one.number for one in counts if one.is_automatic and one.number > 1)
    room = await database.lock_room() if automatic else None
    return None if room is None or 2 * automatic * SHARE_OF_AUTOMATIC <= room else (automatic, room)


async def counts_of(database: Database, namespace: str) -> Mapping[str, PartitionCount]:
    """The numbers of partitions by stored handler name; a name without a number has a single partition."""
    if database.partitions is None:
        return {}
    return {one.handler_name: one for one in (await database.subscriptions.orders(namespace)).partitions}
