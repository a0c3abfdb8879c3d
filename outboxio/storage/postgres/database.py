"""A PostgreSQL database: the connection pool of the actions, the connections of the loops, and NOTIFY."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from outboxio.loops.owner import EventLoopGuard
from outboxio.model.action import cause_chain
from outboxio.model.payloads.fields import kept_by_numeric
from outboxio.storage.connections.driver import CLOSE_TIMEOUT, DEFAULT_LIMITS, Limits, ServerCalls
from outboxio.storage.connections.identity import Identity
from outboxio.storage.connections.loop_connection import LoopSource, ServerIsReadOnly
from outboxio.storage.connections.pool import GiveBack, Occupancy, PoolAccess, UserPool
from outboxio.storage.connections.server import ServerDatabase
from outboxio.storage.connections.threaded_lock import ThreadedLock
from outboxio.storage.connections.watch import Watch
from outboxio.storage.engines.user_engine import UserEngine
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.connection import (
    LoopConnection,
    as_asyncpg,
    connections_of,
    drop,
    is_usable,
    quoted,
    underlying,
)
from outboxio.storage.postgres.errors import Plans
from outboxio.storage.postgres.events import PostgresEvents
from outboxio.storage.postgres.lock import PostgresClusterLock, PostgresKeySession
from outboxio.storage.postgres.notifications import PostgresNotifications
from outboxio.storage.postgres.ordering import PostgresOrdering
from outboxio.storage.postgres.port import PostgresPort
from outboxio.storage.postgres.schema import PostgresSchema
from outboxio.storage.postgres.server_info import (
    LOCK_CAPACITY,
    READ_ONLY_REASON,
    accepts_writes,
    identity_of,
    is_read_only_server,
    is_standby,
    refuse_codecs,
    session_of,
    sessions_of,
)
from outboxio.storage.postgres.session import ENDING_TIMEOUT, PostgresSession
from outboxio.storage.protocols import LONGEST_SILENCE
from outboxio.storage.tables import Tables
from outboxio.storage.tables.scans import Bounds
from outboxio.support.aio import TimeLimit, run_to_completion
from outboxio.support.log import log_of
from outboxio.support.text import TextEncoding

if TYPE_CHECKING:
    import asyncpg

    from outboxio.storage.engines.unit import Unit
    from outboxio.storage.postgres.resetting import ResettingConnection

logger = log_of(__name__)

NOTIFY_TIMEOUT = 2.0  # seconds: NOTIFY shares a session with the heartbeat, and must delay neither it nor the shutdown

# Without parameters, so that the statement is a single message (see LoopConnection).
NOTIFY = "NOTIFY {}, {}"
SERVER_PROCESS = "SELECT pg_catalog.pg_backend_pid()"
NOW = "SELECT pg_catalog.timezone('UTC', pg_catalog.clock_timestamp())"


async def hang_up(connection: Any) -> None:
    await connection.close(timeout=CLOSE_TIMEOUT)


def where(url: str | None) -> str:
    """Return the parts of a URL that may be shown, without user and password. ``None`` is the user-supplied pool."""
    if url is None:
        return "the user-supplied pool"
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2] or 'the local socket'}{parts.path}"


CALLS = ServerCalls(is_usable, hang_up, drop, methodcaller("waits_for"), sessions_of)


class PostgresDatabase(ServerDatabase[LoopConnection], Tables):
    dialect = "postgres"
    _address_of = staticmethod(where)
    _size_option = "max_size"
    stores_nul = False
    sends_text = True
    check_numbers = staticmethod(kept_by_numeric)
    wakes_across_processes = True

    def __init__(
        self,
        name: str,
        source: str | UserEngine | asyncpg.Pool[Any],
        direct_url: str | None = None,
        *,
        driver: str = "asyncpg",
        guard: EventLoopGuard | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """``driver``: ``asyncpg`` or ``psycopg``."""
        self._driver_connections = connections_of(driver)
        self._connect_errors = errors.connecting()
        super().__init__(name, source, direct_url, CALLS, guard=guard, limits=limits)
        self._plans = Plans()
        self._reset()
        self._guard.when_taken_over(self._reset)
        self._lock_session: LockSession | None = None
        self.events = PostgresEvents(self._fanout, self._admin)
        self.notifications = PostgresNotifications(self._find, self._settle)
        self.ordering = PostgresOrdering(self._find)
        bounds = Bounds(rows=5000, errors=4000)
        Tables.__init__(self, name, bounds, *map(PostgresPort, (self._admin, self._find, self._settle, self._jobs)))
        self.schema = PostgresSchema(self._admin, name)

    def _reset(self) -> None:
        """Start a new time limit for the new event loop."""
        limit = self._answer_limit = TimeLimit(self._limits.statement_timeout)
        self._make_session = partial(PostgresSession, is_ours=self._url is not None, limit=limit, plans=self._plans)

    def wrap(self, connection: Any) -> PostgresSession | None:
        adapted = as_asyncpg(connection, begins=True)
        return None if adapted is None else PostgresSession(adapted)

    async def require_same_database(self, connection: Any) -> None:
        raw, pool = underlying(connection), self._pool
        # Connections of the user-supplied pool are accepted without a check: the pool may have no second connection to
        # compare with.
        is_of_pool = pool is not None and getattr(raw, "_pool_holder", None) in pool._holders
        if not is_of_pool and all(raw is not underlying(each) for each in self._action_pool.used):
            await self._verifier.require(raw, lambda: identity_of(as_asyncpg(connection)))

    async def _identity_of(self, connection: Any) -> Identity:
        return await identity_of(connection)

    def _lock_on(
        self, session: LoopConnection, owner: str, channel: str | None, heartbeat: float
    ) -> PostgresClusterLock:
        silence = str(round(heartbeat * LONGEST_SILENCE * 1000))
        # A settlement with events is a transaction of several statements. A process that freezes between two of them
        # must not keep lease rows locked, because the next holder increments the terms of these rows.
        self._settle.set("idle_in_transaction_session_timeout", silence)
        session.set("idle_session_timeout", silence)
        return PostgresClusterLock(session, owner, channel, max(heartbeat, 1.0))

    def _locks_are_on(self, session: LoopConnection, threaded: ThreadedLock | None) -> None:
        self._lock_session = LockSession(session, threaded)

    def _keys_on(self, session: LoopConnection, owner: str, heartbeat: float) -> PostgresKeySession:
        return PostgresKeySession(session, owner, heartbeat)

    async def notify(self, channel: str, payload: str) -> None:
        notify = NOTIFY.format(channel, quoted(payload))
        if self._lock_session is not None and self._lock_session.is_open:
            with suppress(ConnectionResetError, *errors.named("Interface")):  # the session is closing or closed
                await self._lock_session.execute(notify, timeout=NOTIFY_TIMEOUT)
                return
        if self._engine is not None:
            await self._admin.execute(notify, timeout=NOTIFY_TIMEOUT)
            return
        async with asyncio.timeout(NOTIFY_TIMEOUT):
            connection, give_back = await self._check_out()
        try:
            await connection.execute(notify, timeout=NOTIFY_TIMEOUT)
        except TimeoutError:
            self._connections.unanswered()
            raise
        finally:
            if (giving := give_back(connection)) is not None:
                await run_to_completion(giving)

    async def now(self) -> datetime:
        now: datetime = (await self._admin.fetch(NOW))[0][0]
        return now

    async def lock_capacity(self) -> int | None:
        capacity: int = (await self._admin.fetch(LOCK_CAPACITY))[0][0]
        return capacity

    async def _session_number(self, connection: Any, *, in_transaction: bool = False) -> int:
        async with connection.transaction() if in_transaction else nullcontext():
            number: int = await connection.fetchval(SERVER_PROCESS, timeout=self._limits.statement_timeout)
            return number

    @property
    def encoding(self) -> TextEncoding:
        return self._admin.encoding

    async def check_connections(self) -> None:
        if self._engine is not None:
            await self._refuse_codecs(await self._connect_by_engine(self._engine), hang_up)
        elif self._user_pool is not None:
            await self._refuse_codecs(await self._reaching(None, self._user_pool.acquire), self._user_pool.release)

    async def _refuse_codecs(self, connection: Any, close: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.timeout(self._limits.statement_timeout):
                await self._reaching(None, lambda: refuse_codecs(connection, self.name))
        finally:
            await run_to_completion(close(connection))

    is_transient = staticmethod(errors.is_transient)
    refuses_value = staticmethod(errors.refuses_value)
    is_unreachable = staticmethod(errors.is_unreachable)
    lacks_schema = staticmethod(errors.lacks_schema)
    lacks_rights = staticmethod(errors.lacks_rights)

    def _make_loop(self, source: LoopSource, *, keeps: bool, writes: bool) -> LoopConnection:
        return LoopConnection(source, timeout=self._limits.statement_timeout, keeps=keeps, writes=writes)

    def _access_to(self, pool: asyncpg.Pool[Any]) -> PoolAccess:
        def occupancy() -> Occupancy:
            return Occupancy(pool.get_size() - pool.get_idle_size(), pool.get_max_size())

        restorer = self._driver_connections.RoleRestorer(pool, release_timeout=ENDING_TIMEOUT)
        return PoolAccess(restorer.acquire, restorer.release, lambda: pool.get_idle_size() > 0, occupancy)

    def _session_of_unit(self, unit: Unit) -> PostgresSession:
        from outboxio.storage.postgres.engine_session import UnitSession

        return UnitSession(unit, self._answer_limit, self._plans)

    async def _explain(self, session: PostgresSession, error: BaseException) -> Exception | None:
        causes = list(cause_chain(error))
        self._plans.record(causes)
        if not isinstance(error, Exception):
            return None
        drivers = causes if session.unit is not None else [error]  # SQLAlchemy wraps the errors of the driver
        translated = (self._translated(session, cause) for cause in drivers if isinstance(cause, Exception))
        return next(filter(None, translated), None)

    def _translated(self, session: PostgresSession, error: Exception) -> Exception | None:
        """Return the error to raise instead of the driver's error; ``None`` to keep the driver's error."""
        connection = session.driver
        # If the server accepts writes, the action itself began a read-only transaction.
        if errors.is_read_only(error) and not accepts_writes(connection):
            session.discard()
            self._action_pool.renew()
            return self._connections.not_writable(error, is_final=False)
        why = None
        if self._url is not None:
            why = self._connections.why_dropped(connection)
            if is_read_only_server(connection):  # the action may have replaced or suppressed the error
                self._action_pool.renew()
        if session.has_timed_out:
            why = f"no answer within {self._limits.statement_timeout:g} s"
        return self._connections.unavailable(why) if why is not None and errors.is_unreachable(error) else None

    async def _check_out(self) -> tuple[Any, GiveBack]:
        if self._user_pool is not None:
            return await self._reaching(None, self._user_pool.acquire), partial(_release, self._user_pool)
        connection = await self._reaching(self._url, self._action_pool.acquire)
        if connection.refusals != self._plans.refusals:
            await self._plans.renew(connection)
        connection.is_reset = False
        if self._watch is not None:
            self._watch.begin()
        return connection, self._release_ours

    def _release_ours(self, connection: ResettingConnection) -> Coroutine[Any, Any, None] | None:
        if not connection.is_reset and not connection.is_closed():
            return self._reset_and_release(connection)
        self._action_pool.release(connection)
        return None

    async def _reset_and_release(self, connection: ResettingConnection) -> None:
        try:
            await connection.reset(timeout=ENDING_TIMEOUT)
        except Exception as error:
            # The action has finished: an error of the reset must not change its result.
            logger.warning("connection could not be reset; the pool will open a new one: %s", error)
            connection.terminate()
        finally:
            self._action_pool.release(connection)

    async def _connect_for_watch(self, url: str) -> Any:
        return await self._driver_connections.connect_for_checks(url, timeout=self._limits.connect_timeout)

    async def _connect_for_actions(self) -> Any:
        connection = await self._open(
            self._url, self._watch, self._driver_connections.connect_for_actions,
            statement_timeout=self._limits.action_statement_timeout or None, keeps_statements=not self._behind_proxy,
        )  # fmt: skip
        if is_standby(connection):
            await hang_up(connection)
            raise self._connections.not_writable(ServerIsReadOnly(READ_ONLY_REASON), is_final=False)
        return connection

    async def _connect(self) -> Any:
        """Return a connection for a loop: a new one if there is a URL, otherwise one of the user-supplied pool."""
        if self._direct_url is None:
            if self._engine is not None:
                return await self._connect_by_engine(self._engine)
            assert self._user_pool is not None
            return await self._reaching(None, self._user_pool.acquire)
        url = self._direct_url
        connect = self._driver_connections.connect_for_loops
        return await self._reaching(url, lambda: self._open(url, self._loop_watch, connect))

    async def _connect_by_engine(self, engine: UserEngine) -> Any:
        async def connect() -> Any:
            return await self._driver_connections.adapt_for_loops(await engine.open())

        return await self._reaching(None, connect)

    async def _open(
        self, url: str | None, watch: Watch | None, connect: Callable[..., Awaitable[Any]], **options: Any
    ) -> Any:
        limit = self._limits.connect_timeout
        connection = await connect(url, timeout=limit, **options)
        try:
            if watch is not None:
                watch.register(connection, await session_of(connection, limit))
        except BaseException:
            connection.terminate()
            raise
        return connection


class LockSession:
    """The session that holds the cluster locks, for statements that are unrelated to the locks."""

    def __init__(self, session: LoopConnection, lock: ThreadedLock | None) -> None:
        """``lock``: the lock whose thread runs the session; ``None`` if the session runs on the event loop."""
        self._session = session
        self._lock = lock

    @property
    def is_open(self) -> bool:
        return self._session.is_open if self._lock is None else self._lock.is_open

    async def execute(self, sql: str, *args: Any, timeout: float) -> None:
        """Run an autocommit statement. Raises :class:`ConnectionResetError` if the session has ended."""

        async def execute_there() -> None:
            await self._session.use_if_open(lambda connection: connection.execute(sql, *args, timeout=timeout))

        await (execute_there() if self._lock is None else self._lock.in_thread(execute_there))


async def _release(pool: UserPool, connection: Any) -> None:
    """Release a connection to the user-supplied pool."""
    try:
        await pool.release(connection)
    except Exception as error:
        # The action has finished: an error of the pool must not change its result.
        logger.warning("connection could not be reset; the pool will open a new one: %s", error)
