"""One MySQL or MariaDB database: its pool for the application's actions, and a connection for each loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from outboxio.errors import DatabaseUnavailable, PooledConnection, PoolTooSmall
from outboxio.storage.mysql import errors
from outboxio.storage.mysql.connection import Dedicated, drop, execute, fetch, hang_up, is_usable
from outboxio.storage.mysql.driver import FOUND_ROWS, Driver, driver_of, is_connection, load
from outboxio.storage.mysql.events import MysqlEvents
from outboxio.storage.mysql.flavour import FLAVOURS, MYSQL, Server
from outboxio.storage.mysql.lines import MysqlLines
from outboxio.storage.mysql.lock import MysqlClusterLock, longest_silence
from outboxio.storage.mysql.notifications import MysqlNotifications
from outboxio.storage.mysql.retention import MysqlRetention
from outboxio.storage.mysql.schema import MysqlSchema
from outboxio.storage.mysql.session import MysqlSession, PooledSession, give_back
from outboxio.storage.mysql.starts import MysqlStarts
from outboxio.storage.mysql.subscriptions import MysqlSubscriptions
from outboxio.storage.mysql.url import connect_arguments, dialect_of, driver_named_by, where
from outboxio.storage.pool import LARGEST_POOL, GiveBack, Pool
from outboxio.waiting import heeding_cancellation, to_the_end

CONNECT_TIMEOUT = 10.0


class MysqlDatabase:
    stores_nul = True
    wakes_across_processes = False

    def __init__(self, name: str, source: str | Any, direct_url: str | None = None) -> None:
        self.name = name
        self._url = source if isinstance(source, str) else None
        self._arguments = None if self._url is None else connect_arguments(name, self._url)
        self._direct_url = direct_url or self._url
        self._direct_arguments = None if self._direct_url is None else connect_arguments(name, self._direct_url)
        self._pool: Any = None if isinstance(source, str) else source
        self._driver = load(driver_named_by(source)) if isinstance(source, str) else driver_of(source)
        self._ours = Pool(connect=self._connect_for_actions, hang_up=self._release, drop=drop, is_usable=is_usable)
        self._server = Server(FLAVOURS[dialect_of(source)] if isinstance(source, str) else MYSQL)
        # What is seldom asked keeps no connection of a given pool from the application.
        self._admin = self._loop_connection(keeps=self._url is not None)
        self._fanout, self._find, self._settle = (self._loop_connection() for _ in range(3))
        self.events = MysqlEvents(self._fanout, self._admin, self._server)
        self.notifications = MysqlNotifications(self._find, self._settle, self._admin, self._server, name)
        self.lines = MysqlLines(self._find)
        self.starts = MysqlStarts(self._find, self._settle, self._admin)
        self.retention = MysqlRetention(self._admin, self._server)
        self.subscriptions = MysqlSubscriptions(self._admin)
        self.schema = MysqlSchema(self._admin, self._server, name)

    @property
    def dialect(self) -> str:
        """What the URL says, until the server has said what it is."""
        return self._server.flavour.name

    def session(self) -> PooledSession:
        return PooledSession(self._check_out, self._server)

    def wrap(self, connection: Any) -> MysqlSession | None:
        if not is_connection(connection):
            return None
        return MysqlSession(connection, self._server, is_callers=True)

    def cluster_lock(self, owner: str, channel: str | None, heartbeat: float) -> MysqlClusterLock:
        # A settlement that writes events as well is a transaction of several statements, and so is fan-out. A process
        # that freezes between them must not keep the lease rows locked that its successor raises, nor the rows that its
        # successor makes: those of ordered handlers cannot be passed by.
        for loop in (self._settle, self._fanout):
            loop.end_silent_transactions(longest_silence(heartbeat))
        return MysqlClusterLock(self._loop_connection(), self._server, owner, heartbeat)

    async def notify(self, channel: str, payload: str) -> None:
        """MySQL cannot wake other processes: they poll."""

    async def refuse_shared_sessions(self) -> None:
        """Two connections that are open at once never are one session, unless a proxy shares it."""
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
            await to_the_end(_all(map(self._release, opened)))

    def require_room(self, loops: int) -> None:
        if self._url is None and self._pool.maxsize:
            size, needed = self._pool.maxsize, loops + 1
            if size < needed:
                raise PoolTooSmall(self.name, size, needed, "maxsize")

    @property
    def handler_transactions(self) -> int:
        largest = LARGEST_POOL if self._url is not None else self._pool.maxsize or LARGEST_POOL
        return max(1, largest // 2)

    async def release_loops(self) -> None:
        ours = (self._fanout, self._find, self._settle, self._admin)
        await to_the_end(_all(connection.close() for connection in ours))

    async def close(self) -> None:
        await self.release_loops()
        await self._ours.close()

    is_transient = staticmethod(errors.is_transient)
    refuses_value = staticmethod(errors.refuses_value)
    is_unreachable = staticmethod(errors.is_unreachable)
    lacks_schema = staticmethod(errors.lacks_schema)

    def _loop_connection(self, *, keeps: bool = True) -> Dedicated:
        return Dedicated(self._connect, self._release, self._server, keeps=keeps)

    async def _check_out(self) -> tuple[Any, GiveBack]:
        if self._arguments is None:
            connection = await self._reaching(None, self._acquire)
            self._server.greeted_by(connection)
            return connection, partial(give_back, self._pool)
        return await self._reaching(self._url, self._ours.acquire), self._ours.release

    async def _acquire(self) -> Any:
        """A connection of the given pool."""
        return await heeding_cancellation(self._pool.acquire(), partial(give_back, self._pool))

    async def _connect_for_actions(self) -> Any:
        # FOUND_ROWS: an UPDATE counts the rows that it found, as on every other database, not those that it changed.
        connection = await _connect_with(self._driver, self._arguments or {}, client_flag=FOUND_ROWS)
        self._server.greeted_by(connection)
        return connection

    async def _connect(self) -> Any:
        """A connection for a loop: of our own if we have a URL, otherwise one of the given pool's."""
        arguments = self._direct_arguments
        if arguments is None:
            connection = await self._reaching(None, self._acquire)
        else:
            connection = await self._reaching(self._direct_url, lambda: _connect_with(self._driver, arguments))
        self._server.greeted_by(connection)
        return connection

    async def _release(self, connection: Any) -> None:
        if self._direct_arguments is None:
            await give_back(self._pool, connection)
        else:
            await hang_up(connection)

    async def _reaching(self, url: str | None, reach: Callable[[], Any]) -> Any:
        try:
            return await reach()
        except (OSError, OverflowError, RuntimeError, self._driver.MySQLError) as error:
            place = "the given pool" if url is None else where(url)
            raise DatabaseUnavailable(self.name, place, _reason(error)) from error


async def _connect_with(driver: Driver, arguments: Mapping[str, Any], **more: Any) -> Any:
    told: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT,
        "autocommit": True,
        "charset": "utf8mb4",
        **arguments,
        **more,
    }
    async with asyncio.timeout(told["connect_timeout"]):  # the driver's own ends before the server's greeting
        return await heeding_cancellation(driver.connect(**told), hang_up)


def _reason(error: Exception) -> str:
    """What the driver says, with the cause that it does not say: a certificate, a socket that is not there."""
    reason, cause = str(error) or type(error).__name__, error.__cause__
    return f"{reason}: {cause!r}" if cause is not None else reason


async def _all(coroutines: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*coroutines)


async def _session_number(connection: Any) -> int:
    return int((await fetch(connection, "SELECT CONNECTION_ID()"))[0][0])
