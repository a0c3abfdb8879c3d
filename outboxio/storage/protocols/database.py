"""The database of a shard, which combines all other protocols; migration, and the checks at startup."""

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
    """Migrates the tables and checks that they are complete."""

    async def migrate(self, *, contract: bool = False) -> list[str]:
        """Apply the files that were not applied yet; return their names.

        Files that drop a part that an older version uses (contract files) are applied only with ``contract``. Raises
        :class:`SchemaInUse` if an older version has announced handlers within the last 2 minutes, in any namespace.
        """
        ...

    async def adopt(self, *, dry_run: bool = False) -> list[str]:
        """Adopt the tables of Ekbatan, and apply the later files; return the statements that adopt the tables.

        With ``dry_run`` nothing changes. Raises :class:`SchemaNotAdoptable` for tables that are not Ekbatan's.
        """
        ...

    async def pending(self) -> list[str]:
        """Return the names of the contract files that were not applied yet."""
        ...

    async def uses_alembic(self) -> bool:
        """Return True if Alembic manages this database: its table ``alembic_version`` exists."""
        ...

    async def operations_unavailable(self) -> str | None:
        """Return why this user cannot change notifications: a standby, or a missing right; ``None`` if it can."""
        ...

    async def missing_rights(self) -> Mapping[str, RightsMissing]:
        """Return the kinds of operations for which this user lacks a right, each with its error."""
        ...

    async def check(self, needed: Rights | None = None) -> None:
        """Raise :class:`SchemaMissing` or :class:`SchemaNewer` unless the tables are complete.

        ``needed``: the rights that the process needs on each table. Raises :class:`RightsMissing` without these rights,
        or without the right to read the existing tables.
        """
        ...


class Database(Protocol):
    """The database of a shard. It closes only the connections that it has opened."""

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
        """The check of numbers in JSON documents; ``None`` if the database stores all numbers exactly."""
        ...

    @property
    def sends_text(self) -> bool:
        """True if :meth:`notify` delivers its payload to all processes, and does not only wake them."""
        ...

    @property
    def encoding(self) -> TextEncoding:
        """The characters that the database can store; known after the first connection."""
        ...

    @property
    def wakes_across_processes(self) -> bool:
        """True if :meth:`notify` wakes all processes."""
        ...

    @property
    def has_one_writer(self) -> bool:
        """True if an open transaction blocks all other writers."""
        ...

    @property
    def handler_transactions(self) -> int:
        """How many transactional handlers may run at once without using up the connections of actions."""
        ...

    @property
    def pool_size(self) -> int:
        """How many connections actions and handlers may use at once; 0 without a limit."""
        ...

    @property
    def connections_in_use(self) -> int:
        """How many connections actions, handlers and reads of your application use now."""
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
        """Return a connection for a single transaction of your application."""
        ...

    def reading(self) -> AbstractAsyncContextManager[Session]:
        """Return a connection for a single read-only transaction of your application."""
        ...

    def wrap(self, connection: Any) -> Session | None:
        """Return a session on the caller's connection with an open transaction; ``None`` if the driver is different."""
        ...

    async def require_same_database(self, connection: Any) -> None:
        """Raise :class:`WrongDatabase` if the caller's connection leads to a different database.

        Each connection is checked once.
        """
        ...

    def cluster_lock(
        self, owner: str, channel: str | None, heartbeat: float, longest_block: float = 60.0
    ) -> ClusterLock:
        """Return a cluster lock with a separate session, which listens on ``channel`` (``None``: on no channel).

        ``heartbeat``: the seconds between two proofs. ``longest_block``: for how many seconds the event loop may be
        blocked without losing the locks, if the session runs in a thread.
        """
        ...

    def key_session(self, owner: str, heartbeat: float) -> KeySession:
        """Return a session for keyed locks, not yet open. ``heartbeat``: the seconds between two proofs."""
        ...

    def max_key_sessions(self, configured: int) -> int:
        """Return the largest number of key sessions. A user-supplied pool may allow fewer than ``configured``."""
        ...

    async def notify(self, channel: str, payload: str) -> None:
        """Wake all processes, outside of any transaction of your application."""
        ...

    async def now(self) -> datetime:
        """Return the time of the database's clock, naive UTC."""
        ...

    async def lock_capacity(self) -> int | None:
        """Return how many locks the server can hold for all its users; ``None`` without such a limit."""
        ...

    async def refuse_shared_sessions(self) -> None:
        """Raise :class:`PooledConnection` if locks and LISTEN would use a proxy that shares server sessions."""
        ...

    async def check_connections(self) -> None:
        """Raise :class:`ConfigurationError` if settings of user-supplied connections would alter stored values."""
        ...

    def require_capacity(self, loops: int) -> None:
        """Raise :class:`PoolTooSmall` if a user-supplied pool is too small for ``loops`` loops and an action."""
        ...

    async def release_loops(self) -> None:
        """Release the connections of the loops."""
        ...

    async def close(self) -> None: ...

    def is_transient(self, error: BaseException) -> bool:
        """Return True for a serialization failure, a deadlock or a busy database: a retry may succeed."""
        ...

    def refuses_value(self, error: BaseException) -> bool:
        """Return True if the database rejected a value, so that a retry would fail too."""
        ...

    def is_unreachable(self, error: BaseException) -> bool:
        """Return True if the database is unreachable or stopped responding."""
        ...

    def lacks_rights(self, error: BaseException) -> bool:
        """Return True if the database user lacks a right for a statement."""
        ...

    def lacks_schema(self, error: BaseException) -> bool:
        """Return True if a table or column of outboxio is missing."""
        ...


SHARE_OF_AUTOMATIC = 8  # automatic partitions use at most an eighth of the server's lock capacity


async def near_lock_capacity(database: Database, counts: Iterable[PartitionCount]) -> tuple[int, int] | None:
    """Return the automatic partitions and the server's lock capacity, if there is no capacity for as many again."""
    automatic = sum(one.number for one in counts if one.is_automatic and one.number > 1)
    capacity = await database.lock_capacity() if automatic else None
    return None if capacity is None or 2 * automatic * SHARE_OF_AUTOMATIC <= capacity else (automatic, capacity)


async def counts_of(database: Database, namespace: str) -> Mapping[str, PartitionCount]:
    """Return the partition counts by stored handler name. Names without a count have a single partition."""
    if database.partitions is None:
        return {}
    return {one.handler_name: one for one in (await database.subscriptions.control_state(namespace)).partitions}
