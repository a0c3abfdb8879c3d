"""The connection of a loop, and how statements run on any connection of aiomysql or asyncmy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

import msgspec

from outboxio.storage.connections.driver import DEFAULT_LIMITS, FAREWELL_TIMEOUT
from outboxio.storage.connections.loop_connection import BaseLoopConnection, LoopSource, OnlyReads
from outboxio.storage.mysql import driver, errors
from outboxio.storage.mysql.flavour import Server, Statement
from outboxio.support.aio import to_the_end
from outboxio.support.log import log_of

Arguments = Mapping[str, Any] | tuple[Any, ...] | None

# Changes no row; a server that is read only for most users refuses the statement.
CHANGES_NOTHING = "UPDATE eventlog.leases SET term = term WHERE name = ''"

_limits: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

MOST_BRANCHES = 32  # of a UNION ALL of probes: the planning of each takes time
MOST_DEADLOCKS = 5  # of a statement: the server chooses the victim, and a few deadlocks in a row are bad luck

# The only list of the session variables that our statements depend on. With these settings the statements mean the same
# on every server, with any defaults, and on the connections of any pool or engine. The products' own variables are in
# flavour.py. Statements of ours that run on the application's sessions depend on none of the variables.
# tests/contract/test_session_variables.py has a hostile value for each variable.
# * READ COMMITTED (set in prepare): under REPEATABLE READ an idle poll locks the gaps in which producers insert.
# * autocommit: without autocommit the first SELECT opens a transaction and a snapshot.
# * completion_type: a COMMIT neither begins another transaction nor ends the session.
# * sql_mode: strict, but without NO_ZERO_DATE. Fan-out copies a zero date that an operator has written into an event;
#   a refusal would stop the fan-out of all events.
# * sql_safe_updates: MariaDB refuses an UPDATE that finds its rows through a join.
# * sql_big_selects: a server with a small max_join_size refuses joins.
# * sql_select_limit, group_concat_max_len (also the limit of JSON_ARRAYAGG on MariaDB), max_sort_length: the server
#   leaves out rows, ends of texts, and differences between long texts, without an error.
# * unique_checks: InnoDB may accept duplicates without. foreign_key_checks: a key that an operator has added holds.
# * time_zone, div_precision_increment, sql_auto_is_null and the character sets change the values of expressions. A
#   narrower character set loses characters without an error.
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
# Behind a SELECT on a session of the application, whose sql_select_limit would leave out rows.
ALL_ROWS = f"LIMIT {_NO_LIMIT}"


class LoopConnection(BaseLoopConnection):
    """The connection that a loop keeps for itself."""

    def __init__(self, source: LoopSource, server: Server, *, keeps: bool = True, writes: bool = True) -> None:
        super().__init__(source, keeps=keeps, writes=writes)
        self._server = server
        self._settings: dict[str, str | int] = dict(LOOP_SETTINGS)
        self._before: Mapping[str, Any] = {}
        """The session settings that the connection had before :meth:`prepare`."""
        self._longest_silence: int | None = None

    def set(self, name: str, value: str | int) -> None:
        """Add a session setting, from the next opening on."""
        self._settings[name] = value

    def end_silent_transactions(self, seconds: int) -> None:
        """Have the server end this session after ``seconds`` of silence within a transaction."""
        self._longest_silence = seconds

    async def fetch(
        self, statement: Statement, args: Arguments = None, timeout: float | None = None
    ) -> list[tuple[Any, ...]]:
        """Run an autocommit statement; the rows."""
        async with self.opened() as connection:
            return await fetch(connection, self._server.spell(statement), args, timeout)

    async def fetch_each(self, statements: Statement, args: Arguments = None) -> list[list[tuple[Any, ...]]]:
        """Run several autocommit statements in a single message; the rows of each."""
        async with self.opened() as connection:
            return await fetch_each(connection, self._server.spell(statements), args)

    async def fetch_all(self, part: str, number: int, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Run an autocommit statement, ``number`` times ``part``, joined by UNION ALL; the rows."""
        async with self.opened() as connection:
            return await fetch(connection, " UNION ALL ".join([part] * number), args)

    async def execute(self, statement: Statement, args: Arguments = None, timeout: float | None = None) -> int:
        """Run an autocommit statement; the number of rows that changed."""
        return int(
            await self.repeated(lambda connection: execute(connection, self._server.spell(statement), args, timeout))
        )

    async def repeated(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run an autocommit statement on the connection.

        After a deadlock, which undoes the whole statement, the statement runs again, at most ``MOST_DEADLOCKS`` times:
        processes that start together write the same rows.
        """
        async with self.opened() as connection:
            for _ in range(MOST_DEADLOCKS):
                try:
                    return await work(connection)
                except Exception as error:
                    if errors.number(error) != errors.DEADLOCK:
                        raise
            return await work(connection)

    async def in_transaction(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` on the connection in a transaction, committed unless ``work`` raises."""
        async with self.transaction() as (connection, begin, commit):
            await execute(connection, begin)
            result = await work(connection)
            await execute(connection, commit)
            return result

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[tuple[Any, str, str]]:
        """The connection, and the statements that begin and commit a transaction on the connection.

        The code in the block sends both, each in a message with further statements. If the block raises, the
        transaction is rolled back.
        """
        async with self.opened() as connection:
            shorten = restore = ""
            if self._longest_silence is not None:
                shorten = f"; {_set({'wait_timeout': self._longest_silence})}"
                restore = f"; {_set({'wait_timeout': self._before['wait_timeout']})}"
            try:
                yield connection, f"START TRANSACTION{shorten}", f"COMMIT{restore}"
            except BaseException:
                await to_the_end(self._roll_back(connection, restore))
                raise

    async def _roll_back(self, connection: Any, restore: str) -> None:
        if not self.is_closed(connection):
            try:
                await execute(connection, f"ROLLBACK{restore}", timeout=FAREWELL_TIMEOUT)
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
        # The default of the server stays: an administrator has made the server read only.
        await execute(connection, _set({**settings, flavour.read_only: before[3]}))

    async def _refuse_read_only(self, connection: Any) -> None:
        """Raise :class:`OnlyReads` if the server refuses our writes.

        A server that is read only for most users may still accept the writes of this user: only a write tells.
        """
        try:
            await execute(connection, CHANGES_NOTHING)
        except Exception as error:
            if not self.is_read_only(error):
                raise
            raise OnlyReads(str(error)) from error

    async def restore(self, connection: Any) -> None:
        await execute(connection, _set(self._before), timeout=FAREWELL_TIMEOUT)

    def is_closed(self, connection: Any) -> bool:
        return driver.is_closed(connection)

    def drop(self, connection: Any) -> None:
        drop(connection)

    def is_read_only(self, error: Exception) -> bool:
        return errors.is_read_only(error)


def limit(connection: Any, seconds: float) -> None:
    """Give each statement of ours on a connection ``seconds`` to be answered."""
    _limits[connection] = seconds


def limit_of(connection: Any) -> float:
    """Seconds within which the server must answer a statement of ours."""
    return _limits.get(connection, DEFAULT_LIMITS.statement_timeout)


def waits_for(connection: Any) -> Hashable | None:
    """A value that stays equal while the driver waits for one answer; ``None`` otherwise."""
    transport, waiter = driver.transport(connection), driver.reads(connection)
    if transport is None or waiter is None or driver.is_closed(connection):
        return None
    return waiter, transport.get_write_buffer_size()


async def send(connection: Any, server: Server, *messages: bytes) -> None:
    """Run messages on the connection of an action, in order. The statements return no rows.

    All actions share a timer, which drops the connection after ``statement_timeout``.
    """
    driver.refuse_second_reader(connection)
    for message in messages:
        server.unanswered.begin(connection, server.give_up)
        try:
            await connection.query(message)
            await driver.read_all(connection)
        finally:
            server.unanswered.end(connection)


async def run(connection: Any, sql: str | bytes, args: Arguments = None, timeout: float | None = None) -> Any:
    """Run a statement, or several with semicolons between them; the cursor after the last statement."""
    async with asyncio.timeout(timeout or limit_of(connection)):
        cursor = driver.cursor(connection, driver.QuietCursor)
        await cursor.execute(sql, args)
        while await cursor.nextset():
            pass
    return cursor


async def execute(connection: Any, sql: str | bytes, args: Arguments = None, timeout: float | None = None) -> int:
    """Run a statement; the number of rows that changed."""
    cursor = await run(connection, sql, args, timeout)
    return int(cursor.rowcount)


async def change_rows(connection: Any, sql: str, args: Arguments = None) -> int:
    """Run a statement; the number of rows that changed, and of an UPDATE all rows that were found."""
    cursor = await run(connection, sql, args)
    return driver.rows_found(cursor) if sql.startswith("UPDATE") else int(cursor.rowcount)


async def fetch(
    connection: Any, sql: str, args: Arguments = None, timeout: float | None = None
) -> list[tuple[Any, ...]]:
    """Run a statement; the rows."""
    return list(driver.rows(await run(connection, sql, args, timeout)))


async def execute_each(connection: Any, sql: str, args: Arguments = None) -> list[int]:
    """Run several statements in a single message; the number of rows that each statement changed."""
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
    """Run several statements in a single message; the rows of each statement that returns rows."""
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
    """True if the pool may give the connection to the next action: connected, and without an open transaction."""
    return not (driver.is_closed(connection) or connection.get_transaction_status())


async def hang_up(connection: Any) -> None:
    """Say goodbye to the server, and wait until the socket is closed.

    TLS has a goodbye too, which must not outlive the event loop: hence the wait. The wait for a server that does not
    answer ends after FAREWELL_TIMEOUT.
    """
    if driver.is_closed(connection):
        drop(connection)
        return
    transport = driver.transport(connection)
    try:
        async with asyncio.timeout(FAREWELL_TIMEOUT):
            await driver.say_goodbye(connection)
    except BaseException:
        if transport is not None:
            transport.abort()
        raise


def drop(connection: Any) -> None:
    """Close the connection at once; bytes that are not sent yet are lost."""
    transport = driver.transport(connection)
    if transport is not None:
        with suppress(Exception):
            transport.abort()
    connection.close()


def id_list(ids: Iterable[UUID | str]) -> str:
    """Ids for the inside of ``IN (...)``. UUIDs need no escaping."""
    return msgspec.json.encode(list(ids)).decode()[1:-1].replace('"', "'")


def _set(settings: Mapping[str, Any]) -> str:
    return "SET " + ", ".join(f"@@SESSION.{name} = {_literal(value)}" for name, value in settings.items())


def _literal(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


# --- between two actions ---------------------------------------------------------------------------
#
# Resetting the session of a connection between two actions (decision 9).
#
# An action can leave variables, temporary tables, named locks, a role or a selected database behind. The pool of
# aiomysql resets none of these. A reset of the connection by the server is a further round trip, so that outboxio asks
# for a reset only after statements that may change the session. Plain reads and writes of rows do not.

logger = log_of(__name__)

RESTORING_TIMEOUT = 10.0  # seconds before the connection is dropped instead

# An expression may set a variable with := or INTO; the name begins with an @. Changes by stored functions and triggers
# are not recognized. Named locks are, because a statement of the action calls GET_LOCK.
_LEAVES_NOTHING = re.compile(
    r"\s*(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|VALUES|SHOW|EXPLAIN|SAVEPOINT|RELEASE|ROLLBACK)\b[^;@]*\Z",
    re.IGNORECASE,
)
_NAMED_LOCK = "GET_LOCK"

# A reset keeps the role and the selected database, and sets the character set and autocommit to the server's defaults.
HOW_TO_RESTORE: Statement = {
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


def may_leave_something(sql: str) -> bool:
    """True if a statement may change the session of the connection."""
    return _LEAVES_NOTHING.match(sql) is None or _NAMED_LOCK in sql.upper()


async def learn_to_restore(connection: Any, server: Server) -> None:
    """Remember the statements that restore a new connection.

    ``None`` if no database is selected: no statement returns to that state.
    """
    (row,) = await fetch(connection, server.spell(HOW_TO_RESTORE))
    connection.how_to_restore = row[0]


async def restore(connection: Any) -> None:
    """Restore the session to the state after the opening, or drop the connection."""
    if not is_usable(connection):
        return
    if connection.how_to_restore is None:
        drop(connection)
        return
    try:
        async with asyncio.timeout(RESTORING_TIMEOUT):
            await driver.reset(connection, connection.how_to_restore.encode())
    except Exception as error:
        # The action has ended already, so that the error does not matter to the action.
        logger.warning("a connection could not be reset, the pool opens another in its place: %r", error)
        drop(connection)
