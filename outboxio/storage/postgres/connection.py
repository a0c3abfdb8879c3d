"""Connections of the loops, over asyncpg."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import asyncpg

from outboxio.storage.dedicated import FAREWELL_TIMEOUT, STATEMENT_TIMEOUT, Connect, DedicatedConnection, Release

# The loops' statements are written for one plan each. These keep it whatever the statistics say, and keep the
# database's own defaults (a serializable one, say) from changing what they mean.
LOOP_SETTINGS: Mapping[str, str] = {
    "default_transaction_isolation": "read committed",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}


class Dedicated(DedicatedConnection):
    """One connection for one loop.

    A statement with parameters is prepared when it is used for the first time, in a message of its own. If the client
    freezes, or the network falls silent, before the next message, the server's session is neither idle nor idle in a
    transaction, so no timeout ends it, and it keeps its locks. So whoever holds locks here runs statements that were
    prepared before it took them, or that have no parameters.
    """

    def __init__(self, connect: Connect, release: Release, settings: Mapping[str, str], *, keeps: bool = True) -> None:
        super().__init__(connect, release, keeps=keeps)
        self._settings = dict(settings)

    def set(self, name: str, value: str) -> None:
        """Apply a session setting as well, from the next opening on."""
        self._settings[name] = value

    async def fetch(self, sql: str, *args: Any, timeout: float = STATEMENT_TIMEOUT) -> list[Any]:
        """Run one autocommit statement; its rows."""
        async with self.opened() as connection:
            rows: list[Any] = await connection.fetch(sql, *args, timeout=timeout)
            return rows

    async def execute(self, sql: str, *args: Any, timeout: float = STATEMENT_TIMEOUT) -> int:
        """Run one autocommit statement; the number of rows it touched."""
        async with self.opened() as connection:
            return row_count(await connection.execute(sql, *args, timeout=timeout))

    async def in_transaction(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` on the connection in one transaction, committed unless it raises."""
        async with self.opened() as connection:
            has_begun = False
            try:
                async with connection.transaction():
                    has_begun = True
                    return await work(connection)
            except BaseException as error:
                # Where BEGIN or ROLLBACK was cut short it may be open, and whatever came next would be part of it.
                if not (has_begun and isinstance(error, Exception) and is_usable(connection)):
                    self.drop(connection)
                raise

    async def prepare(self, connection: Any) -> None:
        await connection.execute("; ".join(f"SET {name} = '{value}'" for name, value in self._settings.items()))

    async def restore(self, connection: Any) -> None:
        await connection.execute("; ".join(f"RESET {name}" for name in self._settings), timeout=FAREWELL_TIMEOUT)

    def is_closed(self, connection: Any) -> bool:
        """Whether the connection is of no use; a pool takes one back by itself when the server ends it."""
        try:
            return bool(connection.is_closed())
        except asyncpg.InterfaceError:
            return True

    def drop(self, connection: Any) -> None:
        drop(connection)


def is_usable(connection: Any) -> bool:
    """Whether somebody else may have it: it is not lost, and has no transaction open."""
    return not (connection.is_closed() or connection.is_in_transaction())


def drop(connection: Any) -> None:
    """Close it at once."""
    with suppress(asyncpg.InterfaceError):  # its pool has it back already
        connection.terminate()


def as_texts(values: Iterable[Any]) -> list[str | None]:
    """Values for a parameter ``$1::text[]::bigint[]``, or of another type.

    The driver asks the server about every array type but this one, on each new connection anew, and for 20 ms.
    """
    return [None if value is None else str(value) for value in values]


def row_count(status: str) -> int:
    """The number in a command tag such as ``UPDATE 3``; 0 where there is none."""
    number = status.rpartition(" ")[2]
    return int(number) if number.isdecimal() else 0
