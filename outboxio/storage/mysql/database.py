"""A MySQL or MariaDB database: the connection pool of the actions, and the connections of the loops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from outboxio.errors import ConfigurationError
from outboxio.loops.owner import EventLoopGuard
from outboxio.model.action import cause_chain
from outboxio.model.payloads.fields import kept_by_double
from outboxio.storage.connections.driver import DEFAULT_LIMITS, Limits, ServerCalls, configure
from outboxio.storage.connections.identity import Identity
from outboxio.storage.connections.loop_connection import LoopSource
from outboxio.storage.connections.pool import GiveBack, Occupancy, PoolAccess
from outboxio.storage.connections.server import ServerDatabase
from outboxio.storage.connections.watch import ServerSession, Sessions, Watch
from outboxio.storage.engines.user_engine import UserEngine
from outboxio.storage.mysql import driver, errors
from outboxio.storage.mysql.connection import (
    LoopConnection,
    drop,
    execute,
    fetch,
    fetch_each,
    hang_up,
    is_usable,
    limit,
    read_restore_sql,
    restore,
    waits_for,
)
from outboxio.storage.mysql.driver import is_closed
from outboxio.storage.mysql.fanout import MysqlFanout
from outboxio.storage.mysql.flavour import FLAVOURS, MARIADB, MYSQL, Server, for_flavours
from outboxio.storage.mysql.lock import MysqlClusterLock, MysqlKeySession, longest_silence
from outboxio.storage.mysql.notifications import MysqlNotifications
from outboxio.storage.mysql.ordering import MysqlOrdering, MysqlProbes
from outboxio.storage.mysql.port import MysqlPort
from outboxio.storage.mysql.schema import MysqlSchema
from outboxio.storage.mysql.session import MysqlSession, release
from outboxio.storage.mysql.url import arguments_of_engine, connect_arguments, dialect_of, url_of, where
from outboxio.storage.tables import Tables
from outboxio.storage.tables.scans import Bounds
from outboxio.support.aio import propagate_cancellation, run_to_completion

if TYPE_CHECKING:
    from outboxio.storage.engines.unit import Unit

# --- server facts ----------------------------------------------------------------------------------
#
# Facts about a MySQL or MariaDB server: its identity, the state of sessions, and whether it accepts writes.

SESSION = "SELECT CONNECTION_ID(), @@hostname, @@port, @@server_id, @@datadir"
SESSIONS = "SHOW PROCESSLIST"  # the sessions of the same user
# A statement for each variable: on a session of your application, sql_select_limit may drop rows of SHOW VARIABLES.
IDENTITY = "; ".join(
    f"SHOW GLOBAL VARIABLES WHERE Variable_name = '{name}'"
    for name in (
        "hostname", "port", "datadir", "server_uuid", "group_replication_group_name", "wsrep_on", "wsrep_cluster_name",
    )
)  # fmt: skip
SWITCHES = """
SHOW GLOBAL VARIABLES WHERE Value NOT IN ('OFF', '0') AND Variable_name IN
  ('read_only', 'super_read_only', 'innodb_read_only', 'transaction_read_only', 'tx_read_only')
"""


async def session_of(connection: Any) -> ServerSession | None:
    """Return the server session of a connection; ``None`` behind a proxy that shares sessions."""
    ((number, *server),) = await fetch(connection, SESSION)
    return ServerSession(tuple(server), number) if number == connection.thread_id() else None


async def sessions_of(connection: Any, numbers: Iterable[int]) -> Sessions | None:
    """Return the state of server sessions; ``None`` behind a proxy that shares sessions, where ids are meaningless."""
    own = await session_of(connection)
    # Columns: number, user, host, database, command, seconds since the command began.
    rows = await fetch(connection, SESSIONS)
    idle = {row[0]: float(row[5] or 0) if row[4] == "Sleep" else None for row in rows}
    if own is None or own.number not in idle:
        return None
    return Sessions(own.server, {number: idle[number] for number in numbers if number in idle})


async def identity_of(connection: Any) -> Identity:
    """Return the identity of the server, or of the cluster if several servers share the database eventlog."""
    found = {name: value for rows in await fetch_each(connection, IDENTITY) for name, value in rows}
    cluster = found.get("group_replication_group_name")
    if not cluster and found.get("wsrep_on") == "ON":
        cluster = found.get("wsrep_cluster_name")
    server = f"the server {found['hostname']}:{found['port']}"
    if cluster:
        return Identity(cluster, f"the cluster {cluster!r}, {server}")
    return Identity(found.get("server_uuid") or tuple(sorted(found.items())), server)


async def is_read_only_server(connection: Any, error: Exception) -> bool:
    """True if the server rejected a statement because the server is read-only.

    The same error numbers stand for unrelated server options, and for a READ ONLY transaction of your application.
    """
    if not errors.is_read_only(error) or is_closed(connection):
        return False
    return errors.number(error) not in errors.AMBIGUOUS or bool(await fetch(connection, SWITCHES))


# --- the database ----------------------------------------------------------------------------------


NOW = for_flavours("SELECT CAST(UTC_TIMESTAMP(6) AS DATETIME(6))")
CALLS = ServerCalls(is_usable, hang_up, drop, waits_for, sessions_of)


class MysqlDatabase(ServerDatabase[LoopConnection], Tables):
    stores_nul = True
    sends_text = False
    wakes_across_processes = False
    _address_of = staticmethod(where)
    _connect_errors = (OSError, OverflowError, RuntimeError, driver.MySQLError)
    _size_option = "maxsize"

    def __init__(
        self,
        name: str,
        source: str | UserEngine | Any,
        direct_url: str | None = None,
        *,
        guard: EventLoopGuard | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        urls = {url for url in (source, direct_url) if isinstance(url, str)}
        self._arguments = {url: connect_arguments(name, url) for url in urls}
        """The arguments of the driver's ``connect``, by URL."""
        self._loops_of_engine: str | None = None
        """The key of the arguments that come from an engine with a driver that loops do not use."""
        if isinstance(source, UserEngine) and source.driver != driver.NAME and direct_url is None:
            arguments = arguments_of_engine(source, source.connect_options())
            direct_url = self._loops_of_engine = url_of(source.dialect, arguments)
            self._arguments[direct_url] = arguments
        flavour = MYSQL  # until the first connection of a user-supplied pool shows the product
        if isinstance(source, str | UserEngine):
            flavour = FLAVOURS[source.dialect if isinstance(source, UserEngine) else dialect_of(source)]
        self._server = Server(flavour, limits, self._on_timeout)
        self._make_session = partial(MysqlSession, server=self._server)
        super().__init__(name, source, direct_url, CALLS, guard=guard, limits=limits)
        self._restore = None if self._user_pool else self._restore_and_release
        self.events = MysqlFanout(self._fanout, self._admin, self._server)
        self.notifications = MysqlNotifications(self._find, self._settle, self._server)
        self.ordering = MysqlOrdering(self._find, self._server)
        loops = (self._admin, self._find, self._settle, self._jobs)
        bounds = Bounds(rows=1000, errors=500, skipped=30_000, blocked_alone=True)
        Tables.__init__(self, name, bounds, *(MysqlPort(one, self._server) for one in loops))
        self.probes = MysqlProbes(MysqlPort(self._admin, self._server), self._admin)
        self.schema = MysqlSchema(self._admin, self._server, name)
        self._guard.when_taken_over(self._server.reset)

    @property
    def dialect(self) -> str:
        """The dialect of the URL; after the first connection, that of the server."""
        return self._server.flavour.name

    def check_numbers(self, document: bytes, subject: str) -> bytes:
        """Check the numbers for MySQL. MariaDB stores JSON as text, which keeps all numbers."""
        return document if self._server.flavour is MARIADB else kept_by_double(document, subject)

    def wrap(self, connection: Any) -> MysqlSession | None:
        if not driver.is_connection(connection):
            return None
        require_utf8mb4(self.name, connection)
        return MysqlSession(connection, self._server, is_callers=True)

    async def require_same_database(self, connection: Any) -> None:
        # Connections of the user-supplied pool are accepted without a check: the pool may have no second connection to
        # compare with.
        ours = self._action_pool.used if self._pool is None else getattr(self._pool, "_used", ())
        if connection not in ours:
            await self._verifier.require(connection, lambda: identity_of(connection))

    async def _identity_of(self, connection: Any) -> Identity:
        # A proxy may send a read outside of a transaction to a different server.
        await execute(connection, "START TRANSACTION")
        identity = await identity_of(connection)
        await execute(connection, "ROLLBACK")
        return identity

    def _lock_on(self, session: LoopConnection, owner: str, channel: str | None, heartbeat: float) -> MysqlClusterLock:
        # A settlement with events is a transaction of several statements, and so is a round of fan-out. A process that
        # freezes between two of them must not keep rows locked: the next holder increments the terms of the lease rows,
        # and its fan-out cannot skip locked rows of ordered handlers.
        for loop in (self._settle, self._fanout):
            loop.end_silent_transactions(longest_silence(heartbeat))
        return MysqlClusterLock(session, self._server, owner, heartbeat)

    def _keys_on(self, session: LoopConnection, owner: str, heartbeat: float) -> MysqlKeySession:
        return MysqlKeySession(session, self._server, owner, heartbeat)

    async def notify(self, channel: str, payload: str) -> None:
        """Do nothing: MySQL cannot wake processes, so they poll."""

    async def now(self) -> datetime:
        now: datetime = (await self._admin.fetch(NOW))[0][0]
        return now

    async def lock_capacity(self) -> int | None:
        return None

    async def _session_number(self, connection: Any, *, in_transaction: bool = False) -> int:
        begin, end = ("START TRANSACTION; ", "; ROLLBACK") if in_transaction else ("", "")
        [[(number,)]] = await fetch_each(connection, f"{begin}SELECT CONNECTION_ID(){end}")
        return int(number)

    is_transient = staticmethod(errors.is_transient)
    refuses_value = staticmethod(errors.refuses_value)
    is_unreachable = staticmethod(errors.is_unreachable)
    lacks_schema = staticmethod(errors.lacks_schema)
    lacks_rights = staticmethod(errors.lacks_rights)

    def _make_loop(self, source: LoopSource, *, keeps: bool, writes: bool) -> LoopConnection:
        return LoopConnection(source, self._server, keeps=keeps, writes=writes)

    def _access_to(self, pool: Any) -> PoolAccess:
        release_one = partial(release, pool)

        def acquire() -> Awaitable[Any]:
            return propagate_cancellation(pool.acquire(), release_one)

        def occupancy() -> Occupancy:
            return Occupancy(pool.size - pool.freesize, pool.maxsize or 0)

        return PoolAccess(acquire, release_one, lambda: pool.freesize > 0 and not pool._cond.locked(), occupancy)

    def _session_of_unit(self, unit: Unit) -> MysqlSession:
        from outboxio.storage.mysql.engine_session import UnitSession

        self._set_up(unit.driver)
        return UnitSession(unit, self._server)

    async def _explain(self, session: MysqlSession, error: BaseException) -> Exception | None:
        if not isinstance(error, Exception):
            return None
        for cause in cause_chain(error) if session.unit is not None else [error]:  # SQLAlchemy wraps errors
            if isinstance(cause, Exception) and (found := await self._translated(session.driver_connection, cause)):
                session.discard()
                return found
        return None

    def _answer_time(self, url: str) -> float:
        seconds: float = self._arguments[url].get("connect_timeout", self._limits.connect_timeout)
        return seconds

    async def _connect_for_watch(self, url: str) -> Any:
        if url == self._loops_of_engine and self._engine is not None:
            from sqlalchemy.util import greenlet_spawn

            options = await greenlet_spawn(self._engine.connect_options, listens=True)
            self._arguments[url] = arguments_of_engine(self._engine, options)
        return await self._open(self._arguments[url])

    def _on_timeout(self, connection: Any) -> None:
        self._connections.drop_unresponsive(connection, f"no answer within {self._limits.statement_timeout:g} s")

    async def _translated(self, connection: Any, error: Exception) -> Exception | None:
        """Return the error to raise instead of the driver's error; ``None`` to keep the driver's error."""
        if errors.is_read_only(error):
            try:
                is_read_only = await is_read_only_server(connection, error)
            except Exception:
                is_read_only = True  # the server does not respond either
            if is_read_only:
                drop(connection)
                self._action_pool.renew()
                return self._connections.not_writable(error, is_final=False)
        why = self._connections.why_dropped(connection)
        return self._connections.unavailable(why) if why is not None and errors.is_unreachable(error) else None

    async def _check_out(self) -> tuple[Any, GiveBack]:
        if self._user_pool is not None:
            return await self._acquire_from_user_pool(), self._user_pool.release
        connection = await self._reaching(self._url, self._action_pool.acquire)
        if self._watch is not None:
            self._watch.begin()
        return connection, self._action_pool.release

    async def _connect_for_actions(self) -> Any:
        # FOUND_ROWS: an UPDATE counts the matching rows instead of the changed rows, as in other databases.
        connection = await self._open(self._arguments[self._url or ""], client_flag=driver.FOUND_ROWS)
        await self._register(connection, self._watch)
        try:
            async with asyncio.timeout(self._limits.connect_timeout):
                await read_restore_sql(connection, self._server)
        except BaseException:
            drop(connection)
            raise
        return connection

    async def _restore_and_release(self, connection: Any) -> None:
        try:
            await restore(connection)
        finally:
            self._action_pool.release(connection)

    async def _connect(self) -> Any:
        """Return a connection for a loop: a new one if there is a URL, otherwise one of the user-supplied pool."""
        url = self._direct_url
        if url is None and self._engine is not None:
            connection = await self._reaching(None, self._engine.open)
            return await self._set_up_or_release(connection, hang_up)
        if url is None:
            return await self._acquire_from_user_pool()
        connection = await self._reaching(url, lambda: self._connect_for_watch(url))
        await self._reaching(url, lambda: self._register(connection, self._loop_watch))
        return connection

    async def _acquire_from_user_pool(self) -> Any:
        assert self._user_pool is not None
        connection = await self._reaching(None, self._user_pool.acquire)
        return await self._set_up_or_release(connection, self._user_pool.release)

    async def _set_up_or_release(self, connection: Any, release: Callable[[Any], Awaitable[None]]) -> Any:
        try:
            self._set_up(connection)
        except BaseException:
            await run_to_completion(release(connection))
            raise
        return connection

    def _set_up(self, connection: Any) -> None:
        self._server.detect_flavour(connection)
        require_utf8mb4(self.name, connection)
        limit(connection, self._limits.statement_timeout)

    async def _open(self, arguments: Mapping[str, Any], **more: Any) -> Any:
        options: dict[str, Any] = {
            "connect_timeout": self._limits.connect_timeout,
            "autocommit": True,
            "charset": "utf8mb4",
            **arguments,
            **more,
        }
        async with asyncio.timeout(options["connect_timeout"]):  # the driver's own timeout does not cover the handshake
            connection = await propagate_cancellation(driver.connect(**options), hang_up)
        configure(driver.transport(connection))
        limit(connection, self._limits.statement_timeout)
        return connection

    async def _register(self, connection: Any, watch: Watch | None) -> None:
        """Detect the product of the server, and register the session for the watch."""
        self._server.detect_flavour(connection)
        if watch is not None:
            try:
                async with asyncio.timeout(self._limits.connect_timeout):
                    watch.register(connection, await session_of(connection))
            except BaseException:
                drop(connection)
                raise

    @staticmethod
    def _reason(error: Exception) -> str:
        """Return the text of a driver error, with the cause that it leaves out: a certificate, or a missing socket."""
        reason, cause = str(error) or type(error).__name__, error.__cause__
        return f"{reason}: {cause!r}" if cause is not None else reason


def require_utf8mb4(shard: str, connection: Any) -> None:
    """Raise :class:`ConfigurationError` unless the connection uses the character set utf8mb4.

    The statements of outboxio are UTF-8. With another character set, the server would store or return wrong characters.
    """
    if (name := driver.character_set(connection)) != "utf8mb4":
        raise ConfigurationError(
            f"shard {shard!r}: a connection has the character set {name}, which cannot represent all texts; open the "
            "pool, the engine or the connection with charset='utf8mb4'"
        )
