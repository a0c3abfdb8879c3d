"""Connections of the loops, and statements on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID

import msgspec

from outboxio.storage.dedicated import FAREWELL_TIMEOUT, STATEMENT_TIMEOUT, Connect, DedicatedConnection, Release
from outboxio.storage.mysql import errors
from outboxio.storage.mysql.driver import driver_of
from outboxio.storage.mysql.flavour import Server, Statement
from outboxio.waiting import to_the_end

Arguments = Mapping[str, Any] | tuple[Any, ...] | None

MOST_DEADLOCKS = 5  # of one statement; the server chooses whom it ends, and a few in a row are bad luck

# Our statements mean the same whatever the server's defaults are. READ COMMITTED: under REPEATABLE READ an idle poll
# locks the gaps in which producers insert. autocommit: else the first SELECT opens a transaction and a snapshot.
# group_concat_max_len: also the limit of JSON_ARRAYAGG on MariaDB.
LOOP_SETTINGS: Mapping[str, str | int] = {
    "autocommit": 1,
    "sql_mode": "STRICT_ALL_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION",
    "innodb_lock_wait_timeout": 10,
    "group_concat_max_len": 2**30,
    "sql_notes": 0,
}


class Dedicated(DedicatedConnection):
    """One connection for one loop."""

    def __init__(self, connect: Connect, release: Release, server: Server, *, keeps: bool = True) -> None:
        super().__init__(connect, release, keeps=keeps)
        self._server = server
        self._settings: dict[str, str | int] = dict(LOOP_SETTINGS)
        self._before: Mapping[str, Any] = {}
        self._longest_silence: int | None = None

    def set(self, name: str, value: str | int) -> None:
        """Apply a session setting as well, from the next opening on."""
        self._settings[name] = value

    def end_silent_transactions(self, seconds: int) -> None:
        """Let the server end this session when it is silent for so long within a transaction."""
        self._longest_silence = seconds

    async def fetch(
        self, statement: Statement, args: Arguments = None, timeout: float = STATEMENT_TIMEOUT
    ) -> list[tuple[Any, ...]]:
        """Run one autocommit statement; its rows."""
        async with self.opened() as connection:
            return await fetch(connection, self._server.spell(statement), args, timeout)

    async def fetch_each(self, statements: Statement, args: Arguments = None) -> list[list[tuple[Any, ...]]]:
        """Run several autocommit statements in one message; the rows of each."""
        async with self.opened() as connection:
            return await fetch_each(connection, self._server.spell(statements), args)

    async def fetch_all(self, part: str, number: int, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Run one autocommit statement that is so many times ``part``, joined by UNION ALL; its rows."""
        async with self.opened() as connection:
            return await fetch(connection, " UNION ALL ".join([part] * number), args)

    async def execute(self, statement: Statement, args: Arguments = None, timeout: float = STATEMENT_TIMEOUT) -> int:
        """Run one autocommit statement; the number of rows it changed.

        Once more after a deadlock, which leaves nothing of it: instances that start together write the same rows.
        """
        async with self.opened() as connection:
            sql = self._server.spell(statement)
            for _ in range(MOST_DEADLOCKS):
                try:
                    return await execute(connection, sql, args, timeout)
                except Exception as error:
                    if errors.number(error) != errors.DEADLOCK:
                        raise
            return await execute(connection, sql, args, timeout)

    async def in_transaction(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` on the connection in one transaction, committed unless it raises."""

        async def whole(connection: Any, begin: str, commit: str) -> Any:
            await execute(connection, begin)
            result = await work(connection)
            await execute(connection, commit)
            return result

        return await self.in_transaction_of(whole)

    async def in_transaction_of(self, work: Callable[[Any, str, str], Awaitable[Any]]) -> Any:
        """Run ``work`` in a transaction that it begins and commits itself, in one message with its own statements.

        It is given what begins one, and what commits it. If it raises, what there is of it is rolled back.
        """
        async with self.opened() as connection:
            impatient = patient = ""
            if self._longest_silence is not None:
                impatient = f"; {_set({'wait_timeout': self._longest_silence})}"
                patient = f"; {_set({'wait_timeout': self._before['wait_timeout']})}"
            try:
                return await work(connection, f"START TRANSACTION{impatient}", f"COMMIT{patient}")
            except BaseException:
                await to_the_end(self._roll_back(connection, patient))
                raise

    async def _roll_back(self, connection: Any, patient: str) -> None:
        if not self.is_closed(connection):
            try:
                await execute(connection, f"ROLLBACK{patient}", timeout=FAREWELL_TIMEOUT)
            except Exception:
                self.drop(connection)

    async def prepare(self, connection: Any) -> None:
        flavour = self._server.flavour
        settings = {
            **self._settings,
            flavour.isolation: "READ-COMMITTED",
            "collation_connection": flavour.collation,
        }
        read = list(dict.fromkeys((*settings, "wait_timeout")))
        names = ", ".join(f"@@SESSION.{name}" for name in read)
        (before,) = await fetch(connection, f"SELECT @@max_allowed_packet, {names}")
        self._server.largest_packet = before[0]
        self._before = dict(zip(read, before[1:], strict=True))
        await execute(connection, _set(settings))

    async def restore(self, connection: Any) -> None:
        await execute(connection, _set(self._before), timeout=FAREWELL_TIMEOUT)

    def is_closed(self, connection: Any) -> bool:
        return is_closed(connection)

    def drop(self, connection: Any) -> None:
        drop(connection)


def quiet_cursor(connection: Any) -> Any:
    """A cursor that asks for no warnings."""
    driver = driver_of(connection)
    return driver.cursor(connection, driver.QuietCursor)


async def execute_each(connection: Any, sql: str, args: Arguments = None) -> list[int]:
    """Run several statements in one message; the number of rows that each changed."""
    counts: list[int] = []
    async with asyncio.timeout(STATEMENT_TIMEOUT):
        cursor = quiet_cursor(connection)
        await cursor.execute(sql, args)
        has_more = True
        while has_more:
            counts.append(int(cursor.rowcount))
            has_more = await cursor.nextset()
    return counts


async def send(connection: Any, message: bytes, server: Server) -> None:
    """Run statements whose answers say nothing but that they have worked."""
    server.unanswered.begin(connection, drop)
    try:
        await driver_of(connection).send(connection, message)
    finally:
        server.unanswered.end(connection)


async def run(connection: Any, sql: str | bytes, args: Arguments = None, timeout: float = STATEMENT_TIMEOUT) -> Any:
    """Run a statement, or several with semicolons between them; the cursor after the last one."""
    async with asyncio.timeout(timeout):
        cursor = quiet_cursor(connection)
        await cursor.execute(sql, args)
        while await cursor.nextset():
            pass
    return cursor


async def fetch(
    connection: Any, sql: str, args: Arguments = None, timeout: float = STATEMENT_TIMEOUT
) -> list[tuple[Any, ...]]:
    cursor = await run(connection, sql, args, timeout)
    return list(await driver_of(connection).rows(cursor))


async def fetch_each(connection: Any, sql: str, args: Arguments = None) -> list[list[tuple[Any, ...]]]:
    """The rows of each of several statements that has any."""
    results: list[list[tuple[Any, ...]]] = []
    rows = driver_of(connection).rows
    async with asyncio.timeout(STATEMENT_TIMEOUT):
        cursor = quiet_cursor(connection)
        await cursor.execute(sql, args)
        has_more = True
        while has_more:
            if cursor.description is not None:
                results.append(list(await rows(cursor)))
            has_more = await cursor.nextset()
    return results


async def execute(connection: Any, sql: str | bytes, args: Arguments = None, timeout: float = STATEMENT_TIMEOUT) -> int:
    cursor = await run(connection, sql, args, timeout)
    return int(cursor.rowcount)


def is_closed(connection: Any) -> bool:
    """Whether the connection is of no use: closed here, or by the server."""
    return driver_of(connection).is_closed(connection)


def is_usable(connection: Any) -> bool:
    """Whether somebody else may have it: it is not lost, and has no transaction open."""
    return not (is_closed(connection) or connection.get_transaction_status())


async def hang_up(connection: Any) -> None:
    """Say goodbye, and wait until its socket is closed: TLS says a goodbye of its own, which must not outlive the loop.

    A server that has nothing to say to that is waited for no longer than FAREWELL_TIMEOUT.
    """
    if is_closed(connection):
        drop(connection)
        return
    driver = driver_of(connection)
    transport = driver.transport(connection)
    try:
        async with asyncio.timeout(FAREWELL_TIMEOUT):
            await driver.say_goodbye(connection)
    except BaseException:
        if transport is not None:
            transport.abort()
        raise


def drop(connection: Any) -> None:
    """Close it at once: what is still to be sent is of no interest any more."""
    transport = driver_of(connection).transport(connection)
    if transport is not None:
        with suppress(Exception):
            transport.abort()
    connection.close()


def id_list(ids: Iterable[UUID | str]) -> str:
    """Ids as the inside of ``IN (...)``: they are UUIDs, so there is nothing in them to escape."""
    return msgspec.json.encode(list(ids)).decode()[1:-1].replace('"', "'")


def _set(settings: Mapping[str, Any]) -> str:
    return "SET " + ", ".join(f"@@SESSION.{name} = {_literal(value)}" for name, value in settings.items())


def _literal(value: Any) -> str:
    return str(int(value)) if isinstance(value, int) else f"'{value}'"
