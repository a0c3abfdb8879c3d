"""Loop connections, and the helpers that all statements share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from outboxio.errors import ConfigurationError
from outboxio.storage.connections.driver import CLOSE_TIMEOUT, DEFAULT_LIMITS
from outboxio.storage.connections.loop_connection import BaseLoopConnection, LoopSource, ServerIsReadOnly
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.errors import is_outdated
from outboxio.storage.postgres.server_info import READ_ONLY_REASON, encoding_of, is_read_only_server
from outboxio.support.codec import is_list
from outboxio.support.text import UTF_8, briefly

# All session settings that the statements of loops depend on. With these, the defaults of the database, of the user,
# and of a user-supplied pool or engine change neither the meaning nor the plan of a statement. Statements that run on
# sessions of your application depend on none of them. tests/contract/test_session_variables.py tries a hostile value
# for each setting.
# * Each statement of a loop is written for one plan: enable_* and the settings below keep the plan independent of the
#   statistics.
# * search_path: PostgreSQL prefers an operator or function with exactly matching arguments, in any schema of the path,
#   to a function of pg_catalog that needs a cast. So a user who may create objects in such a schema could run code with
#   the rights of outboxio.
# * statement_timeout (and transaction_timeout): the process itself limits the time of each statement.
# * lock_timeout is left to the operator, who may limit how long a migration waits; a loop retries.
# * default_transaction_read_only is respected: the server should not be written to (ServerIsReadOnly).
LOOP_SETTINGS: Mapping[str, str] = {
    "search_path": "pg_catalog, pg_temp",
    "client_encoding": "UTF8",
    "standard_conforming_strings": "on",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "array_nulls": "on",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "statement_timeout": "0",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "enable_indexscan": "on",
    "enable_indexonlyscan": "on",
    "enable_nestloop": "on",
    "from_collapse_limit": "8",
    "join_collapse_limit": "8",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}
_SINCE_17 = {"transaction_timeout": "0"}


class LoopConnection(BaseLoopConnection):
    """The connection of one loop.

    A statement with parameters is prepared at its first use, in a separate message. If the process freezes or the
    network fails before the next message, the server session is neither idle nor idle in a transaction. Then no timeout
    ends the session, and it keeps its locks. So while a loop connection holds locks, it only runs statements that were
    prepared before the locks were taken, or that have no parameters.
    """

    def __init__(
        self,
        source: LoopSource,
        *,
        timeout: float = DEFAULT_LIMITS.statement_timeout,
        keeps: bool = True,
        writes: bool = True,
    ) -> None:
        """``timeout``: the time limit of a statement in seconds, unless the method call overrides it."""
        super().__init__(source, keeps=keeps, writes=writes)
        self._settings = dict(LOOP_SETTINGS)
        self._timeout = timeout
        self.encoding = UTF_8
        """The encoding of the database, known once the connection has been opened."""

    @property
    def timeout(self) -> float:
        """The time limit of a statement, in seconds."""
        return self._timeout

    def set(self, name: str, value: str) -> None:
        """Add a session setting, which is applied the next time the connection is opened."""
        self._settings[name] = value

    async def fetch(self, sql: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Run an autocommit statement, and return the rows."""
        async with self.opened() as connection:
            try:
                rows: list[Any] = await connection.fetch(sql, *args, timeout=timeout or self._timeout)
            except errors.untranslatable() as error:
                raise self._refused(args, error) from error
            return rows

    async def execute(self, sql: str, *args: Any, timeout: float | None = None) -> int:
        """Run an autocommit statement, and return the number of affected rows."""
        async with self.opened() as connection:
            try:
                return row_count(await connection.execute(sql, *args, timeout=timeout or self._timeout))
            except errors.untranslatable() as error:
                raise self._refused(args, error) from error

    def _refused(self, args: Iterable[Any], error: Exception) -> Exception:
        """Return an error that quotes the argument which the database cannot store."""
        for value in args:
            for text in value if is_list(value) else [value]:
                if isinstance(text, str) and (reason := self.encoding.why_refused(text)) is not None:
                    return ConfigurationError(f"{briefly(text)} {reason}")
        return error

    async def look(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` on the connection without a transaction, within the time limit of one statement."""
        async with self.opened() as connection, asyncio.timeout(self._timeout):
            return await work(connection)

    async def in_transaction(self, work: Callable[[Any], Awaitable[Any]], *, timeout: float | None = None) -> Any:
        """Run ``work`` in one transaction within ``timeout`` seconds; COMMIT unless ``work`` raises.

        If a statement was prepared before a table changed, ``work`` runs a second time, and the driver prepares the
        statement again.
        """
        try:
            return await self._in_transaction(work, timeout)
        except Exception as error:
            if not is_outdated(error):
                raise
        return await self._in_transaction(work, timeout)

    async def _in_transaction(self, work: Callable[[Any], Awaitable[Any]], timeout: float | None) -> Any:
        async with self.opened() as connection:
            # A timer drops the connection. A cancellation would not help, because the driver would wait for the
            # response to ROLLBACK.
            loop = asyncio.get_running_loop()
            timer = None if timeout is None else loop.call_later(timeout, self._on_timeout, connection)
            has_begun = False
            try:
                async with connection.transaction():
                    has_begun = True
                    return await work(connection)
            except BaseException as error:
                # After an interrupted BEGIN or ROLLBACK the transaction may still be open, and later statements would
                # become a part of it.
                if not (has_begun and isinstance(error, Exception) and is_usable(connection)):
                    self.drop(connection)
                raise
            finally:
                if timer is not None:
                    timer.cancel()

    def _on_timeout(self, connection: Any) -> None:
        self.drop(connection)
        self._observer.unanswered()

    async def prepare(self, connection: Any) -> None:
        if self._writes and is_read_only_server(connection):
            raise ServerIsReadOnly(READ_ONLY_REASON)
        self.encoding = encoding_of(connection)
        await connection.execute(applying(self._settings_for(connection)), timeout=self._timeout)

    async def restore(self, connection: Any) -> None:
        names = self._settings_for(connection)
        await connection.execute("; ".join(f"RESET {name}" for name in names), timeout=CLOSE_TIMEOUT)

    def _settings_for(self, connection: Any) -> Mapping[str, str]:
        return {**self._settings, **(_SINCE_17 if connection.get_server_version().major >= 17 else {})}

    def is_closed(self, connection: Any) -> bool:
        """True if the connection is unusable: closed, or reclaimed by a user-supplied pool after it was lost."""
        try:
            return bool(connection.is_closed())
        except errors.named("Interface"):
            return True

    def drop(self, connection: Any) -> None:
        drop(connection)

    def is_read_only(self, error: Exception) -> bool:
        return errors.is_read_only(error)


def underlying(connection: Any) -> Any:
    """Return the driver's connection behind a pool's proxy."""
    return getattr(connection, "_con", None) or connection


def is_usable(connection: Any) -> bool:
    """True if the connection is open and has no transaction open."""
    return not (connection.is_closed() or connection.is_in_transaction())


def drop(connection: Any) -> None:
    """Close the connection immediately, without notifying the server."""
    with suppress(*errors.named("Interface")):  # the pool has already taken the connection back
        connection.terminate()


def applying(settings: Mapping[str, str]) -> str:
    """Return the statement that applies session settings."""
    return "SELECT " + ", ".join(
        f"pg_catalog.set_config('{name}', '{value}', FALSE)" for name, value in settings.items()
    )


def quoted(text: str) -> str:
    """Quote a text as a literal that does not depend on the setting ``standard_conforming_strings``."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def row_count(status: str) -> int:
    """Return the number in a command tag such as ``UPDATE 3``; 0 for a tag without a number."""
    number = status.rpartition(" ")[2]
    return int(number) if number.isdecimal() else 0


# --- drivers ---------------------------------------------------------------------------------------
#
# asyncpg, and psycopg 3 with the methods of asyncpg (decision 81).


def connections_of(driver: str) -> Any:
    """Import the connection module of a driver."""
    if driver == "psycopg":
        from outboxio.storage.postgres import psycopg_connection

        return psycopg_connection
    from outboxio.storage.postgres import asyncpg_connection

    return asyncpg_connection


def as_asyncpg(connection: Any, *, begins: bool = False) -> Any | None:
    """Return a user-supplied connection with the methods of asyncpg; ``None`` if its driver is not supported.

    ``begins``: the transaction may begin with the next statement, as in psycopg without ``autocommit``.
    """
    asyncpg, psycopg = sys.modules.get("asyncpg"), sys.modules.get("psycopg")
    if asyncpg is not None and isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        return connection
    if psycopg is not None and isinstance(connection, psycopg.AsyncConnection):
        from outboxio.storage.postgres.psycopg_adapter import PsycopgConnection

        return PsycopgConnection(connection, begins=begins)
    return None
