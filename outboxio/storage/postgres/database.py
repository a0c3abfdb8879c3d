"""One PostgreSQL database: its pool for the application's actions, and a connection for each loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from outboxio.errors import DatabaseUnavailable, PooledConnection, PoolTooSmall
from outboxio.storage.dedicated import FAREWELL_TIMEOUT
from outboxio.storage.pool import LARGEST_POOL, GiveBack, Pool
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.connection import LOOP_SETTINGS, Dedicated, drop, is_usable
from outboxio.storage.postgres.events import PostgresEvents
from outboxio.storage.postgres.lines import PostgresLines
from outboxio.storage.postgres.lock import PostgresClusterLock
from outboxio.storage.postgres.notifications import PostgresNotifications
from outboxio.storage.postgres.retention import PostgresRetention
from outboxio.storage.postgres.schema import PostgresSchema
from outboxio.storage.postgres.session import ENDING_TIMEOUT, ActionConnection, PooledSession, PostgresSession
from outboxio.storage.postgres.starts import PostgresStarts
from outboxio.storage.postgres.subscriptions import PostgresSubscriptions
from outboxio.storage.protocols import LONGEST_SILENCE
from outboxio.waiting import to_the_end

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0
NOTIFY_TIMEOUT = 2.0  # a wake-up must neither hold up the heartbeat, which goes the same way, nor the end

NOTIFY = "NOTIFY {}, '{}'"


class PostgresDatabase:
    dialect = "postgres"
    stores_nul = False
    wakes_across_processes = True

    def __init__(self, name: str, source: str | asyncpg.Pool[Any], direct_url: str | None = None) -> None:
        self.name = name
        self._url = source if isinstance(source, str) else None
        self._direct_url = direct_url or self._url
        self._behind_proxy = direct_url is not None
        self._pool = None if isinstance(source, str) else source
        self._ours = Pool(connect=self._connect_for_actions, hang_up=_hang_up, drop=drop, is_usable=is_usable)
        # What is seldom asked keeps no connection of a given pool from the application.
        self._admin = self._loop_connection(keeps=self._url is not None)
        self._fanout, self._find, self._settle = (self._loop_connection() for _ in range(3))
        self._lock_session: Dedicated | None = None
        self.events = PostgresEvents(self._fanout, self._admin)
        self.notifications = PostgresNotifications(self._find, self._settle, self._admin, name)
        self.lines = PostgresLines(self._find)
        self.starts = PostgresStarts(self._find, self._settle, self._admin)
        self.retention = PostgresRetention(self._admin)
        self.subscriptions = PostgresSubscriptions(self._admin)
        self.schema = PostgresSchema(self._admin, name)

    def session(self) -> PooledSession:
        return PooledSession(self._check_out, is_ours=self._url is not None)

    def wrap(self, connection: Any) -> PostgresSession | None:
        is_ours = isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy)
        return PostgresSession(connection) if is_ours else None

    def cluster_lock(self, owner: str, channel: str | None, heartbeat: float) -> PostgresClusterLock:
        silence = str(round(heartbeat * LONGEST_SILENCE * 1000))
        # A settlement that writes events as well is a transaction of several statements. A process that freezes between
        # them must not keep the lease rows locked that its successor raises.
        self._settle.set("idle_in_transaction_session_timeout", silence)
        self._lock_session = Dedicated(self._connect, self._release, {**LOOP_SETTINGS, "idle_session_timeout": silence})
        return PostgresClusterLock(self._lock_session, owner, channel, max(heartbeat, 1.0))

    async def notify(self, channel: str, payload: str) -> None:
        notify = NOTIFY.format(channel, payload.replace("'", "''"))
        if self._lock_session is not None and self._lock_session.is_open:
            with suppress(asyncpg.InterfaceError):  # it is being given back, or has just ended
                await self._lock_session.execute(notify, timeout=NOTIFY_TIMEOUT)
                return
        async with asyncio.timeout(NOTIFY_TIMEOUT):
            connection, give_back = await self._check_out()
        try:
            await connection.execute(notify, timeout=NOTIFY_TIMEOUT)
        finally:
            if (giving := give_back(connection)) is not None:
                await to_the_end(giving)

    async def refuse_shared_sessions(self) -> None:
        """Two connections that are open at once never have one server process, unless a proxy shares it."""
        opened = [await self._connect()]
        try:
            pid = await _server_process(opened[0])
            opened.append(await self._connect())
            async with opened[1].transaction():
                if await _server_process(opened[1]) == pid:
                    raise PooledConnection(self.name)
        finally:
            await to_the_end(_all(map(self._release, opened)))

    def require_room(self, loops: int) -> None:
        if self._url is None and self._pool is not None:
            size, needed = self._pool.get_max_size(), loops + 1
            if size < needed:
                raise PoolTooSmall(self.name, size, needed, "max_size")

    @property
    def handler_transactions(self) -> int:
        largest = LARGEST_POOL if self._url is not None or self._pool is None else self._pool.get_max_size()
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
        return Dedicated(self._connect, self._release, LOOP_SETTINGS, keeps=keeps)

    async def _check_out(self) -> tuple[Any, GiveBack]:
        pool = self._pool
        if pool is not None:
            return await self._reaching(None, pool.acquire), partial(_give_back, pool)
        connection = await self._reaching(self._url, self._ours.acquire)
        connection.is_reset = False
        return connection, self._give_back_ours

    def _give_back_ours(self, connection: ActionConnection) -> Coroutine[Any, Any, None] | None:
        if not connection.is_reset and not connection.is_closed():
            return self._reset_and_give_back(connection)
        self._ours.release(connection)
        return None

    async def _reset_and_give_back(self, connection: ActionConnection) -> None:
        try:
            await connection.reset(timeout=ENDING_TIMEOUT)
        except Exception as error:
            # The action has ended, one way or the other, and this changes nothing about it.
            logger.warning("a connection could not be reset, the pool opens another in its place: %r", error)
            connection.terminate()
        finally:
            self._ours.release(connection)

    async def _connect_for_actions(self) -> Any:
        # A proxy that shares sessions forgets prepared statements between transactions.
        cache: Mapping[str, Any] = {"statement_cache_size": 0} if self._behind_proxy else {}
        return await asyncpg.connect(self._url, timeout=CONNECT_TIMEOUT, connection_class=ActionConnection, **cache)

    async def _connect(self) -> Any:
        """A connection for a loop: of our own if we have a URL, otherwise one of the given pool's."""
        if self._direct_url is None:
            assert self._pool is not None
            return await self._reaching(None, self._pool.acquire)
        url = self._direct_url
        # Statements stay prepared: to prepare them anew every five minutes would be a moment to freeze in (Dedicated).
        return await self._reaching(
            url, lambda: asyncpg.connect(url, timeout=CONNECT_TIMEOUT, max_cached_statement_lifetime=0)
        )

    async def _release(self, connection: Any) -> None:
        if self._direct_url is None:
            assert self._pool is not None
            await self._pool.release(connection)
        else:
            await _hang_up(connection)

    async def _reaching(self, url: str | None, connect: Callable[[], Any]) -> Any:
        try:
            return await connect()
        except (OSError, OverflowError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise DatabaseUnavailable(self.name, _where(url), str(error) or type(error).__name__) from error


async def _give_back(pool: asyncpg.Pool[Any], connection: Any) -> None:
    """Give a connection back to a given pool."""
    try:
        await pool.release(connection, timeout=ENDING_TIMEOUT)
    except Exception as error:
        # The action has ended, one way or the other, and this changes nothing about it.
        logger.warning("a connection could not be reset, the pool opens another in its place: %r", error)


async def _hang_up(connection: Any) -> None:
    await connection.close(timeout=FAREWELL_TIMEOUT)


def _where(url: str | None) -> str:
    """The address without the password."""
    if url is None:
        return "the given pool"
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2] or 'the local socket'}{parts.path}"


async def _all(coroutines: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*coroutines)


async def _server_process(connection: Any) -> int:
    pid: int = await connection.fetchval("SELECT pg_backend_pid()")
    return pid
