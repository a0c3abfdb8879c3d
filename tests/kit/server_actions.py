"""Actions and queries of tests on a server, per product: sessions, and pools of the driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import asyncpg
from asyncpg.exceptions import InternalClientError

from outboxio import CommitUnknown, DatabaseUnavailable, Outbox
from outboxio.storage.mysql.driver import is_closed
from tests.kit import mysql, postgres
from tests.kit.app import eventually
from tests.kit.background_loop import in_background
from tests.kit.inside import database_of, is_running, locks_of


class ServerActions(Protocol):
    """A server, accessed through the test's database."""

    #: The errors of an action whose connection is cut.
    cut: tuple[type[BaseException], ...]
    #: A statement that only the connection with the cluster locks sends.
    lock_statement: bytes
    #: A statement with which a session ends itself.
    hang_up: str
    #: The name of the option for the most connections in a pool's constructor.
    size_option: str

    def pool(self, size: int = 10) -> Any:
        """A pool of the driver, as an application makes it: an async context manager."""
        ...

    def is_exhausted(self, pool: Any) -> bool:
        """True if all connections that the pool may have are in use."""
        ...

    async def becomes_idle(self, pool: Any) -> None:
        """Wait until no connection of the pool is in use. A task sends wake-ups after an action has returned."""
        ...

    def outbox_sessions(self, outbox: Outbox) -> dict[str, int]:
        """The server's ids of an outbox's connections, by purpose; ``pool``: an idle connection of actions."""
        ...

    async def sessions(self) -> list[dict[str, Any]]:
        """The sessions on the test's database, except for the querying one."""
        ...

    async def blocked_sessions(self, words: str) -> list[int]:
        """The sessions of the test's database that wait for a lock with such a statement."""
        ...

    async def locks(self) -> list[Any]:
        """The cluster locks that sessions of the test's database hold, where the server can list them."""
        ...

    async def end(self, sessions: Sequence[int]) -> None:
        """End sessions at once, as an administrator would."""
        ...


def actions_on(url: str) -> ServerActions:
    return MysqlActions(url) if mysql.scheme_of(url) in mysql.SCHEMES else PostgresActions(url)


def _dedicated(outbox: Outbox) -> dict[str, Any]:
    """The open driver connections of the loops of an outbox."""
    database = database_of(outbox)
    ours = {
        "lock": lock_session(locks_of(outbox)._lock) if is_running(outbox) else None,
        "find": database._find,
        "settle": database._settle,
        "fanout": database._fanout,
        "admin": database._admin,
    }
    return {name: each._connection for name, each in ours.items() if each is not None and _is_open(each)}


def lock_session(lock: Any) -> Any:
    """The session of a cluster lock, also where the lock lives in a thread."""
    return getattr(lock, "_inner", lock)._session


def _is_open(dedicated: Any) -> bool:
    """True if there is a connection, whatever event loop it belongs to."""
    return dedicated._connection is not None and not dedicated.is_closed(dedicated._connection)


class PostgresActions:
    # The last is asyncpg's error between the server's farewell and the end of the stream.
    cut = (
        CommitUnknown, DatabaseUnavailable, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, InternalClientError,
    )  # fmt: skip
    lock_statement = b"LISTEN"
    hang_up = "SELECT pg_terminate_backend(pg_backend_pid())"
    size_option = "max_size"

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def pool(self, size: int = 10) -> AsyncIterator[asyncpg.Pool[Any]]:
        async with asyncpg.create_pool(self._url, min_size=0, max_size=size) as pool:
            yield pool

    def is_exhausted(self, pool: asyncpg.Pool[Any]) -> bool:
        return pool.get_size() == pool.get_max_size() and not pool.get_idle_size()

    async def becomes_idle(self, pool: asyncpg.Pool[Any]) -> None:
        await eventually(lambda: pool.get_idle_size() == pool.get_size())

    def outbox_sessions(self, outbox: Outbox) -> dict[str, int]:
        pids = {name: connection.get_server_pid() for name, connection in _dedicated(outbox).items()}
        database = database_of(outbox)
        if database._pool is None:
            idle = [connection for _, connection in database._action_pool._idle]
        else:
            holders = database._pool._holders
            idle = [holder._con for holder in holders if holder._con is not None and not holder._in_use]
        return pids | ({"pool": idle[0].get_server_pid()} if idle else {})

    async def sessions(self) -> list[dict[str, Any]]:
        return await self._fetch(
            "SELECT pid, state, query, wait_event_type FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name <> $1",
            postgres.APPLICATION,
        )

    async def blocked_sessions(self, words: str) -> list[int]:
        sessions = await self.sessions()
        return [s["pid"] for s in sessions if s["wait_event_type"] == "Lock" and words in s["query"]]

    async def locks(self) -> list[Any]:
        return await self._fetch(
            "SELECT objid FROM pg_locks WHERE locktype = 'advisory'"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )

    async def end(self, sessions: Sequence[int]) -> None:
        await self._fetch("SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) pid", list(sessions))

    async def _fetch(self, statement: str, *args: Any) -> list[dict[str, Any]]:
        return await in_background(postgres.fetch(self._url, statement, args))


class MysqlActions:
    """MySQL and MariaDB."""

    cut = (CommitUnknown, DatabaseUnavailable, *mysql.DRIVER_ERRORS, OSError)
    lock_statement = b"GET_LOCK"
    hang_up = "KILL CONNECTION_ID()"
    size_option = "maxsize"

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def pool(self, size: int = 10) -> AsyncIterator[Any]:
        async with mysql.pool(self._url, minsize=0, maxsize=size) as pool:
            yield pool

    def is_exhausted(self, pool: Any) -> bool:
        return pool.size == pool.maxsize and not pool.freesize

    async def becomes_idle(self, pool: Any) -> None:
        await eventually(lambda: pool.freesize == pool.size)

    def outbox_sessions(self, outbox: Outbox) -> dict[str, int]:
        ids = {name: connection.thread_id() for name, connection in _dedicated(outbox).items()}
        database = database_of(outbox)
        if database._pool is None:
            free = [connection for _, connection in database._action_pool._idle]
        else:
            free = list(database._pool._free)
        idle = [connection for connection in free if not is_closed(connection)]
        return ids | ({"pool": idle[0].thread_id()} if idle else {})

    async def sessions(self) -> list[dict[str, Any]]:
        async with mysql.connected(self._url) as connection:
            name = urlsplit(self._url).path[1:]
            return [session for session in await mysql.sessions(connection) if session["db"] == name]

    async def blocked_sessions(self, words: str) -> list[int]:
        async with mysql.connected(self._url) as connection:
            waiting = await mysql.waiting_for_rows(connection)
        return [
            session["Id"]
            for session in await self.sessions()
            if session["Id"] in waiting or str(session["State"]).startswith("Waiting for table")
            if words in str(session["Info"])
        ]

    async def locks(self) -> list[Any]:
        return []  # without performance_schema the locks cannot be listed; each ends with its session

    async def end(self, sessions: Sequence[int]) -> None:
        async with mysql.connected(self._url) as connection:
            for session in sessions:
                await mysql.kill(connection, session)


@asynccontextmanager
async def with_password(url: str, password: str) -> AsyncIterator[str]:
    """The same database for a user with a password; a file has no users."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        yield url
    elif mysql.scheme_of(url) in mysql.SCHEMES:
        async with mysql.connected(url) as connection:
            await mysql.fetch(connection, f"CREATE USER teller IDENTIFIED BY '{password}'")
            await mysql.fetch(connection, "GRANT ALL ON *.* TO teller")
            try:
                yield parts._replace(netloc=f"teller:{password}@{parts.netloc.rpartition('@')[2]}").geturl()
            finally:
                await mysql.fetch(connection, "DROP USER teller")
    else:  # a server that trusts all clients accepts any password
        user, _, place = parts.netloc.rpartition("@")
        yield parts._replace(netloc=f"{user.partition(':')[0]}:{password}@{place}").geturl()
