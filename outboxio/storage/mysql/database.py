"""A MySQL or MariaDB database: the pool for the application's actions, and a connection for each loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from outboxio.errors import ConfigurationError, DatabaseUnavailable, PooledConnection, PoolTooSmall
from outboxio.loops.owner import EventLoopGuard
from outboxio.model.action import cause_chain
from outboxio.model.payloads.fields import kept_by_double
from outboxio.storage.connections.driver import DEFAULT_LIMITS, Limits, ServerCalls, configure
from outboxio.storage.connections.identity import Identity, Kin
from outboxio.storage.connections.loop_connection import Troubles
from outboxio.storage.connections.pool import GiveBack, GivenPool, Occupancy
from outboxio.storage.connections.server import ServerDatabase, together
from outboxio.storage.connections.threaded_lock import ThreadedLock, TroublesOfThread
from outboxio.storage.connections.watch import Watch
from outboxio.storage.engines.given_engine import GivenEngine
from outboxio.storage.mysql import driver, errors
from outboxio.storage.mysql.connection import (
    LoopConnection,
    drop,
    execute,
    fetch,
    hang_up,
    is_usable,
    limit,
    waits_for,
)
from outboxio.storage.mysql.fanout import MysqlFanout
from outboxio.storage.mysql.flavour import FLAVOURS, MARIADB, MYSQL, Server, for_flavours
from outboxio.storage.mysql.key_session import MysqlKeySession
from outboxio.storage.mysql.lock import MysqlClusterLock, longest_silence
from outboxio.storage.mysql.notifications import MysqlNotifications
from outboxio.storage.mysql.ordering import MysqlOrdering
from outboxio.storage.mysql.port import MysqlPort
from outboxio.storage.mysql.probes import MysqlProbes
from outboxio.storage.mysql.restoring import learn_to_restore, restore
from outboxio.storage.mysql.schema import MysqlSchema
from outboxio.storage.mysql.server_info import does_not_write, identity_of, session_of, sessions_of
from outboxio.storage.mysql.session import MysqlSession, PooledSession, give_back
from outboxio.storage.mysql.url import connect_arguments, dialect_of, where
from outboxio.storage.protocols import ClusterLock
from outboxio.storage.tables import Tables
from outboxio.storage.tables.walks import Bounds
from outboxio.support.aio import heeding_cancellation, to_the_end

if TYPE_CHECKING:
    from outboxio.storage.engines.unit import Unit
    from outboxio.storage.mysql.engine_session import UnitSession

NOW = for_flavours("SELECT CAST(UTC_TIMESTAMP(6) AS DATETIME(6))")
CALLS = ServerCalls(is_usable, hang_up, drop, waits_for, sessions_of)


class MysqlDatabase(ServerDatabase[LoopConnection], Tables):
    stores_nul = True
    wakes_across_processes = False
    _place_of = staticmethod(where)

    def __init__(
        self,
        name: str,
        source: str | GivenEngine | Any,
        direct_url: str | None = None,
        *,
        guard: EventLoopGuard | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        urls = {url for url in (source, direct_url) if isinstance(url, str)}
        self._arguments = {url: connect_arguments(name, url) for url in urls}
        """The arguments of the driver's ``connect``, by URL."""
        flavour = MYSQL  # until the server of a given pool has greeted
        if isinstance(source, str | GivenEngine):
            flavour = FLAVOURS[source.dialect if isinstance(source, GivenEngine) else dialect_of(source)]
        self._server = Server(flavour, limits, self._give_up)
        super().__init__(name, source, direct_url, CALLS, guard=guard, limits=limits)
        self.events = MysqlFanout(self._fanout, self._admin, self._server)
        self.notifications = MysqlNotifications(self._find, self._settle, self._server)
        self.ordering = MysqlOrdering(self._find)
        loops = (self._admin, self._find, self._settle, self._jobs)
        bounds = Bounds(rows=1000, errors=500, foreign=30_000, blocked_alone=True)
        Tables.__init__(self, name, bounds, *(MysqlPort(one, self._server) for one in loops))
        self.probes = MysqlProbes(MysqlPort(self._admin, self._server), self._admin)
        self.schema = MysqlSchema(self._admin, self._server, name)
        self._guard.when_taken_over(self._server.begin_anew)

    @property
    def dialect(self) -> str:
        """The dialect of the URL, and after the first connection the dialect of the server."""
        return self._server.flavour.name

    def check_numbers(self, document: bytes, subject: str) -> bytes:
        """The check of MySQL; JSON is text on MariaDB, which keeps all numbers."""
        return document if self._server.flavour is MARIADB else kept_by_double(document, subject)

    def session(self) -> AbstractAsyncContextManager[MysqlSession]:
        if self._engine is not None:
            return self._unit_of(self._engine)
        restore = None if self._given else self._restore_and_give_back
        return PooledSession(self._check_out, self._explain, self._server, restore)

    reading = session

    def wrap(self, connection: Any) -> MysqlSession | None:
        if not driver.is_connection(connection):
            return None
        refuse_charset(self.name, connection)
        return MysqlSession(connection, self._server, is_given=True)

    async def require_own(self, connection: Any) -> None:
        # The given pool may have no further connection for the question.
        ours = self._ours.used if self._pool is None else getattr(self._pool, "_used", ())
        if connection not in ours:
            await self._own.require(connection, lambda: identity_of(connection))

    async def _own_identity(self) -> tuple[Identity, Kin | None]:
        connection = await self._connect()
        try:
            # A proxy may send a read outside of a transaction to a second server.
            await execute(connection, "START TRANSACTION")
            identity = await identity_of(connection)
            await execute(connection, "ROLLBACK")
            return identity, None
        finally:
            await to_the_end(self._release(connection))

    def cluster_lock(
        self, owner: str, channel: str | None, heartbeat: float, longest_block: float = 60.0
    ) -> ClusterLock:
        # A settlement that also writes events is a transaction of several statements, and so is a round of fan-out. A
        # process that freezes within such a transaction must not keep the locks: a successor raises the lease rows of
        # the settlement, and makes the rows of the fan-out, where locked rows of ordered handlers cannot be skipped.
        for loop in (self._settle, self._fanout):
            loop.end_silent_transactions(longest_silence(heartbeat))
        if not self._opens_for_loops:  # the connections of a given pool belong to the application's event loop
            session = self._dedicated()
            self._connections.locks.add(session)
            return MysqlClusterLock(session, self._server, owner, heartbeat)
        guard = EventLoopGuard.of_shard(self.name)  # of the event loop of the thread
        session = self._dedicated(guard=guard, troubles=TroublesOfThread(self._connections, self._guard))
        lock = MysqlClusterLock(session, self._server, owner, heartbeat)
        threaded = ThreadedLock(lock, session, heartbeat, longest_block)
        self._connections.locks.add(threaded)
        return threaded

    def key_session(self, owner: str, heartbeat: float) -> MysqlKeySession:
        session = self._dedicated()
        self._connections.locks.add(session)
        return MysqlKeySession(session, self._server, owner, heartbeat)

    async def notify(self, channel: str, payload: str) -> None:
        """Does nothing: MySQL cannot wake processes, so that each process polls."""

    async def now(self) -> datetime:
        moment: datetime = (await self._admin.fetch(NOW))[0][0]
        return moment

    async def lock_room(self) -> int | None:
        return None

    async def refuse_shared_sessions(self) -> None:
        """Two connections that are open at once have two sessions, unless a proxy shares sessions."""
        opened = [await self._connect()]
        try:
            number = await _session_number(opened[0])
            opened.append(await self._connect())
            await execute(opened[1], "START TRANSACTION")
            is_shared = await _session_number(opened[1]) == number
            await execute(opened[1], "ROLLBACK")
            if is_shared:
                raise PooledConnection(self.name)
        finally:
            await to_the_end(together(map(self._release, opened)))

    def require_room(self, loops: int) -> None:
        if self._given is not None and not self._opens_for_loops and self._pool.maxsize:
            size, needed = self._pool.maxsize, loops + 1
            if size < needed:
                raise PoolTooSmall(self.name, size, needed, "maxsize")

    is_transient = staticmethod(errors.is_transient)
    refuses_value = staticmethod(errors.refuses_value)
    is_unreachable = staticmethod(errors.is_unreachable)
    lacks_schema = staticmethod(errors.lacks_schema)
    lacks_rights = staticmethod(errors.lacks_rights)

    def _dedicated(
        self,
        *,
        keeps: bool = True,
        writes: bool = True,
        guard: EventLoopGuard | None = None,
        troubles: Troubles | None = None,
    ) -> LoopConnection:
        return LoopConnection(
            self._connect, self._release, troubles or self._connections, self._server, guard=guard or self._guard,
            keeps=keeps, writes=writes,
        )  # fmt: skip

    def _take_from(self, pool: Any) -> GivenPool:
        release = partial(give_back, pool)

        def acquire() -> Awaitable[Any]:
            return heeding_cancellation(pool.acquire(), release)

        return GivenPool(
            pool, guard=self._guard, shard=self.name, timeout=self._limits.pool_timeout, acquire=acquire,
            release=release, has_idle=lambda: pool.freesize > 0 and not pool._cond.locked(),
            occupancy=lambda: Occupancy(pool.size - pool.freesize, pool.maxsize or 0),
        )  # fmt: skip

    @staticmethod
    def _size_of_given(pool: Any) -> int:
        return int(pool.maxsize or 0)

    def _unit_of(self, engine: GivenEngine) -> AbstractAsyncContextManager[MysqlSession]:
        from outboxio.storage.engines.checkout import CheckedOutUnit
        from outboxio.storage.mysql import engine_session

        def make(unit: Unit) -> UnitSession:
            self._greet(unit.driver)
            return engine_session.UnitSession(unit, self._server)

        async def explain(session: UnitSession, error: Exception) -> Exception | None:
            for cause in cause_chain(error):
                if isinstance(cause, Exception) and (found := await self._explain(session.unit.driver, cause)):
                    session.discard()
                    return found
            return None

        return CheckedOutUnit(engine, make, explain)

    def _answer_time(self, url: str) -> float:
        seconds: float = self._arguments[url].get("connect_timeout", self._limits.connect_timeout)
        return seconds

    async def _connect_to_ask(self, url: str) -> Any:
        return await self._open(self._arguments[url])

    def _give_up(self, connection: Any) -> None:
        self._connections.give_up(connection, f"no answer within {self._limits.statement_timeout:g} s")

    async def _explain(self, connection: Any, error: Exception) -> Exception | None:
        """The error to raise in place of the error that ended an action, if outboxio knows a clearer error."""
        if errors.is_read_only(error):
            try:
                is_read_only = await does_not_write(connection, error)
            except Exception:
                is_read_only = True  # the server does not answer either
            if is_read_only:
                drop(connection)
                self._ours.renew()
                return self._connections.does_not_write(error, gives_up=False)
        why = self._connections.why_given_up(connection)
        return self._connections.unavailable(why) if why is not None and errors.is_unreachable(error) else None

    async def _check_out(self) -> tuple[Any, GiveBack]:
        if self._given is not None:
            return await self._take_given(), self._given.release
        connection = await self._reaching(self._url, self._ours.acquire)
        if self._watch is not None:
            self._watch.begin()
        return connection, self._ours.release

    async def _connect_for_actions(self) -> Any:
        # FOUND_ROWS: an UPDATE counts the rows that match, as on every other database, and not the rows that change.
        connection = await self._open(self._arguments[self._url or ""], client_flag=driver.FOUND_ROWS)
        await self._get_to_know(connection, self._watch)
        try:
            async with asyncio.timeout(self._limits.connect_timeout):
                await learn_to_restore(connection, self._server)
        except BaseException:
            drop(connection)
            raise
        return connection

    async def _restore_and_give_back(self, connection: Any) -> None:
        try:
            await restore(connection)
        finally:
            self._ours.release(connection)

    async def _connect(self) -> Any:
        """A connection for a loop: of our own if there is a URL, otherwise a connection of the given pool."""
        url = self._direct_url
        if url is None and self._engine is not None:
            connection = await self._reaching(None, self._engine.open)
            return await self._greeted(connection, hang_up)
        if url is None:
            return await self._take_given()
        connection = await self._reaching(url, lambda: self._open(self._arguments[url]))
        await self._reaching(url, lambda: self._get_to_know(connection, self._loop_watch))
        return connection

    async def _take_given(self) -> Any:
        """A connection of the given pool."""
        assert self._given is not None
        connection = await self._reaching(None, self._given.acquire)
        return await self._greeted(connection, self._given.release)

    async def _greeted(self, connection: Any, release: Callable[[Any], Awaitable[None]]) -> Any:
        try:
            self._greet(connection)
        except BaseException:
            await to_the_end(release(connection))
            raise
        return connection

    def _greet(self, connection: Any) -> None:
        self._server.greeted_by(connection)
        refuse_charset(self.name, connection)
        limit(connection, self._limits.statement_timeout)

    async def _open(self, arguments: Mapping[str, Any], **more: Any) -> Any:
        told: dict[str, Any] = {
            "connect_timeout": self._limits.connect_timeout,
            "autocommit": True,
            "charset": "utf8mb4",
            **arguments,
            **more,
        }
        async with asyncio.timeout(told["connect_timeout"]):  # the driver's own timeout does not cover the greeting
            connection = await heeding_cancellation(driver.connect(**told), hang_up)
        configure(driver.transport(connection))
        limit(connection, self._limits.statement_timeout)
        return connection

    async def _get_to_know(self, connection: Any, watch: Watch | None) -> None:
        """Learn the product of the server, and the session of the connection."""
        self._server.greeted_by(connection)
        if watch is not None:
            try:
                async with asyncio.timeout(self._limits.connect_timeout):
                    watch.knows(connection, await session_of(connection))
            except BaseException:
                drop(connection)
                raise

    async def _reaching(self, url: str | None, reach: Callable[[], Any]) -> Any:
        try:
            return await reach()
        except (OSError, OverflowError, RuntimeError, driver.MySQLError) as error:
            raise DatabaseUnavailable(self.name, self._where(url), _reason(error)) from error


def refuse_charset(shard: str, connection: Any) -> None:
    """Raise :class:`ConfigurationError` unless the driver and the server exchange texts in UTF-8.

    Our statements are UTF-8. In any other character set the server would store, or return, other characters.
    """
    if (name := driver.character_set(connection)) != "utf8mb4":
        raise ConfigurationError(
            f"shard {shard!r}: a connection has the character set {name}, in which texts would change; open the pool, "
            "the engine or the connection with charset='utf8mb4'"
        )


def _reason(error: Exception) -> str:
    """The text of the driver's error, with the cause that the text leaves out: a certificate, a missing socket."""
    reason, cause = str(error) or type(error).__name__, error.__cause__
    return f"{reason}: {cause!r}" if cause is not None else reason


async def _session_number(connection: Any) -> int:
    return int((await fetch(connection, "SELECT CONNECTION_ID()"))[0][0])
