"""Connecting to MySQL and MariaDB from outside, with the driver that outboxio uses for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import aiomysql

try:
    from asyncmy.errors import MySQLError as AsyncmyError
except ImportError:  # no extra includes asyncmy, so it is missing in the check of the lowest versions
    AsyncmyError = aiomysql.MySQLError

#: The errors of the driver that outboxio uses, and of asyncmy in an engine.
DRIVER_ERRORS = (aiomysql.MySQLError, AsyncmyError)

SCHEMES = frozenset({"mysql", "mariadb"})


def scheme_of(url: str) -> str:
    """The scheme of a URL."""
    return urlsplit(url).scheme.partition("+")[0]


def address(url: str) -> dict[str, Any]:
    """The arguments of ``aiomysql.connect`` and ``aiomysql.create_pool`` for a URL."""
    parts = urlsplit(url)
    options = {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username and unquote(parts.username),
        "password": parts.password and unquote(parts.password),
        "db": unquote(parts.path[1:]),
        "unix_socket": parse_qs(parts.query).get("unix_socket", [None])[0],
        "charset": "utf8mb4",
    }
    return {name: value for name, value in options.items() if value}


def pool(url: str, **options: Any) -> Any:
    """A pool of aiomysql, with options as aiomysql names them."""
    return aiomysql.create_pool(**address(url), **options)


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[aiomysql.Connection]:
    """A connection that commits every statement by itself and answers with dicts."""
    usual = {"autocommit": True, "cursorclass": aiomysql.DictCursor, "connect_timeout": 5}
    connection = await aiomysql.connect(**(address(url) | usual | options))
    try:
        yield connection
    finally:
        await connection.ensure_closed()
        await asyncio.sleep(0)  # the socket is closed in the loop's next turn


async def fetch(connection: aiomysql.Connection, sql: str, args: tuple[Any, ...] = ()) -> list[Any]:
    """The rows of one statement, whose placeholders are ``%s``; empty for a statement without rows."""
    async with connection.cursor() as cursor:
        # Without arguments the driver leaves percent signs alone.
        await cursor.execute(sql, args or None)
        return list(await cursor.fetchall() or ())


class _Unwarned(aiomysql.DictCursor):
    """A cursor that does not fetch warnings, which the driver would turn into Python warnings."""

    async def _show_warnings(self, connection: aiomysql.Connection) -> None:
        pass


async def sessions(connection: aiomysql.Connection) -> list[dict[str, Any]]:
    """The remaining sessions of the server: their ``Id``, ``db``, ``Command``, ``State``, ``Info`` (the statement)."""
    # MySQL 9 warns that the view is deprecated; its successor needs performance_schema, which is off here.
    async with connection.cursor(_Unwarned) as cursor:
        await cursor.execute("SHOW FULL PROCESSLIST")
        return [row for row in await cursor.fetchall() if row["Id"] != connection.thread_id()]


async def waiting_for_rows(connection: aiomysql.Connection) -> set[int]:
    """The ``Id`` of the sessions that wait for a lock of InnoDB."""
    await asyncio.sleep(0.11)  # a client that queries more often than every 0.1 s always gets the first answer
    rows = await fetch(
        connection,
        "SELECT trx_mysql_thread_id AS Id FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'",
    )
    return {row["Id"] for row in rows}


_NO_SUCH_SESSION = 1094


async def kill(connection: aiomysql.Connection, session: int) -> None:
    """End a session, unless it has just ended."""
    try:
        await fetch(connection, f"KILL {session}")
    except aiomysql.Error as error:
        if error.args[0] != _NO_SUCH_SESSION:
            raise


async def run_all(connection: aiomysql.Connection, script: str) -> None:
    """Run all statements of a text on a connection with ``MULTI_STATEMENTS``, and ignore warnings."""
    async with connection.cursor(_Unwarned) as cursor:
        await cursor.execute(script)
        while await cursor.nextset():
            pass
