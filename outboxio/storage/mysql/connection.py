"""Loop connections, and functions that run statements on any connection of aiomysql or asyncmy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

import msgspec

from outboxio.storage.connections.driver import CLOSE_TIMEOUT, DEFAULT_LIMITS
from outboxio.storage.connections.loop_connection import BaseLoopConnection, LoopSource, ServerIsReadOnly
from outboxio.storage.mysql import driver, errors
from outboxio.storage.mysql.flavour import Server, Statement
from outboxio.support.aio import run_to_completion
from outboxio.support.log import log_of

Arguments = Mapping[str, Any] | tuple[Any, ...] | None

# Changes no row, and fails on a server that is read-only for the user.
WRITE_PROBE = "UPDATE eventlog.leases SET term = term WHERE name = ''"

_limits: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

MAX_BRANCHES = 32  # of a UNION ALL: each takes time to plan
MAX_DEADLOCKS = 5  # of a statement, before the error is raised

# All session variables that the statements of loops depend on. With these, the defaults of the server, and of a
# user-supplied pool or engine, do not change the meaning of a statement. flavour.py has the variables of each product.
# Statements that run on sessions of your application depend on none of them. tests/contract/test_session_variables.py
# tries a hostile value for each variable.
# * READ COMMITTED (set in prepare): under REPEATABLE READ, an idle poll locks the gaps in which producers insert.
# * autocommit: without it, the first SELECT opens a transaction and a snapshot.
# * completion_type: a COMMIT neither begins another transaction nor closes the session.
# * sql_mode: strict, but without NO_ZERO_DATE. Fan-out copies a zero date that an operator has written into an event;
#   an error would stop the fan-out of all events.
# * sql_safe_updates: MariaDB rejects an UPDATE that finds its rows through a join.
# * sql_big_selects: a server with a small max_join_size rejects joins.
# * sql_select_limit, group_concat_max_len (also the limit of JSON_ARRAYAGG on MariaDB), max_sort_length: the server
#   silently drops rows, truncates texts, and ignores differences between long texts.
# * unique_checks: without it, InnoDB may accept duplicates. foreign_key_checks: enforces keys that an operator added.
# * time_zone, div_precision_increment, sql_auto_is_null and the character sets change the values of expressions. A
#   smaller character set silently loses characters.
_NO_LIMIT = 2**64 - 1
LOOP_SETTINGS: Mapping[str, str | int] = {
    "autocommit": 1,
    "completion_type": 0,
    "sql_mode": "STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION",
    "sql_safe_updates": 0,
    "sql_big_selects": 1,
    "sql_select_limit": _NO_LIMIT,
    "sql_auto_is_null": 0,
    "innodb_lock_wait_timeout": 10,
    "group_concat_max_len": 2**30,
    "max_sort_length": 1024,
    "div_precision_increment": 4,
    "unique_checks": 1,
    "foreign_key_checks": 1,
    "time_zone": "+00:00",
    "character_set_client": "utf8mb4",
    "character_set_connection": "utf8mb4",
    "character_set_results": "utf8mb4",
    "sql_notes": 0,
}
# Appended to a SELECT on a session of your application, whose sql_select_limit would drop rows.
ALL_ROWS = f"LIMIT {_NO_LIMIT}"


class LoopConnection(BaseLoopConnection):
    """The connection of one loop."""

    def __init__(self, source: LoopSource, server: Server, *, keeps: bool = True, writes: bool = True) -> None:
        super().__init__(source, keeps=keeps, writes=writes)
        self._server = server
        self._settings: dict[str, str | int] = dict(LOOP_SETTINGS)
        self._before: Mapping[str, Any] = {}
        """The session settings before :meth:`prepare`."""
        self._longest_silence: int | None = None

    def set(self, name: str, value: str | int) -> None:
        """Add a session setting, which is applied the next time the connection is opened."""
        self._settings[name] = value

    def end_silent_transactions(self, seconds: int) -> None:
        """Make the server close this session when it is idle in a transaction for ``seconds``."""
        self._longest_silence = seconds

    async def fetch(
        self, statement: Statement, args: Arguments = None, timeout: float | None = None
    ) -> list[tuple[Any, ...]]:
        """Run an autocommit statement, and return the rows."""
        async with self.opened() as connection:
            return await fetch(connection, self._server.sql_for(statement), args, timeout)

    async def fetch_each(self, statements: Statement, args: Arguments = None) -> list[list[tuple[Any, ...]]]:
        """Run several autocommit statements in a single message, and return the rows of each."""
        async with self.opened() as connection:
            return await fetch_each(connection, self._server.sql_for(statements), args)

    async def fetch_all(self, part: str, number: int, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Run ``part``, repeated ``number`` times with UNION ALL, and return the rows."""
        async with self.opened() as connection:
            return await fetch(connection, " UNION ALL ".join([part] * number), args)

    async def execute(self, statement: Statement, args: Arguments = None, timeout: float | None = None) -> int:
        """Run an autocommit statement, and return the number of changed rows."""
        return int(
            await self.repeated(lambda connection: execute(connection, self._server.sql_for(statement), args, timeout))
        )

    async def repeated(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run an autocommit statement on the connection, and retry it after a deadlock.

        A deadlock rolls back the whole statement. It is retried up to ``MAX_DEADLOCKS`` times, because processes that
        start at the same time write the same rows.
        """
        async with self.opened() as connection:
            for _ in range(MAX_DEADLOCKS):
                try:
                    return await work(connection)
                except Exception as error:
                    if errors.number(error) != errors.DEADLOCK:
                        raise
            return await work(connection)

    async def in_transaction(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` in one transaction; COMMIT unless ``work`` raises."""
        async with self.transaction() as (connection, begin, commit):
            await execute(connection, begin)
            result = await work(connection)
            await execute(connection, commit)
            return result

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[tuple[Any, str, str]]:
        """Yield the connection, and the statements that begin and commit a transaction on it.

        The block sends both, each in a message with further statements. If it raises, the transaction is rolled back.
        """
        async with self.opened() as connection:
            shorten = restore = ""
            if self._longest_silence is not None:
                shorten = f"; {_set({'wait_timeout': self._longest_silence})}"
                restore = f"; {_set({'wait_timeout': self._before['wait_timeout']})}"
            try:
                yield connection, f"START TRANSACTION{shorten}", f"COMMIT{restore}"
            except BaseException:
                await run_to_completion(self._roll_back(connection, restore))
                raise

    async def _roll_back(self, connection: Any, restore: str) -> None:
        if not self.is_closed(connection):
            try:
                await execute(connection, f"ROLLBACK{restore}", timeout=CLOSE_TIMEOUT)
            except Exception:
                self.drop(connection)

    async def prepare(self, connection: Any) -> None:
        flavour = self._server.flavour
        settings = {
            **self._settings,
            **flavour.loop_settings,
            flavour.isolation: "READ-COMMITTED",
            "collation_connection": flavour.collation,
        }
        read = list(dict.fromkeys((*settings, flavour.read_only, "wait_timeout")))
        names = ", ".join(f"@@SESSION.{name}" for name in read)
        read_only = f"@@GLOBAL.{flavour.read_only}"
        of_server = f"@@max_allowed_packet, @@GLOBAL.innodb_read_only, @@GLOBAL.read_only, {read_only}"
        (before,) = await fetch(connection, f"SELECT {of_server}, {names}")
        self._server.largest_packet = before[0]
        if self._writes and any(before[1:4]):
            await self._refuse_read_only(connection)
        self._before = dict(zip(read, before[4:], strict=True))
        # Keep the server's default: an administrator has made the server read-only.
        await execute(connection, _set({**settings, flavour.read_only: before[3]}))

    async def _refuse_read_only(self, connection: Any) -> None:
        """Raise :class:`ServerIsReadOnly` if the server rejects writes.

        A server that is read-only for most users may accept the writes of this user, which only a write can show.
        """
        try:
            await execute(connection, WRITE_PROBE)
        except Exception as error:
            if not self.is_read_only(error):
                raise
            raise ServerIsReadOnly(str(error)) from error

    async def restore(self, connection: Any) -> None:
        await execute(connection, _set(self._before), timeout=CLOSE_TIMEOUT)

    def is_closed(self, connection: Any) -> bool:
        return driver.is_closed(connection)

    def drop(self, connection: Any) -> None:
        drop(connection)

    def is_read_only(self, error: Exception) -> bool:
        return errors.is_read_only(error)


def limit(connection: Any, seconds: float) -> None:
    """Set the time limit of outboxio's statements on a connection."""
    _limits[connection] = seconds


def limit_of(connection: Any) -> float:
    """Return the time limit of outboxio's statements on a connection, in seconds."""
    return _limits.get(connection, DEFAULT_LIMITS.statement_timeout)


def waits_for(connection: Any) -> Hashable | None:
    """Identify the response that the driver waits for; ``None`` if it waits for none."""
    transport, waiter = driver.transport(connection), driver.reads(connection)
    if transport is None or waiter is None or driver.is_closed(connection):
        return None
    return waiter, transport.get_write_buffer_size()


async def send(connection: Any, server: Server, *messages: bytes) -> None:
    """Send messages on the connection of an action, in order. The statements return no rows.

    All actions share a timer, which drops the connection after ``statement_timeout``.
    """
    driver.refuse_second_reader(connection)
    for message in messages:
        server.statement_limit.begin(connection, server.on_timeout)
        try:
            await connection.query(message)
            await driver.read_all(connection)
        finally:
            server.statement_limit.end(connection)


async def run(connection: Any, sql: str | bytes, args: Arguments = None, timeout: float | None = None) -> Any:
    """Run one or several statements, separated by semicolons, and return the cursor after the last one."""
    async with asyncio.timeout(timeout or limit_of(connection)):
        cursor = driver.cursor(connection, driver.QuietCursor)
        await cursor.execute(sql, args)
        while await cursor.nextset():
            pass
    return cursor


async def execute(connection: Any, sql: str | bytes, args: Arguments = None, timeout: float | None = None) -> int:
    """Run a statement, and return the number of changed rows."""
    cursor = await run(connection, sql, args, timeout)
    return int(cursor.rowcount)


async def change_rows(connection: Any, sql: str, args: Arguments = None) -> int:
    """Run a statement, and return the number of changed rows; for an UPDATE, the number of matching rows."""
    cursor = await run(connection, sql, args)
    return driver.rows_found(cursor) if sql.startswith("UPDATE") else int(cursor.rowcount)


async def fetch(
    connection: Any, sql: str, args: Arguments = None, timeout: float | None = None
) -> list[tuple[Any, ...]]:
    """Run a statement, and return the rows."""
    return list(driver.rows(await run(connection, sql, args, timeout)))


async def execute_each(connection: Any, sql: str, args: Arguments = None) -> list[int]:
    """Run several statements in a single message, and return the number of rows that each changed."""
    counts: list[int] = []
    async with asyncio.timeout(limit_of(connection)):
        cursor = driver.cursor(connection, driver.QuietCursor)
        await cursor.execute(sql, args)
        has_more = True
        while has_more:
            counts.append(int(cursor.rowcount))
            has_more = await cursor.nextset()
    return counts


async def fetch_each(connection: Any, sql: str, args: Arguments = None) -> list[list[tuple[Any, ...]]]:
    """Run several statements in a single message, and return the rows of each that has a result."""
    results: list[list[tuple[Any, ...]]] = []
    async with asyncio.timeout(limit_of(connection)):
        cursor = driver.cursor(connection, driver.QuietCursor)
        await cursor.execute(sql, args)
        has_more = True
        while has_more:
            if cursor.description is not None:
                results.append(list(driver.rows(cursor)))
            has_more = await cursor.nextset()
    return results


def is_usable(connection: Any) -> bool:
    """True if the connection is open and has no transaction open."""
    return not (driver.is_closed(connection) or connection.get_transaction_status())


async def hang_up(connection: Any) -> None:
    """Close the connection gracefully, and wait until the socket is closed.

    The wait is for the TLS shutdown, which must not outlive the event loop. If the server does not respond, it ends
    after CLOSE_TIMEOUT.
    """
    if driver.is_closed(connection):
        drop(connection)
        return
    transport = driver.transport(connection)
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await driver.close_gracefully(connection)
    except BaseException:
        if transport is not None:
            transport.abort()
        raise


def drop(connection: Any) -> None:
    """Close the connection immediately; unsent bytes are lost."""
    transport = driver.transport(connection)
    if transport is not None:
        with suppress(Exception):
            transport.abort()
    connection.close()


def id_list(ids: Iterable[UUID | str]) -> str:
    """Format ids for ``IN (...)``. UUIDs need no escaping."""
    return msgspec.json.encode(list(ids)).decode()[1:-1].replace('"', "'")


def _set(settings: Mapping[str, Any]) -> str:
    return "SET " + ", ".join(f"@@SESSION.{name} = {_literal(value)}" for name, value in settings.items())


def _literal(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


# --- session reset ---------------------------------------------------------------------------------
#
# The session of a connection is reset between two actions (decision 9).
#
# An action can change variables, temporary tables, named locks, the role or the selected database, and aiomysql's pool
# resets none of these. A reset by the server takes another round trip, so outboxio only requests it after statements
# that may change the session. Plain reads and writes of rows do not.

logger = log_of(__name__)

RESTORE_TIMEOUT = 10.0  # seconds before the connection is dropped instead

# An expression may set a variable with := or INTO; its name starts with @. Changes by stored functions and triggers are
# not detected. Named locks are, because a statement of the action contains GET_LOCK.
_KEEPS_SESSION = re.compile(
    r"\s*(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|VALUES|SHOW|EXPLAIN|SAVEPOINT|RELEASE|ROLLBACK)\b[^;@]*\Z",
    re.IGNORECASE,
)
_NAMED_LOCK = "GET_LOCK"

# A reset keeps the role and the selected database, and sets the character set and autocommit to the server defaults.
FIND_RESTORE_SQL: Statement = {
    "mysql": """
SELECT CONCAT('USE `', REPLACE(DATABASE(), '`', '``'), '`; SET NAMES ', @@character_set_client, ' COLLATE ',
  @@collation_connection, '; SET autocommit = ', @@autocommit, '; SET ROLE ', CURRENT_ROLE())
""",
    "mariadb": """
SELECT CONCAT('USE `', REPLACE(DATABASE(), '`', '``'), '`; SET NAMES ', @@character_set_client, ' COLLATE ',
  @@collation_connection, '; SET autocommit = ', @@autocommit, '; SET ROLE ',
  IF(CURRENT_ROLE() IS NULL, 'NONE', QUOTE(CURRENT_ROLE())))
""",
}


def may_change_session(sql: str) -> bool:
    """True if a statement may change the state of the session."""
    return _KEEPS_SESSION.match(sql) is None or _NAMED_LOCK in sql.upper()


async def read_restore_sql(connection: Any, server: Server) -> None:
    """Store the statements that restore a new connection in ``connection.restore_sql``.

    ``None`` if no database is selected, because no statement can restore that.
    """
    (row,) = await fetch(connection, server.sql_for(FIND_RESTORE_SQL))
    connection.restore_sql = row[0]


async def restore(connection: Any) -> None:
    """Restore the session to its initial state, or drop the connection."""
    if not is_usable(connection):
        return
    if connection.restore_sql is None:
        drop(connection)
        return
    try:
        async with asyncio.timeout(RESTORE_TIMEOUT):
            await driver.reset(connection, connection.restore_sql.encode())
    except Exception as error:
        # The action has finished: an error of the reset must not change its result.
        logger.warning("connection could not be reset; the pool will open a new one: %r", error)
        drop(connection)
